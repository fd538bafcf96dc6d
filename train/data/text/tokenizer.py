"""Text to token ids and back: plain bytes, or a vocabulary of the `tokenizers` library.

A token that stands in no text separates documents: byte 0 for bytes, `<|endoftext|>` or the like otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from mupax.train.data.interface import DataError

SEPARATOR = "<|endoftext|>"
USUAL_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
"""What ends a document in the vocabularies of GPT-2, NeoX and Qwen; Llama 3; Llama 2, Mistral and T5; Gemma; DeepSeek; BERT."""
_SPACES = (("Ġ", " "), ("▁", " "), ("Ċ", "\n"), ("<0x0A>", "\n"))
"""How byte-level and SentencePiece vocabularies write spaces and line ends."""
_LISTED = 6
_NO_UTF8 = 0xFF
"""A byte that no UTF-8 has."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """One token per byte.

    Attributes:
        key: names a tokenizer and its content; part of the data's digest and of file names.
        vocab_size: ids are in [0, vocab_size).
        separator: id that ends every document.
    """

    key: str = "bytes"
    vocab_size: int = 256
    separator: int = 0

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each text, int32 [length]."""
        return [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]

    def spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of each text, int32 [length], and which of its characters each stands for: [start, stop), int64 [length, 2]."""
        counts = [[len(character.encode()) for character in text] for text in texts]
        starts = [np.repeat(np.arange(len(each)), each) for each in counts]
        ids = self.encode([text.encode() for text in texts])
        return [(each, np.stack([start, start + 1], axis=1)) for each, start in zip(ids, starts, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; bytes that are no UTF-8 come out as U+FFFD, and so does an id of a model whose vocabulary is larger."""
        return bytes(min(int(i), _NO_UTF8) for i in ids if i != self.separator).decode("utf-8", errors="replace")

    unknown: ClassVar[int | None] = None

    @property
    def start(self) -> np.ndarray:
        """What the tokenizer puts before a text that stands alone, int32 [length]: nothing, or the token that begins one."""
        return np.zeros(0, np.int32)

    @property
    def end(self) -> np.ndarray:
        """What the tokenizer puts after a text that stands alone, int32 [length]."""
        return np.zeros(0, np.int32)

    def find(self, *names: str) -> int | None:
        """Id of the first of these tokens that the vocabulary has; None where it has none of them."""
        return None

    def token(self, number: int) -> str | None:
        """Return the token of an id as the vocabulary writes it; None for a byte, which has no name."""
        return None

    def pieces(self) -> list[str]:
        """What each id stands for, a byte as the character of that number."""
        return [chr(byte) for byte in range(self.vocab_size)]


class Ids(Bytes):
    """Ids that were made elsewhere, by a tokenizer that is not here: no text can be encoded, and ids stand for themselves."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        words = [text.split() for text in texts]
        if not all(word.isdigit() and int(word) < self.vocab_size for text in words for word in text):
            raise DataError(
                f"the tokenizer of {self.key} is not known, so it has no text but ids below {self.vocab_size} between "
                "spaces; write data.tokenizer as the path of the tokenizer.json that made them"
            )
        return [np.array(text, np.int32) for text in words]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f"{int(i)} " for i in ids)

    def pieces(self) -> list[str]:
        return [f" {i}" for i in range(self.vocab_size)]


class Subwords:
    """A tokenizer.json of the `tokenizers` library, with what `Bytes` has.

    Args:
        path: the file.
        separator: the token that ends every document; found by its usual names unless given.

    Raises:
        DataError: there is no such file, it is no tokenizer, or it has no token that could separate documents.
    """

    def __init__(self, path: Path, separator: str | None = None) -> None:
        from tokenizers import Tokenizer as Library

        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"no tokenizer at {path}; write data.tokenizer as bytes, bpe:SIZE or the path of a tokenizer.json"
            ) from error
        self.path = path
        try:
            with self._calling():
                self._library = Library.from_buffer(content)
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path} is no tokenizer.json of the `tokenizers` library: {error!s:.300}") from error
        self._library.no_padding()  # of a model's inputs, not of texts: ids must not depend on the batch
        self._library.no_truncation()
        self._digest = hashlib.sha256(content).hexdigest()
        self.key = f"tokenizer-{self._digest[:16]}"
        self.vocab_size = 1 + max(self._library.get_vocab(with_added_tokens=True).values())
        usual = self.find(*USUAL_SEPARATORS)
        chosen = usual if separator is None else self.find(separator)
        if chosen is None:
            special = [token.content for token in self._library.get_added_tokens_decoder().values() if token.special]
            missing = "token to end a document with" if separator is None else f"token {separator}"
            raise DataError(
                f"{path} has no {missing}; write --data.separator with one of its tokens"
                + (f", such as {', '.join(special[:_LISTED])}" if special else f", or add {SEPARATOR} to it")
            )
        self.separator = chosen
        if chosen != usual:
            self.key += f"-{chosen}"  # what was packed with another is not this

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        # The library spreads a batch over the cores.
        with self._calling():
            encodings = self._library.encode_batch_fast([decoded(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        with self._calling():
            encodings = self._library.encode_batch([*texts], add_special_tokens=False)
        return [(np.array(each.ids, np.int32), np.array(each.offsets, np.int64).reshape(-1, 2)) for each in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        with self._calling():
            return self._library.decode([int(i) for i in ids], skip_special_tokens=True)

    @property
    def unknown(self) -> int | None:
        """Id of what the vocabulary has no word for; None where it has one for every byte."""
        name = getattr(self._library.model, "unk_token", None)
        return None if name is None else self.find(name)

    @property
    def start(self) -> np.ndarray:
        with self._calling():
            alone = self._library.encode("a", add_special_tokens=True)
        count = next((i for i, special in enumerate(alone.special_tokens_mask) if not special), 0)
        return np.array(alone.ids[:count], np.int32)

    @property
    def end(self) -> np.ndarray:
        with self._calling():
            alone = self._library.encode("a", add_special_tokens=True)
        count = next((i for i, special in enumerate(reversed(alone.special_tokens_mask)) if not special), 0)
        return np.array(alone.ids[len(alone.ids) - count :], np.int32)

    def find(self, *names: str) -> int | None:
        return next((i for i in map(self._library.token_to_id, names) if i is not None), None)

    def token(self, number: int) -> str | None:
        return self._library.id_to_token(number)

    def is_of(self, content: bytes) -> bool:
        """Whether this is the tokenizer of a file with that content."""
        return self._digest == hashlib.sha256(content).hexdigest()

    def pieces(self) -> list[str]:
        tokens = (self._library.id_to_token(i) or "" for i in range(self.vocab_size))
        return [functools.reduce(lambda piece, pair: piece.replace(*pair), _SPACES, token) for token in tokens]

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Turns a panic of the library, which is no Exception, into a DataError."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{self.path} is a damaged tokenizer.json: {error!s:.200}") from error


Tokenizer = Bytes | Subwords


class Encoder(Protocol):
    """What packing asks of a tokenizer."""

    @property
    def key(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def separator(self) -> int: ...

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each document."""
        ...


def decoded(text: bytes) -> str:
    """The text; raises DataError where it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        near = text[max(0, error.start - 20) : error.start + 10]
        raise DataError(f"text near {near!r} is not UTF-8; convert it, or use data.tokenizer bytes") from error
