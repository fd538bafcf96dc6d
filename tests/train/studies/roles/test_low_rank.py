"""Roles of low-rank adapters, and refusal of the two factors of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mupax import presets
from mupax.presets import adapters
from mupax.presets.roles import ParamSpec, PresetError, Role
from mupax.train.studies.roles import models
from mupax.zoo import configs
from mupax.zoo.transformer import LoraConfig
from tests.train.studies.roles.test_refusals import arrays, normed

TABLE = {"table": ("vocab", "embed")}
PAIR = {"a": ("embed", "rank"), "b": ("rank", "mlp")}
GATE = {"gate": ("embed", "mlp")}
SIZES = {"embed": 20, "heads": 4, "head_dim": 6, "mlp": 28, "vocab": 50, "position": 12, "rank": 9}
Params = Any
Embed = Callable[[Params, jax.Array], jax.Array]


def looked_up(p: Params, tokens: jax.Array) -> jax.Array:
    return p["table"][tokens]


def decoder(
    embed: Embed,
    shapes: Mapping[str, tuple[str, ...]],
    adapted: tuple[str, ...] = (),
    up: Callable[[Params, jax.Array], jax.Array] | None = None,
) -> models.Build:
    """Return a decoder of one block with parameters of its own, given by their axes.

    Args:
        embed: Function of parameters and tokens that returns the stream before the block.
        adapted: Matrices of the block that have adapters named NAME_a and NAME_b.
        up: Function in place of the product with the MLP's first matrix.
    """
    block = {
        "q": ("embed", "heads", "head_dim"),
        "k": ("embed", "heads", "head_dim"),
        "v": ("embed", "heads", "head_dim"),
        "o": ("heads", "head_dim", "embed"),
        "up": ("embed", "mlp"),
        "down": ("mlp", "embed"),
        "readout": ("embed", "vocab"),
    }

    def product(p: Params, name: str, sum_: str, x: jax.Array) -> jax.Array:
        y = jnp.einsum(sum_, x, p[name])
        if name not in adapted:
            return y
        inputs, rest = sum_.split(",")
        matrix, output = rest.split("->")
        summed = [letter for letter in matrix if letter in inputs]
        written = matrix.replace("".join(summed), "")
        low = jnp.einsum(f"{inputs},{''.join(summed)}r->btr", x, p[f"{name}_a"])
        return y + 2.0 * jnp.einsum(f"btr,r{written}->{output}", low, p[f"{name}_b"])

    def build(s: Mapping[str, int]) -> tuple[Any, Any, Any]:
        axes = {**block, **shapes}
        for name in adapted:
            fan_in = 2 if name == "o" else 1
            axes[f"{name}_a"] = (*axes[name][:fan_in], "rank")
            axes[f"{name}_b"] = ("rank", *axes[name][fan_in:])
        sizes = {name: tuple(s[axis] for axis in names) for name, names in axes.items()}

        def loss(p: Params, tokens: jax.Array) -> jax.Array:
            x = embed(p, tokens)
            y = normed(x)
            q, k, v = (product(p, name, "btd,dhn->bthn", y) for name in "qkv")
            weights = jax.nn.softmax(jnp.einsum("bthn,bshn->bhts", q, k))
            x = x + product(p, "o", "bthn,hnd->btd", jnp.einsum("bhts,bshn->bthn", weights, v))
            first = up(p, normed(x)) if up else product(p, "up", "btd,df->btf", normed(x))
            x = x + product(p, "down", "btf,fd->btd", jax.nn.gelu(first))
            scores = jax.nn.log_softmax(normed(x) @ p["readout"])
            return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], axis=-1))

        return arrays(sizes), loss, jax.ShapeDtypeStruct((2, s["position"]), jnp.int32)

    return build


def test_adapters_are_found_and_change_no_other_role() -> None:
    adapted = ("q", "k", "v", "o", "up", "down")
    sizes = {name: size for name, size in SIZES.items() if name != "rank"}
    plain = models.roles_of(decoder(looked_up, TABLE), sizes)
    roles = models.roles_of(decoder(looked_up, TABLE, adapted), SIZES)
    assert plain.refused == roles.refused == {}
    assert roles.specs.items() >= plain.specs.items()
    for name in adapted:
        pair = roles.specs[f"{name}_a"], roles.specs[f"{name}_b"]
        assert pair == adapters.pair(plain.specs[name])


def summed_first(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["up"] + (x @ p["a"] @ p["b"] + x @ p["a2"] @ p["b2"])


def concatenated(p: Params, x: jax.Array) -> jax.Array:
    low = x @ jnp.concatenate([p["a"], p["a2"]], 1)
    return x @ p["up"] + low[..., :9] @ p["b"] + low[..., 9:] @ p["b2"]


@pytest.mark.parametrize("up", [summed_first, concatenated])
def test_two_adapters_of_one_matrix_are_found(up: Callable[..., jax.Array]) -> None:
    shapes = TABLE | PAIR | {"a2": PAIR["a"], "b2": PAIR["b"]}
    roles = models.roles_of(decoder(looked_up, shapes, up=up), SIZES)
    assert roles.refused == {}
    pair = adapters.pair(roles.specs["up"])
    assert [roles.specs[name] for name in ("a", "b", "a2", "b2")] == [*pair, *pair]


def test_an_adapter_of_one_of_two_concatenated_matrices_names_that_matrix() -> None:
    def fused(p: Params, x: jax.Array) -> jax.Array:
        products = x @ jnp.concatenate([p["up"], p["gate"]], 1)
        size = p["up"].shape[1]
        return (products[..., :size] + x @ p["a"] @ p["b"]) * jax.nn.gelu(products[..., size:])

    roles = models.roles_of(decoder(looked_up, TABLE | PAIR | GATE, up=fused), SIZES)
    assert roles.evidence["a"].endswith("is added to the product of up")


NOT_LOW_RANK = {
    "nonlinearity": lambda p, x: x @ p["up"] + jax.nn.gelu(x @ p["a"]) @ p["b"],
    "norm": lambda p, x: x @ p["up"] + normed(x @ p["a"]) @ p["b"],
    "norm after": lambda p, x: x @ p["up"] + normed(x @ p["a"] @ p["b"]),
    "gate": lambda p, x: x @ p["up"] + x @ p["a"] @ p["b"] * jax.nn.sigmoid(x @ p["gate"]),
}


@pytest.mark.parametrize("up", NOT_LOW_RANK.values(), ids=NOT_LOW_RANK)
def test_what_is_more_than_a_product_of_two_matrices_is_no_adapter(
    up: Callable[..., jax.Array],
) -> None:
    roles = models.roles_of(decoder(looked_up, TABLE | PAIR | GATE, up=up), SIZES)
    for name in "ab":
        assert roles.refused[name].startswith("its axis rank is that of a low-rank adapter")


def test_a_matrix_that_two_adapters_share_is_refused_with_what_to_write() -> None:
    def shared(p: Params, x: jax.Array) -> jax.Array:
        low = x @ p["a"]
        return (x @ p["up"] + low @ p["b"]) * jax.nn.gelu(x @ p["gate"] + low @ p["b2"])

    shapes = TABLE | PAIR | GATE | {"b2": PAIR["b"]}
    roles = models.roles_of(decoder(looked_up, shapes, up=shared), SIZES)
    assert roles.refused == {
        "a": "its axis rank is that of a low-rank adapter, and b, b2 read its product; "
        "make a matrix for each of them"
    }


def test_a_gain_along_the_rank_is_no_factor_of_a_table() -> None:
    def scaled(p: Params, x: jax.Array) -> jax.Array:
        return x @ p["up"] + (x @ p["a"] * p["gain"]) @ p["b"]

    shapes: dict[str, tuple[str, ...]] = {**TABLE, **PAIR, "gain": ("rank",)}
    roles = models.roles_of(decoder(looked_up, shapes, up=scaled), SIZES)
    assert list(roles.refused) == ["gain"]
    assert "only its two matrices have roles" in roles.refused["gain"]


KINDS: dict[str, Embed] = {
    "lookup": lambda p, tokens: p["table"][tokens] + p["kinds"][tokens % 3],
    "one-hot": lambda p, tokens: p["table"][tokens] + jax.nn.one_hot(tokens % 3, 9) @ p["kinds"],
}


@pytest.mark.parametrize("embed", KINDS.values(), ids=KINDS)
def test_a_table_with_a_fixed_number_of_rows_is_a_table(embed: Embed) -> None:
    """As of BERT's token types."""
    sizes = {"input" if name == "rank" else name: n for name, n in SIZES.items()}
    shapes = TABLE | {"kinds": ("input", "embed")}
    roles = models.roles_of(decoder(embed, shapes), sizes)
    assert roles.refused == {}
    assert roles.specs["kinds"].role is Role.TOKEN_EMBEDDING


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_adapters_of_the_zoo_are_found_as_declared(layers: str) -> None:
    model = configs.get("lm-tiny")
    compute = dataclasses.replace(model.compute, layers=layers)  # pyright: ignore[reportArgumentType]
    lora = LoraConfig(rank=3, on=("attention", "mlp"))
    model = dataclasses.replace(
        model, depth=2, num_kv_heads=2, qk_norm=True, bias=True, lora=lora, compute=compute
    )
    roles = models.roles_of_config(model)
    assert roles.refused == {}
    assert models.differences(model, roles) == {}


