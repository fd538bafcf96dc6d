"""A decoder of experts against a dense one of as many active FLOPs, on the same batches: writes docs/moe/ and a table of docs/moe.md.

    python -m scripts.studies.experts [--render]

Each at rates an octave apart, from the same seeds. Rows are kept as they finish, and what is there is not trained again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from mupax.train.studies.sweep.rows import FILE_NAME, Row
from mupax.zoo import configs, families
from scripts import ROOT
from scripts.figures import result
from scripts.pages.markdown import replaced

OUT, PAGE = ROOT / "docs" / "moe", ROOT / "docs" / "moe.md"
RUN = (
    "lm-tiny --model.width 64 --model.num-heads 2 --model.depth 2 --model.seq-len 64 --data.batch-size 8 --steps 600 "
    "--optimizer.name adam --optimizer.warmup-steps 60 --preset mup --preset.base lm-proxy"
)
ARMS = {"dense": "", "8 experts": "--model.experts 8"}
"""Name to flags: two experts a token, each half as large as the MLP, so that a token costs what it cost but for the router."""
SEEDS = (0, 1, 2)
RATES = (-8, -7, -6)
"""log2 of learning rates."""

Rows = Mapping[str, Mapping[int, Sequence[Row]]]
"""Arm to log2 of the rate to rows, in the order of seeds."""


def words(arm: str, rate: int, seed: int) -> list[str]:
    """Flags of a point.

    Args:
        arm: of `ARMS`.
        rate: log2 of it.
        seed: of the initialization; batches are those of seed 0.
    """
    return shlex.split(f"{RUN} {ARMS[arm]} --optimizer.peak-lr {2.0**rate} --data.seed 0 --seed {seed}")


def measure() -> list[Row]:
    """Trains what is not there yet."""
    from mupax.train.config import cli
    from mupax.train.config.recipes import RECIPES
    from mupax.train.studies.sweep.sweep import run

    points = [words(arm, rate, seed) for arm in ARMS for rate in RATES for seed in SEEDS]
    parsed = [cli.parse(recipe, RECIPES[recipe], rest).config for recipe, *rest in points]
    return run(parsed, OUT, how="in-turn")


def by_arm(rows: Sequence[Row]) -> Rows:
    """Rows by what their commands say.

    Args:
        rows: in any order.
    """
    grid: dict[str, dict[int, dict[int, Row]]] = {arm: {rate: {} for rate in RATES} for arm in ARMS}
    for row in rows:
        value = dict(itertools.pairwise(shlex.split(row.command)))
        experts = value.get("--model.experts")
        arm = "dense" if experts is None else f"{experts} experts"
        grid[arm][round(np.log2(float(value["--optimizer.peak-lr"])))][int(value.get("--seed", 0))] = row
    return {arm: {rate: [by[seed] for seed in SEEDS] for rate, by in of.items()} for arm, of in grid.items()}


def best(of: Mapping[int, Sequence[Row]]) -> int:
    """log2 of the rate with the least mean evaluation loss."""
    return min(of, key=lambda rate: float(np.mean(evaluated(of[rate]))))


def evaluated(rows: Sequence[Row]) -> np.ndarray:
    """Evaluation losses, nats per byte; inf where a run diverged."""
    return np.array([np.inf if row.eval_loss is None else row.eval_loss for row in rows])


def table(arms: Rows) -> str:
    """Markdown: every arm's best rate, its losses, what a token costs, and the differences to dense, paired by seeds.

    Args:
        arms: rows of every arm.
    """
    lines = [
        "| model | parameters | FLOPs of a token | best rate | evaluation loss, by seed | less the dense model's |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    dense = evaluated(arms["dense"][best(arms["dense"])])
    for arm, of in arms.items():
        config, each = model(arm), evaluated(of[best(of)])
        difference = "" if arm == "dense" else _difference(each - dense)
        lines.append(
            f"| {arm} | {sum(map(int, _sizes(config))):,} | {families.forward_flops(config):,.0f} | 2^{best(of)} | "
            f"{', '.join(f'{loss:.4f}' for loss in each)} | {difference} |"
        )
    return "\n".join(lines)


def sixths(arms: Rows, arm: str) -> list[float]:
    """Training loss of an arm less that of the dense one at their best rates, mean over seeds, in each sixth of the run.

    Args:
        arms: rows of every arm.
        arm: which.
    """
    curves = [np.mean([row.curve for row in of[best(of)]], axis=0) for of in (arms[arm], arms["dense"])]
    return [float(part.mean()) for part in np.array_split(curves[0] - curves[1], 6)]


def _difference(values: np.ndarray) -> str:
    middle, low, high = result.mean(values)
    return f"{middle:+.4f} [{low:+.4f}, {high:+.4f}]"


def model(arm: str) -> configs.ModelConfig:
    """The model of an arm."""
    from mupax.train.config import cli
    from mupax.train.config.recipes import RECIPES

    recipe, *rest = words(arm, RATES[0], 0)
    return cli.parse(recipe, RECIPES[recipe], rest).config.model


def _sizes(model: configs.ModelConfig) -> list[float]:
    sizes = model.sizes()
    return [float(np.prod([sizes[axis] for axis in spec.axes])) for spec in model.parameters().values()]


def rows() -> list[Row]:
    """What is there."""
    lines = map(json.loads, (OUT / FILE_NAME).read_text().splitlines())
    return [Row.from_json({name: value for name, value in line.items() if name != "digest"}) for line in lines]


def section(arms: Rows) -> str:
    """The page's table with what it is of.

    Args:
        arms: rows of every arm.
    """
    about = f"By `python -m scripts.studies.experts`, rows in `docs/moe/`: `{RUN}`, {len(SEEDS)} seeds at {len(RATES)} rates an octave apart."
    course = ", ".join(f"{x:+.4f}" for x in sixths(arms, "8 experts"))
    return "\n".join(
        [about, "", table(arms), "", f"Training loss of 8 experts less dense, by sixths of the run: {course}."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the page's table; 0 when done."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.studies.experts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--render", action="store_true", help="train nothing: write the table from what is there")
    args = parser.parse_args(argv)
    text = section(by_arm(rows() if args.render else measure()))
    PAGE.write_text(replaced(PAGE.read_text(), "dense", text))
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
