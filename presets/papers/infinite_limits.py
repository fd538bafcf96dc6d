"""Infinite limits of multi-head transformers: `mup`, `mup-half` and `depth-mup`.

Source: Bordelon, Chaudhry, Pehlevan 2024 (2405.15712), the global rates of section 2.1 and appendix
E.1, written as rates per parameter. TP-V is Tensor Programs V (2203.03466).

m_X is size / base size, and the tables write X for it: D width, N head dimension, F MLP, L depth,
"in" fan-in, Din patch. aa is alpha_a, al is alpha_l. SGD learning rates also have the factor
gamma0^2, and eps has 1 / gamma0. Outside of blocks:

| role                               | mult.    | std  | SGD lr | Adam lr | Adam eps      |
|------------------------------------|----------|------|--------|---------|---------------|
| token, position, CLS embedding     | 1        | 1    | D      | 1       | D^-1          |
| patch embedding                    | Din^-1/2 | 1    | D      | 1       | Din^-1/2 D^-1 |
| final norm, biases outside blocks  | 1        | 1; 0 | D      | 1       | D^-1          |
| readout (TP-V Table 8)             | D^-1     | 1    | D      | 1       | D^-1          |
| readout, plain form (TP-V Table 3) | 1        | D^-1 | D^-1   | D^-1    | 1             |
| readout bias                       | 1        | 0    | 1      | 1       | 1             |

In blocks the multiplier is 1. With a depth rule every row also has the factors L^(2al-1) on SGD lr,
L^(al-1) on Adam lr and L^-al on eps:

| role                                   | std     | SGD lr      | Adam lr        | Adam eps      |
|----------------------------------------|---------|-------------|----------------|---------------|
| value, attention out, MLP in, MLP out  | in^-1/2 | D in^-1     | in^-1          | D^-1          |
| query, key                             | in^-1/2 | N^(2aa-2)   | in^-1 N^(aa-1) | D^-1 N^(1-aa) |
| query, key bias; per-head QK-norm gain | 0; 1    | D N^(2aa-2) | N^(aa-1)       | D^-1 N^(1-aa) |
| QK-norm gain shared by heads           | 1       | N^(2aa-1)   | N^(aa-1)       | N^-aa         |
| relative bias of all blocks (derived)  | 0       | D N^-1 L^-1 | 1              | D^-1 N L      |
| other gains and biases                 | 1; 0    | D           | 1              | D^-1          |

* Attention logits have the factor N^-aa, every residual branch beta0 L^-al. `mup` and `mup-half`
  have no depth rule, and no L anywhere.
* Coupled weight decay is 1/lr on every matrix and embedding, so that lr*wd stays fixed. It is 0 on
  gains and biases.
* Muon (derived): every block matrix (out/in)^1/2 L^(al-1), query and key also N^(aa-1), and the
  factor of its blocks (`MuonRule`). The rest stays on Adam. Lion follows Adam.
* Forms: plain (TP-V Table 3), readout-multiplier (TP-V Table 8, the native form), table-9, and
  mean-field (section 2.1 of the paper).

Beyond the paper (derived):

* If F/D, N*H/D or H/H_kv grows, too, gradients change size. eps follows them, and biases follow
  their matrices: MLP in (F/D)^-1/2; query, key and value (N H/D)^-1/2; key and value, with
  G = H/H_kv, SGD G^-1 and eps G^1/2.
* In an encoder-decoder L is the depth of a parameter's own stack. For key and value of
  cross-attention "in" is the encoder's width. The norm before cross-attention, which only its
  queries read, has the row of a query's bias.
* Gains of what a branch writes (layer scale, a norm after the branch) have the row of other gains.
  Their entries see the stream's gradient times L^-al, and L of them must move the stream by order
  one. Their initial value is no power of a size: it is a factor on beta0 that trains.
* A norm after a branch changes no exponent. A soft cap of logits that is the same at all sizes
  changes none either.

Layers of experts follow Jiang, Bordelon, Pehlevan and Hanin 2026 (2601.20205): E experts of hidden
size m, a of them per token, a/E fixed. The depth factors are those of other rows in blocks:

| role                    | std        | SGD lr (derived) | Adam lr | Adam eps (derived) |
|-------------------------|------------|------------------|---------|--------------------|
| router                  | D^-1       | E D^-1           | D^-1    | E^-1               |
| expert in (gate and up) | D^-1/2     | E m D^-1         | D^-1    | E^-1 m^-1          |
| expert out              | m^-1 D^1/2 | E D m^-1         | m^-1    | E^-1 D^-1          |

These eps follow the gradients. `experts_eps=table` has the eps of the paper's Table 2 instead
(`table_eps`). A router's bias moves by loads and not by a gradient, so its row is 1 under every
preset. Muon (derived): expert in and out as other block matrices, each expert apart. The router
stays on Adam.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, cast, get_args

from mupax.presets.optimizers import Family
from mupax.presets.preset import Blocks, MuonRule, Preset, Scale, Shape
from mupax.presets.roles import VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import ONE, Power, Rule, axis, changed, product

D = axis("embed")
N = axis("head_dim")
F = axis("mlp")
L = axis("layers")
E = axis("experts")
M = axis("expert_dim")
VALUES = axis("value_dim") / N
HEADS_OVER_WIDTH = axis("head_dim") * axis("heads") / axis("embed")
QUERIES_PER_KEY = axis("heads") / axis("kv_heads")
_LARGEST_FACTOR = 1e12
"""Largest constant factor, such as gamma0. Its inverse is the smallest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of the presets `mup`, `mup-half` and `depth-mup`. `completep` has some of them.

    The defaults are those of `depth-mup`. `mup` and `mup-half` set `alpha_l` to `None`, and
    `mup-half` sets `alpha_a` to 1/2. D is the width, L the depth, N the head dimension and F the MLP's hidden size, all relative to
    the base. `mupax.presets.papers.choices` explains the values on which sources disagree.

    Attributes:
        alpha_l: Branches scale as L^-alpha_l, in [1/2, 1]. `None` is no depth rule.
        alpha_a: Attention logits scale as N^-alpha_a, in [1/2, 1].
        gamma0: Amount of feature learning, which divides the readout. gamma0 -> 0 is lazy.
        beta0: Factor on every branch. A larger one acts as a deeper network does.
        c_a: Factor on attention logits.
        decay_width: lr*wd of block matrices goes as D^decay_width.
        readout_width: Initial std of the readout goes as D^readout_width.
        readout_bias_width: Learning rates of the readout's bias go as D^readout_bias_width.
        embedding_width: Adam's learning rate of the token embedding goes as D^embedding_width.
        key_start: Initial keys: "own" for random ones, "query" for a copy of the query matrix.
        mlp_out: Initial std of the MLP's output matrix, "fan-in" or, for F/D that grows,
            "mean-field".
        experts: Rules of experts and their router, "mean-field", "mssp" or "dense".
        experts_eps: Adam's eps in models with experts, by the "gradients" or by the "table" of
            2601.20205.
        muon_scale: Size of Muon's step at the base, "spectral", "rms" or "measured".
        muon_blocks: What Muon orthogonalizes, the "matrix", "heads", "heads-unscaled" or "tiles".
        muon_shape: Factor (out/in)^1/2 of Muon, relative to the "base" or "absolute".
    """

    alpha_l: float | None = 0.5
    alpha_a: float = 1.0
    gamma0: float = 1.0
    beta0: float = 1.0
    c_a: float = 1.0
    decay_width: float = 0.0
    readout_width: float = -1.0
    readout_bias_width: float = 0.0
    embedding_width: float = 0.0
    key_start: str = "own"
    mlp_out: str = "fan-in"
    experts: str = "mean-field"
    experts_eps: str = "gradients"
    muon_scale: str = "spectral"
    muon_blocks: str = "matrix"
    muon_shape: str = "base"

    @property
    def muon(self) -> MuonRule:
        """Size and blocks of Muon's steps."""
        return MuonRule(
            scale=cast("Scale", self.muon_scale),
            blocks=cast("Blocks", self.muon_blocks),
            shape=cast("Shape", self.muon_shape),
        )

    def check(self, name: str) -> None:
        """Raise an error for constants at which the limit does not exist.

        Args:
            name: Name of the preset, for the message.

        Raises:
            PresetError: `alpha_a` or `alpha_l` is outside [1/2, 1], a factor is not above 0,
                initial logits would grow, or two choices for Muon contradict each other.
        """
        for label, value in (("alpha_a", self.alpha_a), ("alpha_l", self.alpha_l)):
            if value is not None and not 0.5 <= value <= 1.0:
                raise PresetError(
                    f"{name}: {label}={value:g} is outside [0.5, 1], where the limit exists; "
                    f"write a value from 0.5 to 1"
                )
        for label, value in (("gamma0", self.gamma0), ("beta0", self.beta0), ("c_a", self.c_a)):
            if not value > 0:
                raise PresetError(
                    f"{name}: {label}={value:g} must be positive; write a number above 0"
                )
            # Rows have its square and its inverse, which must be finite in float32.
            if not 1 / _LARGEST_FACTOR <= value <= _LARGEST_FACTOR:
                raise PresetError(
                    f"{name}: {label}={value:g} is too far from 1; write a number from "
                    f"{1 / _LARGEST_FACTOR:g} to {_LARGEST_FACTOR:g}"
                )
        if self.key_start == "query" and self.alpha_a != 1:
            raise PresetError(
                f"{name}: with key_start=query logits start as N^(1-alpha_a), which grows at "
                f"alpha_a={self.alpha_a:g}; write alpha_a 1"
            )
        self.muon.check(name)


