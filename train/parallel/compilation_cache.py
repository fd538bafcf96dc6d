"""Compiled programs on disk, so that a command started again compiles nothing: JAX's persistent compilation cache, by default.

    CACHE/programs-KEY/PROGRAM-cache      the digest of a program, and the program

KEY stands for the versions, this CPU and the user: machine code for another CPU ends a process, and whoever can write such a
file runs code in it. JAX's own store writes in place, so a kill or a full disk leaves a broken file for good, and needs a lock
to have a limit. Here a file is whole or a miss, the oldest go first, and nothing that fails ends a run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import xxhash
from jax._src import compilation_cache as _jax_cache  # its store has no public name

from mupax import terminal
from mupax.train.parallel.processes import Processes

VARIABLE = "MUPAX_COMPILATION_CACHE"
"""The folder of compiled programs, or none; `--compilation-cache` sets it."""
LIMIT = 2 * 2**30
"""Bytes of all compiled programs of a folder, unless `jax_compilation_cache_max_size` says otherwise."""
_options: Any = jax.config
_DIGEST_BYTES = 16
_CPU = Path("/proc/cpuinfo")
_FEATURES = re.compile(
    r"^(?:vendor_id|cpu family|model|model name|flags|Features|CPU \w+|cpu|isa|features)\s*:.*$", re.MULTILINE
)
"""Lines about what a CPU is and can do: x86, Arm, POWER, RISC-V, IBM Z. Its frequency is not among them."""


class Store:
    """Where JAX looks compiled programs up (`jax._src.compilation_cache_interface`).

    Args:
        folder: of this machine's programs, which exists.
        limit: most bytes of all programs beside it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._path, self._limit, self._bytes = folder, limit, -1
        self._full = False

    def get(self, key: str) -> bytes | None:
        """The program of that key; None where there is none, or no whole one."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used last
        program = content[_DIGEST_BYTES:]
        return program if xxhash.xxh3_128_digest(program) == content[:_DIGEST_BYTES] else None

    def put(self, key: str, program: bytes) -> None:
        """Keep a program. The first that cannot be written is told in a line, and no other is tried.

        Args:
            key: of the program.
            program: compiled, as JAX has it.
        """
        if self._full or len(program) > self._limit:
            return
        path = self._file(key)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            self._make_room(len(program) + _DIGEST_BYTES)
            part.write_bytes(xxhash.xxh3_128_digest(program) + program)
            part.replace(path)
        except OSError as error:
            self._full = True
            with contextlib.suppress(OSError):
                part.unlink()
            _caution(self._path, error)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}-cache"

    def _make_room(self, size: int) -> None:
        """Delete what was used longest ago, of other versions too; files are listed at first and when they may be too many."""
        if self._bytes < 0 or self._bytes + size > self._limit:
            files = []
            for path in self._path.parent.glob("programs-*/*-cache*"):
                with contextlib.suppress(OSError):  # deleted by another process
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
            self._bytes = sum(length for _, length, _ in files)
            for _, length, path in sorted(files):
                if self._bytes + size <= self._limit:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                self._bytes -= length
        self._bytes += size


def use(root: Callable[[], Path], processes: Processes | None = None, devices: Sequence[Any] | None = None) -> None:
    """Have JAX keep compiled programs from here on, unless the user has chosen otherwise; called again it changes nothing.

    JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=false hold where neither `--compilation-cache` nor its variable is
    given.

    Args:
        root: gives the folder for everything that can be made again.
        processes: of the run. Process 0 alone writes, so several keep programs only in a folder that all of them see: where one
            found a program and another compiled it, compilers that share their work (GPU) would wait for each other.
        devices: to compile for, of this machine unless given. Programs for others cannot be read back, and none is kept any more.
    """
    if devices is not None and devices[0] not in jax.devices():
        _options.update("jax_enable_compilation_cache", False)
    folder = _folder(root)
    if processes is not None and processes.count > 1 and not _shared(folder, processes):
        folder = None
        if not _options.jax_compilation_cache_dir:
            _options.update("jax_enable_compilation_cache", False)
    if folder is None or _options.jax_compilation_cache_dir == str(folder):
        return
    most = _options.jax_compilation_cache_max_size
    _jax_cache.reset_cache()
    _jax_cache.get_file_cache = lambda path: (Store(Path(path), LIMIT if most < 0 else most), path)
    _options.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:  # 1 s: most of a start is in smaller ones
        _options.update("jax_persistent_cache_min_compile_time_secs", 0)


def _folder(root: Callable[[], Path]) -> Path | None:
    """The folder for this machine's programs, made; None where none are kept, or where the user says."""
    choice = os.environ.get(VARIABLE)
    if choice == "none":
        _options.update("jax_enable_compilation_cache", False)
    if not _options.jax_enable_compilation_cache or (_options.jax_compilation_cache_dir and not choice):
        return None
    folder = None
    try:
        folder = (Path(choice).expanduser().absolute() if choice else root()) / f"programs-{key()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _options.update("jax_enable_compilation_cache", False)
        _caution(folder, error)
        return None
    return folder


def _caution(folder: Path | None, error: Exception) -> None:
    where, why = f" in {folder}" if folder else "", getattr(error, "strerror", None) or error
    terminal.note(
        f"caution: compiled programs are not kept{where}: {why}; name another folder, or none, by --compilation-cache"
    )


def _shared(folder: Path | None, processes: Processes) -> bool:
    """Whether all processes see the folder of process 0. All of them ask."""
    mark = folder / f"shared-{secrets.token_hex(4)}" if folder else None
    if processes.leader and mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()
    name = processes.broadcast("compilation cache", lambda: mark and mark.name)
    visible = bool(folder and name) and any(_exists(folder / name, wait) for wait in (0, 0.2, 1))  # a network's file
    absent = [i for i, sees in enumerate(processes.gather("compilation cache", visible) or []) if not sees]
    verdict = processes.broadcast("compilation cache shared", lambda: not absent)
    if processes.leader and mark is not None:
        with contextlib.suppress(OSError):
            mark.unlink()
        if not verdict:
            _caution(folder, RuntimeError(f"process {absent[0]} does not see it"))
    return verdict


def _exists(path: Path, wait: float) -> bool:
    time.sleep(wait)
    return path.exists()


@functools.cache
def key() -> str:
    """16 hexadecimal digits that stand for what a compiled program is good for, and for whom."""
    versions = [version(name) for name in ("jax", "jaxlib")]
    parts = [*versions, sys.platform, platform.machine(), _cpu(), str(os.getuid())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Model and features of this machine's CPUs."""
    with contextlib.suppress(OSError):
        return "\n".join(sorted(set(_FEATURES.findall(_CPU.read_text(errors="replace")))))
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # macOS
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    return platform.processor()
