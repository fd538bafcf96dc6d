"""Rotary positions by halves and by a product (the way of TPUs), here: time of both, and what becomes of a run's losses.

python -m scripts.bench.step.rotary [--one-core] [--json FILE.json]

The losses of a small decoder after some steps, by halves, by the product, and by halves with attention's sums in another order.
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
    """Turn positions as `linear.rotary` does when it is compiled for TPUs.

    Args:
        x_BTHN, theta, *options: as there.
        layout: of the run; another platform takes its place.
    """
    device = Layout(None, {}) if layout is None else copy.copy(layout)
    device.platform = "tpu"
    return linear.rotary(x_BTHN, theta, *options, layout=device)


WAYS: dict[str, Rotary] = {"halves": linear.rotary, "product": by_product}


def timed(batch: int, length: int, heads: int, size: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each way, forward and backward."""
    x = jnp.asarray(
        np.random.default_rng(0).standard_normal((batch, length, heads, size)), jnp.float32
    )
    steps = {}
    for name, way in WAYS.items():
        compiled = (
            jax.jit(jax.grad(lambda x, way=way: jnp.sum(way(x, 1e4) ** 2))).lower(x).compile()
        )
        steps[name] = lambda compiled=compiled: jax.block_until_ready(compiled(x))
    return {"shape": [*x.shape], **in_turns.compared(in_turns.in_turns(steps, rounds), "halves")}


def losses(config: Config, way: Rotary, steps: int) -> list[float]:
    """Of a run on one batch.

    Args:
        config: of a decoder.
        way: to turn positions.
        steps: so many.
    """
    with mock.patch("mupax.zoo.layers.stack.rotary", way):
        program = assemble(replace(config, mesh=MeshConfig(data=1)), jax.devices()[:1])
        step = program.compile_train()
    state, numbers, batch, curve = (
        program.initial_state(),
        program.step_inputs(),
        random_batch(program),
        [],
    )
    for _ in range(steps):
        state, metrics = step(state, numbers, batch)
        curve.append(float(metrics["loss"]))
    return curve


def difference(steps: int) -> dict[str, Any]:
    """Largest difference of any step's loss from that by halves, relative, of the product and of another order of sums."""
    tiny = configs.get("lm-tiny")
    model = replace(tiny, width=64, depth=2, num_heads=2, seq_len=64)
    other = replace(model, compute=replace(model.compute, projections="fused"))
    plain = losses(config_of(model, 8), linear.rotary, steps)
    curves = {
        "product": losses(config_of(model, 8), by_product, steps),
        "another order of sums": losses(config_of(other, 8), linear.rotary, steps),
    }
    largest = {
        name: max(abs(a - b) / b for a, b in zip(of, plain, strict=True))
        for name, of in curves.items()
    }
    return {
        "steps": steps,
        "first_loss": plain[0],
        "last_loss": plain[-1],
        "same_first": curves["product"][0] == plain[0],
    } | {"largest_difference": largest}


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
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
