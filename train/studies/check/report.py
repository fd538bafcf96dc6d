"""A coordinate check on the terminal and as a picture: a row per observable on one screen, or a panel per observable."""

from __future__ import annotations

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mupax.train.studies.check.judge import Finding, passes
from mupax.train.studies.report import finite

if TYPE_CHECKING:
    from rich.console import Console

_PANEL_COLUMNS = 7
_BAND = "band that passes"
_INK = "black"
_WRONG = "#D55E00"
_RIGHT = "#0072B2"
_STEP_COLOURS = {0: "#999999", 1: "#56B4E9", 3: "#0072B2", 10: "#D55E00"}
_SECTIONS = {
    "activation": "Activations at the start",
    "update": "Updates: changes of activations",
    "weight": "Weights at the start",
    "movement": "Movement of weights by a step",
    "gradient": "Gradients over eps",
}
"""Kind of observable to the heading over its rows."""
_FAILED = "Failed"
_COLUMN_IN = 7.0
_LABELS_IN = 2.9
_SLOPES_IN = 2.6
_ROW_IN = 0.22
_HEAD_IN = 0.95
_FOOT_IN = 0.9
"""Inches: a column, its labels, its slopes, a row, and what stands above and below. The rest of a column is for verdicts."""

_BY_ROLE = ("weight", "movement", "gradient")
_WIDE = 112
"""Columns of a terminal from which on intervals and bands fit in beside the verdict."""
PASSING = "a slope passes where its 95 % interval over seeds meets the band that theory leaves to finite sizes"


@dataclasses.dataclass(frozen=True)
class _Row:
    """A line of the picture: a heading, or an observable with the finding that decides it."""

    label: str
    finding: Finding | None = None


def figure(path: Path | str, findings: Sequence[Finding], axis: str, title: str) -> None:
    """Draw a row per observable: its slope, its interval, and the band that theory allows; failures on top.

    An observable that was read after several steps has the row of the first step that failed, or of the last.

    Args:
        axis: name of the size that grew.
    """
    from matplotlib.figure import Figure

    rows = _rows(findings)
    tall = math.ceil(len(rows) / 2) if len(rows) > 24 else len(rows)
    columns = [rows]
    if rows[tall:]:
        headings = [row.label for row in rows[:tall] if row.finding is None]
        rest = rows[tall:]
        if rest[0].finding is not None:
            rest = [_Row(f"{headings[-1]}, continued"), *rest]
        columns = [rows[:tall], rest]
        tall = max(tall, len(rest))
    size = (_COLUMN_IN * len(columns), _ROW_IN * tall + _HEAD_IN + _FOOT_IN)
    drawn = Figure(figsize=size)
    observables = len({finding.observable for finding in findings})
    failed = len([row for row in rows if row.finding is not None and not row.finding.ok])
    verdict = f"passes: all {observables} observables within theory"
    if not passes(findings):
        verdict = f"fails: {failed} of {observables} observables"
    colour = _INK if passes(findings) else _WRONG
    drawn.text(
        0.15 / size[0],
        1 - 0.3 / size[1],
        verdict,
        fontsize=15,
        fontweight="bold",
        color=colour,
        va="center",
    )
    drawn.text(0.15 / size[0], 1 - 0.6 / size[1], title, fontsize=10, color=_INK, va="center")
    shown = [
        row.finding for row in rows if row.finding is not None and math.isfinite(row.finding.slope)
    ]
    ends = [
        end
        for finding in shown
        for end in (finding.expected.low, finding.expected.high, finding.slope)
    ]
    limits = (min(ends, default=0.0) - 0.15, max(ends, default=0.0) + 0.15)
    for index, own in enumerate(columns):
        left = (index * _COLUMN_IN + _LABELS_IN) / size[0]
        box = (left, _FOOT_IN / size[1], _SLOPES_IN / size[0], _ROW_IN * tall / size[1])
        panel = drawn.add_axes(box)
        _column(panel, own, limits, tall)
        panel.set_xlabel(f"exponent of {axis}", fontsize=9)
    handles = {str(line.get_label()): line for panel in drawn.axes for line in panel.get_lines()}
    named: list[Any] = [line for label, line in handles.items() if not label.startswith("_")]
    drawn.legend(handles=named, loc="lower left", ncols=len(named), fontsize=9, frameon=False)
    drawn.savefig(path, dpi=130)


