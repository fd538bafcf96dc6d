"""Span noise against plain implementations of the sources' own rules."""

from __future__ import annotations

import collections
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from mupax.train.data import show
from mupax.train.data.interface import DataError
from mupax.train.data.text.noise import (
    CorruptedBatch,
    Infilling,
    Lengths,
    Noise,
    Sentinels,
    permuted,
)
from mupax.train.data.text.tokenizer import Bytes, Subwords
from mupax.train.data.text.vocabulary import Sentences, SpecialIds, special_ids

pytestmark = pytest.mark.core

IDS = SpecialIds(pad=1000, eos=1001, bos=1002, mask=1003, sentinels=tuple(range(1004, 1104)))
ROWS = 4000


def noised(
    noise: Infilling | Sentinels, length: int, rows: int = ROWS, seed: int = 0
) -> CorruptedBatch:
    """Put noise on windows of the tokens 0, 1, …, one sentence each."""
    tokens = np.tile(np.arange(length), (rows, 1))
    uniforms = np.random.default_rng(seed).random((rows, noise.draws, length))
    return noise(tokens, tokens == 0, uniforms, IDS)


def largest_z(first: np.ndarray, second: np.ndarray) -> float:
    """Return the largest difference of means of two samples, in standard errors.

    Args:
        first: sample [rows, quantities].
        second: sample of the same shape.
    """
    error = np.sqrt((first.var(axis=0) + second.var(axis=0)) / len(first) + 1e-12)
    return float(np.max(np.abs(first.mean(axis=0) - second.mean(axis=0)) / error))


# T5's sentinels


def t5_mask(rng: np.random.Generator, length: int, rate: float, mean: float) -> list[bool]:
    """Return a mask by T5's rule, span by span.

    Shuffle where parts begin, count their lengths, and take parts that stay and parts that are cut
    in turn.
    """
    cut = round(length * rate)
    spans = round(cut / mean)

    def parts(items: int) -> list[int]:
        begins = [1] * (spans - 1) + [0] * (items - spans)
        rng.shuffle(begins)
        lengths = [1]
        for begin in begins:
            if begin:
                lengths.append(1)
            else:
                lengths[-1] += 1
        return lengths

    mask = []
    for left, out in zip(parts(length - cut), parts(cut), strict=True):
        mask += [False] * left + [True] * out
    return mask


def run_lengths(masks: np.ndarray, longest: int = 8) -> np.ndarray:
    """Return how many spans of 1, 2, …, `longest` tokens each row has."""
    edges = np.diff(np.pad(masks.astype(int), ((0, 0), (1, 1))), axis=1)
    counts = np.zeros((len(masks), masks.shape[1] + 1))
    rows, starts = np.nonzero(edges == 1)
    _, ends = np.nonzero(edges == -1)
    np.add.at(counts, (rows, ends - starts), 1)
    return counts[:, 1 : longest + 1]


def span_features(masks: np.ndarray) -> np.ndarray:
    """Return which tokens are cut, which pairs, and numbers of spans by length."""
    return np.hstack([masks, masks[:, :-1] * masks[:, 1:], run_lengths(masks)]).astype(float)


def test_masks_are_distributed_as_those_of_t5() -> None:
    rng, length = np.random.default_rng(1), 67
    plain = np.array([t5_mask(rng, length, 0.15, 3.0) for _ in range(ROWS)])
    uniforms = np.random.default_rng(2).random((ROWS, 2, length))
    ours = Sentinels().noise_mask(length, uniforms)
    assert (ours.sum(axis=1) == plain.sum(axis=1)).all()
    expected = span_features(plain)
    assert largest_z(expected, span_features(ours)) < 4.5
    # The control: spans of another mean.
    wrong = Sentinels(mean_span=2.0).noise_mask(length, uniforms)
    assert largest_z(expected, span_features(wrong)) > 20


def test_every_mask_of_a_short_window_is_as_likely() -> None:
    noise = Sentinels(rate=0.45, mean_span=2.0)
    masks = noise.noise_mask(9, np.random.default_rng(3).random((12_000, 2, 9)))
    counts = collections.Counter(map(bytes, masks))
    assert noise.counts(9) == (4, 2)
    assert len(counts) == math.comb(4, 1) * math.comb(3, 1)
    assert max(abs(count - 1000) for count in counts.values()) < 4.5 * math.sqrt(1000)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 62, 200])
@pytest.mark.parametrize(
    "noise", [Sentinels(), Sentinels(rate=0.5, mean_span=1.0), Sentinels(rate=0.9, mean_span=5.0)]
)
def test_every_token_comes_back(length: int, noise: Sentinels) -> None:
    batch = noised(noise, length, rows=20)
    ids = IDS.sentinels[: noise.sentinels(length)]
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        assert inputs[-1] == targets[-1] == IDS.eos
        assert [i for i in inputs if i in IDS.sentinels] == list(ids)
        assert show.restored(inputs, targets, IDS) == list(range(length))
    if length > 7 and noise.rate < 0.5:  # control: targets of other noise do not fit
        assert show.restored(batch.inputs[0], batch.targets[1], IDS) != list(range(length))


