"""Mixup, cutmix, smooth labels and repeats: their formulas, any rows of a batch, and what is refused before work."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mupax.train.config.data import TransformsConfig
from mupax.train.config.recipes import lm_tiny, vit_endless
from mupax.train.data.images import Mix, drawn, soft_labels
from mupax.zoo.configs import ConfigError
from tests.fixtures.commands import refusal
from tests.train.data import loading

pytestmark = pytest.mark.core

B = 12


def load(seed: int = 0, **transforms: Any) -> Any:
    """Load the endless images, which take no file."""
    fields = {"batch_size": B, "eval_batch_size": 4, "eval_examples": 4}
    config = TransformsConfig(**transforms)
    return loading.load("shapes", vit_endless().model, seed=seed, transforms=config, **fields)


def test_mixup_is_a_share_of_each_image_and_the_one_before() -> None:
    plain, mixed = load().train_batch(3), load(mixup=0.4).train_batch(3)
    classes = np.eye(10)[plain["targets"]]
    shares = mixed["labels"][np.arange(B), plain["targets"]]
    share = shares[plain["targets"] != np.roll(plain["targets"], 1)].max()
    assert 0.5 < share < 1
    np.testing.assert_allclose(
        mixed["labels"], share * classes + (1 - share) * np.roll(classes, 1, 0), atol=1e-6
    )
    want = share * plain["inputs"] + (1 - share) * np.roll(plain["inputs"], 1, 0)
    np.testing.assert_allclose(mixed["inputs"], want, atol=1e-5)
    np.testing.assert_array_equal(mixed["targets"], plain["targets"])


def test_images_are_mixed_within_their_group() -> None:
    """big_vision rolls the images of each device: here groups of 4, whose first is mixed with their last."""
    plain, mixed = load().train_batch(3), load(mixup=0.4, mix_group=4).train_batch(3)
    before = np.roll(plain["inputs"].reshape(B // 4, 4, -1), 1, axis=1).reshape(
        plain["inputs"].shape
    )
    spread = np.abs(before - plain["inputs"]) > 1
    share = 1 - np.median(
        (mixed["inputs"] - plain["inputs"])[spread] / (before - plain["inputs"])[spread]
    )
    assert 0.5 < share < 1
    np.testing.assert_allclose(
        mixed["inputs"], share * plain["inputs"] + (1 - share) * before, atol=1e-4
    )
    whole = load(mixup=0.4).train_batch(3)["inputs"]
    same = [np.array_equal(*rows) for rows in zip(mixed["inputs"], whole, strict=True)]
    assert same == [
        i % 4 != 0 for i in range(B)
    ]  # the control: of a whole batch the first of a group has another
    part = load(mixup=0.4, mix_group=4).train_batch(3, slice(3, 9))["inputs"]
    np.testing.assert_array_equal(part, mixed["inputs"][3:9])


def test_cutmix_is_a_box_of_the_image_before_and_its_area_the_label() -> None:
    plain, mixed = load().train_batch(2), load(cutmix=1.0).train_batch(2)
    other = (mixed["inputs"] == np.roll(plain["inputs"], 1, 0)).all(axis=(0, 3))
    own = (mixed["inputs"] == plain["inputs"]).all(axis=(0, 3))
    assert (own ^ other).all()
    rows, columns = np.flatnonzero(other.any(1)), np.flatnonzero(other.any(0))
    assert other[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    classes = np.eye(10)[plain["targets"]]
    want = own.mean() * classes + other.mean() * np.roll(classes, 1, 0)
    np.testing.assert_allclose(mixed["labels"], want, atol=1e-6)


def test_shares_are_of_the_beta_distribution() -> None:
    """Its mean deviation from a half, E|2l - 1|: exactly 1/2 for Beta(1, 1); for mixup that of max(l, 1 - l)."""
    rng = np.random.default_rng(0)
    shares = np.array([drawn(TransformsConfig(mixup=1.0), rng, 8, 8).share for _ in range(4000)])
    assert shares.min() >= 0.5
    assert shares.mean() == pytest.approx(0.75, abs=0.01)  # the standard error is 0.0023
    sharp = np.array([drawn(TransformsConfig(mixup=0.2), rng, 8, 8).share for _ in range(4000)])
    # E max(l, 1 - l) = 1/2 + 2^(-2a) / (a B(a, a)) = 0.8987 at a = 0.2
    assert sharp.mean() == pytest.approx(0.8987, abs=0.012)
    mixups = [
        drawn(TransformsConfig(mixup=0.2, cutmix=1.0), rng, 8, 8).box is None for _ in range(1000)
    ]
    assert 440 < sum(mixups) < 560


def test_a_smooth_label_has_its_share_on_all_classes() -> None:
    labels = soft_labels(np.array([2, 0], np.int32), 4, 0.2)
    np.testing.assert_allclose(
        labels, [[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]], atol=1e-7
    )
    np.testing.assert_array_equal(
        load(label_smoothing=0.2).train_batch(0)["inputs"], load().train_batch(0)["inputs"]
    )
    half = Mix(0.5).label(labels[:1], labels[1:])
    assert half.sum() == pytest.approx(1)


def test_a_batch_shows_each_of_its_images_so_often() -> None:
    plain, repeated = load(), load(repeats=3, randaug_layers=1)
    first = [load(repeats=3).train_batch(k)["inputs"] for k in range(3)]
    for batch in first:
        np.testing.assert_array_equal(batch[:4], batch[4:8])
        np.testing.assert_array_equal(batch[:4], batch[8:])
    np.testing.assert_array_equal(
        np.concatenate([batch[:4] for batch in first]), plain.train_batch(0)["inputs"]
    )
    varied = repeated.train_batch(0)["inputs"]
    assert not np.array_equal(varied[:4], varied[4:8])


def test_any_rows_of_a_batch_are_those_of_the_whole_and_another_batch_or_seed_has_others() -> None:
    everything = {
        "randaug_layers": 2,
        "mixup": 0.3,
        "cutmix": 1.0,
        "label_smoothing": 0.1,
        "repeats": 2,
    }
    source = load(**everything)
    for k in (0, 5):
        whole = source.train_batch(k)
        for rows in (slice(0, 3), slice(3, 12), slice(7, 8)):
            part = load(**everything).train_batch(k, rows)
            for name, array in part.items():
                np.testing.assert_array_equal(array, whole[name][rows], err_msg=name)
    for other in (source.train_batch(6), load(seed=1, **everything).train_batch(5)):
        assert not np.array_equal(other["inputs"], source.train_batch(5)["inputs"])
    evaluated = [load(**fields).eval_batch(0) for fields in ({}, everything)]
    assert evaluated[0].keys() == evaluated[1].keys()
    np.testing.assert_array_equal(evaluated[0]["inputs"], evaluated[1]["inputs"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vit-digits --data.transforms.mixup -0.1", "data.transforms.mixup is -0.1; write a number of at least 0"),
        ("vit-digits --data.transforms.repeats 7", "data.batch_size 64 is not divisible by data.transforms.repeats 7; write repeats 4"),
        ("vit-digits --data.transforms.label-smoothing 1", "write a share in [0, 1)"),
        ("vit-digits --data.transforms.mixup 0.2 --data.transforms.mix-group 9", "divisible by data.transforms.mix_group 9; write mix_group 8"),
        ("vit-digits --data.transforms.mix-group 8", "add --data.transforms.mixup 0.2, or leave data.transforms.mix_group out"),
        ("vit-digits --data.train-percent 50", "--data.train-percent is not read with the data digits; leave it out"),
        ("vit-s16-imagenet --data.train-percent 0", "data.train_percent is 0; write a whole number from 1 to 100"),
        ("vit-digits --optimizer.warmup-steps 0 --optimizer.warmup-from-zero", "not read by a run without warm-up"),
        ("vit-digits --data.transforms.randaug-layers 0", "data.transforms.randaug_layers is 0; write a number of at least 1"),
        ("vit-digits --data.transforms.randaug-magnitude 11", "write a number from 0 to 10"),
        ("vit-digits --model.drop-path 1.0", "model.drop_path is 1.0; write a number in [0, 1), such as 0.1"),
        ("vit-digits --optimizer.layer-decay 0", "optimizer.layer_decay is 0.0; write a number in (0, 1]"),
        ("vit-digits --data.transforms.mixup 0.2 --model.compute.cross-entropy chunked", "write auto or plain"),
        ("lm-tiny --data.transforms.mixup 0.2", "data.transforms is for images"),
        ("ed-tiny --optimizer.layer-decay 0.8", "an encoder-decoder has two; leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_before_work(words: str, message: str) -> None:
    assert message in refusal("train", words)


def test_a_python_config_of_text_is_refused_too() -> None:
    run = lm_tiny()
    text = dataclasses.replace(run.data, transforms=TransformsConfig(mixup=0.1))
    with pytest.raises(ConfigError, match=r"data\.transforms is for images"):
        dataclasses.replace(run, data=text)
