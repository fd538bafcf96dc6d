"""The processes of one run, as one of them sees them, and the signals that stop them.

JAX finds the coordinator where the environment names it; what is decided here is whether there is anything to join: TPU pods,
SLURM, MPI, Kubernetes, or by hand. A plain process stays alone.

A run in training stops at the next boundary and saves. Before and after that it leaves at once.

SIGINT and SIGTERM do so, SIGHUP (a terminal that was closed) and SIGUSR1 (SLURM's `--signal=USR1@120`). A second SIGINT or
SIGTERM ends the process at once, whatever it waits for.

Where the terminal is closed, a run goes on without its output (`lasting`).

A thread of its own hears the signals, through the wake-up descriptor that Python's handlers write to: the main thread may be
inside the compiler or a collective operation, where no handler runs, and where one that raised would end in a segmentation fault.

Where there are several processes, one that hears a signal tells the others through the coordination service, and all agree
on how many programs (steps, batches of an evaluation) each of them runs before it stops.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TextIO

from mupax import terminal
from mupax.errors import MupaxError
from mupax.terminal import leave
from mupax.train.config.run import DistributedConfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_INSISTING = (signal.SIGINT, signal.SIGTERM)
"""Of which a second one ends the process. A closed terminal sends SIGHUP twice, and USR1 is a notice before SIGTERM."""
_ONE_S = 0.3
"""Signals so close together are one: `timeout` sends its own twice, srun and the step's daemon one each."""
_POLL_S = 0.25
"""How often a process of several looks whether another was told to stop."""
_TOGETHER_S = 2.0
"""How long process 0 waits for the others to leave before it."""
_STOP = "mupax/stop"

_BY_HAND = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
"""Field of the config to the variable that stands for it."""
_OPEN_MPI_5 = re.compile(r"prterun-(.+)-(\d+)@\d+$")
"""What Open MPI 5 calls a job: the host of mpirun, and its process."""
_FIRST_PORT = 61440
"""Ports from here on are those that JAX takes for jobs of SLURM and Open MPI 4."""
LEAD_S = 5.0
"""Seconds that process 0 has to say alone what is wrong with a run's data."""


