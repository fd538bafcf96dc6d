"""A user's records and token ids: formats, sides of the split, and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mupax.train.data import DataError
from mupax.train.data.records import corpus, lines, splits, tables, user_files
from mupax.train.data.text import named_tokenizers, tokenizer
from tests.fixtures.commands import output_line, refusal
from tests.train.data.loading import (
    assert_refused,
    documents,
    load,
    load_with_notes,
    token_ids,
)
from tests.train.data.vocabularies import byte_vocabulary
from tests.train.data.writing import write, write_texts

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("work_folder")]

TEXTS = [f"document {i} é\n" + "abcdefg"[: i % 7] * (i % 11) for i in range(90)]
EVAL = [text for text in TEXTS if corpus.side(text.encode()) == "eval"]
assert EVAL


def sides(source: Any) -> list[list[str]]:
    """Return documents to train on and to evaluate on."""
    return [documents(ids) for ids in token_ids(source)]


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_PART_BYTES", 900)
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(tables, "_PART_BYTES", 400)


@pytest.mark.parametrize("kind", ["text", "records"])
@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.JSONL", "a.jsonl.zst", "a.parquet", "c4.json.gz", "a.ndjson"],
)
def test_every_format_has_the_same_documents(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    path = write_texts(name, TEXTS)
    source, notes = load_with_notes(f"{kind}:{name}")
    assert sides(source) == [[text for text in TEXTS if text not in EVAL], EVAL]
    assert f"reading the field 'text' of {name}" in notes
    assert len(splits.sides(user_files.files(path, kind, "text", None, print))["train"]) > 3


def test_a_mixed_folder_has_notes_on_files_that_are_left_out() -> None:
    write("t/README.md", "what this is")
    write("t/sub/a.csv", "a,b")
    write_texts("t/a.jsonl", TEXTS)
    source, notes = load_with_notes("records:t")
    assert sorted(itertools.chain(*sides(source))) == sorted(TEXTS)
    for name in ("README.md", "sub/a.csv"):
        assert len([note for note in notes if name in note]) == 1
    source, notes = load_with_notes("text:t")
    read = [*itertools.chain(*sides(source))]
    assert set(TEXTS) < set(read)
    assert "what this is" in "".join(text for text in read if text not in TEXTS)
    assert len([note for note in notes if "sub/a.csv" in note]) == 1
    assert not [note for note in notes if "README.md" in note]


@pytest.mark.parametrize(
    ("name", "place"),
    [("a.jsonl", "a.jsonl line 1 has no field"), ("b.parquet", "b.parquet has no column")],
)
def test_another_field(name: str, place: str) -> None:
    write_texts(name, TEXTS, "content")
    assert_refused(f"{place} 'text'; write --data.field content", f"records:{name}")
    read = sides(load(f"records:{name}", field="content"))
    assert sorted(itertools.chain(*read)) == sorted(TEXTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no records in it; records:PATH takes"),
        ('{"text": "one"}\n', r"the training text of .* has 4 tokens; .*records by their content"),
        # Without a record for the evaluation, shorter sequences are no way out.
        (
            f'{{"text": "{"one " * 9}"}}\n',
            r"the evaluation text of .* has 0 tokens; .*records by their content\)$",
        ),
    ],
)
def test_records_of_little_text_are_refused(content: str, message: str) -> None:
    write("a.jsonl", content)
    assert_refused(message, "records:a.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_named(name: str, damage: str) -> None:
    content = write_texts(name, TEXTS).read_bytes()
    write(name, content[:-30] if damage == "cut" else "nothing of the kind" * 9)
    message = rf"cannot read {name}: .*It may be damaged or cut off; fetch it again"
    assert_refused(message, f"records:{name}")


# Files of ids

IDS = np.random.default_rng(0).integers(0, 50257, 4000)
GPT2 = {"vocab_size": 50257, "tokenizer": "ids:50257"}


def test_nanogpt_files_are_ids_as_they_stand() -> None:
    write("t/train.bin", IDS[:3000].astype(np.uint16).tobytes())
    write("t/val.bin", IDS[3000:].astype(np.uint16).tobytes())
    write("t/test.bin", bytes(100))
    source = load("records:t", **GPT2)
    train, evaluation = token_ids(source)
    assert np.array_equal(train, IDS[:3000])
    assert np.array_equal(evaluation, IDS[3000:])
    assert source.bytes_per_token is None
    assert source.tokenizer.separator == 50256
    assert source.tokenizer.decode(source.tokenizer.encode([b"15 496"])[0]) == "15 496 "
    with pytest.raises(DataError, match="no text but ids below 50257 between spaces"):
        source.tokenizer.encode([b"def "])


def test_files_of_llm_c_begin_with_a_header() -> None:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(IDS)
    write("a.bin", header.tobytes() + IDS.astype(np.uint16).tobytes())
    train, evaluation = token_ids(load("records:a.bin", **GPT2))
    # A single file's last tenth is for evaluation.
    assert np.array_equal(train, IDS[:3600])
    assert np.array_equal(evaluation, IDS[3600:])


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
def test_wrong_ids_are_named(tokens: str, message: str) -> None:
    np.append(IDS, 50256).astype(np.uint16).tofile("a.bin")
    assert_refused(message, "records:a.bin", vocab_size=50257, tokenizer=tokens)


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.npy", r"\(3, 4\) of float64"), ("b.bin", "1 are left over"), ("c.bin", "Megatron")],
)
def test_odd_files_of_ids_are_refused(name: str, message: str) -> None:
    np.save("a.npy", np.ones((3, 4)))
    write("b.bin", b"\0\1\2")
    write("c.bin", b"\0\1\2\3")
    write("c.idx", b"MMIDIDX")
    assert_refused(message, f"records:{name}", **GPT2)


def test_text_among_ids_wants_their_tokenizer() -> None:
    write("t/a.txt", "text")
    write("t/a.bin", IDS.astype(np.uint16).tobytes())
    message = r"a\.txt is text, and data\.tokenizer ids:50257 has a number of ids and no words"
    assert_refused(message, "text:t", **GPT2)


# Separators


@pytest.mark.parametrize(
    ("special", "separator"),
    [
        ("<|endoftext|>", "<|endoftext|>"),  # GPT-2
        ("<|endoftext|> <|im_start|> <|im_end|>", "<|endoftext|>"),  # Qwen
        ("<|begin_of_text|> <|end_of_text|> <|eot_id|>", "<|end_of_text|>"),  # Llama 3
        ("<unk> <s> </s>", "</s>"),  # Mistral
        ("<pad> <eos> <bos>", "<eos>"),  # Gemma
    ],
)
def test_separators_are_found(special: str, separator: str) -> None:
    words = special.split()
    encoder = tokenizer.Subwords(byte_vocabulary("t.json", *words))
    assert encoder.separator == 256 + words.index(separator)


def test_a_separator_by_flag() -> None:
    write_texts("a.jsonl", TEXTS)
    byte_vocabulary("t.json", "<|endoftext|>", "<|eot|>")
    fields = {"name": "records:a.jsonl", "vocab_size": 258, "tokenizer": "t.json"}
    usual = load(**fields)
    other = load(separator="<|eot|>", **fields)
    count = len(TEXTS) - len(EVAL)
    assert (token_ids(usual)[0] == 256).sum() == (token_ids(other)[0] == 257).sum() == count
    assert usual.facts["digest"] != other.facts["digest"]
    message = r"no token <eot>; write --data\.separator .* such as <\|endoftext\|>, <\|eot\|>"
    assert_refused(message, separator="<eot>", **fields)
    message = r"of bytes it is byte 0; leave it out"
    assert_refused(message, "records:a.jsonl", separator="<|eot|>")
    with pytest.raises(DataError, match=r"of data\.tokenizer ids:300 write an id below 300"):
        named_tokenizers.opened("ids:300", "300")


# As a user has it


def test_the_command_counts_tokens() -> None:
    write_texts("docs.jsonl.zst", TEXTS * 3)
    text = output_line("data prepare records:docs.jsonl.zst")
    assert "docs.jsonl.zst is prepared: 7,473 training and 738 evaluation tokens" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "data prepare text:docs.jsonl.zst --field body",
            "line 1 has no field 'body'; write --field text",
        ),
        ("data prepare records:gone", "no file or folder gone; write records:PATH"),
        (
            "data prepare records:docs.jsonl.zst --tokenizer gone.json",
            "no tokenizer at gone.json",
        ),
        (
            "data prepare records:docs.jsonl.zst --tokenizer ids:300",
            "docs.jsonl.zst is text, and --tokenizer ids:300 has",
        ),
        (
            "train lm-tiny --data.field body",
            "--data.field is not read with the data python_corpus",
        ),
        (
            "train lm-tiny --data.name digits --model vit-tiny --data.separator x",
            "--data.separator is not read with the data digits",
        ),
    ],
)
def test_refusals_name_the_flags_of_the_command(words: str, message: str) -> None:
    write_texts("docs.jsonl.zst", TEXTS * 3)
    assert message in refusal(words)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_is_closed_when_it_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus may have more files than a process may open."""
    small_parts(monkeypatch)
    file = lines.Lines(write_texts(name, TEXTS), "text")
    parts = list(file.parts())
    for part in parts[:-1]:
        file.read(part)
    assert file._stream is not None
    file.read(parts[-1])
    assert file._stream is None
    read = [file.read(part) for part in file.parts()]  # each as soon as it is known
    assert len(read) == len(parts) > 3
    assert file._stream is None
