"""Forms and conversions of checkpoints: parameters change, training does not.

Sizes are powers of four, so that every theta is a power of two, and float32 multiplies by it
without rounding. Equal means equal to the bit, but for Muon's own eps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets
from mupax.presets import FORMS, Form, Preset, PresetError, Role
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.factors import hyperparams, init_stds, resolve
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs, gradients
from mupax.train.reuse.forms import convert, theta
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ViTConfig
from mupax.zoo.definition import definition

SIZES: Any = {
    "width": 16,
    "num_heads": 4,
    "depth": 4,
    "mlp_ratio": 4,
    "compute": ComputeConfig(layers="scan"),
}
LM = DecoderConfig(**SIZES, vocab_size=11, seq_len=5, qk_norm=True)
VIT = ViTConfig(**SIZES, image_size=4, patch_size=2, channels=1, num_classes=5, pool="cls")
FAMILIES = ("decoder", "vit")
MODELS = {"decoder": LM, "vit": VIT, "tied": dataclasses.replace(LM, tied=True)}
BASE = dataclasses.replace(LM, width=1, num_heads=1, depth=1).base_sizes()
STEPS = 4
QUICKLY: Any = {"xla_backend_optimization_level": 0}
"""Compiler options: these programs run for milliseconds and would compile for seconds."""


def config_of(name: str, peak_lr: float, **fields: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"name": name, "peak_lr": peak_lr, "schedule": "constant", **fields})


CONFIGS = {
    "adamw": config_of("adamw", 2e-2, weight_decay=0.1, eps=1e-2),
    "adamw-independent": config_of(
        "adamw", 2e-2, weight_decay=0.02, decay="independent", schedule="cosine"
    ),
    "adam": config_of("adam", 2e-2, eps=1e-2),
    "sgd": config_of("sgd", 2e-2, momentum=0.0, weight_decay=0.1),
    "momentum": config_of("momentum", 1e-2, weight_decay=0.1, schedule="linear"),
    "lion": config_of("lion", 1e-2, weight_decay=0.1),
    "muon": config_of("muon", 1e-2, weight_decay=0.1, eps=1e-2),
}


@functools.cache
def built(family: str) -> Any:
    return definition(MODELS[family])


@functools.cache
def optimizer_of(family: str, name: str) -> Any:
    return optimizer.build(CONFIGS[name], built(family).specs)


# The gradient is the dear program, so that all presets and optimizers share it.


@functools.cache
def differentiated(family: str) -> Any:
    """Compile (params, inputs, batch) -> gradients and loss, for every preset and optimizer."""

    def differentiate(params: Any, inputs: StepInputs, batch: Any) -> Any:
        grads, sums = gradients(built(family), params, inputs, batch, 1)
        return grads, sums.loss / sums.weight

    return jax.jit(differentiate, compiler_options=QUICKLY)


@functools.cache
def updated(family: str, name: str) -> Any:
    """Compile (state, gradients, inputs) -> state after a step, for every preset."""
    tx = optimizer_of(family, name)

    def update(state: TrainState, grads: Any, inputs: StepInputs) -> TrainState:
        params, moments = optimizer.apply_gradients(
            tx,
            grads,
            state.opt_state,
            state.params,
            factors=inputs.factors,
            hyper=inputs.hyper.at(state.step),
        )
        return TrainState(state.step + 1, params, moments)

    return jax.jit(update, compiler_options=QUICKLY)


@functools.cache
def batch_of(family: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    if family == "vit":
        images = random.normal(size=(3, 4, 4, 1)).astype(np.float32)
        labels = random.integers(0, 5, 3).astype(np.int32)
        return {"inputs": images, "targets": labels, "weights": np.ones(3, np.float32)}
    inputs = random.integers(0, 11, (3, 5)).astype(np.int32)
    targets = random.integers(0, 11, (3, 5)).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones((3, 5), np.float32)}


@functools.cache
def normals(family: str) -> dict[str, np.ndarray]:
    """Return initial parameters at std 1, with gains 1 and biases 0."""
    model = built(family)
    random = np.random.default_rng(1)
    params = {}
    for name, leaf in model.abstract.items():
        match model.specs[name].role:
            case Role.NORM_GAIN:
                params[name] = np.ones(leaf.shape, np.float32)
            case Role.BIAS:
                params[name] = np.zeros(leaf.shape, np.float32)
            case _:
                params[name] = random.standard_normal(leaf.shape, np.float32)
    return params


def times(factors: Any, arrays: Any) -> dict[str, np.ndarray]:
    """Multiply each array by its factor, a number or one per layer."""
    products = {}
    for name, array in arrays.items():
        factor = factors[name]
        shape = factor.shape + (1,) * (array.ndim - factor.ndim)
        products[name] = np.asarray(array) * factor.reshape(shape)
    return products


class Run(NamedTuple):
    """A model and an optimizer under a preset, with the inputs of its train step."""

    family: str
    optimizer: str
    preset: Preset
    inputs: StepInputs

    def start(self) -> TrainState:
        params = times(init_stds(self.preset, built(self.family)), normals(self.family))
        moments = optimizer_of(self.family, self.optimizer).init(params)
        return TrainState(jnp.zeros([], jnp.int32), params, moments)

    def train(self, state: TrainState | None = None) -> tuple[TrainState, np.ndarray]:
        """Train for STEPS steps. Return the state, and the loss of each step."""
        # Decay, eps and schedule are data, so Adam takes AdamW's program.
        name = "adamw" if self.optimizer == "adam" else self.optimizer
        inputs = jax.device_put(self.inputs)
        state = self.start() if state is None else state
        losses = []
        for _ in range(STEPS):
            grads, loss = differentiated(self.family)(state.params, inputs, batch_of(self.family))
            state = updated(self.family, name)(state, grads, inputs)
            losses.append(loss)
        return state, np.stack(losses)

    def end(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the losses, and the weights that the model computes with at the end."""
        state, losses = self.train()
        return losses, times(self.inputs.factors.multiplier, state.params)

    def with_columns(self, **columns: Any) -> Run:
        """Replace columns of the factors."""
        factors = self.inputs.factors._replace(**columns)
        return self._replace(inputs=self.inputs._replace(factors=factors))


