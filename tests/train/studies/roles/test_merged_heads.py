"""Roles of attention as most people write it: a Linear to heads * head_dim, reshaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from mupax import presets, train, zoo
from mupax.presets.roles import Role
from mupax.train.studies.roles import models
from mupax.train.studies.roles.deduce import Roles

SIZES = {"embed": 20, "heads": 4, "head_dim": 6, "mlp": 28, "vocab": 50, "position": 12}
SQUARE = {"embed": 24, "heads": 4, "mlp": 28, "vocab": 50, "position": 12}
"""Sizes of a model whose heads make up the width, so that no size of a head is named."""
DEPTH = 2
HEADS = ("heads", "head_dim")

Sizes = Mapping[str, int]
Attend = Callable[..., jax.Array]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, heads: int) -> jax.Array:
    """Return causal attention of [B, T, H*N] arrays."""
    batch, length, width = q.shape
    q, k, v = (
        x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3) for x in (q, k, v)
    )
    mask = jnp.tri(length, dtype=bool)
    logits = jnp.where(mask, q @ k.swapaxes(2, 3) * (width // heads) ** -0.5, -1e30)
    return (jax.nn.softmax(logits) @ v).transpose(0, 2, 1, 3).reshape(batch, length, width)


def attend_inside_out(q: jax.Array, k: jax.Array, v: jax.Array, heads: int) -> jax.Array:
    """Return attention whose arrays are [B, T, N*H]: heads are the inner axis."""
    batch, length, width = q.shape
    q, k, v = (
        x.reshape(batch, length, width // heads, heads).transpose(0, 3, 1, 2) for x in (q, k, v)
    )
    return (
        (jax.nn.softmax(q @ k.swapaxes(2, 3)) @ v)
        .transpose(0, 2, 3, 1)
        .reshape(batch, length, width)
    )


def size(s: Sizes) -> tuple[int, int, int]:
    """Return the width, the heads and all heads' dimensions."""
    return s["embed"], s["heads"], s["heads"] * s["head_dim"] if "head_dim" in s else s["embed"]


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def tokens_of(s: Sizes) -> Any:
    return jax.ShapeDtypeStruct((2, s["position"]), jnp.int32)


def by_hand(s: Sizes, attention: Attend = attend) -> tuple[Any, Any, Any]:
    """A decoder as dicts of arrays, with a bias after every product."""
    (D, H, A), F, V = size(s), s["mlp"], s["vocab"]
    block = {
        "norm1": (D,), "wq": (D, A), "bq": (A,), "wk": (D, A), "bk": (A,), "wv": (D, A), "bv": (A,), "wo": (A, D), "bo": (D,),
        "norm2": (D,), "w1": (D, F), "b1": (F,), "w2": (F, D), "b2": (D,),
    }  # fmt: skip
    shapes = {
        "wte": (V, D),
        "wpe": (s["position"], D),
        "norm": (D,),
        "out": (D, V),
        "h": [block] * DEPTH,
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )

    def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
        return gain * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["wte"][tokens] + params["wpe"]
        for p in params["h"]:
            y = normed(x, p["norm1"])
            q, k, v = (y @ p[f"w{name}"] + p[f"b{name}"] for name in "qkv")
            x = x + attention(q, k, v, H) @ p["wo"] + p["bo"]
            x = x + jax.nn.gelu(normed(x, p["norm2"]) @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return cross_entropy(normed(x, params["norm"]) @ params["out"], tokens)

    return params, loss, tokens_of(s)


class Linen(nn.Module):
    s: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        (D, H, A), s = size(self.s), self.s
        positions = self.param("positions", nn.initializers.normal(), (s["position"], D))
        x = nn.Embed(s["vocab"], D)(tokens) + positions
        for layer in range(DEPTH):
            y = nn.LayerNorm()(x)
            q, k, v = (nn.Dense(A, name=f"{name}_{layer}")(y) for name in ("query", "key", "value"))
            x = x + nn.Dense(D, name=f"out_{layer}")(attend(q, k, v, H))
            x = x + nn.Dense(D)(nn.gelu(nn.Dense(s["mlp"])(nn.LayerNorm()(x))))
        return nn.Dense(s["vocab"])(nn.LayerNorm()(x))


def linen(s: Sizes) -> tuple[Any, Any, Any]:
    """A decoder of flax.linen's Dense and LayerNorm."""
    model = Linen(dict(s))
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_of(s))["params"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens)
        return cross_entropy(logits, tokens)

    return params, loss, tokens_of(s)


