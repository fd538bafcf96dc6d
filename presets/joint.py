"""Optimizer settings for a batch and number of tokens that differ from the base's.

The base is the run at which the settings were tuned. The rules are in `mupax.presets.horizon`.
`mupax presets joint` and the configs of runs use this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mupax.presets.horizon import COLUMNS, COLUMNS_OF_MUON, RULES, JointRule, formula, rule
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import PresetError

NUMBERS = {
    "peak_lr": "lr",
    "weight_decay": "weight_decay",
    "eps": "eps",
    "b1": "one_minus_b1",
    "b2": "one_minus_b2",
    "warmup_steps": "durations",
    "decay_steps": "durations",
}
"""Optimizer settings that joint rules scale, each with the field of `JointRule` that scales it.

The field of a beta scales 1 - beta.
"""

_LABELS = {
    "adam_lr": "Adam part's lr",
    "durations": "warm-up",
    "one_minus_b1": "1-b1",
    "one_minus_b2": "1-b2",
}
"""Titles in the table of `path` for fields of `JointRule`, where the field's name is no title."""


def of(name: str, optimizer: str) -> JointRule:
    """Return the joint rule of this name, if the rule can be applied to the optimizer.

    The rule "none" is returned for every optimizer, also for an unknown one.

    Args:
        name: Key of `horizon.RULES`.
        optimizer: Key of `OPTIMIZERS`.

    Raises:
        PresetError: No applicable rule has the name, or the rule is not for the optimizer.
    """
    joint = rule(name)
    # The rule "none" changes nothing, so it fits every optimizer. A preset refuses an optimizer
    # that it has no rule for.
    if name == "none":
        return joint
    if optimizer not in OPTIMIZERS:
        raise PresetError(
            f"no optimizer is named {optimizer!r}; write one of {', '.join(OPTIMIZERS)}"
        )
    if OPTIMIZERS[optimizer].family in joint.families:
        return joint
    fitting = []
    for candidate in RULES.values():
        covers = OPTIMIZERS[optimizer].family in candidate.families
        if candidate.applied and covers and candidate.name != "none":
            fitting.append(f"joint {candidate.name}, ")
    raise PresetError(
        f"the joint rule {name} is for {' and '.join(joint.families)} and says nothing about "
        f"{optimizer}; write {''.join(fitting)}joint none and tune the rate at this batch, or "
        "another optimizer"
    )


def scaled(
    name: str,
    ratios: Mapping[str, float],
    optimizer: str,
    numbers: Mapping[str, Any],
    decay: str = "coupled",
) -> dict[str, Any]:
    """Return optimizer settings scaled from the base's batch and tokens to the run's.

    Args:
        name: Name of a joint rule that can be applied.
        ratios: `batch` and `tokens` of the run, divided by the base's.
        optimizer: Key of `OPTIMIZERS`.
        numbers: Settings at the base, by the names in `NUMBERS`. Other entries and `None` are
            returned unchanged. Under a rule with a column for the parameters that Muon leaves to
            Adam, an `adam_lr` of `None` stands for `peak_lr`.
        decay: "coupled" if a step subtracts lr * weight_decay * w, "independent" if it subtracts
            weight_decay * w.

    Returns:
        All entries of `numbers`, and `adam_lr` if the rule has a column for it. They are exactly
        `numbers` if every ratio is 1. Step counts are rounded; those above 0 stay at least 1.

    Raises:
        PresetError: No applicable rule has the name, the rule is not for the optimizer, or a beta
            would leave (0, 1).
    """
    joint = of(name, optimizer)
    result = dict(numbers)
    # At the base all settings stay as they are, including an `adam_lr` of `None`.
    if joint.adam_lr is not None and set(ratios.values()) != {1.0}:
        adam_peak = numbers.get("adam_lr")
        if adam_peak is None:
            # By default the Adam part has the peak of the matrices, but it scales by another
            # column.
            adam_peak = numbers["peak_lr"]
        result["adam_lr"] = adam_peak * joint.factor("adam_lr", ratios)
    for setting, column in NUMBERS.items():
        factor = joint.factor(column, ratios)
        if setting == "weight_decay" and decay == "independent":
            # An independent decay is not multiplied by lr. With the factor of lr it scales as lr *
            # wd does under coupled decay.
            factor *= joint.factor("lr", ratios)

        value = numbers.get(setting)
        if value is None or factor == 1:
            continue
        if setting in ("b1", "b2"):
            result[setting] = _scaled_beta(name, ratios, setting, value, factor)
        elif column == "durations":
            # A duration of 0 stays 0; any other keeps at least one step.
            if value:
                result[setting] = max(1, round(value * factor))
        else:
            result[setting] = value * factor
    return result


