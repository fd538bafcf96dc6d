"""Where a run's metrics go besides metrics.jsonl, in a thread of their own: TensorBoard and trackers, each imported when it is asked for."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mupax import terminal
from mupax.train.run.report.mirrors.tags import Media
from mupax.train.run.report.mirrors.tensorboard import TensorBoard
from mupax.train.run.report.mirrors.trackers import Trackio, Wandb

_FLUSH_S, _CLOSE_S = 10.0, 60.0
"""How long the run waits for mirrors at a checkpoint, and at its end."""
_MOST_ROWS = 100_000
"""Rows that may wait for a mirror that hangs."""


class Mirrors:
    """What rows go to besides metrics.jsonl, in a thread of their own. One that fails or hangs is left out, with a line.

    Args:
        folder: of the run.
        tensorboard: whether to write its events.
        wandb: project of Weights & Biases to log to; None does not.
        trackio: the same of trackio.
        resume_step: the step that was restored; None begins anew.
        note: told what is left out.

    Raises:
        MupaxError: a tracker cannot start.
    """

    def __init__(
        self,
        folder: Path,
        tensorboard: bool,
        wandb: str | None,
        trackio: str | None,
        resume_step: int | None,
        note: Callable[[str], None] = terminal.note,
    ) -> None:
        self._mirrors: list[TensorBoard | Wandb | Trackio] = []
        self._note, self._hangs, self._late = note, False, threading.Event()
        if wandb is not None:
            self._mirrors.append(Wandb(wandb, folder, new=resume_step is None))
        if trackio is not None:
            self._mirrors.append(Trackio(trackio, folder, new=resume_step is None))
        if tensorboard:
            try:
                self._mirrors.append(TensorBoard(folder / "tensorboard", resume_step))
            except OSError as error:
                self._leave_out(TensorBoard.name, error.strerror)
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="mirrors", daemon=True).start()

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        """Pass a row on and return at once; it is dropped where too many wait.

        Args:
            row: as `MetricsWriter.write` takes it.
            walltime: when it was written, in seconds since 1970.
        """
        self._pass_on("write", row, walltime)

    def show(self, step: int, media: Media, walltime: float) -> None:
        """The same of images, texts and histograms, to the mirrors that show any.

        Args:
            step: steps done.
            media: of that step.
            walltime: as of `write`.
        """
        self._pass_on("show", step, media, walltime)

    def _pass_on(self, method: str, *arguments: Any) -> None:
        if self._calls.qsize() < _MOST_ROWS:
            self._calls.put(partial(self._each, method, *arguments))
        elif not self._hangs:
            self._hang(f"{_MOST_ROWS:,} rows wait for it")

    def flush(self) -> None:
        """Wait for what was written, unless that takes long."""
        if not self._late.is_set():
            self._late.set()
            self._calls.put(self._late.clear)
            self._wait(_FLUSH_S)

    def close(self) -> None:
        self._calls.put(partial(self._each, "close"))
        if not (self._hangs or self._wait(_CLOSE_S)):
            self._hang(f"no answer for {_CLOSE_S:.0f} s")
        self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            call()

    def _each(self, method: str, *arguments: Any) -> None:
        for mirror in [*self._mirrors]:
            if not hasattr(mirror, method):
                continue
            try:
                getattr(mirror, method)(*arguments)
            except Exception as error:  # of whatever kind: the run needs none of them
                self._mirrors.remove(mirror)
                with contextlib.suppress(Exception):
                    mirror.close()
                self._leave_out(mirror.name, error)

    def _wait(self, seconds: float) -> bool:
        done = threading.Event()
        self._calls.put(done.set)
        return done.wait(seconds)

    def _hang(self, reason: str) -> None:
        self._hangs = True
        self._leave_out(" or ".join(mirror.name for mirror in self._mirrors), reason)

    def _leave_out(self, name: str, reason: object) -> None:
        self._note(f"{name} is left out from here on: {reason}; metrics.jsonl has every row")
