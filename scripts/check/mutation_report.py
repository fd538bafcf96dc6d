"""Page of the mutation suite: shares caught, mutants that were missed, and errors that change no training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from mupax.train.studies.check import theory
from scripts.check.mutants import COLUMNS
from scripts.check.mutation_suite import MORE_SEEDS, SEEDS, SIZES, Outcome

Outcomes = Mapping[str, Sequence[Outcome]]
"""Study name to what became of its mutants."""


def missed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the mutants that change training and passed."""
    return [one for one in outcomes if one.by is None and not one.trains_alike]


def markdown(outcomes: Outcomes, command: str) -> str:
    """Return the text of the page."""
    every = [one for study in outcomes.values() for one in study]
    training = [one for one in every if not one.trains_alike]
    caught = [one for one in training if one.by is not None]
    alone = [one for one in training if one.by_activations is not None]
    lines = [
        "## Wrong rules",
        "",
        "A mutant is the right rule (`mup`, growing head_dim) with one column of one parameter group wrong by a power of m, the ratio of",
        "the width to its base. Theory is asked about the right rule, and the mutant is trained.",
        "",
        "| model | trained |",
        "|---|---|",
        f"| all | {SIZES} sizes, {SEEDS} seeds; {MORE_SEEDS} seeds if the mutant passes |",
        "| encoder-decoder | grows heads, on the first and the third size |",
        "| experts | four in each layer |",
        "",
        f"`{command}` makes this page. `mutations.json` has a row for each mutant, with what gave it away. Rules for batch and tokens",
        "have [their own section](#wrong-joint-rules).",
        "",
        f"Of {len(every)} mutants {len(training)} change training, and the check catches **{len(caught)}** of those "
        f"({_percent(len(caught), len(training))}). Activations and their changes alone catch {len(alone)} "
        f"({_percent(len(alone), len(training))}); the other mutants are caught by a role's own weights (`weight`, `movement`,",
        "`gradient`).",
        "",
        *_shares(outcomes),
    ]
    lines += ["", f"### Caught only with {MORE_SEEDS} seeds", "", *(_harder(outcomes) or ["None."])]
    lines += ["", "### Missed", "", *(_misses(outcomes) or ["None."])]
    lines += ["", "### Errors that change no training", "", *(_alike(outcomes) or ["None."])]
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
                    lines.append(
                        f"- {study}, {column}: {_reason(column, mine)} ({len(mine)} mutants)"
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
