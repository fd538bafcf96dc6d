"""Prediction of a run by a fitted law: best learning rate and loss with 50 and 90 % intervals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mupax.train.config.record import text_of
from mupax.train.config.run import Config
from mupax.train.studies.forecast.fitted import BEYOND_FREEDOM, MIN_VALUES, NoLaw, ScalingLaw
from mupax.train.studies.forecast.law import AXES, SIZE_DECIMALS, best_rate, log_loss
from mupax.train.studies.forecast.points import Setting, field_differences
from mupax.train.studies.sweep.grids import at_rate

DRAWS = 10
"""Number of random draws of a prediction for each sample of the law's parameters."""
QUANTILES = {"low90": 0.05, "low50": 0.25, "value": 0.5, "high50": 0.75, "high90": 0.95}
"""Quantiles of an interval, by the fields of `PredictionInterval`."""
FARTHEST = 3.0
"""Greatest distance from the best rate at which the parabola is used, in octaves."""
WIDE = 2.0
"""Octaves of a 90 % interval of the best rate above which several rates should be trained."""
FARTHEST_ROW = {
    "parameters": ("largest model", "smallest model"),
    "tokens": ("longest run", "shortest run"),
    "batch": ("run of the largest batch", "run of the smallest batch"),
}
"""Names of the largest and the smallest measured run by axis, for warnings."""
SHAPE = ("width", "depth", "encoder_depth", "num_heads", "head_dim", "num_kv_heads", "mlp_ratio")
"""Fields of a model that change its parameters. The law knows only their number."""