def _rows(findings: Sequence[Finding]) -> list[_Row]:
    """Return headings and observables from the top: failures of every kind, then each kind by itself."""
    decisive: dict[str, Finding] = {}
    for finding in findings:
        before = decisive.get(finding.observable)
        if before is None or before.ok:
            decisive[finding.observable] = finding
    sections: dict[str, list[_Row]] = {
        _FAILED: [],
        **{heading: [] for heading in _SECTIONS.values()},
    }
    for observable, finding in sorted(decisive.items()):
        heading = _SECTIONS[_kind(finding)]
        parameter = observable.partition("/")[2].replace("/", ", ")
        in_section = (
            parameter
            if parameter and not observable.startswith("contribution")
            else readable(observable)
        )
        if finding.ok:
            sections[heading].append(_Row(in_section, finding))
        else:
            sections[_FAILED].append(_Row(readable(observable), finding))
    rows: list[_Row] = []
    for heading, own in sections.items():
        if own:
            rows += [_Row(heading), *own]
    return rows


def _kind(finding: Finding) -> str:
    """Return the key of `_SECTIONS` for a finding; numbers of an optimizer over a whole run count as updates."""
    prefix = finding.observable.partition("/")[0]
    if prefix in _SECTIONS:
        return prefix
    changes = finding.step > 0 or "/" in finding.observable
    return "update" if changes and not prefix.startswith("contribution") else "activation"


def _column(panel: Any, rows: Sequence[_Row], limits: tuple[float, float], tall: int) -> None:
    """Draw one column of rows on axes of their own."""
    labelled = [(index, row) for index, row in enumerate(rows) if row.finding is not None]
    for index, row in enumerate(rows):
        if row.finding is None:
            panel.text(
                -1.08, index, row.label, transform=panel.get_yaxis_transform(), fontsize=10, fontweight="bold",
                color=_WRONG if row.label == _FAILED else _INK, va="center",
            )  # fmt: skip
        else:
            _observable(panel, index, row.finding)
    panel.set_yticks(
        [index for index, _ in labelled], [row.label for _, row in labelled], fontsize=9
    )
    for label, (_, row) in zip(panel.get_yticklabels(), labelled, strict=True):
        if row.finding is not None and not row.finding.ok:
            label.set(color=_WRONG, fontweight="bold")
    panel.set_ylim(tall - 0.4, -0.6)
    panel.set_xlim(*limits)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=9)
    panel.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _observable(panel: Any, index: int, finding: Finding) -> None:
    """Draw theory's band, its exponent, and the measured slope with its interval; colour and shape tell a failure apart."""
    colour, marker = (_RIGHT, "o") if finding.ok else (_WRONG, "X")
    label = "measured slope, 95 % interval over seeds" if finding.ok else "fails"
    panel.plot(
        [finding.expected.low, finding.expected.high],
        [index, index],
        color="#CCCCCC",
        linewidth=9,
        solid_capstyle="butt",
        label="allowed by theory",
        zorder=1,
    )
    panel.plot(
        [finding.expected.slope],
        [index],
        "|",
        color="#555555",
        markersize=11,
        markeredgewidth=1.5,
        label="theory",
        zorder=2,
    )
    if not math.isfinite(finding.slope):
        panel.text(
            finding.expected.slope,
            index,
            f"  {finding.verdict}",
            color=_WRONG,
            fontsize=9,
            va="center",
            zorder=4,
        )
        return
    panel.plot([finding.low, finding.high], [index, index], color=colour, linewidth=1.8, zorder=3)
    panel.plot(
        [finding.slope],
        [index],
        marker,
        color=colour,
        markersize=6 if finding.ok else 8,
        label=label,
        zorder=4,
    )
    if not finding.ok:
        panel.text(
            1.02,
            index,
            f"{finding.slope:+.2f} {_short(finding)}",
            transform=panel.get_yaxis_transform(),
            fontsize=9,
            color=_WRONG,
            va="center",
        )