# Checks of a model ask for the same rows again and again.
@functools.lru_cache(1024)
def row_of(spec: ParamSpec, alpha_a: float, alpha_l: float | None) -> Rule:
    """Return a parameter's row in the infinite limits of 2405.15712, at gamma0 = 1.

    The row has the multiplier, std, learning rates and eps in the readout-multiplier form. Rows are
    cached. N is the head dimension and L the depth.

    Args:
        spec: Declaration of the parameter. Experts and routers get the row of a block matrix.
        alpha_a: Attention logits scale as N^-alpha_a, in [1/2, 1].
        alpha_l: Branches scale as L^-alpha_l. `None` is no depth rule, with no L anywhere.

    Raises:
        PresetError: The parameter is a gain of the readout, which has no row.
    """
    match spec.role:
        case Role.TOKEN_EMBEDDING | Role.POSITION:
            # The readout scales gradients by 1/D. SGD's learning rate makes up for that, and eps
            # follows the gradients.
            return Rule(sgd=D, eps=D**-1)
        case Role.PATCH_EMBEDDING:
            root = product(spec.fan_in) ** -0.5
            return Rule(multiplier=root, sgd=D, eps=root * D**-1)
        case Role.READOUT:
            # m_in is the width in every model whose readout reads the residual stream.
            m_in = product(spec.fan_in)
            return Rule(multiplier=m_in**-1, sgd=m_in, eps=m_in**-1)
        # Its gradient does not pass through the readout's multiplier, so no size enters.
        case Role.BIAS if spec.of is Role.READOUT:
            return Rule(decays=False)
        case Role.NORM_GAIN if spec.of is Role.READOUT:
            raise PresetError(
                "a readout's gain has no rule; declare it as a norm of the residual stream "
                "(of=None)"
            )
    sgd = ONE
    adam = ONE
    eps = ONE
    if spec.in_block and alpha_l is not None:
        # The changes of the L blocks are aligned, so they add up as L. Steps of SGD contain the
        # factor of the branch twice, from the gradient and from the forward pass, and steps of Adam
        # once.
        sgd = L ** (2 * alpha_l - 1)
        adam = L ** (alpha_l - 1)
        eps = L**-alpha_l
    if spec.role in VECTORS:
        row = Rule(sgd=D * sgd, adam=adam, eps=D**-1 * eps, decays=False)
    else:
        m_in = product(spec.fan_in)
        m_out = product(spec.fan_out)
        row = Rule(
            init_std=m_in**-0.5,
            sgd=D / m_in * sgd,
            adam=m_in**-1 * adam,
            # A step of spectral norm 1 multiplies root mean squares by up to (m_in / m_out)^1/2.
            muon=(m_out / m_in) ** 0.5 * adam,
            eps=D**-1 * eps,
        )
    return _placed(spec, row, alpha_a)


