"""Processes of a run as one of them sees them, how they are found, and the signals that stop them.

**Joining** (`place`): a TPU pod, SLURM, Open MPI, or an address by hand. JAX finds the coordinator
where the environment names it. A process without any of these stays alone.

**Signals** (`StopRequest`): SIGINT, SIGTERM, SIGHUP (a closed terminal) and SIGUSR1 (SLURM's
`--signal=USR1@120`). A run in training stops at the next boundary and saves. Before and after that
it ends at once. A second SIGINT or SIGTERM lets it save, too, and says so. A third one ends the
process at once, whatever it waits for.

A thread receives the signals through the wake-up descriptor that Python's handlers write to. The
main thread may be inside the compiler or a collective operation, where no handler runs, and where a
handler that raised would end in a segmentation fault.

With several processes, one that receives a signal tells the others through the coordination
service. All agree on how many programs (steps, batches of an evaluation) each runs before it stops.

**Output** (`lasting`): a run goes on without its output when its terminal is closed.
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

from mupax import MupaxError, terminal
from mupax.terminal import leave
from mupax.train.config.run import DistributedConfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_INSISTING = (signal.SIGINT, signal.SIGTERM)
"""Signals of which a third one ends the process, although it saves.

A closed terminal sends SIGHUP twice, and SIGUSR1 is a notice before SIGTERM."""
_ONE_S = 0.3
"""Seconds within which several signals count as one.

`timeout` sends its signal twice; srun and the daemon of the step send one each."""
_POLL_S = 0.25
"""Seconds between two checks of a process for a stop that another process was told."""
_TOGETHER_S = 2.0
"""Longest time in seconds that process 0 waits for the other processes to end before it ends."""
_STOP = "mupax/stop"
"""Folder of the coordination service in which processes agree on a stop."""

_BY_HAND = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
"""Environment variable that is read if a field of `DistributedConfig` is not set, by field."""
_OPEN_MPI_5 = re.compile(r"prterun-(.+)-(\d+)@\d+$")
"""Name of an Open MPI 5 job: the host of mpirun, and the id of its process."""
_FIRST_PORT = 61440
"""First of the ports that JAX takes for jobs of SLURM and Open MPI 4."""
LEAD_S = 5.0
"""Seconds that process 0 has alone to report what is wrong with a run's data."""


class Insistence:
    """Count of SIGINTs and SIGTERMs. Those within 0.3 seconds of one that counted are the same."""

    LAST = 3
    """Count at which a process ends at once. A second signal often comes unasked, from a scheduler
    or a person who sees no end yet, and must not cost what is being saved."""

    def __init__(self) -> None:
        self.count = 0
        self._counted_at = -math.inf

    def add(self, number: int) -> bool:
        """Count a signal that arrives now. Return whether it counted."""
        now = time.monotonic()
        if number not in _INSISTING or now - self._counted_at <= _ONE_S:
            return False
        self.count += 1
        self._counted_at = now
        return True


