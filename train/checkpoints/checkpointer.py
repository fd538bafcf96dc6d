"""Checkpoints: saved by orbax while training goes on, verified before they count.

A checkpoint is written as STEP.saving. When its arrays were read back from the files and found to be those that were saved,
it gets its manifest and its name STEP, and only then an older one is deleted: what an evaluation measured lies in its checkpoint
before one that was better so far goes. What is found damaged is moved to set-aside/, and the one before it is used.

In a save of several processes, one that cannot write tells the others, which wait for it inside orbax.

Steps of a run may be meant by something else than being the newest: the best by an evaluation, and one to go back to.

What an evaluation measured is kept in the checkpoint of its step, as evaluation.json beside the manifest, so that which is the best
is read from what is saved.
"""

from __future__ import annotations

import contextlib
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

from mupax import disk
from mupax.disk import is_remote, plainly_named
from mupax.errors import MupaxFailure
from mupax.train.checkpoints import assets, folder, layout
from mupax.train.checkpoints.folder import CHECKPOINTS, CheckpointFolder, WorkdirError, steps
from mupax.train.checkpoints.layout import DamagedError, Manifest, counts, renames_folders
from mupax.train.checkpoints.workdir import recorded
from mupax.train.config import sections
from mupax.train.config.sections import CheckpointConfig, Measured, Metrics, Step
from mupax.train.core.state import TrainState
from mupax.train.parallel.processes import Processes

FILE = "evaluation.json"
BEST = "best"
BRANCHES = "branches"
"""Folder of a workdir with what came after steps that the run went back to: a workdir each."""

MOST_FAILED = 2
"""Saves of several processes that may fail one after another: the disk of one host does not get well by waiting."""
_POLL_S = 0.5
"""How often a process that saves looks whether another cannot."""
_UNSAVED = "mupax/unsaved"

_PATIENCE_S = 30.0
"""How long training waits for the save before at the next one. A disk that takes longer must not stop it."""
_ORBAX = threading.Lock()
"""Held while orbax saves or loads: it numbers its operations per process, and two at a time wait for each other's signals."""


class RankedFolder(CheckpointFolder):
    """Checkpoints that hold the evaluations of their steps, so that the best can stay. Process 0 alone changes the folder.

    The arguments are those of `CheckpointFolder`.
    """

    def __init__(
        self,
        workdir: Path,
        config: CheckpointConfig,
        note: Callable[[str], None],
        renames: bool = True,
    ) -> None:
        super().__init__(workdir, config, note, renames)
        self._lock = threading.Lock()
        self._measured: dict[int, Metrics] = {}
        """Evaluations that are not in their checkpoints yet."""

    def evaluated(self, measured: Mapping[int, Metrics]) -> None:
        """Keep what evaluations measured, by step, each in the checkpoint of its step, now or when that is there."""
        if not self._config.ranks:
            return
        with self._lock:
            self._measured.update(measured)
            try:
                for saved in [
                    saved for saved in self._measured if counts(self.folder / str(saved))
                ]:
                    self._keep_measured(self.folder / str(saved), saved)
                self.prune()
            except (
                OSError,
                disk.DiskError,
            ) as error:  # the run goes on, and the next evaluation tries again
                self._note(f"the best checkpoints are as they were: {error}")

    def forget(self, step: int) -> None:
        """A checkpoint of another state at that step is to come."""
        self._measured.pop(step, None)

    def publish(self, content: Manifest) -> None:
        with self._lock:
            self._keep_measured(self.layout.written_at(content.step), content.step)
            super().publish(content)

    def leaving(self, record: Mapping[str, Any] | None = None) -> list[int]:
        try:
            leaving = super().leaving(record)
        except disk.DiskError as error:
            self._note(f"no checkpoint is deleted for now: {error}")
            return []
        # A checkpoint whose evaluation is not on disk yet may be the best.
        return [step for step in leaving if step not in self._measured]

    def measured(self, saved: list[int]) -> Measured:
        if not self._config.ranks:
            return {}
        return {step: read(self.folder / str(step)) for step in saved}

    def _keep_measured(self, checkpoint: Path, step: int) -> None:
        metrics = self._measured.get(step)
        if metrics is not None and read(checkpoint) != metrics:
            write(checkpoint, step, metrics)
        self._measured.pop(step, None)


