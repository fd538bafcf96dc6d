"""Saving, verifying and restoring the checkpoints of one run, and choosing one of them by its step.

Orbax writes the arrays while training goes on. The order of a save:

1. The arrays are written into STEP.saving (in a bucket into STEP, see `layout.py`).
2. They are read back from the files and compared with the arrays in memory.
3. The evaluation of the step, if there is one, is written as evaluation.json into the folder.
4. The manifest is written, and the folder gets the name STEP. From now on the checkpoint counts.
5. Older checkpoints that need not stay are deleted.

A checkpoint that is found damaged is moved to set-aside/, and the one before it is used. The best
checkpoint is found by the evaluation.json files alone, so that a copy of the folder is enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import xxhash
from orbax.checkpoint import v1 as ocp

from mupax import MupaxFailure, disk
from mupax.disk import is_remote, plainly_named
from mupax.train.checkpoints import assets, folder, layout
from mupax.train.checkpoints.folder import CHECKPOINTS, CheckpointFolder, WorkdirError, steps
from mupax.train.checkpoints.layout import DamagedError, Manifest, counts, renames_folders
from mupax.train.checkpoints.workdir import recorded
from mupax.train.config import sections
from mupax.train.config.sections import CheckpointConfig, Measured, Metrics, Step
from mupax.train.core.state import TrainState
from mupax.train.parallel.processes import Processes

FILE = "evaluation.json"
"""File of a checkpoint with the metrics of its step."""
BEST = "best"
"""Word that a user writes in place of a step for the best checkpoint."""
BRANCHES = "branches"
"""Folder in a workdir for checkpoints that a run left behind by going back to an earlier step.

Each such continuation becomes a workdir of its own in it (`branch_off`)."""

MOST_FAILED = 2
"""Consecutive failed saves after which a run of several processes ends.

Waiting does not repair the disk of one host."""
_POLL_S = 0.5
"""Seconds between two checks of a saving process for the failure of another process."""
_UNSAVED = "mupax/unsaved"
"""First part of the keys under which processes post to each other why they cannot save."""

_PATIENCE_S = 30.0
"""Longest time, in seconds, that a save waits for the previous one to end.

The new save is then left out, because a slow disk must not stop the training."""
_ORBAX = threading.Lock()
"""Lock held while orbax saves or loads.

Orbax numbers its operations per process. Two at a time would wait for each other's signals."""


class RankedFolder(CheckpointFolder):
    """Checkpoint folder that stores evaluation metrics in the checkpoints, to keep the best ones.

    Process 0 alone changes the folder. The arguments are those of `CheckpointFolder`.
    """

    def __init__(
        self,
        workdir: Path,
        config: CheckpointConfig,
        log: Callable[[str], None],
        renames: bool = True,
    ) -> None:
        super().__init__(workdir, config, log, renames)
        # The loop adds evaluations while the thread of a save publishes a checkpoint.
        self._lock = threading.Lock()
        self._pending_metrics: dict[int, Metrics] = {}
        """Evaluations by step that are not in their checkpoints yet."""

    def write_metrics_and_prune(self, measured: Mapping[int, Metrics]) -> None:
        """Write evaluation metrics into their checkpoints, and delete checkpoints no longer kept.

        Metrics of a step wait in memory until its checkpoint is committed (`publish`). If the disk
        fails, a line is printed and the next call tries again. Nothing is done if the run keeps no
        best checkpoints (`keep_best`).

        Args:
            measured: Metrics of each evaluated step, by the number of steps done.
        """
        if not self._config.ranks:
            return
        with self._lock:
            self._pending_metrics.update(measured)
            try:
                pending = self._pending_metrics
                saved_steps = [step for step in pending if counts(self.folder / str(step))]
                for step in saved_steps:
                    self._write_metrics(self.folder / str(step), step)
                # A new best checkpoint may make an older one superfluous.
                self.prune()
            except (OSError, disk.DiskError) as error:
                # The run goes on. The next evaluation tries again.
                self._log(f"the best checkpoints are as they were: {error}")

    def forget(self, step: int) -> None:
        """Drop unwritten metrics of `step`, because another state is saved at that step."""
        self._pending_metrics.pop(step, None)

    def publish(self, manifest: Manifest) -> None:
        """Write the pending evaluation metrics of the step into its checkpoint, then commit it.

        `CheckpointFolder.publish` gives the checkpoint its final name, and deletes the checkpoints
        that need not be kept.
        """
        with self._lock:
            # Before `super().publish`, which ranks the checkpoints by their evaluation files, and
            # then deletes the ones that are no longer among the best.
            self._write_metrics(self.layout.written_at(manifest.step), manifest.step)
            super().publish(manifest)

    def leaving(self, record: Mapping[str, Any] | None = None) -> list[int]:
        try:
            leaving = super().leaving(record)
        except disk.DiskError as error:
            self._log(f"no checkpoint is deleted for now: {error}")
            return []
        # A checkpoint whose evaluation is not on disk yet may be the best.
        return [step for step in leaving if step not in self._pending_metrics]

    def measured(self, saved: list[int]) -> Measured:
        if not self._config.ranks:
            return {}
        return {step: read(self.folder / str(step)) for step in saved}

    def _write_metrics(self, checkpoint: Path, step: int) -> None:
        metrics = self._pending_metrics.get(step)
        if metrics is not None and read(checkpoint) != metrics:
            write(checkpoint, step, metrics)
        self._pending_metrics.pop(step, None)


