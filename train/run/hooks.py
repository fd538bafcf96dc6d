"""User functions that a run calls every N steps: `fit(config, hooks=[every(100, function)])`."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from mupax import MupaxError
from mupax.train.config.run import Config
from mupax.train.core.state import TrainState
from mupax.train.run.report.metrics import OWN_NAMES, is_own_name

if TYPE_CHECKING:
    from mupax.train.run.runtime import RunContext


HookFunction = Callable[[int, TrainState, "HookRun"], object]
"""Function of (step, state, run), as `every` describes them. Its result is not used."""


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function and how often to call it (`every` makes it).

    Attributes:
        steps: The function is called after each step whose number is a multiple of `steps`.
        function: Function of (step, state, run).
    """

    steps: int
    function: HookFunction

    @property
    def name(self) -> str:
        """Name of the function, or of its class if it has none, for messages."""
        # A `functools.partial`, for instance, has no name of its own.
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)


def every(steps: int, function: HookFunction) -> Hook:
    """Return a hook for `fit` that calls `function(step, state, run)` after every `steps` steps.

    The function is called on every process, after the step's checkpoint and evaluation, in the
    order of the list given to `fit`. `step` counts steps done. `state` is the `TrainState` after
    them. Its arrays belong to the next step, so copy what you keep
    (`jax.device_get(state.params)`). `run` is a `HookRun`.

    After a resume or a rollback the function is called again for each step that is trained again.
    A run that is killed between a checkpoint and the hooks of its step goes on without calling
    these hooks.

    Args:
        steps: Whole number of at least 1.
        function: Function to call. An exception in it ends the run, whose state is saved.

    Raises:
        MupaxError: `steps` is no whole number of at least 1, or `function` cannot be called.
    """
    # `True` is an int in Python, and would mean every step.
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise MupaxError(
            f"every({steps!r}, ...) is no number of steps; write a whole number of at least 1"
        )
    if not callable(function):
        raise MupaxError(f"every({steps}, {function!r}): write a function of (step, state, run)")
    return Hook(steps, function)


class HookRun:
    """The run that a hook is called in, with methods to log values and to stop the run.

    Attributes:
        config: Config of the run, with all defaults written out.
        workdir: Folder, or place in a bucket, of the run.
        process: Index of this process, from 0. Process 0 writes and prints.
        process_count: Number of processes, at least 1.
    """

    def __init__(self, context: RunContext) -> None:
        self.config: Config = context.config
        self.workdir: Path = context.folder
        self.process: int = context.processes.index
        self.process_count: int = context.processes.count
        self._values: dict[str, float] = {}
        self._reason = ""

    def log(self, values: Mapping[str, Any]) -> None:
        """Log numbers of this step to metrics.jsonl and to the run's trackers.

        Call this on every process. Process 0 writes its numbers in one row after the hooks of the
        step, those of the others are dropped. A second value for a name replaces the first.

        Args:
            values: Numbers by name, scalars or arrays of one element. A name with a `/`, such as
                `router/entropy`, is the tag in TensorBoard. Other names are shown under `train/`.

        Raises:
            MupaxError: A name is used in mupax' own rows, or a value is not one number.
        """
        for name, value in values.items():
            if not isinstance(name, str) or not name or is_own_name(name):
                raise MupaxError(
                    f"run.log: {name!r} is a name of mupax' own rows ({', '.join(OWN_NAMES)}, "
                    f"eval... and perf_...); write another, such as my/{name}"
                )
            try:
                # Converted at once, because arrays of the state are gone after the next step.
                self._values[name] = float(value)
            except (TypeError, ValueError) as error:
                raise MupaxError(f"run.log: {name} is {value!r}; write one number") from error

    def stop(self, reason: str) -> None:
        """End the run on all processes after the hooks of this step.

        The state is saved, so that the run can be resumed.

        Args:
            reason: Text that is printed and written to metrics.jsonl. If it is empty, a default is
                used.
        """
        self._reason = reason.strip() or "a hook stopped the run"

    def take(self) -> tuple[dict[str, float], str]:
        """Return and clear the values logged since the last call. Return also the reason to stop.

        The reason is "" if no hook has asked to stop.
        """
        values = self._values
        self._values = {}
        return values, self._reason


class Outcome(NamedTuple):
    """Result of the hooks of one step.

    Attributes:
        values: Values that the hooks logged on this process, by name.
        failure: Name of the hook that failed and its error, on the first process that has one. ""
            if none failed.
        cause: Exception of the hook, if it failed on this process.
    """

    values: dict[str, float]
    failure: str
    cause: Exception | None


class Hooks:
    """Hooks of a run. `loop.run` calls `begin` once, and `call` after steps.

    Args:
        hooks: Hooks in the order in which they are called.

    Attributes:
        stopped: Reason why a hook ended the run, or "".

    Raises:
        MupaxError: An entry was not made by `every`.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        for hook in hooks:
            if not isinstance(hook, Hook):
                raise MupaxError(
                    f"hooks has {hook!r}; write train.every(N, function), with the number of steps "
                    "N"
                )
        self._hooks = tuple(hooks)
        self._run: HookRun | None = None
        self._calls = 0
        self.stopped = ""

    def begin(self, context: RunContext) -> Self:
        """Make the `HookRun` that the hooks are called with, and return these hooks."""
        self._run = HookRun(context)
        return self

    def due(self, step: int) -> list[Hook]:
        """Return the hooks to call after a step: those whose `steps` divide its number."""
        return [hook for hook in self._hooks if step % hook.steps == 0]

    def call(self, context: RunContext, state: TrainState, step: int) -> Outcome:
        """Call the hooks that are due after a step, and share their outcome with all processes.

        Every process of the run calls this. An exception of a hook is returned, not raised, and
        further hooks of the step are not called on that process. If no hook failed and one asks to
        stop on any process, `stopped` has the reason on all of them afterwards.

        Args:
            step: Number of steps done.
        """
        assert self._run is not None, "begin comes first"
        cause: Exception | None = None
        failure = ""
        for hook in self.due(step):
            context.watchdog.waiting(f"the hook {hook.name} at step {step}")
            try:
                hook.function(step, state, self._run)
            except Exception as error:
                cause = error
                message = "".join(traceback.format_exception_only(error)).strip()
                failure = f"{hook.name} at step {step}: {message}"
                # Nothing is raised yet: the other processes wait below for this process's outcome.
                break
        values, reason = self._run.take()
        # Each exchange between processes needs a name of its own.
        self._calls += 1
        outcomes = context.processes.gather(f"hooks/{self._calls}", [failure, reason])
        failure, reason = context.processes.broadcast(
            f"hooks/{self._calls}/ends", lambda: first_outcome(outcomes or [])
        )
        if not failure:
            self.stopped = reason
        return Outcome(values, failure, cause)


def first_outcome(outcomes: Sequence[Sequence[str]]) -> list[str]:
    """Return the first failure and the first reason to stop of all processes, each "" if none.

    A failure names its process if there are several.

    Args:
        outcomes: Failure and reason of each process, each "" if none, in the order of processes.
    """
    first_failure = ""
    first_reason = ""
    for process, (failure, reason) in enumerate(outcomes):
        if failure and not first_failure:
            first_failure = failure
            if len(outcomes) > 1:
                first_failure = f"on process {process}, {failure}"
        if reason and not first_reason:
            first_reason = reason
    return [first_failure, first_reason]
