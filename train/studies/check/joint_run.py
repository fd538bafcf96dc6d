"""Check of joint rules: a run's own optimizer on synthetic gradients, as batch or tokens grow.

Every size is assembled like its run. Its optimizer chain, schedule and hyperparameters take all
steps of the run on gradients signal + noise B^-1/2. The outcome is held against the joint rule
(`mupax.presets.analysis.joint_limits`). `mupax check RECIPE --grow batch --joint sde` runs it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mupax.presets import horizon
from mupax.presets.analysis import joint_limits
from mupax.presets.joint import NUMBERS
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config import joint, sizes
from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.factors import Factors, schedule_table
from mupax.train.core.optimizer import OptimizerHyperparams
from mupax.train.core.program import assemble
from mupax.train.studies.check.judge import Finding, judge
from mupax.train.studies.check.theory import Expected
from mupax.zoo.configs import ConfigError
from mupax.zoo.definition import Arrays

NOISE, SIGNAL, STEADY, FAINT, STILL = range(5)
"""Kinds of entries in each parameter.

NOISE: noise far above eps. SIGNAL: the same noise and a signal. STEADY: a gradient of the noise's
size at every step. FAINT: noise of the size of eps. STILL: no gradient, at a weight of 1.
"""
_KINDS = 5
_SIGNAL_TO_NOISE = 1 / 32
"""Signal over noise at the base's batch."""
_LOUD = 1e4
"""Noise over eps, in entries other than FAINT."""
_ENTRIES = 256
"""Number of entries of every kind in each parameter, or in each layer of a stacked one."""
_LEAST_EPS = 1e-16
"""Least eps of the optimizer. The square of a gradient of this size is still a float32 number."""
_MARGIN = 0.12
"""Distance from theory within which a slope passes.

Adam's drift loses as much where 1 - beta is no longer small (0.06 from B = 1 to 8).
"""
_NUMBERS = {column: number for number, column in reversed(NUMBERS.items())}
LABELS = {name: f"{name}/{_NUMBERS[column]}" for name, column in joint_limits.OBSERVABLES.items()}
"""Observable to its label in a report, which names the hyperparameter that is to blame."""


def runs(config: Config, grows: str, count: int) -> list[Config]:
    """Return runs whose batch or tokens double from one to the next.

    The first run has the batch and tokens of the config's base, or of the config itself under the
    joint rule "none". All have the config's optimizer as it is: no rule has scaled it.

    Args:
        config: Run whose optimizer has the hyperparameters of the base.
        grows: "batch" (at the same tokens) or "tokens" (at the same batch).
        count: Number of runs, the first one too.

    Raises:
        ConfigError: A run has no whole number of steps, the optimizer or rule does not fit, or eps
            is too small.
        PresetError: The joint rule does not cover the optimizer or the batch.
    """
    optimizer = config.optimizer
    rule = horizon.rule(config.preset.joint)
    if OPTIMIZERS[optimizer.name].family != "adam":
        raise ConfigError(
            f"growing {grows} is theory of Adam's noise and says nothing about {optimizer.name}; "
            f"write adamw"
        )
    _moments(optimizer.name)
    if rule.name != "none" and not rule.speaks_of(grows):
        names = []
        for other_rule in horizon.RULES.values():
            covers_adam = "adam" in other_rule.families
            if other_rule.applied and covers_adam and other_rule.speaks_of(grows):
                names.append(other_rule.name)
        raise ConfigError(
            f"the joint rule {rule.name} says nothing about {grows}; "
            f"write --joint {' or '.join(names)}"
        )
    if optimizer.eps < _LEAST_EPS:
        raise ConfigError(
            f"optimizer.eps is {optimizer.eps:g}, which this cannot see; "
            f"write one of at least {_LEAST_EPS:g}"
        )
    if rule.name != "none":
        base = joint.base_of(config)
        data = dataclasses.replace(config.data, batch_size=base["batch"])
        steps = base["tokens"] // (base["batch"] * config.model.units)
        config = dataclasses.replace(config, data=data, steps=steps)

    batch = config.data.batch_size
    start = batch
    if grows == "tokens":
        start = batch * config.model.units * config.steps
    grown_runs = []
    for k in range(count):
        run = sizes.grown_run(config, grows, start * 2**k)
        # `grown_run` scales warm-up with the length, which is the joint rule's own task.
        grown_runs.append(dataclasses.replace(run, optimizer=optimizer, mesh=MeshConfig()))
    return grown_runs


