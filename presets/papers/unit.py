"""Unit-scaled muP: `u-mup`, with absolute values and no base model.

Source: Blake et al. 2024 (2407.17465; Graphcore).

| role                           | mult.    | std  | Adam lr        | Adam eps (derived)  |
|--------------------------------|----------|------|----------------|---------------------|
| token, position, CLS embedding | 1        | 1    | D^-1/2         | D^-1                |
| patch embedding                | Din^-1/2 | 1    | D^-1/2         | Din^-1/2 D^-1       |
| every block matrix             | in^-1/2  | 1    | in^-1/2 L^-1/2 | in^-1/2 D^-1 L^-1/2 |
| gain, bias in a block          | 1        | 1; 0 | L^-1/2         | D^-1 L^-1/2         |
| shared QK-norm gain            | 1        | 1    | L^-1/2         | N^-1 L^-1/2         |
| final norm, biases outside     | 1        | 1; 0 | 1              | D^-1                |
| readout                        | D^-1     | 1    | 1              | D^-1                |
| readout bias                   | 1        | 0    | 1              | 1                   |

Attention logits have the factor N^-1. Weight decay is independent of the learning rate. The paper
also scales the readout's backward pass to fan_in^-1/2. Only Adam's eps would notice, and gradients
are kept true here.

Residual additions follow the paper's tau rule. The factors are 1/sqrt(1 + tau^2) on the skip and
tau/sqrt(1 + tau^2) on the branch. In block i of L:

    a_mlp = alpha_res sqrt(2/(1 + r^2)),  a_attn = r a_mlp
    tau_attn^2 = a_attn^2 / (L + i a_attn^2 + i a_mlp^2)
    tau_mlp^2 = a_mlp^2 / (L + (i+1) a_attn^2 + i a_mlp^2)

Attention to an encoder is one more branch, of a_attn (derived). `embedding_exponent` is -1/2 in
this paper; 0 is the learning rate of the embedding in Tensor Programs V and CompleteP.
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
    """Unit-scaled muP: std 1 everywhere, absolute values (no base), tau rule, Adam only.

    Args:
        alpha_res: Size of the residual branches relative to the embedding, above 0.
        alpha_ratio: Size r of attention branches over that of MLP branches, above 0.
        embedding_exponent: Learning rates of embeddings go as D^embedding_exponent.

    Raises:
        PresetError: `alpha_res` or `alpha_ratio` is not above 0.
    """
    for label, value in (("alpha_res", alpha_res), ("alpha_ratio", alpha_ratio)):
        if not value > 0:
            raise PresetError(f"u-mup: {label}={value:g} must be positive; write a number above 0")

    def rule(spec: ParamSpec) -> Rule:
        depth = ONE
        if spec.in_block:
            depth = L**-0.5
        m_in = product(spec.fan_in)
        match spec.role:
            case Role.READOUT if spec.tied:
                raise PresetError(
                    f"u-mup: a tied readout would need two rates, D^{embedding_exponent:g} as "
                    f"embedding and 1 as readout; untie it"
                )
            case Role.READOUT:
                return Rule(multiplier=m_in**-1, eps=m_in**-1)
            case Role.BIAS if spec.of is Role.READOUT:
                return Rule(decays=False)
            case role if role in VECTORS:
                return Rule(adam=depth, eps=D**-1 * depth * heads_summed(spec), decays=False)
            case Role.PATCH_EMBEDDING:
                eps = m_in**-0.5 * D**-1
                return Rule(multiplier=m_in**-0.5, adam=D**embedding_exponent, eps=eps)
            case Role.TOKEN_EMBEDDING | Role.POSITION:
                return Rule(adam=D**embedding_exponent, eps=D**-1)
        return Rule(multiplier=m_in**-0.5, adam=m_in**-0.5 * depth, eps=m_in**-0.5 * D**-1 * depth)

    def residual(
        layers: int, layer: int, branch: Branch, branches: tuple[Branch, ...]
    ) -> tuple[float, float]:
        """Return the factors (skip, branch) of one residual addition, by the paper's tau rule.

        Args:
            layer: Index of the block, from 0.
        """
        # The two squares add up to 2 alpha_res^2, whatever their ratio is.
        mlp_square = alpha_res**2 * 2 / (1 + alpha_ratio**2)
        attention_square = alpha_ratio**2 * mlp_square
        squares: dict[Branch, float] = {
            "attention": attention_square,
            "cross": attention_square,
            "mlp": mlp_square,
        }
        earlier = branches[: branches.index(branch)]
        blocks_before = layer * sum(squares[name] for name in branches)
        branches_before = sum(squares[name] for name in earlier)
        tau_square = squares[branch] / (layers + blocks_before + branches_before)
        return 1 / math.sqrt(1 + tau_square), math.sqrt(tau_square / (1 + tau_square))

    # Logits q.k / N vanish at the start as N^-1/2.
    vanishing = {"attention": N**-0.5}
    for role in EMBEDDINGS:
        vanishing[f"movement/{role.value}"] = D**embedding_exponent
    return Preset(
        name="u-mup",
        rule=rule,
        native_form="mean-field",
        logits=N**-1,
        # Only the analyses read this law. The forward pass uses `residual`.
        branch=L**-0.5,
        residual=residual,
        no_rule=dict.fromkeys(("sgd", "muon", "lion"), "the paper has Adam only"),
        baseless=True,
        vanishing=vanishing,
        choices=changed(
            alpha_res=(alpha_res, 1.0),
            alpha_ratio=(alpha_ratio, 1.0),
            embedding_exponent=(embedding_exponent, -0.5),
        ),
    )
