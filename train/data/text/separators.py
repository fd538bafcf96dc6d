"""Check that documents end somewhere in a training text, for the loaders of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mupax.train.data import cache
from mupax.train.data.text.tokenizer import Bytes, Subwords

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

_BLOCK_TOKENS = 1 << 20
_MOST_TOKENS = 1 << 28
"""Largest number of tokens that are searched for a separator."""


def check(
    config: DataConfig,
    encoder: Bytes | Subwords,
    tokens: np.ndarray,
    note: cache.Note,
    *,
    is_text: bool,
) -> None:
    """Caution the user if no document ends before the last token, so that all is one document.

    Tokens that were made from text are only checked if `data.document_mask` is set. Only the first
    268 million tokens are searched.

    Args:
        tokens: Ids of the training or the evaluation text, [count].
        note: Function that prints a line for the user.
        is_text: True if the tokens were made from text. False if they are ids of a file.
    """
    # A text of one document is fine without a mask. A model of ids without a separator never
    # learns to end a document.
    if is_text and not config.document_mask:
        return
    if _occurs(encoder.separator, tokens[:-1]):
        return

    effect = "a model does not learn where documents end"
    if config.document_mask:
        effect = "--data.document-mask has no effect"
    if is_text:
        note(
            f"caution: the text of {config.name} is one document, so {effect}; "
            "leave it out, or give documents as files or records"
        )
    else:
        note(
            f"caution: the separator {encoder.separator} never occurs in the ids of "
            f"{config.name}, so {effect}; "
            "write --data.separator with the token that ends documents"
        )


def _occurs(separator: int, tokens: np.ndarray) -> bool:
    """Return whether the separator is among the first `_MOST_TOKENS` tokens."""
    for start in range(0, min(len(tokens), _MOST_TOKENS), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS]
        if (block == separator).any():
            return True
    return False
