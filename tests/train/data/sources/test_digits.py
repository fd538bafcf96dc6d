"""The digits: scikit-learn's own pixels, two splits, and light augmentation."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from mupax.train.data import DataError, images
from mupax.train.data.sources import digits
from mupax.zoo import configs
from mupax.zoo.configs import ViTConfig
from tests.train.data import loading
from tests.train.data.loading import assert_batches_equal, joined

pytestmark = pytest.mark.core

MODEL = configs.get("vit-tiny")
assert isinstance(MODEL, ViTConfig)
FORM = (
    "0123456789012345678901234567890955650989841773510022782012633733466649150952820017632174"
    "631391768431405369617544728225795488490898"
)
ORIGINAL: Any = load_digits()


@pytest.fixture(scope="module", autouse=True)
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPAX_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


@functools.cache
def load(batch_size: int = 12, **fields: Any) -> Any:
    return loading.load("digits", MODEL, batch_size=batch_size, **fields)


def pixels_of(source: images.Images) -> np.ndarray:
    return np.array([source[i][0] for i in range(len(source))])


def labels_of(source: images.Images) -> np.ndarray:
    return np.array([source[i][1] for i in range(len(source))])


def sorted_images(inputs: np.ndarray) -> list[bytes]:
    """Return the bytes of each image of a batch, as they were before they were scaled."""
    return sorted(image.tobytes() for image in np.round((inputs + 1) * 8).astype(np.uint8))


def test_a_folder_of_data_sets_has_any_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"[a]*%#?\\" + b"\xff")
    counts = []
    for _ in range(2):
        dataset, notes = loading.load_with_notes("digits", MODEL, data_dir=str(folder))
        counts.append(len([note for note in notes if note.startswith("preparing")]))
    assert counts == [1, 0]
    assert np.array_equal(pixels_of(dataset.train), pixels_of(load().train))
    assert os.listdir(tmp_path) == [folder.name]


def test_pixels_and_labels_are_scikit_learns() -> None:
    chosen = train_test_split(
        np.arange(1797), test_size=0.2, stratify=ORIGINAL.target, random_state=0
    )
    dataset = load()
    for source, places in zip((dataset.train, dataset.eval), map(np.sort, chosen), strict=True):
        assert np.array_equal(pixels_of(source)[..., 0], ORIGINAL.images[places])
        assert np.array_equal(labels_of(source), ORIGINAL.target[places])
    assert (dataset.train_size, dataset.eval_size) == (1437, 360)


def test_random_split_is_stratified_and_always_alike() -> None:
    dataset = load()
    held_out = np.bincount(labels_of(dataset.eval))
    counts = np.bincount(labels_of(dataset.train)) + held_out
    assert np.abs(held_out / counts - 0.2).max() < 0.01
    assert load(seed=5).facts["digest"] == dataset.facts["digest"]
    assert load(split="writer").facts["digest"] != dataset.facts["digest"]


def test_split_by_writer_is_at_the_start_of_a_form() -> None:
    text = "".join(map(str, ORIGINAL.target))
    starts = [i for i in range(len(text)) if text.startswith(FORM[:30], i)]
    assert digits.FIRST_TEST_FORM in starts
    # Every form has the same digits in the same order.
    assert sum(text.startswith(FORM, i) for i in starts) >= 6
    dataset = load(split="writer")
    assert (dataset.train_size, dataset.eval_size) == (1415, 382)
    assert np.array_equal(pixels_of(dataset.eval)[..., 0], ORIGINAL.images[1415:])


def test_other_digits_have_no_known_writers() -> None:
    assert digits.by_writer(ORIGINAL.target).sum() == 382
    with pytest.raises(DataError, match=r"in another order; use data\.split random"):
        digits.by_writer(ORIGINAL.target[::-1])


def test_batches_are_in_range_and_every_image_once_an_epoch() -> None:
    dataset = load(batch_size=479, augment=False)  # 1437 = 3 * 479
    inputs = joined([dataset.train_batch(k) for k in range(3)])["inputs"]
    assert inputs.dtype == np.float32
    assert inputs.shape == (1437, 8, 8, 1)
    assert (inputs.min(), inputs.max()) == (-1, 1)
    assert sorted_images(inputs) == sorted(x.tobytes() for x in pixels_of(dataset.train))


def test_evaluation_is_every_image_once_and_never_augmented() -> None:
    dataset = load(batch_size=7)
    epoch = joined([*dataset.eval_batches()])
    counted = epoch["weights"] > 0
    assert len(counted) == 364
    assert epoch["weights"].sum() == 360
    inputs = epoch["inputs"][counted]
    assert sorted_images(inputs) == sorted(x.tobytes() for x in pixels_of(dataset.eval))
    assert_batches_equal(joined([*dataset.eval_batches()]), epoch)
    some = load(eval_examples=50)
    assert some.eval_size == 50
    # A fixed shuffled order: the first few are of every class.
    assert len(set(joined([*some.eval_batches()])["targets"])) == 10


def test_augmentation_changes_images_lightly() -> None:
    plain = load(augment=False, batch_size=200).train_batch(0)
    augmented = load(batch_size=200).train_batch(0)
    assert np.array_equal(plain["targets"], augmented["targets"])
    changed = np.abs(plain["inputs"] - augmented["inputs"]).mean()
    shuffled = np.abs(plain["inputs"] - plain["inputs"][::-1]).mean()
    assert 0.02 < changed < 0.5 * shuffled


def test_jitter_without_jitter_changes_nothing() -> None:
    pictures = np.random.default_rng(0).integers(0, 17, (5, 7, 11, 1), dtype=np.uint8)
    uniforms = np.full((5, images.NUMBERS), 0.5)
    assert np.allclose(images.jitter([*pictures], uniforms), pictures, atol=1e-4)
    uniforms[:, 2:] = 1
    assert not np.allclose(images.jitter([*pictures], uniforms), pictures, atol=1)


def test_jitter_moves_turns_and_scales() -> None:
    """Follow a spot right of the centre to where each number carries it."""
    image = np.zeros((21, 21, 1), np.uint8)
    image[10, 15] = 100

    def spot(
        angle: float = 0.5, scale: float = 0.5, down: float = 0.5, right: float = 0.5
    ) -> np.ndarray:
        view = images.jitter([image], np.array([[angle, scale, down, right, 0.5]]))[0, ..., 0]
        places = np.indices(view.shape)
        return (view * places).sum((1, 2)) / view.sum()

    assert np.allclose(spot(), (10, 15), atol=1e-3)
    assert np.allclose(spot(down=1.0), (10 + 0.05 * 21, 15), atol=0.1)
    assert np.allclose(spot(right=0.0), (10, 15 - 0.05 * 21), atol=0.1)
    assert spot(scale=1.0)[1] == pytest.approx(10 + 5 * np.exp(0.06), abs=0.1)
    turned = spot(angle=1.0) - 10
    assert abs(np.degrees(np.arctan2(*turned))) == pytest.approx(6, abs=1)


def test_logistic_regression_is_that_of_scikit_learn() -> None:
    pixels = ORIGINAL.data / 16
    labels = ORIGINAL.target[:150]
    model = LogisticRegression(C=10, max_iter=2000).fit(pixels[:150], labels)

    def fit(inverse_penalty: float) -> np.ndarray:
        fields = {"inverse_penalty": inverse_penalty, "iterations": 2000}
        return images.fit_logistic(pixels[:150], labels, **fields)

    weights = fit(10)
    assert np.abs(weights[:-1] - model.coef_.T).max() < 0.02
    predictions = images.predict_logistic(weights, pixels[150:])
    assert np.array_equal(predictions, model.predict(pixels[150:]))
    assert np.abs(fit(1)[:-1] - model.coef_.T).max() > 0.1  # the control


def test_accuracy_of_logistic_regression() -> None:
    (random,) = load().references()
    (writer,) = load(split="writer").references()
    assert random.unit == "accuracy"
    assert 0.95 < random.value < 0.99
    assert 0.85 < writer.value < random.value  # new hands are harder


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            dataclasses.replace(MODEL, image_size=16),
            "8 x 8 pixels with 1 channels, the model reads 16 x 16 with 1; "
            r"write --model\.image-size 8",
        ),
        (dataclasses.replace(MODEL, channels=3), r"--model\.channels 1"),
        (
            dataclasses.replace(MODEL, num_classes=7),
            r"has 10 classes and the model 7; write --model\.num-classes 10",
        ),
        (configs.get("lm-tiny"), "the model reads text; write a vision model"),
    ],
)
def test_model_must_fit(model: Any, message: str) -> None:
    loading.assert_refused(message, "digits", model)
