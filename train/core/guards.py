"""What would undo a preset is refused by name: a run's growth and decay, and an optax chain of one's own.

`check_run`: what a run refuses before anything is allocated. By then `mupax.zoo.definition.define` has refused a parameter
without spec and `mupax.train.core.factors.resolve` a role without rule. A schedule is one number a step and touches no ratio of rates.

`check_chain`: for an optax chain written by hand around `presets.Preset.scales`; probes it with one gradient and one
parameter. Catches rates applied twice, not at all, or over an optimizer that scales by shape itself
(`optax.contrib.muon`), and lr*wd that differs between parameters, which would drift as they grow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.presets import VECTORS, Preset, PresetError
from mupax.presets.analysis.uneven import refuse_uneven
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer as chains
from mupax.train.core.factors import Factors, resolve
from mupax.train.core.transforms import dimension_numbers
from mupax.zoo.definition import Arrays, Definition

TOLERANCE = 0.02
"""Relative difference of two rates that are the same: betas and Nesterov momentum change a first step by a common factor."""

Update = Callable[[Arrays, Arrays], Arrays]
"""(gradients, parameters) -> updates of the first step."""


def check_run(preset: Preset, definition: Definition, factors: Factors, config: OptimizerConfig) -> None:
    """Whether the model has grown from the base in a way that the preset's rules cover.

    Args:
        preset: the run's.
        definition: its model.
        factors: `resolve` of the two.
        config: its optimizer.

    Raises:
        PresetError: widths have not grown together and something explodes for it, or the pull lr*wd of a parameter is not
            what it is at the base, unless a constant of the preset was named that asks for it.
    """
    refuse_uneven(preset, definition.sizes, config.name)
    chosen = {"decay", "decay_width"} & set(preset.given)
    if (
        config.weight_decay == 0
        or "weight_decay" not in OPTIMIZERS[config.name].reads
        or chosen
        or preset.name == "measured"
    ):
        return
    for name, decay in factors.weight_decay.items():
        pull = decay * factors.lr[name] if config.decay == "coupled" else decay
        worst = float(pull.flat[np.argmax(np.abs(pull - 1))])
        if decay.any() and abs(worst - 1) > TOLERANCE:
            how = "give its rule a decay that keeps it"
            if preset.name == "completep":
                how = "write the constant decay=rate to keep it, or decay=table to accept it"
            raise PresetError(
                f"{name}: lr*wd is {worst:.3g} times its value at the base under {preset.label}, and drifts as the model grows; "
                f"{how} (or train without weight decay)"
            )


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
    _check_decay(decayed, preset)


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


def _check_decay(decayed: dict[str, float], preset: Preset) -> None:
    if decayed and not _equal(decayed):
        low, high = min(decayed, key=decayed.__getitem__), max(decayed, key=decayed.__getitem__)
        raise PresetError(
            f"{high}: lr*wd is {decayed[high] / decayed[low]:.3g} times that of {low}, and would drift as the model grows; "
            f"under {preset.name} it is one number: multiply the decay by scales.weight_decay, or apply it after the rates"
        )


def _equal(numbers: Mapping[str, float]) -> bool:
    return max(numbers.values()) / min(numbers.values()) - 1 <= TOLERANCE
