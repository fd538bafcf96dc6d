"""Choices of Muon's steps in theory: what each does as a dimension grows, against closed forms."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from mupax import presets
from mupax.presets import Preset, PresetError
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.verdicts import verdicts
from mupax.presets.preset import WHOLE_MATRICES
from mupax.presets.roles import EXPERT_MATRICES, MATRICES
from tests.fixtures.commands import output

pytestmark = pytest.mark.core

FAMILY = ("mup", "mup-half", "depth-mup")
BLOCK = {name: spec for name, spec in MATRICES.items() if spec.in_block}
IN_BLOCKS = {**BLOCK, **EXPERT_MATRICES}
ALL = {**MATRICES, **EXPERT_MATRICES}
ATTENTION = [name for name in BLOCK if ".attention." in name]
BASE = {
    "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 80, "layers": 2, "vocab": 64,
    "experts": 4, "active": 2, "expert_dim": 24,
}  # fmt: skip
GROWN = {**BASE, "embed": 128, "heads": 16, "kv_heads": 8, "mlp": 320, "expert_dim": 96}
"""Four times as many heads and four times the widths."""


def preset_of(name: str = "mup", **choices: Any) -> Preset:
    return presets.get(name, base=BASE, **choices)


def moved(preset: Preset) -> dict[str, dict[str, float]]:
    """Return the exponents of all changes as each size grows."""
    table = verdicts(preset, "muon")
    return {
        row: {limit: entry.exponent for limit, entry in by_limit.items()}
        for row, by_limit in table.items()
        if row.startswith(("change", "weight movement"))
    }


def scales(name: str, sizes: dict[str, int], **choices: str) -> Any:
    return preset_of(**choices).scales(ALL[name], sizes, "muon")


def rate(name: str, sizes: dict[str, int], **choices: str) -> Any:
    return preset_of(**choices).factors(ALL[name], sizes, "muon").lr


# In the limits


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    "choices",
    [
        {"muon_blocks": "heads"},
        {"muon_blocks": "tiles"},
        {"muon_scale": "measured"},
        {"muon_scale": "measured", "muon_blocks": "heads"},
        {"muon_scale": "measured", "muon_blocks": "tiles"},
        {"muon_shape": "absolute"},
        {"muon_shape": "absolute", "muon_blocks": "heads"},
    ],
)
def test_steps_move_a_model_as_those_of_whole_matrices(name: str, choices: dict[str, Any]) -> None:
    assert moved(presets.get(name, **choices)) == moved(presets.get(name))


def test_control_heads_without_their_root_drift_as_heads_grow() -> None:
    """The best rate must then fall as H^-1/2, for every change by these matrices."""
    usual = moved(presets.get("mup"))
    unscaled = moved(presets.get("mup", muon_blocks="heads-unscaled"))
    drifting = {
        row for row, by_limit in unscaled.items() if by_limit["heads"] == usual[row]["heads"] + 0.5
    }
    assert usual.keys() - drifting == {"weight movement, embedding", "weight movement, readout"}
    # Where heads widen and are not more, nothing drifts.
    for limit in ("head_dim", "depth"):
        assert [by[limit] for by in unscaled.values()] == [by[limit] for by in usual.values()]
    entry = verdicts(presets.get("mup", muon_blocks="heads-unscaled"), "muon")
    assert entry["change of attention logits"]["heads"].verdict == "explodes"


@pytest.mark.parametrize("matrix", ["query", "attention out", "key", "value"])
def test_blocks_act_in_sum_as_the_root_of_their_number(matrix: str) -> None:
    widths = {"embed": 1.0, "mlp": 1.0}
    for grown in (("heads", "kv_heads"), ("heads",), ("head_dim",)):
        growth = {**widths, **dict.fromkeys(grown, 1.0)}
        whole, unscaled = (
            Limit(presets.get("mup", muon_blocks=blocks), "muon", growth)
            for blocks in ("matrix", "heads-unscaled")
        )
        axis = "kv_heads" if matrix in ("key", "value") else "heads"
        root = 0.5 if axis in grown else 0.0
        assert unscaled.acts(matrix) == pytest.approx(whole.acts(matrix) + root)
        assert unscaled.movement(matrix) == pytest.approx(whole.movement(matrix) + root)
        assert unscaled.first_order(matrix) == pytest.approx(whole.first_order(matrix) + root)


def test_tiles_have_steps_of_adam() -> None:
    """A tile has one size, so its entries do not fall with the width: only the rate does."""
    growth = {"heads": 1.0, "kv_heads": 1.0, "embed": 1.0, "mlp": 1.0}
    tiles = Limit(presets.get("mup", muon_blocks="tiles"), "muon", growth)
    adam = Limit(presets.get("mup"), "adam", growth)
    for name, spec in tiles.specs.items():
        if spec.in_block:
            assert tiles.step(name) == adam.step(name) == -1
            assert tiles.acts(name) == adam.acts(name)


# Rates


def test_rates_of_heads_are_over_the_root_of_their_number() -> None:
    for name in BLOCK:
        whole = rate(name, GROWN)
        assert rate(name, GROWN, muon_blocks="heads-unscaled") == whole
        expected = whole / 2 if name in ATTENTION else whole
        assert rate(name, GROWN, muon_blocks="heads") == pytest.approx(expected), name
    # Eight query heads for a key head: each matrix has its own number.
    shared = {**GROWN, "kv_heads": 2}
    query = rate("block.attention.query", shared, muon_blocks="heads")
    key = rate("block.attention.key", shared, muon_blocks="heads")
    assert query == pytest.approx(math.sqrt(128 / 128) / 2)
    assert key == pytest.approx(math.sqrt(16 / 16 / 4))


def test_rates_of_tiles_are_one_over_the_fan_in() -> None:
    for name in IN_BLOCKS:
        expected = rate(name, GROWN) if name.endswith("router") else 1 / 4
        assert rate(name, GROWN, muon_blocks="tiles") == pytest.approx(expected), name


@pytest.mark.parametrize("choices", [{"muon_blocks": "heads"}, {"muon_blocks": "tiles"}])
def test_rates_of_measured_steps_know_no_blocks(choices: dict[str, str]) -> None:
    for name, sizes in itertools.product(IN_BLOCKS, (BASE, GROWN)):
        assert rate(name, sizes, muon_scale="measured", **choices) == rate(name, sizes)


def test_nothing_but_muons_matrices_changes() -> None:
    choices = {"muon_blocks": "heads", "muon_shape": "absolute"}
    for name in ("token", "readout"):
        assert scales(name, GROWN, **choices) == scales(name, GROWN)
    for name in BLOCK:
        changed, usual = scales(name, GROWN, **choices), scales(name, GROWN)
        assert changed.lr * changed.weight_decay == pytest.approx(usual.lr * usual.weight_decay)
        own_step = {"lr": usual.lr, "weight_decay": usual.weight_decay}
        assert dataclasses.replace(changed, **own_step) == usual


# The absolute shape


def root(numerator: int, denominator: int) -> float:
    return math.sqrt(numerator / denominator)


ABSOLUTE: dict[str, Callable[[dict[str, int]], float]] = {
    "block.attention.query": lambda n: root(n["heads"] * n["head_dim"], n["embed"]),
    "block.attention.key": lambda n: root(n["kv_heads"] * n["head_dim"], n["embed"]),
    "block.attention.value": lambda n: root(n["kv_heads"] * n["head_dim"], n["embed"]),
    "block.attention.out": lambda n: root(n["embed"], n["heads"] * n["head_dim"]),
    "block.mlp.up": lambda n: root(n["mlp"], n["embed"]),
    "block.mlp.down": lambda n: root(n["embed"], n["mlp"]),
    "block.experts.up": lambda n: root(n["expert_dim"], n["embed"]),
    "block.experts.down": lambda n: root(n["embed"], n["expert_dim"]),
}


@pytest.mark.parametrize("name", ABSOLUTE)
def test_the_absolute_shape_is_the_spectral_condition(name: str) -> None:
    uneven = {**GROWN, "mlp": 256, "kv_heads": 2, "expert_dim": 40}
    for sizes in (BASE, GROWN, uneven):
        expected = ABSOLUTE[name](sizes)
        assert scales(name, sizes, muon_shape="absolute").lr == pytest.approx(expected)
        measured = scales(name, sizes, muon_shape="absolute", muon_scale="measured")
        assert measured.lr == pytest.approx(expected)
    # The control: relative to the base every matrix of the base has 1.
    assert scales(name, BASE).lr == 1
    # In the absolute form every base size is 1, and there is one shape.
    for shape in ("base", "absolute"):
        absolute = presets.get("mup", muon_shape=shape).scales(ALL[name], GROWN, "muon")
        assert absolute.lr == pytest.approx(ABSOLUTE[name](GROWN))


@pytest.mark.parametrize("name", ATTENTION)
def test_heads_of_the_absolute_shape_have_the_root_of_their_number_too(name: str) -> None:
    choices = {"muon_shape": "absolute", "muon_blocks": "heads"}
    for sizes in (BASE, GROWN):
        number = sizes["kv_heads" if name.endswith(("key", "value")) else "heads"]
        whole = ABSOLUTE[name](sizes)
        assert scales(name, sizes, **choices).lr == pytest.approx(whole / math.sqrt(number))
        measured = scales(name, sizes, muon_scale="measured", **choices)
        assert measured.lr == pytest.approx(whole)


def test_entries_of_moonlights_scale_are_those_of_a_block() -> None:
    """Entries of an orthogonal [in, out] have root mean square max(in, out)^-1/2."""
    query = "block.attention.query"
    for blocks in ("matrix", "heads"):
        lr = scales(query, BASE, muon_scale="rms", muon_blocks=blocks).lr
        assert lr == pytest.approx(0.2 * math.sqrt(32))
    wide = {**BASE, "embed": 4}
    narrow = presets.get("mup", base=wide, muon_scale="rms", muon_blocks="heads")
    lr = narrow.scales(ALL[query], wide, "muon").lr
    assert lr == pytest.approx(0.2 * math.sqrt(8))


# What the optimizer is told


def test_blocks_are_sizes_along_each_axis() -> None:
    heads = preset_of(muon_blocks="heads").matrix_steps(IN_BLOCKS, GROWN, "muon")
    assert heads.blocks == {
        "block.attention.query": (1, 128, 1, 8),
        "block.attention.key": (1, 128, 1, 8),
        "block.attention.value": (1, 128, 1, 8),
        "block.attention.out": (1, 1, 8, 128),
    }
    tiles = preset_of(muon_blocks="tiles").matrix_steps(IN_BLOCKS, GROWN, "muon")
    assert set(tiles.blocks) == {name for name in IN_BLOCKS if not name.endswith("router")}
    assert tiles.blocks["block.attention.out"] == (1, 4, 8, 32)
    assert tiles.blocks["block.mlp.up"] == (1, 32, 80)
    assert tiles.blocks["block.experts.down"] == (1, 1, 24, 32)
    assert not tiles.measured
    measured = preset_of(muon_scale="measured").matrix_steps(IN_BLOCKS, GROWN, "muon")
    assert measured.measured
    assert measured.blocks == {}
    for choices in ({}, {"muon_scale": "rms"}, {"muon_shape": "absolute"}):
        assert preset_of(**choices).matrix_steps(IN_BLOCKS, GROWN, "muon") == WHOLE_MATRICES
    assert preset_of().matrix_steps(IN_BLOCKS, GROWN, "adamw") == WHOLE_MATRICES


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"muon_scale": "rms", "muon_shape": "absolute"},
            "muon_scale=rms sets the size of steps at the base, and so does muon_shape=absolute; "
            "leave one of them out",
        ),
        (
            {"muon_scale": "measured", "muon_blocks": "heads-unscaled"},
            "whatever the factor of heads; write muon_blocks=heads",
        ),
    ],
)
def test_choices_that_contradict_each_other_are_refused(
    choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(PresetError, match=message):
        presets.get("mup", **choices)


@pytest.mark.parametrize(
    "choice", [("muon_scale", "measured"), ("muon_blocks", "tiles"), ("muon_shape", "absolute")]
)
def test_other_optimizers_are_refused_with_the_constant(choice: tuple[str, str]) -> None:
    preset = preset_of(**dict([choice]))
    assert preset.optimizers == ("muon",)
    with pytest.raises(PresetError, match=f"{'='.join(choice)} is about Muon; leave it out"):
        preset.factors(BLOCK["block.mlp.up"], BASE, "adamw")


def test_commands_show_them() -> None:
    limits = "presets limits mup --optimizer muon --constant"
    shown = output(limits, "muon_blocks=heads-unscaled")
    assert "muon_blocks=heads-unscaled" in shown
    assert "explodes H^0.5" in shown
    assert "explodes H^0.5" not in output(limits, "muon_blocks=heads")

    table = "presets table mup --model lm-proxy --base lm-proxy --optimizer muon --absolute"
    lines = output(table, "--constant muon_shape=absolute").splitlines()
    # At an MLP of two and a half times the width.
    rates = {line.split()[0]: line.split()[5] for line in lines if line.startswith("block.mlp.")}
    assert rates["block.mlp.up"] == "1.581"
    assert rates["block.mlp.down"] == "0.6325"
