"""A small step compiled for TPU topologies by the real compiler: what the report says, and what the audit finds."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mupax.__main__ import main
from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import assemble
from mupax.train.parallel import hardware
from mupax.train.pods import compiled as pods_compiled
from mupax.train.pods import hlo, topology
from mupax.train.pods.compiled import Compiled, compile_for
from mupax.train.pods.hlo import collectives
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.transformer import RoutingConfig

DEPTH = 3


def config_of(mesh: MeshConfig, **more: Any) -> Config:
    """A decoder whose weights are small beside its activations, so that moving the wrong ones shows."""
    model = DecoderConfig(
        width=128, depth=DEPTH, num_heads=2, vocab_size=256, seq_len=128, positions="rotary", norm="rmsnorm",
        activation="swiglu", bias=False, mlp_ratio=2.0,
        compute=ComputeConfig(layers="scan", dtype="bfloat16", remat="block", attention="xla"),
    )  # fmt: skip
    return Config(
        recipe="pod", model=model, data=DataConfig(name="python_corpus", batch_size=64), mesh=mesh, steps=10,
        preset=PresetConfig(name="mup"), optimizer=OptimizerConfig(clip_norm=1.0), **more,
    )  # fmt: skip


def with_experts() -> Config:
    config = config_of(MeshConfig(data=1, fsdp=2, experts=2))
    routing = RoutingConfig(capacity_factor=1.25)
    model = dataclasses.replace(
        config.model, experts=8, active_experts=2, expert_dim=128, routing=routing
    )
    return dataclasses.replace(config, model=model)


MESHES = {
    "fsdp": MeshConfig(data=1, fsdp=4),
    "fsdp-tensor": MeshConfig(data=1, fsdp=2, tensor=2),
    "data-sequence": MeshConfig(data=2, sequence=2),
}


@functools.cache
def compiled(mesh: str) -> Compiled:
    return compile_for(config_of(MESHES[mesh]), "v5e:2x2")


@pytest.mark.tpu
@pytest.mark.parametrize("pod", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_step_with_experts_compiles_for_every_chip_with_the_flags_of_a_run(pod: str) -> None:
    executable = compile_for(with_experts(), pod)
    assert executable.fits
    assert executable.report()["problems"] == []


@pytest.mark.tpu
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_sends_only_what_its_mesh_requires(mesh: str) -> None:
    executable = compiled(mesh)
    assert executable.fits
    assert executable.report()["problems"] == []
    inside = {axis for one in executable.collectives if DEPTH in one.trips for axis in one.axes}
    assert inside == {axis for axis, size in executable.program.mesh.shape.items() if size > 1}
    assert executable.module is not None
    assert executable.module.unknown_loops == 0


@pytest.mark.tpu
def test_tokens_go_to_experts_and_back_all_to_all_in_every_pass() -> None:
    executable = compile_for(with_experts(), "v5e:2x2")
    report = executable.report()
    assert report["problems"] == []
    sent = [
        row
        for row in report["collectives"]
        if row["kind"] == "all-to-all" and row["loop_trips"] == [DEPTH]
    ]
    assert [(row["axes"], row["executions"]) for row in sent] == [(["experts"], 8 * DEPTH)]
    # 16 examples of a device, of which each of 8 experts takes 1.25 x 128 x 2 / 8 tokens: there and back forward, there again, and both
    # gradients; beside them each token's gate goes there twice and its gradient comes back.
    slots = 16 * 8 * 40 * 2
    assert sent[0]["bytes"] == DEPTH * slots * (5 * 128 + 3)
    # Nothing turns them around on the way: experts multiply them as they lie.
    assert executable.module is not None
    copies = [
        one
        for one in executable.module.executed
        if one.instruction.opcode in ("copy", "transpose") and DEPTH in one.trips
    ]
    assert not [one.instruction for one in copies if one.instruction.bytes >= slots * 128]


@pytest.mark.tpu
@pytest.mark.slow
def test_state_is_not_padded_and_parameters_are_gathered_beside_computation() -> None:
    # fsdp cuts rows of the embedding into parts of 32 of the 128 that a vector has: in free layouts 1.1 times the state.
    config = config_of(MeshConfig(data=1, fsdp=16))
    model = dataclasses.replace(
        config.model, width=512, num_heads=4, vocab_size=8192, seq_len=512, mlp_ratio=4.0
    )
    executable = compile_for(dataclasses.replace(config, model=model), "v5e:4x4")
    report = executable.report()
    assert report["problems"] == []
    assert report["arguments_over_expected"] < pods_compiled.MOST_ARGUMENTS
    gathers = [
        row
        for row in report["collectives"]
        if row["kind"] == "all-gather" and row["loop_trips"] == [DEPTH]
    ]
    sent, alone = (sum(row[name] for row in gathers) for name in ("wire_bytes", "alone_bytes"))
    assert sent > 0
    assert alone < 0.2 * sent


@pytest.mark.tpu
@pytest.mark.parametrize("torus", [True, False])
def test_a_cube_gathers_parameters_where_control_a_mesh_of_as_many_sums_them(
    torus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torus:
        monkeypatch.setattr(topology, "wraps", lambda name: [False] * 3)
    executable = compile_for(config_of(MeshConfig(data=1, fsdp=64)), "v5p:4x4x4")
    kinds = {one.kind for one in executable.collectives if DEPTH in one.trips}
    assert ("all-gather" in kinds) == torus


@pytest.mark.tpu
@pytest.mark.slow
def test_no_gradient_of_a_matrix_is_summed_whole_where_rings_scatter_it() -> None:
    config = config_of(MeshConfig(data=1, fsdp=16))
    model = dataclasses.replace(config.model, width=1024, num_heads=8)
    matrix = 1024 * 2048 * 2  # of an MLP, bytes in bfloat16

    def sent(choice: Any, kind: str) -> int:
        executable = compile_for(
            dataclasses.replace(config, model=model, xla_flags=choice), "v5e:4x4"
        )
        inside = [one for one in executable.collectives if one.kind == kind and DEPTH in one.trips]
        return sum(one.bytes for one in inside if one.bytes >= matrix)

    assert sent("scatter", "all-reduce") == 0
    assert sent("auto", "all-reduce") >= 3 * matrix  # the control: over both dimensions at once


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_layers_gradients_are_summed_beside_products_where_control_one_message_waits(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "TPU v5 lite"
    flags = tuple(one for one in hardware.FLAGS[kind] if one.name != hardware.COMBINED_SUMS)
    if flags == hardware.FLAGS[kind]:
        pytest.skip(
            f"runs with jax {jax.__version__} leave {hardware.COMBINED_SUMS} to the compiler"
        )
    if not apart:
        monkeypatch.setitem(hardware.FLAGS, kind, flags)
    config = config_of(MeshConfig(data=1, fsdp=16))
    model = dataclasses.replace(
        config.model, width=1024, num_heads=8, vocab_size=8192, seq_len=512, mlp_ratio=4.0
    )
    executable = compile_for(dataclasses.replace(config, model=model, vmem_kib=16384), "v5e:4x4")
    sums = [
        row
        for row in executable.report()["collectives"]
        if row["kind"] == "all-reduce" and row["loop_trips"] == [DEPTH]
    ]
    sent, alone = (
        sum(row[name] for row in sums if not row["gathers"])
        for name in ("wire_bytes", "alone_bytes")
    )
    matrices = DEPTH * (4 * 1024 * 1024 + 3 * 1024 * 4096) * 2
    assert sent >= 2 * 15 / 16 * matrices
    assert alone < 0.2 * sent if apart else alone > 0.8 * sent


@pytest.mark.tpu
def test_parts_of_the_vocabulary_are_in_memory_one_after_the_other() -> None:
    # 8192 targets of a device and a vocabulary of 32,768: four parts of 268 MB of logits each, and layers that leave no room.
    config = config_of(MeshConfig(data=1, fsdp=4))
    data = dataclasses.replace(config.data, batch_size=256)
    model = dataclasses.replace(config.model, vocab_size=2**15)
    executable = compile_for(dataclasses.replace(config, model=model, data=data), "v5e:2x2")
    report, part = executable.report(), 4 * 8192 * 8192
    assert (report["loss"]["kind"], report["loss"]["parts"], report["loss"]["kept"]) == (
        "vocab",
        4,
        0,
    )
    assert part < report["temporary_bytes_per_device"] < 2 * part


@pytest.mark.tpu
def test_control_a_batch_that_is_not_split_is_caught() -> None:
    # fsdp splits parameters but not the batch: every product sums activations over it.
    bad = compile_for(config_of(MeshConfig(data=1, fsdp=4, rules=("batch=data",))), "v5e:2x2")
    assert any("over fsdp the layer loop sends" in problem for problem in bad.report()["problems"])


@pytest.mark.tpu
def test_the_report_has_what_it_promises() -> None:
    executable = compiled("fsdp-tensor")
    report = executable.report()
    promised = {
        "fits",
        "hbm_bytes_per_device",
        "peak_bytes_per_device",
        "flops_per_step",
        "estimated_cycles",
        "collectives",
    }
    assert promised <= set(report)
    assert json.loads(json.dumps(report)) == report
    assert report["estimated_cycles"] > 100_000
    assert (
        report["peak_bytes_per_device"]
        >= report["argument_bytes_per_device"] + report["temporary_bytes_per_device"]
    )
    state = sum(leaf.size * 4 for leaf in jax.tree.leaves(executable.program.abstract))
    assert state / 4 < report["argument_bytes_per_device"] < state / 2
    assert 0 < report["roofline"]["mfu"] < 1
    assert report["traced_flops_per_step"] > report["flops_per_step"]


@pytest.mark.tpu
def test_what_does_not_fit_says_by_how_much() -> None:
    config = config_of(MeshConfig(data=4))
    executable = compile_for(
        dataclasses.replace(config, model=dataclasses.replace(config.model, width=8192)), "v5e:2x2"
    )
    assert not executable.fits
    assert executable.report()["spare_bytes_per_device"] < 0
    assert executable.used_bytes > executable.limit_bytes > 15 * 2**30


@pytest.mark.tpu
def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    words = [
        "--topology",
        "v5e:2x2",
        "--model.depth",
        "2",
        "--data.batch-size",
        "8",
        "--json",
        str(out),
    ]
    assert main(["compile", "lm-tiny", *words]) == 0
    output = capsys.readouterr().out
    assert "fits" in output
    assert "MFU" in output
    assert json.loads(out.read_text())["topology"] == "v5e:2x2"


@pytest.mark.tpu
def test_a_shape_that_no_host_has_is_told_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "lm-tiny", "--topology", "v5e:3x3"]) == 2
    assert "write such as v5e:16x16" in capsys.readouterr().err


# The audit itself, on the CPU


@pytest.mark.core
def test_control_whole_moments_are_caught() -> None:
    program = assemble(config_of(MeshConfig(data=1, fsdp=8)))
    good = jax.tree.map(lambda leaf: leaf.sharding, program.abstract)
    assert pods_compiled.whole_moments(program, good) == []
    whole = jax.tree.map(lambda _: program.layout.replicated, program.abstract.opt_state)
    problems = pods_compiled.whole_moments(program, good._replace(opt_state=whole))
    matrices = sum(
        leaf.sharding != program.layout.replicated for leaf in program.abstract.params.values()
    )
    assert len(problems) == 2 * matrices  # both moments of every parameter that is split


@pytest.mark.core
def test_control_padded_layouts_are_caught() -> None:
    assert pods_compiled.padding(105 * 2**20, 100 * 2**20) == []
    assert (
        "106 MiB for 100 MiB of state and batch"
        in pods_compiled.padding(106 * 2**20, 100 * 2**20)[0]
    )


@pytest.mark.core
def test_control_a_stack_gathered_before_the_loop_is_caught() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    place, whole = (
        NamedSharding(mesh, PartitionSpec(None, "fsdp")),
        NamedSharding(mesh, PartitionSpec()),
    )
    shape = (DEPTH, 64, 64)

    def problems(gathered: bool) -> list[str]:
        def run(w: jax.Array, x: jax.Array) -> jax.Array:
            w = jax.lax.with_sharding_constraint(w, whole) if gathered else w
            return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0]

        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        jitted = jax.jit(run, in_shardings=(place, rows), out_shardings=rows)
        text = jitted.lower(
            jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)
        )
        module = hlo.parse(text.compile().as_text() or "")
        return pods_compiled.whole_stacks(collectives(module, {"fsdp": 8}), {"w": shape})

    assert problems(gathered=False) == []
    assert len(problems(gathered=True)) == 1
