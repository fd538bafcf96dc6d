"""Residual kernels of finite models at initialization, and their distance from the limit.

The limit is that of many heads, computed by the recursion of `kernels.py`. Shapes: L blocks, M
positions of all inputs together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mupax.train.studies.infinite.command import patches
from scripts.figures import models
from scripts.figures.initialization import kernels
from scripts.figures.result import Row, Settings, jackknife

ENDS = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 0.5))
"""Pairs (alpha_A, alpha_L) of exponents at both ends of their ranges."""


def name(ends: Sequence[float]) -> str:
    """Return the text for a pair of exponents (alpha_A, alpha_L) in descriptions of rows."""
    return f"alpha_A = {ends[0]:g}, alpha_L = {ends[1]:g}"


def title(ends: Sequence[float]) -> str:
    """Return the text for a pair of exponents (alpha_A, alpha_L) in pictures, with TeX."""
    return rf"$\alpha_A$ = {ends[0]:g}, $\alpha_L$ = {ends[1]:g}"


def limits(settings: Settings, head_dim: int | None) -> np.ndarray:
    """Return residual kernels [pairs, L + 1, M, M] in the limit of many heads, for `ENDS`.

    Args:
        head_dim: N, or `None` for N to infinity.
    """
    first = kernels.input_kernel(patches(models.images(settings["images"]), 2))
    side = first.shape[0] * first.shape[1]
    by_pair = []
    for alpha_a, alpha_l in ENDS:
        rule = {
            "alpha_a": alpha_a,
            "alpha_l": alpha_l,
            "beta0": settings["beta0"],
            "depth": settings["depth"],
        }
        limit = kernels.residual_kernels(
            first, **rule, head_dim=head_dim, samples=settings["samples"]
        )
        by_pair.append(limit.layers.reshape(-1, side, side))
    return np.stack(by_pair)


def finite(settings: Settings, head_dim: int, heads: int) -> np.ndarray:
    """Return residual kernels h.h'/D [pairs, seeds, L + 1, M, M] of finite models, for `ENDS`.

    Models of the same seed have the same initial weights under all pairs of exponents.
    """
    import jax
    import jax.numpy as jnp

    from mupax.train.studies.check.observables import internals

    images = jnp.asarray(models.images(settings["images"]))

    def look(model: Any) -> jax.Array:
        activations = internals(model, images)
        stream = jnp.concatenate([activations["embedding"][None], activations["residual"]])
        flat = stream.reshape(len(stream), -1, stream.shape[-1])
        return flat @ flat.swapaxes(1, 2) / stream.shape[-1]

    config = models.vit(head_dim=head_dim, heads=heads, depth=settings["depth"])
    program = models.at_initialization(config, look)
    presets = []
    for alpha_a, alpha_l in ENDS:
        presets.append(models.absolute(alpha_a=alpha_a, alpha_l=alpha_l, beta0=settings["beta0"]))
    by_seed = [np.stack(program(seed, presets)) for seed in range(settings["seeds"])]
    return np.stack(by_seed, axis=1).astype(np.float64)


def products(model_kernels: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Return inner products of two seeds' errors in the last layer, over the limit's square.

    An error is a model's kernel less the limit. The result is [pairs, seeds, seeds]. Its diagonal
    has every seed's squared error, and its mean is the squared error of the seeds' mean kernel.

    Args:
        model_kernels: Kernels [pairs, seeds, L + 1, M, M] of models.
        limit: Kernels [pairs, L + 1, M, M] of the recursion.
    """
    error = model_kernels[:, :, -1] - limit[:, None, -1]
    limit_square = np.einsum("pij,pij->p", limit[:, -1], limit[:, -1])
    return np.einsum("psij,ptij->pst", error, error) / limit_square[:, None, None]


def squared(product: Any) -> np.ndarray:
    """Return the diagonal [..., seeds] of `products`: every seed's relative squared error.

    Args:
        product: Result of `products`, [..., seeds, seeds].
    """
    return np.einsum("...ss->...s", np.asarray(product))


def of_mean(description: str, product: Any, **fields: Any) -> Row:
    """Return the row of the error of the seeds' mean kernel, relative to the limit.

    Args:
        product: Result of `products` for one pair, [seeds, seeds].
        fields: Further fields of `Row`.
    """
    product = np.asarray(product)
    seeds = len(product)
    one_model = float(np.trace(product)) / seeds
    # Errors of different seeds share the distance of the mean from the limit, but no noise.
    shared = (float(product.sum()) - seeds * one_model) / (seeds * (seeds - 1))
    squared_words = f"Squared: {one_model:.2g} for one model, {shared:+.1g} less the seeds' noise."
    fields["note"] = f"{squared_words} {fields.get('note', '')}".strip()

    def error_of_mean(subset: np.ndarray) -> float:
        return math.sqrt(product[np.ix_(subset, subset)].mean())

    measured, low, high = jackknife(error_of_mean, seeds)
    row = {"predicted": 0.0, "tolerance": 0.03, "kind": "value", **fields}
    return Row(what=description, measured=measured, low=max(low, 0.0), high=high, **row)


def sums(layers: np.ndarray) -> np.ndarray:
    """Return the mean of the diagonal and the mean off it, [..., 2], of kernels [..., M, M]."""
    side = layers.shape[-1]
    diagonal = np.einsum("...ii->...", layers) / side
    off_diagonal = (layers.mean(axis=(-2, -1)) * side - diagonal) / (side - 1)
    return np.stack([diagonal, off_diagonal], axis=-1)
