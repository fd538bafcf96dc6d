"""Compare rotary positions by halves with rotary positions by a matrix product, as on TPUs.

    python -m scripts.bench.step.rotary [--one-core] [--json FILE.json]

Measures the time of both on this machine, and the losses of a small decoder after some steps: by
halves, by the product, and, for scale, by halves with attention's sums in another order.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.program import assemble
from mupax.zoo import configs
from mupax.zoo.layers import linear
from mupax.zoo.partition import Layout
from scripts.bench import in_turns
from scripts.bench.pytorch.step import config_of
from scripts.bench.step.xla_flags import random_batch

Rotary = Callable[..., jax.Array]


def by_product(
    x_BTHN: jax.Array, theta: float, *options: Any, layout: Layout | None = None
) -> jax.Array:
    """Rotate positions as `linear.rotary` does when it is compiled for TPUs.

    Args:
        x_BTHN: Queries or keys, [batch, positions, heads, head_dim].
        layout: Layout of the run, of which a copy for the platform "tpu" is used.
    """
    # A copy, because the rest of the run must keep its platform.
    tpu_layout = Layout(None, {}) if layout is None else copy.copy(layout)
    tpu_layout.platform = "tpu"
    return linear.rotary(x_BTHN, theta, *options, layout=tpu_layout)


WAYS: dict[str, Rotary] = {"halves": linear.rotary, "product": by_product}
"""Implementations that are compared, by name."""


def timed(batch: int, length: int, heads: int, size: int, rounds: int) -> dict[str, Any]:
    """Return times and ratios of both implementations, forward and backward."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((batch, length, heads, size)), jnp.float32)

    steps = {}
    for name, rotary in WAYS.items():

        def total(x: jax.Array, rotary: Rotary = rotary) -> jax.Array:
            return jnp.sum(rotary(x, 1e4) ** 2)

        compiled = jax.jit(jax.grad(total)).lower(x).compile()
        steps[name] = lambda compiled=compiled: jax.block_until_ready(compiled(x))
    return {"shape": [*x.shape], **in_turns.compared(in_turns.in_turns(steps, rounds), "halves")}


def losses(config: Config, rotary: Rotary, steps: int) -> list[float]:
    """Train a decoder on one random batch and return the loss of every step.

    Args:
        rotary: Implementation of rotary positions, which replaces `linear.rotary`.
    """
    # `stack` has imported the function by its name, so it is replaced there.
    with mock.patch("mupax.zoo.layers.stack.rotary", rotary):
        program = assemble(replace(config, mesh=MeshConfig(data=1)), jax.devices()[:1])
        # Tracing calls the function, so the step is compiled while it is replaced.
        step = program.compile_train()
    state = program.initial_state()
    step_inputs = program.step_inputs()
    batch = random_batch(program)
    curve = []
    for _ in range(steps):
        state, metrics = step(state, step_inputs, batch)
        curve.append(float(metrics["loss"]))
    return curve


def difference(steps: int) -> dict[str, Any]:
    """Train with rotary positions by halves and by product, and return how far losses differ.

    To show the size of rounding, a third run sums in another order (fused projections).

    Returns:
        `largest_difference`: the largest relative difference of any step's loss from the loss by
        halves, for the product and for the third run. `first_loss` and `last_loss`: losses by
        halves. `same_first`: whether the product gives the same first loss. `steps`.
    """
    model = replace(configs.get("lm-tiny"), width=64, depth=2, num_heads=2, seq_len=64)
    # Fused projections sum in another order.
    reordered = replace(model, compute=replace(model.compute, projections="fused"))
    by_halves = losses(config_of(model, 8), linear.rotary, steps)
    curves = {
        "product": losses(config_of(model, 8), by_product, steps),
        "another order of sums": losses(config_of(reordered, 8), linear.rotary, steps),
    }
    largest = {}
    for name, curve in curves.items():
        largest[name] = max(abs(a - b) / b for a, b in zip(curve, by_halves, strict=True))
    return {
        "steps": steps,
        "first_loss": by_halves[0],
        "last_loss": by_halves[-1],
        "same_first": curves["product"][0] == by_halves[0],
        "largest_difference": largest,
    }


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure times and losses, report the result and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    shape = (1, 16, 2, 8) if args.tiny else (4, 1024, 8, 64)
    result = {
        **in_turns.machine(),
        "results": [timed(*shape, args.rounds)],
        "losses": difference(2 if args.tiny else 50),
    }
    in_turns.write(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
