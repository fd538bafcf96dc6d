"""Several processes of one run: how they join, what they tell each other, and how all end together.

They talk through the key-value store of JAX's coordination service, which process 0 keeps.

A library may abort a process. JAX's client does so as soon as the coordinator, process 0, is gone;
JAX's coordinator does so when the wall clock of its machine jumps, because it then takes every
process for dead. `listen` tells the others about an abort and ends the process with a message. The
client has a callback for a lost coordinator that jaxlib 0.10 to 0.12 cannot call (its argument has
no form in Python). The attempt ends in an abort too, but without the trace of the stack
(`without_trace`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed as _distributed  # the store has no public name

from mupax import MupaxError, MupaxFailure, terminal
from mupax.terminal import leave
from mupax.train.config.run import DistributedConfig
from mupax.train.parallel.processes import DistributedError, Processes

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_ANSWER_S = 2.0
"""Seconds that the coordinator may take to accept a connection."""
_handlers: list[Any] = []
"""Handlers of signals, kept alive because the C library has their addresses."""

_POLL_S = 1.0
"""Seconds between two heartbeats of a process.

At each of them the process also looks for failures that others have posted.
"""
_SHUTDOWN_S = 30.0
"""Seconds that a process waits for the shutdown of `jax.distributed` after a finished run."""
_FOREVER_MS = 7 * 24 * 3600 * 1000
"""Longest wait for another process, a week in milliseconds.

Another process may prepare data for hours, and its failure ends the wait."""
_CLOCK_S = 30 * 24 * 3600
"""Seconds of silence after which JAX takes a process for dead: a month.

