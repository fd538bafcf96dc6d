"""The numbers of a run: metrics.jsonl, mirrored to TensorBoard, Weights & Biases and trackio.

metrics.jsonl has a JSON object per step and per evaluation, as they come, and every ten seconds and at the end one of speed:

    {"step": 12, "loss": 2.31, "loss_per_byte": 0.64, "lr": 0.001, "grad_norm": 0.84, "tokens": 8192, "seconds": 0.21}
    {"step": 500, "eval_loss": 1.62, "eval_accuracy": 0.51, "eval_loss_per_byte": 0.45}
    {"step": 512, "perf_step_seconds_p50": 0.21, "perf_data_wait": 0.001, "perf_flops_per_second": 3.1e+11}

* loss, accuracy: metrics (`mupax.train.config.metrics.METRICS`) of the step's batch, before its update; the loss in nats.
  eval_loss, eval_accuracy: metrics over the evaluation examples. eval_weights: "ema" where they are the moving average's.
  eval/NAME/loss, eval/NAME/accuracy: those of a further set (data.evaluate), in the same row.
* loss_per_byte, eval_loss_per_byte, eval/NAME/loss_per_byte: each loss over the mean bytes of text per token of the evaluation
  text (of the set's own for a set), in nats per byte, which tokenizers do not change. Text only, where targets are the text.
* stopped: why the run ended before its last step (stop.patience), in a row of its own.
* logit_z_loss: with --z-loss, mean of logsumexp(logits)^2, before its weight; loss is without it.
* lr: learning rate of the step, at base size. grad_norm: of the whole gradient, before clipping.
* tokens or images: targets of the step that count. seconds: from the end of the step before to the end of this one.
* perf_step_seconds_p50, _p90, _p99: percentiles of `seconds`: so many percent of the steps took no longer.
* perf_data_wait: share of the time in which the devices had nothing to do because the next batch was not there.
* perf_flops_per_second: model FLOPs (`mupax.zoo.families`: no norms, nothing that remat computes again) of all devices together.
* perf_mfu: that over the peak of the devices (`mupax.train.parallel.hardware`); only where the peak is known. Causal attention
  counts half, where PaLM's MFU counts it in full.
* perf_memory_peak_bytes: the most that a device of the first process had in use since the start; where devices count it.
* perf_compile_seconds: what compiling the steps took; in the first such row of a session.

A perf_ row covers the steps since the one before it, without evaluations, checkpoints and a session's first step, which warms up.
It is strict JSON; what is not finite is null and named: `{"step": 13, "loss": null, "nonfinite": {"loss": "nan"}}`.

Rows go to mirrors in a thread of their own: TensorBoard and trackers, each imported when it is asked for.

Evaluations say whether a run ends before its last step.

All of it follows from the rows of evaluations, which every process of a run has alike and metrics.jsonl keeps: a resumed run counts
on where it stopped, and one that has ended so ends so again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax import disk, terminal
from mupax.disk import DiskError, path_of
from mupax.errors import MupaxError
from mupax.train.config.metrics import METRICS, row_name
from mupax.train.config.run import Config
from mupax.train.config.sections import METRIC, LogConfig, cost, metrics_of

if TYPE_CHECKING:
    from mupax.train.run.report.mirrors.trackers import Media, Writer

_FLUSH_S, _CLOSE_S = 10.0, 60.0
"""How long the run waits for mirrors at a checkpoint, and at its end."""
_MOST_ROWS = 100_000
"""Rows that may wait for a mirror that hangs."""

FILE_NAME = "metrics.jsonl"
_NUMBERS = ("lr", "grad_norm", "tokens", "images", "seconds")
"""What a row has as numbers, or null, besides the metrics of `METRICS`."""
OWN_NAMES = (
    "step",
    *_NUMBERS,
    "logit_z_loss",
    "weight",
    "batch",
    "spike",
    "skipped",
    "stopped",
    "nonfinite",
)
"""Names in the rows that a run writes itself, besides those that `is_own_name` knows otherwise."""
_INTERVAL_S = 0.2  # that a row may wait in memory: a killed run loses at most this much


class MetricWriters:
    """Writers of rows besides metrics.jsonl, in a thread of their own. One that fails or hangs is left out, with a line.

    Args:
        folder: of the run.
        log: which writers.
        resume_step: the step that was restored; None begins anew.
        note: told what is left out.

    Raises:
        MupaxError: a tracker cannot start.
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
        self._note, self._hangs, self._late = note, False, threading.Event()
        for name, project in log.trackers.items():
            self._mirrors.append(TRACKERS[name](project, folder, new=resume_step is None))
        if log.tensorboard:
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


