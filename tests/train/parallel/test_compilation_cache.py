"""Compiled programs on disk: who chooses the folder, what a bad one costs, and that no program is read that is not for this machine."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compilation_cache as jax_cache

from mupax.train.core import program
from mupax.train.parallel.processes import Processes

pytestmark = pytest.mark.core

OPTIONS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process whose user has chosen nothing; the folder is its cache."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    monkeypatch.setattr(jax_cache, "get_file_cache", jax_cache.get_file_cache)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    monkeypatch.delenv(program.VARIABLE, raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def folder(root: Path) -> Path:
    return root / f"programs-{program.key()}"


def use(root: Path, **options: Any) -> str | None:
    """The folder that JAX then keeps programs in."""
    program.use(lambda: root, **options)
    return jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None


def test_programs_are_kept_by_default_and_for_their_user_alone(plain: Path) -> None:
    assert use(plain) == str(folder(plain)) == use(plain)
    assert folder(plain).stat().st_mode & 0o077 == 0
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    jax.jit(lambda x: x * 3.25 + 1)(2.0)
    assert [path.name.partition("-")[0] for path in folder(plain).iterdir()] == ["jit__lambda"]


def test_what_the_user_has_set_holds(
    plain: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5)
    jax.config.update(
        "jax_compilation_cache_dir", str(tmp_path / "own")
    )  # as JAX_COMPILATION_CACHE_DIR does
    assert use(plain) == str(tmp_path / "own")
    assert not plain.exists()
    monkeypatch.setenv(program.VARIABLE, str(tmp_path / "other"))  # nearer to this command
    assert use(plain) == str(folder(tmp_path / "other"))
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 5
    monkeypatch.setenv(program.VARIABLE, "none")
    assert use(plain) is None


def test_no_cache_stays_none(plain: Path) -> None:
    jax.config.update(
        "jax_enable_compilation_cache", False
    )  # as JAX_ENABLE_COMPILATION_CACHE=false does
    assert use(plain) is None
    assert not plain.exists()


def test_nothing_is_kept_for_devices_that_are_not_here(plain: Path) -> None:
    assert use(plain, devices=jax.devices()[:1]) == str(folder(plain))
    assert use(plain, devices=["a TPU elsewhere"]) is None


@pytest.mark.parametrize(
    "reason", ["Not a directory", "no permission", "it belongs to another user", "no home"]
)
def test_a_folder_that_cannot_be_used_is_told_once(
    reason: str, plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    plain.mkdir()
    if reason == "Not a directory":
        (plain / "file").touch()
        monkeypatch.setenv(program.VARIABLE, str(plain / "file"))
    elif reason == "no permission":
        monkeypatch.setattr(
            os, "access", lambda path, mode: False
        )  # a superuser may write anywhere
    elif reason == "it belongs to another user":
        key = program.key()
        monkeypatch.setattr(program, "key", lambda: key)
        monkeypatch.setattr(os, "getuid", lambda: 54321)
    for _ in range(2):
        program.use(homeless if reason == "no home" else lambda: plain)
    assert not jax.config.jax_enable_compilation_cache
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("caution: compiled programs are not kept")
    assert reason in error
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2


@pytest.mark.parametrize("sees", [True, False])
def test_processes_keep_programs_only_where_all_see_them(
    sees: bool, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Two(Processes):
        count = 2

        def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any]:
            return [json.loads(json.dumps(value)), sees]

    assert use(plain, processes=Two()) == (str(folder(plain)) if sees else None)
    assert use(plain) == (str(folder(plain)) if sees else None)  # as `assemble` asks later
    assert capsys.readouterr().err.count("process 1 does not see it") == (not sees)
    assert list(folder(plain).iterdir()) == []


# The key


X86 = "processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: {mhz}\nflags\t\t: fpu sse4_2 {flags}\n\n"


def key_of(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(program, "_CPU", tmp_path / "cpuinfo")
    program.key.cache_clear()
    return program.key()


@pytest.fixture(autouse=True)
def fresh_key() -> Iterator[None]:
    yield
    program.key.cache_clear()


def test_the_key_changes_with_what_the_cpu_can_do_and_not_with_its_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def key(*mhz: int, flags: str = "avx2") -> str:
        return key_of(
            "".join(X86.format(mhz=each, flags=flags) for each in mhz), monkeypatch, tmp_path
        )

    assert key(2000) == key(3100) == key(2500, 2600)
    assert key(2000) != key(2000, flags="avx2 avx512f")
    arm = "processor\t: 0\nFeatures\t: fp asimd{}\nCPU implementer\t: 0x41\nCPU part\t: 0x{}\n\n"
    cores = [arm.format("", "d0c"), arm.format(" sve", "d0c"), arm.format("", "d40")]
    assert len({key_of(core, monkeypatch, tmp_path) for core in [*cores, cores[0] + cores[2]]}) == 4


@pytest.mark.parametrize("changed", ["jax", "jaxlib", "user"])
def test_the_key_changes_with_versions_and_the_user(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = program.key(), program.version
    program.key.cache_clear()
    if changed == "user":
        monkeypatch.setattr(os, "getuid", lambda: 54321)
    else:
        versions = {changed: "0.99"}
        monkeypatch.setattr(program, "version", lambda name: versions.get(name) or version(name))
    assert program.key() != before


# The files


def store(root: Path, key: str = "a", limit: int = 1000) -> program.Store:
    (root / f"programs-{key}").mkdir(parents=True, exist_ok=True)
    return program.Store(root / f"programs-{key}", limit)


def names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", [b"", b"half", None])
def test_a_broken_file_is_a_miss_and_is_written_again(damage: bytes | None, tmp_path: Path) -> None:
    cache = store(tmp_path)
    cache.put("p", b"program")
    assert cache.get("p") == b"program"
    path = tmp_path / "programs-a" / "p-cache"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x" if damage is None else damage)
    assert cache.get("p") is None
    cache.put("p", b"program")
    assert store(tmp_path).get("p") == b"program"
    assert cache.get("q") is None


def test_what_was_used_longest_ago_goes_of_other_versions_too(tmp_path: Path) -> None:
    (tmp_path / "notes-cache").write_bytes(b"a user's own file" * 100)
    old, new = store(tmp_path, "old", limit=100), store(tmp_path, "new", limit=100)
    for number, (cache, name) in enumerate(((old, "a"), (old, "b"), (new, "c"))):
        cache.put(name, bytes(10))
        os.utime(
            tmp_path / f"programs-{'new' if cache is new else 'old'}" / f"{name}-cache",
            (number, number),
        )
    assert old.get("a") == bytes(10)  # used just now
    new.put("d", bytes(20))
    assert names(tmp_path) == [
        "notes-cache",
        "programs-new/c-cache",
        "programs-new/d-cache",
        "programs-old/a-cache",
    ]
    new.put("too large", bytes(101))
    assert new.get("d") == bytes(20)
    assert new.get("too large") is None


def test_a_full_disk_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = store(tmp_path)
    cache.put("p", b"program")
    monkeypatch.setattr(Path, "write_bytes", full)
    for name in ("q", "r"):
        cache.put(name, b"program")
    assert names(tmp_path) == ["programs-a/p-cache"]
    assert cache.get("p") == b"program"
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_file_that_cannot_be_deleted_takes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = store(tmp_path, "old", limit=100), store(tmp_path, "new", limit=100)
    for number, (cache, name) in enumerate(((old, "fixed"), (new, "a"))):
        cache.put(name, bytes(24))  # 40 bytes with the digest
        (path,) = tmp_path.rglob(f"{name}-cache")
        os.utime(path, (number, number))
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name == "fixed-cache":
            raise OSError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    new.put("b", bytes(24))
    assert names(tmp_path) == ["programs-new/b-cache", "programs-old/fixed-cache"]
    assert not capsys.readouterr().err
    new.put("c", bytes(60))
    assert new.get("c") is None
    reason = "programs-old/fixed-cache cannot be deleted: Operation not permitted"
    # Lines are broken at the width of the terminal.
    assert "".join(reason.split()) in "".join(capsys.readouterr().err.split())


def test_a_folder_of_other_versions_that_vanishes_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path, "old")
    cache, scandir = store(tmp_path), os.scandir

    def vanished(path: str) -> object:
        if str(path).endswith("programs-old"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanished)
    cache.put("p", b"program")
    assert cache.get("p") == b"program"
    assert not capsys.readouterr().err


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from mupax.train.core.program import Store
kept, mine = Store(Path(sys.argv[2]), 400_000), sys.argv[3].encode()
for number in range(100):
    kept.put(f"p{number % 7}", mine * (number % 7 + 1) * 10_000)
    read = kept.get(f"p{(number + 3) % 7}")
    assert read is None or (len(set(read)) == 1 and len(read) == ((number + 3) % 7 + 1) * 10_000), number
"""


def test_processes_that_write_at_once_read_whole_programs(tmp_path: Path) -> None:
    store(tmp_path)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(ROOT), str(tmp_path / "programs-a"), letter]
        )
        for letter in "xy"
    ]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    assert all(name.endswith("-cache") for name in names(tmp_path))
