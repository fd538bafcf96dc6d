"""The mesh axis of experts: tokens go to their experts and back, and eight devices train as one does."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from jax.sharding import PartitionSpec as P

from mupax.train.config.run import MeshConfig, OptimizerConfig
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.transformer import RoutingConfig
from tests.fixtures.commands import refusal
from tests.fixtures.tiny import (
    Training,
    assert_moved_alike,
    assert_same_bits,
    batch_of,
    program_of,
    run_of,
    train,
)

TOLERANCE = 3e-5
"""Share of a parameter's largest change, as in test_mesh."""
MODEL = DecoderConfig(
    width=16, depth=1, num_heads=2, vocab_size=11, seq_len=12, norm="rmsnorm", activation="swiglu",
    bias=False, experts=4, active_experts=2, expert_dim=8,
    routing=RoutingConfig(capacity_factor=0.75),
)  # fmt: skip
MODELS = {
    "capacity": MODEL,
    "dropless": dataclasses.replace(MODEL, routing=RoutingConfig(), bias=True),
}
ONE = MeshConfig(data=1)
MANY = MeshConfig(data=2, fsdp=2, experts=2)
WITH_TENSOR = MeshConfig(data=1, fsdp=2, experts=2, tensor=2)


@functools.cache
def trained(model: str, mesh: MeshConfig) -> Training:
    config = run_of(
        MODELS[model],
        batch_size=16,
        optimizer=OptimizerConfig(name="sgd", peak_lr=0.3, clip_norm=1.0),
        mesh=mesh,
        steps=4,
    )
    return train(program_of(config), 2)


# test_experts has a capacity where tensor splits.
@pytest.mark.parametrize(
    ("model", "mesh"), [("capacity", MANY), ("dropless", WITH_TENSOR)], ids=["capacity", "dropless"]
)
def test_eight_devices_start_bitwise_as_one_and_train_as_one(model: str, mesh: MeshConfig) -> None:
    expected = trained(model, ONE)
    actual = trained(model, mesh)
    assert_same_bits(actual.first, expected.first)
    assert actual.rows[-1] == pytest.approx(expected.rows[-1], rel=TOLERANCE / 10)
    assert (actual.rows[-1]["dropped_tokens"] > 0) == (model == "capacity")
    assert_moved_alike(actual.last.params, expected, TOLERANCE, least=0.0)


def test_experts_are_split_and_all_else_as_by_fsdp() -> None:
    training = trained("capacity", MANY)
    specs = {name: leaf.sharding.spec for name, leaf in training.last.params.items()}
    assert specs["block.experts.up"] == P(None, "experts", "fsdp", None)
    assert specs["block.experts.down"] == P(None, "experts", None, "fsdp")
    assert specs["block.experts.router"] == P(None, ("fsdp", "experts"), None)
    assert specs["block.attention.query"][1] == ("fsdp", "experts")
    with_bias = trained("dropless", WITH_TENSOR).last.params
    assert with_bias["block.experts.up_bias"].sharding.spec == P(None, "experts", "tensor")
    batch = training.program.train_feed().shard_batch(batch_of(MODEL, rows=16))
    # Each device has its own tokens.
    assert {shard.data.shape for shard in batch["inputs"].addressable_shards} == {(2, 12)}


def exchanges(training: Training) -> int:
    """Count all-to-all of slots in the compiled step.

    A device has 2 experts, each with 5 tokens of each of 2 examples, 16 wide.
    """
    lines = (training.step.as_text() or "").splitlines()
    return sum(" all-to-all(" in line and "f32[1,2,10,16]" in line for line in lines)


def test_tokens_are_exchanged_all_to_all_once_there_and_back_in_both_passes() -> None:
    assert exchanges(trained("capacity", MANY)) == 4
    assert exchanges(trained("capacity", ONE)) == 0  # the control


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--mesh.experts 2",
            "mesh.experts 2 splits experts and the model has none; write --model.experts too",
        ),
        (
            "--mesh.experts 4 --model.experts 6",
            "mesh.experts 4 does not divide axis 'experts' of size 6 (block.experts.down); "
            "write mesh.experts 3, or a model whose experts is a multiple of 4",
        ),
        (
            "--mesh.experts 2 --model.experts 4 --mesh.rules batch=data,fsdp",
            "mesh.rules splits experts over experts, over which the batch is not split",
        ),
    ],
)
def test_a_mesh_that_experts_do_not_fit_says_what_does(flags: str, message: str) -> None:
    assert message in refusal("train lm-tiny --dry-run", flags)
