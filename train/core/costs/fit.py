"""Whether a step fits its devices' memory, and the flags that make it fit: each proposal is compiled, or estimated, before it is made.

Devices that a mesh has and this machine has not get stand-ins with their shapes, and a step's memory there is an estimate.

The estimate is of programs of the CPU compiler on 16 devices, from what one device takes of the same rows: `lm-tiny` and `lm-8b`, with and
without remat and accumulation, were at most 1.02 of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

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
"""Times the activations of one device's step that a step split over devices keeps, where a layer's backward pass has all of them."""
_COPIES = 3
"""Copies of what is whole for a moment: as it is sent, as a product takes it, and its gradient."""

_TRIES = 4
"""Proposals that are compiled; the estimates that order them are within some ten per cent."""
_PATIENCE_S = 20.0
"""How long the compiler may look for flags where a run is refused; a dry run has all the time that it takes."""
_SLACK = 0.9
"""Of the memory, as an estimate may be: the rest is the runtime's and the host's."""
OVERRIDE = "--faults.no-memory-check starts the run all the same"
"""Last sentence of a refusal."""


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """Description of a device, for places of a mesh that no device of this machine takes; it computes nothing.

    Attributes:
        like: a `jax.Device`.
        id: beyond those of the devices there are.
    """

    like: Any
    id: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.like, name)


def stand_ins(config: MeshConfig) -> Sequence[Any] | None:
    """As many devices as a mesh needs, where that is more than there are; None where it is not, and on TPU, whose chips have places.

    Args:
        config: of the mesh; an axis left open is then one device.
    """
    present = jax.devices()
    needed = math.prod(size for axis in MESH_AXES if (size := getattr(config, axis)) > 0)
    if needed <= len(present) or present[0].platform == "tpu":
        return None
    return [*present, *(FakeDevice(present[0], id) for id in range(len(present), needed))]


def here(program: Program) -> bool:
    """Whether all devices of a program are this machine's, so that it can be compiled."""
    return not any(isinstance(device, FakeDevice) for device in program.mesh.devices.flat)


def per_row(config: Config) -> int | None:
    """Bytes of activations and their gradients of one example in one device's step; None where the compiler does not say.

    It is compiled twice on one device, with one example and with two: what they differ in is of the example.

    Args:
        config: of the run; its own mesh, batch and accumulation do not count.
    """
    sizes = []
    for rows in (1, 2):
        data = dataclasses.replace(config.data, batch_size=rows, eval_batch_size=None)
        alone = dataclasses.replace(config, mesh=MeshConfig(), accumulation_steps=1, data=data)
        analysis = assemble(alone, jax.devices()[:1]).compile_train().memory_analysis()
        if analysis is None:
            return None
        sizes.append(analysis.temp_size_in_bytes)
    return max(0, sizes[1] - sizes[0])


def temporary(program: Program, row: int) -> int:
    """Bytes of activations and gradients of one device of a mesh that is not here, estimated.

    Args:
        program: of the run.
        row: from `per_row`.
    """
    config, layout = program.config, program.layout
    rows = config.data.batch_size // config.accumulation_steps // layout.num_shards("batch")
    less_fused = _LESS_FUSED if config.model.compute.remat in ("none", "dots") else 1.0
    gradients = sum(
        memory.bytes_of(leaf, leaf.sharding) for leaf in program.abstract.params.values()
    )
    split = math.prod(layout.num_shards(axis) for axis in ("sequence", "heads"))
    more = config.accumulation_steps > 1
    return int(row * rows * less_fused / split + gradients * (2 + more) + buffers(program))


