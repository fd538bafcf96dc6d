"""One run on meshes of one and of eight devices: the same start to the bit, the same training to rounding."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import StepInputs
from mupax.train.parallel.sharding import MeshError, make_mesh
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ViTConfig

pytestmark = pytest.mark.core

STEPS = 5
TOLERANCE = 3e-5
"""Of a parameter's largest change in five steps. float32 sums in another order: 1e-5 at most, and 3e-7 of the loss."""

MESHES = {
    "one": MeshConfig(data=1),
    "8x1x1": MeshConfig(data=8),
    "2x4x1": MeshConfig(data=2, fsdp=4),
    "2x2x2": MeshConfig(data=2, fsdp=2, tensor=2),
}

# Each size divides by the mesh axis that splits it; 17 tokens and 7 classes stay whole. The last axis of every shard is a
# multiple of 16, which fills vector instructions; test_mesh_sequence has others.
DECODER = DecoderConfig(
    width=64, depth=2, num_heads=6, num_kv_heads=2, head_dim=16, mlp_ratio=1.5, vocab_size=17, seq_len=7,
    positions="rotary", norm="rmsnorm", activation="swiglu", qk_norm=True,
)  # fmt: skip
VIT = ViTConfig(
    width=64, depth=2, num_heads=2, head_dim=16, mlp_ratio=1.5, image_size=9, patch_size=3, channels=2, num_classes=7,
    pool="cls-mean", registers=1, layer_scale=0.5, centered=True, pre_logits=True, distribution="flax",
)  # fmt: skip
ODD = dataclasses.replace(DECODER, width=20, head_dim=4, mlp_ratio=1.1)
PRESET = PresetConfig(name="depth-mup", base="lm-proxy", alpha_l=0.75)
# Adam divides by |g| + eps: with an eps far below the gradients it would enlarge the rounding of those near zero.
ADAM = OptimizerConfig(peak_lr=0.01, eps=1e-2, warmup_steps=2, weight_decay=0.1, clip_norm=1.0)
RUNS = {
    "decoder": Config(
        recipe="decoder", model=DECODER, data=DataConfig(name="text:x", batch_size=16), preset=PRESET, optimizer=ADAM, steps=9
    ),
    "vit": Config(
        recipe="vit", model=VIT, data=DataConfig(name="images:x", batch_size=16), preset=dataclasses.replace(PRESET, base="vit-proxy"),
        optimizer=OptimizerConfig(name="sgd", peak_lr=0.3), steps=9, accumulation_steps=2,
    ),
}  # fmt: skip


@functools.cache
def program_of(run: str, mesh: str) -> Program:
    devices = jax.devices()
    assert len(devices) == 8
    return assemble(
        dataclasses.replace(RUNS[run], mesh=MESHES[mesh]), devices[:1] if mesh == "one" else devices
    )


def batch(run: str, step: int) -> dict[str, np.ndarray]:
    """A global batch in which the share of targets that count differs from row to row."""
    random = np.random.default_rng(step)
    model = RUNS[run].model
    if isinstance(model, DecoderConfig):
        shape, inputs = (16, 7), random.integers(0, 17, (16, 7), np.int32)
    else:
        shape, inputs = (16,), random.standard_normal((16, 9, 9, 2)).astype(np.float32)
    weights = (random.random(shape) < 0.7).astype(np.float32)
    return {"inputs": inputs, "targets": random.integers(0, 7, shape, np.int32), "weights": weights}


@functools.cache
def compiled(run: str, mesh: str) -> Any:
    return program_of(run, mesh).compile_train()


@functools.cache
def trained(run: str, mesh: str) -> tuple[Any, Any, list[dict[str, float]]]:
    """The initial and the final state after five steps, and the metrics of each step."""
    program = program_of(run, mesh)
    step, numbers = compiled(run, mesh), program.step_inputs()
    first, state, rows = program.initial_state(), program.initial_state(), []
    for index in range(STEPS):
        on_mesh = program.train_feed().shard_batch(batch(run, index))
        state, metrics = step(state, numbers, on_mesh)
        rows.append({name: float(value) for name, value in metrics.items() if value.ndim == 0})
    return first, state, rows


# Every mesh once; the centred output and the accumulated gradients once more where every axis is split.
several = pytest.mark.parametrize(
    ("run", "mesh"),
    [("decoder", "8x1x1"), ("decoder", "2x4x1"), ("decoder", "2x2x2"), ("vit", "2x2x2")],
)


