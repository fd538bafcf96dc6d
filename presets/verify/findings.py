"""Findings about a dump: which parameter is wrong, what happens as the model grows, what to write instead.

A fault ends in exit code 1. A caution is what sources disagree on, or what most code leaves out and is felt late: it is said, and not
counted.

Consequences come from `limits`. One difference is put into the preset alone, so that what it leads to is its own and not another's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import SPECS
from mupax.presets.analysis.verdicts import DESCRIPTIVE, ORDER, Entry, entries
from mupax.presets.optimizers import Family
from mupax.presets.preset import Preset
from mupax.presets.roles import VECTORS, ParamSpec, Role
from mupax.presets.rule import ONE, Power, Rule, axis
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED, Difference
from mupax.presets.verify.fit import TOLERANCE, GrowthSeries
from mupax.presets.verify.reference import Reference
from mupax.presets.verify.sentences import Finding, Severity, What, consequence, power, remedy

UNEVEN = 0.2
"""An exponent up to this comes of widths that do not grow in step, as F/D of most models do not."""
SEVERE = ("explodes", "lazy")
"""Verdicts that nobody can want of a model without knowing it."""
_IN_LIMITS = frozenset(spec.role for spec in SPECS.values())


def alone(
    reference: Reference, difference: Difference, line: GrowthSeries, family: Family
) -> tuple[str, Entry] | None:
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
    judged = {
        row: e
        for row, e in after.items()
        if row not in DESCRIPTIVE and e.verdict != "heads collapse"
    }
    worse = {row: e for row, e in judged.items() if _worse(e, before[row])}
    if not worse:
        return None
    row = min(worse, key=lambda row: (ORDER.index(worse[row].verdict), -abs(worse[row].exponent)))
    return row, worse[row]


def together(
    reference: Reference, differences: Sequence[Difference], line: GrowthSeries, family: Family
) -> list[tuple[str, Entry]]:
    """Return what differences that were reported do together: observables that suffer from them, worst first.

    What the preset itself does as the sizes grow is not among them (`of_preset`).

    Args:
        reference: whose numbers stand where the dumps say nothing.
        differences: those of the findings.
    """
    before = _judged(reference.preset, line, family)
    after = _judged(
        _with(reference.preset, [d for d in differences if d.slope is not None], line), line, family
    )
    rows = {row: entry for row, entry in after.items() if _worse(entry, before[row])}
    return _sorted({row: entry for row, entry in rows.items() if abs(entry.exponent) > UNEVEN})


def of_preset(preset: Preset, line: GrowthSeries, family: Family) -> list[tuple[str, Entry]]:
    """Return what is not stable under the preset itself: what explodes, freezes or becomes lazy, worst first.

    Args:
        preset: that the dumps are held against.
    """
    rows = _judged(preset, line, family)
    return _sorted(
        {row: e for row, e in rows.items() if e.verdict in SEVERE and abs(e.exponent) > UNEVEN}
    )


def _judged(preset: Preset, line: GrowthSeries, family: Family) -> dict[str, Entry]:
    """Return all observables that judge a preset along a line of growth."""
    tied = line.models[0].dump.readout is not None
    rows = entries(Limit(preset, family, line.growth, tied=tied), line.limit)
    parts = {parameter.spec.part for parameter in line.models[0].parameters.values()}
    rows = {
        row: e
        for row, e in rows.items()
        if parts != {""} or not ("cross-" in row or "encoder" in row)
    }
    rows = {row: e for row, e in rows.items() if row not in DESCRIPTIVE}
    return {
        row: dataclasses.replace(entry, exponent=round(entry.exponent, 2))
        for row, entry in rows.items()
    }


def _worse(after: Entry, before: Entry) -> bool:
    """Return whether an observable became unstable, or farther from stable than it was."""
    if after.verdict == "stable" or abs(after.exponent - before.exponent) <= 0.02:
        return False
    return after.verdict != before.verdict or abs(after.exponent) > abs(before.exponent)


def _sorted(rows: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    return sorted(
        rows.items(), key=lambda row: (ORDER.index(row[1].verdict), -abs(row[1].exponent))
    )


def _with(preset: Preset, differences: Sequence[Difference], line: GrowthSeries) -> Preset:
    """The preset with these numbers as the dumps have them."""
    changes: list[tuple[Difference, Power]] = [
        (d, axis(line.axis) ** d.excess) for d in differences
    ]
    logits, branch, before = preset.logits, preset.branch, preset.rule
    for difference, factor in changes:
        logits = logits * factor if difference.name == LOGITS else logits
        branch = branch * factor if difference.name == BRANCH else branch

    def rule(spec: ParamSpec) -> Rule:
        row = before(spec)
        fitting = {d.quantity: power for d, power in changes if _is(spec, d)}
        if spec.tied:
            return dataclasses.replace(row, multiplier=row.multiplier * fitting.get("rate", ONE))
        for quantity, factor in fitting.items():
            row = _CHANGE[quantity](row, factor)
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
        row,
        sgd=row.sgd * power,
        adam=row.adam * power,
        muon=None if row.muon is None else row.muon * power,
    ),
    "eps": lambda row, power: dataclasses.replace(row, eps=row.eps * power),
    "pull": lambda row, power: dataclasses.replace(row, decay=row.decay * power),
}
"""Quantity to what becomes of a row whose number is a power larger."""


def findings(reference: Reference, line: GrowthSeries, family: Family) -> list[Finding]:
    """Return faults, then cautions, parameters that have one in common together.

    Args:
        reference: the dumps against a preset.
        line: what grows.
        family: of the optimizer.
    """
    wrong = [d for d in reference.differences if d.wrong and not _fades(d)]
    wrong = [d for d in wrong if not _follows(d, wrong)]
    grouped: dict[tuple, list[tuple[Difference, What]]] = {}
    for difference, what in _joined(wrong, family):
        slope = None if difference.slope is None else round(difference.slope, 1)
        kind = "vectors" if difference.spec and difference.spec.role in VECTORS else difference.role
        kind = (
            "matrices"
            if difference.spec and difference.spec.in_block and kind != "vectors"
            else kind
        )
        kind = "" if what in ("eps", "pull") else kind
        key = (kind, what, slope, round(difference.target, 1), difference.off[1])
        grouped.setdefault(key, []).append((difference, what))
    unsorted = [_finding(members, reference, line, family) for members in grouped.values()]
    unsorted += _cautions(reference, line, family, unsorted)
    return sorted(
        unsorted,
        key=lambda finding: (
            finding.severity != "fault",
            ("multiplier", "start", "rate", "pull", "eps").index(finding.what),
        ),
    )


def consequences_of_all(
    reference: Reference, line: GrowthSeries, family: Family
) -> list[tuple[str, Entry]]:
    """Return what all findings together lead to, by `limits`, worst first.

    A readout that starts smaller or louder is left out, as long as that is a caution: it is felt in the first steps alone,
    and `limits` compares these steps with the start.

    Args:
        reference: the dumps against a preset.
    """
    wrong = [d for d in reference.differences if d.wrong and not _fades(d)]
    slower = {d.name for d in wrong if d.quantity == "rate"}
    counted = [
        d
        for d in wrong
        if d.name in slower or not (_starts_smaller(d) or _starts_louder(d, family))
    ]
    return together(reference, counted, line, family)


def _fades(d: Difference) -> bool:
    """Return whether it is an eps that falls faster than gradients do, which does nothing."""
    return d.quantity == "eps" and d.slope is not None and d.excess < -d.tolerance


def _starts_smaller(d: Difference) -> bool:
    """Return whether it is a readout that starts smaller than it should, as one at zero does."""
    readout = d.spec is not None and d.spec.role is Role.READOUT and not d.spec.tied
    return readout and d.quantity == "start" and d.slope is not None and d.excess < -d.tolerance


def _starts_louder(d: Difference, family: Family) -> bool:
    """Return whether it is a readout that starts at order one, as 2407.05872 has it for Adam.

    Under SGD all gradients before it grow with it, so that there it is a fault.
    """
    readout = d.spec is not None and d.spec.role is Role.READOUT
    return (
        readout and d.quantity == "start" and family != "sgd" and abs(d.excess - 0.5) <= d.tolerance
    )


def _cautions(
    reference: Reference, line: GrowthSeries, family: Family, faults: Sequence[Finding]
) -> list[Finding]:
    """Return what is to be known of attention by 1/sqrt(d), and of a preset that is itself not stable."""
    out = []
    logits = next((d for d in reference.differences if d.name == LOGITS), None)
    grows = line.growth.get("head_dim", 0.0)
    told = any(finding.names[0] == LOGITS for finding in faults)
    if logits is not None and logits.slope is not None and grows and not told:
        excess = logits.slope + grows
        if excess > TOLERANCE:
            out.append(_of_attention(logits, reference, line, excess))
    preset = reference.preset
    rows = of_preset(preset, line, family)
    if rows:
        words = [
            f"{row} {_BY_ITSELF[entry.verdict]}{power(line.word, entry.exponent)}"
            for row, entry in rows[:3]
        ]
        text = (
            f"{preset.name} itself is not stable as {line.word} grows: {'; '.join(words)}. The files follow it, and "
            f"its learning rate has to be tuned again at every size (`mupax presets limits {preset.name}`)."
        )
        out.append(
            Finding(
                severity="caution",
                names=(f"{preset.name} itself",),
                role="",
                what="eps",
                slope=None,
                target=0.0,
                consequence=words[0],
                remedy="Tune the learning rate at every size, or name another preset",
                text=text,
            )
        )
    return out


_BY_ITSELF = {"explodes": "grows as ", "frozen": "freezes as ", "lazy": "becomes lazy as "}


def _slowed(reference: Reference, excess: float) -> bool | None:
    """Return whether the files slow queries and keys down beside other matrices of blocks; None where rates are unknown.

    Args:
        reference: with the slopes of the files.
        excess: power of size by which logits fall slower than 1/d.
    """
    rates = [
        d
        for d in reference.differences
        if d.quantity == "rate" and d.spec is not None and d.spec.in_block
    ]
    attention = [
        d.slope
        for d in rates
        if not d.fused and d.spec is not None and d.spec.role in (Role.QUERY, Role.KEY)
    ]
    matrices = [
        d.slope
        for d in rates
        if d.spec is not None and d.spec.role in (Role.VALUE, Role.MLP_IN, Role.HIDDEN)
    ]
    if not attention or not matrices or None in attention or None in matrices:
        return None
    fastest = max(slope for slope in attention if slope is not None)
    slowest = min(slope for slope in matrices if slope is not None)
    return fastest < slowest - excess + TOLERANCE


def _of_attention(
    logits: Difference, reference: Reference, line: GrowthSeries, excess: float
) -> Finding:
    """Return the caution of logits that fall slower than 1/d, under a preset that has it so."""
    model = line.models[-1]
    scale = (model.dump.attention or 1.0) * line.t[-1] ** -excess
    slower = _slowed(reference, excess)
    have = "and the files do not say"
    if slower is not None:
        have = f"and those of the files {'do' if slower else 'do not'}"
    faster = power(line.word, excess)
    return Finding(
        severity="caution", names=(LOGITS,), role=LOGITS, what="multiplier",
        slope=logits.slope, target=-line.growth["head_dim"],
        consequence=f"once queries and keys align in training q.k grows as {faster}, unless the learning rates of "
        f"queries and keys fall as {power(line.word, -excess)} beside other matrices', {have}",
        remedy=f"Multiply q.k by {scale:.3g} at {line.word} {model.sizes.get(line.axis, 1)} to have mup's 1/d",
        why="1/d in Tensor Programs V, Definition 4.1; 1/sqrt(d) with slower queries and keys in 2405.15712",
    )  # fmt: skip


def _follows(d: Difference, wrong: Sequence[Difference]) -> bool:
    """Whether it is right once another is: the pull of a rate, and a tied readout's start, which is the table's."""
    if d.quantity == "pull":
        causes = [other for other in wrong if other.name == d.name and other.quantity == "rate"]
    elif d.name == TIED and d.quantity == "start":
        causes = [
            o
            for o in wrong
            if o.quantity == "start" and o.spec is not None and o.spec.role is Role.TOKEN_EMBEDDING
        ]
    else:
        return False
    return any(
        None not in (cause.slope, d.slope) and abs(cause.excess - d.excess) < TOLERANCE
        for cause in causes
    )


def _joined(wrong: Sequence[Difference], family: Family) -> list[tuple[Difference, What]]:
    """Differences, and where one multiplier would set start and rate of a parameter right, that one instead of the two."""
    by = {(d.name, d.quantity): d for d in wrong}
    joined: list[tuple[Difference, What]] = []
    for d in wrong:
        start, rate = by.get((d.name, "start")), by.get((d.name, "rate"))
        times = 2.0 if family == "sgd" else 1.0
        same = (
            start
            and rate
            and None not in (start.slope, rate.slope)
            and abs(times * start.excess - rate.excess) < 2 * TOLERANCE
        )
        if same and d.quantity in ("start", "rate"):
            if d.quantity == "start":
                joined.append((d, "multiplier"))
        else:
            joined.append((d, d.quantity if d.name not in (LOGITS, BRANCH) else "multiplier"))
    return joined


def _finding(
    members: Sequence[tuple[Difference, What]],
    reference: Reference,
    line: GrowthSeries,
    family: Family,
) -> Finding:
    (first, what), names = members[0], tuple(d.name for d, _ in members)
    if what == "start" and all(_starts_smaller(d) for d, _ in members):
        return _of_small_readout(first, names, line, family)
    if what == "start" and all(_starts_louder(d, family) and not d.bent for d, _ in members):
        louder = f"the output's change in the first steps grows as {power(line.word, first.excess)}"
        return Finding(
            severity="caution", names=names, role=first.role, what="start", slope=first.slope, target=first.target,
            consequence=louder, remedy=remedy(first, "start", line), why="2407.05872 starts so, under Adam",
        )  # fmt: skip
    severity, why = _severity(first, reference)
    if what == "multiplier":
        severity = "fault"
        why = ""
    difference = (
        dataclasses.replace(first, quantity="rate")
        if first.name == TIED and what == "multiplier"
        else first
    )
    worst = max(
        (
            alone(
                reference, dataclasses.replace(difference, spec=d.spec, name=d.name), line, family
            )
            for d, _ in members
        ),
        key=_weight,
    )
    role = _together([d for d, _ in members])
    if worst is not None and worst[1].verdict == "explodes":
        # A source that has it so has it for another optimizer or another growth.
        severity = "fault"
        why = ""
    return Finding(
        severity=severity, names=names, role=role, what=what, slope=first.slope, target=first.target,
        consequence=consequence(first, what, worst, line), remedy=remedy(first, what, line), why=why,
    )  # fmt: skip


def _of_small_readout(
    d: Difference, names: tuple[str, ...], line: GrowthSeries, family: Family
) -> Finding:
    """Return the caution of a readout that is scaled down twice, and why training recovers from it."""
    if family == "sgd":
        why = (
            "training recovers: the readout's gradient does not depend on its own start, so that it has its size after a "
            "few steps, and the layers before it wait so long, as with a readout that starts at zero"
        )
    else:
        why = (
            "training recovers: Adam's steps do not depend on a gradient's size, so that the readout has its size after a "
            "few steps, as one that starts at zero has"
        )
    return Finding(
        severity="caution", names=names, role=d.role, what="start", slope=d.slope, target=d.target,
        consequence=f"the logits start {power(line.word, d.excess)} smaller than they should",
        remedy=remedy(d, "start", line), why=why,
    )  # fmt: skip


def _together(differences: Sequence[Difference]) -> str:
    """What parameters are that have something in common."""
    roles = {d.role for d in differences}
    vectors = {d.spec is not None and d.spec.role in VECTORS for d in differences}
    if len(roles) == 1:
        return roles.pop()
    if all(vectors):
        return "gains and biases"
    return (
        "matrices of blocks"
        if not any(vectors) and all(d.spec and d.spec.in_block for d in differences)
        else "all kinds"
    )


def _weight(worst: tuple[str, Entry] | None) -> float:
    return -1.0 if worst is None else abs(worst[1].exponent)


def _severity(d: Difference, reference: Reference) -> tuple[Severity, str]:
    """Caution, and why, of what has a source or is every framework's default; anything else is a fault."""

    def near(*exponents: float) -> bool:
        return d.slope is not None and any(abs(d.excess - x) <= d.tolerance for x in exponents)

    if d.bent:
        return "fault", ""
    role = d.spec.role if d.spec else None
    if d.quantity == "eps" and d.slope is not None:
        return (
            "caution",
            "most code has one eps for all; it is felt where gradients come near it, 2505.01618, 2407.05872",
        )
    if d.quantity == "pull" and near(-0.5, -1.0):
        return (
            "caution",
            "sources disagree: fixed lr*wd in 2405.13698 and 2505.01618, falling with width in 2510.15262 and 2512.05620",
        )
    if d.quantity == "rate" and role is Role.TOKEN_EMBEDDING and near(-0.5):
        return (
            "caution",
            "2506.15025 and 2407.17465 have it so, for vocabularies much larger than the width",
        )
    return "fault", ""
