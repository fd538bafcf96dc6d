"""Preparation resumes after a kill, repairs damage, and is done by one process while others help."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax import disk
from mupax.train import data
from mupax.train.data import cache
from mupax.train.data.text import packing, shares, tokenizer

pytestmark = pytest.mark.core

TEXTS = [b"text %d " % i * (i % 5 + 1) for i in range(23)]


class Documents(Sequence):
    """Documents that count what is read, and die after so many."""

    def __init__(self, texts: list[bytes] = TEXTS, dies_after: int | None = None) -> None:
        self.texts = texts
        self.dies_after = dies_after
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> Any:
        if len(self.read) == self.dies_after:
            raise KeyboardInterrupt
        self.read.append(i)
        return [(self.texts[i], True)]


def dying(after: int) -> Documents:
    return Documents(TEXTS, after)


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of small steps."""
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path))
    monkeypatch.setattr(packing, "_STEP_BYTES", 40)
    return tmp_path


@pytest.fixture
def folder(cache_root: Path) -> Path:
    """The folder of the corpus that `prepare` writes."""
    return cache_root / "packed/k-bytes"


def prepare(
    train: Documents | None = None, note: Callable[[str], object] = print, key: str = "k"
) -> dict[str, packing.PackedCorpus]:
    sides = {"train": train or Documents(), "eval": Documents(TEXTS[:3])}
    return packing.prepared(key, lambda: sides, tokenizer.Bytes(), note)


def prepare_and_die(train: Documents) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(train)


def packed_bytes(texts: list[bytes]) -> bytes:
    return b"".join(text + b"\0" for text in texts)


def assert_packed(sides: dict[str, packing.PackedCorpus]) -> None:
    assert sides["train"].tokens.tobytes() == packed_bytes(TEXTS)
    assert sides["eval"].tokens.tobytes() == packed_bytes(TEXTS[:3])


def run_threads(targets: Iterable[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)


def test_documents_stand_complete_and_in_order() -> None:
    sides = prepare()
    assert_packed(sides)
    assert sides["train"].text_bytes == len(packed_bytes(TEXTS))
    # Prepared text is not prepared again.
    second = Documents()
    notes: list[str] = []
    prepare(second, notes.append)
    assert second.read == []
    assert notes == []


@pytest.mark.parametrize("dies_after", [0, 1, 7, 22])
def test_killed_pass_goes_on(dies_after: int, folder: Path) -> None:
    uninterrupted = prepare(key="uninterrupted")
    killed = dying(dies_after)
    prepare_and_die(killed)
    assert not (folder / "manifest.json").exists()
    with (folder / "train.bin").open("ab") as file:
        file.write(b"half a step that no progress file vouches for")
    second = Documents()
    sides = prepare(second)
    assert_packed(sides)
    assert sides["train"].digest == uninterrupted["train"].digest
    assert dies_after < 7 or len(second.read) < len(TEXTS)
    assert set(second.read) | set(killed.read) == set(range(len(TEXTS)))


def damage_corpus(folder: Path, damage: str) -> None:
    tokens = folder / "train.bin"
    manifest = folder / "manifest.json"
    if damage == "cut":
        os.truncate(tokens, 50)
    elif damage == "flip":
        content = bytearray(tokens.read_bytes())
        content[33] ^= 4
        tokens.write_bytes(content)
    elif damage == "remove":
        (folder / "eval.bin").unlink()
    elif damage == "half manifest":
        os.truncate(manifest, manifest.stat().st_size // 2)
    else:
        foreign = {"format": 1, "tokenizer": "bytes", "sides": {"train": {}}}
        manifest.write_text(json.dumps(foreign))


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "half manifest", "foreign manifest"])
def test_damaged_text_is_prepared_again(damage: str, folder: Path) -> None:
    digest = prepare()["train"].digest
    damage_corpus(folder, damage)
    notes: list[str] = []
    sides = prepare(note=notes.append)
    assert_packed(sides)
    assert sides["train"].digest == digest
    assert any("preparing it again" in note for note in notes)


