"""`faults.c` compiled, and what it shares with the processes that it fails: which file operation suffers next, and how."""

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
"""Operations, as `enum kind` has them."""
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
"""Name to `enum effect` and the error's number: half is done and said, half is done and an error said, all is done late, the
process gets SIGKILL before it does anything, or after it has done it (half, where it reads or writes)."""
_PATH_MAX = 4096
_COUNTERS, _SIZE = len(KINDS) + 1, 8 * (len(KINDS) + 7) + _PATH_MAX


def compiled(folder: Path) -> Path | None:
    """The shim as a library in a folder; None where there is no C compiler."""
    compiler, library = shutil.which("cc"), folder / "faults.so"
    if compiler is None:
        return None
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class Control:
    """The memory shared with processes that were started with `environ`.

    Args:
        file: to share by, which they then have, too; made where it is missing.
        library: of `compiled`.
    """

    def __init__(self, file: Path, library: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(_SIZE))
        with file.open("r+b") as shared:
            self._memory = mmap.mmap(shared.fileno(), _SIZE)
        self.environ = {"LD_PRELOAD": str(library), "FAULTS": str(file)}

    def watch(self, folder: Path | None) -> None:
        """Count the operations below a folder from now on, from 0; of none where there is no folder. Disarms."""
        self._memory[:] = bytes(_SIZE)
        if folder is not None:
            name = str(folder).encode()
            self._memory[_SIZE - _PATH_MAX : _SIZE - _PATH_MAX + len(name)] = name

    def arm(
        self, kind: str, effect: str, first: int, times: int = 1, milliseconds: int = 500
    ) -> None:
        """Let operations suffer.

        Args:
            kind: of `KINDS`.
            effect: of `EFFECTS`.
            first: number of the first that suffers, from 0, counted since `watch`.
            times: how many.
            milliseconds: how late one is, where it is slow.
        """
        number, error = EFFECTS[effect]
        values = (KINDS.index(kind), number, error, first, times, milliseconds)
        struct.pack_into("=6Q", self._memory, 8 * _COUNTERS, *values)

    def calls(self) -> dict[str, int]:
        """Operations of each kind so far."""
        return dict(zip(KINDS, struct.unpack_from(f"={len(KINDS)}Q", self._memory), strict=True))

    @property
    def fired(self) -> int:
        """Operations that suffered so far."""
        return struct.unpack_from("=Q", self._memory, 8 * len(KINDS))[0]
