"""What a compiled step must not do: gather a whole stack of layers, replicate optimizer state, or send more than its mesh asks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mupax.terminal import gib
from mupax.train.core.program import Program
from mupax.train.pods import estimates
from mupax.train.pods.collectives import Collective
from mupax.zoo import flops
from mupax.zoo.families import Remat

SLACK = 1.02
"""Bytes sent inside the layer loop over those required: norms, losses and other small sums."""

_RECOMPUTED: dict[Remat, int] = {"none": 0, "dots": 1, "attention": 1, "block": 1, "offload": 1}
"""Forward passes of a block that the backward pass may need again, and then its parameters too."""


MOST_ARGUMENTS, NUMBERS = 1.05, 2**17
"""Bytes of a step's arguments over those of state and batch, and those of its numbers (a tile each): what is more is padding."""


def problems(program: Program, collectives: Sequence[Collective], state_shardings: Any, arguments: int) -> list[str]:
    """Everything wrong with a compiled step, in words; empty where nothing is.

    Args:
        program: what was compiled.
        collectives: its.
        state_shardings: how the compiled step takes its state, in the state's structure.
        arguments: bytes that it takes on a device.
    """
    specs, abstract = program.definition.specs, program.definition.abstract
    stacks = {n: abstract[n].shape for n, spec in specs.items() if spec.in_block and spec.fan_in and len(spec.axes) > 2}
    stacked = whole_stacks(collectives, stacks, program.mesh.shape["tensor"])
    expected = estimates.expected(program)
    return [
        *stacked,
        *whole_moments(program, state_shardings),
        *unrequired(program, collectives),
        *padding(arguments, expected["state"] + expected["batch"]),
    ]


def padding(arguments: int, needed: int) -> list[str]:
    """A line where a step's arguments take more memory than what is in them.

    Args:
        arguments: bytes that the compiled step takes on a device.
        needed: bytes of its state and batch there.
    """
    if arguments <= MOST_ARGUMENTS * needed + NUMBERS:
        return []
    return [f"arguments are {gib(arguments)} for {gib(needed)} of state and batch: layouts are padded"]


def whole_stacks(collectives: Iterable[Collective], stacks: Mapping[str, tuple[int, ...]], ways: int = 1) -> list[str]:
    """All-gathers of the parameters of all layers at once: memory that scanning over layers is there to save.

    Args:
        collectives: of a program.
        stacks: parameter to shape, layers first.
        ways: parts that a matrix stays split into.
    """
    return [
        f"{one.name} gathers all layers of {name} at once: {dims}"
        for one in collectives
        if one.kind == "all-gather"
        for dims in one.results
        for name, shape in stacks.items()
        if shape[0] in dims and math.prod(dims) * ways == math.prod(shape)
    ]


def whole_moments(program: Program, state_shardings: Any) -> list[str]:
    """Optimizer state of which a device holds more than of the parameter it belongs to, a line each.

    Args:
        program: what was compiled: its `abstract` says how parameters lie.
        state_shardings: how the compiled step takes its state, in the state's structure.
    """
    params = program.abstract.params
    leaves = jax.tree_util.tree_leaves_with_path(program.abstract.opt_state)
    placed = jax.tree.leaves(state_shardings.opt_state)
    wrong = []
    for (path, leaf), sharding in zip(leaves, placed, strict=True):
        name = getattr(path[-1], "key", None)
        if name not in params or params[name].shape != leaf.shape:
            continue
        held, split = (each.shard_shape(leaf.shape) for each in (sharding, params[name].sharding))
        if math.prod(held) > math.prod(split):
            wrong.append(f"the optimizer's {jax.tree_util.keystr(path)} is {held} on a device, its parameter {split}")
    return wrong


