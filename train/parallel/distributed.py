"""Several processes of one run: how they join, what they tell each other, and how a failure of one ends all.

They talk through the key-value store of JAX's coordination service, which process 0 keeps.

An abort by a library is told to the others and ends with a message.
JAX's client aborts its process as soon as the coordinator, which is process 0, is gone. It has a callback for that, which
jaxlib 0.10 to 0.12 cannot call (its argument has no form in Python): the attempt ends in an abort too, but without the trace of the
stack. Python's own handlers only note a signal, and an abort goes on after them; so this one is called by the C library.
JAX's coordinator aborts too when the wall clock of its machine jumps: it then takes every process for dead.
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

from mupax import terminal
from mupax.errors import MupaxError, MupaxFailure
from mupax.terminal import leave
from mupax.train.config.run import DistributedConfig
from mupax.train.parallel.processes import DistributedError, Processes

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_ANSWER_S = 2.0
"""How long the coordinator may take to accept a connection."""
_handlers: list[Any] = []
"""Kept: the C library has their addresses."""

_POLL_S = 1.0
"""How often a process says that it is alive and looks whether another has failed."""
_SHUTDOWN_S = 30.0
"""How long the processes of a finished run may take to part."""
_FOREVER_MS = 7 * 24 * 3600 * 1000
"""Another process may prepare data for hours; its failure ends the wait."""
_CLOCK_S = 30 * 24 * 3600
"""JAX tells silence by the wall clock, which may jump. The watch here tells it by the monotonic one, and much earlier."""
_ALIVE, _FAILED, _WAITS = "mupax/alive", "mupax/failed", "mupax/waits"


def listen(coordinator: str | None, tell: Callable[[str], object]) -> None:
    """From now on an abort of this process says why, to the others and on the screen.

    Args:
        coordinator: its address, HOST:PORT; None where this process is it.
        tell: the others.
    """

    def aborted(number: int) -> None:
        if coordinator is not None and not _answers(coordinator):
            leave(
                1,
                f"error: process 0 ({coordinator}) failed: killed or cut off, it does not answer any more",
            )
        # In another thread: this one may be of the client itself, which waits for it.
        told = threading.Thread(
            target=tell, args=("aborted by a library; its own screen has more",), daemon=True
        )
        told.start()
        told.join(_ANSWER_S)
        if coordinator is None:
            time.sleep(
                _ANSWER_S
            )  # until the others have read it: this process takes the store with it
        leave(
            1,
            "error: a library has aborted this process; its own lines above say why. The same command with --resume goes on from "
            "the newest checkpoint",
        )

    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, _HANDLER], ctypes.c_void_p
    _handlers.append(_HANDLER(aborted))
    library.signal(signal.SIGABRT, _handlers[-1])


@contextlib.contextmanager
def without_trace() -> Iterator[None]:
    """JAX's clients that are made meanwhile print no stack when they abort the process."""
    library: Any = _distributed._jax  # pyright: ignore[reportPrivateImportUsage]
    make: Callable[..., Any] = library.get_distributed_runtime_client
    gone = functools.partial(
        leave, 1, "error: process 0 failed: killed or cut off, it does not answer any more"
    )
    library.get_distributed_runtime_client = functools.partial(
        make, missed_heartbeat_callback=lambda *status: gone()
    )
    try:
        yield
    finally:
        library.get_distributed_runtime_client = make


def _answers(address: str) -> bool:
    """Whether something listens there, and still does: a process that dies closes one connection after another."""
    host, _, port = address.rpartition(":")
    for _ in range(4):
        time.sleep(_ANSWER_S / 8)
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except OSError:
            return False
    return True