@dataclasses.dataclass(frozen=True)
class PredictionInterval:
    """Median of a predicted number with the ends of its 50 and 90 % intervals."""

    low90: float
    low50: float
    value: float
    high50: float
    high90: float

    @classmethod
    def from_draws(cls, draws: np.ndarray) -> PredictionInterval:
        """Return median and interval ends of draws, [n]."""
        quantiles = {}
        for name, q in QUANTILES.items():
            quantiles[name] = float(np.quantile(draws, q))
        return cls(**quantiles)

    def to_json(self, digits: int = 5) -> dict[str, float]:
        """Return the five numbers by field, rounded to `digits` decimals."""
        rounded = {}
        for name, value in dataclasses.asdict(self).items():
            rounded[name] = round(value, digits)
        return rounded


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Prediction for one run.

    Attributes:
        config: The run, at the predicted best rate or at its own.
        log2_lr: log2 of the best peak rate. `None` if the rows' rate does not vary.
        loss: Loss of the run at the rate of `config`, of the kind that the rows have.
        scale: Parameters, tokens and batch of the run, by the names in `AXES`.
        size_ratios: Ratio of each entry of `scale` to the largest value of the law's rows if the
            run is larger than all rows, to the smallest one if it is smaller. 1 in between.
        warnings: Reasons to doubt the prediction, a sentence each.
    """

    config: Config
    log2_lr: PredictionInterval | None
    loss: PredictionInterval
    scale: dict[str, int]
    size_ratios: dict[str, float]
    warnings: tuple[str, ...]


def predict(law: ScalingLaw, config: Config, *, keep_rate: bool = False) -> Prediction:
    """Predict the best learning rate and the loss of a run, with 50 and 90 % intervals.

    Draws have a fixed seed, so that the same law and run give the same prediction.

    Args:
        law: Law of the study that the run extends.
        keep_rate: Predict the loss at the run's own peak rate. By default it is predicted at the
            best rate. It has no effect if the rate does not vary in the rows.

    Raises:
        NoLaw: The run differs from the rows in more than its scale, or in an axis that no row
            varies.
    """
    target = Setting.bare(config)
    rows = law.rows
    _refuse_other_runs(law, target)
    scale = target.scale - rows.centre
    octaves = _octaves_beyond(law, scale)
    # Errors beyond the rows are taken as independent from axis to axis, so their squares add up.
    distance = float(np.sqrt((octaves**2).sum()))

    # Draws of parameters, noise of the run and error beyond the rows, [DRAWS * R].
    rng = np.random.default_rng(1)
    theta = np.tile(law.samples, (DRAWS, 1))
    count = len(theta)
    normal = rng.standard_normal((2, count))
    loss = log_loss(rows.names, theta, scale[None])[:, 0]
    loss = loss + np.tile(law.misses, DRAWS) * normal[0] + law.seed * normal[1]
    student = rng.standard_t(law.loss_growth.freedom, count)
    loss = loss + law.loss_growth.deviation * distance * student

    log2_lr = None
    if "c" in rows.names:
        best = best_rate(rows.names, theta, scale[None])[:, 0]
        student = rng.standard_t(law.rate_growth.freedom, count)
        # The error of the best rate is added first, because the loss below depends on that rate.
        best = best + law.rate_growth.deviation * distance * student
        # The interval is for the best rate that a study would measure, so it includes the scatter
        # of such measurements.
        measured = best + law.scatter * rng.standard_normal(count)
        log2_lr = PredictionInterval.from_draws(measured + rows.centre_log2_lr)
        own_rate = float(np.log2(config.optimizer.peak_lr))
        rate = own_rate if keep_rate else log2_lr.value
        octaves_off = np.clip(rate - rows.centre_log2_lr - best, -FARTHEST, FARTHEST)
        curvature = np.exp(theta[:, rows.names.index("c")])
        loss = loss + curvature * octaves_off**2
        if not keep_rate:
            # Four digits keep the printed command short.
            config = at_rate(config, float(f"{2.0**rate:.4g}"))

    size_ratios = {}
    for name, value in zip(AXES, octaves, strict=True):
        size_ratios[name] = float(2.0**value)
    sizes = (target.parameters, target.tokens, config.data.batch_size)
    return Prediction(
        config=config,
        log2_lr=log2_lr,
        loss=PredictionInterval.from_draws(rows.centre_loss * np.exp(loss)),
        scale=dict(zip(AXES, sizes, strict=True)),
        size_ratios=size_ratios,
        warnings=tuple(_warnings(law, config, size_ratios, log2_lr)),
    )


def _refuse_other_runs(law: ScalingLaw, target: Setting) -> None:
    """Refuse a run that differs from the law's measured runs in more than its scale.

    The run is compared with the measured one that is nearest in parameters, tokens and batch.

    Raises:
        NoLaw: The run differs. The text names up to four fields.
    """

    def distance(setting: Setting) -> float:
        return float(np.abs(setting.scale - target.scale).sum())

    # The nearest setting, because fields that follow from the size differ least there.
    nearest = min(law.points.settings, key=distance)
    differences = field_differences(target.config, nearest.config)
    if differences:
        texts = []
        for name, value, measured in differences[:4]:
            texts.append(f"{name} {text_of(value)} (measured: {text_of(measured)})")
        raise NoLaw(
            f"this run differs from the measured ones in more than {', '.join(AXES)}: "
            f"{', '.join(texts)}; write the measured values, or measure runs with these"
        )


def _octaves_beyond(law: ScalingLaw, scale: np.ndarray) -> np.ndarray:
    """Return how far a run lies outside of the law's rows, in octaves of each axis, [3].

    A value is positive above the largest row, negative below the smallest one, and 0 in between.

    Args:
        scale: log2 of parameters, tokens and batch of the run less the rows' mean, [3].

    Raises:
        NoLaw: The run lies beyond the rows in an axis that no row varies.
    """
    rows = law.rows
    low = rows.scale.min(axis=0)
    high = rows.scale.max(axis=0)
    octaves = np.where(scale > high, scale - high, np.where(scale < low, scale - low, 0.0))
    # Sizes that differ by rounding alone are the same.
    octaves = np.where(np.abs(octaves) < 1e-6, 0.0, octaves)
    for axis, name in enumerate(AXES):
        if octaves[axis] and high[axis] - low[axis] < 1e-6:
            measured = 2.0 ** rows.centre[axis]
            run_value = 2.0 ** (rows.centre[axis] + scale[axis])
            raise NoLaw(
                f"this run has {name} {run_value:,.0f}, and all measured runs have {measured:,.0f}; keep "
                f"{name} at {measured:,.0f}, or measure runs with other {name}"
            )
    return octaves


def _warnings(
    law: ScalingLaw,
    config: Config,
    size_ratios: dict[str, float],
    log2_lr: PredictionInterval | None,
) -> list[str]:
    """Return reasons to doubt a prediction, a sentence each.

    Args:
        size_ratios: As in `Prediction`.
        log2_lr: As in `Prediction`.
    """
    warnings = []
    for name, ratio in size_ratios.items():
        if ratio != 1:
            largest, smallest = FARTHEST_ROW[name]
            row = smallest if ratio < 1 else largest
            warnings.append(f"extrapolates: {ratio:.3g} times the {name} of the {row} measured")
    for axis, name in enumerate(AXES):
        num_values = len(set(np.round(law.rows.scale[:, axis], SIZE_DECIMALS)))
        if size_ratios[name] != 1 and num_values < MIN_VALUES:
            warnings.append(
                f"the rows have {num_values} values of {name}: beyond them the loss follows "
                f"published laws, with a wide interval"
            )
    warnings += _shape_warnings(law, config)

    is_beyond = any(ratio != 1 for ratio in size_ratios.values())
    if law.loss_growth.freedom == BEYOND_FREEDOM and is_beyond:
        warnings.append(
            "the law's error beyond its rows could not be measured: none of "
            f"{', '.join(AXES)} has four values"
        )
    if log2_lr is not None and log2_lr.high90 - log2_lr.low90 > WIDE:
        warnings.append(
            f"the 90 % interval of the best rate spans {log2_lr.high90 - log2_lr.low90:.1f} "
            "octaves; train at several rates in it"
        )
    return warnings


def _shape_warnings(law: ScalingLaw, config: Config) -> list[str]:
    """Return a warning for each field in `SHAPE` that all rows share and this run changes.

    A law of a single setting gets none.
    """
    settings = law.points.settings
    if len(settings) < 2:
        return []
    warnings = []
    for name in SHAPE:
        value: Any = getattr(config.model, name, None)
        measured = {getattr(setting.config.model, name, None) for setting in settings}
        if len(measured) == 1 and value not in measured:
            warnings.append(
                f"model.{name} is {value}, and {measured.pop()} in every row: the law only "
                f"accounts for its effect on the number of parameters"
            )
    return warnings