@pytest.mark.parametrize("damage", ["{", '{"documents": 1}', "", "tokens"])
@pytest.mark.parametrize("index", [0, 2])
def test_damaged_progress_counts_up_to_the_damage(index: int, damage: str, folder: Path) -> None:
    prepare_and_die(dying(15))
    progress = folder / "train.jsonl"
    lines = progress.read_text().splitlines()
    assert len(lines) > 3
    first = json.loads(lines[index - 1])["documents"] if index else 0
    if damage == "tokens":
        damage = json.dumps({**json.loads(lines[index]), "tokens": 1})
    lines[index] = damage
    progress.write_text("\n".join([*lines, ""]))
    second = Documents()
    assert_packed(prepare(second))
    assert second.read == list(range(first, len(TEXTS)))


def test_a_line_whose_tokens_are_gone_is_done_again(folder: Path) -> None:
    prepare_and_die(dying(15))
    first, second, *_ = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    os.truncate(folder / "train.bin", second["tokens"] - 1)
    again = Documents()
    assert_packed(prepare(again))
    assert again.read[0] == first["documents"]


def bytes_written() -> int:
    """Return how many bytes this process has written to files of any kind."""
    text = Path("/proc/self/io")
    if not text.exists():
        pytest.skip("the system does not count them")
    return int(text.read_text().split("wchar:")[1].split()[0])


def test_progress_costs_as_many_bytes_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written from the beginning after every step, as it was once, it grew with the square."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def written(steps: int) -> int:
        before = bytes_written()
        prepare(Documents([b"x" * 40] * steps), key=f"steps{steps}")
        return bytes_written() - before

    few = written(100)
    assert written(800) < 9 * few  # 22 times as many when it was quadratic


def test_one_prepares_and_the_others_wait() -> None:
    sources = [Documents() for _ in range(4)]
    outcomes: list[Any] = []
    run_threads(lambda source=source: outcomes.append(prepare(source)) for source in sources)
    assert len(outcomes) == 4
    assert sorted(len(source.read) for source in sources) == [0, 0, 0, len(TEXTS)]
    assert len({sides["train"].digest for sides in outcomes}) == 1


