"""Command `mupax presets balance`: learning rates per layer for a model that no preset covers."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import UsageError
from mupax.train.config import cli
from mupax.train.config.run import Config, DataConfig, OptimizerConfig, PresetConfig
from mupax.train.studies.report import Section
from mupax.zoo import configs

if TYPE_CHECKING:
    from rich.console import Console

    from mupax.presets.tuned.measured import Table
    from mupax.train.studies.check.feature_speed import Speeds

READ = ("--model", "--preset", "--optimizer", "--data", "--seed")
"""Flags of a run that the command reads, including all fields below them (`--model.depth`)."""
_IDLE = (
    "peak-lr",
    "adam-lr",
    "weight-decay",
    "decay",
    "layer-decay",
    "clip-norm",
    "schedule",
    "warmup-steps",
    "warmup-tokens",
    "warmup-from-zero",
    "decay-steps",
    "decay-timescale",
    "final-lr-fraction",
    "qk-clip",
)
"""Flags of `--optimizer.` that change nothing: the first step has no schedule, and rate 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance:
    """Derive learning rates per layer from one batch, for models that no preset covers.

    By the feature speed formula (Chizat and Netrapalli 2023, 2311.18718): measures cos θ and the
    four desiderata of every block at initialization, derives the learning rates and the output
    scale that satisfy them, and writes them as a preset that `--preset measured:PATH.json` names. A
    recipe brings its data, optimizer and preset; a model of `mupax models` gets random inputs, Adam
    and sp. The preset gives initialization, multipliers, eps and decay, and the rates to compare
    with. The recipe's flags --model.*, --preset.*, --optimizer.*, --data.* and --seed work here
    too.
    """

    name: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE|FILE")]
    """A recipe, a config file (also `--config FILE`), or a model of `mupax models`."""
    out: Annotated[Path, conf.arg(metavar="PATH.json")]
    """Where to write the measured preset."""
    optimizer: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Optimizer to derive rates for; the recipe's, or adam for a model."""


def main(argv: Sequence[str]) -> int:
    """Run `mupax presets balance`: derive learning rates from one batch and write a preset.

    The preset is written to `--out`, where an existing file is replaced. Then the new preset and
    the reference (the preset that gave its initialization) are measured, and tables of both are
    printed. Return 0.

    Raises:
        UsageError, ConfigError: As for `configured`.
        PresetError: The model cannot be measured or no rates can be derived, as for
            `balance.balance`. Nothing is written.
    """
    args, rest = command_line.parse_known(
        Balance, "mupax presets balance", cli.with_file_first(argv)
    )
    config = configured(args, rest)
    # Wrong flags are refused above, without the seconds that importing JAX takes.
    import jax

    from mupax import presets
    from mupax.presets.tuned import measured
    from mupax.train.config.preset import preset_of
    from mupax.train.studies.check import balance
    from mupax.zoo.definition import definition

    console = terminal.console()
    model = definition(config.model)
    reference = preset_of(config)
    batch = batch_of(config, args.name, console)
    start: Any = {"seed": config.seed, "centered": config.model.centered}

    table = balance.balance(model, batch, config.optimizer, reference=reference, **start).table
    source = f"{args.name}, {table.source}, seed {config.seed}"
    measured.save(dataclasses.replace(table, source=source), args.out)
    new_preset = presets.get(f"measured:{args.out}")
    # Both presets in one call share one compiled program.
    speeds = balance.desiderata(model, batch, config.optimizer, reference, new_preset, **start)
    before, after = jax.device_get(speeds)

    _show(before, after, table, reference.describe())
    # A measured table has absolute numbers, so the base of the recipe must be dropped.
    flags = shlex.join(["--preset", f"measured:{args.out}", "--preset.base", "None"])
    terminal.say(f"written to {args.out}; use it with {flags}")
    return 0


def configured(args: Balance, rest: Sequence[str]) -> Config:
    """Return the run whose model, data and optimizer the new preset is derived for.

    The run's preset is the reference, which gives the initialization.

    Args:
        rest: Further words of the command line, the flags of a run.

    Raises:
        UsageError: A flag that the command does not read, or a folder that does not exist.
        ConfigError: No recipe or model has the name, values do not fit together, or
            `data.document_mask` is on.
    """
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag.partition(".")[0] not in READ:
            takes = f"beside --out it takes {', '.join(READ)} and their fields"
            raise UsageError(f"balance does not read {flag}; {takes}")
        owner, _, field = flag.replace("_", "-").replace(".no-", ".").partition(".")
        if owner == "--optimizer" and field in _IDLE:
            raise UsageError(
                f"{flag} has no effect: balance derives the rates from a first step at rate 1, "
                f"without decay and clipping; leave {flag} out"
            )
    if not args.out.absolute().parent.is_dir():
        raise UsageError(
            f"--out {args.out}: there is no folder {args.out.parent}; "
            f"make it, or write another path"
        )

    def bare_run() -> Config:
        model = configs.get(args.name)
        noise = "infilling" if model.denoises else None
        return Config(
            recipe=args.name,
            model=model,
            data=DataConfig(name="random", batch_size=1, noise=noise),
            preset=PresetConfig(name="sp"),
            optimizer=OptimizerConfig(name="adam"),
            steps=1,
        )

    start = cli.recipe(args.name) if cli.is_recipe(args.name) else bare_run
    optimizer_words = ["--optimizer.name", args.optimizer] if args.optimizer else []
    reader = cli.FlagReader("presets balance", command_line.flags(Balance), READ)
    config = cli.parse(args.name, start, [*rest, *optimizer_words], reader=reader).config
    if config.data.document_mask:
        raise configs.ConfigError(
            "balance measures windows whose tokens see all before them; "
            "leave data.document_mask out"
        )
    return config


