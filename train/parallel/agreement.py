"""Comparison of the processes of a run before anything is compiled.

Flags, code, versions, options of JAX, environment variables and devices must be the same in all.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import jax

import mupax
from mupax import MupaxError
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
"""Seconds that a process may take to send its facts.

A process with another version of mupax may never send them.
"""


class AgreementError(MupaxError):
    """Error about processes that cannot train one model together.

    The text names the process, its host and the difference.
    """


def check(config: Config, processes: Processes, local_facts: dict[str, Any] | None = None) -> None:
    """Compare config, versions, code, options, variables and devices of all processes.

    Every process calls this and waits for the result. If a process differs from process 0, all
    processes raise the same error.

    Args:
        local_facts: Facts of this process; by default those of `facts`.

    Raises:
        AgreementError: Two processes differ. The text names the first difference.
        DistributedError: Another process does not answer in time.
    """
    part = {"host": socket.gethostname(), **(local_facts or facts(config))}
    parts = processes.gather("agreement", part, _PATIENCE_S)
    # Process 0 waits for one process after another, so the others wait for the sum of its waits.
    seconds = _PATIENCE_S * processes.count
    problem = processes.broadcast("agreed", lambda: first_difference(parts or []), seconds)
    if problem:
        raise AgreementError(problem)


def facts(config: Config) -> dict[str, Any]:
    """Return the facts of this process that must be equal in all processes, in groups.

    The groups are `config` (without the fields on how a process joined or resumed), `versions` of
    packages, `code` (digests of source files), `options` of JAX, `environment` variables, and
    `devices`.
    """
    local = jax.local_devices()
    devices: dict[str, Any] = {"kind": local[0].device_kind, "number": len(local)}
    variables = environment.variables()
    if local[0].platform == "cpu" and "--xla_cpu_max_isa" not in variables["XLA_FLAGS"]:
        # XLA compiles for the CPU at hand. CPUs with other vector instructions round differently.
        devices["instructions"] = environment.processor()["instructions"]
    # These may differ between processes. A process that was started again has --resume and no
    # --resume-from. Process 0 alone decides from what the run resumes.
    own_flags = {"distributed": None, "resume": None, "resume_from": None}
    return {
        "config": {**to_json(config), **own_flags},
        "versions": {
            "python": platform.python_version(),
            "mupax": mupax.__version__,
            **_versions(),
        },
        "code": environment.sources(),
        "options": environment.options(),
        "environment": variables,
        "devices": devices,
    }


class _Difference(NamedTuple):
    """First difference of a process from process 0 in one group of facts."""

    process: str
    """Number and host of the process that differs."""
    leader: str
    """Number and host of process 0."""
    path: str
    """Name of the fact."""
    value: Any
    leader_value: Any
    count: int
    """Number of facts that differ in the group."""


def first_difference(parts: list[dict[str, Any]]) -> str:
    """Return the first difference of a process from process 0 as a sentence, or "" if none differs.

    Args:
        parts: Facts of each process, with its `host`, in the order of their numbers.
    """
    leader_part, *worker_parts = parts
    for index, part in enumerate(worker_parts, start=1):
        for group, describe in _DESCRIPTIONS.items():
            unlike = list(differences(leader_part[group], part[group]))
            if not unlike:
                continue
            path, leader_value, value = unlike[0]
            return describe(
                _Difference(
                    process=f"process {index} ({part['host']})",
                    leader=f"process 0 ({leader_part['host']})",
                    path=path,
                    value=value,
                    leader_value=leader_value,
                    count=len(unlike),
                )
            )
    return ""


def _other_flags(diff: _Difference) -> str:
    return (
        f"{diff.process} has {diff.path} {text_of(diff.value)} and {diff.leader} has "
        f"{text_of(diff.leader_value)}; start all processes with the same flags"
    )


def _other_version(diff: _Difference) -> str:
    return (
        f"{diff.process} has {diff.path} {diff.value} and {diff.leader} has "
        f"{diff.leader_value}; install the same versions on all hosts"
    )


def _other_code(diff: _Difference) -> str:
    # A value is the digest of a file. It is empty if the process does not have the file.
    if diff.value and diff.leader_value:
        file = f"another {diff.path} than"
    elif diff.value:
        file = f"a {diff.path}, other than"
    else:
        file = f"no {diff.path}, other than"
    suffix = ""
    if diff.count > 1:
        suffix = f", and {diff.count - 1} more files differ"
    return f"{diff.process} has {file} {diff.leader}{suffix}; run the same code on all hosts"


def _other_option(diff: _Difference) -> str:
    return (
        f"{diff.process} has JAX's option {diff.path} {diff.value} and {diff.leader} has "
        f"{diff.leader_value}; set the variable {diff.path.upper()} to one value in all "
        "processes, or in none"
    )


def _other_environment(diff: _Difference) -> str:
    return (
        f"{diff.process} has {diff.path}={diff.value!r} and {diff.leader} has "
        f"{diff.path}={diff.leader_value!r}; set the same in all processes"
    )


def _other_devices(diff: _Difference) -> str:
    if diff.path == "instructions":
        lacks = " ".join(sorted(set(diff.leader_value) ^ set(diff.value)))
        return (
            f"{diff.process} has a processor with other vector instructions than {diff.leader} "
            f"({lacks}); start all processes on the same "
            "hardware, or set XLA_FLAGS=--xla_cpu_max_isa=AVX2 in all of them"
        )
    return (
        f"{diff.process} has devices of another {diff.path}, {diff.value}, than "
        f"{diff.leader}, {diff.leader_value}; start all processes on the same hardware"
    )


_DESCRIPTIONS: dict[str, Callable[[_Difference], str]] = {
    "versions": _other_version,
    "code": _other_code,
    "config": _other_flags,
    "options": _other_option,
    "environment": _other_environment,
    "devices": _other_devices,
}
"""Function that describes a difference in a sentence, by group of facts.

Groups are compared in this order.
"""


def _versions() -> dict[str, str | None]:
    """Return the versions of `_PACKAGES`, `None` for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
