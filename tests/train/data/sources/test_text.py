"""Text as data: what the corpus is, how it is split, and that windows give every token back."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from PIL import Image

from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data.records import corpus
from mupax.train.data.sources import text
from mupax.train.data.text import packing, tokenizer
from mupax.train.data.text.batches import TokenData
from mupax.zoo import configs
from mupax.zoo.configs import DecoderConfig

pytestmark = pytest.mark.core

MODEL = configs.get("lm-tiny")
assert isinstance(MODEL, DecoderConfig)
SMALL = dataclasses.replace(MODEL, seq_len=7)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quiet(line: str) -> None:
    """Takes notes and does nothing."""


def own(path: Path, model: DecoderConfig = SMALL, seed: int = 0, **fields) -> TokenData:
    dataset = data.load(
        DataConfig(name=f"text:{path}", batch_size=fields.pop("batch_size", 4), **fields),
        model,
        seed=seed,
        note=quiet,
    )
    assert isinstance(dataset, TokenData)
    return dataset


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def many(count: int = 60) -> dict[str, str]:
    return {
        f"d{i % 3}/f{i}.txt": f"document {i} " + "abcdefg"[: i % 7] * (i % 11) for i in range(count)
    }


def as_text(ids: np.ndarray) -> str:
    return bytes(ids.astype(np.uint8)).decode()


# A user's own text


def test_folder_is_split_by_file(tmp_path: Path) -> None:
    files = many()
    dataset = own(write(tmp_path / "t", files))
    train, evaluation = (
        as_text(np.asarray(t)).split("\0")[:-1] for t in (dataset._train, dataset._eval)
    )
    for name, content in files.items():
        assert (content in evaluation) == (corpus.side(name) == "eval")
        assert (content in train) != (content in evaluation)
    assert evaluation


def test_hidden_files_are_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "t", {**many(), ".git/config": "secret" * 50, ".hidden": "secret" * 50})
    dataset = own(path)
    assert "secret" not in as_text(np.asarray(dataset._train)) + as_text(np.asarray(dataset._eval))


def test_two_files_are_one_on_each_side(tmp_path: Path) -> None:
    dataset = own(write(tmp_path / "t", {"a": "first " * 20, "b": "second " * 20}))
    sides = {as_text(np.asarray(dataset._train)), as_text(np.asarray(dataset._eval))}
    assert sides == {"first " * 20 + "\0", "second " * 20 + "\0"}


def test_single_file_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(200)))
    dataset = own(path)
    train, evaluation = as_text(np.asarray(dataset._train)), as_text(np.asarray(dataset._eval))
    assert train[:-1] + evaluation[:-1] == path.read_text()
    assert train.endswith("\n\0")
    assert 0.05 < len(evaluation) / len(train) < 0.15


def test_large_file_is_one_document_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PIECE_BYTES", 50)
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    pieces = corpus._pieces(tmp_path / "a.txt", 0, (tmp_path / "a.txt").stat().st_size)
    assert len(pieces) > 10
    assert b"".join(piece.read()[0][0] for piece in pieces) == (tmp_path / "a.txt").read_bytes()
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.read()[0][0].endswith(b"\n") for piece in pieces)


def test_a_file_without_lines_is_cut_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PIECE_BYTES", 10)
    (tmp_path / "a.txt").write_text("∂é" * 20 + "x")
    pieces = corpus._pieces(tmp_path / "a.txt", 0, (tmp_path / "a.txt").stat().st_size)
    assert len(pieces) > 5
    assert "".join(piece.read()[0][0].decode() for piece in pieces) == "∂é" * 20 + "x"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no text in it"),
        ({"empty.txt": ""}, "has no text in it"),
        ({"b.bin": "word\0" * 40}, r"/t has no text in it: NUL bytes in b\.bin;"),
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
def test_wrong_text_is_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(data.DataError, match=message):
        own(write(tmp_path / "t", files))


def test_files_that_are_no_text_are_left_out_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "t", {**many(), "package.json": '{"name": "secret"}'})
    facts = own(write(tmp_path / "plain", many())).facts
    Image.new("RGB", (20, 20)).save(path / "d1" / "logo.png")
    notes: list[str] = []
    dataset = data.load(
        DataConfig(name=f"text:{path}", batch_size=4), SMALL, seed=0, note=notes.append
    )
    for name in ("d1/logo.png", "package.json"):
        assert sum(str(path) in note and name in note for note in notes) == 1
    assert dataset.facts == {**facts, "name": dataset.facts["name"]}
    for i in range(9):
        (path / f"{i}.csv").write_text("a,b")
    data.load(DataConfig(name=f"text:{path}", batch_size=4), SMALL, seed=0, note=notes.append)
    assert any(
        "left out 9 entries" in note and "0.csv, 1.csv, 2.csv, 3.csv and 5 more" in note
        for note in notes
    )


@pytest.mark.parametrize("packed", [False, True])
def test_a_json_list_is_refused_with_a_command_that_writes_its_lines(
    tmp_path: Path, packed: bool
) -> None:
    records = [{"id": i, "text": content} for i, content in enumerate(many().values())]
    file = tmp_path / "t" / ("docs.json.gz" if packed else "docs.json")
    write(tmp_path / "t", {"README": "what this is"})
    file.write_bytes(
        gzip.compress(json.dumps(records).encode())
        if packed
        else json.dumps(records, indent=1).encode()
    )
    for path in (file, tmp_path / "t"):  # the file, and a folder that has little else
        with pytest.raises(data.DataError, match=re.escape(f"{file} holds records")) as refused:
            own(path)
    _, command = str(refused.value).splitlines()
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=environ)
    assert [
        json.loads(line) for line in (tmp_path / "docs.jsonl").read_text().splitlines()
    ] == records
    own(tmp_path / "docs.jsonl")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.zst", "a.arrow"])
def test_other_records_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, {name: "text,label\n" * 40}) / name
    with pytest.raises(
        data.DataError, match=rf"{name} holds records .*; write them as JSON lines or Parquet"
    ):
        own(path)


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        data.DataError, match=f"no file or folder {tmp_path}/gone; write data.name as text:PATH"
    ):
        own(tmp_path / "gone")


def test_changed_text_has_another_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "t", many())
    first = own(path).facts["digest"]
    assert own(path).facts["digest"] == first
    assert own(write(tmp_path / "copy", many())).facts["digest"] == first
    write(path, {"d0/f0.txt": "document 0 changed"})
    assert own(path).facts["digest"] != first


# Windows


def test_every_epoch_covers_every_window_once(tmp_path: Path) -> None:
    dataset = own(write(tmp_path / "t", many()), batch_size=1)
    tokens = np.asarray(dataset._train)
    offsets = set()
    for epoch in range(5):
        offset = dataset._offset(epoch)
        expected = [tokens[offset + 7 * i : offset + 7 * i + 8] for i in range(dataset.train_size)]
        windows = []
        for k in range(epoch * dataset.train_size, (epoch + 1) * dataset.train_size):
            batch = dataset.train_batch(k)
            windows.append(np.append(batch["inputs"][0], batch["targets"][0, -1]))
        assert sorted(map(tuple, windows)) == sorted(map(tuple, expected))
        assert [tuple(s) for s in windows] != [tuple(e) for e in expected]
        assert len(tokens) - 2 * 7 < 7 * dataset.train_size <= len(tokens) - 7
        offsets.add(offset)
    assert len(offsets) > 1  # or a text seen twice is cut at the same places


def test_batch_has_the_promised_arrays(tmp_path: Path) -> None:
    batch = own(write(tmp_path / "t", many())).train_batch(3)
    assert {name: (a.shape, a.dtype) for name, a in batch.items()} == {
        "inputs": ((4, 7), np.dtype("int32")),
        "targets": ((4, 7), np.dtype("int32")),
        "weights": ((4, 7), np.dtype("float32")),
    }
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert (batch["weights"] == 1).all()


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_a_batch(tmp_path: Path, processes: int) -> None:
    dataset = own(write(tmp_path / "t", many()), batch_size=8)
    share = 8 // processes
    rows = [slice(p * share, (p + 1) * share) for p in range(processes)]
    for k in (0, 5, 997):
        for name, whole in dataset.train_batch(k).items():
            assert np.array_equal(
                np.concatenate([dataset.train_batch(k, r)[name] for r in rows]), whole
            )
    iterators = [dataset.eval_batches(r) for r in rows]
    for whole, *parts in zip(dataset.eval_batches(), *iterators, strict=True):
        for name in whole:
            assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_resume_is_as_if_uninterrupted(tmp_path: Path) -> None:
    path = write(tmp_path / "t", many())
    whole = list(itertools.islice(own(path).train_batches(0), 30))
    resumed = list(
        itertools.islice(own(path).train_batches(17), 13)
    )  # a new process would load anew, as this does
    for a, b in zip(whole[17:], resumed, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    other = own(path, seed=1).train_batch(0)["inputs"]
    assert not np.array_equal(other, whole[0]["inputs"])


def test_evaluation_predicts_every_token_once(tmp_path: Path) -> None:
    dataset = own(write(tmp_path / "t", many()), eval_batch_size=3)
    tokens = np.asarray(dataset._eval)
    assert (len(tokens) - 1) % 7 != 0  # the last window is a part
    batches = list(dataset.eval_batches())
    targets = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
    assert sorted(targets) == sorted(tokens[1:])
    assert sum((b["weights"].sum(axis=1) > 0).sum() for b in batches) == dataset.eval_size
    assert {b["inputs"].shape for b in batches} == {(3, 7)}
    assert dataset.eval_targets().sum() == len(tokens) - 1


def test_fewer_evaluation_examples(tmp_path: Path) -> None:
    path = write(tmp_path / "t", many())
    whole, some = own(path, eval_batch_size=2), own(path, eval_batch_size=2, eval_examples=3)
    assert some.eval_size == 3
    assert [b["weights"][:, 0].tolist() for b in some.eval_batches()] == [[1, 1], [1, 0]]
    first = next(whole.eval_batches())
    assert np.array_equal(first["inputs"], next(some.eval_batches())["inputs"])
    assert some.eval_targets().sum() == sum(b["weights"].sum() for b in some.eval_batches())


# Tokenizers


def test_bytes_come_back(tmp_path: Path) -> None:
    dataset = own(write(tmp_path / "t", many()))
    assert isinstance(dataset.tokenizer, tokenizer.Bytes)
    assert dataset.tokenizer.decode(dataset.tokenizer.encode(["naïve ∂".encode()])[0]) == "naïve ∂"
    assert dataset.tokenizer.encode(["aé".encode()])[0].tolist() == [97, 195, 169]
    assert dataset.tokenizer.decode([97, 195]) == "a�"
    assert dataset.tokenizer.decode([97, 256, 98, 299]) == "a�b�", (
        "ids of a model with more than bytes"
    )
    assert dataset.bytes_per_token == 1.0


def test_bpe_trained_on_the_training_text(tmp_path: Path, cache_folder: Path) -> None:
    path = write(tmp_path / "t", {name: content + " naïve\n" for name, content in many().items()})
    model = dataclasses.replace(SMALL, vocab_size=300)
    notes: list[str] = []
    config = DataConfig(name=f"text:{path}", batch_size=2, tokenizer="bpe:300")
    dataset = data.load(config, model, seed=0, note=notes.append)
    assert isinstance(dataset, TokenData)
    assert isinstance(dataset.tokenizer, tokenizer.Subwords)
    (ids,) = dataset.tokenizer.encode(["document 7 naïve ∂\n".encode()])
    assert dataset.tokenizer.decode(ids) == "document 7 naïve ∂\n"
    assert 1 < dataset.bytes_per_token < 10
    side = [
        content + " naïve\n"
        for name, content in sorted(many().items())
        if corpus.side(name) == "eval"
    ]
    assert dataset.tokenizer.decode(np.asarray(dataset._eval)) == "".join(side)
    assert dataset.facts["eval_bytes"] == sum(len(c.encode()) + 1 for c in side)
    first = len(dataset.tokenizer.decode(dataset._eval[:1]).encode())  # is no target
    assert dataset.bytes_per_token == pytest.approx(
        (dataset.facts["eval_bytes"] - first) / (len(dataset._eval) - 1)
    )
    assert dataset._eval.max() < 300
    assert dataset.references() == []
    # A file that says how a model's inputs are padded and cut gives the same ids.
    library = tokenizers.Tokenizer.from_str(dataset.tokenizer._library.to_str())
    library.enable_padding()
    library.enable_truncation(3)
    library.save(str(tmp_path / "padded.json"))
    texts = [b"document 7", b"a"]
    assert [len(ids) for ids in dataset.tokenizer.encode(texts)] == [
        len(ids) for ids in tokenizer.Subwords(tmp_path / "padded.json").encode(texts)
    ]
    # A second load trains nothing and packs nothing; deleting everything gives the same again.
    again: list[str] = []
    assert data.load(config, model, seed=0, note=again.append).facts == dataset.facts
    assert notes
    assert not again
    saved = next((cache_folder / "tokenizers").glob("*.json")).rename(tmp_path / "mine.json")
    assert data.load(config, model, seed=0, note=quiet).facts == dataset.facts
    mine = data.load(dataclasses.replace(config, tokenizer=str(saved)), model, seed=0, note=quiet)
    assert np.array_equal(mine.train_batch(5)["inputs"], dataset.train_batch(5)["inputs"])


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
    ],
)
def test_wrong_tokenizer_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(data.DataError, match=message):
        own(write(tmp_path / "t", many()), tokenizer=name)


def test_broken_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"version": "1.0"')
    with pytest.raises(data.DataError, match=r"broken\.json is no tokenizer\.json"):
        own(write(tmp_path / "t", many()), tokenizer=str(tmp_path / "broken.json"))


def test_tokenizer_without_a_separator(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "words.json")
    )
    with pytest.raises(data.DataError, match="no token to end a document with"):
        own(write(tmp_path / "t", many()), tokenizer=str(tmp_path / "words.json"))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path / "t", many())
    (tmp_path / "t" / "latin.txt").write_bytes("naïve".encode("latin-1") * 20)
    own(tmp_path / "t")  # bytes are bytes
    with pytest.raises(data.DataError, match="is not UTF-8"):
        own(tmp_path / "t", model=dataclasses.replace(SMALL, vocab_size=300), tokenizer="bpe:300")


def test_vocabulary_must_fit(tmp_path: Path) -> None:
    with pytest.raises(
        data.DataError, match=r"256 tokens and the model 97; write --model\.vocab-size 256"
    ):
        own(write(tmp_path / "t", many()), model=dataclasses.replace(SMALL, vocab_size=97))


def test_text_is_not_for_image_models(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="the model reads images; write a decoder"):
        data.load(
            DataConfig(name=f"text:{tmp_path}", batch_size=2), configs.get("vit-tiny"), seed=0
        )


def test_negative_seed() -> None:
    with pytest.raises(data.DataError, match="seed is -1"):
        data.load(DataConfig(name="python_corpus", batch_size=2), MODEL, seed=-1)


def test_records_are_text_either_way() -> None:
    records = text.records([{"t": "é"}, {"t": "é".encode()}], "t")
    assert [records[i] for i in range(len(records))] == [[("é".encode(), True)]] * 2
    assert tokenizer.Bytes().encode([records[0][0][0]])[0].tolist() == [195, 169]
    assert packing.SIDES == ("train", "eval")
