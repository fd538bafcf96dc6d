"""Infinite limits of multi-head transformers: `mup`, `mup-half`, `depth-mup` (Bordelon, Chaudhry, Pehlevan 2024, 2405.15712).

m_X is size / base size: D width, N head dimension, F MLP, L depth, in = fan-in. SGD rates also * gamma0^2, eps / gamma0.

| role                                   | mult.    | std      | SGD lr                    | Adam lr                 | Adam eps             |
|----------------------------------------|----------|----------|---------------------------|-------------------------|----------------------|
| token, position, CLS embedding         | 1        | 1        | D                         | 1                       | D^-1                 |
| patch embedding                        | Din^-1/2 | 1        | D                         | 1                       | Din^-1/2 D^-1        |
| value, attention out, MLP in, MLP out  | 1        | in^-1/2  | D in^-1 L^(2al-1)         | in^-1 L^(al-1)          | D^-1 L^-al           |
| query, key                             | 1        | in^-1/2  | N^(2aa-2) L^(2al-1)       | in^-1 N^(aa-1) L^(al-1) | D^-1 N^(1-aa) L^-al  |
| query, key bias; per-head QK-norm gain | 1        | 0; 1     | D N^(2aa-2) L^(2al-1)     | N^(aa-1) L^(al-1)       | D^-1 N^(1-aa) L^-al  |
| QK-norm gain shared by heads           | 1        | 1        | N^(2aa-1) L^(2al-1)       | N^(aa-1) L^(al-1)       | N^-aa L^-al          |
| other gains and biases in a block      | 1        | 1; 0     | D L^(2al-1)               | L^(al-1)                | D^-1 L^-al           |
| final norm, biases outside blocks      | 1        | 1; 0     | D                         | 1                       | D^-1                 |
| readout (TP-V Table 8)                 | D^-1     | 1        | D                         | 1                       | D^-1                 |
| readout, plain form (TP-V Table 3)     | 1        | D^-1     | D^-1                      | D^-1                    | 1                    |
| readout bias                           | 1        | 0        | 1                         | 1                       | 1                    |

attention logits * N^-aa, every residual branch * beta0 L^-al; `mup` and `mup-half` have no depth rule (no L anywhere).
Coupled weight decay is 1/lr on every matrix and embedding, so that lr*wd stays fixed; 0 on gains and biases.
Sources: the global rates of the paper's section 2.1 and appendix E.1, as rates per parameter.

Beyond the paper: where F/D, N*H/D or H/H_kv grows too, the gradients change size and eps follows them
(MLP in (F/D)^-1/2; q, k, v (N H/D)^-1/2; key and value, with G = H/H_kv, SGD G^-1 and eps G^1/2).
"""

from __future__ import annotations

from presets.preset import Preset, Rule
from presets.roles import ParamSpec, PresetError, Role
from presets.scaling import ONE, Power, axis, product

D, N, F, L, D_IN = axis("embed"), axis("head_dim"), axis("mlp"), axis("layers"), axis("patch")
HEADS_OVER_WIDTH = axis("head_dim") * axis("heads") / axis("embed")
QUERIES_PER_KEY = axis("heads") / axis("kv_heads")


