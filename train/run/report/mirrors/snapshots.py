"""Images with their predictions, and histograms of the parameters, for TensorBoard.

`loop.evaluation` takes them at every evaluation with `--log.images` or `--log.histograms`.

Shapes: B batch, H height, W width, C channels.
"""

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

_NUM_BINS = 64
"""Bins of a histogram."""


class Snapshots:
    """Producer of the images and histograms that a run shows at its evaluations.

    Every process of a run makes the same calls. Each of the two programs is compiled at its first
    use.

    Args:
        program: Program of the run. Its config says which media to take.
        inputs: Inputs of the step besides state and batch, on the devices.
    """

    def __init__(self, program: Program, data: Data, inputs: StepInputs) -> None:
        log = program.config.log
        replicated = program.layout.replicated
        self._data = data
        self._inputs = inputs
        self._batch_sharding = program.eval_feed()
        self._predicted = jax.jit(
            partial(_predicted, program, log.images or 0), out_shardings=replicated
        )
        self._spread = jax.jit(_spread, out_shardings=replicated)
        self._images = log.images
        self._histograms = log.histograms
        self._batch: Any = None
        self._earlier_params: Arrays | None = None

    def begin(self, params: Arrays) -> None:
        """Copy parameters, from which the next histograms of changes are computed.

        Nothing is copied if the config asks for no histograms.

        Args:
            params: Parameters on the devices. The run goes on with them.
        """
        if self._histograms:
            # A copy, because the parameters are donated to the next step.
            self._earlier_params = jax.tree.map(jnp.copy, params)

    def take(
        self, state: TrainState, dispatching: Callable[[], AbstractContextManager[object]]
    ) -> Media:
        """Return images with predictions, and histograms of parameters and of their changes.

        Each is made only if the config asks for it. The images are the same first evaluation
        examples at every call. Changes are counted from the parameters of the last call, or of
        `begin`, and those of `state` are copied for the next call.

        Args:
            state: State of the run. If it has a moving average of the parameters, predictions are
                made with that.
            dispatching: Context manager to enter around each program. An exception that it raises
                ends the evaluation.
        """
        images: dict[str, np.ndarray] = {}
        texts: dict[str, str] = {}
        histograms: dict[str, Histogram] = {}
        if self._images is not None:
            # The same examples at every evaluation, so that pictures can be compared.
            if self._batch is None:
                batches = self._data.eval_batches(*self._batch_sharding.rows)
                self._batch = next(batches)
                batches.close()
            with dispatching():
                batch = self._batch_sharding.shard_batch(self._batch)
                examples = self._predicted(state.evaluated, self._inputs, batch)
            fetched = jax.device_get(examples)
            images, table = _shown(*fetched, names=self._data.class_names)
            texts["examples/labels"] = table
        if self._earlier_params is not None:
            with dispatching():
                statistics = self._spread(state.params, self._earlier_params)
            for tag, numbers in jax.device_get(statistics).items():
                histogram = _histogram(numbers)
                if histogram is not None:
                    histograms[tag] = histogram
            with dispatching():
                self.begin(state.params)
        return Media(images, texts, histograms)


def _predicted(
    program: Program, count: int, params: Arrays, step_inputs: StepInputs, batch: Batch
) -> tuple[jax.Array, ...]:
    """Return inputs, targets, weights and predicted classes of a batch's first `count` examples."""
    logits = logits_of(
        program.definition, params, step_inputs, batch["inputs"], layout=program.layout
    )
    predictions = logits.argmax(-1)
    arrays = (batch["inputs"], batch["targets"], batch["weights"], predictions)
    return tuple(array[:count] for array in arrays)


def _shown(
    inputs_BHWC: np.ndarray,
    targets_B: np.ndarray,
    weights_B: np.ndarray,
    predictions_B: np.ndarray,
    *,
    names: list[str] | None,
) -> tuple[dict[str, np.ndarray], str]:
    """Return images (uint8) by tag, and a Markdown table of their labels and predictions.

    The smallest value of a channel over all images becomes black, the largest full strength.
    Padding, whose weight is 0, is left out.

    Args:
        names: Names of the classes by label. `None` shows the labels.
    """
    low = inputs_BHWC.min((0, 1, 2))
    high = inputs_BHWC.max((0, 1, 2))
    scaled = 255 * (inputs_BHWC - low) / np.where(high > low, high - low, 1)
    pixels_BHWC = scaled.round().astype(np.uint8)

    def name(label: int) -> str:
        text = str(label) if names is None else names[label]
        # A vertical bar would begin another column of the Markdown table.
        return text.replace("|", "/")

    rows = ["| image | label | prediction |", "|---|---|---|"]
    images = {}
    for index in np.flatnonzero(weights_B > 0):
        label = int(targets_B[index])
        prediction = int(predictions_B[index])
        images[f"examples/{index:03}"] = pixels_BHWC[index]
        remark = "" if prediction == label else " (wrong)"
        rows.append(f"| {index:03} | {name(label)} | {name(prediction)}{remark} |")
    return images, "\n".join(rows)


def _spread(params: Arrays, earlier_params: Arrays) -> dict[str, dict[str, jax.Array]]:
    """Return the histogram statistics (`_numbers`) of each parameter and of its change, by tag.

    Tags are "parameters/NAME" and "changes/NAME".

    Args:
        earlier_params: Parameters that are subtracted to get the change.
    """
    spread = {}
    for name, param in params.items():
        spread[f"parameters/{name}"] = _numbers(param.astype(jnp.float32))
        change = param.astype(jnp.float32) - earlier_params[name].astype(jnp.float32)
        spread[f"changes/{name}"] = _numbers(change)
    return spread


def _numbers(x: jax.Array) -> dict[str, jax.Array]:
    """Return range, cumulative counts, sum and sum of squares of an array's finite entries.

    The keys are `low`, `high`, `below`, `total`, `squares` and `count`, the number of finite
    entries. `below` has the number of entries below each limit between two of `_NUM_BINS` bins of
    equal width. Only sums and extremes over all of the array are computed, so that no device needs
    the part of another.
    """
    finite = jnp.isfinite(x)
    or_inf = jnp.where(finite, x, jnp.inf)
    or_minus_inf = jnp.where(finite, x, -jnp.inf)
    low = or_inf.min()
    high = or_minus_inf.max()
    limits = low + (high - low) * jnp.arange(1, _NUM_BINS) / _NUM_BINS
    # One pass per limit: all limits at once could need memory for 63 arrays of the parameter's
    # size.
    below = jax.lax.map(lambda limit: jnp.sum(finite & (x < limit), dtype=jnp.uint32), limits)
    values = jnp.where(finite, x, 0)
    return {
        "low": low,
        "high": high,
        "below": below,
        "total": jnp.sum(values),
        "squares": jnp.sum(values**2),
        # A parameter may have more than 2^31 entries, and JAX has no int64 by default.
        "count": jnp.sum(finite, dtype=jnp.uint32),
    }


def _histogram(numbers: dict[str, np.ndarray]) -> Histogram | None:
    """Return the histogram of an array, or `None` if the array has no finite number.

    Args:
        numbers: Result of `_numbers`, on the host.
    """
    low = float(numbers["low"])
    high = float(numbers["high"])
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    below = numbers["below"].astype(np.int64)
    # `below` counts up to each limit; its differences are the counts of bins.
    counts = np.diff(below, prepend=0, append=int(numbers["count"]))
    return Histogram(low, high, counts, float(numbers["total"]), float(numbers["squares"]))
