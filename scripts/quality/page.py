"""The page of what a tuned preset is worth, from each cell's result.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from scripts.quality.cells import CELLS

JOINS = 0.005
"""Nats that a probed group must gain to be searched at every size."""
GOAL = 0.005
"""Upper end of the 95 % interval of a difference, in nats, that counts as not worse."""
HEAD = f"""# Does a tuned preset win?

A learning rate that transfers is worth nothing if the model it transfers to is worse. This page compares losses:

* **The preset** is tuned once, at the smallest size: learning rate, the readout's and the input embedding's rate, the readout's initial
  std. Larger models use these constants unchanged.
* **`sp`** has the same constants at the base, where both are one model. At every larger size its rates are searched again: the global
  rate and the readout's, and in the cells of 800 steps over width also the input embedding's. There the rate of every other group is
  probed once, at four times the base, two octaves up and down. A group that gains more than {JOINS:.3f} nats joins the search.

Losses are means over the last tenth of a run's steps; every run sees the same examples in the same order. Differences are paired by seed,
with a 95 % t interval. Below zero the preset is ahead. **Not worse** means that the interval ends at or below {GOAL:+.3f} nats. Arms
in which `mup` has one rule of `sp` say what that rule is worth; their rate is searched at every size.

`python -m scripts.quality` makes this page and goes on where it was stopped. Every run is in `points.jsonl` beside it, or
`points.jsonl.gz`. The last column of a cell's table is the largest size's loss of the first arm less this arm's; for an arm that is
`mup` with one rule of `sp` it is `mup` less this arm. `result.json` has it at every size. With images `embedding_width` changes nothing,
because it is about token embeddings; those two arms are one.
"""
LESS = "first arm less this one, largest size"
READING = {
    "head_dim-100": "**Not reached**, because constants of width 64 do not serve larger models at this horizon: `mup`'s best readout rate "
    "falls from 2^3 at width 64 to 2^1 at 256 and stays there. Searched again as `sp` is, `mup` with a readout that starts at m^-1/2 "
    "ends at or below `sp` at every size (-0.005, -0.000, -0.009 nats). Tuned at width 128 it ends 0.002 nats above `sp` at 512.",
    "heads-100": "**Reached** by `mup` whose readout std and embedding rate fall as m^-1/2. Nothing is lost by tuning at the base alone: "
    "searched again, `mup`'s rates stay where they are at every size, where `sp`'s rate falls by an octave with every doubling. Plain "
    "`mup` is 0.021 behind at eight times: its readout starts as m^-1.",
    "depth-100": "**Reached** by both, by more the deeper the model: 0.036 nats at depth 16 with branches of L^-1/2, 0.092 with "
    "branches of L^-1.",
    "depth-800": "**Reached** by branches of L^-1. Branches of L^-1/2, ahead at every depth after 100 steps, fall behind after 800, by "
    "0.028 at 16 layers.",
    "heads-800": "**Reached** by `mup` whose readout std and embedding rate fall as m^-1/2, against an `sp` whose embedding rate is not "
    "searched yet. Plain `mup` is ahead at two and four times and 0.009 behind at eight. `sp`'s best rate falls by an octave with every "
    "doubling. The comparison was stopped at six seeds at 32 heads.",
    "head_dim-800": "**Reached** against an `sp` whose embedding rate is not searched. At twice the width it has been searched: then `sp` is "
    "0.008 ± 0.010 nats behind the first row and 0.007 ± 0.009 behind plain `mup` (five seeds). Half of the margin is gone, and the "
    "remainder cannot be told from zero. Four and eight times are being searched.",
    "vit-800": "**Reached** against an `sp` whose patch embedding's rate is not searched. At twice the width it has been searched: then `sp` "
    "is 0.012 ± 0.025 nats behind the first row and 0.004 ± 0.025 behind the second (five seeds). Most of the margin came from that one "
    "rate, and the remainder cannot be told from zero. Four and eight times are being searched.",
    "vit-100": "**Not shown** at two and four times, reached at eight. 100 steps of these images end on a plateau (1.62 nats at every size, "
    "under every rule) on which width hardly counts.",
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
    cells = list(cells)
    return "\n".join([HEAD, *_summary(cells), *(line for cell in cells for line in _cell(cell))])


def _summary(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row per arm whose constants transfer, less `sp` at every size; and what is not trained."""
    lines = [
        "| what grows, steps | transferred from the base | less `sp` tuned anew, in nats, at 2, 4 and 8 times | not worse |",
        "|---|---|---|---|",
    ]
    for cell in cells:
        sp = _most_tuned(cell["arms"])
        for arm in (arm for arm in cell["arms"] if not arm["tuned"] and not arm["ablation"]):
            apart = _less(arm, sp)
            figures = ", ".join(f"{mean:+.4f} ± {half:.4f}" for _, mean, _, half in apart)
            whole = len(apart) == max(len(each["sizes"]) for each in cell["arms"]) - 1
            within_goal = all(mean + half <= GOAL for _, mean, _, half in apart)
            verdict = ("yes" if within_goal else "no") if whole else "not finished"
            lines.append(f"| {cell['cell']} | {arm['label']} | {figures} | {verdict} |")
    missing = ", ".join(name for name in CELLS if name not in {cell["cell"] for cell in cells})
    return [*lines, "", *([f"Not trained: {missing}.", ""] if missing else [])]


