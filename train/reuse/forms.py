"""Convert a training state from one form of a preset to another: the same model, the same next step, other numbers.

A multiplier theta times larger has weight / theta, first moment or momentum * theta, second moment * theta^2
(the abc symmetry, Tensor Programs IV; moments derived from it).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mupax.presets import Preset, PresetError
from mupax.train.core.factors import Numbers, resolve
from mupax.train.core.state import TrainState
from mupax.train.reuse import transplant
from mupax.train.reuse.transplant import Move
from mupax.zoo.definition import Arrays, Definition


def convert(
    state: TrainState, definition: Definition, before: Preset, after: Preset, optimizer: str = "adam"
) -> TrainState:
    """The state of a run under `before`, as the run under `after` would have it.

    Args:
        state: parameters and optimizer state trained under `before`.
        definition: the model.
        before: the preset of the run.
        after: the same preset in another form (or absolute for relative, with `relative_to`'s constants).
        optimizer: the run's.

    Raises:
        PresetError: the two differ in more than their form; the text names a parameter and a column.
    """
    thetas = theta(definition, before, after, optimizer)
    moves = {
        name: Move(source=name, along=tuple(map(transplant.same, w.shape)), scale=1 / np.asarray(thetas[name], float))
        for name, w in state.params.items()
    }

    def moved(weights: Arrays) -> Arrays:
        return transplant.parameters(moves, weights, {}, list(weights))

    moments = transplant.optimizer_state(moves, state.opt_state, state.opt_state, optimizer)
    average = None if state.ema is None else moved(state.ema)
    converted = state._replace(params=moved(state.params), opt_state=moments, ema=average)
    return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), converted, state)


def theta(definition: Definition, before: Preset, after: Preset, optimizer: str = "adam") -> Numbers:
    """How many times larger each multiplier is under `after`; arguments as for `convert`.

    Raises:
        PresetError: the change is not the symmetry.
    """
    one, other = (resolve(preset, definition, optimizer) for preset in (before, after))
    thetas = {name: other.multiplier[name] / one.multiplier[name] for name in definition.specs}
    family = before.family(optimizer)
    for name, factor in thetas.items():
        on_adam = family == "adam" or (family == "muon" and before.row(definition.specs[name]).muon is None)
        for column, power in {"lr": -2 if family == "sgd" else -1, "eps": int(on_adam)}.items():
            wanted = getattr(one, column)[name] * factor**power
            if abs(getattr(other, column)[name] / wanted - 1).max() > 1e-5:
                raise PresetError(
                    f"{name}: {column} is not what the multiplier's change asks for, so {after.describe()} is another "
                    f"parameterization than {before.describe()}; convert only between forms of one preset"
                )
    return thetas
