"""The numbers of a planned run, each with its interval and the rule or study that it comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config import joint
from mupax.train.config.preset import rules_of
from mupax.train.config.record import command_of
from mupax.train.config.run import Config
from mupax.train.studies.forecast import record
from mupax.train.studies.forecast.fitted import Law, NoLaw, fitted
from mupax.train.studies.forecast.points import METRICS, Points
from mupax.train.studies.forecast.predict import Prediction, predict
from mupax.train.studies.plan import ranges
from mupax.train.studies.plan import rate as rates
from mupax.train.studies.transfer.planned import label_of
from mupax.zoo import flops

Line = tuple[str, str, str, str]
"""What, value, its interval or range, and where it is from."""


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


def of_law(config: Config, studies: Sequence[Points], *, keep_rate: bool = False) -> Learnt:
    """The run at the rate that the rows say, with what they say of its loss.

    Args:
        config: of the run.
        studies: rows by preset; those of the run's preset count.
        keep_rate: the run's own rate, as it was asked for.
    """
    if not studies:
        return Learnt(
            config, ("", "the recipe"), cautions=("no study: nothing is predicted of the loss; write --from FOLDER",)
        )
    rules = rules_of(config)
    same = [points for points in studies if rules_of(points.settings[-1].config) == rules]
    if not same:
        labels = ", ".join(points.label for points in studies)
        write = rates.preset_flags(config, studies[0].settings[-1].config)
        caution = f"no study of {label_of(config.preset)}: --from has {labels}; write {write} for the first of them"
        return Learnt(config, ("", "the recipe"), cautions=(caution,))
    points = same[0]
    where = f"{points.rows} rows of {' and '.join(points.folders)}"
    try:
        law = fitted(points)
        prediction = predict(law, config, keep_rate=keep_rate)
    except NoLaw as error:
        if keep_rate:
            return Learnt(config, ("", "asked for"), points=points, cautions=(f"no loss is predicted: {error}",))
        caution = f"no loss is predicted: {error}"
        log2_lr, cautions = rates.transferred(config, points)
        if log2_lr is None:
            return Learnt(config, ("", "the recipe"), points=points, cautions=(caution, *cautions))
        peak = dataclasses.replace(config.optimizer, peak_lr=float(f"{2.0**log2_lr:.4g}"))
        source = f"best of the largest of {where}; that it stays is the preset's claim"
        at = dataclasses.replace(config, optimizer=peak)
        return Learnt(at, (ranges.NONE, source), points=points, cautions=(caution, *cautions))
    rate = prediction.log2_lr
    if keep_rate:
        return Learnt(prediction.config, ("", "asked for"), prediction, law, points, prediction.warnings)
    columns = (
        ("", "the recipe, and every row")
        if rate is None
        else (f"2^{rate.low90:.2f} to 2^{rate.high90:.2f} (90 %)", f"law over {where}")
    )
    cautions = (*prediction.warnings, *rates.contradictions(prediction.config, points))
    return Learnt(prediction.config, columns, prediction, law, points, cautions)


def rows(config: Config, learnt: Learnt, source: str) -> list[Line]:
    """The run as a table: its shape, length, optimizer and expected loss.

    Args:
        config: of the run as it is planned at last.
        learnt: what studies say of it.
        source: the recipe or study that what nothing else sets is from.
    """
    model, base, opt = config.model, config.optimizer, config.scaled_optimizer
    recipe, unit = source, model.unit
    rule = recipe if config.preset.joint == "none" else f"{recipe}, joint rule {config.preset.joint}"
    parameters, tokens = flops.params(model), config.steps * config.data.batch_size * model.units
    shape = ", ".join(f"{axis} {size}" for axis, size in model.base_sizes().items())
    lines: list[Line] = [
        ("shape", shape, "", recipe),
        ("parameters", f"{parameters:,}", "", "counted"),
        ("batch", f"{config.data.batch_size} x {model.units} {unit}s", "", recipe),
        ("steps", f"{config.steps:,}, {tokens:,} {unit}s, {tokens / parameters:.3g} per parameter", "", "asked for"),
        ("preset", f"{label_of(config.preset)}, base {config.preset.base}", "", recipe),
        ("peak rate", f"{opt.peak_lr:.4g} = 2^{round(math.log2(opt.peak_lr), 2):g}", *learnt.rate),
    ]
    if opt.peak_lr != base.peak_lr:
        lines.append(("rate at the base", f"{base.peak_lr:.4g}", "", f"scaled by joint rule {config.preset.joint}"))
    values = {
        "betas": ("b1", f"{opt.b1:.4g}, {opt.b2:.4g}"),
        "momentum": ("momentum", f"{opt.momentum:g}"),
        "eps": ("eps", f"{opt.eps:.3g}"),
        "weight decay": ("weight_decay", f"{opt.weight_decay:.4g}" if opt.weight_decay else "none"),
    }
    lines += [(what, value, "", rule) for what, (field, value) in values.items() if field in OPTIMIZERS[opt.name].reads]
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


def command(config: Config) -> str:
    """Return the command that trains the run."""
    return command_of(config) or "(no recipe has its name)"
