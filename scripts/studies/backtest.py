"""Forecasts from small runs held against larger ones, in two commits: docs/forecasts/backtest-NAME/.

    python -m scripts.studies.backtest study          # trains the small runs; goes on where it was stopped
    python -m scripts.studies.backtest forecasts      # writes what their law says of every larger run; commit it
    python -m scripts.studies.backtest outcomes       # trains those, once the forecasts are committed; then scripts.studies.forecasts

`mup`, the same from larger models with more seeds, and, as a control, `sp` for each of both. Under all a larger run has the rate that
is best for the largest small model, and its forecast is the loss of a run at its best rate: what a preset promises that transfers
rates, and `sp` must miss.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax import disk
from mupax.train.config import cli
from mupax.train.config.run import Config
from mupax.train.studies.forecast import points, record
from mupax.train.studies.forecast.fitted import ScalingLaw, fitted
from mupax.train.studies.forecast.law import best_rate
from mupax.train.studies.forecast.predict import predict
from scripts import ROOT

OUT = ROOT / "docs" / "forecasts"
RUN = (
    "lm-tiny --model.depth 2 --model.seq-len 64 --optimizer.name adam --optimizer.clip-norm None --data.eval-examples 512 "
    "--preset.base embed=8,heads=2,kv_heads=2,head_dim=4,mlp=20,layers=2"
)
WARMUP = 0.1
"""Share of a run's steps."""
Lengths = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Backtest:
    """What is trained; sizes are heads of dimension 4, lengths (steps, batch), rates log2.

    Attributes:
        small: sizes of the study.
        large: sizes of the forecasts.
        lengths: of the study.
        longer: of the forecasts.
        rates: of the study.
        seeds: of the study; a forecast run has one, the next.
        preset: its name.
        alike: whether all forecast runs have the same seed, or each one's is the next.
        slope: octaves by which the rates of the study move as the size doubles from 2 heads on, in whole octaves: `sp`'s best rate
            falls, and a grid that stands still would not hold it at every size.
    """

    small: tuple[int, ...]
    large: tuple[int, ...]
    lengths: Lengths
    longer: Lengths
    rates: tuple[float, ...]
    seeds: int
    preset: str = "mup"
    alike: bool = True
    slope: float = 0.0

    def grid(self, heads: int) -> list[float]:
        """log2 of the rates that a size of the study is trained at."""
        shift = round(self.slope * math.log2(heads / 2))
        return [rate + shift for rate in self.rates]


_LENGTHS: Lengths = ((100, 8), (200, 8), (400, 8), (100, 16), (200, 16))
_LONGER: Lengths = (
    *((steps, 8) for steps in (100, 115, 130, 160, 180, 200, 225, 250, 300, 350, 400, 600)),
    *((steps, 16) for steps in (100, 130, 160, 200, 250, 300)), (100, 32), (150, 32),
)  # fmt: skip
SPECS = {
    "mup": Backtest(
        small=(2, 3, 4, 6), large=(14, 30), lengths=_LENGTHS, rates=(-5, -4, -3, -2, -1), seeds=1, longer=_LONGER,
    ),
    "mup-seeds": Backtest(
        small=(4, 6, 9, 13), large=(28, 58), lengths=(*_LENGTHS, (150, 8), (280, 8)), rates=(-5, -4, -3, -2), seeds=4, longer=_LONGER,
        alike=False,
    ),
    "sp": Backtest(
        small=(2, 3, 4, 6), large=(14, 30), lengths=_LENGTHS[:2], rates=(-6, -5, -4, -3, -2, -1), seeds=1, preset="sp",
        longer=((100, 8), (150, 8), (200, 8), (300, 8)),
    ),
    "sp-seeds": Backtest(
        small=(4, 6, 9, 13), large=(28, 58), lengths=(*_LENGTHS, (150, 8), (280, 8)), rates=(-5, -4, -3, -2), seeds=4, longer=_LONGER,
        preset="sp", alike=False, slope=-1.0,
    ),
}  # fmt: skip


def config(preset: str, heads: int, length: tuple[int, int], rate: float, seed: int) -> Config:
    """One run.

    Args:
        preset: its name.
        heads: of dimension 4, so that the width is four times as many.
        length: steps and batch.
        rate: log2 of the peak rate.
        seed: of the initialization; all runs see the same data in the same order.
    """
    name, *words = RUN.split()
    steps, batch = length
    words += f"--preset.name {preset} --model.width {4 * heads} --model.num-heads {heads}".split()
    words += f"--steps {steps} --data.batch-size {batch} --data.eval-batch-size 64 --data.seed 0 --seed {seed}".split()
    words += f"--optimizer.warmup-steps {round(WARMUP * steps)} --optimizer.peak-lr {2.0**rate:.6g}".split()
    return dataclasses.replace(cli.parse(name, cli.recipe(name), words).config, workdir=None)


