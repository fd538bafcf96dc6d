"""One configuration compiled for a topology, and everything that the compiled program says about itself."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mupax.train.config.run import Config
from mupax.train.core.costs import losses, memory
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.chips import Chip
from mupax.train.pods import buffers, checks, estimates, hlo, topology
from mupax.train.pods.collectives import Collective, collectives, table
from mupax.train.pods.refusals import refused
from mupax.zoo.layers.flash import block_of

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
NAMED_SHARE = 0.01
"""Temporaries of at least this share of the peak are named in a report."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time of a step by each resource, in seconds, if every other one were free."""

    compute: float
    memory: float
    network: float
    slow_network: float
    cycles: float | None
    """Of the compiler's estimated cycles, where the clock is known. Has no collectives, and no overlap between chips."""
    alone: float = 0.0
    """Of the network's, what computation waits for: collectives that the compiler runs beside nothing."""

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self._resources(), key=self._resources().__getitem__)

    @property
    def seconds(self) -> float:
        """Step time with everything overlapped but what runs alone: a bound from below, so that the utilization is one from above."""
        waiting = self.alone if self.bound != "network" else 0.0
        return self._resources()[self.bound] + waiting

    def _resources(self) -> dict[str, float]:
        return {name: value or 0.0 for name, value in dataclasses.asdict(self).items() if name != "alone"}

    def utilization(self, model_flops: float, chip: Chip) -> float:
        """MFU: FLOPs that the model needs on this chip (no recomputation), over what it could do in the step's time.

        Args:
            model_flops: of one step, on one device.
            chip: what it could do at its peak.
        """
        return model_flops / (self.seconds * chip.peak_flops)

    def to_json(self, model_flops: float, chip: Chip) -> dict[str, Any]:
        """The times, what bounds them, the step time in seconds and the MFU.

        Args:
            model_flops, chip: as in `utilization`.
        """
        mfu = self.utilization(model_flops, chip)
        return {**dataclasses.asdict(self), "bound": self.bound, "step_seconds": self.seconds, "mfu": mfu}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step compiled for a topology. Bytes are per device, FLOPs of the whole step over all devices.

    Attributes:
        program: the step's.
        chip: what it is compiled for.
        seconds: time to compile.
        traced_flops: of all matrix products as traced, recomputation included.
        used_bytes: main memory that a device needs at the peak, as the compiler allocates it.
        limit_bytes: main memory that a device offers.
        module: the optimized program; this and what follows are empty where it does not fit.
        text: the same as HLO text.
        memory: bytes of arguments, outputs, aliased, temporaries and code.
        live: temporaries at the peak, largest first.
        state_shardings: how the program takes its state.
    """

    program: Program
    chip: Chip
    seconds: float
    traced_flops: float
    used_bytes: int
    limit_bytes: int
    module: hlo.Module | None = None
    text: str = ""
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    live: Sequence[buffers.Buffer] = ()
    state_shardings: Any = None

    @property
    def fits(self) -> bool:
        """Whether the compiler found room."""
        return self.module is not None and self.used_bytes <= self.limit_bytes

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective of a step."""
        mesh = self.program.mesh
        return [] if self.module is None else collectives(self.module, dict(mesh.shape), topology.across(mesh))

    def roofline(self) -> Roofline | None:
        """Least time of a step; None where the program does not fit."""
        if self.module is None:
            return None
        chip, network, alone = self.chip, {True: 0.0, False: 0.0}, 0.0
        for one in self.collectives:
            within = not one.between_slices
            bandwidth = _bandwidth(self.program.mesh, one.axes, chip) if within else chip.dcn_bandwidth
            seconds = one.wire_bytes * one.times / bandwidth if bandwidth else 0.0
            network[within] += seconds
            alone += 0.0 if one.overlapped else seconds
        compute = self.traced_flops / self.program.mesh.size / chip.peak_flops
        cycles = self.module.cycles / chip.clock_hz if chip.clock_hz else None
        return Roofline(
            compute=compute,
            memory=self.module.hbm_bytes / chip.hbm_bandwidth,
            network=network[True],
            slow_network=network[False],
            cycles=cycles,
            alone=alone,
        )

    def _loss(self) -> dict[str, Any]:
        """How the loss is computed, and of `auto` the bytes by which each way would raise the peak, the one taken first."""
        config, definition, layout = self.program.config, self.program.definition, self.program.layout
        way, work = memory.loss(config, definition, layout), memory.work(config, definition, layout)
        ways = losses.options(work) if config.model.compute.cross_entropy == "auto" else []
        above = {one.kind: losses.above(work, one) for one in ways}
        return {"kind": way.kind, "parts": way.parts, "kept": way.exp_parts, "raises_peak_by": above}

    def report(self) -> dict[str, Any]:
        """Everything as JSON."""
        config, roofline, module = self.program.config, self.roofline(), self.module
        expected, devices = estimates.expected(self.program), self.program.mesh.size
        model_flops = estimates.model_flops(config)
        arguments = self.memory.get("argument", 0)
        problems = checks.problems(self.program, self.collectives, self.state_shardings, arguments) if module else []
        return {
            "recipe": config.recipe,
            "fits": self.fits,
            "chip": self.chip.name,
            "devices": devices,
            "mesh": {axis: size for axis, size in self.program.mesh.shape.items() if size > 1},
            "batch_size": config.data.batch_size,
            "accumulation_steps": config.accumulation_steps,
            "compute": dataclasses.asdict(config.model.compute),
            "loss": self._loss(),
            "flags": self.program.compiler_options(),
            "parameters": self.program.definition.count(),
            "hbm_bytes_per_device": self.limit_bytes,
            "peak_bytes_per_device": self.used_bytes,
            "spare_bytes_per_device": self.limit_bytes - self.used_bytes,
            **{f"{name}_bytes_per_device": size for name, size in self.memory.items()},
            "expected_bytes_per_device": expected,
            "peak_over_expected": self.used_bytes / sum(expected.values()),
            "arguments_over_expected": arguments / (expected["state"] + expected["batch"]),
            "flops_per_step": model_flops,
            "traced_flops_per_step": self.traced_flops,
            "hbm_traffic_per_device": module.hbm_bytes if module else None,
            "estimated_cycles": module.cycles if module else None,
            "loops_of_unknown_length": module.unknown_loops if module else None,
            "collectives": table(self.collectives),
            "problems": problems,
            "roofline": roofline and roofline.to_json(model_flops / devices, self.chip),
            "temporaries": [dataclasses.asdict(b) for b in self.live if b.bytes >= NAMED_SHARE * self.used_bytes],
            "compile_seconds": round(self.seconds, 1),
            "jax": jax.__version__,
        }


