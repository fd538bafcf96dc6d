"""Small folders at equal CPU seconds: ours, logistic regression and a small convolutional network; docs/evidence/small_folders.json.

    python -m scripts.bench.recipes.small_folders FOLDER --torch-python PYTHON [--budgets 30 120] [--seeds 5] [--sets emoji ...]

FOLDER is what `python -m scripts.vision.small_folders FOLDER` wrote, PYTHON an interpreter with PyTorch, scikit-learn, NumPy and
Pillow. A budget of S seconds on two cores is 2 S CPU seconds (user and system) of a process and its children, from its start to
its exit, so that other work on the machine takes the time of nobody. Every seed is another split of the images, which all
rivals share. Ours has no compilation cache and no scan of the folder from before. Where it took more than its budget it is trained
again with fewer steps. What has ended is in `FOLDER/rows.json` and is not run again: the same command goes on. `--render` only
writes the table into docs/howto/data.md.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tyro.conf import Positional

from mupax import disk
from mupax.command_line import Switch
from scripts import ROOT, harness
from scripts.figures.result import mean
from scripts.vision.small_folders import SETS

OUT = ROOT / "docs" / "evidence" / "small_folders.json"
PAGE = ROOT / "docs" / "howto" / "data.md"
BEGIN = "<!-- small folders: begin -->"
END = "<!-- small folders: end -->"
CORES = 2
CALIBRATION = (20, 120)
"""Steps of the two runs by which the seconds of a step and of all else are told apart."""
SAFETY = 0.94
"""Share of the budget that a run of ours is planned for."""
LATE = 1.01
"""Times the budget that a run may take."""
RIVALS = ("ours", "logistic", "cnn")
SIDES = {"emoji": 32, "icons": 32}
"""Pixels that images are scaled to for the rivals, as for ours; others have their own size."""
NETWORKS = {
    "narrow": ["--width", "24"],
    "wide": ["--width", "48"],
    "turned": ["--width", "32", "--turn", "0.4"],
    "still": ["--width", "32", "--shift", "0.06"],
}
"""Networks that are tried at the first seed's split; the best trains from all seeds."""


class Outcome(NamedTuple):
    """A process that has ended."""

    output: str
    cpu_seconds: float


