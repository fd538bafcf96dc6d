"""What devices can do and what they hold: peak rates for the model FLOPs utilization (MFU), and memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
    return next((tera * 1e12 for tera, kinds in _BFLOAT16_TERA.items() if device_kind in kinds), None)


def memory_peak(devices: Iterable[Any]) -> int | None:
    """The most bytes that any of these `jax.Device`s had in use since the process began, None where none counts them (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)
