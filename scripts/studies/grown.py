"""A grown model against one trained from scratch, on the same tokens: `python -m scripts.studies.grown --write`.

Two smaller decoders train on python_corpus; at half of the steps each is grown into the larger one (`mupax grow`),
which goes on with the same schedule and the next batch. Beside them all three train every step from scratch. One preset, one
rate, two seeds; the batch was cut to 4 after one run at 16, of the same order.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mupax.train.config.record import model_from_json
from mupax.train.run.report.plotting import BLUE, GREY
from mupax.zoo import configs, families
from scripts import ROOT
from scripts.pages.markdown import replaced

LARGE = "lm-tiny"
STARTS = {
    "proxy": ["--model", "lm-proxy"],
    "half": ["--model.depth", "2", "--model.num-heads", "2", "--model.head-dim", "32", "--model.mlp-ratio", "1.25"],
}
"""Smaller models: half of everything, the stream's width too; and half of the layers, heads and MLP in the same stream."""
STEPS, SEEDS, EVERY, BATCH = 300, (0, 1), 50, 4
DOCUMENT = ROOT / "docs" / "growing.md"
LINES = {
    "proxy": (GREY, "-", "half of everything"),
    "half": ("#009E73", "-", "half the layers, heads, MLP"),
    "proxy, grown": (GREY, "--", "half of everything, grown"),
    "half, grown": ("#009E73", "--", "half the layers ..., grown"),
    "large": (BLUE, "-", "large, from scratch"),
}
"""Colour, dashes and name of a run's line in the picture. Dashes and names tell them apart without colour, too."""

Losses = dict[str, dict[int, float]]
"""Run to step to validation loss."""


def measure(folder: Path, steps: int, seed: int) -> tuple[Losses, dict[str, float]]:
    """Validation losses of the runs of one seed, and training FLOPs per token of the three models."""
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
    losses: Losses = {}
    cost: dict[str, float] = {}
    for name, words in {**STARTS, "large": ["--model", LARGE]}.items():
        at = folder / f"{name}-{seed}"
        _run([*shared, *words, "--workdir", str(at)])
        losses[name], cost[name] = _losses(at), families.train_flops(_model(at))
    for name in STARTS:
        at = folder / f"{name}-{seed}-grown"
        _run(
            ["grow", str(folder / f"{name}-{seed}" / "checkpoints" / str(steps // 2)), "--to", LARGE, "--out", str(at)]
        )
        _run([*shared, "--workdir", str(at), "--resume"])
        losses[f"{name}, grown"] = {s: v for s, v in losses[name].items() if s <= steps // 2} | _losses(at)
    return losses, cost


def table(runs: list[Losses], cost: dict[str, float], steps: int) -> str:
    """Markdown: the validation loss at the end, per seed, and what the training cost."""
    tokens = steps * BATCH * configs.get(LARGE).sizes()["position"]
    small = {"proxy": "`lm-proxy`, half of everything", "half": "half the layers, heads and MLP, the same width"}
    labels = {"large": f"`{LARGE}` from scratch"}
    for name, what in small.items():
        labels |= {name: what, f"{name}, grown": f"{what}; grown into `{LARGE}` at step {steps // 2}"}
    lines = ["| run | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean | training FLOPs |"]
    lines.append("|---|" + "---|" * (len(SEEDS) + 2))
    for name, what in labels.items():
        start, grown, _ = name.partition(", grown")
        per_token = (cost[start] + cost["large"]) / 2 if grown else cost[start]
        last = [run[name][steps] for run in runs]
        numbers = " | ".join(f"{loss:.4f}" for loss in last)
        lines.append(f"| {what} | {numbers} | {np.mean(last):.4f} | {per_token * tokens:.2e} |")
    versions = f"jax {importlib.metadata.version('jax')}, CPU, float32"
    about = f"By `python -m scripts.studies.grown --write`, {versions}: validation loss in nats per byte after {tokens:,} tokens."
    return "\n".join([about, "", *lines])


def draw(runs: list[Losses], steps: int, path: Path) -> None:
    """Draw a line per run, the mean over seeds, with its name at its end and a faint dot per seed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    ends: dict[str, float] = {}
    for name, (colour, dashes, _) in LINES.items():
        first = steps // 2 if "grown" in name else 0
        at = [step for step in runs[0][name] if step >= first]
        losses = np.array([[run[name][step] for step in at] for run in runs])
        axes.plot(at, losses.mean(axis=0), ls=dashes, color=colour, lw=1.8)
        axes.plot(at, losses.T, "o", ms=2.5, color=colour, alpha=0.4)
        ends[name] = float(losses[:, -1].mean())
    for name, height in _apart(ends, 0.028).items():
        axes.text(steps * 1.01, height, LINES[name][2], color=LINES[name][0], va="center", fontsize=9)
    axes.axvline(steps // 2, color=GREY, lw=0.8, ls=":")
    axes.text(steps // 2 + 2, axes.get_ylim()[1], "grown here", color=GREY, fontsize=9, va="top")
    axes.set_ylim(top=min(axes.get_ylim()[1], max(ends.values()) + 0.7))
    axes.set(xlabel="steps (the same batches)", ylabel="validation loss, nats per byte", xlim=(0, steps))
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _apart(heights: dict[str, float], gap: float) -> dict[str, float]:
    """Return heights of labels, moved up until none is nearer than `gap` to the one below it."""
    moved: dict[str, float] = {}
    lowest = -np.inf
    for name, height in sorted(heights.items(), key=lambda pair: pair[1]):
        moved[name] = max(height, lowest + gap)
        lowest = moved[name]
    return moved


def main() -> None:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.studies.grown", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.stem}.json and .png, and its table")
    parser.add_argument(
        "--draw", action="store_true", help=f"train nothing: draw docs/{DOCUMENT.stem}.png from the record"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of every run (default {STEPS})")
    args = parser.parse_args()
    if args.draw:
        record = json.loads(DOCUMENT.with_suffix(".json").read_text())
        draw([_recorded(run) for run in record["runs"]], record["steps"], DOCUMENT.with_suffix(".png"))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs, costs = zip(*(measure(Path(folder), args.steps, seed) for seed in SEEDS), strict=True)
    text = table(list(runs), costs[0], args.steps)
    print(text)
    if args.write:
        rows = [{"seed": seed, **run} for seed, run in zip(SEEDS, runs, strict=True)]
        DOCUMENT.with_suffix(".json").write_text(
            json.dumps({"steps": args.steps, "flops_per_token": costs[0], "runs": rows}, indent=1) + "\n"
        )
        draw(list(runs), args.steps, DOCUMENT.with_suffix(".png"))
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), "grown", text))


def _recorded(run: dict[str, Any]) -> Losses:
    """Return a run's losses as `measure` had them; JSON has steps as text."""
    return {name: {int(step): loss for step, loss in run[name].items()} for name in LINES}


def _run(words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "train", *words], check=True)


def _model(folder: Path) -> configs.ModelConfig:
    return model_from_json(json.loads((folder / "config.json").read_text())["config"]["model"])


def _losses(folder: Path) -> dict[int, float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


if __name__ == "__main__":
    main()
