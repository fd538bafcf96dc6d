"""Report of a transfer study: on the terminal, as JSON, and as one self-contained HTML page."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax import disk
from mupax.terminal import counted
from mupax.train.studies.report import Report, Section, finite, write_json
from mupax.train.studies.sweep.grids import power, without_flags
from mupax.train.studies.transfer import conclusion, figure
from mupax.train.studies.transfer.drift import BOUND, TOLERANCE, Analysis, Interval
from mupax.train.studies.transfer.fit import STEP
from mupax.train.studies.transfer.study import Measured

Studies = Sequence[tuple[Measured, Analysis]]

_PACKAGES = ("mupax", "jax", "flax", "optax", "numpy", "scipy")
"""Packages whose versions are recorded."""
_HEADER = (
    "",
    "width",
    "best rate",
    "95 %, octaves",
    "loss there",
    "price of not retuning",
    "rates",
    "note",
)
"""Heads of the columns of a study's table."""


def provenance() -> dict[str, str]:
    """Return the versions of Python, of `_PACKAGES` that are installed, and the platform."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        # A checkout that runs without an installation has no version of mupax.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {**versions, "platform": f"{platform.system()} {platform.machine()}"}


def _comparison(studies: Studies, control: str | None) -> list[dict[str, Any]]:
    """Return a comparison of each study with the control's study of the same axis, for JSON.

    An entry says whether the intervals of the two drifts are apart. It has both prices: the extra
    loss in nats, at the largest size, of not retuning the learning rate. Studies without a control
    of their axis, and the control itself, have no entry.

    Args:
        control: Label of the preset that should drift. With `None` the list is empty.
    """
    compared = []
    for measured, analysis in studies:
        axis = measured.study.axis
        label = measured.study.label
        control_analysis = None
        for control_measured, candidate in studies:
            control_study = control_measured.study
            # `!= label`, because the control itself is compared with nothing.
            is_control = control_study.label == control != label and control_study.axis == axis
            if is_control and control_analysis is None:
                control_analysis = candidate
        if control_analysis is None:
            continue

        drift = analysis.drift
        control_drift = control_analysis.drift
        bounded = math.isfinite(drift.half_width) and math.isfinite(control_drift.half_width)
        price = analysis.prices[-1].value
        control_price = control_analysis.prices[-1].value
        compared.append({
            "axis": axis,
            "preset": label,
            "control": control,
            "apart": bounded and not drift.meets(control_drift.low, control_drift.high),
            "price": _price(price),
            "control_price": _price(control_price),
            "below_half": bool(price < control_price / 2),
        })  # fmt: skip
    return compared


def _study(measured: Measured, analysis: Analysis) -> dict[str, Any]:
    """Return a study as plain values for transfer.json."""
    study = measured.study
    worse = []
    for size, x, by in analysis.worse:
        worse.append({"size": size, "log2_lr": x, "by": by.to_json()})
    return {
        "preset": study.label,
        "axis": study.axis,
        "base": study.configs[0].preset.base,
        "verdict": analysis.verdict,
        "drift_octaves_per_doubling": analysis.drift.to_json(),
        "tolerance": TOLERANCE,
        "bound": BOUND,
        "conclusion": conclusion.conclusion(measured, analysis),
        "seeds": analysis.seeds,
        "stopped": measured.stopped,
        "train_seconds": round(measured.seconds, 1),
        "points": len(measured.rows),
        "sizes": [_size(measured, analysis, index) for index in range(len(study.sizes))],
        "bigger_is_worse": worse,
        "bigger_compared": analysis.compared,
    }


def _size(measured: Measured, analysis: Analysis, index: int) -> dict[str, Any]:
    """Return one size of a study as plain values for transfer.json."""
    study = measured.study
    fitted = analysis.fits[index]
    points = []
    for point, row in sorted(measured.rows.items()):
        size_index, rate, _ = point
        if size_index != index:
            continue
        points.append({
            "log2_lr": rate * STEP,
            "seed": study.config(point).seed,
            "loss": finite(row.loss, 6),
            "diverged_at": row.diverged_at,
            "key": row.key,
        })  # fmt: skip
    return {
        "size": study.sizes[index],
        "model": study.configs[index].model.base_sizes(),
        "log2_optimum": analysis.optima[index].to_json(),
        "trouble": fitted.trouble or None,
        "loss": finite(fitted.loss, 6),
        "curvature": finite(fitted.curvature, 6),
        "rates_chosen_by_seeds": measured.curve(index).first,
        "fitted_log2_rates": list(fitted.used),
        "price_of_not_tuning": analysis.prices[index].to_json(),
        "points": points,
    }


def _sentences(measured: Measured, analysis: Analysis) -> list[str]:
    """Return sentences on a study for the report.

    The sentences are on verdict and drift, sizes without an optimum, whether larger sizes have a
    lower loss, and the reason why the study ended.
    """
    study = measured.study
    verdict = analysis.verdict.replace("undecided", "is undecided")
    drift = figure.drift_words(analysis).partition(":")[0]
    price = analysis.prices[-1]
    cost = ""
    if not math.isnan(price.value):
        cost_words = conclusion.cost_words(price, "costs")
        cost = f"; not retuning {study.axis} {study.sizes[-1]} {cost_words}"
    lines = [
        f"{study.label} {verdict} in {study.axis}: {drift}, "
        f"from {counted(analysis.seeds, 'seed')} at every size{cost}"
    ]

    left_out = []
    for size, fitted in zip(study.sizes, analysis.fits, strict=True):
        if fitted.trouble:
            left_out.append(str(size))
    if left_out:
        lines.append(
            f"left out {study.axis} {', '.join(left_out)}: no optimum could be fitted there"
        )

    lines.append(_bigger(analysis, study.axis))
    minutes = measured.seconds / 60
    lines.append(f"ended because {measured.stopped}, after {minutes:.1f} minutes of training")
    return lines


def _bigger(analysis: Analysis, axis: str) -> str:
    """Return a sentence on whether larger sizes have a lower loss than smaller ones.

    They are compared at learning rates near the best one of the smallest size.

    Args:
        axis: Size that grows, such as `width`.
    """
    worse = analysis.worse
    compared = analysis.compared
    if not compared:
        return "bigger against smaller: nothing to compare near the smallest size's best rate"
    if not worse:
        return f"bigger is better at all {compared} rates compared within an octave"
    clear = [entry for entry in worse if entry[2].low > 0]
    shown = []
    for size, x, by in (clear or worse)[:4]:
        increase = f"by {by.value:.3g}" if math.isfinite(by.value) else "(diverges)"
        shown.append(f"{axis} {size} at {power(2.0**x)} {increase}")
    if clear:
        return f"bigger is worse at {len(clear)} of {compared} rates compared: {', '.join(shown)}"
    if analysis.seeds < 2:
        # Without a second seed the noise is not known.
        return (
            f"bigger is worse at {len(worse)} of {compared} rates, by one seed: {', '.join(shown)}"
        )
    noise = f"worse on average: {', '.join(shown)} ({len(worse)} of {compared})"
    return f"bigger is better within the seeds' noise; {noise}"


def _rows(measured: Measured, analysis: Analysis) -> list[Sequence[str]]:
    """Return the cells of a study's table: `_HEADER`, and a row per size."""
    study = measured.study
    table: list[Sequence[str]] = [_HEADER]
    for index, (size, config) in enumerate(zip(study.sizes, study.configs, strict=True)):
        fitted = analysis.fits[index]
        price = analysis.prices[index]
        best = ["", "", ""]
        cost = ""
        if not fitted.trouble:
            half_width = analysis.optima[index].half_width
            best = [
                f"2^{fitted.optimum:.2f} = {2.0**fitted.optimum:.3g}",
                f"± {half_width:.2f}" if math.isfinite(half_width) else "unknown",
                f"{fitted.loss:.4f}",
            ]
            # The rate was tuned at the smallest size, where the price is 0 by definition.
            if index > 0 and not math.isnan(price.value):
                cost = _price_cell(price)
        table.append([
            f"{study.axis} {size}",
            str(config.model.sizes()["embed"]),
            *best,
            cost,
            str(len(measured.curve(index).x)),
            fitted.trouble,
        ])  # fmt: skip
    return table


