"""One process of several fails, in every way, and the others end with its reason: docs/processes.{json,md}.

    python -m scripts.campaigns.processes [--failures 100] [--only WORD ...] [--again] [--folder DIR] [--page FILE]

Tiny runs of a decoder on two or three processes, each of which holds and writes its part of the state. One of them is killed,
stopped, slowed down, cannot write, or raises: while it starts, compiles, trains, saves or restores. All must end within 60 s
with the reason on every screen that is left (or, where the failure passes, train on), and what is resumed afterwards must
end bitwise as the run that was left alone. What the file holds counts; the rest is run.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mupax.command_line import Switch
from scripts import harness
from scripts.campaigns import PAGE, tiny_runs
from scripts.campaigns.injection.calls import Action, when, with_result
from scripts.campaigns.tiny_runs import Session
from scripts.pages.markdown import table, write_section

COMMAND = "python -m scripts.campaigns.processes"
STEPS, EVERY = 16, 4
"""Of a run, and between its checkpoints."""
BOUND_S = 60.0
"""How long processes may take to end after one of them has failed."""
_GIVE_UP_S = 150.0
_BROKEN = "this process breaks"
_NEVER_CAME = "waited 20 s for process 0"
"""Said where a process is killed before it has joined the others."""


@dataclass(frozen=True)
class Case(tiny_runs.Case):
    """What is run: a decoder whose state lies on all processes."""

    model: str = "decoder"
    processes: int = 2

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        words = " ".join(super().argv(folder, workdir, steps)).replace(
            "every-steps 20", f"every-steps {EVERY}"
        )
        words = words.replace(
            "--data.batch-size 16 --data.eval-batch-size 32",
            "--data.batch-size 12 --data.eval-batch-size 36",
        )
        words = words.replace("width 16", f"width {8 * self.processes}")  # which fsdp divides
        return [*words.split(), "--mesh.data", "1", "--mesh.fsdp", str(self.processes)]


@dataclass(frozen=True)
class Failure:
    """Something that happens to one process.

    Attributes:
        name: in the table.
        reason: what every process that is left must say; PROCESS stands for the number of the one that failed.
        sick: called in the process before it starts.
        sent: signal that it gets from outside instead.
        passes: whether the run goes on and must end with 0.
        dies: whether the process that fails cannot say so itself.
        code: exit code of the others; 2 where it is bad input.
        phases: when it may happen.
    """

    name: str
    reason: str
    sick: Action | None = None
    sent: signal.Signals | None = None
    passes: bool = False
    dies: bool = False
    code: int = 1
    phases: tuple[str, ...] = ("training",)


def broken() -> None:
    """Raise an error."""
    raise RuntimeError(_BROKEN)


def other(group: str, field: str) -> Action:
    """Return what has this process say something else of itself than the others."""

    def change(facts: Any) -> Any:
        return {**facts, group: {**facts[group], field: "another"}}

    return with_result(("mupax.train.parallel.agreement", "facts"), change)


def full(saves: int | None) -> Action:
    """Return a disk that takes no file of more than 16 KiB from the second save on, for so many saves or for good."""

    def sick() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        room = resource.getrlimit(resource.RLIMIT_FSIZE)
        save = "mupax.train.checkpoints.layout", "host_shards"
        when(save, 2, partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 14, room[1])))()
        if saves is not None:
            when(save, 2 + saves, partial(resource.setrlimit, resource.RLIMIT_FSIZE, room))()

    return sick


_SAVE = "mupax.train.checkpoints.checkpointer", "ocp.save_async"
_COMPILE = "mupax.train.core.program", "Program.compile_train"
_DATA = "mupax.train.parallel.sharding", "BatchSharding.shard_batch"
_DIGESTS = "mupax.train.checkpoints.folder", "file_digests"
_ALWAYS = ("starting", "compiling", "training", "saving", "resuming")
FAILURES = (
    Failure("killed", "process PROCESS (", sent=signal.SIGKILL, dies=True, phases=_ALWAYS),
    Failure("full disk", "File too large", full(None), phases=("saving",)),
    Failure("stopped", "process PROCESS (", sent=signal.SIGSTOP, dies=True, phases=("compiling", "training", "saving")),
    Failure("full disk for one save", "File too large", full(1), passes=True, phases=("saving",)),
    Failure("raises before orbax saves", _BROKEN, when(_SAVE, 2, broken), phases=("saving",)),
    Failure("raises after orbax has begun", _BROKEN, when(_SAVE, 2, broken, after=True), phases=("saving",)),
    Failure("raises in data", _BROKEN, when(_DATA, 12, broken)),
    Failure("raises in the compiler", _BROKEN, when(_COMPILE, 1, broken), phases=("compiling",)),
    Failure("aborts in the compiler", "aborted by a library", when(_COMPILE, 1, os.abort), dies=True, phases=("compiling",)),
    Failure("other code", "run the same code on all hosts", other("code", "train/core/step.py"), code=2, phases=("starting",)),
    Failure("other flags", "start all processes with the same flags", other("config", "seed"), code=2, phases=("starting",)),
    Failure("other XLA flags", "set the same in all processes", other("environment", "XLA_FLAGS"), code=2, phases=("starting",)),
    Failure("slow data", "", when(_DATA, 12, partial(time.sleep, 12.0)), passes=True),
    Failure(
        "slow compiler", "", when(_COMPILE, 1, partial(time.sleep, 40.0)), passes=True, phases=("compiling",)
    ),
    Failure("slow disk", "", when(_DIGESTS, 2, partial(time.sleep, 12.0)), passes=True, phases=("saving",)),
)  # fmt: skip


def phase_of(session: Session, workdir: Path) -> str:
    """What process 0 is at, as its files and words show it."""
    output = session.output()
    if "compiled in" in output:
        return "saving" if list((workdir / "checkpoints").glob("*.saving*")) else "training"
    return "compiling" if "parameters" in output or "resuming" in output else "starting"


def failed(case: Case, failure: Failure, phase: str, folder: Path, seed: int) -> dict[str, Any]:
    """One run in which a process fails, and which is then resumed: a row of the file."""
    expected = tiny_runs.undisturbed(case, folder, STEPS, f"alone-{case.processes}")
    choose = random.Random(f"{case} {failure.name} {phase} {seed}")
    name = f"{failure.name.replace(' ', '-')}-{phase}-{case.processes}-{seed}"
    index, struck = (seed + FAILURES.index(failure)) % case.processes, folder / f"{name}.struck"
    if phase == "resuming":  # a run that has a checkpoint already
        session = Session(case, folder, name, STEPS)
        while None in session.poll() and (tiny_runs.latest(folder / name) or 0) < EVERY:
            time.sleep(0.01)
        session.send(signal.SIGKILL, range(case.processes))
        session.wait(10)
    os.environ["STRUCK"] = str(struck)
    session = Session(case, folder, name, STEPS, {index: failure.sick} if failure.sick else None)
    if failure.sent is not None:
        reached = "starting" if phase == "resuming" else phase
        while None in session.poll() and phase_of(session, folder / name) != reached:
            time.sleep(0.005)
        time.sleep(
            choose.uniform(0.0, {"saving": 0.3, "starting": 3.0, "resuming": 6.0}.get(phase, 1.0))
        )
        struck.touch()
        session.send(failure.sent, [index])
    ended = wait(session, index if failure.sent == signal.SIGSTOP else None)
    seconds = (
        round(max(ended, struck.stat().st_mtime) - struck.stat().st_mtime, 1)
        if struck.exists()
        else None
    )
    codes, survivors = (
        session.wait(0),
        [i for i in range(case.processes) if i != index or not failure.dies],
    )
    reason = failure.reason.replace("PROCESS", str(index))
    wrong: list[str] = []
    if seconds is None:
        wrong.append("the failure never came")
    elif failure.passes:
        wrong += [f"process {i} ended with {codes[i]}" for i in survivors if codes[i]]
    else:
        wrong += [f"not ended after {_GIVE_UP_S} s"] if seconds > BOUND_S else []
        wrong += [
            f"process {i} does not say the reason"
            for i in survivors
            if reason not in session.output(i) and _NEVER_CAME not in session.output(i)
        ]
        wrong += [
            f"process {i} ended with {codes[i]}" for i in survivors if codes[i] != failure.code
        ]
    outputs = {i: session.output(i)[-400:] for i in survivors} if wrong else {}
    session = Session(case, folder, name, STEPS)
    if any(session.wait(_GIVE_UP_S)):
        wrong.append(f"does not resume: {session.output()[-300:]}")
    else:
        wrong += tiny_runs.differences(tiny_runs.left(folder / name, STEPS), expected)
    return {
        "failure": failure.name, "phase": phase, "processes": case.processes, "process": index, "seed": seed,
        "codes": codes, "ended_s": seconds, "wrong": wrong, "said": outputs,
    }  # fmt: skip


def wait(session: Session, stopped: int | None) -> float:
    """When the last process ended, but for the stopped one, which is killed then."""
    until = time.monotonic() + _GIVE_UP_S
    while (
        None in [code for i, code in enumerate(session.poll()) if i != stopped]
        and time.monotonic() < until
    ):
        time.sleep(0.01)
    ended = time.time()
    session.send(signal.SIGKILL, range(len(session.pids)))
    session.wait(10)
    return ended


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the section of the page: the totals, and a table with a row for each failure."""
    wrong = [row for row in rows if row["wrong"]]
    num_right = len(rows) - len(wrong)
    text = (
        f"One process of two or three failed, {len(rows)} times. **{num_right} of {len(rows)} times** "
        f"all processes ended within {BOUND_S:.0f} s with the reason on every screen (exit code 1, or 2 "
        "for bad input), or trained on if the failure passes. The resumed run ended bitwise as a run "
        f"that was left alone. `{COMMAND}`"
    )

    cells = [["failure", "phases", "times", "median, most seconds until all ended"]]
    for failure in FAILURES:
        failure_rows = [row for row in rows if row["failure"] == failure.name]
        took = "goes on" if failure.passes else seconds_cell(failure_rows)
        phases = ", ".join(failure.phases)
        cells.append([failure.name, phases, str(len(failure_rows)), took])
    lines = ["## One process of several fails", "", text, "", table(cells), ""]

    for row in wrong:
        problems = "; ".join(row["wrong"])[:300]
        lines.append(f"- {row['failure']}, {row['phase']}, seed {row['seed']}: {problems}")
    return "\n".join(lines).rstrip() + "\n"


