"""Learned positions of images of another size: bicubic on the grid of patches, the class token's own row kept."""

from __future__ import annotations

import jax
import numpy as np

from mupax.zoo.families import ModelConfig


def resized(position_TD: np.ndarray, before: ModelConfig, after: ModelConfig) -> np.ndarray:
    """Positions for another grid.

    Args:
        position_TD: of `before`, [T, D].
        before: the model that they are of.
        after: the model that they are for. A class token that only it has gets a row of zeros.

    Returns:
        float32 [T', D]. A grid of the same size keeps its numbers.
    """
    old, new = before.position_grid, after.position_grid
    own = position_TD.shape[0] - old**2  # the class token's row, first
    grid_GGD = position_TD[own:].astype(np.float32).reshape(old, old, -1)
    if old != new:
        shape = (new, new, grid_GGD.shape[-1])
        # Smaller grids are filtered before they are sampled (antialias), as timm does it.
        grid_GGD = np.asarray(jax.image.resize(grid_GGD, shape, "bicubic", antialias=True))
    class_row = position_TD[:own] if own else np.zeros_like(position_TD[:1])
    class_row = class_row[: after.sizes()["position"] - new**2]
    return np.concatenate([class_row, grid_GGD.reshape(-1, grid_GGD.shape[-1])]).astype(np.float32)
