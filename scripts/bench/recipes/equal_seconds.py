"""A run of ours timed in this process, and a learning rate that is doubled until the loss rises: what rows of equal CPU seconds need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mupax.train.config.run import Config

LOWEST, MOST = 1e-3, 8
"""First rate of a search, and rates that it tries at most."""


def tuned(train: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """The row of the best rate, and the losses of all that were tried: doubled from `LOWEST` until the loss rises.

    Args:
        train: rate to its row.

    Raises:
        SystemExit: the loss still fell at the last of `MOST` rates, or rose from the first to the second.
    """
    rows = [train(LOWEST)]
    while len(rows) < 2 or rows[-1]["loss"] < rows[-2]["loss"]:
        if len(rows) == MOST:
            raise SystemExit(f"the loss still falls at a rate of {rows[-1]['rate']:g}")
        rows.append(train(2 * rows[-1]["rate"]))
    if len(rows) == 2:
        raise SystemExit(f"the loss rises from the lowest rate, {LOWEST:g}, on; start lower")
    return {**rows[-2], "rates": {f"{row['rate']:g}": row["loss"] for row in rows}}


def trained(config: Config, steps: int) -> tuple[dict[str, Any], Callable[[], float]]:
    """A run of ours in this process: its row without a loss, and what computes that.

    Args:
        config: of the run.
        steps: to take, of those that the config's schedule has.
    """
    import jax

    from mupax.train import data
    from mupax.train.core.program import assemble
    from mupax.train.run.evaluate import evaluate
    from mupax.train.run.prefetch import Prefetch

    source = data.load(config.data, config.model, seed=config.seed, note=lambda line: None)
    program = assemble(config)
    step, numbers, feed = program.compile_train(), program.step_inputs(), program.train_feed()
    state = program.placed(program.initial_state(), step)
    with Prefetch(source.train_batches(0, *feed.rows), feed.put) as batches:
        began = time.process_time()
        for batch, _ in zip(batches, range(steps), strict=False):
            state, _ = step(state, numbers, batch)
        jax.block_until_ready(state)
        took = time.process_time() - began
    size = steps * config.data.batch_size * config.model.units
    row = {"parameters": program.definition.count(), "steps": steps, "bytes": size, "cpu_seconds": round(took, 1)}
    return row, lambda: evaluate(program.compile_eval(step), state.params, numbers, source, program.eval_feed()).loss


def step_seconds(config: Config, steps: int = 60) -> float:
    """CPU seconds of one step of a run of ours."""
    return trained(config, steps)[0]["cpu_seconds"] / steps
