"""Result of a figure: measured numbers, rows that compare them with predictions, and a picture.

A figure is a file `fig*.py` in a folder of `scripts/figures` that defines `FIGURE`.
`python -m scripts.figures` loads the file by its name:

    def measure(settings, work):                       # the only slow part; its numbers are saved as JSON
        return {"heads": [8, 16, 32], "error": error}  # lists or arrays; error [sizes, seeds]

    def rows(settings, data):
        what = "squared error against H"
        return [exponent(what, data["heads"], data["error"], predicted=-1, tolerance=0.15)]

    def draw(settings, data):
        figure, (axes,) = panels.row(1, "Figure 3a: ...")
        panels.power_law(axes, data["heads"], data["error"], "squared error", predicted=-1)
        return figure

    FIGURE = Figure(
        title=..., source="figure 3a of Bordelon et al. 2024", about=..., small={...}, full={...},
        measure=measure, rows=rows, draw=draw,
    )

`settings` is `small` or `full`. The settings hold everything that the numbers depend on, as JSON
numbers, texts and lists. A record with the same settings is not measured again. `work` is the
figure's own folder for parts of a long measurement, such as a sweep's rows. The folder stays when
the process ends, so that finished parts are not repeated.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

if TYPE_CHECKING:
    import matplotlib.figure

Settings = Mapping[str, Any]
"""Settings of a measurement, as JSON has them."""
Data = Mapping[str, Any]
"""Measured numbers by their names: arrays, or lists from a record."""
Interval = tuple[float, float, float]
"""Estimate, followed by the lower and upper ends of its 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measured number with its prediction: a line of a figure's record and of the page.

    Attributes:
        what: Description of the number, with the sizes it was measured at.
        measured: Estimate.
        low: Lower end of the estimate's 95 % interval over seeds.
        high: Upper end of the interval.
        predicted: Prediction of the source, `None` if the source has none.
        tolerance: Distance from `predicted` up to which `measured` agrees with it.
        kind: "exponent" of a power law, or "value" for any other number. It decides the format.
        source: Source of the prediction, if it is not the figure's source.
        above: Whether `predicted` is a lower bound, to which `tolerance` does not apply.
        control: Whether the row must disagree with its prediction, because something was made
            wrong on purpose.
        note: Remark for the reader.
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
        """Agreement of the estimate with its prediction: inside the band, or above the bound.

        A row without a prediction does not agree.
        """
        if self.predicted is None:
            return False
        if self.above:
            return self.measured > self.predicted
        return abs(self.measured - self.predicted) <= self.tolerance

    @property
    def verdict(self) -> str:
        """Verdict on the prediction in words, for the page."""
        if self.predicted is None:
            return "measured, nothing predicted"
        if not math.isfinite(self.measured):
            return "not measured"

        if self.above:
            contradicts = self.high < self.predicted
        else:
            is_below = self.high < self.predicted - self.tolerance
            is_above = self.low > self.predicted + self.tolerance
            contradicts = is_below or is_above

        if self.control:
            if contradicts:
                return "control: fails as it must"
            return "control: does not fail, so the check shows nothing"
        if contradicts:
            return "does not reproduce"
        if self.above:
            if self.low > self.predicted:
                return "reproduces"
            return "undecided: the interval meets the bound"
        if not self.agrees:
            return "undecided: outside the band, the interval meets it"
        is_inside = (
            self.low >= self.predicted - self.tolerance
            and self.high <= self.predicted + self.tolerance
        )
        if is_inside:
            return "reproduces"
        if self.high - self.low > 4 * self.tolerance:
            return "undecided: the interval is twice as wide as the band"
        return "reproduces, with an interval that reaches out of the band"

    def json(self) -> dict[str, Any]:
        """Return all fields and the verdict, with numbers to six digits."""
        fields = dataclasses.asdict(self)
        # Records of most figures do not have this field.
        if not self.above:
            del fields["above"]
        return {**_plain(fields), "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Description of a figure, with the functions that measure, judge and draw it (see the module).

    Attributes:
        title: Title in one line.
        source: Figure or section, and paper.
        about: Measurement and models, for a reader of the page. The page shows the first paragraph.
        small: Settings of the CPU version.
        full: Settings of the paper's sizes.
        measure: Function from settings and work folder to numbers.
        rows: Function from settings and numbers to rows.
        draw: Function from settings and numbers to a picture.
        keeps_runs: True if `measure` keeps finished training runs on disk and uses them again. A
            repeated measurement then records at least the CPU seconds of the first.
    """

    title: str
    source: str
    about: str
    small: Settings
    full: Settings
    measure: Callable[[Settings, Path], Data]
    rows: Callable[[Settings, Data], Sequence[Row]]
    draw: Callable[[Settings, Data], matplotlib.figure.Figure]
    keeps_runs: bool = False


class BothSettings(TypedDict):
    """Keyword arguments `small` and `full` of `Figure`."""

    small: Settings
    full: Settings


def settings_of(module: str) -> BothSettings:
    """Return the `small` and `full` settings of a figure from `settings.json`.

    Args:
        module: Dotted name of the figure's module. Its last part is the key in `settings.json`.
    """
    path = Path(__file__).with_name("settings.json")
    name = module.rpartition(".")[2]
    return json.loads(path.read_text())[name]


def estimate(description: str, interval: Interval, kind: str = "value", **fields: Any) -> Row:
    """Return the row of an estimate with its interval.

    Args:
        fields: Further fields of `Row`.
    """
    measured, low, high = interval
    return Row(what=description, measured=measured, low=low, high=high, kind=kind, **fields)


def mean(values: Any) -> Interval:
    """Return the mean of values [seeds] with its 95 % interval by Student's t.

    Raises:
        ValueError: There is one seed, which has no interval.
    """
    from scipy import stats

    values = np.asarray(values, np.float64)
    if len(values) < 2:
        raise ValueError(f"{len(values)} seed has no interval; measure at least 2")
    estimate = float(values.mean())
    quantile = stats.t.ppf(0.975, len(values) - 1)
    half_width = float(quantile * values.std(ddof=1) / math.sqrt(len(values)))
    return estimate, estimate - half_width, estimate + half_width


def jackknife(statistic: Callable[[np.ndarray], float], seeds: int) -> Interval:
    """Return a statistic of all seeds with its jackknife 95 % interval.

    The jackknife leaves out one seed at a time.

    Args:
        statistic: Function from the indices of seeds to a number.
    """
    from scipy import stats

    every_seed = np.arange(seeds)
    estimate = statistic(every_seed)
    leave_one_out = np.array([statistic(np.delete(every_seed, seed)) for seed in range(seeds)])
    # Deviations are small, as estimates share all seeds but one. The factor makes up for it.
    error = math.sqrt((seeds - 1) * float(np.mean((leave_one_out - leave_one_out.mean()) ** 2)))
    half_width = float(stats.t.ppf(0.975, seeds - 1)) * error
    return estimate, estimate - half_width, estimate + half_width


def slope(sizes: Any, values: Any) -> Interval:
    """Return the log-log slope of positive values [sizes, seeds] against sizes.

    The slope is the mean over seeds of each seed's least-squares slope, with its 95 % interval.
    """
    log_sizes = np.log(np.asarray(sizes, np.float64))
    log_values = np.log(np.asarray(values, np.float64))
    centred = log_sizes - log_sizes.mean()
    return mean(centred @ log_values / (centred @ centred))


def exponent(
    description: str,
    sizes: Any,
    values: Any,
    *,
    predicted: float | None,
    tolerance: float = 0.1,
    **fields: Any,
) -> Row:
    """Return the row of a power law's exponent, fitted to values [sizes, seeds].

    Args:
        fields: Further fields of `Row`.
    """
    measured, low, high = slope(sizes, values)
    return Row(
        what=description,
        measured=measured,
        low=low,
        high=high,
        predicted=predicted,
        tolerance=tolerance,
        **fields,
    )


def record(figure: Figure, settings: Settings, data: Data, **about: Any) -> dict[str, Any]:
    """Return a figure's record as plain JSON values.

    The record has title, source, settings, rows and measured numbers.

    Args:
        about: Further fields on the measurement: command, versions and seconds.
    """
    data = _plain(dict(data))
    rows = [row.json() for row in figure.rows(settings, data)]
    head = {"title": figure.title, "source": figure.source, "about": figure.about}
    return {**head, **about, "settings": _plain(dict(settings)), "rows": rows, "data": data}


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record as JSON, with one line for each field and each row."""
    lines = []
    for name, value in content.items():
        if name == "rows":
            rows = ",\n".join(f"  {_text(row)}" for row in value)
            text = f"[\n{rows}\n ]"
        else:
            text = _text(value)
        lines.append(f" {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path) -> dict[str, Any]:
    """Return the record in a file."""
    return json.loads(path.read_text())


def same_settings(content: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether a record was measured with these settings."""
    # Records have lists and rounded numbers, and so must the settings that are compared.
    as_saved = json.loads(_text(_plain(dict(settings))))
    return content["settings"] == as_saved


def _text(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "))


def _plain(value: Any) -> Any:
    """Return a value as JSON types: arrays become lists, and floats are rounded to six digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    # First, because a bool is an int, too.
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}")
    return value
