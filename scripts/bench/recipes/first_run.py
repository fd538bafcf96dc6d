"""What the first run's recipe is worth in equal CPU seconds: the former one, each change to it, and others': docs/first_run.md.

    python -m scripts.bench.recipes.first_run [--steps 400] [--rows NAME ...] [--json docs/first_run.json] [--render]

Every row trains on one core, on the same text, as many steps as fit into the seconds that the first row's take; a few steps are timed
first. Rows are kept as they finish, so what was stopped goes on; `--render` only makes the page. Others' rows need PyTorch
(`pip install -e ".[torch]"`), and the best of their three rates counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench.recipes import first_images

OUT = ROOT / "docs" / "first_run.json"
SMALL = "--model.width 64 --model.num-heads 2"
MUON = f"lm-tiny --data.batch-size 8 {SMALL} --optimizer.name muon --optimizer.peak-lr"
OURS = {
    "lm-tiny": "lm-tiny",
    "half the batch": "lm-tiny --data.batch-size 8",
    "half the width": f"lm-tiny --data.batch-size 8 {SMALL}",
    "Muon": f"{MUON} 0.008",
    "its rate tuned: lm-laptop": "lm-laptop",
    "QK-norm, not taken": "lm-laptop --model.qk-norm",
    "width 96, not taken": "lm-laptop --model.width 96 --model.num-heads 3",
}
"""Row to the words of its run; each but those not taken has one change more than the row before."""
RATES = (1e-3, 2e-3, 4e-3)
OTHERS = {
    "nanoGPT's model and recipe": "nanogpt",
    "AdamW in PyTorch, lm-laptop's model": "control",
}
HEAD = """# What the first run is worth

`make train` runs `lm-laptop`. Here are its steps from `lm-tiny`, each beside what it brings, and two runs in PyTorch: nanoGPT's character model
(836,736 parameters) under its own recipe, and AdamW on a model of `lm-laptop`'s size. All train on the same text, on one core, for the CPU
seconds of the first row, half of what `lm-tiny` takes; validation loss in nats per byte over the same 131,072 bytes, one seed.

