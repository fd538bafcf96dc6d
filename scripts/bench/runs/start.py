"""Measure the processor time of commands, with and without compiled programs on disk.

    python -m scripts.bench.runs.start [--rounds 3] [--one-core] [--json PATH]

Cold is a start without a compiled program on disk, as on a new machine or after an update. Warm is
the same command again. A run ends here when its first step is complete. A first command, which does
not count, prepares the data.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench import in_turns

FIRST_STEP = """
import os, sys
from mupax.train.parallel import hardware
hardware.keep_freed_memory()
import jax
from mupax.train.run import loop

def end(session, report, state, step):
    jax.block_until_ready(state)
    os._exit(0)

loop.save_and_evaluate = end
from mupax.train.__main__ import main
main(sys.argv[1:])
sys.exit("the run ended without its first step")
"""
"""Program that trains like `mupax train` and ends after the first step."""
RUNS = ("lm-tiny", "lm-laptop", "vit-digits")
"""Recipes that are started and trained for one step."""
WORDS = ("lm-tiny --dry-run", "lm-tiny --help", "--help", "lm-tiny --stepz 3")
"""Words of complete commands. The last one has a wrong flag."""


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    rounds: int = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every command, report the results and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    results = []
    if not args.tiny:
        for name in RUNS:
            label = f"{name}, to its first step"
            results.append(measured(label, True, f"{name} --steps 1", args.rounds))
    for words in WORDS[2:] if args.tiny else WORDS:
        results.append(measured(f"train {words}", False, words, args.rounds))
    in_turns.report("start", results, args.json)
    return 0


def measured(label: str, first_step: bool, words: str, rounds: int) -> dict[str, Any]:
    """Return the processor time of a command, cold and warm, and the ratio of warm to cold.

    Args:
        label: Name of the row in the table `inside` of docs/evidence/performance.md.
        first_step: Train up to the first step (`FIRST_STEP`) in place of running the command to
            its end.
        words: Words of the command after `mupax train`.
        rounds: Number of pairs of a cold start and a warm one.
    """
    with tempfile.TemporaryDirectory() as name:
        if first_step:
            # Not counted: this run prepares the data.
            _seconds(first_step, words, Path(name) / "data")
        pairs = []
        for number in range(rounds):
            folder = Path(name) / str(number)
            cold = _seconds(first_step, words, folder)
            warm = _seconds(first_step, words, folder)
            pairs.append((cold, warm))
    median_cold = statistics.median(cold for cold, _ in pairs)
    median_warm = statistics.median(warm for _, warm in pairs)
    ratio = statistics.median(warm / cold for cold, warm in pairs)
    return {
        "model": label,
        "ms": {"warm": round(1e3 * median_warm, 1), "cold": round(1e3 * median_cold, 1)},
        "ratio": {"cold": round(ratio, 4)},
        "rounds": rounds,
    }


def _seconds(first_step: bool, words: str, programs: Path) -> float:
    """Run a command and return its processor seconds.

    Args:
        programs: Folder of the compiled programs, empty for a cold start.

    Raises:
        RuntimeError: The command failed for another reason than a wrong flag.
    """
    # A cache of the caller's would make every start warm.
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith("JAX_COMPILATION_CACHE"):
            environment[name] = value
    environment["MUPAX_COMPILATION_CACHE"] = str(programs)
    command = [sys.executable, "-m", "train"]
    if first_step:
        command = [sys.executable, "-c", FIRST_STEP]
    command += shlex.split(words)
    with tempfile.TemporaryDirectory() as folder:
        if first_step or "--dry-run" in words:
            command += ["--workdir", f"{folder}/run"]
        before = in_turns.children_cpu()
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    if completed.returncode not in (0, 2):  # 2: the wrong flag
        raise RuntimeError(f"{words}: {completed.stderr[-2000:]}")
    return in_turns.children_cpu() - before


if __name__ == "__main__":
    sys.exit(main())
