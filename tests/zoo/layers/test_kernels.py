"""Attention kernels: splash as ordinary operations against the merged products, its choice, and the TPU compiler's word.

Tolerance is for float32, relative to the largest entry.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.run import MeshConfig
from mupax.train.parallel.mesh import make_mesh
from mupax.train.parallel.sharding import MeshLayout
from mupax.zoo import partition
from mupax.zoo.configs import ConfigError
from mupax.zoo.layers.kernels import attend, merged_attention, splash_attention, why_not


class Device(MeshLayout):
    """The layout of one device of a named platform."""

    def __init__(self, platform: str, **sizes: int) -> None:
        super().__init__(make_mesh(MeshConfig(**(sizes or {"data": 8}))))  # pyright: ignore
        self.platform = platform


def projections(
    *, length: int = 128, heads: int = 4, kv_heads: int = 2, size: int = 8, dtype: Any = jnp.float32
) -> Any:
    random = np.random.default_rng(5)
    shapes = [(2, length, n, size) for n in (heads, kv_heads, kv_heads)]
    return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)


def outputs_and_gradients(run: Any, qkv: Any, layout: partition.Layout | None = None) -> Any:
    weights = jnp.asarray(np.random.default_rng(6).standard_normal(qkv[0].shape), jnp.float32)

    def total(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        with partition.using(layout):
            y = run(*qkv)
        return jnp.sum(y * weights), y

    (_, y), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return (y, *grads)


@pytest.mark.parametrize(
    ("causal", "sizes"),
    [
        (True, None),
        (True, {"data": 2, "tensor": 2, "sequence": 2}),
        (True, {"data": 1, "tensor": 4, "sequence": 2}),
        (False, {"data": 2, "tensor": 2, "sequence": 2}),
    ],
    ids=["one device", "split", "key heads that do not divide", "sees everything"],
)
def test_splash_equals_the_products(causal: bool, sizes: dict[str, int] | None) -> None:
    qkv = projections(length=256 if sizes else 128)
    expected = outputs_and_gradients(functools.partial(merged_attention, causal=causal), qkv)
    layout = None if sizes is None else MeshLayout(make_mesh(MeshConfig(**sizes)))
    found = outputs_and_gradients(functools.partial(splash_attention, causal=causal, interpret=True), qkv, layout)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    if causal:
        other = merged_attention(*qkv, causal=False)
        assert np.abs(other - found[0]).max() > 0.1  # the control: the mask is seen


@pytest.mark.core
def test_auto_takes_the_kernel_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("splash_attention", "cudnn_attention", "merged_attention"):
        monkeypatch.setattr(
            f"mupax.zoo.layers.kernels.{name}", lambda q, k, v, causal, name=name: taken.append(name) or q
        )

    def choose(layout: partition.Layout, **changes: Any) -> str:
        taken.clear()
        with partition.using(layout):
            jax.eval_shape(lambda *qkv: attend(*qkv, causal=True), *projections(**changes))
        return taken[0] if taken else "xla"

    half = {"dtype": jnp.bfloat16}
    assert choose(Device("cpu")) == "merged_attention"
    assert choose(Device("cpu", data=4, tensor=2)) == "xla"
    assert choose(Device("tpu"), **half) == "splash_attention"
    assert choose(Device("tpu"), length=196) == "xla"
    assert choose(Device("tpu", data=4, sequence=2)) == "xla"  # 64 positions on each
    assert choose(Device("gpu"), **half) == "cudnn_attention"
    assert choose(Device("gpu")) == "xla"
    assert choose(Device("gpu"), size=12, **half) == "xla"
    assert choose(Device("gpu", data=4, sequence=2), **half) == "xla"


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "platform", "changes", "why"),
    [
        ("splash", "cpu", {}, "for TPUs, and this is compiled for cpu; write auto or xla"),
        ("splash", "tpu", {"length": 196}, "196 positions are not a multiple of 128"),
        ("cudnn", "tpu", {}, "for GPUs, and this is compiled for tpu"),
        ("cudnn", "gpu", {}, "for bfloat16, and model.compute.dtype is float32"),
        ("cudnn", "gpu", {"dtype": jnp.bfloat16, "size": 12}, "head dimension 12 is not a multiple of 8"),
    ],
)
def test_a_kernel_that_cannot_says_why(name: Any, platform: str, changes: dict[str, Any], why: str) -> None:
    with (
        partition.using(Device(platform)),
        pytest.raises(ConfigError, match=f"model.compute.attention {name}: .*{why}"),
    ):
        attend(*projections(**changes), causal=True, implementation=name)


@pytest.mark.core
def test_split_positions_have_no_causal_cudnn_kernel() -> None:
    q, k, _ = projections(dtype=jnp.bfloat16)
    with partition.using(Device("gpu", data=4, sequence=2)):
        assert "mask cannot begin at a later position" in str(why_not("cudnn", q, k, True))
        assert why_not("cudnn", q, k, False) is None


COMPILE = """
import dataclasses, jax
from jax.experimental import topologies
from scripts.bench.torch_step import config_of
from mupax.train.config.run import MeshConfig
from mupax.train.core.program import assemble
from mupax.zoo import configs
from mupax.zoo.configs import ComputeConfig

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
compute = ComputeConfig(dtype="bfloat16", attention="splash", cross_entropy="chunked", remat="dots")
model = dataclasses.replace(
    configs.get("lm-tiny"), width=128, depth=2, num_heads=2, num_kv_heads=2, seq_len=256, mlp_ratio=2.0, compute=compute
)
for mesh in (MeshConfig(data=1, fsdp=2, tensor=2), MeshConfig(data=1, fsdp=2, sequence=2)):
    text = assemble(dataclasses.replace(config_of(model, 4), mesh=mesh), devices).compile_train().as_text()
    assert "tpu_custom_call" in text
print("compiled")
"""


@pytest.mark.tpu
def test_splash_and_chunks_compile_for_a_tpu() -> None:
    outside = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**os.environ, **outside, "TPU_WORKER_ID": "0"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.stdout.strip() == "compiled", ran.stderr[-2000:]
