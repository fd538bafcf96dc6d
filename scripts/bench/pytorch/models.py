"""Decoder and vision transformer in plain PyTorch, with the weights of mupax's models.

Written as PyTorch users write them: one product for queries, keys and values, one for gate and up,
`scaled_dot_product_attention`, and fused AdamW. Used by the benchmarks of this package.
"""

# Shapes: B batch, T positions, D width, H heads, N head dimension.

# Torch is optional and in no lock file.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig


class Block(nn.Module):
    """Pre-norm attention and MLP, both added to the residual stream."""

    def __init__(self, config: ViTConfig | DecoderConfig) -> None:
        super().__init__()
        width = config.width
        bias = config.bias
        self.heads = config.num_heads
        self.kv_heads = config.kv_heads
        self.size = config.heads_dim
        self.causal = isinstance(config, DecoderConfig)
        self.gated = config.gated
        self.gelu = "none" if config.activation == "gelu_exact" else "tanh"
        self.rotary = isinstance(config, DecoderConfig) and config.positions == "rotary"
        self.attention_norm = norm(config)
        self.mlp_norm = norm(config)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.size, bias=bias)
        self.out = nn.Linear(self.heads * self.size, width, bias=bias)
        self.up = nn.Linear(width, (2 if self.gated else 1) * config.mlp_dim, bias=bias)
        self.down = nn.Linear(config.mlp_dim, width, bias=bias)

    def forward(
        self, h: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
    ) -> torch.Tensor:
        h = h + self.attention(self.attention_norm(h), cos, sin)
        return h + self.mlp(self.mlp_norm(h))

    def attention(
        self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output of attention [B, T, D], which is added to the residual stream.

        Args:
            x: Normalized residual stream [B, T, D].
            cos: Cosines of rotary positions [T, N / 2]; `None` for learned positions.
            sin: Sines of rotary positions [T, N / 2]; `None` for learned positions.
        """
        batch, length, _ = x.shape
        sizes = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        parts = self.qkv(x).split(sizes, dim=-1)
        q, k, v = (part.view(batch, length, -1, self.size).transpose(1, 2) for part in parts)
        if cos is not None and sin is not None:
            q = rotate(q, cos, sin)
            k = rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP [B, T, D] for a normalized residual stream [B, T, D]."""
        x = self.up(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(x, approximate=self.gelu))


class Transformer(nn.Module):
    """Decoder of tokens [B, T], or vision transformer of images [B, height, width, channels]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(config, ViTConfig | DecoderConfig)
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = norm(config)
        if isinstance(config, DecoderConfig):
            self.token = nn.Embedding(config.vocab_size, config.width)
            learned = config.positions == "learned"
            self.readout = nn.Linear(config.width, config.vocab_size, bias=False)
            if config.tied:
                self.readout.weight = self.token.weight
        else:
            self.patch = nn.Linear(config.sizes()["patch"], config.width, bias=config.bias)
            learned = True
            self.readout = nn.Linear(config.width, config.num_classes, bias=config.bias)
        self.position = nn.Parameter(torch.zeros(config.seq_len, config.width)) if learned else None
        # Constants of the model: multipliers and rotary angles.
        self.patch_scale = 1.0
        self.readout_scale = 1.0
        if not learned:
            assert isinstance(config, DecoderConfig)
            half = config.heads_dim // 2
            frequencies = config.rope_theta ** (-np.arange(half) / half)
            angle = np.arange(config.seq_len)[:, None] * frequencies
            cos = torch.tensor(np.cos(angle), dtype=torch.float32)
            sin = torch.tensor(np.sin(angle), dtype=torch.float32)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if isinstance(self.config, DecoderConfig):
            h = self.token(inputs)
        else:
            batch = len(inputs)
            patch = self.config.patch_size
            grid = self.config.image_size // patch
            cells = inputs.view(batch, grid, patch, grid, patch, -1)
            patches = cells.transpose(2, 3).reshape(batch, grid * grid, -1)
            h = self.patch(self.patch_scale * patches)
        if self.position is not None:
            h = h + self.position[: h.shape[1]]
        cos = getattr(self, "cos", None)
        sin = getattr(self, "sin", None)
        for block in self.blocks:
            h = block(h, cos, sin)
        h = self.norm(h)
        if isinstance(self.config, ViTConfig):
            h = h.mean(dim=1)
        return self.readout_scale * self.readout(h)


def norm(config: ViTConfig | DecoderConfig) -> nn.Module:
    """Return the model's norm of the residual stream, LayerNorm or RMSNorm."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=1e-5)
    return nn.LayerNorm(config.width, eps=1e-5, bias=config.bias)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return queries or keys [B, H, T, N] with rotary positions in Llama's half-split layout."""
    a, b = x.chunk(2, dim=-1)
    length = x.shape[-2]
    cos = cos[:length].to(x.dtype)
    sin = sin[:length].to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def load(model: Transformer, arrays: Mapping[str, Any]) -> None:
    """Copy the weights of the JAX model into the PyTorch model.

    Args:
        arrays: Weights by their name in the JAX model's definition.
    """
    config = model.config
    w = {name: np.asarray(value) for name, value in arrays.items()}

    def columns(*names: str) -> np.ndarray:
        """Return matrices [L, embed, ...] side by side in PyTorch's layout, [L, outputs, embed]."""
        matrices = [w[name].reshape(config.depth, config.width, -1) for name in names]
        return np.concatenate(matrices, axis=2).swapaxes(1, 2)

    def put(target: nn.Parameter | torch.Tensor | None, value: np.ndarray) -> None:
        assert target is not None
        assert tuple(target.shape) == value.shape, (target.shape, value.shape)
        target.data.copy_(torch.tensor(value))

    qkv = columns("block.attention.query", "block.attention.key", "block.attention.value")
    if config.gated:
        up = columns("block.mlp.gate", "block.mlp.up")
    else:
        up = columns("block.mlp.up")
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        put(block.qkv.weight, qkv[i])
        put(block.out.weight, w["block.attention.out"][i].reshape(-1, config.width).T)
        put(block.up.weight, up[i])
        put(block.down.weight, w["block.mlp.down"][i].T)
        put(block.attention_norm.weight, w["block.attention_norm.gain"][i])  # pyright: ignore
        put(block.mlp_norm.weight, w["block.mlp_norm.gain"][i])  # pyright: ignore
        if config.bias:
            for linear in (block.qkv, block.out, block.up, block.down):
                linear.bias.data.zero_()
    put(model.norm.weight, w["norm.gain"])  # pyright: ignore[reportArgumentType]
    if isinstance(config, DecoderConfig):
        put(model.token.weight, w["token"])
    else:
        put(model.patch.weight, w["patch"].T)
    if model.position is not None:
        put(model.position, w["position"])
    if "readout" in w:
        put(model.readout.weight, w["readout"].T)
    for linear in (model.readout, getattr(model, "patch", None)):
        if linear is not None and linear.bias is not None:
            linear.bias.data.zero_()


def adamw(
    model: nn.Module, lr: float, weight_decay: float, b1: float, b2: float, eps: float
) -> torch.optim.AdamW:
    """Return fused AdamW that does not decay gains and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=lr, betas=(b1, b2), eps=eps, fused=True)
