"""Metrics of a run: metrics.jsonl, its copies in TensorBoard and trackers, and early stopping.

metrics.jsonl has a JSON object per step and per evaluation, and one about speed every ten seconds
and at the end:

    {"step": 12, "loss": 2.31, "loss_per_byte": 0.64, "lr": 0.001, "grad_norm": 0.84,
     "tokens": 8192, "seconds": 0.21}
    {"step": 500, "eval_loss": 1.62, "eval_accuracy": 0.51, "eval_loss_per_byte": 0.45}
    {"step": 512, "perf_step_seconds_p50": 0.21, "perf_data_wait": 0.001,
     "perf_flops_per_second": 3.1e+11}

* loss, accuracy: metrics (`mupax.train.config.metrics.METRICS`) of the step's batch, before its
  update. The loss is in nats per target.
* eval_loss, eval_accuracy: metrics over all evaluation examples.
* eval_weights: "ema" if the moving average of the parameters was evaluated.
* eval/NAME/loss, eval/NAME/accuracy: metrics of a further set (data.evaluate), in the same row.
* loss_per_byte, eval_loss_per_byte, eval/NAME/loss_per_byte: each loss divided by the mean bytes
  of text per token, in nats per byte, so that tokenizers compare. The mean is that of the
  evaluation text, for a further set of its own text. Only for text whose targets are the text.
* stopped: reason why the run ended before its last step, in a row of its own.
* logit_z_loss: with --z-loss, mean of logsumexp(logits)^2, before its weight. loss is without it.
* attention_logit_max: with --log.attention-logits or --optimizer.qk-clip, largest attention logit
  over batch, heads and layers, before the update (`mupax.zoo.layers.kernels`).
* lr: learning rate of the step, at base size.
* grad_norm: norm of the gradient of all parameters, before clipping.
* tokens or images: targets of the step that count.
* seconds: time from the end of the step before to the end of this one.
* perf_step_seconds_p50, _p90, _p99: percentiles of `seconds`. 90 % of the steps took at most p90.
* perf_data_wait: share of the time in which the devices waited for the next batch.
* perf_flops_per_second: model FLOPs (`mupax.zoo.families`: no norms, no recomputation by remat) of
  all devices together.
* perf_mfu: perf_flops_per_second over the peak of the devices (`mupax.train.parallel.hardware`), if
  the peak is known. Causal attention counts half; PaLM's MFU counts it in full.
* perf_memory_peak_bytes: most memory in use on a device of process 0 since the start, if devices
  count it.
* perf_compile_seconds: time of compiling the steps. Only in the first such row of a session.

A perf_ row covers the steps since the one before it, without evaluations, checkpoints and the first
step of a session, which warms up. A number that is not finite is null, and its name stands under
`nonfinite`: `{"step": 13, "loss": null, "nonfinite": {"loss": "nan"}}`.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax import MupaxError, disk, terminal
from mupax.disk import DiskError, path_of
from mupax.train.config.metrics import METRICS, row_name
from mupax.train.config.run import Config
from mupax.train.config.sections import METRIC, LogConfig, cost, metrics_of

if TYPE_CHECKING:
    from mupax.train.run.report.mirrors.trackers import Media, Writer

_FLUSH_S = 10.0
"""Longest wait for TensorBoard and trackers at a checkpoint, in seconds."""
_CLOSE_S = 60.0
"""Longest wait for TensorBoard and trackers at the end of a run, in seconds."""
_MAX_QUEUED_ROWS = 100_000
"""Most rows that wait for a tracker that hangs."""

FILE_NAME = "metrics.jsonl"
_NUMBERS = ("lr", "grad_norm", "tokens", "images", "seconds")
"""Keys of a row, besides the metrics of `METRICS`, whose values are numbers or null."""
OWN_NAMES = (
    "step",
    *_NUMBERS,
    "logit_z_loss",
    "attention_logit_max",
    "weight",
    "batch",
    "spike",
    "skipped",
    "stopped",
    "nonfinite",
)
"""Keys of a run's own rows, besides those that `is_own_name` refuses by their beginning."""
_DRAIN_SECONDS = 0.2
"""Longest time that a row waits in memory. A killed run loses at most the rows of this time."""


