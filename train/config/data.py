"""Data of a run: the section `data` of its config, and the table of the kinds of data.

`SOURCES` says for each kind which function opens it and which fields of `DataConfig` it reads.
Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from tyro import conf

from mupax.config_fields import Affects, Listed
from mupax.mappings import Lazy, function_of
from mupax.train.config.checks import at_least, check_place
from mupax.zoo.configs import ConfigError
from mupax.zoo.families import ArraySpec, ModelConfig, Task, nearest_divisor

if TYPE_CHECKING:
    from mupax.train.data.interface import Data

Note = Callable[[str], None]
"""Function that logs one line about slow work."""
Loader = Callable[["DataConfig", ModelConfig, int, Note], "Data"]
"""Function (config, model, seed, note) -> data, which opens the data of a config for a model."""


class ImageSizes(NamedTuple):
    """Sizes that a model needs in order to read a data set of images."""

    num_classes: int
    channels: int | None
    """1 for grey, 3 for colour. `None` if a model may read either."""
    side: int | None
    """Pixels on a side, or on the shorter side of the median image. `None` if the data do not
    say."""
    scaled: bool = True
    """True if images are scaled to the model's size. Otherwise the model's image size must be that
    of the images."""
    train_images: int | None = None
    """Number of training images. `None` if the data do not say."""


SIZES_OF_IMAGES = ("num_classes", "channels", "image_size", "patch_size")
"""Fields of a model that its data may set."""


class DataKind(NamedTuple):
    """Row of `SOURCES`: how a kind of data is opened, and which settings it reads."""

    loader: Loader | str
    """Function that opens the data. Here and below a function may be written MODULE:FUNCTION. It is
    then imported when it is needed."""
    task: Task | None
    """Input of models for these data, tokens or images. `None` if only the opened data can tell."""
    reads: frozenset[str]
    """Fields of `DataConfig` that these data read and some other data do not. A flag for any other
    such field is refused."""
    sizes: ImageSizes | Callable[[DataConfig], ImageSizes | None] | str | None = None
    """Sizes that images ask of a model, or a function that finds them. The function returns `None`
    if the data are not there."""
    prepare: Callable[[str | None, Note], object] | str | None = None
    """Function that writes the data to a folder before a run, for `mupax data prepare`. `None` if a
    run reads the data as it starts."""


def __getattr__(name: str) -> Any:
    if name != "Source":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Source is deprecated; write DataKind", DeprecationWarning, stacklevel=2)
    return DataKind


# Loaders are imported when they are called: they need numpy, PIL or JAX, and `--help` does not.
def _import_text():
    from mupax.train.data.sources import text

    return text


def _import_digits():
    from mupax.train.data.sources.digits import digits

    return digits


def _import_striped_shapes():
    from mupax.train.data.sources.shapes import striped_shapes

    return striped_shapes


def _import_cifar5m():
    from mupax.train.data.sources import cifar5m

    return cifar5m


def _import_idx():
    from mupax.train.data.sources import idx

    return idx


def _import_mixture():
    from mupax.train.data.sources.mixtures import mixture

    return mixture


def _import_data_set():
    from mupax.train.data.sources.streams import data_set

    return data_set


def _import_own_chats():
    from mupax.train.data.sources.chats import own_chats

    return own_chats


def _import_folders():
    from mupax.train.data.sources import folders

    return folders


def _import_published():
    from mupax.train.data.sources import published

    return published


def _import_builders():
    from mupax.train.data.records import builders

    return builders


# Names of `DataConfig` fields that several entries of `SOURCES` share.
_TEXT = frozenset({"tokenizer", "separator", "special_tokens", "document_mask", "reset_positions"})
_CHAT = frozenset({"chat_template", "loss_on"})
_IMAGES = frozenset({"augment", "transforms"})
_RECORD_FILES = frozenset({"field", "on_broken", "limits"})
_PREPARED = frozenset({"data_dir"})
_OWN_TEXT = DataKind(
    Lazy(lambda: _import_text().own_files), "tokens", _TEXT | _RECORD_FILES | {"stream"}
)
SOURCES: dict[str, DataKind] = {
    "python_corpus": DataKind(
        Lazy(lambda: _import_text().python_corpus),
        "tokens",
        _TEXT | _PREPARED,
        prepare=Lazy(lambda: _import_builders().prepare_python_corpus),
    ),
    "digits": DataKind(
        Lazy(_import_digits),
        "images",
        _IMAGES | _PREPARED | {"split"},
        ImageSizes(10, 1, 8, scaled=False),
        prepare=Lazy(lambda: _import_builders().prepare_digits),
    ),
    "shapes": DataKind(
        Lazy(_import_striped_shapes),
        "images",
        frozenset({"transforms"}),
        ImageSizes(10, 3, 32, scaled=False),
    ),
    "cifar5m": DataKind(
        Lazy(lambda: _import_cifar5m().cifar5m),
        "images",
        _IMAGES | _PREPARED,
        ImageSizes(10, 3, 32, scaled=False),
        prepare=Lazy(lambda: _import_cifar5m().prepared_parts),
    ),
    "fashion": DataKind(
        Lazy(lambda: _import_idx().fashion),
        "images",
        _IMAGES | _PREPARED | {"limits"},
        ImageSizes(10, 1, 28, scaled=False),
    ),
    "idx:PATH": DataKind(
        Lazy(lambda: _import_idx().own_files),
        "images",
        _IMAGES | {"limits"},
        Lazy(lambda: _import_idx().sizes),
    ),
    "mix": DataKind(
        Lazy(_import_mixture),
        "tokens",
        # A part of the mixture may be a prepared data set.
        _TEXT | _CHAT | _RECORD_FILES | _PREPARED | {"mix", "stream"},
    ),
    "text:PATH": _OWN_TEXT,
    "records:PATH": _OWN_TEXT,
    "hf:NAME": DataKind(Lazy(_import_data_set), "tokens", _TEXT | {"field", "limits"}),
    "chat:PATH": DataKind(Lazy(_import_own_chats), "tokens", _TEXT | _CHAT | _RECORD_FILES),
    "images:PATH": DataKind(
        Lazy(lambda: _import_folders().own_images),
        "images",
        _IMAGES | {"on_broken", "pixels", "limits"},
        Lazy(lambda: _import_folders().sizes),
    ),
}
"""Pattern of data.name to the kind of data. To add a kind, write its loader and a line here
(docs/howto/extend.md has an example)."""
CACHE_HINT = ", or set the environment variable MUPAX_DATA to the folder of the cache"
"""End of a message about `data_dir`, for data that are no prepared data set."""
_PUBLISHED: dict[str, Task] = {
    **dict.fromkeys(("c4", "lm1b", "wiki40b"), "tokens"),
    **dict.fromkeys(("mnist", "cifar10", "cifar100", "imagenet2012"), "images"),
}
"""Task of some data sets of TFDS, which is needed before they are opened."""


def source_key(name: str) -> str | None:
    """Return the key in `SOURCES` of a data.name, or `None` for a data set of TFDS."""
    kind, colon, _ = name.partition(":")
    patterns = (f"{kind}:PATH", f"{kind}:NAME") if colon else (name,)
    return next((pattern for pattern in patterns if pattern in SOURCES), None)


def source(name: str) -> DataKind:
    """Return the kind of data of a data.name. A name outside of `SOURCES` is a data set of TFDS."""
    key = source_key(name)
    if key is not None:
        return SOURCES[key]
    data_set = name.partition(":")[0]
    task = _PUBLISHED.get(data_set.partition("/")[0])
    images = _IMAGES | {"pixels", "limits"}
    # A data set that is not in `_PUBLISHED` may be text or images, so flags of both are accepted.
    reads_by_task = {"tokens": _TEXT, "images": images, None: _TEXT | images}
    return DataKind(
        Lazy(lambda: _import_published().tfds_data),
        task,
        _PREPARED | {"train_percent"} | reads_by_task[task],
        Lazy(lambda: _import_published().sizes),
    )


def unread_fields(names: Iterable[str]) -> frozenset[str]:
    """Return the fields of `DataConfig` that none of some data read and other kinds of data do.

    Args:
        names: Data as `data.name` takes them.
    """
    unread = set(fields_of_kinds())
    for name in names:
        kind = source(name)
        unread -= kind.reads
        if kind.prepare is not None:  # a plugin need not name the folder that it is given
            unread -= _PREPARED
    return frozenset(unread)


def fields_of_kinds() -> frozenset[str]:
    """Return the fields of `DataConfig` that some kinds of data read and others do not."""
    # The empty name is in no table, so `source` takes it for a TFDS data set of text or images.
    return source("").reads.union(*(kind.reads for kind in SOURCES.values()))


def image_sizes(config: DataConfig) -> ImageSizes | None:
    """Return the sizes that the data of a config ask of a model of images.

    Returns `None` for data that are not there or do not say, and for damaged data of IDX files and
    of TFDS.

    Raises:
        DataError: A folder images:PATH is there, but has no images by class or cannot be read.
    """
    sizes = source(config.name).sizes
    if sizes is None or isinstance(sizes, ImageSizes):
        return sizes
    return function_of(sizes)(config)


Fit = Literal["centre", "squash", "edge"]
Interpolation = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming", "area"]
"""Filters in the order of PIL's numbers, which Hugging Face's files contain. `area` is TensorFlow's
and has no number."""


_MAX_RESIZE = 2**14
"""Largest value of `resize`, in pixels."""
_BACKGROUNDS = ("white", "black", "none")
"""Common values of `background`. All others are colours that PIL must check, a slow import."""
_MAX_JITTER = 4
_EDGE = 8 / 7
"""Default ratio of a scaled image's shorter edge to the side of the square cut from its centre."""


