"""Fixed position embeddings of vision transformers (`ViTConfig.sincos`). Imports no JAX."""

from __future__ import annotations

import numpy as np

from mupax.zoo.vit.config import ViTConfig


def sines(config: ViTConfig) -> np.ndarray:
    """Return fixed position embeddings, float32 [T, D], with zeros for the CLS token.

    D, the width, must be a multiple of 4.

    A patch's features are sine and cosine of its column, then of its row, a quarter of the features
    each. The wavelength of feature i of a quarter is 2 pi 10000^(i / (D/4 - 1)), i from 0 (Chen et
    al. 2021, in the order of MoCo v3 and big_vision).
    """
    grid = config.position_grid
    quarter = config.width // 4
    frequency_F = 10_000.0 ** -(np.arange(quarter) / max(1, quarter - 1))
    rows, columns = np.mgrid[:grid, :grid]
    # Patches P are in row-major order.
    row_PF = rows.reshape(-1, 1) * frequency_F
    column_PF = columns.reshape(-1, 1) * frequency_F
    table_PD = np.concatenate(
        [np.sin(column_PF), np.cos(column_PF), np.sin(row_PF), np.cos(row_PF)], axis=1
    )
    return np.pad(table_PD, ((config.leading, 0), (0, 0))).astype(np.float32)
