"""A larger vision transformer on the endless images, as shipped and tuned: writes docs/vision/larger.json, and goes on where it was stopped.

    python -m scripts.vision.larger [--seeds 3] [--json FILE]

`vit-endless` at three sizes, 2000 steps of 64 images: tiny, at which its constants were tuned, the same twice as wide, and twice as deep
too. A row is the loss and accuracy on 5000 images never trained on, after the last step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from scripts import ROOT
from scripts.vision import rows
from scripts.vision.transforms import scores

OUT = ROOT / "docs" / "vision" / "larger.json"
TINY, WIDE, SMALL = "width 64, depth 2", "width 128, depth 2", "width 128, depth 4"
MODELS = {
    TINY: "--model.width 64 --model.num-heads 4 --model.depth 2",
    WIDE: "--model.width 128 --model.num-heads 8 --model.depth 2",
    SMALL: "--model.width 128 --model.num-heads 8 --model.depth 4",
}
"""Name to its sizes."""
SHIPPED, TUNED = "as shipped", "tuned at width 64"
DEEP = "the same, branches of L^-1 (depth-mup)"
FASTER = "as shipped, patches at 16 times the rate, the readout at 8"
ARMS = {
    SHIPPED: "",
    "half the rate": "--optimizer.peak-lr 0.001",
    "twice the rate": "--optimizer.peak-lr 0.004",
    FASTER: "--preset.constants rates.patch_embedding=16 rates.readout=8",
    TUNED: "--preset mup:vit-endless-v1",
    DEEP: (
        "--preset depth-mup --preset.alpha-l 1 --preset.base embed=64,head_dim=16,heads=4,kv_heads=4,mlp=256,layers=2 "
        "--optimizer.peak-lr 0.0035125 --preset.constants rates.patch_embedding=11.8146 rates.readout=64 stds.readout=1.09051"
    ),
}
"""Name to the flags that are added; those in the middle ask, of one seed, what holds the largest model back. The last one is the
tuned preset with a rule for depth, which at the depth that it was tuned at is the same."""


def runs(seeds: int) -> Iterator[tuple[str, str, int]]:
    """Arm, model and seed of every run, the table's ends first; the smallest and the largest, tuned, have twice the seeds."""
    for seed in range(seeds):
        yield from ((arm, model, seed) for model in (TINY, SMALL, WIDE) for arm in (TUNED, SHIPPED))
        yield DEEP, SMALL, seed
    for seed in range(seeds, 2 * seeds):
        yield from ((TUNED, TINY, seed), (DEEP, SMALL, seed))
    yield FASTER, TINY, 0
    yield from ((arm, SMALL, 0) for arm in ("half the rate", "twice the rate", FASTER))


def main(argv: Sequence[str] | None = None) -> int:
    """Train what has no row yet."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.vision.larger", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, … of most arms (default 3)")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write (default docs/vision/larger.json)")
    args = parser.parse_args(argv)
    table = rows.read(args.json)
    for arm, model, seed in runs(args.seeds):
        if any((row["arm"], row["model"], row["seed"]) == (arm, model, seed) for row in table):
            continue
        words = f"{MODELS[model]} {ARMS[arm]} --seed {seed}".split()
        loss, accuracy = scores(cli.parse("vit-endless", RECIPES["vit-endless"], words, []).config)
        table.append({"model": model, "arm": arm, "seed": seed, "loss": loss, "accuracy": accuracy})
        rows.write(args.json, "python -m scripts.vision.larger", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
