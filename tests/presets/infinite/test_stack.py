"""Networks of dice have the law of networks of matrices, and reach a known limit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mupax.presets.infinite.block import BLOCK, LimitConfig
from mupax.presets.infinite.dice import Basis, LazyGaussian, Weight
from mupax.presets.infinite.stack import Stack
from tests.presets.infinite.samples import z_scores

pytestmark = pytest.mark.core

DRAWS = 200
STEPS = 4
IMAGES = 2


def numbers(
    *, head_dim: int = 4, heads: int = 8, depth: int = 1, rate: float = 0.5, gamma0: float = 0.5
) -> LimitConfig:
    """Return absolute `depth-mup`, alpha_A = alpha_L = beta0 = 1, with its rates times `rate`."""
    width = head_dim * heads
    in_block = {name: np.full(depth, width**-0.5) for name in BLOCK}
    rates = {name: np.full(depth, gamma0**2 * depth * rate) for name in BLOCK}
    ends = {
        "patch": width * gamma0**2 * rate,
        "position": width * gamma0**2 * rate,
        "readout": rate / width,
    }
    return LimitConfig(
        head_dim=head_dim, heads=heads, depth=depth, mlp=width, momentum=0.9, eps=1e-5, logit_scale=1 / head_dim,
        stds={**in_block, "patch": np.array(1.0), "position": np.array(1.0), "readout": np.array(1 / (gamma0 * width))},
        rates={**rates, **{name: np.array(x) for name, x in ends.items()}},
        skip=np.ones((depth, 2)), branch=np.full((depth, 2), 1 / depth),
    )  # fmt: skip


def outputs(seed: int, *, dense: bool = False, responses: bool = True) -> np.ndarray:
    """Return losses and a centred logit before each later step, [DRAWS, 2 (STEPS - 1)]."""
    rng = np.random.default_rng(seed)
    stack = Stack(
        numbers(), positions=3, patch=2, classes=3, rng=rng, draws=DRAWS, responses=responses
    )
    if dense:
        for block in stack.blocks:
            for weight in block.weights.values():
                weight.dice.matrix()
    inputs = np.random.default_rng(0).standard_normal((IMAGES, 3, 2))
    steps = [stack.step(inputs, np.array([0, 2])) for _ in range(STEPS)][1:]
    return np.stack([*(step.loss for step in steps), *(step.logits[:, 1, 2] for step in steps)], -1)


def test_dice_and_dense_networks_have_one_law_and_without_responses_another():
    dense = outputs(1, dense=True)
    assert z_scores(dense, outputs(2)).max() < 4
    assert z_scores(dense, outputs(3, responses=False)).max() > 10


def test_float32_is_the_same_path_to_its_rounding():
    small = dataclasses.replace(numbers(heads=64), momentum=0.0)
    losses = []
    for dtype in (np.float32, np.float64):
        stack = Stack(
            small, positions=3, patch=2, classes=3, rng=np.random.default_rng(0), dtype=dtype
        )
        inputs = np.random.default_rng(0).standard_normal((IMAGES, 3, 2))
        losses.append([stack.step(inputs, np.array([0, 2])).loss[0] for _ in range(3)])
        assert stack.blocks[0].weights["query"].dice.matrix().dtype == dtype
    assert losses[0][0] == pytest.approx(losses[1][0]) == pytest.approx(np.log(3))


@pytest.mark.parametrize(("responses", "expected"), [(True, 15.96), (False, 1.16)])
def test_a_deep_linear_net_after_one_step(responses: bool, expected: float):
    """The last kernel is 1 + e^2 L (L + 1) (2 L + 1) / 6, or 1 + L e^2 without responses."""
    depth = 16
    width = 4096
    draws = 24
    rate = 0.1
    rng = np.random.default_rng(4)
    weights = []
    for _ in range(depth - 1):
        sides = Basis(width, (draws,)), Basis(width, (draws,))
        weights.append(
            Weight(LazyGaussian(*sides, rng, responses=responses), width**-0.5, rate=0.0)
        )
    first, last = rng.standard_normal((2, draws, 1, width))
    h = [first]
    at = []
    for weight in weights:
        at.append(weight.dice.inputs.coordinates(h[-1]))
        h.append(weight.forward(at[-1]))
    g = last
    for weight, where in zip(reversed(weights), reversed(at), strict=True):
        g = weight.backward(g, where)
        weight.rate = -rate / width  # uphill: g is the gradient of the output
    x = first + rate * g
    for weight in weights:
        weight.step()
        x = weight.forward(weight.dice.inputs.coordinates(x))
    assert (x**2).mean() == pytest.approx(expected, rel=0.1)
