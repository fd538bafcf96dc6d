"""Traces of the functions that run for a batch, for the learning rates and for a save.

    python -m scripts.house.traces PART OUT      # one part, in this process

Each part trains `lm-tiny` on one CPU device in a process of its own, since caches that an earlier
part filled would hide functions. `sys.setprofile` and `threading.setprofile` are set before mupax
is imported, so that every thread is seen.

A window opens when a function of `PARTS` is called, and closes when it returns. In it count the
thread that called the function and every thread that such a thread starts meanwhile. Threads from
before, a watchdog or a prefetcher say, do not count. Where a part has an end on disk (the first row
of metrics, the checkpoint), the calling thread is held where the window closes, until the end is on
disk and no new function was seen for `QUIET_S`. That makes the lists the same every time.

Functions of mupax's own with a name count, also those inside of others. Bodies of modules and
classes, lambdas and comprehensions do not, since some versions of Python run comprehensions as
functions and others do not. A file counts if one of its functions does.

By these rules 17b5398 has 47 files and 194 functions for a batch, 20 and 82 for the learning rates,
and 16 and 60 for a save. The review that led to the targets counted 45 and 177, 20 and 82, and 18
and 64 there, by rules that it did not write down.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from scripts.house.sizes import PRODUCT, ROOT, TIMEOUT_S, environment

RECIPE = "lm-tiny"
QUIET_S = 2.0
"""Time without a new function after which no more are expected. Rows are written every 0.2 s."""
HELD_S = 60.0
"""Longest time that the calling thread is held for something on disk."""
ANONYMOUS = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


@dataclasses.dataclass(frozen=True)
class Function:
    """Function of mupax, by its file from the root and its qualified name."""

    path: str
    name: str


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of a run that is traced.

    Functions are recorded during windows: a window is the time from a call of a function to its
    return.

    Attributes:
        opens: Functions whose calls open windows.
        within: Function that must be running for a window to open, so that other calls of `opens`
            do not count. `None` opens windows at every call.
        ends: Function whose return closes the last window and the trace. With `None` the trace
            ends when all of `opens` have returned.
        on_disk: Pattern of a file in the workdir. The trace ends only when such a file is there; ""
            waits for none.
        steps: Steps of the run, by default those of the recipe.
    """

    opens: tuple[Function, ...]
    within: Function | None = None
    ends: Function | None = None
    on_disk: str = ""
    steps: int | None = None


PROGRAM = "train/core/program.py"
LOOP = "train/run/loop.py"
PARTS = {
    "batch": Part(
        opens=(Function(PROGRAM, "Program.trace_train"), Function(LOOP, "train")),
        ends=Function("train/run/report/metrics.py", "MetricsWriter.write"),
        on_disk="metrics.jsonl",
    ),
    "learning rates": Part(
        opens=(Function("train/config/preset.py", "preset_of"), Function(PROGRAM, "_inputs")),
        within=Function(PROGRAM, "assemble"),
    ),
    "save": Part(
        opens=(Function(LOOP, "save"),),
        ends=Function(LOOP, "save"),
        on_disk="checkpoints/[0-9]*/manifest.json",
        steps=1,
    ),
}
"""Parts that are traced. If one of these functions moves, write its new place here."""


