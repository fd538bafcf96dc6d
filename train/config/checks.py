"""What settings of any kind are checked for: numbers in range, and paths of this machine."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mupax.zoo.configs import ConfigError

_ADDRESS = re.compile(r"(?:\w+:)?([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_TEXT_FLAGS = ("--prompt",)
"""Flags whose value is a person's words, not a path."""


def at_least(owner: str, config: object, smallest: float, *names: str) -> None:
    """Raise ConfigError where a field of a config is a number below, or none; None is no number."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not smallest <= value < math.inf:
            raise ConfigError(f"{owner}{name} is {value}; write a number of at least {smallest}")


def check_local(name: str, path: str | None) -> None:
    """Raise ConfigError where a path is an address: pathlib would make a folder here of gs://bucket/run, without a word.

    Args:
        name: of the field, flag or variable, for the message.
        path: what it says; text:, images: and measured: may stand before it.
    """
    if path is not None and (address := _ADDRESS.match(path)):
        raise ConfigError(
            f"{name} is {path}, and {address[1]}:// is no folder of this machine, the only place that is read or written; "
            "mount the bucket (gcsfuse, mount-s3) or copy the files here, and write the path of that folder"
        )


def check_words(argv: Sequence[str]) -> None:
    """`check_local` for every word of a command line."""
    before = ""
    for word in argv:
        flag, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if flag not in _TEXT_FLAGS:
            check_local(flag or "the path", value)
        before = word if word.startswith("--") else ""
