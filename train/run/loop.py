"""A run, from its config to its last checkpoint: what is called here, in this order, is what happens.

`runtime.py` has what a run stands on and what it says of itself, `start.py` what it begins with.

An evaluation gives a model's metrics over all evaluation examples: as a run sees them, and of any checkpoint afterwards.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mupax.plugins import refuse_while_importing
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.metrics import evaluation_row, metric_values
from mupax.train.config.run import Config, check_extras
from mupax.train.config.sections import SaveNeed
from mupax.train.core.program import assemble
from mupax.train.core.state import RejectedStep, TrainState
from mupax.train.core.step import Batch, StepInputs
from mupax.train.data import Data, DataError, ReadError, reading
from mupax.train.data.interface import Prefetch
from mupax.train.parallel.sharding import BatchSharding
from mupax.train.run.report import finish
from mupax.train.run.runtime import (
    EVALUATION,
    STEP,
    HookError,
    Interrupted,
    Report,
    RunContext,
    StartState,
    runtime,
)
from mupax.train.run.start import (
    CompiledRun,
    check_state,
    compiled,
    load_data,
    load_sets,
    memory_limit,
    out_of_memory,
    restore_latest,
    start_state,
)
from mupax.zoo.definition import Arrays

if TYPE_CHECKING:
    from mupax.train.core.state import LossSums
    from mupax.train.run.hooks import Hooks

_FREED_S = 0.005
"""Time for a CPU to free a step's temporaries, where there is no room for those of two steps."""
_LISTEN_S = 0.1
"""How often a run that waits for data looks whether it is to stop."""


def run(config: Config, hooks: Hooks | None = None) -> int:
    """Train a config to its last step.

    Args:
        config: complete config.
        hooks: called after steps (`fit` has them).

    Returns:
        The exit code (0 done, 1 the run failed, 128 + its number stopped by a signal, after saving).

    Raises:
        ConfigError, PresetError, MeshError, DataError, WorkdirError: bad input, before the first step.
        MupaxError: an extra that is not installed, before anything is prepared.
        MemoryLimitError: more memory is needed than there is, before the first step.
        OutOfMemory: memory ran out all the same.
        DataError, ReadError: data that cannot be read later on, after saving.
        HookError: a hook failed, after saving.
        SystemExit: stopped by a signal with nothing to save.
    """
    refuse_while_importing()
    check_extras(config)
    with runtime(config) as rt:
        program = assemble(rt.config)
        check_state(program, memory_limit(program, rt, "start"))
        data = load_data(program, rt)
        sets = load_sets(program, data, rt)
        limit = memory_limit(program, rt, "data")
        with (
            Checkpoints(
                rt.folder,
                rt.config.checkpoint,
                processes=rt.processes,
                log=rt.console.print,
                before_publish=rt.send,
            ) as checkpoints,
            out_of_memory(program),
        ):
            position = start_state(program, data, sets, checkpoints, rt)
            session = compiled(program, data, sets, checkpoints, rt, position, limit)
            if hooks is not None:
                session = dataclasses.replace(session, hooks=hooks.begin(rt))
            if position.step < rt.config.steps:
                rt.console.print(f"compiled in {session.compile_seconds:.1f} s")
            rt.stop.defer()
            try:
                state = train_with_rollbacks(session, position)
            except RejectedStep as failure:
                checkpoints.wait()
                return rt.fail(failure.message(checkpoints.latest, rt.config.faults))
        # Every process has saved its part when process 0 has left the block above; what it was told holds for all.
        if unsaved := rt.processes.broadcast("unsaved", checkpoints.wait):
            return rt.fail(unsaved)
        if stopped := rt.processes.broadcast("stopped", lambda: rt.stop.exit_code):
            return stopped
        rt.stop.release()
        finish.leave(session, state.evaluated)
        return 0


