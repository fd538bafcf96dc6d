"""A user's own images, and the views of images of any size."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from mupax.train import data
from mupax.train.config import cli
from mupax.train.config.data import DataConfig, PixelsConfig, TransformsConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import to_json
from mupax.train.config.record import words as flags_of
from mupax.train.data import cache, crops, images
from mupax.train.data.records import corpus
from mupax.train.data.sources import folders
from mupax.zoo.configs import ConfigError, ViTConfig

pytestmark = pytest.mark.core

MODEL = ViTConfig(
    width=6, depth=1, num_heads=1, image_size=12, patch_size=4, channels=3, num_classes=3
)
COLOURS = {"blue": (10, 20, 250), "green": (20, 240, 30), "red": (230, 10, 20)}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path.with_name(f"{tmp_path.name}-cache")))


def pictures(folder: Path, count: int = 17) -> Path:
    """A folder per colour; sizes and formats vary."""
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.clip(
                np.array(colour) + rng.integers(-9, 10, (13 + i, 29 - i, 3)), 0, 255
            ).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.{('png', 'jpg')[i % 2]}")
    return folder


def load(
    path: Path,
    model: ViTConfig = MODEL,
    seed: int = 0,
    note: cache.Note = lambda line: None,
    **fields,
) -> images.ImageData:
    config = DataConfig(name=f"images:{path}", batch_size=fields.pop("batch_size", 8), **fields)
    dataset = data.load(config, model, seed=seed, note=note)
    assert isinstance(dataset, images.ImageData)
    return dataset


def test_classes_are_folders(tmp_path: Path) -> None:
    dataset = load(pictures(tmp_path / "p"))
    assert dataset.class_names == ["blue", "green", "red"]
    assert dataset.train_size + dataset.eval_size == 3 * 17
    for batch in (dataset.train_batch(0), dataset.train_batch(3), *dataset.eval_batches()):
        assert batch["inputs"].shape == (8, 12, 12, 3)
        assert np.abs(batch["inputs"]).max() <= 1
        brightest = batch["inputs"].mean(axis=(1, 2)).argmax(axis=-1)
        assert np.array_equal(brightest, 2 - batch["targets"])  # red is channel 0 and class 2


def test_split_is_by_file_and_has_every_class_on_both_sides(tmp_path: Path) -> None:
    path = pictures(tmp_path / "p")
    dataset = load(path)
    assert isinstance(dataset.train, folders.Files)
    assert isinstance(dataset.eval, folders.Files)
    train, evaluation = (
        {name for name, _, _ in side.files} for side in (dataset.train, dataset.eval)
    )
    assert not train & evaluation
    assert len(train | evaluation) == 51
    assert {name for name in train | evaluation if corpus.side(name) == "eval"} <= evaluation
    for side in (dataset.train, dataset.eval):
        assert {label for _, _, label in side.files} == {0, 1, 2}


def test_given_split_is_kept(tmp_path: Path) -> None:
    pictures(tmp_path / "p" / "train", 5)
    pictures(tmp_path / "p" / "val", 2)
    dataset = load(tmp_path / "p")
    assert (dataset.train_size, dataset.eval_size) == (15, 6)
    assert isinstance(dataset.eval, folders.Files)
    assert all("val" in path.parts for _, path, _ in dataset.eval.files)


def test_training_varies_and_evaluation_does_not(tmp_path: Path) -> None:
    path = pictures(tmp_path / "p")
    dataset, other = load(path), load(path, seed=1)
    batch = dataset.train_batch(5)
    assert np.array_equal(batch["inputs"], load(path).train_batch(5)["inputs"])
    assert not np.array_equal(batch["inputs"], other.train_batch(5)["inputs"])
    assert not np.array_equal(batch["inputs"], load(path, augment=False).train_batch(5)["inputs"])
    halves = [
        dataset.train_batch(5, slice(0, 4))["inputs"],
        dataset.train_batch(5, slice(4, 8))["inputs"],
    ]
    assert np.array_equal(np.concatenate(halves), batch["inputs"])
    for a, b in zip(dataset.eval_batches(), other.eval_batches(), strict=True):
        assert np.array_equal(a["inputs"], b["inputs"])


def test_digest_is_of_names_and_sizes(tmp_path: Path) -> None:
    path = pictures(tmp_path / "p")
    first = load(path).facts["digest"]
    assert load(pictures(tmp_path / "copy")).facts["digest"] == first
    (path / "red" / "16.png").rename(path / "red" / "99.png")
    assert load(path).facts["digest"] != first


def test_grey_models_get_grey_images(tmp_path: Path) -> None:
    dataset = load(pictures(tmp_path / "p"), dataclasses.replace(MODEL, channels=1))
    assert dataset.train_batch(0)["inputs"].shape == (8, 12, 12, 1)
    with pytest.raises(data.DataError, match=r"reads 2 channels.*write --model\.channels 3"):
        load(tmp_path / "p", dataclasses.replace(MODEL, channels=2))


def test_missing_and_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"no folder .*gone; write data.name as images:PATH"):
        load(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(data.DataError, match="has no folders in it"):
        load(tmp_path / "empty")
    path = pictures(tmp_path / "p")
    (path / "violet").mkdir()
    with pytest.raises(data.DataError, match=r"class folder .*violet has no image"):
        load(path)
    Image.new("RGB", (9, 9)).save(path / "violet" / "one.png")
    with pytest.raises(data.DataError, match="violet has one image; give it at least two"):
        load(path)
    Image.new("RGB", (9, 9)).save(path / "violet" / "two.png")
    with pytest.raises(
        data.DataError, match=r"has 4 classes and the model 3; write --model\.num-classes 4"
    ):
        load(path)
    pictures(tmp_path / "q" / "train", 2)
    pictures(tmp_path / "q" / "test", 2)
    (tmp_path / "q" / "test" / "rad").mkdir()
    with pytest.raises(data.DataError, match=r"class folders that .*train has not: rad"):
        load(tmp_path / "q")


@pytest.mark.parametrize(
    ("length", "count"), [(60, 17), (-20, 8)]
)  # of a PNG the last 20 bytes are no pixels
def test_broken_image_is_named(tmp_path: Path, length: int, count: int) -> None:
    path = pictures(tmp_path / "p")
    for file in (path / "red").iterdir():
        file.write_bytes(file.read_bytes()[:length])
    message = rf"cannot read the image .*red/.*Remove or repair it \({count} of 51 are broken\), or add --data\.on-broken skip"
    for _ in range(2):  # what is known of the folder is no licence
        with pytest.raises(data.DataError, match=message):
            load(path)
    if count < 17:
        return
    with pytest.raises(data.DataError, match=r"class red in .* has no whole image to train on"):
        load(path, on_broken="skip")


def test_broken_images_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    path, notes = pictures(tmp_path / "p"), []
    whole = load(path)
    contents = {name: (path / name).read_bytes() for name in ("red/3.jpg", "blue/4.png")}
    for name, content in contents.items():
        (path / name).write_bytes(content[:-40])
    (path / "red" / "none.png").write_bytes(b"")
    some = load(path, on_broken="skip", note=notes.append)
    assert (
        f"left out, as broken: 3 of 52 images: {path}/blue/4.png, {path}/red/3.jpg, {path}/red/none.png"
        in notes
    )
    assert some.facts["broken_images"] == 3
    assert some.train_size + some.eval_size == 49
    list(itertools.islice(some.train_batches(0), 8))
    assert some.facts["digest"] != whole.facts["digest"]
    for name, content in contents.items():
        (path / name).write_bytes(content)
    (path / "red" / "none.png").unlink()
    assert load(path).facts == whole.facts


def test_mixed_sizes_and_modes_are_read_alike(tmp_path: Path) -> None:
    path = pictures(tmp_path / "p")
    for i, mode in enumerate(("L", "LA", "P", "RGBA", "CMYK", "1", "YCbCr")):
        suffix = "tif" if mode in ("CMYK", "YCbCr") else "png"
        Image.new("RGB", (9 + i, 40), (230, 10, 20)).convert(mode).save(
            path / "red" / f"{mode}.{suffix}"
        )
    Image.new("CMYK", (40, 9), (0, 250, 250, 0)).save(path / "red" / "print.jpg")
    dataset = load(path)
    assert dataset.train_size + dataset.eval_size == 59
    for files in (dataset.train, dataset.eval):
        assert {files[i][0].shape[2] for i in range(len(files))} == {3}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bits_are_scaled_to_the_model_s_range(
    tmp_path: Path, suffix: str, channels: int
) -> None:
    greys = {"bright": 50000, "dark": 9000, "white": 65535}
    for name, grey in greys.items():
        (tmp_path / name).mkdir()
        for i in range(9):
            Image.fromarray(np.full((14 + i, 15), grey, np.uint16)).save(
                tmp_path / name / f"{i}.{suffix}"
            )
    batch = load(tmp_path, dataclasses.replace(MODEL, channels=channels)).train_batch(0)
    expected = np.array(list(greys.values()))[batch["targets"]] / 65535 * 2 - 1
    assert np.abs(batch["inputs"] - expected[:, None, None, None]).max() < 1 / 100


@pytest.mark.parametrize(("dtype", "mode"), [(np.float32, "F"), (np.int32, "I")])
def test_values_without_a_range_are_refused_before_training(
    tmp_path: Path, dtype: type, mode: str
) -> None:
    path = pictures(tmp_path / "p")
    Image.fromarray(np.ones((14, 15), dtype)).save(path / "red" / "depth.tiff")
    with pytest.raises(
        data.DataError, match=rf"red/depth\.tiff: .*mode {mode}.*save it with 8 or 16"
    ):
        load(path)


def test_a_decompression_bomb_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pictures(tmp_path / "p")
    notes: list[str] = []
    load(path, note=notes.append)
    assert notes == ["decoding 51 images, to find broken ones"]
    load(path, note=notes.append)
    assert len(notes) == 1  # once for a folder
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    Image.new("RGB", (90, 90)).save(path / "red" / "bomb.png")
    with pytest.raises(
        data.DataError, match=r"red/bomb\.png: Image size \(8100 pixels\) exceeds limit"
    ):
        load(path)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_pictures_are_turned_as_their_camera_was(tmp_path: Path, suffix: str) -> None:
    upright = np.zeros((40, 20, 3), np.uint8)
    upright[:20] = 255
    for name, turns, orientation in (("as_is", 0, 1), ("left", 1, 6), ("over", 2, 3)):
        (tmp_path / name).mkdir()
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        for i in range(9):
            Image.fromarray(np.rot90(upright, turns)).save(
                tmp_path / name / f"{i}.{suffix}", exif=exif
            )
    for batch in load(tmp_path, batch_size=3).eval_batches():
        pixels = batch["inputs"][batch["weights"] > 0]
        assert (pixels[:, :5] > 0.9).all()
        assert (pixels[:, -5:] < -0.9).all()


# Parts of a folder


def greys(folder: Path, count: int = 3) -> Path:
    """Small images, no two alike."""
    folder.mkdir(parents=True)
    for i in range(count):
        Image.fromarray(np.full((8, 9), len(str(folder)) + 20 * i, np.uint8)).save(
            folder / f"{i}.png"
        )
    return folder


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        ("train", "valid"),
        ("Train", "Test"),
        ("training", "validation"),
        ("training_set", "test_set"),
        ("trn", "dev"),
    ],
)
def test_names_of_parts_are_no_classes(train: str, evaluation: str, tmp_path: Path) -> None:
    for part, count in ((train, 3), (evaluation, 2)):
        for name in ("cat", "dog"):
            greys(tmp_path / part / name, count)
    greys(tmp_path / train / "emu")  # a class that is not evaluated is none the less one
    folder = folders.split(tmp_path)
    assert folder.classes == ["cat", "dog", "emu"]
    assert (len(folder.train), len(folder.eval)) == (9, 4)
    assert {label for _, _, label in folder.eval} == {0, 1}
    assert train in folder.notes[0]
    assert evaluation in folder.notes[0]


def test_control_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "car", "train"):
        greys(tmp_path / name)
    assert folders.split(tmp_path).classes == ["bus", "car", "train"]
    greys(tmp_path / "test")
    folder = folders.split(tmp_path)
    assert folder.classes == ["bus", "car", "test", "train"]
    assert "caution" in folder.notes[0]


def test_a_part_that_is_not_used_is_named_and_two_of_a_kind_are_refused(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        for name in "ab":
            greys(tmp_path / part / name)
    assert "test is not used" in folders.split(tmp_path).notes[0]
    (tmp_path / "test").rename(tmp_path / "dev")
    with pytest.raises(data.DataError, match="dev and val"):
        folders.split(tmp_path)


def test_test_images_without_classes_are_not_used(tmp_path: Path) -> None:
    for name in "ab":
        greys(tmp_path / "train" / name)
    greys(tmp_path / "test")
    folder = folders.split(tmp_path)
    assert (folder.classes, len(folder.train), len(folder.eval)) == (["a", "b"], 4, 2)
    assert "test is not used" in folder.notes[0]
    (tmp_path / "train").rename(tmp_path / "val")
    with pytest.raises(data.DataError, match="no folder of classes to train on"):
        folders.split(tmp_path)


def test_hidden_files_are_no_images(tmp_path: Path) -> None:
    for name in ("a", "b", "__MACOSX", ".git", "a/.ipynb_checkpoints", "b/__MACOSX"):
        greys(tmp_path / name)
    (tmp_path / "a" / "._0.png").write_bytes(b"of a Mac")
    folder = folders.split(tmp_path)
    assert (folder.classes, len(folder.train) + len(folder.eval), folder.notes) == (
        ["a", "b"],
        6,
        [],
    )


def test_what_is_left_out_is_named_with_its_reason(tmp_path: Path) -> None:
    for name in "ab":
        greys(tmp_path / "p" / name)
    greys(tmp_path / "elsewhere" / "deep", 5)
    (tmp_path / "p" / "a" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "p" / "a" / "loop").symlink_to(tmp_path / "p")
    (tmp_path / "p" / "around").symlink_to(tmp_path / "p")
    (tmp_path / "p" / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "p" / "a" / "photo.heic").write_bytes(b"x")
    (tmp_path / "p" / "readme.txt").write_text("x")
    picture = Image.new("RGB", (9, 9), (1, 2, 3))
    picture.save(tmp_path / "p" / "b" / "x.jfif", format="JPEG")
    picture.save(tmp_path / "p" / "b" / "y.PPM", format="PPM")
    folder = folders.split(tmp_path / "p")
    assert folder.classes == ["a", "b"]
    assert len(folder.train) + len(folder.eval) == 3 + 5 + 3 + 2
    told = "\n".join(folder.notes)
    for name in ("a/loop", "a/gone.png", "a/photo.heic", "readme.txt", ".heic is no kind of image"):
        assert name in told
    for suffix in Image.registered_extensions().keys() & {".avif", ".webp", ".jp2", ".tga", ".qoi"}:
        assert folders.is_image(f"x{suffix.upper()}")
    assert not folders.is_image("x.pdf")


def test_exact_copies_on_both_sides_are_counted(tmp_path: Path) -> None:
    path, notes = pictures(tmp_path / "p"), []
    assert "copied_images" not in load(path).facts
    evaluated = [file for _, file, _ in folders.split(path).eval]
    for side in ("train", "val"):
        shutil.copytree(path, tmp_path / "q" / side)
    for file in evaluated:
        file.with_name(f"{file.stem} copy{file.suffix}").write_bytes(file.read_bytes())
    dataset = load(path, note=notes.append)
    assert 0 < dataset.facts["copied_images"] <= len(folders.split(path).eval)
    assert any("exact copies" in note for note in notes)
    assert load(tmp_path / "q").facts["copied_images"] == 51


def test_one_name_of_a_class_in_two_spellings(tmp_path: Path) -> None:
    names = ("cafe\u0301", "caf\u00e9", "zoo")
    for i, name in enumerate(names):
        greys(tmp_path / name, 2 + i)
    folder = folders.split(tmp_path)
    assert folder.classes == ["caf\u00e9", "zoo"]
    assert len(folder.train) + len(folder.eval) == 9
    assert folder.labelled_as(["zoo", names[0]]).train[0][2] == 1


def test_another_folder_is_evaluated_whole(tmp_path: Path) -> None:
    mine, copy = pictures(tmp_path / "mine"), pictures(tmp_path / "copy")
    run = load(mine).facts
    own = folders.split(mine)
    for path in (mine, tmp_path / "mine" / ".." / "mine", copy):
        assert [name for name, _, _ in folders.to_evaluate(f"images:{path}", run).eval] == [
            n for n, _, _ in own.eval
        ]
    (copy / "red" / "0.png").unlink()
    other = folders.to_evaluate(f"images:{copy}", run)
    assert len(other.eval) == 50
    assert "all 50 images" in other.notes[0]
    for part, count in (("train", 4), ("test", 3)):
        greys(tmp_path / "parts" / part / "red", count)
    folder = folders.to_evaluate(f"images:{tmp_path / 'parts'}", run)
    assert (len(folder.eval), folder.classes) == (3, ["red"])
    assert "train is not used" in folder.notes[0]
    assert len(folders.to_evaluate(f"images:{copy}", {}).eval) == 50  # weights without a run


# What is decoded

HALF = np.zeros((20, 30, 3), np.uint8)
HALF[:, :15] = 255


def exif_with(tag: int, kind: int, content: bytes) -> bytes:
    """EXIF data with orientation 6 and a rational of another tag."""
    entries = [
        struct.pack("<HHLHH", ExifTags.Base.Orientation, 3, 1, 6, 0),
        struct.pack("<HHLL", tag, kind, 1, 38),
    ]
    directory = struct.pack("<H", 2) + b"".join(sorted(entries)) + struct.pack("<L", 0)
    return b"Exif\0\0II*\0" + struct.pack("<L", 8) + directory + content


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_exif_that_pil_cannot_write_is_read(tmp_path: Path, suffix: str) -> None:
    exif = exif_with(ExifTags.Base.XResolution, 10, struct.pack("<ll", -1, 0))
    file = tmp_path / f"x.{suffix}"
    Image.fromarray(HALF).save(file, exif=exif)
    pixels = folders.decoded(file, 3, "x")
    assert pixels.shape == (30, 20, 3)
    assert pixels[:12].min() > 200
    if suffix == "png":  # which has a checksum
        return
    whole = struct.pack("<HHL", ExifTags.Base.Orientation, 3, 1)
    assert whole in file.read_bytes()
    file.write_bytes(
        file.read_bytes().replace(whole, struct.pack("<HHL", ExifTags.Base.Orientation, 7, 2**31))
    )
    assert folders.decoded(file, 3, "x").shape == (20, 30, 3)


def transparent(mode: str, file: Path) -> Path:
    """A disc of 60 on a transparent ground that hides 200."""
    y, x = np.mgrid[:32, :32] - 15.5
    disc = x**2 + y**2 < 100
    grey = np.where(disc, 60, 200).astype(np.uint8)
    alpha = np.where(disc, 255, 0).astype(np.uint8)
    picture = Image.merge("LA", (Image.fromarray(grey), Image.fromarray(alpha)))
    if mode in ("RGBA", "LA"):
        picture.convert(mode).save(file)
    elif mode == "P":
        indexed = Image.fromarray(disc.astype(np.uint8)).convert("P")
        indexed.putpalette([200, 200, 200, 60, 60, 60])
        indexed.save(file, transparency=bytes([0, 255]))
    else:  # one value, or colour, stands for what is transparent
        Image.fromarray(grey).convert(mode).save(
            file, transparency=200 if mode == "L" else (200, 200, 200)
        )
    return file


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_transparent_pixels_get_the_background(mode: str, channels: int, tmp_path: Path) -> None:
    file = transparent(mode, tmp_path / "x.png")
    for background, corner in (("white", 255), ("black", 0), ("#808080", 128), ("none", 200)):
        pixels = folders.decoded(file, channels, "x", background)
        assert set(pixels[0, 0]) == {corner}
        assert set(pixels[16, 16]) == {60}


def test_a_picture_in_the_transparency_alone_is_told(tmp_path: Path) -> None:
    for name, grey in (("dark", 0), ("light", 255)):
        (tmp_path / name).mkdir()
        for i in range(4):
            alpha = Image.new("L", (9, 9))
            alpha.putpixel((i, 2), 255)
            Image.merge("LA", (Image.new("L", (9, 9), grey), alpha)).save(
                tmp_path / name / f"{i}.png"
            )
    two = dataclasses.replace(MODEL, num_classes=2)
    for background, count, other in (
        ("white", 4, "black"),
        ("black", 4, "white"),
        ("none", 8, "white"),
    ):
        notes: list[str] = []
        load(tmp_path, two, note=notes.append, pixels=PixelsConfig(background=background))
        (caution,) = [note for note in notes if note.startswith("caution")]
        assert f"{count} of 8 images" in caution
        assert f"--data.pixels.background {other}" in caution
    batch = load(tmp_path, two, pixels=PixelsConfig(background="black")).eval_batch(0)
    assert set(batch["inputs"][batch["targets"] == 0].ravel()) == {-1}


def test_warnings_of_pil_stay_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = transparent("P", tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for channels in (1, 3):
            folders.decoded(file, channels, "x", "none")
    assert caught == []


def test_large_jpegs_are_decoded_at_the_size_that_a_crop_needs(tmp_path: Path) -> None:
    path, rng = tmp_path / "p", np.random.default_rng(0)
    for name in "ab":
        (path / name).mkdir(parents=True)
        for i in range(4):
            smooth = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
                (800, 600)
            )
            smooth.save(path / name / f"{i}.jpg", quality=95)
    dataset = load(path, dataclasses.replace(MODEL, num_classes=2))
    files = dataset.train
    assert isinstance(files, folders.Files)
    assert files[0][0].shape == (600, 800, 3)
    assert [files.at_least(0, side)[0].shape[:2] for side in (12, 75, 76, 151, 301)] == [
        (75, 100), (75, 100), (150, 200), (300, 400), (600, 800),
    ]  # fmt: skip
    view, uniforms = crops.RandomCrop(12), rng.random((64, images.NUMBERS))
    full = files[0][0]
    exact = view([full] * 64, uniforms)
    quick = [files.at_least(0, view.least_side(row))[0] for row in uniforms]
    assert {len(image) for image in quick} <= {75, 150}
    assert all(
        min(image.shape[:2]) >= view.least_side(row)
        for image, row in zip(quick, uniforms, strict=True)
    )
    error = np.abs(view(quick, uniforms) - exact).mean()
    tiny = np.asarray(Image.fromarray(full).resize((16, 12)))
    assert error < 4 < np.abs(view([tiny] * 64, uniforms) - exact).mean()
    assert view.least_side(np.array([0, 0, 0, 1, 0.5])) == 12
    assert view.least_side(np.zeros(images.NUMBERS)) == 49  # 12 / sqrt(0.08 x 3/4)
    # What evaluates and what is exported to reads every pixel.
    batch = dataset.eval_batch(0)["inputs"][0]
    image = dataset.eval[int(dataset.eval_positions(range(1))[0])][0]
    assert np.array_equal(
        batch,
        images.normalized(crops.fitted(PixelsConfig(), 12)([image], uniforms[:1]), PixelsConfig())[
            0
        ],
    )


# A jitter in place of a crop


def test_a_jitter_moves_turns_and_mirrors() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    still = np.full((1, images.NUMBERS), 0.5)
    still[0, 3] += 2.0**-21  # half of what the angle does not show: no stretch
    plain = crops.Jitter(1.0, mirror=False)([image], still)[0]
    np.testing.assert_allclose(plain, image, atol=0.05)
    mirror = still.copy()
    mirror[0, 2] = 0.1
    np.testing.assert_allclose(
        crops.Jitter(1.0, mirror=True)([image], mirror)[0], image[:, ::-1], atol=0.05
    )
    np.testing.assert_allclose(
        crops.Jitter(1.0, mirror=False)([image], mirror)[0], image, atol=0.05
    )
    down = still.copy()
    down[0, 0] = 1.0
    moved = crops.Jitter(1.0, mirror=False)([image], down)[0]
    np.testing.assert_allclose(moved[:14], image[2:], atol=0.1)  # an eighth of 16
    np.testing.assert_allclose(
        moved[14:], np.stack([image[-1]] * 2), atol=0.1
    )  # the border goes on
    turned = still.copy()
    turned[0, 3] = 1.0
    assert np.abs(crops.Jitter(1.0, mirror=False)([image], turned)[0] - image).mean() > 10


def test_jittered_images_are_decoded_once_and_are_those_of_a_folder_too_large_to_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pictures(tmp_path / "p", 6)
    transforms = TransformsConfig(jitter=0.7)
    load(path, transforms=transforms)  # decodes all images to find broken ones, and remembers it
    decoded: list[str] = []
    before = folders.decoded

    def counted(file: Path, *args: Any) -> np.ndarray:
        decoded.append(str(file))
        return before(file, *args)

    monkeypatch.setattr(folders, "decoded", counted)
    in_memory = load(path, transforms=transforms)
    batches = [in_memory.train_batch(k)["inputs"] for k in range(6)]
    assert not np.array_equal(batches[0], batches[3])
    assert len(decoded) == len(set(decoded)) == in_memory.train_size
    monkeypatch.setattr(folders, "_MOST_BYTES_IN_MEMORY", 0)
    from_disk = load(path, transforms=transforms)
    np.testing.assert_allclose(from_disk.train_batch(2)["inputs"], batches[2], atol=1e-5)
    evaluated = load(path).eval_batch(0)["inputs"]
    np.testing.assert_array_equal(in_memory.eval_batch(0)["inputs"], evaluated)


def test_no_crop_is_mirrored_where_that_is_asked_for(tmp_path: Path) -> None:
    """Images dark on their left half: a mirrored one is dark on its right."""
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:, 16:] = 200
    for label in "ab":
        (tmp_path / label).mkdir()
        for i in range(9):
            Image.fromarray(pixels + np.uint8(i % 2)).save(tmp_path / label / f"{i}.png")
    two = dataclasses.replace(MODEL, num_classes=2)

    def mirrored(transforms: TransformsConfig) -> int:
        source = load(tmp_path, two, transforms=transforms)
        inputs = np.concatenate([source.train_batch(k)["inputs"] for k in range(4)])
        return int((inputs[:, :, 0].mean((1, 2)) > inputs[:, :, -1].mean((1, 2))).sum())

    for transforms in (TransformsConfig(), TransformsConfig(jitter=0.2)):
        assert mirrored(transforms) > 4
        assert mirrored(dataclasses.replace(transforms, mirror=False)) == 0


# Sizes of the model


def parsed(*words: str) -> Any:
    """Return the model of a run that the user designs, for which no recipe is chosen."""
    return cli.parse(
        "vit-digits", RECIPES["vit-digits"], ["--model.depth", "3", *words]
    ).config.model


def sizes_of(model: Any) -> tuple[int, int, int, int]:
    return model.num_classes, model.channels, model.image_size, model.patch_size


def test_the_model_takes_its_sizes_from_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"images:{pictures(tmp_path / 'p')}"  # shorter sides of 13 to 21
    assert sizes_of(parsed("--data.name", name)) == (3, 3, 16, 2)
    assert "3 classes, 3 channels" in " ".join(capsys.readouterr().err.split())
    for words, sizes in {
        ("--model.channels", "1"): (3, 1, 16, 2),
        ("--model.num_classes=3", "--model.patch-size", "4"): (3, 3, 16, 4),
        ("--model.image-size", "12"): (3, 3, 12, 2),
        ("--model", "vit-s16"): (3, 3, 224, 16),
        ("--init-from", "elsewhere"): (3, 1, 8, 2),
    }.items():
        assert sizes_of(parsed("--data.name", name, *words)) == sizes
    for side, (size, patch) in {40: (40, 4), 97: (91, 7), 500: (224, 14)}.items():
        for label in "ab":
            (tmp_path / f"{side}" / label).mkdir(parents=True)
            for i in range(2):
                Image.new("L", (side, side + 7), i).save(tmp_path / f"{side}" / label / f"{i}.png")
        assert sizes_of(parsed(f"--data.name=images:{tmp_path / f'{side}'}")) == (2, 1, size, patch)
    assert sizes_of(parsed("--data.name", "images:nowhere")) == sizes_of(
        RECIPES["vit-digits"]().model
    )
    for source, sizes in {
        "fashion": (10, 1, 28, 2),
        "shapes": (10, 3, 32, 2),
        "cifar5m": (10, 3, 32, 2),
    }.items():
        assert sizes_of(parsed("--data.name", source)) == sizes


def test_a_file_s_sizes_stay_and_a_run_keeps_its_own(tmp_path: Path) -> None:
    name = f"images:{pictures(tmp_path / 'p')}"
    file = tmp_path / "x.json"
    file.write_text(
        json.dumps({"recipe": "vit-digits", "data": {"name": name}, "model": {"channels": 1}})
    )
    config = cli.parse(str(file), cli.recipe(str(file)), []).config
    assert sizes_of(config.model) == (3, 1, 16, 2)
    recipe_words = [*(flags_of(config) or [])]
    assert {"--model.channels", "--model.image-size"} <= {*recipe_words}
    assert sizes_of(parsed(*recipe_words)) == (3, 1, 16, 2)
    # A run that an older version began: grey, of 8 pixels, by the central 7/8.
    older = to_json(dataclasses.replace(config, model=RECIPES["vit-digits"]().model))
    older["data"]["pixels"] = {
        "fit": "centre",
        "resize": None,
        "interpolation": "box",
        "mean": [0.5],
        "std": [0.5],
    }
    (tmp_path / "config.json").write_text(json.dumps({"config": older}))
    again = cli.parse(
        "vit-digits",
        RECIPES["vit-digits"],
        ["--data.name", name, "--resume", "--workdir", str(tmp_path)],
    )
    assert sizes_of(again.config.model) == (10, 1, 8, 2)
    assert again.config.data.pixels == PixelsConfig(
        fit="centre", background="none", interpolation="box"
    )


# Views


def gradient(height: int, width: int) -> np.ndarray:
    """A pixel's value is its column (channel 0) and its row (channel 1)."""
    y, x = np.indices((height, width))
    return np.stack([x, y, 0 * x], axis=-1).astype(np.uint8)


