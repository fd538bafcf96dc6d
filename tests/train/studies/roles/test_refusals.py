"""What tracing refuses, and in which words: where two readings are possible there is no guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mupax.presets.roles import PresetError
from mupax.train.studies.roles import models
from mupax.train.studies.roles.deduce import Roles, Sample, axis_names

SIZES = {"patch": 5, "embed": 6, "mlp": 14, "classes": 10, "position": 3}
ATTENTION = SIZES | {"heads": 4, "head_dim": 7}

Sizes = Mapping[str, int]
Params = dict[str, jax.Array]
Shapes = Callable[[Sizes], dict[str, tuple[int, ...]]]
Branch = Callable[[Params, jax.Array], jax.Array]


def arrays(shapes: Any) -> Any:
    """Return abstract arrays for shapes in dicts."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def roles_of(
    extra: Shapes, branch: Branch, sizes: Sizes = SIZES, outside: Branch | None = None
) -> Roles:
    """Return the roles of a residual model of patches with the parameters `extra`.

    They are in its one branch, or in what follows it.
    """

    def build(s: Sizes) -> tuple[Any, Any, Any]:
        shapes = {
            "patch": (s["patch"], s["embed"]),
            "readout": (s["embed"], s["classes"]),
            **extra(s),
        }

        def loss(p: Params, batch: jax.Array) -> jax.Array:
            x = batch @ p["patch"]
            x = x + branch(p, normed(x))
            x = x if outside is None else outside(p, x)
            return jax.nn.logsumexp(x.mean(1) @ p["readout"], axis=-1).sum()

        return arrays(shapes), loss, arrays((2, s["position"], s["patch"]))

    return models.roles_of(build, sizes)


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def mlp(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {"up": (s["embed"], s["mlp"]), "down": (s["mlp"], s["embed"])}


def run_mlp(p: Params, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def heads(s: Sizes) -> dict[str, tuple[int, ...]]:
    inner = (s["embed"], s["heads"], s["head_dim"])
    return {"q": inner, "k": inner, "v": inner, "o": (*inner[1:], inner[0])}


def attend(weigh: Callable[[jax.Array], jax.Array], q: str, k: str) -> Branch:
    def branch(p: Params, x: jax.Array) -> jax.Array:
        qx, kx, vx = (jnp.einsum("btd,dhn->bhtn", x, p[name]) for name in (q, k, "v"))
        return jnp.einsum("bhtn,hnd->btd", weigh(qx @ kx.swapaxes(2, 3)) @ vx, p["o"])

    return branch


def refusal(roles: Roles, *names: str) -> str:
    """The one reason of these parameters, and of no others."""
    assert tuple(sorted(roles.refused)) == names
    return roles.refused[names[0]]


def test_the_model_itself_is_found() -> None:
    """The control of all that follow: without what is wrong in them nothing is refused."""
    assert {name: spec.group for name, spec in roles_of(mlp, run_mlp).specs.items()} == {
        "patch": "patch_embedding", "readout": "readout", "up": "block.mlp_in", "down": "block.mlp_out"
    }  # fmt: skip
    attention = roles_of(heads, attend(jax.nn.softmax, "q", "k"), ATTENTION)
    assert attention.refused == {}
    assert [attention.specs[name].group for name in "qkvo"] == [
        "block.query", "block.key", "block.value", "block.attention_out"
    ]  # fmt: skip


def test_a_parameter_that_is_not_used() -> None:
    roles = roles_of(lambda s: mlp(s) | {"idle": (s["embed"],)}, run_mlp)
    assert refusal(roles, "idle") == "the loss does not use it; leave it out"


def wider(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {"up": (s["embed"], 4 * s["embed"]), "down": (4 * s["embed"], s["embed"])}


def one_matrix(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {"up": mlp(s)["up"]}


def by_callback(p: Params, x: jax.Array) -> jax.Array:
    h = x @ p["up"]
    return jax.pure_callback(lambda h: h, jax.ShapeDtypeStruct(h.shape, h.dtype), h) @ p["down"]


def by_loop(p: Params, x: jax.Array) -> jax.Array:
    h = jax.lax.while_loop(lambda h: jnp.sum(h) < 1, lambda h: 2 * h, x @ p["up"])
    return h @ p["down"]


MLPS: dict[str, tuple[Shapes, Branch, str, str]] = {
    "a dimension of size 1": (
        lambda s: mlp(s) | {"shift": (1, s["embed"])}, lambda p, x: run_mlp(p, x) + p["shift"][0],
        "shift", "dimension 0 has the size 1; leave it out",
    ),
    "two uses with another fan-in": (
        one_matrix, lambda p, x: jax.nn.gelu(x @ p["up"]) @ p["up"].T,
        "up", "its uses do not agree: contracts embed; a nonlinearity",
    ),
    "a size of no name that grows": (
        wider, run_mlp,
        "down up", "dimension 0 is 4 x embed; make embed a dimension of its own, or name",
    ),
    "a size of no name": (
        lambda s: {"up": (s["embed"], 9), "down": (9, s["embed"])}, run_mlp,
        "down up", "dimension 0, of size 9, grows with none of patch, embed, mlp",
    ),
    "a product over a part of an axis": (
        mlp, lambda p, x: jax.nn.gelu(x[..., :3] @ p["up"][:3]) @ p["down"],
        "up", "a product sums over 3 of the 6 along its dimension 0",
    ),
    "a function of a parameter": (
        mlp, lambda p, x: jax.nn.gelu(x @ jnp.tanh(p["up"])) @ p["down"],
        "up", "it is computed with (tanh) before it meets an activation",
    ),
    "a product of two parameters": (
        mlp, lambda p, x: x @ (p["up"] @ p["down"]),
        "down up", "it is computed with (dot) before it meets",
    ),
    "a callback": (mlp, by_callback, "down up", "it reads or feeds pure_callback, through which nothing"),
    "a loop": (mlp, by_loop, "down up", "it reads or feeds while, through which nothing"),
}  # fmt: skip
"""By what is wrong in a branch: its parameters, the branch, the refused parameters and the reason."""


@pytest.mark.parametrize("wrong", MLPS)
def test_a_branch_is_refused_with_the_reason(wrong: str) -> None:
    shapes, branch, names, reason = MLPS[wrong]
    assert refusal(roles_of(shapes, branch), *names.split()).startswith(reason)


def test_what_disagrees_is_to_be_two_parameters() -> None:
    roles = roles_of(*MLPS["two uses with another fan-in"][:2])
    assert roles.refused["up"].endswith("make them parameters of their own, or declare its role")


def test_one_matrix_as_query_and_key() -> None:
    roles = roles_of(
        lambda s: {k: v for k, v in heads(s).items() if k != "k"},
        attend(jax.nn.softmax, "q", "q"),
        ATTENTION,
    )
    assert refusal(roles, "q").startswith(
        "its uses do not agree: its products with those of q go through a softmax over its own rows"
    )


def test_queries_keys_and_values_in_one_array() -> None:
    def fused(s: Sizes) -> dict[str, tuple[int, ...]]:
        return {"qkv": (s["embed"], 3 * s["heads"] * s["head_dim"]), "o": heads(s)["o"]}

    def branch(p: Params, x: jax.Array) -> jax.Array:
        count, size, _ = p["o"].shape
        y = (x @ p["qkv"]).reshape(*x.shape[:2], 3, count, size)
        q, k, v = (y[:, :, i].swapaxes(1, 2) for i in range(3))
        return jnp.einsum("bhtn,hnd->btd", jax.nn.softmax(q @ k.swapaxes(2, 3)) @ v, p["o"])

    reason = refusal(roles_of(fused, branch, ATTENTION), "qkv")
    assert reason.startswith(
        "dimension 1 is 3 x heads x head_dim; a declaration names one axis a dimension"
    )


def test_an_axis_that_is_another_at_all_sizes() -> None:
    samples = []
    for patch, embed in ((5, 6), (10, 6), (5, 12)):
        sizes = {"patch": patch, "embed": embed, "mlp": embed}
        samples.append(Sample(sizes, {"up": (patch, embed)}))
    assert axis_names(samples)[1] == {
        "up": "dimension 1 is embed and mlp at all sizes; build the model so that each can change alone"
    }

    # The control: a model without an MLP.
    def build(s: Sizes) -> tuple[Any, Any, Any]:
        shapes = {"up": (s["patch"], s["embed"])}
        return arrays(shapes), lambda p, x: jnp.sum(x @ p["up"]), arrays((2, s["patch"]))

    assert list(models.roles_of(build, {"patch": 5, "embed": 6}).specs) == ["up"]


@pytest.mark.parametrize(
    "weigh",
    [
        lambda logits: logits,
        jax.nn.sigmoid,
        # Slot attention: weights of a key add up to 1 over queries, and are summed over keys.
        lambda logits: jax.nn.softmax(logits, axis=-2),
    ],
)
def test_attention_without_a_softmax_over_keys(weigh: Callable[[jax.Array], jax.Array]) -> None:
    roles = roles_of(heads, attend(weigh, "q", "k"), ATTENTION)
    assert refusal(roles, "k", "o", "q", "v").startswith(
        "a product of two activations that is not known as a softmax's attention"
    )


def test_experts_that_nothing_chooses() -> None:
    def extra(s: Sizes) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in routed(s).items() if name != "router"}

    def branch(p: Params, x: jax.Array) -> jax.Array:
        h = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
        return jnp.einsum("btef,efd->btd", h, p["down"])

    roles = roles_of(extra, branch, SIZES | {"experts": 4})
    assert refusal(roles, "down", "up").startswith(
        "it has an axis of experts, and no index or batch dimension has a"
    )


def routed(s: Sizes) -> dict[str, tuple[int, ...]]:
    up = (s["experts"], s["embed"], s["mlp"])
    return {"router": (s["embed"], s["experts"]), "up": up, "down": (up[0], up[2], up[1])}


def in_groups(activation: Callable[[jax.Array], jax.Array]) -> Branch:
    """Rows in the order of their experts, by `jax.lax.ragged_dot`."""

    def branch(p: Params, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        scores, experts = (best[:, 0] for best in jax.lax.top_k(rows @ p["router"], 1))
        order, sizes = jnp.argsort(experts), jnp.bincount(experts, length=len(p["up"]))
        h = activation(jax.lax.ragged_dot(rows[order], p["up"], sizes))
        y = jax.lax.ragged_dot(h, p["down"], sizes)[jnp.argsort(order)]
        return (y * jax.nn.sigmoid(scores)[:, None]).reshape(x.shape)

    return branch


def test_experts_by_products_of_rows_in_groups() -> None:
    """And a control: without a nonlinearity between them they are no MLP."""
    roles = roles_of(routed, in_groups(jax.nn.gelu), SIZES | {"experts": 4})
    assert roles.refused == {}
    for name, group, axes, fan_in in (
        ("router", "block.router", ("embed", "experts"), ("embed",)),
        ("up", "block.expert_in", ("experts", "embed", "mlp"), ("embed",)),
        ("down", "block.expert_out", ("experts", "mlp", "embed"), ("mlp",)),
    ):
        spec = roles.specs[name]
        assert (spec.group, spec.axes, spec.fan_in) == (group, axes, fan_in)
    linear = roles_of(routed, in_groups(lambda h: h), SIZES | {"experts": 4})
    assert refusal(linear, "down", "up").startswith(
        "an index chooses among its matrices, and it is neither"
    )


def test_a_hidden_layer_that_is_neither_first_nor_last() -> None:
    # The control: between the two it is a hidden matrix. A gain of its norm is refused.

    def extra(s: Sizes) -> dict[str, tuple[int, ...]]:
        size = s["expert_dim"]
        return mlp(s) | {"mid": (s["mlp"], size), "down": (size, s["embed"]), "gain": (size,)}

    def branch(p: Params, x: jax.Array) -> jax.Array:
        h = jax.nn.gelu(jax.nn.gelu(x @ p["up"]) @ p["mid"])
        return (normed(h) * p["gain"]) @ p["down"]

    roles = roles_of(extra, branch, SIZES | {"expert_dim": 22})
    groups = [roles.specs[name].group for name in ("up", "mid", "down")]
    assert groups == ["block.mlp_in", "block.hidden", "block.mlp_out"]
    assert refusal(roles, "gain").startswith(
        "it multiplies a norm of what a nonlinearity made of the hidden"
    )


def vector(s: Sizes) -> dict[str, tuple[int, ...]]:
    return mlp(s) | {"w": (s["embed"],)}


@pytest.mark.parametrize(
    ("outside", "reason"),
    [
        (lambda p, x: x * p["w"], "it multiplies what no norm made, outside of all branches"),
        (
            lambda p, x: jnp.tanh(x) + p["w"],
            "it is added to no matrix's product, as neither their bias nor a position",
        ),
    ],
)
def test_vectors_without_a_matrix_or_norm(outside: Branch, reason: str) -> None:
    assert refusal(roles_of(vector, run_mlp, outside=outside), "w").startswith(reason)


def test_a_vector_after_a_branch_is_the_bias_of_its_last_matrix() -> None:
    # h + x @ down + w, which is (h + x @ down) + w.
    roles = roles_of(vector, run_mlp, outside=lambda p, x: x + p["w"])
    assert (roles.refused, roles.specs["w"].group) == ({}, "block.mlp_out.bias")


def test_a_norm_between_branches() -> None:
    # Post-norm: no declaration says whether depth rules apply to a gain of the stream itself.

    def outside(p: Params, x: jax.Array) -> jax.Array:
        x = normed(x) * p["w"]
        return x + jax.nn.gelu(x @ p["up2"]) @ p["down2"]

    def shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
        return vector(s) | {f"{name}2": shape for name, shape in mlp(s).items()}

    reason = refusal(roles_of(shapes, run_mlp, outside=outside), "w")
    assert reason.startswith("it acts on the stream itself between two branches")


BLOCK_GROUPS = {
    "up": "block.mlp_in", "down": "block.mlp_out", "q": "block.query", "k": "block.key",
    "v": "block.value", "o": "block.attention_out",
}  # fmt: skip
"""Groups of the matrices of an MLP and of attention."""


ON_THE_STREAM = "it acts on the stream itself between two branches"


@pytest.mark.parametrize(
    ("skip", "reason"),
    [
        (lambda p, x: normed(x) * p["w"], ON_THE_STREAM),
        (lambda p, x: normed(x) * jax.nn.sigmoid(p["w"]), "it meets other parameters before"),
    ],
)
def test_a_gain_of_the_stream_before_attention_is_no_learned_query(
    skip: Branch, reason: str
) -> None:
    def outside(p: Params, x: jax.Array) -> jax.Array:
        x = skip(p, x)
        return x + attend(jax.nn.softmax, "q", "k")(p, normed(x))

    roles = roles_of(lambda s: vector(s) | heads(s), run_mlp, ATTENTION, outside)
    assert refusal(roles, "w").startswith(reason)
    assert {name: roles.specs[name].group for name in BLOCK_GROUPS} == BLOCK_GROUPS


@pytest.mark.parametrize(
    "scaled",
    [
        lambda p, x: x * p["w"],
        lambda p, x: x / p["w"],
        lambda p, x: x * jax.nn.sigmoid(p["w"]),
        lambda p, x: x * p["mask"],
    ],
    ids=["factor", "divisor", "bounded", "mask"],
)
def test_what_scales_a_skip_connection_ends_no_stream(scaled: Branch) -> None:
    def build(s: Sizes) -> tuple[Any, Any, Any]:
        shapes = {"patch": (s["patch"], s["embed"]), "readout": (s["embed"], s["classes"])}
        shapes |= mlp(s) | heads(s) | {"w": (s["embed"],)}

        def loss(p: Params, batch: jax.Array) -> jax.Array:
            x = batch @ p["patch"]
            p = {**p, "mask": (batch > 0).any(-1, keepdims=True).astype(jnp.float32)}
            x = scaled(p, x) + attend(jax.nn.softmax, "q", "k")(p, normed(x))
            x = scaled(p, x) + run_mlp(p, normed(x))
            return jax.nn.logsumexp(x.mean(1) @ p["readout"], axis=-1).sum()

        return arrays(shapes), loss, arrays((2, s["position"], s["patch"]))

    roles = models.roles_of(build, ATTENTION)
    assert list(roles.refused) == ["w"]
    assert {name: roles.specs[name].group for name in BLOCK_GROUPS} == BLOCK_GROUPS


def test_sizes_that_are_no_axes() -> None:
    with pytest.raises(
        PresetError, match="no logical axis is named 'width'; the axes are layers, embed"
    ):
        roles_of(mlp, run_mlp, SIZES | {"width": 3})


def test_other_parameters_at_other_sizes() -> None:
    def extra(s: Sizes) -> dict[str, tuple[int, ...]]:
        return mlp(s) | ({"more": (s["embed"],)} if s["mlp"] > 20 else {})

    with pytest.raises(PresetError, match="with mlp 28 the model has other parameters: more"):
        roles_of(extra, run_mlp)