def heads_summed(spec: ParamSpec) -> Power:
    """Return the number of terms in the gradient of a gain or bias, as a power law.

    It is 1 for most parameters. The gradient of a QK-norm gain that heads share is a sum over
    heads. A relative bias goes into a head's logits, so its gradient is a sum over the head's N
    values, and over all blocks if they share a table. (Both derived.)
    """
    if spec.role is Role.RELATIVE_BIAS:
        # One table for all blocks gets the gradients of all of them.
        return N if spec.stacked else N * L
    is_qk_gain = spec.role is Role.NORM_GAIN and spec.of in (Role.QUERY, Role.KEY)
    is_per_head = "heads" in spec.axes or "kv_heads" in spec.axes
    if is_qk_gain and not is_per_head:
        return D / N
    return ONE


def _placed(spec: ParamSpec, row: Rule, alpha_a: float) -> Rule:
    """Return the row with the extra factors of certain places in a block, such as query or MLP in.

    They change learning rates, eps and the mean-field factor. They also apply to a matrix's gains
    and biases. The row of a place without extra factors is returned unchanged.

    Args:
        row: Row that depends on fan-in and depth only.
        alpha_a: Attention logits scale as N^-alpha_a, in [1/2, 1], with the head dimension N.
    """
    role = spec.of or spec.role
    is_cross_norm = spec.part == "cross" and role is Role.NORM_GAIN
    if role in (Role.QUERY, Role.KEY) or is_cross_norm:
        # After alignment, the logits N^-alpha_a q.k are sums of N terms of one sign. At this rate
        # they move by order one.
        slowed = N ** (alpha_a - 1)
        row = row.times(sgd=slowed**2, adam=slowed, eps=slowed**-1)
        if spec.value_dim:
            # The gradient sums over the entries of a value. N stands for their number if values
            # have no size of their own.
            row = row.times(sgd=VALUES**-1, eps=VALUES)
        row = dataclasses.replace(row, mean_field=slowed)
        if spec.role is Role.NORM_GAIN:
            summed = heads_summed(spec)
            return row.times(sgd=summed**-1, eps=summed)
    # Gradients of query, key and value come through attention out, whose entries start at
    # (N_v H)^-1/2, or at (N H)^-1/2 if values have no size of their own.
    over_width = HEADS_OVER_WIDTH
    if spec.value_dim or "value_dim" in spec.axes:
        over_width = HEADS_OVER_WIDTH * VALUES
    match role:
        case Role.RELATIVE_BIAS:
            summed = heads_summed(spec)
            return row.times(sgd=summed**-1, eps=summed)
        case Role.MLP_IN:
            # Its gradient comes through MLP out, whose entries start at F^-1/2.
            return row.times(eps=(F / D) ** -0.5)
        case Role.QUERY:
            return row.times(eps=over_width**-0.5)
        case Role.KEY | Role.VALUE:
            return row.times(sgd=QUERIES_PER_KEY**-1, eps=over_width**-0.5 * QUERIES_PER_KEY**0.5)
    return row


