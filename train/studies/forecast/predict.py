"""What a law says of a run: its best learning rate and its loss, each with a 50 and a 90 % interval, or why nothing is said."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mupax.train.config.record import text_of
from mupax.train.config.run import Config
from mupax.train.studies.forecast.fitted import BEYOND_FREEDOM, LEAST, NoLaw, ScalingLaw
from mupax.train.studies.forecast.law import AXES, best_rate, log_loss
from mupax.train.studies.forecast.points import Setting, field_differences
from mupax.train.studies.sweep.grids import at_rate

DRAWS = 10
"""Of each sample of the law's parameters."""
QUANTILES = {"low90": 0.05, "low50": 0.25, "value": 0.5, "high50": 0.75, "high90": 0.95}
FARTHEST = 3.0
"""Octaves from the best rate beyond which the parabola is no loss any more."""
FARTHEST_ROW = {
    "parameters": ("largest model", "smallest model"),
    "tokens": ("longest run", "shortest run"),
    "batch": ("run of the largest batch", "run of the smallest batch"),
}
"""Of each axis what has most and least of it."""
SHAPE = ("width", "depth", "encoder_depth", "num_heads", "head_dim", "num_kv_heads", "mlp_ratio")


@dataclasses.dataclass(frozen=True)
class PredictionInterval:
    """A number that is predicted: median, 50 and 90 % interval."""

    low90: float
    low50: float
    value: float
    high50: float
    high90: float

    @classmethod
    def of(cls, draws: np.ndarray) -> PredictionInterval:
        """The band of many draws."""
        return cls(**{name: float(np.quantile(draws, at)) for name, at in QUANTILES.items()})

    def to_json(self, digits: int = 5) -> dict[str, float]:
        """Rounded."""
        return {name: round(value, digits) for name, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one run.

    Attributes:
        config: of the run, at the predicted rate.
        log2_lr: its best peak rate; None where the rows' rate does not vary.
        loss: of the run as it is, at its rate.
        scale: its parameters, tokens and batch.
        beyond: of these to how many times the nearest that was measured, above 1 where it is larger and below where smaller.
        warnings: what to know before it is believed, a sentence each.
    """

    config: Config
    log2_lr: PredictionInterval | None
    loss: PredictionInterval
    scale: dict[str, int]
    beyond: dict[str, float]
    warnings: tuple[str, ...]


def predict(law: ScalingLaw, config: Config, *, keep_rate: bool = False) -> Prediction:
    """What the law says of a run.

    Args:
        law: fitted.
        config: of the run.
        keep_rate: the run's own peak rate, and not the law's best one.

    Raises:
        NoLaw: the run differs from the measured ones in more than its scale, or in an axis that none of them varies.
    """
    target, rows = Setting.bare(config), law.rows
    nearest = min(
        law.points.settings, key=lambda setting: float(np.abs(setting.scale - target.scale).sum())
    )
    if differing := field_differences(config, nearest.config):
        texts = ", ".join(
            f"{name} {text_of(now)} (measured: {text_of(was)})" for name, now, was in differing[:4]
        )
        raise NoLaw(
            f"nothing is said of a run that differs from the measured ones in more than its scale: {texts}"
        )
    low, high, scale = rows.scale.min(axis=0), rows.scale.max(axis=0), target.scale - rows.centre
    octaves = np.where(scale > high, scale - high, np.where(scale < low, scale - low, 0.0))
    octaves = np.where(np.abs(octaves) < 1e-6, 0.0, octaves)
    for axis, name in enumerate(AXES):
        if octaves[axis] and high[axis] - low[axis] < 1e-6:
            value = 2.0 ** rows.centre[axis]
            raise NoLaw(f"nothing is said of other {name} than {value:,.0f}, which all rows have")
    distance, rng = float(np.sqrt((octaves**2).sum())), np.random.default_rng(1)
    theta = np.tile(law.samples, (DRAWS, 1))
    normal = rng.standard_normal((2, len(theta)))
    loss = (
        log_loss(rows.names, theta, scale[None])[:, 0]
        + np.tile(law.misses, DRAWS) * normal[0]
        + law.seed * normal[1]
    )
    loss = loss + law.beyond[0] * distance * rng.standard_t(law.beyond[1], len(theta))
    band = None
    if "c" in rows.names:
        best = best_rate(rows.names, theta, scale[None])[:, 0]
        best = best + law.rate_beyond[0] * distance * rng.standard_t(law.rate_beyond[1], len(theta))
        band = PredictionInterval.of(
            best + law.scatter * rng.standard_normal(len(theta)) + rows.middle
        )  # as a study would measure it
        own = float(np.log2(config.optimizer.peak_lr))
        rate = own if keep_rate else band.value
        off = np.clip(rate - rows.middle - best, -FARTHEST, FARTHEST)
        loss = loss + np.exp(theta[:, rows.names.index("c")]) * off**2
        if not keep_rate:
            config = at_rate(config, float(f"{2.0**rate:.4g}"))
    beyond = {name: float(2.0**value) for name, value in zip(AXES, octaves, strict=True)}
    numbers = dict(
        zip(AXES, (target.parameters, target.tokens, config.data.batch_size), strict=True)
    )
    return Prediction(
        config,
        band,
        PredictionInterval.of(rows.loss * np.exp(loss)),
        numbers,
        beyond,
        tuple(_warnings(law, config, beyond, band)),
    )


def _warnings(
    law: ScalingLaw, config: Config, beyond: dict[str, float], rate: PredictionInterval | None
) -> list[str]:
    warnings = [
        f"extrapolates: {ratio:.3g} times the {name} of the {FARTHEST_ROW[name][ratio < 1]} measured"
        for name, ratio in beyond.items()
        if ratio != 1
    ]
    for axis, name in enumerate(AXES):
        values = len(set(np.round(law.rows.scale[:, axis], 6)))
        if beyond[name] != 1 and values < LEAST:
            warnings.append(
                f"the rows have {values} values of {name}: how the loss goes on is what others measured, widely"
            )
    shapes: list[dict[str, Any]] = [
        {name: getattr(each.model, name, None) for name in SHAPE}
        for each in (config, *(setting.config for setting in law.points.settings))
    ]
    for name, value in shapes[0].items():
        measured = {shape[name] for shape in shapes[1:]}
        if len(measured) == 1 and value not in measured and len(law.points.settings) > 1:
            warnings.append(
                f"{name} is {value}, and {measured.pop()} in every row: the law knows only how many parameters there are"
            )
    if law.beyond[1] == BEYOND_FREEDOM and any(ratio != 1 for ratio in beyond.values()):
        warnings.append(
            "how far the law misses what lies beyond it could not be measured: no axis has four values"
        )
    if rate and rate.high90 - rate.low90 > 2:
        warnings.append("the best rate is known to no octave; train at a few")
    return warnings
