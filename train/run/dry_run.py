"""`--dry-run`: what a run would do, from shapes alone. Nothing is downloaded; a save of its own tells how fast the workdir is.

A notice of preemption must leave time for a save, so the time of one is shown.
"""

from __future__ import annotations

import itertools
import math
import secrets
import shutil
import time
from typing import Any, cast

import jax
import numpy as np

from mupax import terminal
from mupax.disk import is_remote, path_of, remove_tree
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config import joint
from mupax.train.config.run import Config, check_extras
from mupax.train.config.sections import CheckpointConfig
from mupax.train.core.costs import fit
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.parallel.sharding import described
from mupax.zoo import families

GRACES = {
    "a spot machine of Google Cloud": 30,
    "SLURM's --signal=TERM@120 or a spot machine of AWS": 120,
}
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
        return {
            "a save": f"{shown}; its time is unknown, {workdir} takes no test of its speed ({error})"
        }
    text = f"about {took:.2g} s: {shown}, as measured there now"
    if late := [
        f"{grace} s that {who} leaves" for who, grace in GRACES.items() if took > grace / 2
    ]:
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
            len({str(index) for index in shards})
            * jax.ShapeDtypeStruct(part, leaf.dtype).size
            * leaf.dtype.itemsize
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
        folder = next(
            parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir()
        )
        if shutil.disk_usage(folder).free < 4 * part * _ARRAYS:
            raise OSError("it is nearly full")
    probe = folder / f".speed-{secrets.token_hex(4)}"
    try:
        with Checkpoints(probe, CheckpointConfig(keep=1), log=lambda text: None) as checkpoints:
            first, whole = (
                _saved(checkpoints, step, content) for step, content in enumerate((1, part), 1)
            )
    finally:
        remove_tree(probe)
    return first + whole * size / (part * _ARRAYS)


