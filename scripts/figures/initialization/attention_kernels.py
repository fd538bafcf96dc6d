"""Kernel V of an attention branch at initialization, averaged over infinitely many heads.

    V[x, t, x', t'] = mean over heads of sum over r, r' of w[x, t, r] w[x', t', r'] C[x, r, x', r']
    w[x, t, r] = softmax over the r that t attends to of A[x, t, r]
    A[x, t, r] = N^-alpha_A k[x, r].q[x, t]

C is the kernel of the inputs of keys and values, and Q the kernel of the inputs of queries. Both
have diagonal 1. In a head the N components of k are independent Gaussians with covariance C, and
those of q with covariance Q (Bordelon et al. 2024, section 2.1; there Q = C, as in all
self-attention).

As N grows, A vanishes for alpha_A above 1/2, so attention is uniform. At 1/2 it becomes Gaussian,
with covariance Q[x, t, x', t'] C[x, r, x', r'] between A[x, t, r] and A[x', t', r'].

Shapes: X inputs, T query positions, S key positions, K heads. The file needs NumPy alone.
"""

from __future__ import annotations

import numpy as np

_CHUNK = 2**22
"""Number of values in the largest array, which limits how many heads are drawn at once."""


def is_uniform(alpha_a: float, head_dim: int | None) -> bool:
    """Return whether every head attends uniformly, so that no heads have to be drawn.

    Args:
        head_dim: N, or `None` for N to infinity.
    """
    return head_dim is None and alpha_a > 0.5


def uniform(keys: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the kernel V [X, T, X, T] if all attention logits are 0.

    V is then the mean of the keys' kernel over all positions that both queries attend to.

    Args:
        keys: Kernel C [X, S, X, S].
        mask: Bool [X, T, S], True for keys that a query attends to.
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
    """Return the kernel V [X, T, X, T] of an attention branch, a mean over randomly drawn heads.

    Args:
        queries: Kernel Q [X, T, X, T] with diagonal 1.
        keys: Kernel C [X, S, X, S] with diagonal 1.
        mask: Bool [X, T, S], True for keys that a query attends to.
        alpha_a: Exponent of N in the scale of the logits.
        head_dim: N, or `None` for the Gaussian logits of N to infinity at alpha_a = 1/2.
    """
    num_inputs, num_queries = queries.shape[:2]
    num_keys = keys.shape[1]
    query_root = _root(queries.reshape(num_inputs * num_queries, -1))  # [X T, query rank]
    key_root = _root(keys.reshape(num_inputs * num_keys, -1))  # [X S, key rank]
    query_rank = query_root.shape[1]
    key_rank = key_root.shape[1]
    key_root_XSR = key_root.reshape(num_inputs, num_keys, -1)

    # Matrix products are over many heads at once, but over no more than fit in a chunk.
    most_positions = max(num_queries, num_keys)
    values_per_head = max(
        query_rank * key_rank,
        num_inputs * most_positions * max(num_keys, key_rank, head_dim or 1),
    )
    heads_at_once = max(1, _CHUNK // values_per_head)
    total = np.zeros((num_inputs * num_queries, num_inputs * num_queries))
    for start in range(0, heads, heads_at_once):
        count = min(heads_at_once, heads - start)
        if head_dim is None:
            draws = query_root @ rng.standard_normal((query_rank, count * key_rank))
            draws = draws.reshape(num_inputs, num_queries * count, key_rank)  # [X, T K, key rank]
            logits = draws @ key_root_XSR.swapaxes(1, 2)  # [X, T K, S]
        else:
            query_draws = query_root @ rng.standard_normal((query_rank, count * head_dim))
            key_draws = key_root @ rng.standard_normal((key_rank, count * head_dim))
            query = query_draws.reshape(num_inputs, -1, count, head_dim)  # [X, T, K, N]
            key = key_draws.reshape(num_inputs, -1, count, head_dim)  # [X, S, K, N]
            products = query.swapaxes(1, 2) @ key.transpose(0, 2, 3, 1)  # [X, K, T, S]
            products = products.swapaxes(1, 2).reshape(num_inputs, num_queries * count, num_keys)
            logits = head_dim**-alpha_a * products  # [X, T K, S]
        logits = np.where(np.repeat(mask, count, axis=1), logits, -np.inf)
        # With C = R R^T, V is the mean of (w R) (w R)^T, without a product with C itself.
        values = _softmax(logits) @ key_root_XSR
        values = values.reshape(num_inputs * num_queries, count * key_rank)
        total += values @ values.T
    return (total / heads).reshape(queries.shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _root(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix R [M, rank] with R R^T = matrix.

    The rank is below M where patches repeat or have few pixels.
    """
    values, vectors = np.linalg.eigh(matrix)
    # Eigenvalues that should be 0 come out near 1e-16 of the largest.
    positive = values > 1e-12 * values[-1]
    return vectors[:, positive] * np.sqrt(values[positive])
