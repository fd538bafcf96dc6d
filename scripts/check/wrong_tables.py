"""Models of every structure, and wrong tables of rules: `depth-mup` with one mistake each.

Theory of a wrong table agrees with a program that follows this table, so comparing the two finds no
mistake. Theory must also judge the table: it must find a fault, such as "explodes", in the role
that has the mistake. Used by `scripts.check.structures`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mupax.presets import ParamSpec, Power, Preset, Role, Rule
from mupax.presets.rule import ONE, axis
from mupax.zoo import configs
from mupax.zoo.transformer import TransformerConfig, transformer

LM = transformer(configs.get("lm-proxy"), "this")
VIT = transformer(configs.get("vit-proxy"), "this")
ED = transformer(configs.get("ed-proxy"), "this")
MODELS: dict[str, TransformerConfig] = {
    "lm": LM,
    "lm, QK-norm": replace(LM, qk_norm=True),
    "lm, GQA": replace(LM, num_kv_heads=1),
    "lm, GELU": replace(LM, activation="gelu"),
    "lm, biases": replace(LM, bias=True, norm="layernorm"),
    "lm, tied": replace(LM, tied=True),  # pyright: ignore[reportCallIssue]
    "vit": VIT,
    "vit, QK-norm": replace(VIT, qk_norm=True),
    "vit, GQA": replace(VIT, num_kv_heads=1),
    "vit, SwiGLU": replace(VIT, activation="swiglu"),
    "vit, no biases": replace(VIT, bias=False),
}
"""Models by name: a decoder, a vision transformer and each with one change.