JAX measures silence by the wall clock, which may jump. `Cluster` measures it by the monotonic
clock, and acts much earlier."""
_ALIVE = "mupax/alive"
_FAILED = "mupax/failed"
_WAITS = "mupax/waits"


def listen(coordinator: str | None, tell: Callable[[str], object]) -> None:
    """Install a handler that ends this process with a message and exit code 1 at SIGABRT.

    If this is process 0, or process 0 still answers, the handler tells the other processes first.
    Otherwise its message is that process 0 failed.

    Args:
        coordinator: Address HOST:PORT of process 0, or `None` on process 0 itself.
        tell: Function that tells the other processes a reason.
    """

    def aborted(number: int) -> None:
        if coordinator is not None and not _answers(coordinator):
            leave(
                1,
                f"error: process 0 ({coordinator}) failed: killed or cut off, it does not answer "
                "any more",
            )
        # Tell the others from another thread, because this one may be a thread of the client, for
        # which the client would wait.
        reason = "aborted by a library; its own screen has more"
        telling = threading.Thread(target=tell, args=(reason,), daemon=True)
        telling.start()
        telling.join(_ANSWER_S)
        if coordinator is None:
            # Wait until the others have read the reason: the store ends with process 0.
            time.sleep(_ANSWER_S)
        leave(
            1,
            "error: a library has aborted this process; its own lines above say why. The same "
            "command with --resume goes on from the newest checkpoint",
        )

    # Installed by the C library. Python's own handlers only note the signal and run later, but an
    # abort ends the process as soon as the handler in C returns.
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, _HANDLER]
    library.signal.restype = ctypes.c_void_p
    handler = _HANDLER(aborted)
    _handlers.append(handler)
    library.signal(signal.SIGABRT, handler)


@contextlib.contextmanager
def without_trace() -> Iterator[None]:
    """Context manager in which JAX makes clients that abort without a stack trace.

    Such a client still ends the process when the coordinator is lost.
    """
    library: Any = _distributed._jax  # pyright: ignore[reportPrivateImportUsage]
    make: Callable[..., Any] = library.get_distributed_runtime_client

    def end(*status: Any) -> None:
        leave(1, "error: process 0 failed: killed or cut off, it does not answer any more")

    library.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=end)
    try:
        yield
    finally:
        library.get_distributed_runtime_client = make


def _answers(address: str) -> bool:
    """Return whether a process still listens at an address HOST:PORT.

    It must accept four connections, a quarter of a second apart.
    """
    host, _, port = address.rpartition(":")
    # Four times, because the port of a process that is just ending may still accept a connection.
    for _ in range(4):
        time.sleep(_ANSWER_S / 8)
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except OSError:
            return False
    return True


class Cluster(Processes):
    """Communication of one process with the others of a run, by JAX's coordination service.

    Two threads watch over the run. One posts that this process is alive, and reads failures of the
    others. The other one ends this process if the coordinator does not answer.

    Args:
        index: Number of this process. Process 0 is the leader.
        client: Client of JAX's coordination service (`jax._src.distributed.global_state`).
        heartbeat_seconds: Silence after which a process counts as dead; 30 seconds by default.
    """

    def __init__(self, index: int, count: int, client: Any, heartbeat_seconds: float = 30) -> None:
        self.index = index
        self.count = count
        self._client = client
        self._silence = heartbeat_seconds
        self._done = threading.Event()
        self._failing = False
        """Whether this process is about to end. Then failures of the others end it no more."""
        self._answered = time.monotonic()
        """Time of the last answer of the coordinator."""
        self._excess: Callable[[], float] | None = None
        self._most_excess = math.inf
        self._wait_began = math.inf
        """Time when the main thread began to wait for a word of another process, else inf."""
        # Last, because the threads read what is set above.
        for target in (self._watch, self._guard):
            threading.Thread(target=target, name="processes", daemon=True).start()

    @property
    def closed(self) -> bool:
        return self._done.is_set()

    def broadcast(self, name: str, compute: Callable[[], Any], seconds: float | None = None) -> Any:
        key = f"mupax/broadcast/{name}"
        if not self.leader:
            return self._wait_for(key, 0, seconds)
        result = compute()
        self._client.key_value_set(key, json.dumps(result))
        return result

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any] | None:
        keys = [f"mupax/gather/{name}/{index}" for index in range(self.count)]
        if not self.leader:
            self._client.key_value_set(keys[self.index], json.dumps(value))
            return None
        values = [value]
        for index, key in enumerate(keys[1:], start=1):
            values.append(self._wait_for(key, index, seconds))
            # The store would keep every value until the run ends.
            self._client.key_value_delete(key)
        return values

    def _wait_for(self, key: str, index: int, seconds: float | None) -> Any:
        """Wait for the value that process `index` sets under a key, and return it.

        Raises:
            DistributedError: No value came within `seconds`, by default a week.
        """
        wait_ms = _FOREVER_MS if seconds is None else round(1000 * seconds)
        try:
            with self._asking():
                text = self._client.blocking_key_value_get(key, wait_ms)
            return json.loads(text)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise DistributedError(
                f"process {self.index} has waited {wait_ms / 1000:.0f} s for a word of process {index}; "
                "run the same version on all hosts"
            ) from error

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Context manager that records since when the main thread waits for another process.

        Waits of other threads, such as that of a save, hold up no step and do not count.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._wait_began = time.monotonic()
        try:
            yield
        finally:
            self._wait_began = math.inf

    def barrier(self, name: str) -> None:
        with self._asking():
            self._client.wait_at_barrier(f"mupax/{name}", _FOREVER_MS)

    def post(self, key: str, value: str) -> None:
        # set raises if the key already has a value, which stays, or if the store is gone.
        with contextlib.suppress(Exception):
            self._client.key_value_set(key, value)

    def posts(self, folder: str) -> dict[str, str]:
        entries = self._client.key_value_dir_get(folder)
        return {key.removeprefix(f"{folder}/"): value for key, value in entries}

    def post_failure(self, reason: str) -> None:
        if not self.closed:
            self._failing = True
            self._post_failure(self.index, socket.gethostname(), reason)

    def end_stalled(self, excess: Callable[[], float], seconds: float | None) -> None:
        self._excess = excess
        self._most_excess = math.inf if seconds is None else seconds

    def end_all(self, reason: str) -> None:
        self._post_failure(self.index, socket.gethostname(), reason)

    def close(self) -> None:
        """Wait for all processes at the end of a run that went well, and stop watching."""
        self.barrier("end")
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends. They then end with the same exit code.

        The code is 2 for bad input, which no restart can mend, and 1 otherwise. An exit handler of
        Python ends this process with it. If `error` may only say that another process went away,
        this process first waits for that process' reason and ends with it. The wait takes
        `heartbeat_seconds` and 3 seconds at most.
        """
        if _may_follow_from_another(error):
            # The watch ends this process if another one is found to have failed.
            time.sleep(self._silence + 3 * _POLL_S)
        self._failing = True
        code = 2 if isinstance(error, MupaxError) else 1
        # Registered last, so it runs before JAX's own exit handler. That one would wait for the
        # others until it gives up with a stack trace.
        atexit.register(leave, code)
        self._post_failure(
            self.index, socket.gethostname(), f"{type(error).__name__}: {error}", code
        )
        if self.leader:
            # Wait until the others have read the reason: the store ends with process 0.
            time.sleep(3 * _POLL_S)

    def _post_failure(self, index: int | None, host: str, reason: str, code: int = 1) -> None:
        """Post a failure of process `index`, or of all if that is `None`. The first post stays.

        Args:
            host: Name of the machine of process `index`.
            code: Exit code with which the other processes end; 1 by default.
        """
        self.post(f"{_FAILED}/first", json.dumps([index, host, reason, code]))

    def _watch(self) -> None:
        """Every second, post that this process is alive, and end it if a failure was posted.

        How long this process has waited is posted, too. Process 0 also looks for silent processes
        and for a stall of all. Errors of the network are ignored.
        """
        beat = 0
        last_beats: dict[str, tuple[str, float]] = {}
        while not self._done.wait(_POLL_S):
            beat += 1
            try:
                # The host name is stored with the beat, because a process that is gone can no
                # longer tell it.
                text = f"{beat} {socket.gethostname()}"
                self._client.key_value_set(f"{_ALIVE}/{self.index}", text, True)
                self._tell_wait()
                if self.leader:
                    self._look_for_silence(last_beats)
                    self._look_for_stall()
                failures = self._client.key_value_dir_get(_FAILED)
            except Exception:  # any error of the network; the store may answer again
                continue
            self._answered = time.monotonic()
            if failures and not self._failing and not self._done.is_set():
                index, host, reason, code = json.loads(failures[0][1])
                if index is not None:
                    reason = f"process {index} ({host}) failed: {reason}"
                self._leave(reason, code)

    def _guard(self) -> None:
        """End this process if the coordinator has not answered for `heartbeat_seconds`.

        In a thread of its own: a question to a coordinator that is stopped may never return.
        """
        while not self._done.wait(_POLL_S):
            silence = time.monotonic() - self._answered
            if silence > self._silence + _POLL_S and not self._failing:
                self._leave(f"process 0 (the coordinator) failed: no answer for {self._silence} s")

    def _look_for_silence(self, last_beats: dict[str, tuple[str, float]]) -> None:
        """Post a failure of a process that has sent no new heartbeat for `heartbeat_seconds`.

        Process 0 calls this, and looks at all processes but itself. If several are silent, only the
        first post counts.

        Args:
            last_beats: Last heartbeat of each process, by its key in the store, and when process 0
                first saw this heartbeat (monotonic seconds). Changed in place.
        """
        current_time = time.monotonic()
        beats = dict(self._client.key_value_dir_get(_ALIVE))
        for index in range(1, self.count):
            key = f"{_ALIVE}/{index}"
            beat = beats.get(key, "")
            last_beat, last_time = last_beats.setdefault(key, (beat, current_time))
            if last_beat != beat:
                last_beats[key] = (beat, current_time)
            elif current_time - last_time > self._silence:
                host = beat.partition(" ")[2] or "host unknown"
                self._post_failure(
                    index, host, f"killed or cut off, not heard of for {self._silence} s"
                )

    def _tell_wait(self) -> None:
        """Post two waits of this process, in seconds, for process 0 to read.

        `program` says by how much the present wait for a program on all devices exceeds the longest
        such wait so far. `word` is the present wait for a message of another process. Each is 0 if
        there is none. Nothing is posted before `end_stalled` was called.
        """
        if self._excess is None:
            return
        program_seconds = self._excess()
        word_seconds = time.monotonic() - self._wait_began
        wait = {"program": max(0.0, program_seconds), "word": max(0.0, word_seconds)}
        self._client.key_value_set(f"{_WAITS}/{self.index}", json.dumps(wait), True)

    def _look_for_stall(self) -> None:
        """Post a failure of all processes if every one waits, and one too long for a program.

        Process 0 calls this. A wait for a program is too long if it exceeds the longest wait so far
        by more than the `seconds` of `end_stalled`. Every process must have waited for more than
        half of these seconds, either for a program or for a message. A process that compiles, reads
        data or saves does not wait, and then no failure is posted.
        """
        waits = []
        for _, text in self._client.key_value_dir_get(_WAITS):
            waits.append(json.loads(text))
        longest = max((wait["program"] for wait in waits), default=0.0)
        # Half of the time is enough for the others, which may have begun to wait later.
        stuck = [max(wait.values()) > self._most_excess / 2 for wait in waits]
        if longest > self._most_excess and len(stuck) == self.count and all(stuck):
            self._post_failure(
                None,
                "",
                f"all {self.count} processes wait for one another, in a step that takes "
                f"{longest:.0f} s longer than any before: the network between them is cut or stuck, "
                "though process 0 still hears from all. Continue with --resume; if a step can take "
                "this long, write a larger --faults.collective-seconds",
            )

    def _leave(self, reason: str, code: int = 1) -> None:
        """Print why the run ends, and end this process from the thread that watches.

        At most ten lines of the reason are printed. Process 0 waits 3 seconds before it ends.
        The main thread may hang in a collective operation that never ends.
        """
        self._failing = True  # one reason is enough, so the guard adds no other
        terminal.complain("\n".join(f"error: {reason}".splitlines()[:10]))
        if self.leader:
            # Wait until the others have read the reason: the store ends with process 0.
            time.sleep(3 * _POLL_S)
        leave(code)


