"""What all steps of one run have in common: its program, data, surroundings, and the two executables."""

from __future__ import annotations

import dataclasses
import time

import jax

from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.core.program import Program
from mupax.train.core.step import StepInputs
from mupax.train.data import Data
from mupax.train.run.runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Session:
    """One run on its devices (`compiled` makes it)."""

    program: Program
    data: Data
    checkpoints: Checkpoints
    rt: Runtime
    step_fn: jax.stages.Compiled
    eval_fn: jax.stages.Compiled
    inputs: StepInputs
    """Numbers of the step, on the devices."""
    began: float
    """On the monotonic clock, before compiling."""
    compile_seconds: float
    speed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Lines of the summary about how fast it went, by their label; those of the last attempt."""


def compiled(program: Program, data: Data, checkpoints: Checkpoints, rt: Runtime) -> Session:
    """The session of a run, its two programs compiled: the only compilations that the run does."""
    began, step_fn = time.monotonic(), program.compile_train()
    eval_fn = program.compile_eval(step_fn)
    seconds = time.monotonic() - began
    return Session(program, data, checkpoints, rt, step_fn, eval_fn, program.numbers(), began, seconds)
