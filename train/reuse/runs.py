"""Runs made of another run: the complete state on one device, and the folder of the new run.

`mupax convert`, `mupax grow` and `--init-from` read and write runs here.
"""

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
"""Files and folders that `write` makes in the folder of a new run."""


def on_one_device(config: Config) -> Program:
    """Return the program of a config on this process's first device, whatever mesh it names.

    The program can restore the checkpoint of any mesh, because restoring places the arrays anew.
    """
    # In a run of several processes, `jax.devices()` begins with a device of process 0.
    return assemble(dataclasses.replace(config, mesh=MeshConfig(data=1)), jax.local_devices()[:1])


def whole_state(folder: Path, program: Program) -> TrainState:
    """Return the training state of a run's checkpoint, read onto one device.

    Args:
        folder: folder of the checkpoint, workdir/checkpoints/STEP, with complete files.
        program: program of the run's config on one device (`on_one_device`).

    Raises:
        WeightsError: array shapes in the checkpoint are not those that the config describes.
        MemoryLimitError: the state does not fit into the host's memory.
    """
    # Checked before anything is read: a clear error in place of a process that the system kills.
    abstract = program.abstract.arrays()
    fit.check_arrays(
        abstract, f"parameters and optimizer state of {folder}", "Take a machine with more memory"
    )

    # Compared before the arrays are read, for a message that names the config.
    stored = checkpoints_folder.metadata(folder.absolute())
    stored_shapes = [leaf.shape for leaf in jax.tree.leaves(stored)]
    expected_shapes = [leaf.shape for leaf in jax.tree.leaves(abstract)]
    if stored_shapes != expected_shapes:
        raise WeightsError(
            f"{folder}: the checkpoint holds another state than {workdir.RECORD} says"
        )

    # Reads of remote disks fail now and then, so they are retried.
    retried = disk.Patience()
    arrays = retried(lambda: checkpoints_folder.loaded(folder.absolute(), abstract), folder)
    return TrainState(**arrays)


def write(
    out: Path,
    command: Sequence[str],
    config: Config,
    preset: str,
    state: TrainState,
    facts: dict[str, Any],
    files: Mapping[str, bytes],
) -> int:
    """Write a new run that continues from a state, completely or not at all. Return its step.

    A folder on this machine also gets a lock file, which stays until the caller calls
    `making.finish`.

    Args:
        out: workdir of the run, missing, empty, or left by a command that was killed.
        command: words of the command line that makes the run.
        preset: description of the preset (`Preset.describe`).
        facts: record of the training data, copied from the run that the state comes from.
        files: content of the run's assets by file name.

    Raises:
        HalfMadeError, OutError: the folder belongs to something else (see `making`).
        DiskError: the disk fails.
    """
    step = int(state.step)
    with making(out.absolute(), command, in_bucket=_ENTRIES) as folder:
        workdir.record(folder, config, facts, preset, {})
        entries = assets.write(folder, files) if files else {}
        with Checkpoints(folder, config.checkpoint) as checkpoints:
            # Set before the save, because the manifest of the checkpoint lists the assets.
            checkpoints.assets = entries
            checkpoints.save(step, state, facts, last=True)
            failure = checkpoints.wait()
            if failure:
                # Raised inside of `making`, which deletes the half-written folder on any error.
                raise disk.DiskError(
                    f"{failure}; nothing is left of {out}: see to the disk, then write the "
                    "command again"
                )
    return step
