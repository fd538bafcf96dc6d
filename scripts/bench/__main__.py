"""Run benchmarks and write their tables into docs/evidence/performance.md.

    python -m scripts.bench [NAME ... | --all]

Every benchmark writes docs/evidence/performance/NAME.json. The page's tables are made from all of
these files, so a benchmark that is not run now keeps its figures. The names are those that run on
any machine. All of them take an hour. The text around the tables is written by hand.
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
from scripts.bench import maxtext, tpu
from scripts.pages.markdown import replaced, table

PAGE = ROOT / "docs" / "evidence" / "performance.md"
FOLDER = PAGE.with_suffix("")
PYTORCH_BENCHMARKS = {"torch_step": "pytorch.step", "torch_parts": "pytorch.parts"}
"""Modules of the benchmarks that have a table of their own, by name of the benchmark."""
OWN_BENCHMARKS = {
    "torch_muon": "pytorch.muon",
    "preset_cost": "step.preset_cost",
    "layers": "step.layers",
    "attention": "step.attention",
    "cross_entropy": "step.cross_entropy",
    "devices": "step.devices",
    "sweep_cost": "runs.sweep_cost",
    "start": "runs.start",
}
"""Modules of the benchmarks that share the page's table `inside`, by name of the benchmark."""
MODULES = PYTORCH_BENCHMARKS | OWN_BENCHMARKS


def rows_of(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a benchmark's own table, head first: times in ms, and their ratios to each baseline's."""
    ours = _ours(results[0])
    baselines = [name for name in results[0]["ms"] if name != ours]
    head = ["", *(f"{name}, ms" for name in (ours, *baselines))]
    head += [f"{ours} / {name}" for name in baselines]
    rows = [head]
    for result in results:
        row = [_label(result), *(f"{result['ms'][name]:.1f}" for name in (ours, *baselines))]
        row += [_ratio(result, name) for name in baselines]
        rows.append(row)
    return rows


def rows_inside(name: str, measured: dict[str, Any]) -> list[list[str]]:
    """Return the rows of one benchmark in the shared table, one per compared pair.

    Args:
        name: Name of the benchmark, which is the first cell.
        measured: Content of `docs/evidence/performance/NAME.json`.
    """
    rows = []
    for result in measured["results"]:
        ours = _ours(result)
        for baseline in result["ratio"]:
            pair = f"{ours} / {baseline}"
            rows.append([name, _label(result), pair, _ratio(result, baseline)])
        if "temporary_bytes" in result:
            rows[-1][-1] += f"; temporaries {_two_sizes(result['temporary_bytes'])}"
        if "flops" in result:
            rows[-1][-1] += f"; FLOPs {result['flops']:.4f}, bytes {result['bytes']:.4f}"
    return rows


def _ours(result: dict[str, Any]) -> str:
    """Return the name of the implementation that the ratios compare with the others."""
    return next(name for name in result["ms"] if name not in result["ratio"])


def _two_sizes(temporary_bytes: dict[str, int]) -> str:
    first, second = temporary_bytes.values()
    return f"{first / 1e6:.0f} of {second / 1e6:.0f} MB"


def _ratio(result: dict[str, Any], name: str) -> str:
    """Return the cell of a ratio, with quartiles if they were measured."""
    ratio = f"{result['ratio'][name]:.2f}"
    quartiles = result.get("quartiles", {}).get(name)
    if quartiles:
        ratio += f" ({quartiles[0]:.2f}-{quartiles[1]:.2f})"
    return ratio


def _label(result: dict[str, Any]) -> str:
    """Return the cell that names the case of a result."""
    if "model" in result:
        return str(result["model"])
    if "vocab" in result:
        return f"vocabulary {result['vocab']}"
    if "causal" in result:
        return "causal" if result["causal"] else "whole"
    return "lm"


def part(name: str, measured: dict[str, Any]) -> str:
    """Return the part of the page on a benchmark with its own table: command, versions, table."""
    words = []
    for key in ("python", "jax", "torch"):
        if key in measured:
            words.append(f"{key} {measured[key]}")
    versions = ", ".join(words)
    rounds = measured["results"][0]["rounds"]
    flag = " --one-core" if measured["cores"] == 1 else ""
    command = f"`python -m scripts.bench.{MODULES[name]}{flag}` ({versions}; {rounds} rounds)"
    return f"{command}\n\n{table(rows_of(measured['results']))}"


def page(text: str, folder: Path) -> str:
    """Return the page with its tables made again from the JSON files of a folder.

    Args:
        text: Present content of the page. A table whose file is missing stays as it is.
    """
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
    tpu_file = folder / tpu.FILE.name
    if tpu_file.exists():
        pods = json.loads(tpu_file.read_text())
        text = replaced(text, "tpu", tpu.part(pods))
        text = replaced(text, "muon", tpu.muon_part(pods))
    gpu_file = folder / maxtext.FILE.name
    if gpu_file.exists():
        text = replaced(text, "gpu", maxtext.part(json.loads(gpu_file.read_text())))
    return text


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    names: Positional[tuple[str, ...]] = ()
    """Benchmarks to run."""
    one_core: Switch = False
    """Run on one core and count CPU time, for a machine that is busy with other work."""
    all: Switch = False
    """Run all benchmarks, which takes an hour."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, write the page and return the exit code 0."""
    args = harness.parse(Options, argv)
    harness.check_names(args.names, MODULES, "benchmark")
    for name in MODULES if args.all else args.names:
        module = f"scripts.bench.{MODULES[name]}"
        words = [sys.executable, "-m", module, "--json", str(FOLDER / f"{name}.json")]
        if args.one_core:
            words.append("--one-core")
        # In a process of its own, because cores and flags are chosen before JAX starts.
        subprocess.run(words, check=True)
    PAGE.write_text(page(PAGE.read_text(), FOLDER))
    return 0


if __name__ == "__main__":
    sys.exit(main())
