"""A run made of another: its whole state on one device, and the folder of a run that goes on from a state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from mupax import disk
from mupax.train.checkpoints import assets, workdir
from mupax.train.checkpoints import folder as checkpoints_folder
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.making import making
from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.costs import fit
from mupax.train.core.program import Program, assemble
from mupax.train.core.state import TrainState
from mupax.train.reuse.source import WeightsError

_ENTRIES = (workdir.RECORD, assets.FOLDER, workdir.CHECKPOINTS)
"""What is written into a run's folder."""


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
    fit.check_arrays(
        abstract, f"parameters and optimizer state of {folder}", "Take a machine with more memory"
    )
    stored = checkpoints_folder.metadata(folder.absolute())
    if [leaf.shape for leaf in jax.tree.leaves(stored)] != [
        leaf.shape for leaf in jax.tree.leaves(abstract)
    ]:
        raise WeightsError(
            f"{folder}: the checkpoint holds another state than {workdir.RECORD} says"
        )
    return TrainState(
        **disk.Patience()(lambda: checkpoints_folder.loaded(folder.absolute(), abstract), folder)
    )


def write(
    out: Path,
    command: Sequence[str],
    config: Config,
    preset: str,
    state: TrainState,
    facts: dict[str, Any],
    files: Mapping[str, bytes],
) -> int:
    """Write a run that goes on from a state, whole or not at all. Return the step.

    Args:
        out: workdir of the run, missing, empty, or left by a command that was killed.
        command: words of the command that makes the run.
        config: config of the run to come.
        preset: the run's preset in words.
        state: the state to go on from.
        facts: facts of the run's data.
        files: content of the run's assets, by name.

    Raises:
        HalfMadeError, OutError, DiskError: as `making`.
    """
    step = int(state.step)
    with making(out.absolute(), command, in_bucket=_ENTRIES) as folder:
        workdir.record(folder, config, facts, preset, {})
        entries = assets.write(folder, files) if files else {}
        with Checkpoints(folder, config.checkpoint) as checkpoints:
            checkpoints.assets = entries
            checkpoints.save(step, state, facts, last=True)
            if failure := checkpoints.wait():
                raise disk.DiskError(
                    f"{failure}; nothing is left of {out}: see to the disk, then write the command again"
                )
    return step
