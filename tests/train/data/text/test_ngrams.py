"""Count models against a plain implementation of the same formula, and rules of probabilities."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest

from mupax.train.data.text import ngrams
from mupax.zoo import configs
from tests.train.data import loading

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("cache_folder")]

TRAIN = b"the cat sat on the mat; the rat sat on the cat. " * 3 + b"that is that"
EVAL = b"the bat sat on the hat, and that is \xffthat"


def array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def losses(positions: Any, order: int = 4, train: bytes = TRAIN, text: bytes = EVAL) -> Any:
    return ngrams.nats_per_byte(array(train), array(text), np.asarray(positions), order)


def references(targets: np.ndarray, digest: str = "digest") -> dict[str, float]:
    computed = ngrams.references(array(TRAIN), array(EVAL), targets, digest)
    return {reference.name: reference.value for reference in computed}


def plain(train: bytes, context: bytes, byte: int) -> float:
    """Return p(byte | context) by the formula in the module's docstring, one count at a time."""
    lower = plain(train, context[1:], byte) if context else 1 / 256
    after: collections.Counter[int] = collections.Counter()
    for i in range(len(train) - len(context)):
        if train.startswith(context, i):
            after[train[i + len(context)]] += 1
    if not after:
        return lower
    return (after[byte] + len(after) * lower) / (after.total() + len(after))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equals_the_plain_formula(order: int) -> None:
    positions = [0, 1, 2, 3, 5, 8, 13, 21, 30, len(EVAL) - 2, len(EVAL) - 1]
    by_order = losses(positions, order)
    assert len(by_order) == order
    for position, loss in zip(positions, by_order[-1], strict=True):
        context = EVAL[max(0, position - order + 1) : position]
        assert loss == pytest.approx(-math.log(plain(TRAIN, context, EVAL[position])), rel=1e-12)


@pytest.mark.parametrize("context", [b"the", b"hat", b"zzz", b"\xff\xffa"])
def test_probabilities_sum_to_one(context: bytes) -> None:
    text = b"".join(context + bytes([byte]) for byte in range(256))
    probabilities = np.exp(-losses(range(3, 4 * 256, 4), text=text)[-1])
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)


def test_only_the_targets_count(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, trigram, fourgram = losses(range(len(EVAL)))
    targets = np.arange(len(EVAL)) % 3 == 1
    values = references(targets)
    assert values["uniform"] == pytest.approx(math.log(256))
    assert values["byte trigram"] == pytest.approx(trigram[targets].mean())
    assert values["byte 4-gram"] == pytest.approx(fourgram[targets].mean())
    monkeypatch.setattr(ngrams, "_MOST_TARGETS", 5)
    spread = np.flatnonzero(targets)[:: -(-targets.sum() // 5)]
    fewer = references(targets, "other digest")
    assert fewer["byte trigram"] == pytest.approx(trigram[spread].mean())
    everything = references(targets | True)
    assert everything["byte trigram"] != pytest.approx(values["byte trigram"])


def test_remembered_for_the_same_data_only(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = np.ones(len(EVAL), bool)
    first = references(targets)
    monkeypatch.setattr(ngrams, "nats_per_byte", None)
    assert references(targets) == first
    with pytest.raises(TypeError):
        references(targets, "another")


def test_text_shorter_than_the_order() -> None:
    assert [loss.shape for loss in losses([0], train=b"ab", text=b"a")] == [(1,)] * 4


def test_order_that_no_key_holds() -> None:
    with pytest.raises(ValueError, match="order 5"):
        losses([0], 5)


def test_on_python_corpus() -> None:
    """More context helps on real text, and the sizes are those of such text."""
    dataset = loading.load("python_corpus", configs.get("lm-tiny"))
    uniform, trigram, fourgram = dataset.references()
    assert uniform.value > trigram.value > fourgram.value
    assert (trigram.unit, fourgram.unit) == ("nats/byte", "nats/byte")
    assert 1.6 < trigram.value < 2.0
    assert 1.2 < fourgram.value < 1.6
