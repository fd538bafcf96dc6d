"""A run that is started again after a crash, from its newest good checkpoint.

Not started again: a run that is done, has bad input, was told to stop, or fails twice at the same step. Where there are several
processes, each has a supervisor; they wait for each other's rows of attempts, so that none joins what is left of the last one.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from mupax.train.config.run import Config
from mupax.train.run.restart.attempt import FILE, Attempt, ended_since
from mupax.train.run.restart.child import SIGNALS, Listener, attempt

FINAL = frozenset({0, 2, 128 + signal.SIGPIPE, *(128 + number for number in SIGNALS)})
"""Exit codes that ask for nothing more: done, bad input, stopped."""
_LONGEST_S = 60.0
"""Of the waits before another attempt; the first is a second, each further one twice as long."""
_ENDING_S = 30
"""How long the other processes may take to end, once they have noticed."""


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
            command += ["--resume"] if last.reached.process >= 0 and "--resume" not in command else []
            if last.reached.start >= 0:  # it has gone back already; to do so again would set its own steps aside
                command = _without(command, "--resume-from")
            if last.exit_code != 2 and "--resume" in command:
                last.record(config)
            if last.exit_code in FINAL or listener.received:
                break
            if before is not None and last.failed_as(before):
                last.say(f"attempt {number - 1} ended there too, so it is not started again; see {FILE} in the workdir")
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
    return [word for before, word in pairs if flag not in (before, word) and not word.startswith(f"{flag}=")]


def _others_still_run(config: Config, last: Attempt, listener: Listener) -> bool:
    """Wait until every process has recorded its end, or must have ended; whether a signal came first."""
    count, until = last.reached.processes, time.monotonic() + config.distributed.heartbeat_seconds + _ENDING_S
    while count > 1 and time.monotonic() < until and ended_since(config, last.began) < count:
        if listener.wait(0.5):
            return True
    return False
