"""Checkpoints: saved by orbax while training goes on, verified before they count, the newest `keep` kept.

A checkpoint is written as STEP.saving. When its arrays were read back from the files and found to be those that were saved,
it gets its manifest and its name STEP, and only then an older one is deleted. What is found damaged is moved to set-aside/,
and the one before it is used.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from orbax.checkpoint import v1 as ocp

from mupax.train.checkpoints import digests, manifest
from mupax.train.checkpoints.folder import SAVING, CheckpointFolder
from mupax.train.checkpoints.manifest import Manifest
from mupax.train.checkpoints.workdir import WorkdirError
from mupax.train.core.state import TrainState
from mupax.train.parallel.processes import Processes

_PATIENCE_S = 30.0
"""How long training waits for the save before at the next one. A disk that takes longer must not stop it."""
_ORBAX = threading.Lock()
"""Held while orbax saves or loads: it numbers its operations per process, and two at a time wait for each other's signals."""


class Checkpoints:
    """The checkpoints of one run, as a context manager that ends with every save on disk.

    Every method is called by all processes of the run alike.

    Args:
        workdir: folder of the run.
        keep: how many of the newest to keep.
        processes: of the run.
        note: told what went wrong and what was done about it.

    Raises:
        WorkdirError: there are checkpoints, and none is whole.
    """

    def __init__(
        self, workdir: Path, keep: int, processes: Processes | None = None, note: Callable[[str], None] = print
    ) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax narrates every save
        self.files, self._note = CheckpointFolder(workdir, keep, note), note
        self.folder = self.files.path
        self._processes = processes or Processes()
        self._asked, self._saved = 0, self.latest
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._broadcast(self.files.tidy)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self.files.latest

    def save(self, step: int, state: TrainState, facts: dict[str, Any], *, last: bool = False) -> None:
        """Start saving; the arrays are on the host before this returns, so that the next step may reuse their memory.

        Where it fails, now or later, the run is told and goes on; `wait` says so at the end.

        Args:
            step: optimizer steps done; also the data position.
            state: what to save.
            facts: the data's facts, which `restore` compares.
            last: wait for the save before however long it takes; otherwise this one is left out where that takes too long.
        """
        if step == self._saved:
            return
        if not last and not self._broadcast(self._ready):
            self._note(f"checkpoint {step} is left out: the disk has not yet taken the one of step {self._saved}")
            return
        self.wait()
        self._saved, self._failure = step, None
        arrays, folder = state.arrays(), self.folder / f"{step}{SAVING}"
        named = digests.named(arrays)
        _ORBAX.acquire()  # until `_finish` has the result
        try:
            shards = digests.host_shards(named)
            if self._processes.leader:
                shutil.rmtree(folder, ignore_errors=True)
            with ocp.Context(array_options=_array_options()):
                response = ocp.save_async(str(folder), arrays)
        except (OSError, ValueError, RuntimeError) as error:
            shards, response = [], error  # told to the other processes like one that comes later
        except BaseException:
            _ORBAX.release()
            raise
        self._asked += 1
        work = (step, folder, response, named, shards, facts, f"saved/{self._asked}")
        self._thread = threading.Thread(target=self._finish, args=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _ready(self) -> bool:
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the save in progress; what the last save failed of, or None where it did not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._failure

    def restore(self, abstract: TrainState, facts: dict[str, Any] | None) -> TrainState:
        """The newest state that is to the bit what was saved, each array restored straight into its sharding.

        Whatever else is found on the way to it is set aside, and the run is told.

        Args:
            abstract: the state of this run.
            facts: of its data; None where other data than the checkpoint's are meant.

        Raises:
            WorkdirError: no checkpoint is good, or it was trained on other data, or holds other arrays than this run's.
        """
        self.wait()
        while (step := self._broadcast(lambda: self.latest)) is not None:
            folder = self.folder / str(step)
            problems, state = self._problems(folder), None
            if not problems:
                self._check_fits(manifest.read(folder), abstract, facts)
                state, problems = self._load(folder, abstract)
            if not problems and state is not None:
                self._saved = step
                return state
            self._broadcast(lambda step=step, problems=problems: self.files.set_aside(step, problems))
        raise WorkdirError(self.files.none_good())

    def _load(self, folder: Path, abstract: TrainState) -> tuple[TrainState, list[str]]:
        with _ORBAX:
            state = TrainState(**ocp.load(str(folder), abstract.arrays()))
        wrong = digests.check_loaded(digests.named(state.arrays()), manifest.read(folder).arrays)
        return state, self._agreed([f"the array {name} is not what was saved" for name in wrong])

    def _problems(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint's files, on every process."""
        whole: Manifest | None = None
        try:
            whole = manifest.read(folder)
            found = manifest.check_files(folder, whole, (self._processes.index, self._processes.count))
        except (manifest.DamagedError, OSError) as error:
            found = [str(error)]
        if found := self._agreed(found):
            spoilt = self._broadcast(lambda: manifest.spoilt(folder, whole) if whole else [])
            found = [manifest.some(found), *spoilt]
        return found

    def _agreed(self, problems: list[str]) -> list[str]:
        """The problems of all processes, on every one."""
        self._asked += 1
        gathered = self._processes.gather(f"problems/{self._asked}", problems)
        return self._broadcast(lambda: [line for part in gathered or () for line in part])

    def _check_fits(self, found: Manifest, abstract: TrainState, facts: dict[str, Any] | None) -> None:
        if facts is not None and found.data.get("digest") != facts.get("digest"):
            raise WorkdirError(
                f"the run was trained on {found.data.get('name')} with digest {found.data.get('digest')}, this machine has "
                f"{facts.get('name')} with digest {facts.get('digest')}; restore that data, "
                "or go on with these by --resume-change data, or start again with another --workdir"
            )
        wanted = {name: list(leaf.shape) for name, leaf in digests.named(abstract.arrays()).items()}
        stored = {name: entry["shape"] for name, entry in found.arrays.items()}
        if differing := sorted(n for n in wanted.keys() | stored.keys() if wanted.get(n) != stored.get(n)):
            name = differing[0]
            raise WorkdirError(
                f"checkpoint {found.step} has another state than this run: {name} is {stored.get(name, 'missing')} there and "
                f"{wanted.get(name, 'missing')} here ({len(differing)} arrays differ); continue it with the flags and the "
                "version it was saved by, or start another run with --workdir"
            )

    def _finish(
        self,
        step: int,
        folder: Path,
        response: Any,
        named: dict[str, Any],
        shards: list[digests.Shard],
        facts: dict[str, Any],
        key: str,
    ) -> None:
        """Wait for the data, verify it, publish the checkpoint. In a thread of its own, on every process."""
        part: dict[str, Any]
        processes = self._processes
        try:
            if isinstance(response, Exception):
                raise response
            arrays = digests.describe(named, shards)
            shards.clear()
            response.result()
            files = digests.of_files(folder, digests.files_of(folder, processes.index, processes.count))
            if wrong := digests.check_stored(folder, arrays):
                raise OSError(f"the disk gives back other arrays than it was given: {manifest.some(wrong)}")
            part = {"arrays": arrays, "files": files}
        except Exception as error:  # of whatever kind: the run goes on
            part = {"error": f"{type(error).__name__}: {error}"}
        finally:
            _ORBAX.release()
        try:
            parts = processes.gather(key, part)
            if parts is None:
                self._failure = part.get("error")
                return
            if errors := [each["error"] for each in parts if "error" in each]:
                raise OSError(errors[0])
            whole = parts[0]
            for each in parts[1:]:
                whole["files"] |= each["files"]
                for name, entry in each["arrays"].items():
                    whole["arrays"][name]["shards"] += entry["shards"]
            self.files.publish(folder, Manifest(step=step, data=facts, **whole))
        except Exception as error:
            self._failed(step, error)

    def _failed(self, step: int, error: Exception) -> None:
        text = str(error).replace(f"{self.folder}/", "")  # its paths may be longer than what happened
        reason = text.splitlines()[0][:300] if text else type(error).__name__
        self._failure = f"checkpoint {step} could not be saved: {reason}"
        if self._saved == step:
            self._saved = None
        before = self.latest
        kept = f"the last good one is {before}" if before is not None else "there is no other yet"
        self._note(f"{self._failure}; {kept}")
        if self._processes.leader:  # what was written of it takes room that the next one needs
            for left in self.folder.glob(f"{step}{SAVING}*"):
                shutil.rmtree(left, ignore_errors=True)

    def _broadcast(self, value: Callable[[], Any]) -> Any:
        """What process 0 finds, on every process."""
        self._asked += 1
        return self._processes.broadcast(f"checkpoints/{self._asked}", value)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Exception):  # whoever stops the process at once does not wait
            self.wait()


def _array_options() -> Any:
    """How arrays are written: uncompressed, each shard by its first holder.

    Weights hardly shrink, and packing them would take the cores from training. The first holder's copy is what is digested.
    """
    saving = ocp.options.ArrayOptions.Saving(use_compression=False, use_replica_parallel=False)
    return ocp.options.ArrayOptions(saving=saving)
