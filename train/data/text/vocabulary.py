"""What denoising asks of a vocabulary: ids of mask, sentinels, bos, eos and pad, and where a sentence begins."""

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
    """Ids of tokens that stand for no text."""

    pad: int
    eos: int
    bos: int
    mask: int
    sentinels: tuple[int, ...]

    def names(self) -> dict[int, str]:
        """What to print for each id."""
        words = {self.pad: "<pad>", self.eos: "</s>", self.bos: "<s>", self.mask: "<mask>"}
        return {**words, **{token: f"<{i}>" for i, token in enumerate(self.sentinels)}}


def special_ids(tokenizer: Tokenizer, sentinels: int, vocab_size: int | None = None) -> SpecialIds:
    """The ids: the tokenizer's own by their usual names, and new ones after its last for those it has not.

    New ids come in the order pad, eos, bos, mask, sentinels: of `bytes` they are 256, 257, 258, 259 and 260 on.

    Args:
        tokenizer: made the tokens.
        sentinels: how many of them are in use; `<extra_id_0>` and on by name.
        vocab_size: of the model, which says how many new ids there may be; any number unless given.

    Raises:
        DataError: the tokenizer lacks some, and the model's vocabulary has no room for them.
    """
    names = {**_NAMES, **{f"sentinel {i}": (f"<extra_id_{i}>",) for i in range(sentinels)}}
    ids = {name: tokenizer.find(*tokens) for name, tokens in names.items()}
    missing = [name for name, token in ids.items() if token is None]
    needed = tokenizer.vocab_size + len(missing)
    if vocab_size is not None and missing and needed > vocab_size:
        words = [name for name in missing if name in _NAMES]
        words += [f"{len(missing) - len(words)} sentinels"] if len(missing) > len(words) else []
        raise DataError(
            f"the tokenizer has no {', '.join(words)}, and the model's {vocab_size} tokens leave no ids for "
            f"them after its own {tokenizer.vocab_size}; write --model.vocab-size {needed}"
        )
    ids |= dict(zip(missing, range(tokenizer.vocab_size, needed), strict=True))
    pad, eos, bos, mask, *rest = (token for token in ids.values() if token is not None)
    return SpecialIds(pad, eos, bos, mask, tuple(rest))


class Sentences:
    """Where sentences begin among tokens of a vocabulary.

    One ends with a line (or several empty ones), with a document, and with a full stop, question or exclamation mark before
    a space, which begins the next. So `self.x = 0.5` is one sentence, and code goes by lines. A window's first token begins
    one, its last ends one, as in fairseq.

    Args:
        tokenizer: made the tokens.
        size: of the vocabulary, special ids with it.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        pieces = tokenizer.pieces()

        def table(fits: list[bool]) -> np.ndarray:
            return np.array(fits + [False] * (size - len(fits)))

        self._ends_line = table([piece.endswith("\n") for piece in pieces])
        self._starts_line = table([piece.startswith("\n") for piece in pieces])
        self._stops = table([piece.endswith(_STOPS) for piece in pieces])
        self._spaces = table([piece.startswith(" ") for piece in pieces])
        self._ends_line[tokenizer.separator] = self._starts_line[tokenizer.separator] = True

    def starts(self, tokens: np.ndarray) -> np.ndarray:
        """Which tokens begin a sentence, bool [B, N].

        Args:
            tokens: [B, N].
        """
        before, after = tokens[:, :-1], tokens[:, 1:]
        begins = (
            self._ends_line[before] & ~self._starts_line[after]
            | self._stops[before] & self._spaces[after]
        )
        return np.pad(begins, ((0, 0), (1, 0)), constant_values=True)
