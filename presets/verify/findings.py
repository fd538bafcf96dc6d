"""Findings about dumps: which parameter is wrong, what happens as the model grows, what to write.

A dump holds the values that a training program gives each parameter of one model. A finding is a
fault or a caution. A fault makes the command exit with code 1. A caution does not: sources disagree
on it, or most code leaves it out and feels it late.

Consequences come from `presets.analysis.limits`. One difference at a time is put into the preset,
so that each has its own consequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import SPECS
from mupax.presets.analysis.verdicts import DESCRIPTIVE, ORDER, Entry, entries
from mupax.presets.optimizers import Family
from mupax.presets.preset import Preset
from mupax.presets.roles import VECTORS, ParamSpec, Role
from mupax.presets.rule import ONE, Power, Rule, axis
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED, Difference
from mupax.presets.verify.fit import TOLERANCE, GrowthSeries, Quantity
from mupax.presets.verify.reference import Reference
from mupax.presets.verify.sentences import (
    Finding,
    Severity,
    ValueName,
    consequence,
    observable_consequence,
    power,
    remedy,
)

UNEVEN = 0.2
"""Largest exponent of an observable that may come from widths that do not grow in step.

In most models, for example, the ratio of MLP size to width grows a little.
"""
SEVERE = ("explodes", "lazy")
"""Verdicts on a preset's own observables for which `mupax verify` prints a caution."""
_VALUE_ORDER: tuple[ValueName, ...] = ("multiplier", "start", "rate", "pull", "eps")
"""Order of findings in a report."""
_IN_LIMITS = frozenset(spec.role for spec in SPECS.values())
"""Roles of the matrices that `Limit` computes exponents for."""

Observables = list[tuple[str, Entry]]
"""List of pairs (observable's name, its exponent and verdict), worst first."""


def findings(reference: Reference, line: GrowthSeries, family: Family) -> list[Finding]:
    """Return what is wrong with the user's models: faults first, then cautions.

    Parameters with the same difference from the preset are one finding. A difference that goes away
    once another one is corrected is left out.

    Args:
        reference: Preset that the user's models are compared with, and the differences from it.
        line: Models of the user's code as a series, which says what grows.
        family: Family of the user's models' optimizer, such as "adam".
    """
    wrong = _wrong_differences(reference)
    causes = [d for d in wrong if not _follows(d, wrong)]
    reported = []
    if reference.common_rate_excess:
        rates = [d for d in causes if d.quantity == "rate"]
        causes = [d for d in causes if d.quantity != "rate"]
        reported.append(_rate_of_the_run(rates, reference, line, family))

    groups: dict[tuple, list[_NamedDifference]] = {}
    for named in _named_differences(causes, family):
        groups.setdefault(_group_key(named), []).append(named)

    for group in groups.values():
        members = [named.difference for named in group]
        reported.append(_finding(members, group[0].value_name, reference, line, family))
    reported += _cautions(reference, line, family, reported)
    return sorted(reported, key=lambda f: (f.severity != "fault", _VALUE_ORDER.index(f.what)))


def consequences_of_all(reference: Reference, line: GrowthSeries, family: Family) -> Observables:
    """Return the observables of `limits` that all findings together make worse, worst first.

    A readout of a wrong initial size is left out if its learning rate is right, because it matters
    in the first steps only.

    Args:
        reference: Preset that the user's models are compared with, and the differences from it.
    """
    wrong = _wrong_differences(reference)
    with_wrong_rate = {d.name for d in wrong if d.quantity == "rate"}
    counted = []
    for d in wrong:
        # A readout that starts smaller or louder is a caution. It matters in the first steps
        # alone, and `limits` compares these steps with the start.
        harmless = _starts_smaller(d) or _starts_louder(d, family)
        if d.slope is not None and (d.name in with_wrong_rate or not harmless):
            counted.append(d)
    return _suffering(reference.preset, counted, line, family)


def _wrong_differences(reference: Reference) -> list[Difference]:
    return [d for d in reference.differences if d.wrong and not _fades(d)]


def _fades(d: Difference) -> bool:
    """Return whether a difference is an eps that falls faster than gradients, which is harmless."""
    return d.quantity == "eps" and d.slope is not None and d.excess < -d.tolerance


