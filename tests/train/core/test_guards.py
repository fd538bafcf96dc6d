"""Chains that would quietly undo a preset are refused by name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from mupax import presets
from mupax.presets import VECTORS, ParamSpec, PresetError, Role
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import optimizer
from mupax.train.core.factors import hyperparams, resolve
from mupax.train.core.guards import check_chain
from mupax.train.core.muon import hidden_matrices
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.functional.definition import define_function
from tests.train.core.test_muon import dimension_numbers

# Without biases a chain, which is compiled for each check, has half as many parameters.
LM = DecoderConfig(width=12, num_heads=3, depth=2, vocab_size=11, seq_len=5, bias=False)
MODEL = definition(LM)
MUP = presets.get(
    "mup", base={"embed": 4, "heads": 1, "kv_heads": 1, "head_dim": 4, "mlp": 16, "layers": 2}
)
DECAYS = {name: spec.role not in VECTORS for name, spec in MODEL.specs.items()}


@functools.cache
def column(name: str, optimizer_name: str = "adam") -> dict[str, jnp.ndarray]:
    """Return a column of the preset's table, as numbers of parameters by name."""
    values = getattr(resolve(MUP, MODEL, optimizer_name, "coupled"), name)
    return {n: jnp.float32(x.flat[0]) for n, x in values.items()}


def times(numbers: dict[str, jnp.ndarray]) -> optax.GradientTransformation:
    def update(updates: Any, params: Any) -> Any:
        del params
        return {n: u * numbers[n] for n, u in updates.items()}

    return optax.stateless(update)


def rates(optimizer_name: str = "adam") -> optax.GradientTransformation:
    """Return a multiplication by the preset's learning rates."""
    return times(column("lr", optimizer_name))


def decayed(numbers: dict[str, jnp.ndarray]) -> optax.GradientTransformation:
    def update(updates: Any, params: Any) -> Any:
        return {n: u + 0.1 * numbers[n] * params[n] for n, u in updates.items()}

    return optax.stateless(update)


def scheduled(names: set[str], schedule: optax.Schedule) -> optax.GradientTransformation:
    """A schedule on some parameters alone."""
    return optax.masked(optax.scale_by_schedule(schedule), {n: n in names for n in MODEL.specs})


def descent(*parts: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(*parts, optax.scale(-3e-3))


def adam(*after: optax.GradientTransformation, eps: float = 1e-8) -> optax.GradientTransformation:
    return descent(optax.scale_by_adam(eps=eps), *after)


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("adam", lambda: adam(rates())),
        (
            "adam",
            lambda: descent(optax.clip_by_global_norm(1e-3), optax.scale_by_adam(), rates()),
        ),
        ("sgd", lambda: descent(optax.clip_by_global_norm(1e-3), rates("sgd"))),
        (
            "adam",
            lambda: adam(
                rates(),
                optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 50)),
                eps=1e-5,
            ),
        ),
        (
            "adam",
            lambda: adam(
                rates(),
                scheduled(set(MODEL.specs), optax.cosine_decay_schedule(1.0, 20_000)),
            ),
        ),
        ("adamw", lambda: adam(decayed(column("weight_decay")), rates())),
        ("adamw", lambda: adam(rates(), optax.add_decayed_weights(0.1, DECAYS))),
        ("sgd", lambda: descent(optax.trace(0.9), rates("sgd"))),
        ("lion", lambda: descent(optax.scale_by_lion(), rates("lion"))),
        # A chain whose steps are right for parameters that are 0, which have no trust ratio.
        ("adam", lambda: adam(optax.scale_by_trust_ratio(), rates())),
    ],
)
def test_right_chains_pass(name: str, chain: Any) -> None:
    check_chain(chain(), MODEL, MUP, name)


def muon(scale_by_shape: bool) -> optax.GradientTransformation:
    numbers: Any = dict.fromkeys(MODEL.specs)
    for name, spec in hidden_matrices(MODEL.specs).items():
        numbers[name] = dimension_numbers(spec)
    if scale_by_shape:
        return optax.contrib.muon(1.0, muon_weight_dimension_numbers=numbers, adam_eps_root=0.0)
    matrices = {n: numbers[n] for n in numbers if isinstance(numbers[n], MuonDimensionNumbers)}
    labels = {n: "muon" if n in matrices else "adam" for n in numbers}
    masked: Any = {n: numbers[n] if n in matrices else optax.MaskedNode() for n in numbers}
    inner: Any = {
        "muon": optax.contrib.scale_by_muon(weight_dimension_numbers=masked),
        "adam": optax.scale_by_adam(nesterov=True),
    }
    return optax.chain(optax.partition(inner, labels), optax.scale(-1.0))


