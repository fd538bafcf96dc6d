"""Tiny runs that campaigns disturb, each process forked from one that has everything imported, and what they leave."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.campaigns import forks

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


@dataclass(frozen=True)
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
        log: name of the files that the processes print into; that of the workdir unless given.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        workdir: str,
        steps: int,
        sick: Mapping[int, Callable[[], object]] | None = None,
        log: str = "",
    ) -> None:
        self.log = folder / f"{log or workdir.rpartition('/')[2]}.out"
        self._ended: dict[int, int] = {}
        argv, joined = case.argv(folder, workdir, steps), [""]
        if case.processes > 1:
            by_hand = f"--distributed.coordinator localhost:{free_port()} --distributed.processes {case.processes}"
            joined = [f"{by_hand} --distributed.process {index}" for index in range(case.processes)]
        self.pids = [
            forks.start(
                [*argv, *words.split()],
                self.log.with_suffix(f".{index}"),
                (sick or {}).get(index, int),
                "train",
            )
            for index, words in enumerate(joined)
        ]
        self.began = time.monotonic()

    def output(self, index: int = 0) -> str:
        """What process 0, or that of another number, has printed."""
        log = self.log.with_suffix(f".{index}")
        return log.read_text() if log.exists() else ""

    def poll(self) -> list[int | None]:
        """Exit codes, negative where a signal ended the process, None while it runs."""
        for pid in self.pids:
            if pid not in self._ended:
                exit_pid, status = os.waitpid(pid, os.WNOHANG)
                if exit_pid:
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


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def latest(workdir: Path | str) -> int | None:
    """Step of the newest checkpoint."""
    from mupax.disk import path_of
    from mupax.train.checkpoints.folder import steps

    return max(steps(path_of(workdir) / "checkpoints"), default=None)


def left(workdir: Path | str, steps: int) -> dict[str, Any]:
    """What a finished run has left, without times: rows, and the digest of every shard of its verified last checkpoint."""
    from mupax.disk import path_of
    from mupax.train.checkpoints.folder import verified
    from mupax.train.run.report import metrics

    workdir = path_of(workdir)
    rows = [row for row in metrics.read(workdir / metrics.FILE_NAME) if "perf_data_wait" not in row]
    for row in rows:
        row.pop("seconds", None)
    return {"rows": rows, "arrays": verified(workdir / "checkpoints" / str(steps)).arrays}


def left_arrays(workdir: Path | str, step: int) -> dict[str, Any]:
    """Return the digests of every shard of a workdir's verified checkpoint."""
    from mupax.disk import path_of
    from mupax.train.checkpoints.folder import verified

    return verified(path_of(workdir) / "checkpoints" / str(step)).arrays


def differences(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """In words; none where two runs are bitwise equal."""
    lines = (
        []
        if run["rows"] == reference["rows"]
        else [f"rows: {len(run['rows'])}, {len(reference['rows'])} wanted, or others"]
    )
    names = run["arrays"].keys() | reference["arrays"].keys()
    return lines + sorted(
        name for name in names if run["arrays"].get(name) != reference["arrays"].get(name)
    )


def undisturbed(
    case: Case, folder: Path, steps: int, name: str = "", seconds: float = 600
) -> dict[str, Any]:
    """Return what a run leaves that nobody touches.

    Args:
        name: of its workdir in the folder, where a run that is complete is not made again.
        seconds: time that it may take.

    Raises:
        RuntimeError: the run fails.
    """
    workdir = name or f"{case.model}-{case.processes}"
    if not (folder / workdir / "checkpoints" / str(steps)).exists():
        session = Session(case, folder, workdir, steps)
        if any(session.wait(seconds)):
            raise RuntimeError(f"the undisturbed run itself fails:\n{session.output()[-2000:]}")
    return left(folder / workdir, steps)


def write_text(folder: Path) -> None:
    """The decoder's text: short lines of few words."""
    choose, words = (
        random.Random(0),
        ("def", "return", "import", "class", "self", "value", "lambda", "yield"),
    )
    text = "\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(600))
    (folder / "text.txt").write_text(text)


@contextmanager
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


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Everything imported that a run imports, and nothing started: what the runs are forked from."""
    enter_prepared(folder)
    yield


def enter_prepared(folder: Path) -> None:
    """Import everything that a run imports, start nothing, and write the decoder's text into a folder."""
    defaults = {
        "MUPAX_DATA": str(folder / "data"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "XLA_FLAGS": "",
    }
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
