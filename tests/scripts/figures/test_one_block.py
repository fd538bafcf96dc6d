"""One block with infinitely many heads against finite nets, with and without responses."""

from __future__ import annotations

import numpy as np
import pytest

from mupax.presets.infinite import heads
from mupax.presets.infinite.heads import OneBlock, Trajectory
from scripts.figures.infinite import one_block

STEPS = 4
SEEDS = 64
INPUTS = np.random.default_rng(0).standard_normal((2, 3, 4))
TARGETS = np.array([1.0, -1.0])
KERNEL = np.einsum("psi,qti->psqt", INPUTS, INPUTS) / INPUTS.shape[-1]


def limit(block: OneBlock, *, responses: bool = True) -> Trajectory:
    return heads.train(
        block,
        KERNEL,
        TARGETS,
        steps=STEPS,
        heads=6000,
        rng=np.random.default_rng(1),
        responses=responses,
    )


@pytest.mark.parametrize(("head_dim", "alpha_a"), [(2, 0.5), (3, 1.0)])
def test_nets_come_to_the_limit_as_heads_are_added(head_dim: int, alpha_a: float) -> None:
    block = OneBlock(head_dim=head_dim, alpha_a=alpha_a, rate=0.5)
    expected = limit(block)
    wrong = limit(block, responses=False)
    errors = []
    for count in (12, 48):
        nets = one_block.train(
            block,
            INPUTS,
            TARGETS,
            steps=STEPS,
            heads=count,
            seeds=SEEDS,
            rng=np.random.default_rng(count),
        )
        errors.append(
            [
                ((x - y) ** 2).mean()
                for x, y in ((nets.outputs, expected.outputs), (nets.kernels, expected.kernels))
            ]
        )
    assert np.all(np.abs(np.log2(np.divide(*errors)) - 2) < 0.5)  # as 1/H over two octaves
    noise = nets.outputs[:, 1:].std(0) / SEEDS**0.5
    assert np.abs((nets.outputs.mean(0) - expected.outputs)[1:] / noise).max() < 4
    assert np.abs((nets.outputs.mean(0) - wrong.outputs)[1:] / noise).max() > 10
    np.testing.assert_allclose(nets.attention.mean(0), expected.attention, rtol=0.1, atol=0.05)


def test_at_the_start_the_limit_is_gaussian() -> None:
    start = limit(OneBlock(head_dim=4, alpha_a=0.5))
    assert not start.outputs[0].any()
    assert start.attention[0, 0] == pytest.approx(
        1, rel=0.05
    )  # Theta(1) logits, whose mean over heads is 0
    assert start.attention[0, 1] < 1e-3
