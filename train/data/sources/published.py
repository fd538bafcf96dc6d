"""Loader of published data sets by name, from folders that TFDS has prepared in array_record.

A prepared data set is found as a folder, DATA_DIR/NAME[/CONFIG]/VERSION, without a registry or the
network. If it is not there, the error says how to prepare it.
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
"""TFDS configuration that is used for a data set's name alone, if the data set has several."""
STREAMED = {"c4": "hf:allenai/c4:en"}
"""Value of data.name that streams the data set from the Hugging Face hub.

Messages suggest it, because TFDS would make the data set from terabytes of a crawl.
"""
# TFDS has these data sets in a module that its list leaves out.
_NOT_LISTED = ("c4",)
_VERSION = re.compile(r"\d+\.\d+\.\d+")


class DataSet(NamedTuple):
    """Data set that TFDS has prepared, in the folder of one version."""

    folder: Path
    digest: str
    """Digest of the description: dataset_info.json and features.json."""
    splits: dict[str, str]
    """TFDS split for each of the keys `train` and `eval`, such as "validation" or "train[95%:]"."""


def labelled(
    sources: Sequence[Sequence],
    image: str,
    label: str,
    channels: int,
    background: str = "white",
    limits: LimitsConfig = DEFAULT_LIMITS,
) -> images.Images:
    """Return the labelled images of TFDS data sources as one sequence, one source after the other.

    An image is read and decoded each time that it is indexed. A feature that has pixels instead of
    an image file is returned unchanged, and `channels`, `background` and `limits` do not apply.
    Indexing raises `DataError` for an image file that is damaged or too large.

    Args:
        sources: Data sources, each with records by index. A record is a dict of features.
        image: Name of the image's feature: bytes of an image file, or pixels.
        label: Name of the label's feature, a whole number.
        channels: Channels of decoded image files, 1 for grey or 3 for colour.
        background: Colour behind transparent pixels, as `data.pixels.background` names it. The
            default is white.
        limits: Bounds on the number of pixels of an image file.
    """

    def read(i: int, record: dict[str, Any]) -> tuple[np.ndarray, int]:
        pixels = record[image]
        if isinstance(pixels, bytes):
            name = f"{i} of the data set"
            pixels = folders.decoded(io.BytesIO(pixels), channels, name, background, limits=limits)
        return pixels, int(record[label])

    datasets = [grain.MapDataset.source(source) for source in sources]
    records: Any = grain.MapDataset.concatenate(datasets)
    return records.map_with_index(read)


