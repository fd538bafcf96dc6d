"""Arithmetic of the limit: from the same matrices, the zoo's model takes the same path."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.presets.infinite.block import BLOCK
from mupax.presets.infinite.dice import transposed
from mupax.presets.infinite.stack import Stack
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.core.program import assemble
from mupax.train.studies.infinite import command
from mupax.zoo.configs import ConfigError

IMAGES, STEPS = 3, 4


def config(**changes: object) -> Config:
    """The paper's run at H = 3, N = 2, L = 2 on images of 4 patches."""
    run = RECIPES["bordelon-vit"]()
    model = dataclasses.replace(
        run.model,
        width=6,
        num_heads=3,
        depth=2,
        image_size=4,
        patch_size=2,
        channels=1,
        norm_eps=1e-5,
        mlp_ratio=2.0,
    )
    data = dataclasses.replace(run.data, name="shapes", batch_size=IMAGES, eval_batch_size=IMAGES)
    return dataclasses.replace(run, model=model, data=data, steps=STEPS, **changes)


def test_a_step_of_the_limit_is_our_own_step() -> None:
    run = config()
    rng = np.random.default_rng(0)
    images = rng.standard_normal((IMAGES, 4, 4, 1)).astype(np.float32)
    targets = np.array([1, 7, 7], np.int32)
    stack = Stack(command.numbers(run), positions=4, patch=4, classes=10, rng=rng)
    limit_steps = [stack.step(command.patches(images, 2), targets) for _ in range(STEPS)]

    program = assemble(run, jax.devices()[:1])
    params = {
        name: np.zeros(leaf.shape, np.float32) for name, leaf in program.abstract.params.items()
    }
    for name in ("patch", "position", "readout"):
        params[name][:] = getattr(stack, name).start[0]
    for layer, block in enumerate(stack.blocks):
        for name in BLOCK:
            weight = block.weights[name]
            start = transposed(weight.std * weight.dice.matrix()[0])  # [in, out]
            params[command.PATHS[name]][layer] = start.reshape(
                params[command.PATHS[name]].shape[1:]
            )
    multiplier = program.inputs.factors.multiplier
    params = {
        n: jnp.asarray(
            w / multiplier[n].reshape(-1, *[1] * (w.ndim - 1))
            if multiplier[n].ndim
            else w / multiplier[n]
        )
        for n, w in params.items()
    }
    state, step = program.initial_state(), program.compile_train()
    state = state._replace(
        params=jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, state.params))
    )
    inputs = program.step_inputs()._replace(
        reference={name: jnp.array(w) for name, w in state.params.items()}
    )
    batch = {
        "inputs": jnp.asarray(images),
        "targets": jnp.asarray(targets),
        "weights": jnp.ones(IMAGES),
    }
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, inputs, batch)
        losses.append(float(metrics["loss"]))
    limit = np.array([one.loss[0] for one in limit_steps])
    assert limit[0] == pytest.approx(np.log(10))
    assert abs(limit[-1] - limit[0]) > 0.05
    np.testing.assert_allclose(losses, limit, rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adam"}, "acts on every entry alone"),
        ({"model": {"bias": True}}, "model.bias is True; .*--model.bias False"),
        ({"model": {"activation": "swiglu"}}, "has gelu and relu"),
    ],
)
def test_what_has_no_limit_here_is_said(changes: dict, words: str) -> None:
    run = config()
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, **changes.get("model", {})),
        optimizer=dataclasses.replace(run.optimizer, name=changes.get("optimizer", "sgd")),
    )
    with pytest.raises(ConfigError, match=words):
        command.numbers(run)


def test_more_directions_than_are_worth_recording_are_refused_with_what_fits() -> None:
    run = command.with_heads(config(), 80)
    assert command.check_rank(run, 2) == (STEPS + 1) * 2 * 4
    with pytest.raises(ConfigError, match=re.escape("60 directions")) as refused:
        command.check_rank(run, 3)
    assert "--heads 120, or --steps 2, or --images 2" in str(refused.value)
