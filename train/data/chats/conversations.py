"""Batches of conversations: windows of complete conversations, with a loss on chosen tokens.

A window has seq_len + 1 tokens. Conversations fill a window in their order as long as they fit. The
rest of the window is no target. A conversation longer than a window is cut at its end. A
conversation without a target in its window is left out.
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

# Text with many kinds of characters, which shows whether tokens keep all bytes.
_SAMPLE = "The quick brown Fox (42 years old)\n  says: naïve déjà vu, 日本!"


class Windows(NamedTuple):
    """Division of training or evaluation conversations into windows of seq_len + 1 tokens."""

    tokens: np.ndarray
    """Ids of all conversations, one after the other, as `ChatTokens` encodes them, [count]."""
    spans: np.ndarray
    """Range of `tokens` of each conversation in use, int64 [conversations, 2].

    A range is the first token and the token after the last. It ends early for a conversation that
    is cut.
    """
    first: np.ndarray
    """Index of each window's first conversation in `spans`, and at last len(spans), [windows + 1].

    Window w has the conversations first[w] to first[w + 1] - 1.
    """
    cut: int
    """Number of conversations that are longer than a window."""
    without_target: int
    """Number of conversations that were left out because no target is in their window."""

    @property
    def count(self) -> int:
        """Number of windows."""
        return len(self.first) - 1


def windows(tokens: np.ndarray, vocab: int, separator: int, size: int) -> Windows:
    """Divide the training or the evaluation conversations into windows.

    Each window has as many complete conversations as fit, in their order. Conversations longer than
    a window are cut, and conversations without a target are left out.

    Args:
        tokens: Ids of all conversations, one after the other, as `ChatTokens` encodes them,
            [count].
        vocab: V, vocabulary size of the tokenizer. Ids from V to 2 V - 1 are targets.
        separator: Id with which the tokenizer ends a text.
        size: Number of tokens of a window.
    """
    # Ids 2 V and 2 V + 1 end a conversation.
    stops = np.flatnonzero(tokens >= 2 * vocab) + 1
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    # If a template ends conversations with the separator, packing adds a second one. That one is
    # dropped.
    doubled = (stops - starts > 1) & (tokens[np.maximum(stops - 2, 0)] % vocab == separator)
    full_lengths = stops - starts - doubled
    lengths = np.minimum(full_lengths, size)
    cut = int((full_lengths > size).sum())

    targets = np.concatenate([[0], np.cumsum(_is_target(np.asarray(tokens), vocab))])
    # A target in first place does not count: with a document mask, or at the start of a window, it
    # is not predicted.
    useful = targets[starts + lengths] > targets[np.minimum(starts + 1, starts + lengths)]
    spans: list[tuple[int, int]] = []
    first: list[int] = []
    tokens_left = 0
    for start, length in zip(starts[useful].tolist(), lengths[useful].tolist(), strict=True):
        if length > tokens_left:
            first.append(len(spans))
            tokens_left = size
        spans.append((start, start + length))
        tokens_left -= length
    first.append(len(spans))
    return Windows(
        tokens=tokens,
        spans=np.array(spans, np.int64).reshape(-1, 2),
        first=np.array(first),
        cut=cut,
        without_target=len(starts) - len(spans),
    )


def spells_text(encoder: Tokenizer) -> bool:
    """Return whether the tokens of a text have exactly the bytes of the text.

    Only then can a loss per byte be computed. One sample sentence is encoded to find out.
    """
    (ids,) = encoder.encode([_SAMPLE.encode()])
    size = int(encoder.token_bytes()[ids].sum()) - int(encoder.adds_space)
    return size == len(_SAMPLE.encode())


def _is_target(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Return a mask of the tokens that are targets, bool of the shape of `tokens`.

    Args:
        tokens: Ids as `ChatTokens` encodes them. V to 2 V - 1 and 2 V + 1 are targets.
        vocab: V, vocabulary size of the tokenizer, without the ids of targets.
    """
    return ((tokens >= vocab) & (tokens < 2 * vocab)) | (tokens == 2 * vocab + 1)


