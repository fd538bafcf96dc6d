"""Reading optimized HLO: a TPU program kept beside this file, and what this JAX compiles for the CPU.

The kept program is the gradient of a scan over five layers of x + tanh(x @ up) @ down for v5e:2x2, parameters split over
fsdp 2 and tensor 2, by libtpu 0.0.42; backend configs are cut to the estimated cycles.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mupax.train.pods import hlo
from mupax.train.pods.hlo import axes_of, collectives, replica_groups, table

pytestmark = pytest.mark.core

LAYERS, WIDTH, HIDDEN, ROWS = 5, 256, 512, 64
MESH = {"fsdp": 2, "tensor": 2}
TPU = (Path(__file__).parent / "tpu-v5e-2x2.txt").read_text()


@pytest.fixture(scope="module")
def cpu() -> str:
    """The same program, by this JAX for the CPU."""
    mesh = jax.make_mesh(
        (2, 2), tuple(MESH), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )

    def leaf(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    up, down = (
        leaf((LAYERS, WIDTH, HIDDEN), None, *MESH),
        leaf((LAYERS, HIDDEN, WIDTH), None, "tensor", "fsdp"),
    )
    x = leaf((ROWS, WIDTH), "fsdp", None)

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return h + jnp.dot(jnp.tanh(jnp.dot(h, w[0])), w[1]), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    places = (up.sharding, down.sharding)
    jitted = jax.jit(jax.grad(loss), in_shardings=(places, x.sharding), out_shardings=places)
    text = jitted.lower((up, down), x).compile().as_text()
    assert text is not None
    return text


@pytest.fixture(params=["cpu", "tpu"])
def module(request: pytest.FixtureRequest) -> hlo.Module:
    return hlo.parse(TPU if request.param == "tpu" else request.getfixturevalue("cpu"))


def test_both_loops_run_once_per_layer(module: hlo.Module) -> None:
    loops = [e for e in module.executed if e.instruction.opcode == "while"]
    assert [module.trip_count(e.computation, e.instruction) for e in loops] == [LAYERS, LAYERS]
    assert {e.trips for e in module.executed} == {(), (LAYERS,)}
    assert module.unknown_loops == 0


def test_collectives_are_those_of_the_mesh(module: hlo.Module) -> None:
    operations = collectives(module, MESH)
    # Forward and backward gather both matrices of a layer once each; the products over the split dimension are summed.
    assert (
        sorted((one.kind, one.axes) for one in operations if one.kind == "all-gather")
        == [("all-gather", ("fsdp",))] * 4
    )
    assert [
        one.axes for one in operations if one.kind == "all-reduce" and one.axes == ("tensor",)
    ] == [("tensor",)] * 2
    assert all(
        one.trips == (LAYERS,) and one.times == LAYERS and one.group_size == 2 for one in operations
    )
    # float32 on CPU, bfloat16 products on TPU: one tensor part of a matrix.
    assert {
        one.bytes * 2 // (WIDTH * HIDDEN) for one in operations if one.kind == "all-gather"
    } in ({4}, {2})


def test_gradients_are_summed_over_fsdp(module: hlo.Module) -> None:
    summed = [
        one for one in collectives(module, MESH) if one.kind in ("reduce-scatter", "all-reduce")
    ]
    (gradient,) = [one for one in summed if one.axes == ("fsdp",)]
    assert gradient.bytes in (
        WIDTH * HIDDEN * 4,
        WIDTH * HIDDEN * 2,
    )  # both matrices, a tensor part of each


def test_a_fused_sum_and_slice_is_a_reduce_scatter() -> None:
    kinds = [one.kind for one in collectives(hlo.parse(TPU), MESH) if one.axes == ("fsdp",)]
    assert kinds.count("reduce-scatter") == 1
    assert "all-reduce" not in kinds


def test_collectives_say_where_they_come_from(module: hlo.Module) -> None:
    for one in collectives(module, MESH):
        assert "while/body" in one.op_name
        assert ".py:" in one.source


def test_files_of_the_project_are_named_from_its_folder_on() -> None:
    text = 'FileNames\n1 "/x/mupax/zoo/layers/stack.py"\n2 "/y/kernels/splash/kernel.py"\n\n'
    text += "1 {file_name_id=1 line=7}\n2 {file_name_id=2 line=9}\n1 {file_location_id=1}\n2 {file_location_id=2}\n"
    assert hlo._sources(text) == {"1": "zoo/layers/stack.py:7", "2": "splash/kernel.py:9"}


def test_cycles_count_every_layer() -> None:
    module = hlo.parse(TPU)
    once = sum(module._cycles(e.instruction) for e in module.executed)
    inside = sum(module._cycles(e.instruction) for e in module.executed if e.trips)
    assert module.cycles == once + (LAYERS - 1) * inside
    assert inside > 0.3 * once


def test_bytes_of_shapes() -> None:
    assert hlo.array_bytes("bf16[3,5]{1,0:T(8,128)(2,1)}") == [30]
    assert hlo.array_bytes("(f32[7]{0:T(128)S(1)}, /*index=1*/pred[4]{0}, s4[3]{0})") == [28, 4, 2]
    assert hlo.array_bytes("(f32[7]{0:T(128)S(1)}, f32[2]{0})", hbm_only=True) == [8]
    assert hlo.array_bytes("f32[]") == [4]
    assert hlo.array_dims("(f32[7,2]{1,0}, f32[])") == [(7, 2), ()]


def test_a_stack_that_is_sliced_or_written_counts_a_layer() -> None:
    # Forward and backward read one of LAYERS matrices at a time; a stack counted whole would be LAYERS times as much.
    module = hlo.parse(TPU)
    stacks = 2 * LAYERS * WIDTH * HIDDEN * 4 // 4
    assert module.hbm_bytes < 12 * stacks


STACK = """
%fused_slice (stack: bf16[4,8,16], index: s32[]) -> bf16[8,16] {
  %stack = bf16[4,8,16]{1,0,2} parameter(0)
  %bitcast = bf16[16,4,8]{2,1,0} bitcast(%stack)
  %index = s32[] parameter(1)
  %layer = bf16[16,1,8]{2,1,0} dynamic-slice(%bitcast, %index, %index, %index), dynamic_slice_sizes={16,1,8}
  ROOT %matrix = bf16[8,16]{0,1} bitcast(%layer)
}

