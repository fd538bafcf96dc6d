"""Denoising as data: contents of a batch, noise that no layout changes, and baselines."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from mupax.train.config.data import DataConfig
from mupax.train.data import load, show
from mupax.train.data.interface import Batch, DataError
from mupax.train.data.text import denoising, ngrams
from mupax.train.data.text.noise import Infilling, Noise, Sentinels
from mupax.train.parallel.sharding import abstract_batch
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from tests.fixtures.commands import command, output_line, refusal
from tests.train.data.loading import assert_batches_equal, joined
from tests.train.data.writing import write, write_texts

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("text")]

NOISES = [Infilling(), Sentinels()]
RECORDED = {
    "infilling": "<s><mask>456<mask>9:;<<mask>>?<mask>CDEFGHIJKLMNOPQRS<mask></s>" + 7 * "<pad>",
    "sentinels": "0123456789:;<=>?@ABCDEFGHIJK<0>MNOPQRSTU<1></s>",
}
each_noise = pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)


@pytest.fixture
def text(work_folder: object) -> None:
    lines = (f"chapter {i}: the {i % 7} cats sat. They saw {i * i}.\n" for i in range(300))
    write("book.txt", "".join(lines))


def opened(noise: Noise, *, seed: int = 0, inputs: int = 43, **fields: Any) -> Any:
    config = DataConfig(**{"name": "text:book.txt", "batch_size": 8, **fields})
    return denoising.denoising(config, noise, inputs=inputs, seed=seed, note=print)


def assert_other_noise(batch: Batch, other: Batch) -> None:
    assert (batch["inputs"] != other["inputs"]).any()


@each_noise
def test_a_batch_keeps_its_contract(noise: Noise) -> None:
    data = opened(noise)
    ids = data.ids
    batch = data.train_batch(3)
    windows = data.text.train_batch(3)["inputs"]
    specs = {name: ((8, *spec.shape), spec.dtype) for name, spec in data.example.items()}
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == specs
    assert max(batch["inputs"].max(), batch["targets"].max()) < data.vocab_size
    start = ids.eos if noise.name == "infilling" else ids.pad
    assert (batch["decoder_inputs"][:, 0] == start).all()
    np.testing.assert_array_equal(batch["decoder_inputs"][:, 1:], batch["targets"][:, :-1])
    assert (batch["weights"] == 1).all()
    np.testing.assert_array_equal(batch["input_mask"], batch["inputs"] != ids.pad)
    for i, window in enumerate(windows.tolist()):
        if noise.name == "infilling":
            assert batch["targets"][i].tolist() == [ids.bos, *window, ids.eos]
        else:
            assert show.restored(batch["inputs"][i], batch["targets"][i], ids) == window


@each_noise
def test_noise_is_of_the_example_whatever_the_layout(noise: Noise) -> None:
    data = opened(noise)
    batch = data.train_batch(5)
    parts = [data.train_batch(5, rows) for rows in (slice(0, 3), slice(3, 8))]
    assert_batches_equal(joined(parts), batch)
    halves = opened(noise, batch_size=4)
    assert_batches_equal(joined([halves.train_batch(k) for k in (10, 11)]), batch)
    resumed = opened(noise).train_batches(5, slice(0, 2), slice(2, 8))
    assert_batches_equal(next(resumed), batch)
    resumed.close()
    assert_other_noise(opened(noise, seed=1).train_batch(5), batch)


@each_noise
def test_noise_is_that_of_every_machine_and_version(
    noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(noise, inputs=40)
    tokens = np.tile(np.arange(48, 48 + data.lengths.tokens, dtype=np.int32), (8, 1))
    windows = {"inputs": tokens, "weights": np.ones(tokens.shape, np.float32)}
    monkeypatch.setattr(data.text, "train_batch", lambda k, rows: windows)
    inputs = data.train_batch(3)["inputs"][5]
    shown = show.visible(inputs, data.tokenizer.pieces(), data.ids.names())
    assert "".join(shown) == RECORDED[noise.name]


def test_the_same_windows_have_other_noise_in_another_epoch_and_under_another_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = opened(Sentinels())
    windows = data.text.train_batch(0)
    monkeypatch.setattr(data.text, "train_batch", lambda k, rows: windows)
    batch = data.train_batch(0)
    assert_other_noise(data.train_batch(data.train_size), batch)
    data._seed = 1
    assert_other_noise(data.train_batch(0), batch)


@each_noise
def test_evaluation_has_one_noise(noise: Noise) -> None:
    def examples(**fields: Any) -> Batch:
        data = opened(noise, **fields)
        epoch = joined([*data.eval_batches()])
        return {name: array[: data.eval_size] for name, array in epoch.items()}

    assert_batches_equal(examples(seed=1, batch_size=5, eval_batch_size=7), examples())


def test_the_last_window_and_rows_past_it() -> None:
    data = opened(Infilling(), eval_batch_size=1000)
    batch = data.eval_batch(0)
    sizes = batch["weights"].sum(axis=1)
    assert sizes.sum() == data.facts["eval_tokens"] - 1 + 2 * data.eval_size
    (partial,) = np.flatnonzero((sizes > 0) & (sizes < 43))
    size = int(sizes[partial])
    targets = batch["targets"][partial]
    assert targets[size - 1] == data.ids.eos
    assert (targets[size:] == data.ids.pad).all()
    assert (batch["weights"][data.eval_size :] == 0).all()
    assert (batch["input_mask"][data.eval_size :].sum(axis=1) == 1).all()


def test_a_run_goes_on_under_the_same_noise_alone() -> None:
    noises = [*NOISES, Sentinels(rate=0.2), Infilling(mean_span=2.0)]
    digests = [opened(noise).facts["digest"] for noise in noises]
    assert len(set(digests)) == len(noises)
    assert opened(Sentinels(), seed=3).facts["digest"] == digests[1]


def test_images_and_small_vocabularies_are_refused() -> None:
    message = "'digits' is images, and noise is put on text; write python_corpus or text:PATH"
    with pytest.raises(DataError, match=message):
        opened(Infilling(), name="digits")
    config = DataConfig(name="text:book.txt", batch_size=2)
    with pytest.raises(DataError, match=r"write --model\.vocab-size 262"):
        denoising.denoising(config, Sentinels(), inputs=43, vocab_size=261, seed=0, note=print)


# Baselines


def test_tokens_are_counted_as_bytes_are() -> None:
    rng = np.random.default_rng(0)
    train = rng.integers(0, 5, 400)
    test = rng.integers(0, 5, 50)
    positions = np.arange(50)
    narrow = ngrams.nats_per_byte(train, test, positions, 4)
    wide = ngrams.nats_per_byte(train + 1000, test + 1000, positions, 4, vocab_size=1 << 16)
    # They differ by the chance of a token never seen.
    np.testing.assert_allclose(wide[3], narrow[3], atol=0.01)
    # Probabilities of all 301 tokens after 7 300 9 sum to one.
    endings = np.concatenate([[7, 300, 9, token] for token in range(301)])
    train = np.array([7, 300, 9, 5, 300, 9, 6])
    losses = ngrams.nats_per_byte(train, endings, np.arange(3, 1204, 4), 4, 301)
    assert np.exp(-losses[-1]).sum() == pytest.approx(1, abs=1e-12)


def test_the_longest_match_is_copied() -> None:
    inputs = np.array([[90, 1, 2, 3, 91, 7, 2, 4, 92]])
    history = np.array([[92, 90, 1, 2, 7, 2, 8]])
    batch = {"inputs": inputs, "input_mask": np.ones_like(inputs), "decoder_inputs": history}
    guess, matched = denoising.guesses(batch, np.array([90, 91, 92]))
    assert matched.tolist() == [[0, 1, 2, 3, 1, 2, 0]]
    assert guess[0, 1:6].tolist() == [1, 2, 3, 2, 4]


def test_copying_beats_counting_where_the_text_is_visible() -> None:
    data = opened(Infilling())
    references = data.references()
    losses = {reference.name: reference.value for reference in references}
    assert losses["uniform"] == pytest.approx(math.log(260))
    assert losses["copy"] < 0.8 * losses["4-gram"] < 0.8 * losses["uniform"]
    assert {reference.unit for reference in references} == {"nats/target"}
    batch = data.eval_batch(0)
    flat = np.full(int(batch["weights"].sum()), math.log(260))

    def copy_loss(batch: Batch) -> float:
        special = np.array([*data.ids.names()])
        return denoising.copy_losses(batch, batch, flat, special).mean()

    # The control: nothing to copy from.
    shuffled = np.random.default_rng(0).permuted(batch["inputs"], axis=1)
    assert copy_loss(batch) < 0.6 * copy_loss({**batch, "inputs": shuffled})


# Examples to look at


@pytest.mark.parametrize("noise", ["infilling", "sentinels"])
def test_examples_are_shown_in_80_columns(noise: str) -> None:
    done = command(f"data show text:book.txt --noise {noise} --examples 1")
    assert done.code == 0
    lines = done.out.splitlines()
    block = lines[lines.index(f"{'input':27}{'target':27}text") :]
    assert max(map(len, block)) <= 80
    inputs, targets, text = (
        "".join(line[start : start + 25].rstrip() for line in block[2:]) for start in (0, 27, 54)
    )
    assert "·" in text
    if noise == "infilling":
        assert targets == f"<s>{text}</s>"
        assert "<mask>" in inputs
    else:
        assert inputs.startswith(text[:3])
        assert targets.startswith("<0>")


def test_refusals_are_one_line() -> None:
    message = "error: the noise rate is 2.0; write a share of the tokens in (0, 1)"
    assert message in refusal("data show text:book.txt --rate 2")


def test_records_are_shown_as_their_refusals_say() -> None:
    texts = [f"some words {number} " * 9 for number in range(200)]
    write_texts("records.jsonl", [*texts, None], "body")
    words = "data show records:records.jsonl"
    for flags in ("--field body", "--on-broken skip"):
        assert f" {flags}" in refusal(words)
        words += f" {flags}"
    assert "some·words" in output_line(words, "--examples 1")


def test_a_flag_that_the_command_lacks_is_named_with_its_own() -> None:
    message = refusal("data show mix")
    assert message.startswith("error: mix has no texts; write them as --data.mix code=text:")
    assert message.endswith("(--data. begins flags of `mupax train`)")


def test_invisible_characters_have_a_sign() -> None:
    pieces = [chr(byte) for byte in range(256)]
    words = show.visible([97, 32, 10, 9, 0, 27, 0xE2, 0x85, 256], pieces, {256: "<mask>"})
    assert words == ["a", "·", "↵", "→", "␀", "␛", "â", "<85>", "<mask>"]
    shown = show.side_by_side({"a": ["<mask>"] * 2, "b": ["x"]}, 20)
    assert shown == "a          b\n---------  ---------\n<mask>     x\n<mask>\n"


def test_a_run_names_its_noise_and_a_model_of_its_lengths() -> None:
    model = EncoderDecoderConfig(width=8, depth=1, num_heads=2, vocab_size=270, seq_len=43)
    config = DataConfig(name="text:book.txt", batch_size=8, noise="infilling", noise_rate=0.2)
    batch = load(config, model, seed=0, note=print).train_batch(0)
    assert_batches_equal(batch, opened(Infilling(rate=0.2)).train_batch(0))
    assert abstract_batch(model, 8).keys() == batch.keys()
    sentinels = dataclasses.replace(config, noise="sentinels")
    with pytest.raises(DataError, match=r"write --model\.target-len 14"):
        load(sentinels, model, seed=0)
    short = load(sentinels, dataclasses.replace(model, target_len=14), seed=0)
    assert short.train_batch(0)["targets"].shape == (8, 14)
    with pytest.raises(DataError, match=r"write --model\.vocab-size 260"):
        load(config, dataclasses.replace(model, vocab_size=256), seed=0)
