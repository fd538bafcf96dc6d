"""What a checkpoint of 100 MB costs a run: how long saving blocks it, what writing and digests take, how long restoring takes.

    python -m scripts.bench.runs.save_cost [--rounds 9] [--json docs/performance/save_cost.json]

A decoder under AdamW trains, one step between any two measurements. `host_copy` is a plain copy of every array to the host,
to which the time that the call of `save` blocks is compared; `write` is the time until the checkpoint is verified and has its
manifest; `digests` is the hashing in it, of arrays and files, measured alone. The share of a run is that of everything the
run loses to a save (the call, and steps that are slower while it is written) at the default interval. On a CPU the arrays
are not copied by the call: the step after it, which may not overwrite them, pays for that, and counts as lost time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mupax.train.checkpoints import failures, manifest
from mupax.train.checkpoints import folder as disk
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import CheckpointConfig, MeshConfig
from mupax.train.core.program import assemble
from mupax.train.parallel.sharding import abstract_batch

FACTS = {"digest": "none"}
BATCH = 4
"""Sequences of 128 bytes: steps far shorter than those of real runs of this size, so that the share of time is an upper bound."""


class Run:
    """A decoder of 8.6 million parameters, whose state with AdamW's moments is 103 MB, on one device.

    Args:
        tiny: a small one, to see that it runs.
    """

    def __init__(self, tiny: bool) -> None:
        recipe = RECIPES["lm-tiny"]()
        size = {"width": 32, "depth": 1} if tiny else {"width": 384, "depth": 5}
        model = dataclasses.replace(recipe.model, **size, num_heads=6 if not tiny else 2, seq_len=128)
        config = dataclasses.replace(recipe, model=model, mesh=MeshConfig(data=1))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=BATCH)).resolved()
        self.program = assemble(config, jax.devices()[:1])
        self.state, self.numbers = self.program.initial_state(), self.program.step_inputs()
        self._step, self._feed = self.program.compile_train(), self.program.train_feed()
        shapes = abstract_batch(model, BATCH)
        self._batch = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        self.done = 0

    @property
    def bytes(self) -> int:
        """Size of the state."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def step(self) -> float:
        """Train one step; its seconds."""
        began = time.perf_counter()
        self.state, _ = self._step(self.state, self.numbers, self._feed.put(self._batch))
        jax.block_until_ready(self.state)
        self.done += 1
        return time.perf_counter() - began


def measured(run: Run, workdir: Path, rounds: int) -> list[dict[str, float]]:
    """Seconds of everything, one entry per round."""
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), run.state)
    rows = []
    with Checkpoints(workdir, 2) as checkpoints:
        for turn in range(rounds + 1):
            plain = statistics.median(run.step() for _ in range(3))
            one = {"step": plain, "host_copy": _timed(_copied, run.state)}
            run.step()
            # While training goes on.
            one["save_call"] = _timed(checkpoints.save, run.done, run.state, FACTS)
            slower = [run.step() - plain]
            while checkpoints.latest != run.done - len(slower):
                slower.append(run.step() - plain)
            one["lost"] = one["save_call"] + max(0.0, sum(slower))
            # Alone, to see where the time goes.
            began = time.perf_counter()
            checkpoints.save(run.done, run.state, FACTS, last=True)
            if failure := checkpoints.wait():
                raise SystemExit(failure)
            one["write"] = time.perf_counter() - began
            folder = checkpoints.folder / str(run.done)
            arrays, listed = manifest.by_name(run.state.arrays()), manifest.read(folder)
            shards = manifest.host_shards(arrays)
            one["digests"] = _timed(manifest.describe_arrays, arrays, shards) + _timed(disk.file_digests, folder, 0, 1)
            one["read_back"] = _timed(failures.damaged_arrays, folder, listed.arrays)
            one["restore"] = _timed(checkpoints.restore, abstract, FACTS)
            if turn:  # the first warms up
                rows.append(one)
    return rows


def _copied(state: Any) -> list[np.ndarray]:
    return [np.array(shard.data) for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]


def _timed(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    jax.block_until_ready(work(*arguments))
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="saves of each kind (default 9)")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args(argv)
    run, interval = Run(args.tiny), CheckpointConfig().every_steps
    with tempfile.TemporaryDirectory() as workdir:
        rounds = measured(run, Path(workdir), args.rounds)
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}

    def ratio(one: str, other: str, times: float = 1) -> float:
        return round(statistics.median(each[one] / (each[other] * times) for each in rounds), 5)

    record = {
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "state_bytes": run.bytes,
        "rounds": args.rounds,
        "interval_steps": interval,
        "ms": {name: round(1e3 * value, 2) for name, value in median.items()},
        "ratio": {
            "save_call / host_copy": ratio("save_call", "host_copy"),
            "digests / write": ratio("digests", "write"),
            "save_call / interval": ratio("save_call", "step", interval),
            "lost / interval": ratio("lost", "step", interval),
        },
    }
    print(json.dumps(record, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
