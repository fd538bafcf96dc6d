"""Data sets that others publish: TFDS data sets prepared elsewhere, from tiny stand-ins, and the command that prepares them."""

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

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from mupax.__main__ import main
from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data import images
from mupax.train.data.records import builders
from mupax.train.data.sources import published
from mupax.train.data.text import denoising
from mupax.train.data.text.batches import TokenData
from mupax.train.data.text.noise import Infilling
from mupax.zoo import configs
from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from tests.fixtures.calls import calls_of_process

CIFAR = configs.get("bordelon-vit")
LM = configs.get("lm-tiny")
assert isinstance(CIFAR, ViTConfig)
assert isinstance(LM, DecoderConfig)
SHORT = dataclasses.replace(LM, seq_len=7)
VIT = ViTConfig(
    width=6, depth=1, num_heads=1, image_size=12, patch_size=4, channels=3, num_classes=3
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))


def load(
    name: str, folder: Path, model: ModelConfig, notes: list[str] | None = None, **fields
) -> data.Data:
    config = DataConfig(
        name=name, batch_size=fields.pop("batch_size", 6), data_dir=str(folder), **fields
    )
    return data.load(config, model, seed=0, note=(notes if notes is not None else []).append)


# Any prepared TFDS data set


class Tiny(tfds.core.GeneratorBasedBuilder):
    """Text and pictures, as a stranger's data set has them; this class is not needed to read it."""

    VERSION = tfds.core.Version("1.2.3")
    pkg_dir_path = Path(__file__).parent  # pyright: ignore

    def __init__(self, *, features: dict, splits: dict[str, list[dict]], **kwargs) -> None:
        self._features, self._splits = features, splits
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(self._features)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager) -> dict:
        return {name: enumerate(records) for name, records in self._splits.items()}

    def _generate_examples(self):
        raise NotImplementedError


def prepare(folder: Path, features: dict, splits: dict[str, list[dict]], **arguments) -> Path:
    with builders.quiet():
        builder = Tiny(
            features=features,
            splits=splits,
            data_dir=folder,
            file_format="array_record",
            **arguments,
        )
        builder.download_and_prepare(file_format="array_record")
    return Path(builder.data_path)


def sentences(first: int, last: int) -> list[dict]:
    return [{"text": f"sentence number {i}"} for i in range(first, last)]


ODD = os.fsdecode(b"[a]*%#?\\" + b"\xff")
"""Name of a folder that libraries take for a pattern, and that is not UTF-8."""
TEXT = {"text": tfds.features.Text()}


def test_prepared_text_by_name(tmp_path: Path) -> None:
    prepare(tmp_path, TEXT, {"train": sentences(0, 20), "validation": sentences(20, 25)})
    dataset = load("tiny", tmp_path, SHORT)
    assert isinstance(dataset, TokenData)
    assert bytes(dataset._train).decode() == "".join(s["text"] + "\0" for s in sentences(0, 20))
    assert bytes(dataset._eval).decode() == "".join(s["text"] + "\0" for s in sentences(20, 25))
    assert dataset.facts["version"] == "1.2.3"
    assert load("tiny:1.2.3", tmp_path, SHORT).facts["digest"] == dataset.facts["digest"]
    odd = tmp_path / ODD
    shutil.copytree(tmp_path / "tiny", odd / "tiny")
    assert load("tiny", odd, SHORT).facts["digest"] == dataset.facts["digest"]
    config = DataConfig(name="tiny", batch_size=6, data_dir=str(tmp_path))
    noised = denoising.denoising(config, Infilling(), inputs=9, seed=0)
    np.testing.assert_array_equal(
        noised.eval_batch(0)["targets"][:, 1:-1], dataset.eval_batch(0)["inputs"]
    )
    assert "tensorflow" not in sys.modules


