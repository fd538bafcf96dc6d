"""Where a run's metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, each imported when it is asked for."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mupax import terminal
from mupax.errors import MupaxError

_FLUSH_S, _CLOSE_S = 10.0, 60.0
"""How long the run waits for mirrors at a checkpoint, and at its end."""
_MOST_ROWS = 100_000
"""Rows that may wait for a mirror that hangs."""


class Mirrors:
    """What rows go to besides metrics.jsonl, in a thread of their own. One that fails or hangs is left out, with a line.

    Args:
        folder: of the run.
        tensorboard: whether to write its events.
        wandb: project to log to; None does not.
        resume_step: the step that was restored; None begins anew.
        note: told what is left out.

    Raises:
        MupaxError: wandb cannot start.
    """

    def __init__(
        self,
        folder: Path,
        tensorboard: bool,
        wandb: str | None,
        resume_step: int | None,
        note: Callable[[str], None] = terminal.note,
    ) -> None:
        self._mirrors: list[TensorBoard | Wandb] = []
        self._note, self._hangs, self._late = note, False, threading.Event()
        if wandb is not None:
            self._mirrors.append(Wandb(wandb, folder, new=resume_step is None))
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
        if self._calls.qsize() < _MOST_ROWS:
            self._calls.put(partial(self._each, "write", row, walltime))
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


class TensorBoard:
    """Events of TensorBoard, by the part of tensorboardX that writes them at once: its queue blocks where its thread has died.

    Args:
        logdir: their folder.
        resume_step: what an earlier session logged after this step is hidden; None begins anew.
    """

    name = "TensorBoard"

    def __init__(self, logdir: Path, resume_step: int | None) -> None:
        with _hidden("torch", "boto3", "google.cloud.storage"):  # seconds of imports, for tensors and buckets
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2

        logdir.mkdir(parents=True, exist_ok=True)
        pb: Any = event_pb2  # its messages are made when it is imported
        self._writer, self._event, self._scalar = EventsWriter(str(logdir / "events")), pb.Event, summary.scalar
        self.close = self._writer.close
        if resume_step is not None:
            self._writer.write_event(pb.Event(step=resume_step + 1, file_version="brain.Event:2"))
            start = pb.SessionLog(status=pb.SessionLog.START)
            self._writer.write_event(pb.Event(step=resume_step + 1, session_log=start))
        self._writer.flush()

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        """Write an event for every number of a row.

        Args:
            row: with its `step`.
            walltime: seconds since 1970.
        """
        for tag, value in _scalars(row).items():
            event = self._event(step=row["step"], wall_time=walltime, summary=self._scalar(tag, value))
            self._writer.write_event(event)
        self._writer.flush()


class Wandb:
    """A run of Weights & Biases: that of an earlier session, unless new."""

    name = "Weights & Biases"

    def __init__(self, project: str, workdir: Path, *, new: bool) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MupaxError(
                f"log.wandb is given, but wandb cannot be imported ({error}); "
                "run `pip install 'mupax[wandb]'`, or leave --log.wandb out"
            ) from error

        id_file = workdir / "wandb_id"
        run_id = None if new or not id_file.exists() else id_file.read_text(encoding="utf-8").strip()
        try:
            self._run = wandb.init(project=project, dir=str(workdir), name=workdir.name, id=run_id, resume="allow")
        except wandb.errors.Error as error:
            raise MupaxError(
                f"wandb did not start ({error}); run `wandb login`, set WANDB_MODE=offline, or leave --log.wandb out"
            ) from error
        # Our own step axis: wandb's would refuse the steps between the checkpoint and the end of the stopped session.
        self._run.define_metric("*", step_metric="step")
        id_file.write_text(self._run.id, encoding="utf-8")

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        """Log the numbers of a row.

        Args:
            row: with its `step`.
            walltime: not used; wandb has its own.
        """
        self._run.log({"step": row["step"], **_scalars(row)})

    def close(self) -> None:
        self._run.finish()


@contextlib.contextmanager
def _hidden(*modules: str) -> Iterator[None]:
    """What is imported inside finds no such modules, unless they are loaded already."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, by their tag."""
    scalars = {}
    for key, value in row.items():
        if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
            group, _, name = key.partition("_")
            tag = key if "/" in key else f"{group}/{name}" if group in ("eval", "perf") else f"train/{key}"
            scalars[tag] = value
    return scalars
