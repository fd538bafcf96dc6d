"""Measure model FLOPs utilization of training steps on one GPU, in mupax and in PyTorch.

    python -m scripts.bench.pytorch.gpu_mfu [--minutes 10] [--steps 20] [--profile [FOLDER]]
        [--json FILE.json]

The most telling points come first: of every model, both sides at the batch size that most likely is
best, and a sweep of small models against runs of their own (`scripts.bench.runs.sweep_cost`). Then
come other batch sizes, then other ways to compile. Points that the minutes do not reach are listed.

The best point of each side counts. All is in bfloat16. FLOPs are the model's own
(`mupax.zoo.families`: matrix products, half of a causal context), without what is computed again.
PyTorch trains the model of `scripts.bench.pytorch.models` as its users do: under `torch.compile`,
with flash attention, autocast to bfloat16 and fused AdamW. Each point runs in a process of its own
(`scripts.bench.pytorch.gpu_point`), so that one framework's memory never takes from the other's.

Last comes a table of what the compiler alone estimates for the best points of mupax, beside what
was measured (`scripts.bench.pytorch.gpu_estimate`).

Needs JAX and PyTorch with CUDA, and no data. On another device `--tiny` shows that it runs.
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
from mupax.terminal import gib, table
from mupax.train.parallel import chips
from scripts import harness

BATCHES = {
    "gpt2": [32, 64, 16],
    "lm-1b": [8, 16, 4],
    "vit-b16": [256, 512, 128],
    "gpt2-medium": [32, 48, 16, 8],
    "vit-s16": [512, 1024, 256],
}
"""Batch sizes to try, by model. The most telling model is first.

Of each model, the batch size that is most likely best is first.
"""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mupax": [
        {"layers": "unrolled", "remat": "none"},
        {"layers": "unrolled", "remat": "dots"},
        {"layers": "scan", "remat": "none"},
    ],
    "torch": [{}],
}
"""Compute settings to try on each side, the one that is most likely best first."""

SWEEP = "sweep"
"""Name of the point that times `mupax sweep` against one `mupax train` for each of its points."""

MODELS = (*list(BATCHES)[:3], SWEEP, *list(BATCHES)[3:])
"""Models and the sweep in the order in which they are measured."""
LEAST_SECONDS = 20.0
"""Time that must be left to start a point. Starting and compiling take this long."""


class Point(NamedTuple):
    """Measurement to make in a process of its own.

    Attributes:
        model: Key of `BATCHES`, or `SWEEP`.
        side: "mupax" or "torch", the framework that trains.
        batch_size: Number of sequences or images in a step; 0 for `SWEEP`.
        variant: Fields of `ComputeConfig`; `None` for `SWEEP`.
    """

    model: str
    side: str = "mupax"
    batch_size: int = 0
    variant: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Side, model, batch size and variant in words."""
        words = [self.side, self.model]
        if self.batch_size:
            words.append(str(self.batch_size))
        return " ".join([*words, *(self.variant or {}).values()])

    def command(self, args: Options, folder: Path) -> list[str]:
        """Return the command that measures this point and writes temporary files into `folder`."""
        tiny = ["--tiny"] if args.tiny else []
        if self.model == SWEEP:
            words = ["scripts.bench.runs.sweep_cost", "--how", "together", "--alone", "2"]
            words += ["--json", str(folder / "sweep.json")]
            if args.tiny:
                words += ["--rates", "2", "--seeds", "1", "--steps", "4"]
            return [sys.executable, "-m", *words, *tiny]

        words = ["scripts.bench.pytorch.gpu_point", self.side, self.model, str(self.batch_size)]
        words += ["--variant", json.dumps(self.variant or {})]
        if args.profile is not None:
            words += ["--profile", str(args.profile / self.text.replace(" ", "-"))]
        return [sys.executable, "-m", *words, "--steps", str(args.steps), *tiny]


