"""Words of all `mupax` commands, and a way to run a command in this process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

from mupax import terminal
from mupax.commands import dispatch

COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "lm-tiny"),
    "train, images": ("train", "vit-digits"),
    "train, encoder-decoder": ("train", "ed-tiny"),
    "finetune": ("finetune",),
    "check": ("check", "lm-tiny"),
    "sweep": ("sweep", "lm-tiny"),
    "tune": ("tune", "lm-tiny"),
    "transfer": ("transfer", "lm-tiny"),
    "plan": ("plan", "lm-tiny"),
    "plan score": ("plan", "score"),
    "compile": ("compile", "lm-tiny"),
    "roles": ("models", "roles", "lm-tiny"),
    "balance": ("presets", "balance", "lm-tiny"),
    "checkpoints": ("checkpoints",),
    "checkpoints verify": ("checkpoints", "verify"),
    "grow": ("grow",),
    "eval": ("eval",),
    "predict": ("predict",),
    "noise": ("noise",),
    "generate": ("generate",),
    "serve": ("serve",),
    "push": ("push",),
    "convert": ("convert",),
    "presets": ("presets", "list"),
    "presets constants": ("presets", "constants"),
    "presets table": ("presets", "table"),
    "presets limits": ("presets", "limits"),
    "presets desiderata": ("presets", "desiderata"),
    "presets compare": ("presets", "compare"),
    "presets joint": ("presets", "joint"),
    "presets tuned": ("presets", "tuned"),
    "presets dynamics": ("presets", "dynamics", "lm-tiny"),
    "verify": ("verify",),
    "models": ("models", "list"),
    "models describe": ("models", "describe"),
    "import": ("import",),
    "export": ("export",),
    "data prepare": ("data", "prepare"),
    "data show": ("data", "show"),
    "data tokenizer": ("data", "tokenizer"),
}
"""Name of a command in records to the words that are typed for it. Names stay when words change."""


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a command line, and return its exit code, standard output and standard error."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = terminal.exit_code(dispatch.run, words)
    return code, out.getvalue(), err.getvalue()


def done(words: Sequence[str]) -> str:
    """Run a command line that must succeed, and return its standard output.

    Raises:
        RuntimeError: The command did not exit with 0; the message has its standard error.
    """
    code, out, err = run(words)
    if code:
        raise RuntimeError(f"mupax {' '.join(words)} exited with {code}: {err}")
    return out
