"""Attention, forward and backward: what `auto` takes on this machine against every other implementation it has.

    python -m scripts.bench.step.attention [--batch 8] [--length 256] [--heads 8] [--head-dim 32] [--json FILE.json]

`merged` is XLA's products with batch and heads in one dimension, `xla` those of `jax.nn.dot_product_attention`; `cudnn` and
`splash` are measured where they run, in bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mupax.zoo.layers import flash
from mupax.zoo.layers import kernels as attend
from scripts.bench import in_turns


def implementations(
    q: jax.Array, k: jax.Array, causal: bool
) -> dict[str, Callable[..., jax.Array]]:
    """Return the implementations that can run here by name, with the choice of `auto` first."""
    everywhere = {
        "auto": partial(attend.attend, causal=causal),
        "merged": partial(attend.merged_attention, causal=causal),
        "xla": lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, scale=1.0, is_causal=causal, implementation="xla"
        ),
    }
    kernels = {"splash": flash.splash_attention, "cudnn": flash.cudnn_attention}
    here = {name: f for name, f in kernels.items() if attend.why_not(name, q, k, causal) is None}  # pyright: ignore
    return {**everywhere, **{name: partial(f, causal=causal) for name, f in here.items()}}


def measure(sizes: Sequence[int], dtype: str, causal: bool, rounds: int) -> dict[str, Any]:
    """Times and ratios of forward and backward; outputs must agree first."""
    random = np.random.default_rng(0)
    q, k, v, weights = (jnp.asarray(random.standard_normal(sizes), dtype) for _ in range(4))
    steps, outputs = {}, {}
    for name, run in implementations(q, k, causal).items():
        outputs[name] = np.asarray(jax.jit(run)(q, k, v), np.float32)
        grad = jax.jit(
            jax.grad(lambda q, k, v, run=run: jnp.sum(run(q, k, v) * weights), argnums=(0, 1, 2))
        )
        compiled = grad.lower(q, k, v).compile()
        steps[name] = lambda compiled=compiled: jax.block_until_ready(compiled(q, k, v))
    for name, output in outputs.items():
        np.testing.assert_allclose(
            output, outputs["xla"], atol=1e-4 if dtype == "float32" else 3e-2, err_msg=name
        )
    batch, length, heads, size = sizes
    shape = {
        "batch": batch,
        "length": length,
        "heads": heads,
        "head_dim": size,
        "dtype": dtype,
        "causal": causal,
    }
    return {**shape, **in_turns.compared(in_turns.in_turns(steps, rounds), "auto")}


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    batch: int = 8
    length: int = 256
    heads: int = 8
    head_dim: int = 32
    dtype: Literal["float32", "bfloat16"] = "float32"
    rounds: int = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    args = in_turns.parse(Options, argv)
    sizes = (2, 16, 2, 8) if args.tiny else (args.batch, args.length, args.heads, args.head_dim)
    results = [measure(sizes, args.dtype, causal, args.rounds) for causal in (True, False)]
    for result in results:
        mask = "causal" if result["causal"] else "whole"
        print(
            f"{mask}: auto takes {', '.join(f'{r:.3f} of {name}' for name, r in result['ratio'].items())}"
        )
    in_turns.report("attention", results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
