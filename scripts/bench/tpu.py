"""Compare steps compiled for TPU pods with MaxText's of the same shapes, and Muon with AdamW.

    mupax compile RECIPE --topology ... --json REPORT
    python -m scripts.bench.tpu --json REPORT --shape SHAPE --says TEXT
    python -m scripts.bench.tpu --json REPORT --adamw REPORT --shape FLAGS
    python -m scripts.bench

Adds a report to docs/evidence/performance/tpu.json; `scripts.bench` then writes the page. SHAPE is
one of the record's, each with its flags and MaxText's figures. A row has the commit of its program
where the commit is known.

With `--adamw`, the first report is of a step with Muon and the other of the same step with AdamW.
FLAGS are the words of `mupax compile` that both share.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import ROOT, harness
from scripts.bench import commits
from scripts.pages.markdown import table

FILE = ROOT / "docs" / "evidence" / "performance" / "tpu.json"
HEAD = (
    "",
    "cycles",
    "of MaxText's",
    "arguments, of MaxText's",
    "temporaries, GB",
    "of MaxText's",
    "sums (of gradients), GB: beside products + alone",
    "program",
)
"""Head of the table on the page."""
MUON_HEAD = (
    "`mupax compile`",
    "cycles, of AdamW's",
    "temporaries, GiB",
    "of AdamW's",
    "sent beyond AdamW's, GiB",
    "memory, GiB",
)
"""Head of the table of steps with Muon."""
SUMS = ("all-reduce", "reduce-scatter")
"""Kinds of collectives that sum gradients."""


def row_of(
    report: Mapping[str, Any], shape: str, says: str, program: Mapping[str, str]
) -> dict[str, Any]:
    """Return a row of the record from a report of `mupax compile`. Bytes are those of one chip.

    Args:
        report: Report of a step that fits the chip's memory.
        shape: Key of the record's `shapes`.
        says: Text on the difference to other steps of this shape.
        program: Keys `commit` and `date` of the compiled program.
    """
    wire_bytes = 0
    alone_bytes = 0
    for collective in report["collectives"]:
        if collective["kind"] in SUMS and not collective["gathers"]:
            wire_bytes += collective["wire_bytes"]
            alone_bytes += collective["alone_bytes"]
    return {
        "shape": shape,
        "says": says,
        "cycles": report["estimated_cycles"],
        "argument_bytes": report["argument_bytes_per_device"],
        "temporary_bytes": report["temporary_bytes_per_device"],
        "sums_beside_bytes": round(wire_bytes - alone_bytes),
        "sums_alone_bytes": round(alone_bytes),
        "step_seconds": report["roofline"]["step_seconds"],
        "jax": report["jax"],
        "program": dict(program),
    }


def part(record: Mapping[str, Any]) -> str:
    """Return the page's table: per shape MaxText's and mupax's step.

    Args:
        record: Content of docs/evidence/performance/tpu.json, which also has all earlier rows.
    """
    commands = []
    rows: list[Sequence[str]] = [HEAD]
    for name, shape in record["shapes"].items():
        commands.append(f"- {name}: `mupax compile {shape['flags']}`")
        maxtext = shape["maxtext"]
        arguments = f"{maxtext['argument_bytes'] / 1e9:.3f} GB"
        temporaries = f"{maxtext['temporary_bytes'] / 1e9:.2f}"
        head = f"{name}, MaxText"
        rows.append((head, _cycles(maxtext), "", arguments, temporaries, "", "", ""))
        shape_rows = [row for row in record["rows"] if row["shape"] == name]
        rows += [_table_row(row, maxtext) for row in _current(shape_rows)]
    return table(rows)


def muon_part(record: Mapping[str, Any]) -> str:
    """Return the page's table of steps with Muon beside the same steps with AdamW.

    Args:
        record: Content of docs/evidence/performance/tpu.json. Its key `muon` has the rows.
    """
    rows: list[Sequence[str]] = [MUON_HEAD]
    for row in record["muon"]:
        muon = row["muon"]
        adamw = row["adamw"]
        sent = (muon["wire_bytes"] - adamw["wire_bytes"]) / 2**30
        cells = (
            f"`{row['flags']}`",
            f"{muon['cycles'] / adamw['cycles']:.3f}",
            f"{muon['temporary_bytes'] / 2**30:.2f}",
            f"{muon['temporary_bytes'] / adamw['temporary_bytes']:.3f}",
            f"{sent:+.2f}",
            f"{muon['peak_bytes'] / 2**30:.2f} of {row['memory_bytes'] / 2**30:.0f}",
        )
        rows.append(cells)
    return table(rows)


def muon_row(
    flags: str, muon: Mapping[str, Any], adamw: Mapping[str, Any], program: Mapping[str, str]
) -> dict[str, Any]:
    """Return a row of the record's `muon` from two reports of `mupax compile`.

    Args:
        flags: Words of the command that both steps share.
        muon: Report of the step with Muon. It fits the chip's memory.
        adamw: Report of the same step with AdamW.
        program: Keys `commit` and `date` of the compiled programs.
    """
    return {
        "flags": flags,
        "memory_bytes": muon["hbm_bytes_per_device"],
        "muon": _costs(muon),
        "adamw": _costs(adamw),
        "jax": muon["jax"],
        "program": dict(program),
    }


def _costs(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs of one step on one chip, and the number of problems in its report."""
    return {
        "cycles": report["estimated_cycles"],
        "temporary_bytes": report["temporary_bytes_per_device"],
        "peak_bytes": report["peak_bytes_per_device"],
        "wire_bytes": round(sum(row["wire_bytes"] for row in report["collectives"])),
        "problems": len(report["problems"]),
    }


