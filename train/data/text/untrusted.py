"""Checks of an untrusted tokenizer.json, used by `tokenizer.Subwords`.

The `tokenizers` library builds a tree of some hundred bytes per character from a list of pieces,
and applies a normalizer that writes a book for every letter. Real vocabularies are far from these
bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from mupax.train.data.interface import DataError

_LARGEST_FILE = 256 * 2**20
_PIECE_CHARACTERS = 24
"""Largest mean length of the pieces of a Unigram model, in characters. XLM-R has 6."""
_FEW_CHARACTERS = 2**18
"""Total characters of the pieces below which their length is not checked."""
_LONGEST_SPECIAL = 200
"""Largest length of a special token in characters. The longest of published models has 60."""
_LONGEST_AFFIX = 64
"""Largest length of the prefix or suffix that marks a part of a word, in characters."""
_LONGEST_WORD = 10_000
"""Largest word of a WordPiece model in characters. Its time is quadratic. BERT has 100."""
_LARGEST_STEP = 2**20
"""Largest JSON of a normalizer, pre-tokenizer, post-processor or decoder, in characters, without a
table of characters."""
_MOST_GROWTH = 1000.0
"""Largest factor by which a normalizer or decoder may lengthen a text."""
_GAP = 64
"""Largest number of ids per token of the vocabulary."""
_UNIGRAM = re.compile(rb'"vocab"\s*:\s*\[')
_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
"""Escaped ASCII letters, which no program writes except to hide a word from a search."""


def check_content(content: bytes, name: str) -> None:
    """Raise an error for a tokenizer.json that would fill the memory when the library opens it.

    Only a file that may be a Unigram model is parsed. Any other file passes by its size alone.

    Args:
        name: Name of the file, for the message.

    Raises:
        DataError: The file is larger than 256 MiB, or is parsed and is no JSON or has pieces that
            are too long.
    """
    if len(content) > _LARGEST_FILE:
        raise DataError(
            f"{name} is larger than {_LARGEST_FILE >> 20} MiB, which no tokenizer.json is"
        )
    if not (_UNIGRAM.search(content) or _ESCAPED_ASCII.search(content)):
        return  # models of other types take about as much memory as the file
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

    pieces = []
    for entry in vocab:
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            pieces.append(entry[0])
    total = sum(len(piece) for piece in pieces)
    if total > max(_FEW_CHARACTERS, _PIECE_CHARACTERS * len(pieces)):
        raise DataError(
            f"{name} has {len(pieces):,} pieces of {total // len(pieces):,} characters on average, "
            "and a tree of them would fill the memory; a vocabulary has pieces of "
            f"{_PIECE_CHARACTERS} characters at most on average. Get the file again"
        )


def check_library(library: Any, ids: Collection[int], name: str) -> float:
    """Check the parts of an opened tokenizer, and return how much it may lengthen a text.

    Args:
        library: Opened `tokenizers.Tokenizer`.
        ids: Id of each token of the vocabulary, added tokens included.
        name: Name of the file, for the message.

    Returns:
        The largest factor by which the normalizer or the decoder may lengthen a text.

    Raises:
        DataError: A part is too large, lengthens a text too much, or has too long affixes, words or
            special tokens, or ids have large holes. The message names the part.
    """
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        step = getattr(library, part)
        if step is not None:
            _check_step(_described(step), part, name)
    growth = _checked_growth(library, name)
    _check_model(library.model, name)
    for token in library.get_added_tokens_decoder().values():
        if token.special and len(token.content) > _LONGEST_SPECIAL:
            raise DataError(
                f"{name} has a special token of {len(token.content):,} characters; "
                f"write one of {_LONGEST_SPECIAL} at most"
            )
    if ids and max(ids) > _GAP * (len(ids) + 1024):
        raise DataError(
            f"{name} has the id {max(ids):,} and {len(ids):,} tokens; number its tokens from 0 on"
        )
    return growth


def _checked_growth(library: Any, name: str) -> float:
    """Return the largest factor by which the normalizer or the decoder may lengthen a text.

    Raises:
        DataError: The factor of one of them is larger than `_MOST_GROWTH`.
    """
    growth = 1.0
    for part in ("normalizer", "decoder"):
        step = getattr(library, part)
        total = 1.0
        if step is not None:
            for fields in _steps(_described(step)):
                total *= _growth(fields)
        if total > _MOST_GROWTH:
            raise DataError(
                f"{name} has a {part} that makes a text {total:,.0f} times as long; "
                "take its Replace or Prepend out of the file"
            )
        growth = max(growth, total)
    return growth


def _check_model(model: Any, name: str) -> None:
    """Raise `DataError` for a model with too long prefixes, suffixes or words."""
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, field, None)
        if isinstance(affix, str) and len(affix) > _LONGEST_AFFIX:
            raise DataError(
                f"{name} has a {field} of {len(affix):,} characters; "
                f"write one of {_LONGEST_AFFIX} at most"
            )
    longest = getattr(model, "max_input_chars_per_word", None)
    if isinstance(longest, int) and longest > _LONGEST_WORD:
        raise DataError(
            f"{name} has max_input_chars_per_word {longest:,}; write {_LONGEST_WORD:,} at most"
        )


def _described(step: Any) -> Any:
    """Return the JSON of a part of a tokenizer, or an empty object for a part made in Python."""
    try:
        return json.loads(step.__getstate__())
    except (TypeError, ValueError, RecursionError):
        return {}


def _check_step(fields: Any, part: str, name: str) -> None:
    """Raise `DataError` for a part of a tokenizer whose JSON is too large, without its tables.

    The tables (`precompiled_charsmap`) are removed from `fields` in place.
    """
    tables = [step.pop("precompiled_charsmap", None) for step in _steps(fields)]
    size = len(json.dumps(fields))
    if size > _LARGEST_STEP:
        table = " beside its table" if any(tables) else ""
        raise DataError(
            f"{name} has a {part} of {size:,} characters{table}, and a real one has some hundred; "
            "get the file again"
        )


def _steps(fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON value, an object before the objects that it contains."""
    waiting = [fields]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _growth(step: dict[str, Any]) -> float:
    """Return the factor, at least 1, by which a step may lengthen a text.

    The step is one of a normalizer or decoder. Only types Prepend and Replace lengthen a text.
    """
    if step.get("type") == "Prepend" and isinstance(step.get("prepend"), str):
        return float(max(1, len(step["prepend"])))
    content = step.get("content")
    if step.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    pattern = step.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    # A regular expression may match one character, or none at all.
    replaced_length = len(replaced) if isinstance(replaced, str) else 1
    return max(1.0, len(content) / max(1, replaced_length))