def _price_cell(price: Interval) -> str:
    """Return the extra loss of not retuning a size as text, or "diverges" if it is infinite.

    Args:
        price: Extra loss in nats. The text has its interval if that is finite.
    """
    if not math.isfinite(price.value):
        return "diverges"
    interval = ""
    if math.isfinite(price.high):
        interval = f" [{price.low:.3f}, {price.high:.3f}]"
    return f"{price.value:.3f}{interval}"


def report_of(
    studies: Studies, control: str | None, command: str, folder: Path | None = None
) -> Report:
    """Return the report on studies: answers, what to type next, and a table per study.

    Args:
        studies: All studies, those of the control included.
        control: Label of the preset that should drift; `None` without one.
        command: Command of the study. The next step repeats it with more seeds and minutes.
        folder: Folder with the pictures for a page; `None` without pictures.
    """
    answers = conclusion.conclusions(studies, control)
    steps = conclusion.next_steps(studies, control, command)
    sections: list[Section] = []
    pictured: set[str] = set()
    for measured, analysis in studies:
        axis = measured.study.axis
        picture = None
        # One picture shows all presets of an axis, so only their first section has it.
        if folder is not None and axis not in pictured:
            picture = folder / f"{axis}.png"
        section = Section(
            _rows(measured, analysis),
            title=f"{measured.study.label}, growing {axis}",
            lines=_sentences(measured, analysis),
            left=("", "note"),
            picture=picture,
            verdict=analysis.verdict,
        )
        sections.append(section)
        pictured.add(axis)
    return Report(answers, steps, sections, _compared(studies, control))


