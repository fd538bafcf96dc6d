"""Residual kernels of a transformer at initialization in the limit of many heads, layer by layer.

    first = kernels.input_kernel(patches)                # [X, S, X, S]
    limit = kernels.residual_kernels(first, depth=8, alpha_a=1.0, alpha_l=0.5, beta0=4.0)
    limit.layers[-1]                                     # h.h'/D after the last block

The kernel H[x, s, x', s'] is the limit of h(x, s).h(x', s') / D (Bordelon et al. 2024, 2405.15712).
A bar stands for the kernel after a LayerNorm, which has diagonal 1. Each block adds two terms, with
E^2 = beta0^2 L^(-2 alpha_L):

    H~ = H + E^2 V(H-bar)          attention, see `attention_kernels`
    H' = H~ + E^2 Phi(H~-bar)      MLP: Phi(c) is the mean of phi(z) phi(z') over unit Gaussians
                                   with correlation c

A decoder's block that attends to an encoder adds E^2 V_x between the two. V_x is attention with
queries of kernel H~-bar to keys and values of kernel M, the bar of the encoder's last layer.

The paper gives the model (section 2.1) and its limit as a field theory. This recursion is the
initial condition of the limit, derived here, and so is V_x. It holds for any F/D, because every
matrix starts at fan-in variance. Models have no biases, norm gains or CLS token.

Shapes: X inputs, S positions, N dimension per head, L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mupax.presets.roles import PresetError
from scripts.figures.initialization import attention_kernels

# The Hermite series of a smooth activation with this degree has an error below 1e-14.
_DEGREE = 60
_NODES = 150


class Kernels(NamedTuple):
    """Residual kernels at every layer."""

    layers: np.ndarray
    """Kernels [L + 1, X, S, X, S] of the embedding and after every block."""
    sampling_error: np.ndarray
    """Standard error [L + 1] from sampled heads, relative to the kernel.

    Error and kernel are root mean squares over entries.
    """


class Memory(NamedTuple):
    """Output of an encoder, which a decoder attends to."""

    kernel: np.ndarray
    """Kernel M [X, S, X, S] with diagonal 1."""
    mask: np.ndarray
    """Bool [X, S], False at padding."""


def input_kernel(patches: np.ndarray, *, positions: bool = True) -> np.ndarray:
    """Return the kernel [X, S, X, S] of the patch embedding, x.x'/D_in.

    Args:
        patches: Patches [X, S, D_in].
        positions: Whether learned positions with standard deviation 1 are added, which add 1 to the
            kernel of equal positions.
    """
    patches = np.asarray(patches, np.float64)
    kernel = np.einsum("xsi,yti->xsyt", patches, patches) / patches.shape[-1]
    if positions:
        kernel = kernel + np.eye(patches.shape[1])[None, :, None, :]
    return kernel


def token_kernel(tokens: np.ndarray) -> np.ndarray:
    """Return the kernel [X, S, X, S] of token embeddings and learned positions, both with std 1.

    Args:
        tokens: Token numbers [X, S].
    """
    tokens = np.asarray(tokens)
    is_equal = (tokens[:, :, None, None] == tokens).astype(np.float64)
    return is_equal + np.eye(tokens.shape[1])[None, :, None, :]


def residual_kernels(
    first: np.ndarray,
    *,
    depth: int,
    alpha_a: float,
    alpha_l: float,
    beta0: float = 1.0,
    head_dim: int | None = None,
    activation: str = "gelu",
    samples: int = 4000,
    seed: int = 0,
    mask: np.ndarray | None = None,
    memory: Memory | None = None,
) -> Kernels:
    """Return the kernel of the residual stream after every block.

    Args:
        first: Kernel [X, S, X, S] of the stream before the first block, from `input_kernel`.
        depth: Number of blocks `L`.
        alpha_a: Exponent in [1/2, 1]; attention logits scale as N^-alpha_a.
        alpha_l: Exponent in [1/2, 1]; branches are multiplied by beta0 L^-alpha_l.
        head_dim: N, or `None` for N to infinity.
        activation: Activation of the MLP, a key of `ACTIVATIONS`.
        samples: Number of heads to draw. Heads are not drawn for N to infinity at alpha_a above
            1/2, where their mean has a closed form.
        seed: Seed of the drawn heads. The same seed gives the same kernels.
        mask: Bool array that broadcasts to [X, S, S], True for keys that a query attends to. `None`
            attends to all keys.
        memory: Output of an encoder, which every block attends to before its MLP.

    Raises:
        PresetError: The activation is unknown, an exponent is outside [1/2, 1], a size is below 1,
            or a kernel has a wrong shape.
    """
    _check(first, depth, alpha_a, alpha_l, head_dim, samples, memory)
    mlp_kernel = activation_kernel(activation)
    # E^2 of the module's equations.
    branch = beta0**2 * depth ** (-2 * alpha_l)
    is_exact = attention_kernels.is_uniform(alpha_a, head_dim)
    # Heads are drawn in 8 independent recursions, whose spread is the sampling error.
    repeats = 1 if is_exact else 8
    heads_per_repeat = math.ceil(samples / repeats)
    num_inputs, num_positions = first.shape[:2]
    self_mask = np.ones(1, bool) if mask is None else mask

    def attention(
        queries: np.ndarray, keys: np.ndarray, mask: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        mask = np.broadcast_to(mask, (num_inputs, num_positions, keys.shape[1]))
        if is_exact:
            return attention_kernels.uniform(keys, mask)
        return attention_kernels.sampled(
            queries, keys, mask, alpha_a, head_dim, heads_per_repeat, rng
        )

    def recursion(rng: np.random.Generator) -> np.ndarray:
        kernel = first
        layers = [first]
        for _ in range(depth):
            bar = normalized(kernel)
            kernel = kernel + branch * attention(bar, bar, self_mask, rng)
            if memory is not None:
                bar = normalized(kernel)
                kernel = kernel + branch * attention(bar, memory.kernel, memory.mask[:, None], rng)
            kernel = kernel + branch * mlp_kernel(normalized(kernel))
            layers.append(kernel)
        return np.stack(layers)

    recursions = np.stack([recursion(rng) for rng in np.random.default_rng(seed).spawn(repeats)])
    layers = recursions.mean(axis=0)
    if repeats > 1:
        error = recursions.std(axis=0, ddof=1) / math.sqrt(repeats)
    else:
        error = np.zeros_like(layers)
    return Kernels(layers, _rms(error) / _rms(layers))


def normalized(kernel: np.ndarray) -> np.ndarray:
    """Return the kernel [X, S, X, S] after a LayerNorm without parameters, which has diagonal 1."""
    # At infinite width the mean over a vector's entries is 0, so only the scale changes.
    diagonal = np.sqrt(np.einsum("xsxs->xs", kernel))
    return kernel / (diagonal[:, :, None, None] * diagonal)


def activation_kernel(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return Phi of an activation: the function from correlations c to the mean of phi(z) phi(z').

    z and z' are unit Gaussians with correlation c.

    Raises:
        PresetError: No kernel is known for an activation of this name.
    """
    if name not in ACTIVATIONS:
        raise PresetError(
            f"no kernel is known for the activation {name!r}; write {', '.join(ACTIVATIONS)}"
        )
    phi = ACTIVATIONS[name]
    return relu_kernel if phi is None else partial(_series, phi)


