"""One run on one and on eight devices: the same start to the bit, the same training to rounding."""

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

from mupax.mappings import drop_keys
from mupax.train.config.run import MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.sharding import MeshError, make_mesh
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ViTConfig
from tests.fixtures import tiny
from tests.fixtures.tiny import (
    Training,
    assert_moved_alike,
    assert_same_bits,
    batch_of,
    run_of,
    state_with,
    train,
)

pytestmark = pytest.mark.core

STEPS = 5
TOLERANCE = 3e-5
"""Share of a parameter's largest change in five steps.

float32 sums in another order: 1e-5 at most, and 3e-7 of the loss.
"""

MESHES = {
    "one": MeshConfig(data=1),
    "8x1x1": MeshConfig(data=8),
    "2x4x1": MeshConfig(data=2, fsdp=4),
    "2x2x2": MeshConfig(data=2, fsdp=2, tensor=2),
}
LOOP = ComputeConfig(layers="scan")  # compiles in less time

# Each size divides by the mesh axis that splits it; 17 tokens and 7 classes stay complete. The last
# axis of every shard is a multiple of 16, which fills vector instructions; test_mesh_sequence has
# others.
DECODER = DecoderConfig(
    width=64, depth=2, num_heads=6, num_kv_heads=2, head_dim=16, mlp_ratio=1.5, vocab_size=17,
    seq_len=7, positions="rotary", norm="rmsnorm", activation="swiglu", qk_norm=True, bias=False,
    compute=LOOP,
)  # fmt: skip
VIT = ViTConfig(
    width=64, depth=1, num_heads=2, head_dim=16, mlp_ratio=1.5, image_size=9, patch_size=3,
    channels=2, num_classes=7, pool="cls-mean", registers=1, layer_scale=0.5, centered=True,
    pre_logits=True, distribution="flax",
)  # fmt: skip
ODD = dataclasses.replace(DECODER, width=20, head_dim=4, mlp_ratio=1.1)
PRESET = PresetConfig(name="depth-mup", base="lm-proxy", alpha_l=0.75)
ADAM = OptimizerConfig(peak_lr=0.01, eps=1e-2, warmup_steps=2, weight_decay=0.1, clip_norm=1.0)
RUNS = {
    "decoder": run_of(DECODER, batch_size=16, preset=PRESET, optimizer=ADAM),
    "vit": run_of(
        VIT,
        batch_size=16,
        preset=dataclasses.replace(PRESET, base="vit-proxy"),
        optimizer=OptimizerConfig(name="sgd", peak_lr=0.3),
        accumulation_steps=2,
    ),
}


@functools.cache
def program_of(run: str, mesh: str) -> Program:
    return tiny.program_of(dataclasses.replace(RUNS[run], mesh=MESHES[mesh]))


@functools.cache
def trained(run: str, mesh: str) -> Training:
    return train(program_of(run, mesh), STEPS)


# Every mesh once. Where every axis is split, test_mesh_sequence accumulates gradients,
# test_mesh_experts has biases and test_loss has centred outputs.
several = pytest.mark.parametrize(
    ("run", "mesh"), [("decoder", "8x1x1"), ("decoder", "2x2x2"), ("vit", "2x4x1")]
)


@several
def test_initialization_is_the_same_to_the_bit(run: str, mesh: str) -> None:
    assert_same_bits(trained(run, mesh).first, trained(run, "one").first)


@several
def test_five_steps_agree_with_one_device(run: str, mesh: str) -> None:
    expected = trained(run, "one")
    actual = trained(run, mesh)
    for step, (got, want) in enumerate(zip(actual.rows, expected.rows, strict=True)):
        # Logits of a centred model begin at 0, and rounding decides which of them is the largest.
        if step == 0 and RUNS[run].model.centered:
            got = drop_keys(got, ["accuracy"])
            want = drop_keys(want, ["accuracy"])
        assert got == pytest.approx(want, rel=TOLERANCE / 10)
    assert_moved_alike(actual.last.params, expected, TOLERANCE)

    def assert_near(got: Any, want: Any) -> None:
        atol = 1e-5 + TOLERANCE * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)

    jax.tree.map(assert_near, actual.last.opt_state, expected.last.opt_state)


def test_control_a_rate_of_one_percent_more_does_not_agree() -> None:
    expected = trained("decoder", "one")
    program = expected.program
    hyper = program.inputs.hyper._replace(peak_lr=np.float32(1.01 * 0.01))
    inputs = program.inputs._replace(hyper=hyper)
    faster = train(program, STEPS, inputs=inputs, step=expected.step)
    for name, value in expected.last.params.items():
        moved = np.abs(np.asarray(value) - expected.first[name]).max()
        difference = np.abs(np.asarray(faster.last.params[name]) - np.asarray(value)).max()
        assert difference > 100 * TOLERANCE * moved, name


@several
def test_an_optimizer_moment_lies_where_its_parameter_does(run: str, mesh: str) -> None:
    for state in (program_of(run, mesh).initial_state(), trained(run, mesh).last):
        parts = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, dict))
        moments = [part for part in parts if isinstance(part, dict)]
        assert len(moments) == (2 if run == "decoder" else 1)
        for moment in moments:
            assert moment.keys() == state.params.keys()
            for name, value in state.params.items():
                assert moment[name].sharding.is_equivalent_to(value.sharding, value.ndim), name


