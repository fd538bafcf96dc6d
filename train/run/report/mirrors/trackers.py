"""Writers of a run's metrics besides metrics.jsonl: TensorBoard (through tensorboardX), Weights & Biases and trackio.

Each is a `Writer`. They are given the numbers of a row by tag, and media, which only TensorBoard shows.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax.errors import MupaxError

if TYPE_CHECKING:
    import numpy as np


class Writer(abc.ABC):
    """Interface of TensorBoard and of every tracker."""

    name: str
    """For messages."""

    @abc.abstractmethod
    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        """Write the numbers of a row.

        Args:
            row: with its `step`.
            walltime: seconds since 1970.
        """

    def show(self, step: int, media: Media, walltime: float) -> None:
        """Show images, texts and histograms, where the writer can.

        Args:
            step: steps done.
            media: of that step.
            walltime: seconds since 1970.
        """
        del step, media, walltime

    @abc.abstractmethod
    def close(self) -> None:
        """Send what waits, and end."""


class TensorBoard(Writer):
    """Events of TensorBoard, by the part of tensorboardX that writes them at once: its queue blocks where its thread has died.

    Args:
        logdir: their folder.
        resume_step: what an earlier session logged after this step is hidden; None begins anew.
        file: what the name of its file begins with.
    """

    name = "TensorBoard"

    def __init__(self, logdir: Path, resume_step: int | None, file: str = "events") -> None:
        with _hidden(
            "torch", "boto3", "google.cloud.storage"
        ):  # seconds of imports, for tensors and buckets
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2

        logdir.mkdir(parents=True, exist_ok=True)
        pb: Any = event_pb2  # its messages are made when it is imported
        self._writer, self._event, self._summary = (
            EventsWriter(str(logdir / file)),
            pb.Event,
            summary,
        )
        if resume_step is not None:
            self._writer.write_event(pb.Event(step=resume_step + 1, file_version="brain.Event:2"))
            start = pb.SessionLog(status=pb.SessionLog.START)
            self._writer.write_event(pb.Event(step=resume_step + 1, session_log=start))
        self._writer.flush()

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        for tag, value in scalars(row).items():
            self._add(row["step"], walltime, self._summary.scalar(tag, value))
        self._writer.flush()

    def show(self, step: int, media: Media, walltime: float) -> None:
        for tag, image in media.images.items():
            self._add(step, walltime, self._summary.image(tag, image, dataformats="HWC"))
        for tag, text in media.texts.items():
            self._add(step, walltime, self._summary.text(tag, text))
        for tag, each in media.histograms.items():
            width = (each.high - each.low or 1e-6) / len(each.counts)
            limits = [each.low + width * (part + 1) for part in range(len(each.counts))]
            count = int(each.counts.sum())
            event = self._summary.histogram_raw(
                tag,
                each.low,
                each.high,
                count,
                each.total,
                each.squares,
                limits,
                each.counts.tolist(),
            )
            self._add(step, walltime, event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

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
            tag = (
                key
                if "/" in key
                else f"{group}/{name}"
                if group in ("eval", "perf")
                else f"train/{key}"
            )
            scalars[tag] = value
    return scalars


class Tracker(Writer):
    """A run of a tracker: that of an earlier session, unless new.

    Args:
        project: what the tracker groups runs by.
        workdir: folder of the run. Its file `id_file` keeps what the tracker knows the run by.
        new: begin a run.

    Raises:
        MupaxError: the tracker does not start.
    """

    id_file: str
    advice: str
    """What to do where it does not start."""

    def __init__(self, project: str, workdir: Path, *, new: bool) -> None:
        file = workdir / self.id_file
        known_id = None if new or not file.exists() else file.read_text(encoding="utf-8").strip()
        try:
            # Standard output is the run's own.
            with contextlib.redirect_stdout(sys.stderr):
                self._run, run_id = self._start(project, workdir, known_id)
        except (
            Exception
        ) as error:  # of a package, its server or its files, which have no class in common
            raise MupaxError(f"{self.name} did not start ({error}); {self.advice}") from error
        file.write_text(run_id, encoding="utf-8")

    @abc.abstractmethod
    def _start(self, project: str, workdir: Path, known_id: str | None) -> tuple[Any, str]:
        """Start the run, or go on with that of an id; return it and its id."""

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class Wandb(Tracker):
    """A run of Weights & Biases."""

    name = "wandb"
    id_file = "wandb_id"
    advice = "run `wandb login`, set WANDB_MODE=offline, or leave --log.wandb out"

    def _start(self, project: str, workdir: Path, known_id: str | None) -> tuple[Any, str]:
        import wandb  # pyright: ignore[reportMissingImports]

        run = wandb.init(
            project=project, dir=str(workdir), name=workdir.name, id=known_id, resume="allow"
        )
        # Our own step axis: wandb's would refuse the steps between the checkpoint and the end of the stopped session.
        run.define_metric("*", step_metric="step")
        return run, run.id

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        self._run.log({"step": row["step"], **scalars(row)})


class Trackio(Tracker):
    """A run of trackio, on this machine or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says.

    trackio knows runs by name, so each has one of its own.
    """

    name = "trackio"
    id_file = "trackio_name"
    advice = "mend that, run `hf auth login` where it logs to a Space, or leave --log.trackio out"

    def _start(self, project: str, workdir: Path, known_id: str | None) -> tuple[Any, str]:
        import trackio  # pyright: ignore[reportMissingImports]

        name = known_id or f"{workdir.name}-{secrets.token_hex(3)}"
        return trackio.init(
            project, name=name, resume="allow" if known_id else "never", embed=False
        ), name

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        if numbers := scalars(row):
            self._run.log(numbers, step=row["step"])


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "trackio": Trackio}
"""By the name of their extra and of their flag, `--log.NAME`."""
