"""`mupax presets balance MODEL|RECIPE --out PATH.json`: rates per layer from one batch, for where no preset has a rule."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance:
    """Rates per layer from one batch, for where no preset has a rule.

    By the feature speed formula (Chizat and Netrapalli 2023, 2311.18718): measures cos θ and the four desiderata of every
    block at initialization, derives the learning rates and the output scale that satisfy them, and writes them as a preset
    that `--preset measured:PATH.json` names. A recipe brings its data, optimizer and preset; a model of `mupax models` gets
    random inputs, Adam and sp. The preset gives initialization, multipliers, eps and decay, and the rates to compare with.
    The recipe's flags --model.*, --preset.*, --optimizer.*, --data.* and --seed work here too.
    """

    name: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE|FILE")]
    """A recipe, a config file (also `--config FILE`), or a model of `mupax models`."""
    out: Annotated[Path, conf.arg(metavar="PATH.json")]
    """Where to write the measured preset."""
    optimizer: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Whose rates; the recipe's, or adam for a model."""


def main(argv: Sequence[str]) -> int:
    """Measures, derives, writes, measures again; 0 when done; raises as `configured`."""
    args, rest = command_line.parse_known(
        Balance, "mupax presets balance", cli.with_file_first(argv)
    )
    config = configured(args, rest)
    import jax

    from mupax import presets
    from mupax.presets.tuned import measured
    from mupax.train.config.preset import preset_of
    from mupax.train.studies.check import balance
    from mupax.zoo.definition import definition

    console, model = terminal.console(), definition(config.model)
    reference, batch = preset_of(config), batch_of(config, args.name, console)
    start: Any = {"seed": config.seed, "centered": config.model.centered}
    table = balance.balance(model, batch, config.optimizer, reference=reference, **start).table
    measured.save(
        dataclasses.replace(table, source=f"{args.name}, {table.source}, seed {config.seed}"),
        args.out,
    )
    again = presets.get(f"measured:{args.out}")
    before, after = jax.device_get(
        balance.desiderata(model, batch, config.optimizer, reference, again, **start)
    )
    _show(before, after, table, reference.describe())
    flags = shlex.join(["--preset", f"measured:{args.out}", "--preset.base", "None"])
    terminal.say(f"written to {args.out}; use it with {flags}")
    return 0


def configured(args: Balance, rest: Sequence[str]) -> Config:
    """The run whose model, data, optimizer and reference are measured.

    Args:
        args: of the command.
        rest: the words after those, flags of a run.

    Raises:
        UsageError: a flag that measuring does not read, or a folder that is not there.
        ConfigError: no recipe or model has the name, or values that do not fit together.
    """
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag.partition(".")[0] not in READ:
            takes = f"beside --out it takes {', '.join(READ)} and their fields"
            raise UsageError(f"balance does not read {flag}; {takes}")
    if not args.out.absolute().parent.is_dir():
        raise UsageError(
            f"--out {args.out}: there is no folder {args.out.parent}; make it, or write another path"
        )

    def bare() -> Config:
        model = configs.get(args.name)
        data = DataConfig(
            name="random", batch_size=1, noise="infilling" if model.denoises else None
        )
        preset = PresetConfig(name="sp")
        optimizer = OptimizerConfig(name="adam")
        return Config(
            recipe=args.name, model=model, data=data, preset=preset, optimizer=optimizer, steps=1
        )

    start = cli.recipe(args.name) if cli.is_recipe(args.name) else bare
    chosen = ["--optimizer.name", args.optimizer] if args.optimizer else []
    config = cli.parse(f"balance {args.name}", start, [*rest, *chosen]).config
    if config.data.document_mask:
        raise configs.ConfigError(
            "balance measures windows whose tokens see all before them; leave data.document_mask out"
        )
    return config


def batch_of(config: Config, name: str, console: Console) -> Mapping[str, Any]:
    """The recipe's first training batch, or random inputs and labels for a model without data.

    Args:
        config: of the run.
        name: of its recipe, or of a model.
        console: is told what is prepared.
    """
    from mupax.train import data
    from mupax.train.studies.check import check

    if not cli.is_recipe(name):
        return check.even_batch(config.model)
    return data.load(
        config.data, config.model, seed=config.data_seed, note=console.print
    ).train_batch(0)


def _show(before: Speeds, after: Speeds, table: Table, reference: str) -> None:
    """Print every layer before and after, the four desiderata, and the derived rates."""
    import numpy as np

    layers = [["layer", "cos θ", "feature rms", "speed rms", "part of the loss decay"]]
    columns = [
        (s.cosine, s.feature_rms, s.speed_rms, s.contribution / s.loss_decay)
        for s in (before, after)
    ]
    encoder = [f"encoder block {i}" for i in range(table.sizes.get("encoder_layers", 0))]
    for i, name in enumerate(
        ("embedding", *encoder, *(f"block {i}" for i in range(table.sizes["layers"])), "readout")
    ):
        pairs = zip(*columns, strict=True)
        layers.append(
            [name, *(f"{was[i]:.3g} | {now[i]:.3g}" if i < len(was) else "" for was, now in pairs)]
        )

    def feature_rms(s: Speeds) -> str:
        return f"{min(s.feature_rms):.3g} to {max(s.feature_rms):.3g}"

    goals = [["", "wanted", "before", "after"]]
    for name, target, value in (
        ("signal propagation (feature rms)", "about 1", feature_rms),
        ("feature learning (speed rms, last)", "1", lambda s: f"{s.speed_rms[-1]:.3g}"),
        ("loss decay (nats)", "1", lambda s: f"{s.loss_decay:.3g}"),
        (
            "balance (largest part / smallest)",
            "1",
            lambda s: f"{max(s.contribution) / min(s.contribution):.3g}",
        ),
    ):
        goals.append([name, target, value(before), value(after)])
    rates = [["group", "multiplier", "rate, first layer", "rate, last layer"]]
    for group, scales in sorted(table.scales.items()):
        multiplier, lr = np.atleast_1d(scales.multiplier), np.atleast_1d(scales.lr)
        rates.append([group, f"{multiplier[0]:.3g}", f"{lr[0]:.3g}", f"{lr[-1]:.3g}"])
    for title, rows, left in (
        (f"layers, before ({reference}) | after", layers, ("layer",)),
        ("desiderata, at peak_lr 1", goals, goals[0]),
        (f"derived rates, {table.optimizer}", rates, ("group",)),
    ):
        Section(rows, title, left=left).show()
