"""Compare the attention that `auto` chooses on this machine with every other implementation.

    python -m scripts.bench.step.attention [--batch 8] [--length 256] [--heads 8] [--head-dim 32]
        [--json FILE.json]

Times forward and backward. `merged` is XLA's products with batch and heads in one dimension, `xla`
those of `jax.nn.dot_product_attention`. `cudnn` and `splash` are measured where they run, in
bfloat16.
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
    on_any_device = {
        "auto": partial(attend.attend, causal=causal),
        "merged": partial(attend.merged_attention, causal=causal),
        "xla": lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, scale=1.0, is_causal=causal, implementation="xla"
        ),
    }
    kernels = {"splash": flash.splash_attention, "cudnn": flash.cudnn_attention}
    on_this_device = {}
    for name, kernel in kernels.items():
        if attend.why_not(name, q, k, causal) is None:  # pyright: ignore[reportArgumentType]
            on_this_device[name] = partial(kernel, causal=causal)
    return {**on_any_device, **on_this_device}


def measure(sizes: Sequence[int], dtype: str, causal: bool, rounds: int) -> dict[str, Any]:
    """Return times and ratios of forward and backward, after a check that all outputs agree.

    Args:
        sizes: Shape of queries, keys and values, [batch, length, heads, head_dim].
    """
    random = np.random.default_rng(0)
    q, k, v, weights = (jnp.asarray(random.standard_normal(sizes), dtype) for _ in range(4))

    steps = {}
    outputs = {}
    for name, run in implementations(q, k, causal).items():
        outputs[name] = np.asarray(jax.jit(run)(q, k, v), np.float32)

        def total(q: jax.Array, k: jax.Array, v: jax.Array, run: Any = run) -> jax.Array:
            return jnp.sum(run(q, k, v) * weights)

        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, v).compile()
        # The loop's name changes before the call, so the value is bound as a default.
        steps[name] = lambda compiled=compiled: jax.block_until_ready(compiled(q, k, v))

    tolerance = 1e-4 if dtype == "float32" else 3e-2
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs["xla"], atol=tolerance, err_msg=name)

    names = ("batch", "length", "heads", "head_dim")
    facts = {**dict(zip(names, sizes, strict=True)), "dtype": dtype, "causal": causal}
    return {**facts, **in_turns.compared(in_turns.in_turns(steps, rounds), "auto")}


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
    """Measure with and without a causal mask, report the results and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    sizes = (2, 16, 2, 8) if args.tiny else (args.batch, args.length, args.heads, args.head_dim)
    results = [measure(sizes, args.dtype, causal, args.rounds) for causal in (True, False)]
    for result in results:
        mask = "causal" if result["causal"] else "whole"
        ratios = ", ".join(f"{ratio:.3f} of {name}" for name, ratio in result["ratio"].items())
        print(f"{mask}: auto takes {ratios}")
    in_turns.report("attention", results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