def test_centre_crop_is_the_centre() -> None:
    out = crops.fitted(PixelsConfig(fit="centre"), 28)(
        [gradient(64, 32)], np.zeros((1, images.NUMBERS))
    )[0]
    assert out.shape == (28, 28, 3)
    assert np.allclose(out[:, :, 0].mean(), 15.5, atol=0.5)
    assert np.allclose(out[:, :, 1].mean(), 31.5, atol=0.5)
    assert out[0, -1, 0] - out[0, 0, 0] == pytest.approx(
        27, abs=1
    )  # 7/8 of the shorter side at scale 1


def test_squash_takes_all_of_an_image_and_edge_its_middle() -> None:
    wide, none = gradient(32, 64), np.zeros((1, images.NUMBERS))
    squashed = crops.fitted(PixelsConfig(fit="squash", interpolation="box"), 16)([wide], none)[0]
    assert np.array_equal(squashed, np.floor(wide.reshape(16, 2, 16, 4, 3).mean((1, 3)) + 0.5))
    edge = crops.fitted(PixelsConfig(fit="edge", resize=32, interpolation="nearest"), 24)(
        [wide], none
    )[0]
    assert np.array_equal(edge, wide[4:28, 20:44])
    tall = crops.fitted(PixelsConfig(fit="edge", resize=32), 24)([wide.swapaxes(0, 1)], none)[0]
    assert np.array_equal(tall, wide.swapaxes(0, 1)[20:44, 4:28])
    sides = crops.fitted(PixelsConfig(fit="squash", resize=64, interpolation="nearest"), 32)(
        [wide], none
    )[0]
    assert np.array_equal(sides, wide.repeat(2, 0)[16:48, 16:48])


