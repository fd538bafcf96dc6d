"""Text of docs/evidence/quality.md, made from each cell's result.json.

`python -m scripts.quality` writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from scripts.quality.cells import CELLS

JOINS = 0.005
"""Nats that a probed group must gain to be searched at every size."""
GOAL = 0.005
"""Upper end of a difference's 95 % interval, in nats, up to which an arm counts as not worse."""

Record = Mapping[str, Any]
"""Object of a result.json: a cell, an arm or a size."""

HEAD = f"""# Does a tuned preset win?

A learning rate that transfers is worth nothing if the large model is worse. This page compares training losses:

* **The preset** is tuned once, at the smallest size: learning rate, rates of readout and input embedding, initial std of the
  readout. Larger models use these constants unchanged.
* **`sp`** has the same constants at the base, where both are one model. At every larger size its learning rate and its readout's
  rate are searched again, and over width at 800 steps the input embedding's, too. There the rate of every other group is moved
  once by two octaves up and down, at four times the base. A group that gains more than {JOINS:.3f} nats joins the search.

Losses are means over the last tenth of a run. Every run sees the same examples in the same order. Differences are paired by seed,
with a 95 % t interval. Below zero the preset is ahead. **Not worse** means that the interval ends at or below {GOAL:+.3f} nats.

`python -m scripts.quality` trains what is missing and writes this page. A cell's folder has its runs and every difference.
"""
COLUMNS = """The tables of the cells have losses in nats by size. The last column is the first row less this row at the largest
size. Rows that end in "as sp has it" are `mup` with one rule of `sp`, and their learning rate is searched at every size. Their last
column is `mup` less the row. Constants of the base are multiples of the recipe's.
"""
LESS = "first less this"
READING = {
    "head_dim-100": "**Not shown**: constants of width 64 do not serve larger models at this "
    "horizon. `mup`'s best readout rate falls from 2^3 at width 64 to 2^1 at 256 and stays there. "
    "Searched again as `sp` is, `mup` with a readout std of m^-1/2 ends at or below `sp` at every "
    "size (-0.005, -0.000, -0.009 nats). Tuned at width 128 it ends 0.002 nats above `sp` at 512.",
    "heads-100": "**Not worse** with readout std and embedding rate as m^-1/2. Tuning "
    "at the base alone loses nothing: searched again, `mup`'s rates stay where they are, and "
    "`sp`'s rate falls by an octave per doubling. Plain `mup`, whose readout starts as m^-1, is "
    "0.021 behind at eight times.",
    "depth-100": "**Not worse** with both, and further ahead the deeper the model: 0.036 nats at "
    "depth 16 with branches of L^-1/2, 0.092 with branches of L^-1.",
    "depth-800": "**Not worse** with branches of L^-1 (alpha_L 1). Branches of L^-1/2 are 0.036 "
    "nats ahead at 16 layers after 100 steps and 0.028 behind after 800.",
    "heads-800": "**Not worse** with readout std and embedding rate as m^-1/2, "
    "against an `sp` whose embedding rate is not searched yet. Plain `mup` is ahead at two and "
    "four times and 0.009 behind at eight. `sp`'s best rate falls by an octave per doubling. "
    "At 32 heads the comparison was stopped at six seeds.",
    "head_dim-800": "**Not worse** against two constants of `sp` tuned anew. **Level** with seven, at "
    "four times the width: the first row is 0.003 ± 0.009 nats lower than `sp`, and plain `mup` "
    "0.003 ± 0.009 higher (eight seeds). Tuning once costs nothing there that can be measured, and "
    "wins nothing. Eight times is begun.",
    "vit-800": "**Not worse** against an `sp` whose patch embedding's rate is not searched. Searched "
    "at twice the width, `sp` is 0.012 ± 0.025 nats behind the first row (five seeds), which cannot "
    "be told from zero. Four and eight times are to be searched.",
    "vit-100": "**Not shown** at two and four times, not worse at eight. 100 steps of these images "
    "end on a plateau (1.62 nats at every size, under every rule) on which width hardly counts.",
}
"""Name of a cell to the conclusion that a person drew from its numbers."""


class Difference(NamedTuple):
    """Mean of paired differences, in nats, with its uncertainty."""

    mean: float
    error: float
    """Standard error of the mean."""
    half_width: float
    """Half-width of the 95 % t interval."""


def difference(gap: Sequence[float] | np.ndarray) -> Difference:
    """Return the mean of paired differences [seeds] with its 95 % t interval.

    Args:
        gap: Differences of at least 2 seeds.
    """
    values = np.asarray(gap, float)
    error = float(values.std(ddof=1) / np.sqrt(len(values)))
    half_width = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return Difference(float(values.mean()), error, half_width)


def records() -> list[dict[str, Any]]:
    """Return result.json of every cell that has one."""
    paths = [cell.folder / "result.json" for cell in CELLS.values()]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def markdown(cells: Iterable[Record]) -> str:
    """Return the page's Markdown, made from the records of the cells."""
    cells = list(cells)
    lines = [HEAD, *_summary(cells), COLUMNS]
    for cell in cells:
        lines += _section(cell)
    return "\n".join(lines)


