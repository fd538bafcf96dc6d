"""A save of several processes: one that cannot write tells the others, which wait for it inside orbax."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mupax.errors import MupaxFailure
from mupax.train.checkpoints import failures
from mupax.train.parallel.processes import Processes

MOST_FAILED = 2
"""Saves of several processes that may fail one after another: the disk of one host does not get well by waiting."""
_POLL_S = 0.5
"""How often a process that saves looks whether another cannot."""
_UNSAVED = "mupax/unsaved"


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


def tell(error: Exception, folder: Path, processes: Processes, key: str) -> str:
    """What to say of a save that failed, which the other processes are told unless one of them has failed before.

    Args:
        error: what this process failed of.
        folder: of the checkpoints.
        processes: of the run.
        key: of the save, as the others give it to `wait`.
    """
    if isinstance(error, ElsewhereError):
        return str(error)
    reason = f"{processes.name}{failures.reason(error, folder)}"
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
