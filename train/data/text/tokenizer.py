"""Tokenizers: plain bytes, ids of a foreign tokenizer, or a tokenizer.json of `tokenizers`.

A token that no text contains separates documents: byte 0 for bytes, a special token otherwise.

A tokenizer.json may be a stranger's, so it is checked before it is used. A harmful file could fill
the memory: the `tokenizers` library builds a tree of some hundred bytes per character from a list
of pieces, and applies any normalizer, even one that writes a book for every letter. Real
vocabularies are far from the bounds here.
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

from mupax import disk
from mupax.train.data.interface import DataError
from mupax.train.data.text import quoting
from mupax.train.data.text.quoting import SpecialTokens

SEPARATOR = "<|endoftext|>"
USUAL_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
"""Tokens that end a document in published vocabularies.

In this order: GPT-2, NeoX and Qwen; Llama 3; Llama 2, Mistral and T5; Gemma; DeepSeek; BERT.
"""
_SPACES = (("Ġ", " "), ("▁", " "), ("Ċ", "\n"), ("<0x0A>", "\n"))
"""Spaces and line ends as byte-level and SentencePiece vocabularies write them."""
_SPACE = "▁"
_LISTED = 6
_BATCH_BYTES = 1 << 20
"""Bytes of text that are encoded at once. The library takes 200 to 300 bytes of memory for each."""
_OVERLAP = 1 << 12
"""Number of characters by which successive pieces of a long text overlap when it is encoded."""
T = TypeVar("T", bytes, str)
_NO_UTF8 = 0xFF
"""Byte that never occurs in UTF-8."""
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Pattern of SentencePiece's tokens for single bytes, which write characters without a token."""


