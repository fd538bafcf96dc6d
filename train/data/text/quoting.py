"""Special tokens that a text quotes: their counts, and a tokenizer that encodes them as plain text.

A text about language models may contain "<|endoftext|>". The plain tokenizer has every special
token under another name, which begins with NUL (`MARK`). No text contains NUL, so no text is
encoded as a special token. A caller that writes a special token on purpose, such as a chat
template, writes NUL before the token.
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
"""Character NUL, which stands before a special token that is written on purpose."""
_LISTED = 4


def pattern(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the special tokens, the longest where several match.

    If `tokens` is empty, the pattern matches nothing.

    Args:
        tokens: Special tokens as they are written, such as "</s>".
    """
    return re.compile(_tree(sorted({*tokens} - {""})) or "(?!)")


class QuoteCounter:
    """Counter of the special tokens that texts quote.

    Args:
        tokens: Special tokens as they are written, such as "</s>".
    """

    def __init__(self, tokens: Collection[str]) -> None:
        # One pattern per first character: Python's `re` searches for a fixed beginning quickly, and
        # for one of several beginnings slowly.
        self._patterns = []
        for first in sorted({token[:1] for token in tokens if token}):
            group = [token for token in tokens if token[:1] == first]
            self._patterns.append(re.compile(pattern(group).pattern.encode()))

    def __call__(self, text: bytes) -> dict[str, int]:
        """Return the number of times that each token stands in a text. Absent tokens are left out.

        Args:
            text: Text in UTF-8.
        """
        total = collections.Counter()
        for token_pattern in self._patterns:
            total.update(token_pattern.findall(text))
        counts = {}
        for token, count in total.items():
            counts[token.decode()] = count
        return counts


def _tree(tokens: list[str]) -> str:
    """Return a regular expression that matches any of some sorted strings, the longest first.

    Common beginnings of the strings occur once in the expression, which makes it quick.
    """
    endings = {}
    for first, group in itertools.groupby(tokens, lambda token: token[:1]):
        endings[first] = [token[1:] for token in group]
    branches = []
    for first, suffixes in endings.items():
        if first:
            branches.append(re.escape(first) + _tree(suffixes))
    tree = "|".join(branches)
    if "" in endings:
        # One token ends here and longer ones go on. The optional group is greedy, so the longest
        # matches.
        return f"(?:{tree})?" if tree else ""
    return f"(?:{tree})" if len(branches) > 1 else tree


def note_counts(
    note: Callable[[str], None],
    name: str,
    sides: Sequence[Mapping[str, int] | None],
    mode: SpecialTokens,
) -> dict[str, int]:
    """Tell the user how often texts contain special tokens. Return the counts by token.

    Args:
        note: Function that prints a line for the user. It is not called if there are no tokens.
        name: Name of the data, for the message.
        sides: Counts by token, for the training text and the evaluation text. They are added.
            `None` if the counts are unknown.
        mode: Value of `data.special_tokens`, "text" or "parse". "parse" makes the line a caution.
    """
    total = collections.Counter()
    for side in sides:
        total += collections.Counter(side or {})
    if not total:
        return {}

    counts = []
    for token, count in total.most_common(_LISTED):
        times = "times" if count > 1 else "time"
        counts.append(f"{token} {count:,} {times}")
    listed = ", ".join(counts)
    remainder = f" and {len(total) - _LISTED} others" if len(total) > _LISTED else ""
    if mode == "text":
        note(f"special tokens in the texts of {name} are read as plain text: {listed}{remainder}")
    else:
        note(
            f"caution: special tokens stand in the texts of {name}: {listed}{remainder}. "
            "They are read as tokens, which may end a document or a turn there; "
            "write --data.special-tokens text to read them as plain text"
        )
    return dict(total)


def plain_library(content: bytes, tokens: Collection[str]) -> Any:
    """Return a `tokenizers.Tokenizer` that encodes special tokens in a text as plain text.

    Only a special token with `MARK` before it is encoded as the token.

    Args:
        content: Content of a tokenizer.json, which would encode special tokens as tokens.
        tokens: Special tokens as they are written.
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
        model["vocab"] = {_plain_name(piece, tokens): i for piece, i in vocab.items()}
    else:
        model["vocab"] = [[_plain_name(piece, tokens), score] for piece, score in vocab]
    # Without these merges, the pieces of a special token stay apart.
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, tokens)]
    library = Tokenizer.from_str(json.dumps(fields))
    library.no_padding()
    library.no_truncation()
    return library


def _plain_name(piece: str, tokens: Collection[str]) -> str:
    """Return the name that a token of the vocabulary has in the plain tokenizer (`plain_library`).

    A special token gets `MARK` in front. Any other keeps its name.
    """
    return MARK + piece if piece in tokens else piece


def _makes(merge: str | Sequence[str], tokens: Collection[str]) -> bool:
    """Return whether a BPE merge makes a special token, or makes a token from one.

    Args:
        merge: The two tokens that are merged, as a pair or as a string with a space between them.
    """
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first in tokens or second in tokens or first + second in tokens


def marked(text: str, places: Sequence[int]) -> tuple[str, np.ndarray]:
    """Insert `MARK` before some special tokens of a text, for the plain tokenizer.

    Args:
        text: Text with special tokens.
        places: Index of the first character of each special token to mark, ascending.

    Returns:
        Text with the marks. And for each of its characters, the index of the same character in
        `text`, int64 [length]. A mark has the index of the character after it.
    """
    edges = [0, *places, len(text)]
    parts = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    starts = np.array(places, np.int64)
    origin = np.insert(np.arange(len(text)), starts, starts)
    return MARK.join(parts), origin
