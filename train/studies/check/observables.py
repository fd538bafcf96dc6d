"""What to measure inside a model while it takes its first steps: one compiled program per size, all presets and seeds in it.

Every observable is a positive number per (seed, step): a root mean square over entries, layers and batch. Names are
`what` or `what/group`, group being a `ParamSpec.group` such as `block.query`.

At initialization `desiderata` measures those of the feature speed formula, and `balance` derives rates that satisfy them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax.presets import Preset
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import Factors, init_stds, resolve
from mupax.train.core.optimizer import Hyper
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs, gradients
from mupax.train.core.transforms import rows
from mupax.train.studies.check.activations import attention_of, internals
from mupax.train.studies.check.balance import balance, descent
from mupax.train.studies.check.feature_speed import Speeds, of_model
from mupax.zoo.definition import Arrays, Definition, multiplied

__all__ = ["Batch", "Observed", "Probe", "balance", "desiderata", "observe", "rms"]

Batch = Mapping[str, Any]
Observed = dict[str, jax.Array]
"""Observable to float32 [steps + 1]: before the first step, then after each."""

_BY_OWN_WEIGHTS = ("query", "key", "attention")


class Probe:
    """One model's measuring program, compiled at its first use. Presets, rates and seeds are data to it.

    Args:
        definition: the model.
        tx: the optimizer chain.
        steps: optimizer steps.
    """

    def __init__(self, definition: Definition, tx: optax.GradientTransformationExtraArgs, steps: int) -> None:
        self.definition, self.tx, self.steps = definition, tx, steps
        self._program = jax.jit(lambda seeds, *inputs: jax.lax.map(lambda seed: self._one(seed, *inputs), seeds))

    def record(
        self, run: StepInputs, stds: dict[str, np.ndarray], batch: Batch, seeds: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Train from each seed on one batch, measuring before the first step and after every one.

        Args:
            run: factors and hyperparameters; `run.reference` is not used.
            stds: initial standard deviations.
            batch: the batch of every step.
            seeds: of the initialization, uint32 [S].

        Returns:
            Observable to float32 [S, steps + 1].
        """
        return jax.device_get(self._program(seeds, run, stds, dict(batch)))

    def _one(self, seed: jax.Array, run: StepInputs, stds: Arrays, batch: Batch) -> Observed:
        definition, tx = self.definition, self.tx
        params = definition.initialize(seed, stds)
        start = _inside(definition, params, run.factors, batch)
        first = TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))

        def step(state: TrainState, _: None) -> tuple[TrainState, Observed]:
            grads, _sums = gradients(definition, state.params, run, dict(batch), 1)
            seen = observe(definition, state.params, params, grads, start, run.factors, batch)
            hyper: Hyper = run.hyper.at(state.step)
            updates, opt_state = tx.update(grads, state.opt_state, state.params, factors=run.factors, hyper=hyper)
            new: Any = optax.apply_updates(state.params, updates)
            return TrainState(state.step + 1, new, opt_state), seen

        return jax.lax.scan(step, first, None, length=self.steps + 1)[1]


def observe(
    definition: Definition,
    params: Arrays,
    initial: Arrays,
    grads: Arrays,
    start: dict[str, jax.Array],
    factors: Factors,
    batch: Batch,
) -> Observed:
    """Every observable of one moment.

    Activations `X` and their change since initialization `change X`, for queries, keys and attention logits `update X`,
    the change through their own weights alone; the variance of attention logits over heads;
    per parameter group the weight (as it acts, multiplier included), its movement since initialization, and the
    gradient over the group's eps factor.

    With a readout tied to the embedding `logits` leaves out the input token's own, and `contact logit` is that one: at
    initialization a E_t . h / rms(h) with h = E_t + other terms is a sum of D squares, where every other logit is a sum of D
    products of either sign. It is D^1/2 times larger: of order one under `mup`, whose other logits vanish as D^-1/2, and
    D^1/2 under `ntk`. `change logits` is of all of them: what training adds has one exponent.
    """
    now = _inside(definition, params, factors, batch)
    seen = {name: rms(x) for name, x in now.items()}
    if definition.tied_readout is not None:
        seen |= _apart(now["logits"], batch["inputs"])
    seen |= {f"change {name}": rms(x - start[name]) for name, x in now.items() if name not in _BY_OWN_WEIGHTS}
    if "query" in now:
        # What they owe to their own weights, at the inputs they had: the stream below moves too, and would hide it.
        moved = attention_of(_bound(definition, params, factors), start["attended"])
        seen |= {f"update {name}": rms(moved[name] - start[name]) for name in _BY_OWN_WEIGHTS}
    if "attention" in now and now["attention"].shape[2] > 1:
        seen["variance over heads"] = jnp.mean(jnp.var(now["attention"], axis=2))
    acting = multiplied(params, factors.multiplier)
    began = multiplied(initial, factors.multiplier)
    groups: dict[str, list[jax.Array]] = {}
    for name, spec in definition.specs.items():
        gradient = grads[name] / rows(factors.eps[name], grads[name])
        columns = {"weight": acting[name], "movement": acting[name] - began[name], "gradient": gradient}
        for what, array in columns.items():
            groups.setdefault(f"{what}/{spec.group}", []).append(rms(array))
    return seen | {name: rms(jnp.stack(values)) for name, values in groups.items()}


def desiderata(
    definition: Definition,
    batch: Batch,
    config: OptimizerConfig,
    *presets: Preset,
    seed: int = 0,
    centered: bool = False,
) -> list[Speeds]:
    """cos θ and the four desiderata of every layer at each preset's initialization, under its rates at peak_lr 1.

    Args:
        definition: as for `balance`.
        batch: `inputs`, `targets`, `weights`.
        config: the optimizer; its rate, schedule, decay and clipping play no part.
        *presets: whose initialization, multipliers and rates; one compiled program serves them all.
        seed: of the initialization.
        centered: the output is f - f at initialization.

    Raises:
        PresetError: a tied readout, or a model that cannot be taken apart (see `mupax.train.studies.check.feature_speed.of_model`).
    """

    @jax.jit
    def measure(stds: Arrays, factors: Factors, batch: Batch) -> Speeds:
        params = definition.initialize(jnp.uint32(seed), stds)
        return of_model(definition, params, factors, batch, descent(definition, factors, config), centered=centered)[0]

    factors = [resolve(preset, definition, config.name, "independent") for preset in presets]
    stds = [init_stds(preset, definition) for preset in presets]
    return [measure(own, one, dict(batch)) for own, one in zip(stds, factors, strict=True)]


def rms(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Root mean square over all entries, or those where a mask is true, float32 []."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), where=where))


def _apart(logits_BTV: jax.Array, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """The input token's own logit (`contact logit`) and all others (`logits`)."""
    contact_BTV = jnp.arange(logits_BTV.shape[-1]) == tokens_BT[..., None]
    return {"logits": rms(logits_BTV, ~contact_BTV), "contact logit": rms(logits_BTV, contact_BTV)}


def _inside(definition: Definition, params: Arrays, factors: Factors, batch: Batch) -> dict[str, jax.Array]:
    return internals(_bound(definition, params, factors), batch["inputs"])


def _bound(definition: Definition, params: Arrays, factors: Factors) -> nnx.Module:
    return definition.bind(multiplied(params, factors.multiplier), factors.forward)