def write(checkpoint: Path, step: int, metrics: Metrics) -> None:
    """Keep what an evaluation measured in its checkpoint, whole or not at all.

    Args:
        checkpoint: its folder, which may not have its name yet.
        step: of the checkpoint.
        metrics: what was measured.

    Raises:
        DiskError: the disk does not take it.
    """
    finite = {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in metrics.items()
    }
    content = {"step": step, "metrics": finite}
    disk.write_whole(checkpoint / FILE, json.dumps({**content, "digest": _digest(content)}) + "\n")


def read(checkpoint: Path) -> dict[str, float | None]:
    """What an evaluation measured at a checkpoint; empty where none did, or the file is not as it was written.

    Raises:
        DiskError: the disk cannot read it.
    """
    try:
        content = disk.read_json(checkpoint / FILE)
    except disk.JsonError:
        return {}
    digest, metrics = content.pop("digest", None), content.get("metrics")
    whole = (
        digest == _digest(content)
        and str(content.get("step")) == checkpoint.name.partition(".")[0]
        and isinstance(metrics, dict)
    )
    return metrics if whole and isinstance(metrics, dict) else {}


def ranked(folder: Path, metric: str) -> list[int]:
    """Return the steps of checkpoints that hold a finite value of a metric, the best first, of equal ones the earliest.

    Args:
        folder: of the checkpoints.
        metric: of an evaluation.

    Raises:
        DiskError: the disk cannot read them.
    """
    return sections.ranked({step: read(folder / str(step)) for step in steps(folder)}, metric)


def step_of(workdir: Path, choice: Step | None, metric: str) -> int:
    """The step of a run that is meant.

    Args:
        workdir: of the run.
        choice: a step, or best; None is the newest.
        metric: by which the run says what is best.

    Raises:
        WorkdirError: it is not there.
        DiskError: the disk cannot read what was measured.
    """
    saved = steps(workdir / CHECKPOINTS)
    if not saved:
        raise WorkdirError(f"{workdir} has no checkpoint yet; let the run write one first")
    listed = ", ".join(map(str, saved))
    if choice == BEST:
        if best := ranked(workdir / CHECKPOINTS, metric):
            return best[0]
        raise WorkdirError(
            f"{workdir} has no checkpoint with a finite {metric}, so none is the best; a run keeps its best with "
            f"--checkpoint.keep-best 1. There are the steps {listed}"
        )
    if choice is not None and choice not in saved:
        raise WorkdirError(f"{workdir} has no checkpoint of step {choice}; there are {listed}")
    return max(saved) if choice is None else choice


def named_step(path: Path) -> tuple[Path, Step | None]:
    """The workdir and the step that WORKDIR/checkpoints/STEP or WORKDIR/checkpoints/best names; any other path, and None."""
    if path.parent.name == CHECKPOINTS and (path.name == BEST or re.fullmatch(r"\d+", path.name)):
        return path.parent.parent, BEST if path.name == BEST else int(path.name)
    return path, None


def branch_off(checkpoints: CheckpointFolder, step: int, files: Sequence[Path]) -> str:
    """Put what a run did after a step into a workdir of its own, from which it can be used and gone on with.

    Records first, then checkpoints, the newest first: a kill leaves the run with fewer of them, and the same command does the rest.

    Args:
        checkpoints: of the run; process 0 alone calls this.
        step: that the run goes back to.
        files: its metrics and its record.

    Returns:
        A line that says where it is; "" where nothing came after.

    Raises:
        DiskError, OSError: it cannot be moved.
    """
    workdir, later = (
        checkpoints.folder.parent,
        [saved for saved in steps(checkpoints.folder) if saved > step],
    )
    if not later:
        return ""
    name, branches = str(later[-1]), disk.names(workdir / BRANCHES)
    number = sum(other.partition(".")[0] == name for other in branches)
    branch = workdir / BRANCHES / (f"{name}.{number}" if number else name)
    if not is_remote(branch):
        branch.mkdir(parents=True)
    for file in files:
        if disk.status(file) is not None:
            disk.write_whole(branch / file.name, disk.read_bytes(file))
    assets.copy(workdir, branch)
    for saved in reversed(later):
        checkpoints.layout.move(saved, branch / CHECKPOINTS / str(saved))
    return f"what came after step {step} is set aside as a run of its own in {branch.relative_to(workdir)}: steps {', '.join(map(str, later))}"


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


