"""What the first run's recipe is worth in equal CPU seconds: the former one, each change to it, and others': docs/first_run.md.

    python -m scripts.bench.recipes.first_run [--steps 400] [--rows NAME ...] [--json docs/first_run.json] [--render]

Every row trains on one core, on the same text, as many steps as fit into the seconds that the first row's take; a few steps are timed
first. Rows are kept as they finish, so what was stopped goes on; `--render` only makes the page. Others' rows need PyTorch
(`pip install -e ".[torch]"`). Where a row's rate is tuned it is doubled until the loss rises, and the best counts (`tuned`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import ROOT
from scripts.bench.recipes import first_images
from scripts.bench.recipes.equal_seconds import step_seconds, trained, tuned

if TYPE_CHECKING:
    from mupax.train.config.run import Config

OUT = ROOT / "docs" / "first_run.json"
SMALL = "--model.width 64 --model.num-heads 2"
MUON = f"lm-tiny --data.batch-size 8 {SMALL} --optimizer.name muon --optimizer.peak-lr"
ADAMW = "AdamW, its rate tuned"
"""The row whose rate is searched as PyTorch's are."""
OURS = {
    "lm-tiny": "lm-tiny",
    "half the batch": "lm-tiny --data.batch-size 8",
    "half the width": f"lm-tiny --data.batch-size 8 {SMALL}",
    ADAMW: f"lm-tiny --data.batch-size 8 {SMALL}",
    "Muon": f"{MUON} 0.008",
    "its rate tuned: lm-laptop": "lm-laptop",
    "QK-norm, not taken": "lm-laptop --model.qk-norm",
    "width 96, not taken": "lm-laptop --model.width 96 --model.num-heads 3",
}
"""Row to the words of its run; each but those not taken has one change more than the row before, Muon in AdamW's place."""
PYTORCH = {
    "nanoGPT's model and recipe": "nanogpt",
    "AdamW in PyTorch, lm-laptop's model": "control",
}
HEAD = """# What the first run is worth

`make train` runs `lm-laptop`. Here are its steps from `lm-tiny`, each beside what it brings, and two runs in PyTorch: nanoGPT's character model
(836,736 parameters) under its own recipe, and AdamW on a model of `lm-laptop`'s size. All train on the same text, on one core, for the CPU
seconds of the first row, half of what `lm-tiny` takes; validation loss in nats per byte over the same 131,072 bytes, one seed.

Made by `python -m scripts.bench.recipes.first_run`. A warm-up of 5 %, a cosine to zero; nanoGPT's is its own. Where a row has rates,
they were doubled until the loss rose, and the best counts: so AdamW's rates are tuned to their rows, ours as PyTorch's, and what
Muon brings is told from what its rate does. Other work ran on the machine.
"""


def words_of(name: str, steps: int, rate: float | None = None) -> list[str]:
    """The words after `mupax train` of a row of ours, at a length, and at a rate of its own."""
    own = [] if rate is None else ["--optimizer.peak-lr", f"{rate:g}"]
    return [*OURS[name].split(), *own, "--steps", str(steps), "--optimizer.warmup-steps", str(max(1, steps // 20))]


def ours(name: str, seconds: float | None, steps: int) -> dict[str, Any]:
    """A row of ours: so many steps, or as many as fit into the seconds."""
    from mupax.train.config import cli

    def config_of(words: Sequence[str]) -> Config:
        return cli.parse(words[0], cli.recipe(words[0]), words[1:]).config

    def row(rate: float | None = None) -> dict[str, Any]:
        words = words_of(name, steps, rate)
        fields, loss = trained(config_of(words), steps)
        own = {} if rate is None else {"rate": rate}
        return {**fields, **own, "loss": round(loss(), 4), "command": f"mupax train {' '.join(words)}"}

    if seconds is not None:
        steps = int(seconds / step_seconds(config_of(words_of(name, 60))))
    return tuned(row) if name == ADAMW else row()


def pytorch_row(name: str, seconds: float) -> dict[str, Any]:
    """The best rate of a recipe in PyTorch, and all that were tried."""
    from mupax.train import data
    from mupax.train.config.recipes import RECIPES
    from scripts.bench.pytorch import runs as torch_runs

    recipe = torch_runs.RECIPES[PYTORCH[name]]
    config = RECIPES["lm-tiny"]() if PYTORCH[name] == "nanogpt" else RECIPES["lm-laptop"]()
    run = torch_runs.Run(recipe, data.load(config.data, recipe.model, seed=0, note=lambda line: None))
    steps = int(seconds / run.seconds())
    size = steps * config.data.batch_size * recipe.model.units
    return {"parameters": run.count, "bytes": size, **tuned(lambda rate: run.train(rate, steps))}


def markdown(record: dict[str, Any]) -> str:
    """The page."""
    lines = ["| run | parameters | steps | bytes seen | CPU seconds | nats per byte |", "|---|---|---|---|---|---|"]
    for name, row in record["rows"].items():
        label = name + (f", rate {row['rate']:g} of {', '.join(row['rates'])}" if "rates" in row else "")
        lines += [
            f"| {label} | {row['parameters']:,} | {row['steps']:,} | {row['bytes']:,} | {row['cpu_seconds']:.0f} | {row['loss']:.3f} |"
        ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    images = first_images.section(json.loads(first_images.OUT.read_text())) if first_images.OUT.exists() else ""
    return "\n".join([HEAD, *lines, "", f"Measured with {versions}.", images])


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the data and the page."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.recipes.first_run", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=400, help="of the first row, whose seconds all others have (400)")
    parser.add_argument("--rows", nargs="+", choices=[*OURS, *PYTORCH], metavar="NAME", help="which (all)")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write, the page beside it")
    parser.add_argument("--render", action="store_true", help="only make the page")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SECONDS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        return _one(args.one[0], float(args.one[1]), args.steps)
    record: dict[str, Any] = {
        "command": f"python -m scripts.bench.recipes.first_run --steps {args.steps}",
        "versions": {},
        "rows": {},
    }
    if args.json.exists():
        record = json.loads(args.json.read_text())
    for name in (
        () if args.render else (name for name in (args.rows or [*OURS, *PYTORCH]) if name not in record["rows"])
    ):
        first = next(iter(OURS))
        seconds = 0.0 if name == first else record["rows"][first]["cpu_seconds"]
        command = [
            sys.executable,
            "-m",
            "scripts.bench.recipes.first_run",
            "--steps",
            str(args.steps),
            "--one",
            name,
            str(seconds),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        record["versions"] |= row.pop("versions")
        order = [*OURS, *PYTORCH]
        record["rows"] = dict(sorted({**record["rows"], name: row}.items(), key=lambda item: order.index(item[0])))
        print(f"{name}: {row['loss']:.4f} after {row['cpu_seconds']} s", flush=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    args.json.with_suffix(".md").write_text(markdown(record))
    return 0


def _one(name: str, seconds: float, steps: int) -> int:
    """One row, in a process of its own, on one core."""
    from mupax.train.parallel import hardware

    hardware.keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from importlib.metadata import version

    with contextlib.redirect_stdout(sys.stderr):
        row = ours(name, seconds or None, steps) if name in OURS else pytorch_row(name, seconds)
    print(
        json.dumps(
            {**row, "versions": {"jax" if name in OURS else "torch": version("jax" if name in OURS else "torch")}}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