class Cluster(Processes):
    """The processes of a run, seen from one of them.

    Args:
        index: number of this process; 0 leads.
        count: how many there are.
        client: of JAX's coordination service.
        heartbeat_seconds: how long a process may be silent before it counts as dead.
    """

    def __init__(self, index: int, count: int, client: Any, heartbeat_seconds: float = 30) -> None:
        self.index, self.count, self._client = index, count, client
        self._silence = heartbeat_seconds
        self._done, self._failing = threading.Event(), False
        self._answered = time.monotonic()
        self._beyond: Callable[[], float] | None = None
        self._most_beyond = math.inf
        self._wait_began = math.inf
        """When the main thread began to wait for a word of another process; inf while it does not."""
        for target in (self._watch, self._guard):
            threading.Thread(target=target, name="processes", daemon=True).start()

    @property
    def closed(self) -> bool:
        return self._done.is_set()

    def broadcast(self, name: str, value: Callable[[], Any], seconds: float | None = None) -> Any:
        if not self.leader:
            return self._wait_for(f"mupax/broadcast/{name}", 0, seconds)
        result = value()
        self._client.key_value_set(f"mupax/broadcast/{name}", json.dumps(result))
        return result

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any] | None:
        keys = [f"mupax/gather/{name}/{index}" for index in range(self.count)]
        if not self.leader:
            self._client.key_value_set(keys[self.index], json.dumps(value))
            return None
        values = [value]
        for index, key in enumerate(keys[1:], start=1):
            values.append(self._wait_for(key, index, seconds))
            self._client.key_value_delete(key)
        return values

    def _wait_for(self, key: str, index: int, seconds: float | None) -> Any:
        wait = _FOREVER_MS if seconds is None else round(1000 * seconds)
        try:
            with self._asking():
                text = self._client.blocking_key_value_get(key, wait)
            return json.loads(text)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise DistributedError(
                f"process {self.index} has waited {seconds:.0f} s for a word of process {index}; run the same version on all hosts"
            ) from error

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Note that the main thread waits for another process. Other threads, such as that of a save, keep nothing from going on."""
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
        with contextlib.suppress(Exception):  # it is there, or there is no store any more
            self._client.key_value_set(key, value)

    def posts(self, folder: str) -> dict[str, str]:
        return {
            key.removeprefix(f"{folder}/"): value
            for key, value in self._client.key_value_dir_get(folder)
        }

    def post_failure(self, reason: str) -> None:
        if not self.closed:
            self._failing = True
            self._post_failure(self.index, socket.gethostname(), reason)

    def end_stalled(self, beyond: Callable[[], float], seconds: float | None) -> None:
        self._beyond = beyond
        self._most_beyond = math.inf if seconds is None else seconds

    def end_all(self, reason: str) -> None:
        self._post_failure(self.index, socket.gethostname(), reason)

    def close(self) -> None:
        """The end of a run that went well, for all at once."""
        self.barrier("end")
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends, unless another one's end is the reason: then it ends as they do.

        The exit code of every process is then 2 where the error is bad input, which no restart can mend, and 1 otherwise.
        """
        if _may_follow_from_another(error):
            time.sleep(
                self._silence + 3 * _POLL_S
            )  # the watch ends this process if another is found to have failed
        self._failing = True
        # What JAX does at the end of a process would wait for the others, until it gives up with a stack trace.
        code = 2 if isinstance(error, MupaxError) else 1
        atexit.register(leave, code)
        self._post_failure(
            self.index, socket.gethostname(), f"{type(error).__name__}: {error}", code
        )
        if self.leader:
            time.sleep(
                3 * _POLL_S
            )  # until the others have read it: process 0 takes the store with it

    def _post_failure(self, index: int | None, host: str, reason: str, code: int = 1) -> None:
        self.post(f"{_FAILED}/first", json.dumps([index, host, reason, code]))

    def _watch(self) -> None:
        beat = 0
        last_beats: dict[str, tuple[str, float]] = {}
        while not self._done.wait(_POLL_S):
            beat += 1
            try:
                self._client.key_value_set(
                    f"{_ALIVE}/{self.index}", f"{beat} {socket.gethostname()}", True
                )
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
                self._leave(
                    reason if index is None else f"process {index} ({host}) failed: {reason}", code
                )

    def _guard(self) -> None:
        """End this process where the coordinator is silent; asking it may take for ever, where it is stopped say."""
        while not self._done.wait(_POLL_S):
            if time.monotonic() - self._answered > self._silence + _POLL_S and not self._failing:
                self._leave(f"process 0 (the coordinator) failed: no answer for {self._silence} s")

    def _look_for_silence(self, last_beats: dict[str, tuple[str, float]]) -> None:
        """Process 0: a process whose beat has stood still is declared dead."""
        now, beats = time.monotonic(), dict(self._client.key_value_dir_get(_ALIVE))
        for index in range(1, self.count):
            key = f"{_ALIVE}/{index}"
            beat = beats.get(key, "")
            if last_beats.setdefault(key, (beat, now))[0] != beat:
                last_beats[key] = (beat, now)
            elif now - last_beats[key][1] > self._silence:
                host = beat.partition(" ")[2] or "host unknown"
                self._post_failure(
                    index, host, f"killed or cut off, not heard of for {self._silence} s"
                )

    def _tell_wait(self) -> None:
        """Tell process 0 for how long this one has waited, in a program on all devices or for a word of another process."""
        if self._beyond is not None:
            wait = {"program": self._beyond(), "word": time.monotonic() - self._wait_began}
            text = json.dumps({name: max(0.0, seconds) for name, seconds in wait.items()})
            self._client.key_value_set(f"{_WAITS}/{self.index}", text, True)

    def _look_for_stall(self) -> None:
        """Process 0: end all where every process waits for others, and one of them in a program on all devices for too long.

        A process that compiles, reads data or saves does not wait: it may take as long as it does, and so may those that wait
        for it.
        """
        waits = [json.loads(text) for _, text in self._client.key_value_dir_get(_WAITS)]
        longest = max((wait["program"] for wait in waits), default=0.0)
        stuck = [max(wait.values()) > self._most_beyond / 2 for wait in waits]
        if longest > self._most_beyond and len(stuck) == self.count and all(stuck):
            self._post_failure(
                None,
                "",
                f"all {self.count} processes have waited {longest:.0f} s longer for a step than ever before, each for another: the "
                "network between them is cut or stuck, though process 0 hears of all. Go on with --resume; where a step may take "
                "so long, write a larger --faults.collective-seconds",
            )

    def _leave(self, why: str, code: int = 1) -> None:
        self._failing = True  # one reason is enough: the guard has nothing to add
        # The main thread may hang in a collective operation that will never end: nothing but this ends the process.
        terminal.note("\n".join(f"error: {why}".splitlines()[:10]))
        if self.leader:
            time.sleep(3 * _POLL_S)
        leave(code)


