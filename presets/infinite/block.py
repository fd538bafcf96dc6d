"""One residual block of an infinitely wide transformer, and the config of the whole model.

Shapes: D draws (independent networks side by side), B examples, T positions, R = B T, N head
dimension, H heads, F hidden size. All matrices of a block are lazy Gaussians (`dice`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from mupax.presets.infinite.dice import Basis, LazyGaussian, Weight
from mupax.presets.infinite.layers import ACTIVATIONS, Vjp, attend, norm

BLOCK = ("query", "key", "value", "out", "up", "down")
"""Names of a block's matrices, in the order of `Block.weights`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """Sizes and constants of a model whose infinite limit is trained.

    Attributes:
        head_dim, heads, depth: Head dimension N, number of heads H and number of blocks L. The
            width is N H.
        mlp: Hidden size F of the MLP.
        stds: Initial standard deviations of effective weights, multiplier * stored weight. Keys are
            the names in `BLOCK`, with one value per layer, and "patch", "position" and "readout",
            with one value.
        rates: Learning rates by the same names. They include the peak learning rate and the square
            of the multiplier.
        logit_scale: Factor on the products q.k.
        skip: Factors on the stream in the two additions of every block, [L, 2].
        branch: Factors on the branch in the two additions of every block, [L, 2].
        momentum: Momentum of heavy-ball SGD.
        eps: Number added to the mean square in norms.
        centred_norm: Whether norms are LayerNorm. Otherwise they are RMSNorm.
        centred: Whether the output at initialization is subtracted from the output.
        activation: Key of `layers.ACTIVATIONS`.
    """

    head_dim: int
    heads: int
    depth: int
    mlp: int
    stds: Mapping[str, np.ndarray]
    rates: Mapping[str, np.ndarray]
    logit_scale: float
    skip: np.ndarray
    branch: np.ndarray
    momentum: float = 0.0
    eps: float = 1e-5
    centred_norm: bool = True
    centred: bool = True
    activation: str = "gelu"

    @property
    def width(self) -> int:
        """Width of the residual stream, N H."""
        return self.head_dim * self.heads


class Block:
    """One residual block: attention, then an MLP, each after a norm.

    Args:
        layer: Index of the block, from 0.
        basis: Function from a vector size to an empty `Basis` for such vectors.
        responses: Whether products with a matrix and with its transpose are consistent. `False` is
            a control (`LazyGaussian`).

    Attributes:
        weights: Matrices by the names of `BLOCK`.
    """

    def __init__(
        self,
        config: LimitConfig,
        layer: int,
        basis: Callable[[int], Basis],
        rng: np.random.Generator,
        *,
        responses: bool,
    ) -> None:
        self.config = config
        self.layer = layer
        width = config.width

        # Directions of the vectors that each matrix reads. Queries, keys and values read the same
        # ones.
        self._attention_inputs = basis(width)
        self._attended = basis(width)
        self._mlp_inputs = basis(width)
        self._hidden = basis(config.mlp)
        inputs = {
            "query": self._attention_inputs,
            "key": self._attention_inputs,
            "value": self._attention_inputs,
            "out": self._attended,
            "up": self._mlp_inputs,
            "down": self._hidden,
        }
        self.weights: dict[str, Weight] = {}
        for name in BLOCK:
            outputs = basis(config.mlp if name == "up" else width)
            self.weights[name] = Weight(
                LazyGaussian(inputs[name], outputs, rng, responses=responses),
                float(config.stds[name][layer]),
                float(config.rates[name][layer]),
                config.momentum,
            )

    def forward(
        self, h: np.ndarray, examples: int, *, initial: bool
    ) -> tuple[np.ndarray, np.ndarray, Vjp]:
        """Apply the block to the residual streams of D networks at once.

        Args:
            h: Stream before the block, [D, R, width]. The R = B T rows are the positions of all
                examples.
            examples: Number of examples B.
            initial: Whether to use the weights before training.

        Returns:
            Three values. First, the stream after the block [D, R, width]. Second, two statistics of
            the attention logits [D, 2]: the mean over heads of their squares, and the square of
            their mean over heads (`Snapshot.attention`). Third, the function that backpropagates a
            gradient from the output to the input and adds the weights' gradients to those kept for
            `step`.
        """
        config = self.config
        weights = self.weights
        attention_skip, mlp_skip = config.skip[self.layer]
        attention_branch, mlp_branch = config.branch[self.layer]

        normed, attention_norm_vjp = norm(h, config.eps, centred=config.centred_norm)
        attention_inputs = self._attention_inputs.coordinates(normed)
        q = weights["query"].forward(attention_inputs, initial=initial)
        k = weights["key"].forward(attention_inputs, initial=initial)
        v = weights["value"].forward(attention_inputs, initial=initial)
        y, logits, attend_vjp = attend(
            self._split_heads(q, examples),
            self._split_heads(k, examples),
            self._split_heads(v, examples),
            config.logit_scale,
        )
        attended = self._attended.coordinates(self._join_heads(y))
        attention = weights["out"].forward(attended, initial=initial)
        middle = attention_skip * h + attention_branch * attention

        normed, mlp_norm_vjp = norm(middle, config.eps, centred=config.centred_norm)
        mlp_inputs = self._mlp_inputs.coordinates(normed)
        up = weights["up"].forward(mlp_inputs, initial=initial)
        activations, activation_vjp = ACTIVATIONS[config.activation](up)
        hidden = self._hidden.coordinates(activations)
        down = weights["down"].forward(hidden, initial=initial)
        after = mlp_skip * middle + mlp_branch * down

        def vjp(dafter: np.ndarray) -> np.ndarray:
            dactivations = weights["down"].backward(mlp_branch * dafter, hidden)
            dnormed = weights["up"].backward(activation_vjp(dactivations), mlp_inputs)
            dmiddle = mlp_skip * dafter + mlp_norm_vjp(dnormed)
            dattended = weights["out"].backward(attention_branch * dmiddle, attended)
            dq, dk, dv = attend_vjp(self._split_heads(dattended, examples))
            # Queries, keys and values read one input, so that their gradients add up.
            dnormed = (
                weights["query"].backward(self._join_heads(dq), attention_inputs)
                + weights["key"].backward(self._join_heads(dk), attention_inputs)
                + weights["value"].backward(self._join_heads(dv), attention_inputs)
            )
            return attention_skip * dmiddle + attention_norm_vjp(dnormed)

        mean_logits = logits.mean(-3)
        square = (logits**2).mean((-4, -3, -2, -1))
        square_of_mean = (mean_logits**2).mean((-3, -2, -1))
        return after, np.stack([square, square_of_mean], -1), vjp

    def step(self) -> None:
        """Update every matrix with the gradients added up since the last step, and clear them."""
        for weight in self.weights.values():
            weight.step()

    def _split_heads(self, x: np.ndarray, examples: int) -> np.ndarray:
        """Reshape rows [D, R, width] to heads [D, B, H, T, N], where R = B T and width = H N.

        Here D counts networks, B examples, H heads, T positions, and N is the head dimension.

        Args:
            examples: Number of examples B.
        """
        heads = self.config.heads
        x = x.reshape(*x.shape[:-2], examples, -1, heads, self.config.head_dim)
        return np.swapaxes(x, -2, -3)

    def _join_heads(self, x: np.ndarray) -> np.ndarray:
        """Reshape heads [D, B, H, T, N] to rows [D, R, width], the inverse of `_split_heads`."""
        x = np.swapaxes(x, -2, -3)
        return x.reshape(*x.shape[:-4], -1, self.config.width)
