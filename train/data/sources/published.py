"""Data sets that others publish: whatever TFDS has prepared in array_record, by name. What is missing is said at once.

A prepared data set is looked for as a folder, DATA_DIR/NAME[/CONFIG]/VERSION; no registry and no network is asked.
"""

from __future__ import annotations

import difflib
import io
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grain
import numpy as np

from mupax.disk import is_remote, path_of
from mupax.train.config.data import DEFAULT_LIMITS, SOURCES, ImageSizes, LimitsConfig
from mupax.train.data import cache, crops, images
from mupax.train.data.interface import Data, DataError
from mupax.train.data.records import contents
from mupax.train.data.sources import folders, text
from mupax.train.data.text import packing
from mupax.zoo.families import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

CONFIGS = {"c4": "c4/en"}
"""The configuration meant where a data set has several and none is named."""
STREAMED = {"c4": "hf:allenai/c4:en"}
"""What is better read from the hub, where TFDS would make it from hundreds of terabytes of a crawl."""
_NOT_LISTED = ("c4",)  # TFDS has it, in a module that its list leaves out
_VERSION = re.compile(r"\d+\.\d+\.\d+")


class DataSet(NamedTuple):
    """A prepared data set: its folder, the digest of its description, and the splits to train and to evaluate on."""

    folder: Path
    digest: str
    splits: dict[str, str]


def labelled(
    sources: Sequence[Sequence],
    image: str,
    label: str,
    channels: int,
    background: str = "white",
    limits: LimitsConfig = DEFAULT_LIMITS,
) -> images.Images:
    """Labelled images of TFDS data sources, one after the other.

    Args:
        sources: each a random-access source of records.
        image: name of the image's feature: bytes of an image file, or pixels.
        label: name of the label's feature.
        channels: channels to decode image files to.
        background: of transparent pixels in image files, as `data.pixels.background` names it.
        limits: bounds on image files.
    """

    def read(i: int, record: dict[str, Any]) -> tuple[np.ndarray, int]:
        pixels = record[image]
        if isinstance(pixels, bytes):
            pixels = folders.decoded(
                io.BytesIO(pixels), channels, f"{i} of the data set", background, limits=limits
            )
        return pixels, int(record[label])

    records: Any = grain.MapDataset.concatenate(
        [grain.MapDataset.source(source) for source in sources]
    )
    return records.map_with_index(read)


