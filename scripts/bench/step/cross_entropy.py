"""Cross-entropy with its gradient, chunked against all logits at once: time, and the memory that the compiler needs.

python -m scripts.bench.step.cross_entropy [--tokens 4096] [--width 256] [--vocab 32768] [--json FILE.json]
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
    """Times, ratio and bytes of temporaries; losses and gradients must agree first."""
    random = np.random.default_rng(0)
    features = jnp.asarray(random.standard_normal((1, tokens, width)), dtype)
    weight = jnp.asarray(random.standard_normal((width, vocab)) * width**-0.5, jnp.float32)
    targets, weights = (
        jnp.asarray(random.integers(0, vocab, (1, tokens)), jnp.int32),
        jnp.ones((1, tokens)),
    )
    steps, bytes_of, outputs = {}, {}, {}
    for how in ("chunked", "plain"):

        def total(features: jax.Array, weight: jax.Array, how: Any = how) -> jax.Array:
            return cross_entropy(ReadoutInputs(features, weight), targets, weights, how=how).loss

        compiled = (
            jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(features, weight).compile()
        )
        outputs[how] = jax.tree.map(lambda x: np.asarray(x, np.float32), compiled(features, weight))
        memory = compiled.memory_analysis()
        bytes_of[how] = int(memory.temp_size_in_bytes) if memory else 0
        steps[how] = lambda compiled=compiled: jax.block_until_ready(compiled(features, weight))
    for one, other in zip(
        jax.tree.leaves(outputs["chunked"]), jax.tree.leaves(outputs["plain"]), strict=True
    ):
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max())
    shape = {"tokens": tokens, "width": width, "vocab": vocab, "dtype": dtype}
    return {
        **shape,
        "temporary_bytes": bytes_of,
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
    """Measure, print and write; returns the exit code 0."""
    args = in_turns.parse(Options, argv)
    if args.tiny:
        args = replace(args, tokens=2048, width=16, vocab=(4096,))
    results = [
        measure(args.tokens, args.width, vocab, args.dtype, args.rounds) for vocab in args.vocab
    ]
    for result in results:
        less = result["temporary_bytes"]["chunked"] / result["temporary_bytes"]["plain"]
        print(
            f"vocabulary {result['vocab']}: chunked takes {result['ratio']['plain']:.3f} of the time and {less:.3f} of the memory"
        )
    in_turns.report("cross_entropy", results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
