"""Command `mupax checkpoints`, and the flags of every command that reads a checkpoint.

JAX is imported only by functions, so that `--help` answers within a second.
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

from mupax import command_line, disk, terminal
from mupax.command_line import Switch
from mupax.plugins import PluginError
from mupax.train.config.checks import check_outputs
from mupax.train.config.sections import METRIC

TEMPLATE_FLAG: Any = conf.arg(
    name="data.chat-template", aliases=("--chat-template",), metavar="FILE"
)
"""Flag `--data.chat-template FILE` (or `--chat-template`) of commands that chat with a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Flags that choose the parameters a command reads."""

    workdir: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="WORKDIR")]
    """Folder of a run, or WORKDIR/checkpoints/STEP."""
    step: Annotated[int | Literal["best"] | None, conf.arg(metavar="N|best")] = None
    """Step, or the best by evaluations (--checkpoint.keep-best). The newest by default."""
    ema: Switch = False
    """Read the moving average of the parameters. The default for a run that keeps one."""
    no_ema: Switch = False
    """Read the parameters themselves, also if the run keeps a moving average."""

    def __post_init__(self) -> None:
        if self.ema and self.no_ema:
            raise command_line.UsageError(
                "--ema and --no-ema exclude each other; write one of them"
            )

    @property
    def average(self) -> bool | None:
        """True to read the moving average, False to read the parameters themselves.

        `None` without a flag: the moving average is then read if the run keeps one.
        """
        if self.ema:
            return True
        if self.no_ema:
            return False
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(CheckpointFlags):
    """Flags that choose the parameters of a run, of weights alone, or of a model of the hub."""

    workdir: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="WORKDIR|ORG/NAME")]
    """Run, WORKDIR/checkpoints/STEP, weights alone, or a model of the Hugging Face hub."""
    revision: Annotated[str | None, conf.arg(metavar="BRANCH|TAG|COMMIT")] = None
    """Revision of a model of the hub; main by default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run: steps, losses, sizes, age and health.

    Losses are those of metrics.jsonl at the step, in nats per token, image or target. The best is
    that of --checkpoint.best-metric among the checkpoints that are there; a run without evaluations
    has none. The column "stays as" says which flag keeps a checkpoint: --checkpoint.keep the newest,
    keep-best the best, keep-every every N. One without a reason is deleted at the next save.
    Health compares the checkpoint with its manifest: the sizes of its files, and the run's assets.
    With --verify every file and every array is read and compared with its digest. Nothing is
    changed. Exit code 0 if all are good, 1 if one is damaged.
    """

    workdir: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="WORKDIR")]
    """Folder of a run."""
    verify: Switch = False
    """Read every file and array, not their sizes alone."""
    json: Path | None = None
    """Also write what is shown to a file."""


def main(argv: Sequence[str]) -> int:
    """Print the checkpoints of a run. Return 0 if all are good, 1 if one is damaged.

    Quarantined checkpoints are listed, but do not change the exit code. With `--json` the entries
    are also written to a file.

    Raises:
        UsageError: The flags are wrong.
        ConfigError: The file of `--json` cannot be written.
        WorkdirError: The folder holds no run.
    """
    args = command_line.parse(Checkpoints, "mupax checkpoints", argv)
    check_outputs(args, "json")

    from mupax.train.checkpoints import saved_run, workdir
    from mupax.train.config import record as config_record

    record = workdir.read_record(args.workdir)
    # A plugin that cannot be imported is no error. Plugins are needed here only if one of them
    # defines the metric that ranks the checkpoints.
    with contextlib.suppress(PluginError):
        config_record.restore(record, needs_metrics=False)
    rows = _checkpoints(args.workdir, record.get("run"), verify=args.verify)
    metric = saved_run.best_metric(record["config"])
    _add_metrics(rows, args.workdir, metric)
    _add_reasons(rows, record, metric)
    if args.json is not None:
        args.json.write_text(disk.json_text(rows, indent=2) + "\n")
    if not rows:
        terminal.say(f"{args.workdir} has no checkpoint yet")
        return 0
    metrics = dict.fromkeys(["loss", METRIC, metric])  # each once, in this order
    columns = [name for name in metrics if any(name in row["metrics"] for row in rows)]
    mark = [""] if columns else []
    head = ["step", *columns, *mark, "size", "arrays", "age", "stays as", "health"]
    lines = [head, *(_cells(row, columns) for row in rows)]
    terminal.say(terminal.table(lines, left=["health", "stays as", ""]))
    for row in rows:
        if row["best"]:
            value = row["metrics"][metric]
            terminal.say(
                f"best by {metric}: step {row['step']}, {value:.4f}; use it with --step "
                f"{row['step']}"
            )
    return int(any(row["damaged"] for row in rows if not row["set_aside"]))


def _checkpoints(workdir: Path, run: str | None, *, verify: bool) -> list[dict[str, Any]]:
    """Return one entry (`_entry`) per checkpoint, oldest first, and quarantined ones last.

    A checkpoint that a run deletes meanwhile is left out.

    Args:
        run: Name of the run that the checkpoints must be of, or `None` for any.
        verify: Read all files and arrays, not only the sizes of files.
    """
    from mupax.train.checkpoints.folder import CHECKPOINTS
    from mupax.train.checkpoints.layout import quarantined

    folder = workdir / CHECKPOINTS
    numbered = [path for path in folder.glob("*") if path.name.isdigit()]
    numbered.sort(key=lambda path: int(path.name))
    rejects = quarantined(folder)
    paths = [path for path in numbered if path not in rejects] + rejects
    # Read all checkpoints before `path.exists()` is called for any of them. A deletion that spoiled
    # one of these reads has then probably ended.
    entries = [_entry(path, verify, workdir, run) for path in paths]
    listed: list[dict[str, Any]] = []
    for path, entry in zip(paths, entries, strict=True):
        # A checkpoint that the run has deleted meanwhile is not damaged.
        if not entry["damaged"] or path.exists():
            listed.append(entry)
    return listed


def _entry(checkpoint: Path, verify: bool, workdir: Path, run: str | None) -> dict[str, Any]:
    """Return a dictionary with step, size, age and health of one checkpoint.

    The keys are `step`, `path` (inside the workdir), `bytes`, `arrays` (their number),
    `age_seconds`, `set_aside`, `verified`, `being_saved` and `damaged`. `damaged` has the problems
    in one line, or `None`. A checkpoint that is being saved is not checked.

    Args:
        verify: Read all files and arrays, not only the sizes of files.
        run: Name of the run that the checkpoint must be of, or `None` for any.
    """
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
    files: list[os.stat_result] = []
    for path in checkpoint.rglob("*"):
        # A running process may delete the file meanwhile.
        with contextlib.suppress(*disk.ABSENT):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                files.append(status)

    name, _, _ = checkpoint.name.partition(".")
    age: float | None = None
    if files:
        age = round(time.time() - max(file.st_mtime for file in files), 1)
    damaged: str | None = None
    if not being_saved:
        damaged = folder.first_of(problems) or None
    return {
        "step": int(name) if name.isdigit() else None,
        "path": str(checkpoint.relative_to(workdir)),
        "bytes": sum(file.st_size for file in files),
        "arrays": arrays,
        "age_seconds": age,
        "set_aside": is_quarantined(checkpoint),
        "verified": verify,
        "being_saved": being_saved,
        "damaged": damaged,
    }


def _health(
    checkpoint: Path, verify: bool, workdir: Path, run: str | None
) -> tuple[int | None, list[str]]:
    """Compare a checkpoint, and the run's assets (tokenizer and others), with the manifest.

    Without `verify` only the sizes of the checkpoint's files are compared. With it, all files and
    arrays are read and compared with their digests.

    Args:
        run: Name of the run that the checkpoint must be of, or `None` for any.

    Returns:
        Number of arrays, or `None` if the manifest cannot be read, and a line for each problem.
    """
    from mupax.train.checkpoints import assets, folder, layout

    arrays: int | None = None
    try:
        manifest = folder.verified(checkpoint, run) if verify else layout.read(checkpoint, run)
        arrays = len(manifest.arrays)
        problems: list[str] = []
        if verify:
            wrong = folder.damaged_arrays(checkpoint, manifest.arrays)
            if wrong:
                problems = [f"other arrays than were saved: {folder.first_of(wrong)}"]
        else:
            problems = folder.file_problems(checkpoint, manifest, read_contents=False)
        return arrays, problems + assets.problems(workdir, manifest.assets)
    except (layout.DamagedError, layout.ForeignError) as error:
        return arrays, [str(error)]


def _add_metrics(rows: list[dict[str, Any]], workdir: Path, metric: str) -> None:
    """Add two fields to every entry: `metrics`, the losses of its step, and `best`, a bool.

    `best` is true for the entry with the best value of `metric`. Checkpoints that are quarantined
    or being saved are never the best. If no imported module defines `metric`, no entry is marked
    and a note is printed.

    Args:
        rows: Entries of `_checkpoints`, which are changed in place.
        workdir: Folder with metrics.jsonl. If a row is lost there, the evaluation that the
            checkpoint holds is used.
        metric: Name of the metric that ranks checkpoints, such as `eval_loss`.
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
            f"{metric} is of a module that is not imported, so that no checkpoint is marked as "
            "the best"
        )
        return
    costs: list[tuple[float, int | None, int]] = []
    for index, row in enumerate(rows):
        value = cost(metric, row["metrics"].get(metric))
        if math.isfinite(value) and _counts(row):
            costs.append((value, row["step"], index))
    if costs:
        # The tuples compare by step if their values are equal, so the earliest step is the best.
        _, _, index = min(costs)
        rows[index]["best"] = True


