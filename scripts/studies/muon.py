"""Compare Muon with AdamW as heads grow, and three rules for Muon's weight decay.

    python -m scripts.studies.muon [--render]

Losses are means over the last tenth of a run. All runs see the same batches. Constants were tuned
at 2 heads, which are the preset's base, over 800 steps, by `mupax tune` with the recipe and flags
of `RUN`, and `--over lr,adam_lr,token_embedding.lr,readout.lr` for Muon,
`--over lr,weight_decay,token_embedding.lr,readout.lr` for AdamW.

* **optimizers:** `mup` under both, 800 steps, constants of 2 heads at every size.
* **decay:** `mup` under Muon, 2,000 steps. The weight decay is searched at 2 heads. With 8 heads it
  is multiplied by the width's growth to the powers 0, -1 and -2, and searched too.

Rows are saved in docs/evidence/muon as they finish, and the same command goes on. `--render` trains
nothing, and writes the page's section from the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mupax import disk
from mupax.command_line import Switch
from mupax.train.config import cli
from mupax.train.config.run import Config
from mupax.train.parallel.processes import StopRequest
from mupax.train.studies.sweep.sweep import Sweep
from mupax.train.studies.transfer import study
from scripts import ROOT, harness
from scripts.pages.markdown import table, write_section
from scripts.quality.measuring import without_curves
from scripts.quality.page import difference, difference_text

OUT = ROOT / "docs" / "evidence" / "muon"
"""Folder of the rows and of result.json."""
PAGE = ROOT / "docs" / "evidence" / "small_runs.md"
RECIPE = "lm-tiny"
RUN = (
    "--model.width 32 --model.num-heads 2 --model.depth 1 --model.seq-len 32 --data.batch-size 8 "
    "--optimizer.clip-norm None --preset mup"
)
"""Flags of all runs."""
OPTIMIZERS = {
    "muon": "--optimizer.name muon --optimizer.weight-decay 0 --optimizer.peak-lr 0.0371 "
    "--optimizer.adam-lr 0.0135 --preset.constants rates.token_embedding=11.8 rates.readout=4.94",
    "adamw": "--optimizer.name adamw --optimizer.weight-decay 0.00074 --optimizer.peak-lr 0.0163 "
    "--preset.constants rates.token_embedding=11.7 rates.readout=3.78",
}
"""Name of an optimizer to its flags, with the constants that were tuned at 2 heads."""
SIZES = (2, 4, 8, 16)
"""Numbers of heads. The head dimension stays 16."""
STEPS = 800
SEEDS = 8
DECAY_SEEDS = 4
DECAY_SIZES = (2, 8)
DECAY_STEPS = 2000
DECAYS = (0.0, *(2.0**power for power in range(-15, -6, 2)))
"""Weight decays of the search. The larger size also has those of the rules."""
POWERS = (0, -1, -2)
"""Powers of the width's growth by which the rules multiply the weight decay."""
RULE_NAMES = {"0": "as at 2 heads", "-1": "times 1/m", "-2": "times 1/m²"}
"""Powers, as result.json has them, to the names of the rules on the page."""


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        optimizer: Name in `OPTIMIZERS`.
        heads: Number of heads.
        steps: Number of steps, a fifth of which warms up.
        decay: Weight decay in place of the optimizer's. None keeps that.
        seed: Seed of the initialization.
    """

    optimizer: str
    heads: int
    steps: int
    decay: float | None
    seed: int

    def config(self) -> Config:
        """Return the complete configuration of the run."""
        words = f"{RUN} {OPTIMIZERS[self.optimizer]} --steps {self.steps}"
        words = f"{words} --optimizer.warmup-steps {self.steps // 5}"
        base = cli.parse(RECIPE, cli.recipe(RECIPE), words.split()).config
        # Without a base, the preset is relative to the smallest size.
        preset = replace(base.preset, base=None)
        planned = study.plan(base, "heads", SIZES, preset, self.optimizer)
        config = planned.configs[SIZES.index(self.heads)]
        optimizer = config.optimizer
        if self.decay is not None:
            optimizer = replace(optimizer, weight_decay=self.decay)
        return replace(
            config,
            seed=self.seed,
            workdir=None,
            data=replace(config.data, seed=config.data_seed),
            optimizer=optimizer,
        )


class Runs:
    """Trainer of points, each of which is trained once."""

    def __init__(self, stop: StopRequest) -> None:
        self._sweep = Sweep(OUT, evaluated=False, stop=lambda: stop.received is not None)

    def losses(self, point: Point, seeds: int) -> np.ndarray:
        """Return the losses [seeds] of a point with the seeds from 0 on in place of its own."""
        points = [replace(point, seed=seed) for seed in range(seeds)]
        rows = self._sweep.run([seeded.config() for seeded in points])
        return np.array([row.loss for row in rows])


def measure(stop: StopRequest) -> None:
    """Train what is missing, and write result.json."""
    runs = Runs(stop)
    sizes = []
    for heads in SIZES:
        losses = {}
        for optimizer in OPTIMIZERS:
            losses[optimizer] = runs.losses(Point(optimizer, heads, STEPS, None, 0), SEEDS).tolist()
        sizes.append({"heads": heads, "losses": losses})
        _write({"optimizers": sizes})

    base, large = DECAY_SIZES
    searched = _decays(runs, base, DECAYS)
    best = min(searched, key=lambda row: float(np.mean(row["losses"])))["decay"]
    growth = large / base
    by_rule = [best * growth**power for power in POWERS]
    rows = _decays(runs, large, sorted({*DECAYS, *by_rule}))
    decay = {
        "best": best,
        "rules": dict(zip(map(str, POWERS), by_rule, strict=True)),
        "sizes": [{"heads": base, "rows": searched}, {"heads": large, "rows": rows}],
    }
    _write({"optimizers": sizes, "decay": decay})


def _decays(runs: Runs, heads: int, decays: Sequence[float]) -> list[dict[str, Any]]:
    """Return the losses of every weight decay at one size."""
    rows = []
    for decay in decays:
        losses = runs.losses(Point("muon", heads, DECAY_STEPS, decay, 0), DECAY_SEEDS)
        rows.append({"decay": decay, "losses": losses.tolist()})
    return rows


def _write(result: dict[str, Any]) -> None:
    """Write result.json with the command and the versions that measured it."""
    facts = harness.made_by("python -m scripts.studies.muon")
    (OUT / "result.json").write_text(disk.json_text({**facts, **result}, indent=1) + "\n")


def markdown(result: dict[str, Any]) -> str:
    """Return the section of the page, made from result.json."""
    rows = [["heads", "muon", "adamw", "muon less adamw"]]
    for size in result["optimizers"]:
        muon, adamw = (np.array(size["losses"][name]) for name in OPTIMIZERS)
        rows.append(
            [
                str(size["heads"]),
                f"{muon.mean():.4f}",
                f"{adamw.mean():.4f}",
                difference_text(difference(muon - adamw)),
            ]
        )
    decay = result["decay"]
    large = decay["sizes"][1]
    losses = {row["decay"]: np.array(row["losses"]) for row in large["rows"]}
    best = min(losses, key=lambda value: losses[value].mean())
    columns = [["weight decay at 8 heads", "value", "loss", "less the lowest"]]
    for power, value in decay["rules"].items():
        cells = [RULE_NAMES[power], f"{value:.3g}"]
        columns.append([*cells, *_compared(losses[value], losses[best])])
    columns.append(["no decay", "0", *_compared(losses[0.0], losses[best])])
    if best not in decay["rules"].values():
        columns.append(["lowest of the search", f"{best:.3g}", f"{losses[best].mean():.4f}", ""])
    return f"{table(rows)}\n\n{table(columns)}"


def _compared(losses: np.ndarray, lowest: np.ndarray) -> list[str]:
    """Return the cells of a weight decay's mean loss and of its difference from the lowest."""
    return [f"{losses.mean():.4f}", difference_text(difference(losses - lowest))]


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    render: Switch = False
    """Train nothing: write the page's section from the result that is there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 when all is trained."""
    args = harness.parse(Options, argv)
    if not args.render:
        code = harness.run_study(measure)
        if code:
            return code
        without_curves(OUT)
    result = json.loads((OUT / "result.json").read_text())
    write_section(PAGE, "muon", f"{markdown(result)}\n")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
