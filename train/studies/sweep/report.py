"""The end of a sweep, the answer first: the best learning rate and how sure it is, then what to type next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mupax.train.studies.sweep.grids import power

if TYPE_CHECKING:
    from mupax.train.studies.transfer.drift import Analysis
    from mupax.train.studies.transfer.study import Measured


def answers(studies: Sequence[tuple[Measured, Analysis]], loss: str, *, grown: bool) -> list[str]:
    """Return a line per setting: its best learning rate, or where sizes grew whether to keep it.

    Args:
        studies: every setting of the sweep as a study of its sizes.
        loss: the loss that is judged, "training" or "evaluation".
        grown: whether the sweep has several sizes.
    """
    lines: list[str] = []
    for measured, analysis in studies:
        name = f"With {measured.study.label}: " if len(studies) > 1 else ""
        lines_of_sizes = [
            _best_rate(measured, analysis, index, loss, grown=grown) for index in range(len(analysis.sizes))
        ]
        if not grown:
            lines.append(f"{name}{lines_of_sizes[0]}")
            continue
        from mupax.train.studies.transfer.conclusion import conclusion

        lines.append(f"{name}{conclusion(measured, analysis)}")
        lines += [f"  {line}" for line in lines_of_sizes]
    return lines


def _best_rate(measured: Measured, analysis: Analysis, index: int, loss: str, *, grown: bool) -> str:
    """Return the best rate of one size with its interval, or why it has none and which rates to add."""
    fitted = analysis.fits[index]
    where = f" at {measured.study.axis} {analysis.sizes[index]}" if grown else ""
    if fitted.trouble:
        return f"No best learning rate{where} by {loss} loss: {fitted.why}."
    half = analysis.optima[index].half_width
    rate = f"{power(2.0**fitted.optimum)} = {2.0**fitted.optimum:.3g}"
    accuracy = f"known to ± {half:.2f} octaves" if math.isfinite(half) else "one seed, so no interval"
    return f"Best learning rate{where}: {rate} ({accuracy}), {loss} loss there {fitted.loss:.4f}."
