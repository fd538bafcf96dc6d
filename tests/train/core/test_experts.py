"""Layers of experts where they train: losses, metrics, how the stack runs, and devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from mupax.train.config.run import Config, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program
from mupax.zoo.configs import (
    ComputeConfig,
    ConfigError,
    DecoderConfig,
    EncoderDecoderConfig,
    ModelConfig,
    ViTConfig,
)
from mupax.zoo.transformer import RoutingConfig
from tests.fixtures.commands import refusal
from tests.fixtures.tiny import (
    Training,
    batch_of,
    program_of,
    random_params,
    run_of,
    state_with,
    train,
)

# Fewer parameters compile in less time.
DENSE = DecoderConfig(
    width=8, depth=1, num_heads=2, vocab_size=11, seq_len=12, mlp_ratio=4, norm_gain=False
)
DROPLESS = dataclasses.replace(DENSE, experts=4, bias=False)
MODEL = dataclasses.replace(DROPLESS, depth=2, routing=RoutingConfig(capacity_factor=0.75))
RECOMPUTED = ComputeConfig(layers="scan", remat="block")
BATCH = 16


def config_of(model: ModelConfig, **changes: Any) -> Config:
    optimizer = OptimizerConfig(name="sgd", peak_lr=0.3, schedule="constant")
    return run_of(model, batch_size=BATCH, **{"optimizer": optimizer, "steps": 4, **changes})


def trained_from_random(program: Program, steps: int) -> Training:
    """Train from random parameters, for which no program is compiled."""
    return train(program, steps, state=state_with(program, random_params(program)))


@functools.cache
def trained(config: Config) -> Training:
    return trained_from_random(program_of(config), 2)


def assert_same(actual: Training, expected: Training) -> None:
    """Assert that the metrics of all steps and the last parameters agree to rounding."""
    pairs = [*zip(actual.rows, expected.rows, strict=True)]
    for got, want in [*pairs, (actual.last.params, expected.last.params)]:
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_metrics_tell_dropped_tokens_and_the_losses_of_routers() -> None:
    metrics = trained(config_of(MODEL)).rows[-1]
    # An expert takes 5 of its even share of 6 (12 tokens, 2 of 4 experts each): of 24 choices at
    # least 4 are dropped.
    assert 2 * BATCH * 4 <= metrics["dropped_tokens"] <= 2 * BATCH * 19
    assert 0.9 < metrics["balance_loss"] < 2
    assert metrics["z_loss"] > 0
    assert trained(config_of(DROPLESS)).rows[-1]["dropped_tokens"] == 0


def test_eight_devices_are_as_one_without_a_capacity() -> None:
    mesh = MeshConfig(data=1, fsdp=8)
    assert_same(trained(config_of(DROPLESS, mesh=mesh)), trained(config_of(DROPLESS)))


def test_microbatches_add_up_to_the_batch() -> None:
    expected = trained(config_of(MODEL)).rows[0]
    metrics = trained(config_of(MODEL, accumulation_steps=2)).rows[0]
    # Capacities are per example.
    assert metrics["dropped_tokens"] == expected["dropped_tokens"] > 0
    for name in ("loss", "accuracy", "weight"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6, err_msg=name)
    # Each microbatch is balanced by itself, weighed by its targets.
    assert 0 < abs(metrics["balance_loss"] - expected["balance_loss"]) < 0.1


def test_eight_devices_a_scan_and_recomputation_change_nothing() -> None:
    model = dataclasses.replace(MODEL, compute=RECOMPUTED)
    config = config_of(model, mesh=MeshConfig(data=4, tensor=2))
    assert_same(trained(config), trained(config_of(MODEL)))


def test_a_balance_bias_follows_loads_and_is_no_part_of_the_gradient() -> None:
    routing = RoutingConfig(balance="bias", z_weight=0.0)
    # Clipping leaves all other parameters where they are.
    optimizer = OptimizerConfig(name="sgd", peak_lr=0.1, clip_norm=1e-6)
    model = dataclasses.replace(MODEL, routing=routing, compute=RECOMPUTED)
    config = config_of(model, optimizer=optimizer)
    training = trained_from_random(program_of(config), 1)
    params = training.last.params
    balance = np.asarray(params["block.experts.balance"])
    assert balance.shape == (2, 4)
    assert np.abs(balance).max() > 1e-4
    np.testing.assert_allclose(balance.sum(1), 0, atol=1e-6)  # loads add up to a constant
    squares = 0.0
    for name, rate in training.program.step_inputs().factors.lr.items():
        if name != "block.experts.balance":
            moved = np.asarray(params[name]) - training.first[name]
            squares += np.sum(np.square(moved / float(np.max(rate))))
    assert np.sqrt(squares) < 2e-7
    assert training.rows[0]["dropped_tokens"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--model.experts 2 --model.active-experts 3",
            "active_experts 3 is more than the 2 experts there are; write",
        ),
        (
            "--model.experts 4 --model.routing.capacity-factor 0",
            "capacity_factor is 0.0, and no token would find room",
        ),
        (
            "--model.experts 4 --model.routing.capacity-factor 1 --mesh.sequence 2",
            "capacity_factor 1.0 gives room to an example's first tokens, which no device has in order under mesh.sequence 2",
        ),
        (
            "--model.experts 4 --preset.base embed=64,head_dim=16",
            "the model has experts; write embed=64,head_dim=16,active=2",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused_before_work(words: str, message: str) -> None:
    assert message in refusal("train lm-tiny --model.mlp-ratio 4 --dry-run", words)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"experts": 3, "active_experts": 3},
            "32 hidden units do not split over 3 active experts; write expert_dim 11",
        ),
        ({"expert_dim": 8}, "expert_dim is 8 and there are no experts; write model.experts too"),
    ],
)
def test_sizes_of_experts_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DENSE, **changes)


def test_an_encoder_decoder_has_no_experts() -> None:
    with pytest.raises(ConfigError, match=r"model\.experts is for ViTs and decoders"):
        EncoderDecoderConfig(width=8, depth=2, num_heads=2, vocab_size=11, seq_len=6, experts=4)


def at_base(model: DecoderConfig) -> Config:
    """Return a run at the preset's base, which clips, so that gradients count together."""
    base = ",".join(f"{axis}={size}" for axis, size in model.base_sizes().items())
    optimizer = OptimizerConfig(name="adam", peak_lr=0.01, clip_norm=0.01)
    return config_of(model, optimizer=optimizer, preset=PresetConfig(name="mup", base=base))


