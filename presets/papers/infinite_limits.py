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
| relative bias of all blocks (derived) | 1       | 0        | D N^-1 L^(2al-2)          | L^(al-1)                | D^-1 N L^(1-al)      |
| other gains and biases in a block      | 1        | 1; 0     | D L^(2al-1)               | L^(al-1)                | D^-1 L^-al           |
| final norm, biases outside blocks      | 1        | 1; 0     | D                         | 1                       | D^-1                 |
| readout (TP-V Table 8)                 | D^-1     | 1        | D                         | 1                       | D^-1                 |
| readout, plain form (TP-V Table 3)     | 1        | D^-1     | D^-1                      | D^-1                    | 1                    |
| readout bias                           | 1        | 0        | 1                         | 1                       | 1                    |

Muon: every block matrix (out/in)^1/2 L^(al-1), query and key also N^(aa-1); the rest stays on Adam. Lion as Adam. (Derived.)
attention logits * N^-aa, every residual branch * beta0 L^-al; `mup` and `mup-half` have no depth rule (no L anywhere).
Coupled weight decay is 1/lr on every matrix and embedding, so that lr*wd stays fixed; 0 on gains and biases.
Sources: the global rates of the paper's section 2.1 and appendix E.1, as rates per parameter.

Beyond the paper: where F/D, N*H/D or H/H_kv grows too, the gradients change size and eps follows them, biases as their
matrices (MLP in (F/D)^-1/2; q, k, v (N H/D)^-1/2; key and value, with G = H/H_kv, SGD G^-1 and eps G^1/2).
In an encoder-decoder L is the depth of a parameter's own stack, and in is the encoder's width for cross-attention's key and value.
The norm before cross-attention, which its queries alone read, has the row of a query's bias. (Derived.)
Gains of what a branch writes (layer scale, a norm's after the branch) have the row of other gains: their entries see the stream's
gradient times L^-al, and L of them must move the stream by order one. What they start at is no power of a size; it is a factor on
beta0 that trains. A norm after a branch changes no exponent, nor does a soft cap of logits that is the same at all sizes. (Derived.)
Layers of experts after Jiang, Bordelon, Pehlevan and Hanin 2026 (2601.20205), E experts of hidden size m, a per token, a/E fixed:

| role                          | std             | SGD lr (derived)     | Adam lr          | Adam eps (derived)   |
|-------------------------------|-----------------|----------------------|------------------|----------------------|
| router                        | D^-1            | E D^-1 L^(2al-1)     | D^-1 L^(al-1)    | E^-1 L^-al           |
| expert in (gate and up)       | D^-1/2          | E m D^-1 L^(2al-1)   | D^-1 L^(al-1)    | E^-1 m^-1 L^-al      |
| expert out                    | m^-1 D^1/2      | E D m^-1 L^(2al-1)   | m^-1 L^(al-1)    | E^-1 D^-1 L^-al      |

These eps follow the gradients. `experts_eps=table` has those of the paper's Table 2 instead: router D^-1 L^-al, expert in m^-1 L^-al,
expert out D m^-2 L^-al, gains of norms 1, biases in blocks L^-al.
A router's bias moves by loads and not by a gradient: its row is 1 under every preset. Muon: expert in and out as other block
matrices, each expert apart; the router stays on Adam (derived).
Constants whose values `choices` lists: `experts`, `experts_eps`, `readout_width`, `readout_bias_width`, `embedding_width`, `decay_width`,
`key_start`, `mlp_out`, `muon_scale`.
Forms: plain (TP-V Table 3), readout-multiplier (Table 8, native), table-9, mean-field (the paper's section 2.1).

The family's constants are numbers and names that its presets take, with the ranges they are in.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from mupax.presets.preset import Preset
from mupax.presets.roles import VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import ONE, Power, Rule, axis, changed, product

D, N, F, L = axis("embed"), axis("head_dim"), axis("mlp"), axis("layers")
E = axis("experts")
VALUES = axis("value_dim") / N
HEADS_OVER_WIDTH = axis("head_dim") * axis("heads") / axis("embed")
QUERIES_PER_KEY = axis("heads") / axis("kv_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """What the presets of the family take; `choices` says of some what each value is.

    Attributes:
        alpha_l: branches scale as L^-alpha_l, in [1/2, 1]; None is no depth rule.
        alpha_a: attention logits scale as N^-alpha_a, in [1/2, 1].
        gamma0: amount of feature learning (gamma0 -> 0 is lazy); divides the readout.
        beta0: constant on every branch, the effective depth.
        c_a: constant on attention logits.
        decay_width: lr*wd of block matrices goes as D^decay_width.
        readout_width: the readout's initial std goes as D^readout_width.
        readout_bias_width: rates of the readout's bias go as D^readout_bias_width.
        embedding_width: Adam's rate of the token embedding goes as D^embedding_width.
        key_start: keys start from numbers of their "own" or as the "query" matrix.
        mlp_out: initial std of MLP out, "fan-in" or "mean-field", for F/D that grows.
        experts: rules of experts and their router, "mean-field", "mssp" or "dense".
        experts_eps: Adam's eps in models with experts, as the "gradients" or by the "table" of 2601.20205.
        muon_scale: Muon's step at the base, "spectral" or "rms".
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

    def check(self, name: str) -> None:
        """Raises PresetError for an exponent outside [1/2, 1], constants not positive or that explode; `name` is the preset's."""
        for label, value in (("alpha_a", self.alpha_a), ("alpha_l", self.alpha_l)):
            if value is not None and not 0.5 <= value <= 1.0:
                raise PresetError(
                    f"{name}: {label}={value:g} is outside [0.5, 1], where the limit exists; write a value from 0.5 to 1"
                )
        for label, value in (("gamma0", self.gamma0), ("beta0", self.beta0), ("c_a", self.c_a)):
            if not value > 0:
                raise PresetError(
                    f"{name}: {label}={value:g} must be positive; write a number above 0"
                )
        if self.key_start == "query" and self.alpha_a != 1:
            raise PresetError(
                f"{name}: with key_start=query logits start as N^(1-alpha_a), which grows at alpha_a={self.alpha_a:g}; write alpha_a 1"
            )


@functools.lru_cache(1024)  # checks ask for the same rows again and again
def row_of(spec: ParamSpec, alpha_a: float, alpha_l: float | None) -> Rule:
    """The module's table at gamma0 = 1.

    Args:
        spec: the parameter.
        alpha_a: attention logits scale as N^-alpha_a.
        alpha_l: branches scale as L^-alpha_l; None is no depth rule, an L nowhere.

    Raises:
        PresetError: the role has no row.
    """
    match spec.role:
        case Role.TOKEN_EMBEDDING | Role.POSITION:
            return Rule(sgd=D, eps=D**-1)
        case Role.PATCH_EMBEDDING:
            root = product(spec.fan_in) ** -0.5
            return Rule(multiplier=root, sgd=D, eps=root * D**-1)
        case Role.READOUT:
            m_in = product(
                spec.fan_in
            )  # the width, in every model whose readout reads the residual stream
            return Rule(multiplier=m_in**-1, sgd=m_in, eps=m_in**-1)
        case Role.BIAS if spec.of is Role.READOUT:
            return Rule(decays=False)
        case Role.NORM_GAIN if spec.of is Role.READOUT:
            raise PresetError(
                "a readout's gain has no rule; declare it as a norm of the residual stream (of=None)"
            )
    sgd, adam, eps = ONE, ONE, ONE
    if spec.in_block and alpha_l is not None:
        sgd, adam, eps = L ** (2 * alpha_l - 1), L ** (alpha_l - 1), L**-alpha_l
    if spec.role in VECTORS:
        row = Rule(sgd=D * sgd, adam=adam, eps=D**-1 * eps, decays=False)
    else:
        m_in, m_out = product(spec.fan_in), product(spec.fan_out)
        muon = (m_out / m_in) ** 0.5 * adam
        row = Rule(
            init_std=m_in**-0.5,
            sgd=D / m_in * sgd,
            adam=m_in**-1 * adam,
            muon=muon,
            eps=D**-1 * eps,
        )
    return _in_branch(spec, row, alpha_a)


def heads_summed(spec: ParamSpec) -> Power:
    """How many gradients of an entry's size a parameter adds up: those of all heads in a QK-norm gain that they share, else one.

    A relative bias goes into a head's logits as a whole: its gradient sums over the head's N values, and over all blocks where
    they share a table. (Both derived.)
    """
    if spec.role is Role.RELATIVE_BIAS:
        return N if spec.stacked else N * L
    of_head = spec.role is Role.NORM_GAIN and spec.of in (Role.QUERY, Role.KEY)
    return D / N if of_head and not {"heads", "kv_heads"} & set(spec.axes) else ONE


def _in_branch(spec: ParamSpec, row: Rule, alpha_a: float) -> Rule:
    """What the place in the block adds to a matrix' row, and to those of its bias and gain."""
    role = spec.of or spec.role
    if role in (Role.QUERY, Role.KEY) or (spec.part == "cross" and role is Role.NORM_GAIN):
        slowed = N ** (alpha_a - 1)
        row = row.times(sgd=slowed**2, adam=slowed, eps=slowed**-1)
        if spec.value_dim:  # a gradient sums over values, and N stands for their number where they have none of their own
            row = row.times(sgd=VALUES**-1, eps=VALUES)
        row = dataclasses.replace(row, mean_field=slowed)
        if spec.role is Role.NORM_GAIN:
            summed = heads_summed(spec)
            return row.times(sgd=summed**-1, eps=summed)
    match role:
        case Role.RELATIVE_BIAS:
            return row.times(sgd=heads_summed(spec) ** -1, eps=heads_summed(spec))
        case Role.MLP_IN:
            return row.times(eps=(F / D) ** -0.5)
        case Role.QUERY:
            return row.times(eps=HEADS_OVER_WIDTH**-0.5)
        case Role.KEY | Role.VALUE:
            over = HEADS_OVER_WIDTH * VALUES if "value_dim" in spec.axes else HEADS_OVER_WIDTH
            return row.times(sgd=QUERIES_PER_KEY**-1, eps=over**-0.5 * QUERIES_PER_KEY**0.5)
    return row


def of_experts(spec: ParamSpec, row: Rule, choice: str) -> Rule:
    """The row of a router or of experts, from that of a dense matrix: their gradients sum over a/E of the tokens, 1/a of each.

    Args:
        spec: the parameter.
        row: as a matrix of the block.
        choice: the constant `experts`.
    """
    role = spec.of or spec.role
    over = axis("expert_dim") / D
    if role is Role.ROUTER:
        row = dataclasses.replace(row, muon=None)
        started = (
            row if choice == "dense" else dataclasses.replace(row, init_std=row.init_std * D**-0.5)
        )
        # A score moves by what an expert's output has along the backward signal: D terms of its 1/D, not one.
        return started if choice == "dense" else started.times(sgd=E / D, eps=D / E)
    if role is Role.EXPERT_IN:
        louder = {"mean-field": E * over, "mssp": E**0.5 * over**0.5, "dense": ONE}[choice]
        return (
            row.times(eps=over**-0.5)
            if choice == "dense"
            else row.times(sgd=louder, eps=louder**-1)
        )
    if role is Role.EXPERT_OUT:
        louder = {"mean-field": over**-0.5, "mssp": E**0.5, "dense": ONE}[choice]
        row = (
            dataclasses.replace(row, init_std=row.init_std * louder)
            if spec.role is Role.EXPERT_OUT
            else row
        )
        return row if choice == "dense" else row.times(sgd=E, eps=E**-1)
    return row


def table_eps(spec: ParamSpec, alpha_l: float | None) -> Power | None:
    """Return Adam's eps by Table 2 of 2601.20205, relative to the base; None for a parameter that it does not name.

    Args:
        alpha_l: branches scale as L^-alpha_l, 1 in the paper; None is no depth rule.
    """
    depth = ONE if alpha_l is None else L**-alpha_l
    hidden = axis("expert_dim")
    match spec.role:
        case Role.ROUTER:
            return D**-1 * depth
        case Role.EXPERT_IN:
            return hidden**-1 * depth
        case Role.EXPERT_OUT:
            return D * hidden**-2 * depth
        case Role.NORM_GAIN:
            return ONE
        case Role.BIAS if spec.in_block:
            return depth
    return None


_TABLE_GROUPS = (
    ParamSpec(role=Role.NORM_GAIN, axes=("embed",)),
    *(
        ParamSpec(role=role, axes=("embed",), in_block=True, of=of)
        for role, of in itertools.product((Role.NORM_GAIN, Role.BIAS), (None, *Role))
        if of not in VECTORS | {Role.READOUT, Role.ROUTER}
        or (role, of) == (Role.BIAS, Role.NORM_GAIN)
    ),
    *(
        ParamSpec(role=role, axes=axes, fan_in=axes[-2:-1], in_block=True)
        for role, axes in (
            (Role.ROUTER, ("embed", "experts")),
            (Role.EXPERT_IN, ("experts", "embed", "expert_dim")),
            (Role.EXPERT_OUT, ("experts", "expert_dim", "embed")),
        )
    ),
)
"""A parameter of every group whose eps the table sets."""


def _let_by_table(rule: Callable[[ParamSpec], Rule], alpha_l: float | None) -> dict[str, Power]:
    """Return, of every group, the gradient over the table's eps: what the choice lets change with size."""
    return {
        f"eps/{spec.group}": rule(spec).eps / (table_eps(spec, alpha_l) or ONE)
        for spec in _TABLE_GROUPS
    }


def infinite_limits(name: str, constants: Constants) -> Preset:
    """The family of the module's table.

    Args:
        name: printed name.
        constants: of the family.

    Raises:
        PresetError: as `Constants.check`.
    """
    constants.check(name)
    alpha_a, alpha_l, gamma0 = constants.alpha_a, constants.alpha_l, constants.gamma0
    readout_width, embedding_width = constants.readout_width, constants.embedding_width

    def by_gradients(spec: ParamSpec) -> Rule:
        return of_experts(spec, row_of(spec, alpha_a, alpha_l), constants.experts)

    by_table = constants.experts_eps == "table"

    def rule(spec: ParamSpec) -> Rule:
        row = by_gradients(spec)
        if by_table:
            row = dataclasses.replace(row, eps=table_eps(spec, alpha_l) or row.eps)
        # Gradients go as 1/gamma0 through the readout: SGD rates * gamma0^2 (paper), eps / gamma0 (derived).
        row = row.times(sgd=gamma0**2, eps=1 / gamma0)
        if Role.READOUT in (spec.role, spec.of):
            row = dataclasses.replace(row, multiplier=row.multiplier / gamma0)
        if constants.readout_bias_width and spec.of is Role.READOUT:
            row = row.times(
                sgd=D**constants.readout_bias_width, adam=D**constants.readout_bias_width
            )
        if constants.decay_width and row.muon is not None:
            row = dataclasses.replace(row, decay=D**constants.decay_width)
        if spec.tied and (readout_width != -1 or embedding_width):
            which = "readout_width" if readout_width != -1 else "embedding_width"
            raise PresetError(
                f"{name}: a tied readout has one table, and {which} wants two rules for it; untie it"
            )
        if readout_width != -1:
            row = _louder(spec, row, D ** (readout_width + 1))
        if embedding_width and spec.role is Role.TOKEN_EMBEDDING:
            row = row.times(adam=D**embedding_width)
        if constants.mlp_out == "mean-field" and spec.role is Role.MLP_OUT:
            row = dataclasses.replace(row, init_std=row.init_std * (F / D) ** -0.5)
        elif constants.mlp_out == "mean-field" and Role.MLP_IN in (spec.role, spec.of):
            row = row.times(sgd=F / D, eps=(F / D) ** -0.5)
        return row

    powers = {
        name: value
        for name, value in (("alpha_a", alpha_a), ("alpha_l", alpha_l))
        if value is not None
    }
    defaults = vars(Constants())
    pairs = {
        name: (value, defaults[name])
        for name, value in vars(constants).items()
        if name not in powers
    }
    return Preset(
        name=name,
        rule=rule,
        native_form="readout-multiplier",
        logits=constants.c_a * N**-alpha_a,
        branch=constants.beta0 * (L**-alpha_l if alpha_l is not None else ONE),
        muon_rms=constants.muon_scale == "rms",
        key_as_query=constants.key_start == "query",
        choices=powers | changed(**pairs),
        vanishing={
            **({} if constants.key_start == "query" else {"attention": N ** (0.5 - alpha_a)}),
            "movement/token_embedding": D**embedding_width,
            "movement/readout.bias": D**constants.readout_bias_width,
            **(_let_by_table(by_gradients, alpha_l) if by_table else {}),
        },
        uneven=not by_table,
    )


def _louder(spec: ParamSpec, row: Rule, times: Power) -> Rule:
    """The row where the readout starts larger: so do the gradients of all that comes before it."""
    if spec.role is Role.READOUT:
        return dataclasses.replace(row, init_std=row.init_std * times).moved(times)
    return row if spec.of is Role.READOUT else row.times(sgd=times**-1, eps=times)


def _member(
    **fixed: float | None,
) -> Callable[[Callable[[Constants], Preset]], Callable[..., Preset]]:
    """A preset whose arguments, and signature, are the constants of the family but those that are fixed here."""

    def decorate(make: Callable[[Constants], Preset]) -> Callable[..., Preset]:
        @functools.wraps(make)
        def preset(**constants: Any) -> Preset:
            return make(Constants(**fixed, **constants))

        takes = inspect.signature(Constants).parameters.values()
        preset.__signature__ = inspect.Signature([each for each in takes if each.name not in fixed])  # pyright: ignore
        return preset

    return decorate


@_member(alpha_l=None)
def mup(constants: Constants) -> Preset:
    """muP: attention logits 1/N, feature learning at every width, no depth rule (heads collapse as N grows)."""
    return infinite_limits("mup", constants)


@_member(alpha_a=0.5, alpha_l=None)
def mup_half(constants: Constants) -> Preset:
    """muP with attention logits 1/sqrt(N): heads stay diverse as N grows, no depth rule."""
    return infinite_limits("mup-half", constants)


@_member()
def depth_mup(constants: Constants) -> Preset:
    """muP with branches L^-alpha_l for depth transfer; alpha_l and alpha_a anywhere in [1/2, 1]."""
    return infinite_limits("depth-mup", constants)
