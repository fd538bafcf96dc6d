"""Rates for a model that nobody wrote a preset for: every layer takes an equal part off the loss, features move at speed 1.

The desiderata of Chizat and Netrapalli 2023 (arXiv 2311.18718), solved at a reference initialization (`mupax.train.studies.check.feature_speed`
measures them). Balanced contributions and loss decay: rate_l = 1 / (L <∇_l, u_l>), L layers with the embedding and the
readout, u_l the optimizer's first update at unit rate (SGD ∇_l, so 1 / (L ‖∇_l‖²) as in the source; derived here: Adam and Lion
sign ∇_l, so 1 / (L ‖∇_l‖₁); Muon nearly the nuclear norm). Feature learning: ‖b‖_rms = 1 / (m cos θ) at the last layer,
reached by scaling the readout.

At these rates a step at peak_lr p takes p nats off the loss to first order, whatever the model: start near p = 0.1.
The theory is for SGD and a first step; query and key gradients that wake up later are not foreseen: over `mup`'s their rates
grow about as head_dim (of `vit-proxy` from 16 to 64 by exponents of +0.9 to +1.3), and over-drive attention later. Signal propagation is
the reference's business: for a deep one take branches of depth^-1/2, without which cos θ falls with depth.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax import presets
from mupax.presets import Preset, PresetError, Role, Scales
from mupax.presets.roles import CROSSED, ENCODER, OWN, Stack
from mupax.presets.rule import Number
from mupax.presets.tuned.measured import Measured, Table, measured
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer as chains
from mupax.train.core.factors import Factors, init_stds, resolve
from mupax.train.studies.check.feature_speed import (
    Batch,
    Flow,
    Speeds,
    chain,
    of_model,
    refuse_tied,
    split,
)
from mupax.zoo.definition import Arrays, Definition, normals

_CLOSE = 0.01
"""The output scale is right when the last feature's speed is this near 1."""
_ROUNDS = 20
_ROUNDING = 1e-6
"""A gradient below this share of the total is round-off, and a rate from it would be noise."""


class Parts(NamedTuple):
    """‖∇‖, and <∇, u> in nats per unit of rate, of each (group, layer): group to float32 [layers], or [1] outside the stack."""

    gradient: dict[str, jax.Array]
    slope: dict[str, jax.Array]


def balance(
    definition: Definition,
    batch: Batch,
    config: OptimizerConfig,
    *,
    reference: Preset | None = None,
    seed: int = 0,
    centered: bool = False,
) -> Measured:
    """Derive a preset from backward passes over one batch at the reference initialization.

    Within a layer every group (`ParamSpec.group`) has an equal part too, so that gains and biases move at any size. The
    formula gives the output scale from one pass exactly while logits are small; passes repeat until it holds.

    Args:
        definition: a ViT, an untied decoder or encoder-decoder, or one that `mupax.train.studies.check.feature_speed.of_model` can take apart.
        batch: `inputs`, `targets`, `weights`; larger ones have less noise in the gradient.
        config: the optimizer. Its rate, schedule, decay and clipping play no part.
        reference: initialization, multipliers, eps and decay (lr * wd per group) come from here; `sp` unless given.
        seed: of the initialization.
        centered: train f - f at initialization.

    Returns:
        A preset for this model at these sizes; its `table` can be saved and loaded (`mupax.presets.tuned.measured`).

    Raises:
        PresetError: a tied readout, a parameter without gradient at this initialization (such as all below a readout of
            zero), or two of one group that the reference gives different numbers.
    """
    refuse_tied(definition)
    reference = reference or presets.get("sp")
    if reference.key_as_query:
        raise PresetError(
            f"measured scales cannot start keys as queries, as {reference.label} does; write key_start=own"
        )
    factors = resolve(reference, definition, config.name, "independent")
    params = jax.jit(lambda seed, stds: definition.initialize(seed, stds, normals))(
        np.uint32(seed), init_stds(reference, definition)
    )

    @jax.jit
    def measure(params: Arrays, factors: Factors, batch: Batch) -> tuple[Speeds, Parts, Arrays]:
        unit = direction(definition, factors, config)

        def flow(grads: Arrays) -> Arrays:
            rates = balanced(definition, grads, unit(grads))
            return descent(definition, factors._replace(lr=rates), config)(grads)

        speeds, grads = of_model(definition, params, factors, batch, flow, centered=centered)
        return (
            speeds,
            parts_of(definition, grads, unit(grads)),
            balanced(definition, grads, unit(grads)),
        )

    readouts = [name for name, spec in definition.specs.items() if spec.role is Role.READOUT]
    scaled, scale, tried = factors, 1.0, []
    for _ in range(_ROUNDS):
        outputs = {name: (factors.multiplier[name] * scale).astype(np.float32) for name in readouts}
        scaled = factors._replace(multiplier={**factors.multiplier, **outputs})
        speeds, parts, rates = measure(params, scaled, dict(batch))
        speed = float(speeds.speed_rms[-1])
        _check_gradients(parts)
        if abs(speed - 1) < _CLOSE:
            break
        tried.append((scale, speed))
        scale = next_scale(tried)
    else:
        raise PresetError(
            f"no output scale makes the last feature move at speed 1 (at {scale:.3g} it is {speed:.3g})"
        )
    return measured(_table(definition, scaled._replace(lr=rates), reference, config.name))


