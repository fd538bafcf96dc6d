"""Learning rates for a model without a preset, so that all layers lower the loss equally.

Layer l is the embedding, a block or the readout, L in all. ∇_l is the gradient of its weights, and
u_l the optimizer's first update at learning rate 1. Derived learning rates and readout scale meet
the desiderata of Chizat and Netrapalli 2023 (arXiv 2311.18718) at a reference initialization.
`mupax.train.studies.check.feature_speed` measures them.

* Balance and loss decay: each layer lowers the loss by 1 / L per unit of time. Its learning rate is
  1 / (L <∇_l, u_l>). SGD has u_l = ∇_l, which gives the paper's 1 / (L ‖∇_l‖²). Derived here: Adam
  and Lion have u_l = sign ∇_l, which gives 1 / (L ‖∇_l‖₁), and for Muon <∇_l, u_l> is nearly the
  nuclear norm.
* Feature learning: the output of the last block changes at a root mean square of 1 per unit of
  time. The readout's multiplier is scaled for this.

At these learning rates a step at peak_lr p takes p nats off the loss to first order, for every
model. Start near p = 0.1.

The theory is for SGD and a first step. It does not foresee gradients of queries and keys that grow
later. Relative to `mup`, learning rates of queries and keys grow about as head_dim (exponents +0.9
to +1.3 for `vit-proxy` from 16 to 64), and attention changes too fast later. Signal propagation
depends on the reference. For a deep model choose branches of depth^-1/2, because the alignment cos
θ of features and backward signals falls with depth otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
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
"""Greatest distance from 1 that is accepted for the speed of the last block's output."""
_ROUNDS = 20
"""Largest number of readout scales that are tried."""
_ROUNDING = 1e-6
"""Share of the total gradient norm below which a group's gradient counts as round-off error."""


class Parts(NamedTuple):
    """Gradient norms and slopes of the loss for each group of parameters, layer by layer.

    Keys are groups (`ParamSpec.group`). Arrays are float32 [layers], or [1] for parameters outside
    of stacked blocks.

    Attributes:
        gradient: Norm ‖∇‖ of the group's gradient ∇.
        slope: Fall of the loss in nats per unit of the group's learning rate. This is the inner
            product <∇, u> with the optimizer's first update u at learning rate 1.
    """

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
    """Derive a preset from backward passes over one batch at a reference preset's initialization.

    Learning rates are such that the embedding, every block and the readout lower the loss equally.
    Within a layer every group of parameters (`ParamSpec.group`) lowers it equally, too, so that
    gains and biases move at any size. The readout's multiplier is scaled until the output of the
    last block changes at a root mean square of 1 (within 1 %) per unit of time. One pass finds the
    scale exactly while logits are small; otherwise passes repeat.

    Args:
        definition: Definition of a ViT, an untied decoder or encoder-decoder, or of a model that
            `mupax.train.studies.check.feature_speed.of_model` can take apart.
        batch: `inputs`, `targets` and `weights`, and for an encoder-decoder `decoder_inputs` and
            `input_mask`, too. A larger batch has less noise in the gradient.
        config: Optimizer settings. Learning rate, schedule, decay and clipping do not matter.
        reference: Preset that gives the initialization, multipliers, eps, and for each group the
            learning rate times weight decay; `sp` by default. Its learning rates are replaced.
        centered: Whether the model's output is f(w) - f(w0), where w0 are the initial parameters.

    Returns:
        A preset for this model at these sizes. Its `table` can be saved and loaded
        (`mupax.presets.tuned.measured`).

    Raises:
        PresetError: The readout is tied, a parameter has no gradient at this initialization (such
            as every parameter but the readout if the readout is zero), two parameters of a group
            have different numbers in the reference, the reference starts keys as queries or sets
            Muon's blocks or norms, or 20 passes find no scale of the readout.
    """
    refuse_tied(definition)
    reference = reference or presets.get("sp")
    if reference.key_as_query:
        raise PresetError(
            f"measured scales cannot start keys as queries, as {reference.label} does; "
            f"write key_start=own"
        )
    _refuse_blocks(reference)
    # Independent decay, because lr * wd of the reference must not change with the new rates.
    factors = resolve(reference, definition, config.name, "independent")
    # Initialized once: the output scale is a multiplier and changes no stored parameter.
    params = jax.jit(lambda seed, stds: definition.initialize(seed, stds, normals))(
        np.uint32(seed), init_stds(reference, definition)
    )

    @jax.jit
    def measure(params: Arrays, factors: Factors, batch: Batch) -> tuple[Speeds, Parts, Arrays]:
        # `direction` ignores learning rates, so the rates can be derived from its updates.
        unit = direction(definition, factors, config)

        def flow(grads: Arrays) -> Arrays:
            rates = balanced(definition, grads, unit(grads))
            return descent(definition, factors._replace(lr=rates), config)(grads)

        speeds, grads = of_model(definition, params, factors, batch, flow, centered=centered)
        parts = parts_of(definition, grads, unit(grads))
        rates = balanced(definition, grads, unit(grads))
        return speeds, parts, rates

    readouts = []
    for name, spec in definition.specs.items():
        if spec.role is Role.READOUT:
            readouts.append(name)
    scale = 1.0
    tried: list[tuple[float, float]] = []
    for _ in range(_ROUNDS):
        # Start from the reference's multipliers in every round, because `scale` is relative to them
        # and not to the round before.
        multipliers = dict(factors.multiplier)
        for name in readouts:
            multipliers[name] = (factors.multiplier[name] * scale).astype(np.float32)
        scaled = factors._replace(multiplier=multipliers)
        speeds, parts, rates = measure(params, scaled, dict(batch))
        _check_gradients(parts)

        speed = float(speeds.speed_rms[-1])
        if abs(speed - 1) < _CLOSE:
            return measured(_table(definition, scaled._replace(lr=rates), reference, config.name))
        tried.append((scale, speed))
        scale = next_scale(tried)
    raise PresetError(
        f"no output scale makes the last feature move at speed 1 (at {tried[-1][0]:.3g} "
        f"it is {tried[-1][1]:.3g})"
    )


