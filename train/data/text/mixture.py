"""Batches of several texts in fixed shares, for `data.name mix`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mupax.train.config.data import DataConfig
from mupax.train.data import cache, interface
from mupax.train.data.chats.conversations import Conversations
from mupax.train.data.interface import ALL_ROWS, Batch, Data
from mupax.train.data.mix import BLOCK, Part
from mupax.train.data.text.batches import TextWindows


class MixtureWeights:
    """Assignment of each example of a mixture to one of its texts, by the texts' shares.

    In every block of `BLOCK` successive examples, each text has exactly its share, and the texts
    are in a random order. The examples of each text come in the text's own order. The assignment is
    a function of the seed and the number of the example, so a run resumes at any step and with any
    number of processes.

    Args:
        counts: Number of examples of each text in a block, each at least 1. The counts add up to
            `BLOCK`.
    """

    def __init__(self, counts: Iterable[int], seed: int) -> None:
        self.counts = np.array(list(counts))
        self._seed = seed

    def __call__(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return which example of which text each example of the mixture is.

        Args:
            indices: Numbers of the mixture's examples, from 0, [B].

        Returns:
            Index of the text in `counts`, and number of the example within this text, int64 [B]
            each.
        """
        numbers = np.fromiter(indices, np.int64)
        texts = np.empty_like(numbers)
        examples = np.empty_like(numbers)
        blocks = numbers // BLOCK
        for block in np.unique(blocks):
            in_block = blocks == block
            offsets = numbers[in_block] % BLOCK
            block_texts, block_examples = self._block(int(block))
            texts[in_block] = block_texts[offsets]
            examples[in_block] = block_examples[offsets]
        return texts, examples

    @functools.lru_cache(maxsize=4)  # noqa: B019  the data lives as long as the run
    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which example of which text each example of a block is.

        Args:
            block: Number of the block of `BLOCK` examples, from 0.

        Returns:
            Index of the text in `counts`, and number of the example within this text, int64 [BLOCK]
            each.
        """
        in_order = np.repeat(np.arange(len(self.counts)), self.counts)
        texts = interface.rng(self._seed, interface.MIXTURE, block).permutation(in_order)
        examples = np.empty(BLOCK, np.int64)
        for text, count in enumerate(self.counts):
            examples[texts == text] = block * count + np.arange(count)
        return texts, examples

    def until_one_ends(self, sizes: Iterable[int]) -> int:
        """Return the number of examples that the mixture has before one of its texts runs out.

        Args:
            sizes: Number of examples of each text, in the order of `counts`.
        """
        sizes = np.array(list(sizes))
        # Every text has examples for this many complete blocks. The first missing example is in the
        # next.
        block = int(np.min(sizes // self.counts))
        texts, examples = self._block(block)
        # At least one text ends within this block.
        first_missing = np.flatnonzero(examples >= sizes[texts])[0]
        return block * BLOCK + int(first_missing)


class Mixture(Data):
    """Batches whose rows come from several texts and chats with one tokenizer, in fixed shares.

    Evaluation has the same shares as training, and ends when the first text has no more examples.

    Args:
        parts: Source and share of each text, by its name.
        texts: Data of each text, by the same names.
        seed: Seed of the order of the texts.
    """

    kind = "tokens"

    def __init__(
        self,
        config: DataConfig,
        parts: Mapping[str, Part],
        texts: Mapping[str, TextWindows | Conversations],
        seed: int,
    ) -> None:
        counts = [part.count for part in parts.values()]
        self._texts = [texts[name] for name in parts]
        self._train = MixtureWeights(counts, seed)
        # Evaluation has the same examples in every run, whatever the seed.
        self._eval = MixtureWeights(counts, 0)

        text_facts = {}
        for name, part in parts.items():
            share = part.count / BLOCK
            text_facts[name] = {"source": part.source, "share": share, **texts[name].facts}
        sizes = [text.train_size for text in self._texts]
        bounded_sizes = [size for size in sizes if size is not None]
        train_size = None
        # The size of a stream is unknown.
        if len(bounded_sizes) == len(sizes):
            train_size = self._train.until_one_ends(bounded_sizes)

        super().__init__(
            config,
            facts=self._facts(text_facts, has_train_tokens=train_size is not None),
            train_size=train_size,
            eval_size=self._eval.until_one_ends(text.eval_size for text in self._texts),
            tokenizer=self._texts[0].tokenizer,
            bytes_per_token=None,
        )
        if all(text.bytes_per_token is not None for text in self._texts):
            self.bytes_per_token = self._mean_bytes_per_token()

    def _facts(
        self, text_facts: Mapping[str, Mapping[str, Any]], has_train_tokens: bool
    ) -> dict[str, Any]:
        """Return the facts to record about the mixture.

        They are `digest`, `tokenizer`, the sums `train_tokens` and `eval_tokens`, and `mix`, which
        has the facts of each text by its name.

        Args:
            text_facts: Facts of each text by its name.
            has_train_tokens: False if a text is a stream. Then there is no `train_tokens`.
        """
        digests = [f"{facts['digest']} {facts['share']}" for facts in text_facts.values()]
        facts: dict[str, Any] = {
            "digest": cache.digest(*digests),
            "tokenizer": self._texts[0].facts["tokenizer"],
        }
        if has_train_tokens:
            facts["train_tokens"] = sum(fact["train_tokens"] for fact in text_facts.values())
        facts["eval_tokens"] = sum(fact["eval_tokens"] for fact in text_facts.values())
        facts["mix"] = text_facts
        return facts

    def _mean_bytes_per_token(self) -> float:
        """Return the mean bytes of text per target, over the evaluation examples in use."""
        texts, _ = self._eval(range(self.eval_size))
        num_examples = np.bincount(texts, minlength=len(self._texts))
        counts = []
        for text, count in zip(self._texts, num_examples, strict=True):
            counts.append(text.counted(int(count)))
        targets = sum(count.targets for count in counts)
        return sum(count.text_bytes for count in counts) / max(targets, 1)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for text in self._texts:
                stack.enter_context(text.preparing())
            yield

    @property
    def has_conversations(self) -> bool:
        """True if one of the texts is a chat."""
        return not all(isinstance(text, TextWindows) for text in self._texts)

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        texts, examples = self._train(interface.batch_indices(k, self.batch_size, rows))
        parts = []
        for i, text in enumerate(self._texts):
            parts.append(text.train_examples(examples[texts == i]))
        return _joined(parts, texts)

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = np.array(interface.batch_indices(j, self.eval_batch_size, rows))
        texts, examples = self._eval(indices)
        parts = []
        for i, text in enumerate(self._texts):
            parts.append(text.eval_examples_of(examples[texts == i]))
        batch = _joined(parts, texts)
        # Examples past the last one have no weight, although their texts may have more.
        batch["weights"][indices >= self.eval_size] = 0.0
        return batch


def _joined(parts: Sequence[Batch], texts: np.ndarray) -> Batch:
    """Return one batch whose rows are taken from the batches of several texts.

    Args:
        parts: Batch of each text. Its rows are in the order in which they appear in the result.
        texts: Index of the text of each row of the result, [B].
    """
    batch = {}
    for name, array in parts[0].items():
        batch[name] = np.empty((len(texts), *array.shape[1:]), array.dtype)
    for i, part in enumerate(parts):
        for name, array in part.items():
            batch[name][texts == i] = array
    return batch