def test_parameters_are_split_as_the_rules_say() -> None:
    params = program_of("decoder", "2x2x2").initial_state().params
    expected = {
        "token": P(None, "fsdp"),
        "readout": P("fsdp"),
        "norm.gain": P("fsdp"),
        "block.attention_norm.gain": P(None, "fsdp"),
        "block.attention.query": P(None, "fsdp", "tensor"),
        "block.attention.key": P(None, "fsdp", "tensor"),
        "block.attention.out": P(None, "tensor", None, "fsdp"),
        "block.attention.query_norm.gain": P(),
        "block.mlp.up": P(None, "fsdp", "tensor"),
        "block.mlp.down": P(None, "tensor", "fsdp"),
    }
    for name, spec in expected.items():
        sharding = jax.sharding.NamedSharding(params[name].sharding.mesh, spec)
        assert params[name].sharding.is_equivalent_to(sharding, params[name].ndim), name
    up = params["block.mlp.up"]
    assert up.shape == (2, 64, 96)
    assert {shard.data.shape for shard in up.addressable_shards} == {(2, 32, 48)}
    assert len(up.addressable_shards) == 8


def test_the_batch_is_split_over_data_and_fsdp() -> None:
    program = program_of("decoder", "2x2x2")
    on_mesh = program.train_feed().shard_batch(batch_of(DECODER, rows=16))
    assert {shard.data.shape for shard in on_mesh["inputs"].addressable_shards} == {(4, 7)}


def test_a_state_is_born_on_its_devices() -> None:
    # A run holds shards from the start; on CPU alone parameters are made complete before.
    program = program_of("vit", "2x4x1")
    state = program.initial_state()
    leaves = jax.tree.leaves(state.params)
    total = sum(leaf.nbytes for leaf in leaves)
    on_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert on_device < 0.3 * total
    chex.assert_tree_is_sharded(state.arrays(), devices=list(program.mesh.devices.flat))
    expected = jax.tree.map(lambda leaf: leaf.sharding, program.abstract)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == expected


def test_bfloat16_products_run_on_a_mesh() -> None:
    compute = dataclasses.replace(LOOP, dtype="bfloat16", remat="dots")
    model = dataclasses.replace(DECODER, compute=compute)
    config = dataclasses.replace(RUNS["decoder"], model=model, mesh=MESHES["2x2x2"])
    program = assemble(config)
    expected = trained("decoder", "one")
    training = train(program, 1, state=state_with(program, expected.first))
    assert {leaf.dtype for leaf in training.last.params.values()} == {jnp.dtype(jnp.float32)}
    # Two blocks of rounding to 8 bits, in a loss near ln 17.
    for name, tolerance in (("loss", 0.02), ("grad_norm", 0.1)):
        assert training.rows[0][name] == pytest.approx(expected.rows[0][name], rel=tolerance)


# Meshes that cannot be


def refused(message: str, batch_size: int = 16, accumulation: int = 1, **mesh: Any) -> None:
    """Assert that a run of `ODD` is refused with one line that has the message."""
    config = run_of(
        ODD, batch_size=batch_size, mesh=MeshConfig(**mesh), accumulation_steps=accumulation
    )
    with pytest.raises(MeshError) as error:
        assemble(config)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"data": 3}, "needs 3 devices (data 3); there are 8. Write axes whose product is that, or --mesh.data -1"),
        ({"data": -1, "tensor": 3}, "needs a multiple of 3 devices (tensor 3); there are 8. Write smaller axes"),
        ({"data": -1, "fsdp": -1}, "mesh.data and mesh.fsdp are both -1; leave at most one to be inferred"),
        ({"data": 0}, "mesh.data is 0; write a number of devices, or -1"),
        ({"data": 4, "sweep": 2}, "mesh.sweep is 2 and a run of its own is one point; write 1, or `mupax sweep`"),
        (
            {"data": 1, "fsdp": 8},
            "mesh.fsdp 8 does not divide axis 'embed' of size 20 (block.attention.key); "
            "write mesh.fsdp 5, or a model whose embed is a multiple of 8",
        ),
        (
            {"data": 2, "fsdp": 2, "tensor": 2, "gradient_dtype": "bfloat16"},
            "mesh.gradient_dtype bfloat16 is for parameters that fsdp splits, and neither sequence nor tensor; leave it out",
        ),
        ({"data": 2, "tensor": 4}, "mesh.tensor 4 does not divide axis 'heads' of size 6"),
        ({"data": 8, "batch_size": 12}, "data.batch_size 12 does not split over 8 devices"),
        ({"data": 8, "batch_size": 36, "accumulation": 3}, "write a multiple of 24, such as 24"),
    ],
)  # fmt: skip
def test_a_mesh_or_batch_that_does_not_fit_says_what_does(mesh: Any, message: str) -> None:
    refused(message, **mesh)


def test_axes_that_rarely_divide_stay_whole() -> None:
    params = program_of("vit", "2x2x2").abstract.params
    assert params["readout"].sharding.spec == P("fsdp", None)
    wide = dataclasses.replace(DECODER, num_kv_heads=3, vocab_size=18, bias=True)
    config = dataclasses.replace(RUNS["decoder"], model=wide, mesh=MESHES["2x2x2"])
    shardings = assemble(config).abstract.params
    assert shardings["block.attention.key"].sharding.spec == P(None, "fsdp", None, None)
    assert shardings["block.attention.query_bias"].sharding.spec == P(None, "tensor", None)
    assert shardings["token"].sharding.spec == P("tensor", "fsdp")


def test_what_is_left_of_the_devices_is_inferred() -> None:
    sizes = {name: size for name, size in make_mesh(MeshConfig(fsdp=2)).shape.items() if size > 1}
    assert sizes == {"data": 4, "fsdp": 2}
    assert make_mesh(MeshConfig(), jax.devices()[:3]).size == 3
