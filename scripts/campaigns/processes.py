"""Let one process of several fail in every way, and check that the others end with its reason.

    python -m scripts.campaigns.processes [--failures 100] [--only WORD ...]
        [--again] [--folder DIR] [--page FILE]

Tiny runs of a decoder on two or three processes, each of which holds and writes its part of the
state. One process is killed, stopped or slowed down, cannot write, or raises: while it starts,
compiles, trains, saves or restores. All processes must end within 60 s with the reason on every
screen that is left. If the failure passes, they must train on instead. The run is then resumed, and
must end bitwise as the run that was left alone. Failures in the record count; only missing ones are
done.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mupax.command_line import Switch
from scripts import harness
from scripts.campaigns import PAGE, tiny_runs
from scripts.campaigns.injection.calls import Action, on_call, with_result
from scripts.campaigns.tiny_runs import Session
from scripts.pages.markdown import table, write_section

COMMAND = "python -m scripts.campaigns.processes"
STEPS = 16
"""Steps of a run."""
EVERY = 4
"""Steps between checkpoints."""
BOUND_S = 60.0
"""Seconds that processes may take to end after one of them has failed."""
_GIVE_UP_S = 150.0
_BROKEN = "this process breaks"
_NEVER_CAME = "waited 20 s for process 0"
"""Message of a process whose partner was killed before the two had joined."""


@dataclass(frozen=True)
class Case(tiny_runs.Case):
    """A decoder whose state is split over all processes."""

    model: str = "decoder"
    processes: int = 2

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        words = " ".join(super().argv(folder, workdir, steps))
        replacements = {
            "every-steps 20": f"every-steps {EVERY}",
            # Two and three processes divide these sizes.
            "--data.batch-size 16 --data.eval-batch-size 32": (
                "--data.batch-size 12 --data.eval-batch-size 36"
            ),
            "width 16": f"width {8 * self.processes}",
        }
        for old, new in replacements.items():
            words = words.replace(old, new)
        return [*words.split(), "--mesh.data", "1", "--mesh.fsdp", str(self.processes)]


@dataclass(frozen=True)
class Failure:
    """Failure of one process of a run, with the end that the run must have.

    Attributes:
        name: Name in the page's table.
        reason: Text that the other processes must print. PROCESS stands for the failing process.
        sick: Function that prepares the failure. The failing process calls it before mupax starts.
        sent: Signal that is sent to the process; used in place of `sick`.
        passes: True if the run must survive the failure, and all processes must end with 0.
        dies: True if the failing process cannot print the reason itself.
        code: Exit code of the other processes; 2 for bad input.
        phases: Phases in which the failure is tried.
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
    """Raise the error of a failing process."""
    raise RuntimeError(_BROKEN)


def other_fact(group: str, field: str) -> Action:
    """Return an action that falsifies one fact in which all processes of a run must agree.

    Args:
        group: Key of a group in the result of `mupax.train.parallel.agreement.facts`.
        field: Name of the fact in the group.
    """

    def change(facts: Any) -> Any:
        return {**facts, group: {**facts[group], field: "another"}}

    return with_result(("mupax.train.parallel.agreement", "facts"), change)


def full(saves: int | None) -> Action:
    """Return an action that fills the disk from the second save on.

    The disk then takes no file of more than 16 KiB.

    Args:
        saves: Number of saves for which the disk is full; `None` for good.
    """

    def sick() -> None:
        # The signal would end the process. If it is ignored, the write fails with EFBIG.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        save = ("mupax.train.checkpoints.layout", "host_shards")
        # The hard limit stays, because a process may not raise it again.
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 14, hard))
        on_call(save, 2, limit)()
        if saves is not None:
            lift = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
            on_call(save, 2 + saves, lift)()

    return sick