def measured(command: Sequence[str], environment: dict[str, str]) -> Outcome:
    """Run a process and return its output and the CPU seconds of all that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(done.stdout, round(seconds, 1))


def train(images: Path, seed: int, steps: int) -> dict[str, Any]:
    """Train the recipe that the command chooses for a folder, in a new process without caches, and return its row."""
    with tempfile.TemporaryDirectory() as temporary:
        workdir = Path(temporary) / "run"
        words = [
            sys.executable,
            "-m",
            "mupax",
            "train",
            "vit-digits",
            "--data.name",
            f"images:{images}",
        ]
        words += [
            "--seed",
            str(seed),
            "--steps",
            str(steps),
            "--optimizer.warmup-steps",
            str(max(1, steps // 10)),
        ]
        words += ["--workdir", str(workdir)]
        caches = {"MUPAX_DATA": str(Path(temporary) / "data"), "MUPAX_COMPILATION_CACHE": "none"}
        outcome = measured(words, caches)
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        evaluations = [row for row in map(json.loads, lines) if "eval_accuracy" in row]
    return {
        "accuracy": evaluations[-1]["eval_accuracy"],
        "steps": steps,
        "cpu_seconds": outcome.cpu_seconds,
    }


class Rows:
    """Rows by name in a file that is written after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row and print it."""
        self.rows[name] = row
        disk.write_whole(self._path, json.dumps(self.rows, indent=1) + "\n")
        print(
            name,
            json.dumps({key: value for key, value in row.items() if key != "tried"}),
            flush=True,
        )
        return row


def ours(rows: Rows, folder: Path, name: str, budget: int, seed: int) -> dict[str, Any]:
    """Return the row of our recipe within a budget, trained where it is not there."""
    key = f"{name} {budget} {seed} ours"
    if key in rows.rows:
        return rows.rows[key]
    images = folder / name / str(seed)
    few, more = (_calibration(rows, folder, name, steps) for steps in CALIBRATION)
    a_step = (more["cpu_seconds"] - few["cpu_seconds"]) / (more["steps"] - few["steps"])
    rest = few["cpu_seconds"] - few["steps"] * a_step
    seconds = CORES * budget
    steps = max(1, int((SAFETY * seconds - rest) / a_step))
    row = train(images, seed, steps)
    while row["cpu_seconds"] > LATE * seconds and steps > 1:
        steps = max(1, int(steps - (row["cpu_seconds"] - SAFETY * seconds) / a_step))
        row = train(images, seed, steps)
    return rows.add(
        key, {**row, "seconds_before_steps": round(rest, 1), "seconds_of_a_step": round(a_step, 4)}
    )


def _calibration(rows: Rows, folder: Path, name: str, steps: int) -> dict[str, Any]:
    key = f"{name} calibration {steps}"
    return rows.rows.get(key) or rows.add(key, train(folder / name / "0", 0, steps))


def rival(
    rows: Rows,
    folder: Path,
    name: str,
    budget: int,
    seed: int,
    kind: str,
    python: str,
    words: Sequence[str],
) -> dict[str, Any]:
    """Return the row of a rival within a budget, trained where it is not there.

    Args:
        folder: of the data sets.
        name: of a data set.
        budget: seconds on two cores.
        seed: of the split and of the rival.
        kind: logistic or cnn.
        python: interpreter that has what the rival needs.
    """
    key = " ".join([name, str(budget), str(seed), kind, *words])
    if key in rows.rows:
        return rows.rows[key]
    side = ["--side", str(SIDES[name])] if name in SIDES else []
    command = [
        python,
        str(ROOT / "scripts/bench/recipes/folder_rivals.py"),
        kind,
        str(folder / name / str(seed)),
    ]
    command += ["--seconds", str(CORES * budget), "--seed", str(seed), *side, *words]
    outcome = measured(command, {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    row = json.loads(outcome.output.splitlines()[-1])
    return rows.add(key, {**row, "cpu_seconds": outcome.cpu_seconds})


def network(
    rows: Rows, folder: Path, name: str, budget: int, seed: int, python: str
) -> dict[str, Any]:
    """Return the row of the network that does best on the test images of the first split, which is in its favour."""
    tried = {
        words: rival(rows, folder, name, budget, 0, "cnn", python, NETWORKS[words])["accuracy"]
        for words in NETWORKS
    }
    best = max(tried, key=lambda words: tried[words])
    return rival(rows, folder, name, budget, seed, "cnn", python, NETWORKS[best])


def record(
    rows: Rows, folder: Path, python: str, names: Sequence[str], budgets: Sequence[int], seeds: int
) -> Any:
    """Return accuracies by data set, budget and rival, seed by seed, training what is missing in turns."""
    cells: dict[str, Any] = {}
    for name in names:
        for budget in budgets:
            cell: dict[str, list[Any]] = {kind: [] for kind in RIVALS}
            for seed in range(seeds):  # rivals in turns, so that all meet the same machine
                cell["ours"].append(ours(rows, folder, name, budget, seed))
                cell["logistic"].append(
                    rival(rows, folder, name, budget, seed, "logistic", python, [])
                )
                cell["cnn"].append(network(rows, folder, name, budget, seed, python))
            cells[f"{name} {budget}"] = cell
    return cells


def table(cells: dict[str, Any]) -> str:
    """Return the figures as a table of Markdown: accuracies in percent, and ours less each rival's, paired by seed."""
    lines = [
        "| images | seconds on two cores | ours, % | logistic regression, % | small CNN, % | ours less logistic | ours less CNN |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cell in cells.items():
        accuracies = {
            kind: 100 * np.array([row["accuracy"] for row in cell[kind]]) for kind in RIVALS
        }
        data, budget = name.split()
        means = [f"{accuracies[kind].mean():.1f}" for kind in RIVALS]
        less = [_difference(accuracies["ours"] - accuracies[kind]) for kind in RIVALS[1:]]
        lines.append(f"| {data} | {budget} | {' | '.join([*means, *less])} |")
    return "\n".join(lines)


def _difference(values: np.ndarray) -> str:
    if len(values) < 2:
        return f"{values.mean():+.1f} (one seed)"
    value, low, high = mean(values)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def render() -> None:
    """Write the table of the record into the page."""
    text = PAGE.read_text()
    start, rest = text.split(BEGIN)
    _, after = rest.split(END)
    content = json.loads(OUT.read_text())
    PAGE.write_text(f"{start}{BEGIN}\n{table(content['cells'])}\n{END}{after}")


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    folder: Positional[Path | None] = None
    torch_python: str = sys.executable
    """Interpreter with PyTorch."""
    budgets: tuple[int, ...] = (30, 120)
    """Seconds on two cores."""
    seeds: int = 5
    """Splits and seeds."""
    sets: tuple[str, ...] = tuple(SETS)
    """Data sets."""
    render: Switch = False
    """Write the page's table from the record; train nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the record and its table."""
    args = harness.parse(Options, argv)
    harness.check_names(args.sets, SETS)
    if not args.render:
        if args.folder is None:
            harness.refuse(
                "write FOLDER, which `python -m scripts.vision.small_folders FOLDER` makes"
            )
        folder = args.folder.absolute()
        rows = Rows(folder / "rows.json")
        cells = record(rows, folder, args.torch_python, args.sets, args.budgets, args.seeds)
        content = {
            "command": f"python -m scripts.bench.recipes.small_folders FOLDER --seeds {args.seeds}",
            "cells": cells,
        }
        disk.write_whole(OUT, json.dumps(content, indent=1) + "\n")
    render()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
