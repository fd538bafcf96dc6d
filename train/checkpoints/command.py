"""`mupax checkpoints WORKDIR`: the checkpoints of a run: steps, sizes, age and health; and the flags of every command that reads one.

Imports no arrays: `--help` answers within a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.plugins import PluginError
from mupax.train.config.sections import METRIC

TEMPLATE_FLAG: Any = conf.arg(
    name="data.chat-template", aliases=("--chat-template",), metavar="FILE"
)
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
            raise command_line.UsageError(
                "--ema and --no-ema exclude each other; write one of them"
            )

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
    """The checkpoints of a run: steps, losses, sizes, age and health.

    Losses are those of metrics.jsonl at the step, in nats per token, image or target. The best is that of
    --checkpoint.best-metric among the checkpoints that are there; a run without evaluations has none. The column "stays as" says
    why a checkpoint is kept: newest, best, or every N (--checkpoint.keep, keep-best and keep-every). One without a reason is
    deleted at the next save.
    Health is what the manifest says, the sizes of its files, and the run's assets; with --verify every file and every array is
    read and compared with its digest. Nothing is changed. Exit code 0 where all are good, 1 where one is damaged.
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
    args = command_line.parse(Checkpoints, "mupax checkpoints", argv)

    from mupax.train.checkpoints import workdir
    from mupax.train.config import record as config_record

    record = workdir.read_record(args.workdir)
    with contextlib.suppress(
        PluginError
    ):  # the list needs them only to mark the best by a metric of theirs
        config_record.restore(record)
    rows = _checkpoints(args.workdir, record.get("run"), verify=args.verify)
    metric = _best_metric(record["config"])
    _add_metrics(rows, args.workdir, metric)
    _add_reasons(rows, record)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if not rows:
        terminal.say(f"{args.workdir} has no checkpoint yet")
        return 0
    columns = [
        name
        for name in dict.fromkeys(["loss", METRIC, metric])
        if any(name in row["metrics"] for row in rows)
    ]
    mark = [""] if columns else []
    head = ["step", *columns, *mark, "size", "arrays", "age", "stays as", "health"]
    terminal.say(
        terminal.table(
            [head, *(_cells(row, columns) for row in rows)], left=["health", "stays as", ""]
        )
    )
    for row in rows:
        if row["best"]:
            value = row["metrics"][metric]
            terminal.say(
                f"best by {metric}: step {row['step']}, {value:.4f}; use it with --step {row['step']}"
            )
    return int(any(row["damaged"] for row in rows if not row["set_aside"]))


def _checkpoints(workdir: Path, run: str | None, *, verify: bool) -> list[dict[str, Any]]:
    """One entry per checkpoint, oldest first, those set aside after the others."""
    from mupax.train.checkpoints.folder import CHECKPOINTS
    from mupax.train.checkpoints.layout import quarantined

    folder = workdir / CHECKPOINTS
    paths = sorted(
        (path for path in folder.glob("*") if path.name.isdigit()), key=lambda path: int(path.name)
    )
    rejects = quarantined(folder)
    paths = [path for path in paths if path not in rejects] + rejects
    entries = [_entry(path, verify, workdir, run) for path in paths]
    # One that the run has deleted since it was listed is not damaged.
    return [
        entry
        for path, entry in zip(paths, entries, strict=True)
        if not entry["damaged"] or path.exists()
    ]


def _entry(checkpoint: Path, verify: bool, workdir: Path, run: str | None) -> dict[str, Any]:
    """What the manifest and the sizes of its files say; with `verify` everything is read."""
    from mupax import disk
    from mupax.train.checkpoints import folder
    from mupax.train.checkpoints.layout import is_being_saved, is_quarantined

    problems: list[str] = []
    arrays: int | None = None
    being_saved = is_being_saved(checkpoint)
    if not being_saved:
        arrays, problems = _health(checkpoint, verify, workdir, run)
        # A run may have begun to delete the checkpoint meanwhile.
        being_saved = bool(problems) and is_being_saved(checkpoint)
    name, _, _ = checkpoint.name.partition(".")
    files: list[os.stat_result] = []
    for path in checkpoint.rglob("*"):
        with contextlib.suppress(*disk.ABSENT):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                files.append(status)
    return {
        "step": int(name) if name.isdigit() else None,
        "path": str(checkpoint.relative_to(workdir)),
        "bytes": sum(file.st_size for file in files),
        "arrays": arrays,
        "age_seconds": round(time.time() - max(file.st_mtime for file in files), 1)
        if files
        else None,
        "set_aside": is_quarantined(checkpoint),
        "verified": verify,
        "being_saved": being_saved,
        "damaged": None if being_saved else folder.first_of(problems) or None,
    }


