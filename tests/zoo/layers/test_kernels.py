"""Attention kernels: splash as ordinary operations against the merged products, its choice, and the TPU compiler's word.

Tolerance is for float32, relative to the largest entry.
"""

from __future__ import annotations

import dataclasses
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
from mupax.train.parallel.chips import TPUS
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo.configs import ComputeConfig, ConfigError
from mupax.zoo.layers.flash import (
    BLOCK,
    BLOCKS,
    block_of,
    cudnn_attention,
    ring_attention,
    splash_attention,
)
from mupax.zoo.layers.kernels import attend, merged_attention, tiled_attention, why_not
from mupax.zoo.layers.ring import ring
from mupax.zoo.partition import Layout


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
    return tuple(np.asarray(random.standard_normal(shape), dtype) for shape in shapes)


def outputs_and_gradients(run: Any, qkv: Any, layout: Layout | None = None) -> Any:
    weights = np.random.default_rng(6).standard_normal(qkv[0].shape).astype(np.float32)

    def total(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = run(*qkv) if layout is None else run(*qkv, layout=layout)
        return jnp.sum(y * weights), y

    (_, y), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return jax.device_get((y, *grads))


def output(run: Any, qkv: Any, **how: Any) -> np.ndarray:
    """Of one program."""
    return np.asarray(jax.jit(functools.partial(run, **how))(*qkv))


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
def test_splash_equals_the_products(
    causal: bool, sizes: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mupax.zoo.layers.flash.FUSED", 128 if sizes is None else 2048)
    qkv = projections(length=256 if sizes else 128)
    expected = outputs_and_gradients(functools.partial(merged_attention, causal=causal), qkv)
    layout = None if sizes is None else MeshLayout(make_mesh(MeshConfig(**sizes)))
    actual = outputs_and_gradients(
        functools.partial(splash_attention, causal=causal, interpret=True), qkv, layout
    )
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    if causal:
        other = output(merged_attention, qkv, causal=False)
        assert np.abs(other - actual[0]).max() > 0.1  # the control: the mask is seen


RINGS = [
    # Softmax put together of eight parts, or of two in tiles of a kernel; key heads that tensor does not divide; no mask.
    ({"data": 1, "sequence": 8}, 32, True, False),
    ({"data": 2, "tensor": 2, "sequence": 2}, 512, True, True),
    ({"data": 1, "tensor": 4, "sequence": 2}, 8, True, False),
    ({"data": 2, "sequence": 4}, 16, False, False),
]


@pytest.mark.parametrize(("sizes", "length", "causal", "kernel"), RINGS)
def test_a_ring_equals_the_products(
    sizes: dict[str, int], length: int, causal: bool, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mupax.zoo.layers.ring.products.TILE", 2)
    qkv, layout = projections(length=length), MeshLayout(make_mesh(MeshConfig(**sizes)))
    expected = outputs_and_gradients(functools.partial(merged_attention, causal=causal), qkv)
    actual = outputs_and_gradients(
        functools.partial(ring_attention, causal=causal, interpret=kernel), qkv, layout
    )
    for got, want in zip(actual, expected, strict=True):
        # Sums of float32 in another order; a part that is left out or looked at twice changes the first digit.
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("sizes", "length", "causal", "kernel"), RINGS)
def test_segments_go_round_with_their_keys(
    sizes: dict[str, int], length: int, causal: bool, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mupax.zoo.layers.ring.products.TILE", 2)
    qkv, layout = projections(length=length), MeshLayout(make_mesh(MeshConfig(**sizes)))
    # Of a length between a part's and all: some cross borders of devices, and some parts have none of a query's.
    starts = np.random.default_rng(11).random((2, length)) < 6 / length
    starts[:, length // 2] = False
    segments_BT = np.cumsum(starts, axis=1, dtype=np.int32)
    assert segments_BT.max() > 1
    expected = outputs_and_gradients(
        functools.partial(merged_attention, causal=causal, segments_BT=segments_BT), qkv
    )
    ways = functools.partial(
        ring_attention, causal=causal, segments_BT=segments_BT, interpret=kernel
    )
    for got, want in zip(outputs_and_gradients(ways, qkv, layout), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())

    sent = ring._sent

    def stay(parts: Any, names: tuple[str, ...]) -> Any:
        return jax.tree.map(lambda x: x if x.dtype == np.int32 else sent(x, names), parts)

    monkeypatch.setattr(ring, "_sent", stay)
    stays = outputs_and_gradients(
        ways, qkv, layout
    )  # the control: segments that stay where they are, keys that go
    assert (
        min(
            np.abs(got - want).max() / np.abs(want).max()
            for got, want in zip(stays, expected, strict=True)
        )
        > 0.1
    )


@pytest.mark.core
def test_tiles_equal_the_products_in_value_gradient_and_derivative() -> None:
    qkv, causal = (
        projections(length=150),
        functools.partial(merged_attention, causal=True),
    )  # 64, 64 and 22 queries
    actual, expected = (outputs_and_gradients(run, qkv) for run in (tiled_attention, causal))
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    shifted = tuple(np.roll(x, 1, axis=1) for x in qkv)
    changes = [
        np.asarray(jax.jit(lambda *x, run=run: jax.jvp(run, x, shifted)[1])(*qkv))
        for run in (tiled_attention, causal)
    ]
    np.testing.assert_allclose(*changes, rtol=0, atol=1e-5 * np.abs(changes[1]).max())
    other = outputs_and_gradients(functools.partial(merged_attention, causal=False), qkv)
    assert (
        min(np.abs(a - b).max() for a, b in zip(other, actual, strict=True)) > 0.1
    )  # the control: the mask is seen


def seen_by_a_window(qkv: Any, window: int, cap: float | None = None) -> np.ndarray:
    """The definition in float64: query t sees keys t - window + 1 to t, by logits of at most the cap."""
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits, distance = (
        np.einsum("bthn,bshn->bhts", q, k),
        np.subtract.outer(*[np.arange(q.shape[1])] * 2),
    )
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    weights = np.exp(np.where((distance >= 0) & (distance < window), logits, -np.inf))
    return np.einsum("bhts,bshn->bthn", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("window", "cap"), [(1, None), (37, None), (90, 1.5), (128, None), (128, 0.5)]
)
def test_a_window_and_a_cap_are_what_their_definitions_say(window: int, cap: float | None) -> None:
    qkv = projections()
    whole, expected = output(merged_attention, qkv, causal=True), seen_by_a_window(qkv, window, cap)
    ways = {
        "merged": merged_attention,
        "by platform": attend,
        "xla": functools.partial(attend, layout=Device("cpu", data=4, tensor=2)),
    }  # tiles of 64 queries, and XLA of many devices
    for name, way in ways.items():
        y = output(way, qkv, causal=True, window=window, cap=cap)
        np.testing.assert_allclose(y, expected, atol=2e-6, err_msg=name)
    assert (np.abs(expected - whole).max() > 0.1) == (
        window < 128 or cap is not None
    )  # the control: all of it is no window


def test_kernels_take_a_window_and_a_cap_or_say_why_not() -> None:
    qkv = projections(length=256)
    sight = {"window": 100, "cap": 1.5}
    expected = outputs_and_gradients(functools.partial(merged_attention, causal=True, **sight), qkv)
    splash = functools.partial(splash_attention, causal=True, **sight, block=128, interpret=True)
    for way in (splash, functools.partial(tiled_attention, **sight)):
        for got, want in zip(outputs_and_gradients(way, qkv), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    for kernel, platform in (("ring", "tpu"), ("cudnn", "gpu")):
        reason = functools.partial(why_not, kernel, *qkv[:2], True, layout=Device(platform))
        assert "model.window" in (reason(100) or "")
        assert "model.attention_softcap is 1.5" in (reason(None, 1.5) or "")


SEGMENTS = np.cumsum(np.random.default_rng(7).random((2, 256)) < 0.02, axis=1, dtype=np.int32)


def test_segments_do_not_see_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, split = projections(length=256), MeshLayout(make_mesh(MeshConfig(sequence=2, tensor=2)))
    kernel = (
        jax.nn.dot_product_attention
    )  # of cuDNN only a GPU can tell: what it is asked is what XLA is

    def plainly(*qkv: jax.Array, **how: Any) -> jax.Array:
        return kernel(*qkv, **how | {"implementation": "xla"})

    monkeypatch.setattr("mupax.zoo.layers.flash.jax.nn.dot_product_attention", plainly)
    splash = functools.partial(splash_attention, block=128, interpret=True)
    by_sight: list[tuple[dict[str, Any], dict[str, tuple[Any, Any]]]] = [
        ({}, {"xla": (attend, split), "cudnn": (cudnn_attention, split)}),
        ({"window": 100, "cap": 1.5}, {"tiles": (attend, None), "splash": (splash, split)}),
    ]
    for sight, ways in by_sight:
        merged = functools.partial(merged_attention, causal=True, **sight)
        expected = outputs_and_gradients(functools.partial(merged, segments_BT=SEGMENTS), qkv)
        for row, places in (
            (0, SEGMENTS[0] == 1),
            (1, SEGMENTS[1] == SEGMENTS[1].max()),
        ):  # each by itself
            alone = output(merged, [np.asarray(x)[row : row + 1, places] for x in qkv])
            np.testing.assert_allclose(expected[0][row, places], alone[0], atol=2e-6)
        assert (
            np.abs(expected[0] - output(merged, qkv)).max() > 0.1
        )  # the control: segments are seen
        for name, (way, layout) in ways.items():
            actual = outputs_and_gradients(
                functools.partial(way, causal=True, segments_BT=SEGMENTS, **sight), qkv, layout
            )
            for got, want in zip(actual, expected, strict=True):
                np.testing.assert_allclose(
                    got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=name
                )


@pytest.mark.core
def test_auto_takes_the_kernel_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in (
        "ring_attention",
        "splash_attention",
        "cudnn_attention",
        "merged_attention",
        "tiled_attention",
    ):
        file = "kernels" if name in ("merged_attention", "tiled_attention") else "flash"
        monkeypatch.setattr(
            f"mupax.zoo.layers.{file}.{name}",
            lambda q, k, v, name=name, **how: calls.append(name) or q,
        )

    def choose(layout: Layout, apart: bool = False, **changes: Any) -> str:
        calls.clear()
        qkv = projections(**changes)
        segments_BT = jnp.zeros(qkv[0].shape[:2], jnp.int32) if apart else None
        jax.eval_shape(
            functools.partial(attend, causal=True, segments_BT=segments_BT, layout=layout), *qkv
        )
        return calls[0] if calls else "xla"

    half = {"dtype": jnp.bfloat16}
    assert choose(Device("cpu")) == "tiled_attention"
    assert choose(Device("cpu"), length=64) == "merged_attention"
    assert choose(Device("cpu", data=4, tensor=2)) == "xla"
    assert choose(Device("tpu"), **half) == "splash_attention"
    assert choose(Device("tpu"), length=196) == "xla"
    assert choose(Device("tpu", data=4, sequence=2)) == "xla"  # two parts of 32 positions on each
    assert choose(Device("tpu", data=4, sequence=2), length=8192) == "ring_attention"
    assert choose(Device("tpu", data=4, sequence=2), length=4096) == "splash_attention"
    assert choose(Device("tpu", data=4, sequence=2), apart=True, length=8192) == "ring_attention"
    assert choose(Device("tpu", data=4, sequence=2), apart=True, length=4096) == "splash_attention"
    assert (
        choose(Device("gpu", data=4, sequence=2), apart=True, heads=3, kv_heads=1, **half)
        == "ring_attention"
    )
    assert choose(Device("gpu"), **half) == "cudnn_attention"
    assert choose(Device("gpu")) == "xla"
    assert choose(Device("gpu"), size=12, **half) == "xla"
    assert choose(Device("gpu", data=4, sequence=2), **half) == "cudnn_attention"
    assert (
        choose(Device("gpu", data=4, sequence=2), heads=3, kv_heads=1, **half) == "ring_attention"
    )
    assert choose(Device("gpu", data=4, sequence=2), length=130) == "xla"
    assert choose(Device("cpu", data=4, sequence=2)) == "xla"


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "platform", "changes", "why"),
    [
        ("splash", "cpu", {}, "for TPUs, and this is compiled for cpu; write auto or xla"),
        ("splash", "tpu", {"length": 196}, "196 positions are not a multiple of 128"),
        (
            "ring",
            "tpu",
            {},
            "for positions that devices split, and mesh.sequence is 1; write auto or xla",
        ),
        ("cudnn", "tpu", {}, "for GPUs, and this is compiled for tpu"),
        ("cudnn", "gpu", {}, "for bfloat16, and model.compute.dtype is float32"),
        (
            "cudnn",
            "gpu",
            {"dtype": jnp.bfloat16, "size": 12},
            "head dimension 12 is not a multiple of 8",
        ),
    ],
)
def test_a_kernel_that_cannot_says_why(
    name: Any, platform: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.compute.attention {name}: .*{why}"):
        attend(*projections(**changes), causal=True, implementation=name, layout=Device(platform))


@pytest.mark.core
@pytest.mark.parametrize(
    ("capability", "size", "why"),
    [
        ("8.0", 128, None),
        ("8.9", 136, "136 is not a multiple of 8 up to 128"),
        ("9.0", 256, None),
        ("10.3", 256, None),
        ("9.0", 264, "264 is not a multiple of 8 up to 256"),
        ("7.5", 64, "capability 8.0 or later"),
        ("gfx942:sramecc+:xnack-", 64, "NVIDIA's, and a GPU of the mesh is a gfx942"),
    ],
)
def test_the_gpus_of_the_mesh_decide(capability: str, size: int, why: str | None) -> None:
    q, k, _ = projections(size=size, dtype=jnp.bfloat16)
    layout = Device("gpu")
    layout.capabilities = frozenset({"12.0", capability})
    reason = why_not("cudnn", q, k, True, layout=layout)
    assert reason is None if why is None else why in str(reason)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_split_positions_are_exchanged_for_heads(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What every device attends with is ordinary products here, in place of the kernel: of whole positions, causal from 0.
    lengths = []

    def products(
        q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool, **_: Any
    ) -> jax.Array:
        lengths.append((q.shape[1], q.shape[2], k.shape[2]))
        return merged_attention(q, k, v, causal=is_causal)

    monkeypatch.setattr(jax.nn, "dot_product_attention", products)
    qkv, layout = (
        projections(length=16, kv_heads=kv_heads),
        MeshLayout(make_mesh(MeshConfig(data=2, tensor=2, sequence=2))),
    )
    expected = outputs_and_gradients(functools.partial(merged_attention, causal=True), qkv)
    actual = outputs_and_gradients(functools.partial(cudnn_attention, causal=True), qkv, layout)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert set(lengths) == {(16, 1, 1)}


@pytest.mark.core
def test_blocks_divide_the_positions_and_suit_the_chip() -> None:
    assert [block_of(n, "TPU v5 lite", causal=True) for n in (128, 256, 384, 2048, 8192)] == [
        128,
        128,
        128,
        512,
        512,
    ]
    assert block_of(8192, "TPU v6 lite", causal=True) == 1024
    assert block_of(256, "TPU v5 lite", causal=False) == 256
    assert block_of(8192, "TPU v6 lite", 640, causal=True) == 512
    for chip in TPUS.values():
        assert BLOCKS.get(chip.device_kind, BLOCK) * chip.hbm_bandwidth > chip.peak_flops
    with pytest.raises(ConfigError, match="attention_block is 700, no multiple of 128; write 640"):
        ComputeConfig(attention_block=700)


COMPILE = """
import dataclasses, jax
from jax.experimental import topologies
from scripts.bench.pytorch.step import config_of
from mupax.train.config.run import MeshConfig
from mupax.train.core.program import assemble
from mupax.zoo import configs
from mupax.zoo.configs import ComputeConfig

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
compute = ComputeConfig(dtype="bfloat16", attention="splash", cross_entropy="chunked", remat="dots")
model = dataclasses.replace(
    configs.get("lm-tiny"), width=128, depth=2, num_heads=2, num_kv_heads=2, seq_len=512, mlp_ratio=2.0, compute=compute
)
for mesh in (MeshConfig(data=1, fsdp=2, tensor=2), MeshConfig(data=1, fsdp=2, sequence=2)):
    attention = "ring" if mesh.sequence > 1 else "splash"
    model = dataclasses.replace(model, compute=dataclasses.replace(compute, attention=attention))
    text = assemble(dataclasses.replace(config_of(model, 4), mesh=mesh), devices).compile_train().as_text()
    assert "tpu_custom_call" in text
    # Keys sent round beside products.
    assert mesh.sequence == 1 or ("collective-permute-start(" in text and "collective-permute(" not in text)
print("compiled")
"""


@pytest.mark.tpu
def test_splash_and_chunks_compile_for_a_tpu() -> None:
    outside = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**os.environ, **outside, "TPU_WORKER_ID": "0"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.stdout.strip() == "compiled", ran.stderr[-2000:]
