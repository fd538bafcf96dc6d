"""Trials of untrusted files: small ones that decompress to much more, damaged and large good ones.

A command reads each file as a user would, in a process forked from one that has everything
imported. The process may not take more than 1 GB above what it has at its beginning.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.campaigns import forks
from scripts.campaigns.edges.bombs import conversations, images, records, tokenizers, weights
from scripts.campaigns.edges.bombs.sample import Sample
from scripts.campaigns.edges.trial import BOUND_S, Ended, Outcome, Trial, judge

PEAK_MB = 1000
"""MB that a file of less than 10 MB may take above the idle process."""
_ADDRESS_SPACE = 4 * 2**30
"""Bytes of address space that a reader may add. A reader that asks for more gets a MemoryError."""
_SMALL_BYTES = 10 * 2**20


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return one trial for each sample. The arguments are not used."""
    del shared, seed
    planned = []
    for module in (records, images, tokenizers, conversations, weights):
        for sample in module.samples():
            planned.append(Trial(sample.name, sample.group, _tried(sample)))
    return planned


def _tried(sample: Sample) -> Callable[[Path], Outcome]:
    """Return a function for `Trial.run` that makes a sample, reads it, and judges the end."""

    def run(folder: Path) -> Outcome:
        prepare()
        sample.make(folder)
        size = 0
        for file in folder.rglob("*"):
            if file.is_file() and not file.is_symlink():
                size += file.stat().st_size
        read = in_process(lambda: sample.read(folder), folder / "output.txt")
        return verdict(sample, read, size)

    return run


@dataclass(frozen=True)
class Read:
    """End of a process that read a file.

    Attributes:
        ended: Exit code and output.
        peak_mb: Growth of the resident memory from its beginning to its peak, in MiB; `None` if
            the process was killed.
    """

    ended: Ended
    peak_mb: int | None


def verdict(sample: Sample, read: Read, size: int) -> Outcome:
    """Judge the end of a reader: its exit code, its output and its memory.

    Args:
        size: Size of the sample in bytes.
    """
    outcome = judge(read.ended, sample.codes)
    detail = f"{size / 1e6:.2f} MB, peak {read.peak_mb} MB; {outcome.detail}"
    if outcome.verdict != "ok":
        return Outcome(outcome.verdict, detail)
    if sample.says not in read.ended.output:
        return Outcome("wrong", f"does not say {sample.says}; {detail}")
    if read.peak_mb is None or (read.peak_mb > PEAK_MB and size < _SMALL_BYTES):
        return Outcome("wrong", f"too much memory: {detail}")
    return Outcome("ok", detail)


def prepare() -> None:
    """Import what readers import, so that a fork has only the file to read."""
    # In a fork, tokenizers prints a warning unless its variable is set.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    import datasets  # noqa: F401  # pyright: ignore[reportMissingImports]
    import jinja2.sandbox  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import tokenizers  # noqa: F401

    import mupax.train.data.sources.cifar5m
    import mupax.train.data.sources.streams
    import mupax.train.data.streams.hub
    import mupax.train.reuse.huggingface.command
    import mupax.train.reuse.source  # noqa: F401


def in_process(read: Callable[[], int], log: Path) -> Read:
    """Call a reader in a fork of this process, and return its end and its peak of memory.

    Args:
        read: Function that reads a file and returns an exit code.
        log: File for the output. The peak is written beside it.
    """
    peak = log.with_suffix(".peak")
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _read_and_exit(read, log, peak)
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    code: int | None = os.waitstatus_to_exitcode(status)
    # The alarm means that the reader took too long, which is judged as a hang.
    if code == -signal.SIGALRM:
        code = None
    output = log.read_text(errors="replace") if log.exists() else ""
    peak_mb = int(peak.read_text()) if peak.exists() else None
    return Read(Ended(code, output, seconds), peak_mb)


def _read_and_exit(read: Callable[[], int], log: Path, peak: Path) -> None:
    """Limit memory and time of this process, call a reader, and exit with its code.

    Args:
        peak: File to which the growth of resident memory is written, in MiB.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Twice the bound, because other processes may use the machine.
    signal.alarm(int(2 * BOUND_S))
    # This resets the peak of memory (VmHWM).
    Path("/proc/self/clear_refs").write_text("5")
    idle = _status_mb("VmRSS")
    limit = _status_mb("VmSize") * 2**20 + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    code = 1
    try:
        code = read()
    except SystemExit as stop:
        code = forks.exit_code(stop)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    peak.write_text(str(_status_mb("VmHWM") - idle))
    # A usual exit would do what the campaign has registered for its own end.
    os._exit(code)


def _status_mb(field: str) -> int:
    """Return a field of /proc/self/status in MiB; 0 if there is none."""
    match = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(match[1]) // 1024 if match else 0
