"""Writers of a run's metrics besides metrics.jsonl: TensorBoard (through tensorboardX), Weights & Biases and trackio, each an extra.

They are given the numbers of a row by tag, and media, which only TensorBoard shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax.errors import MupaxError
from mupax.train.config.sections import LogConfig

if TYPE_CHECKING:
    import numpy as np


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


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How the numbers of an array are spread.

    Attributes:
        low: the smallest of them.
        high: the largest.
        counts: of equal parts from low to high, int [parts].
        total: their sum.
        squares: the sum of their squares.
    """

    low: float
    high: float
    counts: np.ndarray
    total: float
    squares: float


@dataclasses.dataclass(frozen=True)
class Media:
    """What is shown of one step besides numbers, by tag.

    Attributes:
        images: uint8 [H, W, C] with C = 1 or 3.
        texts: Markdown.
        histograms: of arrays.
    """

    images: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    histograms: Mapping[str, Histogram] = dataclasses.field(default_factory=dict)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics, by their tag."""
    scalars = {}
    for key, value in row.items():
        if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
            group, _, name = key.partition("_")
            tag = key if "/" in key else f"{group}/{name}" if group in ("eval", "perf") else f"train/{key}"
            scalars[tag] = value
    return scalars


def check(log: LogConfig) -> None:
    """Refuse a tracker whose package is not here, before a run prepares or compiles anything.

    Args:
        log: of the run.

    Raises:
        MupaxError: it is not installed.
    """
    for name in log.trackers:
        if not _installed(name):
            raise _missing(name, "it is not installed")


def _installed(name: str) -> bool:
    return sys.modules[name] is not None if name in sys.modules else importlib.util.find_spec(name) is not None


def _missing(name: str, reason: object) -> MupaxError:
    return MupaxError(
        f"log.{name} is given, but {name} cannot be imported ({reason}); run `pip install 'mupax[{name}]'`, or leave --log.{name} out"
    )


class Wandb:
    """A run of Weights & Biases: that of an earlier session, unless new."""

    name = "Weights & Biases"

    def __init__(self, project: str, workdir: Path, *, new: bool) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing("wandb", error) from error

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
        self._run.log({"step": row["step"], **scalars(row)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, on this machine or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says: that of an earlier session, unless new.

    trackio knows runs by name, so each has one of its own, which the file trackio_name in the workdir keeps.
    """

    name = "trackio"

    def __init__(self, project: str, workdir: Path, *, new: bool) -> None:
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing("trackio", error) from error

        file = workdir / "trackio_name"
        resumed = not new and file.exists()
        name = file.read_text(encoding="utf-8").strip() if resumed else f"{workdir.name}-{secrets.token_hex(3)}"
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self._run = trackio.init(project, name=name, resume="allow" if resumed else "never", embed=False)
        except Exception as error:  # of its hub, its server or its files, which have no kind in common
            raise MupaxError(
                f"trackio did not start ({error}); mend that, run `hf auth login` where it logs to a Space, or leave --log.trackio out"
            ) from error
        file.write_text(name, encoding="utf-8")

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        """Log the numbers of a row.

        Args:
            row: with its `step`.
            walltime: not used; trackio has its own.
        """
        if numbers := scalars(row):
            self._run.log(numbers, step=row["step"])

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
