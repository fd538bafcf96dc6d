"""No false alarm for tables of presets in every form and for dumps of microsoft/mup."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mupax import presets
from mupax.presets.verify.reference import ORDER
from mupax.zoo.configs import EncoderDecoderConfig, ModelConfig, ViTConfig
from tests.presets.verify.dumps import CONFIGS, Contents, changed, decoder, dump, verified

pytestmark = pytest.mark.core

_VIT: dict[str, Any] = {
    "image_size": 6,
    "patch_size": 3,
    "channels": 1,
    "num_classes": 7,
    "pool": "cls",
    "qk_norm": True,
}
_ED: dict[str, Any] = {
    "vocab_size": 11,
    "seq_len": 5,
    "target_len": 3,
    "positions": "relative",
    "tied": False,
}
FAMILIES: dict[str, ModelConfig] = {
    "vit": ViTConfig(width=8, num_heads=2, depth=2, layer_scale=0.1, **_VIT),
    "decoder": decoder(8, heads=2, activation="swiglu"),
    "encoder-decoder": EncoderDecoderConfig(width=8, num_heads=2, depth=2, encoder_depth=3, **_ED),
}
CASES = [
    (name, tuple(constants.items()), optimizer, family)
    for name, constants in ORDER
    for family in FAMILIES
    if family == "decoder"
    or dict(ORDER)[name] == constants  # of several exponents of a preset the decoder has all
    for optimizer in presets.get(name, **dict(constants)).optimizers
    if optimizer not in ("adam", "momentum")  # whose columns are those of adamw and sgd
]


def grown(base: Any, axis: str) -> Any:
    """The model with four times as much of an axis."""
    fields = {
        "heads": {"width": base.width * 4, "num_heads": base.num_heads * 4},
        "head_dim": {"width": base.width * 4},
    }
    deeper = {"depth": base.depth * 4} | (
        {"encoder_depth": base.encoder_depth * 4} if hasattr(base, "encoder_depth") else {}
    )
    return dataclasses.replace(base, **{**fields, "depth": deeper}[axis])


def test_there_are_enough_of_them():
    assert len(CASES) >= 50


@pytest.mark.parametrize(("name", "constants", "optimizer", "family"), CASES)
def test_a_presets_own_table_is_right_and_is_recognized(
    name: str, constants: tuple, optimizer: str, family: str, tmp_path: Path
):
    preset = presets.get(name, **dict(constants))
    base = FAMILIES[family]
    files = [dump(preset, model, base, optimizer) for model in (base, grown(base, "heads"))]
    code, report = verified(tmp_path, *files)
    (line,) = report["lines"]
    assert (code, [f for f in line["findings"] if f["severity"] == "fault"]) == (0, [])
    assert line["times"] == 4


@pytest.mark.parametrize("axis", ["heads", "head_dim", "depth"])
@pytest.mark.parametrize(
    "name", ["sp", "mup", "mup-half", "completep", "maximal-update", "hybrid", "sp-layerwise"]
)
def test_what_is_meant_is_right_along_every_axis(name: str, axis: str, tmp_path: Path):
    """A preset that is unstable along an axis is compared only if it is named, with a caution."""
    base = FAMILIES["decoder"]
    preset = presets.get(name)
    files = [dump(preset, model, base) for model in (base, grown(base, axis))]
    code, report = verified(tmp_path, *files, flags=("--preset", name))
    (line,) = report["lines"]
    assert (code, line["reference"], line["limits"]) == (0, name, {})
    told = [finding["names"][0] for finding in line["findings"]]
    root = axis == "head_dim" and name not in ("mup", "completep")
    itself = (axis == "depth" and name != "completep") or name in ("sp", "hybrid", "sp-layerwise")
    itself |= (name, axis) == (
        "maximal-update",
        "head_dim",
    )  # whose queries and keys are not slowed down
    assert told == ["attention logits"] * root + [f"{name} itself"] * itself


@pytest.mark.parametrize("form", presets.FORMS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_multiplier_may_be_in_any_place(form: presets.Form, optimizer: str, tmp_path: Path):
    base = FAMILIES["decoder"]
    preset = presets.get("mup", form=form)
    code, report = verified(
        tmp_path, *(dump(preset, m, base, optimizer) for m in (base, grown(base, "heads")))
    )
    assert (code, report["lines"][0]["findings"], report["lines"][0]["reference"]) == (0, [], "mup")


@pytest.mark.parametrize(("tied", "decay"), [(True, "coupled"), (False, "independent")])
def test_a_tied_readout_and_independent_decay_are_right(tied: bool, decay: Any, tmp_path: Path):
    base = decoder(8, tied=tied)
    preset = presets.get("mup")
    code, report = verified(
        tmp_path, *(dump(preset, m, base, "adamw", decay) for m in (base, grown(base, "heads")))
    )
    assert (code, report["lines"][0]["findings"]) == (0, [])


@pytest.mark.parametrize("ratios", [(4, 3), (4, 3.5, 3), (3, 3, 2.75, 2.6875)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("name", ["mup", "spectral"])
def test_an_mlp_of_rounded_size_is_right_at_its_true_fan_in(
    name: str, optimizer: str, ratios: tuple[float, ...], tmp_path: Path
):
    models = []
    for index, ratio in enumerate(ratios):
        models.append(decoder(256 * 2**index, activation="swiglu", mlp_ratio=ratio))
    files = [dump(presets.get(name), model, models[0], optimizer) for model in models]
    code, report = verified(tmp_path, *files)
    (line,) = report["lines"]
    assert (code, line["verdict"]) == (0, "right")

    # The control: all matrices follow the width, as where F/D is taken for a constant.
    def by_width(path: str, entry: Contents) -> Contents | None:
        if path != "block.mlp.down":
            return None
        times = models[-1].width / models[0].width
        return {"std": files[0][path]["std"] * times**-0.9, "lr": files[0][path]["lr"]}

    files[-1] = changed(files[-1], by_width)
    code, report = verified(tmp_path, *files)
    assert code == 1
    assert "block.mlp.down" in str(report["lines"][0]["findings"])


@pytest.mark.parametrize(
    ("widths", "ratios", "grows", "verdict"),
    [
        ((256, 256), (4, 5), {"mlp": 1.0}, "right"),  # the MLP alone
        ((256, 320), (4, 3.2), {"embed": 1.0}, "wrong"),  # the width alone
        ((256, 512, 1024), (4, 3.25, 2.625), {"embed": 1.0, "mlp": 0.696}, "wrong"),  # a drift
    ],
)
def test_an_mlp_that_does_not_grow_in_step_is_not_taken_for_rounded(
    widths: tuple[int, ...],
    ratios: tuple[float, ...],
    grows: dict[str, float],
    verdict: str,
    tmp_path: Path,
):
    models = []
    for width, ratio in zip(widths, ratios, strict=True):
        models.append(decoder(width, activation="swiglu", mlp_ratio=ratio))
    files = [dump(presets.get("spectral"), model, models[0], "muon") for model in models]
    code, report = verified(tmp_path, *files)
    (line,) = report["lines"]
    for axis in ("embed", "mlp"):
        assert line["grows"].get(axis) == pytest.approx(grows.get(axis), abs=1e-3)
    # Where the MLP lags behind, spectral is unstable, and the table is held against mup.
    assert (code, line["verdict"]) == (int(verdict == "wrong"), verdict)


def test_two_lines_of_growth_are_held_against_one_base(tmp_path: Path):
    base = FAMILIES["decoder"]
    preset = presets.get("completep")
    models = (
        base,
        grown(base, "heads"),
        grown(base, "depth"),
        grown(grown(base, "heads"), "heads"),
    )
    code, report = verified(tmp_path, *(dump(preset, model, base) for model in models))
    assert code == 0
    assert [(line["times"], line["findings"]) for line in report["lines"]] == [
        (4.0, []),
        (16.0, []),
    ]


MUP = json.loads((CONFIGS / "mup.json").read_text())
"""Values of `mup` 1.0.0 for an MLP, a CNN and a Transformer at widths 32 (base) and 128."""


@pytest.mark.parametrize(
    "case", [f"{m} {o}" for m in ("mlp", "cnn", "transformer") for o in ("adamw", "sgd")]
)
def test_what_microsofts_package_makes_is_right(case: str, tmp_path: Path):
    code, report = verified(tmp_path, *MUP[case])
    (line,) = report["lines"]
    assert code == 0
    assert {finding["what"] for finding in line["findings"]} <= {"eps"}  # which mup leaves alone


def test_what_microsofts_package_makes_of_a_tied_table_is_not(tmp_path: Path):
    """Its issue 55, by its own code."""
    code, report = verified(tmp_path, *MUP["tied adamw"])
    (line,) = report["lines"]
    assert code == 1
    assert line["published"][0]["mistake"] == "tied table rescaled as a readout"


def test_nor_without_base_shapes(tmp_path: Path):
    code, report = verified(tmp_path, *MUP["no base"])
    assert code == 1
    assert [mistake["mistake"] for mistake in report["lines"][0]["published"]] == [
        "base shapes of the target"
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_multipliers_moved_at_random_are_the_same_parameterization(optimizer: str, tmp_path: Path):
    """Move each multiplier by theta, another at every size, and std, lr, eps and wd against it."""
    random = Random(0)
    base = FAMILIES["decoder"]
    preset = presets.get("mup")

    def moved(contents: Contents) -> Contents:
        def one(name: str, entry: Contents) -> Contents:
            theta = 2 ** random.uniform(-5, 5)
            slower = theta**2 if optimizer == "sgd" else theta
            columns = {
                "std": 1 / theta,
                "lr": 1 / slower,
                "eps": theta,
                "wd": slower,
                "multiplier": theta,
            }
            return {column: entry[column] * factor for column, factor in columns.items()}

        return changed(contents, one)

    files = [moved(dump(preset, model, base, optimizer)) for model in (base, grown(base, "heads"))]
    code, report = verified(tmp_path, *files)
    assert (code, report["lines"][0]["findings"], report["lines"][0]["reference"]) == (0, [], "mup")


def test_layers_with_names_of_their_own_grow_in_number(tmp_path: Path):
    """Check PyTorch's names, one array a layer, under a rule for depth."""
    preset = presets.get("completep")
    base = decoder(8, heads=2)

    def unstacked(contents: Contents) -> Contents:
        layers = contents["model"]["layers"]
        split = {
            name.replace("block.", f"layers.{i}.") if name.startswith("block.") else name: {**entry, "shape": entry["shape"][1:]}
            if name.startswith("block.") else entry
            for name, entry in contents.items() if name != "model"
            for i in range(layers if name.startswith("block.") else 1)
        }  # fmt: skip
        return {
            **split,
            "model": {key: value for key, value in contents["model"].items() if key != "layers"},
        }

    files = [unstacked(dump(preset, model, base)) for model in (base, grown(base, "depth"))]
    code, report = verified(tmp_path, *files)
    (line,) = report["lines"]
    assert (code, line["findings"], line["grows"]) == (
        0,
        [],
        {"layers": 1.0, "encoder_layers": 1.0},
    )
    wrong = changed(
        files[1],
        lambda n, e: (
            {"eps": e["eps"] / 4} if "up" in n else {"lr": e["lr"] * 4} if "down" in n else None
        ),
    )
    code, report = verified(tmp_path, files[0], wrong)
    assert code == 1
    assert {name for f in report["lines"][0]["findings"] for name in f["names"]} == {
        "layers.*.mlp.down",
        "layers.*.mlp.down_bias",
    }