def infinite_limits(
    name: str, *, alpha_a: float, alpha_l: float | None, gamma0: float = 1.0, beta0: float = 1.0, c_a: float = 1.0
) -> Preset:
    """The family of the module's table.

    Args:
        name: printed name.
        alpha_a: attention logits scale as N^-alpha_a, in [1/2, 1].
        alpha_l: branches scale as L^-alpha_l, in [1/2, 1]; None is no depth rule.
        gamma0: amount of feature learning (gamma0 -> 0 is lazy); divides the readout.
        beta0: constant on every branch, the effective depth.
        c_a: constant on attention logits.

    Raises:
        PresetError: an exponent outside [1/2, 1] or a constant that is not positive.
    """
    for label, value in (("alpha_a", alpha_a), ("alpha_l", alpha_l)):
        if value is not None and not 0.5 <= value <= 1.0:
            raise PresetError(f"{name}: {label}={value:g} is outside [0.5, 1], where the limit exists; write a value from 0.5 to 1")
    for label, value in (("gamma0", gamma0), ("beta0", beta0), ("c_a", c_a)):
        if not value > 0:
            raise PresetError(f"{name}: {label}={value:g} must be positive")

    readout_multiplier = D**-1 / gamma0

    def depth(spec: ParamSpec, exponent: float) -> Power:
        return L**exponent if spec.in_block and alpha_l is not None else ONE

    def rule(spec: ParamSpec) -> Rule:
        al = alpha_l if alpha_l is not None else 1.0  # without a depth rule `depth` is ONE whatever this is
        sgd_depth, adam_depth, eps_depth = depth(spec, 2 * al - 1), depth(spec, al - 1), depth(spec, -al)
        m_in = product(spec.fan_in)
        vector = Rule(sgd=D * sgd_depth, adam=adam_depth, eps=D**-1 * eps_depth, decays=False)
        matrix = Rule(init_std=m_in**-0.5, sgd=D / m_in * sgd_depth, adam=m_in**-1 * adam_depth, eps=D**-1 * eps_depth)
        match spec.role:
            case Role.TOKEN_EMBEDDING | Role.POSITION:
                return Rule(sgd=D, eps=D**-1)
            case Role.PATCH_EMBEDDING:
                return Rule(multiplier=D_IN**-0.5, sgd=D, eps=D_IN**-0.5 * D**-1)
            case Role.ATTENTION_OUT | Role.MLP_OUT | Role.HIDDEN:
                return matrix
            case Role.MLP_IN:
                return _scaled(matrix, eps=(F / D) ** -0.5)
            case Role.VALUE:
                return _scaled(matrix, sgd=QUERIES_PER_KEY**-1, eps=HEADS_OVER_WIDTH**-0.5 * QUERIES_PER_KEY**0.5)
            case Role.QUERY | Role.KEY:
                rows = _attention(matrix, alpha_a)
                kv = QUERIES_PER_KEY if spec.role is Role.KEY else ONE
                return _scaled(rows, sgd=kv**-1, eps=HEADS_OVER_WIDTH**-0.5 * kv**0.5)
            case Role.NORM_GAIN | Role.BIAS if spec.of in (Role.QUERY, Role.KEY):
                rows = _attention(vector, alpha_a)
                shared = spec.role is Role.NORM_GAIN and not {"heads", "kv_heads"} & set(spec.axes)
                return _scaled(rows, sgd=N / D, eps=D / N) if shared else rows
            case Role.BIAS if spec.of is Role.READOUT:
                return Rule(multiplier=ONE / gamma0, decays=False)
            case Role.NORM_GAIN | Role.BIAS:
                return vector
            case Role.READOUT:
                return Rule(multiplier=readout_multiplier, sgd=D, eps=D**-1)
        raise PresetError(f"{name} has no rule for the role {spec.role.value}")

    def rich_or_lazy(spec: ParamSpec) -> Rule:
        # Gradients go as 1/gamma0 through the readout: SGD rates * gamma0^2 (paper), eps / gamma0 (derived).
        return _scaled(rule(spec), sgd=ONE * gamma0**2, eps=ONE / gamma0)

    given = {"alpha_a": alpha_a, "alpha_l": alpha_l, "gamma0": gamma0, "beta0": beta0, "c_a": c_a}
    return Preset(
        name=name,
        rule=rich_or_lazy,
        native_form="readout-multiplier",
        form="readout-multiplier",
        readout_multiplier=readout_multiplier,
        logits=c_a * N**-alpha_a,
        branch=beta0 * (L**-alpha_l if alpha_l is not None else ONE),
        given={k: v for k, v in given.items() if v is not None and (k.startswith("alpha") or v != 1.0)},
    )


def _attention(rule: Rule, alpha_a: float) -> Rule:
    """The extra N factors of everything that makes queries and keys."""
    return _scaled(rule, sgd=N ** (2 * alpha_a - 2), adam=N ** (alpha_a - 1), eps=N ** (1 - alpha_a))


def _scaled(rule: Rule, *, sgd: Power = ONE, adam: Power = ONE, eps: Power = ONE) -> Rule:
    return Rule(
        multiplier=rule.multiplier,
        init_std=rule.init_std,
        sgd=rule.sgd * sgd,
        adam=rule.adam * adam,
        eps=rule.eps * eps,
        decays=rule.decays,
    )


def mup(*, alpha_a: float = 1.0, gamma0: float = 1.0, beta0: float = 1.0, c_a: float = 1.0) -> Preset:
    """muP: attention logits 1/N, feature learning at every width, no depth rule (heads collapse as N grows)."""
    return infinite_limits("mup", alpha_a=alpha_a, alpha_l=None, gamma0=gamma0, beta0=beta0, c_a=c_a)


def mup_half(*, gamma0: float = 1.0, beta0: float = 1.0, c_a: float = 1.0) -> Preset:
    """muP with attention logits 1/sqrt(N): heads stay diverse as N grows, no depth rule."""
    return infinite_limits("mup-half", alpha_a=0.5, alpha_l=None, gamma0=gamma0, beta0=beta0, c_a=c_a)


def depth_mup(
    *, alpha_l: float = 0.5, alpha_a: float = 1.0, gamma0: float = 1.0, beta0: float = 1.0, c_a: float = 1.0
) -> Preset:
    """muP with branches L^-alpha_l for depth transfer; alpha_l and alpha_a anywhere in [1/2, 1]."""
    return infinite_limits("depth-mup", alpha_a=alpha_a, alpha_l=alpha_l, gamma0=gamma0, beta0=beta0, c_a=c_a)
