"""Compare mupax's recipe for small folders of images with rivals at equal CPU seconds.

    python -m scripts.bench.recipes.small_folders FOLDER --torch-python PYTHON [--budgets 30 120]
        [--seeds 5] [--sets emoji ...] [--programs ours ...] [--render]

The rivals are logistic regression and a small convolutional network (`folder_rivals`). FOLDER is
the output of `python -m scripts.vision.small_folders FOLDER`. PYTHON is an interpreter with
PyTorch, scikit-learn, NumPy and Pillow.

A budget of S seconds on two cores is 2 S CPU seconds (user and system) of a process and its
children, from start to exit, so that other work on the machine takes time from nobody. Every seed
is another split of the images, which all rivals share. mupax starts without a compilation cache and
without an earlier scan of the folder. If it exceeds its budget, it is trained again with fewer
steps.

Completed rows are in `FOLDER/rows.json`; the same command continues. The result is
docs/evidence/small_folders.json, in which other data sets, budgets and programs stay as they are.
`--render` only writes its table into docs/howto/data.md.
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
CALIBRATION = (20, 400)
"""Numbers of steps of two runs, whose times give the time of a step and of everything else."""
SAFETY = 0.94
"""Share of the budget that a run of mupax is planned to use."""
LATE = 1.01
"""Largest time of a run of mupax over the budget. A slower run is repeated with fewer steps."""
PROGRAMS = ("ours", "logistic", "cnn", "cnn without batch norm")
"""Programs that are compared.

The network without batch norm has the settings of the one with it, and a norm over the channels of
each pixel, as mupax's model has.
"""
COLUMNS = {"ours": "mupax", "logistic": "logistic regression", "cnn": "small CNN"}
"""Programs that the page's table shows, with the heads of their columns."""
SIDES = {"emoji": 32, "icons": 32}
"""Pixels of a side that the rivals' images are scaled to, as mupax's are, by data set.

Images of other data sets keep their size.
"""
NETWORKS = {
    "narrow": ["--width", "24"],
    "wide": ["--width", "48"],
    "turned": ["--width", "32", "--turn", "0.4"],
    "still": ["--width", "32", "--shift", "0.06"],
    "mixed": ["--width", "32", "--shift", "0.06", "--cutmix"],
}
"""Flags of the networks to try on the first split. The best is trained on all splits."""


class Outcome(NamedTuple):
    """Output and CPU seconds of a process that has ended."""

    output: str
    cpu_seconds: float


def measured(command: Sequence[str], environment: dict[str, str]) -> Outcome:
    """Run a process and return its output and the CPU seconds of it and its children.

    Args:
        environment: Variables to set in addition to those of this process.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    completed = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if completed.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {completed.returncode}:\n{completed.stderr[-2000:]}"
        )
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(completed.stdout, round(seconds, 1))


def train(images: Path, seed: int, steps: int) -> dict[str, Any]:
    """Train mupax's recipe for a folder in a new process without caches and return its row.

    Returns:
        `accuracy` of the last evaluation, `steps` and `cpu_seconds`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        workdir = Path(temporary) / "run"
        words = [sys.executable, "-m", "mupax", "train", "vit-digits"]
        words += ["--data.name", f"images:{images}"]
        words += ["--seed", str(seed), "--steps", str(steps)]
        words += ["--workdir", str(workdir)]
        caches = {"MUPAX_DATA": str(Path(temporary) / "data"), "MUPAX_COMPILATION_CACHE": "none"}
        outcome = measured(words, caches)
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        evaluations = []
        for line in lines:
            evaluated_row = json.loads(line)
            if "eval_accuracy" in evaluated_row:
                evaluations.append(evaluated_row)
    return {
        "accuracy": evaluations[-1]["eval_accuracy"],
        "steps": steps,
        "cpu_seconds": outcome.cpu_seconds,
    }


class Rows:
    """Results of trainings by name (rows), in a file that is written after each new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row, write the file, print the row and return it."""
        self.rows[name] = row
        disk.write_whole(self._path, json.dumps(self.rows, indent=1) + "\n")
        printed = dict(row)
        printed.pop("tried", None)
        print(name, json.dumps(printed), flush=True)
        return row