def _follows(d: Difference, wrong: Sequence[Difference]) -> bool:
    """Return whether a difference disappears once another difference is corrected.

    This is so for the decay lr*wd ("pull") of a parameter with a wrong learning rate. It is also so
    for the initial size ("start") of a tied readout, if that of the embedding is wrong. The two
    differences must have nearly the same excess.
    """
    if d.quantity == "pull":
        causes = [cause for cause in wrong if cause.name == d.name and cause.quantity == "rate"]
    elif d.name == TIED and d.quantity == "start":
        causes = [cause for cause in wrong if _is_start_of_table(cause)]
    else:
        return False
    if d.slope is None:
        return False
    excesses = []
    for cause in causes:
        if cause.slope is not None:
            excesses.append(cause.excess)
    return any(abs(excess - d.excess) < TOLERANCE for excess in excesses)


def _is_start_of_table(d: Difference) -> bool:
    return d.quantity == "start" and d.spec is not None and d.spec.role is Role.TOKEN_EMBEDDING


class _NamedDifference(NamedTuple):
    """Difference, and the value that its finding calls wrong, such as "rate" or "multiplier"."""

    difference: Difference
    value_name: ValueName


def _named_differences(wrong: Sequence[Difference], family: Family) -> list[_NamedDifference]:
    """Return each difference with the value that its finding shall call wrong.

    This is the quantity that differs, with one exception. If one multiplier would correct both
    initial size ("start") and learning rate ("rate") of a parameter, the multiplier is named, once
    for both.
    """
    by_name: dict[tuple[str, Quantity], Difference] = {(d.name, d.quantity): d for d in wrong}
    result = []
    for d in wrong:
        value_name: ValueName = "multiplier" if d.name in (LOGITS, BRANCH) else d.quantity
        start = by_name.get((d.name, "start"))
        rate = by_name.get((d.name, "rate"))
        if d.quantity in ("start", "rate") and _one_multiplier_corrects(start, rate, family):
            # The start's difference stands for both.
            if d.quantity == "rate":
                continue
            value_name = "multiplier"
        result.append(_NamedDifference(d, value_name))
    return result


def _one_multiplier_corrects(
    start: Difference | None, rate: Difference | None, family: Family
) -> bool:
    if start is None or rate is None or start.slope is None or rate.slope is None:
        return False
    # A multiplier enters SGD's update twice: in the forward pass and in the gradient.
    times = 2.0 if family == "sgd" else 1.0
    return abs(times * start.excess - rate.excess) < 2 * TOLERANCE


def _group_key(named: _NamedDifference) -> tuple:
    """Return a key by which differences are grouped. Those with equal keys become one finding."""
    d = named.difference
    # Most code sets eps and weight decay for all parameters at once: one finding is enough.
    if named.value_name in ("eps", "pull"):
        kind = ""
    elif d.spec is not None and d.spec.role in VECTORS:
        kind = "vectors"
    elif d.spec is not None and d.spec.in_block:
        kind = "matrices"
    else:
        kind = d.role
    # Sizes are rounded to whole numbers, so parameters with the same mistake have nearly the same
    # exponents.
    slope = d.slope
    if slope is not None:
        slope = round(slope, 1)
    return (kind, named.value_name, slope, round(d.target, 1), d.outlier)


def _finding(
    members: Sequence[Difference],
    value_name: ValueName,
    reference: Reference,
    line: GrowthSeries,
    family: Family,
) -> Finding:
    """Return the finding on differences of one group: severity, consequence and remedy.

    A readout that starts too small, or under other optimizers than SGD at order one, gets a caution
    of its own.

    Args:
        members: Differences with the same `_group_key`, so that one finding names all of them.
        value_name: Value that the finding calls wrong, which may be the multiplier.
        reference: Preset that the user's models are compared with, and the differences from it.
    """
    first = members[0]
    names = tuple(d.name for d in members)
    if value_name == "start" and all(_starts_smaller(d) for d in members):
        return _small_readout(first, names, line, family)
    if value_name == "start" and all(
        _starts_louder(d, family) and not d.has_outlier for d in members
    ):
        return _loud_readout(first, names, line)

    severity, why = _severity(first)
    worst = _worst_consequence(members, value_name, reference, line, family)
    explodes = worst is not None and worst[1].verdict == "explodes"
    # A source may recommend a value that explodes here. It then means another optimizer or another
    # growth.
    if value_name == "multiplier" or explodes:
        severity = "fault"
        why = ""
    return Finding(
        severity=severity,
        names=names,
        role=_common_role(members),
        what=value_name,
        slope=first.slope,
        target=first.target,
        consequence=consequence(first, value_name, worst, line),
        remedy=remedy(first, value_name, line),
        why=why,
    )


