"""Mappings of a block are the block, and each carries what its weights take off the loss."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets import PresetError
from mupax.presets.analysis import desiderata as theory
from mupax.presets.analysis.mappings import NAMES
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import init_stds, resolve
from mupax.train.studies.check import check
from mupax.train.studies.check.balance import balance
from mupax.train.studies.check.observables import rms
from mupax.train.studies.desiderata import command
from mupax.zoo import configs
from mupax.zoo.definition import definition
from scripts import ROOT

SIZES: Any = {
    "width": 12,
    "num_heads": 2,
    "head_dim": 6,
    "value_dim": 4,
    "vocab_size": 11,
    "seq_len": 5,
}
MODEL: Any = dataclasses.replace(check.smallest(configs.get("lm-proxy")), **SIZES)
ENCODED: Any = dataclasses.replace(
    check.smallest(configs.get("flan-t5-small")),
    **SIZES,
    target_len=4,
    encoder_depth=3,
    shared=False,
    num_kv_heads=None,
)
OWN = {
    NAMES[name].replace("query", "q").replace("key", "k").replace("value", "v"): name
    for name in NAMES
    if name.rpartition(".")[2] not in ("token", "readout")
}
OWN |= {part + "o": OWN[part + "v"] for part in ("", "cross ", "encoder ")}
"""Mapping to the weight that it moves by."""
QUICKLY: Any = {"xla_backend_optimization_level": 0}


@functools.cache
def inputs_of(model: Any = MODEL) -> Any:
    built, batch = definition(model), check.batch(model)
    if model.denoises:
        batch["input_mask"] = np.ones_like(batch["input_mask"])
    preset = presets.get("depth-mup", key_start="query", base=model.base_sizes())
    numbers = resolve(preset, built, "sgd")
    forward = dict(numbers.forward)
    for name, factors in forward.items():
        if name.endswith("branch"):
            # A factor of its own for every branch, so that none can stand for another.
            forward[name] = factors * np.linspace(0.5, 1.5, factors.size).reshape(factors.shape)
    return built, batch, numbers._replace(forward=forward), init_stds(preset, built)


@pytest.mark.parametrize("model", [MODEL, ENCODED], ids=["decoder", "encoder-decoder"])
def test_mappings_are_the_model_and_carry_what_their_weights_take_off_the_loss(model: Any) -> None:
    built, batch, numbers, stds = inputs_of(model)

    def everything(seed: Any) -> Any:
        params = built.initialize(seed, stds)

        def loss(p: Any, zeros: Any, hold: Any = lambda x: x) -> Any:
            return command.forward(
                built.model(p, numbers.multiplier, numbers.forward), batch, zeros, hold
            )

        zeros = jax.tree.map(jnp.zeros_like, loss(params, {})[1])
        (value, outputs), (gradients, signals) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            params, zeros
        )
        held = functools.partial(loss, zeros={}, hold=jax.lax.stop_gradient)
        speeds = jax.jvp(lambda p: held(p)[1], (params,), (gradients,))[1]
        inputs = [
            batch[name]
            for name in ("inputs", "input_mask", "decoder_inputs")
            if name == "inputs" or model.denoises
        ]
        whole = built.apply(params, numbers.multiplier, numbers.forward, *inputs)
        plain = optax.softmax_cross_entropy_with_integer_labels(whole, batch["targets"]).mean()
        return (
            params,
            value,
            plain,
            gradients,
            outputs,
            signals,
            speeds,
            command.measure(built, params, numbers, batch),
        )

    run = jax.jit(everything).lower(np.uint32(0)).compile(compiler_options=QUICKLY)
    params, value, plain, gradients, outputs, signals, speeds, measured = jax.device_get(
        run(np.uint32(0))
    )
    np.testing.assert_array_equal(params["block.attention.key"], params["block.attention.query"])
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    weights = {mapping: name for mapping, name in OWN.items() if name in gradients}
    assert weights.keys() == (
        OWN.keys() if model.denoises else {m for m in OWN if not m.startswith(("cross", "encoder"))}
    )
    for mapping, name in weights.items():
        through, decrease = np.sum(signals[mapping] * speeds[mapping]), np.sum(gradients[name] ** 2)
        np.testing.assert_allclose(through, decrease, rtol=1e-4, err_msg=mapping)
        each = np.sum(gradients[name].reshape(len(gradients[name]), -1) ** 2, axis=1)
        np.testing.assert_allclose(
            measured.parts[NAMES[name]], np.sum(numbers.lr[name] * each), rtol=1e-4
        )
        # At these rates every weight lowers the loss by 1, an equal part of it in every layer.
        rates = (1 / len(each) / each).reshape(-1, *[1] * (speeds[mapping].ndim - 1))
        np.testing.assert_allclose(
            measured.speed[mapping], rms(rates * speeds[mapping]), rtol=1e-4, err_msg=mapping
        )
    embedding_rate = 1 / np.sum(gradients["token"] ** 2)
    np.testing.assert_allclose(
        measured.speed["embedding"], embedding_rate * rms(speeds["embedding"]), rtol=1e-4
    )
    for mapping in signals:
        np.testing.assert_allclose(measured.signal[mapping], rms(outputs[mapping]), rtol=1e-4)
        np.testing.assert_allclose(measured.backward[mapping], rms(signals[mapping]), rtol=1e-4)
    for part in {mapping.removesuffix("v") for mapping in weights if mapping.endswith("v")}:
        logits = np.sum(signals[f"{part}logits"] * speeds[f"{part}logits"])
        expected = sum(np.sum(gradients[weights[part + name]] ** 2) for name in "qk")
        np.testing.assert_allclose(logits, expected, rtol=1e-4, err_msg=part)


def test_keys_that_are_fewer_cannot_start_as_queries() -> None:
    few = definition(dataclasses.replace(MODEL, num_kv_heads=1))
    with pytest.raises(PresetError, match="write num_kv_heads as num_heads"):
        init_stds(presets.get("mup", key_start="query"), few)


@pytest.mark.parametrize(("model", "encoder"), [("lm-proxy", False), ("ed-proxy", True)])
def test_the_command_holds_measurement_against_theory(
    model, encoder, monkeypatch, capsys, tmp_path
) -> None:
    class Fake:
        off = 0.0

        def __init__(self, definitions: Any, batches: Any, seeds: int, *, masked: bool) -> None:
            grows = {
                axis
                for axis in definitions[0].sizes
                if definitions[0].sizes[axis] != definitions[1].sizes[axis]
            }
            axes_of = theory.growths(encoder=encoder)
            self.dimension = next(d for d, axes in axes_of.items() if grows == axes.keys())
            assert masked == (self.dimension not in ("positions", "targets"))

        def slopes(self, preset: Any) -> dict[str, dict[str, float]]:
            cells = theory.desiderata(preset, self.dimension, encoder=encoder)
            exponents = {column: dict(cell.exponents) for column, cell in cells.items()}
            for name in ("q", "encoder q"):
                if name in exponents["speed"]:
                    exponents["speed"][name] += self.off
            decays = exponents["loss decay"] or {"": 0.0}
            parts = {name: x + max(decays.values()) for name, x in exponents["balance"].items()}
            return {
                "signal": exponents["signal"],
                "speed": exponents["speed"],
                "parts": parts or {"": 0.0},
            }

    monkeypatch.setattr(command, "Series", Fake)
    monkeypatch.setattr(
        command, "definition", lambda model: type("Sized", (), {"sizes": model.sizes()})
    )
    words = [
        "check",
        model,
        "--desiderata",
        "--preset",
        "depth-mup",
        "--json",
        str(tmp_path / "a.json"),
    ]
    assert main([*words, "--dry-run"]) == 0
    assert ("encoder_depth" in capsys.readouterr().out) == encoder
    assert not (tmp_path / "a.json").exists(), "a dry run measures nothing"
    assert main([*words]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["d_v"]["speed"]["v"] == [-0.5, -0.5]
    assert record.keys() == theory.growths(encoder=encoder).keys()
    capsys.readouterr()
    Fake.off = 0.2
    assert main([*words]) == 1
    shown = capsys.readouterr().out
    assert " q +0.20" in shown
    assert ("encoder q +0.20" in shown) == encoder


def test_exponents_are_slopes_over_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    exponents = {
        column: cell.exponents
        for column, cell in theory.desiderata(presets.get("sp"), "d_v").items()
    }
    # Only the attention's output matrix is the top of the balance, and its part grows with d_v.
    assert exponents["loss decay"] == {"attention out": 1}
    parts = {name: 1 + exponent for name, exponent in exponents["balance"].items()}

    def measure(definition: Any, params: Any, *_: Any, masked: bool) -> command.Mappings:
        def powers(by_name: Mapping[str, float]) -> dict[str, jax.Array]:
            size = jnp.float32(definition.sizes["value_dim"])
            return {name: 3 * size**exponent for name, exponent in by_name.items()}

        signal, speed = powers(exponents["signal"]), powers(exponents["speed"])
        return command.Mappings(signal, speed, {}, powers(parts))

    monkeypatch.setattr(command, "measure", measure)
    model = configs.get("lm-proxy")
    (row,) = command.measured(
        model, [lambda base: presets.get("sp")], count=3, seeds=2, dimensions=["d_v"]
    )
    for column, (_, measured) in row["d_v"].items():
        assert measured.exponents == pytest.approx(exponents[column], abs=1e-5), column


PRESETS: dict[str, dict[str, Any]] = {
    "mup": {},
    "mup key_start=query": {"key_start": "query"},
    "mup-half": {},
    "mup mlp_out=mean-field": {"mlp_out": "mean-field"},
    "depth-mup alpha_l=1": {"alpha_l": 1.0},
    "depth-mup alpha_l=0.5": {"alpha_l": 0.5},
    "sp": {},
}
"""Label of docs/evidence/desiderata.json to the constants of its preset."""
EXPLAINED = {
    "decoder": {
        (label, "positions", "balance", name) for label in PRESETS for name in ("query", "key")
    }
    | {("mup key_start=query", "depth", "signal", "logits")},
    "encoder-decoder": {("mup key_start=query", "d_k", "signal", "cross logits")}
    | {(label, "targets", "balance", name) for label in ("mup", "sp") for name in ("query", "key")}
    | {
        (label, "targets", "speed", name)
        for label in ("mup", "sp")
        for name in ("attention out", "cross logits")
    },
}
"""Exponents farther from theory than the band, which the page gives a reason for."""


def recorded_rows(by_preset: dict[str, Any], encoder: bool) -> dict[str, command.Row]:
    """Return theory and the recorded measurement of every preset of docs/evidence/desiderata.json."""
    rows: dict[str, command.Row] = {}
    for label, by_dimension in by_preset.items():
        preset = presets.get(label.partition(" ")[0], **PRESETS[label])
        rows[label] = {}
        for dimension, columns in by_dimension.items():
            cells = theory.desiderata(preset, dimension, encoder=encoder)
            for column, recorded in columns.items():
                measured = {name: pair[1] for name, pair in recorded.items()}
                actual = dataclasses.replace(cells[column], exponents=measured)
                rows[label].setdefault(dimension, {})[column] = (cells[column], actual)
    return rows


DECODERS_AXES = ("targets", "depth", "encoder_depth")
SHOWN = ("mup", "depth-mup alpha_l=1", "depth-mup alpha_l=0.5")
"""Dimensions and presets of an encoder-decoder that the page shows; widths are as a decoder's."""