def one_expert(gate: Any, dense: Training) -> tuple[Program, Any]:
    """Return the program of a single expert and a state with the parameters of a dense model."""
    routing = RoutingConfig(gate=gate)
    model = dataclasses.replace(DENSE, experts=1, active_experts=1, routing=routing)
    program = program_of(at_base(model))
    params = random_params(program)
    for name, value in dense.first.items():
        if ".mlp." in name:
            params[name.replace(".mlp.", ".experts.")] = value[:, None]
        else:
            params[name] = value
    return program, state_with(program, params)


def test_one_expert_that_all_tokens_go_to_is_the_dense_model_bitwise() -> None:
    dense = trained(at_base(DENSE))
    program, state = one_expert("softmax", dense)
    training = train(program, 2, state=state)
    for name in ("loss", "grad_norm"):
        assert training.rows[-1][name] == dense.rows[-1][name]
    for name, value in dense.last.params.items():
        actual = training.last.params[name.replace(".mlp.", ".experts.")]
        np.testing.assert_array_equal(actual.reshape(value.shape), value, err_msg=name)


def test_control_a_sigmoid_of_a_score_is_no_constant() -> None:
    dense = trained(at_base(DENSE))
    program, state = one_expert("sigmoid", dense)
    sums = program.compile_eval()(state.params, program.step_inputs(), batch_of(DENSE, BATCH))
    assert abs(sums.loss / sums.weight - dense.rows[0]["loss"]) > 1e-4


def test_a_capacity_that_drops_nothing_is_dropless() -> None:
    roomy = dataclasses.replace(DROPLESS, routing=RoutingConfig(capacity_factor=2.0))
    assert_same(trained(config_of(roomy)), trained(config_of(DROPLESS)))


def test_a_vision_transformer_has_experts_and_its_evaluation_no_loss_of_routers() -> None:
    model = ViTConfig(
        width=8, depth=1, num_heads=2, image_size=4, patch_size=2, channels=1, num_classes=3,
        experts=4, bias=False,
    )  # fmt: skip
    program = program_of(config_of(model))
    batch = program.train_feed().shard_batch(batch_of(model, BATCH))
    training = trained_from_random(program, 1)
    evaluated = program.compile_eval()(training.first, program.step_inputs(), batch)
    metrics = training.rows[0]
    np.testing.assert_allclose(evaluated.loss / evaluated.weight, metrics["loss"], rtol=1e-6)
    assert metrics["balance_loss"] > 0.9
