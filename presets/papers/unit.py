"""Unit-scaled muP: `u-mup` (Blake et al. 2024, 2407.17465; Graphcore). Absolute numbers, no base model.

| role                             | mult.   | std  | Adam lr            | Adam eps, true gradients (derived) |
|----------------------------------|---------|------|--------------------|------------------------------------|
| token, position, CLS embedding   | 1       | 1    | D^-1/2             | D^-1                               |
| patch embedding                  | Din^-1/2| 1    | D^-1/2             | Din^-1/2 D^-1                      |
| every block matrix               | in^-1/2 | 1    | in^-1/2 L^-1/2     | in^-1/2 D^-1 L^-1/2                |
| gains and biases, in a block     | 1       | 1; 0 | L^-1/2             | D^-1 L^-1/2; a shared QK-norm gain * D/N |
| final norm, biases outside       | 1       | 1; 0 | 1                  | D^-1                               |
| readout                          | D^-1    | 1    | 1                  | D^-1                               |
| readout bias                     | 1       | 0    | 1                  | 1                                  |

attention logits * N^-1; weight decay independent of the rate. The paper also rescales the readout's backward pass to fan_in^-1/2,
which Adam does not see but for eps; we keep true gradients.
Residual branches (its tau rule): skip 1/sqrt(1 + tau^2), branch tau/sqrt(1 + tau^2), with a_mlp = alpha_res sqrt(2/(1 + r^2)),
a_attn = r a_mlp and, in block i of L, tau_attn^2 = a_attn^2 / (L + i a_attn^2 + i a_mlp^2),
tau_mlp^2 = a_mlp^2 / (L + (i+1) a_attn^2 + i a_mlp^2). A decoder's attention to an encoder is one branch more, of a_attn (derived).
`embedding_exponent`: -1/2 is this paper's rate of the embedding, 0 that of Tensor Programs V and CompleteP.
"""

from __future__ import annotations

import math

from mupax.presets.papers.infinite_limits import D, L, N, heads_summed
from mupax.presets.preset import Preset
from mupax.presets.roles import EMBEDDINGS, VECTORS, Branch, ParamSpec, PresetError, Role
from mupax.presets.rule import ONE, Rule, changed, product


def u_mup(
    *, alpha_res: float = 1.0, alpha_ratio: float = 1.0, embedding_exponent: float = -0.5
) -> Preset:
    """Unit-scaled muP: std 1 everywhere, absolute numbers (no base), branches by the tau rule, Adam only.

    Args:
        alpha_res: size of the residual branches relative to the embedding; above 0.
        alpha_ratio: size of attention branches over that of MLP branches; above 0.
        embedding_exponent: of the width in the rate of embeddings.
    """
    for label, value in (("alpha_res", alpha_res), ("alpha_ratio", alpha_ratio)):
        if not value > 0:
            raise PresetError(f"u-mup: {label}={value:g} must be positive; write a number above 0")

    def rule(spec: ParamSpec) -> Rule:
        depth = L**-0.5 if spec.in_block else ONE
        m_in = product(spec.fan_in)
        match spec.role:
            case Role.READOUT if spec.tied:
                raise PresetError(
                    f"u-mup: a tied readout would need two rates, D^{embedding_exponent:g} as embedding and 1 as readout; untie it"
                )
            case Role.READOUT:
                return Rule(multiplier=m_in**-1, eps=m_in**-1)
            case Role.BIAS if spec.of is Role.READOUT:
                return Rule(decays=False)
            case role if role in VECTORS:
                return Rule(adam=depth, eps=D**-1 * depth * heads_summed(spec), decays=False)
            case Role.PATCH_EMBEDDING:
                return Rule(
                    multiplier=m_in**-0.5, adam=D**embedding_exponent, eps=m_in**-0.5 * D**-1
                )
            case Role.TOKEN_EMBEDDING | Role.POSITION:
                return Rule(adam=D**embedding_exponent, eps=D**-1)
        return Rule(multiplier=m_in**-0.5, adam=m_in**-0.5 * depth, eps=m_in**-0.5 * D**-1 * depth)

    def residual(
        layers: int, layer: int, branch: Branch, branches: tuple[Branch, ...]
    ) -> tuple[float, float]:
        mlp_sq = alpha_res**2 * 2 / (1 + alpha_ratio**2)
        attention_sq = alpha_ratio**2 * mlp_sq
        of = {"attention": attention_sq, "cross": attention_sq, "mlp": mlp_sq}
        earlier = branches[: branches.index(branch)]
        before = (
            layers + layer * sum(of[each] for each in branches) + sum(of[each] for each in earlier)
        )
        tau_sq = of[branch] / before
        return 1 / math.sqrt(1 + tau_sq), math.sqrt(tau_sq / (1 + tau_sq))

    return Preset(
        name="u-mup",
        rule=rule,
        native_form="mean-field",
        logits=N**-1,
        branch=L**-0.5,
        residual=residual,
        no_rule=dict.fromkeys(("sgd", "muon", "lion"), "the paper has Adam only"),
        baseless=True,
        vanishing={"attention": N**-0.5}
        | {f"movement/{role.value}": D**embedding_exponent for role in EMBEDDINGS},
        choices=changed(
            alpha_res=(alpha_res, 1.0),
            alpha_ratio=(alpha_ratio, 1.0),
            embedding_exponent=(embedding_exponent, -0.5),
        ),
    )