def _rate_of_the_run(
    rates: Sequence[Difference], reference: Reference, line: GrowthSeries, family: Family
) -> Finding:
    """Return the fault that all learning rates are off by one factor.

    Args:
        rates: Differences that this finding stands for, those of the quantity "rate".
        reference: Preset that the user's models are compared with, and the differences from it.
    """
    excess = reference.common_rate_excess
    place = f"{line.word} {line.models[-1].sizes.get(line.axis, 1)}"
    factor = line.t[-1] ** excess
    suffering = _suffering(reference.preset, rates, line, family)
    result = f"all steps go as {power(line.word, excess)}"
    if suffering:
        result = observable_consequence(*suffering[0], line.word)
    remedy = (
        f"Divide every learning rate at {place} by {factor:.3g}, to have the base's for the run"
    )
    return Finding(
        severity="fault",
        names=("every learning rate",),
        role="all kinds",
        what="rate",
        slope=None,
        target=0.0,
        consequence=result,
        remedy=remedy,
        text=(
            f"every learning rate is {factor:.3g} times {reference.preset.name}'s at {place}, and "
            "those of the parameters are right relative to each other. One learning rate of the "
            f"run is for all sizes, so {result}. {remedy}."
        ),
    )


def _severity(d: Difference) -> tuple[Severity, str]:
    """Return the severity of a difference with the reason for a caution: ("caution", reason).

    The result is a caution if some published source, or most code, sets the value in this way. A
    fault is ("fault", "").
    """
    if d.has_outlier or d.slope is None:
        return "fault", ""
    if d.quantity == "eps":
        return "caution", (
            "most code has one eps for all; it is felt where gradients come near it, "
            "2505.01618, 2407.05872"
        )
    half_too_slow = abs(d.excess + 0.5) <= d.tolerance
    one_too_slow = abs(d.excess + 1.0) <= d.tolerance
    if d.quantity == "pull" and (half_too_slow or one_too_slow):
        return "caution", (
            "sources disagree: fixed lr*wd in 2405.13698 and 2505.01618, falling with width in "
            "2510.15262 and 2512.05620"
        )
    is_table = d.spec is not None and d.spec.role is Role.TOKEN_EMBEDDING
    if d.quantity == "rate" and is_table and half_too_slow:
        return "caution", (
            "2506.15025 and 2407.17465 have it so, for vocabularies much larger than the width"
        )
    return "fault", ""


def _common_role(members: Sequence[Difference]) -> str:
    """Return the role that all differences share, or words for their roles, such as "all kinds"."""
    roles = {d.role for d in members}
    if len(roles) == 1:
        return roles.pop()
    specs = [d.spec for d in members]
    vectors = [spec is not None and spec.role in VECTORS for spec in specs]
    if all(vectors):
        return "gains and biases"
    in_blocks = all(spec is not None and spec.in_block for spec in specs)
    if in_blocks and not any(vectors):
        return "matrices of blocks"
    return "all kinds"


def _starts_smaller(d: Difference) -> bool:
    """Return whether a difference is an untied readout whose initial size falls too fast."""
    is_readout = d.spec is not None and d.spec.role is Role.READOUT and not d.spec.tied
    is_smaller = d.slope is not None and d.excess < -d.tolerance
    return is_readout and d.quantity == "start" and is_smaller


def _starts_louder(d: Difference, family: Family) -> bool:
    """Return whether a difference is a readout whose initial logits stay of order one.

    The exponent of its initial size is then 1/2 above the right one. The result is false under SGD,
    where such a readout is a fault: all gradients before it grow with it.
    """
    is_readout = d.spec is not None and d.spec.role is Role.READOUT
    # A readout of variance 1/fan-in grows as width^(1/2) relative to muP's.
    is_root_louder = abs(d.excess - 0.5) <= d.tolerance
    return is_readout and d.quantity == "start" and family != "sgd" and is_root_louder


def _small_readout(
    d: Difference, names: tuple[str, ...], line: GrowthSeries, family: Family
) -> Finding:
    """Return the caution on a readout whose initial size falls too fast.

    Such a readout is scaled down twice. The caution says why training recovers.

    Args:
        d: Difference that stands for all of them.
        names: Names of all parameters with this difference.
    """
    if family == "sgd":
        why = (
            "training recovers: the readout's gradient does not depend on its own start, so that "
            "it has its size after a few steps, and the layers before it wait so long, as with a "
            "readout that starts at zero"
        )
    else:
        why = (
            "training recovers: Adam's steps do not depend on a gradient's size, so that the "
            "readout has its size after a few steps, as one that starts at zero has"
        )
    return Finding(
        severity="caution",
        names=names,
        role=d.role,
        what="start",
        slope=d.slope,
        target=d.target,
        consequence=f"the logits start {power(line.word, d.excess)} smaller than they should",
        remedy=remedy(d, "start", line),
        why=why,
    )


