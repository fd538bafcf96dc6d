"""Kills runs at random moments until they are done, and compares each with one that was left alone: docs/kills.{json,md}.

    python -m scripts.campaigns.kills [--kills 200] [--most 8] [--steps N] [--processes 1] [--again] [--folder DIR] [--page FILE]

Tiny runs of a decoder (accumulation, moving average), a ViT and an encoder-decoder, of one process and of two, get SIGKILL, SIGTERM, SIGINT or
two signals in short order, in whatever phase they are, and are resumed until the last step. Every run must then have the
parameters, optimizer state, counters and metrics rows of the undisturbed run, bitwise. What the file holds counts; the
rest is run. Processes are forked from one that has everything imported, so that a start takes a second.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import json
import os
import platform
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts import ROOT

PAGE = ROOT / "docs" / "kills.md"
COMMAND = "python -m scripts.campaigns.kills"
STEPS = {1: 300, 2: 100}
"""By number of processes, whose steps take so much longer."""
SHARED = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 --data.eval-batch-size 32 "
    "--data.eval-examples 256 --optimizer.warmup-steps 2 --log.eval-every-steps 30 --checkpoint.every-steps 20 --log.no-samples "
    "--distributed.heartbeat-seconds 4 --distributed.timeout-seconds 20 --resume"
)
MODELS = {
    "decoder": "lm-tiny --model.seq-len 16 --accumulation-steps 2 --ema.decay 0.9",
    "vit": "vit-digits --optimizer.peak-lr 1e-3",
    "encoder-decoder": "ed-tiny --model.seq-len 16 --model.encoder-depth 1",
}
SIGNALS = {"SIGKILL": 9, "SIGTERM": 7, "SIGINT": 2, "twice": 2}
"""How often each is sent, of 20; twice is SIGTERM and another within a second."""
_PATIENCE_S = 90.0
"""How long processes may take to end after a signal."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run."""

    model: str
    processes: int

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        """Words of the command line.

        Args:
            folder: of all runs.
            workdir: of this one, a name in it or a place of its own, gs://BUCKET/NAME.
            steps: of the run.
        """
        place = workdir if "://" in workdir else folder / workdir
        source = f"--data.name text:{folder / 'text.txt'}" if self.model != "vit" else ""
        words = f"{MODELS[self.model]} {source} {SHARED} --steps {steps} --workdir {place}"
        return words.split()


CASES = tuple(Case(model, processes) for processes in (1, 2) for model in MODELS)


