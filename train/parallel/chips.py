"""TPU chips: memory, peak rates, bandwidths and clock of each generation."""

from __future__ import annotations

import dataclasses

_GIBI, _GIGA, _TERA = 2**30, 1e9, 1e12


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


def of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls so; None where it is none of the table."""
    return next((chip for chip in CHIPS.values() if chip.device_kind == device_kind), None)