def tfds_data(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Data:
    """Load a prepared TFDS data set: text for a decoder, or labelled images for a vision model.

    The arguments are those of `mupax.train.data.load`. `config.name` is a name that `find` takes.
    """
    data_set = prepared(config, note)
    if model.task == "tokens":
        return _text(data_set, config, model, seed, note)
    return _images(data_set, config, model, seed)


def prepared(config: DataConfig, note: cache.Note) -> DataSet:
    """Find the data set that a config names, and limit its training split to data.train_percent.

    A data set in a bucket is copied to this machine first. The arguments are those of
    `mupax.train.data.load`.

    Raises:
        DataError: The data set is not prepared. Or data.train_percent is below 100, and the data
            set has only the split train, from which the evaluation records are taken.
    """
    data_set = find(config.name, config.data_dir)
    data_set = data_set._replace(folder=cache.fetched(data_set.folder, note))
    if config.train_percent == 100:
        return data_set
    return _first_percent(data_set, config)


def _first_percent(data_set: DataSet, config: DataConfig) -> DataSet:
    """Return the data set with only the first `train_percent` percent of its training split.

    The number of records is rounded as TFDS does.

    Raises:
        DataError: The data set has only the split train, from which the evaluation records are
            taken.
    """
    train = data_set.splits["train"]
    if "[" in train:
        raise DataError(
            f"--data.train-percent needs a data set with a split to evaluate on, and "
            f"{data_set.folder} has only train, of which {train} is used for training; leave "
            "--data.train-percent out"
        )
    first = f"{train}[:{config.train_percent}%]"
    return data_set._replace(splits=data_set.splits | {"train": first})


def _text(
    data_set: DataSet, config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> Data:
    """Return a data set of text as batches. Tokenize and pack it if it is not in the cache."""
    key, documents = text_documents(data_set, config, note)
    facts = {"version": data_set.folder.name}
    return text.open_text(config, model, seed, note, key, documents, facts)


def text_documents(
    data_set: DataSet, config: DataConfig, note: cache.Note
) -> tuple[str, Callable[[], packing.Documents]]:
    """Return the cache key of a data set of text, and a function that returns its documents.

    The function returns a sequence of documents for each of the keys "train" and "eval"
    (`packing.Documents`). A document is read when it is indexed.

    Args:
        config: Data settings that name the data set.
        note: Function that takes one line of text if much must be read to see whether records
            changed.
    """
    files = sorted(file for file in data_set.folder.iterdir() if file.is_file())
    content = contents.digest(files, note)

    def documents() -> packing.Documents:
        import tensorflow_datasets as tfds

        from mupax.train.data.records import builders

        with cache.whole(data_set.folder, config.name):
            builder = builders.from_folder(data_set.folder)
            feature = _feature(builder, data_set, (tfds.features.Text,), "text")
        sides = {}
        for side, split in data_set.splits.items():
            sides[side] = text.records(builders.Source(builder, split), feature)
        return sides

    # Without a suffix at 100 %, so that the cache of a complete data set keeps its name.
    part = "" if config.train_percent == 100 else f"-{config.train_percent}"
    name = config.name.replace("/", "-").replace(":", "-")
    return f"{name}-{content}{part}", documents


def _images(data_set: DataSet, config: DataConfig, model: ModelConfig, seed: int) -> Data:
    """Return a data set of labelled images as batches.

    Images of the model's size are augmented by `images.jitter` (grey) or `images.shift_and_flip`
    (colour). Larger images, and images of several sizes, are cropped and scaled.

    Raises:
        DataError: The data set is damaged, has no image or label feature, or does not fit the
            model.
        ConfigError: `config.pixels` does not fit the size or the channels of the model's images.
    """
    import tensorflow_datasets as tfds

    from mupax.train.data.records import builders

    with cache.whole(data_set.folder, config.name):
        builder = builders.from_folder(data_set.folder)
        image = _feature(builder, data_set, (tfds.features.Image, tfds.features.Tensor), "image")
        label = _feature(builder, data_set, (tfds.features.ClassLabel,), "label")
        features: Any = builder.info.features
        names = features[label].names
        # A size that is None may differ between images.
        height, width, channels = features[image].shape
    vision = images.vision_model(config.name, model, names)
    size = vision.image_size
    if channels is None:
        folders.check_channels(config.name, vision.channels)
    # Images of any size, or of one larger than the model's, are cropped. Smaller ones are refused,
    # because they would be scaled up.
    is_small = None not in (height, width) and min(height, width) <= size
    images.check_size(
        config.name, vision, height if is_small else size, channels or vision.channels
    )
    if (height, width) == (size, size):
        train_view = images.jitter if channels == 1 else images.shift_and_flip
        views = (train_view, images.as_is)
        pixels = images.WHOLE
    else:
        pixels = config.pixels.resolved(size)
        pixels.check(size, vision.channels)
        views = (crops.training(config, size), crops.fitted(pixels, size))
    # Image files stay bytes and are decoded here by PIL. TFDS would use OpenCV if it is installed,
    # and would apply neither `limits` nor the background.
    skip: Any = None
    if isinstance(features[image], tfds.features.Image):
        skip = {image: tfds.decode.SkipDecoding()}

    def side_images(side: str) -> images.Images:
        source = builders.Source(builder, data_set.splits[side], skip)
        return labelled([source], image, label, vision.channels, pixels.background, config.limits)

    return images.ImageData(
        config,
        side_images("train"),
        side_images("eval"),
        views=views,
        seed=seed,
        threads=folders.decoding_threads(),
        class_names=names,
        pixels=pixels,
        facts={"digest": data_set.digest},
    )


def sizes(config: DataConfig) -> ImageSizes | None:
    """Return the number of classes, the channels and the image size of a prepared TFDS data set.

    They are the defaults of a model for this data. The result is None if the data set is not
    prepared, is damaged, or is in a bucket. It is also None for text, and for any data set that
    does not have exactly one image feature and one label feature.

    Args:
        config: Data settings. `config.name` is a name that `find` takes.
    """
    base = path_of(config.data_dir) if config.data_dir else cache.data_sets(None)
    # Data in a bucket are fetched only when the run loads them.
    if is_remote(base):
        return None
    # Looked for before `find` is called: its error lists the data sets of TFDS, which takes
    # seconds.
    if not _versions(_versions_folder(config.name.partition(":")[0], base)):
        return None
    try:
        data_set = find(config.name, config.data_dir)
    except DataError:
        # The run raises this error when it loads the data.
        return None
    import tensorflow_datasets as tfds

    from mupax.train.data.records import builders

    try:
        with cache.whole(data_set.folder, config.name):
            features: Any = builders.from_folder(data_set.folder).info.features
    except DataError:
        return None
    image_features: list[Any] = []
    labels: list[Any] = []
    for feature in features.values():
        is_array = type(feature) in (tfds.features.Image, tfds.features.Tensor)
        if is_array and len(feature.shape) == 3:
            image_features.append(feature)
        elif isinstance(feature, tfds.features.ClassLabel):
            labels.append(feature)
    if len(image_features) != 1 or len(labels) != 1:
        return None

    height, width, channels = image_features[0].shape
    # Without one square size, images are scaled to the size of the model.
    side = height if height == width else None
    return ImageSizes(labels[0].num_classes, channels, side, scaled=side is None)


def _feature(builder: Any, data_set: DataSet, kinds: tuple[type, ...], usual: str) -> str:
    """Find the feature of a data set that has the text, the image or the label. Return its name.

    It is the feature of the given kinds that has the usual name, or else the only one of the kinds.

    Args:
        kinds: Feature classes of TFDS. A feature of a subclass does not count.
        usual: Name to prefer. With "image", only features of three axes count.

    Raises:
        DataError: None of these features has the usual name, and there is not exactly one.
    """
    features = builder.info.features
    matching = [name for name, feature in features.items() if type(feature) in kinds]
    if usual == "image":
        matching = [name for name in matching if len(features[name].shape) == 3]
    if usual in matching:
        return usual
    if len(matching) == 1:
        return matching[0]
    raise DataError(
        f"{data_set.folder} has no feature {usual!r}, only {', '.join(sorted(features))}; is it the "
        "right kind of data?"
    )


def find(name: str, data_dir: str | None) -> DataSet:
    """Find a prepared TFDS data set by its name.

    Args:
        name: NAME[/CONFIG][:VERSION], such as c4, c4/en or mnist:3.0.1. The default is the newest
            version.
        data_dir: Value of data.data_dir, on this machine or in a bucket. None is the folder in the
            cache.

    Raises:
        DataError: The data set is not there, or not in array_record. The message has the command
            that prepares it.
    """
    base = path_of(data_dir) if data_dir else cache.data_sets(None)
    dataset, _, version = name.partition(":")
    # The name becomes a path, so it must not climb out of the folder of data sets.
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.+-]*)?", dataset):
        raise DataError(unknown(name, base))

    folder = _versions_folder(dataset, base)
    versions = _versions(folder)
    if not versions:
        raise DataError(_not_prepared(name, dataset, folder, base, data_dir))
    if version and version not in versions:
        raise DataError(f"{folder} has no version {version}, only {', '.join(versions)}")
    return _described(folder / (version or versions[-1]), dataset)