class Session:
    """The processes of one start of a run, each forked from this one.

    Args:
        case: what is run.
        folder: holds the runs.
        workdir: name of this one.
        steps: of the run.
        sick: called in the process of that number before it starts.
    """

    def __init__(
        self, case: Case, folder: Path, workdir: str, steps: int, sick: Mapping[int, Callable[[], object]] | None = None
    ) -> None:
        self.log = folder / f"{workdir.rpartition('/')[2]}.out"
        self._ended: dict[int, int] = {}
        argv, joined = case.argv(folder, workdir, steps), [""]
        if case.processes > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            by_hand = f"--distributed.coordinator localhost:{port} --distributed.processes {case.processes}"
            joined = [f"{by_hand} --distributed.process {index}" for index in range(case.processes)]
        self.pids = [
            self._fork([*argv, *words.split()], self.log.with_suffix(f".{index}"), (sick or {}).get(index, int))
            for index, words in enumerate(joined)
        ]
        self.began = time.monotonic()

    def _fork(self, argv: list[str], log: Path, sick: Callable[[], object]) -> int:
        if pid := os.fork():
            return pid
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
        sys.argv[1:] = argv
        code = 1
        try:
            sick()
            runpy.run_module("train", run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        # As the interpreter ends, and not through the `with` blocks of the parent, whose folders and servers they would end.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)

    def said(self, index: int = 0) -> str:
        """What process 0, or that of another number, has printed."""
        log = self.log.with_suffix(f".{index}")
        return log.read_text() if log.exists() else ""

    def poll(self) -> list[int | None]:
        """Exit codes, negative where a signal ended the process, None while it runs."""
        for pid in self.pids:
            if pid not in self._ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._ended[pid] = os.waitstatus_to_exitcode(status)
        return [self._ended.get(pid) for pid in self.pids]

    def send(self, number: int, whom: Sequence[int]) -> None:
        """A signal to some of the processes, by their number, that have not ended."""
        for index in whom:
            if self.pids[index] not in self._ended:
                os.kill(self.pids[index], number)

    def wait(self, seconds: float) -> list[int]:
        """Exit codes when all have ended; SIGKILL where that takes longer."""
        until = time.monotonic() + seconds
        while None in (codes := self.poll()):
            if time.monotonic() > until:
                self.send(signal.SIGKILL, range(len(self.pids)))
            time.sleep(0.01)
        return [code for code in codes if code is not None]


def kill(session: Session, workdir: Path, choose: random.Random) -> dict[str, Any] | None:
    """Send signals at a random moment; None where the run was done before."""
    trained = choose.random() < 0.8  # else while it starts, restores or compiles
    while trained and None in session.poll() and "compiled in" not in session.said():
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
    said = session.said()
    if "compiled in" not in said:
        return "starting"
    if "steps done" in said:
        return "ending"
    if list((workdir / "checkpoints").glob("*.saving*")):
        return "training while a checkpoint is written"
    return "training"


def latest(workdir: Path | str) -> int | None:
    """Step of the newest checkpoint."""
    from mupax.paths import path_of
    from mupax.train.checkpoints.folder import steps

    return max(steps(path_of(workdir) / "checkpoints"), default=None)


def left(workdir: Path | str, steps: int) -> dict[str, Any]:
    """What a finished run has left, without times: rows, and the digest of every shard of its verified last checkpoint."""
    from mupax.paths import path_of
    from mupax.train.checkpoints.folder import verified
    from mupax.train.run.report import metrics

    workdir = path_of(workdir)
    rows = [row for row in metrics.read(workdir / metrics.FILE_NAME) if "perf_data_wait" not in row]
    for row in rows:
        row.pop("seconds", None)
    return {"rows": rows, "arrays": verified(workdir / "checkpoints" / str(steps)).arrays}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """In words; none where two runs are bitwise equal."""
    said = (
        []
        if found["rows"] == wanted["rows"]
        else [f"rows: {len(found['rows'])}, {len(wanted['rows'])} wanted, or others"]
    )
    names = found["arrays"].keys() | wanted["arrays"].keys()
    return said + sorted(name for name in names if found["arrays"].get(name) != wanted["arrays"].get(name))


def undisturbed(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """What a run leaves that nobody touches."""
    name = f"{case.model}-{case.processes}"
    if not (folder / name / "checkpoints" / str(steps)).exists():
        session = Session(case, folder, name, steps)
        if any(session.wait(600)):
            raise SystemExit(f"the undisturbed run itself fails:\n{session.said()[-2000:]}")
    return left(folder / name, steps)


def disturbed(case: Case, folder: Path, seed: int, steps: int, most: int) -> dict[str, Any]:
    """One run, killed at most so many times and then let to its end: a row of the file."""
    wanted, choose = undisturbed(case, folder, steps), random.Random(f"{case} {seed}")
    workdir, kills, began = f"{case.model}-{case.processes}-{seed}", [], time.monotonic()
    wrong: list[str] = []
    while True:
        session = Session(case, folder, workdir, steps)
        # After the last one it goes on alone.
        if len(kills) < most and (one := kill(session, folder / workdir, choose)):
            kills.append(one)
            continue
        if any(codes := session.wait(600)):
            wrong.append(f"ended with {codes}: {session.said()[-500:]}")
        break
    if not wrong:
        wrong = differences(left(folder / workdir, steps), wanted)
    return {
        "model": case.model, "processes": case.processes, "seed": seed, "steps": steps, "kills": kills,
        "differences": wrong, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def write_text(folder: Path) -> None:
    """The decoder's text: short lines of few words."""
    choose, words = random.Random(0), ("def", "return", "import", "class", "self", "value", "lambda", "yield")
    text = "\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(600))
    (folder / "text.txt").write_text(text)


@contextlib.contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    """A folder of all runs: that one, which stays, or a temporary one.

    `tempfile.TemporaryDirectory` would have every forked run remove it when it exits.
    """
    path = Path(tempfile.mkdtemp()) if folder is None else folder
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        if folder is None:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Everything imported that a run imports, and nothing started: what the runs are forked from."""
    defaults = {"MUPAX_DATA": str(folder / "data"), "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"), "XLA_FLAGS": ""}
    os.environ |= defaults | os.environ
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "MPLBACKEND": "agg",
    }
    import mupax.train.data.sources.digits
    import mupax.train.run.loop  # noqa: F401

    if threading.active_count() > 1:
        raise SystemExit("an import has started a thread; a fork would lose it")
    write_text(folder)
    yield


def as_json(runs: Sequence[dict[str, Any]], command: str = COMMAND) -> str:
    """One run a line."""
    from importlib.metadata import version

    facts = {"command": command, "python": platform.python_version(), "jax": version("jax"), "cores": os.cpu_count()}
    rows = ",\n".join(json.dumps(run) for run in runs)
    return f'{json.dumps(facts)[:-1]}, "runs": [\n{rows}\n]}}\n'


def page(runs: Sequence[dict[str, Any]]) -> str:
    """The table of what was done and what became of it."""
    kills = [one for run in runs for one in run["kills"]]
    differ = [run for run in runs if run["differences"]]
    lines = [
        "# Killed runs that went on",
        "",
        f"{len(kills)} times a signal was sent at a random moment to one of {len(runs)} runs, which were resumed until they were",
        f"done; **{len(runs) - len(differ)} of {len(runs)} runs ended bitwise as the undisturbed one did**: every row of metrics without",
        "times, every digest of parameters, optimizer state, moving average and counters in the verified last checkpoint. Made by",
        f"`{COMMAND}`, which says what the runs are; each signal with its moment, its phase and the exit codes is in `kills.json`.",
        "",
        "| runs of | processes | runs | kills | SIGKILL | SIGTERM | SIGINT | two signals | identical |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        mine = [run for run in runs if (run["model"], run["processes"]) == (case.model, case.processes)]
        counts = Counter(one["signal"] for run in mine for one in run["kills"])
        same = sum(not run["differences"] for run in mine)
        cells = [case.model, case.processes, len(mine), sum(counts.values()), *(counts[name] for name in SIGNALS)]
        lines.append(f"| {' | '.join(map(str, cells))} | {same} of {len(mine)} |")
    lines += ["", "| phase | kills | exit codes | slowest end after SIGTERM or SIGINT |", "|---|---|---|---|"]
    for name in sorted({one["phase"] for one in kills}):
        mine = [one for one in kills if one["phase"] == name]
        codes = Counter(code for one in mine for code in one["codes"])
        ended = max((one["ended_s"] for one in mine if one["signal"] != "SIGKILL"), default=0.0)
        shown = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()))
        lines.append(f"| {name} | {len(mine)} | {shown} | {ended:.1f} s |")
    lines += ["", *(f"- {run['model']} seed {run['seed']}: {'; '.join(run['differences'])[:300]}" for run in differ)]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the page; exit code 1 where a run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="at least so many in the file (default 200)")
    parser.add_argument("--most", type=int, default=8, help="kills of one run (default 8)")
    parser.add_argument(
        "--steps", type=int, help="of a run; otherwise " + ", ".join(f"{n} with {p}" for p, n in STEPS.items())
    )
    parser.add_argument("--processes", type=int, choices=(1, 2), help="only runs of so many")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="write here, and the rows beside it, instead of docs/kills.md"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="only runs of these")
    parser.add_argument("--again", action="store_true", help="forget what the file holds")
    parser.add_argument("--folder", type=Path, help="keep the runs here; a temporary folder unless given")
    args = parser.parse_args(argv)
    path = args.page.with_suffix(".json")
    cases = [case for case in CASES if args.processes in (None, case.processes) and case.model in args.models]
    runs = json.loads(path.read_text())["runs"] if path.exists() and not args.again else []
    with scratch(args.folder) as folder, prepared(folder):
        seed = max((run["seed"] + 1 for run in runs), default=0)
        while sum(len(run["kills"]) for run in runs) < args.kills:
            for case in cases:
                runs.append(run := disturbed(case, folder, seed, args.steps or STEPS[case.processes], args.most))
                print(
                    f"{case} seed {seed}: {len(run['kills'])} kills, {run['differences'] or 'identical'}",
                    flush=True,
                )
                path.write_text(as_json(runs))
                args.page.write_text(page(runs))
            seed += 1
    args.page.write_text(page(runs))
    return int(any(run["differences"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
