"""A user's own images, and the views of images of any size."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from mupax.train.config import cli
from mupax.train.config.data import PixelsConfig, TransformsConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import to_json
from mupax.train.config.record import words as flags_of
from mupax.train.data import DataError, crops, images
from mupax.train.data.records import corpus
from mupax.train.data.sources import folders
from mupax.zoo.configs import ConfigError
from tests.train.data import loading
from tests.train.data.loading import IMAGE_MODEL, assert_batches_equal, assert_refused, joined
from tests.train.data.writing import write, write_greys, write_image, write_pictures

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("work_folder")]

TWO_CLASSES = dataclasses.replace(IMAGE_MODEL, num_classes=2)


def load_with_notes(path: Path | str, model: Any = IMAGE_MODEL, **fields: Any) -> Any:
    return loading.load_with_notes(f"images:{path}", model, **fields)


def load(path: Path | str = "p", model: Any = IMAGE_MODEL, **fields: Any) -> Any:
    return load_with_notes(path, model, **fields)[0]


@pytest.fixture
def pictures(work_folder: Path) -> Path:
    return write_pictures("p")


def test_classes_are_folders(pictures: Path) -> None:
    dataset = load()
    assert dataset.class_names == ["blue", "green", "red"]
    assert dataset.train_size + dataset.eval_size == 3 * 17
    for batch in (dataset.train_batch(0), dataset.train_batch(3), *dataset.eval_batches()):
        assert batch["inputs"].shape == (8, 12, 12, 3)
        assert np.abs(batch["inputs"]).max() <= 1
        brightest = batch["inputs"].mean(axis=(1, 2)).argmax(axis=-1)
        assert np.array_equal(brightest, 2 - batch["targets"])  # red is channel 0 and class 2


def test_split_is_by_file_and_has_every_class_on_both_sides(pictures: Path) -> None:
    dataset = load()
    train = {name for name, _, _ in dataset.train.files}
    evaluation = {name for name, _, _ in dataset.eval.files}
    assert not train & evaluation
    assert len(train | evaluation) == 51
    assert {name for name in train | evaluation if corpus.side(name) == "eval"} <= evaluation
    for side in (dataset.train, dataset.eval):
        assert {label for _, _, label in side.files} == {0, 1, 2}


def test_training_varies_and_evaluation_does_not(pictures: Path) -> None:
    dataset = load()
    other = load(seed=1)
    batch = dataset.train_batch(5)
    assert_batches_equal(load().train_batch(5), batch)
    for varied in (other, load(augment=False)):
        assert not np.array_equal(varied.train_batch(5)["inputs"], batch["inputs"])
    halves = [dataset.train_batch(5, rows) for rows in (slice(0, 4), slice(4, 8))]
    assert_batches_equal(joined(halves), batch)
    assert_batches_equal(joined([*other.eval_batches()]), joined([*dataset.eval_batches()]))


def test_digest_is_of_names_and_sizes(pictures: Path) -> None:
    first = load().facts["digest"]
    assert load(write_pictures("copy")).facts["digest"] == first
    (pictures / "red/16.png").rename("p/red/99.png")
    assert load().facts["digest"] != first


def test_grey_models_get_grey_images(pictures: Path) -> None:
    dataset = load(model=dataclasses.replace(IMAGE_MODEL, channels=1))
    assert dataset.train_batch(0)["inputs"].shape == (8, 12, 12, 1)
    two_channels = dataclasses.replace(IMAGE_MODEL, channels=2)
    assert_refused(r"reads 2 channels.*write --model\.channels 3", "images:p", two_channels)


def test_missing_and_wrong_folders_are_named(pictures: Path) -> None:
    def refused(message: str, path: str = "p") -> None:
        assert_refused(message, f"images:{path}", IMAGE_MODEL)

    refused(r"no folder .*gone; write data.name as images:PATH", "gone")
    Path("empty").mkdir()
    refused("has no folders in it", "empty")
    Path("p/violet").mkdir()
    refused(r"class folder .*violet has no image")
    write_greys("p/violet", 1)
    refused("violet has one image; give it at least two")
    write_greys("p/violet", 2)
    refused(r"has 4 classes and the model 3; write --model\.num-classes 4")
    write_pictures("q/train", 2)
    write_pictures("q/test", 2)
    Path("q/test/rad").mkdir()
    refused(r"class folders that .*train has not: rad", "q")


@pytest.mark.parametrize(
    ("length", "count"), [(60, 17), (-20, 8)]
)  # of a PNG the last 20 bytes are no pixels
def test_broken_image_is_named(pictures: Path, length: int, count: int) -> None:
    for file in (pictures / "red").iterdir():
        file.write_bytes(file.read_bytes()[:length])
    message = (
        rf"cannot read the image .*red/.*Remove or repair it \({count} of 51 are broken\), "
        r"or add --data\.on-broken skip"
    )
    for _ in range(2):  # what is known of the folder is no licence
        assert_refused(message, "images:p", IMAGE_MODEL)
    if count == 17:
        message = r"class red in .* has no whole image to train on"
        assert_refused(message, "images:p", IMAGE_MODEL, on_broken="skip")


def test_broken_images_are_left_out_where_that_is_asked_for(pictures: Path) -> None:
    complete = load()
    contents = {name: Path(name).read_bytes() for name in ("p/red/3.jpg", "p/blue/4.png")}
    for name, content in contents.items():
        write(name, content[:-40])
    empty = write("p/red/none.png", "")
    partial, notes = load_with_notes("p", on_broken="skip")
    names = "p/blue/4.png, p/red/3.jpg, p/red/none.png"
    assert f"left out, as broken: 3 of 52 images: {names}" in notes
    assert partial.facts["broken_images"] == 3
    assert partial.train_size + partial.eval_size == 49
    for k in range(8):
        partial.train_batch(k)
    assert partial.facts["digest"] != complete.facts["digest"]
    for name, content in contents.items():
        write(name, content)
    empty.unlink()
    assert load().facts == complete.facts


def test_mixed_sizes_and_modes_are_read_alike(pictures: Path) -> None:
    for i, mode in enumerate(("L", "LA", "P", "RGBA", "CMYK", "1", "YCbCr")):
        suffix = "tif" if mode in ("CMYK", "YCbCr") else "png"
        image = Image.new("RGB", (9 + i, 40), (230, 10, 20))
        image.convert(mode).save(f"p/red/{mode}.{suffix}")
    Image.new("CMYK", (40, 9), (0, 250, 250, 0)).save("p/red/print.jpg")
    dataset = load()
    assert dataset.train_size + dataset.eval_size == 59
    for files in (dataset.train, dataset.eval):
        assert {files[i][0].shape[2] for i in range(len(files))} == {3}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bits_are_scaled_to_the_model_s_range(suffix: str, channels: int) -> None:
    greys = {"bright": 50000, "dark": 9000, "white": 65535}
    for name, grey in greys.items():
        for i in range(9):
            write_image(f"p/{name}/{i}.{suffix}", np.full((14 + i, 15), grey, np.uint16))
    batch = load(model=dataclasses.replace(IMAGE_MODEL, channels=channels)).train_batch(0)
    expected = np.array(list(greys.values()))[batch["targets"]] / 65535 * 2 - 1
    assert np.abs(batch["inputs"] - expected[:, None, None, None]).max() < 1 / 100


@pytest.mark.parametrize(("dtype", "mode"), [(np.float32, "F"), (np.int32, "I")])
def test_values_without_a_range_are_refused_before_training(
    pictures: Path, dtype: type, mode: str
) -> None:
    write_image("p/red/depth.tiff", np.ones((14, 15), dtype))
    message = rf"red/depth\.tiff: .*mode {mode}.*save it with 8 or 16"
    assert_refused(message, "images:p", IMAGE_MODEL)


def test_a_decompression_bomb_is_named_before_training(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_with_notes("p")[1] == ["decoding 51 images, to find broken ones"]
    assert not load_with_notes("p")[1]  # once for a folder
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600_000)
    Image.new("RGB", (1300, 1000)).save("p/red/bomb.png")
    message = (
        r"red/bomb\.png: Image size \(1300000 pixels\) exceeds limit .*"
        r"write --data\.limits\.megapixels 2 \("
    )
    assert_refused(message, "images:p", IMAGE_MODEL)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_pictures_are_turned_as_their_camera_was(suffix: str) -> None:
    upright = np.zeros((40, 20, 3), np.uint8)
    upright[:20] = 255
    for name, turns, orientation in (("as_is", 0, 1), ("left", 1, 6), ("over", 2, 3)):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        for i in range(9):
            write_image(f"p/{name}/{i}.{suffix}", np.rot90(upright, turns), exif=exif)
    for batch in load().eval_batches():
        pixels = batch["inputs"][batch["weights"] > 0]
        assert (pixels[:, :5] > 0.9).all()
        assert (pixels[:, -5:] < -0.9).all()


# Parts of a folder


@pytest.mark.parametrize(
    ("names", "classes", "sizes", "words"),
    [
        # A class that is not evaluated is none the less one.
        ("train/cat train/dog train/emu valid/cat valid/dog", "cat dog emu", (9, 6), "train valid"),
        ("Train/cat Train/dog Train/emu Test/cat Test/dog", "cat dog emu", (9, 6), "Train Test"),
        ("training/cat training/dog validation/cat", "cat dog", (6, 3), "training validation"),
        ("training_set/cat training_set/dog test_set/cat", "cat dog", (6, 3), "training_set"),
        ("trn/cat trn/dog dev/cat", "cat dog", (6, 3), "trn dev"),
        ("train/a train/b val/a val/b test/a test/b", "a b", (6, 6), "test is not used"),
        ("train/a train/b test", "a b", (4, 2), "test is not used"),  # test images have no class
        ("bus car train", "bus car train", (6, 3), ""),  # a class may be called train
        ("bus car test train", "bus car test train", (8, 4), "caution"),
        ("a b __MACOSX .git a/.ipynb_checkpoints b/__MACOSX", "a b", (4, 2), ""),  # hidden files
    ],
)
def test_folders_are_parts_or_classes(
    names: str, classes: str, sizes: tuple[int, int], words: str
) -> None:
    for name in names.split():
        write_greys(name)
    folder = folders.split(Path())
    assert folder.classes == classes.split()
    assert (len(folder.train), len(folder.eval)) == sizes
    for _, file, label in (*folder.train, *folder.eval):
        assert file.parent.name == folder.classes[label]
    assert bool(folder.notes) == bool(words)
    assert all(word in folder.notes[0] for word in words.split())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("train/a train/b val/a val/b dev/a dev/b", "dev and val"),
        ("val/a val/b test", "no folder of classes to train on"),
    ],
)
def test_parts_that_cannot_be_told_are_refused(names: str, message: str) -> None:
    for name in names.split():
        write_greys(name)
    with pytest.raises(DataError, match=message):
        folders.split(Path())


def test_what_is_left_out_is_named_with_its_reason() -> None:
    for name in ("p/a", "p/b"):
        write_greys(name)
    write_greys("elsewhere/deep", 5)
    for link, target in {
        "a/linked": "elsewhere",
        "a/loop": "p",
        "around": "p",
        "a/gone.png": "nowhere.png",
    }.items():
        Path("p", link).symlink_to(Path(target).absolute())
    write("p/a/photo.heic", "x")
    write("p/readme.txt", "x")
    write("p/a/._0.png", b"of a Mac")
    picture = Image.new("RGB", (9, 9), (1, 2, 3))
    picture.save("p/b/x.jfif", format="JPEG")
    picture.save("p/b/y.PPM", format="PPM")
    folder = folders.split(Path("p"))
    assert folder.classes == ["a", "b"]
    assert len(folder.train) + len(folder.eval) == 3 + 5 + 3 + 2
    notes = "\n".join(folder.notes)
    for name in ("a/loop", "a/gone.png", "a/photo.heic", "readme.txt", ".heic is no kind of image"):
        assert name in notes
    for suffix in Image.registered_extensions().keys() & {".avif", ".webp", ".jp2", ".tga", ".qoi"}:
        assert folders.is_image(f"x{suffix.upper()}")
    assert not folders.is_image("x.pdf")


def test_exact_copies_on_both_sides_are_counted(pictures: Path) -> None:
    assert "copied_images" not in load().facts
    evaluated = [file for _, file, _ in folders.split(pictures).eval]
    for side in ("train", "val"):
        shutil.copytree(pictures, f"q/{side}")
    for file in evaluated:
        shutil.copy(file, file.with_name(f"{file.stem} copy{file.suffix}"))
    dataset, notes = load_with_notes("p")
    assert 0 < dataset.facts["copied_images"] <= len(folders.split(pictures).eval)
    assert any("exact copies" in note for note in notes)
    assert load("q").facts["copied_images"] == 51


def test_one_name_of_a_class_in_two_spellings() -> None:
    decomposed = "cafe\u0301"
    for i, name in enumerate((decomposed, "caf\u00e9", "zoo")):
        write_greys(name, 2 + i)
    folder = folders.split(Path())
    assert folder.classes == ["caf\u00e9", "zoo"]
    assert len(folder.train) + len(folder.eval) == 9
    assert folder.labelled_as(["zoo", decomposed]).train[0][2] == 1


def test_another_folder_is_evaluated_whole(pictures: Path) -> None:
    copy = write_pictures("copy")
    run = load().facts
    held_out = [name for name, _, _ in folders.split(pictures).eval]
    for path in ("p", "p/../p", "copy"):
        evaluated = folders.to_evaluate(f"images:{path}", run).eval
        assert [name for name, _, _ in evaluated] == held_out
    (copy / "red/0.png").unlink()
    other = folders.to_evaluate("images:copy", run)
    assert len(other.eval) == 50
    assert "all 50 images" in other.notes[0]
    write_greys("parts/train/red", 4)
    write_greys("parts/test/red", 3)
    folder = folders.to_evaluate("images:parts", run)
    assert (len(folder.eval), folder.classes) == (3, ["red"])
    assert "train is not used" in folder.notes[0]
    assert len(folders.to_evaluate("images:copy", {}).eval) == 50  # weights without a run


# Decoding

HALF = np.zeros((20, 30, 3), np.uint8)
HALF[:, :15] = 255
ORIENTATION = ExifTags.Base.Orientation


def exif_with(tag: int, kind: int, content: bytes) -> bytes:
    """Return EXIF data with orientation 6 and a rational of another tag."""
    entries = [
        struct.pack("<HHLHH", ORIENTATION, 3, 1, 6, 0),
        struct.pack("<HHLL", tag, kind, 1, 38),
    ]
    directory = struct.pack("<H", 2) + b"".join(sorted(entries)) + struct.pack("<L", 0)
    return b"Exif\0\0II*\0" + struct.pack("<L", 8) + directory + content


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_exif_that_pil_cannot_write_is_read(suffix: str) -> None:
    exif = exif_with(ExifTags.Base.XResolution, 10, struct.pack("<ll", -1, 0))
    file = write_image(f"x.{suffix}", HALF, exif=exif)
    pixels = folders.decoded(file, 3, "x")
    assert pixels.shape == (30, 20, 3)
    assert pixels[:12].min() > 200
    if suffix == "png":  # which has a checksum
        return
    entry = struct.pack("<HHL", ORIENTATION, 3, 1)
    damaged = struct.pack("<HHL", ORIENTATION, 7, 2**31)
    assert entry in file.read_bytes()
    write(file, file.read_bytes().replace(entry, damaged))
    assert folders.decoded(file, 3, "x").shape == (20, 30, 3)


def write_transparent(mode: str) -> Path:
    """Write a disc of 60 on a transparent ground that hides 200."""
    file = Path("x.png")
    y, x = np.mgrid[:32, :32] - 15.5
    disc = x**2 + y**2 < 100
    grey = Image.fromarray(np.where(disc, 60, 200).astype(np.uint8))
    alpha = Image.fromarray(np.where(disc, 255, 0).astype(np.uint8))
    if mode in ("RGBA", "LA"):
        Image.merge("LA", (grey, alpha)).convert(mode).save(file)
    elif mode == "P":
        indexed = Image.fromarray(disc.astype(np.uint8)).convert("P")
        indexed.putpalette([200, 200, 200, 60, 60, 60])
        indexed.save(file, transparency=bytes([0, 255]))
    else:  # one value, or colour, stands for what is transparent
        hidden = 200 if mode == "L" else (200, 200, 200)
        grey.convert(mode).save(file, transparency=hidden)
    return file


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_transparent_pixels_get_the_background(mode: str, channels: int) -> None:
    file = write_transparent(mode)
    for background, corner in (("white", 255), ("black", 0), ("#808080", 128), ("none", 200)):
        pixels = folders.decoded(file, channels, "x", background)
        assert set(pixels[0, 0]) == {corner}
        assert set(pixels[16, 16]) == {60}


def test_a_picture_in_the_transparency_alone_is_reported() -> None:
    for name, grey in (("dark", 0), ("light", 255)):
        for i in range(4):
            pixels = np.zeros((9, 9, 2), np.uint8)
            pixels[..., 0] = grey
            pixels[2, i, 1] = 255
            write_image(f"p/{name}/{i}.png", pixels)

    def fields(background: str) -> dict[str, Any]:
        return {"model": TWO_CLASSES, "pixels": PixelsConfig(background=background)}

    for background, count, other in (
        ("white", 4, "black"),
        ("black", 4, "white"),
        ("none", 8, "white"),
    ):
        _, notes = load_with_notes("p", **fields(background))
        (caution,) = [note for note in notes if note.startswith("caution")]
        assert f"{count} of 8 images" in caution
        assert f"--data.pixels.background {other}" in caution
    batch = load(**fields("black")).eval_batch(0)
    assert set(batch["inputs"][batch["targets"] == 0].ravel()) == {-1}


def test_warnings_of_pil_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_transparent("P")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for channels in (1, 3):
            folders.decoded(file, channels, "x", "none")
    assert caught == []


def test_large_jpegs_are_decoded_at_the_size_that_a_crop_needs() -> None:
    rng = np.random.default_rng(0)
    for name in ("a/0", "a/1", "a/2", "a/3", "b/0", "b/1", "b/2", "b/3"):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        write_image(f"p/{name}.jpg", np.asarray(coarse.resize((800, 600))), quality=95)
    dataset = load(model=TWO_CLASSES)
    files = dataset.train
    full = files[0][0]
    assert full.shape == (600, 800, 3)
    assert [files.at_least(0, side)[0].shape[:2] for side in (12, 75, 76, 151, 301)] == [
        (75, 100), (75, 100), (150, 200), (300, 400), (600, 800),
    ]  # fmt: skip
    view = crops.RandomCrop(12)
    uniforms = rng.random((64, images.NUMBERS))
    exact = view([full] * 64, uniforms)
    sides = [view.least_side(row) for row in uniforms]
    reduced = [files.at_least(0, side)[0] for side in sides]
    assert {len(image) for image in reduced} <= {75, 150}
    for image, side in zip(reduced, sides, strict=True):
        assert min(image.shape[:2]) >= side
    error = np.abs(view(reduced, uniforms) - exact).mean()
    tiny = np.asarray(Image.fromarray(full).resize((16, 12)))
    assert error < 4 < np.abs(view([tiny] * 64, uniforms) - exact).mean()
    assert view.least_side(np.array([0, 0, 0, 1, 0.5])) == 12
    assert view.least_side(np.zeros(images.NUMBERS)) == 49  # 12 / sqrt(0.08 x 3/4)
    # Evaluation and export read every pixel.
    image = dataset.eval[int(dataset.eval_positions(range(1))[0])][0]
    fitted = crops.fitted(PixelsConfig(), 12)([image], uniforms[:1])
    expected = images.normalized(fitted, PixelsConfig())
    assert np.array_equal(dataset.eval_batch(0)["inputs"][0], expected[0])


# A jitter in place of a crop


def test_a_jitter_moves_turns_and_mirrors() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    still = np.full(images.NUMBERS, 0.5)
    still[3] += 2.0**-21  # half of what the angle does not show: no stretch

    def view(mirror: bool = False, **changes: float) -> np.ndarray:
        uniforms = still.copy()
        for index, value in changes.items():
            uniforms[int(index[1:])] = value
        return crops.Jitter(1.0, mirror=mirror)([image], uniforms[None])[0]

    np.testing.assert_allclose(view(), image, atol=0.05)
    np.testing.assert_allclose(view(mirror=True, u2=0.1), image[:, ::-1], atol=0.05)
    np.testing.assert_allclose(view(mirror=False, u2=0.1), image, atol=0.05)
    moved = view(u0=1.0)
    np.testing.assert_allclose(moved[:14], image[2:], atol=0.1)  # an eighth of 16
    border = np.stack([image[-1]] * 2)
    np.testing.assert_allclose(moved[14:], border, atol=0.1)  # the border goes on
    assert np.abs(view(u3=1.0) - image).mean() > 10


def test_jittered_images_are_decoded_once_and_are_those_of_a_folder_too_large_to_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_pictures("p", 6)
    transforms = TransformsConfig(jitter=0.7)
    load(transforms=transforms)  # decodes all images to find broken ones, and remembers it
    decoded: list[str] = []
    decode = folders.decoded

    def counted(file: Path, *args: Any) -> np.ndarray:
        decoded.append(str(file))
        return decode(file, *args)

    monkeypatch.setattr(folders, "decoded", counted)
    in_memory = load(transforms=transforms)
    batches = [in_memory.train_batch(k)["inputs"] for k in range(6)]
    assert not np.array_equal(batches[0], batches[3])
    assert len(decoded) == len(set(decoded)) == in_memory.train_size
    monkeypatch.setattr(folders, "_MOST_BYTES_IN_MEMORY", 0)
    from_disk = load(transforms=transforms)
    np.testing.assert_allclose(from_disk.train_batch(2)["inputs"], batches[2], atol=1e-5)
    assert_batches_equal(in_memory.eval_batch(0), load().eval_batch(0))


def test_no_crop_is_mirrored_where_that_is_asked_for() -> None:
    """Images dark on their left half: a mirrored one is dark on its right."""
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:, 16:] = 200
    for i in range(9):
        for label in "ab":
            write_image(f"p/{label}/{i}.png", pixels + np.uint8(i % 2))

    def mirrored(transforms: TransformsConfig) -> int:
        source = load(model=TWO_CLASSES, transforms=transforms)
        inputs = np.concatenate([source.train_batch(k)["inputs"] for k in range(4)])
        return int((inputs[:, :, 0].mean((1, 2)) > inputs[:, :, -1].mean((1, 2))).sum())

    for transforms in (TransformsConfig(), TransformsConfig(jitter=0.2)):
        assert mirrored(transforms) > 4
        assert mirrored(dataclasses.replace(transforms, mirror=False)) == 0


# Sizes of the model


def model_of(*words: str) -> Any:
    """Return the model of a run that the user designs, for which no recipe is chosen."""
    words = ("--model.depth", "3", *words)
    return cli.parse("vit-digits", RECIPES["vit-digits"], [*words]).config.model


def sizes_of(model: Any) -> tuple[int, int, int, int]:
    return model.num_classes, model.channels, model.image_size, model.patch_size


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--data.name images:p", (3, 3, 16, 2)),
        ("--data.name images:p --model.channels 1", (3, 1, 16, 2)),
        ("--data.name images:p --model.num_classes=3 --model.patch-size 4", (3, 3, 16, 4)),
        ("--data.name images:p --model.image-size 12", (3, 3, 12, 2)),
        ("--data.name images:p --model vit-s16", (3, 3, 224, 16)),
        ("--data.name images:p --init-from elsewhere", (3, 1, 8, 2)),
        ("--data.name=images:40", (2, 1, 40, 4)),
        ("--data.name=images:97", (2, 1, 91, 7)),
        ("--data.name=images:500", (2, 1, 224, 14)),
        ("--data.name images:nowhere", sizes_of(RECIPES["vit-digits"]().model)),
        ("--data.name fashion", (10, 1, 28, 2)),
        ("--data.name shapes", (10, 3, 32, 2)),
        ("--data.name cifar5m", (10, 3, 32, 2)),
    ],
)
def test_the_model_takes_its_sizes_from_the_data(
    words: str, sizes: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if "images:p" in words:
        write_pictures("p")  # shorter sides of 13 to 21
    for side in (40, 97, 500):
        if f"images:{side}" in words:
            for name in ("a/0", "a/1", "b/0", "b/1"):
                value = int(name[-1])
                pixels = np.full((side + 7, side), value, np.uint8)
                write_image(f"{side}/{name}.png", pixels)
    assert sizes_of(model_of(*words.split())) == sizes
    if words == "--data.name images:p":
        assert "3 classes, 3 channels" in " ".join(capsys.readouterr().err.split())


def test_a_file_s_sizes_stay_and_a_run_keeps_its_own(pictures: Path) -> None:
    recipe = {"recipe": "vit-digits", "data": {"name": "images:p"}, "model": {"channels": 1}}
    write("x.json", json.dumps(recipe))
    config = cli.parse("x.json", cli.recipe("x.json"), []).config
    assert sizes_of(config.model) == (3, 1, 16, 2)
    recipe_words = flags_of(config) or []
    assert {"--model.channels", "--model.image-size"} <= {*recipe_words}
    assert sizes_of(model_of(*recipe_words)) == (3, 1, 16, 2)
    # A run that an older version began: grey, of 8 pixels, by the central 7/8.
    older = to_json(dataclasses.replace(config, model=RECIPES["vit-digits"]().model))
    older["data"]["pixels"] = {
        "fit": "centre",
        "resize": None,
        "interpolation": "box",
        "mean": [0.5],
        "std": [0.5],
    }
    write("run/config.json", json.dumps({"config": older}))
    words = ["--data.name", "images:p", "--resume", "--workdir", "run"]
    again = cli.parse("vit-digits", RECIPES["vit-digits"], words).config
    assert sizes_of(again.model) == (10, 1, 8, 2)
    assert again.data.pixels == PixelsConfig(fit="centre", background="none", interpolation="box")


# Views


def gradient(height: int, width: int) -> np.ndarray:
    """Return an image whose channels 0 and 1 are the column and the row of a pixel."""
    y, x = np.indices((height, width))
    return np.stack([x, y, 0 * x], axis=-1).astype(np.uint8)


def fitted(image: np.ndarray, size: int, **fields: Any) -> np.ndarray:
    """Return the view of an image that evaluation has."""
    return crops.fitted(PixelsConfig(**fields), size)([image], np.zeros((1, images.NUMBERS)))[0]


def test_centre_crop_is_the_centre() -> None:
    view = fitted(gradient(64, 32), 28, fit="centre")
    assert view.shape == (28, 28, 3)
    assert np.allclose(view[:, :, 0].mean(), 15.5, atol=0.5)
    assert np.allclose(view[:, :, 1].mean(), 31.5, atol=0.5)
    # 7/8 of the shorter side at scale 1
    assert view[0, -1, 0] - view[0, 0, 0] == pytest.approx(27, abs=1)


def test_squash_takes_all_of_an_image_and_edge_its_middle() -> None:
    wide = gradient(32, 64)
    tall = wide.swapaxes(0, 1)
    means = wide.reshape(16, 2, 16, 4, 3).mean((1, 3))
    squashed = fitted(wide, 16, fit="squash", interpolation="box")
    assert np.array_equal(squashed, np.floor(means + 0.5))
    edge = fitted(wide, 24, fit="edge", resize=32, interpolation="nearest")
    assert np.array_equal(edge, wide[4:28, 20:44])
    assert np.array_equal(fitted(tall, 24, fit="edge", resize=32), tall[20:44, 4:28])
    sides = fitted(wide, 32, fit="squash", resize=64, interpolation="nearest")
    assert np.array_equal(sides, wide.repeat(2, 0)[16:48, 16:48])


def test_pixels_are_what_the_config_says_and_recorded(pictures: Path) -> None:
    pixels = PixelsConfig(
        fit="squash", interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0)
    )
    plain = load(augment=False)
    other = load(augment=False, pixels=pixels)
    assert plain.facts["class_names"] == other.facts["class_names"] == ["blue", "green", "red"]
    assert other.facts["pixels"] == dataclasses.asdict(pixels)
    # 14 is round(8/7 x 12)
    assert plain.facts["pixels"] == dataclasses.asdict(PixelsConfig(fit="edge", resize=14))
    image, _ = other.eval[int(other.eval_positions(range(1))[0])]
    raw = fitted(image, 12, **dataclasses.asdict(pixels))
    batch = other.eval_batch(0)["inputs"][0]
    expected = (raw / 255 - np.array(pixels.mean)) / np.array(pixels.std)
    np.testing.assert_allclose(batch, expected, atol=1e-6)
    assert batch.dtype == np.float32
    assert np.abs(batch - plain.eval_batch(0)["inputs"][0]).max() > 0.1


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        ({"mean": (0.5, 0.5)}, "data.pixels.mean has 2 numbers, and the model reads 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "write numbers above 0"),
        ({"mean": ()}, "write one number, or one per channel"),
        ({"fit": "edge", "resize": 11}, "data.pixels.resize 11 is less than the 12 pixels"),
        (
            {"fit": "centre", "resize": 14},
            "data.pixels.resize is 14, and --data.pixels.fit centre does not read it; write",
        ),
        ({"background": "whiet"}, "data.pixels.background is 'whiet'"),
        ({"background": "#ffffff80"}, "or none"),
    ],
)
def test_pixels_that_fit_no_model_are_refused(pixels: dict[str, Any], message: str) -> None:
    write_pictures("p", 2)
    with pytest.raises(ConfigError, match=message):
        load(pixels=PixelsConfig(**pixels))


def test_random_crop_stays_inside_and_varies() -> None:
    uniforms = np.random.default_rng(0).random((64, images.NUMBERS))
    views = crops.RandomCrop(9)([gradient(40, 60)] * 64, uniforms)
    assert views.shape == (64, 9, 9, 3)
    width = np.abs(views[:, 0, -1, 0] - views[:, 0, 0, 0]) * 9 / 8
    height = np.abs(views[:, -1, 0, 1] - views[:, 0, 0, 1]) * 9 / 8
    area = width * height / (40 * 60)
    assert area.min() < 0.2
    assert area.max() > 0.6
    mirrored = views[:, 0, -1, 0] < views[:, 0, 0, 0]
    assert np.array_equal(mirrored, uniforms[:, 2] < 0.5)
    assert (views[:, -1, 0, 1] >= views[:, 0, 0, 1]).all()  # never upside down


@pytest.mark.parametrize("extreme", [0.0, 1 - 1e-9])
def test_random_crop_of_any_shape(extreme: float) -> None:
    uniforms = np.full((1, images.NUMBERS), extreme)
    for shape in ((1, 50), (50, 1), (1, 1), (3, 400)):
        assert crops.RandomCrop(5)([gradient(*shape)], uniforms).shape == (1, 5, 5, 3)


def test_shift_and_flip_shifts_and_flips() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)

    def view(down: float, right: float, mirror: float) -> np.ndarray:
        return images.shift_and_flip([image], np.array([[down, right, mirror, 0, 0]]))[0]

    assert np.array_equal(view(0.5, 0.5, 0.9), image)
    assert np.array_equal(view(0.5, 0.5, 0.1), image[:, ::-1])
    assert np.array_equal(view(0.0, 1 - 1e-9, 0.9)[2:, :-2], image[:-2, 2:])