def test_an_adapter_of_rank_1_is_refused_with_what_to_write() -> None:
    """A sum over a size of 1 leaves no trace, and the rank has no influence on roles."""
    lora = LoraConfig(rank=1, on=("mlp",))
    roles = models.roles_of_config(dataclasses.replace(configs.get("lm-tiny"), lora=lora))
    assert roles.refused
    for reason in roles.refused.values():
        assert reason.endswith(
            "trace the model with rank of 2 or more, as roles do not depend on sizes"
        )

    with pytest.raises(PresetError, match="the size of rank is 1; write 2 or more"):
        models.roles_of(decoder(looked_up, TABLE, ("up",)), SIZES | {"rank": 1})

    shapes = TABLE | {"a": ("embed", "one"), "b": ("one", "mlp")}

    def build(sizes: Mapping[str, int]) -> tuple[Any, Any, Any]:
        adapted = decoder(looked_up, shapes, up=lambda p, x: x @ p["up"] + x @ p["a"] @ p["b"])
        return adapted({**sizes, "one": 1})

    unnamed = {name: size for name, size in SIZES.items() if name != "rank"}
    roles = models.roles_of(build, unnamed)
    assert sorted(roles.refused) == ["a", "b"]
    assert "such as the rank of an adapter, name it" in roles.refused["a"]