def observe(
    config: Config, batch_ratio: float, programs: dict[Any, Callable] | None = None
) -> dict[str, float]:
    """Run a config's optimizer on synthetic gradients for all steps, and return the observables.

    The updates are summed and not applied: weights stay where they are. Names are those of
    `joint_limits.OBSERVABLES`. "decay over the run" is NaN if no parameter decays.

    Args:
        batch_ratio: Batch of the run divided by that of the first run. The noise of the gradients
            is divided by its square root.
        programs: Compiled runs of earlier calls, extended in place. Runs that differ only in data
            share a program.
    """
    programs = {} if programs is None else programs
    # Assembled as for a run, so that a fault of the run's own scaling shows, too.
    program = assemble(config)
    factors = program.inputs.factors
    hyper = program.inputs.hyper
    optimizer = config.scaled_optimizer

    # One parameter of a kind is enough, because no factor of the preset depends on the batch. More
    # parameters would only take longer to compile.
    kinds = {}
    for name, rate in factors.lr.items():
        decays = bool(np.any(factors.weight_decay[name]))
        kinds[rate.ndim, decays] = name
    shapes = {name: factors.lr[name].shape for name in kinds.values()}
    lr = _column(factors.lr, shapes)
    eps = _column(factors.eps, shapes)
    decay = _column(factors.weight_decay, shapes)

    scale = np.repeat(eps[..., None] * config.optimizer.eps, _KINDS, axis=1)
    norm = math.sqrt(_ENTRIES * np.sum(scale[:, :FAINT] ** 2))
    # Clipped gradients have one size whatever their noise, so the noise stays below the clip norm.
    clip_norm = optimizer.clip_norm or math.inf
    scale[:, :FAINT] *= min(_LOUD, clip_norm / (4 * norm))

    key = (
        optimizer.b1,
        optimizer.b2,
        optimizer.decay,
        optimizer.clip_norm,
        config.steps,
        tuple(shapes.items()),
    )
    moments = _moments(optimizer.name)
    # Cheap even if the key is there, because `_program` compiles at its first call only.
    train = programs.setdefault(key, _program(program.tx, moments, shapes, config.steps))
    moved, forgotten, rate = jax.device_get(
        train(factors, jax.tree.map(jnp.asarray, hyper), scale, batch_ratio)
    )

    moved = moved.astype(np.float64)
    loud = moved[:, NOISE]
    faint = moved[:, FAINT]
    rate = np.mean(rate / lr[:, 0], axis=1)
    pull = (decay * lr if optimizer.decay == "coupled" else decay)[:, 0]
    decaying = pull > 0
    return {
        "displacement by noise": float(np.sqrt(np.mean((loud / lr) ** 2))),
        "drift": float(np.mean((loud - moved[:, SIGNAL]) / lr)),
        "decay over the run": float(np.mean(-moved[decaying, STILL] / pull[decaying, None])),
        "memory of b1": 1 / (float(forgotten[0]) * config.steps),
        "memory of b2": 1 / (float(forgotten[1]) * config.steps),
        "eps over noise": float(np.sum(loud * faint) / np.sum(faint * faint)) - 1,
        "warm-up": (1 + int(np.argmax(rate > 0.999 * rate.max()))) / config.steps,
    }


def _column(factor: Mapping[str, Any], names: Collection[str]) -> np.ndarray:
    """Return one factor of the named parameters, a row per parameter or layer, [R, 1]."""
    return np.concatenate([np.ravel(factor[name]) for name in names])[:, None]


def _moments(name: str) -> tuple[str, str]:
    """Return the names of the two moments in an optimizer's state: that of b1, and that of b2.

    Raises:
        ConfigError: The optimizer's state has no two such fields.
    """
    row = OPTIMIZERS[name]
    second_moments = [field for field in row.moments if field != row.first_moment]
    if row.first_moment is None or len(second_moments) != 1:
        raise ConfigError(
            f"{name} keeps {', '.join(row.moments) or 'no moments'}, and this is theory of "
            f"optimizers with a first moment and one other; write adamw"
        )
    return row.first_moment, second_moments[0]


