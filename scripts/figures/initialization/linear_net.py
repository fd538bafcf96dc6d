"""Mean-field deep linear net before and after one step of gradient descent, at very large widths.

    h^1 = D_in^(-1/2) W^0 x
    h^(l+1) = N^(-1/2) W^l h^l
    f = w.h^L / (gamma0 N)                               centred: f(0) = 0

There is one example with |x|^2 = D_in and target 1, and the loss is (1 - f)^2 / 2. All entries are
Normal(0, 1), and the learning rate is eta gamma0^2 N. After the step every layer's kernel
|h^l|^2 / N tends to 1 + (eta gamma0)^2 l (l + 1) (2 l + 1) / 6 as N grows (derived from the
dynamics of Bordelon et al. 2024).
"""

from __future__ import annotations

import numpy as np


def limit(layer: np.ndarray, rate: float) -> np.ndarray:
    """Return the limit of a layer's kernel after the step.

    Args:
        layer: Number of the layer, counted from 1.
        rate: eta gamma0.
    """
    return 1 + rate**2 * layer * (layer + 1) * (2 * layer + 1) / 6


def one_step(
    depth: int, width: int, rate: float, rng: np.random.Generator, *, response: bool = True
) -> np.ndarray:
    """Return kernels |h^l|^2 / N [L] of layers 1 to L after one step, without forming matrices.

    A layer's Gaussian matrix W acts on three vectors only: forward on h, backward on the signal g,
    and forward on the new h. Each product is drawn from its distribution given the products before.
    So the result has the distribution of the net with matrices, at a cost of order N, not N^2.

    Args:
        depth: Number of layers `L`.
        width: Width `N`.
        rate: eta gamma0.
        response: Whether updates point along the backward signal. Otherwise they point along random
            vectors that are independent of the weights, so that the terms by which weights respond
            to their own updates vanish.
    """
    normal = rng.standard_normal
    root = np.sqrt(width)

    # Forward pass. `forward` has W u, where u is the direction of h.
    h = [normal(width)]
    forward = []
    for _ in range(depth - 1):
        forward.append(normal(width))
        h.append(forward[-1] * np.linalg.norm(h[-1]) / root)

    # Backward pass. `backward` has W^T v less its part along u, which W u determines; v is the
    # direction of g.
    g = [normal(width)]
    backward = []
    for layer in reversed(range(depth - 1)):
        u = _unit(h[layer])
        v = _unit(g[0])
        norm = np.linalg.norm(g[0])
        backward.insert(0, _without(u, normal(width)))
        g.insert(0, (u * (forward[layer] @ v) + backward[0]) * norm / root)

    # Forward pass with the updated matrices.
    update_directions = g
    if not response:
        update_directions = [normal(width) for _ in g]
    new_h = [h[0] + rate * update_directions[0]]
    for layer in range(depth - 1):
        u = _unit(h[layer])
        v = _unit(g[layer + 1])
        orthogonal = _without(u, new_h[-1])
        fresh = np.linalg.norm(orthogonal) * _without(v, normal(width))
        product = (u @ new_h[-1]) * forward[layer] + v * (backward[layer] @ orthogonal) + fresh
        update = rate * update_directions[layer + 1] * (h[layer] @ new_h[-1]) / width
        new_h.append(product / root + update)
    return np.array([vector @ vector / width for vector in new_h])


def one_step_dense(depth: int, width: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return kernels |h^l|^2 / N [L] after one step of a net with all its matrices.

    This is the reference for `one_step` at small widths, with the gradient of the loss written out.

    Args:
        depth: Number of layers `L`.
        width: Width `N`.
        rate: eta gamma0.
    """
    matrices = [rng.standard_normal((width, width)) for _ in range(depth - 1)]
    h = [rng.standard_normal(width)]
    g = [rng.standard_normal(width)]
    for matrix in matrices:
        h.append(matrix @ h[-1] / np.sqrt(width))
    for matrix in reversed(matrices):
        g.insert(0, matrix.T @ g[0] / np.sqrt(width))
    new_h = [h[0] + rate * g[0]]
    for layer, matrix in enumerate(matrices):
        updated = matrix + rate * np.outer(g[layer + 1], h[layer]) / np.sqrt(width)
        new_h.append(updated @ new_h[-1] / np.sqrt(width))
    return np.array([vector @ vector / width for vector in new_h])


def _unit(vector: np.ndarray) -> np.ndarray:
    """Return the direction of a vector."""
    return vector / np.linalg.norm(vector)


def _without(unit: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return a vector less its part along a unit vector."""
    return vector - unit * (unit @ vector)
