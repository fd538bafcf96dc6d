"""The training loop: data in, steps, metrics, evaluations, checkpoints, and what a finished run leaves behind."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from mupax.train import data as data_sources
from mupax.train.checkpoints import workdir
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.run import Config
from mupax.train.core import nonfinite
from mupax.train.core.nonfinite import BadNumbers
from mupax.train.core.program import Program, assemble
from mupax.train.core.state import TrainState
from mupax.train.core.step import Batch
from mupax.train.data import Data, DataError, ReadError
from mupax.train.parallel import distributed, hardware
from mupax.train.parallel.processes import Processes
from mupax.train.parallel.signals import StopRequest
from mupax.train.parallel.watchdog import Watchdog
from mupax.train.reuse.start import init_from
from mupax.train.run import agreement, resume
from mupax.train.run.evaluate import evaluate
from mupax.train.run.prefetch import Prefetch
from mupax.train.run.report import finish, metrics
from mupax.train.run.report.metrics import MetricsWriter
from mupax.train.run.report.profile import Profile
from mupax.train.run.report.progress import Progress
from mupax.train.run.report.timing import Timing
from mupax.train.run.results import NoWriter, Results
from mupax.zoo import flops
from mupax.zoo.huggingface.tensorfile import read_json

IN_FLIGHT = 2
"""Steps queued on the device before the host waits for the oldest: enough to hide the host's work."""
_LISTEN_S = 0.1
"""How often a run that waits for data looks whether it is to stop."""


def run(config: Config) -> int:
    """Train a config to its last step.

    Returns:
        Exit code: 0 done, 1 the run failed, 130 or 143 stopped by SIGINT or SIGTERM after saving.

    Raises:
        ConfigError, PresetError, MeshError, DataError, WorkdirError: bad input, before the first step.
        SystemExit: stopped by a signal with nothing to save.
    """
    with (
        StopRequest(distributed.joins(config.distributed)) as stop,
        distributed.joined(config.distributed) as processes,
    ):
        stop.join(processes)
        agreement.check_config(config, processes)
        folder, held = workdir.claim_together(config, processes)
        with workdir.locked(folder, processes):
            return _run(init_from.settled(config, folder, held, processes), processes, stop, folder, held)


def _run(config: Config, processes: Processes, stop: StopRequest, folder: Path, held: bool) -> int:
    leader = processes.leader
    console = Console(quiet=not leader)
    program = assemble(config)
    with processes.leader_first("data"):
        data = data_sources.load(config.data, config.model, seed=config.data_seed, note=console.print)
    agreement.check_data(data, processes)

    def record(step: int = 0) -> None:
        if leader:
            flags = program.compiler_options()
            workdir.record(folder, config, data.facts, program.preset.describe(), flags, step)

    before = processes.told("recorded", lambda: read_json(folder / workdir.RECORD)["config"] if held else {})
    start = None if held else init_from.prepare(program)  # what does not fit is refused before anything is written
    if not held:
        record()
    with (
        Watchdog(config.faults.watchdog_seconds) as watchdog,
        Checkpoints(folder, config.checkpoint.keep, processes, console.print) as checkpoints,
    ):
        restored = checkpoints.latest
        if restored is None:
            _announce(console, program, data)
            if config.resume:
                console.print(
                    f"nothing to resume in {folder.name}: "
                    + ("no checkpoint yet, " if held else "")
                    + "starting at step 0"
                )
            start = init_from.prepare(program) if held else start
            if start is not None:
                init_from.show(console, f"starting from {start.source}", start.rows, start.notes)
            state = init_from.initial_state(program, start)
            del start
        else:
            state = checkpoints.restore(program.abstract, expected_facts(config, data))
            restored = int(state.step)  # an earlier one, where the newest was damaged
            resume.check(before, config, restored)
            console.print(f"resuming {config.recipe} at step {restored} of {config.steps}")
        if held:  # Not before it is known that this is the run's data.
            for change in resume.changes(before, config):
                console.print(f"changed since: {change}", style="yellow", highlight=False, markup=False, soft_wrap=True)
            record(restored or 0)
        session = _Session(program, data, folder, checkpoints, console, stop, processes, watchdog)
        try:
            state = session.train(state, restored if restored is not None else 0 if held else None)
        except BadNumbers as failure:
            checkpoints.wait()
            text = failure.told(checkpoints.latest, config.faults)
            Console(stderr=True, quiet=not leader).print(f"error: {text}", style="red", highlight=False)
            return 1
    # Every process has saved its part when process 0 has left the block above; what it was told holds for all.
    if unsaved := processes.told("unsaved", checkpoints.wait):
        Console(stderr=True, quiet=not leader).print(f"error: {unsaved}", style="red", highlight=False)
        return 1
    if stopped := processes.told("stopped", lambda: stop.exit_code):
        return stopped
    stop.release()
    finish.leave(
        program, data, state.evaluated, session.numbers, folder, console, session.seconds, session.facts, leader
    )
    return 0


