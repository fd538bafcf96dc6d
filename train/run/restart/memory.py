"""Memory in which a run tells its supervisor how far it has come.

It needs no disk, and it outlives a run that is killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

VARIABLE = "MUPAX_ATTEMPT"
"""Environment variable with the file descriptor of the memory that a run's supervisor reads."""
_NUMBERS = struct.Struct("<4q")


class Reached(NamedTuple):
    """Progress of a run.

    Attributes:
        process: Number of this process of the run, or -1 before it has joined the others and
            claimed the workdir.
        processes: Number of processes of the run.
        start: Step from which training began in this attempt, or -1 if it has not begun yet.
        step: Last step whose metrics the host has seen, or -1. Up to `start.IN_FLIGHT` later steps
            may be done, too.
    """

    process: int = -1
    processes: int = 1
    start: int = -1
    step: int = -1


class Memory:
    """Shared memory with a `Reached`, which a run writes and its supervisor reads.

    Args:
        descriptor: File descriptor of memory that the supervisor has made. By default new memory is
            made.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            # A file that is deleted at once: its memory lives as long as a process has it open.
            with tempfile.TemporaryFile() as file:
                file.write(_NUMBERS.pack(*Reached()))
                file.flush()
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._bytes = mmap.mmap(descriptor, _NUMBERS.size)

    @property
    def reached(self) -> Reached:
        """Progress that was written last."""
        return Reached(*_NUMBERS.unpack_from(self._bytes))

    @reached.setter
    def reached(self, value: Reached) -> None:
        _NUMBERS.pack_into(self._bytes, 0, *value)

    def note(self, **changes: int) -> None:
        """Write new values of some fields of `Reached`. The other fields stay."""
        self.reached = self.reached._replace(**changes)

    def close(self) -> None:
        """Unmap the memory and close its descriptor. Another process that has it open keeps it."""
        self._bytes.close()
        os.close(self.descriptor)


def of_this_process(process: int, processes: int) -> Memory:
    """Open the memory that the supervisor of this process reads, and write both numbers to it.

    The environment variable `MUPAX_ATTEMPT`, which must be set, has its descriptor. Remove the
    variable, so that child processes do not get it.

    Args:
        process: Number of this process of the run, from 0.
        processes: Number of processes of the run, at least 1.
    """
    # Removed, because the descriptor means nothing to a process that this one starts.
    memory = Memory(int(os.environ.pop(VARIABLE)))
    memory.note(process=process, processes=processes)
    return memory