def _loud_readout(d: Difference, names: tuple[str, ...], line: GrowthSeries) -> Finding:
    """Return the caution on a readout whose initial logits stay of order one.

    Args:
        d: Difference that stands for all of them.
        names: Names of all parameters with this difference.
    """
    growth = power(line.word, d.excess)
    return Finding(
        severity="caution",
        names=names,
        role=d.role,
        what="start",
        slope=d.slope,
        target=d.target,
        consequence=f"the output's change in the first steps grows as {growth}",
        remedy=remedy(d, "start", line),
        why="2407.05872 starts so, under Adam",
    )


def _cautions(
    reference: Reference, line: GrowthSeries, family: Family, reported: Sequence[Finding]
) -> list[Finding]:
    """Return cautions for which the user's models need not differ from the preset.

    One is on attention logits that fall more slowly than 1/head_dim. The other is on a preset that
    is itself unstable as these sizes grow.

    Args:
        reference: Preset that the user's models are compared with, and the differences from it.
        reported: Findings on differences. One on `LOGITS` replaces the caution on attention.
    """
    cautions = []
    logits = next((d for d in reference.differences if d.name == LOGITS), None)
    head_dim_growth = line.growth.get("head_dim", 0.0)
    has_finding = any(finding.names[0] == LOGITS for finding in reported)
    if logits is not None and logits.slope is not None and head_dim_growth and not has_finding:
        excess = logits.slope + head_dim_growth
        if excess > TOLERANCE:
            cautions.append(_root_attention(logits, reference, line, excess))

    unstable = _unstable_observables(reference.preset, line, family)
    if unstable:
        has_fault = any(finding.severity == "fault" for finding in reported)
        cautions.append(_unstable_preset(reference.preset, unstable, line, follow=not has_fault))
    return cautions


_INSTABILITIES = {"explodes": "grows as", "lazy": "becomes lazy as"}


def _unstable_preset(
    preset: Preset, unstable: Observables, line: GrowthSeries, *, follow: bool
) -> Finding:
    """Return the caution on a preset that is itself not stable, with three observables.

    Args:
        follow: `True` if the text says that the files follow the preset.
    """
    clauses = []
    for row, entry in unstable[:3]:
        growth = power(line.word, entry.exponent)
        clauses.append(f"{row} {_INSTABILITIES[entry.verdict]} {growth}")
    subject = "The files follow it, and its" if follow else "Its"
    text = (
        f"{preset.name} itself is not stable as {line.word} grows: {'; '.join(clauses)}. "
        f"{subject} learning rate has to be tuned again at every size "
        f"(`mupax presets limits {preset.name}`)."
    )
    return Finding(
        severity="caution",
        names=(f"{preset.name} itself",),
        role="",
        # No single value is wrong. "eps" sorts the caution last.
        what="eps",
        slope=None,
        target=0.0,
        consequence=clauses[0],
        remedy="Tune the learning rate at every size, or name another preset",
        text=text,
    )


def _root_attention(
    logits: Difference, reference: Reference, line: GrowthSeries, excess: float
) -> Finding:
    """Return the caution on attention logits that follow the preset but not 1/head_dim.

    Their factor falls more slowly than 1/head_dim, usually as head_dim^-1/2.

    Args:
        logits: Difference of `LOGITS`, which is right for the preset.
        reference: Preset that the user's models are compared with, and the differences from it.
        excess: Exponent of the factor minus that of 1/head_dim, in powers of the growing size.
    """
    model = line.models[-1]
    scale = (model.dump.attention or 1.0) * line.t[-1] ** -excess
    slows_down = _slows_queries_and_keys(reference, excess)
    if slows_down is None:
        clause = "and the files do not say"
    elif slows_down:
        clause = "and those of the files do"
    else:
        clause = "and those of the files do not"
    faster = power(line.word, excess)
    slower = power(line.word, -excess)
    size = model.sizes.get(line.axis, 1)
    return Finding(
        severity="caution",
        names=(LOGITS,),
        role=LOGITS,
        what="multiplier",
        slope=logits.slope,
        target=-line.growth["head_dim"],
        consequence=(
            f"once queries and keys align in training q.k grows as {faster}, unless the learning "
            f"rates of queries and keys fall as {slower} beside other matrices', {clause}"
        ),
        remedy=f"Multiply q.k by {scale:.3g} at {line.word} {size} to have mup's 1/d",
        why=(
            "1/d in Tensor Programs V, Definition 4.1; "
            "1/sqrt(d) with slower queries and keys in 2405.15712"
        ),
    )


