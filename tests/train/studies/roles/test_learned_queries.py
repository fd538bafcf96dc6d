"""Roles of queries that are parameters: pooling heads, Perceiver latents, CaiT's class token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mupax.train.studies.roles import models
from mupax.train.studies.roles.deduce import Roles
from tests.train.studies.roles import test_refusals
from tests.train.studies.roles.test_refusals import arrays, heads, mlp, normed, run_mlp

SIZES = test_refusals.ATTENTION | {"embed": 20, "source": 6}
Params = dict[str, Any]
Pool = Callable[[Params, jax.Array], jax.Array]


def attend(p: Params, x: jax.Array, memory: jax.Array) -> jax.Array:
    q = jnp.einsum("btd,dhn->bhtn", x, p["q"])
    k, v = (jnp.einsum("btd,dhn->bhtn", memory, p[name]) for name in "kv")
    return jnp.einsum("bhtn,hnd->btd", jax.nn.softmax(q @ k.swapaxes(2, 3)) @ v, p["o"])


def rows(x: jax.Array, p: jax.Array) -> jax.Array:
    """A parameter as tokens of every example."""
    vectors = p[None] if p.ndim == 1 else p
    return jnp.broadcast_to(vectors, (x.shape[0], *vectors.shape))


def pooled(p: Params, x: jax.Array) -> jax.Array:
    return attend(p, rows(x, p["query"]), normed(x))[:, 0]


def pooled_by_mlp(p: Params, x: jax.Array) -> jax.Array:
    z = attend(p, rows(x, p["query"]), normed(x))
    return (z + run_mlp(p, normed(z)))[:, 0]


def perceiver(p: Params, x: jax.Array) -> jax.Array:
    z = rows(x, p["query"])
    z = z + attend(p, normed(z), normed(x))
    return (z + run_mlp(p, normed(z))).mean(1)


def class_attention(p: Params, x: jax.Array) -> jax.Array:
    z = rows(x, p["query"])
    y = normed(jnp.concatenate([z, x], 1))
    z = z + attend(p, y[:, :1], y)
    return (z + run_mlp(p, normed(z)))[:, 0]


def roles_of(pool: Pool, query: tuple[str, ...], without: str = "") -> Roles:
    """Return the roles of an image model with a pooling head.

    Args:
        query: Axes of the learned query. "one" is a dimension that has the size 1 in the code.
        without: Parameter that the model does not have.
    """

    def build(s: Mapping[str, int]) -> tuple[Any, Any, Any]:
        shapes = {
            "patch": (s["patch"], s["embed"]),
            "place": (s["position"], s["embed"]),
            "readout": (s["embed"], s["classes"]),
            "query": tuple({**s, "one": 1}[axis] for axis in query),
            **heads(s),
        }
        if pool is not pooled:
            shapes |= mlp(s)
        shapes.pop(without, None)

        def loss(p: Params, batch: jax.Array) -> jax.Array:
            x = pool(p, batch @ p["patch"] + p["place"])
            return jax.nn.logsumexp(normed(x) @ p["readout"], axis=-1).sum()

        return arrays(shapes), loss, arrays((2, s["position"], s["patch"]))

    return models.roles_of(build, SIZES)


@pytest.mark.parametrize(
    ("pool", "axes", "block"),
    [
        (pooled, ("embed",), ""),
        (pooled_by_mlp, ("embed",), ""),
        (perceiver, ("source", "embed"), "block."),
        (class_attention, ("embed",), "block."),
    ],
)
def test_a_learned_query_is_a_learned_token(pool: Pool, axes: tuple[str, ...], block: str) -> None:
    roles = roles_of(pool, axes)
    assert roles.refused == {}
    groups = {name: spec.group for name, spec in roles.specs.items()}
    assert groups["query"] == "token_embedding"
    assert roles.evidence["query"] == "is a learned query, which q reads"
    expected = {
        "q": f"{block}query", "k": f"{block}key", "v": f"{block}value",
        "o": f"{block}attention_out", "patch": "patch_embedding", "place": "position",
    }  # fmt: skip
    if pool is not pooled:
        expected |= {"up": "block.mlp_in", "down": "block.mlp_out"}
    assert groups.items() >= expected.items()


def added_to_nothing(p: Params, x: jax.Array) -> jax.Array:
    query = jnp.broadcast_to(p["query"], (x.shape[0], 1, x.shape[-1]))
    return attend(p, query, normed(x))[:, 0]


@pytest.mark.parametrize(
    ("pool", "axes"),
    [
        (pooled_by_mlp, ("one", "embed")),
        (perceiver, ("one", "embed")),
        (lambda p, x: run_mlp(p, added_to_nothing(p, x)), ("one", "one", "embed")),
    ],
    ids=["pooled", "perceiver", "of rank 3"],
)
def test_a_query_with_a_dimension_of_1_hides_no_role_of_attention(
    pool: Pool, axes: tuple[str, ...]
) -> None:
    roles = roles_of(pool, axes)
    assert list(roles.refused) == ["query"]
    assert roles.refused["query"].startswith("dimension 0 has the size 1; leave it out")
    roles_of_attention = [roles.specs[name].role.value for name in "qkvo"]
    assert roles_of_attention == ["query", "key", "value", "attention_out"]


def test_a_query_without_a_matrix_is_refused_with_what_to_write() -> None:
    def direct(p: Params, x: jax.Array) -> jax.Array:
        k, v = (jnp.einsum("btd,dhn->bhtn", normed(x), p[name]) for name in "kv")
        weights = jax.nn.softmax(jnp.einsum("hn,bhtn->bht", p["query"], k))
        z = jnp.einsum("bht,bhtn,hnd->bd", weights, v, p["o"])
        return z + run_mlp(p, normed(z))

    roles = roles_of(direct, ("heads", "head_dim"), without="q")
    assert roles.refused == {
        "query": "it is a query itself, without a matrix of queries; declare it as a bias of "
        "queries, ParamSpec(role=Role.BIAS, of=Role.QUERY, axes=('heads', 'head_dim'))"
    }
    assert [roles.specs[name].group for name in "kvo"] == ["key", "value", "attention_out"]


def test_control_what_is_added_to_other_tokens_is_no_learned_query() -> None:
    def placed(p: Params, x: jax.Array) -> jax.Array:
        z = attend(p, jax.nn.gelu(x[:, :1]) + rows(x, p["query"]), normed(x))
        return (z + run_mlp(p, normed(z)))[:, 0]

    roles = roles_of(placed, ("embed",))
    assert roles.refused["query"].startswith("it is added to patch_embedding, as neither their")