def _current(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the newest row without compiler flags, and the rows with such flags after it."""
    newest = 0
    for index, row in enumerate(rows):
        if not row["says"].startswith("`--xla-flags"):
            newest = index
    return rows[newest:]


def _table_row(row: Mapping[str, Any], maxtext: Mapping[str, Any]) -> Sequence[str]:
    """Return the cells of one step, with its ratios to MaxText's step."""
    sums = ""
    if "sums_alone_bytes" in row:
        sums = f"{row['sums_beside_bytes'] / 1e9:.1f} + {row['sums_alone_bytes'] / 1e9:.1f}"
    program = ""
    if row["program"]:
        program = f"{row['program']['commit']}, {row['program']['date']}"
    return (
        row["says"],
        _cycles(row),
        f"{row['cycles'] / maxtext['cycles']:.3f}",
        f"{row['argument_bytes'] / maxtext['argument_bytes']:.2f}",
        f"{row['temporary_bytes'] / 1e9:.2f}",
        f"{row['temporary_bytes'] / maxtext['temporary_bytes']:.2f}",
        sums,
        program,
    )


def _cycles(row: Mapping[str, Any]) -> str:
    return f"{row['cycles'] / 1e9:.3f}e9"


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    json: Path
    """Report of `mupax compile`."""
    shape: str
    """Shape of the record that the report is of. With `--adamw`, the words of `mupax compile`."""
    says: str = ""
    """Text on the difference to other steps of the shape."""
    adamw: Path | None = None
    """Report of the same step with AdamW, if the first report is of one with Muon."""


def main(argv: Sequence[str] | None = None) -> int:
    """Add a report to the record and return the exit code 0."""
    args = harness.parse(Options, argv)
    record = json.loads(FILE.read_text())
    report = json.loads(args.json.read_text())
    if args.adamw is None:
        harness.check_names([args.shape], record["shapes"], "shape")
    if not report["fits"]:
        harness.refuse(f"{args.json} is of a step that does not fit; there is nothing to compare")
    program = commits.head(ROOT)
    if args.adamw is None:
        record["rows"].append(row_of(report, args.shape, args.says, program))
    else:
        adamw = json.loads(args.adamw.read_text())
        kept_rows = [row for row in record.get("muon", []) if row["flags"] != args.shape]
        record["muon"] = [*kept_rows, muon_row(args.shape, report, adamw, program)]
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
