"""The endless set: images as a function of (seed, index), and batches from any parts."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

from mupax.train.config.recipes import vit_endless
from mupax.train.data.sources import shapes
from mupax.zoo import configs
from tests.train.data import loading
from tests.train.data.loading import assert_batches_equal, joined

pytestmark = pytest.mark.core

MODEL = vit_endless().model


def load(model: Any = MODEL, **fields: Any) -> Any:
    return loading.load("shapes", model, **{"batch_size": 12, **fields})


@pytest.fixture(scope="module")
def rendered() -> tuple[np.ndarray, np.ndarray]:
    """The first 3000 training images and their labels."""
    return shapes.render(0, shapes.TRAIN, np.arange(3000))


def test_an_image_depends_on_seed_stream_and_index_alone() -> None:
    indices = np.array([5, 70, 3, 2**40 - 1, 64, 5])
    images, labels = shapes.render(0, shapes.TRAIN, indices)
    for i, index in enumerate(indices):  # alone, among others, in another place
        image, label = shapes.render(0, shapes.TRAIN, np.array([index]))
        assert np.array_equal(image[0], images[i])
        assert label[0] == labels[i]
    for seed, stream in ((1, shapes.TRAIN), (0, shapes.EVAL)):
        other_images, _ = shapes.render(seed, stream, indices)
        assert (other_images != images).any(axis=(1, 2, 3)).all()
    assert images.shape == (6, 32, 32, 3)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int32


def test_no_image_comes_twice(rendered: tuple[np.ndarray, np.ndarray]) -> None:
    # Indices that no 32-bit number tells from the first ones, and those of a long run.
    far, _ = shapes.render(0, shapes.TRAIN, np.r_[2**32 : 2**32 + 500, 10**9 : 10**9 + 500])
    assert len({image.tobytes() for image in (*rendered[0], *far)}) == 4000
    source = load(batch_size=8)
    images = joined([source.train_batch(0), source.train_batch(10**9)])["inputs"]
    assert len({image.tobytes() for image in images}) == 16


def test_classes_are_balanced(rendered: tuple[np.ndarray, np.ndarray]) -> None:
    """The chi-square of 10 classes is below 30 in all but 4 of 10,000 draws."""
    counts = np.bincount(rendered[1], minlength=10)
    assert len(counts) == 10
    assert ((counts - 300) ** 2 / 300).sum() < 30


def test_a_class_is_seen_in_its_image(rendered: tuple[np.ndarray, np.ndarray]) -> None:
    """Level stripes vary down the image, upright ones across it."""
    images, labels = rendered
    grey = images.astype(np.float32).mean(-1)[:, 8:24, 8:24]
    down = (np.diff(grey, axis=1) ** 2).mean((1, 2))
    across = (np.diff(grey, axis=2) ** 2).mean((1, 2))
    upright = labels % 2 == 1
    assert shapes.CLASSES[1].endswith("upright")
    assert (across > down)[upright].mean() > 0.75
    assert (across > down)[~upright].mean() < 0.25


def test_shapes_cover_equal_areas() -> None:
    line = (np.arange(400, dtype=np.float32) + 0.5) / 200 - 1
    v, u = np.meshgrid(line, line)
    for distance in (shapes._disc, shapes._square, shapes._triangle, shapes._ring, shapes._cross):
        assert 4 * (distance(u, v) < 0).mean() == pytest.approx(1, rel=0.01)


def test_no_pixel_is_brighter_in_one_class(rendered: tuple[np.ndarray, np.ndarray]) -> None:
    """Compare class means of pixels, in standard errors, which a linear model could use."""
    images, labels = rendered
    pixels = images.reshape(len(images), -1).astype(np.float32)

    def farthest(pixels: np.ndarray) -> float:
        means = np.stack([pixels[labels == c].mean(0) for c in range(10)])
        return float(np.abs((means - pixels.mean(0)) / (pixels.std(0) / np.sqrt(300))).max())

    assert farthest(pixels) < 6
    # The control: a shift of an eighth would be seen.
    assert farthest(pixels + 16 * (labels == 4)[:, None]) > 6


def test_batches_are_the_images_in_turn_and_rows_of_them_their_parts() -> None:
    dataset = load(seed=7)
    batch = dataset.train_batch(3)
    images, labels = shapes.render(7, shapes.TRAIN, np.arange(36, 48))
    assert np.array_equal(np.round((batch["inputs"] + 1) * 127.5), images)
    assert np.array_equal(batch["targets"], labels)
    assert batch["inputs"].dtype == np.float32
    assert batch["targets"].dtype == np.int32
    for parts in (
        (slice(0, 5), slice(5, 12)),
        (slice(0, 12, 2), slice(1, 12, 2)),
        (slice(8, 12), slice(0, 8)),
    ):
        order = np.concatenate([np.arange(12)[rows] for rows in parts])
        expected = {name: array[order] for name, array in batch.items()}
        with contextlib.closing(dataset.train_batches(3, *parts)) as batches:
            assert_batches_equal(next(batches), expected)


def test_evaluation_images_are_the_same_for_every_seed_and_counted_once() -> None:
    first, second = (load(seed=seed, eval_examples=17, eval_batch_size=6) for seed in (0, 1))
    batches = list(first.eval_batches())
    assert len(batches) == 3
    assert first.eval_size == 17
    assert joined(batches)["weights"].sum() == 17
    assert_batches_equal(joined([*second.eval_batches()]), joined(batches))
    assert first.facts["digest"] == second.facts["digest"]
    assert first.class_names == shapes.CLASSES


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            dataclasses.replace(MODEL, image_size=16),
            r"32 x 32 pixels with 3 channels.*--model\.image-size 32 --model\.channels 3",
        ),
        (
            dataclasses.replace(MODEL, channels=1),
            r"write --model\.image-size 32 --model\.channels 3",
        ),
        (dataclasses.replace(MODEL, num_classes=7), r"write --model\.num-classes 10"),
        (configs.get("lm-tiny"), "the model reads text"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(model: Any, message: str) -> None:
    loading.assert_refused(message, "shapes", model)


@pytest.mark.usefixtures("cache_folder")
def test_the_linear_model_is_fitted_to_training_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "LINEAR_IMAGES", 200)
    (reference,) = load(eval_examples=50).references()
    assert reference.unit == "accuracy"
    assert 0 <= reference.value < 0.4
