"""Batches of packed text, in windows of seq_len + 1 tokens.

Shapes: B examples, T = seq_len positions, V vocabulary.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mupax.train.data import interface
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError, Reference
from mupax.train.data.text.packing import PackedCorpus
from mupax.train.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

_COUNTED_WINDOWS = 1024
"""Windows per block while the bytes of targets are counted."""
_COUNTED_TOKENS = 1 << 20
"""Tokens per block while the bytes of targets are counted."""


class Counted(NamedTuple):
    """Number of targets of some evaluation examples, and the size of their text."""

    targets: int
    text_bytes: float
    """Bytes of text of these targets. The end of a document counts as one byte."""


class TextWindows(Data):
    """Base class of windows of text. Evaluation windows are cut from a packed text.

    Evaluation windows start at token 0 and follow one another, so every token but the first is
    predicted once. The windows come in a fixed shuffled order, so the first few are a fair sample.

    Args:
        config: Configuration with the batch sizes and the masks.
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
    """Mask of the evaluation tokens that are targets, bool [count]. `None` if all are targets."""

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
        """Return training windows, int32 [B, T + 1].

        Args:
            indices: Numbers of the examples. They count from the start of the run through all
                epochs, [B].
        """

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        return self.train_examples(interface.batch_indices(k, self.batch_size, rows))

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        return self.eval_examples_of(interface.batch_indices(j, self.eval_batch_size, rows))

    def train_examples(self, indices: Iterable[int]) -> Batch:
        """Return the batch of training examples with these numbers (`train_windows`)."""
        tokens = self.train_windows(indices)
        return self.batch_of(tokens, np.ones_like(tokens[:, 1:], np.float32))

    def eval_examples_of(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return a batch of evaluation examples. Those past the last one have weight 0.

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

        The inserted tokens are no targets, and every token of the text is one. Windows, their
        order, the number of examples and the bytes per token are computed anew. Nothing changes for
        a tokenizer without start tokens. Call this once: a second call would insert them again.
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
        """Return the batch of some windows: inputs, targets and weights, [B, T] each.

        `data.document_mask` adds `segments`, the number of the document within its window. It also
        sets the weight of the first token of a document to 0. `data.reset_positions` then adds
        `positions`, which count from the beginning of the document.

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

        The bytes are exact if the vocabulary spells its text. Otherwise the bytes are scaled, so
        that all evaluation tokens together have the bytes of the evaluation text.

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
        """Return the number of targets of the first evaluation examples, and their unscaled bytes.

        Args:
            examples: Number of evaluation examples.
            sizes: Bytes of each id, [V].
            spaces: 1 for ids with a space that the first token of a document does not have, [V].
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
        """Return the ids that may stand directly before the first token of a document."""
        if self._eval_targets is None:
            return [self.tokenizer.separator]
        return [self.tokenizer.separator, *self.tokenizer.start.tolist()]

    def _spaces_before_text(self) -> np.ndarray:
        """Return 1 for ids whose leading space the tokenizer adds to a document, int64 [V].

        All are 0 for a tokenizer that adds no space. Otherwise ids that begin with a space have 1.
        """
        spaces = np.zeros(self.tokenizer.vocab_size, np.int64)
        if self.tokenizer.adds_space:
            pieces = self.tokenizer.pieces()
            spaces[[i for i, piece in enumerate(pieces) if piece.startswith(" ")]] = 1
        return spaces

    def eval_targets(self) -> np.ndarray:
        """Return a mask of the evaluation tokens that are predicted, bool [eval_tokens].

        These are the targets of the evaluation examples in use, without the first token of the
        text. Under `data.document_mask`, the first token of every document is not predicted either.
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
    """Windows of a packed corpus, every window once per epoch.

    Every epoch cuts the text at another offset, which is a function of seed and epoch. So a text
    that is repeated often is cut into other windows, with other tokens at their starts.

    Args:
        config: Configuration with the batch sizes and the masks.
        train: Packed training text of N tokens. An epoch has (N - T) // T windows.
        tokenizer: Tokenizer that made the tokens.
        seq_len: T, number of tokens predicted per window.
        seed: Seed of the order and of the offsets.
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
        """Return training windows by their numbers, int32 [B, T + 1]."""
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
        """Return the first token of the first window of an epoch, in [0, T)."""
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
    """Return the number of windows that predict every token but the first once."""
    return -(-(len(tokens) - 1) // seq_len)


def check_length(config: DataConfig, side: str, count: int, least: int, seq_len: int) -> None:
    """Raise an error for a text that is too short for one window.

    Args:
        config: Configuration with the name of the text.
        side: Name of the side of the split, for the message.
        count: Number of tokens of the text.
        least: Smallest number of tokens that is accepted.
        seq_len: Sequence length of the model, for the message.

    Raises:
        DataError: `count` is less than `least`.
    """
    if count < least:
        raise DataError(
            f"the {side} text of {config.name} has {count:,} tokens; "
            f"sequences of {seq_len} need at least {least:,}. Give more text "
            "(text files are split by file, records by their content), or a smaller model.seq_len"
        )