def _short(finding: Finding) -> str:
    """Return a verdict that fits beside a row."""
    verdict = finding.verdict.removeprefix("contradicts theory").strip(" ()")
    return verdict.replace("at the smallest size", "at the base") or "outside theory"


def panels(
    path: Path | str, findings: Sequence[Finding], sizes: Sequence[float], axis: str, title: str
) -> None:
    """Draw a small log-log panel per observable: a line per step, theory dashed with its band shaded, and a verdict in its title.

    The title has the slope of the last step, or of the first that is wrong, its interval, and the slopes that pass.

    Args:
        axis: their name.
    """
    from matplotlib.figure import Figure

    # Activations first, then their changes, then what single weights do.
    kinds = ("gradient", "movement", "weight", "update", "change")
    observables = dict.fromkeys(f.observable for f in findings)
    names = sorted(observables, key=lambda name: [name.startswith(kind) for kind in kinds])
    rows = max(1, math.ceil(len(names) / _PANEL_COLUMNS))
    drawn = Figure(figsize=(1.9 * _PANEL_COLUMNS, 1.95 * rows + 0.9), layout="constrained")
    head = f"{title}: {'passes' if passes(findings) else 'fails'}"
    drawn.suptitle(
        f"{head}\n",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
        color=_INK if passes(findings) else _WRONG,
    )
    steps = (
        {step: f"step {step}" for step in _STEP_COLOURS}
        if any(f.step for f in findings)
        else {0: "the whole run"}
    )
    axes = list(drawn.subplots(rows, _PANEL_COLUMNS, squeeze=False).flat)
    for index, (panel, name) in enumerate(zip(axes, names, strict=False)):
        _panel(panel, [f for f in findings if f.observable == name], sizes, steps)
        if index + _PANEL_COLUMNS < len(names):
            panel.set_xticklabels([])
    for panel in axes[len(names) :]:
        panel.set_visible(False)
    lines = {str(line.get_label()): line for panel in axes for line in panel.get_lines()}
    handles: list[Any] = [lines[label] for label in (*steps.values(), "theory") if label in lines]
    if bands := [
        patch for panel in axes for patch in panel.collections if patch.get_label() == _BAND
    ]:
        handles.append(bands[0])
    if handles:
        drawn.legend(
            handles=handles, loc="lower right", ncols=len(handles), fontsize=8, frameon=False
        )
    drawn.supxlabel(f"{axis}\n{PASSING}", x=0.01, ha="left", fontsize=8)
    drawn.savefig(path, dpi=130)


