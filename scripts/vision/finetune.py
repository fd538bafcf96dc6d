"""Fine-tuning against training from scratch and a linear probe, where few images are labelled: writes docs/vision/finetune.json.

    python -m scripts.vision.finetune --workdir FOLDER [--seeds 3] [--json FILE]

The source is `vit-fashion` on five kinds of clothes of Fashion-MNIST (T-shirt, trouser, pullover, dress, coat). Two tasks have ten
labelled images a class, others for every seed, and are scored on 200 others of each: the other five kinds (sandal, shirt, sneaker, bag,
ankle boot), and the same five in negative and upside down. All of a task's images are of the test set, which the source never saw.
A third task, `scripts.vision.hands`, has a source that knows its classes.
Fine-tuning is `mupax train finetune FOLDER --from SOURCE --data.no-augment` as it is shipped, its rate too; the probe is the same with
`--train-only readout`. What it is held against may choose the best of several rates by that score, fine-tuning may not. A row is one
run; a run that has a row is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mupax.train import data
from mupax.train.config.run import Config, InitConfig
from mupax.train.core.program import Program, assemble
from mupax.train.data.sources import idx
from mupax.train.reuse.start import finetune, init_from
from mupax.train.run.evaluate import evaluate
from scripts import ROOT
from scripts.vision import hands, rows

OUT = ROOT / "docs" / "vision" / "finetune.json"
SOURCE = (
    "vit-fashion --data.augment --model.num-classes 5 --model.width 32 --model.depth 2 --model.num-heads 2 --steps 1000"
)
SOURCE_CLASSES = 5
"""Classes that the source was trained on: the first."""
TASKS = {"other clothes": range(SOURCE_CLASSES, 10), "the same in negative, upside down": range(SOURCE_CLASSES)}
NAMES = (*TASKS, hands.TASK)
EACH, TESTED = 10, 200
"""Labelled images of a class, and those that are scored."""
ARMS: dict[str, tuple[float | None, ...]] = {
    "fine-tuned": (None,),
    "from scratch": (1e-3, 3e-3, 3e-4),
    "linear probe": (9e-2, 3e-2, 9e-3),
}
"""Name to rates; None is the one that is shipped."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train what has no row yet."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.vision.finetune", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--workdir", type=Path, required=True, help="for the source and the images, a few MB")
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, … (default 3)")
    parser.add_argument("--task", choices=NAMES, action="append", help="one of the tasks (default all)")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write (default docs/vision/finetune.json)")
    args = parser.parse_args(argv)
    table = rows.read(args.json)
    done = {(row["task"], row["arm"], row["seed"], row["rate"]) for row in table}
    for seed, task in itertools.product(range(args.seeds), args.task or NAMES):
        for arm, rate in arms(task):
            if (task, arm, seed, rate) in done:
                continue
            is_hands = task == hands.TASK
            source = hands.source(args.workdir) if is_hands else _source(args.workdir)
            folder = hands.few_images(args.workdir, seed) if is_hands else _few_images(args.workdir, task, seed)
            loss, accuracy = scores(_config(folder, source, arm, rate, seed))
            table.append({"task": task, "arm": arm, "seed": seed, "rate": rate, "loss": loss, "accuracy": accuracy})
            rows.write(args.json, "python -m scripts.vision.finetune", table)
    return 0


def arms(task: str) -> list[tuple[str, float | None]]:
    """Name and rate of every run of a task and seed, the first rate of each arm before the second."""
    rates = {**ARMS, **(hands.ARMS if task == hands.TASK else {})}
    return [(arm, of[k]) for k in range(max(map(len, rates.values()))) for arm, of in rates.items() if k < len(of)]


def _source(workdir: Path) -> Path:
    """The run that the others go on from, trained if it is not there."""
    folder, run = workdir / "first", workdir / "source"
    if not (run / "checkpoints" / "1000").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for images, labels in (idx.FILES[:2], idx.FILES[2:]):
            x, y = (idx.array(idx.DEBIAN / name) for name in (images, labels))
            for name, values in ((images, x[y < SOURCE_CLASSES]), (labels, y[y < SOURCE_CLASSES])):
                head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
                (folder / name).write_bytes(head + values.tobytes())
        words = [*SOURCE.split(), "--data.name", f"idx:{folder}", "--workdir", str(run), "--resume"]
        subprocess.run([sys.executable, "-m", "mupax.train", *words], check=True)
    return run


def _few_images(workdir: Path, task: str, seed: int) -> Path:
    """A folder of images per class: few to train on, drawn by the seed, and the same ones to test."""
    folder = workdir / f"{task.replace(' ', '-')}-{seed}"
    x, y = (idx.array(idx.DEBIAN / name) for name in idx.FILES[2:])
    for label in TASKS[task]:
        tested, remainder = np.split(np.flatnonzero(y == label), [TESTED])
        chosen = np.random.default_rng([seed, label]).permutation(remainder)[:EACH]
        for side, places in (("train", chosen), ("val", tested)):
            path = folder / side / f"{label}"
            path.mkdir(parents=True, exist_ok=True)
            for i in places:
                Image.fromarray(255 - x[i, ::-1] if label < SOURCE_CLASSES else x[i]).save(path / f"{i}.png")
    return folder


def _config(folder: Path, source: Path, arm: str, rate: float | None, seed: int) -> Config:
    words = [str(folder), "--from", str(source), "--data.no-augment", "--seed", str(seed)]
    words += ["--train-only", "readout"] * (arm == "linear probe") + ["--lora.rank", "8"] * (arm == "adapters")
    words += [] if rate is None else ["--optimizer.peak-lr", str(rate)]
    config = finetune.command(words).config
    return dataclasses.replace(config, init=InitConfig()) if arm == "from scratch" else config


@functools.lru_cache
def _compiled(config: Config) -> tuple[Program, Any, Any]:
    program = assemble(config)
    step = program.compile_train()
    return program, step, program.compile_eval(step)


def scores(config: Config, steps: int | None = None) -> tuple[float, float]:
    """Evaluation loss (nats) and accuracy after a run of `finetune`, without a workdir; runs of one shape are compiled once.

    Args:
        config: of the run.
        steps: after how many; all of them unless given.
    """
    kind = config.data.name.partition(":")[0]
    shape = dataclasses.replace(config.data, name=f"{kind}:x")
    optimizer = dataclasses.replace(
        config.optimizer, peak_lr=1.0, layer_decay=1.0
    )  # numbers of the step, not of its program
    program, step, score = _compiled(
        dataclasses.replace(config, seed=0, workdir=None, init=InitConfig(), data=shape, optimizer=optimizer)
    )
    program = program.renumbered(config)
    source = data.load(config.data, config.model, seed=config.data_seed, note=lambda line: None)
    starts = config.init.init_from is not None
    state = init_from.initial_state(program, init_from.prepare(program)) if starts else program.initial_state()
    state, numbers, feed = program.placed(state, step), program.step_inputs(), program.train_feed()
    for k in range(config.steps if steps is None else steps):
        state, _ = step(state, numbers, feed.put(source.train_batch(k)))
    result = evaluate(score, state.params, numbers, source, program.eval_feed())
    return result.loss, result.accuracy


if __name__ == "__main__":
    sys.exit(main())