def desiderata(
    definition: Definition,
    batch: Batch,
    config: OptimizerConfig,
    *presets: Preset,
    seed: int,
    centered: bool,
) -> list[Speeds]:
    """Measure how fast features and loss change under presets, at their initializations.

    Learning rates are those of each preset at peak_lr 1. Return the speeds of all layers for each
    preset, in the order of `presets`.

    Args:
        definition: Definition as for `balance`. The same models are refused.
        batch: Batch as for `balance`.
        config: Optimizer settings. Learning rate, schedule, decay and clipping do not matter.
        *presets: Presets to measure. One compiled program serves them all.
        centered: Whether the output is f(w) - f(w0), where w0 are the initial parameters.

    Raises:
        PresetError: The model cannot be measured, a preset does not fit the model or the optimizer,
            or a preset sets Muon's blocks or norms.
    """

    @jax.jit
    def measure(stds: Arrays, factors: Factors, batch: Batch) -> Speeds:
        params = definition.initialize(jnp.uint32(seed), stds, normals)
        flow = descent(definition, factors, config)
        speeds, _ = of_model(definition, params, factors, batch, flow, centered=centered)
        return speeds

    for preset in presets:
        _refuse_blocks(preset)
    factors = []
    for preset in presets:
        factors.append(resolve(preset, definition, config.name, "independent"))
    stds = [init_stds(preset, definition) for preset in presets]
    speeds = []
    for preset_stds, preset_factors in zip(stds, factors, strict=True):
        speeds.append(measure(preset_stds, preset_factors, dict(batch)))
    return speeds


def _refuse_blocks(preset: Preset) -> None:
    """Raise `PresetError` for a preset that sets blocks or norms of Muon's orthogonalized steps."""
    if preset.muon.changes_steps:
        raise PresetError(
            f"{preset.label}: speeds are measured under steps of whole matrices; leave out "
            "muon_blocks and muon_scale"
        )


def next_scale(tried: Sequence[tuple[float, float]]) -> float:
    """Return the factor on the readout to try next, in a search for speed 1 of the last feature.

    The speed is proportional to scale^-1 while logits are small, and falls more steeply beyond.
    With the power -1 the search would then oscillate. From the second pass on the power is
    therefore fitted to the last two pairs.

    Args:
        tried: (scale, speed of the last block's output) of all passes so far, at least one. All
            numbers are above 0, and the last two scales differ.
    """
    scale, speed = tried[-1]
    power = -1.0
    if len(tried) > 1:
        last_scale, last_speed = tried[-2]
        power = math.log(speed / last_speed) / math.log(scale / last_scale)
        # A noisy pair can give a power near 0, where the next scale is extreme, or above 0, where
        # the scale moves the wrong way.
        power = min(max(power, -4.0), -0.25)
    return scale * speed ** (-1 / power)


def descent(definition: Definition, factors: Factors, config: OptimizerConfig) -> Flow:
    """Return a function from gradients to the velocities dw/dt = -lr u of all parameters.

    The function maps dicts by parameter name. u is the optimizer's first update at learning rate 1,
    without clipping or decay, and lr the learning rate that `factors` gives at peak_lr 1.
    """
    # Clipping scales all gradients by one global norm, so a layer's update would depend on the
    # gradients of other layers.
    tx = chains.build(dataclasses.replace(config, clip_norm=None), definition.specs)
    hyper = chains.OptimizerHyperparams(peak_lr=1.0, schedule=1.0, weight_decay=0.0, eps=config.eps)

    def flow(grads: Arrays) -> Arrays:
        updates, _ = chains.first_step(tx, config.name, grads, None, factors=factors, hyper=hyper)
        return updates

    return flow


