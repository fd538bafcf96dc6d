"""The training and evaluation steps: one loss however it is summed, one program for every preset, centred outputs."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.train.config.metrics import on_devices
from mupax.train.config.run import (
    Config,
    DataConfig,
    EmaConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.train.core import optimizer
from mupax.train.core import state as core_state
from mupax.train.core import step as steps
from mupax.train.core.factors import resolve
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import StepInputs
from mupax.zoo.configs import ComputeConfig, ConfigError, DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import definition
from tests.fixtures.xla import FUSIONS_OF_USERS

DECODER = DecoderConfig(
    width=22,
    depth=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    mlp_ratio=1.5,
    vocab_size=17,
    seq_len=7,
    qk_norm=True,
)
VIT = ViTConfig(
    width=20,
    depth=2,
    num_heads=5,
    mlp_ratio=1.3,
    image_size=9,
    patch_size=3,
    channels=2,
    num_classes=7,
)
CONFIG = Config(
    recipe="tiny", model=DECODER, data=DataConfig(name="text:x", batch_size=8), mesh=MeshConfig(data=1), steps=7,
    preset=PresetConfig(name="depth-mup", base="lm-proxy"), optimizer=OptimizerConfig(peak_lr=0.02, eps=1e-2, warmup_steps=3),
)  # fmt: skip
IMAGES = dataclasses.replace(
    CONFIG,
    model=VIT,
    data=DataConfig(name="images:x", batch_size=8),
    preset=PresetConfig(name="mup", base="vit-proxy"),
)


def program_of(config: Config = CONFIG) -> Program:
    return assemble(config, jax.devices()[:1])


def batch_of(config: Config = CONFIG, seed: int = 0) -> Any:
    """A batch in which the share of targets that count differs from row to row, in the first rows most."""
    random = np.random.default_rng(seed)
    rows, model = config.data.batch_size, config.model
    if isinstance(model, DecoderConfig):
        shape, inputs = (rows, 7), random.integers(0, 17, (rows, 7), np.int32)
        weights = random.random(shape) < np.linspace(1, 0.2, rows)[:, None]
    else:
        shape, inputs = (rows,), random.standard_normal((rows, 9, 9, 2)).astype(np.float32)
        weights = np.arange(rows) % 3 < 2
    return {
        "inputs": inputs,
        "targets": random.integers(0, 7, shape, np.int32),
        "weights": weights.astype(np.float32),
    }


def copied(tree: Any) -> Any:
    """For a step that may take the memory of what it is given."""
    return jax.tree.map(jnp.array, tree)


@functools.cache
def compiled(config: Config = CONFIG) -> Any:
    return program_of(config).compile_train()


@functools.cache
def start_of(config: Config) -> tuple[Any, Any]:
    """Initial state, and the numbers of the run with its frozen reference."""
    program = program_of(config)
    return program.initial_state(), program.step_inputs()


def scalars(metrics: dict[str, jax.Array]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value.ndim == 0}


@functools.cache
def stepped(config: Config = CONFIG) -> tuple[Program, Any, Any, dict[str, float]]:
    """A program, the state before and after one compiled step, and its metrics."""
    program = program_of(config)
    before, run = start_of(dataclasses.replace(config, accumulation_steps=1))
    after, metrics = compiled(config)(copied(before), run, batch_of(config))
    return program, before, after, scalars(metrics)


@functools.cache
def logits_program(model: ModelConfig) -> Any:
    return jax.jit(functools.partial(steps.logits_of, definition(model)))


def logits_of(program: Program, params: Any, run: StepInputs, inputs: Any) -> jax.Array:
    return logits_program(program.config.model)(params, run, inputs)


def relative_errors(got: Any, want: Any) -> list[float]:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return [
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(np.asarray(b)).max(), 1e-9))
        for a, b in pairs
    ]


# The loss


@pytest.mark.core
@pytest.mark.parametrize("config", [CONFIG, IMAGES], ids=["tokens", "images"])
def test_the_loss_is_the_mean_over_the_targets_that_count(config: Config) -> None:
    program, before, _, metrics = stepped(config)
    batch, run = batch_of(config), program.step_inputs()
    logits = np.asarray(logits_of(program, before.params, run, batch["inputs"]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    w = batch["weights"]
    nll = -np.take_along_axis(log_p, batch["targets"][..., None], axis=-1)[..., 0]
    hits = logits.argmax(-1) == batch["targets"]
    assert 0 < (w == 0).sum() < w.size
    assert metrics["loss"] == pytest.approx((nll * w).sum() / w.sum(), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx((hits * w).sum() / w.sum(), rel=1e-6)
    assert metrics["weight"] == w.sum()
    sums = program.compile_eval()(before.params, run, batch)
    assert float(sums.loss) == pytest.approx((nll * w).sum(), rel=1e-6)
    assert (float(sums.metrics["accuracy"]), float(sums.weight)) == ((hits * w).sum(), w.sum())


@pytest.mark.core
def test_metrics_tell_the_step_before_the_update() -> None:
    _, before, after, metrics = stepped()
    assert int(before.step) == 0
    assert int(after.step) == 1
    assert metrics["lr"] == pytest.approx(0.02 / 3)
    measured = on_devices(training=True).keys()
    assert "accuracy" in measured
    assert metrics.keys() == {"loss", "grad_norm", "lr", "weight"} | measured


@pytest.mark.core
def test_the_gradient_norm_is_over_all_parameters_and_not_clipped() -> None:
    sgd = OptimizerConfig(name="sgd", peak_lr=1.0, schedule="constant", clip_norm=1e-3)
    config = dataclasses.replace(
        CONFIG, optimizer=sgd, preset=PresetConfig(name="sp", base="lm-proxy")
    )
    program, before, after, metrics = stepped(config)
    total = sum(
        np.square(np.asarray(after.params[n], np.float64) - np.asarray(w)).sum()
        for n, w in before.params.items()
    )
    assert np.sqrt(total) == pytest.approx(
        1e-3, rel=1e-2
    )  # read back from float32 parameters of size one
    loss = jax.jit(
        lambda p: (
            (s := steps.batch_sums(program.definition, p, program.inputs, batch_of())).loss
            / s.weight
        )
    )
    squares = sum(
        jnp.sum(jnp.square(g)) for g in jax.tree.leaves(jax.jit(jax.grad(loss))(before.params))
    )
    assert metrics["grad_norm"] == pytest.approx(float(jnp.sqrt(squares)), rel=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("parts", [1, 4])
def test_z_loss_is_trained_and_measured_but_no_part_of_the_loss(parts: int) -> None:
    _, before, plain, metrics = stepped(dataclasses.replace(CONFIG, accumulation_steps=parts))
    program, _, after, with_z = stepped(
        dataclasses.replace(CONFIG, accumulation_steps=parts, z_loss=0.5)
    )
    assert with_z.keys() - metrics.keys() == {"logit_z_loss"}
    assert with_z["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    batch, run = batch_of(), program.step_inputs()
    logits = logits_of(program, before.params, run, batch["inputs"])
    squares = np.square(np.asarray(jax.nn.logsumexp(logits, axis=-1)))
    assert with_z["logit_z_loss"] == pytest.approx(
        np.average(squares, weights=batch["weights"]), rel=1e-5
    )
    assert max(relative_errors(after.params, plain.params)) > 1e-3
    # An evaluation, which reads the same inputs, has none.
    assert program.compile_eval()(before.params, run, batch).z is None


@pytest.mark.core
@pytest.mark.parametrize("weight", [-1e-4, float("nan"), float("inf")])
def test_a_weight_of_the_z_loss_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(
        ConfigError, match=r"z_loss is .*; write a number of 0 or more, such as 1e-4"
    ):
        dataclasses.replace(CONFIG, z_loss=weight)


# However it runs


@pytest.mark.core
@pytest.mark.parametrize(
    ("config", "parts"),
    [(CONFIG, 4), (CONFIG, 2), (IMAGES, 4)],
    ids=["tokens-4", "tokens-2", "images-4"],
)
def test_accumulation_changes_nothing(config: Config, parts: int) -> None:
    _, before, after, metrics = stepped(config)
    _, _, split, split_metrics = stepped(dataclasses.replace(config, accumulation_steps=parts))
    assert split_metrics == pytest.approx(metrics, rel=1e-5)
    # Relative to the largest entry; sums in another order, then Adam with an eps as large as the gradients.
    assert max(relative_errors(split.opt_state, after.opt_state)) < 1e-5
    assert max(relative_errors(split.params, after.params)) < 1e-5
    assert min(relative_errors(after.params, before.params)) > 1e-3


@pytest.mark.core
def test_control_a_mean_of_means_would_show() -> None:
    # What accumulation gives when each microbatch is averaged over its own targets.
    program, before, _, metrics = stepped()
    parts = [{name: array[i::4] for name, array in batch_of().items()} for i in range(4)]
    summed = jax.jit(
        lambda part: steps.batch_sums(program.definition, before.params, program.inputs, part)
    )
    sums = [summed(part) for part in parts]
    assert np.mean([float(s.loss / s.weight) for s in sums]) != pytest.approx(
        metrics["loss"], rel=1e-3
    )


def test_jit_equals_no_jit() -> None:
    # Few parameters and operations: without jit each is compiled alone.
    bare = dataclasses.replace(
        DECODER, depth=1, num_kv_heads=None, bias=False, norm_gain=False, qk_norm=False, activation="relu",
        compute=ComputeConfig(layers="unrolled"),
    )  # fmt: skip
    small = dataclasses.replace(
        CONFIG, model=bare, optimizer=dataclasses.replace(CONFIG.optimizer, name="sgd")
    )
    program, before, after, metrics = stepped(small)
    plain = steps.make_train_step(program.definition, program.tx)
    with jax.disable_jit():
        eager, eager_metrics = plain(
            before, program.inputs, jax.tree.map(jnp.asarray, batch_of(small))
        )
    assert scalars(eager_metrics) == pytest.approx(metrics, rel=1e-5)
    assert max(relative_errors(eager, after)) < 1e-5


# One program


@pytest.mark.core
def test_every_preset_runs_the_same_program() -> None:
    program, before, _, _ = stepped()
    train, losses = compiled(), {}
    for name in ("sp", "mup", "mup-half", "depth-mup"):
        preset = presets.get(
            name, base={"embed": 5, "heads": 3, "kv_heads": 1, "head_dim": 2, "mlp": 7, "layers": 1}
        )
        run = StepInputs(
            resolve(preset, program.definition, "adamw"),
            program.inputs.hyper._replace(peak_lr=np.float32(0.1)),
        )
        after, _ = train(copied(before), run, batch_of())
        after, metrics = train(after, run, batch_of())
        losses[name] = float(metrics["loss"])
    assert len(set(losses.values())) == 4, "the factors made no difference"


@pytest.mark.core
def test_every_preset_lowers_to_the_same_text() -> None:
    texts = set()
    for name in ("sp", "mup", "depth-mup"):
        program = program_of(
            dataclasses.replace(CONFIG, preset=PresetConfig(name=name, base="lm-proxy"))
        )
        step = jax.jit(steps.make_train_step(program.definition, program.tx), donate_argnums=0)
        texts.add(step.lower(program.abstract, program.inputs, batch_of()).as_text())
    assert len(texts) == 1


@pytest.mark.core
def test_a_compiled_step_refuses_another_shape() -> None:
    program, before, _, _ = stepped()
    train = compiled()
    shorter = {name: array[:, :5] for name, array in batch_of().items()}
    with pytest.raises(TypeError, match="compiled"):
        train(copied(before), program.step_inputs(), shorter)
    unlike = program.inputs._replace(
        hyper=program.inputs.hyper._replace(schedule=np.ones(11, np.float32))
    )
    with pytest.raises(TypeError, match="compiled"):
        train(copied(before), unlike, batch_of())


@pytest.mark.core
def test_the_state_is_given_away() -> None:
    program, before, _, _ = stepped()
    state = copied(before)
    compiled()(state, program.step_inputs(), batch_of())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))


# Where the state lies


def chosen(keep: jax.Array, update: Any, before: tuple, **_: Any) -> tuple:
    """Choose every number of the state by itself, as `apply_if` does on accelerators."""
    return jax.tree.map(lambda new, old: jnp.where(keep, new, old), update(*before), before)


def test_a_step_moves_the_state_where_it_lies_and_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = dataclasses.replace(
        DECODER, depth=1, num_kv_heads=None, bias=False, qk_norm=False, activation="relu"
    )
    config = dataclasses.replace(CONFIG, model=bare, ema=EmaConfig(decay=0.9), freeze=("norm.*",))
    program, good = program_of(config), batch_of()
    batches, runs = [good, {**good, "weights": 0 * good["weights"]}, batch_of(seed=1)], []
    shapes = {
        f"f32[{','.join(map(str, leaf.shape))}]"
        for leaf in program.abstract.params.values()
        if leaf.ndim > 1
    }
    for way in (core_state.apply_if, chosen):
        monkeypatch.setattr(core_state, "apply_if", way)
        train = program.trace_train().lower().compile(compiler_options={**FUSIONS_OF_USERS})
        copies = sum(
            shape in shapes
            for shape in re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", str(train.as_text()))
        )
        states, told = [program.initial_state()], []
        for batch in batches:
            state, metrics = train(copied(states[-1]), program.step_inputs(), batch)
            states, told = [*states, state], [*told, metrics]
        runs.append((copies, jax.device_get((states, told))))
    (copies, (states, told)), (more, other) = runs
    assert copies == 0 < more
    assert [int(metrics["verdict"][0]) for metrics in told] == [0, 1, 0]
    chex.assert_trees_all_equal((states, told), other)
    first, _, after, last = (state._replace(step=0, health=()) for state in states)
    chex.assert_trees_all_equal(after, states[1]._replace(step=0, health=()))
    assert np.abs(last.ema["token"] - first.ema["token"]).max() > 1e-3
    np.testing.assert_array_equal(last.params["norm.gain"], first.params["norm.gain"])


# Centred outputs


CENTRED = dataclasses.replace(CONFIG, model=dataclasses.replace(DECODER, centered=True))


@pytest.mark.core
def test_a_centred_output_starts_at_exactly_zero() -> None:
    program, before, after, metrics = stepped(CENTRED)
    run, batch = start_of(CENTRED)[1], batch_of()
    assert not np.asarray(logits_of(program, before.params, run, batch["inputs"])).any()
    assert metrics["loss"] == pytest.approx(np.log(17), rel=1e-6)
    assert np.abs(logits_of(program, after.params, run, batch["inputs"])).max() > 1e-3


@pytest.mark.core
def test_a_centred_output_is_f_minus_f_at_initialization() -> None:
    program, before, after, _ = stepped(CENTRED)
    run, x = start_of(CENTRED)[1], batch_of()["inputs"]
    centred = logits_of(program, after.params, run, x)
    plain = [
        logits_of(program, p, run._replace(reference=None), x)
        for p in (after.params, before.params)
    ]
    np.testing.assert_allclose(centred, plain[0] - plain[1], atol=1e-6)
    # No gradient flows through the frozen model.
    frozen = jax.grad(
        lambda r: jnp.sum(
            steps.logits_of(program.definition, after.params, run._replace(reference=r), x) ** 2
        )
    )
    assert not any(
        np.asarray(leaf).any() for leaf in jax.tree.leaves(jax.jit(frozen)(run.reference))
    )


@pytest.mark.core
def test_the_frozen_reference_is_made_again_from_the_seed() -> None:
    program, before, _, _ = stepped(CENTRED)
    assert program is not program_of(CENTRED)
    reference = program_of(CENTRED).step_inputs().reference
    assert reference is not None
    for name, value in before.params.items():
        np.testing.assert_array_equal(reference[name], value)
    other = program_of(dataclasses.replace(CENTRED, seed=1)).step_inputs().reference
    assert other is not None
    assert not (np.asarray(other["token"]) == np.asarray(before.params["token"])).any()


def test_gamma0_divides_a_centred_output_once() -> None:
    program, _, after, _ = stepped(CENTRED)
    outputs = []
    for gamma0 in (1.0, 0.25):
        preset = presets.get("mup", gamma0=gamma0)
        run = start_of(CENTRED)[1]._replace(factors=resolve(preset, program.definition))
        outputs.append(np.asarray(logits_of(program, after.params, run, batch_of()["inputs"])))
    np.testing.assert_allclose(outputs[1], 4 * outputs[0], rtol=1e-4, atol=1e-5)


# Precision

BFLOAT16 = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(
        DECODER, compute=ComputeConfig(dtype="bfloat16", param_dtype="bfloat16")
    ),
    accumulation_steps=2,
)


def test_bfloat16_storage_and_products_train() -> None:
    _, _, after, metrics = stepped(BFLOAT16)
    assert {leaf.dtype for leaf in after.params.values()} == {jnp.dtype(jnp.bfloat16)}
    # 8 bits of each number; the loss is near ln 17.
    assert metrics["loss"] == pytest.approx(stepped()[3]["loss"], rel=0.02)


def test_a_rounded_number_is_right_on_average_and_stays_where_it_can_be_stored() -> None:
    numbers = np.array([1.0, 1.0005, -0.3001, 3e-5, 0.0, 65504.0, np.inf, np.nan], np.float32)
    x = jnp.asarray(np.repeat(numbers[:, None], 40_000, axis=1))
    rounded = np.asarray(optimizer.stochastically_rounded(x, jnp.uint32(7)), np.float32)
    np.testing.assert_allclose(rounded.mean(axis=1), numbers, rtol=5e-5)
    stored = np.asarray(jnp.asarray(numbers, jnp.bfloat16), np.float32) == numbers
    assert all(
        len(np.unique(rounded[i])) == (1 if stored[i] or np.isnan(numbers[i]) else 2)
        for i in range(8)
    )
    bits = (rounded[1] > 1).astype(
        np.float64
    ) - 0.064  # 0.0005 of the 2^-7 that stored numbers are apart
    for lag in (1, 2, 64, 200):
        assert abs(np.mean(bits[lag:] * bits[:-lag])) < 0.002, "neighbours are rounded alike"


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
def test_bfloat16_parameters_move_at_small_rates_as_float32_ones_do(name: str) -> None:
    config, definition = OptimizerConfig(name=name), program_of().definition
    trained = {n: definition.specs[n] for n in ("norm.gain", "block.mlp.up", "readout")}
    factors = program_of().inputs.factors.moving(trained)
    hyper = program_of().inputs.hyper._replace(schedule=1.0, peak_lr=1e-4)
    tx = optimizer.build(config, trained)
    ones = {n: jnp.ones(definition.abstract[n].shape) for n in trained}
    random = np.random.default_rng(0)
    grads = {
        n: 1 + 0.3 * random.standard_normal(w.shape).astype(np.float32) for n, w in ones.items()
    }

    @functools.partial(jax.jit, static_argnames=("dtype", "rounds"))
    def moved(dtype: str, rounds: bool) -> Any:
        def one(carry: Any, step: jax.Array) -> tuple[Any, None]:
            w, state = carry
            seed = jnp.uint32(0) if rounds else None
            gradients = {n: g.astype(dtype) for n, g in grads.items()}
            new = optimizer.apply_gradients(
                tx, gradients, state, w, factors=factors, hyper=hyper, rounding_seed=seed, step=step
            )
            return jax.tree.map(lambda after, before: after.astype(before.dtype), new, carry), None

        w = {n: x.astype(dtype) for n, x in ones.items()}
        (w, state), _ = jax.lax.scan(one, (w, tx.init(w)), jnp.arange(100))
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(state) if leaf.ndim)
        return {n: jnp.mean(x.astype(jnp.float32) - 1) for n, x in w.items()}

    want, got, nearest = moved("float32", False), moved("bfloat16", True), moved("bfloat16", False)
    still = 0
    for n, move in want.items():
        error = 0.02 / ones[n].size ** 0.5 + 0.02 * abs(
            float(move)
        )  # of chance, and of the numbers
        assert float(got[n]) == pytest.approx(float(move), abs=error), n
        still += float(nearest[n]) == 0
    assert still > 0, "the control: rounded to the nearest, parameters stay where they are"


def test_a_step_rounds_by_seed_and_step_alone() -> None:
    step, (state, inputs) = compiled(BFLOAT16), start_of(BFLOAT16)
    after = [step(copied(state), inputs, batch_of())[0] for _ in range(2)]
    other = step(copied(state), inputs._replace(rounding_seed=np.uint32(1)), batch_of())[0]
    later = step(copied(state._replace(step=state.step + 1)), inputs, batch_of())[0]
    for name, first in after[0].params.items():
        np.testing.assert_array_equal(first, after[1].params[name])
    for changed in (other, later):
        assert any(np.any(changed.params[name] != w) for name, w in after[0].params.items())
    assert program_of().inputs.rounding_seed is None, "float32 runs round nothing"


def test_gradients_of_microbatches_are_summed_in_float32() -> None:
    model = dataclasses.replace(DECODER, compute=ComputeConfig(param_dtype="bfloat16"))
    config = dataclasses.replace(
        CONFIG, model=model, data=dataclasses.replace(CONFIG.data, batch_size=64)
    )
    program, (state, inputs) = program_of(config), start_of(config)
    wide = {name: w.astype(jnp.float32) for name, w in state.params.items()}

    @functools.partial(jax.jit, static_argnums=1)
    def gradients(params: Any, parts: int) -> Any:
        return steps.gradients(program.definition, params, inputs, batch, parts)[0]

    batch = batch_of(config)
    want, got = gradients(wide, 1), gradients(state.params, 64)
    # 0.0055, as of one batch; summed in bfloat16 it was 0.015.
    assert (
        max(float(jnp.linalg.norm(got[n] - w) / jnp.linalg.norm(w)) for n, w in want.items())
        < 0.008
    )
