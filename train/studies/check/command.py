"""`python -m train check MODEL|RECIPE`: measure what a preset does as one size grows, hold it against theory, and judge the theory."""

from __future__ import annotations

import dataclasses
import difflib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.presets import Preset
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config import cli
from mupax.train.config.preset import base_text, preset_for
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, DataConfig, OptimizerConfig, PresetConfig
from mupax.zoo import configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(cli.ConstantFlags):
    """Two verdicts on a preset: does a program do what its table says as one size grows, and is the table any good.

    Takes the structure of a model (norm, activation, positions, biases, grouped heads, ties) at small sizes, grows one of
    them over a few doublings, trains every size for ten steps from several seeds on one batch, and fits log-log slopes. A recipe
    brings its model, preset and optimizer. --model.* change the structure, and a size so written is the smallest model's.
    """

    model: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE")] = "lm-proxy"
    """A model of `python -m zoo` or a recipe, for its structure."""
    preset: Annotated[str | None, conf.arg(aliases=("--preset.name",), metavar="NAME")] = None
    """A preset of `python -m presets`; the recipe's, or mup for a model."""
    grow: Literal["head_dim", "heads", "depth", "width", "mlp", "kv_heads"] = "head_dim"
    """Which size grows; width doubles heads and head_dim in turn."""
    optimizer: Annotated[str | None, conf.arg(aliases=("--optimizer.name",), metavar="NAME")] = None
    """Whose rates; the recipe's, or adam for a model."""
    accept: tuple[Literal["lazy"], ...] = ()
    """Judge a preset whose source wants a lazy limit by that: features may move less and less, as much as its source says."""
    peak_lr: Annotated[float | None, conf.arg(aliases=("--optimizer.peak-lr",), metavar="X")] = None
    """Rate at base size; by optimizer unless given."""
    sizes: Annotated[int, conf.arg(metavar="N")] = 4
    """How many sizes, each twice the one before."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 4
    """Initializations per size."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write verdict and slopes as JSON."""
    figure: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw every observable against size (PNG)."""
    dry_run: Switch = False
    """Print the sizes and what theory expects; measure nothing."""


def main(argv: Sequence[str]) -> int:
    """Measures, judges, prints, writes: 0 when the program does what the table says and the table is good, 1 when one is not."""
    args, rest = command_line.parse_known(Check, "python -m train check", cli.with_group_constants(argv))
    config = configured(args, rest)
    from mupax.presets.analysis.uneven import refuse_uneven
    from mupax.train.studies.check import check, groups, report, theory
    from mupax.zoo.definition import definition

    if args.sizes < 2 or args.seeds < 1:
        raise configs.ConfigError("a slope needs --sizes of at least 2 and --seeds of at least 1")
    started = time.monotonic()
    written = {word.partition("=")[0].removeprefix("--model.").replace("-", "_") for word in rest}
    grown = check.grow(config.model, args.grow, args.sizes, written)
    preset = relative(config.preset, grown[0])
    optimizer = OptimizerConfig(name=config.optimizer.name, schedule="constant", eps=1e-12)
    optimizer = dataclasses.replace(optimizer, peak_lr=args.peak_lr or OPTIMIZERS[optimizer.name].check_lr)
    definitions = [definition(one) for one in grown]
    refuse_uneven(preset, definitions[-1].sizes, optimizer.name)
    expected = theory.of(preset, definitions[0], definitions[-1], optimizer.name, accept=args.accept)
    not_judged = groups.not_judged(definitions[0].specs, expected)
    growth, _ = theory.growth(definitions[0].sizes, definitions[-1].sizes)
    vanishing = {name: power.growth(growth) for name, power in preset.vanishing.items() if power.growth(growth)}
    if args.dry_run:
        for one in grown:
            print(f"width {one.width}, {one.num_heads} heads of {one.heads_dim}, depth {one.depth}")
        for (name, step), slope in expected.items():
            trouble = f", {slope.trouble}" if slope.trouble else ""
            print(f"{name} after {step}: theory says {slope.slope:+.2f}{trouble}")
        for name in not_judged:
            print(f"{name}: theory says nothing")
        for name, exponent in vanishing.items():
            print(f"{name}: its source lets it go as {exponent:+.2f}")
        return 0
    findings = check.study(definitions, preset, optimizer, check.batch(grown[0]), args.seeds, args.accept)
    grew = f"growing {args.grow} {args.sizes - 1} times twofold ({time.monotonic() - started:.0f} s)"
    title = f"{args.model} under {preset.label}, {optimizer.name}, {grew}"
    report.show(terminal.console(), findings, title, not_judged)
    if vanishing:
        print("its source lets go " + ", ".join(f"{name} as {exponent:+.2f}" for name, exponent in vanishing.items()))
    about = {
        "model": args.model,
        "preset": preset.name,
        "constants": {**preset.given, **preset.constants},
        "optimizer": optimizer.name,
        "peak_lr": optimizer.peak_lr,
        "grow": args.grow,
        "seeds": args.seeds,
        "accept": list(args.accept),
        "vanishing": vanishing,
        "sizes": [dataclasses.asdict(one) for one in grown],
    }
    if args.json:
        Path(args.json).write_text(json.dumps(report.to_json(findings, about, not_judged), indent=2) + "\n")
    if args.figure:
        report.figure(args.figure, findings, [2.0**i for i in range(args.sizes)], f"{args.grow} / smallest", title)
    return 0 if check.passes(findings) else 1


def configured(args: Check, rest: Sequence[str]) -> Config:
    """The run whose model, preset and optimizer are checked.

    Args:
        args: of the command.
        rest: the words after those, flags of a run.

    Raises:
        UsageError: a flag that a check does not read.
        ConfigError: no recipe or model has the name, or a model that cannot be built.
    """
    if args.model not in RECIPES and args.model not in configs.CONFIGS:
        near = difflib.get_close_matches(args.model, [*configs.CONFIGS, *RECIPES], n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise configs.ConfigError(
            f"no model or recipe is named {args.model!r}; {hint}`python -m zoo` and `python -m train` list them"
        )
    for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
        if flag.startswith(("--preset.", "--optimizer.", "--data.")) or flag == "--steps":
            raise command_line.UsageError(f"check does not read {flag}; it takes --model.* and what its --help lists")

    def bare() -> Config:
        model, data, preset = configs.get(args.model), DataConfig(name="random", batch_size=1), PresetConfig()
        return Config(
            recipe=args.model, model=model, data=data, preset=preset, optimizer=OptimizerConfig(name="adam"), steps=1
        )

    config = cli.parse(f"check {args.model}", RECIPES.get(args.model, bare), rest, command_line.flags(Check)).config
    constants = tuple(f"{name}={value}" for name, value in args.values().items())
    start = config.preset if args.preset is None else PresetConfig(name=args.preset)
    preset = dataclasses.replace(start, constants=(*start.constants, *constants))
    optimizer = dataclasses.replace(config.optimizer, name=args.optimizer or config.optimizer.name)
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
