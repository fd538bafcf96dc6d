"""Layers of experts where they train: losses, metrics, how the stack runs, and devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import Batch
from mupax.zoo.configs import (
    ComputeConfig,
    ConfigError,
    DecoderConfig,
    EncoderDecoderConfig,
    ModelConfig,
    ViTConfig,
)
from mupax.zoo.transformer import RoutingConfig

DENSE = DecoderConfig(width=8, depth=2, num_heads=2, vocab_size=11, seq_len=12, mlp_ratio=4)
MODEL = dataclasses.replace(DENSE, experts=4, routing=RoutingConfig(capacity_factor=0.75))
DROPLESS = dataclasses.replace(MODEL, routing=RoutingConfig())
SHALLOW = dataclasses.replace(DENSE, depth=1)
BATCH = 16


def _config(model: ModelConfig, **changes: Any) -> Config:
    fields: dict[str, Any] = {
        "mesh": MeshConfig(data=1),
        "optimizer": OptimizerConfig(name="adam", peak_lr=0.01),
        "preset": PresetConfig(name="mup"),
    }
    return Config(
        recipe="test",
        model=model,
        data=DataConfig(name="random", batch_size=BATCH),
        steps=4,
        **{**fields, **changes},
    )


@functools.cache
def _batch() -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 11, (BATCH, 12)).astype(np.int32)
    weights = rng.integers(0, 2, (BATCH, 12)).astype(
        np.float32
    )  # that devices have different numbers of
    return {"inputs": tokens, "targets": np.roll(tokens, -1, 1), "weights": weights}  # pyright: ignore


def _steps(
    program: Program, state: Any, steps: int = 2
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of the last step, and of the first one as "first NAME"; and parameters after the last."""
    step, inputs, numbers = program.compile_train(), program.step_inputs(), {}
    for i in range(steps):
        state, metrics = step(state, inputs, program.train_feed().shard_batch(_batch()))  # pyright: ignore
        for name, x in metrics.items():
            numbers |= {name: float(x)} if x.ndim == 0 else {}
            numbers |= {f"first {name}": float(x)} if x.ndim == i == 0 else {}
    return numbers, {name: np.asarray(w) for name, w in state.params.items()}


