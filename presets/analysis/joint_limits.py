"""What Adam does over a run whose batch B or tokens T grow, computed from a joint rule alone: exponents, words, and the column to blame.

Gradients are signal + noise B^-1/2, and the noise is the larger: entries of Adam's direction are of order one, and their mean is
signal over noise, B^1/2. In T/B steps weights move by the direction's random sum and by its mean. After Malladi et al. 2022
(2205.10287) and, for 1/tau, Wang and Aitchison 2024 (2405.13698); the composition is derived here, and measured by
`mupax check RECIPE --grow batch`. In T it asks for a run that is one stretch of the dynamics, which sources contradict.
"""

from __future__ import annotations

from collections.abc import Mapping

from mupax import terminal
from mupax.presets import joint
from mupax.presets.analysis.verdicts import Entry, cell
from mupax.presets.horizon import COLUMNS, RULES, JointRule, formula
from mupax.presets.rule import ONE, Power, axis

SYMBOLS = {"batch": "B", "tokens": "T"}
"""What grows, and its letter."""

OBSERVABLES = {
    "displacement by noise": "lr",
    "drift": "lr",
    "decay over the run": "weight_decay",
    "memory of b1": "one_minus_b1",
    "memory of b2": "one_minus_b2",
    "eps over noise": "eps",
    "warm-up": "durations",
}
"""What is looked at, and the column of a rule that is to blame: distances in units of the weights, 1/tau of weight decay, and as shares
of the run, which are numbers of tokens over T, the steps that the moments average over and those of warm-up."""


def observables(rule: JointRule) -> dict[str, Power]:
    """How each goes with B and T under a rule; 1 stays."""
    batch, steps = axis("batch"), axis("tokens") / axis("batch")
    powers = {column: getattr(rule, column) or ONE for column in COLUMNS}
    lr = powers["lr"]
    return {
        "displacement by noise": lr * steps**0.5,
        "drift": lr * steps * batch**0.5,
        "decay over the run": lr * powers["weight_decay"] * steps,
        "memory of b1": ONE / (powers["one_minus_b1"] * steps),
        "memory of b2": ONE / (powers["one_minus_b2"] * steps),
        "eps over noise": powers["eps"] * batch**0.5,
        "warm-up": powers["durations"] / steps,
    }


def verdicts(rule: JointRule) -> dict[str, dict[str, Entry]]:
    """Observable to what grows to exponent and word, the words those of widths (`mupax.presets.analysis.verdicts`)."""
    return {
        name: {grows: _entry(name, grows, power.growth({grows: 1.0})) for grows in SYMBOLS}
        for name, power in observables(rule).items()
    }


def _entry(name: str, grows: str, exponent: float) -> Entry:
    x = round(exponent, 10) + 0.0
    if x == 0 or (x > 0 and (name, grows) == ("drift", "tokens")):  # what more tokens are for
        return Entry(x, "stable")
    if x > 0:
        return Entry(x, "explodes")
    return Entry(x, "frozen" if OBSERVABLES[name] == "lr" else "vanishes")


def troubles(rule: JointRule, grows: str) -> dict[str, str]:
    """Observable to what is wrong with its own column where this grows, but for what the source lets go.

    A wrong rate changes the pull of weight decay too, for which the rate alone is blamed.

    Args:
        rule: a joint rule.
        grows: of `SYMBOLS`.
    """
    table, wrong = verdicts(rule), {}
    of_rate = table["displacement by noise"][grows].exponent
    for name, at in table.items():
        x, concession = at[grows].exponent, rule.concessions.get(name, ONE).growth({grows: 1.0})
        rest = x - of_rate if OBSERVABLES[name] == "weight_decay" else x
        if (
            at[grows].verdict != "stable"
            and abs(rest) > 0.01
            and not min(0, concession) <= x <= max(0, concession)
        ):
            wrong[name] = _entry(name, grows, rest).verdict
    return wrong


def limits_text(rule: JointRule) -> str:
    """Every observable and what becomes of it as B and as T grow, and how far the rule holds."""
    rows = [
        [
            "over a run, noise above the gradient",
            *(f"{grows} ({symbol})" for grows, symbol in SYMBOLS.items()),
        ]
    ]
    for name, at in verdicts(rule).items():
        rows.append([name, *(cell(at[grows], symbol) for grows, symbol in SYMBOLS.items())])
    slow = {"b1": rule.one_minus_b1, "b2": rule.one_minus_b2}
    betas = " and ".join(
        f"{formula(power)} (1 - {beta}) < 1" for beta, power in slow.items() if power is not None
    )
    holds = f"\nholds while {betas}, and for a batch well below the noise scale" if betas else ""
    return f"under the joint rule {rule.name}\n{terminal.table(rows)}{holds}"


def joint_text(ratios: Mapping[str, float], *, b1: float, b2: float) -> str:
    """Every rule for a person: formulas, what goes how under those that can be applied, factors at some ratios, sources and cautions.

    Args:
        ratios: of `batch` and `tokens` to the base's.
        b1, b2: Adam's at the base, which a rule may take out of (0, 1).
    """
    rules = [each for each in RULES.values() if each.applied]
    powers = [
        ["rule", *OBSERVABLES],
        *([each.name, *map(formula, observables(each).values())] for each in rules),
    ]
    what = "how distances of weights, and shares of the run, go where noise outweighs the gradient; 1 stays"
    parts = [terminal.table(joint.rows()), f"{what}\n{terminal.table(powers)}"]
    if set(ratios.values()) != {1.0}:
        where = f"factors at B = {ratios['batch']:.4g}, T = {ratios['tokens']:.4g}"
        parts.append(f"{where}\n{terminal.table(joint.rows(ratios))}")
    lines = [each.described() for each in RULES.values()]
    lines += [
        f"caution: {x}" for each in RULES.values() for x in joint.doubts(each, ratios, b1=b1, b2=b2)
    ]
    return "\n\n".join([*parts, "\n".join(map(terminal.wrapped, lines))])
