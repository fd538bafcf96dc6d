"""Functions that break the bytes of a file at random: bits, bytes, values of JSON, headers.

The command `scripts.campaigns.fuzz` and tests of readers use them.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "../x", "/etc/passwd", "gpt2", "llama", "vit"),
    *("F32", "I64", "\0", "\ud800", [], {}, [[]], [0], [-1, 2], [2**62, 4], {"a": 1}),
]
"""Values of JSON that readers do not expect."""


def broken_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return the content with bits flipped, or bytes cut, repeated, replaced or zeroed."""
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        # Headers are at the beginning, so most changes are there.
        if draw.random() < 0.4:
            # `randrange` refuses 0, the length of an empty file.
            start = draw.randrange(len(data) or 1)
        else:
            start = draw.randrange(min(len(data), 400) or 1)
        end = min(len(data), start + draw.choice([1, 2, 8, 50, 1000]))
        match draw.randrange(7):
            case 0:
                flipped = bytes([data[start] ^ (1 << draw.randrange(8))]) if data else b""
                data[start : start + 1] = flipped
            case 1:
                del data[start:]
            case 2:
                del data[start:end]
            case 3:
                data[start:start] = data[start:end]
            case 4:
                data[start:end] = bytes(end - start)
            case 5:
                data[start:end] = draw.randbytes(end - start)
            case 6:
                texts = [b"9" * 30, b"-", b"[", b"{", b'"', b"1e999", b"\xff", b"null"]
                data[start : start + 1] = draw.choice(texts)
    return bytes(data)


def broken_json(content: bytes, draw: random.Random) -> bytes:
    """Return JSON with some of its values replaced, removed, or copied under another key."""
    value = json.loads(content)
    for _ in range(draw.choice([1, 1, 2, 4])):
        # Walk down to a random value.
        owner = value
        while True:
            keys = list(owner) if isinstance(owner, dict) else range(len(owner))
            key = draw.choice(keys)
            if not isinstance(owner[key], dict | list) or not owner[key] or draw.random() < 0.15:
                break
            owner = owner[key]

        match draw.randrange(4):
            case 0 | 1:
                # Without a copy, later changes would edit `NASTY` itself.
                owner[key] = copy.deepcopy(draw.choice(NASTY))
            case 2 if isinstance(owner, dict) and len(owner) > 1:
                del owner[key]
            case _ if isinstance(owner, dict):
                new_key = draw.choice([*owner, "x", "../x", ""])
                owner[new_key] = copy.deepcopy(owner[key])
    return json.dumps(value).encode()


def broken_header(content: bytes, draw: random.Random) -> bytes:
    """Return a safetensors file whose JSON header is broken by `broken_json`.

    The length in the first 8 bytes fits the new header, except in one of ten files.
    """
    length = int.from_bytes(content[:8], "little")
    header = broken_json(content[8 : 8 + length], draw)
    new_length = len(header)
    if draw.random() >= 0.9:
        new_length = draw.choice([0, 1, length, 2**31, 2**63, 2**64 - 1])
    return new_length.to_bytes(8, "little") + header + content[8 + length :]
