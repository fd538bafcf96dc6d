"""A whole vision transformer of a width that no memory holds, trained exactly in law: SGD with momentum, centred output, any depth.

    h = x W_patch + position      h <- s h + b O attention(Q z, K z, V z),  h <- s h + b W_down phi(W_up z),  z = norm(h)
    f = mean over positions of norm(h) . W_readout - the same at the start

Square matrices are dice (`mupax.presets.infinite.dice`); patches, positions and readout have one finite side and are held whole.
With F = D = N H the network of width D has the law of a dense one, and is away from H to infinity as that one is: by H^-1/2.

D draws (networks side by side, on axis 0), B examples, T positions, R = B T, N head dimension, H heads, C classes, I numbers of a patch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mupax.presets.infinite.block import Block, LimitConfig
from mupax.presets.infinite.dice import Basis, transposed
from mupax.presets.infinite.layers import Back, cross_entropy, norm


@dataclasses.dataclass(frozen=True)
class Snapshot:
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


class Stack:
    """Some draws of a network with these numbers, and their training.

    Args:
        numbers: of model, preset and optimizer.
        positions: T.
        patch: numbers I of a patch.
        classes: C.
        draws: networks D.
        rng: where from.
        responses: see `LazyGaussian`.
        dtype: of all numbers; float32 halves memory and time.
    """

    def __init__(
        self,
        numbers: LimitConfig,
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

        self.patch, self.position = (
            dense("patch", patch, numbers.width),
            dense("position", positions, numbers.width),
        )
        self.readout = dense("readout", numbers.width, classes)

        def basis(size: int) -> Basis:
            return Basis(size, (draws,), dtype)

        self.blocks = [
            Block(numbers, layer, basis, rng, responses=responses) for layer in range(numbers.depth)
        ]
        self._inputs, self._reference = np.zeros(0), np.zeros(0)

    def look(self, inputs: np.ndarray, targets: np.ndarray) -> Snapshot:
        """What the network is on a batch.

        Args:
            inputs: patches [B, T, I].
            targets: classes [B].
        """
        return self._looked(inputs, targets)[0]

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> Snapshot:
        """The same, of the network as it is before the step on this batch that it then takes.

        Args:
            inputs, targets: as `look` takes them.
        """
        snapshot, back = self._looked(inputs, targets)
        back()
        for each in (self.patch, self.position, self.readout, *self.blocks):
            each.step()
        return snapshot

    def _looked(
        self, inputs: np.ndarray, targets: np.ndarray
    ) -> tuple[Snapshot, Callable[[], None]]:
        inputs = np.asarray(inputs, self.dtype)
        if self.numbers.centred and not np.array_equal(inputs, self._inputs):
            self._inputs, self._reference = inputs, self._forward(inputs, initial=True)[0]
        logits, features, attention, back = self._forward(inputs)
        logits = logits - self._reference if self.numbers.centred else logits
        loss, dlogits = cross_entropy(logits, targets)
        return Snapshot(loss, logits, features, attention), lambda: back(dlogits.astype(self.dtype))

    def _forward(
        self, inputs: np.ndarray, *, initial: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Back]:
        """Logits before centring, features, `Snapshot.attention`, and what takes the logits' gradient to every parameter."""
        n, (examples, positions, size) = self.numbers, inputs.shape
        patch, position, readout = (
            each.start if initial else each.value
            for each in (self.patch, self.position, self.readout)
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
            dh = back_norm(
                np.broadcast_to(dpooled, (draws, examples, positions, n.width)).reshape(h.shape)
            )
            for back_block in reversed(backs):
                dh = back_block(dh)
            dh = dh.reshape(draws, examples, positions, n.width)
            self.position.add(dh.sum(1))
            self.patch.add(
                np.swapaxes(inputs.reshape(-1, size), 0, 1) @ dh.reshape(draws, -1, n.width)
            )

        return pooled @ readout, pooled, np.stack(attention, -2), back
