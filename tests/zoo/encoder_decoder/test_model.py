"""Encoder-decoders against their equations written out in numpy, and what padding, masks and ways to run must not change."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.presets.roles import Role
from mupax.zoo.configs import ComputeConfig, ConfigError
from mupax.zoo.definition import definition
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.encoder_decoder.model import buckets

B, S, T, V = 3, 9, 7, 23
BART = EncoderDecoderConfig(
    width=12,
    depth=3,
    encoder_depth=2,
    num_heads=3,
    vocab_size=V,
    seq_len=S,
    target_len=T,
    mlp_ratio=2,
    activation="relu",
)
T5 = dataclasses.replace(
    BART, head_dim=5, value_dim=3, positions="relative", distance_buckets=8, longest_distance=6, norm="rmsnorm", bias=False,
    embedding_norm=False, activation="geglu", tied=False, shared=False, num_kv_heads=1, qk_norm=True,
)  # fmt: skip
MODELS = {"bart": BART, "t5": T5}


def numbers(
    config: EncoderDecoderConfig,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Random parameters, factors and inputs; the last example is padding but for its first input."""
    random, model = np.random.default_rng(0), definition(config)
    params = {
        name: (
            random.normal(size=leaf.shape) * 0.5 + (model.specs[name].role is Role.NORM_GAIN)
        ).astype(np.float32)
        for name, leaf in model.abstract.items()
    }
    factors = {
        name: random.uniform(0.3, 1.2, of["shape"]).astype(np.float32)
        for name, of in model.factors.items()
    }
    counts = np.array([S, 5, 1])
    batch = {
        "inputs": random.integers(V, size=(B, S)),
        "input_mask": np.arange(S) < counts[:, None],
    }
    batch |= {"decoder_inputs": random.integers(V, size=(B, T))}
    return params, factors, {name: array.astype(np.int32) for name, array in batch.items()}


