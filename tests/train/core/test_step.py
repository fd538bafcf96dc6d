"""Training and evaluation steps: one loss however it is summed, one program for every preset."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.train.config.metrics import on_devices
from mupax.train.config.run import Config, EmaConfig, OptimizerConfig, PresetConfig
from mupax.train.core import optimizer
from mupax.train.core import state as core_state
from mupax.train.core import step as steps
from mupax.train.core.factors import resolve
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import StepInputs
from mupax.zoo.configs import ComputeConfig, ConfigError, ModelConfig
from mupax.zoo.definition import definition
from tests.fixtures.tiny import (
    DECODER,
    VIT,
    batch_of,
    random_params,
    relative_errors,
    run_of,
    scalars,
    state_with,
)
from tests.fixtures.xla import FUSIONS_OF_USERS

CONFIG = run_of(
    DECODER,
    preset=PresetConfig(name="depth-mup", base="lm-proxy"),
    optimizer=OptimizerConfig(peak_lr=0.02, eps=1e-2, warmup_steps=3),
    steps=7,
)
IMAGES = run_of(
    VIT, preset=PresetConfig(name="mup", base="vit-proxy"), optimizer=CONFIG.optimizer, steps=7
)
Z_LOSS = dataclasses.replace(CONFIG, z_loss=0.5)
CENTERED = dataclasses.replace(CONFIG, model=dataclasses.replace(DECODER, depth=1, centered=True))
CLIPPED_SGD = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(DECODER, depth=1),
    optimizer=OptimizerConfig(name="sgd", peak_lr=1.0, schedule="constant", clip_norm=0.1),
    preset=PresetConfig(name="sp", base="lm-proxy"),
)
BATCH = batch_of(DECODER)


@functools.cache
def program_of(config: Config = CONFIG) -> Program:
    return assemble(config, jax.devices()[:1])


@functools.cache
def compiled(config: Config = CONFIG) -> Any:
    return program_of(config).compile_train()


@functools.cache
def initial_state(config: Config) -> Any:
    program = program_of(config)
    if config.model.centered:
        # The step inputs have the same initial parameters, as the reference.
        return program.initial_state()
    return state_with(program, random_params(program))


@functools.cache
def inputs_of(config: Config = CONFIG) -> StepInputs:
    return program_of(config).step_inputs()


@jax.jit
def copied(tree: Any) -> Any:
    """Copy arrays for a step that may take the memory of its arguments."""
    return jax.tree.map(jnp.copy, tree)


class Step(NamedTuple):
    """One compiled step: the state before and after it, and its metrics."""

    before: Any
    after: Any
    metrics: dict[str, float]


@functools.cache
def stepped(config: Config = CONFIG) -> Step:
    # These two settings leave the initial state as it is.
    before = initial_state(dataclasses.replace(config, accumulation_steps=1, z_loss=0.0))
    batch = batch_of(config.model)
    after, metrics = compiled(config)(copied(before), inputs_of(config), batch)
    return Step(before, after, scalars(metrics))


@functools.cache
def logits_program(model: ModelConfig) -> Any:
    return jax.jit(functools.partial(steps.logits_of, definition(model)))


def logits_of(config: Config, params: Any, step_inputs: StepInputs | None = None) -> jax.Array:
    """Return logits of the batch."""
    inputs = batch_of(config.model)["inputs"]
    return logits_program(config.model)(params, step_inputs or inputs_of(config), inputs)


# The loss


@pytest.mark.core
@pytest.mark.parametrize("config", [CONFIG, IMAGES], ids=["tokens", "images"])
def test_the_loss_is_the_mean_over_the_targets_that_count(config: Config) -> None:
    before, _, metrics = stepped(config)
    batch = batch_of(config.model)
    logits = np.asarray(logits_of(config, before.params), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    weights = batch["weights"]
    nll = -np.take_along_axis(log_p, batch["targets"][..., None], axis=-1)[..., 0]
    hits = logits.argmax(-1) == batch["targets"]
    assert 0 < (weights == 0).sum() < weights.size
    assert metrics["loss"] == pytest.approx((nll * weights).sum() / weights.sum(), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx((hits * weights).sum() / weights.sum(), rel=1e-6)
    assert metrics["weight"] == weights.sum()
    sums = program_of(config).compile_eval()(before.params, inputs_of(config), batch)
    assert float(sums.loss) == pytest.approx((nll * weights).sum(), rel=1e-6)
    assert float(sums.metrics["accuracy"]) == (hits * weights).sum()
    assert float(sums.weight) == weights.sum()


@pytest.mark.core
def test_metrics_tell_the_step_before_the_update() -> None:
    before, after, metrics = stepped()
    assert int(before.step) == 0
    assert int(after.step) == 1
    assert metrics["lr"] == pytest.approx(0.02 / 3)
    measured = on_devices(training=True).keys()
    assert "accuracy" in measured
    assert metrics.keys() == {"loss", "grad_norm", "lr", "weight"} | measured


@pytest.mark.core
def test_the_gradient_norm_is_over_all_parameters_and_not_clipped() -> None:
    before, after, metrics = stepped(CLIPPED_SGD)
    moved = 0.0
    for name, value in before.params.items():
        difference = np.asarray(after.params[name], np.float64) - np.asarray(value)
        moved += np.square(difference).sum()
    assert np.sqrt(moved) == pytest.approx(0.1, rel=1e-2)

    program = program_of(CLIPPED_SGD)
    batch = batch_of(CLIPPED_SGD.model)

    def loss(params: Any) -> jax.Array:
        sums = steps.batch_sums(program.definition, params, program.inputs, batch)
        return sums.loss / sums.weight

    gradients = jax.device_get(jax.jit(jax.grad(loss))(before.params))
    squares = sum(float(np.sum(np.square(g))) for g in gradients.values())
    assert squares**0.5 > 0.2
    assert metrics["grad_norm"] == pytest.approx(squares**0.5, rel=1e-5)


@pytest.mark.core
def test_z_loss_is_trained_and_measured_but_no_part_of_the_loss() -> None:
    before, plain, metrics = stepped()
    _, after, with_z = stepped(Z_LOSS)
    assert with_z.keys() - metrics.keys() == {"logit_z_loss"}
    assert with_z["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    logits = logits_of(CONFIG, before.params)
    squares = np.square(np.log(np.exp(np.asarray(logits, np.float64)).sum(-1)))
    mean_square = np.average(squares, weights=BATCH["weights"])
    assert with_z["logit_z_loss"] == pytest.approx(mean_square, rel=1e-5)
    assert max(relative_errors(after.params, plain.params)) > 1e-3
    # An evaluation, which reads the same inputs, has none.
    evaluate = program_of(Z_LOSS).compile_eval()
    assert evaluate(before.params, inputs_of(Z_LOSS), BATCH).z is None


@pytest.mark.core
@pytest.mark.parametrize("weight", [-1e-4, float("nan"), float("inf")])
def test_a_weight_of_the_z_loss_below_0_or_not_finite_is_refused(weight: float) -> None:
    message = r"z_loss is .*; write a number of 0 or more, such as 1e-4"
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, z_loss=weight)


# However it runs


@pytest.mark.core
@pytest.mark.parametrize(
    ("config", "parts"), [(Z_LOSS, 4), (IMAGES, 2)], ids=["tokens-z-loss-4", "images-2"]
)
def test_accumulation_changes_nothing(config: Config, parts: int) -> None:
    before, after, metrics = stepped(config)
    _, split, split_metrics = stepped(dataclasses.replace(config, accumulation_steps=parts))
    assert split_metrics == pytest.approx(metrics, rel=1e-5)
    # Sums in another order, then Adam with an eps as large as the gradients.
    assert max(relative_errors(split.opt_state, after.opt_state)) < 1e-5
    assert max(relative_errors(split.params, after.params)) < 1e-5
    assert min(relative_errors(after.params, before.params)) > 1e-3


@pytest.mark.core
def test_control_a_mean_of_means_would_show() -> None:
    # The loss if each microbatch were averaged over its own targets.
    before, _, metrics = stepped()
    program = program_of()

    @jax.jit
    def summed(part: Any) -> Any:
        return steps.batch_sums(program.definition, before.params, program.inputs, part)

    means = []
    for index in range(4):
        sums = summed({name: array[index::4] for name, array in BATCH.items()})
        means.append(float(sums.loss / sums.weight))
    assert np.mean(means) != pytest.approx(metrics["loss"], rel=1e-3)


# Without jit, each operation is compiled alone for each shape. Here many arrays share a shape.
SQUARE = dataclasses.replace(
    CLIPPED_SGD,
    model=dataclasses.replace(
        DECODER, depth=1, width=8, num_heads=2, num_kv_heads=2, mlp_ratio=1, vocab_size=8,
        seq_len=8, norm_gain=False,
    ),
)  # fmt: skip


def test_jit_equals_no_jit() -> None:
    before, after, metrics = stepped(SQUARE)
    program = program_of(SQUARE)
    plain = steps.make_train_step(program.definition, program.tx)
    batch = jax.tree.map(jnp.asarray, batch_of(SQUARE.model))
    with jax.disable_jit():
        eager, eager_metrics = plain(before, program.inputs, batch)
    assert scalars(eager_metrics) == pytest.approx(metrics, rel=1e-5)
    assert max(relative_errors(eager, after)) < 1e-5


# One program


@pytest.mark.core
def test_every_preset_runs_the_same_program() -> None:
    before, _, _ = stepped()
    program = program_of()
    base = {"embed": 5, "heads": 3, "kv_heads": 1, "head_dim": 2, "mlp": 7, "layers": 1}
    hyper = program.inputs.hyper._replace(peak_lr=np.float32(0.1))
    losses = set()
    for name in ("sp", "mup", "mup-half", "depth-mup"):
        factors = resolve(presets.get(name, base=base), program.definition, "adamw")
        inputs = StepInputs(factors, hyper)
        after, _ = compiled()(copied(before), inputs, BATCH)
        after, metrics = compiled()(after, inputs, BATCH)
        losses.add(float(metrics["loss"]))
    assert len(losses) == 4, "the factors made no difference"


@pytest.mark.core
def test_every_preset_lowers_to_the_same_text() -> None:
    texts = set()
    for name in ("sp", "mup", "depth-mup"):
        preset = PresetConfig(name=name, base="lm-proxy")
        config = dataclasses.replace(CONFIG, model=CLIPPED_SGD.model, preset=preset)
        program = assemble(config, jax.devices()[:1])
        step = jax.jit(steps.make_train_step(program.definition, program.tx), donate_argnums=0)
        texts.add(step.lower(program.abstract, program.inputs, BATCH).as_text())
    assert len(texts) == 1


@pytest.mark.core
def test_a_compiled_step_refuses_another_shape() -> None:
    before, _, _ = stepped()
    inputs = inputs_of()
    shorter = {name: array[:, :5] for name, array in BATCH.items()}
    with pytest.raises(TypeError, match="compiled"):
        compiled()(copied(before), inputs, shorter)
    hyper = inputs.hyper._replace(schedule=np.ones(11, np.float32))
    with pytest.raises(TypeError, match="compiled"):
        compiled()(copied(before), inputs._replace(hyper=hyper), BATCH)


@pytest.mark.core
def test_the_state_is_given_away() -> None:
    state = copied(stepped().before)
    compiled()(state, inputs_of(), BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))


# Where the state lies


def apply_by_where(keep: jax.Array, update: Any, before: tuple, **_: Any) -> tuple:
    """Choose every number of the state by itself, as `apply_if` does on accelerators."""
    return jax.tree.map(lambda new, old: jnp.where(keep, new, old), update(*before), before)


def copies_of_parameters(program: Program, text: str) -> int:
    """Return how many matrices of a parameter's shape a compiled step copies."""
    shapes = set()
    for leaf in program.abstract.params.values():
        if leaf.ndim > 1:
            shapes.add(f"f32[{','.join(map(str, leaf.shape))}]")
    copied_shapes = re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", text)
    return sum(shape in shapes for shape in copied_shapes)


