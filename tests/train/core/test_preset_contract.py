"""Every preset x model family x optimizer it has a rule for: what it declares is what a model and its first step do.

The expected update is worked out here in NumPy from the gradient and `preset.scales`, not through mupax.train.core.optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.presets import EMBEDDINGS, VECTORS, Preset, PresetError, Role
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.factors import hyperparams, init_stds, resolve
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs, gradients, make_train_step
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import definition, normals

SCAN = ComputeConfig(layers="scan")  # compiles in half the time
MODELS: dict[str, ModelConfig] = {
    "decoder": DecoderConfig(
        width=24, num_heads=4, num_kv_heads=2, depth=3, vocab_size=11, seq_len=5, positions="rotary", activation="swiglu",
        compute=SCAN,
    ),
    "vit": ViTConfig(width=20, num_heads=4, depth=3, image_size=6, patch_size=3, channels=1, num_classes=7, pool="cls-mean", qk_norm=True,
                     registers=1, layer_scale=0.5, compute=SCAN),
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
"""Optimizers, and what makes each its own."""

PROGRAMS = {"adam": "adamw"}
"""Whose compiled program another takes: decay is data."""

CASES = [
    (name, optimizer_name)
    for name, make in presets.PRESETS.items()
    for optimizer_name in SETTINGS
    if optimizer_name.partition("-")[0] in make().optimizers
]
VIT_OPTIMIZERS = ("adam", "adamw", "sgd", "muon")
"""One of each rate that a table has; the others' chains know no roles, and the decoder has them with every preset."""


def preset_of(name: str) -> Preset:
    return presets.get(name, base=None if presets.get(name).baseless else BASE)


@functools.cache
def built(family: str):
    return definition(MODELS[family])


def batch_of(family: str) -> dict[str, np.ndarray]:
    rng, model = np.random.default_rng(1), MODELS[family]
    if isinstance(model, DecoderConfig):
        tokens = rng.integers(0, model.vocab_size, (3, model.seq_len + 1)).astype(np.int32)
        return {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": np.ones((3, model.seq_len), np.float32),
        }
    assert isinstance(model, ViTConfig)
    images = rng.normal(size=(3, model.image_size, model.image_size, model.channels)).astype(
        np.float32
    )
    return {
        "inputs": images,
        "targets": rng.integers(0, 7, 3).astype(np.int32),
        "weights": np.ones(3, np.float32),
    }


@functools.cache
def initializer(family: str):
    return jax.jit(functools.partial(built(family).initialize, draw=normals))


def first_step(family: str, name: str, preset: Preset) -> Any:
    """Parameters before, gradients, parameters after and loss of one step from a fresh start."""
    model = built(family)
    config = config_of(name)
    run = StepInputs(resolve(preset, model, config.name, config.decay), hyperparams(config, 3))
    before = initializer(family)(3, init_stds(preset, model))
    return jax.device_get(
        (before, *stepper(family, PROGRAMS.get(name, name))(before, run, batch_of(family)))
    )


@functools.cache
def stepper(family: str, name: str):
    """(params, run, batch) -> gradients, parameters after, loss; one program for every preset."""
    model, config = built(family), config_of(name)
    tx = optimizer.build(config, model.specs)
    step = make_train_step(model, tx)

    def run_once(params, run, batch):
        grads, _ = gradients(model, params, run, batch, 1)
        after, metrics = step(
            TrainState(jnp.zeros([], jnp.int32), params, tx.init(params)), run, batch
        )
        return grads, after.params, metrics["loss"]

    return jax.jit(run_once, compiler_options=QUICKLY)


def config_of(name: str) -> OptimizerConfig:
    settings: dict[str, Any] = {
        "name": name.partition("-")[0],
        "schedule": "constant",
        **SETTINGS[name],
    }
    return OptimizerConfig(peak_lr=PEAK, weight_decay=WEIGHT_DECAY, eps=EPS, **settings)


def first_direction(name: str, spec: presets.ParamSpec, g: np.ndarray, eps: float) -> np.ndarray:
    """What the optimizer makes of its first gradient, before rate and decay."""
    if name in ("sgd", "momentum"):
        return g
    if name == "lion":
        return np.sign(g)
    if name == "muon" and spec.role not in VECTORS | EMBEDDINGS | {Role.READOUT}:
        return orthogonal(spec, g)
    return g / (np.abs(g) + eps)


def orthogonal(spec: presets.ParamSpec, g: np.ndarray) -> np.ndarray:
    """Newton-Schulz, five steps, of each layer's fan-in by fan-out matrix, in float64."""
    fan_in = int(np.prod([g.shape[spec.axes.index(axis)] for axis in spec.fan_in]))
    out = []
    for layer in g.astype(np.float64):
        x = layer.reshape(fan_in, -1)
        flipped = x.shape[0] > x.shape[1]
        x = x.T if flipped else x
        x = x / (np.linalg.norm(x) + 1e-8)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        out.append((x.T if flipped else x).reshape(layer.shape))
    return np.stack(out)


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
):
    model, preset, config = built(family), preset_of(name), config_of(optimizer_name)
    before, grads, after, loss = first_step(family, optimizer_name, preset)
    assert np.isfinite(loss)
    decay = 0.0 if optimizer_name == "adam" else WEIGHT_DECAY
    for key, spec in model.specs.items():
        scales: Any = preset.scales(spec, model.sizes, config.name, config.decay)
        w, g, size = before[key], grads[key], before[key].size
        # Initialization: n normal entries have a std within 5/sqrt(2n) of the true one; gains and biases are exact.
        if spec.role in VECTORS:
            np.testing.assert_allclose(w, scales.init_std, rtol=1e-6)
        else:
            assert np.sqrt(np.mean(w**2)) == pytest.approx(
                scales.init_std, rel=5 / np.sqrt(2 * size)
            ), key
        direction = first_direction(optimizer_name, spec, g, scales.eps * EPS)
        pull = decay * scales.weight_decay * w
        coupled = config.decay == "coupled"
        expected = (
            -PEAK * scales.lr * (direction + pull)
            if coupled
            else -PEAK * scales.lr * direction - pull
        )
        update = after[key] - w
        # float32: w + update keeps the update to half a unit in the last place of w.
        tolerance = (
            2e-7 * np.abs(w) + (2e-3 if optimizer_name == "muon" else 2e-6) * np.abs(expected).max()
        )
        agree = np.abs(update - expected) <= tolerance
        if optimizer_name == "lion":  # a gradient that is 0 but for rounding has no sign
            agree |= np.abs(g) < 1e-5 * np.abs(g).max()
        assert agree.all(), (key, np.abs(update - expected).max(), np.abs(expected).max())
        assert spec.role is Role.NORM_GAIN or np.abs(expected).max() > 0, key