def in_theory(line: list[str]) -> list[str]:
    """Return what theory says in a row of the page's table, without what was measured."""
    return [word.split(" | ")[0] for word in line[:-1]]


def test_the_committed_measurement_agrees_with_theory_where_its_page_does_not_say_why_not() -> None:
    page = ROOT / "docs" / "evidence" / "desiderata.md"
    text = page.read_text()
    data = json.loads(page.with_suffix(".json").read_text())
    assert data.keys() == EXPLAINED.keys()
    for key in data:
        far = set()
        rows = recorded_rows(data[key]["presets"], encoder=key == "encoder-decoder")
        of_mup = {line[0]: in_theory(line) for line in command.table(rows["mup"])}
        for label, row in rows.items():
            for line in command.table(row):
                cells = " | ".join(word.replace("|", "\\|") for word in line)
                is_shown = f"| {cells} |" in text or f"| `{label}` | {cells} |" in text
                if key == "decoder" and not is_shown:
                    assert in_theory(line) == of_mup[line[0]], f"{label} {line[0]} is not shown"
                if key == "encoder-decoder" and line[0] in DECODERS_AXES and label in SHOWN:
                    assert is_shown, f"{label} {line[0]} is not shown"
            for dimension, cells in row.items():
                for column, (expected, actual) in cells.items():
                    assert expected.exponents.keys() == actual.exponents.keys()
                    far |= {
                        (label, dimension, column, name) for name in command.apart(expected, actual)
                    }
        assert {
            each
            for each in far - EXPLAINED[key]
            if each[:2] != ("mup mlp_out=mean-field", "d_model")
        } == set()
    # Controls: each other rule for d_k fails against the measurement of keys that start as queries.
    measurement = data["decoder"]["presets"]["mup key_start=query"]["d_k"]
    for other, column, name in (("mup", "signal", "logits"), ("mup-half", "speed", "q")):
        assert (
            abs(
                theory.desiderata(presets.get(other), "d_k")[column].exponents[name]
                - measurement[column][name][1]
            )
            > 0.3
        )