def run_of(preset: Preset, optimizer_name: str, family: str = "decoder") -> Run:
    model = built(family)
    config = CONFIGS[optimizer_name]
    factors = resolve(preset, model, config.name, config.decay)
    # With factors of 1 for the skips, every preset takes the program of u-mup.
    ones = np.ones((SIZES["depth"], 2), np.float32)
    factors = factors._replace(forward={"block.skip": ones, **factors.forward})
    inputs = StepInputs(factors, hyperparams(config, STEPS))
    return Run(family, optimizer_name, preset, inputs)


def preset_of(name: str, form: Form | None = None, **constants: Any) -> Preset:
    baseless = presets.get(name, **constants).baseless
    return presets.get(name, base=None if baseless else BASE, form=form, **constants)


def assert_same(run: Run, expected: tuple[np.ndarray, dict[str, np.ndarray]]) -> None:
    """Check that losses and effective weights are equal to the bit."""
    losses, weights = run.end()
    np.testing.assert_array_equal(losses, expected[0], err_msg=run.preset.form)
    for name, w in weights.items():
        np.testing.assert_array_equal(w, expected[1][name], err_msg=f"{run.preset.form} {name}")


def assert_another(run: Run, expected: tuple[np.ndarray, dict[str, np.ndarray]]) -> None:
    """Check a control, whose losses must differ."""
    assert np.abs(run.end()[0] - expected[0]).max() > 1e-5


VIT_OPTIMIZERS = ("adamw", "sgd", "muon")
"""One of each kind: a vision transformer differs in its parameters, which no optimizer knows."""
CASES = [
    (name, optimizer_name)
    for name in presets.PRESETS
    for optimizer_name in CONFIGS
    if optimizer_name.split("-")[0] in presets.get(name).optimizers
]
VIT_CASES = [(*case, "vit") for case in CASES if case[1] in VIT_OPTIMIZERS]


@pytest.mark.parametrize(
    ("name", "optimizer_name", "family"), [*((*case, "decoder") for case in CASES), *VIT_CASES]
)
def test_forms_train_identically(name: str, optimizer_name: str, family: str) -> None:
    preset = preset_of(name)
    native = run_of(preset, optimizer_name, family)
    expected = native.end()
    multipliers = native.inputs.factors.multiplier
    assert expected[0][0] != expected[0][-1]
    other_forms: list[Any] = [form for form in FORMS if form != preset.native_form]
    if "sgd" not in preset.optimizers:
        other_forms = [form for form in other_forms if form != "table-9"]
    assert other_forms
    for form in other_forms:
        run = run_of(preset.with_form(form), optimizer_name, family)
        thetas = {n: a / multipliers[n] for n, a in run.inputs.factors.multiplier.items()}
        differ = any((ratio != 1).any() for ratio in thetas.values())
        # sp has one SGD rate already, so that its table 9 is the native form.
        assert differ or (name, form) == ("sp", "table-9"), form
        exact = all((np.frexp(ratio)[0] == 0.5).all() for ratio in thetas.values())
        # These have exponents of 1/4.
        assert exact or name == "hybrid" or (name, form) == ("sp-layerwise", "table-9")
        if exact and optimizer_name != "muon":
            assert_same(run, expected)
        else:  # Muon's 1e-8 beside the gradient's norm does not move with theta
            np.testing.assert_allclose(run.end()[0], expected[0], rtol=2e-4)


@pytest.mark.parametrize("column", ["eps", "lr", "weight_decay", "multiplier"])
def test_control_a_column_that_does_not_move_is_seen(column: str) -> None:
    preset = preset_of("depth-mup")
    plain = run_of(preset.with_form("plain"), "adamw")
    expected = plain.end()
    moved = run_of(preset.with_form("readout-multiplier"), "adamw")
    np.testing.assert_array_equal(moved.end()[0], expected[0])
    native = run_of(preset, "adamw").inputs.factors
    assert_another(plain.with_columns(**{column: getattr(native, column)}), expected)


