"""Values of a planned run as rows of a table, each with its interval and its source.

The learning rate comes from a law if one can be fitted to the study. Otherwise it is the best rate
of the study's largest setting: a preset that transfers promises that the rate stays.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from mupax.presets import horizon
from mupax.presets.optimizers import OPTIMIZERS
from mupax.terminal import counted
from mupax.train.config import joint
from mupax.train.config.preset import preset_of, rules_of
from mupax.train.config.record import differences, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.studies.forecast import ranges, record
from mupax.train.studies.forecast.fitted import NoLaw, ScalingLaw, fitted
from mupax.train.studies.forecast.points import METRICS, Points, Setting, field_differences
from mupax.train.studies.forecast.predict import Prediction, predict
from mupax.train.studies.forecast.ranges import PlanRow
from mupax.train.studies.sweep.grids import at_rate
from mupax.train.studies.transfer.fit import fit as fit_curve
from mupax.train.studies.transfer.planned import label_of
from mupax.zoo import families

OPTIMIZER = ("name", "schedule", "clip_norm")
"""Fields of the optimizer that change which learning rate is best."""
APART = 1.0
"""Octaves between the rates of two published rules from which the rules contradict each other."""
RECIPE = "the recipe"
"""Text for the source of a learning rate that no study gives."""
REQUEST = "asked for"
"""Text for the source of a value that the command line gives."""


class RateSource(NamedTuple):
    """Interval and source of a plan's learning rate, as texts for a `PlanRow`."""

    interval: str
    source: str


def transferred(config: Config, points: Points) -> tuple[float | None, list[str]]:
    """Return the best learning rate of the largest comparable setting of a study, and cautions.

    A setting is a model, batch and number of tokens, trained at several learning rates. It is
    comparable if its best rate lies inside its grid, and it agrees with the run in optimizer name,
    schedule, clip norm, preset name and base (`rate_differences`).

    Returns:
        log2 of the peak rate, and cautions as sentences. The rate is `None` if no setting is
        comparable; the only caution then says why and which flags to write.
    """
    best = _best(points)
    if not best:
        caution = (
            "no rate is taken from the study: no setting of it has a best one inside its grid; "
            "write more --lr"
        )
        return None, [caution]

    comparable = []
    for pair in best:
        if not rate_differences(config, pair[0].config):
            comparable.append(pair)
    # Settings are sorted by size, so that the last is the largest.
    if comparable:
        setting, log2_lr = comparable[-1]
        cautions = [*_other_run_caution(config, setting), *horizons(config, setting, log2_lr)]
        return log2_lr, cautions

    setting, log2_lr = best[-1]
    differing = rate_differences(config, setting.config)
    written = flags([(name, measured) for name, _, measured in differing])
    caution = (
        f"the study's best rate, 2^{log2_lr:.2f}, is not used: "
        f"it is another at {_differences_text(differing)}; write {written} to plan with it"
    )
    return None, [caution]


def _differences_text(differing: Sequence[tuple[str, Any, Any]]) -> str:
    """Return fields in which a run differs from a measured one, as text."""
    texts = []
    for name, value, measured in differing:
        texts.append(f"{name} {_text(value)} (measured: {_text(measured)})")
    return " and ".join(texts)


def _other_run_caution(config: Config, setting: Setting) -> list[str]:
    """Return a caution if a run and its measured setting differ in more than their scale, or []."""
    differing = field_differences(config, setting.config)
    if not differing:
        return []
    return [
        f"the best rate of runs that differ in more than their scale is used, and may be another "
        f"here: {_differences_text(differing)}; sweep a few rates "
        f"around it, or write the study's values to plan with what was measured"
    ]


def rate_differences(config: Config, setting: Config) -> list[tuple[str, Any, Any]]:
    """Return the fields that differ between two runs and make their learning rates not comparable.

    Compared are the optimizer's name, schedule and clip norm, the preset's name and, if the names
    are equal, the preset's base.

    Returns:
        (name, value of `config`, value of `setting`) of each field.
    """
    differing = []
    for name in OPTIMIZER:
        value = getattr(config.optimizer, name)
        measured = getattr(setting.optimizer, name)
        if value != measured:
            differing.append((f"optimizer.{name}", value, measured))
    if config.preset.name != setting.preset.name:
        differing.append(("preset.name", config.preset.name, setting.preset.name))
    elif preset_of(config).base != preset_of(setting).base:
        differing.append(("preset.base", config.preset.base, setting.preset.base))
    return differing


