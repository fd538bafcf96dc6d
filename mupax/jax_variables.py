"""Environment variables of JAX and XLA that cannot be used: each is one message.

This module imports no JAX. A wrong flag of XLA ends a process inside C++, so another process tries
the flags first.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import PurePath

from mupax.errors import MupaxError

XLA_FLAGS = "XLA_FLAGS"
_TRUE = ("1", "true", "t", "yes", "y", "on")
"""Words that JAX takes for true, in lower case."""
_NO_TRANSFERS = ("disallow", "disallow_explicit")
_TRANSFERS = "batches, metrics and checkpoints move between the host and the devices"
_NO_CHECKS = "its steps do not carry the state of such checks; JAX_DEBUG_NANS=1 works"
_REFUSED = {
    "JAX_DISABLE_JIT": (_TRUE, "every step is compiled ahead of time"),
    "JAX_NO_TRACING": (_TRUE, "every step is traced once, to be compiled"),
    "JAX_NUMPY_RANK_PROMOTION": (("raise",), "models and optimizers of its libraries rely on broadcasting"),
    "JAX_NUMPY_DTYPE_PROMOTION": (("strict",), "models and optimizers of its libraries rely on promotion"),
    "JAX_ERROR_CHECKING_BEHAVIOR_NAN": (("raise",), _NO_CHECKS),
    "JAX_ERROR_CHECKING_BEHAVIOR_DIVIDE": (("raise",), _NO_CHECKS),
    "JAX_ERROR_CHECKING_BEHAVIOR_OOB": (("raise",), _NO_CHECKS),
    "JAX_DEBUG_KEY_REUSE": (_TRUE, "random numbers of a step are drawn from one seed"),
    "JAX_TRANSFER_GUARD": (_NO_TRANSFERS, _TRANSFERS),
    "JAX_TRANSFER_GUARD_HOST_TO_DEVICE": (_NO_TRANSFERS, _TRANSFERS),
    "JAX_TRANSFER_GUARD_DEVICE_TO_DEVICE": (_NO_TRANSFERS, _TRANSFERS),
    "JAX_TRANSFER_GUARD_DEVICE_TO_HOST": (_NO_TRANSFERS, _TRANSFERS),
}
"""Variables with the values under which mupax cannot work, and why."""
_CHECKS = (
    "JAX_DEBUG_NANS",
    "JAX_DEBUG_INFS",
    "JAX_ENABLE_CHECKS",
    "JAX_CHECK_TRACER_LEAKS",
    "JAX_ENABLE_X64",
    "JAX_THREAD_GUARD",
)
"""Switches that make JAX raise errors of their own, or compute with other types."""
_KNOWN_FLAG = re.compile(r"--xla_force_host_platform_device_count=[1-9]\d{0,3}")
"""Flags that need no trial, which takes a quarter of a second."""
_TRIAL = "import jaxlib.xla_client; jaxlib.xla_client.CompileOptions()"
_LOG_PREFIX = re.compile(r"^[EFWI]\d{4} \S+ +\d+ \S+\] ")
"""What C++ prints before a message: time, thread, file and line."""
_BACKEND_FILE = ("jax", "_src", "xla_bridge.py")
_BACKEND_WORDS = ("Unable to initialize backend", "Unknown backend")
_PLATFORM_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_DEFAULT_DEVICE", "JAX_NUM_CPU_DEVICES")
_CONFIG_FILE = ("jax", "_src", "config.py")


Trial = Callable[[], dict[str, float]]


class VariableError(MupaxError):
    """An environment variable of JAX or XLA that cannot be used. The text names it and says what to write."""


def check(remembered: Callable[[str, Trial], dict[str, float]], variables: Mapping[str, str] = os.environ) -> None:
    """Refuse variables under which no command that computes can work, before work is spent.

    Args:
        remembered: keeps the result of a function on disk, by a name (`train.data.cache.remembered`).
        variables: environment of this process.

    Raises:
        VariableError: such a variable is set, or XLA does not take a flag.
    """
    for name, (values, reason) in _REFUSED.items():
        value = variables.get(name, "")
        if value.lower() in values:
            raise VariableError(f"mupax does not work under {name}={value}: {reason}. Unset {name}")
    flags = variables.get(XLA_FLAGS, "")
    # JAX that is imported has read the flags already.
    if "jaxlib" in sys.modules or all(_KNOWN_FLAG.fullmatch(flag) for flag in flags.split()):
        return
    import hashlib
    from importlib.metadata import version

    key = hashlib.sha256(f"{version('jaxlib')} {flags}".encode(errors="surrogateescape")).hexdigest()
    remembered(f"xla-flags-{key[:16]}", functools.partial(_try_flags, variables))


def _try_flags(variables: Mapping[str, str]) -> dict[str, float]:
    """Let another process read XLA_FLAGS. Return the seconds that it took.

    Raises:
        VariableError: it ended with an error.
    """
    import subprocess

    began = time.monotonic()
    # -P: a file of the current folder must not be imported in place of a library.
    trial = subprocess.run(
        [sys.executable, "-P", "-c", _TRIAL],
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    # C++ ends the process without a word of Python, whose own errors are not about flags.
    if trial.returncode and "Traceback" not in trial.stderr:
        lines = [_LOG_PREFIX.sub("", line) for line in trial.stderr.splitlines() if line.strip()]
        reason = lines[0].rstrip(".") if lines else f"exit code {trial.returncode}"
        value = " ".join(variables[XLA_FLAGS].split())
        raise VariableError(f"XLA does not take XLA_FLAGS={value}: {reason[:300]}. Correct or unset XLA_FLAGS")
    return {"seconds": time.monotonic() - began}


def explained(error: BaseException, variables: Mapping[str, str] = os.environ) -> str | None:
    """Describe an error of JAX that comes from a variable of the environment. Return None for any other error.

    Args:
        error: exception with its traceback.
        variables: environment of this process.
    """
    reason = (str(error) or type(error).__name__).splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    last_file = PurePath(frames[-1].filename).parts[-3:] if frames else ()
    if last_file == _CONFIG_FILE:
        name = _named_variable(reason, variables)
        return f"JAX does not take its environment: {reason}. Correct or unset {name}"
    # JAX removes its own frames from most of its errors, and says so in a note.
    is_filtered = any("JAX" in note for note in getattr(error, "__notes__", ()))
    is_of_jax = is_filtered or "_src" in last_file
    names_backend = any(words in reason for words in _BACKEND_WORDS)
    is_of_backend = names_backend or last_file == _BACKEND_FILE or (is_of_jax and not str(error))
    set_names = [name for name in _PLATFORM_VARIABLES if variables.get(name)]
    if is_of_backend and set_names:
        settings = " ".join(f"{name}={variables[name]}" for name in set_names)
        why = reason if str(error) else "this machine has no such device"
        advice = f"Unset {' and '.join(set_names)}, or write JAX_PLATFORMS=cpu"
        return f"JAX cannot start under {settings}: {why}. {advice}"
    checks = [name for name in _CHECKS if variables.get(name, "").lower() in _TRUE]
    if is_of_jax and checks:
        settings = " ".join(f"{name}={variables[name]}" for name in checks)
        return f"{type(error).__name__} under {settings}: {reason}. To go on without, unset {' and '.join(checks)}"
    return None


def _named_variable(text: str, variables: Mapping[str, str]) -> str:
    """Return the variable that a message of JAX names, or all that are set."""
    words = re.findall(r"\bjax[._]\w+", text, re.IGNORECASE)
    ours = [name for name in variables if name.startswith("JAX_")]
    upper_words = [word.upper().replace(".", "_") for word in words]
    named = [word for word in upper_words if word in ours]
    return named[0] if named else f"what is wrong of {', '.join(sorted(ours)) or 'its variables'}"