class MetricsError(MupaxError):
    """Metrics that cannot be read or logged as asked. The text says what to do instead."""


def is_own_name(name: str) -> bool:
    """Return whether a run writes rows with this name itself, so that no hook may."""
    beginnings = ("eval_", "eval/", "perf_", "perf/", "train/")
    return name in OWN_NAMES or name in METRICS or name.startswith(beginnings)


class MetricsWriter:
    """Writes the rows of one run, within a second, from a thread of its own: a step only queues its row. A context manager.

    What fails there (a full disk, say) is raised by the next `write`, or by `close`. One process of a run may hold one.

    Args:
        workdir: folder of the run; made if missing. Gets `metrics.jsonl`, and `tensorboard/` if asked.
        log: what else gets the rows.
        resume_step: the step that was restored: rows of later steps are dropped, so that no step appears twice. None
            starts a new file in place of any old one.
        note: told where rows of steps before it are not there.

    Raises:
        MupaxError: a tracker is asked for and cannot start, or the file to continue holds something else than metrics.
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
        # Mirrors first: where one cannot start, the old file is untouched.
        self._mirrors: MetricWriters | None = None
        if log is not None and (log.tensorboard or log.trackers):
            self._mirrors = MetricWriters(self.path.parent, log, resume_step)
        if missing := _keep_until(self.path, resume_step):
            note(missing)
        self._file = self.path.open("ab", buffering=0)
        self._rows: queue.SimpleQueue[tuple[Mapping[str, Any], float]] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._draining = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row: `step`, and numbers, strings, booleans or None."""
        self._raise_error()
        self._rows.put((row, time.time()))

    def show(self, step: int, media: Media) -> None:
        """Pass images, texts and histograms of a step to the mirrors that show any.

        Args:
            step: steps done.
            media: of that step.
        """
        if self._mirrors is not None:
            self._mirrors.show(step, media, time.time())

    def flush(self) -> None:
        """Return when every row so far is on disk, where no kill and no power cut takes it away."""
        try:
            with self._draining:
                self._drain()
                os.fsync(self._file.fileno())
                self._check_there()
        except OSError as error:
            self._error = self._error or error
        if self._mirrors is not None:
            self._mirrors.flush()
        self._raise_error()

    def close(self) -> None:
        """Write what is left and close every file. Closing twice does nothing more."""
        if self._stop.is_set():
            return
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
        """Raises DiskError where the file that is written is not the one that a reader would find."""
        there = disk.status(self.path)
        if there is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
            raise DiskError(
                f"{self.path} is no longer the file that this run writes: its workdir was moved or emptied; "
                "where it was moved, go on with --resume and --workdir at its new place"
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, OSError):
                raise DiskError(
                    f"could not write {self.path}: {error.strerror}; checkpoints are as they were: "
                    "make room and add --resume to go on from the newest"
                ) from error
            raise RuntimeError(f"could not write {self.path}: {error}") from error

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(_INTERVAL_S)
            try:
                with self._draining:
                    self._drain()
            except Exception as error:  # The thread must outlive it: the training thread raises it.
                self._error = error

    def _drain(self) -> None:
        rows, lines = [], []
        try:
            while not self._rows.empty():
                rows.append(self._rows.get())
                lines.append(to_json(rows[-1][0]) + "\n")
        finally:
            self._append("".join(lines).encode())
        if self._mirrors is not None:
            for row, walltime in rows:
                self._mirrors.write(row, walltime)

    def _append(self, text: bytes) -> None:
        """Write lines, all or none: half a row would spoil the file."""
        end = os.fstat(self._file.fileno()).st_size
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise


