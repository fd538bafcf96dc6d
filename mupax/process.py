"""A command's own process: signals end it within seconds, and its three streams are open.

At Ctrl-C Python raises KeyboardInterrupt wherever the main thread happens to be. Inside JAX that is
often a callback from C++, which drops the exception, or ends the process with a segmentation fault.
So the exception is raised only where no frame of JAX is on the stack. A thread ends the process if
the main one does not come to such a place, or does not end afterwards.

This module imports little: a signal that comes while the rest is imported is heard too.

Environment variables of JAX and XLA that cannot be used are one message each.

This module imports no JAX. A wrong flag of XLA ends a process inside C++, so another process tries
the flags first.
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
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import FrameType
from typing import Any, NoReturn

from mupax.errors import MupaxError

XLA_FLAGS = "XLA_FLAGS"
_TRUE = ("1", "true", "t", "yes", "y", "on")
"""Words that JAX takes for true, in lower case."""
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
"""Variables with the values under which mupax cannot work, and why."""
_CHECKS = (
    "JAX_DEBUG_NANS",
    "JAX_DEBUG_INFS",
    "JAX_ENABLE_CHECKS",
    "JAX_CHECK_TRACER_LEAKS",
    "JAX_ENABLE_X64",
    "JAX_THREAD_GUARD",
)
"""Switches that make JAX raise errors of their own, or compute with other types."""
_KNOWN_FLAG = re.compile(r"--xla_force_host_platform_device_count=[1-9]\d{0,3}")
"""Flags that need no trial, which takes a quarter of a second."""
_TRIAL = "import jaxlib.xla_client; jaxlib.xla_client.CompileOptions()"
_LOG_PREFIX = re.compile(r"^[EFWI]\d{4} \S+ +\d+ \S+\] ")
"""What C++ prints before a message: time, thread, file and line."""
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
"""A second one ends the process. A closed terminal sends SIGHUP twice."""
ONE_S = 0.3
"""Signals so close together are one: `timeout` sends its own twice."""
_REACH_S = 1.0
"""How long the main thread may take to come out of JAX. Compiling takes longer, and can be cut off anywhere."""
_CLEAN_UP_S = 2.5
"""How long the command may take to end after the exception was raised."""
_NUDGE_S = 0.02
_WORDS_S = 0.5
"""How long the last words may take: a terminal may be stopped, or a pipe full."""
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
"""Packages called from C++, or by the garbage collector, which drop an exception."""


class VariableError(MupaxError):
    """An environment variable of JAX or XLA that cannot be used. The text names it and says what to write."""


def check(
    remembered: Callable[[str, Trial], dict[str, float]], variables: Mapping[str, str] = os.environ
) -> None:
    """Refuse variables under which no command that computes can work, before work is spent.

    Args:
        remembered: keeps the result of a function on disk, by a name (`train.data.cache.remembered`).
        variables: environment of this process.

    Raises:
        VariableError: such a variable is set, or XLA does not take a flag.
    """
    for name, (values, reason) in _REFUSED.items():
        value = variables.get(name, "")
        if value.lower() in values:
            raise VariableError(f"mupax does not work under {name}={value}: {reason}. Unset {name}")
    _check_platforms(variables)
    flags = variables.get(XLA_FLAGS, "")
    # JAX that is imported has read the flags already.
    if "jaxlib" in sys.modules or all(_KNOWN_FLAG.fullmatch(flag) for flag in flags.split()):
        return
    import hashlib
    from importlib.metadata import version

    key = hashlib.sha256(
        f"{version('jaxlib')} {flags}".encode(errors="surrogateescape")
    ).hexdigest()
    remembered(f"xla-flags-{key[:16]}", functools.partial(_try_flags, variables))


def _check_platforms(variables: Mapping[str, str]) -> None:
    """Refuse JAX_PLATFORMS that names a platform whose plugin is not installed."""
    setting = variables.get("JAX_PLATFORMS", "")
    for platform in setting.split(","):
        extra = _EXTRA_OF_PLATFORM.get(platform)
        # JAX takes a libtpu from there too.
        if extra is not None and not (extra == "tpu" and variables.get("TPU_LIBRARY_PATH")):
            from mupax import extras

            extras.require(extra, f"JAX_PLATFORMS={setting}", VariableError)


def _try_flags(variables: Mapping[str, str]) -> dict[str, float]:
    """Let another process read XLA_FLAGS. Return the seconds that it took.

    Raises:
        VariableError: it ended with an error.
    """
    import subprocess

    began = time.monotonic()
    # -P: a file of the current folder must not be imported in place of a library.
    trial = subprocess.run(
        [sys.executable, "-P", "-c", _TRIAL],
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    # C++ ends the process without a word of Python, whose own errors are not about flags.
    if trial.returncode and "Traceback" not in trial.stderr:
        lines = [_LOG_PREFIX.sub("", line) for line in trial.stderr.splitlines() if line.strip()]
        reason = lines[0].rstrip(".") if lines else f"exit code {trial.returncode}"
        value = " ".join(variables[XLA_FLAGS].split())
        raise VariableError(
            f"XLA does not take XLA_FLAGS={value}: {reason[:300]}. Correct or unset XLA_FLAGS"
        )
    return {"seconds": time.monotonic() - began}


def explained(error: BaseException, variables: Mapping[str, str] = os.environ) -> str | None:
    """Describe an error of JAX that comes from a variable of the environment. Return None for any other error.

    Args:
        error: exception with its traceback.
        variables: environment of this process.
    """
    reason = (str(error) or type(error).__name__).splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    last_file = PurePath(frames[-1].filename).parts[-3:] if frames else ()
    if last_file == _CONFIG_FILE:
        name = _named_variable(reason, variables)
        return f"JAX does not take its environment: {reason}. Correct or unset {name}"
    # JAX removes its own frames from most of its errors, and says so in a note.
    is_filtered = any("JAX" in note for note in getattr(error, "__notes__", ()))
    is_of_jax = is_filtered or "_src" in last_file
    names_backend = any(words in reason for words in _BACKEND_WORDS)
    is_of_backend = names_backend or last_file == _BACKEND_FILE or (is_of_jax and not str(error))
    set_names = [name for name in _PLATFORM_VARIABLES if variables.get(name)]
    if is_of_backend and set_names:
        settings = " ".join(f"{name}={variables[name]}" for name in set_names)
        why = reason if str(error) else "this machine has no such device"
        advice = f"Unset {' and '.join(set_names)}, or write JAX_PLATFORMS=cpu"
        return f"JAX cannot start under {settings}: {why}. {advice}"
    checks = [name for name in _CHECKS if variables.get(name, "").lower() in _TRUE]
    if is_of_jax and checks:
        settings = " ".join(f"{name}={variables[name]}" for name in checks)
        return f"{type(error).__name__} under {settings}: {reason}. To go on without, unset {' and '.join(checks)}"
    return None


def _named_variable(text: str, variables: Mapping[str, str]) -> str:
    """Return the variable that a message of JAX names, or all that are set."""
    words = re.findall(r"\bjax[._]\w+", text, re.IGNORECASE)
    ours = [name for name in variables if name.startswith("JAX_")]
    upper_words = [word.upper().replace(".", "_") for word in words]
    named = [word for word in upper_words if word in ours]
    return named[0] if named else f"what is wrong of {', '.join(sorted(ours)) or 'its variables'}"


def open_closed_streams() -> None:
    """Open standard input, output and error to nowhere if this process was started without (`>&-`).

    Python has None in their place. The next file that is opened would get the number of the closed
    one, so that a library which prints would write into a checkpoint.
    """
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            stream = os.fdopen(
                number, "w" if number else "r", encoding="utf-8", errors="replace", closefd=False
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class Interrupts:
    """Handlers of this process' signals, and the thread that sees to its end.

    A run that saves when it is stopped has its own while it trains (`train/parallel/processes.py`).
    So does a web server.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """Number of the first signal; None before."""
        self._main = threading.get_ident()
        self._heard_at = 0.0
        self._raised_at: float | None = None
        self._is_over = False
        self._nudged = False
        """A signal of this object's own is on its way to the main thread."""
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)

    @property
    def exit_code(self) -> int | None:
        """128 and the number of the signal, as a shell has it; None when nothing was received."""
        return None if self.received is None else 128 + self.received

    def listen(self) -> None:
        """Install the handlers, in the main thread. A signal that is ignored stays ignored.

        `nohup` ignores SIGHUP, and a shell ignores SIGINT in the background jobs of a script.
        """
        signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        # An error that follows from the signal, in a callback or another thread, is no news.
        sys.unraisablehook = self._unless_interrupted(sys.unraisablehook)
        threading.excepthook = self._unless_interrupted(threading.excepthook)

    def finish(self) -> None:
        """From now on a signal ends the process at once: the command is done."""
        self._is_over = True

    # In the main thread, as soon as it is back in Python

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._note(number)
        if self._is_over:
            self._leave()
        if self._raised_at is None and _can_unwind(frame):
            self._raised_at = time.monotonic()
            raise KeyboardInterrupt

    def _note(self, number: int) -> None:
        if self.received is None:
            self.received = number
            self._heard_at = time.monotonic()

    # In the thread that watches

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        while True:
            if poll.poll(None if self.received is None else 1000 * _NUDGE_S):
                for number in os.read(self._ear, 64):
                    self._hear(number)
            if self.received is not None:
                self._see_to_the_end()

    def _hear(self, number: int) -> None:
        if number == self.received and self._nudged:
            self._nudged = False
            return
        if number not in _SIGNALS or signal.getsignal(number) != self._handle:
            return  # somebody else's now: a web server ends in its own way
        insists = number in _INSISTING and self.received is not None
        if insists and time.monotonic() - self._heard_at > ONE_S:
            self._leave()
        self._note(number)

    def _see_to_the_end(self) -> None:
        assert self.received is not None
        now = time.monotonic()
        if self._raised_at is not None:
            if now - self._raised_at > _CLEAN_UP_S:
                self._leave()
        elif now - self._heard_at > _REACH_S or self._is_over:
            self._leave()
        elif not self._nudged and signal.getsignal(self.received) == self._handle:
            self._nudged = True
            # The handler looks again where the main thread is, also if that waits for the system.
            signal.pthread_kill(self._main, self.received)

    def _leave(self) -> None:
        # The main thread may go on writing there, or the disk hang.
        cleaning = threading.Thread(target=_remove_temporary_folders, daemon=True)
        cleaning.start()
        cleaning.join(_WORDS_S)
        leave(128 + (self.received or signal.SIGINT))

    def _unless_interrupted(self, hook: Any) -> Any:
        def show(report: Any) -> None:
            if self.received is None:
                hook(report)
            elif report.exc_type is KeyboardInterrupt:
                self._raised_at = None  # a callback has dropped it: it is raised again

        return show


