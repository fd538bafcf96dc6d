"""What a sweep over rates says of the best one: its picture, and a tuned preset, by the fit that transfer studies use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mupax.train.config.grids import Planned
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer.drift import Analysis, analyse
from mupax.train.studies.transfer.fit import STEP
from mupax.train.studies.transfer.study import Measured, Point, Study

Judged = tuple[Measured, Analysis]


def judged(points: Sequence[Planned], rows: Sequence[Row], axis: str) -> list[Judged]:
    """Every combination of what was varied beside rate, seed and size, as a study of its sizes.

    Args:
        points: of the sweep.
        rows: theirs.
        axis: what grew; "" where nothing did.
    """
    studies = []
    for varied in dict.fromkeys(point.varied for point in points):
        own = [(point, row) for point, row in zip(points, rows, strict=True) if point.varied == varied]
        sizes = sorted({point.size for point, _ in own})
        first = min(point.config.seed for point, _ in own)
        configs = {point.size: point.config for point, _ in reversed(own)}
        measured: dict[Point, Row] = {
            (sizes.index(point.size), math.log2(point.config.optimizer.peak_lr) / STEP, point.config.seed - first): row
            for point, row in own
        }
        name = own[0][0].config.preset.name
        study = Study(
            label=f"{name} {varied}".strip(),
            axis=axis or "width",
            sizes=tuple(size or configs[size].model.sizes()["embed"] for size in sizes),
            configs=tuple(configs[size] for size in sizes),
        )
        seeds = 1 + max(seed for _, _, seed in measured)
        whole = Measured(study, seeds, measured)
        studies.append((whole, analyse(study.sizes, whole.curves)))
    return studies