def plan(
    models: Sequence[str], sides: Sequence[str], batches: Sequence[int] | None, *, tiny: bool
) -> list[Point]:
    """Return all points in the order in which they are measured, the most telling first.

    Args:
        models: Keys of `BATCHES`, and `SWEEP`.
        sides: Keys of `VARIANTS`.
        batches: Batch sizes in place of each model's own.
        tiny: Only plan one variant at one batch size.
    """
    ranked: list[tuple[tuple[int, bool], Point]] = []
    for model in models:
        if model == SWEEP:
            ranked.append(((0, False), Point(SWEEP)))
            continue
        sizes = batches or ([2] if tiny else BATCHES[model])
        for side in sides:
            variants = VARIANTS[side][:1] if tiny else VARIANTS[side]
            for variant_rank, variant in enumerate(variants):
                # All models at their first batch size, then at others; then the next variant at
                # the first batch size, and so on.
                for number, size in enumerate(sizes):
                    rank = (variant_rank, number > 0)
                    ranked.append((rank, Point(model, side, size, variant)))
    return [point for _, point in sorted(ranked, key=lambda entry: entry[0])]


def measure(
    points: Sequence[Point],
    run: Callable[[Point, float], dict[str, Any]],
    seconds: float,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure points until the time ends. Return the results, and the points left out with reasons.

    Args:
        points: Points in the order of `plan`.
        run: Function from a point and its time limit in seconds to its result, which has the key
            `failed` if the point does not run.
        seconds: Time for all points together, in seconds.
        timeout_s: Largest time for one point, in seconds.
        clock: Function that returns the time in seconds.
    """
    end = clock() + seconds
    results: list[dict[str, Any]] = []
    left_out: list[str] = []
    for point in points:
        failed_sizes = [row["batch_size"] for row in results if _failed_like(row, point)]
        if failed_sizes and point.batch_size >= min(failed_sizes):
            left_out.append(f"{point.text} (a batch of {min(failed_sizes)} does not run)")
            continue

        seconds_left = end - clock()
        if seconds_left < LEAST_SECONDS:
            left_out.append(f"{point.text} (no time left)")
            continue

        row = {**point._asdict(), **run(point, min(timeout_s, seconds_left))}
        print(line(row), flush=True)
        results.append(row)
    return results, left_out


def _failed_like(row: dict[str, Any], point: Point) -> bool:
    """Return whether a result is a failure of the point's side, model and variant."""
    same_kind = (row["side"], row["model"], row["variant"]) == (
        point.side,
        point.model,
        point.variant,
    )
    return "failed" in row and same_kind


def answer(point: Point, args: Options, timeout_s: float) -> dict[str, Any]:
    """Run a point in a process of its own and return its result, or the reason under `failed`."""
    with tempfile.TemporaryDirectory() as folder:
        words = point.command(args, Path(folder))
        return _output_of(words, timeout_s, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94"})


def _output_of(words: list[str], timeout_s: float, variables: dict[str, str]) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints as its last line.

    If the command fails or is too slow, return the reason under the key `failed` instead.

    Args:
        timeout_s: Time limit in seconds.
        variables: Environment variables in addition to those of this process.
    """
    # A process group of its own: the processes that a point starts, such as compilers, end with it.
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
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
        reasons = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        return {"failed": reasons[-1][-300:]}
    return json.loads(lines[-1])


def line(row: dict[str, Any]) -> str:
    """Return a result as one line of text."""
    text = Point(*(row[name] for name in Point._fields)).text
    if "failed" in row:
        return f"{text}: does not run ({row['failed']})"
    if row["model"] == SWEEP:
        command, step = (1 / result["ratio"]["runs of their own"] for result in row["results"])
        return (
            f"{text}: {command:.1f} times as fast as runs of their own by whole commands, "
            f"{step:.1f} times by a step"
        )
    mfu = f"no MFU: the peak of {row['device']} is not known"
    if row["mfu"]:
        mfu = f"MFU {100 * row['mfu']:.1f} %"
    rate = f"{row['units_per_s']:.0f} {row['unit']}s/s"
    return f"{text}: {1e3 * row['step_s']:.1f} ms, {rate}, {mfu}"


def summary(points: list[dict[str, Any]], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the record of the command.

    Args:
        points: Results of `measure`; one with the key `failed` counts for nothing.
        left_out: Points that were not measured, with reasons.

    Returns:
        `best`, by model the fastest point of each side and the ratio of their FLOP/s; `points`;
        `left_out`.
    """
    best: dict[str, dict[str, Any]] = {}
    for point in points:
        if "failed" in point or point["model"] == SWEEP:
            continue
        sides = best.setdefault(point["model"], {})
        fastest = sides.get(point["side"], {"flops_per_s": 0})
        if point["flops_per_s"] > fastest["flops_per_s"]:
            sides[point["side"]] = point
    for sides in best.values():
        if len(sides) == 2:
            sides["ratio"] = sides["mupax"]["flops_per_s"] / sides["torch"]["flops_per_s"]
    return {"benchmark": "gpu_mfu", "best": best, "points": points, "left_out": [*left_out]}


def estimated(point: dict[str, Any], args: Options) -> dict[str, Any]:
    """Return what the compiler alone estimates for a measured point of mupax.

    Returns:
        Result of `gpu_estimate`, or the reason why there is none under `failed`.
    """
    chip = chips.of_kind(point["device"])
    if chip is None or chip.gpu is None:
        names = ", ".join(gpu.device_kind for gpu in chips.GPUS.values())
        return {"failed": f"{point['device']} is none of {names}"}
    words = ["scripts.bench.pytorch.gpu_estimate", chip.name, point["model"]]
    words += [str(point["batch_size"]), "--variant", json.dumps(point["variant"] or {})]
    if args.tiny:
        words.append("--tiny")
    return _output_of([sys.executable, "-m", *words], args.timeout, {})


def comparison(measured: dict[str, dict[str, Any]], estimates: dict[str, dict[str, Any]]) -> str:
    """Return the table of estimates beside measurements.

    Both are by model: the best measured point of mupax, and what `estimated` returns for it.
    """
    head = ("compiled estimate beside measured", "memory", "", "ratio", "step, ms", "", "ratio")
    rows: list[Sequence[str]] = [head]
    reasons = []
    for model, point in measured.items():
        estimate = estimates[model]
        if "failed" in estimate:
            reasons.append(f"no estimate of {model}: {estimate['failed']}")
            continue
        memory = ("-", "-", "-")
        if point["peak_bytes"]:
            ratio = f"{estimate['peak_bytes'] / point['peak_bytes']:.2f}"
            memory = (gib(estimate["peak_bytes"]), gib(point["peak_bytes"]), ratio)
        least_ms = 1e3 * estimate["least_step_s"]
        step_ms = 1e3 * point["step_s"]
        times = (f"at least {least_ms:.1f}", f"{step_ms:.1f}", f"{least_ms / step_ms:.2f}")
        rows.append((f"{model}, batch {point['batch_size']}", *memory, *times))
    parts = []
    if len(rows) > 1:
        parts.append(table(rows, left=head[:1]))
    return "\n".join([*parts, *reasons])


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    models: tuple[str, ...] = MODELS
    """Models to measure, and the sweep."""
    batches: tuple[int, ...] = ()
    """Batch sizes in place of each model's own."""
    sides: tuple[str, ...] = tuple(VARIANTS)
    """Sides to measure, mupax and torch by default."""
    minutes: float = 10
    """Minutes for all points together."""
    timeout: float = 240
    """Seconds that one point may take."""
    steps: int = 20
    """Number of timed steps of a point, three times over."""
    profile: Path | None = None
    """Also trace a few steps of every point, into subfolders of this one (gpu-profile)."""
    tiny: Switch = False
    """Use small models, to see that the benchmark runs."""
    json: Path | None = None
    """Also write the result here, after every point."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, report the results and return the exit code: 0, or 1 if no point ran."""
    words = _with_profile_folder(sys.argv[1:] if argv is None else argv)
    args = harness.parse(Options, words)
    harness.check_names(args.models, MODELS)
    harness.check_names(args.sides, VARIANTS)
    if args.steps < 1 or args.minutes <= 0:
        harness.refuse(
            f"--steps {args.steps} --minutes {args.minutes:g}: write at least 1 step, and more "
            "than no minutes"
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
    best = {model: sides["mupax"] for model, sides in result["best"].items() if "mupax" in sides}
    result["estimates"] = {model: estimated(point, args) for model, point in best.items()}
    if best:
        print(comparison(best, result["estimates"]))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["best"]))
    return 0 if any("failed" not in row for row in rows) else 1


def _with_profile_folder(words: Sequence[str]) -> list[str]:
    """Return the words of the command line, with a folder after `--profile` if there is none."""
    words = list(words)
    if "--profile" in words:
        index = words.index("--profile") + 1
        if index == len(words) or words[index].startswith("--"):
            words.insert(index, "gpu-profile")
    return words


if __name__ == "__main__":
    sys.exit(main())