def test_pixels_are_what_the_config_says_and_recorded(tmp_path: Path) -> None:
    path = pictures(tmp_path / "p")
    pixels = PixelsConfig(
        fit="squash", interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0)
    )
    plain, other = load(path, augment=False), load(path, augment=False, pixels=pixels)
    assert plain.facts["class_names"] == other.facts["class_names"] == ["blue", "green", "red"]
    assert other.facts["pixels"] == dataclasses.asdict(pixels)
    assert plain.facts["pixels"] == dataclasses.asdict(
        PixelsConfig(fit="edge", resize=14)
    )  # round(8/7 x 12)
    image, _ = other.eval[int(other.eval_positions(range(1))[0])]
    raw = crops.fitted(pixels, 12)([image], np.zeros((1, images.NUMBERS)))[0]
    batch = other.eval_batch(0)["inputs"][0]
    np.testing.assert_allclose(
        batch, (raw / 255 - np.array(pixels.mean)) / np.array(pixels.std), atol=1e-6
    )
    assert batch.dtype == np.float32
    assert np.abs(batch - plain.eval_batch(0)["inputs"][0]).max() > 0.1


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        ({"mean": (0.5, 0.5)}, "data.pixels.mean has 2 numbers, and the model reads 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "write numbers above 0"),
        ({"mean": ()}, "write one number, or one per channel"),
        ({"fit": "edge", "resize": 11}, "data.pixels.resize 11 is less than the 12 pixels"),
        ({"fit": "centre", "resize": 14}, "of the fits squash and edge"),
        ({"background": "whiet"}, "data.pixels.background is 'whiet'"),
        ({"background": "#ffffff80"}, "or none"),
    ],
)
def test_pixels_that_fit_no_model_are_refused(pixels: dict, message: str, tmp_path: Path) -> None:
    path = pictures(tmp_path / "p", 2)
    with pytest.raises(ConfigError, match=message):
        load(path, pixels=PixelsConfig(**pixels))