def of_experts(spec: ParamSpec, row: Rule, choice: str) -> Rule:
    """Return the row of a router or of experts, under a choice of their rules.

    An expert's gradient is a sum over a share a/E of the tokens, each with a gate of 1/a, for E
    experts of which a are active per token. Rows of other parameters are returned unchanged.

    Args:
        row: Row that the parameter would have as a dense matrix of the block.
        choice: Constant `experts`: "mean-field", "mssp" or "dense".
    """
    role = spec.of or spec.role
    over_width = M / D
    if role is Role.ROUTER:
        # A router's outputs are scores of experts, not a growing activation: it stays on Adam.
        row = dataclasses.replace(row, muon=None)
        if choice == "dense":
            return row
        row = dataclasses.replace(row, init_std=row.init_std * D**-0.5)
        # The gradient of a score is the inner product of the expert's output and the backward
        # signal: a sum of D terms of order 1/D.
        return row.times(sgd=E / D, eps=D / E)
    if role is Role.EXPERT_IN:
        if choice == "dense":
            return row.times(eps=over_width**-0.5)
        factors = {"mean-field": E * over_width, "mssp": E**0.5 * over_width**0.5}
        return row.times(sgd=factors[choice], eps=factors[choice] ** -1)
    if role is Role.EXPERT_OUT:
        if choice == "dense":
            return row
        factors = {"mean-field": over_width**-0.5, "mssp": E**0.5}
        if spec.role is Role.EXPERT_OUT:
            row = dataclasses.replace(row, init_std=row.init_std * factors[choice])
        return row.times(sgd=E, eps=E**-1)
    return row