class MetricWriters:
    """TensorBoard and trackers of a run, fed by a thread of their own.

    The training thread never waits for them, except shortly in `flush` and `close`. One that fails
    or hangs is left out from then on, with a line for the user.

    Args:
        folder: Workdir of the run on this machine.
        log: Config with the trackers and whether to use TensorBoard.
        resume_step: Step that was restored, or `None` for a new run.
        note: Function that prints a line for the user. Default standard error.

    Raises:
        MupaxError: A tracker cannot start.
    """

    def __init__(
        self,
        folder: Path,
        log: LogConfig,
        resume_step: int | None,
        note: Callable[[str], None] = terminal.note,
    ) -> None:
        from mupax.train.run.report.mirrors.trackers import TRACKERS, TensorBoard

        self._mirrors: list[Writer] = []
        self._note = note
        self._hangs = False
        self._late = threading.Event()
        for name, project in log.trackers.items():
            self._mirrors.append(TRACKERS[name](project, folder, new=resume_step is None))
        if log.tensorboard:
            try:
                self._mirrors.append(TensorBoard(folder / "tensorboard", resume_step))
            except OSError as error:
                self._leave_out(TensorBoard.name, error.strerror)
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon, so that a tracker that hangs cannot keep the process alive.
        threading.Thread(target=self._run, name="mirrors", daemon=True).start()

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        """Queue a row and return at once. The row is dropped if too many wait.

        Args:
            row: Row as `MetricsWriter.write` takes it.
            walltime: Time at which the row was written, in seconds since 1970.
        """
        self._enqueue("write", row, walltime)

    def show(self, step: int, media: Media, walltime: float) -> None:
        """Queue images, texts and histograms and return at once. They are dropped if too many wait.

        Args:
            step: Number of steps done.
            media: Images, texts and histograms of that step.
            walltime: Time of the evaluation, in seconds since 1970.
        """
        self._enqueue("show", step, media, walltime)

    def _enqueue(self, method: str, *arguments: Any) -> None:
        if self._calls.qsize() < _MAX_QUEUED_ROWS:
            self._calls.put(partial(self._call_all, method, *arguments))
        elif not self._hangs:
            self._report_hang(f"{_MAX_QUEUED_ROWS:,} rows wait for it")

    def flush(self) -> None:
        """Wait until all queued rows are written, for `_FLUSH_S` seconds at most.

        If the thread has not yet caught up with an earlier flush, this returns at once.
        """
        if not self._late.is_set():
            # Cleared by the thread, once it has caught up.
            self._late.set()
            self._calls.put(self._late.clear)
            self._wait(_FLUSH_S)

    def close(self) -> None:
        """Write what is queued, close all writers and end the thread.

        This waits for `_CLOSE_S` seconds at most. If the writers have not finished by then, a line
        names them, and the thread is left to itself. If they were reported as hanging before, this
        does not wait.
        """
        self._calls.put(partial(self._call_all, "close"))
        if not (self._hangs or self._wait(_CLOSE_S)):
            self._report_hang(f"no answer for {_CLOSE_S:.0f} s")
        # Ends the thread, unless an earlier call hangs for ever.
        self._calls.put(None)

    def _run(self) -> None:
        """Call the functions that are queued, in a thread, until a `None` is queued."""
        while call := self._calls.get():
            call()

    def _call_all(self, method: str, *arguments: Any) -> None:
        """Call a method of every writer. Close and remove those that raise, and print a line."""
        # A copy of the list, because the loop removes writers that fail.
        for mirror in [*self._mirrors]:
            try:
                getattr(mirror, method)(*arguments)
            except Exception as error:
                # Trackers raise errors of any kind. The run goes on without a tracker that fails.
                self._mirrors.remove(mirror)
                with contextlib.suppress(Exception):
                    mirror.close()
                self._leave_out(mirror.name, error)

    def _wait(self, seconds: float) -> bool:
        """Wait until what is queued is done; return whether that took less than `seconds`."""
        done = threading.Event()
        self._calls.put(done.set)
        return done.wait(seconds)

    def _report_hang(self, reason: str) -> None:
        self._hangs = True
        self._leave_out(" or ".join(mirror.name for mirror in self._mirrors), reason)

    def _leave_out(self, name: str, reason: object) -> None:
        self._note(f"{name} is left out from here on: {reason}; metrics.jsonl has every row")


