"""Peak rates of devices, memory of the process, and the compiler flags for each kind of device.

Each flag of XLA has its reason and its source. Flags are given to the compiler with the step
(`compiler_options` of `jax.stages.Lowered.compile`), not through the environment:

* XLA_FLAGS is read once per process, which ends at a name that it does not know. It holds for every
  program of the process, and does not reach the TPU compiler, whose flags are in LIBTPU_INIT_ARGS.
* A compile option holds for one program and is part of its cache key. If the compiler does not know
  the name, the error says so. It works ahead of time for TPUs that are not there.

A flag that the user sets in either variable is left as it is. To try one, set
XLA_FLAGS=--xla_gpu_...=false before the command. `--xla-flags none` sets none of the flags below.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

from mupax.mappings import drop_keys

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
    312: (
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
    ),
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
    """Return the peak dense rate of one device, in FLOPs per second, without sparsity.

    A multiply-add counts as two. Sources: Google Cloud documentation of each TPU version; NVIDIA's
    product data sheets (A10, A30, A100, H100, H100 NVL, H200, GH200, L4, L40S; half of "with
    sparsity" if only that is printed), the Blackwell data sheet (B200 in HGX, GB200), and the
    GA102, AD102 and RTX Blackwell architecture papers for GeForce (float32 accumulation).

    Args:
        device_kind: `jax.Device.device_kind`, such as "TPU v5 lite" or "NVIDIA H100 80GB HBM3".
        dtype: Type of the operands of matrix products. Only "bfloat16" is in the table.

    Returns:
        The rate, or `None` if it is not known. Then no utilization should be shown.
    """
    if dtype != "bfloat16":
        return None
    for tera, kinds in _BFLOAT16_TERA.items():
        # The complete name, never a part of it: variants of one chip differ by a third.
        if device_kind in kinds:
            return tera * 1e12
    return None


def memory_peak(devices: Iterable[Any]) -> int | None:
    """Return the largest peak of memory in use among devices, since the process began.

    Args:
        devices: Each a `jax.Device`.

    Returns:
        Bytes of the device with the largest peak. `None` if no device counts them, as on CPU.
    """
    peaks: list[int] = []
    for device in devices:
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if peak is not None:
            peaks.append(peak)
    return max(peaks, default=None)


# Options of glibc's mallopt, with our values: M_ARENA_MAX, M_MMAP_MAX and M_TRIM_THRESHOLD.
_ARENAS = (-8, 1)
_MAPPINGS = (-4, 0)
_KEPT_AT_END = (-1, 2**31 - 1)


def keep_freed_memory() -> bool:
    """Let the C library keep the memory of a step's temporaries for the next step, on CPU.

    A step on CPU takes and frees its temporaries as one block. Blocks above 32 MB go back to the
    system (in other threads than the main one, those above 64 MB, whatever is set). They come again
    as pages that are first filled with zeros: 42 % of a step's time with 150 MB on a virtual
    machine. Call this before JAX is imported.

    Returns:
        Whether the memory is kept. False on other systems than Linux, without glibc, if JAX was
        imported before, and if the package of an accelerator is installed, whose hosts do not need
        it.
    """
    if "jax" in sys.modules or sys.platform != "linux":
        return False
    for package in ("jax_plugins", "libtpu"):
        if importlib.util.find_spec(package):
            return False
    import ctypes

    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if set_option is None:
        return False
    return all(set_option(*option) for option in (_ARENAS, _MAPPINGS, _KEPT_AT_END))


Value = bool | int | str

VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables in which users set flags."""

_JAX_FLAGS = "docs.jax.dev/en/latest/xla_flags.html"
_MAXTEXT = (
    "github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py (CF_FOR_ALL_REDUCE)"
)
_ALL_REDUCE = "sums gradients during computation; it takes both flags to change the program (data)"
_MAXTEXT_GATHER = (
    "github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py (CF_FOR_ALL_GATHER)"
)
_ALL_GATHER = (
    "gathers parameters during computation, which is no default of libtpu 0.0.42 for v5p and v6e "
    "(fsdp)"
)

_MAXTEXT_GPU = (
    "github.com/AI-Hypercomputer/maxtext, src/maxtext/configs/models/gpu (1vm.sh of Llama 2 7B, "
    "H100)"
)
_COMBINED = (
    "sends a layer's parameters, or their gradients, in one message; 30 MB at most by default"
)
_PIPELINED = (
    "begins one iteration of a loop over layers early what the next one gathers, or ends it late "
    "(fsdp); off by default"
)

VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""Flag that `--vmem-kib` sets."""

_MAXTEXT_VMEM = (
    "github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py "
    "(DENSE_VMEM_LIMIT_FLAG), of 98304"
)
_MORE_VMEM = "more of a core's own memory for one operation: {} less (docs/evidence/performance.md)"


class Flag(NamedTuple):
    """Flag of XLA that mupax sets.

    Attributes:
        name: Name without leading dashes.
        why: Reason for the flag, as a phrase.
        source: Document or measurement that the reason comes from.
    """

    name: str
    value: Value
    why: str
    source: str


PIPELINING: dict[str, tuple[str, Value]] = {
    "0.10": ("xla_gpu_enable_pipelined_{}", True),
    "0.12": ("xla_gpu_pipeline_{}", "COLLECTIVE_PIPELINING_MODE_ON"),
}
"""Name and value of the flags of pipelined collectives by the version of jaxlib.

Other versions might refuse the name, so they get no such flag."""
_JAXLIB = ".".join(version("jaxlib").split(".")[:2])
_pipelining = PIPELINING.get(_JAXLIB)

_GATHERS = tuple(
    Flag(name, True, _ALL_GATHER, _MAXTEXT_GATHER)
    for name in (
        "xla_enable_async_all_gather",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    )
)

_SUMS = (
    Flag("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", True, _ALL_REDUCE, _MAXTEXT),
)
_EXCHANGES = (
    Flag(
        "xla_tpu_enable_async_all_to_all",
        True,
        "three of five exchanges of experts' tokens run beside products (lm-30b-a3b); v5e has none "
        "that do",
        "github.com/jax-ml/jax, which sets it in its tests of asynchronous all_to_all on TPU; of "
        "v5p by the compiler (libtpu 0.0.42)",
    ),
)

FUSED = {"0.10": (_SUMS, _GATHERS)}
"""Flags that run all-reduces, and flags that run all-gathers, during matrix products on TPU.

They are listed by the version of jaxlib. The compiler of jaxlib 0.12 (libtpu 0.0.50) refuses a step
with them on other TPUs than v5e. It says that such a step may hang or give wrong results."""
_sums, _gathers = FUSED.get(_JAXLIB, ((), ()))

COMBINED_SUMS = "xla_jf_crs_combiner_threshold_in_bytes"
_APART = Flag(
    COMBINED_SUMS,
    2**20,
    "sums of a layer's gradients apart: put into one message none runs beside products "
    "(docs/evidence/performance.md)",
    "by the compiler's own names and what it makes of them (libtpu 0.0.42)",
)

# Flags that pipeline all-gathers, reduce-scatters and all-reduces. Their names depend on the
# version of jaxlib, so an unknown version gets none.
_PIPELINES: tuple[Flag, ...] = ()
if _pipelining is not None:
    _name, _value = _pipelining
    _PIPELINES = tuple(
        Flag(_name.format(collective), _value, _PIPELINED, _MAXTEXT_GPU)
        for collective in ("all_gather", "reduce_scatter", "all_reduce")
    )
# The flag was tried with the compiler of jaxlib 0.10 only.
_SUMS_APART = (_APART,) if _JAXLIB == "0.10" else ()

FLAGS: dict[str, tuple[Flag, ...]] = {
    "cpu": (),
    "gpu": (
        Flag(
            "xla_gpu_enable_latency_hiding_scheduler",
            True,
            "schedules collectives beside computation instead of between it; off by default",
            f"{_JAX_FLAGS}; set in NVIDIA's JAX images, "
            "docs.nvidia.com/jax-toolbox/environment-variables",
        ),
        Flag(
            "xla_gpu_experimental_parallel_collective_overlap_limit",
            4,
            "lets a collective stay in flight while a loop over layers sends its own. With 1, the "
            "default, 39 % of gpt2-c4's gradient bytes on two hosts run beside products, with 4 "
            "77 % (h100:2x8, compiled ahead of time)",
            "github.com/marin-community/marin, set in its runs on GPUs",
        ),
        Flag("xla_gpu_all_gather_combine_threshold_bytes", 2**27, _COMBINED, _MAXTEXT_GPU),
        Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", 2**26, _COMBINED, _MAXTEXT_GPU),
        Flag("xla_gpu_all_reduce_combine_threshold_bytes", 2**27, _COMBINED, _MAXTEXT_GPU),
        *_PIPELINES,
    ),
    # The other flags for asynchronous collectives that are passed around (async_collective_fusion,
    # its fuse_all_gather and multiple_steps, overlap_compute_collective_tc, async_all_gather,
    # data_parallel_all_reduce_opt) are defaults of libtpu 0.0.42 for v5e: with or without them it
    # compiles the same program, on one slice and on two. For v5p and v6e see below.
    "tpu": (
        Flag("xla_enable_async_all_reduce", True, _ALL_REDUCE, _MAXTEXT),
        *_sums,
        Flag(
            "xla_jf_spmd_threshold_for_windowed_einsum_mib",
            1_000_000,
            "gathers a layer's parameters whole instead of slice by slice inside its products, "
            "which with fsdp alone made 3.6 times the estimated cycles and twice the temporaries "
            "(vit-h14 of 4 layers on v5e:4x4, compiled ahead of time)",
            f"{_JAX_FLAGS}; MaxText sets it the other way, for its tensor axis",
        ),
    ),
    "TPU v5 lite": (
        *_SUMS,
        *_SUMS_APART,
        Flag(VMEM, 32768, _MORE_VMEM.format("3 to 7 % of a step's cycles"), _MAXTEXT_VMEM),
    ),
    "TPU v5": (
        *_gathers,
        *_EXCHANGES,
        Flag(VMEM, 32768, _MORE_VMEM.format("11 % of cycles of a loop of products"), _MAXTEXT_VMEM),
    ),
    "TPU v6 lite": (
        *_gathers,
        Flag(
            VMEM,
            98304,
            _MORE_VMEM.format(
                "18 % of lm-8b's cycles, for ten minutes of the compiler's processor time"
            ),
            _MAXTEXT_VMEM,
        ),
    ),
}
"""Flags by backend (`jax.Device.platform`), and additional flags by kind of device.

They were chosen from documentation and from the programs that the compiler makes with them. None
was timed on a GPU or TPU. `python -m scripts.bench.step.xla_flags` times each on the devices at
hand."""


_RINGS = (
    "half of the bytes for gradients, beside products; compiled for lm-8b on v5e:16x16, other "
    "shapes may be refused"
)
SCATTER = tuple(
    Flag(name, value, _RINGS, "found by compiling (libtpu 0.0.42); unmeasured")
    for name, value in {
        "xla_tpu_decompose_every_reduce_scatters_hlos": True,
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
        "xla_enable_async_reduce_scatter_fusion": True,
        VMEM: 32768,
        "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    }.items()
)
"""Flags that `--xla-flags scatter` adds on TPU.

Only with all of them do reduce-scatters run at the same time as matrix products.

The last two are MaxText's REDUCE_SCATTER_FUSION. Without them, an array that is split on its last
axis into parts of fewer than 128 numbers is summed by all-reduce along the last dimension of the
torus. For f32[14336,4096] over fsdp 256 on v5e:16x16, the two flags lower the compiler's estimate
from 15.40 to 15.29 M cycles.
"""


def compiler_options(
    platform: str,
    choice: Literal["auto", "none", "scatter"],
    environment: Mapping[str, str] = os.environ,
    *,
    kind: str = "",
    vmem_kib: int | None = None,
) -> dict[str, Any]:
    """Return the XLA flags for a backend, by name, without those that the user's environment sets.

    Args:
        platform: `jax.Device.platform` of the devices to compile for. An unknown one has no flags.
        choice: "none" gives no flags. "scatter" adds those in `SCATTER` on TPU.
        environment: Variables with XLA_FLAGS and LIBTPU_INIT_ARGS; by default of this process.
        kind: `device_kind` of the devices, for the flags of one generation.
        vmem_kib: Own memory of a TPU core for one operation, in KiB. On TPU it sets the flag
            `VMEM`, for each `choice`. Other platforms ignore it.
    """
    user_flags = " ".join(environment.get(name, "") for name in VARIABLES)
    set_by_user = re.findall(r"--(\w+)", user_flags)
    flags: tuple[Flag, ...] = ()
    if choice != "none":
        flags = (*FLAGS.get(platform, ()), *FLAGS.get(kind, ()))
    if platform == "tpu" and choice == "scatter":
        flags += SCATTER
    # Flags of a device kind come after those of its platform, so they override them.
    values = {flag.name: flag.value for flag in flags}
    if platform == "tpu" and vmem_kib is not None:
        values[VMEM] = vmem_kib
    return drop_keys(values, set_by_user)
