"""The page of what a tuned preset is worth, from each cell's result.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from scripts.quality.cells import CELLS

GOAL = 0.005
"""Upper end of the 95 % interval of a difference, in nats, that counts as not worse."""
HEAD = f"""# Does a tuned preset win?

A rate that transfers to a worse model is worth nothing. Here constants are tuned **once, at the smallest size** (rate, rates of the
readout and of the embedding, the readout's initial std) and the large models take them through the preset, untouched. Against them
stands `sp` with the same constants at the base, where the two are the same model, and then its rate and its readout's rate **searched
anew at every size**. Losses are means over the last tenth of a run's steps on text or images that every run sees in the same order;
differences are paired by seed, with a 95 % t interval; below zero the preset is ahead. **Not worse**: the interval ends at or below
{GOAL:+.3f} nats.

Arms in which `mup` has one rule as `sp` has it, relative to the hidden weights' rate, say what that rule is worth: below zero it
pays. Their rate is searched anew at every size.

Made by `python -m scripts.quality`, which goes on where it was stopped; every row is in `docs/quality/*/points.jsonl`.
"""
READING = {
    "head_dim-100": "Not reached. At four and eight times the width `sp` ends 0.007 and 0.013 nats lower, neither apart from zero by "
    "twelve seeds; plain `mup` ends 0.02 nats above the arms whose readout starts at m^-1/2, so that most of what `sp` had gained is "
    "that std. What tuning at width 64 gains there (2.378 to 2.298) is mostly gone at width 256: the constants belong to the small "
    "width and to a hundred steps. Of the rules restored one at a time, those of the readout's std and of attention's logits may cost at "
    "this horizon (+0.014 ± 0.019 and +0.010 ± 0.018 at width 256), the gains' rates pay, the embedding's do nothing: that the "
    "embedding's rate is most of what the preset gives is not seen here. The last column of the ablations is not complete.",
}
"""What a person reads from a cell's numbers, by its name."""


def difference(apart: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean, standard error and half-width of the 95 % t interval of paired differences [seeds >= 2]."""
    values = np.asarray(apart, float)
    error = float(values.std(ddof=1) / np.sqrt(len(values)))
    return float(values.mean()), error, float(stats.t.ppf(0.975, len(values) - 1)) * error


def records() -> list[dict[str, Any]]:
    """result.json of each cell that has one."""
    paths = [cell.folder / "result.json" for cell in CELLS.values()]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def markdown(cells: Iterable[Mapping[str, Any]]) -> str:
    """The page.

    Args:
        cells: records of `python -m scripts.quality`.
    """
    return "\n".join([HEAD, *(line for cell in cells for line in _cell(cell))])


def _cell(cell: Mapping[str, Any]) -> list[str]:
    sizes = [one["size"] for one in max((arm["sizes"] for arm in cell["arms"]), key=len)]
    first, *others = cell["arms"]
    base = first["sizes"][0]
    lines = [f"## {cell['cell']}", "", f"`{cell['recipe']}`", ""]
    lines += [READING[cell["cell"]], ""] if cell["cell"] in READING else []
    lines += [
        f"Tuned at the base in {cell['tuning_seconds'] / 60:.1f} minutes of training: {_setting(base['octaves'])}. "
        f"All of the cell: {cell['train_seconds'] / 60:.0f} minutes.",
        "",
        f"| {cell['axis']} | {' | '.join(map(str, sizes))} |",
        f"|---|{'---|' * len(sizes)}",
        _row(f"{first['label']}: loss", [_loss(one["losses"]) for one in first["sizes"]], len(sizes)),
    ]
    for arm in others:
        label = arm["label"]
        lines.append(_row(f"{label}: loss", [_loss(one["losses"]) for one in arm["sizes"]], len(sizes)))
        lines.append(_row(f"{arm['reference']}, less this", [_apart(one) for one in arm["sizes"]], len(sizes)))
        if arm["tuned"] and not arm["ablation"]:
            lines.append(_row("its setting", [_setting(one["octaves"]) for one in arm["sizes"]], len(sizes)))
    return [*lines, "", *_verdicts(first, others), ""]


def _verdicts(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for arm in others:
        if arm["ablation"] or not arm["tuned"]:
            continue
        ends = [
            (one["size"], mean + half)
            for one in arm["sizes"]
            if one["reference_minus_this"]
            for mean, _, half in [difference(one["reference_minus_this"])]
        ]
        worse = [f"{size} ({end:+.3f})" for size, end in ends if end > GOAL]
        said = f"worse, or not known not to be, at {', '.join(worse)}" if worse else "not worse at any size"
        lines.append(f"- `{first['label']}` against `{arm['label']}`: {said}.")
    return lines


def _row(label: str, cells: Sequence[str], columns: int) -> str:
    return f"| {label} | {' | '.join([*cells, *[''] * (columns - len(cells))])} |"


def _loss(losses: Sequence[float | None]) -> str:
    return "diverged" if None in losses else f"{np.mean(np.array(losses, float)):.4f}"


def _apart(one: Mapping[str, Any]) -> str:
    if not one["reference_minus_this"]:
        return ""
    mean, _, half = difference(one["reference_minus_this"])
    return f"{mean:+.4f} ± {half:.4f}"


def _setting(octaves: Mapping[str, float]) -> str:
    said = [
        f"{name.replace('rates.', '').replace('_', ' ') if name != 'lr' else 'rate'} × 2^{value:g}"
        for name, value in octaves.items()
    ]
    return ", ".join(said).replace("stds.readout", "readout std") or "as the recipe"