class MetricsError(MupaxError):
    """Metrics that cannot be read or logged as asked. The text says what to do instead."""


def is_own_name(name: str) -> bool:
    """Return whether a run writes rows with this key itself, so that a hook may not use it."""
    beginnings = ("eval_", "eval/", "perf_", "perf/", "train/")
    return name in OWN_NAMES or name in METRICS or name.startswith(beginnings)


class MetricsWriter:
    """Context manager that writes the rows of a run to metrics.jsonl, TensorBoard and trackers.

    `write` only queues a row. A thread writes it within a second. An error in the thread, such as
    a full disk, is raised by the next `write`, `flush` or `close`. Only one process of a run may
    have a writer.

    Args:
        workdir: Folder of the run, made if missing. It gets `metrics.jsonl`, and `tensorboard/` if
            `log` asks for it.
        log: Config of TensorBoard and the trackers. Default none of them.
        resume_step: Step that was restored. Rows of later steps are dropped, so that no step
            appears twice. `None` starts a new file in place of any old one.
        note: Function that prints a line if rows up to `resume_step` are missing.

    Raises:
        MupaxError: A tracker cannot start, or the file to continue holds something else than
            metrics.
    """

    def __init__(
        self,
        workdir: Path | str,
        *,
        log: LogConfig | None = None,
        resume_step: int | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path = Path(workdir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Trackers first: if one cannot start, the old file is untouched.
        self._mirrors: MetricWriters | None = None
        if log is not None and (log.tensorboard or log.trackers):
            self._mirrors = MetricWriters(self.path.parent, log, resume_step)
        missing = _keep_until(self.path, resume_step)
        if missing:
            note(missing)
        # Unbuffered, so that a failed write leaves nothing in a buffer to be written later.
        self._file = self.path.open("ab", buffering=0)
        self._rows: queue.SimpleQueue[tuple[Mapping[str, Any], float]] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._draining = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Queue one row and return at once: `step`, and numbers, strings, booleans or `None`.

        Raises:
            DiskError, RuntimeError: An earlier row could not be written.
        """
        self._raise_error()
        self._rows.put((row, time.time()))

    def show(self, step: int, media: Media) -> None:
        """Queue images, texts and histograms for TensorBoard. Without it, do nothing.

        Args:
            step: Number of steps done.
            media: Images, texts and histograms of that step.
        """
        if self._mirrors is not None:
            self._mirrors.show(step, media, time.time())

    def flush(self) -> None:
        """Wait until all queued rows are on disk, safe from a kill and a power cut.

        Then wait for TensorBoard and trackers, for `_FLUSH_S` seconds at most.

        Raises:
            DiskError, RuntimeError: A row could not be written, or the file was moved or deleted.
        """
        try:
            with self._draining:
                self._drain()
                # A checkpoint that is saved next must not be newer than the rows on disk.
                os.fsync(self._file.fileno())
                self._check_there()
        except OSError as error:
            self._error = self._error or error
        if self._mirrors is not None:
            self._mirrors.flush()
        self._raise_error()

    def close(self) -> None:
        """Write what is left and close every file. Closing twice does nothing more.

        Raises:
            DiskError, RuntimeError: A row could not be written.
        """
        if self._stop.is_set():
            return
        # The thread writes what is left before it ends.
        self._stop.set()
        self._thread.join()
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        if self._mirrors is not None:
            self._mirrors.close()
        self._raise_error()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_there(self) -> None:
        """Check that the open file is still the one at `path`.

        Raises:
            DiskError: The workdir was moved or emptied.
        """
        status = disk.status(self.path)
        if status is None or not os.path.samestat(status, os.fstat(self._file.fileno())):
            raise DiskError(
                f"{self.path} is no longer the file that this run writes: its workdir was moved or "
                "emptied; where it was moved, go on with --resume and --workdir at its new place"
            )

    def _raise_error(self) -> None:
        """Raise the error that the writing thread has kept, if any, and forget it.

        Raises:
            DiskError: The file could not be written. The text says how to go on.
            RuntimeError: Any other error of the thread.
        """
        if self._error is None:
            return
        error = self._error
        self._error = None
        if isinstance(error, OSError):
            raise DiskError(
                f"could not write {self.path}: {error.strerror}; checkpoints are as they were: "
                "make room and add --resume to go on from the newest"
            ) from error
        raise RuntimeError(f"could not write {self.path}: {error}") from error

    def _run(self) -> None:
        """Write queued rows every `_DRAIN_SECONDS`, and once more after the stop.

        An error is kept in `_error`, which `_raise_error` raises in the training thread.
        """
        is_last = False
        while not is_last:
            is_last = self._stop.wait(_DRAIN_SECONDS)
            try:
                with self._draining:
                    self._drain()
            except Exception as error:
                # The thread must outlive the error, which the training thread raises.
                self._error = error

    def _drain(self) -> None:
        """Write all queued rows to metrics.jsonl, and queue them for TensorBoard and trackers.

        Raises:
            OSError: The rows cannot be written. They are dropped.
            TypeError, ValueError: A row is no JSON. The rows before it are written.
        """
        rows = []
        lines = []
        try:
            while not self._rows.empty():
                rows.append(self._rows.get())
                lines.append(to_json(rows[-1][0]) + "\n")
        finally:
            # Rows before one that is no JSON are written all the same.
            self._append("".join(lines).encode())
        if self._mirrors is not None:
            for row, walltime in rows:
                self._mirrors.write(row, walltime)

    def _append(self, text: bytes) -> None:
        """Append lines to the file, all or none of them: half a row would spoil the file.

        Raises:
            OSError: They cannot be written. The file is cut back to its earlier size.
        """
        end = os.fstat(self._file.fileno()).st_size
        try:
            while text:
                # An unbuffered file may take only a part, for instance when the disk fills up.
                written = self._file.write(text)
                text = text[written:]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise


def read(path: Path | str) -> list[dict[str, Any]]:
    """Return all rows of a metrics.jsonl, in file order, without a last line torn by a kill.

    A number that was not finite is `None`, and `nonfinite` of the row has it as a text by its name.

    Raises:
        MetricsError: The file is missing, or a line is no row. The text has its number.
        DiskError: The disk cannot be read.
    """
    rows = []
    try:
        lines = disk.read_bytes(path_of(path)).split(b"\n")
    except disk.ABSENT as error:
        raise MetricsError(f"{path} is missing; it has the numbers of the run") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_checked_row(disk.json_object(line, "the line")))
        except ValueError as error:
            if number == len(lines):
                # There is no newline after the line, so its write was cut off.
                continue
            raise MetricsError(
                f"{path} line {number} is not a metrics row ({error}); remove the line"
            ) from error
    return rows


def _checked_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row unchanged after checking its step and the types of its other values.

    Raises:
        ValueError: `step` is missing or no whole number from 0 to 2^53 - 1, or another value is
            not of the kind that a run writes.
    """
    step = row.get("step")
    # Other readers of JSON hold numbers as float64, which is exact up to 2^53.
    if type(step) is not int or not 0 <= step < 2**53:
        raise ValueError("no whole step")
    names = [*_NUMBERS, *METRICS, *map(row_name, METRICS)]
    names += [name for name in row if name.startswith("eval/")]
    # `type` and not `isinstance`, because a bool is an int and no number of a row.
    wrong = [name for name in names if type(row.get(name)) not in (int, float, type(None))]
    if not isinstance(row.get("nonfinite", {}), dict):
        wrong.append("nonfinite")
    if wrong:
        raise ValueError(f"{wrong[0]} is of another kind")
    return row


def has_evaluation(workdir: Path | str, step: int) -> bool:
    """Return whether a run has written the evaluation of a step. `False` without metrics.jsonl.

    Args:
        step: Number of steps done before the evaluation.
    """
    path = Path(workdir) / FILE_NAME
    if not disk.status(path):
        return False
    return any(row["step"] == step and "eval_loss" in row for row in read(path))


def to_json(row: Mapping[str, Any]) -> str:
    """Return a row as strict JSON on one line.

    A number that is not finite becomes null, and `nonfinite` has it as a string by its name. Within
    lists and objects, as of the tasks of an evaluation, it only becomes null.
    """
    nonfinite = {}
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name] = str(value)
    if not nonfinite:
        return disk.json_text(row)
    return disk.json_text({**row, "nonfinite": nonfinite})


def _keep_until(path: Path, step: int | None) -> str:
    """Rewrite metrics.jsonl with only its rows up to a step, or empty if `step` is `None`.

    A missing file is created.

    Returns:
        A line for the user if training rows of steps up to `step` are missing, otherwise "".
    """
    rows = []
    if step is not None and disk.status(path) is not None:
        rows = [row for row in read(path) if row["step"] <= step]
    # Replaced atomically: a kill leaves either all old rows or the rows to keep.
    disk.write_whole(path, "".join(to_json(row) + "\n" for row in rows))
    missing = set(range(1, (step or 0) + 1)) - {row["step"] for row in rows if "loss" in row}
    if not missing:
        return ""
    return (
        f"{path.name} lacks the rows of {len(missing)} of {step} steps, from {min(missing)} up to "
        f"{max(missing)}: they were deleted"
    )


class Evaluations:
    """Metrics of a run's evaluations by step, and whether they end the run (`stop.patience`).

    Metrics and decision depend on the rows of evaluations alone. All processes of a run have the
    same rows, so they decide alike. metrics.jsonl keeps the rows, so a resumed run continues to
    count evaluations without improvement, and a run that has ended by them ends again.

    Args:
        config: Config of the run: its `stop` settings and its number of steps.
        rows: Rows of earlier evaluations, in any order.

    Attributes:
        metrics: Metrics by name for each step. A value that is not finite is `None` if its row was
            read from metrics.jsonl.
        stopped: Reason why the run ends before its last step, or "" if it goes on.
    """

    def __init__(self, config: Config, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._config = config.stop
        self._num_steps = config.steps
        self.metrics: dict[int, dict[str, float | None]] = {}
        self.stopped = ""
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> dict[str, float | None]:
        """Add the row of an evaluation, update `stopped`, and return the row's metrics by name.

        Args:
            row: Row of metrics.jsonl, with its `step`.
        """
        names = {METRIC, *metrics_of(())}
        names.update(name for name in row if name.startswith("eval/"))
        measured = {name: row[name] for name in sorted(names & row.keys())}
        self.metrics[row["step"]] = measured
        self.stopped = self._stop_reason()
        return measured

    def go_back(self, step: int) -> None:
        """Drop the evaluations after a step to which the run goes back, and update `stopped`."""
        self.metrics = {
            evaluated_step: measured
            for evaluated_step, measured in self.metrics.items()
            if evaluated_step <= step
        }
        self.stopped = self._stop_reason()

    def _stop_reason(self) -> str:
        """Return the reason why the evaluations end the run, or "" if they do not.

        A run ends after `stop.patience` evaluations in a row without an improvement. An
        improvement is a finite value that is better than the best before it by more than
        `min_delta`; the first finite value is one. Evaluations that did not measure `stop.metric`
        do not count, and neither does the last step, which ends the run anyway.
        """
        patience = self._config.patience
        metric = self._config.metric
        min_delta = self._config.min_delta
        if patience is None:
            return ""
        best = math.inf
        best_step = None
        num_stale = 0
        for step, measured in sorted(self.metrics.items()):
            # The run ends after its last step anyway. Evaluations from before the metric's set was
            # added have no value of the metric, and `None` stands for one that is not finite.
            if step >= self._num_steps or metric not in measured:
                continue
            value = cost(metric, measured[metric])
            threshold = best if best_step is None else best - min_delta
            if value < threshold:
                best = value
                best_step = step
                num_stale = 0
            else:
                num_stale += 1
            if num_stale >= patience:
                margin = f" by more than {min_delta:g}" if min_delta else ""
                plural = "s" if num_stale > 1 else ""
                if best_step is None:
                    comparison = "and was never finite"
                else:
                    # A metric of which more is better has a negative cost.
                    comparison = f"the best is {abs(best):.6g} at step {best_step}"
                return (
                    f"{metric} has not improved{margin} in {num_stale} evaluation{plural}, "
                    f"{comparison}"
                )
        return ""


def rows_until(workdir: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of evaluations up to a step; none if the run has no metrics yet."""
    path = workdir / FILE_NAME
    if not disk.status(path):
        return []
    return [row for row in read(path) if "eval_loss" in row and row["step"] <= step]
