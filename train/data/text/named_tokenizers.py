"""The tokenizer that data.tokenizer names: bytes, ids, a file, or a vocabulary that the data make (bpe:SIZE)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from mupax.disk import path_of
from mupax.train.data import cache
from mupax.train.data.interface import DataError
from mupax.train.data.text.quoting import SpecialTokens
from mupax.train.data.text.tokenizer import SEPARATOR, Bytes, Ids, Subwords, Tokenizer, decoded

SMALLEST_BPE = 257
"""Every byte, and a separator."""
_TRAINING_BYTES = 1 << 28


def opened(
    name: str,
    separator: str | None = None,
    special_tokens: SpecialTokens = "parse",
    template_tokens: Collection[str] = (),
) -> Tokenizer | None:
    """The tokenizer of a data.tokenizer: bytes, ids:SIZE or the path of a tokenizer.json; None of bpe:SIZE, which data make.

    Args:
        name: data.tokenizer.
        separator: data.separator.
        special_tokens: data.special_tokens.
        template_tokens: as `Subwords` takes them.

    Raises:
        DataError: there is none of that name, or it has not this separator.
    """
    if bpe_size(name) is not None:
        return None
    size = _size(name, "ids", 2)
    if name != "bytes" and size is None:
        return Subwords(path_of(name), separator, special_tokens, template_tokens)
    if size is None:
        if separator is not None:
            raise DataError(
                f"data.separator is {separator!r}, and of bytes it is byte 0; leave it out"
            )
        return Bytes()
    last = (
        size - 1
        if separator is None
        else int(separator)
        if separator.isascii() and separator.isdigit()
        else size
    )
    if last >= size:
        raise DataError(
            f"data.separator is {separator!r}; of data.tokenizer {name} write an id below {size}"
        )
    return Ids(f"ids{size}-{last}", size, last)


def bpe_size(name: str) -> int | None:
    """SIZE of bpe:SIZE; None for other names.

    Raises:
        DataError: SIZE is not a number that holds every byte and the separator.
    """
    return _size(name, "bpe", SMALLEST_BPE)


def cached(name: str, separator: str | None, key: str) -> Path | None:
    """Return the tokenizer.json in the cache that `bpe:SIZE` made with a given content, or None.

    Args:
        name: data.tokenizer; other names than bpe:SIZE are not in the cache.
        separator: data.separator.
        key: names the content (`Subwords.key`).
    """
    size = bpe_size(name)
    if size is None:
        return None
    for path in sorted((cache.root() / "tokenizers").glob(f"bpe{size}-*.json")):
        try:
            if Subwords(path, separator).key == key:
                return path
        except DataError:  # damaged, or being deleted
            continue
    return None


def _size(name: str, kind: str, least: int) -> int | None:
    """SIZE of KIND:SIZE; None for other names."""
    if not name.startswith(f"{kind}:"):
        return None
    size = name.removeprefix(f"{kind}:")
    if not size.isascii() or not size.isdigit() or int(size) < least:
        raise DataError(
            f"data.tokenizer is {name!r}; write {kind}:SIZE with a SIZE of at least {least}"
        )
    return int(size)


def train_bpe(texts: Iterable[bytes], size: int, special: Sequence[str] = ()) -> Any:
    """Return a byte-level BPE `tokenizers.Tokenizer`, trained on the texts (256 MB of them at most).

    Args:
        texts: documents in UTF-8; read until there are enough.
        size: tokens at most, the 256 bytes and the special tokens among them.
        special: tokens that are no text, beside the separator.

    Raises:
        DataError: a text is not UTF-8, or the size does not hold the bytes and special tokens.
    """
    tokens = [*dict.fromkeys((SEPARATOR, *special))]
    if size < 256 + len(tokens):
        raise DataError(
            f"a tokenizer of {size} tokens has no room for 256 bytes and {', '.join(tokens)}; write at least {256 + len(tokens)}"
        )
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(_first(texts, _TRAINING_BYTES), trainer)
    return library


def _first(texts: Iterable[bytes], size: int) -> Iterable[str]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text)
        yield decoded(text)