def preset_flags(config: Config, setting: Config) -> str:
    """Return the command-line flags that change the preset of `config` into that of `setting`.

    The measured noise scale is left out.
    """
    fields = differences(to_json(config)["preset"], to_json(setting)["preset"], "preset.")
    # The noise scale is measured, and no rule of the preset.
    changed = []
    for name, _, value in fields:
        if name != "preset.noise_scale":
            changed.append((name, value))
    return flags(changed)


def flags(fields: Sequence[tuple[str, Any]]) -> str:
    """Return fields of a config as command-line flags in one string, quoted for a shell.

    Args:
        fields: Name and value of each field. A list becomes several words.
    """
    texts = []
    for name, value in fields:
        # A preset's constants are several words after one flag.
        values = value if isinstance(value, list) else [str(value)]
        words = " ".join(shlex.quote(word) for word in values)
        texts.append(f"--{name.replace('_', '-')} {words}")
    return " ".join(texts)


def contradictions(config: Config, points: Points) -> list[str]:
    """Return a caution if published rules disagree on the best learning rate of a planned run.

    The rules extrapolate the best rate that a study measured to the batch and tokens of the run
    (`horizons`). The study's largest setting is used whose best rate is not at the end of its grid
    of rates. The list is empty if there is no such setting, or if the rules agree.
    """
    best = _best(points)
    if not best:
        return []
    setting, log2_lr = best[-1]
    return horizons(config, setting, log2_lr)


def horizons(config: Config, setting: Setting, log2_lr: float) -> list[str]:
    """Return a caution if published rules of batch and tokens disagree on a run's learning rate.

    Each rule for the run's optimizer extrapolates the measured rate to the run's batch and tokens.
    The list is empty if their rates are less than `APART` octaves apart, or if there are not two
    such rules. A run with a joint rule gets the cautions of that rule instead.

    Args:
        log2_lr: log2 of the setting's best peak rate.
    """
    if config.preset.joint != "none":
        return joint.cautions(config)
    tokens = config.steps * config.data.batch_size * config.model.units
    ratios = {
        "batch": config.data.batch_size / setting.config.data.batch_size,
        "tokens": tokens / setting.tokens,
    }
    # Most rules were published for Adam and say nothing about the rate of SGD or Muon.
    family = OPTIMIZERS[config.optimizer.name].family
    rates = {}
    for rule in horizon.RULES.values():
        if rule.lr is not None and family in rule.families:
            rates[rule.name] = log2_lr + math.log2(rule.factor("lr", ratios))
    if len(rates) < 2:
        return []
    # Rules that nearly agree need no caution.
    octaves = max(rates.values()) - min(rates.values())
    if octaves < APART:
        return []
    by_rate = sorted(rates.items(), key=lambda pair: pair[1])
    listed = ", ".join(f"{name} 2^{rate:.1f}" for name, rate in by_rate)
    return [
        f"published rules contradict each other at {ratios['tokens']:.3g} times the tokens and "
        f"{ratios['batch']:.3g} times the batch of the largest row, "
        f"whose best rate is 2^{log2_lr:.1f}: {listed} (`mupax presets joint`)"
    ]


def _best(points: Points) -> list[tuple[Setting, float]]:
    """Return the settings whose best rate lies inside their grid, with log2 of that rate."""
    best = []
    for setting in points.settings:
        curve_fit = fit_curve(setting.curve, setting.curve.first)
        if not curve_fit.trouble:
            best.append((setting, curve_fit.optimum))
    return best


def _text(value: Any) -> str:
    """Return a field's value as text for the command line; `None` becomes "none"."""
    return "none" if value is None else text_of(value)


@dataclasses.dataclass(frozen=True)
class StudyEstimates:
    """Learning rate and loss of a planned run, estimated from studies.

    Attributes:
        config: Run at the rate to train with.
        rate: Interval and source of the rate.
        prediction: Predicted rate and loss. `None` without a law.
        law: Law of the prediction.
        points: Rows of the run's preset. `None` without a study of it.
        cautions: Cautions, a sentence each.
    """

    config: Config
    rate: RateSource
    prediction: Prediction | None = None
    law: ScalingLaw | None = None
    points: Points | None = None
    cautions: tuple[str, ...] = ()

    def forecast(self, config: Config, request: str) -> dict[str, Any] | None:
        """Return the prediction as a forecast in JSON, dated now, or `None` without a law.

        Args:
            config: Run with the mesh of the plan. It replaces the config of the prediction.
            request: Words of the command line, for the record.
        """
        if self.law is None or self.prediction is None:
            return None
        # The mesh was chosen after the prediction, and changes no loss.
        prediction = dataclasses.replace(self.prediction, config=config)
        return record.forecast(self.law, prediction, request)


