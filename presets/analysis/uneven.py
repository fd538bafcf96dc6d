"""Check before a run that the model's widths grow together, as its preset's rules assume."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mupax.mappings import drop_keys
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import LIMITS
from mupax.presets.preset import Preset
from mupax.presets.roles import ParamSpec, PresetError

UNEVEN = 1.4
"""Largest excess factor on a change in one step that `refuse_uneven` accepts.

The excess comes from widths that do not grow together. The factor is smaller than the steps of a
learning rate search.
"""

_WIDTHS = ("embed", "mlp", "heads", "kv_heads", "head_dim")
_CHANGES = ("change of attention logits", "change of the stream", "change of the output")


def refuse_uneven(
    preset: Preset,
    sizes: Mapping[str, int],
    optimizer: str = "adam",
    specs: Iterable[ParamSpec] | None = None,
) -> None:
    """Raise an error if widths grow so unevenly that a step changes the model by too much.

    Changes are those of attention logits, the residual stream and the output in one step. They are
    computed for this growth and for widths that all grow by one ratio (`LIMITS`). A model with a
    width below the base's passes unchecked. So does one in which only `kv_heads` grows, except
    under SGD. Depth is not checked, and neither is a model without residual blocks.

    Args:
        preset: Preset with a base. A preset without one passes.
        sizes: Size of every logical axis of the model.
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`. Some growth is safe under SGD and
            not under Adam.
        specs: Declarations of the model's parameters. By default those of a transformer.

    Raises:
        PresetError: A change is more than `UNEVEN` times what it is if all widths grow together.
            The message names the axes.
    """
    if specs is not None and not any(spec.in_block for spec in specs):
        # A chain of layers has neither a residual stream nor attention.
        return
    ratios = preset.ratios(sizes)
    widths = {axis: ratios[axis] for axis in _WIDTHS if axis in ratios}
    if "experts" in ratios and "embed" in widths:
        # The hidden size of experts may grow at any speed, so it counts as growing with the width.
        widths.setdefault("mlp", widths["embed"])
    has_attention = any(axis in ratios for axis in ("heads", "kv_heads", "head_dim"))
    largest = max(widths.values(), default=1.0)
    if preset.base is None or largest <= 1.0 or min(widths.values()) < 1.0:
        return
    family = preset.family(optimizer)
    other_widths = drop_keys(widths, ("kv_heads",))
    only_keys_grow = all(ratio == 1.0 for ratio in other_widths.values())
    if only_keys_grow and family != "sgd":
        # The number of key heads K is at most the number of heads. Under Adam, the fastest change
        # was measured to go as K^0.01 up to 8 times as many key heads, which is flat. Under SGD it
        # was not flat.
        return

    growth = {}
    for axis, ratio in widths.items():
        growth[axis] = math.log(ratio) / math.log(largest)
    if not has_attention:
        # Heads that a model does not have hold nothing back.
        growth["heads"] = growth["kv_heads"] = growth.get("embed", 1.0)
    apart = Limit(preset, family, growth).observables()
    by_head_dim = Limit(preset, family, LIMITS["head_dim"]).observables()
    by_heads = Limit(preset, family, LIMITS["heads"]).observables()
    for change in _CHANGES:
        # Growing head_dim or heads alone is allowed. A change that grows no faster than in these
        # limits is therefore no fault.
        together = max(by_head_dim[change], by_heads[change])
        excess = apart[change] - max(together, 0.0)
        if largest**excess > UNEVEN:
            grown = ", ".join(f"{axis} x{ratio:.3g}" for axis, ratio in widths.items())
            fastest = max(widths, key=widths.__getitem__)
            raise PresetError(
                f"{preset.name} under {optimizer} does not allow growing {grown}: "
                f"{change} explodes as {fastest}^{apart[change]:.2g}; "
                f"grow the widths together (head_dim or heads with embed and mlp), "
                f"or take a base of the same proportions"
            )