class _Session:
    """One process' part of a run, from a state to the last step or a signal."""

    def __init__(
        self,
        program: Program,
        data: Data,
        folder: Path,
        checkpoints: Checkpoints,
        console: Console,
        stop: StopRequest,
        processes: Processes,
        watchdog: Watchdog,
    ) -> None:
        self.program, self.config, self.data = program, program.config, data
        self.folder, self.checkpoints, self.console, self.stop = folder, checkpoints, console, stop
        self.processes, self.leader, self.watchdog = processes, processes.leader, watchdog
        self.numbers = program.numbers()
        self.facts: Mapping[str, str] = {}
        """Lines of the summary about how fast it went."""
        self._rollbacks: collections.Counter[int] = collections.Counter()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the session began."""
        return time.monotonic() - self._began

    def train(self, state: TrainState, restored: int | None) -> TrainState:
        """The state after the last step, or where a signal stopped the run; it is saved.

        Args:
            state: to go on from.
            restored: the step of the checkpoint that the state is from, 0 where an earlier part of the run left none, and
                None for a new run.

        Raises:
            BadNumbers: a step ended the run under its policy.
        """
        self.step_fn, self.eval_fn = self._compiled(restored or 0)
        self.compile_seconds = self.seconds
        self.stop.defer()
        evaluated = not self._evaluation_is_due(restored or 0) or self.processes.told(
            "evaluated", lambda: metrics.has_evaluation(self.folder, restored or 0)
        )
        while True:
            try:
                return self._attempt(state, restored, evaluated)
            except BadNumbers as bad:
                state, restored = self._back(bad)
                evaluated = True

    def _attempt(self, state: TrainState, restored: int | None, evaluated: bool) -> TrainState:
        """Train from a state to the end, a signal or a bad step."""
        config, stop, watchdog = self.config, self.stop, self.watchdog
        state = self.program.placed(state, self.step_fn)
        start = step = restored or 0
        failure: DataError | ReadError | None = None
        self.left_out = int(jax.device_get(state.health.left_out))
        timing, feed, going = self._timing(self.compile_seconds), self.program.train_feed(), True
        with (
            self._writer(restored) as writer,
            self._progress(start) as progress,
            Prefetch(self.data.train_batches(start + self.left_out, *feed.rows), feed.put) as batches,
        ):
            self.writer, self.progress = writer, progress
            results = Results(self.data.kind, writer, progress, timing, config.faults, self._culprit, self.left_out)
            with self._profile(results) as profile:
                try:
                    if not evaluated:
                        going = self._evaluate(state, step)
                    while going and step < config.steps:
                        watchdog.waiting(f"the batch of step {step + 1}")
                        with reading():
                            batch = next_batch(batches, results, stop)
                        if batch is None or not stop.claim():
                            going = False
                            break
                        with profile.step(step + 1):
                            state, found = self.step_fn(state, self.numbers, batch)
                        stop.done()
                        step += 1
                        watchdog.waiting(f"step {max(start + 1, step - IN_FLIGHT)}, which the devices work on")
                        results.add(step, found)
                        results.report(IN_FLIGHT)
                        results.check(step - IN_FLIGHT)
                        going = self._save_and_evaluate(results, state, step)
                except (DataError, ReadError) as error:
                    failure, going = error, False
                results.finish()
            results.report_speed(step)
            if not going:
                # Of several processes one alone has failed; the others may wait for it within a step.
                alone = failure is None or self.processes.count == 1
                if step > 0 and alone:
                    self._save(step, state, last=True)
                unsaved = self.checkpoints.wait()
                saved = "not saved" if unsaved else "saved" if step > 0 else "nothing to save"
                if failure is not None:
                    saved = saved if alone else f"the newest checkpoint is {self.checkpoints.latest}"
                    raise type(failure)(
                        f"{failure}\nstopped at step {step} of {config.steps}, {saved}; mend the data and write the command "
                        "with --resume to go on, and with --resume-change data where a file was replaced or removed"
                    ) from failure
                signal = stop.received.name if stop.received else "a signal"
                progress.note(f"stopped by {signal} at step {step} of {config.steps}, {saved}; add --resume to go on")
        self.facts = timing.facts()
        watchdog.waiting("the last checkpoint to be on disk")
        return state

    def _back(self, bad: BadNumbers) -> tuple[TrainState, int]:
        """The newest checkpoint with the data position behind the bad batch.

        The batches since the checkpoint are passed over too: they would lead to the same state and the same step, to the
        bit. So do a kill and a resume, which is why nothing needs to be saved here.

        Raises:
            BadNumbers: where the policy is another, or going back has not helped.
        """
        faults = self.config.faults
        if faults.bad_numbers != "rollback" or bad.in_a_row >= faults.most_in_a_row:
            raise bad
        self.watchdog.waiting("a checkpoint to go back to")
        self.checkpoints.wait()
        restored = self.checkpoints.latest
        state = (
            init_from.initial_state(self.program, init_from.prepare(self.program))
            if restored is None
            else self.checkpoints.restore(self.program.abstract, expected_facts(self.config, self.data))
        )
        step = int(state.step)
        self._rollbacks[step] += 1
        if self._rollbacks[step] > faults.most_in_a_row:
            raise bad
        passed = bad.step - step
        self.console.print(
            f"{bad.what}; back to step {step}, going on {passed} batches later", style="yellow", highlight=False
        )
        position = jax.device_put(np.int32(self.left_out + passed), self.program.layout.whole)
        return state._replace(health=state.health._replace(left_out=position)), step

    def _compiled(self, start: int) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        began = time.monotonic()
        step_fn = self.program.compile_train()
        compiled = step_fn, self.program.compile_eval(step_fn)
        if start < self.config.steps:
            self.console.print(f"compiled in {time.monotonic() - began:.1f} s")
        return compiled

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.config.log.eval_every_steps
        return step > 0 and (step == self.config.steps or (every is not None and step % every == 0))

    def _save_and_evaluate(self, results: Results, state: TrainState, step: int) -> bool:
        """What is due after a step. Whether to go on: False where a signal cut the evaluation short.

        The state is saved first: what the evaluation meets, a torn file say, must not cost it. It is made up on resume.
        """
        evaluate = self._evaluation_is_due(step)
        save = step == self.config.steps or step % self.config.checkpoint.every_steps == 0
        if not (evaluate or save):
            return True
        with results.paused():
            if save:
                # What a rollback goes back to must not depend on how fast the disk is.
                wait = step == self.config.steps or self.config.faults.bad_numbers == "rollback"
                self._save(step, state, last=wait)
            return not evaluate or self._evaluate(state, step)

    def _save(self, step: int, state: TrainState, *, last: bool) -> None:
        """Rows first: a checkpoint whose rows are missing would leave a gap in them."""
        self.watchdog.waiting(f"the checkpoint of step {step}")
        self.writer.flush()
        self.checkpoints.save(step, state, self.data.facts, last=last)

    def _evaluate(self, state: TrainState, step: int) -> bool:
        """Write the row of an evaluation, and whether that was done: False where a signal came first."""

        def begin() -> bool:
            self.watchdog.waiting(f"the evaluation at step {step}")
            return self.stop.claim()

        feed, numbers = self.program.eval_feed(), self.numbers
        with reading():
            scores = evaluate(self.eval_fn, state.evaluated, numbers, self.data, feed, begin=begin, done=self.stop.done)
        if scores is None:
            return False
        row = {"step": step, "eval_loss": scores.loss, "eval_accuracy": scores.accuracy}
        if state.ema is not None:
            row["eval_weights"] = "ema"
        self.writer.write(row)
        self.progress.evaluated(row)
        return True

    def _culprit(self, squares: np.ndarray) -> str | None:
        definition, trained = self.program.definition, self.program.run.factors.lr
        specs = {name: spec for name, spec in definition.specs.items() if name in trained}
        return nonfinite.culprit(squares, specs, definition.abstract)

    def _writer(self, restored: int | None) -> MetricsWriter | NoWriter:
        log = self.config.log
        if not self.leader:
            return NoWriter()
        return MetricsWriter(self.folder, tensorboard=log.tensorboard, wandb=log.wandb, resume_step=restored)

    def _progress(self, start: int) -> Progress:
        config, per_unit = self.config, flops.train_flops(self.config.model)
        return Progress(
            config.steps, start, self.data.kind, self._peak_flops(), per_unit, self.console, config.log.progress
        )

    def _timing(self, compile_seconds: float) -> Timing:
        per_unit = flops.train_flops(self.config.model)
        return Timing(self.data.kind, per_unit, self._peak_flops(), compile_seconds, _memory_peak)

    def _profile(self, results: Results) -> Profile:
        steps = self.config.log.profile_steps if self.leader else None
        return Profile(steps, self.folder / "profile", results.paused, self.progress.note)

    def _peak_flops(self) -> float | None:
        peak = hardware.peak_flops(jax.devices()[0].device_kind, self.config.model.compute.dtype)
        return None if peak is None else peak * self.program.mesh.size


def expected_facts(config: Config, data: Data) -> dict[str, Any] | None:
    """Facts that a checkpoint's data must have; None where any will do."""
    return None if "data" in config.resume_change else data.facts


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """What the machine refuses while data are read is an error of the data too.

    Raises:
        ReadError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ReadError(f"cannot read the data: {error}") from error


def next_batch(batches: Prefetch[dict[str, np.ndarray], Batch], results: Results, stop: StopRequest) -> Batch | None:
    """The next batch, or None where a signal comes first.

    Where it is not there yet, the time from the end of the last step counts as waiting for data.
    """
    if batches.ready:
        return next(batches)
    results.report()
    began = time.monotonic()
    while not batches.wait(_LISTEN_S):
        if stop.now():
            return None
    batch = next(batches)
    results.waited(time.monotonic() - began)
    return batch


def _memory_peak() -> int | None:
    return hardware.memory_peak(jax.local_devices())


def _announce(console: Console, program: Program, data: Data) -> None:
    config = program.config
    mesh = " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items() if size > 1) or "one device"
    console.print(
        f"[bold]{config.recipe}[/bold]: {program.definition.count():,} parameters"
        + (f" ({program.frozen:,} frozen)" if program.frozen else "")
        + f" under {program.preset.name}"
        + (f" relative to {config.preset.base}" if config.preset.base else " in absolute form")
        + f", {config.optimizer.name} at {config.optimizer.peak_lr:g}",
        highlight=False,
    )
    kind = jax.devices()[0].device_kind
    console.print(
        f"{data.facts['name']}: {data.train_size:,} training and {data.eval_size:,} evaluation "
        f"{'sequences' if data.kind == 'tokens' else 'images'}; {mesh} ({kind})",
        highlight=False,
    )
    for caution in program.preset.cautions(program.definition.sizes, program.config.optimizer.name):
        console.print(f"caution: {caution}", style="yellow", highlight=False)
