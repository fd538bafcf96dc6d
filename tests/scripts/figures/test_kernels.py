"""The residual kernel of the infinite limit: closed cases, quadrature, and finite models."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mupax.presets import PresetError
from scripts.figures.initialization import attention_kernels, fig_cross, finite_kernels, kernels

PHI = {
    "relu": lambda z: np.maximum(z, 0),
    "gelu_exact": lambda z: z / 2 * (1 + np.vectorize(math.erf)(z / math.sqrt(2))),
    "gelu": lambda z: z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}


UNIFORM = {"depth": 2, "alpha_a": 1.0, "alpha_l": 1.0}
"""Two blocks of uniform attention."""


def patches(inputs: int = 2, positions: int = 3, size: int = 5) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((inputs, positions, size))


@pytest.mark.core
@pytest.mark.parametrize("name", PHI)
def test_activation_kernels_are_gaussian_averages(name: str):
    """Against a plain sum over a fine grid of two Gaussians."""
    grid = np.linspace(-8, 8, 801)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    for c in (-0.7, 0.0, 0.3, 0.95):
        partner = c * grid[:, None] + math.sqrt(1 - c * c) * grid
        expected = density * PHI[name](grid) @ PHI[name](partner) @ density
        np.testing.assert_allclose(
            kernels.activation_kernel(name)(np.array(c)), expected, rtol=2e-4
        )


@pytest.mark.core
def test_relu_is_the_arc_cosine_kernel():
    np.testing.assert_allclose(
        kernels.relu_kernel(np.array([1, 0, -1])), [1 / 2, 1 / (2 * math.pi), 0], atol=1e-15
    )
    angle = 1.1
    expected = (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / (2 * math.pi)
    np.testing.assert_allclose(kernels.relu_kernel(np.cos(angle)), expected, rtol=1e-14)


@pytest.mark.core
@pytest.mark.parametrize(("alpha_a", "head_dim"), [(1.0, None), (0.5, None), (1.0, 3), (0.5, 3)])
def test_one_position_has_a_closed_form(alpha_a: float, head_dim: int | None):
    """Softmax over one position is 1: every block adds eps^2 (1 + 1/2) with ReLU, whatever the heads."""
    first = kernels.input_kernel(patches(inputs=1, positions=1))
    for alpha_l in (0.5, 0.75, 1.0):
        recursion = kernels.residual_kernels(
            first,
            depth=7,
            alpha_a=alpha_a,
            alpha_l=alpha_l,
            beta0=3.0,
            head_dim=head_dim,
            activation="relu",
            samples=16,
        )
        expected = first[0, 0, 0, 0] + 1.5 * 9.0 * 7 ** (-2 * alpha_l) * np.arange(8)
        np.testing.assert_allclose(recursion.layers[:, 0, 0, 0, 0], expected, rtol=1e-12)
        np.testing.assert_allclose(recursion.sampling_error, 0, atol=1e-12)


@pytest.mark.core
def test_uniform_attention_by_hand():
    """Two positions with products 1 and c: all four means are (1 + c) / 2, and the MLP acts on the sum."""
    c = 0.4
    eps2 = 0.25
    first = np.array([[1.0, c], [c, 1.0]]).reshape(1, 2, 1, 2)
    layers = kernels.residual_kernels(first, **UNIFORM, activation="relu").layers
    kernel = layers[1].reshape(2, 2)
    diagonal = 1 + eps2 * (1 + c) / 2
    off_diagonal = c + eps2 * (1 + c) / 2
    phi = kernels.relu_kernel(np.array([1.0, off_diagonal / diagonal]))
    np.testing.assert_allclose(
        kernel,
        np.array([[diagonal, off_diagonal], [off_diagonal, diagonal]])
        + eps2 * phi[[[0, 1], [1, 0]]],
    )


def test_sampled_attention_tends_to_its_limits():
    bar = kernels.normalized(kernels.input_kernel(patches()))
    everything = np.ones((2, 3, 3), bool)

    def drawn(alpha_a: float, head_dim: int | None) -> np.ndarray:
        return attention_kernels.sampled(
            bar, bar, everything, alpha_a, head_dim, 20_000, np.random.default_rng(0)
        )

    gaussian = drawn(0.5, None)
    uniform = attention_kernels.uniform(bar, everything)
    room = 0.012  # five standard errors of 20,000 heads
    np.testing.assert_allclose(drawn(0.5, 32), gaussian, atol=room)
    np.testing.assert_allclose(drawn(1.0, 200), uniform, atol=room)
    assert abs(gaussian - uniform).max() > 10 * room, "the two limits are told apart"
    assert abs(drawn(1.0, 2) - uniform).max() > 5 * room, (
        "few dimensions per head are not the limit"
    )


def test_the_sampling_error_is_the_error():
    first = kernels.input_kernel(patches())
    rule = {"depth": 3, "alpha_a": 0.5, "alpha_l": 0.5, "beta0": 2.0}
    few = [kernels.residual_kernels(first, **rule, samples=800, seed=seed) for seed in range(6)]
    many = kernels.residual_kernels(first, **rule, samples=60_000).layers[-1]
    again = kernels.residual_kernels(first, **rule, samples=800, seed=3)
    np.testing.assert_array_equal(again.layers, few[3].layers)
    errors = [
        math.sqrt(((recursion.layers[-1] - many) ** 2).mean() / (many**2).mean())
        for recursion in few
    ]
    stated = np.mean([recursion.sampling_error[-1] for recursion in few])
    assert 0.6 < np.mean(errors) / stated < 1.7
    assert few[0].sampling_error[0] < 1e-12


def test_finite_models_follow_the_recursion_and_no_other():
    """Means of 12 small models at both ends of both exponents; the recursion of any other pair is far off."""
    settings = {"images": 2, "depth": 5, "beta0": 4.0, "samples": 1000, "seeds": 12}
    model_kernels = finite_kernels.finite(settings, 8, 16)
    limits = finite_kernels.limits(settings, 8)

    def distance(pair: int, partner: int) -> float:
        return math.sqrt(finite_kernels.products(model_kernels[[pair]], limits[[partner]]).mean())

    for pair in range(4):
        assert distance(pair, pair) < 0.11
        for partner in range(4):
            if finite_kernels.ENDS[pair][1] != finite_kernels.ENDS[partner][1]:
                assert distance(pair, partner) > 0.5


@pytest.mark.core
def test_masks_and_a_memory_by_hand():
    """Uniform attention of two positions with products 1 and c, causal, and to a memory."""
    c = 0.4
    m = 0.7
    eps2 = 0.25
    first, memory_kernel = (np.array([[1.0, x], [x, 1.0]]).reshape(1, 2, 1, 2) for x in (c, m))
    rule = {**UNIFORM, "activation": "relu", "mask": np.tri(2, dtype=bool)}
    mean = (1 + c) / 2
    causal = np.array([[1.0, mean], [mean, mean]])
    for mask, cross in (([[True, True]], (1 + m) / 2), ([[True, False]], 1.0)):
        memory = kernels.Memory(memory_kernel, np.array(mask))
        kernel = kernels.residual_kernels(first, **rule, memory=memory).layers[1].reshape(2, 2)
        before = first.reshape(2, 2) + eps2 * (causal + cross)
        size = np.sqrt(np.diag(before))
        np.testing.assert_allclose(
            kernel, before + eps2 * kernels.relu_kernel(before / np.outer(size, size))
        )


def test_sampled_attention_to_another_sequence_tends_to_its_limits_and_sees_no_padding():
    queries = kernels.normalized(kernels.input_kernel(patches()))
    keys = kernels.normalized(kernels.input_kernel(patches(positions=4)))
    mask = np.broadcast_to(
        np.array([[True, True, False, True], [True, False, False, False]])[:, None], (2, 3, 4)
    )

    def drawn(
        keys: np.ndarray, alpha_a: float, head_dim: int | None, mask: np.ndarray = mask
    ) -> np.ndarray:
        rng = np.random.default_rng(0)
        return attention_kernels.sampled(queries, keys, mask, alpha_a, head_dim, 10_000, rng)

    room = 0.018  # five standard errors of 10,000 heads
    np.testing.assert_allclose(drawn(keys, 0.5, 32), drawn(keys, 0.5, None), atol=room)
    np.testing.assert_allclose(
        drawn(keys, 1.0, 200), attention_kernels.uniform(keys, mask), atol=room
    )
    assert abs(drawn(keys, 0.5, None) - attention_kernels.uniform(keys, mask)).max() > 5 * room
    # One key that is seen is all that is attended to, whatever the padding beside it.
    np.testing.assert_allclose(drawn(keys, 0.5, None)[1, :, 1], 1.0, rtol=1e-9)
    assert abs(drawn(keys, 0.5, None, np.ones_like(mask))[1, :, 1] - 1).max() > 5 * room


def test_finite_encoder_decoders_follow_the_recursion_with_attention_to_the_encoder():
    """Means of 12 small models of the zoo; without the cross term, or causal masks, they are elsewhere."""
    settings = {
        "alpha_l": [0.5],
        "depth": 1,
        "encoder_depth": 2,
        "beta0": 1.0,
        "samples": 400,
        "seeds": 12,
    }
    model_kernels = fig_cross.finite(settings, alpha_a=1.0, head_dim=8, heads=16)

    def distance(wrong: str) -> float:
        limit = fig_cross.recursion(settings, alpha_a=1.0, alpha_l=0.5, head_dim=8, wrong=wrong)
        return math.sqrt(finite_kernels.products(model_kernels, limit[None]).mean())

    distances = [distance(wrong) for wrong in ("", *fig_cross.CONTROLS)]
    assert distances[0] < 0.08
    assert distances[1] > 0.5
    assert distances[2] > 0.1


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"activation": "swiglu"},
            "no kernel is known for the activation 'swiglu'; write gelu, gelu_exact, relu",
        ),
        ({"alpha_l": 0.4}, r"alpha_l=0.4 is outside \[0.5, 1\]"),
        ({"alpha_a": 1.2}, r"alpha_a=1.2 is outside \[0.5, 1\]"),
        ({"depth": 0}, "depth=0: write a whole number of at least 1"),
        (
            {"memory": kernels.Memory(np.ones((1, 3, 1, 3)), np.ones((2, 3), bool))},
            r"the memory has shapes \(1, 3, 1, 3\) with \(2, 3\) seen; write \[2, S, 2, S\] and \[2, S\]",
        ),
        (
            {"first": np.eye(3)},
            r"the first kernel has shape \(3, 3\); write one of shape \[X, S, X, S\]",
        ),
    ],
)
def test_errors_say_what_to_write(change: dict, text: str):
    arguments = {"first": kernels.input_kernel(patches()), **UNIFORM, **change}
    with pytest.raises(PresetError, match=text):
        kernels.residual_kernels(arguments.pop("first"), **arguments)
