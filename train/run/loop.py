"""A training run, from its config to its last checkpoint. `run` reads as the story of a run.

`runtime.py` has what surrounds a run, `start.py` what it starts with. `evaluate` is also used by
`mupax eval`.
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

_FREE_SECONDS = 0.005
"""Time for a CPU to free a step's temporaries, if memory has no room for those of two steps."""
_POLL_SECONDS = 0.1
"""How often a run that waits for data checks for a stop signal."""


def run(config: Config, hooks: Hooks | None = None) -> int:
    """Train a config to its last step, with evaluations and checkpoints, and write its results.

    With `resume` the run in the workdir goes on. A loss curve, a sample and a summary are made only
    if the run neither failed nor was stopped by a signal.

    Args:
        config: Config with a workdir (`Config.resolved`).
        hooks: Functions to call after steps (`fit` makes them). Default none.

    Returns:
        Exit code: 0 when done, 1 if the run failed, 128 + signal number if a signal stopped it,
        after saving.

    Raises:
        ConfigError, PresetError, MeshError, DataError, WorkdirError: Bad input, before the first
            step.
        MupaxError: An extra is not installed. Raised before anything is prepared.
        MemoryLimitError: The run needs more memory than there is. Raised before the first step.
        OutOfMemory: Memory ran out all the same.
        DataError, ReadError: Data cannot be read later on. With one process the state is saved
            first, with several it is not.
        HookError: A hook failed. The state is saved first.
        SystemExit: A signal came before there was anything to save.
    """
    # A module that is only being imported, such as a plugin, must not start a run.
    refuse_while_importing()
    check_extras(config)
    with runtime(config) as context:
        config = context.config  # a resumed run has its recorded `init`
        program = assemble(config)
        # Checked before the data is prepared, which may take long.
        check_state(program, memory_limit(program, context, "start"))
        data = load_data(program, context)
        evaluation_sets = load_sets(program, data, context)
        # Measured again, because data may stay in memory.
        limit = memory_limit(program, context, "data")
        with (
            Checkpoints(
                context.folder,
                config.checkpoint,
                processes=context.processes,
                log=context.console.print,
                before_publish=context.send,
            ) as checkpoints,
            out_of_memory(program),
        ):
            # Inside of `out_of_memory`, because the state is the first large allocation.
            start = start_state(program, data, evaluation_sets, checkpoints, context)
            session = compiled(program, data, evaluation_sets, checkpoints, context, start, limit)
            if hooks is not None:
                session = dataclasses.replace(session, hooks=hooks.begin(context))
            if start.step < config.steps:
                context.console.print(f"compiled in {session.compile_seconds:.1f} s")
            # From here on there is a state to save. A first signal no longer ends the process: the
            # run saves, and then ends.
            context.stop.defer()
            try:
                state = train_with_rollbacks(session, start)
            except RejectedStep as rejected:
                # The message names the newest checkpoint, which may still be on its way to disk.
                checkpoints.wait()
                return context.fail(rejected.message(checkpoints.latest, config.faults))

        # Process 0 leaves the block above when every process has saved its part, so its result
        # holds for all processes.
        unsaved = context.processes.broadcast("unsaved", checkpoints.wait)
        if unsaved:
            return context.fail(unsaved)
        stopped = context.processes.broadcast("stopped", lambda: context.stop.exit_code)
        if stopped:
            return stopped
        # Everything is saved, so a signal may end the process while pictures are drawn.
        context.stop.release()
        finish.leave(session, state.evaluated)
        return 0


def train_with_rollbacks(session: CompiledRun, start: StartState) -> TrainState:
    """Train to the last step, going back to the newest checkpoint after a bad step if allowed.

    A rollback skips the batches from the checkpoint to the bad step, which would lead to the same
    bad step again, bitwise. For the same reason nothing about a rollback has to be saved: a run
    that is killed and resumed repeats the rollback.

    Args:
        session: Compiled run. `faults.bad_numbers` of its config is the policy for bad steps.
        start: State to start from. Its arrays are donated to the first step.

    Returns:
        State after the last step, or after the step at which the run was stopped.

    Raises:
        RejectedStep: A bad step ends the run, or `faults.most_in_a_row` rollbacks to one checkpoint
            did not help.
        DataError, ReadError: The data cannot be read.
        HookError: A hook failed.
    """
    context = session.context
    faults = context.config.faults
    rollbacks_to_step = collections.Counter[int]()
    while True:
        # Read before `train`, which donates the arrays of the state.
        skipped_batches = int(jax.device_get(start.state.health.left_out))
        try:
            return train(session, start)
        except RejectedStep as rejected:
            if faults.bad_numbers != "rollback" or rejected.in_a_row >= faults.most_in_a_row:
                raise
            context.watchdog.waiting("a checkpoint to go back to")
            # A checkpoint on its way to disk is newer than any that is there.
            session.checkpoints.wait()
            state = restore_latest(session.program, session.data, session.checkpoints)
            step = int(state.step)
            # Counted per checkpoint: a later one shows that the run got past the bad batches.
            rollbacks_to_step[step] += 1
            if rollbacks_to_step[step] > faults.most_in_a_row:
                raise
            batches_later = rejected.step - step
            context.console.print(
                f"{rejected.what}; back to step {step}, going on {batches_later} batches later",
                style="yellow",
                highlight=False,
            )
            skipped_batches += batches_later
            replicated = session.program.layout.replicated
            left_out = jax.device_put(np.int32(skipped_batches), replicated)
            health = state.health._replace(left_out=left_out)
            start = StartState(state._replace(health=health), step, keep_metrics=True)


