"""What saving or loading failed of, in a line. Orbax says it in hundreds: each of its threads with a traceback of its own."""

from __future__ import annotations

import errno
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mupax import disk
from mupax.errors import MupaxFailure


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