def unrequired(program: Program, collectives: Iterable[Collective]) -> list[str]:
    """Mesh axes over which the layer loop sends more than it must, a line each.

    Args:
        program: what was compiled; `required` says what it must send.
        collectives: of its compiled step; those outside loops over layers are passed over.
    """
    allowed, config, sizes = required(program), program.config, program.definition.sizes
    stacks = flops.stacks(config.model)
    layers = {
        blocks.depth - out for blocks in stacks for out in (0, 1)
    }  # the compiler may take one layer out of the loop
    # Norm gains, biases and row statistics: a few vectors per layer and position.
    each = config.data.batch_size / program.mesh.size
    vectors = sum(blocks.depth * (sizes["embed"] + each * (blocks.length + blocks.memory)) for blocks in stacks)
    small = 64.0 * config.accumulation_steps * vectors
    inside: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for one in collectives:
        if layers & set(one.trips):
            inside[one.axes].append(one)
    return [
        f"over {' x '.join(axes)} the layer loop sends {size:.3g} bytes, and needs {allowed.get(axes, 0.0):.3g} "
        f"({', '.join(one.name for one in sent[:5])})"
        for axes, sent in inside.items()
        if (size := sum(one.bytes * one.times for one in sent)) > SLACK * allowed.get(axes, 0.0) + small
    ]


def required(program: Program) -> dict[tuple[str, ...], float]:
    """Bytes that the layer loop of one step must send at most, by the mesh axes they are sent over, whole arrays counted."""
    config, mesh, model = program.config, program.mesh.shape, program.config.model
    itemsize = jnp.dtype(model.compute.dtype).itemsize
    again = _RECOMPUTED[model.compute.remat]
    specs, abstract = program.definition.specs, program.definition.abstract
    count = sum(abstract[name].size for name, spec in specs.items() if spec.in_block) / mesh["tensor"]
    # Of experts a device has its own alone; all else is split by their axis too.
    own = estimates.expert_weights(program.definition) / mesh["tensor"]
    split = {"own": own / mesh["experts"], "others": count - own}
    # Every device of a group sums its own gradient, which may be in float32.
    gradients = count * 4 * config.accumulation_steps
    each = {name: n * ((2 + again) * itemsize + 4) * config.accumulation_steps for name, n in split.items()}
    shared = tuple(axis for axis in ("fsdp", "experts") if mesh[axis] > 1) or ("fsdp",)
    rows = config.data.batch_size / program.layout.ways("batch")
    sizes = defaultdict(int, program.definition.sizes)
    stacks = flops.stacks(model)
    positions = rows * itemsize * sum(blocks.depth * blocks.length for blocks in stacks)
    memory = rows * itemsize * sum(blocks.depth * blocks.memory for blocks in stacks)
    branches = rows * itemsize * sum(blocks.depth * len(blocks.stack.branches) * blocks.length for blocks in stacks)
    keys = 2 * (positions + memory) * sizes["kv_heads"] * sizes["head_dim"]
    exchanged = 2 * positions / mesh["sequence"] * (sizes["heads"] + sizes["kv_heads"]) * sizes["head_dim"]
    allowed: dict[tuple[str, ...], float] = {
        ("fsdp",): each["own"],
        # A branch's sum forward and one backward; heads that do not divide the axis cost a gather more each.
        ("tensor",): (2 + again) * (branches + memory) / mesh["sequence"] * sizes["embed"],
        # Keys and values gathered, their gradients scattered; or both sent round, and a device's own queries, keys, values and
        # outputs of the whole layer exchanged so that all have as much to do.
        ("sequence",): (2 + again) * (keys + exchanged) + 2 * keys + gradients,
    }
    allowed[shared] = allowed.get(shared, 0.0) + each["others"]
    # Tokens to their experts and back, in every pass.
    sent = 2 * (2 + again) * positions * estimates.expert_slots(config, mesh["experts"]) * sizes["embed"]
    allowed["experts",] = allowed.get(("experts",), 0.0) + sent + gradients
    summed = [axis for axis in ("data", "fsdp", "experts", "sequence") if mesh[axis] > 1]
    for first, last in itertools.combinations_with_replacement(range(len(summed)), 2):
        allowed.setdefault(tuple(summed[first : last + 1]), gradients)
    return allowed
