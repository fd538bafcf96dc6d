"""The page docs/finetuning.md from what `scripts.studies.finetuning` measured: `python -m scripts.studies.finetuning.page`."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mupax.train.studies.transfer.drift import BOUND, TOLERANCE, Analysis, Interval, analyse
from mupax.train.studies.transfer.fit import Curve
from scripts import ROOT
from scripts.pages.markdown import table
from scripts.studies.finetuning.study import ARMS, BASE, OUT, PRESETS, SOURCE_STEPS, WIDTHS, Row, curve

PAGE = ROOT / "docs" / "finetuning.md"
NAMES = {"full": "everything", "adapters": "adapters of rank 4"}


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(json.loads(OUT.read_text())))
    return 0


def page(study: dict[str, Any]) -> str:
    """The page's text.

    Args:
        study: what `scripts.studies.finetuning` wrote.
    """
    rows = study["rows"]
    of = {setting: curve(rows, setting) for setting in itertools.product(PRESETS, WIDTHS, ARMS)}
    head = HEAD.format(numpy=study["numpy"], python=study["python"], seeds=1 + max(row["seed"] for row in rows))
    return "\n".join([head, _drifts(analyses(rows), of), MIDDLE, _losses(rows, of), TAIL])


def analyses(rows: Sequence[Row]) -> dict[tuple[str, str], Analysis]:
    """Best rates and their shift, by preset and arm; rates in octaves from the shipped one.

    Args:
        rows: of all runs.
    """
    pairs = [(preset, arm) for arm in ARMS for preset in PRESETS]
    return {
        (preset, arm): analyse(WIDTHS, [curve(rows, (preset, width, arm)) for width in WIDTHS]) for preset, arm in pairs
    }


def _drifts(by_pair: dict[tuple[str, str], Analysis], of: dict[tuple[str, int, str], Curve]) -> str:
    small, large = WIDTHS
    lines = [
        [
            "trained",
            "preset",
            f"best at width {small}",
            f"best at width {large}",
            "shift per doubling",
            "verdict",
            "price",
        ]
    ]
    lines[0] += [f"the shipped rate costs at {small}", f"at {large}"]
    for (preset, arm), one in by_pair.items():
        optima = [_octaves(each) for each in one.optima]
        costs = [_cost(fit, of[preset, width, arm]) for fit, width in zip(one.fits, WIDTHS, strict=True)]
        lines.append(
            [NAMES[arm], f"`{preset}`", *optima, _octaves(one.drift), one.verdict, _price(one.prices[-1]), *costs]
        )
    return table(lines)


def _octaves(value: Interval) -> str:
    if not math.isfinite(value.value):
        return "none"
    return f"{value.value:+.2f}" + (f" ± {value.half_width:.2f}" if math.isfinite(value.half_width) else "")


def _price(price: Interval) -> str:
    if not math.isfinite(price.value):
        return "unknown"
    bounds = f" [{price.low:.3f}, {price.high:.3f}]" if math.isfinite(price.high) else ""
    return f"{price.value:.3f}{bounds}"


def _cost(fit: Any, of: Curve) -> str:
    """Loss at the shipped rate over the parabola's least, in nats."""
    shipped = of.mean[of.x == 0]
    return f"{shipped[0] - fit.loss:+.3f}" if len(shipped) and math.isfinite(fit.loss) else "none"


def _losses(rows: Sequence[Row], of: dict[tuple[str, int, str], Curve]) -> str:
    octaves = sorted({float(x) for each in of.values() for x in each.x})
    lines = [["width", "preset", "trained", "before", *(_times(x) for x in octaves)]]
    for (preset, width, arm), one in sorted(of.items(), key=lambda item: (item[0][1], item[0][0])):
        if (preset, width) == ("sp", BASE):
            continue
        least = one.best
        cells = dict.fromkeys(octaves, "")
        for i, x in enumerate(one.x):
            mean = f"{one.mean[i]:.3f}" if np.isfinite(one.mean[i]) else "diverged"
            cells[float(x)] = f"**{mean}**" if i == least else mean
        before = [r["loss"] for r in rows if (r["preset"], r["width"], r["octaves"]) == (preset, width, None)]
        preset_cell = f"`{preset}`" if width != BASE else "both"
        lines.append([str(width), preset_cell, NAMES[arm], f"{np.mean(before):.3f}", *cells.values()])
    return table(lines)


def _times(octaves: float) -> str:
    return f"×{2**octaves:g}" if octaves >= 0 else f"×1/{2**-octaves:g}"


HEAD = f"""# At what rate to fine-tune

`mupax finetune` has a rate rule: 0.3 times the peak of the source's run, under the source's preset, and three times that for
low-rank adapters ([own images](own_images.md)). Is that rate right, and is it the same at another width? Two widths of `lm-proxy`
({WIDTHS[0]} and {WIDTHS[1]}, two heads) train on the source text of Python's standard library for {SOURCE_STEPS} steps of 16 windows of 64
bytes at a peak of 0.008, then 100 steps on another text: the C headers that NumPy {{numpy}} installs. Under `mup` the base is `lm-proxy`; at
its width, {BASE}, `mup` and `sp` are one model with one rate each, so those runs count for both. Seeds: {{seeds}}, each
with a source of its own. Made by `python -m scripts.studies.finetuning --workdir FOLDER` under Python {{python}} on CPU, which goes on where it
was stopped; the page by `python -m scripts.studies.finetuning.page`. Losses are nats per byte on headers that were not trained on.

## The best rate and its shift

In octaves from the shipped rate (0 is the rate that `finetune` takes, +1 twice that), by a parabola through the seeds' mean losses at the
best rate and its neighbours, with a 95 % interval over seeds. `transfers`: the shift is within {TOLERANCE:.2f} octaves per doubling and its
interval inside {BOUND:.2f}; `drifts`: the interval lies wholly outside {TOLERANCE:.2f}; else `undecided` ([transfer.md](transfer.md)).
The price is what the small width's best rate costs at the large one. The last columns are what the shipped rate costs over
the parabola's least loss. Both are in nats.
"""
MIDDLE = """
## Losses

Means over the seeds by multiples of the shipped rate, the least in bold; `before` is the source on the headers before any step.
"""
TAIL = """
## What it says

Under `mup` the seeds decide neither shift: that of everything is small, that of adapters is not known as well, and both intervals hold
zero. Not tuning again costs 0.002 nats in full there, at most 0.014. Under `sp` both fall as the width grows: by about an octave per
doubling in full, as the rates of its hidden matrices would have to, and by half of one for adapters, what they add growing as the root
of the width there (`presets/adapters.py`). So a rate that was found on a narrow source is near the best of a wide source under `mup`, as
far as this is known, and too large for it under `sp`.

The shipped rate of adapters is near the best. That of everything is low here, by one to two octaves, and costs some hundredths of a nat:
these sources are far from done when they stop, and learn the other text quickly. The share of 0.3 was chosen on images, for sources that
have less to learn ([own images](own_images.md)). Where a text is new to its source, rates of two and four times the shipped one are worth a run
each (`--optimizer.peak-lr`); adapters lose by four times under `mup`, and eight times spoils them. These are models of a minute's training:
they say nothing about sources of billions of tokens, for which the rate is a rule of thumb too.
"""


if __name__ == "__main__":
    sys.exit(main())