def train_with_rollbacks(session: CompiledRun, position: StartState) -> TrainState:
    """The state after the last step, or where a signal stopped the run; a bad step leads back where the policy says so.

    The batches between a checkpoint and a bad step are passed over: they would lead to the same state and the same step,
    bitwise. So do a kill and a resume, which is why nothing needs to be saved for it.

    Args:
        session: of the run, its steps compiled.
        position: where it starts.

    Raises:
        RejectedStep: a step ended the run under its policy, or going back has not helped.
        DataError, ReadError: the data cannot be read.
    """
    faults, rollbacks = session.rt.config.faults, collections.Counter[int]()
    while True:
        passed_over = int(jax.device_get(position.state.health.left_out))
        try:
            return train(session, position)
        except RejectedStep as bad:
            if faults.bad_numbers != "rollback" or bad.in_a_row >= faults.most_in_a_row:
                raise
            session.rt.watchdog.waiting("a checkpoint to go back to")
            session.checkpoints.wait()
            state = restore_latest(session.program, session.data, session.checkpoints)
            step = int(state.step)
            rollbacks[step] += 1
            if rollbacks[step] > faults.most_in_a_row:
                raise
            text = f"{bad.what}; back to step {step}, going on {bad.step - step} batches later"
            session.rt.console.print(text, style="yellow", highlight=False)
            left_out = jax.device_put(
                np.int32(passed_over + bad.step - step), session.program.layout.replicated
            )
            position = StartState(
                state._replace(health=state.health._replace(left_out=left_out)),
                step,
                keep_metrics=True,
            )


def train(session: CompiledRun, position: StartState) -> TrainState:
    """The state after the last step, or after the step at which a signal came; it is saved.

    Args:
        session: of the run.
        position: where it starts, or goes on after a rollback.

    Raises:
        RejectedStep: a step ended the run or sends it back, under its policy.
        DataError, ReadError: the data cannot be read; the state is saved where this process can alone.
    """
    program, rt, steps = session.program, session.rt, session.rt.config.steps
    state, step = program.placed(position.state, session.step_fn), position.step
    session.evaluations.go_back(step)
    if session.snapshots is not None:
        session.snapshots.begin(state.params)
    feed, passed_over = program.train_feed(), int(jax.device_get(state.health.left_out))
    source, reason = session.data.train_batches(step + passed_over, *feed.rows), None
    with (
        Report(program, session.data, rt, position, session.compile_seconds, passed_over) as report,
        Prefetch(source, feed.shard_batch) as batches,
    ):
        try:
            if not position.evaluated:
                evaluation(session, report, state, step)
            while step < steps and not stopped_early(session):
                batch = next_batch(batches, report, rt, step + 1)
                oldest = max(position.step, step - session.in_flight) + 1
                with (
                    rt.dispatching(f"step {oldest}, which the devices work on", STEP),
                    report.profile.step(step + 1),
                ):
                    state, metrics = session.step_fn(state, session.inputs, batch)
                step += 1
                report.add(step, metrics)
                report.fetch(session.in_flight)
                if session.in_flight == 0:
                    # A CPU says that a step is done a moment before it frees the step's temporaries.
                    time.sleep(_FREED_S)
                report.check(step - session.in_flight)
                save_and_evaluate(session, report, state, step)
                call_hooks(session, report, state, step)
        except (Interrupted, DataError, ReadError, HookError) as error:
            reason = error
        report.finish()
        if reason is not None:
            interrupted(session, report, state, step, reason)
        elif stopped := stopped_early(session):
            if step > position.step or not position.evaluated:
                report.stopped(step, stopped)
            save(session, report, state, step, wait=True)
            by_hook = session.hooks is not None and session.hooks.stopped == stopped
            how = (
                "add --resume"
                if by_hook
                else "add --resume with a larger --stop.patience or without it"
            )
            report.progress.note(
                f"stopped early at step {step} of {steps}: {stopped}; to go on, {how}"
            )
    session.speed.update(report.timing.facts())
    rt.watchdog.waiting("the last checkpoint to be on disk")
    return state


def call_hooks(session: CompiledRun, report: Report, state: TrainState, step: int) -> None:
    """Call the user's hooks that are due after a step, and write what they log.

    Args:
        session: of the run.
        report: gets the row.
        state: after the step.
        step: steps done.

    Raises:
        HookError: a hook failed, on this process or on another.
        RejectedStep: the step is bad, under the policy of the run.
    """
    if session.hooks is None or not session.hooks.due(step):
        return
    with report.paused():
        outcome = session.hooks.call(session.rt, state, step)
    if outcome.values:
        report.logged(step, outcome.values)
    if outcome.failure:
        raise HookError(f"the hook {outcome.failure}") from outcome.cause


def stopped_early(session: CompiledRun) -> str:
    """Return why a run ends before its last step, or an empty text."""
    if session.hooks is not None and session.hooks.stopped:
        return session.hooks.stopped
    return session.evaluations.stopped


