"""Where a run runs: the mesh of its devices, and how its processes find each other. A part of `train/config/run.py`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Annotated

from tyro import conf

from mupax.train.config import sharding_rules as rules
from mupax.zoo.configs import ConfigError


def at_least(owner: str, config: object, smallest: float, *names: str) -> None:
    """Raise ConfigError where a field of a config is a number below, or none; None is no number."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not smallest <= value < math.inf:
            raise ConfigError(f"{owner}{name} is {value}; write a number of at least {smallest}")


_ADDRESS = re.compile(r"(?:\w+:)?([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_TEXT_FLAGS = ("--prompt",)
"""Flags whose value is a person's words, not a path."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices per named mesh axis. -1 at most once: whatever is left."""

    data: int = -1
    """Batch split, parameters replicated."""
    fsdp: int = 1
    """Batch split, parameters and optimizer state split too."""
    sequence: int = 1
    """Positions split (context parallel)."""
    tensor: int = 1
    """Heads, MLP and vocabulary split."""
    sweep: int = 1
    """Points of a sweep side by side (`python -m train sweep`); 1 in a run of its own."""
    rules: Annotated[tuple[str, ...], conf.arg(metavar="LOGICAL=MESH ...")] = ()
    """Changes of the table from logical to mesh axes: mlp=fsdp, vocab=none, batch=data,fsdp."""
    slices: Annotated[tuple[str, ...], conf.arg(metavar="AXIS=N ...")] = ()
    """Slices or hosts along each axis that crosses the slow network: data=2 fsdp=4. As many as fit over data, then fsdp."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))  # JSON brings a list
        object.__setattr__(self, "slices", tuple(self.slices))
        rules.parse(self.rules)
        rules.parse_slices(self.slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a run find each other. By hand; a TPU pod, SLURM and MPI say it in the environment."""

    coordinator: Annotated[str | None, conf.arg(metavar="HOST:PORT")] = None
    """Where process 0 answers the others (or JAX_COORDINATOR_ADDRESS)."""
    processes: int | None = None
    """How many there are (or JAX_NUM_PROCESSES); 1 joins nobody, whatever the environment says."""
    process: int | None = None
    """Number of this one, from 0 (or JAX_PROCESS_ID)."""
    timeout_seconds: int = 300
    """How long to wait for the others at the start."""
    heartbeat_seconds: int = 30
    """How long a process may be silent before the run ends."""

    def __post_init__(self) -> None:
        at_least("distributed.", self, 1, "processes", "timeout_seconds", "heartbeat_seconds")
        at_least("distributed.", self, 0, "process")
