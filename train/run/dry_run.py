"""`mupax train --dry-run`: what a run would do and need, from the shapes of its arrays.

Nothing is downloaded. The source of `--init-from` is read, as the run reads it. Only a short save
into the workdir is done, to measure its time: after a notice of preemption there must be time for a
save.
"""

from __future__ import annotations

import itertools
import math
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from mupax import terminal
from mupax.disk import is_remote, path_of, remove_tree
from mupax.memory import MemoryLimitError
from mupax.terminal import counted
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.folder import CHECKPOINTS, steps
from mupax.train.config import joint
from mupax.train.config.run import Config, check_extras
from mupax.train.config.sections import CheckpointConfig
from mupax.train.core.costs import fit
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.parallel.processes import Processes
from mupax.train.parallel.sharding import described
from mupax.zoo import families

GRACES = {
    "a spot machine of Google Cloud": 30,
    "SLURM's --signal=TERM@120 or a spot machine of AWS": 120,
    "the JobSet of scripts/launch/gke.sh": 300,
}
"""Machine or scheduler to the seconds that it leaves a process after SIGTERM, the fewest first."""
_NUM_ARRAYS = 8
"""Number of arrays in the small state that is saved to measure the time of a save."""
_MAX_BYTES = 128 * 2**20
"""Largest size of this small state in bytes. Saving it takes seconds on most disks."""


def rows(workdir: str, state: Any) -> dict[str, str]:
    """Measure the time of a save, and return it as the row "a save" of the table of costs.

    A small state is saved into the workdir and deleted again. The text has a caution if a save
    takes more than half of the seconds that `GRACES` lists from SIGTERM to the end of a process. If
    the measurement fails, the text says why.

    Args:
        workdir: Workdir of the run. If it does not exist yet, its nearest parent is used.
        state: Abstract arrays that a save writes, with shardings.
    """
    size = saved_bytes(state)
    shown_size = f"{terminal.gib(size)} from this host"
    try:
        save_seconds = seconds(workdir, size)
    except Exception as error:
        # Storage raises errors of many types. A failed measurement must not end the dry run.
        text = f"{shown_size}; its time is unknown, {workdir} takes no test of its speed ({error})"
        return {"a save": text}
    # From 100 on, two digits would be written as 1.5e+02.
    shown_seconds = f"{save_seconds:.2g}" if save_seconds < 99.5 else f"{save_seconds:.0f}"
    text = f"about {shown_seconds} s: {shown_size}, as measured there now"
    # Half of the grace period is reserved for steps under way, which end before the save.
    too_short = [
        f"{grace} s that {source} leaves"
        for source, grace in GRACES.items()
        if save_seconds > grace / 2
    ]
    if too_short:
        text += (
            ". Caution: with the steps under way it may not fit into the "
            f"{' or the '.join(too_short)} after SIGTERM; what is lost is then at most "
            "--checkpoint.every-steps. A faster --workdir or more hosts shorten it"
        )
    return {"a save": text}


def saved_bytes(state: Any) -> int:
    """Return the bytes that this process writes of a state: each shard of its devices once."""
    total = 0
    for leaf in jax.tree.leaves(state):
        shards = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        # Replicated devices hold the same shard, which is written once.
        num_shards = len({str(index) for index in shards})
        shard_shape = leaf.sharding.shard_shape(leaf.shape)
        shard_size = jax.ShapeDtypeStruct(shard_shape, leaf.dtype).size
        total += num_shards * shard_size * leaf.dtype.itemsize
    return total


