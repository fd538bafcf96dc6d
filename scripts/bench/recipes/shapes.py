"""How hard the endless image set is, and how fast it is drawn: writes docs/shapes.json and, beside it, a picture.

    python -m scripts.bench.recipes.shapes [--json docs/shapes.json]

A linear model on 20,000 images and 5,000 that it was not trained on; what transformers make of them is in `scripts.vision.larger`.
Drawing is timed on one core, in CPU time. The picture has images of each class.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mupax.train.data.sources import shapes
from scripts import ROOT

EVAL_IMAGES = 5000
OUT = ROOT / "docs" / "shapes.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.recipes.shapes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, default=OUT, help="where to write (default docs/shapes.json)")
    args = parser.parse_args(argv)
    record = {
        "command": "python -m scripts.bench.recipes.shapes",
        "version": shapes.VERSION,
        "images_per_second_on_one_core": round(speed()),
        "linear": {
            "images": shapes.LINEAR_IMAGES,
            "accuracy": shapes.linear_accuracy(shapes.LINEAR_IMAGES, EVAL_IMAGES),
        },
    }
    picture().savefig(args.json.with_suffix(".png"))
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
