"""A caution where no document ends in a training text, so that `data.document_mask` has nothing to mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mupax.train.data import cache
from mupax.train.data.text.tokenizer import Bytes, Subwords

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

_TOKENS_AT_ONCE = 1 << 20
_MOST_TOKENS = 1 << 28


def check(
    config: DataConfig,
    encoder: Bytes | Subwords,
    tokens: np.ndarray,
    note: cache.Note,
    *,
    is_text: bool,
) -> None:
    """Tell the user if the separator never occurs before the last token.

    A text that is one document is no fault unless `data.document_mask` asks for several. Ids without a separator are: a model
    of them never learns to end.

    Args:
        config: of the data.
        encoder: whose separator is meant.
        tokens: of a side of the split, [count].
        note: told a line.
        is_text: whether all of it is text, and not ids that were made elsewhere.
    """
    if (is_text and not config.document_mask) or _occurs(encoder.separator, tokens[:-1]):
        return
    effect = (
        "--data.document-mask has no effect"
        if config.document_mask
        else "a model does not learn where documents end"
    )
    if is_text:
        note(
            f"caution: the text of {config.name} is one document, so {effect}; leave it out, or give documents as files or records"
        )
    else:
        note(
            f"caution: the separator {encoder.separator} never occurs in the ids of {config.name}, so {effect}; write "
            "--data.separator with the token that ends documents"
        )


def _occurs(separator: int, tokens: np.ndarray) -> bool:
    """Return whether a token is among the first `_MOST_TOKENS`."""
    starts = range(0, min(len(tokens), _MOST_TOKENS), _TOKENS_AT_ONCE)
    return any(
        bool((tokens[start : start + _TOKENS_AT_ONCE] == separator).any()) for start in starts
    )