def test_without_a_held_out_split_the_end_is_held_out(tmp_path: Path) -> None:
    prepare(tmp_path, TEXT, {"train": sentences(0, 100)})
    dataset = load("tiny", tmp_path, SHORT)
    assert isinstance(dataset, TokenData)
    assert bytes(dataset._eval).decode() == "".join(s["text"] + "\0" for s in sentences(95, 100))
    assert bytes(dataset._train).decode() == "".join(s["text"] + "\0" for s in sentences(0, 95))
    with pytest.raises(
        data.DataError,
        match=r"of which train\[:95%\] is trained on; leave --data\.train-percent out",
    ):
        load("tiny", tmp_path, SHORT, train_percent=50)


def test_the_first_percent_of_the_training_split(tmp_path: Path) -> None:
    prepare(tmp_path, TEXT, {"train": sentences(0, 20), "validation": sentences(20, 25)})
    whole, half = load("tiny", tmp_path, SHORT), load("tiny", tmp_path, SHORT, train_percent=50)
    assert isinstance(half, TokenData)
    assert bytes(half._train).decode() == "".join(s["text"] + "\0" for s in sentences(0, 10))
    assert bytes(half._eval) == bytes(whole._eval)  # pyright: ignore
    again = load("tiny", tmp_path, SHORT)
    assert bytes(again._train) == bytes(whole._train)  # pyright: ignore  # what was packed of a part is not taken for the whole


