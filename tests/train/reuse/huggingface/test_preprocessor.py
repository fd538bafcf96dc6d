"""Class names and preprocessing, from Hugging Face's folders through imports and out again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mupax.train.config.data import PixelsConfig
from mupax.train.reuse import trained
from mupax.train.reuse.huggingface import preprocessor
from mupax.train.reuse.image_input import recorded
from mupax.zoo.configs import ConfigError, ViTConfig
from tests.train.reuse.commands import change_json, read_json, refuse, succeed
from tests.train.reuse.random_weights import published

pytestmark = pytest.mark.core

MODEL = ViTConfig(
    width=8,
    depth=1,
    num_heads=2,
    mlp_ratio=2,
    image_size=12,
    patch_size=4,
    channels=3,
    num_classes=3,
    pool="cls",
)
NAMES = ("ant", "bee", "cat")
VIT = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 12, "width": 12},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 0.00392156862745098,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
SQUASH = PixelsConfig(fit="squash", background="none")
BICUBIC = dataclasses.replace(
    SQUASH, interpolation="bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
EDGE = dataclasses.replace(BICUBIC, fit="edge", resize=14)


def folder(
    path: Path, processor: dict[str, Any] | None = VIT, names: tuple[str, ...] = NAMES
) -> Path:
    """Write a ViT as it is published, with names of its classes."""
    published(path, MODEL)
    change_json(path / "config.json", **preprocessor.labels(names))
    if processor is not None:
        (path / preprocessor.FILE).write_text(json.dumps(processor))
    return path


def test_names_and_preprocessing_come_in_and_go_out_again(tmp_path: Path) -> None:
    origin = folder(tmp_path / "hf")
    imported = tmp_path / "in"
    result = succeed("import", origin, "--preset mup --base vit-proxy --out", imported)
    assert not result.err
    pixels = "squash, bicubic, mean 0.485 0.456 0.406, std 0.229 0.224 0.225"
    assert f"classes: ant, bee, cat; images: {pixels}" in result.out
    for path in (origin, imported):
        assert trained.describe(path).images == trained.read(path).images == (NAMES, BICUBIC)
    out = tmp_path / "out"
    succeed("export", imported, "--out", out)
    config = read_json(out, "config.json")
    assert config["id2label"] == {"0": "ant", "1": "bee", "2": "cat"}
    assert config["label2id"] == {"ant": 0, "bee": 1, "cat": 2}
    assert read_json(out, preprocessor.FILE) == {**VIT, "do_convert_rgb": True}


def test_a_folder_without_the_file_has_the_processors_defaults(tmp_path: Path) -> None:
    source = trained.read(folder(tmp_path / "hf", None, ("LABEL_0", "LABEL_1", "LABEL_2")))
    assert source.images == (None, SQUASH)
    assert any("no preprocessor_config.json" in note for note in source.notes)


CROP = {"do_center_crop": True, "crop_size": 12}


@pytest.mark.parametrize(
    ("change", "pixels"),
    [
        ({"do_normalize": False}, dataclasses.replace(BICUBIC, mean=(0.0,), std=(1.0,))),
        ({"image_mean": 0.5, "image_std": [0.5] * 3, "resample": 2}, SQUASH),
        (
            {
                "do_rescale": False,
                "image_mean": 127.5,
                "image_std": 51.0,
                "size": 12,
                "resample": 0,
            },
            dataclasses.replace(SQUASH, interpolation="nearest", mean=(0.5,), std=(0.2,)),
        ),
        (
            {**CROP, "size": {"shortest_edge": 14}, "crop_size": {"height": 12, "width": 12}},
            EDGE,
        ),
        ({**CROP, "image_processor_type": "BitImageProcessor", "size": 14}, EDGE),
        (
            {**CROP, "size": {"height": 14, "width": 14}},
            dataclasses.replace(BICUBIC, resize=14),
        ),
    ],
)
def test_what_processors_do_is_read_and_written(
    change: dict[str, Any], pixels: PixelsConfig
) -> None:
    read = preprocessor.from_huggingface({"model_type": "vit"}, {**VIT, **change}, MODEL).pixels
    assert read == pixels
    written = preprocessor.to_huggingface(read, MODEL, "vit")
    assert preprocessor.from_huggingface({"model_type": "vit"}, written, MODEL).pixels == pixels


@pytest.mark.parametrize(
    ("pixels", "advice"),
    [
        (PixelsConfig(interpolation="area"), "--data.pixels.interpolation box"),
        (PixelsConfig(fit="centre", interpolation="box"), "--data.pixels.fit edge or squash"),
        (EDGE, ""),
    ],
)
def test_an_export_says_where_transformers_reads_other_levels(
    pixels: PixelsConfig, advice: str
) -> None:
    note = preprocessor.note(pixels, MODEL)
    assert advice in note if note else not advice


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": {"height": 16, "width": 16}}, "another size than the 12 x 12"),
        ({"size": {"shortest_edge": 12}}, "another size"),
        ({"size": {"height": 16, "width": 12}}, "neither a square nor a shortest edge"),
        ({"size": {"longest_edge": 12}}, "neither a square nor a shortest edge"),
        ({"size": {"height": "12", "width": "12"}}, "neither a square"),
        ({"do_resize": False}, "do_resize is false"),
        (
            {"image_processor_type": "ConvNextImageProcessor"},
            "only those of ViT, DeiT, Siglip, CLIP, Bit are read",
        ),
        ({"do_pad": True}, "do_pad is True, which is not done here"),
        ({"resample": 9}, "no number of PIL's filters"),
        ({"image_mean": [0.4, 0.5]}, "mean has 2 numbers"),
        ({"image_mean": ["0.5"] * 3}, "image_mean is .* not numbers"),
        ({"image_mean": [10**12] * 3}, "image_mean is .* not numbers"),
        ({"rescale_factor": 10**12}, "rescale_factor is 10"),
        (
            {"do_center_crop": True, "size": {"shortest_edge": 10**9}, "crop_size": 12},
            "more than 16384",
        ),
        ({"image_std": [0.2, 0.0, 0.2]}, "above 0"),
        ({"rescale_factor": 0}, "rescale_factor is 0"),
        (
            {"do_center_crop": True, "size": {"shortest_edge": 11}, "crop_size": 12},
            "less than the 12 pixels",
        ),
    ],
)
def test_what_is_not_done_here_is_refused_by_its_field(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "hf", {**VIT, **change})
    err = refuse("import", path, "--out", tmp_path / "in")
    assert err.count("preprocessor_config.json") == 1
    assert "remove the file to read the weights without it" in err
    with pytest.raises(ConfigError, match=message):
        trained.describe(path)


def test_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two classes are called 'ant'"):
        preprocessor.labels(("ant", "bee", "ant"))
    path = folder(tmp_path / "hf")
    change_json(path / "config.json", id2label={"0": "ant", "1": "bee", "3": "cat"})
    with pytest.raises(ConfigError, match="id2label does not name the classes 0 to 2"):
        trained.read(path)
    for fields, message in (
        ({"class_names": ["ant"]}, "1 names"),
        ({"class_names": "ant"}, "list of names"),
    ):
        with pytest.raises(ConfigError, match=message):
            recorded(fields, MODEL, "here")


def test_records_of_older_versions_have_what_their_data_did() -> None:
    older = PixelsConfig(fit="centre", background="none")
    assert recorded({"name": "images:x"}, MODEL, "") == (None, older)
    assert recorded({"name": "digits"}, MODEL, "") == (None, PixelsConfig(fit="squash"))


def test_a_name_shows_nothing_that_a_terminal_obeys() -> None:
    images = recorded({"class_names": ["a\x1b[2J", "b", "c"]}, MODEL, "")
    assert [images.name(0), images.name(1)] == ["a\ufffd[2J", "b"]
    assert recorded({}, MODEL, "").name(2) == "2"
