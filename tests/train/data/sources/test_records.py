"""A user's records and token ids: what is read of each format, on which side it is, and what is refused with which words."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from mupax.__main__ import main
from mupax.train.data import DataError
from mupax.train.data import __main__ as data_command
from mupax.train.data.records import corpus, lines, splits, tables, user_files
from mupax.train.data.text import named_tokenizers, tokenizer
from mupax.train.data.text.batches import TokenData
from tests.train.data.sources.test_text import SMALL, as_text, cache_folder, many, quiet, write

__all__ = ["cache_folder"]  # a fixture

pytestmark = pytest.mark.core

TEXTS = [f"document {i} é\n" + "abcdefg"[: i % 7] * (i % 11) for i in range(90)]


def as_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(
        json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)
    ).encode()


def as_table(path: Path, texts: list[str], field: str = "text") -> None:
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    parquet.write_table(table, path, row_group_size=37)


def write_as(path: Path, texts: list[str] = TEXTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    zstd = pyarrow.Codec("zstd")
    content = as_lines(texts)
    match path.suffix:
        case ".parquet":
            as_table(path, texts)
        case ".gz":
            path.write_bytes(gzip.compress(content))
        case ".zst":  # of two frames, as parallel compressors write
            path.write_bytes(
                b"".join(
                    zstd.compress(part, asbytes=True) for part in (content[:500], content[500:])
                )
            )
        case _:
            path.write_bytes(content)
    return path


def load(
    path: Path, kind: str = "records", note: Callable[[str], None] = quiet, **fields
) -> TokenData:
    from mupax.train import data
    from mupax.train.config.run import DataConfig

    vocab_size = fields.pop("vocab_size", 256)
    model = type(SMALL)(**{**vars(SMALL), "vocab_size": vocab_size})
    loaded = data.load(
        DataConfig(name=f"{kind}:{path}", batch_size=4, **fields), model, seed=0, note=note
    )
    assert isinstance(loaded, TokenData)
    return loaded


def documents(loaded: TokenData) -> tuple[list[str], list[str]]:
    train, evaluation = (
        as_text(np.asarray(ids)).split("\0")[:-1] for ids in (loaded._train, loaded._eval)
    )
    return train, evaluation


EVAL = [text for text in TEXTS if corpus.side(text.encode()) == "eval"]
assert EVAL


@pytest.mark.parametrize("kind", ["text", "records"])
@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.JSONL", "a.jsonl.zst", "a.parquet", "c4.json.gz", "a.ndjson"],
)
def test_every_format_has_the_same_documents(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_PART_BYTES", 900)
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(tables, "_PART_BYTES", 400)
    path, notes = write_as(tmp_path / name), []
    train, evaluation = documents(load(path, kind, notes.append))
    assert evaluation == EVAL
    assert train == [text for text in TEXTS if text not in EVAL]
    assert f"reading the field 'text' of {name}" in notes
    assert len(splits.sides(user_files.files(path, kind, "text", None, quiet))["train"]) > 3


def test_names_of_files_may_be_the_split(tmp_path: Path) -> None:
    write_as(tmp_path / "t" / "c4-train.0.jsonl", TEXTS[:50])
    write_as(tmp_path / "t" / "c4-train.1.jsonl.gz", TEXTS[50:80])
    write_as(tmp_path / "t" / "c4-validation.0.parquet", TEXTS[80:])
    assert documents(load(tmp_path / "t")) == (TEXTS[:80], TEXTS[80:])


def test_a_mixed_folder_says_what_it_leaves_out(tmp_path: Path) -> None:
    folder, notes = write(tmp_path / "t", {"README.md": "what this is", "sub/a.csv": "a,b"}), []
    write_as(folder / "a.jsonl", TEXTS)
    train, evaluation = documents(load(folder, "records", notes.append))
    assert sorted(train + evaluation) == sorted(TEXTS)
    for name in ("README.md", "sub/a.csv"):
        assert sum(str(folder) in note and name in note for note in notes) == 1
    notes.clear()
    train, evaluation = documents(load(folder, "text", notes.append))
    assert set(TEXTS) < {*train, *evaluation}
    assert "what this is" in "".join(text for text in train + evaluation if text not in TEXTS)
    assert [str(folder) in note for note in notes if "sub/a.csv" in note] == [True]
    assert not [note for note in notes if "README.md" in note]


def test_records_without_the_field_among_text_are_left_out(tmp_path: Path) -> None:
    folder, notes = write(tmp_path / "t", many()), []
    (folder / "log.jsonl").write_bytes(as_lines(["secret"], "message"))
    train, evaluation = documents(load(folder, "text", notes.append))
    assert "secret" not in "".join(train + evaluation)
    assert "'text'" in next(note for note in notes if "log.jsonl" in note)


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(TEXTS, "content"))
    as_table(tmp_path / "b.parquet", TEXTS, "content")
    for name, where in (
        ("a.jsonl", "a.jsonl line 1 has no field"),
        ("b.parquet", "b.parquet has no column"),
    ):
        with pytest.raises(DataError, match=f"{where} 'text'; write --data.field content"):
            load(tmp_path / name)
        assert sorted(
            itertools.chain(*documents(load(tmp_path / name, field="content")))
        ) == sorted(TEXTS)


GOOD = as_lines(TEXTS[:20])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            GOOD + b'{"text": "a"\n',
            r"line 21 is no JSON: '\{\"text\": \"a\"' .*Repair or remove the line",
        ),
        (GOOD + b'\n{"id": 1}\n', r"line 22 has no field 'text'; repair or remove it"),
        (
            GOOD + b'{"text": null, "body": "b"}\n',
            r"line 21 has null in 'text'; .*--data\.on-broken skip",
        ),
        (GOOD + b'{"text": ["a"]}\n', "line 21 has no text but list in 'text'"),
        (
            GOOD + b'["a"]\n',
            r"line 21 is no JSON object; write each document as \{\"text\": \.\.\.\}",
        ),
        (GOOD + b'{"text": "a\\u0000b"}\n', "line 21 has a NUL character"),
        (GOOD + b'{"text": "\\ud800"}\n', "line 21 has half of a surrogate pair"),
        (GOOD + b'{"text": "\xff"}\n', "line 21 is no JSON"),
        (b"", "has no records in it; records:PATH takes"),
        (b'{"text": "one"}\n', r"the training text of .* has 4 tokens; .*records by their content"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = write_as(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-30] if damage == "cut" else b"nothing of the kind" * 9)
    with pytest.raises(
        DataError, match=rf"cannot read {path}: .*It may be damaged or cut off; fetch it again"
    ):
        load(path)


# Files of ids

IDS = np.random.default_rng(0).integers(0, 50257, 4000)


def test_nanogpt_files_are_ids_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    IDS[:3000].astype(np.uint16).tofile(tmp_path / "t" / "train.bin")
    IDS[3000:].astype(np.uint16).tofile(tmp_path / "t" / "val.bin")
    loaded = load(tmp_path / "t", vocab_size=50257, tokenizer="ids:50257")
    assert np.array_equal(loaded._train, IDS[:3000])
    assert np.array_equal(loaded._eval, IDS[3000:])
    assert loaded.bytes_per_token is None
    assert loaded.tokenizer.separator == 50256
    assert loaded.tokenizer.decode(loaded.tokenizer.encode([b"15 496"])[0]) == "15 496 "
    with pytest.raises(DataError, match="no text but ids below 50257 between spaces"):
        loaded.tokenizer.encode([b"def "])


@pytest.mark.parametrize("kind", ["npy int64", "llm.c", "uint32"])
def test_other_files_of_ids(tmp_path: Path, kind: str) -> None:
    path, vocab_size = tmp_path / "a.bin", 50257
    if kind == "npy int64":
        path = tmp_path / "a.npy"
        np.save(path, IDS)
    elif kind == "llm.c":
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(IDS)
        path.write_bytes(header.tobytes() + IDS.astype(np.uint16).tobytes())
    else:
        vocab_size = 128256
        (IDS + 70000).astype(np.uint32).tofile(path)
    loaded = load(path, vocab_size=vocab_size, tokenizer=f"ids:{vocab_size}")
    expected = IDS + 70000 if kind == "uint32" else IDS
    assert np.array_equal(
        loaded._train, expected[:3600]
    )  # a single file's last tenth is for evaluation
    assert np.array_equal(loaded._eval, expected[3600:])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            "bytes",
            r"NUL bytes in a\.bin; if these are token ids, write --data\.tokenizer .* or ids:SIZE",
        ),
        (
            "ids:50000",
            r"a\.bin has the id 5\d+ at place \d+ \(read as uint16\), and the tokenizer has 50000",
        ),
        ("ids:", r"write ids:SIZE with a SIZE of at least 2"),
    ],
)
def test_wrong_ids_are_named(tmp_path: Path, tokens: str, message: str) -> None:
    np.concatenate([IDS, [50256]]).astype(np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.bin", vocab_size=50257, tokenizer=tokens)


def test_odd_files_of_ids_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 4)))
    (tmp_path / "b.bin").write_bytes(b"\0\1\2")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2\3")
    (tmp_path / "c.idx").write_bytes(b"MMIDIDX")
    for name, message in (
        ("a.npy", r"\(3, 4\) of float64"),
        ("b.bin", "1 are left over"),
        ("c.bin", "Megatron"),
    ):
        with pytest.raises(DataError, match=message):
            load(tmp_path / name, vocab_size=50257, tokenizer="ids:50257")


def test_text_among_ids_wants_their_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "t", {"a.txt": "text"})
    IDS.astype(np.uint16).tofile(tmp_path / "t" / "a.bin")
    with pytest.raises(
        DataError,
        match=r"a\.txt is text, and data\.tokenizer ids:50257 has a number of ids and no words",
    ):
        load(tmp_path / "t", "text", vocab_size=50257, tokenizer="ids:50257")


# Separators


def vocabulary(path: Path, *special: str) -> Path:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("special", "separator"),
    [
        (("<|endoftext|>",), "<|endoftext|>"),  # GPT-2
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>"),  # Qwen
        (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), "<|end_of_text|>"),  # Llama 3
        (("<unk>", "<s>", "</s>"), "</s>"),  # Mistral
        (("<pad>", "<eos>", "<bos>"), "<eos>"),  # Gemma
    ],
)
def test_separators_are_found(tmp_path: Path, special: tuple[str, ...], separator: str) -> None:
    encoder = tokenizer.Subwords(vocabulary(tmp_path / "t.json", *special))
    assert encoder.separator == 256 + special.index(separator)


def test_a_separator_by_flag(tmp_path: Path) -> None:
    path, file = (
        write_as(tmp_path / "a.jsonl"),
        vocabulary(tmp_path / "t.json", "<|endoftext|>", "<|eot|>"),
    )
    fields = {"vocab_size": 258, "tokenizer": str(file)}
    usual, other = load(path, **fields), load(path, separator="<|eot|>", **fields)
    assert (usual._train == 256).sum() == (other._train == 257).sum() == len(TEXTS) - len(EVAL)
    assert usual.facts["digest"] != other.facts["digest"]
    with pytest.raises(
        DataError,
        match=r"has no token <eot>; write --data\.separator .* such as <\|endoftext\|>, <\|eot\|>",
    ):
        load(path, separator="<eot>", **fields)
    with pytest.raises(DataError, match=r"of bytes it is byte 0; leave it out"):
        load(path, separator="<|eot|>")
    with pytest.raises(DataError, match=r"of data\.tokenizer ids:300 write an id below 300"):
        named_tokenizers.opened("ids:300", "300")


# As a user has it


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            "prepare records:docs.jsonl.zst",
            0,
            "records:docs.jsonl.zst is prepared: 7,473 training and 738 evaluation tokens",
        ),
        (
            "prepare text:docs.jsonl.zst --field body",
            2,
            "line 1 has no field 'body'; write --data.field text",
        ),
        ("prepare records:gone", 2, "no file or folder gone; write data.name as records:PATH"),
        ("prepare records:docs.jsonl.zst --tokenizer gone.json", 2, "no tokenizer at gone.json"),
        (
            "prepare records:docs.jsonl.zst --tokenizer ids:300",
            2,
            "docs.jsonl.zst is text, and data.tokenizer ids:300 has",
        ),
        ("train --data.field body", 2, "--data.field is not read with the data python_corpus"),
        (
            "train --data.name digits --model vit-tiny --data.separator x",
            2,
            "--data.separator is not read with the data digits",
        ),
    ],
)
def test_as_a_user_types_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, code: int, message: str
) -> None:
    write_as(tmp_path / "docs.jsonl.zst", TEXTS * 3)
    command, *rest = words.split()
    with contextlib.chdir(tmp_path):
        done = (
            data_command.main(["prepare", *rest])
            if command == "prepare"
            else main(["train", "lm-tiny", *rest])
        )
    out, err = capfd.readouterr()
    assert done == code
    assert message in " ".join((err if code else out).split())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_is_closed_when_it_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus may have more files than a process may open."""
    monkeypatch.setattr(lines, "_PART_BYTES", 200)
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 300)
    file = lines.Lines(write_as(tmp_path / name), "text")
    parts = list(file.parts())
    for part in parts[:-1]:
        file.read(part)
    assert file._stream is not None
    file.read(parts[-1])
    assert file._stream is None
    assert (
        len([file.read(part) for part in file.parts()]) == len(parts) > 3
    )  # each as soon as it is known
    assert file._stream is None
