"""Text tokenized during training: the same tokens and batches after any interruption."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import re
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train.data import DataError, ReadError
from mupax.train.data.records import corpus
from mupax.train.data.streams import hub
from mupax.train.data.streams.batches import Stream
from mupax.train.data.streams.files import MOST_LANES
from mupax.train.data.streams.lanes import StreamShard
from mupax.train.data.text.tokenizer import Bytes
from tests.fixtures.commands import output_line, refusal
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import losses
from tests.train.data import loading
from tests.train.data.loading import (
    assert_batches_equal,
    documents,
    stream_shards,
    token_ids,
)
from tests.train.data.writing import json_lines, write, write_rows

__all__ = ["shared_programs"]  # a fixture

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("work_folder")]

RECORDS = 150


@pytest.fixture(autouse=True)
def few_bytes_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {
        "streams.files._CHUNK_BYTES": 64,
        "streams.hub._CHUNK_BYTES": 64,
        "records.lines._PART_BYTES": 256,
        "records.lines._BLOCK_BYTES": 256,
        "streams.lanes._FIRST_BYTES": 200,
        "streams.lanes._STEP_BYTES": 900,
        "streams.batches._POOL": 40,
    }.items():
        monkeypatch.setattr(f"mupax.train.data.{name}", size)


def texts_of(file: str, count: int = RECORDS) -> list[str]:
    return [f"{file} {i} " + "abcdefg"[: i % 7] * (i % 5) for i in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files of records to train on, and one to evaluate on."""
    for name in ("train-0", "train-1", "train-2", "train-3", "validation-0"):
        rows = [{"n": i, "text": text} for i, text in enumerate(texts_of(name))]
        write_rows(tmp_path / f"records/{name}.jsonl", rows)
    return tmp_path / "records"


@pytest.fixture(params=["files", "hub"])
def load(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Stream]:
    """Return what opens the folder, as a user's own records or by `datasets`."""
    if request.param == "hub":
        pytest.importorskip("datasets", reason="data sets of the hub need the extra `hf`")
        fields: dict[str, Any] = {"name": f"hf:{folder}"}
    else:
        fields = {"name": f"records:{folder}", "stream": True}

    def load(**more: Any) -> Stream:
        source = loading.load(**{**fields, **more})
        assert isinstance(source, Stream)
        return source

    return load


Load = Callable[..., Stream]


def test_lanes_have_every_training_document_once_and_whole_files(load: Load) -> None:
    stream = load()
    shards = [documents(ids) for ids in stream_shards(stream)]
    expected = [texts_of(f"train-{i}") for i in range(4)]
    assert sorted(shards) == sorted(expected)
    assert documents(stream._eval) == texts_of("validation-0")
    assert stream.train_size is None
    assert stream.references() == []


def test_the_number_of_lanes_divides_the_batch_and_not_the_processes(load: Load) -> None:
    counts = [len(load(batch_size=size)._lanes) for size in (1, 2, 6, 8, MOST_LANES)]
    assert counts == [1, 2, 2, 4, 4]


def test_a_lane_goes_on_after_any_kill(load: Load) -> None:
    expected = stream_shards(load(batch_size=2))[1]
    source = load(batch_size=2)._lanes[1]._documents
    Path("again").mkdir()
    for step in range(100):
        lane = StreamShard(Path("again/lane"), source, Bytes())  # as a new process has it
        lane.grow()  # takes what is there
        lane.grow()  # does a step
        if lane.ended:
            break
        # A step whose line was not written, or half of it.
        with Path("again/lane.bin").open("ab") as file:
            file.write(b"\1" * (step % 3))
        with Path("again/lane.jsonl").open("ab") as file:
            file.write(b'{"tokens": 10'[: 13 * (step % 2)])
    assert 5 < step < 99
    np.testing.assert_array_equal(lane.read(0, lane.tokens), expected)


