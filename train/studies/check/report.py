"""A coordinate check as a person reads it (one line per observable), as JSON, and as a figure."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from mupax.train.studies.check.check import Finding, passes

_BY_ROLE = ("weight", "movement", "gradient")
_PANEL_COLUMNS = 7
_WIDE = 112
"""Columns of a terminal from which on intervals and bands fit in beside the verdict."""
PASSING = "a slope passes where its 95 % interval over seeds meets the band that theory leaves to finite sizes"
_BAND, _INK, _WRONG = "band that passes", "black", "#B00020"
_STEP_COLOURS = {0: "#999999", 1: "#56B4E9", 3: "#0072B2", 10: "#D55E00"}


def show(
    console: Console,
    findings: Sequence[Finding],
    title: str,
    not_judged: Sequence[str] = (),
    blamed: Literal["role", "number"] = "role",
) -> None:
    """One line per observable and step, worst first within what theory speaks of, and the verdicts.

    A console narrower than `_WIDE` has no intervals and bands: a slope cut off in the middle would be nothing.

    Args:
        console: to print on.
        findings: of the check.
        title: above the table.
        not_judged: observables that theory says nothing about.
        blamed: what comes behind the stroke of an observable: a parameter's role, or a number of the optimizer over a whole run.
    """
    wide = console.width >= _WIDE
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
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
        table.add_row(f.observable, after, *cells, f"[{colour}]{_words(f)}[/{colour}]")
    console.print(table)
    if not wide:
        console.print(f"{PASSING}; both are here from {_WIDE} columns on")
    console.print(verdict_line(findings, not_judged, blamed))


def _words(finding: Finding) -> str:
    return finding.verdict + (f" through {', '.join(finding.roles)}" if finding.roles else "")


def verdict_line(
    findings: Sequence[Finding], not_judged: Sequence[str] = (), blamed: Literal["role", "number"] = "role"
) -> str:
    """Both verdicts in a line: what gave a wrong program or table away, the roles whose own lines are wrong, what nothing was said of.

    Args:
        findings: of the check.
        not_judged: observables that theory says nothing about.
        blamed: as in `show`.
    """
    if not findings:
        return "[bold red]fails[/bold red]: nothing was measured that theory speaks of"
    wrong, bad = [f for f in findings if not f.agrees], [f for f in findings if f.agrees and f.trouble]
    table = "table" if blamed == "role" else "joint rule"
    parts = [f"the program does not do what its {table} says: {_evidence(wrong, blamed)}"] if wrong else []
    parts += [f"the {table} itself is wrong: {_evidence(bad, blamed)}"] if bad else []
    unsaid = f"; not judged: {', '.join(not_judged)}" if not_judged else ""
    if not parts:
        return f"[bold green]passes[/bold green]: all {len(findings)} observables as predicted{unsaid}"
    return f"[bold red]fails[/bold red]: {'; '.join(parts)}{unsaid}"


def _evidence(bad: Sequence[Finding], blamed: str) -> str:
    activations = dict.fromkeys(f"{f.observable} {_words(f)}" for f in bad if "/" not in f.observable)
    groups: dict[str, list[tuple[str, str]]] = {}
    for f in bad:
        what, *group = f.observable.split("/")
        if group:
            part = "".join(f" of {name}" for name in group[1:]) + (f" in {f.layer}" if f.layer else "")
            groups.setdefault(group[0], []).append(
                (what, what + part if not f.agrees else f"{what}{part}: {f.trouble}")
            )
    # A wrong weight or movement is its role's own; a wrong gradient may come from elsewhere.
    rank = {what: index for index, what in enumerate(_BY_ROLE)}
    order = sorted(groups, key=lambda group: min(rank.get(what, 0) for what, _ in groups[group]))
    rows = [f"{group} ({', '.join(dict.fromkeys(words for _, words in groups[group]))})" for group in order]
    parts = ["; ".join(_first(list(activations)))] if activations else []
    parts += [f"by {blamed}: {', '.join(_first(rows))}"] if rows else []
    return "; ".join(parts)


def _first(names: list[str], count: int = 6) -> list[str]:
    return names[:count] + ([f"and {len(names) - count} more"] if len(names) > count else [])


def to_json(findings: Sequence[Finding], about: dict[str, Any], not_judged: Sequence[str] = ()) -> dict[str, Any]:
    """`verdict` (pass or fail), that of the `program` and of the `table`, what was run, and what was seen of every observable.

    Args:
        findings: of a check.
        about: what was run.
        not_judged: observables of parameters that theory says nothing about.
    """
    rows = [
        {"observable": f.observable, "step": f.step, "slope": _finite(f.slope), "low": _finite(f.low),
         "high": _finite(f.high), "predicted": f.expected.slope, "ok": f.ok,
         "verdict": f.verdict, "roles": list(f.roles), "values": [_finite(v) for v in f.values]}
        for f in findings
    ]  # fmt: skip
    verdicts = {
        "verdict": passes(findings),
        "program": bool(findings) and all(f.agrees for f in findings),
        "table": not any(f.trouble for f in findings),
    }
    words = {name: "pass" if passed else "fail" for name, passed in verdicts.items()}
    return {**words, **about, "not_judged": list(not_judged), "observables": rows}


def figure(path: Path | str, findings: Sequence[Finding], sizes: Sequence[float], axis: str, title: str) -> None:
    """Draw a small log-log panel per observable: a line per step, theory dashed with its band shaded, and a verdict in its title.

    The title has the slope of the last step, or of the first that is wrong, its interval, and the slopes that pass.

    Args:
        path: of the picture.
        findings: of a check.
        sizes: that grew.
        axis: their name.
        title: above all.
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
        f"{head}\n", x=0.01, ha="left", fontsize=11, fontweight="bold", color=_INK if passes(findings) else _WRONG
    )
    steps = {step: f"step {step}" for step in _STEP_COLOURS} if any(f.step for f in findings) else {0: "the whole run"}
    panels = list(drawn.subplots(rows, _PANEL_COLUMNS, squeeze=False).flat)
    for index, (panel, name) in enumerate(zip(panels, names, strict=False)):
        _panel(panel, [f for f in findings if f.observable == name], sizes, steps)
        if index + _PANEL_COLUMNS < len(names):
            panel.set_xticklabels([])
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    lines = {str(line.get_label()): line for panel in panels for line in panel.get_lines()}
    handles: list[Any] = [lines[label] for label in (*steps.values(), "theory") if label in lines]
    if bands := [patch for panel in panels for patch in panel.collections if patch.get_label() == _BAND]:
        handles.append(bands[0])
    if handles:
        drawn.legend(handles=handles, loc="lower right", ncols=len(handles), fontsize=8, frameon=False)
    drawn.supxlabel(f"{axis}\n{PASSING}", x=0.01, ha="left", fontsize=8)
    drawn.savefig(path, dpi=130)


