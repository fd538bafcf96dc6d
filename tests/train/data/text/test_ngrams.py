"""Count models against a slow, plain implementation of the same formula, and against what must hold of probabilities."""

from __future__ import annotations

import collections
import math
from pathlib import Path

import numpy as np
import pytest

from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data.text import ngrams
from mupax.zoo import configs

pytestmark = pytest.mark.core

TRAIN = b"the cat sat on the mat; the rat sat on the cat. " * 3 + b"that is that"
EVAL = b"the bat sat on the hat, and that is \xffthat"


def plain(train: bytes, context: bytes, byte: int) -> float:
    """p(byte | context) by the formula in the module's docstring, one count at a time."""
    lower = plain(train, context[1:], byte) if context else 1 / 256
    after = collections.Counter(
        train[i + len(context)]
        for i in range(len(train) - len(context))
        if train[i:].startswith(context)
    )
    if not after:
        return lower
    return (after[byte] + len(after) * lower) / (after.total() + len(after))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equals_the_plain_formula(order: int) -> None:
    positions = np.array([0, 1, 2, 3, 5, 8, 13, 21, 30, len(EVAL) - 2, len(EVAL) - 1])
    losses = ngrams.nats_per_byte(
        np.frombuffer(TRAIN, np.uint8), np.frombuffer(EVAL, np.uint8), positions, order
    )
    assert len(losses) == order
    for position, loss in zip(positions, losses[-1], strict=True):
        context = EVAL[max(0, position - order + 1) : position]
        assert loss == pytest.approx(-math.log(plain(TRAIN, context, EVAL[position])), rel=1e-12)


def test_probabilities_sum_to_one() -> None:
    for context in (b"the", b"hat", b"zzz", b"\xff\xffa"):
        each = np.concatenate(
            [np.frombuffer(context + bytes([byte]), np.uint8) for byte in range(256)]
        )
        ends = np.arange(3, 4 * 256, 4)
        total = np.exp(
            -ngrams.nats_per_byte(np.frombuffer(TRAIN, np.uint8), each, ends, 4)[-1]
        ).sum()
        assert total == pytest.approx(1, abs=1e-12)


def test_only_the_targets_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path))
    train, text = np.frombuffer(TRAIN, np.uint8), np.frombuffer(EVAL, np.uint8)
    losses = ngrams.nats_per_byte(train, text, np.arange(len(text)), 4)
    targets = np.arange(len(text)) % 3 == 1
    references = {r.name: r.value for r in ngrams.references(train, text, targets, "digest")}
    assert references["uniform"] == pytest.approx(math.log(256))
    assert references["byte trigram"] == pytest.approx(losses[2][targets].mean())
    assert references["byte 4-gram"] == pytest.approx(losses[3][targets].mean())
    monkeypatch.setattr(ngrams, "_MOST_TARGETS", 5)
    fewer = {r.name: r.value for r in ngrams.references(train, text, targets, "other digest")}
    spread = np.flatnonzero(targets)[:: -(-targets.sum() // 5)]
    assert fewer["byte trigram"] == pytest.approx(losses[2][spread].mean())
    everything = {r.name: r.value for r in ngrams.references(train, text, targets | True, "digest")}
    assert everything["byte trigram"] != pytest.approx(references["byte trigram"])


def test_remembered_for_the_same_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path))
    train, text = np.frombuffer(TRAIN, np.uint8), np.frombuffer(EVAL, np.uint8)
    targets = np.ones(len(text), bool)
    first = ngrams.references(train, text, targets, "digest")
    monkeypatch.setattr(ngrams, "nats_per_byte", None)
    assert ngrams.references(train, text, targets, "digest") == first
    with pytest.raises(TypeError):
        ngrams.references(train, text, targets, "another")


def test_text_shorter_than_the_order() -> None:
    losses = ngrams.nats_per_byte(
        np.frombuffer(b"ab", np.uint8), np.frombuffer(b"a", np.uint8), np.array([0]), 4
    )
    assert len(losses) == 4
    assert all(loss.shape == (1,) for loss in losses)


def test_order_that_no_key_holds() -> None:
    with pytest.raises(ValueError, match="order 5"):
        ngrams.nats_per_byte(np.zeros(9, np.uint8), np.zeros(9, np.uint8), np.arange(9), 5)


def test_on_python_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More context helps on real text, and the sizes are what such text gives."""
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path))
    config = DataConfig(name="python_corpus", batch_size=2)
    dataset = data.load(config, configs.get("lm-tiny"), seed=0, note=lambda line: None)
    uniform, trigram, fourgram = dataset.references()
    assert uniform.value > trigram.value > fourgram.value
    assert (trigram.unit, fourgram.unit) == ("nats/byte", "nats/byte")
    assert 1.6 < trigram.value < 2.0
    assert 1.2 < fourgram.value < 1.6
