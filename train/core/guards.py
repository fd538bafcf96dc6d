"""What an optax chain written by hand around `presets.Preset.scales` does to a preset, by its answers to a few gradients.

`check_chain` finds rates applied twice, not at all, or over an optimizer that scales by shape itself (`optax.contrib.muon`), and
lr*wd that differs between parameters, which would drift as they grow. A schedule is one number a step and touches no ratio of rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.presets import VECTORS, Preset, PresetError
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer as chains
from mupax.train.core.factors import TOLERANCE, resolve
from mupax.train.core.transforms import dimension_numbers
from mupax.zoo.definition import Arrays, Definition

Update = Callable[[Arrays, Arrays], Arrays]
"""(gradients, parameters) -> updates of the first step."""


def check_chain(
    tx: optax.GradientTransformation, definition: Definition, preset: Preset, optimizer: str = "adam"
) -> None:
    """Compare a chain's first step with the preset's.

    Args:
        tx: the whole chain, learning rate and decay included, over a dict of parameter name to array.
        definition: the model; a small one of the same kind will do, if its sizes differ from the base's.
        preset: whose rates the chain should apply.
        optimizer: what the chain is, a name the preset has a rule for.

    Raises:
        PresetError: a parameter whose rate, or whose lr*wd, stands in another ratio to the others' than the preset's.
    """
    params = {n: jnp.zeros(leaf.shape, leaf.dtype) for n, leaf in definition.abstract.items()}
    rng = np.random.default_rng(0)
    grads = {n: jnp.asarray(rng.normal(size=w.shape), w.dtype) for n, w in params.items()}
    ones, still = jax.tree.map(jnp.ones_like, params), jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def update(grads: Arrays, params: Arrays) -> Arrays:
        return tx.update(grads, tx.init(params), params)[0]  # pyright: ignore[reportReturnType]

    rates = {name: float(preset_lr.flat[0]) for name, preset_lr in resolve(preset, definition, optimizer).lr.items()}
    ours = reference(definition, preset, optimizer)
    found, wanted = _sizes(update(grads, params)), _sizes(ours(grads, params))
    # Muon leaves the rest to Adam, and how fast the two go is the user's to choose.
    matrices = dimension_numbers(definition.specs) if preset.family(optimizer) == "muon" else {}
    for group in ([n for n in wanted if n in matrices], [n for n in wanted if n not in matrices]):
        if group:
            _check_rates({n: found[n] / wanted[n] for n in group}, rates, preset)
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
    """The first step of the loop's own chain at peak rate 1, without decay or schedule."""
    config = OptimizerConfig(name=optimizer, peak_lr=1.0, schedule="constant")
    tx = chains.build(config, definition.specs)
    factors, hyper = resolve(preset, definition, optimizer), chains.hyper(config, 1).at(jnp.int32(0))

    @jax.jit
    def update(grads: Arrays, params: Arrays) -> Arrays:
        return tx.update(grads, tx.init(params), params, factors=factors, hyper=hyper)[0]  # pyright: ignore

    return update


def _sizes(updates: Mapping[str, jax.Array]) -> dict[str, float]:
    return {name: float(jnp.sqrt(jnp.mean(jnp.square(u)))) for name, u in updates.items()}


def _check_rates(ratios: dict[str, float], rates: dict[str, float], preset: Preset) -> None:
    if frozen := [name for name, ratio in ratios.items() if ratio == 0]:
        raise PresetError(
            f"{frozen[0]}: the chain does not move it; {preset.name} gives it a rate of {rates[frozen[0]]:.3g}"
        )
    typical = statistics.median(ratios.values())
    name, worst = max(ratios.items(), key=lambda item: abs(np.log(item[1] / typical)))
    if abs(worst / typical - 1) <= TOLERANCE:
        return
    twice, never = ({n: ratio * rates[n] ** power for n, ratio in ratios.items()} for power in (-1, 1))
    if _equal(twice):
        why = "its rates are applied twice; apply them once"
    elif _equal(never):
        why = "its rates are not applied; multiply each update by scales.lr, after the optimizer and before the learning rate"
    else:
        why = "the optimizer has a scale of its own (optax.contrib.muon has one by shape: use scale_by_muon, which has none)"
    raise PresetError(
        f"{name}: moves {worst / typical:.3g} times as far as {preset.name} asks, relative to the others: {why}"
    )


def _equal(numbers: Mapping[str, float]) -> bool:
    return max(numbers.values()) / min(numbers.values()) - 1 <= TOLERANCE
