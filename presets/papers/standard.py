"""Standard parameterization: `sp`, the behaviour of a trainer without a preset.

It is `standard` in the effective theory.

| role                             | multiplier | init std        | lr | eps | weight decay |
|----------------------------------|------------|-----------------|----|-----|--------------|
| token, position, CLS embedding   | 1          | 1               | 1  | 1   | 1            |
| patch embedding                  | D_in^-1/2  | 1               | 1  | 1   | 1            |
| every matrix, the readout too    | 1          | fan_in^-1/2     | 1  | 1   | 1            |
| readout tied to the embedding    | D^-1/2     | (the table's 1) | 1  | 1   | 1            |
| gains; biases                    | 1          | 1; 0            | 1  | 1   | 0            |

Attention logits have the factor N^-1/2, branches 1. All parameters have one learning rate, so the
best one drifts as the model grows. `embedding_width` = 1 makes Adam's learning rate of every
embedding m_D, as a control (Kalra and Barkeshli 2605.21486; `choices`). Initialization is by
fan-in; 0.02 everywhere, as in GPT-2, is another standard parameterization.
"""

from __future__ import annotations

from mupax.presets.preset import Preset
from mupax.presets.roles import EMBEDDINGS, VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import Rule, axis, changed, product


def sp(*, embedding_width: float = 0.0) -> Preset:
    """SP: fan-in init, one learning rate, logits 1/sqrt(N). The best rate drifts with size.

    Args:
        embedding_width: Adam's learning rate of embeddings goes as D^embedding_width.
    """

    def rule(spec: ParamSpec) -> Rule:
        if spec.role in VECTORS:
            return Rule(decays=False)
        if spec.tied and embedding_width:
            raise PresetError(
                "sp: a tied readout has one table, and embedding_width wants two rules for it; "
                "untie it"
            )
        root = product(spec.fan_in) ** -0.5
        if spec.role is Role.PATCH_EMBEDDING or spec.tied:
            row = Rule(multiplier=root)
        else:
            row = Rule(init_std=root)
        if spec.role in EMBEDDINGS:
            row = row.times(adam=axis("embed") ** embedding_width)
        return row

    constants = changed(embedding_width=(embedding_width, 0.0))
    logits = axis("head_dim") ** -0.5
    return Preset(name="sp", rule=rule, logits=logits, choices=constants, by_gradients=False)
