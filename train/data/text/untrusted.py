"""Checks of a stranger's tokenizer.json: parts of it that would fill the memory, or turn a short text into an endless one.

The library of tokenizers makes what a file says. A list of pieces becomes a tree of some hundred bytes per character, and a
normalizer may write a book for every letter. Real vocabularies are far from these bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from mupax.train.data.interface import DataError

_LARGEST_FILE = 256 * 2**20
_PIECE_CHARACTERS = 24
"""Of the pieces of a Unigram model, on average. XLM-R's have 6."""
_FEW_CHARACTERS = 2**18
"""Fewer need no check."""
_LONGEST_SPECIAL = 200
"""Characters of a special token; the longest of published models has 60."""
_LONGEST_AFFIX = 64
"""Characters of what marks the beginning or the end of a word."""
_LONGEST_WORD = 10_000
"""Characters of a word in a WordPiece model, which takes the square of it in time. BERT has 100."""
_LARGEST_STEP = 2**20
"""Characters of JSON that describe a normalizer, pre-tokenizer, post-processor or decoder, without a table of characters."""
_MOST_GROWTH = 1000.0
_GAP = 64
"""Ids that a vocabulary may have for each of its tokens."""
_UNIGRAM = re.compile(rb'"vocab"\s*:\s*\[')
_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
"""No program writes letters so, but to hide a word from a search."""


def check_content(content: bytes, name: str) -> None:
    """Refuse a tokenizer.json that the library must not open.

    Args:
        name: of the file, for the message.

    Raises:
        DataError: it is too large, or a Unigram model whose pieces are too long.
    """
    if len(content) > _LARGEST_FILE:
        raise DataError(
            f"{name} is larger than {_LARGEST_FILE >> 20} MiB, which no tokenizer.json is"
        )
    if not (_UNIGRAM.search(content) or _ESCAPED_ASCII.search(content)):
        return  # the other models take about as much memory as the file
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name} is no tokenizer.json of the `tokenizers` library: {error!s:.300}"
        ) from error
    model = fields.get("model") if isinstance(fields, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, list):
        return
    pieces = [
        entry[0]
        for entry in vocab
        if isinstance(entry, list) and entry and isinstance(entry[0], str)
    ]
    total = sum(map(len, pieces))
    if total > max(_FEW_CHARACTERS, _PIECE_CHARACTERS * len(pieces)):
        raise DataError(
            f"{name} has {len(pieces):,} pieces of {total // len(pieces):,} characters on average, and a tree of them would fill "
            f"the memory; a vocabulary has pieces of {_PIECE_CHARACTERS} characters at most on average. Get the file again"
        )


def check_library(library: Any, ids: Collection[int], name: str) -> float:
    """Refuse an opened tokenizer that makes too much of a text. Return how many times longer a normalizer may make a text.

    Args:
        library: `tokenizers.Tokenizer`.
        name: of the file, for the message.

    Raises:
        DataError: a part of it is beyond what a vocabulary needs; the text names the part.
    """
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        step = getattr(library, part)
        if step is not None:
            _check_step(_described(step), part, name)
    growth = 1.0
    for part in ("normalizer", "decoder"):
        step = getattr(library, part)
        growths = (
            [_growth(fields) for fields in _steps(_described(step))] if step is not None else []
        )
        total = 1.0
        for factor in growths:
            total *= factor
        if total > _MOST_GROWTH:
            raise DataError(
                f"{name} has a {part} that makes a text {total:,.0f} times as long; take its Replace or Prepend out of the file"
            )
        growth = max(growth, total)
    model = library.model
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, field, None)
        if isinstance(affix, str) and len(affix) > _LONGEST_AFFIX:
            raise DataError(
                f"{name} has a {field} of {len(affix):,} characters; write one of {_LONGEST_AFFIX} at most"
            )
    longest = getattr(model, "max_input_chars_per_word", None)
    if isinstance(longest, int) and longest > _LONGEST_WORD:
        raise DataError(
            f"{name} has max_input_chars_per_word {longest:,}; write {_LONGEST_WORD:,} at most"
        )
    for token in library.get_added_tokens_decoder().values():
        if token.special and len(token.content) > _LONGEST_SPECIAL:
            raise DataError(
                f"{name} has a special token of {len(token.content):,} characters; write one of {_LONGEST_SPECIAL} at most"
            )
    if ids and max(ids) > _GAP * (len(ids) + 1024):
        raise DataError(
            f"{name} has the id {max(ids):,} and {len(ids):,} tokens; number its tokens from 0 on"
        )
    return growth


def _described(step: Any) -> Any:
    """Return the JSON of a part of a tokenizer; an empty object of a part that is made in Python."""
    try:
        return json.loads(step.__getstate__())
    except (TypeError, ValueError, RecursionError):
        return {}


def _check_step(fields: Any, part: str, name: str) -> None:
    tables = [step.pop("precompiled_charsmap", None) for step in _steps(fields)]
    size = len(json.dumps(fields))
    if size > _LARGEST_STEP:
        raise DataError(
            f"{name} has a {part} of {size:,} characters{' beside its table' if any(tables) else ''}, and a real one has some "
            "hundred; get the file again"
        )


def _steps(fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a description, each before those that are in it."""
    waiting = [fields]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _growth(step: dict[str, Any]) -> float:
    """Return how many times longer a step of a normalizer or decoder may make a text of some length."""
    if step.get("type") == "Prepend" and isinstance(step.get("prepend"), str):
        return float(max(1, len(step["prepend"])))
    content = step.get("content")
    if step.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    pattern = step.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    # A regular expression may stand for one character, or for none at all.
    return max(1.0, len(content) / max(1, len(replaced) if isinstance(replaced, str) else 1))
