"""Every preset, model family and optimizer: a model and its first step have the declared numbers.

The expected update is computed in NumPy from the gradient and `preset.scales`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mupax import presets
from mupax.presets import EMBEDDINGS, VECTORS, ParamSpec, Preset, PresetError, Role
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.factors import hyperparams, init_stds, resolve
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs, make_train_step
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import Definition, definition, normals
from tests.fixtures.tiny import batch_of

SCAN = ComputeConfig(layers="scan")  # compiles in half the time
MODELS: dict[str, ModelConfig] = {
    "decoder": DecoderConfig(
        width=24, num_heads=4, num_kv_heads=2, depth=3, vocab_size=11, seq_len=5,
        positions="rotary", activation="swiglu", compute=SCAN,
    ),
    "vit": ViTConfig(
        width=20, num_heads=4, depth=3, image_size=6, patch_size=3, channels=1, num_classes=7,
        pool="cls-mean", qk_norm=True, registers=1, layer_scale=0.5, compute=SCAN,
    ),
}  # fmt: skip
BASE = {"embed": 6, "heads": 2, "kv_heads": 1, "head_dim": 3, "mlp": 24, "layers": 2}
QUICKLY: Any = {"xla_backend_optimization_level": 0}
"""Compiler options: these programs run for milliseconds and would compile for seconds."""

WEIGHT_DECAY, PEAK, EPS = 0.3, 0.01, 1e-3
SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {},
    "adamw": {},
    "adamw-independent": {"decay": "independent"},
    "sgd": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "muon": {},
    "lion": {},
}
"""Optimizers and their settings."""

STEP_OPTIMIZERS = ("adam", "adamw")
"""Optimizers of the compiled step, because decay is data. Others compile their update alone."""

CASES = [
    (name, optimizer_name)
    for name, make in presets.PRESETS.items()
    for optimizer_name in SETTINGS
    if optimizer_name.partition("-")[0] in make().optimizers
]
VIT_OPTIMIZERS = ("adam", "adamw", "sgd", "muon")
"""One optimizer for each rate of a table. The other chains do not read roles; the decoder has them."""


def preset_of(name: str) -> Preset:
    return presets.get(name, base=None if presets.get(name).baseless else BASE)


@functools.cache
def built(family: str) -> Definition:
    return definition(MODELS[family])


class FirstStep(NamedTuple):
    """One step from fresh parameters, on the host."""

    before: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    loss: np.ndarray


@functools.cache
def initializer(family: str) -> Any:
    return jax.jit(functools.partial(built(family).initialize, draw=normals))


def recording(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with the last gradients in its state, after the optimizer's own."""

    def init(params: Any) -> Any:
        return tx.init(params), params

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        moves, inner = tx.update(updates, state[0], params, **extra)
        return moves, (inner, updates)

    return optax.GradientTransformationExtraArgs(init, update)


@functools.cache
def step_program(family: str) -> Any:
    """Return (params, inputs, batch) -> gradients, new parameters, loss, for every preset.

    The optimizer is AdamW.
    """
    tx = recording(optimizer.build(config_of("adamw"), built(family).specs))
    step = make_train_step(built(family), tx)

    def run(params: Any, inputs: StepInputs, batch: Any) -> Any:
        state = TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))
        after, metrics = step(state, inputs, batch)
        return after.opt_state[1], after.params, metrics["loss"]

    return jax.jit(run, compiler_options=QUICKLY)


@functools.cache
def update_program(family: str, optimizer_name: str) -> Any:
    """Return (params, gradients, inputs) -> new parameters: the part of a step by optimizer."""
    tx = optimizer.build(config_of(optimizer_name), built(family).specs)

    def run(params: Any, gradients: Any, inputs: StepInputs) -> Any:
        step = jnp.zeros([], jnp.int32)
        after, _ = optimizer.apply_gradients(
            tx,
            gradients,
            tx.init(params),
            params,
            factors=inputs.factors,
            hyper=inputs.hyper.at(step),
            rounding_seed=inputs.rounding_seed,
            step=step,
        )
        return after

    return jax.jit(run, compiler_options=QUICKLY)


