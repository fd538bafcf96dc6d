"""Compare `mupax sweep` with one `mupax train` per point, as complete commands.

    python -m scripts.bench.runs.sweep_cost [--rates 9] [--seeds 2] [--steps 200] [--json PATH]

Commands are timed from start to exit: imports, data, compilation, training, evaluation, files. With
`--one-core` their CPU time counts, but a step is timed by the wall clock of its own run. Only a few
points are really trained by runs of their own, before and after the sweep. Their median stands for
all points, because points that differ in values cost the same.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scripts.bench import in_turns

TINY = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 "
    "--data.batch-size 16 --data.eval-examples 64 --optimizer.warmup-steps 2"
)


@dataclass(frozen=True, kw_only=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    rates: int = 9
    """Number of learning rates."""
    seeds: int = 2
    """Number of seeds of each learning rate."""
    steps: int = 200
    """Training steps of each point."""
    alone: int = 4
    """Number of points that are really trained by a run of their own."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """Execution of the sweep, as its flag `--how`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, report the results and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    results = measure(args)
    in_turns.report("sweep_cost", results, args.json)
    return 0


def measure(args: Options) -> list[dict[str, Any]]:
    """Return two results: times and ratio of the complete commands, and of a training step."""
    flags = ["--steps", str(args.steps)]
    if args.tiny:
        flags = [*shlex.split(TINY), *flags]
    num_points = args.rates * args.seeds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Half of the single runs are before the sweep and half after it, because the speed of a
        # shared machine drifts. The very first run may prepare the data and does not count.
        _run_alone(folder / "first", flags)
        before = args.alone // 2
        alone = [_run_alone(folder / f"alone-{number}", flags) for number in range(before)]

        sweep = ["sweep", "lm-tiny", *flags]
        sweep += ["--lr", f"2^-10:2^-4:{args.rates}", "--seeds", str(args.seeds)]
        sweep += ["--how", args.how, "--out", str(folder / "sweep")]
        sweep_seconds = _seconds(sweep)

        for number in range(before, args.alone):
            alone.append(_run_alone(folder / f"alone-{number}", flags))
        rows = _rows(folder / "sweep" / "points.jsonl")

    # Runs count the wall time of their steps themselves, also where commands are timed by CPU time.
    step_label = "a step (wall time)" if in_turns.has_one_core() else "a step"
    execution = rows[-1]["how"]
    sweep_step = statistics.median(row["seconds"] / row["steps"] for row in rows)
    return [
        _result(
            f"{num_points} points of {args.steps} steps, whole commands ({execution})",
            sweep_seconds,
            [num_points * run.seconds for run in alone],
        ),
        _result(step_label, sweep_step, [run.step_seconds for run in alone]),
    ]


class SingleRun(NamedTuple):
    """Times of one `mupax train`: the complete command, and the median step."""

    seconds: float
    step_seconds: float


def _run_alone(workdir: Path, flags: Sequence[str]) -> SingleRun:
    """Train one point by a run of its own and return its times."""
    seconds = _seconds(["train", "lm-tiny", *flags, "--workdir", str(workdir)])
    rows = _rows(workdir / "metrics.jsonl")
    step_seconds = statistics.median(row["seconds"] for row in rows if "loss" in row)
    return SingleRun(seconds, step_seconds)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _result(label: str, sweep: float, alone: Sequence[float]) -> dict[str, Any]:
    """Return a result in the form of `in_turns.compared`, from times in seconds."""
    median_alone = statistics.median(alone)
    return {
        "model": label,
        "ms": {"sweep": round(1e3 * sweep, 3), "runs of their own": round(1e3 * median_alone, 3)},
        "ratio": {"runs of their own": round(sweep / median_alone, 4)},
        "rounds": len(alone),
    }


def _seconds(words: Sequence[str]) -> float:
    """Run `mupax` with these words and return its CPU time on one core, otherwise its wall time."""
    now = in_turns.children_cpu if in_turns.has_one_core() else time.perf_counter
    began = now()
    subprocess.run([sys.executable, "-m", "mupax", *words], check=True, stdout=subprocess.DEVNULL)
    return now() - began


if __name__ == "__main__":
    sys.exit(main())