def table_eps(spec: ParamSpec, alpha_l: float | None) -> Power | None:
    """Return Adam's eps by Table 2 of 2601.20205, as a power law relative to the base.

    `None` stands for a parameter that the table does not name.

    Args:
        alpha_l: Branches scale as L^-alpha_l, 1 in the paper. `None` is no depth rule.
    """
    depth = ONE
    if alpha_l is not None:
        depth = L**-alpha_l
    match spec.role:
        case Role.ROUTER:
            return D**-1 * depth
        case Role.EXPERT_IN:
            return M**-1 * depth
        case Role.EXPERT_OUT:
            return D * M**-2 * depth
        case Role.NORM_GAIN:
            return ONE
        case Role.BIAS if spec.in_block:
            return depth
    return None


def _table_groups() -> tuple[ParamSpec, ...]:
    """Return one declaration for each parameter group whose eps `table_eps` sets."""
    groups = [ParamSpec(role=Role.NORM_GAIN, axes=("embed",))]
    without = VECTORS | {Role.READOUT, Role.ROUTER}
    for role in (Role.NORM_GAIN, Role.BIAS):
        for owner in (None, *Role):
            is_norm_bias = role is Role.BIAS and owner is Role.NORM_GAIN
            if owner not in without or is_norm_bias:
                groups.append(ParamSpec(role=role, axes=("embed",), in_block=True, of=owner))
    matrices = {
        Role.ROUTER: ("embed", "experts"),
        Role.EXPERT_IN: ("experts", "embed", "expert_dim"),
        Role.EXPERT_OUT: ("experts", "expert_dim", "embed"),
    }
    for role, axes in matrices.items():
        groups.append(ParamSpec(role=role, axes=axes, fan_in=axes[-2:-1], in_block=True))
    return tuple(groups)


_TABLE_GROUPS = _table_groups()


def _conceded_by_table(
    rule: Callable[[ParamSpec], Rule], alpha_l: float | None
) -> dict[str, Power]:
    """Return how the ratio of gradient to eps changes with size under `table_eps`.

    The result has power laws by "eps/GROUP". They become entries of `Preset.vanishing`.

    Args:
        rule: Function that returns rows whose eps follows the gradients.
        alpha_l: Branches scale as L^-alpha_l. `None` is no depth rule.
    """
    conceded = {}
    for spec in _TABLE_GROUPS:
        eps = table_eps(spec, alpha_l) or ONE
        conceded[f"eps/{spec.group}"] = rule(spec).eps / eps
    return conceded


