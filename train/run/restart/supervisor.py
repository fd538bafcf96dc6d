"""A run that is started again after a crash, from its newest good checkpoint.

Not started again: a run that is done, has bad input, was told to stop, or fails twice at the same step. Where there are several
processes, each has a supervisor; they wait for each other's rows of attempts, so that none joins what is left of the last one.

The supervisor's child gets its signals and its standard error is passed on. It does not outlive its parent.

An attempt and what became of it is a row of the workdir's `attempts.jsonl`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mupax import terminal
from mupax.disk import is_remote, path_of
from mupax.train.config.run import Config
from mupax.train.run.restart.memory import VARIABLE, Memory, Reached

FILE = "attempts.jsonl"
"""Of process 0, or the only one; `attempts-I.jsonl` is that of process I."""
_NEAR = 2
"""Steps no further apart may be the same one: as many may be done without the host knowing (`start.IN_FLIGHT`)."""
_WORDS = {
    signal.SIGKILL: "by a person, a scheduler or the kernel",
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGABRT: "aborted by a library",
    signal.SIGBUS: "a bus error",
}

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
"""Passed on to the run, which saves and ends by them."""
_TAIL = 16 * 2**10
"""Bytes of standard error that are searched for the run's last words."""
_AT_ONCE_S = 10.0
"""How long a run may take to end after a second signal."""

FINAL = frozenset({0, 2, 128 + signal.SIGPIPE, *(128 + number for number in SIGNALS)})
"""Exit codes that ask for nothing more: done, bad input, stopped."""
_LONGEST_S = 60.0
"""Of the waits before another attempt; the first is a second, each further one twice as long."""
_ENDING_S = 30
"""How long the other processes may take to end, once they have noticed."""


@dataclasses.dataclass(frozen=True)
class RestartAttempt:
    """One run of the child, from its start to its end.

    Attributes:
        number: from 1.
        code: as `subprocess` has it: negative where a signal killed it.
        out_of_memory: whether the kernel killed something for memory meanwhile.
        reached: how far it came.
        last: its last line on standard error, or its last that says `error:`.
        began: seconds since the epoch.
        ended: seconds since the epoch.
    """

    number: int
    code: int
    out_of_memory: bool
    reached: Reached
    last: str
    began: float
    ended: float

    @property
    def exit_code(self) -> int:
        """Exit code as a shell has it: 128 + its number for a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        number = signal.Signals(-self.code)
        out_of_memory = number is signal.SIGKILL and self.out_of_memory
        why = "out of memory" if out_of_memory else _WORDS.get(number, "")
        return f"killed by {number.name}" + (f" ({why})" if why else "")

    def failed_as(self, other: RestartAttempt) -> bool:
        """Whether both ended at the same step, or before any with the same words."""
        if self.reached.step < 0 or other.reached.step < 0:
            return (self.reached.step, self.code, self.last) == (
                other.reached.step,
                other.code,
                other.last,
            )
        return abs(self.reached.step - other.reached.step) <= _NEAR

    def say(self, then: str) -> None:
        """One line on standard error; what the run itself said stands above it.

        Args:
            then: what follows from it.
        """
        who = f"process {self.reached.process}: " if self.reached.processes > 1 else ""
        where = (
            f"after step {self.reached.step}" if self.reached.step >= 0 else "before its first step"
        )
        took = datetime.timedelta(seconds=round(self.ended - self.began))
        text = f"{who}attempt {self.number} ended {where} and {took}: {self.ending}; {then}"
        terminal.note(text)

    def record(self, config: Config) -> None:
        """Append it to the file, where the run has a workdir yet; a place that does not take it is said, no more."""
        began, ended = (_time(seconds) for seconds in (self.began, self.ended))
        progress = {
            name: value
            for name, value in self.reached._asdict().items()
            if value >= 0 and name != "processes"
        }
        row = {
            "attempt": self.number,
            "began": began,
            "ended": ended,
            "code": self.code,
            "ending": self.ending,
        }
        line = (
            json.dumps({**row, **progress, "host": socket.gethostname(), "last": self.last}) + "\n"
        )
        with _cautions():
            folder = _folder(config)
            path = folder / (
                FILE if self.reached.process < 1 else f"attempts-{self.reached.process}.jsonl"
            )
            if not folder.is_dir():
                return
            if is_remote(path):  # an object is written whole
                path.write_text((path.read_text() if path.exists() else "") + line)
            else:
                with path.open("a") as file:
                    file.write(line)


def ended_since(config: Config, began: float) -> int:
    """How many processes have recorded the end of an attempt since.

    Args:
        config: of the run.
        began: seconds since the epoch.
    """
    count = 0
    with _cautions():
        for path in _folder(config).glob("attempts*.jsonl"):
            with contextlib.suppress(
                ValueError, RecursionError, KeyError, IndexError, TypeError
            ):  # half a row
                count += json.loads(path.read_text().splitlines()[-1])["ended"] >= _time(began)
    return count


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def _folder(config: Config) -> Path:
    return path_of(config.workdir or f"runs/{config.recipe}")


@contextlib.contextmanager
def _cautions() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any storage
        terminal.note(f"caution: {FILE} is not written or read: {error}")


class Listener:
    """Hears the signals of this process while entered, in the main thread, and ends its waits by them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._ear, self._mouth = socket.socketpair()
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Listener:
        for end in (self._ear, self._mouth):
            end.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        # What `nohup` or a background job has ignored, this process and its child ignore.
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._ear.close()
        self._mouth.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def wait(self, seconds: float, *files: int) -> bool:
        """Wait until a signal comes or one of the files can be read, not for longer; whether there was a signal, now or before."""
        with selectors.DefaultSelector() as selector:
            for file in (self._ear.fileno(), *files):
                selector.register(file, selectors.EVENT_READ)
            selector.select(seconds)
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(64)
        return bool(self.received)


