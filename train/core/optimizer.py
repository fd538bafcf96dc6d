"""One optax chain: learning rate x schedule x the preset's scale, with decay and eps per parameter.

Factors and hyperparameters reach the chain as extra arguments of `update`, so they are data to the compiled step:

    updates, state = tx.update(grads, state, params, factors=factors, hyper=hyper)

Stochastic rounding to bfloat16 (Gupta et al. 2015, Zamirai et al. 2020) makes small updates of stored parameters count.

bfloat16 keeps 8 bits of a number. An update of less than 2^-9 of a parameter is lost if the sum is rounded to the nearest
number, at every step anew. Rounded up or down by chance, in proportion to the distance, the sum is right on average.

Directions are what `mupax.presets.optimizers.OPTIMIZERS` names, each from (OptimizerConfig, specs) to an optax transformation.

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
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import ADAPTERS
from mupax.table import function_of
from mupax.train.config.run import OptimizerConfig
from mupax.zoo.configs import ConfigError

Specs = Mapping[str, ParamSpec]

_STREAM = 0x726F756E
"""Keeps these random numbers apart from those that other parts of a run draw from the same seed."""
_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio: its multiples are spread evenly."""
_LOW_BITS = 0xFFFF


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
    matrices = optax.contrib.scale_by_muon(
        beta=config.momentum, weight_dimension_numbers=orthogonalized
    )
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
        scaled, of_others = cast("Any", on_adam.update)(
            part(updates, False), before, factors=factors, hyper=hyper
        )
        steps, mu, nu = (
            {**turned, **scaled},
            {**of_matrices.mu, **of_others.mu},
            {**state.nu, **of_others.nu},
        )
        return {n: steps[n] for n in updates}, ScaleByMuonState(
            of_others.count, {n: mu[n] for n in updates}, nu
        )

    return optax.GradientTransformationExtraArgs(cast("Any", init), cast("Any", update))


def dimension_numbers(specs: Specs) -> dict[str, MuonDimensionNumbers]:
    """How Muon orthogonalizes each hidden matrix: its fan-in axes against its fan-out axes, "layers" a batch."""
    return {
        name: MuonDimensionNumbers(
            *(tuple(map(spec.axes.index, axes)) for axes in (spec.fan_in, spec.fan_out))
        )
        for name, spec in specs.items()
        if spec.role not in VECTORS | EMBEDDINGS | ADAPTERS | {Role.READOUT, Role.ROUTER}
    }


def stored(
    direction: optax.GradientTransformation, moment: str, dtype: str
) -> optax.GradientTransformationExtraArgs:
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


class Rounding(NamedTuple):
    """Source of the random bits of one step."""

    seed: Any
    """uint32 []."""
    step: Any = 0
    """Optimizer steps done, int32 []."""


