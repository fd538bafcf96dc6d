"""Muon's matrices are orthogonalized alike on every mesh, and no iteration communicates."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers, scale_by_muon

import mupax.train.core.muon as muon_module
from mupax.presets import ParamSpec, Role
from mupax.train.config.run import MeshConfig, OptimizerConfig, parse_rules
from mupax.train.core.muon import (
    ITERATIONS,
    NEWTON_SCHULZ,
    ORTHOGONALIZERS,
    POLAR_EXPRESS,
    Coefficients,
    hidden_matrices,
    muon,
    newton_schulz,
    orthogonalize,
    sides,
)
from mupax.train.parallel.sharding import MeshLayout, make_mesh
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.partition import ONE_DEVICE
from tests.fixtures.tiny import assert_same_bits

pytestmark = pytest.mark.core

# Three layers do not fill eight devices, and the MLP is wider than the model.
SCANNED = DecoderConfig(
    width=64, depth=3, num_heads=4, num_kv_heads=2, head_dim=16, mlp_ratio=2, vocab_size=32, seq_len=8,
    compute=ComputeConfig(layers="scan"),
)  # fmt: skip
MODELS = {
    "scanned": SCANNED,
    # Eight layers fill them: every parameter is a stack of its own.
    "eight layers": dataclasses.replace(SCANNED, depth=8),
    "experts": dataclasses.replace(SCANNED, experts=4, active_experts=2, expert_dim=32),
}
MESHES = {
    "fsdp 8": MeshConfig(fsdp=8, data=1),
    "data 2, fsdp 4": MeshConfig(data=2, fsdp=4),
    "fsdp 4, tensor 2": MeshConfig(fsdp=4, tensor=2, data=1),
    "data 2, fsdp 2, tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
}
COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")


@functools.cache
def specs_of(model: str) -> dict[str, ParamSpec]:
    return hidden_matrices(definition(MODELS[model]).specs)


def dimension_numbers(spec: ParamSpec) -> MuonDimensionNumbers:
    """Return the axes of a matrix's two sides as optax has them."""
    fan_in = tuple(spec.axes.index(axis) for axis in spec.fan_in)
    fan_out = tuple(spec.axes.index(axis) for axis in spec.fan_out)
    return MuonDimensionNumbers(fan_in, fan_out)


