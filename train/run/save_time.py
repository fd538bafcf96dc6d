"""How long a save takes at the speed of the workdir, for `--dry-run`: a notice of preemption must leave time for one."""

from __future__ import annotations

import secrets
import shutil
import time
from typing import Any, cast

import jax
import numpy as np

from mupax import terminal
from mupax.paths import is_remote, path_of, remove_tree
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.retention import CheckpointConfig
from mupax.train.core.state import TrainState

GRACES = {"a spot machine of Google Cloud": 30, "SLURM's --signal=TERM@120 or a spot machine of AWS": 120}
"""Seconds from SIGTERM to the end, the shortest first."""
_ARRAYS, _MOST = 8, 128 * 2**20
"""Arrays of the state that is saved to see how long that takes, and the most bytes of all of them: seconds on most disks."""


def rows(workdir: str, state: Any) -> dict[str, str]:
    """Rows of the table of costs; a caution where a grace is too short. Saves something into the workdir, and deletes it.

    Args:
        workdir: of the run; where there is none yet, the nearest folder that it will be in.
        state: abstract arrays that a save writes, with shardings.
    """
    size = saved_bytes(state)
    shown = f"{terminal.gib(size)} from this host"
    try:
        took = seconds(workdir, size)
    except Exception as error:  # of any storage: a dry run is not for finding out why
        return {"a save": f"{shown}; its time is unknown, {workdir} takes no test of its speed ({error})"}
    text = f"about {took:.2g} s: {shown}, as measured there now"
    if late := [f"{grace} s that {who} leaves" for who, grace in GRACES.items() if took > grace / 2]:
        text += (
            f". Caution: with the steps under way it may not fit into the {' or the '.join(late)} after SIGTERM; "
            "what is lost is then at most --checkpoint.every-steps. A faster --workdir or more hosts shorten it"
        )
    return {"a save": text}


def saved_bytes(state: Any) -> int:
    """Bytes that this process writes of a state: every shard of its devices once."""
    total = 0
    for leaf in jax.tree.leaves(state):
        shards = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        part = leaf.sharding.shard_shape(leaf.shape)
        total += (
            len({str(index) for index in shards}) * jax.ShapeDtypeStruct(part, leaf.dtype).size * leaf.dtype.itemsize
        )
    return total


def seconds(workdir: str, size: int) -> float:
    """How long a save takes there: one of next to nothing, and one of so many bytes, or of fewer and the rest in proportion.

    Args:
        workdir: where.
        size: bytes of the state.

    Raises:
        OSError: it cannot be written, or would fill the disk.
    """
    folder, part = path_of(workdir), max(min(size, _MOST) // _ARRAYS, 1)
    if not is_remote(folder):
        folder = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        if shutil.disk_usage(folder).free < 4 * part * _ARRAYS:
            raise OSError("it is nearly full")
    probe = folder / f".speed-{secrets.token_hex(4)}"
    try:
        with Checkpoints(probe, CheckpointConfig(keep=1), note=lambda text: None) as checkpoints:
            first, whole = (_saved(checkpoints, step, content) for step, content in enumerate((1, part), 1))
    finally:
        remove_tree(probe)
    return first + whole * size / (part * _ARRAYS)


class _State:
    """What a save asks of a state. Random bytes: neither orbax nor a file system makes less of them."""

    def __init__(self, part: int) -> None:
        self._arrays = {
            str(i): jax.device_put(np.frombuffer(secrets.token_bytes(part), np.uint8)) for i in range(_ARRAYS)
        }

    def arrays(self) -> dict[str, jax.Array]:
        return self._arrays


def _saved(checkpoints: Checkpoints, step: int, part: int) -> float:
    state = _State(part)
    jax.block_until_ready(state.arrays())
    began = time.monotonic()
    checkpoints.save(step, cast("TrainState", state), {}, last=True)
    if failure := checkpoints.wait():
        raise OSError(failure)
    return time.monotonic() - began
