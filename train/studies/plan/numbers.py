"""The numbers of a planned run, each with its interval and the rule or study that it comes from.

A rate without a law is the best of a study's largest setting, which a preset that transfers promises to stay.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import Any

from mupax.presets import horizon
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config import joint
from mupax.train.config.preset import preset_of, rules_of
from mupax.train.config.record import differences, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.studies.forecast import record
from mupax.train.studies.forecast.fitted import NoLaw, ScalingLaw, fitted
from mupax.train.studies.forecast.points import METRICS, Points, Setting, field_differences
from mupax.train.studies.forecast.predict import Prediction, predict
from mupax.train.studies.plan import ranges
from mupax.train.studies.sweep.grids import at_rate
from mupax.train.studies.transfer.fit import fit as fit_curve
from mupax.train.studies.transfer.planned import label_of
from mupax.zoo import families

OPTIMIZER = ("name", "schedule", "clip_norm")
"""Fields of the optimizer at other values of which a rate is another."""
APART = 1.0
"""Octaves between the rates of two published rules from which on they contradict each other."""

PlanRow = tuple[str, str, str, str]
"""What, value, its interval or range, and where it is from."""


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
    texts = " and ".join(
        f"{name} {_text(now)} (measured: {_text(was)})" for name, now, was in differing
    )
    return None, [
        f"the study's best rate, 2^{log2_lr:.2f}, is not used: it is another at {texts}; write "
        f"{flags([(name, was) for name, _, was in differing])} to plan with it"
    ]


def _other_run(config: Config, setting: Setting) -> list[str]:
    """Return a caution where a rate is taken from runs on other data, or of a model that differs in more than its scale."""
    differing = field_differences(config, setting.config)
    if not differing:
        return []
    texts = " and ".join(
        f"{name} {_text(now)} (measured: {_text(was)})" for name, now, was in differing
    )
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
        + (
            " ".join(map(shlex.quote, value))
            if isinstance(value, list)
            else shlex.quote(str(value))
        )
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
    ratios = {
        "batch": config.data.batch_size / setting.config.data.batch_size,
        "tokens": tokens / setting.tokens,
    }
    rates = {
        rule.name: log2_lr + math.log2(rule.factor("lr", ratios))
        for rule in horizon.RULES.values()
        if rule.lr is not None and "adam" in rule.families
    }
    octaves = max(rates.values()) - min(rates.values())
    if octaves < APART:
        return []
    listed = ", ".join(
        f"{name} 2^{rate:.1f}" for name, rate in sorted(rates.items(), key=lambda pair: pair[1])
    )
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


@dataclasses.dataclass(frozen=True)
class StudyEstimates:
    """Learning rate and loss of a run, as studies estimate them.

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
    law: ScalingLaw | None = None
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


def of_law(config: Config, studies: Sequence[Points], *, keep_rate: bool = False) -> StudyEstimates:
    """The run at the rate that the rows say, with what they say of its loss.

    Args:
        config: of the run.
        studies: rows by preset; those of the run's preset count.
        keep_rate: the run's own rate, as it was asked for.
    """
    if not studies:
        return StudyEstimates(
            config,
            ("", "the recipe"),
            cautions=("no study: nothing is predicted of the loss; write --from FOLDER",),
        )
    rules = rules_of(config)
    same = [points for points in studies if rules_of(points.settings[-1].config) == rules]
    if not same:
        labels = ", ".join(points.label for points in studies)
        write = preset_flags(config, studies[0].settings[-1].config)
        caution = f"no study of {label_of(config.preset)}: --from has {labels}; write {write} for the first of them"
        return StudyEstimates(config, ("", "the recipe"), cautions=(caution,))
    points = same[0]
    where = f"{points.rows} rows of {' and '.join(points.folders)}"
    try:
        law = fitted(points)
        prediction = predict(law, config, keep_rate=keep_rate)
    except NoLaw as error:
        if keep_rate:
            return StudyEstimates(
                config,
                ("", "asked for"),
                points=points,
                cautions=(f"no loss is predicted: {error}",),
            )
        caution = f"no loss is predicted: {error}"
        log2_lr, cautions = transferred(config, points)
        if log2_lr is None:
            return StudyEstimates(
                config, ("", "the recipe"), points=points, cautions=(caution, *cautions)
            )
        source = f"best of the largest of {where}; that it stays is the preset's claim"
        at = at_rate(config, float(f"{2.0**log2_lr:.4g}"))
        return StudyEstimates(
            at, (ranges.NONE, source), points=points, cautions=(caution, *cautions)
        )
    rate = prediction.log2_lr
    if keep_rate:
        return StudyEstimates(
            prediction.config, ("", "asked for"), prediction, law, points, prediction.warnings
        )
    columns = (
        ("", "the recipe, and every row")
        if rate is None
        else (f"2^{rate.low90:.2f} to 2^{rate.high90:.2f} (90 %)", f"law over {where}")
    )
    cautions = (*prediction.warnings, *contradictions(prediction.config, points))
    return StudyEstimates(prediction.config, columns, prediction, law, points, cautions)


def rows(config: Config, learnt: StudyEstimates, source: str) -> list[PlanRow]:
    """The run as a table: its shape, length, optimizer and expected loss.

    Args:
        config: of the run as it is planned at last.
        learnt: what studies say of it.
        source: the recipe or study that what nothing else sets is from.
    """
    model, base, opt = config.model, config.optimizer, config.scaled_optimizer
    recipe, unit = source, model.unit
    rule = (
        recipe if config.preset.joint == "none" else f"{recipe}, joint rule {config.preset.joint}"
    )
    parameters, tokens = families.params(model), config.steps * config.data.batch_size * model.units
    shape = ", ".join(f"{axis} {size}" for axis, size in model.base_sizes().items())
    lines: list[PlanRow] = [
        ("shape", shape, "", recipe),
        ("parameters", f"{parameters:,}", "", "counted"),
        ("batch", f"{config.data.batch_size} x {model.units} {unit}s", "", recipe),
        (
            "steps",
            f"{config.steps:,}, {tokens:,} {unit}s, {tokens / parameters:.3g} per parameter",
            "",
            "asked for",
        ),
        ("preset", f"{label_of(config.preset)}, base {config.preset.base}", "", recipe),
        ("peak rate", f"{opt.peak_lr:.4g} = 2^{round(math.log2(opt.peak_lr), 2):g}", *learnt.rate),
    ]
    if opt.peak_lr != base.peak_lr:
        lines.append(
            (
                "rate at the base",
                f"{base.peak_lr:.4g}",
                "",
                f"scaled by joint rule {config.preset.joint}",
            )
        )
    values = {
        "betas": ("b1", f"{opt.b1:.4g}, {opt.b2:.4g}"),
        "momentum": ("momentum", f"{opt.momentum:g}"),
        "eps": ("eps", f"{opt.eps:.3g}"),
        "weight decay": ("weight_decay", f"{opt.weight_decay:.4g}" if opt.weight_decay else "none"),
    }
    lines += [
        (what, value, "", rule)
        for what, (field, value) in values.items()
        if field in OPTIMIZERS[opt.name].reads
    ]
    if opt.weight_decay and "weight_decay" in OPTIMIZERS[opt.name].reads:
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
                f"{loss.low90:.4f} to {loss.high90:.4f} (90 %)",
                f"{where}: {METRICS[learnt.points.metric]}",
            )
        )
    else:
        lines.append(("loss", ranges.NOT_PREDICTED, ranges.NONE, "no law, see the cautions"))
    return lines