def test_packed_text_opens_without_tfds(tmp_path: Path) -> None:
    """The second start of a run should not pay for importing what it does not use."""
    prepare(tmp_path, TEXT, {"train": sentences(0, 20), "test": sentences(20, 25)})
    load("tiny", tmp_path, SHORT)
    code = (
        "import sys; from mupax.train import data; from mupax.train.config.run import DataConfig; from mupax.zoo.configs import get\n"
        "import dataclasses\n"
        f"config = DataConfig(name='tiny', batch_size=2, data_dir={str(tmp_path)!r})\n"
        "found = data.load(config, dataclasses.replace(get('lm-tiny'), seq_len=7), seed=0)\n"
        "assert not {'tensorflow_datasets', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}, timeout=60)


def test_importing_data_imports_nothing_heavy() -> None:
    count, modules = calls_of_process("import mupax.train.data")
    assert not modules & {
        "numpy",
        "jax",
        "grain",
        "tensorflow_datasets",
        "tensorflow",
        "tokenizers",
        "PIL",
        "sklearn",
    }
    assert count < 100_000  # 49,000, most of them for the configs that it imports


def pictures(count: int, shape: tuple[int, int, int], as_bytes: bool) -> list[dict]:
    import io

    records = []
    for i in range(count):
        pixels = np.full(shape, 20 * (i % 3 + 1) + i, np.uint8)
        image: object = pixels
        if as_bytes:
            file = io.BytesIO()
            Image.fromarray(pixels if shape[-1] == 3 else pixels[..., 0]).save(file, "png")
            image = file.getvalue()
        records.append({"image": image, "label": i % 3})
    return records


LABEL = tfds.features.ClassLabel(names=["ant", "bee", "cat"])


@pytest.mark.parametrize("kind", ["tensor", "file", "any size"])
def test_prepared_images_by_name(tmp_path: Path, kind: str) -> None:
    shape = {"tensor": (12, 12, 3), "file": (12, 12, 3), "any size": (None, None, 3)}[kind]
    feature = (
        tfds.features.Tensor(shape=shape, dtype=np.uint8)
        if kind == "tensor"
        else tfds.features.Image(shape=shape)
    )
    actual = (19, 31, 3) if kind == "any size" else (12, 12, 3)
    train, test = (pictures(n, actual, as_bytes=kind != "tensor") for n in (18, 6))
    prepare(tmp_path, {"image": feature, "label": LABEL}, {"train": train, "test": test})
    dataset = load("tiny", tmp_path, VIT)
    assert isinstance(dataset, images.ImageData)
    assert dataset.class_names == ["ant", "bee", "cat"]
    (batch,) = dataset.eval_batches()
    assert batch["inputs"].shape == (6, 12, 12, 3)
    values = np.round((batch["inputs"][:, 6, 6, 0] + 1) * 127.5).astype(int)
    assert sorted(values) == sorted(20 * (i % 3 + 1) + i for i in range(6))
    assert all(
        (value - 20) // 20 == label for value, label in zip(values, batch["targets"], strict=True)
    )
    labels = np.concatenate([dataset.train_batch(k)["targets"] for k in range(3)])
    assert np.bincount(labels).tolist() == [6, 6, 6]
    assert "tensorflow" not in sys.modules


def test_images_must_fit(tmp_path: Path) -> None:
    feature = tfds.features.Tensor(shape=(12, 12, 1), dtype=np.uint8)
    records = pictures(6, (12, 12, 1), as_bytes=False)
    prepare(tmp_path, {"image": feature, "label": LABEL}, {"train": records, "test": records})
    with pytest.raises(
        data.DataError, match=r"with 1 channels, .*write --model\.image-size 12 --model\.channels 1"
    ):
        load("tiny", tmp_path, VIT)
    grey = dataclasses.replace(VIT, channels=1)
    assert load("tiny", tmp_path, grey).train_batch(0)["inputs"].shape == (6, 12, 12, 1)
    assert (
        load("tiny", tmp_path, dataclasses.replace(grey, image_size=8))
        .train_batch(0)["inputs"]
        .shape[1]
        == 8
    )
    with pytest.raises(data.DataError, match=r"write --model\.image-size 12"):
        load("tiny", tmp_path, dataclasses.replace(grey, image_size=16))
    with pytest.raises(data.DataError, match=r"write --model\.num-classes 3"):
        load("tiny", tmp_path, dataclasses.replace(grey, num_classes=5))
    with pytest.raises(
        data.DataError, match="has no feature 'text', only image, label; is it the right kind"
    ):
        load("tiny", tmp_path, SHORT)


def test_configurations_and_versions(tmp_path: Path) -> None:
    for name in ("large", "small"):
        config = tfds.core.BuilderConfig(name=name)
        prepare(
            tmp_path, TEXT, {"train": sentences(0, 20), "test": sentences(20, 25)}, config=config
        )
    assert load("tiny/small", tmp_path, SHORT).train_size > 0
    with pytest.raises(
        data.DataError, match=r"several configurations; write data\.name as tiny/large"
    ):
        load("tiny", tmp_path, SHORT)
    with pytest.raises(data.DataError, match=r"has no version 9\.9\.9, only 1\.2\.3"):
        load("tiny/small:9.9.9", tmp_path, SHORT)


def test_damaged_data_sets_are_named(tmp_path: Path) -> None:
    folder = prepare(tmp_path, TEXT, {"train": sentences(0, 20), "test": sentences(20, 25)})
    info = folder / "dataset_info.json"
    whole = info.read_text()
    shard = next(folder.glob("*train*array_record*"))
    shard.rename(tmp_path / "moved")
    with pytest.raises(
        data.DataError, match=r"is damaged: .*tiny-train\.array_record.*Delete that folder"
    ):
        load("tiny", tmp_path, SHORT)
    info.write_text(json.dumps({**json.loads(whole), "fileFormat": "tfrecord"}))
    with pytest.raises(
        data.DataError, match=r"is in tfrecord, which only TensorFlow reads.*convert_format"
    ):
        load("tiny", tmp_path, SHORT)
    info.write_text(whole[:40])
    with pytest.raises(
        data.DataError, match=r"no whole dataset_info\.json.*again \(mupax data prepare tiny\)"
    ):
        load("tiny", tmp_path, SHORT)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "c4",
            r"c4 is not prepared in .*write --data.name hf:allenai/c4:en, .*`mupax data prepare c4 --data-dir",
        ),
        ("imagenet2012", r"run `mupax data prepare imagenet2012"),
        ("cifar10", "is not prepared in"),
        ("cifar5", "no data is named 'cifar5'; did you mean .*cifar5m"),
        ("python_corpsu", "did you mean python_corpus"),
        ("imagenet2013", "did you mean .*imagenet2012"),
        ("qqqqqq", "write one of python_corpus, digits, shapes, cifar5m"),
        ("../../etc", "no data is named"),
        ("test:/tmp/x", "no data is named 'test:/tmp/x'"),
    ],
)
def test_missing_data_is_said_at_once(
    tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where ../../etc is no folder
    with pytest.raises(data.DataError, match=message) as error:
        load(name, tmp_path, SHORT)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("damage", ["cut", "flipped", "removed"])
def test_damaged_records_are_noticed(tmp_path: Path, damage: str) -> None:
    main(["data", "prepare", "digits", "--data-dir", str(tmp_path)])
    (shard,) = tmp_path.glob("digits/*/*array_record*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    if damage == "removed":
        shard.unlink()
    else:
        shard.write_bytes(content if damage == "flipped" else content[:-5000])
    with pytest.raises(
        data.DataError,
        match=rf"{tmp_path}/digits/1\.0\.0 is damaged: .*Delete that folder and prepare",
    ):
        load("digits", tmp_path, configs.get("vit-tiny"))


# The command


def test_command_prepares_what_a_run_then_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", "digits", "--data-dir", str(tmp_path)]) == 0
    assert "digits is prepared in" in capsys.readouterr().out
    notes: list[str] = []
    load("digits", tmp_path, configs.get("vit-tiny"), notes)
    assert notes == []


def test_a_prepared_data_set_is_suggested_once(tmp_path: Path) -> None:
    (tmp_path / "python_corpus").mkdir()
    with pytest.raises(data.DataError, match=r"; did you mean python_corpus\?"):
        load("python_corpsu", tmp_path, LM)


def test_command_on_unknown_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", "cifar100000", "--data-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "did you mean" in error
    assert "cifar100" in error
    assert main(["data", "frepare", "digits"]) == 2
    assert "did you mean prepare?" in capsys.readouterr().err


def test_command_reports_what_tfds_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments, **keywords):
        raise AssertionError(
            "Manual directory does not exist or is empty.\nPut ILSVRC2012_img_train.tar there."
        )

    monkeypatch.setattr(tfds, "builder", refuse)
    assert main(["data", "prepare", "imagenet2012", "--data-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "Put ILSVRC2012_img_train.tar there." in error
    assert len(error.splitlines()) <= 10


def test_command_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*arguments, **keywords):
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    assert main(["data", "prepare", "mnist", "--data-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "storage.googleapis.com cannot be reached: Name or service not known" in error
    assert "Run this where there is a network" in error


def test_names_of_tfds_are_known() -> None:
    assert {"c4", "imagenet2012", "mnist"} <= set(published.builder_names())


CLASS = "tensorflow_datasets.core.features."


@pytest.mark.parametrize(
    "feature",
    [
        {"pythonClassName": "stranger.Feature"},
        {"python_class_name": "stranger.Feature"},
        {"type": "stranger.Feature", "content": {}},
        {
            "pythonClassName": f"{CLASS}sequence_feature.Sequence",
            "sequence": {"feature": {"pythonClassName": "stranger.Feature"}},
        },
    ],
)
@pytest.mark.parametrize("command", ["run", "prepare"])
def test_no_module_of_a_data_set_is_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    feature: dict,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = prepare(tmp_path, TEXT, {"train": sentences(0, 5)})
    content = json.loads((folder / "features.json").read_text())
    content["featuresDict"]["features"]["text"] = feature
    (folder / "features.json").write_text(json.dumps(content))
    (tmp_path / "stranger.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    if command == "run":
        with pytest.raises(data.DataError, match=r"features\.json.*stranger\.Feature"):
            load("tiny", tmp_path, SHORT)
        return
    (tmp_path / "mnist").mkdir()
    folder.rename(tmp_path / "mnist" / "3.0.1")
    assert main(["data", "prepare", "mnist", "--data-dir", str(tmp_path)]) == 2
    assert "features.json" in capsys.readouterr().err
