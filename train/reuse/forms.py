"""Carry a training state from one form of a preset to another: the same model, the same next step, other numbers.

A multiplier theta times larger has weight / theta, first moment or momentum * theta, second moment * theta^2
(the abc symmetry, Tensor Programs IV; moments derived from it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from mupax.presets import Preset, PresetError
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.core.factors import Numbers, resolve
from mupax.train.core.state import TrainState
from mupax.train.core.transforms import rows
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

    def moved(weights: Arrays) -> Arrays:
        return {name: w / rows(thetas[name], w) for name, w in weights.items()}

    average = None if state.ema is None else moved(state.ema)
    return TrainState(
        state.step, moved(state.params), _moments(state.opt_state, thetas, optimizer), average, state.health
    )


def theta(definition: Definition, before: Preset, after: Preset, optimizer: str = "adam") -> Numbers:
    """How many times larger each multiplier is under `after`.

    Raises:
        PresetError: the change is not the symmetry.
    """
    one, other = (resolve(preset, definition, optimizer) for preset in (before, after))
    thetas = {name: other.multiplier[name] / one.multiplier[name] for name in definition.specs}
    power = -2 if before.family(optimizer) == "sgd" else -1
    for name, factor in thetas.items():
        for column, exponent in {"lr": power, "eps": _eps_power(before, definition, name, optimizer)}.items():
            wanted = getattr(one, column)[name] * factor**exponent
            if abs(getattr(other, column)[name] / wanted - 1).max() > 1e-5:
                raise PresetError(
                    f"{name}: {column} is not what the multiplier's change asks for, so {after.describe()} is another "
                    f"parameterization than {before.describe()}; convert only between forms of one preset"
                )
    return thetas


def _eps_power(preset: Preset, definition: Definition, name: str, optimizer: str) -> int:
    family = preset.family(optimizer)
    on_adam = family == "adam" or (family == "muon" and preset.row(definition.specs[name]).muon is None)
    return 1 if on_adam else 0


def _moments(opt_state: Any, thetas: Numbers, optimizer: str) -> Any:
    if powers := powers_of(opt_state, optimizer):
        return opt_state._replace(
            **{field: _times(getattr(opt_state, field), thetas, p) for field, p in powers.items()}
        )
    if isinstance(opt_state, tuple):
        parts = [_moments(part, thetas, optimizer) for part in opt_state]
        return type(opt_state)(*parts) if hasattr(opt_state, "_fields") else tuple(parts)
    return opt_state


def powers_of(opt_state: Any, optimizer: str) -> dict[str, int]:
    """The power of the gradient in each field of an optimizer's state that holds a moment; empty for another part of a chain."""
    fields = getattr(opt_state, "_fields", ())
    return {field: power for field, power in OPTIMIZERS[optimizer].moments.items() if field in fields}


def _times(moments: Mapping[str, Any], thetas: Numbers, power: int) -> Arrays:
    return {
        name: m if isinstance(m, optax.MaskedNode) else m * rows(thetas[name] ** power, m)
        for name, m in moments.items()
    }
