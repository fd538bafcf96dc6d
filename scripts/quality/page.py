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

A rate that transfers to a worse model is worth nothing. Here constants are tuned **once, at the smallest size** (rate, rates of the
readout and of the embedding, the readout's initial std) and the large models take them through the preset, untouched. Against them
stands `sp` with the same constants at the base, where the two are the same model, and then its rates **searched anew at every size**:
the global one, the readout's, and in the cells of 800 steps over width also that of what reads the inputs, which would fall with the
global one. There the rate of every other group is probed once, at four times the base, two octaves up and down with two seeds, and a
group that gains more than {JOINS:.3f} nats joins the search. Losses are means over the last tenth of a run's steps on text or images
that every run sees in the same order; differences are paired by seed, with a 95 % t interval; below zero the preset is ahead.
**Not worse**: the interval ends at or below {GOAL:+.3f} nats. With images `embedding_width` changes nothing, being the rate of token
embeddings; its arm is that of the readout's std alone.

Arms in which `mup` has one rule as `sp` has it, relative to the hidden weights' rate, say what that rule is worth: below zero it
pays. Their rate is searched anew at every size.

Made by `python -m scripts.quality`, which goes on where it was stopped; every row is in `docs/quality/*/points.jsonl`.
"""
READING = {
    "head_dim-100": "Not reached with constants of width 64, and the reason is their width, not the rules. Tuned anew as `sp` is, `mup` with "
    "a readout that starts at m^-1/2 ends at or below `sp` at every size (-0.005, -0.000, -0.009 nats; the intervals end at +0.010 at "
    "most). Its best readout rate falls from 2^3 at width 64 over 2^2 at 128 to 2^1 at 256 and 512, where the rate stays, too: below "
    "width 256 the constants do not transfer at this horizon. Tuned at width 128 it ends 0.002 nats above `sp` at 512, tuned at 64 0.016. "
    "Plain `mup` ends another 0.02 above: the readout's std. Attention's logits as `sp` has them (`mup-half`) end 0.012 higher with "
    "constants of the base. Of the rules restored one at a time, with the rate tuned anew, the gains' rates pay (-0.005 ± 0.005 at eight "
    "times), the embedding's do nothing (-0.003 ± 0.011): that the embedding's rate is most of what the preset gives is not seen here. "
    "Those of the readout's std and of the logits cost 0.02 beside a `mup` whose rate is that of the base.",
    "heads-100": "Reached: with constants of width 64 and at their rate, `mup` with a readout and an embedding's rate that fall as m^-1/2 is "
    "ahead of `sp` tuned anew at each number of heads, by 0.002, 0.007 and 0.006 nats; the intervals end at +0.002 at most. Nothing is lost by "
    "tuning at the base alone: searched anew, `mup`'s rate and readout rate stay where they are at every size, where `sp`'s rate falls "
    "by an octave with every doubling. Plain `mup`, whose readout starts as m^-1, is 0.021 behind at eight times. Of the rules restored "
    "one at a time the gains' rates pay (-0.006 ± 0.005 at eight times); the readout's start and the embedding's rate cost (0.023 and 0.013), "
    "which is why the first row has m^-1/2 for both.",
    "depth-100": "Reached: with constants of depth 2 and at their rate, depth-mup is ahead of `sp` with its rate and its readout's rate tuned "
    "anew at every depth, by more the deeper the model: by 0.036 nats at depth 16 with branches of L^-1/2, by 0.092 with branches of "
    "L^-1, whose loss falls with depth where both others' rises.",
    "depth-800": "Reached by branches of L^-1: with constants of depth 2 and at their rate depth-mup with alpha_L 1 is ahead of `sp` tuned "
    "anew at every depth, by 0.014, 0.014 and 0.022 nats, and no interval reaches zero. Branches of L^-1/2, ahead at every depth after "
    "100 steps, fall behind after 800, by 0.028 at 16 layers, where their loss rises with depth: how much deeper layers are let in is "
    "what longer runs are decided by. `sp`'s best rate falls by half an octave from 4 layers on.",
    "heads-800": "Reached at eight times the horizon, too: with constants of width 64 and at their rate, `mup` with a readout and an "
    "embedding's rate that fall as m^-1/2 is ahead of `sp` tuned anew at each number of heads, by 0.010, 0.015 and 0.008 nats, and no "
    "interval reaches zero. What a readout that starts at m^-1/2 gives does not fade: plain `mup`, whose readout starts as m^-1, is ahead "
    "of `sp` at two and four times, too, and 0.009 behind at eight. `sp`'s best rate falls by an octave with every doubling, and its "
    "readout's by two over eight times. The comparison was stopped at six seeds at 32 heads; the command goes on to eight.",
    "head_dim-800": "Against an `sp` whose rate and readout's rate are tuned anew, and not yet its embedding's rate, reached by more the "
    "larger the model: with constants of width 64 and at their rate, `mup` with a readout and an embedding's rate that fall as m^-1/2 is "
    "ahead by 0.015, 0.032 and 0.041 nats. Plain `mup` is ahead at every size, too, by 0.013, 0.026 and 0.018. At twice the width the "
    "embedding's rate has been searched as well, and then `sp` is 0.008 ± 0.010 nats behind the first row and 0.007 ± 0.009 behind plain "
    "`mup` (five seeds): half of the margin is gone, and the rest is not told from zero. Four and eight times are being searched. At 100 "
    "steps `sp` is ahead: there the readout's best rate at width 64 was an octave higher, and did not serve larger models. `sp`'s best "
    "rate falls by an octave or more with every doubling; its readout's stays.",
    "vit-800": "Against an `sp` whose rate and readout's rate are tuned anew, and not yet its patch embedding's rate, `mup` with constants of "
    "width 64 is ahead by 0.044, 0.078 and 0.121 nats with a readout that starts as m^-1, and by 0.039, 0.053 and 0.070 with one that "
    "starts as m^-1/2. At twice the width the patch embedding's rate has been searched as well. Then `sp` is 0.012 ± 0.025 nats behind "
    "the first and 0.004 ± 0.025 behind the second (five seeds): most of the margin came from that one rate, which falls with `sp`'s "
    "global rate, and what is left is not told from zero. Four and eight times are being searched. On images, unlike text, the readout "
    "that starts as m^-1 is the better.",
    "vit-100": "Not shown at two and four times, reached at eight by plain `mup` (-0.029 ± 0.020) and by the first row (-0.018 ± 0.017). "
    "100 steps of these images end on a plateau (1.62 nats at every size, under every rule) on which width hardly counts: at two and "
    "four times plain `mup` and `sp` tuned anew are within 0.002 nats of each other, and seeds leave 0.01. At 800 steps it is decided. The "
    "arms that are tuned anew and `mup-half` have no figure at eight times.",
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
    sizes = [one["size"] for one in max((arm["sizes"] for arm in cell["arms"]), key=len)]
    first, *remainder = cell["arms"]
    base = first["sizes"][0]
    lines = [f"## {cell['cell']}", "", f"`{cell['recipe']}`", ""]
    lines += [READING[cell["cell"]], ""] if cell["cell"] in READING else []
    lines += [
        f"Tuned at the base in {cell['tuning_seconds'] / 60:.1f} minutes of training: {_setting(base['octaves'])}. "
        f"All of the cell: {cell['train_seconds'] / 60:.0f} minutes.",
        "",
        f"| {cell['axis']} | {' | '.join(map(str, sizes))} |",
        f"|---|{'---|' * len(sizes)}",
        _row(
            f"{first['label']}: loss", [_loss(one["losses"]) for one in first["sizes"]], len(sizes)
        ),
    ]
    for arm in remainder:
        label = arm["label"]
        lines.append(
            _row(f"{label}: loss", [_loss(one["losses"]) for one in arm["sizes"]], len(sizes))
        )
        lines.append(
            _row(
                f"{arm['reference']}, less this", [_apart(one) for one in arm["sizes"]], len(sizes)
            )
        )
        if arm["tuned"] and not arm["ablation"]:
            lines.append(
                _row("its setting", [_setting(one["octaves"]) for one in arm["sizes"]], len(sizes))
            )
    return [*lines, "", *_probes(cell), *_verdicts(cell["arms"]), ""]


def _verdicts(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every arm but ablations against each that has `sp`'s rules, paired by seed."""
    compared = [arm for arm in arms if not arm["ablation"]]
    lines = []
    for sp in (arm for arm in compared if arm["label"].startswith("sp")):
        for arm in (arm for arm in compared if not arm["label"].startswith("sp")):
            apart = _less(arm, sp)
            worse = [str(size) for size, mean, _, half in apart if mean + half > GOAL]
            verdict = (
                f"worse, or not known not to be, at {', '.join(worse)}"
                if worse
                else "not worse at any size"
            )
            figures = ", ".join(f"{mean:+.4f} ± {half:.4f}" for _, mean, _, half in apart)
            lines.append(f"- `{arm['label']}` less `{sp['label']}`: {figures}; {verdict}.")
    return lines


def _pairs(losses: Sequence[float | None], baseline: Sequence[float | None]) -> list[float]:
    """Differences of the seeds that both have; none where one diverged."""
    apart = [
        one - other
        for one, other in zip(losses, baseline, strict=False)
        if one is not None and other is not None
    ]
    return apart if len(apart) == min(len(losses), len(baseline)) else []


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
    terms = [
        f"{name.replace('rates.', '').replace('_', ' ') if name != 'lr' else 'rate'} × 2^{value:g}"
        for name, value in octaves.items()
    ]
    return ", ".join(terms).replace("stds.readout", "readout std") or "as the recipe"
