"""Compare cross-entropy in chunks with cross-entropy of all logits at once.

    python -m scripts.bench.step.cross_entropy [--tokens 4096] [--width 256] [--vocab 32768]
        [--json FILE.json]

Measures the time with gradients, and the memory that the compiler needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.core.loss import cross_entropy
from mupax.zoo.layers.linear import ReadoutInputs
from scripts.bench import in_turns


def measure(tokens: int, width: int, vocab: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Return times, ratio and bytes of temporaries, after a check that both results agree."""
    random = np.random.default_rng(0)
    features = jnp.asarray(random.standard_normal((1, tokens, width)), dtype)
    weight = jnp.asarray(random.standard_normal((width, vocab)) * width**-0.5, jnp.float32)
    targets = jnp.asarray(random.integers(0, vocab, (1, tokens)), jnp.int32)
    weights = jnp.ones((1, tokens))

    steps = {}
    temporary_bytes = {}
    outputs = {}
    for name in ("chunked", "plain"):

        def total(features: jax.Array, weight: jax.Array, name: Any = name) -> jax.Array:
            return cross_entropy(ReadoutInputs(features, weight), targets, weights, how=name).loss

        loss_and_grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
        compiled = loss_and_grads.lower(features, weight).compile()
        output = compiled(features, weight)
        outputs[name] = jax.tree.map(lambda x: np.asarray(x, np.float32), output)
        memory = compiled.memory_analysis()
        temporary_bytes[name] = int(memory.temp_size_in_bytes) if memory else 0
        steps[name] = lambda compiled=compiled: jax.block_until_ready(compiled(features, weight))

    tolerance = 1e-5 if dtype == "float32" else 2e-2
    leaves = zip(
        jax.tree.leaves(outputs["chunked"]), jax.tree.leaves(outputs["plain"]), strict=True
    )
    for chunked, plain in leaves:
        # Entries near 0 have the rounding of the largest ones.
        np.testing.assert_allclose(
            chunked, plain, rtol=tolerance, atol=tolerance * np.abs(plain).max()
        )

    facts = {"tokens": tokens, "width": width, "vocab": vocab, "dtype": dtype}
    return {
        **facts,
        "temporary_bytes": temporary_bytes,
        **in_turns.compared(in_turns.in_turns(steps, rounds, 2), "chunked"),
    }


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    tokens: int = 4096
    width: int = 256
    vocab: tuple[int, ...] = (256, 4096, 32768)
    dtype: Literal["float32", "bfloat16"] = "float32"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every vocabulary, report the results and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    if args.tiny:
        args = replace(args, tokens=2048, width=16, vocab=(4096,))
    results = []
    for vocab in args.vocab:
        results.append(measure(args.tokens, args.width, vocab, args.dtype, args.rounds))
    for result in results:
        memory = result["temporary_bytes"]["chunked"] / result["temporary_bytes"]["plain"]
        print(
            f"vocabulary {result['vocab']}: chunked takes {result['ratio']['plain']:.3f} of the "
            f"time and {memory:.3f} of the memory"
        )
    in_turns.report("cross_entropy", results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
