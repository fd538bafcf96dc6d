"""A user's own files as they are found: split by names, left out with a reason, or broken."""

from __future__ import annotations

import codecs
import gzip
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.data import cache
from mupax.train.data.records import contents, corpus
from tests.fixtures.commands import output_line, refusal
from tests.train.data.loading import assert_refused, load, load_with_notes, token_ids
from tests.train.data.vocabularies import byte_vocabulary
from tests.train.data.writing import PACKERS, json_lines, write, write_texts

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("work_folder")]

Packed = Callable[[], set[str]]


def texts_of(name: str, count: int = 20) -> list[str]:
    return [f"{name} number {i}\n" for i in range(count)]


def write_named(*names: str, folder: str = "t") -> None:
    """Write texts, or records where the suffix says so. Each text names its file."""
    for name in names:
        if ".json" in name:
            write_texts(f"{folder}/{name}", texts_of(name))
        else:
            write(f"{folder}/{name}", "".join(texts_of(name)))


def write_with_lines(name: str, *lines: bytes, folder: str = "t") -> None:
    """Write records with more lines in the middle."""
    content = json_lines({"text": text} for text in texts_of(name)).splitlines()
    content[10:10] = lines
    pack = PACKERS.get(Path(name).suffix, bytes)
    write(f"{folder}/{name}", pack(b"\n".join(content) + b"\n"))


def text_of(source: Any) -> tuple[str, str]:
    """Return training and evaluation text."""
    train, evaluation = token_ids(source)
    return source.tokenizer.decode(train), source.tokenizer.decode(evaluation)


def names_in(text: str, names: Iterable[str]) -> list[str]:
    """Return the names of the files that a text is from."""
    return [name for name in names if f"{name} number" in text]


def mentions(notes: list[str], *words: str) -> bool:
    """Return whether a note has all of the words."""
    return any(all(word in note for word in words) for note in notes)


def test_a_text_goes_into_the_cache_alone() -> None:
    message = refusal("data prepare text:a.txt --data-dir here")
    assert "--data-dir is of prepared data sets" in message
    assert "MUPAX_DATA" in message


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("prepare digits --tokenizer bpe:300", "--tokenizer"),
        ("prepare python_corpus --limits.record-mib 30", "--limits.record-mib"),
        ("prepare images:pictures --on-broken skip", "--on-broken"),
        ("show python_corpus --limits.ratio 3", "--limits.ratio"),
        ("tokenizer python_corpus --size 300 --out t.json --field body", "--field"),
    ],
)
def test_flag_that_the_data_do_not_read_is_refused(words: str, flag: str) -> None:
    message = refusal(f"data {words}")
    assert message.startswith(f"error: {flag} is ")
    assert message.endswith("; leave it out")
    assert "text:PATH" in message or " not read with the data python_corpus" in message


@pytest.mark.parametrize(
    "command", ["prepare text:t", "show text:t", "tokenizer text:t --size 300 --out t.json"]
)
def test_limit_below_one_is_named_as_the_flag(command: str) -> None:
    write("t/a.txt", "some words " * 30)
    message = refusal(f"data {command} --limits.record-mib 0")
    assert message == "error: --limits.record-mib is 0; write a number of at least 1"


def assert_stops(words: str, *message: str) -> None:
    """Assert that the command refuses broken data and names the flag that leaves them out."""
    printed = refusal("data prepare", words)
    for word in (*message, " --on-broken skip"):
        assert word in printed


# Names that tell the split


@pytest.mark.parametrize(
    ("train", "held_out", "unused"),
    [
        ("train.X", "val.X", ""),
        ("wiki.train.X", "wiki.valid.X", "wiki.test.X"),
        ("trn.X", "holdout.X", ""),
        ("train/a.X train/deep/b.X", "valid/c.X", ""),
        ("Training/a.X", "Testing/b.X", ""),
        ("data/train/a.X data/train/b.X", "data/validation/c.X", "data/test/d.X"),
        (
            "data/train-00000-of-00002.X data/train-00001-of-00002.X",
            "data/eval-00000-of-00001.X",
            "",
        ),
        ("de/train.X en/train.X", "de/dev.X en/dev.X", ""),
        ("train/a.X", "val.X", ""),
    ],
)
@pytest.mark.parametrize("form", ["text", "records", "stream"])
def test_names_tell_the_split(train: str, held_out: str, unused: str, form: str) -> None:
    suffix = "txt" if form == "text" else "jsonl"
    parts = [part.replace("X", suffix).split() for part in (train, held_out, unused)]
    names = [*itertools.chain.from_iterable(parts)]
    write_named(*names)
    kind = "text" if form == "text" else "records"
    source, notes = load_with_notes(f"{kind}:t", stream=form == "stream")
    assert [names_in(text, names) for text in text_of(source)] == parts[:2]
    message = next(note for note in notes if "training on" in note)
    for part in filter(None, parts):
        assert re.split("[/.]", part[0])[0] in message
    assert ("is not used" in message) == bool(unused)


