"""Finite nets of the one-block model of `mupax.presets.infinite.heads`, with all their matrices.

The code is independent of that solver and of the zoo, which has no block without an MLP. Weights
are Normal(0, 1), except W_Q and W_K, which are N^(1 - alpha_a) times as large.

Shapes: Z seeds, P examples, S positions, R = P S, H heads, N dimension per head, D = N H width,
I values of an input position.
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
    """Train nets with H heads by gradient descent, and return their trajectory.

    All arrays of the trajectory have a leading axis of seeds.

    Args:
        inputs: Inputs [P, S, I].
        targets: Targets [P].
        steps: Number of observations. The first is before training, and there is one step between
            two of them.
        heads: Number of heads `H`.
        seeds: Number of seeds `Z`.
    """
    examples, positions, size = inputs.shape
    n = block.head_dim
    width = block.head_dim * heads
    alpha = block.alpha_a
    root = width**-0.5
    # With the std of W_Q and W_K, N^(1 - alpha), products have the scale D^-1/2.
    qk_scale = n ** -(1.5 - alpha) * heads**-0.5
    # The mean-field rate, eta gamma0^2 D.
    rate = block.rate * block.gamma0**2 * width

    # Matrices are [Z, in, out]. The order of the draws is part of the records.
    normal = rng.standard_normal
    h_ZRD = inputs.reshape(-1, size) @ normal((seeds, size, width)) / size**0.5
    z_ZRD = (h_ZRD - h_ZRD.mean(-1, keepdims=True)) / h_ZRD.std(-1, keepdims=True)
    w_q = n ** (1 - alpha) * normal((seeds, width, width))
    w_k = n ** (1 - alpha) * normal((seeds, width, width))
    w_v = normal((seeds, width, width))
    w_o = normal((seeds, width, width))
    w = normal((seeds, width, 1))

    outputs = []
    kernels = []
    attention = []

    def split_heads(x_ZRD: np.ndarray) -> np.ndarray:
        return x_ZRD.reshape(seeds, examples, positions, heads, n).swapaxes(2, 3)

    def join_heads(x_ZPHSN: np.ndarray) -> np.ndarray:
        return x_ZPHSN.swapaxes(2, 3).reshape(seeds, examples * positions, width)

    def transposed(x: np.ndarray) -> np.ndarray:
        return np.swapaxes(x, -1, -2)

    for _ in range(steps):
        # Forward pass: attention, the mean over positions, and the readout.
        q_ZPHSN = split_heads(qk_scale * z_ZRD @ w_q)
        k_ZPHSN = split_heads(qk_scale * z_ZRD @ w_k)
        v_ZPHSN = split_heads(root * z_ZRD @ w_v)
        logits = n**-alpha * q_ZPHSN @ transposed(k_ZPHSN)  # [Z, P, H, S, S]
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        y_ZRD = join_heads(probabilities @ v_ZPHSN)
        residual_ZRD = h_ZRD + block.beta0 * root * y_ZRD @ w_o
        pooled_ZPD = residual_ZRD.reshape(seeds, examples, positions, width).mean(2)
        f_ZP = (pooled_ZPD @ w)[..., 0] / (block.gamma0 * width)

        # Outputs are centred by subtracting the initial output, which is set to 0 at the end.
        is_first = not outputs
        outputs.append(f_ZP if is_first else f_ZP - outputs[0])
        kernels.append(pooled_ZPD @ transposed(pooled_ZPD) / width)
        logits_square = (logits**2).mean((1, 2, 3, 4))
        head_mean_square = (logits.mean(2) ** 2).mean((1, 2, 3))
        attention.append(np.stack([logits_square, head_mean_square], -1))

        # Backward pass; "d" stands for minus the gradient of the loss.
        centred_ZP = 0 * f_ZP if is_first else outputs[-1]
        error_ZP = (targets - centred_ZP) / examples
        df = error_ZP[..., None] / (block.gamma0 * width)
        dresidual_ZRD = np.repeat(df * transposed(w), positions, axis=1) / positions
        dy_ZPHSN = split_heads(block.beta0 * root * dresidual_ZRD @ transposed(w_o))
        dprobabilities = dy_ZPHSN @ transposed(v_ZPHSN)
        row_sums = (dprobabilities * probabilities).sum(-1, keepdims=True)
        dlogits = n**-alpha * probabilities * (dprobabilities - row_sums)

        dw_o = block.beta0 * root * transposed(y_ZRD) @ dresidual_ZRD
        dw_v = root * transposed(z_ZRD) @ join_heads(transposed(probabilities) @ dy_ZPHSN)
        dw_q = qk_scale * transposed(z_ZRD) @ join_heads(dlogits @ k_ZPHSN)
        dw_k = qk_scale * transposed(z_ZRD) @ join_heads(transposed(dlogits) @ q_ZPHSN)

        w = w + rate * transposed(pooled_ZPD) @ df
        w_q = w_q + rate * dw_q
        w_k = w_k + rate * dw_k
        w_v = w_v + rate * dw_v
        w_o = w_o + rate * dw_o
    outputs[0] = 0 * outputs[0]
    return Trajectory(np.stack(outputs, 1), np.stack(kernels, 1), np.stack(attention, 1))
