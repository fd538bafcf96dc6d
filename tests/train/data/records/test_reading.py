"""A user's own files as they are found: the split that names tell, what is left out and why, broken data, widths of ids."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data import DataError
from mupax.train.data import __main__ as data_command
from mupax.train.data.records import contents, corpus
from mupax.train.data.streams.batches import Stream
from mupax.train.data.text.batches import TokenData
from tests.train.data.sources.test_records import vocabulary
from tests.train.data.sources.test_text import SMALL, cache_folder, many

__all__ = ["cache_folder"]  # a fixture

pytestmark = pytest.mark.core


def texts_of(name: str, count: int = 20) -> list[str]:
    return [f"{name} number {i}\n" for i in range(count)]


def write_text(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(texts_of(name)))


def write_records(folder: Path, name: str, *more: bytes) -> None:
    """Write a document per line, each named for its file, with more lines in the middle."""
    lines = [json.dumps({"text": text}).encode() for text in texts_of(name)]
    lines[10:10] = more
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(
        Path(name).suffix, bytes
    )
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(packed(b"".join(line + b"\n" for line in lines)))


def opened(name: str, notes: list[str] | None = None, **fields: Any) -> Any:
    vocab_size = fields.pop("vocab_size", 256)
    sizes = {"vocab_size": vocab_size, "seq_len": fields.pop("seq_len", SMALL.seq_len)}
    model = type(SMALL)(**{**vars(SMALL), **sizes})
    note = ([] if notes is None else notes).append
    return data.load(DataConfig(name=name, batch_size=4, **fields), model, seed=0, note=note)


def tokens(loaded: Any) -> tuple[np.ndarray, np.ndarray]:
    """All training and evaluation ids."""
    if isinstance(loaded, TokenData):
        return np.asarray(loaded._train), np.asarray(loaded._eval)
    assert isinstance(loaded, Stream)
    for lane in loaded._lanes:
        lane.until(1 << 40, print)
    return np.concatenate([lane.read(0, lane.tokens) for lane in loaded._lanes]), np.asarray(
        loaded._eval
    )


def text_of(loaded: Any) -> tuple[str, str]:
    """Training and evaluation text."""
    train, evaluation = (loaded.tokenizer.decode(ids) for ids in tokens(loaded))
    return train, evaluation


def names_in(text: str, names: list[str]) -> list[str]:
    """Names of the files that a text is from."""
    return [name for name in names if f"{name} number" in text]


# Names that tell the split

LAYOUTS = [
    (["train.X"], ["val.X"], []),
    (["wiki.train.X"], ["wiki.valid.X"], ["wiki.test.X"]),
    (["trn.X"], ["holdout.X"], []),
    (["train/a.X", "train/deep/b.X"], ["valid/c.X"], []),
    (["Training/a.X"], ["Testing/b.X"], []),
    (["data/train/a.X", "data/train/b.X"], ["data/validation/c.X"], ["data/test/d.X"]),
    (
        ["data/train-00000-of-00002.X", "data/train-00001-of-00002.X"],
        ["data/eval-00000-of-00001.X"],
        [],
    ),
    (["de/train.X", "en/train.X"], ["de/dev.X", "en/dev.X"], []),
    (["train/a.X"], ["val.X"], []),
]


@pytest.mark.parametrize(("train", "held_out", "unused"), LAYOUTS)
@pytest.mark.parametrize("how", ["text", "records", "stream"])
def test_names_tell_the_split(
    tmp_path: Path, train: list[str], held_out: list[str], unused: list[str], how: str
) -> None:
    kind, suffix = ("text", "txt") if how == "text" else ("records", "jsonl")
    parts = [[name.replace("X", suffix) for name in part] for part in (train, held_out, unused)]
    every = [name for part in parts for name in part]
    for name in every:
        (write_text if kind == "text" else write_records)(tmp_path / "t", name)
    notes: list[str] = []
    loaded = opened(f"{kind}:{tmp_path / 't'}", notes, stream=how == "stream")
    assert [names_in(text, every) for text in text_of(loaded)] == parts[:2]
    message = next(note for note in notes if "training on" in note)
    for part in parts:
        assert not part or part[0].partition("/")[0].partition(".")[0] in message


@pytest.mark.parametrize("about", ["README.md", "README", "LICENSE.txt"])
def test_a_readme_beside_files_does_not_spoil_the_split(tmp_path: Path, about: str) -> None:
    for name in ("train.txt", "val.txt", about):
        write_text(tmp_path / "t", name)
    notes: list[str] = []
    train, evaluation = text_of(opened(f"text:{tmp_path / 't'}", notes))
    assert names_in(train, ["train.txt", "val.txt", about]) == ["train.txt"]
    assert names_in(evaluation, ["train.txt", "val.txt", about]) == ["val.txt"]
    assert any(about in note for note in notes)


@pytest.mark.parametrize("kind", ["text", "records"])
def test_a_readme_beside_folders_does_not_spoil_the_split(tmp_path: Path, kind: str) -> None:
    for name in ("train/a.jsonl", "val/b.jsonl"):
        write_records(tmp_path / "t", name)
    (tmp_path / "t" / "README.md").write_text("about these records " * 5)
    notes: list[str] = []
    train, evaluation = text_of(opened(f"{kind}:{tmp_path / 't'}", notes))
    assert names_in(train, ["train/a.jsonl"])
    assert names_in(evaluation, ["val/b.jsonl"])
    assert "about" not in train + evaluation
    assert any("README.md" in note for note in notes)


def test_ids_are_split_by_name(tmp_path: Path) -> None:
    (tmp_path / "ids").mkdir()
    for i, name in enumerate(("corpus_trn", "corpus_dev", "corpus_test")):
        np.save(tmp_path / "ids" / f"{name}.npy", np.full(100, i))
    loaded = opened(f"records:{tmp_path / 'ids'}", tokenizer="ids:256")
    assert [set(ids.tolist()) for ids in tokens(loaded)] == [{0}, {1}]


@pytest.mark.parametrize(
    "names", [["train", "val", "dev"], ["train", "holdout", "testing"], ["trn", "train", "test"]]
)
@pytest.mark.parametrize("shape", ["{}.txt", "{}/a.txt", "data/{}/a.txt"])
def test_two_names_for_one_part_are_refused(
    tmp_path: Path, names: list[str], shape: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in names:
        write_text(tmp_path / "t", shape.format(name))
    assert data_command.main(["prepare", f"text:{tmp_path / 't'}"]) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert sum(name in message.partition("two")[2] for name in names) >= 2


@pytest.mark.parametrize(
    "names",
    [
        ["src/train.py", "src/test_x.py", "src/model.py", "setup.py", "README.md"],
        ["train.py", "test_x.py", *(f"m{i}.py" for i in range(30))],
        ["bus/a.txt", "car/b.txt", "train/c.txt", "val/d.txt"],
        ["train/a.txt", "train/b.txt", "train/c.txt"],
        ["trains.txt", "evaluate.txt", "contest.txt"],
        ["train.txt", "val.txt", "notes.txt"],
    ],
)
def test_control_other_names_keep_the_hash_split(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write_text(tmp_path / "t", name)
    notes: list[str] = []
    train, evaluation = text_of(opened(f"text:{tmp_path / 't'}", notes))
    for_eval = corpus.names_for_eval(names)
    assert names_in(evaluation, names) == [name for name in names if name in for_eval]
    assert names_in(train, names) == [name for name in names if name not in for_eval]
    assert not [note for note in notes if "training on" in note]


def test_evaluation_sets_and_mixtures_are_split_by_name(tmp_path: Path) -> None:
    for name in ("train.txt", "val.txt"):
        write_text(tmp_path / "a", name)
        write_records(tmp_path / "b", Path(name).with_suffix(".jsonl").name)
    mixed = opened("mix", mix=(f"a=text:{tmp_path / 'a'}:1", f"b=records:{tmp_path / 'b'}:1"))
    for text in mixed._texts:
        train, evaluation = text_of(text)
        assert "val" not in train
        assert "train" not in evaluation


# What is left out


@pytest.mark.parametrize("kind", ["text", "records"])
def test_hidden_folders_and_those_of_archives_are_no_data(tmp_path: Path, kind: str) -> None:
    write = write_text if kind == "text" else write_records
    suffix = "txt" if kind == "text" else "jsonl"
    places = ("", "deep/", ".ipynb_checkpoints/", "deep/.git/", "__MACOSX/", "deep/__MACOSX/")
    names = [f"{place}{i}.{suffix}" for i in range(3) for place in places] + [f".hidden.{suffix}"]
    for name in names:
        write(tmp_path / "t", name)
    text = "".join(text_of(opened(f"{kind}:{tmp_path / 't'}")))
    assert names_in(text, names) == [
        name for name in names if "." not in name[:-6] and "__" not in name
    ]


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for name in ("t/a.txt", "more/b.txt", "more/deep/c.txt"):
        write_text(tmp_path, name)
    (tmp_path / "t" / "linked").symlink_to(tmp_path / "more")
    (tmp_path / "more" / "loop").symlink_to(tmp_path / "t")
    notes: list[str] = []
    text = "".join(text_of(opened(f"text:{tmp_path / 't'}", notes)))
    assert [
        text.count(f"{name} number 3\n") for name in ("t/a.txt", "more/b.txt", "more/deep/c.txt")
    ] == [1, 1, 1]
    assert any("linked/loop" in note for note in notes)


def test_what_is_left_out_is_said_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    for i in range(12):
        write_text(folder, f"{i}.txt")
    odd = {
        "wide.txt": "UTF-16 text\n".encode("utf-16"),
        "wide_unmarked.txt": ("no mark\n" * 4).encode("utf-16-le"),
        "wider.txt": "UTF-32 text\n".encode("utf-32"),
        "table.csv": b"a,b\n",
        "picture.png": b"\x89PNG\0\0",
        "packed.txt.gz": gzip.compress(b"words\n"),
        "other.jsonl": b'{"message": "x"}\n',
        "wide.jsonl": '{"text": "x"}\n'.encode("utf-16"),
        "ids.bin": bytes(range(8)),
    }
    for name, content in odd.items():
        (folder / name).write_bytes(content)
    (folder / "nowhere.txt").symlink_to(tmp_path / "missing")
    notes: list[str] = []
    opened(f"text:{folder}", notes)
    message = {name: next(note for note in notes if name in note) for name in (*odd, "nowhere.txt")}
    for name in ("wide.txt", "wide_unmarked.txt", "wide.jsonl"):
        assert "UTF-16" in message[name]
    assert "UTF-32" in message["wider.txt"]
    assert "compressed" in message["packed.txt.gz"]
    assert "'text'" in message["other.jsonl"]
    assert len(set(message.values())) >= 6


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    for i in range(12):
        write_text(tmp_path / "t", f"{i}.txt")
        write_records(tmp_path / "r", f"{i}.jsonl")
    for name in ("t/odd.txt", "r/odd.jsonl"):
        (tmp_path / name).symlink_to("/proc/self/mem")
        if not (tmp_path / name).is_file():
            pytest.skip("there is no file here that refuses to be read by root")
    for name in (f"text:{tmp_path / 't'}", f"records:{tmp_path / 'r'}"):
        notes: list[str] = []
        opened(name, notes)
        assert any("odd." in note for note in notes)


def test_a_single_file_in_utf16_is_named_for_what_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wide.txt").write_bytes("words in another coding\n".encode("utf-16") * 20)
    assert data_command.main(["prepare", f"text:{tmp_path / 'wide.txt'}"]) == 2
    message = capfd.readouterr().err
    assert "wide.txt" in message
    assert "UTF-16" in message


@pytest.mark.parametrize("stream", [False, True])
def test_copies_on_both_sides_are_counted(tmp_path: Path, stream: bool) -> None:
    for name in ("train/a.txt", "train/b.txt", "train/c.txt", "val/d.txt", "val/e.txt"):
        write_text(tmp_path / "t", name)
    for copy, source in (("val/copy.txt", "train/a.txt"), ("val/again.txt", "train/b.txt")):
        (tmp_path / "t" / copy).write_bytes((tmp_path / "t" / source).read_bytes())
    notes: list[str] = []
    opened(f"text:{tmp_path / 't'}", notes, stream=stream)
    (message,) = [note for note in notes if "also" in note and "training" in note]
    assert "2 " in message
    assert not [note for note in notes if "also" in note and note != message]


def test_records_on_both_sides_are_counted(tmp_path: Path) -> None:
    write_records(tmp_path / "t", "train.jsonl")
    write_records(
        tmp_path / "t",
        "val.jsonl",
        *(json.dumps({"text": text}).encode() for text in texts_of("train.jsonl", 7)),
    )
    notes: list[str] = []
    opened(f"records:{tmp_path / 't'}", notes)
    (message,) = [note for note in notes if "also" in note]
    assert "7 of 27" in message
    again: list[str] = []
    opened(f"records:{tmp_path / 't'}", again)
    assert message in again
    (tmp_path / "t" / "val.jsonl").unlink()
    write_records(tmp_path / "t", "val.jsonl")
    notes.clear()
    opened(f"records:{tmp_path / 't'}", notes)
    assert not [note for note in notes if "also" in note]


# Broken data

BROKEN_LINES = {
    "null": b"null",
    "null field": b'{"text": null}',
    "no field": b'{"other": 1}',
    "a list": b'["a"]',
    "a number": b'{"text": 5}',
    "torn": b'{"text": "torn',
    "no UTF-8": b'{"text": "caf\xe9"}',
    "NUL": b'{"text": "a\\u0000b"}',
    "half a pair": b'{"text": "\\ud800"}',
}


def prepare(*words: object) -> int:
    return data_command.main(["prepare", *map(str, words)])


@pytest.mark.parametrize("broken", BROKEN_LINES)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "c4.json.xz"])
def test_a_broken_record_is_named_or_left_out(
    tmp_path: Path, broken: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path, name, BROKEN_LINES[broken])
    assert prepare(f"records:{tmp_path / name}") == 2
    message = " ".join(capfd.readouterr().err.split())
    assert f"{name} line 11" in message
    assert "--data.on-broken skip" in message
    notes: list[str] = []
    text = "".join(text_of(opened(f"records:{tmp_path / name}", notes, on_broken="skip")))
    assert sorted(text.splitlines()) == sorted("".join(texts_of(name)).splitlines())
    assert any("1 record" in note and f"{name} line 11" in note for note in notes)
    again: list[str] = []
    opened(f"records:{tmp_path / name}", again, on_broken="skip")
    assert [note for note in notes if "line 11" in note] == [
        note for note in again if "line 11" in note
    ]


def test_a_broken_first_record_is_no_other_format(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        write_records(tmp_path / "t", f"{i}.jsonl")
    (tmp_path / "t" / "1.jsonl").write_bytes(
        b'{"text": null}\n' + (tmp_path / "t" / "1.jsonl").read_bytes()
    )
    assert prepare(f"records:{tmp_path / 't'}") == 2
    assert "1.jsonl line 1" in " ".join(capfd.readouterr().err.split())
    text = "".join(text_of(opened(f"records:{tmp_path / 't'}", on_broken="skip")))
    assert names_in(text, ["0.jsonl", "1.jsonl", "2.jsonl"]) == ["0.jsonl", "1.jsonl", "2.jsonl"]


def test_a_null_in_parquet_is_named_or_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = texts_of("a.parquet")
    parquet.write_table(
        pyarrow.table({"text": [*texts[:12], None, *texts[12:]]}), tmp_path / "a.parquet"
    )
    assert prepare(f"records:{tmp_path / 'a.parquet'}") == 2
    message = " ".join(capfd.readouterr().err.split())
    assert "a.parquet row 12" in message
    assert "--data.on-broken skip" in message
    notes: list[str] = []
    text = "".join(text_of(opened(f"records:{tmp_path / 'a.parquet'}", notes, on_broken="skip")))
    assert sorted(text.splitlines()) == sorted("".join(texts).splitlines())
    assert any("a.parquet row 12" in note for note in notes)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("one\ntwo\nna\xefve\n".encode("latin-1"), "odd.txt line 3"),
        (b"one\n" * 3000 + b"a NUL \0 in it\n", "odd.txt line 3001"),
        (b"one\ncut \xe2\x82", "odd.txt line 2"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_text_is_named_or_left_out(
    tmp_path: Path, content: bytes, place: str, stream: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "t"
    names = [f"{part}/{i}.txt" for part in ("train", "val") for i in range(3)]
    for name in names:
        write_text(folder, name)
    (folder / "train" / "odd.txt").write_bytes(content)
    for encoder in ("bpe:300", vocabulary(tmp_path / "t.json", "<|endoftext|>")):
        assert prepare(f"text:{folder}", "--tokenizer", encoder) == 2
        message = " ".join(capfd.readouterr().err.split())
        assert place in message
        assert "--data.on-broken skip" in message
    assert prepare(f"text:{folder}", "--tokenizer", "bpe:300", "--on-broken", "skip") == 0
    fields = {"tokenizer": "bpe:300", "vocab_size": 300, "stream": stream}
    notes: list[str] = []
    loaded = opened(f"text:{folder}", notes, on_broken="skip", **fields)
    assert names_in("".join(text_of(loaded)), names) == names
    opened(f"text:{folder}", notes, on_broken="skip", **fields)  # a stream has read it by now
    assert any(place in note for note in notes)


def test_broken_texts_are_not_the_whole_of_a_side(tmp_path: Path) -> None:
    """A few files, of which the broken ones are those that their hashes would evaluate on."""
    names = [f"{i}.txt" for i in range(5)]
    for name in names:
        write_text(tmp_path / "t", name)
    for name in corpus.names_for_eval(names):
        (tmp_path / "t" / name).write_bytes(b"na\xefve\n" * 20)
    notes: list[str] = []
    opened(f"text:{tmp_path / 't'}", notes, on_broken="skip", tokenizer="bpe:300", vocab_size=300)
    assert any("left out, as broken" in note for note in notes)


def test_names_that_are_no_utf8_are_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.txt"):
        write_text(tmp_path / "t", name)
    try:
        (tmp_path / "t" / "caf\udce9.txt").write_text("words\n" * 20)
    except OSError:
        pytest.skip("the file system has only names of UTF-8")
    (tmp_path / "t" / "na\udcefve.bin").write_bytes(b"\0\1\2")
    assert prepare(f"text:{tmp_path / 't'}") == 0
    assert "ve.bin" in "".join(capfd.readouterr())


def test_control_bytes_need_no_coding(tmp_path: Path) -> None:
    for i in range(3):
        write_text(tmp_path / "t", f"{i}.txt")
    (tmp_path / "t" / "odd.txt").write_bytes(b"na\xefve\n")
    notes: list[str] = []
    loaded = opened(f"text:{tmp_path / 't'}", notes, on_broken="skip")
    assert any(b"na\xefve" in ids.astype(np.uint8).tobytes() for ids in tokens(loaded))
    assert not [note for note in notes if "odd.txt" in note]


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.parquet"])
def test_a_damaged_file_among_others(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for i in range(4):
        write_records(tmp_path / "t", f"{i}.jsonl")
    if name.endswith("gz"):
        content = gzip.compress(
            b"".join(json.dumps({"text": f"text {i}"}).encode() + b"\n" for i in range(300))
        )
    else:
        parquet.write_table(
            pyarrow.table({"text": [f"text {i}" for i in range(300)]}), tmp_path / "t.parquet"
        )
        content = (tmp_path / "t.parquet").read_bytes()
    middle = len(content) // 2
    (tmp_path / "t" / name).write_bytes(
        content[:middle] if name.endswith("gz") else content[:400] + b"x" * 80 + content[480:]
    )
    assert prepare(f"records:{tmp_path / 't'}") == 2
    message = " ".join(capfd.readouterr().err.split())
    assert name in message
    assert "--data.on-broken skip" in message
    notes: list[str] = []
    text = "".join(text_of(opened(f"records:{tmp_path / 't'}", notes, on_broken="skip")))
    assert len(names_in(text, [f"{i}.jsonl" for i in range(4)])) == 4
    assert any(name in note for note in notes)


def test_a_stream_leaves_broken_records_out(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "val.jsonl"):
        write_records(tmp_path / "t", name, b"null", b'{"text": 5}')
    with pytest.raises(DataError, match=r"line 11 .*--data\.on-broken skip"):
        text_of(opened(f"records:{tmp_path / 't'}", stream=True))
    notes: list[str] = []
    train, evaluation = text_of(
        opened(f"records:{tmp_path / 't'}", notes, stream=True, on_broken="skip")
    )
    assert sorted((train + evaluation).splitlines()) == sorted(
        line.strip()
        for name in ("train-0.jsonl", "train-1.jsonl", "val.jsonl")
        for line in texts_of(name)
    )
    assert any("val.jsonl line 11" in note for note in notes)
    again: list[str] = []
    opened(f"records:{tmp_path / 't'}", again, stream=True, on_broken="skip")
    assert any("6 records" in note for note in again)


def test_only_broken_records_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": null}\n' * 30)
    with pytest.raises(DataError, match=r"a\.jsonl"):
        opened(f"records:{tmp_path / 'a.jsonl'}", on_broken="skip")
    (tmp_path / "b.txt").write_bytes(b"na\xefve\n" * 30)
    with pytest.raises(DataError, match=r"b\.txt line 1"):
        opened(f"text:{tmp_path / 'b.txt'}", on_broken="skip", tokenizer="bpe:300", vocab_size=300)


def test_what_was_prepared_without_broken_records_is_not_read_where_they_stop(
    tmp_path: Path,
) -> None:
    write_records(tmp_path, "a.jsonl", b"null")
    assert prepare(f"records:{tmp_path / 'a.jsonl'}", "--on-broken", "skip") == 0
    assert prepare(f"records:{tmp_path / 'a.jsonl'}") == 2


@pytest.mark.parametrize(
    "broken", [b"null", b'{"messages": null}', b'{"messages": "x"}', b'{"messages": [{"role": 1}]}']
)
def test_a_broken_conversation_is_named_or_left_out(tmp_path: Path, broken: bytes) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    for name in ("train.jsonl", "val.jsonl"):
        turns = [
            [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "so"}]
            for i in range(12)
        ]
        lines = [json.dumps({"messages": talk}).encode() for talk in turns]
        lines[5:5] = [broken]
        (tmp_path / "t").mkdir(exist_ok=True)
        (tmp_path / "t" / name).write_bytes(b"\n".join(lines))
    fields = {"chat_template": str(template), "seq_len": 64}
    with pytest.raises(DataError, match=r"train\.jsonl line 6.*--data\.on-broken skip"):
        opened(f"chat:{tmp_path / 't'}", **fields)
    notes: list[str] = []
    loaded = opened(f"chat:{tmp_path / 't'}", notes, on_broken="skip", **fields)
    assert (
        loaded.facts["train_records"],
        loaded.facts["eval_records"],
        loaded.facts["broken"],
    ) == (12, 12, 2)
    assert any("2 records" in note and "val.jsonl line 6" in note for note in notes)
    assert any("12 of 12" in note and "also" in note for note in notes)


# Widths of ids

IDS = np.random.default_rng(0).integers(1, 320, 12000)


@pytest.mark.parametrize("kind", ["<i4", "<u4", "<i8", "<u8", "<u2"])
@pytest.mark.parametrize("vocab_size", [320, 70000])
def test_the_width_of_ids_is_seen(tmp_path: Path, kind: str, vocab_size: int) -> None:
    if (kind, vocab_size) == ("<u2", 70000):
        pytest.skip("ids of this vocabulary do not fit 16 bits")
    IDS.astype(kind).tofile(tmp_path / "a.bin")
    loaded = opened(
        f"records:{tmp_path / 'a.bin'}", tokenizer=f"ids:{vocab_size}", vocab_size=vocab_size
    )
    assert np.array_equal(np.concatenate(tokens(loaded)), IDS)


@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_control_zeros_among_ids_of_16_bits(tmp_path: Path, every: int) -> None:
    ids = np.where(np.arange(12000) % every == 0, 0, IDS)
    ids[7:400:2] = 0
    ids.astype("<u2").tofile(tmp_path / "a.bin")
    loaded = opened(f"records:{tmp_path / 'a.bin'}", tokenizer="ids:320", vocab_size=320)
    assert np.array_equal(np.concatenate(tokens(loaded)), ids)


@pytest.mark.parametrize("content", [np.array([5, 0, 7, 0], "<u2"), IDS.astype(">i4")])
def test_a_width_that_cannot_be_seen_is_asked_for(tmp_path: Path, content: np.ndarray) -> None:
    content.tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a\.bin .*\.npy"):
        opened(f"records:{tmp_path / 'a.bin'}", tokenizer="ids:320", vocab_size=320)


@pytest.mark.parametrize("kind", ["<u2", "<i4", ">i4", "<i8", "|u1"])
def test_control_arrays_say_their_width(tmp_path: Path, kind: str) -> None:
    ids = np.where(np.arange(500) % 2 == 0, IDS[:500] % 250, 0)
    np.save(tmp_path / "a.npy", ids.astype(kind))
    loaded = opened(f"records:{tmp_path / 'a.npy'}", tokenizer="ids:320", vocab_size=320)
    assert np.array_equal(np.concatenate(tokens(loaded)), ids)


# Marks of byte order


def test_a_mark_at_the_beginning_is_no_text(tmp_path: Path) -> None:
    for i in range(4):
        write_text(tmp_path / "t", f"{i}.txt")
        write_records(tmp_path / "r", f"{i}.jsonl")
    for name in ("t/0.txt", "t/1.txt", "r/0.jsonl", "r/1.jsonl"):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (tmp_path / name).read_bytes())
    (tmp_path / "t" / "empty.txt").write_bytes(codecs.BOM_UTF8)
    (tmp_path / "r" / "2.jsonl").write_bytes(
        codecs.BOM_UTF8 + b"\n" + (tmp_path / "r" / "2.jsonl").read_bytes()
    )
    text = text_of(opened(f"text:{tmp_path / 't'}"))
    records = text_of(opened(f"records:{tmp_path / 'r'}"))
    assert "\ufeff" not in "".join(text + records)
    assert names_in("".join(records), [f"{i}.jsonl" for i in range(4)]) == [
        f"{i}.jsonl" for i in range(4)
    ]


# The cache


@pytest.fixture
def packed(cache_folder: Path) -> Callable[[], set[str]]:
    return lambda: {path.name for path in (cache_folder / "packed").iterdir() if path.is_dir()}


def test_control_plain_folders_keep_their_place_in_the_cache(
    tmp_path: Path, packed: Callable[[], set[str]]
) -> None:
    for name in many():
        write_text(tmp_path / "t", name)
    opened(f"text:{tmp_path / 't'}")
    files = [tmp_path / "t" / name for name in sorted(many())]
    assert packed() == {f"text-{contents.digest(files, print)}-bytes"}


@pytest.mark.parametrize("reason", ["split", "mark", "width"])
def test_what_was_packed_otherwise_is_packed_again(
    tmp_path: Path, reason: str, packed: Callable[[], set[str]]
) -> None:
    folder, fields = tmp_path / "t", {}
    write_text(folder, "train.txt" if reason == "split" else "a.txt")
    write_text(folder, "val.txt" if reason == "split" else "b.txt")
    kind = "text"
    if reason == "mark":
        (folder / "a.txt").write_bytes(codecs.BOM_UTF8 + (folder / "a.txt").read_bytes())
    if reason == "width":
        for name in ("a.txt", "b.txt"):
            (folder / name).unlink()
            IDS.astype("<i4").tofile(folder / f"{name}.bin")
        fields, kind = {"tokenizer": "ids:320", "vocab_size": 320}, "records"
    opened(f"{kind}:{folder}", **fields)
    before = contents.digest(sorted(folder.iterdir()), print)
    from mupax.train.data import cache

    (name,) = packed()
    assert name.split("-")[1] not in (before, cache.digest(f"text-{before}", "text", "records"))


def test_the_command_says_what_it_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("train.txt", "val.txt", "test.txt"):
        write_text(tmp_path / "t", name)
    with contextlib.chdir(tmp_path):
        assert prepare("text:t") == 0
    message = " ".join("".join(capfd.readouterr()).split())
    assert all(name in message for name in ("train.txt", "val.txt", "test.txt"))
    size = len("".join(texts_of("train.txt"))) + 1
    assert f"{size:,} training" in message
