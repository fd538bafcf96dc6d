"""Directions: what `mupax.presets.optimizers.OPTIMIZERS` names, each from (OptimizerConfig, specs) to an optax transformation.

A direction is an update before weight decay, learning rate and sign, which `mupax.train.core.optimizer` adds. It gets factors and
hyperparameters as extra arguments of `update` (`factors`, `hyper`), and a state of named tuples whose moments the table names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from mupax.presets import EMBEDDINGS, VECTORS, ParamSpec, Role
from mupax.presets.roles import ADAPTERS
from mupax.train.config.run import OptimizerConfig
from mupax.zoo.configs import ConfigError

Specs = Mapping[str, ParamSpec]


class ScaleByMuonState(NamedTuple):
    """Momentum of every parameter; second moments only of those on Adam."""

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates


def sgd(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """The gradient, or its heavy-ball sum.

    Args:
        config: its `momentum` is the sum's decay; 0 for the bare gradient.
        specs: not read; every parameter is treated alike.
    """
    return optax.trace(config.momentum) if config.momentum else optax.identity()


def lion(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """The sign of an interpolated momentum (Chen et al. 2023).

    Args:
        config: `b1` interpolates, `b2` is the momentum's decay.
        specs: not read; every parameter is treated alike.
    """
    return optax.scale_by_lion(config.b1, config.b2)


def adam(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with eps * factors.eps per parameter, which optax's own does not take: m_hat / (sqrt(v_hat) + eps).

    The same direction by optax's own, on gradients over factors.eps or one for each parameter, rounds in another order.

    Args:
        config: `b1` and `b2` are the moments' decays; eps comes with `hyper`.
        specs: not read; every parameter is treated alike.
    """

    def update(updates, state, params=None, *, factors, hyper, **_):
        del params
        mu = optax.tree.update_moment(updates, state.mu, config.b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, config.b2, 2)
        count = optax.safe_increment(state.count)
        mu_hat, nu_hat = (
            optax.tree.bias_correction(mu, config.b1, count),
            optax.tree.bias_correction(nu, config.b2, count),
        )
        eps = {name: hyper.eps * factors.eps[name] for name in updates}
        scaled = jax.tree.map(lambda m, v, e: m / (jnp.sqrt(v) + rows(e, v)), mu_hat, nu_hat, eps)
        return scaled, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, cast("Any", update))


def muon(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformationExtraArgs:
    """Orthogonalized Nesterov momentum of every hidden matrix, Adam's direction of everything else.

    Each matrix is read as its spec says: fan-in axes by fan-out axes, stacked layers apart. No factor of shape is in here
    (`optax.contrib.muon` has one of its own, sqrt(max(1, out/in))): the preset's rate brings it, once.

    Args:
        config: `momentum` of the matrices, `b1` and `b2` of the rest.
        specs: name to declaration of the parameters that are trained: their roles say which are hidden matrices.
    """
    orthogonalized = dimension_numbers(specs)
    matrices = optax.contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=orthogonalized)
    blank: Any = matrices.init({})
    on_adam = adam(config, specs)

    def init(params: optax.Params) -> ScaleByMuonState:
        def squares(path: tuple, w: jax.Array) -> jax.Array | optax.MaskedNode:
            return optax.MaskedNode() if path[-1].key in orthogonalized else jnp.zeros_like(w)

        nu = jax.tree_util.tree_map_with_path(squares, params)
        return ScaleByMuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params), nu)

    def update(updates, state, params=None, *, factors, hyper, **_):
        del params

        def part(tree: Mapping, muons: bool) -> dict:
            return {name: leaf for name, leaf in tree.items() if (name in orthogonalized) == muons}

        before: Any = MuonState(state.count, part(state.mu, True), blank.ns_coeffs)
        turned, of_matrices = cast("Any", matrices.update)(part(updates, True), before)
        before = optax.ScaleByAdamState(state.count, part(state.mu, False), part(state.nu, False))
        scaled, of_others = cast("Any", on_adam.update)(part(updates, False), before, factors=factors, hyper=hyper)
        steps, mu, nu = {**turned, **scaled}, {**of_matrices.mu, **of_others.mu}, {**state.nu, **of_others.nu}
        return {n: steps[n] for n in updates}, ScaleByMuonState(of_others.count, {n: mu[n] for n in updates}, nu)

    return optax.GradientTransformationExtraArgs(cast("Any", init), cast("Any", update))


def dimension_numbers(specs: Specs) -> dict[str, MuonDimensionNumbers]:
    """How Muon orthogonalizes each hidden matrix: its fan-in axes against its fan-out axes, "layers" a batch."""
    return {
        name: MuonDimensionNumbers(*(tuple(map(spec.axes.index, axes)) for axes in (spec.fan_in, spec.fan_out)))
        for name, spec in specs.items()
        if spec.role not in VECTORS | EMBEDDINGS | ADAPTERS | {Role.READOUT, Role.ROUTER}
    }


def stored(direction: optax.GradientTransformation, moment: str, dtype: str) -> optax.GradientTransformationExtraArgs:
    """Keep one moment of a direction in another dtype between updates. It is still updated in the dtype of the gradients.

    Args:
        direction: transformation whose state, or a part of whose state, has a field named `moment`.
        moment: the field to round.
        dtype: type that the field is kept in.

    Raises:
        ConfigError: by `init` and `update` of the result, if the state has no such field.
    """
    extended = optax.with_extra_args_support(direction)

    def moment_of(state: Any) -> Any:
        value = optax.tree.get(state, moment)
        if value is None:
            raise ConfigError(
                f"optimizer.moment_dtype is {dtype}, and the optimizer's state has no {moment} to keep in it; leave it out"
            )
        return value

    def with_moment(state: Any, value: Any) -> Any:
        return optax.tree.set(state, **{moment: value})

    def narrowed(state: Any) -> Any:
        return with_moment(state, optax.tree.cast(moment_of(state), dtype))

    def init(params: Any) -> Any:
        return narrowed(direction.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        wide = jax.tree.map(lambda m, g: m.astype(g.dtype), moment_of(state), updates)
        steps, new_state = extended.update(updates, with_moment(state, wide), params, **extra)
        return steps, narrowed(new_state)

    return optax.GradientTransformationExtraArgs(init, update)


def rows(number: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
    """A scalar or per-layer number shaped to broadcast against a parameter, in its dtype.

    Args:
        number: [] or [layers].
        like: the parameter or its update; its first axis is layers where `number` has one.
    """
    number = jnp.asarray(number)
    return number.reshape(number.shape + (1,) * (like.ndim - number.ndim)).astype(like.dtype)