def direction(definition: Definition, factors: Factors, config: OptimizerConfig) -> Flow:
    """Return a function from gradients to the optimizer's first updates at learning rate 1.

    The function maps dicts by parameter name. Updates are positive where a step lowers a weight.

    Args:
        factors: Factors of every parameter. Their learning rates are ignored.
    """
    unit_rates = dict.fromkeys(factors.lr, 1.0)
    flow = descent(definition, factors._replace(lr=unit_rates), config)

    def unit(grads: Arrays) -> Arrays:
        updates = {}
        for name, step in flow(grads).items():
            # The flow descends, and u is what a step subtracts.
            updates[name] = -step
        return updates

    return unit


def balanced(definition: Definition, grads: Arrays, updates: Arrays) -> Arrays:
    """Return learning rates at which all layers, and all groups of a layer, lower the loss equally.

    Each of L layers lowers the loss by 1 / L per unit of time, and each of the layer's G groups by
    1 / (L G). The learning rate of a group with gradient ∇ and update u is 1 / (L G <∇, u>). A
    group in several layers, such as the gains of the embedding's norm and of the last norm, has one
    learning rate, with which it lowers the loss by at most 1 / (L G) in each layer. The other
    groups of a layer share the rest equally. Every <∇, u> must be above 0, which is not checked
    here.

    Args:
        grads: Gradients of the loss by parameter name.
        updates: The optimizer's updates at learning rate 1, by parameter name.

    Returns:
        Learning rate of every parameter by its name, [layers] for a stacked parameter, otherwise
        [].
    """
    layers = chain(definition)
    groups = {name: spec.group for name, spec in definition.specs.items()}
    slopes = _slopes_by_layer(definition, grads, updates)

    group_rates = _shared_rates(layers, groups, slopes)
    shared_groups = set(group_rates)
    rates: dict[str, list[jax.Array]] = {}
    for layer, layer_slopes in zip(layers, slopes, strict=True):
        taken_by_shared: Any = 0
        for group, slope in layer_slopes.items():
            if group in shared_groups:
                taken_by_shared += group_rates[group] * slope
        # A shared group takes at most 1 / (L G) of any layer, so the rest is above 0 if the layer
        # has other groups.
        remainder = 1 / len(layers) - taken_by_shared
        num_alone = len(layer_slopes.keys() - shared_groups)
        layer_rates = dict(group_rates)
        for group, slope in layer_slopes.items():
            if group not in shared_groups:
                layer_rates[group] = remainder / (num_alone * slope)
        for name in layer:
            rates.setdefault(name, []).append(layer_rates[groups[name]])

    by_parameter = {}
    for name, values in rates.items():
        stacked = definition.specs[name].stacked
        by_parameter[name] = jnp.stack(values) if stacked else values[0]
    return by_parameter


def _slopes_by_layer(definition: Definition, grads: Arrays, updates: Arrays) -> list[Arrays]:
    """Return the inner product of gradients and updates by group, for each layer of `chain`."""
    slopes: list[Arrays] = []
    for g, u in zip(split(definition, grads), split(definition, updates), strict=True):
        layer_slopes: Arrays = {}
        for name in g:
            group = definition.specs[name].group
            slope = jnp.sum(g[name].astype(jnp.float32) * u[name].astype(jnp.float32))
            layer_slopes[group] = layer_slopes.get(group, 0.0) + slope
        slopes.append(layer_slopes)
    return slopes


def _shared_rates(
    layers: Sequence[Mapping[str, int | None]],
    groups: Mapping[str, str],
    slopes: Sequence[Arrays],
) -> Arrays:
    """Return the learning rate of every group that has parameters in several layers.

    In each layer there is a learning rate at which the group lowers the loss as much as the layer's
    other groups. The smallest of them is returned. Groups of stacked parameters have a learning
    rate per layer and are left out.

    Args:
        layers: Parameters of every layer, from `chain`.
        groups: Name of the group of every parameter, by the parameter's name.
        slopes: Fall of the loss per unit of learning rate, by group, for every layer.
    """
    counts: dict[str, int] = {}
    for layer in layers:
        outside = []
        for name, index in layer.items():
            if index is None:
                outside.append(groups[name])
        # Count layers and not parameters: only a group in several layers has a shared rate.
        for group in dict.fromkeys(outside):
            counts[group] = counts.get(group, 0) + 1

    rates = {}
    for group, count in counts.items():
        if count < 2:
            continue
        candidates = []
        for layer_slopes in slopes:
            if group in layer_slopes:
                part = len(layers) * len(layer_slopes)
                candidates.append(1 / (part * layer_slopes[group]))
        # The least of the rates, so that no layer gets more than its share from this group.
        rates[group] = functools.reduce(jnp.minimum, candidates)
    return rates


