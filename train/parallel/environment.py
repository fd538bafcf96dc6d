"""Facts of a process, besides its config and its data, that decide the bits of its results.

Processes of one run compare them (`agreement`), a run records them, and a resume prints those that
have changed. Options of JAX are compared unless `HARMLESS` names them, so that a new option of a
later JAX counts from the start.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

import mupax
from mupax.train.parallel.hardware import VARIABLES

HARMLESS = frozenset((
    "jax_compilation_cache_check_contents", "jax_compilation_cache_dir",
    "jax_compilation_cache_expect_pgle",
    "jax_compilation_cache_include_metadata_in_key", "jax_compilation_cache_max_size",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_enable_xla_caches", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes", "jax_raise_persistent_cache_errors",
    "jax_remove_custom_partitioning_ptr_from_cache_key", "jax_explain_cache_misses",
    "jax_share_binary_between_hosts", "jax_share_binary_between_hosts_timeout_ms",
    "jax_compiler_detailed_logging_min_ops", "jax_debug_log_modules", "jax_distributed_debug",
    "jax_log_checkpoint_residuals",
    "jax_log_compiles", "jax_logging_level", "jax_pallas_verbose_errors", "jax_pprint_use_color",
    "jax_xla_profile_version",
    "jax_dump_ir_modes", "jax_dump_ir_to", "jax_include_debug_info_in_dumps",
    "jax_source_url_schema",
    "jax_hlo_source_file_canonicalization_regex", "jax_include_full_tracebacks_in_locations",
    "jax_traceback_filtering", "jax_traceback_in_locations_limit",
    "jax_tracer_error_num_traceback_frames",
    "jax_send_traceback_to_runtime", "jax_captured_constants_report_frames",
    "jax_captured_constants_warn_bytes",
    "jax_array_garbage_collection_guard", "jax_debug_leaked_clients_on_clear_backends",
    "jax_thread_guard",
    "jax_check_tracer_leaks", "jax_enable_checks", "jax_check_static_indices",
    "jax_check_proxy_envs",
    "jax_transfer_guard", "jax_transfer_guard_device_to_device",
    "jax_transfer_guard_device_to_host",
    "jax_transfer_guard_host_to_device",
    "jax_cpu_get_global_topology_timeout_minutes", "jax_cpu_get_local_topology_timeout_minutes",
    "jax_cross_host_transfer_socket_address", "jax_cross_host_transfer_timeout_seconds",
    "jax_cross_host_transfer_transfer_size", "jax_cross_host_transport_addresses",
    "jax_enable_preemption_service", "jax_enable_recoverability",
    "jax_platforms", "jax_platform_name", "jax_xla_backend", "jax_num_cpu_devices",
    "jax_cuda_visible_devices", "jax_rocm_visible_devices", "jax_oneapi_visible_devices",
))  # fmt: skip
"""Options of JAX that change no number.

