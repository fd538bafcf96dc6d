"""What a run's own optimizer does as its batch or its tokens grow: `mupax check RECIPE --grow batch --joint sde`.

Every size is assembled as its run would be, and its chain, schedule and numbers take all of the run's steps on gradients that are
signal + noise B^-1/2. What comes of it is held against the joint rule (`mupax.presets.analysis.joint_limits`), column by column.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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
"""What entries of a parameter get: noise far above eps; the same and a signal; that size at every step; noise of the size of eps;
nothing, at a weight of 1."""
_SIGNAL_TO_NOISE = 1 / 32
"""At the base's batch."""
_LOUD = 1e4
"""Noise over eps."""
_ENTRIES = 256
"""Of every kind in each parameter, or each of its layers."""
_LEAST_EPS = 1e-16
"""The square of a gradient so small is still a number in float32."""
_MARGIN = 0.12
"""Room around theory: a slope as far off as the loss of Adam's drift where 1 - beta is no longer small (0.06 from B = 1 to 8)."""
_NUMBERS = {column: number for number, column in reversed(NUMBERS.items())}
LABELS = {name: f"{name}/{_NUMBERS[column]}" for name, column in joint_limits.OBSERVABLES.items()}
"""Observable to its name in a report: with the optimizer's number that is to blame."""


def runs(config: Config, grows: str, count: int) -> list[Config]:
    """The run at the batch and tokens of its base, and with one of the two doubled again and again.

    Args:
        config: of a run, whose optimizer has the numbers at the base.
        grows: batch, at the same tokens, or tokens.
        count: of runs.

    Raises:
        ConfigError: no whole number of steps, or a batch above the noise scale.
        PresetError: the optimizer is none of Adam's, or the joint rule does not speak of it, of what grows, or of a batch so large.
    """
    optimizer, rule = config.optimizer, horizon.rule(config.preset.joint)
    if OPTIMIZERS[optimizer.name].family != "adam":
        raise ConfigError(
            f"growing {grows} is theory of Adam's noise and says nothing about {optimizer.name}; write adamw"
        )
    _moments(optimizer.name)
    if rule.name != "none" and not rule.speaks_of(grows):
        rules = [
            each.name for each in horizon.RULES.values() if each.applied and each.speaks_of(grows)
        ]
        raise ConfigError(
            f"the joint rule {rule.name} says nothing about {grows}; write --joint {' or '.join(rules)}"
        )
    if optimizer.eps < _LEAST_EPS:
        raise ConfigError(
            f"optimizer.eps is {optimizer.eps:g}, which this cannot see; write one of at least {_LEAST_EPS:g}"
        )
    if rule.name != "none":
        base = joint.base_of(config)
        data = dataclasses.replace(config.data, batch_size=base["batch"])
        steps = base["tokens"] // (base["batch"] * config.model.units)
        config = dataclasses.replace(config, data=data, steps=steps)
    batch = config.data.batch_size
    start = {"batch": batch, "tokens": batch * config.model.units * config.steps}[grows]
    grown = [sizes.grown_run(config, grows, start * 2**k) for k in range(count)]
    return [dataclasses.replace(each, optimizer=optimizer, mesh=MeshConfig()) for each in grown]