def _program(
    tx: optax.GradientTransformationExtraArgs,
    fields: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    steps: int,
) -> Callable:
    """Return a function that takes all steps of a run. It compiles at its first call.

    R counts parameters, or layers of stacked ones; E is `_ENTRIES`. The arguments of the function
    are factors, hyperparameters, the scale of gradients [R, 5, 1], and the batch divided by the
    base's. It returns the sum of updates [R, 5, E], the share of each moment that one step replaces
    (1 - beta, [2]), and the mean update of STEADY entries at every step [steps, R].

    Args:
        fields: Names of the two moments in the state of `tx`, from `_moments`.
        shapes: Shape of the preset's factors of every parameter, [] or [layers].
        steps: Number of steps.
    """
    num_rows = [0]
    for shape in shapes.values():
        num_rows.append(math.prod(shape))
    ends = np.cumsum(num_rows)

    def joined(tree: Mapping) -> jax.Array:
        """Return the arrays of all parameters in one, [R, 5, E]."""
        return jnp.concatenate([tree[name].reshape(-1, _KINDS, _ENTRIES) for name in shapes])

    def parted(rows: jax.Array) -> Arrays:
        """Return rows [R, 5, E] as arrays by parameter name, the inverse of `joined`."""
        params = {}
        for (name, shape), begin, end in zip(shapes.items(), ends, ends[1:], strict=False):
            params[name] = rows[begin:end].reshape(*shape, _KINDS, _ENTRIES)
        return params

    @jax.jit
    def train(
        factors: Factors, hyper: OptimizerHyperparams, scale: jax.Array, batch_ratio: jax.Array
    ) -> tuple[jax.Array, ...]:
        # Weights stay constant. STILL entries have no gradient, so their updates are the decay of a
        # weight of 1.
        params = jnp.zeros((ends[-1], _KINDS, _ENTRIES)).at[:, STILL].set(1.0)

        def gradient(count: jax.Array) -> Arrays:
            # The key depends on the step alone, so that runs of equal length see the same noise at
            # any batch.
            key = jax.random.fold_in(jax.random.key(0), count)
            noise = jax.random.normal(key, (ends[-1], _ENTRIES))
            # A mean over B examples has B^-1/2 of the noise of one.
            noise = noise / batch_ratio**0.5
            still = jnp.zeros_like(noise)
            signal = noise + _SIGNAL_TO_NOISE
            steady = still + batch_ratio**-0.5
            kinds = [noise, signal, steady, noise, still]
            return parted(jnp.stack(kinds, axis=1) * scale)

        def update(state: optax.OptState, count: jax.Array) -> tuple[Any, optax.OptState]:
            return tx.update(
                gradient(count), state, parted(params), factors=factors, hyper=hyper.at(count)
            )

        def step(carry: tuple, count: jax.Array) -> tuple[tuple, jax.Array]:
            state, moved = carry
            updates, after = update(state, count)
            moves = joined(updates)
            return (after, moved + moves), -jnp.mean(moves[:, STEADY], axis=1)

        def replaced(state: optax.OptState, field: str) -> jax.Array:
            """Return 1 - beta of a moment.

            The derivative of a moment with respect to itself one step earlier is beta, whatever the
            moment averages.
            """
            before = optax.tree.get(state, field)

            def after(values: Any) -> Any:
                changed = optax.tree.set(state, **{field: values})
                return optax.tree.get(update(changed, jnp.int32(steps - 1))[1], field)

            _, remaining = jax.jvp(after, (before,), (before,))
            before_noise = joined(before)[:, NOISE].astype(jnp.float32)
            remaining_noise = joined(remaining)[:, NOISE].astype(jnp.float32)
            # Squares of a small second moment would underflow in float32.
            unit = jnp.max(jnp.abs(before_noise), axis=1, keepdims=True)
            before_noise = before_noise / unit
            remaining_noise = remaining_noise / unit
            return 1 - jnp.sum(before_noise * remaining_noise) / jnp.sum(before_noise**2)

        start = (tx.init(parted(params)), jnp.zeros_like(params))
        (state, moved), rate = jax.lax.scan(step, start, jnp.arange(steps))
        forgotten = jnp.stack([replaced(state, field) for field in fields])
        return moved, forgotten, rate

    return train


