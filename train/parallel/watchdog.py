"""The hang watchdog: after a long silence of the run it says what the run waits for and what every thread is at.

It ends nothing: what hangs may be a slow disk, and whoever starts the run knows better what its hours cost.
"""

from __future__ import annotations

import faulthandler
import math
import sys
import threading
import time
from typing import TextIO


class Watchdog:
    """Watches while entered, from the first call of `waiting` on: compiling for a pod may take longer than any silence.

    Args:
        seconds: silence after which it speaks, and again after each further one; None never does.
        file: where to, with a file descriptor; standard error unless given.
    """

    def __init__(self, seconds: float | None, file: TextIO | None = None) -> None:
        self._seconds, self._file = seconds, file
        self._at, self._for = math.inf, ""
        self._ended = threading.Event()

    def waiting(self, what: str) -> None:
        """Something was finished; next comes this."""
        self._at, self._for = time.monotonic(), what

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            threading.Thread(target=self._watch, args=(self._seconds,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()

    def _watch(self, seconds: float) -> None:
        reported = 0.0
        while not self._ended.wait(seconds / 10):
            now, at, file = time.monotonic(), self._at, self._file or sys.stderr
            if now - max(at, reported) < seconds:
                continue
            reported = now
            text = f"{now - at:.0f} s without anything finished; waiting for {self._for}. The threads are at:"
            print(f"watchdog: {text}", file=file, flush=True)
            try:
                faulthandler.dump_traceback(file)
            except (AttributeError, OSError, ValueError):  # a stream without a descriptor
                faulthandler.dump_traceback(sys.__stderr__ or 2)
