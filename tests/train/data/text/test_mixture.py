"""Several texts as one: shares exact in every block, every text's own order, and batches that depend on (seed, k) alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data import DataError
from mupax.train.data.mix import BLOCK, parts
from mupax.train.data.text.batches import TokenData
from mupax.train.data.text.mixture import Mixture, MixtureWeights
from mupax.zoo import configs
from mupax.zoo.configs import ConfigError, DecoderConfig

pytestmark = pytest.mark.core

LM_TINY = configs.get("lm-tiny")
assert isinstance(LM_TINY, DecoderConfig)
MODEL = dataclasses.replace(LM_TINY, seq_len=8)
LETTERS = {"a": "abc", "b": "xyz"}
SIZES = {"a": 3000, "b": 12_000}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of a, b and c in a/, and one of x, y and z in b/: a token says whose it is."""
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name, letters in LETTERS.items():
        (tmp_path / name).mkdir()
        for i in range(20):
            text = "".join(rng.choice(list(letters), SIZES[name] // 20))
            (tmp_path / name / f"{i}.txt").write_text(text)
    return tmp_path


def load(*words: str, seed: int = 0, batch_size: int = 50, **fields) -> Mixture:
    config = DataConfig(name="mix", mix=words, batch_size=batch_size, **fields)
    mixture = data.load(config, MODEL, seed=seed, note=lambda line: None)
    assert isinstance(mixture, Mixture)
    return mixture


def words(folder: Path, a: float, b: float) -> list[str]:
    return [f"a=text:{folder / 'a'}:{a}", f"b=text:{folder / 'b'}:{b}"]


def from_a(tokens: np.ndarray) -> np.ndarray:
    """Which windows are of the first text, bool [B]; none is of both, but for separators."""
    is_a, is_b = (
        np.isin(tokens, list(letters.encode())).any(axis=1) for letters in LETTERS.values()
    )
    assert not np.any(is_a & is_b)
    return np.asarray(is_a)


def test_weights_become_shares_of_a_block() -> None:
    assert [part.count for part in parts(["a=x:1", "b=y:1", "c=text:z:1"]).values()] == [
        3334,
        3333,
        3333,
    ]
    assert parts(["code=text:gs://bucket/src:0.3", "p=records:books:0.7"])["code"] == (
        "text:gs://bucket/src",
        3000,
    )


def test_every_block_has_exactly_its_shares_and_every_text_its_own_order() -> None:
    shares = MixtureWeights([2500, 7499, 1], seed=3)
    texts, examples = shares(range(3 * BLOCK))
    for block in texts.reshape(3, BLOCK):
        assert np.bincount(block).tolist() == [2500, 7499, 1]
    for text in range(3):
        np.testing.assert_array_equal(examples[texts == text], np.arange(3 * shares.counts[text]))
    assert (
        texts[:BLOCK] != texts[BLOCK : 2 * BLOCK]
    ).mean() > 0.3  # another order in another block
    assert (texts != MixtureWeights([2500, 7499, 1], seed=4)(range(3 * BLOCK))[0]).mean() > 0.3
    # Shares of parts of a block too, as of independent draws: 2,000 batches of eight in place of one run of each text.
    means = (texts[: 2 * BLOCK] == 0).reshape(-1, 8).mean(axis=1)
    assert np.std(means) == pytest.approx((0.25 * 0.75 / 8) ** 0.5, rel=0.05)
    some = np.array([7, 29_999, 12_345])
    for subset, whole in zip(shares(some), (texts, examples), strict=True):
        np.testing.assert_array_equal(subset, whole[some])


def test_a_text_ends_where_one_more_of_its_examples_is_needed() -> None:
    shares = MixtureWeights([4000, 6000], seed=0)
    for sizes in ([4000, 10**9], [10, 20], [9000, 9001], [1, 1]):
        count = shares.until_one_ends(sizes)
        counts = np.bincount(shares(range(count))[0], minlength=2)
        assert (counts <= sizes).all()
        after = np.bincount(shares(range(count + 1))[0], minlength=2)
        assert (after > sizes).any()


def test_batches_have_the_shares_and_rows_are_rows_of_them(folders: Path) -> None:
    mixed = load(*words(folders, 0.3, 0.7))
    whole = [mixed.train_batch(k) for k in range(40)]
    share = np.mean([from_a(batch["inputs"]).mean() for batch in whole])
    assert share == pytest.approx(0.3, abs=0.03)
    assert 0 < min(from_a(batch["inputs"]).mean() for batch in whole) < share
    for rows in (slice(0, 13), slice(13, 50), slice(7, 50, 3)):  # of any process, in any order
        for name, array in mixed.train_batch(7, rows).items():
            np.testing.assert_array_equal(array, whole[7][name][rows])
    again = load(*words(folders, 0.3, 0.7)).train_batch(7)
    np.testing.assert_array_equal(again["inputs"], whole[7]["inputs"])
    assert (
        load(*words(folders, 0.3, 0.7), seed=1).train_batch(7)["inputs"] != whole[7]["inputs"]
    ).any()


def test_a_mixture_of_one_text_is_that_text(folders: Path) -> None:
    one = load(words(folders, 1, 1)[0])
    plain = data.load(
        DataConfig(name=f"text:{folders / 'a'}", batch_size=50),
        MODEL,
        seed=0,
        note=lambda line: None,
    )
    assert isinstance(plain, TokenData)
    assert (one.train_size, one.eval_size, one.bytes_per_token) == (
        plain.train_size, plain.eval_size, plain.bytes_per_token,
    )  # fmt: skip
    pairs = [(one.train_batch(k), plain.train_batch(k)) for k in (0, 3, 30)]
    pairs += zip(one.eval_batches(), plain.eval_batches(), strict=True)
    for mine, theirs in pairs:
        for name, array in theirs.items():
            np.testing.assert_array_equal(mine[name], array)


def test_evaluation_has_the_shares_and_no_window_twice(folders: Path) -> None:
    mixed = load(*words(folders, 0.5, 0.5), eval_batch_size=7)
    batches = list(mixed.eval_batches())
    counted = np.concatenate([batch["weights"].any(axis=1) for batch in batches])
    windows = np.concatenate([batch["inputs"] for batch in batches])[counted]
    assert counted.sum() == mixed.eval_size
    assert not counted[mixed.eval_size :].any()
    # As many of a as there are, or one less where b's turn came first; the rest of b's is left out.
    each = {
        name: facts["eval_tokens"] // MODEL.seq_len for name, facts in mixed.facts["mix"].items()
    }
    assert each["a"] - 2 <= from_a(windows).sum() <= each["a"] + 1
    assert each["b"] > 2 * (mixed.eval_size - from_a(windows).sum())
    few = load(*words(folders, 0.5, 0.5), eval_batch_size=7, eval_examples=3)
    [batch] = few.eval_batches()
    assert batch["weights"].any(axis=1).tolist() == [True] * 3 + [False] * 4
    np.testing.assert_array_equal(batch["inputs"][:3], batches[0]["inputs"][:3])


def test_what_a_run_records_tells_shares_and_texts_apart(folders: Path) -> None:
    facts = load(*words(folders, 0.3, 0.7)).facts
    assert {name: (each["share"], each["source"]) for name, each in facts["mix"].items()} == {
        name: (share, f"text:{folders / name}") for name, share in (("a", 0.3), ("b", 0.7))
    }
    assert facts["digest"] == load(*words(folders, 3, 7)).facts["digest"]
    assert facts["digest"] != load(*words(folders, 0.4, 0.6)).facts["digest"]


def test_an_encoder_decoder_reads_it_with_noise(folders: Path) -> None:
    model = dataclasses.replace(configs.get("ed-tiny"), seq_len=16, target_len=5)  # pyright: ignore
    config = DataConfig(
        name="mix", mix=tuple(words(folders, 0.5, 0.5)), batch_size=20, noise="sentinels"
    )
    inputs = data.load(config, model, seed=0, note=lambda line: None).train_batch(0)["inputs"]
    assert 0 < from_a(inputs).mean() < 1


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("code", "data.mix code is not NAME=SOURCE:WEIGHT; write it as code=text:src:0.3"),
        ("code=text:src", "is not NAME=SOURCE:WEIGHT"),
        ("my code=text:src:1", "is not NAME=SOURCE:WEIGHT"),
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
def test_bad_words_get_one_message(
    mix: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "train",
                "lm-tiny",
                "--steps",
                "2",
                "--optimizer.warmup-steps",
                "1",
                "--data.mix",
                *_split(mix),
            ]
        )
        == 2
    )
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert message in error


def _split(words: str) -> list[str]:
    return [words] if "my code" in words else words.split()


def test_the_name_alone_has_no_texts() -> None:
    with pytest.raises(DataError, match=r"data.name mix has no texts; write them as --data.mix"):
        load()
    with pytest.raises(ConfigError, match=r"data.mix names its texts, and data.name is shapes"):
        DataConfig(name="shapes", mix=("a=text:x:1",), batch_size=1)