def test_sgd_clipped_after_its_rates_is_refused():
    chain = descent(rates("sgd"), optax.clip_by_global_norm(1e-3))
    with pytest.raises(PresetError, match="mup's rates are applied before a global norm"):
        check_chain(chain, MODEL, MUP, "sgd")


def test_muon_that_scales_by_shape_is_refused_and_plain_muon_is_not():
    check_chain(optax.chain(muon(scale_by_shape=False), rates("muon")), MODEL, MUP, "muon")
    with pytest.raises(
        PresetError,
        match=r"block.mlp.up: moves 2 times as far as mup asks.*use scale_by_muon, which has none",
    ):
        check_chain(optax.chain(muon(scale_by_shape=True), rates("muon")), MODEL, MUP, "muon")


@pytest.mark.parametrize(
    ("chain", "text"),
    [
        (lambda: adam(rates(), rates()), r"mup asks.*: its rates are applied twice"),
        (lambda: adam(), r"mup asks.*: its rates are not applied; multiply each update by scales.lr"),
        (
            lambda: adam(times({**column("lr"), "readout": jnp.float32(1.5)})),
            r"readout: moves 1.5 times as far as mup asks, relative to the others: the optimizer has a scale of its own",
        ),
        (
            lambda: adam(optax.masked(optax.set_to_zero(), {n: n == "token" for n in MODEL.specs}), rates()),
            r"token: the chain does not move it; mup gives it a rate of 1",
        ),
        (
            lambda: adam(optax.add_decayed_weights(0.1, DECAYS), rates()),
            r"lr\*wd is .* times that of .*would drift as the model grows; under mup it is one number",
        ),
        (
            lambda: adam(rates(), optax.add_decayed_weights(0.1)),
            r"gain: weight decay acts on it, and mup never decays gains and biases; mask them",
        ),
        (
            lambda: adam(rates(), optax.normalize_by_update_norm()),
            r"moves .* mup's rates are applied before a global norm \(optax.clip_by_global_norm\); clip the raw gradients, first",
        ),
        (
            lambda: adam(rates(), optax.clip_by_global_norm(1e-3)),
            r"mup's rates are applied before a global norm",
        ),
        (
            lambda: adam(rates(), scheduled({"token"}, optax.cosine_decay_schedule(1.0, 20_000))),
            r"token: after 10000 steps it moves 0.5 times as far, relative to the others, as at first: it has a schedule of its own",
        ),
        (
            lambda: adam(rates(), scheduled({"readout"}, optax.linear_schedule(1.0, 0.0, 50))),
            r"readout: after 10 steps it moves 0.8.* times as far",
        ),
        (
            lambda: adam(rates(), eps=1e-2),
            r": eps is no small part of gradients of norm 1: a sixteenth of them moves it .* write a smaller eps, times scales.eps",
        ),
    ],
)  # fmt: skip
def test_wrong_chains_are_refused_by_name(chain: Any, text: str) -> None:
    with pytest.raises(PresetError, match=text):
        check_chain(chain(), MODEL, MUP, "adam")


def test_a_model_on_which_a_wrong_chain_would_pass_is_refused() -> None:
    spec = ParamSpec(role=Role.READOUT, axes=("embed", "classes"), fan_in=("embed",))
    shapes = {"readout": jax.ShapeDtypeStruct((12, 5), jnp.float32)}
    alone = define_function(lambda p, x: x @ p["readout"], shapes, {"readout": spec})
    wide = presets.get("mup", base={"embed": 4})
    with pytest.raises(PresetError, match="the model has 1; give a model of at least two"):
        check_chain(adam(), alone, wide, "adam")

    base = presets.get("mup", base=LM.base_sizes())
    with pytest.raises(PresetError, match=r"sizes of mup's base.* give a model of other sizes"):
        check_chain(adam(), MODEL, base, "adam")
    # With a constant of a group there is something to compare.
    constants: dict[str, Any] = {"rates.readout": 2.0}
    base = presets.get("mup", base=LM.base_sizes(), **constants)
    with pytest.raises(PresetError, match=r"readout: moves 0\.5 times as far"):
        check_chain(adam(), MODEL, base, "adam")