def train(session: CompiledRun, start: StartState) -> TrainState:
    """Train to the last step, or until a signal, early stopping or a hook ends the run, and save.

    Args:
        start: State to start from, or to go back to after a rollback. Its arrays are donated to
            the first step.

    Returns:
        State after the last step that was done.

    Raises:
        RejectedStep: A bad step ends the run or causes a rollback, depending on the policy.
        DataError, ReadError: The data cannot be read. The state is saved first, but not if other
            processes may be waiting for this one.
        HookError: A hook failed. The state is saved first.
    """
    program = session.program
    context = session.context
    num_steps = context.config.steps
    state = program.placed(start.state, session.step_fn)
    step = start.step
    # After a rollback, evaluations of later steps are done again.
    session.evaluations.go_back(step)
    if session.snapshots is not None:
        session.snapshots.begin(state.params)

    batch_sharding = program.train_feed()
    skipped_batches = int(jax.device_get(state.health.left_out))
    # The position in the data is the step, moved on by the batches that rollbacks have skipped.
    source = session.data.train_batches(step + skipped_batches, *batch_sharding.rows)
    reason: Exception | None = None
    with (
        Report(
            program, session.data, context, start, session.compile_seconds, skipped_batches
        ) as report,
        Prefetch(source, batch_sharding.shard_batch) as batches,
    ):
        try:
            if not start.evaluated:
                evaluation(session, report, state, step)
            while step < num_steps and not stopped_early(session):
                batch = next_batch(batches, report, context, step + 1)
                # Steps that are queued wait for the oldest one, which may be the one that hangs.
                oldest = max(start.step, step - session.in_flight) + 1
                awaited = f"step {oldest}, which the devices work on"
                with context.dispatching(awaited, STEP), report.profile.step(step + 1):
                    state, metrics = session.step_fn(state, session.inputs, batch)
                step += 1
                report.add(step, metrics)
                report.fetch(session.in_flight)
                if session.in_flight == 0:
                    # The CPU backend reports a step as done shortly before it frees temporaries.
                    time.sleep(_FREE_SECONDS)
                # Every process has fetched the steps up to `step - in_flight` by now, so that a bad
                # one among them stops all processes here.
                report.check(step - session.in_flight)
                save_and_evaluate(session, report, state, step)
                call_hooks(session, report, state, step)
        except (Interrupted, DataError, ReadError, HookError) as error:
            reason = error
        # Wait for all steps first: a bad one among them must not be saved.
        report.finish()
        if reason is not None:
            interrupted(session, report, state, step, reason)
        elif stopped_early(session):
            # A resumed run that has stopped early before writes no second row about it.
            is_new = step > start.step or not start.evaluated
            _stop_early(session, report, state, step, write_row=is_new)

    session.speed.update(report.timing.facts())
    context.watchdog.waiting("the last checkpoint to be on disk")
    return state


def next_batch(
    batches: Prefetch[Any, Batch], report: Report, context: RunContext, step: int
) -> Batch:
    """Wait for the next batch and return it, on the devices.

    If the batch is not ready, first wait for all steps on the devices and report them.

    Args:
        batches: Prefetched batches. The next one belongs to `step`.
        report: Report that counts the seconds in which the devices wait for the batch.
        context: Context with the watchdog, and with the stop signal that ends the wait.
        step: Step that the batch is for, counted from 1.

    Raises:
        Interrupted: A signal came before the batch.
        DataError, ReadError: The data cannot be read.
    """
    context.watchdog.waiting(f"the batch of step {step}")
    with reading():
        if batches.ready():
            return next(batches)
        # Fetching waits for all steps in flight, so from here on the devices wait for data.
        report.fetch()
        wait_start = time.monotonic()
        while not batches.ready(_POLL_SECONDS):
            if context.stop.now():
                raise Interrupted
        batch = next(batches)
        report.waited(time.monotonic() - wait_start)
        return batch