def _panel(
    panel: Any, findings: Sequence[Finding], sizes: Sequence[float], steps: Mapping[int, str]
) -> None:
    """One observable at every step read."""
    shown = next((f for f in findings if not f.ok), findings[-1])
    low = shown.expected.low
    high = shown.expected.high
    style = {"marker": "o", "markersize": 2.5, "linewidth": 1.2}
    for f in findings:
        panel.plot(sizes, f.values, color=_STEP_COLOURS[f.step], label=steps[f.step], **style)
    if all(value > 0 for value in shown.values):
        centre = statistics.geometric_mean(shown.values)
        middle = statistics.geometric_mean(sizes)
        theory = [centre * (size / middle) ** shown.expected.slope for size in sizes]
        panel.plot(
            sizes,
            theory,
            color="#555555",
            linewidth=0.8,
            linestyle=(0, (3, 2)),
            label="theory",
            zorder=0,
        )
        band = [[centre * (size / middle) ** slope for size in sizes] for slope in (low, high)]
        panel.fill_between(sizes, *band, color="#DDDDDD", linewidth=0, label=_BAND, zorder=-1)
    name = textwrap.fill(shown.observable.replace("/", ", "), 30, break_long_words=False)
    slopes = f"{'✓' if shown.ok else '✗'} {shown.slope:+.2f} [{shown.low:+.2f}, {shown.high:+.2f}]"
    verdict = "" if shown.ok else f"{shown.verdict} at step {shown.step}\n"
    panel.set_title(
        f"{name}\n{slopes}\n{verdict}passes from {low:+.2f} to {high:+.2f}",
        fontsize=6.5,
        color=_INK if shown.ok else _WRONG,
    )
    panel.set_xscale("log", base=2)
    positive = [value for f in findings for value in f.values if value > 0]
    if positive:
        panel.set_yscale("log", base=2)
        # What does not move should look as if it does not: no panel shows less than a factor of 16.
        most = max(positive)
        least = min(positive)
        centre = math.sqrt(most * least)
        half = max(4.0, 1.4 * math.sqrt(most / least))
        panel.set_ylim(centre / half, centre * half)
    panel.set_xticks(list(sizes), [f"{size:g}" for size in sizes])
    panel.tick_params(labelsize=5, length=2)
    panel.minorticks_off()
    panel.grid(color="#EEEEEE", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


class CheckFailure(AssertionError):
    """A coordinate check that did not pass. Its text has a line per observable that failed."""


def show(
    console: Console,
    findings: Sequence[Finding],
    title: str,
    not_judged: Sequence[str] = (),
    blamed: Literal["role", "number"] = "role",
    *,
    subject: str = "",
    following: Sequence[str] = (),
) -> None:
    """Print the conclusion, what to type next, and one line per observable and step, failures first.

    A console narrower than `_WIDE` has no intervals and bands: a slope cut off in the middle would be nothing.

    Args:
        console: to print on.
        findings: of the check.
        title: above the table.
        not_judged: observables that theory says nothing about.
        blamed: what comes behind the stroke of an observable: a parameter's role, or a number of the optimizer over a whole run.
        subject: as `verdict_line` takes it.
        following: sentences on what to type next.
    """
    from rich.table import Table

    console.print(verdict_line(findings, not_judged, blamed, subject))
    for sentence in following:
        console.print(sentence, highlight=False, markup=False)
    wide = console.width >= _WIDE
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1))
    table.add_column("observable", no_wrap=True)
    for column in ("after", "slope", "95 %", "theory") if wide else ("after", "slope", "theory"):
        table.add_column(column, justify="left" if column == "95 %" else "right", no_wrap=True)
    table.add_column("verdict")
    for f in sorted(findings, key=lambda f: (f.ok, f.observable, f.step)):
        theory, colour = f"{f.expected.slope:+.2f}", "green" if f.ok else "bold red"
        after = str(f.step) if blamed == "role" else "run"
        cells = [f"{f.slope:+.2f}", theory]
        if wide:
            band = f"{theory} (-{f.expected.below:.2f} +{f.expected.above:.2f})"
            cells = [f"{f.slope:+.2f}", f"[{f.low:+.2f}, {f.high:+.2f}]", band]
        table.add_row(f.observable, after, *cells, f"[{colour}]{verdict_words(f)}[/{colour}]")
    console.print(table)
    if not wide:
        console.print(f"{PASSING}; both are here from {_WIDE} columns on")


def text(findings: Sequence[Finding], not_judged: Sequence[str] = ()) -> str:
    """Return the conclusion, and a line for each observable that failed: what, of which parameter, by how much.

    Args:
        not_judged: observables that theory says nothing about.
    """
    failed = [finding for finding in findings if not finding.ok]
    lines = [
        _plain(verdict_line(findings, not_judged)),
        *(f"  {_sentence(finding)}" for finding in failed),
    ]
    return "\n".join(lines)


def require(findings: Sequence[Finding]) -> None:
    """Raise `CheckFailure`, whose message is `text(findings)`, unless every finding is as theory says."""
    if not passes(findings):
        raise CheckFailure(text(findings))


def _plain(line: str) -> str:
    """Return the line without colours."""
    from rich.text import Text

    return Text.from_markup(line).plain


def readable(observable: str) -> str:
    """Return an observable's name as it is read: "movement of token_embedding" for movement/token_embedding."""
    column, *parameter = observable.split("/")
    return f"{column} of {', '.join(parameter)}" if parameter else column


def _sentence(finding: Finding) -> str:
    """Return what failed, after how many steps, what was measured and what theory allows."""
    expected = finding.expected
    steps = (
        "at the start"
        if finding.step == 0
        else f"after {finding.step} step{'s' * (finding.step > 1)}"
    )
    measured = f"size^{finding.slope:+.2f} [{finding.low:+.2f}, {finding.high:+.2f}]"
    allowed = f"theory {expected.slope:+.2f}, allowed {expected.low:+.2f} to {expected.high:+.2f}"
    return (
        f"{readable(finding.observable)} {steps}: {measured}, {allowed}: {verdict_words(finding)}"
    )