def _health(
    checkpoint: Path, verify: bool, workdir: Path, run: str | None
) -> tuple[int | None, list[str]]:
    """Return the number of arrays of a checkpoint, where its manifest says it, and what is wrong with it."""
    from mupax.train.checkpoints import assets, folder, layout

    arrays: int | None = None
    try:
        content = folder.verified(checkpoint, run) if verify else layout.read(checkpoint, run)
        arrays = len(content.arrays)
        problems: list[str] = []
        if not verify:
            problems = folder.file_problems(checkpoint, content, read_contents=False)
        elif wrong := folder.damaged_arrays(checkpoint, content.arrays):
            problems = [f"other arrays than were saved: {folder.first_of(wrong)}"]
        return arrays, problems + assets.problems(workdir, content.assets)
    except (layout.DamagedError, layout.ForeignError) as error:
        return arrays, [str(error)]


def _best_metric(config: Any) -> str:
    """Return checkpoint.best_metric of a recorded config, which may be of another version."""
    section = config.get("checkpoint") if isinstance(config, dict) else None
    metric = section.get("best_metric") if isinstance(section, dict) else None
    return metric if isinstance(metric, str) else METRIC


def _add_metrics(rows: list[dict[str, Any]], workdir: Path, metric: str) -> None:
    """Give every entry the losses of its step as `metrics`, and mark the best one of those that are not set aside.

    Args:
        rows: entries of `_checkpoints`; changed in place.
        workdir: has metrics.jsonl. Evaluations that checkpoints keep stand in for rows that were lost.
        metric: of an evaluation, by which the best is told.
    """
    from mupax.train.checkpoints import checkpointer
    from mupax.train.config.metrics import METRICS, metric_name
    from mupax.train.config.sections import cost

    by_step = _metrics_by_step(workdir)
    for row in rows:
        evaluation = checkpointer.read(workdir / row["path"])
        row["metrics"] = evaluation | by_step.get(row["step"], {})
        row["best"] = False
    if metric_name(metric) not in METRICS:
        terminal.note(
            f"{metric} is of a module that is not imported, so that no checkpoint is marked as the best"
        )
        return
    costs = [
        (cost(metric, row["metrics"].get(metric)), row["step"], index)
        for index, row in enumerate(rows)
    ]
    finite = [entry for entry in costs if math.isfinite(entry[0]) and _counts(rows[entry[2]])]
    if finite:
        rows[min(finite)[2]]["best"] = True


def _add_reasons(rows: list[dict[str, Any]], record: Mapping[str, Any]) -> None:
    """Give every entry the reason for which it stays as `stays_as`; None where it has none.

    Args:
        rows: entries of `_checkpoints` with their `metrics`, which are those of metrics.jsonl where a checkpoint has lost its
            own: the run puts them back when it goes on. Changed in place.
        record: content of the run's config.json.
    """
    from mupax.train.config import sections

    measured = {row["step"]: row["metrics"] for row in rows if _counts(row)}
    reasons = sections.staying(sorted(measured), measured, sections.run_parts(record))
    for row in rows:
        row["stays_as"] = reasons.get(row["step"]) if _counts(row) else None


def _counts(row: dict[str, Any]) -> bool:
    return not row["set_aside"] and not row["being_saved"]


def _metrics_by_step(workdir: Path) -> dict[int, dict[str, Any]]:
    """Return losses and evaluations of every step in metrics.jsonl; None is a number that was not finite."""
    from mupax import disk

    try:
        lines = disk.read_bytes(workdir / "metrics.jsonl").split(b"\n")
    except disk.ABSENT:
        return {}
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the empty one at the end, or one that a kill has torn
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            continue
        names = [name for name in row if name == "loss" or name.startswith(("eval_", "eval/"))]
        values = {
            name: row[name]
            for name in names
            if row[name] is None or type(row[name]) in (int, float)
        }
        by_step.setdefault(row["step"], {}).update(values)
    return by_step


def _metric_text(row: dict[str, Any], name: str) -> str:
    if name not in row["metrics"]:
        return ""
    value = row["metrics"][name]
    return "not finite" if value is None else f"{value:.4f}"


def _cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    good = "good, every bit" if row["verified"] else "whole (--verify reads every bit)"
    health = f"damaged: {row['damaged']}" if row["damaged"] else good
    if row["being_saved"]:
        health = "being saved (or left by a run that was ended, and deleted when it is resumed)"
    aside = "set aside, " if row["set_aside"] else ""
    age = str(datetime.timedelta(seconds=round(row["age_seconds"] or 0)))
    losses = [_metric_text(row, name) for name in columns]
    mark: list[str] = []
    if columns:
        mark = ["best" if row["best"] else ""]
    size = terminal.gib(row["bytes"])
    reason = row["stays_as"] or "-"
    return [
        str(row["step"]),
        *losses,
        *mark,
        size,
        str(row["arrays"] or ""),
        age,
        reason,
        aside + health,
    ]