def _add_reasons(rows: list[dict[str, Any]], record: Mapping[str, Any], metric: str) -> None:
    """Add to every entry which settings keep it, as `stays_as`, such as "newest, every 1000".

    `None` means that the checkpoint is deleted at the next save, or that it is quarantined or being
    saved. "unknown" means that it may be one of the best by a metric that no imported module
    defines.

    Args:
        rows: Entries of `_checkpoints` with `metrics` (`_add_metrics`). They are changed in place.
        record: Content of config.json, perhaps of an older version.
        metric: Name of the metric that ranks checkpoints, such as `eval_loss`.
    """
    from mupax.train.config import sections
    from mupax.train.config.metrics import METRICS, metric_name

    parts = sections.run_parts(record)
    is_known = metric_name(metric) in METRICS
    ranks = any(policy.ranks for policy in parts[-1].policies)
    if not is_known:
        # The checkpoints cannot be ranked by an unknown metric, so policies that rank are left out.
        for index, part in enumerate(parts):
            unranked = tuple(policy for policy in part.policies if not policy.ranks)
            parts[index] = part._replace(policies=unranked)
    measured = {row["step"]: row["metrics"] for row in rows if _counts(row)}
    reasons = sections.staying(sorted(measured), measured, parts)
    for row in rows:
        row["stays_as"] = None
        if _counts(row):
            otherwise = "unknown" if ranks and not is_known else None
            row["stays_as"] = reasons.get(row["step"], otherwise)


