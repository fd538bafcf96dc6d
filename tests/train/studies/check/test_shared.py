"""Parameters that are broadcast along a growing axis: tracing, presets and the coordinate check.

The model is a Mixer with the biases of its MLP over patches. B batch, P patches, D channels, S
hidden units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax import presets, train, zoo
from mupax.presets.analysis.limits import Limit
from mupax.presets.roles import ParamSpec, PresetError, Role
from mupax.train.studies.check import groups, theory
from mupax.train.studies.check.check import Series
from mupax.train.studies.check.judge import judge
from mupax.train.studies.roles import models

SIZES = {"patch": 5, "embed": 64, "output": 12, "position": 8, "classes": 7}
MUP = presets.get("mup", base={"embed": 64, "mlp": 128, "heads": 4, "kv_heads": 4, "head_dim": 16})
SHARED = ("mix", "mix_bias", "unmix", "unmix_bias")
WIDTH = {"embed": 1.0, "mlp": 1.0, "heads": 1.0, "kv_heads": 1.0}


def forward(params: Mapping[str, jax.Array], x_BPI: jax.Array) -> jax.Array:
    h_BPD = x_BPI @ params["read"]
    y_BDP = normed(h_BPD).swapaxes(1, 2)
    y_BDP = (
        jax.nn.gelu(y_BDP @ params["mix"] + params["mix_bias"]) @ params["unmix"]
        + params["unmix_bias"]
    )
    h_BPD = h_BPD + y_BDP.swapaxes(1, 2)
    h_BPD = h_BPD + jax.nn.gelu(normed(h_BPD) @ params["up"]) @ params["down"]
    return normed(h_BPD).mean(axis=1) @ params["out"]


def normed(x: jax.Array) -> jax.Array:
    """Return the LayerNorm of x, which takes away what all channels have in common."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)


def build(s: Mapping[str, int]) -> tuple[Any, Any, Any]:
    D, S, P, C = (s[axis] for axis in ("embed", "output", "position", "classes"))
    shapes = {
        "read": (s["patch"], D),
        "mix": (P, S),
        "mix_bias": (S,),
        "unmix": (S, P),
        "unmix_bias": (P,),
        "out": (D, C),
    }
    shapes |= {"up": (D, s["mlp"]), "down": (s["mlp"], D)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def loss(params: Any, batch: Any) -> jax.Array:
        x_BPI, labels = batch
        return -jnp.sum(jax.nn.log_softmax(forward(params, x_BPI)) * jax.nn.one_hot(labels, C))

    return (
        params,
        loss,
        (
            jax.ShapeDtypeStruct((2, P, s["patch"]), jnp.float32),
            jax.ShapeDtypeStruct((2,), jnp.int32),
        ),
    )


@pytest.fixture(scope="module")
def specs() -> dict[str, ParamSpec]:
    roles = models.roles_of(build, SIZES | {"mlp": 128})
    assert roles.refused == {}
    return roles.specs


def without(specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return declarations that do not say what is shared: the control."""
    return {name: dataclasses.replace(spec, shared=()) for name, spec in specs.items()}


def test_tracing_says_what_is_shared(specs: dict[str, ParamSpec]) -> None:
    assert {name: spec.shared for name, spec in specs.items() if spec.shared} == dict.fromkeys(
        SHARED, ("embed",)
    )
    assert specs["mix_bias"].of is Role.HIDDEN


@pytest.mark.parametrize(
    "name", ["mup", "mup-half", "completep", "depth-mup", "sp-layerwise", "spectral", "ntk"]
)
def test_a_sum_of_gradients_is_in_eps_and_in_sgds_rate_alone(
    name: str, specs: dict[str, ParamSpec]
) -> None:
    preset = presets.get(name)
    ratios = dict.fromkeys(presets.AXES, 1.0) | {"embed": 8.0}
    for parameter in SHARED:
        shared, alone = (preset.row(spec) for spec in (specs[parameter], without(specs)[parameter]))
        assert shared.eps(ratios) == pytest.approx(8 * alone.eps(ratios))
        assert shared.sgd(ratios) == pytest.approx(alone.sgd(ratios) / 8)
        assert (shared.adam, shared.init_std, shared.decay) == (
            alone.adam,
            alone.init_std,
            alone.decay,
        )


def test_sp_has_one_rate_and_one_eps(specs: dict[str, ParamSpec]) -> None:
    plain = presets.get("sp")
    assert all(plain.row(specs[name]) == plain.row(without(specs)[name]) for name in SHARED)


@pytest.mark.parametrize(("optimizer", "column"), [("adam", "gradient"), ("sgd", "movement")])
def test_theory_names_a_table_that_forgets_the_sum(
    optimizer: Any, column: str, specs: dict[str, ParamSpec]
) -> None:
    right = Limit(MUP, optimizer, WIDTH)
    assert groups.troubles(MUP, specs, right) == {}
    forgets = dataclasses.replace(MUP, by_gradients=False)
    wrong = groups.troubles(forgets, specs, Limit(forgets, optimizer, WIDTH))
    biases = {f"{column}/block.hidden.bias/{name}" for name in ("mix_bias", "unmix_bias")}
    assert biases <= {name for name, _ in wrong}
    word = {"adam": "eps fades", "sgd": "explodes"}[optimizer]
    assert {trouble.word for trouble in wrong.values()} == {word}


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 7, 32).astype(np.int32)
    images = rng.standard_normal((32, 8, 5)).astype(np.float32)
    return {"inputs": images, "targets": labels, "weights": np.ones(32, np.float32)}


@pytest.mark.parametrize("declared", ["as traced", "as if it were not shared"])
def test_the_check_measures_the_sum(
    declared: str, specs: dict[str, ParamSpec], batch: dict[str, np.ndarray]
) -> None:
    used = specs if declared == "as traced" else without(specs)
    definitions = []
    for width in (64, 256):
        params, _, _ = build(SIZES | {"embed": width, "mlp": 2 * width})
        definitions.append(zoo.define_function(forward, params, used, sizes={"layers": 1}))
    mup = presets.get("mup", base={"embed": 64, "mlp": 128})
    adam = train.OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
    # Only first gradients are judged, so no step is taken.
    measured = Series(definitions, adam, steps=0).measure(mup, batch, seeds=8)
    findings = judge(measured, (1, 4), theory.of(mup, definitions[0], definitions[1], "adam"))
    judged = {
        finding.observable: finding
        for finding in findings
        if finding.observable.startswith("gradient/")
    }
    mixed = judged["gradient/block.hidden.bias/mix_bias"]
    plain = [finding for name, finding in judged.items() if "hidden" not in name]
    assert plain
    assert all(finding.ok for finding in plain)
    assert mixed.ok == (declared == "as traced")
    if declared == "as traced":
        assert judged["gradient/block.hidden/mix"].ok
        # A LayerNorm takes this bias away again, and its gradient is rounding.
        assert "gradient/block.hidden.bias/unmix_bias" not in judged


@pytest.mark.parametrize(
    ("shared", "words"),
    [(("embd",), "no logical axis is named 'embd'"), (("output",), "it has the axis 'output'")],
)
def test_what_cannot_be_shared_is_refused(shared: tuple[str, ...], words: str) -> None:
    with pytest.raises(PresetError, match=words):
        ParamSpec(role=Role.BIAS, axes=("output",), in_block=True, of=Role.HIDDEN, shared=shared)