def _is_colour(name: str) -> bool:
    # Imported late, because most runs have one of `_BACKGROUNDS`, which needs no PIL.
    from PIL import ImageColor

    try:
        colour = ImageColor.getrgb(name)
    except ValueError:
        return False
    # A fourth number would be an alpha value, and a background must be opaque.
    return len(colour) == 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelsConfig:
    """Conversion of an image file to the array that a model reads.

    Training crops at random in place of the fit.
    """

    fit: Annotated[Fit, Affects("data", test="train/data/sources/test_folders.py")] = "edge"
    """How an image is made square. edge: scale the shorter edge and cut out the centre; squash:
    scale both sides to the same length; centre: first cut out the central 7/8 of the shorter side,
    then scale (Hugging Face's files cannot express this)."""
    resize: Annotated[int | None, Affects("data", test="train/data/sources/test_folders.py")] = None
    """Pixels of the shorter edge (edge) or of both sides (squash) before the centre is cut out.
    None: 8/7 of the model's image size, rounded (edge), or the image size (squash)."""
    interpolation: Annotated[
        Interpolation, Affects("data", test="train/data/sources/test_folders.py")
    ] = "bilinear"
    """Filter that scales the image: one of PIL's, or area, TensorFlow's filter with sides rounded
    to whole pixels and levels rounded down."""
    mean: Annotated[
        tuple[float, ...], Affects("data", test="train/data/sources/test_folders.py")
    ] = (0.5,)
    """Number, or one per channel, that is subtracted from values in [0, 1]."""
    std: Annotated[
        tuple[float, ...], Affects("data", test="train/data/sources/test_folders.py")
    ] = (0.5,)
    """Number, or one per channel, that the difference is divided by."""
    background: Annotated[str, Affects("data", test="train/data/sources/test_folders.py")] = "white"
    """Colour behind transparent pixels, by name or as #rrggbb. none reads the colours that
    transparent pixels hide, as Hugging Face's processors do."""

    def __post_init__(self) -> None:
        at_least("data.pixels.", self, 1, "resize")
        if self.background not in _BACKGROUNDS and not _is_colour(self.background):
            raise ConfigError(
                f"data.pixels.background is {self.background!r:.60}; "
                "write the name of a colour such as white, #rrggbb, or none"
            )
        if self.fit == "centre" and self.resize is not None:
            raise ConfigError(
                f"data.pixels.resize is {self.resize}, and --data.pixels.fit centre does not read "
                "it; write --data.pixels.fit edge (or squash), or leave data.pixels.resize out"
            )
        for name in ("mean", "std"):
            values = getattr(self, name)
            # Python's JSON reads NaN and Infinity as numbers.
            if not values or not all(math.isfinite(value) for value in values):
                raise ConfigError(
                    f"data.pixels.{name} is {values}; write one number, or one per channel"
                )
        if not all(value > 0 for value in self.std):
            raise ConfigError(f"data.pixels.std is {self.std}; write numbers above 0")

    def resolved(self, size: int) -> PixelsConfig:
        """Return the settings with the default of `resize` for the fit `edge` written out.

        Other fits, and a `resize` that is given, stay.

        Args:
            size: Pixels on a side of the images that the model reads.
        """
        if self.fit != "edge" or self.resize is not None:
            return self
        return dataclasses.replace(self, resize=round(_EDGE * size))

    def check(self, size: int, channels: int) -> None:
        """Raise ConfigError if the settings do not fit the images that a model reads.

        `mean` and `std` need one number, or one per channel. A `resize` that is set must be from
        `size` to 16,384 pixels.

        Args:
            size: Pixels on a side of the images that the model reads.
            channels: Number of channels of these images, 1 or 3.
        """
        for name in ("mean", "std"):
            count = len(getattr(self, name))
            if count not in (1, channels):
                raise ConfigError(
                    f"data.pixels.{name} has {count} numbers, and the model reads {channels} "
                    "channels; write one, or one per channel"
                )
        # The model's square is cut out of the scaled image, so it must not be larger than that
        # image.
        if self.resize is not None and self.resize < size:
            raise ConfigError(
                f"data.pixels.resize {self.resize} is less than the {size} pixels that the model "
                f"reads; write {size} or more"
            )
        if self.resize is not None and self.resize > _MAX_RESIZE:
            raise ConfigError(
                f"data.pixels.resize {self.resize} is more than {_MAX_RESIZE}, "
                "and each image would be as large"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformsConfig:
    """Random changes to training images and their labels, in addition to `augment`.

    By default there are none. Evaluation images are never changed.
    """

    crop: Annotated[
        Literal["torchvision", "inception"], Affects("batches", test="train/data/test_crops.py")
    ] = "torchvision"
    """How images larger than the model's are cropped at random: as torchvision does, or as
    TensorFlow does in big_vision."""
    jitter: Annotated[
        float | None, Affects("batches", test="train/data/sources/test_folders.py")
    ] = None
    """In place of a random crop, read the image as evaluation does, rotated by up to 20 degrees,
    scaled and stretched by up to 1/5 and moved by up to 1/8, each times this number. None: random
    crop."""
    mirror: Annotated[bool, Affects("batches", test="train/data/sources/test_folders.py")] = True
    """Mirror half of the images. A mirrored digit or letter is no digit or letter."""
    randaug_layers: Annotated[int | None, Affects("batches", 1)] = None
    """RandAugment (Cubuk et al. 2020): number of operations on every image, each drawn from 16.
    None: no RandAugment."""
    randaug_magnitude: Annotated[
        float, Affects("batches", 5.0, given={"data.transforms.randaug_layers": 2})
    ] = 10.0
    """RandAugment: strength of each operation, from 0 to 10."""
    mixup: Annotated[float, Affects("batches", 0.2)] = 0.0
    """Mix each image with the one before it, in shares that a batch draws from Beta(alpha, alpha)
    with this alpha (Zhang et al. 2018). 0 mixes none."""
    cutmix: Annotated[float, Affects("batches", 1.0)] = 0.0
    """Put a box of another image into each image. The shares of the area are drawn from Beta(alpha,
    alpha) with this alpha (Yun et al. 2019). With mixup, a batch has one of the two."""
    mix_group: Annotated[
        int | None, Affects("batches", 4, given={"data.transforms.mixup": 0.2})
    ] = None
    """Number of images in a row that are mixed with one another, as big_vision mixes the images of
    a device. None: all of a batch."""
    label_smoothing: Annotated[float, Affects("batches", 0.1)] = 0.0
    """Share of each label that is spread evenly over all classes (Szegedy et al. 2016)."""
    repeats: Annotated[int, Affects("batches", 2)] = 1
    """Number of times that a batch shows each of its images, transformed anew every time (Hoffer et
    al. 2020)."""

    def __post_init__(self) -> None:
        at_least("data.transforms.", self, 1, "randaug_layers", "repeats")
        at_least("data.transforms.", self, 0, "randaug_magnitude", "mixup", "cutmix")
        at_least("data.transforms.", self, 2, "mix_group")
        if self.mix_group is not None and not (self.mixup or self.cutmix):
            raise ConfigError(
                f"data.transforms.mix_group is {self.mix_group}, and no images are mixed; "
                "add --data.transforms.mixup 0.2, or leave data.transforms.mix_group out"
            )
        if self.jitter is not None and not 0 < self.jitter <= _MAX_JITTER:
            raise ConfigError(
                f"data.transforms.jitter is {self.jitter}; "
                f"write a number above 0, up to {_MAX_JITTER}, or none to crop at random"
            )
        if self.jitter is not None and self.crop != "torchvision":
            raise ConfigError(
                f"data.transforms.jitter is in place of a crop, "
                f"and data.transforms.crop is {self.crop}; leave one of them out"
            )
        if self.randaug_magnitude > 10:
            raise ConfigError(
                f"data.transforms.randaug_magnitude is {self.randaug_magnitude}; "
                "write a number from 0 to 10"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"data.transforms.label_smoothing is {self.label_smoothing}; "
                "write a share in [0, 1)"
            )

    @property
    def soft(self) -> bool:
        """True if training labels are distributions over classes (mixing or label smoothing)."""
        return bool(self.mixup or self.cutmix or self.label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Bounds on what a file may unpack to.

    Without them a small file from a stranger could fill the memory or the disk. Data within the
    bounds are read as they are.
    """

    record_mib: Annotated[int, Affects("guards", test="train/data/records/test_limits.py")] = 24
    """Largest line of JSON or value of Parquet when it is unpacked, in MiB."""
    ratio: Annotated[int, Affects("guards", test="train/data/records/test_limits.py")] = 200
    """Largest unpacked size of a file over its size on disk, in every stretch of 64 MiB of its
    content."""
    megapixels: Annotated[int, Affects("guards", test="train/data/records/test_limits.py")] = 128
    """Largest image, in millions of pixels."""


DEFAULT_LIMITS = LimitsConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of the batches. Batch k is a function of (seed, k, batch_size) alone."""

    name: Annotated[str, Listed("data", "python_corpus")]
    """python_corpus, digits, shapes (endless), text:PATH (a file or folder), records:PATH (JSON
    lines, Parquet or token ids), chat:PATH (JSON lines or Parquet with messages), hf:NAME[:SUBSET]
    (a data set of the Hugging Face hub, or a folder of one), images:PATH (a folder per class),
    idx:PATH (a folder of IDX files), fashion (Debian's Fashion-MNIST), cifar5m, mix (the texts of
    data.mix), or the name of a TFDS data set."""
    mix: Annotated[
        tuple[str, ...],
        conf.arg(metavar="NAME=SOURCE:WEIGHT ..."),
        Listed("data", test="train/data/text/test_mixture.py"),
    ] = ()
    """Texts to mix, in proportion to their weights: code=text:src:0.3 prose=records:books:0.7. A
    SOURCE is any text that data.name takes."""
    evaluate: Annotated[
        tuple[str, ...],
        conf.arg(metavar="NAME=SOURCE ..."),
        Listed("course", test="train/run/evaluation/test_evaluation_sets.py"),
    ] = ()
    """Further sets to evaluate on: code=text:src prose=records:books. A SOURCE is anything that
    data.name takes."""
    batch_size: Annotated[int, Listed("data", 4)]
    """Sequences or images per optimizer step, over all devices."""
    seed: Annotated[int | None, Affects("data", 5)] = None
    """Seed of data order and augmentation. None: the run's seed. With it, the run's seed is of the
    initialization alone."""
    eval_batch_size: Annotated[int | None, Listed("batches", 8)] = None
    """Examples in an evaluation batch, over all devices. None: batch_size."""
    eval_examples: Annotated[int | None, Listed("batches", 20)] = None
    """Evaluate on the first N examples. None: all of them."""
    data_dir: Annotated[
        str | None, Affects("batches", test="train/data/sources/test_published.py")
    ] = None
    """Folder of prepared data sets. None: the user cache folder."""
    tokenizer: Annotated[str, Listed("data", "bpe:300", given={"model.vocab_size": 300})] = "bytes"
    """bytes, bpe:SIZE (trained on the training text, with a mixture's texts by weight), the path of
    a tokenizer.json, or ids:SIZE for token ids made elsewhere."""
    separator: Annotated[str | None, Listed("data", test="train/data/sources/test_records.py")] = (
        None
    )
    """Token that ends every document, such as `<|endoftext|>`. None: the tokenizer's, by its usual
    names."""
    special_tokens: Annotated[
        Literal["parse", "text"], Affects("batches", test="train/data/text/test_special_tokens.py")
    ] = "parse"
    """How special tokens such as `<|endoftext|>` that are quoted in a text are read. parse: as
    special tokens; text: as plain text."""
    field: Annotated[str, Listed("data", test="train/data/sources/test_records.py")] = "text"
    """Field or column of a record that has the text. A chat has `messages` unless this is given."""
    stream: Annotated[bool, Affects("batches", test="train/data/streams/test_streams.py")] = False
    """text:PATH and records:PATH: start training while the rest of the text is still being
    tokenized. hf:NAME always does."""
    chat_template: Annotated[
        str | None, Listed("batches", test="train/data/chats/test_chats.py")
    ] = None
    """Conversations only: template of jinja2 that makes text of messages. None: the one that comes
    with the tokenizer."""
    loss_on: Annotated[
        Literal["answers", "all"], Affects("batches", test="train/data/chats/test_chats.py")
    ] = "answers"
    """Conversations only: train on the words of assistants (answers) or on every token (all)."""
    document_mask: Annotated[bool, Listed("batches", True)] = False
    """Documents of one window do not attend to one another, and the first token of each is no
    target. The separator belongs to the document that it ends."""
    reset_positions: Annotated[
        bool, Affects("batches", True, given={"data.document_mask": True})
    ] = False
    """Learned positions begin at 0 in every document of a window."""
    augment: Annotated[bool, Listed("batches", False)] = True
    """Augment training images lightly, as the kind of data does it."""
    transforms: TransformsConfig = TransformsConfig()
    on_broken: Annotated[
        Literal["stop", "skip"], Affects("data", test="train/data/sources/test_folders.py")
    ] = "stop"
    """What happens at a broken image, text, record or file. stop: the run ends before it starts;
    skip: it is left out and counted. For images:, text:, records: and chat:, and mixtures of them."""
    limits: LimitsConfig = DEFAULT_LIMITS
    pixels: PixelsConfig = PixelsConfig()
    train_percent: Annotated[
        int, Affects("batches", test="train/data/sources/test_published.py")
    ] = 100
    """Data sets of TFDS only: percent of the training split to train on, from its beginning."""
    split: Annotated[Literal["random", "writer"], Affects("data", "writer")] = "random"
    """digits only. random: a stratified random split; writer: test writers are never seen in
    training."""
    noise: Annotated[
        Literal["infilling", "sentinels"] | None,
        Affects("batches", test="train/data/text/test_denoising.py"),
    ] = None
    """Text that an encoder-decoder reads. infilling: BART's text with spans cut out, and the whole
    text is the target; sentinels: T5's text with spans replaced by sentinels, and the spans are the
    target."""
    noise_rate: Annotated[
        float | None, Affects("batches", test="train/data/text/test_denoising.py")
    ] = None
    """Share of the tokens that noise cuts out. None: 0.3 (infilling) or 0.15 (sentinels)."""
    noise_span: Annotated[
        float | None, Affects("batches", test="train/config/test_cli_errors.py")
    ] = None
    """Mean length of the spans that noise cuts out, in tokens. None: 3."""

    def __post_init__(self) -> None:
        # The first check that fails decides the message, so their order is part of the interface.
        self._check_text()
        self._check_images()
        self._check_batch()
        if not 1 <= self.train_percent <= 100:
            raise ConfigError(
                f"data.train_percent is {self.train_percent}; write a whole number from 1 to 100"
            )
        if self.mix and self.name != "mix":
            raise ConfigError(
                f"data.mix names its texts, and data.name is {self.name}; "
                "leave that out, or write mix"
            )
        for name in ("name", "data_dir", "tokenizer", "chat_template"):
            check_place(f"data.{name}", getattr(self, name))
        for name, place in self.evaluation_sets.items():
            check_place(f"data.evaluate {name}", place)

    def _check_text(self) -> None:
        """Refuse counts below 1, a negative seed, and noise and positions that do not fit.

        A noise rate must be in (0, 1), settings of noise need noise, and positions that begin anew
        in each document need a document mask.
        """
        at_least("data.", self, 1, "batch_size", "eval_batch_size", "eval_examples", "noise_span")
        if self.noise_rate is not None and not 0 < self.noise_rate < 1:
            raise ConfigError(
                f"data.noise_rate is {self.noise_rate}; "
                "write a share of the tokens in (0, 1), such as 0.3"
            )
        if self.noise is None and (self.noise_rate or self.noise_span) is not None:
            raise ConfigError(
                "data.noise_rate or data.noise_span is given, and only denoising data read them; "
                "add --data.noise infilling (or sentinels), or leave both out"
            )
        # Not in `LimitsConfig`, which the commands of `mupax data` take as --limits, too.
        at_least("data.limits.", self.limits, 1, "record_mib", "ratio", "megapixels")
        at_least("data.", self, 0, "seed")
        if self.seed is not None and self.seed >= 2**53:  # no record could hold it
            raise ConfigError(f"data.seed is {self.seed}; write a number below 2^53 = {2**53}")
        if self.reset_positions and not self.document_mask:
            raise ConfigError(
                "data.reset_positions needs documents that do not see one another; "
                "add --data.document-mask"
            )

    def _check_images(self) -> None:
        """Refuse jitter, and mirroring turned off, for data that do not read `data.pixels`."""
        # Only data that read `pixels` use `transforms.jitter` and `transforms.mirror`. Other image
        # data have an augmentation of their own.
        scales_images = "pixels" in source(self.name).reads
        if self.transforms.jitter is not None and not scales_images:
            raise ConfigError(
                f"data.transforms.jitter is for data whose images are scaled, "
                f"and {self.name} augments in its own way; leave it out"
            )
        if not self.transforms.mirror and not scales_images:
            raise ConfigError(
                f"data.transforms.mirror is for data whose images are scaled, "
                f"and {self.name} augments in its own way; leave it out, or write --data.no-augment"
            )

    def _check_batch(self) -> None:
        """Refuse a batch that its repeats or its groups of mixed images do not divide."""
        batch_size = self.batch_size
        repeats = self.transforms.repeats
        if batch_size % repeats:
            near = nearest_divisor(batch_size, repeats)
            raise ConfigError(
                f"data.batch_size {batch_size} is not divisible by data.transforms.repeats "
                f"{repeats}; write repeats {near}"
            )
        # Images are mixed within a group, the first with the last. In an incomplete last group the
        # first image would have no partner.
        group = self.transforms.mix_group or batch_size
        if batch_size % group:
            near = nearest_divisor(batch_size, group)
            raise ConfigError(
                f"data.batch_size {batch_size} is not divisible by data.transforms.mix_group "
                f"{group}; write mix_group {near}"
            )

    def more_of(self, inputs: ArraySpec) -> dict[str, ArraySpec]:
        """Return the arrays that an example has in addition to the model's own, by name.

        With `document_mask` that is `segments`, the document of every token, and with
        `reset_positions` also `positions`, its position in the document.

        Args:
            inputs: Shape and dtype of the tokens, which the arrays share.
        """
        arrays = {}
        if self.document_mask:
            arrays["segments"] = inputs
        if self.reset_positions:
            arrays["positions"] = inputs
        return arrays

    @property
    def evaluation_sets(self) -> dict[str, str]:
        """Source of each set of `evaluate`, by name.

        Raises:
            ConfigError: A word is of another form, a name comes twice, or a source is a mixture,
                which has no text of its own.
        """
        sets: dict[str, str] = {}
        for word in self.evaluate:
            name, _, place = word.partition("=")
            if not place or not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(
                    f"data.evaluate {word} is not NAME=SOURCE; write it as code=text:src"
                )
            if name in sets:
                raise ConfigError(
                    f"data.evaluate has two sets named {name}; name one of them otherwise"
                )
            if place.partition(":")[0] == "mix":
                raise ConfigError(
                    f"data.evaluate {word} is a mixture; write its texts, each with a name"
                )
            sets[name] = place
        return sets

    @property
    def task(self) -> Task | None:
        """Input of models for these data, tokens or images.

        `None` for a TFDS data set whose features are not known before it is opened.
        """
        return source(self.name).task
