"""Rows of low-rank adapters: what a preset's algebra gives A and B as a matrix grows."""

from __future__ import annotations

import dataclasses

import pytest

from mupax import presets
from mupax.presets.adapters import pair
from mupax.presets.papers import PRESETS
from mupax.presets.roles import MATRICES, ParamSpec, PresetError, Role
from mupax.presets.rule import Power

pytestmark = pytest.mark.core

WIDTH = {"heads": 1.0, "kv_heads": 1.0, "embed": 1.0, "mlp": 1.0}
BASE = {"embed": 12, "heads": 3, "kv_heads": 3, "head_dim": 4, "mlp": 24, "layers": 2}
SIZES = {
    "embed": 60,
    "heads": 15,
    "kv_heads": 15,
    "head_dim": 4,
    "mlp": 120,
    "layers": 2,
    "rank": 7,
}


def exponents(name: str, spec: ParamSpec) -> tuple[float, ...]:
    """Return exponents of effective std, Adam lr, SGD lr and eps in the width."""
    row = presets.get(name).row(spec)

    def exponent(power: Power) -> float:
        return round(power.growth(WIDTH), 9)

    a = exponent(row.multiplier)
    return (
        exponent(row.init_std) + a,
        exponent(row.adam) + a,
        exponent(row.sgd) + 2 * a,
        exponent(row.eps) - a,
    )


@pytest.mark.parametrize(
    "matrix", ["block.attention.query", "block.attention.out", "block.mlp.up", "block.mlp.down"]
)
@pytest.mark.parametrize(
    ("names", "of_a", "of_b"),
    [
        (
            ("mup", "mup-half", "depth-mup", "completep", "spectral", "maximal-update"),
            (-1, -1, -1, 0),
            (0, 0, 1, -1),
        ),
        (("sp",), (-0.5, 0, 0, 0), (0, 0, 0, 0)),
        (("ntk",), (-0.5, -1.5, -1.5, 0), (0, -0.5, 0, -0.5)),
    ],
)
def test_rows_of_adapters(
    names: tuple[str, ...], of_a: tuple[float, ...], of_b: tuple[float, ...], matrix: str
) -> None:
    a, b = pair(MATRICES[matrix])
    for name in names:
        assert exponents(name, a) == of_a, name
        assert exponents(name, b) == of_b, name


def test_every_preset_has_the_signal_through_an_adapter_no_larger_than_what_reaches_it() -> None:
    a, b = pair(MATRICES["block.mlp.up"])
    for name in PRESETS:
        if name != "sp":  # the control: its signal through A grows as n^1/2
            (std, adam, *_) = exponents(name, a)
            (_, of_b, *_) = exponents(name, b)
            assert std + 1 + of_b == 0, name
            assert adam + 1 <= 0, name
    assert exponents("sp", a)[0] + 1 + exponents("sp", b)[1] == 0.5


def test_numbers_are_those_of_the_base_there_and_know_no_rank() -> None:
    a, b = pair(MATRICES["block.attention.query"])
    mup = presets.get("mup", base=BASE)
    at_base, grown = ({**sizes, "rank": 7} for sizes in (BASE, SIZES))
    assert mup.scales(a, at_base).init_std == pytest.approx(12**-0.5)
    assert mup.scales(a, grown).init_std == pytest.approx(12**-0.5 / 5)
    assert (mup.scales(a, grown).lr, mup.scales(b, grown).lr) == (pytest.approx(1 / 5), 1.0)
    assert mup.scales(b, grown).init_std == 0
    for name in PRESETS:
        preset = presets.get(name, base=None if name == "u-mup" else BASE)
        assert preset.scales(b, {**SIZES, "rank": 7}) == preset.scales(b, {**SIZES, "rank": 70})
    assert mup.scales(a, grown, "muon") == mup.scales(a, grown, "adam")
    # LoRA+'s ratio, as a constant.
    assert presets.get("mup", base=BASE, rates={"lora_b": 16}).scales(b, grown).lr == 16


@pytest.mark.parametrize("form", ["plain", "mean-field", "table-9"])
def test_forms_move_no_training(form: presets.Form) -> None:
    for spec in pair(MATRICES["block.mlp.down"]):
        native, moved = (
            presets.get("mup", base=BASE, form=f).scales(spec, SIZES) for f in (None, form)
        )
        for column in ("lr", "init_std"):
            products = [row.multiplier * getattr(row, column) for row in (native, moved)]
            assert products[0] == pytest.approx(products[1])


def test_wrong_declarations_are_answered() -> None:
    a, _ = pair(MATRICES["block.mlp.up"])
    with pytest.raises(PresetError, match="adapters, and no others, say which matrix"):
        dataclasses.replace(a, adapts=None)
    with pytest.raises(PresetError, match="adapters, and no others, say which matrix"):
        dataclasses.replace(MATRICES["block.mlp.up"], adapts=MATRICES["block.mlp.up"])
    assert a.group == "block.mlp_in.lora_a"
    assert a.role is Role.LORA_A
