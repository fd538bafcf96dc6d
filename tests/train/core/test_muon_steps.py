"""Muon's choices of a preset: blocks that are orthogonalized apart, and norms that are measured."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mupax import presets, train
from mupax.presets import ParamSpec, PresetError, Role
from mupax.presets.preset import MatrixSteps, MuonRule
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, MeshConfig, OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.muon import (
    NEWTON_SCHULZ,
    POWER_ITERATIONS,
    WARMUP_ITERATIONS,
    WARMUP_STEPS,
    first_vector,
    hidden_matrices,
    matrix_steps,
    muon,
    newton_schulz,
    orthogonalize,
    spectral_norm,
)
from mupax.train.core.program import assemble
from mupax.train.parallel.sharding import MeshLayout
from mupax.train.reuse import runs
from mupax.train.studies.sweep.sweep import shape_of
from mupax.zoo.definition import definition
from mupax.zoo.partition import ONE_DEVICE
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.train.core.test_muon import (
    COLLECTIVES,
    MESHES,
    MODELS,
    dimension_numbers,
    layout_of,
    momenta,
    placed_momenta,
    specs_of,
)

__all__ = ["one_device", "shared_programs"]  # fixtures

pytestmark = pytest.mark.core

TILES = {
    "embed": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp": 64, "expert_dim": 16, "layers": 1
}  # fmt: skip


def steps_of(model: str, **choices: Any) -> MatrixSteps:
    base = {"vocab": 32, "experts": 4, "active": 2, "position": 8, **TILES}
    preset = presets.get("mup", base=base, **choices)
    return preset.matrix_steps(specs_of(model), MODELS[model].sizes(), "muon")


COEFFICIENTS = NEWTON_SCHULZ[:3]
"""Compile faster than all five. The last one comes after the restart of Gram matrices."""
CHOICES: Mapping[str, dict[str, Any]] = {
    "whole": {},
    "measured": {"muon_scale": "measured"},
    "heads": {"muon_blocks": "heads"},
    "tiles": {"muon_blocks": "tiles"},
    "measured heads": {"muon_scale": "measured", "muon_blocks": "heads"},
}
MESH_CONFIGS = {
    **MESHES,
    "one": MeshConfig(data=1),
    "fsdp 4, experts 2": MeshConfig(fsdp=4, experts=2, data=1),
}


def vectors_of(model: str, steps: MatrixSteps) -> Any:
    if not steps.measured:
        return None
    specs = specs_of(model)
    sizes = MODELS[model].sizes()
    state: Any = muon(OptimizerConfig(name="muon"), specs, steps).init(momenta(model))
    for name, spec in specs.items():
        assert state.vectors[name].size < np.prod([sizes[axis] for axis in spec.axes])
    return state.vectors


@functools.cache
def mesh_layout(mesh: str) -> MeshLayout:
    return layout_of(MESH_CONFIGS[mesh], devices=1 if mesh == "one" else 8)


@functools.cache
def lowered(model: str, mesh: str, choice: str) -> Any:
    steps = steps_of(model, **CHOICES[choice])

    def apply(arrays: Any, vectors: Any) -> Any:
        return matrix_steps(
            arrays, specs_of(model), layout=mesh_layout(mesh), coefficients=COEFFICIENTS,
            blocks=steps.blocks, vectors=vectors,
            num_iterations=jnp.int32(40) if steps.measured else None,
        )  # fmt: skip

    return jax.jit(apply).lower(placed_momenta(model, mesh_layout(mesh)), vectors_of(model, steps))


@functools.cache
def compiled(model: str, mesh: str, choice: str) -> Any:
    return lowered(model, mesh, choice).compile()


@functools.cache
def applied(
    model: str, mesh: str, choice: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]:
    """Return the steps of all matrices and the next vectors, on a mesh."""
    placed = placed_momenta(model, mesh_layout(mesh))
    vectors = vectors_of(model, steps_of(model, **CHOICES[choice]))
    results, new_vectors = compiled(model, mesh, choice)(placed, vectors)
    for name, result in results.items():
        assert result.sharding.is_equivalent_to(placed[name].sharding, result.ndim), name
    return jax.device_get((results, new_vectors))


@pytest.mark.parametrize(
    ("choice", "model", "mesh"),
    [
        ("measured", "scanned", "fsdp 8"),
        ("measured", "eight layers", "fsdp 4, tensor 2"),
        ("measured heads", "scanned", "data 2, fsdp 2, tensor 2"),
        ("measured heads", "experts", "data 2, fsdp 4"),
        ("tiles", "experts", "data 2, fsdp 4"),
        # Experts keep their vectors on their devices.
        ("measured heads", "experts", "fsdp 4, experts 2"),
    ],
)
def test_every_mesh_has_the_bits_of_one_device(model: str, mesh: str, choice: str) -> None:
    results = jax.tree.leaves(applied(model, mesh, choice))
    expected = jax.tree.leaves(applied(model, "one", choice))
    for result, of_one_device in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, of_one_device)


# Blocks


by_newton_schulz = jax.jit(functools.partial(newton_schulz, coefficients=COEFFICIENTS))


def matrices_of(array: np.ndarray, spec: ParamSpec) -> tuple[np.ndarray, list[int]]:
    """Return an array as a stack of fan-in by fan-out matrices, and the order of its axes there."""
    numbers: Any = dimension_numbers(spec)
    sides = [*numbers.reduction_axis, *numbers.output_axis]
    stack = [i for i in range(array.ndim) if i not in sides]
    order = [*stack, *sides]
    rows = math.prod(array.shape[i] for i in numbers.reduction_axis)
    count = math.prod(array.shape[i] for i in stack)
    return array.transpose(order).reshape(count, rows, -1), order


def blocks_by_hand(array: np.ndarray, spec: ParamSpec, block: tuple[int, ...]) -> np.ndarray:
    """Return an array whose blocks are orthogonalized one after another."""
    result = np.zeros_like(array)
    counts = [size // length for size, length in zip(array.shape, block, strict=True)]
    for index in np.ndindex(*counts):
        where = tuple(
            slice(i * length, (i + 1) * length) for i, length in zip(index, block, strict=True)
        )
        (matrix,), order = matrices_of(array[where], spec)
        shape = [block[i] for i in order]
        orthogonal = np.asarray(by_newton_schulz(matrix)).reshape(shape)
        result[where] = orthogonal.transpose(np.argsort(order))
    return result


@pytest.mark.parametrize(
    ("model", "choice"), [("scanned", "heads"), ("scanned", "tiles"), ("experts", "tiles")]
)
def test_each_block_is_orthogonalized_apart(model: str, choice: str) -> None:
    steps = steps_of(model, **CHOICES[choice])
    whole, _ = applied(model, "one", "whole")
    results, vectors = applied(model, "one", choice)
    assert vectors is None
    for name, spec in specs_of(model).items():
        if name not in steps.blocks:
            np.testing.assert_array_equal(results[name], whole[name], err_msg=name)
            continue
        expected = blocks_by_hand(momenta(model)[name], spec, steps.blocks[name])
        np.testing.assert_allclose(results[name], expected, atol=2e-6, err_msg=name)
        assert np.abs(results[name] - whole[name]).max() > 0.01, name


def test_heads_are_those_of_the_attention_matrices_and_tiles_those_of_all() -> None:
    heads = steps_of("scanned", muon_blocks="heads").blocks
    assert {name.rpartition(".")[2] for name in heads} == {"query", "key", "value", "out"}
    assert {block for name, block in heads.items() if name.endswith("query")} == {(1, 64, 1, 16)}
    tiles = steps_of("scanned", muon_blocks="tiles").blocks
    assert set(tiles) == set(specs_of("scanned"))
    assert {block for name, block in tiles.items() if name.endswith("key")} == {(1, 32, 1, 16)}
    assert {block for name, block in tiles.items() if name.endswith("down")} == {(1, 64, 32)}


@pytest.mark.parametrize("blocks", ["heads", "tiles"])
@pytest.mark.parametrize("role", ["query", "out"])
def test_blocks_of_a_rank_one_gradient_add_up_as_the_theory_says(blocks: str, role: str) -> None:
    """One input direction and one output direction: the norm of the step is the root of the blocks."""
    rule = MuonRule(blocks=blocks)  # pyright: ignore[reportArgumentType]
    name, spec = next(
        (name, spec) for name, spec in specs_of("scanned").items() if name.endswith(role)
    )
    rng = np.random.default_rng(0)
    norms = []
    ratios = (1, 2, 4)
    for m in ratios:
        sizes = {"layers": 1, "embed": 16 * m, "heads": 2 * m, "head_dim": 8}
        shape = tuple(sizes[axis] for axis in spec.axes)
        fan_in = int(np.prod([sizes[axis] for axis in spec.fan_in]))
        fan_out = int(np.prod([sizes[axis] for axis in spec.fan_out]))
        # Directions that are spread evenly over the entries, as those of a network are.
        signs = [rng.choice([-1.0, 1.0], size) for size in (fan_in, fan_out)]
        matrix = np.outer(*signs).astype(np.float32)
        block = rule.block(spec, sizes, {"embed": 16, "heads": 2, "head_dim": 8}.__getitem__)
        assert block is not None
        # Of rank one, so that Newton-Schulz acts on one singular value, which begins at 1.
        orthogonalize_blocks = functools.partial(
            orthogonalize, specs={name: spec}, layout=ONE_DEVICE, blocks={name: block}
        )
        step = jax.jit(orthogonalize_blocks)({name: matrix.reshape(shape)})[name]
        norms.append(np.linalg.norm(np.asarray(step).reshape(fan_in, fan_out), ord=2))
    growth = {"embed": 1.0, "heads": 1.0}
    exponent = rule.coherence(spec).growth(growth)
    assert exponent == {"heads": 0.5, "tiles": 1.0}[blocks]
    np.testing.assert_allclose(norms, [norms[0] * m**exponent for m in ratios], rtol=1e-4)
    # With the factor of the rule the norm stays, and without it it does not.
    assert rule.lr(spec).growth(growth) == -exponent


# Measured norms


def worst_deviation(model: str, arrays: Mapping[str, np.ndarray]) -> float:
    """Return the largest distance from 1 of the spectral norm of any matrix."""
    worst = 0.0
    for name, spec in specs_of(model).items():
        norms = np.linalg.norm(matrices_of(arrays[name], spec)[0], ord=2, axis=(1, 2))
        worst = max(worst, np.abs(norms - 1).max())
    return worst


@pytest.mark.parametrize("model", ["scanned", "experts"])
def test_each_matrix_of_a_stack_has_spectral_norm_one(model: str) -> None:
    """Blocks alone do not have it: heads add up, and Newton-Schulz leaves 0.7 to 1.2."""
    deviation = worst_deviation(model, applied(model, "one", "measured heads")[0])
    assert deviation < 0.02


def test_control_blocks_alone_have_another_norm() -> None:
    assert worst_deviation("experts", applied("experts", "one", "tiles")[0]) > 0.1


def test_the_norm_of_a_matrix_is_found() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((24, 40)).astype(np.float32)
    exact = np.linalg.norm(x, ord=2)
    estimates = []
    vector = first_vector((24,))
    for _ in range(30):
        norm, vector = spectral_norm(jnp.asarray(x), vector, 1)
        estimates.append(float(norm))
    assert max(estimates) <= exact * (1 + 1e-6)
    # They only rise, but for rounding.
    assert np.diff(estimates).min() > -1e-6 * exact
    np.testing.assert_allclose(estimates[-1], exact, rtol=2e-3)
    # The control: one iteration from the first vector is far from it.
    assert estimates[0] < 0.97 * exact
    at_once, last = spectral_norm(jnp.asarray(x), first_vector((24,)), 30)
    np.testing.assert_allclose(at_once, estimates[-1], rtol=1e-6)
    np.testing.assert_allclose(last, vector, atol=1e-4)


def test_a_power_iteration_begins_with_numbers_spread_from_half_to_three_halves() -> None:
    vector = np.asarray(first_vector((40, 25)))
    assert vector.shape == (40, 25)
    counts, _ = np.histogram(vector, bins=10, range=(0.5, 1.5))
    assert counts.sum() == vector.size
    np.testing.assert_allclose(counts, 100, atol=5)
    # No pattern: neighbours differ, in rows and in columns.
    assert np.abs(np.diff(vector, axis=0)).min() > 0.1
    assert np.abs(np.diff(vector, axis=1)).min() > 0.1


def test_zeros_have_norm_zero_and_keep_their_vector() -> None:
    first = first_vector((4,))
    norm, vector = spectral_norm(jnp.zeros((4, 6)), first, 5)
    assert norm == 0
    np.testing.assert_array_equal(vector, first)


def test_first_steps_have_five_iterations_and_later_ones_one() -> None:
    spec = ParamSpec(role=Role.HIDDEN, axes=("embed", "mlp"), fan_in=("embed",))
    steps = MatrixSteps(measured=True, sizes={"embed": 6, "mlp": 8})
    tx = muon(OptimizerConfig(name="muon", momentum=0.0), {"w": spec}, steps)
    grad = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    grads: Any = {"w": jnp.asarray(grad)}
    began: Any = tx.init(grads)
    orthogonal = newton_schulz(grads["w"])
    vectors = {}
    for count in (0, WARMUP_STEPS - 1, WARMUP_STEPS):
        state = began._replace(count=jnp.int32(count))
        _, after = tx.update(grads, state, factors=None, hyper=None)
        vectors[count] = np.asarray(cast("Any", after).vectors["w"])
        num_iterations = WARMUP_ITERATIONS if count < WARMUP_STEPS else 1
        _, expected = spectral_norm(orthogonal, first_vector((6,)), num_iterations)
        np.testing.assert_allclose(vectors[count], expected, atol=1e-5)
    assert np.abs(vectors[0] - vectors[WARMUP_STEPS]).max() > 1e-3


@pytest.mark.parametrize(
    ("mesh", "choice", "unmeasured"),
    [("fsdp 8", "measured", "whole"), ("data 2, fsdp 2, tensor 2", "measured heads", "heads")],
)
def test_no_power_iteration_communicates_and_a_stack_has_one_more_collective(
    mesh: str, choice: str, unmeasured: str
) -> None:
    text = compiled("scanned", mesh, choice).as_text()
    lines = [line for line in text.splitlines() if f"{POWER_ITERATIONS}/" in line]
    assert lines
    assert not [line for line in lines if any(f" {name}" in line for name in COLLECTIVES)]
    stable = lowered("scanned", mesh, choice).as_text()
    usual = lowered("scanned", mesh, unmeasured).as_text()

    def count(text: str, collective: str) -> int:
        return len(re.findall(rf"stablehlo\.{collective}", text))

    # Query and out have one shape and vectors of two sides, so they are two stacks and no longer
    # one; and so are up and down.
    num_stacks = 5
    extra = count(stable, "all_gather") - count(usual, "all_gather")
    assert 0 < extra <= 2 * num_stacks


# Runs

WORDS = (
    "--model.width 32 --model.num-heads 4 --model.depth 2 --model.seq-len 8 --data.batch-size 8 "
    "--optimizer.name muon --optimizer.peak-lr 0.02 --steps 4 --optimizer.warmup-steps 1 "
    "--preset.base embed=16,heads=2,kv_heads=2,head_dim=8,mlp=40,layers=2 "
    "--data.eval-batch-size 8 --data.eval-examples 8 --log.no-samples --log.no-tensorboard"
)


def config_of(*constants: str, words: str = "") -> Config:
    argv = f"{WORDS} {words}".split()
    if constants:
        argv += ["--preset.constants", *constants]
    return cli.parse("lm-tiny", RECIPES["lm-tiny"], argv).config


def leaves_of(*constants: str) -> dict[str, Any]:
    program = assemble(config_of(*constants), jax.devices()[:1])
    flat = jax.tree_util.tree_flatten_with_path(program.abstract.opt_state)[0]
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in flat}


def test_only_a_measured_run_has_vectors_in_its_state() -> None:
    usual = leaves_of()
    assert leaves_of("muon_blocks=heads") == leaves_of("muon_shape=absolute") == usual
    measured = leaves_of("muon_scale=measured")
    assert {name: measured[name] for name in usual} == usual
    added = {name: shape for name, shape in measured.items() if name not in usual}
    assert all(".vectors" in name for name in added)
    matrices = hidden_matrices(definition(config_of().model).specs)
    assert len(added) == len(matrices)
    # The stack's axes and those of the fan-in.
    shapes = {name.split("'")[1]: shape for name, shape in added.items()}
    assert shapes["block.attention.query"] == (2, 32)
    assert shapes["block.attention.out"] == (2, 4, 8)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    def stop_at_two(step: int, state: Any, run: train.HookRun) -> None:
        if step == 2:
            run.stop("two are enough")

    config = config_of("muon_scale=measured", "muon_blocks=heads")
    states = []
    for folder, hooks in (("whole", []), ("parts", [train.every(1, stop_at_two)])):
        placed = dataclasses.replace(config, workdir=str(tmp_path / folder))
        run = train.fit(placed, hooks=hooks)
        if run.step < config.steps:
            run = train.fit(dataclasses.replace(placed, resume=True))
        saved = tmp_path / folder / "checkpoints" / str(config.steps)
        states.append(runs.whole_state(saved, runs.on_one_device(run.config)))
    whole, parts = (jax.tree.leaves(state) for state in states)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    vectors: Any = optax.tree.get(states[0].opt_state, "vectors")
    first = first_vector((2, 32))
    assert not np.array_equal(np.asarray(vectors["block.attention.query"]), np.asarray(first))


@pytest.mark.parametrize("blocks", ["heads", "tiles", "matrix"])
def test_a_run_takes_the_blocks_of_its_preset(blocks: str) -> None:
    """The first update of a run is the blocks' one times the preset's rates, and no other's."""
    config = config_of(f"muon_blocks={blocks}")
    model = dataclasses.replace(config.model, depth=1)
    program = assemble(dataclasses.replace(config, model=model), jax.devices()[:1])
    rng = np.random.default_rng(0)
    grads = {
        name: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)
        for name, leaf in program.abstract.params.items()
    }
    factors = program.inputs.factors
    hyper = optimizer.OptimizerHyperparams(1.0, 1.0, 0.0, 1e-8)
    steps = program.preset.matrix_steps(program.definition.specs, program.definition.sizes, "muon")
    matrices = hidden_matrices(program.definition.specs)

    @jax.jit
    def compute(grads: Any) -> Any:
        updates, _ = optimizer.first_step(
            program.tx, "muon", grads, grads, factors=factors, hyper=hyper
        )
        expected = orthogonalize(
            {name: grads[name] for name in matrices}, matrices, layout=ONE_DEVICE,
            blocks=steps.blocks,
        )  # fmt: skip
        return updates, expected

    updates, expected = compute(grads)
    for name, step in expected.items():
        lr = factors.lr[name]
        factor = -np.reshape(lr, np.shape(lr) + (1,) * (step.ndim - np.ndim(lr)))
        np.testing.assert_allclose(updates[name], factor * step, atol=1e-3, err_msg=name)