def _row(name: str, constants: Constants, spec: ParamSpec) -> Rule:
    """Return a parameter's row under all constants of the infinite-limits presets.

    Args:
        name: Name of the preset, for the message.

    Raises:
        PresetError: The readout is tied and would need two rules, or the role has no row.
    """
    gamma0 = constants.gamma0
    row = of_experts(spec, row_of(spec, constants.alpha_a, constants.alpha_l), constants.experts)
    if constants.experts_eps == "table":
        row = dataclasses.replace(row, eps=table_eps(spec, constants.alpha_l) or row.eps)
    # Gradients go as 1/gamma0 through the readout: SGD rates * gamma0^2 (paper), eps / gamma0
    # (derived).
    row = row.times(sgd=gamma0**2, eps=1 / gamma0)
    # The readout's bias is inside of 1/gamma0, too: the whole output is divided.
    if Role.READOUT in (spec.role, spec.of):
        row = dataclasses.replace(row, multiplier=row.multiplier / gamma0)
    if constants.readout_bias_width and spec.of is Role.READOUT:
        factor = D**constants.readout_bias_width
        row = row.times(sgd=factor, adam=factor)
    # Only hidden matrices have a Muon rate, and this constant is about them.
    if constants.decay_width and row.muon is not None:
        row = dataclasses.replace(row, decay=D**constants.decay_width)
    if spec.tied and (constants.readout_width != -1 or constants.embedding_width):
        constant = "embedding_width"
        if constants.readout_width != -1:
            constant = "readout_width"
        raise PresetError(
            f"{name}: a tied readout has one table, and {constant} wants two rules for it; untie it"
        )
    if constants.readout_width != -1:
        row = _with_larger_readout(spec, row, D ** (constants.readout_width + 1))
    if constants.embedding_width and spec.role is Role.TOKEN_EMBEDDING:
        row = row.times(adam=D**constants.embedding_width)
    # Derived from the rule for experts of 2601.20205, in which every hidden entry moves as F/D
    # grows.
    if constants.mlp_out == "mean-field":
        if spec.role is Role.MLP_OUT:
            row = dataclasses.replace(row, init_std=row.init_std * (F / D) ** -0.5)
        elif Role.MLP_IN in (spec.role, spec.of):
            row = row.times(sgd=F / D, eps=(F / D) ** -0.5)
    if row.muon is not None:
        row = dataclasses.replace(row, muon=row.muon * constants.muon.lr(spec))
    return row


def _with_larger_readout(spec: ParamSpec, row: Rule, factor: Power) -> Rule:
    """Return a parameter's row in a model whose readout starts larger by a factor.

    The readout's multiplier carries the factor. The row of its bias is unchanged. Gradients of
    everything before the readout grow by the factor, so SGD's learning rate is divided by it and
    eps multiplied by it.

    Args:
        spec: Declaration of the parameter, the readout or another one.
        row: Row for a readout of the usual size.
        factor: Factor on the readout's initial size, relative to `row`.
    """
    if spec.role is Role.READOUT:
        # Moved into the multiplier, because the native form of this family starts the readout at
        # std 1.
        return dataclasses.replace(row, init_std=row.init_std * factor).moved(factor)
    if spec.of is Role.READOUT:
        return row
    return row.times(sgd=factor**-1, eps=factor)


