"""`clock.c` compiled: processes whose clock jumps when a file says so."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


def compiled(folder: Path) -> Path:
    """Return the library in a folder, compiled unless it is there."""
    library = folder / "clock.so"
    if not library.exists():
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def environ(library: Path, file: Path) -> dict[str, str]:
    """Return the variables of a process whose clock a file moves. The file is made, and moves it by nothing yet."""
    shift(file, 0)
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(file)}


def shift(file: Path, seconds: int) -> None:
    """Move the clocks that a file moves, at once.

    Args:
        file: that the processes share.
        seconds: ahead, or back where it is negative.
    """
    if not file.exists():
        file.write_bytes(struct.pack("=q", seconds))
        return
    with file.open("r+b") as shared:
        shared.write(struct.pack("=q", seconds))
