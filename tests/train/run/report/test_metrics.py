"""metrics.jsonl: strict JSON, soon on disk, without repeats after a resume, and its mirrors."""

import json
import math
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupax.disk import DiskError
from mupax.train.config.sections import LogConfig
from mupax.train.run.report import metrics
from tests.fixtures.properties import PROPERTY
from tests.train.run.report.mirrors.test_media import records

pytestmark = pytest.mark.core

ROW = {"loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "tokens": 64, "seconds": 0.1}


def row(step):
    return {"step": step, **ROW}


def steps_of(path):
    return [entry["step"] for entry in metrics.read(path)]


def strict(text):
    """Parse what any JSON parser must accept: NaN and Infinity are not JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write(folder, steps, **options):
    with metrics.MetricsWriter(folder, **options) as writer:
        for step in steps:
            writer.write(row(step))
    return writer.path


def test_rows_are_json_objects_in_order(tmp_path):
    path = write(tmp_path / "run", range(1, 4))
    assert path == tmp_path / "run" / "metrics.jsonl"
    assert strict(path.read_text()) == [row(1), row(2), row(3)] == metrics.read(path)


def test_numbers_booleans_text_and_nothing_are_written_as_such(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "loss": 2.5, "lr": np.float64(0.5), "done": True})
        writer.write({"step": 2, "loss": 2.5, "eval_accuracy": None, "note": "text"})
    assert strict(writer.path.read_text()) == [
        {"step": 1, "loss": 2.5, "lr": 0.5, "done": True},
        {"step": 2, "loss": 2.5, "eval_accuracy": None, "note": "text"},
    ]


@pytest.mark.parametrize(
    ("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
@pytest.mark.parametrize("kind", [float, np.float64])
def test_a_number_that_is_not_finite_is_null_and_named(tmp_path, value, name, kind):
    with metrics.MetricsWriter(tmp_path, log=LogConfig()) as writer:
        writer.write({"step": 3, "loss": kind(value), "lr": 0.1})
    assert strict(writer.path.read_text()) == [
        {"step": 3, "loss": None, "lr": 0.1, "nonfinite": {"loss": name}}
    ]


def test_a_number_of_a_task_that_is_not_finite_is_null():
    text = metrics.to_json({"task": {"word_perplexity": math.inf, "examples": 1}})
    assert strict(text) == [{"task": {"word_perplexity": None, "examples": 1}}]


def test_a_row_is_on_disk_within_a_second(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(row(1))
        deadline = time.monotonic() + 1.0
        while not writer.path.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert metrics.read(writer.path) == [row(1)]


def test_a_write_costs_the_step_little(tmp_path):
    count = 2000
    with metrics.MetricsWriter(tmp_path, log=LogConfig()) as writer:
        rows = [row(step) for step in range(count)]
        began = time.thread_time()
        for each in rows:
            writer.write(each)
        spent = time.thread_time() - began
    assert spent / count < 50e-6
    assert len(metrics.read(writer.path)) == count


def test_a_new_run_replaces_an_old_file(tmp_path):
    write(tmp_path, [1, 2, 3])
    assert metrics.read(write(tmp_path, [1])) == [row(1)]


def test_resume_drops_later_rows_only(tmp_path):
    with metrics.MetricsWriter(tmp_path) as writer:
        for step in range(1, 8):
            writer.write(row(step))
            if step % 2 == 0:
                writer.write({"step": step, "eval_loss": 1.0})
    path = write(tmp_path, [5, 6], resume_step=4)
    rows = metrics.read(path)
    assert [each["step"] for each in rows if "loss" in each] == [1, 2, 3, 4, 5, 6]
    assert [each["step"] for each in rows if "eval_loss" in each] == [2, 4]
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


@PROPERTY
@given(st.integers(0, 1000), st.one_of(st.just(b""), st.binary(max_size=20)))
def test_a_run_goes_on_from_a_file_that_a_kill_has_torn(tmp_path_factory, end, junk):
    folder = tmp_path_factory.mktemp("torn")
    path = write(folder, [1, 2, 3])
    content = path.read_bytes()
    lines = content[:end].count(b"\n")
    path.write_bytes(content[:end] + junk.replace(b"\n", b"x"))
    rows = metrics.read(path)
    assert rows[:lines] == [row(step) for step in range(1, lines + 1)]
    assert len(rows) <= lines + 1  # the last line may be there but for its newline
    write(folder, [lines + 1], resume_step=lines)
    assert strict(path.read_text()) == [row(step) for step in range(1, lines + 2)]


def test_a_last_row_that_only_lacks_its_newline_is_kept(tmp_path):
    path = write(tmp_path, [1, 2])
    path.write_text(path.read_text().rstrip("\n"))
    assert strict(write(tmp_path, [3], resume_step=2).read_text()) == [row(1), row(2), row(3)]


@pytest.mark.parametrize("bad", ['{"step": 1, "lo\n', "[1]\n", '{"loss": 1}\n', '{"step": null}\n'])
def test_a_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(1)) + "\n" + bad + json.dumps(row(3)) + "\n")
    before = path.read_text()
    with pytest.raises(
        metrics.MetricsError, match=r"line 2 is not a metrics row .*; remove the line"
    ):
        metrics.read(path)
    with pytest.raises(metrics.MetricsError, match="line 2"):
        metrics.MetricsWriter(tmp_path, resume_step=3)
    assert path.read_text() == before


def test_a_failed_cut_leaves_the_old_file(tmp_path, monkeypatch):
    path = write(tmp_path, [1, 2, 3])
    before = path.read_text()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(metrics.os, "fsync", fail)
    with pytest.raises(DiskError, match="disk full"):
        metrics.MetricsWriter(tmp_path, resume_step=1)
    assert path.read_text() == before


def test_what_fails_in_the_thread_is_raised_by_close(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write({"step": 1, "loss": np.zeros(3)})
    writer.write(row(2))
    with pytest.raises(
        RuntimeError,
        match=r"could not write .*metrics.jsonl: Object of type ndarray is not JSON serializable",
    ):
        writer.close()
    writer.close()


def events(folder):
    """Scalars (tag, step, value) and session starts (step) of all event files, oldest first."""
    from tensorboardX.proto.event_pb2 import SessionLog

    scalars, starts = [], []
    for event in records(folder):
        scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        if event.session_log.status == SessionLog.START:
            starts.append(event.step)
    return scalars, starts


def test_tensorboard_gets_every_row(tmp_path):
    with metrics.MetricsWriter(tmp_path, log=LogConfig()) as writer:
        writer.write({"step": 7, "loss": 2.5, "lr": 0.5, "note": "not a number", "done": True})
        writer.write({"step": 7, "eval_loss": 1.5, "eval_accuracy": 0.25})
        writer.write({"step": 7, "perf_mfu": 0.5})
    scalars, starts = events(tmp_path / "tensorboard")
    assert scalars == [
        ("train/loss", 7, 2.5),
        ("train/lr", 7, 0.5),
        ("eval/loss", 7, 1.5),
        ("eval/accuracy", 7, 0.25),
        ("perf/mfu", 7, 0.5),
    ]
    assert starts == []


def test_tensorboard_hides_what_a_resume_repeats(tmp_path):
    write(tmp_path, [1, 2, 3], log=LogConfig())
    write(tmp_path, [3], log=LogConfig(), resume_step=2)
    assert events(tmp_path / "tensorboard")[1] == [3]


class Broken:
    """A mirror that takes rows up to a step, and then fails or hangs."""

    name = "Broken"

    def __init__(self, last, hangs=False):
        self.last, self.hangs, self.steps = last, hangs, []

    def write(self, row, walltime):
        if row["step"] > self.last:
            time.sleep(3600 if self.hangs else 0)
            raise OSError(5, "Input/output error")
        self.steps.append(row["step"])

    def close(self):
        pass


@pytest.mark.parametrize("hangs", [False, True])
def test_a_mirror_that_breaks_is_left_out_with_a_line_and_nothing_waits_for_it(
    tmp_path, monkeypatch, capsys, hangs
):
    monkeypatch.setattr(metrics, "_FLUSH_S", 0.2)
    monkeypatch.setattr(metrics, "_CLOSE_S", 0.3)
    broken = Broken(2, hangs)
    began = time.monotonic()
    with metrics.MetricsWriter(tmp_path, log=LogConfig()) as writer:
        writer._mirrors._mirrors.append(broken)
        for step in range(1, 50):
            writer.write(row(step))
            if step % 10 == 0:
                writer.flush()
    assert time.monotonic() - began < 10
    assert steps_of(writer.path) == list(range(1, 50))
    assert broken.steps == [1, 2]
    reason = "TensorBoard or Broken is left out from here on: no answer for 0 s"
    reason = reason if hangs else "Broken is left out from here on: [Errno 5] Input/output error"
    assert capsys.readouterr().err == f"{reason}; metrics.jsonl has every row\n"
    if not hangs:
        assert [
            step for tag, step, _ in events(tmp_path / "tensorboard")[0] if tag == "train/loss"
        ] == [*range(1, 50)]


@pytest.mark.parametrize("where", ["open", "write"])
def test_a_disk_that_does_not_take_tensorboards_events_costs_the_run_nothing(
    tmp_path, monkeypatch, capsys, where
):
    from tensorboardX.event_file_writer import EventsWriter

    take, count = EventsWriter.write_event, iter(range(1000))

    def broken(self, event):
        if next(count) == 100:
            raise OSError(5, "Input/output error")
        return take(self, event)

    if where == "open":
        (tmp_path / "tensorboard").write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(EventsWriter, "write_event", broken)
    path = write(tmp_path, range(1, 200), log=LogConfig())
    assert len(metrics.read(path)) == 199
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("TensorBoard is left out from here on: ")


def test_tensorboard_is_only_imported_when_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    write(tmp_path, [1])
    with pytest.raises(ImportError):
        metrics.MetricsWriter(tmp_path, log=LogConfig())


def test_rows_of_anyone_are_rows_or_refused_by_their_line(tmp_path):
    good = '{"step": 1, "loss": 2.0}'
    nonsense = [
        "[" * 100_000,
        '{"step": ' + "9" * 6000 + "}",
        '{"step": true}',
        '{"step": -1}',
        '{"step": 1, "loss": 1e999}',
        '{"step": 1, "loss": "low"}',
        '{"step": 1, "nonfinite": 3}',
        '{"step": 1, "seconds": [1]}',
        "\xff",
        "3",
    ]
    for line in nonsense:
        (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n{good}\n", encoding="latin-1")
        with pytest.raises(
            metrics.MetricsError, match=r"metrics\.jsonl line 2 is not a metrics row"
        ):
            metrics.read(tmp_path / "metrics.jsonl")
    with pytest.raises(metrics.MetricsError, match=r"a/metrics\.jsonl is missing"):
        metrics.read(tmp_path / "a" / "metrics.jsonl")


def test_rows_that_somebody_deleted_are_said(tmp_path):
    path = write(tmp_path, [1, 2, 3, 4, 5])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + lines[3:]))
    notes: list[str] = []
    metrics.MetricsWriter(tmp_path, resume_step=5, note=notes.append).close()
    assert notes == [
        "metrics.jsonl lacks the rows of 2 of 5 steps, from 2 up to 3: they were deleted"
    ]
    # Control: of whole rows nothing is said.
    write(tmp_path, [1, 2, 3])
    notes.clear()
    metrics.MetricsWriter(tmp_path, resume_step=2, note=notes.append).close()
    assert not notes


@pytest.mark.parametrize("how", ["moved", "emptied", "replaced"])
def test_a_workdir_that_is_moved_or_emptied_ends_the_run(tmp_path, how):
    folder = tmp_path / "run"
    with metrics.MetricsWriter(folder) as writer:
        writer.write(row(1))
        writer.flush()  # control: all is well
        if how == "moved":
            folder.rename(tmp_path / "elsewhere")
        else:
            (folder / "metrics.jsonl").unlink()
            if how == "replaced":
                (folder / "metrics.jsonl").write_text("")
        writer.write(row(2))
        with pytest.raises(DiskError, match="its workdir was moved or emptied"):
            writer.flush()
    if how == "moved":
        assert steps_of(tmp_path / "elsewhere" / "metrics.jsonl") == [1, 2]


def test_half_a_row_is_taken_back(tmp_path):
    class Torn:
        def __init__(self, file: Any) -> None:
            self.file, self.fileno, self.close = file, file.fileno, file.close

        def write(self, text: bytes) -> int:
            self.file.write(text[: len(text) // 2])
            raise OSError(5, "Input/output error")

    writer = metrics.MetricsWriter(tmp_path)
    writer.write(row(1))
    writer.flush()
    file, writer._file = writer._file, Torn(writer._file)
    writer.write(row(2))
    with pytest.raises(DiskError, match="Input/output error"):
        writer.flush()
    writer._file = file
    writer.write(row(3))
    writer.close()
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 3]
