"""What a transformer does beside its products, each with its derivative: y and the function from dL/dy to dL/dx.

D draws (any leading axes), B examples, T queries, S keys, H heads, N head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Back = Callable[[np.ndarray], Any]
"""Gradient of an output to those of its inputs."""

_ROOT, _CUBIC = np.sqrt(2 / np.pi), 0.044715


def norm(x: np.ndarray, eps: float, *, centred: bool) -> tuple[np.ndarray, Back]:
    """LayerNorm without parameters over the last axis; RMSNorm where the mean stays.

    Args:
        x: [..., width].
        eps: added to the mean square.
        centred: whether the mean is subtracted.
    """
    y = x - x.mean(-1, keepdims=True) if centred else x
    scale = 1 / np.sqrt((y**2).mean(-1, keepdims=True) + eps)
    y = y * scale

    def back(dy: np.ndarray) -> np.ndarray:
        dx = dy - y * (dy * y).mean(-1, keepdims=True)
        return scale * (dx - dy.mean(-1, keepdims=True) if centred else dx)

    return y, back


def gelu(x: np.ndarray) -> tuple[np.ndarray, Back]:
    """GELU in the tanh form."""
    t = np.tanh(_ROOT * (x + _CUBIC * x**3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * _ROOT * (1 + 3 * _CUBIC * x**2)
    return 0.5 * x * (1 + t), lambda dy: dy * slope


def relu(x: np.ndarray) -> tuple[np.ndarray, Back]:
    """max(x, 0)."""
    return np.maximum(x, 0), lambda dy: dy * (x > 0)


ACTIVATIONS = {"gelu": gelu, "relu": relu}


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray, Back]:
    """Softmax attention: outputs [D..., B, H, T, N], logits [D..., B, H, T, S], and dL/d(outputs) to those of q, k and v.

    Args:
        q, k, v: [D..., B, H, T or S, N].
        scale: what q.k is multiplied by.
    """
    logits = scale * q @ np.swapaxes(k, -1, -2)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ v

    def back(dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dp = dy @ np.swapaxes(v, -1, -2)
        da = scale * p * (dp - (dp * p).sum(-1, keepdims=True))
        return da @ k, np.swapaxes(da, -1, -2) @ q, np.swapaxes(p, -1, -2) @ dy

    return out, logits, back


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over examples in nats [D...], and its gradient.

    Args:
        logits: [D..., B, C].
        targets: [B] classes.
    """
    shifted = logits - logits.max(-1, keepdims=True)
    p = np.exp(shifted)
    p /= p.sum(-1, keepdims=True)
    right = np.eye(logits.shape[-1], dtype=logits.dtype)[targets]
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -(right * log_p).sum(-1).mean(-1), (p - right) / logits.shape[-2]
