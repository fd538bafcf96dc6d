"""The process of a command: signals, standard streams, and checks of JAX's environment variables.

At Ctrl-C, Python raises KeyboardInterrupt wherever the main thread happens to be. Inside JAX this
is often a callback from C++, which drops the exception or ends the process with a segmentation
fault. `Interrupts` therefore raises the exception only if no frame of JAX is on the stack. A second
thread ends the process if the main thread does not end in time.

This module imports little, and no JAX, so that the handlers are installed before slow imports.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import FrameType
from typing import Any, NoReturn

from mupax import MupaxError

XLA_FLAGS = "XLA_FLAGS"
_TRUE = ("1", "true", "t", "yes", "y", "on")
"""Values of a variable that JAX takes for true, in lower case."""
_NO_TRANSFERS = ("disallow", "disallow_explicit")
_TRANSFERS = "batches, metrics and checkpoints move between the host and the devices"
_NO_CHECKS = "its steps do not carry the state of such checks; JAX_DEBUG_NANS=1 works"
_REFUSED = {
    "JAX_DISABLE_JIT": (_TRUE, "every step is compiled ahead of time"),
    "JAX_NO_TRACING": (_TRUE, "every step is traced once, to be compiled"),
    "JAX_NUMPY_RANK_PROMOTION": (
        ("raise",),
        "models and optimizers of its libraries rely on broadcasting",
    ),
    "JAX_NUMPY_DTYPE_PROMOTION": (
        ("strict",),
        "models and optimizers of its libraries rely on promotion",
    ),
    "JAX_ERROR_CHECKING_BEHAVIOR_NAN": (("raise",), _NO_CHECKS),
    "JAX_ERROR_CHECKING_BEHAVIOR_DIVIDE": (("raise",), _NO_CHECKS),
    "JAX_ERROR_CHECKING_BEHAVIOR_OOB": (("raise",), _NO_CHECKS),
    "JAX_DEBUG_KEY_REUSE": (_TRUE, "random numbers of a step are drawn from one seed"),
    "JAX_TRANSFER_GUARD": (_NO_TRANSFERS, _TRANSFERS),
    "JAX_TRANSFER_GUARD_HOST_TO_DEVICE": (_NO_TRANSFERS, _TRANSFERS),
    "JAX_TRANSFER_GUARD_DEVICE_TO_DEVICE": (_NO_TRANSFERS, _TRANSFERS),
    "JAX_TRANSFER_GUARD_DEVICE_TO_HOST": (_NO_TRANSFERS, _TRANSFERS),
}
"""Values that mupax refuses, and the reason, by environment variable."""
_CHECKS = (
    "JAX_DEBUG_NANS",
    "JAX_DEBUG_INFS",
    "JAX_ENABLE_CHECKS",
    "JAX_CHECK_TRACER_LEAKS",
    "JAX_ENABLE_X64",
    "JAX_THREAD_GUARD",
)
"""Variables that make JAX raise additional errors or compute with other types."""
_KNOWN_FLAG = re.compile(r"--xla_force_host_platform_device_count=[1-9]\d{0,3}")
"""Flag of XLA that is not tried in another process (`_try_flags`), which takes 0.25 seconds."""
_TRIAL = "import jaxlib.xla_client; jaxlib.xla_client.CompileOptions()"
_LOG_PREFIX = re.compile(r"^[EFWI]\d{4} \S+ +\d+ \S+\] ")
"""Prefix of a message from C++: time, thread, file and line."""
_BACKEND_FILE = ("jax", "_src", "xla_bridge.py")
_BACKEND_WORDS = ("Unable to initialize backend", "Unknown backend")
_PLATFORM_VARIABLES = (
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
    "JAX_DEFAULT_DEVICE",
    "JAX_NUM_CPU_DEVICES",
)
_EXTRA_OF_PLATFORM = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}
_CONFIG_FILE = ("jax", "_src", "config.py")


Trial = Callable[[], dict[str, float]]

_STREAMS = ("stdin", "stdout", "stderr")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INSISTING = (signal.SIGINT, signal.SIGTERM)
"""Signals of which a second one ends the process at once. A closed terminal sends SIGHUP twice."""
ONE_S = 0.3
"""Seconds within which two signals count as one. `timeout` sends its signal twice."""
_REACH_S = 1.0
"""Seconds that the main thread may take to come out of JAX before the process is ended.

