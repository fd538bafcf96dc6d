"""Events of TensorBoard, through tensorboardX."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mupax.train.run.report.mirrors.tags import scalars


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
        for tag, value in scalars(row).items():
            event = self._event(step=row["step"], wall_time=walltime, summary=self._scalar(tag, value))
            self._writer.write_event(event)
        self._writer.flush()


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
