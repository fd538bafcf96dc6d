"""The training loop: data in, steps, metrics, evaluations, checkpoints, and what a finished run leaves behind."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from train import agreement, devices, distributed, finish, workdir
from train import data as data_sources
from train.checkpoint import Checkpoints
from train.config import Config
from train.data import Data
from train.metrics import MetricsWriter
from train.prefetch import Prefetch
from train.processes import Processes
from train.profile import Profile
from train.program import Program, assemble
from train.progress import Progress
from train.results import Diverged, NoWriter, Results
from train.signals import StopRequest
from train.state import TrainState
from train.step import Batch, Sums
from train.timing import Timing
from zoo import flops

IN_FLIGHT = 2
"""Steps queued on the device before the host waits for the oldest: enough to hide the host's work."""


def run(config: Config) -> int:
    """Train a config to its last step.

    Returns:
        Exit code: 0 done, 1 the run failed, 130 or 143 stopped by SIGINT or SIGTERM after saving.

    Raises:
        ConfigError, PresetError, MeshError, DataError, WorkdirError: bad input, before the first step.
    """
    with distributed.joined(config.distributed) as processes:
        return _run(config, processes)


def _run(config: Config, processes: Processes) -> int:
    leader = processes.leader
    console = Console(quiet=not leader)
    agreement.check_config(config, processes)
    folder, held = workdir.claim_together(config, processes)
    program = assemble(config)
    with processes.leader_first("data"):
        data = data_sources.load(config.data, config.model, seed=config.seed, note=console.print)
    agreement.check_data(data, processes)

    def record() -> None:
        if leader:
            flags = program.compiler_options()
            workdir.record(folder, config, data.facts, program.preset.describe(), flags)

    if not held:
        record()
    with StopRequest(processes.count > 1) as stop, Checkpoints(folder, config.checkpoint.keep) as checkpoints:
        restored = checkpoints.latest
        if restored is None:
            _announce(console, program, data)
            if config.resume:
                console.print(
                    f"nothing to resume in {folder.name}: "
                    + ("no checkpoint yet, " if held else "")
                    + "starting at step 0"
                )
            state = program.initial_state()
        else:
            state = checkpoints.restore(program.abstract, data.facts)
            console.print(f"resuming {config.recipe} at step {restored} of {config.steps}")
        if held:  # Not before it is known that this is the run's data.
            record()
        try:
            return _Session(program, data, folder, checkpoints, console, stop, leader).train(state, restored)
        except Diverged as failure:
            Console(stderr=True, quiet=not leader).print(f"error: {failure}", style="red")
            return 1


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
        leader: bool,
    ) -> None:
        self.program, self.config, self.data = program, program.config, data
        self.folder, self.checkpoints, self.console, self.stop, self.leader = folder, checkpoints, console, stop, leader
        self.numbers = program.numbers()

    def train(self, state: TrainState, restored: int | None) -> int:
        config, began = self.config, time.monotonic()
        start = step = restored or 0
        step_fn, eval_fn = self._compiled(start)
        timing = self._timing(time.monotonic() - began)
        feed = self.program.train_feed()
        with (
            self._writer(restored) as writer,
            self._progress(start) as progress,
            Prefetch(self.data.train_batches(start, *feed.rows), feed.put) as batches,
        ):
            self.writer, self.progress = writer, progress
            results = Results(self.data.kind, writer, progress, timing)
            with self._profile(results) as profile:
                while step < config.steps and not self.stop.at(step):
                    batch = next_batch(batches, results)
                    with profile.step(step + 1):
                        state, metrics = step_fn(state, self.numbers, batch)
                    step += 1
                    results.add(step, metrics)
                    results.report(IN_FLIGHT)
                    self._evaluate_and_save(results, eval_fn, state, step)
                results.report()
            results.report_speed(step)
            if self.stop.received:
                self.checkpoints.save(step, state, self.data.facts)
                self.progress.note(
                    f"stopped by {self.stop.received.name} at step {step} of {config.steps}, saved; add --resume to go on"
                )
        if self.stop.received:
            return self.stop.exit_code
        seconds, params = time.monotonic() - began, state.evaluated
        finish.leave(
            self.program,
            self.data,
            params,
            self.numbers,
            self.folder,
            self.console,
            seconds,
            timing.facts(),
            self.leader,
        )
        return 0

    def _compiled(self, start: int) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        began = time.monotonic()
        compiled = self.program.compile_train(), self.program.compile_eval()
        if start < self.config.steps:
            self.console.print(f"compiled in {time.monotonic() - began:.1f} s")
        return compiled

    def _evaluate_and_save(self, results: Results, eval_fn: jax.stages.Compiled, state: TrainState, step: int) -> None:
        """What is due after a step."""
        last, every = step == self.config.steps, self.config.log.eval_every_steps
        evaluate = last or (every is not None and step % every == 0)
        save = last or step % self.config.checkpoint.every_steps == 0
        if not (evaluate or save):
            return
        with results.paused():
            if evaluate:
                self._evaluate(eval_fn, state, step)
            if save:
                self.checkpoints.save(step, state, self.data.facts)

    def _evaluate(self, eval_fn: jax.stages.Compiled, state: TrainState, step: int) -> None:
        total: Sums | None = None
        feed = self.program.eval_feed()
        with Prefetch(self.data.eval_batches(*feed.rows), feed.put) as batches:
            for batch in batches:
                sums = eval_fn(state.evaluated, self.numbers, batch)
                total = sums if total is None else jax.tree.map(np.add, total, jax.device_get(sums))
        assert total is not None, "data without evaluation examples"
        loss, correct, weight = (float(x) for x in jax.device_get(total))
        row = {"step": step, "eval_loss": loss / weight, "eval_accuracy": correct / weight}
        if state.ema is not None:
            row["eval_weights"] = "ema"
        self.writer.write(row)
        self.progress.evaluated(row)

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
        peak = devices.peak_flops(jax.devices()[0].device_kind, self.config.model.compute.dtype)
        return None if peak is None else peak * self.program.mesh.size


def next_batch(batches: Prefetch[dict[str, np.ndarray], Batch], results: Results) -> Batch:
    """The next batch. Where it is not there yet, the time from the end of the last step counts as waiting for data."""
    if not batches.ready:
        results.report()
        began = time.monotonic()
        batch = next(batches)
        results.waited(time.monotonic() - began)
        return batch
    return next(batches)


def _memory_peak() -> int | None:
    return devices.memory_peak(jax.local_devices())


def _announce(console: Console, program: Program, data: Data) -> None:
    config = program.config
    mesh = " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items() if size > 1) or "one device"
    console.print(
        f"[bold]{config.recipe}[/bold]: {program.definition.count():,} parameters under {program.preset.name}"
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
