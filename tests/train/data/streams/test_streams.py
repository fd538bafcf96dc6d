"""Text that is tokenized while it is trained on: the same tokens and batches whoever makes them, when, and after whatever stops."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data import DataError
from mupax.train.data.records import corpus
from mupax.train.data.streams import hub, lanes
from mupax.train.data.streams.batches import Stream
from mupax.train.data.streams.files import MOST_LANES
from mupax.train.data.streams.lanes import StreamShard
from mupax.train.data.text.tokenizer import Bytes
from mupax.zoo import configs
from mupax.zoo.configs import DecoderConfig

pytestmark = pytest.mark.core

LM_TINY = configs.get("lm-tiny")
assert isinstance(LM_TINY, DecoderConfig)
MODEL = dataclasses.replace(LM_TINY, seq_len=7)
RECORDS = 150


@pytest.fixture(autouse=True)
def few_bytes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    for module in ("files", "hub"):
        monkeypatch.setattr(f"mupax.train.data.streams.{module}._CHUNK_BYTES", 64)
    for name in ("_PART_BYTES", "_BLOCK_BYTES"):
        monkeypatch.setattr(f"mupax.train.data.records.lines.{name}", 256)
    monkeypatch.setattr(lanes, "_FIRST_BYTES", 200)
    monkeypatch.setattr(lanes, "_STEP_BYTES", 900)
    monkeypatch.setattr("mupax.train.data.streams.batches._POOL", 40)


def text_of(file: str, i: int) -> str:
    return f"{file} {i} " + "abcdefg"[: i % 7] * (i % 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files of records to train on, and one to evaluate on."""
    for name in ("train-0", "train-1", "train-2", "train-3", "validation-0"):
        rows = (json.dumps({"n": i, "text": text_of(name, i)}) for i in range(RECORDS))
        (tmp_path / "records").mkdir(exist_ok=True)
        (tmp_path / "records" / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "records"


@pytest.fixture(params=["files", "hub"])
def load(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Stream]:
    """Opens the folder, as a user's own records and by `datasets`."""
    if request.param == "hub":
        pytest.importorskip("datasets", reason="data sets of the hub need the extra `hf`")
    fields = {
        "files": {"name": f"records:{folder}", "stream": True},
        "hub": {"name": f"hf:{folder}"},
    }[request.param]

    def load(seed: int = 0, **more: Any) -> Stream:
        config = DataConfig(**{"batch_size": 8, **fields, **more})
        loaded = data.load(config, MODEL, seed=seed, note=lambda line: None)
        assert isinstance(loaded, Stream)
        return loaded

    return load


def whole(stream: Stream) -> list[np.ndarray]:
    """All tokens of each lane."""
    for lane in stream._lanes:
        lane.until(1 << 40, print)
    return [lane.read(0, lane.tokens) for lane in stream._lanes]


def documents(tokens: np.ndarray) -> list[str]:
    return bytes(tokens.astype(np.uint8)).decode().split("\0")[:-1]


def test_lanes_have_every_training_document_once_and_whole_files(
    load: Callable[..., Stream],
) -> None:
    stream = load()
    of = [documents(tokens) for tokens in whole(stream)]
    assert len(of) == 4
    everything = [text_of(f"train-{name}", i) for name in range(4) for i in range(RECORDS)]
    assert sorted(document for lane in of for document in lane) == sorted(everything)
    for lane in of:
        name = lane[0].split()[0]
        assert lane == [text_of(name, i) for i in range(RECORDS)]
    assert documents(stream._eval) == [text_of("validation-0", i) for i in range(RECORDS)]
    assert stream.train_size is None
    assert stream.references() == []


def test_the_number_of_lanes_divides_the_batch_and_not_the_processes(
    load: Callable[..., Stream],
) -> None:
    assert [len(load(batch_size=size)._lanes) for size in (1, 2, 6, 8, MOST_LANES)] == [
        1,
        2,
        2,
        4,
        4,
    ]


def test_a_lane_goes_on_after_any_kill(load: Callable[..., Stream], tmp_path: Path) -> None:
    expected = whole(load(batch_size=2))
    source = load(batch_size=2)._lanes[1]._documents
    (tmp_path / "again").mkdir()
    path = tmp_path / "again" / "lane"
    for step in range(100):
        lane = StreamShard(path, source, Bytes())  # as a new process has it
        for _ in range(2):  # takes what is there, does a step
            lane.grow()
        if lane.ended:
            break
        with (tmp_path / "again" / "lane.bin").open(
            "ab"
        ) as file:  # a step whose line was not written,
            file.write(b"\1" * (step % 3))
        with (tmp_path / "again" / "lane.jsonl").open("ab") as file:  # or half of it
            file.write(b'{"tokens": 10'[: 13 * (step % 2)])
    assert 5 < step < 99
    np.testing.assert_array_equal(lane.read(0, lane.tokens), expected[1])


def test_lines_without_their_tokens_are_made_again(load: Callable[..., Stream]) -> None:
    (lane,) = load(batch_size=1)._lanes
    expected = whole(load(batch_size=1))[0]
    with lane._bin.open("r+b") as file:
        file.truncate(700)
    again = load(batch_size=1)
    assert 0 < again._lanes[0].tokens <= 700
    np.testing.assert_array_equal(whole(again)[0], expected)


def test_two_at_once_make_one_lane(load: Callable[..., Stream], tmp_path: Path) -> None:
    expected = whole(load(batch_size=1))[0]
    source = load(batch_size=1)._lanes[0]._documents
    (tmp_path / "both").mkdir()
    lanes = [StreamShard(tmp_path / "both" / "lane", source, Bytes()) for _ in range(2)]
    threads = [threading.Thread(target=lane.until, args=(1 << 40, print)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in lanes:
        np.testing.assert_array_equal(lane.read(0, lane.tokens), expected)
    assert lanes[0].first(1 << 40, print).digest == lanes[1].first(1 << 40, print).digest


def test_a_flipped_bit_is_seen(load: Callable[..., Stream]) -> None:
    lane = load(batch_size=1)._lanes[0]
    lane.until(1000, print)
    content = bytearray(lane._bin.read_bytes())
    content[500] ^= 1
    lane._bin.write_bytes(content)
    assert (
        lane.read(0, 100).size == 100
    )  # written by this process, which looks at what others wrote
    again = load(batch_size=1)
    with pytest.raises(
        DataError,
        match=r"train-0-of-1.bin is not what was written; delete .*jsonl, and it is made again",
    ):
        again._lanes[0].read(0, 1000)


def test_batches_are_functions_of_seed_and_number(
    load: Callable[..., Stream], tmp_path: Path, monkeypatch: Any
) -> None:
    stream = load()
    iterator = stream.train_batches(0)
    batches = [next(iterator) for _ in range(30)]
    iterator.close()
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "elsewhere"))
    other = load()
    assert other.facts["digest"] == stream.facts["digest"]
    for k in (29, 3, 0):
        parts = [other.train_batch(k, slice(start, start + 2)) for start in (6, 0, 4, 2)]
        joined = np.concatenate([parts[i]["inputs"] for i in (1, 3, 2, 0)])
        np.testing.assert_array_equal(joined, batches[k]["inputs"])
    assert (load(seed=1).train_batch(0)["inputs"] != batches[0]["inputs"]).any()


def test_rows_tokenize_their_own_lanes_alone(load: Callable[..., Stream]) -> None:
    stream = load()
    stream.train_batch(9, slice(4, 6))
    assert [lane.tokens > 0 for lane in stream._lanes] == [
        True,
        False,
        True,
        False,
    ]  # the first as it was opened
    assert stream._lanes[2].tokens < whole(stream)[2].size  # nor more of it than is needed


def test_an_epoch_has_every_window_once_and_the_next_has_others(
    load: Callable[..., Stream],
) -> None:
    stream = load(batch_size=2, document_mask=True)
    tokens = whole(stream)[1]
    count, length = (len(tokens) - 7) // 7, 7
    windows = [stream.train_windows([2 * i + 1])[0] for i in range(2 * count)]
    cut = [tokens[length * i : length * i + 8] for i in range(count)]
    assert sorted(map(tuple, windows[:count])) == sorted(map(tuple, cut))
    assert any((a != b).any() for a, b in zip(windows, cut, strict=False))  # in another order
    for i in range(count):  # the pool that it is in, and no later one
        assert any((windows[i] == each).all() for each in cut[i // 20 * 20 : i // 20 * 20 + 20])
    assert sorted(map(tuple, windows[count:])) != sorted(map(tuple, cut))
    assert "segments" in stream.train_batch(0)


def test_a_file_without_a_split_is_split_by_its_records(
    load: Callable[..., Stream], folder: Path
) -> None:
    for name in ("train-1", "train-2", "train-3", "validation-0"):
        (folder / f"{name}.jsonl").unlink()
    stream = load()
    sides = [set(documents(tokens)) for tokens in (*whole(stream), stream._eval)]
    assert [{corpus.side(text) for text in side} for side in sides] == [{"train"}, {"eval"}]
    assert len(sides[0] | sides[1]) == RECORDS


def test_evaluation_text_is_bounded(
    load: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        (
            {"tokenizer": "bpe:300"},
            "bpe:300 and a model of 256 tokens; write --model.vocab-size 300",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    load: Callable[..., Stream], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(**fields)


def test_a_short_text_is_refused(load: Callable[..., Stream], folder: Path) -> None:
    for i in range(4):
        (folder / f"train-{i}.jsonl").write_text('{"n": 0, "text": "abc"}\n')
    with pytest.raises(
        DataError, match=r"the training text .* has 4 tokens; sequences of 7 need at least 14"
    ):
        load()


def test_a_broken_line_ends_what_waits_for_it(load: Callable[..., Stream], folder: Path) -> None:
    for i in (1, 2, 3):
        with (folder / f"train-{i}.jsonl").open("a") as file:
            file.write('{"n": 0, "text": 5\n')
    stream = load(batch_size=4)
    stream.train_batch(0, slice(0, 1))
    with pytest.raises(DataError, match=r"train-\d.jsonl line 151 is no JSON|cannot read hf:"):
        [stream.train_batch(k) for k in range(0, 600, 50)]


def test_a_tokenizer_is_trained_on_the_beginning(
    load: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "MODEL", dataclasses.replace(MODEL, vocab_size=300))
    one, other = load(tokenizer="bpe:300"), load(tokenizer="bpe:300", batch_size=2)
    assert one.facts["tokenizer"] == other.facts["tokenizer"]
    assert len(whole(one)[0]) < len(whole(load())[0])
    assert one.tokenizer.decode(whole(one)[0][:60]).startswith("train-")


def test_streams_in_mixtures_and_with_noise(load: Callable[..., Stream], folder: Path) -> None:
    name = load().config.name
    config = DataConfig(
        name="mix", mix=(f"a={name}:1", f"b=records:{folder}:1"), batch_size=4, stream=True
    )
    mixed = data.load(config, MODEL, seed=0, note=lambda line: None)
    assert mixed.train_size is None
    iterator = mixed.train_batches(3)
    np.testing.assert_array_equal(next(iterator)["inputs"], mixed.train_batch(3)["inputs"])
    iterator.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tokenizing"]


# datasets


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="data sets of the hub need the extra `hf`")


def opened(name: str) -> hub.DataSet:
    return hub.opened(name)


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
def test_names_that_are_none(datasets: Any, name: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        opened(name)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError("Name or service not known"),
            "cannot be read: Name or service not known. Is there a network",
        ),
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
        opened("hf:a/b@main:en")
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
    data_set = opened("hf:allenai/c4:en")
    assert calls == [("allenai/c4", "en", {"revision": "abc", "streaming": True})]
    assert data_set.revision == "abc"
    assert opened("hf:allenai/c4").key != data_set.key


def test_a_subset_that_is_not_there_is_said(datasets: Any, folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"cannot read hf:.*records:nothing.*BuilderConfig 'nothing' not found"
    ):
        opened(f"hf:{folder}:nothing")


# By the command


def losses(workdir: Path) -> dict[int, float]:
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_a_run_goes_on_exactly(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped, its cache taken away, and gone on with: bitwise what the run without a stop has."""
    sizes = "--model.width 8 --model.depth 1 --model.num-heads 1 --model.seq-len 8 --data.batch-size 8 --data.eval-examples 8"
    words = f"lm-tiny --data.name records:{folder} --data.stream --steps 6 {sizes} --log.no-tensorboard --log.no-samples".split()
    words += ["--checkpoint.every-steps", "2", "--checkpoint.keep", "3"]
    words += ["--workdir", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    before = losses(tmp_path / "run")
    assert sorted(before) == [1, 2, 3, 4, 5, 6]
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "elsewhere"))
    assert main(["train", *words, "--resume", "--resume-from", "2"]) == 0
    assert losses(tmp_path / "run") == before
    with (folder / "train-0.jsonl").open("a") as file:
        file.write('{"text": "another record"}\n')
    capsys.readouterr()
    assert main(["train", *words, "--resume", "--resume-from", "4"]) == 2
    assert "--resume-change data" in capsys.readouterr().err


# Splits and broken records of `datasets`


def write_records(folder: Path, name: str, *more: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"text": text_of(name, i)}) for i in range(40)]
    (folder / name).write_text("\n".join([*rows[:20], *more, *rows[20:]]) + "\n")


def opened_folder(folder: Path, notes: list[str] | None = None, **fields: Any) -> tuple[str, str]:
    """Training and evaluation text of a folder that `datasets` reads."""
    config = DataConfig(name=f"hf:{folder}", batch_size=4, **fields)
    loaded = data.load(config, MODEL, seed=0, note=([] if notes is None else notes).append)
    assert isinstance(loaded, Stream)
    train, evaluation = (
        "".join(documents(tokens)) for tokens in (np.concatenate(whole(loaded)), loaded._eval)
    )
    return train, evaluation


@pytest.mark.parametrize(
    ("names", "unused"),
    [
        (["trn.jsonl", "holdout.jsonl"], ""),
        (["train/a.jsonl", "dev/b.jsonl", "README.md"], ""),
        (["data/Train/a.jsonl", "data/Validation/b.jsonl", "data/testing/c.jsonl"], "testing"),
    ],
)
def test_names_tell_the_split_of_a_folder(
    datasets: Any, tmp_path: Path, names: list[str], unused: str
) -> None:
    for name in names:
        write_records(tmp_path / "t", name)
    notes: list[str] = []
    train, evaluation = opened_folder(tmp_path / "t", notes)
    assert [name in train for name in names] == [i == 0 for i in range(len(names))]
    assert [name in evaluation for name in names] == [i == 1 for i in range(len(names))]
    assert any("training on" in note and unused in note for note in notes)


def test_two_validation_parts_of_a_folder_are_refused(datasets: Any, tmp_path: Path) -> None:
    for name in ("train.jsonl", "val.jsonl", "dev.jsonl"):
        write_records(tmp_path / "t", name)
    with pytest.raises(DataError, match=r"val.*dev|dev.*val"):
        opened_folder(tmp_path / "t")


@pytest.mark.parametrize(
    ("splits", "train", "held_out"),
    [
        ({"train_sft": "a", "test_sft": "b"}, "a", "b"),
        ({"train": "a", "validation": "b", "dev": "c", "test": "d"}, "a", "b"),
        ({"train": "a", "validation_one": "b", "validation_two": "c"}, "a", None),
    ],
)
def test_splits_that_a_data_set_declares(
    datasets: Any, tmp_path: Path, splits: dict[str, str], train: str, held_out: str | None
) -> None:
    for file in splits.values():
        write_records(tmp_path / "t", f"{file}.jsonl")
    files = "".join(
        f"  - split: {split}\n    path: {file}.jsonl\n" for split, file in splits.items()
    )
    (tmp_path / "t" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
    )
    text, evaluation = opened_folder(tmp_path / "t")
    assert [file for file in splits.values() if f"{file}.jsonl" in text] == [train]
    assert [file for file in splits.values() if f"{file}.jsonl" in evaluation] == [
        held_out or train
    ]


@pytest.mark.parametrize("names", [["train-0", "train-1", "val"], ["a"]])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_records_without_text_are_left_out_and_counted(
    datasets: Any, tmp_path: Path, names: list[str], suffix: str
) -> None:
    from pyarrow import parquet, table

    for name in names:
        write_records(tmp_path / "t", f"{name}.jsonl", '{"text": null}', '{"text": null}')
        if suffix == "parquet":
            file = tmp_path / "t" / f"{name}.jsonl"
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            parquet.write_table(
                table({"text": [row["text"] for row in rows]}), file.with_suffix(".parquet")
            )
            file.unlink()
    for on_broken in ("stop", "skip"):
        opened_folder(tmp_path / "t", on_broken=on_broken)
        notes: list[str] = []
        opened_folder(tmp_path / "t", notes, on_broken=on_broken)
        assert any(f"{2 * len(names)} records" in note for note in notes)


def test_a_torn_record_names_the_way_to_read_it(datasets: Any, tmp_path: Path) -> None:
    write_records(tmp_path / "t", "a.jsonl", '{"text": "torn')
    with pytest.raises(DataError, match="records:"):
        opened_folder(tmp_path / "t", on_broken="skip")
