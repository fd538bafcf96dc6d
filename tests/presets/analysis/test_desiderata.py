"""Dimensions that can be scaled, from rules alone; docs/evidence/desiderata.json measures."""

from __future__ import annotations

import json

import pytest

from mupax import presets
from mupax.presets import PresetError
from mupax.presets.analysis.desiderata import COLUMNS, ENCODED, GROWTHS, desiderata
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import LIMITS
from tests.fixtures.commands import output

pytestmark = pytest.mark.core


def failing(
    preset: str, dimension: str, **constants
) -> dict[str, tuple[float | None, tuple[str, ...]]]:
    cells = desiderata(presets.get(preset, **constants), dimension)
    return {
        column: (cells[column].exponent, cells[column].of)
        for column in COLUMNS
        if not cells[column].holds
    }


@pytest.mark.parametrize(
    ("preset", "constants", "dimension", "wrong"),
    [
        ("mup-half", {}, "d_k", {"speed": (-0.5, ("q", "k"))}),
        ("mup", {}, "d_k", {"signal": (-0.5, ("logits",))}),
        ("mup", {"key_start": "query"}, "d_k", {}),
        ("mup", {}, "d_ff", {"speed": (-0.5, ("MLP in",))}),
        ("mup", {"mlp_out": "mean-field"}, "d_ff", {"signal": (-0.5, ("MLP out",))}),
        ("mup", {}, "heads", {"speed": (-0.5, ("q", "k", "logits", "v", "o"))}),
        ("mup", {}, "d_v", {"speed": (-0.5, ("v", "o")), "balance": (-1, ("query", "key"))}),
        ("mup", {}, "width", {}),
        ("mup-half", {}, "width", {}),
        ("depth-mup", {"alpha_l": 1.0}, "depth", {"signal": (-0.5, ("branches",))}),
    ],
)
def test_what_can_be_scaled_and_what_says_that_it_cannot(
    preset, constants, dimension, wrong
) -> None:
    assert failing(preset, dimension, **constants) == wrong


@pytest.mark.parametrize(
    ("preset", "constants", "dimension", "wrong"),
    [
        ("mup", {}, "d_k", {"signal": "no: every logits d_k^-0.5"}),
        ("mup-half", {}, "d_k", {"speed": "no: every q, k d_k^-0.5"}),
        ("mup", {"key_start": "query"}, "d_k", {}),
        ("mup", {}, "d_ff", {"speed": "no: every MLP in d_ff^-0.5"}),
        ("mup", {}, "width", {}),
        ("depth-mup", {"alpha_l": 1.0}, "depth", {
            "signal": "no: decoder branches depth^-0.5",
            "speed": "no: encoder q, k, logits, v, attention out, o, MLP in, MLP out, embedding depth^+0.5",
            "balance": "no: encoder token, query, key, value, attention out, MLP in, MLP out depth^-1",
        }),
        ("depth-mup", {"alpha_l": 0.5}, "depth", {
            "speed": "no: decoder q, k, logits, v, attention out, o, MLP in, MLP out; cross q, k, logits, v, attention out, o depth^-0.5",
        }),
        ("depth-mup", {"alpha_l": 1.0}, "encoder_depth", {"signal": "no: encoder branches encoder_depth^-0.5"}),
        ("mup", {}, "encoder_depth", {"signal": "no: encoder stream encoder_depth^+0.5", **dict.fromkeys(
            COLUMNS[1:], "no power law: the encoder stream grows"
        )}),
    ],
)  # fmt: skip
def test_what_an_encoder_adds(preset, constants, dimension, wrong) -> None:
    """What it gets back is a sum over the decoder's branches: L^(1/2 - alpha_l) at first."""
    cells = desiderata(presets.get(preset, **constants), dimension, encoder=True)
    assert {
        column: cell.text(dimension) for column, cell in cells.items() if not cell.holds
    } == wrong


def test_a_preset_without_a_rule_for_sgd_has_no_rates_to_ask() -> None:
    cells = desiderata(presets.get("u-mup"), "d_k")
    assert cells["signal"].of == ("logits",)
    assert cells["balance"].text("d_k") == cells["loss decay"].text("d_k") == "no rule for SGD"


def test_keys_that_start_as_queries_have_logits_of_order_one() -> None:
    lines = output("presets desiderata mup --constant key_start=query").splitlines()
    (row,) = (line.split() for line in lines if line.startswith("d_k"))
    assert row[:6] == ["d_k", "can", "yes", "yes", "yes", "yes"]
    for preset, logits in ((presets.get("mup"), -0.5), (presets.get("mup", key_start="query"), 0)):
        limit = Limit(preset, "adam", LIMITS["head_dim"])
        assert limit.observables()["attention logits"] == logits
        assert limit.observables()["variance of attention over heads"] == -1
        assert limit.observables()["change of attention logits"] == 0
    queries = presets.get("mup", key_start="query", base={"head_dim": 16})
    assert queries.logit_scale({"head_dim": 64}) == 1 / 64
    with pytest.raises(PresetError, match="write alpha_a 1"):
        presets.get("depth-mup", alpha_a=0.5, key_start="query")


@pytest.mark.parametrize(("flag", "growths"), [("", GROWTHS), ("--encoder", ENCODED)])
def test_json_has_every_dimension(flag: str, growths) -> None:
    assert json.loads(output("presets desiderata sp --json", flag)).keys() == growths.keys()