def study(name: str, spec: Backtest, out: Path) -> None:
    """Train the small runs.

    Args:
        name: of the backtest.
        spec: of it.
        out: folder of all backtests.
    """
    configs = []
    for heads in spec.small:
        for length in spec.lengths:
            rates = spec.grid(heads)
            first = config(spec.preset, heads, length, rates[0], 0)
            for rate in rates:
                optimizer = dataclasses.replace(first.optimizer, peak_lr=2.0**rate)
                configs += [dataclasses.replace(first, optimizer=optimizer, seed=seed) for seed in range(spec.seeds)]
    _train(configs, out / f"backtest-{name}")


def forecasts(name: str, spec: Backtest, out: Path) -> Path:
    """Write what the small runs say of the larger ones; a file that is there stays as it is.

    Args:
        name: of the backtest.
        spec: of it.
        out: folder of all backtests.

    Raises:
        NoLaw, PointsError: the small runs are not there, or say nothing.
    """
    folder = out / f"backtest-{name}"
    path = folder / "forecasts.json"
    if path.exists():
        print(f"{path} is there and stays")
        return path
    (small_points,) = points.load([folder])
    law = fitted(dataclasses.replace(small_points, folders=(f"docs/forecasts/backtest-{name}",)))
    contents = []
    for heads in spec.large:
        for steps, batch in spec.longer:
            seed = spec.seeds + (0 if spec.alike else len(contents))
            target = config(spec.preset, heads, (steps, batch), 0.0, seed)
            prediction = predict(law, target)
            optimizer = dataclasses.replace(
                prediction.config.optimizer, peak_lr=float(f"{2.0 ** transferred(law, target):.6g}")
            )
            run = dataclasses.replace(prediction.config, optimizer=optimizer)
            what = f"heads={heads}, {steps} steps of {batch}, at the largest small model's rate"
            contents.append(record.forecast(law, dataclasses.replace(prediction, config=run), what))
    folder.mkdir(parents=True, exist_ok=True)
    disk.write_whole(path, "[\n" + ",\n".join(map(json.dumps, contents)) + "\n]\n")
    print(f"{len(contents)} forecasts in {path}; commit them before `outcomes`")
    return path


def transferred(law: ScalingLaw, target: Config) -> float:
    """log2 of the best rate of the largest model measured, at the run's tokens and batch.

    Args:
        law: fitted.
        target: the run.
    """
    scale = points.Setting.bare(target).scale - law.rows.centre
    scale[0] = law.rows.scale[:, 0].max()
    return float(best_rate(law.rows.names, law.theta[None], scale[None])[0, 0]) + law.rows.middle


def outcomes(name: str, out: Path) -> None:
    """Train what is forecast; raises SystemExit where the forecasts are not committed as they are.

    Args:
        name: of the backtest.
        out: folder of all backtests.
    """
    path = out / f"backtest-{name}" / "forecasts.json"
    if not committed(path):
        raise SystemExit(f"{path} is not committed as it is; commit the forecasts, and then train what they are of")
    contents: list[dict[str, Any]] = json.loads(path.read_text())
    _train([record.config_of(content) for content in contents], path.parent / "outcomes")


def committed(path: Path) -> bool:
    """Whether the file is in git's history as it is on disk."""
    git = ["git", "-C", str(path.parent)]
    is_tracked = subprocess.run([*git, "ls-files", "--error-unmatch", path.name], capture_output=True).returncode == 0
    return (
        is_tracked
        and subprocess.run([*git, "diff", "--quiet", "HEAD", "--", path.name], capture_output=True).returncode == 0
    )


def _train(configs: Sequence[Config], folder: Path) -> None:
    from mupax.train.studies.sweep.sweep import Sweep

    bare = [dataclasses.replace(each, workdir=None) for each in configs]
    rows = Sweep(folder, evaluated=True).run(bare)
    print(f"{len(rows)} rows in {folder}, {sum(row.seconds for row in rows) / 60:.1f} minutes of training")


def main(argv: Sequence[str] | None = None) -> int:
    """One stage of the backtests that are asked for; 0 when it is done."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.studies.backtest", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("stage", choices=("study", "forecasts", "outcomes"))
    parser.add_argument("--of", choices=SPECS, action="append", help="a backtest; all unless given")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    args = parser.parse_args(argv)
    for name in args.of or SPECS:
        if args.stage == "outcomes":
            outcomes(name, args.out)
        else:
            {"study": study, "forecasts": forecasts}[args.stage](name, SPECS[name], args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
