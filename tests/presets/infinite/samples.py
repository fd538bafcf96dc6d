"""Comparison of the laws of two samples."""

from __future__ import annotations

import numpy as np


def z_scores(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return standard errors between means and variances of samples [draws, columns], [2, columns]."""
    scores = []
    for x, y in ((a, b), ((a - a.mean(0)) ** 2, (b - b.mean(0)) ** 2)):
        scores.append((x.mean(0) - y.mean(0)) / np.sqrt(x.var(0) / len(x) + y.var(0) / len(y)))
    return np.abs(scores)
