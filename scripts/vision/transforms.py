"""With and without each transform, paired by seed: writes docs/vision/transforms.json, a row per run, and goes on where it was stopped.

    python -m scripts.vision.transforms [--seeds 3] [--json FILE]

Three tasks: scikit-learn's digits, the first 2,000 images of Fashion-MNIST (written as IDX files of their own), and the endless drawings,
where no image comes twice. A row is the loss and accuracy on images never trained on, after the last step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax.train import data
from mupax.train.config import cli
from mupax.train.config.data import TransformsConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.core.program import Program, assemble
from mupax.train.data.sources import idx
from mupax.train.run.evaluate import evaluate
from mupax.train.run.prefetch import Prefetch
from scripts import ROOT
from scripts.vision import rows

OUT = ROOT / "docs" / "vision" / "transforms.json"
FASHION_IMAGES = 2000
_SIZES = "--model.width 32 --model.depth 2 --model.num-heads 2 --steps 400"
TASKS = {
    "digits": f"vit-digits {_SIZES}",
    "fashion": f"vit-fashion --data.name idx:fashion-2000 --data.augment {_SIZES}",
    "endless": f"vit-endless {_SIZES} --data.eval-examples 2000",
}
"""Name to the command that all arms share."""
_T = "--data.transforms"
NONE, ALL = "none", "RandAugment, mixup, cutmix, smoothing, drop path"
ARMS = {
    NONE: "",
    "RandAugment 2, 5": f"{_T}.randaug-layers 2 {_T}.randaug-magnitude 5",
    "mixup 0.2": f"{_T}.mixup 0.2",
    "cutmix 1": f"{_T}.cutmix 1",
    "label smoothing 0.1": f"{_T}.label-smoothing 0.1",
    "drop path 0.1": "--model.drop-path 0.1",
    "2 repeats": f"{_T}.repeats 2",
    ALL: (
        f"{_T}.randaug-layers 2 {_T}.randaug-magnitude 5 {_T}.mixup 0.2 {_T}.cutmix 1 {_T}.label-smoothing 0.1 --model.drop-path 0.1"
    ),
}
"""Name to the flags that are added."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train what has no row yet."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.vision.transforms", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, … (default 3)")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write (default docs/vision/transforms.json)")
    args = parser.parse_args(argv)
    table = rows.read(args.json)
    done = {(row["task"], row["arm"], row["seed"]) for row in table}
    with tempfile.TemporaryDirectory() as folder:
        for arm in sorted(ARMS, key=lambda name: name not in (NONE, ALL)):  # the ends of the table first
            for seed, task in itertools.product(range(args.seeds), TASKS):
                if (task, arm, seed) in done:
                    continue
                words = f"{TASKS[task]} {ARMS[arm]} --seed {seed}".replace(
                    "fashion-2000", f"{folder}/fashion-2000"
                ).split()
                if task == "fashion":
                    _first_images(Path(folder) / "fashion-2000")
                loss, accuracy = scores(cli.parse(words[0], RECIPES[words[0]], words[1:], []).config)
                table.append({"task": task, "arm": arm, "seed": seed, "loss": loss, "accuracy": accuracy})
                rows.write(args.json, "python -m scripts.vision.transforms", table)
    return 0


@functools.lru_cache
def _compiled(config: Config) -> tuple[Program, Any, Any]:
    program = assemble(config)
    step = program.compile_train()
    return program, step, program.compile_eval(step)


def scores(config: Config) -> tuple[float, float]:
    """Evaluation loss (nats) and accuracy after a run of this config, from its own start."""
    soft = TransformsConfig(label_smoothing=0.1 * config.data.transforms.soft)  # all else of them is the host's
    plain = dataclasses.replace(config, seed=0, data=dataclasses.replace(config.data, transforms=soft))
    program, step, score = _compiled(plain)
    program = program.renumbered(config)
    source = data.load(config.data, config.model, seed=config.data_seed, note=lambda line: None)
    state, numbers, feed = program.placed(program.initial_state(), step), program.step_inputs(), program.train_feed()
    with Prefetch(source.train_batches(0, *feed.rows), feed.put) as batches:
        for batch, _ in zip(batches, range(config.steps), strict=False):
            state, _ = step(state, numbers, batch)
    result = evaluate(score, state.params, numbers, source, program.eval_feed())
    assert result is not None
    assert result.accuracy is not None
    return result.loss, result.accuracy


def _first_images(folder: Path) -> None:
    """IDX files of the first training images of Fashion-MNIST, and of as many to test."""
    folder.mkdir(exist_ok=True)
    for name in idx.FILES:
        values = idx.array(idx.DEBIAN / name)[:FASHION_IMAGES]
        head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
        (folder / name).write_bytes(head + values.tobytes())


if __name__ == "__main__":
    sys.exit(main())
