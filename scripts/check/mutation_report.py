"""The mutation suite as a person reads it: shares caught, the smallest error seen per role, what was missed and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from mupax.train.studies.check import theory
from scripts.check.mutants import COLUMNS
from scripts.check.mutation_suite import MORE_SEEDS, SEEDS, SIZES, Outcome

Outcomes = Mapping[str, Sequence[Outcome]]
"""Study name to what became of its mutants."""


def smallest(outcomes: Iterable[Outcome], *, by_activations: bool = False) -> float | None:
    """The smallest size of error from which on every tried error of a role's column is caught, of either sign.

    Args:
        outcomes: of one group and column.
        by_activations: count only what activations and their changes give away.
    """
    least = None
    tried = list(outcomes)
    for size in sorted({abs(one.exponent) for one in tried}, reverse=True):
        same = [one for one in tried if abs(one.exponent) == size]
        if not all((one.by_activations if by_activations else one.by) is not None for one in same):
            break
        least = size
    return least


def missed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that change training and passed."""
    return [one for one in outcomes if one.by is None and not one.trains_alike]


def markdown(outcomes: Outcomes, command: str) -> str:
    """The whole page."""
    every = [one for study in outcomes.values() for one in study]
    training = [one for one in every if not one.trains_alike]
    caught = [one for one in training if one.by is not None]
    alone = [one for one in training if one.by_activations is not None]
    lines = [
        "# Wrong rules that the coordinate check catches",
        "",
        "A mutant is a right rule, `mup` growing head_dim, with one column of one parameter group wrong by a power of m, the ratio of",
        f"the width to its base. Theory is asked about the right rule, the mutant trains on {SIZES} sizes from {SEEDS} seeds, and from",
        f"{MORE_SEEDS} if it passes; those of an encoder-decoder grow heads, on the first and the third size. Those of",
        "experts are of four in each layer.",
        f"Made by `{command}`; the rows, with what gave each away, are in `mutations.json`.",
        "Rules for batch and tokens are in [joint-mutations.md](joint-mutations.md).",
        "",
        f"Of {len(every)} mutants {len(training)} change training, and the check catches **{len(caught)}** of those "
        f"({_percent(len(caught), len(training))}); {len(alone)} ({_percent(len(alone), len(training))}) by activations and",
        "their changes alone, without the lines that name a role's own weights (`weight`, `movement`, `gradient`).",
        "",
        "## Share caught",
        "",
        *_shares(outcomes),
        "",
        "## Smallest error caught, by role",
        "",
        "The exponent from which on errors of either sign are caught; in parentheses by activations alone, – where the largest tried",
        "passes. In brackets: such an error changes no training in this study, and is seen all the same.",
    ]
    for study, own in outcomes.items():
        lines += ["", f"### {study}", "", *_table(own)]
    lines += ["", f"## Caught only with {MORE_SEEDS} seeds", "", *(_harder(outcomes) or ["None."])]
    lines += ["", "## Missed", "", *(_misses(outcomes) or ["None."])]
    lines += ["", "## Errors that change no training", "", *(_alike(outcomes) or ["None."])]
    return "\n".join(lines) + "\n"


def _shares(outcomes: Outcomes) -> list[str]:
    sizes = sorted({abs(one.exponent) for own in outcomes.values() for one in own})
    head = [
        "study",
        "column",
        *(f"m^±{_text(size)}" for size in sizes),
        "by activations",
        "change no training",
    ]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for study, own in outcomes.items():
        for column in (c for c in COLUMNS if any(one.column == c for one in own)):
            mine = [one for one in own if one.column == column]
            training = [one for one in mine if not one.trains_alike]
            cells = []
            for size in sizes:
                here = [one for one in training if abs(one.exponent) == size]
                cells.append(
                    f"{sum(one.by is not None for one in here)} of {len(here)}" if here else ""
                )
            alone = sum(one.by_activations is not None for one in training)
            cells.append(f"{alone} of {len(training)}" if training else "")
            alike = [one for one in mine if one.trains_alike]
            detections = sum(one.by is not None for one in alike)
            cells.append(f"{len(alike)}, {detections} seen" if alike else "")
            rows.append("| " + " | ".join([study, column, *cells]) + " |")
    return rows


def _table(own: Sequence[Outcome]) -> list[str]:
    columns = [c for c in COLUMNS if any(one.column == c for one in own)]
    rows = ["| role | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for group in sorted({one.group for one in own}):
        cells = [
            _cell([one for one in own if (one.group, one.column) == (group, column)])
            for column in columns
        ]
        rows.append("| " + " | ".join([group, *cells]) + " |")
    return rows


def _cell(mine: Sequence[Outcome]) -> str:
    if all(one.same_numbers for one in mine):
        return ""
    size = _text(smallest(mine))
    if all(one.trains_alike for one in mine):
        return f"[{size}]"
    return f"{size} ({_text(smallest(mine, by_activations=True))})"


def _misses(outcomes: Outcomes) -> list[str]:
    return [
        f"- {study}: `{one.group}` {one.column} x m^{one.exponent:g}, which moves some activation by a factor of 2^{one.change:.2g}. "
        f"The right rule itself strays as far at these sizes: {_strays(one.group)}."
        for study, own in outcomes.items()
        for one in missed(own)
    ]


def _strays(group: str) -> str:
    """How far theory's exponent for a group's movement is from the right rule's slope, as measured once."""
    allowances = json.loads(theory.ALLOWANCES.read_text())["allowances"]["sgd head_dim"]
    below, above = allowances.get(f"movement/{group} @1", (0.0, 0.0))
    return f"up to {below:g} below theory and {above:g} above (`movement/{group} @1` in `train/studies/check/allowances.json`)"


def _harder(outcomes: Outcomes) -> list[str]:
    return [
        f"- {study}: `{one.group}` {one.column} x m^{one.exponent:g}, by {one.by}"
        for study, own in outcomes.items()
        for one in own
        if one.by is not None and one.seeds == MORE_SEEDS
    ]


def _alike(outcomes: Outcomes) -> list[str]:
    lines = []
    for study, own in outcomes.items():
        for column in COLUMNS:
            for same in (True, False):
                mine = [
                    o
                    for o in own
                    if o.column == column and o.trains_alike and o.same_numbers is same
                ]
                if mine:
                    groups = ", ".join(
                        f"`{group}`" for group in sorted({one.group for one in mine})
                    )
                    lines.append(
                        f"- {study}, {column}: {_reason(column, mine)} ({len(mine)} mutants: {groups})"
                    )
    return lines


def _reason(column: str, mine: Sequence[Outcome]) -> str:
    if mine[0].same_numbers:
        why = (
            "a bias starts at zero whatever its std"
            if column == "init_std"
            else "this optimizer has none"
        )
        return f"the program gets bitwise the same numbers, {why}"
    farthest = max(one.change for one in mine)
    differ = f"by more than a factor of 2^{farthest:.1g}" if farthest else "in a single bit"
    why = "eps is far below every gradient; " if column == "eps" else ""
    return f"{why}trained, no activation differs {differ}"


def _text(size: float | None) -> str:
    return "–" if size is None else str(Fraction(size))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
