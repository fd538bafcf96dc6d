"""The training loop: data in, steps, metrics, evaluations, checkpoints, and what a finished run leaves behind."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from rich.console import Console

from train import agreement, devices, distributed, finish, workdir
from train import data as data_sources
from train.checkpoint import Checkpoints
from train.config import Config
from train.data import Data
from train.feed import Feed
from train.metrics import MetricsWriter
from train.processes import Processes
from train.program import Program, assemble
from train.progress import Progress
from train.signals import StopRequest
from train.state import TrainState
from train.step import Batch, Sums
from zoo import flops

_IN_FLIGHT = 2
"""Steps queued on the device before the host waits for the oldest: enough to hide the host's work."""


class Diverged(Exception):
    """The loss is not a number. Carries the text for a person."""


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
            workdir.record(folder, config, data.facts, program.preset.describe())

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
        self.unit: Literal["tokens", "images"] = data.kind
        self.numbers = program.numbers()
        self.pending: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()

    def train(self, state: TrainState, restored: int | None) -> int:
        config, began = self.config, time.monotonic()
        start = restored or 0
        step_fn, eval_fn = self._compiled(start)
        log = config.log
        feed = self.program.train_feed()
        batches = self._on_device(self.data.train_batches(start, *feed.rows), feed)
        with (
            (
                MetricsWriter(self.folder, tensorboard=log.tensorboard, wandb=log.wandb, resume_step=restored)
                if self.leader
                else _Silent()
            ) as writer,
            Progress(
                config.steps,
                start,
                self.unit,
                self._peak_flops(),
                flops.train_flops(config.model),
                self.console,
                log.progress,
            ) as progress,
        ):
            self.writer, self.progress, self.clock = writer, progress, time.monotonic()
            step = start
            while step < config.steps and not self.stop.at(step):
                state, metrics = step_fn(state, self.numbers, next(batches))
                step += 1
                self.pending.append((step, metrics))
                self._report(_IN_FLIGHT)
                last = step == config.steps
                if last or (log.eval_every_steps and step % log.eval_every_steps == 0):
                    self._report(0)
                    self._evaluate(eval_fn, state, step)
                if last or step % config.checkpoint.every_steps == 0:
                    self._report(0)
                    self.checkpoints.save(step, state, self.data.facts)
            self._report(0)
            if self.stop.received:
                self.checkpoints.save(step, state, self.data.facts)
                self.progress.note(
                    f"stopped by {self.stop.received.name} at step {step} of {config.steps}, saved; add --resume to go on"
                )
        batches.close()
        if self.stop.received:
            return self.stop.exit_code
        seconds, params = time.monotonic() - began, state.params
        finish.leave(self.program, self.data, params, self.numbers, self.folder, self.console, seconds, self.leader)
        return 0

    def _compiled(self, start: int) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        began = time.monotonic()
        compiled = self.program.compile_train(), self.program.compile_eval()
        if start < self.config.steps:
            self.console.print(f"compiled in {time.monotonic() - began:.1f} s")
        return compiled

    def _report(self, keep: int) -> None:
        """Write the rows of finished steps, waiting until at most `keep` are still on the device."""
        while len(self.pending) > keep:
            step, metrics = self.pending.popleft()
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            now = time.monotonic()
            seconds, self.clock = now - self.clock, now
            count = int(values.pop("weight"))
            self.writer.write({"step": step, **values, self.unit: count, "seconds": round(seconds, 6)})
            # A gradient that is not a number has already spoiled the parameters, one step before the loss shows it.
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                raise Diverged(
                    f"the loss is {values['loss']:g} and the gradient norm {values['grad_norm']:g} at step {step}; "
                    "nothing after the last checkpoint is kept. "
                    "Lower --optimizer.peak-lr, lengthen --optimizer.warmup-steps, or set --optimizer.clip-norm 1"
                )
            self.progress.update(step=step, loss=values["loss"], lr=values["lr"], units=count, seconds=seconds)

    def _evaluate(self, eval_fn: jax.stages.Compiled, state: TrainState, step: int) -> None:
        total: Sums | None = None
        feed = self.program.eval_feed()
        for batch in self._on_device(self.data.eval_batches(*feed.rows), feed):
            sums = eval_fn(state.params, self.numbers, batch)
            total = sums if total is None else jax.tree.map(np.add, total, jax.device_get(sums))
        assert total is not None, "data without evaluation examples"
        loss, correct, weight = (float(x) for x in jax.device_get(total))
        row = {"step": step, "eval_loss": loss / weight, "eval_accuracy": correct / weight}
        self.writer.write(row)
        self.progress.evaluated(row)
        self.clock = time.monotonic()

    def _on_device(self, batches: Iterator[dict[str, np.ndarray]], feed: Feed) -> Generator[Batch, None, None]:
        """Batches on the mesh, the next one already on its way while this one is used."""
        ahead: Batch | None = None
        try:
            for batch in batches:
                ready, ahead = ahead, feed.put(batch)
                if ready is not None:
                    yield ready
            if ahead is not None:
                yield ahead
        finally:
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]

    def _peak_flops(self) -> float | None:
        peak = devices.peak_flops(jax.devices()[0].device_kind, self.config.model.compute.dtype)
        return None if peak is None else peak * self.program.mesh.size


class _Silent:
    """The metrics of a process that is not the first: nowhere."""

    def write(self, row: dict) -> None:
        pass

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


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
