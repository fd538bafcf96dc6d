"""Text as data: documents, their split, windows and tokenizers."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models

from mupax import disk
from mupax.train.data import DataError
from mupax.train.data.records import corpus, user_files
from mupax.train.data.sources import text
from mupax.train.data.text import tokenizer
from mupax.zoo import configs
from tests.train.data import loading
from tests.train.data.loading import (
    assert_batches_equal,
    assert_refused,
    documents,
    joined,
    load_with_notes,
    token_ids,
)
from tests.train.data.writing import PACKERS, write, write_files

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("work_folder")]

FILES = {f"d{i % 3}/f{i}.txt": f"document {i} " + "abcdefg"[: i % 7] * (i % 11) for i in range(60)}


@pytest.fixture
def folder(work_folder: Path) -> Path:
    return write_files("t", FILES)


def load(path: str = "t", **fields: Any) -> Any:
    return loading.load(f"text:{path}", **fields)


# A user's own text


def test_folder_is_split_by_file(folder: Path) -> None:
    write(folder / ".git/config", "secret" * 50)
    write(folder / ".hidden", "secret" * 50)
    train, evaluation = (documents(ids) for ids in token_ids(load()))
    assert evaluation
    for name, content in FILES.items():
        assert (content in evaluation) == (corpus.side(name) == "eval")
        assert (content in train) != (content in evaluation)
    assert len(train) + len(evaluation) == len(FILES)


def test_two_files_are_one_on_each_side() -> None:
    texts = {"a": "first " * 20, "b": "second " * 20}
    write_files("t", texts)
    train, evaluation = (documents(ids) for ids in token_ids(load()))
    assert sorted([train, evaluation]) == [[text] for text in texts.values()]


def test_single_file_is_cut_at_a_line() -> None:
    content = "".join(f"line {i}\n" for i in range(200))
    write("book.txt", content)
    (train,), (evaluation,) = (documents(ids) for ids in token_ids(load("book.txt")))
    assert train + evaluation == content
    assert train.endswith("\n")
    assert 0.05 < len(evaluation) / len(train) < 0.15


@pytest.mark.parametrize(
    ("content", "size", "end"),
    [
        ("".join(f"line {i}\n" for i in range(100)), 50, "\n"),
        ("∂é" * 20 + "x", 10, ""),  # without lines it is cut between characters
    ],
)
def test_large_file_is_one_document_in_pieces(
    content: str, size: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PIECE_BYTES", size)
    file = write("a.txt", content)
    pieces = corpus._pieces(file, 0, file.stat().st_size)
    texts = [piece.read()[0][0].decode() for piece in pieces]
    assert len(pieces) > 5
    assert "".join(texts) == content
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(text.endswith(end) for text in texts)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no text in it"),
        ({"empty.txt": ""}, "has no text in it"),
        ({"b.bin": "word\0" * 40}, r"t has no text in it: NUL bytes in b\.bin;"),
        (
            {"a.txt": "word " * 2000 + "\0", "b.txt": "word"},
            r"a\.txt line 1 is not text: it has a NUL byte",
        ),
        (
            {"a.txt": "short", "b.txt": "too"},
            "sequences of 7 need at least 14.*smaller model.seq_len",
        ),
    ],
)
def test_wrong_text_is_named(files: dict[str, str], message: str) -> None:
    Path("t").mkdir()
    write_files("t", files)
    assert_refused(message, "text:t")


def test_files_that_are_no_text_are_left_out_by_name(folder: Path) -> None:
    facts = load().facts
    write(folder / "package.json", '{"name": "secret"}')
    Image.new("RGB", (20, 20)).save(folder / "d1/logo.png")
    source, notes = load_with_notes("text:t")
    for name in ("d1/logo.png", "package.json"):
        assert len([note for note in notes if name in note]) == 1
    assert source.facts == facts
    for i in range(9):
        write(folder / f"{i}.csv", "a,b")
    (note,) = [note for note in load_with_notes("text:t")[1] if "csv" in note]
    assert "left out 9 entries" in note
    assert "0.csv, 1.csv, 2.csv, 3.csv and 5 more" in note


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_json_list_is_refused_with_a_command_that_writes_its_lines(suffix: str) -> None:
    records = [{"id": i, "text": content} for i, content in enumerate(FILES.values())]
    write("t/README", "what this is")
    content = json.dumps(records, indent=None if suffix else 1).encode()
    file = write(f"t/docs.json{suffix}", PACKERS.get(suffix, bytes)(content))
    for path in (str(file), "t"):  # the file, and a folder that has little else
        with pytest.raises(DataError, match=re.escape(f"{file} holds records")) as refused:
            load(path)
    _, command = str(refused.value).splitlines()
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, env=environ)
    assert [json.loads(line) for line in Path("docs.jsonl").read_text().splitlines()] == records
    load("docs.jsonl")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.zst", "a.arrow"])
def test_other_records_are_refused(name: str) -> None:
    write(name, "text,label\n" * 40)
    assert_refused(rf"{name} holds records .*; write them as JSON lines or Parquet", f"text:{name}")


def test_missing_path_is_named() -> None:
    assert_refused("no file or folder gone; write data.name as text:PATH", "text:gone")


def test_changed_text_has_another_digest(folder: Path) -> None:
    first = load().facts["digest"]
    assert load().facts["digest"] == first
    write_files("copy", FILES)
    assert load("copy").facts["digest"] == first
    write(folder / "d0/f0.txt", "document 0 changed")
    assert load().facts["digest"] != first


# Windows


@pytest.mark.usefixtures("folder")
def test_every_epoch_covers_every_window_once() -> None:
    dataset = load(batch_size=1)
    ids, _ = token_ids(dataset)
    size = dataset.train_size
    assert len(ids) - 2 * 7 < 7 * size <= len(ids) - 7
    offsets = set()
    for epoch in range(5):
        offset = dataset._offset(epoch)
        expected = [tuple(ids[offset + 7 * i : offset + 7 * i + 8]) for i in range(size)]
        windows = []
        for k in range(epoch * size, (epoch + 1) * size):
            batch = dataset.train_batch(k)
            windows.append((*batch["inputs"][0], batch["targets"][0, -1]))
        assert sorted(windows) == sorted(expected)
        assert windows != expected
        offsets.add(offset)
    assert len(offsets) > 1  # or a text seen twice is cut at the same places


@pytest.mark.usefixtures("folder")
def test_batch_has_the_promised_arrays() -> None:
    batch = load().train_batch(3)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "inputs": ((8, 7), "int32"),
        "targets": ((8, 7), "int32"),
        "weights": ((8, 7), "float32"),
    }
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert (batch["weights"] == 1).all()


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.usefixtures("folder")
def test_processes_share_a_batch(processes: int) -> None:
    dataset = load()
    share = 8 // processes
    rows = [slice(p * share, (p + 1) * share) for p in range(processes)]
    for k in (0, 5, 997):
        parts = [dataset.train_batch(k, part) for part in rows]
        assert_batches_equal(joined(parts), dataset.train_batch(k))
    iterators = [dataset.eval_batches(part) for part in rows]
    for batch, *parts in zip(dataset.eval_batches(), *iterators, strict=True):
        assert_batches_equal(joined(parts), batch)


@pytest.mark.usefixtures("folder")
def test_resume_is_as_if_uninterrupted() -> None:
    iterator = load().train_batches(0)
    uninterrupted = [next(iterator) for _ in range(30)]
    iterator.close()
    resumed = load().train_batches(17)  # a new process would load anew
    for expected in uninterrupted[17:]:
        assert_batches_equal(next(resumed), expected)
    resumed.close()
    other = load(seed=1).train_batch(0)["inputs"]
    assert not np.array_equal(other, uninterrupted[0]["inputs"])


@pytest.mark.usefixtures("folder")
def test_evaluation_predicts_every_token_once() -> None:
    dataset = load(eval_batch_size=3)
    _, ids = token_ids(dataset)
    assert (len(ids) - 1) % 7 != 0  # the last window is a part
    batches = list(dataset.eval_batches())
    assert {batch["inputs"].shape for batch in batches} == {(3, 7)}
    batch = joined(batches)
    assert sorted(batch["targets"][batch["weights"] > 0]) == sorted(ids[1:])
    assert (batch["weights"].sum(axis=1) > 0).sum() == dataset.eval_size
    assert dataset.eval_targets().sum() == len(ids) - 1


@pytest.mark.usefixtures("folder")
def test_fewer_evaluation_examples() -> None:
    some = load(eval_batch_size=2, eval_examples=3)
    batches = list(some.eval_batches())
    assert some.eval_size == 3
    assert [batch["weights"][:, 0].tolist() for batch in batches] == [[1, 1], [1, 0]]
    assert_batches_equal(batches[0], load(eval_batch_size=2).eval_batch(0))
    assert some.eval_targets().sum() == joined(batches)["weights"].sum()


# Tokenizers


@pytest.mark.usefixtures("folder")
def test_bytes_come_back() -> None:
    dataset = load()
    encoder = dataset.tokenizer
    assert isinstance(encoder, tokenizer.Bytes)
    assert encoder.decode(encoder.encode(["naïve ∂".encode()])[0]) == "naïve ∂"
    assert encoder.encode(["aé".encode()])[0].tolist() == [97, 195, 169]
    assert encoder.decode([97, 195]) == "a�"
    assert encoder.decode([97, 256, 98, 299]) == "a�b�", "ids of a model with more than bytes"
    assert dataset.bytes_per_token == 1.0


BPE = {"vocab_size": 300, "tokenizer": "bpe:300"}


def test_bpe_trained_on_the_training_text(cache_folder: Path) -> None:
    files = {name: f"{content} naïve\n" for name, content in FILES.items()}
    write_files("t", files)
    dataset, notes = load_with_notes("text:t", **BPE)
    assert notes
    encoder = dataset.tokenizer
    assert isinstance(encoder, tokenizer.Subwords)
    (ids,) = encoder.encode(["document 7 naïve ∂\n".encode()])
    assert encoder.decode(ids) == "document 7 naïve ∂\n"
    assert 1 < dataset.bytes_per_token < 10
    held_out = [content for name, content in sorted(files.items()) if corpus.side(name) == "eval"]
    _, evaluation = token_ids(dataset)
    assert encoder.decode(evaluation) == "".join(held_out)
    size = sum(len(content.encode()) + 1 for content in held_out)
    assert dataset.facts["eval_bytes"] == size
    first = len(encoder.decode(evaluation[:1]).encode())  # is no target
    assert dataset.bytes_per_token == pytest.approx((size - first) / (len(evaluation) - 1))
    assert evaluation.max() < 300
    assert dataset.references() == []
    # A file with padding and truncation of a model's inputs gives the same ids.
    library = Tokenizer.from_str(encoder._library.to_str())
    library.enable_padding()
    library.enable_truncation(3)
    library.save("padded.json")
    texts = [b"document 7", b"a"]
    padded = tokenizer.Subwords(Path("padded.json")).encode(texts)
    assert [ids.tolist() for ids in padded] == [ids.tolist() for ids in encoder.encode(texts)]
    # A second load trains nothing and packs nothing.
    again, notes = load_with_notes("text:t", **BPE)
    assert again.facts == dataset.facts
    assert not notes
    # Without the trained tokenizer the same one is trained again.
    (saved,) = (cache_folder / "tokenizers").glob("*.json")
    saved.rename("mine.json")
    assert load(**BPE).facts == dataset.facts
    mine = load(**{**BPE, "tokenizer": "mine.json"})
    assert_batches_equal(mine.train_batch(5), dataset.train_batch(5))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bpe:12", "write bpe:SIZE with a SIZE of at least 257"),
        ("bpe:many", "write bpe:SIZE"),
        ("bpe:400", r"write --model\.vocab-size 400"),
        (
            "gone.json",
            "no tokenizer at gone.json; write data.tokenizer as bytes, bpe:SIZE or the path",
        ),
        ("t", "t is a folder; write the path of a tokenizer.json"),
        ("broken.json", r"broken\.json is no tokenizer\.json"),
        ("words.json", "no token to end a document with"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_wrong_tokenizer_is_named(name: str, message: str) -> None:
    write("broken.json", '{"version": "1.0"')
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save("words.json")
    assert_refused(message, "text:t", tokenizer=name)


@pytest.mark.usefixtures("folder")
def test_tokenizer_that_cannot_be_read_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    write("mine.json", "{}")
    monkeypatch.setattr(disk, "PATIENCE_S", 0.0)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(disk.DiskError, match=r"mine\.json cannot be read: Input/output error"):
        load(tokenizer="mine.json")


def test_text_that_is_not_utf8(folder: Path) -> None:
    latin = write(folder / "latin.txt", ("x" * 9000 + "naïve " * 20).encode("latin-1"))
    for on_broken in ("stop", "skip"):  # bytes are bytes
        source, notes = load_with_notes("text:t", on_broken=on_broken)
        assert any(b"na\xefve" in ids.tobytes() for ids in token_ids(source))
        (line,) = [line for line in notes if "UTF-8" in line]
        assert line.startswith("t: not UTF-8, and read byte by byte as it is: latin.txt; ")
    assert_refused("is not UTF-8", "text:t", **BPE)
    write(latin, "naïve " * 20)
    _, notes = load_with_notes("text:t")
    assert not [line for line in notes if "UTF-8" in line], "the control"
    for encoding in ("utf-16", "utf-16-le"):
        write("wide.txt", ("naïve text " * 20).encode(encoding))
        assert_refused("is UTF-16.*, not UTF-8: convert it by `iconv", "text:wide.txt")


def test_last_byte_is_not_utf8(folder: Path) -> None:
    latin = write(folder / "latin.txt", ("plain words " * 20 + "café").encode("latin-1"))
    _, notes = load_with_notes("text:t")
    assert any("not UTF-8, and read byte by byte as it is: latin.txt; " in line for line in notes)
    write(latin, "plain words " * 20 + "café")
    _, notes = load_with_notes("text:t")
    assert not any("UTF-8" in line for line in notes), "the control"


def test_character_is_cut_where_the_check_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    content = "plain words " * 20 + "café"
    write("t/a.txt", content)
    monkeypatch.setattr(user_files, "_CHECKED_BYTES", len(content.encode()) - 1)
    _, notes = load_with_notes("text:t")
    assert not any("UTF-8" in line for line in notes)


@pytest.mark.usefixtures("folder")
def test_vocabulary_must_fit() -> None:
    message = r"256 tokens and the model 97; write --model\.vocab-size 256"
    assert_refused(message, "text:t", vocab_size=97)


def test_text_is_not_for_image_models() -> None:
    message = "the model reads images; write a decoder"
    assert_refused(message, "text:.", configs.get("vit-tiny"))


def test_negative_seed() -> None:
    assert_refused("seed is -1", "python_corpus", seed=-1)


def test_records_are_text_either_way() -> None:
    records = text.records([{"t": "é"}, {"t": "é".encode()}], "t")
    assert [records[i] for i in range(len(records))] == [[("é".encode(), True)]] * 2
