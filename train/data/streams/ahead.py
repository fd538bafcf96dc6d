"""Lanes tokenized before they are waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from mupax.errors import MupaxError
from mupax.train.data.streams.lanes import POLL_S, Lane

_PATIENCE_S = 5.0
"""How long the end waits for a source that is stuck."""


class Ahead:
    """A thread that goes on with lanes before they are waited for, the one that is farthest behind first.

    What it cannot do is left to who waits for it, and raised there.

    Args:
        lanes: that may be asked for.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes, self._targets = lanes, dict[int, int]()
        self._changed, self._stopped = threading.Event(), threading.Event()

    def want(self, lane: int, tokens: int) -> None:
        """Asks for so many tokens of a lane.

        Args:
            lane: its number.
            tokens: from its first.
        """
        if tokens > self._targets.get(lane, 0):
            self._targets[lane] = tokens
            self._changed.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The thread, until the block ends."""
        self._stopped.clear()
        thread = threading.Thread(target=self._run, name="tokenizing", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._changed.set()
            thread.join(_PATIENCE_S)

    def _run(self) -> None:
        with contextlib.suppress(MupaxError, OSError):
            while not self._stopped.is_set():
                self._changed.clear()
                lacks = [(self._lanes[i].tokens / target, i) for i, target in [*self._targets.items()]]
                behind = [(share, i) for share, i in lacks if share < 1 and not self._lanes[i].ended]
                if not behind:
                    self._changed.wait()
                elif not self._lanes[min(behind)[1]].grow():
                    self._stopped.wait(POLL_S)