def test_a_target_cut_short_restores_what_it_has() -> None:
    inputs, targets = np.array([5, 1004, 6, 1005, 1001, 1000]), np.array([1004, 7, 8, 1001, 9, 9])
    assert show.restored(inputs, targets, IDS) == [5, 7, 8, 6]


def t5_lengths(inputs: int, rate: float, mean: float) -> Lengths:
    """The rule of T5's `random_spans_helper`."""

    def sizes(tokens: int) -> tuple[int, int]:
        cut = round(tokens * rate)
        spans = round(cut / mean)
        return tokens - cut + spans + 1, cut + spans + 1

    tokens = max(n for n in range(inputs, 4 * inputs) if sizes(n)[0] <= inputs)
    targets = sizes(tokens)[1]
    if rate == 0.5 and targets > sizes(tokens)[0]:
        tokens, targets = tokens - 1, targets - 1
    return Lengths(tokens, inputs, targets)


def test_lengths_are_those_of_t5() -> None:
    assert Sentinels().lengths(512) == Lengths(568, 512, 114)
    for inputs, rate, mean in itertools.product((64, 113, 512), (0.15, 0.3, 0.5), (2.0, 3.0, 3.5)):
        noise = Sentinels(rate=rate, mean_span=mean)
        assert noise.lengths(inputs) == t5_lengths(inputs, rate, mean)


def test_windows_fill_the_batch() -> None:
    lengths = Sentinels().lengths(64)
    batch = noised(Sentinels(), lengths.tokens, rows=5)
    assert (batch.inputs.shape[1], batch.targets.shape[1]) == lengths[1:]
    assert (batch.counts == 64).all()


# BART's infilling


def test_a_share_of_the_tokens_is_cut_and_each_span_leaves_a_mask() -> None:
    length, cut = 67, 21
    batch = noised(Infilling(), length, rows=300)
    for inputs, count in zip(batch.inputs, batch.counts, strict=True):
        assert inputs[0] == IDS.bos
        assert inputs[count - 1] == IDS.eos
        assert (inputs[count:] == IDS.pad).all()
        body = inputs[1 : count - 1]
        left = body[body != IDS.mask]
        assert len(left) == length - cut
        previous = -1
        for token, run in itertools.groupby([*body, length], key=lambda i: i == IDS.mask):
            if token:
                continue
            body_run = list(run)
            assert body_run[0] > previous
            previous = body_run[-1]
            # Without a mask nothing is missing.
            assert body_run == list(range(body_run[0], previous + 1))
    np.testing.assert_array_equal(batch.targets[7], [IDS.bos, *range(length), IDS.eos])


def plain_cut(
    rng: np.random.Generator, length: int, rate: float, mean: float
) -> tuple[list[bool], int]:
    """Return which tokens BART's rule cuts, span by span, and how many masks stand for them."""
    cut = math.ceil(rate * length)
    spans: list[int] = []
    while sum(spans) < cut:
        spans.append(min(rng.poisson(mean), cut - sum(spans)))
    parts = [[False]] * (length - cut) + [[True] * span for span in spans]
    order = rng.permutation(len(parts))
    return [*itertools.chain.from_iterable(parts[i] for i in order)], len(spans)


def test_span_lengths_are_poisson() -> None:
    uniforms = np.random.default_rng(4).random(100_000)
    share = np.bincount(Infilling().span_lengths(uniforms), minlength=30)[:8] / len(uniforms)

    def deviation(mean: float) -> float:
        expected = np.array([math.exp(-mean) * mean**k / math.factorial(k) for k in range(8)])
        return float(np.max(np.abs(share - expected) / np.sqrt(expected / len(uniforms))))

    assert deviation(3.0) < 4.5
    assert min(deviation(2.9), deviation(3.1)) > 6  # control: another mean


def test_infilling_is_distributed_as_the_plain_rule_says() -> None:
    rng, length = np.random.default_rng(4), 60

    def features(cut: np.ndarray, masks: np.ndarray) -> np.ndarray:
        return np.hstack([span_features(cut), masks[:, None]])

    def plain(mean: float) -> np.ndarray:
        cut, masks = zip(*(plain_cut(rng, length, 0.3, mean) for _ in range(ROWS)), strict=True)
        return features(np.array(cut), np.array(masks))

    batch = noised(Infilling(), length)
    left = np.zeros((ROWS, IDS.mask + 1), bool)
    left[np.arange(ROWS)[:, None], batch.inputs] = True
    ours = features(~left[:, :length], (batch.inputs == IDS.mask).sum(axis=1))
    assert largest_z(ours, plain(3.0)) < 4.5
    assert largest_z(ours, plain(2.8)) > 8  # control: spans of another mean


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_short_windows_have_noise_too(length: int) -> None:
    batch = noised(Infilling(), length, rows=200)
    assert (batch.counts <= length + 2).all()
    assert ((batch.inputs == IDS.mask).sum(axis=1) >= 1).all()


