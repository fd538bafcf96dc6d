"""Parameters and FLOPs of a config, counted from its sizes alone: no JAX, nothing built.

Counted are the matrix products, 2 FLOPs per multiply-add, as MFU is usually reported (Chowdhery et al. 2022, appendix B):
norms, softmax, activations and embedding look-ups are left out, as is whatever remat computes again.
A causal position attends to half of the context on average and is counted so, whatever the implementation computes.
"""

from __future__ import annotations

from zoo.configs import DecoderConfig, ModelConfig, StackConfig, ViTConfig


def params(model: ModelConfig) -> int:
    """Trainable numbers of the built model."""
    width = model.width
    shared = model.depth * _block_params(model) + _norm_params(model)
    match model:
        case ViTConfig():
            sizes = model.sizes()
            read_in = sizes["patch"] * width + model.bias * width
            positions = model.seq_len * width + (model.pool == "cls") * width
            return shared + read_in + positions + width * model.num_classes + model.bias * model.num_classes
        case DecoderConfig():
            tables = model.vocab_size * width * (1 if model.tied else 2)
            return shared + tables + (model.positions == "learned") * model.seq_len * width


def forward_terms(model: ModelConfig) -> dict[str, float]:
    """FLOPs of one forward pass by kind of matrix product, per token (decoder, at full context) or per image (ViT)."""
    attended = model.seq_len / 2 if isinstance(model, DecoderConfig) else model.seq_len
    per_position = {
        "attention projections": 2 * _projection_weights(model) * model.depth,
        "attention": 2 * 2 * attended * model.num_heads * model.heads_dim * model.depth,
        "mlp": 2 * _mlp_weights(model) * model.depth,
    }
    match model:
        case ViTConfig():
            read_in = 2 * model.sizes()["patch"] * model.width * model.num_patches
            stack = {kind: flops * model.seq_len for kind, flops in per_position.items()}
            return {"read-in": read_in, **stack, "readout": 2 * model.width * model.num_classes}
        case DecoderConfig():
            return {**per_position, "readout": 2 * model.width * model.vocab_size}


def forward_flops(model: ModelConfig) -> float:
    """FLOPs of one forward pass of the network, per token (decoder, at full context) or per image (ViT)."""
    return float(sum(forward_terms(model).values()))


def train_flops(model: ModelConfig) -> float:
    """FLOPs of one training step per token or image.

    The forward pass, a backward pass of twice that, and for a centred model the frozen initial network's forward pass.
    """
    return (4 if model.centered else 3) * forward_flops(model)


def _projection_weights(model: StackConfig) -> int:
    return model.width * model.heads_dim * 2 * (model.num_heads + model.kv_heads)


def _mlp_weights(model: StackConfig) -> int:
    return (3 if model.gated else 2) * model.width * model.mlp_dim


def _norm_params(model: StackConfig) -> int:
    return model.width * (model.norm_gain + (model.bias and model.norm == "layernorm"))


def _block_params(model: ModelConfig) -> int:
    total = _projection_weights(model) + _mlp_weights(model) + 2 * _norm_params(model)
    if model.bias:
        rotary = isinstance(model, DecoderConfig) and model.positions == "rotary"
        # Without rotary or QK-norm a key bias would never have a gradient, and there is none.
        keyed = 2 if rotary or model.qk_norm else 1
        total += model.heads_dim * (model.num_heads + keyed * model.kv_heads) + model.width
        total += (2 if model.gated else 1) * model.mlp_dim + model.width
    if model.qk_norm and model.norm_gain:
        total += 2 * model.heads_dim
    return total
