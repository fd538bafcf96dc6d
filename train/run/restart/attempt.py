"""One attempt at a run: what became of it, in words and as a row of the workdir's `attempts.jsonl`."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from mupax import terminal
from mupax.paths import is_remote, path_of
from mupax.train.config.run import Config
from mupax.train.run.restart.memory import Reached

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


@dataclasses.dataclass(frozen=True)
class Attempt:
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

    def failed_as(self, other: Attempt) -> bool:
        """Whether both ended at the same step, or before any with the same words."""
        if self.reached.step < 0 or other.reached.step < 0:
            return (self.reached.step, self.code, self.last) == (other.reached.step, other.code, other.last)
        return abs(self.reached.step - other.reached.step) <= _NEAR

    def say(self, then: str) -> None:
        """One line on standard error; what the run itself said stands above it.

        Args:
            then: what follows from it.
        """
        who = f"process {self.reached.process}: " if self.reached.processes > 1 else ""
        where = f"after step {self.reached.step}" if self.reached.step >= 0 else "before its first step"
        took = datetime.timedelta(seconds=round(self.ended - self.began))
        text = f"{who}attempt {self.number} ended {where} and {took}: {self.ending}; {then}"
        terminal.note(text)

    def record(self, config: Config) -> None:
        """Append it to the file, where the run has a workdir yet; a place that does not take it is said, no more."""
        began, ended = (_time(seconds) for seconds in (self.began, self.ended))
        progress = {name: value for name, value in self.reached._asdict().items() if value >= 0 and name != "processes"}
        row = {"attempt": self.number, "began": began, "ended": ended, "code": self.code, "ending": self.ending}
        line = json.dumps({**row, **progress, "host": socket.gethostname(), "last": self.last}) + "\n"
        with _cautions():
            folder = _folder(config)
            path = folder / (FILE if self.reached.process < 1 else f"attempts-{self.reached.process}.jsonl")
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
            with contextlib.suppress(ValueError, RecursionError, KeyError, IndexError, TypeError):  # half a row
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
