"""The layout as an argument: models of two layouts side by side, modules with and without the field, and what stays of the old global.

Whole steps on meshes against one device are in tests/train/parallel/test_mesh.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from examples.mlp_mixer import Mixer, MixerConfig
from mupax import zoo
from mupax.train.config import data
from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo import manual, partition
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import Definition, define, definition
from mupax.zoo.layers import linear
from mupax.zoo.layers.linear import ReadoutInputs, readout_method
from mupax.zoo.layers.stack import residual_stack
from mupax.zoo.partition import ONE_DEVICE, Layout

MODEL = DecoderConfig(width=16, depth=3, num_heads=2, vocab_size=24, seq_len=8, positions="rotary")
TOKENS = np.random.default_rng(0).integers(0, 24, (8, 8), np.int32)
MESHES = {
    "batch": {"data": 8},
    "positions": {"data": 2, "sequence": 4},
    "heads": {"data": 4, "tensor": 2},
}


def numbers(model: Definition) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return parameters, multipliers and factors of the forward pass."""
    stds = dict.fromkeys(model.specs, 0.1)
    params = jax.jit(lambda: model.initialize(0, stds))()
    ones = {name: np.ones(factor["shape"], np.float32) for name, factor in model.factors.items()}
    return params, dict.fromkeys(model.specs, np.float32(1)), ones


def layout_of(sizes: dict[str, int]) -> MeshLayout:
    return MeshLayout(make_mesh(MeshConfig(**sizes)))


def program_text(network: Any) -> str:
    return str(jax.make_jaxpr(lambda tokens: network(tokens))(TOKENS))


@pytest.mark.core
def test_models_of_two_layouts_do_not_see_each_others() -> None:
    model = definition(MODEL)
    layouts = {name: layout_of(sizes) for name, sizes in MESHES.items()}
    alone = {
        name: program_text(model.model(*numbers(model), layout=layout))
        for name, layout in layouts.items()
    }
    alone["one device"] = program_text(model.model(*numbers(model)))
    assert len(set(alone.values())) == 4  # the control: each layout makes another program

    # All are made first, and called in another order than they were made in.
    networks = {
        name: model.model(*numbers(model), layout=layout) for name, layout in layouts.items()
    }
    networks["one device"] = model.model(*numbers(model))
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
    model, layout = definition(MODEL), layout_of(MESHES["batch"])
    definition_graph = model.graph
    before = hash(definition_graph)
    placed: Any = model.model(*numbers(model), layout=layout)
    unplaced = nnx.graphdef(model.model(*numbers(model)))
    parts = [part for _, part in nnx.iter_modules(placed) if partition.has_layout(part)]
    assert {type(part).__name__ for part in parts} == {"Decoder", "Block", "Attention", "MLP"}
    assert all(part.layout is layout for part in parts)
    graph, state = nnx.split(placed)
    again = nnx.graphdef(model.model(*numbers(model), layout=layout))
    assert (graph, hash(graph)) == (
        again,
        hash(again),
    )  # a function that is compiled for one is not traced for the other
    assert graph != unplaced  # the control: the layout is in the graph of a placed model
    assert not [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, Layout)]
    # Neither in the definition nor in a model of one device, such as a user builds and saves.
    assert (model.graph, hash(model.graph)) == (definition_graph, before)
    assert unplaced == nnx.graphdef(model.model(*numbers(model)))
    assert (
        nnx.graphdef(zoo.get("lm-tiny").module(nnx.Rngs(0))) == definition(zoo.get("lm-tiny")).graph
    )
    assert ONE_DEVICE not in vars(model.model(*numbers(model))).values()


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
    run = Config(
        recipe="r",
        model=model,
        data=DataConfig(name="images:x", batch_size=8),
        mesh=MeshConfig(data=1, fsdp=8),
        optimizer=OptimizerConfig(peak_lr=0.1),
        preset=PresetConfig(name="mup", base="embed=8,mlp=32,layers=2"),
        steps=9,
    )
    return assemble(run)


def primitives(jaxpr: Any) -> set[str]:
    inner = [one for equation in jaxpr.eqns for one in jaxprs_in_params(equation.params)]
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*map(primitives, inner))


def test_a_users_module_has_its_parameters_gathered_by_hand_if_it_reads_them_so() -> None:
    random = np.random.default_rng(1)
    images, targets = random.standard_normal((8, 4, 4, 1)), random.integers(0, 8, 8)
    batch = {
        "inputs": images.astype(np.float32),
        "targets": targets.astype(np.int32),
        "weights": np.ones(8, "f4"),
    }
    losses, by_hand = [], []
    for config in (MixerConfig, GatheredConfig):
        program = step_of(config)
        step, state = program.compile_train(), program.initial_state()
        for _ in range(2):
            state, metrics = step(
                state, program.step_inputs(), program.train_feed().shard_batch(batch)
            )
            losses.append(float(metrics["loss"]))
        by_hand.append("shard_map" in primitives(program.trace_train().jaxpr.jaxpr))
    assert by_hand == [False, True]
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)
    assert losses[1] != losses[0]  # the control: the step changes the model
    assert "shard_map" not in primitives(step_of(PlacedConfig).trace_train().jaxpr.jaxpr)


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

    layout, sizes = (
        layout_of({"data": 1, "fsdp": 8}),
        {"width": 16, "depth": 2, "image_size": 4, "patch_size": 2},
    )
    with pytest.warns(DeprecationWarning, match="Old.gathers is deprecated"):
        assert (
            manual.inside(layout, definition(OldConfig(**sizes, channels=1, num_classes=8))) is None
        )
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
