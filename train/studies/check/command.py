"""`mupax check MODEL|RECIPE`: measure what a preset does as one size grows, hold it against theory, and judge the theory."""

from __future__ import annotations

import dataclasses
import difflib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.presets import Preset, horizon
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import RUN_AXES
from mupax.train.config import cli
from mupax.train.config.preset import ConstantFlags, base_text, preset_for, with_group_constants
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, DataConfig, OptimizerConfig, PresetConfig
from mupax.zoo import configs

if TYPE_CHECKING:
    from mupax.train.studies.check.judge import Finding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(ConstantFlags):
    """Two verdicts on a preset: does a program do what its table says as one size grows, and is the table any good.

    Takes the structure of a model (norm, activation, positions, biases, grouped heads, ties) with its vocabulary and context
    at a small width and depth, grows one size over a few doublings, trains every size for ten steps from several seeds on one
    batch, and fits log-log slopes. The first line says what else was made smaller. A recipe brings its model, preset and
    optimizer. --model.* change the structure, and a size so written is the smallest model's.

    Growing batch (at the same tokens) or tokens, it is a joint rule that is judged: a recipe's own optimizer takes all of its steps
    on gradients of signal and noise, and --optimizer.*, --steps, --data.batch-size, --preset.base and --joint are those of the run.
    """

    model: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE|FILE")] = "lm-proxy"
    """A model of `mupax models`, a recipe or a config file (also `--config FILE`), for its structure."""
    preset: Annotated[str | None, conf.arg(aliases=("--preset.name",), metavar="NAME")] = None
    """A preset of `mupax presets`; the recipe's, or mup for a model."""
    grow: Literal[
        "head_dim",
        "heads",
        "depth",
        "encoder_depth",
        "width",
        "mlp",
        "experts",
        "expert_dim",
        "kv_heads",
        "batch",
        "tokens",
    ] = "head_dim"
    """Which size grows; width doubles heads and head_dim in turn, depth an encoder's too unless --model.encoder-depth is written,
    experts the active ones too."""
    optimizer: Annotated[str | None, conf.arg(aliases=("--optimizer.name",), metavar="NAME")] = None
    """Whose rates; the recipe's, or adam for a model."""
    accept: tuple[Literal["lazy"], ...] = ()
    """Judge a preset whose source wants a lazy limit by that: features may move less and less, as much as its source says."""
    peak_lr: Annotated[float | None, conf.arg(aliases=("--optimizer.peak-lr",), metavar="X")] = None
    """Rate at base size; by optimizer unless given."""
    sizes: Annotated[int, conf.arg(metavar="N")] = 4
    """How many sizes, each twice the one before; three or more, or two where batch or tokens grow."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 4
    """Initializations per size."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write verdict and slopes as JSON."""
    figure: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw every observable's slope beside what theory allows, failures on top (PNG)."""
    figure_panels: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw a panel per observable, its values against size (PNG)."""
    desiderata: Switch = False
    """Which dimensions can be scaled, by mapping of a block at the first step under SGD, beside `mupax presets desiderata`."""
    dry_run: Switch = False
    """Print the sizes and what theory expects; measure nothing."""


def main(argv: Sequence[str]) -> int:
    """Measures, judges, prints, writes: 0 when the program does what the table says and the table is good, 1 when one is not."""
    args, rest = command_line.parse_known(
        Check, "mupax check", with_group_constants(cli.with_file_first(argv))
    )
    config = configured(args, rest)
    if args.sizes < 2 or args.seeds < 1:
        raise configs.ConfigError("a slope needs --sizes of at least 2 and --seeds of at least 1")
    # A dry run measures nothing, and theory's exponents are those of any growth.
    measures_sizes = not (args.desiderata or args.dry_run or args.grow in RUN_AXES)
    if args.sizes < 3 and measures_sizes:
        raise configs.ConfigError(
            "two sizes cannot tell an exponent from what finite sizes add, which falls as 1/size; write --sizes 3 or more"
        )
    if args.desiderata:
        from mupax.train.studies.desiderata import command

        return command.main(
            config, count=args.sizes, seeds=args.seeds, path=args.json, dry_run=args.dry_run
        )
    if args.grow in RUN_AXES:
        return _joint_rule(args, config)
    from mupax.presets.analysis.uneven import refuse_uneven
    from mupax.train.studies.check import check, groups, theory
    from mupax.zoo.definition import definition

    started = time.monotonic()
    written = {word.partition("=")[0].removeprefix("--model.").replace("-", "_") for word in rest}
    model, keeps, notes = check.own_inputs(config.model, written)
    grown = check.grow(model, args.grow, args.sizes, keeps)
    preset = relative(config.preset, grown[0])
    optimizer = OptimizerConfig(name=config.optimizer.name, schedule="constant", eps=1e-12)
    optimizer = dataclasses.replace(
        optimizer, peak_lr=args.peak_lr or OPTIMIZERS[optimizer.name].check_lr
    )
    definitions = [definition(one) for one in grown]
    if grown[0].family not in configs.FAMILIES:
        from mupax.train.studies.roles.models import refuse_wrong_declarations

        refuse_wrong_declarations(grown[0])
    refuse_uneven(preset, definitions[-1].sizes, optimizer.name)
    expected = theory.of(
        preset, definitions[0], definitions[-1], optimizer.name, accept=args.accept
    )
    not_judged = groups.not_judged(definitions[0].specs, expected)
    growth, _ = theory.growth(definitions[0].sizes, definitions[-1].sizes)
    vanishing = {
        name: power.growth(growth)
        for name, power in preset.vanishing.items()
        if power.growth(growth)
    }
    terminal.say(_sizes_line(args.model, grown, notes))
    if args.dry_run:
        for one in grown:
            encoder = one.sizes().get("encoder_layers")
            depth = f"depth {one.depth}" + (f", encoder {encoder}" if encoder else "")
            terminal.say(f"width {one.width}, {one.num_heads} heads of {one.heads_dim}, {depth}")
        for (name, step), slope in expected.items():
            trouble = f", {slope.trouble}" if slope.trouble else ""
            terminal.say(f"{name} after {step}: theory says {slope.slope:+.2f}{trouble}")
        for name in not_judged:
            terminal.say(f"{name}: theory says nothing")
        for name, exponent in vanishing.items():
            terminal.say(f"{name}: its source lets it go as {exponent:+.2f}")
        return 0
    findings = check.study(
        definitions, preset, optimizer, check.batch(grown[0]), args.seeds, args.accept
    )
    grew = (
        f"growing {args.grow} {args.sizes - 1} times twofold ({time.monotonic() - started:.0f} s)"
    )
    title = f"{args.model} under {preset.label}, {optimizer.name}, {grew}"
    about = {
        "model": args.model,
        "preset": preset.name,
        "constants": {**preset.choices, **preset.constants},
        "optimizer": optimizer.name,
        "peak_lr": optimizer.peak_lr,
        "grow": args.grow,
        "seeds": args.seeds,
        "accept": list(args.accept),
        "vanishing": vanishing,
        "sizes": [dataclasses.asdict(one) for one in grown],
    }
    subject = f"{preset.name} follows its table as {_GROWN.get(args.grow, f'{args.grow} grows')}"
    return _report(
        args, findings, _Page(title, subject, _following(args, preset, findings)), not_judged, about
    )


_GROWN = {
    "heads": "heads grow",
    "experts": "experts grow",
    "kv_heads": "key heads grow",
    "mlp": "the MLP grows",
}
"""Sizes that are not said as they are written."""


def _sizes_line(name: str, grown: Sequence[Any], notes: Sequence[str]) -> str:
    """Return the first line of the output: which model is trained, and what of its inputs was made smaller."""
    first = grown[0]
    last = grown[-1]
    if first.task == "images":
        inputs = f"{first.num_classes:,} classes, {first.image_size} x {first.image_size} pixels"
    else:
        inputs = f"vocabulary {first.vocab_size:,}, context {first.seq_len:,}"
    width = (
        f"width {first.width}"
        if first.width == last.width
        else f"width {first.width} to {last.width}"
    )
    smaller = f"; {'; '.join(notes)}" if notes else ""
    return f"{name}: {inputs}, {width}, depth {first.depth}{smaller}"


def _following(args: Check, preset: Preset, findings: Sequence[Finding]) -> list[str]:
    """Return what to type next."""
    from mupax.train.studies.check.judge import passes

    if passes(findings):
        words = f"{args.model}" if cli.is_recipe(args.model) else f"RECIPE --model {args.model}"
        return [
            f"next: mupax sweep {words} --preset {preset.name} finds the learning rate at the base, for every size"
        ]
    if all(finding.agrees for finding in findings):
        return [
            f"next: mupax presets limits {preset.name} says what its table does, and mupax presets compare which tables do not"
        ]
    figure = "" if args.figure else "; --figure check.png draws it"
    return [
        f"next: look at the rule or the code of the first parameter in red, and type the same command again{figure}"
    ]


class _Page(NamedTuple):
    """Lines that stand around the findings on the screen."""

    title: str
    """Above the table."""
    subject: str
    """Beginning of the conclusion, where all is well."""
    following: list[str]
    """What to type next."""


def _joint_rule(args: Check, config: Config) -> int:
    """The same where batch or tokens grow."""
    from mupax.presets.analysis.joint_limits import SYMBOLS
    from mupax.train.config import joint
    from mupax.train.studies.check import joint_run

    if not cli.is_recipe(args.model):
        raise configs.ConfigError(
            f"--grow {args.grow} is of a run, whose batch, steps and optimizer are the base, and {args.model} is a model; "
            f"write a recipe, such as lm-tiny --model {args.model}"
        )
    if args.accept:
        raise command_line.UsageError(
            f"check does not read --accept growing {args.grow}; it is of presets"
        )
    started, rule = time.monotonic(), horizon.rule(config.preset.joint)
    runs = joint_run.runs(config, args.grow, args.sizes)
    vanishing = {name: power.growth({args.grow: 1.0}) for name, power in rule.concessions.items()}
    vanishing = {name: exponent for name, exponent in vanishing.items() if exponent}
    if args.dry_run:
        for run in runs:
            terminal.say(
                f"batch {run.data.batch_size}, {run.steps} steps: {joint.numbers_text(run.scaled_optimizer)}"
            )
        for name, slope in joint_run.expectation(runs, args.grow).items():
            terminal.say(
                f"{name}: theory says {slope.slope:+.2f}{f', {slope.trouble}' if slope.trouble else ''}"
            )
        return 0
    findings, not_judged = joint_run.study(runs, args.grow)
    grew = f"{SYMBOLS[args.grow]} 1 to {2 ** (args.sizes - 1)} ({time.monotonic() - started:.0f} s)"
    title = f"{args.model} under the joint rule {rule.name}, {config.optimizer.name}, {grew}"
    about = {
        "model": args.model,
        "joint": rule.name,
        "optimizer": dataclasses.asdict(config.optimizer),
        "grow": args.grow,
        "vanishing": vanishing,
        "sizes": [{"batch": run.data.batch_size, "steps": run.steps} for run in runs],
    }
    subject = f"the run follows the joint rule {rule.name} as {args.grow} {'grow' if args.grow == 'tokens' else 'grows'}"
    code = _report(args, findings, _Page(title, subject, []), not_judged, about)
    for caution in joint.cautions(runs[-1]) if rule.name != "none" else ():
        terminal.say(f"caution: {caution}")
    return code


def _report(
    args: Check,
    findings: Sequence[Finding],
    page: _Page,
    not_judged: Sequence[str],
    about: dict[str, Any],
) -> int:
    """Print, write and draw the findings. Return the exit code."""
    from mupax.train.studies.check import report
    from mupax.train.studies.check.judge import passes

    blamed = "number" if args.grow in RUN_AXES else "role"
    report.show(
        terminal.console(),
        findings,
        page.title,
        not_judged,
        blamed,
        subject=page.subject,
        following=page.following,
    )
    if vanishing := about["vanishing"]:
        allowed = ", ".join(f"{name} go as {exponent:+.2f}" for name, exponent in vanishing.items())
        terminal.say(f"by its source the preset lets {allowed}")
    if args.json:
        Path(args.json).write_text(
            json.dumps(report.to_json(findings, about, not_judged), indent=2) + "\n"
        )
    if args.figure:
        report.figure(args.figure, findings, args.grow, page.title)
    if args.figure_panels:
        grown_sizes = [2.0**doubling for doubling in range(args.sizes)]
        report.panels(
            args.figure_panels, findings, grown_sizes, f"{args.grow} / smallest", page.title
        )
    return 0 if passes(findings) else 1


def configured(args: Check, rest: Sequence[str]) -> Config:
    """The run whose model, preset and optimizer are checked.

    Args:
        args: of the command.
        rest: the words after those, flags of a run.

    Raises:
        UsageError: a flag that a check does not read.
        ConfigError: no recipe or model has the name, or a model that cannot be built.
    """
    if not cli.is_recipe(args.model) and args.model not in configs.CONFIGS:
        near = difflib.get_close_matches(
            args.model, list(dict.fromkeys([*configs.CONFIGS, *RECIPES])), n=3
        )
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise configs.ConfigError(
            f"no model or recipe is named {args.model!r}; {hint}`mupax models` and `mupax train` list them"
        )
    for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
        of_run = flag.startswith(("--preset.", "--optimizer.", "--data.")) or flag in (
            "--steps",
            "--joint",
            "--noise-scale",
        )
        if of_run and args.grow not in RUN_AXES:
            where = (
                f" growing {args.grow} (--grow batch or tokens does)"
                if flag in ("--joint", "--noise-scale")
                else ""
            )
            raise command_line.UsageError(
                f"check does not read {flag}{where}; it takes --model.* and what its --help lists"
            )

    def bare() -> Config:
        model = configs.get(args.model)
        data = DataConfig(
            name="random", batch_size=1, noise="infilling" if model.denoises else None
        )
        optimizer = OptimizerConfig(name="adam")
        return Config(
            recipe=args.model,
            model=model,
            data=data,
            preset=PresetConfig(),
            optimizer=optimizer,
            steps=1,
        )

    start = cli.recipe(args.model) if cli.is_recipe(args.model) else bare
    config = cli.parse(f"check {args.model}", start, rest, command_line.flags(Check)).config
    constants = tuple(f"{name}={value}" for name, value in args.values().items())
    start, of_run = (
        config.preset,
        {name: getattr(config.preset, name) for name in ("base", "joint", "noise_scale")},
    )
    if args.preset is not None:
        start = PresetConfig(name=args.preset, **of_run)
    preset = dataclasses.replace(start, constants=(*start.constants, *constants))
    optimizer = dataclasses.replace(config.optimizer, name=args.optimizer or config.optimizer.name)
    if args.grow in RUN_AXES and args.peak_lr is not None:
        optimizer = dataclasses.replace(optimizer, peak_lr=args.peak_lr)
    return dataclasses.replace(config, preset=preset, optimizer=optimizer)


def relative(chosen: PresetConfig, smallest: configs.ModelConfig) -> Preset:
    """The preset relative to the smallest model, absolute where it has no base; raises as `preset_for`.

    Args:
        chosen: the preset, whose base is left out.
        smallest: the model that is the base.
    """
    absolute = preset_for(dataclasses.replace(chosen, base=None), smallest)
    if absolute.baseless:
        return absolute
    return preset_for(dataclasses.replace(chosen, base=base_text(smallest.base_sizes())), smallest)