def buffers(program: Program) -> int:
    """Bytes of parameters that a device has whole for a moment, where they are split by rows.

    Args:
        program: of the run.
    """
    if program.layout.num_shards("embed") == 1:
        return 0
    params, specs = program.abstract.params, program.definition.specs
    whole = {name: leaf.size * leaf.dtype.itemsize for name, leaf in params.items()}
    # One layer of every stack's matrices, and all of what is in none.
    return _COPIES * sum(
        size // (params[n].shape[0] if specs[n].in_block else 1) for n, size in whole.items()
    )


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device while a step runs.

    Attributes:
        state: what goes in: parameters, moments, the batch.
        temporary: activations and gradients.
        compiled: whether the compiler says so; else it is an estimate, of devices that are not here.
        saved: a copy of the state on a CPU, whose memory a checkpoint takes while the next steps run.
    """

    state: int
    temporary: int
    compiled: bool = True
    saved: int = 0

    @property
    def peak(self) -> int:
        """Sum of all."""
        return self.state + self.temporary + self.saved

    def fits(self, limit: int) -> bool:
        """Whether a device of so many bytes has room for it."""
        return self.peak <= (limit if self.compiled else _SLACK * limit)


def program_of(config: Config) -> Program:
    """The program of a config, on stand-ins where its mesh needs more devices than there are.

    Raises:
        ConfigError, PresetError, MeshError: as `assemble`.
    """
    return assemble(config, stand_ins(config.mesh))


def needs(program: Program) -> MemoryEstimate | None:
    """Return the memory of the step: compiled, or estimated where its devices are not here. None where the compiler does not say.

    Args:
        program: of the run.
    """
    if not here(program):
        row = per_row(program.config)
        return None if row is None else _estimated(program, row)
    return needs_of(program, program.compile_train())


def needs_of(program: Program, step: jax.stages.Compiled) -> MemoryEstimate | None:
    """Return what a compiled training step takes, or None where the compiler does not say.

    Args:
        program: program of the run.
        step: from `Program.compile_train`.
    """
    analysis = step.memory_analysis()
    if analysis is None:
        return None
    return MemoryEstimate(
        analysis.argument_size_in_bytes, analysis.temp_size_in_bytes, saved=_saved(program)
    )


def needs_by_shapes(program: Program) -> MemoryEstimate:
    """Estimate what a step takes without compiling it, from the shapes of the state, its gradients and the activations."""
    temporary = _gradients(program) + _activations(program, program.config)
    return MemoryEstimate(_state(program), temporary, compiled=False, saved=_saved(program))


def room(device: Any) -> int | None:
    """Return the bytes that a device has left, or None where that is not known. A CPU device has its share of the host's.

    Args:
        device: a `jax.Device`.
    """
    return host_memory.device_room(device, jax.local_device_count())


def limit_of(program: Program) -> int | None:
    """Return the bytes that a device of a program has left; None where a config or `MUPAX_MEMORY_CHECK` says not to check."""
    if not (program.config.faults.memory_check and host_memory.checks()):
        return None
    local = [
        device
        for device in program.mesh.devices.flat
        if device.process_index == jax.process_index()
    ]
    return room(local[0]) if local else None


def check_arrays(arrays: Any, purpose: str, advice: str) -> None:
    """Refuse to make arrays that the host has no memory for; those of other devices are not counted.

    Args:
        arrays: tree of arrays or their shapes. A shape without a sharding stands for an array of the host.
        purpose: subject of the message, such as "the weights".
        advice: sentence that says what to write instead.

    Raises:
        MemoryLimitError: there is less.
    """
    total = 0
    for leaf in jax.tree.leaves(arrays):
        sharding = getattr(leaf, "sharding", None)
        devices = sharding.addressable_devices if sharding is not None else ()
        if any(device.platform != "cpu" for device in devices):
            continue
        part = (
            math.prod(sharding.shard_shape(leaf.shape))
            if sharding is not None
            else math.prod(leaf.shape)
        )
        total += part * jnp.dtype(leaf.dtype).itemsize * max(1, len(devices))
    host_memory.check(total, purpose, advice)


def check_state(program: Program, limit: int | None, *, saves: bool = True) -> None:
    """Refuse a run whose state and gradients alone do not fit, before anything is compiled.

    Args:
        program: program of the run.
        limit: bytes of a device; None checks nothing.
        saves: whether checkpoints are saved.

    Raises:
        MemoryLimitError: they do not fit. The text names flags that do.
    """
    usage = needs_by_shapes(program)
    usage = usage if saves else dataclasses.replace(usage, saved=0)
    alone = dataclasses.replace(usage, temporary=_gradients(program), compiled=True)
    if limit is not None and not alone.fits(limit):
        raise MemoryLimitError(
            f"out of memory: {verdict(program, usage, limit, compiles=False)}. {OVERRIDE}"
        )


def check_step(
    program: Program, step: jax.stages.Compiled, limit: int | None, *, saves: bool = True
) -> None:
    """Refuse a run whose compiled step does not fit, before the first step.

    Args:
        program: program of the run.
        step: from `Program.compile_train`.
        limit: bytes of a device before the state lay there; None checks nothing.
        saves: whether checkpoints are saved.

    Raises:
        MemoryLimitError: it does not fit. The text names flags that do.
    """
    if limit is None:
        return
    usage = needs_of(program, step)
    if usage is not None and not saves:
        usage = dataclasses.replace(usage, saved=0)
    if usage is not None and (problem := verdict(program, usage, limit, elsewhere=False)):
        raise MemoryLimitError(f"out of memory: {problem}. {OVERRIDE}")


def check_evaluation(
    program: Program, evaluation: jax.stages.Compiled, limit: int | None, held: int = 0
) -> None:
    """Refuse an evaluation that does not fit, before its first batch.

    Args:
        program: program of the run or of the evaluation.
        evaluation: from `Program.compile_eval`.
        limit: bytes of a device; None checks nothing.
        held: bytes that lie there beside the evaluation's parameters, such as optimizer state.

    Raises:
        MemoryLimitError: it does not fit. The text names an evaluation batch that does.
    """
    analysis = evaluation.memory_analysis()
    if limit is None or analysis is None:
        return
    arguments = analysis.argument_size_in_bytes + held
    peak = arguments + analysis.temp_size_in_bytes
    if peak <= limit:
        return
    batch = program.config.eval_batch_size
    ways = program.layout.num_shards("batch")
    text = f"out of memory: an evaluation takes {_of(peak, limit, program)}"
    smaller = batch // 2
    while smaller >= ways:
        estimate = arguments + analysis.temp_size_in_bytes * smaller / batch
        if smaller % ways == 0 and estimate <= _SLACK * limit:
            with_flag = (
                f"With --data.eval-batch-size {smaller} it takes {gib(estimate)} by estimate"
            )
            raise MemoryLimitError(f"{text}. {with_flag}")
        smaller //= 2
    raise MemoryLimitError(
        f"{text}, and no smaller --data.eval-batch-size fits. Take a smaller model or more devices"
    )


def advice(program: Program) -> str:
    """Return a sentence with flags that take less memory, for a run that ended because there was none left."""
    usage = needs_by_shapes(program)
    return f"By its shapes it takes {gib(usage.peak)}. {_fitting(program, usage, int(0.75 * usage.peak), compiles=False, elsewhere=False)}"


def _of(peak: float, limit: int, program: Program) -> str:
    devices = "each device" if program.mesh.size > 1 else "one device"
    source = ""
    if program.mesh.devices.flat[0].platform == "cpu":
        name = host_memory.room().limit
        source = f" ({name} leaves no more)" if name != "this machine" else ""
    return f"{gib(peak)} of {gib(limit)} on {devices}{source}"


def verdict(
    program: Program,
    usage: MemoryEstimate,
    limit: int,
    *,
    compiles: bool = True,
    elsewhere: bool = True,
) -> str | None:
    """Return a sentence for a step that does not fit, with the flags that would; None for one that does.

    Args:
        program: of the run.
        usage: by its step.
        limit: bytes of a device.
        compiles: whether proposals are compiled before they are made; else they are estimated from shapes.
        elsewhere: whether the compiler is asked about more devices too, and as long as it takes.
    """
    if usage.fits(limit):
        return None
    says = f"{_of(usage.peak, limit, program)}."
    if not usage.compiled and compiles:
        says += " An estimate fits where it leaves a tenth."
    return f"{says} {_fitting(program, usage, limit, compiles=compiles, elsewhere=elsewhere)}"


def _fitting(
    program: Program, usage: MemoryEstimate, limit: int, *, compiles: bool, elsewhere: bool
) -> str:
    """Name flags with which a step fits that does not, or say that there are none."""
    began = time.monotonic()
    if here(program):
        for config, flags in itertools.islice(_proposals(program, usage, limit), _TRIES):
            other = assemble(config)
            exact = compiles and (elsewhere or time.monotonic() - began < _PATIENCE_S)
            smaller = needs(other) if exact else _scaled(program, usage, other)
            if smaller and smaller.fits(limit):
                how = "as compiled" if exact else "by estimate"
                return f"With {flags} it takes {gib(smaller.peak)}, {how}"
    shorter = _smaller_text(program, usage, limit)
    if program.layout.platform == "tpu":
        return f"No flags make it fit here; `mupax compile` finds the mesh of a pod. Else write {shorter}"
    if compiles and elsewhere:
        text = _on_more_devices(program, limit)
    else:
        text = _on_more_devices_by_shapes(program, usage, limit)
    if text.endswith("by estimate"):
        return f"{text}. On these devices write {shorter}"
    return f"No flags make it fit these devices. {text}. Write {shorter}"


def _on_more_devices(program: Program, limit: int) -> str:
    """Name the fewest devices that the run fits; ends with "by estimate" where there are some."""
    rows: dict[str, int | None] = {}  # bytes of an example by remat
    least, best = math.inf, "No larger mesh divides the batch and the model's sizes"
    for larger in _larger(program):
        if least == math.inf:
            best = f"On {larger.mesh.size} of them the activations of one example alone are more"
        for config, flags in _savings(larger, ("block",)):
            kind = config.model.compute.remat
            if kind not in rows and _activations(larger, config) > limit:
                continue  # which the sizes alone say
            if kind not in rows:
                rows[kind] = per_row(config)
            if (row := rows[kind]) is None:
                continue
            smaller = _estimated(dataclasses.replace(larger, config=config), row)
            words = " ".join((*_mesh_flags(program.config, config), *flags))
            text = f"On {larger.mesh.size} such devices, with {words}, it takes {gib(smaller.peak)} by estimate"
            if smaller.fits(limit):
                return text
            if smaller.peak < least:
                least, best = smaller.peak, f"{text}, still too much"
    return best


def _scaled(program: Program, usage: MemoryEstimate, other: Program) -> MemoryEstimate:
    """Estimate another program's step from this one's: activations in proportion to what the shapes say, all else by shapes."""
    share = _activations(other, other.config) / max(1, _activations(program, program.config))
    rest = max(0, usage.temporary - _gradients(program))
    temporary = int(_gradients(other) + rest * share + buffers(other))
    return MemoryEstimate(_state(other), temporary, compiled=False, saved=_saved(other))


def _on_more_devices_by_shapes(program: Program, usage: MemoryEstimate, limit: int) -> str:
    """Name the fewest devices that hold the run by `_scaled`; nothing is compiled."""
    best = "No larger mesh divides the batch and the model's sizes"
    for larger in _larger(program):
        peak = _scaled(program, usage, larger).peak
        words = " ".join(_mesh_flags(program.config, larger.config))
        best = f"On {larger.mesh.size} such devices, with {words}, it takes {gib(peak)} by estimate"
        if peak <= _SLACK * limit:
            return best
        best += ", still too much"
    return best


def _smaller_text(program: Program, usage: MemoryEstimate, limit: int) -> str:
    """Name flags of smaller runs that fit by estimate."""
    flags = list(_smaller(program, usage, limit))
    if flags:
        return f"{', or '.join(flags)}, by estimate"
    return f"a smaller model{', or a smaller --model.seq-len' if hasattr(program.config.model, 'seq_len') else ''}"


def _smaller(program: Program, usage: MemoryEstimate, limit: int) -> Iterator[str]:
    """Yield flags of runs with another result that fit the same devices: each sets one size to a half, a quarter, and so on."""
    config = program.config
    sizes = {
        "--data.batch-size": (
            "data",
            "batch_size",
            config.accumulation_steps * program.layout.num_shards("batch"),
        ),
        "--model.seq-len": ("model", "seq_len", 16),
        "--model.width": ("model", "width", 16),
        "--model.depth": ("model", "depth", 1),
        "--model.vocab-size": ("model", "vocab_size", 256),
    }
    for flag, (part, field, least) in sizes.items():
        size = getattr(getattr(config, part), field, None)
        while isinstance(size, int) and size // 2 >= least:
            size //= 2
            with contextlib.suppress(ConfigError, MeshError, ValueError):
                owner = dataclasses.replace(getattr(config, part), **{field: size})
                smaller = dataclasses.replace(config, **{part: owner})
                if _reduced(program, usage, smaller) <= _SLACK * limit:
                    yield f"{flag} {size}"
                    break
    if config.model.compute.param_dtype == "float32":
        compute = dataclasses.replace(config.model.compute, param_dtype="bfloat16")
        narrow = dataclasses.replace(
            config, model=dataclasses.replace(config.model, compute=compute)
        )
        if _reduced(program, usage, narrow) <= _SLACK * limit:
            yield "--model.compute.param-dtype bfloat16"


def _reduced(program: Program, usage: MemoryEstimate, config: Config) -> float:
    """Estimate the peak of a smaller run on the same mesh from what the run itself takes."""
    program.layout.check_batch(config.data.batch_size, config.accumulation_steps)
    model = definition(config.model)
    params = sum(leaf.size * leaf.dtype.itemsize for leaf in model.abstract.values())
    before = sum(leaf.size * leaf.dtype.itemsize for leaf in program.abstract.params.values())
    share = params / before
    gradients = _gradients(program)
    other = dataclasses.replace(program, config=config, definition=model)
    activations = _activations(other, config) / max(1, _activations(program, program.config))
    rest = max(0, usage.temporary - gradients)
    return (usage.state + usage.saved + gradients) * share + rest * activations


def _savings(program: Program, kinds: tuple[str, ...]) -> Iterator[tuple[Config, list[str]]]:
    """Runs with the same result on the same mesh that take less, those that cost less time first, with their flags."""
    config = program.config
    rows, parts = (
        config.data.batch_size // program.layout.num_shards("batch"),
        config.accumulation_steps,
    )
    for remat in dict.fromkeys((config.model.compute.remat, *kinds)):
        compute = dataclasses.replace(config.model.compute, remat=remat)
        saving = dataclasses.replace(
            config, model=dataclasses.replace(config.model, compute=compute)
        )
        if _activations(program, saving) > _activations(program, config):
            continue
        for more in (n for n in range(parts, rows + 1) if rows % n == 0):
            flags = [f"--accumulation-steps {more}"] if more > parts else []
            flags += (
                [f"--model.compute.remat {remat}"] if remat != config.model.compute.remat else []
            )
            yield dataclasses.replace(saving, accumulation_steps=more), flags


def _proposals(program: Program, usage: MemoryEstimate, limit: int) -> Iterator[tuple[Config, str]]:
    """Runs with the same result on the devices there are that should fit, those that cost less time first, with their flags."""
    here, gradients = max(1, _activations(program, program.config)), _gradients(program)
    for other in (program, *_resplit(program)):
        kinds = set()
        for config, flags in _savings(other, ("dots", "block")):
            share = _activations(other, config) / here
            temporary = _gradients(other) + max(0, usage.temporary - gradients) * share
            temporary += buffers(other) - buffers(program)
            kind = config.model.compute.remat
            state = usage.state - _state(program) + _state(other) + _saved(other)
            if kind not in kinds and state + temporary <= _SLACK * limit:
                kinds.add(kind)
                yield config, " ".join((*_mesh_flags(program.config, config), *flags))


def _resplit(program: Program) -> Iterator[Program]:
    """The same devices with more of them along fsdp and fewer along data."""
    data, fsdp = program.mesh.shape["data"], program.mesh.shape["fsdp"]
    for times in (n for n in range(2, data + 1) if data % n == 0):
        yield from _on(program, data=data // times, fsdp=fsdp * times)


def _larger(program: Program) -> Iterator[Program]:
    """More devices than there are, the fewest first, as many along fsdp as the model's sizes allow and the rest along data."""
    sizes, batch = program.mesh.shape, program.config.data.batch_size
    model_ways = program.mesh.size // (sizes["data"] * sizes["fsdp"])
    fewest = max(program.mesh.size, jax.device_count()) // model_ways
    for ways in (n for n in range(fewest + 1, batch + 1) if batch % n == 0):
        splits = (f for f in range(ways, sizes["fsdp"] - 1, -1) if ways % f == 0)
        meshes = (other for f in splits for other in _on(program, data=ways // f, fsdp=f))
        yield from itertools.islice(meshes, 1)


def _on(program: Program, *, data: int, fsdp: int) -> Iterator[Program]:
    """The run on another mesh; nothing where it is refused there."""
    config, shape = program.config, program.mesh.shape
    ways = data * fsdp * shape["experts"]
    batches = config.data if config.eval_batch_size % ways == 0 else _evaluating(config.data, ways)
    as_many = data * fsdp == shape["data"] * shape["fsdp"]
    data = -1 if config.mesh.data == -1 and (as_many or data == 1) else data
    with contextlib.suppress(MeshError):
        mesh = dataclasses.replace(config.mesh, data=data, fsdp=fsdp)
        yield program_of(dataclasses.replace(config, mesh=mesh, data=batches))


def _evaluating(data: DataConfig, ways: int) -> DataConfig:
    """With the nearest evaluation batch that splits: it changes no result."""
    return dataclasses.replace(
        data, eval_batch_size=max(1, (data.eval_batch_size or data.batch_size) // ways) * ways
    )


def _mesh_flags(before: Config, after: Config) -> list[str]:
    """What was changed of the mesh, and of evaluations for it."""
    sizes = [
        (f"mesh.{axis}", getattr(before.mesh, axis), getattr(after.mesh, axis))
        for axis in ("data", "fsdp")
    ]
    sizes.append(("data.eval-batch-size", before.data.eval_batch_size, after.data.eval_batch_size))
    return [f"--{name} {new}" for name, old, new in sizes if new != old]


def _estimated(program: Program, row: int) -> MemoryEstimate:
    return MemoryEstimate(
        _state(program), temporary(program, row), compiled=False, saved=_saved(program)
    )


def _state(program: Program) -> int:
    reference = program.abstract.params if program.config.model.centered else {}
    leaves = jax.tree.leaves((program.abstract, reference))
    return sum(memory.bytes_of(leaf, leaf.sharding) for leaf in leaves)


def _saved(program: Program) -> int:
    """Bytes of a CPU device's share of the copy that a checkpoint makes. Other devices' copies lie in the host's memory."""
    if program.layout.platform != "cpu":
        return 0
    return (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract))
        // program.mesh.size
    )


def optimizer_bytes(program: Program) -> int:
    """Return the bytes of one device that training holds beside the parameters that an evaluation reads."""
    read = program.abstract.evaluated
    held = _state(program) - sum(memory.bytes_of(leaf, leaf.sharding) for leaf in read.values())
    return held + _saved(program)


def _gradients(program: Program) -> int:
    """Bytes of the gradients of all trained parameters; those of microbatches are summed in float32."""
    summed = program.config.accumulation_steps > 1
    total = 0
    for name in program.trained:
        leaf = program.abstract.params[name]
        itemsize = jnp.dtype(jnp.float32).itemsize if summed else None
        total += memory.bytes_of(leaf, leaf.sharding, itemsize)
    return total


def _activations(program: Program, config: Config) -> int:
    return sum(memory.activations(config, program.definition, program.layout))
