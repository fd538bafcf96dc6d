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
MODULES = {
    "torch_step": "pytorch.step",
    "torch_parts": "pytorch.parts",
    "preset_cost": "step.preset_cost",
    "layers": "step.layers",
    "attention": "step.attention",
    "cross_entropy": "step.cross_entropy",
    "devices": "step.devices",
    "sweep_cost": "runs.sweep_cost",
    "start": "runs.start",
}
"""Benchmark to its module in this room."""


def rows_of(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What every benchmark has: a time of each, and the first one's ratio to the others."""
    names = list(results[0]["ms"])
    ours = next(name for name in names if name not in results[0]["ratio"])
    baselines = [name for name in names if name != ours]
    memory = "temporary_bytes" in results[0]
    head = [
        "",
        *[f"{name}, ms" for name in (ours, *baselines)],
        *[f"{ours} / {name}" for name in baselines],
    ]
    counts = [name for name in ("flops", "bytes") if name in results[0]]
    rows = [
        [
            *head,
            *(f"{name}, MB" for name in (ours, *baselines) if memory),
            *(f"{name}, ratio" for name in counts),
        ]
    ]
    for result in results:
        ratios = [_ratio(result, name) for name in baselines]
        times = [f"{result['ms'][name]:.1f}" for name in (ours, *baselines)]
        bytes_ = [
            f"{result['temporary_bytes'][name] / 1e6:.0f}" for name in (ours, *baselines) if memory
        ]
        rows.append(
            [_label(result), *times, *ratios, *bytes_, *(f"{result[name]:.4f}" for name in counts)]
        )
    return rows


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


def flags(measured: Sequence[dict[str, Any]]) -> str:
    """Every flag with its time over none of each recipe's step (`step.xla_flags`, which has its own command for each recipe)."""
    rows = [["", *[one["recipe"] for one in measured]]]
    for name in measured[0]["sets"]:
        ratios = (one["sets"][name]["time"]["ratio"]["none"] for one in measured)
        rows.append([f"`{name}`", *[f"{ratio:.2f}" for ratio in ratios]])
    return table(rows)


def page(text: str, folder: Path) -> str:
    """The text of docs/evidence/performance.md with the tables of what is in the folder."""
    if (path := folder / "cpu_flags.json").exists():
        text = replaced(text, "cpu_flags", flags(json.loads(path.read_text())))
    for name in MODULES:
        if (path := folder / f"{name}.json").exists():
            text = replaced(text, name, part(name, json.loads(path.read_text())))
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