@several
def test_initialization_is_the_same_to_the_bit(run: str, mesh: str) -> None:
    one, many = (trained(run, name)[0].params for name in ("one", mesh))
    for name, value in one.items():
        np.testing.assert_array_equal(
            np.asarray(value).view(np.uint32), np.asarray(many[name]).view(np.uint32)
        )


@several
def test_five_steps_agree_with_one_device(run: str, mesh: str) -> None:
    (first, one, expected), (_, many, rows) = (trained(run, name) for name in ("one", mesh))
    for got, want in zip(rows, expected, strict=True):
        assert got == pytest.approx(want, rel=TOLERANCE / 10)
    for name, value in one.params.items():
        moved = np.abs(np.asarray(value) - np.asarray(first.params[name])).max()
        assert moved > 1e-3, f"{name} was not trained"
        np.testing.assert_allclose(
            many.params[name], value, rtol=0, atol=TOLERANCE * moved + 1e-7, err_msg=name
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-5 + TOLERANCE * np.abs(b).max()
        ),
        many.opt_state,
        one.opt_state,
    )


def test_control_a_rate_of_one_percent_more_does_not_agree() -> None:
    program = program_of("decoder", "one")
    other = StepInputs(
        program.inputs.factors, program.inputs.hyper._replace(peak_lr=np.float32(1.01 * 0.01))
    )
    step, state = compiled("decoder", "one"), program.initial_state()
    for index in range(STEPS):
        state, _ = step(state, other, batch("decoder", index))
    first, one, _ = trained("decoder", "one")
    for name, value in one.params.items():
        moved = np.abs(np.asarray(value) - np.asarray(first.params[name])).max()
        assert (
            np.abs(np.asarray(state.params[name]) - np.asarray(value)).max()
            > 100 * TOLERANCE * moved
        ), name


@several
def test_an_optimizer_moment_lies_where_its_parameter_does(run: str, mesh: str) -> None:
    for state in trained(run, mesh)[:2]:
        moments = [
            part
            for part in jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, dict))
            if isinstance(part, dict)
        ]
        assert len(moments) == (2 if run == "decoder" else 1)
        for moment in moments:
            assert moment.keys() == state.params.keys()
            for name, value in state.params.items():
                assert moment[name].sharding.is_equivalent_to(value.sharding, value.ndim), name


def test_parameters_are_split_as_the_rules_say() -> None:
    params = trained("decoder", "2x2x2")[0].params
    expected = {
        "token": P(None, "fsdp"),
        "readout": P("fsdp"),
        "norm.gain": P("fsdp"),
        "block.attention_norm.gain": P(None, "fsdp"),
        "block.attention.query": P(None, "fsdp", "tensor"),
        "block.attention.key": P(None, "fsdp", "tensor"),
        "block.attention.out": P(None, "tensor", None, "fsdp"),
        "block.attention.query_bias": P(None, "tensor"),
        "block.attention.query_norm.gain": P(),
        "block.mlp.up": P(None, "fsdp", "tensor"),
        "block.mlp.down": P(None, "tensor", "fsdp"),
    }
    for name, spec in expected.items():
        sharding = jax.sharding.NamedSharding(params[name].sharding.mesh, spec)
        assert params[name].sharding.is_equivalent_to(sharding, params[name].ndim), (
            name,
            params[name].sharding,
        )
    up = params["block.mlp.up"]
    assert up.shape == (2, 64, 96)
    assert {shard.data.shape for shard in up.addressable_shards} == {(2, 32, 48)}
    assert len(up.addressable_shards) == 8


def test_the_batch_is_split_over_data_and_fsdp() -> None:
    program = program_of("decoder", "2x2x2")
    on_mesh = program.train_feed().shard_batch(batch("decoder", 0))
    assert {shard.data.shape for shard in on_mesh["inputs"].addressable_shards} == {(4, 7)}


def test_a_state_is_born_on_its_devices() -> None:
    # A run holds shards from the start; on CPU alone parameters are made whole before.
    program, state = program_of("decoder", "2x4x1"), trained("decoder", "2x4x1")[0]
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    there = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params))
    assert there < 0.3 * whole
    chex.assert_tree_is_sharded(state.arrays(), devices=list(program.mesh.devices.flat))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, program.abstract
    )


