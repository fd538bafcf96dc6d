"""Whether a step fits its devices' memory, and the flags that make it fit: each proposal is compiled before it is made."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from mupax.terminal import gib
from mupax.train.config.run import Config
from mupax.train.core.costs import memory
from mupax.train.core.program import Program, assemble

_TRIES = 3
"""Proposals that are compiled; the estimates that order them are within some ten per cent."""
_SLACK = 0.9
"""Of the memory, as an estimate may be: the rest is the runtime's and the host's."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes of one device while a compiled step runs.

    Attributes:
        state: what goes in: parameters, moments, the batch.
        temporary: activations and gradients.
    """

    state: int
    temporary: int

    @property
    def peak(self) -> int:
        """Both."""
        return self.state + self.temporary


def needs(program: Program) -> Needs | None:
    """What the compiled step takes, None where the compiler does not say.

    Args:
        program: of the run.
    """
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


def verdict(program: Program, taken: Needs, limit: int) -> str | None:
    """A sentence for a step that does not fit, with the flags that would; None for one that does.

    Args:
        program: of the run.
        taken: by its step.
        limit: bytes of a device.
    """
    if taken.peak <= limit:
        return None
    says = f"{gib(taken.peak)} of {gib(limit)} on {'each device' if program.mesh.size > 1 else 'one device'}."
    if taken.state > _SLACK * limit:
        split = program.mesh.shape["fsdp"] * -(-taken.state // int(_SLACK * limit))
        return f"{says} The state alone is too much; split it over {split} devices or more with --mesh.fsdp {split}"
    for config, flags in itertools.islice(_proposals(program, taken, limit), _TRIES):
        if (smaller := needs(assemble(config))) and smaller.peak <= limit:
            return f"{says} With {flags} it takes {gib(smaller.peak)}, as compiled"
    return f"{says} More devices make it fit (--mesh.fsdp), or a smaller --data.batch-size or --model.seq-len"


def _proposals(program: Program, taken: Needs, limit: int) -> Iterator[tuple[Config, str]]:
    """Runs with the same result that should fit, those that cost less time first, with their flags."""
    config = program.config
    grads = sum(memory.bytes_of(leaf, leaf.sharding) for leaf in program.abstract.params.values())
    rows = config.data.batch_size // program.layout.ways("batch")
    here = _activations(program, config)
    for remat in dict.fromkeys((config.model.compute.remat, "dots", "block")):
        compute = dataclasses.replace(config.model.compute, remat=remat)
        saving = dataclasses.replace(config, model=dataclasses.replace(config.model, compute=compute))
        share = _activations(program, saving) / here
        for parts in range(config.accumulation_steps, rows + 1):
            if rows % parts or share > 1:
                continue
            temporary = grads + max(0, taken.temporary - grads) * share * config.accumulation_steps / parts
            if taken.state + temporary <= _SLACK * limit:
                flags = [f"--accumulation-steps {parts}"] if parts > config.accumulation_steps else []
                flags += [f"--model.compute.remat {remat}"] if share < 1 else []
                yield dataclasses.replace(saving, accumulation_steps=parts), " ".join(flags)
                break


def _activations(program: Program, config: Config) -> int:
    return sum(memory.activations(config, program.definition, program.layout))
