"""Decoders that read token by token with a cache have the logits of a complete text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.train.core.factors import resolve
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.layers import cache as caches
from tests.fixtures.tiny import assert_close, relative_errors
from tests.zoo.models import numbers as random_numbers

GPT2 = DecoderConfig(
    width=24, depth=2, num_heads=6, num_kv_heads=3, mlp_ratio=1.5, vocab_size=17, seq_len=11
)
LLAMA = DecoderConfig(
    width=24, depth=2, num_heads=6, num_kv_heads=2, mlp_ratio=1.25, vocab_size=17, seq_len=11,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False,
)  # fmt: skip
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "one-key-head": dataclasses.replace(
        LLAMA, num_kv_heads=1, qk_norm=True, bias=True, head_dim=6, value_dim=4, tied=True
    ),
    "parallel": dataclasses.replace(
        GPT2, num_kv_heads=6, positions="rotary", rotary_fraction=0.5, parallel=True
    ),
    "window": dataclasses.replace(
        LLAMA, window=3, rope_scaling="llama3", rope_original_len=6, rope_theta=20.0
    ),
    "gemma": dataclasses.replace(
        LLAMA,
        depth=3,
        window=3,
        full_every=2,
        window_theta=9.0,
        post_norm=True,
        attention_softcap=0.5,
        logit_softcap=2.0,
        activation="geglu",
        tied=True,
    ),
}
BATCH, PROMPT = 3, 4
TOKENS = np.random.default_rng(0).integers(0, 17, (BATCH, 11), np.int32)
CLOSE = 2e-6
"""Tolerance, over the largest logit.

Products of other shapes round otherwise; a position or a mask off by one is 1e-2 and more.
"""


class Compiled:
    """Programs of one model, for a complete text and by token. Parameters and factors are data."""

    def __init__(self, model: DecoderConfig) -> None:
        self.model = model
        self.definition = definition(model)
        self.traces = 0

        def network(numbers: Any) -> Any:
            return self.definition.model(*numbers)

        def whole(numbers: Any, tokens_BT: jax.Array) -> jax.Array:
            return network(numbers)(tokens_BT)

        def fill(numbers: Any, tokens_BT: jax.Array, length: jax.Array) -> Any:
            empty = caches.empty(model, BATCH)
            h_BTD, cache = network(numbers).cached(tokens_BT, empty, fresh=True)
            return network(numbers).read(h_BTD), cache._replace(length=length)

        def step(numbers: Any, tokens_BT: jax.Array, cache: caches.Cache) -> Any:
            self.traces += 1
            h_BTD, cache = network(numbers).cached(tokens_BT, cache)
            return network(numbers).read(h_BTD), cache

        self.whole = jax.jit(whole)
        self.fill = jax.jit(fill)
        self.step = jax.jit(step)

    def step_inputs(self, preset: str = "sp") -> Any:
        """Return random parameters, gains and biases too, and the factors of a preset."""
        theory = presets.get(preset)
        factors = resolve(theory, self.definition, theory.optimizers[0])
        params, _ = random_numbers(self.definition, seed=1)
        return params, factors.multiplier, factors.forward

    def by_token(self, numbers: Any, padded: int) -> np.ndarray:
        """Return logits if a padded prompt is read at once and the rest token by token."""
        context = np.full((BATCH, padded), 16, np.int32)
        context[:, :PROMPT] = TOKENS[:, :PROMPT]
        first, cache = self.fill(numbers, context, jnp.int32(PROMPT))
        parts = [np.asarray(first[:, :PROMPT])]
        for t in range(PROMPT, TOKENS.shape[1]):
            logits, cache = self.step(numbers, TOKENS[:, t : t + 1], cache)
            parts.append(np.asarray(logits))
        assert int(cache.length) == TOKENS.shape[1]
        return np.concatenate(parts, axis=1)

    def error(self, preset: str = "sp") -> float:
        """Return the largest difference of logits by token, over the largest logit."""
        numbers = self.step_inputs(preset)
        expected = np.asarray(self.whole(numbers, TOKENS))
        return relative_errors(self.by_token(numbers, padded=8), expected)[0]


@functools.cache
def compiled(name: str, **compute: Any) -> Compiled:
    return Compiled(dataclasses.replace(MODELS[name], compute=ComputeConfig(**compute)))


@pytest.mark.core
@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_are_the_uncached_ones(name: str) -> None:
    decoder = compiled(name)
    assert decoder.error() < CLOSE
    assert decoder.traces == 1


@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_a_scan_over_layers_has_the_same_cache(name: str) -> None:
    decoder = compiled(name, layers="scan", projections="fused")
    assert decoder.error() < CLOSE


def test_every_presets_factors_reach_the_cached_model() -> None:
    decoder = compiled("gpt2")
    for preset in presets.PRESETS:
        assert decoder.error(preset) < CLOSE, preset


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_control_a_position_off_by_one_is_seen(name: str) -> None:
    decoder = compiled(name)
    numbers = decoder.step_inputs()
    whole = np.asarray(decoder.whole(numbers, TOKENS))
    shifted = np.asarray(decoder.whole(numbers, np.roll(TOKENS, 1, axis=1)))
    assert np.abs(whole[:, 5] - shifted[:, 6]).max() > 1e-2 * np.abs(whole).max()


def test_several_tokens_may_be_added_at_once() -> None:
    decoder = compiled.__wrapped__("llama")  # traced for each number of tokens
    numbers = decoder.step_inputs()
    cache = caches.empty(LLAMA, BATCH)
    parts = []
    for start, stop in ((0, 2), (2, 7), (7, 11)):
        logits, cache = decoder.step(numbers, TOKENS[:, start:stop], cache)
        parts.append(np.asarray(logits))
    expected = np.asarray(decoder.whole(numbers, TOKENS))
    assert_close(np.concatenate(parts, axis=1), expected, CLOSE)


def test_bfloat16_keeps_keys_in_bfloat16_and_agrees_to_its_rounding() -> None:
    decoder = compiled("llama", dtype="bfloat16")
    assert caches.empty(decoder.model, 1).keys.dtype == jnp.bfloat16
    assert decoder.error() < 2e-2
