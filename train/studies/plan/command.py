"""`mupax plan RECIPE --tokens 10b --from FOLDER`: a run's whole config, its cost and its loss, before it is run.

Memory, time and cost come from the TPU compiler where there is one, else from the formula in use, which is said.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Repeated
from mupax.presets import PresetError
from mupax.terminal import gib
from mupax.train.config import cli, joint, sizes
from mupax.train.config.checks import at_least
from mupax.train.config.preset import rules_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import command_of, words_of
from mupax.train.config.run import Config
from mupax.train.studies.forecast.points import Points
from mupax.train.studies.plan import ranges
from mupax.train.studies.report import Report, Section, Step, write_json
from mupax.train.studies.sweep.grids import without_flags
from mupax.train.studies.tables import command as tables_command
from mupax.train.studies.transfer.planned import label_of
from mupax.zoo import families
from mupax.zoo.configs import CONFIGS, ConfigError

if TYPE_CHECKING:
    from mupax.train.studies.plan.numbers import PlanRow

PROG = "mupax plan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's whole config, its memory, time, cost and loss, each with the rule or study that it comes from.

    The learning rate and the loss are those of a law fitted to the rows of studies (--from), with 90 % intervals, and cautions
    where it goes beyond what was measured or where published rules contradict each other. A model is planned as the study's run was:
    its data, batch, optimizer, clip, preset and base, where no flag says otherwise. A recipe has its own, and a caution names
    what in them keeps the study's rate from being used. With --chips mesh and remat are those
    that the TPU compiler finds to fit. What is not listed here is a flag of the recipe (`mupax train RECIPE --help`).
    `mupax plan score FORECAST PLACE` holds a forecast, or a plan, against the run that came.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE|MODEL")]
    """A recipe of `mupax train`, or a config file (also `--config FILE`); or a model of `mupax models`, for the run of the study.
    `--model NAME` alone says the same."""
    tokens: Annotated[str | None, conf.arg(metavar="N")] = None
    """Tokens, or images, to see: 10b, 300m, 2e9; the recipe's own unless given. Warm-up stays the same fraction of the run."""
    studies: Annotated[Repeated, conf.arg(aliases=("--from",), metavar="FOLDER")] = ()
    """A folder of `mupax transfer` or `sweep`, which may come several times, or a table of anybody's runs (CSV, JSONL). Without one the
    recipe's numbers stay, and a model alone is planned by the best evidence that comes with mupax."""
    chips: Annotated[str | None, conf.arg(metavar="CHIP:AxB")] = None
    """v5e:16x16, v5p:4x4x4, ...; this machine unless given."""
    slices: Annotated[int, conf.arg(metavar="N")] = 1
    """So many of them, joined by the slow network."""
    limit: Annotated[int, conf.arg(metavar="N")] = 3
    """With --chips: compile at most so many meshes, remat policies and microbatches; 0 compiles the recipe's own."""
    price: Annotated[float | None, conf.arg(metavar="X")] = None
    """Of a chip, or of this machine, for an hour."""
    mfu: Annotated[float | None, conf.arg(metavar="X")] = None
    """Utilization to count with, as 0.4; the compiler's upper bound, or the study's own speed, unless given."""
    tokens_per_second: Annotated[float | None, conf.arg(metavar="X")] = None
    """Throughput of all devices, where it has been measured."""
    out: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the plan, and the forecast in it, as JSON."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "slices")
        at_least("--", self, 0, "limit", "price")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise ConfigError(f"--mfu is {self.mfu}; write a share in (0, 1], as 0.4")
        if self.tokens_per_second is not None and not self.tokens_per_second > 0:
            raise ConfigError(
                f"--tokens-per-second is {self.tokens_per_second}; write a number above 0"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """A run, and where what nobody wrote a flag for is from.

    Attributes:
        config: of the run.
        source: the recipe or the study, for a person.
    """

    config: Config
    source: str


def with_name(argv: Sequence[str]) -> list[str]:
    """The words with the name behind `--model` as their first, where no recipe or model is named by itself.

    Args:
        argv: the words after `plan`.
    """
    model = cli.value_of("--model", argv)
    before = ["", *argv]
    alone = any(
        (word in RECIPES or word in CONFIGS or cli.is_file(word))
        and (not last.startswith("--") or "=" in last)
        for last, word in zip(before, argv, strict=False)
    )
    first = bool(argv) and not argv[0].startswith("-")
    return [*argv] if model is None or alone or first else [model, *argv]


def run_of(args: Plan, rest: Sequence[str], studies: Sequence[Points]) -> Request:
    """The run that is asked for.

    Args:
        args: flags of the command.
        rest: flags of the recipe.
        studies: of which the first with the run's preset lends its settings to a command that names a model.

    Raises:
        ConfigError, UsageError, PresetError: what does not fit, or a word that is neither recipe nor model.
    """
    if args.tokens and any(word.partition("=")[0] == "--steps" for word in rest):
        raise ConfigError("--tokens and --steps both say how long the run is; write one of them")
    name, words, flag = args.recipe, [*rest], cli.value_of("--model", rest)
    if flag in RECIPES and flag not in CONFIGS:  # `--model gpt2-c4`: cli knows models alone
        if flag != name:
            raise ConfigError(f"{name} and --model {flag}: {flag} is a recipe; write one of them")
        words, _ = without_flags(words, ("--model",))
    if name in CONFIGS and flag not in (None, name) and name not in RECIPES:
        raise ConfigError(f"{name} and --model {flag} are two models; write one of them")
    named = name in CONFIGS and (name not in RECIPES or (flag == name and bool(studies)))
    if named and not studies:
        raise ConfigError(
            f"{name} is a model; write a recipe and --model {name}, or the study to plan from behind --from"
        )
    if not named:
        return Request(_parsed(args, name, None, words), f"recipe {name}")
    words = words if flag else ["--model", name, *words]
    runs = ((_lent(args, study, words), study) for study in studies)
    first = None
    for config, study in runs:
        first = first or Request(config, f"study {' and '.join(study.folders)}")
        if rules_of(config) == rules_of(study.settings[-1].config):
            return dataclasses.replace(first, config=config)
    assert first is not None  # there are studies
    return first


def _parsed(args: Plan, recipe: str, study: Points | None, words: Sequence[str]) -> Config:
    """The recipe, or the study's run, with flags, at the tokens that are asked for."""
    durations = [
        flag
        for flag in joint.DURATIONS
        if any(word.partition("=")[0].replace("_", "-").endswith(flag) for word in words)
    ]
    if args.tokens and durations:
        raise ConfigError(
            f"--optimizer.{durations[0]} is of the run's steps, which --tokens changes; write --steps N in place of --tokens"
        )
    start = cli.recipe(recipe)
    make = start if study is None else lambda: _of_study(start(), study.settings[-1].config)
    config = dataclasses.replace(
        cli.parse(recipe, make, words, command_line.flags(Plan)).config, workdir=None
    )
    if not args.tokens:
        return config
    each = config.data.batch_size * config.model.units
    steps = max(1, round(joint.amount("--tokens", args.tokens) / each))
    longer = sizes.grown_run(config, "tokens", steps * each)
    own = config.preset.joint != "none" or any(
        word.startswith("--optimizer.warmup") for word in words
    )
    return dataclasses.replace(longer, optimizer=config.optimizer) if own else longer


def _lent(args: Plan, study: Points, words: Sequence[str]) -> Config:
    """The study's run with flags; its preset may not be for the model that these name."""
    setting = study.settings[-1].config
    try:
        return _parsed(args, setting.recipe, study, words)
    except PresetError as error:
        raise PresetError(
            f"under the settings of the study ({label_of(setting.preset)}): {error}; write --preset.constants with those to keep, or "
            "a recipe first, whose own preset then stays"
        ) from error


def _of_study(recipe: Config, setting: Config) -> Config:
    """The recipe with all that a rate and a loss were measured at; its own rate, seeds, and how and where it runs.

    Args:
        recipe: of the study.
        setting: a run of it.
    """
    data = dataclasses.replace(
        setting.data, seed=recipe.data.seed, eval_batch_size=recipe.data.eval_batch_size
    )
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(setting.model, compute=recipe.model.compute),
        data=data,
        preset=setting.preset,
        optimizer=dataclasses.replace(setting.optimizer, peak_lr=recipe.optimizer.peak_lr),
        ema=setting.ema,
        freeze=setting.freeze,
        train_only=setting.train_only,
        steps=setting.steps,
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run takes.

    Attributes:
        rows: of the plan's table.
        cautions: a sentence each.
        fits: whether the memory is enough, as far as that is known.
    """

    rows: tuple[PlanRow, ...]
    cautions: tuple[str, ...] = ()
    fits: bool = True


def of(config: Config, args: Plan, studies: Sequence[Points]) -> tuple[Config, Cost]:
    """The run with its mesh and remat, and what it takes.

    Args:
        config: of the run.
        args: flags of the command.
        studies: rows whose speed is this machine's.
    """
    return _on_chips(config, args) if args.chips else (config, _here(config, args, studies))


def _on_chips(config: Config, args: Plan) -> tuple[Config, Cost]:
    from mupax.train.pods import topology

    assert args.chips is not None
    chip, count = topology.chip_of(args.chips), _count(args.chips) * args.slices
    where = f"{args.chips}" + (f" x {args.slices} slices" if args.slices > 1 else "")
    try:
        topology.ready()
    except topology.TopologyError as error:
        return config, _formula(config, args, count, chip, where, str(error))
    if args.limit:
        from mupax.train.pods import search

        # The batch stays: rate, steps and loss are of it.
        report: dict[str, Any] = search.search(config, args.chips, args.slices, args.limit, (1,))[0]
        config = _with_flags(config, shlex.split(report["flags"]))
    else:
        from mupax.train.pods.compiled import compile_for

        report = compile_for(config, args.chips, args.slices).report()
    line, peak, room = (
        report["roofline"],
        report["peak_bytes_per_device"],
        report["hbm_bytes_per_device"],
    )
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items()) or "one device"
    compiler = f"TPU compiler for {where}"
    rows: list[PlanRow] = [
        ("mesh", f"{mesh} ({count} chips)", "", compiler),
        (
            "remat",
            f"{report['compute']['remat']}, {report['accumulation_steps']} microbatches",
            "",
            compiler,
        ),
        ("memory", f"{gib(peak)} of {gib(room)} a chip", ranges.NONE, compiler),
    ]
    if not report["fits"]:
        return config, Cost(
            tuple(rows),
            (f"does not fit {where} by {gib(peak - room)}; write more chips or a smaller batch",),
            False,
        )
    step, band = line["step_seconds"], None
    if args.tokens_per_second or args.mfu:
        step, source = _speed(config, args, count * chip.peak_flops)
    else:
        band, upper = ranges.of_roofline(step, line["mfu"])
        source = f"roofline of the compiled step, a bound from below (MFU at most {line['mfu']:.0%}), {upper}"
    return config, Cost((*rows, *_time(config, args, step, source, count, band)))


def _state_bytes(config: Config) -> int:
    """Return the bytes of a run's whole state, from shapes alone: parameters, moments, an average, and the gradients."""
    import jax

    from mupax.train.reuse import runs

    program = runs.on_one_device(config)
    leaves = jax.tree.leaves(program.abstract)
    gradients = [program.abstract.params[name] for name in program.trained]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in [*leaves, *gradients])