def seconds_cell(rows: Sequence[dict[str, Any]]) -> str:
    """Return the median and the largest number of seconds until all processes had ended."""
    seconds = sorted(row["ended_s"] for row in rows if row["ended_s"] is not None)
    if not seconds:
        return "goes on"
    return f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}"


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    failures: int = 100
    """At least so many in the file."""
    only: tuple[str, ...] = ("",)
    """Only failures or phases whose name has one of these words."""
    page: Path = PAGE
    """Write here, and the rows beside it."""
    again: Switch = False
    """Forget what the file holds."""
    folder: Path | None = None
    """Keep the runs here; a temporary folder unless given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the page; exit code 1 where something went otherwise than wanted."""
    args = harness.parse(Options, argv)
    path = args.page.with_name("processes.json")
    rows = harness.read_rows(path, "rows", args.again)
    kinds = [
        (f, p)
        for f in FAILURES
        for p in f.phases
        if any(word in f"{f.name} {p}" for word in args.only)
    ]
    with tiny_runs.scratch(args.folder) as folder, tiny_runs.prepared(folder):
        while len(rows) < args.failures:
            counts = {
                (f, p): sum((r["failure"], r["phase"]) == (f.name, p) for r in rows)
                for f, p in kinds
            }
            failure, phase = min(kinds, key=lambda kind: counts[kind])
            seed = counts[failure, phase]
            rows.append(
                row := failed(Case(processes=2 + (seed % 3 == 2)), failure, phase, folder, seed)
            )
            print(json.dumps(row), flush=True)
            path.write_text(harness.with_rows(harness.made_by(COMMAND), "rows", rows))
            write_section(args.page, "processes", page(rows))
    write_section(args.page, "processes", page(rows))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