def desiderata(
    definition: Definition,
    batch: Batch,
    config: OptimizerConfig,
    *presets: Preset,
    seed: int,
    centered: bool,
) -> list[Speeds]:
    """cos θ and the four desiderata of every layer at each preset's initialization, under its rates at peak_lr 1.

    Args:
        definition: as for `balance`; raises as there.
        batch: `inputs`, `targets`, `weights`.
        config: the optimizer; its rate, schedule, decay and clipping play no part.
        *presets: whose initialization, multipliers and rates; one compiled program serves them all.
        seed: of the initialization.
        centered: the output is f - f at initialization.
    """

    @jax.jit
    def measure(stds: Arrays, factors: Factors, batch: Batch) -> Speeds:
        params = definition.initialize(jnp.uint32(seed), stds, normals)
        return of_model(
            definition,
            params,
            factors,
            batch,
            descent(definition, factors, config),
            centered=centered,
        )[0]

    factors = [resolve(preset, definition, config.name, "independent") for preset in presets]
    stds = [init_stds(preset, definition) for preset in presets]
    return [measure(own, one, dict(batch)) for own, one in zip(stds, factors, strict=True)]


def next_scale(tried: Sequence[tuple[float, float]]) -> float:
    """The output scale to try next, from pairs of (scale, speed of the last feature) in order, for a speed of 1.

    Speed goes as scale^-1 while logits are small and more steeply beyond, where steps that trust the -1 swing from side to
    side: two pairs tell the power.
    """
    (scale, speed), power = tried[-1], -1.0
    if len(tried) > 1:
        before, was = tried[-2]
        power = min(max(math.log(speed / was) / math.log(scale / before), -4.0), -0.25)
    return scale * speed ** (-1 / power)


def descent(definition: Definition, factors: Factors, config: OptimizerConfig) -> Flow:
    """Gradients by name to dw/dt = -lr u: the optimizer's first step, without clipping or decay, per unit of peak_lr.

    Args:
        definition: of the model.
        factors: of every parameter.
        config: the optimizer.
    """
    tx = chains.build(dataclasses.replace(config, clip_norm=None), definition.specs)
    hyper = chains.OptimizerHyperparams(peak_lr=1.0, schedule=1.0, weight_decay=0.0, eps=config.eps)
    return lambda grads: chains.first_step(
        tx, config.name, grads, None, factors=factors, hyper=hyper
    )[0]


def direction(definition: Definition, factors: Factors, config: OptimizerConfig) -> Flow:
    """Gradients by name to u by name: the optimizer's own first update at rate 1.

    Args:
        definition: of the model.
        factors: of every parameter; their rates are left out.
        config: the optimizer.
    """
    flow = descent(definition, factors._replace(lr=dict.fromkeys(factors.lr, 1.0)), config)
    return lambda grads: {name: -step for name, step in flow(grads).items()}


