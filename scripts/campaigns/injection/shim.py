"""The compiled library `faults.c`, and the shared memory that says which file operation fails."""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")
KINDS = (
    "open",
    "read",
    "pread",
    "write",
    "pwrite",
    "fsync",
    "rename",
    "unlink",
    "stat",
    "list",
    "mkdir",
)
"""Kinds of operations, in the order of `enum kind`."""
EFFECTS = {
    "EIO": (0, errno.EIO),
    "ESTALE": (0, errno.ESTALE),
    "ENOSPC": (0, errno.ENOSPC),
    "EACCES": (0, errno.EACCES),
    "short": (1, 0),
    "torn": (2, 0),
    "slow": (3, 0),
    "killed": (4, 0),
    "killed after": (5, 0),
}
"""Effects of a fault: name to the number of `enum effect` and the number of an error.

| name | the operation |
|---|---|
| an error | is not done, and the error is returned |
| short | is half done, and says so |
| torn | is half done, and an error is returned |
| slow | is done late |
| killed | is not done: the process gets SIGKILL |
| killed after | is done (half of it for a read or write), then the process gets SIGKILL |
"""
_PATH_MAX = 4096
_COUNTERS = len(KINDS) + 1
# A counter for each kind, the number of faults, six values of `arm`, and the folder's path.
_SIZE = 8 * (len(KINDS) + 7) + _PATH_MAX
"""Bytes of `struct control`."""


def compiled(folder: Path) -> Path | None:
    """Compile the library into a folder, and return its path; `None` without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "faults.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class Control:
    """Memory shared with the processes whose operations fail.

    These processes must be started with the variables `environ`.

    Args:
        file: File of the shared memory. It is made if it is missing.
        library: Library that `compiled` returned.
    """

    def __init__(self, file: Path, library: Path) -> None:
        # The process that started this one may have made the file.
        if not file.exists():
            file.write_bytes(bytes(_SIZE))
        with file.open("r+b") as shared:
            self._memory = mmap.mmap(shared.fileno(), _SIZE)
        self.environ = {"LD_PRELOAD": str(library), "FAULTS": str(file)}

    def watch(self, folder: Path | None) -> None:
        """Count the operations below a folder from 0, and forget what was armed.

        With `None` nothing is counted any more.
        """
        self._memory[:] = bytes(_SIZE)
        if folder is not None:
            name = str(folder).encode()
            self._memory[_SIZE - _PATH_MAX : _SIZE - _PATH_MAX + len(name)] = name

    def arm(
        self, kind: str, effect: str, first: int, times: int = 1, milliseconds: int = 500
    ) -> None:
        """Choose the operations that fail.

        Args:
            kind: One of `KINDS`.
            effect: Key of `EFFECTS`.
            first: Number of the first operation that fails, counted from 0 since `watch`.
            times: Number of operations that fail, one after the other. Default: 1.
            milliseconds: Delay of a slow operation. Default: 500.
        """
        number, error = EFFECTS[effect]
        values = (KINDS.index(kind), number, error, first, times, milliseconds)
        # In the order of `struct control`.
        struct.pack_into("=6Q", self._memory, 8 * _COUNTERS, *values)

    def calls(self) -> dict[str, int]:
        """Return the number of operations of each kind since `watch`."""
        return dict(zip(KINDS, struct.unpack_from(f"={len(KINDS)}Q", self._memory), strict=True))

    @property
    def fired(self) -> int:
        """Number of operations that failed since `watch`."""
        return struct.unpack_from("=Q", self._memory, 8 * len(KINDS))[0]
