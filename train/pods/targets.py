"""Text that describes a GPU to XLA's compiler, so that it compiles without one.

XLA reads a `GpuTargetConfigProto` (xla/backends/gpu/target_config) in the text format of protocol
buffers.
"""

from __future__ import annotations

from mupax.train.parallel.chips import Chip

CUDA = (12, 9)
"""Version of CUDA's runtime that programs are compiled for, which is that of the wheels."""

_TARGET = """\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {multiprocessors}
  fpus_per_core: {float32_units}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_bytes}
  shared_memory_per_core: {shared_per_core}
  shared_memory_per_block_optin: {shared_per_block}
  shared_memory_per_block: 49152
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {dnn[0]} minor: {dnn[1]} patch: {dnn[2]} }}
runtime_version {{ major: {cuda[0]} minor: {cuda[1]} patch: 0 }}
device_description_str: "{device_kind}"
"""
# The numbers that are written out are those of compute capabilities 8.0, 9.0 and 10.0 alike (CUDA
# C++ programming guide, table "Technical Specifications per Compute Capability").


def text(chip: Chip, dnn: tuple[int, int, int]) -> str:
    """Return the description of a GPU as XLA reads it.

    Args:
        chip: Chip with `gpu`.
        dnn: Version of cuDNN (major, minor, patch), which decides which kernels there are.
    """
    cores = chip.gpu
    assert cores is not None, chip.name
    major, minor = cores.capability
    # From Hopper on, kernels may use instructions of that generation alone (sm_90a, sm_100a).
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return _TARGET.format(
        major=major,
        minor=minor,
        extension=extension,
        multiprocessors=cores.multiprocessors,
        float32_units=cores.float32_units,
        clock_ghz=cores.clock_hz / 1e9,
        memory=chip.hbm_bytes,
        bandwidth=int(chip.hbm_bandwidth),
        l2_bytes=cores.l2_bytes,
        shared_per_core=cores.shared_kib * 2**10,
        shared_per_block=(cores.shared_kib - 1) * 2**10,
        dnn=dnn,
        cuda=CUDA,
        device_kind=chip.device_kind,
    )
