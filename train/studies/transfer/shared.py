"""Points that several studies of a comparison have in common: where two presets give a model the very same numbers.

Every relative preset is `sp` at its base, a preset without a depth rule is `sp` at every depth, and `mup` and `mup-half` are one
rule where heads grow. Such a point is trained once, under the name that comes first, and serves all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from mupax.presets import PresetError
from mupax.train.config.preset import PresetConfig, preset_of
from mupax.train.config.run import Config
from mupax.train.core.factors import init_stds, resolve
from mupax.train.studies.transfer.study import Study
from mupax.zoo.definition import definition


def shared(studies: Sequence[Study]) -> list[Study]:
    """The studies, their points under `sp`, or under the preset of an earlier study, where that changes no number."""
    seen: list[tuple[Config, list[np.ndarray]]] = []

    def first(config: Config) -> Config:
        """The first of `sp`, `seen` and the config itself that trains as it does; is added to `seen`."""
        if (ours := _preset_arrays(config)) is None:
            return config
        plain = dataclasses.replace(config, preset=PresetConfig(name="sp", base=config.preset.base))
        for other, its in [(plain, _preset_arrays(plain)), *seen]:
            same_run = dataclasses.replace(other, preset=config.preset) == config
            if its is not None and same_run and len(ours) == len(its) and all(map(np.array_equal, ours, its)):
                return other
        seen.append((config, ours))
        return config

    return [dataclasses.replace(study, trained=tuple(map(first, study.configs))) for study in studies]


def _preset_arrays(config: Config) -> list[np.ndarray] | None:
    """All that a preset decides in a run: factors and initial standard deviations; None where it has no rule for this one."""
    try:
        preset, model = preset_of(config), definition(config.model)
        factors = resolve(preset, model, config.optimizer.name, config.optimizer.decay)
    except PresetError:
        return None
    return [np.asarray(leaf) for leaf in jax.tree.leaves((factors, init_stds(preset, model)))]
