"""Call a user's functions every N steps of a run: `train.fit(config, hooks=[train.every(100, function)])`."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from mupax.errors import MupaxError
from mupax.train.config.run import Config
from mupax.train.core.state import TrainState
from mupax.train.run.report.metrics import OWN_NAMES, is_own_name

if TYPE_CHECKING:
    from mupax.train.run.runtime import RunContext


HookFunction = Callable[[int, TrainState, "HookRun"], object]
"""(step, state, run) -> anything, which is not used. See `every`."""


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function and how often to call it (`every` makes it).

    Attributes:
        steps: It is called after each step whose number is a multiple of this.
        function: What is called.
    """

    steps: int
    function: HookFunction

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)


def every(steps: int, function: HookFunction) -> Hook:
    """Return a hook for `fit` that calls `function(step, state, run)` after every `steps` steps.

    It is called on every process, after the step's checkpoint and evaluation, and in the order of the list given to `fit`. `step`
    counts steps done. `state` is the `TrainState` after them; its arrays belong to the next step, so copy what you keep
    (`jax.device_get(state.params)`). `run` is a `HookRun`. After a resume or a rollback the function is called again for each
    step that is trained again. A run that is killed between a checkpoint and the hooks of its step goes on after them.

    Args:
        steps: At least 1.
        function: What to call. An exception in it ends the run, whose state is saved.

    Raises:
        MupaxError: `steps` is no whole number of at least 1, or `function` cannot be called.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise MupaxError(
            f"every({steps!r}, ...) is no number of steps; write a whole number of at least 1"
        )
    if not callable(function):
        raise MupaxError(f"every({steps}, {function!r}): write a function of (step, state, run)")
    return Hook(steps, function)


class HookRun:
    """A run as its hooks see it.

    Attributes:
        config: Config of the run, with all defaults written out.
        workdir: Folder, or place in a bucket, of the run.
        process: Index of this process. Process 0 writes and prints.
        process_count: Number of processes.
    """

    def __init__(self, runtime: RunContext) -> None:
        self.config: Config = runtime.config
        self.workdir: Path = runtime.folder
        self.process: int = runtime.processes.index
        self.process_count: int = runtime.processes.count
        self._values: dict[str, float] = {}
        self._reason = ""

    def log(self, values: Mapping[str, Any]) -> None:
        """Write numbers as a row of metrics.jsonl with the step, and to the run's trackers.

        Call it on every process alike; process 0 writes its own numbers.

        Args:
            values: Numbers by name, scalars or arrays of one element. A name with a `/`, such as `router/entropy`, is the
                tag in TensorBoard; others are shown under `train/`.

        Raises:
            MupaxError: A name that rows of mupax have themselves, or a value that is not one number.
        """
        for name, value in values.items():
            if not isinstance(name, str) or not name or is_own_name(name):
                raise MupaxError(
                    f"run.log: {name!r} is a name of mupax' own rows ({', '.join(OWN_NAMES)}, eval... and perf_...); "
                    f"write another, such as my/{name}"
                )
            try:
                self._values[name] = float(value)
            except (TypeError, ValueError) as error:
                raise MupaxError(f"run.log: {name} is {value!r}; write one number") from error

    def stop(self, reason: str) -> None:
        """End the run after the hooks of this step, on all processes. The state is saved, and `--resume` goes on.

        Args:
            reason: Shown and recorded in metrics.jsonl.
        """
        self._reason = reason.strip() or "a hook stopped the run"

    def take(self) -> tuple[dict[str, float], str]:
        """Return what was logged since the last call, and the reason to stop or an empty text."""
        values = self._values
        self._values = {}
        return values, self._reason


class Outcome(NamedTuple):
    """Result of the hooks of one step."""

    values: dict[str, float]
    """Numbers that they logged on this process."""
    failure: str
    """Which hook failed and how, on the first process where one did, or an empty text."""
    cause: Exception | None
    """The exception, where it is this process's."""


class Hooks:
    """The hooks of a run, and whether one of them has stopped it.

    Args:
        hooks: In the order in which they are called.

    Attributes:
        stopped: Why a hook ended the run, or an empty text.

    Raises:
        MupaxError: An entry that `every` did not make.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        for hook in hooks:
            if not isinstance(hook, Hook):
                raise MupaxError(
                    f"hooks has {hook!r}; write train.every(N, function), with the number of steps N"
                )
        self._hooks = tuple(hooks)
        self._run: HookRun | None = None
        self._calls = 0
        self.stopped = ""

    def begin(self, runtime: RunContext) -> Self:
        """Take the run that the hooks are of."""
        self._run = HookRun(runtime)
        return self

    def due(self, step: int) -> list[Hook]:
        """Return the hooks to call after a step."""
        return [hook for hook in self._hooks if step % hook.steps == 0]

    def call(self, runtime: RunContext, state: TrainState, step: int) -> Outcome:
        """Call the hooks that are due after a step, and agree with the other processes on what they want.

        A reason to stop is in `stopped` afterwards.

        Args:
            runtime: Whose processes agree.
            state: State after the step.
            step: Steps done.
        """
        assert self._run is not None, "begin comes first"
        cause: Exception | None = None
        failure = ""
        for hook in self.due(step):
            runtime.watchdog.waiting(f"the hook {hook.name} at step {step}")
            try:
                hook.function(step, state, self._run)
            except Exception as error:
                cause = error
                failure = f"{hook.name} at step {step}: {''.join(traceback.format_exception_only(error)).strip()}"
                break
        values, reason = self._run.take()
        self._calls += 1
        outcomes = runtime.processes.gather(f"hooks/{self._calls}", [failure, reason])
        failure, reason = runtime.processes.broadcast(
            f"hooks/{self._calls}/ends", lambda: first_outcome(outcomes or [])
        )
        if not failure:
            self.stopped = reason
        return Outcome(values, failure, cause)


def first_outcome(outcomes: Sequence[Sequence[str]]) -> list[str]:
    """Return the first failure and the first reason to stop of all processes, each empty where there is none.

    Args:
        outcomes: A failure and a reason of each process, in the order of processes.
    """
    failures = [
        failure if len(outcomes) == 1 else f"on process {i}, {failure}"
        for i, (failure, _) in enumerate(outcomes)
        if failure
    ]
    reasons = [reason for _, reason in outcomes if reason]
    return [next(iter(failures), ""), next(iter(reasons), "")]
