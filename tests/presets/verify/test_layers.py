"""Layers that are judged together, and those that `verify` judges by themselves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.presets.verify.dumps import Contents, changed, verified
from tests.presets.verify.test_verdicts import network

pytestmark = pytest.mark.core

QUERY = "attn.q_proj.weight"


def faults(report: Contents) -> list[str]:
    """Return the names of parameters with a fault."""
    parameters = []
    for finding in report["lines"][0]["findings"]:
        if finding["severity"] == "fault":
            parameters += finding["names"]
    return parameters


def deep(width: int, **fields: float) -> Contents:
    """Return a right network of twelve layers, with fields of the query of layer 11 changed."""
    contents = network(width, 12)
    contents[f"h.11.{QUERY}"] = {**contents[f"h.11.{QUERY}"], **fields}
    return contents


@pytest.mark.parametrize("width", [128, 256, 1024])
@pytest.mark.parametrize(("field", "value"), [("lr", 6e-4), ("std", 0.125), ("multiplier", 8.0)])
def test_one_layer_of_twelve_is_wrong(width: int, field: str, value: float, tmp_path: Path):
    small = deep(64, **{field: 1.0 if field == "multiplier" else value})
    code, report = verified(tmp_path, small, deep(width, **{field: value}))
    assert (code, faults(report)) == (1, [f"h.11.{QUERY}"])


@pytest.mark.parametrize(("small", "large"), [(0.0, 1.5e-4), (6e-4, 0.0)])
def test_one_layer_that_is_frozen_at_one_size_is_wrong(small: float, large: float, tmp_path: Path):
    code, report = verified(tmp_path, deep(64, lr=small), deep(256, lr=large))
    assert (code, faults(report)) == (1, [f"h.11.{QUERY}"])


def test_a_layer_that_is_not_trained_hides_no_other(tmp_path: Path):
    def frozen(width: int, rate: float) -> Contents:
        contents = network(width, 4)
        for layer in range(4):
            contents[f"h.{layer}.{QUERY}"]["lr"] *= rate if layer else 0.0
        return contents

    code, report = verified(tmp_path, frozen(64, 1.0), frozen(256, 4.0))
    assert (code, faults(report)) == (1, [f"h.*.{QUERY}"])
    code, report = verified(tmp_path, frozen(64, 1.0), frozen(256, 1.0))
    assert (code, report["lines"][0]["lacks"]) == (0, [f"lr above 0 of h.0.{QUERY}"])


def test_a_layer_that_is_not_trained_hides_no_other_where_depth_grows(tmp_path: Path):
    def frozen(layers: int, rate: float) -> Contents:
        contents = network(64, layers, branch=2 / layers)
        for layer in range(layers):
            contents[f"h.{layer}.{QUERY}"]["lr"] *= rate if layer else 0.0
        return contents

    code, report = verified(tmp_path, frozen(2, 1.0), frozen(8, 4.0))
    assert (code, faults(report)) == (1, [f"h.*.{QUERY}"])
    assert verified(tmp_path, frozen(2, 1.0), frozen(8, 1.0))[0] == 0


def test_control_twelve_layers_that_grow_alike_are_right(tmp_path: Path):
    code, report = verified(tmp_path, deep(64), deep(256))
    assert (code, report["lines"][0]["verdict"]) == (0, "right")


def layer_decayed(contents: Contents) -> Contents:
    """Return a dump in which learning rates fall by a factor of 0.7 from layer to layer."""

    def slower(name: str, entry: Contents) -> Contents | None:
        if not name.startswith("h."):
            return None
        return {"lr": entry["lr"] * 0.7 ** int(name.split(".")[1])}

    return changed(contents, slower)


def test_rates_that_fall_from_layer_to_layer_are_right(tmp_path: Path):
    code, report = verified(
        tmp_path, layer_decayed(network(64, 12)), layer_decayed(network(256, 12))
    )
    assert (code, report["lines"][0]["verdict"]) == (0, "right")


def test_one_layer_that_only_the_deeper_model_has_is_wrong(tmp_path: Path):
    large = network(64, 12, branch=0.25)
    large[f"h.7.{QUERY}"]["lr"] *= 2
    for files in ((network(64, 3), large), (large, network(64, 3))):
        code, report = verified(tmp_path, *files)
        assert (code, faults(report)) == (1, [f"h.7.{QUERY}"])
    right = network(64, 12, branch=0.25)
    assert verified(tmp_path, network(64, 3), right)[0] == 0


def mlp(width: int, rate: float = 1.0) -> Contents:
    """Return an MLP in a list of layers, right under muP relative to width 64.

    Args:
        rate: Factor on the learning rate of the second layer.
    """
    sizes = [10, width, width, width, 3]
    contents: Contents = {}
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        reads_width = layer > 0
        entry = {
            "shape": [fan_out, fan_in],
            "std": fan_in**-1.0 if layer == 3 else fan_in**-0.5,
            "lr": 0.064 / width if reads_width else 1e-3,
        }
        contents[f"layers.{layer}.weight"] = entry
        contents[f"layers.{layer}.bias"] = {"shape": [fan_out], "std": 0.0, "lr": 1e-3}
    contents["layers.1.weight"]["lr"] *= rate
    return {**contents, "model": {"optimizer": "adam"}}


def test_an_mlp_in_a_list_is_judged_layer_by_layer(tmp_path: Path):
    code, report = verified(tmp_path, mlp(64), mlp(256))
    assert (code, report["lines"][0]["verdict"]) == (0, "right")
    assert report["guessed"] == {
        "layers.0.weight": "patch_embedding",
        "layers.1.weight": "hidden",
        "layers.2.weight": "hidden",
        "layers.3.weight": "readout",
    }
    code, report = verified(tmp_path, mlp(64), mlp(256, rate=4.0))
    (finding,) = report["lines"][0]["findings"]
    assert (code, finding["names"], finding["what"]) == (1, ["layers.1.weight"], "rate")
