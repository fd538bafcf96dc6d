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
"""Number of span lengths, from 0 on, for which Poisson probabilities are computed.

With a mean of at most 50, longer spans have a probability below 1e-16.
"""


class Lengths(NamedTuple):
    """Lengths of the arrays of a batch, which are the same for all batches of a run."""

    tokens: int
    """N, number of tokens of a window of text before corruption."""
    inputs: int
    """S, number of encoder positions."""
    targets: int
    """T, number of decoder positions."""


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
    """Base class of span corruption: a share of a text's tokens is cut out, in spans.

    Attributes:
        name: Name of the kind of corruption, as data.noise takes it.
        rate: Share of the tokens that is cut out.
        mean_span: Mean number of tokens of a span.

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

    Of a window of N tokens, sentences are first put in random order. Then spans of Poisson length
    are cut out, until ceil(rate N) tokens are cut. The last span is shortened to fit. One mask
    token replaces each span, and a span of length 0 inserts a mask token. The target is the
    complete text in its own order, between bos and eos.

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
        """Return the lengths of window, encoder and decoder for S = `inputs` encoder positions.

        Encoder and decoder have room for a complete window with bos and eos, S tokens each.

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
            uniforms: Random numbers in [0, 1), [B, 3, N]. They choose the order of sentences, the
                lengths of spans and the places of spans.
            ids: Special ids, of which bos, eos, mask and pad are used.
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
        """Return random span lengths, Poisson distributed with the mean `mean_span`.

        Each uniform number gives one length, by inversion of the distribution function.

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

    Of a window of N tokens, round(rate N) are cut out, in round(cut tokens / mean_span) spans. The
    remaining tokens form as many pieces as there are spans. Pieces and spans alternate, a piece
    first. Their lengths are random, and every choice of lengths is equally likely. Sentinel i
    replaces span i among the inputs, and stands before span i among the targets. Inputs and targets
    end with eos.
    """

    name = "sentinels"
    draws = 2
    rate: float = 0.15
    """Share of the tokens that is cut."""
    mean_span: float = 3.0
    """Mean number of tokens per span."""

    def lengths(self, inputs: int) -> Lengths:
        """Return the lengths of window, encoder and decoder for S = `inputs` encoder positions.

        The window is the longest whose corrupted inputs fit into S. This follows
        `random_spans_helper` of T5's code (`compute_input_and_target_lengths` in other
        repositories), which leaves no padding. At a rate of 0.5, inputs and targets may have one
        pad each, as in T5's code.

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
        """Return the lengths of inputs and targets that a window of `tokens` tokens has."""
        num_cut, num_spans = self.counts(tokens)
        return Lengths(tokens, tokens - num_cut + num_spans + 1, num_cut + num_spans + 1)

    def counts(self, tokens: int) -> tuple[int, int]:
        """Return how many tokens of a window are cut out, and in how many spans.

        Both numbers are 0 for a window of one token.

        Args:
            tokens: N, number of tokens of the window.
        """
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
        """Corrupt windows by sentinels and return the batch.

        Args:
            tokens: Windows, [B, N].
            starts: Not used, because sentence boundaries do not matter here.
            uniforms: Random numbers in [0, 1), [B, 2, N], which choose the lengths of the remaining
                pieces and of the spans.
            ids: Special ids, of which `eos` and `sentinels` are used.
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
            uniforms: Random numbers in [0, 1), [B, 2, N], as for `__call__`.
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
        uniforms: Random numbers in [0, 1), [B, N]. The first number of row b orders the first
            sentence of row b, and so on.
    """
    sentence = np.cumsum(starts, axis=1) - starts[:, :1]
    keys = np.take_along_axis(uniforms, sentence, axis=1)
    # A stable sort keeps the tokens of a sentence in order.
    order = np.argsort(keys, axis=1, kind="stable")
    return np.take_along_axis(tokens, order, axis=1)


def _parts(items: int, count: int, uniforms: np.ndarray) -> np.ndarray:
    """Return random positive lengths that add up to a number, int [B, count].

    Every choice of lengths is equally likely.

    Args:
        items: Sum of the lengths of a row, at least `count`.
        count: Number of lengths in a row, at least 1.
        uniforms: Random numbers in [0, 1), [B, N] with N of at least items - 1.
    """
    shuffled = np.argsort(uniforms[:, : items - 1], axis=1)
    cuts = np.sort(shuffled[:, : count - 1] + 1, axis=1)
    return np.diff(cuts, axis=1, prepend=0, append=items)


def _collapsed(tokens: np.ndarray, runs: np.ndarray, ids: SpecialIds) -> np.ndarray:
    """Replace each run of masked tokens by a sentinel, append eos, and return the shorter windows.

    Args:
        tokens: Windows, [B, N].
        runs: Mask of the tokens that are replaced, bool [B, N]. Run i of successive masked tokens
            is replaced by sentinel i. Every row has equally many runs, and equally many tokens
            outside of them.
        ids: Special ids, of which `eos` and `sentinels` are used.
    """
    begins = runs & ~np.pad(runs[:, :-1], ((0, 0), (1, 0)))
    # The 0 is for a window of one token, which has no run to replace.
    sentinels = np.asarray((*ids.sentinels, 0))
    run = np.cumsum(begins, axis=1) - 1
    marked = np.where(begins, sentinels[run], tokens)
    collapsed = marked[~runs | begins].reshape(len(tokens), -1)
    return np.pad(collapsed, ((0, 0), (0, 1)), constant_values=ids.eos)
