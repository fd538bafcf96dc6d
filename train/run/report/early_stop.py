"""Whether a run ends before its last step: its evaluations so far, and how long they have not improved.

All of it follows from the rows of evaluations, which every process of a run has alike and metrics.jsonl keeps: a resumed run counts
on where it stopped, and one that has ended so ends so again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mupax import disk
from mupax.train.config.run import Config
from mupax.train.config.sections import METRIC, cost, metrics_of
from mupax.train.run.report import metrics


class Evaluations:
    """What the evaluations of a run measured, by step.

    Args:
        config: of the run: when it ends by them, and its last step, at which it is done.
        rows: of metrics.jsonl, or of any of its evaluations.

    Attributes:
        metrics: step to numbers by name; None where one is not finite.
        stopped: why the run ends before its last step, in a line; "" where it goes on.
    """

    def __init__(self, config: Config, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._config, self._steps = config.stop, config.steps
        self.metrics: dict[int, dict[str, float | None]] = {}
        self.stopped = ""
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> dict[str, float | None]:
        """Take in the row of an evaluation; gives its numbers.

        Args:
            row: as metrics.jsonl has it, with its `step`.
        """
        names = {METRIC, *metrics_of(()), *(name for name in row if name.startswith("eval/"))}
        measured = self.metrics[row["step"]] = {name: row[name] for name in sorted(names & row.keys())}
        self.stopped = self._reason()
        return measured

    def go_back(self, step: int) -> None:
        """Forget what was measured after a step that the run goes back to."""
        self.metrics = {at: measured for at, measured in self.metrics.items() if at <= step}
        self.stopped = self._reason()

    def _reason(self) -> str:
        """As `stopped`.

        An improvement is a number better than the best before it by more than `min_delta`; one that is not finite is none.
        """
        patience, metric = self._config.patience, self._config.metric
        if patience is None:
            return ""
        best, best_step, since = math.inf, None, 0
        for step in sorted(step for step in self.metrics if step < self._steps):
            value = cost(metric, self.metrics[step].get(metric))
            if value < (best if best_step is None else best - self._config.min_delta):
                best, best_step, since = value, step, 0
            else:
                since += 1
            if since >= patience:
                break
        else:
            return ""
        by = f" by more than {self._config.min_delta:g}" if self._config.min_delta else ""
        shown = "and was never finite" if best_step is None else f"the best is {abs(best):.6g} at step {best_step}"
        return f"{metric} has not improved{by} in {since} evaluation{'s' * (since > 1)}, {shown}"


def rows_until(workdir: Path, step: int) -> list[dict[str, Any]]:
    """Rows of the evaluations up to a step that a run's metrics have; none where it has no metrics yet.

    Args:
        workdir: folder with metrics.jsonl.
        step: the last one.
    """
    path = workdir / metrics.FILE_NAME
    if not disk.status(path):
        return []
    return [row for row in metrics.read(path) if "eval_loss" in row and row["step"] <= step]
