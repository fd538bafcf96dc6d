"""A table of measured numbers: what it gives, what it refuses, and that a file brings it back number for number."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mupax.presets import ParamSpec, PresetError, Role, Scales, get
from mupax.presets.tuned.measured import FORMAT, Table, load, measured, save
from tests.fixtures.commands import command

pytestmark = pytest.mark.core

SIZES = {"layers": 3, "embed": 7, "mlp": 11}
UP = ParamSpec(role=Role.MLP_IN, axes=("layers", "embed", "mlp"), fan_in=("embed",), in_block=True)
READOUT = ParamSpec(role=Role.READOUT, axes=("embed", "classes"), fan_in=("embed",))
GAIN = ParamSpec(role=Role.NORM_GAIN, axes=("embed",))
UP_RATES = (0.1, 0.3, 0.7)

TABLE = Table(
    scales={
        "block.mlp_in": Scales(
            multiplier=1.0, init_std=0.5, lr=UP_RATES, eps=1.0, weight_decay=0.2
        ),
        "readout": Scales(multiplier=0.1 + 0.2, init_std=1e-3, lr=1 / 3, eps=2.0, weight_decay=0.5),
    },
    logits=0.25,
    residual=(((1.0, 0.5), (1.0, 0.25)),) * 2 + (((0.9, 0.5), (0.8, 0.125)),),
    sizes=SIZES,
    optimizer="adamw",
    source="a test",
)


def test_gives_what_was_measured():
    preset = measured(TABLE)
    for spec in (UP, READOUT):
        expected = TABLE.scales[spec.group]
        assert preset.scales(spec, SIZES, "adam", "independent") == expected
        assert preset.factors(spec, SIZES, "adam", "independent") == expected
    assert preset.logit_scale(SIZES) == 0.25
    assert preset.residual_scale(SIZES, 2, "attention") == (0.9, 0.5)
    assert preset.residual_scale(SIZES, 2, "mlp") == (0.8, 0.125)
    without_residual = measured(dataclasses.replace(TABLE, residual=()))
    assert without_residual.residual_scale(SIZES, 1, "mlp") == (1.0, 1.0)


def test_rate_times_coupled_decay_is_the_independent_decay():
    preset = measured(TABLE)
    assert preset.scales(UP, SIZES).weight_decay == pytest.approx([0.2 / lr for lr in UP_RATES])
    assert preset.scales(READOUT, SIZES).weight_decay == pytest.approx(0.5 * 3)


def test_a_file_brings_it_back_number_for_number(tmp_path):
    save(TABLE, tmp_path / "table.json")
    again = load(tmp_path / "table.json")
    assert again == TABLE
    assert measured(again).scales(UP, SIZES) == measured(TABLE).scales(UP, SIZES)


def test_its_numbers_take_no_constants(tmp_path):
    save(TABLE, tmp_path / "table.json")
    name = f"measured:{tmp_path / 'table.json'}"
    done = command("presets constants", name)
    assert done.code == 2
    assert "takes no constants; all its numbers are in its file" in done.err
    with pytest.raises(PresetError, match=r"measured scales take no constants, not rates"):
        get(name, rates={"readout": 2})


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda p: p.scales(UP, {**SIZES, "embed": 14}), "embed=7 and the model has 14"),
        (lambda p: p.scales(UP, {"embed": 7}), "layers=3 and the model has None"),
        (
            lambda p: p.scales(UP, SIZES, "sgd"),
            r"'sgd' \(it was measured with adamw\); it has one for adamw, adam",
        ),
        (lambda p: p.scales(UP, SIZES, "lion"), "measured with adamw"),
        (lambda p: p.scales(GAIN, SIZES), "no row 'norm_gain'"),
        (lambda p: p.row(UP), "no power law"),
        (lambda p: p.with_form("mean-field"), "no form 'mean-field'"),
    ],
)
def test_refuses_what_was_not_measured(ask, text):
    with pytest.raises(PresetError, match=text):
        ask(measured(TABLE))


def _cell(group: str, column: str, value):
    return lambda d: d["scales"][group].update({column: value})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.update(format="measured scales 0"), f'"format": "{FORMAT}"'),
        (lambda d: d.pop("sizes"), r"missing \['sizes'\]"),
        (lambda d: d.update(extra=1), r"unknown \['extra'\]"),
        (lambda d: d.update(scales=[]), "must be objects"),
        (lambda d: d.update(optimizer="adagrad"), "no optimizer is named 'adagrad'"),
        (lambda d: d.update(logits=0), "logits is 0; write a finite number above 0"),
        (lambda d: d["sizes"].update(width=3), "size width=3: write a logical axis"),
        (lambda d: d["sizes"].update(embed=7.5), "size embed=7.5"),
        (lambda d: d["residual"].pop(), "residual has 2 layers and sizes say 3"),
        (lambda d: d.update(residual=[[1, 1]] * 3), "list of pairs of pairs"),
        (lambda d: d.update(residual=[[[1, 1], [1]]] * 3), "two pairs"),
        (lambda d: d["scales"]["readout"].pop("eps"), r"readout must have .* missing \['eps'\]"),
        (lambda d: d["scales"].update(readout=3), "readout must have"),
        (_cell("readout", "lr", "1"), "readout lr is '1'; write a finite number above 0"),
        (_cell("readout", "lr", True), "readout lr is True"),
        (_cell("readout", "lr", 0.0), "readout lr is 0.0; write a finite number above 0"),
        (
            _cell("readout", "init_std", -1.0),
            "readout init_std is -1.0; write a finite number of at least 0",
        ),
        (_cell("readout", "eps", float("nan")), "NaN is no number"),
        (_cell("readout", "lr", 10**400), "a number of 401 digits"),
        (
            _cell("readout", "lr", 1e308),
            r"readout lr is 1e\+308; write a finite number above 0, from 1e-30 to 1e\+30",
        ),
        (_cell("block.mlp_in", "lr", [0.1, 0.2]), "block.mlp_in lr has 2 numbers for 3 layers"),
        (_cell("block.mlp_in", "lr", [0.1, 0.2, [0.3]]), "block.mlp_in lr is "),
    ],
)
def test_refuses_a_file_that_is_not_one(tmp_path, change, text):
    path = tmp_path / "table.json"
    save(TABLE, path)
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(PresetError, match=text) as raised:
        load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", [None, "{", "\x00"])
def test_refuses_a_file_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PresetError, match="no table of measured scales"):
        load(path)
