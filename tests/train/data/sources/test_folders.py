"""A user's own images, and the views of images of any size."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from mupax.train import data
from mupax.train.config.data import DataConfig, PixelsConfig
from mupax.train.data import cache, crops, images
from mupax.train.data.records import corpus
from mupax.train.data.sources import folders
from mupax.zoo.configs import ConfigError, ViTConfig

pytestmark = pytest.mark.core

MODEL = ViTConfig(width=6, depth=1, num_heads=1, image_size=12, patch_size=4, channels=3, num_classes=3)
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
            pixels = np.clip(np.array(colour) + rng.integers(-9, 10, (13 + i, 29 - i, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.{('png', 'jpg')[i % 2]}")
    return folder


def load(
    path: Path, model: ViTConfig = MODEL, seed: int = 0, note: cache.Note = lambda line: None, **fields
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
    train, evaluation = ({name for name, _, _ in side.files} for side in (dataset.train, dataset.eval))
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
    halves = [dataset.train_batch(5, slice(0, 4))["inputs"], dataset.train_batch(5, slice(4, 8))["inputs"]]
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
    with pytest.raises(data.DataError, match=r"has 4 classes and the model 3; write --model\.num-classes 4"):
        load(path)
    pictures(tmp_path / "q" / "train", 2)
    pictures(tmp_path / "q" / "test", 2)
    (tmp_path / "q" / "test" / "rad").mkdir()
    with pytest.raises(data.DataError, match=r"class folders that .*train has not: rad"):
        load(tmp_path / "q")


@pytest.mark.parametrize(("length", "count"), [(60, 17), (-20, 8)])  # of a PNG the last 20 bytes are no pixels
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
    assert f"left out, as broken: 3 of 52 images: {path}/blue/4.png, {path}/red/3.jpg, {path}/red/none.png" in notes
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
        Image.new("RGB", (9 + i, 40), (230, 10, 20)).convert(mode).save(path / "red" / f"{mode}.{suffix}")
    Image.new("CMYK", (40, 9), (0, 250, 250, 0)).save(path / "red" / "print.jpg")
    dataset = load(path)
    assert dataset.train_size + dataset.eval_size == 59
    for files in (dataset.train, dataset.eval):
        assert {files[i][0].shape[2] for i in range(len(files))} == {3}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bits_are_scaled_to_the_model_s_range(tmp_path: Path, suffix: str, channels: int) -> None:
    greys = {"bright": 50000, "dark": 9000, "white": 65535}
    for name, grey in greys.items():
        (tmp_path / name).mkdir()
        for i in range(9):
            Image.fromarray(np.full((14 + i, 15), grey, np.uint16)).save(tmp_path / name / f"{i}.{suffix}")
    batch = load(tmp_path, dataclasses.replace(MODEL, channels=channels)).train_batch(0)
    expected = np.array(list(greys.values()))[batch["targets"]] / 65535 * 2 - 1
    assert np.abs(batch["inputs"] - expected[:, None, None, None]).max() < 1 / 100


@pytest.mark.parametrize(("dtype", "mode"), [(np.float32, "F"), (np.int32, "I")])
def test_values_without_a_range_are_refused_before_training(tmp_path: Path, dtype: type, mode: str) -> None:
    path = pictures(tmp_path / "p")
    Image.fromarray(np.ones((14, 15), dtype)).save(path / "red" / "depth.tiff")
    with pytest.raises(data.DataError, match=rf"red/depth\.tiff: .*mode {mode}.*save it with 8 or 16"):
        load(path)


def test_a_decompression_bomb_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pictures(tmp_path / "p")
    notes: list[str] = []
    load(path, note=notes.append)
    assert notes == ["decoding 51 images, to find broken ones"]
    load(path, note=notes.append)
    assert len(notes) == 1  # once for a folder
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    Image.new("RGB", (90, 90)).save(path / "red" / "bomb.png")
    with pytest.raises(data.DataError, match=r"red/bomb\.png: Image size \(8100 pixels\) exceeds limit"):
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
            Image.fromarray(np.rot90(upright, turns)).save(tmp_path / name / f"{i}.{suffix}", exif=exif)
    for batch in load(tmp_path, batch_size=3).eval_batches():
        pixels = batch["inputs"][batch["weights"] > 0]
        assert (pixels[:, :5] > 0.9).all()
        assert (pixels[:, -5:] < -0.9).all()


# Views


def gradient(height: int, width: int) -> np.ndarray:
    """A pixel's value is its column (channel 0) and its row (channel 1)."""
    y, x = np.indices((height, width))
    return np.stack([x, y, 0 * x], axis=-1).astype(np.uint8)


