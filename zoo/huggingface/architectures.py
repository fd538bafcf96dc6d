"""Architectures of Hugging Face's `transformers` that are read and written, and how their config.json calls what models share."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mupax.zoo.transformer import TransformerConfig

Family = Literal[
    "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe",
    "vit", "deit", "siglip", "dinov2", "dinov2_with_registers", "mbart", "t5",
]  # fmt: skip

ARCHITECTURES: dict[Family, str] = {
    "gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification", "siglip": "SiglipForImageClassification", "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "mbart": "MBartForConditionalGeneration", "t5": "T5ForConditionalGeneration",
}  # fmt: skip

ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_exact"),
    "relu": "relu",
}
"""Their names of activations to ours; gelu_new, gelu_pytorch_tanh and gelu_fast are one function."""

STACK = ("width", "depth", "num_heads", "mlp_dim", "norm_eps")
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
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
FIELDS: dict[Family, tuple[str, ...]] = {
    "gpt2": ("n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon"),
    **dict.fromkeys(_LIKE_LLAMA, (*_SIZES, "rms_norm_eps")),
    **dict.fromkeys(_LAYERNORM, (*_SIZES, "layer_norm_eps")),
    **dict.fromkeys(
        DINO, (*_SIZES[:3], "mlp_ratio", "layer_norm_eps")
    ),  # a ratio in place of a size
    "mbart": (
        "d_model",
        "decoder_layers",
        "decoder_attention_heads",
        "decoder_ffn_dim",
    ),  # its eps is in its code
    "t5": ("d_model", "num_decoder_layers", "num_heads", "d_ff", "layer_norm_epsilon"),
}
"""Their names of what our `STACK` names."""

DEFAULTS: dict[Family, tuple[float, ...]] = {
    "gpt2": (768, 12, 12, 0, 1e-5), "llama": (4096, 32, 32, 11008, 1e-6),
    "mistral": (4096, 32, 32, 14336, 1e-6), **dict.fromkeys(("qwen2", "qwen3"), (4096, 32, 32, 22016, 1e-6)),
    **dict.fromkeys(("gemma2", "gemma3_text"), (2304, 26, 8, 9216, 1e-6)),
    "mixtral": (4096, 32, 32, 14336, 1e-5), "qwen3_moe": (2048, 24, 32, 6144, 1e-6),
    **dict.fromkeys(("vit", "deit"), (768, 12, 12, 3072, 1e-12)), **dict.fromkeys(DINO, (768, 12, 12, 4.0, 1e-6)),
    "siglip": (768, 12, 12, 3072, 1e-6), "gpt_neox": (6144, 44, 64, 24576, 1e-5),
    "mbart": (1024, 12, 16, 4096), "t5": (512, 6, 8, 2048, 1e-6),
}  # fmt: skip
"""What a field left out is; 0 is four widths."""

DROPOUTS: dict[Family, tuple[str, ...]] = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    **dict.fromkeys(_LIKE_LLAMA, ("attention_dropout",)),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "siglip": ("attention_dropout",),
    **dict.fromkeys(("vit", "deit"), ("hidden_dropout_prob", "attention_probs_dropout_prob")),
    **dict.fromkeys(
        DINO, ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    ),
    "mbart": ("dropout", "attention_dropout", "activation_dropout"),
    "t5": ("dropout_rate",),
}


class Published(NamedTuple):
    """A model as its config.json describes it."""

    model: TransformerConfig
    zeros: frozenset[str] = frozenset()
    """Parameters that our model has, the file does not, and that are zero there."""
    embedding_scale: float = 1.0
    """What its code multiplies looked-up embeddings by, before positions are added."""
    query_scale: float = 1.0
    """What its code multiplies attention logits by, times head_dim^1/2."""
