"""Axes of pictures: labels that can be read."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

from mupax.train.run.report import plotting


@pytest.mark.core
@pytest.mark.parametrize(
    ("low", "high"), [(0.22, 0.77), (0.05, 3), (1.2, 5.5), (9.5, 10.4), (0.02, 0.06), (3, 3.3)]
)
def test_a_log_axis_has_a_few_round_labels_in_sight(low: float, high: float) -> None:
    figure, axes = plt.subplots()
    plotting.limits(axes, np.array([low, high]), log=True)
    ticks = axes.yaxis.get_majorticklocs()
    plt.close(figure)
    assert 4 <= len(ticks) <= 8
    assert all(axes.get_ylim()[0] <= tick <= axes.get_ylim()[1] for tick in ticks)
    assert all(float(f"{tick:.2g}") == pytest.approx(tick) for tick in ticks)