def test_a_step_moves_the_state_where_it_lies_and_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = dataclasses.replace(CLIPPED_SGD.model, norm_gain=False)
    config = dataclasses.replace(
        CONFIG, model=model, ema=EmaConfig(decay=0.9), freeze=("block.mlp.*",)
    )
    program = program_of(config)
    batches = [BATCH, {**BATCH, "weights": 0 * BATCH["weights"]}, batch_of(model, seed=1)]

    def run() -> tuple[int, list[Any], list[Any]]:
        """Return the number of copies, the states and the metrics of three steps."""
        traced = program.trace_train()
        train = traced.lower().compile(compiler_options={**FUSIONS_OF_USERS})
        copies = copies_of_parameters(program, str(train.as_text()))
        states = [initial_state(config)]
        rows = []
        for batch in batches:
            state, metrics = train(copied(states[-1]), program.step_inputs(), batch)
            states.append(state)
            rows.append(metrics)
        return copies, jax.device_get(states), jax.device_get(rows)

    copies, states, rows = run()
    monkeypatch.setattr(core_state, "apply_if", apply_by_where)
    more_copies, *expected = run()
    assert copies == 0 < more_copies
    assert [int(metrics["verdict"][0]) for metrics in rows] == [0, 1, 0]
    chex.assert_trees_all_equal([states, rows], expected)
    first, good, skipped, last = (state._replace(step=0, health=()) for state in states)
    chex.assert_trees_all_equal(skipped, good)
    assert np.abs(last.ema["token"] - first.ema["token"]).max() > 1e-3
    np.testing.assert_array_equal(last.params["block.mlp.up"], first.params["block.mlp.up"])


