"""What is gathered and scattered by hand: over the dimensions of a torus in turn, and in the gradient of a gathered parameter.

Whole steps on meshes against one device are in tests/train/parallel/test_mesh.py and test_mesh_sequence.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import assemble
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo import collectives, manual
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.manual import ManualFsdpLayout

WEIGHTS = np.random.default_rng(0).integers(-9, 9, (16, 3)).astype(np.float32)
INPUTS = np.random.default_rng(1).integers(-9, 9, (8, 16)).astype(np.float32)


def row(*places: tuple[int, ...]) -> np.ndarray:
    return np.array([SimpleNamespace(coords=place) for place in places])


def test_a_row_of_devices_is_cut_into_the_dimensions_of_its_torus() -> None:
    def grid(*sizes: int) -> list[tuple[int, ...]]:
        return list(np.ndindex(*sizes))

    assert collectives.torus(row(*grid(4, 2, 3))) == (4, 2, 3)
    assert collectives.torus(row(*[(0, y, x) for x, y in grid(4, 2)])) == (
        4,
        2,
    )  # the last coordinate is the slowest
    assert collectives.torus(row(*[(5, 1, z) for z in range(4)])) == (4,)
    ring = [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert collectives.torus(row(*ring)) == (4,)
    assert collectives.torus(np.array(jax.devices())) == (8,)  # without coordinates


@pytest.mark.core
def test_inside_of_a_device_nothing_but_experts_is_split() -> None:
    outside = MeshLayout(make_mesh(MeshConfig(data=1, fsdp=4, experts=2)))
    inside = ManualFsdpLayout(outside, {"embed": 16, "experts": 2})
    split = {axis for axis in ("batch", "embed", "experts") if inside.num_shards(axis) > 1}
    assert split == {"experts"}
    assert all(
        outside.num_shards(axis) > 1 for axis in ("batch", "embed", "experts")
    )  # the control


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)], ids=str)
def test_a_sum_scattered_over_a_torus_is_that_of_one_ring(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "torus", lambda devices: sizes)
    layout = ManualFsdpLayout(
        MeshLayout(make_mesh(MeshConfig(data=1, fsdp=8)), rings=True), {"embed": 16, "classes": 3}
    )
    split = layout.spec(("embed", "classes"))
    assert split == P("fsdp", None)

    def scatter_and_gather(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        mine = x * jax.lax.axis_index("fsdp")
        part = collectives.reduce_scatter(mine, ("fsdp",), 0, layout=layout)
        return part, collectives.all_gather(part, ("fsdp",), 0)

    part, whole = jax.jit(layout.shard_mapped(scatter_and_gather, P(), (split, P())))(WEIGHTS)
    np.testing.assert_array_equal(part, 28 * WEIGHTS)
    np.testing.assert_array_equal(whole, 28 * WEIGHTS)
    # The control: the dimensions in another order give every device another's part.
    if len(sizes) > 1:
        rings = collectives._rings
        monkeypatch.setattr(collectives, "_rings", lambda mesh, names: rings(mesh, names)[::-1])
        part, _ = jax.jit(layout.shard_mapped(scatter_and_gather, P(), (split, P())))(WEIGHTS)
        assert not np.array_equal(part, 28 * WEIGHTS)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_over_two_mesh_axes_a_part_is_that_of_both_at_once(platform: str) -> None:
    """On TPU sums go over one after the other; whole arrays are gathered so everywhere. Whole numbers: sums are exact."""
    names = ("fsdp", "experts")
    layout = ManualFsdpLayout(MeshLayout(make_mesh(MeshConfig(data=1, fsdp=4, experts=2))), {})
    layout.platform = platform

    def scatter_and_gather(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = collectives.reduce_scatter(x * jax.lax.axis_index(names), names, 0, layout=layout)
        return part, collectives.all_gather(part, names, 0)

    mapped = jax.jit(layout.shard_mapped(scatter_and_gather, P(), (P(names), P())))
    for output in mapped(WEIGHTS):
        np.testing.assert_array_equal(output, 28 * WEIGHTS)
    assert mapped.lower(WEIGHTS).as_text().count("reduce_scatter") == {"cpu": 1, "tpu": 2}[platform]


@pytest.mark.parametrize("names", [("fsdp",), ("data", "fsdp"), ("fsdp", "data")], ids=",".join)
def test_rounded_summands_are_sent_and_summed_in_float32(names: tuple[str, ...]) -> None:
    layout = ManualFsdpLayout(
        MeshLayout(make_mesh(MeshConfig(data=2, fsdp=4)), gradient_dtype="bfloat16"), {}
    )
    values = np.random.default_rng(2).uniform(1, 2, (8, 3, 16)).astype(np.float32)  # of each device
    split = P(None, names)

    def part(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        mine = collectives.reduce_scatter(x[0], names, 1, layout=layout)
        summed = jax.lax.psum_scatter(
            x[0].astype(jnp.bfloat16), names, scatter_dimension=1, tiled=True
        )
        return (jax.lax.psum(mine, "data"), summed) if names == ("fsdp",) else (mine, summed)

    sent, summed = jax.jit(layout.shard_mapped(part, P(("data", "fsdp")), (split, split)))(values)
    assert sent.dtype == jnp.float32
    rounded = values.astype(jnp.bfloat16).astype(np.float32)  # exact sums of eight
    np.testing.assert_array_equal(sent, rounded.sum(axis=0))
    assert (
        np.abs(np.asarray(summed, np.float32) - np.asarray(sent)).max() > 1e-3
    )  # the control: a sum in bfloat16


def gradient(mesh: MeshConfig, summed: tuple[str, ...] | None = None) -> jax.Array:
    layout = ManualFsdpLayout(MeshLayout(make_mesh(mesh)), {"embed": 16, "classes": 3})
    split, splits = layout.spec(("embed", "classes")), layout.partition(("embed", "classes"))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        w = (
            layout.gather(w, ("embed", "classes"))
            if summed is None
            else manual._gather(layout, splits, summed, w)
        )
        return jnp.sum(jnp.square(x @ w))

    return jax.jit(layout.shard_mapped(jax.grad(loss), (split, P(layout.batch)), split))(
        WEIGHTS, INPUTS
    )


def test_the_gradient_of_a_gathered_parameter_is_summed_over_all_that_split_the_batch() -> None:
    expected = 2 * INPUTS.T @ INPUTS @ WEIGHTS  # whole numbers: exact in any order
    two_axes = MeshConfig(data=2, fsdp=4)
    for mesh in (two_axes, MeshConfig(data=8), MeshConfig(data=1, fsdp=8)):
        np.testing.assert_array_equal(gradient(mesh), expected)
    assert not np.array_equal(gradient(two_axes, ("fsdp",)), expected)  # the control: not over data


def test_no_layer_keeps_its_gathered_matrices_for_the_backward_pass() -> None:
    model = DecoderConfig(
        width=16,
        depth=3,
        num_heads=2,
        mlp_ratio=1.5,
        vocab_size=17,
        seq_len=8,
        compute=ComputeConfig(layers="scan"),
    )
    config = Config(
        recipe="r", model=model, data=DataConfig(name="text:x", batch_size=8), mesh=MeshConfig(data=1, fsdp=8),
        optimizer=OptimizerConfig(peak_lr=0.1), preset=PresetConfig(name="mup", base=None), steps=9,
    )  # fmt: skip
    shapes: set[tuple[int, ...]] = set()
    products: set[tuple[int, ...]] = set()

    def look(jaxpr: Any, inside: bool) -> None:
        for equation in jaxpr.eqns:
            output_shapes = [tuple(v.aval.shape) for v in equation.outvars if inside]
            shapes.update(output_shapes)
            products.update(output_shapes if equation.primitive.name == "mul" else ())
            for inner in jaxprs_in_params(equation.params):
                look(inner, inside or equation.primitive.name == "shard_map")

    look(assemble(config).trace_train().jaxpr.jaxpr, False)
    # a gathered matrix, the parts of all, and hidden activations
    assert shapes >= {(16, 24), (3, 2, 24), (3, 1, 8, 24)}
    assert (3, 16, 24) not in shapes
    # A layer's part is taken times its multiplier, the parts of all never at once.
    assert (2, 24) in products
    assert (3, 2, 24) not in products
