"""Topologies of TPUs and GPUs that are not here: devices that the real compiler compiles for.

If there is no such topology or no compiler, an error says why.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mupax import MupaxError, extras
from mupax.train.parallel.chips import CHIPS, Chip

EXAMPLES = "v5e:16x16, v5p:4x4x4, v6e:16x16, v7x:4x4x4, v4:4x4x4, h100:8 or h100:2x8"
"""Topologies that messages name."""
_SHAPE = re.compile(r"([\w ]+):(\d+(?:x\d+){0,2})")
_CUDNN = "nvidia-cudnn-cu12"
"""PyPI package of cuDNN. Its version decides which attention kernels a program for GPUs has."""
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
# The numbers written out in `_TARGET` are equal for compute capabilities 8.0, 9.0 and 10.0 (CUDA
# C++ programming guide, table "Technical Specifications per Compute Capability").
ROOM = 0.75
"""Share of a chip's memory that an estimate may take.

For lm-8b on v5e:8x8 the compiler took 1.1 to 1.4 times the estimate.
"""
_NOT_HERE = {
    # The compiler needs no device, and must not look for one.
    "JAX_PLATFORMS": "cpu",
    # A program for devices that are not here cannot be read back from the cache.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
"""Environment variables for compiling for devices that are not here, unless the user set them."""
_NO_TPU = {
    # There is no TPU machine. Without these, libtpu asks a metadata server for a minute and logs
    # errors.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # libtpu otherwise allows one process at a time. Compiling holds no TPU, so several may run at
    # once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Additional environment variables for compiling for TPUs on a machine without them."""


class TopologyError(MupaxError):
    """Unknown topology or missing compiler. The message says what to write or install."""


def chip_of(topology: str) -> Chip:
    """Return the chip of a topology such as v5e:16x16 or h100:2x8.

    Raises:
        TopologyError: The text is not CHIP:AxB or CHIP:AxBxC of a TPU, nor GPU:N or GPU:HOSTSxN,
            the chip is not in `CHIPS`, or it is not wired like that.
    """
    match = _SHAPE.fullmatch(topology)
    if match is None:
        raise TopologyError(_not_a_topology(topology))
    name = match[1]
    if re.fullmatch(r"mi\d+\w*", name, re.IGNORECASE):
        raise TopologyError(
            f"{name} is a GPU of AMD, whose compiler needs an installation of ROCm; compile on "
            f"such a machine (`mupax train RECIPE --dry-run`), or write such as {EXAMPLES}"
        )
    if name not in CHIPS:
        raise TopologyError(
            f"no chip is named {name!r}; write one of {', '.join(CHIPS)}, as in {EXAMPLES}"
        )
    chip = CHIPS[name]
    dims = _dims(topology)
    if chip.gpu is not None:
        _check_hosts(topology, chip, dims)
        return chip
    if len(dims) < 2:
        raise TopologyError(_not_a_topology(topology))
    if len(dims) > chip.torus or math.prod(dims) < 1:
        example = f"{name}:{'x'.join('4' * chip.torus)}"
        raise TopologyError(
            f"{topology}: chips of {name} are wired in {chip.torus} dimensions; "
            f"write such as {example}"
        )
    return chip


def _not_a_topology(topology: str) -> str:
    """Return the message for a text that is no topology."""
    return (
        f"{topology!r} is not a topology; write CHIP:AxB or CHIP:AxBxC of a TPU, "
        f"or CHIP:N or CHIP:HOSTSxN of a GPU, such as {EXAMPLES}"
    )