# Centred outputs


@pytest.mark.core
def test_a_centred_output_starts_at_exactly_zero() -> None:
    before, after, metrics = stepped(CENTERED)
    assert not np.asarray(logits_of(CENTERED, before.params)).any()
    assert metrics["loss"] == pytest.approx(np.log(17), rel=1e-6)
    assert np.abs(logits_of(CENTERED, after.params)).max() > 1e-3


@pytest.mark.core
def test_a_centred_output_is_f_minus_f_at_initialization() -> None:
    before, after, _ = stepped(CENTERED)
    inputs = inputs_of(CENTERED)
    centered = logits_of(CENTERED, after.params)
    uncentered = inputs._replace(reference=None)
    plain_after = logits_of(CENTERED, after.params, uncentered)
    plain_before = logits_of(CENTERED, before.params, uncentered)
    np.testing.assert_allclose(centered, plain_after - plain_before, atol=1e-6)

    def total(reference: Any) -> jax.Array:
        with_reference = inputs._replace(reference=reference)
        return jnp.sum(logits_of(CENTERED, after.params, with_reference) ** 2)

    # No gradient flows through the frozen model.
    for gradient in jax.tree.leaves(jax.grad(total)(inputs.reference)):
        assert not np.asarray(gradient).any()


@pytest.mark.core
def test_the_frozen_reference_is_made_again_from_the_seed() -> None:
    before, _, _ = stepped(CENTERED)
    reference = assemble(CENTERED, jax.devices()[:1]).step_inputs().reference
    assert reference is not None
    for name, value in before.params.items():
        np.testing.assert_array_equal(reference[name], value)
    other = program_of(dataclasses.replace(CENTERED, seed=1)).step_inputs().reference
    assert other is not None
    assert not (np.asarray(other["token"]) == np.asarray(before.params["token"])).any()


