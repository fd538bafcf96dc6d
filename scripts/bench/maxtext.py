"""Compare steps compiled for GPUs that are not here with MaxText's of the same shape.

    python -m scripts.bench.maxtext
    python -m scripts.bench

Needs one environment with mupax, `maxtext[tpu]` and the packages that `make gpu` installs. The
first command compiles four steps in about five minutes and writes
docs/evidence/performance/gpu.json; the second one writes the page.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mupax import MupaxError
from mupax.train.config import cli
from mupax.train.parallel.chips import GPUS
from mupax.train.pods import topology
from scripts import ROOT, harness
from scripts.pages.markdown import table

FILE = ROOT / "docs" / "evidence" / "performance" / "gpu.json"
GPUS_OF_HOST = 8
TOPOLOGY = f"h100:{GPUS_OF_HOST}"
RECIPE = "lm-1b"
FLAGS = (
    "--model.vocab-size 32000 --model.num-kv-heads 16 --model.no-tied --data.tokenizer bpe:32000 "
    "--data.batch-size 64"
)
"""Flags with which the recipe has MaxText's shape."""
SETTINGS = (
    "base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16 head_dim=128 "
    "base_mlp_dim=8192 base_num_decoder_layers=16 vocab_size=32000 per_device_batch_size=8 "
    "max_target_length=2048 attention=cudnn_flash_jax remat_policy=full ici_fsdp_parallelism=-1 "
    "scan_layers=true hardware=gpu compile_topology=a3 compile_topology_num_slices=1"
)
"""MaxText's settings: 1.2 billion parameters, 8 sequences of 2,048 tokens a GPU."""
_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
MAXTEXT_FLAGS: dict[str, bool | int | str] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**27,
    "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
    "xla_gpu_pipeline_all_gather": _PIPELINED,
    "xla_gpu_pipeline_reduce_scatter": _PIPELINED,
    "xla_gpu_pipeline_all_reduce": _PIPELINED,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_disable_hlo_passes": "rematerialization",
}
"""XLA flags of MaxText's configs/gpu/a3/llama_2_7b/1vm.sh, for one host of eight H100s."""
HEAD = (
    "",
    "temporaries, GiB",
    "of MaxText's",
    "sent, GiB",
    "of MaxText's",
    "sent alone, GiB",
)
"""Head of the table on the page."""


class MaxTextError(MupaxError):
    """Missing package, or a compiled step that lacks what the comparison reads."""


def mupax_row(xla_flags: str) -> dict[str, Any]:
    """Compile mupax's step and return its bytes on one GPU.

    Args:
        xla_flags: `auto` or `none`, as `--xla-flags` takes it.

    Returns:
        `argument_bytes`, `temporary_bytes`, `sent_bytes` by all collectives, and `alone_bytes` by
        collectives that overlap no matrix products.
    """
    # Imports JAX, which must not be loaded before `topology.ready`.
    from mupax.train.pods.compiled import compile_for

    words = [*FLAGS.split(), "--xla-flags", xla_flags]
    config = cli.parse(RECIPE, cli.recipe(RECIPE), words).config
    report = compile_for(config, TOPOLOGY).report()
    sent = 0
    alone = 0
    for collective in report["collectives"]:
        sent += collective["wire_bytes"]
        alone += collective["alone_bytes"]
    return {
        "argument_bytes": report["argument_bytes_per_device"],
        "temporary_bytes": report["temporary_bytes_per_device"],
        "sent_bytes": round(sent),
        "alone_bytes": round(alone),
    }


