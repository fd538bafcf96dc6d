"""Images, texts and histograms in TensorBoard, read back from the event files of runs; nothing of them where they are not asked for."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from PIL import Image

from mupax.__main__ import main
from mupax.train.checkpoints import saved_run
from mupax.train.config import cli
from mupax.train.core import step as core_step
from mupax.train.core.program import assemble
from mupax.train.data import load
from mupax.train.run.report import metrics
from mupax.train.run.report.mirrors import snapshots

SHOWN = 16
DIGITS = (
    f"vit-digits --model.depth 1 --steps 4 --optimizer.warmup-steps 1 --data.batch-size 16 --data.eval-examples {SHOWN} "
    f"--data.eval-batch-size {SHOWN} --log.eval-every-steps 2 --log.no-samples --workdir"
).split()
TEXT = (
    "lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 8 --data.eval-batch-size 8 "
    "--data.eval-examples 8 --optimizer.warmup-steps 1 --steps 2 --workdir"
)


def shown(folder: Path) -> dict[tuple[str, int], Any]:
    """Values of the summaries by tag and step."""
    from tensorboardX.proto.event_pb2 import Event

    values = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            values |= {(value.tag, event.step): value for value in event.summary.value}
    return values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with both, none of whose programs is traced twice."""
    folder, builds = tmp_path_factory.mktemp("media") / "run", []
    make = core_step.make_train_step
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((snapshots, "_predicted"), (snapshots, "_spread")):
            once = chex.assert_max_traces(getattr(owner, name), n=1)
            patch.setattr(owner, name, once)
        patch.setattr(
            core_step,
            "make_train_step",
            lambda *a: (builds.append(0), chex.assert_max_traces(make(*a), n=1))[1],
        )
        assert (
            main(["train", *DIGITS, str(folder), "--log.images", str(SHOWN), "--log.histograms"])
            == 0
        )
    assert len(builds) == 1
    return folder


def test_images_have_their_labels_and_predictions(run: Path) -> None:
    values = shown(run / "tensorboard")
    config = cli.parse(DIGITS[0], cli.recipe(DIGITS[0]), [*DIGITS[1:], str(run)]).config
    batch = load(config.data, config.model, seed=config.data_seed).eval_batch(0)
    accuracy = {
        row["step"]: row["eval_accuracy"]
        for row in metrics.read(run / "metrics.jsonl")
        if "eval_loss" in row
    }
    assert sorted(accuracy) == [2, 4]
    for step in accuracy:
        table = (
            values["examples/labels/text_summary", step]
            .tensor.string_val[0]
            .decode()
            .splitlines()[2:]
        )
        assert [line.split(" | ")[1] for line in table] == [
            str(label) for label in batch["targets"]
        ]
        right = sum(
            line.split(" | ")[1] == line.split(" | ")[2].removesuffix(" |") for line in table
        )
        assert (
            right
            == SHOWN - sum("(wrong)" in line for line in table)
            == round(accuracy[step] * SHOWN)
        )
        low, high = batch["inputs"].min(), batch["inputs"].max()
        for index in range(SHOWN):
            png = values[f"examples/{index:03}", step].image.encoded_image_string
            pixels = np.asarray(Image.open(io.BytesIO(png)).convert("L"), np.float32) / 255
            np.testing.assert_allclose(
                pixels, (batch["inputs"][index, ..., 0] - low) / (high - low), atol=1 / 255
            )


def test_histograms_are_of_the_parameters_and_their_changes(run: Path) -> None:
    values = shown(run / "tensorboard")
    trained = saved_run.find(run)
    params = trained.params(assemble(trained.config).abstract)
    for name, array in params.items():
        array, histogram = np.asarray(array, np.float64), values[f"parameters/{name}", 4].histo
        assert (histogram.num, sum(histogram.bucket)) == (array.size, array.size)
        np.testing.assert_allclose(
            [histogram.min, histogram.max], [array.min(), array.max()], rtol=1e-6
        )
        np.testing.assert_allclose(histogram.sum_squares, (array**2).sum(), rtol=1e-4)
        counts, _ = np.histogram(
            array, bins=len(histogram.bucket), range=(array.min(), array.max())
        )
        assert np.abs(np.cumsum(counts) - np.cumsum(histogram.bucket)).max() <= max(
            2, array.size / 200
        )
        before, change = values[f"parameters/{name}", 2].histo, values[f"changes/{name}", 4].histo
        np.testing.assert_allclose(change.sum, histogram.sum - before.sum, atol=1e-2, rtol=1e-2)
    assert any(values[f"changes/{name}", 2].histo.sum_squares > 0 for name in params)


def test_nothing_is_taken_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it was not asked for")

    monkeypatch.setattr(snapshots, "Snapshots", never)
    assert main(["train", *DIGITS, str(tmp_path / "run")]) == 0
    tags = {tag.partition("/")[0] for tag, _ in shown(tmp_path / "run" / "tensorboard")}
    assert tags == {"train", "eval", "perf"}


def test_the_sample_of_a_language_model_is_there_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("def value(self): return self._value  # as it was\n" * 400)
    with contextlib.chdir(tmp_path):
        assert main(["train", *TEXT.split(), "run", "--data.name", "text:text.txt"]) == 0
    text = (
        shown(tmp_path / "run" / "tensorboard")["sample/text_summary", 2]
        .tensor.string_val[0]
        .decode()
    )
    sample = (tmp_path / "run" / "sample.txt").read_text()
    assert text.splitlines() == [f"    {line}" for line in sample.splitlines()]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            [*TEXT.split(), "run", "--log.images", "4"],
            "log.images shows images, and the model, a decoder, reads tokens; leave it out",
        ),
        (
            [*DIGITS, "run", "--log.images", "17"],
            "log.images is 17, of one evaluation batch; write at most 16",
        ),
        ([*DIGITS, "run", "--log.images", "0"], "log.images is 0; write a number of at least 1"),
        (
            [*DIGITS, "run", "--log.histograms", "--log.no-tensorboard"],
            "log.histograms is written to TensorBoard; leave",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (main(["train", *words]), what in " ".join(capsys.readouterr().err.split())) == (2, True)
