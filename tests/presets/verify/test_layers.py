"""Layers that are judged together, and those that `verify` judges by themselves."""

from __future__ import annotations

import itertools

import pytest

from tests.presets.verify.dumps import Contents, changed, network, verified

pytestmark = pytest.mark.core

QUERY = "attn.q_proj.weight"


def deep(width: int, **fields: float) -> Contents:
    """Return a right network of twelve layers, with fields of the query of layer 11 changed."""
    contents = network(width, 12)
    contents[f"h.11.{QUERY}"] = {**contents[f"h.11.{QUERY}"], **fields}
    return contents


@pytest.mark.parametrize("width", [128, 256, 1024])
@pytest.mark.parametrize(("field", "value"), [("lr", 6e-4), ("std", 0.125), ("multiplier", 8.0)])
def test_one_layer_of_twelve_is_wrong(width: int, field: str, value: float):
    small = deep(64, **{field: 1.0 if field == "multiplier" else value})
    judged = verified(small, deep(width, **{field: value}))
    assert (judged.code, judged.faults) == (1, [f"h.11.{QUERY}"])


@pytest.mark.parametrize(("small", "large"), [(0.0, 1.5e-4), (6e-4, 0.0)])
def test_one_layer_that_is_frozen_at_one_size_is_wrong(small: float, large: float):
    judged = verified(deep(64, lr=small), deep(256, lr=large))
    assert (judged.code, judged.faults) == (1, [f"h.11.{QUERY}"])


def frozen(rate: float, width: int, layers: int, **model: float) -> Contents:
    """Return a network whose first queries are not trained, and the others by a factor faster."""
    contents = network(width, layers, **model)
    for layer in range(layers):
        contents[f"h.{layer}.{QUERY}"]["lr"] *= rate if layer else 0.0
    return contents


def test_a_layer_that_is_not_trained_hides_no_other():
    judged = verified(frozen(1.0, 64, 4), frozen(4.0, 256, 4))
    assert (judged.code, judged.faults) == (1, [f"h.*.{QUERY}"])
    judged = verified(frozen(1.0, 64, 4), frozen(1.0, 256, 4))
    assert (judged.code, judged.line["lacks"]) == (0, [f"lr above 0 of h.0.{QUERY}"])


def test_a_layer_that_is_not_trained_hides_no_other_where_depth_grows():
    small = frozen(1.0, 64, 2, branch=1.0)
    judged = verified(small, frozen(4.0, 64, 8, branch=0.25))
    assert (judged.code, judged.faults) == (1, [f"h.*.{QUERY}"])
    assert verified(small, frozen(1.0, 64, 8, branch=0.25)).code == 0


def test_control_layers_that_grow_alike_are_right():
    """Also with learning rates that fall by a factor of 0.7 from layer to layer."""

    def slower(name: str, entry: Contents) -> Contents | None:
        if not name.startswith("h."):
            return None
        return {"lr": entry["lr"] * 0.7 ** int(name.split(".")[1])}

    files = [network(64, 12), network(256, 12)]
    for dumps in (files, [changed(file, slower) for file in files]):
        judged = verified(*dumps)
        assert (judged.code, judged.line["verdict"]) == (0, "right")


def test_one_layer_that_only_the_deeper_model_has_is_wrong():
    small = network(64, 3)
    large = network(64, 12, branch=0.25)
    assert verified(small, large).code == 0
    large[f"h.7.{QUERY}"]["lr"] *= 2
    for files in ((small, large), (large, small)):
        judged = verified(*files)
        assert (judged.code, judged.faults) == (1, [f"h.7.{QUERY}"])


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


def test_an_mlp_in_a_list_is_judged_layer_by_layer():
    judged = verified(mlp(64), mlp(256))
    assert (judged.code, judged.line["verdict"]) == (0, "right")
    roles = ("patch_embedding", "hidden", "hidden", "readout")
    assert judged.report["guessed"] == {f"layers.{i}.weight": role for i, role in enumerate(roles)}
    judged = verified(mlp(64), mlp(256, rate=4.0))
    (finding,) = judged.findings
    assert (judged.code, finding["names"], finding["what"]) == (1, ["layers.1.weight"], "rate")