def test_random_crop_stays_inside_and_varies() -> None:
    numbers = np.random.default_rng(0).random((64, images.NUMBERS))
    outs = crops.RandomCrop(9)([gradient(40, 60)] * 64, numbers)
    assert outs.shape == (64, 9, 9, 3)
    width = np.abs(outs[:, 0, -1, 0] - outs[:, 0, 0, 0]) * 9 / 8
    height = np.abs(outs[:, -1, 0, 1] - outs[:, 0, 0, 1]) * 9 / 8
    area = width * height / (40 * 60)
    assert area.min() < 0.2
    assert area.max() > 0.6
    mirrored = outs[:, 0, -1, 0] < outs[:, 0, 0, 0]
    assert np.array_equal(mirrored, numbers[:, 2] < 0.5)
    assert (outs[:, -1, 0, 1] >= outs[:, 0, 0, 1]).all()  # never upside down


@pytest.mark.parametrize("extreme", [0.0, 1 - 1e-9])
def test_random_crop_of_any_shape(extreme: float) -> None:
    for shape in ((1, 50), (50, 1), (1, 1), (3, 400)):
        out = crops.RandomCrop(5)([gradient(*shape)], np.full((1, images.NUMBERS), extreme))
        assert out.shape == (1, 5, 5, 3)


def test_shift_and_flip_shifts_and_flips() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    middle = images.shift_and_flip(
        [image] * 2, np.array([[0.5, 0.5, 0.9, 0, 0], [0.5, 0.5, 0.1, 0, 0]])
    )
    assert np.array_equal(middle[0], image)
    assert np.array_equal(middle[1], image[:, ::-1])
    corner = images.shift_and_flip([image], np.array([[0.0, 1 - 1e-9, 0.9, 0, 0]]))[0]
    assert np.array_equal(corner[2:, :-2], image[:-2, 2:])
