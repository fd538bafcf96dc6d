"""Positions split over devices, alone and with other axes: the same five steps as on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mupax.train.config.run import MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.sharding import MeshError
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ViTConfig
from tests.fixtures import tiny
from tests.fixtures.tiny import (
    Training,
    assert_moved_alike,
    assert_same_bits,
    batch_of,
    run_of,
    train,
)

STEPS = 5
TOLERANCE = 3e-5
"""Share of a parameter's largest change in five steps, as in test_mesh."""

SCAN = ComputeConfig(cross_entropy="vocab", layers="scan")
CHUNKED = ComputeConfig(cross_entropy="chunked", layers="scan")
# Decoders loop over their blocks, as on accelerators. The vision transformer has one block, which
# is not in a loop. Models without biases compile in less time; test_mesh_experts has them.
MODELS = {
    # Rotary positions, grouped queries, a vocabulary that tensor does not divide.
    "rotary": DecoderConfig(
        width=16, depth=2, num_heads=6, num_kv_heads=2, head_dim=4, mlp_ratio=1.5, vocab_size=17,
        seq_len=8, positions="rotary", norm="rmsnorm", activation="swiglu", bias=False,
        compute=SCAN,
    ),
    # Learned positions, a tied readout over a split vocabulary.
    "learned": DecoderConfig(
        width=16, depth=2, num_heads=2, mlp_ratio=1.5, vocab_size=18, seq_len=8, tied=True,
        bias=False, compute=CHUNKED,
    ),
    "vit": ViTConfig(
        width=16, depth=1, num_heads=2, mlp_ratio=1.5, image_size=6, patch_size=3, channels=2,
        num_classes=7, bias=False, compute=dataclasses.replace(CHUNKED, layers="unrolled"),
    ),
}  # fmt: skip
MESHES = {
    "one": MeshConfig(data=1),
    "data 2 x sequence 4": MeshConfig(data=2, sequence=4),
    "fsdp 2 x sequence 2 x tensor 2": MeshConfig(data=1, fsdp=2, sequence=2, tensor=2),
    "rules": MeshConfig(
        data=2,
        fsdp=2,
        tensor=2,
        rules=("mlp=fsdp,tensor", "embed=none", "vocab=none", "batch=data"),
    ),
}
# Every mesh once. test_kernels has rings without a causal mask.
CASES = [
    ("rotary", "data 2 x sequence 4"),
    ("learned", "fsdp 2 x sequence 2 x tensor 2"),
    ("learned", "rules"),
    ("vit", "data 2 x sequence 4"),
]

RING = ("rotary", "data 2 x sequence 4")
"""Case in which keys go round in a ring. In the others they are gathered."""


@functools.cache
def program_of(model: str, mesh: str) -> Program:
    attention = "ring" if (model, mesh) == RING else "auto"
    compute = dataclasses.replace(MODELS[model].compute, attention=attention)
    config = run_of(
        dataclasses.replace(MODELS[model], compute=compute),
        preset=PresetConfig(name="mup", base=None),
        # test_mesh has Adam.
        optimizer=OptimizerConfig(name="sgd", peak_lr=0.3, warmup_steps=2, clip_norm=1.0),
        mesh=MESHES[mesh],
        # A ring is the dearest to compile.
        accumulation_steps=1 if model == "rotary" else 2,
    )
    return tiny.program_of(config)


@functools.cache
def trained(model: str, mesh: str) -> Training:
    return train(program_of(model, mesh), STEPS)


