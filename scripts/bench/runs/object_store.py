"""What a workdir in a bucket costs a run: the steps of one there and of one on a disk, in turns.

    python -m scripts.bench.runs.object_store [--rounds 7] [--json docs/performance/object_store.json]

A run of 20 steps that saves after every tenth, each time as a user starts it. `step` is the mean time of its steps, from the
end of one to the end of the next, the first left out; those during which a checkpoint is written count. `run` is all of it,
from the command to its end, the compiled program taken from the cache, and `processor` the time of the cores in that, which what else
the machine does changes little. The bucket is that of the emulator
(`scripts/campaigns/injection/emulator.py`) on the same machine, which takes from the run the time of the cores that it needs itself:
more than the network of a cloud does, and less of a delay.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.campaigns.injection import emulator

RECIPE, STEPS = "lm-tiny", 20
FLAGS = (
    "--model.width {width} --model.depth {depth} --model.num-heads 4 --model.seq-len 128 --data.batch-size 16 "
    "--data.eval-examples 16 --data.eval-batch-size 16 --optimizer.warmup-steps 2 --checkpoint.every-steps 10 "
    "--log.no-samples"
)


def run(words: Sequence[str], workdir: str) -> tuple[float, float, float]:
    """Mean seconds of a step, seconds of the run, and processor seconds of it."""
    from mupax.paths import path_of
    from mupax.train.config import cli
    from mupax.train.run import loop
    from mupax.train.run.report import metrics

    began, used = time.perf_counter(), time.process_time()
    config = cli.parse(RECIPE, cli.recipe(RECIPE), [*words, "--workdir", workdir]).config
    with contextlib.redirect_stdout(io.StringIO()):
        if code := loop.run(config):
            raise SystemExit(f"the run in {workdir} ended with exit code {code}")
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    rows = metrics.read(path_of(workdir) / metrics.FILE_NAME)
    return statistics.fmean(row["seconds"] for row in rows if "seconds" in row and row["step"] > 1), seconds, cpu


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="runs of each kind (default 7)")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args(argv)
    words = FLAGS.format(width=16 if args.tiny else 128, depth=1 if args.tiny else 3).split()
    words += ["--steps", str(STEPS)]
    with emulator.running() as url, tempfile.TemporaryDirectory() as folder:
        os.environ |= emulator.environ(url)
        places = {"bucket": f"gs://{emulator.new_bucket(url)}", "disk": folder}
        seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in places}
        for turn in range(-1, args.rounds):  # the first warms up
            for name in list(places) if turn % 2 == 0 else list(places)[::-1]:
                one = run(words, f"{places[name]}/{turn + 1}")
                if turn >= 0:
                    seconds[name].append(one)

    from scripts.bench import in_turns

    results = {
        kind: in_turns.compared({name: [one[i] for one in times] for name, times in seconds.items()}, "bucket")
        for i, kind in enumerate(("step", "run", "processor"))
    }
    in_turns.write({**in_turns.machine(), "steps": STEPS, **results}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
