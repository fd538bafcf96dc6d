"""Writers of a run's metrics besides metrics.jsonl: TensorBoard, Weights & Biases and trackio.

Each is a `Writer`. `metrics.MetricWriters` passes them rows, and images and histograms, which only
TensorBoard shows.
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

from mupax import MupaxError

if TYPE_CHECKING:
    import numpy as np


class Writer(abc.ABC):
    """Interface of TensorBoard and of every tracker."""

    name: str
    """Name of the writer in messages."""

    @abc.abstractmethod
    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        """Write the numbers of a row.

        Args:
            row: Row of metrics.jsonl, with its `step`.
            walltime: Time at which the row was written, in seconds since 1970.
        """

    def show(self, step: int, media: Media, walltime: float) -> None:
        """Show images, texts and histograms. A writer that cannot show them does nothing.

        Args:
            step: Number of steps done.
            media: Images, texts and histograms of that step.
            walltime: Time of the evaluation, in seconds since 1970.
        """
        del step, media, walltime

    @abc.abstractmethod
    def close(self) -> None:
        """Write everything that is buffered, and close the files or the run of the tracker."""


class TensorBoard(Writer):
    """Writer of TensorBoard's event files.

    It uses the part of tensorboardX that writes an event at once. The queue of tensorboardX would
    block if its thread has died.

    Args:
        logdir: Folder of the event files, made if it is missing.
        resume_step: Step that was restored. TensorBoard hides events of later steps that an earlier
            session wrote. `None` for a new run.
        file: Beginning of the name of the event file.
    """

    name = "TensorBoard"

    def __init__(self, logdir: Path, resume_step: int | None, file: str = "events") -> None:
        # tensorboardX imports these for torch tensors and buckets alone, and that takes seconds.
        with _hidden("torch", "boto3", "google.cloud.storage"):
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2

        logdir.mkdir(parents=True, exist_ok=True)
        proto: Any = event_pb2  # Any, because its messages are made when it is imported
        # Names of event files have the time in seconds. Without a suffix, a second session within
        # one second would open the file of the first session and empty it.
        session = f".{secrets.token_hex(4)}"
        self._writer = EventsWriter(str(logdir / file), session)
        self._event = proto.Event
        self._summary = summary
        if resume_step is not None:
            next_step = resume_step + 1
            # TensorBoard heeds the mark of a restart only in files that begin with this version.
            version = proto.Event(step=next_step, file_version="brain.Event:2")
            self._writer.write_event(version)
            start = proto.SessionLog(status=proto.SessionLog.START)
            self._writer.write_event(proto.Event(step=next_step, session_log=start))
        # A disk that does not take the file is noticed here, and not in the thread.
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
        for tag, histogram in media.histograms.items():
            num_bins = len(histogram.counts)
            # A histogram of equal numbers has no width, which TensorBoard cannot show.
            width = (histogram.high - histogram.low or 1e-6) / num_bins
            upper_limits = [histogram.low + width * (index + 1) for index in range(num_bins)]
            event = self._summary.histogram_raw(
                tag,
                histogram.low,
                histogram.high,
                int(histogram.counts.sum()),
                histogram.total,
                histogram.squares,
                upper_limits,
                histogram.counts.tolist(),
            )
            self._add(step, walltime, event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, walltime: float, summary: Any) -> None:
        self._writer.write_event(self._event(step=step, wall_time=walltime, summary=summary))


@contextlib.contextmanager
def _hidden(*modules: str) -> Iterator[None]:
    """Context manager in which imports of these modules fail, unless they are loaded already."""
    hidden = [name for name in modules if name not in sys.modules]
    # An import of a module that is None in `sys.modules` raises ImportError.
    none_by_name: Any = dict.fromkeys(hidden)
    sys.modules.update(none_by_name)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Distribution of the numbers of an array, in bins of equal width.

    Attributes:
        low: Smallest number, and lower limit of the first bin.
        high: Largest number, and upper limit of the last bin.
        counts: Numbers in each bin, int [bins].
        total: Sum of the numbers.
        squares: Sum of their squares.
    """

    low: float
    high: float
    counts: np.ndarray
    total: float
    squares: float


