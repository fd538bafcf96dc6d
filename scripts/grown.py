"""A grown model against one trained from scratch, on the same tokens: `python -m scripts.grown --write`.

A small decoder trains on python_corpus; at half of the steps it is grown into a larger one (`python -m train grow`), which
goes on with the same schedule and the next batch. Beside it the larger and the smaller one train all steps from scratch.
All under one preset and rate, two seeds; nothing is chosen after the fact.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from train.__main__ import main as train
from train.plotting import BLUE, GREY, ORANGE
from zoo import configs, flops

SMALL, LARGE = "lm-proxy", "lm-tiny"
STEPS, SEEDS, EVERY, BATCH = 300, (0, 1), 50, 16
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "growing.md"
BEGIN, END = "<!-- grown: begin -->", "<!-- grown: end -->"
COLOURS = {"small": GREY, "large": BLUE, "grown": ORANGE}


def measure(folder: Path, steps: int, seed: int) -> dict[str, dict[int, float]]:
    """Validation losses by step of the three runs of one seed."""
    shared = ["lm-tiny", "--steps", str(steps), "--seed", str(seed), "--checkpoint.keep", "10", "--log.no-samples"]
    shared += ["--log.no-tensorboard", "--log.no-progress", "--log.eval-every-steps", str(EVERY)]
    shared += [
        "--data.batch-size",
        str(BATCH),
        "--data.eval-examples",
        "256",
        "--checkpoint.every-steps",
        str(steps // 2),
    ]
    at = {name: folder / f"{name}-{seed}" for name in COLOURS}
    _run([*shared, "--model", SMALL, "--workdir", str(at["small"])])
    _run(["grow", str(at["small"] / "checkpoints" / str(steps // 2)), "--to", LARGE, "--out", str(at["grown"])])
    _run([*shared, "--workdir", str(at["grown"]), "--resume"])
    _run([*shared, "--workdir", str(at["large"])])
    found = {name: _losses(path) for name, path in at.items()}
    found["grown"] = {s: loss for s, loss in found["small"].items() if s <= steps // 2} | found["grown"]
    return found


def table(runs: list[dict[str, dict[int, float]]], steps: int) -> str:
    """Markdown: the validation loss at the end, per seed, and what the training cost."""
    small, large = (flops.train_flops(configs.get(name)) for name in (SMALL, LARGE))
    tokens = steps * BATCH * configs.get(LARGE).sizes()["position"]
    cost = {"small": small, "grown": (small + large) / 2, "large": large}
    said = {
        "small": f"`{SMALL}`, from scratch",
        "grown": f"`{SMALL}` for {steps // 2} steps, grown into `{LARGE}`",
        "large": f"`{LARGE}`, from scratch",
    }
    lines = ["| run | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean | training FLOPs |"]
    lines.append("|---|" + "---|" * (len(SEEDS) + 2))
    for name, what in said.items():
        last = [run[name][steps] for run in runs]
        numbers = " | ".join(f"{loss:.4f}" for loss in last)
        lines.append(f"| {what} | {numbers} | {np.mean(last):.4f} | {cost[name] * tokens:.2e} |")
    versions = f"jax {importlib.metadata.version('jax')}, CPU, float32"
    about = (
        f"By `python -m scripts.grown --write`, {versions}: validation loss in nats per byte after {tokens:,} tokens."
    )
    return "\n".join([about, "", *lines])


def draw(runs: list[dict[str, dict[int, float]]], steps: int, path: Path) -> None:
    """Validation losses over steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    for number, run in enumerate(runs):
        for name, losses in run.items():
            kept = {s: loss for s, loss in losses.items() if name != "grown" or s >= steps // 2}
            axes.plot(
                list(kept),
                list(kept.values()),
                "o-",
                ms=3,
                color=COLOURS[name],
                alpha=1 - 0.4 * number,
                label=None if number else name,
            )
    axes.axvline(steps // 2, color=GREY, lw=0.8, ls=":")
    axes.set(xlabel="steps (the same batches)", ylabel="validation loss, nats per byte")
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.grown", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.stem}.json and .png, and its table")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of every run (default {STEPS})")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(Path(folder), args.steps, seed) for seed in SEEDS]
    text = table(runs, args.steps)
    print(text)
    if args.write:
        rows = [{"seed": seed, **run} for seed, run in zip(SEEDS, runs, strict=True)]
        DOCUMENT.with_suffix(".json").write_text(json.dumps({"steps": args.steps, "runs": rows}, indent=1) + "\n")
        draw(runs, args.steps, DOCUMENT.with_suffix(".png"))
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def _run(words: list[str]) -> None:
    if code := train(words):
        raise SystemExit(f"python -m train {' '.join(words)} ended with {code}")


def _losses(folder: Path) -> dict[int, float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


if __name__ == "__main__":
    main()
