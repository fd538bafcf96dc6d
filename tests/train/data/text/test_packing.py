"""Preparation: it resumes after a kill, repairs what is damaged, and is done by one process while others wait."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mupax import disk
from mupax.train import data
from mupax.train.data import cache
from mupax.train.data.text import packing, shares, tokenizer

pytestmark = pytest.mark.core

TEXTS = [b"text %d " % i * (i % 5 + 1) for i in range(23)]


class Documents(Sequence):
    """Counts what is read, and dies after so many."""

    def __init__(self, texts: list[bytes], dies_after: int | None = None) -> None:
        self.texts, self.dies_after, self.read = texts, dies_after, []

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> list[tuple[bytes, bool]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if len(self.read) == self.dies_after:
            raise KeyboardInterrupt
        self.read.append(i)
        return [(self.texts[i], True)]


@pytest.fixture(autouse=True)
def small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path))
    monkeypatch.setattr(packing, "_STEP_BYTES", 40)
    return tmp_path


def quiet(line: str) -> None:
    """Takes notes and does nothing."""


def prepare(
    train: Documents | None = None, note=quiet, key: str = "k"
) -> dict[str, packing.PackedCorpus]:
    sides = {"train": train or Documents(TEXTS), "eval": Documents(TEXTS[:3])}
    return packing.prepared(key, lambda: sides, tokenizer.Bytes(), note)


def whole(texts: list[bytes]) -> bytes:
    return b"".join(text + b"\0" for text in texts)


def test_documents_stand_whole_and_in_order() -> None:
    splits = prepare()
    assert splits["train"].tokens.tobytes() == whole(TEXTS)
    assert splits["eval"].tokens.tobytes() == whole(TEXTS[:3])
    assert splits["train"].text_bytes == len(whole(TEXTS))


@pytest.mark.parametrize("dies_after", [0, 1, 7, 22])
def test_killed_pass_goes_on(dies_after: int, small_steps: Path) -> None:
    once = prepare(key="uninterrupted")
    killed, second = Documents(TEXTS, dies_after), Documents(TEXTS)
    with pytest.raises(KeyboardInterrupt):
        prepare(killed)
    folder = small_steps / "packed" / "k-bytes"
    assert not (folder / "manifest.json").exists()
    with (folder / "train.bin").open("ab") as file:
        file.write(b"half a step that no progress file vouches for")
    splits = prepare(second)
    assert splits["train"].tokens.tobytes() == once["train"].tokens.tobytes()
    assert splits["train"].digest == once["train"].digest
    assert dies_after < 7 or len(second.read) < len(TEXTS)
    assert set(second.read) | set(killed.read) == set(range(len(TEXTS)))


def test_prepared_text_is_not_prepared_again() -> None:
    prepare()
    second, notes = Documents(TEXTS), []
    prepare(second, notes.append)
    assert second.read == []
    assert notes == []


def _cut(folder: Path) -> None:
    os.truncate(folder / "train.bin", 50)


def _flip(folder: Path) -> None:
    content = bytearray((folder / "train.bin").read_bytes())
    content[33] ^= 4
    (folder / "train.bin").write_bytes(content)


def _remove(folder: Path) -> None:
    (folder / "eval.bin").unlink()


def _half_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def _foreign_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text(
        json.dumps({"format": 1, "tokenizer": "bytes", "sides": {"train": {}}})
    )


@pytest.mark.parametrize("damage", [_cut, _flip, _remove, _half_manifest, _foreign_manifest])
def test_damaged_text_is_prepared_again(damage, small_steps: Path) -> None:
    digest = prepare()["train"].digest
    damage(small_steps / "packed" / "k-bytes")
    notes: list[str] = []
    splits = prepare(note=notes.append)
    assert splits["train"].tokens.tobytes() == whole(TEXTS)
    assert splits["train"].digest == digest
    assert any("preparing it again" in note for note in notes)


@pytest.mark.parametrize("damage", ["{", '{"documents": 1}', "", "tokens"])
@pytest.mark.parametrize("at", [0, 2])
def test_damaged_progress_counts_up_to_the_damage(at: int, damage: str, small_steps: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(Documents(TEXTS, 15))
    progress = small_steps / "packed" / "k-bytes" / "train.jsonl"
    lines = progress.read_text().splitlines(keepends=True)
    assert len(lines) > 3
    more = json.dumps({**json.loads(lines[at]), "tokens": 1}) if damage == "tokens" else damage
    progress.write_text("".join([*lines[:at], more, "\n", *lines[at + 1 :]]))
    second = Documents(TEXTS)
    assert prepare(second)["train"].tokens.tobytes() == whole(TEXTS)
    assert second.read == list(
        range(json.loads(lines[at - 1])["documents"] if at else 0, len(TEXTS))
    )


def test_a_line_whose_tokens_are_gone_is_done_again(small_steps: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(Documents(TEXTS, 15))
    folder = small_steps / "packed" / "k-bytes"
    first, second, *_ = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    os.truncate(folder / "train.bin", second["tokens"] - 1)
    again = Documents(TEXTS)
    assert prepare(again)["train"].tokens.tobytes() == whole(TEXTS)
    assert again.read[0] == first["documents"]


def test_progress_costs_as_many_bytes_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written whole after every step, as it was once, it grew with the square of the text."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def written(steps: int) -> int:
        before = _bytes_written()
        prepare(Documents([b"x" * 40] * steps), key=f"steps{steps}")
        return _bytes_written() - before

    few, many = written(100), written(800)
    assert many < 9 * few  # 22 times as many when it was quadratic


def _bytes_written() -> int:
    """Of this process, to files of any kind."""
    text = Path("/proc/self/io")
    if not text.exists():
        pytest.skip("the system does not count them")
    return int(text.read_text().split("wchar:")[1].split()[0])


def test_one_prepares_and_the_others_wait() -> None:
    sources, outcomes, notes = [Documents(TEXTS) for _ in range(4)], [], []
    threads = [
        threading.Thread(
            target=lambda source=source: outcomes.append(prepare(source, notes.append))
        )
        for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(outcomes) == 4
    assert sorted(len(source.read) for source in sources) == [0, 0, 0, len(TEXTS)]
    assert {packed["train"].digest for packed in outcomes} == {outcomes[0]["train"].digest}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shares, and help without waiting."""
    monkeypatch.setattr(shares, "_PARTS", 2)
    monkeypatch.setattr(cache, "PATIENCE_S", 0.0)


