"""TPU and GPU chips: memory, peak rates, bandwidths and clock of each generation."""

from __future__ import annotations

import dataclasses

_MEBI = 2**20
_GIBI = 2**30
_GIGA = 1e9
_TERA = 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device: a chip, or half a chip of v7x. Rates are per second."""

    name: str
    """Name as topologies are written, such as v5e or h100."""
    device_kind: str
    """Name that JAX gives to its devices."""
    hbm_bytes: int
    """Size of the main memory."""
    peak_flops: float
    """Peak rate of dense bfloat16 products in FLOPs per second. A multiply-add counts as two."""
    hbm_bandwidth: float
    """Bytes per second to and from main memory."""
    ici_bandwidth: float
    """Bytes per second over all fast links (ICI, NVLink) of a chip, in one direction.

    Half of the number that is published as bidirectional."""
    torus: int
    """Dimensions of the torus of fast links. 0 if every chip reaches every other through a switch,
    as the GPUs of a host do."""
    dcn_bandwidth: float | None
    """Bytes per second to other slices or hosts, in one direction. `None` if not published."""
    clock_hz: float | None
    """Clock of the matrix units, or `None`.

    `None` if the clock is not published and does not follow from the peak rate, and on GPUs, whose
    compiler estimates no cycles."""
    family: str | None = None
    """Name that the compiler's library uses, if it is not `name`."""
    gpu: GpuCores | None = None
    """Cores of a GPU. `None` for TPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuCores:
    """Numbers of a GPU that its compiler asks for, besides those of `Chip`."""

    capability: tuple[int, int]
    """CUDA compute capability, such as (9, 0)."""
    multiprocessors: int
    """Streaming multiprocessors (SMs)."""
    float32_units: int
    """Units of float32 arithmetic of one multiprocessor."""
    clock_hz: float
    """Highest clock of a multiprocessor."""
    l2_bytes: int
    """Size of the second-level cache."""
    shared_kib: int
    """Shared memory of a multiprocessor, in KiB. One block can have 1 KiB less."""
    per_host: int = 8
    """GPUs of a host, which NVLink joins."""


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
_A100 = Chip(
    name="a100",
    device_kind="NVIDIA A100-SXM4-80GB",
    hbm_bytes=85_100_068_864,
    peak_flops=312 * _TERA,
    hbm_bandwidth=2039 * _GIGA,
    ici_bandwidth=600 / 2 * _GIGA,
    torus=0,
    dcn_bandwidth=200 / 8 * _GIGA,
    clock_hz=None,
    gpu=GpuCores(
        capability=(8, 0),
        multiprocessors=108,
        float32_units=64,
        clock_hz=1.41 * _GIGA,
        l2_bytes=40 * _MEBI,
        shared_kib=164,
    ),
)
_H100 = Chip(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    hbm_bytes=84_942_979_072,
    peak_flops=989.4 * _TERA,
    hbm_bandwidth=3352 * _GIGA,
    ici_bandwidth=900 / 2 * _GIGA,
    torus=0,
    dcn_bandwidth=400 / 8 * _GIGA,
    clock_hz=None,
    gpu=GpuCores(
        capability=(9, 0),
        multiprocessors=132,
        float32_units=128,
        clock_hz=1.98 * _GIGA,
        l2_bytes=50 * _MEBI,
        shared_kib=228,
    ),
)
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    device_kind="NVIDIA H200",
    hbm_bytes=151_397_597_184,
    hbm_bandwidth=4800 * _GIGA,
)
_B200 = Chip(
    name="b200",
    device_kind="NVIDIA B200",
    hbm_bytes=191_514_411_008,
    peak_flops=2250 * _TERA,
    hbm_bandwidth=7672 * _GIGA,
    ici_bandwidth=1800 / 2 * _GIGA,
    torus=0,
    dcn_bandwidth=400 / 8 * _GIGA,
    clock_hz=None,
    gpu=GpuCores(
        capability=(10, 0),
        multiprocessors=148,
        float32_units=128,
        clock_hz=1.965 * _GIGA,
        l2_bytes=132_644_864,
        shared_kib=228,
    ),
)
TPUS = {chip.name: chip for chip in (_V4, _V5E, _V5P, _V6E, _V7X)}
"""TPU by its name in a topology, such as v5e in v5e:16x16.

Sources: Google Cloud's "System architecture" page of each version (memory, peak, memory bandwidth;
links as "bidirectional ICI bandwidth per chip" or, in Gbps, one direction; data centre network per
pod of 256 or per chip). v4: Jouppi et al. 2023 (arXiv 2304.01433), table 4: six links of 50 GB/s,
1050 MHz.

v5e and v5p publish no clock: it is peak / (2 x 128 x 128 x matrix units), with 4 and 8 units. The
pages of v6e give a peak that its two 256 x 256 units would reach at 3.5 GHz only, so no clock is
claimed. The page of v7x ("TPU7x") says nothing of its units.
"""
GPUS = {chip.name: chip for chip in (_A100, _H100, _H200, _B200)}
"""GPU by its name in a topology, such as h100 in h100:8. Each is in a host of eight.

Sources: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (peak without
sparsity; NVLink as "total" of both directions); the DGX data sheet of each for the network, one
adapter of 200 Gb/s (A100) or 400 Gb/s a GPU; the CUDA C++ programming guide, table of compute
capabilities, for shared memory and units. Memory, its bandwidth, clock and cache as a driver
reports them (github.com/openxla/xla, xla/backends/gpu/target_config/specs). The bfloat16 peak
of B200 is half of "with sparsity".
"""
CHIPS = TPUS | GPUS
"""Chip by its name in a topology, such as v5e in v5e:16x16 or h100 in h100:8."""


def of_kind(device_kind: str) -> Chip | None:
    """Return the chip that JAX calls `device_kind`, or `None` if `CHIPS` does not have it."""
    for chip in CHIPS.values():
        if chip.device_kind == device_kind:
            return chip
    return None
