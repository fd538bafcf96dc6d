"""Kernel of what attention adds to the residual stream, averaged over infinitely many heads at initialization.

V[x, s, x', s'] = mean over heads of the sum over r, r' of w[x, s, r] w[x', s', r'] C[x, r, x', r'], with C the kernel of
attention's input (diagonal 1) and w = softmax over r of the logits A[x, s, r] = N^-alpha_A k[x, r].q[x, s]. In a head the N
components of k and of q are independent Gaussians with covariance C (Bordelon et al. 2024, section 2.1).
As N grows A vanishes for alpha_A above 1/2: attention is uniform. At 1/2 it becomes Gaussian, with covariance
C[x, s, x', s'] C[x, r, x', r'] between A[x, s, r] and A[x', s', r']. Needs numpy; X inputs, S positions, M = X S.
"""

from __future__ import annotations

import numpy as np

_CHUNK = 2**22
"""Numbers of the largest array at a time: memory stays small however many heads are drawn."""


def is_uniform(alpha_a: float, head_dim: int | None) -> bool:
    """Whether every head attends to all positions alike, so that nothing need be drawn."""
    return head_dim is None and alpha_a > 0.5


def uniform(kernel: np.ndarray) -> np.ndarray:
    """V for attention logits of 0: the mean of the kernel over both positions, at every pair of them; [X, S, X, S]."""
    return np.broadcast_to(kernel.mean(axis=(1, 3), keepdims=True), kernel.shape)


def sampled(
    kernel: np.ndarray, alpha_a: float, head_dim: int | None, heads: int, rng: np.random.Generator
) -> np.ndarray:
    """V as the mean over heads that are drawn.

    Args:
        kernel: C, [X, S, X, S] with diagonal 1.
        alpha_a: exponent of the logits' scale.
        head_dim: N; None for the Gaussian logits of N to infinity, for alpha_a = 1/2.
        heads: how many to draw.
        rng: where from.

    Returns:
        [X, S, X, S].
    """
    inputs, positions = kernel.shape[:2]
    root = _root(kernel.reshape(inputs * positions, -1))
    per_input = root.reshape(inputs, positions, -1)
    total = np.zeros((inputs * positions, inputs * positions))
    rank = root.shape[1]
    at_once = max(1, _CHUNK // max(rank * rank, inputs * positions * max(positions, rank, head_dim or 1)))
    for start in range(0, heads, at_once):
        count = min(at_once, heads - start)  # K heads at once: matrix products are over all of them
        if head_dim is None:
            rows = root @ rng.standard_normal((rank, count * rank))  # [M, K rank]
            logits = rows.reshape(inputs, positions * count, rank) @ per_input.swapaxes(1, 2)  # [X, S K, S]
        else:
            shape = (inputs, positions, count, head_dim)
            draws = rng.standard_normal((2, rank, count * head_dim))
            query, key = ((root @ one).reshape(shape).swapaxes(1, 2) for one in draws)  # [X, K, S, N]
            logits = head_dim**-alpha_a * (query @ key.swapaxes(2, 3)).swapaxes(1, 2)  # [X, S, K, S]
            logits = logits.reshape(inputs, positions * count, positions)
        values = (_softmax(logits) @ per_input).reshape(inputs * positions, count * rank)
        total += values @ values.T
    return (total / heads).reshape(kernel.shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _root(matrix: np.ndarray) -> np.ndarray:
    """R with R R^T = matrix, [M, rank]; fewer columns than rows where patches repeat or have few pixels."""
    values, vectors = np.linalg.eigh(matrix)
    kept = values > 1e-12 * values[-1]
    return vectors[:, kept] * np.sqrt(values[kept])
