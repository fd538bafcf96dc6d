"""Times two or more things in turns, so that whatever else the machine does falls on all of them."""

from __future__ import annotations

import json
import os
import platform
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
"""Name to one time per round."""


T = TypeVar("T", bound="Timing")


@dataclass(frozen=True)
class Timing:
    """Flags that every benchmark has."""

    rounds: int = 10
    """Turns of each."""
    one_core: Switch = False
    """One core, CPU time: for a machine busy with other work."""
    tiny: Switch = False
    """Small shapes, to see that it runs."""
    json: Path | None = None
    """Also write the result here."""


def parse(options: type[T], argv: Sequence[str] | None) -> T:
    """Return the flags of a benchmark, and keep this process on one core if they say so."""
    args = harness.parse(options, argv)
    if args.one_core:
        one_core()
    return args


def one_core() -> None:
    """Keep this process on one core, and count CPU time from here on. To be called before JAX starts its threads."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def keep_freed_memory() -> None:
    """Start this command again with glibc told what `mupax.train` tells it (`hardware.keep_freed_memory`): too late where JAX is imported.

    It holds for everything in the process, whatever it is compared with.
    """
    options = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    }
    if not options.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **options})


def clock() -> Callable[[], float]:
    """Wall time, or CPU time on one core, which what else the machine does changes little."""
    return time.process_time if len(os.sched_getaffinity(0)) == 1 else time.perf_counter


def in_turns(
    steps: Mapping[str, Callable[[], Any]], rounds: int, steps_per_turn: int = 3
) -> Seconds:
    """Seconds of one step, per round the median of a turn.

    Args:
        steps: name to a function that does one step and returns when it is done.
        rounds: how often each has its turn; every round goes through them the other way round.
        steps_per_turn: timed steps of a turn, after one that is not: it finds caches and threads as another left them.
    """
    seconds: Seconds = {name: [] for name in steps}
    now = clock()
    for step in steps.values():
        step()
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else list(steps)[::-1]:
            steps[name]()
            times = []
            for _ in range(steps_per_turn):
                began = now()
                steps[name]()
                times.append(now() - began)
            seconds[name].append(statistics.median(times))
    return seconds


def compared(seconds: Seconds, ours: str) -> dict[str, Any]:
    """Median milliseconds of each, and of every other the median over rounds of the ratio `ours` / other with quartiles."""
    ratios = {
        other: sorted(a / b for a, b in zip(seconds[ours], times, strict=True))
        for other, times in seconds.items()
        if other != ours
    }
    return {
        "ms": {name: round(1e3 * statistics.median(times), 3) for name, times in seconds.items()},
        "ratio": {
            other: round(statistics.median(per_round), 4) for other, per_round in ratios.items()
        },
        "quartiles": {
            other: [
                round(per_round[len(per_round) // 4], 4),
                round(per_round[-1 - len(per_round) // 4], 4),
            ]
            for other, per_round in ratios.items()
        },
        "rounds": len(seconds[ours]),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
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
    """Write what a benchmark measured, with the machine and more facts about it."""
    write({"benchmark": name, **machine(), **facts, "results": results}, path)


def write(result: Mapping[str, Any], path: Path | None) -> None:
    """Print the JSON object in one line, and write it indented where a path is given."""
    print(json.dumps(result))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
