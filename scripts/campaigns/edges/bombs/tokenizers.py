"""Samples of tokenizer.json that would cost much memory or time, and of large good ones."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.campaigns.edges.bombs.sample import EITHER, LOADS, REFUSED, Sample, command, mupax

_CHARACTERS = "abcdefghijklmnopqrstuvwxyz "
_CHOOSE = random.Random(1)

_READ = command("data prepare text:text.txt --tokenizer tokenizer.json --separator a")


def samples() -> Iterator[Sample]:
    """Yield every sample of a tokenizer.json."""
    replace = {"type": "Replace", "pattern": {"String": "e"}}
    files: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
        "1,000 Unigram pieces of 9,000 letters": (_long_pieces, REFUSED),
        "the same, its type hidden in escapes": (_hidden_pieces, REFUSED),
        "250,000 Unigram pieces": (partial(_pieces, 250_000, 8), LOADS),
        "400,000 BPE tokens": (_many_tokens, LOADS),
        # A table with an entry for each id would take gigabytes.
        "an id of 4 billion": (partial(_bpe, vocab={"zz": 4_294_967_295}), REFUSED),
        "60,000 added tokens": (partial(_added, 60_000, 8), LOADS),
        "1,000 added tokens of 9,000 letters": (partial(_added, 1000, 9000), REFUSED),
        "a special token of 5 million letters": (partial(_added, 1, 5_000_000), REFUSED),
        "a prefix of 5 million letters": (
            partial(_bpe, continuing_subword_prefix="x" * 5_000_000),
            REFUSED,
        ),
        "an ending of 5 million letters": (
            partial(_bpe, end_of_word_suffix="x" * 5_000_000),
            REFUSED,
        ),
        "a normalizer that prepends 5 million letters": (
            _normalizer({"type": "Prepend", "prepend": "a" * 5_000_000}),
            REFUSED,
        ),
        "a normalizer that writes 3 million for a letter": (
            _normalizer({**replace, "content": "a" * 3_000_000}),
            REFUSED,
        ),
        "nine normalizers that write ten for a letter": (
            _normalizer(
                {"type": "Sequence", "normalizers": [{**replace, "content": "e" * 10}] * 9}
            ),
            REFUSED,
        ),
        "a decoder that writes 3 million for a letter": (
            _part("decoder", {**replace, "content": "a" * 3_000_000}),
            REFUSED,
        ),
        "a template of 150,000 pieces": (_template, REFUSED),
        "a regular expression of 300,000 branches": (_branches, REFUSED),
        "a regular expression that goes back and forth": (
            # An engine that backtracks takes exponential time for it.
            _part("pre_tokenizer", _split("((a+)+)+$")),
            EITHER,
        ),
        "a regular expression that counts to 10^9": (
            _part("pre_tokenizer", _split("((a{1,1000}){1,1000}){1,1000}")),
            EITHER,
        ),
        "a WordPiece with words of 10^9 letters": (_word_piece, REFUSED),
        "nested a million deep": (
            lambda: b'{"version":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
            REFUSED,
        ),
        "normalizers nested 100 deep": (_nested, EITHER),
        "no JSON": (lambda: b"\x80\x04\x95" + bytes(1000), REFUSED),
        "no vocabulary": (partial(_described, {"type": "BPE", "vocab": {}, "merges": []}), REFUSED),
        "merges of nothing": (partial(_bpe, merges=[["q", "nothing"]]), REFUSED),
        "a million merges of one pair": (
            partial(_bpe, vocab={"ab": 30}, merges=[["a", "b"]] * 700_000),
            EITHER,
        ),
        "padding to 10^9 tokens": (_padded, LOADS),
        "a table of characters of 5 MB": (
            _normalizer({"type": "Precompiled", "precompiled_charsmap": "AAAA" * 1_250_000}),
            REFUSED,
        ),
    }
    for title, (content, codes) in files.items():
        make = partial(_make, content=content)
        yield Sample(f"tokenizer.json: {title}", "tokenizer.json", make, _READ, codes)
    for title in (
        "1,000 Unigram pieces of 9,000 letters",
        "a normalizer that writes 3 million for a letter",
    ):
        make = partial(_make, content=files[title][0])
        yield Sample(
            f"tokenizer.json: {title}, trained on records",
            "tokenizer.json",
            make,
            _read_stream,
            REFUSED,
        )
    yield Sample(
        "tokenizer.json: 30 MB, 260,000 tokens",
        "honest",
        partial(_make, content=_large),
        _READ,
        LOADS,
    )


def _make(folder: Path, content: Callable[[], Any]) -> None:
    """Write a tokenizer.json and a text.

    Args:
        content: Returns the bytes of the file, or a value that is written as JSON.
    """
    value = content()
    if not isinstance(value, bytes):
        value = json.dumps(value, ensure_ascii=False).encode()
    (folder / "tokenizer.json").write_bytes(value)
    (folder / "text.txt").write_text("the hello of a world\n" * 2000 + "a" * 3000 + "\n")


def _read_stream(folder: Path) -> int:
    """Write records, and prepare them with the tokenizer."""
    with (folder / "data.jsonl").open("w") as file:
        for number in range(100):
            file.write(json.dumps({"text": f"here is text {number}"}) + "\n")
    return mupax(
        folder,
        "data",
        "prepare",
        "records:data.jsonl",
        "--tokenizer",
        "tokenizer.json",
        "--separator",
        "a",
    )


def _letters(count: int) -> str:
    """Return random letters and digits from a generator with a fixed seed."""
    return "".join(_CHOOSE.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=count))


def _described(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json of a model.

    Args:
        **parts: Parts such as `normalizer`. Default: none.
    """
    empty = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    return {"version": "1.0", "added_tokens": [], **empty, "model": model, **parts}


