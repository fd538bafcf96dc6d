"""`sp`, and with it every preset at its base, is no preset at all: the same bits as the bare model under bare optax."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import presets
from mupax.presets import VECTORS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.factors import hyperparams, init_stds, resolve
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs, make_train_step
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ViTConfig
from mupax.zoo.definition import Factor, definition, normals
from tests.fixtures.tiny import assert_same_bits, batch_of
from tests.fixtures.xla import FUSIONS_OF_USERS

STEPS = 10
PLAINLY: Any = {"xla_backend_optimization_level": 0, **FUSIONS_OF_USERS}
"""Compiler options without which LLVM joins multiplications and additions as the fusions of each program happen to fall."""

# One has gains and the other biases: fewer parameters compile in less time.
LM = DecoderConfig(
    width=12, num_heads=3, depth=2, vocab_size=11, seq_len=5, bias=False, activation="relu",
    compute=ComputeConfig(layers="scan"),
)  # fmt: skip
VIT = ViTConfig(
    width=12, num_heads=3, depth=1, image_size=6, patch_size=3, channels=1, num_classes=7,
    norm_gain=False,
)  # fmt: skip
CHAINS = {
    "adamw": OptimizerConfig(
        name="adamw", peak_lr=0.01, weight_decay=0.1, b2=0.95, schedule="constant"
    ),
    "sgd": OptimizerConfig(name="sgd", peak_lr=0.1, schedule="constant"),
}


def bare_optax(name: str, decays: Any) -> optax.GradientTransformation:
    if name == "sgd":
        return optax.sgd(0.1, momentum=0.9)
    return optax.adamw(0.01, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decays)


def bare(
    config: DecoderConfig | ViTConfig,
    name: str,
    params: dict[str, np.ndarray],
    batch: dict[str, np.ndarray],
) -> Any:
    """Train the NNX model as a stranger would: no specs, factors or presets, but the patch embedding's fixed D_in^-1/2."""
    graph, state, factors = nnx.split(config.module(nnx.Rngs(0)), nnx.Param, Factor)
    paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
    decays = {key: definition(config).specs[key].role not in VECTORS for key in params}
    tx = bare_optax(name, decays)

    def loss(params, factors, batch):
        if "patch" in params:
            params = {**params, "patch": params["patch"] * np.float32(9**-0.5)}
        variables = nnx.from_flat_state({paths[key]: nnx.Param(w) for key, w in params.items()})
        logits = nnx.merge(graph, variables, factors)(batch["inputs"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nll * batch["weights"]), jnp.sum(batch["weights"])

    def train(
        params, factors, batch
    ):  # all of them data: XLA would rewrite a division by a constant
        def step(carry, _):
            params, opt_state = carry
            (total, weight), grads = jax.value_and_grad(loss, has_aux=True)(params, factors, batch)
            updates, opt_state = tx.update(
                jax.tree.map(lambda g: g / weight, grads), opt_state, params
            )
            return (optax.apply_updates(params, updates), opt_state), total / weight

        return jax.lax.scan(step, (params, tx.init(params)), None, STEPS)

    (params, _), losses = jax.jit(train, compiler_options=PLAINLY)(params, factors, batch)
    return params, losses


@functools.cache
def initial(config: DecoderConfig | ViTConfig) -> Any:
    model = definition(config)
    return jax.jit(functools.partial(model.initialize, draw=normals))(
        0, init_stds(presets.get("sp"), model)
    )


@functools.cache
def trainer(config: DecoderConfig | ViTConfig, name: str) -> Any:
    """One program for every preset: what a preset says is data."""
    model = definition(config)
    tx = optimizer.build(CHAINS[name], model.specs)
    step = make_train_step(model, tx)

    def train(params, run, batch):
        state = TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))
        return jax.lax.scan(lambda state, _: step(state, run, batch), state, None, STEPS)

    return jax.jit(train, compiler_options=PLAINLY)


@functools.cache
def trained(config: DecoderConfig | ViTConfig, name: str, preset_name: str, based: bool) -> Any:
    preset = presets.get(preset_name, base=config.base_sizes() if based else None)
    run = StepInputs(resolve(preset, definition(config), name), hyperparams(CHAINS[name], STEPS))
    state, metrics = trainer(config, name)(initial(config), run, batch_of(config))
    return initial(config), state.params, metrics["loss"]


@pytest.mark.parametrize(
    ("config", "name"),
    [(LM, "adamw"), (VIT, "adamw"), (LM, "sgd")],
    ids=["decoder-adamw", "vit-adamw", "decoder-sgd"],
)
def test_sp_trains_to_the_bits_of_bare_optax(config: DecoderConfig | ViTConfig, name: str):
    """Which parameters decay is of each model; SGD's chain reads nothing of a model but the numbers of the next test."""
    start, params, losses = trained(config, name, "sp", based=True)
    expected, expected_losses = bare(config, name, start, batch_of(config))
    assert losses[0] != losses[-1]
    np.testing.assert_array_equal(losses, expected_losses)
    assert_same_bits(params, expected)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion"])
def test_sp_has_the_same_numbers_whatever_its_base(name: str):
    """So that the equality above holds at any size: sp's rates, eps and decay are exactly 1 everywhere."""
    for config in (LM, dataclasses.replace(LM, width=30, depth=5), VIT):
        expected = resolve(presets.get("sp", base=config.base_sizes()), definition(config), name)
        assert all((x == 1).all() for x in jax.tree.leaves((expected.lr, expected.eps)))
        small = {"embed": 5, "heads": 1, "kv_heads": 1, "head_dim": 5, "mlp": 7, "layers": 1}
        for base in (None, small):
            factors = resolve(presets.get("sp", base=base), definition(config), name)
            chex.assert_trees_all_close(factors, expected, rtol=1e-6)
            chex.assert_trees_all_equal(factors.lr, expected.lr)


def test_presets_at_their_base_train_to_the_bits_of_sp():
    _, expected, _ = trained(LM, "adamw", "sp", based=True)
    for name in ("depth-mup", "completep", "hybrid"):
        _, params, _ = trained(LM, "adamw", name, based=True)
        assert_same_bits(params, expected)


def test_control_away_from_its_base_a_preset_is_not_sp():
    _, sp_params, _ = trained(LM, "adamw", "sp", based=True)
    _, params, _ = trained(LM, "adamw", "mup", based=False)
    assert any((np.asarray(params[key]) != np.asarray(sp_params[key])).any() for key in params)