def helped(folder: Path, *helpers: Documents) -> None:
    """What processes do that wait for one which holds the lock, and does nothing, until they have no more to do."""
    ready = threading.Barrier(len(helpers))

    def wait(documents: Documents) -> None:
        ready.wait()
        with contextlib.suppress(KeyboardInterrupt):
            packing._help(
                {"train": documents, "eval": Documents(TEXTS[:3])}, tokenizer.Bytes(), folder
            )

    threads = [threading.Thread(target=wait, args=(documents,)) for documents in helpers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)


@pytest.mark.usefixtures("at_once")
def test_processes_that_wait_tokenize_shares_that_the_first_one_takes(small_steps: Path) -> None:
    once, folder = prepare(key="alone"), small_steps / "packed" / "k-bytes"
    helpers, first, notes = [Documents(TEXTS) for _ in range(3)], Documents(TEXTS), []
    helped(folder, *helpers)
    assert sorted(i for one in helpers for i in one.read) == list(
        range(2, 23)
    )  # each by one; the first share is left
    assert not (folder / "train.bin").exists()
    packed = prepare(first, notes.append)
    assert first.read == [0, 1]
    assert packed["train"].tokens.tobytes() == once["train"].tokens.tobytes()
    assert {side: packed[side].digest for side in once} == {
        side: once[side].digest for side in once
    }
    assert packed["train"].text_bytes == once["train"].text_bytes
    assert "other processes tokenized 21 of 23 parts of train" in notes
    assert sorted(path.name for path in folder.iterdir()) == [
        "eval.bin",
        "manifest.json",
        "train.bin",
    ]
    manifests = [
        (folder.with_name(f"{key}-bytes") / "manifest.json").read_bytes() for key in ("k", "alone")
    ]
    assert manifests[0] == manifests[1]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("dies_after", [0, 1, 8, 15])
