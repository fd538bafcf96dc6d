"""TFDS data sets prepared elsewhere, from tiny stand-ins, and the command that prepares them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mupax.train.config.data import ImageSizes, image_sizes
from mupax.train.config.run import DataConfig
from mupax.train.data import DataError
from mupax.train.data.sources import published
from mupax.train.data.text import denoising
from mupax.train.data.text.noise import Infilling
from mupax.zoo import configs
from tests.fixtures.calls import calls_of_process
from tests.fixtures.commands import command, output_line, refusal
from tests.train.data import loading
from tests.train.data.loading import IMAGE_MODEL, TEXT_MODEL, documents, token_ids
from tests.train.data.prepared import TEXT, prepare, sentences, write_text_set
from tests.train.data.writing import write, write_image

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Return what loads a data set of the folder of the test."""

    def load(name: str = "tiny", model: Any = TEXT_MODEL, **fields: Any) -> Any:
        fields = {"data_dir": str(tmp_path), "batch_size": 6, **fields}
        return loading.load(name, model, **fields)

    return load


def texts(first: int, last: int) -> list[str]:
    return [row["text"] for row in sentences(first, last)]


# Any prepared TFDS data set


def test_prepared_text_by_name(tmp_path: Path, load: Any) -> None:
    write_text_set(tmp_path)
    dataset = load()
    train, evaluation = token_ids(dataset)
    assert documents(train) == texts(0, 20)
    assert documents(evaluation) == texts(20, 25)
    assert dataset.facts["version"] == "1.2.3"
    assert load("tiny:1.2.3").facts["digest"] == dataset.facts["digest"]
    # A folder that libraries take for a pattern, and whose name is not UTF-8.
    odd = tmp_path / os.fsdecode(b"[a]*%#?\\" + b"\xff")
    shutil.copytree(tmp_path / "tiny", odd / "tiny")
    assert load(data_dir=str(odd)).facts["digest"] == dataset.facts["digest"]
    config = DataConfig(name="tiny", batch_size=6, data_dir=str(tmp_path))
    assert image_sizes(config) is None
    noised = denoising.denoising(config, Infilling(), inputs=9, seed=0)
    targets = noised.eval_batch(0)["targets"][:, 1:-1]
    np.testing.assert_array_equal(targets, dataset.eval_batch(0)["inputs"])
    assert "tensorflow" not in sys.modules


def test_without_a_held_out_split_the_end_is_held_out(tmp_path: Path, load: Any) -> None:
    prepare(tmp_path, TEXT, {"train": sentences(0, 100)})
    train, evaluation = token_ids(load())
    assert documents(train) == texts(0, 95)
    assert documents(evaluation) == texts(95, 100)
    message = r"of which train\[:95%\] is used for training; leave --data\.train-percent out"
    with pytest.raises(DataError, match=message):
        load(train_percent=50)


def test_the_first_percent_of_the_training_split(tmp_path: Path, load: Any) -> None:
    write_text_set(tmp_path)
    # Text that was packed of a part is not taken for all of it, nor the other way round.
    for fields, count in (({}, 20), ({"train_percent": 50}, 10), ({}, 20)):
        train, evaluation = token_ids(load(**fields))
        assert documents(train) == texts(0, count)
        assert documents(evaluation) == texts(20, 25)


