"""Tiny runs that campaigns disturb, in forks of a process that has everything imported."""

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
    "--model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 "
    "--data.eval-batch-size 32 --data.eval-examples 256 --optimizer.warmup-steps 2 "
    "--log.eval-every-steps 30 --checkpoint.every-steps 20 --log.no-samples "
    "--distributed.heartbeat-seconds 4 --distributed.timeout-seconds 20 --resume"
)
"""Flags of all tiny runs."""
MODELS = {
    "decoder": "lm-tiny --model.seq-len 16 --accumulation-steps 2 --ema.decay 0.9",
    "vit": "vit-digits --optimizer.peak-lr 1e-3",
    "encoder-decoder": "ed-tiny --model.seq-len 16 --model.encoder-depth 1",
}
"""Recipe and flags of each model."""


@dataclass(frozen=True)
class Case:
    """A tiny run: its model, a key of `MODELS`, and its number of processes."""

    model: str
    processes: int

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        """Return the words of the command line after `train`.

        Args:
            folder: Folder of all runs, with their text.
            workdir: Name of the workdir in `folder`, or a place of its own, gs://BUCKET/NAME.
        """
        place = workdir if "://" in workdir else folder / workdir
        source = f"--data.name text:{folder / 'text.txt'}" if self.model != "vit" else ""
        words = f"{MODELS[self.model]} {source} {SHARED} --steps {steps} --workdir {place}"
        return words.split()


CASES = (*(Case(model, 1) for model in MODELS), *(Case(model, 2) for model in MODELS))


class Session:
    """Processes that train one tiny run, forked when this object is made.

    Args:
        folder: Folder of all runs, in which the files of output are written.
        workdir: Workdir, as in `Case.argv`.
        sick: Index of a process to a function, which the process calls before it starts mupax.
            Such functions inject faults.
        log: Name of the files of output, without their ending. Default: the name of the workdir.
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
        argv = case.argv(folder, workdir, steps)
        joined = [""]
        if case.processes > 1:
            by_hand = (
                f"--distributed.coordinator localhost:{free_port()} "
                f"--distributed.processes {case.processes}"
            )
            joined = [f"{by_hand} --distributed.process {index}" for index in range(case.processes)]

        self.pids = []
        for index, flags in enumerate(joined):
            words = [*argv, *flags.split()]
            prepare = (sick or {}).get(index, int)
            log_file = self.log.with_suffix(f".{index}")
            self.pids.append(forks.start(words, log_file, prepare, "train"))
        self.began = time.monotonic()

    def output(self, index: int = 0) -> str:
        """Return the text that a process has printed so far."""
        log = self.log.with_suffix(f".{index}")
        return log.read_text() if log.exists() else ""

    def poll(self) -> list[int | None]:
        """Return the exit code of each process: negative for a signal, `None` while it runs."""
        for pid in self.pids:
            if pid not in self._ended:
                exit_pid, status = os.waitpid(pid, os.WNOHANG)
                if exit_pid:
                    self._ended[pid] = os.waitstatus_to_exitcode(status)
        return [self._ended.get(pid) for pid in self.pids]

    def send(self, number: int, indices: Sequence[int]) -> None:
        """Send a signal to the processes with these indices that still run."""
        for index in indices:
            if self.pids[index] not in self._ended:
                os.kill(self.pids[index], number)

    def wait(self, seconds: float) -> list[int]:
        """Wait until all processes have ended, and return their exit codes.

        Processes that still run after `seconds` get SIGKILL.
        """
        deadline = time.monotonic() + seconds
        codes = self.poll()
        while None in codes:
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL, range(len(self.pids)))
            time.sleep(0.01)
            codes = self.poll()
        return [code for code in codes if code is not None]


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.socket() as free:
        # Nobody holds the port from here until the caller's server binds it.
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def latest_step(workdir: Path | str) -> int | None:
    """Return the step of the newest checkpoint; `None` if there is no checkpoint."""
    from mupax.disk import path_of
    from mupax.train.checkpoints.folder import steps

    return max(steps(path_of(workdir) / "checkpoints"), default=None)


def run_result(workdir: Path | str, steps: int) -> dict[str, Any]:
    """Return what must be bitwise equal in two runs of `steps` steps.

    Returns:
        `rows`: The rows of metrics without times. `arrays`: The digests of every shard of the last
        checkpoint, which is verified.
    """
    from mupax.disk import path_of
    from mupax.train.checkpoints.folder import verified
    from mupax.train.run.report import metrics

    workdir = path_of(workdir)
    rows = []
    for row in metrics.read(workdir / metrics.FILE_NAME):
        # A row about speed comes every ten seconds, whatever the step.
        if "perf_data_wait" not in row:
            row.pop("seconds", None)
            rows.append(row)
    return {"rows": rows, "arrays": verified(workdir / "checkpoints" / str(steps)).arrays}


def checkpoint_digests(workdir: Path | str, step: int) -> dict[str, Any]:
    """Return the digests of every shard of a checkpoint, which is verified."""
    from mupax.disk import path_of
    from mupax.train.checkpoints.folder import verified

    return verified(path_of(workdir) / "checkpoints" / str(step)).arrays


def differences(result: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the differences of two results of `run_result` in words.

    Returns:
        A line about the rows if they differ, then the sorted names of arrays that differ. The list
        is empty if the results are bitwise equal.
    """
    lines = []
    if result["rows"] != expected["rows"]:
        counts = f"{len(result['rows'])}, {len(expected['rows'])} wanted"
        lines.append(f"rows: {counts}, or others")

    arrays = result["arrays"]
    expected_arrays = expected["arrays"]
    names = arrays.keys() | expected_arrays.keys()
    for name in sorted(names):
        if arrays.get(name) != expected_arrays.get(name):
            lines.append(name)
    return lines


