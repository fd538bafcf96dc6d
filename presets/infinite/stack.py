"""A whole vision transformer of a width that no memory holds, trained exactly in law: SGD with momentum, centred output, any depth.

    h = x W_patch + position      h <- s h + b O attention(Q z, K z, V z),  h <- s h + b W_down phi(W_up z),  z = norm(h)
    f = mean over positions of norm(h) . W_readout - the same at the start

Square matrices are dice (`mupax.presets.infinite.dice`); patches, positions and readout have one finite side and are held whole.
With F = D = N H the network of width D has the law of a dense one, and is away from H to infinity as that one is: by H^-1/2.

D draws (networks side by side, on axis 0), B examples, T positions, R = B T, N head dimension, H heads, C classes, I numbers of a patch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from mupax.presets.infinite.dice import Basis, Dice, Weight, transposed
from mupax.presets.infinite.layers import ACTIVATIONS, Back, attend, cross_entropy, norm

BLOCK = ("query", "key", "value", "out", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a model and its parameterization come to.

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
        causal: whether positions see earlier ones alone.
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
    causal: bool = False
    activation: str = "gelu"

    @property
    def width(self) -> int:
        return self.head_dim * self.heads


@dataclasses.dataclass(frozen=True)
class Seen:
    """A network before a step, one entry per draw on axis 0.

    Attributes:
        loss: mean cross-entropy, nats [D].
        logits: centred [D, B, C].
        features: what the readout reads, [D, B, width].
        attention: mean over heads of the attention logits' square, and square of their mean over heads, both mean over examples
            and pairs of positions, [D, L, 2].
    """

    loss: np.ndarray
    logits: np.ndarray
    features: np.ndarray
    attention: np.ndarray


class Dense:
    """A trained matrix with a finite side, [D, inputs, outputs]."""

    def __init__(self, value: np.ndarray, rate: float, momentum: float) -> None:
        self.start = self.value = value
        self.rate, self.momentum = rate, momentum
        self._sum, self._gradient = np.zeros_like(value), np.zeros_like(value)

    def add(self, gradient: np.ndarray) -> None:
        """Keep a gradient until `step`."""
        self._gradient = self._gradient + gradient

    def step(self) -> None:
        """Move along the gradients kept since the last step."""
        self._sum = self.momentum * self._sum + self._gradient
        self.value = self.value - self.rate * self._sum
        self._gradient = np.zeros_like(self._gradient)


class Block:
    """One block's six matrices."""

    def __init__(
        self, numbers: Numbers, layer: int, basis: Callable[[int], Basis], rng: np.random.Generator, *, responses: bool
    ) -> None:
        self.numbers, self.layer = numbers, layer

        width, mlp = numbers.width, numbers.mlp
        self.normed, self.mixed, self.normed_again, self.hidden = map(basis, (width, width, width, mlp))
        inputs = {
            **dict.fromkeys(("query", "key", "value"), self.normed), "out": self.mixed, "up": self.normed_again, "down": self.hidden,
        }  # fmt: skip
        self.weights = {
            name: Weight(
                Dice(inputs[name], basis(mlp if name == "up" else width), rng, responses=responses),
                float(numbers.stds[name][layer]),
                float(numbers.rates[name][layer]),
                numbers.momentum,
            )
            for name in BLOCK
        }

    def forward(self, h: np.ndarray, examples: int, *, initial: bool) -> tuple[np.ndarray, np.ndarray, Back]:
        """The stream [D, R, width] after the block, what `Seen.attention` has of it [D, 2], and the derivative.

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
        y, logits, back_attend = attend(q, k, v, n.logit_scale, causal=n.causal)
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
            dz = w["query"].backward(dq, at_z) + w["key"].backward(dk, at_z) + w["value"].backward(dv, at_z)
            return skip * dh + back_norm(dz)

        mean = logits.mean(-3)
        return after, np.stack([(logits**2).mean((-4, -3, -2, -1)), (mean**2).mean((-3, -2, -1))], -1), back

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


class Stack:
    """Some draws of a network with these numbers, and their training.

    Args:
        numbers: of model, preset and optimizer.
        positions: T.
        patch: numbers I of a patch.
        classes: C.
        draws: networks D.
        rng: where from.
        responses: see `Dice`.
        dtype: of all numbers; float32 halves memory and time.
    """

    def __init__(
        self,
        numbers: Numbers,
        *,
        positions: int,
        patch: int,
        classes: int,
        rng: np.random.Generator,
        draws: int = 1,
        responses: bool = True,
        dtype: type[np.floating] = np.float64,
    ) -> None:
        self.numbers, self.dtype = numbers, dtype

        def dense(name: str, *shape: int) -> Dense:
            value = rng.standard_normal((draws, *shape), dtype) * dtype(numbers.stds[name])
            return Dense(value, float(numbers.rates[name]), numbers.momentum)

        self.patch, self.position = dense("patch", patch, numbers.width), dense("position", positions, numbers.width)
        self.readout = dense("readout", numbers.width, classes)

        def basis(size: int) -> Basis:
            return Basis(size, (draws,), dtype)

        self.blocks = [Block(numbers, layer, basis, rng, responses=responses) for layer in range(numbers.depth)]
        self._inputs, self._reference = np.zeros(0), np.zeros(0)

    def look(self, inputs: np.ndarray, targets: np.ndarray) -> Seen:
        """What the network is on a batch.

        Args:
            inputs: patches [B, T, I].
            targets: classes [B].
        """
        return self._looked(inputs, targets)[0]

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> Seen:
        """The same, of the network as it is before the step on this batch that it then takes.

        Args:
            inputs, targets: as `look` takes them.
        """
        seen, back = self._looked(inputs, targets)
        back()
        for each in (self.patch, self.position, self.readout, *self.blocks):
            each.step()
        return seen

    def _looked(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Seen, Callable[[], None]]:
        inputs = np.asarray(inputs, self.dtype)
        if self.numbers.centred and not np.array_equal(inputs, self._inputs):
            self._inputs, self._reference = inputs, self._forward(inputs, initial=True)[0]
        logits, features, attention, back = self._forward(inputs)
        logits = logits - self._reference if self.numbers.centred else logits
        loss, dlogits = cross_entropy(logits, targets)
        return Seen(loss, logits, features, attention), lambda: back(dlogits.astype(self.dtype))

    def _forward(self, inputs: np.ndarray, *, initial: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray, Back]:
        """Logits before centring, features, `Seen.attention`, and what takes the logits' gradient to every parameter."""
        n, (examples, positions, size) = self.numbers, inputs.shape
        patch, position, readout = (
            each.start if initial else each.value for each in (self.patch, self.position, self.readout)
        )
        draws = len(patch)
        h = (inputs @ patch[:, None] + position[:, None]).reshape(draws, -1, n.width)
        attention, backs = [], []
        for block in self.blocks:
            h, of_block, back_block = block.forward(h, examples, initial=initial)
            attention.append(of_block)
            backs.append(back_block)
        h, back_norm = norm(h, n.eps, centred=n.centred_norm)
        pooled = h.reshape(draws, examples, positions, n.width).mean(-2)

        def back(dlogits: np.ndarray) -> None:
            self.readout.add(transposed(pooled) @ dlogits)
            dpooled = (dlogits @ transposed(readout))[..., None, :] / positions
            dh = back_norm(np.broadcast_to(dpooled, (draws, examples, positions, n.width)).reshape(h.shape))
            for back_block in reversed(backs):
                dh = back_block(dh)
            dh = dh.reshape(draws, examples, positions, n.width)
            self.position.add(dh.sum(1))
            self.patch.add(np.swapaxes(inputs.reshape(-1, size), 0, 1) @ dh.reshape(draws, -1, n.width))

        return pooled @ readout, pooled, np.stack(attention, -2), back
