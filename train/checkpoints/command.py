"""`python -m train checkpoints WORKDIR`: the checkpoints of a run: steps, sizes, age and health."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run: steps, sizes, age and health.

    Health is what the manifest says and the sizes of its files; with --verify every file and every array is read and compared
    with its digest. Nothing is changed. Exit code 0 where all are good, 1 where one is damaged.
    """

    workdir: Annotated[conf.Positional[Path], conf.arg(metavar="WORKDIR")]
    """Folder of a run."""
    verify: Switch = False
    """Read every file and array, not their sizes alone."""
    json: Path | None = None
    """Also write what is shown to a file."""


def main(argv: Sequence[str]) -> int:
    """Shows the checkpoints; 0 where all are good, 1 where one is damaged.

    Raises:
        UsageError, WorkdirError: wrong flags, or no run there.
    """
    args = command_line.parse(Checkpoints, "python -m train checkpoints", argv)

    from mupax.train.checkpoints.workdir import RECORD, WorkdirError

    if not (args.workdir / RECORD).is_file():
        raise WorkdirError(f"{args.workdir} holds no run ({RECORD} is missing); write the workdir of one")
    rows = listed(args.workdir, verify=args.verify)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if rows:
        terminal.console().print(_table(rows))
    else:
        terminal.console().print(f"{args.workdir} has no checkpoint yet")
    return int(any(row["damaged"] for row in rows if not row["set_aside"]))


def listed(workdir: Path, *, verify: bool) -> list[dict[str, Any]]:
    """One entry per checkpoint, oldest first, those set aside after the others.

    Args:
        workdir: folder of the run.
        verify: read everything; otherwise the manifest, and of the files their sizes.
    """
    from mupax.train.checkpoints.workdir import CHECKPOINTS, SET_ASIDE

    folder = workdir / CHECKPOINTS
    found = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    return [_entry(path, verify, workdir) for path in [*found, *sorted((folder / SET_ASIDE).glob("*"))]]


def _entry(folder: Path, verify: bool, workdir: Path) -> dict[str, Any]:
    from mupax.train.checkpoints import digests, manifest
    from mupax.train.checkpoints.workdir import SET_ASIDE

    problems: list[str] = []
    arrays: int | None = None
    try:
        whole = manifest.verified(folder) if verify else manifest.read(folder)
        arrays = len(whole.arrays)
        if not verify:
            problems = manifest.check_files(folder, whole, contents=False)
        elif wrong := digests.check_stored(folder, whole.arrays):
            problems = [f"other arrays than were saved: {manifest.some(wrong)}"]
    except (manifest.DamagedError, OSError) as error:
        problems = [str(error)]
    name, _, _ = folder.name.partition(".")
    return {
        "step": int(name) if name.isdigit() else None,
        "path": str(folder.relative_to(workdir)),
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "arrays": arrays,
        "age_seconds": round(time.time() - folder.stat().st_mtime, 1),
        "set_aside": folder.parent.name == SET_ASIDE,
        "verified": verify,
        "damaged": manifest.some(problems) or None,
    }


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("step", "size", "arrays", "age", "health")
    for row in rows:
        good = "good, every bit" if row["verified"] else "whole (--verify reads every bit)"
        health = f"damaged: {row['damaged']}" if row["damaged"] else good
        aside = "set aside, " if row["set_aside"] else ""
        table.add_row(
            str(row["step"]), _size(row["bytes"]), str(row["arrays"] or ""), _age(row["age_seconds"]), aside + health
        )
    return table


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