def _formula(config: Config, args: Plan, count: int, chip: Any, where: str, why: str) -> Cost:
    """Without the compiler: the state alone, over all chips, and the time at a utilization that is given."""
    state = _state_bytes(config) / count
    rows: list[PlanRow] = [
        (
            "memory",
            f"{gib(int(state))} of {gib(chip.hbm_bytes)} a chip",
            f"at least {gib(int(state))}",
            "formula: state alone, split over all chips",
        )
    ]
    cautions = [f"memory of activations, mesh and remat are not known: {why}"]
    if not (args.mfu or args.tokens_per_second):
        cautions.append(
            "time is not known without the compiler; write --mfu or --tokens-per-second"
        )
        return Cost(tuple(rows), tuple(cautions), state < chip.hbm_bytes)
    step, source = _speed(config, args, count * chip.peak_flops)
    return Cost(
        (*rows, *_time(config, args, step, source, count)), tuple(cautions), state < chip.hbm_bytes
    )


def _here(config: Config, args: Plan, studies: Sequence[Points]) -> Cost:
    """On the devices of this process."""
    from mupax.train.core.program import assemble
    from mupax.train.parallel.sharding import described
    from mupax.train.pods import estimates

    program = assemble(config)
    expected = sum(estimates.expected(program).values())
    kind = program.mesh.devices.flat[0].device_kind
    memory, most = ranges.memory(expected)
    rows: list[PlanRow] = [
        ("mesh", f"{described(program.mesh.shape)} ({kind})", "", "this machine"),
        ("remat", config.model.compute.remat, "", f"recipe {config.recipe}"),
        (
            "memory",
            f"about {gib(expected)} a device",
            memory,
            f"formula of train/pods/estimates.py, from sizes; {most}",
        ),
    ]
    settings = [setting for points in studies for setting in points.settings if setting.seconds > 0]
    if args.tokens_per_second or args.mfu:
        from mupax.train.parallel import hardware

        peak = hardware.peak_flops(kind, config.model.compute.dtype)
        if args.tokens_per_second is None and peak is None:
            return Cost(
                tuple(rows),
                (
                    f"time is not known: nothing is known of the peak of {kind}; write --tokens-per-second",
                ),
            )
        return Cost(
            (*rows, *_time(config, args, *_speed(config, args, (peak or 0) * program.mesh.size), 1))
        )
    if not settings:
        return Cost(
            tuple(rows),
            (
                "time is not known: write --tokens-per-second, or a study of this machine behind --from",
            ),
        )
    products = [families.train_flops(setting.config.model) * setting.tokens for setting in settings]
    speeds = [
        product / setting.seconds for product, setting in zip(products, settings, strict=True)
    ]
    speed = speeds[products.index(max(products))]
    step = _step_flops(config) / speed
    band, spread = ranges.of_settings(step, speed, speeds)
    source = ", ".join(
        filter(
            None,
            [
                f"{speed:.3g} FLOP/s of the study's largest rows, wherever these were trained",
                spread,
            ],
        )
    )
    return Cost((*rows, *_time(config, args, step, source, 1, band)))


