"""The numbers of a planned run, each with its interval and the rule or study that it comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mupax.presets import horizon
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config import joint
from mupax.train.config.run import Config
from mupax.train.studies.forecast import record
from mupax.train.studies.forecast.fitted import Law, NoLaw, fitted
from mupax.train.studies.forecast.points import METRICS, Points, Setting
from mupax.train.studies.forecast.predict import Prediction, predict
from mupax.train.studies.transfer.fit import fit as fit_curve
from mupax.train.studies.transfer.planned import label_of
from mupax.zoo import flops

Line = tuple[str, str, str, str]
"""What, value, 90 % interval, and where it is from."""
APART = 1.0
"""Octaves between the rates of two published rules from which on they contradict each other."""


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What studies say of a run.

    Attributes:
        config: of the run, at the rate to train with.
        rate: where that rate is from, and its 90 % interval; as in a `Line`.
        prediction: of rate and loss; None where no law says anything.
        law: that says it.
        points: the rows; None without a study.
        cautions: a sentence each.
    """

    config: Config
    rate: tuple[str, str]
    prediction: Prediction | None = None
    law: Law | None = None
    points: Points | None = None
    cautions: tuple[str, ...] = ()

    def forecast(self, config: Config, what: str) -> dict[str, Any] | None:
        """The forecast in the plan; None where no law says anything.

        Args:
            config: of the run as it is planned at last.
            what: was asked for.
        """
        if self.law is None or self.prediction is None:
            return None
        return record.forecast(self.law, dataclasses.replace(self.prediction, config=config), what)


def of_law(config: Config, found: Sequence[Points], *, keep_rate: bool = False) -> Learnt:
    """The run at the rate that the rows say, with what they say of its loss.

    Args:
        config: of the run.
        found: rows by preset; those of the run's preset count.
        keep_rate: the run's own rate, as it was asked for.
    """
    if not found:
        return Learnt(
            config, ("", "the recipe"), cautions=("no study: nothing is predicted of the loss; write --from FOLDER",)
        )
    label = label_of(config.preset)
    same = [points for points in found if points.label == label]
    if not same:
        labels = ", ".join(points.label for points in found)
        return Learnt(
            config, ("", "the recipe"), cautions=(f"no study of {label}: --from has {labels}; write --preset with one",)
        )
    points = same[0]
    where = f"{points.rows} rows of {' and '.join(points.folders)}"
    try:
        law = fitted(points)
        prediction = predict(law, config, keep_rate=keep_rate)
    except NoLaw as error:
        if keep_rate:
            return Learnt(config, ("", "asked for"), points=points, cautions=(f"no loss is predicted: {error}",))
        return _transferred(config, points, where, str(error))
    rate = prediction.log2_lr
    if keep_rate:
        return Learnt(prediction.config, ("", "asked for"), prediction, law, points, prediction.warnings)
    said = (
        ("", "the recipe, and every row")
        if rate is None
        else (f"2^{rate.low90:.2f} to 2^{rate.high90:.2f}", f"law over {where}")
    )
    cautions = (*prediction.warnings, *_contradictions(prediction.config, points))
    return Learnt(prediction.config, said, prediction, law, points, cautions)


