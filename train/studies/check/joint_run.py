"""Check of joint rules: a run's own optimizer on synthetic gradients, as batch or tokens grow.

A joint rule scales learning rate, betas, eps, weight decay and warm-up with batch B and tokens T.
Runs of growing B or T are assembled like real runs. Their optimizer chain, schedule and
hyperparameters take all steps on gradients signal + noise B^-1/2. The measured exponents are
compared with those of the rule (`mupax.presets.analysis.joint_limits`). `mupax check RECIPE --grow
batch --joint sde` runs this check.
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
"""Kinds of synthetic gradients; each parameter has entries of every kind.

NOISE: noise far above eps. SIGNAL: the same noise plus a constant. STEADY: a constant of the
noise's size, so that updates show the learning rate. FAINT: noise of the size of eps. STILL: no
gradient, at a weight of 1, so that updates show the weight decay.
"""
_KINDS = 5
_SIGNAL_TO_NOISE = 1 / 32
"""Ratio of signal to noise at the base's batch."""
_LOUD = 1e4
"""Ratio of noise to eps in entries other than FAINT, unless the clip norm makes it smaller."""
_ENTRIES = 256
"""Number of entries of every kind in each parameter, or in each layer of a stacked one."""
_LEAST_EPS = 1e-16
"""Smallest eps of an optimizer that is accepted. Gradients of its size must square in float32."""
_MARGIN = 0.12
"""Distance from theory within which a slope passes.

Theory takes 1 - beta as small. Where it is not, the slope of Adam's drift is smaller (by 0.06 from
B = 1 to 8).
"""
_NUMBERS = {column: number for number, column in reversed(NUMBERS.items())}
LABELS = {name: f"{name}/{_NUMBERS[column]}" for name, column in joint_limits.OBSERVABLES.items()}
"""Observable to its label in a report, which names the hyperparameter that is to blame."""


def runs(config: Config, grows: str, count: int) -> list[Config]:
    """Return runs whose batch or tokens double from one to the next.

    The first run has the batch and tokens of the config's base, or of the config itself under the
    joint rule "none". All runs have the unscaled optimizer settings of the config.
    `Config.scaled_optimizer` of a run has the settings that the joint rule gives it.

    Args:
        config: Run whose optimizer has the hyperparameters of the base.
        grows: "batch" (at the same tokens) or "tokens" (at the same batch).

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
            f"optimizer.eps is {optimizer.eps:g}, and the check's gradients of that size would "
            f"vanish in float32; write at least {_LEAST_EPS:g}"
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

    The updates are summed but not applied, so weights stay constant. The names are those of
    `joint_limits.OBSERVABLES`, such as "drift" or "memory of b1". "decay over the run" is NaN if no
    parameter decays.

    Args:
        batch_ratio: Batch of the run divided by that of the first run. The noise of the gradients
            is divided by its square root.
        programs: Cache of compiled runs for several calls, extended in place. Runs with equal
            betas, decay, clip norm, steps and shapes share a program. By default nothing is cached.
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
    """Return a factor of the named parameters as a column [R, 1].

    There is a row for each parameter, or for each layer of a stacked parameter.
    """
    return np.concatenate([np.ravel(factor[name]) for name in names])[:, None]


def _moments(name: str) -> tuple[str, str]:
    """Return the names of the moments in an optimizer's state that decay by b1 and by b2.

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

    Arrays have R rows (one per parameter, or per layer of a stacked one), 5 kinds of gradients
    (NOISE to STILL) and E = `_ENTRIES` entries of each kind. The arguments of the function are
    factors, hyperparameters, the scale of gradients [R, 5, 1], and the batch divided by the base's.
    It returns the sum of updates [R, 5, E], the share of each moment that one step replaces (1 -
    beta, [2]), and minus the mean update of STEADY entries at every step [steps, R].

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
        """Return the arrays of all parameters as one array [rows, kinds of gradients, entries].

        A parameter has one row, and a stacked parameter one row per layer.
        """
        return jnp.concatenate([tree[name].reshape(-1, _KINDS, _ENTRIES) for name in shapes])

    def parted(rows: jax.Array) -> Arrays:
        """Split an array [rows, kinds of gradients, entries] into arrays by parameter name.

        This is the inverse of `joined`.
        """
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
            """Return 1 - beta of the moment named `field`, measured at the last step.

            The derivative of a moment with respect to its own value one step earlier is beta, so
            this works for any moment.
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
    """Return what theory expects of every observable under the runs' joint rule, by name.

    This is its exponent as the batch or the tokens grow, the band of slopes that pass, the fault of
    the rule (if any), and the value in the first run. Observables whose value is 0 in the first
    run, such as the warm-up of a run without one, are left out.

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
    """Return the theoretical value of every observable in the first run, by name.

    Decay is 0 for a run without weight decay, and warm-up is 0 for a run without warm-up.
    """
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
    """Measure every run, and judge each observable by its slope over the runs.

    Return a finding per observable, and the labels of the observables that were not judged.

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

    The decay over the run is proportional to the learning rate. If the measured learning rate
    deviates from the joint rule, its effect on the decay is divided out, so that a wrong rule for
    the learning rate is not blamed on the decay.

    Args:
        rows: Observables of every run, from `observe`. The batch or the tokens double from run to
            run.
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