def latent(axis: str) -> models.Build:
    """Return a decoder with latent attention: its keys and values read a few features, `axis`."""

    def build(s: Mapping[str, int]) -> tuple[Any, Any, Any]:
        head = (s["heads"], s["head_dim"])
        shapes = {
            "table": (s["vocab"], s["embed"]), "q": (s["embed"], *head), "squeeze": (s["embed"], s[axis]),
            "k": (s[axis], *head), "v": (s[axis], *head), "o": (*head, s["embed"]),
            "readout": (s["embed"], s["vocab"]),
        }  # fmt: skip

        def loss(p: Params, tokens: jax.Array) -> jax.Array:
            x = p["table"][tokens]
            y = normed(x)
            features = normed(y @ p["squeeze"])
            q = jnp.einsum("btd,dhn->bhtn", y, p["q"])
            k, v = (jnp.einsum("btr,rhn->bhtn", features, p[name]) for name in "kv")
            weights = jax.nn.softmax(q @ k.swapaxes(2, 3))
            x = x + jnp.einsum("bhtn,hnd->btd", weights @ v, p["o"])
            return jax.nn.logsumexp(normed(x) @ p["readout"], axis=-1).sum()

        return arrays(shapes), loss, jax.ShapeDtypeStruct((2, s["position"]), jnp.int32)

    return build