def test_one_that_helps_or_leads_may_be_killed_at_any_time(
    dies_after: int, small_steps: Path
) -> None:
    folder, leads = small_steps / "packed" / "k-bytes", Documents(TEXTS, min(dies_after, 2))
    helped(folder, Documents(TEXTS, dies_after))
    assert len(list((folder / "shares").glob("train-*.npz"))) == (dies_after + 1) // 2
    with pytest.raises(KeyboardInterrupt):
        prepare(leads)
    helped(folder, Documents(TEXTS, 3))
    last = Documents(TEXTS)
    assert prepare(last)["train"].tokens.tobytes() == whole(TEXTS)
    assert len(last.read) <= 23 - dies_after


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_share_is_tokenized_again(damage: str, small_steps: Path) -> None:
    folder = small_steps / "packed" / "k-bytes"
    helped(folder, Documents(TEXTS))
    path = folder / "shares" / "train-10-12.npz"
    content = bytearray(path.read_bytes())
    content[content.index(b"text 10") + 3] ^= 4
    path.write_bytes({"cut": content[:-30], "flip": content, "empty": b""}[damage])
    first = Documents(TEXTS)
    assert prepare(first)["train"].tokens.tobytes() == whole(TEXTS)
    assert first.read == [0, 1, 10, 11]


@pytest.mark.usefixtures("at_once")
def test_all_at_once_make_what_one_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_TAIL_BYTES", 300)

    class Slow(tokenizer.Bytes):
        def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
            time.sleep(0.002)
            return super().encode(texts)

    sides, packed, notes = {"train": Documents(TEXTS * 9), "eval": Documents(TEXTS[:3])}, [], []
    threads = [
        threading.Thread(
            target=lambda: packed.append(packing.prepared("k", lambda: sides, Slow(), notes.append))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [one["train"].tokens.tobytes() for one in packed] == [whole(TEXTS * 9)] * 4
    assert any(note.startswith("other processes tokenized") for note in notes)
    assert (
        len(sides["train"].read) < 9 * 23 + 4 * 2 * 4
    )  # at most a share or two of each process is done twice


def test_large_vocabularies_take_two_or_four_bytes(small_steps: Path) -> None:
    class Wide(tokenizer.Bytes):
        def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
            return [ids + (self.vocab_size - 256) for ids in super().encode(texts)]

    for size, width in ((256, 1), (257, 2), (1 << 16, 2), ((1 << 16) + 1, 4)):
        encoder = Wide(key=f"wide{size}", vocab_size=size)
        splits = packing.prepared(
            "w", lambda: {"train": Documents(TEXTS), "eval": Documents([])}, encoder, quiet
        )  # fmt: skip
        assert splits["train"].tokens.itemsize == width
        assert splits["train"].tokens[0] == TEXTS[0][0] + size - 256
        assert len(splits["eval"].tokens) == 0


def test_cache_that_cannot_be_written(small_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small_steps / "file").write_text("")
    monkeypatch.setenv("MUPAX_DATA", str(small_steps / "file" / "cache"))
    with pytest.raises(
        data.DataError,
        match=r"cannot write prepared data to .*Set MUPAX_DATA \(or data\.data_dir\) to a folder",
    ):
        prepare()


def test_cache_that_may_not_be_written(small_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser may write anywhere
    with pytest.raises(data.DataError, match=r"no permission\. Set MUPAX_DATA"):
        prepare()


def test_cache_prepared_by_others_is_read(
    small_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = prepare()["train"].digest
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert prepare()["train"].digest == digest
    assert cache.remembered("none", lambda: {"a": 1.0}) == {"a": 1.0}


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
    with pytest.raises(
        data.DataError, match=r"has no locks \(Operation not supported\).*Set MUPAX_DATA"
    ):
        prepare()


def test_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MUPAX_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache.root() == tmp_path / "xdg" / "mupax"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache.root() == Path.home() / "Library" / "Caches" / "mupax"


def test_remembered_numbers_are_checked(small_steps: Path) -> None:
    assert cache.remembered("n", lambda: {"a": 0.5}) == {"a": 0.5}
    assert cache.remembered("n", lambda: {"a": 0.7}) == {"a": 0.5}
    (small_steps / "references" / "n.json").write_text('{"a": "x"}')
    assert cache.remembered("n", lambda: {"a": 0.7}) == {"a": 0.7}


def test_digest_tells_parts_apart() -> None:
    assert (
        len(
            {
                cache.digest("ab", "c"),
                cache.digest("a", "bc"),
                cache.digest("abc"),
                cache.digest("abc", ""),
            }
        )
        == 4
    )
