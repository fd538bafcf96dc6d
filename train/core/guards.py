"""What an optax chain written by hand around `presets.Preset.scales` does to a preset, by its answers to a few gradients.

`check_chain` finds rates applied twice, not at all, before a global norm, or over an optimizer that scales by shape itself
(`optax.contrib.muon`); a schedule that is not everybody's; an eps above the gradients; and lr*wd that differs between parameters,
which would drift as they grow.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.presets import VECTORS, Preset, PresetError
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer as chains
from mupax.train.core.factors import TOLERANCE, hyperparams, resolve
from mupax.train.core.optimizer import dimension_numbers
from mupax.zoo.definition import Arrays, Definition

LATER = (10, 100, 1000, 10_000, 100_000, 1_000_000)
"""Steps at which a schedule is looked at."""
_LATER_TOLERANCE = 0.1
"""Relative difference of two rates there: moments are not those of so many steps, and Adam's eps counts for more."""

Update = Callable[[Arrays, Arrays], Arrays]
"""(gradients, parameters) -> updates of the first step."""


def check_chain(
    tx: optax.GradientTransformation,
    definition: Definition,
    preset: Preset,
    optimizer: str = "adam",
) -> None:
    """Refuse a chain whose steps are not the preset's.

    Args:
        tx: the whole chain, learning rate and decay included, over a dict of parameter name to array.
        definition: the model; a small one of the same kind will do, if its sizes differ from the base's.
        preset: whose rates the chain should apply.
        optimizer: what the chain is, a name the preset has a rule for.

    Raises:
        PresetError: a parameter whose rate, or whose lr*wd, stands in another ratio to the others' than the preset's, in the first
            step or later, or depends on the others' rates; or an eps that is no small part of gradients of norm 1.
    """
    # numpy's, so that nothing is compiled but the chain.
    params = {n: np.zeros(leaf.shape, leaf.dtype) for n, leaf in definition.abstract.items()}
    rng = np.random.default_rng(0)
    grads = {n: np.asarray(rng.normal(size=w.shape), w.dtype) for n, w in params.items()}
    ones, still = jax.tree.map(np.ones_like, params), jax.tree.map(np.zeros_like, params)

    @jax.jit
    def update(grads: Arrays, params: Arrays) -> Arrays:
        return chains.first_step(tx, optimizer, grads, params)[0]

    factors = resolve(preset, definition, optimizer)
    rates = {name: float(preset_lr.flat[0]) for name, preset_lr in factors.lr.items()}
    # Muon leaves the rest to Adam, and how fast the two go is the user's to choose.
    matrices = dimension_numbers(definition.specs) if preset.family(optimizer) == "muon" else {}
    if preset.family(optimizer) in ("adam", "muon"):
        _check_eps(
            update, grads, params, {n: x for n, x in factors.eps.items() if n not in matrices}
        )
    ours = reference(definition, preset, optimizer)
    sizes, targets = _sizes(update(grads, params)), _sizes(ours(grads, params))
    groups = [
        group
        for group in (
            [n for n in targets if n in matrices],
            [n for n in targets if n not in matrices],
        )
        if group
    ]
    for group in groups:
        _check_rates({n: sizes[n] / targets[n] for n in group}, rates, preset)
    _check_later(tx, optimizer, grads, params, groups)
    _check_norms(update, grads, params, preset)
    # Coupled decay pulls by lr * wd and independent decay by wd: either way one number for everything that decays.
    decayed = {n: size for n, size in _sizes(update(still, ones)).items() if size > 0}
    vectors = [n for n in decayed if definition.specs[n].role in VECTORS]
    if vectors:
        raise PresetError(
            f"{vectors[0]}: weight decay acts on it, and {preset.name} never decays gains and biases; mask them"
        )
    if decayed and not _equal(decayed):
        low, high = min(decayed, key=decayed.__getitem__), max(decayed, key=decayed.__getitem__)
        raise PresetError(
            f"{high}: lr*wd is {decayed[high] / decayed[low]:.3g} times that of {low}, and would drift as the model grows; "
            f"under {preset.name} it is one number: multiply the decay by scales.weight_decay, or apply it after the rates"
        )


def reference(definition: Definition, preset: Preset, optimizer: str) -> Update:
    """The first step of the loop's own chain at peak rate 1, without decay or schedule, as a jitted function.

    Args:
        definition: the model, at the sizes of the arrays that the function will take.
        preset: whose rates and eps it applies.
        optimizer: a name the preset has a rule for.
    """
    config = OptimizerConfig(name=optimizer, peak_lr=1.0, schedule="constant")
    tx = chains.build(config, definition.specs)
    factors, hyper = resolve(preset, definition, optimizer), hyperparams(config, 1).at(jnp.int32(0))

    @jax.jit
    def update(grads: Arrays, params: Arrays) -> Arrays:
        return chains.first_step(tx, optimizer, grads, params, factors=factors, hyper=hyper)[0]

    return update


def _sizes(updates: Arrays) -> dict[str, float]:
    return {
        name: float(np.sqrt(np.mean(np.square(np.asarray(u, np.float64)))))
        for name, u in updates.items()
    }


