"""Where a run runs: the mesh of its devices, which of its axes split what, and how processes find each other. No JAX."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from tyro import conf

from mupax.config_fields import Affects, Listed
from mupax.presets.roles import AXES as PARAMETER_AXES
from mupax.train.config.checks import at_least
from mupax.zoo.configs import ConfigError

MESH_AXES = ("data", "fsdp", "experts", "sequence", "tensor", "sweep")
"""Axes of every mesh, in the order of its array: what communicates least comes first."""

Rules = Mapping[str, tuple[str, ...]]
"""Logical axis to the mesh axes that split it, the first one outermost. An axis not named is whole on every device."""

DEFAULT: Rules = {
    "batch": ("data", "fsdp", "experts"),
    "sequence": ("sequence",),
    "embed": ("fsdp", "experts"),
    "memory": ("fsdp", "experts"),
    "representation": ("fsdp", "experts"),
    "experts": ("experts",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert_dim": ("tensor",),
    "vocab": ("tensor",),
    "classes": ("tensor",),
}
"""The table that holds where a run says nothing else (`mesh.rules`)."""

MAY_STAY_WHOLE = frozenset({"vocab", "classes", "kv_heads"})
"""Logical axes kept whole where the mesh axis does not divide them: rarely round, and not worth refusing a run."""

_TARGETS = tuple(axis for axis in MESH_AXES if axis != "sweep")
_LOGICAL = ("batch", "sequence", *(axis for axis in PARAMETER_AXES if axis not in ("layers", "encoder_layers")))


def parse_rules(words: Sequence[str]) -> Rules:
    """The default table with rules of the form LOGICAL=MESH[,MESH...] or LOGICAL=none put over it.

    Args:
        words: such as ["mlp=fsdp", "vocab=none", "batch=data,fsdp"].

    Raises:
        ConfigError: a rule of another form, an axis that does not exist, or one that is named twice.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for word in words:
        logical, equals, right = word.partition("=")
        if not equals:
            raise ConfigError(f"mesh.rules has {word!r}; write LOGICAL=MESH, such as mlp=tensor or vocab=none")
        _check_name(logical, _LOGICAL, "logical axis", f"mesh.rules has {word!r}")
        if logical in rules:
            raise ConfigError(f"mesh.rules names {logical} twice; write one rule with a comma, such as batch=data,fsdp")
        rules[logical] = () if right == "none" else tuple(right.split(","))
        for name in rules[logical]:
            _check_name(name, _TARGETS, "mesh axis", f"mesh.rules has {word!r}")
        if len(set(rules[logical])) != len(rules[logical]):
            raise ConfigError(f"mesh.rules has {word!r}, which names a mesh axis twice; write it once")
    return {**DEFAULT, **rules}


def parse_slices(words: Sequence[str]) -> dict[str, int]:
    """Mesh axis to the number of slices along it, from words of the form AXIS=N.

    Raises:
        ConfigError: a word of another form, an axis that does not exist, or one that is named twice.
    """
    slices: dict[str, int] = {}
    for word in words:
        axis, _, number = word.partition("=")
        if not (number.isdecimal() and int(number)):
            raise ConfigError(f"mesh.slices has {word!r}; write AXIS=N with a number of slices, such as data=2")
        _check_name(axis, _TARGETS, "mesh axis", f"mesh.slices has {word!r}")
        if axis in slices:
            raise ConfigError(f"mesh.slices names {axis} twice; write it once")
        slices[axis] = int(number)
    return slices


def _check_name(name: str, names: Collection[str], kind: str, what: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(names)}"
        raise ConfigError(f"{what}, but no {kind} is named {name!r}; {hint}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices per named mesh axis. -1 at most once: whatever is left."""

    data: Annotated[int, Listed("layout", 2, given={"mesh.data": 1, "mesh.fsdp": -1})] = -1
    """Batch split, parameters replicated."""
    fsdp: Annotated[int, Listed("layout", 2)] = 1
    """Batch split, parameters and optimizer state split too."""
    experts: Annotated[int, Affects("layout", test="train/parallel/test_mesh_experts.py")] = 1
    """Experts split, and batch and other parameters as by fsdp; tokens are sent to their experts and back (expert parallel)."""
    sequence: Annotated[int, Listed("layout", 2)] = 1
    """Positions split (context parallel)."""
    tensor: Annotated[int, Listed("layout", 2)] = 1
    """Heads, MLP and vocabulary split."""
    sweep: Annotated[int, Affects("layout", test="train/run/test_loop_errors.py")] = 1
    """Points of a sweep side by side (`mupax sweep`); 1 in a run of its own."""
    rules: Annotated[
        tuple[str, ...],
        conf.arg(metavar="LOGICAL=MESH ..."),
        Affects("layout", ("mlp=none",), given={"mesh.tensor": 2}),
    ] = ()
    """Changes of the table from logical to mesh axes: mlp=fsdp, vocab=none, batch=data,fsdp."""
    slices: Annotated[
        tuple[str, ...], conf.arg(metavar="AXIS=N ..."), Affects("layout", test="train/parallel/test_mesh_islands.py")
    ] = ()
    """Slices or hosts along each axis that crosses the slow network: data=2 fsdp=4. As many as fit over data, then fsdp."""
    gradient_dtype: Annotated[
        Literal["bfloat16"] | None, Affects("rounding", "bfloat16", given={"mesh.data": 1, "mesh.fsdp": -1})
    ] = None
    """What fsdp's sums of gradients are sent in, and then added in float32; unless given both are of the products' type."""

    def __post_init__(self) -> None:
        parse_rules(self.rules)
        parse_slices(self.slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes of a run find each other. By hand; a TPU pod, SLURM and MPI say it in the environment."""

    coordinator: Annotated[str | None, conf.arg(metavar="HOST:PORT"), Affects("processes", "localhost:2")] = None
    """Where process 0 answers the others (or JAX_COORDINATOR_ADDRESS)."""
    processes: Annotated[int | None, Affects("processes", 3)] = None
    """How many there are (or JAX_NUM_PROCESSES); 1 joins nobody, whatever the environment says."""
    process: Annotated[int | None, Affects("processes", 0)] = None
    """Number of this one, from 0 (or JAX_PROCESS_ID)."""
    timeout_seconds: Annotated[int, Affects("processes", 77)] = 300
    """How long to wait for the others at the start."""
    heartbeat_seconds: Annotated[int, Affects("processes", 66)] = 30
    """How long a process may be silent before the run ends."""

    def __post_init__(self) -> None:
        at_least("distributed.", self, 1, "processes", "timeout_seconds", "heartbeat_seconds")
        at_least("distributed.", self, 0, "process")
