"""Let single file operations of tiny runs fail, and check that the runs survive or go on later.

    python -m scripts.campaigns.faults [--count 320] [--workers 1] [--again] [--page FILE]

`faults.c`, loaded by LD_PRELOAD, fails the N-th operation of a kind below the run's folder, and up
to four operations after it: an error, a short write, half a write with an error, or half a second
of delay. Half of the runs are new, the others go on from a checkpoint. A run may survive the fault
or end with a message. When the disk is well again, the same command must take the run to its end
from its newest checkpoint, with every row of metrics and every digest of the last checkpoint as in
the undisturbed run. Runs in the record count; only missing ones are done. The runs of a worker
follow one another in one process, which compiles once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mupax.command_line import Switch
from scripts import harness
from scripts.campaigns import PAGE, tiny_runs, workers
from scripts.campaigns.injection import shim
from scripts.pages.markdown import table, write_section

COMMAND = "python -m scripts.campaigns.faults"
STEPS = 12
"""Steps of a run."""
HALF = 8
"""Step of the checkpoint from which half of the runs go on."""
WORDS = (
    "vit-digits --model.width 8 --model.depth 1 --model.num-heads 2 --data.batch-size 8 "
    "--data.eval-batch-size 16 --data.eval-examples 16 --optimizer.warmup-steps 2 "
    f"--steps {STEPS} --checkpoint.every-steps 4 --checkpoint.keep 2 --log.eval-every-steps 6 "
    "--log.no-samples --log.no-tensorboard --log.no-progress --resume"
)
"""Command line of every run, without its workdir."""
READING = ("open", "read", "pread", "stat", "list")
WRITING = ("write", "fsync", "rename", "unlink", "mkdir")
EFFECTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(READING, ("EIO", "ESTALE", "EACCES", "slow")),
    **dict.fromkeys(WRITING, ("EIO", "ESTALE", "ENOSPC", "slow")),
    "read": ("EIO", "ESTALE", "EACCES", "slow", "short"),
    "pread": ("EIO", "ESTALE", "EACCES", "slow", "short"),
    "write": ("EIO", "ESTALE", "ENOSPC", "slow", "short", "torn"),
}
"""Effects of a fault on each kind of operation, keys of `shim.EFFECTS`."""
TIMES = (1, 2, 5)
"""Numbers of operations in a row that one fault hits."""
BOUND_S = 60.0
"""Seconds within which every session must have ended."""


def compile_once() -> None:
    """Patch mupax in this process so that many runs are quick.

    The training and evaluation steps are compiled once, because all runs have the same ones. In
    place of a drawn loss.png, 30,000 zero bytes are written.
    """
    from mupax.train.core.program import Program
    from mupax.train.run.report import finish

    cache: dict[str, Any] = {}

    def cached(name: str) -> Callable[..., Any]:
        compile_step = getattr(Program, name)

        def compile_cached(*args: Any) -> Any:
            if name not in cache:
                cache[name] = compile_step(*args)
            return cache[name]

        return compile_cached

    for name in ("compile_train", "compile_eval"):
        setattr(Program, name, cached(name))

    # Drawing would take longer than the run. Faults hit the writes of a file as large.
    def write_zeros(metrics: Any, image: Any, *args: Any, **options: Any) -> int:
        return Path(image).write_bytes(bytes(30_000))

    finish.loss_plot = write_zeros  # pyright: ignore[reportAttributeAccessIssue]


class Runs:
    """Runs of one worker in a folder: an undisturbed one, its first half, and the disturbed ones.

    The process must have been started with the variables of a `shim.Control`.

    Raises:
        SystemExit: The undisturbed run fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control = shim.Control(Path(os.environ["FAULTS"]), Path(os.environ["LD_PRELOAD"]))
        compile_once()

        complete = folder / "whole"
        # A worker that replaces another finds the runs of that one.
        shutil.rmtree(complete, ignore_errors=True)
        code, output, _ = self.session(complete)
        if code:
            raise SystemExit(f"the undisturbed run itself fails:\n{output}")
        self.expected = tiny_runs.run_result(complete, STEPS)

        half = folder / "half"
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(complete, half)
        shutil.rmtree(half / "checkpoints" / str(STEPS))
        # A run that stopped at step HALF has no later rows.
        lines = []
        for line in (half / "metrics.jsonl").read_text().splitlines(keepends=True):
            if json.loads(line)["step"] <= HALF:
                lines.append(line)
        (half / "metrics.jsonl").write_text("".join(lines))

        # Count the operations of each kind, from which the disturbed ones are chosen.
        self._counts: dict[str, dict[str, int]] = {}
        for phase in ("new", "going on"):
            self.control.watch(self.begun(phase))
            self.session(folder / "sick")
            self._counts[phase] = self.control.calls()
            self.control.watch(None)

    def session(self, workdir: Path) -> tuple[int, str, float]:
        """Train a run in this process. Return the exit code, the printed text and the seconds."""
        main = importlib.import_module("mupax.train.__main__").main
        output = io.StringIO()
        began = time.monotonic()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main([*WORDS.split(), "--workdir", str(workdir)])
        return code, output.getvalue(), time.monotonic() - began

    def begun(self, phase: str) -> Path:
        """Prepare the workdir of the run to disturb, and return its path.

        Args:
            phase: `new` for a workdir that is not there yet, `going on` for one with the checkpoint
                of step `HALF`.
        """
        workdir = self.folder / "sick"
        shutil.rmtree(workdir, ignore_errors=True)
        if phase != "new":
            shutil.copytree(self.folder / "half", workdir)
        return workdir

    def disturbed(self, seed: int) -> dict[str, Any]:
        """Let file operations of one run fail, and resume the run if it ended with an error.

        Args:
            seed: Number that chooses the phase (`begun`), the kind of operation, the effect and the
                operation that fails.

        Returns:
            Row of the record. `fired` is the number of operations that failed, and `wrong` has a
            line for everything that a run must not do.
        """
        choose = random.Random(seed)
        # Consecutive seeds go through all phases, kinds and effects in turn.
        phase = ("new", "going on")[seed % 2]
        kind = (*READING, *WRITING)[seed // 2 % 10]
        effect = EFFECTS[kind][seed // 20 % len(EFFECTS[kind])]
        times = choose.choice(TIMES)
        # A kind may have no operation in a phase, and `randrange` refuses 0.
        first = choose.randrange(max(1, self._counts[phase][kind]))

        workdir = self.begun(phase)
        self.control.watch(workdir)
        self.control.arm(kind, effect, first, times)
        code, output, seconds = self.session(workdir)
        # `watch` clears the counter.
        fired = self.control.fired
        # The disk is well again: the checks and the next sessions meet no fault.
        self.control.watch(None)

        wrong = []
        checkpoint = tiny_runs.latest_step(workdir)
        if phase != "new" and (checkpoint or 0) < HALF:
            wrong.append(f"lost: the newest checkpoint is {checkpoint}")
        # An error while reading is no damage, so no checkpoint may be set aside.
        if (workdir / "checkpoints" / "set-aside").exists():
            wrong.append("lost: a checkpoint was set aside")

        outputs = [output]
        num_sessions = 1
        last_code = code
        while last_code and num_sessions < 3:
            last_code, text, session_s = self.session(workdir)
            outputs.append(text)
            seconds = max(seconds, session_s)
            num_sessions += 1
            resumed = re.search(r"resuming \S+ at step (\d+) of", text)
            if checkpoint is not None and (resumed is None or int(resumed[1]) < checkpoint):
                wrong.append(f"lost: went on from {resumed and resumed[1]}, not {checkpoint}")
        if last_code:
            wrong.append(f"not ended well after {num_sessions} sessions: {outputs[-1][-300:]}")
        for text in outputs:
            if "Traceback" in text:
                wrong.append(f"a traceback: {text[-1500:]}")
        if seconds > BOUND_S:
            wrong.append(f"took {seconds:.0f} s")
        if not wrong:
            result = tiny_runs.run_result(workdir, STEPS)
            wrong = tiny_runs.differences(result, self.expected)

        message = ""
        if code:
            for line in output.splitlines():
                # The last error is the one that ended the session.
                if line.startswith("error"):
                    message = line
        return {
            "seed": seed,
            "phase": phase,
            "kind": kind,
            "effect": effect,
            "first": first,
            "times": times,
            "fired": fired,
            "code": code,
            "sessions": num_sessions,
            "seconds": round(seconds, 1),
            "wrong": wrong,
            # The temporary folder would be different in every record.
            "said": message.replace(str(self.folder), "")[:200],
        }


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return this campaign's Markdown section: totals, and a table with a row for each operation.

    Args:
        rows: Rows of the record. Those whose fault never came are left out.
    """
    struck = []
    num_operations = 0
    num_right = 0
    num_survived = 0
    slowest = 0.0
    for row in rows:
        if not row["fired"]:
            continue
        struck.append(row)
        num_operations += row["fired"]
        num_right += not row["wrong"]
        num_survived += not row["code"]
        slowest = max(slowest, row["seconds"])
    text = (
        f"In {len(struck)} runs, {num_operations} chosen file operations were disturbed: they failed "
        "(EIO, ESTALE, EACCES or ENOSPC), came half a second late, or ended after half of the bytes. "
        f"**{num_right} of {len(struck)} runs ended bitwise equal to an undisturbed run.** "
        f"{num_survived} of them survived the failure. The others ended with a message. The same "
        "command then finished them from their newest checkpoint, or without one from the beginning. "
        f"No command took longer than {slowest:.0f} s. `{COMMAND}`"
    )

    cells = [["operation", "runs", "operations disturbed", "survived", "ended, then went on"]]
    for kind in (*READING, *WRITING):
        num_runs = 0
        num_failed = 0
        num_ended = 0
        for row in struck:
            if row["kind"] == kind:
                num_runs += 1
                num_failed += row["fired"]
                num_ended += bool(row["code"])
        counts = (num_runs, num_failed, num_runs - num_ended, num_ended)
        cells.append([kind, *map(str, counts)])
    return "\n".join(["## Unwell disks", "", text, "", table(cells), ""])


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    count: int = 320
    """Number of disturbed runs in the record. A run whose fault never came does not count."""
    workers: int = 1
    """Number of worker processes."""
    again: Switch = False
    """Forget what the record has."""
    page: Path = PAGE
    """Page to write. The record is `faults.json` in the same folder."""
    worker: Path | None = None
    """Folder of a worker. The command starts its workers with this flag."""


def main(argv: Sequence[str] | None = None) -> int:
    """Disturb the missing runs, and write record and page. Return 1 if a row has a fault."""
    args = harness.parse(Options, argv)
    if args.worker is not None:
        serve(args.worker)
        return 0

    path = args.page.with_name("faults.json")
    rows: list[dict[str, Any]] = []
    if path.exists() and not args.again:
        rows = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as temporary:
        library = shim.compiled(Path(temporary))
        if library is None:
            print("skipped: there is no C compiler (cc) for faults.c", file=sys.stderr)
            return 0
        pool = make_workers(Path(temporary), library, args.workers)
        missing = num_missing(rows, args.count)
        # A fault that did not come does not count, so the seeds go on until enough have come.
        while missing > 0:
            done = {row["seed"] for row in rows}
            new_seeds = (seed for seed in itertools.count() if seed not in done)
            seeds = list(itertools.islice(new_seeds, missing))
            # The first answer also waits for three runs that `Runs` trains.
            for seed, answer in workers.answers(pool, seeds, 5 * BOUND_S):
                row = answer or hung_row(seed)
                rows = sorted([*rows, row], key=lambda row: row["seed"])
                if row["wrong"]:
                    print(json.dumps(row), file=sys.stderr, flush=True)
                path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
                write_section(args.page, "faults", page(rows))
            missing = num_missing(rows, args.count)
    return int(any(row["wrong"] for row in rows))


def num_missing(rows: Sequence[dict[str, Any]], count: int) -> int:
    """Return `count` less the number of recorded runs whose fault came."""
    return count - sum(bool(row["fired"]) for row in rows)


def hung_row(seed: int) -> dict[str, Any]:
    """Return the row of the record for a seed that a worker did not answer in time."""
    return {
        "seed": seed,
        # The page and the count of missing runs take only rows whose fault came.
        "fired": 1,
        "kind": "open",
        "effect": "EIO",
        "code": 1,
        "seconds": 0,
        "wrong": ["hung"],
    }


def make_workers(temporary: Path, library: Path, count: int) -> list[workers.Worker]:
    """Return workers whose file operations can be failed, each with a folder of its own."""
    pool = []
    for index in range(count):
        folder = temporary / str(index)
        folder.mkdir()
        environ = {
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "agg",
            "MUPAX_DATA": f"{temporary}/data",
            "JAX_COMPILATION_CACHE_DIR": f"{temporary}/jax",
            # By default JAX caches only programs that take more than a second to compile.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **shim.Control(folder / "control", library).environ,
        }
        pool.append(workers.Worker("scripts.campaigns.faults", folder / "runs", environ))
    return pool


def serve(folder: Path) -> None:
    """Run a worker, which reads seeds from standard input and answers with `Runs.disturbed`."""
    runs: list[Runs] = []

    def answer(seed: int) -> dict[str, Any]:
        # The first question waits for the undisturbed run.
        if not runs:
            runs.append(Runs(folder))
        return runs[0].disturbed(seed)

    workers.serve(answer)


if __name__ == "__main__":
    sys.exit(main())
