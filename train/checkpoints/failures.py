"""What saving or loading failed of, in a line. Orbax says it in hundreds: each of its threads with a traceback of its own."""

from __future__ import annotations

import errno
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mupax import disk
from mupax.errors import MupaxFailure
from mupax.paths import url
from mupax.train.checkpoints import manifest

_ENDING_S = 5.0
"""How long threads of a failed save may take to end: what they still write would come back after it is deleted."""
_STATE = "state"  # folder of the arrays inside a checkpoint


def quiet() -> None:
    """Keep from the terminal what orbax tells of every save and failure, and tensorstore to an event loop that has ended."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _unraisable:
        sys.unraisablehook = partial(_unraisable, sys.unraisablehook)


def _unraisable(before: Callable[[Any], Any], what: Any) -> None:
    if not str(what.exc_value).startswith(("Event loop is closed", "Encountered error while reading array")):
        before(what)


def end_threads() -> None:
    """End the threads of a save that has failed. Orbax lets them wait for minutes for files that will not come.

    The interpreter joins these threads at its end, so that a process would hang which has said why it failed. Nobody else
    may save meanwhile.
    """
    from orbax.checkpoint._src.futures import future

    # No public interface reaches the threads of a `save_async` that has raised.
    threads = [thread for thread in threading.enumerate() if isinstance(thread, future._SignalingThread)]
    for thread in threads:
        thread.cancel()
        future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
    until = time.monotonic() + _ENDING_S
    for thread in threads:
        # Its own `join` raises what the thread has failed of.
        threading.Thread.join(thread, max(0.0, until - time.monotonic()))


def loaded(checkpoint: Path, abstract: Any) -> Any:
    """The arrays of a checkpoint whose files are verified, by orbax.

    Args:
        checkpoint: its folder.
        abstract: what to load, which fits.

    Raises:
        OSError: the disk cannot read it. Orbax says then that there is no checkpoint, or another one.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        return ocp.load(str(checkpoint), abstract)
    except Exception as error:
        if not isinstance(error, ValueError | OSError) and type(error) is not Exception:  # which is what orbax raises
            raise
        raise disk.system_error(error) or OSError(errno.EIO, str(error).splitlines()[0][:200]) from error


def reason(error: Exception, folder: Path) -> str:
    """Why a save failed, in a line.

    Args:
        error: of it.
        folder: of the checkpoints, whose paths may be longer than what happened.
    """
    cause = disk.system_error(error)
    text = f"{type(error).__name__}: {error}"
    if cause is not None or isinstance(error, MupaxFailure):
        text = str(cause.strerror if cause else error)
    return text.replace(f"{folder}/", "").splitlines()[0][:300]


def damaged_arrays(folder: Path, arrays: Mapping[str, dict[str, Any]]) -> list[str]:
    """Names of the arrays whose files hold something else at two reads, made without a model or devices.

    Args:
        folder: of the checkpoint.
        arrays: as its manifest has them (`describe_arrays`).

    Raises:
        DiskError: the disk cannot read them.
    """
    import tensorstore as ts

    base = f"{url(folder)}/{_STATE}/"
    patience = disk.Patience()

    def same(name: str, entry: Mapping[str, Any], context: Any) -> bool:
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        try:
            stored = ts.open(spec, open=True, context=context).result()
            return list(stored.shape) == entry["shape"] and all(
                manifest.array_digest(stored[tuple(slice(*axis) for axis in index)].read().result()) == digest
                for index, digest in entry["shards"]
            )
        except Exception as error:  # whatever the library makes of damage
            if isinstance(disk.system_error(error), (*disk.ABSENT, type(None))):
                return False
            raise

    wrong = list(arrays)
    for context in (ts.Context(), ts.Context()):  # each with a cache of its own
        look = partial(same, context=context)
        good = manifest.in_threads(lambda name, look=look: patience(lambda: look(name, arrays[name]), folder), wrong)
        wrong = [name for name, ok in zip(wrong, good, strict=True) if not ok]
    return wrong
