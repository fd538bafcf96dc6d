"""Special tokens that are quoted in a text: how often they are, and a tokenizer that encodes them as plain text.

The plain tokenizer knows every special token by another name, which begins with NUL. No text has NUL, so no text makes such a
token, whatever the kind of model. Who writes a special token on purpose, as a chat template does, writes NUL before it.
"""

from __future__ import annotations

import collections
import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

SpecialTokens = Literal["parse", "text"]
MARK = "\0"
_LISTED = 4


def pattern(tokens: Collection[str]) -> re.Pattern[str]:
    """Return what finds special tokens in a text; of several that begin alike, the longest.

    Args:
        tokens: as they are written.
    """
    return re.compile(_tree(sorted({*tokens} - {""})) or "(?!)")


class QuoteCounter:
    """Counter of the special tokens that texts quote.

    Args:
        tokens: as they are written.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        # A pattern per first character: Python's `re` looks for a fixed beginning quickly, and for one of several slowly.
        beginnings = sorted({token[:1] for token in tokens if token})
        groups = [[token for token in tokens if token[:1] == first] for first in beginnings]
        self._patterns = [re.compile(pattern(group).pattern.encode()) for group in groups]

    def __call__(self, text: bytes) -> dict[str, int]:
        """Return the number of each token that stands in a text.

        Args:
            text: in UTF-8.
        """
        total = collections.Counter()
        for group in self._patterns:
            total.update(group.findall(text))
        return {token.decode(): count for token, count in total.items()}


def _tree(tokens: list[str]) -> str:
    """Return a regular expression for sorted strings, in which no character is looked at twice."""
    branches = []
    endings = {
        first: [token[1:] for token in group]
        for first, group in itertools.groupby(tokens, lambda token: token[:1])
    }
    for first, following in endings.items():
        if first:
            branches.append(re.escape(first) + _tree(following))
    tree = "|".join(branches)
    if "" in endings:
        return f"(?:{tree})?" if tree else ""
    return f"(?:{tree})" if len(branches) > 1 else tree


def note_counts(
    note: Callable[[str], None],
    name: str,
    sides: Sequence[Mapping[str, int] | None],
    mode: SpecialTokens,
) -> dict[str, int]:
    """Tell the user how often special tokens stand in the texts, and return the counts.

    Args:
        note: told a line, if there are any.
        name: of the data.
        sides: counts of each side of the split; None where they are not known.
        mode: data.special_tokens.
    """
    total = sum((collections.Counter(side or {}) for side in sides), collections.Counter())
    if not total:
        return {}
    listed = ", ".join(
        f"{token} {count:,} time{'s' * (count > 1)}" for token, count in total.most_common(_LISTED)
    )
    more = f" and {len(total) - _LISTED} others" if len(total) > _LISTED else ""
    if mode == "text":
        note(f"special tokens in the texts of {name} are read as plain text: {listed}{more}")
    else:
        note(
            f"caution: special tokens stand in the texts of {name}: {listed}{more}. They are read as tokens, which may end a "
            "document or a turn there; write --data.special-tokens text to read them as plain text"
        )
    return dict(total)


def plain_library(content: bytes, tokens: Collection[str]) -> Any:
    """Return a `tokenizers.Tokenizer` that makes these tokens only of their names with `MARK` before them.

    Args:
        content: of a tokenizer.json.
        tokens: special tokens.
    """
    from tokenizers import Tokenizer

    fields = json.loads(content)
    for added in fields.get("added_tokens", []):
        if added["content"] in tokens:
            added["content"] = MARK + added["content"]
            added["normalized"] = False  # a normalizer may remove NUL
    model = fields["model"]
    if model.get("unk_token") in tokens:
        model["unk_token"] = MARK + model["unk_token"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {
            MARK + piece if piece in tokens else piece: i for piece, i in vocab.items()
        }
    else:
        model["vocab"] = [
            [MARK + piece if piece in tokens else piece, score] for piece, score in vocab
        ]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, tokens)]
    library = Tokenizer.from_str(json.dumps(fields))
    library.no_padding()
    library.no_truncation()
    return library


def _makes(merge: str | Sequence[str], tokens: Collection[str]) -> bool:
    """Return whether a merge makes a special token, or goes on with one."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first in tokens or second in tokens or first + second in tokens


def marked(text: str, places: Sequence[int]) -> tuple[str, np.ndarray]:
    """Return a text with `MARK` before the tokens that begin at some places, and the place in `text` of each of its characters.

    Args:
        text: with special tokens.
        places: where one begins that is a token, in order.
    """
    edges = [0, *places, len(text)]
    parts = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    starts = np.array(places, np.int64)
    origin = np.insert(np.arange(len(text)), starts, starts)
    return MARK.join(parts), origin
