"""Text to token ids and back: plain bytes, or a vocabulary of the `tokenizers` library.

A token that stands in no text separates documents: byte 0 for bytes, `<|endoftext|>` or the like otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from mupax.train.data.interface import DataError
from mupax.train.data.text import quoting, untrusted
from mupax.train.data.text.quoting import SpecialTokens

SEPARATOR = "<|endoftext|>"
USUAL_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
"""What ends a document in the vocabularies of GPT-2, NeoX and Qwen; Llama 3; Llama 2, Mistral and T5; Gemma; DeepSeek; BERT."""
_SPACES = (("Ġ", " "), ("▁", " "), ("Ċ", "\n"), ("<0x0A>", "\n"))
"""How byte-level and SentencePiece vocabularies write spaces and line ends."""
_SPACE = "▁"
_LISTED = 6
_BATCH_BYTES = 1 << 20
"""Of text that is encoded at once: the library takes 200 to 300 bytes for each."""
_OVERLAP = 1 << 12
"""Characters that two stretches of a long text have in common."""
T = TypeVar("T", bytes, str)
_NO_UTF8 = 0xFF
"""A byte that no UTF-8 has."""
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
"""How SentencePiece writes a byte of a character that its vocabulary lacks."""


def _byte_levels() -> dict[str, int]:
    """Return the byte of each character of GPT-2's table (`bytes_to_unicode` of its encoder.py).

    Printable bytes of Latin-1 stand for themselves, the others for characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    for number, byte in enumerate(unprintable):
        table[chr(256 + number)] = byte
    return table


_BYTE_LEVELS = _byte_levels()


