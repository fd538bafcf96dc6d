"""The runs of Bordelon et al. 2024 against their authors' code, written again from its formulas in their own parametrization.

https://github.com/Pehlevan-Group/inf_transformer_limits, `train_C4.py` and `train_vit_cifar.py`: one global rate, and what it is
multiplied by in the forward pass. Nothing of the zoo, the presets or the optimizers is used in here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.core.program import Program, assemble
from mupax.zoo.families import ArraySpec

HEADS, SIZE, DEPTH, STEPS, WARMUP, EXAMPLES = 2, 4, 2, 20, 5, 32
WIDTH, BETA = HEADS * SIZE, 4.0
TINY: dict[str, dict[str, Any]] = {
    "bordelon-lm": {"vocab_size": 11, "seq_len": 5},
    "bordelon-vit": {"image_size": 6, "patch_size": 3, "channels": 1, "num_classes": 5},
}


def normalized(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


def attention(p, x, *, text: bool):
    """`Causal_Attention` with alpha_a = 1, and `Attention`, whose queries and keys have the further root of two."""
    split = [*x.shape[:-1], HEADS, SIZE]
    over = 1.0 if text else math.sqrt(2.0)
    q, k = (
        (x @ p[name]).reshape(split) / HEADS**0.5 / SIZE**0.5 / over for name in ("query", "key")
    )
    if text:
        q, k = normalized(q), normalized(k)
    logits = jnp.einsum("bthn,bshn->bhts", q, k) / SIZE
    if text:
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:])) > 0, logits, -jnp.inf)
    v = ((x @ p["value"]) / WIDTH**0.5).reshape(split)
    y = jnp.einsum("bhts,bshn->bthn", jax.nn.softmax(logits), v)
    return y.reshape(x.shape) @ p["out"] / WIDTH**0.5


def mlp(p, x):
    return jax.nn.gelu(x @ p["up"] / WIDTH**0.5) @ p["down"] / WIDTH**0.5


def stack(p, x, *, text: bool):
    before = jax.nn.gelu if text else lambda h: h
    for layer in range(DEPTH):
        own = {name: p[name][layer] for name in ("query", "key", "value", "out", "up", "down")}
        x = x + BETA / DEPTH * attention(own, before(normalized(x)), text=text)
        x = x + BETA / DEPTH * mlp(own, before(normalized(x)))
    return normalized(x)


def language(p, tokens):
    x = WIDTH**0.5 * p["token"][tokens] + WIDTH**0.5 * p["position"]
    return (stack(p, x, text=True) @ p["readout"] + p["readout_bias"]) / WIDTH**0.5


def vision(p, images):
    x = images.reshape(-1, 2, 3, 2, 3).transpose(0, 1, 3, 2, 4).reshape(-1, 4, 9)
    ends = (DEPTH / BETA) ** -0.5
    x = ends * (x @ p["patch"]) / 9**0.5 + ends * p["position"]
    return ends * stack(p, x, text=False).mean(1) @ p["readout"] / WIDTH


def theirs(config: Config, ours: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our initial weights, as the network sees them, over what their code multiplies its own with."""
    text, gamma = config.recipe == "bordelon-lm", config.preset.gamma0
    assert gamma is not None
    ends = 1.0 if text else (DEPTH / BETA) ** -0.5
    pair = 1 / WIDTH**0.5 / (1.0 if text else 2**0.5)
    multiplier = {"patch": ends / 3, "token": WIDTH**0.5, "position": WIDTH**0.5 if text else ends,
                  "readout": (WIDTH**-0.5 if text else ends / WIDTH) / gamma,
                  "readout_bias": WIDTH**-0.5 / gamma, "query": pair, "key": pair}  # fmt: skip
    params = {}
    for name, weight in ours.items():
        last = name.rpartition(".")[2]
        rows = {"query": WIDTH, "key": WIDTH, "value": WIDTH, "out": WIDTH}.get(last)
        weight = weight.reshape(DEPTH, rows, -1) if rows else weight
        params[last] = jnp.asarray(weight / multiplier.get(last, WIDTH**-0.5))
    return params