def observe(
    config: Config, batch_ratio: float, programs: dict[Any, Callable] | None = None
) -> dict[str, float]:
    """The observables of `mupax.presets.analysis.joint_limits` of one run.

    Args:
        config: of the run.
        batch_ratio: its batch over that at which signal and noise have their sizes.
        programs: compiled before, for runs that differ in numbers that are data to them.
    """
    program, programs = assemble(config), {} if programs is None else programs
    factors, opt, hyper = program.inputs.factors, config.scaled_optimizer, program.inputs.hyper
    # One parameter of a kind: nothing that a preset gives depends on the batch, and compiling takes the time.
    kinds = {
        (rate.ndim, bool(np.any(factors.weight_decay[name]))): name
        for name, rate in factors.lr.items()
    }
    shapes = {name: factors.lr[name].shape for name in kinds.values()}
    lr, eps, decay = (
        np.concatenate([np.ravel(column[name]) for name in shapes])[:, None]
        for column in (factors.lr, factors.eps, factors.weight_decay)
    )
    scale = np.repeat(eps[..., None] * config.optimizer.eps, STILL + 1, axis=1)
    clip, norm = opt.clip_norm or math.inf, math.sqrt(_ENTRIES * np.sum(scale[:, :FAINT] ** 2))
    scale[:, :FAINT] *= min(
        _LOUD, clip / (4 * norm)
    )  # what is clipped is of one size whatever the noise
    key = (opt.b1, opt.b2, opt.decay, opt.clip_norm, config.steps, tuple(shapes.items()))
    train = programs.setdefault(key, _program(program.tx, _moments(opt.name), shapes, config.steps))
    moved, forgotten, rate = jax.device_get(
        train(factors, jax.tree.map(jnp.asarray, hyper), scale, batch_ratio)
    )
    moved = moved.astype(np.float64)
    loud, faint, rate = moved[:, NOISE], moved[:, FAINT], np.mean(rate / lr[:, 0], axis=1)
    pull = (decay * lr if opt.decay == "coupled" else decay)[:, 0]
    return {
        "displacement by noise": float(np.sqrt(np.mean((loud / lr) ** 2))),
        "drift": float(np.mean((loud - moved[:, SIGNAL]) / lr)),
        "decay over the run": float(np.mean(-moved[pull > 0, STILL] / pull[pull > 0, None])),
        "memory of b1": 1 / (float(forgotten[0]) * config.steps),
        "memory of b2": 1 / (float(forgotten[1]) * config.steps),
        "eps over noise": float(np.sum(loud * faint) / np.sum(faint * faint)) - 1,
        "warm-up": (1 + int(np.argmax(rate > 0.999 * rate.max()))) / config.steps,
    }


def _moments(name: str) -> tuple[str, str]:
    """Return the fields of an optimizer's state that b1 and b2 average.

    Raises:
        ConfigError: it has not two such fields.
    """
    row = OPTIMIZERS[name]
    second_moments = [field for field in row.moments if field != row.first_moment]
    if row.first_moment is None or len(second_moments) != 1:
        raise ConfigError(
            f"{name} keeps {', '.join(row.moments) or 'no moments'}, and this is theory of optimizers with a first moment and "
            "one other; write adamw"
        )
    return row.first_moment, second_moments[0]


def _program(
    tx: optax.GradientTransformationExtraArgs,
    fields: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    steps: int,
) -> Callable:
    """Return a run as a function that is compiled at its first call.

    Its arguments are factors, hyperparameters, the gradients' scale [R, 5, 1] and the batch over the base's, where R counts parameters,
    or layers of one. It returns sums of updates [R, 5, E], the part of each moment that a step replaces (1 - beta, [2]), and
    the updates of steady entries [steps, R].

    Args:
        tx: the optimizer chain.
        fields: moments in its state.
        shapes: the preset's rates of every parameter: [] or [layers].
        steps: length of the run.
    """
    ends = np.cumsum([0, *(math.prod(shape) for shape in shapes.values())])

    def joined(tree: Mapping) -> jax.Array:
        return jnp.concatenate([tree[name].reshape(-1, STILL + 1, _ENTRIES) for name in shapes])

    def parted(rows: jax.Array) -> Arrays:
        parts = zip(shapes.items(), ends, ends[1:], strict=False)
        return {
            name: rows[i:j].reshape(*shape, STILL + 1, _ENTRIES) for (name, shape), i, j in parts
        }

    @jax.jit
    def train(
        factors: Factors, hyper: OptimizerHyperparams, scale: jax.Array, batch_ratio: jax.Array
    ) -> tuple[jax.Array, ...]:
        # Weights stay where they are: nothing but decay acts on what gets no gradient, and it pulls alike at every step.
        params = jnp.zeros((ends[-1], STILL + 1, _ENTRIES)).at[:, STILL].set(1.0)

        def gradient(count: jax.Array) -> Arrays:
            noise = jax.random.normal(
                jax.random.fold_in(jax.random.key(0), count), (ends[-1], _ENTRIES)
            )
            noise = noise / batch_ratio**0.5
            still = jnp.zeros_like(noise)
            kinds = [noise, noise + _SIGNAL_TO_NOISE, still + batch_ratio**-0.5, noise, still]
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
            """1 - beta: the derivative of a moment by itself one step before is beta, whatever it averages."""
            before = optax.tree.get(state, field)

            def after(values: Any) -> Any:
                changed = optax.tree.set(state, **{field: values})
                return optax.tree.get(update(changed, jnp.int32(steps - 1))[1], field)

            _, remaining = jax.jvp(after, (before,), (before,))
            before_noise = joined(before)[:, NOISE].astype(jnp.float32)
            remaining_noise = joined(remaining)[:, NOISE].astype(jnp.float32)
            unit = jnp.max(
                jnp.abs(before_noise), axis=1, keepdims=True
            )  # squares of a second moment underflow
            before_noise = before_noise / unit
            remaining_noise = remaining_noise / unit
            return 1 - jnp.sum(before_noise * remaining_noise) / jnp.sum(before_noise**2)

        start = (tx.init(parted(params)), jnp.zeros_like(params))
        (state, moved), rate = jax.lax.scan(step, start, jnp.arange(steps))
        forgotten = jnp.stack([replaced(state, field) for field in fields])
        return moved, forgotten, rate

    return train