def _norm(*arrays: np.ndarray) -> float:
    """Of all together."""
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(a, np.float64)))) for a in arrays))


def _check_rates(ratios: dict[str, float], rates: dict[str, float], preset: Preset) -> None:
    if frozen := [name for name, ratio in ratios.items() if ratio == 0]:
        raise PresetError(
            f"{frozen[0]}: the chain does not move it; {preset.name} gives it a rate of {rates[frozen[0]]:.3g}"
        )
    typical = statistics.median(ratios.values())
    name, worst = max(ratios.items(), key=lambda item: abs(np.log(item[1] / typical)))
    if abs(worst / typical - 1) <= TOLERANCE:
        return
    twice, never = (
        {n: ratio * rates[n] ** power for n, ratio in ratios.items()} for power in (-1, 1)
    )
    if _equal(twice):
        why = "its rates are applied twice; apply them once"
    elif _equal(never):
        why = "its rates are not applied; multiply each update by scales.lr, after the optimizer and before the learning rate"
    else:
        why = "the optimizer has a scale of its own (optax.contrib.muon has one by shape: use scale_by_muon, which has none)"
    raise PresetError(
        f"{name}: moves {worst / typical:.3g} times as far as {preset.name} asks, relative to the others: {why}"
    )


def _check_later(
    tx: optax.GradientTransformation,
    optimizer: str,
    grads: Arrays,
    params: Arrays,
    groups: Sequence[Sequence[str]],
) -> None:
    """Every counter of the state put forward: a schedule may change all rates of a group, and none alone."""

    @jax.jit
    def update(count: jax.Array, grads: Arrays, params: Arrays) -> Arrays:
        _, state = chains.first_step(
            tx, optimizer, grads, params
        )  # moments in proportion to the gradients

        def forward(path: tuple, leaf: jax.Array) -> jax.Array:
            counts = bool(path) and getattr(path[-1], "name", None) == "count"
            return jnp.broadcast_to(count, leaf.shape).astype(leaf.dtype) if counts else leaf

        return tx.update(grads, jax.tree_util.tree_map_with_path(forward, state), params)[0]  # pyright: ignore

    first = _sizes(update(np.int32(1), grads, params))
    for step, group in itertools.product(LATER, groups):
        later = _sizes(update(np.int32(step), grads, params))
        left = {n: later[n] / first[n] for n in group if first[n]}
        typical = statistics.median(left.values())
        name = max(left, key=lambda n: abs(left[n] - typical))
        if abs(left[name] - typical) > _LATER_TOLERANCE * max(left[name], typical):
            raise PresetError(
                f"{name}: after {step} steps it moves {left[name] / typical if typical else math.inf:.2g} times as far, relative to "
                "the others, as at first: it has a schedule of its own; put one schedule on all, after the rates"
            )


def _check_norms(update: Update, grads: Arrays, params: Arrays, preset: Preset) -> None:
    """One parameter's step, where another has all the rest of a gradient of one norm: which other must not matter."""
    least = min(
        _sizes(update(grads, params)).items(), key=lambda item: item[1] * grads[item[0]].size ** 0.5
    )[0]
    moved: dict[str, float] = {}
    for other in (n for n in grads if n != least):
        alone = {n: g if n == least else np.zeros_like(g) for n, g in grads.items()}
        alone[other] = grads[other] * np.asarray(
            100 * _norm(grads[least]) / _norm(grads[other]), grads[other].dtype
        )
        moved[other] = _sizes(update(alone, params))[least]
    low, high = min(moved, key=moved.__getitem__), max(moved, key=moved.__getitem__)
    if moved[high] > (1 + TOLERANCE) * moved[low]:
        raise PresetError(
            f"{least}: moves {moved[high] / moved[low]:.3g} times as far where {high} has the gradient that {low} had: {preset.name}'s "
            "rates are applied before a global norm (optax.clip_by_global_norm); clip the raw gradients, first in the chain"
        )


def _check_eps(
    update: Update, grads: Arrays, params: Arrays, eps: Mapping[str, np.ndarray]
) -> None:
    """Gradients of global norm 1, as large relative to each other as the preset's eps says, and a sixteenth of them: equal steps."""
    shaped = {n: g * float(eps[n].flat[0]) if n in eps else g for n, g in grads.items()}
    norm = _norm(*shaped.values())
    parts = (
        {n: (g / (norm * part)).astype(g.dtype) for n, g in shaped.items()} for part in (1, 16)
    )
    whole, less = (_sizes(update(part, params)) for part in parts)
    name = min((n for n in eps if whole[n]), key=lambda n: less[n] / whole[n], default=None)
    if name is not None and less[name] < whole[name] / 2:
        raise PresetError(
            f"{name}: eps is no small part of gradients of norm 1: a sixteenth of them moves it {less[name] / whole[name]:.2g} times "
            "as far, where Adam's step does not depend on their size; write a smaller eps, times scales.eps"
        )


def _equal(numbers: Mapping[str, float]) -> bool:
    return max(numbers.values()) / min(numbers.values()) - 1 <= TOLERANCE