def save_and_evaluate(session: CompiledRun, report: Report, state: TrainState, step: int) -> None:
    """Save a checkpoint, then evaluate, each if it is due after a step.

    Args:
        session: Compiled run. Its config says when to save and to evaluate.
        step: Number of steps done.
    """
    config = session.context.config
    save_need = config.save_need(step)
    saves = save_need is not SaveNeed.NONE
    evaluates = config.evaluates_after(step)
    if not saves and not evaluates:
        return
    with report.paused():
        # Save first: an evaluation may fail, for example on a damaged data file, and must not cost
        # the checkpoint.
        if saves:
            save(session, report, state, step, wait=save_need is SaveNeed.REQUIRED)
        if evaluates:
            evaluation(session, report, state, step)


def save(session: CompiledRun, report: Report, state: TrainState, step: int, *, wait: bool) -> None:
    """Write all rows of metrics to disk, and start saving a checkpoint of the state.

    With several processes, which all call this, first check that their copies of the state are
    equal. Nothing is saved again if the newest save is of this step. A save that fails prints a
    line and raises nothing.

    Args:
        step: Number of steps done.
        wait: Whether to wait for the previous save for as long as it takes. Otherwise this
            checkpoint is left out, with a printed line, if the previous save is not on disk after
            30 seconds.

    Raises:
        DriftError: Processes hold different copies of the state. Nothing is saved.
    """
    session.context.watchdog.waiting(f"the checkpoint of step {step}")
    if session.copies is not None:
        session.copies.check_save(state, step, session.checkpoints)
    # Flush first: a checkpoint without its rows would leave a gap in the metrics after a resume.
    report.flush()
    session.checkpoints.save(step, state, session.data.facts, last=wait)


def call_hooks(session: CompiledRun, report: Report, state: TrainState, step: int) -> None:
    """Call the user's hooks that are due after a step, and write the values that they log.

    Without such hooks nothing happens. With them, all steps on the devices are waited for first.

    Args:
        step: Number of steps done.

    Raises:
        HookError: A hook failed, on this process or on another.
        RejectedStep: A step up to this one is bad, under the policy of the run.
    """
    if session.hooks is None or not session.hooks.due(step):
        return
    with report.paused():
        outcome = session.hooks.call(session.context, state, step)
    if outcome.values:
        report.logged(step, outcome.values)
    if outcome.failure:
        raise HookError(f"the hook {outcome.failure}") from outcome.cause


def stopped_early(session: CompiledRun) -> str:
    """Return why a hook or the evaluations (`stop.patience`) end the run early, or ""."""
    if session.hooks is not None and session.hooks.stopped:
        return session.hooks.stopped
    return session.evaluations.stopped


def _stop_early(
    session: CompiledRun, report: Report, state: TrainState, step: int, *, write_row: bool
) -> None:
    """Save at the step at which early stopping or a hook ends the run, and print how to go on.

    Args:
        write_row: Whether to write a row with the reason to metrics.jsonl.
    """
    reason = stopped_early(session)
    if write_row:
        report.stopped(step, reason)
    save(session, report, state, step, wait=True)
    if session.hooks is not None and session.hooks.stopped == reason:
        advice = "add --resume"
    else:
        advice = "add --resume with a larger --stop.patience or without it"
    num_steps = session.context.config.steps
    report.progress.note(
        f"stopped early at step {step} of {num_steps}: {reason}; to go on, {advice}"
    )