# Schedules


def rate_schedules() -> dict[str, optax.Schedule]:
    """Return every schedule of optax, at rates of order 1."""
    cycle = {
        "init_value": 0.1, "peak_value": 1.0, "decay_steps": 4, "warmup_steps": 1, "end_value": 0.1,
    }  # fmt: skip
    constants = [optax.constant_schedule(1.0), optax.constant_schedule(0.2)]
    return {
        "constant_schedule": optax.constant_schedule(0.7),
        "cosine_decay_schedule": optax.cosine_decay_schedule(1.0, 7, 0.1),
        "cosine_onecycle_schedule": optax.cosine_onecycle_schedule(8, 1.0),
        "exponential_decay": optax.exponential_decay(1.0, 3, 0.5),
        "join_schedules": optax.join_schedules(constants, [4]),
        "linear_onecycle_schedule": optax.linear_onecycle_schedule(8, 1.0),
        "linear_schedule": optax.linear_schedule(1.0, 0.1, 7),
        "piecewise_constant_schedule": optax.piecewise_constant_schedule(1.0, {3: 0.1}),
        "piecewise_interpolate_schedule": optax.piecewise_interpolate_schedule(
            "linear", 1.0, {3: 0.1}
        ),
        "polynomial_schedule": optax.polynomial_schedule(1.0, 0.1, 2, 7),
        "sgdr_schedule": optax.sgdr_schedule([cycle] * 2),
        "warmup_constant_schedule": optax.warmup_constant_schedule(0.1, 1.0, 3),
        "warmup_cosine_decay_schedule": optax.warmup_cosine_decay_schedule(0.1, 1.0, 3, 8, 0.1),
        "warmup_exponential_decay_schedule": optax.warmup_exponential_decay_schedule(
            0.1, 1.0, 3, 2, 0.5
        ),
    }


def test_the_list_of_schedules_is_complete():
    """Everything of `optax.schedules` that makes a schedule from numbers; the others wrap one or inject hyperparameters."""
    makers = {
        name
        for name, make in inspect.getmembers(optax.schedules, callable)
        if name.endswith(("schedule", "decay", "schedules"))
    }
    assert makers == set(rate_schedules())


def test_no_schedule_changes_the_ratio_of_two_rates():
    config = OptimizerConfig(name="sgd", peak_lr=1.0, schedule="constant", momentum=0.0)
    tx = optimizer.build(config, MODEL.specs)
    factors = resolve(MUP, MODEL, "sgd")
    params = {n: jnp.zeros(leaf.shape) for n, leaf in MODEL.abstract.items()}
    grads = {n: jnp.ones(leaf.shape) for n, leaf in MODEL.abstract.items()}

    @jax.jit
    def update(hyper: optimizer.OptimizerHyperparams, step: int) -> Any:
        return tx.update(grads, tx.init(params), params, factors=factors, hyper=hyper.at(step))[0]  # pyright: ignore

    for name, schedule in rate_schedules().items():
        table = np.array([schedule(step) for step in range(8)], np.float32)
        assert len(set(table)) > 1 or name == "constant_schedule"
        hyper = hyperparams(config, 8)._replace(schedule=table)
        for step in (0, 3, 7):
            for key, u in update(hyper, step).items():
                np.testing.assert_allclose(
                    u, -table[step] * factors.lr[key].flat[0], rtol=1e-6, err_msg=f"{name} {key}"
                )


def test_a_preset_whose_own_decay_drifts_cautions():
    base = LM.base_sizes()
    deep = dataclasses.replace(LM, depth=8).sizes()
    assert presets.get("completep", base=base, alpha_l=0.5).cautions(deep) == [
        "lr*wd of block matrices goes as layers^-0.5 (completep's own table); decay=rate keeps it fixed"
    ]
    assert presets.get("completep", base=base, alpha_l=0.5, decay="rate").cautions(deep) == []
    assert presets.get("completep", base=base).cautions(deep) == []
