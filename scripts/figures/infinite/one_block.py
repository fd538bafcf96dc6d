"""Finite nets of the one-block model of `mupax.presets.infinite.heads`, with all their matrices, many seeds side by side.

Independent of it and of the zoo, which has no block without an MLP. Weights are Normal(0, 1) but W_Q and W_K, N^(1 - alpha_a)
times that. D is width N H, I inputs of a position, Z seeds; other letters as there.
"""

from __future__ import annotations

import numpy as np

from mupax.presets.infinite.heads import OneBlock, Trajectory


def train(
    block: OneBlock,
    inputs: np.ndarray,
    targets: np.ndarray,
    *,
    steps: int,
    heads: int,
    seeds: int,
    rng: np.random.Generator,
) -> Trajectory:
    """Courses of nets with H heads, a leading axis of seeds on everything.

    Args:
        block: the model.
        inputs: [P, S, I].
        targets: [P].
        steps: of gradient descent.
        heads: H.
        seeds: Z.
        rng: where from.
    """
    examples, positions, size = inputs.shape
    n, width = block.head_dim, block.head_dim * heads
    alpha, root = block.alpha_a, (block.head_dim * heads) ** -0.5
    in_logits = n ** -(1.5 - alpha) * heads**-0.5
    normal = rng.standard_normal
    h = inputs.reshape(-1, size) @ normal((seeds, size, width)) / size**0.5  # [Z, R, D]
    z = (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True)
    w_q, w_k = (n ** (1 - alpha) * normal((seeds, width, width)) for _ in range(2))  # [in, out]
    w_v, w_o, w = (
        normal((seeds, width, width)),
        normal((seeds, width, width)),
        normal((seeds, width, 1)),
    )
    rate = block.rate * block.gamma0**2 * width
    outputs, kernels, attention = [], [], []

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(seeds, examples, positions, heads, n).swapaxes(2, 3)

    def joined(x: np.ndarray) -> np.ndarray:
        return x.swapaxes(2, 3).reshape(seeds, examples * positions, width)

    def t(x: np.ndarray) -> np.ndarray:
        return np.swapaxes(x, -1, -2)

    for _ in range(steps):
        q, k, v = split(in_logits * z @ w_q), split(in_logits * z @ w_k), split(root * z @ w_v)
        logits = n**-alpha * q @ t(k)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y = joined(p @ v)
        after = (
            (h + block.beta0 * root * y @ w_o).reshape(seeds, examples, positions, width).mean(2)
        )
        f = (after @ w)[..., 0] / (block.gamma0 * width)
        outputs.append(f - outputs[0] if outputs else f)
        kernels.append(after @ t(after) / width)
        attention.append(
            np.stack([(logits**2).mean((1, 2, 3, 4)), (logits.mean(2) ** 2).mean((1, 2, 3))], -1)
        )
        error = (
            targets - (outputs[-1] if len(outputs) > 1 else 0 * f)
        ) / examples  # centred: 0 at the start
        df = error[..., None] / (
            block.gamma0 * width
        )  # minus the loss's gradient, through f to the readout's product
        dafter = np.repeat(df * t(w), positions, axis=1) / positions  # [Z, R, D]
        dy = split(block.beta0 * root * dafter @ t(w_o))
        dp = dy @ t(v)
        da = n**-alpha * p * (dp - (dp * p).sum(-1, keepdims=True))
        moves = {
            "w_o": block.beta0 * root * t(y) @ dafter, "w_v": root * t(z) @ joined(t(p) @ dy),
            "w_q": in_logits * t(z) @ joined(da @ k), "w_k": in_logits * t(z) @ joined(t(da) @ q),
        }  # fmt: skip
        w = w + rate * t(after) @ df
        w_q, w_k, w_v, w_o = (
            w_q + rate * moves["w_q"],
            w_k + rate * moves["w_k"],
            w_v + rate * moves["w_v"],
            w_o + rate * moves["w_o"],
        )
    outputs[0] = 0 * outputs[0]
    return Trajectory(*(np.stack(x, 1) for x in (outputs, kernels, attention)))
