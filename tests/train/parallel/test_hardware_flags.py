"""Compiler flags: every one is known to the compiler, leaves the loss as it is, and gives way to the user's own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mupax.train.config.run import MeshConfig
from mupax.train.core.program import Program
from mupax.train.parallel import hardware
from mupax.train.parallel.hardware import FLAGS, SCATTER, Value, compiler_options
from mupax.zoo import configs
from scripts.bench.step import xla_flags
from tests.fixtures.tiny import program_of, run_of, train
from tests.fixtures.xla import FUSIONS_OF_USERS

GPU = {flag.name: flag.value for flag in FLAGS["gpu"]}
TPU = {flag.name: flag.value for flag in FLAGS["tpu"]}
RINGS = {**TPU, **{flag.name: flag.value for flag in SCATTER}}
CHIPS = {
    kind: {flag.name: flag.value for flag in FLAGS[kind]}
    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite")
}
V5E, V5P, V6E = CHIPS.values()
STEPS = 3


@pytest.fixture(scope="module")
def program() -> Program:
    """A scanned decoder over two devices: the flags are about loops and collectives."""
    model = dataclasses.replace(
        configs.get("lm-tiny"), width=24, depth=2, num_heads=2, seq_len=14, vocab_size=23
    )
    return program_of(run_of(model, batch_size=4, mesh=MeshConfig(data=1, fsdp=2), steps=STEPS))


def losses(program: Program, options: dict[str, Value]) -> list[float]:
    """Return the losses of the first steps on random tokens."""
    step = program.trace_train().lower().compile(compiler_options=options)
    return [row["loss"] for row in train(program, STEPS, step=step).rows]


@pytest.fixture(scope="module")
def without(program: Program) -> list[float]:
    return losses(program, {})


# A build for CPUs knows the flags of GPUs and ignores them: here this shows that the names and values are right. On
# devices, `python -m scripts.bench.step.xla_flags` makes the same comparison and times it.
@pytest.mark.core
def test_the_flags_are_known_and_leave_the_loss(program: Program, without: list[float]) -> None:
    assert losses(program, GPU) == pytest.approx(without, rel=1e-6)


# What it takes of those that people set besides, of which none is chosen for a run. On another jaxlib a name may be gone.
@pytest.mark.core
@pytest.mark.parametrize(
    "flag", [*itertools.chain(*xla_flags.TRIALS.values())], ids=lambda flag: flag.name
)
def test_the_flags_that_people_set_are_known_with_their_values(flag: hardware.Flag) -> None:
    assert all(flag.name not in {one.name for one in flags} for flags in FLAGS.values())
    lowered = jax.jit(lambda x: x @ x).lower(jnp.zeros((3, 3)))
    options: dict[str, Any] = {flag.name: flag.value}
    lowered.compile(compiler_options=options)
    wrong: Any = "x" if isinstance(flag.value, bool | int) else True
    with pytest.raises(jax.errors.JaxRuntimeError, match=flag.name):
        lowered.compile(compiler_options={flag.name: wrong})


# Of XLA_FLAGS that go round for GPUs; there they would end the process.
@pytest.mark.core
@pytest.mark.parametrize(
    "name", ["xla_gpu_enable_triton_softmax_fusion", "xla_gpu_enable_cudnn_fmha"]
)
def test_control_flags_of_earlier_versions_are_refused(name: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"No such compile option: '{name}'"):
        jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile(compiler_options={name: True})


@pytest.mark.core
def test_what_pipelined_collectives_are_called_depends_on_the_version() -> None:
    version = ".".join(jax.__version__.split(".")[:2])
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    for of, (name, value) in hardware.PIPELINING.items():
        option = {name.format("all_gather"): value}
        if of == version:
            assert option.items() <= GPU.items()
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
                lowered.compile(compiler_options=option)


@pytest.mark.core
def test_fusions_are_for_the_chips_that_the_version_has_them_for() -> None:
    """By the compiler of jax 0.12 only v5e has any; where it finds one elsewhere it refuses the step."""
    fusions = {
        kind: {name for name in TPU | chip_flags if "fusion" in name}
        for kind, chip_flags in (("v5e", V5E), ("v5p", V5P), ("v6e", V6E))
    }
    assert fusions["v5e"]
    assert bool(fusions["v5p"]) == bool(fusions["v6e"]) == (jax.__version__ < "0.12")


@pytest.mark.core
def test_control_an_option_reaches_the_program() -> None:
    lowered = jax.jit(lambda x: jnp.tanh(x) * 2 + x).lower(jnp.zeros(3))
    fused, apart = (
        (lowered.compile(compiler_options=options).as_text() or "").count(" fusion(")
        for options in (
            {**FUSIONS_OF_USERS},
            {**FUSIONS_OF_USERS, "xla_disable_hlo_passes": "fusion"},
        )
    )
    assert fused < apart  # Each operation is wrapped by itself.


# In a process of its own: the TPU compiler takes its settings from the environment when it is loaded, and only once.
AHEAD = """
import json, sys
from mupax.train.pods import topology
topology.ready()
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(topology.devices("v5e:2x2"), "x")
split = NamedSharding(mesh, PartitionSpec("x"))
x = jax.ShapeDtypeStruct((512, 256), "float32", sharding=split)
lowered = jax.jit(lambda x: x.T @ x, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(x)
for options in json.loads(sys.argv[1]):
    try:
        lowered.compile(compiler_options=options)
        print("compiled")
    except jax.errors.JaxRuntimeError as error:
        print(error)
"""


@pytest.mark.tpu
def test_the_tpu_compiler_knows_its_flags() -> None:
    sets = [
        *({name: value} for name, value in (TPU | V5P | V6E).items()),
        TPU,
        TPU | V5E,
        RINGS,
        TPU | {hardware.VMEM: 65536},
        {"xla_tpu_no_such_flag": True},
    ]
    environment = {**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", AHEAD, json.dumps(sets)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    *lines, unknown = done.stdout.splitlines()
    assert lines == ["compiled"] * (len(TPU | V5P | V6E) + 4), done.stderr
    assert "xla_tpu_no_such_flag" in unknown


@pytest.mark.core
def test_the_flags_of_a_backend() -> None:
    assert compiler_options("gpu", "auto", {}) == GPU
    assert compiler_options("tpu", "auto", {}) == TPU
    for kind, flags in CHIPS.items():
        assert compiler_options("tpu", "auto", {}, kind=kind) == TPU | flags
    memory = {hardware.VMEM: 16384}
    assert compiler_options("tpu", "auto", {}, kind="TPU v5 lite", vmem_kib=16384) == (
        TPU | V5E | memory
    )
    assert [flags[hardware.VMEM] for flags in CHIPS.values()] == [32768, 32768, 98304]
    assert compiler_options("tpu", "scatter", {}, vmem_kib=16384) == RINGS | memory
    assert compiler_options("gpu", "scatter", {}) == GPU
    assert compiler_options("metal", "auto", {}) == {}
    assert compiler_options("tpu", "none", {}, kind="TPU v6 lite") == {}
    assert compiler_options("gpu", "none", {}, vmem_kib=16384) == {}
    of_the_user = {"LIBTPU_INIT_ARGS": f"--{hardware.VMEM}=1"}
    assert compiler_options("tpu", "none", of_the_user, vmem_kib=16384) == {}


@pytest.mark.core
@pytest.mark.parametrize("variable", hardware.VARIABLES)
@pytest.mark.parametrize(
    "template", ["--{}=false", "--xla_dump_to=/x --{}", "--{}=true --xla_other=1"]
)
def test_what_the_user_sets_is_left_as_it_is(variable: str, template: str) -> None:
    mine, *rest = TPU
    options = compiler_options("tpu", "auto", {variable: template.format(mine)})
    assert list(options) == rest
    assert compiler_options("tpu", "auto", {variable: template.format(f"{mine}_more")}) == TPU


@pytest.mark.core
def test_every_flag_says_why_and_by_whom() -> None:
    for backend, flags in (*FLAGS.items(), *xla_flags.TRIALS.items()):
        assert len({flag.name for flag in flags}) == len(flags)
        for flag in flags:
            assert flag.name.startswith("xla_"), backend
            assert len(flag.why) > 20
            assert "." in flag.source


@pytest.mark.core
def test_a_run_is_compiled_with_them(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = hardware.Flag("xla_no_such_flag", True, "", "")
    monkeypatch.setitem(FLAGS, "cpu", (flag,))
    assert program.compiler_options() == {"xla_no_such_flag": True}
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_flag"):
        program.compile_train()
    off = dataclasses.replace(program, config=dataclasses.replace(program.config, xla_flags="none"))
    assert off.compiler_options() == {}
