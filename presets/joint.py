"""What joint rules make of an optimizer's numbers at another batch and other tokens than those that they were tuned at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mupax.presets.horizon import COLUMNS, RULES, JointRule, formula, rule
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import PresetError
from mupax.presets.rule import Power

NUMBERS = {
    "peak_lr": "lr",
    "weight_decay": "weight_decay",
    "eps": "eps",
    "b1": "one_minus_b1",
    "b2": "one_minus_b2",
    "warmup_steps": "durations",
    "decay_steps": "durations",
}
"""An optimizer's number to the column that scales it; a beta's column scales 1 - beta."""


def of(name: str, optimizer: str) -> JointRule:
    """A rule that can be applied to an optimizer.

    Args:
        name: of the rule.
        optimizer: in `OPTIMIZERS`.

    Raises:
        PresetError: no such rule, or an optimizer that it does not speak for.
    """
    joint = rule(name)
    if OPTIMIZERS[optimizer].family not in joint.families:
        raise PresetError(
            f"the joint rule {name} is for {' and '.join(joint.families)} and says nothing about {optimizer}; write joint none "
            "and tune the rate at this batch, or another optimizer"
        )
    return joint


def scaled(
    name: str,
    ratios: Mapping[str, float],
    optimizer: str,
    numbers: Mapping[str, Any],
    decay: str = "coupled",
) -> dict[str, Any]:
    """An optimizer's numbers at another batch and other tokens than those that they were tuned at.

    Args:
        name: of a rule that can be applied.
        ratios: batch and tokens over the base's.
        optimizer: whose numbers they are.
        numbers: some of `NUMBERS`; None stays None.
        decay: how weight decay enters, coupled or independent.

    Returns:
        All of `numbers`; exactly those given where every ratio is 1.

    Raises:
        PresetError: no such rule, an optimizer that it does not speak for, or a beta that would leave (0, 1).
    """
    joint = of(name, optimizer)
    result = dict(numbers)
    for number, column in NUMBERS.items():
        factor = joint.factor(column, ratios)
        if number == "weight_decay" and decay == "independent":
            factor *= joint.factor("lr", ratios)
        if (value := numbers.get(number)) is None or factor == 1:
            continue
        if number in ("b1", "b2"):
            result[number] = 1 - factor * (1 - value)
            if not 0 < result[number] < 1:
                raise PresetError(
                    f"the joint rule {name} cannot go to {ratios['batch']:.3g} times the base's batch at {ratios['tokens']:.3g} "
                    f"times its tokens: {number} would be 1 - {factor:.3g} x {1 - value:.3g} = {result[number]:.3g}, not in (0, 1); "
                    f"write a batch at which that factor is below {1 / (1 - value):.3g}, or a base nearer to the run"
                )
        elif column == "durations":
            result[number] = max(1, round(value * factor)) if value else value
        else:
            result[number] = value * factor
    return result


def doubts(joint: JointRule, ratios: Mapping[str, float], *, b1: float, b2: float) -> list[str]:
    """Why an applied rule should not be trusted, or would be refused, at some ratios with these betas.

    Args:
        joint: the rule.
        ratios: of `batch` and `tokens` to the base's.
        b1, b2: Adam's.
    """
    if not joint.applied or joint.name == "none":
        return []
    try:
        scaled(joint.name, ratios, "adam", {"b1": b1, "b2": b2})
    except PresetError as error:
        return [*joint.cautions(ratios), str(error)]
    return joint.cautions(ratios)


def ends(what: str, text: str) -> tuple[float, float]:
    """The base's number and the run's, of a text such as 8:64; raises PresetError for anything else.

    Args:
        what: is called so in the message.
        text: FROM:TO.
    """
    try:
        start, stop = map(float, text.split(":"))
    except ValueError:
        start = stop = 0.0
    if not (0 < start < math.inf and 0 < stop < math.inf):
        raise PresetError(f"{what} is {text}; write FROM:TO with two numbers above 0, as 8:64")
    return start, stop


def timescale(lr: float, weight_decay: float, steps: int, decay: str = "coupled") -> float:
    """tau = B/(lr*wd*tokens), the share of a run that AdamW's moving average of updates goes over (2405.13698).

    Args:
        lr: peak learning rate.
        weight_decay: above 0.
        steps: of the run.
        decay: coupled, where a step pulls by lr*wd, or independent, where it pulls by wd.
    """
    return 1 / ((lr if decay == "coupled" else 1.0) * weight_decay * steps)


def rows(ratios: Mapping[str, float] | None = None) -> list[list[str]]:
    """A header and a row a rule: its formulas, or their values at some ratios."""

    def cell(power: Power | None) -> str:
        return "" if power is None else formula(power) if ratios is None else f"{power(ratios):.3g}"

    header = ["rule", "lr", "weight decay", "eps", "1-b1", "1-b2", "warm-up"]
    return [
        header,
        *(
            [each.name, *(cell(getattr(each, column)) for column in COLUMNS)]
            for each in RULES.values()
        ),
    ]


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
    """A row a doubling on the way from the base to the run, first of the batch and then of the tokens.

    Args:
        joint: the rule.
        batch, tokens: the base's and the run's.
        b1, b2: Adam's at the base.
        decay: how weight decay enters, coupled or independent.
        noise_scale: in examples, where it was measured.

    Returns:
        Batch, tokens, steps over the base's, each number and the timescale tau of weight decay over the base's, and whether the rule
        holds there: yes, untested, or why it does not.
    """
    points = [(each, tokens[0]) for each in _doublings(*batch)] + [
        (batch[1], each) for each in _doublings(*tokens)[1:]
    ]
    table: list[dict[str, Any]] = []
    for examples, horizon in points:
        at = {"batch": examples / batch[0], "tokens": horizon / tokens[0]}
        steps, factors = (
            at["tokens"] / at["batch"],
            {column: joint.factor(column, at) for column in COLUMNS},
        )
        pull = factors["lr"] * factors["weight_decay"]
        if decay == "independent":
            factors["weight_decay"] = pull
        slow = {"b1": factors["one_minus_b1"] * (1 - b1), "b2": factors["one_minus_b2"] * (1 - b2)}
        above = (
            noise_scale is not None
            and max(examples, batch[0]) > noise_scale
            and examples != batch[0]
        )
        why = [f"1-{beta} = {x:.3g}" for beta, x in slow.items() if x >= 1] + above * [
            "above the noise scale"
        ]
        why += [
            f"says nothing about {name}"
            for name, ratio in at.items()
            if ratio != 1 and not joint.speaks_of(name)
        ]
        holds = ", ".join(why) or ("untested" if joint.cautions(at) else "yes")
        labels = {"durations": "warm-up", "one_minus_b1": "1-b1", "one_minus_b2": "1-b2"}
        numbers = {labels.get(column, column): factor for column, factor in factors.items()}
        table.append(
            {
                "batch": examples,
                "tokens": horizon,
                "steps": steps,
                **numbers,
                "tau": 1 / (pull * steps),
                "holds": holds,
            }
        )
    return table


def _doublings(start: float, stop: float) -> list[float]:
    """From start to stop by factors of two, the last one shorter where they do not meet."""
    many = math.ceil(abs(math.log2(stop / start)) - 1e-9)
    return [*(start * 2.0 ** math.copysign(i, stop - start) for i in range(many)), stop]