@dataclasses.dataclass(frozen=True)
class Bytes:
    """One token per byte.

    Attributes:
        key: names a tokenizer and its content; part of the data's digest and of file names.
        vocab_size: ids are in [0, vocab_size).
        separator: id that ends every document.
        variant: part of the names of files of tokens: where special tokens that a text quotes are plain text, "-plain".
        special: tokens that stand for no text, as a text may quote them.
    """

    key: str = "bytes"
    vocab_size: int = 256
    separator: int = 0
    variant: str = ""
    special: tuple[str, ...] = ()

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each text, int32 [length]."""
        return [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]

    def spans(
        self, texts: Sequence[str], written: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of each text, int32 [length], and which of its characters each stands for: [start, stop), int64 [length, 2].

        Args:
            texts: to encode.
            written: where special tokens begin in each that are tokens; read where others are encoded as plain text.
        """
        counts = [[len(character.encode()) for character in text] for text in texts]
        starts = [np.repeat(np.arange(len(each)), each) for each in counts]
        ids = self.encode([text.encode() for text in texts])
        return [
            (each, np.stack([start, start + 1], axis=1))
            for each, start in zip(ids, starts, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; bytes that are no UTF-8 come out as U+FFFD, and so does an id of a model whose vocabulary is larger."""
        return bytes(min(int(i), _NO_UTF8) for i in ids if i != self.separator).decode(
            "utf-8", errors="replace"
        )

    unknown: ClassVar[int | None] = None

    def quoted(self, text: bytes) -> dict[str, int]:
        """Return how often each special token stands in a text."""
        return {}

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

    @property
    def adds_space(self) -> bool:
        """True if the first token of a text begins with a space that the text does not have."""
        return False

    def token_bytes(self) -> np.ndarray:
        """Return how many bytes of text each id stands for, int64 [vocab_size]."""
        return np.ones(self.vocab_size, np.int64)

    def is_skipped(self, token: int) -> bool:
        """Return True if `decode` leaves this token out."""
        return token == self.separator

    def raw_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token stands for wherever it stands, or None if it is no bytes."""
        return bytes([token]) if token < self.vocab_size else _REPLACEMENT.encode()

    def in_byte_run(self, token: int) -> bool:
        """Return True if `decode` makes text only of all such tokens in a row together."""
        return False

    def name_of(self, token: int) -> str:
        """Return how the vocabulary writes a token. An unknown token has an empty name."""
        return chr(token) if token < self.vocab_size else ""


class Ids(Bytes):
    """Ids that were made elsewhere, by a tokenizer that is not here: no text can be encoded, and ids stand for themselves."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        words = [text.split() for text in texts]
        if not all(
            word.isdigit() and int(word) < self.vocab_size for text in words for word in text
        ):
            raise DataError(
                f"the tokenizer of {self.key} is not known, so it has no text but ids below {self.vocab_size} between "
                "spaces; write data.tokenizer as the path of the tokenizer.json that made them"
            )
        return [np.array(text, np.int32) for text in words]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f"{int(i)} " for i in ids)

    def pieces(self) -> list[str]:
        return [f" {i}" for i in range(self.vocab_size)]

    def is_skipped(self, token: int) -> bool:
        return False

    def raw_bytes(self, token: int) -> bytes | None:
        return f"{token} ".encode()

    def name_of(self, token: int) -> str:
        return str(token)


class Subwords:
    """A tokenizer.json of the `tokenizers` library, with what `Bytes` has.

    Args:
        path: the file.
        separator: the token that ends every document; found by its usual names unless given.
        special_tokens: whether special tokens that stand in a text are tokens ("parse") or plain text ("text").
        template_tokens: added tokens that count as special because a chat template ends turns with them.

    Raises:
        DataError: there is no such file, it is no tokenizer, or it has no token that could separate documents.
    """

    def __init__(
        self,
        path: Path,
        separator: str | None = None,
        special_tokens: SpecialTokens = "parse",
        template_tokens: Collection[str] = (),
    ) -> None:
        from tokenizers import Tokenizer as Library

        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"no tokenizer at {path}; write data.tokenizer as bytes, bpe:SIZE or the path of a tokenizer.json"
            ) from error
        self.path = path
        untrusted.check_content(content, str(path))
        try:
            with self._calling():
                self._library = Library.from_buffer(content)
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{path} is no tokenizer.json of the `tokenizers` library: {error!s:.300}"
            ) from error
        self._library.no_padding()  # of a model's inputs, not of texts: ids must not depend on the batch
        self._library.no_truncation()
        ids = self._library.get_vocab(with_added_tokens=True).values()
        growth = untrusted.check_library(self._library, ids, str(path))
        self._batch_bytes = max(1, int(_BATCH_BYTES / growth))
        self._digest = hashlib.sha256(content).hexdigest()
        self.key = f"tokenizer-{self._digest[:16]}"
        self.vocab_size = 1 + max(ids, default=-1)
        usual = self.find(*USUAL_SEPARATORS)
        chosen = usual if separator is None else self.find(separator)
        if chosen is None:
            special = [
                token.content
                for token in self._library.get_added_tokens_decoder().values()
                if token.special
            ]
            missing = "token to end a document with" if separator is None else f"token {separator}"
            raise DataError(
                f"{path} has no {missing}; write --data.separator with one of its tokens"
                + (
                    f", such as {', '.join(special[:_LISTED])}"
                    if special
                    else f", or add {SEPARATOR} to it"
                )
            )
        self.separator = chosen
        if chosen != usual:
            self.key += f"-{chosen}"  # what was packed with another is not this
        # A separator may be an ordinary piece, such as a line end. Texts need those.
        added = self._library.get_added_tokens_decoder().items()
        self.special = tuple(
            token.content
            for i, token in added
            if token.content and (token.special or i == chosen or token.content in template_tokens)
        )
        self._quotes = quoting.QuoteCounter(self.special)
        self._encoder = self._library
        self.variant = ""
        if special_tokens == "text":
            self.variant = "-plain"  # the key stays: the vocabulary is the same
            with self._calling():
                self._encoder = quoting.plain_library(content, self.special)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        ids: list[np.ndarray] = []
        for batch in _batches(texts, self._batch_bytes):
            strings = [decoded(text) for text in batch]
            if len(strings) == 1 and len(strings[0]) > self._batch_bytes:
                ids.append(self._long_spans(self._encoder, strings[0])[0])
                continue
            # The library spreads a batch over the cores.
            with self._calling():
                encodings = self._encoder.encode_batch_fast(strings, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
        return ids

    def spans(
        self, texts: Sequence[str], written: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        if not self.variant or written is None:
            return self._spans(texts)
        marked = [quoting.marked(text, starts) for text, starts in zip(texts, written, strict=True)]
        spans = self._spans([text for text, _ in marked])
        return [
            (ids, _at_origin(places, origin))
            for (ids, places), (_, origin) in zip(spans, marked, strict=True)
        ]

    def _spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        spans: list[tuple[np.ndarray, np.ndarray]] = []
        for batch in _batches(texts, self._batch_bytes):
            if len(batch) == 1 and len(batch[0]) > self._batch_bytes:
                spans.append(self._long_spans(self._encoder, batch[0]))
                continue
            with self._calling():
                encodings = self._encoder.encode_batch(batch, add_special_tokens=False)
            spans += [_ids_and_places(encoding) for encoding in encodings]
        return spans

    def _long_spans(self, library: Any, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a long text in stretches that overlap, since the library takes some hundred bytes of memory per character.

        Two stretches are joined where both have a token's edge, far from their ends, so that the ids are those of the text as
        a whole.
        """
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        begin = 0  # of the next stretch
        encoded_end = 0  # characters that have tokens
        while True:
            stop = min(len(text), begin + self._batch_bytes)
            with self._calling():
                encoding = library.encode(text[begin:stop], add_special_tokens=False)
            ids, places = _ids_and_places(encoding)
            places = places + begin
            if parts:
                before_ids, before_places = parts[-1]
                edge = _common_edge(before_places[:, 1], places[:, 0], begin, encoded_end)
                count = int(np.searchsorted(before_places[:, 1], edge, side="right"))
                parts[-1] = (before_ids[:count], before_places[:count])
                first = int(np.searchsorted(places[:, 0], edge, side="left"))
                ids = ids[first:]
                places = places[first:]
            parts.append((ids, places))
            if stop == len(text):
                break
            encoded_end = stop
            begin = max(begin + 1, stop - min(_OVERLAP, self._batch_bytes // 2))
        return np.concatenate([ids for ids, _ in parts]), np.concatenate(
            [places for _, places in parts]
        )

    def quoted(self, text: bytes) -> dict[str, int]:
        return self._quotes(text)

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
        count = next(
            (i for i, special in enumerate(reversed(alone.special_tokens_mask)) if not special), 0
        )
        return np.array(alone.ids[len(alone.ids) - count :], np.int32)

    def find(self, *names: str) -> int | None:
        return next((i for i in map(self._library.token_to_id, names) if i is not None), None)

    def token(self, number: int) -> str | None:
        return self._library.id_to_token(number)

    def is_of(self, content: bytes) -> bool:
        """Return whether this is the tokenizer of a file with that content."""
        return self._digest == hashlib.sha256(content).hexdigest()

    def pieces(self) -> list[str]:
        tokens = (self._library.id_to_token(i) or "" for i in range(self.vocab_size))
        return [
            functools.reduce(lambda piece, pair: piece.replace(*pair), _SPACES, token)
            for token in tokens
        ]

    @property
    def adds_space(self) -> bool:
        with self._calling():
            encoding = self._library.encode("a", add_special_tokens=False)
        return bool(encoding.tokens) and encoding.tokens[0].startswith(_SPACE)

    def token_bytes(self) -> np.ndarray:
        pre_tokenizer = self._library.pre_tokenizer
        # A vocabulary may be spelled in characters for bytes where the decoder does not say so.
        by_bytes = pre_tokenizer is not None and b'"ByteLevel"' in pre_tokenizer.__getstate__()
        added = self._library.get_added_tokens_decoder()
        sizes = np.zeros(self.vocab_size, np.int64)
        for name, token in self._library.get_vocab(with_added_tokens=True).items():
            raw = self.raw_bytes(token)
            if raw is None and by_bytes and token not in added:
                sizes[token] = len(name)
                continue
            if raw is None:
                word = name.removeprefix("##") if "WordPiece" in self._decoders else name
                raw = word.replace(_SPACE, " ").encode()
            sizes[token] = len(raw)
        return sizes

    def is_skipped(self, token: int) -> bool:
        return token in self._special or self._library.id_to_token(token) is None

    def raw_bytes(self, token: int) -> bytes | None:
        if token not in self._raw_bytes:
            self._raw_bytes[token] = self._raw_bytes_of(token)
        return self._raw_bytes[token]

    def in_byte_run(self, token: int) -> bool:
        return "ByteFallback" in self._decoders and self.raw_bytes(token) is not None

    def name_of(self, token: int) -> str:
        return self._library.id_to_token(token) or ""

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self._library.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @functools.cached_property
    def _decoders(self) -> frozenset[str]:
        """Types of the library's decoders that `decode` goes through."""
        decoder = self._library.decoder
        if decoder is None:
            return frozenset()
        # The library shows the parts of a sequence in its JSON alone.
        fields = json.loads(decoder.__getstate__())
        return frozenset(part["type"] for part in fields.get("decoders", [fields]))

    @functools.cached_property
    def _raw_bytes(self) -> dict[int, bytes | None]:
        return {}

    def _raw_bytes_of(self, token: int) -> bytes | None:
        name = self._library.id_to_token(token) or ""
        if "ByteFallback" in self._decoders and _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(name[3:5])
        if "ByteLevel" not in self._decoders:
            return None
        levels = [_BYTE_LEVELS.get(character) for character in name]
        # An added token is written as it is.
        return (
            name.encode()
            if None in levels
            else bytes(level for level in levels if level is not None)
        )

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Turns a panic of the library, which is no Exception, into a DataError."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{self.path} is a damaged tokenizer.json: {error!s:.200}") from error


def _batches(texts: Sequence[T], size: int) -> Iterator[list[T]]:
    """Yield texts in lists of so many bytes or characters in all. A longer text is alone."""
    batch: list[T] = []
    total = 0
    for text in texts:
        if batch and total + len(text) > size:
            yield batch
            batch = []
            total = 0
        batch.append(text)
        total += len(text)
    if batch:
        yield batch


def _ids_and_places(encoding: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _common_edge(stops: np.ndarray, starts: np.ndarray, first: int, last: int) -> int:
    """Return the place in [first, last) where one stretch ends a token and the next begins one, nearest to the middle.

    Where they have none in common, the middle's last end of a token in the first stretch is taken.

    Args:
        stops: where tokens of the first stretch end, in order.
        starts: where tokens of the second stretch begin, in order.
        first, last: characters that both stretches have.
    """
    middle = (first + last) // 2
    inside = stops[(stops > first) & (stops < last)]
    common = np.intersect1d(inside, starts)
    edges = common if len(common) else inside
    return int(edges[np.argmin(np.abs(edges - middle))]) if len(edges) else last


def _at_origin(places: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Return spans [start, stop) of characters as spans of the characters that those are from."""
    if not len(origin):
        return places
    starts = origin[np.minimum(places[:, 0], len(origin) - 1)]
    last = origin[np.maximum(places[:, 1] - 1, 0)]
    stops = np.where(places[:, 1] > places[:, 0], last + 1, starts)
    return np.stack([starts, stops], axis=1)


Tokenizer = Bytes | Subwords


class Encoder(Protocol):
    """What packing asks of a tokenizer."""

    @property
    def key(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def variant(self) -> str: ...

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each document."""
        ...

    def quoted(self, text: bytes) -> dict[str, int]:
        """Return how often each special token stands in a document."""
        ...


def decoded(text: bytes) -> str:
    """The text; raises DataError where it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        near = text[max(0, error.start - 20) : error.start + 10]
        raise DataError(
            f"text near {near!r} is not UTF-8; convert it, or use data.tokenizer bytes"
        ) from error