def undisturbed(
    case: Case, folder: Path, steps: int, name: str = "", seconds: float = 600
) -> dict[str, Any]:
    """Train a run that nobody disturbs, unless it is complete, and return its `run_result`.

    Args:
        name: Name of the workdir in `folder`. Default: model and number of processes.
        seconds: Time limit of the run. Default: 600.

    Raises:
        RuntimeError: The run fails by itself.
    """
    workdir = name or f"{case.model}-{case.processes}"
    if not (folder / workdir / "checkpoints" / str(steps)).exists():
        session = Session(case, folder, workdir, steps)
        if any(session.wait(seconds)):
            raise RuntimeError(f"the undisturbed run itself fails:\n{session.output()[-2000:]}")
    return run_result(folder / workdir, steps)


def write_text(folder: Path) -> None:
    """Write `text.txt`, on which the tiny runs train: short lines of few words."""
    choose = random.Random(0)
    words = ("def", "return", "import", "class", "self", "value", "lambda", "yield")
    lines = []
    for _ in range(600):
        lines.append(" ".join(choose.choice(words) for _ in range(9)))
    (folder / "text.txt").write_text("\n".join(lines))


@contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    """Context manager of the folder of all runs: `folder`, which stays, or a temporary folder."""
    # Every forked run would remove a tempfile.TemporaryDirectory when it exits.
    path = Path(tempfile.mkdtemp()) if folder is None else folder
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        if folder is None:
            shutil.rmtree(path, ignore_errors=True)


def prepare_forks(folder: Path) -> None:
    """Import everything that a run imports, so that forks of this process start quickly.

    Also set the variables of the runs, and write their text and caches into `folder`.

    Raises:
        SystemExit: An import has started a thread.
    """
    defaults = {
        "MUPAX_DATA": str(folder / "data"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "XLA_FLAGS": "",
    }
    # Places that the caller has set stay.
    os.environ |= defaults | os.environ
    # OpenBLAS starts its threads when it is imported, and a fork would lose them.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "MPLBACKEND": "agg",
    }
    # These imports read the variables above.
    import mupax.train.data.sources.digits
    import mupax.train.run.loop  # noqa: F401

    if threading.active_count() > 1:
        raise SystemExit("an import has started a thread; a fork would lose it")
    write_text(folder)