# Shares


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shares, and help without waiting."""
    monkeypatch.setattr(shares, "_PARTS", 2)
    monkeypatch.setattr(cache, "PATIENCE_S", 0.0)


def help_prepare(folder: Path, *helpers: Documents) -> None:
    """Do the work of processes that wait for one which holds the lock and does nothing."""
    ready = threading.Barrier(len(helpers))

    def wait(documents: Documents) -> None:
        ready.wait()
        sides = {"train": documents, "eval": Documents(TEXTS[:3])}
        with contextlib.suppress(KeyboardInterrupt):
            packing._help(sides, tokenizer.Bytes(), folder)

    run_threads(lambda documents=documents: wait(documents) for documents in helpers)


@pytest.mark.usefixtures("at_once")
def test_processes_that_wait_tokenize_shares_that_the_first_one_takes(folder: Path) -> None:
    alone = prepare(key="alone")
    helpers = [Documents() for _ in range(3)]
    help_prepare(folder, *helpers)
    # Each by one helper; the first share is left.
    read = [i for helper in helpers for i in helper.read]
    assert sorted(read) == list(range(2, 23))
    assert not (folder / "train.bin").exists()
    first = Documents()
    notes: list[str] = []
    packed = prepare(first, notes.append)
    assert first.read == [0, 1]
    assert_packed(packed)
    for side, corpus in alone.items():
        assert packed[side].digest == corpus.digest
        assert packed[side].text_bytes == corpus.text_bytes
    assert "other processes tokenized 21 of 23 parts of train" in notes
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["eval.bin", "manifest.json", "train.bin"]
    manifest = folder / "manifest.json"
    other = folder.with_name("alone-bytes") / "manifest.json"
    assert manifest.read_bytes() == other.read_bytes()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("dies_after", [0, 1, 8, 15])
def test_one_that_helps_or_leads_may_be_killed_at_any_time(dies_after: int, folder: Path) -> None:
    help_prepare(folder, dying(dies_after))
    assert len(list((folder / "shares").glob("train-*.npz"))) == (dies_after + 1) // 2
    prepare_and_die(dying(min(dies_after, 2)))
    help_prepare(folder, dying(3))
    last = Documents()
    assert_packed(prepare(last))
    assert len(last.read) <= 23 - dies_after


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_share_is_tokenized_again(damage: str, folder: Path) -> None:
    help_prepare(folder, Documents())
    path = folder / "shares/train-10-12.npz"
    content = bytearray(path.read_bytes())
    content[content.index(b"text 10") + 3] ^= 4
    path.write_bytes({"cut": content[:-30], "flip": content, "empty": b""}[damage])
    first = Documents()
    assert_packed(prepare(first))
    assert first.read == [0, 1, 10, 11]


class Slow(tokenizer.Bytes):
    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        time.sleep(0.002)
        return super().encode(texts)


@pytest.mark.usefixtures("at_once")
def test_all_at_once_make_the_tokens_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_TAIL_BYTES", 300)
    train = Documents(TEXTS * 9)
    sides = {"train": train, "eval": Documents(TEXTS[:3])}
    outcomes: list[bytes] = []
    notes: list[str] = []

    def prepare_slowly() -> None:
        packed = packing.prepared("k", lambda: sides, Slow(), notes.append)
        outcomes.append(packed["train"].tokens.tobytes())

    run_threads([prepare_slowly] * 4)
    assert outcomes == [packed_bytes(TEXTS * 9)] * 4
    assert any(note.startswith("other processes tokenized") for note in notes)
    # At most a share or two of each process is done twice.
    assert len(train.read) < 9 * 23 + 4 * 2 * 4


class Wide(tokenizer.Bytes):
    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [ids + (self.vocab_size - 256) for ids in super().encode(texts)]


@pytest.mark.parametrize(("size", "width"), [(256, 1), (257, 2), (1 << 16, 2), ((1 << 16) + 1, 4)])
def test_large_vocabularies_take_two_or_four_bytes(size: int, width: int) -> None:
    encoder = Wide(key="wide", vocab_size=size)
    sides = {"train": Documents(), "eval": Documents([])}
    packed = packing.prepared("w", lambda: sides, encoder, print)
    assert packed["train"].tokens.itemsize == width
    assert packed["train"].tokens[0] == TEXTS[0][0] + size - 256
    assert len(packed["eval"].tokens) == 0


# The cache


def test_cache_that_cannot_be_written(cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache_root / "file").write_text("")
    monkeypatch.setenv("MUPAX_DATA", str(cache_root / "file/cache"))
    message = r"cannot write prepared data to .*Set MUPAX_DATA \(or data\.data_dir\) to a folder"
    with pytest.raises(data.DataError, match=message):
        prepare()


def test_cache_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = prepare()["train"].digest
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write anywhere
    # Text that others prepared is read.
    assert prepare()["train"].digest == digest
    assert cache.remembered("none", lambda: {"a": 1.0}) == {"a": 1.0}
    with pytest.raises(data.DataError, match=r"no permission\. Set MUPAX_DATA"):
        prepare(key="other")


def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(disk.DiskError, match=r"cannot write .*No space left on device\. Make room"):
        prepare()


def test_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache.fcntl, "flock", unsupported)
    message = r"has no locks \(Operation not supported\).*Set MUPAX_DATA"
    with pytest.raises(data.DataError, match=message):
        prepare()


def test_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MUPAX_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache.root() == tmp_path / "xdg" / "mupax"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache.root() == Path.home() / "Library" / "Caches" / "mupax"


def test_remembered_numbers_are_checked(cache_root: Path) -> None:
    assert cache.remembered("n", lambda: {"a": 0.5}) == {"a": 0.5}
    assert cache.remembered("n", lambda: {"a": 0.7}) == {"a": 0.5}
    (cache_root / "references/n.json").write_text('{"a": "x"}')
    assert cache.remembered("n", lambda: {"a": 0.7}) == {"a": 0.7}


def test_digest_tells_parts_apart() -> None:
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", "")]
    assert len({cache.digest(*words) for words in parts}) == 4
