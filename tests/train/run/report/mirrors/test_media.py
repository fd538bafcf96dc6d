"""Images and histograms in TensorBoard, read back from the event files of runs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from PIL import Image

from mupax.train.checkpoints import saved_run
from mupax.train.config import cli
from mupax.train.core import step as core_step
from mupax.train.core.program import assemble
from mupax.train.data import load
from mupax.train.run.report import metrics
from mupax.train.run.report.mirrors import snapshots
from tests.fixtures.commands import refusal, succeeded
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs

__all__ = ["one_device", "shared_programs"]  # fixtures

SHOWN = 16
DIGITS = (
    "vit-digits --model.depth 1 --model.width 16 --model.num-heads 2 --steps 4 "
    f"--optimizer.warmup-steps 1 --data.batch-size 16 --data.eval-examples {SHOWN} "
    f"--data.eval-batch-size {SHOWN} --log.eval-every-steps 2 --log.no-samples"
)


def records(folder: Path) -> Iterator[Any]:
    """Yield the events of all event files, oldest first."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            # TFRecord: length (8 bytes), its checksum (4), the event, its checksum (4).
            length = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def shown(folder: Path) -> dict[tuple[str, int], Any]:
    """Values of the summaries by tag and step."""
    values = {}
    for event in records(folder):
        values |= {(value.tag, event.step): value for value in event.summary.value}
    return values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, one_device: None) -> Path:
    """A run with both, none of whose programs is traced twice."""
    folder = tmp_path_factory.mktemp("media") / "run"
    builds: list[Any] = []
    make = core_step.make_train_step

    def traced_once(*arguments: Any, **options: Any) -> Any:
        builds.append(chex.assert_max_traces(make(*arguments, **options), n=1))
        return builds[-1]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_predicted", "_spread"):
            once = chex.assert_max_traces(getattr(snapshots, name), n=1)
            patch.setattr(snapshots, name, once)
        patch.setattr(core_step, "make_train_step", traced_once)
        words = f"--workdir {folder} --log.images {SHOWN} --log.histograms"
        succeeded("train", DIGITS, words)
    assert len(builds) == 1
    return folder


def test_images_have_their_labels_and_predictions(run: Path) -> None:
    values = shown(run / "tensorboard")
    recipe, *words = DIGITS.split()
    config = cli.parse(recipe, cli.recipe(recipe), words).config
    batch = load(config.data, config.model, seed=config.data_seed).eval_batch(0)
    rows = [row for row in metrics.read(run / "metrics.jsonl") if "eval_loss" in row]
    accuracy = {row["step"]: row["eval_accuracy"] for row in rows}
    assert sorted(accuracy) == [2, 4]
    for step in accuracy:
        text = values["examples/labels/text_summary", step].tensor.string_val[0].decode()
        lines = text.splitlines()[2:]
        cells = [line.removesuffix(" |").split(" | ") for line in lines]
        labels = [cell[1] for cell in cells]
        assert labels == [str(label) for label in batch["targets"]]
        right = sum(cell[1] == cell[2] for cell in cells)
        wrong = sum("(wrong)" in line for line in lines)
        assert right == SHOWN - wrong == round(accuracy[step] * SHOWN)
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
    for name, param in params.items():
        array = np.asarray(param, np.float64)
        histogram = values[f"parameters/{name}", 4].histo
        assert histogram.num == array.size
        assert sum(histogram.bucket) == array.size
        bounds = (array.min(), array.max())
        np.testing.assert_allclose([histogram.min, histogram.max], bounds, rtol=1e-6)
        np.testing.assert_allclose(histogram.sum_squares, (array**2).sum(), rtol=1e-4)
        counts, _ = np.histogram(array, bins=len(histogram.bucket), range=bounds)
        difference = np.abs(np.cumsum(counts) - np.cumsum(histogram.bucket)).max()
        assert difference <= max(2, array.size / 200)
        before = values[f"parameters/{name}", 2].histo
        change = values[f"changes/{name}", 4].histo
        growth = histogram.sum - before.sum
        np.testing.assert_allclose(change.sum, growth, atol=1e-2, rtol=1e-2)
    assert any(values[f"changes/{name}", 2].histo.sum_squares > 0 for name in params)


def test_nothing_is_taken_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it was not asked for")

    monkeypatch.setattr(snapshots, "Snapshots", never)
    succeeded(f"train {DIGITS} --workdir {tmp_path}/run")
    tags = {tag.partition("/")[0] for tag, _ in shown(tmp_path / "run" / "tensorboard")}
    assert tags == {"train", "eval", "perf"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "lm-tiny --data.name text:text.txt --log.images 4",
            "log.images shows images, and the model, a decoder, reads tokens; leave it out",
        ),
        (
            f"{DIGITS} --log.images 17",
            "log.images is 17, of one evaluation batch; write at most 16",
        ),
        (f"{DIGITS} --log.images 0", "log.images is 0; write a number of at least 1"),
        (
            f"{DIGITS} --log.histograms --log.no-tensorboard",
            "log.histograms is written to TensorBoard; leave",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(words: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(f"train {words} --workdir {tmp_path}/run")
