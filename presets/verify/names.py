"""Roles of parameters by their names in models of PyTorch, of JAX and of mupax itself.

A name that fits no pattern gets no role here. `axes` may still tell a hidden matrix by its shapes
at two sizes. For any other parameter the message asks for `--role 'PATTERN=ROLE'`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from mupax.presets.roles import ADAPTERS, PresetError, Role

FUSED = "qkv"
"""Role of an array that holds the matrices of queries, keys and values together."""
SKIPPED = "none"
"""Role of parameters that are not judged."""
EMBEDDING = "embedding"
"""Role of a name that only says that something is embedded. Shapes decide between a table, which is
looked up, and a matrix, such as the projection of patches."""
_NO_NAMES = (Role.BIAS, Role.ROUTER, Role.EXPERT_IN, Role.EXPERT_OUT, *ADAPTERS)
"""Roles that `--role` does not take. The role of a bias follows from its matrix: `query.bias`."""
ROLES = (*(role.value for role in Role if role not in _NO_NAMES), FUSED, SKIPPED)
"""Roles that `--role` takes."""

LAYER = re.compile(
    r"(?:^|(?<=[._/]))"
    r"(layers?|h|blocks?|encoderblock|decoderblock|resblocks|transformer_blocks)"
    r"([._/])(\d+)(?=[._/])"
)
"""Pattern for the number of a layer in a parameter's name, such as `h.0.`.

Parameters whose names differ only in this number are merged.
"""

_BRANCH_OUTPUT = "branch output"
"""Preliminary role of the last matrix of a branch. `_branch_output` tells attention from MLP."""
_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"relative_(attention_)?bias", "relative_bias"),
    (
        r"cls(_?token)?|class_(embedding|token)|registers?|mask_token|"
        r"dist(illation)?_token|probe|latents?|query_tokens?|learned_quer(y|ies)",
        "token_embedding",
    ),
    (
        r"wpe|pos(itional|ition)?_?emb\w*|positions?|embed_positions|posembed_input|"
        r"position_embeddings?",
        "position",
    ),
    (r"patch_emb\w*(\.proj\w*)?|patch|conv_proj", "patch_embedding"),
    (
        r"wte|tok_?emb\w*|token_emb\w*|embed_tokens|word_embeddings?|embed_in|tokens?|shared",
        "token_embedding",
    ),
    (
        r"lm_head|embed_out|output_layer|head|classifier|unembed\w*|readout|"
        r"logits(_dense)?|score|to_logits",
        "readout",
    ),
    (r"root\.(decoder|output|ff_out)|transformer\.ff_out", "readout"),
    (r"root\.encoder", "token_embedding"),
    (r"c_attn|qkv(_proj)?|query_key_value|linear_qkv|in_proj|att_proj|wqkv", FUSED),
    (r"(q_norm|query_norm|q_layernorm|query_layernorm)", "query.norm_gain"),
    (r"(k_norm|key_norm|k_layernorm|key_layernorm)", "key.norm_gain"),
    (
        r"(ln|norm|layer_?norm|rms_?norm|bn|batch_?norm|group_?norm|layer_scale|ls)"
        r"[_.]?(\d|f|final|pre|post|attn|mlp|\w*)",
        "norm_gain",
    ),
    (r"\w*_(norm|layer_?norm|ln)(_\d)?|final_layernorm|norm", "norm_gain"),
    (r"q_proj|query(_proj)?|wq|q|to_q|linear_q|q_lin", "query"),
    (r"k_proj|key(_proj)?|wk|k|to_k|linear_k|k_lin", "key"),
    (r"v_proj|value(_proj)?|wv|v|to_v|linear_v|v_lin", "value"),
    (r"(intermediate|mlp\w*|ffn?)\.dense(_0|1)?", "mlp_in"),
    (r"(mlp\w*|ffn?)\.dense(_1|2)|layer\.output\.dense", "mlp_out"),
    (
        r"o_proj|wo|out_proj|attn_out|out_lin|linear_proj|c_proj|dense|proj|out|to_out|"
        r"o|attention_output|output\.dense",
        _BRANCH_OUTPUT,
    ),
    (
        r"c_fc|fc_?1|fc_in|up_proj|gate_proj|gate_up_proj|w1|w3|linear1|linear_fc1|"
        r"dense_h_to_4h|ff_proj|wi(_\d)?|lin1|up|gate",
        "mlp_in",
    ),
    (r"fc_?2|fc_out|down_proj|w2|linear2|linear_fc2|dense_4h_to_h|ff_out|lin2|down", "mlp_out"),
    (r"((\w*_)?embs?(_\w+)?|\w*embed\w*)(\.\d+)?", EMBEDDING),
)
"""Patterns for the last words of a name, with their roles. The first pattern that fits counts."""
_NOT_JUDGED = re.compile(
    r"(?:^|\.)(\w*experts?(_gate)?|\w*router\w*|moe|\w+_moe|moe_\w+|mamba\w*|ssm|a_log|conv1d|"
    r"lora|lora_\w+|\w+_lora(_[ab])?|rotary_emb|mixer\.(in_proj|out_proj|x_proj|dt_proj|dt|d|norm))(?:\.|$)",
    re.IGNORECASE,
)
"""Pattern for modules whose parameters get the role `SKIPPED`.

