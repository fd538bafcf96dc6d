"""The digits: scikit-learn's own pixels, two splits, light augmentation that a batch's number decides."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data import images
from mupax.train.data.sources import digits
from mupax.zoo import configs
from mupax.zoo.configs import ViTConfig

pytestmark = pytest.mark.core

MODEL = configs.get("vit-tiny")
assert isinstance(MODEL, ViTConfig)
FORM = "0123456789012345678901234567890955650989841773510022782012633733466649150952820017632174631391768431405369617544728225795488490898"


ORIGINAL: Any = load_digits()


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPAX_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


def load(seed: int = 0, **fields) -> digits.DigitData:
    config = DataConfig(name="digits", batch_size=fields.pop("batch_size", 12), **fields)
    dataset = data.load(config, MODEL, seed=seed, note=lambda line: None)
    assert isinstance(dataset, digits.DigitData)
    return dataset


def test_a_folder_of_data_sets_has_any_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"[a]*%#?\\" + b"\xff")
    notes: list[str] = []
    config = DataConfig(name="digits", batch_size=12, data_dir=str(folder))
    for _ in range(2):
        dataset = data.load(config, MODEL, seed=0, note=notes.append)
    assert len([note for note in notes if note.startswith("preparing")]) == 1
    assert np.array_equal(pixels_of(dataset.train), pixels_of(load().train))
    assert os.listdir(tmp_path) == [folder.name]


def pixels_of(source: images.Images) -> np.ndarray:
    return np.array([source[i][0] for i in range(len(source))])


def labels_of(source: images.Images) -> np.ndarray:
    return np.array([source[i][1] for i in range(len(source))])


def test_pixels_and_labels_are_scikit_learns() -> None:
    train, test = train_test_split(
        np.arange(1797), test_size=0.2, stratify=ORIGINAL.target, random_state=0
    )
    dataset = load()
    for source, chosen in ((dataset.train, train), (dataset.eval, test)):
        chosen = np.sort(chosen)
        assert np.array_equal(pixels_of(source)[..., 0], ORIGINAL.images[chosen])
        assert np.array_equal(labels_of(source), ORIGINAL.target[chosen])
    assert (dataset.train_size, dataset.eval_size) == (1437, 360)


def test_random_split_is_stratified_and_always_alike() -> None:
    dataset = load()
    counts = (
        np.bincount(labels_of(dataset.eval)),
        np.bincount(labels_of(dataset.train)) + np.bincount(labels_of(dataset.eval)),
    )
    assert np.abs(counts[0] / counts[1] - 0.2).max() < 0.01
    assert load(seed=5).facts["digest"] == dataset.facts["digest"]
    assert load(split="writer").facts["digest"] != dataset.facts["digest"]


def test_split_by_writer_is_at_the_start_of_a_form() -> None:
    text = "".join(map(str, ORIGINAL.target))
    starts = [i for i in range(len(text)) if text[i:].startswith(FORM[:30])]
    assert digits.FIRST_TEST_FORM in starts
    assert (
        sum(text[i:].startswith(FORM) for i in starts) >= 6
    )  # every form has the same digits in the same order
    dataset = load(split="writer")
    assert (dataset.train_size, dataset.eval_size) == (1415, 382)
    assert np.array_equal(pixels_of(dataset.eval)[..., 0], ORIGINAL.images[1415:])


def test_other_digits_have_no_known_writers() -> None:
    assert digits.by_writer(ORIGINAL.target).sum() == 382
    with pytest.raises(data.DataError, match=r"in another order; use data\.split random"):
        digits.by_writer(ORIGINAL.target[::-1])


def test_batches_are_in_range_and_every_image_once_an_epoch() -> None:
    dataset = load(batch_size=479, augment=False)  # 1437 = 3 * 479
    batches = [dataset.train_batch(k) for k in range(3)]
    assert all(
        b["inputs"].dtype == np.float32 and b["inputs"].shape == (479, 8, 8, 1) for b in batches
    )
    pixels = np.concatenate([b["inputs"] for b in batches])
    assert (pixels.min(), pixels.max()) == (-1, 1)
    raw = np.round((pixels + 1) * 8).astype(np.uint8)
    assert sorted(x.tobytes() for x in raw) == sorted(x.tobytes() for x in pixels_of(dataset.train))


def test_evaluation_is_every_image_once_and_never_augmented() -> None:
    dataset = load(batch_size=7)
    batches = list(dataset.eval_batches())
    weights = np.concatenate([b["weights"] for b in batches])
    assert len(weights) == 364
    assert weights.sum() == 360
    inputs = np.concatenate([b["inputs"] for b in batches])[weights > 0]
    raw = np.round((inputs + 1) * 8).astype(np.uint8)
    assert sorted(x.tobytes() for x in raw) == sorted(x.tobytes() for x in pixels_of(dataset.eval))
    again = np.concatenate([b["inputs"] for b in dataset.eval_batches()])
    assert np.array_equal(again[weights > 0], inputs)
    assert load(batch_size=7, eval_examples=50).eval_size == 50
    # A fixed shuffled order: the first few are of every class.
    assert (
        len(set(np.concatenate([b["targets"] for b in load(eval_examples=50).eval_batches()])))
        == 10
    )


def test_augmentation_is_a_function_of_seed_batch_and_row() -> None:
    dataset, again, other = load(), load(), load(seed=1)
    for k in (0, 7, 200):
        whole = dataset.train_batch(k)
        assert np.array_equal(whole["inputs"], again.train_batch(k)["inputs"])
        assert not np.array_equal(whole["inputs"], other.train_batch(k)["inputs"])
        for processes in (2, 4):
            share = 12 // processes
            parts = [
                dataset.train_batch(k, slice(p * share, (p + 1) * share)) for p in range(processes)
            ]
            for name in whole:
                assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_augmentation_changes_images_lightly() -> None:
    plain, augmented = (
        load(augment=False, batch_size=200).train_batch(0),
        load(batch_size=200).train_batch(0),
    )
    assert np.array_equal(plain["targets"], augmented["targets"])
    changed = np.abs(plain["inputs"] - augmented["inputs"]).mean()
    shuffled = np.abs(plain["inputs"] - plain["inputs"][::-1]).mean()
    assert 0.02 < changed < 0.5 * shuffled


def test_jitter_without_jitter_changes_nothing() -> None:
    pictures = list(np.random.default_rng(0).integers(0, 17, (5, 7, 11, 1), dtype=np.uint8))
    out = images.jitter(pictures, np.full((5, images.NUMBERS), 0.5))
    assert np.allclose(out, np.stack(pictures), atol=1e-4)
    moved = images.jitter(pictures, np.concatenate([np.full((5, 2), 0.5), np.ones((5, 3))], axis=1))
    assert not np.allclose(moved, np.stack(pictures), atol=1)


def test_jitter_moves_turns_and_scales() -> None:
    """A spot right of the centre: where each number carries it."""
    image = np.zeros((21, 21, 1), np.uint8)
    image[10, 15] = 100

    def spot(
        angle: float = 0.5, scale: float = 0.5, down: float = 0.5, right: float = 0.5
    ) -> np.ndarray:
        out = images.jitter([image], np.array([[angle, scale, down, right, 0.5]]))[0, ..., 0]
        y, x = np.indices(out.shape)
        return np.array([(out * y).sum(), (out * x).sum()]) / out.sum()

    assert np.allclose(spot(), (10, 15), atol=1e-3)
    assert np.allclose(spot(down=1.0), (10 + 0.05 * 21, 15), atol=0.1)
    assert np.allclose(spot(right=0.0), (10, 15 - 0.05 * 21), atol=0.1)
    assert spot(scale=1.0)[1] == pytest.approx(10 + 5 * np.exp(0.06), abs=0.1)
    turned = spot(angle=1.0) - 10
    assert abs(np.degrees(np.arctan2(turned[0], turned[1]))) == pytest.approx(6, abs=1)


def test_logistic_regression_is_that_of_scikit_learn() -> None:
    pixels = ORIGINAL.data / 16
    model = LogisticRegression(C=10, max_iter=2000).fit(pixels[:150], ORIGINAL.target[:150])
    weights = images.fit_logistic(
        pixels[:150], ORIGINAL.target[:150], inverse_penalty=10, iterations=2000
    )
    assert np.abs(weights[:-1] - model.coef_.T).max() < 0.02
    assert np.array_equal(
        images.predict_logistic(weights, pixels[150:]), model.predict(pixels[150:])
    )
    weaker = images.fit_logistic(
        pixels[:150], ORIGINAL.target[:150], inverse_penalty=1, iterations=2000
    )
    assert np.abs(weaker[:-1] - model.coef_.T).max() > 0.1  # the control


def test_logistic_regression_beside_it() -> None:
    (random,) = load().references()
    (writer,) = load(split="writer").references()
    assert random.unit == "accuracy"
    assert 0.95 < random.value < 0.99
    assert 0.85 < writer.value < random.value  # new hands are harder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_size": 16},
            r"8 x 8 pixels with 1 channels, the model reads 16 x 16 with 1; write --model\.image-size 8",
        ),
        ({"channels": 3}, r"--model\.channels 1"),
        ({"num_classes": 7}, r"has 10 classes and the model 7; write --model\.num-classes 10"),
    ],
)
def test_model_must_fit(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=message):
        data.load(
            DataConfig(name="digits", batch_size=2), dataclasses.replace(MODEL, **changes), seed=0
        )


def test_digits_are_not_for_language_models() -> None:
    with pytest.raises(data.DataError, match="the model reads text; write a vision model"):
        data.load(DataConfig(name="digits", batch_size=2), configs.get("lm-tiny"), seed=0)
