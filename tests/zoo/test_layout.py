"""The layout as an argument: models of two layouts, modules with and without the field, old names.

Whole steps on meshes against one device are in tests/train/parallel/test_mesh.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.mlp_mixer import Mixer, MixerConfig
from mupax import zoo
from mupax.train.config import data
from mupax.train.config.run import MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo import manual, partition
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import Definition, define, definition
from mupax.zoo.layers import linear
from mupax.zoo.layers.linear import ReadoutInputs, readout_method
from mupax.zoo.layers.stack import residual_stack
from mupax.zoo.partition import ONE_DEVICE, Layout
from tests.fixtures.tiny import equations, run_of, train
from tests.zoo.models import numbers as random_numbers

MODEL = DecoderConfig(width=16, depth=3, num_heads=2, vocab_size=24, seq_len=8, positions="rotary")
TOKENS = np.random.default_rng(0).integers(0, 24, (8, 8), np.int32)
MESHES = {
    "batch": {"data": 8},
    "positions": {"data": 2, "sequence": 4},
    "heads": {"data": 4, "tensor": 2},
}


@functools.cache
def built() -> Definition:
    return definition(MODEL)


@functools.cache
def numbers() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return parameters, multipliers and factors of the forward pass."""
    params, _ = random_numbers(built())
    ones = {name: np.ones(factor["shape"], np.float32) for name, factor in built().factors.items()}
    return params, dict.fromkeys(params, np.float32(1)), ones


def network_of(layout: Layout = ONE_DEVICE) -> Any:
    return built().model(*numbers(), layout=layout)


def layout_of(sizes: dict[str, int]) -> MeshLayout:
    return MeshLayout(make_mesh(MeshConfig(**sizes)))  # pyright: ignore[reportArgumentType]


def program_text(network: Any) -> str:
    return str(jax.make_jaxpr(lambda tokens: network(tokens))(TOKENS))


