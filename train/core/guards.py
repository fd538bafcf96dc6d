"""`check_chain`: compare a hand-written optax chain with a preset, by its steps on a few gradients.

The check finds learning rates of the preset that are applied twice, not at all, before a global
norm, or on top of an optimizer that scales by shape itself (`optax.contrib.muon`). It also finds a
schedule that not all parameters share, an eps that is not small against gradients, and an lr*wd
that differs between parameters and would therefore drift as they grow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.mappings import drop_keys
from mupax.presets import VECTORS, Preset, PresetError
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import TOLERANCE, Factors, hyperparams, resolve
from mupax.train.core.optimizer import build, first_step
from mupax.zoo.definition import Arrays, Definition

LATER = (10, 100, 1000, 10_000, 100_000, 1_000_000)
"""Steps at which the schedule is checked."""
_LATER_TOLERANCE = 0.1
"""Relative difference up to which two learning rates at a later step count as equal.

It is larger than `TOLERANCE`, because the check only sets the step counter. The optimizer's moments
are still those of a first step, so Adam's eps has a larger share of the denominator.
"""

Update = Callable[[Arrays, Arrays], Arrays]
"""Function (gradients, parameters) -> updates of the first step."""


def check_chain(
    tx: optax.GradientTransformation,
    definition: Definition,
    preset: Preset,
    optimizer: str = "adam",
) -> None:
    """Refuse an optax chain whose steps are not those of the preset.

    Args:
        tx: Complete chain, with learning rate and decay, over a dict of parameter name to array.
        definition: Model, which may be a small one of the same kind. Its sizes have to differ from
            those of the base.
        preset: Preset whose learning rates the chain should apply (`presets.Preset.scales`).
        optimizer: Name of the chain's optimizer. The preset has a rule for it.

    Raises:
        PresetError: The ratio of a parameter's learning rate, or of its lr*wd, to those of the
            other parameters is not that of the preset, in the first step or later. Or learning
            rates are applied before a global norm, weight decay acts on gains or biases, or eps is
            not small against gradients of norm 1. Or the model has fewer than two parameters, or
            the sizes of the base, so that there is nothing to compare.
    """
    factors = resolve(preset, definition, optimizer)
    _check_comparable(definition, preset, factors)

    # These arrays are numpy's, so that nothing is compiled but the chain.
    params = {}
    for name, leaf in definition.abstract.items():
        params[name] = np.zeros(leaf.shape, leaf.dtype)
    # A fixed seed, so that a chain passes or fails every time alike.
    rng = np.random.default_rng(0)
    grads = {}
    for name, w in params.items():
        grads[name] = np.asarray(rng.normal(size=w.shape), w.dtype)

    @jax.jit
    def update(grads: Arrays, params: Arrays) -> Arrays:
        return first_step(tx, optimizer, grads, params)[0]

    lr = {name: float(values.flat[0]) for name, values in factors.lr.items()}
    # Muon gives parameters that are no matrices to Adam. How the learning rates of the two compare
    # is the user's choice.
    matrices = {}
    if preset.family(optimizer) == "muon":
        # Imported only here, because most runs have no Muon.
        from mupax.train.core.muon import hidden_matrices

        matrices = hidden_matrices(definition.specs)
    if preset.family(optimizer) in ("adam", "muon"):
        eps = drop_keys(factors.eps, matrices)
        _check_eps(update, grads, params, eps)

    # The training loop's own chain on the same gradients, so that betas and momentum cancel in the
    # ratios.
    preset_update = reference(definition, preset, optimizer)
    sizes = _rms_sizes(update(grads, params))
    preset_sizes = _rms_sizes(preset_update(grads, params))
    on_muon = [name for name in preset_sizes if name in matrices]
    not_on_muon = [name for name in preset_sizes if name not in matrices]
    groups = [group for group in (on_muon, not_on_muon) if group]  # a median needs a member
    for group in groups:
        _check_rates({name: sizes[name] / preset_sizes[name] for name in group}, lr, preset)
    _check_later(tx, optimizer, grads, params, groups)
    _check_norms(update, grads, params, preset)
    _check_decay(update, definition, preset, params)


def _check_comparable(definition: Definition, preset: Preset, factors: Factors) -> None:
    """Raise `PresetError` for a model on which `check_chain` would accept a wrong chain.

    Such a model has fewer than two parameters, or the sizes of the preset's base and all
    learning-rate factors equal to 1.
    """
    count = len(definition.specs)
    if count < 2:
        raise PresetError(
            "check_chain compares the steps of parameters with each other, and the model has "
            f"{count}; give a model of at least two parameters"
        )
    is_base = preset.base is not None and set(preset.ratios(definition.sizes).values()) == {1}
    # Constants of groups can differ at the sizes of the base, too.
    if is_base and all(np.all(lr == 1) for lr in factors.lr.values()):
        raise PresetError(
            f"the model has the sizes of {preset.name}'s base, where every rate is 1 and a chain "
            "without the rates passes; give a model of other sizes"
        )


def reference(definition: Definition, preset: Preset, optimizer: str) -> Update:
    """Return a jitted function that computes the first step of mupax's own optimizer chain.

    `check_chain` compares a hand-written chain with it. The chain has a peak learning rate of 1, no
    weight decay and a constant schedule.

    Args:
        definition: Model at the sizes of the arrays that the function takes.
        preset: Preset whose learning rates and eps the function applies.
        optimizer: Name of an optimizer that the preset has a rule for.
    """
    config = OptimizerConfig(name=optimizer, peak_lr=1.0, schedule="constant")
    matrix_steps = preset.matrix_steps(definition.specs, definition.sizes, optimizer)
    tx = build(config, definition.specs, matrix_steps)
    factors = resolve(preset, definition, optimizer)
    hyper = hyperparams(config, 1).at(jnp.int32(0))

    @jax.jit
    def update(grads: Arrays, params: Arrays) -> Arrays:
        return first_step(tx, optimizer, grads, params, factors=factors, hyper=hyper)[0]

    return update


def _rms_sizes(updates: Arrays) -> dict[str, float]:
    """Return the root mean square of every array, by name."""
    sizes = {}
    for name, array in updates.items():
        # In float32 the squares of small updates would underflow.
        mean_square = np.mean(np.square(np.asarray(array, np.float64)))
        sizes[name] = float(np.sqrt(mean_square))
    return sizes


def _norm(*arrays: np.ndarray) -> float:
    """Return the global norm of some arrays."""
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(a, np.float64)))) for a in arrays))


def _check_rates(ratios: dict[str, float], lr: dict[str, float], preset: Preset) -> None:
    """Raise `PresetError` if the chain's steps are not in proportion to the preset's.

    The ratio of a parameter may be neither 0 nor more than `TOLERANCE` away from the median.

    Args:
        ratios: Size of the chain's update over that of the preset's, by name.
        lr: Learning rates of the preset, by name.
    """
    frozen = [name for name, ratio in ratios.items() if ratio == 0]
    if frozen:
        raise PresetError(
            f"{frozen[0]}: the chain does not move it; "
            f"{preset.name} gives it a rate of {lr[frozen[0]]:.3g}"
        )
    # A mean would follow the one parameter that is wrong.
    typical = statistics.median(ratios.values())
    name, worst = max(ratios.items(), key=lambda item: abs(np.log(item[1] / typical)))
    if abs(worst / typical - 1) <= TOLERANCE:
        return

    # If the ratios become equal when divided by lr, the chain applies lr twice. If they become
    # equal when multiplied by lr, it does not apply lr at all.
    without_lr = {name: ratio * lr[name] ** -1 for name, ratio in ratios.items()}
    with_lr = {name: ratio * lr[name] for name, ratio in ratios.items()}
    if _equal(without_lr):
        why = "its rates are applied twice; apply them once"
    elif _equal(with_lr):
        why = (
            "its rates are not applied; multiply each update by scales.lr, "
            "after the optimizer and before the learning rate"
        )
    else:
        why = (
            "the optimizer has a scale of its own "
            "(optax.contrib.muon has one by shape: use scale_by_muon, which has none)"
        )
    raise PresetError(
        f"{name}: moves {worst / typical:.3g} times as far as {preset.name} asks, "
        f"relative to the others: {why}"
    )


def _check_later(
    tx: optax.GradientTransformation,
    optimizer: str,
    grads: Arrays,
    params: Arrays,
    groups: Sequence[Sequence[str]],
) -> None:
    """Raise `PresetError` if a schedule changes the steps of a group by different factors.

    All counters of the optimizer state are set to each step of `LATER` in turn. The ratio of a
    parameter's later step to its first step may differ by at most 10 % from the group's median.

    Args:
        optimizer: Name of the optimizer, for `first_step`.
        groups: Names of parameters, in groups. Within a group the steps must keep their ratios.
    """

    @jax.jit
    def update(count: jax.Array, grads: Arrays, params: Arrays) -> Arrays:
        # After this step the moments are in proportion to the gradients.
        _, state = first_step(tx, optimizer, grads, params)

        def with_count(path: tuple, leaf: jax.Array) -> jax.Array:
            if not path or getattr(path[-1], "name", None) != "count":
                return leaf
            return jnp.broadcast_to(count, leaf.shape).astype(leaf.dtype)

        later_state: Any = jax.tree_util.tree_map_with_path(with_count, state)
        updates: Any
        updates, _ = tx.update(grads, later_state, params)
        return updates

    # The count is an argument, so all later steps share this program.
    first = _rms_sizes(update(np.int32(1), grads, params))
    for step in LATER:
        later = _rms_sizes(update(np.int32(step), grads, params))
        for group in groups:
            remaining = {name: later[name] / first[name] for name in group if first[name]}
            typical = statistics.median(remaining.values())
            differences = {name: abs(factor - typical) for name, factor in remaining.items()}
            name = max(differences, key=differences.__getitem__)
            if differences[name] > _LATER_TOLERANCE * max(remaining[name], typical):
                ratio = math.inf
                if typical:
                    ratio = remaining[name] / typical
                raise PresetError(
                    f"{name}: after {step} steps it moves {ratio:.2g} times as far, relative to "
                    "the others, as at first: it has a schedule of its own; put one schedule on "
                    "all, after the rates"
                )


def _check_norms(update: Update, grads: Arrays, params: Arrays, preset: Preset) -> None:
    """Raise `PresetError` if learning rates are applied before a global norm is taken.

    The check watches the step of one parameter, whose gradient stays the same. One other parameter
    at a time gets a gradient that makes up nearly all of a fixed global norm, and the rest get 0.
    The watched step must not depend on which other parameter that is. At least two parameters are
    needed.
    """
    norms = {}
    for name, size in _rms_sizes(update(grads, params)).items():
        norms[name] = size * grads[name].size ** 0.5
    least = min(norms, key=norms.__getitem__)
    moved: dict[str, float] = {}
    for name, grad in grads.items():
        if name == least:
            continue
        probe = {}
        for other_name, other_grad in grads.items():
            probe[other_name] = np.zeros_like(other_grad)
        probe[least] = grads[least]
        # So large that this gradient alone makes up almost all of the global norm.
        scale = 100 * _norm(grads[least]) / _norm(grad)
        probe[name] = grad * np.asarray(scale, grad.dtype)
        moved[name] = _rms_sizes(update(probe, params))[least]

    low = min(moved, key=moved.__getitem__)
    high = max(moved, key=moved.__getitem__)
    if moved[high] > (1 + TOLERANCE) * moved[low]:
        ratio = moved[high] / moved[low]
        raise PresetError(
            f"{least}: moves {ratio:.3g} times as far where {high} has the gradient that {low} "
            f"had: {preset.name}'s rates are applied before a global norm "
            "(optax.clip_by_global_norm); clip the raw gradients, first in the chain"
        )


def _check_eps(
    update: Update, grads: Arrays, params: Arrays, eps: Mapping[str, np.ndarray]
) -> None:
    """Raise `PresetError` if eps is not small against gradients of global norm 1.

    The step of a parameter for a sixteenth of such gradients must be at least half of the step for
    the gradients themselves. With a small eps, Adam's two steps are equal. The gradients are scaled
    in proportion to the preset's eps.

    Args:
        eps: Factors on eps from the preset, by name. Only parameters with an entry are checked.
    """
    scaled_grads = {}
    for name, grad in grads.items():
        scaled_grads[name] = grad
        if name in eps:
            scaled_grads[name] = grad * float(eps[name].flat[0])
    norm = _norm(*scaled_grads.values())

    def sizes_at_norm(divisor: int) -> dict[str, float]:
        divided = {}
        for name, grad in scaled_grads.items():
            divided[name] = (grad / (norm * divisor)).astype(grad.dtype)
        return _rms_sizes(update(divided, params))

    sizes = sizes_at_norm(1)
    # A power of two divides exactly, so only eps can make the two steps differ.
    small_sizes = sizes_at_norm(16)
    ratios = {name: small_sizes[name] / sizes[name] for name in eps if sizes[name]}
    name = min(ratios, key=ratios.__getitem__, default=None)
    if name is not None and small_sizes[name] < sizes[name] / 2:
        raise PresetError(
            f"{name}: eps is no small part of gradients of norm 1: "
            f"a sixteenth of them moves it {ratios[name]:.2g} times as far, "
            "where Adam's step does not depend on their size; "
            "write a smaller eps, times scales.eps"
        )


def _check_decay(update: Update, definition: Definition, preset: Preset, params: Arrays) -> None:
    """Raise `PresetError` if gains or biases decay, or if lr*wd differs between parameters.

    Parameters that do not decay at all are not compared.
    """
    # With zero gradients an update is weight decay alone. On parameters of 1 it is the factor of
    # the decay.
    ones = jax.tree.map(np.ones_like, params)
    no_grads = jax.tree.map(np.zeros_like, params)
    # Coupled decay moves by lr * wd, and independent decay by wd. In both cases a correct chain
    # gives the same number for all parameters that decay.
    sizes = _rms_sizes(update(no_grads, ones))
    decayed = {}
    for name, size in sizes.items():
        if size > 0:
            decayed[name] = size
    vectors = [name for name in decayed if definition.specs[name].role in VECTORS]
    if vectors:
        raise PresetError(
            f"{vectors[0]}: weight decay acts on it, and {preset.name} never decays gains and "
            "biases; mask them"
        )
    if decayed and not _equal(decayed):
        low = min(decayed, key=decayed.__getitem__)
        high = max(decayed, key=decayed.__getitem__)
        raise PresetError(
            f"{high}: lr*wd is {decayed[high] / decayed[low]:.3g} times that of {low}, "
            f"and would drift as the model grows; under {preset.name} it is one number: "
            "multiply the decay by scales.weight_decay, or apply it after the rates"
        )


def _equal(numbers: Mapping[str, float]) -> bool:
    """Return whether the largest of positive numbers is within `TOLERANCE` of the smallest."""
    return max(numbers.values()) / min(numbers.values()) - 1 <= TOLERANCE
