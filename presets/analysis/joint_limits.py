"""Exponents of what Adam does over a run as batch B or tokens T grow, computed from a joint rule.

A joint rule says how the optimizer's settings change with B and T. Gradients are signal + noise
B^-1/2, and the noise is the larger. Entries of Adam's direction are then of order one, and their
mean is signal over noise, B^1/2. In T/B steps the weights move by the random sum of the directions
and by their mean.

Sources: Malladi et al. 2022 (2205.10287) and, for the decay over a run, Wang and Aitchison 2024
(2405.13698). The composition is derived here. `mupax check RECIPE --grow batch` measures it. In T
the theory needs one stretch of training dynamics over the whole run, which some sources contradict.
"""

from __future__ import annotations

from collections.abc import Mapping

from mupax import terminal
from mupax.presets import joint
from mupax.presets.analysis.verdicts import Entry, cell
from mupax.presets.horizon import COLUMNS, RULES, JointRule, formula
from mupax.presets.rule import ONE, Power, axis

SYMBOLS = {"batch": "B", "tokens": "T"}
"""Letters in printed formulas for the sizes that grow."""

OBSERVABLES = {
    "displacement by noise": "lr",
    "drift": "lr",
    "decay over the run": "weight_decay",
    "memory of b1": "one_minus_b1",
    "memory of b2": "one_minus_b2",
    "eps over noise": "eps",
    "warm-up": "durations",
}
"""Observables of a run, each with the field of `JointRule` that scales it.

"displacement by noise" and "drift" are distances that the weights move, at random and on average.
"decay over the run" is lr * weight decay * steps. "memory of b1" and "memory of b2" are the numbers
of steps that Adam's moments average over, and "warm-up" the steps of warm-up, as shares of the run.
"eps over noise" is the ratio of Adam's eps to the gradient noise.
"""

_OF_MATRICES = ("lr", "weight_decay", "durations")
"""Fields of `JointRule` that apply to the matrices that Muon trains."""

_TOLERANCE = 0.01
"""Exponents up to this size count as 0."""


def observables(rule: JointRule) -> dict[str, Power]:
    """Return each observable (`OBSERVABLES`) as a power law in batch B and tokens T.

    A constant 1 means that the observable does not change. For a rule of Muon the result is about
    Muon's matrices, and so has no observables of b1, b2 and eps. Call it with
    `JointRule.of_adam_part` for the parameters that Muon leaves to Adam.

    Args:
        rule: Joint rule. A setting about which it says nothing stays constant.
    """
    batch = axis("batch")
    steps = axis("tokens") / axis("batch")
    powers = {column: getattr(rule, column) or ONE for column in COLUMNS}
    lr = powers["lr"]
    table = {
        "displacement by noise": lr * steps**0.5,
        "drift": lr * steps * batch**0.5,
        "decay over the run": lr * powers["weight_decay"] * steps,
        "memory of b1": ONE / (powers["one_minus_b1"] * steps),
        "memory of b2": ONE / (powers["one_minus_b2"] * steps),
        "eps over noise": powers["eps"] * batch**0.5,
        "warm-up": powers["durations"] / steps,
    }
    if rule.adam_lr is None:
        return table
    of_matrices = {}
    for name, power in table.items():
        if OBSERVABLES[name] in _OF_MATRICES:
            of_matrices[name] = power
    return of_matrices


def verdicts(rule: JointRule) -> dict[str, dict[str, Entry]]:
    """Return each observable's exponent and verdict, by observable and by "batch" or "tokens".

    Verdicts are "stable", "explodes", "vanishes" and "frozen" (for distances that shrink). A drift
    that grows with tokens is "stable", because it is intended.
    """
    table = {}
    for name, power in observables(rule).items():
        by_growing = {}
        for growing in SYMBOLS:
            exponent = power.growth({growing: 1.0})
            by_growing[growing] = _entry(name, growing, exponent)
        table[name] = by_growing
    return table


def _entry(name: str, growing: str, exponent: float) -> Entry:
    """Return an observable's exponent, rounded, with its verdict, such as "explodes".

    A drift that grows with tokens is "stable", because it is intended.

    Args:
        name: Key of `OBSERVABLES`.
        growing: "batch" or "tokens", of which `exponent` is a power.
    """
    # Sums of exponents are not exact, and adding 0.0 turns -0.0 into 0.0.
    rounded = round(exponent, 10) + 0.0
    # More tokens are meant to move the weights farther, so this growth is no fault.
    is_intended = rounded > 0 and name == "drift" and growing == "tokens"
    if rounded == 0 or is_intended:
        return Entry(rounded, "stable")
    if rounded > 0:
        return Entry(rounded, "explodes")
    return Entry(rounded, "frozen" if OBSERVABLES[name] == "lr" else "vanishes")


