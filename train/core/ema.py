"""An exponential moving average of the parameters (Polyak and Juditsky 1992), which evaluation reads instead of them.

    ema <- ema + (1 - d_t) (params - ema),    d_t = min(decay, (1 + t) / (10 + t))

t counts optimizer steps from 0. The average starts at the initial parameters, and the warm-up of its decay, that of
TensorFlow's `ExponentialMovingAverage(num_updates)` and of diffusers' `EMAModel`, lets it forget them: after t steps it
reaches about a tenth of the run so far back, until `decay` is less. A parameter that never moves is its average to the last bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mupax.zoo.definition import Arrays


def start(params: Arrays) -> Arrays:
    """The average before the first step, float32 whatever parameters are stored in: bfloat16 would round small moves away."""
    return {name: jnp.array(w, jnp.float32, copy=True) for name, w in params.items()}


def update(ema: Arrays, params: Arrays, decay: jax.Array, step: jax.Array) -> Arrays:
    """The average after a step.

    Args:
        ema: before it.
        params: after it.
        decay: float32 [].
        step: steps done before it, int32 [].
    """
    rest = 1 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return {name: average + rest * (params[name] - average) for name, average in ema.items()}
