"""Kill runs at random moments until they are done, and compare each with an undisturbed run.

    python -m scripts.campaigns.kills [--kills 200] [--most 8] [--steps N] [--processes 1]
        [--again] [--folder DIR] [--page FILE]

Tiny runs of a decoder (accumulation, moving average), a ViT and an encoder-decoder, of one process
and of two, get SIGKILL, SIGTERM, SIGINT or two signals in short order, in any phase. They are
resumed until the last step. Every run must then have the parameters, optimizer state, counters and
rows of metrics of the undisturbed run, bitwise. Kills in the record count; only missing ones are
done.
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
from scripts.campaigns import PAGE, tiny_runs
from scripts.campaigns.tiny_runs import CASES, MODELS, Case, Session
from scripts.pages.markdown import table, write_section

COMMAND = "python -m scripts.campaigns.kills"
STEPS = {1: 300, 2: 100}
"""Steps of a run, by its number of processes. Steps of two processes take longer."""
SIGNALS = {"SIGKILL": 9, "SIGTERM": 7, "SIGINT": 2, "twice": 2}
"""Relative frequency of each signal, of 20 in total.

`twice` is SIGTERM, and SIGTERM or SIGINT within a second.
"""
_PATIENCE_S = 90.0
"""Seconds that processes may take to end after a signal."""


def kill(session: Session, workdir: Path, choose: random.Random) -> dict[str, Any] | None:
    """Send a signal, or two, at a random moment, and wait until all processes have ended.

    Returns:
        Signal, processes, phase, exit codes and newest checkpoint for the record; `None` if the run
        ended before the moment came.
    """
    # 4 of 5 kills come while the run trains, the others while it starts, restores or compiles.
    while_training = choose.random() < 0.8
    while while_training and None in session.poll() and "compiled in" not in session.output():
        time.sleep(0.01)
    moment = time.monotonic() + choose.uniform(0.0, 3.0)
    while None in session.poll() and time.monotonic() < moment:
        time.sleep(0.005)
    if None not in session.poll():
        return None

    name = choose.choices(list(SIGNALS), list(SIGNALS.values()))[0]
    count = len(session.pids)
    if choose.random() < 0.5:
        indices = [choose.randrange(count)]
    else:
        indices = list(range(count))
    reached_phase = phase(session, workdir)
    seconds = time.monotonic() - session.began
    if name == "twice":
        session.send(signal.SIGTERM, indices)
        # Two signals in a shorter time are taken for one.
        time.sleep(choose.uniform(0.4, 0.8))
        session.poll()
        session.send(choose.choice((signal.SIGTERM, signal.SIGINT)), indices)
    else:
        session.send(signal.Signals[name], indices)

    sent = time.monotonic()
    codes = session.wait(_PATIENCE_S)
    return {
        "signal": name,
        "to": indices,
        "after_s": round(seconds, 2),
        "phase": reached_phase,
        "codes": codes,
        "ended_s": round(time.monotonic() - sent, 2),
        "checkpoint": tiny_runs.latest_step(workdir),
    }


def phase(session: Session, workdir: Path) -> str:
    """Return the phase that a run is in, read from its files and the output of process 0."""
    output = session.output()
    if "compiled in" not in output:
        return "starting"
    if "steps done" in output:
        return "ending"
    if list((workdir / "checkpoints").glob("*.saving*")):
        return "training while a checkpoint is written"
    return "training"


def disturbed(case: Case, folder: Path, seed: int, steps: int, max_kills: int) -> dict[str, Any]:
    """Train one run that is killed up to `max_kills` times and resumed, and judge its result.

    Returns:
        Row of the record. `differences` lists what differs from the undisturbed run.
    """
    expected = tiny_runs.undisturbed(case, folder, steps)
    choose = random.Random(f"{case} {seed}")
    workdir = f"{case.model}-{case.processes}-{seed}"
    kills: list[dict[str, Any]] = []
    wrong: list[str] = []
    began = time.monotonic()
    while True:
        session = Session(case, folder, workdir, steps)
        if len(kills) < max_kills:
            facts = kill(session, folder / workdir, choose)
            if facts is not None:
                kills.append(facts)
                continue
        # All kills are done, or the run was faster: let this session train to its end.
        codes = session.wait(600)
        if any(codes):
            wrong.append(f"ended with {codes}: {session.output()[-500:]}")
        break

    if not wrong:
        wrong = tiny_runs.differences(tiny_runs.run_result(folder / workdir, steps), expected)
    return {
        "model": case.model,
        "processes": case.processes,
        "seed": seed,
        "steps": steps,
        "kills": kills,
        "differences": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }


def page(runs: Sequence[dict[str, Any]]) -> str:
    """Return this campaign's Markdown section: totals, and a table with a row for each case."""
    num_kills = sum(len(run["kills"]) for run in runs)
    differing = [run for run in runs if run["differences"]]
    num_identical = len(runs) - len(differing)
    text = (
        f"{len(runs)} training runs were killed {num_kills} times at random moments, and resumed "
        f"until their last step. **{num_identical} of {len(runs)} runs ended bitwise equal to an "
        "undisturbed run**. Metrics are equal, except for times, and so are the digests "
        "of parameters, optimizer state, moving average and counters in the last checkpoint. "
        f"`{COMMAND}`"
    )

    signals = ["SIGKILL", "SIGTERM", "SIGINT", "two signals"]
    cells = [["runs of", "processes", "runs", "kills", *signals]]
    for case in CASES:
        case_runs = [run for run in runs if is_run_of(case, run)]
        counts = Counter()
        for run in case_runs:
            counts.update(sent["signal"] for sent in run["kills"])
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
    """Number of kills that the record must have at least."""
    most: int = 8
    """Largest number of kills of one run."""
    steps: int | None = None
    """Steps of a run. Default: 300 with one process, 100 with two."""
    processes: Literal[1, 2] | None = None
    """Disturb only runs with so many processes."""
    page: Path = PAGE
    """Page to write. The record is `kills.json` in the same folder."""
    models: tuple[str, ...] = tuple(MODELS)
    """Disturb only runs of these models."""
    again: Switch = False
    """Forget what the record has."""
    folder: Path | None = None
    """Folder to keep the runs in. Default: a temporary folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do the missing kills, and write the record and the page. Return 1 if a run differs."""
    args = harness.parse(Options, argv)
    harness.check_names(args.models, MODELS)
    path = args.page.with_name("kills.json")
    cases = []
    for case in CASES:
        if args.processes in (None, case.processes) and case.model in args.models:
            cases.append(case)

    runs = harness.read_rows(path, "runs", args.again)
    with tiny_runs.scratch(args.folder) as folder:
        tiny_runs.prepare_forks(folder)
        # New seeds kill at other moments than those in the record.
        seed = max((run["seed"] + 1 for run in runs), default=0)
        while sum(len(run["kills"]) for run in runs) < args.kills:
            for case in cases:
                steps = args.steps or STEPS[case.processes]
                run = disturbed(case, folder, seed, steps, args.most)
                runs.append(run)
                verdict = run["differences"] or "identical"
                print(f"{case} seed {seed}: {len(run['kills'])} kills, {verdict}", flush=True)
                path.write_text(harness.with_rows(harness.made_by(COMMAND), "runs", runs))
                write_section(args.page, "kills", page(runs))
            seed += 1
    write_section(args.page, "kills", page(runs))
    return int(any(run["differences"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
