"""What a report says of a compiled step, by programs written here: what runs beside products, what is a problem, tables at 80 columns."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from mupax import terminal
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import MeshConfig
from mupax.train.core.program import assemble
from mupax.train.pods import command, compiled, hlo
from mupax.train.pods.hlo import Collective, collectives

pytestmark = pytest.mark.core

PROGRAM = """%fused (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (p: f32[2,8], x: f32[8,8]) -> f32[8,8] {
  %p = f32[2,8]{1,0} parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  BEFORE
  %start = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  BETWEEN
  %done = f32[8,8]{1,0} all-gather-done(%start)
  AFTER
  ROOT %n = f32[8,8]{1,0} negate(%done)
}
"""
PRODUCTS = {
    "a product": "%d1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "a fusion with one": "%f1 = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused",
    "a kernel": '%k1 = f32[8,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"',
}
CHEAP = "%c1 = f32[8,8]{1,0} copy(%x)"


def overlaps(**places: str) -> bool:
    text = PROGRAM
    for place in ("BEFORE", "BETWEEN", "AFTER"):
        text = text.replace(
            place, places.get(place.lower(), "%none" + place + " = f32[] constant(0)")
        )
    (one,) = collectives(hlo.parse(text), {"fsdp": 4})
    return one.overlapped


@pytest.mark.parametrize("what", PRODUCTS)
def test_a_collective_is_beside_what_runs_between_its_start_and_its_end(what: str) -> None:
    assert overlaps(between=PRODUCTS[what])
    # The controls: the same product before the start or after the end hides nothing.
    assert not overlaps(before=PRODUCTS[what])
    assert not overlaps(after=PRODUCTS[what])


def test_control_nothing_or_a_copy_in_between_hides_nothing() -> None:
    assert not overlaps()
    assert not overlaps(between=CHEAP)


def test_a_gather_as_large_as_a_bias_is_no_problem_and_one_as_large_as_a_matrix_is() -> None:
    config = dataclasses.replace(RECIPES["lm-tiny"](), mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    model: Any = dataclasses.replace(config.model, width=512, num_heads=4, seq_len=16, bias=True)
    data = dataclasses.replace(config.data, batch_size=8)
    program = assemble(dataclasses.replace(config, model=model, data=data))
    depth, itemsize = model.depth, 4

    def problems(*shape: int, times: int = depth) -> list[str]:
        count = 1
        for size in shape:
            count *= size
        one = Collective(
            kind="all-gather", bytes=count * itemsize, axes=("fsdp", "tensor"), group_size=4, times=times, trips=(depth,),
            results=(shape,), name="all-gather.1", op_name="", source="",
        )  # fmt: skip
        stacks = {"w": (depth, 512, 512), "wide": (depth, 512, 2048)}
        return [*compiled.unrequired(program, [one]), *compiled.whole_stacks([one], stacks, 2)]

    rows = 8 // 2  # of a batch, on a device
    assert problems(512) == []
    assert problems(rows, 16) == []  # of row statistics
    assert problems(depth, 512, times=1) == []  # of all layers' biases
    assert "over fsdp x tensor the layer loop sends" in problems(512, 512)[0]
    assert any(
        "gathers all layers of w at once" in line for line in problems(depth, 512, 256, times=1)
    )


REPORT: dict[str, Any] = {
    "fits": True, "platform": "tpu", "devices": 256, "slices": 2, "mesh": {"data": 2, "fsdp": 64, "sequence": 2, "tensor": 2},
    "parameters": 8030261248, "batch_size": 512, "accumulation_steps": 8,
    "compute": {"layers": "scan", "remat": "dots", "attention": "auto", "attention_block": 1024, "projections": "auto",
                "cross_entropy": "vocab", "param_dtype": "float32", "dtype": "bfloat16", "product_dtype": None},
    "loss": {"kind": "vocab", "parts": 8, "kept": 3, "raises_peak_by": {"vocab": 0, "plain": 6.3e9, "chunked": 5.29e9}},
    "peak_bytes_per_device": 15867262464, "hbm_bytes_per_device": 16 * 2**30,
    "expected_bytes_per_device": {"state": 4e9, "batch": 1e6, "weights in compute type": 5e8, "saved activations": 3e9, "logits": 1e9},
    "argument_bytes_per_device": 4e9, "temporary_bytes_per_device": 6e9, "output_bytes_per_device": 4e9, "code_bytes_per_device": 8e7,
    "arguments_over_expected": 1.06, "flops_per_step": 1.2e17, "traced_flops_per_step": 1.6e17, "hbm_traffic_per_device": 7.5e10,
    "estimated_cycles": 2048123456, "compile_seconds": 340.5,
    "roofline": {"cycles": 1.37, "compute": 1.1, "memory": 0.9, "network": 1.2, "slow_network": 0.31, "bound": "slow_network",
                 "alone": 0.12, "slow_alone": 0.0, "step_seconds": 1.43, "mfu": 0.47},
    "problems": ["over fsdp x tensor the layer loop sends 3.14e+10 bytes, and needs 1.57e+10 (all-gather.12345, all-gather.12346)"],
    "collectives": [
        {"kind": kind, "axes": ["data", "fsdp", "sequence"], "loop_trips": [8, 32], "executions": 1234567, "bytes": 2.5e10,
         "wire_bytes": 2.4e10, "alone_bytes": 1e9, "between_slices": slices, "gathers": False}
        for kind, slices in (("reduce-scatter", True), ("ragged-all-to-all", False))
    ],
    "temporaries": [
        {"bytes": 2101346304, "shape": "bf16[8,4096,128256]{2,1,0:T(8,128)(2,1)}", "name": "fusion.123",
         "op_name": "jit(step)/transpose(jvp(while))/body/rematted_computation/dot_general",
         "source": "splash_attention/splash_attention_kernel.py:1234"},
    ],
}  # fmt: skip


def test_tables_are_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = "\n\n".join(command._tables(REPORT, "lm-8b on v5e:16x16 x 2 slices"))
    assert max(map(len, wide.splitlines())) > 80  # the control: it must be laid out otherwise
    monkeypatch.setattr(terminal, "columns", lambda stream=None: 80)
    narrow = "\n\n".join(command._tables(REPORT, "lm-8b on v5e:16x16 x 2 slices"))
    assert [line for line in narrow.splitlines() if len(line) > 80] == []
    assert set(re.split(r"\s+", wide)) == set(
        re.split(r"\s+", narrow)
    )  # no word is cut or left out
