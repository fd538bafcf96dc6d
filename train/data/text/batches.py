"""Batches of packed text, in windows of seq_len + 1 tokens.

Shapes: B examples, T = seq_len positions, V vocabulary.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mupax.terminal import counted
from mupax.train.data import interface
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError, Reference
from mupax.train.data.text.packing import PackedCorpus
from mupax.train.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

_COUNTED_WINDOWS = 1024
"""Number of windows that are counted at once, to save memory."""
_COUNTED_TOKENS = 1 << 20
"""Number of tokens that are counted at once, to save memory."""


class Counted(NamedTuple):
    """Number of targets of some evaluation examples, and the size of their text.

    Attributes:
        targets: Number of predicted tokens that count in the loss.
    """

    targets: int
    text_bytes: float
    """Bytes of text of these targets. The end of a document counts as one byte."""


class TextWindows(Data):
    """Base class of text data whose examples are windows of T + 1 successive tokens.

    The evaluation text is cut into windows from token 0 on, such that every token but the first is
    predicted once. The windows come in a fixed shuffled order, so the first few are a fair sample.
    Subclasses make the training windows.

    Args:
        config: Configuration with the batch sizes and the masks.
        eval_: Packed evaluation text, from which evaluation windows are cut.
        tokenizer: Tokenizer that made the tokens.
        seq_len: T, number of tokens predicted per window.
        facts: Further facts to record about the corpus.
        train_size: Number of windows per epoch. `None` for a stream.
        has_bytes: True if the corpus was made from text. False if any of the corpus was made from
            ids, whose bytes are unknown.

    Raises:
        DataError: The evaluation text is too short.
    """

    kind = "tokens"
    _eval_targets: np.ndarray | None = None
    """Mask of the evaluation tokens that count in the loss, bool [count]. `None` if all do."""

    def __init__(
        self,
        config: DataConfig,
        eval_: PackedCorpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        facts: dict[str, Any],
        train_size: int | None,
        has_bytes: bool,
    ) -> None:
        check_length(config, "evaluation", len(eval_.tokens), 2, seq_len)
        windows = _num_windows(eval_.tokens, seq_len)
        eval_facts: dict[str, Any] = {
            "tokenizer": tokenizer.key,
            "eval_tokens": len(eval_.tokens),
        }
        if has_bytes:
            eval_facts["eval_bytes"] = eval_.text_bytes

        super().__init__(
            config,
            facts={**facts, **eval_facts},
            train_size=train_size,
            eval_size=windows,
            tokenizer=tokenizer,
            bytes_per_token=None,
        )
        self._eval = eval_.tokens
        self._seq_len = seq_len
        self._eval_bytes = eval_.text_bytes
        self._windows = windows
        # Seed 0: the evaluation examples must not depend on the run's seed.
        self._eval_shuffle = interface.Shuffle(windows, 0, interface.EVALUATION)
        if has_bytes and tokenizer.key == "bytes":
            self.bytes_per_token = 1.0
        elif has_bytes:
            counted = self.counted(self.eval_size)
            self.bytes_per_token = counted.text_bytes / max(counted.targets, 1)

    @abc.abstractmethod
    def train_windows(self, indices: Iterable[int]) -> np.ndarray:
        """Return the tokens of training examples, int32 [B, T + 1].

        Args:
            indices: B numbers of examples, counted from the start of the run and on through all
                epochs.
        """

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        return self.train_examples(interface.batch_indices(k, self.batch_size, rows))

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        return self.eval_examples_of(interface.batch_indices(j, self.eval_batch_size, rows))

    def train_examples(self, indices: Iterable[int]) -> Batch:
        """Return training examples as a batch.

        Args:
            indices: B numbers of examples, counted from the start of the run and on through all
                epochs.
        """
        tokens = self.train_windows(indices)
        return self.batch_of(tokens, np.ones_like(tokens[:, 1:], np.float32))

    def eval_examples_of(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return evaluation examples as a batch. Examples past the last one have weight 0.

        Args:
            indices: Numbers of evaluation examples from 0, in any order, [B].
        """
        return self.batch_of(*self.eval_windows(indices))

    def eval_windows(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return evaluation windows, int32 [B, T + 1], and their weights, float32 [B, T].

        Examples past the last one have tokens 0 and weights 0.

        Args:
            indices: Numbers of evaluation examples from 0, in any order, [B].
        """
        tokens = np.zeros((len(indices), self._seq_len + 1), np.int32)
        weights = np.zeros((len(indices), self._seq_len), np.float32)
        rows = [row for row, i in enumerate(indices) if i < self.eval_size]
        _, windows = self._eval_shuffle(indices[row] for row in rows)

        for row, window in zip(rows, windows, strict=True):
            start = window * self._seq_len
            # The last window of the text may have fewer tokens than the others.
            ids = self._eval[start : start + self._seq_len + 1]
            num_targets = len(ids) - 1
            tokens[row, : len(ids)] = ids
            weights[row, :num_targets] = 1.0
            if self._eval_targets is not None:
                first = start + 1
                weights[row, :num_targets] = self._eval_targets[first : first + num_targets]
        return tokens, weights

    def begin_documents(self) -> None:
        """Insert the tokenizer's start tokens (bos) before every evaluation document, in memory.

        The inserted tokens do not count in the loss, and all tokens of the text do. Windows, their
        order, the number of examples and the bytes per token are computed anew. Nothing changes for
        a tokenizer without start tokens. Call this once: a second call would insert the tokens
        again.
        """
        # Published models were trained on documents that begin with these tokens.
        begin = self.tokenizer.start
        if not len(begin):
            return

        separator = self.tokenizer.separator
        ids = np.asarray(self._eval).astype(np.int32)
        # The last id is left out: if it is a separator, no document follows it.
        starts = np.append(0, np.flatnonzero(ids[:-1] == separator) + 1)
        if begin.tolist() == [separator]:
            # The separator that ends a document begins the next one already.
            starts = starts[:1]
        positions = np.repeat(starts, len(begin))
        self._eval = np.insert(ids, positions, np.tile(begin, len(starts)))
        self._eval_targets = np.insert(np.ones(len(ids), bool), positions, False)

        windows = _num_windows(self._eval, self._seq_len)
        self.eval_size = min(windows, self.config.eval_examples or windows)
        self._eval_shuffle = interface.Shuffle(windows, 0, interface.EVALUATION)
        self._windows = windows
        if self.bytes_per_token is not None and self.tokenizer.key != "bytes":
            counted = self.counted(self.eval_size)
            self.bytes_per_token = counted.text_bytes / max(counted.targets, 1)

    def batch_of(self, tokens: np.ndarray, weights: np.ndarray) -> Batch:
        """Return windows as a batch with `inputs`, `targets` and `weights`, [B, T] each.

        With `data.document_mask`, the batch has `segments` [B, T], too: the number of the document
        of each input within its window, from 0. The weight of a target that begins a document is
        then 0. With `data.reset_positions`, the batch also has `positions` [B, T], which count from
        the beginning of each document.

        Args:
            tokens: Windows, int32 [B, T + 1].
            weights: Weights of the targets, float32 [B, T].
        """
        inputs = tokens[:, :-1]
        batch = {"inputs": inputs, "targets": tokens[:, 1:], "weights": weights}
        if not self.config.document_mask:
            return batch

        # A separator belongs to the document that it ends, and is a target. The token after a
        # separator is no target, since nothing is known of the next document.
        ends = inputs == self.tokenizer.separator
        segments = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        batch["weights"] = weights * ~ends
        batch["segments"] = segments
        if self.config.reset_positions:
            columns = np.arange(inputs.shape[1], dtype=np.int32)
            begins = np.diff(segments, axis=1, prepend=-1) > 0
            document_starts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
            batch["positions"] = columns - document_starts
        return batch

    def counted(self, examples: int) -> Counted:
        """Count the targets of the first evaluation examples and the bytes of their text.

        The bytes of tokens (`token_bytes`) are scaled so that all evaluation tokens together have
        the bytes of the evaluation text. The result is exact if this scale is 1, and otherwise an
        estimate.

        Args:
            examples: Number of evaluation examples.
        """
        sizes = self.tokenizer.token_bytes()
        # The separator stands for the end of a document, which counts one byte.
        sizes[self.tokenizer.separator] = 1
        spaces = self._spaces_before_text()
        text_bytes = 0
        targets = 0
        target_bytes = 0
        # The text begins as if a document had ended before it.
        last_id = self.tokenizer.separator
        for start in range(0, len(self._eval), _COUNTED_TOKENS):
            ids = np.asarray(self._eval[start : start + _COUNTED_TOKENS])
            previous = np.append(last_id, ids[:-1])
            begins = np.isin(previous, self._before_documents())
            token_bytes = sizes[ids] - np.where(begins, spaces[ids], 0)
            counts = np.ones(len(ids), bool)
            if self.config.document_mask:
                counts = previous != self.tokenizer.separator
            if self._eval_targets is not None:
                is_text = self._eval_targets[start : start + len(ids)]
                token_bytes = np.where(is_text, token_bytes, 0)
                counts &= is_text
            if start == 0:
                counts[0] = False  # the first token of the text has no context
            text_bytes += int(token_bytes.sum())
            targets += int(counts.sum())
            target_bytes += int(token_bytes[counts].sum())
            last_id = ids[-1]

        # The examples in use are spread over the text, so their windows are counted one by one.
        if examples < self._windows:
            targets, target_bytes = self._counted_of(examples, sizes, spaces)
        return Counted(targets, target_bytes * self._eval_bytes / max(text_bytes, 1))

    def _counted_of(self, examples: int, sizes: np.ndarray, spaces: np.ndarray) -> Counted:
        """Count the targets of the first evaluation examples and the bytes of these tokens.

        The bytes are not scaled to those of the text (`counted`).

        Args:
            examples: Number of evaluation examples.
            sizes: Bytes of each id, [V].
            spaces: Number of bytes, 0 or 1, that an id has less as the first token of a document,
                [V] (`_spaces_before_text`).
        """
        num_targets = 0
        text_bytes = 0
        for start in range(0, examples, _COUNTED_WINDOWS):
            stop = min(start + _COUNTED_WINDOWS, examples)
            batch = self.eval_examples_of(range(start, stop))
            targets = batch["targets"]
            counts = batch["weights"] > 0
            begins = counts & np.isin(batch["inputs"], self._before_documents())
            num_targets += int(counts.sum())
            text_bytes += int(sizes[targets[counts]].sum()) - int(spaces[targets[begins]].sum())
        return Counted(num_targets, text_bytes)

    def _before_documents(self) -> list[int]:
        """Return the ids after which a document begins: the separator, and start tokens in use."""
        if self._eval_targets is None:
            return [self.tokenizer.separator]
        return [self.tokenizer.separator, *self.tokenizer.start.tolist()]

    def _spaces_before_text(self) -> np.ndarray:
        """Return the bytes that each id has less as the first token of a document, int64 [V].

        Some tokenizers put a space before a document, so that its first token begins with a space
        that the text does not have. With such a tokenizer, ids that begin with a space have 1. All
        others have 0.
        """
        spaces = np.zeros(self.tokenizer.vocab_size, np.int64)
        if self.tokenizer.adds_space:
            pieces = self.tokenizer.pieces()
            spaces[[i for i, piece in enumerate(pieces) if piece.startswith(" ")]] = 1
        return spaces

    def eval_targets(self) -> np.ndarray:
        """Return a mask of the tokens of the evaluation text that are predicted, bool [count].

        These are the targets of the evaluation examples in use. The first token of the text is
        never predicted. Under `data.document_mask`, neither is the first token of every document.
        """
        mask = np.zeros(len(self._eval), bool)
        _, windows = self._eval_shuffle(range(self.eval_size))
        for window in windows:
            first = window * self._seq_len + 1
            mask[first : first + self._seq_len] = True
        if self.config.document_mask:
            mask[1:] &= self._eval[:-1] != self.tokenizer.separator
        return mask


class TokenData(TextWindows):
    """Batches of a packed corpus, cut into windows of T + 1 tokens, each once per epoch.

    Every epoch starts to cut the text at another token, which is a function of seed and epoch. So a
    text that is repeated often is cut into other windows every time.

    Args:
        config: Configuration with the batch sizes and the masks.
        train: Packed training text of N tokens. An epoch has (N - T) // T windows.
        eval_: Packed evaluation text, from which evaluation windows are cut.
        tokenizer: Tokenizer that made the tokens.
        seq_len: T, number of tokens predicted per window.
        seed: Seed of the order of windows, and of the tokens at which epochs start to cut.
        facts: Further facts to record about the corpus.
        has_bytes: True if the corpus was made from text. False if any of the corpus was made from
            ids, whose bytes are unknown.

    Raises:
        DataError: The training text has fewer than 2 T tokens, or the evaluation text fewer than 2.
    """

    def __init__(
        self,
        config: DataConfig,
        train: PackedCorpus,
        eval_: PackedCorpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        seed: int,
        facts: dict[str, Any],
        has_bytes: bool = True,
    ) -> None:
        check_length(config, "training", len(train.tokens), 2 * seq_len, seq_len)
        # The offset of an epoch may take up to T - 1 tokens, and the last target takes one.
        size = (len(train.tokens) - seq_len) // seq_len
        counts = {"train_tokens": len(train.tokens)}
        if has_bytes:
            counts["train_bytes"] = train.text_bytes

        super().__init__(
            config,
            eval_,
            tokenizer,
            seq_len=seq_len,
            facts={**facts, **counts},
            train_size=size,
            has_bytes=has_bytes,
        )
        self._train = train.tokens
        self._seed = seed
        self._shuffle = interface.Shuffle(size, seed)

    def train_windows(self, indices: Iterable[int]) -> np.ndarray:
        """Return the tokens of training examples, int32 [B, T + 1], as `TextWindows` describes."""
        epochs, windows = self._shuffle(indices)
        starts = []
        for epoch, window in zip(epochs, windows, strict=True):
            starts.append(self._offset(int(epoch)) + window * self._seq_len)
        tokens = np.empty((len(starts), self._seq_len + 1), np.int32)
        for row, start in zip(tokens, starts, strict=True):
            row[:] = self._train[start : start + self._seq_len + 1]
        return tokens

    @functools.lru_cache(maxsize=4)  # noqa: B019  the data lives as long as the run
    def _offset(self, epoch: int) -> int:
        """Return the index of the token at which an epoch starts to cut the text, in [0, T)."""
        rng = interface.rng(self._seed, interface.WINDOWS, epoch)
        return int(rng.integers(self._seq_len))

    def references(self) -> list[Reference]:
        # The reference models count n-grams of bytes, so other tokens have no reference.
        if self.facts["tokenizer"] != "bytes":
            return []
        from mupax.train.data.text import ngrams

        digest = str(self.facts["digest"])
        return ngrams.references(self._train, self._eval, self.eval_targets(), digest)


def _num_windows(tokens: np.ndarray, seq_len: int) -> int:
    """Return the number of windows that predict every token of a text but the first once."""
    return -(-(len(tokens) - 1) // seq_len)


def check_length(config: DataConfig, side: str, count: int, least: int, seq_len: int) -> None:
    """Raise an error for a text that has too few tokens.

    Args:
        config: Configuration with the name of the text.
        side: "training" or "evaluation", which the error message names.
        count: Number of tokens of the text.
        least: Smallest number of tokens that is accepted.
        seq_len: Sequence length of the model, for the message.

    Raises:
        DataError: `count` is less than `least`.
    """
    if count < least:
        advice = "Give more text (text files are split by file, records by their content)"
        # A text of fewer than two tokens is too short for every sequence length.
        if least > 2:
            advice += ", or a smaller model.seq_len"
        raise DataError(
            f"the {side} text of {config.name} has {counted(count, 'token', ',')}; "
            f"sequences of {seq_len} need at least {least:,}. {advice}"
        )
