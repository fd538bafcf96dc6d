"""The best rate to fine-tune a language model, in full and by adapters, at two widths under `mup` and `sp`: writes docs/finetuning.json.

    nice python -m scripts.studies.finetuning --workdir FOLDER [--seeds 4] [--json FILE]

A source is `lm-proxy` of a width, trained on python_corpus; it goes on with the C headers that NumPy installs, by `mupax
finetune lm` as it is shipped but for the steps and the rate, which is the shipped one times powers of two. Where the best rate is at an
end of the grid, rates are added there. Every seed has a source of its own. At the base's width both presets are the same model and the
same rates, so those runs count for both. A row is one run, written when it is done; a run that has a row is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupax.train import data
from mupax.train.config.run import Config, InitConfig
from mupax.train.core.program import Program, assemble
from mupax.train.reuse.start import finetune, init_from
from mupax.train.run.loop import evaluate
from mupax.train.studies.transfer.fit import Curve
from scripts import ROOT

OUT = ROOT / "docs" / "finetuning.json"
WIDTHS: tuple[int, int] = (16, 64)
BASE = 64
"""The width of lm-proxy, which `mup` is relative to."""
PRESETS = {"mup": (), "sp": ("--preset", "sp", "--preset.base", "None")}
ARMS = {"full": (), "adapters": ("--lora.rank", "4")}
GRID = (-2, -1, 0, 1, 2, 3)
"""Octaves from the shipped rate."""
FARTHEST = 6
"""Octaves from it that no rate is added beyond."""
SEEDS = 4
SHAPE = "--model lm-proxy --model.seq-len 64 --data.batch-size 16 --data.eval-examples 512 --data.eval-batch-size 64"
SOURCE_STEPS = 500
SOURCE = f"lm-tiny {SHAPE} --steps {SOURCE_STEPS} --log.no-tensorboard --log.no-samples --log.no-progress --resume"
TUNE = "--steps 100 --optimizer.warmup-steps 10 --data.eval-examples 256 --data.eval-batch-size 64"

Row = Mapping[str, Any]
Setting = tuple[str, int, str]
"""Preset, width, arm."""
SETTINGS: tuple[Setting, ...] = tuple(
    (preset, width, arm) for arm in ARMS for width in WIDTHS for preset in PRESETS if (preset, width) != ("sp", BASE)
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what has no row yet."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.studies.finetuning", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--workdir", type=Path, required=True, help="for the sources, a few MB each")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"0, 1, … (default {SEEDS})")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write (default docs/finetuning.json)")
    args = parser.parse_args(argv)
    rows: list[Row] = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    while (point := next(missing_runs(rows, args.seeds), None)) is not None:
        rows.append(measured(args.workdir, *point))
        print(json.dumps(rows[-1]), flush=True)
        write(args.json, rows)
    return 0


def write(path: Path, rows: Sequence[Row]) -> None:
    """The file of the rows, which is whole at any time.

    Args:
        path: of the file.
        rows: of all runs that are done.
    """
    numpy = importlib.metadata.version("numpy")
    head = {"command": "python -m scripts.studies.finetuning", "numpy": numpy, "python": sys.version.split()[0]}
    fields = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items())
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    part = path.with_suffix(".part")
    part.write_text(f'{{{fields}, "rows": [\n{lines}\n]}}\n')
    part.replace(path)


def missing_runs(rows: Sequence[Row], seeds: int) -> Iterator[tuple[Setting, int, int | None]]:
    """Runs without a row: setting, seed and octaves from the shipped rate; None stands for the source before any step.

    Args:
        rows: of runs that are done.
        seeds: how many.
    """
    done = {(row["preset"], row["width"], row["arm"], row["seed"], row["octaves"]) for row in rows}
    for seed in range(seeds):
        for setting in SETTINGS:
            octaves = (None, *GRID) if setting[2] == "full" else GRID
            yield from ((setting, seed, k) for k in octaves if (*setting, seed, k) not in done)
    for setting in SETTINGS:
        added = sorted({key[4] for key in done if key[:3] == setting} - {None, *GRID})
        partial = [(setting, seed, k) for k in added for seed in range(seeds) if (*setting, seed, k) not in done]
        yield from partial
        if not partial:  # a rate that one seed has is judged when all have it
            ends = [k for k in map(round, curve(rows, setting).missing(1.0)) if abs(k) <= FARTHEST]
            yield from ((setting, seed, k) for k in ends for seed in range(seeds))


def curve(rows: Sequence[Row], setting: Setting) -> Curve:
    """Losses by octaves from the shipped rate and seed; under `sp` at the base's width those of `mup`.

    Args:
        rows: of runs that are done.
        setting: of the curve.
    """
    preset, width, arm = setting
    of = ("mup" if width == BASE else preset, width, arm)
    losses: dict[int, dict[int, float]] = {}
    for row in rows:
        if (row["preset"], row["width"], row["arm"]) == of and row["octaves"] is not None:
            loss = math.inf if row["loss"] is None else row["loss"]
            losses.setdefault(row["octaves"], {})[row["seed"]] = loss
    seeds = 1 + max((seed for each in losses.values() for seed in each), default=-1)
    array = np.array([[losses[k].get(seed, np.nan) for seed in range(seeds)] for k in sorted(losses)])
    return Curve(np.array(sorted(losses), float), array, seeds)


def measured(workdir: Path, setting: Setting, seed: int, octaves: int | None) -> Row:
    """The row of one run, whose source is trained where it is not there.

    Args:
        workdir: for the sources.
        setting: preset, width, arm.
        seed: of the source and of the run.
        octaves: from the shipped rate; None evaluates the source.
    """
    shipped = config(workdir, setting, seed)
    peak = shipped.optimizer.peak_lr * 2.0 ** (octaves or 0)
    optimizer = dataclasses.replace(shipped.optimizer, peak_lr=peak)
    run = dataclasses.replace(shipped, optimizer=optimizer)
    loss = final_loss(run, steps=0 if octaves is None else None)
    row = dict(zip(("preset", "width", "arm"), setting, strict=True))
    rate = None if octaves is None else peak
    return {**row, "seed": seed, "octaves": octaves, "rate": rate, "loss": loss if math.isfinite(loss) else None}


@functools.lru_cache
def config(workdir: Path, setting: Setting, seed: int) -> Config:
    """The config that `finetune lm` makes of a setting.

    Args:
        workdir, setting, seed: as `measured`.

    Raises:
        CalledProcessError: its source could not be trained.
    """
    preset, width, arm = setting
    source = workdir / f"{preset}-{width}-{seed}"
    if not (source / "checkpoints" / str(SOURCE_STEPS)).exists():
        words = [*SOURCE.split(), *PRESETS[preset], "--model.width", str(width)]
        words += ["--seed", str(seed), "--workdir", str(source)]
        subprocess.run([sys.executable, "-m", "mupax.train", *words], check=True)
    words = ["lm", np.get_include(), "--from", str(source), *TUNE.split(), *ARMS[arm], "--seed", str(seed)]
    return finetune.command(words).config


class CompiledSteps(NamedTuple):
    """A program with its compiled training and evaluation steps."""

    program: Program
    train_step: Any
    eval_step: Any


@functools.lru_cache
def _compiled(config: Config) -> CompiledSteps:
    program = assemble(config)
    train_step = program.compile_train()
    return CompiledSteps(program, train_step, program.compile_eval(train_step))


def final_loss(config: Config, steps: int | None = None) -> float:
    """Return the evaluation loss (nats) after a run of `finetune`, without a workdir.

    Args:
        steps: Optimizer steps to train; those of the config unless given.
    """
    # Runs that differ in numbers and files alone share a program, so that each is compiled once.
    source_kind = config.data.name.partition(":")[0]
    shape = dataclasses.replace(config.data, name=f"{source_kind}:x")
    optimizer = dataclasses.replace(config.optimizer, peak_lr=1.0, layer_decay=1.0)
    plain = dataclasses.replace(config, seed=0, workdir=None, init=InitConfig(), data=shape, optimizer=optimizer)
    program, train_step, eval_step = _compiled(plain)
    program = program.with_config(config)
    source = data.load(config.data, config.model, seed=config.data_seed, note=lambda line: None)
    if config.init.init_from is not None:
        state = init_from.initial_state(program, init_from.prepare(program))
    else:
        state = program.initial_state()
    state = program.placed(state, train_step)
    step_inputs = program.step_inputs()
    feed = program.train_feed()
    for k in range(config.steps if steps is None else steps):
        state, _ = train_step(state, step_inputs, feed.shard_batch(source.train_batch(k)))
    return evaluate(eval_step, state.params, step_inputs, source, program.eval_feed())["loss"]