@functools.cache
def _trained(
    config: Config, devices: int = 1, steps: int = 2
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    program = assemble(config, jax.devices()[:devices])
    return _steps(program, program.initial_state(), steps)


def _same(one: tuple[Any, Any], other: tuple[Any, Any], rtol: float = 2e-5) -> None:
    for before, after in zip(one, other, strict=True):
        for name, value in before.items():
            np.testing.assert_allclose(after[name], value, rtol=rtol, atol=2e-6, err_msg=name)


def test_what_routers_do_is_in_the_metrics() -> None:
    metrics, _ = _trained(_config(MODEL))
    # Of 12 tokens, 2 of 4 experts each, an expert takes 5 of its even share of 6: at least 4 of 24 are dropped.
    assert 2 * BATCH * 4 <= metrics["dropped_tokens"] <= 2 * BATCH * 19
    assert 0.9 < metrics["balance_loss"] < 2
    assert metrics["z_loss"] > 0
    assert _trained(_config(DROPLESS))[0]["dropped_tokens"] == 0


@pytest.mark.parametrize(
    ("model", "sizes"),
    [(MODEL, {"data": 4, "tensor": 2}), (DROPLESS, {"data": 1, "fsdp": 8})],
    ids=["tensor", "dropless-fsdp"],
)
def test_eight_devices_are_as_one(model: DecoderConfig, sizes: dict[str, Any]) -> None:
    _same(_trained(_config(model)), _trained(_config(model, mesh=MeshConfig(**sizes)), devices=8))


def test_microbatches_add_up_to_the_batch() -> None:
    whole, parts = (_trained(_config(MODEL, accumulation_steps=number))[0] for number in (1, 2))
    assert (
        parts["first dropped_tokens"] == whole["first dropped_tokens"] > 0
    )  # capacities are of examples
    for name in ("first loss", "first accuracy", "first weight"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-6, err_msg=name)
    # Balance is asked for in each of them: of half the tokens, weighed by their targets.
    assert 0 < abs(parts["first balance_loss"] - whole["first balance_loss"]) < 0.1


def test_a_scan_and_what_is_recomputed_change_nothing() -> None:
    compute = ComputeConfig(layers="scan", remat="block")
    _same(_trained(_config(MODEL)), _trained(_config(dataclasses.replace(MODEL, compute=compute))))


def test_a_balance_bias_falls_where_an_expert_has_more_than_its_share_and_is_no_part_of_the_gradient() -> (
    None
):
    routing = RoutingConfig(balance="bias", z_weight=0.0)
    optimizer = OptimizerConfig(name="sgd", peak_lr=0.1, clip_norm=1e-6)
    program = assemble(
        _config(dataclasses.replace(MODEL, routing=routing), optimizer=optimizer), jax.devices()[:1]
    )
    start = program.initial_state()
    before = {name: np.asarray(w) for name, w in start.params.items()}
    metrics, params = _steps(program, start, 1)
    moved = params["block.experts.balance"]
    assert moved.shape == (2, 4)
    assert np.abs(moved).max() > 1e-4  # clipping leaves the others where they are
    np.testing.assert_allclose(moved.sum(1), 0, atol=1e-6)  # loads add up to what there is
    lr = program.step_inputs().factors.lr
    steps = [
        (w - before[name]) / float(np.max(lr[name]))
        for name, w in params.items()
        if name in lr and w is not moved
    ]
    assert np.sqrt(sum(np.sum(np.square(x)) for x in steps)) < 2e-7
    assert metrics["dropped_tokens"] == 0


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
def test_experts_that_do_not_fit_are_refused_before_work(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mupax.train.__main__ import main

    try:
        code = main(["lm-tiny", "--model.mlp-ratio", "4", *words.split(), "--dry-run"])
    except SystemExit as stop:
        code = stop.code
    stderr = " ".join(capsys.readouterr().err.split())
    assert code == 2
    assert message in stderr.replace(" │ │ ", " ")


def test_an_encoder_decoder_has_no_experts_and_an_mlp_that_does_not_split_none() -> None:
    with pytest.raises(
        ConfigError,
        match=r"32 hidden units do not split over 3 active experts; write expert_dim 11",
    ):
        dataclasses.replace(DENSE, experts=3, active_experts=3)
    with pytest.raises(
        ConfigError, match=r"expert_dim is 8 and there are no experts; write model\.experts too"
    ):
        dataclasses.replace(DENSE, expert_dim=8)
    with pytest.raises(ConfigError, match=r"model\.experts is of ViTs and decoders"):
        EncoderDecoderConfig(width=8, depth=2, num_heads=2, vocab_size=11, seq_len=6, experts=4)


@functools.cache
def _dense() -> tuple[dict[str, np.ndarray], tuple[dict[str, float], dict[str, np.ndarray]]]:
    """A dense model's parameters at the start, and what two steps of a clipped Adam make of it."""
    program = assemble(_one(SHALLOW), jax.devices()[:1])
    state = program.initial_state()
    start = {name: np.asarray(w) for name, w in state.params.items()}
    return start, _steps(program, state)


def _one(model: DecoderConfig) -> Config:
    base = ",".join(f"{axis}={size}" for axis, size in model.base_sizes().items())
    optimizer = OptimizerConfig(name="adam", peak_lr=0.01, clip_norm=0.01)
    return _config(model, optimizer=optimizer, preset=PresetConfig(name="mup", base=base))


def _as_expert(name: str) -> str:
    return name.replace(".mlp.", ".experts.")


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_one_expert_that_all_tokens_go_to_is_the_dense_model_bitwise(gate: Any) -> None:
    start, (metrics, params) = _dense()
    model = dataclasses.replace(
        SHALLOW, experts=1, active_experts=1, routing=RoutingConfig(gate=gate)
    )
    program = assemble(_one(model), jax.devices()[:1])
    state = program.initial_state()
    same = {_as_expert(name): w[:, None] if ".mlp." in name else w for name, w in start.items()}
    names = state.params.keys()
    state = state._replace(
        params={name: jax.numpy.asarray(same.get(name, state.params[name])) for name in names}
    )
    with_experts = _steps(program, state)
    equal = [with_experts[0][name] == metrics[name] for name in ("loss", "grad_norm")]
    equal += [
        np.array_equal(with_experts[1][_as_expert(name)].reshape(w.shape), w)
        for name, w in params.items()
    ]
    # The control: a sigmoid of a score is no constant, and nothing is as it was.
    assert all(equal) if gate == "softmax" else not any(equal)


def test_a_capacity_that_drops_nothing_is_dropless() -> None:
    roomy = dataclasses.replace(MODEL, routing=RoutingConfig(capacity_factor=2.0))
    _same(_trained(_config(DROPLESS)), _trained(_config(roomy)))


def test_a_vision_transformer_has_experts_and_its_evaluation_no_loss_of_routers() -> None:
    model = ViTConfig(
        width=8,
        depth=1,
        num_heads=2,
        image_size=4,
        patch_size=2,
        channels=1,
        num_classes=3,
        experts=4,
    )
    program = assemble(_config(model), jax.devices()[:1])
    images = {"inputs": np.ones((BATCH, 4, 4, 1), np.float32), "targets": np.zeros(BATCH, np.int32)}
    batch = program.train_feed().shard_batch({**images, "weights": np.ones(BATCH, np.float32)})  # pyright: ignore
    state, inputs = program.initial_state(), program.step_inputs()
    evaluated = program.compile_eval()(state.params, inputs, batch)
    _, metrics = program.compile_train()(state, inputs, batch)
    np.testing.assert_allclose(evaluated.loss / evaluated.weight, metrics["loss"], rtol=1e-6)
    assert metrics["balance_loss"] > 0.9