def troubles(rule: JointRule, grows: str) -> dict[str, str]:
    """Return the observables that a joint rule does not keep stable, with the verdict for each.

    An observable is left out if the rule's source accepts the change (`JointRule.concessions`). A
    wrong learning rate also changes lr * weight decay. It is then reported for the learning rate
    only.

    Args:
        grows: Size that grows, "batch" or "tokens".
    """
    table = verdicts(rule)
    # The observable of weight decay is lr * wd. A wrong learning rate is reported by itself, so its
    # exponent is subtracted.
    lr_exponent = table["displacement by noise"][grows].exponent
    wrong = {}
    for name, by_size in table.items():
        entry = by_size[grows]
        own_exponent = entry.exponent
        if OBSERVABLES[name] == "weight_decay":
            own_exponent = entry.exponent - lr_exponent
        conceded = rule.concessions.get(name, ONE).growth({grows: 1.0})
        within = min(0, conceded) <= entry.exponent <= max(0, conceded)
        if entry.verdict != "stable" and abs(own_exponent) > _TOLERANCE and not within:
            wrong[name] = _entry(name, grows, own_exponent).verdict
    return wrong


def limits_text(rule: JointRule) -> str:
    """Return a table with the verdict on each observable as batch B and tokens T grow, as text.

    A rule that scales betas also gets a line with the range in which it holds. For a rule of Muon
    the table is about its matrices. A second table, about the parameters on Adam, follows.
    """
    headers = [f"{growing} ({symbol})" for growing, symbol in SYMBOLS.items()]
    rows = [["over a run, noise above the gradient", *headers]]
    for name, by_size in verdicts(rule).items():
        cells = [cell(by_size[growing], symbol) for growing, symbol in SYMBOLS.items()]
        rows.append([name, *cells])
    bounds = []
    for beta, power in (("b1", rule.one_minus_b1), ("b2", rule.one_minus_b2)):
        if power is not None and rule.adam_lr is None:
            bounds.append(f"{formula(power)} (1 - {beta}) < 1")
    text = f"under the joint rule {rule.name}\n{terminal.table(rows)}"
    if bounds:
        betas = " and ".join(bounds)
        text += f"\nholds while {betas}, and for a batch well below the noise scale"
    if rule.adam_lr is not None:
        text += f"\n\n{limits_text(rule.of_adam_part)}"
    return text


def _formulas(rule: JointRule) -> list[str]:
    """Return the observables' power laws as text, in the order of `OBSERVABLES`.

    The text is empty for an observable that Muon's matrices lack.
    """
    powers = observables(rule)
    return [formula(powers[name]) if name in powers else "" for name in OBSERVABLES]


def joint_text(ratios: Mapping[str, float], *, b1: float, b2: float) -> str:
    """Return the text of `mupax presets joint`: all rules for settings at another batch or tokens.

    The text has the formula of each setting, the observables of rules that can be applied, the
    factors at these ratios unless both ratios are 1, the sources, and cautions.

    Args:
        ratios: "batch" and "tokens" of the run, divided by those of the base.
        b1: Adam's b1 at the base. A caution is printed for a rule that takes b1 out of (0, 1).
        b2: Adam's b2 at the base. A caution is printed for a rule that takes b2 out of (0, 1).
    """
    powers = [["rule", *OBSERVABLES]]
    for rule in RULES.values():
        if not rule.applied:
            continue
        powers.append([rule.name, *_formulas(rule)])
        if rule.adam_lr is not None:
            adam_part = rule.of_adam_part
            powers.append([adam_part.name, *_formulas(adam_part)])
    title = (
        "how distances of weights, and shares of the run, go where noise outweighs the gradient; "
        "1 stays"
    )
    parts = [terminal.table(joint.rows()), f"{terminal.wrapped(title)}\n{terminal.table(powers)}"]
    if set(ratios.values()) != {1.0}:
        title = f"factors at B = {ratios['batch']:.4g}, T = {ratios['tokens']:.4g}"
        parts.append(f"{title}\n{terminal.table(joint.rows(ratios))}")
    lines = [rule.described() for rule in RULES.values()]
    for rule in RULES.values():
        for doubt in joint.doubts(rule, ratios, b1=b1, b2=b2):
            lines.append(f"caution: {doubt}")
    parts.append("\n".join(map(terminal.wrapped, lines)))
    return "\n\n".join(parts)