@pytest.mark.core
def test_models_of_two_layouts_do_not_see_each_others() -> None:
    layouts: dict[str, Layout] = {"one device": ONE_DEVICE}
    for name, sizes in MESHES.items():
        layouts[name] = layout_of(sizes)
    alone = {name: program_text(network_of(layout)) for name, layout in layouts.items()}
    assert len(set(alone.values())) == 4  # the control: each layout makes another program

    # All are made first, and called in another order than they were made in.
    networks = {name: network_of(layout) for name, layout in layouts.items()}
    for name in reversed([*networks]):
        assert program_text(networks[name]) == alone[name], name

    # One program traces two of them, one inside of the other's call.
    def nested(tokens: jax.Array) -> jax.Array:
        first = networks["positions"](tokens)
        return first + networks["heads"](jnp.argmax(first, axis=-1))

    expected = networks["one device"](TOKENS)
    expected = expected + networks["one device"](jnp.argmax(expected, axis=-1))
    np.testing.assert_allclose(jax.jit(nested)(TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.core
def test_a_layout_is_a_static_field_that_definitions_do_not_keep() -> None:
    layout = layout_of(MESHES["batch"])
    definition_graph = built().graph
    before = hash(definition_graph)
    placed = network_of(layout)
    unplaced = nnx.graphdef(network_of())
    modules: Any = nnx.iter_modules(placed)
    parts = [part for _, part in modules if partition.has_layout(part)]
    assert {type(part).__name__ for part in parts} == {"Decoder", "Block", "Attention", "MLP"}
    assert all(part.layout is layout for part in parts)
    # A function that is compiled for one model is not traced for another with the same layout.
    graph, state = nnx.split(placed)
    again = nnx.graphdef(network_of(layout))
    assert graph == again
    assert hash(graph) == hash(again)
    assert graph != unplaced  # the control: the layout is in the graph of a placed model
    assert not [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, Layout)]
    # Neither in the definition nor in a model of one device, such as a user builds and saves.
    assert built().graph == definition_graph
    assert hash(built().graph) == before
    assert unplaced == nnx.graphdef(network_of())
    tiny_model = zoo.get("lm-tiny")
    assert nnx.graphdef(tiny_model.module(nnx.Rngs(0))) == definition(tiny_model).graph
    assert ONE_DEVICE not in vars(network_of()).values()


class Gathered(Mixer):
    """The example with the field, through which it reads its parameters."""

    layout: Layout = ONE_DEVICE

    def readout_inputs(self, images_BHWC: jax.Array) -> ReadoutInputs:
        h_BPD = self.embed(images_BHWC)
        h_BPD = residual_stack(
            self.block, h_BPD, self.config.depth, self.config.compute, layout=self.layout
        )
        return ReadoutInputs(jnp.mean(self.norm(h_BPD), axis=1), self.readout[...])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredConfig(MixerConfig):
    def module(self, rngs: nnx.Rngs) -> Gathered:
        return Gathered(self, rngs)


class Placed(Mixer):
    """The example with the field alone, whose readout nothing would gather."""

    layout: Layout = ONE_DEVICE


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedConfig(MixerConfig):
    def module(self, rngs: nnx.Rngs) -> Placed:
        return Placed(self, rngs)


def step_of(config: type[MixerConfig]) -> Program:
    model = config(width=16, depth=2, image_size=4, patch_size=2, channels=1, num_classes=8)
    return assemble(
        run_of(
            model,
            mesh=MeshConfig(data=1, fsdp=8),
            optimizer=OptimizerConfig(peak_lr=0.1),
            preset=PresetConfig(name="mup", base="embed=8,mlp=32,layers=2"),
        )
    )


def is_gathered_by_hand(program: Program) -> bool:
    names = {eqn.primitive.name for eqn in equations(program.trace_train().jaxpr.jaxpr)}
    return "shard_map" in names


def test_a_users_module_has_its_parameters_gathered_by_hand_if_it_reads_them_so() -> None:
    plain = train(step_of(MixerConfig), 2)
    gathered = train(step_of(GatheredConfig), 2)
    losses = [row["loss"] for row in plain.rows]
    assert losses[1] != losses[0]  # the control: the step changes the model
    np.testing.assert_allclose([row["loss"] for row in gathered.rows], losses, rtol=1e-5)
    assert not is_gathered_by_hand(plain.program)
    assert is_gathered_by_hand(gathered.program)
    assert not is_gathered_by_hand(step_of(PlacedConfig))


@pytest.mark.core
def test_a_module_of_another_kind_keeps_its_own_attribute() -> None:
    class Convolution(nnx.Module):
        layout = "NHWC"

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.convolution = Convolution()

    bound: Any = define(Model).bind({}, {}, layout=layout_of(MESHES["batch"]))
    assert bound.convolution.layout == "NHWC"
    assert not hasattr(bound, "layout")


@pytest.mark.core
def test_what_users_may_have_written_warns() -> None:
    class Old(Mixer):
        gathers = True

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OldConfig(MixerConfig):
        def module(self, rngs: nnx.Rngs) -> Old:
            return Old(self, rngs)

    layout = layout_of({"data": 1, "fsdp": 8})
    config = OldConfig(width=16, depth=2, image_size=4, patch_size=2, channels=1, num_classes=8)
    with pytest.warns(DeprecationWarning, match="Old.gathers is deprecated"):
        assert manual.inside(layout, definition(config)) is None
    with pytest.warns(DeprecationWarning, match="read self.layout"):
        assert partition.current() is ONE_DEVICE


def test_the_method_and_the_class_of_a_readout_work_by_their_old_names() -> None:
    class Old(Mixer):
        reading = Gathered.readout_inputs

    assert readout_method(Mixer) is None
    assert readout_method(Gathered) is Gathered.readout_inputs
    with pytest.warns(DeprecationWarning, match="Old.reading is deprecated"):
        assert readout_method(Old) is Old.reading
    with pytest.warns(DeprecationWarning, match="write ReadoutInputs"):
        assert linear.Reading is ReadoutInputs
    with pytest.warns(DeprecationWarning, match="write DataKind"):
        assert data.Source is data.DataKind
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = linear.no_such_name
