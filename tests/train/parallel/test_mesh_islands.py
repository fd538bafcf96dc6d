"""Meshes over slices and hosts, of devices that need not exist: which axes cross the slow network, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from mupax.train.config.run import DEFAULT, MeshConfig
from mupax.train.config.run import parse_rules as parse
from mupax.train.parallel.sharding import MeshError, crosses_islands, make_mesh
from mupax.zoo.configs import ConfigError

pytestmark = pytest.mark.core


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "made up"


def slices(count: int, each: int, *, per_process: int = 2) -> list[Any]:
    return [Device(i, i // per_process, i // each) for i in range(count * each)]


def hosts(count: int, each: int) -> list[Any]:
    return [Device(i, i // each, platform="cpu") for i in range(count * each)]


def crossed(config: MeshConfig, devices: list[Any], attribute: str = "slice_index") -> set[str]:
    """Axes along which the slice (or the process) changes."""
    mesh = make_mesh(config, devices)
    assert sorted(device.id for device in mesh.devices.flat) == list(range(len(devices)))
    where = np.vectorize(lambda device: getattr(device, attribute))(mesh.devices)
    return {
        name for axis, name in enumerate(mesh.axis_names) if (np.diff(where, axis=axis) != 0).any()
    }


def test_data_crosses_slices_first_then_fsdp() -> None:
    assert crossed(MeshConfig(data=2, fsdp=4), slices(2, 4)) == {"data"}
    assert crossed(MeshConfig(data=2, fsdp=2, tensor=2), slices(4, 2)) == {"data", "fsdp"}
    assert crossed(MeshConfig(data=1, fsdp=4, tensor=2), slices(2, 4)) == {"fsdp"}
    assert crossed(MeshConfig(data=6), slices(3, 2)) == {"data"}
    # A slice that holds several processes is one island; a process in it is none.
    assert crossed(MeshConfig(data=1, fsdp=2, tensor=4), slices(1, 8), "process_index") >= {
        "tensor"
    }


class CompileOnlyPyClient:
    """Client of a topology for ahead-of-time compilation, as JAX names it."""


@dataclasses.dataclass(frozen=True)
class CompileOnlyDevice(Device):
    """GPU of such a topology: every one is of slice 0."""

    slice_index: int | None = 0
    client: CompileOnlyPyClient = dataclasses.field(default_factory=CompileOnlyPyClient)


TPUS = [Device(i, i // 2, i // 4, platform="tpu") for i in range(8)]
ONE_SLICE = [Device(i, i // 2, platform="tpu") for i in range(8)]
GPUS = slices(2, 4, per_process=4)
COMPILED_GPUS = [CompileOnlyDevice(i, i // 4) for i in range(8)]


@pytest.mark.parametrize(
    ("devices", "crosses"),
    [(TPUS, True), (ONE_SLICE, False), (GPUS, True), (COMPILED_GPUS, True), (hosts(2, 4), False)],
    ids=["two slices", "one slice", "hosts of GPUs", "compiled for hosts of GPUs", "CPUs"],
)
def test_an_axis_over_the_slow_network_is_told_apart(devices: list[Any], crosses: bool) -> None:
    """Also in a topology, so that what is compiled ahead of time is what a run compiles."""
    mesh: Any = type("Mesh", (), {"axis_names": ("data", "fsdp")})
    mesh.devices = np.array(devices).reshape(2, 4)
    assert crosses_islands(mesh, "data") is crosses
    assert crosses_islands(mesh, "fsdp") is False


def test_hosts_that_know_no_slices_are_islands() -> None:
    assert crossed(MeshConfig(data=2, tensor=4), hosts(2, 4), "process_index") == {"data"}


def test_the_axis_that_crosses_can_be_named() -> None:
    config = MeshConfig(data=2, fsdp=4, slices=("fsdp=2",))
    assert crossed(config, slices(2, 4)) == {"fsdp"}
    assert crossed(dataclasses.replace(config, slices=("data=2",)), slices(2, 4)) == {"data"}
    assert crossed(MeshConfig(data=1, sequence=8, slices=("sequence=4",)), slices(4, 2)) == {
        "sequence"
    }
    assert crossed(MeshConfig(data=4, tensor=4, slices=("data=2", "tensor=2")), slices(4, 4)) == {
        "data",
        "tensor",
    }


@pytest.mark.parametrize(
    ("config", "devices", "message"),
    [
        (
            MeshConfig(data=1, tensor=8), slices(2, 4),
            "mesh.data 1 and mesh.fsdp 1 do not spread over 2 slices or hosts, and other axes cross the slow network only "
            "where you say so; write --mesh.data 2, or --mesh.slices tensor=2",
        ),
        (MeshConfig(data=8, slices=("data=4",)), slices(2, 4), "mesh.slices data=4 means 4 slices; there are 2"),
        (MeshConfig(data=8, slices=("data=2",)), slices(1, 8), "mesh.slices data=2 means 2 slices; there are 1"),
        (MeshConfig(data=8, slices=("tensor=2",)), slices(2, 4), "mesh.slices has tensor=2, which does not divide mesh.tensor 1"),
        (MeshConfig(data=6), hosts(2, 2) + hosts(1, 2), "every process must have as many devices as the others; there are 4 in 0, 2 in 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_over_islands_is_refused(
    config: MeshConfig, devices: list[Any], message: str
) -> None:
    with pytest.raises(MeshError, match=f"^{re.escape(message)}$"):
        make_mesh(config, devices)


def test_rules_change_the_table_and_nothing_else() -> None:
    assert parse(()) == DEFAULT
    assert parse(("mlp=fsdp", "vocab=none", "batch=data,fsdp,tensor")) == {
        **DEFAULT, "mlp": ("fsdp",), "vocab": (), "batch": ("data", "fsdp", "tensor")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "word", "message"),
    [
        ("rules", "mlp", "mesh.rules has 'mlp'; write LOGICAL=MESH, such as mlp=tensor or vocab=none"),
        ("rules", "mpl=tensor", "mesh.rules has 'mpl=tensor', but no logical axis is named 'mpl'; did you mean mlp?"),
        ("rules", "mlp=tensors", "mesh.rules has 'mlp=tensors', but no mesh axis is named 'tensors'; did you mean tensor?"),
        ("rules", "layers=fsdp", "mesh.rules has 'layers=fsdp', but no logical axis is named 'layers'; write one of batch, "),
        ("rules", "mlp=sweep", "mesh.rules has 'mlp=sweep', but no mesh axis is named 'sweep'; write one of data, fsdp, "),
        ("rules", "mlp=fsdp,fsdp", "mesh.rules has 'mlp=fsdp,fsdp', which names a mesh axis twice; write it once"),
        ("rules", "mlp=none mlp=fsdp", "mesh.rules names mlp twice; write one rule with a comma, such as batch=data,fsdp"),
        ("slices", "2", "mesh.slices has '2'; write AXIS=N with a number of slices, such as data=2"),
        ("slices", "data=0", "mesh.slices has 'data=0'; write AXIS=N"),
        ("slices", "dat=2", "mesh.slices has 'dat=2', but no mesh axis is named 'dat'; did you mean data?"),
        ("slices", "data=2 data=2", "mesh.slices names data twice; write it once"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_refused_by_name(field: str, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        MeshConfig(**{field: tuple(word.split())})  # type: ignore[arg-type]