def write(checkpoint: Path, step: int, metrics: Metrics) -> None:
    """Write the metrics of an evaluation into evaluation.json of a checkpoint, atomically.

    An existing file is replaced.

    Args:
        checkpoint: Folder of the checkpoint. Its name may still end in `.saving`.
        step: Optimizer steps done.
        metrics: Values by metric. A value that is not finite is written as null.

    Raises:
        DiskError: The file cannot be written.
    """
    # JSON has no NaN and no infinity.
    finite: dict[str, float | None] = {}
    for name, value in metrics.items():
        is_finite = value is not None and math.isfinite(value)
        finite[name] = value if is_finite else None
    content = {"step": step, "metrics": finite}
    signed = {**content, "digest": _digest(content)}
    disk.write_whole(checkpoint / FILE, json.dumps(signed) + "\n")


def read(checkpoint: Path) -> dict[str, float | None]:
    """Return the metrics of the evaluation that a checkpoint holds.

    Returns:
        Values by metric, `None` for one that was not finite. Empty if the checkpoint has no
        evaluation, or if the file is damaged or of another step.

    Raises:
        DiskError: The disk cannot be read.
    """
    try:
        content = disk.read_json(checkpoint / FILE)
    except disk.JsonError:
        return {}
    digest = content.pop("digest", None)
    if digest != _digest(content):
        return {}
    # The folder is called STEP, STEP.saving or, in set-aside/, STEP.NUMBER.
    if str(content.get("step")) != checkpoint.name.partition(".")[0]:
        return {}
    metrics = content.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def ranked(folder: Path, metric: str) -> list[int]:
    """Return the steps of checkpoints that hold a finite value of `metric`, the best step first.

    Args:
        folder: Folder `WORKDIR/checkpoints`.
        metric: Name of an evaluation metric, such as `eval_loss`. Of two steps with equal values
            the earlier one comes first.

    Raises:
        DiskError: The disk cannot be read.
    """
    measured = {step: read(folder / str(step)) for step in steps(folder)}
    return sections.ranked(measured, metric)


def step_of(workdir: Path, choice: Step | None, metric: str) -> int:
    """Return the step of the checkpoint that a user chose.

    Args:
        choice: A step, "best", or `None` for the newest.
        metric: Metric that ranks the checkpoints if `choice` is "best".

    Raises:
        WorkdirError: The run has no such checkpoint.
        DiskError: The disk cannot be read.
    """
    saved = steps(workdir / CHECKPOINTS)
    if not saved:
        raise WorkdirError(f"{workdir} has no checkpoint yet; let the run write one first")
    listed = ", ".join(map(str, saved))
    if choice is None:
        return max(saved)
    if choice == BEST:
        best = ranked(workdir / CHECKPOINTS, metric)
        if best:
            return best[0]
        raise WorkdirError(
            f"no checkpoint of {workdir} was saved with a finite {metric}, so that none is known as "
            "the best; a run keeps its best with --checkpoint.keep-best 1. There are the steps "
            f"{listed}, whose losses `mupax checkpoints {workdir}` shows"
        )
    if choice not in saved:
        raise WorkdirError(f"{workdir} has no checkpoint of step {choice}; there are {listed}")
    return choice


