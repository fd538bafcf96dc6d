"""A model's metrics over all evaluation examples: as a run sees them, and any checkpoint of it afterwards."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np

from mupax.train.config.metrics import evaluation_row, metric_values
from mupax.train.core.step import Batch, StepInputs
from mupax.train.data import Data, reading
from mupax.train.parallel.sharding import Feed
from mupax.train.run.prefetch import Prefetch
from mupax.train.run.runtime import EVALUATION
from mupax.zoo.definition import Arrays

if TYPE_CHECKING:
    from mupax.train.core.cross_entropy.sums import LossSums
    from mupax.train.core.state import TrainState
    from mupax.train.run.results import Report
    from mupax.train.run.start import Session


class Scores(dict[str, float]):
    """Metrics of an evaluation by name, in the order of `METRICS`.

    Attributes:
        targets: Number of targets that they are over.
    """

    def __init__(self, values: Mapping[str, float], targets: int) -> None:
        super().__init__(values)
        self.targets = targets


def evaluate(
    eval_fn: jax.stages.Compiled,
    params: Arrays,
    inputs: StepInputs,
    data: Data,
    feed: Feed,
    dispatching: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    observer: Callable[[Batch], None] | None = None,
) -> Scores:
    """Return the metrics over all evaluation examples; every process of a run calls this alike.

    Args:
        eval_fn: the compiled evaluation step.
        params: the model's.
        inputs: read by the step besides them.
        data: whose evaluation examples.
        feed: puts them on the mesh.
        dispatching: entered around every program; what it raises ends the evaluation.
        observer: given every batch, on the mesh.
    """
    total: LossSums | None = None
    with Prefetch(data.eval_batches(*feed.rows), feed.put) as batches:
        for batch in batches:
            with dispatching():
                # Fetched at once: on a CPU a queued batch has its temporaries too.
                sums = jax.device_get(eval_fn(params, inputs, batch))
            if observer is not None:
                observer(batch)
            total = sums if total is None else jax.tree.map(np.add, total, sums)
    assert total is not None, "data without evaluation examples"
    weight = float(total.weight)
    means = {name: float(value) / weight for name, value in total.metrics.items()}
    values = metric_values(float(total.loss) / weight, means, data.bytes_per_target)
    return Scores(values, int(weight) if math.isfinite(weight) else 0)


def evaluation(session: Session, report: Report, state: TrainState, step: int) -> None:
    """Write the row of an evaluation, on the run's data and its further sets.

    Args:
        session: of the run.
        report: gets the row.
        state: to evaluate, by its moving average where it has one.
        step: steps done.

    Raises:
        Interrupted: a signal came first.
        DataError, ReadError: the data cannot be read.
    """
    feed, awaited = session.program.eval_feed(), f"the evaluation at step {step}"
    dispatching = partial(session.rt.dispatching, awaited, EVALUATION)
    with reading():
        scores = evaluate(session.eval_fn, state.evaluated, session.inputs, session.data, feed, dispatching)
        row = {"step": step, **evaluation_row(scores)}
        for name, data in session.sets.items():
            scores = evaluate(session.eval_fn, state.evaluated, session.inputs, data, feed, dispatching)
            row |= evaluation_row(scores, name)
    report.evaluated(row if state.ema is None else {**row, "eval_weights": "ema"})
    if session.snapshots is not None:
        report.show(step, session.snapshots.take(state, partial(session.rt.dispatching, awaited)))
    measured = session.evaluations.add(row)
    if session.rt.processes.leader:
        session.checkpoints.evaluated({step: measured})
