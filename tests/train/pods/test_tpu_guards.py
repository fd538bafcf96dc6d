"""What must not come back into a step that fsdp splits, on every chip: padded state, gathers and sums that are too much, gathers that wait.

A small decoder is compiled once for each pod with the flags of a run. Beside every guard stands a control, the same step with what keeps it
right taken away, that must fail.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import pytest

from mupax.train.config.run import MeshConfig, OptimizerConfig
from mupax.train.core import muon
from mupax.train.core.muon import ITERATIONS
from mupax.train.core.program import Program
from mupax.train.pods import compiled as pods_compiled
from mupax.train.pods.compiled import Compiled, compile_for
from mupax.train.pods.hlo import Collective
from mupax.zoo.manual import ManualFsdpLayout
from tests.train.pods.split_muon import split_steps
from tests.train.pods.test_command import DEPTH, config_of

pytestmark = pytest.mark.tpu

WIDTH, VOCAB, LENGTH = 256, 2048, 256
MATRICES = DEPTH * (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH)
"""Numbers of the layers' matrices."""
PODS = {"v5e:4x4": 16, "v5p:4x4x4": 64, "v6e:4x4": 16, "v7x:2x2x1": 8}
"""Topology to its devices: of v7x two a chip."""
ALONE = 0.3
"""Most of the bytes gathered in the layers' loops that may wait."""
FUSED = set(PODS) if jax.__version__.startswith("0.10.") else {"v5e:4x4", "v7x:2x2x1"}
"""Pods whose compiler gathers beside products, v7x by its other cores; of jax 0.12 it takes no flags for the rest."""


def step(pod: str, slices: int = 1, **changes: Any) -> Compiled:
    """The small decoder's, over one mesh axis of all devices of a slice."""
    devices = PODS.get(pod, 4)
    config = config_of(MeshConfig(data=slices, fsdp=devices))
    model = dataclasses.replace(
        config.model, width=WIDTH, num_heads=2, vocab_size=VOCAB, seq_len=LENGTH, mlp_ratio=4.0
    )
    data = dataclasses.replace(config.data, batch_size=max(64, 2 * devices * slices))
    # As much of a core's own memory as compiles fastest.
    kib = 32768 if pod.startswith("v6e") else 16384
    return compile_for(
        dataclasses.replace(config, model=model, data=data, vmem_kib=kib, **changes), pod, slices
    )


@functools.cache
def compiled(pod: str, slices: int = 1) -> Compiled:
    return step(pod, slices)


def of(executable: Compiled, kind: str, *, inside: bool) -> list[Collective]:
    """Collectives of a kind within a slice, in the layers' loops or outside of them; a sum that gathers is a gather."""
    return [
        one for one in executable.collectives
        if ("all-gather" if one.gathers else one.kind) == kind and (DEPTH in one.trips) == inside and not one.between_slices
    ]  # fmt: skip


def sent(collectives: list[Collective]) -> int:
    return sum(one.bytes * one.times for one in collectives)


def waiting(executable: Compiled) -> float:
    """Share of what the layers' loops gather that runs beside nothing; but for the small parts that a sum gathers."""
    gathers = [one for one in of(executable, "all-gather", inside=True) if not one.gathers]
    return sum(one.bytes * one.times for one in gathers if not one.overlapped) / sent(gathers)


