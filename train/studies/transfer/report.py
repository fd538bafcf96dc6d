"""What a transfer study found: as tables on the screen, as JSON, and as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import importlib.metadata
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mupax.train.config.grids import power
from mupax.train.studies.transfer.drift import TOLERANCE, Analysis, Interval
from mupax.train.studies.transfer.figure import drift_words
from mupax.train.studies.transfer.fit import Fit
from mupax.train.studies.transfer.study import Measured

FORMAT = "transfer study 1"
Studies = Sequence[tuple[Measured, Analysis]]

_PACKAGES = ("mupax", "jax", "flax", "optax", "numpy", "scipy")
_HEADER = ("", "width", "best rate", "95 %, octaves", "loss there", "price of not tuning", "rates", "note")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse; margin: .5rem 0 } th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
th:last-child, td:last-child { text-align: left } th { font-weight: 600 } code, pre { background: #f5f5f5; padding: .1rem .3rem }
pre { padding: .6rem; overflow-x: auto } .transfers { color: #00704a } .drifts { color: #b00020 } .undecided { color: #8a6100 }
"""


def provenance() -> dict[str, str]:
    """Versions that the numbers come from."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "platform": f"{platform.system()} {platform.machine()}"}


def comparison(studies: Studies, control: str | None) -> list[dict[str, Any]]:
    """Per axis and study, how it stands against the control: drifts apart or not, prices at the largest size.

    Args:
        studies: all of them.
        control: label of the preset that is expected to drift; nothing is compared without one.
    """
    found = []
    for measured, analysis in studies:
        axis = measured.study.axis
        of_control = [a for m, a in studies if m.study.label == control and m.study.axis == axis]
        if not of_control or measured.study.label == control:
            continue
        other = of_control[0]
        own_price, its_price = analysis.prices[-1].value, other.prices[-1].value
        finite = math.isfinite(analysis.drift.half_width) and math.isfinite(other.drift.half_width)
        found.append(
            {
                "axis": axis,
                "preset": measured.study.label,
                "control": control,
                "apart": finite and not analysis.drift.meets(other.drift.low, other.drift.high),
                "price": _price(own_price),
                "control_price": _price(its_price),
                "below_half": bool(own_price < its_price / 2),
            }
        )
    return found


def to_json(studies: Studies, control: str | None, about: dict[str, Any]) -> dict[str, Any]:
    """Everything: each point's loss, the fits, drift, prices and verdict of each study, the comparison, and `about`.

    null is a number that is not finite: the loss of a point that diverged, the end of an interval that nothing bounds.
    """
    return {
        "format": FORMAT,
        **about,
        "versions": provenance(),
        "studies": [_study(measured, analysis) for measured, analysis in studies],
        "comparison": comparison(studies, control),
    }


def _study(measured: Measured, analysis: Analysis) -> dict[str, Any]:
    study = measured.study
    return {
        "preset": study.label,
        "axis": study.axis,
        "base": study.configs[0].preset.base,
        "verdict": analysis.verdict,
        "drift_octaves_per_doubling": _interval(analysis.drift),
        "tolerance": TOLERANCE,
        "seeds": analysis.seeds,
        "stopped": measured.stopped,
        "train_seconds": round(measured.seconds, 1),
        "points": len(measured.rows),
        "sizes": [
            {
                "size": size,
                "model": study.configs[at].model.base_sizes(),
                "log2_optimum": _interval(analysis.optima[at]),
                "trouble": analysis.fits[at].trouble or None,
                "loss": _number(analysis.fits[at].loss),
                "curvature": _number(analysis.fits[at].curvature),
                "rates_chosen_by_seeds": measured.curve(at).first,
                "fitted_log2_rates": list(analysis.fits[at].used),
                "price_of_not_tuning": _interval(analysis.prices[at]),
                "points": [
                    {
                        "log2_lr": rate / 2,
                        "seed": study.config((i, rate, seed)).seed,
                        "loss": _number(row.loss),
                        "diverged_at": row.diverged_at,
                        "key": row.key,
                    }
                    for (i, rate, seed), row in sorted(measured.rows.items())
                    if i == at
                ],
            }
            for at, size in enumerate(study.sizes)
        ],
        "bigger_is_worse": [{"size": size, "log2_lr": x, "by": _interval(by)} for size, x, by in analysis.worse],
        "bigger_compared": analysis.compared,
    }


def sentences(measured: Measured, analysis: Analysis) -> list[str]:
    """What the study says, in words."""
    study = measured.study
    said = [f"{study.label} {analysis.verdict if analysis.verdict != 'undecided' else 'is undecided'} in {study.axis}: "
            f"{drift_words(analysis).partition(':')[0]}, from {analysis.seeds} paired seeds"]  # fmt: skip
    left_out = [str(size) for size, found in zip(study.sizes, analysis.fits, strict=True) if found.trouble]
    if left_out:
        said.append(f"without {study.axis} {', '.join(left_out)}, which has no fitted optimum")
    said.append(bigger(analysis, study.axis))
    said.append(f"ended because {measured.stopped}, after {measured.seconds / 60:.1f} minutes of training")
    return said


def bigger(analysis: Analysis, axis: str) -> str:
    """Whether bigger is better at every rate near the transferred one, in words."""
    if not analysis.compared:
        return "bigger against smaller: nothing to compare near the smallest size's best rate"
    clear = [entry for entry in analysis.worse if entry[2].low > 0]
    where = ", ".join(
        f"{axis} {size} at {power(2.0**x)} by {by.value:.3g}" for size, x, by in (clear or analysis.worse)[:4]
    )
    if not analysis.worse:
        return f"bigger is better at all {analysis.compared} rates compared within an octave"
    if not clear:
        return f"bigger is better within the seeds' noise; worse on average: {where} ({len(analysis.worse)} of {analysis.compared})"
    return f"bigger is worse at {len(clear)} of {analysis.compared} rates compared: {where}"


def rows(measured: Measured, analysis: Analysis) -> list[list[str]]:
    """The study as a table under `_HEADER`, a row per size."""
    study = measured.study
    found = []
    for at, size in enumerate(study.sizes):
        fitted, optimum, price = analysis.fits[at], analysis.optima[at], analysis.prices[at]
        missing = bool(fitted.trouble)
        found.append(
            [
                f"{study.axis} {size}",
                str(study.configs[at].model.sizes()["embed"]),
                "" if missing else f"2^{fitted.optimum:.2f} = {2.0**fitted.optimum:.3g}",
                "" if missing else _half(optimum),
                "" if missing else f"{fitted.loss:.4f}",
                "" if at == 0 else _price_cell(price, fitted),
                str(len(measured.curve(at).x)),
                fitted.trouble,
            ]
        )
    return found


def show(console: Console, studies: Studies, control: str | None) -> None:
    """A table per study, its sentences, and the comparison with the control."""
    for measured, analysis in studies:
        study = measured.study
        table = Table(title=f"{study.label}, growing {study.axis}", title_justify="left", box=None, padding=(0, 1))
        for column in _HEADER:
            table.add_column(column, justify="left" if column in ("", "note") else "right")
        for row in rows(measured, analysis):
            table.add_row(*row)
        console.print(table)
        for line in sentences(measured, analysis):
            console.print(f"  {line}", markup=False)
    for line in compared_words(studies, control):
        console.print(line, markup=False)


def compared_words(studies: Studies, control: str | None) -> list[str]:
    """The comparison with the control, a line per study."""
    return [
        f"{entry['preset']} in {entry['axis']}: drift {'apart from' if entry['apart'] else 'not apart from'} that of "
        f"{entry['control']}; price of not tuning the largest size {entry['price']} against {entry['control_price']}"
        f" ({'below' if entry['below_half'] else 'not below'} half)"
        for entry in comparison(studies, control)
    ]


def write_html(
    path: Path, studies: Studies, control: str | None, figures: dict[str, Path], about: dict[str, Any]
) -> None:
    """One file with the figures inside, that opens without a server or a network.

    Args:
        path: of the page.
        studies: all of them.
        control: label of the preset that is expected to drift.
        figures: axis to its PNG.
        about: `title` and `command`, and what else the reader should know, name to text.
    """
    body = [f"<h1>{html.escape(about['title'])}</h1>"]
    for axis, figure in figures.items():
        picture = base64.b64encode(figure.read_bytes()).decode()
        body.append(f"<h2>Growing {html.escape(axis)}</h2>")
        body.append(f'<img alt="loss against learning rate" src="data:image/png;base64,{picture}">')
        for measured, analysis in studies:
            if measured.study.axis == axis:
                body += [_html_study(measured, analysis)]
    compared = compared_words(studies, control)
    if compared:
        body += ["<h2>Against the control</h2>", *(f"<p>{html.escape(line)}</p>" for line in compared)]
    body += ["<h2>How it was made</h2>", f"<pre>{html.escape(about['command'])}</pre>", "<table>"]
    facts = {**{k: v for k, v in about.items() if k not in ("title", "command", "config")}, **provenance()}
    body += [f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items()]
    head = f"<meta charset=utf-8><title>{html.escape(about['title'])}</title><style>{_STYLE}</style>"
    path.write_text(f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</table></body></html>\n")


def _html_study(measured: Measured, analysis: Analysis) -> str:
    head = "".join(f"<th>{column}</th>" for column in _HEADER)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(measured, analysis)
    )
    said = "<br>".join(html.escape(line) for line in sentences(measured, analysis)[1:])
    first = html.escape(sentences(measured, analysis)[0])
    return f'<p class="{analysis.verdict}"><b>{first}</b></p><table><tr>{head}</tr>{lines}</table><p>{said}</p>'


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def _interval(interval: Interval) -> dict[str, float | None]:
    return {name: _number(getattr(interval, name)) for name in ("value", "low", "high")}


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


def _half(interval: Interval) -> str:
    return f"± {interval.half_width:.2f}" if math.isfinite(interval.half_width) else "unknown"


def _price(value: float) -> float | str:
    """Rounded; a word where it is no number."""
    if math.isnan(value):
        return "unknown"
    return round(value, 4) if math.isfinite(value) else "diverges"


def _price_cell(price: Interval, fitted: Fit) -> str:
    if fitted.trouble or not math.isfinite(price.value):
        return "" if fitted.trouble or math.isnan(price.value) else "diverges"
    known = f" [{price.low:.3f}, {price.high:.3f}]" if math.isfinite(price.high) else ""
    return f"{price.value:.3f}{known}"