def interrupted(
    session: CompiledRun, report: Report, state: TrainState, step: int, reason: Exception
) -> None:
    """Save after a signal, a data error or a hook's error ended the run, and say how to go on.

    After a data error with several processes nothing is saved, because others may wait for this
    one. Otherwise this waits until the checkpoint is on disk, or has failed.

    Args:
        report: Report that prints how to go on after a signal.
        step: Number of steps done. Nothing is saved at step 0.
        reason: `Interrupted` after a signal, otherwise the error of a hook or of the data.

    Raises:
        DataError, ReadError, HookError: `reason`, if it is one, with a text that also says what was
            saved.
    """
    context = session.context
    num_steps = context.config.steps
    # Signals and hooks stop all processes at the same step. After a data error in one of several
    # processes, the others may be waiting for it inside a step, so it cannot save.
    can_save = isinstance(reason, (Interrupted, HookError)) or context.processes.count == 1
    if can_save and step > 0:
        save(session, report, state, step, wait=True)
    unsaved = session.checkpoints.wait()
    if unsaved:
        outcome = "not saved"
    elif step > 0:
        outcome = "saved"
    else:
        outcome = "nothing to save"

    if isinstance(reason, Interrupted):
        signal = context.stop.received.name if context.stop.received else "a signal"
        advice = "the same command goes on" if context.config.resume else "add --resume to go on"
        report.progress.note(
            f"stopped by {signal} at step {step} of {num_steps}, {outcome}; {advice}"
        )
        return

    if not can_save:
        outcome = f"the newest checkpoint is {session.checkpoints.latest}"
    text = f"{reason}\nstopped at step {step} of {num_steps}, {outcome}"
    if isinstance(reason, HookError):
        text += "; mend the hook and fit the config with resume=True"
        raise HookError(text) from reason.__cause__
    text += (
        "; mend the data and write the command with --resume to go on, "
        "and with --resume-change data where a file was replaced or removed"
    )
    # The class decides about the exit code, so the new error has the class of the old one.
    raise type(reason)(text) from reason


class Scores(dict[str, float]):
    """Metrics of an evaluation by name, in the order of `METRICS`.

    Attributes:
        targets: Number of targets that the metrics are averaged over.
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
    """Run the evaluation step on all evaluation examples. Return metrics averaged over targets.

    Every process of a run calls this function. Each reads its own rows of every batch, and gets the
    metrics over the rows of all.

    Args:
        eval_fn: Evaluation step (`Program.compile_eval`).
        inputs: Other inputs of the evaluation step (`Program.step_inputs`).
        data: Data with at least one evaluation example.
        feed: Sharding of evaluation batches (`Program.eval_feed`).
        dispatching: Context manager to enter around each batch's program. An exception that it
            raises ends the evaluation. Default none.
        observer: Function to call with each batch, on the devices. Default none.
    """
    total: LossSums | None = None
    with Prefetch(data.eval_batches(*feed.rows), feed.shard_batch) as batches:
        for batch in batches:
            with dispatching():
                # Fetched at once: on a CPU a queued batch already holds its temporaries.
                sums = jax.device_get(eval_fn(params, inputs, batch))
            if observer is not None:
                observer(batch)
            if total is None:
                total = sums
            else:
                total = jax.tree.map(np.add, total, sums)
    assert total is not None, "data without evaluation examples"

    weight = float(total.weight)
    means = {name: float(value) / weight for name, value in total.metrics.items()}
    values = metric_values(float(total.loss) / weight, means, data.bytes_per_target)
    num_targets = int(weight) if math.isfinite(weight) else 0
    return Scores(values, num_targets)


def evaluation(session: CompiledRun, report: Report, state: TrainState, step: int) -> None:
    """Evaluate a state on the run's data and its further sets, and write one row of metrics.

    Every process of the run calls this, and process 0 writes the row. Images and histograms are
    shown if the config asks for them. The metrics are also added to `session.evaluations`, which
    may stop the run early. If the run keeps its best checkpoints (`keep_best`), they are written
    into the checkpoint of the step, and checkpoints that are no longer kept are deleted.

    Args:
        session: Compiled run with its data and its further evaluation sets.
        state: State to evaluate. If it has a moving average of the parameters, that is evaluated.
        step: Number of steps done.

    Raises:
        Interrupted: A signal came first.
        DataError, ReadError: The data cannot be read.
    """
    context = session.context
    batch_sharding = session.program.eval_feed()
    awaited = f"the evaluation at step {step}"
    dispatching = partial(context.dispatching, awaited, EVALUATION)

    def scores_on(data: Data) -> Scores:
        return evaluate(
            session.eval_fn, state.evaluated, session.inputs, data, batch_sharding, dispatching
        )

    with reading():
        row = {"step": step, **evaluation_row(scores_on(session.data))}
        for name, data in session.sets.items():
            row |= evaluation_row(scores_on(data), name)
    if state.ema is None:
        report.evaluated(row)
    else:
        report.evaluated({**row, "eval_weights": "ema"})

    if session.snapshots is not None:
        # The programs of snapshots are compiled when they first run, so their waits have no limit.
        media = session.snapshots.take(state, partial(context.dispatching, awaited))
        report.show(step, media)
    measured = session.evaluations.add(row)
    if context.processes.leader:
        session.checkpoints.write_metrics_and_prune({step: measured})
