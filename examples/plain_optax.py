"""A residual MLP of plain arrays on the digits, trained by a plain optax chain: `python -m examples.plain_optax --width 512`.

No library of models, and no optimizer of mupax: the parameters are a dict of dicts and lists, and the chain is made here, from the
numbers that the preset gives every parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

from examples import loop
from mupax import presets, train, zoo
from mupax.presets import ParamSpec, Role

PIXELS, CLASSES, DEPTH = 64, 10, 2


def network(params: Any, images_BHWC: jax.Array) -> jax.Array:
    """Images [B, 8, 8, 1] to logits [B, 10]."""
    h_BD = images_BHWC.reshape(-1, PIXELS) @ params["read"]["w"] + params["read"]["b"]
    for block in params["blocks"]:
        x_BD = block["gain"] * h_BD / jnp.sqrt(jnp.mean(h_BD**2, axis=-1, keepdims=True) + 1e-5)
        h_BD = (
            h_BD
            + jax.nn.relu(x_BD @ block["up"]["w"] + block["up"]["b"]) @ block["down"]["w"]
            + block["down"]["b"]
        )
    h_BD = params["gain"] * h_BD / jnp.sqrt(jnp.mean(h_BD**2, axis=-1, keepdims=True) + 1e-5)
    return h_BD @ params["readout"]["w"] + params["readout"]["b"]


def shapes(width: int) -> dict[str, Any]:
    """The parameters' shapes, in their tree."""

    def linear(inputs: int, outputs: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"w": array(inputs, outputs), "b": array(outputs)}

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {"gain": array(width), "up": linear(width, 4 * width), "down": linear(4 * width, width)}
    ends = {"read": linear(PIXELS, width), "readout": linear(width, CLASSES)}
    return {**ends, "gain": array(width), "blocks": [block] * DEPTH}


MATRICES = {
    "read": ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",)),
    "blocks.*.up": ParamSpec(
        role=Role.MLP_IN, axes=("embed", "mlp"), fan_in=("embed",), in_block=True
    ),
    "blocks.*.down": ParamSpec(
        role=Role.MLP_OUT, axes=("mlp", "embed"), fan_in=("mlp",), in_block=True
    ),
    "readout": ParamSpec(role=Role.READOUT, axes=("embed", "classes"), fan_in=("embed",)),
}
SPECS = {
    **{f"{name}.w": spec for name, spec in MATRICES.items()},
    **{f"{name}.b": spec.bias for name, spec in MATRICES.items()},
    "blocks.*.gain": ParamSpec(role=Role.NORM_GAIN, axes=("embed",), in_block=True),
    "gain": ParamSpec(role=Role.NORM_GAIN, axes=("embed",)),
}


def base(width: int) -> dict[str, int]:
    """The sizes that grow, at this width: what a preset is relative to."""
    return {"embed": width, "mlp": 4 * width, "layers": DEPTH}


def definition(width: int) -> zoo.FunctionDefinition:
    """The model of this width, without its numbers."""
    return zoo.define_function(network, shapes(width), SPECS, sizes={"layers": DEPTH})


def adamw(
    scales: Any, schedule: optax.Schedule, decay: float = 0.1, eps: float = 1e-8
) -> optax.GradientTransformation:
    """AdamW with a rate, an eps and a decay for every parameter, of optax's own parts.

    Gradients over the scale of eps are the same as eps times it: m / (sqrt(v) + eps * e) is (m/e) / (sqrt(v)/e + eps).
    """

    def each(rule: Callable) -> optax.GradientTransformation:
        return optax.stateless(lambda updates, params: jax.tree.map(rule, updates, params, scales))

    return optax.chain(
        each(lambda g, w, of: g / of.eps),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=eps),
        each(lambda u, w, of: u + decay * of.weight_decay * w),
        each(lambda u, w, of: u * of.lr),
        optax.scale_by_learning_rate(schedule),
    )


def run(width: int, preset: presets.Preset, steps: int) -> Callable[..., jax.Array]:
    """A training as a function of its learning rate and seed, to the loss of every step."""
    model, data = (
        train.parameterize(definition(width), preset, train.OptimizerConfig(name="adamw")),
        loop.digits(steps),
    )

    def losses(lr: float | jax.Array, seed: int | jax.Array) -> jax.Array:
        shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
        return loop.losses(model, adamw(model.scales, lambda step: lr * shape(step)), data, seed)

    return losses


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