def named_step(path: Path) -> tuple[Path, Step | None]:
    """Split WORKDIR/checkpoints/STEP or WORKDIR/checkpoints/best into the workdir and the step.

    Returns:
        Workdir and step. Any other path is returned as it is, with `None`.
    """
    if path.parent.name != CHECKPOINTS:
        return path, None
    workdir = path.parent.parent
    if path.name == BEST:
        return workdir, BEST
    if re.fullmatch(r"\d+", path.name):
        return workdir, int(path.name)
    return path, None


def branch_off(checkpoints: CheckpointFolder, step: int, files: Sequence[Path]) -> str:
    """Move the checkpoints after `step` into a new workdir, WORKDIR/branches/NEWEST_STEP.

    If branches/ already has that name, the new one ends in .1, .2 and so on. The new workdir gets
    copies of `files` and of the assets, and can be evaluated and continued like any other. Process
    0 alone calls this.

    Args:
        step: Step that the run goes back to.
        files: Metrics and config.json of the run, as far as they exist.

    Returns:
        A line for the user that names the new workdir, or "" if no checkpoint is after `step` and
        nothing was moved.

    Raises:
        DiskError, OSError: A file cannot be copied or a checkpoint cannot be moved.
    """
    workdir = checkpoints.folder.parent
    later = [saved for saved in steps(checkpoints.folder) if saved > step]
    if not later:
        return ""
    name = str(later[-1])
    branches = disk.names(workdir / BRANCHES)
    number = sum(branch_name.partition(".")[0] == name for branch_name in branches)
    branch = workdir / BRANCHES / (f"{name}.{number}" if number else name)
    if not is_remote(branch):
        branch.mkdir(parents=True)

    # Records first, then checkpoints, the newest first: a kill leaves the run with fewer
    # checkpoints after `step`, and the same command moves the rest.
    for file in files:
        if disk.status(file) is not None:
            disk.write_whole(branch / file.name, disk.read_bytes(file))
    assets.copy(workdir, branch)
    for saved in reversed(later):
        checkpoints.layout.move(saved, branch / CHECKPOINTS / str(saved))

    place = branch.relative_to(workdir)
    listed = ", ".join(map(str, later))
    return (
        f"what came after step {step} is set aside as a run of its own in {place}: steps {listed}"
    )


def _digest(content: dict[str, Any]) -> str:
    # Sorted, because a file that is read may have its keys in another order.
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


class ElsewhereError(Exception):
    """Failure of another process to save. The text names the process and the reason."""


def wait(response: Any, processes: Processes, key: str) -> None:
    """Wait until orbax has saved, or until another process posts that it cannot save.

    Inside orbax the processes wait for each other. If one fails there, the others would wait for
    minutes. The reason that it posts (`tell`) ends their wait within seconds.

    Args:
        response: Result of orbax' `save_async`. If another process fails, the threads of orbax in
            this process keep running.
        key: Unique name of the save, the same on all processes.

    Raises:
        ElsewhereError: Another process has failed.
        Exception: Any error with which orbax has failed in this process.
    """
    if processes.count == 1:
        return response.result()
    # Orbax' result has no time limit, so a thread waits for it and this one looks at posts.
    ended: Future[None] = Future()

    def wait_for_orbax() -> None:
        try:
            ended.set_result(response.result())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=wait_for_orbax, name="orbax", daemon=True).start()
    while not ended.done():
        with contextlib.suppress(TimeoutError):
            ended.exception(_POLL_S)
        if ended.done():
            break
        reasons = processes.posts(f"{_UNSAVED}/{key}")
        if reasons:
            raise ElsewhereError(reasons["first"])
    return ended.result()