class StopRequest:
    """Context manager that listens for SIGINT, SIGTERM, SIGHUP and SIGUSR1, which stop the run.

    A signal that the process ignored before, as under `nohup`, stays ignored. Entered in another
    thread than the main thread, it receives no signals itself.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """Signal that stops the run, the same on every process, or `None` while there is none."""
        self._processes = Processes()
        self._saves = False
        """Whether there is something to save, so that a first signal is only noted."""
        self._is_running = False
        """Whether a program is claimed and not dispatched yet."""
        # `sys.ps1` exists in interactive sessions, which Ctrl-C must not end.
        self._interactive = hasattr(sys, "ps1")
        self._num_done = 0
        """Number of dispatched programs."""
        self._insistence = Insistence()
        self._bound: int | None = None
        """Number of programs after which this process has promised to wait until all agree."""
        self._agreed: int | None = None
        """Number of programs that every process runs before it stops."""
        self._changed = threading.Condition()
        self._handlers_before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        # Python writes the number of every signal into the second socket (`signal.set_wakeup_fd`),
        # and `_listen` reads it from the first.
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._ended = threading.Event()
        # A daemon, so that a process whose main thread fails does not wait for a signal.
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    @property
    def exit_code(self) -> int:
        """128 plus the number of the signal, such as 143 for SIGTERM; 0 if none was received."""
        return 0 if self.received is None else 128 + self.received

    def join(self, processes: Processes) -> None:
        """Start a thread by which this process agrees with the others on when to stop.

        A process that is alone starts none.
        """
        self._processes = processes
        if processes.count > 1:
            threading.Thread(target=self._talk, name="stopping", daemon=True).start()

    def defer(self) -> None:
        """From now on, let a first signal set `received` and not end the process.

        Call this once the run has something to save.
        """
        self._saves = True

    def release(self) -> None:
        """Let a signal end the process again, because everything is saved on all processes.

        With several processes, a signal that was noted before ends all of them soon after.

        Raises:
            SystemExit: A signal was noted, and this process is alone.
        """
        with self._changed:
            self._saves = False
            self._bound = None
        # With several processes, `_talk` ends them all together.
        if self.received is not None and self._processes.count == 1:
            raise SystemExit(self.exit_code)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Context manager of work that saves: a first signal is only noted.

        Before and after it a signal ends the process. A signal that was noted inside stays in
        `received`, and does not end the process by itself.
        """
        self.defer()
        try:
            yield
        finally:
            self._saves = False

    def now(self) -> bool:
        """Return whether to stop after the programs that were dispatched so far.

        A process that is alone stops once it has received a signal. Several processes stop once all
        have agreed on a number of programs and this one has dispatched as many.
        """
        if self._processes.count == 1:
            return self.received is not None
        with self._changed:
            return self._agreed is not None and self._num_done >= self._agreed

    def claim(self) -> bool:
        """Return whether this process may run one more program. Call `done` when it is dispatched.

        A program is a training step or a batch of an evaluation. A process that is alone may run it
        if it has received no signal. All processes claim the same programs in the same order. While
        a stop is agreed on, this waits for the others: a program that only some of them ran would
        never end.
        """
        if self._processes.count == 1:
            return self.received is None
        with self._changed:
            while self._must_wait():
                self._changed.wait()
            self._is_running = self._agreed is None or self._num_done < self._agreed
            return self._is_running

    def _must_wait(self) -> bool:
        """Return whether this process must wait before it runs another program.

        It must once a stop is being agreed on and it has run as many programs as it told the other
        processes, until all processes have agreed on a number.
        """
        has_reached_bound = self._bound is not None and self._num_done >= self._bound
        return has_reached_bound and self._agreed is None

    def done(self) -> None:
        """Record that the program is dispatched that the last `claim` allowed this process to run."""
        with self._changed:
            self._num_done += 1
            self._is_running = False

    def __enter__(self) -> StopRequest:
        # Python lets only the main thread set handlers.
        if threading.current_thread() is threading.main_thread():
            # `set_wakeup_fd` requires it: a full buffer must not hold up the main thread in its
            # handler.
            self._wakeup_writer.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(
                self._wakeup_writer.fileno(), warn_on_full_buffer=False
            )
            # Signals that are ignored stay ignored. `nohup` ignores SIGHUP, and a shell ignores
            # SIGINT in the background jobs of a script.
            heard = []
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    heard.append(number)
            self._handlers_before = {number: signal.signal(number, self._note) for number in heard}
        self._thread.start()
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        if self._handlers_before:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
        # 0 is no signal. It wakes `_listen`, which then sees that the context has ended.
        self._wakeup_writer.send(b"\0")
        # `_listen` reads a socket that is closed next, so its thread must have ended.
        self._thread.join()
        self._wakeup_reader.close()
        self._wakeup_writer.close()

    # The next method runs in the main thread, as soon as that executes Python code again.

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Store a signal in `received`, unless an earlier one is there. Python's signal handler.

        In an interactive session SIGINT raises `KeyboardInterrupt`, unless there is something to
        save and it is the first or second signal.
        """
        if number == signal.SIGINT and self._interactive:
            self._insistence.add(number)
            if not self._saves or self._insistence.count >= Insistence.LAST:
                raise KeyboardInterrupt
        # The listening thread may have stored a signal before this handler runs.
        self.received = self.received or signal.Signals(number)

    # The next three methods run in the thread that listens for signals.

    def _listen(self) -> None:
        """Read the numbers of signals from the socket, and handle each, until the context ends."""
        while not self._ended.is_set():
            for number in self._wakeup_reader.recv(64):
                if number in _SIGNALS:
                    self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        """Store a signal in `received`, and end the process if it must not wait.

        A third SIGINT or SIGTERM ends it at once (`Insistence`). After a second one a line says
        that the run is being saved. Any signal ends it if there is nothing to save: a process that
        is alone at once, several within seconds. SIGINT in an interactive session is left to
        `_note`.
        """
        if number == signal.SIGINT and self._interactive:
            return  # `_note` handles it in the main thread
        self.received = self.received or number
        if self._insistence.add(number) and self._insistence.count > 1:
            if self._insistence.count >= Insistence.LAST or not self._saves:
                self._leave_at_once(number)
            # Ctrl-C in `mupax train ... 2>&1 | tee log` ends tee. An exception would end this
            # thread, and no further signal would end the process.
            terminal.complain(
                f"{number.name} again: the run ends once it is saved; a third signal ends it at "
                "once, and what is being saved is lost"
            )
        if not self._saves:
            text = f"stopped by {number.name} with nothing to save: checkpoints are as they were"
            if self._processes.closed:  # alone, not joined yet, or closed already
                leave(self.exit_code, text)
            terminal.complain(text)
            # The thread of `_talk` leaves with all processes, unless the network holds it up.
            late = threading.Timer(2 * _TOGETHER_S, leave, (self.exit_code,))
            late.daemon = True
            late.start()

    def _leave_at_once(self, number: signal.Signals) -> None:
        """End this process without saving, after telling the others to end."""
        text = f"stopped at once by one more {number.name}"
        if not self._processes.closed:
            # In a thread, because the coordination service may not answer.
            tell = threading.Thread(target=self._processes.post_failure, args=(text,), daemon=True)
            tell.start()
            tell.join(_TOGETHER_S)
            if self._processes.leader:
                # Wait until the others have read the reason: the store ends with process 0.
                time.sleep(_TOGETHER_S)
        leave(
            self.exit_code,
            f"{text}: what was being saved is lost, earlier checkpoints are as they were",
        )

    # The methods below run in the thread that talks to the other processes.

    def _talk(self) -> None:
        """Take part in agreeing on a stop (`_confer`) every `_POLL_S` seconds, in a thread.

        The thread ends with the context or with the communication between the processes.
        """
        while not (self._ended.wait(_POLL_S) or self._processes.closed):
            # Any error is one of the network. `Processes` ends the run if the coordinator is lost.
            with contextlib.suppress(Exception):
                self._confer()

    def _confer(self) -> None:
        """Do this process' next part in agreeing on a stop.

        1. The first process that received a signal posts it (`by`).
        2. Every process that saves posts the number of programs that it will have run (`at/N`), and
           runs no more until all have posted.
        3. All run as many programs as the process that is furthest ahead, and stop.

        If one process has nothing to save (`leave`), all leave at once.
        """
        processes = self._processes
        posts = processes.posts(_STOP)
        if self.received is not None and "by" not in posts:
            processes.post(f"{_STOP}/by", str(int(self.received)))
            # Read again: another process may have posted first, and only the first post stays.
            posts = processes.posts(_STOP)
        if "by" not in posts:
            return
        self.received = signal.Signals(int(posts["by"]))
        with self._changed:
            if not self._saves:
                processes.post(f"{_STOP}/leave", str(processes.index))
            elif self._bound is None:
                # A claimed program counts, because nothing can take it back.
                self._bound = self._num_done + self._is_running
                processes.post(f"{_STOP}/at/{processes.index}", str(self._bound))
        posts = processes.posts(_STOP)
        bounds = []
        for key, value in posts.items():
            if key.startswith("at/"):
                bounds.append(int(value))
        if "leave" in posts:
            self._leave_together()
        elif len(bounds) == processes.count:
            with self._changed:
                self._agreed = max(bounds)
                self._changed.notify_all()

    def _leave_together(self) -> None:
        """End this process. Process 0 first waits up to 2 seconds for the others to end.

        One process has nothing to save, so no program of all processes can follow.
        """
        processes = self._processes
        deadline = time.monotonic() + _TOGETHER_S
        processes.post(f"{_STOP}/left/{processes.index}", "")
        # The store ends with process 0, and the others read in it that they may leave. So process 0
        # leaves last, or after `_TOGETHER_S`.
        while processes.leader and time.monotonic() < deadline:
            left = [key for key in processes.posts(_STOP) if key.startswith("left/")]
            if len(left) == processes.count:
                break
            time.sleep(_POLL_S / 4)
        leave(self.exit_code)


class DistributedError(MupaxError):
    """Failure of processes to find, or to hear from, each other. The text says what to do."""


class Processes:
    """Communication between the processes of a run, implemented for a run of one process.

    Here nothing is sent and nothing waits. `distributed.Cluster` implements the methods for several
    processes.
    """

    index = 0
    """Number of this process."""
    count = 1
    """Number of processes."""

    @property
    def closed(self) -> bool:
        """True if this process is alone, or has ended its communication with the others."""
        return True

    @property
    def name(self) -> str:
        """Number and host of this process as the beginning of a message; empty if it is alone."""
        return f"process {self.index} ({socket.gethostname()}): " if self.count > 1 else ""

    @property
    def leader(self) -> bool:
        """True on process 0, which prints and writes."""
        return self.index == 0

    def broadcast(self, name: str, compute: Callable[[], Any], seconds: float | None = None) -> Any:
        """Call `compute` on process 0, and return its result on every process.

        The other processes wait for it.

        Args:
            name: Name of this exchange, used once in a run.
            compute: Function that process 0 alone calls. Its result must survive JSON.
            seconds: Longest wait; by default a week, because a process that fails ends all.

        Raises:
            DistributedError: The wait was too long.
        """
        return compute()

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any] | None:
        """Return the values of all processes on process 0, in their order.

        The other processes get `None`, and do not wait.

        Args:
            name: Name of this exchange, used once in a run.
            value: Value of this process. It must survive JSON.
            seconds: Longest wait for each of the others; by default a week.

        Raises:
            DistributedError: The wait was too long.
        """
        return [value]

    def barrier(self, name: str) -> None:
        """Wait until every process has called this with the same name, used once in a run."""

    @contextlib.contextmanager
    def leader_first(self, name: str) -> Iterator[None]:
        """Context manager of work that process 0 does first, and whose results the others find.

        The others begin when process 0 is done, or after `LEAD_S` seconds if it is not done by
        then.

        Args:
            name: Name of this exchange, used once in a run.
        """
        if not self.leader:
            with contextlib.suppress(DistributedError):
                self.broadcast(name, lambda: None, LEAD_S)
        yield
        if self.leader:
            self.broadcast(name, lambda: None)

    def post(self, key: str, value: str) -> None:
        """Store a value that all processes can read (`posts`). The first value under a key stays.

        Nothing is stored if this process is alone, or if the store does not answer.

        Args:
            key: Folders and a name, joined by `/`, which `posts` of the folder returns.
        """

    def posts(self, folder: str) -> dict[str, str]:
        """Return the values that processes have posted in a folder, by the rest of their keys.

        The result is empty if this process is alone.
        """
        return {}

    def post_failure(self, reason: str) -> None:
        """Tell the others that this process ends, and why. They then end with exit code 1.

        This process goes on. Nothing is sent if it is alone.
        """

    def end_stalled(self, excess: Callable[[], float], seconds: float | None) -> None:
        """From now on, end all processes if every one of them waits for another for too long.

        Nothing happens if this process is alone.

        Args:
            excess: Function that returns for how many seconds this process has waited for a program
                on all devices, beyond its longest such wait so far.
            seconds: Largest value of `excess` that is accepted. `None` never ends the processes.
        """

    def end_all(self, reason: str) -> None:
        """End every process within seconds with exit code 1, and print the reason on each.

        If a failure was posted before, its reason and exit code count. Nothing happens if this
        process is alone.
        """


def place(
    config: DistributedConfig, environ: Mapping[str, str] = os.environ, tpu: bool | None = None
) -> dict[str, Any] | None:
    """Return the arguments of `jax.distributed.initialize`, or `None` if this process is alone.

    Arguments that JAX finds in the environment by itself are left out, so the dict may be empty.

    Args:
        config: Settings of the run. The environment stands in for those that are `None`.
        tpu: Whether this is a host of Cloud TPUs, on which JAX finds all arguments by itself. By
            default JAX finds this out, too.

    Raises:
        DistributedError: Only a part of coordinator, number of processes and number of this process
            is given, or one of them is wrong.
    """
    values = _values_by_hand(config, environ)
    if values["processes"] == 1:
        return None
    missing = [field for field, value in values.items() if value is None]
    if not missing:
        return _place_by_hand(**values)

    if tpu is None:
        from jax._src import cloud_tpu_init  # as jax.distributed.initialize does

        tpu = cloud_tpu_init.running_in_cloud_tpu_vm
    if tpu:
        return {}

    # A single task has SLURM's variables too, and nobody to wait for.
    if "SLURM_STEP_NODELIST" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        # All GPUs of the node if SLURM starts one task on each node. JAX alone would take the first
        # GPU and leave the others idle.
        gpus = environ.get("SLURM_GPUS_ON_NODE", "")
        is_alone_on_node = environ.get("SLURM_NTASKS") == environ.get("SLURM_STEP_NUM_NODES")
        device_ids = None
        if is_alone_on_node and gpus.isdecimal():
            device_ids = list(range(int(gpus)))
        return {"local_device_ids": device_ids}

    mpi_count = int(environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if mpi_count > 1:
        return _place_by_open_mpi(mpi_count, environ, values["coordinator"])

    if len(missing) < len(values):
        flags = " ".join(f"--distributed.{field} ({_BY_HAND[field]})" for field in missing)
        raise DistributedError(
            f"to join other processes by hand, {flags} must be given too, or none of them"
        )
    return None


def _values_by_hand(config: DistributedConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return coordinator, number of processes and number of this one, each `None` if not given.

    A field of the config takes precedence over its environment variable.

    Raises:
        DistributedError: A variable that should be a number is none.
    """
    values: dict[str, Any] = {}
    for field, variable in _BY_HAND.items():
        value = getattr(config, field)
        if value is None:
            value = environ.get(variable)
        if field != "coordinator" and value is not None:
            if not str(value).isdecimal():
                raise DistributedError(f"{variable} is {value!r}; write a whole number")
            value = int(value)
        values[field] = value
    return values


