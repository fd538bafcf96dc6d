"""Span corruption of windows of text: BART's text infilling and T5's sentinels, in NumPy.

Shapes: B windows, N tokens per window, S encoder positions, T decoder positions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import numpy as np

from mupax.train.data.interface import DataError
from mupax.train.data.text.vocabulary import SpecialIds

_LONGEST_SPAN = 200
"""Largest length of a Poisson span. With a mean of at most 50, longer spans have a probability
below 1e-16."""


class Lengths(NamedTuple):
    """Static lengths of a batch."""

    tokens: int
    """N, tokens of a window before corruption."""
    inputs: int
    """S, encoder positions."""
    targets: int
    """T, decoder positions."""


class CorruptedBatch(NamedTuple):
    """Batch of B windows with corrupted spans."""

    inputs: np.ndarray
    """Encoder tokens, int32 [B, at most S]. Padding follows the first `counts` tokens of a row."""
    counts: np.ndarray
    """Number of tokens of each input, [B]."""
    targets: np.ndarray
    """Decoder targets, int32 [B, at most T]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Spans:
    """Base class of span corruption: a share of the tokens is cut in spans of a mean length.

    Raises:
        DataError: `rate` is outside of (0, 1), or `mean_span` outside of [1, 50].
    """

    name: ClassVar[str]
    draws: ClassVar[int]
    """Number of uniform random numbers per token."""
    rate: float
    mean_span: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise DataError(
                f"the noise rate is {self.rate}; write a share of the tokens in (0, 1), such as 0.3"
            )
        if not 1 <= self.mean_span <= 50:
            raise DataError(
                f"the mean span is {self.mean_span}; "
                "write a number of tokens from 1 to 50, such as 3"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Infilling(_Spans):
    """BART's text infilling, which replaces each cut span by one mask token.

    Source: Lewis et al. 2019, arXiv 1910.13461, section 2.2, and `denoising_dataset.py` of fairseq.

    Sentences are put in random order. Spans of Poisson length are cut until ceil(rate N) tokens are
    cut; the last span is shortened. One mask token replaces each span, and a span of length 0
    inserts a mask. The target is the complete text in its own order, between bos and eos.

    Spans never overlap, unlike in fairseq, where overlapping spans may cut fewer tokens. Every
    order of the spans and the remaining tokens is equally likely.
    """

    name = "infilling"
    draws = 3
    rate: float = 0.3
    """Share of the tokens that is cut."""
    mean_span: float = 3.0
    """Mean of the Poisson distribution of span lengths."""

    def lengths(self, inputs: int) -> Lengths:
        """Return the lengths for S = `inputs`: encoder and decoder hold a window, bos and eos.

        Raises:
            DataError: S is less than 3, so that no token fits.
        """
        if inputs < 3:
            raise DataError(
                f"inputs of {inputs} tokens have no room for text between bos and eos; "
                "write at least 3"
            )
        return Lengths(inputs - 2, inputs, inputs)

    def sentinels(self, tokens: int) -> int:
        """Return 0, since text infilling uses no sentinels."""
        return 0

    def __call__(
        self, tokens: np.ndarray, starts: np.ndarray, uniforms: np.ndarray, ids: SpecialIds
    ) -> CorruptedBatch:
        """Corrupt windows by text infilling and return the batch.

        Args:
            tokens: Windows, [B, N].
            starts: Mask of the tokens that begin a sentence, bool [B, N].
            uniforms: Random numbers in [0, 1), [B, 3, N].
            ids: Ids of bos, eos, mask and pad.
        """
        num_rows, length = tokens.shape
        num_cut = math.ceil(self.rate * length)
        text = permuted(tokens, starts, uniforms[:, 0])

        # Lengths of the spans of each row. They add up to `num_cut`.
        ends = np.cumsum(self.span_lengths(uniforms[:, 1, :num_cut]), axis=1)
        ends = np.minimum(ends, num_cut)
        ends[:, -1] = num_cut
        spans = np.diff(ends, axis=1, prepend=0)

        # A slot holds a remaining token or a mask. There are at most `num_cut` masks, so at most N
        # slots.
        num_masks = 1 + (ends < num_cut).sum(axis=1, keepdims=True)
        num_slots = length - num_cut + num_masks
        column = np.arange(length)
        # Columns without a slot get 2, beyond every uniform number, and sort to the end.
        order = np.argsort(np.where(column < num_slots, uniforms[:, 2], 2.0), axis=1)
        row, span = np.nonzero(column[:num_cut] < num_masks)
        slot = order[row, span]

        # A mask advances by the length of its span in the text, a token by 1.
        advance = np.ones((num_rows, length), np.int64)
        advance[row, slot] = spans[row, span]
        source = np.minimum(np.cumsum(advance, axis=1) - advance, length - 1)
        noised = np.take_along_axis(text, source, axis=1)
        noised[row, slot] = ids.mask

        padded = np.where(column < num_slots, noised, ids.pad)
        inputs = np.pad(padded, ((0, 0), (1, 1)), constant_values=(ids.bos, ids.pad))
        np.put_along_axis(inputs, num_slots + 1, ids.eos, axis=1)
        targets = np.pad(tokens, ((0, 0), (1, 1)), constant_values=(ids.bos, ids.eos))
        return CorruptedBatch(inputs, num_slots[:, 0] + 2, targets)

    def span_lengths(self, uniforms: np.ndarray) -> np.ndarray:
        """Return Poisson lengths with the mean `mean_span`, one per uniform number, by inversion.

        Args:
            uniforms: Random numbers in [0, 1), of any shape.
        """
        lengths = np.arange(_LONGEST_SPAN)
        # In logs, because factorials overflow float64 from 171 on.
        log_factorials = np.cumsum(np.log(np.maximum(lengths, 1)))
        log_powers = lengths * math.log(self.mean_span)
        probabilities = np.exp(log_powers - self.mean_span - log_factorials)
        return np.searchsorted(np.cumsum(probabilities), uniforms, side="right")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentinels(_Spans):
    """T5's span corruption, which replaces each cut span by a sentinel.

    Source: Raffel et al. 2019, arXiv 1910.10683, section 3.1.4, and `random_spans_noise_mask` of
    T5's code.

    round(rate N) tokens are cut, in round(cut tokens / mean_span) spans. Cut and remaining tokens
    are both split into that many parts; every split is equally likely. A window begins with a
    remaining part and ends with a cut part. Sentinel i replaces span i among the inputs and stands
    before span i among the targets. Inputs and targets end with eos.
    """

    name = "sentinels"
    draws = 2
    rate: float = 0.15
    """Share of the tokens that is cut."""
    mean_span: float = 3.0
    """Mean number of tokens per span."""

    def lengths(self, inputs: int) -> Lengths:
        """Return the lengths of the longest window whose corrupted inputs fit S = `inputs`.

        Follows `random_spans_helper` of T5's code (`compute_input_and_target_lengths` in other
        repositories), which leaves no padding. At a rate of 0.5 it may leave one pad on either side,
        as T5's code does.

        Raises:
            DataError: S has no room for a window of 2 tokens.
        """
        tokens = 2
        smallest = self._lengths(tokens).inputs
        if smallest > inputs:
            raise DataError(
                f"inputs of {inputs} tokens have no room for text, a sentinel and eos; "
                f"write at least {smallest}"
            )
        while self._lengths(tokens + 1).inputs <= inputs:
            tokens += 1
        lengths = self._lengths(tokens)
        if self.rate == 0.5 and lengths.targets > inputs:
            # The same exception as in T5's code: one token less, which makes inputs and targets
            # equally long.
            return Lengths(tokens - 1, inputs, lengths.targets - 1)
        return lengths

    def _lengths(self, tokens: int) -> Lengths:
        """Return the lengths that a window of some tokens has after corruption."""
        num_cut, num_spans = self.counts(tokens)
        return Lengths(tokens, tokens - num_cut + num_spans + 1, num_cut + num_spans + 1)

    def counts(self, tokens: int) -> tuple[int, int]:
        """Return the number of cut tokens and of spans of a window. Both are 0 for one token."""
        if tokens < 2:
            return 0, 0
        # At least one token is cut and one stays, as in T5's code.
        num_cut = min(max(round(tokens * self.rate), 1), tokens - 1)
        num_spans = min(max(round(num_cut / self.mean_span), 1), tokens - num_cut)
        return num_cut, num_spans

    def sentinels(self, tokens: int) -> int:
        """Return the number of sentinels that a window of some tokens uses."""
        _, num_spans = self.counts(tokens)
        return num_spans

    def __call__(
        self, tokens: np.ndarray, starts: np.ndarray, uniforms: np.ndarray, ids: SpecialIds
    ) -> CorruptedBatch:
        """Corrupt windows by sentinels and return the batch. `starts` is not used.

        Args:
            tokens: Windows, [B, N].
            uniforms: Random numbers in [0, 1), [B, 2, N].
            ids: Ids, of which `eos` and `sentinels` are used.
        """
        is_cut = self.noise_mask(tokens.shape[1], uniforms)
        inputs = _collapsed(tokens, is_cut, ids)
        targets = _collapsed(tokens, ~is_cut, ids)
        # Every row has equally many inputs.
        counts = np.full(len(tokens), inputs.shape[1])
        return CorruptedBatch(inputs, counts, targets)

    def noise_mask(self, tokens: int, uniforms: np.ndarray) -> np.ndarray:
        """Return a mask of the tokens that are cut, bool [B, N].

        Args:
            tokens: N, number of tokens per window.
            uniforms: Random numbers in [0, 1), [B, 2, N].
        """
        num_rows = len(uniforms)
        num_cut, num_spans = self.counts(tokens)
        flips = np.zeros((num_rows, tokens), np.int8)
        if num_spans:
            kept_parts = _parts(tokens - num_cut, num_spans, uniforms[:, 0])
            cut_parts = _parts(num_cut, num_spans, uniforms[:, 1])
            # Kept and cut parts alternate, a kept part first.
            parts = np.stack([kept_parts, cut_parts], axis=2).reshape(num_rows, 2 * num_spans)
            bounds = np.cumsum(parts, axis=1)
            np.put_along_axis(flips, bounds[:, :-1], 1, axis=1)
        return np.cumsum(flips, axis=1) % 2 == 1


Noise = Infilling | Sentinels
NOISES: dict[str, type[Infilling | Sentinels]] = {"infilling": Infilling, "sentinels": Sentinels}


def permuted(tokens: np.ndarray, starts: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return the tokens with the sentences of every row in random order, [B, N].

    Every order is equally likely.

    Args:
        tokens: Windows, [B, N].
        starts: Mask of the tokens that begin a sentence, bool [B, N]. The first token of each row
            begins one.
        uniforms: Random numbers in [0, 1), [B, N].
    """
    sentence = np.cumsum(starts, axis=1) - starts[:, :1]
    keys = np.take_along_axis(uniforms, sentence, axis=1)
    # A stable sort keeps the tokens of a sentence in order.
    order = np.argsort(keys, axis=1, kind="stable")
    return np.take_along_axis(tokens, order, axis=1)


def _parts(items: int, count: int, uniforms: np.ndarray) -> np.ndarray:
    """Return a random split of some items into parts of at least one item, lengths [B, count].

    Every split is equally likely.

    Args:
        items: Number of items, at least `count`.
        uniforms: Random numbers in [0, 1), [B, N] with N of at least items - 1.
    """
    shuffled = np.argsort(uniforms[:, : items - 1], axis=1)
    cuts = np.sort(shuffled[:, : count - 1] + 1, axis=1)
    return np.diff(cuts, axis=1, prepend=0, append=items)


def _collapsed(tokens: np.ndarray, runs: np.ndarray, ids: SpecialIds) -> np.ndarray:
    """Return the tokens with sentinel i in place of run i, and eos at the end.

    Args:
        tokens: Windows, [B, N].
        runs: Mask of the tokens that are replaced, bool [B, N]. Every row has equally many tokens
            left and equally many runs.
        ids: Ids, of which `eos` and `sentinels` are used.
    """
    begins = runs & ~np.pad(runs[:, :-1], ((0, 0), (1, 0)))
    # The 0 is for a window of one token, which has no run to replace.
    sentinels = np.asarray((*ids.sentinels, 0))
    run = np.cumsum(begins, axis=1) - 1
    marked = np.where(begins, sentinels[run], tokens)
    collapsed = marked[~runs | begins].reshape(len(tokens), -1)
    return np.pad(collapsed, ((0, 0), (0, 1)), constant_values=ids.eos)
