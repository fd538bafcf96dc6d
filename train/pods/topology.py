"""Topologies of TPU chips without a TPU: devices that the real compiler compiles for.

If there is no such topology or no compiler, an error says why.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mupax import extras
from mupax.errors import MupaxError
from mupax.train.parallel.chips import CHIPS, Chip

EXAMPLES = "v5e:16x16, v5p:4x4x4, v6e:16x16, v7x:4x4x4 or v4:4x4x4"
"""Topologies that messages name."""
_OUTSIDE = {
    # No machine to ask: without these libtpu tries the network for a minute, and complains.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # Several processes may compile at once where none of them holds a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # The compiler needs no TPU, and must not look for one.
    "JAX_PLATFORMS": "cpu",
    # A program for devices that are not here cannot be read back from the cache.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
"""Environment variables for compiling without a TPU, unless the user has set them."""


class TopologyError(MupaxError):
    """Unknown topology or missing compiler. The message says what to write or install."""


def chip_of(topology: str) -> Chip:
    """Return the chip of a topology such as v5e:16x16.

    Raises:
        TopologyError: The text is not CHIP:AxB or CHIP:AxBxC, the chip is not in `CHIPS`, or the
            chip is wired in fewer dimensions.
    """
    match = re.fullmatch(r"([\w ]+):(\d+(?:x\d+){1,2})", topology)
    if match is None:
        raise TopologyError(
            f"{topology!r} is not a topology; write CHIP:AxB or CHIP:AxBxC, such as {EXAMPLES}"
        )
    name = match[1]
    dims = match[2].split("x")
    if name not in CHIPS:
        raise TopologyError(
            f"no chip is named {name!r}; write one of {', '.join(CHIPS)}, as in {EXAMPLES}"
        )
    chip = CHIPS[name]
    if len(dims) > chip.torus or math.prod(map(int, dims)) < 1:
        example = f"{name}:{'x'.join('4' * chip.torus)}"
        raise TopologyError(
            f"{topology}: chips of {name} are wired in {chip.torus} dimensions; "
            f"write such as {example}"
        )
    return chip


def ready() -> None:
    """Set up the TPU compiler on a machine without a TPU. Call this before JAX is imported.

    Raises:
        TopologyError: libtpu is not installed.
    """
    extras.require("tpu", "compiling for a TPU, which needs no TPU,", TopologyError)
    for name, value in _OUTSIDE.items():
        os.environ.setdefault(name, value)


def devices(topology: str, slices: int = 1) -> Sequence[Any]:
    """Return the devices of a topology, none of which exists, for `core.program.assemble`.

    Args:
        topology: Chip and shape of one slice, such as v5e:16x16.
        slices: Number of slices that the slow network joins, 1 by default.

    Raises:
        TopologyError: `chip_of` or `ready` fails, or the compiler does not know the shape.
    """
    chip = chip_of(topology)
    ready()
    from jax.experimental import topologies

    options: dict[str, Any] = {"wrap": wraps(topology)}
    if slices > 1:
        options["num_slices"] = slices
    if chip.name == "v4":
        # Both cores of a chip as one device, as on the machines.
        options["chip_config_name"] = "megacore"
    try:
        with quiet():
            name = topology.replace(chip.name, chip.family or chip.name, 1)
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=name, **options
            )
    except Exception as error:  # jaxlib's own error, with the reason in its text
        reason = str(error).partition(": ")[2] or str(error)
        raise TopologyError(
            f"no topology {topology}: {reason.strip()}\nwrite such as {EXAMPLES}"
        ) from error
    return description.devices


def wraps(topology: str) -> list[bool]:
    """Return whether the first and last chip are neighbors, for each of three dimensions.

    As in the machines, chips of v5e and v6e are joined into a ring along dimensions of 16, the
    whole of a pod's. Chips that are wired in three dimensions are joined in slices made of whole
    cubes of 4x4x4. (Google Cloud's pages of each version; MaxText's `accelerator_to_spec_map`.)

    Args:
        topology: Topology that `chip_of` accepts.
    """
    # Without this the compiler assumes no rings, and gathers by sums over a whole cube: 8 GB are
    # sent where 4 are needed.
    chip = chip_of(topology)
    dims = [int(size) for size in topology.split(":")[1].split("x")]
    if chip.torus == 3:
        is_cubes = len(dims) == 3 and all(size % 4 == 0 for size in dims)
        return [is_cubes] * 3
    return [*(size == 16 for size in dims), False]


def across(mesh: Any) -> dict[str, int]:
    """Return the number of slices along each mesh axis that crosses slices.

    The mapping is empty on one slice.

    Args:
        mesh: `jax.sharding.Mesh`, or any object with its `shape` and `devices`.
    """
    counts: dict[str, int] = {}
    for index, name in enumerate(mesh.shape):
        # The first line of devices along the axis.
        place: list[Any] = [0] * mesh.devices.ndim
        place[index] = slice(None)
        line = mesh.devices[tuple(place)]
        slices = {getattr(device, "slice_index", None) or 0 for device in line}
        if len(slices) > 1:
            counts[name] = len(slices)
    return counts


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that hides what the TPU library writes to the process's stderr."""
    # The library writes to the file descriptor, so replacing `sys.stderr` hides nothing.
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
