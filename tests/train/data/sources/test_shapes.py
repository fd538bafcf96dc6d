"""The endless set: images as a function of (seed, index), no image twice, and whole batches from any parts."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from mupax.train import data
from mupax.train.config.recipes.laptop import vit_endless
from mupax.train.config.run import DataConfig
from mupax.train.data.sources import shapes
from mupax.zoo import configs
from mupax.zoo.configs import ModelConfig

pytestmark = pytest.mark.core

MODEL = vit_endless().model


def load(seed: int = 0, model: ModelConfig = MODEL, **fields) -> data.Data:
    config = DataConfig(name="shapes", batch_size=fields.pop("batch_size", 12), **fields)
    return data.load(config, model, seed=seed, note=lambda line: None)


def test_an_image_depends_on_seed_stream_and_index_alone() -> None:
    indices = np.array([5, 70, 3, 2**40 - 1, 64, 5])
    images, labels = shapes.render(0, shapes.TRAIN, indices)
    for i, index in enumerate(indices):  # alone, among others, in another place
        image, label = shapes.render(0, shapes.TRAIN, np.array([index]))
        assert np.array_equal(image[0], images[i])
        assert label[0] == labels[i]
    for other in (shapes.render(1, shapes.TRAIN, indices), shapes.render(0, shapes.EVAL, indices)):
        assert not any(np.array_equal(a, b) for a, b in zip(images, other[0], strict=True))
    assert images.shape == (6, 32, 32, 3)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int32


def test_no_image_comes_twice() -> None:
    indices = np.r_[0:4000, 2**32 : 2**32 + 500, 10**9 : 10**9 + 500]
    images, _ = shapes.render(0, shapes.TRAIN, indices)
    assert len({image.tobytes() for image in images}) == len(indices)
    far = load(batch_size=8).train_batch(10**9)
    assert not any(
        np.array_equal(a, b)
        for a in far["inputs"]
        for b in load(batch_size=8).train_batch(0)["inputs"]
    )


def test_classes_are_balanced() -> None:
    """The chi-square of 10 classes is below 30 in all but 4 of 10,000 draws."""
    _, labels = shapes.render(3, shapes.TRAIN, np.arange(3000))
    counts = np.bincount(labels, minlength=10)
    assert len(counts) == 10
    assert ((counts - 300) ** 2 / 300).sum() < 30


def test_a_class_is_seen_in_its_image() -> None:
    """Level stripes vary down the image, upright ones across it; and shapes cover equal areas, whatever their kind."""
    images, labels = shapes.render(0, shapes.TRAIN, np.arange(2000))
    grey = images.astype(np.float32).mean(-1)[:, 8:24, 8:24]
    down, across = ((np.diff(grey, axis=axis) ** 2).mean((1, 2)) for axis in (1, 2))
    upright = labels % 2 == 1
    assert shapes.CLASSES[1].endswith("upright")
    assert (across > down)[upright].mean() > 0.75
    assert (across > down)[~upright].mean() < 0.25
    line = (np.arange(400, dtype=np.float32) + 0.5) / 200 - 1
    v, u = np.meshgrid(line, line)
    for distance in (shapes._disc, shapes._square, shapes._triangle, shapes._ring, shapes._cross):
        assert 4 * (distance(u, v) < 0).mean() == pytest.approx(1, rel=0.01)


def test_no_pixel_is_brighter_in_one_class() -> None:
    """What a linear model could use: class means of pixels, in standard errors. A shift of an eighth would be seen."""
    images, labels = shapes.render(0, shapes.TRAIN, np.arange(3000))
    pixels = images.reshape(len(images), -1).astype(np.float32)

    def farthest(pixels: np.ndarray) -> float:
        means = np.stack([pixels[labels == c].mean(0) for c in range(10)])
        return float(np.abs((means - pixels.mean(0)) / (pixels.std(0) / np.sqrt(300))).max())

    assert farthest(pixels) < 6
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
        with contextlib.closing(dataset.train_batches(3, *parts)) as batches:
            joined = next(batches)
        for name in batch:
            assert np.array_equal(joined[name], batch[name][order])


def test_a_run_goes_on_at_any_batch_on_any_number_of_hosts() -> None:
    whole = load().train_batches(0)
    expected = [next(whole) for _ in range(5)][4]
    whole.close()
    halves = [load().train_batches(4, rows) for rows in (slice(0, 6), slice(6, 12))]
    parts = [next(half) for half in halves]
    for half in halves:
        half.close()
    assert np.array_equal(np.concatenate([s["inputs"] for s in parts]), expected["inputs"])


def test_evaluation_images_are_the_same_for_every_seed_and_counted_once() -> None:
    first, second = (load(seed=seed, eval_examples=17, eval_batch_size=6) for seed in (0, 1))
    batches = [list(dataset.eval_batches()) for dataset in (first, second)]
    assert [len(epoch) for epoch in batches] == [3, 3]
    assert first.eval_size == 17
    for a, b in zip(*batches, strict=True):
        assert np.array_equal(a["inputs"], b["inputs"])
    assert sum(b["weights"].sum() for b in batches[0]) == 17
    assert first.facts["digest"] == second.facts["digest"]
    assert first.class_names == shapes.CLASSES


def test_a_model_that_does_not_fit_is_refused() -> None:
    for change, message in (
        (
            {"image_size": 16},
            r"32 x 32 pixels with 3 channels.*--model\.image-size 32 --model\.channels 3",
        ),
        ({"channels": 1}, r"write --model\.image-size 32 --model\.channels 3"),
        ({"num_classes": 7}, r"write --model\.num-classes 10"),
    ):
        with pytest.raises(data.DataError, match=message):
            load(model=dataclasses.replace(MODEL, **change))
    with pytest.raises(data.DataError, match="the model reads text"):
        load(model=configs.get("lm-tiny"))


def test_the_linear_model_is_fitted_to_training_images(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path))
    monkeypatch.setattr(shapes, "LINEAR_IMAGES", 200)
    (reference,) = load(eval_examples=50).references()
    assert reference.unit == "accuracy"
    assert 0 <= reference.value < 0.4