def tell(error: Exception, place: Path, processes: Processes, key: str) -> str:
    """Post to the other processes why this one could not save, and return that reason.

    Of several posts for one save only the first is kept. Nothing is posted if `error` came from
    another process.

    Args:
        error: Failure of this process, or the `ElsewhereError` that `wait` raised.
        place: Folder of the checkpoints. It is cut out of paths in the reason.
        key: Name of the save, as `wait` takes it.
    """
    if isinstance(error, ElsewhereError):
        return str(error)
    reason = f"{processes.name}{folder.reason(error, place)}"
    processes.post(f"{_UNSAVED}/{key}/first", reason)
    return reason


def merge_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the manifest entries of all processes into the entries of the complete checkpoint.

    Args:
        parts: Result of each process, process 0 first: `arrays` and `files` as a `Manifest` has
            them, or `error`, the reason why it could not save. The first one is changed in place
            and returned.

    Raises:
        MupaxFailure: One process could not save.
    """
    errors = [part["error"] for part in parts if "error" in part]
    if errors:
        raise MupaxFailure(errors[0])
    merged, *later_parts = parts
    for part in later_parts:
        merged["files"] |= part["files"]
        for name, entry in part["arrays"].items():
            merged["arrays"][name]["shards"] += entry["shards"]
    return merged


class NamedSave:
    """Save in progress, whose folder has a stand-in path that stays valid until the save ends.

    The stand-in leads to the folder by plain characters, as orbax needs them (`plainly_named`).

    Args:
        response: Result of orbax' `save_async`.
        naming: Stack with an entered `plainly_named`. `result` closes the stack when the save ends.
    """

    def __init__(self, response: Any, naming: contextlib.ExitStack) -> None:
        self._response = response
        self._naming = naming

    def result(self) -> None:
        """Wait until orbax has ended and release the stand-in path. Raise orbax' error, if any."""
        with self._naming:
            self._response.result()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StartedSave:
    """Values of a save that `Checkpoints.save` hands to the thread that finishes it.

    `facts` is the record of the training data (`Manifest.data`).
    """

    step: int
    checkpoint: Path
    """Folder that the arrays are written into."""
    response: NamedSave | Exception
    """Save in progress, or the error that it could not begin with."""
    arrays: dict[str, Any]
    """All arrays of the state by their names on disk."""
    shards: list[layout.Shard]
    """Shards of this process on the host. Cleared as soon as their digests are known."""
    facts: dict[str, Any]
    key: str
    """Name of the save among the processes, used once."""


