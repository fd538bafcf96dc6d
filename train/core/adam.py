"""Adam's direction with an eps per parameter, which optax's own does not take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax


def scale_by_adam(b1: float, b2: float) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with eps * factors.eps per parameter: m_hat / (sqrt(v_hat) + eps)."""

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(
            jnp.zeros([], jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        )

    def update(updates, state, params=None, *, factors, hyper, **_):
        del params
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        count = optax.safe_increment(state.count)
        mu_hat, nu_hat = optax.tree.bias_correction(mu, b1, count), optax.tree.bias_correction(nu, b2, count)
        eps = jax.tree.map(lambda factor: hyper.eps * factor, factors.eps)
        scaled = jax.tree.map(lambda m, v, e: m / (jnp.sqrt(v) + rows(e, v)), mu_hat, nu_hat, eps)
        return scaled, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def rows(number: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
    """A scalar or per-layer number shaped to broadcast against a parameter."""
    number = jnp.asarray(number)
    return number.reshape(number.shape + (1,) * (like.ndim - number.ndim)).astype(like.dtype)
