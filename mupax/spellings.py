"""Old spellings of commands and their present ones.

An old spelling still runs when it is typed. In recorded commands, which are never rewritten on disk
(`python -m train sweep lm-tiny`), it is replaced when the command is shown.
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
"""Old first words after `mupax` to the present ones.

They come from the time of four programs: `python -m train`, `presets`, `zoo` and `train.data`.
"""
_MODULE = re.compile(
    r"\bpython -m (?:mupax\.)?(?:train\.(?=data\b))?(?=(?:train|presets|zoo|data)\b)"
)
"""Beginning of a command that starts a package as a module. It is replaced by `mupax `."""
_COMMAND = re.compile(r"\bmupax (\w[\w-]*)(?: (\w[\w-]*))?")
"""A command in a text: `mupax` and the next one or two words."""


def old(words: Sequence[str]) -> str | None:
    """Return the key of `OLD` with which the words after `mupax` begin, or `None`."""
    # The longer spelling comes first: `zoo import` before `zoo`.
    for count in (2, 1):
        typed = " ".join(words[:count])
        if typed in OLD:
            return typed
    return None


def current_words(words: Sequence[str]) -> list[str]:
    """Return the words after `mupax` with an old spelling replaced by the present one."""
    typed = old(words)
    if typed is None:
        return list(words)
    arguments = words[len(typed.split()) :]
    return [*OLD[typed].split(), *arguments]


def current(text: str) -> str:
    """Return a text, such as a recorded command, with every old spelling replaced."""
    return _COMMAND.sub(_current_command, _MODULE.sub("mupax ", text))


def _current_command(match: re.Match[str]) -> str:
    """Return the present spelling of a command that `_COMMAND` matched."""
    words = [word for word in match.groups() if word is not None]
    return " ".join(["mupax", *current_words(words)])
