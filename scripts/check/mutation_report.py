"""Page of the mutation suite: shares caught, missed mutants, and errors that change no training.

Used by `scripts.check.mutations`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mupax.train.studies.check import theory
from scripts.check.mutants import COLUMNS
from scripts.check.mutation_suite import MORE_SEEDS, SEEDS, SIZES, Outcome

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
        "A mutant is the right rule (`mup`, growing head_dim) with one error: a column (init_std,",
        "multiplier, lr or eps) of one parameter group is wrong by a power of m, the ratio of the",
        f"width to its base. It takes a step at {SIZES} sizes with {SEEDS} seeds, and the check",
        "compares that with theory of the right rule. A mutant that is not caught is tried again",
        f"with {MORE_SEEDS} seeds. Encoder-decoders grow in heads instead, and at two sizes: the",
        "base and four times its heads. Expert models have four experts in each layer.",
        f"`{command}` makes this section; `mutations.json`",
        "has each mutant's power and the observable that caught it.",
        "",
        f"Of {len(mutants)} mutants {num_training} change training, and the check catches "
        f"**{num_caught}** of those ({share_caught}). Activations and their changes alone catch "
        f"{num_by_activations} ({share_by_activations}); the role's own weights (`weight`, "
        "`movement`, `gradient`) catch the rest.",
        "",
        *_shares(outcomes),
    ]
    lines += ["", f"### Caught only with {MORE_SEEDS} seeds", "", *(_harder(outcomes) or ["None."])]
    lines += ["", "### Missed", "", *(_misses(outcomes) or ["None."])]
    lines += ["", "### Errors that change no training", "", *(_alike(outcomes) or ["None."])]
    return "\n".join(lines) + "\n"


def _shares(outcomes: Outcomes) -> list[str]:
    """Return the table of caught mutants, with a row per study and a column per rule's column."""
    head = ["study", *COLUMNS, "by activations", "change no training"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
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
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _misses(outcomes: Outcomes) -> list[str]:
    """Return a line per missed mutant, with the size of its effect and of the right rule's own."""
    lines = []
    for study, study_outcomes in outcomes.items():
        for outcome in missed(study_outcomes):
            mutant = f"`{outcome.group}` {outcome.column} x m^{outcome.exponent:g}"
            lines.append(
                f"- {study}: {mutant}, which moves some activation by a factor of "
                f"2^{outcome.change:.2g}. The right rule itself strays from theory at these sizes: "
                f"{_strays(outcome.group)}."
            )
    return lines


def _strays(group: str) -> str:
    """Return how far the right rule's slope of a group's movement strays from theory, in words."""
    allowances = json.loads(theory.ALLOWANCES.read_text())["allowances"]["sgd head_dim"]
    observable = f"movement/{group} @1"
    below, above = allowances.get(observable, (0.0, 0.0))
    return f"up to {below:g} below theory and {above:g} above (`{observable}` in `allowances.json`)"


def _harder(outcomes: Outcomes) -> list[str]:
    """Return a line per mutant that only the larger number of seeds catches."""
    lines = []
    for study, study_outcomes in outcomes.items():
        for outcome in study_outcomes:
            if outcome.by is not None and outcome.seeds == MORE_SEEDS:
                mutant = f"`{outcome.group}` {outcome.column} x m^{outcome.exponent:g}"
                lines.append(f"- {study}: {mutant}, by {outcome.by}")
    return lines


def _alike(outcomes: Outcomes) -> list[str]:
    """Return a line per reason why mutants train as the right rule does, with their number."""
    by_reason: dict[str, list[Outcome]] = {}
    for study_outcomes in outcomes.values():
        for outcome in study_outcomes:
            if outcome.trains_alike:
                by_reason.setdefault(_reason(outcome), []).append(outcome)
    lines = []
    for reason, mutants in by_reason.items():
        farthest = max(outcome.change for outcome in mutants)
        bound = f" (at most a factor of 2^{farthest:.1g})" if farthest else ""
        lines.append(f"- {reason}{bound}: {len(mutants)} mutants")
    return lines


def _reason(outcome: Outcome) -> str:
    """Return why a mutant trains as the right rule does."""
    if outcome.same_numbers and outcome.column == "init_std":
        return "bitwise the same values, because a bias starts at zero whatever its std"
    if outcome.same_numbers:
        return "bitwise the same values, because this optimizer does not read the column"
    if outcome.column == "eps":
        return "eps is far below every gradient"
    return "no activation differs by more than rounding"


def _percent(part: int, total: int) -> str:
    return f"{100 * part / max(total, 1):.1f} %"