def ours(rows: Rows, folder: Path, name: str, budget: int, seed: int) -> dict[str, Any]:
    """Return the row of mupax's recipe within a budget, and train it if there is none yet.

    Args:
        folder: Folder of the data sets, with one `NAME/SEED` for each split.
        name: Name of a data set, a key of `SETS`.
        budget: Seconds on two cores, so twice as many CPU seconds.
        seed: Seed of the split and of the run.
    """
    key = f"{name} {budget} {seed} ours"
    if key in rows.rows:
        return rows.rows[key]
    images = folder / name / str(seed)

    # Two runs of different length give the seconds of a step and of everything else.
    short, long = (_calibration(rows, folder, name, steps) for steps in CALIBRATION)
    step_seconds = (long["cpu_seconds"] - short["cpu_seconds"]) / (long["steps"] - short["steps"])
    overhead = short["cpu_seconds"] - short["steps"] * step_seconds

    seconds = CORES * budget
    steps = max(1, int((SAFETY * seconds - overhead) / step_seconds))
    row = train(images, seed, steps)
    while row["cpu_seconds"] > LATE * seconds and steps > 1:
        excess = row["cpu_seconds"] - SAFETY * seconds
        steps = max(1, int(steps - excess / step_seconds))
        row = train(images, seed, steps)
    row["seconds_before_steps"] = round(overhead, 1)
    row["seconds_of_a_step"] = round(step_seconds, 4)
    return rows.add(key, row)


