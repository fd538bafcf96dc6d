"""Supervisor of `--restart N`: runs training in a child process, again after a crash.

A new attempt goes on from the newest good checkpoint. A run is not started again if it is done, has
bad input, was told to stop, or has failed twice at the same step. Each process of a run has a
supervisor of its own. Supervisors wait until all have recorded the end of an attempt, so that none
joins processes that remain from the last one.

The child gets the supervisor's signals, and its standard error is passed on. It does not outlive
its parent. Each attempt is a row of `attempts.jsonl` in the workdir.
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
from typing import Any, NamedTuple

from mupax import terminal
from mupax.disk import is_remote, path_of
from mupax.train.config.run import Config
from mupax.train.parallel.processes import Insistence
from mupax.train.run.restart.memory import VARIABLE, Memory, Reached

FILE = "attempts.jsonl"
"""File in the workdir in which process 0 records its attempts at the run.

Process I > 0 has a file `attempts-I.jsonl`.
"""
_SAME_STEP = 2
"""Largest difference of the last seen steps of two attempts that count as failed at the same step.

The seen steps may differ although the failing step is the same, because up to `start.IN_FLIGHT`
later steps are done before the host sees them.
"""
_WORDS = {
    signal.SIGKILL: "by a person, a scheduler or the kernel",
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGABRT: "aborted by a library",
    signal.SIGBUS: "a bus error",
}
"""Likely cause of a signal that killed a run."""

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
"""Signals that are passed on to the run, which saves and ends."""
_TAIL_BYTES = 16 * 2**10
"""Bytes of standard error that are searched for the last line of the run."""
_KILL_SECONDS = 10.0
"""Seconds that a run may take to end after the signal that ends it at once (`Insistence`)."""

FINAL = frozenset({0, 2, 128 + signal.SIGPIPE, *(128 + number for number in SIGNALS)})
"""Exit codes after which a run is not started again: done, bad input, stopped."""
_MAX_WAIT_SECONDS = 60.0
"""Longest wait before another attempt. The first is a second, each further one twice as long."""
_ENDING_SECONDS = 30
"""Seconds that the other processes may take to end after they have noticed the crash."""


@dataclasses.dataclass(frozen=True)
class RestartAttempt:
    """One run of the child process, from its start to its end.

    Attributes:
        number: Number of the attempt, from 1.
        code: Return code as `subprocess` has it, negative if a signal killed the run.
        out_of_memory: Whether the kernel killed any process for lack of memory meanwhile.
        reached: Progress of the run.
        last: Last line of the run on standard error that begins with `error:`, or its last line.
        began: Start in seconds since 1970.
        ended: End in seconds since 1970.
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
        """Exit code as a shell has it: 128 + signal number if a signal killed the run."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def ending(self) -> str:
        """Exit code or signal that ended the run, in words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        number = signal.Signals(-self.code)
        if number is signal.SIGKILL and self.out_of_memory:
            cause = "out of memory"
        else:
            cause = _WORDS.get(number, "")
        text = f"killed by {number.name}"
        if cause:
            text += f" ({cause})"
        return text

    def failed_as(self, earlier: RestartAttempt) -> bool:
        """Return whether two attempts failed in the same way, so that a third would be useless.

        They did if their last seen steps are at most `_SAME_STEP` apart. If one of them ended
        before its first step, both must have, with the same return code and last line.
        """
        step = self.reached.step
        earlier_step = earlier.reached.step
        if step < 0 or earlier_step < 0:
            return (step, self.code, self.last) == (earlier_step, earlier.code, earlier.last)
        return abs(step - earlier_step) <= _SAME_STEP

    def say(self, next_action: str) -> None:
        """Print on standard error at which step and why the attempt ended, and the next action.

        Args:
            next_action: End of the line, such as "starting again in 2 s (1 of 3)".
        """
        process = f"process {self.reached.process}: " if self.reached.processes > 1 else ""
        if self.reached.step >= 0:
            place = f"after step {self.reached.step}"
        else:
            place = "before its first step"
        duration = datetime.timedelta(seconds=round(self.ended - self.began))
        end = f"ended {place} and {duration}: {self.ending}"
        terminal.note(f"{process}attempt {self.number} {end}; {next_action}")

    def record(self, config: Config) -> None:
        """Append the attempt to `attempts.jsonl`, if the run has a workdir yet.

        Process I > 0 of a run has the file `attempts-I.jsonl`. If the file cannot be written, a
        caution is printed and nothing is raised.
        """
        row: dict[str, Any] = {
            "attempt": self.number,
            "began": _time(self.began),
            "ended": _time(self.ended),
            "code": self.code,
            "ending": self.ending,
        }
        for name, value in self.reached._asdict().items():
            if value >= 0 and name != "processes":
                row[name] = value
        # Workdirs are shared, and the next attempt may be on another machine.
        row["host"] = socket.gethostname()
        row["last"] = self.last
        line = json.dumps(row) + "\n"
        with _cautions():
            folder = _folder(config)
            process = self.reached.process
            # A file for each process, because on a network file system hosts that append to the
            # same file can overwrite each other's rows.
            name = FILE if process < 1 else f"attempts-{process}.jsonl"
            path = folder / name
            if not folder.is_dir():
                return
            if is_remote(path):
                # An object of a bucket can only be written whole.
                earlier_lines = path.read_text() if path.exists() else ""
                path.write_text(earlier_lines + line)
            else:
                with path.open("a") as file:
                    file.write(line)


