"""Architectures of Hugging Face's `transformers` that are read and written.

The tables say what config.json calls the sizes that all our transformers have, with the defaults of
fields that a config.json leaves out. `config` and the files of single families use them.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from mupax.zoo.fields import Fields
from mupax.zoo.transformer import TransformerConfig

Family = Literal[
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
    "vit",
    "deit",
    "siglip",
    "dinov2",
    "dinov2_with_registers",
    "mbart",
    "t5",
]

ARCHITECTURES: dict[Family, str] = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification",
    "siglip": "SiglipForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "mbart": "MBartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
}
"""Name of the model class of `transformers` by family."""

ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
    "relu": "relu",
}
"""Our activation by the name in config.json. The first three names are one function."""

ACTIVATION_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu", "relu": "relu"}
"""Name that is written to config.json, by our activation."""

_LIKE_LLAMA: tuple[Family, ...] = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "qwen3_moe",
)
_LAYERNORM: tuple[Family, ...] = ("gpt_neox", "vit", "deit", "siglip")
GEMMA: tuple[Family, ...] = ("gemma2", "gemma3_text")
DINO: tuple[Family, ...] = ("dinov2", "dinov2_with_registers")


class StackFields(NamedTuple):
    """Names in config.json of the fields that describe a residual stack."""

    width: str
    depth: str
    num_heads: str
    mlp_dim: str
    """Hidden size of the MLP. The field of a DINO has the ratio to the width instead."""
    norm_eps: str | None = None
    """`None` for a family whose code fixes the number."""


class StackDefaults(NamedTuple):
    """Values of the fields of `StackFields` that a config.json leaves out."""

    width: int
    depth: int
    num_heads: int
    mlp_dim: float
    """0 stands for 4 times the width."""
    norm_eps: float | None = None


# Names and defaults are those of the config classes of `transformers`.
_RMSNORM_FIELDS = StackFields(
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    norm_eps="rms_norm_eps",
)
_LAYERNORM_FIELDS = _RMSNORM_FIELDS._replace(norm_eps="layer_norm_eps")
_MBART_FIELDS = StackFields(
    "d_model", "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"
)

FIELDS: dict[Family, StackFields] = {
    "gpt2": StackFields("n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon"),
    **dict.fromkeys(_LIKE_LLAMA, _RMSNORM_FIELDS),
    **dict.fromkeys(_LAYERNORM, _LAYERNORM_FIELDS),
    **dict.fromkeys(DINO, _LAYERNORM_FIELDS._replace(mlp_dim="mlp_ratio")),
    "mbart": _MBART_FIELDS,
    "t5": StackFields("d_model", "num_decoder_layers", "num_heads", "d_ff", "layer_norm_epsilon"),
}
"""Names of a stack's fields, by family."""

_QWEN_DEFAULTS = StackDefaults(4096, 32, 32, 22016, 1e-6)
_GEMMA_DEFAULTS = StackDefaults(2304, 26, 8, 9216, 1e-6)
_VIT_DEFAULTS = StackDefaults(768, 12, 12, 3072, 1e-12)
_DINO_DEFAULTS = StackDefaults(768, 12, 12, 4.0, 1e-6)
MT5_DEFAULTS = StackDefaults(512, 8, 6, 1024, 1e-6)
"""Defaults of mT5, which has the family of T5."""

DEFAULTS: dict[Family, StackDefaults] = {
    "gpt2": StackDefaults(768, 12, 12, 0, 1e-5),
    "llama": StackDefaults(4096, 32, 32, 11008, 1e-6),
    "mistral": StackDefaults(4096, 32, 32, 14336, 1e-6),
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": _QWEN_DEFAULTS,
    "gemma2": _GEMMA_DEFAULTS,
    "gemma3_text": _GEMMA_DEFAULTS,
    "mixtral": StackDefaults(4096, 32, 32, 14336, 1e-5),
    "qwen3_moe": StackDefaults(2048, 24, 32, 6144, 1e-6),
    "vit": _VIT_DEFAULTS,
    "deit": _VIT_DEFAULTS,
    "dinov2": _DINO_DEFAULTS,
    "dinov2_with_registers": _DINO_DEFAULTS,
    "siglip": StackDefaults(768, 12, 12, 3072, 1e-6),
    "gpt_neox": StackDefaults(6144, 44, 64, 24576, 1e-5),
    "mbart": StackDefaults(1024, 12, 16, 4096),
    "t5": StackDefaults(512, 6, 8, 2048, 1e-6),
}
"""Defaults of a stack's fields, by family."""

_VIT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
DROPOUTS: dict[Family, tuple[str, ...]] = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    **dict.fromkeys(_LIKE_LLAMA, ("attention_dropout",)),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "siglip": ("attention_dropout",),
    "vit": _VIT_DROPOUTS,
    "deit": _VIT_DROPOUTS,
    **dict.fromkeys(DINO, (*_VIT_DROPOUTS, "drop_path_rate")),
    "mbart": ("dropout", "attention_dropout", "activation_dropout"),
    "t5": ("dropout_rate",),
}
"""Fields of dropout rates by family. Our models have no dropout, so that all are written as 0."""


class Published(NamedTuple):
    """Model that a config.json describes, and what its file and code do differently from ours."""

    model: TransformerConfig
    zeros: frozenset[str] = frozenset()
    """Parameters of our model that the file does not hold, because they are zero."""
    embedding_scale: float = 1.0
    """Factor by which the code multiplies looked-up embeddings, before positions are added."""
    query_scale: float = 1.0
    """Factor of the code on attention logits, divided by head_dim^-1/2, which is ours."""


def read_stack(
    config: Fields, family: Family, defaults: StackDefaults | None = None
) -> dict[str, Any]:
    """Return width, depth and other sizes of a residual stack that a config.json describes.

    The keys are the names of the fields of `StackFields`, such as "num_heads". A field that the
    family does not have is left out.

    Args:
        family: Key of `FIELDS`.
        defaults: Values of fields that config.json leaves out. `None` takes them from `DEFAULTS`.

    Raises:
        ConfigError: A value is of the wrong kind.
    """
    defaults = defaults or DEFAULTS[family]
    stack: dict[str, Any] = {}
    for name, field in FIELDS[family]._asdict().items():
        if field is not None:
            # `read` requires a value of the type of the default.
            default = getattr(defaults, name)
            stack[name] = config.read(field, default or 4 * stack["width"])
    return stack