def _not_prepared(name: str, dataset: str, folder: Path, base: Path, data_dir: str | None) -> str:
    """Return the error message for a data set without a prepared version.

    The message says how to name a configuration, or which command prepares the data set.

    Args:
        name: Value of data.name, perhaps with a version.
        dataset: Part of `name` before the version, NAME[/CONFIG].
        folder: Folder in which the versions would be.
        base: Folder of all prepared data sets, which the message names.
        data_dir: Value of data.data_dir, which the command repeats. None is left out.
    """
    configs: list[str] = []
    if folder.is_dir():
        versioned = []
        for sub in folder.iterdir():
            if _versions(sub):
                versioned.append(sub.name)
        configs = sorted(versioned)
    if configs:
        return f"{folder} has several configurations; write data.name as {dataset}/{configs[0]}"
    if dataset.split("/")[0] not in builder_names():
        return unknown(name, base)

    command = f"mupax data prepare {name}"
    if data_dir and not is_remote(base):
        command += f" --data-dir {shlex.quote(data_dir)}"
    streamed = STREAMED.get(dataset.partition("/")[0])
    if streamed:
        return (
            f"{name} is not prepared in {base}; write --data.name {streamed}, which streams it, or "
            "records:FOLDER of its files; to prepare it from the crawl by Apache Beam, "
            f"`{command}`"
        )
    return f"{name} is not prepared in {base}; run `{command}`, or set data.data_dir"


