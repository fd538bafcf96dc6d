"""`python -m train checkpoints WORKDIR`: the checkpoints of a run: steps, sizes, age and health; and the flags of every command that reads one.

Imports no arrays: `--help` answers within a second.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch

TEMPLATE_FLAG: Any = conf.arg(name="data.chat-template", aliases=("--chat-template",), metavar="FILE")
"""Flag of every command that chats with a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Which parameters a command reads."""

    workdir: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="WORKDIR")]
    """Folder of a run, or WORKDIR/checkpoints/STEP."""
    step: Annotated[int | Literal["best"] | None, conf.arg(metavar="N|best")] = None
    """Checkpoint, or the best by the run's evaluations (--checkpoint.keep-best); the newest unless given."""
    ema: Switch = False
    """The moving average of the parameters; what a run that keeps one is read by."""
    no_ema: Switch = False
    """The parameters themselves, where the run keeps a moving average too."""

    def __post_init__(self) -> None:
        if self.ema and self.no_ema:
            raise command_line.UsageError("--ema and --no-ema exclude each other; write one of them")

    @property
    def average(self) -> bool | None:
        """Whether the moving average is asked for; None leaves it to what the run keeps."""
        return True if self.ema else False if self.no_ema else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(CheckpointFlags):
    """Which parameters a command reads that takes weights from elsewhere, too."""

    workdir: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="WORKDIR|ORG/NAME")]
    """Folder of a run, WORKDIR/checkpoints/STEP, weights alone, or a model of the Hugging Face hub."""
    revision: Annotated[str | None, conf.arg(metavar="BRANCH|TAG|COMMIT")] = None
    """Of a model of the hub; main unless given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run: steps, sizes, age and health.

    Health is what the manifest says and the sizes of its files; with --verify every file and every array is read and compared
    with its digest. Nothing is changed. Exit code 0 where all are good, 1 where one is damaged.
    """

    workdir: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="WORKDIR")]
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

    from mupax.train.checkpoints import workdir

    record = workdir.read_record(args.workdir)
    rows = _checkpoints(args.workdir, record.get("run"), verify=args.verify)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    head = ["step", "size", "arrays", "age", "health"]
    table = terminal.table([head, *map(_cells, rows)], left=["health"])
    terminal.say(table if rows else f"{args.workdir} has no checkpoint yet")
    return int(any(row["damaged"] for row in rows if not row["set_aside"]))


def _checkpoints(workdir: Path, run: str | None, *, verify: bool) -> list[dict[str, Any]]:
    """One entry per checkpoint, oldest first, those set aside after the others."""
    from mupax.train.checkpoints.folder import CHECKPOINTS
    from mupax.train.checkpoints.layout import aside

    folder = workdir / CHECKPOINTS
    paths = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))
    rejects = aside(folder)
    return [_entry(path, verify, workdir, run) for path in [*(p for p in paths if p not in rejects), *rejects]]


def _entry(checkpoint: Path, verify: bool, workdir: Path, run: str | None) -> dict[str, Any]:
    """What the manifest and the sizes of its files say; with `verify` everything is read."""
    from mupax.train.checkpoints import failures, folder, manifest
    from mupax.train.checkpoints.layout import is_aside

    problems: list[str] = []
    arrays: int | None = None
    try:
        content = folder.verified(checkpoint, run) if verify else manifest.read(checkpoint, run)
        arrays = len(content.arrays)
        if not verify:
            problems = folder.file_problems(checkpoint, content, contents=False)
        elif wrong := failures.damaged_arrays(checkpoint, content.arrays):
            problems = [f"other arrays than were saved: {folder.first_of(wrong)}"]
    except (manifest.DamagedError, manifest.ForeignError) as error:
        problems = [str(error)]
    name, _, _ = checkpoint.name.partition(".")
    files = [path.stat() for path in checkpoint.rglob("*") if path.is_file()]
    return {
        "step": int(name) if name.isdigit() else None,
        "path": str(checkpoint.relative_to(workdir)),
        "bytes": sum(file.st_size for file in files),
        "arrays": arrays,
        "age_seconds": round(time.time() - max(file.st_mtime for file in files), 1) if files else None,
        "set_aside": is_aside(checkpoint),
        "verified": verify,
        "damaged": folder.first_of(problems) or None,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    good = "good, every bit" if row["verified"] else "whole (--verify reads every bit)"
    health = f"damaged: {row['damaged']}" if row["damaged"] else good
    aside = "set aside, " if row["set_aside"] else ""
    age = str(datetime.timedelta(seconds=round(row["age_seconds"] or 0)))
    return [str(row["step"]), terminal.gib(row["bytes"]), str(row["arrays"] or ""), age, aside + health]
