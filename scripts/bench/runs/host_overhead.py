"""Host time per optimizer step: what the loop does in Python between one step's dispatch and the next.

A model so small that its step takes a fraction of a millisecond runs through `mupax.train.run.loop.run` as any run does, with metrics,
TensorBoard and progress. Every dispatch is timed: `between_ms` is from the return of one dispatch to the call of the next,
less what the same step takes on the device; `dispatch_ms` is the call itself. Evaluations and checkpoints are not in it.

    python -m scripts.bench.runs.host_overhead [--steps 2000] [--json out.json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from mupax.train.config.run import CheckpointConfig, Config, DataConfig, LogConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.sharding import abstract_batch
from mupax.train.run import loop
from mupax.zoo import configs

WARM_UP = 100
"""Steps that are not counted."""


def config_of(folder: Path, steps: int) -> Config:
    """One block of width 16 on a text in `folder`, two sequences a device."""
    choose = random.Random(0)
    text = "\n".join(
        " ".join(choose.choice(("def", "return", "import", "class")) for _ in range(9)) for _ in range(2000)
    )
    (folder / "text.txt").write_text(text)
    model = dataclasses.replace(configs.get("lm-tiny"), width=16, depth=1, num_heads=2, seq_len=16)  # pyright: ignore
    return Config(
        recipe="host-overhead", model=model, steps=steps,
        data=DataConfig(name=f"text:{folder / 'text.txt'}", batch_size=2 * jax.device_count(), eval_examples=2, data_dir=str(folder / "data")),
        preset=PresetConfig(name="mup"), optimizer=OptimizerConfig(peak_lr=1e-4), log=LogConfig(samples=False),
        checkpoint=CheckpointConfig(every_steps=steps), workdir=str(folder / "run"),
    ).resolved()  # fmt: skip


class Timed:
    """A step that notes when it is called and when it has returned."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self.calls: list[tuple[float, float, float, float]] = []
        """Of each call: wall clock before and after it, and the thread's own CPU time before and after it."""

    def __call__(self, *args: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = self._step(*args)
        self.calls.append((wall, time.perf_counter(), cpu, time.thread_time()))
        return result

    def memory_analysis(self) -> Any:
        """Return what the compiled step says of its memory; a run asks for it before its first step."""
        return self._step.memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]


def alone(program: Program, rounds: int = 300) -> float:
    """Median seconds that the devices take after the dispatch of a step has returned, with nothing else to do."""
    step, state, numbers, feed = (
        program.compile_train(),
        program.initial_state(),
        program.step_inputs(),
        program.train_feed(),
    )
    shapes = abstract_batch(program.config.model, program.config.data.batch_size)
    batch = feed.put({name: np.ones(leaf.shape, leaf.dtype) for name, leaf in shapes.items()})
    seconds = []
    for _ in range(rounds):
        state, metrics = step(state, numbers, batch)
        began = time.perf_counter()
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def in_the_loop(config: Config) -> list[tuple[float, float, float, float]]:
    """The calls of the step in a run of this config, whose own words go nowhere."""
    timed: list[Timed] = []
    compile_train = Program.compile_train

    def compiled(program: Program) -> Timed:
        timed.append(Timed(compile_train(program)))
        return timed[0]

    with mock.patch.object(Program, "compile_train", compiled), contextlib.redirect_stdout(io.StringIO()):
        code = loop.run(config)
    assert code == 0, "the run failed"
    return timed[0].calls


def measured(steps: int) -> dict[str, Any]:
    """Milliseconds per step: median, 90th percentile and mean between dispatches, and the dispatch itself."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), steps)
        calls = np.array(in_the_loop(config)[WARM_UP:]) * 1e3
        device = 1e3 * alone(assemble(config))
    between = np.maximum(calls[1:, 0] - calls[:-1, 1] - device, 0.0)
    cpu = calls[1:, 2] - calls[:-1, 3]
    dispatch = calls[:, 1] - calls[:, 0]
    return {
        "steps": steps,
        "between_ms": {"median": np.median(between), "p90": np.quantile(between, 0.9), "mean": between.mean()},
        "between_cpu_ms": {"median": np.median(cpu), "p90": np.quantile(cpu, 0.9), "mean": cpu.mean()},
        "dispatch_ms": {"median": np.median(dispatch), "p90": np.quantile(dispatch, 0.9), "mean": dispatch.mean()},
        "device_ms": device,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=2000, help=f"of which the first {WARM_UP} are not counted (default 2000)"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args(argv)
    if args.steps <= WARM_UP + 1:
        parser.error(f"--steps {args.steps} leaves nothing to count; write more than {WARM_UP + 1}")
    record = json.loads(json.dumps(measured(args.steps)), parse_float=lambda number: round(float(number), 4))
    between, cpu = record["between_ms"], record["between_cpu_ms"]
    print(
        f"host time between dispatches: median {between['median']:.3f} ms, p90 {between['p90']:.3f} ms "
        f"(the thread's own work {cpu['median']:.3f} ms); dispatch {record['dispatch_ms']['median']:.3f} ms"
    )
    print(json.dumps(record))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
