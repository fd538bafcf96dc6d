"""A decoder that reads token by token with a cache computes the logits of one that reads the whole text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.train.core.factors import init_stds, resolve
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.layers import cache as caches

GPT2 = DecoderConfig(
    width=20, depth=2, num_heads=5, mlp_ratio=1.5, vocab_size=17, seq_len=11, tied=True
)
LLAMA = DecoderConfig(
    width=24, depth=2, num_heads=6, num_kv_heads=2, mlp_ratio=1.25, vocab_size=17, seq_len=11, positions="rotary",
    norm="rmsnorm", activation="swiglu", bias=False,
)  # fmt: skip
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qk-norm": dataclasses.replace(LLAMA, qk_norm=True, bias=True, head_dim=6, value_dim=4),
    "learned-gqa": dataclasses.replace(GPT2, width=24, num_heads=6, num_kv_heads=3, tied=False),
    "parallel": dataclasses.replace(
        GPT2, positions="rotary", rotary_fraction=0.5, parallel=True, tied=False
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
    "one-key-head": dataclasses.replace(LLAMA, num_kv_heads=1, tied=True),
}
BATCH, PROMPT = 3, 4
TOKENS = np.random.default_rng(0).integers(0, 17, (BATCH, 11), np.int32)
CLOSE = 2e-6
"""Of the largest logit. Products of other shapes round otherwise; a position or a mask off by one is 1e-2 and more."""


class Compiled:
    """One model's program, whole and by token, for any numbers: a preset's are data."""

    def __init__(self, model: DecoderConfig) -> None:
        self.model, self.definition, self.traces = model, definition(model), 0

        def net(numbers: Any) -> Any:
            return self.definition.model(*numbers)

        def fill(numbers: Any, tokens_BT: jax.Array, length: jax.Array) -> Any:
            h_BTD, cache = net(numbers).cached(tokens_BT, caches.empty(model, BATCH), fresh=True)
            return net(numbers).read(h_BTD), cache._replace(length=length)

        def step(numbers: Any, tokens_BT: jax.Array, cache: caches.Cache) -> Any:
            self.traces += 1
            h_BTD, cache = net(numbers).cached(tokens_BT, cache)
            return net(numbers).read(h_BTD), cache

        self.whole = jax.jit(lambda numbers, tokens_BT: net(numbers)(tokens_BT))
        self.fill, self.step, self.initialize = (
            jax.jit(fill),
            jax.jit(step),
            jax.jit(self.definition.initialize),
        )

    def step_inputs(self, preset: str = "sp") -> Any:
        """Parameters under a preset with all of them spread out, gains and biases too, and its factors."""
        theory, noise = presets.get(preset), np.random.default_rng(1)
        factors = resolve(theory, self.definition, theory.optimizers[0])
        params = self.initialize(np.uint32(0), init_stds(theory, self.definition))
        params = {
            n: np.asarray(w + 0.1 * noise.standard_normal(w.shape), w.dtype)
            for n, w in jax.device_get(params).items()
        }
        return params, factors.multiplier, factors.forward

    def by_token(self, numbers: Any, tokens: np.ndarray, padded: int) -> np.ndarray:
        """Logits where a padded prompt is read whole and the rest one by one."""
        context = np.full((BATCH, padded), 16, np.int32)
        context[:, :PROMPT] = tokens[:, :PROMPT]
        first, cache = self.fill(numbers, context, jnp.int32(PROMPT))
        parts = [np.asarray(first[:, :PROMPT])]
        for t in range(PROMPT, tokens.shape[1]):
            logits, cache = self.step(numbers, tokens[:, t : t + 1], cache)
            parts.append(np.asarray(logits))
        assert int(cache.length) == tokens.shape[1]
        return np.concatenate(parts, axis=1)

    def difference(self, numbers: Any, padded: int = 8) -> float:
        """Largest difference of logits, over the largest logit."""
        whole = np.asarray(self.whole(numbers, TOKENS))
        return float(
            np.abs(self.by_token(numbers, TOKENS, padded) - whole).max() / np.abs(whole).max()
        )


@functools.cache
def compiled(name: str, **compute: Any) -> Compiled:
    return Compiled(dataclasses.replace(MODELS[name], compute=ComputeConfig(**compute)))


@pytest.mark.core
@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_are_the_uncached_ones(name: str) -> None:
    decoder = compiled(name)
    assert decoder.difference(decoder.step_inputs()) < CLOSE
    assert decoder.traces == 1


@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_a_scan_over_layers_has_the_same_cache(name: str) -> None:
    decoder = compiled(name, layers="scan", projections="fused")
    assert decoder.difference(decoder.step_inputs()) < CLOSE


def test_every_presets_factors_reach_the_cached_model() -> None:
    decoder = compiled("learned-gqa")
    for preset in presets.PRESETS:
        assert decoder.difference(decoder.step_inputs(preset)) < CLOSE, preset


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_control_a_position_off_by_one_is_seen(name: str) -> None:
    decoder = compiled(name)
    numbers = decoder.step_inputs()
    whole, shifted = (
        np.asarray(decoder.whole(numbers, tokens))
        for tokens in (TOKENS, np.roll(TOKENS, 1, axis=1))
    )
    assert np.abs(whole[:, 5] - shifted[:, 6]).max() > 1e-2 * np.abs(whole).max()


def test_several_tokens_may_be_added_at_once() -> None:
    decoder = compiled.__wrapped__("llama")  # traced for each number of tokens
    numbers, cache, parts = decoder.step_inputs(), caches.empty(LLAMA, BATCH), []
    for start, stop in ((0, 2), (2, 7), (7, 11)):
        logits, cache = decoder.step(numbers, TOKENS[:, start:stop], cache)
        parts.append(np.asarray(logits))
    whole = np.asarray(decoder.whole(numbers, TOKENS))
    np.testing.assert_allclose(
        np.concatenate(parts, axis=1), whole, atol=CLOSE * np.abs(whole).max(), rtol=0
    )


def test_bfloat16_keeps_keys_in_bfloat16_and_agrees_to_its_rounding() -> None:
    decoder = compiled("llama", dtype="bfloat16")
    assert caches.empty(decoder.model, 1).keys.dtype == jnp.bfloat16
    assert decoder.difference(decoder.step_inputs()) < 2e-2