def ended_since(config: Config, began: float) -> int:
    """Return how many processes have recorded the end of an attempt since a time.

    The last row of each attempts file in the workdir counts. Errors of storage are only printed.

    Args:
        began: Time in seconds since 1970.
    """
    count = 0
    with _cautions():
        for path in _folder(config).glob("attempts*.jsonl"):
            # A row that another process is writing may be incomplete.
            with contextlib.suppress(ValueError, RecursionError, KeyError, IndexError, TypeError):
                last_row = json.loads(path.read_text().splitlines()[-1])
                # Texts of ISO times in one format and time zone sort like the times.
                count += last_row["ended"] >= _time(began)
    return count


def _time(seconds: float) -> str:
    """Return a time in ISO format, in UTC, with milliseconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def _folder(config: Config) -> Path:
    """Return the workdir of a run."""
    return path_of(config.workdir or f"runs/{config.recipe}")


@contextlib.contextmanager
def _cautions() -> Iterator[None]:
    """Context manager for reading or writing attempts, which prints any error and drops it."""
    try:
        yield
    except Exception as error:
        terminal.note(f"caution: {FILE} is not written or read: {error}")


class Listener:
    """Context manager that records the signals of `SIGNALS`, and whose `wait` ends when one comes.

    It must be entered in the main thread. Signals that this process ignores stay ignored.

    Attributes:
        received: Numbers of the received signals, in order.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        # When a signal comes, Python writes a byte to `_wakeup_write`. That ends a wait for
        # `_wakeup_read`.
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._handlers: dict[signal.Signals, Any] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> Listener:
        self._wakeup_read.setblocking(False)
        self._wakeup_write.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(
            self._wakeup_write.fileno(), warn_on_full_buffer=False
        )
        # A signal that this process was started to ignore, as under `nohup`, stays ignored. The
        # child inherits that.
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._wakeup_read.close()
        self._wakeup_write.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def wait(self, seconds: float, *files: int) -> bool:
        """Wait until a signal comes, a file can be read, or the time is over.

        Args:
            *files: Descriptors (`fileno`) of the files to watch.

        Returns:
            Whether a signal has been received, during this wait or before.
        """
        with selectors.DefaultSelector() as selector:
            for file in (self._wakeup_read.fileno(), *files):
                selector.register(file, selectors.EVENT_READ)
            selector.select(seconds)
        # Emptied, so that the next wait does not end at once.
        with contextlib.suppress(BlockingIOError):
            self._wakeup_read.recv(64)
        return bool(self.received)


