"""GPUs that are not here: their topologies, what a report adds for them, and steps by the real compiler (`make gpu`)."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest

from mupax import MupaxError
from mupax.__main__ import main
from mupax.train.config import cli
from mupax.train.config.run import MeshConfig
from mupax.train.core import muon
from mupax.train.core.muon import ITERATIONS
from mupax.train.parallel import hardware
from mupax.train.parallel.chips import CHIPS, GPUS
from mupax.train.parallel.sharding import make_mesh
from mupax.train.pods import compiled as pods_compiled
from mupax.train.pods import hlo, search, topology
from mupax.train.pods.compiled import Compiled, Roofline, compile_for
from mupax.train.pods.topology import TopologyError
from tests.train.pods.split_muon import split_steps
from tests.train.pods.test_command import config_of

H100 = GPUS["h100"]
FLOAT8_PRODUCT = 'custom_call_target="__cublas$lt$matmul$f8"'
OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


@dataclasses.dataclass(frozen=True)
class AbsentGpu:
    """A GPU that is compiled for: every one says slice 0."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "gpu"
    device_kind: str = H100.device_kind

    @property
    def client(self) -> Any:
        return CompileOnlyPyClient()


class CompileOnlyPyClient:
    """Class of that name, by which devices that are not here are told."""


def absent(hosts: int, gpus: int) -> list[Any]:
    return [AbsentGpu(index, index // gpus) for index in range(hosts * gpus)]


@pytest.mark.core
@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("h100:16", "h100:16: a host has 1 to 8 GPUs of h100"),
        ("h100:16", "write such as h100:2x8"),
        ("h100:2x2x2", "write such as h100:8"),
        ("h100:0", "write such as h100:8"),
        ("h100:0x8", "write such as h100:8"),
        ("h100", "'h100' is not a topology"),
        ("h101:8", "no chip is named 'h101'; write one of v4, v5e, v5p, v6e, v7x, a100, h100"),
        ("v5e:8", "'v5e:8' is not a topology"),
        ("mi300x:8", "mi300x is a GPU of AMD, whose compiler needs an installation of ROCm"),
    ],
)
def test_a_wrong_topology_of_gpus_is_told_what_to_write(written: str, message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        topology.chip_of(written)


@pytest.mark.core
def test_gpus_of_one_host_or_several() -> None:
    assert topology.chip_of("h100:8") is topology.chip_of("h100:64x8") is H100
    sizes = {name: topology.size(name) for name in ("a100:1", "h200:8", "b200:2x4", "v5p:4x4x4")}
    assert sizes == {"a100:1": 1, "h200:8": 8, "b200:2x4": 8, "v5p:4x4x4": 64}


@pytest.mark.core
def test_hosts_of_gpus_are_not_slices() -> None:
    with pytest.raises(TopologyError, match="write the hosts of GPUs as h100:3x8"):
        topology.devices("h100:8", slices=3)


@pytest.mark.core
def test_packages_of_the_compiler_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jax_plugins", None)
    assert main(["compile", "lm-tiny", "--topology", "h100:8"]) == 2
    assert "run `pip install 'mupax[cuda]'`" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "jax_plugins", types.ModuleType("jax_plugins"))
    monkeypatch.setattr(topology, "cudnn_version", lambda: None)
    with pytest.raises(TopologyError, match=r"needs cuDNN.*run `pip install nvidia-cudnn-cu12`"):
        topology.ready("h100:8")


@pytest.mark.core
@pytest.mark.parametrize("name", GPUS)
def test_a_target_has_every_number_once(name: str) -> None:
    chip = GPUS[name]
    text = topology.gpu_target(chip, (9, 10, 2))
    fields = re.findall(r"^  (\w+):? ", text, re.MULTILINE)
    assert len(fields) == len(set(fields)) == 21
    assert f"device_memory_size: {chip.hbm_bytes}\n" in text
    assert f'device_description_str: "{chip.device_kind}"' in text
    assert "dnn_version_info { major: 9 minor: 10 patch: 2 }" in text
    assert ("ACCELERATED_FEATURES" in text) == (name != "a100")
    assert text.count("{") == text.count("}")


