"""Commands in forks of this process, which has everything imported that they import, so that a start takes a second."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def start(
    words: Sequence[str],
    out: Path,
    sick: Callable[[], object] = int,
    module: str = "mupax",
    errors: Path | None = None,
) -> int:
    """Start a command in a fork, and return its process ID.

    Args:
        words: of its command line.
        out: file for its output.
        sick: called in the fork before the command starts.
        module: what is run, as by `python -m`.
        errors: file for its standard error, where that is not `out`.
    """
    if pid := os.fork():
        return pid
    os.dup2(os.open(out, NEW_FILE), 1)
    os.dup2(1 if errors is None else os.open(errors, NEW_FILE), 2)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job starts with it ignored
    sys.argv[1:] = words
    code = 1
    try:
        sick()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    # As the interpreter ends, and not through the `with` blocks of the parent, whose folders and servers they would end.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """Return the exit code of a process, or None after killing it where that takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() <= until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def apart(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own: a bucket is read by threads, which no fork may have before it."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            with os.fdopen(writer, "w") as out:
                json.dump(function(), out)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as answer:
        content = answer.read()
    os.waitpid(pid, 0)
    return json.loads(content)
