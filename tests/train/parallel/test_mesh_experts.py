"""The mesh axis of experts: tokens go to their experts and back, and eight devices train as one does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mupax.__main__ import main
from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.transformer import RoutingConfig

TOLERANCE = 3e-5
"""As in test_mesh: of a parameter's largest change."""
MODEL = DecoderConfig(
    width=16, depth=1, num_heads=2, vocab_size=11, seq_len=12, norm="rmsnorm", activation="swiglu", bias=True,
    experts=4, active_experts=2, expert_dim=8, routing=RoutingConfig(capacity_factor=0.75),
)  # fmt: skip
MODELS = {"capacity": MODEL, "dropless": dataclasses.replace(MODEL, routing=RoutingConfig())}
ONE, MANY = {"data": 1}, {"data": 2, "fsdp": 2, "experts": 2}
WITH_TENSOR = {"data": 1, "fsdp": 2, "experts": 2, "tensor": 2}
Mesh = tuple[tuple[str, int], ...]


def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 11, (16, 12)).astype(np.int32)
    return {
        "inputs": tokens,
        "targets": np.roll(tokens, -1, 1),
        "weights": (random.random((16, 12)) < 0.7).astype("f4"),
    }


def _mesh(sizes: Mesh) -> MeshConfig:
    fields: dict[str, Any] = dict(sizes)
    return MeshConfig(**fields)


@functools.cache
def trained(model: str, mesh: Mesh) -> tuple[Program, Any, Any, dict[str, float], str]:
    """The program, the state before and after two steps, the metrics of the second, and what was compiled."""
    config = Config(
        recipe="test", model=MODELS[model], data=DataConfig(name="random", batch_size=16), steps=4,
        preset=PresetConfig(name="mup"), mesh=_mesh(mesh),
        optimizer=OptimizerConfig(peak_lr=0.01, eps=1e-2, clip_norm=1.0),
    )  # fmt: skip
    program = assemble(config, jax.devices()[: 1 if dict(mesh) == ONE else 8])
    step, inputs, state, metrics = (
        program.compile_train(),
        program.step_inputs(),
        program.initial_state(),
        {},
    )
    first = jax.tree.map(jnp.copy, state)
    for _ in range(2):
        state, metrics = step(state, inputs, program.train_feed().shard_batch(batch()))  # pyright: ignore
    numbers = {name: float(value) for name, value in metrics.items() if value.ndim == 0}
    return program, first, state, numbers, step.as_text() or ""


def exchanges(text: str) -> int:
    """All-to-all of slots: of one device the 2 experts, 5 tokens that each takes of each of 2 examples, 16 wide."""
    return sum(" all-to-all(" in line and "f32[1,2,10,16]" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("model", "mesh"), [("capacity", MANY), ("capacity", WITH_TENSOR), ("dropless", WITH_TENSOR)]
)
def test_eight_devices_start_bitwise_as_one_and_train_as_one(
    model: str, mesh: dict[str, int]
) -> None:
    _, first, one, expected, _ = trained(model, tuple(ONE.items()))
    _, begun, many, metrics, _ = trained(model, tuple(mesh.items()))
    assert metrics == pytest.approx(expected, rel=TOLERANCE / 10)
    assert (metrics["dropped_tokens"] > 0) == (model == "capacity")
    for name, value in one.params.items():
        start = np.asarray(first.params[name])
        np.testing.assert_array_equal(
            start.view(np.uint32), np.asarray(begun.params[name]).view(np.uint32)
        )
        moved = np.abs(np.asarray(value) - start).max()
        assert moved > 0, name
        np.testing.assert_allclose(
            many.params[name], value, rtol=0, atol=TOLERANCE * moved + 1e-7, err_msg=name
        )


def test_experts_are_split_and_all_else_as_by_fsdp() -> None:
    program, first, *_ = trained("capacity", tuple(MANY.items()))
    specs = {name: leaf.sharding.spec for name, leaf in first.params.items()}
    assert specs["block.experts.up"] == P(None, "experts", "fsdp", None)
    assert specs["block.experts.down"] == P(None, "experts", None, "fsdp")
    assert specs["block.experts.up_bias"] == P(None, "experts", None)
    assert specs["block.experts.router"] == P(None, ("fsdp", "experts"), None)
    assert specs["block.attention.query"][1] == ("fsdp", "experts")
    parts = program.train_feed().shard_batch(batch())["inputs"].addressable_shards
    assert {part.data.shape for part in parts} == {
        (2, 12)
    }  # a device's own tokens: no two have the same


def test_tokens_are_exchanged_all_to_all_once_there_and_back_in_both_passes() -> None:
    _, _, _, _, text = trained("capacity", tuple(MANY.items()))
    assert exchanges(text) == 4
    assert exchanges(trained("capacity", tuple(ONE.items()))[4]) == 0  # the control


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--mesh.experts", "2"],
            "mesh.experts 2 splits experts and the model has none; write --model.experts too",
        ),
        (
            ["--mesh.experts", "4", "--model.experts", "6"],
            "mesh.experts 4 does not divide axis 'experts' of size 6 (block.experts.down); "
            "write mesh.experts 3, or a model whose experts is a multiple of 4",
        ),
        (
            ["--mesh.experts", "2", "--model.experts", "4", "--mesh.rules", "batch=data,fsdp"],
            "mesh.rules splits experts over experts, over which the batch is not split",
        ),
    ],
)
def test_a_mesh_that_experts_do_not_fit_says_what_does(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "lm-tiny", "--dry-run", *flags]) == 2
    assert message in capsys.readouterr().err
