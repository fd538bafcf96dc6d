"""What a save failed of, in a line. Orbax says it in hundreds: each of its threads with a traceback of its own."""

from __future__ import annotations

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
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine 'OrbaxLayout", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _unraisable:
        sys.unraisablehook = partial(_unraisable, sys.unraisablehook)


def _unraisable(before: Callable[[Any], Any], what: Any) -> None:
    if not (isinstance(what.exc_value, RuntimeError) and str(what.exc_value) == "Event loop is closed"):
        before(what)


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