%fused_update (stack: bf16[4,8,16], matrix: bf16[8,16], index: s32[]) -> bf16[16,4,8] {
  %stack = bf16[4,8,16]{1,0,2} parameter(0)
  %bitcast = bf16[16,4,8]{2,1,0} bitcast(%stack)
  %matrix = bf16[8,16]{0,1} parameter(1)
  %layer = bf16[16,1,8]{2,1,0} bitcast(%matrix)
  %index = s32[] parameter(2)
  ROOT %updated = bf16[16,4,8]{2,1,0} dynamic-update-slice(%bitcast, %layer, %index, %index, %index)
}

ENTRY %main (stack: bf16[4,8,16], matrix: bf16[8,16], index: s32[]) -> bf16[8,16] {
  %stack = bf16[4,8,16]{1,0,2} parameter(0)
  %matrix = bf16[8,16]{0,1} parameter(1)
  %index = s32[] parameter(2)
  INSTRUCTION
}
"""
LAYER = 8 * 16 * 2
"""Bytes of a layer of `STACK`, whose index has four."""


@pytest.mark.parametrize(
    ("instruction", "moved"),
    [
        # A layer is read and a layer is written.
        (
            "ROOT %f = bf16[8,16]{0,1} fusion(%stack, %index), kind=kLoop, calls=%fused_slice",
            2 * LAYER + 4,
        ),
        (
            "ROOT %f = bf16[16,4,8]{2,1,0} fusion(%stack, %matrix, %index), kind=kLoop, "
            "calls=%fused_update",
            2 * LAYER + 4,
        ),
        # The type of a start has the operands, too.
        (
            "%f = ((bf16[4,8,16]{1,0,2}, s32[]), bf16[8,16]{0,1}, u32[]) "
            "fusion-start(%stack, %index), kind=kLoop, calls=%fused_slice\n"
            "  ROOT %d = bf16[8,16]{0,1} fusion-done(%f)",
            2 * LAYER + 4,
        ),
    ],
)
def test_a_layer_is_a_layer_behind_a_bitcast_too(instruction: str, moved: int) -> None:
    module = hlo.parse(STACK.replace("INSTRUCTION", instruction))
    assert module.hbm_bytes == moved


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_replica_groups(text: str, groups: list[list[int]]) -> None:
    assert sorted(map(sorted, replica_groups(text, 4))) == sorted(map(sorted, groups))


def test_replica_groups_of_an_unknown_form_are_refused() -> None:
    with pytest.raises(ValueError, match="not known"):
        replica_groups("replica_groups=new_form", 4)


def test_axes_of_groups() -> None:
    mesh = {"data": 2, "fsdp": 3, "tensor": 1}
    assert axes_of([[0, 3], [1, 4], [2, 5]], mesh) == (("data",), 2)
    assert axes_of([[0, 1, 2], [3, 4, 5]], mesh) == (("fsdp",), 3)
    assert axes_of([[0, 1, 2, 3, 4, 5]], mesh) == (("data", "fsdp"), 6)
    assert axes_of([[0], [1]], mesh) == ((), 1)
    assert axes_of([[0, 1], [1, 2], [2, 0]], mesh, pairs=True) == (("fsdp",), 3)


SHARD_MAPS = """ENTRY %main (p: f32[512,8]) -> f32[512,8] {
  %p = f32[512,8]{1,0} parameter(0)
  %a = f32[128,8]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%sum
  %b = f32[128,8]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%sum
  %begin = token[] after-all()
  %s = (f32[512,8]{1,0}, u32[], token[]) send(%p, %begin), channel_id=2, is_host_transfer=true, frontend_attributes={TRANSFER}
  %done = token[] send-done(%s), channel_id=2, is_host_transfer=true
  ROOT %n = f32[512,8]{1,0} negate(%p)
}
""".replace(
    "TRANSFER", '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"'
)


def test_one_channel_may_be_that_of_many() -> None:
    operations = [
        one
        for one in collectives(hlo.parse(SHARD_MAPS), {"data": 2, "fsdp": 4}, {"data": 2})
        if not one.between_slices
    ]
    assert [(one.kind, one.bytes, one.overlapped) for one in operations] == [
        ("reduce-scatter", 512 * 8 * 4, False)
    ] * 2
    assert (
        sum(row["alone_bytes"] for row in table(operations))
        == sum(one.wire_bytes for one in operations)
        > 0
    )


CALLED = """%sent (p: f32[512,8]) -> f32[128,8] {
  %p = f32[512,8]{1,0} parameter(0)
  ROOT %r = f32[128,8]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%sum
}