def _may_follow_from_another(error: BaseException) -> bool:
    """Return whether an error may only say that another process left a collective operation.

    That is any error of Gloo, and any runtime error of JAX except a lack of memory.
    """
    text = str(error)
    if "Gloo" in text:
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in text


@contextlib.contextmanager
def joined(address: dict[str, Any], config: DistributedConfig) -> Iterator[Cluster]:
    """Join the other processes while entered. Enter this before JAX is asked for its devices.

    The process ends with exit code 1 if the others do not come within `config.timeout_seconds`. An
    exception that leaves the context is told to the others. They end within seconds, with the same
    exit code and text. Without an exception, the end of the context waits for all processes.

    Args:
        address: Arguments of `jax.distributed.initialize` (`processes.place`).
        config: Settings that say how long to wait for the others, in seconds.

    Raises:
        MupaxFailure: The connection to another process broke.
    """
    # JAX's preemption service would take SIGTERM away from `StopRequest`, which agrees on a step by
    # itself and hears SIGINT, too.
    jax.config.update("jax_enable_preemption_service", False)
    late = threading.Timer(config.timeout_seconds, _too_late, (address, config.timeout_seconds))
    late.daemon = True
    late.start()
    try:
        # At its time limits JAX ends a process without a readable message. `_too_late` and
        # `Cluster` have shorter limits, so they act first.
        with without_trace():
            jax.distributed.initialize(
                **address,
                initialization_timeout=config.timeout_seconds + 60,
                heartbeat_timeout_seconds=config.heartbeat_seconds + _CLOCK_S,
            )
    finally:
        late.cancel()
    state = _distributed.global_state
    coordinator = state.coordinator_address if state.process_id else None
    # Install the handler first, because the client may abort at any time. Until the cluster exists,
    # the list is empty and no process is told.
    clusters: list[Cluster] = []

    def tell_others(reason: str) -> None:
        for cluster in clusters:
            cluster.post_failure(reason)

    listen(coordinator, tell_others)
    processes = Cluster(
        jax.process_index(), jax.process_count(), state.client, config.heartbeat_seconds
    )
    clusters.append(processes)
    try:
        yield processes
    except BaseException as error:
        processes.fail(error)
        if "Gloo" in str(error):
            reason = str(error).splitlines()[0]
            raise MupaxFailure(
                f"the connection to another process broke ({reason[:200]}); the same command with "
                "--resume goes on from the newest checkpoint"
            ) from error
        raise
    processes.close()
    # Everything is saved. A process that dies now must not hold this one up for minutes.
    shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(_SHUTDOWN_S)


def _too_late(address: dict[str, Any], seconds: int) -> None:
    """Print that the others have not come within `seconds`, and end this process with code 1."""
    process = "this process"
    place = ""
    if address.get("coordinator_address"):
        process = f"process {address['process_id']} of {address['num_processes']}"
        place = f" at {address['coordinator_address']}"
    terminal.complain(
        f"error: {process} waited {seconds} s for process 0{place} and the others; start all of "
        "them at about the same time, check that every one reaches that host and port, or give "
        "--distributed.timeout-seconds more"
    )
    leave(1)  # the main thread is blocked in JAX and handles no signal