def of_law(config: Config, studies: Sequence[Points], *, keep_rate: bool = False) -> StudyEstimates:
    """Return the run at the best learning rate by a law fitted to a study, with its predicted loss.

    If no law can be fitted, the rate is that of the study's largest comparable setting
    (`transferred`) and no loss is predicted. Without a study of the run's preset the run keeps its
    rate. A caution in the result says why.

    Args:
        studies: Rows by preset. Only the first whose preset has the run's rules is used.
        keep_rate: Keep the run's own rate. By default it becomes the best rate.
    """
    own_rate = RateSource("", REQUEST if keep_rate else RECIPE)
    if not studies:
        caution = "no study: nothing is predicted of the loss; write --from FOLDER"
        return StudyEstimates(config, own_rate, cautions=(caution,))

    # Compared by rules and not by labels: tuned presets write out defaults.
    rules = rules_of(config)
    same_rules = []
    for study in studies:
        if rules_of(study.settings[-1].config) == rules:
            same_rules.append(study)
    if not same_rules:
        labels = ", ".join(study.label for study in studies)
        written = preset_flags(config, studies[0].settings[-1].config)
        caution = (
            f"no study of {label_of(config.preset)}: --from has {labels}; "
            f"write {written} for the first of them"
        )
        return StudyEstimates(config, own_rate, cautions=(caution,))

    points = same_rules[0]
    try:
        law = fitted(points)
        prediction = predict(law, config, keep_rate=keep_rate)
    except NoLaw as error:
        caution = f"no loss is predicted: {error}"
        return _without_law(config, points, caution, keep_rate=keep_rate)

    cautions = prediction.warnings
    if keep_rate:
        rate = RateSource("", REQUEST)
    else:
        cautions = (*cautions, *contradictions(prediction.config, points))
        interval = prediction.log2_lr
        if interval is None:
            rate = RateSource("", "the recipe, and every row")
        else:
            ends = f"2^{interval.low90:.2f} to 2^{interval.high90:.2f} (90 %)"
            rate = RateSource(ends, f"law over {_origin(points)}")
    return StudyEstimates(prediction.config, rate, prediction, law, points, cautions)


def _without_law(
    config: Config, points: Points, caution: str, *, keep_rate: bool
) -> StudyEstimates:
    """Return the estimates for a run without a law: the rate of `transferred`, and no loss.

    The run keeps its own rate if `keep_rate` is set or the study has no comparable rate.

    Args:
        caution: Reason why no loss is predicted, the first caution of the result.
    """
    if keep_rate:
        rate = RateSource("", REQUEST)
        return StudyEstimates(config, rate, points=points, cautions=(caution,))
    log2_lr, cautions = transferred(config, points)
    cautions = (caution, *cautions)
    if log2_lr is None:
        rate = RateSource("", RECIPE)
        return StudyEstimates(config, rate, points=points, cautions=cautions)
    source = f"best of the largest of {_origin(points)}; that it stays is the preset's claim"
    # Rounded to what the command prints, so that the printed command trains this very run.
    run = at_rate(config, float(f"{2.0**log2_lr:.4g}"))
    rate = RateSource(ranges.NONE, source)
    return StudyEstimates(run, rate, points=points, cautions=cautions)


def _origin(points: Points) -> str:
    """Return the number of a study's rows and their folders as text, "N rows of FOLDER and ..."."""
    return f"{counted(points.rows, 'row')} of {' and '.join(points.folders)}"


def rows(
    config: Config, estimates: StudyEstimates, source: str, *, asks_steps: bool
) -> list[PlanRow]:
    """Return the plan's table rows of a run: shape, length, optimizer and expected loss.

    Args:
        config: Run with the mesh and the other settings of the plan.
        estimates: Learning rate and loss, from `of_law`.
        source: Text such as "recipe NAME", printed as the source of values that no law and no joint
            rule sets.
        asks_steps: True if a flag sets the number of steps or tokens.
    """
    return [
        *_size_rows(config, source, REQUEST if asks_steps else source),
        *_optimizer_rows(config, estimates, source),
        _loss_row(estimates),
    ]