def batch_of(config: Config, name: str, console: Console) -> Mapping[str, Any]:
    """Return a recipe's first training batch, or a random batch for a model without data.

    The recipe's data is prepared first if needed, for instance tokenized. The random batch comes
    from `check.even_batch`.

    Args:
        name: Name of a recipe, or of a model without data.
        console: Console for messages on the preparation of data.
    """
    from mupax.train import data
    from mupax.train.studies.check import check

    if not cli.is_recipe(name):
        return check.even_batch(config.model)
    stream = data.load(config.data, config.model, seed=config.data_seed, note=console.print)
    return stream.train_batch(0)


def _show(before: Speeds, after: Speeds, table: Table, reference: str) -> None:
    """Print three tables: layers before and after, the four desiderata, and the derived rates.

    Args:
        before: Speeds under the reference preset, on the host.
        after: Speeds under the new preset, on the host.
        table: Table of the new preset, with the derived rates.
        reference: Description of the reference preset, for a title.
    """
    layers = _layer_rows(before, after, table)
    title = f"layers, before ({reference}) | after"
    Section(layers, title, left=("layer",)).show()
    goals = _goal_rows(before, after)
    Section(goals, "desiderata, at peak_lr 1", left=goals[0]).show()
    rates = _rate_rows(table)
    Section(rates, f"derived rates, {table.optimizer}", left=("group",)).show()


def _layer_rows(before: Speeds, after: Speeds, table: Table) -> list[list[str]]:
    """Return the table of layers as text: a header, and a row per layer and the readout.

    Cells are "before | after". Columns are cos θ (the alignment of a feature's change with the
    descent direction), root mean squares of the feature and its speed, and the layer's share of the
    loss decay.
    """
    encoder_depth = table.sizes.get("encoder_layers", 0)
    names = ["embedding"]
    names += [f"encoder block {index}" for index in range(encoder_depth)]
    names += [f"block {index}" for index in range(table.sizes["layers"])]
    names += ["readout"]

    column_pairs = [
        (before.cosine, after.cosine),
        (before.feature_rms, after.feature_rms),
        (before.speed_rms, after.speed_rms),
        (before.contribution / before.loss_decay, after.contribution / after.loss_decay),
    ]
    rows = [["layer", "cos θ", "feature rms", "speed rms", "part of the loss decay"]]
    for index, name in enumerate(names):
        cells = [name]
        for old, new in column_pairs:
            # The readout has a part of the loss decay and no feature.
            cells.append(f"{old[index]:.3g} | {new[index]:.3g}" if index < len(old) else "")
        rows.append(cells)
    return rows


def _goal_rows(before: Speeds, after: Speeds) -> list[list[str]]:
    """Return the table of the four desiderata as text: name, goal, value before and after."""
    rows = [
        ["", "wanted", "before", "after"],
        ["signal propagation (feature rms)", "about 1"],
        ["feature learning (speed rms, last)", "1"],
        ["loss decay (nats)", "1"],
        ["balance (largest part / smallest)", "1"],
    ]
    for speeds in (before, after):
        feature_rms = speeds.feature_rms
        rows[1].append(f"{min(feature_rms):.3g} to {max(feature_rms):.3g}")
        rows[2].append(f"{speeds.speed_rms[-1]:.3g}")
        rows[3].append(f"{speeds.loss_decay:.3g}")
        rows[4].append(f"{max(speeds.contribution) / min(speeds.contribution):.3g}")
    return rows


def _rate_rows(table: Table) -> list[list[str]]:
    """Return the table of learning rates as text: a header, and a row per group of parameters.

    Columns are the multiplier in the first layer, and the learning rate in first and last layer.
    """
    import numpy as np

    rows = [["group", "multiplier", "rate, first layer", "rate, last layer"]]
    for group, scales in sorted(table.scales.items()):
        multiplier = np.atleast_1d(scales.multiplier)
        lr = np.atleast_1d(scales.lr)
        rows.append([group, f"{multiplier[0]:.3g}", f"{lr[0]:.3g}", f"{lr[-1]:.3g}"])
    return rows
