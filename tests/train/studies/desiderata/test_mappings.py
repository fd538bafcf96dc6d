"""A block cut into mappings is the block, and what its weights take off the loss passes through each of them exactly."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mupax import presets
from mupax.presets import PresetError
from mupax.presets.analysis import desiderata as theory
from mupax.train.__main__ import main
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import init_stds, resolve
from mupax.train.studies.check import check
from mupax.train.studies.check.balance import balance
from mupax.train.studies.desiderata import command, mappings, series
from mupax.zoo import configs
from mupax.zoo.definition import definition
from scripts import desiderata as script

MODEL: Any = dataclasses.replace(
    check.smallest(configs.get("lm-proxy")), width=12, num_heads=2, head_dim=6, value_dim=4, vocab_size=11, seq_len=5
)
OWN = {"q": "block.attention.query", "k": "block.attention.key", "v": "block.attention.value", "o": "block.attention.value",
       "attention out": "block.attention.out", "MLP in": "block.mlp.up", "MLP out": "block.mlp.down"}  # fmt: skip
QUICKLY: Any = {"xla_backend_optimization_level": 0}


@functools.cache
def made():
    built, batch = definition(MODEL), check.batch(MODEL)
    preset = presets.get("depth-mup", key_start="query", base=MODEL.base_sizes())
    return built, batch, resolve(preset, built, "sgd"), init_stds(preset, built)


def test_mappings_are_the_model_and_carry_what_their_weights_take_off_the_loss() -> None:
    built, batch, numbers, stds = made()

    def everything(seed: Any) -> Any:
        params = built.initialize(seed, stds)

        def loss(p: Any, zeros: Any, hold: Any = lambda x: x) -> Any:
            return mappings.forward(built.model(p, numbers.multiplier, numbers.forward), batch, zeros, hold)

        zeros = jax.tree.map(jnp.zeros_like, loss(params, {})[1])
        (value, _), (gradients, signals) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, zeros)
        held = functools.partial(loss, zeros={}, hold=jax.lax.stop_gradient)
        speeds = jax.jvp(lambda p: held(p)[1], (params,), (gradients,))[1]
        whole = built.apply(params, numbers.multiplier, numbers.forward, batch["inputs"])
        plain = optax.softmax_cross_entropy_with_integer_labels(whole, batch["targets"]).mean()
        return params, value, plain, gradients, signals, speeds, mappings.measure(built, params, numbers, batch)

    run = jax.jit(everything).lower(np.uint32(0)).compile(compiler_options=QUICKLY)
    params, value, plain, gradients, signals, speeds, measured = jax.device_get(run(np.uint32(0)))
    np.testing.assert_array_equal(params["block.attention.key"], params["block.attention.query"])
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    for mapping, name in OWN.items():
        through, taken = np.sum(signals[mapping] * speeds[mapping]), np.sum(gradients[name] ** 2)
        np.testing.assert_allclose(through, taken, rtol=1e-4, err_msg=mapping)
        part = measured.parts[theory.NAMES[name]]
        np.testing.assert_allclose(
            part,
            np.sum(numbers.lr[name] * np.sum(gradients[name] ** 2, axis=(1, 2, 3)[: gradients[name].ndim - 1])),
            rtol=1e-4,
        )
    logits = np.sum(signals["logits"] * speeds["logits"])
    both = np.sum(gradients[OWN["q"]] ** 2) + np.sum(gradients[OWN["k"]] ** 2)
    np.testing.assert_allclose(logits, both, rtol=1e-4)


def test_keys_that_are_fewer_cannot_start_as_queries() -> None:
    few = definition(dataclasses.replace(MODEL, num_kv_heads=1))
    with pytest.raises(PresetError, match="write num_kv_heads as num_heads"):
        init_stds(presets.get("mup", key_start="query"), few)


def test_the_command_holds_measurement_against_theory(monkeypatch, capsys, tmp_path) -> None:
    class Fake:
        off = 0.0

        def __init__(self, definitions: Any, batches: Any, seeds: int, *, masked: bool) -> None:
            grows = {axis for axis in definitions[0].sizes if definitions[0].sizes[axis] != definitions[1].sizes[axis]}
            self.dimension = next(d for d, axes in theory.GROWTHS.items() if grows == axes.keys())

        def slopes(self, preset: Any) -> dict[str, dict[str, float]]:
            cells = theory.desiderata(preset, self.dimension)
            found = {column: dict(cell.exponents) for column, cell in cells.items()}
            if "q" in found["speed"]:
                found["speed"]["q"] += self.off
            decays = found["loss decay"] or {"": 0.0}
            parts = {name: x + max(decays.values()) for name, x in found["balance"].items()}
            return {"signal": found["signal"], "speed": found["speed"], "parts": parts or {"": 0.0}}

    monkeypatch.setattr(command, "Series", Fake)
    monkeypatch.setattr(command, "definition", lambda model: type("Sized", (), {"sizes": model.sizes()}))
    words = ["check", "lm-proxy", "--desiderata", "--preset", "depth-mup", "--json", str(tmp_path / "a.json")]
    assert main(words) == 0
    assert json.loads((tmp_path / "a.json").read_text())["d_v"]["speed"]["v"] == [-0.5, -0.5]
    capsys.readouterr()
    Fake.off = 0.2
    assert main(words) == 1
    assert "q +0.20" in capsys.readouterr().out


def test_the_committed_measurement_agrees_with_theory_where_its_page_does_not_say_why_not() -> None:
    data = json.loads(script.PAGE.with_suffix(".json").read_text())
    assert script.page(data) == script.PAGE.read_text()
    apart = set()
    for label, dimensions in data["presets"].items():
        for dimension, columns in dimensions.items():
            cells = theory.desiderata(script._preset(label), dimension)
            for column, names in columns.items():
                assert cells[column].exponents.keys() == names.keys()
                for name, (_, seen) in names.items():
                    if abs(cells[column].exponents[name] - seen) > command.BAND:
                        apart.add((label, dimension, column, name))
    explained = {(label, "positions", "balance", name) for label in data["presets"] for name in ("query", "key")}
    explained |= {("mup key_start=query", "depth", "signal", "logits")}
    assert {each for each in apart - explained if each[:2] != ("mup mlp_out=mean-field", "d_model")} == set()
    # Controls: each other rule for d_k fails against the measurement of keys that start as queries.
    seen = data["presets"]["mup key_start=query"]["d_k"]
    for other, column, name in (("mup", "signal", "logits"), ("mup-half", "speed", "q")):
        assert abs(theory.desiderata(presets.get(other), "d_k")[column].exponents[name] - seen[column][name][1]) > 0.3


def test_one_dimension_grows_alone() -> None:
    for dimension, axes in theory.GROWTHS.items():
        small, large = (model.sizes() for model in series.grown(configs.get("lm-proxy"), dimension, 2))
        assert {axis for axis in small if large[axis] == 2 * small[axis]} == axes.keys()
        assert all(large[axis] == small[axis] for axis in small.keys() - axes.keys())


def test_balance_refuses_what_its_table_cannot_hold() -> None:
    built, batch, *_ = made()
    with pytest.raises(PresetError, match="write key_start=own"):
        balance(built, batch, OptimizerConfig(name="sgd"), reference=presets.get("mup", key_start="query"))
