"""One run at a time where files cannot be locked, in a bucket say: an object that its owner goes on writing.

It is made only where there is none (`if_generation_match=0` in a bucket), and says who has made it. Its owner writes it again
every `BEAT_S`. Whoever finds it watches it: one that changes has a living owner and is refused; one that stays the same for
`STALE_S` is taken over, and so is one whose process is known to have ended.
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

from mupax import terminal
from mupax.disk import is_remote, plainly_named, storage_url
from mupax.errors import MupaxError
from mupax.train.checkpoints.folder import WorkdirError

BEAT_S = 10.0
STALE_S = 45.0
_SETTLED_S = 0.5
_LONG_S = 600.0
"""Since the last beat by its owner's clock, which may be wrong by minutes: longer, and nobody watches it."""


def _say(text: str) -> None:
    terminal.note(text)


class Owned:
    """The object while it is this process'; a context manager that gives it back.

    Args:
        folder: that it keeps for one run.
        name: of the object.
        lost: called, in a thread, with what to say when another has taken it over: this process was thought to be dead.
        note: told what is waited for and what was taken over.

    Raises:
        WorkdirError: another run has it.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        lost: Callable[[str], None],
        note: Callable[[str], None] = _say,
    ) -> None:
        self._folder, self._name, self._lost, self._note = folder, name, lost, note
        self._naming = contextlib.ExitStack()
        named = self._naming.enter_context(plainly_named(folder / name))
        self._store = _store(named.removesuffix(name), is_remote(folder))
        self._token = secrets.token_hex(8)
        entry = self._free()
        self._generation = self._write(entry.stamp.generation)
        if not is_remote(folder):
            time.sleep(_SETTLED_S)  # without locks two may write at once: the last one has it
        content = self._store.read(name).result().value
        if not self._generation or _owner(content)["token"] != self._token:
            raise self._in_use(content)
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _free(self) -> Any:
        """The object as it was when it was there for nobody."""
        entry = self._store.read(self._name).result()
        if entry.state != "value":
            return entry
        owner = _owner(entry.value)
        if not (gone := _ended(owner)) and time.time() - owner["at"] < _LONG_S:
            self._note(
                f"{self._folder} was last held by {owner['who']}; waiting up to {STALE_S:.0f} s for a sign of life"
            )
            until = time.monotonic() + STALE_S
            while time.monotonic() < until:
                time.sleep(min(1.0, BEAT_S / 4))
                now = self._store.read(self._name).result()
                if now.state != "value":
                    return now
                if now.value != entry.value:
                    raise self._in_use(now.value)
        why = "has ended" if gone else "gives no sign of life"
        self._note(f"{owner['who']}, which held {self._folder}, {why}; its lock is taken over")
        return entry

    def _write(self, generation: bytes) -> bytes:
        """Its new generation; empty where it is no longer of the one that it was read at."""
        machine = {
            "machine": _machine(),
            "pid": os.getpid(),
            "who": f"process {os.getpid()} on {socket.gethostname()}",
        }
        content = json.dumps({"token": self._token, "at": time.time(), **machine})
        return self._store.write(self._name, content, if_equal=generation).result().generation

    def _in_use(self, content: bytes) -> WorkdirError:
        return WorkdirError(
            f"the workdir {self._folder} is in use by another run ({_owner(content)['who']}); "
            "wait for it or stop it, or give --workdir another folder"
        )

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(Exception):  # of the network; another beat follows
                entry = self._store.read(self._name).result(timeout=BEAT_S)
                if entry.state == "value" and _owner(entry.value)["token"] != self._token:
                    who = _owner(entry.value)["who"]
                    self._lost(
                        f"the workdir {self._folder} was taken over by {who}, which did not hear of this run; it ends here"
                    )
                    return
                self._generation = self._write(entry.stamp.generation) or self._generation

    def __enter__(self) -> Owned:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        with contextlib.suppress(Exception):
            entry = self._store.read(self._name).result(timeout=BEAT_S)
            if entry.state == "value" and _owner(entry.value)["token"] == self._token:
                self._store.write(self._name, None, if_equal=entry.stamp.generation).result(
                    timeout=BEAT_S
                )
        self._naming.close()


def end_at_once(text: str) -> None:
    """End this process, without a step or a file more."""
    _say(f"error: {text}")
    os._exit(1)


@contextlib.contextmanager
def workdir_lock(
    folder: Path, name: str, lost: Callable[[str], None] = end_at_once
) -> Iterator[None]:
    """Keep a folder for this process alone while entered.

    Args:
        folder: to keep.
        name: of the object in it.
        lost: as `Owned` has it.

    Raises:
        WorkdirError: another run has it, or the object cannot be written.
    """
    try:
        owned = Owned(folder, name, lost)
    except MupaxError:
        raise
    except Exception as error:  # whatever tensorstore makes of the network
        reason = str(error).splitlines()[0][:200]
        raise WorkdirError(
            f"cannot lock the workdir {folder}: {reason}; give --workdir another folder"
        ) from error
    with owned:
        yield


def _store(folder: str, remote: bool) -> Any:
    """Open a folder, plainly named, for objects that are written if they have not changed."""
    import tensorstore as ts

    if remote:
        return ts.KvStore.open(storage_url(folder)).result()
    spec = {"driver": "file", "path": folder, "file_io_locking": {"mode": "none"}}
    return ts.KvStore.open(spec).result()


def _owner(content: bytes) -> dict[str, Any]:
    """Who wrote it; nobody known where a half of it is all there is."""
    kinds = {"token": "", "at": 0.0, "machine": "", "pid": 0, "who": "an unknown process"}
    try:
        owner = json.loads(content)
        return {name: type(default)(owner.get(name, default)) for name, default in kinds.items()}
    except (ValueError, TypeError, AttributeError, OverflowError):
        return kinds


def _ended(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this machine, and has ended."""
    if not _machine() or owner["machine"] != _machine() or owner["pid"] < 1:
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _machine() -> str:
    """This start of this machine, and what numbers its processes; empty where it does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
