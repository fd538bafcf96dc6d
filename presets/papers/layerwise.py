"""Standard parameterization with a learning rate per layer: `sp-layerwise`.

Source: Everett et al. 2024 (2407.05872). Initialization is by fan-in, and learning rates reach as
far as those of muP.

| role                              | init std | Adam lr | SGD lr        | Adam eps |
|-----------------------------------|----------|---------|---------------|----------|
| embeddings; gains, biases         | 1        | 1       | D^1/2         | D^-1/2   |
| every block matrix                | in^-1/2  | in^-1   | in^-1 D^1/2   | D^-1/2   |
| readout                           | D^-1/2   | D^-1    | D^-1          | 1        |

Attention logits have the factor N^-1/2, branches 1, and there is no depth rule. The paper's n is
the width; "in" is the fan-in of the matrix itself. A QK-norm gain that heads share sums their
gradients: SGD lr * N/D, eps * D/N (derived). The output at initialization stays of order one, so
gradients shrink as D^-1/2 and not as D^-1.
"""

from __future__ import annotations

from mupax.presets.papers.infinite_limits import D, N, heads_summed
from mupax.presets.preset import Preset
from mupax.presets.roles import VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import Rule, product


def sp_layerwise() -> Preset:
    """SP with per-layer learning rates: larger initial readout than in mup, updates as large."""

    def rule(spec: ParamSpec) -> Rule:
        # The output starts at order one, so the gradients before the readout shrink as D^-1/2.
        gradient = D**-0.5
        m_in = product(spec.fan_in)
        match spec.role:
            case Role.READOUT if spec.tied:
                raise PresetError(
                    "sp-layerwise: a tied readout would need two rates, 1 as embedding and D^-1/2 "
                    "as readout; untie it"
                )
            case Role.READOUT:
                return Rule(init_std=m_in**-0.5, sgd=m_in**-1, adam=m_in**-1)
            case Role.BIAS if spec.of is Role.READOUT:
                return Rule(decays=False)
            case role if role in VECTORS:
                summed = heads_summed(spec)
                return Rule(sgd=D**0.5 / summed, eps=gradient * summed, decays=False)
            case Role.PATCH_EMBEDDING:
                return Rule(multiplier=m_in**-0.5, sgd=D**0.5, eps=m_in**-0.5 * gradient)
            case Role.TOKEN_EMBEDDING | Role.POSITION:
                return Rule(sgd=D**0.5, eps=gradient)
        return Rule(init_std=m_in**-0.5, sgd=m_in**-1 * D**0.5, adam=m_in**-1, eps=gradient)

    return Preset(
        name="sp-layerwise",
        rule=rule,
        logits=N**-0.5,
        no_rule=dict.fromkeys(("muon", "lion"), "the paper has SGD and Adam"),
    )
