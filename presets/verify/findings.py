"""What is wrong with a dump, in a sentence each: which parameter, what happens as the model grows, what to write instead.

A fault ends in exit code 1. A caution is what sources disagree on, or what most code leaves out and is felt late: it is said, and not
counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mupax.presets.analysis.verdicts import Entry
from mupax.presets.optimizers import Family
from mupax.presets.roles import VECTORS, Role
from mupax.presets.verify import consequences
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED, Difference
from mupax.presets.verify.fit import TOLERANCE, Line
from mupax.presets.verify.reference import Reference
from mupax.presets.verify.sentences import Finding, Severity, What, consequence, remedy


def findings(reference: Reference, line: Line, family: Family) -> list[Finding]:
    """Faults, then cautions, parameters that have one in common together.

    Args:
        reference: the dumps against a preset.
        line: what grows.
        family: of the optimizer.
    """
    wrong = [d for d in reference.differences if d.wrong and not _harmless(d)]
    wrong = [d for d in wrong if not _follows(d, wrong)]
    grouped: dict[tuple, list[tuple[Difference, What]]] = {}
    for difference, what in _joined(wrong, family):
        slope = None if difference.slope is None else round(difference.slope, 1)
        kind = "vectors" if difference.spec and difference.spec.role in VECTORS else difference.role
        kind = "matrices" if difference.spec and difference.spec.in_block and kind != "vectors" else kind
        kind = "" if what in ("eps", "pull") else kind
        key = (kind, what, slope, round(difference.target, 1), difference.off[1])
        grouped.setdefault(key, []).append((difference, what))
    unsorted = [_finding(members, reference, line, family) for members in grouped.values()]
    return sorted(
        unsorted,
        key=lambda finding: (
            finding.severity != "fault",
            ("multiplier", "start", "rate", "pull", "eps").index(finding.what),
        ),
    )


def _harmless(d: Difference) -> bool:
    """A readout that starts smaller, as one at zero does; an eps that falls faster than gradients do."""
    if d.slope is None or abs(d.excess) <= d.tolerance:
        return False
    smaller = d.excess < 0
    return smaller and (
        d.quantity == "eps"
        or (d.quantity == "start" and d.spec is not None and d.spec.role is Role.READOUT and not d.spec.tied)
    )


def _follows(d: Difference, wrong: Sequence[Difference]) -> bool:
    """Whether it is right once another is: the pull of a rate, and a tied readout's start, which is the table's."""
    if d.quantity == "pull":
        causes = [other for other in wrong if other.name == d.name and other.quantity == "rate"]
    elif d.name == TIED and d.quantity == "start":
        causes = [
            o for o in wrong if o.quantity == "start" and o.spec is not None and o.spec.role is Role.TOKEN_EMBEDDING
        ]
    else:
        return False
    return any(None not in (cause.slope, d.slope) and abs(cause.excess - d.excess) < TOLERANCE for cause in causes)


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


def _finding(members: Sequence[tuple[Difference, What]], reference: Reference, line: Line, family: Family) -> Finding:
    (first, what), names = members[0], tuple(d.name for d, _ in members)
    severity, why = _severity(first, reference)
    difference = dataclasses.replace(first, quantity="rate") if first.name == TIED and what == "multiplier" else first
    worst = max(
        (
            consequences.alone(reference, dataclasses.replace(difference, spec=d.spec, name=d.name), line, family)
            for d, _ in members
        ),
        key=_weight,
    )
    role = _together([d for d, _ in members])
    return Finding(
        severity=severity, names=names, role=role, what=what, slope=first.slope, target=first.target,
        consequence=consequence(first, what, worst, line), remedy=remedy(first, what, line), why=why,
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
    if d.quantity == "start" and role is Role.READOUT and near(0.5):
        return "caution", "2407.05872 starts so; it is louder in the first steps"
    if d.quantity == "rate" and role is Role.TOKEN_EMBEDDING and near(-0.5):
        return "caution", "2506.15025 and 2407.17465 have it so, for vocabularies much larger than the width"
    return "fault", ""
