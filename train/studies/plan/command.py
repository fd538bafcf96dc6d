"""`mupax plan RECIPE --tokens 10b --from FOLDER`: config, cost and loss of a run before training.

Memory, time and cost come from the chips' compiler where there is one, otherwise from a formula.
The source is printed beside each value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Repeated
from mupax.presets import PresetError
from mupax.terminal import counted, gib
from mupax.train.config import cli, joint, sizes
from mupax.train.config.checks import at_least, check_outputs
from mupax.train.config.preset import rules_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import command_of, words_of
from mupax.train.config.run import Config
from mupax.train.studies.forecast import ranges
from mupax.train.studies.forecast.points import Points
from mupax.train.studies.forecast.ranges import PlanRow
from mupax.train.studies.report import Report, Section, Step, write_json
from mupax.train.studies.sweep.grids import without_flags
from mupax.train.studies.tables import command as tables_command
from mupax.train.studies.transfer.planned import label_of
from mupax.zoo import families
from mupax.zoo.configs import CONFIGS, ConfigError

if TYPE_CHECKING:
    from mupax.train.pods.topology import Chip

PROG = "mupax plan"
COLUMNS = ("what", "value", "interval", "from")
"""Keys of a row of the plan in its JSON file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan a run: its config, memory, time, cost and loss, each with its source.

    Learning rate and loss come from a law fitted to the rows of studies (--from), with 90 %
    intervals. Cautions say where the law goes beyond what was measured, and where published rules
    contradict each other. A model is planned as the study's run was (data, batch, optimizer, clip,
    preset and base), where no flag says otherwise. A recipe has its own settings, and a caution
    names those that keep the study's rate from being used. With --chips, mesh and remat are those
    that the chips' compiler finds to fit. What is not listed here is a flag of the recipe
    (`mupax train RECIPE --help`). `mupax plan score FORECAST PLACE` compares a forecast, or a plan,
    with its finished run.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE|MODEL")]
    """A recipe of `mupax train`, or a config file (also `--config FILE`). Or a model of `mupax
    models`, for the run of the study; `--model NAME` alone says the same."""
    tokens: Annotated[str | None, conf.arg(metavar="N")] = None
    """Number of tokens, or images, of the run: 10b, 300m, 2e9; the recipe's own unless given.
    Warm-up stays the same fraction of the run."""
    studies: Annotated[Repeated, conf.arg(aliases=("--from",), metavar="FOLDER")] = ()
    """A folder of `mupax transfer` or `sweep`, which may come several times, or a table of
    anybody's runs (CSV, JSONL). Without one the recipe's settings stay, and a model alone is
    planned by the best evidence that comes with mupax."""
    chips: Annotated[str | None, conf.arg(metavar="CHIP:SHAPE")] = None
    """v5e:16x16, v5p:4x4x4, ...; this machine unless given."""
    slices: Annotated[int, conf.arg(metavar="N")] = 1
    """Number of such slices, joined by the slow network."""
    limit: Annotated[int, conf.arg(metavar="N")] = 3
    """With --chips: most combinations of mesh, remat policy and microbatches to compile; 0 compiles
    the recipe's own."""
    price: Annotated[float | None, conf.arg(metavar="X")] = None
    """Price of a chip, or of this machine, per hour."""
    mfu: Annotated[float | None, conf.arg(metavar="X")] = None
    """Model FLOPs utilization for the time, as 0.4; the compiler's upper bound, or the study's own
    speed, unless given."""
    tokens_per_second: Annotated[float | None, conf.arg(metavar="X")] = None
    """Throughput of all devices together, where it has been measured."""
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

    @property
    def has_speed(self) -> bool:
        """True if `--tokens-per-second` or `--mfu` is given."""
        return bool(self.tokens_per_second or self.mfu)


@dataclasses.dataclass(frozen=True)
class Request:
    """Run to plan, as a command line asks for it.

    Attributes:
        config: The run.
        source: Origin of the settings that no flag sets, such as "recipe NAME" or "study FOLDER".
    """

    config: Config
    source: str


