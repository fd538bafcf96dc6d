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
from mupax.paths import plainly_named, remove_tree, storage_url, without_stand_ins
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
        with plainly_named(checkpoint) as name:
            return ocp.load(name, abstract)
    except Exception as error:
        if not isinstance(error, ValueError | OSError) and type(error) is not Exception:  # which is what orbax raises
            raise
        text = without_stand_ins(str(error)).splitlines()[0][:200]
        raise disk.system_error(error) or OSError(errno.EIO, text) from error


def metadata(checkpoint: Path) -> Any:
    """Return the arrays of a checkpoint without their values: a tree of shapes and types, by orbax."""
    from orbax.checkpoint import v1 as ocp

    with plainly_named(checkpoint) as name:
        return ocp.metadata(name).metadata


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
    return without_stand_ins(text).replace(f"{folder}/", "").splitlines()[0][:300]


def damaged_arrays(folder: Path, arrays: Mapping[str, dict[str, Any]]) -> list[str]:
    """Names of the arrays whose files hold something else at two reads, made without a model or devices.

    Args:
        folder: of the checkpoint.
        arrays: as its manifest has them (`describe_arrays`).

    Raises:
        DiskError: the disk cannot read them.
    """
    with plainly_named(folder) as name:
        return _damaged_arrays(folder, storage_url(f"{name}/{_STATE}/"), arrays)


def _damaged_arrays(folder: Path, base: str, arrays: Mapping[str, dict[str, Any]]) -> list[str]:
    """Do what `damaged_arrays` does, by the URL of the arrays."""
    import tensorstore as ts

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


def check_storage(folder: Path, name: str) -> None:
    """Write an array into a folder and read it back, by the libraries that save checkpoints there.

    Args:
        folder: exists.
        name: of what is written in it, and deleted again.

    Raises:
        OSError: something else is read than was written, or nothing is where it should be.
        Exception: whatever tensorstore raises.
    """
    import numpy as np
    import tensorstore as ts

    probe = folder / name
    remove_tree(probe)
    try:
        with plainly_named(probe) as named:
            kvstore = {"driver": "ocdbt", "base": storage_url(f"{named}/"), "path": "array/"}
            spec = {"driver": "zarr3", "kvstore": kvstore}
            content = np.arange(8, dtype=np.uint8)
            array = ts.open({**spec, "metadata": {"shape": [8], "data_type": "uint8"}}, create=True).result()
            array.write(content).result()
            again = ts.open(spec, open=True, context=ts.Context()).result().read().result()
        if not np.array_equal(again, content) or "manifest.ocdbt" not in disk.names(probe):
            raise OSError(errno.EIO, "what was written is not what is read")
    finally:
        remove_tree(probe)
