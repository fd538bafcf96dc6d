"""Model FLOPs utilization of whole training steps in bfloat16 on one GPU, against PyTorch on the same GPU in the same run.

    python -m scripts.bench.pytorch.gpu_mfu [--minutes 10] [--steps 20] [--profile [FOLDER]] [--json FILE.json]

The most telling points come first: of every model, both sides at the batch that most likely is best, and a sweep of small models
vmapped against runs of their own (`scripts.bench.runs.sweep_cost`); then other batches, then other ways to compile. What the
minutes do not reach is listed. The best point of each side counts. FLOPs are the model's own (`mupax.zoo.families`: matrix
products, half of a causal context), whatever is computed again. PyTorch is the twin of `scripts.bench.pytorch.models` under
`torch.compile` with its flash attention, autocast to bfloat16 and fused AdamW, as its users train. Each point runs in a process of
its own (`scripts.bench.pytorch.gpu_point`), so that one framework's memory never takes from the other's.
Needs JAX and PyTorch with CUDA; no data. On another device `--tiny` shows that it runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mupax.command_line import Switch
from scripts import harness

BATCHES = {
    "gpt2": [32, 64, 16],
    "lm-1b": [8, 16, 4],
    "vit-b16": [256, 512, 128],
    "gpt2-medium": [32, 48, 16, 8],
    "vit-s16": [512, 1024, 256],
}
"""Models, the most telling first, and sequences or images per step that are tried, the most likely best first."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mupax": [
        {"layers": "unrolled", "remat": "none"},
        {"layers": "unrolled", "remat": "dots"},
        {"layers": "scan", "remat": "none"},
    ],
    "torch": [{}],
}
"""What each side may do, the most likely best first; its best counts."""

SWEEP = "sweep"
"""Name of the point that is a sweep against runs of their own, beside the models'."""

MODELS = (*list(BATCHES)[:3], SWEEP, *list(BATCHES)[3:])
"""Points in the order in which they are measured."""
LEAST_SECONDS = 20.0
"""A point is not started with less time left: starting and compiling take as much."""


class Point(NamedTuple):
    """What one process measures."""

    model: str
    side: str = "mupax"
    batch_size: int = 0
    variant: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """It in words."""
        return " ".join(
            [
                self.side,
                self.model,
                *([str(self.batch_size)] if self.batch_size else []),
                *(self.variant or {}).values(),
            ]
        )

    def command(self, args: Options, folder: Path) -> list[str]:
        """Return the command that measures it, from the arguments of `main` and a folder of temporary files."""
        tiny = ["--tiny"] if args.tiny else []
        if self.model == SWEEP:
            words = [
                "scripts.bench.runs.sweep_cost",
                "--how",
                "together",
                "--alone",
                "2",
                "--json",
                str(folder / "sweep.json"),
            ]
            return [
                sys.executable,
                "-m",
                *words,
                *(["--rates", "2", "--seeds", "1", "--steps", "4"] if tiny else []),
                *tiny,
            ]
        words = [
            self.side,
            self.model,
            str(self.batch_size),
            "--variant",
            json.dumps(self.variant or {}),
        ]
        if args.profile is not None:
            words += ["--profile", str(args.profile / self.text.replace(" ", "-"))]
        return [
            sys.executable,
            "-m",
            "scripts.bench.pytorch.gpu_point",
            *words,
            "--steps",
            str(args.steps),
            *tiny,
        ]


def plan(
    models: Sequence[str], sides: Sequence[str], batches: Sequence[int] | None, *, tiny: bool
) -> list[Point]:
    """Every point, the most telling first.

    Args:
        models: of `BATCHES`, and `SWEEP`.
        sides: of `VARIANTS`.
        batches: in place of each model's.
        tiny: one variant of one batch.
    """
    ranked: list[tuple[tuple[int, int], Point]] = []
    for model in models:
        if model == SWEEP:
            ranked.append(((0, 0), Point(SWEEP)))
            continue
        for side in sides:
            for place, variant in enumerate(VARIANTS[side][: 1 if tiny else None]):
                sizes = batches or ([2] if tiny else BATCHES[model])
                # All models at their first batch, then at others; then the next variant at the first batch, ...
                ranked += [
                    ((place, number > 0), Point(model, side, size, variant))
                    for number, size in enumerate(sizes)
                ]
    return [point for _, point in sorted(ranked, key=lambda one: one[0])]