def trained(config: Config, params: dict, batches: list) -> list[float]:
    """Losses of their loop: Adam with eps 1e-20 and warm-up and cosine, or heavy-ball SGD."""
    text, gamma, peak = (
        config.recipe == "bordelon-lm",
        config.preset.gamma0,
        config.optimizer.peak_lr,
    )
    assert gamma is not None
    function, start = language if text else vision, params
    rate = peak / WIDTH**0.5 if text else WIDTH * gamma**2 * DEPTH * peak

    def shifted(p, x):
        return (function(p, x) - function(start, x)) / gamma

    def loss(p, batch):
        logs = jax.nn.log_softmax(shifted(p, batch["inputs"]))
        return -jnp.take_along_axis(logs, batch["targets"][..., None], -1).mean()

    @jax.jit
    def step(p, m, v, batch, rate, t):
        value, g = jax.value_and_grad(loss)(p, batch)
        if not text:
            m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
            return value, jax.tree.map(lambda p, m: p - rate * m, p, m), m, v
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
        one, two = 1 - 0.9**t, 1 - 0.999**t
        return (
            value,
            jax.tree.map(
                lambda p, m, v: p - rate * (m / one) / (jnp.sqrt(v / two) + 1e-20), p, m, v
            ),
            m,
            v,
        )

    m = v = jax.tree.map(jnp.zeros_like, params)
    losses = []
    for t, batch in enumerate(batches):
        cosine = 0.5 * (1 + math.cos(math.pi * (t - WARMUP) / (STEPS - WARMUP)))
        schedule = min((t + 1) / WARMUP, cosine if t >= WARMUP else 1.0) if text else 1.0
        value, params, m, v = step(params, m, v, batch, rate * schedule, t + 1.0)
        losses.append(float(value))
    return losses


def drawn(example: dict[str, ArraySpec]) -> Iterator[dict[str, np.ndarray]]:
    rng, (shape, dtype) = np.random.default_rng(0), example["inputs"]
    for _ in range(STEPS):
        inputs = (
            rng.normal(size=(EXAMPLES, *shape))
            if dtype == "float32"
            else rng.integers(0, 11, (EXAMPLES, *shape))
        )
        targets = rng.integers(0, 5, (EXAMPLES, *example["targets"].shape), np.int32)
        yield {
            "inputs": inputs.astype(dtype),
            "targets": targets,
            "weights": np.ones(targets.shape, np.float32),
        }


@pytest.mark.parametrize("recipe", TINY)
def test_the_authors_code_trains_the_same(recipe: str) -> None:
    config, text = RECIPES[recipe](), recipe == "bordelon-lm"
    model = dataclasses.replace(
        config.model, width=WIDTH, num_heads=HEADS, depth=DEPTH, **TINY[recipe]
    )  # pyright: ignore
    optimizer = dataclasses.replace(
        config.optimizer, peak_lr=0.01 if text else 0.02, warmup_steps=WARMUP if text else 0
    )
    data = dataclasses.replace(config.data, batch_size=EXAMPLES)
    config = dataclasses.replace(config, model=model, optimizer=optimizer, data=data, steps=STEPS)
    batches = list(drawn(model.example()))
    program = assemble(config, jax.devices()[:1])
    plain = assemble(
        dataclasses.replace(config, preset=dataclasses.replace(config.preset, constants=())),
        jax.devices()[:1],
    )
    step = program.compile_train()

    def losses(numbers: Program) -> list[float]:
        state, curve = program.placed(program.initial_state(), step), []
        for batch in batches:
            state, metrics = step(state, numbers.step_inputs(), batch)
            curve.append(float(metrics["loss"]))
        return curve

    start = jax.device_get(program.initializer.params(config.seed, program.stds))
    multipliers = program.inputs.factors.multiplier
    weights = {n: w * multipliers[n].reshape(-1, *[1] * (w.ndim - 1)) for n, w in start.items()}
    expected = trained(
        config, theirs(config, {n: w.reshape(start[n].shape) for n, w in weights.items()}), batches
    )
    assert np.ptp(expected) > 0.02
    # The ViT's output is over gamma0 = 0.1, and so is its rounding.
    np.testing.assert_allclose(losses(program), expected, rtol=5e-7 if text else 1e-6, atol=0)
    # Control: the rule without the constants of their code.
    assert np.abs(np.subtract(losses(plain), expected)).max() > 1e-4