def seconds(workdir: str, size: int) -> float:
    """Estimate the seconds that a save takes, by saving small states and deleting them again.

    The result is the time of a save of 8 bytes, plus the time of a save of at most 128 MiB, scaled
    to `size`.

    Args:
        workdir: Workdir of the run. If it does not exist yet, its nearest parent is used.
        size: Bytes that this process writes in a save.

    Raises:
        OSError: The workdir cannot be written, or the disk is nearly full.
    """
    folder = path_of(workdir)
    array_bytes = max(min(size, _MAX_BYTES) // _NUM_ARRAYS, 1)
    if not is_remote(folder):
        absolute = folder.absolute()
        folder = next(path for path in (absolute, *absolute.parents) if path.is_dir())
        if shutil.disk_usage(folder).free < 4 * array_bytes * _NUM_ARRAYS:
            raise OSError("it is nearly full")
    probe = folder / f".speed-{secrets.token_hex(4)}"
    try:
        with Checkpoints(probe, CheckpointConfig(keep=1), log=lambda text: None) as checkpoints:
            fixed_seconds = _save_seconds(checkpoints, step=1, array_bytes=1)
            probe_seconds = _save_seconds(checkpoints, step=2, array_bytes=array_bytes)
    finally:
        remove_tree(probe)
    return fixed_seconds + probe_seconds * size / (array_bytes * _NUM_ARRAYS)


class _State:
    """State of random bytes, which neither orbax nor a file system can compress.

    Args:
        array_bytes: Bytes of each of its `_NUM_ARRAYS` arrays.
    """

    def __init__(self, array_bytes: int) -> None:
        self._arrays: dict[str, jax.Array] = {}
        for index in range(_NUM_ARRAYS):
            content = np.frombuffer(secrets.token_bytes(array_bytes), np.uint8)
            self._arrays[str(index)] = jax.device_put(content)

    def arrays(self) -> dict[str, jax.Array]:
        return self._arrays


def _save_seconds(checkpoints: Checkpoints, step: int, array_bytes: int) -> float:
    """Save `_NUM_ARRAYS` random arrays of `array_bytes` each. Return the seconds until on disk.

    Args:
        step: Step to save at, which must differ from that of the call before.

    Raises:
        OSError: The save failed.
    """
    # A real save does not make arrays, so they must be ready before the clock starts.
    state = _State(array_bytes)
    jax.block_until_ready(state.arrays())
    began = time.monotonic()
    checkpoints.save(step, cast("TrainState", state), {}, last=True)
    failure = checkpoints.wait()
    if failure:
        raise OSError(failure)
    return time.monotonic() - began


def run(config: Config, published_use: str | None = None) -> int:
    """Print the run's preset, parameters, cautions, cost and memory. Return the exit code 0.

    Nothing is trained. A small state is saved into the workdir and deleted, to measure a save.

    Args:
        published_use: Name of the published preset that the command line names. The table of its
            source is printed beside the values of the run. Default none.

    Raises:
        ConfigError, PresetError, MeshError, MupaxError: The run itself would refuse the config or
            the source of `init.init_from`, or lacks an extra.
    """
    # A package that only reads the data may be missing, because a dry run opens no data.
    check_extras(config, reads_data=False)
    starts_from_source = config.init.init_from is not None and not _goes_on(config)
    if starts_from_source:
        config = _with_source(config)
    program = fit.program_of(config)
    if starts_from_source:
        # Before anything is compiled, because a source that does not fit ends the run.
        _check_source(program)
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


def _goes_on(config: Config) -> bool:
    """Return whether the run resumes from a checkpoint, and so reads no `init.init_from`."""
    if not config.resume:
        return False
    folder = path_of(config.workdir or f"runs/{config.recipe}")
    return bool(steps(folder / CHECKPOINTS))


def _with_source(config: Config) -> Config:
    """Return the config of a new run with the exact path of its source and its tokenizer.

    Raises:
        MupaxError: There is no model at `init.init_from`, or its files are damaged.
    """
    from mupax.train.reuse.start import init_from

    # The folder is read only if a run in it goes on.
    return init_from.settled(config, Path(), False, Processes())


def _check_source(program: Program) -> None:
    """Read the source of a new run as the run does, and drop the result.

    A caution is printed if the source does not fit into the memory of this machine: the dry run may
    be of a larger one.

    Raises:
        MupaxError: The source is damaged, or does not fit the run.
    """
    from mupax.train.reuse.start import init_from

    try:
        init_from.prepare(program)
    except MemoryLimitError as error:
        terminal.say(
            f"caution: --init-from {program.config.init.init_from} is not checked: {error}"
        )


def _parameters(program: Program) -> str:
    """Return the table of parameters: shape, multiplier, initial std, and optimizer values.

    A frozen parameter has the word `frozen` in place of learning rate, eps and decay.
    """
    # Short heads and no column for the sharding, so that most tables fit into 80 columns of text.
    title = "parameters"
    if program.mesh.size > 1:
        title += " (a/b in a shape: split b ways)"
    rows = [["name", "shape", "mult.", "std", "lr", "eps", "decay"]]
    optimizer = program.config.scaled_optimizer
    factors = program.inputs.factors
    decay = program.inputs.hyper.weight_decay
    for name, leaf in program.abstract.params.items():
        cells = [name, _shape(program, leaf)]
        cells += [_value(factors.multiplier[name]), _value(program.stds[name])]
        if name in program.trained:
            cells += [
                _value(factors.lr[name] * optimizer.peak_lr),
                _value(factors.eps[name] * optimizer.eps),
                _value(factors.weight_decay[name] * decay),
            ]
        else:
            cells += ["frozen", "", ""]
        rows.append(cells)
    return f"{title}\n{terminal.table(rows, left=('name', 'shape'))}\n"


def _shape(program: Program, leaf: Any) -> str:
    """Return a parameter's shape such as `512x64/2`, where `/2` is a dimension split over 2."""
    sizes = []
    # A PartitionSpec may be shorter than the shape. Further dimensions are then not split.
    for size, axes in itertools.zip_longest(leaf.shape, leaf.sharding.spec):
        if not axes:
            sizes.append(str(size))
            continue
        # Several mesh axes may split one dimension, as experts and fsdp do.
        names = (axes,) if isinstance(axes, str) else axes
        ways = math.prod(program.mesh.shape[name] for name in names)
        sizes.append(f"{size}/{ways}")
    return "x".join(sizes)


def _value(layers: np.ndarray) -> str:
    """Return a parameter's value as text, such as `0.0312`, or `0.031..0.5` if layers differ.

    The first form has the first layer's value in three significant digits. If the last layer's
    value differs from it in these digits, both are written in two significant digits.

    Args:
        layers: Values of all layers in order, or one value.
    """
    first = float(layers.flat[0])
    last = float(layers.flat[-1])
    text = f"{first:.3g}"
    return text if text == f"{last:.3g}" else f"{first:.2g}..{last:.2g}"


def _print_beside_source(program: Program, published_use: str) -> None:
    """Print a table of the run's values by parameter group, next to those of a published source.

    The values are multiplier, initial standard deviation, learning rate, eps and weight decay. The
    source's values are in brackets. They are for its model with the nearest width. If a group has
    several values, the least and the largest are shown. Groups without a trained parameter are left
    out.

    Args:
        published_use: Published preset that the command line names, as PRESET:NAME. Nothing is
            printed if it is the path of a file.
    """
    from mupax.presets.tuned import find, published

    if published_use not in find.files():  # a file that was named by its path
        return
    tuned = find.find(published_use)
    table = published.nearest(tuned, program.definition.sizes["embed"])
    source = tuned.provenance["source"]["name"]
    factors = program.inputs.factors
    optimizer = program.config.scaled_optimizer
    weight_decay = float(program.inputs.hyper.weight_decay)
    values: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, spec in program.definition.specs.items():
        if name not in program.trained:
            continue
        own_values = {
            "multiplier": factors.multiplier[name],
            "std": program.stds[name],
            "lr": factors.lr[name] * optimizer.peak_lr,
            "eps": factors.eps[name] * optimizer.eps,
            "wd": factors.weight_decay[name] * weight_decay,
        }
        columns = values.setdefault(spec.group, {})
        for column, layers in own_values.items():
            columns.setdefault(column, []).append(np.ravel(layers))
    groups = {}
    for group, columns in values.items():
        # Sorted, so that the first and the last value are the least and the largest.
        groups[group] = {
            column: _value(np.sort(np.concatenate(parts))) for column, parts in columns.items()
        }
    terminal.say(
        f"in absolute numbers, and in brackets those of {source}, {table['model']}: "
        f"{table['where']}"
    )
    print(f"{terminal.table(published.comparison(groups, table), left=('group',))}\n")


def _costs(program: Program) -> str:
    """Return the table of costs: parameters, batch, steps, FLOPs, mesh, memory and saves.

    A small state is saved into the workdir and deleted, to measure the time of a save.
    """
    config = program.config
    model = config.model
    unit = model.unit
    batch_size = config.data.batch_size
    units_per_step = batch_size * model.units
    train_flops = families.train_flops(model)
    total_flops = train_flops * units_per_step * config.steps

    parameters = f"{program.definition.count():,}"
    if program.frozen:
        parameters += f", {program.frozen:,} of them frozen"
    units_per_example = f"x {model.units} " if model.units > 1 else ""
    state_bytes = 0
    for leaf in jax.tree.leaves(program.abstract):
        state_bytes += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    device_kind = program.mesh.devices.flat[0].device_kind
    costs = {
        "parameters": parameters,
        "batch": f"{batch_size} {units_per_example}{unit}s",
        "steps": f"{config.steps:,}, {config.steps * units_per_step:,} {unit}s",
        "FLOPs": f"{train_flops:.3g} per {unit}, {total_flops:.3g} in all",
        "mesh": f"{described(program.mesh.shape)} ({device_kind})",
        "state per device": terminal.gib(state_bytes),
    }
    warmup_steps = config.scaled_optimizer.warmup_steps
    if warmup_steps:
        costs["warm-up"] = (
            f"{counted(warmup_steps, 'step', ',')}, {warmup_steps * units_per_step:,} {unit}s"
        )
    if program.inputs.hyper.weight_decay:
        costs["decay averages"] = joint.decay_text(config.scaled_optimizer, config.steps)
    # A dry run may be of a mesh that this machine does not have.
    num_absent = program.mesh.size - jax.device_count()
    if num_absent > 0:
        costs["mesh"] += f"; {num_absent} of them are not here, where a run would be refused"
    costs |= _memory_costs(program)
    costs |= rows(config.workdir or f"runs/{config.recipe}", program.abstract)
    return f"cost\n{terminal.table([*costs.items()], indent=1)}"


def _memory_costs(program: Program) -> dict[str, str]:
    """Return the rows on the memory of a step per device, and whether the run fits.

    Empty if the compiler does not report its memory.
    """
    usage = fit.needs(program)
    if not usage:
        return {}
    basis = "compiled for this mesh" if usage.compiled else "estimated from the step of one"
    costs = {
        "step needs": f"{terminal.gib(usage.temporary)} for activations and gradients, {basis}"
    }
    if usage.saved:
        saved_size = terminal.gib(usage.saved)
        costs["a checkpoint needs"] = f"{saved_size} for a copy of the state while steps go on"
    costs["peak per device"] = f"about {terminal.gib(usage.peak)}"
    limit = fit.room(program.mesh.devices.flat[0])
    if limit:
        problem = fit.verdict(program, usage, limit)
        if problem:
            costs["does not fit"] = problem
        else:
            costs["fits"] = f"{terminal.gib(limit)} a device"
    return costs