def test_gamma0_divides_a_centred_output_once() -> None:
    _, after, _ = stepped(CENTERED)
    outputs = []
    for gamma0 in (1.0, 0.25):
        factors = resolve(presets.get("mup", gamma0=gamma0), program_of(CENTERED).definition)
        inputs = inputs_of(CENTERED)._replace(factors=factors)
        outputs.append(np.asarray(logits_of(CENTERED, after.params, inputs)))
    np.testing.assert_allclose(outputs[1], 4 * outputs[0], rtol=1e-4, atol=1e-5)


# Precision

BFLOAT16 = dataclasses.replace(
    CLIPPED_SGD,
    model=dataclasses.replace(
        CLIPPED_SGD.model, compute=ComputeConfig(dtype="bfloat16", param_dtype="bfloat16")
    ),
    accumulation_steps=2,
)


def test_bfloat16_storage_and_products_train() -> None:
    _, after, metrics = stepped(BFLOAT16)
    assert {leaf.dtype for leaf in after.params.values()} == {jnp.dtype(jnp.bfloat16)}
    # 8 bits of each number; the loss is near ln 17.
    assert metrics["loss"] == pytest.approx(stepped(CLIPPED_SGD).metrics["loss"], rel=0.02)


def test_a_rounded_number_is_right_on_average_and_stays_where_it_can_be_stored() -> None:
    numbers = np.array([1.0, 1.0005, -0.3001, 3e-5, 0.0, 65504.0, np.inf, np.nan], np.float32)
    x = jnp.asarray(np.repeat(numbers[:, None], 40_000, axis=1))
    rounded = jax.jit(optimizer.stochastically_rounded)(x, jnp.uint32(7))
    rounded = np.asarray(rounded, np.float32)
    np.testing.assert_allclose(rounded.mean(axis=1), numbers, rtol=5e-5)
    stored = np.asarray(jnp.asarray(numbers, jnp.bfloat16), np.float32) == numbers
    stays = stored | np.isnan(numbers)
    assert [len(np.unique(row)) for row in rounded] == [1 if stay else 2 for stay in stays]
    # 0.0005 of the 2^-7 between stored numbers are rounded up.
    bits = (rounded[1] > 1).astype(np.float64) - 0.064
    for lag in (1, 2, 64, 200):
        assert abs(np.mean(bits[lag:] * bits[:-lag])) < 0.002, "neighbours are rounded alike"


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
def test_bfloat16_parameters_move_at_small_rates_as_float32_ones_do(name: Any) -> None:
    program = program_of()
    names = ("norm.gain", "block.mlp.up", "readout")
    specs = {n: program.definition.specs[n] for n in names}
    factors = program.inputs.factors.moving(specs)
    hyper = program.inputs.hyper._replace(schedule=1.0, peak_lr=1e-4)
    tx = optimizer.build(OptimizerConfig(name=name), specs)
    random = np.random.default_rng(0)
    ones = {}
    grads = {}
    for n in names:
        shape = program.definition.abstract[n].shape
        ones[n] = jnp.ones(shape)
        grads[n] = 1 + 0.3 * random.standard_normal(shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnames=("dtype", "rounds"))
    def moved(dtype: str, rounds: bool) -> Any:
        """Return the mean movement of every parameter in 100 steps."""
        seed = jnp.uint32(0) if rounds else None
        gradients = {n: g.astype(dtype) for n, g in grads.items()}

        def update(carry: Any, step: jax.Array) -> tuple[Any, None]:
            params, state = carry
            new = optimizer.apply_gradients(
                tx, gradients, state, params, factors=factors, hyper=hyper, rounding_seed=seed,
                step=step,
            )  # fmt: skip
            return jax.tree.map(lambda after, before: after.astype(before.dtype), new, carry), None

        start = {n: x.astype(dtype) for n, x in ones.items()}
        (params, state), _ = jax.lax.scan(update, (start, tx.init(start)), jnp.arange(100))
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(state) if leaf.ndim)
        return {n: jnp.mean(x.astype(jnp.float32) - 1) for n, x in params.items()}

    expected = moved("float32", False)
    rounded = moved("bfloat16", True)
    to_nearest = moved("bfloat16", False)
    for n, move in expected.items():
        # Chance, and the rounding of the numbers themselves.
        error = 0.02 / ones[n].size ** 0.5 + 0.02 * abs(float(move))
        assert float(rounded[n]) == pytest.approx(float(move), abs=error), n
    # The control: rounded to the nearest, parameters stay.
    assert any(float(move) == 0 for move in to_nearest.values())


