"""Lets single file operations of tiny runs fail, and looks what becomes of the run: docs/faults.{json,md}.

    python -m scripts.campaigns.faults [--count 320] [--workers 1] [--again] [--page FILE]

`faults.c`, loaded by LD_PRELOAD, fails the N-th operation of a kind below the run's folder, and up to four after it: an error, a
short write, half a write with an error, half a second of nothing. Half of the runs are new, half go on from a checkpoint. A run
may survive it or end with a message; when the disk is well again, the same command must take it to its end, with every
row of metrics and every digest of the last checkpoint as in the run that nothing disturbed, from the newest checkpoint that
there was. What the file holds counts; the rest is run. Runs follow one another in one process, which compiles once.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mupax.command_line import Switch
from scripts import harness
from scripts.campaigns import PAGE, tiny_runs, workers
from scripts.campaigns.injection import shim
from scripts.pages.markdown import table, write_section

COMMAND = "python -m scripts.campaigns.faults"
STEPS, HALF = 12, 8
WORDS = (
    "vit-digits --model.width 8 --model.depth 1 --model.num-heads 2 --data.batch-size 8 --data.eval-batch-size 16 "
    f"--data.eval-examples 16 --optimizer.warmup-steps 2 --steps {STEPS} --checkpoint.every-steps 4 --checkpoint.keep 2 "
    "--log.eval-every-steps 6 --log.no-samples --log.no-tensorboard --log.no-progress --resume"
)
READING = ("open", "read", "pread", "stat", "list")
WRITING = ("write", "fsync", "rename", "unlink", "mkdir")
EFFECTS = dict.fromkeys(READING, ("EIO", "ESTALE", "EACCES", "slow")) | dict.fromkeys(
    WRITING, ("EIO", "ESTALE", "ENOSPC", "slow")
)
EFFECTS |= {kind: (*EFFECTS[kind], "short") for kind in ("read", "pread")} | {
    "write": (*EFFECTS["write"], "short", "torn")
}
TIMES = (1, 2, 5)
BOUND_S = 60.0
"""Every session must have ended after so long."""


def compile_once() -> None:
    """Keep the compiled steps, which are the same in every run here, and write loss.png without drawing it."""
    from mupax.train.core.program import Program
    from mupax.train.run.report import finish

    compiled = {name: getattr(Program, name) for name in ("compile_train", "compile_eval")}
    cache: dict[str, Any] = {}

    def keeping(name: str) -> Any:
        return lambda *args: (
            cache[name] if name in cache else cache.setdefault(name, compiled[name](*args))
        )

    for name in compiled:
        setattr(Program, name, keeping(name))
    setattr(finish, "loss_plot", lambda path, out, *_, **__: Path(out).write_bytes(bytes(30_000)))  # noqa: B010


class Runs:
    """The runs of one worker: one that nothing disturbed, the half of it, and one that is disturbed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.control = (
            folder,
            shim.Control(Path(os.environ["FAULTS"]), Path(os.environ["LD_PRELOAD"])),
        )
        self._numbers: dict[str, dict[str, int]] = {}
        compile_once()
        whole, half = folder / "whole", folder / "half"
        shutil.rmtree(whole, ignore_errors=True)
        code, output, _ = self.session(whole)
        if code:
            raise SystemExit(f"the undisturbed run itself fails:\n{output}")
        self.expected = tiny_runs.left(whole, STEPS)
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(whole, half)
        shutil.rmtree(half / "checkpoints" / str(STEPS))
        lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
        (half / "metrics.jsonl").write_text(
            "".join(line for line in lines if json.loads(line)["step"] <= HALF)
        )
        for phase in ("new", "going on"):  # how many operations there are to choose from
            self.control.watch(self.begun(phase))
            self.session(folder / "sick")
            self._numbers[phase] = self.control.calls()
            self.control.watch(None)

    def session(self, workdir: Path) -> tuple[int, str, float]:
        """Exit code, what was printed, and seconds of one start of a run, in this process."""
        main = importlib.import_module("mupax.train.__main__").main
        output, began = io.StringIO(), time.monotonic()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main([*WORDS.split(), "--workdir", str(workdir)])
        return code, output.getvalue(), time.monotonic() - began

    def begun(self, phase: str) -> Path:
        """The folder of the run to disturb: none yet, or one with the checkpoint of step `HALF`."""
        workdir = self.folder / "sick"
        shutil.rmtree(workdir, ignore_errors=True)
        if phase != "new":
            shutil.copytree(self.folder / "half", workdir)
        return workdir

    def disturbed(self, seed: int) -> dict[str, Any]:
        """A row of the file."""
        choose = random.Random(seed)
        phase, kind = ("new", "going on")[seed % 2], (*READING, *WRITING)[seed // 2 % 10]
        effect, times = EFFECTS[kind][seed // 20 % len(EFFECTS[kind])], choose.choice(TIMES)
        first = choose.randrange(max(1, self._numbers[phase][kind]))
        workdir = self.begun(phase)
        self.control.watch(workdir)
        self.control.arm(kind, effect, first, times)
        code, output, seconds = self.session(workdir)
        fired = self.control.fired
        self.control.watch(None)
        checkpoint, wrong, sessions = tiny_runs.latest(workdir), [], 1
        if phase != "new" and (checkpoint or 0) < HALF:
            wrong.append(f"lost: the newest checkpoint is {checkpoint}")
        if (workdir / "checkpoints" / "set-aside").exists():
            wrong.append("lost: a checkpoint was set aside")
        texts = [output]
        while code and sessions < 3:
            code_after, more, again = self.session(workdir)
            texts.append(more)
            seconds, sessions = max(seconds, again), sessions + 1
            went_on = re.search(r"resuming \S+ at step (\d+) of", more)
            if checkpoint is not None and (went_on is None or int(went_on[1]) < checkpoint):
                wrong.append(f"lost: went on from {went_on and went_on[1]}, not {checkpoint}")
            if code_after == 0:
                break
        else:
            wrong += (
                [f"not ended well after {sessions} sessions: {texts[-1][-300:]}"] if code else []
            )
        wrong += [f"a traceback: {text[-1500:]}" for text in texts if "Traceback" in text]
        wrong += [f"took {seconds:.0f} s"] if seconds > BOUND_S else []
        if not wrong:
            wrong = tiny_runs.differences(tiny_runs.left(workdir, STEPS), self.expected)
        message = (
            next((line for line in reversed(output.splitlines()) if line.startswith("error")), "")
            if code
            else ""
        )
        return {
            "seed": seed, "phase": phase, "kind": kind, "effect": effect, "first": first, "times": times, "fired": fired,
            "code": code, "sessions": sessions, "seconds": round(seconds, 1), "wrong": wrong,
            "said": message.replace(str(self.folder), "")[:200],
        }  # fmt: skip


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the section of the page: the totals, and a table with a row for each operation."""
    struck = [row for row in rows if row["fired"]]
    num_operations = sum(row["fired"] for row in struck)
    num_right = sum(not row["wrong"] for row in struck)
    num_survived = sum(not row["code"] for row in struck)
    slowest = max((row["seconds"] for row in struck), default=0.0)
    text = (
        f"In {len(struck)} runs, {num_operations} chosen file operations failed for a moment: with EIO, "
        "ESTALE, EACCES (reading) or ENOSPC (writing), half a second late, or after half of the bytes. "
        f"**{num_right} of {len(struck)} ended bitwise as the undisturbed run did**: {num_survived} went "
        "on with at most a line; the others ended with a message, and on a well disk the same command "
        "went on from their newest checkpoint. No checkpoint was lost, and no session took longer than "
        f"{slowest:.0f} s. `{COMMAND}`"
    )

    cells = [["operation", "runs", "operations failed", "survived", "ended, then went on"]]
    for kind in (*READING, *WRITING):
        kind_rows = [row for row in struck if row["kind"] == kind]
        num_failed = sum(row["fired"] for row in kind_rows)
        num_ended = sum(bool(row["code"]) for row in kind_rows)
        counts = (len(kind_rows), num_failed, len(kind_rows) - num_ended, num_ended)
        cells.append([kind, *map(str, counts)])
    return "\n".join(["## Unwell disks", "", text, "", table(cells), ""])


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    count: int = 320
    """Runs whose fault came."""
    workers: int = 1
    """Processes."""
    again: Switch = False
    """Forget what the file holds."""
    page: Path = PAGE
    """Write here, and the rows beside it."""
    worker: Path | None = None
    """Folder of a worker of this command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Disturb what is missing, then write the page; 0 where every run ended as the undisturbed one."""
    args = harness.parse(Options, argv)
    if args.worker is not None:
        runs: list[Runs] = []

        folder = args.worker

        def answer(seed: int) -> dict[str, Any]:
            runs[:] = runs or [Runs(folder)]
            return runs[0].disturbed(seed)

        workers.serve(answer)
        return 0
    path = args.page.with_name("faults.json")
    rows: list[dict[str, Any]] = (
        json.loads(path.read_text()) if path.exists() and not args.again else []
    )
    with tempfile.TemporaryDirectory() as temporary:
        library = shim.compiled(Path(temporary))
        if library is None:
            print("skipped: there is no C compiler (cc) for faults.c", file=sys.stderr)
            return 0
        pool = []
        for folder in (Path(temporary) / str(k) for k in range(args.workers)):
            folder.mkdir()
            environ = {
                "JAX_PLATFORMS": "cpu",
                "MPLBACKEND": "agg",
                "MUPAX_DATA": f"{temporary}/data",
            }
            environ |= {
                "JAX_COMPILATION_CACHE_DIR": f"{temporary}/jax",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            environ |= shim.Control(folder / "control", library).environ
            pool.append(workers.Worker("scripts.campaigns.faults", folder / "runs", environ))
        while (missing := args.count - sum(bool(row["fired"]) for row in rows)) > 0:
            done = {row["seed"] for row in rows}
            seeds = list(
                itertools.islice((seed for seed in itertools.count() if seed not in done), missing)
            )
            for seed, row in workers.answers(pool, seeds, 5 * BOUND_S):
                row = row or {
                    "seed": seed,
                    "fired": 1,
                    "kind": "open",
                    "effect": "EIO",
                    "code": 1,
                    "seconds": 0,
                    "wrong": ["hung"],
                }
                rows = sorted([*rows, row], key=lambda row: row["seed"])
                if row["wrong"]:
                    print(json.dumps(row), file=sys.stderr, flush=True)
                path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
                write_section(args.page, "faults", page(rows))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
