"""Does the learning rate stay in models of other people's? Writes docs/other_code.json and the page's table.

    python -m scripts.studies.other_code

Every example trains at two widths, under `mup` and under `sp`, at a grid of rates from two seeds: one compiled program for each.
"""

from __future__ import annotations

import importlib
import json
import math
import sys

import jax
import numpy as np

from mupax import presets, terminal
from scripts import ROOT

OUT = ROOT / "docs" / "other_code.json"
RUNS = {
    "linen_transformer": ((16, 64), 60),
    "equinox_transformer": ((16, 64), 60),
    "plain_optax": ((32, 128), 100),
    "foreign_nnx": ((16, 64), 60),
}
"""Example to its two widths, of which the first is the base, and its steps."""
SEEDS = 2
EXPONENTS = tuple(range(-9, -2))
"""Learning rates, powers of two."""

Record = dict[str, dict[str, dict[str, list[float]]]]
"""Example to preset to width to the loss at every rate."""


def measure(name: str) -> dict[str, dict[str, list[float]]]:
    """Preset to width to the mean loss of the last fifth of steps, over seeds, at every rate."""
    widths, steps = RUNS[name]
    example = importlib.import_module(f"examples.{name}")
    rates = np.repeat(2.0 ** np.array(EXPONENTS, np.float32), SEEDS)
    seeds = np.tile(np.arange(SEEDS, dtype=np.uint32), len(EXPONENTS))
    by_preset: dict[str, dict[str, list[float]]] = {}
    for preset in ("mup", "sp"):
        for width in widths:
            run = example.run(width, presets.get(preset, base=example.base(widths[0])), steps)
            losses = jax.jit(lambda pairs, run=run: jax.lax.map(lambda pair: run(*pair), pairs))((rates, seeds))
            last = np.asarray(losses)[:, -steps // 5 :].mean(axis=1).reshape(len(EXPONENTS), SEEDS).mean(axis=1)
            by_preset.setdefault(preset, {})[str(width)] = [round(float(x), 4) for x in last]
    return by_preset


def best(losses: list[float]) -> float:
    """Exponent of the best rate: the lowest point of the parabola through the lowest loss and its neighbours in the grid."""
    losses = [x if math.isfinite(x) else math.inf for x in losses]
    at = int(np.argmin(losses))
    if at in (0, len(losses) - 1) or not math.isfinite(losses[at - 1] + losses[at + 1]):
        return float(EXPONENTS[at])
    left, middle, right = losses[at - 1 : at + 2]
    return EXPONENTS[at] + (left - right) / (2 * (left - 2 * middle + right))


def markdown(record: Record) -> str:
    """Best learning rate and lowest loss by example, preset and width."""
    lines = ["| example | widths | preset | best rates | octaves moved | lowest losses |", "|---|---|---|---|---|---|"]
    for name, of in record.items():
        for preset, by_width in of.items():
            at = [best(losses) for losses in by_width.values()]
            lowest = ", ".join(f"{min(losses):.3g}" for losses in by_width.values())
            rates = ", ".join(f"2^{exponent:.1f}" for exponent in at)
            lines.append(f"| {name} | {', '.join(by_width)} | {preset} | {rates} | {at[-1] - at[0]:+.1f} | {lowest} |")
    return "\n".join(lines)


@terminal.entry_point
def main(argv: list[str]) -> int:
    """Measures the examples named in `argv`, all unless given, and keeps what is recorded of the others."""
    record: Record = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in argv or RUNS:
        record[name] = measure(name)
        OUT.write_text(json.dumps({name: record[name] for name in RUNS if name in record}, indent=1) + "\n")
    print(markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
