"""Effective theory at initialization: `ntk`, `hybrid` and `maximal-update`.

Source: Dinan, Yaida, Zhang 2023 (2304.02034). The family has one constant s: 0 is neural tangent,
1/2 hybrid, 1 maximal update. The paper's `standard` is `sp` here.

| role                        | std        | SGD lr    | AdamW lr               | eps (derived)  |
|-----------------------------|------------|-----------|------------------------|----------------|
| embeddings; gains, biases   | 1; gain, 0 | D^s       | D^(s/2-1/2)            | D^-(1+s)/2     |
| q, k, v, attention out, MLP | in^-1/2    | in^-1 D^s | in^-1 out^-1/2 D^(s/2) | D^-(1+s)/2     |
| readout                     | D^-(1+s)/2 | D^-1      | D^-1 n_out^-1/2        | 1              |
| readout bias                | 0          | 1         | n_out^-1/2             | 1              |
| shared QK-norm gain         | 1          | N D^(s-1) | D^(s/2-1/2)            | N^-1 D^(1-s)/2 |

* Attention logits have the factor N^-1/2, branches 1, and there is no rule for depth.
* lr*wd is fixed per group. It is 0 on gains and biases, which the theory keeps at 1 and 0.
* n_out and the patch are finite: they count in the absolute form alone.
* A QK-norm gain that heads share has a row of its own (derived).
* The patch embedding has the multiplier D_in^-1/2, and with it D_in^-1/2 on eps and AdamW lr.
* A tied readout has the multiplier D^-(1+s)/2.
* Initial variances are C / fan_in. The paper's C are `VARIANCES`. They belong to the base values,
  not to the factors.
* s = 1 is `mup` in plain form except for the logits, whose updates grow: as N^1/2 under Adam and as
  N under SGD.
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
"""Initial variances in the paper, times fan-in, by role.

They are its C_Q, C_K, C_V, C_U, C_W, C_X, C_patch, C_head and, for vision, C_PE.
"""


def effective_theory(name: str, s: float, *, alpha_a: float = 0.5, init: str = "paper") -> Preset:
    """Return a preset of the effective theory of Dinan, Yaida and Zhang (2304.02034).

    The constant s leads from neural tangent to maximal update scaling. The preset has rules for
    Adam and SGD, not for Muon and Lion.

    Args:
        name: Name that the preset prints and that messages have.
        s: 0 (neural tangent) to 1 (maximal update).
        alpha_a: Attention logits scale as N^-alpha_a. 1/2 is the paper's; with 1, s = 1 is `mup` in
            plain form.
        init: Initial variances, `VARIANCES` / fan_in for "paper" and 1 / fan_in for "fan-in".

    Raises:
        PresetError: s is outside [0, 1], alpha_a is outside [1/2, 1], or init has another value.
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
    variances = VARIANCES if init == "paper" else {}

    def rule(spec: ParamSpec) -> Rule:
        return _row(spec, s, variances.get(spec.role, 1.0) ** 0.5)

    return Preset(
        name=name,
        rule=rule,
        logits=N**-alpha_a,
        no_rule=dict.fromkeys(("muon", "lion"), "the paper has SGD and AdamW"),
        choices=changed(s=(s, None), alpha_a=(alpha_a, 0.5), init=(init, "paper")),
        # Below s = 1 features move less and less with width, as the paper means them to.
        vanishing={"features": D ** (s / 2 - 0.5), "attention": N ** (0.5 - alpha_a)},
    )


def _row(spec: ParamSpec, s: float, constant: float) -> Rule:
    """Return a parameter's row in the effective theory: std, learning rates and eps.

    Args:
        s: 0 (neural tangent) to 1 (maximal update).
        constant: Square root of the parameter's initial variance times fan-in.
    """
    if Role.READOUT in (spec.role, spec.of):
        return _readout(spec, s, constant)
    sgd = D**s
    adam = D ** (s / 2 - 0.5)
    # eps follows the gradients, which go as the readout's std. (Derived.)
    eps = D ** (-(1 + s) / 2)
    if spec.role in VECTORS:
        summed = heads_summed(spec)
        return Rule(sgd=sgd / summed, adam=adam, eps=eps * summed, decays=False)
    m_in = product(spec.fan_in)
    if spec.role is Role.PATCH_EMBEDDING:
        root = m_in**-0.5
        return Rule(
            multiplier=root, sgd=sgd, adam=root * adam, eps=root * eps, init_constant=constant
        )
    if not spec.fan_in or spec.role is Role.TOKEN_EMBEDDING:
        return Rule(sgd=sgd, adam=adam, eps=eps, init_constant=constant)
    m_out = product(spec.fan_out)
    return Rule(
        init_std=m_in**-0.5,
        sgd=m_in**-1 * sgd,
        adam=m_in**-1 * m_out**-0.5 * D ** (s / 2),
        eps=eps,
        init_constant=constant,
    )


def _readout(spec: ParamSpec, s: float, constant: float) -> Rule:
    """Return the effective theory's row of a readout, of its bias or of a tied readout.

    A tied readout has only a multiplier.

    Args:
        s: 0 (neural tangent) to 1 (maximal update).
        constant: Square root of the readout's initial variance times fan-in.
    """
    output = D ** (-(1 + s) / 2)
    if spec.tied:
        return Rule(multiplier=output)
    n_out = product(axis for axis in spec.fan_out if axis != "embed")
    if spec.role is Role.BIAS:
        return Rule(adam=n_out**-0.5, decays=False)
    return Rule(init_std=output, sgd=D**-1, adam=D**-1 * n_out**-0.5, init_constant=constant)


def ntk(*, s: float = 0.0, alpha_a: float = 0.5, init: str = "paper") -> Preset:
    """Neural tangent scaling (s=0): stable with width, but features stop moving (the lazy regime).

    Args:
        s: 0 (neural tangent) to 1 (maximal update).
        alpha_a: Attention logits scale as N^-alpha_a, with alpha_a in [1/2, 1].
        init: Initial variances, "paper" or "fan-in" (`effective_theory`).
    """
    return effective_theory("ntk", s, alpha_a=alpha_a, init=init)


def hybrid(*, s: float = 0.5, alpha_a: float = 0.5, init: str = "paper") -> Preset:
    """Halfway (s=1/2) between ntk and maximal-update: features move less and less with width.

    Args:
        s: 0 (neural tangent) to 1 (maximal update).
        alpha_a: Attention logits scale as N^-alpha_a, with alpha_a in [1/2, 1].
        init: Initial variances, "paper" or "fan-in" (`effective_theory`).
    """
    return effective_theory("hybrid", s, alpha_a=alpha_a, init=init)


def maximal_update(*, s: float = 1.0, alpha_a: float = 0.5, init: str = "paper") -> Preset:
    """Maximal update (s=1): mup, plain form, but logits 1/sqrt(N), whose updates grow with N.

    Args:
        s: 0 (neural tangent) to 1 (maximal update).
        alpha_a: Attention logits scale as N^-alpha_a, with alpha_a in [1/2, 1].
        init: Initial variances, "paper" or "fan-in" (`effective_theory`).
    """
    return effective_theory("maximal-update", s, alpha_a=alpha_a, init=init)
