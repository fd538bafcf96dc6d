"""Files broken at random: bits, bytes, values of JSON, headers of safetensors. What `fuzz` and tests of readers feed them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "../x",
    "/etc/passwd", "gpt2", "llama", "vit", "F32", "I64", "\0", "\ud800", [], {}, [[]], [0], [-1, 2], [2**62, 4], {"a": 1},
]  # fmt: skip


def broken_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bits flipped, bytes cut, doubled, moved or zeroed."""
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        start = (
            draw.randrange(len(data) or 1)
            if draw.random() < 0.4
            else draw.randrange(min(len(data), 400) or 1)
        )
        end = min(len(data), start + draw.choice([1, 2, 8, 50, 1000]))
        match draw.randrange(7):
            case 0:
                data[start : start + 1] = (
                    bytes([data[start] ^ (1 << draw.randrange(8))]) if data else b""
                )
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
                data[start : start + 1] = draw.choice(
                    [b"9" * 30, b"-", b"[", b"{", b'"', b"1e999", b"\xff", b"null"]
                )
    return bytes(data)


def broken_json(content: bytes, draw: random.Random) -> bytes:
    """A value or name somewhere in it replaced, removed, doubled or swapped for another."""
    value = json.loads(content)
    for _ in range(draw.choice([1, 1, 2, 4])):
        owner = value
        while True:
            key = draw.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
            if not isinstance(owner[key], dict | list) or not owner[key] or draw.random() < 0.15:
                break
            owner = owner[key]
        match draw.randrange(4):
            case 0 | 1:
                owner[key] = copy.deepcopy(draw.choice(NASTY))
            case 2 if isinstance(owner, dict) and len(owner) > 1:
                del owner[key]
            case _ if isinstance(owner, dict):
                owner[draw.choice([*owner, "x", "../x", ""])] = copy.deepcopy(owner[key])
    return json.dumps(value).encode()


def broken_header(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file with `broken_json` for a header, its length right or not."""
    length = int.from_bytes(content[:8], "little")
    header = broken_json(content[8 : 8 + length], draw)
    header_length = (
        len(header) if draw.random() < 0.9 else draw.choice([0, 1, length, 2**31, 2**63, 2**64 - 1])
    )
    return header_length.to_bytes(8, "little") + header + content[8 + length :]