def _summary(cells: Sequence[Record]) -> list[str]:
    """Return the table of all arms whose constants transfer, and the cells that have no record.

    A row has the arm's loss less `sp`'s at every size but the base.
    """
    lines = [
        "| what grows, steps | transferred from the base | less `sp`, in nats, at 2, 4 and 8 times | not worse |",
        "|---|---|---|---|",
    ]
    for cell in cells:
        baseline = _most_tuned_sp(cell["arms"])
        num_sizes = max(len(arm["sizes"]) for arm in cell["arms"])
        for arm in cell["arms"]:
            if arm["tuned"] or arm["ablation"]:
                continue
            differences = _differences(arm, baseline)
            figures = ", ".join(map(_interval, differences))
            if len(differences) < num_sizes - 1:
                verdict = "not finished"
            elif all(gap.mean + gap.half_width <= GOAL for gap in differences):
                verdict = "yes"
            else:
                verdict = "no"
            lines.append(f"| {cell['cell']} | {arm['label']} | {figures} | {verdict} |")
    lines.append("")
    trained = {cell["cell"] for cell in cells}
    missing = [name for name in CELLS if name not in trained]
    if missing:
        lines += [f"Not trained: {', '.join(missing)}.", ""]
    return lines


def _most_tuned_sp(arms: Sequence[Record]) -> Record:
    """Return the `sp` arm that searches the most constants at every size."""
    baselines = [arm for arm in arms if arm["label"].startswith("sp")]
    return max(baselines, key=lambda arm: len(arm["tuned"]))


def _differences(arm: Record, baseline: Record) -> list[Difference]:
    """Return an arm's loss less the baseline's at every size but the base, paired by seed.

    Sizes at which fewer than two seeds can be paired are left out.
    """
    differences = []
    for row, baseline_row in zip(arm["sizes"][1:], baseline["sizes"][1:], strict=False):
        pairs = _paired_differences(row["losses"], baseline_row["losses"])
        if len(pairs) > 1:
            differences.append(difference(pairs))
    return differences


def _paired_differences(
    losses: Sequence[float | None], baseline: Sequence[float | None]
) -> list[float]:
    """Return differences of the seeds that both arms have, or none if one of the seeds diverged."""
    differences = []
    for loss, baseline_loss in zip(losses, baseline, strict=False):
        if loss is None or baseline_loss is None:
            return []
        differences.append(loss - baseline_loss)
    return differences


def _section(cell: Record) -> list[str]:
    """Return the section of a cell: its conclusion, its constants and the losses of every arm."""
    name = cell["cell"]
    arms = cell["arms"]
    base = arms[0]["sizes"][0]
    most_sizes = max((arm["sizes"] for arm in arms), key=len)
    # All arms are one model at the base, so its loss has no column.
    sizes = [row["size"] for row in most_sizes[1:]]
    lines = [f"## {name}", ""]
    if name in READING:
        lines += [READING[name], ""]
    lines += [
        f"Base: {cell['axis']} {base['size']}, {_loss(base['losses'])} nats at "
        f"{_setting(base['octaves'])} ([record](quality/{name}/result.json)).",
        "",
        f"| {cell['axis']} | {' | '.join(map(str, sizes))} | {LESS} |",
        f"|---|{'---|' * (len(sizes) + 1)}",
    ]
    for index, arm in enumerate(arms):
        losses = [_loss(row["losses"]) for row in arm["sizes"][1:]]
        is_complete = len(losses) == len(sizes)
        losses += [""] * (len(sizes) - len(losses))
        gap = ""
        if index > 0 and is_complete:
            gap = _reference_difference(arm["sizes"][-1])
        lines.append(f"| {arm['label']} | {' | '.join(losses)} | {gap} |")
    return [*lines, "", *_probes(cell)]


def _probes(cell: Record) -> list[str]:
    """Return a table of the gains of a cell's probed groups for every arm, each with a sentence."""
    lines: list[str] = []
    for label, probes in cell.get("probes", {}).items():
        size = CELLS[cell["cell"]].probe_size
        joined = sorted({probe["group"] for probe in probes if _mean(probe["gains"]) > JOINS})
        if joined:
            verdict = f"joined the search: {', '.join(f'`{group}`' for group in joined)}"
        else:
            verdict = "none gains enough to join the search"
        lines += [
            f"`{label}`, rates of other groups moved by two octaves at {cell['axis']} {size} "
            f"(nats gained, mean of two seeds): {verdict}.",
            "",
            "| group | × 2^-2 | × 2^2 |",
            "|---|---|---|",
        ]
        gains = {(probe["group"], probe["octaves"]): probe["gains"] for probe in probes}
        for group in dict.fromkeys(probe["group"] for probe in probes):
            lines.append(f"| {group} | {_gain(gains[group, -2])} | {_gain(gains[group, 2])} |")
        lines.append("")
    return lines


def _mean(gains: Sequence[float | None]) -> float:
    """Return the mean gain over seeds, minus infinity if a run diverged."""
    if None in gains:
        return -np.inf
    return float(np.mean(np.array(gains, float)))


def _gain(gains: Sequence[float | None]) -> str:
    mean = _mean(gains)
    return f"{mean:+.4f}" if np.isfinite(mean) else "diverged"


def _loss(losses: Sequence[float | None]) -> str:
    return "diverged" if None in losses else f"{np.mean(np.array(losses, float)):.4f}"


def _interval(gap: Difference) -> str:
    return f"{gap.mean:+.4f} ± {gap.half_width:.4f}"


def _reference_difference(row: Record) -> str:
    """Return the reference's loss less an arm's at one size, empty if there is no comparison."""
    differences = row["reference_minus_this"]
    return _interval(difference(differences)) if differences else ""


def _setting(octaves: Mapping[str, float]) -> str:
    """Return the constants of a setting in words, as powers of two."""
    terms = []
    for constant, value in octaves.items():
        column, _, group = constant.replace("_", " ").partition(".")
        if column == "lr":
            name = "rate"
        elif column == "rates":
            name = f"{group}'s rate"
        else:
            name = f"{group}'s std"
        terms.append(f"{name} 2^{value:g}")
    return ", ".join(terms) or "as the recipe"
