"""Decoder of Equinox on Python's own sources: `python -m examples.equinox_transformer --width 128`.

Modules of Equinox are pytrees. The trained leaves are `eqx.filter(model, eqx.is_inexact_array)`,
and `SPECS` declares them by their path. Weights are [out, in]. Weights of attention have all heads
in one dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

from examples import loop
from examples.loop import LENGTH, VOCAB
from mupax import presets, train, zoo
from mupax.presets import ParamSpec, Role

DEPTH = 2
HEADS = 4


class Block(eqx.Module):
    """Block of attention and an MLP, each after a norm: [T, D] to [T, D]."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(
            HEADS,
            width,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=keys[0],
        )
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, h_TD: jax.Array) -> jax.Array:
        x_TD = jax.vmap(self.norms[0])(h_TD)
        causal_TT = jnp.tril(jnp.ones((len(h_TD), len(h_TD)), bool))
        h_TD = h_TD + self.attention(x_TD, x_TD, x_TD, mask=causal_TT)
        x_TD = jax.vmap(self.norms[1])(h_TD)
        return h_TD + jax.vmap(self.mlp)(x_TD)


class Decoder(eqx.Module):
    """Decoder from bytes [T] to logits [T, 128]."""

    token: eqx.nn.Embedding
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    readout: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array) -> None:
        keys = jax.random.split(key, DEPTH + 2)
        self.token = eqx.nn.Embedding(VOCAB, width, key=keys[0])
        self.position = jnp.zeros((LENGTH, width))
        self.blocks = [Block(width, block_key) for block_key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.readout = eqx.nn.Linear(width, VOCAB, key=keys[1])

    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        h_TD = jax.vmap(self.token)(tokens_T) + self.position
        for block in self.blocks:
            h_TD = block(h_TD)
        x_TD = jax.vmap(self.norm)(h_TD)
        return jax.vmap(self.readout)(x_TD)


def of_block(role: Role, axes: tuple[str, ...], fan_in: tuple[str, ...]) -> ParamSpec:
    """Return the `ParamSpec` of a weight matrix inside a block (`in_block=True`)."""
    return ParamSpec(role=role, axes=axes, fan_in=fan_in, in_block=True)


HEAD = ("heads", "head_dim")
GROUP = ("kv_heads", "head_dim")
MATRICES = {
    "blocks.*.query_proj": of_block(Role.QUERY, (*HEAD, "embed"), ("embed",)),
    "blocks.*.key_proj": of_block(Role.KEY, (*GROUP, "embed"), ("embed",)),
    "blocks.*.value_proj": of_block(Role.VALUE, (*GROUP, "embed"), ("embed",)),
    "blocks.*.output_proj": of_block(Role.ATTENTION_OUT, ("embed", *HEAD), HEAD),
    "blocks.*.mlp.layers.0": of_block(Role.MLP_IN, ("mlp", "embed"), ("embed",)),
    "blocks.*.mlp.layers.1": of_block(Role.MLP_OUT, ("embed", "mlp"), ("mlp",)),
    "readout": ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",)),
}
SPECS = {
    "token.weight": ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed")),
    "position": ParamSpec(role=Role.POSITION, axes=("position", "embed")),
    **{f"{name}.weight": spec for name, spec in MATRICES.items()},
    **{f"{name}.bias": spec.bias for name, spec in MATRICES.items()},
}
for norm, in_block in {"blocks.*.norms.*": True, "norm": False}.items():
    SPECS[f"{norm}.weight"] = ParamSpec(role=Role.NORM_GAIN, axes=("embed",), in_block=in_block)
    SPECS[f"{norm}.bias"] = ParamSpec(
        role=Role.BIAS, axes=("embed",), in_block=in_block, of=Role.NORM_GAIN
    )


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


def definition(width: int) -> zoo.FunctionDefinition:
    """Return the declared model of a width, with shapes instead of arrays."""
    shapes = eqx.filter_eval_shape(Decoder, width, jax.random.key(0))
    params, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def logits(params: Any, tokens_BT: jax.Array) -> jax.Array:
        model = eqx.combine(params, static)
        return jax.vmap(model)(tokens_BT)

    # All heads are in one dimension of a weight, so that shapes do not tell their number.
    sizes = {"layers": DEPTH, "heads": HEADS, "kv_heads": HEADS}
    return zoo.define_function(logits, params, SPECS, sizes=sizes)


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