def _described(folder: Path, dataset: str) -> DataSet:
    """Return the data set in the folder of a version, with its splits and digest.

    The evaluation split is `validation`. Without it, it is `test`, and without both the last 5 % of
    `train`.

    Args:
        folder: Folder of the version, DATA_DIR/NAME[/CONFIG]/VERSION.
        dataset: Name of the data set, NAME[/CONFIG], for messages.

    Raises:
        DataError: Its files are damaged or not in array_record, or there is no split `train`.
    """
    content = cache.read_json(folder / "dataset_info.json")
    fields = content or {}
    listed = fields.get("splits", [])
    other_formats = fields.get("alternativeFileFormats", [])
    has_lists = isinstance(listed, list) and isinstance(other_formats, list)
    if content is None or not has_lists or not (folder / "features.json").exists():
        raise DataError(
            f"{folder} has no whole dataset_info.json and features.json. "
            f"{cache.prepare_again(dataset)}"
        )

    formats = [content.get("fileFormat"), *other_formats]
    if "array_record" not in formats:
        raise DataError(
            f"{folder} is in {formats[0] or 'tfrecord'}, which only TensorFlow reads; prepare it with "
            "file_format='array_record', or convert it: "
            "python -m tensorflow_datasets.scripts.convert_format "
            f"--dataset_dir={folder} --out_file_format=array_record"
        )
    splits = []
    for split in listed:
        if isinstance(split, dict):
            splits.append(split.get("name"))
    if "train" not in splits:
        raise DataError(f"{folder} has no split train, only {', '.join(map(str, splits))}")

    description = (folder / "dataset_info.json").read_bytes()
    features = (folder / "features.json").read_bytes()
    digest = cache.digest(description, features)
    for held_out in ("validation", "test"):
        if held_out in splits:
            return DataSet(folder, digest, {"train": "train", "eval": held_out})
    # Without a split to evaluate on, the last 5 % of the split train are held out.
    return DataSet(folder, digest, {"train": "train[:95%]", "eval": "train[95%:]"})


def _versions_folder(dataset: str, base: Path) -> Path:
    """Return the folder that has, or would have, the versions of a data set.

    Args:
        dataset: NAME[/CONFIG]. A name without versions of its own may have a configuration in
            `CONFIGS`, whose folder is then returned.
        base: Folder in which every prepared data set has one of its own, `NAME/CONFIG/VERSION` or
            `NAME/VERSION`.
    """
    folder = base / dataset
    if not _versions(folder) and dataset in CONFIGS:
        return base / CONFIGS[dataset]
    return folder


def _versions(folder: Path) -> list[str]:
    """Return the versions that are prepared in a folder, oldest first."""
    names = [file.parent.name for file in folder.glob("*/dataset_info.json")]
    versions = [name for name in names if _VERSION.fullmatch(name)]
    # As numbers, because "10.0.0" sorts before "3.0.1" as text.
    return sorted(versions, key=lambda version: tuple(map(int, version.split("."))))


def unknown(name: str, base: Path) -> str:
    """Return the error message for a data.name that no data set has.

    The message says how to write the name of a file or folder, or suggests similar names, or lists
    the kinds of data.

    Args:
        name: Value of data.name that no data set has.
        base: Folder of prepared data sets, whose names may be suggested, too.
    """
    path = Path(name)
    if path.is_dir():
        return (
            f"{name} is a folder here, and not how data are named; "
            f"write text:{name}, records:{name} or images:{name}"
        )
    if path.exists():
        return (
            f"{name} is a file here, and not how data are named; "
            f"write text:{name} or records:{name}"
        )

    names = [*SOURCES, *builder_names(), *(sub.name for sub in base.glob("*") if sub.is_dir())]
    # A prepared data set of TFDS is in two of these lists. A dict removes the second.
    unique_names = list(dict.fromkeys(names))
    near = difflib.get_close_matches(name, unique_names, n=3)
    if near:
        hint = f"did you mean {', '.join(near)}?"
    else:
        hint = f"write one of {', '.join(SOURCES)} or a TFDS name"
    return f"no data is named {name!r}; {hint}, or add --plugin MODULE for a data set of your own"


def builder_names() -> list[str]:
    """Return the names of the data sets that TFDS can prepare."""
    import tensorflow_datasets as tfds

    return [*tfds.list_builders(with_community_datasets=False), *_NOT_LISTED]
