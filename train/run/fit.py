"""Train a config from Python: `fit`, and the finished run that it returns."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax import MupaxFailure
from mupax.disk import path_of
from mupax.train.checkpoints.folder import CHECKPOINTS, steps
from mupax.train.config.run import Config
from mupax.train.run import loop
from mupax.train.run.hooks import Hook, Hooks
from mupax.train.run.report import metrics


class TrainingFailed(MupaxFailure):
    """A run that ended with an error, printed on standard error. Its workdir has what it saved."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    `mupax.train.load(run)` opens its model.

    Attributes:
        config: Config that was trained, with all defaults written out.
        workdir: Folder, or place in a bucket, with its checkpoints, metrics and pictures.
        step: Optimizer steps done. Fewer than `config.steps` after an early stop
            (`stop.patience`, or a hook's `run.stop`).
    """

    config: Config
    workdir: Path
    step: int

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, in order: one dictionary per step, evaluation and speed report.

        Losses are in nats per token, image or target. A value that was not finite is `None`. The
        file is read at each access.
        """
        return metrics.read(self.workdir / metrics.FILE_NAME)

    @property
    def evaluation(self) -> dict[str, Any]:
        """Values of the last evaluation by name; empty if there was none.

        The names are those of metrics.jsonl, such as `step`, `eval_loss`, `eval_accuracy`, and
        `eval/NAME/loss` of further sets. metrics.jsonl is read at each access.
        """
        rows = [row for row in self.metrics if "eval_loss" in row]
        return rows[-1] if rows else {}


def fit(config: Config, hooks: Sequence[Hook] = ()) -> Run:
    """Train a config to its last step, as `mupax train` does, and return the finished run.

    Args:
        config: Complete config, such as `RECIPES["lm-tiny"]()` with fields replaced. With `resume`
            the run in its workdir goes on.
        hooks: Functions to call after steps, in order, such as `[train.every(100, function)]`.

    Raises:
        MupaxError: The input is bad, or needs more memory than there is. Raised before the first
            step.
        DataError, ReadError: Data cannot be read later on. With one process the state is saved.
        OutOfMemory: Memory ran out during the run.
        HookError: A hook failed. The state is saved; the cause is the hook's exception.
        TrainingFailed: The run failed later. The reason is printed on standard error.
        KeyboardInterrupt: Ctrl-C came. The state is saved.
        SystemExit: Another signal stopped the run. The state is saved.
    """
    config = config.resolved()
    workdir = path_of(str(config.workdir))
    code = loop.run(config, Hooks(hooks) if hooks else None)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    # As in a shell, an exit code above 128 is 128 + the number of the signal.
    if code > 128:
        raise SystemExit(code)
    if code:
        raise TrainingFailed(f"the run in {workdir} failed; standard error has the reason")
    # The last step is always saved, so the newest checkpoint has the number of steps done.
    last_step = max(steps(workdir / CHECKPOINTS), default=0)
    return Run(config, workdir, last_step)