def attempt(number: int, command: Sequence[str], listener: Listener) -> RestartAttempt:
    """How a command went, run to its end.

    Args:
        number: of the attempt.
        command: words of the run.
        listener: whose signals are passed on; after the second one the run ends soon, whatever it is at.
    """
    began, kills, memory, last = time.time(), _kills_for_memory(), Memory(), b""
    try:
        with subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            env={**os.environ, VARIABLE: str(memory.descriptor)},
            pass_fds=[memory.descriptor],
            process_group=0,  # Ctrl-C then comes once: from here
            preexec_fn=_ends_with_parent() if sys.platform == "linux" else None,
        ) as child:
            assert child.stderr is not None
            pipe, passed, kill_at = child.stderr.fileno(), 0, float("inf")
            files = [pipe]
            os.set_blocking(pipe, False)
            while child.poll() is None:
                listener.wait(0.5, *files)
                for signal_number in listener.received[passed:]:
                    child.send_signal(signal_number)
                    passed += 1
                    kill_at = time.monotonic() + _AT_ONCE_S if passed > 1 else kill_at
                if time.monotonic() > kill_at:
                    child.kill()
                text, more = _passed_on(pipe)
                last = (last + text)[-_TAIL:]
                files = files if more else []
                if not more:
                    time.sleep(0.02)  # it has closed its standard error, mostly because it ends
            last = (last + _passed_on(pipe)[0])[-_TAIL:]
        reached = memory.reached
    finally:
        memory.close()
    words = _last_words(last.decode(errors="replace"))
    return RestartAttempt(
        number, child.returncode, _kills_for_memory() > kills, reached, words, began, time.time()
    )


@functools.cache
def _ends_with_parent() -> Callable[[], object]:
    """What a child calls before it becomes the run: the kernel then sends it SIGTERM when this process has died in whatever way."""
    prctl, death_signal = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG
    return lambda: prctl(death_signal, int(signal.SIGTERM))


def _passed_on(pipe: int) -> tuple[bytes, bool]:
    """What could be read, and was written to standard error; and whether more may come."""
    text = b""
    try:
        while piece := os.read(pipe, 65536):
            text += piece
            with contextlib.suppress(
                OSError, ValueError
            ):  # a terminal that was closed must not end the run
                sys.stderr.write(piece.decode(errors="replace"))
                sys.stderr.flush()
    except BlockingIOError:
        return text, True
    return text, False


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else ""
    )[:300]


def _kills_for_memory() -> int:
    """How often the kernel has killed a process for memory; 0 where it does not say."""
    with contextlib.suppress(OSError):
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
    return 0


def run(config: Config, words: Sequence[str], most: int) -> int:
    """Train in a child process, and again after a crash; returns the exit code of the last attempt.

    Args:
        config: of the run.
        words: its command line, after `mupax`.
        most: attempts after the first.
    """
    command = _without(_command_line(words), "--restart")
    before = None
    with Listener() as listener:
        for number in range(1, most + 2):
            last = attempt(number, command, listener)
            # A folder that was refused is another run's, or was not meant to be gone on in.
            command += (
                ["--resume"] if last.reached.process >= 0 and "--resume" not in command else []
            )
            if (
                last.reached.start >= 0
            ):  # it has gone back already; to do so again would set its own steps aside
                command = _without(command, "--resume-from")
            if last.exit_code != 2 and "--resume" in command:
                last.record(config)
            if last.exit_code in FINAL or listener.received:
                break
            if before is not None and last.failed_as(before):
                last.say(
                    f"attempt {number - 1} ended there too, so it is not started again; see {FILE} in the workdir"
                )
                break
            if number > most:
                last.say(f"--restart {most} allows no other; see {FILE} in the workdir")
                break
            wait = min(2.0 ** (number - 1), _LONGEST_S)
            last.say(f"starting again in {wait:.0f} s ({number} of {most})")
            if listener.wait(wait) or _others_still_run(config, last, listener):
                return 128 + listener.received[0]
            before = last
    return last.exit_code


def _command_line(words: Sequence[str]) -> list[str]:
    """Return the command of this process.

    Args:
        words: its words after `mupax`, of which `train` is the first. `python -m train` and a program that
            calls `mupax.train.__main__.main` have it not among theirs.
    """
    started = sys.orig_argv
    for own in (words, words[1:]):
        if own and started[-len(own) :] == [*own]:
            return [sys.executable, *started[1:]]
    return [sys.executable, "-m", "mupax", *words]


def _without(words: Sequence[str], flag: str) -> list[str]:
    """The words without a flag and its value."""
    pairs = zip(["", *words], words, strict=False)
    return [
        word
        for before, word in pairs
        if flag not in (before, word) and not word.startswith(f"{flag}=")
    ]


def _others_still_run(config: Config, last: RestartAttempt, listener: Listener) -> bool:
    """Wait until every process has recorded its end, or must have ended; whether a signal came first."""
    count, until = (
        last.reached.processes,
        time.monotonic() + config.distributed.heartbeat_seconds + _ENDING_S,
    )
    while count > 1 and time.monotonic() < until and ended_since(config, last.began) < count:
        if listener.wait(0.5):
            return True
    return False
