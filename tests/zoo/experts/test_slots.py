"""Slots of experts: what they are filled with and what is collected, with the gradients of plain lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.experts import layer
from mupax.zoo.experts.layer import Slots
from mupax.zoo.experts.routing import Choice
from mupax.zoo.transformer import RoutingConfig

MODEL = DecoderConfig(
    width=8, depth=1, num_heads=2, vocab_size=11, seq_len=12, norm="rmsnorm", activation="swiglu", bias=True,
    experts=4, active_experts=2, expert_dim=5, routing=RoutingConfig(capacity_factor=0.75), compute=ComputeConfig(attention="xla"),
)  # fmt: skip


@jax.jit
def looked(place_TA: jax.Array, x: jax.Array) -> dict[str, Any]:
    slots = Slots.from_places(place_TA, 4)
    filled, back = jax.vjp(slots.filled, x)
    return {
        "rows": slots.rows_S,
        "filled": filled[..., 0],
        "weights": slots.weights(jnp.arange(1.0, 7.0).reshape(3, 2)),
        "collected": slots.collected(filled)[..., 0],
        "gradient": back(jnp.array([1.0, 2.0, 3.0, 50.0])[:, None])[0][..., 0],
    }


def test_slots_have_their_tokens_and_no_other() -> None:
    """Three tokens of two experts each and four slots, one of them empty, which has any token's; two rows find no room."""
    slots = looked(
        np.array([[0, 4], [2, 1], [4, 4]]), np.array([[1.0], [10.0], [100.0]], np.float32)
    )
    assert {name: x.tolist() for name, x in slots.items()} == {
        "rows": [0, 3, 2, 6],
        "filled": [1, 10, 10, 100],
        "weights": [1, 4, 3, 0],
        "collected": [1, 20, 0],
        "gradient": [1, 5, 0],
    }


def by_masks(
    expert: Callable[..., jax.Array],
    x_BTD: jax.Array,
    choice: Choice,
    capacity: int,
    weights: layer.Weights,
    **_: Any,
) -> jax.Array:
    """Every token through every expert, times its gate where it has room."""
    experts_E1 = jnp.arange(len(weights["up"]))[:, None, None, None]
    assert choice.slots_BTA is not None
    routed_EBTA = (choice.experts_BTA == experts_E1) & (choice.slots_BTA < capacity)
    gates_EBT = jnp.sum(jnp.where(routed_EBTA, choice.weights_BTA, 0), axis=-1)
    x_ECD = jnp.broadcast_to(
        x_BTD.reshape(-1, x_BTD.shape[-1]), (len(gates_EBT), gates_EBT[0].size, x_BTD.shape[-1])
    )
    return jnp.sum(
        expert(x_ECD[None], gates_EBT.reshape(1, len(gates_EBT), -1), weights), axis=(0, 1)
    ).reshape(x_BTD.shape)


def test_slots_are_masks_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients of a model, against every token through every expert; tokens are dropped."""
    model_definition, random = definition(MODEL), np.random.default_rng(0)
    params = {
        name: random.normal(size=x.shape).astype("f4")
        for name, x in model_definition.abstract.items()
    }
    factors = {
        name: np.full(each["shape"], 0.7, np.float32)
        for name, each in model_definition.factors.items()
    }
    tokens, g_BTV = random.integers(0, 11, (2, 12)), random.normal(size=(2, 12, 11))

    def pulled() -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits: Any = model_definition.bind(params, factors)(tokens)  # pyright: ignore[reportCallIssue]
            return jnp.sum(logits * g_BTV), logits

        (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return {"logits": logits, **gradients}

    theirs = pulled()
    monkeypatch.setattr(layer, "by_slots", by_masks)
    for name, ours in pulled().items():
        size = np.abs(theirs[name]).max()
        assert size > 0, name
        np.testing.assert_allclose(ours, theirs[name], rtol=0, atol=3e-6 * size, err_msg=name)
