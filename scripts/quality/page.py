"""Text of docs/evidence/quality.md, made from each cell's result.json.

`python -m scripts.quality` writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from scripts.pages.markdown import table
from scripts.quality.cells import CELLS, MORE, OUT

SHORT_LABELS = {
    "readout std and embedding rate m^-1/2": "both m^-1/2",
    "rate, readout's and embedding's rate tuned anew": "all tuned anew",
    "rate and readout's rate tuned anew": "two tuned anew",
    MORE: "more constants",
}
"""Parts of an arm's label in the records to their form on the page, whose head explains them."""
JOINS = 0.005
"""Nats that a probed group must gain to be searched at every size."""
RATES_PICTURE = "rates.png"
"""Name of a picture of loss against learning rate, in the folder of its cell."""
GOAL = 0.005
"""Upper end of a difference's 95 % interval, in nats, up to which an arm counts as not worse."""

Record = Mapping[str, Any]
"""Object of a result.json: a cell, an arm or a size."""

HEAD = f"""# Does a tuned preset win?

This page compares training losses of two ways to choose the constants of larger models. The
smallest model of a comparison is its base.

* **The preset** is tuned at the base alone. A search chooses the learning rate, its multipliers for the readout and the input embedding
  (their "rates" in the tables), and the readout's initial std. Larger models keep these constants, except in rows with
  "tuned" or "as sp has".
* **`sp`**, the standard parameterization, starts from the same constants. At every larger size, its learning rate and the readout's
  multiplier are searched again ("two tuned anew"). Rows with "all tuned anew", and `sp` in `muon` sections, also search the
  multipliers of the input embedding and of parameter groups that gain more than {JOINS:.3f} nats from a factor of four at
  four times the base.
  In rows with "more constants", the preset's search at the base has these groups, too.

A section's name has the growing size and the number of steps. `vit` sections grow in head dimension, `muon` sections in heads, under
Muon. `muon-shipped-100` searches nothing at the base: it has `lm-laptop`'s constants. m and L are width and depth, divided by
the base's. "Readout std m^-1/2" means that the readout's initial std falls as m^-1/2, "both m^-1/2" the embedding's learning rate, too.

A run's loss is the mean over its last tenth. Runs of a comparison see the same examples in the same order. Differences are paired
by seed (5 to 12), with a 95 % t interval. *Yes* means that all intervals of a row end at or below {GOAL:+.3f} nats (**not
worse**), **not shown** that no row of a section has *yes*. Where a section has two `sp` rows, "less `sp`" is the difference from the second.

`python -m scripts.quality` trains missing runs and writes this page; `--rates` measures the picture.
"""
COLUMNS = """Tables of sections have mean losses in nats. Rows with "as sp has" are `mup` with one rule of `sp` and a learning rate
searched at every size; the last column is `mup`'s loss minus theirs at the largest size, over the seeds that both have.
"""
LESS = "mup less this"
READING = {
    "head_dim-100": "**Not shown** to be not worse than `sp`. If `mup`'s learning rate and readout's multiplier are "
    "searched at every size, too, with readout std m^-1/2, its losses are 0.005, 0.000 and 0.009 nats below `sp`'s, "
    "and this multiplier falls from 8 to 2.",
    "heads-100": "**Not worse** than `sp` if the readout's std and the embedding's learning rate fall as m^-1/2. "
    "A new search at larger sizes keeps `mup`'s learning rate, while `sp`'s halves with each doubling of heads.",
    "depth-100": "**Not worse** than `sp` with residual branches scaled by L^-1/2 (`depth-mup`) and by L^-1 (`alpha_L 1`).",
    "depth-800": "**Not worse** than `sp` with residual branches scaled by L^-1 (`alpha_L 1`). By L^-1/2, the preset's loss "
    "at depth 16 is 0.028 nats above `sp`'s.",
    "heads-800": "**Not shown** to be not worse than an `sp` with six searched constants. At eight times the base, the "
    "first row ends 0.007 ± 0.007 nats above it, plain `mup` 0.027 ± 0.013. At two and four times, no difference could be "
    "measured. An `sp` with two ends above the first row. More constants at the base change nothing.",
    "head_dim-800": "**Not shown** to be not worse than an `sp` with seven searched constants. At eight times "
    "the base, the first row ends 0.009 ± 0.008 nats above it, plain `mup` 0.032 ± 0.008, or 0.026 ± 0.006 with more "
    "constants. At four times, no difference could be measured. An `sp` with two ends above the preset's rows.",
    "vit-800": "**Not shown** to be not worse than an `sp` with nine searched constants. At two, four and eight times the base, "
    "`mup` ends 0.086, 0.064 and 0.047 nats above it, or 0.039, 0.053 and 0.024 with more constants, "
    "which lower the base's loss from 1.170 to 1.106.",
    "muon-100": "**Not shown** to be not worse than `sp`. At 16 heads, `mup` ends 0.036 nats above it, and 0.002 if the "
    "readout's rate falls as m^-2.",
    "muon-shipped-100": "**Not shown** to be not worse than `sp`. At 16 heads, `mup` ends 0.022 nats above it; m^-2 is no "
    "help. `sp` was tuned over 100 steps, `lm-laptop`'s constants over 1,250.",
    "vit-100": "**Not shown** to be not worse than `sp`. At 8 times the base, all `mup` losses are below `sp`'s.",
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
    """Return the table of arms that keep the base's constants, and the cells without a record.

    A row has the arm's loss less `sp`'s at every size but the base.
    """
    rows = [["section", "transferred", "less `sp`, in nats, at 2, 4 and 8 times", "not worse"]]
    for cell in cells:
        section = cell["cell"]  # only the first row of a section names it
        baseline = _most_tuned_sp(cell["arms"])
        num_sizes = max(len(arm["sizes"]) for arm in cell["arms"])
        for arm in _distinct(cell["arms"]):
            if arm["tuned"] or arm["ablation"]:
                continue
            differences = _differences(arm, baseline)
            figures = ", ".join(map(difference_text, differences))
            # A loss of None is that of a seed that diverged.
            if any(None in row["losses"] for row in arm["sizes"]):
                verdict = "no, a seed diverged"
            elif len(differences) < num_sizes - 1:
                verdict = "not finished"
            elif all(gap.mean + gap.half_width <= GOAL for gap in differences):
                verdict = "yes"
            else:
                verdict = "no"
            rows.append([section, _short_label(arm), figures, verdict])
            section = ""
    lines = [table(rows), ""]
    trained = {cell["cell"] for cell in cells}
    missing = [name for name in CELLS if name not in trained]
    if missing:
        lines += [f"Not trained: {', '.join(missing)}.", ""]
    return lines


def _distinct(arms: Sequence[Record]) -> list[Record]:
    """Return the arms without those whose search of more constants ended where the shorter one did.

    They would be the same models twice, with losses over other numbers of seeds.
    """
    settings = {arm["label"]: _setting(arm) for arm in arms}
    distinct = []
    for arm in arms:
        shorter = arm["label"].removesuffix(f", {MORE}")
        if shorter == arm["label"] or settings[shorter] != settings[arm["label"]]:
            distinct.append(arm)
    return distinct


def _short_label(arm: Record) -> str:
    """Return an arm's label as the page shows it."""
    label = arm["label"]
    for part, short in SHORT_LABELS.items():
        label = label.replace(part, short)
    return label


def _setting(arm: Record) -> list[dict[str, float]]:
    """Return an arm's constants at every size, in octaves, without those left as they are."""
    setting = []
    for row in arm["sizes"]:
        setting.append({name: octaves for name, octaves in row["octaves"].items() if octaves})
    return setting


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
    """Return differences of the seeds that both arms have, or an empty list if a seed diverged."""
    differences = []
    for loss, baseline_loss in zip(losses, baseline, strict=False):
        if loss is None or baseline_loss is None:
            return []
        differences.append(loss - baseline_loss)
    return differences


def _section(cell: Record) -> list[str]:
    """Return the section of a cell: its conclusion, its base and the losses of every arm."""
    name = cell["cell"]
    arms = _distinct(cell["arms"])
    base = arms[0]["sizes"][0]
    most_sizes = max((arm["sizes"] for arm in arms), key=len)
    # All arms are one model at the base, so its loss has no column.
    sizes = [row["size"] for row in most_sizes[1:]]
    lines = [f"## {name}", ""]
    if name in READING:
        lines += [READING[name], ""]
    if (OUT / name / RATES_PICTURE).exists():
        picture = f"quality/{name}/{RATES_PICTURE}"
        lines += [f"![Loss against learning rate]({picture})", ""]
    header = [str(size) for size in sizes]
    has_ablations = any(arm["ablation"] for arm in arms)
    if has_ablations:
        header.append(LESS)
    lines += [
        f"Base: [{cell['axis']} {base['size']}](quality/{name}/result.json), "
        f"{_loss(base['losses'])} nats.",
        "",
    ]
    rows = [[cell["axis"], *header]]
    for arm in arms:
        cells = [_loss(row["losses"]) for row in arm["sizes"][1:]]
        is_complete = len(cells) == len(sizes)
        cells += [""] * (len(header) - len(cells))
        if arm["ablation"] and is_complete:
            cells[-1] = _reference_difference(arm["sizes"][-1])
        rows.append([_short_label(arm), *cells])
    return [*lines, table(rows), ""]


def _loss(losses: Sequence[float | None]) -> str:
    return "diverged" if None in losses else f"{np.mean(np.array(losses, float)):.4f}"


def difference_text(gap: Difference) -> str:
    """Return a difference with its interval, as a cell of a table."""
    return f"{gap.mean:+.4f} ± {gap.half_width:.4f}"


def _reference_difference(row: Record) -> str:
    """Return the reference's loss less an arm's at one size, empty if there is no comparison."""
    differences = row["reference_minus_this"]
    return difference_text(difference(differences)) if differences else ""