They are about caches, logging, tracing, dumps, guards, addresses of a process, and the choice of
devices, whose kind and number are compared themselves."""

_NUMERIC_VARIABLES = (
    *VARIABLES,
    "NVIDIA_TF32_OVERRIDE",
    "TF_CUDNN_DETERMINISTIC",
    "CUBLAS_WORKSPACE_CONFIG",
    "TF_ENABLE_ONEDNN_OPTS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
)
"""Environment variables that libraries below JAX read, and that change numbers."""

# Flags of dumps, caches, logging and time limits change no bits. The number of devices is compared
# by itself.
_HARMLESS_FLAG = re.compile(
    r"--(xla_dump_|xla_gpu_dump|xla_hlo_profile|xla_detailed_logging"
    r"|xla_force_host_platform_device_count"
    r"|xla_gpu_per_fusion_autotune_cache|xla_\w+timeout|xla_\w+_log_|xla_vmodule)"
)
_VECTOR = re.compile(r"(avx|s?sse|fma|f16c|amx|asimd|neon|sve|i8mm)")
"""Beginnings of names of vector instructions, of x86 and of Arm."""

_SAME_BITS = frozenset({"python", "orbax-checkpoint", "tensorstore"})
"""Packages whose version cannot change the bits of results, because they compute no numbers."""
_CODE = ("presets", "zoo", "train")
"""Folders of the project with code that computes."""


def options() -> dict[str, Any]:
    """Return the options of JAX that may change numbers, by name, as JSON has them."""
    values = sorted(jax.config.values.items())
    remaining = {}
    for name, value in values:
        if name not in HARMLESS:
            remaining[name] = _plain(value)
    return remaining


def _plain(value: Any) -> Any:
    """Return an option's value for JSON: an enum's value, a plain value, or any other as text."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that change numbers, "" for one that is not set.

    Flags of XLA are sorted, and harmless ones are left out.
    """
    values: dict[str, str] = {}
    for name in _NUMERIC_VARIABLES:
        value = environ.get(name, "")
        values[name] = _flags(value) if name in VARIABLES else value
    return values


def _flags(text: str) -> str:
    """Return XLA's flags in the order of their names, without harmless ones.

    If a flag is written twice, the last one holds. A text that begins with no dash is the path of a
    file with flags. It is returned unchanged if there is no such file.
    """
    if text and not text.lstrip().startswith("-"):
        # XLA takes a text that does not begin with a dash for the name of a file with flags.
        try:
            text = Path(text).read_text()
        except OSError:
            return text
    flags = {flag.partition("=")[0]: flag for flag in text.split()}
    numeric = []
    for name, flag in sorted(flags.items()):
        if not _HARMLESS_FLAG.match(name):
            numeric.append(flag)
    return " ".join(numeric)


def processor(file: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the `model` and the sorted vector `instructions` of this machine's processor.

    The list of instructions is empty if `file` cannot be read, as on macOS.
    """
    try:
        lines = file.read_text().partition("\n\n")[0].splitlines()
    except OSError:  # macOS has no such file
        return {"model": platform.processor(), "instructions": []}
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    # The field is "flags" on x86 and "Features" on Arm.
    features = fields.get("flags", fields.get("Features", "")).split()
    return {
        "model": fields.get("model name", platform.processor()),
        "instructions": sorted(feature for feature in features if _VECTOR.match(feature)),
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sources() -> dict[str, str]:
    """Return a digest of every Python file of `presets`, `zoo` and `train`, by its path."""
    root = Path(mupax.__file__).parent
    files: list[Path] = []
    for package in _CODE:
        files += (root / package).rglob("*.py")
    digests: dict[str, str] = {}
    for path in sorted(files):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        digests[str(path.relative_to(root))] = digest[:16]
    return digests


def facts(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return the record of a run's environment.

    The keys are `options` (JAX's), `variables`, `devices` (with the mesh, without axes of size 1),
    `code` (a digest) and, on CPU, `processor`.

    Args:
        mesh: Mesh of the run over all of its devices.
    """
    device = mesh.devices.flat[0]
    axes = []
    for name, size in mesh.shape.items():
        if size > 1:
            axes.append(f"{name}={size}")
    processes = {member.process_index for member in mesh.devices.flat}
    recorded: dict[str, Any] = {
        "options": options(),
        "variables": variables(),
        "devices": {
            "device kind": device.device_kind,
            "devices": mesh.size,
            "processes": len(processes),
            "mesh": " ".join(axes) or "one device",
            "runtime": device.client.platform_version,
        },
    }
    if device.platform == "cpu":
        # XLA on CPU divides long sums among the cores, so their number changes bits.
        recorded["processor"] = {**processor(), "cores": cores()}
    digests = json.dumps(sources()).encode()
    return {**recorded, "code": hashlib.sha256(digests).hexdigest()[:16]}


class Change(NamedTuple):
    """Fact of the environment that has changed."""

    name: str
    old: str
    new: str
    bits: bool
    """Whether results may differ in bits."""

    def __str__(self) -> str:
        effect = "bits can differ" if self.bits else "the bits stay the same"
        return f"{self.name}: {self.old} -> {self.new} ({effect})"


_MISSING = "not recorded"


def changes(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change] | None:
    """Return the facts of a run's environment that differ from the recorded ones.

    Args:
        previous: Record of the run before this part (config.json).
        current: Record of this part of the run.

    Returns:
        Changes in the order of the new record, then facts that only the old one has. Between two
        versions of JAX, options that only one of them has are left out. `None` if the old record
        has no environment.
    """
    if not isinstance(previous.get("environment"), Mapping):
        return None
    old_facts = _groups(previous)
    new_facts = _groups(current)
    is_other_jax = old_facts.get("jax") != new_facts.get("jax")
    changed: list[Change] = []
    for name in new_facts | old_facts:
        old = old_facts.get(name, _MISSING)
        new = new_facts.get(name, _MISSING)
        if old == new:
            continue
        # Another version of JAX adds and removes options. The change of version is reported by
        # itself.
        if is_other_jax and name.startswith("jax_") and _MISSING in (old, new):
            continue
        old_text, new_text = _shown(old, new)
        changed.append(Change(name, old_text, new_text, bits=name not in _SAME_BITS))
    return changed


def _groups(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return all facts of a record in one flat dict, by the names that they are printed under.

    They are versions, JAX's options, variables, devices, processor, compiler options, platform and
    the digest of mupax's code.
    """
    environment = record["environment"]
    values = dict(record.get("versions") or {})
    for group in ("options", "variables", "devices"):
        values.update(environment.get(group) or {})
    for name, value in (environment.get("processor") or {}).items():
        values[f"processor's {name}"] = value
    xla = record.get("xla") or {}
    compiler_options = xla.get("options") or {}
    values["compiler options"] = [f"{name}={value}" for name, value in compiler_options.items()]
    values["platform"] = record.get("platform")
    values["mupax's code"] = environment.get("code")
    return values


def _shown(old: Any, new: Any) -> tuple[str, str]:
    """Return two values as texts.

    Lists and texts of flags are shown without their common items, and as "none" if nothing is left.
    """
    old_words = _words(old)
    new_words = _words(new)
    if old_words is None or new_words is None:
        return _text(old), _text(new)
    removed = [word for word in old_words if word not in new_words]
    added = [word for word in new_words if word not in old_words]
    return " ".join(removed) or "none", " ".join(added) or "none"


def _words(value: Any) -> list[str] | None:
    """Return the items of a list or of a text of flags, or `None` for any other value."""
    if isinstance(value, list):
        return [str(word) for word in value]
    if isinstance(value, str) and (value == "" or value.startswith("-")):
        return value.split()
    return None


def _text(value: Any) -> str:
    """Return a value as text, "none" for an empty one."""
    return "none" if value in ("", []) else str(value)
