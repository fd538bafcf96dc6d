"""Commands in forks of this process, which has everything imported: a start takes a second."""

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
    output: Path,
    # `int()` does nothing.
    prepare: Callable[[], object] = int,
    module: str = "mupax",
    errors: Path | None = None,
) -> int:
    """Run a module in a fork of this process, as `python -m MODULE WORDS` does.

    Args:
        output: File for standard output, which is replaced if it exists.
        prepare: Function that is called in the fork before the module runs. Default: nothing.
        errors: File for standard error. Default: `output`.

    Returns:
        Process ID of the fork.
    """
    pid = os.fork()
    if pid:
        return pid

    # The descriptors, not `sys.stdout`, because libraries in C print, too.
    os.dup2(os.open(output, NEW_FILE), 1)
    os.dup2(1 if errors is None else os.open(errors, NEW_FILE), 2)
    # A shell starts background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = words
    code = 1
    try:
        prepare()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = exit_code(stop)
    except BaseException:
        traceback.print_exc()

    # Exit as the interpreter does, but without unwinding the parent's `with` blocks: those would
    # remove its folders and stop its servers.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def exit_code(stop: SystemExit) -> int:
    """Return the exit code with which the interpreter ends after `stop`."""
    if stop.code is None:
        return 0
    # Anything else, such as a message, is printed by the interpreter.
    return stop.code if isinstance(stop.code, int) else 1


def wait(pid: int, seconds: float) -> int | None:
    """Wait for a child process, and return its exit code.

    After `seconds`, kill the process and return `None`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() <= deadline:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    # A killed child is a zombie until somebody waits for it.
    os.waitpid(pid, 0)
    return None


def call_in_fork(function: Callable[[], Any]) -> Any:
    """Call a function in a fork of this process, and return its result, which must be JSON.

    Reading a bucket starts threads. A process with threads must not fork, so the read happens here.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(writer, "w") as stream:
                json.dump(function(), stream)
            # `_exit` does not return, so the other one comes only after an error.
            os._exit(0)
        finally:
            os._exit(1)
    # As long as this process holds the end for writing, the read below does not end.
    os.close(writer)
    with os.fdopen(reader) as answer:
        content = answer.read()
    os.waitpid(pid, 0)
    return json.loads(content)