def with_name(argv: Sequence[str]) -> list[str]:
    """Return the words of a command, beginning with the model of `--model` if no run is named.

    The words are returned unchanged if there is no `--model` or if they name a run already. They do
    so if the first word is no flag, or if a word that is not a flag's value is a recipe, model or
    file.

    Args:
        argv: Words of the command line after `plan`.
    """
    model = cli.value_of("--model", argv)
    begins_with_name = bool(argv) and not argv[0].startswith("-")
    if model is None or begins_with_name:
        return [*argv]
    for previous, word in zip(["", *argv], argv, strict=False):
        is_name = word in RECIPES or word in CONFIGS or cli.is_file(word)
        is_value = previous.startswith("--") and "=" not in previous
        # A word after a flag is its value, unless the flag has its own behind `=`.
        if is_name and not is_value:
            return [*argv]
    return [model, *argv]


def run_of(args: Plan, recipe_flags: Sequence[str], studies: Sequence[Points]) -> Request:
    """Return the config of the run that a command line asks for, at the tokens of `--tokens`.

    Args:
        args: Flags of `mupax plan`.
        recipe_flags: Words of the command line that are flags of the recipe.
        studies: Rows by preset. A model without a recipe gets the settings of the first study whose
            preset has equal rules in the study and in the run after the flags. If there is none, it
            gets the settings of the first study.

    Raises:
        ConfigError: Two words contradict each other, a value does not fit, or a model alone has no
            study.
        UsageError: The word is neither recipe nor model, or a flag is unknown.
        PresetError: The study's preset is not for the model.
    """
    if args.tokens and any(word.partition("=")[0] == "--steps" for word in recipe_flags):
        raise ConfigError("--tokens and --steps both say how long the run is; write one of them")
    name = args.recipe
    words = [*recipe_flags]
    model = cli.value_of("--model", recipe_flags)
    if model in RECIPES and model not in CONFIGS:
        # `--model gpt2-c4` means the recipe of this name. The flag is removed, because `cli` would
        # look for a model of this name.
        if model != name:
            raise ConfigError(f"{name} and --model {model}: {model} is a recipe; write one of them")
        words, _ = without_flags(words, ("--model",))
    if name in CONFIGS and model not in (None, name) and name not in RECIPES:
        raise ConfigError(f"{name} and --model {model} are two models; write one of them")

    is_model = name in CONFIGS and name not in RECIPES
    if name in CONFIGS and name in RECIPES:
        # The name is both a recipe and a model. It means the model if `--model` repeats it and
        # there is a study.
        is_model = model == name and bool(studies)
    if not is_model:
        return Request(_parsed(args, name, None, words), f"recipe {name}")
    if not studies:
        raise ConfigError(
            f"{name} is a model; write a recipe and --model {name}, "
            f"or the study to plan from behind --from"
        )

    if not model:
        words = ["--model", name, *words]
    source = f"study {' and '.join(studies[0].folders)}"
    runs = []
    for study in studies:
        config = _study_run(args, study, words)
        if rules_of(config) == rules_of(study.settings[-1].config):
            return Request(config, source)
        runs.append(config)
    return Request(runs[0], source)


def _parsed(args: Plan, recipe: str, setting: Config | None, words: Sequence[str]) -> Config:
    """Return a recipe's run, or a study's, with flags applied and with the length of `--tokens`.

    `--tokens` is rounded to whole steps. Warm-up stays the same fraction of the run, unless a flag
    or a joint rule sets it. The workdir is removed.

    Args:
        recipe: Name of the recipe, or of the recipe of the study.
        setting: Run of the study, whose settings replace the recipe's. `None` keeps the recipe's.
        words: Flags of the recipe, such as `--steps 800`.

    Raises:
        ConfigError: `--tokens` is given with a flag that is relative to the run's steps.
    """
    names = _flag_names(words)
    durations = []
    for flag in joint.DURATIONS:
        if any(name.endswith(flag) for name in names):
            durations.append(flag)
    if args.tokens and durations:
        raise ConfigError(
            f"--optimizer.{durations[0]} depends on the run's steps, which --tokens changes; "
            f"write --steps N in place of --tokens"
        )

    start = cli.recipe(recipe)

    def with_setting() -> Config:
        assert setting is not None
        return _with_settings(start(), setting)

    make = start if setting is None else with_setting
    parsed = cli.parse(recipe, make, words, command_line.flags(Plan))
    cli.refuse_session_flags(PROG, parsed, ("dry_run",))
    config = dataclasses.replace(parsed.config, workdir=None)
    if not args.tokens:
        return config

    # A whole number of steps, so that the tokens are rounded and not the batch.
    tokens_per_step = config.data.batch_size * config.model.units
    steps = max(1, round(joint.amount("--tokens", args.tokens) / tokens_per_step))
    longer = sizes.grown_run(config, "tokens", steps * tokens_per_step)
    # A joint rule scales the warm-up itself, and a written warm-up stays.
    is_warmup_set = any(word.startswith("--optimizer.warmup") for word in words)
    if config.preset.joint != "none" or is_warmup_set:
        return dataclasses.replace(longer, optimizer=config.optimizer)
    return longer


