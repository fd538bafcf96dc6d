"""The residual kernel of a transformer at initialization as heads go to infinity, by layer (Bordelon et al. 2024, 2405.15712).

    first = kernels.input_kernel(patches)                                    # [X, S, X, S]
    found = kernels.residual_kernels(first, depth=8, alpha_a=1.0, alpha_l=0.5, beta0=4.0)
    found.layers[-1]                                                         # what h.h'/D is after the last block

X inputs, S positions, N dimension per head, L blocks. The kernel H[x, s, x', s'] is the limit of h(x, s).h(x', s') / D. With
E^2 = beta0^2 L^(-2 alpha_L) and bars for kernels of what a LayerNorm gives (diagonal 1), each block adds two terms:

    H~ = H + E^2 V(H-bar)          attention: `attention_kernels`
    H' = H~ + E^2 Phi(H~-bar)      MLP: Phi(c) = mean of phi(z) phi(z') over unit Gaussians with correlation c

The block of a decoder that attends to an encoder adds E^2 V_x between the two: attention with queries of kernel H~-bar to keys and
values of kernel M, the bar of the encoder's last layer.

The paper gives the model (section 2.1) and its limit as a field theory; this recursion is the limit's initial condition, derived
here, and so is V_x. It holds for any F/D, since every matrix starts at fan-in variance, without biases, norm gains or a CLS token. Needs numpy,
as nothing else in this folder but `attention_kernels` does: import it only where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mupax.presets.roles import PresetError
from scripts.figures.initialization import attention_kernels

_DEGREE, _NODES = 60, 150
"""Of the Hermite series of a smooth activation: what it leaves out is below 1e-14."""


class Kernels(NamedTuple):
    """A residual kernel at every layer."""

    layers: np.ndarray
    """[L + 1, X, S, X, S]: of the embedding, then after every block."""
    sampling_error: np.ndarray
    """[L + 1]: standard error from sampled attention, relative to the kernel (both root mean square over entries)."""


class Memory(NamedTuple):
    """What a decoder attends to."""

    kernel: np.ndarray
    """M, [X, S, X, S] with diagonal 1."""
    mask: np.ndarray
    """Bool [X, S], False at padding."""


def input_kernel(patches: np.ndarray, *, positions: bool = True) -> np.ndarray:
    """Kernel of the patch embedding: x.x'/D_in, and 1 between equal positions where positions are learned.

    Args:
        patches: what the embedding reads, [X, S, D_in].
        positions: whether a table of positions with standard deviation 1 is added.

    Returns:
        [X, S, X, S].
    """
    patches = np.asarray(patches, np.float64)
    kernel = np.einsum("xsi,yti->xsyt", patches, patches) / patches.shape[-1]
    return kernel + np.eye(patches.shape[1])[None, :, None, :] if positions else kernel


def token_kernel(tokens: np.ndarray) -> np.ndarray:
    """Kernel of token embeddings and learned positions, both with standard deviation 1, [X, S, X, S].

    Args:
        tokens: [X, S].
    """
    tokens = np.asarray(tokens)
    same = (tokens[:, :, None, None] == tokens).astype(np.float64)
    return same + np.eye(tokens.shape[1])[None, :, None, :]


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
    """The kernel of the residual stream after every block.

    Args:
        first: kernel of the stream before the first block, [X, S, X, S] (`input_kernel`).
        depth: blocks L.
        alpha_a: attention logits scale as N^-alpha_a, in [1/2, 1].
        alpha_l: branches are multiplied by beta0 L^-alpha_l.
        beta0: constant on every branch.
        head_dim: N; None for N to infinity.
        activation: one of `ACTIVATIONS`.
        samples: heads drawn, where the mean over heads has no closed form: everywhere but for N to infinity at
            alpha_a above 1/2. They are drawn in 8 independent recursions, whose spread is the sampling error.
        seed: of the heads drawn; the same seed gives the same kernels.
        mask: which positions one attends to, bool, of a shape that broadcasts to [X, S, S]; all unless given.
        memory: of an encoder, which every block attends to before its MLP.

    Raises:
        PresetError: no such activation, an exponent outside [1/2, 1], sizes below 1, or kernels of other shapes.
    """
    _check(first, depth, alpha_a, alpha_l, head_dim, samples, memory)
    mean_of = activation_kernel(activation)
    branch = beta0**2 * depth ** (-2 * alpha_l)
    exact = attention_kernels.is_uniform(alpha_a, head_dim)
    repeats = 1 if exact else 8
    (inputs, positions), everything = first.shape[:2], np.ones(1, bool)

    def heads(
        queries: np.ndarray, keys: np.ndarray, mask: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        mask = np.broadcast_to(mask, (inputs, positions, keys.shape[1]))
        if exact:
            return attention_kernels.uniform(keys, mask)
        each = math.ceil(samples / repeats)
        return attention_kernels.sampled(queries, keys, mask, alpha_a, head_dim, each, rng)

    def recursion(rng: np.random.Generator) -> np.ndarray:
        kernel, layers = first, [first]
        for _ in range(depth):
            bar = normalized(kernel)
            kernel = kernel + branch * heads(bar, bar, everything if mask is None else mask, rng)
            if memory is not None:
                kernel = kernel + branch * heads(
                    normalized(kernel), memory.kernel, memory.mask[:, None], rng
                )
            kernel = kernel + branch * mean_of(normalized(kernel))
            layers.append(kernel)
        return np.stack(layers)

    recursions = np.stack([recursion(rng) for rng in np.random.default_rng(seed).spawn(repeats)])
    layers = recursions.mean(axis=0)
    spread = (
        recursions.std(axis=0, ddof=1) / math.sqrt(repeats)
        if repeats > 1
        else np.zeros_like(layers)
    )
    return Kernels(layers, _rms(spread) / _rms(layers))


def normalized(kernel: np.ndarray) -> np.ndarray:
    """Kernel after a LayerNorm without parameters, [X, S, X, S]: at infinite width the mean over entries is 0."""
    diagonal = np.sqrt(np.einsum("xsxs->xs", kernel))
    return kernel / (diagonal[:, :, None, None] * diagonal)


def activation_kernel(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Phi: correlations of unit Gaussians to the mean of phi(z) phi(z').

    Raises:
        PresetError: no activation has this name.
    """
    if name not in ACTIVATIONS:
        raise PresetError(
            f"no kernel is known for the activation {name!r}; write {', '.join(ACTIVATIONS)}"
        )
    phi = ACTIVATIONS[name]
    return relu_kernel if phi is None else partial(_series, phi)