def expectation(runs: Sequence[Config], grows: str) -> dict[str, Expected]:
    """Return the exponent, band, trouble and base value of every observable under the joint rule.

    Values at the base come from the first run's config. Observables whose value is 0 there, such as
    the warm-up of a run without one, are left out.

    Args:
        runs: Runs as `runs` returns them.
        grows: "batch" or "tokens".
    """
    base_run = runs[0]
    rule = horizon.rule(base_run.preset.joint)
    values = _base_values(base_run)

    # Warm-up is a whole number of steps. Rounding changes the slope most at the shortest warm-up.
    shortest = max(1, min(run.scaled_optimizer.warmup_steps for run in runs))
    rounding = {"warm-up": math.log2(1 + 0.5 / shortest) / (len(runs) - 1)}

    troubles = joint_limits.troubles(rule, grows)
    expected = {}
    for name, power in joint_limits.observables(rule).items():
        if values[name]:
            margin = _MARGIN + rounding.get(name, 0.0)
            expected[name] = Expected(
                power.growth({grows: 1.0}),
                margin,
                margin,
                troubles.get(name),
                base=float(values[name]),
            )
    return expected


def _base_values(config: Config) -> dict[str, Any]:
    """Return the theoretical value of every observable of the base run, 0 if it has none."""
    optimizer = config.optimizer
    steps = config.steps
    schedule = schedule_table(optimizer, steps).astype(np.float64)
    decay_rate = optimizer.peak_lr if optimizer.decay == "coupled" else 1.0
    decay = optimizer.weight_decay * np.sum(schedule) * decay_rate
    if "weight_decay" not in OPTIMIZERS[optimizer.name].reads:
        decay = 0.0
    return {
        "displacement by noise": optimizer.peak_lr * math.sqrt(np.sum(schedule**2)),
        "drift": optimizer.peak_lr * np.sum(schedule) * _SIGNAL_TO_NOISE,
        "decay over the run": decay,
        "memory of b1": 1 / ((1 - optimizer.b1) * steps),
        "memory of b2": 1 / ((1 - optimizer.b2) * steps),
        "eps over noise": 1.0,
        "warm-up": min(optimizer.warmup_steps, steps) / steps,
    }


def study(runs: Sequence[Config], grows: str) -> tuple[list[Finding], list[str]]:
    """Measure every run. Return a finding per observable, and the labels of those not judged.

    Args:
        runs: Runs as `runs` returns them.
        grows: "batch" or "tokens".
    """
    expected = expectation(runs, grows)
    rows = []
    for k, run in enumerate(runs):
        # More tokens are more steps, each with gradients of the same noise.
        batch_ratio = 2.0**k if grows == "batch" else 1.0
        rows.append(observe(run, batch_ratio))
    not_judged = []
    for name, label in LABELS.items():
        if name not in expected:
            not_judged.append(label)
    return judged(rows, expected), not_judged


def judged(rows: Sequence[Mapping[str, float]], expected: Mapping[str, Expected]) -> list[Finding]:
    """Return a finding per observable of `expected`, under its label in `LABELS`.

    Before it is judged, the decay over the run is corrected for a learning rate that deviates.

    Args:
        rows: Observables of every run, from `observe`. Each run is twice the one before.
        expected: Theory by observable, from `expectation`.
    """
    measured = {}
    for name in expected:
        measured[name] = np.array([row[name] for row in rows])
    ratios = 2.0 ** np.arange(len(rows))
    if "decay over the run" in measured:
        # The rule of the learning rate is a factor of the decay, also of independent decay
        # (`JointRule`). A wrong rate is not the fault of the decay.
        moved = measured["displacement by noise"]
        slope = expected["displacement by noise"].slope
        decay = measured["decay over the run"]
        measured["decay over the run"] = decay * moved[0] / moved * ratios**slope

    values = {}
    for name, numbers in measured.items():
        values[LABELS[name]] = numbers[:, None, None]
    theory = {}
    for name, value in expected.items():
        theory[(LABELS[name], 0)] = value
    return judge(values, list(ratios), theory)
