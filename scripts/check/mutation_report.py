"""Page of the mutation suite: shares caught, mutants that were missed, and errors that change no training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

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
        "A mutant is the right rule (`mup`, growing head_dim) with one column of one parameter group wrong",
        f"by a power of m, the ratio of the width to its base. The mutant is trained at {SIZES} sizes with",
        f"{SEEDS} seeds ({MORE_SEEDS} if it passes) and compared with theory of the right rule. Encoder-decoders grow",
        "heads, on the first and the third size; expert models have four experts in each layer.",
        f"`{command}` makes this section; `mutations.json` has each mutant's power and",
        "the observable that caught it.",
        "",
        f"Of {len(every)} mutants {len(training)} change training, and the check catches **{len(caught)}** of those "
        f"({_percent(len(caught), len(training))}). Activations and their changes alone catch {len(alone)} "
        f"({_percent(len(alone), len(training))}); the role's own weights (`weight`, `movement`, `gradient`) catch the rest.",
        "",
        *_shares(outcomes),
    ]
    lines += ["", f"### Caught only with {MORE_SEEDS} seeds", "", *(_harder(outcomes) or ["None."])]
    lines += ["", "### Missed", "", *(_misses(outcomes) or ["None."])]
    lines += ["", "### Errors that change no training", "", *(_alike(outcomes) or ["None."])]
    return "\n".join(lines) + "\n"


def _shares(outcomes: Outcomes) -> list[str]:
    head = ["study", *COLUMNS, "by activations", "change no training"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for study, own in outcomes.items():
        training = [outcome for outcome in own if not outcome.trains_alike]
        cells = [study]
        for column in COLUMNS:
            of_column = [outcome for outcome in training if outcome.column == column]
            caught = sum(outcome.by is not None for outcome in of_column)
            cells.append(f"{caught} of {len(of_column)}" if of_column else "")
        by_activations = sum(outcome.by_activations is not None for outcome in training)
        cells.append(f"{by_activations} of {len(training)}")
        cells.append(str(len(own) - len(training)))
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _misses(outcomes: Outcomes) -> list[str]:
    return [
        f"- {study}: `{one.group}` {one.column} x m^{one.exponent:g}, which moves some activation by a factor of 2^{one.change:.2g}. "
        f"The right rule itself strays from theory at these sizes: {_strays(one.group)}."
        for study, own in outcomes.items()
        for one in missed(own)
    ]


def _strays(group: str) -> str:
    """How far theory's exponent for a group's movement is from the right rule's slope, as measured once."""
    allowances = json.loads(theory.ALLOWANCES.read_text())["allowances"]["sgd head_dim"]
    below, above = allowances.get(f"movement/{group} @1", (0.0, 0.0))
    return f"up to {below:g} below theory and {above:g} above (`movement/{group} @1` in `allowances.json`)"


def _harder(outcomes: Outcomes) -> list[str]:
    return [
        f"- {study}: `{one.group}` {one.column} x m^{one.exponent:g}, by {one.by}"
        for study, own in outcomes.items()
        for one in own
        if one.by is not None and one.seeds == MORE_SEEDS
    ]


def _alike(outcomes: Outcomes) -> list[str]:
    by_reason: dict[str, list[Outcome]] = {}
    for outcomes_of_study in outcomes.values():
        for outcome in outcomes_of_study:
            if outcome.trains_alike:
                by_reason.setdefault(_reason(outcome), []).append(outcome)
    lines = []
    for reason, mutants in by_reason.items():
        farthest = max(outcome.change for outcome in mutants)
        differ = f" (at most a factor of 2^{farthest:.1g})" if farthest else ""
        lines.append(f"- {reason}{differ}: {len(mutants)} mutants")
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


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