They are experts, routers, low-rank adapters and state-space layers such as Mamba's (`mixer`).
"""
_EXPERTS = re.compile(r"^(.*)\.\w*experts?\.")
"""Pattern for the name of an expert's parameter.

Its group is the module that contains the experts and their router.
"""
_COMPILED = tuple(
    (re.compile(rf"(?:^|.*\.)(?:{pattern})", re.IGNORECASE), role) for pattern, role in _PATTERNS
)
_IN_BLOCKS_ONLY = frozenset({FUSED, "query", "key", "value", "mlp_in", "mlp_out", _BRANCH_OUTPUT})
"""Roles that a name can have only inside of residual blocks."""
_ATTENTION = re.compile(r"att|cross|multihead", re.IGNORECASE)
_MLP = re.compile(r"mlp|ff|feed_?forward|intermediate|densereludense", re.IGNORECASE)
_CROSS = re.compile(r"cross|encoder_attn|encdec|multihead_attn", re.IGNORECASE)
# The lookbehinds keep "relative_bias" and "relative_attention_bias" whole: these are tables.
_LEAF = re.compile(
    r"^(.*?)(?:\.(weight|kernel|bias|scale|gamma|beta|gain|embedding|w|b|g)"
    r"|(?<!relative)(?<!relative_attention)_(bias|gain))$",
    re.IGNORECASE,
)
_IN_PROJECTION = re.compile(r"^(.*\.in_proj)_(weight|bias)$")
"""Pattern for the input projection of PyTorch's MultiheadAttention.

An underscore and not a dot precedes the last word of its names, as in `in_proj_weight`.
"""
_LEAF_KINDS = {
    "bias": "bias",
    "b": "bias",
    "beta": "bias",
    "scale": "gain",
    "gamma": "gain",
    "gain": "gain",
    "g": "gain",
}
_LAYOUTS = {"weight": "out, in", "kernel": "in, out"}


PROJECTS = re.compile(r"(^|[._])(proj\w*|factor|mapping\w*)$", re.IGNORECASE)
"""Pattern for the end of the name of an embedding that is a matrix, as behind a narrow table."""


_VECTORS = re.compile(r"(^|\.)(probe|latents?)$", re.IGNORECASE)
"""Pattern for the end of a name that is of learned vectors, if the parameter is no module's matrix.

A layer of these names is a linear probe, which is a readout, or the first matrix of latent
attention. Their shapes show that.
"""


class Label(NamedTuple):
    """Properties of a parameter that its name shows.

    Attributes:
        role: A role of `ROLES`, or `EMBEDDING`. Empty if the name shows none.
        leaf: "bias", "gain" or "matrix". Empty if only the shape can tell.
        in_block: Whether the parameter is in a residual block.
        part: Part of an encoder-decoder, as in `ParamSpec.part`.
        layout: "out, in" of PyTorch's Linear or "in, out" of JAX. Empty if the name shows neither.
        guessed: Whether the role comes from shapes at two sizes and not from the name.
    """

    role: str
    leaf: str
    in_block: bool
    part: str
    layout: str
    guessed: bool = False


def merged(name: str) -> str:
    """Replace the number of a layer by a star: h.0.mlp and h.1.mlp become h.*.mlp."""
    return LAYER.sub(r"\1\2*", name)


def chosen(name: str, overrides: Mapping[str, str]) -> str:
    """Return the role that the user gives a parameter by `--role`, or "" if no pattern fits.

    Args:
        name: Name as `merged` returns it.
        overrides: Role by pattern of `fnmatch`. The last pattern that fits counts.
    """
    role = ""
    for pattern, pattern_role in overrides.items():
        if fnmatch.fnmatch(name, pattern) or name == pattern:
            role = pattern_role
    return role


def read_overrides(texts: Iterable[str]) -> dict[str, str]:
    """Parse values of `--role`, PATTERN=ROLE, and return the roles by pattern.

    Raises:
        PresetError: A text has no pattern, or its role is not in `ROLES`.
    """
    overrides = {}
    for text in texts:
        pattern, equals, role = (part.strip() for part in text.rpartition("="))
        bare_role = role.removeprefix("block.").removesuffix(".bias")
        if not equals or not pattern or bare_role not in ROLES:
            raise PresetError(
                f"--role {text!r}: write PATTERN=ROLE, such as '*.out.weight=readout'; "
                f"roles are {', '.join(ROLES)}"
            )
        overrides[pattern] = role
    return overrides


def modules_of_experts(names: Iterable[str]) -> frozenset[str]:
    """Return the modules that have experts, such as "model.layers.*.mlp".

    Args:
        names: Names of all parameters, as `merged` returns them.
    """
    matches = [_EXPERTS.match(_dotted(name)) for name in names]
    return frozenset(match[1] for match in matches if match)


def _dotted(name: str) -> str:
    """Return a parameter's path with dots between its words, in place of slashes or brackets."""
    # Flax joins names by slashes, and `jax.tree_util.keystr` writes brackets.
    return name.replace("/", ".").replace("['", ".").replace("']", "").strip(".")