def test_centre_crop_is_the_centre() -> None:
    out = crops.fitted(PixelsConfig(fit="centre"), 28)([gradient(64, 32)], np.zeros((1, images.NUMBERS)))[0]
    assert out.shape == (28, 28, 3)
    assert np.allclose(out[:, :, 0].mean(), 15.5, atol=0.5)
    assert np.allclose(out[:, :, 1].mean(), 31.5, atol=0.5)
    assert out[0, -1, 0] - out[0, 0, 0] == pytest.approx(27, abs=1)  # 7/8 of the shorter side at scale 1


def test_squash_takes_all_of_an_image_and_edge_its_middle() -> None:
    wide, none = gradient(32, 64), np.zeros((1, images.NUMBERS))
    squashed = crops.fitted(PixelsConfig(fit="squash", interpolation="box"), 16)([wide], none)[0]
    assert np.array_equal(squashed, np.floor(wide.reshape(16, 2, 16, 4, 3).mean((1, 3)) + 0.5))
    edge = crops.fitted(PixelsConfig(fit="edge", resize=32, interpolation="nearest"), 24)([wide], none)[0]
    assert np.array_equal(edge, wide[4:28, 20:44])
    tall = crops.fitted(PixelsConfig(fit="edge", resize=32), 24)([wide.swapaxes(0, 1)], none)[0]
    assert np.array_equal(tall, wide.swapaxes(0, 1)[20:44, 4:28])
    sides = crops.fitted(PixelsConfig(fit="squash", resize=64, interpolation="nearest"), 32)([wide], none)[0]
    assert np.array_equal(sides, wide.repeat(2, 0)[16:48, 16:48])


def test_pixels_are_what_the_config_says_and_recorded(tmp_path: Path) -> None:
    path = pictures(tmp_path / "p")
    pixels = PixelsConfig(fit="squash", interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    plain, other = load(path, augment=False), load(path, augment=False, pixels=pixels)
    assert plain.facts["class_names"] == other.facts["class_names"] == ["blue", "green", "red"]
    assert other.facts["pixels"] == dataclasses.asdict(pixels)
    assert plain.facts["pixels"] == dataclasses.asdict(PixelsConfig(fit="edge", resize=14))  # round(8/7 x 12)
    image, _ = other.eval[int(other.eval_positions(range(1))[0])]
    raw = crops.fitted(pixels, 12)([image], np.zeros((1, images.NUMBERS)))[0]
    batch = other.eval_batch(0)["inputs"][0]
    np.testing.assert_allclose(batch, (raw / 255 - np.array(pixels.mean)) / np.array(pixels.std), atol=1e-6)
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
    middle = images.shift_and_flip([image] * 2, np.array([[0.5, 0.5, 0.9, 0, 0], [0.5, 0.5, 0.1, 0, 0]]))
    assert np.array_equal(middle[0], image)
    assert np.array_equal(middle[1], image[:, ::-1])
    corner = images.shift_and_flip([image], np.array([[0.0, 1 - 1e-9, 0.9, 0, 0]]))[0]
    assert np.array_equal(corner[2:, :-2], image[:-2, 2:])