@pytest.mark.parametrize("pod", PODS)
def test_state_is_not_padded_and_nothing_is_sent_that_needs_not_be(pod: str) -> None:
    executable = compiled(pod)
    assert executable.report()["problems"] == []
    assert executable.report()["arguments_over_expected"] < pods_compiled.MOST_ARGUMENTS
    # Of a layer's matrices forward and again, in bfloat16; outside the readout once, and tokens, whose rows of the embedding are sent.
    tokens = 4 * executable.program.config.data.batch_size * LENGTH
    assert sent(of(executable, "all-gather", inside=True)) <= pods_compiled.SLACK * 2 * 2 * MATRICES
    assert (
        sent(of(executable, "all-gather", inside=False))
        <= pods_compiled.SLACK * 2 * WIDTH * VOCAB + tokens
    )
    # Each gradient once: of layers in bfloat16, of the readout in float32, and of vectors and the loss.
    for inside, most in ((True, 2 * MATRICES), (False, 4 * WIDTH * VOCAB + 2**15)):
        assert (
            sum(
                sent(of(executable, kind, inside=inside))
                for kind in ("all-reduce", "reduce-scatter")
            )
            <= pods_compiled.SLACK * most
        )


@pytest.mark.parametrize("pod", PODS)
def test_gathers_in_the_loop_run_beside_products(pod: str) -> None:
    if pod not in FUSED:
        pytest.skip(
            f"the compiler of jax {jax.__version__} has no fusions of gathers with products for {pod}"
        )
    assert waiting(compiled(pod)) < ALONE


def test_control_without_flags_gathers_wait() -> None:
    assert waiting(step("v5p:4x4x4", xla_flags="none")) > 2 * ALONE


def test_v7x_scatters_gradients_where_control_v5e_sums_them_whole() -> None:
    scattered, whole = (
        [sent(of(compiled(pod), kind, inside=True)) for kind in ("reduce-scatter", "all-reduce")]
        for pod in ("v7x:2x2x1", "v5e:4x4")
    )
    assert 2 * MATRICES <= scattered[0] <= pods_compiled.SLACK * 2 * MATRICES
    assert whole[1] >= 2 * MATRICES
    assert scattered[1] == whole[0] == 0


def test_control_free_layouts_pad_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "free_layout", True)
    assert step("v5e:4x4").report()["arguments_over_expected"] > pods_compiled.MOST_ARGUMENTS


def test_control_an_embedding_that_is_gathered_whole_is_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        ManualFsdpLayout, "lookup", lambda self, table, index, axes: self.gather(table, axes)[index]
    )
    executable = step("v5e:4x4")
    assert sent(of(executable, "all-gather", inside=False)) > 1.5 * 2 * WIDTH * VOCAB
    assert sent(of(executable, "all-reduce", inside=False)) > 1.25 * 4 * WIDTH * VOCAB


def test_between_slices_each_device_sends_its_part_of_the_gradients() -> None:
    executable = compiled("v5e:2x2", 2)
    assert executable.report()["problems"] == []
    between = [one for one in executable.collectives if one.between_slices]
    parts = (MATRICES * 2 + 2 * WIDTH * VOCAB * 4) / 4
    assert 0 < sent(between) <= pods_compiled.SLACK * parts + 2**16
    assert {one.axes for one in between} == {("data",)}


def test_control_a_mesh_that_gathers_between_slices_sends_more() -> None:
    config = compiled("v5e:2x2", 2).program.config
    executable = compile_for(
        dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=8)), "v5e:2x2", 2
    )
    between = [one for one in executable.collectives if one.between_slices]
    assert sent(between) > 1.5 * (MATRICES * 2 + 2 * WIDTH * VOCAB * 4) / 4


# Muon

MUON = OptimizerConfig(name="muon")


def inside_iterations(executable: Compiled) -> list[Collective]:
    """Return the collectives of Muon's iterations."""
    return [one for one in executable.collectives if ITERATIONS in one.op_name]


@pytest.mark.parametrize("pod", PODS)
def test_muon_exchanges_whole_matrices_and_its_iterations_send_nothing(pod: str) -> None:
    executable = step(pod, optimizer=MUON)
    assert executable.report()["problems"] == []
    assert inside_iterations(executable) == []
    assert [one for one in executable.collectives if one.kind == "all-to-all"]


def test_control_iterations_that_the_compiler_splits_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "matrix_steps", split_steps)
    assert inside_iterations(step("v5e:4x4", optimizer=MUON))
