"""Three transformers without anything of mupax, of which `mupax models roles` finds all roles.

Each is a function `build(sizes)` that returns parameters, loss and batch: a pytree by hand,
flax.linen, and NNX. Nothing is computed here. Shapes: B batch, T positions, D embed, H heads,
N head_dim, F mlp, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

SIZES = {"embed": 20, "heads": 4, "head_dim": 6, "mlp": 28, "vocab": 50, "position": 12}
"""Base sizes of the two language models."""
PATCHES = {
    "embed": 20,
    "heads": 4,
    "head_dim": 6,
    "mlp": 28,
    "patch": 15,
    "classes": 10,
    "position": 12,
}
"""Base sizes of the classifier."""
DEPTH = 2


def _rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return gain * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def by_hand(sizes: Mapping[str, int]) -> tuple[Any, Any, Any]:
    """Return abstract parameters, loss function and abstract batch of a decoder of plain arrays.

    Abstract leaves are `jax.ShapeDtypeStruct`. The decoder has no biases, a gated MLP, learned
    positions, and a readout tied to the embedding.
    """
    V = sizes["vocab"]
    T = sizes["position"]
    D = sizes["embed"]
    H = sizes["heads"]
    N = sizes["head_dim"]
    F = sizes["mlp"]
    block = {
        "norm1": (D,),
        "wq": (D, H, N),
        "wk": (D, H, N),
        "wv": (D, H, N),
        "wo": (H, N, D),
        "norm2": (D,),
        "w1": (D, F),
        "w3": (D, F),
        "w2": (F, D),
    }
    shapes = {"wte": (V, D), "wpe": (T, D), "norm": (D,), "h": [block] * DEPTH}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=_is_shape
    )

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["wte"][tokens] + params["wpe"]
        for p in params["h"]:
            y = _rms_norm(x, p["norm1"])
            q = jnp.einsum("btd,dhn->bhtn", y, p["wq"])
            k = jnp.einsum("btd,dhn->bhtn", y, p["wk"])
            v = jnp.einsum("btd,dhn->bhtn", y, p["wv"])
            logits = jnp.where(jnp.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / N**0.5, -1e30)
            x = x + jnp.einsum("bhtn,hnd->btd", jax.nn.softmax(logits) @ v, p["wo"])
            y = _rms_norm(x, p["norm2"])
            x = x + (jax.nn.silu(y @ p["w1"]) * (y @ p["w3"])) @ p["w2"]
        scores = jax.nn.log_softmax(_rms_norm(x, params["norm"]) @ params["wte"].T)
        return -jnp.mean(jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1))

    return params, loss, jax.ShapeDtypeStruct((2, T), jnp.int32)


def _is_shape(x: Any) -> bool:
    """Return whether a node is a shape, which is a leaf of the tree of shapes."""
    return isinstance(x, tuple)


class _Linen(nn.Module):
    """Decoder from tokens [B, T] to logits [B, T, V]."""

    sizes: Mapping[str, int]

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        s = self.sizes
        x = nn.Embed(s["vocab"], s["embed"])(tokens)
        x = x + self.param("positions", nn.initializers.normal(), (s["position"], s["embed"]))
        for _ in range(DEPTH):
            inner = s["heads"] * s["head_dim"]
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(
                s["heads"], qkv_features=inner, normalize_qk=True
            )(y, mask=nn.make_causal_mask(tokens))
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(s["embed"])(nn.gelu(nn.Dense(s["mlp"])(y)))
        return nn.Dense(s["vocab"])(nn.LayerNorm()(x))


def linen(sizes: Mapping[str, int]) -> tuple[Any, Any, Any]:
    """Return abstract parameters, loss function and abstract batch of a flax.linen decoder.

    The decoder has LayerNorm, biases, normalized queries and keys, and an untied readout.
    """
    model = _Linen(dict(sizes))
    tokens = jax.ShapeDtypeStruct((2, sizes["position"]), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return params, loss, tokens


class _NNX(nnx.Module):
    """Classifier from patches [B, T, patch] to logits [B, classes]."""

    def __init__(self, sizes: Mapping[str, int], rngs: nnx.Rngs) -> None:
        D = sizes["embed"]
        F = sizes["mlp"]
        num_heads = sizes["heads"]
        inner = num_heads * sizes["head_dim"]
        self.patch = nnx.Linear(sizes["patch"], D, rngs=rngs)
        self.position = nnx.Param(jnp.zeros((sizes["position"], D)))
        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(2 * DEPTH)])
        self.attention = nnx.List(
            [
                nnx.MultiHeadAttention(num_heads, D, inner, decode=False, rngs=rngs)
                for _ in range(DEPTH)
            ]
        )
        self.up = nnx.List([nnx.Linear(D, F, rngs=rngs) for _ in range(DEPTH)])
        self.down = nnx.List([nnx.Linear(F, D, rngs=rngs) for _ in range(DEPTH)])
        self.readout = nnx.Linear(D, sizes["classes"], rngs=rngs)

    def __call__(self, patches: jax.Array) -> jax.Array:
        x = self.patch(patches) + self.position[...]
        for i in range(DEPTH):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.down[i](jax.nn.relu(self.up[i](self.norms[2 * i + 1](x))))
        return self.readout(x.mean(axis=1))


def classifier(sizes: Mapping[str, int]) -> tuple[Any, Any, Any]:
    """Return abstract parameters, loss function and abstract batch of an NNX classifier.

    The loss is the mean squared error of the logits from one-hot labels.
    """
    model = nnx.eval_shape(lambda: _NNX(sizes, nnx.Rngs(0)))
    graph, params = nnx.split(model, nnx.Param)[:2]

    def loss(params: Any, batch: Any) -> jax.Array:
        patches, labels = batch
        logits = nnx.merge(graph, params)(patches)
        return jnp.mean((logits - jax.nn.one_hot(labels, sizes["classes"])) ** 2)

    patches = jax.ShapeDtypeStruct((2, sizes["position"], sizes["patch"]), jnp.float32)
    labels = jax.ShapeDtypeStruct((2,), jnp.int32)
    return nnx.to_pure_dict(params), loss, (patches, labels)