def test_control_a_rate_five_percent_off_is_seen():
    preset = preset_of("mup")

    def off(spec):
        row = preset.rule(spec)
        return row.times(adam=1.05) if spec.role is Role.MLP_OUT else row

    model = built("decoder")
    before, grads, after, _ = first_step("decoder", "adamw", dataclasses.replace(preset, rule=off))
    key = "block.mlp.down"
    scales: Any = preset.scales(model.specs[key], model.sizes, "adamw")
    direction = first_direction("adamw", model.specs[key], grads[key], scales.eps * EPS)
    expected = -PEAK * scales.lr * (direction + WEIGHT_DECAY * scales.weight_decay * before[key])
    assert np.abs(after[key] - before[key] - expected).max() > 1e-2 * np.abs(expected).max()


def test_tied_readouts_train_or_are_refused_with_the_reason():
    tied = dataclasses.replace(MODELS["decoder"], tied=True)
    model = definition(tied)
    config = config_of("adamw")
    tx = optimizer.build(config, model.specs)

    @jax.jit
    def losses(stds: Any, run: StepInputs, batch: Any):
        params = model.initialize(0, stds)
        state = TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))
        return jax.lax.scan(
            lambda s, _: (lambda out: (out[0], out[1]["loss"]))(
                make_train_step(model, tx)(s, run, batch)
            ),
            state,
            None,
            5,
        )[1]

    refused = {}
    for name in presets.PRESETS:
        preset = preset_of(name)
        try:
            run = StepInputs(resolve(preset, model, "adamw"), hyperparams(config, 5))
        except PresetError as error:
            refused[name] = str(error)
            continue
        curve = np.asarray(losses(init_stds(preset, model), run, batch_of("decoder")))
        assert np.isfinite(curve).all(), name
        assert curve[-1] < curve[0], name
    assert refused.keys() == {"u-mup", "sp-layerwise"}
    assert all(
        "a tied readout would need two rates" in text and text.endswith("untie it")
        for text in refused.values()
    )


@pytest.mark.parametrize("optimizer_name", ["adam", "sgd", "muon", "lion"])
@pytest.mark.parametrize("family", MODELS)
def test_at_base_size_every_preset_has_the_numbers_of_sp(family: str, optimizer_name: str):
    """So that, from the same parameters, they train to the same bits: the program is one and its inputs are equal."""
    model = built(family)
    base = {axis: size for axis, size in model.sizes.items() if axis in BASE}
    expected = resolve(presets.get("sp", base=base), model, optimizer_name)
    for name, make in presets.PRESETS.items():
        if make().baseless or optimizer_name not in make().optimizers:
            continue
        factors = resolve(presets.get(name, base=base), model, optimizer_name)
        jax.tree.map(np.testing.assert_array_equal, factors, expected)
        assert all((x == 1).all() for x in factors.lr.values()), name


RELATIVE_BASE = ViTConfig(
    width=6,
    num_heads=3,
    depth=2,
    image_size=4,
    patch_size=2,
    channels=1,
    num_classes=5,
    qk_norm=True,
)
RELATIVE_GROWN = dataclasses.replace(RELATIVE_BASE, width=20, num_heads=5, depth=7)


def test_the_conversion_of_section_2_gives_the_same_function_at_initialization():
    """c_A = N_base^(1/2-aa), beta = beta0 L_base^-al, gamma = gamma0 sqrt(D_base), and nothing else."""
    aa, al, beta0, gamma0 = 0.75, 0.5, 4.0, 0.25
    absolute = presets.get("depth-mup", alpha_a=aa, alpha_l=al, beta0=beta0, gamma0=gamma0)
    relative = presets.get(
        "depth-mup", base=RELATIVE_BASE.base_sizes(), alpha_a=aa, alpha_l=al,
        c_a=2 ** (0.5 - aa), beta0=beta0 * 2**-al, gamma0=gamma0 * 6**0.5,
    )  # fmt: skip
    outputs, model = [], definition(RELATIVE_GROWN)
    images = np.random.default_rng(0).normal(size=(3, 4, 4, 1)).astype(np.float32)
    for preset in (absolute, relative, presets.get("depth-mup", base=RELATIVE_BASE.base_sizes())):
        factors, stds = resolve(preset, model), init_stds(preset, model)
        params = jax.jit(model.initialize)(0, stds)
        outputs.append(
            np.asarray(jax.jit(model.apply)(params, factors.multiplier, factors.forward, images))
        )
    assert np.abs(outputs[0]).max() > 0.01
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=2e-4, atol=2e-6)
    assert (
        np.abs(outputs[0] - outputs[2]).max() > 0.01
    )  # the control: unconverted constants are another function
