"""Special ids and sentence boundaries of a vocabulary, for span corruption (`noise.py`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mupax.train.data.interface import DataError
from mupax.train.data.text.tokenizer import Tokenizer

_NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|endoftext|>", "<|end_of_text|>"),
    "bos": ("<s>", "<bos>", "[CLS]", "<|startoftext|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}
_STOPS = (".", "!", "?", "。")


class SpecialIds(NamedTuple):
    """Ids of the tokens that span corruption adds to a text.

    Attributes:
        pad: Id that fills the end of a row. It does not count in the loss.
        eos: Id at the end of inputs and targets.
        bos: Id at the beginning of inputs and targets in text infilling.
        mask: Id that replaces a cut span in text infilling.
        sentinels: Ids of sentinel 0, sentinel 1 and so on, as many as a window may use. A sentinel
            replaces a cut span in T5's span corruption.
    """

    pad: int
    eos: int
    bos: int
    mask: int
    sentinels: tuple[int, ...]

    def names(self) -> dict[int, str]:
        """Return the name to print for each special id, such as "</s>", or "<0>" for a sentinel."""
        names = {self.pad: "<pad>", self.eos: "</s>", self.bos: "<s>", self.mask: "<mask>"}
        for i, token in enumerate(self.sentinels):
            names[token] = f"<{i}>"
        return names


def special_ids(tokenizer: Tokenizer, sentinels: int, vocab_size: int | None = None) -> SpecialIds:
    """Return the special ids of a tokenizer, with new ids for those that it lacks.

    The tokenizer's own tokens are found by their usual names, such as `<extra_id_0>` for a
    sentinel. New ids follow the tokenizer's last id, in the order pad, eos, bos, mask, sentinels.
    The tokenizer `bytes` has 256 to 259, and sentinels from 260 on.

    Args:
        tokenizer: Tokenizer that made the tokens.
        sentinels: Number of sentinels in use, from `<extra_id_0>` on.
        vocab_size: Vocabulary size of the model, which bounds the new ids. Default: no bound.

    Raises:
        DataError: The model's vocabulary has no room for the ids that the tokenizer lacks.
    """
    names: dict[str, tuple[str, ...]] = {**_NAMES}
    for i in range(sentinels):
        names[f"sentinel {i}"] = (f"<extra_id_{i}>",)
    ids = {name: tokenizer.find(*tokens) for name, tokens in names.items()}
    missing = [name for name, token in ids.items() if token is None]
    needed = tokenizer.vocab_size + len(missing)

    if vocab_size is not None and missing and needed > vocab_size:
        words = [name for name in missing if name in _NAMES]
        num_sentinels = len(missing) - len(words)
        if num_sentinels:
            words.append(f"{num_sentinels} sentinels")
        raise DataError(
            f"the tokenizer has no {', '.join(words)}, and the model's {vocab_size} tokens leave "
            f"no ids for them after its own {tokenizer.vocab_size}; "
            f"write --model.vocab-size {needed}"
        )

    ids |= dict(zip(missing, range(tokenizer.vocab_size, needed), strict=True))
    pad, eos, bos, mask, *sentinel_ids = (token for token in ids.values() if token is not None)
    return SpecialIds(pad, eos, bos, mask, tuple(sentinel_ids))


class Sentences:
    """Finder of the tokens that begin a sentence, for text infilling, which shuffles sentences.

    A sentence ends at the end of a line (empty lines included), at the end of a document, and at a
    full stop, question mark or exclamation mark that a space follows. The space begins the next
    sentence. So `self.x = 0.5` is one sentence, and code is split by lines. The first token of a
    window begins a sentence, as in fairseq.

    Args:
        tokenizer: Tokenizer that made the tokens.
        size: Size of the vocabulary, special ids included.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._size = size
        pieces = tokenizer.pieces()
        self._ends_line = self._table([piece.endswith("\n") for piece in pieces])
        self._starts_line = self._table([piece.startswith("\n") for piece in pieces])
        self._stops = self._table([piece.endswith(_STOPS) for piece in pieces])
        self._spaces = self._table([piece.startswith(" ") for piece in pieces])
        self._ends_line[tokenizer.separator] = True
        self._starts_line[tokenizer.separator] = True

    def _table(self, properties: list[bool]) -> np.ndarray:
        """Return a property of every id as an array, bool [size].

        Args:
            properties: Property of each id of the tokenizer. Ids after these, which are special,
                have `False`.
        """
        padding = [False] * (self._size - len(properties))
        return np.array(properties + padding)

    def starts(self, tokens: np.ndarray) -> np.ndarray:
        """Return a mask of the tokens that begin a sentence, bool [B, N].

        Args:
            tokens: Windows, [B, N].
        """
        previous = tokens[:, :-1]
        current = tokens[:, 1:]
        after_line = self._ends_line[previous] & ~self._starts_line[current]
        after_stop = self._stops[previous] & self._spaces[current]
        begins = after_line | after_stop
        return np.pad(begins, ((0, 0), (1, 0)), constant_values=True)
