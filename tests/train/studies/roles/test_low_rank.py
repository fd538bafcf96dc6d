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
from mupax.presets.roles import ParamSpec, Role
from mupax.train.studies.roles import models
from mupax.zoo import configs
from mupax.zoo.transformer import LoraConfig
from tests.train.studies.roles.test_refusals import normed

SIZES = {"embed": 20, "heads": 4, "head_dim": 6, "mlp": 28, "vocab": 50, "position": 12, "rank": 9}
Params = Any
Embed = Callable[[Params, jax.Array], jax.Array]


def decoder(
    embed: Embed, shapes: Mapping[str, tuple[str, ...]], adapted: tuple[str, ...] = ()
) -> models.Build:
    """Return a decoder of one block with parameters of its own, given by their axes.

    Args:
        embed: Function of parameters and tokens that returns the stream before the block.
        adapted: Matrices of the block that have adapters named NAME_a and NAME_b.
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
        params = {}
        for name, names in axes.items():
            params[name] = jax.ShapeDtypeStruct(tuple(s[axis] for axis in names), jnp.float32)

        def loss(p: Params, tokens: jax.Array) -> jax.Array:
            x = embed(p, tokens)
            y = normed(x)
            q, k, v = (product(p, name, "btd,dhn->bthn", y) for name in "qkv")
            weights = jax.nn.softmax(jnp.einsum("bthn,bshn->bhts", q, k))
            x = x + product(p, "o", "bthn,hnd->btd", jnp.einsum("bhts,bshn->bthn", weights, v))
            hidden = jax.nn.gelu(product(p, "up", "btd,df->btf", normed(x)))
            x = x + product(p, "down", "btf,fd->btd", hidden)
            scores = jax.nn.log_softmax(normed(x) @ p["readout"])
            return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], axis=-1))

        return params, loss, jax.ShapeDtypeStruct((2, s["position"]), jnp.int32)

    return build


def test_adapters_are_found_and_change_no_other_role() -> None:
    def embed(p: Params, tokens: jax.Array) -> jax.Array:
        return p["table"][tokens]

    tables = {"table": ("vocab", "embed")}
    adapted = ("q", "k", "v", "o", "up", "down")
    plain = models.roles_of(decoder(embed, tables), {k: n for k, n in SIZES.items() if k != "rank"})
    roles = models.roles_of(decoder(embed, tables, adapted), SIZES)
    assert plain.refused == roles.refused == {}
    for name, spec in plain.specs.items():
        assert roles.specs[name] == spec, name
    for name in adapted:
        assert (roles.specs[f"{name}_a"], roles.specs[f"{name}_b"]) == adapters.pair(
            plain.specs[name]
        )


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

    shapes = {"a": ("embed", "rank"), "b": ("rank", "mlp"), "c": ("mlp", "embed")}
    roles = models.roles_of(decoder(embed, {"table": ("vocab", "embed"), **shapes}), SIZES)
    assert sorted(roles.refused) == ["a", "b"]
    assert roles.refused["a"].startswith("its axis rank is that of a low-rank adapter, x @ w + x @")