class Checkpoints(RankedFolder):
    """Context manager that saves and restores the checkpoints of one run.

    All processes of the run call every method in the same order. The constructor deletes what
    interrupted saves have left, and quarantines folders without a manifest (`tidy`). Leaving the
    context waits for the save in progress, except after KeyboardInterrupt or SystemExit.

    Args:
        processes: Processes of the run; by default this one alone.
        log: Function that prints a line for the user; `print` by default.
        before_publish: Function called on process 0 when a checkpoint is on disk, before it is
            committed. If it raises, the save has failed. By default nothing is called.

    Raises:
        WorkdirError: There are checkpoints, and all are damaged.
    """

    def __init__(
        self,
        workdir: Path,
        config: CheckpointConfig,
        *,
        processes: Processes | None = None,
        log: Callable[[str], None] = print,
        before_publish: Callable[[], object] = lambda: None,
    ) -> None:
        folder.quiet()
        self._processes = processes or Processes()
        # Number of exchanges between processes so far. It makes the name of each one unique.
        self._exchanges = 0
        self._consecutive_failures = 0
        renames = self._broadcast(lambda: renames_folders(workdir))
        super().__init__(workdir, config, log, renames)
        # Step of the newest save, on disk or in progress. Process 0 alone decides by its value
        # whether to save a step, and sets it to `None` when a save fails.
        self._saved = self.latest
        self._before_publish = before_publish
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self.record = self._broadcast(lambda: recorded(workdir))
        self._broadcast(self.tidy)

    def save(
        self, step: int, state: TrainState, facts: dict[str, Any], *, last: bool = False
    ) -> None:
        """Start to save the state, unless the newest save is of the same step.

        The arrays are copied to the host before this returns, so that the next step may reuse their
        device memory.
        A thread writes, verifies and commits the checkpoint. If the save fails, now or later, a
        line is printed and `wait` returns the reason. No error is raised, but several processes end
        after `MOST_FAILED` failures in a row, or if orbax cannot start in one of them.

        Args:
            step: Optimizer steps done, which is also the position in the data.
            facts: Facts of the data, such as `name` and `digest`. `restore` compares the digest.
            last: Wait for the previous save however long it takes. By default this save is left
                out, with a printed line, if the previous one is not on disk after 30 seconds.
        """
        # Process 0 decides: its saves may fail alone, and all processes must save the same steps.
        if self._broadcast(lambda: step == self._saved):
            return
        if not last and self._previous_is_slow():
            self._log(
                f"checkpoint {step} is left out: the disk has not yet taken the one of step "
                f"{self._saved}"
            )
            return
        self.wait()
        self._saved = step
        self._failure = None
        self.forget(step)

        arrays = state.arrays()
        checkpoint = self.layout.written_at(step)
        named_arrays = layout.by_name(arrays)
        shards: list[layout.Shard] = []
        response: NamedSave | Exception
        naming = contextlib.ExitStack()
        _ORBAX.acquire()  # `_finish` releases it, when orbax has ended
        try:
            shards = layout.host_shards(named_arrays)
            if self._processes.leader:
                self.layout.begin(step)
            self.folder.mkdir(parents=True, exist_ok=True)
            plain_name = naming.enter_context(plainly_named(checkpoint))
            with self.layout.context():
                response = NamedSave(ocp.save_async(plain_name, arrays), naming)
        except (OSError, ValueError, RuntimeError) as error:
            shards = []
            response = error
            # The other processes may already wait for this one inside orbax.
            self._processes.end_all(folder.reason(error, self.folder))
        except BaseException:
            _ORBAX.release()
            raise

        # All processes count alike, so the name of the save is the same on all of them.
        self._exchanges += 1
        started = _StartedSave(
            step=step,
            checkpoint=checkpoint,
            response=response,
            arrays=named_arrays,
            shards=shards,
            facts=facts,
            key=f"saved/{self._exchanges}",
        )
        # A daemon thread, because the interpreter does not wait for it when the process exits. A
        # slow disk would delay the exit after Ctrl-C.
        self._thread = threading.Thread(
            target=self._finish, args=(started,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _previous_is_slow(self) -> bool:
        """Wait up to `_PATIENCE_S` seconds for the previous save to end.

        Return, on every process, whether process 0 is still saving.
        """
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
        return self._broadcast(lambda: self._thread is not None and self._thread.is_alive())

    def wait(self) -> str | None:
        """Wait for the save in progress. Return why the last save failed, or `None`.

        Only process 0 knows of every failure, such as that of another process or of the commit.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._failure

    def latest_of_all(self) -> int | None:
        """Return the step of the newest checkpoint that process 0 sees, or `None`.

        All processes call this, and get the same step.
        """
        return self._broadcast(lambda: self.latest)

    def restore(
        self, abstract: TrainState, facts: dict[str, Any] | None, only_step: int | None = None
    ) -> TrainState:
        """Load and return the newest state whose files and arrays have their recorded digests.

        First wait for the save in progress. Each array is loaded straight into its sharding. A
        damaged checkpoint is quarantined with a printed line, and the one before it is tried.

        Args:
            abstract: State of this run without values: shapes, dtypes and shardings.
            facts: Facts of this run's data, or `None` to accept a checkpoint of any data.
            only_step: Step of the only checkpoint to try. It is not quarantined if it is damaged.
                By default the newest is tried, then the one before it.

        Raises:
            WorkdirError: All checkpoints are damaged, or the checkpoint has other data or other
                arrays than this run.
            ForeignError: A checkpoint is of another run or of a newer version.
            DiskError: The disk cannot be read, or a damaged checkpoint cannot be set aside.
        """
        self.wait()
        # With several processes a load is a collective operation. No process may repeat it alone.
        seconds = None if self._processes.count == 1 else 0.0
        patience = disk.Patience(self._log, seconds)
        while True:
            step = self._broadcast(self.newest) if only_step is None else only_step
            if step is None:
                raise self.none_good()
            checkpoint = self.folder / str(step)
            manifest, problem = self._verified(checkpoint)
            if manifest is not None and not problem:
                self._check_fits(manifest, abstract, facts)
                arrays, problem = self._load(checkpoint, manifest, abstract, patience)
                if arrays is not None:
                    self._saved = step
                    return TrainState(**arrays)
            if only_step is not None:
                saved = folder.steps(self.folder)
                alternatives = ", ".join(str(step) for step in saved if step != only_step)
                raise WorkdirError(
                    f"checkpoint {only_step} is damaged: {problem}; nothing was changed. "
                    f"There are also: {alternatives or 'none'}"
                )
            self._broadcast(lambda step=step, problem=problem: self.quarantine(step, problem))

    def _load(
        self, checkpoint: Path, manifest: Manifest, abstract: TrainState, patience: disk.Patience
    ) -> tuple[dict[str, Any] | None, str]:
        """Load the arrays of a checkpoint, and compare them with the digests of its manifest.

        If any array differs in any process, all are loaded a second time. Every process must call
        this method.

        Returns:
            Arrays as `TrainState` takes them and "", or `None` and the problem, on every process.
        """
        problem = ""
        for _ in range(2):  # a single bad read may be a passing failure of the disk
            with _ORBAX:
                arrays = patience(lambda: folder.loaded(checkpoint, abstract.arrays()), checkpoint)
            wrong = layout.check_loaded(layout.by_name(arrays), manifest.arrays)
            problems = self._agreed([f"the array {name} is not what was saved" for name in wrong])
            problem = folder.first_of(problems)
            if not problem:
                return arrays, ""
        return None, problem

    def _verified(self, checkpoint: Path) -> tuple[Manifest | None, str]:
        """Read the manifest of a checkpoint, and compare the files with its sizes and digests.

        Each process reads a part of the files.

        Returns:
            Two values: the manifest, or `None` if this process cannot read it; and a text that says
            what is wrong with the files. The text is the same on every process, and "" if nothing
            is wrong.
        """
        manifest: Manifest | None = None
        try:
            manifest = layout.read(checkpoint, self.record.get("run"))
            share = (self._processes.index, self._processes.count)
            problems = folder.file_problems(checkpoint, manifest, share)
        except DamagedError as error:
            problems = [str(error)]
        problems = self._agreed(problems)
        if not problems:
            return manifest, ""

        def describe() -> str:
            if manifest is None:
                return folder.first_of(problems)
            return folder.describe_damage(checkpoint, manifest, problems)

        return manifest, self._broadcast(describe)

    def _agreed(self, problems: list[str]) -> list[str]:
        """Return the problems that all processes have found, on every process.

        Every process must call this method.
        """
        self._exchanges += 1
        gathered = self._processes.gather(f"problems/{self._exchanges}", problems)

        def flatten() -> list[str]:
            lines: list[str] = []
            for part in gathered or ():
                lines += part
            return lines

        return self._broadcast(flatten)

    def _check_fits(
        self, manifest: Manifest, abstract: TrainState, facts: dict[str, Any] | None
    ) -> None:
        """Refuse a checkpoint that has other data or other arrays than this run.

        Args:
            abstract: State of this run, whose dtypes and shapes are compared by name.
            facts: Facts of this run's data, whose digest is compared, or `None` to accept any data.

        Raises:
            WorkdirError: The digest, or the name, dtype or shape of an array differs.
        """
        saved = manifest.data
        if facts is not None and saved.get("digest") != facts.get("digest"):
            raise WorkdirError(
                f"the run was trained on {saved.get('name')} with digest {saved.get('digest')}, "
                f"this machine has {facts.get('name')} with digest {facts.get('digest')}; "
                "restore that data, "
                "or go on with these by --resume-change data, or start again with another --workdir"
            )
        target: dict[str, str] = {}
        for name, leaf in layout.by_name(abstract.arrays()).items():
            target[name] = f"{leaf.dtype} {list(leaf.shape)}"
        stored: dict[str, str] = {}
        for name, entry in manifest.arrays.items():
            stored[name] = f"{entry['dtype']} {entry['shape']}"
        names = sorted(target.keys() | stored.keys())
        differing = [name for name in names if target.get(name) != stored.get(name)]
        if differing:
            name = differing[0]
            raise WorkdirError(
                f"checkpoint {manifest.step} has another state than this run: {name} is "
                f"{stored.get(name, 'missing')} there and {target.get(name, 'missing')} here "
                f"({len(differing)} arrays differ); continue it with the flags and the "
                "version it was saved by, or start another run with --workdir"
            )

    def _finish(self, started: _StartedSave) -> None:
        """Wait for orbax, verify the files, and commit the checkpoint.

        Every process runs this in a thread. Process 0 collects the digests of all processes, writes
        the manifest and commits. A failure is printed and kept for `wait`, not raised.
        """
        processes = self._processes
        part: dict[str, Any]
        try:
            part = self._written_part(started)
        except Exception as error:  # of any kind: a failed save does not end the run
            part = {"error": tell(error, self.folder, processes, started.key)}
            if processes.count == 1:
                folder.end_threads()
        finally:
            _ORBAX.release()
        try:
            parts = processes.gather(started.key, part)
            if parts is None:  # not process 0
                self._failure = part.get("error")
                return
            # From here on only process 0 runs. The others have returned above.
            merged = merge_parts(parts)
            manifest = Manifest(
                step=started.step,
                data=started.facts,
                record=self.record,
                assets=self.assets,
                **merged,
            )
            self._before_publish()
            self.publish(manifest)
            self._consecutive_failures = 0
        except Exception as error:
            self._handle_failure(started.step, error)

    def _written_part(self, started: _StartedSave) -> dict[str, Any]:
        """Wait until orbax has written the arrays, then read them back to compare with memory.

        Returns:
            `arrays` and `files` of this process, with their digests, as a manifest lists them.

        Raises:
            OSError: The files hold other arrays than were saved.
            Exception: Any error of orbax.
        """
        if isinstance(started.response, Exception):
            raise started.response
        arrays = layout.describe_arrays(started.arrays, started.shards)
        # Frees a host copy of this process' part of the state. Only the digests are still needed.
        started.shards.clear()
        wait(started.response, self._processes, started.key)
        files = folder.file_digests(
            started.checkpoint, self._processes.index, self._processes.count
        )
        # Only after `file_digests`, which drops the written pages from the page cache. The arrays
        # are then compared with what the disk gives back, not with what was written into memory.
        wrong = folder.damaged_arrays(started.checkpoint, arrays)
        if wrong:
            raise OSError(
                f"the disk gives back other arrays than it was given: {folder.first_of(wrong)}"
            )
        return {"arrays": arrays, "files": files}

    def _handle_failure(self, step: int, error: Exception) -> None:
        """Print why a save failed, keep the reason for `wait`, and delete what the save wrote.

        End a run of several processes after `MOST_FAILED` failures in a row.
        """
        reason = folder.reason(error, self.folder)
        self._failure = f"checkpoint {step} could not be saved: {reason}"
        # So that a later call of `save` tries the same step again.
        if self._saved == step:
            self._saved = None
        latest = self.latest
        newest = "there is no other yet"
        if latest is not None:
            newest = f"the last good one is {latest}"
        self._log(f"{self._failure}; {newest}")
        self._consecutive_failures += 1
        if self._consecutive_failures == MOST_FAILED:
            self._processes.end_all(f"{self._failure}, as was the one before it; {newest}")
        if self._processes.leader:
            self.layout.abandon(step)  # its files take disk space that the next save needs

    def _broadcast(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` on process 0, and return its result on every process.

        Every process must call this method. JSON must be able to hold the result.
        """
        self._exchanges += 1
        return self._processes.broadcast(f"checkpoints/{self._exchanges}", compute)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        # After KeyboardInterrupt or SystemExit the process must exit without waiting for the disk.
        if error is None or isinstance(error, Exception):
            self.wait()
