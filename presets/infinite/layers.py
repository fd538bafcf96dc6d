"""Layers of a transformer without weights, each with its derivative.

A layer returns its output y and its vector-Jacobian product, a function from dL/dy to dL/dx.

Shapes: D draws (any leading axes), B examples, T queries, S keys, H heads, N head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Vjp = Callable[[np.ndarray], Any]
"""Function that backpropagates: from the gradient of an output to the gradients of the inputs."""

_GELU_ROOT = np.sqrt(2 / np.pi)
_GELU_CUBIC = 0.044715


def norm(x: np.ndarray, eps: float, *, centred: bool) -> tuple[np.ndarray, Vjp]:
    """Apply LayerNorm or RMSNorm without parameters over the last axis.

    Args:
        x: Inputs [..., width].
        eps: Number added to the mean square, 1e-5 in most models.
        centred: Whether to subtract the mean first. LayerNorm does, RMSNorm does not.

    Returns:
        The normalized inputs, and the function that converts their gradient to the gradient of `x`.
    """
    y = x - x.mean(-1, keepdims=True) if centred else x
    scale = 1 / np.sqrt((y**2).mean(-1, keepdims=True) + eps)
    y = y * scale

    def vjp(dy: np.ndarray) -> np.ndarray:
        dx = dy - y * (dy * y).mean(-1, keepdims=True)
        if centred:
            # Subtracting the mean is a symmetric projection: the gradient takes the same one.
            dx = dx - dy.mean(-1, keepdims=True)
        return scale * dx

    return y, vjp


def gelu(x: np.ndarray) -> tuple[np.ndarray, Vjp]:
    """Return GELU of x in the tanh form, and the function that backpropagates through it."""
    t = np.tanh(_GELU_ROOT * (x + _GELU_CUBIC * x**3))
    inner_slope = 1 + 3 * _GELU_CUBIC * x**2
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * _GELU_ROOT * inner_slope
    return 0.5 * x * (1 + t), lambda dy: dy * slope


def relu(x: np.ndarray) -> tuple[np.ndarray, Vjp]:
    """Return max(x, 0), and the function that backpropagates through it."""
    return np.maximum(x, 0), lambda dy: dy * (x > 0)


ACTIVATIONS = {"gelu": gelu, "relu": relu}


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray, Vjp]:
    """Apply softmax attention without a mask.

    D... are any leading axes, B examples, H heads, T queries, S keys, and N is the head dimension.

    Args:
        q: Queries [D..., B, H, T, N].
        k: Keys [D..., B, H, S, N].
        v: Values [D..., B, H, S, N].
        scale: Factor on the products q.k, such as N^-1/2.

    Returns:
        Outputs [D..., B, H, T, N], logits [D..., B, H, T, S], and the function from the gradient of
        the outputs to the gradients of q, k and v.
    """
    logits = scale * q @ np.swapaxes(k, -1, -2)
    # Without the maximum the exponentials could overflow.
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = p @ v

    def vjp(dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dp = dy @ np.swapaxes(v, -1, -2)
        dlogits = scale * p * (dp - (dp * p).sum(-1, keepdims=True))
        dq = dlogits @ k
        dk = np.swapaxes(dlogits, -1, -2) @ q
        dv = np.swapaxes(p, -1, -2) @ dy
        return dq, dk, dv

    return y, logits, vjp


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean loss over examples in nats, [D...], and its gradient, [D..., B, C].

    Args:
        logits: Logits [D..., B, C] of C classes.
        targets: Classes [B].
    """
    shifted = logits - logits.max(-1, keepdims=True)
    p = np.exp(shifted)
    p /= p.sum(-1, keepdims=True)
    one_hot = np.eye(logits.shape[-1], dtype=logits.dtype)[targets]
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = -(one_hot * log_p).sum(-1).mean(-1)
    return loss, (p - one_hot) / logits.shape[-2]
