"""Several texts as one: shares exact in every block, and batches that depend on (seed, k) alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train.config.run import DataConfig
from mupax.train.data import DataError
from mupax.train.data.mix import BLOCK, parts
from mupax.train.data.text.mixture import Mixture, MixtureWeights
from mupax.zoo import configs
from mupax.zoo.configs import ConfigError
from tests.fixtures.commands import refusal
from tests.train.data import loading
from tests.train.data.loading import TEXT_MODEL, assert_batches_equal, joined
from tests.train.data.writing import write

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("work_folder")]

MODEL = dataclasses.replace(TEXT_MODEL, seq_len=8)
LETTERS = {"a": "abc", "b": "xyz"}


@pytest.fixture
def folders(work_folder: Path) -> None:
    """A text of a, b and c in a/, and one of x, y and z in b/: a token tells its text."""
    rng = np.random.default_rng(0)
    for name, size in {"a": 150, "b": 600}.items():
        for i in range(20):
            write(f"{name}/{i}.txt", "".join(rng.choice([*LETTERS[name]], size)))


def load(a: float = 0.3, b: float = 0.7, **fields: Any) -> Mixture:
    mix = (f"a=text:a:{a}", f"b=text:b:{b}")
    return loading.load("mix", MODEL, **{"mix": mix, "batch_size": 50, **fields})


def from_a(tokens: np.ndarray) -> np.ndarray:
    """Return which windows are of the first text. None is of both, but for separators."""
    is_a, is_b = (
        np.isin(tokens, list(letters.encode())).any(axis=1) for letters in LETTERS.values()
    )
    assert not np.any(is_a & is_b)
    return np.asarray(is_a)


def test_weights_become_shares_of_a_block() -> None:
    shares = parts(["a=x:1", "b=y:1", "c=text:z:1"])
    assert [part.count for part in shares.values()] == [3334, 3333, 3333]
    shares = parts(["code=text:gs://bucket/src:0.3", "p=records:books:0.7"])
    assert shares["code"] == ("text:gs://bucket/src", 3000)


def test_every_block_has_exactly_its_shares_and_every_text_its_own_order() -> None:
    counts = [2500, 7499, 1]
    shares = MixtureWeights(counts, seed=3)
    texts, examples = shares(range(3 * BLOCK))
    blocks = texts.reshape(3, BLOCK)
    for block in blocks:
        assert np.bincount(block).tolist() == counts
    for text in range(3):
        np.testing.assert_array_equal(examples[texts == text], np.arange(3 * counts[text]))
    assert (blocks[0] != blocks[1]).mean() > 0.3  # another order in another block
    other_seed = MixtureWeights(counts, seed=4)(range(3 * BLOCK))[0]
    assert (texts != other_seed).mean() > 0.3
    # Parts of a block have the shares too, as independent draws do: 2,000 batches of eight.
    means = (texts[: 2 * BLOCK] == 0).reshape(-1, 8).mean(axis=1)
    assert np.std(means) == pytest.approx((0.25 * 0.75 / 8) ** 0.5, rel=0.05)
    some = np.array([7, 29_999, 12_345])
    np.testing.assert_array_equal(shares(some), np.array([texts, examples])[:, some])


@pytest.mark.parametrize("sizes", [[4000, 10**9], [10, 20], [9000, 9001], [1, 1]])
def test_a_text_ends_where_one_more_of_its_examples_is_needed(sizes: list[int]) -> None:
    shares = MixtureWeights([4000, 6000], seed=0)
    count = shares.until_one_ends(sizes)
    texts, _ = shares(range(count + 1))
    assert (np.bincount(texts[:-1], minlength=2) <= sizes).all()
    assert (np.bincount(texts, minlength=2) > sizes).any()


@pytest.mark.usefixtures("folders")
def test_batches_have_the_shares_and_rows_are_rows_of_them() -> None:
    mixed = load()
    batches = [mixed.train_batch(k) for k in range(40)]
    shares = [from_a(batch["inputs"]).mean() for batch in batches]
    assert np.mean(shares) == pytest.approx(0.3, abs=0.03)
    assert 0 < min(shares) < np.mean(shares)
    for rows in (slice(0, 13), slice(13, 50), slice(7, 50, 3)):  # of any process, in any order
        expected = {name: array[rows] for name, array in batches[7].items()}
        assert_batches_equal(mixed.train_batch(7, rows), expected)
    assert_batches_equal(load().train_batch(7), batches[7])
    assert (load(seed=1).train_batch(7)["inputs"] != batches[7]["inputs"]).any()


@pytest.mark.usefixtures("folders")
def test_a_mixture_of_one_text_is_that_text() -> None:
    mixed = load(mix=("a=text:a:1",))
    plain = loading.load("text:a", MODEL, batch_size=50)
    for name in ("train_size", "eval_size", "bytes_per_token"):
        assert getattr(mixed, name) == getattr(plain, name)
    for k in (0, 3, 30):
        assert_batches_equal(mixed.train_batch(k), plain.train_batch(k))
    for batch, expected in zip(mixed.eval_batches(), plain.eval_batches(), strict=True):
        assert_batches_equal(batch, expected)


@pytest.mark.usefixtures("folders")
def test_evaluation_has_the_shares_and_no_window_twice() -> None:
    mixed = load(0.5, 0.5, eval_batch_size=7)
    epoch = joined([*mixed.eval_batches()])
    counted = epoch["weights"].any(axis=1)
    assert counted.sum() == mixed.eval_size
    assert not counted[mixed.eval_size :].any()
    # As many of a as there are, or one less where b's turn came first; the rest of b is left out.
    from_first = from_a(epoch["inputs"][counted]).sum()
    sizes = {name: part["eval_tokens"] // 8 for name, part in mixed.facts["mix"].items()}
    assert sizes["a"] - 2 <= from_first <= sizes["a"] + 1
    assert sizes["b"] > 2 * (mixed.eval_size - from_first)
    (batch,) = load(0.5, 0.5, eval_batch_size=7, eval_examples=3).eval_batches()
    assert batch["weights"].any(axis=1).tolist() == [True] * 3 + [False] * 4
    np.testing.assert_array_equal(batch["inputs"][:3], epoch["inputs"][:3])


@pytest.mark.usefixtures("folders")
def test_facts_tell_shares_and_texts_apart() -> None:
    facts = load().facts
    recorded = {name: (part["share"], part["source"]) for name, part in facts["mix"].items()}
    assert recorded == {"a": (0.3, "text:a"), "b": (0.7, "text:b")}
    assert facts["digest"] == load(3, 7).facts["digest"]
    assert facts["digest"] != load(0.4, 0.6).facts["digest"]


@pytest.mark.usefixtures("folders")
def test_an_encoder_decoder_reads_it_with_noise() -> None:
    model: Any = dataclasses.replace(configs.get("ed-tiny"), seq_len=16, target_len=5)  # pyright: ignore
    mix = ("a=text:a:1", "b=text:b:1")
    source = loading.load("mix", model, mix=mix, batch_size=20, noise="sentinels")
    assert 0 < from_a(source.train_batch(0)["inputs"]).mean() < 1


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("code", "data.mix code is not NAME=SOURCE:WEIGHT; write it as code=text:src:0.3"),
        ("code=text:src", "is not NAME=SOURCE:WEIGHT"),
        ("'my code=text:src:1'", "is not NAME=SOURCE:WEIGHT"),
        ("a=text:x:0", "has weight 0; write a number above 0"),
        ("a=text:x:nan", "has weight nan; write a number above 0"),
        ("a=text:x:1 a=text:y:1", "two texts named a"),
        ("a=text:x:1 b=text:y:1e-9", "b would be less than one example in 10,000"),
        ("a=mix:1", "a mixture in a mixture"),
        ("a=text:x:1 --data.name digits", "and data.name is digits; leave that out"),
        ("a=digits:1", "data.mix a: data 'digits' is images"),
        ("a=text:nowhere:1", "data.mix a: no file or folder nowhere"),
        (
            "a=python_corpus:1 --data.tokenizer bpe:300",
            "bpe:300 and a model of 256 tokens; write --model.vocab-size 300",
        ),
        ("a=chat:nowhere:1", "data.mix a: there is no chat template beside data.tokenizer bytes"),
        (
            "a=images:nowhere:1 --data.tokenizer bpe:300",
            "data.mix a: data 'images:nowhere' is images",
        ),
    ],
)
def test_bad_words_get_one_message(mix: str, message: str) -> None:
    words = "train lm-tiny --steps 2 --optimizer.warmup-steps 1 --data.mix"
    assert message in refusal(words, mix)


def test_the_name_alone_has_no_texts() -> None:
    with pytest.raises(DataError, match=r"data.name mix has no texts; write them as --data.mix"):
        load(mix=())
    with pytest.raises(ConfigError, match=r"data.mix names its texts, and data.name is shapes"):
        DataConfig(name="shapes", mix=("a=text:x:1",), batch_size=1)