def test_lines_without_their_tokens_are_made_again(load: Load) -> None:
    (lane,) = load(batch_size=1)._lanes
    (expected,) = stream_shards(load(batch_size=1))
    with lane._bin.open("r+b") as file:
        file.truncate(700)
    again = load(batch_size=1)
    assert 0 < again._lanes[0].tokens <= 700
    np.testing.assert_array_equal(stream_shards(again)[0], expected)


def test_two_at_once_make_one_lane(load: Load) -> None:
    stream = load(batch_size=1)
    (expected,) = stream_shards(stream)
    source = stream._lanes[0]._documents
    Path("both").mkdir()
    pair = [StreamShard(Path("both/lane"), source, Bytes()) for _ in range(2)]
    threads = [threading.Thread(target=lane.until, args=(1 << 40, print)) for lane in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in pair:
        np.testing.assert_array_equal(lane.read(0, lane.tokens), expected)
    first, second = (lane.first(1 << 40, print) for lane in pair)
    assert first.digest == second.digest


def test_a_flipped_bit_is_seen(load: Load) -> None:
    lane = load(batch_size=1)._lanes[0]
    lane.until(1000, print)
    content = bytearray(lane._bin.read_bytes())
    content[500] ^= 1
    lane._bin.write_bytes(content)
    # A process checks what others wrote, and not its own.
    assert lane.read(0, 100).size == 100
    message = r"train-0-of-1.bin is not what was written; delete .*jsonl, and it is made again"
    again = load(batch_size=1)
    with pytest.raises(DataError, match=message):
        again._lanes[0].read(0, 1000)


def test_batches_are_functions_of_seed_and_number(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = load()
    iterator = stream.train_batches(0)
    batches = [next(iterator) for _ in range(30)]
    iterator.close()
    monkeypatch.setenv("MUPAX_DATA", "elsewhere")
    other = load()
    assert other.facts["digest"] == stream.facts["digest"]
    for k in (29, 3, 0):
        parts = {start: other.train_batch(k, slice(start, start + 2)) for start in (6, 0, 4, 2)}
        batch = loading.joined([parts[start] for start in (0, 2, 4, 6)])
        assert_batches_equal(batch, batches[k])
    assert (load(seed=1).train_batch(0)["inputs"] != batches[0]["inputs"]).any()


def test_rows_tokenize_their_own_lanes_alone(load: Load) -> None:
    stream = load()
    stream.train_batch(9, slice(4, 6))
    counts = [lane.tokens for lane in stream._lanes]
    # The first was opened to see what the text is.
    assert [count > 0 for count in counts] == [True, False, True, False]
    assert counts[2] < stream_shards(stream)[2].size  # nor more of it than is needed


def test_an_epoch_has_every_window_once_and_the_next_has_others(load: Load) -> None:
    stream = load(batch_size=2, document_mask=True)
    ids = stream_shards(stream)[1]
    count = (len(ids) - 7) // 7
    windows = [tuple(stream.train_windows([2 * i + 1])[0]) for i in range(2 * count)]
    cut = [tuple(ids[7 * i : 7 * i + 8]) for i in range(count)]
    assert sorted(windows[:count]) == sorted(cut)
    assert windows[:count] != cut  # in another order
    for i in range(count):  # the pool that it is in, and no later one
        first = i // 20 * 20
        assert windows[i] in cut[first : first + 20]
    assert sorted(windows[count:]) != sorted(cut)
    assert "segments" in stream.train_batch(0)


def test_a_file_without_a_split_is_split_by_its_records(load: Load, folder: Path) -> None:
    for name in ("train-1", "train-2", "train-3", "validation-0"):
        (folder / f"{name}.jsonl").unlink()
    train, evaluation = (set(documents(ids)) for ids in token_ids(load()))
    assert {corpus.side(text) for text in train} == {"train"}
    assert {corpus.side(text) for text in evaluation} == {"eval"}
    assert len(train | evaluation) == RECORDS


def test_evaluation_text_is_bounded(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupax.train.data.sources.streams.EVAL_TOKENS", 300)
    stream = load()
    assert 300 <= stream.facts["eval_tokens"] < 700
    other = load(eval_examples=100)  # as many as are wanted, of what is there already and more
    assert other.eval_size == 100
    assert other.facts["digest"] == stream.facts["digest"]
    assert load().facts == stream.facts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"field": "n"}, "has no text but int in 'n'; write --data.field text"),
        ({"field": "body"}, "has no field 'body'; write --data.field text"),
        ({"tokenizer": "bpe:300"}, "a model of 256 tokens; write --model.vocab-size 300"),
    ],
)
def test_fields_that_do_not_fit_are_refused(
    load: Load, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(**fields)


def test_a_short_text_is_refused(load: Load, folder: Path) -> None:
    for i in range(4):
        write(folder / f"train-{i}.jsonl", '{"n": 0, "text": "abc"}\n')
    message = r"the training text .* has 4 tokens; sequences of 7 need at least 14"
    with pytest.raises(DataError, match=message):
        load()


def test_a_broken_line_ends_what_waits_for_it(load: Load, folder: Path) -> None:
    for i in (1, 2, 3):
        with (folder / f"train-{i}.jsonl").open("a") as file:
            file.write('{"n": 0, "text": 5\n')
    stream = load(batch_size=4)
    stream.train_batch(0, slice(0, 1))
    with pytest.raises(DataError, match=r"train-\d.jsonl line 151 is no JSON|cannot read hf:"):
        [stream.train_batch(k) for k in range(0, 600, 50)]


def test_a_tokenizer_is_trained_on_the_beginning(load: Load) -> None:
    fields = {"vocab_size": 300, "tokenizer": "bpe:300"}
    stream = load(**fields)
    assert load(batch_size=2, **fields).facts["tokenizer"] == stream.facts["tokenizer"]
    ids = stream_shards(stream)[0]
    assert len(ids) < len(stream_shards(load())[0])
    assert stream.tokenizer.decode(ids[:60]).startswith("train-")


def test_streams_in_mixtures(load: Load, folder: Path) -> None:
    mix = (f"a={load().config.name}:1", f"b=records:{folder}:1")
    mixed = loading.load("mix", mix=mix, stream=True)
    assert mixed.train_size is None
    iterator = mixed.train_batches(3)
    assert_batches_equal(next(iterator), mixed.train_batch(3))
    iterator.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tokenizing"]


# datasets


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="data sets of the hub need the extra `hf`")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:", "no folder hf:; write data.name as hf:NAME"),
        ("hf:./none", "no folder ./none; write data.name as hf:NAME"),
        ("hf:/none/here", "no folder /none/here; write data.name as hf:NAME"),
        ("hf:a/b/c", "no folder a/b/c; write data.name as hf:NAME"),
        (f"hf:{__file__}", "test_streams.py is a file; write records:"),
    ],
)
def test_names_of_nothing_are_refused(datasets: Any, name: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        hub.opened(name)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no name"), "cannot be read: no name. Is there a network"),
        (
            type("RepositoryNotFoundError", (OSError,), {})("404"),
            "the hub has no data set of hf:a/b@main:en",
        ),
        (RuntimeError("odd"), "`datasets` cannot read hf:a/b@main:en: odd"),
    ],
)
def test_a_hub_that_does_not_answer(
    datasets: Any, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def info(self: Any, name: str, **options: Any) -> None:
        requests.append((name, options["revision"]))
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    with pytest.raises(DataError, match=re.escape(message)):
        hub.opened("hf:a/b@main:en")
    assert requests == [("a/b", "main")]


def test_the_hub_is_read_at_one_commit(
    datasets: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    load_dataset = datasets.load_dataset

    def stand_in(name: str, subset: str | None, **options: Any) -> Any:
        calls.append((name, subset, options))
        return load_dataset(str(folder), streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    commit = type("Info", (), {"sha": "abc"})()
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name, **options: commit)
    data_set = hub.opened("hf:allenai/c4:en")
    assert calls == [("allenai/c4", "en", {"revision": "abc", "streaming": True})]
    assert data_set.revision == "abc"
    assert hub.opened("hf:allenai/c4").key != data_set.key


def test_a_subset_that_does_not_exist_is_named(datasets: Any, folder: Path) -> None:
    message = r"cannot read hf:.*records:nothing.*BuilderConfig 'nothing' not found"
    with pytest.raises(DataError, match=message):
        hub.opened(f"hf:{folder}:nothing")


def test_files_that_are_gone_later_are_a_failure_of_the_machine(
    datasets: Any, folder: Path
) -> None:
    stream = loading.load(f"hf:{folder}")
    shutil.rmtree(folder)
    with pytest.raises(ReadError, match=r"cannot be read: .*train-"):
        [stream.train_batch(k) for k in range(200)]


# By the command

RUN = (
    "train lm-tiny --data.name records:records --data.stream --steps 6 --model.width 8 "
    "--model.depth 1 --model.num-heads 1 --model.seq-len 8 --data.batch-size 8 "
    "--data.eval-examples 8 --log.no-tensorboard --log.no-samples "
    "--checkpoint.every-steps 2 --checkpoint.keep 3 --workdir run"
)


def test_a_run_goes_on_exactly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a run, take its cache away and resume: losses are those of the run without a stop."""
    output_line(RUN)
    before = losses("run")
    assert len(before) == 6
    monkeypatch.setenv("MUPAX_DATA", "elsewhere")
    output_line(RUN, "--resume --resume-from 2")
    assert losses("run") == before
    with (folder / "train-0.jsonl").open("a") as file:
        file.write('{"text": "another record"}\n')
    assert "--resume-change data" in refusal(RUN, "--resume --resume-from 4")


# Splits and broken records of `datasets`


def write_records(name: str, *lines: str) -> None:
    """Write 40 records, each named for its file, with more lines in the middle."""
    content = json_lines({"text": text} for text in texts_of(name, 40)).decode().splitlines()
    content[20:20] = lines
    write(f"t/{name}", "\n".join(content) + "\n")


def texts_and_notes(**fields: Any) -> tuple[str, str, list[str]]:
    """Return training and evaluation text of a folder that `datasets` reads, and the notes."""
    source, notes = loading.load_with_notes("hf:./t", **fields)
    train, evaluation = ("".join(documents(ids)) for ids in token_ids(source))
    return train, evaluation, notes


@pytest.mark.parametrize(
    ("names", "unused"),
    [
        ("trn.jsonl holdout.jsonl", ""),
        ("train/a.jsonl dev/b.jsonl README.md", ""),
        ("data/Train/a.jsonl data/Validation/b.jsonl data/testing/c.jsonl", "testing"),
    ],
)
def test_names_tell_the_split_of_a_folder(datasets: Any, names: str, unused: str) -> None:
    first, second, *_ = names.split()
    for name in names.split():
        write_records(name)
    train, evaluation, notes = texts_and_notes()
    assert [name for name in names.split() if name in train] == [first]
    assert [name for name in names.split() if name in evaluation] == [second]
    assert any("training on" in note and unused in note for note in notes)


def test_two_validation_parts_of_a_folder_are_refused(datasets: Any) -> None:
    for name in ("train.jsonl", "val.jsonl", "dev.jsonl"):
        write_records(name)
    loading.assert_refused(r"val.*dev|dev.*val", "hf:./t")


@pytest.mark.parametrize(
    ("splits", "held_out"),
    [
        ({"train_sft": "a", "test_sft": "b"}, "b"),
        ({"train": "a", "validation": "b", "dev": "c", "test": "d"}, "b"),
        ({"train": "a", "validation_one": "b", "validation_two": "c"}, "a"),
    ],
)
def test_splits_that_a_data_set_declares(
    datasets: Any, splits: dict[str, str], held_out: str
) -> None:
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split, file in splits.items():
        write_records(f"{file}.jsonl")
        lines += [f"  - split: {split}", f"    path: {file}.jsonl"]
    write("t/README.md", "\n".join([*lines, "---", ""]))
    train, evaluation, _ = texts_and_notes()
    assert [file for file in splits.values() if f"{file}.jsonl" in train] == ["a"]
    assert [file for file in splits.values() if f"{file}.jsonl" in evaluation] == [held_out]


@pytest.mark.parametrize("names", [["train-0", "train-1", "val"], ["a"]])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_records_without_text_are_left_out_and_counted(
    datasets: Any, names: list[str], suffix: str
) -> None:
    for name in names:
        texts = texts_of(name, 40)
        rows = [{"text": text} for text in [*texts[:20], None, None, *texts[20:]]]
        write_rows(f"t/{name}.{suffix}", rows)
    texts_and_notes()
    # The notes are written at the start, when the first reading has counted all records.
    _, _, notes = texts_and_notes()
    assert any(f"{2 * len(names)} records" in note for note in notes)


def test_a_torn_record_names_the_way_to_read_it(datasets: Any) -> None:
    write_records("a.jsonl", '{"text": "torn')
    loading.assert_refused("records:", "hf:./t")


def test_a_packed_file_in_a_tar_has_the_limits_of_one_outside(datasets: Any) -> None:
    Path("t").mkdir()
    file = Path("t/train.tar")
    record = b'{"text": "' + b"a" * (65 * 2**20) + b'"}'
    for suffix, pack in ((".gz", gzip.compress), (".bz2", bz2.compress), ("", bytes)):
        with tarfile.open(file, "w") as archive:
            content = pack(record if suffix else b'{"text": "good"}')
            member = tarfile.TarInfo(f"a.jsonl{suffix}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if suffix:
            message = (
                rf"a\.jsonl\{suffix} in t/train\.tar unpacks to 64 MiB from .* --data\.limits\.ra"
            )
            with pytest.raises(DataError, match=message):
                hub.opened("hf:./t")
        else:
            assert next(iter(hub.opened("hf:./t").splits["train"]))["jsonl"]
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(DataError, match=r"cannot read t/train\.tar: .*damaged or cut off"):
        hub.opened("hf:./t")


def test_an_error_of_a_packed_file_proposes_no_flag_that_is_not_read(datasets: Any) -> None:
    Path("t").mkdir()
    content = gzip.compress(b'{"text": "good"}\n' * 100)
    Path("t/train.jsonl.gz").write_bytes(content[:-12])
    with pytest.raises(DataError, match=r"t/train\.jsonl\.gz") as error:
        hub.opened("hf:./t")
    assert "--data.on-broken" not in str(error.value)
    # A large file is not checked, so `datasets` finds the damage.
    os.truncate("t/train.jsonl.gz", 64 * 2**20 + 1)
    with pytest.raises(DataError, match=r"cannot be read: .*records:t, which names") as error:
        hub.opened("hf:./t")
    assert "network" not in str(error.value)


def test_an_archive_that_unpacks_to_too_much_or_is_damaged_is_refused(datasets: Any) -> None:
    Path("t").mkdir()
    file = Path("t/train.zip")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", b" " * (65 * 2**20))
    with pytest.raises(DataError, match=r"t/train\.zip unpacks to 65 MiB from"):
        hub.opened("hf:./t")
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(DataError, match=r"cannot read t/train\.zip: .*damaged or cut off"):
        hub.opened("hf:./t")
    # A file above 64 MiB is not checked.
    for name in ("train.jsonl", "val.jsonl"):
        write_records(name)
    os.truncate(file, 64 * 2**20 + 1)
    hub.opened("hf:./t")