def widened(tree: Any) -> Any:
    """Return a tree whose bfloat16 arrays are float32; other leaves stay as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf, tree)


def narrowed(tree: Any, like: Any, rounding: Rounding) -> Any:
    """Round float32 arrays stochastically where they are stored in bfloat16.

    The result is a function of the numbers, the seed, the step, and each array's place in the tree. It does not depend on the
    mesh, and a resumed run rounds as an uninterrupted one.

    Args:
        tree: computed in float32.
        like: tree of the same structure, in the types that are stored.
        rounding: source of the random bits.
    """
    key = _mixed(
        _mixed(_uint(rounding.seed) ^ _uint(_STREAM)) + _uint(rounding.step) * _uint(_GOLDEN)
    )
    leaves, structure = jax.tree.flatten(tree)
    stored = []
    for number, (leaf, before) in enumerate(zip(leaves, jax.tree.leaves(like), strict=True)):
        if _is_narrow(before) and leaf.dtype == jnp.float32:
            leaf_key = _mixed(key + _uint(number) * _uint(_GOLDEN))
            stored.append(stochastically_rounded(leaf, leaf_key))
        else:
            stored.append(leaf)
    return jax.tree.unflatten(structure, stored)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round to bfloat16, up or down by chance, such that the expectation is `x`.

    Args:
        x: float32, of any shape.
        key: uint32 [].
    """
    # A hash of each number's position, not `jax.random`: a CPU's compiler takes 0.4 s for every array that Threefry draws.
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        position = position * _uint(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    noise = _mixed(_mixed(position * _uint(_GOLDEN) + key) ^ key) & _uint(_LOW_BITS)
    # The low half is what bfloat16 cuts off. Added to 16 random bits, it carries with a chance in proportion to its size.
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & ~_uint(_LOW_BITS)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _mixed(bits: jax.Array) -> jax.Array:
    """Hash uint32 numbers (the finalizer of MurmurHash3, Appleby 2011)."""
    bits = (bits ^ (bits >> 16)) * _uint(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * _uint(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _uint(number: Any) -> jax.Array:
    return jnp.asarray(number, jnp.uint32)


def _is_narrow(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bfloat16


class OptimizerHyperparams(NamedTuple):
    """The optimizer's numbers, float32 scalars. `schedule` is [`length`] for a run and [] inside a step (see `at`)."""

    peak_lr: Any
    schedule: Any
    """Learning rate as a fraction of the peak."""
    weight_decay: Any
    eps: Any

    def at(self, step: jax.Array) -> OptimizerHyperparams:
        """The numbers of one step; steps past the end of the schedule keep its last value."""
        return self._replace(
            schedule=jnp.asarray(self.schedule)[jnp.minimum(step, len(self.schedule) - 1)]
        )


def build(
    config: OptimizerConfig, specs: Mapping[str, ParamSpec]
) -> optax.GradientTransformationExtraArgs:
    """The chain of a config. Clipping is global over raw gradients of the loss; everything after it is per parameter.

    Args:
        config: names the optimizer and its constants.
        specs: name to declaration of every parameter that it moves.
    """
    row = OPTIMIZERS[config.name]
    direction = function_of(row.direction)(config, specs)
    if config.moment_dtype is not None and row.first_moment is not None:
        direction = stored(direction, row.first_moment, config.moment_dtype)
    coupled = config.decay == "coupled"
    return optax.chain(
        _clip(config.clip_norm, specs) if config.clip_norm is not None else optax.identity(),
        direction,
        add_coupled_decay if coupled else optax.identity(),
        scale_by_preset,
        scale_by_schedule,
        optax.identity() if coupled else add_independent_decay,
    )


def first_step(
    tx: optax.GradientTransformation,
    name: str,
    grads: Any,
    params: Any,
    **extra: Any,
) -> tuple[Any, Any]:
    """Return the first updates that move something, and the optimizer state after them.

    Updates that only fill the state (`Optimizer.still_steps`) are taken before, on the same gradients.

    Args:
        tx: chain of `build`, or one written by hand.
        name: the optimizer that it is.
        grads: gradient of every parameter.
        params: parameters, with the names of `grads`. None for a chain that reads none.
        **extra: further arguments of `tx.update`.
    """
    extended = optax.with_extra_args_support(tx)
    state = extended.init(grads if params is None else params)
    for _ in range(OPTIMIZERS[name].still_steps):
        _, state = extended.update(grads, state, params, **extra)
    return extended.update(grads, state, params, **extra)


def apply_gradients(
    tx: optax.GradientTransformationExtraArgs,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    factors: Any,
    hyper: OptimizerHyperparams,
    rounding_seed: Any = None,
    step: Any = None,
) -> tuple[Any, Any]:
    """Return the parameters and the optimizer state after one update.

    Args:
        tx: chain of `build`.
        grads: gradient of every parameter that is trained.
        opt_state: state before the update.
        params: parameters before the update, with the names of `grads`.
        factors: the preset's factors.
        hyper: numbers of this step.
        rounding_seed: given where arrays are stored in bfloat16. All arithmetic is then in float32, and what is stored in
            bfloat16 is rounded stochastically.
        step: optimizer steps done, int32 []; read by the rounding.
    """
    if rounding_seed is None:
        updates, opt_state = tx.update(grads, opt_state, params, factors=factors, hyper=hyper)
        return optax.apply_updates(params, updates), opt_state

    wide_grads, wide_state, wide_params = widened((grads, opt_state, params))
    updates, new_state = tx.update(
        wide_grads, wide_state, wide_params, factors=factors, hyper=hyper
    )
    new_params = optax.apply_updates(wide_params, updates)
    return narrowed((new_params, new_state), (params, opt_state), Rounding(rounding_seed, step))


def _clip(norm: float, specs: Mapping[str, ParamSpec]) -> optax.GradientTransformation:
    """Clipping of the loss's gradient; how far loads are from even ones is neither counted in it nor clipped."""
    clip, loads = (
        optax.clip_by_global_norm(norm),
        {name for name, spec in specs.items() if spec.moved_by_loads},
    )
    if not loads:
        return clip

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        clipped, state = clip.update(
            {name: g for name, g in updates.items() if name not in loads}, state, params
        )
        return {name: updates[name] if name in loads else clipped[name] for name in updates}, state  # pyright: ignore

    return optax.GradientTransformation(clip.init, update)


def _stateless(rule) -> optax.GradientTransformationExtraArgs:
    """A transformation of (update, parameter, its factors, hyper) without state."""

    def update(updates, state, params=None, *, factors, hyper=None, **_):
        columns = {
            name: {field: getattr(factors, field)[name] for field in ("lr", "weight_decay")}
            for name in updates
        }
        like = updates if params is None else params
        return {
            name: rule(u, like[name], columns[name], hyper) for name, u in updates.items()
        }, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


add_coupled_decay = _stateless(
    lambda u, w, f, h: u + rows(h.weight_decay * f["weight_decay"], w) * w
)
"""u + wd * factors.weight_decay * w, to be scaled by the learning rate."""
scale_by_preset = _stateless(lambda u, w, f, h: u * rows(f["lr"], w))
"""u * factors.lr: each parameter's own rate relative to the one peak rate."""
scale_by_schedule = _stateless(lambda u, w, f, h: (-(h.peak_lr * h.schedule) * u).astype(u.dtype))
"""-peak_lr * schedule * u."""
add_independent_decay = _stateless(
    lambda u, w, f, h: u - rows(h.weight_decay * h.schedule * f["weight_decay"], w) * w
)
"""u - wd * schedule * factors.weight_decay * w: decay that follows the schedule but not the rates."""
