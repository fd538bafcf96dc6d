"""Memory checks of a step: refusals before a run starts, and flags that make the step fit.

Each proposal of flags is compiled, or estimated, before it is made. Places of a mesh for which this
machine has no device get fake devices, and a step's memory there is an estimate.

The estimate starts from one device's memory for the same rows. For programs of the CPU compiler on
16 devices (`lm-tiny` and `lm-8b`, with and without remat and accumulation), the compiler's figure
was at most 1.02 of the estimate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mupax import memory as host_memory
from mupax.memory import MemoryLimitError
from mupax.terminal import gib
from mupax.train.config.data import DataConfig
from mupax.train.config.run import MESH_AXES, Config, MeshConfig
from mupax.train.core.costs import memory
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.sharding import MeshError
from mupax.zoo.configs import ConfigError
from mupax.zoo.definition import definition

_LESS_FUSED = 2.0
"""Factor on one device's activations if the step is split over devices and saves activations.

Remat policies that recompute a layer need no factor.
"""
_COPIES = 3
"""Copies of gathered parameters: as received, as a matrix product's operand, and their gradient."""

_TRIES = 4
"""Largest number of proposed flags that are compiled to see whether the step fits with them.

The estimates that order the proposals are within some ten per cent of the compiler's figures.
"""
_PATIENCE_S = 20.0
"""Seconds to compile proposals in when a run is refused. A dry run has no limit."""
_SLACK = 0.9
"""Share of the memory that an estimate may take. The rest is for the runtime and the host."""
OVERRIDE = "--faults.no-memory-check starts the run all the same"
"""Last sentence of a refusal."""


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """Stand-in for a device of a mesh that this machine does not have.

    A fake device computes nothing. All attributes but `id` are those of `like`.

    Attributes:
        like: `jax.Device` of this machine.
        id: Number beyond those of this machine's devices.
    """

    like: Any
    id: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.like, name)


def stand_ins(config: MeshConfig) -> Sequence[Any] | None:
    """Return devices for the mesh, some of them fake, if it needs more than this machine has.

    `None` if this machine has enough. TPU meshes get no fake devices, because their layout depends
    on chip coordinates.

    Args:
        config: Sizes of the mesh. An axis that is left open counts as one device.
    """
    present = jax.devices()
    needed = 1
    for axis in MESH_AXES:
        size = getattr(config, axis)
        if size > 0:
            needed *= size
    # The layout of a TPU mesh depends on chip coordinates, which a fake device does not have.
    if needed <= len(present) or present[0].platform == "tpu":
        return None
    fakes = []
    for index in range(len(present), needed):
        fakes.append(FakeDevice(present[0], index))
    return [*present, *fakes]


def here(program: Program) -> bool:
    """Return whether this machine has all devices of a program, so that it can be compiled."""
    return not any(isinstance(device, FakeDevice) for device in program.mesh.devices.flat)


def per_row(config: Config) -> int | None:
    """Return the bytes of one example's activations and their gradients on one device.

    The step is compiled for one device with one example and with two; the difference is the second
    example's. The run's own mesh, batch and accumulation do not matter. `None` if the compiler does
    not say.
    """
    sizes = []
    # The difference cancels what does not grow with the batch, such as gradients.
    for num_rows in (1, 2):
        data = dataclasses.replace(config.data, batch_size=num_rows, eval_batch_size=None)
        single = dataclasses.replace(config, mesh=MeshConfig(), accumulation_steps=1, data=data)
        analysis = assemble(single, jax.devices()[:1]).compile_train().memory_analysis()
        if analysis is None:
            return None
        sizes.append(analysis.temp_size_in_bytes)
    return max(0, sizes[1] - sizes[0])


