"""What all processes of a run must have alike, compared before anything is compiled: flags, code, versions, options, devices."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax

import mupax
from mupax.errors import MupaxError
from mupax.train.config.record import differences, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.parallel import environment
from mupax.train.parallel.processes import Processes

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "numpy",
    "grain",
    "libtpu",
)
_PATIENCE_S = 120.0
"""How long a process that has joined may take to say what it is. One of another version may never do."""


class AgreementError(MupaxError):
    """Processes that cannot train one model together. The text names the process, its host and what differs."""


def check(config: Config, processes: Processes, mine: dict[str, Any] | None = None) -> None:
    """Refuse to start where a process has something else than process 0; all of them then say which, and what.

    Args:
        config: of this process.
        processes: of the run.
        mine: facts of this process, of `config` unless given.

    Raises:
        AgreementError: the first difference.
    """
    mine = {"host": socket.gethostname(), **(mine or facts(config))}
    parts = processes.gather("agreement", mine, _PATIENCE_S)
    if problem := processes.broadcast(
        "agreed", lambda: first_difference(parts or []), _PATIENCE_S * processes.count
    ):
        raise AgreementError(problem)


def facts(config: Config) -> dict[str, Any]:
    """What must be alike, of this process."""
    local = jax.local_devices()
    devices: dict[str, Any] = {"kind": local[0].device_kind, "number": len(local)}
    if (
        local[0].platform == "cpu"
        and "--xla_cpu_max_isa" not in environment.variables()["XLA_FLAGS"]
    ):
        # Programs are compiled for the processor at hand, and round otherwise with other instructions.
        devices["instructions"] = environment.processor()["instructions"]
    return {
        # One that was started again has --resume and no --resume-from; process 0 alone asks for them.
        "config": {**to_json(config), "distributed": None, "resume": None, "resume_from": None},
        "versions": {
            "python": platform.python_version(),
            "mupax": mupax.__version__,
            **_versions(),
        },
        "code": environment.sources(),
        "options": environment.options(),
        "environment": environment.variables(),
        "devices": devices,
    }


def first_difference(parts: list[dict[str, Any]]) -> str:
    """The first difference of a process from process 0, in words; "" where there is none."""
    first, *rest = parts
    for index, part in enumerate(rest, start=1):
        for group, words in _WORDS.items():
            if unlike := list(differences(first[group], part[group])):
                here, there = f"process {index} ({part['host']})", f"process 0 ({first['host']})"
                return words(here, there, *unlike[0], len(unlike))
    return ""


def _other_flags(here: str, there: str, path: str, zero: Any, mine: Any, count: int) -> str:
    return f"{here} has {path} {text_of(mine)} and {there} has {text_of(zero)}; start all processes with the same flags"


def _other_version(here: str, there: str, path: str, zero: Any, mine: Any, count: int) -> str:
    return (
        f"{here} has {path} {mine} and {there} has {zero}; install the same versions on all hosts"
    )


def _other_code(here: str, there: str, path: str, zero: Any, mine: Any, count: int) -> str:
    what = (
        f"another {path} than" if mine and zero else f"{'a' if mine else 'no'} {path}, other than"
    )
    more = f", and {count - 1} more files differ" if count > 1 else ""
    return f"{here} has {what} {there}{more}; run the same code on all hosts"


def _other_option(here: str, there: str, path: str, zero: Any, mine: Any, count: int) -> str:
    return (
        f"{here} has JAX's option {path} {mine} and {there} has {zero}; set the variable {path.upper()} to one value in all "
        "processes, or in none"
    )


def _other_environment(here: str, there: str, path: str, zero: Any, mine: Any, count: int) -> str:
    return (
        f"{here} has {path}={mine!r} and {there} has {path}={zero!r}; set the same in all processes"
    )


def _other_devices(here: str, there: str, path: str, zero: Any, mine: Any, count: int) -> str:
    if path == "instructions":
        lacks = " ".join(sorted(set(zero) ^ set(mine)))
        return (
            f"{here} has a processor with other vector instructions than {there} ({lacks}); start all processes on the same "
            "hardware, or set XLA_FLAGS=--xla_cpu_max_isa=AVX2 in all of them"
        )
    return f"{here} has devices of another {path}, {mine}, than {there}, {zero}; start all processes on the same hardware"


_WORDS: dict[str, Callable[..., str]] = {
    "versions": _other_version,
    "code": _other_code,
    "config": _other_flags,
    "options": _other_option,
    "environment": _other_environment,
    "devices": _other_devices,
}


def _versions() -> dict[str, str | None]:
    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in _PACKAGES}
