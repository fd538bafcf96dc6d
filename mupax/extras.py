"""Optional packages (extras), and the message for a command whose packages are not installed."""

from __future__ import annotations

import importlib.util
import sys

from mupax import MupaxError

MODULES = {
    "cuda": ("jax_plugins",),  # has the plugins of all accelerators, also of ROCm
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
"""Modules that tell whether an extra is installed, by the name of the extra in pyproject.toml."""


def require(extra: str, user: str, error: type[MupaxError] = MupaxError) -> None:
    """Raise an error if an extra is not installed. The message has the command that installs it.

    Args:
        extra: Key of `MODULES`.
        user: Flag, value or command that needs the extra. The message begins with it.
        error: Class of the error to raise, `MupaxError` by default.
    """
    absent = [name for name in MODULES[extra] if not _is_installed(name)]
    if absent:
        packages = " and ".join(absent)
        raise error(f"{user} needs {packages}; run `pip install 'mupax[{extra}]'`")


def _is_installed(name: str) -> bool:
    # `find_spec` raises ValueError for a loaded module without a spec.
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None