class StopRequest:
    """Listens while entered, in the main thread; elsewhere it never hears a signal itself."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that the run stops by, on every process; None while there is none."""
        self._processes = Processes()
        self._saves = self._going = False
        self._interactive = hasattr(sys, "ps1")  # a notebook outlives Ctrl-C, as it does elsewhere
        self._done, self._insisted = 0, math.inf
        self._bound: int | None = None
        """Programs after which this process has promised to wait until all agree."""
        self._agreed: int | None = None
        self._changed = threading.Condition()
        self._handlers_before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._ear, self._mouth = socket.socketpair()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    @property
    def exit_code(self) -> int:
        """128 and the number of the signal, 143 for SIGTERM say; 0 when nothing was received."""
        return 0 if self.received is None else 128 + self.received

    def join(self, processes: Processes) -> None:
        """From now on the run has these processes, which stop together."""
        self._processes = processes
        if processes.count > 1:
            threading.Thread(target=self._talk, name="stopping", daemon=True).start()

    def defer(self) -> None:
        """From now on a first signal is only noted: there is something to save."""
        self._saves = True

    def release(self) -> None:
        """Everything is saved, on all processes: a signal, also one that was just noted, ends the process again."""
        with self._changed:
            self._saves, self._bound = False, None
        if self.received is not None and self._processes.count == 1:
            raise SystemExit(self.exit_code)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Context manager of work that saves: a first signal is only noted.

        Before and after it a signal ends the process.
        """
        self.defer()
        try:
            yield
        finally:
            self._saves = False

    def now(self) -> bool:
        """Whether to stop here, with as many programs done as were claimed."""
        if self._processes.count == 1:
            return self.received is not None
        with self._changed:
            return self._agreed is not None and self._done >= self._agreed

    def claim(self) -> bool:
        """Whether this process may run one more program; `done` follows when it was dispatched.

        All processes claim the same programs in the same order. Where a stop is being agreed on, this waits for the others.
        """
        if self._processes.count == 1:
            return self.received is None
        with self._changed:
            while self._bound is not None and self._done >= self._bound and self._agreed is None:
                self._changed.wait()
            self._going = self._agreed is None or self._done < self._agreed
            return self._going

    def done(self) -> None:
        """The program that was claimed is on its way."""
        with self._changed:
            self._done, self._going = self._done + 1, False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._mouth.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(
                self._mouth.fileno(), warn_on_full_buffer=False
            )
            # `nohup` ignores SIGHUP, and a shell ignores SIGINT in the background jobs of a script.
            heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._handlers_before = {number: signal.signal(number, self._note) for number in heard}
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        if self._handlers_before:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
        self._mouth.send(b"\0")
        self._thread.join()
        self._ear.close()
        self._mouth.close()

    # In the main thread, as soon as it is back in Python

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interactive and (self.received or not self._saves):
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(
            number
        )  # the thread may have noted it before

    # In the thread that listens

    def _listen(self) -> None:
        while not self._ended.is_set():
            for number in self._ear.recv(64):
                if number in _SIGNALS:
                    self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._interactive:
            return
        self.received = self.received or number
        now = time.monotonic()
        if number in _INSISTING:
            if now - self._insisted > _ONE_S:
                self._leave_at_once(number)
            self._insisted = min(self._insisted, now)
        if not self._saves:
            text = f"stopped by {number.name} with nothing to save: checkpoints are as they were"
            if self._processes.closed:  # alone, or not joined yet, or not any more
                leave(self.exit_code, text)
            terminal.note(
                text
            )  # the other thread leaves with all processes, unless the network holds it
            late = threading.Timer(2 * _TOGETHER_S, leave, (self.exit_code,))
            late.daemon = True
            late.start()

    def _leave_at_once(self, number: signal.Signals) -> None:
        text = f"stopped at once by a second {number.name}"
        if not self._processes.closed:
            tell = threading.Thread(target=self._processes.post_failure, args=(text,), daemon=True)
            tell.start()
            tell.join(_TOGETHER_S)
            if self._processes.leader:
                time.sleep(
                    _TOGETHER_S
                )  # until the others have read it: process 0 takes the store with it
        leave(
            self.exit_code,
            f"{text}: what was being saved is lost, earlier checkpoints are as they were",
        )

    # In the thread that talks to the other processes

    def _talk(self) -> None:
        while not (self._ended.wait(_POLL_S) or self._processes.closed):
            with contextlib.suppress(
                Exception
            ):  # of the network; `Processes` sees to a lost coordinator
                self._confer()

    def _confer(self) -> None:
        """Ask, promise, and learn what was agreed on."""
        processes, posts = self._processes, self._processes.posts(_STOP)
        if self.received is not None and "by" not in posts:
            processes.post(f"{_STOP}/by", str(int(self.received)))
            posts = processes.posts(_STOP)
        if "by" not in posts:
            return
        self.received = signal.Signals(int(posts["by"]))
        with self._changed:
            if not self._saves:
                processes.post(f"{_STOP}/leave", str(processes.index))
            elif self._bound is None:
                self._bound = self._done + self._going
                processes.post(f"{_STOP}/at/{processes.index}", str(self._bound))
        posts = processes.posts(_STOP)
        bounds = [int(value) for key, value in posts.items() if key.startswith("at/")]
        if "leave" in posts:
            self._leave_together()
        elif len(bounds) == processes.count:
            with self._changed:
                self._agreed = max(bounds)
                self._changed.notify_all()

    def _leave_together(self) -> None:
        """One process has nothing to save, so that no program of all of them can follow. Process 0 goes last."""
        processes, until = self._processes, time.monotonic() + _TOGETHER_S
        processes.post(f"{_STOP}/left/{processes.index}", "")
        while processes.leader and time.monotonic() < until:
            if sum(key.startswith("left/") for key in processes.posts(_STOP)) == processes.count:
                break
            time.sleep(_POLL_S / 4)
        leave(self.exit_code)


class DistributedError(MupaxError):
    """Processes that cannot find each other. The text says what to write instead."""


class Processes:
    """A process alone, which waits for nobody and talks to nobody. Several are a `distributed.Cluster`."""

    index = 0
    """Number of this process."""
    count = 1
    """How many there are."""

    @property
    def closed(self) -> bool:
        """Whether there is nobody to talk to any more."""
        return True

    @property
    def name(self) -> str:
        """Its number and host, for messages; nothing where there is only one."""
        return f"process {self.index} ({socket.gethostname()}): " if self.count > 1 else ""

    @property
    def leader(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.index == 0

    def broadcast(self, name: str, value: Callable[[], Any], seconds: float | None = None) -> Any:
        """What `value` returns on process 0, on every process; the others wait for it.

        Args:
            name: used once in a run.
            value: called by process 0 alone; its result must survive JSON.
            seconds: how long to wait for it; a week unless given, since a process that fails ends all.

        Raises:
            DistributedError: that was too long.
        """
        return value()

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any] | None:
        """On process 0, the values of all processes, in their order; None on the others, which do not wait.

        Args:
            name: used once in a run.
            value: of this process; it must survive JSON.
            seconds: how long to wait for each of the others; as in `broadcast`.

        Raises:
            DistributedError: that was too long.
        """
        return [value]

    def barrier(self, name: str) -> None:
        """Wait until every process is here."""

    @contextlib.contextmanager
    def leader_first(self, name: str) -> Iterator[None]:
        """Process 0 does what is inside; then the others do, or after `LEAD_S` to help it, and find what it has left for them."""
        if not self.leader:
            with contextlib.suppress(DistributedError):
                self.broadcast(name, lambda: None, LEAD_S)
        yield
        if self.leader:
            self.broadcast(name, lambda: None)

    def post(self, key: str, value: str) -> None:
        """Leave a value for all processes; the first one under a key stays.

        Args:
            key: folders and a name, joined by `/`, so that `posts` of the folder has it.
            value: what others read.
        """

    def posts(self, folder: str) -> dict[str, str]:
        """The values under a key, by what follows it."""
        return {}

    def post_failure(self, reason: str) -> None:
        """Tell the others that this process ends, and why; they then end too, with exit code 1."""

    def end_stalled(self, beyond: Callable[[], float], seconds: float | None) -> None:
        """From now on end all processes once every one of them waits for another and none goes on.

        Args:
            beyond: returns for how many seconds this process has waited for a program on all devices, beyond the longest such wait.
            seconds: most seconds beyond; None never ends them.
        """

    def end_all(self, reason: str) -> None:
        """End every process within seconds, this one too, with exit code 1 and the reason on its screen."""


def place(
    config: DistributedConfig, environ: Mapping[str, str] = os.environ, tpu: bool | None = None
) -> dict[str, Any] | None:
    """What to tell `jax.distributed.initialize`, or None where this process is alone.

    Args:
        config: of the run; what it leaves out is looked for in the environment.
        environ: variables of this process.
        tpu: whether this is a host of Cloud TPUs, which knows its pod; found out unless given.

    Raises:
        DistributedError: only a part of coordinator, number of processes and number of this one is given.
    """
    values: dict[str, Any] = {}
    for field, variable in _BY_HAND.items():
        value = environ.get(variable) if getattr(config, field) is None else getattr(config, field)
        if field != "coordinator" and value is not None:
            if not str(value).isdecimal():
                raise DistributedError(f"{variable} is {value!r}; write a whole number")
            value = int(value)
        values[field] = value
    if values["processes"] == 1:
        return None
    missing = [field for field, value in values.items() if value is None]
    if not missing:
        coordinator, processes, process = values.values()
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdecimal()):
            raise DistributedError(
                f"distributed.coordinator is {coordinator!r}; write HOST:PORT of process 0"
            )
        if not 0 <= process < processes:
            raise DistributedError(
                f"distributed.process is {process} of {processes}; write a number from 0 to {processes - 1}"
            )
        return {
            "coordinator_address": coordinator,
            "num_processes": processes,
            "process_id": process,
        }
    if tpu is None:
        from jax._src import cloud_tpu_init  # what jax.distributed.initialize itself asks

        tpu = cloud_tpu_init.running_in_cloud_tpu_vm
    if tpu:
        return {}
    if "SLURM_STEP_NODELIST" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        # All GPUs of the node where SLURM starts one task on each; JAX alone would take the first and leave the others idle.
        gpus = environ.get("SLURM_GPUS_ON_NODE", "")
        alone = environ.get("SLURM_NTASKS") == environ.get("SLURM_STEP_NUM_NODES")
        return {"local_device_ids": list(range(int(gpus))) if alone and gpus.isdecimal() else None}
    if (count := int(environ.get("OMPI_COMM_WORLD_SIZE", "1"))) > 1:
        launcher = _OPEN_MPI_5.match(environ.get("PMIX_NAMESPACE", ""))
        if "OMPI_MCA_orte_hnp_uri" in environ or launcher is None:
            return {}
        # JAX knows Open MPI 4 alone; as there, the coordinator is on the host where mpirun was called.
        address = (
            values["coordinator"]
            or f"{launcher[1]}:{_FIRST_PORT + int(launcher[2]) % (2**16 - _FIRST_PORT)}"
        )
        return {
            "coordinator_address": address,
            "num_processes": count,
            "process_id": int(environ["OMPI_COMM_WORLD_RANK"]),
            "local_device_ids": [int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])],
        }
    if len(missing) < len(values):
        flags = " ".join(f"--distributed.{field} ({_BY_HAND[field]})" for field in missing)
        raise DistributedError(
            f"to join other processes by hand, {flags} must be given too, or none of them"
        )
    return None


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Standard output and error that are no reason to end, while entered, when their terminal or pipe is closed."""
    err = _Lasting(sys.stderr)
    out = _Lasting(sys.stdout, note=lambda text: print(text, file=err))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):  # pyright: ignore[reportArgumentType]
        yield


class _Lasting:
    """A stream for text that stays when its terminal or pipe goes: what is written after that is lost, and nothing fails.

    Args:
        stream: to write to.
        note: told once that it is gone.
    """

    def __init__(self, stream: TextIO, note: Callable[[str], None] = lambda text: None) -> None:
        self._stream, self._note, self._gone = stream, note, False

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._lasting(lambda: self._stream.write(text.encode(encoding, "replace").decode(encoding)))
        return len(text)

    def flush(self) -> None:
        self._lasting(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lasting(self, write: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            write()
        except (OSError, ValueError) as error:  # ValueError: somebody has closed it
            self._gone = True
            with contextlib.suppress(
                OSError, ValueError
            ):  # what it still holds must not fail either, at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._note(
                f"standard output takes nothing any more ({error}); the run goes on without it"
            )