def _most_tuned(arms: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the `sp` whose search at every size has the most constants."""
    return max(
        (arm for arm in arms if arm["label"].startswith("sp")), key=lambda arm: len(arm["tuned"])
    )


def _probes(cell: Mapping[str, Any]) -> list[str]:
    """Return a table of what the probed groups gain, with the text that leads to it."""
    lines: list[str] = []
    for label, probes in cell.get("probes", {}).items():
        size = CELLS[cell["cell"]].probe_size
        joined = sorted({probe["group"] for probe in probes if _mean(probe["gains"]) > JOINS})
        names = ", ".join(f"`{group}`" for group in joined)
        verdict = (
            f"joined the search: {names}" if joined else "none gains enough to join the search"
        )
        lines += [
            f"`{label}`, rates of other groups moved by two octaves at {cell['axis']} {size} (nats gained, mean of two seeds): {verdict}.",
            "",
            "| group | × 2^-2 | × 2^2 |",
            "|---|---|---|",
        ]
        for group in dict.fromkeys(probe["group"] for probe in probes):
            gains = {
                probe["octaves"]: probe["gains"] for probe in probes if probe["group"] == group
            }
            lines.append(f"| {group} | {_gain(gains[-2])} | {_gain(gains[2])} |")
        lines.append("")
    return lines


def _mean(gains: Sequence[float | None]) -> float:
    return -np.inf if None in gains else float(np.mean(np.array(gains, float)))


def _gain(gains: Sequence[float | None]) -> str:
    mean = _mean(gains)
    return f"{mean:+.4f}" if np.isfinite(mean) else "diverged"


def _less(arm: Mapping[str, Any], sp: Mapping[str, Any]) -> list[tuple[int, float, float, float]]:
    """An arm less another at every size but the base, paired by seed: size, mean, standard error and half-width."""
    return [
        (one["size"], *difference(pairs))
        for one, theirs in zip(arm["sizes"][1:], sp["sizes"][1:], strict=False)
        if len(pairs := _pairs(one["losses"], theirs["losses"])) > 1
    ]


def _cell(cell: Mapping[str, Any]) -> list[str]:
    """Return the section of a cell: what a person reads from it, and the losses of every arm."""
    name = cell["cell"]
    base = cell["arms"][0]["sizes"][0]
    sizes = [row["size"] for row in max((arm["sizes"] for arm in cell["arms"]), key=len)]
    lines = [f"## {name}", ""]
    if name in READING:
        lines += [READING[name], ""]
    lines += [
        f"Learning rates and std tuned at the base, as multiples of the recipe's: {_setting(base['octaves'])}. "
        f"All runs of the cell trained for {cell['train_seconds'] / 60:.0f} minutes; [recipe and settings](quality/{name}/result.json).",
        "",
        f"| {cell['axis']} | {' | '.join(map(str, sizes))} | {LESS} |",
        f"|---|{'---|' * (len(sizes) + 1)}",
    ]
    for index, arm in enumerate(cell["arms"]):
        losses = [_loss(row["losses"]) for row in arm["sizes"]]
        losses += [""] * (len(sizes) - len(losses))
        largest = arm["sizes"][-1]
        apart = "" if index == 0 or len(arm["sizes"]) < len(sizes) else _apart(largest)
        lines.append(f"| {arm['label']} | {' | '.join(losses)} | {apart} |")
    return [*lines, "", *_probes(cell)]


def _pairs(losses: Sequence[float | None], baseline: Sequence[float | None]) -> list[float]:
    """Differences of the seeds that both have; none where one diverged."""
    apart = [
        one - other
        for one, other in zip(losses, baseline, strict=False)
        if one is not None and other is not None
    ]
    return apart if len(apart) == min(len(losses), len(baseline)) else []


def _loss(losses: Sequence[float | None]) -> str:
    return "diverged" if None in losses else f"{np.mean(np.array(losses, float)):.4f}"


def _apart(one: Mapping[str, Any]) -> str:
    if not one["reference_minus_this"]:
        return ""
    mean, _, half = difference(one["reference_minus_this"])
    return f"{mean:+.4f} ± {half:.4f}"


def _setting(octaves: Mapping[str, float]) -> str:
    terms = [
        f"{name.replace('rates.', '').replace('_', ' ') if name != 'lr' else 'rate'} × 2^{value:g}"
        for name, value in octaves.items()
    ]
    return ", ".join(terms).replace("stds.readout", "readout std") or "as the recipe"
