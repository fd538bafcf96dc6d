"""Attention kernels: splash as ordinary operations against merged products, and their choice.

The tolerance is for float32, relative to the largest entry: sums in another order.
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
from mupax.zoo.partition import ONE_DEVICE, Layout
from tests.fixtures.tiny import assert_close, relative_errors


class Device(MeshLayout):
    """Layout of the devices of a named platform."""

    def __init__(self, platform: str, **sizes: int) -> None:
        super().__init__(make_mesh(MeshConfig(**(sizes or {"data": 8}))))  # pyright: ignore
        self.platform = platform


def layout_of(**sizes: int) -> MeshLayout:
    return MeshLayout(make_mesh(MeshConfig(**sizes)))  # pyright: ignore[reportArgumentType]


def projections(
    *, length: int = 128, heads: int = 4, kv_heads: int = 2, size: int = 8, dtype: Any = jnp.float32
) -> Any:
    """Draw queries, keys and values."""
    random = np.random.default_rng(5)
    shapes = [(2, length, n, size) for n in (heads, kv_heads, kv_heads)]
    return tuple(np.asarray(random.standard_normal(shape), dtype) for shape in shapes)


def outputs_and_gradients(attention: Any, qkv: Any, **options: Any) -> Any:
    """Return the output, and the gradients of a random linear function of it."""
    weights = np.random.default_rng(6).standard_normal(qkv[0].shape).astype(np.float32)

    def total(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = attention(*qkv, **options)
        return jnp.sum(y * weights), y

    (_, y), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return jax.device_get((y, *grads))


def output(attention: Any, qkv: Any, **options: Any) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(attention, **options))(*qkv))


@functools.cache
def expected_products(
    length: int, causal: bool = True, kv_heads: int = 2, segments: bool = False
) -> Any:
    """Return output and gradients of `merged_attention` for `projections` and `segments_of`."""
    segments_BT = segments_of(length) if segments else None
    qkv = projections(length=length, kv_heads=kv_heads)
    return outputs_and_gradients(merged_attention, qkv, causal=causal, segments_BT=segments_BT)


def segments_of(length: int) -> np.ndarray:
    """Draw segments, about 6 per text. Some cross borders of devices."""
    starts = np.random.default_rng(11).random((2, length)) < 6 / length
    starts[:, length // 2] = False
    return np.cumsum(starts, axis=1, dtype=np.int32)


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
    length = 256 if sizes else 128
    layout = layout_of(**sizes) if sizes else ONE_DEVICE
    actual = outputs_and_gradients(
        splash_attention, projections(length=length), causal=causal, interpret=True, layout=layout
    )
    assert_close(actual, expected_products(length, causal))
    other = expected_products(length, not causal)
    assert np.abs(other[0] - actual[0]).max() > 0.1  # the control: the mask is seen


RINGS = [
    # Softmax put together of eight parts, or of two in tiles of a kernel; key heads that tensor
    # does not divide; no mask.
    ({"data": 1, "sequence": 8}, 32, True, False, True),
    ({"data": 2, "tensor": 2, "sequence": 2}, 512, True, True, False),
    ({"data": 2, "tensor": 2, "sequence": 2}, 512, True, True, True),
    ({"data": 1, "tensor": 4, "sequence": 2}, 32, True, False, False),
    ({"data": 2, "sequence": 4}, 32, False, False, True),
]


@pytest.mark.parametrize(("sizes", "length", "causal", "kernel", "segments"), RINGS)
def test_a_ring_equals_the_products(
    sizes: dict[str, int],
    length: int,
    causal: bool,
    kernel: bool,
    segments: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mupax.zoo.layers.ring.products.TILE", 2)
    qkv = projections(length=length)
    segments_BT = segments_of(length) if segments else None
    options = {"causal": causal, "segments_BT": segments_BT, "interpret": kernel}
    ring_of_mesh = functools.partial(ring_attention, layout=layout_of(**sizes), **options)
    expected = expected_products(length, causal, segments=segments)
    # A part that is left out or looked at twice changes the first digit.
    assert_close(outputs_and_gradients(ring_of_mesh, qkv), expected)
    if not segments:
        return

    assert segments_BT is not None
    assert segments_BT.max() > 1
    sent = ring._sent

    def stay(parts: Any, names: tuple[str, ...]) -> Any:
        return jax.tree.map(lambda x: x if x.dtype == np.int32 else sent(x, names), parts)

    # The control: segments that stay where they are, while keys go round.
    monkeypatch.setattr(ring, "_sent", stay)
    wrong = output(ring_of_mesh, qkv)
    assert relative_errors(wrong, expected[0])[0] > 0.1


@pytest.mark.core
def test_tiles_equal_the_products_in_value_gradient_and_derivative() -> None:
    qkv = projections(length=150)  # tiles of 64, 64 and 22 queries
    actual = outputs_and_gradients(tiled_attention, qkv)
    assert_close(actual, expected_products(150))
    shifted = tuple(np.roll(x, 1, axis=1) for x in qkv)

    def derivative(attention: Any) -> jax.Array:
        return jax.jit(lambda *x: jax.jvp(attention, x, shifted)[1])(*qkv)

    expected = derivative(functools.partial(merged_attention, causal=True))
    assert_close(derivative(tiled_attention), expected)
    other = outputs_and_gradients(merged_attention, qkv, causal=False)
    differences = [np.abs(a - b).max() for a, b in zip(other, actual, strict=True)]
    assert min(differences) > 0.1  # the control: the mask is seen


def seen_by_a_window(qkv: Any, window: int, cap: float | None = None) -> np.ndarray:
    """Attend by the definition in float64.

    Query t sees keys t - window + 1 to t, by logits of at most the cap.
    """
    q, k, v = (np.asarray(x, np.float64) for x in qkv)
    groups = q.shape[2] // k.shape[2]
    logits = np.einsum("bthn,bshn->bhts", q, np.repeat(k, groups, axis=2))
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    positions = np.arange(q.shape[1])
    distance = np.subtract.outer(positions, positions)
    weights = np.exp(np.where((distance >= 0) & (distance < window), logits, -np.inf))
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshn->bthn", weights, np.repeat(v, groups, axis=2))


@pytest.mark.parametrize(
    ("window", "cap"), [(1, None), (37, None), (90, 1.5), (128, None), (128, 0.5)]
)
def test_a_window_and_a_cap_are_what_their_definitions_say(window: int, cap: float | None) -> None:
    qkv = projections()
    expected = seen_by_a_window(qkv, window, cap)
    implementations = {
        "merged": merged_attention,
        "tiles of 64 queries": attend,
        "XLA of many devices": functools.partial(attend, layout=Device("cpu", data=4, tensor=2)),
    }

    def outputs(*qkv: jax.Array) -> dict[str, jax.Array]:
        options = {"causal": True, "window": window, "cap": cap}
        return {name: attend_by(*qkv, **options) for name, attend_by in implementations.items()}

    for name, y in jax.jit(outputs)(*qkv).items():
        np.testing.assert_allclose(y, expected, atol=2e-6, err_msg=name)
    # The control: only a window of the complete text changes nothing.
    unlimited = seen_by_a_window(qkv, 128)
    changes = np.abs(expected - unlimited).max() > 0.1
    assert changes == (window < 128 or cap is not None)


SEGMENTS = np.cumsum(np.random.default_rng(7).random((2, 256)) < 0.02, axis=1, dtype=np.int32)
WINDOW: dict[str, Any] = {"window": 100, "cap": 1.5}


@pytest.mark.parametrize("segments", [False, True], ids=["", "segments"])
@pytest.mark.parametrize("name", ["tiles", "splash"])
def test_kernels_take_a_window_a_cap_and_segments(name: str, segments: bool) -> None:
    attention = tiled_attention
    options = dict(WINDOW)
    if name == "splash":
        attention = splash_attention
        options |= {"causal": True, "block": 128, "interpret": True}
        options["layout"] = layout_of(sequence=2, tensor=2) if segments else ONE_DEVICE
    if segments:
        options["segments_BT"] = SEGMENTS
    expected = windowed_products(segments)
    assert_close(outputs_and_gradients(attention, projections(length=256), **options), expected)


@functools.cache
def windowed_products(segments: bool) -> Any:
    segments_BT = SEGMENTS if segments else None
    qkv = projections(length=256)
    return outputs_and_gradients(
        merged_attention, qkv, causal=True, segments_BT=segments_BT, **WINDOW
    )


@pytest.mark.parametrize(("kernel", "platform"), [("ring", "tpu"), ("cudnn", "gpu")])
def test_a_kernel_without_windows_and_caps_says_why_not(kernel: Any, platform: str) -> None:
    q, k, _ = projections(length=256)
    reason = functools.partial(why_not, kernel, q, k, True, layout=Device(platform))
    assert "model.window" in (reason(100) or "")
    assert "model.attention_softcap is 1.5" in (reason(None, 1.5) or "")


@pytest.mark.parametrize("options", [{}, WINDOW], ids=["", "window"])
def test_segments_do_not_see_one_another(options: dict[str, Any]) -> None:
    qkv = projections(length=256)
    together = output(merged_attention, qkv, causal=True, segments_BT=SEGMENTS, **options)
    limits = {"window": 256, **options}
    for row, segment in ((0, 1), (1, SEGMENTS[1].max())):
        places = SEGMENTS[row] == segment
        alone = seen_by_a_window([x[row : row + 1, places] for x in qkv], **limits)
        np.testing.assert_allclose(together[row, places], alone[0], atol=2e-6)
    # The control: segments are seen.
    assert np.abs(together - seen_by_a_window(qkv, **limits)).max() > 0.1


@pytest.mark.parametrize("attention", [attend, cudnn_attention], ids=["xla", "cudnn"])
def test_devices_that_split_heads_and_positions_see_segments(
    attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a GPU can tell of cuDNN: here XLA computes what cuDNN is asked for.
    kernel = jax.nn.dot_product_attention

    def by_xla(*qkv: jax.Array, **options: Any) -> jax.Array:
        return kernel(*qkv, **options | {"implementation": "xla"})

    monkeypatch.setattr("mupax.zoo.layers.flash.jax.nn.dot_product_attention", by_xla)
    qkv = projections(length=256)
    layout = layout_of(sequence=2, tensor=2)
    actual = outputs_and_gradients(attention, qkv, causal=True, segments_BT=SEGMENTS, layout=layout)
    assert_close(actual, segment_products())


@functools.cache
def segment_products() -> Any:
    qkv = projections(length=256)
    return outputs_and_gradients(merged_attention, qkv, causal=True, segments_BT=SEGMENTS)


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
    # Every device attends by ordinary products in place of the kernel: all positions, causal from 0.
    sizes = set()

    def products(
        q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool, **_: Any
    ) -> jax.Array:
        sizes.add((q.shape[1], q.shape[2], k.shape[2]))
        return merged_attention(q, k, v, causal=is_causal)

    monkeypatch.setattr(jax.nn, "dot_product_attention", products)
    qkv = projections(length=16, kv_heads=kv_heads)
    layout = layout_of(data=2, tensor=2, sequence=2)
    actual = outputs_and_gradients(cudnn_attention, qkv, causal=True, layout=layout)
    assert_close(actual, expected_products(16, kv_heads=kv_heads))
    assert sizes == {(16, 1, 1)}


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
