"""Matrices revealed as they are used have the law of matrices drawn at the start."""

from __future__ import annotations

import numpy as np
import pytest

from mupax.presets.infinite.dice import Basis, LazyGaussian, Weight, transposed
from tests.presets.infinite.samples import z_scores

pytestmark = pytest.mark.core

OUT = 7
IN = 5


def play(
    rng: np.random.Generator, draws: int, *, dense: bool, responses: bool = True
) -> np.ndarray:
    """Return statistics [draws, 6] of an adaptive game: a vector is made of the last answer."""
    if dense:
        w = rng.standard_normal((draws, OUT, IN))

        def forward(x: np.ndarray) -> np.ndarray:
            return x @ transposed(w)

        def backward(y: np.ndarray) -> np.ndarray:
            return y @ w
    else:
        inputs = Basis(IN, (draws,))
        outputs = Basis(OUT, (draws,))
        dice = LazyGaussian(inputs, outputs, rng, responses=responses)

        def forward(x: np.ndarray) -> np.ndarray:
            return dice.forward(inputs.coordinates(x))

        def backward(y: np.ndarray) -> np.ndarray:
            return dice.backward(outputs.coordinates(y))

    x = np.broadcast_to(np.linspace(1, 2, IN), (draws, 1, IN))
    y = forward(x)
    g = backward(np.tanh(y))
    z = forward(np.concatenate([g, x * g], axis=-2))
    b = backward(np.sin(z))
    columns = [(y**2).mean((-1, -2)), (x * g).sum((-1, -2)), (g**2).mean((-1, -2)), (y[:, 0] * z[:, 0]).sum(-1),
               (z**2).mean((-1, -2)), (g[:, 0] * b[:, 1]).sum(-1)]  # fmt: skip
    return np.stack(columns, -1)


def test_what_was_revealed_is_of_the_matrix_that_is_revealed_at_last():
    rng = np.random.default_rng(0)
    draws = 11
    inputs = Basis(IN, (draws,))
    outputs = Basis(OUT, (draws,))
    dice = LazyGaussian(inputs, outputs, rng)
    products = []
    x = rng.standard_normal((draws, 2, IN))
    for _ in range(4):  # more than there are directions
        y = dice.forward(inputs.coordinates(x))
        g = dice.backward(outputs.coordinates(y))
        products.append((x, y, g))
        x = np.tanh(g)
    w = dice.matrix()
    assert w.shape == (draws, OUT, IN)
    assert len(inputs) == IN
    for x, y, g in products:
        np.testing.assert_allclose(x @ transposed(w), y, atol=1e-8)
        np.testing.assert_allclose(y @ w, g, atol=1e-8 * np.abs(y).max())


def test_directions_are_orthonormal_and_grow_by_what_they_lack():
    rng = np.random.default_rng(1)
    basis = Basis(31, (3,))
    x = rng.standard_normal((3, 4, 31))
    for added, vectors in (
        (4, x),
        (0, 2 * x),
        (1, x + 1e-7 * rng.standard_normal((3, 1, 31))),
        (26, rng.standard_normal((3, 40, 31))),
    ):
        before = len(basis)
        coordinates = basis.coordinates(vectors)
        assert len(basis) - before == added
        np.testing.assert_allclose(coordinates @ basis.rows, vectors, atol=1e-12)
        np.testing.assert_allclose(
            basis.rows @ transposed(basis.rows),
            np.eye(len(basis)) + np.zeros((3, 1, 1)),
            atol=1e-12,
        )


def test_entries_have_the_moments_of_a_gaussian_matrix_after_an_adaptive_game():
    rng = np.random.default_rng(2)
    draws = 20_000
    inputs = Basis(3, (draws,))
    outputs = Basis(4, (draws,))
    dice = LazyGaussian(inputs, outputs, rng)
    y = dice.forward(inputs.coordinates(np.ones((draws, 1, 3))))
    dice.forward(inputs.coordinates(dice.backward(outputs.coordinates(np.abs(y)))))
    w = dice.matrix().reshape(draws, -1)
    noise = 5 / np.sqrt(draws)
    assert np.abs(w.mean(0)).max() < noise
    assert np.abs(np.cov(w.T) - np.eye(12)).max() < noise * np.sqrt(2)
    assert np.abs((w**4).mean(0) - 3).max() < noise * np.sqrt(96)


def test_adaptive_play_has_the_dense_law_and_without_responses_it_has_not():
    draws = 20_000
    dense = play(np.random.default_rng(3), draws, dense=True)
    assert z_scores(dense, play(np.random.default_rng(4), draws, dense=False)).max() < 4
    assert (
        z_scores(dense, play(np.random.default_rng(5), draws, dense=False, responses=False)).max()
        > 20
    )


def test_several_matrices_share_the_directions_of_their_inputs():
    rng = np.random.default_rng(6)
    inputs = Basis(IN)
    matrices = [LazyGaussian(inputs, Basis(OUT), rng) for _ in range(2)]
    coordinates = inputs.coordinates(np.ones((1, IN)))
    images = [dice.forward(coordinates) for dice in matrices]
    for dice, image in zip(matrices, images, strict=True):
        dice.backward(dice.outputs.coordinates(image))
        np.testing.assert_allclose(dice.matrix() @ np.ones(IN), image[0], atol=1e-12)
    assert np.abs(matrices[0].matrix() - matrices[1].matrix()).max() > 0.1


def test_a_trained_matrix_moves_as_a_dense_one():
    rng = np.random.default_rng(7)
    inputs = Basis(IN)
    outputs = Basis(OUT)
    weight = Weight(LazyGaussian(inputs, outputs, rng), std=0.5, rate=0.1, momentum=0.9)
    moves = []
    for _ in range(4):
        x = rng.standard_normal((2, IN))
        g = rng.standard_normal((2, OUT))
        coordinates = inputs.coordinates(x)
        y = weight.forward(coordinates)
        dx = weight.backward(g, coordinates)
        weight.step()
        moves.append((x, g, y, dx, weight.forward(coordinates, initial=True)))
    start = 0.5 * weight.dice.matrix()
    w = start.copy()
    total = np.zeros_like(start)
    for x, g, y, dx, y_start in moves:
        np.testing.assert_allclose(x @ w.T, y, atol=1e-10)
        np.testing.assert_allclose(g @ w, dx, atol=1e-10)
        np.testing.assert_allclose(x @ start.T, y_start, atol=1e-10)
        total = 0.9 * total + g.T @ x
        w -= 0.1 * total