def _check_hosts(topology: str, chip: Chip, dims: list[int]) -> None:
    """Raise `TopologyError` unless a topology of GPUs is N in one host, or HOSTS x N."""
    assert chip.gpu is not None
    most = chip.gpu.per_host
    if len(dims) > 2 or math.prod(dims) < 1 or dims[-1] > most:
        hosts = max(1, -(-math.prod(dims) // most))
        example = f"{chip.name}:{most}" if hosts == 1 else f"{chip.name}:{hosts}x{most}"
        raise TopologyError(
            f"{topology}: a host has 1 to {most} GPUs of {chip.name}, and a topology is {chip.name}:GPUS or "
            f"{chip.name}:HOSTSxGPUS; write such as {example}"
        )


def _dims(topology: str) -> list[int]:
    """Return the sizes of a topology, such as [16, 16]."""
    _, _, shape = topology.partition(":")
    return [int(size) for size in shape.split("x")]


def size(topology: str) -> int:
    """Return the number of chips of a topology that `chip_of` accepts."""
    return math.prod(_dims(topology))


def ready(topology: str = "v5e:2x2") -> None:
    """Set environment variables for compiling for a topology. Call this before JAX is imported.

    Variables that the user has set stay. For GPUs, JAX is imported here, without its warnings.

    Args:
        topology: Topology that `chip_of` accepts. By default one of TPUs.

    Raises:
        TopologyError: The compiler's packages, or for GPUs cuDNN, are not installed.
    """
    if chip_of(topology).gpu is None:
        extras.require("tpu", "compiling for a TPU, which needs no TPU,", TopologyError)
        variables = _NOT_HERE | _NO_TPU
    else:
        extras.require("cuda", "compiling for a GPU, which needs no GPU,", TopologyError)
        if cudnn_version() is None:
            raise TopologyError(
                f"compiling for a GPU needs cuDNN, whose kernels compute attention; "
                f"run `pip install {_CUDNN}`"
            )
        variables = _NOT_HERE
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if chip_of(topology).gpu is not None:
        # Without a driver, JAX's CUDA libraries print errors when they are first imported.
        with quiet():
            import jax

            del jax


def cudnn_version() -> tuple[int, int, int] | None:
    """Return the version of the installed cuDNN, or `None` without it."""
    try:
        text = importlib.metadata.version(_CUDNN)
    except importlib.metadata.PackageNotFoundError:
        return None
    major, minor, patch = text.split(".")[:3]
    return int(major), int(minor), int(patch)


def devices(topology: str, slices: int = 1) -> Sequence[Any]:
    """Return the devices of a topology, none of which exists, for `core.program.assemble`.

    Sets environment variables, as `ready` does.

    Args:
        topology: Chip and shape, such as v5e:16x16 for one slice or h100:2x8 for two hosts.
        slices: Number of TPU slices that the slow network joins, 1 by default.

    Raises:
        TopologyError: `chip_of` or `ready` fails, the compiler does not know the shape, or `slices`
            is above 1 for GPUs.
    """
    chip = chip_of(topology)
    if chip.gpu is not None and slices > 1:
        gpus = _dims(topology)[-1]
        raise TopologyError(
            f"only TPUs have slices; write the hosts of GPUs as {chip.name}:{slices}x{gpus}"
        )
    ready(topology)
    try:
        with quiet():
            description = _description(topology, chip, slices)
    except Exception as error:  # jaxlib's own error, with the reason in its text
        # jaxlib's text begins with the name of a status, such as INVALID_ARGUMENT.
        reason = str(error).partition(": ")[2] or str(error)
        raise TopologyError(
            f"no topology {topology}: {reason.strip()}\nwrite such as {EXAMPLES}"
        ) from error
    return description.devices


def _description(topology: str, chip: Chip, slices: int) -> Any:
    """Return the `TopologyDescription` of JAX whose devices a program can be compiled for."""
    from jax.experimental import topologies

    if chip.gpu is not None:
        dnn = cudnn_version()
        assert dnn is not None
        *hosts, gpus = _dims(topology)
        # JAX reads the shape as partitions x hosts of a partition x GPUs of a host.
        shape = f"{math.prod(hosts)}x1x{gpus}"
        target = gpu_target(chip, dnn)
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape)
    options: dict[str, Any] = {"wrap": wraps(topology)}
    if slices > 1:
        options["num_slices"] = slices
    if chip.name == "v4":
        # On Cloud TPU v4 both cores of a chip are one device.
        options["chip_config_name"] = "megacore"
    # The compiler may know a chip by another name: v7x is "tpu7x" there.
    name = topology.replace(chip.name, chip.family or chip.name, 1)
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options)