_SAVE = "mupax.train.checkpoints.checkpointer", "ocp.save_async"
_COMPILE = "mupax.train.core.program", "Program.compile_train"
_DATA = "mupax.train.parallel.sharding", "BatchSharding.shard_batch"
_DIGESTS = "mupax.train.checkpoints.folder", "file_digests"
_ALWAYS = ("starting", "compiling", "training", "saving", "resuming")
FAILURES = (
    Failure("killed", "process PROCESS (", sent=signal.SIGKILL, dies=True, phases=_ALWAYS),
    Failure("full disk", "File too large", full(None), phases=("saving",)),
    Failure(
        "stopped",
        "process PROCESS (",
        sent=signal.SIGSTOP,
        dies=True,
        phases=("compiling", "training", "saving"),
    ),
    Failure("full disk for one save", "File too large", full(1), passes=True, phases=("saving",)),
    Failure("raises before orbax saves", _BROKEN, on_call(_SAVE, 2, broken), phases=("saving",)),
    Failure(
        "raises after orbax has begun",
        _BROKEN,
        on_call(_SAVE, 2, broken, after=True),
        phases=("saving",),
    ),
    Failure("raises in data", _BROKEN, on_call(_DATA, 12, broken)),
    Failure("raises in the compiler", _BROKEN, on_call(_COMPILE, 1, broken), phases=("compiling",)),
    Failure(
        "aborts in the compiler",
        "aborted by a library",
        on_call(_COMPILE, 1, os.abort),
        dies=True,
        phases=("compiling",),
    ),
    Failure(
        "other code",
        "run the same code on all hosts",
        other_fact("code", "train/core/step.py"),
        code=2,
        phases=("starting",),
    ),
    Failure(
        "other flags",
        "start all processes with the same flags",
        other_fact("config", "seed"),
        code=2,
        phases=("starting",),
    ),
    Failure(
        "other XLA flags",
        "set the same in all processes",
        other_fact("environment", "XLA_FLAGS"),
        code=2,
        phases=("starting",),
    ),
    # 12 s is more than a heartbeat of 4 s, and less than the timeout of 20 s.
    Failure("slow data", "", on_call(_DATA, 12, partial(time.sleep, 12.0)), passes=True),
    Failure(
        "slow compiler",
        "",
        on_call(_COMPILE, 1, partial(time.sleep, 40.0)),
        passes=True,
        phases=("compiling",),
    ),
    Failure(
        "slow disk",
        "",
        on_call(_DIGESTS, 2, partial(time.sleep, 12.0)),
        passes=True,
        phases=("saving",),
    ),
)


def phase_of(session: Session, workdir: Path) -> str:
    """Return the phase that a run is in, read from its files and the output of process 0."""
    output = session.output()
    if "compiled in" in output:
        is_saving = list((workdir / "checkpoints").glob("*.saving*"))
        return "saving" if is_saving else "training"
    if "parameters" in output or "resuming" in output:
        return "compiling"
    return "starting"


def failed(case: Case, failure: Failure, phase: str, folder: Path, seed: int) -> dict[str, Any]:
    """Let a process of a run fail in a phase, resume the run, and judge both.

    Args:
        phase: One of `failure.phases`.
        seed: Chooses the failing process and the moment of a signal.

    Returns:
        Row of the record. `wrong` has a line for each fault of the ending or of the resumed run.
    """
    expected = tiny_runs.undisturbed(case, folder, STEPS, f"alone-{case.processes}")
    name = f"{failure.name.replace(' ', '-')}-{phase}-{case.processes}-{seed}"
    index = (seed + FAILURES.index(failure)) % case.processes
    struck = folder / f"{name}.struck"
    if phase == "resuming":
        train_to_first_checkpoint(case, folder, name)

    # The failing process makes this file when the failure comes.
    os.environ["STRUCK"] = str(struck)
    sick = {index: failure.sick} if failure.sick else None
    session = Session(case, folder, name, STEPS, sick)
    if failure.sent is not None:
        choose = random.Random(f"{case} {failure.name} {phase} {seed}")
        wait_for_moment(session, folder / name, phase, choose)
        struck.touch()
        session.send(failure.sent, [index])
    ended = wait(session, index if failure.sent == signal.SIGSTOP else None)
    seconds = None
    if struck.exists():
        began = struck.stat().st_mtime
        seconds = round(max(ended, began) - began, 1)

    codes = session.wait(0)
    survivors = list(range(case.processes))
    if failure.dies:
        survivors.remove(index)
    wrong = faults_of_ending(session, failure, index, survivors, seconds)
    outputs = {}
    if wrong:
        outputs = {i: session.output(i)[-400:] for i in survivors}

    session = Session(case, folder, name, STEPS)
    if any(session.wait(_GIVE_UP_S)):
        wrong.append(f"does not resume: {session.output()[-300:]}")
    else:
        wrong += tiny_runs.differences(tiny_runs.run_result(folder / name, STEPS), expected)
    return {
        "failure": failure.name,
        "phase": phase,
        "processes": case.processes,
        "process": index,
        "seed": seed,
        "codes": codes,
        "ended_s": seconds,
        "wrong": wrong,
        "said": outputs,
    }


def train_to_first_checkpoint(case: Case, folder: Path, name: str) -> None:
    """Train a run until it has a checkpoint, and kill its processes."""
    session = Session(case, folder, name, STEPS)
    while None in session.poll() and (tiny_runs.latest_step(folder / name) or 0) < EVERY:
        time.sleep(0.01)
    session.send(signal.SIGKILL, range(case.processes))
    session.wait(10)


