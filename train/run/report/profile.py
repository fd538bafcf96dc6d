"""An XProf trace of a few steps: what the host and each device did, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import jax


class Profile:
    """Traces the steps asked for into a folder, as a context manager around the loop.

    Only one process of a run should have steps: the files are named by host, so two on one host would write the same.

    Args:
        steps: numbers of the steps to trace, without gaps; None traces nothing.
        folder: gets `plugins/profile/TIME/HOST.xplane.pb` and a `.trace.json.gz` beside it.
        paused: entered while the trace is started or ended: the devices are idle then, and no step is being timed.
        note: told where the trace is.
    """

    def __init__(
        self,
        steps: range | None,
        folder: Path,
        paused: Callable[[], AbstractContextManager[None]],
        note: Callable[[str], None],
    ) -> None:
        self._steps, self._folder, self._paused, self._note = steps or range(0), folder, paused, note
        self._tracing = False

    def step(self, number: int) -> AbstractContextManager[object]:
        """To be entered around the dispatch of a step: the trace begins before its first one and ends after its last."""
        wanted = number in self._steps
        if wanted != self._tracing:
            with self._paused():
                self._start() if wanted else self._end()
        return jax.profiler.StepTraceAnnotation("train", step_num=number) if wanted else contextlib.nullcontext()

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracing:
            self._end()

    def _start(self) -> None:
        jax.profiler.start_trace(self._folder)
        self._tracing = True

    def _end(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
        self._note(
            f"profile from step {self._steps[0]} in {self._folder}; "
            f"see it with: pip install xprof; xprof --port 8791 {self._folder}"
        )
