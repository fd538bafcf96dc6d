"""Tokens on their way into experts' slots and back, by lookups alone: no gradient is scattered.

B batch, T positions, D width, A experts of a token, R = T A rows, one per token and expert of its own, S slots of all experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """Which slot a row is in, and which row a slot has, int32."""

    of_BR: jax.Array
    """S where there is no room."""
    rows_BS: jax.Array
    """R where a slot is empty."""
    active: int
    """A."""

    @staticmethod
    def of(place_BR: jax.Array, slots: int, active: int) -> Slots:
        """From the slot of every row.

        Args:
            place_BR: slot of a row; `slots` where there is no room.
            slots: S.
            active: A.
        """
        batch, rows = place_BR.shape
        empty_BS = jnp.full((batch, slots), rows, jnp.int32)
        rows_BS = empty_BS.at[jnp.arange(batch)[:, None], place_BR].set(jnp.arange(rows), mode="drop")
        return Slots(place_BR, rows_BS, active)

    def filled(self, x_BTD: jax.Array) -> jax.Array:
        """[B, S, D]: the token of every slot; of an empty one any token, which `weights` of 0 leave without effect and gradient."""
        return _summed(("clip", "fill"), x_BTD, self._tokens(), self._of_token())

    def weights(self, weights_BTA: jax.Array) -> jax.Array:
        """[B, S]: what the output of every slot counts, 0 in empty ones."""
        rows_BR1 = weights_BTA.reshape(*self.of_BR.shape, 1)
        gates_BS1 = _summed(("fill", "fill"), rows_BR1, self.rows_BS[..., None], self.of_BR[..., None])
        return gates_BS1.reshape(self.rows_BS.shape)

    def collected(self, y_BSD: jax.Array) -> jax.Array:
        """[B, T, D]: the sum of a token's slots; the gradient of an empty one is that of any token."""
        return _summed(("fill", "clip"), y_BSD, self._of_token(), self._tokens())

    def _tokens(self) -> jax.Array:
        return (self.rows_BS // self.active)[..., None]

    def _of_token(self) -> jax.Array:
        return self.of_BR.reshape(self.of_BR.shape[0], -1, self.active)


def _sums(modes: tuple[str, str], x_BID: jax.Array, of_BOK: jax.Array, of_BIK: jax.Array) -> jax.Array:
    """[B, O, D]: sums of K rows of x each.

    Args:
        modes: what an index past the last row is of, here and for the gradient: of none (fill), which takes a pass of its own over a
            result of one row each, or of the last row (clip).
        x_BID: rows.
        of_BOK: those that a row of the result sums.
        of_BIK: rows of the result that a row of x is in, which has the gradient of x as the same kind of sum.
    """
    b_B11 = jnp.arange(len(x_BID))[:, None, None]
    return jnp.sum(x_BID.at[b_B11, of_BOK].get(mode=modes[0], fill_value=0), axis=2)


_summed = jax.custom_vjp(_sums, nondiff_argnums=(0,))


def _forward(modes: tuple[str, str], x_BID: jax.Array, of_BOK: jax.Array, of_BIK: jax.Array) -> tuple[jax.Array, Any]:
    return _summed(modes, x_BID, of_BOK, of_BIK), (of_BOK, of_BIK)


def _backward(modes: tuple[str, str], of: Any, g_BOD: jax.Array) -> tuple[jax.Array, None, None]:
    of_BOK, of_BIK = of
    return _summed(modes[::-1], g_BOD, of_BIK, of_BOK), None, None


_summed.defvjp(_forward, _backward)
