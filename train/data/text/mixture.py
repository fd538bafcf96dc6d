"""Batches of several texts in fixed shares: which text example i of a run is from, and which of that text's examples it is.

Both are functions of (seed, i) alone, so a run resumes anywhere and on any number of processes, as with one text. Every block of
`mix.BLOCK` examples has exactly its shares, in a random order of its own; a text's own examples come in the text's own order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from mupax.train.config.data import DataConfig
from mupax.train.data import cache, interface
from mupax.train.data.chats.conversations import Conversations
from mupax.train.data.interface import ALL_ROWS, Batch, Data
from mupax.train.data.mix import BLOCK, Part
from mupax.train.data.text.batches import TextWindows


class MixtureWeights:
    """Weights of a mixture, by which each example has its text, and its place among that text's examples.

    Args:
        counts: examples of each text in every block; they add up to `BLOCK`.
        seed: of the order within blocks.
    """

    def __init__(self, counts: Iterable[int], seed: int) -> None:
        self.counts, self._seed = np.array(list(counts)), seed

    def __call__(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """(text, example of it) of the run's examples, int64 each."""
        i = np.fromiter(indices, np.int64)
        texts, examples = np.empty_like(i), np.empty_like(i)
        for block in np.unique(i // BLOCK):
            here = i // BLOCK == block
            of, rank = self._block(int(block))
            texts[here], examples[here] = of[i[here] % BLOCK], rank[i[here] % BLOCK]
        return texts, examples

    @functools.lru_cache(maxsize=4)  # noqa: B019  the data lives as long as the run
    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        of = interface.rng(self._seed, interface.MIXTURE, block).permutation(
            np.repeat(np.arange(len(self.counts)), self.counts)
        )
        rank = np.empty(BLOCK, np.int64)
        for text, count in enumerate(self.counts):
            rank[of == text] = block * count + np.arange(count)
        return of, rank

    def until_one_ends(self, sizes: Iterable[int]) -> int:
        """How many examples there are before one more of some text is needed than it has.

        Args:
            sizes: examples of each text.
        """
        sizes = np.array(list(sizes))
        block = int(np.min(sizes // self.counts))
        of, rank = self._block(block)
        return block * BLOCK + int(
            np.flatnonzero(rank >= sizes[of])[0]
        )  # one text at least does not fill the block


class Mixture(Data):
    """Windows of several texts and chats of one tokenizer. Evaluation has the same shares, of whole texts: it ends where the first one does.

    Args:
        config: sizes of batches.
        parts: how many of each text, by name.
        texts: by the same names.
        seed: of the order.
    """

    kind = "tokens"

    def __init__(
        self,
        config: DataConfig,
        parts: Mapping[str, Part],
        texts: Mapping[str, TextWindows | Conversations],
        seed: int,
    ) -> None:
        counts, self._texts = (
            [part.count for part in parts.values()],
            [texts[name] for name in parts],
        )
        self._train, self._eval = MixtureWeights(counts, seed), MixtureWeights(counts, 0)
        each = {
            name: {"source": part.source, "share": part.count / BLOCK, **texts[name].facts}
            for name, part in parts.items()
        }
        sizes = [text.train_size for text in self._texts]
        super().__init__(
            config,
            facts={
                "digest": cache.digest(
                    *(f"{facts['digest']} {facts['share']}" for facts in each.values())
                ),
                "tokenizer": self._texts[0].facts["tokenizer"],
                **(
                    {}
                    if None in sizes
                    else {"train_tokens": sum(facts["train_tokens"] for facts in each.values())}
                ),
                "eval_tokens": sum(facts["eval_tokens"] for facts in each.values()),
                "mix": each,
            },
            train_size=None
            if None in sizes
            else self._train.until_one_ends(size for size in sizes if size is not None),
            eval_size=self._eval.until_one_ends(text.eval_size for text in self._texts),
            tokenizer=self._texts[0].tokenizer,
            bytes_per_token=None,
        )
        if all(text.bytes_per_token is not None for text in self._texts):
            examples = np.bincount(self._eval(range(self.eval_size))[0], minlength=len(counts))
            counted = [
                text.counted(int(count)) for text, count in zip(self._texts, examples, strict=True)
            ]
            targets = sum(part.targets for part in counted)
            self.bytes_per_token = sum(part.text_bytes for part in counted) / max(targets, 1)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for text in self._texts:
                stack.enter_context(text.preparing())
            yield

    @property
    def has_conversations(self) -> bool:
        """True if a part is a chat."""
        return not all(isinstance(text, TextWindows) for text in self._texts)

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        texts, examples = self._train(interface.batch_indices(k, self.batch_size, rows))
        parts = [text.train_examples(examples[texts == i]) for i, text in enumerate(self._texts)]
        return _joined(parts, texts)

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = np.array(interface.batch_indices(j, self.eval_batch_size, rows))
        texts, examples = self._eval(indices)
        parts = [text.eval_examples_of(examples[texts == i]) for i, text in enumerate(self._texts)]
        batch = _joined(parts, texts)
        batch["weights"][indices >= self.eval_size] = 0.0
        return batch


def _joined(parts: Sequence[Batch], texts: np.ndarray) -> Batch:
    """Return one batch of the rows of several.

    Args:
        parts: rows of each text, in their order.
        texts: number of the text of each row of the batch, [B].
    """
    batch = {
        name: np.empty((len(texts), *array.shape[1:]), array.dtype)
        for name, array in parts[0].items()
    }
    for i, part in enumerate(parts):
        for name, array in part.items():
            batch[name][texts == i] = array
    return batch