def test_packed_text_opens_without_tfds(tmp_path: Path, load: Any) -> None:
    """The second start of a run should not pay for importing what it does not use."""
    write_text_set(tmp_path)
    load()
    code = (
        "import dataclasses, sys; from mupax.train import data; "
        "from mupax.train.config.run import DataConfig; from mupax.zoo.configs import get\n"
        f"config = DataConfig(name='tiny', batch_size=2, data_dir={str(tmp_path)!r})\n"
        "data.load(config, dataclasses.replace(get('lm-tiny'), seq_len=7), seed=0)\n"
        "assert not {'tensorflow_datasets', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_data_imports_nothing_heavy() -> None:
    count, modules = calls_of_process("import mupax.train.data")
    heavy = "numpy jax grain tensorflow_datasets tensorflow tokenizers PIL sklearn"
    assert not modules & set(heavy.split())
    assert count < 100_000  # 49,000, most of them for the configs that it imports


LABEL = tfds.features.ClassLabel(names=["ant", "bee", "cat"])


def pictures(count: int, shape: tuple[int, int, int], file: Path | None = None) -> list[Any]:
    """Return records of images, as arrays, or as the content of a PNG."""
    records = []
    for i in range(count):
        image: Any = np.full(shape, 20 * (i % 3 + 1) + i, np.uint8)
        if file:
            image = write_image(file, image).read_bytes()
        records.append({"image": image, "label": i % 3})
    return records


SQUARE = (12, 12, 3)


@pytest.mark.parametrize(
    ("feature", "shape"),
    [
        (tfds.features.Tensor(shape=SQUARE, dtype=np.uint8), SQUARE),
        (tfds.features.Image(shape=SQUARE), SQUARE),
        (tfds.features.Image(shape=(None, None, 3)), (19, 31, 3)),
    ],
    ids=["tensor", "file", "any size"],
)
def test_prepared_images_by_name(
    tmp_path: Path, feature: Any, shape: tuple[int, int, int], load: Any
) -> None:
    file = tmp_path / "x.png" if isinstance(feature, tfds.features.Image) else None
    splits = {"train": pictures(18, shape, file), "test": pictures(6, shape, file)}
    prepare(tmp_path, {"image": feature, "label": LABEL}, splits)
    dataset = load(model=IMAGE_MODEL)
    assert dataset.class_names == ["ant", "bee", "cat"]
    (batch,) = dataset.eval_batches()
    assert batch["inputs"].shape == (6, 12, 12, 3)
    values = np.round((batch["inputs"][:, 6, 6, 0] + 1) * 127.5).astype(int)
    assert sorted(values) == sorted(20 * (i % 3 + 1) + i for i in range(6))
    assert np.array_equal((values - 20) // 20, batch["targets"])
    labels = np.concatenate([dataset.train_batch(k)["targets"] for k in range(3)])
    assert np.bincount(labels).tolist() == [6, 6, 6]
    assert "tensorflow" not in sys.modules

    # The defaults of a model for this data.
    config = DataConfig(name="tiny", batch_size=6, data_dir=str(tmp_path))
    side = 12 if shape == SQUARE else None
    assert image_sizes(config) == ImageSizes(3, 3, side, scaled=side is None)
    assert image_sizes(dataclasses.replace(config, name="tinier")) is None
    next(tmp_path.glob("tiny/*/features.json")).unlink()
    assert image_sizes(config) is None, "a damaged data set is named when the run loads it"


def test_images_must_fit(tmp_path: Path, load: Any) -> None:
    feature = tfds.features.Tensor(shape=(12, 12, 1), dtype=np.uint8)
    records = pictures(6, (12, 12, 1))
    splits = {"train": records, "test": records}
    prepare(tmp_path, {"image": feature, "label": LABEL}, splits)
    grey = dataclasses.replace(IMAGE_MODEL, channels=1)
    for size in (12, 8):
        batch = load(model=dataclasses.replace(grey, image_size=size)).train_batch(0)
        assert batch["inputs"].shape == (6, size, size, 1)
    for model, message in (
        (IMAGE_MODEL, r"with 1 channels, .*write --model\.image-size 12 --model\.channels 1"),
        (dataclasses.replace(grey, image_size=16), r"write --model\.image-size 12"),
        (dataclasses.replace(grey, num_classes=5), r"write --model\.num-classes 3"),
        (TEXT_MODEL, "has no feature 'text', only image, label; is it the right kind"),
    ):
        with pytest.raises(DataError, match=message):
            load(model=model)


def test_configurations_and_versions(tmp_path: Path, load: Any) -> None:
    for name in ("large", "small"):
        write_text_set(tmp_path, config=tfds.core.BuilderConfig(name=name))
    assert load("tiny/small").train_size > 0
    shutil.copytree(tmp_path / "tiny/small", tmp_path / "c4/en")
    assert load("c4").facts["digest"] == load("c4/en").facts["digest"]
    for version in ("10.0.0", "3.0.1"):
        shutil.copytree(tmp_path / "tiny/large/1.2.3", tmp_path / f"tiny/large/{version}")
    assert load("tiny/large").facts["version"] == "10.0.0"
    assert load("tiny/large:3.0.1").facts["version"] == "3.0.1"
    for name, message in {
        "tiny": r"several configurations; write data\.name as tiny/large",
        "tiny/small:9.9.9": r"has no version 9\.9\.9, only 1\.2\.3",
    }.items():
        with pytest.raises(DataError, match=message):
            load(name)


def test_damaged_data_sets_are_named(tmp_path: Path, load: Any) -> None:
    folder = write_text_set(tmp_path)
    info = folder / "dataset_info.json"
    content = info.read_text()
    next(folder.glob("*train*array_record*")).unlink()
    for damaged, message in (
        (content, r"is damaged: .*tiny-train\.array_record.*Delete that folder"),
        (
            json.dumps({**json.loads(content), "fileFormat": "tfrecord"}),
            r"is in tfrecord, which only TensorFlow reads.*convert_format",
        ),
        (content[:40], r"no whole dataset_info\.json.*again \(mupax data prepare tiny\)"),
    ):
        write(info, damaged)
        with pytest.raises(DataError, match=message):
            load()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "c4",
            "c4 is not prepared in .*write --data.name hf:allenai/c4:en, "
            ".*`mupax data prepare c4 --data-dir",
        ),
        ("imagenet2012", r"run `mupax data prepare imagenet2012"),
        ("cifar10", "is not prepared in"),
        ("cifar5", "no data is named 'cifar5'; did you mean .*cifar5m"),
        ("python_corpsu", r"; did you mean python_corpus\?"),  # once, with a folder of that name
        ("imagenet2013", "did you mean .*imagenet2012"),
        ("qqqqqq", "write one of python_corpus, digits, shapes, cifar5m"),
        ("../../etc", "no data is named"),
        ("test:/tmp/x", "no data is named 'test:/tmp/x'"),
    ],
)
def test_missing_data_is_reported_at_once(
    tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch, load: Any
) -> None:
    monkeypatch.chdir(tmp_path)  # where ../../etc is no folder
    Path("python_corpus").mkdir()
    with pytest.raises(DataError, match=message) as error:
        load(name)
    assert len(str(error.value)) < 500


