"""TPU chips, and a topology without a TPU: the devices that the real compiler compiles for, or an error that says why not."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mupax.errors import MupaxError

_GIBI, _GIGA, _TERA = 2**30, 1e9, 1e12
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device: a chip, of v7x half a chip. Rates are per second."""

    name: str
    """As topologies are written, such as v5e."""
    device_kind: str
    """As JAX calls its devices."""
    hbm_bytes: int
    """Main memory."""
    peak_flops: float
    """Dense bfloat16 products, a multiply-add counted as two."""
    hbm_bandwidth: float
    """Bytes to and from main memory."""
    ici_bandwidth: float
    """Bytes over all links to neighbours, in one direction: half of what is published as bidirectional."""
    torus: int
    """Dimensions of the network of neighbours."""
    dcn_bandwidth: float | None
    """Bytes to other slices, in one direction; None where it is not published."""
    clock_hz: float | None
    """Clock of the matrix units; None where it is not published and does not follow from the peak."""
    family: str | None = None
    """As the compiler's library writes it, where that is not the name."""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4", device_kind="TPU v4", hbm_bytes=32 * _GIBI, peak_flops=275 * _TERA, hbm_bandwidth=1200 * _GIGA,
            ici_bandwidth=300 * _GIGA, torus=3, dcn_bandwidth=None, clock_hz=1.05 * _GIGA,
        ),
        Chip(
            name="v5e", device_kind="TPU v5 lite", hbm_bytes=16 * _GIBI, peak_flops=197 * _TERA, hbm_bandwidth=819 * _GIGA,
            ici_bandwidth=200 * _GIGA, torus=2, dcn_bandwidth=6400 / 256 / 8 * _GIGA, clock_hz=1.5 * _GIGA,
        ),
        Chip(
            name="v5p", device_kind="TPU v5", hbm_bytes=95 * _GIBI, peak_flops=459 * _TERA, hbm_bandwidth=2765 * _GIGA,
            ici_bandwidth=600 * _GIGA, torus=3, dcn_bandwidth=50 / 8 * _GIGA, clock_hz=1.75 * _GIGA,
        ),
        Chip(
            name="v6e", device_kind="TPU v6 lite", hbm_bytes=32 * _GIBI, peak_flops=918 * _TERA, hbm_bandwidth=1638 * _GIGA,
            ici_bandwidth=400 * _GIGA, torus=2, dcn_bandwidth=25600 / 256 / 8 * _GIGA, clock_hz=None,
        ),
        Chip(
            name="v7x", device_kind="TPU7x", hbm_bytes=192 // 2 * _GIBI, peak_flops=2307 / 2 * _TERA,
            hbm_bandwidth=7380 / 2 * _GIGA, ici_bandwidth=600 / 2 * _GIGA, torus=3, dcn_bandwidth=100 / 2 / 8 * _GIGA,
            clock_hz=None, family="tpu7x",
        ),
    )
}  # fmt: skip
"""Chip by the first word of a topology.

Sources: Google Cloud's "System architecture" page of each version (memory, peak, memory bandwidth; links as
"bidirectional ICI bandwidth per chip" or, in Gbps, one direction; data centre network per pod of 256 or per chip).
v4: Jouppi et al. 2023 (arXiv 2304.01433), table 4: six links of 50 GB/s, 1050 MHz. v5e and v5p publish no clock: it is
peak / (2 x 128 x 128 x matrix units), with 4 and 8 units. The pages of v6e give a peak that its two 256 x 256 units
would reach at 3.5 GHz only, so no clock is claimed; that of v7x ("TPU7x") says nothing of its units.
"""


class TopologyError(MupaxError):
    """A topology that does not exist, or no compiler for it. The text says what to write or install."""


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as v5e:16x16.

    Raises:
        TopologyError: the text is not CHIP:AxB or CHIP:AxBxC, or the chip is not in the table.
    """
    match = re.fullmatch(r"([\w ]+):(\d+(?:x\d+){1,2})", topology)
    if match is None:
        raise TopologyError(f"{topology!r} is not a topology; write CHIP:AxB or CHIP:AxBxC, such as {EXAMPLES}")
    name, dims = match[1], match[2].split("x")
    if name not in CHIPS:
        raise TopologyError(f"no chip is named {name!r}; write one of {', '.join(CHIPS)}, as in {EXAMPLES}")
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
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(
            "the TPU compiler is not installed; pip install 'mupax[tpu]' (no TPU is needed to compile for one)"
        )
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

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if chip.name == "v4":
        # Both cores of a chip as one device, as on the machines.
        options["chip_config_name"] = "megacore"
    try:
        with quiet():
            named = topology.replace(chip.name, chip.family or chip.name, 1)
            described = topologies.get_topology_desc(platform="tpu", topology_name=named, **options)
    except Exception as error:  # jaxlib's own, with the reason in its text
        reason = str(error).partition(": ")[2] or str(error)
        raise TopologyError(f"no topology {topology}: {reason.strip()}\nwrite such as {EXAMPLES}") from error
    return described.devices


def across(mesh: Any) -> dict[str, int]:
    """Mesh axes that cross slices, and the number of slices along each; empty on one slice.

    Args:
        mesh: of JAX devices.
    """
    counts: dict[str, int] = {}
    for axis, name in enumerate(mesh.shape):
        first = tuple(slice(None) if other == axis else 0 for other in range(mesh.devices.ndim))
        counts[name] = len({getattr(device, "slice_index", None) or 0 for device in mesh.devices[first]})
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
