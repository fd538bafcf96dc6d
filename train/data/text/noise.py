"""Span denoising of windows of text: BART's text infilling and T5's sentinels, as operations on whole batches of arrays.

B windows of N tokens each. Random numbers come in as uniforms [B, draws, N]: who draws them says what the noise depends on.
Both cut a fixed share of the tokens, in spans; what is left in their place, and what is to be predicted, differs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import numpy as np

from mupax.train.data.interface import DataError
from mupax.train.data.text.vocabulary import SpecialIds

_LONGEST_SPAN = 200
"""Of a Poisson span: with a mean of at most 50, longer ones have a probability below 1e-16."""


class Lengths(NamedTuple):
    """Static lengths of a batch."""

    tokens: int
    """Of the window that the noise is put on."""
    inputs: int
    """Encoder positions, S."""
    targets: int
    """Decoder positions, T."""


class CorruptedBatch(NamedTuple):
    """Batch of B windows of which spans are corrupted."""

    inputs: np.ndarray
    """Int32 [B, at most S]; behind `counts` stands padding."""
    counts: np.ndarray
    """Tokens of each input, [B]."""
    targets: np.ndarray
    """Int32 [B, at most T]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Spans:
    """A share of the tokens in spans of a mean length."""

    name: ClassVar[str]
    draws: ClassVar[int]
    """Uniform numbers per token."""
    rate: float
    mean_span: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise DataError(
                f"the noise rate is {self.rate}; write a share of the tokens in (0, 1), such as 0.3"
            )
        if not 1 <= self.mean_span <= 50:
            raise DataError(
                f"the mean span is {self.mean_span}; write a number of tokens from 1 to 50, such as 3"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Infilling(_Spans):
    """BART's text infilling (Lewis et al. 2019, arXiv 1910.13461, section 2.2; its code in fairseq, `denoising_dataset.py`).

    Sentences are put in random order. Then spans of Poisson length are cut, the last one shortened, until ceil(rate N)
    tokens are; one mask stands for each span, and for a span of no tokens one is inserted. Here spans never overlap, so that
    exactly so many tokens are cut, and all orders of spans and tokens left are alike; fairseq's spans may run into each other
    and cut fewer. The target is the whole text in its own order, between bos and eos.
    """

    name = "infilling"
    draws = 3
    rate: float = 0.3
    """Share of tokens cut."""
    mean_span: float = 3.0
    """Mean of the Poisson distribution."""

    def lengths(self, inputs: int) -> Lengths:
        """Lengths of S = `inputs` encoder positions: both sides hold a whole window, bos and eos.

        Raises:
            DataError: that is no room for a token.
        """
        if inputs < 3:
            raise DataError(
                f"inputs of {inputs} tokens have no room for text between bos and eos; write at least 3"
            )
        return Lengths(inputs - 2, inputs, inputs)

    def sentinels(self, tokens: int) -> int:
        """Sentinels in use: none."""
        return 0

    def __call__(
        self, tokens: np.ndarray, starts: np.ndarray, uniforms: np.ndarray, ids: SpecialIds
    ) -> CorruptedBatch:
        """Windows with noise.

        Args:
            tokens: [B, N].
            starts: where a sentence begins, bool [B, N].
            uniforms: in [0, 1), [B, 3, N].
            ids: of bos, eos, mask and pad.
        """
        rows, length = tokens.shape
        cut = math.ceil(self.rate * length)
        text = permuted(tokens, starts, uniforms[:, 0])
        ends = np.minimum(np.cumsum(self.span_lengths(uniforms[:, 1, :cut]), axis=1), cut)
        ends[:, -1] = cut
        spans = np.diff(ends, axis=1, prepend=0)
        masks = 1 + (ends < cut).sum(axis=1, keepdims=True)
        slots = (
            length - cut + masks
        )  # what is left and the masks; at most N, as there are at most `cut` masks
        column = np.arange(length)
        order = np.argsort(np.where(column < slots, uniforms[:, 2], 2.0), axis=1)
        row, span = np.nonzero(column[:cut] < masks)
        slot = order[row, span]
        advance = np.ones((rows, length), np.int64)
        advance[row, slot] = spans[row, span]
        source = np.minimum(np.cumsum(advance, axis=1) - advance, length - 1)
        noised = np.take_along_axis(text, source, axis=1)
        noised[row, slot] = ids.mask
        inputs = np.pad(
            np.where(column < slots, noised, ids.pad),
            ((0, 0), (1, 1)),
            constant_values=(ids.bos, ids.pad),
        )
        np.put_along_axis(inputs, slots + 1, ids.eos, axis=1)
        targets = np.pad(tokens, ((0, 0), (1, 1)), constant_values=(ids.bos, ids.eos))
        return CorruptedBatch(inputs, slots[:, 0] + 2, targets)

    def span_lengths(self, uniforms: np.ndarray) -> np.ndarray:
        """Poisson lengths by inversion, one per uniform."""
        k = np.arange(_LONGEST_SPAN)
        log_factorial = np.cumsum(np.log(np.maximum(k, 1)))
        cumulative = np.cumsum(
            np.exp(k * math.log(self.mean_span) - self.mean_span - log_factorial)
        )
        return np.searchsorted(cumulative, uniforms, side="right")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentinels(_Spans):
    """T5's span corruption (Raffel et al. 2019, arXiv 1910.10683, section 3.1.4; `random_spans_noise_mask` of its code).

    round(rate N) tokens are cut in round(that / mean_span) spans; what is cut and what is left are each split into that
    many parts, all splits alike, beginning with what is left and ending with what is cut. Sentinel i stands for span i
    among the inputs, and before it among the targets; both end with eos.
    """

    name = "sentinels"
    draws = 2
    rate: float = 0.15
    """Share of tokens cut."""
    mean_span: float = 3.0
    """Tokens cut per span."""

    def lengths(self, inputs: int) -> Lengths:
        """The longest window of which S = `inputs` encoder positions hold what is left, and how long that and the targets are.

        As `random_spans_helper` of T5's code (`compute_input_and_target_lengths` elsewhere), which leaves no padding.

        Raises:
            DataError: that is no room for a token on each side.
        """
        tokens = 2
        if self._lengths(tokens).inputs > inputs:
            least = self._lengths(tokens).inputs
            raise DataError(
                f"inputs of {inputs} tokens have no room for text, a sentinel and eos; write at least {least}"
            )
        while self._lengths(tokens + 1).inputs <= inputs:
            tokens += 1
        lengths = self._lengths(tokens)
        if (
            self.rate == 0.5 and lengths.targets > inputs
        ):  # both sides as long: T5's own exception, at most a pad each
            return Lengths(tokens - 1, inputs, lengths.targets - 1)
        return lengths

    def _lengths(self, tokens: int) -> Lengths:
        cut, spans = self.counts(tokens)
        return Lengths(tokens, tokens - cut + spans + 1, cut + spans + 1)

    def counts(self, tokens: int) -> tuple[int, int]:
        """(tokens cut, spans) of a window; none of a window of one token."""
        if tokens < 2:
            return 0, 0
        cut = min(max(round(tokens * self.rate), 1), tokens - 1)
        return cut, min(max(round(cut / self.mean_span), 1), tokens - cut)

    def sentinels(self, tokens: int) -> int:
        """Sentinels in use for a window of so many tokens."""
        return self.counts(tokens)[1]

    def __call__(
        self, tokens: np.ndarray, starts: np.ndarray, uniforms: np.ndarray, ids: SpecialIds
    ) -> CorruptedBatch:
        """Windows with noise.

        Args:
            tokens: [B, N].
            starts: not read: sentences stay where they are.
            uniforms: in [0, 1), [B, 2, N].
            ids: of eos and sentinels.
        """
        cut = self.noise_mask(tokens.shape[1], uniforms)
        inputs, targets = (_collapsed(tokens, runs, ids) for runs in (cut, ~cut))
        return CorruptedBatch(inputs, np.full(len(tokens), inputs.shape[1]), targets)

    def noise_mask(self, tokens: int, uniforms: np.ndarray) -> np.ndarray:
        """Which tokens are cut, bool [B, N].

        Args:
            tokens: N.
            uniforms: in [0, 1), [B, 2, N].
        """
        cut, spans = self.counts(tokens)
        flips = np.zeros((len(uniforms), tokens), np.int8)
        if spans:
            parts = [
                _parts(tokens - cut, spans, uniforms[:, 0]),
                _parts(cut, spans, uniforms[:, 1]),
            ]
            bounds = np.cumsum(np.stack(parts, axis=2).reshape(len(uniforms), 2 * spans), axis=1)
            np.put_along_axis(flips, bounds[:, :-1], 1, axis=1)
        return np.cumsum(flips, axis=1) % 2 == 1


Noise = Infilling | Sentinels
NOISES: dict[str, type[Infilling | Sentinels]] = {"infilling": Infilling, "sentinels": Sentinels}


def permuted(tokens: np.ndarray, starts: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """The tokens with the sentences of every row in random order, all orders alike.

    Args:
        tokens: [B, N].
        starts: where a sentence begins, bool [B, N]; the first token of a row is the start of one.
        uniforms: in [0, 1), [B, N].
    """
    sentence = np.cumsum(starts, axis=1) - starts[:, :1]
    keys = np.take_along_axis(uniforms, sentence, axis=1)
    return np.take_along_axis(tokens, np.argsort(keys, axis=1, kind="stable"), axis=1)


def _parts(items: int, count: int, uniforms: np.ndarray) -> np.ndarray:
    """Lengths of `count` parts of at least one item, all splits alike, [B, count]."""
    cuts = np.sort(np.argsort(uniforms[:, : items - 1], axis=1)[:, : count - 1] + 1, axis=1)
    return np.diff(cuts, axis=1, prepend=0, append=items)


def _collapsed(tokens: np.ndarray, runs: np.ndarray, ids: SpecialIds) -> np.ndarray:
    """The tokens with sentinel i in place of run i, as many in every row, and eos at the end."""
    first = runs & ~np.pad(runs[:, :-1], ((0, 0), (1, 0)))
    sentinels = np.asarray((*ids.sentinels, 0))  # a window of one token has no run to replace
    marked = np.where(first, sentinels[np.cumsum(first, axis=1) - 1], tokens)
    short = marked[~runs | first].reshape(len(tokens), -1)
    return np.pad(short, ((0, 0), (0, 1)), constant_values=ids.eos)