@pytest.mark.parametrize(
    "constants", [{"alpha_a": 0.75, "alpha_l": 0.75}, {"gamma0": 0.3, "beta0": 1.7}]
)
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
def test_forms_agree_to_rounding_where_theta_is_no_power_of_two(
    optimizer_name: str, constants: dict[str, Any]
) -> None:
    base = BASE | {"embed": 5, "head_dim": 3, "layers": 3}
    losses = [
        run_of(presets.get("depth-mup", base=base, form=form, **constants), optimizer_name).end()[0]
        for form in FORMS
    ]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-4)


# Equivalences between presets: one trajectory, to the bit, and a control that has another


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
def test_maximal_update_is_mup_in_plain_form_but_for_the_logits(
    optimizer_name: str, family: str
) -> None:
    expected = run_of(preset_of("mup", "plain"), optimizer_name, family).end()
    same = preset_of("maximal-update", alpha_a=1.0, init="fan-in")
    assert_same(run_of(same, optimizer_name, family), expected)
    control = preset_of("maximal-update", init="fan-in")
    assert_another(run_of(control, optimizer_name, family), expected)


def test_completep_is_depth_mup_with_its_decay_and_eps() -> None:
    expected = run_of(preset_of("completep"), "adamw").end()
    run = run_of(preset_of("depth-mup", alpha_a=1.0, alpha_l=1.0), "adamw")
    eps = {}
    for name, spec in built("decoder").specs.items():
        # m_D is 16, m_L 4; a gain of queries or keys sums 4 heads.
        heads = 4 if name.endswith(("query_norm.gain", "key_norm.gain")) else 1
        value = np.float32(heads / 64 if spec.in_block else 1)
        eps[name] = np.broadcast_to(value, run.inputs.factors.eps[name].shape)
    assert_same(run.with_columns(eps=eps), expected)
    assert_another(run, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd", "muon"])
def test_spectral_is_mup_where_matrices_keep_their_proportions(
    optimizer_name: str, family: str
) -> None:
    expected = run_of(preset_of("mup", "plain"), optimizer_name, family).end()
    assert_same(run_of(preset_of("spectral"), optimizer_name, family), expected)
    assert_another(run_of(preset_of("mup-half", "plain"), optimizer_name, family), expected)


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
def test_forms_train_a_tied_readout_identically(optimizer_name: str) -> None:
    """It reads the table as the forward pass does, multiplier included.

    A form that moves the table leaves it alone.
    """
    expected = run_of(preset_of("mup"), optimizer_name, "tied").end()
    for form in ("mean-field", "table-9"):
        assert_same(run_of(preset_of("mup", form), optimizer_name, "tied"), expected)


# Conversion of checkpoints


@pytest.mark.parametrize("optimizer_name", [name for name in CONFIGS if name != "adam"])
def test_a_checkpoint_goes_on_in_another_form(optimizer_name: str) -> None:
    """Steps in plain form, converted, as many in the other form: as twice as many plain."""
    model = built("decoder")
    name = CONFIGS[optimizer_name].name
    is_exact = optimizer_name != "muon"
    plain = run_of(preset_of("depth-mup", "plain"), optimizer_name)
    middle, _ = plain.train()
    straight, expected = plain.train(middle)
    for form in ("readout-multiplier", "mean-field", "table-9"):
        run = run_of(plain.preset.with_form(form), optimizer_name)
        moved = convert(middle, model, plain.preset, run.preset, name)
        end, losses = run.train(moved)
        np.testing.assert_allclose(losses, expected, rtol=0 if is_exact else 2e-4)
        back = convert(end, model, run.preset, plain.preset, name)
        for actual, leaf in zip(jax.tree.leaves(back), jax.tree.leaves(straight), strict=True):
            if is_exact:
                np.testing.assert_array_equal(actual, leaf)
            else:
                np.testing.assert_allclose(actual, leaf, rtol=1e-2, atol=1e-4)


def test_control_moments_left_behind_are_seen() -> None:
    plain = run_of(preset_of("depth-mup", "plain"), "adamw")
    run = run_of(plain.preset.with_form("mean-field"), "adamw")
    middle, _ = plain.train()
    expected = plain.train(middle)[1]
    moved = convert(middle, built("decoder"), plain.preset, run.preset, "adamw")
    losses = run.train(moved._replace(opt_state=middle.opt_state))[1]
    assert np.abs(losses - expected).max() > 1e-3


def test_conversion_refuses_another_parameterization() -> None:
    with pytest.raises(
        PresetError,
        match=r"lr is not what the multiplier's change asks for, so mup .* is another",
    ):
        theta(built("decoder"), preset_of("depth-mup"), preset_of("mup"))
