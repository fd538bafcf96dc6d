"""A run made of another: its whole state on one device, and the folder of a run that goes on from a state."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from mupax import disk
from mupax.train.checkpoints import assets, failures, workdir
from mupax.train.checkpoints.assets import Assets
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.costs import fit
from mupax.train.core.program import Program, assemble
from mupax.train.core.state import TrainState
from mupax.train.reuse.source import WeightsError


def on_one_device(config: Config) -> Program:
    """The program of a config on one device, which serves any run: restoring places the arrays anew."""
    return assemble(dataclasses.replace(config, mesh=MeshConfig(data=1)), jax.local_devices()[:1])


def whole_state(folder: Path, program: Program) -> TrainState:
    """The whole training state of a run's step.

    Args:
        folder: workdir/checkpoints/STEP, whose files are whole.
        program: of the run's config, on one device.

    Raises:
        WeightsError: the checkpoint holds another state than the config says.
    """
    abstract = program.abstract.arrays()
    fit.check_arrays(abstract, f"parameters and optimizer state of {folder}", "Take a machine with more memory")
    stored = failures.metadata(folder.absolute())
    if [leaf.shape for leaf in jax.tree.leaves(stored)] != [leaf.shape for leaf in jax.tree.leaves(abstract)]:
        raise WeightsError(f"{folder}: the checkpoint holds another state than {workdir.RECORD} says")
    return TrainState(**disk.Patience()(lambda: failures.loaded(folder.absolute(), abstract), folder))


def write(
    out: Path, config: Config, preset: str, state: TrainState, facts: dict[str, Any], own: Assets | None = None
) -> int:
    """Write a run that goes on from a state; gives the step.

    Args:
        out: its workdir, new or empty.
        config: of the run to come.
        preset: its preset in words.
        state: of it.
        facts: of its data.
        own: assets of the run that it was made from.

    Raises:
        WorkdirError: the checkpoint could not be saved, or an asset is missing or damaged.
    """
    out, step = out.absolute(), int(state.step)
    files = own.files() if own is not None else {}
    out.mkdir(parents=True, exist_ok=True)
    workdir.record(out, config, facts, preset, {})
    entries = assets.write(out, files) if files else {}
    with Checkpoints(out, config.checkpoint.keep) as checkpoints:
        checkpoints.assets = entries
        checkpoints.save(step, state, facts, last=True)
        if failure := checkpoints.wait():
            raise workdir.WorkdirError(failure)
    return step
