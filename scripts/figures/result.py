"""What a figure comes to: numbers, rows that hold them against a prediction, and a picture.

A figure is a file `fig*.py` in this folder with a `FIGURE` in it; `python -m scripts.figures` finds it by its name:

    def measure(settings, work):                       # the only slow part; its numbers are kept as JSON
        return {"heads": [8, 16, 32], "error": error}  # lists or arrays; error [sizes, seeds]

    def rows(settings, data):
        return [exponent("squared error against H", data["heads"], data["error"], predicted=-1, tolerance=0.15)]

    def draw(settings, data):
        figure, (left, right) = panels.row(2, "Figure 3a: ...")
        panels.power_law(left, data["heads"], data["error"], "H", "squared error", predicted=-1)
        return figure

    FIGURE = Figure(title=..., source="figure 3a of Bordelon et al. 2024", about=..., small={...}, full={...},
                    measure=measure, rows=rows, draw=draw)

`settings` is one of `small` and `full`: JSON numbers, texts and lists, all that the numbers depend on. While they are those
of the record in the output folder, nothing is measured again. `work` is a folder of the figure's own for parts of a long
measurement (a sweep's points): it stays when the process ends, and parts found there need not be done again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import matplotlib.figure

Settings = Mapping[str, Any]
Data = Mapping[str, Any]
Interval = tuple[float, float, float]
"""Estimate, and the ends of its 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number beside what is predicted.

    Attributes:
        what: the number in words, with the sizes it is about.
        measured: the estimate; `low` and `high` its 95 % interval over seeds.
        predicted: what the source says; None where it says nothing.
        tolerance: how far `measured` may be from it.
        kind: "exponent", or "value" of any other number.
        source: of the prediction, where it is not the figure's.
        above: the source says more than `predicted`, which is a bound; `tolerance` is not read.
        control: the row must not agree with its prediction.
        note: what the reader should know of it.
    """

    what: str
    measured: float
    low: float
    high: float
    predicted: float | None = None
    tolerance: float = 0.1
    kind: str = "exponent"
    source: str = ""
    above: bool = False
    control: bool = False
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the estimate lies in the band around its prediction, or above its bound, and the prediction is there."""
        if self.predicted is None:
            return False
        return (
            self.measured > self.predicted
            if self.above
            else abs(self.measured - self.predicted) <= self.tolerance
        )

    @property
    def verdict(self) -> str:
        """In words: does it reproduce?"""
        if self.predicted is None:
            return "measured, nothing predicted"
        if not math.isfinite(self.measured):
            return "not measured"
        band = 0.0 if self.above else self.tolerance
        apart = self.high < self.predicted - band or (
            self.low > self.predicted + band and not self.above
        )
        if self.control:
            return (
                "control: fails as it must"
                if apart
                else "control: does not fail, so the check shows nothing"
            )
        if self.above:
            meets = "undecided: the interval meets the bound"
            return (
                "reproduces"
                if self.low > self.predicted
                else "does not reproduce"
                if apart
                else meets
            )
        if self.agrees:
            if (
                self.low >= self.predicted - self.tolerance
                and self.high <= self.predicted + self.tolerance
            ):
                return "reproduces"
            if self.high - self.low > 4 * self.tolerance:
                return "undecided: the interval is twice as wide as the band"
            return "reproduces, with an interval that reaches out of the band"
        return (
            "does not reproduce" if apart else "undecided: outside the band, the interval meets it"
        )

    def json(self) -> dict[str, Any]:
        """All fields and the verdict, numbers to six digits; `above` only where it is so."""
        fields = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "above" or value
        }
        return {**_plain(fields), "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """How a figure is measured, judged and drawn (see the module).

    Attributes:
        title: one line.
        source: figure or section, and paper.
        about: what is measured and on which models, for a reader of the page.
        small: settings of the CPU version.
        full: settings of the paper's sizes.
        measure: (settings, work folder) to numbers.
        rows: (settings, numbers) to rows.
        draw: (settings, numbers) to a picture.
    """

    title: str
    source: str
    about: str
    small: Settings
    full: Settings
    measure: Callable[[Settings, Path], Data]
    rows: Callable[[Settings, Data], Sequence[Row]]
    draw: Callable[[Settings, Data], matplotlib.figure.Figure]


def settings_of(module: str) -> dict[str, Settings]:
    """Return the `small` and `full` settings of a figure, which `settings.json` has by the name of its module."""
    file = Path(__file__).with_name("settings.json")
    return json.loads(file.read_text())[module.rpartition(".")[2]]


def estimate(what: str, interval: Interval, kind: str = "value", **more: Any) -> Row:
    """Return the row of an estimate with its interval; `more` are fields of `Row`."""
    measured, low, high = interval
    return Row(what=what, measured=measured, low=low, high=high, kind=kind, **more)


def mean(values: Any) -> Interval:
    """Mean over seeds of values [seeds], with its 95 % interval (Student's t).

    Raises:
        ValueError: one seed, which has no interval.
    """
    from scipy import stats

    values = np.asarray(values, np.float64)
    if len(values) < 2:
        raise ValueError(f"{len(values)} seed has no interval; measure at least 2")
    estimate = float(values.mean())
    room = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return estimate, estimate - room, estimate + room


def jackknife(statistic: Callable[[np.ndarray], float], seeds: int) -> Interval:
    """A statistic of the indices of seeds, with the 95 % interval from leaving out one seed at a time."""
    from scipy import stats

    estimate = statistic(np.arange(seeds))
    without = np.array([statistic(np.delete(np.arange(seeds), one)) for one in range(seeds)])
    error = math.sqrt((seeds - 1) * float(np.mean((without - without.mean()) ** 2)))
    room = float(stats.t.ppf(0.975, seeds - 1)) * error
    return estimate, estimate - room, estimate + room


def slope(sizes: Any, values: Any) -> Interval:
    """Log-log slope of positive values [sizes, seeds] against sizes: the mean over seeds of each one's least-squares line."""
    x, y = np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(values, np.float64))
    x = x - x.mean()
    return mean(x @ y / (x @ x))


def exponent(
    what: str,
    sizes: Any,
    values: Any,
    *,
    predicted: float | None,
    tolerance: float = 0.1,
    **more: Any,
) -> Row:
    """The row of a power law, from values [sizes, seeds]; `more` are fields of `Row`."""
    measured, low, high = slope(sizes, values)
    return Row(
        what=what,
        measured=measured,
        low=low,
        high=high,
        predicted=predicted,
        tolerance=tolerance,
        **more,
    )


def record(figure: Figure, settings: Settings, data: Data, **about: Any) -> dict[str, Any]:
    """What is kept of a figure: settings, numbers, rows, and what `about` says of how they came to be."""
    data = _plain(dict(data))
    rows = [row.json() for row in figure.rows(settings, data)]
    head = {"title": figure.title, "source": figure.source, "about": figure.about}
    return {**head, **about, "settings": _plain(dict(settings)), "rows": rows, "data": data}


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record, a line per field and row."""
    lines = []
    for name, value in content.items():
        if name == "rows":
            text = "[\n" + ",\n".join(f"  {_text(row)}" for row in value) + "\n ]"
        else:
            text = _text(value)
        lines.append(f" {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path) -> dict[str, Any]:
    """The record in a file."""
    return json.loads(path.read_text())


def same_settings(content: Mapping[str, Any], settings: Settings) -> bool:
    """Whether a record was measured with these settings."""
    return content["settings"] == json.loads(_text(_plain(dict(settings))))


def _text(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "))


def _plain(value: Any) -> Any:
    """Arrays as lists, floats to six digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    return float(f"{value:.6g}") if isinstance(value, float | np.floating) else value
