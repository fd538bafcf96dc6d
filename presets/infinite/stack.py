"""Vision transformer of a width that no memory holds, trained with the exact probability law.

Training is SGD with momentum at any depth, with a centred output:

    h = x W_patch + position
    h <- s h + b O attention(Q z, K z, V z),  h <- s h + b W_down phi(W_up z),  z = norm(h)
    f = mean over positions of norm(h) . W_readout - its value at the start

Matrices of blocks are lazy Gaussians (`mupax.presets.infinite.dice`). Patches, positions and
readout have one finite side, so all of their entries are held. With F = D = N H the network of
width D has the law of a dense network. Like a dense one, it differs from H = infinity by H^-1/2.

Shapes: D draws (networks side by side, on axis 0), B examples, T positions, R = B T, N head
dimension, H heads, C classes, I numbers of a patch.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from mupax.presets.infinite.block import Block, LimitConfig
from mupax.presets.infinite.dice import Basis, transposed
from mupax.presets.infinite.layers import Vjp, cross_entropy, norm


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Loss and activations of D networks on a batch, before a training step.

    Networks are side by side on axis 0. B is the number of examples, C of classes, L of blocks.

    Attributes:
        loss: Mean cross-entropy in nats, [D].
        logits: Logits, [D, B, C]. Those at initialization are subtracted if `LimitConfig.centred`.
        features: Inputs of the readout, [D, B, width].
        attention: Mean over heads of the squared attention logits, and square of the mean of the
            logits over heads. Both are means over examples and pairs of positions, [D, L, 2].
    """

    loss: np.ndarray
    logits: np.ndarray
    features: np.ndarray
    attention: np.ndarray


class _Forward(NamedTuple):
    """Result of a forward pass of D networks on B examples.

    Attributes:
        logits: Logits before those at initialization are subtracted, [D, B, C].
        features: Inputs of the readout, [D, B, width].
        attention: Statistics of the attention logits, [D, L, 2], as in `Snapshot`.
        vjp: Function that backpropagates the gradient of the logits. It keeps the gradients of all
            parameters for the next step.
    """

    logits: np.ndarray
    features: np.ndarray
    attention: np.ndarray
    vjp: Vjp


class Dense:
    """Trained matrix with a finite side, so that all of its entries can be held in memory.

    Args:
        value: Matrix at the start, [D, inputs, outputs], for D networks.
        momentum: Factor on the running sum of gradients at every step.
    """

    def __init__(self, value: np.ndarray, rate: float, momentum: float) -> None:
        self.start = value
        self.value = value
        self.rate = rate
        self.momentum = momentum
        self._sum = np.zeros_like(value)
        self._gradient = np.zeros_like(value)

    def add(self, gradient: np.ndarray) -> None:
        """Add a gradient to the sum that the next `step` uses."""
        self._gradient = self._gradient + gradient

    def step(self) -> None:
        """Take a heavy-ball step with the gradients since the last step, and clear them."""
        # Heavy ball without dampening, as `optax.trace` has it.
        self._sum = self.momentum * self._sum + self._gradient
        self.value = self.value - self.rate * self._sum
        self._gradient = np.zeros_like(self._gradient)