def _place_by_hand(coordinator: str, processes: int, process: int) -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize` from values that were all given.

    Raises:
        DistributedError: The address is not HOST:PORT, or the number of this process is not below
            the number of processes.
    """
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal()):
        raise DistributedError(
            f"distributed.coordinator is {coordinator!r}; write HOST:PORT of process 0"
        )
    if not 0 <= process < processes:
        raise DistributedError(
            f"distributed.process is {process} of {processes}; write a number from 0 to "
            f"{processes - 1}"
        )
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process,
    }


def _place_by_open_mpi(
    count: int, environ: Mapping[str, str], coordinator: str | None
) -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize` for a process that mpirun started.

    Open MPI 4 gets {}, because JAX finds its processes by itself.

    Args:
        count: Number of processes of the run, at least 2.
        coordinator: Address that was given by hand. `None` makes one of the host of mpirun and a
            port that follows from the job's id.
    """
    launcher = _OPEN_MPI_5.match(environ.get("PMIX_NAMESPACE", ""))
    if "OMPI_MCA_orte_hnp_uri" in environ or launcher is None:
        return {}  # JAX detects Open MPI 4 by itself
    # As JAX does for Open MPI 4: the coordinator is on the host where mpirun was called.
    port = _FIRST_PORT + int(launcher[2]) % (2**16 - _FIRST_PORT)
    return {
        "coordinator_address": coordinator or f"{launcher[1]}:{port}",
        "num_processes": count,
        "process_id": int(environ["OMPI_COMM_WORLD_RANK"]),
        "local_device_ids": [int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])],
    }


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Context manager that keeps a closed terminal or pipe from ending the run.

    While entered, text for a closed standard output or standard error is dropped.
    """
    stderr: Any = _Lasting(sys.stderr)
    stdout: Any = _Lasting(sys.stdout, log=lambda text: print(text, file=stderr))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield


class _Lasting:
    """Text stream that drops what is written to it once its terminal or pipe is closed.

    A character that the encoding of the stream lacks is written as a question mark.

    Args:
        log: Function called once with a message when the stream is closed. By default none.
    """

    def __init__(self, stream: TextIO, log: Callable[[str], None] = lambda text: None) -> None:
        self._stream = stream
        self._log = log
        self._is_closed = False

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"

        def write_encodable() -> None:
            # A terminal in ASCII cannot print "μP", and a run must not end for that.
            self._stream.write(text.encode(encoding, "replace").decode(encoding))

        self._call(write_encodable)
        return len(text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _call(self, write: Callable[[], object]) -> None:
        """Call a method of the stream. Do nothing once the stream is closed.

        If the call fails because the terminal or pipe is gone, the error is dropped, the stream
        counts as closed from then on, and `log` gets a message.
        """
        if self._is_closed:
            return
        try:
            write()
        except (OSError, ValueError) as error:  # ValueError: somebody has closed the stream
            self._is_closed = True
            # What the stream still buffers must not fail at the end of the process either.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._log(
                f"standard output takes nothing any more ({error}); the run goes on without it"
            )
