"""Training loop of the examples with models of other libraries: data, loss and steps with optax."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax

from mupax import train
from mupax.train.data.images import read_digits

VOCAB = 128
"""Number of tokens: ASCII."""
LENGTH = 32
"""Number of positions."""


def text(steps: int, batch: int = 16) -> dict[str, np.ndarray]:
    """Return batches of the standard library's sources: inputs and targets [steps, B, 32]."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    data = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(data) - LENGTH - 1, (steps, batch, 1))
    windows = np.minimum(data[starts + np.arange(LENGTH + 1)], VOCAB - 1).astype(np.int32)
    return {"inputs": windows[..., :-1], "targets": windows[..., 1:]}


def digits(steps: int, batch: int = 32) -> dict[str, np.ndarray]:
    """Return batches of digits: images [steps, B, 8, 8, 1] from -1 to 1, labels [steps, B]."""
    data = read_digits()
    rows = np.random.default_rng(0).integers(0, len(data.labels), (steps, batch))
    images = (data.pixels / 8 - 1).astype(np.float32)[..., None]
    return {"inputs": images[rows], "targets": data.labels[rows].astype(np.int32)}


def losses(
    model: train.Parameterization,
    tx: optax.GradientTransformation,
    data: dict[str, np.ndarray],
    seed: int | jax.Array,
) -> jax.Array:
    """Train on all batches, and return the loss of each before its step, [steps] in nats.

    Args:
        tx: optax transformation, which has the learning rate in it.
        data: Inputs and targets with a leading axis of steps.
    """

    def step(carry: tuple, batch: dict[str, jax.Array]) -> tuple[tuple, jax.Array]:
        def loss_of(params: optax.Params) -> jax.Array:
            logits = model.apply(params, batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    params = model.init(seed)
    _, step_losses = jax.lax.scan(step, (params, tx.init(params)), data)
    return step_losses


def report(run: Callable[..., jax.Array], title: str, lr: float, seed: int) -> None:
    """Train, and print the first loss and the mean loss of the last fifth of the steps.

    Args:
        run: function of learning rate and seed that returns losses [steps].
    """
    measured = jax.jit(run)(lr, seed)
    last = measured[-max(1, len(measured) // 5) :].mean()
    print(f"{title} at {lr:g}: {measured[0]:.3f} to {last:.3f} nats")
