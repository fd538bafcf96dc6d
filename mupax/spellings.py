"""Old spellings of commands. Typed, they still run; recorded, they are shown as they are typed now.

Studies on disk are never written again, so one may still say `python -m train sweep lm-tiny`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

OLD: dict[str, str] = {
    "train check": "check",
    "train sweep": "sweep",
    "train tune": "tune",
    "train transfer": "transfer",
    "train plan": "plan",
    "train compile": "compile",
    "train roles": "models roles",
    "train balance": "presets balance",
    "train checkpoints": "checkpoints",
    "train grow": "grow",
    "train eval": "eval",
    "train finetune": "finetune",
    "train predict": "predict",
    "train noise": "noise",
    "train generate": "generate",
    "train serve": "serve",
    "train push": "push",
    "train convert": "convert",
    "presets verify": "verify",
    "zoo import": "import",
    "zoo export": "export",
    "zoo": "models",
}
"""First words of a command when there were four doors, and the words in their place."""
_MODULE = re.compile(
    r"\bpython -m (?:mupax\.)?(?:train\.(?=data\b))?(?=(?:train|presets|zoo|data)\b)"
)
"""Beginning of a command that names a package as a module. The next word comes after `mupax`."""
_COMMAND = re.compile(r"\bmupax (\w[\w-]*)(?: (\w[\w-]*))?")


def old(words: Sequence[str]) -> str | None:
    """Return the old spelling that the words after `mupax` begin with, or `None`."""
    for count in (2, 1):
        typed = " ".join(words[:count])
        if typed in OLD:
            return typed
    return None


def current_words(words: Sequence[str]) -> list[str]:
    """Return the words after `mupax` without an old spelling."""
    typed = old(words)
    if typed is None:
        return list(words)
    return [*OLD[typed].split(), *words[len(typed.split()) :]]


def current(text: str) -> str:
    """Return a text, such as a recorded command, with every command as it is typed now."""

    def replaced(match: re.Match[str]) -> str:
        words = [word for word in match.groups() if word is not None]
        return " ".join(["mupax", *current_words(words)])

    return _COMMAND.sub(replaced, _MODULE.sub("mupax ", text))