def balanced(definition: Definition, grads: Arrays, updates: Arrays) -> Arrays:
    """Rates by parameter at which each of L layers takes 1 / L off the loss, and each of its G groups 1 / (L G): 1 / (L G <∇, u>).

    A group in several layers, as the gains of an embedding's norm and of the last one, has at most that part in each of them, and a
    layer's other groups share what it leaves.

    Args:
        definition: of the model.
        grads: by name, in the parameters' shapes.
        updates: by name, in the parameters' shapes, at rate 1.
    """
    layers, groups = (
        chain(definition),
        {name: spec.group for name, spec in definition.specs.items()},
    )
    slopes: list[Arrays] = []
    for g, u in zip(split(definition, grads), split(definition, updates), strict=True):
        slopes.append({})
        for name in g:
            slope = jnp.sum(g[name].astype(jnp.float32) * u[name].astype(jnp.float32))
            slopes[-1][groups[name]] = slopes[-1].get(groups[name], 0.0) + slope
    outside = [{groups[name] for name, index in layer.items() if index is None} for layer in layers]
    several = {
        group
        for at, here in enumerate(outside)
        for group in here
        if any(group in o for o in outside[:at])
    }
    shared = {
        group: functools.reduce(
            jnp.minimum,
            [1 / (len(layers) * len(here) * here[group]) for here in slopes if group in here],
        )
        for group in several
    }
    rates: dict[str, list[jax.Array]] = {}
    for layer, here in zip(layers, slopes, strict=True):
        left = 1 / len(layers) - sum(
            shared[group] * here[group] for group in here if group in shared
        )
        alone = {
            group: left / (len(here.keys() - several) * slope)
            for group, slope in here.items()
            if group not in shared
        }
        for name in layer:
            rates.setdefault(name, []).append((alone | shared)[groups[name]])
    return {
        name: jnp.stack(x) if definition.specs[name].stacked else x[0] for name, x in rates.items()
    }


def parts_of(definition: Definition, grads: Arrays, updates: Arrays) -> Parts:
    """What each (group, layer) has of gradients by name and the optimizer's unit updates by name.

    Args:
        definition: of the model.
        grads: in the parameters' shapes.
        updates: in the parameters' shapes, at rate 1.
    """
    squares: dict[str, jax.Array] = {}
    slopes: dict[str, jax.Array] = {}
    for name, spec in definition.specs.items():
        g, u = (x[name].astype(jnp.float32) for x in (grads, updates))
        layers = g.shape[0] if spec.stacked else 1
        for total, product in ((squares, g * g), (slopes, g * u)):
            total[spec.group] = total.get(spec.group, jnp.zeros(layers)) + jnp.sum(
                product.reshape(layers, -1), axis=1
            )
    return Parts({group: jnp.sqrt(square) for group, square in squares.items()}, slopes)


def _check_gradients(parts: Parts) -> None:
    norm = math.sqrt(sum(float(jnp.sum(g**2)) for g in parts.gradient.values()))
    if not 0 < norm < math.inf:
        raise PresetError(
            f"the gradient at the reference initialization has norm {norm}; start from another reference"
        )
    for group, norms in parts.gradient.items():
        for layer, part in enumerate(norms.tolist()):
            if not part > _ROUNDING * norm or not float(parts.slope[group][layer]) > 0:
                raise PresetError(
                    f"{group}, layer {layer}: no gradient at the reference initialization ({part:.1e} of {norm:.1e}), "
                    "so no rate can be derived; start what multiplies it away from zero, or leave the parameter out"
                )


def _table(definition: Definition, factors: Factors, reference: Preset, optimizer: str) -> Table:
    scales: dict[str, Scales] = {}
    columns = {
        field: getattr(factors, field) for field in ("multiplier", "lr", "eps", "weight_decay")
    }
    columns["init_std"] = init_stds(reference, definition)
    for name, spec in definition.specs.items():
        row = Scales(**{field: _plain(numbers[name]) for field, numbers in columns.items()})
        if scales.setdefault(spec.group, row) != row:
            raise PresetError(
                f"{name}: {reference.name} gives another of the group {spec.group} other numbers; give them roles apart"
            )
    kinds, sizes = {declared["kind"] for declared in definition.factors.values()}, definition.sizes

    def residual(stack: Stack) -> tuple[tuple[tuple[float, float], ...], ...]:
        return tuple(
            tuple(
                reference.residual_scale(sizes, layer, branch, stack) for branch in stack.branches
            )
            for layer in range(sizes[stack.axis])
        )

    return Table(
        scales=scales,
        logits=reference.logit_scale(sizes) if "logits" in kinds else 1.0,
        residual=residual(CROSSED if ENCODER.axis in sizes else OWN) if "branch" in kinds else (),
        encoder_residual=residual(ENCODER) if ENCODER.axis in sizes else (),
        sizes=dict(sizes),
        optimizer=optimizer,
        source=f"balanced from {reference.describe()}",
    )


def _plain(numbers: Any) -> Number:
    values = tuple(map(float, np.ravel(numbers)))
    return values[0] if len(set(values)) == 1 else values