@pytest.mark.core
def test_a_gpus_peak_follows_from_its_tensor_cores() -> None:
    # Multiply-adds of a multiprocessor and clock: 4 tensor cores of 256, 1024 (Hopper) and 2048 (Blackwell).
    for name, adds in {"a100": 1024, "h100": 2 * 1024, "b200": 4 * 1024}.items():
        chip = GPUS[name]
        assert chip.gpu is not None
        highest = 2 * adds * chip.gpu.multiprocessors * chip.gpu.clock_hz
        # The peak is that of the clock under load, which no chip exceeds.
        assert 0.9 * highest < chip.peak_flops <= 1.001 * highest, name


@pytest.mark.core
def test_hosts_are_islands_of_gpus_that_are_not_here() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=8), absent(2, 8))
    assert topology.across(mesh) == {"data": 2}
    assert topology.islands(mesh.devices.flat) == [0] * 8 + [1] * 8
    crossing = make_mesh(MeshConfig(data=1, fsdp=16), absent(2, 8))
    assert topology.across(crossing) == {"fsdp": 2}
    # The control: a mesh whose inner axis would cross hosts is refused, as on the machines.
    with pytest.raises(MupaxError):
        make_mesh(MeshConfig(data=1, tensor=16), absent(2, 8))


PROGRAM = """ENTRY %main (p: bf16[8,8], x: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %x = bf16[8,8]{1,0} parameter(1)
  %inner = bf16[8,8]{1,0} all-reduce-start(%p), replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_1'}, to_apply=%add
  %product = bf16[8,8]{1,0} custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %inner_done = bf16[8,8]{1,0} all-reduce-done(%inner)
  %outer = bf16[8,8]{1,0} all-reduce-start(%x), replica_groups={{0,2},{1,3}}, to_apply=%add
  %outer_done = bf16[8,8]{1,0} all-reduce-done(%outer)
  %second = bf16[8,8]{1,0} all-reduce-start(%x), replica_groups={{0,2},{1,3}}, to_apply=%add
  %second_done = bf16[8,8]{1,0} all-reduce-done(%second)
  %kernel = (bf16[4,2,16,8]{3,2,1,0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %n = bf16[8,8]{1,0} negate(%inner_done)
}
"""


@pytest.mark.core
def test_sums_that_leave_a_host_are_told_apart() -> None:
    module = hlo.parse(PROGRAM)
    mesh = {"data": 2, "fsdp": 2}
    inner, outer, second = hlo.collectives(module, mesh, None, [0, 0, 1, 1])
    assert (inner.axes, inner.between_slices, inner.overlapped) == (("fsdp",), False, True)
    assert (outer.axes, outer.between_slices, outer.overlapped) == (("data",), True, False)
    assert second.between_slices
    # The control: four GPUs of one host send nothing over the slow network.
    assert not any(row.between_slices for row in hlo.collectives(module, mesh, None, [0] * 4))
    assert pods_compiled.communicators(module, 4) == 2


@pytest.mark.core
def test_the_workspace_of_attention_is_a_gradient_in_float32() -> None:
    assert pods_compiled.attention_workspace(hlo.parse(PROGRAM)) == 4 * 2 * 16 * 8 * 4
    forward = PROGRAM.replace("fmhaSoftmaxBackward", "fmhaSoftmax")
    assert pods_compiled.attention_workspace(hlo.parse(forward)) == 0


@pytest.mark.core
@pytest.mark.parametrize(
    ("variable", "communicators", "share"),
    [("", 1, 0.75), ("0.75", 4, 0.75), (".9", 1, 0.9), ("1", 2, None), ("0.99", 20, None)],
)
def test_arrays_have_a_share_of_a_gpu(
    variable: str, communicators: int, share: float | None
) -> None:
    environment = {pods_compiled.MEM_FRACTION: variable} if variable else {}
    size = pods_compiled.array_bytes_of_gpu(H100, communicators, environment)
    if share is None:
        # What is left beside the buffers of NCCL, which do not fit outside of the share.
        assert size == H100.hbm_bytes - communicators * pods_compiled.NCCL_BYTES
    else:
        assert size == int(share * H100.hbm_bytes)


