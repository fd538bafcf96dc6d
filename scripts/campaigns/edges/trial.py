"""One trial of a campaign: a command starts, something unusual happens, and its end is judged."""

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
"""Seconds after a fault within which a command must have ended."""
FAULTS = ("lost", "silent", "hung", "traceback", "crash", "wrong")
"""Verdicts that a trial must not get. With one of them the command exits with 1."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_CXX_TRACE = re.compile(
    r"\*\*\* SIG|Fatal Python error|terminate called|core dumped", re.IGNORECASE
)


@dataclass(frozen=True)
class Outcome:
    """End of a trial.

    Attributes:
        verdict: `ok`, or one of `FAULTS`.
        detail: Short line on the end, such as an exit code or what is wrong.
    """

    verdict: str
    detail: str = ""


def right(is_right: bool, detail: str, otherwise: str = "wrong") -> Outcome:
    """Return the outcome `ok` if `is_right`, else an outcome with the verdict `otherwise`."""
    return Outcome("ok" if is_right else otherwise, detail)


@dataclass(frozen=True)
class Trial:
    """Named experiment of a campaign: a command starts, and something unusual happens.

    Attributes:
        name: Name in the file of results, unique in the campaign. It must not change from one run
            of the campaign to the next, because a trial with a result is not run again.
        group: Kind of the trial in the results, such as the command that it starts.
        run: Function that runs the trial in an empty folder and judges its end. The folder is
            removed afterwards.
    """

    name: str
    group: str
    run: Callable[[Path], Outcome]


@dataclass(frozen=True)
class Ended:
    """A command that has ended, or was ended because it took too long.

    Attributes:
        code: Exit code, negative for a signal; `None` if the command exceeded its time limit.
        output: Standard output and standard error together.
        seconds: Wall-clock time.
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
    """Run one `mupax` command to its end, or kill it after `seconds`.

    Args:
        environ: Variables in addition to those of this process.
        seconds: Time limit. Default: 240.
        cwd: Working directory. Default: the root of the repository.
    """
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
    """Start one `mupax` command on the CPU, whose two outputs go into one pipe."""
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
    """Let SIGINT raise KeyboardInterrupt, which a background job would ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def judge(ended: Ended, codes: Iterable[int]) -> Outcome:
    """Judge the end of a command by its exit code and output.

    Returns:
        `hung` after the time limit, `crash` or `traceback` if there was one, `wrong` for another
        exit code than `codes`, otherwise `ok`.
    """
    last_line = ""
    for line in ended.output.splitlines():
        if line.strip():
            last_line = line
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