def _speed(config: Config, args: Plan, peak: float) -> tuple[float, str]:
    """Seconds of a step, and where that is from."""
    if args.tokens_per_second:
        seconds = config.data.batch_size * config.model.units / args.tokens_per_second
        return seconds, f"--tokens-per-second {args.tokens_per_second:g}"
    assert args.mfu is not None
    return _step_flops(config) / (peak * args.mfu), f"--mfu {args.mfu:g}"


def _step_flops(config: Config) -> float:
    return families.train_flops(config.model) * config.data.batch_size * config.model.units


def _time(
    config: Config, args: Plan, step: float, source: str, count: int, band: ranges.Range = None
) -> list[PlanRow]:
    """Time, FLOPs and cost.

    Args:
        config: of the run.
        args: has the price.
        step: seconds of one.
        source: of these.
        count: devices that are paid for.
        band: seconds of a step, lowest and highest.
    """
    seconds = config.steps * step
    unit, name = (3600, "h") if seconds >= 3600 else (60, "min") if seconds > 60 else (1, "s")
    rows: list[PlanRow] = [
        (
            "time",
            f"{seconds / unit:,.1f} {name}, {step:.3g} s a step",
            ranges.text(band, config.steps / unit, f"{{:,.1f}} {name}"),
            source,
        ),
        (
            "FLOPs",
            f"{_step_flops(config) * config.steps:.3g}",
            "",
            "counted, without recomputation",
        ),
    ]
    if args.price is not None:
        hours = seconds / 3600
        bill = count * args.price
        from_ = f"{count} x {hours:,.2f} h at {args.price:g} an hour"
        rows.append(
            (
                "cost",
                f"{hours * bill:,.2f}",
                ranges.text(band, config.steps / 3600 * bill, "{:,.2f}"),
                from_,
            )
        )
    return rows


