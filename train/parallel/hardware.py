"""What devices can do and what they hold: peak arithmetic rates, for the model FLOPs utilization (MFU), and memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_TERA = 1e12

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