def tfds_data(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Data:
    """A prepared TFDS data set by name, as batches: text for a decoder, labelled images for a vision transformer.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is one that `find` finds.
    """
    data_set = prepared(config, note)
    if model.task == "tokens":
        return _text(data_set, config, model, seed, note)
    return _images(data_set, config, model, seed)


def prepared(config: DataConfig, note: cache.Note) -> DataSet:
    """Return the data set that a config names, with the part of its training split that the config asks for.

    Args:
        config, note: as `tfds_data` takes them.
    """
    data_set = find(config.name, config.data_dir)
    data_set = data_set._replace(folder=cache.fetched(data_set.folder, note))
    return _first_percent(data_set, config) if config.train_percent < 100 else data_set


def _first_percent(data_set: DataSet, config: DataConfig) -> DataSet:
    """The data set with the first percent of its training split, as TFDS rounds them."""
    train = data_set.splits["train"]
    if "[" in train:
        raise DataError(
            f"{data_set.folder} has no split but train, of which {train} is trained on; leave --data.train-percent out"
        )
    return data_set._replace(
        splits=data_set.splits | {"train": f"{train}[:{config.train_percent}%]"}
    )


def _text(
    data_set: DataSet, config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> Data:
    key, documents = text_documents(data_set, config, note)
    return text.open_text(
        config, model, seed, note, key, documents, {"version": data_set.folder.name}
    )


def text_documents(
    data_set: DataSet, config: DataConfig, note: cache.Note
) -> tuple[str, Callable[[], packing.Documents]]:
    """Return the key and the documents of a data set of text.

    Args:
        data_set: as `prepared` gives it.
        note: told if much is read to see whether the records have changed.
    """
    content = contents.digest(
        sorted(file for file in data_set.folder.iterdir() if file.is_file()), note
    )

    def documents() -> packing.Documents:
        import tensorflow_datasets as tfds

        from mupax.train.data.records import builders

        with cache.whole(data_set.folder, config.name):
            builder = builders.from_folder(data_set.folder)
            feature = _feature(builder, data_set, (tfds.features.Text,), "text")
        return {
            side: text.records(builders.Source(builder, split), feature)
            for side, split in data_set.splits.items()
        }

    part = "" if config.train_percent == 100 else f"-{config.train_percent}"
    name = config.name.replace("/", "-").replace(":", "-")
    return f"{name}-{content}{part}", documents


def _images(data_set: DataSet, config: DataConfig, model: ModelConfig, seed: int) -> Data:
    import tensorflow_datasets as tfds

    from mupax.train.data.records import builders

    with cache.whole(data_set.folder, config.name):
        builder = builders.from_folder(data_set.folder)
        image = _feature(builder, data_set, (tfds.features.Image, tfds.features.Tensor), "image")
        label = _feature(builder, data_set, (tfds.features.ClassLabel,), "label")
        features: Any = builder.info.features
        names, (height, width, channels) = features[label].names, features[image].shape  # None: any
    vision = images.vision_model(config.name, model, names)
    size = vision.image_size
    if channels is None:
        folders.check_channels(config.name, vision.channels)
    # Images of any size, or of one larger than the model's, are cropped; smaller ones are not blown up.
    small = None not in (height, width) and min(height, width) <= size
    images.check_size(config.name, vision, height if small else size, channels or vision.channels)
    if (height, width) == (size, size):
        views, pixels = (
            (images.jitter if channels == 1 else images.shift_and_flip, images.as_is),
            images.WHOLE,
        )
    else:
        pixels = config.pixels.resolved(size)
        pixels.check(size, vision.channels)
        views = (crops.training(config, size), crops.fitted(pixels, size))
    # Image files stay bytes, for PIL to decode: TFDS would want OpenCV or TensorFlow.
    skip: Any = (
        {image: tfds.decode.SkipDecoding()}
        if isinstance(features[image], tfds.features.Image)
        else None
    )
    train, eval_ = (
        labelled(
            [builders.Source(builder, data_set.splits[side], skip)],
            image,
            label,
            vision.channels,
            pixels.background,
            config.limits,
        )
        for side in ("train", "eval")
    )
    return images.ImageData(
        config,
        train,
        eval_,
        views=views,
        seed=seed,
        threads=folders.decoding_threads(),
        class_names=names,
        pixels=pixels,
        facts={"digest": data_set.digest},
    )


def sizes(config: DataConfig) -> ImageSizes | None:
    """Return the sizes of a model for a prepared TFDS data set of images; `None` for text, or where it is not prepared.

    Args:
        config: whose name is one that `find` finds.
    """
    base = path_of(config.data_dir) if config.data_dir else cache.data_sets(None)
    name = config.name.partition(":")[0]
    # Looked for first: to say which data sets there are takes seconds. What is in a bucket is fetched by the run.
    if is_remote(base) or not any(
        _versions(base / folder) for folder in (name, CONFIGS.get(name, name))
    ):
        return None
    try:
        data_set = find(config.name, config.data_dir)
    except DataError:  # the run says it
        return None
    import tensorflow_datasets as tfds

    from mupax.train.data.records import builders

    try:
        with cache.whole(data_set.folder, config.name):
            features: Any = builders.from_folder(data_set.folder).info.features
    except DataError:  # the run says it
        return None
    kinds = (tfds.features.Image, tfds.features.Tensor)
    pictures: list[Any] = [
        feature
        for feature in features.values()
        if type(feature) in kinds and len(feature.shape) == 3
    ]
    labels: list[Any] = [
        feature for feature in features.values() if isinstance(feature, tfds.features.ClassLabel)
    ]
    if len(pictures) != 1 or len(labels) != 1:
        return None
    height, width, channels = pictures[0].shape
    # Images of any size are scaled to whatever the model has.
    side = height if height == width else None
    return ImageSizes(labels[0].num_classes, channels, side, scaled=side is None)


def _feature(builder: Any, data_set: DataSet, kinds: tuple[type, ...], usual: str) -> str:
    """The feature of the usual name, or else the only one of these kinds."""
    features = builder.info.features
    matching = [name for name, feature in features.items() if type(feature) in kinds]
    if usual == "image":
        matching = [name for name in matching if len(features[name].shape) == 3]
    if usual in matching:
        return usual
    if len(matching) == 1:
        return matching[0]
    raise DataError(
        f"{data_set.folder} has no feature {usual!r}, only {', '.join(sorted(features))}; is it the right kind of data?"
    )


def find(name: str, data_dir: str | None) -> DataSet:
    """The prepared TFDS data set of a name, in data.data_dir or the cache.

    Args:
        name: NAME[/CONFIG][:VERSION], such as c4, c4/en or mnist:3.0.1; the newest version unless it names one.
        data_dir: data.data_dir, here or in a bucket; None is the folder of data sets in the cache.

    Raises:
        DataError: it is not there, or not in array_record; the text has the command that prepares it.
    """
    base = path_of(data_dir) if data_dir else cache.data_sets(None)
    dataset, _, version = name.partition(":")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.+-]*)?", dataset):
        raise DataError(unknown(name, base))
    folder = base / dataset
    if not _versions(folder) and dataset in CONFIGS:
        folder = base / CONFIGS[dataset]
    versions = _versions(folder)
    if not versions:
        configs = (
            sorted(sub.name for sub in folder.iterdir() if _versions(sub))
            if folder.is_dir()
            else []
        )
        if configs:
            raise DataError(
                f"{folder} has several configurations; write data.name as {dataset}/{configs[0]}"
            )
        if dataset.split("/")[0] not in builder_names():
            raise DataError(unknown(name, base))
        where = f" --data-dir {shlex.quote(data_dir)}" if data_dir and not is_remote(base) else ""
        command = f"mupax data prepare {name}{where}"
        if kind := STREAMED.get(dataset.partition("/")[0]):
            raise DataError(
                f"{name} is not prepared in {base}; write --data.name {kind}, which streams it, or records:FOLDER of its files; to prepare "
                f"it from the crawl by Apache Beam, `{command}`"
            )
        raise DataError(f"{name} is not prepared in {base}; run `{command}`, or set data.data_dir")
    if version and version not in versions:
        raise DataError(f"{folder} has no version {version}, only {', '.join(versions)}")
    return _described(folder / (version or versions[-1]), dataset)