def _with_flags(config: Config, flags: Sequence[str]) -> Config:
    """Return the config of a run after further flags, without its workdir.

    The flags are parsed after those that turn the recipe into the run, so they win.

    Args:
        flags: Words such as `--mesh.fsdp`, `16`.
    """
    argv = words_of(command_of(config))[2:]  # without `train` and the recipe
    return dataclasses.replace(
        cli.parse(config.recipe, cli.recipe(config.recipe), [*argv, *flags]).config, workdir=None
    )


def _count(chips: str) -> int:
    return math.prod(map(int, chips.partition(":")[2].split("x")))


def main(argv: Sequence[str]) -> int:
    """Plans and prints: 0, or 1 where the run does not fit the chips; raises as `run_of`.

    Args:
        argv: the words after `plan`; `score` as the first hands the others to `mupax.train.studies.plan.score`.
    """
    if argv[:1] == ["score"]:
        from mupax.train.studies.plan import score

        return score.main(argv[1:])
    if tables_command.asks_for_table(argv):
        return tables_command.main(argv)

    args, rest = command_line.parse_known(Plan, PROG, with_name(cli.with_file_first(argv)))
    if args.chips:
        from mupax.train.pods import topology

        topology.chip_of(args.chips)  # refused before anything is read
    model = _model_alone(args, rest)
    if model is not None:
        return _plan_from_evidence(model, args, rest)
    from mupax.train.studies.forecast import points
    from mupax.train.studies.plan import numbers

    studies = points.load([Path(folder) for folder in args.studies]) if args.studies else []
    request = run_of(args, rest, studies)
    keep_rate = any(
        word.partition("=")[0].replace("_", "-") == "--optimizer.peak-lr" for word in rest
    )
    learnt = numbers.of_law(request.config, studies, keep_rate=keep_rate)
    config, costs = of(learnt.config, args, studies)
    rows, cautions = (
        [*numbers.rows(config, learnt, request.source), *costs.rows],
        [*learnt.cautions, *costs.cautions],
    )
    command = command_of(config) or "(no recipe has its name)"
    Report(
        [_conclusion(args.recipe, config, rows, fits=costs.fits)],
        [Step("Next: train it", command)],
        [Section(terminal.filled([("", "value", "interval", "from"), *rows]))],
        [f"caution: {caution}" for caution in cautions],
    ).show()
    forecast = learnt.forecast(config, shlex.join([*argv]))
    if args.out is not None:
        keys = ("what", "value", "interval", "from")
        content = {
            "format": "plan 1",
            "asked": f"{PROG} {shlex.join(argv)}",
            "command": command,
            "numbers": [dict(zip(keys, row, strict=True)) for row in rows],
            "cautions": cautions,
            "forecast": forecast,
        }
        write_json(args.out, content)
        again = (
            f"; `{PROG} score {shlex.quote(str(args.out))} WORKDIR` holds it against what came"
            if forecast
            else ""
        )
        terminal.say(f"plan in {args.out}{again}")
    return 0 if costs.fits else 1