def _flag_names(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line without `=VALUE`, with dashes for underscores.

    A value that is a word of its own stays in the list.
    """
    # Either spelling of a flag is accepted, such as --optimizer.peak_lr.
    return [word.partition("=")[0].replace("_", "-") for word in words]


def _study_run(args: Plan, study: Points, words: Sequence[str]) -> Config:
    """Return the run of a study's largest model, with flags applied.

    Args:
        study: Rows of one preset. Among runs of the largest model the longest counts.
        words: Flags of the recipe, with `--model`.

    Raises:
        PresetError: The study's preset is not for the model.
    """
    setting = study.settings[-1].config
    try:
        return _parsed(args, setting.recipe, setting, words)
    except PresetError as error:
        raise PresetError(
            f"under the settings of the study ({label_of(setting.preset)}): {error}; "
            f"write --preset.constants with those to keep, or "
            f"a recipe first, whose own preset then stays"
        ) from error


def _with_settings(recipe: Config, setting: Config) -> Config:
    """Return a recipe with the model, data, preset, optimizer and length of a study's run.

    The recipe keeps its own peak rate, seeds, evaluation batch size, compute settings (such as
    dtype and remat), mesh and all other settings. Average of the parameters and frozen parameters
    come from the study.
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
    """Memory, time and price of a run.

    Attributes:
        rows: Rows of the plan's table on mesh, remat, memory, time and price.
        cautions: Cautions, a sentence each.
        fits: False if the run needs more memory than the chips have. True if that is unknown.
    """

    rows: tuple[PlanRow, ...]
    cautions: tuple[str, ...] = ()
    fits: bool = True


def with_cost(config: Config, args: Plan, studies: Sequence[Points]) -> tuple[Config, Cost]:
    """Return a run and its memory, time and price.

    With `--chips` the run gets the mesh and remat policy that the chips' compiler finds to fit.
    Without it the run is unchanged and the cost is that of this machine.

    Args:
        args: Flags of `mupax plan`.
        studies: Rows whose speed is used as that of this machine if no flag gives a speed.
    """
    if args.chips:
        return _on_chips(config, args, args.chips)
    return config, _on_this_machine(config, args, studies)


def _on_chips(config: Config, args: Plan, chips: str) -> tuple[Config, Cost]:
    """Return a run with a mesh and remat policy found by compiling for its chips, and its cost.

    Up to `--limit` combinations of mesh, remat and microbatches are compiled, and the fastest that
    fits is used. If none fits, the run gets one that does not fit, and the cost's `fits` is False.
    With `--limit 0` the run is compiled unchanged. Without the compiler's packages the run is
    unchanged, and the cost is that of `_by_formula`.

    Args:
        chips: Value of `--chips`, such as `v5e:16x16`.

    Raises:
        MeshError: No mesh fits the model and the batch.
        RefusedError: The compiler refuses every combination that is tried.
    """
    from mupax.train.pods import topology

    chip = topology.chip_of(chips)
    count = topology.size(chips) * args.slices
    place = f"{chips} x {args.slices} slices" if args.slices > 1 else chips
    try:
        topology.ready(chips)
    except topology.TopologyError as error:
        # The compiler's packages are extras and may not be installed.
        return config, _by_formula(config, args, count, chip, str(error))

    if args.limit:
        from mupax.train.pods import search

        # Batch sizes are not searched, because rate, steps and loss are those of this batch.
        # The first report is the fastest that fits, if any fits.
        report: dict[str, Any] = search.search(config, chips, args.slices, args.limit, (1,))[0]
        config = _with_flags(config, shlex.split(report["flags"]))
    else:
        from mupax.train.pods.compiled import compile_for

        report = compile_for(config, chips, args.slices).report()
    return config, _compiled_cost(config, args, report, count, chip, place)


def _compiled_cost(
    config: Config, args: Plan, report: dict[str, Any], count: int, chip: Chip, place: str
) -> Cost:
    """Return the memory, time and price of a compiled run.

    The time comes from `--tokens-per-second` or `--mfu`, otherwise from the compiler's roofline. A
    run that does not fit has only the rows of memory, and a caution.

    Args:
        report: Report of the compiler, as `mupax compile --json` writes it.
        count: Number of chips in all slices together, at least 1.
        place: Chips and slices, such as `v5e:4x4 x 2 slices`.
    """
    peak = report["peak_bytes_per_device"]
    capacity = report["hbm_bytes_per_device"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items()) or "one device"
    remat = f"{report['compute']['remat']}, {report['accumulation_steps']} microbatches"
    memory = f"{gib(peak)} of {gib(capacity)} a chip"
    kind = "GPU" if chip.gpu else "TPU"
    source = f"{kind} compiler for {place}"
    rows = (
        PlanRow("mesh", f"{mesh} ({counted(count, 'chip')})", "", source),
        PlanRow("remat", remat, "", source),
        PlanRow("memory", memory, ranges.NONE, source),
    )
    if not report["fits"]:
        missing = gib(peak - capacity)
        caution = f"does not fit {place} by {missing}; write more chips or a smaller batch"
        return Cost(rows, (caution,), fits=False)
    if args.has_speed:
        duration = _flag_duration(config, args, count * chip.peak_flops)
    else:
        roofline = report["roofline"]
        step = roofline["step_seconds"]
        band, upper = ranges.of_roofline(step, roofline["mfu"])
        time_source = (
            f"roofline of the compiled step, a bound from below "
            f"(MFU at most {roofline['mfu']:.0%}), {upper}"
        )
        duration = StepDuration(step, time_source, band)
    return Cost((*rows, *_time_rows(config, args, duration, count)))


def _state_bytes(config: Config) -> int:
    """Return the bytes of a run's training state and gradients on all devices, from shapes alone.

    The state has the parameters, the optimizer's moments and, if there is one, the average of the
    parameters. Only trained parameters have gradients.
    """
    import jax

    from mupax.train.reuse import runs

    program = runs.on_one_device(config)
    arrays = jax.tree.leaves(program.abstract)
    for name in program.trained:
        # A gradient has the shape and type of its parameter.
        arrays.append(program.abstract.params[name])
    total = 0
    for array in arrays:
        total += array.size * array.dtype.itemsize
    return total


def _by_formula(config: Config, args: Plan, count: int, chip: Chip, reason: str) -> Cost:
    """Return the cost of a run without a compiler: the state's memory, and the time by a flag.

    Without `--tokens-per-second` or `--mfu` there is no time, and a caution says so. The run counts
    as fitting if state and gradients, split over all chips, do. Activations are not counted.

    Args:
        count: Number of chips, over which the state is split.
        reason: Sentence on why there is no compiler, for the caution.
    """
    # A lower bound: no mesh can split the state over more chips than these.
    state = _state_bytes(config) / count
    size = gib(int(state))
    memory = PlanRow(
        "memory",
        f"{size} of {gib(chip.hbm_bytes)} a chip",
        f"at least {size}",
        "formula: state alone, split over all chips",
    )
    fits = state < chip.hbm_bytes
    caution = f"memory of activations, mesh and remat are not known: {reason}"
    if not args.has_speed:
        advice = "time is not known without the compiler; write --mfu or --tokens-per-second"
        return Cost((memory,), (caution, advice), fits)
    duration = _flag_duration(config, args, count * chip.peak_flops)
    return Cost((memory, *_time_rows(config, args, duration, count)), (caution,), fits)


def _on_this_machine(config: Config, args: Plan, studies: Sequence[Points]) -> Cost:
    """Return the cost of a run on the devices of this process, without compiling it.

    The memory comes from a formula. The time comes from `--tokens-per-second` or `--mfu`, otherwise
    from the speed of the studies. If there is neither, or `--mfu` is given and the peak of the
    device is unknown, a caution replaces the time. It is not checked whether the run fits.
    """
    from mupax.train.core.program import assemble
    from mupax.train.parallel.sharding import described
    from mupax.train.pods import estimates

    program = assemble(config)
    # A formula over sizes counts state, gradients and activations. Nothing is compiled.
    expected = sum(estimates.expected(program).values())
    kind = program.mesh.devices.flat[0].device_kind
    mesh = f"{described(program.mesh.shape)} ({kind})"
    interval, limit = ranges.memory(expected)
    memory_source = f"formula of train/pods/estimates.py, from sizes; {limit}"
    rows = (
        PlanRow("mesh", mesh, "", "this machine"),
        PlanRow("remat", config.model.compute.remat, "", f"recipe {config.recipe}"),
        PlanRow("memory", f"about {gib(expected)} a device", interval, memory_source),
    )
    if args.has_speed:
        from mupax.train.parallel import hardware

        peak = hardware.peak_flops(kind, config.model.compute.dtype)
        if args.tokens_per_second is None and peak is None:
            caution = (
                f"time is not known: nothing is known of the peak of {kind}; "
                f"write --tokens-per-second"
            )
            return Cost(rows, (caution,))
        duration = _flag_duration(config, args, (peak or 0) * program.mesh.size)
    else:
        duration = _study_duration(config, studies)
        if duration is None:
            caution = (
                "time is not known: write --tokens-per-second, "
                "or a study of this machine behind --from"
            )
            return Cost(rows, (caution,))
    # This machine has one price, whatever the number of its devices.
    return Cost((*rows, *_time_rows(config, args, duration, count=1)))


class StepDuration(NamedTuple):
    """Duration of a step.

    Attributes:
        seconds: Expected seconds.
        source: Source of the seconds.
        band: Lowest and highest seconds. The highest is `None` without an upper end, and the whole
            is `None` (the default) if neither is known.
    """

    seconds: float
    source: str
    band: ranges.Range = None


def _flag_duration(config: Config, args: Plan, peak: float) -> StepDuration:
    """Return the duration of a step by `--tokens-per-second` or, without it, by `--mfu`.

    One of the two flags must be given.

    Args:
        peak: Peak FLOP/s of all devices together. Only `--mfu` reads it.
    """
    if args.tokens_per_second:
        seconds = config.data.batch_size * config.model.units / args.tokens_per_second
        return StepDuration(seconds, f"--tokens-per-second {args.tokens_per_second:g}")
    assert args.mfu is not None
    return StepDuration(_step_flops(config) / (peak * args.mfu), f"--mfu {args.mfu:g}")


def _study_duration(config: Config, studies: Sequence[Points]) -> StepDuration | None:
    """Return the duration of a step of a run at the speed of the largest run of the studies.

    The speed is in FLOP/s, and the largest run is the one with the most training FLOPs. Return
    `None` if no run of the studies has a duration.
    """
    flops = []
    speeds = []
    for points in studies:
        for setting in points.settings:
            if setting.seconds > 0:
                flops.append(families.train_flops(setting.config.model) * setting.tokens)
                speeds.append(flops[-1] / setting.seconds)
    if not speeds:
        return None
    # Large models are nearest to the planned run in speed.
    speed = speeds[flops.index(max(flops))]
    seconds = _step_flops(config) / speed
    band, spread = ranges.of_settings(seconds, speed, speeds)
    source = f"{speed:.3g} FLOP/s of the study's largest rows, wherever these were trained"
    if spread:
        source = f"{source}, {spread}"
    return StepDuration(seconds, source, band)


def _step_flops(config: Config) -> float:
    """Return the training FLOPs of one step over the whole batch, without recomputation."""
    return families.train_flops(config.model) * config.data.batch_size * config.model.units


def _time_rows(config: Config, args: Plan, duration: StepDuration, count: int) -> list[PlanRow]:
    """Return the table rows of the run's time, its FLOPs and, with `--price`, its cost.

    Args:
        count: Number by which `--price` is multiplied: chips, or 1 for this machine.
    """
    seconds = config.steps * duration.seconds
    if seconds >= 3600:
        unit = 3600
        name = "h"
    elif seconds > 60:
        unit = 60
        name = "min"
    else:
        unit = 1
        name = "s"
    value = f"{seconds / unit:,.1f} {name}, {duration.seconds:.3g} s a step"
    interval = ranges.text(duration.band, config.steps / unit, f"{{:,.1f}} {name}")
    flops = f"{_step_flops(config) * config.steps:.3g}"
    rows = [
        PlanRow("time", value, interval, duration.source),
        PlanRow("FLOPs", flops, "", "counted, without recomputation"),
    ]
    if args.price is not None:
        hours = seconds / 3600
        hourly = count * args.price
        interval = ranges.text(duration.band, config.steps / 3600 * hourly, "{:,.2f}")
        source = f"{count} x {hours:,.2f} h at {args.price:g} an hour"
        rows.append(PlanRow("cost", f"{hours * hourly:,.2f}", interval, source))
    return rows


def _with_flags(config: Config, flags: Sequence[str]) -> Config:
    """Return the config of a run with further command-line flags applied, and without a workdir.

    The flags are parsed after those that turn the recipe into the run, so they override those.

    Args:
        flags: Words such as `--mesh.fsdp`, `16`.
    """
    # The first two words are `train` and the recipe.
    run_flags = words_of(command_of(config))[2:]
    recipe = cli.recipe(config.recipe)
    parsed = cli.parse(config.recipe, recipe, [*run_flags, *flags])
    cli.refuse_session_flags(PROG, parsed, ("dry_run",))
    return dataclasses.replace(parsed.config, workdir=None)


def main(argv: Sequence[str]) -> int:
    """Run `mupax plan` and return its exit code.

    If `--from` names a table of runs, `mupax.train.studies.tables.command` makes the plan. A model
    without a study is planned by evidence that comes with mupax. Any other run is planned as that
    of a recipe or of a study.

    Args:
        argv: Words of the command line after `plan`.

    Returns:
        0, or 1 if the run does not fit the chips. A table of runs returns the code of its own
        command.

    Raises:
        ConfigError: As for `run_of`, or the file of `--out` cannot be written.
        UsageError: As for `run_of`.
        PresetError: As for `run_of`.
        PointsError: A folder behind `--from` has no rows.
    """
    # Asked before the words are parsed, because planning by a table has flags of its own.
    if tables_command.asks_for_table(argv):
        return tables_command.main(argv)

    args, recipe_flags = command_line.parse_known(Plan, PROG, with_name(cli.with_file_first(argv)))
    check_outputs(args, "out")
    if args.chips:
        from mupax.train.pods import topology

        # Refuses an unknown chip before anything is read.
        topology.chip_of(args.chips)
        # Sets the environment, so it comes before JAX is imported. `_on_chips` says what to do
        # without the compiler's packages.
        with contextlib.suppress(topology.TopologyError):
            topology.ready(args.chips)
    model = _model_alone(args, recipe_flags)
    if model is not None:
        return _plan_from_evidence(model, args, recipe_flags)
    return _plan_run(args, recipe_flags, argv)


def _plan_run(args: Plan, recipe_flags: Sequence[str], argv: Sequence[str]) -> int:
    """Plan a run, print the plan and, with `--out`, write it and its forecast as JSON.

    A written `--optimizer.peak-lr` is kept. Otherwise the studies give the rate.

    Args:
        argv: Words of the command line after `plan`, for the record.

    Returns:
        0, or 1 if the run does not fit the chips.
    """
    from mupax.train.studies.forecast import numbers, points

    studies = points.load([Path(folder) for folder in args.studies]) if args.studies else []
    request = run_of(args, recipe_flags, studies)
    names = _flag_names(recipe_flags)
    keep_rate = "--optimizer.peak-lr" in names
    estimates = numbers.of_law(request.config, studies, keep_rate=keep_rate)
    config, cost = with_cost(estimates.config, args, studies)

    asks_steps = args.tokens is not None or "--steps" in names
    rows = [
        *numbers.rows(config, estimates, request.source, asks_steps=asks_steps),
        *cost.rows,
    ]
    cautions = [*estimates.cautions, *cost.cautions]
    command = command_of(config) or "(no recipe has its name)"
    # The first column has the names of the values and needs no heading.
    header = ("", *COLUMNS[1:])
    Report(
        answers=[_conclusion(_subject(args.recipe, request), config, rows, fits=cost.fits)],
        steps=[Step("Next: train it", command)],
        sections=[Section(terminal.filled([header, *rows]))],
        remarks=[f"caution: {caution}" for caution in cautions],
    ).show()

    forecast = estimates.forecast(config, shlex.join(argv))
    if args.out is not None:
        content = {
            "format": "plan 1",
            "asked": f"{PROG} {shlex.join(argv)}",
            "command": command,
            "numbers": [dict(zip(COLUMNS, row, strict=True)) for row in rows],
            "cautions": cautions,
            "forecast": forecast,
        }
        write_json(args.out, content)
        message = f"plan in {args.out}"
        if forecast:
            score = f"{PROG} score {shlex.quote(str(args.out))} WORKDIR"
            message += f"; `{score}` holds it against what came"
        terminal.say(message)
    return 0 if cost.fits else 1


def _model_alone(args: Plan, recipe_flags: Sequence[str]) -> str | None:
    """Return the model's name if a command has no recipe and no study, otherwise `None`.

    A name may be both a recipe and a model. It counts as the model if `--model` repeats it,
    `--tokens` is given, and the command has neither other flags of the recipe nor flags of the cost
    (`_cost_flags`).
    """
    name = args.recipe
    flag = cli.value_of("--model", recipe_flags)
    if args.studies or name not in CONFIGS or flag not in (None, name):
        return None
    if name not in RECIPES:
        return name
    words, _ = without_flags(recipe_flags, ("--model",))
    is_model = flag == name and args.tokens is not None and not words and not _cost_flags(args)
    return name if is_model else None


def _cost_flags(args: Plan) -> list[str]:
    """Return those of `--chips`, `--price`, `--mfu` and `--tokens-per-second` that are given."""
    values = {
        "--chips": args.chips,
        "--price": args.price,
        "--mfu": args.mfu,
        "--tokens-per-second": args.tokens_per_second,
    }
    return [flag for flag, value in values.items() if value is not None]


def _plan_from_evidence(model: str, args: Plan, recipe_flags: Sequence[str]) -> int:
    """Plan a model without a study: print a plan by the best evidence, and write it to `--out`.

    Evidence is a tuned preset, a law of published runs or published constants that come with mupax.

    Args:
        recipe_flags: Flags of the recipe, such as `--steps 800`. Only `--model` is allowed.

    Returns:
        0, the exit code.

    Raises:
        ConfigError: There is another flag of the recipe or of the cost, `--tokens` is missing, or
            no evidence applies.
    """
    from mupax.train.studies.tables import evidence

    words, _ = without_flags(recipe_flags, ("--model",))
    words += _cost_flags(args)
    if words:
        raise ConfigError(
            f"{words[0]} needs a recipe, and {model} is a model; "
            f"write a recipe and --model {model}, or --from FOLDER with the study to plan from"
        )
    if args.tokens is None:
        raise ConfigError(f"say how long {model} will train: write --tokens N, as 10b")
    return evidence.plan(model, joint.amount("--tokens", args.tokens), args.out)


def _subject(name: str, request: Request) -> str:
    """Return a run's name for the summary, which says so if a model has the name of the recipe.

    Args:
        name: Recipe, file or model of the command line.
    """
    if name in CONFIGS and request.source == f"recipe {name}":
        return f"recipe {name} (`--model {name} --tokens N` alone plans the model)"
    return name


def _conclusion(subject: str, config: Config, rows: Sequence[PlanRow], *, fits: bool) -> str:
    """Return the plan's summary: a sentence with steps, rate, loss and time.

    A run that does not fit the chips has a sentence that says so, without loss and time.

    Args:
        subject: Name of the run, from `_subject`.
    """
    by_name = {row.name: row for row in rows}
    rate = by_name["peak rate"].value
    run = f"{subject}: {counted(config.steps, 'step', ',')} at a peak rate of {rate}"
    if not fits:
        return f"{run} do not fit the chips: {by_name['memory'].value}"
    time = ""
    if "time" in by_name:
        # The cell is "DURATION, ...". A comma inside of a number has no space after it.
        duration, _, _ = by_name["time"].value.partition(", ")
        time = f", in {duration}"
    loss = by_name["loss"]
    if loss.value == ranges.NOT_PREDICTED:
        return f"{run}{time}; no loss is predicted (see the cautions)"
    return f"{run} should end at a loss of {loss.value} [{loss.interval}]{time}"