def read(path: Path | str) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl, in file order. A last line torn by a kill is left out.

    Raises:
        MetricsError, DiskError: there is no such file, a line is no row (the text has its number), or the disk is unwell.
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
            rows.append(_row(disk.json_object(line, "the line")))
        except ValueError as error:
            if number == len(lines):  # No newline after it: the write was cut off.
                continue
            raise MetricsError(
                f"{path} line {number} is not a metrics row ({error}); remove the line"
            ) from error
    return rows


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError where the values are not those of a row."""
    step = row.get("step")
    if type(step) is not int or not 0 <= step < 2**53:
        raise ValueError("no whole step")
    names = [
        *_NUMBERS,
        *METRICS,
        *map(row_name, METRICS),
        *(name for name in row if name.startswith("eval/")),
    ]
    wrong = [name for name in names if type(row.get(name)) not in (int, float, type(None))]
    if wrong or not isinstance(row.get("nonfinite", {}), dict):
        raise ValueError(f"{(wrong or ['nonfinite'])[0]} is of another kind")
    return row


def has_evaluation(workdir: Path | str, step: int) -> bool:
    """Whether a run has written the evaluation of a step; a kill or a signal may have come before.

    Args:
        workdir: folder of the run.
        step: steps done at it.
    """
    path = Path(workdir) / FILE_NAME
    return bool(disk.status(path)) and any(
        row["step"] == step and "eval_loss" in row for row in read(path)
    )


def to_json(row: Mapping[str, Any]) -> str:
    """One row as strict JSON on one line: a non-finite number becomes null and is named under `nonfinite`."""
    nonfinite = {
        key: str(value)
        for key, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    if not nonfinite:
        return json.dumps(row, allow_nan=False)
    return json.dumps({**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}, allow_nan=False)


def _keep_until(path: Path, step: int | None) -> str:
    """Cut the file back to the rows up to `step` (None: to nothing), and say which of them are not there."""
    there = step is not None and disk.status(path) is not None
    rows = [row for row in read(path) if row["step"] <= step] if there else []
    disk.write_whole(path, "".join(to_json(row) + "\n" for row in rows))
    missing = set(range(1, (step or 0) + 1)) - {row["step"] for row in rows if "loss" in row}
    which = (
        f"{len(missing)} of {step} steps, from {min(missing)} up to {max(missing)}"
        if missing
        else ""
    )
    return which and f"{path.name} lacks the rows of {which}: they were deleted"


class Evaluations:
    """What the evaluations of a run measured, by step.

    Args:
        config: of the run: when it ends by them, and its last step, at which it is done.
        rows: of metrics.jsonl, or of any of its evaluations.

    Attributes:
        metrics: step to numbers by name; None where one is not finite.
        stopped: why the run ends before its last step, in a line; "" where it goes on.
    """

    def __init__(self, config: Config, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._config, self._steps = config.stop, config.steps
        self.metrics: dict[int, dict[str, float | None]] = {}
        self.stopped = ""
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> dict[str, float | None]:
        """Take in the row of an evaluation; gives its numbers.

        Args:
            row: as metrics.jsonl has it, with its `step`.
        """
        names = {METRIC, *metrics_of(()), *(name for name in row if name.startswith("eval/"))}
        measured = self.metrics[row["step"]] = {
            name: row[name] for name in sorted(names & row.keys())
        }
        self.stopped = self._reason()
        return measured

    def go_back(self, step: int) -> None:
        """Forget what was measured after a step that the run goes back to."""
        self.metrics = {at: measured for at, measured in self.metrics.items() if at <= step}
        self.stopped = self._reason()

    def _reason(self) -> str:
        """As `stopped`.

        An improvement is a number better than the best before it by more than `min_delta`; one that is not finite is none.
        """
        patience, metric = self._config.patience, self._config.metric
        if patience is None:
            return ""
        best, best_step, since = math.inf, None, 0
        for step in sorted(step for step in self.metrics if step < self._steps):
            value = cost(metric, self.metrics[step].get(metric))
            if value < (best if best_step is None else best - self._config.min_delta):
                best, best_step, since = value, step, 0
            else:
                since += 1
            if since >= patience:
                break
        else:
            return ""
        by = f" by more than {self._config.min_delta:g}" if self._config.min_delta else ""
        shown = (
            "and was never finite"
            if best_step is None
            else f"the best is {abs(best):.6g} at step {best_step}"
        )
        return f"{metric} has not improved{by} in {since} evaluation{'s' * (since > 1)}, {shown}"


def rows_until(workdir: Path, step: int) -> list[dict[str, Any]]:
    """Rows of the evaluations up to a step that a run's metrics have; none where it has no metrics yet.

    Args:
        workdir: folder with metrics.jsonl.
        step: the last one.
    """
    path = workdir / FILE_NAME
    if not disk.status(path):
        return []
    return [row for row in read(path) if "eval_loss" in row and row["step"] <= step]