def _slows_queries_and_keys(reference: Reference, excess: float) -> bool | None:
    """Return whether learning rates of queries and keys fall faster than those of other matrices.

    Return `None` if the files do not show these learning rates.

    Args:
        reference: Preset that the user's models are compared with, and the differences from it.
        excess: Power of the growing size by which the learning rates should differ.
    """
    attention: list[float | None] = []
    matrices: list[float | None] = []
    for d in reference.differences:
        if d.quantity != "rate" or d.spec is None or not d.spec.in_block:
            continue
        # A fused matrix has one rate for queries and values, so it shows no difference.
        if d.spec.role in (Role.QUERY, Role.KEY) and not d.fused:
            attention.append(d.slope)
        elif d.spec.role in (Role.VALUE, Role.MLP_IN, Role.HIDDEN):
            matrices.append(d.slope)
    known_attention = [slope for slope in attention if slope is not None]
    known_matrices = [slope for slope in matrices if slope is not None]
    all_known = known_attention == attention and known_matrices == matrices
    if not attention or not matrices or not all_known:
        return None
    return max(known_attention) < min(known_matrices) - excess + TOLERANCE


def _worst_consequence(
    members: Sequence[Difference],
    value_name: ValueName,
    reference: Reference,
    line: GrowthSeries,
    family: Family,
) -> tuple[str, Entry] | None:
    """Return the observable that one of the differences harms most, or `None` if none is harmed.

    Args:
        members: Differences of one group. Each is put into the preset alone.
        reference: Preset that the user's models are compared with, and the differences from it.
    """
    worst = None
    # Lower than the absolute value of any exponent, so that an exponent of 0 counts, too.
    worst_exponent = -1.0
    quantity = members[0].quantity
    if members[0].name == TIED and value_name == "multiplier":
        # The start of a tied readout is that of the table. Its multiplier acts as a rate.
        quantity = "rate"
    for d in members:
        # The exponents of a group are nearly equal. Those of the first member stand for all.
        alone = dataclasses.replace(members[0], quantity=quantity, spec=d.spec, name=d.name)
        suffering = _consequence_alone(alone, reference, line, family)
        if suffering is not None and abs(suffering[1].exponent) > worst_exponent:
            worst = suffering
            worst_exponent = abs(suffering[1].exponent)
    return worst


def _consequence_alone(
    difference: Difference, reference: Reference, line: GrowthSeries, family: Family
) -> tuple[str, Entry] | None:
    """Return the observable that becomes worst if the preset has this difference and no other.

    Return `None` if no observable becomes worse, or if `limits` has no parameter with the role.
    """
    if difference.spec is not None and difference.spec.role not in _IN_LIMITS:
        return None
    tied = difference.name == TIED
    changed = _with_differences(reference.preset, [difference], line)
    before = entries(Limit(reference.preset, family, line.growth_in_step, tied=tied), line.limit)
    after = entries(Limit(changed, family, line.growth_in_step, tied=tied), line.limit)

    worse = {}
    for row, entry in after.items():
        judges = row not in DESCRIPTIVE and entry.verdict != "heads collapse"
        if judges and _is_worse(entry, before[row]):
            worse[row] = entry
    if not worse:
        return None
    return _worst_first(worse)[0]


def _suffering(
    preset: Preset, differences: Sequence[Difference], line: GrowthSeries, family: Family
) -> Observables:
    """Return the observables that become worse under a preset with all these differences.

    Worst observables come first. An observable that is unstable under the preset itself counts only
    if it becomes worse. An exponent of at most `UNEVEN` in absolute value does not count.
    """
    before = _judging_observables(preset, line, family)
    changed = _with_differences(preset, differences, line)
    after = _judging_observables(changed, line, family)
    worse = {}
    for row, entry in after.items():
        if _is_worse(entry, before[row]) and abs(entry.exponent) > UNEVEN:
            worse[row] = entry
    return _worst_first(worse)


