"""Low-rank adapters (LoRA, Hu et al. 2021, 2106.09685): declarations and rows under any preset.

A matrix W with n inputs and m outputs becomes W + (alpha / r) A B, with A [n, r] and B [r, m]. B
starts at zero. W is not trained, and the rank r is fixed as a model grows. So A reads r numbers out
of the residual stream, as a readout does, and B writes them into the stream, as an embedding does.
The rows of A and B in a preset's table follow from the row of W:

|   | std       | Adam lr           | SGD lr       | eps          | `mup`, square matrix in blocks |
|---|-----------|-------------------|--------------|--------------|--------------------------------|
| A | louder^-1 | W's               | W's / louder | W's * louder | std, Adam, SGD n^-1, eps 1     |
| B | 0         | W's with fan-in r | likewise     | likewise     | Adam 1, SGD n, eps n^-1        |

louder = m * (Adam lr of B) is the factor by which a gradient grows as it goes back through B, whose
m updates are aligned with the gradient. Under `mup` the factor is n. The std of A makes what goes
back through A as small as what reaches the adapter. At std n^-1/2, as in LoRA+ (Hayou et al. 2024,
2402.12354), it would be n^1/2 larger. The Adam learning rates are those of LoRA+: n^-1 for A and 1
for B. (Derived; depth is left out of louder.)

Where a preset has one learning rate for everything (`sp`), adapters have the same rate and A has
std n^-1/2: LoRA as it is usually trained. Under Muon, adapters stay on Adam. The rank is in no
column, because alpha / r takes its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mupax.presets.roles import OWN, RANK, ParamSpec, Role
from mupax.presets.rule import ONE, Power, Rule, product


def pair(matrix: ParamSpec) -> tuple[ParamSpec, ParamSpec]:
    """Return the declarations of the two adapter matrices A and B that are added to `matrix`."""
    a = ParamSpec(
        role=Role.LORA_A,
        axes=(*matrix.copies, *matrix.fan_in, RANK),
        fan_in=matrix.fan_in,
        in_block=True,
        adapts=matrix,
    )
    b = ParamSpec(
        role=Role.LORA_B,
        axes=(*matrix.copies, RANK, *matrix.fan_out),
        fan_in=(RANK,),
        in_block=True,
        adapts=matrix,
    )
    return a, b


def row(rule: Callable[[ParamSpec], Rule], spec: ParamSpec) -> Rule:
    """Return the preset's rule for an adapter matrix, derived from that of the adapted matrix.

    The rule has no Muon column, because adapters stay on Adam.

    Args:
        rule: Function from a declaration to its row in the preset's table.
        spec: Declaration of A or B, as `pair` returns it.
    """
    matrix = spec.adapts
    assert matrix is not None
    _, b_spec = pair(matrix)
    matrix_rule = rule(matrix)
    # B is a matrix like W whose fan-in is the rank, so its row is the row of W at that fan-in.
    b_rule = rule(dataclasses.replace(matrix, axes=b_spec.axes, fan_in=(RANK,)))
    if spec.role is Role.LORA_B:
        return _on_adam(b_rule)

    # A reads what W reads, so it starts from W's row.
    a_rule = _on_adam(matrix_rule)
    # A preset with one learning rate for everything ignores the size of gradients, so A needs no
    # correction.
    if matrix_rule.sgd == matrix_rule.adam == matrix_rule.eps == ONE:
        return a_rule
    # Once B has moved, each gradient of A is a sum over the fan_out entries that B writes.
    louder = product(matrix.fan_out) * _without_depth(b_rule.multiplier * b_rule.adam)
    init_std = ONE / (louder * matrix_rule.multiplier)
    a_rule = dataclasses.replace(a_rule, init_std=init_std)
    return a_rule.times(sgd=louder**-1, eps=louder)


def _on_adam(rule: Rule) -> Rule:
    """Return the row of a matrix as an adapter on Adam has it.

    The Muon column and the mean-field factor are dropped, and the constant on the initial std is 1.
    """
    return dataclasses.replace(rule, muon=None, mean_field=ONE, init_constant=1.0)


def _without_depth(power: Power) -> Power:
    """Return the power law without its factor in the number of layers."""
    exponents = []
    for axis, exponent in power.exponents:
        if axis != OWN.axis:
            exponents.append((axis, exponent))
    return dataclasses.replace(power, exponents=tuple(exponents))