class _State:
    """What a save asks of a state. Random bytes: neither orbax nor a file system makes less of them."""

    def __init__(self, part: int) -> None:
        self._arrays = {
            str(i): jax.device_put(np.frombuffer(secrets.token_bytes(part), np.uint8))
            for i in range(_ARRAYS)
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


def run(config: Config, published_use: str | None = None) -> int:
    """Print the run's shapes, its preset's table, its cost and its memory; returns the exit code 0.

    Args:
        config: of the run.
        published_use: the published preset that it names, whose source's table is shown beside the run's.

    Raises:
        ConfigError, PresetError, MeshError, MupaxError: what does not fit or is not installed, as the run itself would say.
    """
    check_extras(config, reads_data=False)
    program = fit.program_of(config)
    if config.recipe:
        terminal.say(f"{config.recipe}: {program.preset.describe()}")
    print(_parameters(program))
    if published_use is not None:
        _print_beside_source(program, published_use)
    cautions = program.preset.cautions(program.definition.sizes, program.config.optimizer.name)
    if config.preset.joint != "none":
        terminal.say(f"{joint.described(config)}\n")
        cautions += joint.cautions(config)
    for caution in cautions:
        terminal.say(f"caution: {caution}")
    print(_costs(program))
    return 0


def _parameters(program: Program) -> str:
    # Short heads and no column for the sharding: 80 columns hold most models' rows.
    title = "parameters" + (" (a/b in a shape: split b ways)" if program.mesh.size > 1 else "")
    rows = [["name", "shape", "mult.", "std", "lr", "eps", "decay"]]
    optimizer, factors = program.config.scaled_optimizer, program.inputs.factors
    decay = program.inputs.hyper.weight_decay
    for name, leaf in program.abstract.params.items():
        numbers = [factors.multiplier[name], program.stds[name]]
        if name in program.trained:
            numbers += [
                factors.lr[name] * optimizer.peak_lr,
                factors.eps[name] * optimizer.eps,
                factors.weight_decay[name] * decay,
            ]
        axes = itertools.zip_longest(leaf.shape, leaf.sharding.spec)
        shape = "x".join(
            f"{size}/{program.mesh.shape[axis]}" if axis else str(size) for size, axis in axes
        )
        cells = [*map(_number, numbers), *([] if name in program.trained else ["frozen", "", ""])]
        rows.append([name, shape, *cells])
    return f"{title}\n{terminal.table(rows, left=('name', 'shape'))}\n"


def _print_beside_source(program: Program, published_use: str) -> None:
    """Print the numbers of every group beside those of the nearest model of a published source."""
    from mupax.presets.tuned import find, published

    if published_use not in find.files():  # a file that was named by its path
        return
    tuned = find.find(published_use)
    sizes = program.definition.sizes
    table = published.nearest(tuned, sizes["embed"])
    source = tuned.provenance["source"]["name"]
    head = f"in absolute numbers, and in brackets those of {source}, {table['model']}: {table['where']}"
    numbers = program.inputs.factors
    optimizer = program.config.scaled_optimizer
    groups = {
        spec.group: {
            "multiplier": float(numbers.multiplier[name].flat[0]),
            "std": float(program.stds[name].flat[0]),
            "lr": float(numbers.lr[name].flat[0]) * optimizer.peak_lr,
            "eps": float(numbers.eps[name].flat[0]) * optimizer.eps,
            "wd": float(numbers.weight_decay[name].flat[0])
            * float(program.inputs.hyper.weight_decay),
        }
        for name, spec in program.definition.specs.items()
        if name in program.trained
    }
    terminal.say(head)
    print(f"{terminal.table(published.comparison(groups, table), left=('group',))}\n")


def _number(number: np.ndarray) -> str:
    """One number, or those of the first and the last layer where they differ."""
    first, last = float(number.flat[0]), float(number.flat[-1])
    return f"{first:.3g}" if first == last else f"{first:.2g}..{last:.2g}"


def _costs(program: Program) -> str:
    config, model = program.config, program.config.model
    unit, per_step = model.unit, config.data.batch_size * model.units
    train_flops = families.train_flops(model)
    leaves = jax.tree.leaves(program.abstract)
    state = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
    costs = {
        "parameters": f"{program.definition.count():,}"
        + (f", {program.frozen:,} of them frozen" if program.frozen else ""),
        "batch": f"{config.data.batch_size} {f'x {model.units} ' if model.units > 1 else ''}{unit}s",
        "steps": f"{config.steps:,}, {config.steps * per_step:,} {unit}s",
        "FLOPs": f"{train_flops:.3g} per {unit}, {train_flops * per_step * config.steps:.3g} in all",
        "mesh": f"{described(program.mesh.shape)} ({program.mesh.devices.flat[0].device_kind})",
        "state per device": terminal.gib(state),
    }
    if warmup := config.scaled_optimizer.warmup_steps:
        costs["warm-up"] = f"{warmup:,} steps, {warmup * per_step:,} {unit}s"
    if program.inputs.hyper.weight_decay:
        costs["decay averages"] = joint.decay_text(config.scaled_optimizer, config.steps)
    absent = program.mesh.size - jax.device_count()
    if absent > 0:
        costs["mesh"] += f"; {absent} of them are not here, where a run would be refused"
    if usage := fit.needs(program):
        how = "compiled for this mesh" if usage.compiled else "estimated from the step of one"
        costs["step needs"] = (
            f"{terminal.gib(usage.temporary)} for activations and gradients, {how}"
        )
        if usage.saved:
            costs["a checkpoint needs"] = (
                f"{terminal.gib(usage.saved)} for a copy of the state while steps go on"
            )
        costs["peak per device"] = f"about {terminal.gib(usage.peak)}"
        limit = fit.room(program.mesh.devices.flat[0])
        if limit:
            problem = fit.verdict(program, usage, limit)
            costs["does not fit" if problem else "fits"] = (
                problem or f"{terminal.gib(limit)} a device"
            )
    costs |= rows(config.workdir or f"runs/{config.recipe}", program.abstract)
    return f"cost\n{terminal.table([*costs.items()], indent=1)}"