@pytest.mark.parametrize(
    ("kind", "names", "readme"),
    [
        ("text", "train.txt val.txt", "README.md"),
        ("text", "train.txt val.txt", "README"),
        ("text", "train.txt val.txt", "LICENSE.txt"),
        ("text", "train/a.jsonl val/b.jsonl", "README.md"),
        ("records", "train/a.jsonl val/b.jsonl", "README.md"),
    ],
)
def test_a_readme_does_not_spoil_the_split(kind: str, names: str, readme: str) -> None:
    train, held_out = names.split()
    write_named(train, held_out, readme)
    source, notes = load_with_notes(f"{kind}:t")
    every = (train, held_out, readme)
    assert [names_in(text, every) for text in text_of(source)] == [[train], [held_out]]
    assert mentions(notes, readme)


@pytest.mark.parametrize("names", ["train val dev", "train holdout testing", "trn train test"])
@pytest.mark.parametrize("form", ["{}.txt", "{}/a.txt", "data/{}/a.txt"])
def test_two_names_for_one_part_are_refused(names: str, form: str) -> None:
    write_named(*(form.format(name) for name in names.split()))
    parts = refusal("data prepare text:t").partition("two")[2]
    assert sum(name in parts for name in names.split()) >= 2


@pytest.mark.parametrize(
    "names",
    [
        "src/train.py src/test_x.py src/model.py setup.py README.md",
        "train.py test_x.py " + " ".join(f"m{i}.py" for i in range(30)),
        "bus/a.txt car/b.txt train/c.txt val/d.txt",
        "train/a.txt train/b.txt train/c.txt",
        "trains.txt evaluate.txt contest.txt",
        "train_test.txt val.txt",
        "val.txt test.txt",
        "train.txt val.txt notes.txt",
        # No names at all: such folders keep their place in the cache.
        " ".join(f"d{i % 3}/f{i}.txt" for i in range(60)),
    ],
)
def test_control_other_names_keep_the_hash_split(names: str, packed: Packed) -> None:
    every = names.split()
    write_named(*every)
    source, notes = load_with_notes("text:t")
    for_eval = corpus.names_for_eval(every)
    train, evaluation = text_of(source)
    assert names_in(evaluation, every) == [name for name in every if name in for_eval]
    assert names_in(train, every) == [name for name in every if name not in for_eval]
    assert not mentions(notes, "training on")
    files = [Path("t", name) for name in sorted(every)]
    assert packed() == {f"text-{contents.digest(files, print)}-bytes"}


def test_evaluation_sets_and_mixtures_are_split_by_name() -> None:
    write_named("train.txt", "val.txt", folder="a")
    write_named("train.jsonl", "val.jsonl", folder="b")
    mixed = load("mix", mix=("a=text:a:1", "b=records:b:1"))
    for source in mixed._texts:
        train, evaluation = text_of(source)
        assert "val" not in train
        assert "train" not in evaluation


# Files that are left out


