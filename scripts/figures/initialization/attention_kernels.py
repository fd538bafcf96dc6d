"""Kernel of what attention adds to the residual stream, averaged over infinitely many heads at initialization.

V[x, t, x', t'] = mean over heads of the sum over r, r' of w[x, t, r] w[x', t', r'] C[x, r, x', r'], with C the kernel of
what keys and values read (diagonal 1) and w = softmax over the r that t sees of the logits A[x, t, r] = N^-alpha_A k[x, r].q[x, t].
In a head the N components of k are independent Gaussians with covariance C, those of q with that of what queries read, Q
(Bordelon et al. 2024, section 2.1; there, as in all self-attention, Q = C).
As N grows A vanishes for alpha_A above 1/2: attention is uniform. At 1/2 it becomes Gaussian, with covariance
Q[x, t, x', t'] C[x, r, x', r'] between A[x, t, r] and A[x', t', r']. Needs numpy; X inputs, T query and S key positions.
"""

from __future__ import annotations

import numpy as np

_CHUNK = 2**22
"""Numbers of the largest array at a time: memory stays small however many heads are drawn."""


def is_uniform(alpha_a: float, head_dim: int | None) -> bool:
    """Whether every head attends to all positions alike, so that nothing need be drawn."""
    return head_dim is None and alpha_a > 0.5


def uniform(keys: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """V for attention logits of 0, [X, T, X, T]: the mean of the kernel over what both positions see.

    Args:
        keys: C, [X, S, X, S].
        mask: bool [X, T, S], the keys that a query attends to.
    """
    weights = mask / mask.sum(axis=-1, keepdims=True)
    return np.einsum("xtr,xryq,yuq->xtyu", weights, keys, weights, optimize=True)


def sampled(
    queries: np.ndarray,
    keys: np.ndarray,
    mask: np.ndarray,
    alpha_a: float,
    head_dim: int | None,
    heads: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """V as the mean over heads that are drawn.

    Args:
        queries: Q, [X, T, X, T] with diagonal 1.
        keys: C, [X, S, X, S] with diagonal 1.
        mask: bool [X, T, S], the keys that a query attends to.
        alpha_a: exponent of the logits' scale.
        head_dim: N; None for the Gaussian logits of N to infinity, for alpha_a = 1/2.
        heads: how many to draw.
        rng: where from.

    Returns:
        [X, T, X, T].
    """
    (inputs, rows), columns = queries.shape[:2], keys.shape[1]
    of_queries, of_keys = (
        _root(queries.reshape(inputs * rows, -1)),
        _root(keys.reshape(inputs * columns, -1)),
    )
    per_input = of_keys.reshape(inputs, columns, -1)
    total = np.zeros((inputs * rows, inputs * rows))
    (first, rank), most = (of_queries.shape[1], of_keys.shape[1]), max(rows, columns)
    at_once = max(1, _CHUNK // max(first * rank, inputs * most * max(columns, rank, head_dim or 1)))
    for start in range(0, heads, at_once):
        count = min(at_once, heads - start)  # K heads at once: matrix products are over all of them
        if head_dim is None:
            draws = of_queries @ rng.standard_normal((first, count * rank))  # [X T, K rank]
            logits = draws.reshape(inputs, rows * count, rank) @ per_input.swapaxes(
                1, 2
            )  # [X, T K, S]
        else:
            query, key = (
                (root @ rng.standard_normal((root.shape[1], count * head_dim))).reshape(
                    inputs, -1, count, head_dim
                )
                for root in (of_queries, of_keys)
            )
            products = query.swapaxes(1, 2) @ key.transpose(0, 2, 3, 1)  # [X, K, T, S]
            logits = head_dim**-alpha_a * products.swapaxes(1, 2).reshape(
                inputs, rows * count, columns
            )
        logits = np.where(np.repeat(mask, count, axis=1), logits, -np.inf)
        values = (_softmax(logits) @ per_input).reshape(inputs * rows, count * rank)
        total += values @ values.T
    return (total / heads).reshape(queries.shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _root(matrix: np.ndarray) -> np.ndarray:
    """R with R R^T = matrix, [M, rank]; fewer columns than rows where patches repeat or have few pixels."""
    values, vectors = np.linalg.eigh(matrix)
    positive = values > 1e-12 * values[-1]
    return vectors[:, positive] * np.sqrt(values[positive])