@dataclasses.dataclass(frozen=True)
class Media:
    """Images, texts and histograms of one step, by tag.

    Attributes:
        images: Images, uint8 [H, W, C] with C = 1 or 3.
        texts: Texts in Markdown.
        histograms: Histograms of arrays.
    """

    images: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    histograms: Mapping[str, Histogram] = dataclasses.field(default_factory=dict)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics by tag, such as `train/loss` or `eval/accuracy`.

    The step, booleans, texts and `None` are left out.
    """
    values = {}
    for key, value in row.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key != "step" and is_number:
            values[_tag(key)] = value
    return values


def _tag(key: str) -> str:
    """Return the tag of a key: `eval_loss` becomes `eval/loss`, and `loss` becomes `train/loss`.

    A key with a slash is its own tag.
    """
    if "/" in key:
        return key
    group, _, name = key.partition("_")
    return f"{group}/{name}" if group in ("eval", "perf") else f"train/{key}"


class Tracker(Writer):
    """Run in a tracker such as Weights & Biases. A resumed run continues its earlier run there.

    The constructor starts it, and writes its id into the workdir. Standard output of the tracker
    goes to standard error.

    Args:
        project: Project of the tracker that the run belongs to.
        workdir: Workdir of the run on this machine. Its file `id_file` holds the tracker's id.
        new: Whether to begin a new run in the tracker. Without `id_file`, one is begun anyway.

    Raises:
        MupaxError: The tracker does not start.
    """

    id_file: str
    """Name of the file in the workdir that holds the tracker's id of the run."""
    advice: str
    """Text for the user on what to do if the tracker does not start."""

    def __init__(self, project: str, workdir: Path, *, new: bool) -> None:
        file = workdir / self.id_file
        run_id = None
        if not new and file.exists():
            run_id = file.read_text(encoding="utf-8").strip()
        try:
            # Trackers print when they start, and standard output is for the run's own lines.
            with contextlib.redirect_stdout(sys.stderr):
                self._run, run_id = self._start(project, workdir, run_id)
        except Exception as error:
            # Errors of a package, its server or its files have no class in common.
            raise MupaxError(f"{self.name} did not start ({error}); {self.advice}") from error
        file.write_text(run_id, encoding="utf-8")

    @abc.abstractmethod
    def _start(self, project: str, workdir: Path, run_id: str | None) -> tuple[Any, str]:
        """Start a new run in the tracker, or continue the run `run_id`. Return the run and its id.

        Args:
            run_id: Id of the earlier run, or `None` to start a new one.
        """

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class Wandb(Tracker):
    """Run of Weights & Biases."""

    name = "wandb"
    id_file = "wandb_id"
    advice = "run `wandb login`, set WANDB_MODE=offline, or leave --log.wandb out"

    def _start(self, project: str, workdir: Path, run_id: str | None) -> tuple[Any, str]:
        import wandb  # pyright: ignore[reportMissingImports]

        run = wandb.init(
            project=project, dir=str(workdir), name=workdir.name, id=run_id, resume="allow"
        )
        # wandb's own step must not decrease. A resumed run repeats the steps between the checkpoint
        # and the end of the stopped session, so it needs an axis of its own.
        run.define_metric("*", step_metric="step")
        return run, run.id

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        self._run.log({"step": row["step"], **scalars(row)})


class Trackio(Tracker):
    """Run of trackio, on this machine or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says.

    trackio knows runs by name, so each run gets a name of its own.
    """

    name = "trackio"
    id_file = "trackio_name"
    advice = "mend that, run `hf auth login` where it logs to a Space, or leave --log.trackio out"

    def _start(self, project: str, workdir: Path, run_id: str | None) -> tuple[Any, str]:
        import trackio  # pyright: ignore[reportMissingImports]

        name = run_id or f"{workdir.name}-{secrets.token_hex(3)}"
        run = trackio.init(project, name=name, resume="allow" if run_id else "never", embed=False)
        return run, name

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        numbers = scalars(row)
        if numbers:
            self._run.log(numbers, step=row["step"])


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "trackio": Trackio}
"""Tracker by the name of its extra and of its flag, `--log.NAME`."""