def temporary(program: Program, row: int) -> int:
    """Estimate the bytes of activations, gradients and gathered parameters on one device.

    Args:
        program: Program whose devices this machine does not have.
        row: Bytes of one example, from `per_row`.
    """
    config = program.config
    layout = program.layout
    num_rows = config.data.batch_size // config.accumulation_steps // layout.num_shards("batch")
    saves_activations = config.model.compute.remat in ("none", "dots")
    less_fused = _LESS_FUSED if saves_activations else 1.0
    sizes = []
    for leaf in program.abstract.params.values():
        sizes.append(memory.bytes_of(leaf, leaf.sharding))
    gradients = sum(sizes)
    num_splits = layout.num_shards("sequence") * layout.num_shards("heads")
    # Accumulation keeps the sum of gradients in addition to the gradients of the microbatch.
    num_gradients = 2 + (config.accumulation_steps > 1)
    activations = row * num_rows * less_fused / num_splits
    return int(activations + gradients * num_gradients + buffers(program))


def buffers(program: Program) -> int:
    """Estimate the bytes of gathered parameters on a device at one moment.

    Counted are one layer of each stack and all parameters outside of stacks, `_COPIES` times. The
    result is 0 if the mesh does not split the axis "embed".
    """
    if program.layout.num_shards("embed") == 1:
        return 0
    specs = program.definition.specs
    total = 0
    for name, leaf in program.abstract.params.items():
        size = leaf.size * leaf.dtype.itemsize
        # A stacked parameter is gathered one layer at a time, a parameter outside of stacks as a
        # whole.
        num_layers = leaf.shape[0] if specs[name].in_block else 1
        total += size // num_layers
    return _COPIES * total


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device while a step runs.

    Attributes:
        state: Arguments of the step: parameters, moments and the batch.
        temporary: Activations and gradients.
        compiled: `True` if the compiler gave the bytes, `False` if they are an estimate.
        saved: Copy of the state that a checkpoint writes while the next steps run. Only on a CPU,
            where the copy takes the device's memory.
    """

    state: int
    temporary: int
    compiled: bool = True
    saved: int = 0

    @property
    def peak(self) -> int:
        """Sum of all bytes."""
        return self.state + self.temporary + self.saved

    def fits(self, limit: int) -> bool:
        """Return whether the peak is at most `limit` bytes, or 90 % of them for an estimate."""
        if self.compiled:
            return self.peak <= limit
        return self.peak <= _SLACK * limit


def program_of(config: Config) -> Program:
    """Assemble the program of a config, with fake devices if this machine has too few.

    Raises:
        ConfigError, PresetError, MeshError: `assemble` refuses the config.
    """
    return assemble(config, stand_ins(config.mesh))


def needs(program: Program) -> MemoryEstimate | None:
    """Compile the training step and return its memory on one device.

    If this machine lacks devices of the program, the step is compiled for one device with one and
    two examples, and the memory is estimated from these. `None` if the compiler reports no memory.
    """
    if here(program):
        return needs_of(program, program.compile_train())
    row = per_row(program.config)
    if row is None:
        return None
    return _estimated(program, row)


def needs_of(program: Program, step: jax.stages.Compiled) -> MemoryEstimate | None:
    """Return the memory of a compiled training step, or `None` if the compiler does not say.

    Args:
        step: Compiled step, from `Program.compile_train`.
    """
    analysis = step.memory_analysis()
    if analysis is None:
        return None
    return MemoryEstimate(
        analysis.argument_size_in_bytes, analysis.temp_size_in_bytes, saved=_saved(program)
    )


def needs_by_shapes(program: Program) -> MemoryEstimate:
    """Estimate the memory of a step from shapes, without compiling.

    Counted are the state, the gradients, the activations and, on CPU, the copy for a checkpoint.
    """
    temporary = _gradients(program) + _activations(program, program.config)
    return MemoryEstimate(_state(program), temporary, compiled=False, saved=_saved(program))


def room(device: Any) -> int | None:
    """Return the free bytes of a device, or `None` if they are not known.

    A CPU device has its share of the host's memory.

    Args:
        device: `jax.Device` of this machine.
    """
    return host_memory.device_room(device, jax.local_device_count())


def limit_of(program: Program) -> int | None:
    """Return the free bytes of the program's first device that belongs to this process.

    `None` if they are not known, or if the config or `MUPAX_MEMORY_CHECK` turns checks off.
    """
    if not (program.config.faults.memory_check and host_memory.checks()):
        return None
    # The first device of a mesh may belong to another process, whose memory is not known here.
    for device in program.mesh.devices.flat:
        if device.process_index == jax.process_index():
            return room(device)
    return None


def check_arrays(arrays: Any, purpose: str, advice: str) -> None:
    """Refuse arrays for which the host has not enough memory left.

    Arrays on devices other than CPUs are not counted.

    Args:
        arrays: Tree of arrays or their shapes. A shape without a sharding stands for an array of
            the host.
        purpose: Plural subject of the message, such as "the weights".
        advice: Sentence that says what to write instead.

    Raises:
        MemoryLimitError: Less memory is left, and `MUPAX_MEMORY_CHECK` is not off.
    """
    total = 0
    for leaf in jax.tree.leaves(arrays):
        sharding = getattr(leaf, "sharding", None)
        itemsize = jnp.dtype(leaf.dtype).itemsize
        if sharding is None:
            total += math.prod(leaf.shape) * itemsize
            continue
        devices = sharding.addressable_devices
        if any(device.platform != "cpu" for device in devices):
            continue
        shard_size = math.prod(sharding.shard_shape(leaf.shape))
        # Several CPU devices of a process share the memory of one host.
        total += shard_size * itemsize * max(1, len(devices))
    host_memory.check(total, purpose, advice)


def check_state(program: Program, limit: int | None, *, saves: bool = True) -> None:
    """Refuse a run whose state and gradients alone do not fit, before anything is compiled.

    On CPU the copy for a checkpoint counts, too. Activations do not.

    Args:
        limit: Bytes of a device. `None` checks nothing.
        saves: `False` if the run writes no checkpoints. By default it does.

    Raises:
        MemoryLimitError: They do not fit. The message names flags that make the run fit.
    """
    usage = needs_by_shapes(program)
    if not saves:
        usage = dataclasses.replace(usage, saved=0)
    # Without activations and without slack, so that only a run that is sure to fail is refused
    # here.
    least = dataclasses.replace(usage, temporary=_gradients(program), compiled=True)
    if limit is None or least.fits(limit):
        return
    problem = verdict(program, usage, limit, compiles=False)
    raise MemoryLimitError(f"out of memory: {problem}. {OVERRIDE}")


def check_step(
    program: Program, step: jax.stages.Compiled, limit: int | None, *, saves: bool = True
) -> None:
    """Refuse a run whose compiled step does not fit, before the first step.

    Nothing is refused if the compiler reports no memory.

    Args:
        step: Compiled step, from `Program.compile_train`.
        limit: Free bytes of a device before the state was made. `None` checks nothing.
        saves: `False` if the run writes no checkpoints. By default it does.

    Raises:
        MemoryLimitError: The step does not fit. The message names flags that make the run fit.
    """
    if limit is None:
        return
    usage = needs_of(program, step)
    if usage is None:
        return
    if not saves:
        usage = dataclasses.replace(usage, saved=0)
    problem = verdict(program, usage, limit, elsewhere=False)
    if problem:
        raise MemoryLimitError(f"out of memory: {problem}. {OVERRIDE}")


def check_evaluation(
    program: Program, evaluation: jax.stages.Compiled, limit: int | None, held: int = 0
) -> None:
    """Refuse an evaluation that does not fit, before its first batch.

    Nothing is refused if the compiler reports no memory.

    Args:
        program: Program of the run or of the evaluation.
        evaluation: Compiled evaluation, from `Program.compile_eval`.
        limit: Free bytes of a device. `None` checks nothing.
        held: Bytes that stay on the device besides the evaluation's parameters, such as optimizer
            state. 0 by default.

    Raises:
        MemoryLimitError: The evaluation does not fit. The message names an evaluation batch that
            fits by estimate, or says that none does.
    """
    analysis = evaluation.memory_analysis()
    if limit is None or analysis is None:
        return
    arguments = analysis.argument_size_in_bytes + held
    peak = arguments + analysis.temp_size_in_bytes
    if peak <= limit:
        return

    text = f"out of memory: an evaluation takes {_usage_text(peak, limit, program)}"
    batch_size = program.config.eval_batch_size
    num_shards = program.layout.num_shards("batch")
    smaller = batch_size // 2
    while smaller >= num_shards:
        # The estimate takes temporaries to be proportional to the batch, as activations are.
        estimate = arguments + analysis.temp_size_in_bytes * smaller / batch_size
        if smaller % num_shards == 0 and estimate <= _SLACK * limit:
            flag = f"--data.eval-batch-size {smaller}"
            raise MemoryLimitError(f"{text}. With {flag} it takes {gib(estimate)} by estimate")
        smaller //= 2
    raise MemoryLimitError(
        f"{text}, and no smaller --data.eval-batch-size fits. Take a smaller model or more devices"
    )


def advice(program: Program) -> str:
    """Return a text for a run that ran out of memory: its estimate, and flags that take less.

    If no flags do by estimate, the text names larger meshes or smaller runs instead.

    Nothing is compiled.
    """
    usage = needs_by_shapes(program)
    # The run has run out of memory, so the true limit is below this estimate by an unknown amount.
    limit = int(0.75 * usage.peak)
    flags = _fitting(program, usage, limit, compiles=False, elsewhere=False)
    return f"By its shapes it takes {gib(usage.peak)}. {flags}"


def _usage_text(peak: float, limit: int, program: Program) -> str:
    """Return a text with the peak and the limit of a device.

    On CPU it also says what limits the memory, if that is not the machine itself.
    """
    devices = "each device" if program.mesh.size > 1 else "one device"
    source = ""
    if program.mesh.devices.flat[0].platform == "cpu":
        name = host_memory.room().limit
        if name != "this machine":
            source = f" ({name} leaves no more)"
    return f"{gib(peak)} of {gib(limit)} on {devices}{source}"


def verdict(
    program: Program,
    usage: MemoryEstimate,
    limit: int,
    *,
    compiles: bool = True,
    elsewhere: bool = True,
) -> str | None:
    """Return a text on a step that does not fit, with flags that make it fit. `None` if it fits.

    Args:
        usage: Memory of the program's own step on one device.
        limit: Bytes of one device that the step may take.
        compiles: `True` compiles proposals before they are made, `False` estimates them from
            shapes.
        elsewhere: `True` also compiles for more devices than there are, and sets no time limit.
    """
    if usage.fits(limit):
        return None
    text = f"{_usage_text(usage.peak, limit, program)}."
    if not usage.compiled and compiles:
        text += " An estimate fits where it leaves a tenth."
    return f"{text} {_fitting(program, usage, limit, compiles=compiles, elsewhere=elsewhere)}"


def _fitting(
    program: Program, usage: MemoryEstimate, limit: int, *, compiles: bool, elsewhere: bool
) -> str:
    """Return a text with flags that make a step fit on the present devices, and its memory.

    If none do, the text names larger meshes or smaller runs instead. At most `_TRIES` proposals
    are compiled or, without `compiles` or time, estimated. The arguments are those of `verdict`.
    """
    start_time = time.monotonic()
    # Nothing can be compiled for devices that this machine does not have.
    if here(program):
        for config, flags in itertools.islice(_proposals(program, usage, limit), _TRIES):
            proposal = assemble(config)
            has_time = elsewhere or time.monotonic() - start_time < _PATIENCE_S
            if compiles and has_time:
                proposed_usage = needs(proposal)
                source = "as compiled"
            else:
                proposed_usage = _scaled(program, usage, proposal)
                source = "by estimate"
            if proposed_usage and proposed_usage.fits(limit):
                return f"With {flags} it takes {gib(proposed_usage.peak)}, {source}"

    smaller_runs = _smaller_text(program, usage, limit)
    if program.layout.platform == "tpu":
        return (
            "No flags make it fit here; `mupax compile` finds the mesh of a pod. "
            f"Else write {smaller_runs}"
        )
    if compiles and elsewhere:
        text = _on_more_devices(program, limit)
    else:
        text = _on_more_devices_by_shapes(program, usage, limit)
    if text.endswith("by estimate"):
        return f"{text}. On these devices write {smaller_runs}"
    return f"No flags make it fit these devices. {text}. Write {smaller_runs}"


def _on_more_devices(program: Program, limit: int) -> str:
    """Return a text with the fewest devices that the run fits, and the flags for them.

    Steps of one and two examples are compiled for one device, and memory is estimated from these.
    The text ends with "by estimate" if there are such devices. Otherwise it says how near the run
    comes to fitting, or that no larger mesh divides the sizes.

    Args:
        limit: Bytes that one device has for the step.
    """
    row_bytes: dict[str, int | None] = {}  # bytes of one example, by remat policy
    lowest_peak = math.inf
    best = "No larger mesh divides the batch and the model's sizes"
    for larger in _larger(program):
        if lowest_peak == math.inf:
            best = f"On {larger.mesh.size} of them the activations of one example alone are more"
        for config, flags in _savings(larger, ("block",)):
            remat = config.model.compute.remat
            if remat not in row_bytes:
                # Sizes alone say that it does not fit, which saves compiling.
                if _activations(larger, config) > limit:
                    continue
                row_bytes[remat] = per_row(config)
            row = row_bytes[remat]
            if row is None:
                continue

            usage = _estimated(dataclasses.replace(larger, config=config), row)
            words = " ".join((*_mesh_flags(program.config, config), *flags))
            text = _on_devices(larger.mesh.size, words, usage.peak)
            if usage.fits(limit):
                return text
            if usage.peak < lowest_peak:
                lowest_peak = usage.peak
                best = f"{text}, still too much"
    return best


def _on_devices(count: int, flags: str, peak: float) -> str:
    """Return a text with flags and estimated memory on more devices, ending in "by estimate"."""
    return f"On {count} such devices, with {flags}, it takes {gib(peak)} by estimate"


def _scaled(program: Program, usage: MemoryEstimate, target: Program) -> MemoryEstimate:
    """Estimate the memory of `target`'s step from the known memory of `program`'s step.

    The known activations are scaled by the ratio of both programs' estimates from shapes. State,
    gradients and gathered parameters of `target` are computed from shapes.

    Args:
        usage: Known memory of the step of `program`.
        target: Program of the same run with other flags.
    """
    activations = _activations(target, target.config)
    share = activations / max(1, _activations(program, program.config))
    measured_activations = max(0, usage.temporary - _gradients(program))
    temporary = int(_gradients(target) + measured_activations * share + buffers(target))
    return MemoryEstimate(_state(target), temporary, compiled=False, saved=_saved(target))


def _on_more_devices_by_shapes(program: Program, usage: MemoryEstimate, limit: int) -> str:
    """Return a text on the fewest devices that the run fits by `_scaled`, without compiling.

    The text has mesh flags and memory, and ends with "by estimate" if there are such devices.
    Otherwise it says how much the largest mesh takes, or that no larger mesh divides the sizes.

    Args:
        limit: Bytes that one device has for the step.
    """
    best = "No larger mesh divides the batch and the model's sizes"
    for larger in _larger(program):
        peak = _scaled(program, usage, larger).peak
        flags = " ".join(_mesh_flags(program.config, larger.config))
        best = _on_devices(larger.mesh.size, flags, peak)
        if peak <= _SLACK * limit:
            return best
        best += ", still too much"
    return best


def _smaller_text(program: Program, usage: MemoryEstimate, limit: int) -> str:
    """Return flags of smaller runs that fit by estimate, or a hint which sizes to reduce.

    Args:
        limit: Bytes that one device has for the step.
    """
    flags = list(_smaller(program, usage, limit))
    if flags:
        return f"{', or '.join(flags)}, by estimate"
    if hasattr(program.config.model, "seq_len"):
        return "a smaller model, or a smaller --model.seq-len"
    return "a smaller model"


class _Size(NamedTuple):
    """Size of a run that can be halved: its flag, config section, field and lower limit."""

    flag: str
    section: str
    field: str
    minimum: int


def _smaller(program: Program, usage: MemoryEstimate, limit: int) -> Iterator[str]:
    """Yield flags of runs that fit the same devices by estimate but give another result.

    A flag sets one size to a half, a quarter, and so on: the first of these that fits. The last
    flag stores float32 parameters in bfloat16.

    Args:
        limit: Bytes that one device has for the step.
    """
    config = program.config
    # Every microbatch needs an example on every device.
    smallest_batch = config.accumulation_steps * program.layout.num_shards("batch")
    sizes = (
        _Size("--data.batch-size", "data", "batch_size", smallest_batch),
        _Size("--model.seq-len", "model", "seq_len", 16),
        _Size("--model.width", "model", "width", 16),
        _Size("--model.depth", "model", "depth", 1),
        _Size("--model.vocab-size", "model", "vocab_size", 256),
    )
    for flag, section, field, minimum in sizes:
        part = getattr(config, section)
        size = getattr(part, field, None)
        while isinstance(size, int) and size // 2 >= minimum:
            size //= 2
            # The model or the mesh may refuse a size. It is then skipped.
            with contextlib.suppress(ConfigError, MeshError, ValueError):
                smaller_part = dataclasses.replace(part, **{field: size})
                smaller = dataclasses.replace(config, **{section: smaller_part})
                if _reduced(program, usage, smaller) <= _SLACK * limit:
                    yield f"{flag} {size}"
                    break

    if config.model.compute.param_dtype == "float32":
        compute = dataclasses.replace(config.model.compute, param_dtype="bfloat16")
        model = dataclasses.replace(config.model, compute=compute)
        if _reduced(program, usage, dataclasses.replace(config, model=model)) <= _SLACK * limit:
            yield "--model.compute.param-dtype bfloat16"


def _reduced(program: Program, usage: MemoryEstimate, config: Config) -> float:
    """Estimate the peak bytes of one device for a smaller run on the same mesh.

    State and gradients shrink in proportion to the bytes of all parameters. Activations shrink in
    proportion to their estimates from shapes.

    Args:
        program: Program of the run itself, whose step takes the memory `usage`.
        config: Config of the smaller run, which has the same mesh.

    Raises:
        MeshError: The mesh does not divide the batch of the smaller run.
    """
    program.layout.check_batch(config.data.batch_size, config.accumulation_steps)
    model = definition(config.model)
    smaller_params = sum(leaf.size * leaf.dtype.itemsize for leaf in model.abstract.values())
    params = sum(leaf.size * leaf.dtype.itemsize for leaf in program.abstract.params.values())
    params_share = smaller_params / params

    smaller = dataclasses.replace(program, config=config, definition=model)
    activations = _activations(program, program.config)
    activations_share = _activations(smaller, config) / max(1, activations)
    gradients = _gradients(program)
    measured_activations = max(0, usage.temporary - gradients)
    return (
        usage.state + usage.saved + gradients
    ) * params_share + measured_activations * activations_share


def _savings(program: Program, kinds: tuple[str, ...]) -> Iterator[tuple[Config, list[str]]]:
    """Yield runs on the same mesh with the same result and less memory, with their flags.

    Runs that cost less time come first. The very first is the program's own run, without flags.

    Args:
        kinds: Remat policies to try besides the run's own, the fastest first.
    """
    config = program.config
    num_rows = config.data.batch_size // program.layout.num_shards("batch")
    num_microbatches = config.accumulation_steps
    own_remat = config.model.compute.remat
    for remat in dict.fromkeys((own_remat, *kinds)):
        compute = dataclasses.replace(config.model.compute, remat=remat)
        model = dataclasses.replace(config.model, compute=compute)
        saving = dataclasses.replace(config, model=model)
        # A policy that saves more than the run's own is no saving.
        if _activations(program, saving) > _activations(program, config):
            continue
        for count in range(num_microbatches, num_rows + 1):
            if num_rows % count:
                continue
            flags = []
            if count > num_microbatches:
                flags.append(f"--accumulation-steps {count}")
            if remat != own_remat:
                flags.append(f"--model.compute.remat {remat}")
            yield dataclasses.replace(saving, accumulation_steps=count), flags


def _proposals(program: Program, usage: MemoryEstimate, limit: int) -> Iterator[tuple[Config, str]]:
    """Yield runs that by estimate fit the present devices, with the same result, and their flags.

    Runs that cost less time come first. Each mesh and remat policy has at most one, with the fewest
    microbatches that fit.

    Args:
        limit: Bytes that one device has for the step.
    """
    own_activations = max(1, _activations(program, program.config))
    own_gradients = _gradients(program)
    for candidate in (program, *_resplit(program)):
        proposed_policies = set()
        for config, flags in _savings(candidate, ("dots", "block")):
            share = _activations(candidate, config) / own_activations
            temporary = _gradients(candidate) + max(0, usage.temporary - own_gradients) * share
            temporary += buffers(candidate) - buffers(program)
            state = usage.state - _state(program) + _state(candidate) + _saved(candidate)
            remat = config.model.compute.remat
            # With more microbatches than needed, the same policy would only be slower.
            if remat in proposed_policies or state + temporary > _SLACK * limit:
                continue
            proposed_policies.add(remat)
            yield config, " ".join((*_mesh_flags(program.config, config), *flags))


def _resplit(program: Program) -> Iterator[Program]:
    """Yield the run on the same devices, with more of them along fsdp and fewer along data."""
    data = program.mesh.shape["data"]
    fsdp = program.mesh.shape["fsdp"]
    for factor in range(2, data + 1):
        if data % factor:
            continue
        resplit = _with_mesh(program, data=data // factor, fsdp=fsdp * factor)
        if resplit is not None:
            yield resplit


def _larger(program: Program) -> Iterator[Program]:
    """Yield the run on more devices than there are, the fewest first.

    As many devices as the model's sizes allow are along fsdp, and the rest along data.
    """
    sizes = program.mesh.shape
    batch_size = program.config.data.batch_size
    num_model_shards = program.mesh.size // (sizes["data"] * sizes["fsdp"])
    num_present = max(program.mesh.size, jax.device_count()) // num_model_shards
    for num_devices in range(num_present + 1, batch_size + 1):
        if batch_size % num_devices:
            continue
        larger = _with_most_fsdp(program, num_devices)
        if larger is not None:
            yield larger


def _with_most_fsdp(program: Program, num_devices: int) -> Program | None:
    """Return the run with as many of the devices along fsdp as its sizes allow.

    The result is `None` if the sizes allow no split of the devices over data and fsdp.

    Args:
        program: Program of the run itself. Its fsdp axis is the smallest that is tried.
        num_devices: Product of the axes data and fsdp, at least 1.
    """
    # Most FSDP first: only a split of the state takes memory off a device.
    for fsdp in range(num_devices, program.mesh.shape["fsdp"] - 1, -1):
        if num_devices % fsdp:
            continue
        larger = _with_mesh(program, data=num_devices // fsdp, fsdp=fsdp)
        if larger is not None:
            return larger
    return None


def _with_mesh(program: Program, *, data: int, fsdp: int) -> Program | None:
    """Return the run on another mesh, or `None` if the mesh does not fit the run's sizes.

    An evaluation batch that does not split over the mesh is replaced (`_evaluating`).

    Args:
        data: Number of devices along the mesh axis data. The axes that are not named stay.
        fsdp: Number of devices along the mesh axis fsdp.
    """
    config = program.config
    shape = program.mesh.shape
    num_shards = data * fsdp * shape["experts"]
    data_config = config.data
    # The evaluation refuses a mesh that does not divide its batch, though training could have the
    # mesh.
    if config.eval_batch_size % num_shards:
        data_config = _evaluating(data_config, num_shards)
    # An axis of size -1 gets the devices that remain. It stays -1 if it would get the same size.
    same_devices = data * fsdp == shape["data"] * shape["fsdp"]
    if config.mesh.data == -1 and (same_devices or data == 1):
        data = -1
    mesh = dataclasses.replace(config.mesh, data=data, fsdp=fsdp)
    try:
        return program_of(dataclasses.replace(config, mesh=mesh, data=data_config))
    except MeshError:
        return None


def _evaluating(data: DataConfig, num_shards: int) -> DataConfig:
    """Return the config with an evaluation batch that splits over the devices.

    It is the largest such batch up to the present one, or one row per device if even that is
    larger. The evaluation batch changes no result.

    Args:
        num_shards: Number of devices that the examples split over.
    """
    batch_size = data.eval_batch_size or data.batch_size
    per_shard = max(1, batch_size // num_shards)
    return dataclasses.replace(data, eval_batch_size=per_shard * num_shards)


def _mesh_flags(old: Config, new: Config) -> list[str]:
    """Return flags for the axes data and fsdp and the evaluation batch, where `new` differs."""
    flags = []
    for axis in ("data", "fsdp"):
        size = getattr(new.mesh, axis)
        if size != getattr(old.mesh, axis):
            flags.append(f"--mesh.{axis} {size}")
    eval_batch_size = new.data.eval_batch_size
    if eval_batch_size != old.data.eval_batch_size:
        flags.append(f"--data.eval-batch-size {eval_batch_size}")
    return flags


def _estimated(program: Program, row: int) -> MemoryEstimate:
    """Estimate the memory of a step on devices that are not here, from `per_row`'s bytes."""
    return MemoryEstimate(
        _state(program), temporary(program, row), compiled=False, saved=_saved(program)
    )