def infinite_limits(name: str, constants: Constants) -> Preset:
    """Return the preset for an infinite limit of a transformer (2405.15712) at given constants.

    Constants that are texts, such as `mlp_out`, are not checked here.
    `mupax.presets.papers.choices.make` refuses unknown ones.

    Args:
        name: Name that the preset prints and that messages have.

    Raises:
        PresetError: A constant is out of its range (`Constants.check`).
    """
    constants.check(name)
    alpha_a = constants.alpha_a
    alpha_l = constants.alpha_l

    def by_gradients(spec: ParamSpec) -> Rule:
        return of_experts(spec, row_of(spec, alpha_a, alpha_l), constants.experts)

    def rule(spec: ParamSpec) -> Rule:
        return _row(name, constants, spec)

    branch = constants.beta0 * ONE
    powers: dict[str, float | str] = {"alpha_a": alpha_a}
    if alpha_l is not None:
        branch = constants.beta0 * L**-alpha_l
        powers["alpha_l"] = alpha_l
    defaults = vars(Constants())
    pairs = {}
    for constant, value in vars(constants).items():
        if constant not in powers:
            pairs[constant] = (value, defaults[constant])

    by_table = constants.experts_eps == "table"
    vanishing = {}
    # q.k is of order N^1/2 for independent vectors, and of order N if the key equals the query.
    if constants.key_start != "query":
        vanishing["attention"] = N ** (0.5 - alpha_a)
    vanishing["movement/token_embedding"] = D**constants.embedding_width
    vanishing["movement/readout.bias"] = D**constants.readout_bias_width
    if by_table:
        vanishing |= _conceded_by_table(by_gradients, alpha_l)
    return Preset(
        name=name,
        rule=rule,
        native_form="readout-multiplier",
        logits=constants.c_a * N**-alpha_a,
        branch=branch,
        no_rule=_without_muon(constants),
        muon=constants.muon,
        key_as_query=constants.key_start == "query",
        choices=powers | changed(**pairs),
        vanishing=vanishing,
        uneven=not by_table,
    )


def _without_muon(constants: Constants) -> dict[Family, str]:
    """Return the optimizer families that constants about Muon exclude, each with the reason.

    If a constant about Muon's steps is not the default, all families but Muon are excluded.
    `muon_scale` = "rms" excludes none.
    """
    reasons = {}
    for constant, rms in (("muon_scale", "rms"), ("muon_blocks", None), ("muon_shape", None)):
        value = getattr(constants, constant)
        # muon_scale=rms was accepted from all optimizers before the other values were added.
        if value in (getattr(Constants(), constant), rms):
            continue
        for family in get_args(Family):
            if family != "muon":
                reasons[family] = f"{constant}={value} is about Muon; leave it out, or write muon"
    return reasons


def _signature(*fixed: str) -> inspect.Signature:
    """Return the signature of a preset function, with the fields of `Constants` as parameters.

    Args:
        *fixed: Names of the fields that the preset itself fixes, which are left out.
    """
    parameters = inspect.signature(Constants).parameters.values()
    remaining = []
    for parameter in parameters:
        if parameter.name not in fixed:
            remaining.append(parameter)
    return inspect.Signature(remaining)


# The command line reads the constants of a preset, their types and defaults from its signature.
# `Constants` declares them once for all members of the family.


def mup(**constants: Any) -> Preset:
    """muP: logits 1/N, no depth rule. Features learn at every width; heads collapse as N grows."""
    return infinite_limits("mup", Constants(alpha_l=None, **constants))


def mup_half(**constants: Any) -> Preset:
    """muP with attention logits 1/sqrt(N): heads stay diverse as N grows, no depth rule."""
    return infinite_limits("mup-half", Constants(alpha_a=0.5, alpha_l=None, **constants))


def depth_mup(**constants: Any) -> Preset:
    """muP with branches L^-alpha_l for depth transfer; alpha_l and alpha_a anywhere in [1/2, 1]."""
    return infinite_limits("depth-mup", Constants(**constants))


mup.__signature__ = _signature("alpha_l")  # pyright: ignore
mup_half.__signature__ = _signature("alpha_a", "alpha_l")  # pyright: ignore
depth_mup.__signature__ = _signature()  # pyright: ignore
