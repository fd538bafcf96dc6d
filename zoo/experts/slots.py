"""Tokens on their way into experts' slots and back, by lookups alone: no gradient is scattered.

T tokens, D width, A experts of a token, R = T A rows, one per token and expert of its own, S slots of all experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """Which slot a row is in, and which row a slot has, int32."""

    of_TA: jax.Array
    """S where there is no room."""
    rows_S: jax.Array
    """R where a slot is empty."""

    @staticmethod
    def of(place_TA: jax.Array, slots: int) -> Slots:
        """From the slot of every row.

        Args:
            place_TA: slot of a row; `slots` where there is no room.
            slots: S.
        """
        rows = place_TA.size
        empty_S = jnp.full(slots, rows, jnp.int32)
        return Slots(place_TA, empty_S.at[place_TA.reshape(-1)].set(jnp.arange(rows), mode="drop"))

    def filled(self, x_TD: jax.Array) -> jax.Array:
        """[S, D]: the token of every slot; of an empty one any token, which `weights` of 0 leave without effect and gradient."""
        return _summed(("clip", "fill"), x_TD, self._tokens(), self.of_TA)

    def weights(self, weights_TA: jax.Array) -> jax.Array:
        """[S]: what the output of every slot counts, 0 in empty ones."""
        of_R1, weights_R1 = self.of_TA.reshape(-1, 1), weights_TA.reshape(-1, 1)
        return _summed(("fill", "fill"), weights_R1, self.rows_S[:, None], of_R1)[:, 0]

    def collected(self, y_SD: jax.Array) -> jax.Array:
        """[T, D]: the sum of a token's slots; the gradient of an empty one is that of any token."""
        return _summed(("fill", "clip"), y_SD, self.of_TA, self._tokens())

    def _tokens(self) -> jax.Array:
        return (self.rows_S // self.of_TA.shape[1])[:, None]


def _sums(modes: tuple[str, str], x_ID: jax.Array, of_OK: jax.Array, of_IK: jax.Array) -> jax.Array:
    """[O, D]: sums of K rows of x each.

    Args:
        modes: what an index past the last row is of, here and for the gradient: of none (fill), which takes a pass of its own over a
            result of one row each, or of the last row (clip).
        x_ID: rows.
        of_OK: those that a row of the result sums.
        of_IK: rows of the result that a row of x is in, which has the gradient of x as the same kind of sum.
    """
    return jnp.sum(x_ID.at[of_OK].get(mode=modes[0], fill_value=0), axis=1)


_summed = jax.custom_vjp(_sums, nondiff_argnums=(0,))


def _forward(modes: tuple[str, str], x_ID: jax.Array, of_OK: jax.Array, of_IK: jax.Array) -> tuple[jax.Array, Any]:
    return _summed(modes, x_ID, of_OK, of_IK), (of_OK, of_IK)


def _backward(modes: tuple[str, str], of: Any, g_OD: jax.Array) -> tuple[jax.Array, None, None]:
    of_OK, of_IK = of
    return _summed(modes[::-1], g_OD, of_IK, of_OK), None, None


_summed.defvjp(_forward, _backward)
