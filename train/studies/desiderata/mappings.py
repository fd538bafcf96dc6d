"""A block cut into its mappings: what each gives, how fast it moves by its own weights, and the backward signal there.

Exact and from one batch: backward signals are gradients of zeros that are added to every mapping (one VJP), own speeds one JVP of
the same program with every mapping's inputs held fixed. What they should be as one dimension grows is computed by
`mupax.presets.analysis.desiderata`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mupax.presets.analysis.mappings import NAMES
from mupax.train.core.factors import Factors
from mupax.train.studies.desiderata.cutting import Batch, Hold, forward
from mupax.zoo.definition import Arrays, Definition


class Mappings(NamedTuple):
    """One model at one moment; by mapping, root mean squares over all layers, tokens and entries, float32 []."""

    signal: Arrays
    speed: Arrays
    """Of every mapping by its own weights alone, with an equal part of the loss's decay from every weight and layer."""
    backward: Arrays
    parts: Arrays
    """rate ‖∇‖² of every weight under the preset's own rates, by name, all layers together."""


def measure(definition: Definition, params: Arrays, factors: Factors, batch: Batch, *, masked: bool = True) -> Mappings:
    """All of a model where it stands. Pure: jit it, or map it over seeds.

    Args:
        definition: a transformer of the zoo with a readout of its own; an encoder-decoder with two tables.
        params: where to measure.
        factors: multipliers, and the rates of SGD that `parts` are under.
        batch: `inputs`, `targets`.
        masked: a causal model sees no later positions.
    """

    def loss(params: Arrays, zeros: Arrays, hold: Hold = lambda x: x) -> tuple[jax.Array, Arrays]:
        model = definition.model(params, factors.multiplier, factors.forward)
        return forward(model, batch, zeros, hold, masked=masked)

    shapes = jax.eval_shape(lambda p: loss(p, {})[1], params)
    zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    (gradients, signals), outputs = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, zeros)
    flow, parts = {}, {}
    for name, g in gradients.items():
        spec = definition.specs[name]
        layers = definition.sizes[spec.blocks] if spec.stacked else 1
        squares = jnp.sum(g.reshape(layers, -1) ** 2, axis=1)
        moves = name in NAMES or name.endswith("block.mlp.gate")
        rate = jnp.where(squares > 0, 1 / layers / squares, 0.0) * moves
        flow[name] = -g * rate.reshape(-1, *[1] * (g.ndim - 1)) if spec.stacked else -g * rate[0]
        if name in NAMES:
            parts[NAMES[name]] = jnp.sum(factors.lr[name] * squares)
    _, speeds = jax.jvp(lambda p: loss(p, {}, jax.lax.stop_gradient)[1], (params,), (flow,))
    for stack in ("", "encoder ") if "encoder_layers" in definition.sizes else ("",):
        stream = outputs[f"{stack}stream"]
        outputs[f"{stack}branches"] = (stream - outputs[f"{stack}embedding"]) / _rms(stream)
    signal, speed, backward = (jax.tree.map(_rms, dict(x)) for x in (outputs, speeds, signals))
    return Mappings(signal, speed, backward, parts)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
