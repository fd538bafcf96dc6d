"""Optimizer chain of a config: a direction, weight decay, and learning rate x schedule x scale.

The preset's factors and the hyperparameters are extra arguments of `update`, so they are data to
the compiled step:

    updates, state = tx.update(grads, state, params, factors=factors, hyper=hyper)

A direction is an update before weight decay, learning rate and sign. `OPTIMIZERS` in
`mupax.presets.optimizers` names the directions. Each is a function of (OptimizerConfig, specs) that
returns an optax transformation. Its state is a named tuple, whose moments the table names.

Parameters that are stored in bfloat16 are rounded stochastically (Gupta et al. 2015, Zamirai et al.
2020). bfloat16 keeps 8 bits of a number. If a sum is rounded to the nearest number, an update of
less than 2^-9 of the parameter is lost at every step. If the sum is rounded up or down by chance,
in proportion to the distance, the result is right on average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from mupax.mappings import function_of
from mupax.presets import ParamSpec
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.preset import WHOLE_MATRICES, MatrixSteps
from mupax.train.config.run import OptimizerConfig
from mupax.zoo.configs import ConfigError
from mupax.zoo.partition import ONE_DEVICE, Layout

Specs = Mapping[str, ParamSpec]

_STREAM = 0x726F756E
"""Constant that separates the bits of stochastic rounding from others drawn with the same seed."""
_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio. Its multiples modulo 2^32 are spread evenly.

They turn steps, array indices and positions into different keys of the hash.
"""
_LOW_BITS = 0xFFFF


