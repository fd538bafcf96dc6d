"""A mean-field deep linear net before and after one step of gradient descent, at widths that no matrix would fit.

    h^1 = D_in^(-1/2) W^0 x      h^(l+1) = N^(-1/2) W^l h^l      f = w.h^L / (gamma0 N)      centred: f(0) = 0

One example with |x|^2 = D_in, target 1, loss (1 - f)^2 / 2, all entries Normal(0, 1), rate eta gamma0^2 N. After the step every
layer's kernel |h^l|^2 / N tends to 1 + (eta gamma0)^2 l (l + 1) (2 l + 1) / 6 as N grows (derived from the paper's dynamics).
"""

from __future__ import annotations

import numpy as np


def limit(layer: np.ndarray, rate: float) -> np.ndarray:
    """The kernel of a layer (counted from 1) after the step, with rate = eta gamma0."""
    return 1 + rate**2 * layer * (layer + 1) * (2 * layer + 1) / 6


def one_step(
    depth: int, width: int, rate: float, rng: np.random.Generator, *, response: bool = True
) -> np.ndarray:
    """Kernels |h^l|^2 / N of layers 1 to L after one step.

    A layer's Gaussian matrix W acts on three vectors only: forward on h, backward on the signal g, and forward on the new h.
    Each product is drawn from its law given those before it, so the result has the law of the net with matrices, with numbers
    of the order N in place of N^2.

    Args:
        depth: layers L.
        width: N.
        rate: eta gamma0.
        rng: where from.
        response: whether updates point along the backward signal. Without, they point along one that knows nothing of the
            weights, and the terms by which weights respond to their own updates are gone.

    Returns:
        [L].
    """
    normal, root = rng.standard_normal, np.sqrt(width)
    h, forward = [normal(width)], []
    for _ in range(depth - 1):
        forward.append(normal(width))  # W u, u the direction of h
        h.append(forward[-1] * np.linalg.norm(h[-1]) / root)
    g, backward = [normal(width)], []
    for layer in reversed(range(depth - 1)):
        u, v, size = _unit(h[layer]), _unit(g[0]), np.linalg.norm(g[0])
        backward.insert(
            0, _without(u, normal(width))
        )  # W^T v less its part along u, which W u has fixed
        g.insert(0, (u * (forward[layer] @ v) + backward[0]) * size / root)
    pushed = g if response else [normal(width) for _ in g]
    new = [h[0] + rate * pushed[0]]
    for layer in range(depth - 1):
        u, v = _unit(h[layer]), _unit(g[layer + 1])
        rest = _without(u, new[-1])
        unseen = np.linalg.norm(rest) * _without(v, normal(width))
        product = (u @ new[-1]) * forward[layer] + v * (backward[layer] @ rest) + unseen
        new.append(product / root + rate * pushed[layer + 1] * (h[layer] @ new[-1]) / width)
    return np.array([one @ one / width for one in new])


def one_step_dense(depth: int, width: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """The same with matrices and the gradient of the loss written out, for small widths: what `one_step` is held against."""
    matrices = [rng.standard_normal((width, width)) for _ in range(depth - 1)]
    h, g = [rng.standard_normal(width)], [rng.standard_normal(width)]
    for matrix in matrices:
        h.append(matrix @ h[-1] / np.sqrt(width))
    for matrix in reversed(matrices):
        g.insert(0, matrix.T @ g[0] / np.sqrt(width))
    new = [h[0] + rate * g[0]]
    for layer, matrix in enumerate(matrices):
        stepped = matrix + rate * np.outer(g[layer + 1], h[layer]) / np.sqrt(width)
        new.append(stepped @ new[-1] / np.sqrt(width))
    return np.array([one @ one / width for one in new])


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def _without(unit: np.ndarray, vector: np.ndarray) -> np.ndarray:
    return vector - unit * (unit @ vector)