def test_orders_of_sentences_are_all_alike() -> None:
    starts = np.tile(np.array([1, 0, 1, 0, 0, 1], bool), (6000, 1))
    tokens = np.tile(np.arange(6), (6000, 1))
    rows = permuted(tokens, starts, np.random.default_rng(5).random((6000, 6)))
    counts = collections.Counter(map(tuple, rows.tolist()))
    parts = [(0, 1), (2, 3, 4), (5,)]
    assert set(counts) == {sum(order, ()) for order in itertools.permutations(parts)}
    assert max(abs(count - 1000) for count in counts.values()) < 4.5 * math.sqrt(1000)


# Vocabularies


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (b"x = 0.5\ny = self.x\n", [b"x = 0.5\n", b"y = self.x\n"]),
        (b"One. Two? Three! four", [b"One.", b" Two?", b" Three!", b" four"]),
        (b"end\n\n\nnext", [b"end\n\n\n", b"next"]),
        (b"file\n\0other", [b"file\n\0", b"other"]),
        (b"no end", [b"no end"]),
    ],
)  # fmt: skip
def test_where_sentences_begin(text: bytes, sentences: list[bytes]) -> None:
    tokens = np.array([*text])
    (starts,) = Sentences(Bytes(), 260).starts(tokens[None])
    parts = np.split(tokens, np.flatnonzero(starts)[1:])
    assert [bytes(part.tolist()) for part in parts] == sentences


def subwords(path: Path, *tokens: str) -> Subwords:
    vocab = {token: i for i, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(vocab, unk_token=tokens[0])).save(str(path / "tokenizer.json"))
    return Subwords(path / "tokenizer.json")


def test_sentences_of_subwords(tmp_path: Path) -> None:
    tokenizer = subwords(tmp_path, "</s>", "Hi", ".", "▁there", "Ċ", "Ġyou", "com")
    (starts,) = Sentences(tokenizer, 9).starts(np.array([[1, 2, 3, 2, 6, 4, 1, 2, 5, 8]]))
    assert np.flatnonzero(starts).tolist() == [0, 2, 6, 8]


def test_ids_of_bytes_come_after_them() -> None:
    expected = SpecialIds(pad=256, eos=257, bos=258, mask=259, sentinels=(260, 261))
    assert special_ids(Bytes(), 2) == expected


def test_ids_of_a_tokenizer_are_its_own(tmp_path: Path) -> None:
    words = ("<s>", "<pad>", "</s>", "a", "<mask>", "<extra_id_1>", "<extra_id_0>")
    tokenizer = subwords(tmp_path, *words)
    expected = SpecialIds(pad=1, eos=2, bos=0, mask=4, sentinels=(6, 5))
    assert special_ids(tokenizer, 2, vocab_size=7) == expected
    assert special_ids(tokenizer, 4).sentinels == (6, 5, 7, 8)


def test_missing_room_for_ids_is_reported(tmp_path: Path) -> None:
    message = r"no pad, eos, bos, mask, and the model's 256 .* write --model.vocab-size 260"
    with pytest.raises(DataError, match=message):
        special_ids(Bytes(), 0, vocab_size=256)
    message = r"no pad, bos, 3 sentinels, and the model's 8 .* write --model.vocab-size 9"
    with pytest.raises(DataError, match=message):
        special_ids(subwords(tmp_path, "</s>", "a", "b", "<mask>"), 3, vocab_size=8)


@pytest.mark.parametrize(
    ("noise", "fields", "message"),
    [
        (Infilling, {"rate": 1.0}, "noise rate is 1.0; write a share"),
        (Sentinels, {"rate": 0.0}, "noise rate is 0.0"),
        (Infilling, {"mean_span": 0.5}, "mean span is 0.5; write a number of tokens from 1 to 50"),
    ],
)
def test_noise_out_of_range_is_refused(noise: type, fields: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        noise(**fields)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (Infilling(), "no room for text between bos and eos; write at least 3"),
        (Sentinels(), "no room .* write at least 3"),
    ],
)
def test_inputs_without_room_are_refused(noise: Noise, message: str) -> None:
    with pytest.raises(DataError, match=f"inputs of 2 tokens have {message}"):
        noise.lengths(2)
    assert Sentinels().lengths(3) == Lengths(2, 3, 3)
