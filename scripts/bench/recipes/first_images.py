"""What Muon is worth on the first run with images, `vit-digits`: docs/first_images.json and its part of docs/first_run.md.

    python -m scripts.bench.recipes.first_images [--seeds 8] [--out runs/first-images] [--torch]

`vit-digits` trains under AdamW and under Muon at rates half an octave apart from three seeds, then each at its best rate from all
seeds, which start and see the same. Last Muon, at the vertex of its rates, and `vit-digits` as it ships train from seeds that chose
nothing. Sweeps and runs go on where they were stopped. `--torch` adds to a record that is there AdamW in PyTorch on a model of the
same size, for the CPU seconds that `vit-digits` takes on one core, at the best of its rates, from the same fresh seeds.
`python -m scripts.bench.recipes.first_run --render` writes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax import disk
from scripts import ROOT
from scripts.bench import in_turns
from scripts.figures.result import mean

OUT = ROOT / "docs" / "first_images.json"
STEPS = 2000
"""Of `vit-digits`."""
FIRST = 3
"""Seeds at every rate."""
ARMS = {"adamw": "2^-9:2^-5.5:8", "muon": "2^-8:2^-4.5:8"}
"""Optimizer to rates."""
VERTEX = 0.02563
"""2^-5.29: where a sweep of Muon's eight rates by evaluation loss, from eight seeds, has its best (`--save-tuned`), within 3 octaves."""
FRESH = {"muon": f"--optimizer.name muon --optimizer.peak-lr {VERTEX}", "vit-digits": ""}
"""What runs from fresh seeds change, the first less the second."""
HEAD = """
## Images

`vit-digits` under both optimizers, 2,000 steps, evaluation loss in nats on the 360 test images: eight rates from three seeds, then the
best of them from eight; then Muon at the vertex of eight rates from eight seeds, beside `vit-digits` as it ships (AdamW at 0.003), from
eight other seeds. What looked like a gain of Muon on the seeds that chose its rate is none on others: images are few, seeds
differ by more than optimizers and rates do, and `vit-digits` stays as it is. Made by `python -m scripts.bench.recipes.first_images`; other work
ran on the machine.
"""