def test_every_file_that_is_left_out_has_a_note_with_the_reason() -> None:
    write_named(*(f"{i}.txt" for i in range(12)))
    reasons = {
        "wide.txt": ("UTF-16 text\n".encode("utf-16"), "UTF-16"),
        "wide_unmarked.txt": (("no mark\n" * 4).encode("utf-16-le"), "UTF-16"),
        "wide.jsonl": ('{"text": "x"}\n'.encode("utf-16"), "UTF-16"),
        "wider.txt": ("UTF-32 text\n".encode("utf-32"), "UTF-32"),
        "packed.txt.gz": (gzip.compress(b"words\n"), "compressed"),
        "other.jsonl": (b'{"message": "x"}\n', "'text'"),
        "table.csv": (b"a,b\n", ""),
        "picture.png": (b"\x89PNG\0\0", ""),
        "ids.bin": (bytes(range(8)), ""),
        "nowhere.txt": (b"", ""),
    }
    for name, (content, _) in reasons.items():
        write(f"t/{name}", content)
    Path("t/nowhere.txt").unlink()
    Path("t/nowhere.txt").symlink_to("missing")
    _, notes = load_with_notes("text:t")
    messages = set()
    for name, (_, reason) in reasons.items():
        message = next(note for note in notes if name in note)
        assert reason in message
        messages.add(message)
    assert len(messages) >= 6


@pytest.mark.parametrize("stream", [False, True])
def test_copies_on_both_sides_are_counted(stream: bool) -> None:
    write_named("train/a.txt", "train/b.txt", "train/c.txt", "val/d.txt", "val/e.txt")
    for copy, source in (("val/copy.txt", "train/a.txt"), ("val/again.txt", "train/b.txt")):
        write(f"t/{copy}", Path("t", source).read_bytes())
    _, notes = load_with_notes("text:t", stream=stream)
    (message,) = [note for note in notes if "also" in note]
    assert "training" in message
    assert "2 " in message


def test_records_on_both_sides_are_counted() -> None:
    write_named("train.jsonl")
    write_texts("t/val.jsonl", texts_of("val.jsonl") + texts_of("train.jsonl", 7))
    for _ in range(2):  # the second time from the cache
        _, notes = load_with_notes("records:t")
        (message,) = [note for note in notes if "also" in note]
        assert "7 of 27" in message
    write_named("val.jsonl")
    assert not mentions(load_with_notes("records:t")[1], "also")


# Broken data

BROKEN_LINES = {
    b"null": 'is no JSON object; write each document as {"text": ...}',
    b'{"text": null, "body": "b"}': "has null in 'text'; repair or remove it",
    b'{"other": 1}': "has no field 'text'; repair or remove it",
    b'{"text": 5}': "has no text but int in 'text'",
    b'{"text": "torn': """is no JSON: '{"text": "torn'""",
    b'{"text": "caf\xe9"}': "Repair or remove the line",
    b'{"text": "a\\u0000b"}': "has a NUL character",
    b'{"text": "\\ud800"}': "has half of a surrogate pair",
}
"""Messages of lines that are no record."""


def assert_skips(name: str, place: str, texts: list[str]) -> None:
    """Assert that all but the broken record is read, and that it is named every time."""
    for _ in range(2):  # the second time from the cache
        source, notes = load_with_notes(name, on_broken="skip")
        assert sorted("".join(text_of(source)).splitlines()) == sorted("".join(texts).splitlines())
        assert mentions(notes, "1 record", place)


@pytest.mark.parametrize("line", BROKEN_LINES, ids=BROKEN_LINES.get)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "c4.json.xz"])
def test_a_broken_record_is_named_or_left_out(line: bytes, name: str) -> None:
    write_with_lines(name, b"", line)  # a blank line is none
    place = f"{name} line 12"
    assert_stops(f"records:t/{name}", place, BROKEN_LINES[line])
    assert_skips(f"records:t/{name}", place, texts_of(name))
    # Data prepared without broken records are not read where those stop.
    assert_stops(f"records:t/{name}")


def test_a_null_in_a_table_is_named_or_left_out() -> None:
    texts = texts_of("a.parquet")
    write_texts("a.parquet", [*texts[:12], None, *texts[12:]])
    assert_stops("records:a.parquet", "a.parquet row 12")
    assert_skips("records:a.parquet", "a.parquet row 12", texts)