@pytest.mark.parametrize("mesh", ["2x4x1", "2x2x2"])
def test_bfloat16_products_run_on_a_mesh(mesh: str) -> None:
    run, config = "decoder", RUNS["decoder"]
    model = dataclasses.replace(config.model, compute=ComputeConfig(dtype="bfloat16", remat="dots"))
    program = assemble(dataclasses.replace(config, model=model, mesh=MESHES[mesh]))
    state, metrics = program.compile_train()(
        program.initial_state(),
        program.step_inputs(),
        program.train_feed().shard_batch(batch(run, 0)),
    )
    assert {leaf.dtype for leaf in state.params.values()} == {jnp.dtype(jnp.float32)}
    # Two blocks of rounding to 8 bits, in a loss near ln 17.
    assert float(metrics["loss"]) == pytest.approx(trained(run, "one")[2][0]["loss"], rel=0.02)
    assert float(metrics["grad_norm"]) == pytest.approx(
        trained(run, "one")[2][0]["grad_norm"], rel=0.1
    )


# Meshes that cannot be


def refused(
    message: str, *, model: Any = ODD, batch_size: int = 16, accumulation: int = 1, **mesh: Any
) -> None:
    config = dataclasses.replace(
        RUNS["decoder"], model=model, mesh=MeshConfig(**mesh), data=DataConfig(name="text:x", batch_size=batch_size),
        accumulation_steps=accumulation,
    )  # fmt: skip
    with pytest.raises(MeshError) as error:
        assemble(config)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"data": 3},
            "needs 3 devices (data 3); there are 8. Write axes whose product is that, or --mesh.data -1",
        ),
        (
            {"data": -1, "tensor": 3},
            "needs a multiple of 3 devices (tensor 3); there are 8. Write smaller axes",
        ),
        (
            {"data": -1, "fsdp": -1},
            "mesh.data and mesh.fsdp are both -1; leave at most one to be inferred",
        ),
        ({"data": 0}, "mesh.data is 0; write a number of devices, or -1"),
        (
            {"data": 4, "sequence": 2},
            "mesh.sequence 2 does not divide the 7 positions; write mesh.sequence 1, or --model.seq",
        ),
        (
            {"data": 4, "sweep": 2},
            "mesh.sweep is 2 and a run of its own is one point; write 1, or `mupax sweep`",
        ),
        ({"data": 1, "fsdp": 8}, "mesh.fsdp 8 does not divide axis 'embed' of size 20"),
        (
            {"data": 2, "fsdp": 2, "tensor": 2, "gradient_dtype": "bfloat16"},
            "mesh.gradient_dtype bfloat16 is for parameters that fsdp splits, and neither sequence nor tensor; leave it out",
        ),
        ({"data": 2, "tensor": 4}, "mesh.tensor 4 does not divide axis 'heads' of size 6"),
    ],
)
def test_a_mesh_that_does_not_fit_says_what_does(mesh: dict[str, Any], message: str) -> None:
    refused(message, **mesh)


def test_the_number_it_names_divides() -> None:
    refused("write mesh.fsdp 5, or a model whose embed is a multiple of 8", data=1, fsdp=8)
    refused("write mesh.tensor 3, or a model whose heads is a multiple of 4", data=2, tensor=4)


def test_a_batch_that_does_not_split_says_what_does() -> None:
    refused("data.batch_size 12 does not split over 8 devices", batch_size=12, data=8)
    refused("write a multiple of 8, such as 8", batch_size=12, data=8)
    refused("write a multiple of 24, such as 24", batch_size=24 + 12, accumulation=3, data=8)


def test_axes_that_rarely_divide_stay_whole() -> None:
    program = program_of("vit", "2x2x2")
    assert program.abstract.params["readout"].sharding.spec == P("fsdp", None)
    wide = dataclasses.replace(DECODER, num_kv_heads=3, vocab_size=18)
    shardings = assemble(
        dataclasses.replace(RUNS["decoder"], model=wide, mesh=MESHES["2x2x2"])
    ).abstract.params
    assert shardings["block.attention.key"].sharding.spec == P(None, "fsdp", None, None)
    assert shardings["token"].sharding.spec == P("tensor", "fsdp")


def test_what_is_left_of_the_devices_is_inferred() -> None:
    assert make_mesh(MeshConfig(fsdp=2)).shape == {
        "data": 4,
        "fsdp": 2,
        "experts": 1,
        "sequence": 1,
        "tensor": 1,
        "sweep": 1,
    }
    assert make_mesh(MeshConfig(), jax.devices()[:3]).size == 3
