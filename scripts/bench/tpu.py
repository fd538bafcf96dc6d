"""Whole steps compiled for TPU pods beside MaxText's of the same shapes, kept in `docs/evidence/performance/tpu.json`.

    mupax compile RECIPE --topology ... --json REPORT
    python -m scripts.bench.tpu --json REPORT --shape SHAPE --says TEXT
    python -m scripts.bench

SHAPE is one of the file's, each with its flags and what MaxText takes. A row has the commit of its program where it is known.
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
    "", "cycles", "of MaxText's", "arguments, of MaxText's", "temporaries, GB", "of MaxText's",
    "sums (of gradients), GB: beside products + alone", "program",
)  # fmt: skip
SUMS = ("all-reduce", "reduce-scatter")


def row_of(
    report: Mapping[str, Any], shape: str, says: str, program: Mapping[str, str]
) -> dict[str, Any]:
    """Return a row of the file from a report of `mupax compile`; bytes are those of one chip.

    Args:
        report: of a step that fits.
        shape: it is of.
        says: what is different in it, in words.
        program: commit and day.
    """
    sums = [one for one in report["collectives"] if one["kind"] in SUMS and not one["gathers"]]
    alone = sum(one["alone_bytes"] for one in sums)
    return {
        "shape": shape,
        "says": says,
        "cycles": report["estimated_cycles"],
        "argument_bytes": report["argument_bytes_per_device"],
        "temporary_bytes": report["temporary_bytes_per_device"],
        "sums_beside_bytes": round(sum(one["wire_bytes"] for one in sums) - alone),
        "sums_alone_bytes": round(alone),
        "step_seconds": report["roofline"]["step_seconds"],
        "jax": report["jax"],
        "program": dict(program),
    }


def part(record: Mapping[str, Any]) -> str:
    """Return the commands of the shapes and a table: MaxText's step, and ours as it is now.

    Args:
        record: Content of docs/evidence/performance/tpu.json, which also has all earlier rows.
    """
    commands = [
        f"- {name}: `mupax compile {shape['flags']}`" for name, shape in record["shapes"].items()
    ]
    rows: list[Sequence[str]] = [HEAD]
    for name, shape in record["shapes"].items():
        theirs = shape["maxtext"]
        rows.append((
            f"{name}, MaxText", _cycles(theirs), "", f"{theirs['argument_bytes'] / 1e9:.3f} GB",
            f"{theirs['temporary_bytes'] / 1e9:.2f}", "", "", "",
        ))  # fmt: skip
        of_shape = [row for row in record["rows"] if row["shape"] == name]
        rows += [_shown(row, theirs) for row in _current(of_shape)]
    return "\n".join([*commands, "", table(rows)])


def _current(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the newest row without flags of the compiler, and the rows with flags after it."""
    newest = max(
        index for index, row in enumerate(rows) if not row["says"].startswith("`--xla-flags")
    )
    return rows[newest:]


def _shown(row: Mapping[str, Any], theirs: Mapping[str, Any]) -> Sequence[str]:
    cycles, arguments, temporaries = (
        row[name] / theirs[name] for name in ("cycles", "argument_bytes", "temporary_bytes")
    )
    sums = ""
    if "sums_alone_bytes" in row:
        sums = f"{row['sums_beside_bytes'] / 1e9:.1f} + {row['sums_alone_bytes'] / 1e9:.1f}"
    program = "{commit}, {date}".format_map(row["program"]) if row["program"] else ""
    size = f"{row['temporary_bytes'] / 1e9:.2f}"
    return (
        row["says"],
        _cycles(row),
        f"{cycles:.3f}",
        f"{arguments:.2f}",
        size,
        f"{temporaries:.2f}",
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
    """One of the file's."""
    says: str
    """Words on what is different in this report."""


def main(argv: Sequence[str] | None = None) -> int:
    """Add a report; returns the exit code 0."""
    args = harness.parse(Options, argv)
    record, report = json.loads(FILE.read_text()), json.loads(args.json.read_text())
    harness.check_names([args.shape], record["shapes"], "shape")
    if not report["fits"]:
        harness.refuse(f"{args.json} is of a step that does not fit; there is nothing to compare")
    record["rows"].append(row_of(report, args.shape, args.says, commits.head(ROOT)))
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