def gpu_target(chip: Chip, dnn: tuple[int, int, int]) -> str:
    """Return the description of a GPU that XLA's compiler reads in place of a GPU.

    It is a `GpuTargetConfigProto` (xla/backends/gpu/target_config) in the text format of protocol
    buffers.

    Args:
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
        # CUDA reserves 1 KiB of shared memory for each block.
        shared_per_block=(cores.shared_kib - 1) * 2**10,
        dnn=dnn,
        cuda=CUDA,
        device_kind=chip.device_kind,
    )


def wraps(topology: str) -> list[bool]:
    """Return whether the chips along each of three dimensions form a ring.

    In a ring the first and the last chip are neighbours. On v5e and v6e, which are wired in two
    dimensions, dimensions of 16 chips (a whole pod) are rings. On chips that are wired in three
    dimensions, all dimensions are rings if the slice consists of whole cubes of 4x4x4, otherwise
    none is. (Google Cloud's pages of each version; MaxText's `accelerator_to_spec_map`.)

    Args:
        topology: Topology of TPUs that `chip_of` accepts.
    """
    # Without these values the compiler assumes no rings, and replaces all-gathers by sums over a
    # whole cube: 8 GB are sent where 4 GB are needed.
    chip = chip_of(topology)
    dims = _dims(topology)
    if chip.torus == 3:
        is_cubes = len(dims) == 3 and all(size % 4 == 0 for size in dims)
        return [is_cubes] * 3
    return [*(size == 16 for size in dims), False]


def across(mesh: Any) -> dict[str, int]:
    """Return the number of TPU slices or GPU hosts along each mesh axis that crosses them.

    The mapping is empty on one slice of TPUs, or one host of GPUs.

    Args:
        mesh: `jax.sharding.Mesh`, or any object with its `shape` and `devices`.
    """
    counts: dict[str, int] = {}
    for index, name in enumerate(mesh.shape):
        # Devices along this axis, at index 0 of all other axes. Other lines cross as many slices or
        # hosts.
        place: list[Any] = [0] * mesh.devices.ndim
        place[index] = slice(None)
        line = mesh.devices[tuple(place)]
        num_islands = len(set(islands(line)))
        if num_islands > 1:
            counts[name] = num_islands
    return counts


def islands(devices: Iterable[Any]) -> list[int]:
    """Return a number per device for its island of fast links: its TPU slice, or its GPU host."""
    numbers = []
    for device in devices:
        if device.platform == "gpu":
            numbers.append(device.process_index)
        else:
            numbers.append(getattr(device, "slice_index", None) or 0)
    return numbers


@contextlib.contextmanager
def kernels_of(chip: Chip) -> Iterator[None]:
    """Make JAX trace attention kernels for a GPU that is not here, while entered.

    JAX itself asks the GPU at hand which head dimensions its kernels have, and without one allows
    only those of the oldest. Inside, the answer is the chip's. Nothing changes for TPUs.
    """
    if chip.gpu is None:
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as attention

    capability = chip.gpu.capability

    def at_least(text: str) -> bool:
        major, _, minor = text.partition(".")
        return capability >= (int(major), int(minor))

    def equal(text: str) -> bool:
        major, _, minor = text.partition(".")
        return capability == (int(major), int(minor))

    replaced = {
        "check_compute_capability": at_least,
        "is_cuda_compute_capability_equal": equal,
    }
    originals = {name: getattr(attention, name) for name in replaced}
    for name, function in replaced.items():
        setattr(attention, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(attention, name, function)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard all output to the process's stderr while entered, also of C++ libraries."""
    # The library writes to the file descriptor, so replacing `sys.stderr` hides nothing.
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
