"""Effective theory at initialization: `ntk`, `hybrid`, `maximal-update` (Dinan, Yaida, Zhang 2023, 2304.02034).

One family in s: 0 neural tangent, 1/2 hybrid, 1 maximal update; the paper's `standard` is our `sp`.

| role                                       | std        | SGD lr    | AdamW lr                  | eps (derived) |
|--------------------------------------------|------------|-----------|---------------------------|---------------|
| token, position, patch; gains and biases   | 1; gain, 0 | D^s       | D^(s/2-1/2)               | D^-(1+s)/2    |
| q, k, v, attention out, MLP in, MLP out    | in^-1/2    | in^-1 D^s | in^-1 out^-1/2 D^(s/2)    | D^-(1+s)/2    |
| readout                                    | D^-(1+s)/2 | D^-1      | D^-1 n_out^-1/2           | 1             |
| readout bias                               | 0          | 1         | n_out^-1/2                | 1             |
| QK-norm gain shared by heads (derived)     | 1          | N D^(s-1) | D^(s/2-1/2)               | N^-1 D^(1-s)/2|

attention logits * N^-1/2, branches * 1, no rule for depth; lr*wd fixed per group, 0 on gains and biases (which the theory
keeps at 1 and 0). n_out and the patch are finite: they count in the absolute form alone. The patch embedding has the
multiplier D_in^-1/2 and with it eps D_in^-1/2, AdamW lr D_in^-1/2. A tied readout multiplies by D^-(1+s)/2.
Initial variances are C / fan_in; the C of the paper are named constants below, and part of the base values, not of the factors.
s = 1 is `mup` in plain form but for the logits: with N its logit updates grow, as N^1/2 under Adam and N under SGD.
"""

from __future__ import annotations

from mupax.presets.papers.infinite_limits import D, N, heads_summed
from mupax.presets.preset import Preset
from mupax.presets.roles import VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import Rule, changed, product

VARIANCES = {
    Role.QUERY: 1 / 2,
    Role.KEY: 1 / 2,
    Role.VALUE: 1 / 2,
    Role.ATTENTION_OUT: 1 / 3,
    Role.MLP_IN: 2 / 5,
    Role.MLP_OUT: 8 / 5,
    Role.PATCH_EMBEDDING: 1.0,
    Role.READOUT: 1.0,
    Role.POSITION: 0.02**2,
}
"""The paper's initial variances times fan-in (its C_Q, C_K, C_V, C_U, C_W, C_X, C_patch, C_head and, for vision, C_PE)."""


def effective_theory(name: str, s: float, *, alpha_a: float = 0.5, init: str = "paper") -> Preset:
    """The family of the module's table.

    Args:
        name: printed name.
        s: 0 neural tangent to 1 maximal update.
        alpha_a: attention logits scale as N^-alpha_a. 1/2 is the paper's; with 1, s = 1 is `mup` in plain form.
        init: "paper" has initial variances `VARIANCES` / fan_in, "fan-in" 1 / fan_in.

    Raises:
        PresetError: s outside [0, 1], alpha_a outside [1/2, 1], or an init that is neither.
    """
    if not 0.0 <= s <= 1.0:
        raise PresetError(
            f"{name}: s={s:g} is outside [0, 1]; write 0 (neural tangent) to 1 (maximal update)"
        )
    if not 0.5 <= alpha_a <= 1.0:
        raise PresetError(
            f"{name}: alpha_a={alpha_a:g} is outside [0.5, 1]; write a value from 0.5 to 1"
        )
    if init not in ("paper", "fan-in"):
        raise PresetError(f"{name}: init={init} is not a choice; write paper or fan-in")
    chosen = VARIANCES if init == "paper" else {}

    def rule(spec: ParamSpec) -> Rule:
        m_in, m_out = product(spec.fan_in), product(spec.fan_out)
        gradient, constant = D ** (-(1 + s) / 2), chosen.get(spec.role, 1.0) ** 0.5
        if Role.READOUT in (spec.role, spec.of):
            return _readout(spec, s, constant)
        if spec.role in VECTORS:
            summed = heads_summed(spec)
            return Rule(
                sgd=D**s / summed, adam=D ** (s / 2 - 0.5), eps=gradient * summed, decays=False
            )
        if spec.role is Role.PATCH_EMBEDDING:
            root = m_in**-0.5
            adam = root * D ** (s / 2 - 0.5)
            return Rule(
                multiplier=root, sgd=D**s, adam=adam, eps=root * gradient, init_constant=constant
            )
        if not spec.fan_in or spec.role is Role.TOKEN_EMBEDDING:
            return Rule(sgd=D**s, adam=D ** (s / 2 - 0.5), eps=gradient, init_constant=constant)
        adam = m_in**-1 * m_out**-0.5 * D ** (s / 2)
        return Rule(
            init_std=m_in**-0.5,
            sgd=m_in**-1 * D**s,
            adam=adam,
            eps=gradient,
            init_constant=constant,
        )

    return Preset(
        name=name,
        rule=rule,
        logits=N**-alpha_a,
        no_rule=dict.fromkeys(("muon", "lion"), "the paper has SGD and AdamW"),
        choices=changed(s=(s, None), alpha_a=(alpha_a, 0.5), init=(init, "paper")),
        vanishing={"features": D ** (s / 2 - 0.5), "attention": N ** (0.5 - alpha_a)},
    )


def _readout(spec: ParamSpec, s: float, constant: float) -> Rule:
    if spec.tied:
        return Rule(multiplier=D ** (-(1 + s) / 2))
    out = product(axis for axis in spec.fan_out if axis != "embed")
    if spec.role is Role.BIAS:
        return Rule(adam=out**-0.5, decays=False)
    return Rule(
        init_std=D ** (-(1 + s) / 2), sgd=D**-1, adam=D**-1 * out**-0.5, init_constant=constant
    )


def ntk(*, s: float = 0.0, alpha_a: float = 0.5, init: str = "paper") -> Preset:
    """Neural tangent scaling (s=0): a stable width limit in which features stop moving, the lazy regime.

    Args:
        s: 0 neural tangent to 1 maximal update.
        alpha_a: attention logits scale as N^-alpha_a.
        init: paper or fan-in, as `effective_theory` has them.
    """
    return effective_theory("ntk", s, alpha_a=alpha_a, init=init)


def hybrid(*, s: float = 0.5, alpha_a: float = 0.5, init: str = "paper") -> Preset:
    """Halfway (s=1/2) between neural tangent and maximal update: features move, less and less with width.

    Args:
        s: 0 neural tangent to 1 maximal update.
        alpha_a: attention logits scale as N^-alpha_a.
        init: paper or fan-in, as `effective_theory` has them.
    """
    return effective_theory("hybrid", s, alpha_a=alpha_a, init=init)


def maximal_update(*, s: float = 1.0, alpha_a: float = 0.5, init: str = "paper") -> Preset:
    """Maximal update of the effective theory (s=1): mup, plain form, but logits 1/sqrt(N), whose updates grow with N.

    Args:
        s: 0 neural tangent to 1 maximal update.
        alpha_a: attention logits scale as N^-alpha_a.
        init: paper or fan-in, as `effective_theory` has them.
    """
    return effective_theory("maximal-update", s, alpha_a=alpha_a, init=init)
