"""Short digests of values, for the records of `scripts.house`."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(value: Any) -> str:
    """Return the first sixteen hexadecimal digits of a value's SHA-256.

    Args:
        value: Text, bytes, or a value that is written as JSON with sorted keys.
    """
    if isinstance(value, bytes):
        content = value
    elif isinstance(value, str):
        content = value.encode()
    else:
        content = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]