@functools.cache
def evaluation(model: str, mesh: str) -> list[float]:
    """Return the sums of an evaluation after training."""
    program = program_of(model, mesh)
    batch = program.eval_feed().shard_batch(batch_of(MODELS[model], seed=STEPS))
    params = trained(model, mesh).last.params
    sums = program.compile_eval()(params, program.step_inputs(), batch)
    return [float(value) for value in jax.tree.leaves(sums)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_five_steps_and_an_evaluation_agree_with_one_device(model: str, mesh: str) -> None:
    expected = trained(model, "one")
    actual = trained(model, mesh)
    for got, want in zip(actual.rows, expected.rows, strict=True):
        assert got == pytest.approx(want, rel=TOLERANCE / 10)
    assert_moved_alike(actual.last.params, expected, TOLERANCE)
    sums = evaluation(model, "one")
    assert evaluation(model, mesh) == pytest.approx(sums, rel=TOLERANCE / 10)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_initialization_is_the_same_to_the_bit(model: str, mesh: str) -> None:
    # Rows are split into pieces that vector instructions do not fill, unlike those of test_mesh.
    assert_same_bits(trained(model, mesh).first, trained(model, "one").first)


@pytest.mark.slow
def test_control_positions_that_do_not_see_each_other_disagree() -> None:
    # Each half of the positions alone: the result of a device that gathered no keys.
    program = program_of("rotary", "one")
    params = program.initial_state().params
    evaluate = program.compile_eval()
    batch = batch_of(MODELS["rotary"])
    halves = {}
    for name, array in batch.items():
        halves[name] = np.concatenate([array[:, 4:], array[:, :4]], axis=1)
    loss = float(evaluate(params, program.step_inputs(), batch).loss)
    blind_loss = float(evaluate(params, program.step_inputs(), halves).loss)
    assert abs(loss - blind_loss) > 100 * TOLERANCE * loss


def test_batches_and_activations_are_split_along_positions() -> None:
    program = program_of("rotary", "data 2 x sequence 4")
    batch = program.train_feed().shard_batch(batch_of(MODELS["rotary"]))
    for array in batch.values():
        assert {shard.data.shape for shard in array.addressable_shards} == {(4, 2)}
    feed = program_of("vit", "data 2 x sequence 4").train_feed()
    images = feed.shard_batch(batch_of(MODELS["vit"]))["inputs"]
    assert {shard.data.shape for shard in images.addressable_shards} == {(4, 6, 6, 2)}

    def constrain(x: jax.Array) -> jax.Array:
        return program.layout.constrain(x, ("batch", "sequence", "mlp"))

    activations = jax.jit(constrain)(jnp.zeros((4, 8, 24)))
    expected = jax.sharding.NamedSharding(program.mesh, P("data", "sequence"))
    assert activations.sharding.is_equivalent_to(expected, 3)


def test_rules_of_a_run_move_parameters() -> None:
    program = program_of("learned", "rules")
    params = program.abstract.params
    assert params["block.mlp.up"].sharding.spec == P(None, None, ("fsdp", "tensor"))
    assert params["block.attention.query"].sharding.spec == P(None, None, "tensor", None)
    assert params["token"].sharding.spec == P(None, None)
    batch = program.layout.batch({"targets": np.zeros((8, 8))})
    assert batch["targets"].spec == P("data", None)


@pytest.mark.parametrize(
    ("model", "changes", "mesh", "message"),
    [
        (
            "vit", {"pool": "cls"}, {"data": 2, "sequence": 4},
            "mesh.sequence 4 does not divide the 5 positions (4 patches and the CLS token); write mesh.sequence 1, or "
            "--model.pool mean",
        ),
        (
            "vit", {}, {"data": 1, "sequence": 8},
            "mesh.sequence 8 does not divide the 4 positions (4 patches); write mesh.sequence 4, or another --model.patch-size",
        ),
        (
            "rotary", {"seq_len": 6}, {"data": 2, "sequence": 4},
            "mesh.sequence 4 does not divide the 6 positions; write mesh.sequence 3, or --model.seq-len with a multiple of 4",
        ),
        (
            "rotary", {"width": 18}, {"data": 1, "fsdp": 4, "tensor": 2, "rules": ("embed=fsdp,tensor",)},
            "mesh.fsdp 4 x mesh.tensor 2 does not divide axis 'embed' of size 18 (block.attention.key); "
            "write sizes of fsdp and tensor whose product divides 18, or a model whose embed is a multiple of 8",
        ),
    ],
)  # fmt: skip
def test_positions_that_do_not_split_say_what_does(
    model: str, changes: dict[str, Any], mesh: dict[str, Any], message: str
) -> None:
    config = run_of(dataclasses.replace(MODELS[model], **changes), mesh=MeshConfig(**mesh))
    with pytest.raises(MeshError) as error:
        assemble(config)
    assert str(error.value) == message
