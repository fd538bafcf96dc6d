"""Answer of a transfer study in words: keep the learning rate or not, and what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from mupax.terminal import counted
from mupax.train.config import record
from mupax.train.studies.report import Step
from mupax.train.studies.sweep.grids import at_rate, power, without_flags
from mupax.train.studies.transfer.drift import TOLERANCE, Analysis, Interval
from mupax.train.studies.transfer.study import MOST_RATES, Measured

Studies = Sequence[tuple[Measured, Analysis]]
CLOSE = 0.05
"""Distance from `TOLERANCE` below which a drift counts as close to it, in octaves per doubling."""


def main_studies(studies: Studies, control: str | None) -> Studies:
    """Return the studies without those of the control preset, or all if there are no others.

    Args:
        studies: (study, analysis) for each preset and growing axis.
        control: Label of the preset whose best learning rate should drift, for comparison. `None`
            without one.
    """
    subjects = []
    for measured, analysis in studies:
        if measured.study.label != control:
            subjects.append((measured, analysis))
    return subjects or studies


def conclusions(studies: Studies, control: str | None) -> list[str]:
    """Return a paragraph per study: keep or retune the learning rate as the model grows, and why.

    With a control the paragraph ends with the extra loss of the largest size under the control
    preset, if its learning rate is not retuned. The control's own studies have no paragraph, unless
    there are no others.

    Args:
        studies: All studies, those of the control included.
        control: Label of the preset whose best learning rate should drift, for comparison. `None`
            without one.
    """
    subjects = main_studies(studies, control)
    labels = {measured.study.label for measured, _ in subjects}
    lines = []
    for measured, analysis in subjects:
        label = measured.study.label
        text = conclusion(measured, analysis)
        if control is not None and label != control:
            control_analysis = _analysis_of(studies, control, measured.study.axis)
            if control_analysis is not None:
                text += f" {control_words(control, control_analysis)}"
        if len(labels) > 1:
            text = f"With {label}, {text[0].lower()}{text[1:]}"
        lines.append(text)
    return lines


def _analysis_of(studies: Studies, label: str, axis: str) -> Analysis | None:
    """Return the analysis of the first study with this preset label and axis, or `None`."""
    for measured, analysis in studies:
        if measured.study.label == label and measured.study.axis == axis:
            return analysis
    return None


def conclusion(measured: Measured, analysis: Analysis) -> str:
    """Return one to three sentences: keep or retune the learning rate, or not decided, and why."""
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
        # Without signs the ends of a negative drift change places.
        ends = sorted((abs(drift.low), abs(drift.high)))
        return (
            f"Retune the learning rate as {axis} grows: {used}. The best rate {moves} "
            f"by {abs(drift.value):.2f} [{ends[0]:.2f}, {ends[1]:.2f}] octaves per doubling."
        )
    return f"Not decided: {_doubt(measured, analysis, used)}"


def control_words(label: str, analysis: Analysis) -> str:
    """Return a sentence on the extra loss that not retuning the largest size costs under a control.

    Args:
        label: Label of the control's preset, for the sentence.
        analysis: Analysis of the control's study along the axis.
    """
    price = analysis.prices[-1]
    if math.isnan(price.value):
        return f"What it would cost under {label} is not known."
    return f"Under {label} it would {cost_words(price, 'cost')}."


def cost_words(price: Interval, verb: str) -> str:
    """Return words on an extra loss, such as "costs 0.012 nats [0.004, 0.020]".

    Without an interval the text says so. A NaN is "an unknown loss", and an infinite value gives
    "diverges" or "diverge".

    Args:
        price: Extra loss of not retuning the learning rate, in nats, with its 95 % interval.
        verb: Verb of the sentence: `costs` or `cost`.
    """
    if math.isnan(price.value):
        return f"{verb} an unknown loss"
    if not math.isfinite(price.value):
        return "diverges" if verb.endswith("s") else "diverge"
    bounds = " (no interval)"
    if math.isfinite(price.high):
        bounds = f" [{price.low:.3f}, {price.high:.3f}]"
    return f"{verb} {price.value:.3f} nats{bounds}"


def _doubt(measured: Measured, analysis: Analysis, used: str) -> str:
    """Return the reason why a study is undecided, and the number of seeds that would decide it.

    Args:
        used: Beginning of the text, on the extra loss of not retuning the learning rate, such as
            "tuned at width 64 and used at width 512 it costs 0.012 nats".
    """
    axis = measured.study.axis
    for index in (0, -1):
        fitted = analysis.fits[index]
        if fitted.trouble:
            size = analysis.sizes[index]
            return f"{axis} {size} has no best learning rate, because {fitted.trouble}."
    if analysis.seeds < 2:
        return f"{used}, and one seed has no interval. Three seeds or more may decide it."

    drift = analysis.drift
    interval = f"{drift.value:+.2f} [{drift.low:+.2f}, {drift.high:+.2f}]"
    text = f"{used}, and the drift is {interval} octaves per doubling"
    unclear = analysis.unclear_sizes()
    if unclear:
        text += (
            f", but noise hides the curve of {counted(unclear, 'size')} of {len(analysis.sizes)}"
        )
    more = analysis.seeds_to_decide()
    if not more:
        why = "its seeds differ too much"
        if abs(abs(drift.value) - TOLERANCE) < CLOSE:
            why = f"the drift is close to the bound of {TOLERANCE}"
        return f"{text}. More seeds would hardly decide it: {why}."
    seeds = counted(more, "more seed")
    return f"{text}; {seeds} ({_minutes(measured, analysis, more)}) would probably decide it."


def _minutes(measured: Measured, analysis: Analysis, seeds: int) -> str:
    """Return the expected training time of `seeds` more seeds as text, such as "3 minutes"."""
    minutes = round(seeds * measured.seconds_of(measured.seed_points(analysis)) / 60)
    if minutes < 1:
        return "less than a minute"
    return counted(minutes, "minute")


def next_steps(studies: Studies, control: str | None, command: str) -> list[Step]:
    """Return what to propose after the studies of a command: sentences, most with a command.

    Each decided study of the first preset gets a step on how to train its largest size. If studies
    are undecided, one more step repeats the command with more seeds. A smallest or largest size
    whose best rate is at the end of its grid gets the command that searches further.

    Args:
        studies: All studies, those of the control included.
        control: Label of the preset whose best learning rate should drift, for comparison. `None`
            without one. Its studies get no steps, unless there are no others.
        command: Command of this study, which is repeated with more seeds and minutes.
    """
    steps: list[Step] = []
    limits: list[tuple[int, int]] = []
    subjects = main_studies(studies, control)
    first = subjects[0][0].study.label
    for measured, analysis in subjects:
        further = _further_search(measured, analysis, command)
        if further is not None:
            steps.append(further)
        elif analysis.verdict == "undecided":
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
    """Return what to do after a study that is decided: a sentence, and in most cases a command.

    If the best rate transfers, the command trains the largest size at the best rate of the
    smallest. Otherwise it trains the largest size at its own best rate. If more rates would not
    find that rate, there is no command.
    """
    axis = measured.study.axis
    large = f"{axis} {analysis.sizes[-1]}"
    if analysis.verdict == "transfers":
        small = f"{axis} {analysis.sizes[0]}"
        command = _run(measured, analysis, 0)
        return Step(f"Next: train {large} at the rate of {small}", command)
    if analysis.fits[-1].trouble:
        return Step(f"Next: find the best rate of {large} by itself")
    return Step(f"Next: train {large} at its own best rate", _run(measured, analysis, -1))


def _further_search(measured: Measured, analysis: Analysis, command: str) -> Step | None:
    """Return how to find the best rate of a size that has it at the end of its grid, or `None`.

    The first of the smallest and the largest size counts. The size may have had all of its rates
    or, if the minutes ended, some. There is no flag for the rates of a study. Its smallest size is
    searched around the recipe's peak rate, and each other size around the best rate of the size
    before.

    Args:
        command: Command line that ran this study, as `mupax transfer ...`.
    """
    for index in (0, -1):
        curve = measured.curves[index]
        missing = curve.missing()
        if not analysis.fits[index].trouble or not missing:
            continue
        size = f"{measured.study.axis} {analysis.sizes[index]}"
        if len(curve.x) < MOST_RATES:
            minutes = max(1, math.ceil(2 * measured.seconds / 60))
            words, _ = without_flags(shlex.split(command), ("--minutes",))
            again = shlex.join([*words, "--minutes", f"{minutes}"])
            return Step(f"Next: find the best rate of {size} in more minutes", again)

        end = missing[-1]  # the farthest from the best rate
        if index == 0:
            words, _ = without_flags(shlex.split(command), ("--optimizer.peak-lr",))
            again = shlex.join([*words, "--optimizer.peak-lr", f"{2.0**end:.6g}"])
            return Step(f"Next: search {size} from the end of its rates on", again)
        sweep = _sweep_from(measured, float(curve.x[curve.best]), end)
        return Step(f"Next: search {size} by itself, from the end of its rates on", sweep)
    return None


def _sweep_from(measured: Measured, best: float, end: float) -> str:
    """Return a command that sweeps four octaves of rates at the largest size, beside its best one.

    Args:
        best: log2 of the best rate, which is at the end of the grid.
        end: log2 of a rate beyond that end.
    """
    config = record.command_of(measured.study.configs[-1])
    words, _ = without_flags(shlex.split(config), ("--optimizer.peak-lr",))
    low, high = sorted((best, best + math.copysign(4, end - best)))
    grid = f"{power(2.0**low)}:{power(2.0**high)}:9"
    return shlex.join(["mupax", "sweep", *words[2:], "--lr", grid])


def _limits(measured: Measured, analysis: Analysis) -> list[tuple[int, int]]:
    """Return [(max_seeds, minutes)], the limits that would probably decide an undecided study.

    They are values for `--max-seeds` and `--minutes`. The list is empty if no number of seeds is
    likely to decide the study.
    """
    # One seed has no scatter from which a number of seeds follows, so three are proposed.
    more = analysis.seeds_to_decide() if analysis.seeds > 1 else 3 - analysis.seeds
    if not more:
        return []
    seconds = measured.seconds + more * measured.seconds_of(measured.seed_points(analysis))
    # A fifth more, because later seeds may take longer.
    return [(analysis.seeds + more, max(1, math.ceil(1.2 * seconds / 60)))]


def _run(measured: Measured, analysis: Analysis, index: int) -> str:
    """Return the command to train the largest size at the best learning rate of size `index`."""
    rate = float(f"{2.0 ** analysis.fits[index].optimum:.4g}")
    return record.command_of(at_rate(measured.study.configs[-1], rate))