def label(name: str, dual: bool = False, with_experts: Collection[str] = ()) -> Label:
    """Return what a parameter's name shows: role, kind of array, block, layout and so on.

    Args:
        name: Name as `merged` returns it, with words separated by dots, underscores or slashes.
        dual: Whether the model has an encoder's stack, named "encoder.", and a decoder's.
        with_experts: Modules that have experts, from `modules_of_experts`. A `gate` in such a
            module is a router, and elsewhere the first matrix of a gated MLP.
    """
    dotted = _dotted(name)
    # PEFT calls the matrix that has an adapter the base layer of its module.
    module, leaf = _split_leaf(dotted.replace(".base_layer.", "."))
    words = module.replace(".*", "")
    # layers.0.attn.weight is in a block, but layers.0.weight is a layer itself, as in an MLP.
    numbers = list(LAYER.finditer(f"{module}."))
    in_numbered_block = bool(numbers) and numbers[-1].end() < len(module)
    starts_like_block = re.match(r"(encoder\.)?blocks?\.[^\d]", dotted) is not None
    # A table of relative positions belongs to the attention of the blocks that share the table.
    in_block = "*" in name or in_numbered_block or starts_like_block or "relative" in dotted

    kind = _LEAF_KINDS.get(leaf, "matrix" if leaf else "")
    # Patterns for modules at the top level begin with "root.".
    role = _role(words if "." in words else f"root.{words}", in_block)
    if role == Role.TOKEN_EMBEDDING.value and PROJECTS.search(words):
        role = EMBEDDING
    if leaf in _LAYOUTS and _VECTORS.search(words):
        role = ""
    # The model itself may be called moe or mamba. So only words inside of a block count, and
    # outside of blocks the words after the first one.
    if "*" in name:
        inside = module.rpartition("*")[2]
    elif in_numbered_block:
        inside = module[numbers[-1].end() :]
    else:
        inside = module.partition(".")[2] or module
    is_gate_of_experts = any(dotted.startswith(f"{prefix}.gate.") for prefix in with_experts)
    if _NOT_JUDGED.search(inside) or is_gate_of_experts:
        role = SKIPPED
    if not role and kind == "gain":
        role = "norm_gain"
    # Flax's Embed has one parameter, which is called "embedding".
    if not role and leaf == "embedding":
        role = EMBEDDING

    part = ""
    if in_block and _CROSS.search(words):
        part = "cross"
    # BERT and vision models call their only stack an encoder, too.
    elif dual and words.startswith("encoder."):
        part = "encoder"
    return Label(role, kind, in_block, part, _LAYOUTS.get(leaf, ""))


def _split_leaf(dotted: str) -> tuple[str, str]:
    """Split "a.b.weight" into "a.b" and "weight". The leaf is empty if it is no known word."""
    match = _IN_PROJECTION.match(dotted)
    if match:
        return match[1], match[2]
    match = _LEAF.match(dotted)
    if match:
        leaf = match[2] or match[3]
        return match[1], leaf.lower()
    return dotted, ""


def _role(words: str, in_block: bool) -> str:
    """Return the role of the first pattern that fits the end of the name, or "".

    Only the last three words count. Roles of a block's matrices need `in_block`.

    Args:
        words: Name of the parameter's module, with its words joined by dots. A single word has
            "root." before it.
    """
    # Three words are what the longest patterns need, such as "layer.output.dense".
    tail = ".".join(words.split(".")[-3:])
    for pattern, role in _COMPILED:
        if role in _IN_BLOCKS_ONLY and not in_block:
            continue
        if pattern.fullmatch(tail):
            if role == _BRANCH_OUTPUT:
                return _branch_output(words)
            return role
    return ""


def _branch_output(words: str) -> str:
    """Return the role of a branch's last matrix: "attention_out", "mlp_out" or "".

    The module that the matrix is in decides.

    Args:
        words: Name of the parameter's module, with its words joined by dots.
    """
    module = words.rpartition(".")[0]
    # The innermost module decides: an MLP may be inside of a module that is called attention.
    innermost = module.split(".")[-1]
    in_mlp = _MLP.search(module) and not _ATTENTION.search(module)
    if _MLP.search(innermost) or in_mlp:
        return "mlp_out"
    if _ATTENTION.search(words) or words.endswith("o_proj"):
        return "attention_out"
    return ""