def _scaled_beta(
    name: str, ratios: Mapping[str, float], setting: str, beta: float, factor: float
) -> float:
    """Return 1 - factor * (1 - beta), one of Adam's betas at another batch.

    Args:
        name: Name of the joint rule, for the message.
        ratios: `batch` and `tokens` of the run over the base's, for the message.
        setting: "b1" or "b2", for the message.
        factor: Factor on 1 - beta.

    Raises:
        PresetError: The new beta is outside (0, 1).
    """
    new_beta = 1 - factor * (1 - beta)
    if 0 < new_beta < 1:
        return new_beta
    raise PresetError(
        f"the joint rule {name} cannot go to {ratios['batch']:.3g} times the base's batch at "
        f"{ratios['tokens']:.3g} times its tokens: {setting} would be "
        f"1 - {factor:.3g} x {1 - beta:.3g} = {new_beta:.3g}, not in (0, 1); write a batch at "
        f"which that factor is below {1 / (1 - beta):.3g}, or a base nearer to the run"
    )


def doubts(joint: JointRule, ratios: Mapping[str, float], *, b1: float, b2: float) -> list[str]:
    """Return reasons not to apply a joint rule at some ratios, one sentence each.

    The reasons are ratios outside the tested range and a beta that would leave (0, 1). The list is
    empty for the rule "none" and for a rule that `--joint` does not accept.

    Args:
        ratios: `batch` and `tokens` of the run, divided by the base's.
        b1: Adam's beta1 at the base.
        b2: Adam's beta2 at the base.
    """
    if not joint.applied or joint.name == "none":
        return []
    cautions = joint.cautions(ratios)
    try:
        # A beta that would leave (0, 1) is only a doubt here, while it is an error in a run. The
        # name of a family is also the name of one of its optimizers.
        scaled(joint.name, ratios, joint.families[0], {"peak_lr": 1.0, "b1": b1, "b2": b2})
    except PresetError as error:
        return [*cautions, str(error)]
    return cautions


def ends(option: str, text: str) -> tuple[float, float]:
    """Parse an option such as 8:64 into the number of the base and the number of the run.

    Args:
        option: Name of the option, for the message.
        text: FROM:TO, two finite numbers above 0.

    Raises:
        PresetError: `text` is something else.
    """
    try:
        start, stop = map(float, text.split(":"))
    except ValueError:
        # 0 is refused below, with the same message as other numbers that are not above 0.
        start = stop = 0.0
    if not (0 < start < math.inf and 0 < stop < math.inf):
        raise PresetError(f"{option} is {text}; write FROM:TO with two numbers above 0, as 8:64")
    return start, stop


def timescale(lr: float, weight_decay: float, steps: int, decay: str = "coupled") -> float:
    """Return the share of a run that AdamW's moving average of updates covers (2405.13698).

    The share is tau = B/(lr*wd*tokens), or 1/(lr*wd*steps).

    Args:
        weight_decay: Weight decay, above 0.
        steps: Number of training steps.
        decay: "coupled" if a step subtracts lr * weight_decay * w, "independent" if it subtracts
            weight_decay * w.
    """
    rate = 1.0
    if decay == "coupled":
        rate = lr
    return 1 / (rate * weight_decay * steps)


