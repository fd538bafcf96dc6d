"""The words of every command, and a way to run one in this process."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Sequence

COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "lm-tiny"),
    "train, images": ("train", "vit-digits"),
    "train, encoder-decoder": ("train", "ed-tiny"),
    "finetune": ("train", "finetune"),
    "check": ("train", "check", "lm-tiny"),
    "sweep": ("train", "sweep", "lm-tiny"),
    "tune": ("train", "tune", "lm-tiny"),
    "transfer": ("train", "transfer", "lm-tiny"),
    "plan": ("train", "plan", "lm-tiny"),
    "plan score": ("train", "plan", "score"),
    "compile": ("train", "compile", "lm-tiny"),
    "roles": ("train", "roles", "lm-tiny"),
    "balance": ("train", "balance", "lm-tiny"),
    "checkpoints": ("train", "checkpoints"),
    "checkpoints verify": ("train", "checkpoints", "verify"),
    "grow": ("train", "grow"),
    "eval": ("train", "eval"),
    "predict": ("train", "predict"),
    "noise": ("train", "noise"),
    "generate": ("train", "generate"),
    "serve": ("train", "serve"),
    "push": ("train", "push"),
    "convert": ("train", "convert"),
    "presets": ("presets", "list"),
    "presets constants": ("presets", "constants"),
    "presets table": ("presets", "table"),
    "presets limits": ("presets", "limits"),
    "presets desiderata": ("presets", "desiderata"),
    "presets compare": ("presets", "compare"),
    "presets joint": ("presets", "joint"),
    "presets tuned": ("presets", "tuned"),
    "presets dynamics": ("presets", "dynamics", "lm-tiny"),
    "verify": ("presets", "verify"),
    "models": ("zoo", "list"),
    "models describe": ("zoo", "describe"),
    "import": ("zoo", "import"),
    "export": ("zoo", "export"),
    "data prepare": ("data", "prepare"),
    "data show": ("data", "show"),
    "data tokenizer": ("data", "tokenizer"),
}
"""What a command is called in a record, and the words that are typed for it. A record keeps the name when the words change."""


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error of a command line."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = importlib.import_module("mupax.__main__").main([*words])
    return code, out.getvalue(), err.getvalue()


def done(words: Sequence[str]) -> str:
    """Return the standard output of a command line that has to succeed.

    Raises:
        RuntimeError: It did not exit with 0; the text is its standard error.
    """
    code, out, err = run(words)
    if code:
        raise RuntimeError(f"mupax {' '.join(words)} exited with {code}: {err}")
    return out
