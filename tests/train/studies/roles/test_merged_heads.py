"""Roles of attention as most people write it: a Linear to heads * head_dim, reshaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import presets, train, zoo
from mupax.presets.roles import Role
from mupax.train.studies.roles import models
from mupax.train.studies.roles.deduce import Roles
from tests.train.studies.roles.test_refusals import arrays, normed

SIZES = {"embed": 20, "heads": 4, "head_dim": 6, "mlp": 28, "vocab": 50, "position": 12}
SQUARE = {"embed": 24, "heads": 4, "mlp": 28, "vocab": 50, "position": 12}
"""Sizes of a model whose heads make up the width, so that no size of a head is named."""
DEPTH = 2
HEADS = ("heads", "head_dim")

Sizes = Mapping[str, int]
Attend = Callable[..., jax.Array]


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, heads: int, *, inside_out: bool = False
) -> jax.Array:
    """Return causal attention of [B, T, H*N] arrays, or of [B, T, N*H] if `inside_out`."""
    batch, length, width = q.shape
    cut, order = (heads, width // heads), (0, 2, 1, 3)
    if inside_out:
        cut, order = (width // heads, heads), (0, 3, 1, 2)
    q, k, v = (x.reshape(batch, length, *cut).transpose(order) for x in (q, k, v))
    mask = jnp.tri(length, dtype=bool)
    logits = jnp.where(mask, q @ k.swapaxes(2, 3) * (width // heads) ** -0.5, -1e30)
    out = (jax.nn.softmax(logits) @ v).transpose(np.argsort(order))
    return out.reshape(batch, length, width)


def attend_inside_out(q: jax.Array, k: jax.Array, v: jax.Array, heads: int) -> jax.Array:
    return attend(q, k, v, heads, inside_out=True)


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
        "h": {str(layer): block for layer in range(DEPTH)},
    }

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["wte"][tokens] + params["wpe"]
        for layer in range(DEPTH):
            p = params["h"][str(layer)]
            y = normed(x) * p["norm1"]
            q, k, v = (y @ p[f"w{name}"] + p[f"b{name}"] for name in "qkv")
            x = x + attention(q, k, v, H) @ p["wo"] + p["bo"]
            y = normed(x) * p["norm2"]
            x = x + jax.nn.gelu(y @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return cross_entropy(normed(x) * params["norm"] @ params["out"], tokens)

    return arrays(shapes), loss, tokens_of(s)


def state(s: Sizes) -> tuple[Any, Any, Any]:
    """The same decoder, its parameters an `nnx.State`, whose leaves are Variables."""
    params, loss, tokens = by_hand(s)
    variables: Any = nnx.State(jax.tree.map(nnx.Param, params))
    return variables, lambda p, tokens: loss(nnx.to_pure_dict(p), tokens), tokens


def traced(build: Any, sizes: Sizes) -> tuple[Roles, zoo.FunctionDefinition]:
    """Return the traced roles, and the definition that takes them at other sizes."""
    roles = models.roles_of(build, sizes)
    assert roles.refused == {}
    params = build({**sizes, "embed": 48, "heads": 8})[0]
    more = {"layers": DEPTH, "heads": 8}
    definition = zoo.define_function(
        lambda params, tokens: tokens, params, roles.specs, sizes=more, tied_readout=roles.tied
    )
    return roles, definition


@pytest.mark.parametrize("sizes", [SIZES, SQUARE], ids=["apart", "heads make up the width"])
@pytest.mark.parametrize("build", [by_hand, state])
def test_heads_in_one_dimension_are_found_and_taken(build: Any, sizes: Sizes) -> None:
    roles, definition = traced(build, sizes)
    for layer in range(DEPTH):
        query, bias, key, value, out, out_bias = (
            roles.specs[f"h.{layer}.{name}"] for name in ("wq", "bq", "wk", "wv", "wo", "bo")
        )
        assert (query.group, query.axes) == ("block.query", ("embed", *HEADS))
        assert (key.group, value.group) == ("block.key", "block.value")
        assert key.axes == value.axes == ("embed", "kv_heads", "head_dim")
        assert (bias.of, bias.axes) == (Role.QUERY, HEADS)
        assert (out.role, out.axes, out.fan_in) == (Role.ATTENTION_OUT, (*HEADS, "embed"), HEADS)
        assert (out_bias.of, out_bias.axes) == (Role.ATTENTION_OUT, ("embed",))
    assert definition.sizes["head_dim"] == 6
    mup = presets.get("mup", base="embed=24,heads=4,kv_heads=4,head_dim=6,mlp=28")
    rates = train.parameterize(definition, mup, train.OptimizerConfig(name="adam")).factors.lr
    for name in ("h.1.wq", "h.1.wo"):  # embed has doubled, and heads have
        assert float(rates[name]) == pytest.approx(0.5)


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

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["wte"][tokens]
        y = normed(x)
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
        x = x + read.reshape(*tokens.shape, A) @ params["o"]
        return cross_entropy(x @ params["out"], tokens)

    return arrays(shapes), loss, tokens_of(s)


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