def parts_of(definition: Definition, grads: Arrays, updates: Arrays) -> Parts:
    """Return gradient norms and slopes of the loss for each group, layer by layer.

    Args:
        grads: Gradients of the loss by parameter name.
        updates: The optimizer's first updates at learning rate 1, by parameter name.
    """
    squares: dict[str, jax.Array] = {}
    slopes: dict[str, jax.Array] = {}
    for name, spec in definition.specs.items():
        g = grads[name].astype(jnp.float32)
        u = updates[name].astype(jnp.float32)
        layers = g.shape[0] if spec.stacked else 1
        for total, product in ((squares, g * g), (slopes, g * u)):
            group_sums = total.get(spec.group, jnp.zeros(layers))
            total[spec.group] = group_sums + jnp.sum(product.reshape(layers, -1), axis=1)
    norms = {}
    for group, square in squares.items():
        norms[group] = jnp.sqrt(square)
    return Parts(norms, slopes)


def _check_gradients(parts: Parts) -> None:
    """Raise PresetError if no learning rate can be derived for a group in one of its layers.

    This is so if its gradient is not finite or not above round-off error, or if the optimizer's
    update would not lower the loss.
    """
    norm = math.sqrt(sum(float(jnp.sum(g**2)) for g in parts.gradient.values()))
    if not 0 < norm < math.inf:
        raise PresetError(
            f"the gradient at the reference initialization has norm {norm}; "
            f"start from another reference"
        )
    for group, norms in parts.gradient.items():
        for layer, part in enumerate(norms.tolist()):
            # `not >`, so that NaN is refused, too.
            is_rounding = not part > _ROUNDING * norm
            if is_rounding or not float(parts.slope[group][layer]) > 0:
                raise PresetError(
                    f"{group}, layer {layer}: no gradient at the reference initialization "
                    f"({part:.1e} of {norm:.1e}), so no rate can be derived; start what multiplies "
                    f"it away from zero, or leave the parameter out"
                )


def _table(definition: Definition, factors: Factors, reference: Preset, optimizer: str) -> Table:
    """Return the table of the derived preset: a row of numbers per group, and residual scales.

    Args:
        factors: Factors with the derived learning rates and multipliers.
        reference: Preset that gives the initial stds, the logit scale and the residual scales.

    Raises:
        PresetError: Two parameters of a group have different numbers, such as initial stds.
    """
    columns: dict[str, Mapping[str, Any]] = {
        "multiplier": factors.multiplier,
        "lr": factors.lr,
        "eps": factors.eps,
        "weight_decay": factors.weight_decay,
        "init_std": init_stds(reference, definition),
    }
    scales: dict[str, Scales] = {}
    for name, spec in definition.specs.items():
        numbers = {}
        for field, column in columns.items():
            numbers[field] = _number(column[name])
        row = Scales(**numbers)
        # A table has a row per group, so two parameters of a group cannot differ.
        if scales.setdefault(spec.group, row) != row:
            raise PresetError(
                f"{name}: {reference.name} gives another of the group {spec.group} other numbers; "
                f"give them roles apart"
            )

    sizes = definition.sizes
    kinds = {declared["kind"] for declared in definition.factors.values()}
    residual: tuple[tuple[tuple[float, float], ...], ...] = ()
    encoder_residual: tuple[tuple[tuple[float, float], ...], ...] = ()
    has_encoder = ENCODER.axis in sizes
    if "branch" in kinds:
        # A decoder with an encoder has a third branch, cross-attention.
        residual = _residual_scales(reference, sizes, CROSSED if has_encoder else OWN)
    if has_encoder:
        encoder_residual = _residual_scales(reference, sizes, ENCODER)
    return Table(
        scales=scales,
        logits=reference.logit_scale(sizes) if "logits" in kinds else 1.0,
        residual=residual,
        encoder_residual=encoder_residual,
        sizes=dict(sizes),
        optimizer=optimizer,
        source=f"balanced from {reference.describe()}",
    )


def _residual_scales(
    reference: Preset, sizes: Mapping[str, int], stack: Stack
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return (factor of the stream, factor of the branch) for every layer and branch of a stack."""
    layers = []
    for layer in range(sizes[stack.axis]):
        branches = []
        for branch in stack.branches:
            branches.append(reference.residual_scale(sizes, layer, branch, stack))
        layers.append(tuple(branches))
    return tuple(layers)


def _number(values: Any) -> Number:
    """Return a single number if all layers have the same, otherwise a tuple of one per layer."""
    numbers = tuple(map(float, np.ravel(values)))
    return numbers[0] if len(set(numbers)) == 1 else numbers
