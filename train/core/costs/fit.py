"""Whether a step fits its devices' memory, and the flags that make it fit: each proposal is compiled, or estimated, before it is made."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from mupax.terminal import gib
from mupax.train.config.data import DataConfig
from mupax.train.config.run import Config
from mupax.train.core.costs import absent, memory
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.mesh import MeshError

_TRIES = 4
"""Proposals that are compiled; the estimates that order them are within some ten per cent."""
_SLACK = 0.9
"""Of the memory, as an estimate may be: the rest is the runtime's and the host's."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes of one device while a step runs.

    Attributes:
        state: what goes in: parameters, moments, the batch.
        temporary: activations and gradients.
        compiled: whether the compiler says so; else it is an estimate, of devices that are not here.
    """

    state: int
    temporary: int
    compiled: bool = True

    @property
    def peak(self) -> int:
        """Both."""
        return self.state + self.temporary

    def fits(self, limit: int) -> bool:
        """Whether a device of so many bytes has room for it."""
        return self.peak <= (limit if self.compiled else _SLACK * limit)


def program_of(config: Config) -> Program:
    """The program of a config, on stand-ins where its mesh needs more devices than there are.

    Raises:
        ConfigError, PresetError, MeshError: as `assemble`.
    """
    return assemble(config, absent.stand_ins(config.mesh))


def needs(program: Program) -> Needs | None:
    """What the step takes: compiled, or estimated where its devices are not here. None where the compiler does not say.

    Args:
        program: of the run.
    """
    if not absent.here(program):
        row = absent.per_row(program.config)
        return None if row is None else _estimated(program, row)
    analysis = program.compile_train().memory_analysis()
    return analysis and Needs(analysis.argument_size_in_bytes, analysis.temp_size_in_bytes)


def room(device: Any) -> int | None:
    """Bytes that a device may have in use: of a CPU its part of the host's memory. None where it is not known.

    Args:
        device: a `jax.Device`.
    """
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP.read_text().strip() if _CGROUP.is_file() else "max"
    return min(total, int(limit) if limit.isdecimal() else total) // jax.local_device_count()


def verdict(program: Program, usage: Needs, limit: int) -> str | None:
    """A sentence for a step that does not fit, with the flags that would; None for one that does.

    Args:
        program: of the run.
        usage: by its step.
        limit: bytes of a device.
    """
    if usage.fits(limit):
        return None
    says = f"{gib(usage.peak)} of {gib(limit)} on {'each device' if program.mesh.size > 1 else 'one device'}."
    if not usage.compiled:
        says += " An estimate fits where it leaves a tenth."
    if absent.here(program):
        for config, flags in itertools.islice(_proposals(program, usage, limit), _TRIES):
            if (smaller := needs(assemble(config))) and smaller.fits(limit):
                return f"{says} With {flags} it takes {gib(smaller.peak)}, as compiled"
    shorter = f"a smaller model{', or a smaller --model.seq-len' if hasattr(program.config.model, 'seq_len') else ''}"
    if program.layout.platform == "tpu":
        return (
            f"{says} No flags make it fit here; `python -m train compile` finds the mesh of a pod. Else write {shorter}"
        )
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
                rows[kind] = absent.per_row(config)
            if (row := rows[kind]) is None:
                continue
            smaller = _estimated(dataclasses.replace(larger, config=config), row)
            words = " ".join((*_mesh_flags(program.config, config), *flags))
            text = f"On {larger.mesh.size} such devices, with {words}, it takes {gib(smaller.peak)} by estimate"
            if smaller.fits(limit):
                return f"{says} {text}"
            if smaller.peak < least:
                least, best = smaller.peak, f"{text}, still too much"
    return f"{says} No flags make it fit these devices. {best}. Write {shorter}"


def _savings(program: Program, kinds: tuple[str, ...]) -> Iterator[tuple[Config, list[str]]]:
    """Runs with the same result on the same mesh that take less, those that cost less time first, with their flags."""
    config = program.config
    rows, parts = config.data.batch_size // program.layout.ways("batch"), config.accumulation_steps
    for remat in dict.fromkeys((config.model.compute.remat, *kinds)):
        compute = dataclasses.replace(config.model.compute, remat=remat)
        saving = dataclasses.replace(config, model=dataclasses.replace(config.model, compute=compute))
        if _activations(program, saving) > _activations(program, config):
            continue
        for more in (n for n in range(parts, rows + 1) if rows % n == 0):
            flags = [f"--accumulation-steps {more}"] if more > parts else []
            flags += [f"--model.compute.remat {remat}"] if remat != config.model.compute.remat else []
            yield dataclasses.replace(saving, accumulation_steps=more), flags


def _proposals(program: Program, usage: Needs, limit: int) -> Iterator[tuple[Config, str]]:
    """Runs with the same result on the devices there are that should fit, those that cost less time first, with their flags."""
    here, gradients = max(1, _activations(program, program.config)), _gradients(program)
    for other in (program, *_resplit(program)):
        kinds = set()
        for config, flags in _savings(other, ("dots", "block")):
            share = _activations(other, config) / here
            temporary = _gradients(other) + max(0, usage.temporary - gradients) * share
            temporary += absent.buffers(other) - absent.buffers(program)
            kind = config.model.compute.remat
            if kind not in kinds and usage.state - _state(program) + _state(other) + temporary <= _SLACK * limit:
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
    return dataclasses.replace(data, eval_batch_size=max(1, (data.eval_batch_size or data.batch_size) // ways) * ways)


def _mesh_flags(before: Config, after: Config) -> list[str]:
    """What was changed of the mesh, and of evaluations for it."""
    sizes = [(f"mesh.{axis}", getattr(before.mesh, axis), getattr(after.mesh, axis)) for axis in ("data", "fsdp")]
    sizes.append(("data.eval-batch-size", before.data.eval_batch_size, after.data.eval_batch_size))
    return [f"--{name} {new}" for name, old, new in sizes if new != old]


def _estimated(program: Program, row: int) -> Needs:
    return Needs(_state(program), absent.temporary(program, row), compiled=False)


def _state(program: Program) -> int:
    return sum(memory.bytes_of(leaf, leaf.sharding) for leaf in jax.tree.leaves(program.abstract))


def _gradients(program: Program) -> int:
    return sum(memory.bytes_of(leaf, leaf.sharding) for leaf in program.abstract.params.values())


def _activations(program: Program, config: Config) -> int:
    return sum(memory.activations(config, program.definition, program.layout))