lm-proxy has SwiGLU and no biases. vit-proxy has GELU, biases and a readout that cannot be tied.
"""
MENDING = {
    "ed": replace(
        ED,
        tied=False,  # pyright: ignore[reportCallIssue]
        shared=False,  # pyright: ignore[reportCallIssue]
        positions="relative",  # pyright: ignore[reportCallIssue]
    ),
    "ed, tied": ED,
    "ed, QK-norm": replace(
        ED,
        tied=False,  # pyright: ignore[reportCallIssue]
        qk_norm=True,
        bias=True,
        norm="layernorm",
    ),
}
"""Encoder-decoders by name. Their wrong tables are judged by theory, without training."""
Mistake = Callable[[Rule, ParamSpec], Rule]
"""Function from the right rule of a parameter to the wrong one."""

# D width, F MLP width, N head dimension, K key heads, L decoder layers, H heads,
# M the encoder's width as the decoder sees it (memory), E encoder layers.
D = axis("embed")
F = axis("mlp")
N = axis("head_dim")
K = axis("kv_heads")
L = axis("layers")
H = axis("heads")
M = axis("memory")
E = axis("encoder_layers")
HIDDEN = {Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT}


def rate(power: Power) -> Mistake:
    """Return the mistake of a learning rate times `power` under every optimizer."""

    def wrong(row: Rule, spec: ParamSpec) -> Rule:
        muon = None if row.muon is None else row.muon * power
        return replace(row, adam=row.adam * power, sgd=row.sgd * power, muon=muon)

    return wrong


def std(power: Power) -> Mistake:
    """Return the mistake of an initial std times `power`."""

    def wrong(row: Rule, spec: ParamSpec) -> Rule:
        return replace(row, init_std=row.init_std * power)

    return wrong


def eps(power: Power) -> Mistake:
    """Return the mistake of an eps times `power`."""

    def wrong(row: Rule, spec: ParamSpec) -> Rule:
        return replace(row, eps=row.eps * power)

    return wrong


def unscaled_eps(row: Rule, spec: ParamSpec) -> Rule:
    """Return the rule with an eps that is the same at every size."""
    return replace(row, eps=ONE)


@dataclass(frozen=True)
class Wrong:
    """Mistake in the rows of some roles or groups, with the verdict that must name it.

    Attributes:
        model: Key of `MODELS` or `MENDING`.
        grow: Size that grows, such as "head_dim".
        rows: Roles or parameter groups whose rows are wrong.
        mistake: Function that makes a right row wrong.
        where: Observable and step that must show the mistake, as "weight/readout @0".
        word: Verdict on `where`, as "explodes".
    """

    model: str
    grow: str
    rows: frozenset[Role | str]
    mistake: Mistake
    where: str
    word: str

    def of(self, table: Preset) -> Preset:
        """Return the preset with this mistake in its table."""

        def rule(spec: ParamSpec) -> Rule:
            row = table.rule(spec)
            if spec.role in self.rows or spec.group in self.rows:
                return self.mistake(row, spec)
            return row

        return replace(table, rule=rule)


def _wrong(model: str, grow: str, rows: set[Any], mistake: Mistake, where: str, word: str) -> Wrong:
    return Wrong(model, grow, frozenset(rows), mistake, where, word)


WRONG = {
    "hidden rate/m": _wrong(
        "lm", "head_dim", HIDDEN, rate(D**-1), "movement/block.mlp_out @1", "frozen",
    ),
    "hidden rate/m in one role": _wrong(
        "lm", "heads", {Role.MLP_IN}, rate(D**-1), "movement/block.mlp_in/gate @1", "frozen",
    ),
    "embedding frozen": _wrong(
        "lm", "head_dim", {Role.TOKEN_EMBEDDING}, rate(D**-3),
        "movement/token_embedding @1", "frozen",
    ),
    "input rate/m": _wrong(
        "lm", "heads", {Role.TOKEN_EMBEDDING}, rate(D**-1), "movement/token_embedding @1", "frozen",
    ),
    "input rate/m of patches": _wrong(
        "vit", "heads", {Role.PATCH_EMBEDDING}, rate(D**-1),
        "movement/patch_embedding @1", "frozen",
    ),
    "positions rate/m": _wrong(
        "vit", "head_dim", {Role.POSITION}, rate(D**-1), "movement/position @1", "frozen",
    ),
    "tied table rate/m": _wrong(
        "lm, tied", "heads", {Role.TOKEN_EMBEDDING}, rate(D**-1),
        "movement/token_embedding @1", "frozen",
    ),
    "all rates/m": _wrong(
        "lm", "heads", {*HIDDEN, Role.TOKEN_EMBEDDING}, rate(D**-1),
        "movement/block.value @1", "lazy",
    ),
    "readout rate/m": _wrong(
        "lm", "heads", {Role.READOUT}, rate(D**-1), "movement/readout @1", "frozen",
    ),
    "gain rate/m": _wrong(
        "lm", "heads", {"block.norm_gain"}, rate(D**-1),
        "movement/block.norm_gain/mlp_norm @1", "frozen",
    ),
    "QK-norm gain rate/m": _wrong(
        "lm, QK-norm", "heads", {"block.key.norm_gain"}, rate(D**-1),
        "movement/block.key.norm_gain @1", "frozen",
    ),
    "bias rate/m": _wrong(
        "vit", "heads", {"block.mlp_in.bias"}, rate(D**-1),
        "movement/block.mlp_in.bias @1", "frozen",
    ),
    "bias rate x m": _wrong(
        "vit", "heads", {"block.mlp_out.bias"}, rate(D),
        "movement/block.mlp_out.bias @1", "explodes",
    ),
    "no depth rule of the rate": _wrong(
        "lm", "depth", {Role.MLP_OUT}, rate(L**0.5), "movement/block.mlp_out @1", "explodes",
    ),
    "eps unscaled": _wrong(
        "lm", "heads", {*HIDDEN, Role.READOUT}, unscaled_eps,
        "gradient/block.value @0", "eps dominates",
    ),
    "eps unscaled in one role": _wrong(
        "lm", "head_dim", {Role.ATTENTION_OUT}, unscaled_eps,
        "gradient/block.attention_out @0", "eps dominates",
    ),
    "value std": _wrong(
        "lm", "heads", {Role.VALUE}, std(D**0.25), "weight/block.value @0", "explodes",
    ),
    "MLP out std": _wrong(
        "lm", "heads", {Role.MLP_OUT}, std(D**-0.25), "weight/block.mlp_out @0", "vanishes",
    ),
    "readout std": _wrong("lm", "heads", {Role.READOUT}, std(D), "weight/readout @0", "explodes"),
    "embedding std": _wrong(
        "lm", "heads", {Role.TOKEN_EMBEDDING}, std(D**-0.5),
        "weight/token_embedding @0", "vanishes",
    ),
    "key rate under GQA": _wrong(
        "lm, GQA", "kv_heads", {Role.KEY, Role.VALUE}, rate(K**-1),
        "movement/block.key @1", "frozen",
    ),
    "value rate x G under GQA": _wrong(
        "lm, GQA", "kv_heads", {Role.VALUE}, rate(K), "movement/block.value @1", "explodes",
    ),
    "value std under GQA": _wrong(
        "lm, GQA", "kv_heads", {Role.KEY, Role.VALUE}, std(K**-0.5),
        "weight/block.value @0", "vanishes",
    ),
    "key heads in the value's fan-in": _wrong(
        "lm, GQA", "heads", {Role.VALUE}, std((D / (K * N)) ** 0.5),
        "weight/block.value @0", "explodes where embed grows alone",
    ),
    "MLP out with the width for fan-in": _wrong(
        "lm", "head_dim", {Role.MLP_OUT}, std((F / D) ** 0.5),
        "weight/block.mlp_out @0", "explodes where mlp grows alone",
    ),
    "MLP out's rate by the width": _wrong(
        "lm", "head_dim", {Role.MLP_OUT}, rate(F / D),
        "movement/block.mlp_out @1", "explodes where mlp grows alone",
    ),
    "MLP in with its own width for fan-in": _wrong(
        "lm", "head_dim", {Role.MLP_IN}, std((D / F) ** 0.5),
        "weight/block.mlp_in/up @0", "explodes where embed grows alone",
    ),
    "MLP in with the eps of other matrices": _wrong(
        "lm", "head_dim", {Role.MLP_IN}, eps((F / D) ** 0.5),
        "gradient/block.mlp_in/up @0", "eps fades where embed grows alone",
    ),
    "QK-norm gains' eps without the heads they sum over": _wrong(
        "lm, QK-norm", "heads", {"block.query.norm_gain", "block.key.norm_gain"},
        eps(N / D), "gradient/block.key.norm_gain @0", "eps fades",
    ),
    "cross-attention's query rate/m": _wrong(
        "ed", "heads", {"block.cross.query"}, rate(D**-1),
        "movement/block.cross.query @1", "frozen",
    ),
    "cross-attention's key with the decoder's width for fan-in": _wrong(
        "ed", "heads", {"block.cross.key"}, std((M / D) ** 0.5),
        "weight/block.cross.key @0", "explodes where memory grows alone",
    ),
    "cross-attention's value rate by the decoder's width": _wrong(
        "ed", "heads", {"block.cross.value"}, rate(M / D),
        "movement/block.cross.value @1", "explodes where memory grows alone",
    ),
    "cross-attention's out std": _wrong(
        "ed", "head_dim", {"block.cross.attention_out"}, std(D**0.25),
        "weight/block.cross.attention_out @0", "explodes",
    ),
    "cross-attention's value eps unscaled": _wrong(
        "ed", "heads", {"block.cross.value"}, unscaled_eps,
        "gradient/block.cross.value @0", "eps dominates",
    ),
    "cross-attention's norm rate/m": _wrong(
        "ed", "heads", {"block.cross.norm_gain"}, rate(D**-1),
        "movement/block.cross.norm_gain @1", "frozen",
    ),
    "decoder's value rate by the encoder's depth": _wrong(
        "ed", "depth", {"block.value"}, rate((L / E) ** 0.5), "movement/block.value @1", "explodes",
    ),
    "encoder's value rate/m": _wrong(
        "ed", "heads", {"encoder.block.value"}, rate(D**-1),
        "movement/encoder.block.value @1", "frozen",
    ),
    "encoder's MLP out std": _wrong(
        "ed", "heads", {"encoder.block.mlp_out"}, std(D**-0.25),
        "weight/encoder.block.mlp_out @0", "vanishes",
    ),
    "encoder's last norm rate/m": _wrong(
        "ed", "heads", {"encoder.norm_gain"}, rate(D**-1),
        "movement/encoder.norm_gain/norm @1", "frozen",
    ),
    "encoder's own table rate/m": _wrong(
        "ed", "heads", {"encoder.token_embedding"}, rate(D**-1),
        "movement/encoder.token_embedding @1", "frozen",
    ),
    "shared table of three uses rate/m": _wrong(
        "ed, tied", "heads", {Role.TOKEN_EMBEDDING}, rate(D**-1),
        "movement/token_embedding @1", "frozen",
    ),
    "relative bias rate/m": _wrong(
        "ed", "heads", {"block.relative_bias"}, rate(H**-1),
        "movement/block.relative_bias @1", "frozen",
    ),
    "relative bias rate x m^0.5": _wrong(
        "ed", "heads", {"encoder.block.relative_bias"}, rate(H**0.5),
        "movement/encoder.block.relative_bias @1", "explodes",
    ),
    "relative bias with a norm's eps": _wrong(
        "ed", "head_dim", {Role.RELATIVE_BIAS}, eps(N**-1),
        "gradient/block.relative_bias @0", "eps fades",
    ),
}  # fmt: skip
"""Wrong tables by the name of the mistake, where m is the ratio of the width to its base."""
