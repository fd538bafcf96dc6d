"""cuDNN's attention kernel against XLA's products, in value and gradient: the kernel itself on an NVIDIA GPU, in a process of its own.

Without one `test_the_kernel_of_cudnn_is_what_xla_computes` is skipped and says what is missing; the others put XLA's products in
the kernel's place, so that every case runs and what it must not let through (the controls) is not.
`python -m tests.zoo.layers.test_cudnn` prints the differences on the GPU at hand.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.run import MeshConfig
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo.layers.kernels import attend, why_not
from mupax.zoo.partition import ONE_DEVICE, Layout
from tests.fixtures.tiny import relative_errors

ROOT = Path(__file__).resolve().parents[3]

MOST = 0.02
"""Difference of bfloat16's results from float32's products of the same numbers, over the largest entry: weights, outputs and sums of
gradients are each rounded to 8 bits (0.004). A mask, scale or group of heads that is wrong changes the first digit."""


class Case(NamedTuple):
    """Shapes and mask of an attention."""

    causal: bool
    segments: bool = False
    heads: int = 4
    kv_heads: int = 4
    size: int = 64
    length: int = 256


CASES = [
    *(Case(causal, segments) for causal in (True, False) for segments in (False, True)),
    *(Case(causal, segments, kv_heads=2) for causal in (True, False) for segments in (False, True)),
    Case(True, kv_heads=1, length=384),
    *(Case(True, kv_heads=2, size=size) for size in (72, 128, 192, 256)),
    *(Case(causal, True, size=256) for causal in (True, False)),
    Case(False, length=198, size=64),  # positions of a ViT, no multiple of a block
]


def results(case: Case, implementation: Any, layout: Layout, dtype: Any) -> list[np.ndarray]:
    """Output and gradients of queries, keys and values, in float32."""
    random = np.random.default_rng(5)
    shapes = [
        (2, case.length, heads, case.size) for heads in (case.heads, case.kv_heads, case.kv_heads)
    ]
    q, k, v = (
        jnp.asarray(random.standard_normal(shape), jnp.bfloat16).astype(dtype) for shape in shapes
    )
    q = q * dtype(case.size**-0.5)
    weights = jnp.asarray(random.standard_normal(q.shape), jnp.bfloat16).astype(jnp.float32)
    numbers = np.cumsum(random.random((2, case.length)) < 0.02, axis=1, dtype=np.int32)
    segments = jnp.asarray(numbers) if case.segments else None

    def total(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = attend(
            *qkv,
            causal=case.causal,
            implementation=implementation,
            segments_BT=segments,
            layout=layout,
        )
        return jnp.sum(y.astype(jnp.float32) * weights), y

    with jax.default_matmul_precision("highest"):
        (_, y), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(
            q, k, v
        )
    return [np.asarray(x, np.float32) for x in (y, *gradients)]


@functools.cache
def expected_results(case: Case) -> list[np.ndarray]:
    return results(case, "xla", ONE_DEVICE, jnp.float32)


def differences(case: Case, layout: Layout) -> list[float]:
    """Return relative errors of the kernel's output and gradients against XLA's in float32."""
    outputs = results(case, "cudnn", layout, jnp.bfloat16)
    return relative_errors(outputs, expected_results(case))


def refusal(case: Case, layout: Layout) -> str | None:
    """Return why these devices' kernel does not take a case, or None if it does."""
    q, k = (
        jax.ShapeDtypeStruct((2, case.length, heads, case.size), jnp.bfloat16)
        for heads in (case.heads, case.kv_heads)
    )
    return why_not("cudnn", q, k, case.causal, apart=case.segments, layout=layout)


def missing() -> str | None:
    """Return what the kernel needs and this machine does not have, or None."""
    command = shutil.which("nvidia-smi")
    if (
        not command
        or not subprocess.run([command, "-L"], capture_output=True, check=False).stdout.strip()
    ):
        return "cuDNN's kernel needs an NVIDIA GPU, and nvidia-smi lists none"
    versions = (f"jax_plugins.xla_cuda{number}" for number in (12, 13))
    try:
        plugin = any(importlib.util.find_spec(name) for name in versions)
    except ModuleNotFoundError:
        plugin = False
    return None if plugin else "cuDNN's kernel needs JAX with CUDA: pip install 'jax[cuda13]'"


@pytest.mark.skipif(bool(missing()), reason=missing() or "")
def test_the_kernel_of_cudnn_is_what_xla_computes() -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
    }
    words = [sys.executable, "-m", "tests.zoo.layers.test_cudnn"]
    ran = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(rows) == len(CASES)
    for row in rows:
        # Heads of more than 128 are for Hopper and later, and nothing else is refused.
        assert ("differences" in row) or row["size"] > 128, row
        assert max(row.get("differences", [0.0])) < MOST, row
    assert any("differences" in row for row in rows)


class OneGpu(MeshLayout):
    """The layout of one device that is taken for a GPU."""

    def __init__(self) -> None:
        super().__init__(make_mesh(MeshConfig(), jax.devices()[:1]))
        self.platform = "gpu"
        self.capabilities = frozenset({"9.0"})


XLA = jax.nn.dot_product_attention


def stand_in(monkeypatch: pytest.MonkeyPatch, **other: Any) -> None:
    """XLA's products where cuDNN's kernel is asked for, with what is asked for changed."""

    def products(*qkv: jax.Array, **options: Any) -> jax.Array:
        assert options["implementation"] == "cudnn"
        return XLA(*qkv, **options | other | {"implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", products)


@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[8], CASES[13], CASES[-1]], ids=str)
def test_cases_hold_where_the_kernel_is_xla(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    errors = differences(case, OneGpu())
    assert 0 < max(errors) < MOST  # bfloat16 was computed in, and is within what it rounds


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (CASES[0], {"is_causal": False}),
        (CASES[7], {"is_causal": True}),
        (CASES[7], {"mask": None}),
        (CASES[0], {"scale": 1.1}),
        (CASES[8], {"local_window_size": 200}),
    ],
)
def test_control_a_kernel_that_does_otherwise_is_caught(
    case: Case, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, **other)
    assert max(differences(case, OneGpu())) > 2 * MOST


@pytest.mark.core
def test_hopper_takes_every_case_and_ampere_those_of_small_heads() -> None:
    assert [refusal(case, OneGpu()) for case in CASES] == [None] * len(CASES)
    ampere = OneGpu()
    ampere.capabilities = frozenset({"8.0"})
    assert {case.size for case in CASES if refusal(case, ampere)} == {192, 256}


def main() -> None:
    """Every case on the GPU at hand, a line of JSON each."""
    layout = MeshLayout(make_mesh(MeshConfig(), jax.devices()[:1]))
    for case in CASES:
        reason = refusal(case, layout)
        outcome = {"refused": reason} if reason else {"differences": differences(case, layout)}
        print(json.dumps({**case._asdict(), "device": layout.device_kind, **outcome}), flush=True)


if __name__ == "__main__":
    main()
