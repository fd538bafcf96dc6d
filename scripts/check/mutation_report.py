"""Page of the mutation suite: shares caught, missed mutants, and errors that change no training.

Used by `scripts.check.mutations`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mupax.train.studies.check import theory
from scripts.check.mutants import COLUMNS
from scripts.check.mutation_suite import MORE_SEEDS, ROUND_OFF, SEEDS, SIZES, Outcome
from scripts.pages.markdown import table

Outcomes = Mapping[str, Sequence[Outcome]]
"""Outcomes of the mutants of each study, by the name of the study."""


def missed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the mutants that change training and pass the check."""
    return [outcome for outcome in outcomes if outcome.by is None and not outcome.trains_alike]


def markdown(outcomes: Outcomes, command: str) -> str:
    """Return the section of the page.

    Args:
        command: Command that makes the section, which the section names.
    """
    mutants: list[Outcome] = []
    for study in outcomes.values():
        mutants += study
    num_training = 0
    num_caught = 0
    num_by_activations = 0
    for outcome in mutants:
        if outcome.trains_alike:
            continue
        num_training += 1
        num_caught += outcome.by is not None
        num_by_activations += outcome.by_activations is not None
    share_caught = _percent(num_caught, num_training)
    share_by_activations = _percent(num_by_activations, num_training)
    lines = [
        "## Wrong rules",
        "",
        "A mutant is `mup` with one error: the init_std, multiplier, lr or eps of one parameter",
        "group is wrong by a power of m, the width relative to the smallest width. Models take one",
        f"step under the mutant at {SIZES} head dimensions, each twice the one before, with {SEEDS} seeds",
        "(encoder-decoders at H and 4 H heads). The check compares their exponents with theory",
        f"of `mup`. A mutant that changes training but passes is tried with {MORE_SEEDS} seeds.",
        "",
        "*Other roles* are parameter groups that the decoder lacks.",
        f"`{command}` writes this section and `mutations.json.gz`.",
        "",
        f"Of {len(mutants)} mutants {num_training} change training: some activation changes by more "
        f"than a factor of 2^{ROUND_OFF:g}. The check catches **{num_caught}** of these ({share_caught}). "
        f"Activations and their changes alone catch {num_by_activations} "
        f"({share_by_activations}). A weight's initial size (`weight`), first step (`movement`) or "
        f"gradient catches the other {num_caught - num_by_activations}.",
        "",
        _shares(outcomes),
    ]
    lines += ["", f"### Caught only with {MORE_SEEDS} seeds", "", *(_harder(outcomes) or ["None."])]
    lines += ["", "### Missed", "", *(_misses(outcomes) or ["None."])]
    lines += ["", "### Errors that change no training", "", _alike(outcomes)]
    return "\n".join(lines) + "\n"


def _shares(outcomes: Outcomes) -> str:
    """Return the table of caught mutants, with a row per study and a column per rule's column."""
    head = ["study", *COLUMNS, "by activations", "change no training"]
    rows = [head]
    for study, study_outcomes in outcomes.items():
        num_training = 0
        num_by_activations = 0
        totals: Counter[str] = Counter()
        caught: Counter[str] = Counter()
        for outcome in study_outcomes:
            if outcome.trains_alike:
                continue
            num_training += 1
            num_by_activations += outcome.by_activations is not None
            totals[outcome.column] += 1
            caught[outcome.column] += outcome.by is not None
        cells = [study]
        for column in COLUMNS:
            total = totals[column]
            cells.append(f"{caught[column]} of {total}" if total else "")
        cells.append(f"{num_by_activations} of {num_training}")
        cells.append(str(len(study_outcomes) - num_training))
        rows.append(cells)
    return table(rows)


def _misses(outcomes: Outcomes) -> list[str]:
    """Return a line per missed mutant, with the size of its effect and of the right rule's own."""
    lines = []
    for study, study_outcomes in outcomes.items():
        for outcome in missed(study_outcomes):
            lines.append(
                f"- {study}: {outcome.column} of `{outcome.group}` is {_error(outcome)} "
                f"(m: growth of the width). No activation changes by more than a factor of 2^{outcome.change:.2g}. "
                f"Even under right rules, the exponent of the first step {_allowed(outcome.group)}."
            )
    return lines


def _error(outcome: Outcome) -> str:
    """Return the error of a mutant in words."""
    return f"m^{outcome.exponent:g} times the right one"


def _allowed(group: str) -> str:
    """Return in words how far the slope of a group's first step may lie from theory under SGD."""
    allowances = json.loads(theory.ALLOWANCES.read_text())["allowances"].get("sgd head_dim", {})
    observable = f"movement/{group} @1"
    below, above = allowances.get(observable, (0.0, 0.0))
    return (
        f"`{observable}` is up to {below:g} below and {above:g} above theory, so the check "
        "accepts this range (`allowances.json`)"
    )


def _harder(outcomes: Outcomes) -> list[str]:
    """Return a line per error that some parameter groups show only with more seeds.

    An error is a column with an exponent. The line counts and describes these groups.
    """
    lines = []
    for study, study_outcomes in outcomes.items():
        by_error: dict[str, list[str]] = {}
        num_groups: dict[str, int] = {}
        for outcome in study_outcomes:
            error = f"{outcome.column} is {_error(outcome)}"
            num_groups[error] = num_groups.get(error, 0) + 1
            if outcome.by is not None and outcome.seeds == MORE_SEEDS:
                observable, _, slopes = outcome.by.partition(" @")
                slope, _, predicted = slopes.partition(": ")[2].partition(", theory ")
                growth = f"`{observable}` grows as m^{slope} (theory: m^{predicted})"
                by_error.setdefault(error, []).append(growth)
        for error, evidence in by_error.items():
            groups = f"{len(evidence)} of {num_groups[error]} groups"
            lines.append(f"- {study}: {error}, in {groups}. {', '.join(evidence)}.")
    return lines


def _alike(outcomes: Outcomes) -> str:
    """Return a sentence with each reason why mutants train as the right rule, and their number."""
    numbers: Counter[str] = Counter()
    for study_outcomes in outcomes.values():
        numbers.update(_reason(outcome) for outcome in study_outcomes if outcome.trains_alike)
    if not numbers:
        return "None."
    counts = [f"{number} {reason}" for reason, number in numbers.items()]
    first, *further_counts = counts
    first = first.replace(" ", " have ", 1)
    return f"Among mutants without effect, {'; '.join([first, *further_counts])}."


def _reason(outcome: Outcome) -> str:
    """Return why a mutant trains as the right rule does."""
    if outcome.same_numbers and outcome.column == "init_std":
        return "a wrong std of a bias or of relative positions, which start at zero"
    if outcome.same_numbers:
        return "a wrong eps under SGD, which uses no eps"
    if outcome.column == "eps":
        return "a wrong eps far below the gradients"
    return "another error"


def _percent(part: int, total: int) -> str:
    return f"{100 * part / max(total, 1):.1f} %"