def latent_sizes(axis: str) -> dict[str, int]:
    sizes = {name: size for name, size in SIZES.items() if name not in ("rank", "mlp")}
    return sizes | {axis: 9}


@pytest.mark.parametrize("axis", ["rank", "input", "output"])
def test_latent_attention_of_a_fixed_rank_is_refused_and_is_no_cross_attention(axis: str) -> None:
    roles = models.roles_of(latent(axis), latent_sizes(axis))
    assert sorted(roles.refused) == ["k", "squeeze", "v"]
    for reason in roles.refused.values():
        assert "latent attention" in reason
        assert "let the rank grow with the width and name its size representation" in reason
    groups = {name: spec.group for name, spec in roles.specs.items()}
    assert groups == {
        "table": "token_embedding",
        "q": "block.query",
        "o": "block.attention_out",
        "readout": "readout",
    }


def test_latent_attention_whose_rank_grows_is_found_as_its_refusal_says() -> None:
    roles = models.roles_of(latent("representation"), latent_sizes("representation"))
    assert roles.refused == {}
    groups = {name: spec.group for name, spec in roles.specs.items()}
    assert groups == {
        "table": "token_embedding", "q": "block.query", "squeeze": "block.hidden",
        "k": "block.key", "v": "block.value", "o": "block.attention_out", "readout": "readout",
    }  # fmt: skip
    assert roles.specs["k"].axes == ("representation", "kv_heads", "head_dim")
    # Both fan-ins grow as the width does, so that both rates fall as 1/m.
    base = {"embed": 20, "representation": 9, "heads": 4, "kv_heads": 4}
    preset = presets.get("mup", base=base, form="plain")
    wide = {name: 4 * size for name, size in base.items()} | {"head_dim": 6}
    for name in ("squeeze", "k", "v"):
        assert preset.scales(roles.specs[name], wide).lr == 0.25


FACTORS: dict[str, Embed] = {
    "lookup": lambda p, tokens: p["table"][tokens] @ p["factor"],
    "one-hot": lambda p, tokens: jax.nn.one_hot(tokens, len(p["table"])) @ p["table"] @ p["factor"],
}


@pytest.mark.parametrize("axis", ["rank", "input"])
@pytest.mark.parametrize("embed", FACTORS.values(), ids=FACTORS)
def test_the_factors_of_a_table_are_refused_with_what_to_write(embed: Embed, axis: str) -> None:
    shapes = {"table": ("vocab", axis), "factor": (axis, "embed")}
    sizes = {
        "input" if name == "rank" and axis == "input" else name: n for name, n in SIZES.items()
    }
    roles = models.roles_of(decoder(embed, shapes), sizes)
    assert sorted(roles.refused) == ["factor", "table"]
    assert set(roles.refused.values()) == {
        "it is one of two factors of a table, of a fixed rank; make them one table of vocab x "
        "embed, or declare the table TOKEN_EMBEDDING with axes=('vocab', 'input'), "
        "shared=('embed',), and the factor PATCH_EMBEDDING with axes=('input', 'embed'), "
        "fan_in=('input',)"
    }
    table = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "input"), shared=("embed",))
    factor = ParamSpec(role=Role.PATCH_EMBEDDING, axes=("input", "embed"), fan_in=("input",))
    preset = presets.get("mup", base={"embed": 20})
    wide = {"embed": 40, "vocab": 50, "input": 9}
    scales = [preset.scales(spec, wide) for spec in (table, factor)]
    assert [(row.lr, row.eps) for row in scales] == [(1, 1), (1, 0.5)]


def test_factors_of_another_matrix_are_refused() -> None:
    def embed(p: Params, tokens: jax.Array) -> jax.Array:
        x = p["table"][tokens]
        return x + jax.nn.gelu(normed(x) @ p["a"] @ p["b"]) @ p["c"]

    shapes = TABLE | PAIR | {"c": ("mlp", "embed")}
    roles = models.roles_of(decoder(embed, shapes), SIZES)
    assert sorted(roles.refused) == ["a", "b"]
    assert roles.refused["a"].startswith("its axis rank is that of a low-rank adapter, x @ w + x @")
