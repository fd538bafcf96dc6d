"""A transfer study's result, the answer first: on the screen, as JSON, and as one self-contained HTML file."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax.train.studies.report import Report, Section, finite, write_json
from mupax.train.studies.sweep.grids import power
from mupax.train.studies.transfer import conclusion, figure
from mupax.train.studies.transfer.drift import BOUND, TOLERANCE, Analysis
from mupax.train.studies.transfer.fit import STEP
from mupax.train.studies.transfer.study import Measured

Studies = Sequence[tuple[Measured, Analysis]]

_PACKAGES = ("mupax", "jax", "flax", "optax", "numpy", "scipy")
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


def provenance() -> dict[str, str]:
    """Versions that the numbers come from."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {**versions, "platform": f"{platform.system()} {platform.machine()}"}


def _comparison(studies: Studies, control: str | None) -> list[dict[str, Any]]:
    """Per axis and study, how it stands against the control: drifts apart or not, prices at the largest size."""
    compared = []
    for measured, analysis in studies:
        axis, label = measured.study.axis, measured.study.label
        controls = [
            a for m, a in studies if m.study.label == control != label and m.study.axis == axis
        ]
        for other in controls[:1]:
            prices = analysis.prices[-1].value, other.prices[-1].value
            bounded = math.isfinite(analysis.drift.half_width) and math.isfinite(
                other.drift.half_width
            )
            apart = bounded and not analysis.drift.meets(other.drift.low, other.drift.high)
            row = {
                "axis": axis,
                "preset": label,
                "control": control,
                "apart": apart,
                "price": _price(prices[0]),
            }
            row |= {
                "control_price": _price(prices[1]),
                "below_half": bool(prices[0] < prices[1] / 2),
            }
            compared.append(row)
    return compared


def _study(measured: Measured, analysis: Analysis) -> dict[str, Any]:
    study = measured.study
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
        "sizes": [_size(measured, analysis, at) for at in range(len(study.sizes))],
        "bigger_is_worse": [
            {"size": size, "log2_lr": x, "by": by.to_json()} for size, x, by in analysis.worse
        ],
        "bigger_compared": analysis.compared,
    }


def _size(measured: Measured, analysis: Analysis, at: int) -> dict[str, Any]:
    study, fitted = measured.study, analysis.fits[at]
    return {
        "size": study.sizes[at],
        "model": study.configs[at].model.base_sizes(),
        "log2_optimum": analysis.optima[at].to_json(),
        "trouble": fitted.trouble or None,
        "loss": finite(fitted.loss, 6),
        "curvature": finite(fitted.curvature, 6),
        "rates_chosen_by_seeds": measured.curve(at).first,
        "fitted_log2_rates": list(fitted.used),
        "price_of_not_tuning": analysis.prices[at].to_json(),
        "points": [
            {"log2_lr": point[1] * STEP, "seed": study.config(point).seed, "loss": finite(row.loss, 6),
             "diverged_at": row.diverged_at, "key": row.key}
            for point, row in sorted(measured.rows.items()) if point[0] == at
        ],
    }  # fmt: skip


def _sentences(measured: Measured, analysis: Analysis) -> list[str]:
    """The study in words: verdict and drift, the sizes left out, whether bigger is better, why it ended."""
    study, verdict = measured.study, analysis.verdict.replace("undecided", "is undecided")
    drift = figure.drift_words(analysis).partition(":")[0]
    price = analysis.prices[-1]
    cost = (
        ""
        if math.isnan(price.value)
        else f"; not retuning {study.axis} {study.sizes[-1]} {conclusion.cost_words(price, 'costs')}"
    )
    lines = [
        f"{study.label} {verdict} in {study.axis}: {drift}, from {analysis.seeds} seeds at every size{cost}"
    ]
    left_out = [
        str(size) for size, fitted in zip(study.sizes, analysis.fits, strict=True) if fitted.trouble
    ]
    if left_out:
        lines.append(f"without {study.axis} {', '.join(left_out)}, which has no fitted optimum")
    ended = (
        f"ended because {measured.stopped}, after {measured.seconds / 60:.1f} minutes of training"
    )
    return [*lines, _bigger(analysis, study.axis), ended]


def _bigger(analysis: Analysis, axis: str) -> str:
    """Whether bigger is better at every learning rate near the transferred one, in words."""
    worse, compared = analysis.worse, analysis.compared
    if not compared:
        return "bigger against smaller: nothing to compare near the smallest size's best rate"
    if not worse:
        return f"bigger is better at all {compared} rates compared within an octave"
    clear = [entry for entry in worse if entry[2].low > 0]
    shown = [
        f"{axis} {size} at {power(2.0**x)} by {by.value:.3g}"
        for size, x, by in (clear or worse)[:4]
    ]
    if clear:
        return f"bigger is worse at {len(clear)} of {compared} rates compared: {', '.join(shown)}"
    noise = f"worse on average: {', '.join(shown)} ({len(worse)} of {compared})"
    return f"bigger is better within the seeds' noise; {noise}"


