"""Short digests of values, and which of the values differ by their names."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(value: Any) -> str:
    """Return sixteen hexadecimal digits of the SHA-256 of a text, of bytes, or of a value's JSON with sorted keys."""
    if isinstance(value, bytes):
        content = value
    elif isinstance(value, str):
        content = value.encode()
    else:
        content = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]
