"""Vision transformer of Flax NNX on the digits: `python -m examples.foreign_nnx --width 128`.

The model is NNX without anything of mupax. `SPECS` declares its `nnx.Param`s by their path. A
convolution reads patches, and its four dimensions are two axes: `patch` and `embed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import tyro
from flax import nnx

from examples import loop
from mupax import presets, train, zoo
from mupax.presets import ParamSpec, Role

CLASSES = 10
PATCHES = 16
DEPTH = 2
HEADS = 4


class Block(nnx.Module):
    """Block of attention and an MLP, each after a norm: [B, P, D] to [B, P, D]."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, h_BPD: jax.Array) -> jax.Array:
        h_BPD = h_BPD + self.attention(self.attention_norm(h_BPD))
        hidden_BPF = nnx.gelu(self.up(self.mlp_norm(h_BPD)))
        return h_BPD + self.down(hidden_BPF)


class ViT(nnx.Module):
    """Vision transformer from images [B, 8, 8, 1] to logits [B, 10]."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.patch = nnx.Conv(1, width, (2, 2), (2, 2), rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (PATCHES, width)))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.readout = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        patches = self.patch(images_BHWC)
        h_BPD = patches.reshape(len(patches), PATCHES, -1) + self.position[...]
        for block in self.blocks:
            h_BPD = block(h_BPD)
        return self.readout(self.norm(h_BPD).mean(axis=1))


def of_block(role: Role, axes: tuple[str, ...], fan_in: tuple[str, ...]) -> ParamSpec:
    """Return the `ParamSpec` of a weight matrix inside a block (`in_block=True`)."""
    return ParamSpec(role=role, axes=axes, fan_in=fan_in, in_block=True)


HEAD = ("heads", "head_dim")
GROUP = ("kv_heads", "head_dim")
MATRICES = {
    "patch": ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",)),
    "blocks.*.query": of_block(Role.QUERY, ("embed", *HEAD), ("embed",)),
    "blocks.*.key": of_block(Role.KEY, ("embed", *GROUP), ("embed",)),
    "blocks.*.value": of_block(Role.VALUE, ("embed", *GROUP), ("embed",)),
    "blocks.*.out": of_block(Role.ATTENTION_OUT, (*HEAD, "embed"), HEAD),
    "blocks.*.up": of_block(Role.MLP_IN, ("embed", "mlp"), ("embed",)),
    "blocks.*.down": of_block(Role.MLP_OUT, ("mlp", "embed"), ("mlp",)),
    "readout": ParamSpec(role=Role.READOUT, axes=("embed", "classes"), fan_in=("embed",)),
}
SPECS = {
    "position": ParamSpec(role=Role.POSITION, axes=("position", "embed")),
    **{f"{name}.kernel": spec for name, spec in MATRICES.items()},
    **{f"{name}.bias": spec.bias for name, spec in MATRICES.items()},
}
for norm, in_block in {"blocks.*_norm": True, "norm": False}.items():
    SPECS[f"{norm}.scale"] = ParamSpec(role=Role.NORM_GAIN, axes=("embed",), in_block=in_block)
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
    model = nnx.eval_shape(lambda: ViT(width, nnx.Rngs(0)))
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def logits(params: Any, images_BHWC: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, state)(images_BHWC)

    return zoo.define_function(logits, params, SPECS, sizes={"layers": DEPTH})


def run(width: int, preset: presets.Preset, steps: int) -> Callable[..., jax.Array]:
    """Return a function of learning rate and seed that trains and returns each step's loss."""
    config = train.OptimizerConfig(name="adamw", weight_decay=0.1, warmup_steps=steps // 10)
    model = train.parameterize(definition(width), preset, config)
    data = loop.digits(steps)
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