def verdict_words(finding: Finding) -> str:
    """Return the verdict on a finding and the roles that theory blames."""
    return finding.verdict + (f" through {', '.join(finding.roles)}" if finding.roles else "")


def verdict_line(
    findings: Sequence[Finding],
    not_judged: Sequence[str] = (),
    blamed: Literal["role", "number"] = "role",
    subject: str = "",
) -> str:
    """Return both verdicts in a line: what gave a wrong program or table away, and the roles whose own lines are wrong.

    Args:
        findings: of the check.
        not_judged: observables that theory says nothing about.
        blamed: as in `show`.
        subject: what was checked, as the beginning of a sentence: "mup follows its table as heads grow".
    """
    if not findings:
        return "[bold red]fails[/bold red]: nothing was measured that theory speaks of"
    wrong, bad = (
        [f for f in findings if not f.agrees],
        [f for f in findings if f.agrees and f.trouble],
    )
    table = "table" if blamed == "role" else "joint rule"
    parts = (
        [f"the program does not do what its {table} says: {_evidence(wrong, blamed)}"]
        if wrong
        else []
    )
    parts += [f"the {table} itself is wrong: {_evidence(bad, blamed)}"] if bad else []
    unsaid = f"; not judged: {', '.join(not_judged)}" if not_judged else ""
    if not parts:
        about = f"{subject}: " if subject else ""
        return f"[bold green]passes[/bold green]: {about}all {len(findings)} observables within theory{unsaid}"
    return f"[bold red]fails[/bold red]: {'; '.join(parts)}{unsaid}"


def _evidence(bad: Sequence[Finding], blamed: str) -> str:
    activations = dict.fromkeys(
        f"{f.observable} {verdict_words(f)}" for f in bad if "/" not in f.observable
    )
    groups: dict[str, list[tuple[str, str]]] = {}
    for f in bad:
        what, *group = f.observable.split("/")
        if group:
            part = "".join(f" of {name}" for name in group[1:]) + (
                f" in {f.layer}" if f.layer else ""
            )
            groups.setdefault(group[0], []).append(
                (what, what + part if not f.agrees else f"{what}{part}: {f.trouble}")
            )
    # A wrong weight or movement is its role's own; a wrong gradient may come from elsewhere.
    rank = {what: index for index, what in enumerate(_BY_ROLE)}
    order = sorted(groups, key=lambda group: min(rank.get(what, 0) for what, _ in groups[group]))
    rows = [
        f"{group} ({', '.join(dict.fromkeys(words for _, words in groups[group]))})"
        for group in order
    ]
    parts = ["; ".join(_first(list(activations)))] if activations else []
    parts += [f"by {blamed}: {', '.join(_first(rows))}"] if rows else []
    return "; ".join(parts)


def _first(names: list[str], count: int = 6) -> list[str]:
    return names[:count] + ([f"and {len(names) - count} more"] if len(names) > count else [])


def to_json(
    findings: Sequence[Finding], about: dict[str, Any], not_judged: Sequence[str] = ()
) -> dict[str, Any]:
    """`verdict` (pass or fail), that of the `program` and of the `table`, what was run, and what was seen of every observable.

    Args:
        findings: of a check.
        about: what was run.
        not_judged: observables of parameters that theory says nothing about.
    """
    rows = [
        {"observable": f.observable, "step": f.step, "slope": finite(f.slope), "low": finite(f.low),
         "high": finite(f.high), "predicted": f.expected.slope, "ok": f.ok,
         "verdict": f.verdict, "roles": list(f.roles), "values": [finite(v) for v in f.values]}
        for f in findings
    ]  # fmt: skip
    verdicts = {
        "verdict": passes(findings),
        "program": bool(findings) and all(f.agrees for f in findings),
        "table": not any(f.trouble for f in findings),
    }
    words = {name: "pass" if passed else "fail" for name, passed in verdicts.items()}
    return {**words, **about, "not_judged": list(not_judged), "observables": rows}
