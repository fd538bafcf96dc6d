"""Kills runs at random moments until they are done, and compares each with one that was left alone: docs/kills.{json,md}.

    python -m scripts.campaigns.kills [--kills 200] [--most 8] [--steps N] [--processes 1] [--again] [--folder DIR] [--page FILE]

Tiny runs of a decoder (accumulation, moving average), a ViT and an encoder-decoder, of one process and of two, get SIGKILL, SIGTERM, SIGINT or
two signals in short order, in whatever phase they are, and are resumed until the last step. Every run must then have the
parameters, optimizer state, counters and metrics rows of the undisturbed run, bitwise. What the file holds counts; the
rest is run. Processes are forked from one that has everything imported, so that a start takes a second.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mupax.command_line import Switch
from scripts import harness
from scripts.campaigns import PAGE
from scripts.campaigns.tiny_runs import (
    CASES,
    MODELS,
    Case,
    Session,
    differences,
    latest,
    left,
    prepared,
    scratch,
    undisturbed,
)
from scripts.pages.markdown import table, write_section

COMMAND = "python -m scripts.campaigns.kills"
STEPS = {1: 300, 2: 100}
"""By number of processes, whose steps take so much longer."""
SIGNALS = {"SIGKILL": 9, "SIGTERM": 7, "SIGINT": 2, "twice": 2}
"""How often each is sent, of 20; twice is SIGTERM and another within a second."""
_PATIENCE_S = 90.0
"""How long processes may take to end after a signal."""


def kill(session: Session, workdir: Path, choose: random.Random) -> dict[str, Any] | None:
    """Send signals at a random moment; None where the run was done before."""
    trained = choose.random() < 0.8  # else while it starts, restores or compiles
    while trained and None in session.poll() and "compiled in" not in session.output():
        time.sleep(0.01)
    until = time.monotonic() + choose.uniform(0.0, 3.0)
    while None in session.poll() and time.monotonic() < until:
        time.sleep(0.005)
    if None not in session.poll():
        return None
    name = choose.choices(list(SIGNALS), list(SIGNALS.values()))[0]
    count = len(session.pids)
    whom = [choose.randrange(count)] if choose.random() < 0.5 else list(range(count))
    before, seconds = phase(session, workdir), time.monotonic() - session.began
    session.send(signal.SIGTERM if name == "twice" else signal.Signals[name], whom)
    if name == "twice":
        time.sleep(choose.uniform(0.4, 0.8))  # closer ones are taken for one
        session.poll()
        session.send(choose.choice((signal.SIGTERM, signal.SIGINT)), whom)
    sent = time.monotonic()
    codes = session.wait(_PATIENCE_S)
    return {
        "signal": name, "to": whom, "after_s": round(seconds, 2), "phase": before, "codes": codes,
        "ended_s": round(time.monotonic() - sent, 2), "checkpoint": latest(workdir),
    }  # fmt: skip


def phase(session: Session, workdir: Path) -> str:
    """What process 0 is at, as its files and words show it."""
    output = session.output()
    if "compiled in" not in output:
        return "starting"
    if "steps done" in output:
        return "ending"
    if list((workdir / "checkpoints").glob("*.saving*")):
        return "training while a checkpoint is written"
    return "training"


def disturbed(case: Case, folder: Path, seed: int, steps: int, most: int) -> dict[str, Any]:
    """One run, killed at most so many times and then let to its end: a row of the file."""
    expected, choose = undisturbed(case, folder, steps), random.Random(f"{case} {seed}")
    workdir, kills, began = f"{case.model}-{case.processes}-{seed}", [], time.monotonic()
    wrong: list[str] = []
    while True:
        session = Session(case, folder, workdir, steps)
        # After the last one it goes on alone.
        if len(kills) < most and (one := kill(session, folder / workdir, choose)):
            kills.append(one)
            continue
        if any(codes := session.wait(600)):
            wrong.append(f"ended with {codes}: {session.output()[-500:]}")
        break
    if not wrong:
        wrong = differences(left(folder / workdir, steps), expected)
    return {
        "model": case.model, "processes": case.processes, "seed": seed, "steps": steps, "kills": kills,
        "differences": wrong, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the section of the page: the totals, and a table with a row for each case."""
    num_kills = sum(len(run["kills"]) for run in runs)
    differing = [run for run in runs if run["differences"]]
    num_identical = len(runs) - len(differing)
    text = (
        f"{len(runs)} runs got {num_kills} signals at random moments and were resumed until done. "
        f"**{num_identical} of {len(runs)} runs ended bitwise as the undisturbed run did**: all rows "
        "of metrics without times, and all digests of parameters, optimizer state, moving average "
        f"and counters in the last checkpoint. `{COMMAND}`"
    )

    signals = ["SIGKILL", "SIGTERM", "SIGINT", "two signals"]
    cells = [["runs of", "processes", "runs", "kills", *signals]]
    for case in CASES:
        case_runs = [run for run in runs if is_run_of(case, run)]
        counts = Counter(sent["signal"] for run in case_runs for sent in run["kills"])
        numbers = [case.processes, len(case_runs), counts.total()]
        numbers += [counts[name] for name in SIGNALS]
        cells.append([case.model, *map(str, numbers)])
    lines = ["## Killed runs", "", text, "", table(cells), ""]

    for run in differing:
        problems = "; ".join(run["differences"])[:300]
        lines.append(f"- {run['model']} seed {run['seed']}: {problems}")
    return "\n".join(lines).rstrip() + "\n"


def is_run_of(case: Case, run: dict[str, Any]) -> bool:
    """Return whether a row of the record is a run of `case`."""
    return run["model"] == case.model and run["processes"] == case.processes


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    kills: int = 200
    """At least so many in the file."""
    most: int = 8
    """Kills of one run."""
    steps: int | None = None
    processes: Literal[1, 2] | None = None
    """Only runs of so many."""
    page: Path = PAGE
    """Write the section here, and the rows beside it."""
    models: tuple[str, ...] = tuple(MODELS)
    """Only runs of these."""
    again: Switch = False
    """Forget what the file holds."""
    folder: Path | None = None
    """Keep the runs here; a temporary folder unless given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the page; exit code 1 where a run differs."""
    args = harness.parse(Options, argv)
    harness.check_names(args.models, MODELS)
    path = args.page.with_name("kills.json")
    cases = [
        case
        for case in CASES
        if args.processes in (None, case.processes) and case.model in args.models
    ]
    runs = harness.read_rows(path, "runs", args.again)
    with scratch(args.folder) as folder, prepared(folder):
        seed = max((run["seed"] + 1 for run in runs), default=0)
        while sum(len(run["kills"]) for run in runs) < args.kills:
            for case in cases:
                runs.append(
                    run := disturbed(
                        case, folder, seed, args.steps or STEPS[case.processes], args.most
                    )
                )
                print(
                    f"{case} seed {seed}: {len(run['kills'])} kills, {run['differences'] or 'identical'}",
                    flush=True,
                )
                path.write_text(harness.with_rows(harness.made_by(COMMAND), "runs", runs))
                write_section(args.page, "kills", page(runs))
            seed += 1
    write_section(args.page, "kills", page(runs))
    return int(any(run["differences"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