def test_a_step_rounds_by_seed_and_step_alone() -> None:
    before = stepped(BFLOAT16).before
    step = compiled(BFLOAT16)
    inputs = inputs_of(BFLOAT16)
    # A schedule would tell steps apart, too.
    flat = inputs.hyper._replace(schedule=jnp.ones_like(inputs.hyper.schedule))
    inputs = inputs._replace(hyper=flat)
    after, _ = step(copied(before), inputs, BATCH)
    again, _ = step(copied(before), inputs, BATCH)
    other, _ = step(copied(before), inputs._replace(rounding_seed=np.uint32(1)), BATCH)
    later, _ = step(copied(before._replace(step=before.step + 1)), inputs, BATCH)
    for name, value in after.params.items():
        np.testing.assert_array_equal(again.params[name], value)
    for changed in (other, later):
        assert any(np.any(changed.params[name] != w) for name, w in after.params.items())
    assert program_of().inputs.rounding_seed is None, "float32 runs round nothing"


def test_gradients_of_microbatches_are_summed_in_float32() -> None:
    model = dataclasses.replace(
        CLIPPED_SGD.model, compute=ComputeConfig(param_dtype="bfloat16", layers="scan")
    )
    config = run_of(model, batch_size=64, preset=CONFIG.preset)
    program = program_of(config)
    state = initial_state(config)
    inputs = inputs_of(config)
    batch = batch_of(model, rows=64)

    @functools.partial(jax.jit, static_argnums=1)
    def gradients(params: Any, parts: int) -> Any:
        return steps.gradients(program.definition, params, inputs, batch, parts)[0]

    wide = {name: np.asarray(value, np.float32) for name, value in state.params.items()}
    expected = jax.device_get(gradients(wide, 1))
    split = jax.device_get(gradients(state.params, 64))
    errors = []
    for name, value in expected.items():
        errors.append(np.linalg.norm(split[name] - value) / np.linalg.norm(value))
    # 0.0055, as of one batch; summed in bfloat16 it was 0.015.
    assert max(errors) < 0.008, max(errors)