def measure(
    points: Sequence[Point],
    run: Callable[[Point, float], dict[str, Any]],
    seconds: float,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[dict[str, Any]], list[str]]:
    """What was measured, and what was left out, with the reason.

    Args:
        points: of `plan`.
        run: a point and its time limit in seconds to what it measured, with `failed` where it did not.
        seconds: for all of them.
        timeout_s: most that one may take.
        clock: in seconds.
    """
    end, results, left_out = clock() + seconds, [], []
    for point in points:
        smaller = [
            row["batch_size"]
            for row in results
            if "failed" in row
            and (row["side"], row["model"], row["variant"])
            == (point.side, point.model, point.variant)
        ]
        if smaller and point.batch_size >= min(smaller):
            left_out.append(f"{point.text} (a batch of {min(smaller)} does not run)")
        elif (left := end - clock()) < LEAST_SECONDS:
            left_out.append(f"{point.text} (no time left)")
        else:
            row = {**point._asdict(), **run(point, min(timeout_s, left))}
            print(line(row), flush=True)
            results.append(row)
    return results, left_out


def answer(point: Point, args: Options, timeout_s: float) -> dict[str, Any]:
    """Return what a point's process says, or `failed` and why."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94"}
    with tempfile.TemporaryDirectory() as folder:
        words = point.command(args, Path(folder))
        # A group of its own: what it started, compilers among them, ends with it.
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return {"failed": f"no answer in {timeout_s:.0f} s"}
    lines = output.splitlines()
    if process.returncode or not lines or not lines[-1].startswith("{"):
        return {
            "failed": (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1][
                -300:
            ]
        }
    return json.loads(lines[-1])


def line(row: dict[str, Any]) -> str:
    """A result in words."""
    what = Point(*(row[name] for name in Point._fields)).text
    if "failed" in row:
        return f"{what}: does not run ({row['failed']})"
    if row["model"] == SWEEP:
        whole, step = (1 / one["ratio"]["runs of their own"] for one in row["results"])
        return f"{what}: {whole:.1f} times as fast as runs of their own by whole commands, {step:.1f} times by a step"
    mfu = (
        f", MFU {100 * row['mfu']:.1f} %"
        if row["mfu"]
        else f", no MFU: the peak of {row['device']} is not known"
    )
    return f"{what}: {1e3 * row['step_s']:.1f} ms, {row['units_per_s']:.0f} {row['unit']}s/s{mfu}"


def summary(points: list[dict[str, Any]], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Of every model the fastest point of both sides, and their ratio; all points, and those left out."""
    rows = {}
    for point in points:
        if "failed" not in point and point["model"] != SWEEP:
            row = rows.setdefault(point["model"], {})
            if point["flops_per_s"] > row.get(point["side"], {"flops_per_s": 0})["flops_per_s"]:
                row[point["side"]] = point
    for row in rows.values():
        if len(row) == 2:
            row["ratio"] = row["mupax"]["flops_per_s"] / row["torch"]["flops_per_s"]
    return {"benchmark": "gpu_mfu", "best": rows, "points": points, "left_out": [*left_out]}


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    models: tuple[str, ...] = MODELS
    batches: tuple[int, ...] = ()
    """Instead of the batches of each model."""
    sides: tuple[str, ...] = tuple(VARIANTS)
    minutes: float = 10
    """Minutes for all points together."""
    timeout: float = 240
    """Seconds that one point may take."""
    steps: int = 20
    """Timed steps of a point, three times over."""
    profile: Path | None = None
    """Also trace a few steps of every point, into a folder each."""
    tiny: Switch = False
    """Small models, to see that it runs."""
    json: Path | None = None
    """Also write the result here, after every point."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code: 0, or 1 where nothing ran."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--profile" in words and words[words.index("--profile") + 1 :][:1] in (
        [],
        *([w] for w in words if w[:2] == "--"),
    ):
        words.insert(words.index("--profile") + 1, "gpu-profile")  # a folder may be left out
    args = harness.parse(Options, words)
    harness.check_names(args.models, MODELS)
    harness.check_names(args.sides, VARIANTS)
    if args.steps < 1 or args.minutes <= 0:
        harness.refuse(
            f"--steps {args.steps} --minutes {args.minutes:g}: write at least 1 step, and more than no minutes"
        )
    points: list[dict[str, Any]] = []

    def run(point: Point, timeout_s: float) -> dict[str, Any]:
        row = answer(point, args, timeout_s)
        points.append({**point._asdict(), **row})
        if args.json is not None:
            args.json.write_text(json.dumps(summary(points), indent=1) + "\n")
        return row

    todo = plan(args.models, args.sides, args.batches, tiny=args.tiny)
    rows, left_out = measure(todo, run, 60 * args.minutes, args.timeout)
    result = summary(rows, left_out)
    if left_out:
        print(f"left out in {args.minutes:g} minutes (--minutes): {'; '.join(left_out)}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["best"]))
    return 0 if any("failed" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