def control(fresh: Sequence[int], path: Path) -> dict[str, Any]:
    """AdamW in PyTorch for as long as `vit-digits` trains: its rates' losses from the first seeds, and the best one's from fresh seeds.

    Args:
        fresh: seeds that chose nothing.
        path: of a file with the steps that fit and every run that has ended: the same call goes on where it was stopped.
    """
    from mupax.train import data
    from mupax.train.config.recipes import RECIPES
    from scripts.bench.pytorch import runs as torch_runs
    from scripts.bench.recipes.equal_seconds import step_seconds, tuned

    config = RECIPES["vit-digits"]()
    source = data.load(config.data, config.model, seed=0, note=lambda line: None)
    run = torch_runs.Run(torch_runs.RECIPES["images"], source)
    if path.exists():
        work = json.loads(path.read_text())
    else:
        seconds = STEPS * step_seconds(config)
        work = {"seconds_of_ours": round(seconds, 1), "steps": int(seconds / run.seconds(60)), "runs": {}}

    def once(rate: float, seed: int) -> dict[str, Any]:
        name = f"{rate:g} {seed}"
        if name not in work["runs"]:
            work["runs"][name] = run.train(rate, work["steps"], seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            disk.write_whole(path, json.dumps(work, indent=1) + "\n")
        return work["runs"][name]

    def trained(rate: float, seeds: Sequence[int]) -> dict[str, Any]:
        rows = [once(rate, seed) for seed in seeds]
        losses = [row["loss"] for row in rows]
        loss, cpu_seconds = round(float(np.mean(losses)), 4), float(np.median([row["cpu_seconds"] for row in rows]))
        return {"rate": rate, "loss": loss, "losses": losses, "cpu_seconds": cpu_seconds}

    best = tuned(lambda rate: trained(rate, range(FIRST)))
    shared = {name: work[name] for name in ("steps", "seconds_of_ours")}
    return {"parameters": run.count, **shared, **trained(best["rate"], fresh), "rates": best["rates"]}


def swept(optimizer: str, rates: str, seeds: int, folder: Path) -> dict[tuple[float, int], dict[str, Any]]:
    """(log2 rate, seed) to the point.

    Args:
        optimizer: its name.
        rates: a grid of the sweep.
        seeds: at every rate.
        folder: of the sweep.
    """
    points = _points(["vit-digits", "--optimizer.name", optimizer, "--lr", rates, "--seeds", str(seeds)], folder)
    return {(round(math.log2(point["peak_lr"]), 3), point["seed"]): point for point in points}


def _points(words: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    _train(["sweep", *words, "--how", "in-turn", "--out", str(folder.absolute())])
    return json.loads((folder / "sweep.json").read_text())["points"]


def _train(words: Sequence[str]) -> None:
    """`mupax train`; ends with its exit code where that is not 0."""
    if code := subprocess.run([sys.executable, "-m", "train", *words], cwd=ROOT, check=False).returncode:
        raise SystemExit(code)


def measured(seeds: int, folder: Path) -> dict[str, Any]:
    """Both optimizers' rows.

    Args:
        seeds: at the best rate.
        folder: of all sweeps.
    """
    arms: dict[str, Any] = {}
    for optimizer, rates in ARMS.items():
        first = swept(optimizer, rates, FIRST, folder / optimizer)
        tried = sorted({rate for rate, _ in first})
        losses = {rate: [first[rate, seed]["eval_loss"] for seed in range(FIRST)] for rate in tried}
        best = min(losses, key=lambda rate: float(np.mean(losses[rate])))
        points = swept(optimizer, f"2^{best:g}", seeds, folder / optimizer)
        final = [points[best, seed] for seed in range(seeds)]
        arms[optimizer] = {
            "rates": {f"2^{rate:g}": [round(loss, 4) for loss in each] for rate, each in losses.items()},
            **_final(f"2^{best:g}", final),
        }
    chosen = range(seeds, 2 * seeds)
    fresh = {name: [_trained(name, seed, folder / "fresh") for seed in chosen] for name in FRESH}
    return {"command": f"python -m scripts.bench.recipes.first_images --seeds {seeds}", "arms": arms, "fresh": fresh}


def _trained(name: str, seed: int, folder: Path) -> float:
    """Evaluation loss of a run of FRESH, on the split of seed 0, which is trained where it is not there whole."""
    workdir = folder / f"{name}-{seed}"
    words = f"vit-digits {FRESH[name]} --seed {seed} --data.seed 0 --checkpoint.every-steps {STEPS} --checkpoint.keep 1 --resume"
    command = [*words.split(), "--log.no-tensorboard", "--log.no-samples", "--workdir", str(workdir.absolute())]
    if not _evaluations(workdir):
        _train(command)
    return _evaluations(workdir)[-1]


def _evaluations(workdir: Path) -> list[float]:
    """The evaluation loss at the end of a run, if it has come there."""
    metrics = workdir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [round(row["eval_loss"], 4) for row in rows if "eval_loss" in row and row["step"] == STEPS]


def _final(rate: str, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"best": rate, "losses": [round(point["eval_loss"], 4) for point in points]}


def section(record: dict[str, Any]) -> str:
    """Its part of the page."""
    lines = [
        HEAD,
        "| optimizer | rates, three seeds | best | evaluation loss, eight seeds [95 %] |",
        "|---|---|---|---|",
    ]
    for name, arm in record["arms"].items():
        each = ", ".join(f"{rate} {np.mean(losses):.3f}" for rate, losses in arm["rates"].items())
        value, low, high = mean(np.array(arm["losses"]))
        lines.append(f"| {name} | {each} | {arm['best']} | {value:.4f} [{low:.4f}, {high:.4f}] |")
    adamw, muon = (record["arms"][name]["losses"] for name in ARMS)
    first, second = (record["fresh"][name] for name in FRESH)
    vertex = f"Muon at 2^{math.log2(VERTEX):.2f} ends at {np.mean(first):.4f}"
    lines += [
        "",
        f"Muon less AdamW, {len(muon)} paired seeds: {_apart(muon, adamw)} nats. From {len(first)} fresh seeds {vertex}",
        f"and `vit-digits` as it ships at {np.mean(second):.4f}: {_apart(first, second)}.",
    ]
    return "\n".join([*lines, *(_control(record["torch"], second) if "torch" in record else []), ""])


def _control(record: dict[str, Any], ours: Sequence[float]) -> list[str]:
    value, low, high = mean(np.array(record["losses"]))
    tried = ", ".join(f"{rate} {loss:.3f}" for rate, loss in record["rates"].items())
    return [
        "",
        f"AdamW in PyTorch on a model of {record['parameters']:,} parameters for the same CPU seconds on one core ({record['steps']:,} steps",
        f"in {record['cpu_seconds']:.0f} s, {STEPS:,} of ours in {record['seconds_of_ours']:.0f} s; rates from three seeds: {tried}) ends from",
        f"those fresh seeds, at {record['rate']:g}, at {value:.4f} [{low:.4f}, {high:.4f}]; `vit-digits` less it is",
        f"{_apart(ours, record['losses'])}.",
    ]


def _apart(some: Sequence[float], baseline: Sequence[float]) -> str:
    value, low, high = mean(np.subtract(some, baseline))
    return f"{value:+.4f} [{low:+.4f}, {high:+.4f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the data; `python -m scripts.bench.recipes.first_run --render` writes the page."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.recipes.first_images", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=8, help="at the best rates (8)")
    parser.add_argument("--out", type=Path, default=Path("runs/first-images"), help="folder of the sweeps")
    parser.add_argument(
        "--torch", action="store_true", help="add PyTorch's row to the record that is there; train nothing else"
    )
    args = parser.parse_args(argv)
    if args.torch:
        record = json.loads(OUT.read_text())
        in_turns.one_core()
        record["torch"] = control(range(args.seeds, 2 * args.seeds), args.out / "torch.json")
    else:
        record = measured(args.seeds, args.out)
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
