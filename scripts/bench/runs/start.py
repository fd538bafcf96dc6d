"""What a start costs before anything is trained: processor seconds of commands, with compiled programs kept and without.

    python -m scripts.bench.runs.start [--rounds 3] [--one-core] [--json PATH]

Cold is a folder without a compiled program, as on a new machine or after an update; warm is the same command again. A run ends here when
its first step is done. Data is prepared before, by the first command of all, which does not count.
"""

from __future__ import annotations

import os
import resource
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
RUNS = ("lm-tiny", "lm-laptop", "vit-digits")
WORDS = ("lm-tiny --dry-run", "lm-tiny --help", "--help", "lm-tiny --stepz 3")
"""Whole commands; the last one has a wrong flag."""


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    rounds: int = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    args = in_turns.parse(Options, argv)
    commands = (
        {}
        if args.tiny
        else {f"{name}, to its first step": (True, f"{name} --steps 1") for name in RUNS}
    )
    commands |= {f"train {words}": (False, words) for words in WORDS[2 if args.tiny else 0 :]}
    results = [measured(label, *command, args.rounds) for label, command in commands.items()]
    in_turns.report("start", results, args.json)
    return 0


def measured(label: str, first_step: bool, words: str, rounds: int) -> dict[str, Any]:
    """Processor seconds of a command, cold and warm.

    Args:
        label: of the row.
        first_step: whether the run ends after its first step.
        words: of the command.
        rounds: of a cold start and a warm one.
    """
    with tempfile.TemporaryDirectory() as name:
        if first_step:
            _seconds(first_step, words, Path(name) / "data")
        folders = [Path(name) / str(number) for number in range(rounds)]
        pairs = [[_seconds(first_step, words, folder) for _ in range(2)] for folder in folders]
    cold, warm = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(second / first for first, second in pairs)
    return {
        "model": label,
        "ms": {"warm": round(1e3 * warm, 1), "cold": round(1e3 * cold, 1)},
        "ratio": {"cold": round(ratio, 4)},
        "rounds": rounds,
    }


def _seconds(first_step: bool, words: str, programs: Path) -> float:
    """Processor seconds of a command with the folder of its compiled programs; its own end is what counts."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_COMPILATION_CACHE")
    }
    python = [sys.executable, *(["-c", FIRST_STEP] if first_step else ["-m", "train"])]
    with tempfile.TemporaryDirectory() as folder:
        place = ["--workdir", f"{folder}/run"] if first_step or "--dry-run" in words else []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*python, *shlex.split(words), *place],
            env={**environ, "MUPAX_COMPILATION_CACHE": str(programs)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 2):  # 2: the wrong flag
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
