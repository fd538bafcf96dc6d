"""Decoder of flax.linen on Python's sources: `python -m examples.linen_transformer --width 128`.

The model is linen without anything of mupax, with heads, biases and norm gains. `SPECS` declares
its parameters by their path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro

from examples import loop
from examples.loop import LENGTH, VOCAB
from mupax import presets, train, zoo
from mupax.presets import ParamSpec, Role

DEPTH = 2
HEADS = 4


class Decoder(nn.Module):
    """Decoder from bytes [B, T] to logits [B, T, 128]."""

    width: int

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        h_BTD = nn.Embed(VOCAB, self.width, name="token")(tokens_BT)
        h_BTD += self.param("position", nn.initializers.normal(0.02), (LENGTH, self.width))
        mask = nn.make_causal_mask(tokens_BT)
        for layer in range(DEPTH):
            attention = nn.MultiHeadDotProductAttention(HEADS, name=f"attention_{layer}")
            h_BTD += attention(nn.LayerNorm(name=f"norm_{layer}_0")(h_BTD), mask=mask)
            x_BTD = nn.LayerNorm(name=f"norm_{layer}_1")(h_BTD)
            hidden_BTF = nn.Dense(4 * self.width, name=f"up_{layer}")(x_BTD)
            h_BTD += nn.Dense(self.width, name=f"down_{layer}")(nn.gelu(hidden_BTF))
        return nn.Dense(VOCAB, name="readout")(nn.LayerNorm(name="norm")(h_BTD))


def of_block(role: Role, axes: tuple[str, ...], fan_in: tuple[str, ...]) -> ParamSpec:
    """Return the `ParamSpec` of a weight matrix inside a block (`in_block=True`)."""
    return ParamSpec(role=role, axes=axes, fan_in=fan_in, in_block=True)


HEAD = ("heads", "head_dim")
QUERY = of_block(Role.QUERY, ("embed", *HEAD), ("embed",))
KEY = of_block(Role.KEY, ("embed", "kv_heads", "head_dim"), ("embed",))
VALUE = of_block(Role.VALUE, ("embed", "kv_heads", "head_dim"), ("embed",))
OUT = of_block(Role.ATTENTION_OUT, (*HEAD, "embed"), HEAD)
UP = of_block(Role.MLP_IN, ("embed", "mlp"), ("embed",))
DOWN = of_block(Role.MLP_OUT, ("mlp", "embed"), ("mlp",))
READOUT = ParamSpec(role=Role.READOUT, axes=("embed", "vocab"), fan_in=("embed",))
SPECS = {
    "token.embedding": ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed")),
    "position": ParamSpec(role=Role.POSITION, axes=("position", "embed")),
    "norm_*.scale": ParamSpec(role=Role.NORM_GAIN, axes=("embed",), in_block=True),
    "norm_*.bias": ParamSpec(role=Role.BIAS, axes=("embed",), in_block=True, of=Role.NORM_GAIN),
    "norm.scale": ParamSpec(role=Role.NORM_GAIN, axes=("embed",)),
    "norm.bias": ParamSpec(role=Role.BIAS, axes=("embed",), of=Role.NORM_GAIN),
}
MATRICES = {
    "attention_*.query": QUERY,
    "attention_*.key": KEY,
    "attention_*.value": VALUE,
    "attention_*.out": OUT,
    "up_*": UP,
    "down_*": DOWN,
    "readout": READOUT,
}
SPECS |= {f"{name}.kernel": spec for name, spec in MATRICES.items()}
SPECS |= {f"{name}.bias": spec.bias for name, spec in MATRICES.items()}


def definition(width: int) -> zoo.FunctionDefinition:
    """Return the declared model of a width, with shapes instead of arrays."""
    model = Decoder(width)
    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def logits(params: Any, tokens_BT: jax.Array) -> Any:
        return model.apply({"params": params}, tokens_BT)

    return zoo.define_function(logits, shapes, SPECS, sizes={"layers": DEPTH})


def base(width: int) -> dict[str, int]:
    """Return the sizes, by logical axis, of a base model of this width for `presets.get`."""
    return {
        "embed": width,
        "mlp": 4 * width,
        "heads": HEADS,
        "kv_heads": HEADS,
        "head_dim": width // HEADS,
        "layers": DEPTH,
    }


def run(width: int, preset: presets.Preset, steps: int) -> Callable[..., jax.Array]:
    """Return a function of learning rate and seed that trains and returns each step's loss."""
    config = train.OptimizerConfig(name="adamw", weight_decay=0.1, warmup_steps=steps // 10)
    model = train.parameterize(definition(width), preset, config)
    data = loop.text(steps)
    return lambda lr, seed: loop.losses(model, model.optimizer(steps, lr), data, seed)


def main(
    width: int = 64, preset: str = "mup", lr: float = 2**-6, steps: int = 200, seed: int = 0
) -> None:
    """Train a model of `width` under `preset`: the best learning rate stays as the width grows."""
    relative = presets.get(preset, base=base(32))
    training = run(width, relative, steps)
    loop.report(training, f"width {width} under {preset}", lr, seed)


if __name__ == "__main__":
    tyro.cli(main)