class Block(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs) -> None:
        width, self.heads, inner = size(s)
        self.q, self.k, self.v = (nnx.Linear(width, inner, rngs=rngs) for _ in range(3))
        self.o = nnx.Linear(inner, width, rngs=rngs)
        self.up = nnx.Linear(width, s["mlp"], rngs=rngs)
        self.down = nnx.Linear(s["mlp"], width, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[0](x)
        x = x + self.o(attend(self.q(y), self.k(y), self.v(y), self.heads))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Network(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(s["vocab"], s["embed"], rngs=rngs)
        self.position = nnx.Param(jnp.zeros((s["position"], s["embed"])))
        self.blocks = nnx.List([Block(s, rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(s["embed"], rngs=rngs)
        self.readout = nnx.Linear(s["embed"], s["vocab"], rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


def state(s: Sizes) -> tuple[Any, Any, Any]:
    """A decoder of nnx.Linear, its parameters an `nnx.State`, whose leaves are Variables."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Network(s, nnx.Rngs(0))), nnx.Param)[:2]
    return (
        params,
        lambda p, tokens: cross_entropy(nnx.merge(graph, p)(tokens), tokens),
        tokens_of(s),
    )


PLACES = {
    by_hand: ("h.{}.wq", "h.{}.bq", "h.{}.wk", "h.{}.wv", "h.{}.wo", "h.{}.bo"),
    linen: (
        "query_{}.kernel",
        "query_{}.bias",
        "key_{}.kernel",
        "value_{}.kernel",
        "out_{}.kernel",
        "out_{}.bias",
    ),
    state: tuple(
        f"blocks.{{}}.{name}"
        for name in ("q.kernel", "q.bias", "k.kernel", "v.kernel", "o.kernel", "o.bias")
    ),
}
"""Where each model keeps its queries, their bias, keys, values, output and its bias, by layer."""


def traced(build: Any, sizes: Sizes) -> tuple[Roles, zoo.FunctionDefinition]:
    """Return the traced roles, and the definition that takes them at other sizes."""
    roles = models.roles_of(build, sizes)
    assert roles.refused == {}
    larger = {**sizes, "embed": 48, "heads": 8}
    more = {"layers": DEPTH, "heads": 8}
    definition = zoo.define_function(
        lambda params, tokens: tokens,
        build(larger)[0],
        roles.specs,
        sizes=more,
        tied_readout=roles.tied,
    )
    return roles, definition


@pytest.mark.parametrize("sizes", [SIZES, SQUARE], ids=["apart", "heads make up the width"])
@pytest.mark.parametrize("build", PLACES)
def test_heads_in_one_dimension_are_found_and_taken(build: Any, sizes: Sizes) -> None:
    roles, definition = traced(build, sizes)
    for layer in range(DEPTH):
        query, bias, key, value, out, out_bias = (
            roles.specs[name.format(layer)] for name in PLACES[build]
        )
        assert [spec.group for spec in (query, key, value)] == [
            "block.query",
            "block.key",
            "block.value",
        ]
        assert query.axes == ("embed", *HEADS)
        assert key.axes == value.axes == ("embed", "kv_heads", "head_dim")
        assert (bias.of, bias.axes) == (Role.QUERY, HEADS)
        assert (out.role, out.axes, out.fan_in) == (Role.ATTENTION_OUT, (*HEADS, "embed"), HEADS)
        assert (out_bias.of, out_bias.axes) == (Role.ATTENTION_OUT, ("embed",))
    assert definition.sizes["head_dim"] == 6
    mup = presets.get("mup", base="embed=24,heads=4,kv_heads=4,head_dim=6,mlp=28")
    rates = train.parameterize(definition, mup, train.OptimizerConfig(name="adam")).factors.lr
    query, *_, out, _ = (name.format(1) for name in PLACES[build])
    assert float(rates[query]) == pytest.approx(0.5)  # embed has doubled
    assert float(rates[out]) == pytest.approx(0.5)  # heads have doubled


def test_the_order_is_that_of_the_reshape() -> None:
    roles = models.roles_of(lambda s: by_hand(s, attend_inside_out), SIZES)
    assert roles.specs["h.0.wq"].axes == ("embed", "head_dim", "heads")
    assert roles.specs["h.0.wo"].axes == ("head_dim", "heads", "embed")


def test_what_is_never_reshaped_or_of_equal_sizes_is_refused() -> None:
    uncut = models.roles_of(lambda s: by_hand(s, lambda q, k, v, heads: attend(q, k, v, 1)), SIZES)
    assert "dimension 1 is heads x head_dim" in uncut.refused["h.0.wq"]
    equal = models.roles_of(by_hand, SIZES | {"head_dim": 4})
    assert "dimension 1 is heads x head_dim" in equal.refused["h.0.wq"]


@pytest.mark.parametrize("attention", [attend, attend_inside_out])
def test_heads_as_many_as_each_is_wide_are_refused(attention: Attend):
    square = models.roles_of(lambda s: by_hand(s, attention), {**SQUARE, "embed": 16})
    assert "both 4" in square.refused["h.0.wq"]
    assert "h.0.wq" not in square.specs
    # The control: at another width the cut shows which axis is the outer one.
    roles = models.roles_of(lambda s: by_hand(s, attend), SQUARE)
    assert "h.0.wq" in roles.specs


# Shared keys


def repeated(x: jax.Array, times: int) -> jax.Array:
    return jnp.repeat(x, times, axis=2)


def broadcast(x: jax.Array, times: int) -> jax.Array:
    batch, length, kv_heads, head_dim = x.shape
    copies = jnp.broadcast_to(x[:, :, :, None], (batch, length, kv_heads, times, head_dim))
    return copies.reshape(batch, length, kv_heads * times, head_dim)


def grouped_query(
    s: Sizes, copy: Callable[[jax.Array, int], jax.Array] | None
) -> tuple[Any, Any, Any]:
    """Return one attention with fewer key heads than heads, all in one dimension.

    Args:
        copy: Function that copies key heads for the queries that share them. `None` groups the
            queries instead.
    """
    (D, H, A), K, V = size(s), s["kv_heads"], s["vocab"]
    N = A // H
    shapes = {"wte": (V, D), "q": (D, A), "k": (D, K * N), "v": (D, K * N), "o": (A, D)}
    shapes["out"] = (D, V)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["wte"][tokens]
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        q = (y @ params["q"]).reshape(*tokens.shape, H, N)
        k, v = ((y @ params[name]).reshape(*tokens.shape, K, N) for name in "kv")
        if copy is None:
            q = q.reshape(*tokens.shape, K, H // K, N)
            weights = jax.nn.softmax(jnp.einsum("btkgn,bskn->bkgts", q, k))
            read = jnp.einsum("bkgts,bskn->btkgn", weights, v)
        else:
            k, v = copy(k, H // K), copy(v, H // K)
            weights = jax.nn.softmax(jnp.einsum("bthn,bshn->bhts", q, k))
            read = jnp.einsum("bhts,bshn->bthn", weights, v)
        return cross_entropy(
            (x + read.reshape(*tokens.shape, A) @ params["o"]) @ params["out"], tokens
        )

    return params, loss, tokens_of(s)


@pytest.mark.parametrize("copy", [repeated, broadcast, None])
def test_shared_keys_in_one_dimension_are_found(
    copy: Callable[[jax.Array, int], jax.Array] | None,
) -> None:
    roles = models.roles_of(lambda s: grouped_query(s, copy), {**SIZES, "kv_heads": 2})
    assert roles.refused == {}
    assert roles.specs["q"].axes == ("embed", *HEADS)
    assert roles.specs["k"].axes == roles.specs["v"].axes == ("embed", "kv_heads", "head_dim")
    assert roles.specs["o"].axes == (*HEADS, "embed")
    assert roles.specs["o"].fan_in == HEADS
