"""TPU chips: memory, peak rates, bandwidths and clock of each generation."""

from __future__ import annotations

import dataclasses

_GIBI = 2**30
_GIGA = 1e9
_TERA = 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device: a chip, or half a chip of v7x. Rates are per second."""

    name: str
    """Name as topologies are written, such as v5e."""
    device_kind: str
    """Name that JAX gives to its devices."""
    hbm_bytes: int
    """Size of the main memory."""
    peak_flops: float
    """Peak rate of dense bfloat16 products in FLOPs. A multiply-add counts as two."""
    hbm_bandwidth: float
    """Bytes to and from main memory."""
    ici_bandwidth: float
    """Bytes over all links to neighbours, in one direction.

    Half of the number that is published as bidirectional."""
    torus: int
    """Dimensions of the network of neighbours."""
    dcn_bandwidth: float | None
    """Bytes to other slices, in one direction, or `None` if the number is not published."""
    clock_hz: float | None
    """Clock of the matrix units, or `None`.

    `None` if the clock is not published and does not follow from the peak rate."""
    family: str | None = None
    """Name that the compiler's library uses, if it is not `name`."""


_V4 = Chip(
    name="v4",
    device_kind="TPU v4",
    hbm_bytes=32 * _GIBI,
    peak_flops=275 * _TERA,
    hbm_bandwidth=1200 * _GIGA,
    ici_bandwidth=300 * _GIGA,
    torus=3,
    dcn_bandwidth=None,
    clock_hz=1.05 * _GIGA,
)
_V5E = Chip(
    name="v5e",
    device_kind="TPU v5 lite",
    hbm_bytes=16 * _GIBI,
    peak_flops=197 * _TERA,
    hbm_bandwidth=819 * _GIGA,
    ici_bandwidth=200 * _GIGA,
    torus=2,
    dcn_bandwidth=6400 / 256 / 8 * _GIGA,
    clock_hz=1.5 * _GIGA,
)
_V5P = Chip(
    name="v5p",
    device_kind="TPU v5",
    hbm_bytes=95 * _GIBI,
    peak_flops=459 * _TERA,
    hbm_bandwidth=2765 * _GIGA,
    ici_bandwidth=600 * _GIGA,
    torus=3,
    dcn_bandwidth=50 / 8 * _GIGA,
    clock_hz=1.75 * _GIGA,
)
_V6E = Chip(
    name="v6e",
    device_kind="TPU v6 lite",
    hbm_bytes=32 * _GIBI,
    peak_flops=918 * _TERA,
    hbm_bandwidth=1638 * _GIGA,
    ici_bandwidth=400 * _GIGA,
    torus=2,
    dcn_bandwidth=25600 / 256 / 8 * _GIGA,
    clock_hz=None,
)
_V7X = Chip(
    name="v7x",
    device_kind="TPU7x",
    hbm_bytes=192 // 2 * _GIBI,
    peak_flops=2307 / 2 * _TERA,
    hbm_bandwidth=7380 / 2 * _GIGA,
    ici_bandwidth=600 / 2 * _GIGA,
    torus=3,
    dcn_bandwidth=100 / 2 / 8 * _GIGA,
    clock_hz=None,
    family="tpu7x",
)
CHIPS = {chip.name: chip for chip in (_V4, _V5E, _V5P, _V6E, _V7X)}
"""Chip by the first word of a topology.

Sources: Google Cloud's "System architecture" page of each version (memory, peak, memory bandwidth;
links as "bidirectional ICI bandwidth per chip" or, in Gbps, one direction; data centre network per
pod of 256 or per chip). v4: Jouppi et al. 2023 (arXiv 2304.01433), table 4: six links of 50 GB/s,
1050 MHz.

v5e and v5p publish no clock: it is peak / (2 x 128 x 128 x matrix units), with 4 and 8 units. The
pages of v6e give a peak that its two 256 x 256 units would reach at 3.5 GHz only, so no clock is
claimed. The page of v7x ("TPU7x") says nothing of its units.
"""


def of_kind(device_kind: str) -> Chip | None:
    """Return the chip that JAX calls `device_kind`, or `None` if `CHIPS` does not have it."""
    for chip in CHIPS.values():
        if chip.device_kind == device_kind:
            return chip
    return None