def test_a_broken_first_record_is_no_other_format() -> None:
    names = ["0.jsonl", "1.jsonl", "2.jsonl"]
    write_named(*names)
    write("t/1.jsonl", b'{"text": null}\n' + Path("t/1.jsonl").read_bytes())
    assert_stops("records:t", "1.jsonl line 1")
    text = "".join(text_of(load("records:t", on_broken="skip")))
    assert names_in(text, names) == names


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("one\ntwo\nna\xefve\n".encode("latin-1"), "odd.txt line 3"),
        (b"one\n" * 3000 + b"a NUL \0 in it\n", "odd.txt line 3001"),
        (b"one\ncut \xe2\x82", "odd.txt line 2"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_text_is_named_or_left_out(content: bytes, place: str, stream: bool) -> None:
    names = [f"{part}/{i}.txt" for part in ("train", "val") for i in range(3)]
    write_named(*names)
    write("t/train/odd.txt", content)
    for encoder in ("bpe:300", byte_vocabulary("t.json", "<|endoftext|>")):
        assert_stops(f"text:t --tokenizer {encoder}", place)
    output_line("data prepare text:t --tokenizer bpe:300 --on-broken skip")
    fields = {"tokenizer": "bpe:300", "vocab_size": 300, "stream": stream, "on_broken": "skip"}
    source = load("text:t", **fields)
    assert names_in("".join(text_of(source)), names) == names
    assert mentions(load_with_notes("text:t", **fields)[1], place)


def test_broken_texts_are_not_the_whole_of_a_side() -> None:
    """Break the files that their hashes would hold out for evaluation."""
    names = [f"{i}.txt" for i in range(5)]
    write_named(*names)
    for name in corpus.names_for_eval(names):
        write(f"t/{name}", b"na\xefve\n" * 20)
    _, notes = load_with_notes("text:t", on_broken="skip", tokenizer="bpe:300", vocab_size=300)
    assert mentions(notes, "left out, as broken")


def test_names_that_are_no_utf8_are_read(capfd: pytest.CaptureFixture[str]) -> None:
    write_named("a.txt", "b.txt")
    try:
        write("t/caf\udce9.txt", "words\n" * 20)
    except OSError:
        pytest.skip("the file system has only names of UTF-8")
    write("t/na\udcefve.bin", b"\0\1\2")
    assert main(["data", "prepare", "text:t"]) == 0  # written as bytes
    assert "ve.bin" in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.parquet"])
def test_a_damaged_file_among_others(name: str) -> None:
    names = [f"{i}.jsonl" for i in range(4)]
    write_named(*names)
    file = write_texts(f"t/{name}", [f"text {i}" for i in range(300)])
    content = file.read_bytes()
    if name.endswith("gz"):
        write(file, content[: len(content) // 2])
    else:
        write(file, content[:400] + b"x" * 80 + content[480:])
    assert_stops("records:t", name)
    source, notes = load_with_notes("records:t", on_broken="skip")
    assert names_in("".join(text_of(source)), names) == names
    assert mentions(notes, name)


def test_a_stream_leaves_broken_records_out() -> None:
    names = ("train-0.jsonl", "train-1.jsonl", "val.jsonl")
    for name in names:
        write_with_lines(name, b"null", b'{"text": 5}')
    assert_refused(r"line 11 .*--data\.on-broken skip", "records:t", stream=True)
    source, notes = load_with_notes("records:t", stream=True, on_broken="skip")
    lines = itertools.chain.from_iterable(texts_of(name) for name in names)
    assert sorted("".join(text_of(source)).splitlines(True)) == sorted(lines)
    assert mentions(notes, "val.jsonl line 11")
    assert mentions(load_with_notes("records:t", stream=True, on_broken="skip")[1], "6 records")


def test_only_broken_records_are_an_error() -> None:
    write("a.jsonl", b'{"text": null}\n' * 30)
    assert_refused(r"a\.jsonl", "records:a.jsonl", on_broken="skip")
    write("b.txt", b"na\xefve\n" * 30)
    fields = {"on_broken": "skip", "tokenizer": "bpe:300", "vocab_size": 300}
    assert_refused(r"b\.txt line 1", "text:b.txt", **fields)


@pytest.mark.parametrize(
    "broken", [b"null", b'{"messages": null}', b'{"messages": "x"}', b'{"messages": [{"role": 1}]}']
)
def test_a_broken_conversation_is_named_or_left_out(broken: bytes) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    write("t.jinja", template + "{{ 'assistant: ' if add_generation_prompt }}")
    answer = {"role": "assistant", "content": "so"}
    talks = [{"messages": [{"role": "user", "content": f"{i}"}, answer]} for i in range(12)]
    content = json_lines(talks[:5]) + broken + b"\n" + json_lines(talks[5:])
    for name in ("train.jsonl", "val.jsonl"):
        write(f"t/{name}", content)
    fields = {"chat_template": "t.jinja", "seq_len": 64}
    assert_refused(r"train\.jsonl line 6.*--data\.on-broken skip", "chat:t", **fields)
    source, notes = load_with_notes("chat:t", on_broken="skip", **fields)
    counts = [source.facts[name] for name in ("train_records", "eval_records", "broken")]
    assert counts == [12, 12, 2]
    assert mentions(notes, "2 records", "val.jsonl line 6")
    assert mentions(notes, "12 of 12", "also")


# Widths of ids

IDS = np.random.default_rng(0).integers(1, 320, 12000)


def assert_read(name: str, ids: np.ndarray, vocab_size: int = 320) -> None:
    source = load(f"records:{name}", tokenizer=f"ids:{vocab_size}", vocab_size=vocab_size)
    assert np.array_equal(np.concatenate(token_ids(source)), ids)


@pytest.mark.parametrize("vocab_size", [320, 70000])
@pytest.mark.parametrize("kind", ["<i4", "<u4", "<i8", "<u8", "<u2"])
def test_the_width_of_ids_is_seen(kind: str, vocab_size: int) -> None:
    if (kind, vocab_size) == ("<u2", 70000):
        pytest.skip("ids of this vocabulary do not fit 16 bits")
    ids = IDS + vocab_size - 320
    ids.astype(kind).tofile("a.bin")
    assert_read("a.bin", ids, vocab_size)


@pytest.mark.parametrize("period", [2, 3, 4, 5])
def test_control_zeros_among_ids_of_16_bits(period: int) -> None:
    ids = np.where(np.arange(12000) % period == 0, 0, IDS)
    ids[7:400:2] = 0
    ids.astype("<u2").tofile("a.bin")
    assert_read("a.bin", ids)


@pytest.mark.parametrize("ids", [np.array([5, 0, 7, 0], "<u2"), IDS.astype(">i4")])
def test_a_width_that_cannot_be_seen_is_asked_for(ids: np.ndarray) -> None:
    ids.tofile("a.bin")
    assert_refused(r"a\.bin .*\.npy", "records:a.bin", tokenizer="ids:320", vocab_size=320)


@pytest.mark.parametrize("kind", ["<u2", "<i4", ">i4", "<i8", "|u1"])
def test_control_arrays_say_their_width(kind: str) -> None:
    ids = np.where(np.arange(500) % 2 == 0, IDS[:500] % 250, 0)
    np.save("a.npy", ids.astype(kind))
    assert_read("a.npy", ids)


# Marks of byte order


@pytest.mark.parametrize(("kind", "suffix"), [("text", "txt"), ("records", "jsonl")])
def test_a_mark_at_the_beginning_is_no_text(kind: str, suffix: str) -> None:
    names = [f"{i}.{suffix}" for i in range(4)]
    write_named(*names)
    for name, mark in zip(names, (b"", b"", b"\n"), strict=False):
        file = Path("t", name)
        write(file, codecs.BOM_UTF8 + mark + file.read_bytes())
    if kind == "text":
        write("t/empty.txt", codecs.BOM_UTF8)
    text = "".join(text_of(load(f"{kind}:t")))
    assert "\ufeff" not in text
    assert names_in(text, names) == names


# The cache


@pytest.mark.parametrize("reason", ["split", "mark", "width"])
def test_what_was_packed_otherwise_is_packed_again(reason: str, packed: Packed) -> None:
    """Older versions read these files otherwise, and named what they packed by content alone."""
    if reason == "split":
        write_named("train.txt", "val.txt")
        load("text:t")
    elif reason == "mark":
        write_named("a.txt", "b.txt")
        write("t/a.txt", codecs.BOM_UTF8 + Path("t/a.txt").read_bytes())
        load("text:t")
    else:
        for name in ("a.bin", "b.bin"):
            write(f"t/{name}", IDS.astype("<i4").tobytes())
        load("records:t", tokenizer="ids:320", vocab_size=320)
    older = contents.digest(sorted(Path("t").iterdir()), print)
    (name,) = packed()
    assert name.split("-")[1] not in (older, cache.digest(f"text-{older}", "text", "records"))