class Stack:
    """Very wide vision transformers, several side by side, trained by SGD with momentum.

    The networks are independent random draws with the same sizes.

    Args:
        patch: Size I of a flattened patch, the last axis of `inputs`.
        draws: Number D of networks, side by side on axis 0.
        responses: Whether products with a matrix and its transpose are consistent. `False` is a
            control (`LazyGaussian`).
        dtype: Type of all arrays. float32 halves memory and time.

    Attributes:
        patch, position, readout: Matrices with a finite side.
        blocks: Residual blocks in order.
    """

    def __init__(
        self,
        config: LimitConfig,
        *,
        positions: int,
        patch: int,
        classes: int,
        rng: np.random.Generator,
        draws: int = 1,
        responses: bool = True,
        dtype: type[np.floating] = np.float64,
    ) -> None:
        self.config = config
        self.dtype = dtype

        def dense(name: str, *shape: int) -> Dense:
            value = rng.standard_normal((draws, *shape), dtype) * dtype(config.stds[name])
            return Dense(value, float(config.rates[name]), config.momentum)

        def basis(size: int) -> Basis:
            return Basis(size, (draws,), dtype)

        # These three draw random numbers in this order: reordering the lines changes the initial
        # values.
        self.patch = dense("patch", patch, config.width)
        self.position = dense("position", positions, config.width)
        self.readout = dense("readout", config.width, classes)
        self.blocks = []
        for layer in range(config.depth):
            block = Block(config, layer, basis, rng, responses=responses)
            self.blocks.append(block)
        # Inputs of the last batch, and their logits at the start.
        self._inputs = np.zeros(0)
        self._reference = np.zeros(0)

    def look(self, inputs: np.ndarray, targets: np.ndarray) -> Snapshot:
        """Return the loss, logits, features and attention of the networks on a batch.

        No parameter is changed. Parts of the lazily drawn matrices that this batch is the first to
        need are drawn and kept.

        Args:
            inputs: Patches [B, T, I]: B examples, T positions, I numbers of a patch.
            targets: Classes [B].
        """
        snapshot, _, _ = self._evaluate(inputs, targets)
        return snapshot

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> Snapshot:
        """Take a training step on a batch, and return the snapshot from before this step.

        Args:
            inputs: Patches [B, T, I]: B examples, T positions, I numbers of a patch.
            targets: Classes [B].
        """
        snapshot, dlogits, vjp = self._evaluate(inputs, targets)
        vjp(dlogits.astype(self.dtype))
        for weights in (self.patch, self.position, self.readout, *self.blocks):
            weights.step()
        return snapshot

    def _evaluate(
        self, inputs: np.ndarray, targets: np.ndarray
    ) -> tuple[Snapshot, np.ndarray, Vjp]:
        """Return the snapshot of a batch, the gradient of the logits, and `_Forward.vjp`.

        The logits at initialization, which centred outputs subtract, are cached for a next call
        with the same inputs.
        """
        inputs = np.asarray(inputs, self.dtype)
        if self.config.centred and not np.array_equal(inputs, self._inputs):
            # Batches are often repeated, and the logits at the start cost a forward pass.
            self._inputs = inputs
            self._reference = self._forward(inputs, initial=True).logits
        forward = self._forward(inputs)
        logits = forward.logits
        if self.config.centred:
            logits = logits - self._reference
        loss, dlogits = cross_entropy(logits, targets)
        snapshot = Snapshot(loss, logits, forward.features, forward.attention)
        return snapshot, dlogits, forward.vjp

    def _forward(self, inputs: np.ndarray, *, initial: bool = False) -> _Forward:
        """Run the networks on a batch.

        Args:
            inputs: Patches [B, T, I]: B examples, T positions, I numbers of a patch.
            initial: Whether to use the parameters before training.
        """
        config = self.config
        examples, positions, size = inputs.shape
        patch = self.patch.value
        position = self.position.value
        readout = self.readout.value
        if initial:
            patch = self.patch.start
            position = self.position.start
            readout = self.readout.start
        draws = len(patch)

        h = (inputs @ patch[:, None] + position[:, None]).reshape(draws, -1, config.width)
        attention = []
        vjps = []
        for block in self.blocks:
            h, attention_of_block, block_vjp = block.forward(h, examples, initial=initial)
            attention.append(attention_of_block)
            vjps.append(block_vjp)
        h, norm_vjp = norm(h, config.eps, centred=config.centred_norm)
        features = h.reshape(draws, examples, positions, config.width).mean(-2)

        def vjp(dlogits: np.ndarray) -> None:
            self.readout.add(transposed(features) @ dlogits)
            # Features are a mean over positions, so each position has 1/T of their gradient.
            dfeatures = (dlogits @ transposed(readout))[..., None, :] / positions
            shape = (draws, examples, positions, config.width)
            dh = norm_vjp(np.broadcast_to(dfeatures, shape).reshape(h.shape))
            for block_vjp in reversed(vjps):
                dh = block_vjp(dh)
            dh = dh.reshape(shape)
            # One table of positions is added to every example.
            self.position.add(dh.sum(1))
            patches = inputs.reshape(-1, size)
            self.patch.add(np.swapaxes(patches, 0, 1) @ dh.reshape(draws, -1, config.width))

        return _Forward(features @ readout, features, np.stack(attention, -2), vjp)