def relu_kernel(correlation: np.ndarray) -> np.ndarray:
    """Of max(z, 0): the arc-cosine kernel of degree 1 over 2 (Cho and Saul 2009)."""
    c = np.clip(correlation, -1.0, 1.0)
    return (np.sqrt(1 - c**2) + c * (math.pi - np.arccos(c))) / (2 * math.pi)


def _series(phi: Callable[[np.ndarray], np.ndarray], correlation: np.ndarray) -> np.ndarray:
    """Sum over k of a_k^2 c^k, a_k the coefficients of phi in orthonormal Hermite polynomials (Mehler's formula)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    values = weights / weights.sum() * phi(nodes)
    before, now, squares = np.zeros_like(nodes), np.ones_like(nodes), []
    for k in range(_DEGREE):
        squares.append(float(values @ now) ** 2)
        before, now = now, (nodes * now - math.sqrt(k) * before) / math.sqrt(k + 1)
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
"""Activation of an MLP, by the zoo's names, to its function; None where the kernel is known in closed form."""


def _rms(layers: np.ndarray) -> np.ndarray:
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
    if first.ndim != 4 or first.shape[:2] != first.shape[2:]:
        raise PresetError(
            f"the first kernel has shape {first.shape}; write one of shape [X, S, X, S]"
        )
    if memory is not None and memory.kernel.shape != 2 * (len(first), memory.mask.shape[-1]):
        shapes = f"{memory.kernel.shape} with {memory.mask.shape} seen"
        raise PresetError(
            f"the memory has shapes {shapes}; write [{len(first)}, S, {len(first)}, S] and [{len(first)}, S]"
        )
    for label, value in (("alpha_a", alpha_a), ("alpha_l", alpha_l)):
        if not 0.5 <= value <= 1.0:
            raise PresetError(f"{label}={value:g} is outside [0.5, 1], where the limit exists")
    for label, size in (("depth", depth), ("head_dim", head_dim), ("samples", samples)):
        if size is not None and size < 1:
            raise PresetError(f"{label}={size}: write a whole number of at least 1")
