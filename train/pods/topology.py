"""A topology without a TPU: the devices that the real compiler compiles for, or an error that says why not."""

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
    # What is compiled for devices that are not here cannot be read back.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


class TopologyError(MupaxError):
    """A topology that does not exist, or no compiler for it. The text says what to write or install."""


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as v5e:16x16.

    Raises:
        TopologyError: the text is not CHIP:AxB or CHIP:AxBxC, or the chip is not in the table.
    """
    match = re.fullmatch(r"([\w ]+):(\d+(?:x\d+){1,2})", topology)
    if match is None:
        raise TopologyError(
            f"{topology!r} is not a topology; write CHIP:AxB or CHIP:AxBxC, such as {EXAMPLES}"
        )
    name, dims = match[1], match[2].split("x")
    if name not in CHIPS:
        raise TopologyError(
            f"no chip is named {name!r}; write one of {', '.join(CHIPS)}, as in {EXAMPLES}"
        )
    chip = CHIPS[name]
    if len(dims) > chip.torus or math.prod(map(int, dims)) < 1:
        example = f"{name}:{'x'.join('4' * chip.torus)}"
        raise TopologyError(
            f"{topology}: chips of {name} are wired in {chip.torus} dimensions; write such as {example}"
        )
    return chip


def ready() -> None:
    """Let the TPU compiler run where there is no TPU. To be called before JAX is imported.

    Raises:
        TopologyError: libtpu is not installed.
    """
    extras.require("tpu", "compiling for a TPU, which needs no TPU,", TopologyError)
    for name, value in _OUTSIDE.items():
        os.environ.setdefault(name, value)


def devices(topology: str, slices: int = 1) -> Sequence[Any]:
    """The devices of a topology, for `mupax.train.core.program.assemble`; none of them exists.

    Args:
        topology: chip and shape of one slice, such as v5e:16x16.
        slices: slices, joined by the slow network.

    Raises:
        TopologyError: as `chip_of` and `ready`, or the compiler does not know the shape.
    """
    chip = chip_of(topology)
    ready()
    from jax.experimental import topologies

    options: dict[str, Any] = {
        "wrap": wraps(topology),
        **({"num_slices": slices} if slices > 1 else {}),
    }
    if chip.name == "v4":
        # Both cores of a chip as one device, as on the machines.
        options["chip_config_name"] = "megacore"
    try:
        with quiet():
            named = topology.replace(chip.name, chip.family or chip.name, 1)
            described = topologies.get_topology_desc(platform="tpu", topology_name=named, **options)
    except Exception as error:  # jaxlib's own, with the reason in its text
        reason = str(error).partition(": ")[2] or str(error)
        raise TopologyError(
            f"no topology {topology}: {reason.strip()}\nwrite such as {EXAMPLES}"
        ) from error
    return described.devices


def wraps(topology: str) -> list[bool]:
    """Whether the first and the last chip of each of three dimensions are neighbours, too, as in the machines.

    Of v5e and v6e along dimensions of 16, the whole of a pod's; of chips wired in three dimensions in slices made of whole cubes of
    4x4x4 (Google Cloud's pages of each version; as MaxText's `accelerator_to_spec_map` has it). The compiler takes none unless told,
    and then gathers by sums over a whole cube: 8 GB sent where 4 are needed.

    Args:
        topology: as of `chip_of`.
    """
    chip, dims = chip_of(topology), [int(size) for size in topology.split(":")[1].split("x")]
    if chip.torus == 3:
        return [len(dims) == 3 and all(size % 4 == 0 for size in dims)] * 3
    return [*(size == 16 for size in dims), False]


def across(mesh: Any) -> dict[str, int]:
    """Mesh axes that cross slices, and the number of slices along each; empty on one slice.

    Args:
        mesh: of JAX devices.
    """
    counts: dict[str, int] = {}
    for axis, name in enumerate(mesh.shape):
        first = tuple(slice(None) if other == axis else 0 for other in range(mesh.devices.ndim))
        counts[name] = len(
            {getattr(device, "slice_index", None) or 0 for device in mesh.devices[first]}
        )
    return {name: count for name, count in counts.items() if count > 1}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what the TPU library writes to the process's stderr whatever Python says."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