def _unstable_observables(preset: Preset, line: GrowthSeries, family: Family) -> Observables:
    """Return the observables that explode or become lazy under the preset itself, worst first."""
    unstable = {}
    for row, entry in _judging_observables(preset, line, family).items():
        if entry.verdict in SEVERE and abs(entry.exponent) > UNEVEN:
            unstable[row] = entry
    return _worst_first(unstable)


def _judging_observables(preset: Preset, line: GrowthSeries, family: Family) -> dict[str, Entry]:
    """Return the exponents and verdicts of observables that judge a preset, by observable.

    Left out are those in `DESCRIPTIVE` and, for models without an encoder, those of an encoder.
    Exponents are rounded to 0.01.

    Args:
        line: Models of the user's code. Their sizes grow in the limit.
    """
    base = line.models[0]
    tied = base.dump.readout is not None
    has_encoder = {parameter.spec.part for parameter in base.parameters.values()} != {""}
    rows = {}
    for row, entry in entries(
        Limit(preset, family, line.growth_in_step, tied=tied), line.limit
    ).items():
        # `limits` has observables of an encoder for every model.
        about_encoder = "cross-" in row or "encoder" in row
        if row in DESCRIPTIVE or (about_encoder and not has_encoder):
            continue
        rows[row] = dataclasses.replace(entry, exponent=round(entry.exponent, 2))
    return rows


def _is_worse(after: Entry, before: Entry) -> bool:
    """Return whether differences made an observable unstable, or more unstable than it was.

    Exponents that differ by at most 0.02 count as equal.

    Args:
        after: Entry of the preset with the differences.
        before: Entry of the same observable under the preset without the differences.
    """
    if after.verdict == "stable" or abs(after.exponent - before.exponent) <= 0.02:
        return False
    return after.verdict != before.verdict or abs(after.exponent) > abs(before.exponent)


def _worst_first(rows: Mapping[str, Entry]) -> Observables:
    """Return observables ordered by verdict, then by the size of the exponent."""
    return sorted(
        rows.items(), key=lambda item: (ORDER.index(item[1].verdict), -abs(item[1].exponent))
    )


def _with_differences(
    preset: Preset, differences: Sequence[Difference], line: GrowthSeries
) -> Preset:
    """Return a copy of the preset in which some values grow as they do in the user's models.

    The copy is in the preset's native form.

    Args:
        differences: Values to change, each with its excess over the preset.
        line: Models of the user's code, which name the growing axis.
    """
    changes = [(d, axis(line.axis) ** d.excess) for d in differences]
    logits = preset.logits
    branch = preset.branch
    for d, factor in changes:
        if d.name == LOGITS:
            logits = logits * factor
        elif d.name == BRANCH:
            branch = branch * factor

    unchanged = preset.rule

    def rule(spec: ParamSpec) -> Rule:
        row = unchanged(spec)
        factors: dict[Quantity, Power] = {}
        for d, factor in changes:
            if _is_of(spec, d):
                factors[d.quantity] = factor
        if spec.tied:
            # Start and rate are those of the table. A tied readout has only a multiplier of its own.
            return dataclasses.replace(row, multiplier=row.multiplier * factors.get("rate", ONE))
        for quantity, factor in factors.items():
            row = _with_factor(row, quantity, factor)
        return row

    return dataclasses.replace(preset, rule=rule, logits=logits, branch=branch, form=None)


def _is_of(spec: ParamSpec, difference: Difference) -> bool:
    """Return whether a difference is about parameters declared like `spec`.

    The fields `role`, `of` and `tied` must agree.
    """
    declared = difference.spec
    if declared is None or declared.tied != spec.tied:
        return False
    return declared.role == spec.role and declared.of == spec.of


def _with_factor(row: Rule, quantity: Quantity, factor: Power) -> Rule:
    """Return the row with one quantity multiplied by a factor and the same forward multiplier.

    A "start" is `init_std`, a "rate" is every learning rate, "eps" is `eps`, and a "pull" is
    `decay`.
    """
    if quantity == "start":
        return dataclasses.replace(row, init_std=row.init_std * factor)
    if quantity == "rate":
        muon = None if row.muon is None else row.muon * factor
        return dataclasses.replace(row, sgd=row.sgd * factor, adam=row.adam * factor, muon=muon)
    if quantity == "eps":
        return dataclasses.replace(row, eps=row.eps * factor)
    return dataclasses.replace(row, decay=row.decay * factor)