def maxtext_row(xla_flags: Mapping[str, bool | int | str]) -> dict[str, Any]:
    """Compile MaxText's step and return its bytes on one GPU, with the keys of `mupax_row`.

    Args:
        xla_flags: XLA's flags in addition to those that a machine without GPUs needs.
    """
    # Imports JAX, which must not be loaded before `topology.ready`.
    from mupax.train.pods import hlo
    from mupax.train.pods.compiled import WITHOUT_A_GPU, read

    train_compile = importlib.import_module("maxtext.trainers.pre_train.train_compile")
    package = Path(train_compile.__file__ or "").parents[2]
    argv = ["train_compile", str(package / "configs" / "base.yml"), *SETTINGS.split()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dump = {"xla_dump_to": name, "xla_dump_hlo_as_text": True}
        options = {**WITHOUT_A_GPU, **xla_flags, **dump}
        with (
            _gpus_not_here(train_compile),
            topology.kernels_of(GPUS["h100"]),
            _compiled_with(options),
        ):
            train_compile.main(argv)
        module = hlo.parse((folder / "step.txt").read_text())
        assignment = read(folder, module)
        statistics = json.loads((folder / "memory.json").read_text())
    if assignment is None:
        raise MaxTextError("XLA left no buffer assignment of MaxText's step")

    sent = 0.0
    alone = 0.0
    # One host, so no collective leaves it.
    hosts = [0] * GPUS_OF_HOST
    for collective in hlo.collectives(module, {"fsdp": GPUS_OF_HOST}, {}, hosts):
        size = collective.wire_bytes * collective.times
        sent += size
        if not collective.overlapped:
            alone += size
    return {
        "argument_bytes": statistics["argument_size_in_bytes"],
        "temporary_bytes": assignment[0],
        "sent_bytes": round(sent),
        "alone_bytes": round(alone),
    }


@contextlib.contextmanager
def _gpus_not_here(train_compile: Any) -> Iterator[None]:
    """Context manager in which MaxText compiles for the GPUs of `TOPOLOGY`.

    Without it, MaxText compiles for the GPUs of this machine.
    """
    devices = topology.devices(TOPOLOGY)

    class Description:
        """Description of the topology, which MaxText asks for in two places."""

        platform = "not of this machine"
        topology_name = TOPOLOGY
        chip_config_name = None
        chips_per_host_bounds = None
        devices_per_slice = GPUS_OF_HOST
        wrap = None

    description: Any = Description()
    description.devices = devices
    characteristics = train_compile.accelerator_to_spec_map
    originals = (characteristics.get_system_characteristics, train_compile.get_topology_desc)
    characteristics.get_system_characteristics = lambda *_: description
    train_compile.get_topology_desc = lambda *_, **__: description
    try:
        yield
    finally:
        characteristics.get_system_characteristics, train_compile.get_topology_desc = originals


@contextlib.contextmanager
def _compiled_with(options: Mapping[str, Any]) -> Iterator[None]:
    """Context manager in which JAX compiles with more options and writes what it compiled.

    Args:
        options: Compiler options. The folder `xla_dump_to` of the options gets step.txt, the text
            of the compiled program, and memory.json, the bytes of its arguments.
    """
    import jax

    lowered_class: Any = jax.stages.Lowered
    compile_lowered = lowered_class.compile
    folder = Path(options["xla_dump_to"])

    def compiling(lowered: Any, compiler_options: Any = None, **more: Any) -> Any:
        all_options = {**(compiler_options or {}), **options}
        executable = compile_lowered(lowered, all_options, **more)
        (folder / "step.txt").write_text(executable.as_text() or "")
        statistics: Any = executable.memory_analysis()
        sizes = {"argument_size_in_bytes": statistics.argument_size_in_bytes}
        (folder / "memory.json").write_text(json.dumps(sizes))
        return executable

    lowered_class.compile = compiling
    try:
        yield
    finally:
        lowered_class.compile = compile_lowered


def part(record: Mapping[str, Any]) -> str:
    """Return the page's table: both steps with the same XLA flags, and each with its own.

    Args:
        record: Content of docs/evidence/performance/gpu.json. Its `rows` map "no flags" and "its
            own flags" to the results of `maxtext_row` and `mupax_row`.
    """
    rows: list[Sequence[str]] = [HEAD]
    for says, pair in record["rows"].items():
        maxtext = pair["maxtext"]
        rows.append((f"MaxText, {says}", *_cells(maxtext, None), _gib(maxtext["alone_bytes"])))
        ours = pair["mupax"]
        rows.append((f"mupax, {says}", *_cells(ours, maxtext), _gib(ours["alone_bytes"])))
    return table(rows)


def _cells(row: Mapping[str, int], maxtext: Mapping[str, int] | None) -> list[str]:
    """Return the cells of temporary and sent bytes, each with its ratio to MaxText's.

    Argument bytes have no cell, because both steps have the same arguments: parameters and two
    moments in float32.
    """
    cells = []
    for name in ("temporary_bytes", "sent_bytes"):
        ratio = ""
        if maxtext is not None:
            ratio = f"{row[name] / maxtext[name]:.3f}"
        cells += [_gib(row[name]), ratio]
    return cells


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


@dataclass(frozen=True)
class Options:
    """The command has no flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compile all steps, write the record and return the exit code 0."""
    harness.parse(Options, argv)
    if importlib.util.find_spec("maxtext") is None:
        raise MaxTextError("MaxText is not installed; run `pip install 'maxtext[tpu]==0.2.5'`")
    os.environ["JAX_PLATFORMS"] = "cpu"
    topology.ready(TOPOLOGY)
    rows = {
        "no flags": {"maxtext": maxtext_row({}), "mupax": mupax_row("none")},
        "its own flags": {"maxtext": maxtext_row(MAXTEXT_FLAGS), "mupax": mupax_row("auto")},
    }
    versions = {}
    for package in ("maxtext", "jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cudnn-cu12"):
        versions[package] = importlib.metadata.version(package)
    record = {
        "recipe": f"{RECIPE} --topology {TOPOLOGY} {FLAGS}",
        "maxtext": SETTINGS,
        "maxtext_flags": MAXTEXT_FLAGS,
        "versions": versions,
        "rows": rows,
    }
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    print(part(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
