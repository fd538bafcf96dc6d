"""A coordinate check as a person reads it (one line per observable), as JSON, and as a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from train import check
from train.check import Finding

_COLOURS = {"as predicted": "green", "measured": "dim"}
_PANEL_COLUMNS = 6


def show(console: Console, findings: Sequence[Finding], title: str) -> None:
    """One line per observable and step, worst first within what theory speaks of, and the verdict."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for column, side in (
        ("observable", "left"),
        ("after", "right"),
        ("slope", "right"),
        ("95 %", "left"),
        ("theory", "right"),
        ("verdict", "left"),
    ):
        table.add_column(column, justify=side, no_wrap=True)  # pyright: ignore[reportArgumentType]
    for finding in sorted(findings, key=lambda f: (f.ok, f.observable, f.step)):
        colour = _COLOURS.get(finding.verdict, "bold red")
        theory = "" if finding.expected is None else _band(finding)
        table.add_row(
            finding.observable,
            str(finding.step),
            f"{finding.slope:+.2f}",
            f"[{finding.low:+.2f}, {finding.high:+.2f}]",
            theory,
            f"[{colour}]{finding.verdict}[/{colour}]",
        )
    console.print(table)
    console.print(verdict_line(findings))


def _band(finding: Finding) -> str:
    assert finding.expected is not None
    slope, below, above = finding.expected.slope, finding.expected.below, finding.expected.above
    return f"{slope:+.2f} (-{below:.2f} +{above:.2f})"


def verdict_line(findings: Sequence[Finding]) -> str:
    """The verdict in a line: what gave a wrong rule away, by name."""
    bad = [f for f in findings if not f.ok]
    if not findings:
        return "[bold red]fails[/bold red]: nothing was measured that theory speaks of"
    if not bad:
        return f"[bold green]passes[/bold green]: all {len(findings)} observables as predicted"
    names = list(dict.fromkeys(f"{f.observable} ({f.verdict})" for f in bad))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"[bold red]fails[/bold red]: {shown}"


def to_json(findings: Sequence[Finding], about: dict[str, Any]) -> dict[str, Any]:
    """`verdict` (pass or fail), what was run, and per observable `slope`, `low`, `high`, `predicted`, `ok`."""
    return {
        "verdict": "pass" if check.passes(findings) else "fail",
        **about,
        "observables": [
            {
                "observable": f.observable,
                "step": f.step,
                "slope": _finite(f.slope),
                "low": _finite(f.low),
                "high": _finite(f.high),
                "predicted": None if f.expected is None else f.expected.slope,
                "ok": f.ok,
                "verdict": f.verdict,
                "values": [_finite(v) for v in f.values],
            }
            for f in findings
        ],
    }


def write_json(path: Path | str, findings: Sequence[Finding], about: dict[str, Any]) -> None:
    """Write `to_json` as a file."""
    Path(path).write_text(json.dumps(to_json(findings, about), indent=2) + "\n")


def figure(path: Path | str, findings: Sequence[Finding], sizes: Sequence[float], axis: str, title: str) -> None:
    """One small log-log panel per observable: a line per step, the last step's slope in the title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(f.observable for f in findings))
    rows = max(1, math.ceil(len(names) / _PANEL_COLUMNS))
    drawn = Figure(figsize=(2.2 * _PANEL_COLUMNS, 1.9 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    panels = drawn.subplots(rows, _PANEL_COLUMNS, squeeze=False).flat
    colours = {0: "#999999", 1: "#56B4E9", 3: "#0072B2", 10: "#D55E00"}
    for panel, name in zip(panels, names, strict=False):
        own = [f for f in findings if f.observable == name]
        for f in own:
            panel.plot(
                sizes,
                f.values,
                marker="o",
                markersize=2.5,
                linewidth=1,
                color=colours.get(f.step, "#000000"),
                label=f"step {f.step}",
            )
        last, fine = own[-1], all(f.ok for f in own)
        panel.set_title(
            f"{name}\n{last.slope:+.2f}" + ("" if fine else "  ✗"), fontsize=7, color="black" if fine else "#B00020"
        )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.tick_params(labelsize=5)
        middle = [v for f in own for v in f.values if v > 0]
        if middle and max(middle) / min(middle) < 4:  # what does not move should look as if it does not
            centre = math.sqrt(max(middle) * min(middle))
            panel.set_ylim(centre / 2, centre * 2)
        panel.minorticks_off()
        panel.grid(color="#EEEEEE", linewidth=0.5)
    for panel in list(panels):
        panel.set_visible(False)
    for panel in drawn.axes[len(names) :]:
        panel.set_visible(False)
    if names:
        richest = max(drawn.axes[: len(names)], key=lambda axes: len(axes.lines))
        richest.legend(fontsize=5, frameon=False)
        drawn.supxlabel(axis, fontsize=8)
    drawn.savefig(path, dpi=130)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