def relu_kernel(correlation: np.ndarray) -> np.ndarray:
    """Return Phi of max(z, 0): the arc-cosine kernel of degree 1 over 2 (Cho and Saul 2009)."""
    # Rounding takes correlations a little beyond 1, where arccos is NaN.
    c = np.clip(correlation, -1.0, 1.0)
    return (np.sqrt(1 - c**2) + c * (math.pi - np.arccos(c))) / (2 * math.pi)


def _series(phi: Callable[[np.ndarray], np.ndarray], correlation: np.ndarray) -> np.ndarray:
    """Return Phi of a smooth activation by Mehler's formula.

    Phi(c) is the sum over k of a_k^2 c^k, and a_k are the coefficients of phi in orthonormal
    Hermite polynomials.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    values = weights / weights.sum() * phi(nodes)
    previous = np.zeros_like(nodes)
    polynomial = np.ones_like(nodes)
    squares = []
    for k in range(_DEGREE):
        squares.append(float(values @ polynomial) ** 2)
        following = (nodes * polynomial - math.sqrt(k) * previous) / math.sqrt(k + 1)
        previous = polynomial
        polynomial = following
    return np.polynomial.polynomial.polyval(np.clip(correlation, -1.0, 1.0), squares)


def _gelu(z: np.ndarray) -> np.ndarray:
    return z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _gelu_exact(z: np.ndarray) -> np.ndarray:
    return z / 2 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray] | None] = {
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "relu": None,
}
"""Name of an activation in the zoo to its function, `None` where Phi has a closed form."""


def _rms(layers: np.ndarray) -> np.ndarray:
    """Return the root mean square [L + 1] over the entries of kernels [L + 1, X, S, X, S]."""
    return np.sqrt(np.mean(layers**2, axis=(1, 2, 3, 4)))


def _check(
    first: np.ndarray,
    depth: int,
    alpha_a: float,
    alpha_l: float,
    head_dim: int | None,
    samples: int,
    memory: Memory | None,
) -> None:
    """Raise `PresetError` for invalid arguments of `residual_kernels`, as documented there."""
    if first.ndim != 4 or first.shape[:2] != first.shape[2:]:
        raise PresetError(
            f"the first kernel has shape {first.shape}; write one of shape [X, S, X, S]"
        )
    if memory is not None and memory.kernel.shape != 2 * (len(first), memory.mask.shape[-1]):
        num_inputs = len(first)
        raise PresetError(
            f"the memory has shapes {memory.kernel.shape} with {memory.mask.shape} seen; "
            f"write [{num_inputs}, S, {num_inputs}, S] and [{num_inputs}, S]"
        )
    for label, value in (("alpha_a", alpha_a), ("alpha_l", alpha_l)):
        if not 0.5 <= value <= 1.0:
            raise PresetError(f"{label}={value:g} is outside [0.5, 1], where the limit exists")
    for label, size in (("depth", depth), ("head_dim", head_dim), ("samples", samples)):
        if size is not None and size < 1:
            raise PresetError(f"{label}={size}: write a whole number of at least 1")