def attempt(number: int, command: Sequence[str], listener: Listener) -> RestartAttempt:
    """Run a command to its end in a child process, and return how it ended.

    The child's standard error is passed on. On Linux the child gets SIGTERM if this process dies.

    Args:
        number: Number of the attempt, from 1.
        listener: Listener whose signals are passed on. The child is killed `_KILL_SECONDS` after
            the third SIGINT or SIGTERM, which ends it without a save.
    """
    began = time.time()
    kills_before = _kills_for_memory()
    memory = Memory()
    try:
        with subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            env={**os.environ, VARIABLE: str(memory.descriptor)},
            pass_fds=[memory.descriptor],
            process_group=0,  # so that Ctrl-C reaches the child once: through this process
            preexec_fn=_ends_with_parent() if sys.platform == "linux" else None,
        ) as child:
            tail = _attend(child, listener)
        reached = memory.reached
    finally:
        memory.close()
    return RestartAttempt(
        number=number,
        code=child.returncode,
        out_of_memory=_kills_for_memory() > kills_before,
        reached=reached,
        last=_last_words(tail.decode(errors="replace")),
        began=began,
        ended=time.time(),
    )


def _attend(child: subprocess.Popen[bytes], listener: Listener) -> bytes:
    """Pass signals to a child, and its standard error to that of this process, until it ends.

    Kill the child `_KILL_SECONDS` after the third SIGINT or SIGTERM. Return the last `_TAIL_BYTES`
    of its standard error.
    """
    assert child.stderr is not None
    pipe = child.stderr.fileno()
    os.set_blocking(pipe, False)
    files = [pipe]
    num_passed = 0
    kill_time = float("inf")
    insistence = Insistence()
    tail = b""
    while child.poll() is None:
        # A short wait, because the end of the child wakes nobody if its pipe stays open.
        listener.wait(0.5, *files)
        for signal_number in listener.received[num_passed:]:
            child.send_signal(signal_number)
            num_passed += 1
            insistence.add(signal_number)
            if insistence.count >= Insistence.LAST:
                kill_time = time.monotonic() + _KILL_SECONDS
        if time.monotonic() > kill_time:
            child.kill()
        output = _pass_on(pipe)
        tail = (tail + output.text)[-_TAIL_BYTES:]
        if output.is_open:
            files = [pipe]
        else:
            # The child has closed its standard error, mostly because it ends. A closed pipe can
            # always be read, so the next wait is without it.
            files = []
            time.sleep(0.02)
    return (tail + _pass_on(pipe).text)[-_TAIL_BYTES:]


@functools.cache
def _ends_with_parent() -> Callable[[], object]:
    """Return a function that asks the kernel for SIGTERM to this process when its parent has died.

    It is the `preexec_fn` of `subprocess.Popen`, called in the child before its program starts.
    """
    # Looked up before the fork: a child forked beside other threads could deadlock.
    prctl = ctypes.CDLL(None).prctl
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    return lambda: prctl(set_parent_death_signal, int(signal.SIGTERM))


class _Output(NamedTuple):
    """Result of one read of a child's standard error."""

    text: bytes
    is_open: bool
    """False if the child has closed its standard error, so that no more text comes."""


def _pass_on(pipe: int) -> _Output:
    """Read all bytes that a non-blocking pipe has now, and write them to standard error.

    Return the bytes, and whether the pipe is still open.
    """
    text = b""
    try:
        while piece := os.read(pipe, 65536):
            text += piece
            # A terminal that was closed must not end the run.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(piece.decode(errors="replace"))
                sys.stderr.flush()
    except BlockingIOError:
        return _Output(text, is_open=True)
    return _Output(text, is_open=False)


