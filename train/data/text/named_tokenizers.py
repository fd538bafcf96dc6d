"""Tokenizers by the value of `data.tokenizer`: bytes, ids:SIZE, bpe:SIZE or a path.

ids:SIZE stands for the ids of an unknown tokenizer of SIZE tokens. bpe:SIZE is trained on the data.
"""

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
"""Smallest SIZE of bpe:SIZE: 256 bytes and a separator."""
_TRAINING_BYTES = 1 << 28
"""Number of bytes of text on which a BPE tokenizer is trained at most, about."""


def opened(
    name: str,
    separator: str | None = None,
    special_tokens: SpecialTokens = "parse",
    template_tokens: Collection[str] = (),
) -> Tokenizer | None:
    """Return the tokenizer that `data.tokenizer` names, or `None` for bpe:SIZE.

    The tokenizer of bpe:SIZE does not exist before it is trained on the data.

    Args:
        name: Value of `data.tokenizer`: bytes, ids:SIZE, bpe:SIZE or the path of a tokenizer.json.
        separator: Value of `data.separator`.
        special_tokens: Value of `data.special_tokens`.
        template_tokens: Special tokens of a chat template, which count as special tokens of the
            tokenizer.

    Raises:
        DataError: There is no tokenizer of this name, or it does not have the separator.
    """
    if bpe_size(name) is not None:
        return None
    size = _size(name, "ids", 2)
    if size is not None:
        return _ids(name, size, separator)
    if name != "bytes":
        return Subwords(path_of(name), separator, special_tokens, template_tokens)
    if separator is not None:
        raise DataError(f"data.separator is {separator!r}, and of bytes it is byte 0; leave it out")
    return Bytes()


def _ids(name: str, size: int, separator: str | None) -> Ids:
    """Return the tokenizer of ids:SIZE.

    Args:
        name: Value of `data.tokenizer`, for the message.
        size: SIZE, the number of ids, which are in [0, SIZE).
        separator: Id that ends a document, as text. The default is the last id.

    Raises:
        DataError: The separator is not a number below SIZE.
    """
    separator_id = size - 1
    if separator is not None:
        is_number = separator.isascii() and separator.isdigit()
        # `size` is no id, so that a word is refused below.
        separator_id = int(separator) if is_number else size
    if separator_id >= size:
        raise DataError(
            f"data.separator is {separator!r}; of data.tokenizer {name} write an id below {size}"
        )
    return Ids(f"ids{size}-{separator_id}", size, separator_id)


def bpe_size(name: str) -> int | None:
    """Return SIZE of bpe:SIZE, or `None` for other names.

    Raises:
        DataError: SIZE is not a number of at least `SMALLEST_BPE`.
    """
    return _size(name, "bpe", SMALLEST_BPE)


def cached(name: str, separator: str | None, key: str) -> Path | None:
    """Find the tokenizer.json of a bpe:SIZE in the cache, by the key that a run recorded.

    Returns `None` if there is none, and for other names than bpe:SIZE.

    Args:
        name: Value of `data.tokenizer`.
        separator: Value of `data.separator`.
        key: Key of the tokenizer (`Subwords.key`), which contains a digest of the file.
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
    """Return SIZE of a name KIND:SIZE, or `None` for a name of another kind.

    Args:
        name: Value of `data.tokenizer`.
        kind: KIND, which is "ids" or "bpe" here.
        least: Smallest SIZE that is accepted without an error.

    Raises:
        DataError: SIZE is not a number of at least `least`.
    """
    if not name.startswith(f"{kind}:"):
        return None
    size = name.removeprefix(f"{kind}:")
    if not size.isascii() or not size.isdigit() or int(size) < least:
        raise DataError(
            f"data.tokenizer is {name!r}; write {kind}:SIZE with a SIZE of at least {least}"
        )
    return int(size)


def train_bpe(texts: Iterable[bytes], size: int, special: Sequence[str] = ()) -> Any:
    """Train a byte-level BPE tokenizer on texts and return the `tokenizers.Tokenizer`.

    Args:
        texts: Documents in UTF-8. About 256 MiB are read.
        size: Largest number of tokens, the 256 bytes and the special tokens included.
        special: Special tokens in addition to the separator.

    Raises:
        DataError: A text is not UTF-8, or `size` has no room for the bytes and special tokens.
    """
    special_tokens = [*dict.fromkeys((SEPARATOR, *special))]
    smallest = 256 + len(special_tokens)
    if size < smallest:
        raise DataError(
            f"a tokenizer of {size} tokens has no room for 256 bytes and "
            f"{', '.join(special_tokens)}; write at least {smallest}"
        )
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    # A space before every text would be a byte that the text does not have.
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special_tokens,
        # The alphabet has all 256 bytes. Otherwise bytes that the training text lacks could not be
        # encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(_first(texts, _TRAINING_BYTES), trainer)
    return library


def _first(texts: Iterable[bytes], size: int) -> Iterable[str]:
    """Decode UTF-8 texts and yield them, until they have `size` bytes together."""
    remaining = size
    for text in texts:
        if remaining <= 0:
            return
        remaining -= len(text)
        yield decoded(text)