def first_step(family: str, optimizer_name: str, preset: Preset) -> FirstStep:
    model = built(family)
    config = config_of(optimizer_name)
    factors = resolve(preset, model, config.name, config.decay)
    inputs = StepInputs(factors, hyperparams(config, 3))
    before = initializer(family)(3, init_stds(preset, model))
    batch = batch_of(MODELS[family], rows=3)
    gradients, after, loss = step_program(family)(before, inputs, batch)
    if optimizer_name not in STEP_OPTIMIZERS:
        after = update_program(family, optimizer_name)(before, gradients, inputs)
    return FirstStep(*jax.device_get((before, gradients, after, loss)))


def config_of(optimizer_name: str) -> OptimizerConfig:
    name: Any = optimizer_name.partition("-")[0]
    return OptimizerConfig(
        name=name,
        schedule="constant",
        peak_lr=PEAK,
        weight_decay=WEIGHT_DECAY,
        eps=EPS,
        **SETTINGS[optimizer_name],
    )


def first_direction(
    optimizer_name: str, spec: ParamSpec, gradient: np.ndarray, eps: float
) -> np.ndarray:
    """Return the optimizer's first update before learning rate and decay."""
    if optimizer_name in ("sgd", "momentum"):
        return gradient
    if optimizer_name == "lion":
        return np.sign(gradient)
    if optimizer_name == "muon" and spec.role not in VECTORS | EMBEDDINGS | {Role.READOUT}:
        return orthogonal(spec, gradient)
    return gradient / (np.abs(gradient) + eps)


def orthogonal(spec: ParamSpec, gradient: np.ndarray) -> np.ndarray:
    """Return five steps of Newton-Schulz on each layer's fan-in by fan-out matrix, in float64."""
    fan_in = math.prod(gradient.shape[spec.axes.index(axis)] for axis in spec.fan_in)
    layers = []
    for layer in gradient.astype(np.float64):
        x = layer.reshape(fan_in, -1)
        flipped = x.shape[0] > x.shape[1]
        x = x.T if flipped else x
        x = x / (np.linalg.norm(x) + 1e-8)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        layers.append((x.T if flipped else x).reshape(layer.shape))
    return np.stack(layers)


def expected_update(
    optimizer_name: str, preset: Preset, family: str, name: str, step: FirstStep
) -> np.ndarray:
    """Return a parameter's first update by the numbers that the preset declares."""
    config = config_of(optimizer_name)
    model = built(family)
    spec = model.specs[name]
    scales: Any = preset.scales(spec, model.sizes, config.name, config.decay)
    direction = first_direction(optimizer_name, spec, step.gradients[name], scales.eps * EPS)
    weight_decay = 0.0 if optimizer_name == "adam" else WEIGHT_DECAY
    decay = weight_decay * scales.weight_decay * step.before[name]
    if config.decay == "coupled":
        return -PEAK * scales.lr * (direction + decay)
    return -PEAK * scales.lr * direction - decay


@pytest.mark.parametrize(
    ("name", "optimizer_name", "family"),
    [
        (*case, family)
        for family in MODELS
        for case in CASES
        if family == "decoder" or case[1] in VIT_OPTIMIZERS
    ],
)
def test_initialization_and_first_update_are_the_declared_ones(
    name: str, optimizer_name: str, family: str
) -> None:
    model = built(family)
    preset = preset_of(name)
    config = config_of(optimizer_name)
    step = first_step(family, optimizer_name, preset)
    assert np.isfinite(step.loss)
    for key, spec in model.specs.items():
        before = step.before[key]
        gradient = np.abs(step.gradients[key])
        init_std = preset.scales(spec, model.sizes, config.name, config.decay).init_std
        # n normal entries have a std within 5/sqrt(2n) of the true one; gains and biases are exact.
        if spec.role in VECTORS:
            np.testing.assert_allclose(before, init_std, rtol=1e-6)
        else:
            error = 5 / np.sqrt(2 * before.size)
            assert np.sqrt(np.mean(before**2)) == pytest.approx(init_std, rel=error), key

        expected = expected_update(optimizer_name, preset, family, key, step)
        largest = np.abs(expected).max()
        # float32: the sum keeps the update to half a unit in the last place of the parameter.
        tolerance = 2e-7 * np.abs(before)
        tolerance = tolerance + (2e-3 if optimizer_name == "muon" else 2e-6) * largest
        difference = np.abs(step.after[key] - before - expected)
        agree = difference <= tolerance
        if optimizer_name == "lion":  # a gradient that is 0 but for rounding has no sign
            agree |= gradient < 1e-5 * gradient.max()
        assert agree.all(), (key, difference.max(), largest)
        assert spec.role is Role.NORM_GAIN or largest > 0, key


