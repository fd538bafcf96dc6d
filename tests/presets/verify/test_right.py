"""No false alarm for tables of presets in every form and for dumps of microsoft/mup."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from mupax import presets
from mupax.presets.verify.reference import ORDER
from mupax.zoo.configs import EncoderDecoderConfig, ModelConfig, ViTConfig
from tests.presets.verify.dumps import (
    CONFIGS,
    Contents,
    changed,
    decoder,
    dump,
    grown,
    pair,
    verified,
)  # fmt: skip

pytestmark = pytest.mark.core

DECODER = decoder(8, heads=2, activation="swiglu")
FAMILIES: dict[str, ModelConfig] = {
    "vit": ViTConfig(
        width=8, num_heads=2, depth=2, layer_scale=0.1, image_size=6, patch_size=3, channels=1,
        num_classes=7, pool="cls", qk_norm=True,
    ),
    "decoder": DECODER,
    "encoder-decoder": EncoderDecoderConfig(
        width=8, num_heads=2, depth=2, encoder_depth=3, vocab_size=11, seq_len=5, target_len=3,
        positions="relative", tied=False,
    ),
}  # fmt: skip
CASES = [
    (name, tuple(constants.items()), optimizer, family)
    for name, constants in ORDER
    for family in FAMILIES
    if family == "decoder"
    or dict(ORDER)[name] == constants  # of several exponents of a preset the decoder has all
    for optimizer in presets.get(name, **dict(constants)).optimizers
    if optimizer not in ("adam", "momentum")  # whose columns are those of adamw and sgd
]


def test_there_are_enough_of_them():
    assert len(CASES) >= 50


@pytest.mark.parametrize(("name", "constants", "optimizer", "family"), CASES)
def test_a_presets_own_table_is_right_and_is_recognized(
    name: str, constants: tuple, optimizer: str, family: str
):
    preset = presets.get(name, **dict(constants))
    judged = verified(*pair(preset, FAMILIES[family], optimizer=optimizer))
    assert (judged.code, judged.faults) == (0, [])
    assert judged.line["times"] == 4


@pytest.mark.parametrize("axis", ["heads", "head_dim", "depth"])
@pytest.mark.parametrize(
    "name", ["sp", "mup", "mup-half", "completep", "maximal-update", "hybrid", "sp-layerwise"]
)
def test_what_is_meant_is_right_along_every_axis(name: str, axis: str):
    """A preset that is unstable along an axis is compared only if it is named, with a caution."""
    judged = verified(*pair(presets.get(name), DECODER, axis), flags=f"--preset {name}")
    assert (judged.code, judged.line["reference"], judged.line["limits"]) == (0, name, {})
    told = [finding["names"][0] for finding in judged.findings]
    root = axis == "head_dim" and name not in ("mup", "completep")
    itself = (axis == "depth" and name != "completep") or name in ("sp", "hybrid", "sp-layerwise")
    # Its queries and keys are not slowed down.
    itself |= (name, axis) == ("maximal-update", "head_dim")
    assert told == ["attention logits"] * root + [f"{name} itself"] * itself


@pytest.mark.parametrize("form", presets.FORMS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_multiplier_may_be_in_any_place(form: presets.Form, optimizer: str):
    judged = verified(*pair(presets.get("mup", form=form), DECODER, optimizer=optimizer))
    assert (judged.code, judged.findings, judged.line["reference"]) == (0, [], "mup")


@pytest.mark.parametrize(("tied", "decay"), [(True, "coupled"), (False, "independent")])
def test_a_tied_readout_and_independent_decay_are_right(tied: bool, decay: Any):
    judged = verified(*pair(presets.get("mup"), decoder(8, tied=tied), decay=decay))
    assert (judged.code, judged.findings) == (0, [])


@pytest.mark.parametrize("ratios", [(4, 3), (4, 3.5, 3), (3, 3, 2.75, 2.6875)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("name", ["mup", "spectral"])
def test_an_mlp_of_rounded_size_is_right_at_its_true_fan_in(
    name: str, optimizer: str, ratios: tuple[float, ...]
):
    models = []
    for index, ratio in enumerate(ratios):
        models.append(decoder(256 * 2**index, activation="swiglu", mlp_ratio=ratio))
    files = [dump(presets.get(name), model, models[0], optimizer) for model in models]
    judged = verified(*files)
    assert (judged.code, judged.line["verdict"]) == (0, "right")

    # The control: all matrices follow the width, as where F/D is taken for a constant.
    def by_width(path: str, entry: Contents) -> Contents | None:
        if path != "block.mlp.down":
            return None
        times = models[-1].width / models[0].width
        return {"std": files[0][path]["std"] * times**-0.9, "lr": files[0][path]["lr"]}

    files[-1] = changed(files[-1], by_width)
    judged = verified(*files)
    assert judged.code == 1
    assert "block.mlp.down" in str(judged.findings)


@pytest.mark.parametrize(
    ("widths", "ratios", "grows", "verdict"),
    [
        ((256, 256), (4, 5), {"mlp": 1.0}, "right"),  # the MLP alone
        ((256, 320), (4, 3.2), {"embed": 1.0}, "wrong"),  # the width alone
        ((256, 512, 1024), (4, 3.25, 2.625), {"embed": 1.0, "mlp": 0.696}, "wrong"),  # a drift
    ],
)
def test_an_mlp_that_does_not_grow_in_step_is_not_taken_for_rounded(
    widths: tuple[int, ...], ratios: tuple[float, ...], grows: dict[str, float], verdict: str
):
    models = []
    for width, ratio in zip(widths, ratios, strict=True):
        models.append(decoder(width, activation="swiglu", mlp_ratio=ratio))
    files = [dump(presets.get("spectral"), model, models[0], "muon") for model in models]
    judged = verified(*files)
    for axis in ("embed", "mlp"):
        assert judged.line["grows"].get(axis) == pytest.approx(grows.get(axis), abs=1e-3)
    # Where the MLP lags behind, spectral is unstable, and the table is held against mup.
    assert (judged.code, judged.line["verdict"]) == (int(verdict == "wrong"), verdict)


def test_two_lines_of_growth_are_held_against_one_base():
    wider = grown(DECODER, "heads")
    models = (DECODER, wider, grown(DECODER, "depth"), grown(wider, "heads"))
    judged = verified(*(dump(presets.get("completep"), model, DECODER) for model in models))
    assert judged.code == 0
    lines = [(line["times"], line["findings"]) for line in judged.report["lines"]]
    assert lines == [(4.0, []), (16.0, [])]


MUP = json.loads((CONFIGS / "mup.json").read_text())
"""Values of `mup` 1.0.0 for an MLP, a CNN and a Transformer at widths 32 (base) and 128."""


@pytest.mark.parametrize(
    "case", [f"{m} {o}" for m in ("mlp", "cnn", "transformer") for o in ("adamw", "sgd")]
)
def test_what_microsofts_package_makes_is_right(case: str):
    judged = verified(*MUP[case])
    assert judged.code == 0
    # Mup leaves eps alone.
    assert {finding["what"] for finding in judged.findings} <= {"eps"}


@pytest.mark.parametrize(
    ("case", "mistakes"),
    [
        # Its issue 55, by its own code.
        ("tied adamw", ["tied table rescaled as a readout", "eps not scaled"]),
        ("no base", ["base shapes of the target"]),
    ],
)
def test_what_microsofts_package_makes_by_mistake_is_wrong(case: str, mistakes: list[str]):
    judged = verified(*MUP[case])
    assert judged.code == 1
    assert [published["mistake"] for published in judged.line["published"]] == mistakes


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_multipliers_moved_at_random_are_the_same_parameterization(optimizer: str):
    """Move each multiplier by theta, another at every size, and std, lr, eps and wd against it."""
    random = Random(0)

    def moved(name: str, entry: Contents) -> Contents:
        theta = 2 ** random.uniform(-5, 5)
        slower = theta**2 if optimizer == "sgd" else theta
        columns = {
            "std": 1 / theta, "lr": 1 / slower, "eps": theta, "wd": slower, "multiplier": theta
        }  # fmt: skip
        return {column: entry[column] * factor for column, factor in columns.items()}

    files = pair(presets.get("mup"), DECODER, optimizer=optimizer)
    judged = verified(*(changed(file, moved) for file in files))
    assert (judged.code, judged.findings, judged.line["reference"]) == (0, [], "mup")


def test_layers_with_names_of_their_own_grow_in_number():
    """Check PyTorch's names, one array a layer, under a rule for depth."""

    def unstacked(contents: Contents) -> Contents:
        split: Contents = {}
        about = dict(contents["model"])
        layers = about.pop("layers")
        for name, entry in contents.items():
            if name.startswith("block."):
                for layer in range(layers):
                    own = name.replace("block.", f"layers.{layer}.")
                    split[own] = {**entry, "shape": entry["shape"][1:]}
            else:
                split[name] = entry
        return {**split, "model": about}

    small, large = map(unstacked, pair(presets.get("completep"), decoder(8, heads=2), "depth"))
    judged = verified(small, large)
    assert (judged.code, judged.findings) == (0, [])
    assert judged.line["grows"] == {"layers": 1.0, "encoder_layers": 1.0}
    wrong = changed(
        large,
        lambda n, e: (
            {"eps": e["eps"] / 4} if "up" in n else {"lr": e["lr"] * 4} if "down" in n else None
        ),
    )
    judged = verified(small, wrong)
    assert judged.code == 1
    assert {name for finding in judged.findings for name in finding["names"]} == {
        "layers.*.mlp.down", "layers.*.mlp.down_bias"
    }  # fmt: skip