def rows(ratios: Mapping[str, float] | None = None) -> list[list[str]]:
    """Return a table of the joint rules, which scale settings with batch and tokens.

    The first row is the header. Each rule has one row. A cell is empty if the source of the rule
    says nothing about the setting.

    Args:
        ratios: `batch` and `tokens` of the run, divided by those of the base. The cells then have
            the factors at these ratios. By default they have formulas.
    """
    table = [["rule", "lr", "Adam part's lr", "weight decay", "eps", "1-b1", "1-b2", "warm-up"]]
    for joint in RULES.values():
        row = [joint.name]
        for column in COLUMNS_OF_MUON:
            power = getattr(joint, column)
            if power is None:
                row.append("")
            elif ratios is None:
                row.append(formula(power))
            else:
                row.append(f"{power(ratios):.3g}")
        table.append(row)
    return table


def path(
    joint: JointRule,
    batch: tuple[float, float],
    tokens: tuple[float, float],
    *,
    b1: float,
    b2: float,
    decay: str = "coupled",
    noise_scale: float | None = None,
) -> list[dict[str, Any]]:
    """Return the settings that a joint rule gives on a path from the base to the run.

    The path has one row per doubling or halving, first of the batch, then of tokens. The first row
    is the base and the last is the run.

    Args:
        batch: Examples per step at the base and in the run, both above 0.
        tokens: Training tokens at the base and in the run, both above 0.
        b1: Adam's beta1 at the base.
        b2: Adam's beta2 at the base.
        decay: "coupled" if a step subtracts lr * weight_decay * w, "independent" if it subtracts
            weight_decay * w.
        noise_scale: Measured gradient noise scale in examples. By default the rows do not mention
            the noise scale.

    Returns:
        Rows with the batch, the tokens, and, relative to the base, the steps, each setting and the
        timescale tau of weight decay. The entry "holds" is "yes", "untested" or the reasons why the
        rule does not hold.
    """
    points = [(examples, tokens[0]) for examples in _doublings(*batch)]
    # The first of these points is the last one above, so it is left out.
    points += [(batch[1], horizon) for horizon in _doublings(*tokens)[1:]]

    table: list[dict[str, Any]] = []
    for examples, horizon in points:
        ratios = {"batch": examples / batch[0], "tokens": horizon / tokens[0]}
        steps = ratios["tokens"] / ratios["batch"]
        columns = COLUMNS if joint.adam_lr is None else COLUMNS_OF_MUON
        factors = {column: joint.factor(column, ratios) for column in columns}
        lr_times_wd = factors["lr"] * factors["weight_decay"]
        # The rule's column is for coupled decay. lr*wd scales the same under both.
        if decay == "independent":
            factors["weight_decay"] = lr_times_wd

        reasons = []
        for beta, start, column in (("b1", b1, "one_minus_b1"), ("b2", b2, "one_minus_b2")):
            distance = factors[column] * (1 - start)
            if distance >= 1:
                reasons.append(f"1-{beta} = {distance:.3g}")
        # The rule relates the batch of the base to this batch, so the larger of the two must be
        # below the noise scale.
        largest_batch = max(examples, batch[0])
        if noise_scale is not None and largest_batch > noise_scale and examples != batch[0]:
            reasons.append("above the noise scale")
        for name, ratio in ratios.items():
            if ratio != 1 and not joint.speaks_of(name):
                reasons.append(f"says nothing about {name}")
        if not reasons:
            verdict = "untested" if joint.cautions(ratios) else "yes"
            reasons.append(verdict)

        labeled = {}
        for column, factor in factors.items():
            labeled[_LABELS.get(column, column)] = factor
        table.append(
            {
                "batch": examples,
                "tokens": horizon,
                "steps": steps,
                **labeled,
                "tau": 1 / (lr_times_wd * steps),
                "holds": ", ".join(reasons),
            }
        )
    return table


def _doublings(start: float, stop: float) -> list[float]:
    """Return a path of numbers from `start` to `stop`, each twice or half the one before.

    The last number is `stop`, so the last step may be smaller.
    """
    # The tolerance keeps an exact power of two from being rounded up to one more doubling.
    count = math.ceil(abs(math.log2(stop / start)) - 1e-9)
    numbers = []
    for index in range(count):
        exponent = math.copysign(index, stop - start)
        numbers.append(start * 2.0**exponent)
    # The last ratio need not be a power of two, and the run itself must have a row.
    return [*numbers, stop]