def wait_for_moment(session: Session, workdir: Path, phase: str, choose: random.Random) -> None:
    """Wait until a run is in a phase, and then for a random time."""
    reached = "starting" if phase == "resuming" else phase
    while None in session.poll() and phase_of(session, workdir) != reached:
        time.sleep(0.005)
    longest_s = {"saving": 0.3, "starting": 3.0, "resuming": 6.0}.get(phase, 1.0)
    time.sleep(choose.uniform(0.0, longest_s))


def faults_of_ending(
    session: Session,
    failure: Failure,
    index: int,
    survivors: Sequence[int],
    seconds: float | None,
) -> list[str]:
    """Return what is wrong with the end of a session, one line each.

    Args:
        index: Number of the process that failed, from 0.
        survivors: Numbers of the processes that must end by themselves.
        seconds: Time from the failure to the end; `None` if the failure did not come.
    """
    if seconds is None:
        return ["the failure never came"]
    codes = session.wait(0)
    wrong = []
    if failure.passes:
        for i in survivors:
            if codes[i]:
                wrong.append(f"process {i} ended with {codes[i]}")
        return wrong

    if seconds > BOUND_S:
        wrong.append(f"not ended after {BOUND_S} s")
    reason = failure.reason.replace("PROCESS", str(index))
    for i in survivors:
        if reason not in session.output(i) and _NEVER_CAME not in session.output(i):
            wrong.append(f"process {i} does not say the reason")
    for i in survivors:
        if codes[i] != failure.code:
            wrong.append(f"process {i} ended with {codes[i]}")
    return wrong


def wait(session: Session, stopped: int | None) -> float:
    """Wait until all processes have ended except a stopped one, then kill what is left.

    Returns:
        Time of the end, in seconds since the epoch.
    """
    deadline = time.monotonic() + _GIVE_UP_S
    while time.monotonic() < deadline:
        codes = session.poll()
        # A stopped process cannot end by itself.
        if stopped is not None:
            del codes[stopped]
        if None not in codes:
            break
        time.sleep(0.01)
    # Wall time, because it is compared with the time of a file.
    ended = time.time()
    session.send(signal.SIGKILL, range(len(session.pids)))
    session.wait(10)
    return ended


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return this campaign's Markdown section: totals, and a table with a row for each failure."""
    wrong = [row for row in rows if row["wrong"]]
    num_right = len(rows) - len(wrong)
    text = (
        f"In {len(rows)} runs of two or three processes, one process failed. **{num_right} of "
        f"{len(rows)} runs ended as they must**. The other processes printed the reason (or, before all had "
        "joined, that they waited for process 0). They ended "
        f"within {BOUND_S:.0f} s, with exit code 1, or 2 for bad input. After a failure that "
        "passes, such as a slow disk, they trained on. Resumed runs ended bitwise equal to an "
        "undisturbed run. *Other* code or flags: only one process has them. "
        f"`{COMMAND}`"
    )

    seconds = "seconds until the others ended: median, most"
    cells = [["failure", "phases", "times", seconds]]
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
    """Return median and maximum of `ended_s` in rows, as text such as `1.5, 20.3`.

    `ended_s` is the time in seconds from the failure until all processes except a stopped one had
    ended. Without any such time the text is `goes on`.
    """
    seconds = sorted(row["ended_s"] for row in rows if row["ended_s"] is not None)
    if not seconds:
        return "goes on"
    return f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}"


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    failures: int = 100
    """Number of failures that the record must have at least."""
    only: tuple[str, ...] = ("",)
    """Try only failures and phases whose name has one of these words."""
    page: Path = PAGE
    """Page to write. The record is `processes.json` in the same folder."""
    again: Switch = False
    """Forget what the record has."""
    folder: Path | None = None
    """Folder to keep the runs in. Default: a temporary folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do the missing failures, and write the record and the page. Return 1 if a row has a fault."""
    args = harness.parse(Options, argv)
    path = args.page.with_name("processes.json")
    rows = harness.read_rows(path, "rows", args.again)
    kinds = []
    for failure in FAILURES:
        for phase in failure.phases:
            if any(word in f"{failure.name} {phase}" for word in args.only):
                kinds.append((failure, phase))

    with tiny_runs.scratch(args.folder) as folder:
        tiny_runs.prepare_forks(folder)
        while len(rows) < args.failures:
            counts = Counter((row["failure"], row["phase"]) for row in rows)
            failure, phase = min(kinds, key=lambda kind: counts[kind[0].name, kind[1]])
            seed = counts[failure.name, phase]
            # Every third seed has three processes.
            case = Case(processes=3 if seed % 3 == 2 else 2)
            row = failed(case, failure, phase, folder, seed)
            rows.append(row)
            print(json.dumps(row), flush=True)
            path.write_text(harness.with_rows(harness.made_by(COMMAND), "rows", rows))
            write_section(args.page, "processes", page(rows))
    write_section(args.page, "processes", page(rows))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
