"""What becomes of a model as it grows, of one number that differs from a preset's and of all the dumps have: by `limits`, from the rules.

One difference is put into the preset alone, so that what it leads to is its own and not another's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import SPECS
from mupax.presets.analysis.verdicts import DESCRIPTIVE, ORDER, Entry, entries
from mupax.presets.optimizers import Family
from mupax.presets.power import ONE, Power, axis
from mupax.presets.preset import Preset
from mupax.presets.roles import ParamSpec
from mupax.presets.rule import Rule
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED, Difference
from mupax.presets.verify.fit import Line
from mupax.presets.verify.reference import Reference

UNEVEN = 0.2
"""An exponent up to this comes of widths that do not grow in step, as F/D of most models do not."""
SEVERE = ("explodes", "lazy")
"""Verdicts that nobody can want of a model without knowing it."""
_IN_LIMITS = frozenset(spec.role for spec in SPECS.values())


def alone(reference: Reference, difference: Difference, line: Line, family: Family) -> tuple[str, Entry] | None:
    """The observable that suffers most where this number alone is as the dumps have it; None where `limits` shows nothing.

    Args:
        reference: whose table is otherwise right.
        difference: the number.
        line: what grows.
        family: of the optimizer.
    """
    role = difference.spec.role if difference.spec else None
    if role is not None and role not in _IN_LIMITS:
        return None
    tied = difference.name == TIED
    before, after = (
        entries(Limit(preset, family, line.growth, tied=tied), line.limit)
        for preset in (reference.preset, _with(reference.preset, [difference], line))
    )
    judged = {row: e for row, e in after.items() if row not in DESCRIPTIVE and e.verdict != "heads collapse"}
    worse = {row: e for row, e in judged.items() if _worse(e, before[row])}
    if not worse:
        return None
    row = min(worse, key=lambda row: (ORDER.index(worse[row].verdict), -abs(worse[row].exponent)))
    return row, worse[row]


def together(
    reference: Reference, differences: Sequence[Difference], line: Line, family: Family
) -> list[tuple[str, Entry]]:
    """Return what differences that were reported do together: observables that suffer from them, worst first.

    What the preset itself does as the sizes grow is not among them (`of_preset`).

    Args:
        reference: whose numbers stand where the dumps say nothing.
        differences: those of the findings.
    """
    before = _judged(reference.preset, line, family)
    after = _judged(_with(reference.preset, [d for d in differences if d.slope is not None], line), line, family)
    rows = {row: entry for row, entry in after.items() if _worse(entry, before[row])}
    return _sorted({row: entry for row, entry in rows.items() if abs(entry.exponent) > UNEVEN})


def of_preset(preset: Preset, line: Line, family: Family) -> list[tuple[str, Entry]]:
    """Return what is not stable under the preset itself: what explodes, freezes or becomes lazy, worst first.

    Args:
        preset: that the dumps are held against.
    """
    rows = _judged(preset, line, family)
    return _sorted({row: e for row, e in rows.items() if e.verdict in SEVERE and abs(e.exponent) > UNEVEN})


def _judged(preset: Preset, line: Line, family: Family) -> dict[str, Entry]:
    """Return all observables that judge a preset along a line of growth."""
    tied = line.models[0].dump.readout is not None
    rows = entries(Limit(preset, family, line.growth, tied=tied), line.limit)
    parts = {parameter.spec.part for parameter in line.models[0].parameters.values()}
    rows = {row: e for row, e in rows.items() if parts != {""} or not ("cross-" in row or "encoder" in row)}
    rows = {row: e for row, e in rows.items() if row not in DESCRIPTIVE}
    return {row: dataclasses.replace(entry, exponent=round(entry.exponent, 2)) for row, entry in rows.items()}


def _worse(after: Entry, before: Entry) -> bool:
    """Return whether an observable became unstable, or farther from stable than it was."""
    if after.verdict == "stable" or abs(after.exponent - before.exponent) <= 0.02:
        return False
    return after.verdict != before.verdict or abs(after.exponent) > abs(before.exponent)


def _sorted(rows: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    return sorted(rows.items(), key=lambda row: (ORDER.index(row[1].verdict), -abs(row[1].exponent)))


def _with(preset: Preset, differences: Sequence[Difference], line: Line) -> Preset:
    """The preset with these numbers as the dumps have them."""
    changes: list[tuple[Difference, Power]] = [(d, axis(line.axis) ** d.excess) for d in differences]
    logits, branch, before = preset.logits, preset.branch, preset.rule
    for difference, power in changes:
        logits = logits * power if difference.name == LOGITS else logits
        branch = branch * power if difference.name == BRANCH else branch

    def rule(spec: ParamSpec) -> Rule:
        row = before(spec)
        fitting = {d.quantity: power for d, power in changes if _is(spec, d)}
        if spec.tied:
            return dataclasses.replace(row, multiplier=row.multiplier * fitting.get("rate", ONE))
        for quantity, power in fitting.items():
            row = _CHANGE[quantity](row, power)
        return row

    return dataclasses.replace(preset, rule=rule, logits=logits, branch=branch, form=None)


def _is(spec: ParamSpec, difference: Difference) -> bool:
    other = difference.spec
    if other is None or other.tied != spec.tied:
        return False
    return (other.role, other.of) == (spec.role, spec.of)


_CHANGE: dict[str, Callable[[Rule, Power], Rule]] = {
    "start": lambda row, power: dataclasses.replace(row, init_std=row.init_std * power),
    "rate": lambda row, power: dataclasses.replace(
        row, sgd=row.sgd * power, adam=row.adam * power, muon=None if row.muon is None else row.muon * power
    ),
    "eps": lambda row, power: dataclasses.replace(row, eps=row.eps * power),
    "pull": lambda row, power: dataclasses.replace(row, decay=row.decay * power),
}
"""Quantity to what becomes of a row whose number is a power larger."""