def _model_alone(args: Plan, rest: Sequence[str]) -> str | None:
    """Return the model of a command that names neither a recipe nor a study; None where it names one.

    Some recipes have the name of their model: with `--model` and no flag of a recipe that is the model.
    """
    name = args.recipe
    flag = cli.value_of("--model", rest)
    if args.studies or name not in CONFIGS or flag not in (None, name):
        return None
    if name not in RECIPES:
        return name
    words, _ = without_flags(rest, ("--model",))
    is_model = flag == name and args.tokens is not None and not words and not _costs(args)
    return name if is_model else None


def _costs(args: Plan) -> list[str]:
    """Return the flags of a plan that ask what a run costs."""
    values = {
        "--chips": args.chips,
        "--price": args.price,
        "--mfu": args.mfu,
        "--tokens-per-second": args.tokens_per_second,
    }
    return [flag for flag, value in values.items() if value is not None]


def _plan_from_evidence(model: str, args: Plan, rest: Sequence[str]) -> int:
    """Plan a model from the best evidence that applies."""
    from mupax.train.studies.plan import evidence

    words, _ = without_flags(rest, ("--model",))
    words += _costs(args)
    if words:
        raise ConfigError(
            f"{words[0]} is of a recipe's run, and {model} is a model; write a recipe and --model {model}, or the study to plan from "
            "behind --from"
        )
    if args.tokens is None:
        raise ConfigError(f"say how long {model} will train: write --tokens N, as 10b")
    return evidence.plan(model, joint.amount("--tokens", args.tokens), args.out)


def _conclusion(recipe: str, config: Config, rows: Sequence[PlanRow], *, fits: bool) -> str:
    """Return what the plan comes to, in a sentence: rate, loss and time, or that the run does not fit."""
    value = {row[0]: row[1] for row in rows}
    interval = {row[0]: row[2] for row in rows}
    run = f"{recipe}: {config.steps:,} steps at a peak rate of {value['peak rate']}"
    if not fits:
        return f"{run} do not fit the chips; the last caution says by how much"
    time = f", in {value['time'].partition(',')[0]}" if "time" in value else ""
    if value["loss"] == ranges.NOT_PREDICTED:
        return f"{run}{time}; no loss is predicted (see the cautions)"
    return f"{run} should end at a loss of {value['loss']} [{interval['loss']}]{time}"
