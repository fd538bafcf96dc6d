"""Report of a coordinate check: lines on the terminal, JSON, and two kinds of pictures."""

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
"""Map from the kind of an observable to the heading above its rows in the picture."""
_FAILED = "Failed"
# Layout of the picture in inches. The rest of a column's width, next to labels and slopes, is for
# verdicts.
_COLUMN_IN = 7.0
_LABELS_IN = 2.9
_SLOPES_IN = 2.6
_ROW_IN = 0.22
_HEAD_IN = 0.95
_FOOT_IN = 0.9
_ONE_COLUMN_ROWS = 24
"""Largest number of rows that are drawn in a single column."""

_BY_ROLE = ("weight", "movement", "gradient")
"""Kinds of parameters' observables, in the order in which their failures are reported.

A wrong weight or movement is the fault of the parameter's own role. A wrong gradient may come from
another parameter, so it comes last.
"""
_WIDE = 112
"""Smallest terminal width, in characters, at which intervals and bands are printed."""
PASSING = (
    "a slope passes where its 95 % interval over seeds meets the band that theory leaves "
    "to finite sizes"
)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Row of the picture: a heading (without a finding), or an observable and one finding of it."""

    label: str
    finding: Finding | None = None


def figure(path: Path | str, findings: Sequence[Finding], axis: str, title: str) -> None:
    """Write a PNG with a row per observable: slope, interval and band of theory; failures on top.

    An observable that was read after several steps has the row of the first step that failed, or of
    the last step. An existing file is replaced.

    Args:
        axis: Grown size, such as "head_dim", for the label "exponent of AXIS".
        title: Line below the verdict, at the top of the picture.
    """
    from matplotlib.figure import Figure

    rows = _rows(findings)
    columns = _columns(rows)
    tallest = max(len(column) for column in columns)
    size = (_COLUMN_IN * len(columns), _ROW_IN * tallest + _HEAD_IN + _FOOT_IN)
    drawn = Figure(figsize=size)
    verdict = _verdict_title(findings)
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
    limits = _slope_limits(rows)
    for index, column in enumerate(columns):
        # matplotlib takes positions as fractions of the figure, so inches are divided by its size.
        left = (index * _COLUMN_IN + _LABELS_IN) / size[0]
        height = _ROW_IN * tallest / size[1]
        box = (left, _FOOT_IN / size[1], _SLOPES_IN / size[0], height)
        panel = drawn.add_axes(box)
        _column(panel, column, limits, tallest)
        panel.set_xlabel(f"exponent of {axis}", fontsize=9)
    # Every row draws lines with the same labels, and the legend needs each label once.
    handles: dict[str, Any] = {}
    for panel in drawn.axes:
        for line in panel.get_lines():
            handles[str(line.get_label())] = line
    named: list[Any] = []
    for label, line in handles.items():
        # matplotlib gives an unlabelled line a name that begins with an underscore.
        if not label.startswith("_"):
            named.append(line)
    drawn.legend(handles=named, loc="lower left", ncols=len(named), fontsize=9, frameon=False)
    drawn.savefig(path, dpi=130)


def _columns(rows: Sequence[_Row]) -> list[Sequence[_Row]]:
    """Return the rows in one column, or, if they are more than 24, in two of about equal height.

    A second column that begins within a section repeats the heading of the section.
    """
    if len(rows) <= _ONE_COLUMN_ROWS:
        return [rows]

    height = math.ceil(len(rows) / 2)
    left = rows[:height]
    right = rows[height:]
    # If its first row is no heading, the second column begins within a section.
    if right[0].finding is not None:
        headings = []
        for row in left:
            if row.finding is None:
                headings.append(row.label)
        right = [_Row(f"{headings[-1]}, continued"), *right]
    return [left, right]


def _verdict_title(findings: Sequence[Finding]) -> str:
    """Return the verdict in one line, with the numbers of observables and of those that failed."""
    observables = {finding.observable for finding in findings}
    if passes(findings):
        return f"passes: all {len(observables)} observables within theory"
    failed = set()
    for finding in findings:
        if not finding.ok:
            failed.add(finding.observable)
    return f"fails: {len(failed)} of {len(observables)} observables"


def _slope_limits(rows: Sequence[_Row]) -> tuple[float, float]:
    """Return the ends of the axis of slopes: 0.15 beyond all bands and finite slopes."""
    ends = []
    for row in rows:
        finding = row.finding
        if finding is not None and math.isfinite(finding.slope):
            ends += [finding.expected.low, finding.expected.high, finding.slope]
    return (min(ends, default=0.0) - 0.15, max(ends, default=0.0) + 0.15)


def _rows(findings: Sequence[Finding]) -> list[_Row]:
    """Return headings and observables from the top: all failures, then each kind of observable.

    An observable has one row, with the finding of the first step that failed or of the last step.
    """
    decisive: dict[str, Finding] = {}
    for finding in findings:
        earlier = decisive.get(finding.observable)
        # Findings of an observable come in the order of steps, so the first failure stays.
        if earlier is None or earlier.ok:
            decisive[finding.observable] = finding

    sections: dict[str, list[_Row]] = {_FAILED: []}
    for heading in _SECTIONS.values():
        sections[heading] = []
    for observable, finding in sorted(decisive.items()):
        if not finding.ok:
            sections[_FAILED].append(_Row(readable(observable), finding))
            continue
        label = observable.partition("/")[2].replace("/", ", ")
        if not label or observable.startswith("contribution"):
            label = readable(observable)
        sections[_SECTIONS[_kind(finding)]].append(_Row(label, finding))

    rows: list[_Row] = []
    for heading, section_rows in sections.items():
        if section_rows:
            rows += [_Row(heading), *section_rows]
    return rows


def _kind(finding: Finding) -> str:
    """Return the key of the section in `_SECTIONS` that a passing finding is listed in.

    Observables of an optimizer over a whole run count as updates.
    """
    prefix = finding.observable.partition("/")[0]
    if prefix in _SECTIONS:
        return prefix
    changes = finding.step > 0 or "/" in finding.observable
    return "update" if changes and not prefix.startswith("contribution") else "activation"


def _column(panel: Any, rows: Sequence[_Row], limits: tuple[float, float], tallest: int) -> None:
    """Draw one column of rows on its own axes.

    Args:
        rows: Rows of the column, from the top.
        limits: Ends of the axis of slopes, from `_slope_limits`.
        tallest: Number of rows of the tallest column, so that all rows have one height.
    """
    ticks = []
    findings = []
    labels = []
    for index, row in enumerate(rows):
        if row.finding is None:
            panel.text(
                -1.08,
                index,
                row.label,
                transform=panel.get_yaxis_transform(),
                fontsize=10,
                fontweight="bold",
                color=_WRONG if row.label == _FAILED else _INK,
                va="center",
            )
        else:
            _observable(panel, index, row.finding)
            ticks.append(index)
            findings.append(row.finding)
            labels.append(row.label)

    panel.set_yticks(ticks, labels, fontsize=9)
    for label, finding in zip(panel.get_yticklabels(), findings, strict=True):
        if not finding.ok:
            label.set(color=_WRONG, fontweight="bold")
    # Downwards, so that row 0 is at the top.
    panel.set_ylim(tallest - 0.4, -0.6)
    panel.set_xlim(*limits)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=9)
    panel.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _observable(panel: Any, index: int, finding: Finding) -> None:
    """Draw the band of theory, its exponent, and the measured slope with its interval.

    A failure has another colour, another marker, and its verdict in words. A slope that is not
    finite is not drawn; the verdict stands in its place.

    Args:
        index: Height of the row on the axes, counted from the top.
    """
    expected = finding.expected
    panel.plot(
        [expected.low, expected.high],
        [index, index],
        color="#CCCCCC",
        linewidth=9,
        solid_capstyle="butt",
        label="allowed by theory",
        zorder=1,
    )
    panel.plot(
        [expected.slope],
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
            expected.slope,
            index,
            f"  {finding.verdict}",
            color=_WRONG,
            fontsize=9,
            va="center",
            zorder=4,
        )
        return

    colour = _RIGHT if finding.ok else _WRONG
    panel.plot([finding.low, finding.high], [index, index], color=colour, linewidth=1.8, zorder=3)
    panel.plot(
        [finding.slope],
        [index],
        "o" if finding.ok else "X",
        color=colour,
        markersize=6 if finding.ok else 8,
        label="measured slope, 95 % interval over seeds" if finding.ok else "fails",
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
    """Return the verdict of a failure without the words "contradicts theory".

    If nothing is left, return "outside theory".
    """
    verdict = finding.verdict.removeprefix("contradicts theory").strip(" ()")
    return verdict.replace("at the smallest size", "at the base") or "outside theory"


def panels(
    path: Path | str, findings: Sequence[Finding], sizes: Sequence[float], axis: str, title: str
) -> None:
    """Write a PNG with a log-log panel per observable: a line per step, and the band of theory.

    The title of a panel has the slope of the first step that failed (otherwise of the last step),
    its interval, and the slopes that pass.

    An existing file is replaced.

    Args:
        findings: Findings after 0, 1, 3 or 10 steps. Other numbers of steps raise a KeyError.
        sizes: Grown size of every model, or its ratio to the smallest.
        axis: Words for `sizes`, such as "heads / smallest", below all panels.
        title: Title of the picture. The verdict is added.
    """
    from matplotlib.figure import Figure

    # `True` sorts last: activations come first, then their changes, then weights, movements and
    # gradients.
    kinds = ("gradient", "movement", "weight", "update", "change")
    by_observable: dict[str, list[Finding]] = {}
    for finding in findings:
        by_observable.setdefault(finding.observable, []).append(finding)
    names = sorted(by_observable, key=lambda name: [name.startswith(kind) for kind in kinds])
    rows = max(1, math.ceil(len(names) / _PANEL_COLUMNS))
    drawn = Figure(figsize=(1.9 * _PANEL_COLUMNS, 1.95 * rows + 0.9), layout="constrained")
    verdict = "passes" if passes(findings) else "fails"
    drawn.suptitle(
        f"{title}: {verdict}\n",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
        color=_INK if passes(findings) else _WRONG,
    )
    # A joint rule is measured over whole runs, whose findings all have step 0.
    steps = {0: "the whole run"}
    if any(f.step for f in findings):
        steps = {step: f"step {step}" for step in _STEP_COLOURS}

    axes = list(drawn.subplots(rows, _PANEL_COLUMNS, squeeze=False).flat)
    # The last row of panels may have more places than there are observables.
    for index, (panel, name) in enumerate(zip(axes, names, strict=False)):
        _panel(panel, by_observable[name], sizes, steps)
        # Only the lowest panel of each column shows the labels of the x axis.
        if index + _PANEL_COLUMNS < len(names):
            panel.set_xticklabels([])
    for panel in axes[len(names) :]:
        panel.set_visible(False)

    handles = _panel_handles(axes, [*steps.values(), "theory"])
    if handles:
        drawn.legend(
            handles=handles, loc="lower right", ncols=len(handles), fontsize=8, frameon=False
        )
    drawn.supxlabel(f"{axis}\n{PASSING}", x=0.01, ha="left", fontsize=8)
    drawn.savefig(path, dpi=130)


def _panel_handles(axes: Sequence[Any], labels: Sequence[str]) -> list[Any]:
    """Return handles for the legend of all panels: a line per label that was drawn, and a band."""
    lines = {}
    bands = []
    for panel in axes:
        for line in panel.get_lines():
            lines[str(line.get_label())] = line
        for patch in panel.collections:
            if patch.get_label() == _BAND:
                bands.append(patch)
    handles = []
    for label in labels:
        if label in lines:
            handles.append(lines[label])
    return handles + bands[:1]


def _panel(
    panel: Any, findings: Sequence[Finding], sizes: Sequence[float], steps: Mapping[int, str]
) -> None:
    """Draw an observable's values against size on log-log axes, one line for each step.

    The band of theory is drawn around one step only: the first that failed, or the last. The title
    has the slope and verdict of this step.

    Args:
        findings: Findings of the observable, one per step.
        steps: Number of steps to its label in the legend.
    """
    shown = next((f for f in findings if not f.ok), findings[-1])
    low = shown.expected.low
    high = shown.expected.high
    style = {"marker": "o", "markersize": 2.5, "linewidth": 1.2}
    for f in findings:
        panel.plot(sizes, f.values, color=_STEP_COLOURS[f.step], label=steps[f.step], **style)
    # A geometric mean and a logarithmic axis take only positive values.
    if all(value > 0 for value in shown.values):
        # Theory gives only the exponent, so its line goes through the middle of the values.
        centre = statistics.geometric_mean(shown.values)
        middle = statistics.geometric_mean(sizes)
        ratios = [size / middle for size in sizes]
        theory = _power_law(centre, ratios, shown.expected.slope)
        panel.plot(
            sizes,
            theory,
            color="#555555",
            linewidth=0.8,
            linestyle=(0, (3, 2)),
            label="theory",
            zorder=0,
        )
        lower = _power_law(centre, ratios, low)
        upper = _power_law(centre, ratios, high)
        panel.fill_between(
            sizes, lower, upper, color="#DDDDDD", linewidth=0, label=_BAND, zorder=-1
        )

    name = textwrap.fill(shown.observable.replace("/", ", "), 30, break_long_words=False)
    mark = "✓" if shown.ok else "✗"
    slopes = f"{mark} {shown.slope:+.2f} [{shown.low:+.2f}, {shown.high:+.2f}]"
    verdict = "" if shown.ok else f"{shown.verdict} at step {shown.step}\n"
    panel.set_title(
        f"{name}\n{slopes}\n{verdict}passes from {low:+.2f} to {high:+.2f}",
        fontsize=6.5,
        color=_INK if shown.ok else _WRONG,
    )
    panel.set_xscale("log", base=2)

    positive: list[float] = []
    for f in findings:
        for value in f.values:
            if value > 0:
                positive.append(value)
    if positive:
        panel.set_yscale("log", base=2)
        # No panel shows less than a factor of 16, so that a constant looks like one.
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


def _power_law(centre: float, ratios: Sequence[float], exponent: float) -> list[float]:
    """Return the values of a power law at sizes.

    Args:
        centre: Value at the size with the ratio 1.
        ratios: Sizes, each divided by the size at which the law has the value `centre`.
    """
    return [centre * ratio**exponent for ratio in ratios]


class CheckFailure(AssertionError):
    """Error for a coordinate check that did not pass. Its message comes from `text`."""


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
    """Print the conclusion, what to type next, and a line per observable and step, failures first.

    A console narrower than `_WIDE` gets no intervals and bands, because they would be cut off.

    Args:
        not_judged: Observables that theory says nothing about. The conclusion lists them.
        blamed: Meaning of the labels of observables. "role" is for the check of a preset, whose
            labels are roles of parameters; "number" is for the check of a joint rule, whose labels
            are hyperparameters of the optimizer.
        subject: Beginning of the conclusion, as for `verdict_line`.
        following: Sentences on what to type next, printed below the conclusion.
    """
    from rich.table import Table

    console.print(verdict_line(findings, not_judged, blamed, subject))
    for sentence in (*notes(findings), *following):
        # Rich would colour parts of a command, and take brackets in it for markup.
        console.print(sentence, highlight=False, markup=False)
    wide = console.width >= _WIDE
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1))
    table.add_column("observable", no_wrap=True)
    columns = ("after", "slope", "95 %", "theory") if wide else ("after", "slope", "theory")
    for column in columns:
        table.add_column(column, justify="left" if column == "95 %" else "right", no_wrap=True)
    table.add_column("verdict")

    for f in sorted(findings, key=lambda f: (f.ok, f.observable, f.step)):
        theory = f"{f.expected.slope:+.2f}"
        cells = [f"{f.slope:+.2f}", theory]
        if wide:
            band = f"{theory} (-{f.expected.below:.2f} +{f.expected.above:.2f})"
            cells = [f"{f.slope:+.2f}", f"[{f.low:+.2f}, {f.high:+.2f}]", band]
        after = str(f.step) if blamed == "role" else "run"
        colour = "green" if f.ok else "bold red"
        table.add_row(f.observable, after, *cells, f"[{colour}]{verdict_words(f)}[/{colour}]")
    console.print(table)
    if not wide:
        console.print(f"{PASSING}; both are here from {_WIDE} columns on")


def text(findings: Sequence[Finding], not_judged: Sequence[str] = ()) -> str:
    """Return the conclusion, and a line for each observable and step that failed.

    Args:
        not_judged: Observables that theory says nothing about. The conclusion lists them.
    """
    lines = [plain(verdict_line(findings, not_judged))]
    lines += [f"  {note}" for note in notes(findings)]
    for finding in findings:
        if not finding.ok:
            lines.append(f"  {_sentence(finding)}")
    return "\n".join(lines)


def require(findings: Sequence[Finding]) -> None:
    """Raise `CheckFailure` with the message `text(findings)` unless the check passes."""
    if not passes(findings):
        raise CheckFailure(text(findings))


def plain(line: str) -> str:
    """Return the line without markup for colours."""
    from rich.text import Text

    return Text.from_markup(line).plain


def readable(observable: str) -> str:
    """Return an observable in words: "movement of readout" for "movement/readout"."""
    column, *parameter = observable.split("/")
    return f"{column} of {', '.join(parameter)}" if parameter else column


def _sentence(finding: Finding) -> str:
    """Return a sentence on a finding: observable, step, slope, what theory allows, and verdict."""
    expected = finding.expected
    steps = f"after {finding.step} step{'s' * (finding.step > 1)}"
    if finding.step == 0:
        steps = "at the start"
    measured = f"size^{finding.slope:+.2f} [{finding.low:+.2f}, {finding.high:+.2f}]"
    allowed = f"theory {expected.slope:+.2f}, allowed {expected.low:+.2f} to {expected.high:+.2f}"
    return (
        f"{readable(finding.observable)} {steps}: {measured}, {allowed}: {verdict_words(finding)}"
    )


def verdict_words(finding: Finding) -> str:
    """Return the verdict on a finding, with the roles that theory blames if there are any."""
    if not finding.roles:
        return finding.verdict
    return f"{finding.verdict} through {', '.join(finding.roles)}"


def verdict_line(
    findings: Sequence[Finding],
    not_judged: Sequence[str] = (),
    blamed: Literal["role", "number"] = "role",
    subject: str = "",
) -> str:
    """Return the conclusion of a check in one line with Rich markup.

    It says whether the check passes. Otherwise it says whether the program deviates from its table,
    or the table itself is wrong, or both, and names the observables that failed. A check without
    findings fails.

    Args:
        not_judged: Observables that theory says nothing about, listed at the end of the line.
        blamed: What the label of an observable is, as for `show`.
        subject: Beginning of the sentence if the check passes, such as "mup follows its table as
            heads grow".
    """
    if not findings:
        return "[bold red]fails[/bold red]: nothing was measured that theory speaks of"

    contradictions = [f for f in findings if not f.agrees]
    troubles = [f for f in findings if f.agrees and f.trouble]
    table = "table" if blamed == "role" else "joint rule"
    parts = []
    if contradictions:
        evidence = _evidence(contradictions, blamed)
        parts.append(f"the program does not do what its {table} says: {evidence}")
    if troubles:
        parts.append(f"the {table} itself is wrong: {_evidence(troubles, blamed)}")

    unsaid = f"; not judged: {', '.join(not_judged)}" if not_judged else ""
    if parts:
        return f"[bold red]fails[/bold red]: {'; '.join(parts)}{unsaid}"
    about = f"{subject}: " if subject else ""
    passed = f"all {len(findings)} observables within theory"
    return f"[bold green]passes[/bold green]: {about}{passed}{unsaid}"


def notes(findings: Sequence[Finding]) -> list[str]:
    """Return sentences on a failing check at too high a rate, and on what it does not observe."""
    sentences = []
    if not passes(findings) and any(finding.diverges for finding in findings):
        sentences.append(
            "the learning rate is too high: at every size the loss rises above its start or is not "
            "finite, and slopes then say little about rules; check at a lower peak_lr"
        )
    observables = {finding.observable for finding in findings}
    has_queries = any(name.endswith((".query", "/query")) for name in observables)
    if has_queries and "attention" not in observables:
        sentences.append(
            "attention logits are not observed: give the model a method internals(inputs) that "
            'returns {"attention": logits of the softmax, [layers, batch, heads, queries, keys]}'
        )
    return sentences


def _evidence(failed: Sequence[Finding], blamed: str) -> str:
    """Return the failed observables in words: first activations, then parameters.

    Parameters are grouped by their label. At most six activations and six groups are named, and the
    rest are counted.

    Args:
        blamed: Word for the labels, "role" or "number", as for `show`.
    """
    # A dict keeps the order and drops words that come twice.
    activations: dict[str, None] = {}
    kinds_of_group: dict[str, list[str]] = {}
    words_of_group: dict[str, list[str]] = {}
    for finding in failed:
        kind, *label = finding.observable.split("/")
        if not label:
            activations[f"{finding.observable} {verdict_words(finding)}"] = None
            continue
        group = label[0]
        kinds_of_group.setdefault(group, []).append(kind)
        words_of_group.setdefault(group, []).append(_parameter_words(finding))

    # A wrong weight or movement is its role's own fault. A wrong gradient may come from elsewhere.
    rank = {kind: index for index, kind in enumerate(_BY_ROLE)}

    def group_rank(group: str) -> int:
        return min(rank.get(kind, 0) for kind in kinds_of_group[group])

    rows = []
    for group in sorted(kinds_of_group, key=group_rank):
        words = ", ".join(dict.fromkeys(words_of_group[group]))
        rows.append(f"{group} ({words})")

    parts = []
    if activations:
        parts.append("; ".join(_first(list(activations))))
    if rows:
        parts.append(f"by {blamed}: {', '.join(_first(rows))}")
    return "; ".join(parts)


def _parameter_words(finding: Finding) -> str:
    """Return words such as "movement of gate in layer 3" for a failed finding of a parameter.

    If the measurement agrees with theory, the trouble of the table follows.
    """
    kind, _, *parts = finding.observable.split("/")
    words = kind
    for part in parts:
        words += f" of {part}"
    if finding.layer:
        words += f" in {finding.layer}"
    return words if not finding.agrees else f"{words}: {finding.trouble}"


def _first(names: list[str], count: int = 6) -> list[str]:
    """Return the first `count` names and "and N more", or all names if they are not more."""
    if len(names) <= count:
        return names
    return [*names[:count], f"and {len(names) - count} more"]


def to_json(
    findings: Sequence[Finding], about: dict[str, Any], not_judged: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a check as a dict of plain values that `json.dumps` can write.

    The entry `verdict` is "pass" or "fail". It combines two others: `program` (measurements agree
    with theory) and `table` (theory foretells no trouble). The entry `observables` has a dict per
    finding.

    Args:
        about: Facts on what was run, by name, such as the model and the preset. They become
            entries, too.
        not_judged: Observables of parameters that theory says nothing about.
    """
    rows = [_row_json(finding) for finding in findings]
    verdicts = {
        "verdict": passes(findings),
        # Without findings nothing was compared, which is no pass.
        "program": bool(findings) and all(f.agrees for f in findings),
        "table": not any(f.trouble for f in findings),
    }
    words = {}
    for name, passed in verdicts.items():
        if passed:
            words[name] = "pass"
        else:
            words[name] = "fail"
    return {**words, **about, "not_judged": list(not_judged), "observables": rows}


def _row_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as a dict for JSON, with `None` for numbers that are not finite."""
    return {
        "observable": finding.observable,
        "step": finding.step,
        "slope": finite(finding.slope),
        "low": finite(finding.low),
        "high": finite(finding.high),
        "predicted": finding.expected.slope,
        "ok": finding.ok,
        "verdict": finding.verdict,
        "roles": list(finding.roles),
        "values": [finite(value) for value in finding.values],
    }
