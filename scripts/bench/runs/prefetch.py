"""Batches put on the devices by a thread while earlier steps run, against the loop putting each itself.

Both make the steps of a recipe on the same data, in turns, with as many steps in flight and the same fetching of metrics:

    python -m scripts.bench.runs.prefetch [--model lm|vit] [--rounds 10] [--json out.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from mupax.terminal import rich_console
from mupax.train import data as data_sources
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import MeshConfig
from mupax.train.core.program import assemble
from mupax.train.parallel.processes import Processes
from mupax.train.parallel.signals import StopRequest
from mupax.train.run.prefetch import Prefetch
from mupax.train.run.results import Report
from mupax.train.run.runtime import Patience, Runtime, Watchdog
from mupax.train.run.start import IN_FLIGHT, Position
from scripts.bench.in_turns import compared

RECIPE = {"lm": "lm-tiny", "vit": "vit-digits"}


class Inline:
    """What `mupax.train.run.prefetch.Prefetch` does, without a thread: each batch is put when it is asked for."""

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


class Loop:
    """The steps of a recipe on one device, as the loop makes them, without evaluations and checkpoints."""

    def __init__(self, model: str) -> None:
        recipe = RECIPES[RECIPE[model]]()
        log = dataclasses.replace(recipe.log, progress=False)
        self.config = dataclasses.replace(recipe, mesh=MeshConfig(data=1), log=log).resolved()
        self.program = assemble(self.config, jax.devices()[:1])
        self.data = data_sources.load(self.config.data, self.config.model, seed=0, note=lambda text: None)
        self.step, self.state, self.numbers = (
            self.program.compile_train(),
            self.program.initial_state(),
            self.program.step_inputs(),
        )

    def turn(self, steps: int, how: Callable[..., Any]) -> float:
        """Seconds per step, after two that are not counted, from the first batches on."""
        processes = Processes()
        processes.index = 1  # of several, this one writes and draws nothing
        rt = Runtime(
            self.config,
            Path(),
            None,
            False,
            processes,
            StopRequest(),
            Watchdog(None),
            rich_console(quiet=True),
            Patience(),
        )
        report, feed, began = (
            Report(self.program, self.data, rt, Position(self.state, 0, keeps_rows=False), 0.0, 0),
            self.program.train_feed(),
            0.0,
        )
        with report, how(self.data.train_batches(0, *feed.rows), feed.put) as batches:
            for number in range(steps + 2):
                if number == 2:
                    report.fetch()
                    began = time.perf_counter()
                report.fetch()
                batch = next(batches)
                self.state, metrics = self.step(self.state, self.numbers, batch)
                report.add(number, metrics)
                report.fetch(IN_FLIGHT)
            report.fetch()
            return (time.perf_counter() - began) / steps


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=RECIPE, default="lm")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each (default 10)")
    parser.add_argument("--steps", type=int, default=20, help="of a turn (default 20)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args(argv)
    train_loop = Loop(args.model)
    seconds: dict[str, list[float]] = {"thread": [], "inline": []}
    for turn in range(args.rounds):
        for name in ("thread", "inline") if turn % 2 == 0 else ("inline", "thread"):
            seconds[name].append(train_loop.turn(args.steps, Prefetch if name == "thread" else Inline))
    record = {"model": args.model, "steps": args.steps, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    record |= compared(seconds, "thread")
    print(
        f"step time with a thread over without: {record['ratio']['inline']:.3f} "
        f"(quartiles {record['quartiles']['inline']}, {record['ms']['inline']:.1f} ms without)"
    )
    print(json.dumps(record))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