def test_control_a_rate_five_percent_off_is_seen() -> None:
    preset = preset_of("mup")

    def off(spec: ParamSpec) -> Any:
        row = preset.rule(spec)
        return row.times(adam=1.05) if spec.role is Role.MLP_OUT else row

    step = first_step("decoder", "adamw", dataclasses.replace(preset, rule=off))
    name = "block.mlp.down"
    expected = expected_update("adamw", preset, "decoder", name, step)
    difference = np.abs(step.after[name] - step.before[name] - expected)
    assert difference.max() > 1e-2 * np.abs(expected).max()


def test_tied_readouts_train_or_are_refused_with_the_reason() -> None:
    model = definition(dataclasses.replace(MODELS["decoder"], tied=True, bias=False))
    config = config_of("adamw")
    tx = optimizer.build(config, model.specs)
    step = make_train_step(model, tx)

    @jax.jit
    def losses(stds: Any, inputs: StepInputs, batch: Any) -> jax.Array:
        """Return the losses of five steps."""

        def train(state: TrainState, _: None) -> Any:
            state, metrics = step(state, inputs, batch)
            return state, metrics["loss"]

        params = model.initialize(0, stds)
        state = TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))
        return jax.lax.scan(train, state, None, 5)[1]

    refused = {}
    batch = batch_of(MODELS["decoder"], rows=3)
    for name in presets.PRESETS:
        preset = preset_of(name)
        try:
            factors = resolve(preset, model, "adamw")
        except PresetError as error:
            refused[name] = str(error)
            continue
        inputs = StepInputs(factors, hyperparams(config, 5))
        curve = np.asarray(losses(init_stds(preset, model), inputs, batch))
        assert np.isfinite(curve).all(), name
        assert curve[-1] < curve[0], name
    assert refused.keys() == {"u-mup", "sp-layerwise"}
    for text in refused.values():
        assert re.search("a tied readout would need two rates.*untie it$", text)


@pytest.mark.parametrize("optimizer_name", ["adam", "sgd", "muon", "lion"])
@pytest.mark.parametrize("family", MODELS)
def test_at_base_size_every_preset_has_the_numbers_of_sp(family: str, optimizer_name: str) -> None:
    """From the same parameters they then train to the same bits: one program, equal inputs."""
    model = built(family)
    base = {axis: size for axis, size in model.sizes.items() if axis in BASE}
    expected = resolve(presets.get("sp", base=base), model, optimizer_name)
    for name, make in presets.PRESETS.items():
        if make().baseless or optimizer_name not in make().optimizers:
            continue
        factors = resolve(presets.get(name, base=base), model, optimizer_name)
        jax.tree.map(np.testing.assert_array_equal, factors, expected)
        assert all((x == 1).all() for x in factors.lr.values()), name


def test_the_conversion_of_section_2_gives_the_same_function_at_initialization() -> None:
    """c_A = N_base^(1/2-aa), beta = beta0 L_base^-al, gamma = gamma0 sqrt(D_base)."""
    base = ViTConfig(
        width=6, num_heads=3, depth=2, image_size=4, patch_size=2, channels=1, num_classes=5,
        qk_norm=True, bias=False, compute=SCAN,
    )  # fmt: skip
    grown = dataclasses.replace(base, width=20, num_heads=5, depth=7)
    sizes = base.base_sizes()
    aa = 0.75
    al = 0.5
    beta0 = 4.0
    gamma0 = 0.25
    absolute = presets.get("depth-mup", alpha_a=aa, alpha_l=al, beta0=beta0, gamma0=gamma0)
    relative = presets.get(
        "depth-mup", base=sizes, alpha_a=aa, alpha_l=al, c_a=2 ** (0.5 - aa), beta0=beta0 * 2**-al,
        gamma0=gamma0 * 6**0.5,
    )  # fmt: skip
    unconverted = presets.get("depth-mup", base=sizes)
    model = definition(grown)
    initialize = jax.jit(model.initialize)
    apply = jax.jit(model.apply)
    images = batch_of(grown, rows=3)["inputs"]

    def outputs(preset: Preset) -> np.ndarray:
        factors = resolve(preset, model)
        params = initialize(0, init_stds(preset, model))
        return np.asarray(apply(params, factors.multiplier, factors.forward, images))

    expected = outputs(absolute)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(expected, outputs(relative), rtol=2e-4, atol=2e-6)
    assert np.abs(expected - outputs(unconverted)).max() > 0.01  # the control
