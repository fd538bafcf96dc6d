"""What a parameter is, by its name: the names that PyTorch's, JAX's and this project's models give their parameters.

A name that is none of these is not guessed: the message says what to write, `--role 'PATTERN=ROLE'`. A matrix without a known name whose
both dimensions grow is a hidden one, whatever it is called; `axes` says so once the shapes at two sizes are known.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mupax.presets.roles import PresetError, Role

FUSED = "qkv"
"""Queries, keys and values in one matrix."""
SKIPPED = "none"
"""A role for what shall not be judged."""
ROLES = (
    *(
        role.value
        for role in Role
        if role not in (Role.BIAS, Role.ROUTER, Role.EXPERT_IN, Role.EXPERT_OUT)
    ),
    FUSED,
    SKIPPED,
)
"""What `--role` takes; biases follow from their matrix: `query.bias`."""

LAYER = re.compile(
    r"(?:^|(?<=[._/]))(layers?|h|blocks?|encoderblock|decoderblock|resblocks|transformer_blocks)([._/])(\d+)(?=[._/])"
)
"""A layer's number in a name; names that differ in it alone are one parameter."""

_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"(experts?|router|moe|mamba|ssm|a_log|conv1d|rotary_emb)\b.*", SKIPPED),
    (r"relative_(attention_)?bias", "relative_bias"),
    (r"cls(_?token)?|class_(embedding|token)|registers?|mask_token|dist(illation)?_token", "token_embedding"),
    (r"wpe|pos(itional|ition)?_?emb\w*|positions?|embed_positions|posembed_input|position_embeddings?", "position"),
    (r"patch_emb\w*(\.proj\w*)?|patch|conv_proj", "patch_embedding"),
    (r"wte|tok_?emb\w*|token_emb\w*|embed_tokens|word_embeddings?|embed_in|tokens?|shared|embed(der|_\d+)?", "token_embedding"),
    (r"lm_head|embed_out|output_layer|head|classifier|unembed\w*|readout|logits(_dense)?|score|to_logits", "readout"),
    (r"root\.(decoder|output|ff_out)|transformer\.ff_out", "readout"),
    (r"root\.encoder", "token_embedding"),
    (r"c_attn|qkv(_proj)?|query_key_value|linear_qkv|in_proj|att_proj|wqkv", FUSED),
    (r"(q_norm|query_norm|q_layernorm|query_layernorm)", "query.norm_gain"),
    (r"(k_norm|key_norm|k_layernorm|key_layernorm)", "key.norm_gain"),
    (r"(ln|norm|layer_?norm|rms_?norm|bn|batch_?norm|group_?norm|layer_scale|ls)[_.]?(\d|f|final|pre|post|attn|mlp|\w*)", "norm_gain"),
    (r"\w*_(norm|layer_?norm|ln)(_\d)?|final_layernorm|norm", "norm_gain"),
    (r"q_proj|query(_proj)?|wq|q|to_q|linear_q|q_lin", "query"),
    (r"k_proj|key(_proj)?|wk|k|to_k|linear_k|k_lin", "key"),
    (r"v_proj|value(_proj)?|wv|v|to_v|linear_v|v_lin", "value"),
    (r"(intermediate|mlp\w*|ffn?)\.dense(_0|1)?", "mlp_in"),
    (r"(mlp\w*|ffn?)\.dense(_1|2)|layer\.output\.dense", "mlp_out"),
    (r"o_proj|wo|out_proj|attn_out|out_lin|linear_proj|c_proj|dense|proj|out|to_out|o|attention_output|output\.dense", "after"),
    (r"c_fc|fc_?1|fc_in|up_proj|gate_proj|gate_up_proj|w1|w3|linear1|linear_fc1|dense_h_to_4h|ff_proj|wi(_\d)?|lin1|up|gate", "mlp_in"),
    (r"fc_?2|fc_out|down_proj|w2|linear2|linear_fc2|dense_4h_to_h|ff_out|lin2|down", "mlp_out"),
)  # fmt: skip
"""What the last words of a name are, in order; "after" is the output of whatever branch it is in."""
_COMPILED = tuple(
    (re.compile(rf"(?:^|.*\.)(?:{pattern})", re.IGNORECASE), role) for pattern, role in _PATTERNS
)
_ATTENTION = re.compile(r"att|cross|multihead", re.IGNORECASE)
_MLP = re.compile(r"mlp|ff|feed_?forward|intermediate|densereludense", re.IGNORECASE)
_LEAF = re.compile(
    r"^(.*?)(?:\.(weight|kernel|bias|scale|gamma|beta|gain|embedding|w|b|g)|(?<!relative)(?<!relative_attention)_(bias|gain))$",
    re.IGNORECASE,
)
_CROSS = re.compile(r"cross|encoder_attn|encdec|multihead_attn", re.IGNORECASE)