def next_batch(batches: Prefetch[Any, Batch], report: Report, rt: RunContext, step: int) -> Batch:
    """The batch of a step, on the devices.

    Args:
        batches: of the run, the step's next.
        report: gets the time in which the devices had nothing to do.
        rt: whose signals end the wait.
        step: whose batch it is, from 1.

    Raises:
        Interrupted: a signal came first.
        DataError, ReadError: it cannot be read.
    """
    rt.watchdog.waiting(f"the batch of step {step}")
    with reading():
        if batches.ready():
            return next(batches)
        report.fetch()
        began = time.monotonic()  # the end of the last step: from here on the devices wait for data
        while not batches.ready(_LISTEN_S):
            if rt.stop.now():
                raise Interrupted
        batch = next(batches)
        report.waited(time.monotonic() - began)
        return batch


def save_and_evaluate(session: CompiledRun, report: Report, state: TrainState, step: int) -> None:
    """Do what is due after a step; save first: what an evaluation meets, a torn file say, must not cost it.

    Args:
        session: of the run.
        report: gets the rows.
        state: after the step.
        step: steps done.
    """
    config = session.rt.config
    save_need = config.save_need(step)
    evaluates = config.evaluates_after(step)
    if save_need is SaveNeed.NONE and not evaluates:
        return
    with report.paused():
        if save_need is not SaveNeed.NONE:
            save(session, report, state, step, wait=save_need is SaveNeed.REQUIRED)
        if evaluates:
            evaluation(session, report, state, step)


def save(session: CompiledRun, report: Report, state: TrainState, step: int, *, wait: bool) -> None:
    """Start saving, rows first: a checkpoint without its rows would leave a gap in them.

    Args:
        session: of the run.
        report: whose rows are flushed.
        state: to save.
        step: steps done.
        wait: for the save before, however long it takes, rather than leave this one out.

    Raises:
        DriftError: processes hold different copies of the state; nothing is saved.
    """
    session.rt.watchdog.waiting(f"the checkpoint of step {step}")
    if session.copies is not None:
        session.copies.check_save(state, step, session.checkpoints)
    report.flush()
    session.checkpoints.save(step, state, session.data.facts, last=wait)


def interrupted(
    session: CompiledRun, report: Report, state: TrainState, step: int, reason: Exception
) -> None:
    """Save where a signal, unreadable data or a hook ended the run before its last step, and say how to go on.

    Args:
        session: of the run.
        report: shows how to go on.
        state: to save.
        step: steps done; 0 has nothing to save.
        reason: what ended the run: `Interrupted`, a hook's error, or an error of its data.

    Raises:
        DataError, ReadError, HookError: `reason`, where it is one, with what was saved.
    """
    rt, steps = session.rt, session.rt.config.steps
    # Where data fails, it is on one process of several; the others may wait for it within a step.
    alone = isinstance(reason, (Interrupted, HookError)) or rt.processes.count == 1
    if step > 0 and alone:
        save(session, report, state, step, wait=True)
    unsaved = session.checkpoints.wait()
    saved = "not saved" if unsaved else "saved" if step > 0 else "nothing to save"
    if isinstance(reason, Interrupted):
        signal = rt.stop.received.name if rt.stop.received else "a signal"
        how = "the same command goes on" if rt.config.resume else "add --resume to go on"
        report.progress.note(f"stopped by {signal} at step {step} of {steps}, {saved}; {how}")
        return
    saved = saved if alone else f"the newest checkpoint is {session.checkpoints.latest}"
    if isinstance(reason, HookError):
        text = f"{reason}\nstopped at step {step} of {steps}, {saved}; mend the hook and fit the config with resume=True"
        raise HookError(text) from reason.__cause__
    raise type(reason)(
        f"{reason}\nstopped at step {step} of {steps}, {saved}; mend the data and write the command with --resume to go on, "
        "and with --resume-change data where a file was replaced or removed"
    ) from reason


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
    feed: BatchSharding,
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
    with Prefetch(data.eval_batches(*feed.rows), feed.shard_batch) as batches:
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


def evaluation(session: CompiledRun, report: Report, state: TrainState, step: int) -> None:
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
        scores = evaluate(
            session.eval_fn, state.evaluated, session.inputs, session.data, feed, dispatching
        )
        row = {"step": step, **evaluation_row(scores)}
        for name, data in session.sets.items():
            scores = evaluate(
                session.eval_fn, state.evaluated, session.inputs, data, feed, dispatching
            )
            row |= evaluation_row(scores, name)
    report.evaluated(row if state.ema is None else {**row, "eval_weights": "ema"})
    if session.snapshots is not None:
        report.show(step, session.snapshots.take(state, partial(session.rt.dispatching, awaited)))
    measured = session.evaluations.add(row)
    if session.rt.processes.leader:
        session.checkpoints.evaluated({step: measured})
