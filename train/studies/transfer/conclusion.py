"""The answer of a transfer study in plain words: keep the learning rate, retune it, or not decided; and what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from mupax.train.config import record
from mupax.train.studies.report import Step
from mupax.train.studies.sweep.grids import at_rate, without_flags
from mupax.train.studies.transfer.drift import TOLERANCE, Analysis, Interval
from mupax.train.studies.transfer.study import Measured

Studies = Sequence[tuple[Measured, Analysis]]
CLOSE = 0.05
"""Octaves per doubling within which a drift is close to the bound of a verdict."""


def main_studies(studies: Studies, control: str | None) -> Studies:
    """Return the studies that are asked about: all but the control's, or all where there is nothing else."""
    return [one for one in studies if one[0].study.label != control] or studies


def conclusions(studies: Studies, control: str | None) -> list[str]:
    """Return a paragraph per study that is asked about, the control's price in it.

    Args:
        control: label of the preset that should drift; None without one.
    """
    subjects = main_studies(studies, control)
    lines = []
    for measured, analysis in subjects:
        axis = measured.study.axis
        rivals = [
            a
            for m, a in studies
            if m.study.label == control != measured.study.label and m.study.axis == axis
        ]
        text = conclusion(measured, analysis)
        if rivals:
            text += f" {control_words(control or '', rivals[0])}"
        if len({m.study.label for m, _ in subjects}) > 1:
            text = f"With {measured.study.label}, {text[0].lower()}{text[1:]}"
        lines.append(text)
    return lines


def conclusion(measured: Measured, analysis: Analysis) -> str:
    """Return what a study says of keeping the learning rate, in one to three sentences."""
    axis = measured.study.axis
    small = f"{axis} {analysis.sizes[0]}"
    large = f"{axis} {analysis.sizes[-1]}"
    price = analysis.prices[-1]
    used = f"tuned at {small} and used at {large} it {cost_words(price, 'costs')}"
    if analysis.verdict == "transfers":
        return f"Keep the learning rate: {used}."
    if analysis.verdict == "drifts":
        drift = analysis.drift
        moves = "rises" if drift.value > 0 else "falls"
        ends = sorted((abs(drift.low), abs(drift.high)))
        return (
            f"Retune the learning rate as {axis} grows: {used}. The best rate {moves} by {abs(drift.value):.2f} "
            f"[{ends[0]:.2f}, {ends[1]:.2f}] octaves per doubling."
        )
    return f"Not decided: {_doubt(measured, analysis, used)}"


def control_words(label: str, analysis: Analysis) -> str:
    """Return what the control would cost at the largest size."""
    price = analysis.prices[-1]
    if math.isnan(price.value):
        return f"What it would cost under {label} is not known."
    return f"Under {label} it would {cost_words(price, 'cost')}."


def cost_words(price: Interval, verb: str) -> str:
    """Return a price with its interval as the object of a verb; words where it has no number."""
    if math.isnan(price.value):
        return f"{verb} an unknown loss"
    if not math.isfinite(price.value):
        return "diverges" if verb.endswith("s") else "diverge"
    bounds = (
        f" [{price.low:.3f}, {price.high:.3f}]" if math.isfinite(price.high) else " (no interval)"
    )
    return f"{verb} {price.value:.3f} nats{bounds}"


def _doubt(measured: Measured, analysis: Analysis, used: str) -> str:
    """Return why a study decides nothing, and how many seeds would."""
    axis = measured.study.axis
    for index in (0, -1):
        if analysis.fits[index].trouble:
            return f"{axis} {analysis.sizes[index]} has no best learning rate, because {analysis.fits[index].why}."
    drift = analysis.drift
    if analysis.seeds < 2:
        return f"{used}, and one seed has no interval. Three seeds or more may decide it."
    text = f"{used}, and the drift is {drift.value:+.2f} [{drift.low:+.2f}, {drift.high:+.2f}] octaves per doubling"
    more = analysis.seeds_to_decide()
    if not more:
        close = abs(abs(drift.value) - TOLERANCE) < CLOSE
        why = (
            f"the drift is close to the bound of {TOLERANCE}"
            if close
            else "its seeds differ too much"
        )
        return f"{text}. More seeds would hardly decide it: {why}."
    seeds = "1 more seed" if more == 1 else f"{more} more seeds"
    return f"{text}; {seeds} ({_minutes(measured, analysis, more)}) would probably decide it."


def _minutes(measured: Measured, analysis: Analysis, seeds: int) -> str:
    minutes = round(seeds * measured.seconds_of(measured.seed_points(analysis)) / 60)
    if minutes < 1:
        return "less than a minute"
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def next_steps(studies: Studies, control: str | None, command: str) -> list[Step]:
    """Return what to type next: the run that the first preset's verdict leads to, and one command for all that is undecided.

    Args:
        control: label of the preset that should drift; None without one.
        command: that made the studies.
    """
    steps: list[Step] = []
    limits: list[tuple[int, int]] = []
    subjects = main_studies(studies, control)
    first = subjects[0][0].study.label
    for measured, analysis in subjects:
        if analysis.verdict == "undecided":
            limits += _limits(measured, analysis)
        elif measured.study.label == first:
            steps.append(_training(measured, analysis))
    if limits:
        seeds = max(limit[0] for limit in limits)
        minutes = max(limit[1] for limit in limits)
        words, _ = without_flags(shlex.split(command), ("--max-seeds", "--minutes"))
        again = shlex.join([*words, "--max-seeds", f"{seeds}", "--minutes", f"{minutes}"])
        steps.append(Step("Next: add seeds; what is trained is used again", again))
    return steps


def _training(measured: Measured, analysis: Analysis) -> Step:
    """Return the command that trains the largest size at the rate that a verdict leads to."""
    axis = measured.study.axis
    large = f"{axis} {analysis.sizes[-1]}"
    if analysis.verdict == "transfers":
        return Step(
            f"Next: train {large} at the rate of {axis} {analysis.sizes[0]}",
            _run(measured, analysis, 0),
        )
    if analysis.fits[-1].trouble:
        return Step(f"Next: find the best rate of {large} by itself, on a wider grid")
    return Step(f"Next: train {large} at its own best rate", _run(measured, analysis, -1))


def _limits(measured: Measured, analysis: Analysis) -> list[tuple[int, int]]:
    """Return the seeds and the minutes that would probably decide a study; empty where none would."""
    more = analysis.seeds_to_decide() if analysis.seeds > 1 else 3 - analysis.seeds
    if not more:
        return []
    seconds = measured.seconds + more * measured.seconds_of(measured.seed_points(analysis))
    # A fifth more, because later seeds may take longer.
    return [(analysis.seeds + more, max(1, math.ceil(1.2 * seconds / 60)))]


def _run(measured: Measured, analysis: Analysis, rate_of: int) -> str:
    """Return the command that trains the largest size at the best rate of a size."""
    rate = float(f"{2.0 ** analysis.fits[rate_of].optimum:.4g}")
    return record.command_of(at_rate(measured.study.configs[-1], rate))
