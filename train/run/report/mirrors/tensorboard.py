"""Events of TensorBoard, through tensorboardX."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mupax.train.run.report.mirrors.tags import Media, scalars


class TensorBoard:
    """Events of TensorBoard, by the part of tensorboardX that writes them at once: its queue blocks where its thread has died.

    Args:
        logdir: their folder.
        resume_step: what an earlier session logged after this step is hidden; None begins anew.
        file: what the name of its file begins with.
    """

    name = "TensorBoard"

    def __init__(self, logdir: Path, resume_step: int | None, file: str = "events") -> None:
        with _hidden("torch", "boto3", "google.cloud.storage"):  # seconds of imports, for tensors and buckets
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2

        logdir.mkdir(parents=True, exist_ok=True)
        pb: Any = event_pb2  # its messages are made when it is imported
        self._writer, self._event, self._summary = EventsWriter(str(logdir / file)), pb.Event, summary
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
            self._add(row["step"], walltime, self._summary.scalar(tag, value))
        self._writer.flush()

    def show(self, step: int, media: Media, walltime: float) -> None:
        """Write an event for every image, text and histogram.

        Args:
            step: steps done.
            media: of that step.
            walltime: seconds since 1970.
        """
        for tag, image in media.images.items():
            self._add(step, walltime, self._summary.image(tag, image, dataformats="HWC"))
        for tag, text in media.texts.items():
            self._add(step, walltime, self._summary.text(tag, text))
        for tag, each in media.histograms.items():
            width = (each.high - each.low or 1e-6) / len(each.counts)
            limits = [each.low + width * (part + 1) for part in range(len(each.counts))]
            count = int(each.counts.sum())
            event = self._summary.histogram_raw(
                tag, each.low, each.high, count, each.total, each.squares, limits, each.counts.tolist()
            )
            self._add(step, walltime, event)
        self._writer.flush()

    def _add(self, step: int, walltime: float, summary: Any) -> None:
        self._writer.write_event(self._event(step=step, wall_time=walltime, summary=summary))


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
