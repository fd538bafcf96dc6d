"""A decoder of Equinox on Python's own sources: `python -m examples.equinox_transformer --width 128`.

Modules are pytrees: what trains is `eqx.filter(model, eqx.is_inexact_array)`, and `SPECS` declares those leaves by their path. Weights are
[out, in], and those of attention have all heads in one dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

from examples import loop
from examples.loop import LENGTH, VOCAB
from mupax import presets, train, zoo
from mupax.presets import ParamSpec, Role

DEPTH, HEADS = 2, 4


class Block(eqx.Module):
    """Attention and an MLP, each after a norm, [T, D] to [T, D]."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array) -> None:
        keys, biases = (
            jax.random.split(key),
            [f"use_{part}_bias" for part in ("query", "key", "value", "output")],
        )
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(
            HEADS, width, **dict.fromkeys(biases, True), key=keys[0]
        )
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, h_TD: jax.Array) -> jax.Array:
        x_TD = jax.vmap(self.norms[0])(h_TD)
        h_TD = h_TD + self.attention(
            x_TD, x_TD, x_TD, mask=jnp.tril(jnp.ones((len(h_TD), len(h_TD)), bool))
        )
        return h_TD + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(h_TD))


class Decoder(eqx.Module):
    """Bytes [T] to logits [T, 128]."""

    token: eqx.nn.Embedding
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    readout: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array) -> None:
        keys = jax.random.split(key, DEPTH + 2)
        self.token, self.position = (
            eqx.nn.Embedding(VOCAB, width, key=keys[0]),
            jnp.zeros((LENGTH, width)),
        )
        self.blocks = [Block(width, each) for each in keys[2:]]
        self.norm, self.readout = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, VOCAB, key=keys[1])

    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        h_TD = jax.vmap(self.token)(tokens_T) + self.position
        for block in self.blocks:
            h_TD = block(h_TD)
        return jax.vmap(self.readout)(jax.vmap(self.norm)(h_TD))


def of_block(role: Role, axes: tuple[str, ...], fan_in: tuple[str, ...]) -> ParamSpec:
    """The declaration of one block's matrix."""
    return ParamSpec(role=role, axes=axes, fan_in=fan_in, in_block=True)


HEAD, GROUP = ("heads", "head_dim"), ("kv_heads", "head_dim")
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
    """The sizes that grow, at this width: what a preset is relative to."""
    return {
        "embed": width,
        "mlp": 4 * width,
        "heads": HEADS,
        "kv_heads": HEADS,
        "head_dim": width // HEADS,
        "layers": DEPTH,
    }


def definition(width: int) -> zoo.FunctionDefinition:
    """The model of this width, without its numbers."""
    shapes = eqx.filter_eval_shape(Decoder, width, jax.random.key(0))
    params, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return zoo.define_function(
        lambda params, tokens_BT: jax.vmap(eqx.combine(params, static))(tokens_BT),
        params,
        SPECS,
        sizes={"layers": DEPTH, "heads": HEADS, "kv_heads": HEADS},
    )


def run(width: int, preset: presets.Preset, steps: int) -> Callable[..., jax.Array]:
    """A training as a function of its learning rate and seed, to the loss of every step."""
    config = train.OptimizerConfig(name="adamw", weight_decay=0.1, warmup_steps=steps // 10)
    model, data = train.parameterize(definition(width), preset, config), loop.text(steps)
    return lambda lr, seed: loop.losses(model, model.optimizer(steps, lr), data, seed)


def main(
    width: int = 64, preset: str = "mup", lr: float = 2**-6, steps: int = 200, seed: int = 0
) -> None:
    """Trains a model of `width` under `preset`: the best learning rate stays as the width grows."""
    loop.report(
        run(width, presets.get(preset, base=base(32)), steps),
        f"width {width} under {preset}",
        lr,
        seed,
    )


if __name__ == "__main__":
    tyro.cli(main)
