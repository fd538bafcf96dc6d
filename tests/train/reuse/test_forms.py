"""Forms and conversions: numbers change, training does not. Sizes are powers of four, so that every theta is a power of
two and float32 multiplies by it without rounding: equal means equal to the bit, but for Muon's own eps.
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
from mupax.presets import FORMS, PresetError, Role
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.factors import hyperparams, init_stds, resolve
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs, make_train_step
from mupax.train.reuse.forms import convert, theta
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ViTConfig
from mupax.zoo.definition import definition
from mupax.zoo.definition import normals as drawn_together

SIZES: Any = {
    "width": 16,
    "num_heads": 4,
    "depth": 4,
    "mlp_ratio": 4,
    "compute": ComputeConfig(layers="scan"),
}
LM = DecoderConfig(**SIZES, vocab_size=11, seq_len=5, qk_norm=True)
VIT = ViTConfig(**SIZES, image_size=4, patch_size=2, channels=1, num_classes=5, pool="cls")
MODELS = {"decoder": LM, "vit": VIT}
TIED = dataclasses.replace(LM, tied=True)
BASE = dataclasses.replace(LM, width=1, num_heads=1, depth=1).base_sizes()
STEPS = 8
QUICKLY: Any = {"xla_backend_optimization_level": 0}
"""Compiler options: these programs run for milliseconds and would compile for seconds."""

CONFIGS = {
    "adamw": OptimizerConfig(
        name="adamw", peak_lr=2e-2, weight_decay=0.1, eps=1e-2, schedule="constant"
    ),
    "adamw-independent": OptimizerConfig(
        name="adamw", peak_lr=2e-2, weight_decay=0.02, decay="independent", schedule="cosine"
    ),
    "adam": OptimizerConfig(name="adam", peak_lr=2e-2, eps=1e-2, schedule="constant"),
    "sgd": OptimizerConfig(
        name="sgd", peak_lr=2e-2, momentum=0.0, weight_decay=0.1, schedule="constant"
    ),
    "momentum": OptimizerConfig(name="momentum", peak_lr=1e-2, weight_decay=0.1, schedule="linear"),
    "lion": OptimizerConfig(name="lion", peak_lr=1e-2, weight_decay=0.1, schedule="constant"),
    "muon": OptimizerConfig(
        name="muon", peak_lr=1e-2, weight_decay=0.1, eps=1e-2, schedule="constant"
    ),
}

PROGRAMS = {"adam": "adamw"}
"""Whose compiled program another takes: decay, eps and schedule are data."""


@functools.cache
def built(family: str):
    return definition(TIED if family == "tied" else MODELS[family])


@functools.cache
def trainer(family: str, name: str):
    """(state, run, batch) -> state and losses after STEPS steps; one program for every preset and form."""
    model = built(family)
    tx = optimizer.build(CONFIGS[name], model.specs)
    step = make_train_step(model, tx)

    def train(state, run, batch):
        def one(state, _):
            state, metrics = step(state, run, batch)
            return state, metrics["loss"]

        return jax.lax.scan(one, state, None, length=STEPS)

    return jax.jit(train, compiler_options=QUICKLY), tx


@functools.cache
def batch(family: str):
    rng = np.random.default_rng(0)
    if family in ("decoder", "tied"):
        inputs, targets = rng.integers(0, 11, (3, 5)), rng.integers(0, 11, (3, 5))
        return {
            "inputs": inputs.astype(np.int32),
            "targets": targets.astype(np.int32),
            "weights": np.ones((3, 5), np.float32),
        }
    images, labels = (
        rng.normal(size=(3, 4, 4, 1)).astype(np.float32),
        rng.integers(0, 5, 3).astype(np.int32),
    )
    return {"inputs": images, "targets": labels, "weights": np.ones(3, np.float32)}


@functools.cache
def normals(family: str):
    """Initial parameters at std 1, as `initialize` draws them; gains 1, biases 0."""
    model = built(family)
    stds = {name: np.float32(spec.role is not Role.BIAS) for name, spec in model.specs.items()}
    return jax.device_get(
        jax.jit(functools.partial(model.initialize, draw=drawn_together))(0, stds)
    )


def start(family: str, name: str, preset: presets.Preset) -> tuple[TrainState, StepInputs]:
    model, config = built(family), CONFIGS[name]
    stds = init_stds(preset, model)
    params = {
        n: w * stds[n].reshape(stds[n].shape + (1,) * (w.ndim - stds[n].ndim))
        for n, w in normals(family).items()
    }
    run = StepInputs(resolve(preset, model, config.name, config.decay), hyperparams(config, STEPS))
    return TrainState(jnp.zeros([], jnp.int32), params, trainer(family, name)[1].init(params)), run


def effective(state: TrainState, run: StepInputs) -> dict[str, np.ndarray]:
    """multiplier * w: what the model computes with."""
    a = run.factors.multiplier
    return {
        n: np.asarray(w) * a[n].reshape(a[n].shape + (1,) * (w.ndim - a[n].ndim))
        for n, w in state.params.items()
    }


def preset_of(name: str, form: presets.Form | None = None, **constants) -> presets.Preset:
    baseless = presets.get(name, **constants).baseless
    return presets.get(name, base=None if baseless else BASE, form=form, **constants)


VIT_OPTIMIZERS = ("adamw", "sgd", "muon")
"""One of each kind: a vision transformer differs in its parameters, which no optimizer knows."""
SAME = {("sp", "table-9")}
"""Forms whose numbers are the native ones: sp has one SGD rate already."""

CASES = [
    (name, optimizer_name)
    for name in presets.PRESETS
    for optimizer_name in CONFIGS
    if optimizer_name.split("-")[0] in presets.get(name).optimizers
]


@pytest.mark.parametrize(
    ("name", "optimizer_name", "family"),
    [
        (*case, family)
        for family in MODELS
        for case in CASES
        if family == "decoder" or case[1] in VIT_OPTIMIZERS
    ],
)
def test_forms_train_identically(name: str, optimizer_name: str, family: str):
    preset = preset_of(name)
    train, _ = trainer(family, PROGRAMS.get(optimizer_name, optimizer_name))
    ends = {}
    for form in FORMS:
        if form == "table-9" and "sgd" not in preset.optimizers:
            continue
        state, run = start(family, optimizer_name, preset.with_form(form))
        state, losses = train(state, run, batch(family))
        ends[form] = (np.asarray(losses), effective(state, run), run)
    native, forms = ends[preset.native_form], [form for form in ends if form != preset.native_form]
    assert forms
    assert native[0][0] != native[0][-1]
    for form in forms:
        losses, params, run = ends[form]
        differ = any(
            (run.factors.multiplier[n] != native[2].factors.multiplier[n]).any() for n in params
        )
        assert differ or (name, form) in SAME, form
        thetas = [run.factors.multiplier[n] / native[2].factors.multiplier[n] for n in params]
        exact = all((np.frexp(t)[0] == 0.5).all() for t in thetas)
        assert (
            exact or name == "hybrid" or (name, form) == ("sp-layerwise", "table-9")
        )  # exponents of 1/4
        if (
            optimizer_name == "muon" or not exact
        ):  # Muon's 1e-8 beside the gradient's norm does not move with theta
            np.testing.assert_allclose(losses, native[0], rtol=2e-4)
        else:
            np.testing.assert_array_equal(losses, native[0], err_msg=form)
            for n, w in params.items():
                np.testing.assert_array_equal(w, native[1][n], err_msg=f"{form} {n}")


@pytest.mark.parametrize("column", ["eps", "lr", "weight_decay", "multiplier"])
def test_control_a_column_that_does_not_move_is_seen(column: str):
    preset = preset_of("depth-mup")
    train, _ = trainer("decoder", "adamw")
    losses = {}
    for form in ("readout-multiplier", "plain", "broken"):
        state, run = start(
            "decoder", "adamw", preset.with_form("plain" if form == "broken" else form)
        )
        if form == "broken":
            factors = start("decoder", "adamw", preset)[1].factors
            run = run._replace(factors=run.factors._replace(**{column: getattr(factors, column)}))
        losses[form] = np.asarray(train(state, run, batch("decoder"))[1])
    np.testing.assert_array_equal(losses["plain"], losses["readout-multiplier"])
    assert np.abs(losses["broken"] - losses["plain"]).max() > 1e-5


@pytest.mark.parametrize(
    "constants", [{"alpha_a": 0.75, "alpha_l": 0.75}, {"gamma0": 0.3, "beta0": 1.7}]
)
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
def test_forms_agree_to_rounding_where_theta_is_no_power_of_two(
    optimizer_name: str, constants: dict
):
    train, _ = trainer("decoder", optimizer_name)
    losses = []
    for form in FORMS:
        preset = presets.get(
            "depth-mup",
            base=BASE | {"embed": 5, "head_dim": 3, "layers": 3},
            form=form,
            **constants,
        )
        losses.append(
            np.asarray(train(*start("decoder", optimizer_name, preset), batch("decoder"))[1])
        )
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-4)


# Equivalences between presets: one trajectory, to the bit, and a control that has another


def end(
    preset: presets.Preset, optimizer_name: str, family: str = "decoder", **columns
) -> tuple[np.ndarray, dict]:
    """Losses and effective weights of a run, some columns of its factors replaced."""
    state, run = start(family, optimizer_name, preset)
    run = run._replace(factors=run.factors._replace(**columns))
    state, losses = trainer(family, optimizer_name)[0](state, run, batch(family))
    return np.asarray(losses), effective(state, run)


def assert_same(one: tuple[np.ndarray, dict], other: tuple[np.ndarray, dict]) -> None:
    np.testing.assert_array_equal(one[0], other[0])
    for name, w in one[1].items():
        np.testing.assert_array_equal(w, other[1][name], err_msg=name)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
def test_maximal_update_is_mup_in_plain_form_but_for_the_logits(optimizer_name: str, family: str):
    expected = end(preset_of("mup", "plain"), optimizer_name, family)
    assert_same(
        end(preset_of("maximal-update", alpha_a=1.0, init="fan-in"), optimizer_name, family),
        expected,
    )
    control = end(preset_of("maximal-update", init="fan-in"), optimizer_name, family)
    assert np.abs(control[0] - expected[0]).max() > 1e-5


def test_completep_is_depth_mup_with_its_decay_and_eps():
    preset = preset_of("depth-mup", alpha_a=1.0, alpha_l=1.0)
    expected = end(
        preset_of("completep"), "adamw"
    )  # m_D is 16, m_L 4; a gain of queries or keys sums 4 heads
    specs = built("decoder").specs
    theirs = {
        n: np.float32(
            (4 if n.endswith(("query_norm.gain", "key_norm.gain")) else 1) / 64
            if spec.in_block
            else 1
        )
        for n, spec in specs.items()
    }
    eps = {
        n: np.broadcast_to(theirs[n], x.shape)
        for n, x in start("decoder", "adamw", preset)[1].factors.eps.items()
    }
    assert_same(end(preset, "adamw", eps=eps), expected)
    assert np.abs(end(preset, "adamw")[0] - expected[0]).max() > 1e-5


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd", "muon"])
def test_spectral_is_mup_where_matrices_keep_their_proportions(optimizer_name: str, family: str):
    expected = end(preset_of("mup", "plain"), optimizer_name, family)
    assert_same(end(preset_of("spectral"), optimizer_name, family), expected)
    control = end(preset_of("mup-half", "plain"), optimizer_name, family)
    assert np.abs(control[0] - expected[0]).max() > 1e-5


def test_tables_3_8_and_9_have_one_trajectory():
    """Tensor Programs V: a table is a form of mup. Adam's columns; SGD's are in the test of forms."""
    for family in MODELS:
        plain = end(preset_of("mup", "plain"), "adamw", family)
        for form in ("readout-multiplier", "table-9"):
            assert_same(end(preset_of("mup", form), "adamw", family), plain)


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
def test_forms_train_a_tied_readout_identically(optimizer_name: str):
    """It reads the table as the forward pass does, multiplier included: a form that moves the table leaves it alone."""
    expected = end(preset_of("mup"), optimizer_name, "tied")
    for form in ("mean-field", "table-9"):
        assert_same(end(preset_of("mup", form), optimizer_name, "tied"), expected)


# Conversion of checkpoints


@pytest.mark.parametrize("optimizer_name", [name for name in CONFIGS if name not in PROGRAMS])
def test_a_checkpoint_goes_on_in_another_form(optimizer_name: str):
    """Steps in plain form, converted, as many in the other form: as twice as many plain."""
    model, (train, _) = built("decoder"), trainer("decoder", optimizer_name)
    config = CONFIGS[optimizer_name]
    plain = preset_of("depth-mup", "plain")
    state, run = start("decoder", optimizer_name, plain)
    middle, _ = train(state, run, batch("decoder"))
    straight, expected = train(middle, run, batch("decoder"))
    for form in ("readout-multiplier", "mean-field", "table-9"):
        after = plain.with_form(form)
        moved = convert(middle, model, plain, after, config.name)
        moved_run = start("decoder", optimizer_name, after)[1]
        end, losses = train(moved, moved_run, batch("decoder"))
        np.testing.assert_allclose(losses, expected, rtol=2e-4 if optimizer_name == "muon" else 0)
        back = convert(end, model, after, plain, config.name)
        exact = optimizer_name != "muon"
        for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(straight), strict=True):
            np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-4)


def test_control_moments_left_behind_are_seen():
    model, (train, _) = built("decoder"), trainer("decoder", "adamw")
    plain = preset_of("depth-mup", "plain")
    after = plain.with_form("mean-field")
    state, run = start("decoder", "adamw", plain)
    middle, _ = train(state, run, batch("decoder"))
    expected = np.asarray(train(middle, run, batch("decoder"))[1])
    moved = convert(middle, model, plain, after, "adamw")._replace(opt_state=middle.opt_state)
    losses = np.asarray(train(moved, start("decoder", "adamw", after)[1], batch("decoder"))[1])
    assert np.abs(losses - expected).max() > 1e-3


def test_conversion_refuses_another_parameterization():
    with pytest.raises(
        PresetError,
        match=r"lr is not what the multiplier's change asks for, so mup .* is another parameterization",
    ):
        theta(built("decoder"), preset_of("depth-mup"), preset_of("mup"))