def _last_words(text: str) -> str:
    """Return the last line that begins with `error:`, or else the last line that is not empty.

    The line is cut to 300 characters. "" if there is none.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error:"):
            return line[:300]
    return lines[-1][:300] if lines else ""


def _kills_for_memory() -> int:
    """Return how often the kernel has killed a process for memory since boot; 0 if unknown."""
    with contextlib.suppress(OSError):
        words = Path("/proc/vmstat").read_text().split()
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return 0


def run(config: Config, words: Sequence[str], max_restarts: int) -> int:
    """Train in a child process, and start it again with `--resume` after a crash.

    The child is not started again if it is done, had bad input or got a signal, or if two attempts
    in a row failed at the same step. `--resume` is added once an attempt has claimed the workdir,
    and `--resume-from` is removed once one has begun to train. An attempt is recorded in
    `attempts.jsonl` if it has claimed the workdir and its input was not bad. The pause before
    another attempt doubles from 1 second to 60 seconds.

    Args:
        words: Command line of the run after `mupax`.
        max_restarts: Most times that the child is started again, at least 1.

    Returns:
        Exit code of the last attempt, or 128 + signal number if a signal came during a pause.
    """
    command = _without(_command_line(words), "--restart")
    previous = None
    with Listener() as listener:
        for number in range(1, max_restarts + 2):
            last = attempt(number, command, listener)
            # Only if the attempt has claimed the workdir. A workdir that was refused is another
            # run's, or was not meant to be continued.
            if last.reached.process >= 0 and "--resume" not in command:
                command += ["--resume"]
            # This attempt has already gone back to the step of `--resume-from`. Going back once
            # more would move the checkpoints of this attempt to a branch.
            if last.reached.start >= 0:
                command = _without(command, "--resume-from")
            # After bad input the workdir may be another run's, and gets no row.
            if last.exit_code != 2 and "--resume" in command:
                last.record(config)
            if last.exit_code in FINAL or listener.received:
                break
            if previous is not None and last.failed_as(previous):
                last.say(
                    f"attempt {number - 1} ended there too, so it is not started again; "
                    f"see {FILE} in the workdir"
                )
                break
            if number > max_restarts:
                last.say(f"--restart {max_restarts} allows no other; see {FILE} in the workdir")
                break
            wait = min(2.0 ** (number - 1), _MAX_WAIT_SECONDS)
            last.say(f"starting again in {wait:.0f} s ({number} of {max_restarts})")
            if listener.wait(wait) or _wait_for_processes(config, last, listener):
                return 128 + listener.received[0]
            previous = last
    return last.exit_code


def _command_line(words: Sequence[str]) -> list[str]:
    """Return the command that starts this process again, as a list for `subprocess`.

    It begins with the Python interpreter, followed by the arguments of this process. If these do
    not end with the words, the result is `python -m mupax WORDS`.

    Args:
        words: Words of the command line after `mupax`. The first one is `train`. It may be missing
            among the arguments of this process, because `python -m train` needs no such word.
    """
    started = sys.orig_argv
    for own_words in (words, words[1:]):
        if own_words and started[-len(own_words) :] == [*own_words]:
            return [sys.executable, *started[1:]]
    return [sys.executable, "-m", "mupax", *words]


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without a flag and its value, which is the next word or follows a `=`."""
    remaining = []
    previous = ""
    for word in words:
        if flag not in (previous, word) and not word.startswith(f"{flag}="):
            remaining.append(word)
        previous = word
    return remaining


def _wait_for_processes(config: Config, last: RestartAttempt, listener: Listener) -> bool:
    """Wait until every process of a run has recorded the end of its attempt.

    The wait ends after `distributed.heartbeat_seconds` + 30 seconds, when all must have ended. A
    run of one process has no wait.

    Returns:
        Whether a signal ended the wait.
    """
    num_processes = last.reached.processes
    deadline = time.monotonic() + config.distributed.heartbeat_seconds + _ENDING_SECONDS
    while num_processes > 1 and time.monotonic() < deadline:
        if ended_since(config, last.began) >= num_processes:
            break
        if listener.wait(0.5):
            return True
    return False
