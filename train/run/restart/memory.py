"""How far a run has come, in memory that outlives it: it costs no disk, and a kill takes nothing away."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

VARIABLE = "MUPAX_ATTEMPT"
"""Tells a run the file descriptor of the memory that its supervisor reads."""
_NUMBERS = struct.Struct("<4q")


class Reached(NamedTuple):
    """How far a run has come.

    Attributes:
        process: number of this process of the run; -1 before it has joined the others and the workdir is the run's.
        processes: of the run.
        start: step from which it went on; -1 before it was there.
        step: the last whose numbers the host has seen; of those after it, at most `start.IN_FLIGHT` may be done too.
    """

    process: int = -1
    processes: int = 1
    start: int = -1
    step: int = -1


class Memory:
    """Memory that a run writes and its supervisor reads.

    Args:
        descriptor: of the memory that the supervisor has made; new memory unless given.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                file.write(_NUMBERS.pack(*Reached()))
                file.flush()
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._bytes = mmap.mmap(descriptor, _NUMBERS.size)

    @property
    def reached(self) -> Reached:
        """What was written last."""
        return Reached(*_NUMBERS.unpack_from(self._bytes))

    @reached.setter
    def reached(self, value: Reached) -> None:
        _NUMBERS.pack_into(self._bytes, 0, *value)

    def note(self, **changes: int) -> None:
        """Write some of the numbers anew."""
        self.reached = self.reached._replace(**changes)

    def close(self) -> None:
        self._bytes.close()
        os.close(self.descriptor)


def of_this_process(process: int, processes: int) -> Memory:
    """The memory that the supervisor of this process reads.

    Args:
        process: number of this process of the run.
        processes: how many there are.
    """
    # Taken away: to what this process starts, the number means nothing.
    memory = Memory(int(os.environ.pop(VARIABLE)))
    memory.note(process=process, processes=processes)
    return memory