def _state(program: Program) -> int:
    """Return the bytes of the training state on one device.

    If the model's output is centred (the logits of the initial parameters are subtracted), the
    initial parameters are counted, too.
    """
    # A centered model subtracts its initial output, so it keeps its initial parameters.
    reference = program.abstract.params if program.config.model.centered else {}
    leaves = jax.tree.leaves((program.abstract, reference))
    return sum(memory.bytes_of(leaf, leaf.sharding) for leaf in leaves)


def _saved(program: Program) -> int:
    """Return the bytes of a CPU device's share of the copy that a checkpoint makes.

    0 for other devices, whose copies are in the host's memory.
    """
    if program.layout.platform != "cpu":
        return 0
    leaves = jax.tree.leaves(program.abstract)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    # A checkpoint copies each array once, however many devices hold it.
    return total // program.mesh.size


def optimizer_bytes(program: Program) -> int:
    """Return the bytes that training holds on one device and an evaluation does not read.

    They are the optimizer state and, on CPU, the copy that a checkpoint makes. If evaluations use
    the moving average of the parameters, the parameters themselves are counted, too.
    """
    held = 0
    for leaf in jax.tree.leaves(program.abstract):
        held += memory.bytes_of(leaf, leaf.sharding)
    for leaf in program.abstract.evaluated.values():
        held -= memory.bytes_of(leaf, leaf.sharding)
    return held + _saved(program)


def _gradients(program: Program) -> int:
    """Return the bytes of the gradients of all trained parameters on one device.

    With accumulation the gradients are float32, otherwise they have the parameters' dtypes.
    """
    # Gradients of microbatches are summed in float32.
    summed = program.config.accumulation_steps > 1
    total = 0
    for name in program.trained:
        leaf = program.abstract.params[name]
        itemsize = jnp.dtype(jnp.float32).itemsize if summed else None
        total += memory.bytes_of(leaf, leaf.sharding, itemsize)
    return total


def _activations(program: Program, config: Config) -> int:
    """Return the bytes of activations on one device by shapes, on the mesh of `program`."""
    return sum(memory.activations(config, program.definition, program.layout))
