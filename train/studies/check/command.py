"""Command `mupax check MODEL|RECIPE`: the coordinate check of a preset or of a joint rule."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from tyro import conf

from mupax import MupaxError, command_line, disk, terminal
from mupax.command_line import Switch
from mupax.presets import CONSTANT_FLAGS, Preset, horizon
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import RUN_AXES
from mupax.terminal import counted
from mupax.train.config import cli
from mupax.train.config.checks import check_outputs
from mupax.train.config.preset import ConstantFlags, base_text, preset_for, with_group_constants
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, DataConfig, OptimizerConfig, PresetConfig
from mupax.zoo import configs

if TYPE_CHECKING:
    from mupax.train.studies.check.judge import Finding
    from mupax.train.studies.check.theory import Expected
    from mupax.zoo.definition import Definition
    from mupax.zoo.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(ConstantFlags):
    """Check that a program does what its preset says as one size grows, and judge the preset.

    Takes the structure of a model (norm, activation, positions, biases, grouped heads, ties) with
    its vocabulary and context at a small width and depth. Grows one size over a few doublings,
    trains every size for ten steps from several seeds on one batch, and fits log-log slopes. The
    first line says what else was made smaller. A recipe brings its model, preset and optimizer.
    --model.* change the structure, and a size so written is the smallest model's.

    --grow batch (at the same tokens) and --grow tokens judge a joint rule without a model: the
    recipe's optimizer takes all of its steps on made-up gradients, a fixed signal and random noise.
    There --optimizer.*, --steps, --data.batch-size, --preset.base and --joint mean what they mean
    in `mupax train`.
    """

    model: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE|FILE")] = "lm-proxy"
    """A model of `mupax models`, a recipe or a config file (also `--config FILE`)."""
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
    """Size that grows. width doubles heads and head_dim in turn. depth also grows an encoder unless
    --model.encoder-depth is written. experts also grows the number of active ones."""
    optimizer: Annotated[str | None, conf.arg(aliases=("--optimizer.name",), metavar="NAME")] = None
    """Optimizer whose learning rates are checked; the recipe's, or adam for a model."""
    accept: tuple[Literal["lazy"], ...] = ()
    """Accept a lazy limit from a preset whose source wants one: features may move less as the model
    grows, by as much as the source says."""
    peak_lr: Annotated[float | None, conf.arg(aliases=("--optimizer.peak-lr",), metavar="X")] = None
    """Learning rate at the smallest size. Unless given, it depends on the optimizer, and is an
    eighth for a preset by which features change less as the model grows."""
    sizes: Annotated[int, conf.arg(metavar="N")] = 4
    """Number of sizes, each twice the one before; at least 3, or 2 where batch or tokens grow."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 4
    """Number of initializations per size."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write verdict and slopes as JSON."""
    figure: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw every observable's slope beside what theory allows, failures on top (PNG)."""
    figure_panels: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw a panel per observable, its values against size (PNG)."""
    desiderata: Switch = False
    """Measure which dimensions can be scaled, mapping by mapping of a block, at the first step of
    SGD. Theory is that of `mupax presets desiderata`."""
    dry_run: Switch = False
    """Print the sizes and what theory expects; measure nothing."""

    def __post_init__(self) -> None:
        if self.desiderata:
            names = ("grow", "optimizer", "accept", "peak_lr", "figure", "figure_panels")
            reason = "with --desiderata, which grows every dimension at the first step of SGD"
            command_line.refuse_idle(self, names, reason, "leave --desiderata out")
        elif self.grow in RUN_AXES:
            reason = f"with --grow {self.grow}, which takes one run of every size"
            command_line.refuse_idle(self, ("seeds",), reason, "grow a size of the model")


class _Page(NamedTuple):
    """Lines that are printed around the findings.

    Attributes:
        title: Line above the table of findings.
        subject: Beginning of the conclusion if the check passes.
        following: Sentences on what to type next.
    """

    title: str
    subject: str
    following: list[str]


class _Plan(NamedTuple):
    """A check that is ready to run.

    Attributes:
        models: Model at growing sizes.
        definitions: Their definitions.
        notes: Sentence on every input that was made smaller.
        preset: Rules, relative to the smallest size.
        optimizer: Optimizer settings of the check.
        expected: (observable, step) to what theory expects.
        not_judged: Observables that theory says nothing about.
        vanishing: Map from a quantity that the preset's paper lets vanish to the exponent that it
            allows.
    """

    models: list[TransformerConfig]
    definitions: list[Definition]
    notes: list[str]
    preset: Preset
    optimizer: OptimizerConfig
    expected: dict[tuple[str, int], Expected]
    not_judged: tuple[str, ...]
    vanishing: dict[str, float]


def main(argv: Sequence[str]) -> int:
    """Run `mupax check`: print the findings, and write the files that the flags name.

    Return 0 if the program does what the preset's table says and theory finds no fault in the
    table, otherwise 1. A dry run measures nothing and returns 0. With `--desiderata`, run the study
    of `mupax.train.studies.desiderata` in place of the check.

    Raises:
        ConfigError: Too few sizes or seeds, a file that cannot be written, or as for `configured`.
    """
    args, rest = command_line.parse_known(
        Check, "mupax check", with_group_constants(cli.with_file_first(argv))
    )
    config = configured(args, rest)
    if args.sizes < 2 or args.seeds < 1:
        raise configs.ConfigError("a slope needs --sizes of at least 2 and --seeds of at least 1")
    # A dry run only prints theory's exponents, so finite sizes cannot mislead it.
    measures_sizes = not (args.desiderata or args.dry_run or args.grow in RUN_AXES)
    if args.sizes < 3 and measures_sizes:
        raise configs.ConfigError(
            "two sizes cannot tell an exponent from what finite sizes add, which falls as 1/size; "
            "write --sizes 3 or more"
        )

    if not args.dry_run:
        check_outputs(args, "json", pictures=("figure", "figure_panels"))
    if args.desiderata:
        from mupax.train.studies.desiderata import command

        return command.main(
            config, count=args.sizes, seeds=args.seeds, path=args.json, dry_run=args.dry_run
        )
    if args.grow in RUN_AXES:
        return _check_joint_rule(args, config)
    return _check_preset(args, config, rest)


def _check_preset(args: Check, config: Config, rest: Sequence[str]) -> int:
    """Check a preset as a size of the model grows, and report the findings. Return the exit code.

    It is 0 if the check passes, otherwise 1. A dry run prints the plan and returns 0.
    """
    from mupax.train.studies.check import check

    started = time.monotonic()
    plan = _plan(args, config, rest)
    terminal.say(_sizes_line(args.model, plan.models, plan.notes))
    if args.dry_run:
        _print_plan(plan)
        return 0

    preset = plan.preset
    optimizer = plan.optimizer
    findings = check.study(
        plan.definitions, preset, optimizer, check.batch(plan.models[0]), args.seeds, args.accept
    )
    seeds = max(finding.seeds for finding in findings)
    if seeds > args.seeds:
        terminal.note(
            f"note: with {counted(args.seeds, 'seed')} some "
            "slopes failed by at most 0.1; measured again with "
            f"{seeds}"
        )
    seconds = time.monotonic() - started
    grew = f"growing {args.grow} {args.sizes - 1} times twofold ({seconds:.0f} s)"
    about = {
        "model": args.model,
        "preset": preset.name,
        "constants": {**preset.choices, **preset.constants},
        "optimizer": optimizer.name,
        "peak_lr": optimizer.peak_lr,
        "grow": args.grow,
        "seeds": seeds,
        "accept": list(args.accept),
        "vanishing": plan.vanishing,
        "sizes": [dataclasses.asdict(model) for model in plan.models],
    }
    growth_words = _GROWTH_WORDS.get(args.grow, f"{args.grow} grows")
    page = _Page(
        title=f"{args.model} under {preset.label}, {optimizer.name}, {grew}",
        subject=f"{preset.name} follows its table as {growth_words}",
        following=_next_steps(args, config, rest, findings, optimizer.peak_lr),
    )
    return _report(args, findings, page, plan.not_judged, about)


def _plan(args: Check, config: Config, rest: Sequence[str]) -> _Plan:
    """Return models, preset, optimizer and theory of a check.

    Args:
        config: Run with the model, the preset and the optimizer.
        rest: Flags of the run, which name the fields of the model that the user wrote.

    Raises:
        PresetError: Widths grow too unevenly for the preset, `args.accept` does not fit it, or a
            user's own model declares a role that its loss does not have.
        ConfigError: The model cannot grow in this way.
    """
    from mupax.presets.analysis.uneven import refuse_uneven
    from mupax.train.studies.check import check, groups, theory
    from mupax.zoo.definition import definition

    written = set()
    for word in rest:
        written.add(word.partition("=")[0].removeprefix("--model.").replace("-", "_"))
    model, fixed_fields, notes = check.own_inputs(config.model, written)
    models = check.grow(model, args.grow, args.sizes, fixed_fields)
    preset = relative(config.preset, models[0])

    name = config.optimizer.name
    definitions = [definition(grown_model) for grown_model in models]
    # A test checks the declarations of the zoo's own families, so only a user's family is traced
    # here.
    if models[0].family not in configs.FAMILIES:
        from mupax.train.studies.roles.models import refuse_wrong_declarations

        refuse_wrong_declarations(models[0])
    first = definitions[0]
    last = definitions[-1]
    refuse_uneven(preset, last.sizes, name, last.specs.values())

    expected = theory.of(preset, first, last, name, accept=args.accept)
    # With a larger eps Adam's steps would depend on the size of gradients.
    optimizer = OptimizerConfig(name=name, schedule="constant", eps=1e-12)
    peak_lr = args.peak_lr or check.peak_lr(name, expected)
    optimizer = dataclasses.replace(optimizer, peak_lr=peak_lr)
    growth, _ = theory.growth(first.sizes, last.sizes)
    vanishing = {}
    for quantity, power in preset.vanishing.items():
        if exponent := power.growth(growth):
            vanishing[quantity] = exponent
    return _Plan(
        models=models,
        definitions=definitions,
        notes=notes,
        preset=preset,
        optimizer=optimizer,
        expected=expected,
        not_judged=groups.not_judged(first.specs, expected),
        vanishing=vanishing,
    )


_PLAIN_AXES = ("embed", "heads", "head_dim", "layers", "encoder_layers")
"""Axes whose sizes every line of `--dry-run` has."""


def _print_plan(plan: _Plan) -> None:
    """Print the plan of a check without running it.

    These are the sizes, the expected exponents, the observables that are not judged, and the
    quantities that the preset's paper lets vanish.
    """
    smallest = plan.models[0].sizes()
    largest = plan.models[-1].sizes()
    for model in plan.models:
        sizes = model.sizes()
        line = f"width {model.width}, {model.num_heads} heads of {model.heads_dim}, "
        line += f"depth {model.depth}"
        if sizes.get("encoder_layers"):
            line += f", encoder {sizes['encoder_layers']}"
        # Sizes that the line does not have yet, such as the number of experts.
        for axis, size in sizes.items():
            if axis not in _PLAIN_AXES and smallest[axis] != largest[axis]:
                line += f", {axis} {size}"
        terminal.say(line)
    for (name, step), slope in plan.expected.items():
        trouble = f", {slope.trouble}" if slope.trouble else ""
        terminal.say(f"{name} after {step}: theory says {slope.slope:+.2f}{trouble}")
    for name in plan.not_judged:
        terminal.say(f"{name}: theory says nothing")
    for name, exponent in plan.vanishing.items():
        terminal.say(f"{name}: its source lets it go as {exponent:+.2f}")


_GROWTH_WORDS = {
    "heads": "heads grow",
    "experts": "experts grow",
    "kv_heads": "key heads grow",
    "mlp": "the MLP grows",
}
"""Words for sizes that grow, where "FLAG grows" would be wrong English or unclear."""


def _sizes_line(name: str, models: Sequence[TransformerConfig], notes: Sequence[str]) -> str:
    """Return the first line of the output: sizes of the trained models, and what was made smaller.

    Args:
        name: Model or recipe as the user wrote it.
        models: Models of the check, the smallest first.
        notes: Sentence on each input that was made smaller.
    """
    first: Any = models[0]
    last = models[-1]
    if first.task == "images":
        inputs = (
            f"{counted(first.num_classes, 'class', ',')}, "
            f"{first.image_size} x {first.image_size} pixels"
        )
    else:
        inputs = f"vocabulary {first.vocab_size:,}, context {first.seq_len:,}"

    width = f"width {first.width}"
    if first.width != last.width:
        width += f" to {last.width}"
    smaller = f"; {'; '.join(notes)}" if notes else ""
    return f"{name}: {inputs}, {width}, depth {first.depth}{smaller}"


def _next_steps(
    args: Check, config: Config, rest: Sequence[str], findings: Sequence[Finding], peak_lr: float
) -> list[str]:
    """Return a list of at most one sentence on what to type next.

    The sentence depends on the outcome: the check passed, its learning rate is too high, only the
    preset's table is wrong, or the program deviates from the table. Every command in it runs as it
    is printed.

    Args:
        config: Run with the model, the preset and the optimizer of the check.
        rest: Flags of the run that the user wrote.
    """
    from mupax.train.studies.check.judge import passes

    preset = config.preset.name
    if passes(findings):
        command = _sweep_command(args, config, rest)
        if command is None:
            return []
        return [f"next: {command} finds the learning rate at the base, for every size"]
    if any(finding.diverges for finding in findings):
        return [
            f"next: type the same command with --peak-lr {peak_lr / 8:.3g}, an eighth of this rate"
        ]
    if all(finding.agrees for finding in findings):
        compared = dict.fromkeys([preset, "mup", "depth-mup", "completep"])
        limits_words = ["presets", "limits", preset, *_flags_of_limits(args, config)]
        compare_words = ["presets", "compare", *compared, *_optimizer_flag(config)]
        return [
            f"next: mupax {shlex.join(limits_words)} says what its table does, "
            f"and mupax {shlex.join(compare_words)} which tables do not"
        ]
    figure = "" if args.figure else "; --figure check.png draws it"
    return [
        f"next: look at the rule or the code of the first parameter in red, "
        f"and type the same command again{figure}"
    ]


def _optimizer_flag(config: Config) -> list[str]:
    """Return the flag with which `limits` and `compare` speak of the optimizer of a check.

    The result is empty for Adam, of which both speak by default.
    """
    if OPTIMIZERS[config.optimizer.name].family == "adam":
        return []
    return ["--optimizer", config.optimizer.name]


def _flags_of_limits(args: Check, config: Config) -> list[str]:
    """Return flags with which `mupax presets limits` prints the table of a check."""
    flags = _optimizer_flag(config)
    if args.grow in ("experts", "expert_dim"):
        flags.append("--experts")
    # Constants of parameter groups, such as rates.readout, are numbers that do not grow.
    constants = [text for text in config.preset.constants if "." not in text.partition("=")[0]]
    for name in CONSTANT_FLAGS:
        value = getattr(config.preset, name)
        if value is not None:
            constants.append(f"{name}={value}")
    if constants:
        flags += ["--preset.constants", *constants]
    return flags


_SMALL_RECIPES = ("lm-tiny", "vit-digits", "ed-tiny")
"""Recipes whose data need no download, one for each family of the zoo."""
_INPUT_AXES = ("vocab", "patch", "classes", "position")


def _small_recipe(model: configs.ModelConfig) -> str | None:
    """Return the name of a small recipe that can train a model on the recipe's data.

    The recipe's own model must have the same family, vocabulary, patches, classes and positions.
    Return `None` if no small recipe has.
    """
    for name in _SMALL_RECIPES:
        own_model = RECIPES[name]().model
        sizes = own_model.sizes()
        own_inputs = [sizes.get(axis) for axis in _INPUT_AXES]
        inputs = [model.sizes().get(axis) for axis in _INPUT_AXES]
        if own_model.family == model.family and own_inputs == inputs:
            return name
    return None


def _sweep_command(args: Check, config: Config, rest: Sequence[str]) -> str | None:
    """Return a command that sweeps the learning rate of the checked model and preset.

    Return `None` for a model that no small recipe can train, and if the flags of the check would
    give a sweep of another preset.
    """
    words = [args.model]
    if not cli.is_recipe(args.model):
        recipe = _small_recipe(configs.get(args.model))
        if recipe is None:
            return None
        words = [recipe, "--model", args.model, "--preset", config.preset.name]
    elif args.preset is not None:
        words += ["--preset", args.preset]
    words += rest
    if args.values():
        words += ["--preset.constants", *config.preset.constants]
    if args.optimizer is not None:
        words += ["--optimizer.name", args.optimizer]
    try:
        run = cli.parse(words[0], cli.recipe(words[0]), words[1:]).config
    except MupaxError:
        # The checked preset may not take the constants of the recipe.
        return None
    swept = (run.preset.name, run.preset.constants)
    if swept != (config.preset.name, config.preset.constants):
        return None
    # Three octaves to either side of the recipe's rate. SGD's rates are of another size.
    recipe_optimizer = cli.recipe(words[0])().optimizer.name
    size = OPTIMIZERS[run.optimizer.name].check_lr / OPTIMIZERS[recipe_optimizer].check_lr
    peak_lr = run.optimizer.peak_lr * size
    words += ["--lr", f"{peak_lr / 8:.4g}:{peak_lr * 8:.4g}:7"]
    return shlex.join(["mupax", "sweep", *words])


def _check_joint_rule(args: Check, config: Config) -> int:
    """Check a joint rule as batch or tokens grow, and report the findings. Return the exit code.

    A joint rule scales learning rate, betas, eps, weight decay and warm-up with batch and tokens.
    The code is 0 if the check passes, otherwise 1. The rule's cautions for the largest run are
    printed, too. A dry run prints runs and theory and returns 0.

    Raises:
        ConfigError: `args.model` is no recipe, or as for `joint_run.runs`.
        UsageError: `--accept` is given.
    """
    from mupax.presets.analysis.joint_limits import SYMBOLS
    from mupax.train.config import joint
    from mupax.train.studies.check import joint_run

    if not cli.is_recipe(args.model):
        recipe = _small_recipe(configs.get(args.model))
        example = f", such as {recipe} --model {args.model}" if recipe else " of `mupax train`"
        raise configs.ConfigError(
            f"--grow {args.grow} needs the batch, steps and optimizer of a run, "
            f"and {args.model} is a model; write a recipe{example}"
        )
    if args.accept:
        raise command_line.UsageError(
            f"check does not read --accept with --grow {args.grow}, which checks a joint rule and "
            "no preset; leave --accept out"
        )

    started = time.monotonic()
    rule = horizon.rule(config.preset.joint)
    runs = joint_run.runs(config, args.grow, args.sizes)
    if args.dry_run:
        for run in runs:
            numbers = joint.numbers_text(run.scaled_optimizer)
            terminal.say(f"batch {run.data.batch_size}, {counted(run.steps, 'step')}: {numbers}")
        for name, slope in joint_run.expectation(runs, args.grow).items():
            trouble = f", {slope.trouble}" if slope.trouble else ""
            terminal.say(f"{name}: theory says {slope.slope:+.2f}{trouble}")
        return 0

    findings, not_judged = joint_run.study(runs, args.grow)
    seconds = time.monotonic() - started
    grew = f"{SYMBOLS[args.grow]} 1 to {2 ** (args.sizes - 1)} ({seconds:.0f} s)"
    vanishing = {}
    for quantity, power in rule.concessions.items():
        if exponent := power.growth({args.grow: 1.0}):
            vanishing[quantity] = exponent
    about = {
        "model": args.model,
        "joint": rule.name,
        "optimizer": dataclasses.asdict(config.optimizer),
        "grow": args.grow,
        "vanishing": vanishing,
        "sizes": [{"batch": run.data.batch_size, "steps": run.steps} for run in runs],
    }
    verb = "grow" if args.grow == "tokens" else "grows"
    page = _Page(
        title=f"{args.model} under the joint rule {rule.name}, {config.optimizer.name}, {grew}",
        subject=f"the run follows the joint rule {rule.name} as {args.grow} {verb}",
        following=[],
    )
    code = _report(args, findings, page, not_judged, about)
    if rule.name != "none":
        for caution in joint.cautions(runs[-1]):
            terminal.say(f"caution: {caution}")
    return code


def _report(
    args: Check,
    findings: Sequence[Finding],
    page: _Page,
    not_judged: Sequence[str],
    about: dict[str, Any],
) -> int:
    """Print the findings, and write JSON and pictures to the paths that the flags name.

    Existing files are replaced. Return 0 if the check passes, otherwise 1.

    Args:
        not_judged: Observables that theory says nothing about. They are printed and written, too.
        about: Facts on the check by name, for the JSON file. Its entry `vanishing` is printed, too:
            quantities that the preset's paper lets vanish, with the exponents that it allows.
    """
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
    vanishing = about["vanishing"]
    if vanishing:
        exponents = []
        for name, exponent in vanishing.items():
            exponents.append(f"{name} go as {exponent:+.2f}")
        allowed = ", ".join(exponents)
        terminal.say(f"by its source the preset lets {allowed}")

    if args.json:
        content = report.to_json(findings, about, not_judged)
        Path(args.json).write_text(disk.json_text(content, indent=2) + "\n")
    if args.figure:
        report.figure(args.figure, findings, args.grow, page.title)
    if args.figure_panels:
        grown_sizes = [2.0**doubling for doubling in range(args.sizes)]
        report.panels(
            args.figure_panels, findings, grown_sizes, f"{args.grow} / smallest", page.title
        )
    return 0 if passes(findings) else 1


def configured(args: Check, rest: Sequence[str]) -> Config:
    """Return the run whose model, preset and optimizer are checked.

    `--peak-lr` is applied only if batch or tokens grow. Otherwise `_plan` reads it.

    Args:
        rest: Further words of the command line, the flags of a run.

    Raises:
        UsageError: A flag that a check does not read.
        ConfigError: No recipe or model has the name, or the model cannot be built.
    """
    is_recipe = cli.is_recipe(args.model)
    if not is_recipe and args.model not in configs.CONFIGS:
        names = list(dict.fromkeys([*configs.CONFIGS, *RECIPES]))
        near = difflib.get_close_matches(args.model, names, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise configs.ConfigError(
            f"no model or recipe is named {args.model!r}; "
            f"{hint}`mupax models` and `mupax train` list them"
        )
    if args.grow not in RUN_AXES:
        _refuse_flags_of_runs(args, rest)

    def bare_run() -> Config:
        return _bare_run(args.model)

    start = cli.recipe(args.model) if is_recipe else bare_run
    read = ("--model",) if args.grow not in RUN_AXES else ("--",)
    reader = cli.FlagReader("check", command_line.flags(Check), read)
    parsed = cli.parse(args.model, start, rest, reader=reader)
    cli.refuse_session_flags("mupax check", parsed)
    config = parsed.config

    preset = config.preset
    if args.preset is not None:
        # A new config, because constants of the recipe's preset are not constants of this preset.
        preset = PresetConfig(
            name=args.preset,
            base=preset.base,
            joint=preset.joint,
            noise_scale=preset.noise_scale,
        )
    constants = [f"{name}={value}" for name, value in args.values().items()]
    preset = dataclasses.replace(preset, constants=(*preset.constants, *constants))

    optimizer = dataclasses.replace(config.optimizer, name=args.optimizer or config.optimizer.name)
    # If the model grows, `_plan` sets the learning rate, by default that of `check.peak_lr`.
    if args.grow in RUN_AXES and args.peak_lr is not None:
        optimizer = dataclasses.replace(optimizer, peak_lr=args.peak_lr)
    return dataclasses.replace(config, preset=preset, optimizer=optimizer)


def _refuse_flags_of_runs(args: Check, rest: Sequence[str]) -> None:
    """Raise UsageError for flags that a check reads only if batch or tokens grow.

    These are --preset.*, --optimizer.*, --data.*, --steps, --joint and --noise-scale.
    """
    joint_flags = ("--joint", "--noise-scale")
    for word in rest:
        flag = word.partition("=")[0]
        is_run_group = flag.startswith(("--preset.", "--optimizer.", "--data."))
        if is_run_group or flag == "--steps" or flag in joint_flags:
            condition = ""
            if flag in joint_flags:
                condition = f" growing {args.grow} (--grow batch or tokens does)"
            raise command_line.UsageError(
                f"check does not read {flag}{condition}; it takes --model.* and what its --help lists"
            )


def _bare_run(name: str) -> Config:
    """Return a run of a model without a recipe: random data, Adam and the default preset."""
    model = configs.get(name)
    noise = "infilling" if model.denoises else None
    return Config(
        recipe=name,
        model=model,
        data=DataConfig(name="random", batch_size=1, noise=noise),
        preset=PresetConfig(),
        optimizer=OptimizerConfig(name="adam"),
        steps=1,
    )


def relative(chosen: PresetConfig, smallest: configs.ModelConfig) -> Preset:
    """Return the preset with the smallest model as its base.

    A preset that takes no base is returned without one.
    """
    # Whether a preset takes a base is known only after it is built.
    absolute = preset_for(dataclasses.replace(chosen, base=None), smallest)
    if absolute.baseless:
        return absolute
    return preset_for(dataclasses.replace(chosen, base=base_text(smallest.base_sizes())), smallest)
