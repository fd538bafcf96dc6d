"""What a sweep saves over runs of its own: `mupax sweep` against one `mupax train` per point, as whole commands.

    python -m scripts.bench.runs.sweep_cost [--rates 9] [--seeds 2] [--steps 200] [--json PATH]

Whole processes, from start to exit: imports, data, compilation, training, evaluation, files. A run of its own is started for a few of
the points, spread over the sweep's time, and their median stands for all: points that differ in numbers cost the same.
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
from typing import Any, Literal

from scripts.bench import in_turns

TINY = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 --data.eval-examples 64 "
    "--optimizer.warmup-steps 2"
)


@dataclass(frozen=True, kw_only=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    rates: int = 9
    """Learning rates."""
    seeds: int = 2
    """Seeds of each."""
    steps: int = 200
    """Steps of each point."""
    alone: int = 4
    """Runs of their own that are really started."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """As for the sweep."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    args = in_turns.parse(Options, argv)
    results = measure(args)
    in_turns.report("sweep_cost", results, args.json)
    return 0


def measure(args: Options) -> list[dict[str, Any]]:
    """Times of the whole commands and of a step, and their ratios."""
    flags = [*(shlex.split(TINY) if args.tiny else []), "--steps", str(args.steps)]
    points = args.rates * args.seeds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone: list[float] = []
        steps: list[float] = []

        def run_alone(count: int) -> None:
            for _ in range(count):
                workdir = folder / f"alone-{len(list(folder.iterdir()))}"
                alone.append(_seconds(["train", "lm-tiny", *flags, "--workdir", str(workdir)]))
                rows = [
                    json.loads(line)
                    for line in (workdir / "metrics.jsonl").read_text().splitlines()
                ]
                steps.append(statistics.median(row["seconds"] for row in rows if "loss" in row))

        run_alone(1 + args.alone // 2)
        del alone[0], steps[0]  # it may have prepared the data
        grid = f"2^-10:2^-4:{args.rates}"
        sweep = [
            "sweep",
            "lm-tiny",
            *flags,
            "--lr",
            grid,
            "--seeds",
            str(args.seeds),
            "--how",
            args.how,
        ]
        whole = _seconds([*sweep, "--out", str(folder / "sweep")])
        run_alone(args.alone - args.alone // 2)
        rows = [
            json.loads(line)
            for line in (folder / "sweep" / "points.jsonl").read_text().splitlines()
        ]
    how = rows[-1]["how"]
    of_step = statistics.median(row["seconds"] / row["steps"] for row in rows)
    return [
        _result(
            f"{points} points of {args.steps} steps, whole commands ({how})",
            whole,
            [points * one for one in alone],
        ),
        _result("a step", of_step, steps),
    ]


def _result(what: str, sweep: float, alone: Sequence[float]) -> dict[str, Any]:
    own = statistics.median(alone)
    return {
        "model": what,
        "ms": {"sweep": round(1e3 * sweep, 3), "runs of their own": round(1e3 * own, 3)},
        "ratio": {"runs of their own": round(sweep / own, 4)},
        "rounds": len(alone),
    }


def _seconds(words: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "mupax", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
