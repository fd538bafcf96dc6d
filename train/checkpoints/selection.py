"""Steps of a run that are meant by something else than being the newest: the best by an evaluation, and one to go back to.

What an evaluation measured is kept in the checkpoint of its step, as evaluation.json beside the manifest, so that which is the best
is read from what is saved.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from mupax import disk
from mupax.paths import is_remote
from mupax.train.checkpoints import assets
from mupax.train.checkpoints.folder import CHECKPOINTS, CheckpointFolder, WorkdirError, steps
from mupax.train.checkpoints.layout import counts
from mupax.train.checkpoints.manifest import Manifest
from mupax.train.config import retention
from mupax.train.config.retention import CheckpointConfig, Measured, Metrics
from mupax.train.config.sections import Step

FILE = "evaluation.json"
BEST = "best"
BRANCHES = "branches"
"""Folder of a workdir with what came after steps that the run went back to: a workdir each."""


class RankedFolder(CheckpointFolder):
    """Checkpoints that hold the evaluations of their steps, so that the best can stay. Process 0 alone changes the folder.

    The arguments are those of `CheckpointFolder`.
    """

    def __init__(
        self, workdir: Path, config: CheckpointConfig, note: Callable[[str], None], renames: bool = True
    ) -> None:
        super().__init__(workdir, config, note, renames)
        self._lock = threading.Lock()
        self._measured: dict[int, Metrics] = {}
        """Evaluations that are not in their checkpoints yet."""

    def evaluated(self, measured: Mapping[int, Metrics]) -> None:
        """Keep what evaluations measured, by step, each in the checkpoint of its step, now or when that is there."""
        if not self._config.ranks:
            return
        with self._lock:
            self._measured.update(measured)
            try:
                for saved in [saved for saved in self._measured if counts(self.folder / str(saved))]:
                    self._keep_measured(self.folder / str(saved), saved)
                self.prune()
            except (OSError, disk.DiskError) as error:  # the run goes on, and the next evaluation tries again
                self._note(f"the best checkpoints are as they were: {error}")

    def forget(self, step: int) -> None:
        """A checkpoint of another state at that step is to come."""
        self._measured.pop(step, None)

    def publish(self, content: Manifest) -> None:
        with self._lock:
            self._keep_measured(self.layout.written_at(content.step), content.step)
            super().publish(content)

    def leaving(self, record: Mapping[str, Any] | None = None) -> list[int]:
        try:
            leaving = super().leaving(record)
        except disk.DiskError as error:
            self._note(f"no checkpoint is deleted for now: {error}")
            return []
        # A checkpoint whose evaluation is not on disk yet may be the best.
        return [step for step in leaving if step not in self._measured]

    def measured(self, saved: list[int]) -> Measured:
        if not self._config.ranks:
            return {}
        return {step: read(self.folder / str(step)) for step in saved}

    def _keep_measured(self, checkpoint: Path, step: int) -> None:
        metrics = self._measured.get(step)
        if metrics is not None and read(checkpoint) != metrics:
            write(checkpoint, step, metrics)
        self._measured.pop(step, None)


def write(checkpoint: Path, step: int, metrics: Metrics) -> None:
    """Keep what an evaluation measured in its checkpoint, whole or not at all.

    Args:
        checkpoint: its folder, which may not have its name yet.
        step: of the checkpoint.
        metrics: what was measured.

    Raises:
        DiskError: the disk does not take it.
    """
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()}
    content = {"step": step, "metrics": finite}
    disk.write_whole(checkpoint / FILE, json.dumps({**content, "digest": _digest(content)}) + "\n")


def read(checkpoint: Path) -> dict[str, float | None]:
    """What an evaluation measured at a checkpoint; empty where none did, or the file is not as it was written.

    Raises:
        DiskError: the disk cannot read it.
    """
    try:
        content = disk.read_json(checkpoint / FILE)
    except disk.JsonError:
        return {}
    digest, metrics = content.pop("digest", None), content.get("metrics")
    whole = (
        digest == _digest(content)
        and str(content.get("step")) == checkpoint.name.partition(".")[0]
        and isinstance(metrics, dict)
    )
    return metrics if whole and isinstance(metrics, dict) else {}


def ranked(folder: Path, metric: str) -> list[int]:
    """Return the steps of checkpoints that hold a finite value of a metric, the best first, of equal ones the earliest.

    Args:
        folder: of the checkpoints.
        metric: of an evaluation.

    Raises:
        DiskError: the disk cannot read them.
    """
    return retention.ranked({step: read(folder / str(step)) for step in steps(folder)}, metric)


def step_of(workdir: Path, choice: Step | None, metric: str) -> int:
    """The step of a run that is meant.

    Args:
        workdir: of the run.
        choice: a step, or best; None is the newest.
        metric: by which the run says what is best.

    Raises:
        WorkdirError: it is not there.
        DiskError: the disk cannot read what was measured.
    """
    saved = steps(workdir / CHECKPOINTS)
    if not saved:
        raise WorkdirError(f"{workdir} has no checkpoint yet; let the run write one first")
    listed = ", ".join(map(str, saved))
    if choice == BEST:
        if best := ranked(workdir / CHECKPOINTS, metric):
            return best[0]
        raise WorkdirError(
            f"{workdir} has no checkpoint with a finite {metric}, so none is the best; a run keeps its best with "
            f"--checkpoint.keep-best 1. There are the steps {listed}"
        )
    if choice is not None and choice not in saved:
        raise WorkdirError(f"{workdir} has no checkpoint of step {choice}; there are {listed}")
    return max(saved) if choice is None else choice


def named_step(path: Path) -> tuple[Path, Step | None]:
    """The workdir and the step that WORKDIR/checkpoints/STEP or WORKDIR/checkpoints/best names; any other path, and None."""
    if path.parent.name == CHECKPOINTS and (path.name == BEST or re.fullmatch(r"\d+", path.name)):
        return path.parent.parent, BEST if path.name == BEST else int(path.name)
    return path, None


def branch_off(checkpoints: CheckpointFolder, step: int, files: Sequence[Path]) -> str:
    """Put what a run did after a step into a workdir of its own, from which it can be used and gone on with.

    Records first, then checkpoints, the newest first: a kill leaves the run with fewer of them, and the same command does the rest.

    Args:
        checkpoints: of the run; process 0 alone calls this.
        step: that the run goes back to.
        files: its metrics and its record.

    Returns:
        A line that says where it is; "" where nothing came after.

    Raises:
        DiskError, OSError: it cannot be moved.
    """
    workdir, later = checkpoints.folder.parent, [saved for saved in steps(checkpoints.folder) if saved > step]
    if not later:
        return ""
    name, branches = str(later[-1]), disk.names(workdir / BRANCHES)
    number = sum(other.partition(".")[0] == name for other in branches)
    branch = workdir / BRANCHES / (f"{name}.{number}" if number else name)
    if not is_remote(branch):
        branch.mkdir(parents=True)
    for file in files:
        if disk.status(file) is not None:
            disk.write_whole(branch / file.name, disk.read_bytes(file))
    assets.copy(workdir, branch)
    for saved in reversed(later):
        checkpoints.layout.move(saved, branch / CHECKPOINTS / str(saved))
    return f"what came after step {step} is set aside as a run of its own in {branch.relative_to(workdir)}: steps {', '.join(map(str, later))}"


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