class Conversations(Data):
    """Batches of conversations, several in a window of seq_len + 1 tokens.

    Args:
        config: Data settings: sizes of batches and document mask.
        train: Packed training conversations, encoded by `tokens`.
        eval_: Packed evaluation conversations, encoded by `tokens`.
        tokens: Encoder of the conversations. Batches have the ids of its tokenizer, and `weights`
            mark the targets.
        seq_len: T, number of predicted tokens per window.

    Raises:
        DataError: The training or the evaluation part has no conversation with a target.
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
        self._vocab = encoder.vocab_size
        self._separator = encoder.separator
        self._size = seq_len + 1
        self.train_windows = windows(train.tokens, self._vocab, self._separator, self._size)
        self.eval_windows = windows(eval_.tokens, self._vocab, self._separator, self._size)
        for name, side in (("training", self.train_windows), ("evaluation", self.eval_windows)):
            if not side.count:
                raise DataError(
                    f"the {name} part of {config.name} has no answer within {seq_len} tokens; "
                    "records are split by their content, or by train and eval in their files' names: "
                    "give more records, or a larger model.seq_len"
                )
        super().__init__(
            config,
            facts={
                **facts,
                "tokenizer": encoder.key,
                "train_tokens": len(train.tokens),
                "train_records": len(self.train_windows.spans),
                "eval_records": len(self.eval_windows.spans),
                "eval_tokens": len(eval_.tokens),
            },
            train_size=self.train_windows.count,
            eval_size=self.eval_windows.count,
            tokenizer=encoder,
            bytes_per_token=None,
        )
        self._shuffle = interface.Shuffle(self.train_windows.count, seed)
        # Seed 0: the evaluation examples must not depend on the run's seed.
        self._eval_shuffle = interface.Shuffle(self.eval_windows.count, 0, interface.EVALUATION)
        if spells_text(encoder):
            counted = self.counted(self.eval_size)
            self.bytes_per_token = counted.text_bytes / max(counted.targets, 1)

    def counted(self, examples: int) -> Counted:
        """Count the targets of the first evaluation examples and the bytes of their text.

        The end of a conversation counts one byte if it is a target.

        Args:
            examples: Number of evaluation examples, in the order of evaluation.
        """
        side = self.eval_windows
        vocab = self._vocab
        ids = np.asarray(side.tokens)
        # Ids 2 V and 2 V + 1 end a conversation. As a target the end counts one byte, like that of
        # a document.
        sizes = np.concatenate([np.zeros(vocab, np.int64), self.tokenizer.token_bytes(), [0, 1]])
        bytes_before = np.concatenate([[0], np.cumsum(sizes[ids])])
        targets_before = np.concatenate([[0], np.cumsum(_is_target(ids, vocab))])
        targets = 0
        size = 0
        for number in self._eval_shuffle(range(examples))[1]:
            spans = side.spans[side.first[number] : side.first[number + 1]]
            first = spans[:, 0].copy()
            last = spans[:, 1]
            # Without a document mask, only the first token of the window is not predicted. With
            # one, the first token of every conversation is not.
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
        """Return training examples as a batch. An example is a window of conversations.

        Args:
            indices: Numbers of examples, counted from the start of the run and on through all
                epochs.
        """
        _, numbers = self._shuffle(indices)
        return self._batch(self.train_windows, numbers, len(numbers))

    def eval_examples_of(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return evaluation examples as a batch. Examples past the last one have weight 0.

        Args:
            indices: Numbers of evaluation examples in the fixed shuffled order, from 0. Numbers
                past the last example must come last.
        """
        existing = [i for i in indices if i < self.eval_size]
        _, numbers = self._eval_shuffle(existing)
        return self._batch(self.eval_windows, numbers, len(indices))

    def _batch(self, side: Windows, numbers: Iterable[int], count: int) -> Batch:
        """Return some windows as a batch of `count` rows.

        Rows after the last window have only separators, with weight 0.

        Args:
            side: All windows of the training or of the evaluation part.
            numbers: Numbers of the windows in `side`, at most `count`.
            count: B, number of rows, at least the number of windows.
        """
        # Unused places have the separator, an id that every model can read. They are no targets.
        tokens = np.full((count, self._size), self._separator, np.int32)
        targets = np.zeros((count, self._size), bool)
        records = np.zeros((count, self._size), np.int32)
        places = np.zeros((count, self._size), np.int32)
        for row, number in enumerate(numbers):
            spans = side.spans[side.first[number] : side.first[number + 1]].tolist()
            end = 0
            for record, (start, stop) in enumerate(spans):
                ids = np.asarray(side.tokens[start:stop], np.int32)
                columns = slice(end, end + stop - start)
                # Ids below 2 V are tokens, raised by V if they are targets. Ids 2 V and 2 V + 1 end
                # a conversation.
                tokens[row, columns] = np.where(
                    ids < 2 * self._vocab, ids % self._vocab, self._separator
                )
                targets[row, columns] = _is_target(ids, self._vocab)
                records[row, columns] = record
                places[row, columns] = np.arange(len(ids))
                end = columns.stop
            # The rest of the window is a document of its own.
            records[row, end:] = len(spans)
            places[row, end:] = np.arange(self._size - end)

        weights = targets[:, 1:].astype(np.float32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        if self.config.document_mask:
            # The first token of a conversation cannot be predicted from the conversation before.
            batch["weights"] = weights * (records[:, 1:] == records[:, :-1])
            batch["segments"] = records[:, :-1]
            if self.config.reset_positions:
                batch["positions"] = places[:, :-1]
        return batch