class Recorder:
    """Profile function for `sys.setprofile` that records which functions run in a part's windows.

    Args:
        part: Part of the run, which defines the windows.
        root: Root of the checkout whose functions are recorded.
        workdir: Folder of the run, in which `part.on_disk` is looked for.
    """

    def __init__(self, part: Part, root: Path, workdir: Path) -> None:
        self.part = part
        self.functions: set[Function] = set()
        self.opened: set[Function] = set()
        self.ended = threading.Event()
        self._root = root.resolve()
        self._workdir = workdir
        self._folders = tuple(f"{folder}/" for folder in PRODUCT)
        self._by_code: dict[CodeType, Function | None] = {}
        self._callers: list[FrameType] = []
        self._outer: FrameType | None = None
        self._threads: set[threading.Thread] = set()
        self._newest = time.monotonic()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call or a return, at each of which the interpreter calls this method."""
        if self.ended.is_set() or event not in ("call", "return"):
            return
        if event == "call" and self._threads and frame.f_code is threading.Thread.start.__code__:
            # At the call, because the new thread runs before `start` returns.
            self._follow(frame.f_locals["self"])
        function = self._function(frame.f_code)
        if function is None:
            return
        if event == "call":
            self._call(frame, function)
        else:
            self._return(frame, function)

    def _call(self, frame: FrameType, function: Function) -> None:
        """Handle a call: open a window if the function does so, and record it in a window."""
        if function == self.part.within and self._outer is None:
            self._outer = frame
        inside = self.part.within is None or self._outer is not None
        if inside and function in self.part.opens:
            self.opened.add(function)
            self._callers.append(frame)
            self._threads.add(threading.current_thread())
        if self._counts() and function not in self.functions:
            self.functions.add(function)
            self._newest = time.monotonic()

    def _return(self, frame: FrameType, function: Function) -> None:
        """Handle a return: close the window of the call, and end the trace at the part's end."""
        complete = self.opened == set(self.part.opens)
        if function == self.part.ends and complete and self._counts():
            self._hold()
            self.ended.set()
            return
        if self._callers and frame is self._callers[-1]:
            self._callers.pop()
            if not self._callers:
                self._threads.discard(threading.current_thread())
                if complete and self.part.ends is None:
                    self.ended.set()
        if frame is self._outer:
            self._outer = None

    def _counts(self) -> bool:
        """Return whether this thread is inside of a window."""
        return bool(self._threads) and threading.current_thread() in self._threads

    def _follow(self, started: threading.Thread) -> None:
        """Let the functions of a started thread count if those of this thread do."""
        if self._counts():
            self._threads.add(started)

    def _hold(self) -> None:
        """Wait until the file `part.on_disk` is written and other threads run no new function.

        Raises:
            RuntimeError: This did not happen within `HELD_S`.
        """
        if not self.part.on_disk:
            return
        deadline = time.monotonic() + HELD_S
        while time.monotonic() < deadline:
            written = any(path.stat().st_size for path in self._workdir.glob(self.part.on_disk))
            if written and time.monotonic() - self._newest > QUIET_S:
                return
            # Only the time after the end is on disk counts as quiet.
            if not written:
                self._newest = time.monotonic()
            time.sleep(0.02)
        raise RuntimeError(f"{self.part.on_disk} did not come in {HELD_S:.0f} s")

    def _function(self, code: CodeType) -> Function | None:
        """Return the function of mupax to which code belongs, or `None` for other code; cached."""
        if code not in self._by_code:
            self._by_code[code] = self._described(code)
        return self._by_code[code]

    def _described(self, code: CodeType) -> Function | None:
        """Return the function of mupax to which code belongs, or `None` for other code."""
        # Only code of functions has local variables of its own.
        is_class = not code.co_flags & inspect.CO_NEWLOCALS
        if is_class or code.co_name in ANONYMOUS:
            return None
        # Modules are reached by links: mupax/train is train.
        path = os.path.relpath(os.path.realpath(code.co_filename), self._root)
        return Function(path, code.co_qualname) if path.startswith(self._folders) else None

    def result(self) -> dict[str, Any]:
        """Return the numbers of `files` and `functions`, and functions per file (`by file`).

        Raises:
            RuntimeError: A window never opened or the end never came.
        """
        unopened = set(self.part.opens) - self.opened
        missing = sorted(f"{function.name} of {function.path}" for function in unopened)
        if missing or not self.ended.is_set():
            never_ran = f"{', '.join(missing)} never ran"
            reason = never_ran if missing else "the end never came"
            raise RuntimeError(f"{reason}; write where it was moved to into PARTS of {__file__}")
        files: dict[str, int] = {}
        for function in self.functions:
            files[function.path] = files.get(function.path, 0) + 1
        by_file = dict(sorted(files.items()))
        return {"files": len(files), "functions": len(self.functions), "by file": by_file}


def record(root: Path = ROOT) -> dict[str, Any]:
    """Trace every part of a checkout's run, each in a new process."""
    return {name: traced(name, root) for name in PARTS}


def traced(name: str, root: Path = ROOT) -> dict[str, Any]:
    """Trace one part in a new process, and return the recorder's result.

    Raises:
        RuntimeError: The process failed; the message ends with its last output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace.json"
        # Another checkout may not have this file: it is imported from here, and mupax from there.
        program = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scripts.house import traces; "
            "sys.path.pop(0); traces.main()"
        )
        command = [sys.executable, "-c", program, name, str(out), "--root", str(root)]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(root),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if not out.is_file():
            code = done.returncode
            text = done.stderr[-2000:]
            raise RuntimeError(f"the trace of {name} ended with code {code}:\n{text}")
        return json.loads(out.read_text(encoding="utf-8"))


def trace(name: str, out: Path, root: Path) -> None:
    """Trace one part in this process, write the result, and exit the process at the part's end.

    Args:
        name: Key of `PARTS`.
        out: Path of the JSON file with the result.
        root: Checkout from which Python imports mupax in this process.
    """
    part = PARTS[name]
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(part, root, Path(folder))

        def leave() -> None:
            recorder.ended.wait()
            out.write_text(json.dumps(recorder.result(), indent=1), encoding="utf-8")
            # Nothing after the part's end is of interest, so the run is not trained to its end.
            os._exit(0)

        watcher = threading.Thread(target=leave, name="leave", daemon=True)
        watcher.start()
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            _train(part, folder)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        recorder.result()  # raises if something never ran
        watcher.join()


def _train(part: Part, workdir: str) -> None:
    """Train the recipe as `mupax train` does, including the checks of its command line."""
    from mupax.train.config import cli
    from mupax.train.run import loop

    words = ["--workdir", workdir]
    if part.steps is not None:
        words += ["--steps", str(part.steps), "--optimizer.warmup-steps", "1"]
    command = cli.parse(RECIPE, cli.recipe(RECIPE), words)
    loop.run(command.config)


def main() -> None:
    """Trace the part that the command line names."""
    # scripts.harness would import mupax before the profile function is set.
    parser = argparse.ArgumentParser(description="Trace the functions that run in a part of a run.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout that is traced")
    words = parser.parse_args()
    trace(words.part, words.out, words.root)


if __name__ == "__main__":
    main()