def expectation(runs: Sequence[Config], grows: str) -> dict[str, Expected]:
    """What the runs' joint rule says of every observable, and the first one's config, which is the base, of its value there.

    Args:
        runs: of `runs`.
        grows: what is doubled from one to the next.
    """
    opt, steps, rule = runs[0].optimizer, runs[0].steps, horizon.rule(runs[0].preset.joint)
    schedule = schedule_table(opt, steps).astype(np.float64)
    values = {
        "displacement by noise": opt.peak_lr * math.sqrt(np.sum(schedule**2)),
        "drift": opt.peak_lr * np.sum(schedule) * _SIGNAL_TO_NOISE,
        "decay over the run": opt.weight_decay
        * np.sum(schedule)
        * (opt.peak_lr if opt.decay == "coupled" else 1.0),
        "memory of b1": 1 / ((1 - opt.b1) * steps),
        "memory of b2": 1 / ((1 - opt.b2) * steps),
        "eps over noise": 1.0,
        "warm-up": min(opt.warmup_steps, steps) / steps,
    }
    if "weight_decay" not in OPTIMIZERS[opt.name].reads:
        values["decay over the run"] = 0.0
    shortest = max(
        1, min(run.scaled_optimizer.warmup_steps for run in runs)
    )  # a whole number of steps, rounded
    rounding = {"warm-up": math.log2(1 + 0.5 / shortest) / (len(runs) - 1)}
    wrong, expected = joint_limits.troubles(rule, grows), {}
    for name, power in joint_limits.observables(rule).items():
        margin = _MARGIN + rounding.get(name, 0.0)
        if values[name]:
            expected[name] = Expected(
                power.growth({grows: 1.0}),
                margin,
                margin,
                wrong.get(name),
                base=float(values[name]),
            )
    return expected


def study(runs: Sequence[Config], grows: str) -> tuple[list[Finding], list[str]]:
    """Both verdicts on every observable, and the names of those not judged.

    Args:
        runs: of `runs`.
        grows: what is doubled from one to the next.
    """
    expected = expectation(runs, grows)
    rows = [observe(run, 2.0**k if grows == "batch" else 1.0) for k, run in enumerate(runs)]
    return judged(rows, expected), [label for name, label in LABELS.items() if name not in expected]


def judged(rows: Sequence[Mapping[str, float]], expected: Mapping[str, Expected]) -> list[Finding]:
    """Every observable held against theory, by its name in `LABELS`.

    Args:
        rows: from `observe`, of runs each twice the one before.
        expected: from `expectation`.
    """
    measured, ratios = (
        {name: np.array([one[name] for one in rows]) for name in expected},
        2.0 ** np.arange(len(rows)),
    )
    if (
        pull := measured.get("decay over the run")
    ) is not None:  # a wrong rate is not the decay's fault
        moved, slope = measured["displacement by noise"], expected["displacement by noise"].slope
        measured["decay over the run"] = pull * moved[0] / moved * ratios**slope
    values = {LABELS[name]: numbers[:, None, None] for name, numbers in measured.items()}
    return judge(values, list(ratios), {(LABELS[name], 0): one for name, one in expected.items()})