ENTRY %main (p: f32[512,8], w: f32[8,8]) -> f32[128,8] {
  %p = f32[512,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %s = ((f32[512,8]{1,0}), f32[128,8]{1,0}, u32[]) call-start(%p), to_apply=%sent
  BETWEEN
  ROOT %d = f32[128,8]{1,0} call-done(%s)
}
"""
DOT = "%x = f32[512,8]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize("between", [DOT, "%x = f32[512,8]{1,0} negate(%p)"])
def test_what_other_cores_send_is_counted(between: str) -> None:
    # As on v7x: a collective called by its sparse cores, beside what stands between the call and its end.
    (one,) = collectives(hlo.parse(CALLED.replace("BETWEEN", between)), {"fsdp": 4})
    assert (one.kind, one.bytes, one.overlapped) == ("reduce-scatter", 512 * 8 * 4, between == DOT)


GATHERED = """%fused (zeros: bf16[8,4], part: bf16[2,4], place: s32[]) -> bf16[8,4] {
  %zeros = bf16[8,4]{1,0} parameter(0)
  %part = bf16[2,4]{1,0} parameter(1)
  %place = s32[] parameter(2)
  ROOT %u = bf16[8,4]{1,0} dynamic-update-slice(%zeros, %part, %place, %place)
}

ENTRY %main (p: bf16[2,4], g: bf16[8,4], at: s32[]) -> bf16[8,4] {
  %p = bf16[2,4]{1,0} parameter(0)
  %g = bf16[8,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = bf16[] constant(0)
  %whole = bf16[8,4]{1,0} broadcast(%zero), dimensions={}
  %f = bf16[8,4]{1,0} fusion(%whole, %p, %at), kind=kLoop, calls=%fused
  %grown = bf16[8,4]{1,0} fusion(%g, %p, %at), kind=kLoop, calls=%fused
  %a = bf16[8,4]{1,0} all-reduce(%f), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum
  %b = bf16[8,4]{1,0} all-reduce(%grown), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %n = bf16[8,4]{1,0} add(%a, %b)
}
"""


def test_a_sum_of_parts_in_zeros_is_told_from_one_of_gradients() -> None:
    operations = collectives(hlo.parse(GATHERED), {"fsdp": 4})
    assert [(one.name, one.gathers) for one in operations] == [
        ("a", True),
        ("b", False),
    ]  # b's is written into an argument
    assert sorted((row["gathers"], row["wire_bytes"]) for row in table(operations)) == [
        (False, 96.0),
        (True, 96.0),
    ]


def test_what_hosts_send_between_slices_is_counted() -> None:
    mesh = {"data": 2, "fsdp": 4}
    (sent,) = [
        one for one in collectives(hlo.parse(SHARD_MAPS), mesh, {"data": 2}) if one.between_slices
    ]
    assert (sent.kind, sent.axes, sent.group_size, sent.wire_bytes) == (
        "all-reduce",
        ("data",),
        2,
        512 * 8 * 4,
    )
    assert sent.overlapped


def test_ring_bytes_and_the_table() -> None:
    operations = collectives(hlo.parse(TPU), MESH)
    rows = table(operations)
    assert sum(row["executions"] for row in rows) == LAYERS * len(operations)  # type: ignore[misc]
    (gathered,) = [row for row in rows if row["kind"] == "all-gather"]
    assert gathered["wire_bytes"] == gathered["bytes"] / 2  # type: ignore[operator]
    (summed,) = [row for row in rows if row["axes"] == ["tensor"]]
    assert summed["wire_bytes"] == summed["bytes"]


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("nothing\n")


def test_a_line_break_in_a_kernels_attributes_ends_nothing() -> None:
    kernel = '  %k = f32[2]{0} custom-call(%p), frontend_attributes={kernel_metadata={\n"a":"b"\n}}, metadata={op_name="k"}'
    text = f"ENTRY %main (p: f32[2]) -> f32[2] {{\n  %p = f32[2]{{0}} parameter(0)\n{kernel}\n  ROOT %n = f32[2]{{0}} negate(%k)\n}}\n"
    instructions = hlo.parse(text).computations["main"]
    assert list(instructions) == ["p", "k", "n"]
    assert instructions["k"].op_name == "k"
    assert instructions["n"].root


BRANCHES = """
%short (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %b = f32[8] negate(%a), backend_config={"estimated_cycles":"3"}
}
%long (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %b = f32[8] negate(%a), backend_config={"estimated_cycles":"5"}
}
ENTRY %main (p: s32[], x: f32[8]) -> f32[8] {
  %p = s32[] parameter(0)
  %x = f32[8] parameter(1)
  ROOT %c = f32[8] conditional(%p, %x, %x), branch_computations={%short, %long}
}
"""


def test_of_branches_the_longest_counts() -> None:
    assert hlo.parse(BRANCHES).cycles == 5