def compile_for(config: Config, name: str, slices: int = 1) -> Compiled:
    """A config's training step, compiled for a topology.

    Args:
        config: of the run.
        name: the topology, such as v5e:16x16.
        slices: how many of them, joined by the slow network.

    Raises:
        TopologyError: no such topology, or no compiler for it.
        RefusedError: the compiler refuses the step for another reason than its size in a chip's memory.
        ConfigError, PresetError, MeshError: as the run itself would say.
    """
    program, chip = assemble(config, topology.devices(name, slices)), topology.chip_of(name)
    traced, model, kind = program.trace_train(), config.model, program.mesh.devices.flat[0].device_kind
    block = block_of(model.sizes()["position"], kind, model.compute.attention_block, causal=model.causal)
    visited = estimates.attention_share(program, block, of_grid=True)
    flops = estimates.matmul_flops(traced.jaxpr, visited)
    lowered, began = traced.lower(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = program.compiler_options() | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            with topology.quiet():
                executable = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            temporaries = _TEMPORARIES.search(str(error))
            used = _USED.search(str(error)) or temporaries
            if used is None:
                raise refused(name, str(error), model.compute.attention_block) from None
            need, limit = (int(float(used[i]) * _UNITS[used[i + 1]]) for i in (1, 3))
            if used is temporaries:
                need += estimates.expected(program)["state"]  # which stands beside the temporaries
            return Compiled(program, chip, time.monotonic() - began, flops, need, limit)
        seconds = time.monotonic() - began
        module = hlo.parse(text := executable.as_text() or "")
        assigned = buffers.read(Path(folder), module)
    stats: Any = executable.memory_analysis()
    sizes = {
        "argument": stats.argument_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "alias": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    need, live, state = sum(sizes.values()) - 2 * sizes["alias"], [], executable.input_shardings[0][0]
    if assigned is not None:
        # The statistics count some buffers of loops twice; what is allocated is in the buffer assignment.
        sizes["temporary"], total, live = assigned
        need = total + sizes["code"]
    return Compiled(program, chip, seconds, flops, need, chip.hbm_bytes, module, text, sizes, live, state)


def _bandwidth(mesh: jax.sharding.Mesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Bytes a second that a chip can send to its neighbours along mesh axes."""
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.shape)
    group: Any = np.ravel(mesh.devices[index])
    places = np.array([device.coords for device in group])
    wired = sum(len(set(column)) > 1 for column in places.T.tolist())
    return chip.ici_bandwidth * max(1, wired) / chip.torus