def _described(folder: Path, dataset: str) -> DataSet:
    content = cache.read_json(folder / "dataset_info.json")
    listed, alternatives = (
        (content or {}).get(name, []) for name in ("splits", "alternativeFileFormats")
    )
    if not isinstance(listed, list) or not isinstance(alternatives, list):
        content = None
    splits = [split.get("name") for split in listed if isinstance(split, dict)] if content else []
    if content is None or not (folder / "features.json").exists():
        raise DataError(
            f"{folder} has no whole dataset_info.json and features.json. {cache.prepare_again(dataset)}"
        )
    formats = [content.get("fileFormat"), *alternatives]
    if "array_record" not in formats:
        raise DataError(
            f"{folder} is in {formats[0] or 'tfrecord'}, which only TensorFlow reads; prepare it with "
            "file_format='array_record', or convert it: "
            f"python -m tensorflow_datasets.scripts.convert_format --dataset_dir={folder} --out_file_format=array_record"
        )
    if "train" not in splits:
        raise DataError(f"{folder} has no split train, only {', '.join(map(str, splits))}")
    digest = cache.digest(
        (folder / "dataset_info.json").read_bytes(), (folder / "features.json").read_bytes()
    )
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    train, eval_ = ("train", held_out) if held_out else ("train[:95%]", "train[95%:]")
    return DataSet(folder, digest, {"train": train, "eval": eval_})


def _versions(folder: Path) -> list[str]:
    """Versions prepared in a folder, oldest first."""
    names = [
        file.parent.name
        for file in folder.glob("*/dataset_info.json")
        if _VERSION.fullmatch(file.parent.name)
    ]
    return sorted(names, key=lambda version: tuple(map(int, version.split("."))))


def unknown(name: str, base: Path) -> str:
    """What to say of a name that is no data set's: how a path is written, the nearest names, or what kinds there are.

    Args:
        name: as the user wrote it.
        base: folder of data sets, whose names may be near too.
    """
    if (path := Path(name)).exists():
        kinds = (
            "text:{0}, records:{0} or images:{0}" if path.is_dir() else "text:{0} or records:{0}"
        )
        return f"{name} is a {'folder' if path.is_dir() else 'file'} here, and not how data are named; write {kinds.format(name)}"
    names = [*SOURCES, *builder_names(), *(sub.name for sub in base.glob("*") if sub.is_dir())]
    near = difflib.get_close_matches(
        name, list(dict.fromkeys(names)), n=3
    )  # a prepared one is there twice
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"write one of {', '.join(SOURCES)} or a TFDS name"
    )
    return f"no data is named {name!r}; {hint}, or add --plugin MODULE for a data set of your own"


def builder_names() -> list[str]:
    """Names of the data sets that TFDS can prepare."""
    import tensorflow_datasets as tfds

    return [*tfds.list_builders(with_community_datasets=False), *_NOT_LISTED]