def _panel(panel: Any, findings: Sequence[Finding], sizes: Sequence[float], steps: Mapping[int, str]) -> None:
    """One observable at every step read."""
    shown = next((f for f in findings if not f.ok), findings[-1])
    low, high = shown.expected.slope - shown.expected.below, shown.expected.slope + shown.expected.above
    style = {"marker": "o", "markersize": 2.5, "linewidth": 1.2}
    for f in findings:
        panel.plot(sizes, f.values, color=_STEP_COLOURS[f.step], label=steps[f.step], **style)
    if all(value > 0 for value in shown.values):
        centre, middle = statistics.geometric_mean(shown.values), statistics.geometric_mean(sizes)
        theory = [centre * (size / middle) ** shown.expected.slope for size in sizes]
        panel.plot(sizes, theory, color="#555555", linewidth=0.8, linestyle=(0, (3, 2)), label="theory", zorder=0)
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
        most, least = max(positive), min(positive)
        centre, half = math.sqrt(most * least), max(4.0, 1.4 * math.sqrt(most / least))
        panel.set_ylim(centre / half, centre * half)
    panel.set_xticks(list(sizes), [f"{size:g}" for size in sizes])
    panel.tick_params(labelsize=5, length=2)
    panel.minorticks_off()
    panel.grid(color="#EEEEEE", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