# The command


def test_command_prepares_what_a_run_then_finds(tmp_path: Path, load: Any) -> None:
    assert "digits is prepared in" in output_line(f"data prepare digits --data-dir {tmp_path}")
    model = configs.get("vit-tiny")
    _, notes = loading.load_with_notes("digits", model, data_dir=str(tmp_path))
    assert notes == []
    # Damaged records are noticed.
    (shard,) = tmp_path.glob("digits/*/*array_record*")
    content = shard.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 1
    message = rf"{tmp_path}/digits/1\.0\.0 is damaged: .*Delete that folder and prepare"
    for damaged in (content[:-5000], flipped, None):
        shard.unlink()
        if damaged is not None:
            shard.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            load("digits", model)


@pytest.mark.parametrize(
    ("words", "suggestions"),
    [
        ("prepare cifar100000", ("did you mean", "cifar100")),
        ("frepare digits", ("did you mean prepare?",)),
    ],
)
def test_command_on_unknown_names(tmp_path: Path, words: str, suggestions: tuple[str, ...]) -> None:
    message = refusal(f"data {words} --data-dir {tmp_path}")
    assert all(word in message for word in suggestions)


def test_command_reports_what_tfds_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(
            "Manual directory does not exist.\nPut ILSVRC2012_img_train.tar there."
        )

    monkeypatch.setattr(tfds, "builder", refuse)
    done = command(f"data prepare imagenet2012 --data-dir {tmp_path}")
    assert done.code == 1
    assert "Put ILSVRC2012_img_train.tar there." in done.err
    assert len(done.err.splitlines()) <= 10


def test_command_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **options: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    done = command(f"data prepare mnist --data-dir {tmp_path}")
    assert done.code == 1
    assert "storage.googleapis.com cannot be reached: Name or service not known" in done.message
    assert "Run this where there is a network" in done.message


def test_names_of_tfds_are_known() -> None:
    assert {"c4", "imagenet2012", "mnist"} <= set(published.builder_names())


@pytest.mark.parametrize(
    "feature",
    [
        {"pythonClassName": "stranger.Feature"},
        {"python_class_name": "stranger.Feature"},
        {"type": "stranger.Feature", "content": {}},
        {
            "pythonClassName": "tensorflow_datasets.core.features.sequence_feature.Sequence",
            "sequence": {"feature": {"pythonClassName": "stranger.Feature"}},
        },
    ],
)
def test_no_module_of_a_data_set_is_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    feature: dict[str, Any],
    load: Any,
) -> None:
    folder = prepare(tmp_path, TEXT, {"train": sentences(0, 5)})
    content = json.loads((folder / "features.json").read_text())
    content["featuresDict"]["features"]["text"] = feature
    write(folder / "features.json", json.dumps(content))
    write(tmp_path / "stranger.py", "raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"features\.json.*stranger\.Feature"):
        load()
    (tmp_path / "mnist").mkdir()
    folder.rename(tmp_path / "mnist/3.0.1")
    assert "features.json" in refusal(f"data prepare mnist --data-dir {tmp_path}")