Made by `python -m scripts.bench.recipes.first_run`. A warm-up of 5 %, a cosine to zero; nanoGPT's is its own. Of PyTorch's rates
the best of three counts, and it was the largest: a larger one may be better still. No rate of AdamW in the rows of ours is tuned to its row, so
that Muon's share is not told from that of its rate. Other work ran on the machine.
"""


def words_of(name: str, steps: int) -> list[str]:
    """The words after `python -m train` of a row of ours, at a length."""
    return [*OURS[name].split(), "--steps", str(steps), "--optimizer.warmup-steps", str(max(1, steps // 20))]


def ours(name: str, seconds: float | None, steps: int) -> dict[str, Any]:
    """A row of ours: so many steps, or as many as fit into the seconds."""
    import jax

    from mupax.train import data
    from mupax.train.config import cli
    from mupax.train.core.program import assemble
    from mupax.train.run.evaluate import evaluate
    from mupax.train.run.prefetch import Prefetch

    def trained(steps: int) -> tuple[dict[str, Any], Any]:
        recipe, *words = words_of(name, steps)
        config = cli.parse(recipe, cli.recipe(recipe), words).config
        source = data.load(config.data, config.model, seed=config.seed, note=lambda line: None)
        program = assemble(config)
        step = program.compile_train()
        state, numbers, feed = (
            program.placed(program.initial_state(), step),
            program.step_inputs(),
            program.train_feed(),
        )
        with Prefetch(source.train_batches(0, *feed.rows), feed.put) as batches:
            began = time.process_time()
            for batch, _ in zip(batches, range(steps), strict=False):
                state, _ = step(state, numbers, batch)
            jax.block_until_ready(state)
            took = time.process_time() - began
        tokens = steps * config.data.batch_size * config.model.units
        row = {"parameters": program.definition.count(), "steps": steps, "bytes": tokens, "cpu_seconds": round(took, 1)}
        return (
            row,
            lambda: evaluate(program.compile_eval(step), state.params, numbers, source, program.eval_feed()).loss,
        )

    if seconds is not None:
        timed = 60
        steps = int(seconds / (trained(timed)[0]["cpu_seconds"] / timed))
    row, loss = trained(steps)
    return {**row, "loss": round(loss(), 4), "command": f"python -m train {' '.join(words_of(name, steps))}"}


def others(name: str, seconds: float) -> dict[str, Any]:
    """The best of three rates of a recipe in PyTorch, and all three."""
    from mupax.train import data
    from mupax.train.config.recipes import RECIPES
    from scripts.bench.pytorch import runs as torch_runs

    recipe = torch_runs.RECIPES[OTHERS[name]]
    config = RECIPES["lm-tiny"]() if OTHERS[name] == "nanogpt" else RECIPES["lm-laptop"]()
    run = torch_runs.Run(recipe, data.load(config.data, recipe.model, seed=0, note=lambda line: None))
    steps = int(seconds / run.seconds())
    rows = [run.train(rate, steps) for rate in RATES]
    best = min(rows, key=lambda row: row["loss"])
    size = steps * config.data.batch_size * recipe.model.units
    return {"parameters": run.count, "bytes": size, **best, "rates": {f"{row['rate']:g}": row["loss"] for row in rows}}


def markdown(kept: dict[str, Any]) -> str:
    """The page."""
    lines = ["| run | parameters | steps | bytes seen | CPU seconds | nats per byte |", "|---|---|---|---|---|---|"]
    for name, row in kept["rows"].items():
        label = name + (f", rate {row['rate']:g} of {', '.join(row['rates'])}" if "rates" in row else "")
        lines += [
            f"| {label} | {row['parameters']:,} | {row['steps']:,} | {row['bytes']:,} | {row['cpu_seconds']:.0f} | {row['loss']:.3f} |"
        ]
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    images = first_images.section(json.loads(first_images.OUT.read_text())) if first_images.OUT.exists() else ""
    return "\n".join([HEAD, *lines, "", f"Measured with {versions}.", images])


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the data and the page."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.recipes.first_run", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=400, help="of the first row, whose seconds all others have (400)")
    parser.add_argument("--rows", nargs="+", choices=[*OURS, *OTHERS], metavar="NAME", help="which (all)")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write, the page beside it")
    parser.add_argument("--render", action="store_true", help="only make the page")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SECONDS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        return _one(args.one[0], float(args.one[1]), args.steps)
    kept: dict[str, Any] = {
        "command": f"python -m scripts.bench.recipes.first_run --steps {args.steps}",
        "versions": {},
        "rows": {},
    }
    if args.json.exists():
        kept = json.loads(args.json.read_text())
    for name in () if args.render else (name for name in (args.rows or [*OURS, *OTHERS]) if name not in kept["rows"]):
        first = next(iter(OURS))
        seconds = 0.0 if name == first else kept["rows"][first]["cpu_seconds"]
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
        kept["versions"] |= row.pop("versions")
        order = [*OURS, *OTHERS]
        kept["rows"] = dict(sorted({**kept["rows"], name: row}.items(), key=lambda item: order.index(item[0])))
        print(f"{name}: {row['loss']:.4f} after {row['cpu_seconds']} s", flush=True)
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    args.json.with_suffix(".md").write_text(markdown(kept))
    return 0


def _one(name: str, seconds: float, steps: int) -> int:
    """One row, in a process of its own, on one core."""
    from mupax.train.parallel import hardware

    hardware.keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from importlib.metadata import version

    with contextlib.redirect_stdout(sys.stderr):
        row = ours(name, seconds or None, steps) if name in OURS else others(name, seconds)
    print(
        json.dumps(
            {**row, "versions": {"jax" if name in OURS else "torch": version("jax" if name in OURS else "torch")}}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