Compiling takes longer. Ending the process while JAX compiles does no harm.
"""
_CLEAN_UP_S = 2.5
"""Seconds that the command may take to end after KeyboardInterrupt was raised."""
_NUDGE_S = 0.02
"""Seconds between two signals to a main thread that is still inside JAX."""
_WORDS_S = 0.5
"""Seconds that the last output may take. A terminal may be stopped, or a pipe full."""
_SHOW_CURSOR = b"\x1b[?25h"
_NO_UNWINDING = frozenset(
    (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax",
        "chex",
        "tensorstore",
        "grain",
        "array_record",
        "weakref",
        "_weakrefset",
    )
)
"""Packages whose frames are called from C++ or the garbage collector, which drop exceptions."""


class VariableError(MupaxError):
    """Error about an environment variable of JAX or XLA under which mupax cannot work.

    The text names the variable and says what to write.
    """


def check(
    remembered: Callable[[str, Trial], dict[str, float]], variables: Mapping[str, str] = os.environ
) -> None:
    """Raise an error if environment variables of JAX or XLA have values that cannot work.

    Unusual XLA_FLAGS are tried in another process, unless jaxlib is imported already.

    Args:
        remembered: Function (cache key, trial) -> result, which returns the cached result of an
            earlier trial or calls `trial` (`mupax.train.data.cache.remembered`). The trial starts
            the other process.
        variables: Environment variables. The default is the environment of this process.

    Raises:
        VariableError: A variable has a value that mupax refuses, or XLA does not accept a flag.
    """
    for name, (values, reason) in _REFUSED.items():
        value = variables.get(name, "")
        if value.lower() in values:
            raise VariableError(f"mupax does not work under {name}={value}: {reason}. Unset {name}")
    _check_platforms(variables)
    flags = variables.get(XLA_FLAGS, "")
    # If jaxlib is imported, it has read the flags already.
    if "jaxlib" in sys.modules or all(_KNOWN_FLAG.fullmatch(flag) for flag in flags.split()):
        return
    import hashlib
    from importlib.metadata import version

    text = f"{version('jaxlib')} {flags}"
    key = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    remembered(f"xla-flags-{key[:16]}", functools.partial(_try_flags, variables))


def _check_platforms(variables: Mapping[str, str]) -> None:
    """Raise VariableError if JAX_PLATFORMS names a GPU or TPU whose plugin is not installed.

    TPU_LIBRARY_PATH makes the plugin of TPUs unnecessary.
    """
    setting = variables.get("JAX_PLATFORMS", "")
    for platform in setting.split(","):
        extra = _EXTRA_OF_PLATFORM.get(platform)
        if extra is None:
            continue
        # JAX can load libtpu from this path without an installed package.
        if extra == "tpu" and variables.get("TPU_LIBRARY_PATH"):
            continue
        from mupax import extras

        extras.require(extra, f"JAX_PLATFORMS={setting}", VariableError)


def _try_flags(variables: Mapping[str, str]) -> dict[str, float]:
    """Start another process that reads XLA_FLAGS. Return its duration as `{"seconds": ...}`.

    Args:
        variables: Complete environment of the other process, with XLA_FLAGS in it.

    Raises:
        VariableError: XLA ended the other process.
    """
    import subprocess

    # XLA ends a process inside C++ if a flag is wrong, so this process must not try the flags.
    began = time.monotonic()
    # -P keeps files of the current folder from being imported in place of a library.
    trial = subprocess.run(
        [sys.executable, "-P", "-c", _TRIAL],
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    # A traceback is an error of Python, which is not about flags. C++ prints none.
    if trial.returncode and "Traceback" not in trial.stderr:
        lines = [_LOG_PREFIX.sub("", line) for line in trial.stderr.splitlines() if line.strip()]
        reason = lines[0].rstrip(".") if lines else f"exit code {trial.returncode}"
        value = " ".join(variables[XLA_FLAGS].split())
        raise VariableError(
            f"XLA does not take XLA_FLAGS={value}: {reason[:300]}. Correct or unset XLA_FLAGS"
        )
    return {"seconds": time.monotonic() - began}


def explained(error: BaseException, variables: Mapping[str, str] = os.environ) -> str | None:
    """Return a message for an error of JAX that an environment variable caused, otherwise `None`.

    Args:
        error: Exception whose traceback shows where in JAX it was raised.
        variables: Environment variables. The default is the environment of this process.
    """
    reason = (str(error) or type(error).__name__).splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    last_file = PurePath(frames[-1].filename).parts[-3:] if frames else ()
    if last_file == _CONFIG_FILE:
        name = _named_variable(reason, variables)
        return f"JAX does not take its environment: {reason}. Correct or unset {name}"

    # JAX removes its own frames from most tracebacks, and adds a note that says so.
    is_filtered = any("JAX" in note for note in getattr(error, "__notes__", ()))
    is_of_jax = is_filtered or "_src" in last_file
    names_backend = any(words in reason for words in _BACKEND_WORDS)
    is_of_backend = names_backend or last_file == _BACKEND_FILE or (is_of_jax and not str(error))
    set_names = [name for name in _PLATFORM_VARIABLES if variables.get(name)]
    if is_of_backend and set_names:
        if not str(error):
            reason = "this machine has no such device"
        advice = f"Unset {' and '.join(set_names)}, or write JAX_PLATFORMS=cpu"
        return f"JAX cannot start under {_settings(set_names, variables)}: {reason}. {advice}"

    checks = [name for name in _CHECKS if variables.get(name, "").lower() in _TRUE]
    if is_of_jax and checks:
        advice = f"To go on without, unset {' and '.join(checks)}"
        settings = _settings(checks, variables)
        return f"{type(error).__name__} under {settings}: {reason}. {advice}"
    return None


def _settings(names: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return variables as a shell sets them: `NAME=value NAME=value`."""
    return " ".join(f"{name}={variables[name]}" for name in names)