class ElsewhereError(Exception):
    """Another process cannot save. The text says which, and why."""


def wait(response: Any, processes: Processes, key: str) -> None:
    """Wait for orbax, but not for its processes that wait there, for minutes, for one that has failed.

    Args:
        response: of `save_async`. Where another process has failed, its threads are left to themselves.
        processes: of the run.
        key: of the save.

    Raises:
        ElsewhereError: another process has failed.
    """
    if processes.count == 1:
        return response.result()
    ended: Future[None] = Future()

    def result() -> None:
        try:
            ended.set_result(response.result())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=result, name="orbax", daemon=True).start()
    while not ended.done():
        with contextlib.suppress(TimeoutError):
            ended.exception(_POLL_S)
        if not ended.done() and (reason := processes.posts(f"{_UNSAVED}/{key}")):
            raise ElsewhereError(reason["first"])
    return ended.result()


def tell(error: Exception, place: Path, processes: Processes, key: str) -> str:
    """What to say of a save that failed, which the other processes are told unless one of them has failed before.

    Args:
        error: what this process failed of.
        place: folder of the checkpoints.
        processes: of the run.
        key: of the save, as the others give it to `wait`.
    """
    if isinstance(error, ElsewhereError):
        return str(error)
    reason = f"{processes.name}{folder.reason(error, place)}"
    processes.post(f"{_UNSAVED}/{key}/first", reason)
    return reason


def whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The arrays and files of a checkpoint, of the parts that the processes have written.

    Raises:
        MupaxFailure: one of them could not.
    """
    if errors := [part["error"] for part in parts if "error" in part]:
        raise MupaxFailure(errors[0])
    first, *rest = parts
    for part in rest:
        first["files"] |= part["files"]
        for name, entry in part["arrays"].items():
            first["arrays"][name]["shards"] += entry["shards"]
    return first


class NamedSave:
    """A save that orbax has begun, and the name that it writes under, which stays good until orbax has ended.

    Args:
        naming: entered `plainly_named`.
    """

    def __init__(self, response: Any, naming: contextlib.ExitStack) -> None:
        self._response = response
        self._naming = naming

    def result(self) -> None:
        """Wait until orbax has ended, and raise what it failed of."""
        with self._naming:
            self._response.result()


class Checkpoints(RankedFolder):
    """The checkpoints of one run, saved and restored, as a context manager that ends with every save on disk.

    Every method is called by all processes of the run alike.

    Args:
        workdir: folder of the run.
        config: which checkpoints stay.
        processes: processes of the run; this one alone unless given.
        note: prints what went wrong and what was done about it.
        before: called on process 0 when a checkpoint is on disk and does not count yet; raises if it must not count.

    Raises:
        WorkdirError: there are checkpoints, and none is whole.
    """

    def __init__(
        self,
        workdir: Path,
        config: CheckpointConfig,
        *,
        processes: Processes | None = None,
        note: Callable[[str], None] = print,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        folder.quiet()
        self._processes = processes or Processes()
        self._exchanges = 0
        self._failed_in_a_row = 0
        super().__init__(workdir, config, note, self._broadcast(lambda: renames_folders(workdir)))
        self._saved = self.latest
        self._before = before
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self.record = self._broadcast(lambda: recorded(workdir))
        self._broadcast(self.tidy)

    def save(
        self, step: int, state: TrainState, facts: dict[str, Any], *, last: bool = False
    ) -> None:
        """Start saving; the arrays are on the host before this returns, so that the next step may reuse their memory.

        Where it fails, now or later, the run is told and goes on; `wait` says so at the end.

        Args:
            step: optimizer steps done; also the data position.
            state: what to save.
            facts: the data's facts, which `restore` compares.
            last: wait for the save before however long it takes; otherwise this one is left out where that takes too long.
        """
        if self._broadcast(lambda: step == self._saved):
            return
        if not last and self._thread is not None:
            self._thread.join(_PATIENCE_S)
        if not last and self._broadcast(
            lambda: self._thread is not None and self._thread.is_alive()
        ):
            self._note(
                f"checkpoint {step} is left out: the disk has not yet taken the one of step {self._saved}"
            )
            return
        self.wait()
        self._saved, self._failure = step, None
        self.forget(step)
        arrays, checkpoint = state.arrays(), self.layout.written_at(step)
        named = layout.by_name(arrays)
        _ORBAX.acquire()  # until `_finish` has the result
        naming = contextlib.ExitStack()
        try:
            shards = layout.host_shards(named)
            if self._processes.leader:
                self.layout.begin(step)
            self.folder.mkdir(parents=True, exist_ok=True)
            plain_name = naming.enter_context(plainly_named(checkpoint))
            with self.layout.context():
                response = NamedSave(ocp.save_async(plain_name, arrays), naming)
        except (OSError, ValueError, RuntimeError) as error:
            shards, response = [], error
            self._processes.end_all(
                folder.reason(error, self.folder)
            )  # others may wait for this one inside orbax
        except BaseException:
            _ORBAX.release()
            raise
        self._exchanges += 1
        work = (step, checkpoint, response, named, shards, facts, f"saved/{self._exchanges}")
        self._thread = threading.Thread(
            target=self._finish, args=work, name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> str | None:
        """Wait for the save in progress; what the last save failed of, or None where it did not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._failure

    def latest_of_all(self) -> int | None:
        """Step of the newest checkpoint as process 0 sees it, on every process."""
        return self._broadcast(lambda: self.latest)

    def restore(
        self, abstract: TrainState, facts: dict[str, Any] | None, at: int | None = None
    ) -> TrainState:
        """The newest state that is bitwise what was saved, each array restored straight into its sharding.

        Whatever else is found on the way to it is set aside, and the run is told.

        Args:
            abstract: the state of this run.
            facts: of its data; None where other data than the checkpoint's are meant.
            at: the step of a checkpoint that is meant instead, and no other.

        Raises:
            WorkdirError: no checkpoint is good, or it was trained on other data, or holds other arrays than this run's.
            ForeignError, DiskError: a checkpoint is of another run or a newer version, or the disk cannot be read.
        """
        self.wait()
        patience = disk.Patience(self._note, None if self._processes.count == 1 else 0.0)
        while (step := self._broadcast(self.newest) if at is None else at) is not None:
            checkpoint = self.folder / str(step)
            content, problem = self._verified(checkpoint)
            if content is not None and not problem:
                self._check_fits(content, abstract, facts)
                for _ in range(2):  # damage is what two reads agree on
                    with _ORBAX:
                        loaded = patience(
                            lambda c=checkpoint: folder.loaded(c, abstract.arrays()), checkpoint
                        )
                    wrong = layout.check_loaded(layout.by_name(loaded), content.arrays)
                    problem = folder.first_of(
                        self._agreed([f"the array {name} is not what was saved" for name in wrong])
                    )
                    if not problem:
                        self._saved = step
                        return TrainState(**loaded)
            if at is not None:
                alternatives = (
                    ", ".join(str(other) for other in folder.steps(self.folder) if other != at)
                    or "none"
                )
                raise WorkdirError(
                    f"checkpoint {at} is damaged: {problem}; nothing was changed. There are also: {alternatives}"
                )
            self._broadcast(lambda step=step, problem=problem: self.set_aside(step, problem))
        raise self.none_good()

    def _verified(self, checkpoint: Path) -> tuple[Manifest | None, str]:
        """The manifest of a checkpoint, and what is wrong with its files, which is the same on every process."""
        content: Manifest | None = None
        try:
            content = layout.read(checkpoint, self.record.get("run"))
            problems = folder.file_problems(
                checkpoint, content, (self._processes.index, self._processes.count)
            )
        except DamagedError as error:
            problems = [str(error)]
        if not (problems := self._agreed(problems)):
            return content, ""
        return content, self._broadcast(
            lambda: (
                folder.damage(checkpoint, content, problems)
                if content
                else folder.first_of(problems)
            )
        )

    def _agreed(self, problems: list[str]) -> list[str]:
        """The problems of all processes, on every one."""
        self._exchanges += 1
        gathered = self._processes.gather(f"problems/{self._exchanges}", problems)
        return self._broadcast(lambda: [line for part in gathered or () for line in part])

    def _check_fits(
        self, content: Manifest, abstract: TrainState, facts: dict[str, Any] | None
    ) -> None:
        before = content.data
        if facts is not None and before.get("digest") != facts.get("digest"):
            raise WorkdirError(
                f"the run was trained on {before.get('name')} with digest {before.get('digest')}, this machine has "
                f"{facts.get('name')} with digest {facts.get('digest')}; restore that data, "
                "or go on with these by --resume-change data, or start again with another --workdir"
            )
        leaves = layout.by_name(abstract.arrays()).items()
        target = {name: f"{leaf.dtype} {list(leaf.shape)}" for name, leaf in leaves}
        stored = {
            name: f"{entry['dtype']} {entry['shape']}" for name, entry in content.arrays.items()
        }
        if differing := sorted(
            n for n in target.keys() | stored.keys() if target.get(n) != stored.get(n)
        ):
            name = differing[0]
            raise WorkdirError(
                f"checkpoint {content.step} has another state than this run: {name} is {stored.get(name, 'missing')} there and "
                f"{target.get(name, 'missing')} here ({len(differing)} arrays differ); continue it with the flags and the "
                "version it was saved by, or start another run with --workdir"
            )

    def _finish(
        self,
        step: int,
        checkpoint: Path,
        response: NamedSave | Exception,
        named: dict[str, Any],
        shards: list[layout.Shard],
        facts: dict[str, Any],
        key: str,
    ) -> None:
        """Wait for the data, verify it, publish the checkpoint. In a thread of its own, on every process."""
        part: dict[str, Any]
        processes = self._processes
        try:
            if isinstance(response, Exception):
                raise response
            arrays = layout.describe_arrays(named, shards)
            shards.clear()
            wait(response, processes, key)
            files = folder.file_digests(checkpoint, processes.index, processes.count)
            if wrong := folder.damaged_arrays(checkpoint, arrays):
                raise OSError(
                    f"the disk gives back other arrays than it was given: {folder.first_of(wrong)}"
                )
            part = {"arrays": arrays, "files": files}
        except Exception as error:  # of whatever kind: the run goes on
            part = {"error": tell(error, self.folder, processes, key)}
            if processes.count == 1:
                folder.end_threads()
        finally:
            _ORBAX.release()
        try:
            parts = processes.gather(key, part)
            if parts is None:
                self._failure = part.get("error")
                return
            complete = whole(parts)
            content = Manifest(
                step=step, data=facts, record=self.record, assets=self.assets, **complete
            )
            self._before()
            self.publish(content)
            self._failed_in_a_row = 0
        except Exception as error:
            self._failed(step, error)

    def _failed(self, step: int, error: Exception) -> None:
        self._failure = f"checkpoint {step} could not be saved: {folder.reason(error, self.folder)}"
        if self._saved == step:
            self._saved = None
        before = self.latest
        newest = f"the last good one is {before}" if before is not None else "there is no other yet"
        self._note(f"{self._failure}; {newest}")
        self._failed_in_a_row += 1
        if self._failed_in_a_row == MOST_FAILED:
            self._processes.end_all(f"{self._failure}, as was the one before it; {newest}")
        if self._processes.leader:  # what was written of it takes room that the next one needs
            self.layout.abandon(step)

    def _broadcast(self, value: Callable[[], Any]) -> Any:
        """What process 0 finds, on every process."""
        self._exchanges += 1
        return self._processes.broadcast(f"checkpoints/{self._exchanges}", value)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(
            error, Exception
        ):  # whoever stops the process at once does not wait
            self.wait()
