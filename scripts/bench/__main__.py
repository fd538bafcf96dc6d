"""Runs the named benchmarks and writes their tables into docs/evidence/performance.md, from what these and earlier runs of them measured.

    python -m scripts.bench [NAME ... | --all]

The names are those that run anywhere; all of them take an hour. Every one leaves docs/evidence/performance/NAME.json; what the page says
around the tables is written by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from mupax.command_line import Switch
from scripts import ROOT, harness
from scripts.bench import tpu
from scripts.pages.markdown import replaced, table

PAGE = ROOT / "docs" / "evidence" / "performance.md"
FOLDER = PAGE.with_suffix("")
PYTORCH_BENCHMARKS = {"torch_step": "pytorch.step", "torch_parts": "pytorch.parts"}
"""Benchmark with a table of its own to its module in this room."""
OWN_BENCHMARKS = {
    "preset_cost": "step.preset_cost",
    "layers": "step.layers",
    "attention": "step.attention",
    "cross_entropy": "step.cross_entropy",
    "devices": "step.devices",
    "sweep_cost": "runs.sweep_cost",
    "start": "runs.start",
}
"""Benchmark of two ways to do one thing here, which share a table, to its module in this room."""
MODULES = PYTORCH_BENCHMARKS | OWN_BENCHMARKS


def rows_of(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the table of one benchmark: the time of each thing compared, and the first one's ratio to the others."""
    names = list(results[0]["ms"])
    ours = next(name for name in names if name not in results[0]["ratio"])
    baselines = [name for name in names if name != ours]
    times = [f"{name}, ms" for name in (ours, *baselines)]
    rows = [["", *times, *(f"{ours} / {name}" for name in baselines)]]
    for result in results:
        measured = [f"{result['ms'][name]:.1f}" for name in (ours, *baselines)]
        rows.append([_label(result), *measured, *(_ratio(result, name) for name in baselines)])
    return rows


def rows_inside(name: str, measured: dict[str, Any]) -> list[list[str]]:
    """Return the rows of one benchmark in the shared table: a line for every pair."""
    rows = []
    for result in measured["results"]:
        ours = next(way for way in result["ms"] if way not in result["ratio"])
        for baseline in result["ratio"]:
            pair = f"{ours} / {baseline}"
            rows.append([name, _label(result), pair, _ratio(result, baseline)])
        if "temporary_bytes" in result:
            rows[-1][-1] += f"; temporaries {_of_bytes(result['temporary_bytes'])}"
        if "flops" in result:
            rows[-1][-1] += f"; FLOPs {result['flops']:.4f}, bytes {result['bytes']:.4f}"
    return rows


def _of_bytes(temporary_bytes: dict[str, int]) -> str:
    first, second = temporary_bytes.values()
    return f"{first / 1e6:.0f} of {second / 1e6:.0f} MB"


def _ratio(result: dict[str, Any], name: str) -> str:
    spread = result.get("quartiles", {}).get(name)
    return f"{result['ratio'][name]:.2f}" + (
        f" ({spread[0]:.2f}-{spread[1]:.2f})" if spread else ""
    )


def _label(result: dict[str, Any]) -> str:
    if "model" in result:
        return str(result["model"])
    if "vocab" in result:
        return f"vocabulary {result['vocab']}"
    if "causal" in result:
        return "causal" if result["causal"] else "whole"
    return "lm"


def part(name: str, measured: dict[str, Any]) -> str:
    """The command of a benchmark, with its versions, and its table."""
    versions = ", ".join(
        f"{key} {measured[key]}" for key in ("python", "jax", "torch") if key in measured
    )
    rounds = measured["results"][0]["rounds"]
    how = " --one-core" if measured["cores"] == 1 else ""
    command = f"`python -m scripts.bench.{MODULES[name]}{how}` ({versions}; {rounds} rounds)"
    return f"{command}\n\n{table(rows_of(measured['results']))}"


def page(text: str, folder: Path) -> str:
    """Return the text of docs/evidence/performance.md with the tables of what is in the folder."""
    rows = [["benchmark", "case", "compared", "ratio"]]
    for name in MODULES:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        measured = json.loads(path.read_text())
        if name in PYTORCH_BENCHMARKS:
            text = replaced(text, name, part(name, measured))
        else:
            rows += rows_inside(name, measured)
    if len(rows) > 1:
        text = replaced(text, "inside", table(rows))
    if (path := folder / tpu.FILE.name).exists():
        text = replaced(text, "tpu", tpu.part(json.loads(path.read_text())))
    return text


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    names: Positional[tuple[str, ...]] = ()
    one_core: Switch = False
    """One core, CPU time: for a machine busy with other work."""
    all: Switch = False
    """Measure all of them, for an hour."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is named, and write the page; returns the exit code 0."""
    args = harness.parse(Options, argv)
    harness.check_names(args.names, MODULES, "benchmark")
    for name in MODULES if args.all else args.names:
        words = [
            sys.executable,
            "-m",
            f"scripts.bench.{MODULES[name]}",
            "--json",
            str(FOLDER / f"{name}.json"),
        ]
        words += ["--one-core"] if args.one_core else []
        subprocess.run(words, check=True)
    PAGE.write_text(page(PAGE.read_text(), FOLDER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
