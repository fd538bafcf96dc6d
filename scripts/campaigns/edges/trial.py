"""One trial of a campaign: a command is started, something unusual happens, and its end is judged."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts import ROOT

BOUND_S = 60.0
"""A command that has not ended so long after its fault hangs."""
FAULTS = ("lost", "silent", "hung", "traceback", "crash", "wrong")
"""Verdicts that a trial must not get; the campaign's command exits with 1 if there is one."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_CXX_TRACE = re.compile(
    r"\*\*\* SIG|Fatal Python error|terminate called|core dumped", re.IGNORECASE
)


@dataclass(frozen=True)
class Outcome:
    """End of a trial.

    Attributes:
        verdict: `ok`, or one of `FAULTS`.
        detail: one short line: an exit code, a message, or what is wrong.
    """

    verdict: str
    detail: str = ""


def right(is_right: bool, detail: str, otherwise: str = "wrong") -> Outcome:
    """Return `ok` if something is right, and another verdict if it is not."""
    return Outcome("ok" if is_right else otherwise, detail)


@dataclass(frozen=True)
class Trial:
    """Something to try.

    Attributes:
        name: unique in its campaign, and the same in every session: a trial with a committed result is not run again.
        group: row of the table that the trial is counted in, such as the command that it starts.
        run: does it, in an empty folder that is removed afterwards.
    """

    name: str
    group: str
    run: Callable[[Path], Outcome]


@dataclass(frozen=True)
class Ended:
    """A command that has ended, or was ended because it took too long.

    Attributes:
        code: exit code, negative for a signal; None if the command was still running at its time limit.
        output: standard output and standard error together.
        seconds: wall-clock time.
    """

    code: int | None
    output: str
    seconds: float


def mupax(
    words: Sequence[str | bytes],
    environ: Mapping[str, str] | None = None,
    seconds: float = 4 * BOUND_S,
    cwd: Path = ROOT,
) -> Ended:
    """Run one `mupax` command to its end, and kill it after `seconds`."""
    began = time.monotonic()
    process = start(words, environ, cwd)
    try:
        output, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        code = None
    return Ended(code, output.decode(errors="replace"), time.monotonic() - began)


def start(
    words: Sequence[str | bytes], environ: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.Popen[bytes]:
    """Start one `mupax` command, whose two outputs go into one pipe.

    Ctrl-C is caught there as in a terminal, also where this process is a background job that ignores it.
    """
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "agg",
        **(environ or {}),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "mupax", *words],
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_catch_interrupts,
    )


def _catch_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def judge(ended: Ended, codes: Iterable[int]) -> Outcome:
    """Return the verdict on an exit code and on what was printed: `ok` if neither shows a fault.

    Args:
        codes: exit codes that are right.
    """
    last_line = next((line for line in reversed(ended.output.splitlines()) if line.strip()), "")
    detail = f"exit {ended.code}: {last_line[:160]}"
    if ended.code is None:
        return Outcome("hung", f"running after {ended.seconds:.0f} s: {last_line[:160]}")
    if (ended.code < 0 and -ended.code in CRASHES) or _CXX_TRACE.search(ended.output):
        return Outcome("crash", detail)
    if "Traceback (most recent call last)" in ended.output or "Exception ignored" in ended.output:
        return Outcome("traceback", detail)
    if ended.code not in set(codes):
        return Outcome("wrong", detail)
    return Outcome("ok", detail)
