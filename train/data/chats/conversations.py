"""Batches of conversations: a window holds whole ones, one after the other, and the loss is taken where their tokens say so.

A window has seq_len + 1 tokens. Conversations fill it in their order as long as they fit; what is left of it is no target. One that is longer
than a window is cut at its end, and one of which no target is left is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mupax.train.data import interface
from mupax.train.data.chats.answers import ChatTokens
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError
from mupax.train.data.text.batches import Counted
from mupax.train.data.text.packing import PackedCorpus
from mupax.train.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

_SAMPLE = "The quick brown Fox (42 years old)\n  says: naïve déjà vu, 日本!"


class Windows(NamedTuple):
    """Which conversations each window of one side holds."""

    tokens: np.ndarray
    """All ids as `ChatTokens` makes them, [count]."""
    spans: np.ndarray
    """First token of each conversation and the one after its last, in windows' order: int64 [conversations, 2]."""
    first: np.ndarray
    """Number of the first conversation of each window, and after the last how many there are: int64 [windows + 1]."""
    cut: int
    """Conversations that are longer than a window."""
    without_target: int
    """Of those and the others, which were left out because none of their targets is in the window."""

    @property
    def count(self) -> int:
        """Windows."""
        return len(self.first) - 1


def windows(tokens: np.ndarray, vocab: int, separator: int, size: int) -> Windows:
    """The windows of one side.

    Args:
        tokens: ids as `ChatTokens` makes them, [count].
        vocab: V of the tokenizer.
        separator: token that ends a text in it; a conversation that ends with it has it once.
        size: tokens of a window.
    """
    stops = np.flatnonzero(tokens >= 2 * vocab) + 1
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    # Its own end stands in the place of the one that packing adds.
    doubled = (stops - starts > 1) & (tokens[np.maximum(stops - 2, 0)] % vocab == separator)
    lengths = np.minimum(stops - starts - doubled, size)
    cut = int(((stops - starts - doubled) > size).sum())
    targets = np.concatenate([[0], np.cumsum(_is_target(np.asarray(tokens), vocab))])
    useful = targets[starts + lengths] > targets[np.minimum(starts + 1, starts + lengths)]
    spans, first, room = [], [], 0
    for start, length in zip(starts[useful].tolist(), lengths[useful].tolist(), strict=True):
        if length > room:
            first.append(len(spans))
            room = size
        spans.append((start, start + length))
        room -= length
    first.append(len(spans))
    return Windows(
        tokens,
        np.array(spans, np.int64).reshape(-1, 2),
        np.array(first),
        cut,
        len(starts) - len(spans),
    )


def spells_text(encoder: Tokenizer) -> bool:
    """Return whether the tokens of a text have its bytes, each exactly one token's."""
    (ids,) = encoder.encode([_SAMPLE.encode()])
    size = int(encoder.token_bytes()[ids].sum()) - int(encoder.adds_space)
    return size == len(_SAMPLE.encode())


def _is_target(tokens: np.ndarray, vocab: int) -> np.ndarray:
    return ((tokens >= vocab) & (tokens < 2 * vocab)) | (tokens == 2 * vocab + 1)