def _named_variable(text: str, variables: Mapping[str, str]) -> str:
    """Return the environment variable that a message of JAX names.

    If it names none, return a text that lists all variables of JAX that are set.
    """
    jax_names = [name for name in variables if name.startswith("JAX_")]
    words = re.findall(r"\bjax[._]\w+", text, re.IGNORECASE)
    for word in words:
        name = word.upper().replace(".", "_")
        if name in jax_names:
            return name
    return f"what is wrong of {', '.join(sorted(jax_names)) or 'its variables'}"


def open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed (`>&-`)."""
    # Python sets a closed stream to None. The next file that is opened would get its number, and
    # a library that prints would write into a checkpoint.
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            stream = os.fdopen(number, mode, encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class Interrupts:
    """Signal handlers of this process, and the thread that ends the process after a signal.

    A training run and a web server install handlers of their own while they work
    (`train/parallel/processes.py`). This object then leaves the signals to them.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """Number of the first signal, `None` before."""
        self._main_thread = threading.get_ident()
        self._received_at = 0.0
        self._raised_at: float | None = None
        """Time at which KeyboardInterrupt was raised in the main thread."""
        self._is_over = False
        """`True` once the command has returned."""
        self._is_nudged = False
        """`True` while a signal that this object sent is on its way to the main thread."""
        # Python writes the number of every signal into the pipe. The watching thread reads it.
        self._pipe_reader, self._pipe_writer = os.pipe()
        # `signal.set_wakeup_fd` refuses a file that blocks.
        os.set_blocking(self._pipe_writer, False)

    @property
    def exit_code(self) -> int | None:
        """Exit code 128 plus the number of the signal, or `None` if no signal was received."""
        return None if self.received is None else 128 + self.received

    def listen(self) -> None:
        """Install handlers of SIGINT, SIGTERM and SIGHUP, and start the thread that watches them.

        Call this in the main thread. A signal that the process ignores stays ignored. The hooks for
        exceptions in threads and callbacks are replaced: after a signal, they print nothing.
        """
        signal.set_wakeup_fd(self._pipe_writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        for number in _SIGNALS:
            # Signals that are ignored stay ignored. `nohup` ignores SIGHUP, and a shell ignores
            # SIGINT in the background jobs of a script.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        # Errors in callbacks and other threads that follow from the signal are not printed.
        sys.unraisablehook = self._unless_interrupted(sys.unraisablehook)
        threading.excepthook = self._unless_interrupted(threading.excepthook)

    def finish(self) -> None:
        """Let later signals end the process at once, because the command has returned."""
        self._is_over = True

    # Runs in the main thread, as soon as it executes Python again.

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal, and raise KeyboardInterrupt unless it was raised before.

        It is not raised while a frame of JAX or a similar library is on the stack. If the command
        has returned, the process is ended instead.
        """
        self._record(number)
        if self._is_over:
            self._leave()
        if self._raised_at is None and _can_unwind(frame):
            self._raised_at = time.monotonic()
            raise KeyboardInterrupt

    def _record(self, number: int) -> None:
        """Store the number and time of a signal, if it is the first one."""
        if self.received is None:
            self.received = number
            self._received_at = time.monotonic()

    # The watching thread runs `_watch`, which calls `_on_signal` and `_check_end`.

    def _watch(self) -> None:
        """Wait for signals forever. After the first one, call `_check_end` every 0.02 seconds."""
        poll = select.poll()
        poll.register(self._pipe_reader, select.POLLIN)
        while True:
            timeout_ms = None if self.received is None else 1000 * _NUDGE_S
            if poll.poll(timeout_ms):
                for number in os.read(self._pipe_reader, 64):
                    self._on_signal(number)
            if self.received is not None:
                self._check_end()

    def _on_signal(self, number: int) -> None:
        """Record a signal, or end the process if it is a second SIGINT or SIGTERM.

        Two signals within 0.3 seconds count as one. Signals that this object sent itself, and those
        with another handler, are ignored.
        """
        if number == self.received and self._is_nudged:
            self._is_nudged = False
            return
        if number not in _SIGNALS or signal.getsignal(number) != self._handle:
            return  # a training run or a web server handles this signal itself
        is_second = number in _INSISTING and self.received is not None
        if is_second and time.monotonic() - self._received_at > ONE_S:
            self._leave()
        self._record(number)

    def _check_end(self) -> None:
        """End the process if the time after a signal is over, otherwise send the signal again.

        The main thread has 1 second to leave JAX, and then 2.5 seconds to clean up. If the command
        has returned, the process is ended at once. The signal is sent again so that `_handle` looks
        where the main thread is.
        """
        assert self.received is not None
        time_s = time.monotonic()
        if self._raised_at is not None:
            if time_s - self._raised_at > _CLEAN_UP_S:
                self._leave()
        elif time_s - self._received_at > _REACH_S or self._is_over:
            self._leave()
        elif not self._is_nudged and signal.getsignal(self.received) == self._handle:
            self._is_nudged = True
            # The handler looks again where the main thread is. The signal also interrupts a system
            # call.
            signal.pthread_kill(self._main_thread, self.received)

    def _leave(self) -> None:
        """Remove temporary folders, for at most `_WORDS_S` seconds, and end the process.

        The exit code is 128 plus the number of the signal.
        """
        # Removal may block: the main thread may still write there, or the disk may hang.
        cleaning = threading.Thread(target=_remove_temporary_folders, daemon=True)
        cleaning.start()
        cleaning.join(_WORDS_S)
        leave(128 + (self.received or signal.SIGINT))

    def _unless_interrupted(self, hook: Any) -> Any:
        """Return a hook for unhandled exceptions that calls `hook` only if no signal was received.

        After a signal it prints nothing. A KeyboardInterrupt that reaches it was dropped by a
        callback or thread, so it makes `_handle` raise the exception again.
        """

        def show(report: Any) -> None:
            if self.received is None:
                hook(report)
            elif report.exc_type is KeyboardInterrupt:
                self._raised_at = None  # a callback dropped the exception: raise it again

        return show


def _remove_temporary_folders() -> None:
    """Remove the temporary folders of this process, as the interpreter would when it ends."""
    if "tempfile" not in sys.modules:
        return
    from tempfile import TemporaryDirectory

    for item in gc.get_objects():
        if issubclass(type(item), TemporaryDirectory):  # a proxy's __class__ may be anything
            with contextlib.suppress(OSError):
                item.cleanup()


def leave(code: int, text: str = "") -> NoReturn:
    """End the process at once. This works in any thread, also if the main thread hangs.

    Standard output is flushed, and the terminal's cursor shown, for at most half a second. Exit
    handlers and `finally` blocks do not run.

    Args:
        text: Last line on standard error. It is dropped if it cannot be written in half a second.
    """
    output = threading.Thread(target=_write_last_output, args=(text,), daemon=True)
    # start() may raise RuntimeError while the interpreter ends.
    with contextlib.suppress(RuntimeError):
        output.start()
        output.join(_WORDS_S)
    os._exit(code)


def _write_last_output(text: str) -> None:
    """Print the text on standard error, flush standard output and show the terminal's cursor."""
    with contextlib.suppress(Exception):
        print(text, end="\n" if text else "", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        for stream in filter(os.isatty, (1, 2)):
            os.write(stream, _SHOW_CURSOR)  # a progress bar may have hidden the cursor


def _can_unwind(frame: FrameType | None) -> bool:
    """Return True if an exception raised in this frame can reach the command.

    It cannot from a `__del__`, or with a frame of JAX or a similar library on the stack, because
    their callers in C++ drop exceptions.
    """
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _NO_UNWINDING or frame.f_code.co_name == "__del__":
            return False
        frame = frame.f_back
    return True