def _calibration(rows: Rows, folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Return the row of a run of `steps` steps on the first split, and train it if there is none."""
    key = f"{name} calibration {steps}"
    if key in rows.rows:
        return rows.rows[key]
    return rows.add(key, train(folder / name / "0", 0, steps))


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
    """Return the row of a rival within a budget, and train it if there is none yet.

    Args:
        folder: Folder of the data sets, with one `NAME/SEED` for each split.
        name: Name of a data set, a key of `SETS`.
        budget: Seconds on two cores, so twice as many CPU seconds.
        seed: Seed of the split and of the rival.
        kind: "logistic" or "cnn", the rival of `folder_rivals`.
        python: Interpreter with PyTorch, scikit-learn, NumPy and Pillow.
        words: More flags of `folder_rivals`.
    """
    key = " ".join([name, str(budget), str(seed), kind, *words])
    if key in rows.rows:
        return rows.rows[key]
    command = [python, "-m", "scripts.bench.recipes.folder_rivals"]
    command += [kind, str(folder / name / str(seed))]
    command += ["--seconds", str(CORES * budget), "--seed", str(seed)]
    if name in SIDES:
        command += ["--side", str(SIDES[name])]
    command += words
    outcome = measured(command, {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    row = json.loads(outcome.output.splitlines()[-1])
    return rows.add(key, {**row, "cpu_seconds": outcome.cpu_seconds})


def best_network(rows: Rows, folder: Path, name: str, budget: int, python: str) -> list[str]:
    """Return the flags of the best of `NETWORKS`, and train those that have no row yet.

    The network is chosen by its accuracy on the test images of the first split, which favours it.
    """
    accuracies = {}
    for network_name, words in NETWORKS.items():
        row = rival(rows, folder, name, budget, 0, "cnn", python, words)
        accuracies[network_name] = row["accuracy"]
    best = max(accuracies, key=lambda network_name: accuracies[network_name])
    return NETWORKS[best]


def record(rows: Rows, args: Options, folder: Path) -> dict[str, Any]:
    """Train what has no row yet, and return rows by data set and budget, then program, then seed.

    Args:
        args: Which data sets, budgets, seeds and programs to compare.
        folder: Folder of the data sets, with one `NAME/SEED` for each split.
    """
    cells: dict[str, Any] = {}
    for name in args.sets:
        for budget in args.budgets:
            cell: dict[str, list[Any]] = {program: [] for program in args.programs}
            commands: dict[str, tuple[str, list[str]]] = {"logistic": ("logistic", [])}
            if {"cnn", "cnn without batch norm"} & {*args.programs}:
                network = best_network(rows, folder, name, budget, args.torch_python)
                commands["cnn"] = ("cnn", network)
                commands["cnn without batch norm"] = ("cnn", [*network, "--norm", "channel"])
            # Programs take turns, so that all run on the machine in the same state.
            for seed in range(args.seeds):
                for program in args.programs:
                    if program == "ours":
                        row = ours(rows, folder, name, budget, seed)
                    else:
                        kind, words = commands[program]
                        row = rival(
                            rows, folder, name, budget, seed, kind, args.torch_python, words
                        )
                    cell[program].append(row)
            cells[f"{name} {budget}"] = cell
    return cells


def publish(cells: dict[str, Any]) -> None:
    """Write cells into the record. Other cells, and other programs of a cell, stay as they are."""
    if OUT.exists():
        recorded = json.loads(OUT.read_text())["cells"]
        cells = {name: {**recorded.get(name, {}), **cell} for name, cell in cells.items()}
        cells = {**recorded, **cells}

    def place(name: str) -> tuple[int, int]:
        data, budget = name.split()
        return list(SETS).index(data), int(budget)

    content = {
        "command": "python -m scripts.bench.recipes.small_folders FOLDER",
        "cells": {name: cells[name] for name in sorted(cells, key=place)},
    }
    disk.write_whole(OUT, json.dumps(content, indent=1) + "\n")


def table(cells: dict[str, Any]) -> str:
    """Return the table of the page: accuracies in percent, and mupax's less each rival's.

    Differences are paired by seed. A program that a cell lacks has a dash.
    """
    heads = ["images", "seconds", *COLUMNS.values(), "mupax less logistic", "mupax less CNN"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, cell in cells.items():
        accuracies = {}
        for program, rows in cell.items():
            accuracies[program] = 100 * np.array([row["accuracy"] for row in rows])
        means = []
        for program in COLUMNS:
            means.append(f"{accuracies[program].mean():.1f}" if program in accuracies else "-")
        differences = []
        for program in ("logistic", "cnn"):
            if program in accuracies and "ours" in accuracies:
                # Seeds count from 0, so those that both programs have come first.
                seeds = min(len(cell["ours"]), len(cell[program]))
                ours_less_rival = accuracies["ours"][:seeds] - accuracies[program][:seeds]
                differences.append(_difference(ours_less_rival))
            else:
                differences.append("-")
        data, budget = name.split()
        lines.append(f"| {data} | {budget} | {' | '.join([*means, *differences])} |")
    return "\n".join(lines)


def _difference(values: np.ndarray) -> str:
    """Return the mean of paired differences with its interval, as a cell."""
    if len(values) < 2:
        return f"{values.mean():+.1f} (one seed)"
    value, low, high = mean(values)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def render() -> None:
    """Write the table of the record into docs/howto/data.md."""
    text = PAGE.read_text()
    start, rest = text.split(BEGIN)
    _, after = rest.split(END)
    content = json.loads(OUT.read_text())
    PAGE.write_text(f"{start}{BEGIN}\n{table(content['cells'])}\n{END}{after}")


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    folder: Positional[Path | None] = None
    """Folder of all data sets."""
    torch_python: str = sys.executable
    """Interpreter with PyTorch, scikit-learn, NumPy and Pillow."""
    budgets: tuple[int, ...] = (30, 120)
    """Budgets in seconds on two cores."""
    seeds: int = 5
    """Number of splits, each with a seed of its own."""
    sets: tuple[str, ...] = tuple(SETS)
    """Data sets to compare on."""
    programs: tuple[str, ...] = PROGRAMS
    """Programs to compare."""
    render: Switch = False
    """Only write the page's table from the record. Train nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train what has no row yet, write the record and the page, and return the exit code 0."""
    args = harness.parse(Options, argv)
    harness.check_names(args.sets, SETS)
    harness.check_names(args.programs, PROGRAMS)
    if not args.render:
        if args.folder is None:
            harness.refuse(
                "write FOLDER, which `python -m scripts.vision.small_folders FOLDER` makes"
            )
        folder = args.folder.absolute()
        publish(record(Rows(folder / "rows.json"), args, folder))
    render()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
