"""How hard the endless image set is, and how fast it is drawn: writes docs/shapes.json and, beside it, a picture.

    python -m scripts.bench.recipes.shapes [--steps 2000] [--seeds 3] [--json docs/shapes.json]

A linear model on 20,000 images, and two vision transformers in one pass (the recipe vit-endless at other sizes), all on the
same 5,000 images that none was trained on. Drawing is timed on one core, in CPU time. The picture has images of each class. A run
that the file has is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mupax.train import data
from mupax.train.config.recipes.laptop import vit_endless
from mupax.train.config.run import Config
from mupax.train.core.program import assemble
from mupax.train.data.sources import shapes
from mupax.train.run.evaluate import evaluate
from mupax.train.run.prefetch import Prefetch
from scripts import ROOT
from scripts.quality.page import difference

MODELS = {"tiny": {"width": 64, "depth": 2, "num_heads": 4}, "small": {"width": 128, "depth": 4, "num_heads": 8}}
EVAL_IMAGES = 5000
OUT = ROOT / "docs" / "shapes.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.recipes.shapes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=2000, help="of 64 images each (default 2000)")
    parser.add_argument("--seeds", type=int, default=3, help="initializations and orders of images (default 3)")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write (default docs/shapes.json)")
    args = parser.parse_args(argv)
    done = json.loads(args.json.read_text()) if args.json.exists() else {}
    runs = [row for row in done.get("runs", []) if row["steps"] == args.steps]
    record: dict[str, Any] = {
        "command": f"python -m scripts.bench.recipes.shapes --steps {args.steps} --seeds {args.seeds}",
        "version": shapes.VERSION,
        "images_per_second_on_one_core": done.get("images_per_second_on_one_core") or round(speed()),
        "linear": done.get("linear") or {
            "images": shapes.LINEAR_IMAGES,
            "accuracy": shapes.linear_accuracy(shapes.LINEAR_IMAGES, EVAL_IMAGES),
        },
        "models": MODELS,
        "runs": runs,
    }  # fmt: skip
    picture().savefig(args.json.with_suffix(".png"))
    for seed, (name, sizes) in itertools.product(range(args.seeds), MODELS.items()):
        if not any((row["model"], row["seed"]) == (name, seed) for row in runs):
            runs.append({"model": name, "seed": seed, **trained(sizes, args.steps, seed)})
            print(json.dumps(runs[-1]), flush=True)
        record["small_less_tiny"] = {value: apart(runs, value) for value in ("loss", "accuracy")}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["small_less_tiny"]))
    return 0


def apart(runs: Sequence[dict[str, Any]], value: str) -> dict[str, Any]:
    """Small less tiny, paired by seed: mean, half-width of the 95 % t interval (None of fewer than two) and number of seeds."""
    of = {(row["model"], row["seed"]): row[value] for row in runs}
    pairs = [of["small", seed] - of["tiny", seed] for name, seed in of if name == "small" and ("tiny", seed) in of]
    if len(pairs) < 2:
        return {"mean": float(np.mean(pairs)) if pairs else None, "half": None, "seeds": len(pairs)}
    mean, _, half = difference(pairs)
    return {"mean": round(mean, 5), "half": round(half, 5), "seeds": len(pairs)}


def speed(images: int = 4096, rounds: int = 5) -> float:
    """Images drawn in a second of one core: the best of some rounds."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if cores:
        os.sched_setaffinity(0, {min(cores)})
    try:
        times = []
        for k in range(rounds):
            began = time.process_time()
            shapes.render(0, shapes.TRAIN, np.arange(k * images, (k + 1) * images))
            times.append(time.process_time() - began)
        return images / min(times)
    finally:
        if cores:
            os.sched_setaffinity(0, cores)


def picture(rows: int = 3) -> Figure:
    """The first training images of each class, a column per class."""
    images, labels = shapes.render(0, shapes.TRAIN, np.arange(100 * rows))
    figure = Figure(figsize=(10, 1.05 * rows + 0.3), dpi=90, layout="constrained")
    for c, name in enumerate(shapes.CLASSES):
        for row, i in enumerate(np.flatnonzero(labels == c)[:rows]):
            axes = figure.add_subplot(rows, len(shapes.CLASSES), row * len(shapes.CLASSES) + c + 1)
            axes.imshow(images[i], interpolation="nearest")
            axes.set_axis_off()
            if row == 0:
                axes.set_title(name.replace(", ", "\n"), fontsize=8)
    return figure


def trained(sizes: dict[str, int], steps: int, seed: int) -> dict[str, Any]:
    """Loss and accuracy, on images never seen, of a model of these sizes after so many steps of the recipe."""
    config = dataclasses.replace(resized(sizes, steps), seed=seed)
    source = data.load(config.data, config.model, seed=config.data_seed, note=lambda line: None)
    program = assemble(config)
    step = program.compile_train()
    state, numbers, feed = program.placed(program.initial_state(), step), program.step_inputs(), program.train_feed()
    with Prefetch(source.train_batches(0, *feed.rows), feed.put) as batches:
        for batch, _ in zip(batches, range(steps), strict=False):
            state, _ = step(state, numbers, batch)
    scores = evaluate(program.compile_eval(step), state.params, numbers, source, program.eval_feed())
    assert scores is not None
    return {"steps": steps, "batch_size": config.data.batch_size, "loss": scores.loss, "accuracy": scores.accuracy}


def resized(sizes: dict[str, int], steps: int) -> Config:
    """The recipe at these sizes."""
    recipe = vit_endless()
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, **sizes), steps=steps)


if __name__ == "__main__":
    sys.exit(main())