class Conversations(Data):
    """Windows of conversations.

    Args:
        config: sizes of batches.
        train: packed conversations to train on.
        eval_: those to evaluate on.
        tokens: made them.
        seq_len: T, tokens predicted per window.
        seed: of the order.
        facts: more to record about the data.

    Raises:
        DataError: a side has no conversation with a target.
    """

    kind = "tokens"

    def __init__(
        self,
        config: DataConfig,
        train: PackedCorpus,
        eval_: PackedCorpus,
        tokens: ChatTokens,
        *,
        seq_len: int,
        seed: int,
        facts: dict[str, Any],
    ) -> None:
        encoder = tokens.encoder
        self._vocab, self._separator, self._size = (
            encoder.vocab_size,
            encoder.separator,
            seq_len + 1,
        )
        sides = [
            windows(side.tokens, self._vocab, self._separator, self._size)
            for side in (train, eval_)
        ]
        self.train_windows, self.eval_windows = sides
        for name, side in zip(("training", "evaluation"), sides, strict=True):
            if not side.count:
                raise DataError(
                    f"the {name} part of {config.name} has no answer within {seq_len} tokens; records are split by their content, or by "
                    "train and eval in their files' names: give more records, or a larger model.seq_len"
                )
        counts = {"train_records": len(sides[0].spans), "eval_records": len(sides[1].spans)}
        counts["eval_tokens"] = len(eval_.tokens)
        super().__init__(
            config,
            facts={**facts, "tokenizer": encoder.key, "train_tokens": len(train.tokens), **counts},
            train_size=sides[0].count,
            eval_size=sides[1].count,
            tokenizer=encoder,
            bytes_per_token=None,
        )
        self._shuffle = interface.Shuffle(sides[0].count, seed)
        self._eval_shuffle = interface.Shuffle(sides[1].count, 0, interface.EVALUATION)
        if spells_text(encoder):
            counted = self.counted(self.eval_size)
            self.bytes_per_token = counted.text_bytes / max(counted.targets, 1)

    def counted(self, examples: int) -> Counted:
        """Count the targets of the first evaluation examples, and the bytes of text that they stand for."""
        side = self.eval_windows
        vocab = self._vocab
        ids = np.asarray(side.tokens)
        # A conversation's end counts one byte, as the end of a document does.
        sizes = np.concatenate([np.zeros(vocab, np.int64), self.tokenizer.token_bytes(), [0, 1]])
        bytes_before = np.concatenate([[0], np.cumsum(sizes[ids])])
        targets_before = np.concatenate([[0], np.cumsum(_is_target(ids, vocab))])
        targets = 0
        size = 0
        for number in self._eval_shuffle(range(examples))[1]:
            spans = side.spans[side.first[number] : side.first[number + 1]]
            first = spans[:, 0].copy()
            last = spans[:, 1]
            unpredicted = slice(None) if self.config.document_mask else slice(1)
            first[unpredicted] += 1
            targets += int((targets_before[last] - targets_before[first]).sum())
            size += int((bytes_before[last] - bytes_before[first]).sum())
        return Counted(targets, size)

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        return self.train_examples(interface.batch_indices(k, self.batch_size, rows))

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        return self.eval_examples_of(interface.batch_indices(j, self.eval_batch_size, rows))

    def train_examples(self, indices: Iterable[int]) -> Batch:
        """Return training examples by their numbers, counted from the start of the run and on through all epochs."""
        windows = self._shuffle(indices)[1]
        return self._batch(self.train_windows, windows, len(windows))

    def eval_examples_of(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return evaluation examples by their numbers; those past the last one have weight 0."""
        inside = [i for i in indices if i < self.eval_size]
        return self._batch(self.eval_windows, self._eval_shuffle(inside)[1], len(indices))

    def _batch(self, side: Windows, numbers: Iterable[int], count: int) -> Batch:
        """`count` windows, of which those after the numbers are empty."""
        tokens = np.full((count, self._size), self._separator, np.int32)
        targets = np.zeros((count, self._size), bool)
        records = np.zeros((count, self._size), np.int32)
        places = np.zeros((count, self._size), np.int32)
        for row, number in enumerate(numbers):
            end, spans = 0, side.spans[side.first[number] : side.first[number + 1]].tolist()
            for record, (start, stop) in enumerate(spans):
                ids, at = (
                    np.asarray(side.tokens[start:stop], np.int32),
                    slice(end, end + stop - start),
                )
                tokens[row, at] = np.where(
                    ids < 2 * self._vocab, ids % self._vocab, self._separator
                )
                targets[row, at] = _is_target(ids, self._vocab)
                records[row, at], places[row, at] = record, np.arange(len(ids))
                end = at.stop
            records[row, end:], places[row, end:] = len(spans), np.arange(self._size - end)
        weights = targets[:, 1:].astype(np.float32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        if self.config.document_mask:
            batch |= {
                "weights": weights * (records[:, 1:] == records[:, :-1]),
                "segments": records[:, :-1],
            }
            if self.config.reset_positions:
                batch["positions"] = places[:, :-1]
        return batch
