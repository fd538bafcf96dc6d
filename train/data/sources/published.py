"""Opens data sets that others publish: CIFAR-5M from its npz files, and whatever TFDS has prepared, by name."""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mupax.train.data import cache
from mupax.train.data.images import augment, batches
from mupax.train.data.interface import Data, DataError
from mupax.train.data.records import cifar5m as npz
from mupax.train.data.records import tfds as prepared
from mupax.train.data.sources import folders, text
from mupax.zoo.families import ModelConfig

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.config.run import DataConfig


class Records:
    """Labelled images of TFDS data sources, one after the other.

    Args:
        sources: each a random-access source of records.
        image: name of the image's feature: bytes of an image file, or pixels.
        label: name of the label's feature.
        channels: channels to decode image files to.
    """

    def __init__(self, sources: Sequence[Sequence], image: str, label: str, channels: int) -> None:
        self._sources, self._image, self._label, self._channels = sources, image, label, channels
        self._ends = list(itertools.accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        which = bisect.bisect_right(self._ends, i)
        record = self._sources[which][i - (self._ends[which - 1] if which else 0)]
        image, label = record[self._image], int(record[self._label])
        if isinstance(image, bytes):
            image = folders.decoded(io.BytesIO(image), self._channels, f"{i} of the data set")
        return image, label


def cifar5m(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> batches.ImageData:
    """CIFAR-5M: parts 0 to 4 to train on, part 5 to test on.

    Each part is prepared from `partN.npz` in the data folder, one at a time; parts that are prepared need no npz.

    Raises:
        DataError: a part is missing or damaged, or the model does not fit.
    """
    vision = batches.vision_model(config.name, model, npz.CLASSES)
    batches.check_size(config.name, vision, npz.IMAGE_SHAPE[0], npz.IMAGE_SHAPE[-1])
    sources = {part: prepared.Source(builder, "train") for part, builder in cifar5m_parts(config.data_dir, note)}
    return _image_data(
        config,
        Records([sources[part] for part in npz.PARTS if part != npz.TEST_PART], "image", "label", vision.channels),
        Records([sources[npz.TEST_PART]], "image", "label", vision.channels),
        views=(augment.shift_and_flip, augment.as_is),
        seed=seed,
        class_names=npz.CLASSES,
        digest=cache.digest(*(part for source in sources.values() for part in _marks(source))),
    )


def _marks(source: Sequence) -> list[bytes]:
    """What tells a part of CIFAR-5M from any other: its length, first and last image."""
    return [len(source).to_bytes(8, "little"), *(source[i]["image"].tobytes() for i in (0, len(source) - 1))]


def cifar5m_parts(given: str | None, note: cache.Note) -> list[tuple[str, Any]]:
    """(part, builder) of all parts, prepared.

    Raises:
        DataError: a part is neither prepared nor there as npz, said before any is prepared.
    """
    base = prepared.data_dir(given)
    version = "1.0.0/dataset_info.json"
    files = {part: base / f"{part}.npz" for part in npz.PARTS if not (base / "cifar5m" / part / version).exists()}
    missing = [file.name for file in files.values() if not file.exists()]
    if missing:
        raise DataError(
            f"cifar5m needs {', '.join(missing)} in {base}; get them from {npz.SOURCE}, "
            "or set data.data_dir to the folder that has them"
        )
    return [
        (part, prepared.embedded("Cifar5m", given, note, config=part, source=files.get(part))) for part in npz.PARTS
    ]


def tfds_data(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Data:
    """A prepared TFDS data set by name: text for a decoder, labelled images for a vision transformer.

    Raises:
        DataError: it is not prepared or has no such features, or the model does not fit.
    """
    found = prepared.find(config.name, config.data_dir)
    if model.task == "tokens":
        return _text(found, config, model, seed, note)
    return _images(found, config, model, seed)


def _text(found: prepared.Found, config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Data:
    def documents() -> text.Documents:
        import tensorflow_datasets as tfds

        builder = found.builder()
        feature = _feature(builder, found, (tfds.features.Text,), "text")
        splits = {"train": found.train, "eval": found.eval}
        return {side: text.Records(prepared.Source(builder, split), feature) for side, split in splits.items()}

    key = f"{config.name.replace('/', '-').replace(':', '-')}-{found.digest}"
    return text.open_text(config, model, seed, note, key, documents, {"version": found.folder.name})


def _images(found: prepared.Found, config: DataConfig, model: ModelConfig, seed: int) -> Data:
    import tensorflow_datasets as tfds

    builder = found.builder()
    image = _feature(builder, found, (tfds.features.Image, tfds.features.Tensor), "image")
    label = _feature(builder, found, (tfds.features.ClassLabel,), "label")
    features = builder.info.features
    vision = batches.vision_model(config.name, model, features[label].names)
    height, width, channels = features[image].shape
    size = vision.image_size
    if channels is None:
        folders.check_channels(config.name, vision.channels)
    # Images of any size, or of one larger than the model's, are cropped; smaller ones are not blown up.
    small = height is not None and width is not None and min(height, width) <= size
    expected: Any = height if small else size
    batches.check_size(config.name, vision, expected, channels or vision.channels)
    if (height, width) == (size, size):
        views = (augment.jitter if channels == 1 else augment.shift_and_flip, augment.as_is)
    else:
        views = (augment.random_crop(size), augment.centre_crop(size))
    # Image files stay bytes, for PIL to decode: TFDS would want OpenCV or TensorFlow.
    skip: Any = {image: tfds.decode.SkipDecoding()} if isinstance(features[image], tfds.features.Image) else None
    sources = [prepared.Source(builder, split, skip) for split in (found.train, found.eval)]
    return _image_data(
        config,
        Records(sources[:1], image, label, vision.channels),
        Records(sources[1:], image, label, vision.channels),
        views=views,
        seed=seed,
        class_names=features[label].names,
        digest=found.digest,
    )


def _feature(builder: Any, found: prepared.Found, kinds: tuple[type, ...], usual: str) -> str:
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
        f"{found.folder} has no feature {usual!r}, only {', '.join(sorted(features))}; is it the right kind of data?"
    )


def _image_data(
    config: DataConfig,
    train: Records,
    eval_: Records,
    *,
    views: tuple[augment.View, augment.View],
    seed: int,
    class_names: list[str],
    digest: str,
) -> batches.ImageData:
    return batches.ImageData(
        train,
        eval_,
        train_view=views[0] if config.augment else views[1],
        eval_view=views[1],
        seed=seed,
        batch_size=config.batch_size,
        eval_batch_size=config.eval_batch_size,
        eval_examples=config.eval_examples,
        threads=folders.decoding_threads(),
        class_names=class_names,
        facts={"name": config.name, "digest": digest},
    )
