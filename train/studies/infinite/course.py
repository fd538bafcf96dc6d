"""What training on one batch does to the infinite model, and to finite ones of our own step, in the same terms.

Z networks, S steps (before each and after the last: S + 1), B examples, C classes, L layers, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mupax.presets.infinite.layers import cross_entropy
from mupax.presets.infinite.stack import Stack
from mupax.train import data
from mupax.train.config.run import Config
from mupax.train.studies.infinite.setup import numbers, patches, with_heads


@dataclasses.dataclass(frozen=True)
class Course:
    """Networks in training.

    Attributes:
        losses: nats, [Z, S + 1].
        logits: centred, [Z, S + 1, B, C].
        memory: C(t, s), of the features that the readout reads at two steps, mean over examples, [Z, S + 1, S + 1].
        kernels: of those features at two examples, [Z, S + 1, B, B].
        attention: as `mupax.presets.infinite.stack.Snapshot`, [Z, S + 1, L, 2]; empty for finite models.
    """

    losses: np.ndarray
    logits: np.ndarray
    memory: np.ndarray
    kernels: np.ndarray
    attention: np.ndarray

    @staticmethod
    def of(networks: Sequence[tuple[Any, Any, Any]], targets: np.ndarray) -> Course:
        """From logits [S + 1, B, C], features [S + 1, B, D] and attention of each network.

        Args:
            networks: Z of them.
            targets: [B].
        """
        logits, memory, kernels = [], [], []
        for outputs, features, _ in networks:
            x = np.asarray(features, np.float64)
            logits.append(np.asarray(outputs, np.float64))
            memory.append(np.einsum("tbd,sbd->ts", x, x, optimize=True) / (x.shape[1] * x.shape[2]))
            kernels.append(x @ x.swapaxes(1, 2) / x.shape[2])
        attention = np.array([one[2] for one in networks])
        outputs = np.array(logits)
        return Course(cross_entropy(outputs, targets)[0], outputs, np.array(memory), np.array(kernels), attention)


def examples(config: Config, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and classes of the first `count` training examples of a run.

    Args:
        config: whose data.
        count: B.
    """
    source = dataclasses.replace(config.data, batch_size=count)
    batch = data.load(source, config.model, seed=config.data_seed, note=lambda line: None).train_batch(0)
    return np.asarray(batch["inputs"]), np.asarray(batch["targets"])


def limit(
    config: Config,
    images: np.ndarray,
    targets: np.ndarray,
    *,
    heads: int,
    draws: int,
    seed: int = 0,
    responses: bool = True,
    dtype: type[np.floating] = np.float32,
) -> Course:
    """The infinite model on one batch at every step: networks of a width that stands for it, exact in law.

    Args:
        config: whose model at any number of heads, preset, optimizer and steps.
        images: [B, height, width, channels].
        targets: [B].
        heads: that stand for infinitely many.
        draws: independent networks Z, one after another.
        seed: of them.
        responses: see `mupax.presets.infinite.dice.Dice`.
        dtype: of the numbers.
    """
    wide = with_heads(config, heads)
    model: Any = wide.model
    of_run, inputs = numbers(wide), patches(images, model.patch_size)
    networks = []
    for rng in np.random.default_rng(seed).spawn(draws):
        shape = {"positions": inputs.shape[1], "patch": inputs.shape[2], "classes": model.num_classes}
        stack = Stack(of_run, **shape, rng=rng, responses=responses, dtype=dtype)
        snapshots = [stack.step(inputs, targets) for _ in range(config.steps)] + [stack.look(inputs, targets)]
        networks.append(
            tuple(np.concatenate([getattr(one, x) for one in snapshots]) for x in ("logits", "features", "attention"))
        )
    return Course.of(networks, targets)


def finite(config: Config, images: np.ndarray, targets: np.ndarray, *, seeds: int) -> Course:
    """The run's own model, trained by our own step on the same batch, from several seeds.

    Args:
        config: the run, its data apart.
        images: [B, height, width, channels].
        targets: [B].
        seeds: Z.
    """
    import jax
    import jax.numpy as jnp

    from mupax.train.core.program import assemble

    count = len(targets)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=count, eval_batch_size=count))
    program = assemble(config, jax.devices()[:1])
    step, definition = program.compile_train(), program.definition
    batch = {"inputs": jnp.asarray(images), "targets": jnp.asarray(targets, jnp.int32), "weights": jnp.ones(count)}

    @jax.jit
    def look(params: Any, run: Any) -> tuple[jax.Array, jax.Array]:
        readings = [
            definition.model(weights, run.factors.multiplier, run.factors.forward).reading(batch["inputs"])
            for weights in (params, run.reference)
            if weights is not None
        ]
        logits = readings[0].logits() - (readings[1].logits() if readings[1:] else 0.0)
        return logits, readings[0].features

    networks = []
    for seed in range(seeds):
        of_seed = dataclasses.replace(program, config=dataclasses.replace(config, seed=seed))
        run, state = of_seed.step_inputs(), of_seed.placed(of_seed.initial_state(), step)
        outputs = [look(state.params, run)]
        for _ in range(config.steps):
            state, _ = step(state, run, batch)
            outputs.append(look(state.params, run))
        networks.append((*(np.stack(jax.device_get(x)) for x in zip(*outputs, strict=True)), np.zeros(0)))
    return Course.of(networks, targets)