def _may_follow_from_another(error: BaseException) -> bool:
    """Whether the error may only say that another process went away in the middle of a collective operation."""
    text = str(error)
    return (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in text
    ) or "Gloo" in text


@contextlib.contextmanager
def joined(address: dict[str, Any], config: DistributedConfig) -> Iterator[Cluster]:
    """Join the other processes for as long as this is entered. Enter it before anything asks JAX for its devices.

    An exception that leaves it is told to the others, which then end too, within seconds, with its exit code and text.

    Args:
        address: where they are (`processes.place`).
        config: how long to wait for them.
    """
    # It would take SIGTERM away from `train/parallel/processes.py`, which agrees on a step by itself and hears SIGINT too.
    jax.config.update("jax_enable_preemption_service", False)
    late = threading.Timer(config.timeout_seconds, _too_late, (address, config.timeout_seconds))
    late.daemon = True
    late.start()
    try:
        # The service ends a process without a word for a person, on purpose later than `_too_late` and `Processes` do.
        with without_trace():
            jax.distributed.initialize(
                **address,
                initialization_timeout=config.timeout_seconds + 60,
                heartbeat_timeout_seconds=config.heartbeat_seconds + _CLOCK_S,
            )
    finally:
        late.cancel()
    state, clusters = _distributed.global_state, list[Cluster]()
    coordinator = state.coordinator_address if state.process_id else None
    listen(coordinator, lambda reason: [each.post_failure(reason) for each in clusters])
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
                f"the connection to another process broke ({reason[:200]}); the same command with --resume goes on from the "
                "newest checkpoint"
            ) from error
        raise
    processes.close()
    # Everything is done and saved; another that dies now must not hold this one for minutes.
    last = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    last.start()
    last.join(_SHUTDOWN_S)


def _too_late(address: dict[str, Any], seconds: int) -> None:
    who, where = "this process", ""
    if address.get("coordinator_address"):
        who = f"process {address['process_id']} of {address['num_processes']}"
        where = f" at {address['coordinator_address']}"
    terminal.note(
        f"error: {who} waited {seconds} s for process 0{where} and the others; start all of them at about the same time, "
        "check that every one reaches that host and port, or give --distributed.timeout-seconds more"
    )
    leave(1)  # the main thread waits inside the library, which listens to nothing
