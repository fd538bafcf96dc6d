"""Residual kernels of finite models at initialization, and how far they are from the recursion of `scripts.figures.initialization.kernels`."""

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
"""(alpha_A, alpha_L) at both ends of their ranges."""


def name(ends: Sequence[float]) -> str:
    """Of a pair of exponents, in a row."""
    return f"alpha_A = {ends[0]:g}, alpha_L = {ends[1]:g}"


def title(ends: Sequence[float]) -> str:
    """Of a pair of exponents, in a picture."""
    return rf"$\alpha_A$ = {ends[0]:g}, $\alpha_L$ = {ends[1]:g}"


def limits(settings: Settings, head_dim: int | None) -> np.ndarray:
    """Kernels of the recursion at every pair of `ENDS`, [pairs, L + 1, M, M] with M the positions of all images."""
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
        one = kernels.residual_kernels(
            first, **rule, head_dim=head_dim, samples=settings["samples"]
        )
        by_pair.append(one.layers.reshape(-1, side, side))
    return np.stack(by_pair)


def finite(settings: Settings, head_dim: int, heads: int) -> np.ndarray:
    """Kernels h.h'/D of models at every pair of `ENDS`, [pairs, seeds, L + 1, M, M]; a seed's weights serve all pairs."""
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
    presets = [
        models.absolute(alpha_a=one, alpha_l=other, beta0=settings["beta0"]) for one, other in ENDS
    ]
    return np.stack(
        [np.stack(program(seed, presets)) for seed in range(settings["seeds"])], axis=1
    ).astype(np.float64)


def products(model_kernels: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Products of the errors of seeds s and t in the last layer, over the limit's square: [pairs, seeds, seeds].

    The diagonal is every seed's squared error, the mean of all the squared error of the seeds' mean kernel.
    """
    error = model_kernels[:, :, -1] - limit[:, None, -1]
    return (
        np.einsum("psij,ptij->pst", error, error)
        / np.einsum("pij,pij->p", limit[:, -1], limit[:, -1])[:, None, None]
    )


def squared(product: Any) -> np.ndarray:
    """Every seed's squared error, from products [..., seeds, seeds]."""
    return np.einsum("...ss->...s", np.asarray(product))


def of_mean(what: str, product: Any, **more: Any) -> Row:
    """The row of the error of the mean kernel of all seeds, as a fraction of the limit, from products [seeds, seeds]."""
    product = np.asarray(product)
    seeds = len(product)
    one = float(np.trace(product)) / seeds
    shared = (float(product.sum()) - seeds * one) / (seeds * (seeds - 1))
    more["note"] = (
        f"Squared: {one:.2g} for one model, {shared:+.1g} less the seeds' noise. {more.get('note', '')}".strip()
    )
    measured, low, high = jackknife(
        lambda subset: math.sqrt(product[np.ix_(subset, subset)].mean()), len(product)
    )
    row = {"predicted": 0.0, "tolerance": 0.03, "kind": "value", **more}
    return Row(what=what, measured=measured, low=max(low, 0.0), high=high, **row)


def sums(layers: np.ndarray) -> np.ndarray:
    """What is drawn of kernels [..., M, M]: mean of the diagonal and mean off it, [..., 2]."""
    side = layers.shape[-1]
    diagonal = np.einsum("...ii->...", layers) / side
    return np.stack(
        [diagonal, (layers.mean(axis=(-2, -1)) * side - diagonal) / (side - 1)], axis=-1
    )