def rows(config: Config, learnt: Learnt) -> list[Line]:
    """The run as a table: its shape, length, optimizer and expected loss.

    Args:
        config: of the run as it is planned at last.
        learnt: what studies say of it.
    """
    model, given, opt = config.model, config.optimizer, config.scaled_optimizer
    recipe, unit = f"recipe {config.recipe}", model.unit
    rule = recipe if config.preset.joint == "none" else f"{recipe}, joint rule {config.preset.joint}"
    parameters, seen = flops.params(model), config.steps * config.data.batch_size * model.units
    shape = ", ".join(f"{axis} {size}" for axis, size in model.base_sizes().items())
    lines: list[Line] = [
        ("shape", shape, "", recipe),
        ("parameters", f"{parameters:,}", "", "counted"),
        ("batch", f"{config.data.batch_size} x {model.units} {unit}s", "", recipe),
        ("steps", f"{config.steps:,}, {seen:,} {unit}s, {seen / parameters:.3g} per parameter", "", "asked for"),
        ("preset", f"{label_of(config.preset)}, base {config.preset.base}", "", recipe),
        ("peak rate", f"{opt.peak_lr:.4g} = 2^{round(math.log2(opt.peak_lr), 2):g}", *learnt.rate),
    ]
    if opt.peak_lr != given.peak_lr:
        lines.append(("rate at the base", f"{given.peak_lr:.4g}", "", f"scaled by joint rule {config.preset.joint}"))
    values = {
        "betas": ("b1", f"{opt.b1:.4g}, {opt.b2:.4g}"),
        "momentum": ("momentum", f"{opt.momentum:g}"),
        "eps": ("eps", f"{opt.eps:.3g}"),
        "weight decay": ("weight_decay", f"{opt.weight_decay:.4g}" if opt.weight_decay else "none"),
    }
    lines += [(what, value, "", rule) for what, (field, value) in values.items() if field in OPTIMIZERS[opt.name].reads]
    if opt.weight_decay:
        span, _, formula = joint.decay_text(opt, config.steps).partition(" (")
        lines.append(("decay averages", span, "", formula.rstrip(")")))
    lines += [
        ("clip", f"{opt.clip_norm or 'none'}", "", recipe),
        ("schedule", f"{opt.schedule} to {opt.final_lr_fraction:g} of the peak", "", recipe),
        (
            "warm-up",
            f"{opt.warmup_steps} steps, {opt.warmup_steps / config.steps:.1%} of the run",
            "",
            f"{rule}, as a fraction",
        ),
    ]
    if learnt.prediction is not None and learnt.points is not None:
        loss = learnt.prediction.loss
        where = f"law over {' and '.join(learnt.points.folders)}"
        lines.append(
            (
                "loss",
                f"{loss.value:.4f}",
                f"{loss.low90:.4f} to {loss.high90:.4f}",
                f"{where}: {METRICS[learnt.points.metric]}",
            )
        )
    return lines


def command(config: Config) -> str:
    """What trains the run."""
    return record.command_of(config) or "(no recipe has its name)"


def _transferred(config: Config, points: Points, where: str, why: str) -> Learnt:
    """The run at the best rate of the largest setting that has one: what a preset that transfers promises, no more."""
    best = [(setting, fit_curve(setting.curve, setting.curve.first)) for setting in points.settings]
    best = [(setting, fit) for setting, fit in best if not fit.trouble]
    caution = f"no loss is predicted: {why}"
    same = [pair for pair in best if _same_rate(pair[0].config, config)]
    if not same:
        return Learnt(config, ("", "the recipe"), points=points, cautions=(caution,))
    setting, fit = same[-1]
    peak = float(f"{2.0**fit.optimum:.4g}")
    rate = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, peak_lr=peak))
    said = f"best of the largest of {where}; that it stays is the preset's claim"
    return Learnt(rate, ("", said), points=points, cautions=(caution, *_horizons(config, setting, fit.optimum)))


def _same_rate(setting: Config, config: Config) -> bool:
    """Whether a rate means the same in both: one optimizer, and a preset relative to one base."""
    names = ("name", "schedule", "clip_norm")
    return (setting.preset.base, setting.preset.name) == (config.preset.base, config.preset.name) and all(
        getattr(setting.optimizer, name) == getattr(config.optimizer, name) for name in names
    )


def _contradictions(config: Config, points: Points) -> list[str]:
    best = [(setting, fit_curve(setting.curve, setting.curve.first)) for setting in points.settings]
    best = [(setting, fit.optimum) for setting, fit in best if not fit.trouble]
    return _horizons(config, *best[-1]) if best else []


def _horizons(config: Config, setting: Setting, log2_lr: float) -> list[str]:
    """What published rules make of a measured rate at the run's batch and tokens, where they contradict each other."""
    if config.preset.joint != "none":
        return joint.cautions(config)
    seen = config.steps * config.data.batch_size * config.model.units
    ratios = {"batch": config.data.batch_size / setting.config.data.batch_size, "tokens": seen / setting.tokens}
    rates = {
        rule.name: log2_lr + math.log2(rule.factor("lr", ratios))
        for rule in horizon.RULES.values()
        if rule.lr is not None and "adam" in rule.families
    }
    apart = max(rates.values()) - min(rates.values())
    if apart < APART:
        return []
    listed = ", ".join(f"{name} 2^{rate:.1f}" for name, rate in sorted(rates.items(), key=lambda pair: pair[1]))
    return [
        f"published rules contradict each other at {ratios['tokens']:.3g} times the tokens and {ratios['batch']:.3g} times the batch "
        f"of the largest row, whose best rate is 2^{log2_lr:.1f}: {listed} (`python -m presets joint`)"
    ]
