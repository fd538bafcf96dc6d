"""What TensorBoard shows of a run at its evaluations on request: images with their predictions, and histograms of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.core.program import Program
from mupax.train.core.state import Batch, StepInputs, TrainState
from mupax.train.core.step import logits_of
from mupax.train.data import Data
from mupax.train.run.report.mirrors.trackers import Histogram, Media
from mupax.zoo.definition import Arrays

_PARTS = 64
"""Of a histogram."""


class Snapshots:
    """Takes the media of an evaluation. Every process of a run calls it alike; each of its two programs is compiled once.

    Args:
        program: of the run.
        data: of the run.
        inputs: what the step reads, on the devices.
    """

    def __init__(self, program: Program, data: Data, inputs: StepInputs) -> None:
        log, whole = program.config.log, program.layout.replicated
        self._data, self._inputs, self._feed = data, inputs, program.eval_feed()
        self._predicted = jax.jit(
            partial(_predicted, program, log.images or 0), out_shardings=whole
        )
        self._spread = jax.jit(_spread, out_shardings=whole)
        self._images, self._histograms = log.images, log.histograms
        self._batch: Any = None
        self._before: Arrays | None = None

    def begin(self, params: Arrays) -> None:
        """Changes are from these parameters on.

        Args:
            params: the run goes on with them; they are copied.
        """
        if self._histograms:
            self._before = jax.tree.map(jnp.copy, params)

    def take(
        self, state: TrainState, dispatching: Callable[[], AbstractContextManager[object]]
    ) -> Media:
        """The media of a state.

        Args:
            state: of the run; predictions are of its moving average where it has one.
            dispatching: entered around every program; what it raises ends the evaluation.
        """
        images, texts, histograms = {}, {}, {}
        if self._images is not None:
            if self._batch is None:
                batches = self._data.eval_batches(*self._feed.rows)
                self._batch = next(batches)
                batches.close()
            with dispatching():
                shown = self._predicted(
                    state.evaluated, self._inputs, self._feed.shard_batch(self._batch)
                )
            images, texts["examples/labels"] = _shown(
                *jax.device_get(shown), names=self._data.class_names
            )
        if self._before is not None:
            with dispatching():
                spread = self._spread(state.params, self._before)
            histograms = {
                tag: h
                for tag, numbers in jax.device_get(spread).items()
                if (h := _histogram(numbers))
            }
            with dispatching():
                self.begin(state.params)
        return Media(images, texts, histograms)


def _predicted(
    program: Program, count: int, params: Arrays, run: StepInputs, batch: Batch
) -> tuple[jax.Array, ...]:
    """Images, classes, weights and likeliest classes of the first examples of a batch."""
    logits = logits_of(program.definition, params, run, batch["inputs"], layout=program.layout)
    likeliest = logits.argmax(-1)
    return tuple(
        x[:count] for x in (batch["inputs"], batch["targets"], batch["weights"], likeliest)
    )


def _shown(
    inputs: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    likeliest: np.ndarray,
    *,
    names: list[str] | None,
) -> tuple[dict[str, np.ndarray], str]:
    """Images by tag, black to full strength by channel over all of them, and a table of what they are and what they are taken for."""
    low, high = inputs.min((0, 1, 2)), inputs.max((0, 1, 2))
    pixels = (255 * (inputs - low) / np.where(high > low, high - low, 1)).round().astype(np.uint8)

    def name(label: int) -> str:
        return (str(label) if names is None else names[label]).replace("|", "/")

    rows, images = ["| image | label | prediction |", "|---|---|---|"], {}
    for index in np.flatnonzero(weights > 0):
        label, guess = int(targets[index]), int(likeliest[index])
        images[f"examples/{index:03}"] = pixels[index]
        rows.append(
            f"| {index:03} | {name(label)} | {name(guess)}{'' if guess == label else ' (wrong)'} |"
        )
    return images, "\n".join(rows)


def _spread(params: Arrays, before: Arrays) -> dict[str, dict[str, jax.Array]]:
    """Of each parameter and its change: what a `Histogram` has, by tag."""
    spread = {}
    for name, now in params.items():
        spread[f"parameters/{name}"] = _numbers(now.astype(jnp.float32))
        spread[f"changes/{name}"] = _numbers(
            now.astype(jnp.float32) - before[name].astype(jnp.float32)
        )
    return spread


def _numbers(x: jax.Array) -> dict[str, jax.Array]:
    """By sums over all of an array alone, so that no device needs another's part; what is not finite does not count."""
    finite = jnp.isfinite(x)
    low, high = (jnp.where(finite, x, away) for away in (jnp.inf, -jnp.inf))
    low, high = low.min(), high.max()
    limits = low + (high - low) * jnp.arange(1, _PARTS) / _PARTS
    # One pass a limit: all at once would be an array of so many times the parameter.
    below = jax.lax.map(lambda limit: jnp.sum(finite & (x < limit), dtype=jnp.uint32), limits)
    values = jnp.where(finite, x, 0)
    sums = {
        "total": jnp.sum(values),
        "squares": jnp.sum(values**2),
        "count": jnp.sum(finite, dtype=jnp.uint32),
    }
    return {"low": low, "high": high, "below": below, **sums}


def _histogram(numbers: dict[str, np.ndarray]) -> Histogram | None:
    """None of an array without a finite number."""
    low, high = float(numbers["low"]), float(numbers["high"])
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    counts = np.diff(numbers["below"].astype(np.int64), prepend=0, append=int(numbers["count"]))
    return Histogram(low, high, counts, float(numbers["total"]), float(numbers["squares"]))