def _size_rows(config: Config, source: str, steps_source: str) -> list[PlanRow]:
    """Return the plan's table rows of a run's model, batch, length and preset."""
    model = config.model
    parameters = families.params(model)
    tokens = config.steps * config.data.batch_size * model.units
    shape = ", ".join(f"{axis} {size}" for axis, size in model.base_sizes().items())
    length = f"{config.steps:,}, {tokens:,} {model.unit}s, {tokens / parameters:.3g} per parameter"
    preset = f"{label_of(config.preset)}, base {config.preset.base}"
    return [
        PlanRow("shape", shape, "", source),
        PlanRow("parameters", f"{parameters:,}", "", "counted"),
        PlanRow("batch", f"{config.data.batch_size} x {model.units} {model.unit}s", "", source),
        PlanRow("steps", length, "", steps_source),
        PlanRow("preset", preset, "", source),
    ]


def _optimizer_rows(config: Config, estimates: StudyEstimates, source: str) -> list[PlanRow]:
    """Return the plan's table rows of the optimizer, with only the values that the optimizer reads.

    The values are those after a joint rule, so the table shows what the run trains with.
    """
    joint_rule = config.preset.joint
    rule = source if joint_rule == "none" else f"{source}, joint rule {joint_rule}"
    at_base = config.optimizer
    # `config.optimizer` has the values at the base. The run trains with the scaled ones.
    optimizer = config.scaled_optimizer
    peak_lr = f"{optimizer.peak_lr:.4g} = 2^{round(math.log2(optimizer.peak_lr), 2):g}"
    lines = [PlanRow("peak rate", peak_lr, *estimates.rate)]
    if optimizer.peak_lr != at_base.peak_lr:
        scaled = f"scaled by joint rule {joint_rule}"
        lines.append(PlanRow("rate at the base", f"{at_base.peak_lr:.4g}", "", scaled))

    if optimizer.adam_peak is not None:
        lines.append(PlanRow("peak rate of Adam", f"{optimizer.adam_peak:.4g}", "", rule))
    reads = OPTIMIZERS[optimizer.name].reads
    if "b1" in reads:
        lines.append(PlanRow("betas", f"{optimizer.b1:.4g}, {optimizer.b2:.4g}", "", rule))
    if "momentum" in reads:
        lines.append(PlanRow("momentum", f"{optimizer.momentum:g}", "", rule))
    if "eps" in reads:
        lines.append(PlanRow("eps", f"{optimizer.eps:.3g}", "", rule))
    if "weight_decay" in reads:
        decay = f"{optimizer.weight_decay:.4g}" if optimizer.weight_decay else "none"
        lines.append(PlanRow("weight decay", decay, "", rule))
        if optimizer.weight_decay:
            span, _, formula = joint.decay_text(optimizer, config.steps).partition(" (")
            lines.append(PlanRow("decay averages", span, "", formula.rstrip(")")))

    clip = f"{optimizer.clip_norm or 'none'}"
    schedule = f"{optimizer.schedule} to {optimizer.final_lr_fraction:g} of the peak"
    share = optimizer.warmup_steps / config.steps
    warmup = f"{counted(optimizer.warmup_steps, 'step')}, {share:.1%} of the run"
    return [
        *lines,
        PlanRow("clip", clip, "", source),
        PlanRow("schedule", schedule, "", source),
        PlanRow("warm-up", warmup, "", f"{rule}, as a fraction"),
    ]


def _loss_row(estimates: StudyEstimates) -> PlanRow:
    """Return the plan's table row of the expected loss, which is "not predicted" without a law."""
    if estimates.prediction is None or estimates.points is None:
        return PlanRow("loss", ranges.NOT_PREDICTED, ranges.NONE, "no law, see the cautions")
    loss = estimates.prediction.loss
    interval = f"{loss.low90:.4f} to {loss.high90:.4f} (90 %)"
    law = f"law over {' and '.join(estimates.points.folders)}"
    source = f"{law}: {METRICS[estimates.points.metric]}"
    return PlanRow("loss", f"{loss.value:.4f}", interval, source)