def _rows(measured: Measured, analysis: Analysis) -> list[Sequence[str]]:
    """The study as a table: `_HEADER`, and a row per size."""
    table: list[Sequence[str]] = [_HEADER]
    for at, (size, config) in enumerate(
        zip(measured.study.sizes, measured.study.configs, strict=True)
    ):
        fitted, optimum, price = analysis.fits[at], analysis.optima[at], analysis.prices[at]
        half = f"± {optimum.half_width:.2f}" if math.isfinite(optimum.half_width) else "unknown"
        best = [f"2^{fitted.optimum:.2f} = {2.0**fitted.optimum:.3g}", half, f"{fitted.loss:.4f}"]
        bounded = f" [{price.low:.3f}, {price.high:.3f}]" if math.isfinite(price.high) else ""
        cost = f"{price.value:.3f}{bounded}" if math.isfinite(price.value) else "diverges"
        cells = [""] * 3 if fitted.trouble else best
        cells += [
            "" if at == 0 or fitted.trouble or math.isnan(price.value) else cost,
            str(len(measured.curve(at).x)),
        ]
        table.append(
            [
                f"{measured.study.axis} {size}",
                str(config.model.sizes()["embed"]),
                *cells,
                fitted.trouble,
            ]
        )
    return table


def report_of(
    studies: Studies, control: str | None, command: str, folder: Path | None = None
) -> Report:
    """Return the answers, what to type next, and then a table per study with its sentences.

    Args:
        control: label of the preset that is expected to drift; nothing is compared without one.
        command: that made the studies.
        folder: of the pictures that a page shows; None without pictures.
    """
    answers = conclusion.conclusions(studies, control)
    steps = conclusion.next_steps(studies, control, command)
    sections: list[Section] = []
    pictured: set[str] = set()
    for measured, analysis in studies:
        axis = measured.study.axis
        sections.append(
            Section(
                _rows(measured, analysis),
                title=f"{measured.study.label}, growing {axis}",
                lines=_sentences(measured, analysis),
                left=("", "note"),
                picture=None if folder is None or axis in pictured else folder / f"{axis}.png",
                verdict=analysis.verdict,
            )
        )
        pictured.add(axis)
    return Report(answers, steps, sections, _compared(studies, control))


def _compared(studies: Studies, control: str | None) -> list[str]:
    return [
        f"{entry['preset']} in {entry['axis']}: its drift is {'apart from' if entry['apart'] else 'not apart from'} that of "
        f"{entry['control']}; price of not retuning the largest size {entry['price']}, under {entry['control']} "
        f"{entry['control_price']}"
        for entry in _comparison(studies, control)
    ]


def write(folder: Path, studies: Studies, control: str | None, about: dict[str, Any]) -> Path:
    """Write transfer.json, a picture per axis, and one page that opens without a server or a network: its path.

    transfer.json has each point's loss, the fits, drift, prices and verdict of each study, the comparison, and `about`. null is
    a number that is not finite: the loss of a point that diverged, the end of an interval that nothing bounds.

    Args:
        folder: of all of them.
        studies: all of them.
        control: as for `report_of`.
        about: `title`, `command`, `recipe`, `optimizer` and `steps`, and further facts by name; `versions` where the rows are of
            other versions than these.
    """
    record = {
        "format": "transfer study 1",
        **about,
        "versions": about.get("versions", provenance()),
        "studies": [_study(*one) for one in studies],
        "comparison": _comparison(studies, control),
    }
    write_json(folder / "transfer.json", record)
    for axis in dict.fromkeys(measured.study.axis for measured, _ in studies):
        of_axis = [
            (measured, analysis) for measured, analysis in studies if measured.study.axis == axis
        ]
        run = f"{about['recipe']}, {about['optimizer']}, {about['steps']} steps"
        figure.draw(
            folder / f"{axis}.png", of_axis, f"{run}: loss against learning rate as {axis} grows"
        )
    facts = {
        **{k: v for k, v in about.items() if k not in ("title", "command", "config")},
        **provenance(),
    }
    page = folder / "transfer.html"
    report = report_of(studies, control, about["command"], folder)
    report.write_page(page, about["title"], about["command"], facts.items())
    return page


def _price(value: float) -> float | str:
    """Rounded; a word where it is no number."""
    return (
        "unknown" if math.isnan(value) else round(value, 4) if math.isfinite(value) else "diverges"
    )
