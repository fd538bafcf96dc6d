"""Extras: packages that a plain install lacks, and the sentence that says which extra brings them."""

from __future__ import annotations

import importlib.util
import sys

from mupax.errors import MupaxError

MODULES = {
    "cuda": ("jax_plugins",),  # of any accelerator, ROCm's too
    "eval": ("lm_eval",),
    "gcs": ("gcsfs",),
    "hf": ("datasets",),
    "quantized": ("qwix",),
    "serve": ("h11", "starlette", "uvicorn"),
    "tpu": ("libtpu",),
    "trackio": ("trackio",),
    "tune": ("sklearn",),
    "wandb": ("wandb",),
}
"""Modules that commands import, by the extra of pyproject.toml that installs them."""


def require(extra: str, user: str, error: type[MupaxError] = MupaxError) -> None:
    """Refuse what needs an extra that is not installed.

    Args:
        extra: key of `MODULES`.
        user: the flag, value or command that needs it, with which the message begins.
        error: class of the error.
    """
    absent = [name for name in MODULES[extra] if not _is_installed(name)]
    if absent:
        packages = " and ".join(absent)
        raise error(f"{user} needs {packages}; run `pip install 'mupax[{extra}]'`")


def _is_installed(name: str) -> bool:
    # `find_spec` refuses a module that is loaded and has no file, or is hidden by None.
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None
