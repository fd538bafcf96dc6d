"""Batches put on the devices by a thread while earlier steps run, against the loop putting each itself.

Both make the same steps on the same data through `train.loop.run`, in turns; compared is the median of the step times in
their metrics.jsonl, without the first step. `python -m scripts.bench.prefetch [--model lm|vit] [--rounds 5] [--json out.json]`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from scripts.bench.in_turns import compared
from train import loop, metrics
from train.config import CheckpointConfig, Config, LogConfig, MeshConfig
from train.recipes import RECIPES

RECIPE = {"lm": "lm-tiny", "vit": "vit-digits"}


class Inline:
    """What `train.prefetch.Prefetch` does, without a thread: each batch is put when it is asked for."""

    ready = True

    def __init__(self, source: Generator[Any, None, None], put: Callable[[Any], Any]) -> None:
        self._source, self._put = source, put

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._put(next(self._source))

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exception: object) -> None:
        self._source.close()


def config_of(model: str, steps: int, workdir: str) -> Config:
    """A recipe on one device, without evaluations on the way."""
    recipe = RECIPES[RECIPE[model]]()
    return dataclasses.replace(
        recipe, steps=steps, mesh=MeshConfig(data=1), workdir=workdir,
        data=dataclasses.replace(recipe.data, eval_examples=recipe.data.batch_size),
        log=LogConfig(progress=False, samples=False), checkpoint=CheckpointConfig(every_steps=steps),
    ).resolved()  # fmt: skip


def step_seconds(model: str, steps: int, threaded: bool) -> float:
    """Median step time of one run."""
    how = contextlib.nullcontext() if threaded else mock.patch.object(loop, "Prefetch", Inline)
    with tempfile.TemporaryDirectory() as folder, how, contextlib.redirect_stdout(io.StringIO()):
        code = loop.run(config_of(model, steps, f"{folder}/run"))
        assert code == 0, "the run failed"
        rows = metrics.read(Path(folder) / "run" / metrics.FILE_NAME)
    return statistics.median(row["seconds"] for row in rows if "loss" in row and row["step"] > 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=RECIPE, default="lm")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--steps", type=int, default=40, help="of a run (default 40)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {"thread": [], "inline": []}
    step_seconds(args.model, 2, True)  # Prepares the data and fills the compiler's cache.
    for turn in range(args.rounds):
        for name in ("thread", "inline") if turn % 2 == 0 else ("inline", "thread"):
            seconds[name].append(step_seconds(args.model, args.steps, name == "thread"))
    found = {"model": args.model, "steps": args.steps, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    found |= compared(seconds, "thread")
    print(
        f"step time with a thread over without: {found['ratio']['inline']:.3f} "
        f"(quartiles {found['quartiles']['inline']}, {found['ms']['inline']:.1f} ms without)"
    )
    print(json.dumps(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
