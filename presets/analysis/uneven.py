"""Widths that grow apart, against those that a rule was made for: what they lead to is refused before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import LIMITS
from mupax.presets.preset import Preset
from mupax.presets.roles import PresetError

UNEVEN = 1.4
"""How many times too large a change may become by widths that do not grow together: less than the steps of a rate's search."""


def refuse_uneven(preset: Preset, sizes: Mapping[str, int], optimizer: str = "adam") -> None:
    """Raises PresetError where a change is more than `UNEVEN` times what it is where all widths grow together; names the axes.

    The limits of `LIMITS` keep F/D, N*H/D and H/H_kv fixed. Along any other line the same calculation says what moves; depth is
    left as it is. It speaks of growth alone: where a width is below the base's, nothing is said.

    Args:
        preset: relative to a base.
        sizes: of the model.
        optimizer: whose updates: some growth is safe under SGD and not under Adam.
    """
    ratios = preset.ratios(sizes)
    widths = {
        axis: ratios[axis]
        for axis in ("embed", "mlp", "heads", "kv_heads", "head_dim")
        if axis in ratios
    }
    if "experts" in ratios and "embed" in widths:  # an expert's hidden size may grow as it will
        widths.setdefault("mlp", widths["embed"])
    largest = max(widths.values(), default=1.0)
    if preset.base is None or largest <= 1.0 or min(widths.values()) < 1.0:
        return
    if preset.family(optimizer) != "sgd" and all(
        ratio == 1.0 for axis, ratio in widths.items() if axis != "kv_heads"
    ):
        return  # they end at the heads; what moves most was measured flat over 8 times (K^0.01), and under SGD was not
    growth = {axis: math.log(ratio) / math.log(largest) for axis, ratio in widths.items()}
    lines = (growth, LIMITS["head_dim"], LIMITS["heads"])
    alone, *together = (
        Limit(preset, preset.family(optimizer), line).observables() for line in lines
    )
    for row in ("change of attention logits", "change of the stream", "change of the output"):
        beyond = alone[row] - max(max(at[row] for at in together), 0.0)
        if largest**beyond > UNEVEN:
            grown = ", ".join(f"{axis} x{ratio:.3g}" for axis, ratio in widths.items())
            fastest = max(widths, key=widths.__getitem__)
            raise PresetError(
                f"{preset.name} under {optimizer} does not allow growing {grown}: {row} explodes as {fastest}^{alone[row]:.2g}; "
                f"grow the widths together (head_dim or heads with embed and mlp), or take a base of the same proportions"
            )
