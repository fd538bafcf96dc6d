"""One block of a network of dice, and the numbers that a model and its parameterization come to.

D draws, B examples, T positions, R = B T, N head dimension, H heads, F hidden. Square matrices, and those to and from F, are dice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from mupax.presets.infinite.dice import Basis, LazyGaussian, Weight
from mupax.presets.infinite.layers import ACTIVATIONS, Back, attend, norm

BLOCK = ("query", "key", "value", "out", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """Sizes and constants of the model whose infinite limit is trained, as its parameterization gives them.

    Attributes:
        head_dim, heads, depth: N, H and L; the width is N H.
        mlp: F.
        stds: of the entries of a parameter as the forward pass has it (its multiplier in it), at the start: by `BLOCK`'s
            names a number per layer, and of patch, position and readout.
        rates: learning rates of those, the peak's and the multiplier's square in them.
        logit_scale: what q.k is multiplied by.
        skip, branch: of the two additions of every block, [L, 2].
        momentum: of heavy-ball SGD.
        eps: of norms.
        centred_norm: LayerNorm; RMSNorm without.
        centred: whether the output at the start is subtracted.
        activation: of the MLP.
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
        return self.head_dim * self.heads


class Block:
    """One block's six matrices."""

    def __init__(
        self,
        numbers: LimitConfig,
        layer: int,
        basis: Callable[[int], Basis],
        rng: np.random.Generator,
        *,
        responses: bool,
    ) -> None:
        self.numbers, self.layer = numbers, layer

        width, mlp = numbers.width, numbers.mlp
        self.normed, self.mixed, self.normed_again, self.hidden = map(
            basis, (width, width, width, mlp)
        )
        inputs = {
            **dict.fromkeys(("query", "key", "value"), self.normed), "out": self.mixed, "up": self.normed_again, "down": self.hidden,
        }  # fmt: skip
        self.weights = {
            name: Weight(
                LazyGaussian(
                    inputs[name], basis(mlp if name == "up" else width), rng, responses=responses
                ),
                float(numbers.stds[name][layer]),
                float(numbers.rates[name][layer]),
                numbers.momentum,
            )
            for name in BLOCK
        }

    def forward(
        self, h: np.ndarray, examples: int, *, initial: bool
    ) -> tuple[np.ndarray, np.ndarray, Back]:
        """The stream [D, R, width] after the block, what `Snapshot.attention` has of it [D, 2], and the derivative.

        Args:
            h: the stream before it.
            examples: B.
            initial: with the weights of the start.
        """
        n, w = self.numbers, self.weights
        (skip, skip_again), (branch, branch_again) = n.skip[self.layer], n.branch[self.layer]

        def product(name: str, at: np.ndarray) -> np.ndarray:
            return w[name].forward(at, initial=initial)

        z, back_norm = norm(h, n.eps, centred=n.centred_norm)
        at_z = self.normed.coordinates(z)
        q, k, v = (self._split(product(name, at_z), examples) for name in ("query", "key", "value"))
        y, logits, back_attend = attend(q, k, v, n.logit_scale)
        at_y = self.mixed.coordinates(self._joined(y))
        middle = skip * h + branch * product("out", at_y)
        z, back_norm_again = norm(middle, n.eps, centred=n.centred_norm)
        at_x = self.normed_again.coordinates(z)
        a, back_activation = ACTIVATIONS[n.activation](product("up", at_x))
        at_a = self.hidden.coordinates(a)
        after = skip_again * middle + branch_again * product("down", at_a)

        def back(dh: np.ndarray) -> np.ndarray:
            da = w["down"].backward(branch_again * dh, at_a)
            dz = w["up"].backward(back_activation(da), at_x)
            dh = skip_again * dh + back_norm_again(dz)
            dy = w["out"].backward(branch * dh, at_y)
            dq, dk, dv = (self._joined(part) for part in back_attend(self._split(dy, examples)))
            dz = (
                w["query"].backward(dq, at_z)
                + w["key"].backward(dk, at_z)
                + w["value"].backward(dv, at_z)
            )
            return skip * dh + back_norm(dz)

        mean = logits.mean(-3)
        return (
            after,
            np.stack([(logits**2).mean((-4, -3, -2, -1)), (mean**2).mean((-3, -2, -1))], -1),
            back,
        )

    def step(self) -> None:
        """Move along the gradients kept."""
        for weight in self.weights.values():
            weight.step()

    def _split(self, x: np.ndarray, examples: int) -> np.ndarray:
        """[D, R, width] to [D, B, H, T, N]."""
        x = x.reshape(*x.shape[:-2], examples, -1, self.numbers.heads, self.numbers.head_dim)
        return np.swapaxes(x, -2, -3)

    def _joined(self, x: np.ndarray) -> np.ndarray:
        """[D, B, H, T, N] to [D, R, width]."""
        x = np.swapaxes(x, -2, -3)
        return x.reshape(*x.shape[:-4], -1, self.numbers.width)