@pytest.mark.parametrize(("model", "encoder"), [("lm-proxy", False), ("ed-proxy", True)])
def test_one_dimension_grows_alone(model, encoder) -> None:
    for dimension, axes in theory.growths(encoder=encoder).items():
        models = command.grown(configs.get(model), dimension, 2)
        small, large = (grown.sizes() for grown in models)
        assert {axis for axis in small if large[axis] == 2 * small[axis]} == axes.keys()
        assert all(large[axis] == small[axis] for axis in small.keys() - axes.keys())
        # Presets are relative to the smallest model, but to a single layer where depth grows.
        base = command.base(models[0], dimension)
        has_one_layer = dimension.endswith("depth") or dimension in command.OF_TOKENS
        num_layers = {base[axis] for axis in ("layers", "encoder_layers") if axis in base}
        assert num_layers == {1 if has_one_layer else 2}
        is_small_d_k = encoder and dimension == "d_k"
        assert base["head_dim"] == small["head_dim"] / (8 if is_small_d_k else 1)
        batch = command.batch(models[0], dimension)
        assert len(batch["inputs"]) == (1 if dimension in command.OF_TOKENS else 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.parallel", "model.parallel is True"),
        ("--model.window 4", "those of one without; write window None"),
        ("--model.attention-softcap 30", "write attention_softcap None"),
    ],
)
def test_a_block_with_other_mappings_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "lm-proxy", "--desiderata", *words.split(), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_balance_refuses_what_its_table_cannot_hold() -> None:
    built, batch, *_ = inputs_of()
    with pytest.raises(PresetError, match="write key_start=own"):
        balance(
            built,
            batch,
            OptimizerConfig(name="sgd"),
            reference=presets.get("mup", key_start="query"),
        )
