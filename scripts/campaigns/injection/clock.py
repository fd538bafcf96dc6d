"""Processes whose clock jumps when a file says so. The library `clock.c` answers for the clock."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


def compiled(folder: Path) -> Path:
    """Compile the library into a folder, unless it is there, and return its path."""
    library = folder / "clock.so"
    if not library.exists():
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def environ(library: Path, file: Path) -> dict[str, str]:
    """Return the variables of a process whose clock a file moves.

    Also write the file, which moves the clock by 0 s at first.
    """
    shift(file, 0)
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(file)}


def shift(file: Path, seconds: int) -> None:
    """Move the clocks of all processes that share a file, at once.

    Args:
        seconds: Seconds ahead of the real time; back if negative.
    """
    if not file.exists():
        file.write_bytes(struct.pack("=q", seconds))
        return
    # In place, because running processes have this file in their memory.
    with file.open("r+b") as shared:
        shared.write(struct.pack("=q", seconds))