@functools.cache
def momenta(model: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    abstract = definition(MODELS[model]).abstract
    shapes = {name: abstract[name].shape for name in specs_of(model)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@functools.cache
def layout_of(mesh: MeshConfig, devices: int = 8) -> MeshLayout:
    return MeshLayout(make_mesh(mesh, jax.devices()[:devices]), parse_rules(mesh.rules))


def placed_momenta(model: str, layout: MeshLayout) -> dict[str, jax.Array]:
    specs = specs_of(model)
    return {
        name: jax.device_put(array, layout.sharding(specs[name].axes, array.shape))
        for name, array in momenta(model).items()
    }


@functools.cache
def lowered(model: str, layout: MeshLayout) -> Any:
    program = jax.jit(functools.partial(orthogonalize, specs=specs_of(model), layout=layout))
    return program.lower(placed_momenta(model, layout))


@functools.cache
def compiled(model: str, layout: MeshLayout) -> Any:
    return lowered(model, layout).compile()


def orthogonalized(model: str, layout: MeshLayout) -> dict[str, jax.Array]:
    placed = placed_momenta(model, layout)
    results = compiled(model, layout)(placed)
    for name, result in results.items():
        assert result.sharding.is_equivalent_to(placed[name].sharding, result.ndim), name
    return results


@functools.cache
def on_one_device(model: str) -> dict[str, np.ndarray]:
    return jax.device_get(orthogonalized(model, layout_of(MeshConfig(data=1), devices=1)))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_every_mesh_has_the_bits_of_one_device(model: str, mesh: str) -> None:
    results = orthogonalized(model, layout_of(MESHES[mesh]))
    assert_same_bits(results, on_one_device(model))


def test_experts_stay_on_their_devices() -> None:
    layout = layout_of(MeshConfig(fsdp=4, experts=2, data=1))
    assert_same_bits(orthogonalized("experts", layout), on_one_device("experts"))


def test_a_rule_of_the_users_own_may_split_the_inner_dimension_of_a_side() -> None:
    mesh = MeshConfig(fsdp=4, tensor=2, data=1, rules=("head_dim=tensor", "heads=none"))
    layout = layout_of(mesh)
    assert layout.sharding(("embed", "heads", "head_dim"), (64, 4, 16)).spec[2] == "tensor"
    results = compiled("scanned", layout)(placed_momenta("scanned", layout))
    assert_same_bits(results, on_one_device("scanned"))


@pytest.mark.parametrize("model", ["scanned", "experts"])
def test_one_device_agrees_with_optax(model: str) -> None:
    """optax transposes tall matrices, which rounds in another order."""
    specs = specs_of(model)
    numbers: Any = {name: dimension_numbers(spec) for name, spec in specs.items()}
    # Without momentum the direction is the orthogonalized gradient.
    tx = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=numbers)
    arrays: Any = momenta(model)
    expected: Any = jax.jit(tx.update)(arrays, tx.init(arrays))[0]
    for name, result in on_one_device(model).items():
        np.testing.assert_allclose(result, expected[name], atol=3e-6, err_msg=name)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    inside = u.T @ np.asarray(newton_schulz(jnp.asarray(x))) @ vt.T
    values = np.diag(inside)
    np.testing.assert_allclose(inside - np.diag(values), 0, atol=1e-4)
    assert (values > 0.3).all()
    assert (values < 1.3).all()


def matrix_with(values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return a matrix of a shape with these singular values and random singular vectors."""
    u, _, vt = np.linalg.svd(np.random.default_rng(2).standard_normal(shape), full_matrices=False)
    return (u * values) @ vt


def in_float64(x: np.ndarray, coefficients: Coefficients) -> np.ndarray:
    x = x / np.linalg.norm(x)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


SPECTRA = {
    "equal": np.ones(32),
    "to 1e-3": np.geomspace(1, 1e-3, 32),
    "to 1e-8": np.geomspace(1, 1e-8, 32),
    "rank 2": np.array([1.0, 0.5] + [0.0] * 30),
}


def error_of_gram(spectrum: str, name: str, shape: tuple[int, int]) -> float:
    """Return the spectral norm of the error of float32 by Gram matrices, relative to the result."""
    coefficients = ORTHOGONALIZERS[name]
    x = matrix_with(SPECTRA[spectrum], shape)
    result = newton_schulz(jnp.asarray(x, jnp.float32), coefficients, use_gram=True)
    expected = in_float64(x, coefficients)
    return float(np.linalg.norm(np.asarray(result) - expected, 2) / np.linalg.norm(expected, 2))


@pytest.mark.parametrize("shape", [(32, 80), (80, 32), (32, 64)])
@pytest.mark.parametrize("name", ORTHOGONALIZERS)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gram_matrices_give_the_same_iterations(
    spectrum: str, name: str, shape: tuple[int, int]
) -> None:
    assert error_of_gram(spectrum, name, shape) < 2e-4


@pytest.mark.parametrize("name", ORTHOGONALIZERS)
def test_control_without_a_restart_errors_of_gram_matrices_grow(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon_module, "_GRAM_RESTART", 5)
    assert error_of_gram("to 1e-8", name, (32, 80)) > 3e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(32, 80), (80, 32), (32, 40)])
def test_only_long_float32_matrices_are_iterated_by_gram_matrices(
    shape: tuple[int, int], dtype: str
) -> None:
    """Products with the long side are two per restart, not two per iteration."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    text = jax.jit(functools.partial(newton_schulz, use_gram=True)).lower(x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    long = [line for line in products if re.search(rf"\b{max(shape)}x|x{max(shape)}x", line)]
    assert len(long) == (4 if dtype == "float32" and max(shape) == 80 else 10)


def worst_deviation(coefficients: Coefficients, least: float) -> float:
    """Return the largest distance from 1 of singular values that began between `least` and 1."""
    values = np.geomspace(least, 1, 2001)
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return float(np.abs(values - 1).max())


@pytest.mark.parametrize("least", [1e-3, 1e-2, 0.1])
def test_polar_express_comes_nearer_to_one_than_newton_schulz_in_the_worst_case(
    least: float,
) -> None:
    assert len(POLAR_EXPRESS) == len(NEWTON_SCHULZ) == 5
    assert worst_deviation(POLAR_EXPRESS, least) < 0.16
    assert worst_deviation(NEWTON_SCHULZ, least) > 2 * worst_deviation(POLAR_EXPRESS, 0.1)


def test_a_config_names_the_coefficients() -> None:
    """The direction of a matrix whose singular values are 1 and 0.003 tells which were used."""
    matrix = np.diag([1.0, 0.003]).astype(np.float32)
    spec = ParamSpec(role=Role.HIDDEN, axes=("embed", "mlp"), fan_in=("embed",))
    for name, coefficients in ORTHOGONALIZERS.items():
        config = OptimizerConfig(name="muon", orthogonalizer=name)  # pyright: ignore[reportArgumentType]
        tx = muon(config, {"w": spec})
        params = {"w": jnp.asarray(matrix)}
        direction, _ = tx.update(params, tx.init(params), factors=None, hyper=None)
        expected = newton_schulz(jnp.asarray(matrix), coefficients)
        np.testing.assert_allclose(np.asarray(direction["w"]), np.asarray(expected), rtol=1e-3)


def test_zeros_stay_zeros() -> None:
    """A matrix that fills a stack, or whose gradient is zero, is no NaN."""
    assert not np.asarray(newton_schulz(jnp.zeros((4, 6)))).any()


def test_the_dtype_of_the_layout_is_the_one_that_is_exchanged() -> None:
    layout = MeshLayout(make_mesh(MESHES["fsdp 8"]))
    layout.matrix_dtype = jnp.bfloat16
    results = orthogonalized("scanned", layout)
    differs = False
    for name, expected in on_one_device("scanned").items():
        assert results[name].dtype == jnp.float32
        np.testing.assert_allclose(results[name], expected, atol=0.06, err_msg=name)
        differs |= not np.array_equal(results[name], expected)
    assert differs
    # A CPU's compiler would widen them again.
    exchanged = re.findall(
        r"stablehlo\.all_to_all.*-> tensor<[\dx]*x(\w+)>", lowered("scanned", layout).as_text()
    )
    assert set(exchanged) == {"bf16"}


# Collectives


def collectives_inside(text: str) -> list[str]:
    """Return the lines of collectives whose operation is part of the iterations."""
    return [
        line
        for line in text.splitlines()
        if f"{ITERATIONS}/" in line and any(f" {name}" in line for name in COLLECTIVES)
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_no_iteration_communicates(mesh: str) -> None:
    text = compiled("scanned", layout_of(MESHES[mesh])).as_text()
    assert f"{ITERATIONS}/" in text
    assert " all-to-all(" in text
    assert collectives_inside(text) == []


def test_control_iterations_on_split_matrices_communicate() -> None:
    layout = layout_of(MESHES["fsdp 8"])
    sharding = layout.sharding(("embed", None), (64, 32))
    shape = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)
    text = jax.jit(newton_schulz).lower(shape).compile().as_text() or ""
    assert collectives_inside(text)


# Sides and shares


def test_the_side_that_fsdp_splits_comes_first_whichever_is_larger() -> None:
    layout = layout_of(MESHES["fsdp 8"])
    specs = specs_of("scanned")
    for name, spec in specs.items():
        dimensions = sides(spec, layout)
        assert spec.axes[dimensions.s[0]] == "embed", name
        assert [spec.axes[i] for i in dimensions.stack] == ["layers"], name
    # Without rules the fan-in comes first.
    for spec in specs.values():
        first = sides(spec, ONE_DEVICE).s
        assert tuple(spec.axes[i] for i in first) == tuple(spec.fan_in)