@pytest.mark.core
@pytest.mark.parametrize("variable", ["0", "1.5", "half", "-1", "nan"])
def test_a_share_that_is_none_is_refused(variable: str) -> None:
    with pytest.raises(MupaxError, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION is '{variable}'; write"):
        pods_compiled.array_bytes_of_gpu(H100, 1, {pods_compiled.MEM_FRACTION: variable})


@pytest.mark.core
def test_waiting_for_the_slow_network_comes_on_top() -> None:
    line = Roofline(
        compute=2.0,
        memory=1.0,
        network=0.5,
        slow_network=1.5,
        cycles=None,
        alone=0.25,
        slow_alone=1.0,
    )
    assert (line.bound, line.seconds) == ("compute", 3.25)
    slow = dataclasses.replace(line, slow_network=4.0)
    assert (slow.bound, slow.seconds) == ("slow_network", 4.25)


@pytest.mark.core
def test_kernels_are_those_of_the_chip_while_it_is_traced() -> None:
    from jax._src.cudnn import fused_attention_stablehlo as attention

    before = attention.check_compute_capability
    with topology.kernels_of(H100):
        assert attention.check_compute_capability("9.0")
        assert not attention.check_compute_capability("10.0")
        assert attention.is_cuda_compute_capability_equal("9.0")
    with topology.kernels_of(GPUS["a100"]):
        assert not attention.check_compute_capability("9.0")
    with topology.kernels_of(CHIPS["v5e"]):
        assert attention.check_compute_capability is before
    assert attention.check_compute_capability is before


def report(
    name: str, seconds: float, *, fits: bool = True, platform: str = "gpu"
) -> dict[str, Any]:
    return {
        "flags": name,
        "fits": fits,
        "platform": platform,
        "peak_bytes_per_device": 2**30,
        "expected_seconds": seconds,
        "batch_size": 8,
        "roofline": {"step_seconds": seconds, "alone": 0.0, "bound": "compute", "mfu": 0.5},
    }


@pytest.mark.core
@pytest.mark.parametrize(
    ("reports", "ties"),
    [
        ([report("a", 1.0), report("b", 1.09), report("c", 1.2)], 2),
        ([report("a", 1.0), report("b", 1.05), report("c", 1.05, fits=False)], 2),
        ([report("a", 1.0), report("b", 1.2)], 0),
        ([report("a", 1.0, platform="tpu"), report("b", 1.05, platform="tpu")], 0),
    ],
)
def test_estimates_within_a_tenth_are_a_tie(reports: list[dict[str, Any]], ties: int) -> None:
    text = search.table(reports, "title")
    assert (f"the first {ties} are a tie" in text) == (ties > 0)
    assert ("are a tie" in text) == (ties > 0)


@pytest.mark.core
def test_gpus_are_searched_with_and_without_flags() -> None:
    config = dataclasses.replace(config_of(MeshConfig(data=1, fsdp=2)), steps=3)
    plans = list(search.candidates(config, H100, jax.devices()[:2], 1, (1,)))
    by_flags: dict[str, list[float]] = {"auto": [], "none": []}
    for plan in plans:
        assert plan.config.model.compute.attention_block is None
        by_flags[plan.config.xla_flags].append(plan.seconds)
        assert ("--xla-flags none" in plan.words) == (plan.config.xla_flags == "none")
    assert len(by_flags["auto"]) == len(by_flags["none"]) > 0
    # Without flags no collective runs beside a product.
    assert all(b >= a for a, b in zip(by_flags["auto"], by_flags["none"], strict=True))
    own = dataclasses.replace(config, xla_flags="none")
    assert {
        plan.config.xla_flags for plan in search.candidates(own, H100, jax.devices()[:2], 1, (1,))
    } == {"none"}


# By the real compiler


gpu = pytest.mark.gpu


def step(name: str, optimizer: str = "adamw", **compute: Any) -> Compiled:
    """Compile a small decoder with attention heads of 64 for a topology.

    Args:
        compute: Fields of `ComputeConfig`.
    """
    devices = topology.size(name)
    hosts = max(1, devices // 8)
    config = config_of(MeshConfig(data=hosts, fsdp=devices // hosts))
    fields = {"attention": "auto", **compute}
    model = dataclasses.replace(
        config.model, compute=dataclasses.replace(config.model.compute, **fields)
    )
    optimizer_config = dataclasses.replace(config.optimizer, name=optimizer)
    return compile_for(dataclasses.replace(config, model=model, optimizer=optimizer_config), name)


@gpu
@pytest.mark.parametrize("name", ["a100:2", "h100:2", "h200:2", "b200:2"])
def test_every_gpu_has_cudnn_attention_forward_and_backward(name: str) -> None:
    executable = step(name)
    text = executable.text
    assert 'custom_call_target="__cudnn$fmhaSoftmax"' in text
    assert 'custom_call_target="__cudnn$fmhaSoftmaxBackward"' in text
    assert 'custom_call_target="__cublas$lt$matmul"' in text
    assert executable.report()["problems"] == []


@gpu
def test_control_float32_has_no_kernel_of_cudnn() -> None:
    assert "__cudnn$fmha" not in step("h100:2", dtype="float32").text


@gpu
def test_products_of_float8_are_computed_as_such() -> None:
    pytest.importorskip("qwix")
    eight_bits = step("h100:2", product_dtype="float8")
    assert FLOAT8_PRODUCT in eight_bits.text
    bfloat16 = step("h100:2")
    assert FLOAT8_PRODUCT not in bfloat16.text
    # Twice the peak: the least time of the same products is about half.
    times = [executable.roofline() for executable in (eight_bits, bfloat16)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[0].compute < 0.6 * times[1].compute


@gpu
def test_a_gpu_without_float8_is_refused() -> None:
    pytest.importorskip("qwix")
    message = r"capability 8\.9 or later .*, and a GPU of the mesh has 8\.0"
    with pytest.raises(MupaxError, match=message):
        step("a100:2", product_dtype="float8")


def overlapped_share(step: Compiled, axis: str) -> float:
    """Return the share of gradient bytes summed over a mesh axis that products run beside."""
    total = 0
    overlapped = 0
    for collective in step.collectives:
        if collective.kind in ("all-reduce", "reduce-scatter") and axis in collective.axes:
            size = collective.bytes * collective.times
            total += size
            overlapped += size * collective.overlapped
    return overlapped / total


@gpu
@pytest.mark.slow
def test_gradients_between_hosts_run_beside_products(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--mesh.data", "2", "--mesh.fsdp", "8"]
    config = cli.parse("lm-1b", cli.recipe("lm-1b"), flags, ()).config
    # The rest is the gradient of the layer whose backward pass is last.
    assert overlapped_share(compile_for(config, "h100:2x8"), "data") > 0.85
    # The control: one collective in flight, XLA's default.
    options = hardware.compiler_options
    monkeypatch.setattr(
        hardware,
        "compiler_options",
        lambda *args, **more: options(*args, **more) | {OVERLAP_LIMIT: 1},
    )
    assert overlapped_share(compile_for(config, "h100:2x8"), "data") < 0.5


@gpu
def test_muon_sends_nothing_in_its_iterations() -> None:
    executable = step("h100:2", "muon")
    assert executable.report()["problems"] == []
    assert [row.name for row in executable.collectives if ITERATIONS in row.op_name] == []
    assert [row for row in executable.collectives if row.kind == "all-to-all"]


@gpu
def test_control_iterations_that_the_compiler_splits_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "matrix_steps", split_steps)
    executable = step("h100:2", "muon")
    assert [row for row in executable.collectives if ITERATIONS in row.op_name]


@gpu
def test_a_report_on_the_screen_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    flags = "--model.compute.dtype bfloat16 --model.width 128 --model.num-heads 2 --mesh.fsdp 2 --mesh.data 2"
    argv = ["compile", "lm-tiny", "--topology", "h100:2x2", "--json", str(file), *flags.split()]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert not err
    assert "(an estimate; JAX leaves arrays 59.3 GiB of 79.1 GiB)" in out
    assert "not as in a run  products by cuBLASLt" in out
    assert "cycles" not in out
    assert "all-reduce      data (slices)" in out
    record = json.loads(file.read_text())
    assert record["fits"]
    assert record["workspace_bytes_per_device"] == 4 * 2 * 128 * 64 * 4
    assert record["roofline"]["slow_network"] > 0
    assert record["flags_without_a_gpu"]["xla_gpu_autotune_level"] == 0


@gpu
def test_a_model_that_is_too_large_is_told_what_would_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # 8.6 billion parameters in two layers, which compile fast.
    flags = "--model.depth 2 --model.width 16384 --model.mlp-ratio 4 --data.batch-size 8"
    assert main(["compile", "lm-8b", "--topology", "h100:1", *flags.split()]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "does not fit by" in out
    match = re.search(r"would fit (h100:\S+) (--mesh\.data 1 --mesh\.fsdp \d+)", out)
    assert match is not None
    # What is said to fit has enough memory for parameters and both moments.
    assert topology.size(match[1]) * 0.75 * H100.hbm_bytes > 12 * 8.0e9
