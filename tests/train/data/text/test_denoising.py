"""Denoising as data: what a batch holds, the same noise for every layout, and the models that it is held against."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mupax.train.config.data import DataConfig
from mupax.train.data import __main__ as command
from mupax.train.data import load, show
from mupax.train.data.interface import Batch, DataError
from mupax.train.data.text import denoising, ngrams
from mupax.train.data.text.noise import Infilling, Noise, Sentinels
from mupax.train.parallel.sharding import abstract_batch
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig

pytestmark = pytest.mark.core

NOISES = [Infilling(), Sentinels()]
RECORDED = {
    "infilling": "<s><mask>456<mask>9:;<<mask>>?<mask>CDEFGHIJKLMNOPQRS<mask></s>" + 7 * "<pad>",
    "sentinels": "0123456789:;<=>?@ABCDEFGHIJK<0>MNOPQRSTU<1></s>",
}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(
        "".join(f"chapter {i}: the {i % 7} cats sat. They saw {i * i}.\n" for i in range(300))
    )
    return path


def opened(
    path: Path, noise: Noise, *, seed: int = 0, inputs: int = 43, batch_size: int = 8, **fields
) -> denoising.Denoising:
    config = DataConfig(name=f"text:{path}", batch_size=batch_size, **fields)
    return denoising.denoising(config, noise, inputs=inputs, seed=seed, note=lambda line: None)


def assert_same(batch: Batch, parts: Sequence[Batch]) -> None:
    for name, array in batch.items():
        np.testing.assert_array_equal(
            array, np.concatenate([part[name] for part in parts]), err_msg=name
        )


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_a_batch_is_what_its_contract_says(text: Path, noise: Noise) -> None:
    data = opened(text, noise)
    batch, windows, ids = data.train_batch(3), data.text.train_batch(3)["inputs"], data.ids
    specs = {name: ((8, *spec.shape), spec.dtype) for name, spec in data.example.items()}
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == specs
    assert max(batch["inputs"].max(), batch["targets"].max()) < data.vocab_size
    start = ids.eos if noise.name == "infilling" else ids.pad
    assert (batch["decoder_inputs"][:, 0] == start).all()
    np.testing.assert_array_equal(batch["decoder_inputs"][:, 1:], batch["targets"][:, :-1])
    assert (batch["weights"] == 1).all()
    np.testing.assert_array_equal(batch["input_mask"], batch["inputs"] != ids.pad)
    for i, window in enumerate(windows):
        if noise.name == "infilling":
            assert batch["targets"][i].tolist() == [ids.bos, *window, ids.eos]
        else:
            assert show.restored(batch["inputs"][i], batch["targets"][i], ids) == window.tolist()


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_noise_is_of_the_example_whatever_the_layout(text: Path, noise: Noise) -> None:
    data = opened(text, noise)
    batch = data.train_batch(5)
    assert_same(batch, [data.train_batch(5, slice(0, 3)), data.train_batch(5, slice(3, 8))])
    assert_same(batch, [opened(text, noise, batch_size=4).train_batch(k) for k in (10, 11)])
    resumed = opened(text, noise).train_batches(5, slice(0, 2), slice(2, 8))
    assert_same(batch, [next(resumed)])
    resumed.close()
    other = opened(text, noise, seed=1).train_batch(5)
    assert (other["inputs"] != batch["inputs"]).any()


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_noise_is_that_of_every_machine_and_version(
    text: Path, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(text, noise, inputs=40)
    tokens = np.tile(np.arange(48, 48 + data.lengths.tokens, dtype=np.int32), (8, 1))
    windows = {"inputs": tokens, "weights": np.ones(tokens.shape, np.float32)}
    monkeypatch.setattr(data.text, "train_batch", lambda k, rows: windows)
    shown = show.visible(
        data.train_batch(3)["inputs"][5], data.tokenizer.pieces(), data.ids.names()
    )
    assert "".join(shown) == RECORDED[noise.name]


def test_the_same_windows_have_other_noise_in_another_epoch(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(text, Sentinels())
    windows = data.text.train_batch(0)
    monkeypatch.setattr(data.text, "train_batch", lambda k, rows: windows)
    assert (data.train_batch(0)["inputs"] != data.train_batch(data.train_size)["inputs"]).any()


def test_seeds_of_the_noise_are_told_apart_on_the_same_windows(text: Path) -> None:
    first, second = opened(text, Sentinels()), opened(text, Sentinels())
    second._seed = 1
    assert (first.text.train_batch(0)["inputs"] == second.text.train_batch(0)["inputs"]).all()
    assert (first.train_batch(0)["inputs"] != second.train_batch(0)["inputs"]).any()


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_evaluation_has_one_noise(text: Path, noise: Noise) -> None:
    def whole(**fields) -> Batch:
        data = opened(text, noise, **fields)
        batches = list(data.eval_batches())
        return {
            name: np.concatenate([b[name] for b in batches])[: data.eval_size]
            for name in batches[0]
        }

    assert_same(whole(), [whole(seed=1, batch_size=5, eval_batch_size=7)])


def test_the_last_window_and_what_is_past_it(text: Path) -> None:
    data = opened(text, Infilling(), eval_batch_size=1000)
    batch = data.eval_batch(0)
    sizes = batch["weights"].sum(axis=1)
    partial = (sizes > 0) & (sizes < 43)
    assert partial.sum() == 1
    assert sizes.sum() == data.facts["eval_tokens"] - 1 + 2 * data.eval_size
    (i,) = np.flatnonzero(partial)
    size = int(sizes[i])
    assert batch["targets"][i, size - 1] == data.ids.eos
    assert (batch["targets"][i, size:] == data.ids.pad).all()
    assert (batch["weights"][data.eval_size :] == 0).all()
    assert (batch["input_mask"][data.eval_size :].sum(axis=1) == 1).all()


def test_a_run_goes_on_under_the_same_noise_alone(text: Path) -> None:
    noises = [*NOISES, Sentinels(rate=0.2), Infilling(mean_span=2.0)]
    digests = {opened(text, noise).facts["digest"] for noise in noises}
    assert len(digests) == len(noises)
    assert (
        opened(text, Sentinels()).facts["digest"]
        == opened(text, Sentinels(), seed=3).facts["digest"]
    )


def test_what_does_not_fit_is_refused(text: Path) -> None:
    config = DataConfig(name="digits", batch_size=2)
    with pytest.raises(
        DataError,
        match="'digits' is images, and noise is put on text; write python_corpus or text:PATH",
    ):
        denoising.denoising(config, Infilling(), inputs=64, seed=0)
    config = dataclasses.replace(config, name=f"text:{text}")
    with pytest.raises(DataError, match=r"write --model\.vocab-size 262"):
        denoising.denoising(
            config, Sentinels(), inputs=43, vocab_size=261, seed=0, note=lambda line: None
        )


# Baselines


def test_tokens_are_counted_as_bytes_are() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.integers(0, 5, 400), rng.integers(0, 5, 50)
    positions = np.arange(50)
    narrow = ngrams.nats_per_byte(train, test, positions, 4)
    wide = ngrams.nats_per_byte(train + 1000, test + 1000, positions, 4, vocab_size=1 << 16)
    np.testing.assert_allclose(
        wide[3], narrow[3], atol=0.01
    )  # they differ by the chance of a token never seen
    each = np.concatenate([[7, 300, 9, w] for w in range(301)])
    total = np.exp(
        -ngrams.nats_per_byte(
            np.array([7, 300, 9, 5, 300, 9, 6]), each, np.arange(3, 1204, 4), 4, 301
        )[-1]
    )
    assert total.sum() == pytest.approx(1, abs=1e-12)


def test_the_longest_match_is_copied() -> None:
    inputs = np.array([[90, 1, 2, 3, 91, 7, 2, 4, 92]])
    history = np.array([[92, 90, 1, 2, 7, 2, 8]])
    batch = {"inputs": inputs, "input_mask": np.ones_like(inputs), "decoder_inputs": history}
    guess, matched = denoising.guesses(batch, np.array([90, 91, 92]))
    assert matched.tolist() == [[0, 1, 2, 3, 1, 2, 0]]
    assert guess[0, 1:6].tolist() == [1, 2, 3, 2, 4]


def test_copying_beats_counting_where_the_text_is_visible(text: Path) -> None:
    data = opened(text, Infilling())
    losses = {reference.name: reference.value for reference in data.references()}
    assert losses["uniform"] == pytest.approx(math.log(260))
    assert losses["copy"] < 0.8 * losses["4-gram"] < 0.8 * losses["uniform"]
    assert {reference.unit for reference in data.references()} == {"nats/target"}
    test = data.eval_batch(0)
    flat = np.full(int(test["weights"].sum()), math.log(260))
    other = {
        **test,
        "inputs": np.random.default_rng(0).permuted(test["inputs"], axis=1),
    }  # control: nothing to copy from
    copied, shuffled = (
        denoising.copy_losses(b, b, flat, np.array([*data.ids.names()])).mean()
        for b in (test, other)
    )
    assert copied < 0.6 * shuffled


# Examples to look at


@pytest.mark.parametrize("noise", ["infilling", "sentinels"])
def test_examples_are_shown_in_80_columns(
    text: Path, noise: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["show", f"text:{text}", "--noise", noise, "--examples", "1"]) == 0
    shown = capsys.readouterr().out
    block = shown.splitlines()[
        shown.splitlines().index("input" + " " * 22 + "target" + " " * 21 + "text") :
    ]
    assert max(map(len, block)) <= 80
    columns = ["".join(line[at : at + 25].rstrip() for line in block[2:]) for at in (0, 27, 54)]
    assert "·" in columns[2]
    if noise == "infilling":
        assert columns[1] == f"<s>{columns[2]}</s>"
        assert "<mask>" in columns[0]
    else:
        assert columns[0].startswith(columns[2][:3])
        assert columns[1].startswith("<0>")


def test_refusals_are_one_line(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", f"text:{text}", "--rate", "2"]) == 2
    assert (
        "error: the noise rate is 2.0; write a share of the tokens in (0, 1)"
        in capsys.readouterr().err
    )


def test_what_cannot_be_seen_has_a_sign() -> None:
    pieces = [chr(byte) for byte in range(256)]
    words = show.visible([97, 32, 10, 9, 0, 27, 0xE2, 0x85, 256], pieces, {256: "<mask>"})
    assert words == ["a", "·", "↵", "→", "␀", "␛", "â", "<85>", "<mask>"]
    assert (
        show.side_by_side({"a": ["<mask>"] * 2, "b": ["x"]}, 20)
        == "a          b\n---------  ---------\n<mask>     x\n<mask>\n"
    )


def test_a_run_names_its_noise_and_a_model_of_its_lengths(text: Path) -> None:
    model = EncoderDecoderConfig(width=8, depth=1, num_heads=2, vocab_size=270, seq_len=43)
    config = DataConfig(name=f"text:{text}", batch_size=8, noise="infilling", noise_rate=0.2)
    data = load(config, model, seed=0, note=lambda line: None)
    assert_same(data.train_batch(0), [opened(text, Infilling(rate=0.2)).train_batch(0)])
    assert abstract_batch(model, 8).keys() == data.train_batch(0).keys()
    sentinels = dataclasses.replace(config, noise="sentinels")
    with pytest.raises(DataError, match=r"write --model\.target-len 14"):
        load(sentinels, model, seed=0)
    short = load(sentinels, dataclasses.replace(model, target_len=14), seed=0)
    assert short.train_batch(0)["targets"].shape == (8, 14)
    with pytest.raises(DataError, match=r"write --model\.vocab-size 260"):
        load(config, dataclasses.replace(model, vocab_size=256), seed=0)