def test_points_of_one_program_share_what_it_computes() -> None:
    usual = shape_of(config_of())
    assert shape_of(config_of("muon_shape=absolute")) == usual
    assert shape_of(config_of("muon_scale=rms")) == usual
    changed_shapes = [
        shape_of(config_of(*constants))
        for constants in (
            ("muon_scale=measured",), ("muon_blocks=heads",), ("muon_blocks=tiles",),
            ("muon_scale=measured", "muon_blocks=heads"),
        )
    ]  # fmt: skip
    assert len({repr(shape) for shape in (usual, *changed_shapes)}) == 5
    assert shape_of(config_of("muon_blocks=heads", "gamma0=2")) == changed_shapes[1]


@pytest.mark.parametrize(
    ("constant", "words", "message"),
    [
        ("muon_scale=measured", "--optimizer.name adamw", "muon_scale=measured is about Muon"),
        ("muon_blocks=heads", "--optimizer.name sgd", "muon_blocks=heads is about Muon"),
        ("muon_shape=absolute", "--optimizer.name lion", "muon_shape=absolute is about Muon"),
        ("muon_blocks=tiles", "--preset.base None", "there is no base; write --preset.base MODEL"),
        (
            "muon_blocks=tiles",
            "--model.width 40 --model.num-heads 5",
            "embed is 40, which is no multiple of the base's 16",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(
    constant: str, words: str, message: str
) -> None:
    with pytest.raises(PresetError, match=re.escape(message)):
        assemble(config_of(constant, words=words), jax.devices()[:1])
