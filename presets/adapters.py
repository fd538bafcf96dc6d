"""Low-rank adapters (LoRA, Hu et al. 2021, 2106.09685): their declarations, and their rows under any preset, from the matrix' own.

A matrix W with n inputs and m outputs becomes W + (alpha / r) A B, A [n, r] and B [r, m]. B starts at zero. W stays, and so does
the rank r as a model grows: A reads r numbers out of the stream, as a readout does, and B writes them into it, as an embedding does.

| adapter | std                   | Adam lr        | SGD lr       | eps           | under `mup`, in blocks, of square matrices    |
|---------|-----------------------|----------------|--------------|---------------|-----------------------------------------------|
| A       | louder^-1             | W's            | W's / louder | W's * louder  | std n^-1, Adam n^-1, SGD n^-1, eps 1          |
| B       | 0                     | W's at fan-in r| the same     | the same      | Adam 1, SGD n, eps n^-1                       |

louder = m * B's Adam rate is how much larger a gradient is that has gone back through B, whose m moves are aligned with it (that
of `mup` is n). A's std keeps what goes back through A as small as what reaches the adapter; at n^-1/2, as LoRA+ has it (Hayou et al.
2024, 2402.12354), it would be n^1/2 larger. Rates under Adam are theirs: n^-1 for A and 1 for B. (Derived; depth is left out of louder.)
Where a preset has one rate for everything (`sp`), adapters have it too, A at n^-1/2: LoRA as it is usually trained.
Adapters stay on Adam under Muon. Their rank counts nowhere: alpha / r is its rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mupax.presets.roles import OWN, RANK, ParamSpec, Role
from mupax.presets.rule import ONE, Power, Rule, product


def pair(matrix: ParamSpec) -> tuple[ParamSpec, ParamSpec]:
    """Declarations of A and B for a matrix of a residual block."""
    ends = matrix.copies, matrix.fan_in, matrix.fan_out
    axes = {Role.LORA_A: (*ends[0], *ends[1], RANK), Role.LORA_B: (*ends[0], RANK, *ends[2])}
    fan_in = {Role.LORA_A: ends[1], Role.LORA_B: (RANK,)}
    a, b = (
        ParamSpec(role=role, axes=axes[role], fan_in=fan_in[role], in_block=True, adapts=matrix)
        for role in axes
    )
    return a, b


def row(rule: Callable[[ParamSpec], Rule], spec: ParamSpec) -> Rule:
    """The row of an adapter.

    Args:
        rule: the preset's table.
        spec: of A or B.
    """
    assert spec.adapts is not None
    whole = rule(spec.adapts)
    within = dataclasses.replace(spec.adapts, axes=pair(spec.adapts)[1].axes, fan_in=(RANK,))
    a, b = (
        dataclasses.replace(of, muon=None, mean_field=ONE, init_constant=1.0)
        for of in (whole, rule(within))
    )
    if spec.role is Role.LORA_B:
        return b
    if whole.sgd == whole.adam == whole.eps == ONE:  # one rate, whatever the gradients
        return a
    louder = product(spec.adapts.fan_out) * _without_depth(b.multiplier * b.adam)
    return dataclasses.replace(a, init_std=ONE / (louder * whole.multiplier)).times(
        sgd=louder**-1, eps=louder
    )


def _without_depth(power: Power) -> Power:
    return dataclasses.replace(
        power, exponents=tuple((axis, e) for axis, e in power.exponents if axis != OWN.axis)
    )
