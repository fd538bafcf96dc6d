"""Points that several studies of a comparison have in common: where two presets give a model the very same numbers.

Every relative preset is `sp` at its base, and a preset without a depth rule is `sp` at every depth. Such a point is trained
once, as `sp`, and serves all.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from presets import PresetError
from train.config import Config, PresetConfig, preset_of
from train.factors import init_stds, resolve
from train.transfer import Study
from zoo.build import definition


def shared(study: Study) -> Study:
    """The study, its points under `sp` where that changes no number."""
    return dataclasses.replace(study, trained=tuple(map(_plain, study.configs)))


def _plain(config: Config) -> Config:
    plain = dataclasses.replace(config, preset=PresetConfig(name="sp", base=config.preset.base))
    try:
        ours, its = _numbers(config), _numbers(plain)
    except PresetError:  # one of them has no rule for this model or optimizer
        return config
    same = len(ours) == len(its) and all(np.array_equal(a, b) for a, b in zip(ours, its, strict=True))
    return plain if same else config


def _numbers(config: Config) -> list[np.ndarray]:
    """All that a preset decides in a run: factors and initial standard deviations."""
    preset, model = preset_of(config), definition(config.model)
    factors = resolve(preset, model, config.optimizer.name, config.optimizer.decay)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((factors, init_stds(preset, model)))]
