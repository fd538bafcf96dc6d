"""Residual MLP of plain arrays with plain optax: `python -m examples.plain_optax --width 512`.

It uses no library of models and no optimizer of mupax. The parameters are a dict of dicts and
lists. The optax chain is made here, from the values that the preset gives every parameter.
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

PIXELS = 64
CLASSES = 10
DEPTH = 2


def network(params: Any, images_BHWC: jax.Array) -> jax.Array:
    """Return logits [B, 10] of images [B, 8, 8, 1]."""
    h_BD = images_BHWC.reshape(-1, PIXELS) @ params["read"]["w"] + params["read"]["b"]
    for block in params["blocks"]:
        x_BD = block["gain"] * h_BD / jnp.sqrt(jnp.mean(h_BD**2, axis=-1, keepdims=True) + 1e-5)
        hidden_BF = jax.nn.relu(x_BD @ block["up"]["w"] + block["up"]["b"])
        h_BD = h_BD + hidden_BF @ block["down"]["w"] + block["down"]["b"]
    h_BD = params["gain"] * h_BD / jnp.sqrt(jnp.mean(h_BD**2, axis=-1, keepdims=True) + 1e-5)
    return h_BD @ params["readout"]["w"] + params["readout"]["b"]


def shapes(width: int) -> dict[str, Any]:
    """Return the shapes of all parameters, as a tree of dicts and lists."""

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
    """Return the sizes, by logical axis, of a base model of this width for `presets.get`."""
    return {"embed": width, "mlp": 4 * width, "layers": DEPTH}


def definition(width: int) -> zoo.FunctionDefinition:
    """Return the declared model of a width, with shapes instead of arrays."""
    return zoo.define_function(network, shapes(width), SPECS, sizes={"layers": DEPTH})


def adamw(
    scales: Any, schedule: optax.Schedule, decay: float = 0.1, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Return AdamW whose rate, eps and decay have a factor per parameter, made of optax's parts.

    Args:
        scales: Tree like the parameters. A leaf has the factors `lr`, `eps` and `weight_decay`.
        schedule: Learning rate of each step, before the factor `lr`.
    """

    def per_parameter(rule: Callable) -> optax.GradientTransformation:
        return optax.stateless(lambda updates, params: jax.tree.map(rule, updates, params, scales))

    return optax.chain(
        # optax has one eps. With a scale e of eps, m / (sqrt(v) + eps e) is
        # (m/e) / (sqrt(v)/e + eps): gradients are divided by e.
        per_parameter(lambda grad, param, scale: grad / scale.eps),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=eps),
        per_parameter(lambda update, param, scale: update + decay * scale.weight_decay * param),
        per_parameter(lambda update, param, scale: update * scale.lr),
        optax.scale_by_learning_rate(schedule),
    )


def run(width: int, preset: presets.Preset, steps: int) -> Callable[..., jax.Array]:
    """Return a function of learning rate and seed that trains and returns each step's loss."""
    config = train.OptimizerConfig(name="adamw")
    model = train.parameterize(definition(width), preset, config)
    data = loop.digits(steps)

    def losses(lr: float | jax.Array, seed: int | jax.Array) -> jax.Array:
        shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
        tx = adamw(model.scales, lambda step: lr * shape(step))
        return loop.losses(model, tx, data, seed)

    return losses


def main(
    width: int = 64, preset: str = "mup", lr: float = 2**-6, steps: int = 200, seed: int = 0
) -> None:
    """Train a model of `width` under `preset`: the best learning rate stays as the width grows."""
    relative = presets.get(preset, base=base(32))
    training = run(width, relative, steps)
    loop.report(training, f"width {width} under {preset}", lr, seed)


if __name__ == "__main__":
    tyro.cli(main)