def _remove_temporary_folders() -> None:
    """Remove the folders of this process that the interpreter would remove as it ends."""
    if "tempfile" not in sys.modules:
        return
    from tempfile import TemporaryDirectory

    for item in gc.get_objects():
        if issubclass(type(item), TemporaryDirectory):  # a proxy's __class__ may be anything
            with contextlib.suppress(OSError):
                item.cleanup()


def leave(code: int, text: str = "") -> NoReturn:
    """End the process at once, from any thread: the main one may be where no exception reaches it.

    Args:
        text: printed on standard error, as far as that takes what is written to it.
    """

    def speak() -> None:
        with contextlib.suppress(Exception):
            print(text, end="\n" if text else "", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            for stream in filter(os.isatty, (1, 2)):
                os.write(stream, _SHOW_CURSOR)  # which a live bar has hidden

    words = threading.Thread(target=speak, daemon=True)
    with contextlib.suppress(
        RuntimeError
    ):  # the interpreter is ending and starts no thread any more
        words.start()
        words.join(_WORDS_S)
    os._exit(code)


def _can_unwind(frame: FrameType | None) -> bool:
    """Return True if an exception gets through to the command: nothing was called from C++."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _NO_UNWINDING or frame.f_code.co_name == "__del__":
            return False
        frame = frame.f_back
    return True