def _byte_levels() -> dict[str, int]:
    """Return the byte that each character stands for in a byte-level vocabulary, such as GPT-2's.

    A printable byte of Latin-1 is written as itself, another byte as a character from U+0100 on
    (`bytes_to_unicode` of GPT-2's encoder.py).
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
    """Tokenizer with one token per byte.

    Attributes:
        key: Name that identifies the tokenizer and its content, such as "bytes". Part of the data's
            digest and of file names.
        vocab_size: Number of ids, which are in [0, vocab_size).
        separator: Id that ends every document.
        variant: Suffix of the key in names of files of ids. It is "-plain" for a `Subwords` that
            encodes special tokens in a text as plain text, and otherwise empty.
        special: Special tokens of the vocabulary as text, such as "</s>". Always empty for bytes.
        unknown: Id of the token for text that the vocabulary lacks. Always `None` for bytes, which
            encode every text.
    """

    key: str = "bytes"
    vocab_size: int = 256
    separator: int = 0
    variant: str = ""
    special: tuple[str, ...] = ()

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, int32 [length], without separator, start or end tokens.

        `Subwords` raises `DataError` for a text that is not UTF-8.
        """
        return [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]

    def spans(
        self, texts: Sequence[str], written: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of each text, and the range of characters that each id stands for.

        Args:
            written: For each text, the index of the first character of each special token that is
                to be encoded as a token. Only used by a tokenizer that encodes all other special
                tokens as plain text (`variant`).

        Returns:
            For each text, ids int32 [length] and ranges [start, stop) int64 [length, 2].
        """
        spans = []
        for text in texts:
            [ids] = self.encode([text.encode()])
            byte_counts = [len(character.encode()) for character in text]
            starts = np.repeat(np.arange(len(text)), byte_counts)
            spans.append((ids, np.stack([starts, starts + 1], axis=1)))
        return spans

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids, without separators (id 0).

        Bytes that are not UTF-8 become U+FFFD. So do ids above 255, which a model with a larger
        vocabulary may generate.
        """
        values = []
        for i in ids:
            if i != self.separator:
                values.append(min(int(i), _NO_UTF8))
        content = bytes(values)
        return content.decode("utf-8", errors="replace")

    unknown: ClassVar[int | None] = None

    def quoted(self, text: bytes) -> dict[str, int]:
        """Return how often a text in UTF-8 contains each special token, by token.

        The result is empty here, because bytes have no special tokens.
        """
        return {}

    @property
    def start(self) -> np.ndarray:
        """Ids that the tokenizer adds before a single text, such as bos. Empty int32 for bytes."""
        return np.zeros(0, np.int32)

    @property
    def end(self) -> np.ndarray:
        """Ids that the tokenizer adds after a single text, such as eos. Empty int32 for bytes."""
        return np.zeros(0, np.int32)

    def find(self, *names: str) -> int | None:
        """Return the id of the first of these tokens that is in the vocabulary, or `None`.

        The result is always `None` here, because bytes have no names.

        Args:
            *names: Tokens as the vocabulary writes them, such as "</s>".
        """
        return None

    def token(self, number: int) -> str | None:
        """Return the token of an id as the vocabulary writes it, or `None` for an unknown id.

        The result is always `None` here, because bytes have no names.
        """
        return None

    def pieces(self) -> list[str]:
        """Return the text of every id, as a list of `vocab_size` strings.

        Here the text of a byte is the Unicode character with its number.
        """
        return [chr(byte) for byte in range(self.vocab_size)]

    @property
    def adds_space(self) -> bool:
        """True if the tokenizer puts a space before the first token of a text. False for bytes."""
        return False

    def token_bytes(self) -> np.ndarray:
        """Return the number of bytes of text of each id, all 1 here, int64 [vocab_size]."""
        return np.ones(self.vocab_size, np.int64)

    def is_skipped(self, token: int) -> bool:
        """Return True if `decode` leaves this token out."""
        return token == self.separator

    def raw_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token has in every text, or `None` if they depend on the text.

        Here they are the byte itself, and U+FFFD in UTF-8 for an id outside of the vocabulary.
        """
        return bytes([token]) if token < self.vocab_size else _REPLACEMENT.encode()

    def in_byte_run(self, token: int) -> bool:
        """Return True for a token whose text depends on its neighbours of the same type.

        Some tokenizers have tokens for single bytes, and decode a run of them together, so that one
        wrong byte changes the text of all. The result is always False here.
        """
        return False

    def name_of(self, token: int) -> str:
        """Return the token of an id as the vocabulary writes it, or "" for an unknown id.

        A byte is written as the Unicode character with its number.
        """
        return chr(token) if token < self.vocab_size else ""


class Ids(Bytes):
    """Stand-in for an unknown tokenizer, for data that is given as ids.

    It knows the number of ids, and can neither encode nor decode real text. The text of ids is
    their numbers with spaces between them. `encode` raises `DataError` for any other text.
    """

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        ids = []
        for text in texts:
            words = text.split()
            if not all(word.isdigit() and int(word) < self.vocab_size for word in words):
                raise DataError(
                    f"the tokenizer of {self.key} is not known, so it has no text but ids below "
                    f"{self.vocab_size} between spaces; "
                    "write data.tokenizer as the path of the tokenizer.json that made them"
                )
            ids.append(np.array(words, np.int32))
        return ids

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
    """Tokenizer of a tokenizer.json of the `tokenizers` library, with the interface of `Bytes`.

    Args:
        path: Path of the tokenizer.json, on this machine or in a bucket.
        separator: Token that ends every document. Default: the first of `USUAL_SEPARATORS` that is
            in the vocabulary.
        special_tokens: Whether special tokens that a text contains are encoded as tokens ("parse")
            or as plain text ("text").
        template_tokens: Added tokens of the vocabulary that count as special, too, because a chat
            template uses them.

    Raises:
        DataError: The file is missing, is no tokenizer, or has no token that separates documents.
        DiskError: The file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        separator: str | None = None,
        special_tokens: SpecialTokens = "parse",
        template_tokens: Collection[str] = (),
    ) -> None:
        if path.is_dir():
            raise DataError(f"{path} is a folder; write the path of a tokenizer.json")
        try:
            # Not just `path.read_bytes`: a file in a bucket may be there and not be reached.
            content = disk.read_bytes(path)
        except disk.ABSENT as error:
            raise DataError(
                f"no tokenizer at {path}; "
                "write data.tokenizer as bytes, bpe:SIZE or the path of a tokenizer.json"
            ) from error
        self.path = path
        self._library = self._opened(content)
        ids = self._library.get_vocab(with_added_tokens=True).values()
        growth = check_library(self._library, ids, str(path))
        # A normalizer may lengthen a text, and the library keeps the longer text in memory.
        self._batch_bytes = max(1, int(_BATCH_BYTES / growth))
        self._digest = hashlib.sha256(content).hexdigest()
        # Ids may have holes, so the count of tokens can be smaller than the largest id.
        self.vocab_size = 1 + max(ids, default=-1)

        usual_separator = self.find(*USUAL_SEPARATORS)
        separator_id = usual_separator if separator is None else self.find(separator)
        if separator_id is None:
            raise self._no_separator(separator)
        self.separator = separator_id
        # By content and not by path, so that a moved file finds its packed corpora.
        self.key = f"tokenizer-{self._digest[:16]}"
        if separator_id != usual_separator:
            # Data that were packed with another separator are different data.
            self.key += f"-{separator_id}"

        # Only added tokens: a separator may be an ordinary piece, such as a line end, which texts
        # need.
        special = []
        for i, token in self._library.get_added_tokens_decoder().items():
            is_special = token.special or i == separator_id or token.content in template_tokens
            if token.content and is_special:
                special.append(token.content)
        self.special = tuple(special)
        self._quotes = quoting.QuoteCounter(self.special)

        self._encoder = self._library
        self.variant = ""
        if special_tokens == "text":
            # The key stays, because the vocabulary is the same.
            self.variant = "-plain"
            with self._calling():
                self._encoder = quoting.plain_library(content, self.special)

    def _opened(self, content: bytes) -> Any:
        """Check the content of a tokenizer.json and open it as a `tokenizers.Tokenizer`.

        Padding and truncation are turned off.

        Raises:
            DataError: The content is no tokenizer.json, or could fill the memory (`check_content`).
        """
        from tokenizers import Tokenizer as Library

        # Before the library sees it: some files make the library abort or fill the memory.
        check_content(content, str(self.path))
        try:
            with self._calling():
                library = Library.from_buffer(content)
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{self.path} is no tokenizer.json of the `tokenizers` library: {error!s:.300}"
            ) from error
        # Padding is meant for a model's inputs. Ids of a text must not depend on its batch.
        library.no_padding()
        library.no_truncation()
        return library

    def _no_separator(self, separator: str | None) -> DataError:
        """Return the error for a vocabulary that lacks the separator.

        Args:
            separator: Value of data.separator. None if no usual separator was found.
        """
        added = self._library.get_added_tokens_decoder().values()
        special = []
        for token in added:
            if token.special:
                special.append(token.content)
        missing = "token to end a document with" if separator is None else f"token {separator}"
        advice = f", or add {SEPARATOR} to it"
        if special:
            advice = f", such as {', '.join(special[:_LISTED])}"
        return DataError(
            f"{self.path} has no {missing}; write --data.separator with one of its tokens{advice}"
        )

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        ids: list[np.ndarray] = []
        for batch in _batches(texts, self._batch_bytes):
            strings = [decoded(text) for text in batch]
            if len(strings) == 1 and len(strings[0]) > self._batch_bytes:
                ids.append(self._long_spans(self._encoder, strings[0])[0])
                continue
            # The library encodes the texts of a batch in parallel, on all cores.
            with self._calling():
                encodings = self._encoder.encode_batch_fast(strings, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
        return ids

    def spans(
        self, texts: Sequence[str], written: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        # Only the plain variant needs to know which special tokens were written on purpose.
        if not self.variant or written is None:
            return self._spans(texts)
        marked_texts = []
        origins = []
        for text, starts in zip(texts, written, strict=True):
            marked_text, origin = quoting.marked(text, starts)
            marked_texts.append(marked_text)
            origins.append(origin)
        spans = self._spans(marked_texts)
        return [
            (ids, _at_origin(places, origin))
            for (ids, places), origin in zip(spans, origins, strict=True)
        ]

    def _spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode texts by the library. Return ids and ranges of characters, as `spans` does."""
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
        """Encode a long text in overlapping pieces, to save memory. Return ids and ranges.

        Two pieces are joined at a position where both have the edge of a token, far from the ends
        of the pieces. So the ids are those of the complete text.

        Returns:
            Ids int32 [length], and the range of characters [start, stop) of each, int64
            [length, 2].
        """
        # The library needs some hundred bytes of memory per character, too much for all of a long
        # text.
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        begin = 0  # start of the next stretch
        encoded_end = 0  # number of characters that have tokens
        while True:
            stop = min(len(text), begin + self._batch_bytes)
            with self._calling():
                encoding = library.encode(text[begin:stop], add_special_tokens=False)
            ids, places = _ids_and_places(encoding)
            places = places + begin
            if parts:
                # Tokens before the edge come from the last stretch, the others from this one.
                last_ids, last_places = parts[-1]
                edge = _common_edge(last_places[:, 1], places[:, 0], begin, encoded_end)
                count = int(np.searchsorted(last_places[:, 1], edge, side="right"))
                parts[-1] = (last_ids[:count], last_places[:count])
                first = int(np.searchsorted(places[:, 0], edge, side="left"))
                ids = ids[first:]
                places = places[first:]
            parts.append((ids, places))
            if stop == len(text):
                break
            encoded_end = stop
            # A stretch advances even if it is shorter than the overlap.
            begin = max(begin + 1, stop - min(_OVERLAP, self._batch_bytes // 2))
        all_ids = np.concatenate([ids for ids, _ in parts])
        all_places = np.concatenate([places for _, places in parts])
        return all_ids, all_places

    def quoted(self, text: bytes) -> dict[str, int]:
        return self._quotes(text)

    def decode(self, ids: Iterable[int]) -> str:
        with self._calling():
            return self._library.decode([int(i) for i in ids], skip_special_tokens=True)

    @property
    def unknown(self) -> int | None:
        """Id of the unknown token. `None` if the vocabulary has none."""
        name = getattr(self._library.model, "unk_token", None)
        return None if name is None else self.find(name)

    @property
    def start(self) -> np.ndarray:
        encoding = self._encoded_letter()
        count = _num_leading_ones(encoding.special_tokens_mask)
        return np.array(encoding.ids[:count], np.int32)

    @property
    def end(self) -> np.ndarray:
        encoding = self._encoded_letter()
        count = _num_leading_ones(encoding.special_tokens_mask[::-1])
        return np.array(encoding.ids[len(encoding.ids) - count :], np.int32)

    def _encoded_letter(self) -> Any:
        """Return the library's encoding of "a", with the start and end tokens that it adds."""
        with self._calling():
            return self._library.encode("a", add_special_tokens=True)

    def find(self, *names: str) -> int | None:
        for name in names:
            token = self._library.token_to_id(name)
            if token is not None:
                return token
        return None

    def token(self, number: int) -> str | None:
        return self._library.id_to_token(number)

    def is_of(self, content: bytes) -> bool:
        """Return whether this tokenizer was made from a file with exactly this content."""
        return self._digest == hashlib.sha256(content).hexdigest()

    def pieces(self) -> list[str]:
        pieces = []
        for i in range(self.vocab_size):
            piece = self._library.id_to_token(i) or ""
            for symbol, text in _SPACES:
                piece = piece.replace(symbol, text)
            pieces.append(piece)
        return pieces

    @property
    def adds_space(self) -> bool:
        with self._calling():
            encoding = self._library.encode("a", add_special_tokens=False)
        return bool(encoding.tokens) and encoding.tokens[0].startswith(_SPACE)

    def token_bytes(self) -> np.ndarray:
        pre_tokenizer = self._library.pre_tokenizer
        # With a ByteLevel pre-tokenizer, each character of a piece stands for a byte, even if the
        # decoder is of another type.
        by_bytes = pre_tokenizer is not None and b'"ByteLevel"' in pre_tokenizer.__getstate__()
        added = self._library.get_added_tokens_decoder()
        sizes = np.zeros(self.vocab_size, np.int64)
        for name, token in self._library.get_vocab(with_added_tokens=True).items():
            raw = self.raw_bytes(token)
            if raw is None and by_bytes and token not in added:
                sizes[token] = len(name)
                continue
            if raw is None:
                # WordPiece marks a piece within a word by "##".
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
        special = []
        for token, entry in added.items():
            if entry.special:
                special.append(token)
        return frozenset(special)

    @functools.cached_property
    def _decoders(self) -> frozenset[str]:
        """Types of the decoders in the tokenizer.json, such as "ByteLevel". May be empty."""
        decoder = self._library.decoder
        if decoder is None:
            return frozenset()
        # Only the JSON of the library shows the parts of a sequence of decoders.
        fields = json.loads(decoder.__getstate__())
        return frozenset(part["type"] for part in fields.get("decoders", [fields]))

    @functools.cached_property
    def _raw_bytes(self) -> dict[int, bytes | None]:
        """Cache of `raw_bytes`."""
        return {}

    def _raw_bytes_of(self, token: int) -> bytes | None:
        """Compute the bytes of a token (`raw_bytes`) from its name, without the cache.

        The result is `None` unless the decoder is ByteLevel, or ByteFallback for a token such as
        <0xE6>.
        """
        name = self._library.id_to_token(token) or ""
        if "ByteFallback" in self._decoders and _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(name[3:5])  # the digits of "<0xE6>"
        if "ByteLevel" not in self._decoders:
            return None
        if any(character not in _BYTE_LEVELS for character in name):
            return name.encode()  # an added token is written as it is
        return bytes(_BYTE_LEVELS[character] for character in name)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Context manager that turns a panic of the library (an error in Rust) into a DataError."""
        try:
            yield
        except BaseException as error:  # a panic derives from BaseException
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{self.path} is a damaged tokenizer.json: {error!s:.200}") from error


def _batches(texts: Sequence[T], size: int) -> Iterator[list[T]]:
    """Group consecutive texts into lists of at most `size` bytes (bytes) or characters (str) each.

    A text that is longer is alone in its list.
    """
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
    """Return the ids of an encoding, and the range of characters that each id stands for.

    Args:
        encoding: `tokenizers.Encoding` of a text.

    Returns:
        Ids int32 [length], and ranges [start, stop) int64 [length, 2].
    """
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _num_leading_ones(mask: Sequence[int]) -> int:
    """Return the number of ones before the first zero. A mask without a zero has 0."""
    for i, value in enumerate(mask):
        if not value:
            return i
    return 0


def _common_edge(stops: np.ndarray, starts: np.ndarray, first: int, last: int) -> int:
    """Choose the position at which the tokens of two overlapping pieces of a text are joined.

    All positions are indices of characters in the complete text. The result is the position nearest
    to the middle of the overlap where a token of the first piece ends and a token of the second
    piece begins. If there is none, a token of the first piece must end there. If there is none of
    these either, the result is `last`.

    Args:
        stops: Ends of the tokens of the first piece, ascending.
        starts: Starts of the tokens of the second piece, ascending.
        first: Position at which the overlap and the second piece begin.
        last: Position at which the overlap and the first piece end.
    """
    middle = (first + last) // 2
    inside = stops[(stops > first) & (stops < last)]
    common = np.intersect1d(inside, starts)
    edges = common if len(common) else inside
    if not len(edges):
        return last
    nearest = np.argmin(np.abs(edges - middle))
    return int(edges[nearest])


def _at_origin(places: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Translate ranges of characters of a marked text into ranges of the text before marking.

    Args:
        places: Range [start, stop) of each token in the marked text, int64 [number of tokens, 2].
        origin: Index in the original text of each character of the marked text, from
            `quoting.marked`.

    Returns:
        Range [start, stop) of each token in the original text, int64 [number of tokens, 2].
    """
    if not len(origin):
        return places
    starts = origin[np.minimum(places[:, 0], len(origin) - 1)]
    # A stop need not have a character in `origin`, so it is one after the span's last character.
    last = origin[np.maximum(places[:, 1] - 1, 0)]
    stops = np.where(places[:, 1] > places[:, 0], last + 1, starts)
    return np.stack([starts, stops], axis=1)


Tokenizer = Bytes | Subwords


class Encoder(Protocol):
    """Interface of a tokenizer for packing: it encodes texts, and counts special tokens.

    The properties are those of `Bytes`. All ids, the separator included, are below `vocab_size`.
    Besides tokenizers, the encoder of conversations implements it (`chats.answers.ChatTokens`).
    """

    @property
    def key(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def variant(self) -> str: ...

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each document, int32 [length], without the separator."""
        ...

    def quoted(self, text: bytes) -> dict[str, int]:
        """Return how often a document contains each special token, by token."""
        ...


def decoded(text: bytes) -> str:
    """Decode UTF-8 bytes to text.

    Raises:
        DataError: The bytes are not UTF-8.
    """
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        near = text[max(0, error.start - 20) : error.start + 10]
        raise DataError(
            f"text near {near!r} is not UTF-8; convert it, or use data.tokenizer bytes"
        ) from error


_LARGEST_FILE = 256 * 2**20
_PIECE_CHARACTERS = 24
"""Largest mean length of the pieces of a Unigram model, in characters. XLM-R has 6."""
_FEW_CHARACTERS = 2**18
"""Total number of characters of a vocabulary's pieces up to which their length is not checked."""
_LONGEST_SPECIAL = 200
"""Largest length of a special token in characters. The longest of published models has 60."""
_LONGEST_AFFIX = 64
"""Largest length of the prefix or suffix that marks a part of a word ("##"), in characters."""
_LONGEST_WORD = 10_000
"""Largest limit on the length of a word that a WordPiece model may have, in characters.

The time to encode a word grows with the square of its length. BERT's limit is 100.
"""
_LARGEST_STEP = 2**20
"""Largest JSON of a normalizer, pre-tokenizer, post-processor or decoder, in characters.

A table of characters (`precompiled_charsmap`) does not count.
"""
_MOST_GROWTH = 1000.0
"""Largest factor by which a normalizer or decoder may lengthen a text."""
_GAP = 64
"""Largest ratio of the highest id to the number of tokens, since ids may have holes, about."""
_UNIGRAM = re.compile(rb'"vocab"\s*:\s*\[')
_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
"""Escaped ASCII letters, which no program writes except to hide a word from a search."""


def check_content(content: bytes, name: str) -> None:
    """Raise an error for a tokenizer.json that would fill the memory when the library opens it.

    Only a file that may have a Unigram model is parsed. Any other file must only be small enough.

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
    """Check that an opened tokenizer is harmless, and return how much it may lengthen a text.

    Args:
        library: Opened `tokenizers.Tokenizer`.
        ids: Id of each token of the vocabulary, added tokens included.
        name: Name of the file, for the message.

    Returns:
        The largest factor by which the normalizer or the decoder may lengthen a text.

    Raises:
        DataError: A part such as the normalizer is too large or lengthens a text too much; affixes,
            words or special tokens are too long; or ids have large holes. The message names the
            part.
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
    """Raise `DataError` for a model whose prefixes, suffixes or word limit are too long.

    Args:
        model: Model of a `tokenizers.Tokenizer`.
        name: Name of the file, for the message.
    """
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
    """Return the settings of a part of a tokenizer, such as its normalizer, as in tokenizer.json.

    The result is an empty dict for a part that is made in Python.
    """
    try:
        return json.loads(step.__getstate__())
    except (TypeError, ValueError, RecursionError):
        return {}


def _check_step(fields: Any, part: str, name: str) -> None:
    """Raise `DataError` for a part of a tokenizer, such as the normalizer, whose JSON is too large.

    Tables of characters (`precompiled_charsmap`) do not count. They are removed from `fields` in
    place.

    Args:
        fields: JSON of the part, which is changed in place.
        part: Name of the part, for the message.
        name: Name of the file, for the message.
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
    """Yield all JSON objects (dicts) in a JSON value, an outer object before those inside of it.

    Among them are the steps of a sequence of normalizers or decoders.
    """
    waiting = [fields]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _growth(step: dict[str, Any]) -> float:
    """Return the largest factor, at least 1, by which a step may lengthen a text.

    Only the types Prepend and Replace lengthen a text.

    Args:
        step: JSON of one step of a normalizer or decoder.
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
