"""Time two or more functions in turns, so that other work on the machine slows all of them alike.

Used by every benchmark of this package.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mupax.command_line import Switch
from scripts import harness

Seconds = dict[str, list[float]]
"""Seconds of one step, one value per round, by name of the timed function."""


T = TypeVar("T", bound="Timing")


@dataclass(frozen=True)
class Timing:
    """Flags that every benchmark has."""

    rounds: int = 10
    """Turns of each function."""
    one_core: Switch = False
    """Run on one core and count CPU time, for a machine that is busy with other work."""
    tiny: Switch = False
    """Use small shapes, to see that the benchmark runs."""
    json: Path | None = None
    """Also write the result here."""


def parse(options: type[T], argv: Sequence[str] | None) -> T:
    """Return the flags of a benchmark. With `--one-core`, also keep this process on one core."""
    args = harness.parse(options, argv)
    if args.one_core:
        one_core()
    return args


def one_core() -> None:
    """Keep this process on one core, so that `clock` counts CPU time.

    Call this before JAX starts its threads.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def keep_freed_memory() -> None:
    """Start this command again with an allocator that keeps freed memory, as `mupax train` does.

    Everything that the process compares runs with the same allocator.
    """
    options = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    }
    # The process that was started again has all of these variables.
    if not options.keys() <= os.environ.keys():
        # `hardware.keep_freed_memory` has no effect after JAX is imported.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **options})


def clock() -> Callable[[], float]:
    """Return the clock to time with: CPU time if this process has one core, otherwise wall time."""
    # Other work on the machine changes CPU time little.
    return time.process_time if has_one_core() else time.perf_counter


def has_one_core() -> bool:
    """Return True if this process has one core alone, as after `one_core`."""
    return len(os.sched_getaffinity(0)) == 1


def children_cpu() -> float:
    """Return the CPU time of all child processes that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def in_turns(
    steps: Mapping[str, Callable[[], Any]], rounds: int, steps_per_turn: int = 3
) -> Seconds:
    """Time functions in turns and return the seconds of one step, as the median of each turn.

    Args:
        steps: Functions by name. Each does one step and returns when the step is complete.
        rounds: Turns of each function. Every round reverses the order of the one before.
        steps_per_turn: Timed steps of a turn. One step before them is not timed.
    """
    seconds: Seconds = {name: [] for name in steps}
    now = clock()

    # The first step of each compiles.
    for step in steps.values():
        step()

    for turn in range(rounds):
        order = list(steps) if turn % 2 == 0 else list(steps)[::-1]
        for name in order:
            steps[name]()
            # The step above found caches and threads as another function left them.
            times = []
            for _ in range(steps_per_turn):
                began = now()
                steps[name]()
                times.append(now() - began)
            seconds[name].append(statistics.median(times))
    return seconds


def compared(seconds: Seconds, ours: str) -> dict[str, Any]:
    """Compare one function's times with those of every other function.

    Returns:
        `ms`: median milliseconds of every function. `ratio`: for every function but `ours`, the
        median over rounds of the time of `ours` divided by this function's time. `quartiles`: lower
        and upper quartile of each ratio. `rounds`: number of rounds.
    """
    milliseconds = {}
    ratios = {}
    quartiles = {}
    for name, times in seconds.items():
        milliseconds[name] = round(1e3 * statistics.median(times), 3)
        if name == ours:
            continue
        per_round = sorted(a / b for a, b in zip(seconds[ours], times, strict=True))
        quarter = len(per_round) // 4
        ratios[name] = round(statistics.median(per_round), 4)
        quartiles[name] = [round(per_round[quarter], 4), round(per_round[-1 - quarter], 4)]
    return {
        "ms": milliseconds,
        "ratio": ratios,
        "quartiles": quartiles,
        "rounds": len(seconds[ours]),
    }


def machine() -> dict[str, Any]:
    """Return facts on the machine that the figures were measured on."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "cpu": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def report(name: str, results: Sequence[Any], path: Path | None, **facts: Any) -> None:
    """Print a benchmark's results with facts on the machine, and write them to `path` if given."""
    write({"benchmark": name, **machine(), **facts, "results": results}, path)


def write(result: Mapping[str, Any], path: Path | None) -> None:
    """Print a JSON object in one line, and write it indented to `path` if given."""
    print(json.dumps(result))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
