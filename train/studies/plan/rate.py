"""A rate without a law: the best of a study's largest setting, which a preset that transfers promises to stay; and why not that."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from mupax.presets import horizon
from mupax.train.config import joint
from mupax.train.config.preset import preset_of
from mupax.train.config.record import differences, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.studies.forecast.points import Points, Setting, field_differences
from mupax.train.studies.transfer.fit import fit as fit_curve

OPTIMIZER = ("name", "schedule", "clip_norm")
"""Fields of the optimizer at other values of which a rate is another."""
APART = 1.0
"""Octaves between the rates of two published rules from which on they contradict each other."""


def transferred(config: Config, points: Points) -> tuple[float | None, list[str]]:
    """log2 of the peak rate of the largest setting that has a best one and whose rate means the same, and cautions.

    Args:
        config: of the run.
        points: rows of its preset.

    Returns:
        None for the rate where there is no such setting; the first caution then says what differs and what to write.
    """
    best = _best(points)
    if not best:
        return None, [
            "no rate is taken from the study: no setting of it has a best one inside its grid; write more --lr"
        ]
    same = [pair for pair in best if not apart(config, pair[0].config)]
    if same:
        setting, log2_lr = same[-1]
        return log2_lr, [*_other_run(config, setting), *horizons(config, setting, log2_lr)]
    setting, log2_lr = best[-1]
    differing = apart(config, setting.config)
    texts = " and ".join(f"{name} {_text(now)} (measured: {_text(was)})" for name, now, was in differing)
    return None, [
        f"the study's best rate, 2^{log2_lr:.2f}, is not used: it is another at {texts}; write "
        f"{flags([(name, was) for name, _, was in differing])} to plan with it"
    ]


def _other_run(config: Config, setting: Setting) -> list[str]:
    """Return a caution where a rate is taken from runs on other data, or of a model that differs in more than its scale."""
    differing = field_differences(config, setting.config)
    if not differing:
        return []
    texts = " and ".join(f"{name} {_text(now)} (measured: {_text(was)})" for name, now, was in differing)
    return [
        f"the best rate of runs that differ in more than their scale is used, and may be another here: {texts}; sweep a few rates "
        "around it, or write the study's values to plan with what was measured"
    ]


def apart(config: Config, setting: Config) -> list[tuple[str, Any, Any]]:
    """Fields in which two runs differ and by which a rate means something else, with both values.

    Args:
        config: of the run.
        setting: of a run that was measured.
    """
    differing = [
        (f"optimizer.{name}", getattr(config.optimizer, name), getattr(setting.optimizer, name))
        for name in OPTIMIZER
        if getattr(config.optimizer, name) != getattr(setting.optimizer, name)
    ]
    if config.preset.name != setting.preset.name:
        differing.append(("preset.name", config.preset.name, setting.preset.name))
    elif preset_of(config).base != preset_of(setting).base:
        differing.append(("preset.base", config.preset.base, setting.preset.base))
    return differing


def preset_flags(config: Config, setting: Config) -> str:
    """What makes the preset of a run that of another.

    Args:
        config: of the run.
        setting: of the other.
    """
    fields = differences(to_json(config)["preset"], to_json(setting)["preset"], "preset.")
    return flags([(name, was) for name, _, was in fields if name != "preset.noise_scale"])


def flags(fields: Sequence[tuple[str, Any]]) -> str:
    """Flags that give fields of a run these values.

    Args:
        fields: name and value.
    """
    return " ".join(
        f"--{name.replace('_', '-')} "
        + (" ".join(map(shlex.quote, value)) if isinstance(value, list) else shlex.quote(str(value)))
        for name, value in fields
    )


def contradictions(config: Config, points: Points) -> list[str]:
    """As `horizons`, of the largest setting that has a best rate.

    Args:
        config: of the run.
        points: rows.
    """
    best = _best(points)
    return horizons(config, *best[-1]) if best else []


def horizons(config: Config, setting: Setting, log2_lr: float) -> list[str]:
    """What published rules make of a measured rate at the run's batch and tokens, where they contradict each other.

    Args:
        config: of the run.
        setting: that was measured.
        log2_lr: its best peak rate.
    """
    if config.preset.joint != "none":
        return joint.cautions(config)
    tokens = config.steps * config.data.batch_size * config.model.units
    ratios = {"batch": config.data.batch_size / setting.config.data.batch_size, "tokens": tokens / setting.tokens}
    rates = {
        rule.name: log2_lr + math.log2(rule.factor("lr", ratios))
        for rule in horizon.RULES.values()
        if rule.lr is not None and "adam" in rule.families
    }
    octaves = max(rates.values()) - min(rates.values())
    if octaves < APART:
        return []
    listed = ", ".join(f"{name} 2^{rate:.1f}" for name, rate in sorted(rates.items(), key=lambda pair: pair[1]))
    return [
        f"published rules contradict each other at {ratios['tokens']:.3g} times the tokens and {ratios['batch']:.3g} times the batch "
        f"of the largest row, whose best rate is 2^{log2_lr:.1f}: {listed} (`mupax presets joint`)"
    ]


def _best(points: Points) -> list[tuple[Setting, float]]:
    """Settings with a best rate inside their grid, and log2 of it."""
    fits = [(setting, fit_curve(setting.curve, setting.curve.first)) for setting in points.settings]
    return [(setting, fit.optimum) for setting, fit in fits if not fit.trouble]


def _text(value: Any) -> str:
    return "none" if value is None else text_of(value)