def _model(**fields: Any) -> dict[str, Any]:
    """Return a BPE model of letters.

    Args:
        **fields: Fields to change. `vocab` adds tokens to the letters.
    """
    vocab = {character: i for i, character in enumerate(_CHARACTERS)} | fields.pop("vocab", {})
    none = dict.fromkeys(
        ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **none, **flags, "merges": [], **fields, "vocab": vocab}


def _bpe(**fields: Any) -> dict[str, Any]:
    """Return a tokenizer.json with a BPE model that has these fields."""
    return _described(_model(**fields))


def small_tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json of letters, with <|endoftext|> as token 40."""
    return _part("added_tokens", [_added_token(40, "<|endoftext|>")])()


def _normalizer(step: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that returns a tokenizer.json with a normalizer."""
    return _part("normalizer", step)


def _part(name: str, value: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns a tokenizer.json with one part, such as `decoder`."""
    return partial(_described, _model(), **{name: value})


def _split(pattern: str) -> dict[str, Any]:
    """Return a pre-tokenizer that splits by a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _pieces(count: int, length: int) -> dict[str, Any]:
    """Return a tokenizer.json with random Unigram pieces.

    Args:
        length: Number of letters in each of the pieces.
    """
    pieces = [[character, -1.0] for character in _CHARACTERS]
    pieces += [[_letters(length), -2.0] for _ in range(count)]
    return _described({"type": "Unigram", "unk_id": 0, "vocab": pieces})


def _long_pieces() -> dict[str, Any]:
    """Return a tokenizer.json with 1,000 Unigram pieces of 9,000 letters."""
    return _pieces(1000, 9000)


def _hidden_pieces() -> bytes:
    """Return `_long_pieces` with two words written by escapes, which hides them from a search."""
    text = json.dumps(_long_pieces())
    return text.replace('"vocab"', '"\\u0076ocab"').replace('"Unigram"', '"\\u0055nigram"').encode()


def _many_tokens() -> dict[str, Any]:
    """Return a tokenizer.json with 400,000 BPE tokens."""
    return _bpe(vocab={_letters(10): i + 30 for i in range(400_000)})


def _added_token(number: int, content: str) -> dict[str, Any]:
    """Return the entry of a special token with the id `number`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _added(count: int, length: int) -> dict[str, Any]:
    """Return a tokenizer.json with random special tokens.

    Args:
        length: Number of letters in each of the tokens.
    """
    tokens = [_added_token(30 + i, _letters(length)) for i in range(count)]
    return _part("added_tokens", tokens)()


def _template() -> dict[str, Any]:
    """Return a tokenizer.json whose template puts 150,000 tokens before a text."""
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}] * 150_000 + [
        {"Sequence": {"id": "A", "type_id": 0}}
    ]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    tokens = {"a": {"id": "a", "ids": [*range(20)], "tokens": ["a"] * 20}}
    return _part(
        "post_processor",
        {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens},
    )()


def _branches() -> dict[str, Any]:
    """Return a tokenizer.json that splits by a regular expression of 300,000 branches."""
    return _part("pre_tokenizer", _split("|".join(_letters(10) for _ in range(300_000))))()


def _word_piece() -> dict[str, Any]:
    """Return a tokenizer.json with a WordPiece model that takes words of 10^9 letters."""
    vocab = {character: i for i, character in enumerate(_CHARACTERS)}
    fields = {
        "unk_token": "a",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 10**9,
    }
    return _described({"type": "WordPiece", "vocab": vocab, **fields})


def _nested() -> bytes:
    """Return a tokenizer.json with 100 normalizers, each in the next one."""
    inner = '{"type":"Lowercase"}'
    for _ in range(100):
        inner = f'{{"type":"Sequence","normalizers":[{inner}]}}'
    text = json.dumps(_described(_model()))
    return text.replace('"normalizer": null', f'"normalizer": {inner}').encode()


def _padded() -> dict[str, Any]:
    """Return a tokenizer.json that pads texts to 10^9 tokens."""
    fixed = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    return _part("padding", {**fixed, "pad_token": "a"})()


def _large() -> bytes:
    """Return a tokenizer.json of 30 MB, as large as Gemma's: 262,000 tokens and their merges."""
    choose = random.Random(2)
    syllables = ["".join(pair) for pair in itertools.product("bcdfgklmnprstvz", "aeiou")]
    letters = sorted(set("".join(syllables)) | set(_CHARACTERS))
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = []
    for syllable in syllables:
        vocab[syllable] = len(vocab)
        merges.append([*syllable])
    level = syllables
    while len(vocab) < 262_000:
        longer = []
        for _ in range(40_000):
            first = choose.choice(level[:3000])
            second = choose.choice(syllables)
            if first + second not in vocab:
                vocab[first + second] = len(vocab)
                merges.append([first, second])
                longer.append(first + second)
        level = longer
    # Longer tokens get a second merge.
    for token in vocab:
        first = token[:2]
        second = token[2:]
        has_parts = first in vocab and second in vocab
        if len(token) >= 6 and has_parts and len(merges) < 500_000:
            merges.append([first, second])
    return json.dumps(_bpe(vocab=vocab, merges=merges), indent=2).encode()