def sgd(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return a transformation to the update of SGD: the gradient, or its heavy-ball sum.

    Learning rate, weight decay and sign are applied later in the chain (`build`).

    Args:
        config: Its `momentum` is the decay of the sum. 0 gives the bare gradient.
        specs: Not read, because every parameter is treated alike.
    """
    # A trace with decay 0 would still keep a copy of the gradients in the state.
    return optax.trace(config.momentum) if config.momentum else optax.identity()


def lion(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformation:
    """Return a transformation to Lion's update, the sign of a momentum (Chen et al. 2023).

    Learning rate, weight decay and sign are applied later in the chain (`build`).

    Args:
        config: `b1` interpolates, `b2` is the decay of the momentum.
        specs: Not read, because every parameter is treated alike.
    """
    return optax.scale_by_lion(config.b1, config.b2)


def adam(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformationExtraArgs:
    """Return a transformation to Adam's update, m_hat / (sqrt(v_hat) + eps).

    Learning rate, weight decay and sign are applied later in the chain (`build`). The eps of a
    parameter is hyper.eps * factors.eps, which `optax.scale_by_adam` does not support.

    Args:
        config: `b1` and `b2` are the decays of the moments. The eps comes with `hyper`.
        specs: Not read, because every parameter is treated alike.
    """

    # `optax.scale_by_adam` could give the same direction, on gradients divided by factors.eps or
    # with one transformation per parameter, but its results would round differently.
    def update(updates, state, params=None, *, factors, hyper, **_):
        del params
        mu = optax.tree.update_moment(updates, state.mu, config.b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, config.b2, 2)
        count = optax.safe_increment(state.count)
        mu_hat = optax.tree.bias_correction(mu, config.b1, count)
        nu_hat = optax.tree.bias_correction(nu, config.b2, count)
        eps = {name: hyper.eps * factors.eps[name] for name in updates}
        directions = jax.tree.map(
            lambda m, v, e: m / (jnp.sqrt(v) + rows(e, v)), mu_hat, nu_hat, eps
        )
        return directions, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, cast("Any", update))


def stored(
    direction: optax.GradientTransformation, moment: str, dtype: str
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with one of its moments kept in another dtype between updates.

    During an update the moment has the dtype of the gradients.

    Args:
        direction: Transformation whose state, or a part of whose state, has a field `moment`.
        moment: Name of the field that is rounded.
        dtype: dtype in which the field is kept.

    Raises:
        ConfigError: By `init` and `update` of the result, if the state has no such field.
    """
    extended = optax.with_extra_args_support(direction)

    def moment_of(state: Any) -> Any:
        value = optax.tree.get(state, moment)
        if value is None:
            raise ConfigError(
                f"optimizer.moment_dtype is {dtype}, and the optimizer's state has no {moment} "
                "to keep in it; leave it out"
            )
        return value

    def with_moment(state: Any, value: Any) -> Any:
        return optax.tree.set(state, **{moment: value})

    def rounded(state: Any) -> Any:
        return with_moment(state, optax.tree.cast(moment_of(state), dtype))

    def init(params: Any) -> Any:
        return rounded(direction.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # Add in the dtype of the updates: in the stored dtype, a small update would be rounded
        # away.
        wide = jax.tree.map(lambda m, g: m.astype(g.dtype), moment_of(state), updates)
        directions, new_state = extended.update(updates, with_moment(state, wide), params, **extra)
        return directions, rounded(new_state)

    return optax.GradientTransformationExtraArgs(init, update)


def rows(number: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
    """Reshape a scalar or per-layer number to broadcast against a parameter, in its dtype.

    Args:
        number: [] or [layers].
        like: Parameter or its update. Its first axis is layers if `number` is [layers].
    """
    number = jnp.asarray(number)
    trailing = (1,) * (like.ndim - number.ndim)
    return number.reshape(number.shape + trailing).astype(like.dtype)


class Rounding(NamedTuple):
    """Source of the random bits of one step."""

    seed: Any
    """uint32 []."""
    step: Any = 0
    """Number of optimizer steps done, int32 []."""


def widened(tree: Any) -> Any:
    """Return a tree whose bfloat16 arrays are cast to float32, and whose other leaves are not."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf, tree)


def narrowed(tree: Any, like: Any, rounding: Rounding) -> Any:
    """Round float32 arrays stochastically to bfloat16 where `like` has bfloat16.

    Other arrays are returned unchanged. The result is a function of the values, the seed, the step,
    and each array's position in the tree. It does not depend on the mesh, and a resumed run rounds
    as an uninterrupted one.

    Args:
        tree: Arrays that were computed in float32.
        like: Tree of the same structure, with the dtypes that are stored.
        rounding: Source of the random bits.
    """
    seed_key = _mixed(_uint(rounding.seed) ^ _uint(_STREAM))
    # Another key at every step: with the same bits, a weight would always round the same way.
    key = _mixed(seed_key + _uint(rounding.step) * _uint(_GOLDEN))
    leaves, structure = jax.tree.flatten(tree)
    like_leaves = jax.tree.leaves(like)
    rounded = []
    for index, (leaf, like_leaf) in enumerate(zip(leaves, like_leaves, strict=True)):
        if _is_narrow(like_leaf) and leaf.dtype == jnp.float32:
            # The key depends on the position in the tree, so that moments and weights of one shape
            # round independently.
            leaf_key = _mixed(key + _uint(index) * _uint(_GOLDEN))
            rounded.append(stochastically_rounded(leaf, leaf_key))
        else:
            rounded.append(leaf)
    return jax.tree.unflatten(structure, rounded)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round to bfloat16, up or down by chance, such that the expectation is `x`.

    Numbers that are not finite stay as they are. The bits depend on key and position only.

    Args:
        x: float32, of any shape.
        key: uint32 [].
    """
    # The random bits are a hash of each number's position. With `jax.random`, compiling takes 0.4 s
    # on CPU for every array that Threefry draws.
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        position = position * _uint(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    noise = _mixed(_mixed(position * _uint(_GOLDEN) + key) ^ key) & _uint(_LOW_BITS)
    # bfloat16 cuts off the low half of the bits. Added to 16 random bits, the low half carries with
    # a probability in proportion to its size.
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & ~_uint(_LOW_BITS)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    # Noise added to the bits of infinity would make a NaN of it.
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
    """Hyperparameters of the optimizer at base size, float32 scalars except `schedule`."""

    peak_lr: Any
    schedule: Any
    """Learning rate as a fraction of the peak: one value per step for a run, [] inside a step."""
    weight_decay: Any
    eps: Any

    def at(self, step: jax.Array) -> OptimizerHyperparams:
        """Return the hyperparameters of one step. After its end the schedule keeps its last value.

        Args:
            step: Number of optimizer steps done, int32 [].
        """
        # The array is padded to a power of two, and a run may be continued beyond it.
        last_step = len(self.schedule) - 1
        schedule = jnp.asarray(self.schedule)[jnp.minimum(step, last_step)]
        return self._replace(schedule=schedule)


def build(
    config: OptimizerConfig,
    specs: Mapping[str, ParamSpec],
    matrix_steps: MatrixSteps = WHOLE_MATRICES,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer chain of a config.

    It clips if `clip_norm` is set, applies the optimizer, and scales by the preset, the schedule
    and the negative peak learning rate. Weight decay is added before these scales if coupled,
    otherwise after them. Clipping is by the global norm of the loss's raw gradients. Every later
    transformation treats each parameter on its own.

    Args:
        config: Name of the optimizer, and its constants.
        specs: Specs of the trained parameters, by name.
        matrix_steps: Blocks and measured norms of matrices (`Preset.matrix_steps`). Only Muon takes
            others than the default, which are whole matrices and no measured norms.
    """
    row = OPTIMIZERS[config.name]
    direction_of: Any = function_of(row.direction)
    if matrix_steps == WHOLE_MATRICES:
        # Only Muon takes the third argument.
        direction = direction_of(config, specs)
    else:
        direction = direction_of(config, specs, matrix_steps)
    if config.moment_dtype is not None and row.first_moment is not None:
        direction = stored(direction, row.first_moment, config.moment_dtype)
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = _clip(config.clip_norm, specs)
    coupled = config.decay == "coupled"
    # Coupled decay is before the learning rate and scales with it, independent decay after it.
    return optax.chain(
        clip,
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
    """Return the first updates that are not zero, and the optimizer state after them.

    Updates that only fill the state (`Optimizer.still_steps`) are taken before, on the same
    gradients.

    Args:
        tx: Chain of `build`, or one that is written by hand.
        name: Name of the optimizer in `OPTIMIZERS`.
        params: Parameters, with the names of `grads`. `None` for a chain that reads none.
        **extra: Further arguments of `tx.update`.
    """
    extended = optax.with_extra_args_support(tx)
    # A hand-written chain that reads no parameters needs only shapes, which gradients have.
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
    param_scales: Mapping[str, jax.Array] | None = None,
    layout: Layout = ONE_DEVICE,
) -> tuple[Any, Any]:
    """Return the parameters and the optimizer state after one update.

    Args:
        tx: Chain of `build`.
        grads: Gradients of the trained parameters, by name.
        params: Parameters before the update, with the names of `grads`.
        factors: Factors of the preset (`factors.Factors`).
        hyper: Hyperparameters of this step (`OptimizerHyperparams.at`).
        rounding_seed: uint32 [], if arrays are stored in bfloat16. All arithmetic is then in
            float32, and arrays that are stored in bfloat16 are rounded stochastically.
        step: Number of optimizer steps done, int32 []. Required with `rounding_seed`, and not read
            without.
        param_scales: Factors on parameters after their update, by name, which broadcast against
            them. Parameters that it does not name keep their update. Default: none.
        layout: Placement of the parameters. Only Muon reads it.
    """
    if rounding_seed is None:
        updates, opt_state = tx.update(
            grads, opt_state, params, factors=factors, hyper=hyper, layout=layout
        )
        return _scaled(optax.apply_updates(params, updates), param_scales), opt_state

    wide_grads, wide_state, wide_params = widened((grads, opt_state, params))
    updates, new_state = tx.update(
        wide_grads, wide_state, wide_params, factors=factors, hyper=hyper, layout=layout
    )
    new_params = _scaled(optax.apply_updates(wide_params, updates), param_scales)
    return narrowed((new_params, new_state), (params, opt_state), Rounding(rounding_seed, step))


def _scaled(params: Any, scales: Mapping[str, jax.Array] | None) -> Any:
    """Return parameters times the `param_scales` of `apply_gradients`.

    Parameters that `scales` does not name are unchanged, as are all if it is `None`.
    """
    if scales is None:
        return params
    return {**params, **{name: params[name] * scale for name, scale in scales.items()}}


def _clip(norm: float, specs: Mapping[str, ParamSpec]) -> optax.GradientTransformation:
    """Return a transformation that clips the loss's gradient by its global norm.

    A router's bias is updated by expert loads and not by a gradient of the loss
    (`ParamSpec.moved_by_loads`). Such updates do not count in the norm and are not clipped.
    """
    clip = optax.clip_by_global_norm(norm)
    load_names = set()
    for name, spec in specs.items():
        if spec.moved_by_loads:
            load_names.add(name)
    if not load_names:
        return clip

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads = {name: grad for name, grad in updates.items() if name not in load_names}
        clipped, state = clip.update(grads, state, params)
        clipped: Any = clipped
        merged = {}
        for name in updates:
            merged[name] = updates[name] if name in load_names else clipped[name]
        return merged, state

    return optax.GradientTransformation(clip.init, update)


class _ParamFactors(NamedTuple):
    """Factors of one parameter that the chain applies, [] or [layers]."""

    lr: Any
    weight_decay: Any


def _stateless(
    rule: Callable[[jax.Array, jax.Array, _ParamFactors, Any], jax.Array],
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation without state that applies a rule to every parameter's update.

    Args:
        rule: Function (update, parameter, factors of the parameter, hyper) -> new update. A chain
            that gets no parameters passes the update in place of the parameter.
    """

    def update(updates, state, params=None, *, factors, hyper=None, **_):
        if params is None:
            params = updates
        new_updates = {}
        for name, u in updates.items():
            param_factors = _ParamFactors(factors.lr[name], factors.weight_decay[name])
            new_updates[name] = rule(u, params[name], param_factors, hyper)
        return new_updates, state

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    return optax.GradientTransformationExtraArgs(init, cast("Any", update))


def _coupled_decay(u: jax.Array, w: jax.Array, factors: _ParamFactors, hyper: Any) -> jax.Array:
    return u + rows(hyper.weight_decay * factors.weight_decay, w) * w


def _preset_scale(u: jax.Array, w: jax.Array, factors: _ParamFactors, hyper: Any) -> jax.Array:
    return u * rows(factors.lr, w)


def _schedule_scale(u: jax.Array, w: jax.Array, factors: _ParamFactors, hyper: Any) -> jax.Array:
    return (-(hyper.peak_lr * hyper.schedule) * u).astype(u.dtype)


def _independent_decay(u: jax.Array, w: jax.Array, factors: _ParamFactors, hyper: Any) -> jax.Array:
    return u - rows(hyper.weight_decay * hyper.schedule * factors.weight_decay, w) * w


add_coupled_decay = _stateless(_coupled_decay)
"""u + wd * factors.weight_decay * w, which the learning rate then scales."""
scale_by_preset = _stateless(_preset_scale)
"""u * factors.lr: the learning rate of each parameter relative to the one peak learning rate."""
scale_by_schedule = _stateless(_schedule_scale)
"""-peak_lr * schedule * u."""
add_independent_decay = _stateless(_independent_decay)
"""u - wd * schedule * factors.weight_decay * w: decay by the schedule, not the learning rates."""
