"""What devices can do and what they hold: peak rates for the model FLOPs utilization (MFU), memory, TPU chips, rooflines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

_GIBI, _GIGA, _TERA = 2**30, 1e9, 1e12

_BFLOAT16_TERA: dict[float, tuple[str, ...]] = {
    # Per JAX device: v3 and 7x show each of a chip's two cores as a device, the others a chip.
    61.5: ("TPU v3",),
    275: ("TPU v4",),
    197: ("TPU v5 lite", "TPU v5e"),
    459: ("TPU v5", "TPU v5p"),
    918: ("TPU v6 lite", "TPU v6e"),
    2307 / 2: ("TPU7x",),
    125: ("NVIDIA A10",),
    165: ("NVIDIA A30",),
    312: ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
    756: ("NVIDIA H100 PCIe",),
    835.5: ("NVIDIA H100 NVL", "NVIDIA H200 NVL"),
    989.4: (
        *("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
        *("NVIDIA GH200 120GB", "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"),
    ),
    2250: ("NVIDIA B200",),
    2500: ("NVIDIA GB200",),
    121: ("NVIDIA L4",),
    362: ("NVIDIA L40S",),
    71: ("NVIDIA GeForce RTX 3090",),
    165.2: ("NVIDIA GeForce RTX 4090",),
    209.5: ("NVIDIA GeForce RTX 5090",),
}


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Peak dense rate of one device, in FLOPs per second (a multiply-add is two), without sparsity.

    The name is matched whole, never by a part of it: variants of one chip differ by a third. Sources: Google Cloud
    documentation of each TPU version; NVIDIA's product data sheets (A10, A30, A100, H100, H100 NVL, H200, GH200, L4,
    L40S; half of "with sparsity" where only that is printed), the Blackwell data sheet (B200 in HGX, GB200), and the
    GA102, AD102 and RTX Blackwell architecture papers for GeForce (float32 accumulation).

    Args:
        device_kind: `jax.Device.device_kind`, such as "TPU v5 lite" or "NVIDIA H100 80GB HBM3".
        dtype: type of the operands of matrix products. Only "bfloat16" is in the table.

    Returns:
        The rate, or None where it is not known, and then no utilization should be shown.
    """
    if dtype != "bfloat16":
        return None
    return next((tera * _TERA for tera, kinds in _BFLOAT16_TERA.items() if device_kind in kinds), None)


def memory_peak(devices: Iterable[Any]) -> int | None:
    """The most bytes that any of these `jax.Device`s had in use since the process began, None where none counts them (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, which is one JAX device. Rates are per second."""

    name: str
    """As topologies are written, such as v5e."""
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


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4", hbm_bytes=32 * _GIBI, peak_flops=275 * _TERA, hbm_bandwidth=1200 * _GIGA,
            ici_bandwidth=300 * _GIGA, torus=3, dcn_bandwidth=None, clock_hz=1.05 * _GIGA,
        ),
        Chip(
            name="v5e", hbm_bytes=16 * _GIBI, peak_flops=197 * _TERA, hbm_bandwidth=819 * _GIGA,
            ici_bandwidth=200 * _GIGA, torus=2, dcn_bandwidth=6400 / 256 / 8 * _GIGA, clock_hz=1.5 * _GIGA,
        ),
        Chip(
            name="v5p", hbm_bytes=95 * _GIBI, peak_flops=459 * _TERA, hbm_bandwidth=2765 * _GIGA,
            ici_bandwidth=600 * _GIGA, torus=3, dcn_bandwidth=50 / 8 * _GIGA, clock_hz=1.75 * _GIGA,
        ),
        Chip(
            name="v6e", hbm_bytes=32 * _GIBI, peak_flops=918 * _TERA, hbm_bandwidth=1638 * _GIGA,
            ici_bandwidth=400 * _GIGA, torus=2, dcn_bandwidth=25600 / 256 / 8 * _GIGA, clock_hz=None,
        ),
    )
}  # fmt: skip
"""Chip by the first word of a topology.

Sources: Google Cloud's "System architecture" page of each version (memory, peak, memory bandwidth; links as
"bidirectional ICI bandwidth per chip" or, in Gbps, one direction; data centre network per pod of 256 or per chip).
v4: Jouppi et al. 2023 (arXiv 2304.01433), table 4: six links of 50 GB/s, 1050 MHz. v5e and v5p publish no clock: it is
peak / (2 x 128 x 128 x matrix units), with 4 and 8 units. The pages of v6e give a peak that its two 256 x 256 units
would reach at 3.5 GHz only, so no clock is claimed.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time of a step by each resource, in seconds, if every other one were free."""

    compute: float
    memory: float
    network: float
    slow_network: float
    cycles: float | None
    """Of the compiler's estimated cycles, where the clock is known. Has no collectives, and no overlap between chips."""

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(dataclasses.asdict(self), key=lambda name: getattr(self, name) or 0.0)

    @property
    def seconds(self) -> float:
        """Step time with everything overlapped: a bound from below, so that the utilization is one from above."""
        return getattr(self, self.bound)

    def utilization(self, model_flops: float, chip: Chip) -> float:
        """MFU: FLOPs that the model needs on this chip (no recomputation), over what it could do in the step's time."""
        return model_flops / (self.seconds * chip.peak_flops)

    def to_json(self, model_flops: float, chip: Chip) -> dict[str, Any]:
        """The times, what bounds them, the step time and the MFU."""
        mfu = self.utilization(model_flops, chip)
        return {**dataclasses.asdict(self), "bound": self.bound, "step_seconds": self.seconds, "mfu": mfu}
