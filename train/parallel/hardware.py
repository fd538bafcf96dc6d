"""What devices can do and what they hold: peak rates for the model FLOPs utilization (MFU), memory, TPU chips, rooflines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

_GIBI, _GIGA, _TERA = 2**30, 1e9, 1e12

_BFLOAT16: dict[str, float] = {
    # Per JAX device: v3 and 7x show each of a chip's two cores as a device, the others a chip.
    "TPU v3": 61.5 * _TERA,
    "TPU v4": 275 * _TERA,
    "TPU v5 lite": 197 * _TERA,
    "TPU v5e": 197 * _TERA,
    "TPU v5": 459 * _TERA,
    "TPU v5p": 459 * _TERA,
    "TPU v6 lite": 918 * _TERA,
    "TPU v6e": 918 * _TERA,
    "TPU7x": 2307 / 2 * _TERA,
    "NVIDIA A10": 125 * _TERA,
    "NVIDIA A30": 165 * _TERA,
    "NVIDIA A100-SXM4-40GB": 312 * _TERA,
    "NVIDIA A100-SXM4-80GB": 312 * _TERA,
    "NVIDIA A100-PCIE-40GB": 312 * _TERA,
    "NVIDIA A100 80GB PCIe": 312 * _TERA,
    "NVIDIA H100 80GB HBM3": 989.4 * _TERA,
    "NVIDIA H100 PCIe": 756 * _TERA,
    "NVIDIA H100 NVL": 835.5 * _TERA,
    "NVIDIA H200": 989.4 * _TERA,
    "NVIDIA H200 NVL": 835.5 * _TERA,
    "NVIDIA GH200 120GB": 989.4 * _TERA,
    "NVIDIA GH200 480GB": 989.4 * _TERA,
    "NVIDIA GH200 144G HBM3e": 989.4 * _TERA,
    "NVIDIA B200": 2250 * _TERA,
    "NVIDIA GB200": 2500 * _TERA,
    "NVIDIA L4": 121 * _TERA,
    "NVIDIA L40S": 362 * _TERA,
    "NVIDIA GeForce RTX 3090": 71 * _TERA,
    "NVIDIA GeForce RTX 4090": 165.2 * _TERA,
    "NVIDIA GeForce RTX 5090": 209.5 * _TERA,
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
    return _BFLOAT16.get(device_kind) if dtype == "bfloat16" else None


def memory_peak(devices: Iterable[Any]) -> int | None:
    """The most bytes that any of these `jax.Device`s had in use since the process began, None where none counts them.

    CPU devices do not.
    """
    stats = [device.memory_stats() or {} for device in devices]
    return max((found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found), default=None)


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
        names = ("compute", "memory", "network", "slow_network", "cycles")
        return max(names, key=lambda name: getattr(self, name) or 0.0)

    @property
    def seconds(self) -> float:
        """Step time with everything overlapped: a bound from below, so that the utilization is one from above."""
        return max(self.compute, self.memory, self.network, self.slow_network, self.cycles or 0.0)

    def utilization(self, model_flops: float, chip: Chip) -> float:
        """MFU: FLOPs that the model needs on this chip (no recomputation), over what it could do in the step's time."""
        return model_flops / (self.seconds * chip.peak_flops)

    def to_json(self, model_flops: float, chip: Chip) -> dict[str, Any]:
        """The times, what bounds them, the step time and the MFU.

        Args:
            model_flops: that the model needs on this chip.
            chip: which.
        """
        bounds = {"bound": self.bound, "step_seconds": self.seconds, "mfu": self.utilization(model_flops, chip)}
        return {**dataclasses.asdict(self), **bounds}
