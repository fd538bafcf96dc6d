"""Kills runs at chosen file operations until they are done, and compares each with one left alone: docs/operations.{json,md}.

    python -m scripts.campaigns.operations [--kills 100] [--most 8] [--again] [--folder DIR] [--page FILE]

The runs are those of `scripts.campaigns.kills`, in folders whose operations a library loaded into them counts (`faults.c`; it
needs a C compiler). At a chosen one of a chosen kind the process gets SIGKILL: before the operation, or after it, for a write
after half of it. A run is resumed and killed again, then let to its end; it must then have the parameters, optimizer state,
counters and metrics rows of the undisturbed run, bitwise. What the file holds counts; the rest is run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.campaigns import kills, shim
from scripts.campaigns.kills import CASES, Case, Session

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
COMMAND = "python -m scripts.campaigns.operations"
STEPS = 60
KINDS = ("open", "write", "pwrite", "fsync", "rename", "unlink", "mkdir")
"""Operations to be killed at; reading changes nothing."""
MOMENTS = ("killed", "killed after")
ALONE = [case for case in CASES if case.processes == 1]


class Watched:
    """One process whose file operations in its work folder are counted, and killed at.

    Args:
        control: of the library that this process was started with.
        folder: of all runs.
    """

    def __init__(self, control: shim.Control, folder: Path) -> None:
        self._control, self.folder = control, folder
        self._undisturbed: dict[Case, tuple[dict[str, Any], dict[str, int]]] = {}

    def undisturbed(self, case: Case) -> tuple[dict[str, Any], dict[str, int]]:
        """What a run leaves that nobody touches, and its operations by kind."""
        if case not in self._undisturbed:
            self._control.watch(self.folder / f"{case.model}-{case.processes}")
            result = kills.undisturbed(case, self.folder, STEPS)
            self._undisturbed[case] = result, self._control.calls()
        return self._undisturbed[case]

    def disturbed(self, case: Case, seed: int, most: int, choices: Iterator[tuple[str, str]]) -> dict[str, Any]:
        """One run, killed at most so many times and then let to its end: a row of the file.

        Args:
            case: what is run.
            seed: of the choice of operations.
            most: kills.
            choices: kinds and moments, in turn.
        """
        (expected, calls), choose = self.undisturbed(case), random.Random(f"{case} {seed}")
        workdir, began = f"{case.model}-{case.processes}-{seed}", time.monotonic()
        hits: list[dict[str, Any]] = []
        wrong: list[str] = []
        while True:
            done = (kills.latest(self.folder / workdir) or 0) / STEPS
            self._control.watch(self.folder / workdir)
            kind, moment = next((kind, moment) for kind, moment in choices if calls[kind])
            number = choose.randrange(max(1, round(calls[kind] * (1 - done))))
            if len(hits) < most:
                self._control.arm(kind, moment, number)
            session = Session(case, self.folder, workdir, STEPS)
            codes = session.wait(600)
            if not self._control.fired:
                wrong += [f"ended with {codes}: {session.said()[-500:]}"] * any(codes)
                break
            if codes != [-signal.SIGKILL]:
                wrong.append(f"killed, ended with {codes}")
                break
            checkpoint = kills.latest(self.folder / workdir)
            hits.append({"operation": kind, "moment": moment, "number": number, "checkpoint": checkpoint})
        if not wrong:
            wrong = kills.differences(kills.left(self.folder / workdir, STEPS), expected)
        return {
            "model": case.model, "seed": seed, "steps": STEPS, "kills": hits, "differences": wrong,
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip


def page(runs: Sequence[dict[str, Any]]) -> str:
    """The table of what was done and what became of it."""
    hits = [one for run in runs for one in run["kills"]]
    same = sum(not run["differences"] for run in runs)
    counts = Counter((one["operation"], one["moment"]) for one in hits)
    lines = [
        "# Runs killed at chosen file operations",
        "",
        f"{len(hits)} times one of {len(runs)} runs was killed at a chosen operation on a file or folder of its work folder, and resumed",
        f"until it was done; **{same} of {len(runs)} runs ended bitwise as the undisturbed one did**. Made by `{COMMAND}`,",
        "which says what the runs are and what is compared; each kill is in `operations.json`.",
        "",
        "| operation | killed before it | killed after it (a write: after half of it) |",
        "|---|---|---|",
        *(f"| {kind} | {counts[kind, MOMENTS[0]]} | {counts[kind, MOMENTS[1]]} |" for kind in KINDS),
        f"| all | {sum(counts[kind, MOMENTS[0]] for kind in KINDS)} | {sum(counts[kind, MOMENTS[1]] for kind in KINDS)} |",
        "",
        *(f"- {run['model']} seed {run['seed']}: {'; '.join(run['differences'])[:300]}" for run in runs if run["differences"]),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def campaign(args: argparse.Namespace, folder: Path) -> int:
    """Run what is missing, then write the page; exit code 1 where a run differs."""
    path = args.page.with_suffix(".json")
    runs = json.loads(path.read_text())["runs"] if path.exists() and not args.again else []
    control = shim.Control(folder / "control", folder / "faults.so")
    with kills.prepared(folder):
        watched = Watched(control, folder)
        first = max((run["seed"] + 1 for run in runs), default=0)
        choices = itertools.cycle(itertools.product(KINDS, MOMENTS))
        for case, seed in zip(itertools.cycle(ALONE), itertools.count(first), strict=False):
            if sum(len(run["kills"]) for run in runs) >= args.kills:
                break
            runs.append(run := watched.disturbed(case, seed, args.most, choices))
            print(
                f"{case.model} seed {seed}: {len(run['kills'])} kills, {run['differences'] or 'identical'}", flush=True
            )
            path.write_text(kills.as_json(runs, COMMAND))
            args.page.write_text(page(runs))
    args.page.write_text(page(runs))
    return int(any(run["differences"] for run in runs))


def main(argv: Sequence[str] | None = None) -> int:
    """Starts itself again with the library that counts and kills."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="at least so many in the file (default 100)")
    parser.add_argument("--most", type=int, default=8, help="kills of one run (default 8)")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="write here, and the rows beside it, not docs/operations.md"
    )
    parser.add_argument("--again", action="store_true", help="forget what the file holds")
    parser.add_argument("--folder", type=Path, help="keep the runs here; a temporary folder unless given")
    args = parser.parse_args(words)
    if "FAULTS" in os.environ:
        return campaign(args, args.folder)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if (library := shim.compiled(folder)) is None:
            raise SystemExit("no C compiler (cc) is installed; the campaign needs one")
        environ = os.environ | shim.Control(folder / "control", library).environ
        command = [sys.executable, "-m", "scripts.campaigns.operations", *words, "--folder", str(folder)]
        return subprocess.run(command, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
