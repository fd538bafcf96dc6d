"""Cross-entropy with its gradient, chunked against all logits at once: time, and the memory that the compiler needs.

python -m scripts.bench.step.cross_entropy [--tokens 4096] [--width 256] [--vocab 32768] [--json FILE.json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.core.loss import cross_entropy
from mupax.zoo.layers.linear import ReadoutInputs
from scripts.bench.in_turns import add_arguments, compared, in_turns, machine, one_core, write


def measure(tokens: int, width: int, vocab: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Times, ratio and bytes of temporaries; losses and gradients must agree first."""
    random = np.random.default_rng(0)
    features = jnp.asarray(random.standard_normal((1, tokens, width)), dtype)
    weight = jnp.asarray(random.standard_normal((width, vocab)) * width**-0.5, jnp.float32)
    targets, weights = jnp.asarray(random.integers(0, vocab, (1, tokens)), jnp.int32), jnp.ones((1, tokens))
    steps, bytes_of, outputs = {}, {}, {}
    for how in ("chunked", "plain"):

        def total(features: jax.Array, weight: jax.Array, how: Any = how) -> jax.Array:
            return cross_entropy(ReadoutInputs(features, weight), targets, weights, how=how).loss

        compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(features, weight).compile()
        outputs[how] = jax.tree.map(lambda x: np.asarray(x, np.float32), compiled(features, weight))
        memory = compiled.memory_analysis()
        bytes_of[how] = int(memory.temp_size_in_bytes) if memory else 0
        steps[how] = lambda compiled=compiled: jax.block_until_ready(compiled(features, weight))
    for one, other in zip(jax.tree.leaves(outputs["chunked"]), jax.tree.leaves(outputs["plain"]), strict=True):
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max())
    shape = {"tokens": tokens, "width": width, "vocab": vocab, "dtype": dtype}
    return {**shape, "temporary_bytes": bytes_of, **compared(in_turns(steps, rounds, 2), "chunked")}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, nargs="+", default=[256, 4096, 32768])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    add_arguments(parser, 10)
    args = parser.parse_args(argv)
    if args.one_core:
        one_core()
    if args.tiny:
        args.tokens, args.width, args.vocab = 2048, 16, [4096]
    results = [measure(args.tokens, args.width, vocab, args.dtype, args.rounds) for vocab in args.vocab]
    for result in results:
        less = result["temporary_bytes"]["chunked"] / result["temporary_bytes"]["plain"]
        print(
            f"vocabulary {result['vocab']}: chunked takes {result['ratio']['plain']:.3f} of the time and {less:.3f} of the memory"
        )
    write({"benchmark": "cross_entropy", **machine(), "results": results}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
