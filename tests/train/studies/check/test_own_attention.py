"""`check.study` on a user's attention, with as few seeds as a page shows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import presets, zoo
from mupax.presets import ParamSpec, Role
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check

HEADS = 4
POSITIONS = 8
VOCAB = 16
CLASSES = 10
BASE = {"embed": 32, "head_dim": 8, "heads": HEADS, "kv_heads": HEADS}


class Attention(nnx.Module):
    """One attention between a table and a readout, without norms' gains.

    Args:
        power: Attention logits are multiplied by head_dim^power.
    """

    def __init__(self, width: int, power: float) -> None:
        self.head_dim = width // HEADS
        self.power = power
        self.sizes = {
            "embed": width,
            "heads": HEADS,
            "kv_heads": HEADS,
            "head_dim": self.head_dim,
            "vocab": VOCAB,
            "classes": CLASSES,
        }
        self.table = self.parameter(Role.TOKEN_EMBEDDING, ("vocab", "embed"))
        self.query = self.parameter(Role.QUERY, ("embed", "heads", "head_dim"), 1)
        self.key = self.parameter(Role.KEY, ("embed", "kv_heads", "head_dim"), 1)
        self.value = self.parameter(Role.VALUE, ("embed", "kv_heads", "head_dim"), 1)
        self.out = self.parameter(Role.ATTENTION_OUT, ("heads", "head_dim", "embed"), 2)
        self.readout = self.parameter(Role.READOUT, ("embed", "classes"), 1)

    def parameter(self, role: Role, axes: tuple[str, ...], num_fan_in: int = 0) -> nnx.Param:
        """Return a parameter of zeros whose first axes are its fan-in."""
        in_block = role in (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT)
        spec = ParamSpec(role=role, axes=axes, fan_in=axes[:num_fan_in], in_block=in_block)
        return nnx.Param(jnp.zeros([self.sizes[axis] for axis in axes]), spec=spec)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = self.table[...][inputs]
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
        matrices = (self.query, self.key, self.value)
        q, k, v = (jnp.einsum("btd,dhn->bthn", normed, matrix[...]) for matrix in matrices)
        logits = jnp.einsum("bthn,bshn->bhts", q, k) * self.head_dim**self.power
        read = jnp.einsum("bhts,bshn->bthn", jax.nn.softmax(logits), v)
        x = x + jnp.einsum("bthn,hnd->btd", read, self.out[...])
        x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
        return x.mean(1) @ self.readout[...]


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "inputs": rng.integers(0, VOCAB, (16, POSITIONS)).astype(np.int32),
        "targets": rng.integers(0, CLASSES, 16).astype(np.int32),
        "weights": np.ones(16, np.float32),
    }


@pytest.mark.parametrize(
    ("power", "failed"), [(-1.0, set()), (0.0, {"gradient/block.query", "gradient/block.key"})]
)
def test_attention_without_a_scale_is_caught_with_two_seeds(power: float, failed: set[str]) -> None:
    models = [
        zoo.define(lambda width=width: Attention(width, power), sizes={"layers": 1})
        for width in (32, 64, 128)
    ]
    adam = OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
    findings = check.study(models, presets.get("mup", base=BASE), adam, batch(), seeds=2)
    assert {finding.observable for finding in findings if not finding.ok} == failed


class Shown(Attention):
    """The same attention, whose logits a check can read."""

    def internals(self, inputs: jax.Array) -> dict[str, jax.Array]:
        x = self.table[...][inputs]
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
        q, k = (jnp.einsum("btd,dhn->bthn", normed, w[...]) for w in (self.query, self.key))
        logits_BHTS = jnp.einsum("bthn,bshn->bhts", q, k) * self.head_dim**self.power
        return {"attention": logits_BHTS[None]}


@pytest.mark.parametrize("model", [Attention, Shown])
def test_the_summary_says_if_attention_logits_are_not_observed(model: type[Attention]) -> None:
    models = [
        zoo.define(lambda width=width: model(width, -0.5), sizes={"layers": 1})
        for width in (32, 64, 128)
    ]
    adam = OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
    findings = check.study(models, presets.get("mup", base=BASE), adam, batch(), seeds=1)
    failed = {finding.observable for finding in findings if not finding.ok}
    assert ("attention" in failed) == (model is Shown)
    unseen = "attention logits are not observed: give the model a method internals(inputs)"
    assert (unseen in check.text(findings)) == (model is Attention)
