"""Fixed positions of a vision transformer's patches. Imports no JAX."""

from __future__ import annotations

import numpy as np

from mupax.zoo.vit.config import ViTConfig


def sines(config: ViTConfig) -> np.ndarray:
    """Fixed positions, float32 [T, D]; 0 for the CLS token.

    A quarter of the features each for the sine and cosine of a patch's column and of its row, over 10000^(i / (D/4 - 1)), i from 0
    (Chen et al. 2021, as MoCo v3 and big_vision order them).
    """
    grid, quarter = config.position_grid, config.width // 4
    waves = 10_000.0 ** -(np.arange(quarter) / max(1, quarter - 1))
    row_PF, column_PF = (at.reshape(-1, 1) * waves for at in np.mgrid[:grid, :grid])
    table_PD = np.concatenate(
        [f(at) for at in (column_PF, row_PF) for f in (np.sin, np.cos)], axis=1
    )
    return np.pad(table_PD, ((config.leading, 0), (0, 0))).astype(np.float32)