def _counts(row: dict[str, Any]) -> bool:
    """Return whether a checkpoint is neither quarantined nor being saved. It may be damaged."""
    return not row["set_aside"] and not row["being_saved"]


def _metrics_by_step(workdir: Path) -> dict[int, dict[str, Any]]:
    """Return the loss and the evaluation metrics of every step in metrics.jsonl, by step.

    `None` stands for a value that was not finite. Lines that are no rows are skipped. Empty if the
    file is missing.
    """
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
            continue  # the empty line at the end of the file, or a line that a kill cut off
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            continue
        values: dict[str, Any] = {}
        for name, value in row.items():
            is_metric = name == "loss" or name.startswith(("eval_", "eval/"))
            if is_metric and (value is None or type(value) in (int, float)):
                values[name] = value
        # A step may have two rows, one of its training and one of its evaluation.
        by_step.setdefault(row["step"], {}).update(values)
    return by_step


def _metric_text(row: dict[str, Any], name: str) -> str:
    """Return a metric of an entry with four decimals, "not finite", or "" if it has no value."""
    if name not in row["metrics"]:
        return ""
    value = row["metrics"][name]
    return "not finite" if value is None else f"{value:.4f}"


def _cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    """Return the cells of one checkpoint's line in the table, as text.

    Args:
        row: Entry of `_checkpoints`, with `best` and `stays_as`.
        columns: Names of the metrics that have a column.
    """
    if row["being_saved"]:
        health = "being saved (or left by a run that was ended, and deleted when it is resumed)"
    elif row["damaged"]:
        health = f"damaged: {row['damaged']}"
    elif row["verified"]:
        health = "good, every bit"
    else:
        health = "whole (--verify reads every bit)"
    if row["set_aside"]:
        health = f"set aside, {health}"
    losses = [_metric_text(row, name) for name in columns]
    mark: list[str] = []
    if columns:
        mark = ["best" if row["best"] else ""]
    age = datetime.timedelta(seconds=round(row["age_seconds"] or 0))
    return [
        str(row["step"]),
        *losses,
        *mark,
        terminal.gib(row["bytes"]),
        str(row["arrays"] or ""),
        str(age),
        row["stays_as"] or "-",
        health,
    ]