def in_numpy(
    config: EncoderDecoderConfig, p: dict[str, Any], f: dict[str, Any], batch: dict[str, np.ndarray]
) -> np.ndarray:
    """The logits by the equations of 2304.02034, section II.2, and of T5, without a line of the model's."""

    def norm(x: np.ndarray, name: str, kind: str = config.norm) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True) * (kind == "layernorm")
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
        return x * p.get(f"{name}.gain", 1.0) + p.get(f"{name}.bias", 0.0)

    def attend(
        x: np.ndarray, y: np.ndarray, name: str, i: int, mask: np.ndarray, bias: Any
    ) -> np.ndarray:
        def part(of: np.ndarray, what: str) -> np.ndarray:
            z = np.einsum("btd,dhn->bhtn", of, p[f"{name}.{what}"][i])
            z = z + (p[f"{name}.{what}_bias"][i][:, None] if f"{name}.{what}_bias" in p else 0)
            if config.qk_norm and what != "value":
                z = (
                    z
                    / np.sqrt((z * z).mean(-1, keepdims=True) + config.norm_eps)
                    * p[f"{name}.{what}_norm.gain"][i]
                )
            return np.repeat(z, config.num_heads // z.shape[1], axis=1)

        logits = (
            f[f"{name}.logit_scale"][i]
            * np.einsum("bhtn,bhsn->bhts", part(x, "query"), part(y, "key"))
            + bias
        )
        weights = np.exp(logits - logits.max(-1, keepdims=True)) * mask
        values = np.einsum(
            "bhts,bhsn->bhtn", weights / weights.sum(-1, keepdims=True), part(y, "value")
        )
        return (
            np.einsum("bhtn,hnd->btd", values, p[f"{name}.out"][i])
            + p.get(f"{name}.out_bias", np.zeros(i + 1))[i]
        )

    def mlp(x: np.ndarray, name: str, i: int) -> np.ndarray:
        z = x @ p[f"{name}.up"][i] + p.get(f"{name}.up_bias", np.zeros(i + 1))[i]
        if f"{name}.gate" in p:
            z = z * np.asarray(jax.nn.gelu(x @ p[f"{name}.gate"][i]))
        else:
            z = np.maximum(z, 0)
        return z @ p[f"{name}.down"][i] + p.get(f"{name}.down_bias", np.zeros(i + 1))[i]

    def start(tokens: np.ndarray, prefix: str) -> np.ndarray:
        x = p.get(f"{prefix}token", p["token"])[tokens] + p.get(f"{prefix}position", 0.0)
        return norm(x, f"{prefix}embedding_norm") if config.embedding_norm else x

    def bias(prefix: str, length: int, bidirectional: bool) -> Any:
        if f"{prefix}relative_bias" not in p:
            return 0.0
        row = buckets(length, length, count=8, longest=6, bidirectional=bidirectional)
        return p[f"{prefix}relative_bias"][np.asarray(row)].transpose(2, 0, 1)

    def stack(h: np.ndarray, prefix: str, branches: list[Any]) -> np.ndarray:
        block = f"{prefix}block"
        for i in range(len(f[f"{block}.skip"])):
            for j, (name, branch) in enumerate(branches):
                x = norm(h, f"{block}.{name}_norm.{i}")
                y = branch(x, f"{block}.{name}", i)
                h = f[f"{block}.skip"][i, j] * h + f[f"{block}.branch"][i, j] * y
        return norm(h, f"{prefix}norm")

    # Norms of a block by their layer.
    p = p | {
        f"{name.rpartition('.')[0]}.{i}.{name.rpartition('.')[2]}": row
        for name, w in p.items() if "block" in name and name.split(".")[-2] in ("attention_norm", "cross_norm", "mlp_norm")
        for i, row in enumerate(w)
    }  # fmt: skip
    mask = batch["input_mask"][:, None, None, :]
    encoder_bias, past = bias("encoder.", S, True), bias("", T, False)
    attention = ("attention", lambda x, name, i: attend(x, x, name, i, mask, encoder_bias))
    memory = stack(start(batch["inputs"], "encoder."), "encoder.", [attention, ("mlp", mlp)])
    causal = ("attention", lambda x, name, i: attend(x, x, name, i, np.tri(T), past))
    cross = ("cross", lambda x, name, i: attend(x, memory, name, i, mask, 0.0))
    h = stack(start(batch["decoder_inputs"], ""), "", [causal, cross, ("mlp", mlp)])
    return h @ p["readout"] if "readout" in p else f["tied_readout"] * (h @ p["token"].T)


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_its_equations_however_it_runs(name: str) -> None:
    config = MODELS[name]
    params, factors, batch = numbers(config)
    expected = in_numpy(
        config, {n: w.astype(np.float64) for n, w in params.items()}, factors, batch
    )

    @functools.partial(jax.jit, static_argnums=1)
    def logits(params: Any, compute: ComputeConfig, batch: Any) -> Any:
        return definition(dataclasses.replace(config, compute=compute)).bind(params, factors)(
            **batch
        )

    unrolled, looped = ComputeConfig(layers="unrolled"), ComputeConfig(layers="scan", remat="block")
    plain = np.asarray(logits(params, unrolled, batch))
    np.testing.assert_allclose(plain, expected, rtol=2e-4, atol=2e-4)
    weights = np.sin(np.arange(plain.size)).reshape(plain.shape)
    value, gradients = jax.value_and_grad(lambda p: jnp.sum(logits(p, looped, batch) * weights))(
        params
    )
    assert value == pytest.approx(np.sum(plain * weights), rel=1e-4)
    assert all(
        np.abs(gradient).max() > 0 for gradient in gradients.values()
    )  # every parameter does something

    # What stands at padding changes nothing, what a target's past or any input is does, and no target sees its future.
    hidden = batch | {"inputs": np.where(batch["input_mask"], batch["inputs"], 1)}
    np.testing.assert_array_equal(logits(params, unrolled, hidden), plain)
    changed = batch | {
        "decoder_inputs": np.where(
            np.arange(T) == 4, (batch["decoder_inputs"] + 1) % V, batch["decoder_inputs"]
        )
    }
    later = np.asarray(logits(params, unrolled, changed)) != plain
    assert not later[:, :4].any()
    assert later[:, 4:].any(axis=-1).all()
    first = batch | {
        "inputs": np.where(np.arange(S) == 0, (batch["inputs"] + 1) % V, batch["inputs"])
    }
    assert (np.asarray(logits(params, unrolled, first)) != plain).any(axis=-1).all()


def test_buckets_are_those_of_t5() -> None:
    indices = np.asarray(buckets(1, 200, count=32, longest=128, bidirectional=True, start=100))[0]
    # Of 16 rows a direction, 8 hold a distance each; then log2 steps: 8, 12, 16, 23, 32, 46, 64, 91 begin one.
    begins = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    rows = np.searchsorted(begins, np.arange(101), side="right") - 1
    np.testing.assert_array_equal(indices[100::-1], rows)
    np.testing.assert_array_equal(indices[101:], 16 + rows[1:100])
    past = np.asarray(buckets(40, 40, count=32, longest=128, bidirectional=False))
    assert (past[np.triu_indices(40)] == 0).all()
    np.testing.assert_array_equal(past[39, ::-1][:17], np.arange(17))


def test_sizes_that_cannot_be_are_refused() -> None:
    for change, text in (
        ({"positions": "rotary", "head_dim": 3}, "write head_dim 4"),
        ({"positions": "relative", "distance_buckets": 30}, "write distance_buckets 32"),
        ({"positions": "relative", "longest_distance": 16}, "write longest_distance 128"),
        ({"encoder_depth": 0}, "model.encoder_depth is 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            dataclasses.replace(BART, **change)
