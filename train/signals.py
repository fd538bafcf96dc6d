"""SIGINT and SIGTERM ask a run to stop after the step it is in; a second one stops at once.

Where there are several processes, JAX's coordination service hears the SIGTERM of any of them and lets all agree on the step
to stop at; until there is one, asking costs a look at a variable.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first signal is only noted. Outside the main thread it never hears one.

    Args:
        several: whether the run has several processes, which must all stop at one step.
    """

    def __init__(self, several: bool = False) -> None:
        self.received: signal.Signals | None = None
        """The signal that the run stops by, on every process; None while there is none."""
        self._several, self._interrupted = several, False
        self._before: dict[signal.Signals, object] = {}

    def at(self, step: int) -> bool:
        """Whether to stop with this many steps done. To be asked after every step: then all processes hear the same."""
        if self._several and self.received is None:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self.received = signal.SIGTERM
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM, 0 when nothing was received."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # JAX listens to SIGTERM where there are several processes: a handler here would take it away.
            handlers = {signal.SIGINT: self._pass_on} if self._several else dict.fromkeys(_SIGNALS, self._note)
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise SystemExit(128 + number)
        self.received = signal.Signals(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise SystemExit(128 + number)
        self._interrupted = True
        os.kill(os.getpid(), signal.SIGTERM)
