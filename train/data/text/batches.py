"""Batches of packed text: windows of seq_len + 1 tokens, each window once an epoch.

Every epoch cuts the text at another offset (a function of seed and epoch), so a text seen often is seen in other
windows, with other tokens at their starts. Evaluation windows start at 0 and follow one another: every token of the
evaluation text but the first is predicted once. They come in a fixed shuffled order, so the first few are a fair sample.
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

_WINDOWS_AT_ONCE = 1024
_TOKENS_AT_ONCE = 1 << 20
"""Windows, and tokens, that are in memory while bytes are counted."""


class Counted(NamedTuple):
    """Targets of evaluation examples."""

    targets: int
    text_bytes: float
    """Bytes of text that these stand for. The end of a document counts as one."""


class TextWindows(Data):
    """Windows of text; those of evaluation are of a packed text.

    Args:
        config: sizes of batches.
        eval_: packed evaluation text.
        tokenizer: made the tokens.
        seq_len: T, tokens predicted per window.
        facts: more to record about the corpus.
        train_size: windows of an epoch.
        has_bytes: whether all of it was text, and not ids, whose bytes are not known.

    Raises:
        DataError: the evaluation text is too short.
    """

    kind = "tokens"
    _eval_targets: np.ndarray | None = None
    """Evaluation tokens that are targets, bool [count]; None if all are."""

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
        windows = -(-(len(eval_.tokens) - 1) // seq_len)
        super().__init__(
            config,
            facts={
                **facts,
                "tokenizer": tokenizer.key,
                "eval_tokens": len(eval_.tokens),
                **({"eval_bytes": eval_.text_bytes} if has_bytes else {}),
            },
            train_size=train_size,
            eval_size=windows,
            tokenizer=tokenizer,
            bytes_per_token=None,
        )
        self._eval = eval_.tokens
        self._seq_len = seq_len
        self._eval_bytes = eval_.text_bytes
        self._windows = windows
        self._eval_shuffle = interface.Shuffle(windows, 0, interface.EVALUATION)
        if has_bytes and tokenizer.key == "bytes":
            self.bytes_per_token = 1.0
        elif has_bytes:
            counted = self.counted(self.eval_size)
            self.bytes_per_token = counted.text_bytes / max(counted.targets, 1)

    @abc.abstractmethod
    def train_windows(self, indices: Iterable[int]) -> np.ndarray:
        """Training examples by their numbers, counted from the start of the run and on through all epochs: int32 [B, T + 1]."""

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        return self.train_examples(interface.batch_indices(k, self.batch_size, rows))

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        return self.eval_examples_of(interface.batch_indices(j, self.eval_batch_size, rows))

    def train_examples(self, indices: Iterable[int]) -> Batch:
        """Return training examples by their numbers, counted as `train_windows` counts them."""
        tokens = self.train_windows(indices)
        return self.batch_of(tokens, np.ones_like(tokens[:, 1:], np.float32))

    def eval_examples_of(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return evaluation examples by their numbers; those past the last one have weight 0."""
        return self.batch_of(*self.eval_windows(indices))

    def eval_windows(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Evaluation examples by their numbers, int32 [B, T + 1], and their weights, float32 [B, T]; of those past the last one 0."""
        tokens = np.zeros((len(indices), self._seq_len + 1), np.int32)
        weights = np.zeros((len(indices), self._seq_len), np.float32)
        inside = [row for row, i in enumerate(indices) if i < self.eval_size]
        for row, window in zip(
            inside, self._eval_shuffle(indices[row] for row in inside)[1], strict=True
        ):
            ids = self._eval[window * self._seq_len : (window + 1) * self._seq_len + 1]
            tokens[row, : len(ids)] = ids
            weights[row, : len(ids) - 1] = 1.0
            if self._eval_targets is not None:
                first = window * self._seq_len + 1
                weights[row, : len(ids) - 1] = self._eval_targets[first : first + len(ids) - 1]
        return tokens, weights

    def begin_documents(self) -> None:
        """Put what the tokenizer puts before a text that stands alone before every evaluation document.

        Published models were trained on such documents. What is put there is no target, and every token of the text is one.
        Nothing changes for a tokenizer that puts nothing there.
        """
        begin = self.tokenizer.start
        if not len(begin):
            return
        ids = np.asarray(self._eval).astype(np.int32)
        starts = np.append(0, np.flatnonzero(ids[:-1] == self.tokenizer.separator) + 1)
        if begin.tolist() == [
            self.tokenizer.separator
        ]:  # the end of the document before it is there already
            starts = starts[:1]
        places = np.repeat(starts, len(begin))
        self._eval = np.insert(ids, places, np.tile(begin, len(starts)))
        self._eval_targets = np.insert(np.ones(len(ids), bool), places, False)
        windows = -(-(len(self._eval) - 1) // self._seq_len)
        self.eval_size = min(windows, self.config.eval_examples or windows)
        self._eval_shuffle = interface.Shuffle(windows, 0, interface.EVALUATION)
        self._windows = windows
        if self.bytes_per_token is not None and self.tokenizer.key != "bytes":
            counted = self.counted(self.eval_size)
            self.bytes_per_token = counted.text_bytes / max(counted.targets, 1)

    def batch_of(self, tokens: np.ndarray, weights: np.ndarray) -> Batch:
        """A batch, and of its documents what data.document_mask and data.reset_positions ask for.

        A separator is of the document that it ends: to write it is learned, and what follows it is no target, for nothing is
        known of the next document.

        Args:
            tokens: int32 [B, T + 1], each predicted from those before it.
            weights: float32 [B, T].
        """
        inputs = tokens[:, :-1]
        batch = {"inputs": inputs, "targets": tokens[:, 1:], "weights": weights}
        if not self.config.document_mask:
            return batch
        ends = inputs == self.tokenizer.separator
        segments = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        batch |= {"weights": weights * ~ends, "segments": segments}
        if self.config.reset_positions:
            place = np.arange(inputs.shape[1], dtype=np.int32)
            first = np.diff(segments, axis=1, prepend=-1) > 0
            batch["positions"] = place - np.maximum.accumulate(np.where(first, place, 0), axis=1)
        return batch

    def counted(self, examples: int) -> Counted:
        """Count the targets of the first evaluation examples, and the bytes of text that they stand for.

        The bytes are exact where the vocabulary spells its text. Otherwise they are scaled, so that those of all
        evaluation tokens are the bytes of the evaluation text.
        """
        sizes = self.tokenizer.token_bytes()
        sizes[self.tokenizer.separator] = 1
        spaces = self._spaces_before_text()
        text_bytes = 0
        targets = 0
        target_bytes = 0
        before = self.tokenizer.separator
        for start in range(0, len(self._eval), _TOKENS_AT_ONCE):
            ids = np.asarray(self._eval[start : start + _TOKENS_AT_ONCE])
            previous = np.append(before, ids[:-1])
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
                counts[0] = False  # nothing is before it
            text_bytes += int(token_bytes.sum())
            targets += int(counts.sum())
            target_bytes += int(token_bytes[counts].sum())
            before = ids[-1]
        if examples < self._windows:
            targets, target_bytes = self._counted_of(examples, sizes, spaces)
        return Counted(targets, target_bytes * self._eval_bytes / max(text_bytes, 1))

    def _counted_of(self, examples: int, sizes: np.ndarray, spaces: np.ndarray) -> Counted:
        """Count the targets of some evaluation examples, and their bytes as `sizes` has them."""
        targets = 0
        text_bytes = 0
        for start in range(0, examples, _WINDOWS_AT_ONCE):
            batch = self.eval_examples_of(range(start, min(start + _WINDOWS_AT_ONCE, examples)))
            counts = batch["weights"] > 0
            begins = counts & np.isin(batch["inputs"], self._before_documents())
            targets += int(counts.sum())
            text_bytes += int(sizes[batch["targets"][counts]].sum()) - int(
                spaces[batch["targets"][begins]].sum()
            )
        return Counted(targets, text_bytes)

    def _before_documents(self) -> list[int]:
        """Return the ids that a document's first token may follow."""
        if self._eval_targets is None:
            return [self.tokenizer.separator]
        return [self.tokenizer.separator, *self.tokenizer.start.tolist()]

    def _spaces_before_text(self) -> np.ndarray:
        """Return 1 for ids that begin with a space which no text has where a document begins, int64 [vocab_size]."""
        pieces = self.tokenizer.pieces() if self.tokenizer.adds_space else []
        spaces = np.zeros(self.tokenizer.vocab_size, np.int64)
        spaces[[i for i, piece in enumerate(pieces) if piece.startswith(" ")]] = 1
        return spaces

    def eval_targets(self) -> np.ndarray:
        """Which tokens of the evaluation text are predicted, bool [eval_tokens]: all but the first, if all are used.

        Under data.document_mask also without the first of every document.
        """
        mask = np.zeros(len(self._eval), bool)
        for window in self._eval_shuffle(range(self.eval_size))[1]:
            mask[window * self._seq_len + 1 : (window + 1) * self._seq_len + 1] = True
        if self.config.document_mask:
            mask[1:] &= self._eval[:-1] != self.tokenizer.separator
        return mask


class TokenData(TextWindows):
    """Windows of a packed corpus.

    Args:
        config: sizes of batches.
        train: packed training text of N tokens; an epoch is (N - T) // T windows.
        eval_: packed evaluation text.
        tokenizer: made the tokens.
        seq_len: T, tokens predicted per window.
        seed: seed of the order and of the offsets.
        facts: more to record about the corpus.
        has_bytes: whether all of it was text, and not ids, whose bytes are not known.

    Raises:
        DataError: the text is too short for one batch's window.
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
        size = (len(train.tokens) - seq_len) // seq_len
        counts = {
            "train_tokens": len(train.tokens),
            **({"train_bytes": train.text_bytes} if has_bytes else {}),
        }
        facts = {**facts, **counts}
        super().__init__(
            config,
            eval_,
            tokenizer,
            seq_len=seq_len,
            facts=facts,
            train_size=size,
            has_bytes=has_bytes,
        )
        self._train, self._seed = train.tokens, seed
        self._shuffle = interface.Shuffle(size, seed)

    def train_windows(self, indices: Iterable[int]) -> np.ndarray:
        """Training examples by their numbers, counted from the start of the run and on through all epochs: int32 [B, T + 1]."""
        epochs, windows = self._shuffle(indices)
        starts = [
            self._offset(int(e)) + w * self._seq_len for e, w in zip(epochs, windows, strict=True)
        ]
        tokens = np.empty((len(starts), self._seq_len + 1), np.int32)
        for row, start in zip(tokens, starts, strict=True):
            row[:] = self._train[start : start + self._seq_len + 1]
        return tokens

    @functools.lru_cache(maxsize=4)  # noqa: B019  the data lives as long as the run
    def _offset(self, epoch: int) -> int:
        return int(interface.rng(self._seed, interface.WINDOWS, epoch).integers(self._seq_len))

    def references(self) -> list[Reference]:
        if self.facts["tokenizer"] != "bytes":
            return []
        from mupax.train.data.text import ngrams

        return ngrams.references(
            self._train, self._eval, self.eval_targets(), str(self.facts["digest"])
        )


def check_length(config: DataConfig, side: str, count: int, least: int, seq_len: int) -> None:
    """Refuse a text that has no window in it.

    Args:
        config: names the text.
        side: of the split, for the message.
        count: of its tokens.
        least: that there must be.
        seq_len: of the model.

    Raises:
        DataError: there are fewer.
    """
    if count < least:
        raise DataError(
            f"the {side} text of {config.name} has {count:,} tokens; sequences of {seq_len} need at "
            f"least {least:,}. Give more text (text files are split by file, records by their content), or a smaller model.seq_len"
        )
