"""Lock of a folder where files cannot be locked, as in a bucket: an object that its owner rewrites.

The object is made only if there is none (`if_generation_match=0` in a bucket), and says who made
it. The owner writes it again every `BEAT_S`. Another process that finds the object watches it. If
it changes, the owner is alive and the process is refused. If it stays the same for `STALE_S`, or if
its owner is known to have ended, the process takes it over.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mupax import MupaxError, terminal
from mupax.disk import is_remote, plainly_named, storage_url
from mupax.train.checkpoints.folder import WorkdirError

BEAT_S = 10.0
"""Seconds between two writes of an owner."""
STALE_S = 45.0
"""Seconds without a write after which an object may be taken over."""
_SETTLED_S = 0.5
"""Seconds after a write until a process reads which of two simultaneous writers got the lock."""
_LONG_S = 600.0
"""Age of the last write, in seconds, from which the lock is taken over without waiting.

The age is by the owner's clock, which may be wrong by minutes."""


class Owned:
    """Context manager of a lock: an object that a thread of this process rewrites every `BEAT_S`.

    The object is a file, or an object in a bucket. The constructor takes the lock. It waits up to
    `STALE_S` seconds for a sign of life if another process may still own the object, and otherwise
    takes the object over. Leaving the context ends the thread and deletes the object, unless
    another process owns the object by then.

    Args:
        folder: Folder that is locked for one run.
        name: Name of the object in the folder.
        on_lost: Function called in the thread, with a message, when another process has taken the
            object over because it heard nothing from this one.
        log: Function that prints a line when this process waits for an owner or replaces one. By
            default the line goes to standard error.

    Raises:
        WorkdirError: The owner is alive, or another process took the object at the same time.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        on_lost: Callable[[str], None],
        log: Callable[[str], None] = terminal.note,
    ) -> None:
        self._folder = folder
        self._name = name
        self._on_lost = on_lost
        self._log = log
        self._naming = contextlib.ExitStack()
        plain_name = self._naming.enter_context(plainly_named(folder / name))
        self._store = _store(plain_name.removesuffix(name), is_remote(folder))
        self._token = secrets.token_hex(8)

        entry = self._free()
        # Write only if the object is unchanged since it was read. A bucket guarantees that. On a
        # file system without locks, two processes may both succeed.
        self._generation = self._write(entry.stamp.generation)
        if not is_remote(folder):
            time.sleep(_SETTLED_S)  # if two processes have written, the later one gets the lock
        content = self._store.read(name).result().value
        if not self._generation or _owner(content)["token"] != self._token:
            raise self._in_use(content)
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _free(self) -> Any:
        """Wait until no living process owns the object, and return the object's entry in the store.

        If the owner is not known to have ended and has written within `_LONG_S` seconds, wait up to
        `STALE_S` seconds for it to write again. Print a line about an owner that is replaced. The
        entry has no value if there is no object.

        Raises:
            WorkdirError: The owner has written again, so it is alive.
        """
        entry = self._store.read(self._name).result()
        if entry.state != "value":
            return entry
        owner = _owner(entry.value)
        has_ended = _has_ended(owner)
        if not has_ended and time.time() - owner["at"] < _LONG_S:
            self._log(
                f"{self._folder} was last held by {owner['who']}; waiting up to {STALE_S:.0f} s "
                "for a sign of life"
            )
            deadline = time.monotonic() + STALE_S
            while time.monotonic() < deadline:
                time.sleep(min(1.0, BEAT_S / 4))
                current = self._store.read(self._name).result()
                if current.state != "value":
                    return current
                if current.value != entry.value:
                    raise self._in_use(current.value)
        why = "has ended" if has_ended else "gives no sign of life"
        self._log(f"{owner['who']}, which held {self._folder}, {why}; its lock is taken over")
        return entry

    def _write(self, generation: bytes) -> bytes:
        """Write this process as the owner into the object, if it still has this generation.

        Args:
            generation: Version of the object in the store when it was read.

        Returns:
            New generation, or `b""` if another process has written the object meanwhile.
        """
        content = {
            "token": self._token,
            "at": time.time(),
            "machine": _machine(),
            "pid": os.getpid(),
            "who": f"process {os.getpid()} on {socket.gethostname()}",
        }
        written = self._store.write(self._name, json.dumps(content), if_equal=generation)
        return written.result().generation

    def _in_use(self, content: bytes) -> WorkdirError:
        """Return an error that the folder is in use by the owner that `content` names."""
        return WorkdirError(
            f"the workdir {self._folder} is in use by another run ({_owner(content)['who']}); "
            "wait for it or stop it, or give --workdir another folder"
        )

    def _beat(self) -> None:
        """Write the object every `BEAT_S` seconds until the context ends.

        If another process owns the object, call `on_lost` with a message and return. Errors of the
        network are ignored.
        """
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(Exception):  # after a network error the next beat tries again
                entry = self._store.read(self._name).result(timeout=BEAT_S)
                if entry.state == "value" and _owner(entry.value)["token"] != self._token:
                    owner = _owner(entry.value)["who"]
                    self._on_lost(
                        f"the workdir {self._folder} was taken over by {owner}, which did not hear "
                        "of this run; it ends here"
                    )
                    return
                # `_write` returns b"" if another process wrote at the same time. The next beat
                # reads the object, and so finds out whether it has a new owner.
                self._generation = self._write(entry.stamp.generation) or self._generation

    def __enter__(self) -> Owned:
        return self

    def __exit__(self, *exception: object) -> None:
        self._released.set()
        # Without network the object stays, and the next run waits `STALE_S` for it.
        with contextlib.suppress(Exception):
            entry = self._store.read(self._name).result(timeout=BEAT_S)
            if entry.state == "value" and _owner(entry.value)["token"] == self._token:
                # `if_equal`, so that an object that another process has just taken over stays.
                deleted = self._store.write(self._name, None, if_equal=entry.stamp.generation)
                deleted.result(timeout=BEAT_S)
        self._naming.close()


def end_at_once(text: str) -> None:
    """Print an error on standard error, and end this process at once with exit code 1.

    No `finally` block and no exit handler runs, so nothing more is written.
    """
    terminal.note(f"error: {text}")
    # Not `sys.exit`: another run owns the folder, and no handler may write into it.
    os._exit(1)


@contextlib.contextmanager
def workdir_lock(
    folder: Path, name: str, on_lost: Callable[[str], None] = end_at_once
) -> Iterator[None]:
    """Lock a folder for this process while entered, by an object that is rewritten (`Owned`).

    Entering may wait up to `STALE_S` seconds for a sign of life from an earlier owner.

    Args:
        folder: Folder in a bucket, or on a file system that cannot lock files.
        name: Name of the object in the folder that serves as the lock.
        on_lost: Function called when another process has taken the lock over, as `Owned` calls it.
            By default this process ends.

    Raises:
        WorkdirError: Another run has the folder, or the object cannot be written.
    """
    try:
        owned = Owned(folder, name, on_lost)
    except MupaxError:
        raise
    except Exception as error:  # tensorstore raises many types of errors if the network fails
        reason = str(error).splitlines()[0][:200]
        raise WorkdirError(
            f"cannot lock the workdir {folder}: {reason}; give --workdir another folder"
        ) from error
    with owned:
        yield


def _store(folder: str, remote: bool) -> Any:
    """Open a folder as a tensorstore key-value store, which takes writes with a condition.

    A write with `if_equal` fails if another process has changed the value meanwhile.

    Args:
        folder: Plain name (`plainly_named`), with the separator at its end.
        remote: True for a folder in a bucket.
    """
    import tensorstore as ts

    if remote:
        return ts.KvStore.open(storage_url(folder)).result()
    # Without tensorstore's own file locks: `Owned` is for file systems that cannot lock files.
    spec = {"driver": "file", "path": folder, "file_io_locking": {"mode": "none"}}
    return ts.KvStore.open(spec).result()


def _owner(content: bytes) -> dict[str, Any]:
    """Return the fields `token`, `at`, `machine`, `pid` and `who` of a lock object's owner.

    `token` is random and names one `Owned`, `at` is the time of the last write in seconds since the
    epoch, `machine` is the result of `_machine`, and `who` describes the process in words. A
    missing field gets a default. A damaged object gives the defaults alone, whose `who` is "an
    unknown process".
    """
    unknown = {"token": "", "at": 0.0, "machine": "", "pid": 0, "who": "an unknown process"}
    try:
        fields = json.loads(content)
        owner: dict[str, Any] = {}
        for name, default in unknown.items():
            # Convert each value to the type of its default: anyone may have written the object, and
            # callers calculate with `at` and `pid`.
            owner[name] = type(default)(fields.get(name, default))
        return owner
    except (ValueError, TypeError, AttributeError, OverflowError):
        return unknown


def _has_ended(owner: dict[str, Any]) -> bool:
    """Return whether the owner was a process of this machine and has ended.

    False for a process of another machine or container, about which nothing is known.
    """
    # Another machine or container may use the same process id for another process.
    if not _machine() or owner["machine"] != _machine() or owner["pid"] < 1:
        return False
    try:
        os.kill(owner["pid"], 0)  # sends nothing, and raises if there is no such process
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # a process of another user, or no process id at all
        return False
    return False


def _machine() -> str:
    """Return an id of this boot of the machine and of this process' PID namespace.

    A process id is unique only within both. "" on systems without `/proc`.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