def _compared(studies: Studies, control: str | None) -> list[str]:
    """Return a sentence per study that compares its drift with that of the control's study.

    It also compares what not retuning the largest size costs. The control itself, and studies
    without a control of their axis, have no sentence.

    Args:
        control: Label of the preset whose best learning rate should drift. With `None` the list is
            empty.
    """
    lines = []
    for entry in _comparison(studies, control):
        apart = "apart from" if entry["apart"] else "not apart from"
        lines.append(
            f"{entry['preset']} in {entry['axis']}: its drift is {apart} that of "
            f"{entry['control']}; price of not retuning the largest size {entry['price']}, "
            f"under {entry['control']} {entry['control_price']}"
        )
    return lines


def begin(folder: Path, command: str) -> None:
    """Write a transfer.json without studies, unless the folder has one.

    An interrupted study is then known as one. Its rows may be trained under the name of another
    preset of the same numbers (`mupax.train.studies.transfer.planned.shared`).
    """
    path = folder / "transfer.json"
    if not path.exists():
        write_json(path, {"format": "transfer study 1", "command": command, "studies": []})


def replacement_note(path: Path, command: str) -> str:
    """Return a note that a report of another command will be replaced, or "" if none will be.

    Limits on seeds and time make no other command.

    Args:
        path: The report, transfer.json or frugal.json, if there is one.
    """
    if not path.exists():
        return ""
    try:
        earlier = disk.read_json(path)["command"]
        is_same = _without_limits(earlier) == _without_limits(command)
    except (disk.DiskError, KeyError, TypeError, ValueError):
        # A damaged file is replaced by a whole one.
        return ""
    if is_same:
        return ""
    return (
        f"the report in {path.parent} is of another command and is replaced; its points stay, so that "
        f"this makes it again without training: {earlier}"
    )


def _without_limits(command: str) -> list[str]:
    """Return the words of a command without limits, with which the same study goes on."""
    words, _ = without_flags(shlex.split(command), ("--max-seeds", "--minutes"))
    return words


def write(folder: Path, studies: Studies, control: str | None, about: dict[str, Any]) -> Path:
    """Write transfer.json, a PNG per axis, and transfer.html, a self-contained page.

    Existing files are replaced.

    transfer.json has each point's loss, the fits, drift, prices and verdict of each study, the
    comparison with the control, and `about`. null stands for a number that is not finite: the loss
    of a point that diverged, or the end of an interval that nothing bounds.

    Args:
        studies: All studies, those of the control included.
        control: Label of the preset that should drift; `None` without one.
        about: `title`, `command`, `recipe`, `optimizer`, `steps`, and further facts by name.
            `versions` if the rows come from other versions than the present ones.

    Returns:
        Path of the page.
    """
    record = {
        "format": "transfer study 1",
        **about,
        "versions": about.get("versions", provenance()),
        "studies": [_study(measured, analysis) for measured, analysis in studies],
        "comparison": _comparison(studies, control),
    }
    write_json(folder / "transfer.json", record)
    run = f"{about['recipe']}, {about['optimizer']}, {counted(about['steps'], 'step')}"
    for axis in dict.fromkeys(measured.study.axis for measured, _ in studies):
        axis_studies = []
        for measured, analysis in studies:
            if measured.study.axis == axis:
                axis_studies.append((measured, analysis))
        title = f"{run}: loss against learning rate as {axis} grows"
        figure.draw(folder / f"{axis}.png", axis_studies, title)

    facts = {}
    for name, value in about.items():
        if name not in ("title", "command", "config"):
            facts[name] = value
    facts |= provenance()
    # After the pictures, which the page embeds.
    page = folder / "transfer.html"
    report = report_of(studies, control, about["command"], folder)
    report.write_page(page, about["title"], about["command"], facts.items())
    return page


def _price(value: float) -> float | str:
    """Return a price in nats with four decimals, "unknown" if it is NaN, "diverges" if infinite."""
    if math.isnan(value):
        return "unknown"
    return round(value, 4) if math.isfinite(value) else "diverges"