class Label(NamedTuple):
    """What a name says.

    Attributes:
        role: a role of `ROLES`; empty where the name does not say it.
        leaf: "bias", "gain" or "matrix"; empty where shape has to say it.
        in_block: of a residual block.
        part: of an encoder-decoder, as `ParamSpec.part`.
        layout: "out, in" of PyTorch's Linear, "in, out" of JAX; empty where the name shows neither.
        guessed: the name does not say the role, and the shapes at two sizes gave it.
    """

    role: str
    leaf: str
    in_block: bool
    part: str
    layout: str
    guessed: bool = False


def merged(name: str) -> str:
    """The name with a star for the number of a layer: h.0.mlp and h.1.mlp are h.*.mlp."""
    return LAYER.sub(r"\1\2*", name)


def chosen(name: str, overrides: Mapping[str, str]) -> str:
    """The role that a pattern of `--role` gives the name, the last one that fits; empty where none does.

    Args:
        name: as `merged` has it.
        overrides: pattern (of `fnmatch`) to role.
    """
    fitting = [
        role
        for pattern, role in overrides.items()
        if fnmatch.fnmatch(name, pattern) or name == pattern
    ]
    return fitting[-1] if fitting else ""


def read_overrides(texts: Iterable[str]) -> dict[str, str]:
    """Pattern to role of texts PATTERN=ROLE; raises PresetError for a role that is none."""
    overrides = {}
    for text in texts:
        pattern, equals, role = (part.strip() for part in text.rpartition("="))
        if (
            not equals
            or not pattern
            or role.removeprefix("block.").removesuffix(".bias") not in ROLES
        ):
            raise PresetError(
                f"--role {text!r}: write PATTERN=ROLE, such as '*.out.weight=readout'; roles are {', '.join(ROLES)}"
            )
        overrides[pattern] = role
    return overrides


def label(name: str, dual: bool = False) -> Label:
    """What a parameter's name says of it.

    Args:
        name: as `merged` has it, words apart by dots, underscores or slashes.
        dual: the model has stacks of an encoder and of a decoder, which begin with these words.
    """
    dotted = name.replace("/", ".").replace("['", ".").replace("']", "").strip(".")
    module, leaf = dotted, ""
    if match := re.match(r"^(.*\.in_proj)_(weight|bias)$", dotted):
        module, leaf = match[1], match[2]
    elif match := _LEAF.match(dotted):
        module, leaf = match[1], (match[2] or match[3]).lower()
    words = module.replace(".*", "")
    in_block = (
        "*" in name or bool(re.match(r"(encoder\.)?blocks?\.", dotted)) or "relative" in dotted
    )
    role = _role(words if "." in words else f"root.{words}", in_block)
    kind = {
        "bias": "bias",
        "b": "bias",
        "beta": "bias",
        "scale": "gain",
        "gamma": "gain",
        "gain": "gain",
        "g": "gain",
    }
    role = role or ("norm_gain" if kind.get(leaf) == "gain" else "")
    layout = {"weight": "out, in", "kernel": "in, out"}.get(leaf, "")
    part = (
        "cross"
        if in_block and _CROSS.search(words)
        else "encoder"
        if dual and words.startswith("encoder.")
        else ""
    )
    return Label(role, kind.get(leaf, "matrix" if leaf else ""), in_block, part, layout)


_OF_BLOCKS = frozenset({FUSED, "query", "key", "value", "mlp_in", "mlp_out", "after"})


def _role(words: str, in_block: bool) -> str:
    tail = ".".join(words.split(".")[-3:])
    for pattern, role in _COMPILED:
        if pattern.fullmatch(tail) and (in_block or role not in _OF_BLOCKS):
            if role != "after":
                return role
            inner = words.rpartition(".")[0]
            if _MLP.search(inner.split(".")[-1]) or (
                _MLP.search(inner) and not _ATTENTION.search(inner)
            ):
                return "mlp_out"
            return "attention_out" if _ATTENTION.search(words) or words.endswith("o_proj") else ""
    return ""
