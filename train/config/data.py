"""Which data a run reads, in what batches, and the table of kinds of data. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from tyro import conf

from mupax.config_fields import Affects, Listed
from mupax.table import Lazy, function_of
from mupax.train.config.checks import at_least, check_place
from mupax.zoo.configs import ConfigError
from mupax.zoo.families import ArraySpec, ModelConfig, Task, nearest_divisor

if TYPE_CHECKING:
    from mupax.train.data.interface import Data

Note = Callable[[str], None]
"""Function that logs one line about what takes time."""
Loader = Callable[["DataConfig", ModelConfig, int, Note], "Data"]
"""Function of a config, the model, the seed and a note. It opens the data."""


class ImageSizes(NamedTuple):
    """Sizes that a data set of images asks of a model."""

    num_classes: int
    channels: int | None
    """1 for grey, 3 for colour; None where a model may read either."""
    side: int | None
    """Pixels on a side, or on the shorter side of the median image; None where the data do not say."""
    scaled: bool = True
    """Whether images are scaled to the size of the model; otherwise it has to be theirs."""
    train_images: int | None = None
    """Images to train on; None where the data do not say."""


SIZES_OF_IMAGES = ("num_classes", "channels", "image_size", "patch_size")
"""Fields of a model that its data may set."""


class DataKind(NamedTuple):
    """Row of `SOURCES`: how a kind of data is loaded, what it is for, and which fields of `DataConfig` it reads."""

    loader: Loader | str
    """Opens the data. MODULE:FUNCTION may stand for a function here and below, which is imported when it is needed."""
    task: Task | None
    """What models of it read; None where only the data set itself can tell."""
    reads: frozenset[str]
    """The fields of `DataConfig` that it reads and not every one does. Any other is refused as a flag."""
    sizes: ImageSizes | Callable[[DataConfig], ImageSizes | None] | str | None = None
    """Sizes that images ask of a model, or a function that finds them, which returns None where the data are not there."""
    prepare: Callable[[str | None, Note], object] | str | None = None
    """Writes the data to disk in a folder before a run, for `mupax data prepare`. None where a run reads the data as it starts."""


def __getattr__(name: str) -> Any:
    if name != "Source":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Source is deprecated; write DataKind", DeprecationWarning, stacklevel=2)
    return DataKind


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


_TEXT = frozenset({"tokenizer", "separator", "special_tokens", "document_mask", "reset_positions"})
_CHAT = frozenset({"chat_template", "loss_on"})
_IMAGES = frozenset({"augment", "transforms"})
_RECORD_FILES = frozenset({"field", "on_broken", "limits"})
_OWN_TEXT = DataKind(
    Lazy(lambda: _import_text().own_files), "tokens", _TEXT | _RECORD_FILES | {"stream"}
)
SOURCES: dict[str, DataKind] = {
    "python_corpus": DataKind(
        Lazy(lambda: _import_text().python_corpus),
        "tokens",
        _TEXT,
        prepare=Lazy(lambda: _import_builders().prepare_python_corpus),
    ),
    "digits": DataKind(
        Lazy(_import_digits),
        "images",
        _IMAGES | {"split"},
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
        _IMAGES,
        ImageSizes(10, 3, 32, scaled=False),
        prepare=Lazy(lambda: _import_cifar5m().prepared_parts),
    ),
    "fashion": DataKind(
        Lazy(lambda: _import_idx().fashion),
        "images",
        _IMAGES | {"limits"},
        ImageSizes(10, 1, 28, scaled=False),
    ),
    "idx:PATH": DataKind(
        Lazy(lambda: _import_idx().own_files),
        "images",
        _IMAGES | {"limits"},
        Lazy(lambda: _import_idx().sizes),
    ),
    "mix": DataKind(
        Lazy(_import_mixture), "tokens", _TEXT | _CHAT | _RECORD_FILES | {"mix", "stream"}
    ),
    "text:PATH": _OWN_TEXT,
    "records:PATH": _OWN_TEXT,
    "hf:NAME": DataKind(Lazy(_import_data_set), "tokens", _TEXT | _RECORD_FILES),
    "chat:PATH": DataKind(Lazy(_import_own_chats), "tokens", _TEXT | _CHAT | _RECORD_FILES),
    "images:PATH": DataKind(
        Lazy(lambda: _import_folders().own_images),
        "images",
        _IMAGES | {"on_broken", "pixels", "limits"},
        Lazy(lambda: _import_folders().sizes),
    ),
}
"""data.name to its source. To add one, write its loader and a line here; docs/howto/add_a_dataset.md is an example."""
_PUBLISHED: dict[str, Task] = {
    **dict.fromkeys(("c4", "lm1b", "wiki40b"), "tokens"),
    **dict.fromkeys(("mnist", "cifar10", "cifar100", "imagenet2012"), "images"),
}
"""What some data sets of TFDS are, known before they are opened."""


def source_key(name: str) -> str | None:
    """Return the key in `SOURCES` of a data.name, or `None` for a data set of TFDS."""
    kind, colon, _ = name.partition(":")
    patterns = (f"{kind}:PATH", f"{kind}:NAME") if colon else (name,)
    return next((pattern for pattern in patterns if pattern in SOURCES), None)


def source(name: str) -> DataKind:
    """Return the source of a data.name. Any that `SOURCES` does not have is a data set of TFDS."""
    key = source_key(name)
    if key is not None:
        return SOURCES[key]
    kind = name.partition(":")[0]
    task = _PUBLISHED.get(kind.partition("/")[0])
    part, images = frozenset({"train_percent"}), _IMAGES | {"pixels", "limits"}
    reads = part | {"tokens": _TEXT, "images": images, None: _TEXT | images}[task]
    return DataKind(
        Lazy(lambda: _import_published().tfds_data),
        task,
        reads,
        Lazy(lambda: _import_published().sizes),
    )


def fields_of_kinds() -> frozenset[str]:
    """Return the fields of `DataConfig` that some kinds of data read and others do not."""
    return source("").reads.union(*(kind.reads for kind in SOURCES.values()))


def image_sizes(config: DataConfig) -> ImageSizes | None:
    """Return the sizes that the data of a config ask of a model of images, or `None` where they are not known.

    Raises:
        DataError: data that are there and cannot be read.
    """
    sizes = source(config.name).sizes
    if sizes is None or isinstance(sizes, ImageSizes):
        return sizes
    return function_of(sizes)(config)


Fit = Literal["centre", "squash", "edge"]
Interpolation = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming", "area"]
"""In the order of PIL's numbers, which Hugging Face's files have; area is TensorFlow's and has none."""


_LARGEST = 2**14
"""Pixels on a side."""
_BACKGROUNDS = ("white", "black", "none")
"""Those that are known without PIL."""
_MOST_JITTER = 4
_EDGE = 8 / 7
"""The shorter edge of a scaled image over the side of its centre that is cut out."""


def _is_colour(name: str) -> bool:
    from PIL import ImageColor

    try:
        return len(ImageColor.getrgb(name)) == 3  # a fourth number would be its own transparency
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelsConfig:
    """What becomes of an image file before a model reads it. Training crops at random in place of the fit."""

    fit: Annotated[Fit, Affects("data", test="train/data/sources/test_folders.py")] = "edge"
    """How an image is made square: edge scales its shorter edge and cuts the centre out, squash scales all of it, centre cuts the
    central 7/8 of the shorter side first, which Hugging Face's files cannot say."""
    resize: Annotated[int | None, Affects("data", test="train/data/sources/test_folders.py")] = None
    """Pixels that the shorter edge (edge) or both sides (squash) are scaled to before the centre is cut out. Unless given, edge takes
    8/7 of the model's size, rounded, and squash the model's size."""
    interpolation: Annotated[
        Interpolation, Affects("data", test="train/data/sources/test_folders.py")
    ] = "bilinear"
    """How the image is scaled: by one of PIL's ways, or as TensorFlow's area, with sides of whole numbers nearest and levels rounded down."""
    mean: Annotated[
        tuple[float, ...], Affects("data", test="train/data/sources/test_folders.py")
    ] = (0.5,)
    """Subtracted from values in [0, 1]; one number, or one per channel."""
    std: Annotated[
        tuple[float, ...], Affects("data", test="train/data/sources/test_folders.py")
    ] = (0.5,)
    """What is left is divided by it; one number, or one per channel."""
    background: Annotated[str, Affects("data", test="train/data/sources/test_folders.py")] = "white"
    """Colour behind transparent pixels, by its name or as #rrggbb. none reads the colours that transparent pixels hide, as
    Hugging Face's processors do."""

    def __post_init__(self) -> None:
        at_least("data.pixels.", self, 1, "resize")
        if self.background not in _BACKGROUNDS and not _is_colour(self.background):
            raise ConfigError(
                f"data.pixels.background is {self.background!r:.60}; write the name of a colour such as white, #rrggbb, or none"
            )
        if self.fit == "centre" and self.resize is not None:
            raise ConfigError(
                "data.pixels.resize is of the fits squash and edge; add --data.pixels.fit edge"
            )
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not values or not all(math.isfinite(value) for value in values):
                raise ConfigError(
                    f"data.pixels.{name} is {values}; write one number, or one per channel"
                )
        if not all(value > 0 for value in self.std):
            raise ConfigError(f"data.pixels.std is {self.std}; write numbers above 0")

    def resolved(self, size: int) -> PixelsConfig:
        """Return the same settings with the default of `resize` written out.

        Args:
            size: pixels on a side of what the model reads.
        """
        if self.fit != "edge" or self.resize is not None:
            return self
        return dataclasses.replace(self, resize=round(_EDGE * size))

    def check(self, size: int, channels: int) -> None:
        """Refuse what does not fit a model.

        Args:
            size: pixels on a side of what it reads.
            channels: of what it reads.

        Raises:
            ConfigError: another number of channels, or an image scaled to less than the model reads.
        """
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, channels):
                raise ConfigError(
                    f"data.pixels.{name} has {len(getattr(self, name))} numbers, and the model reads {channels} channels; "
                    "write one, or one per channel"
                )
        if self.resize is not None and self.resize < size:
            raise ConfigError(
                f"data.pixels.resize {self.resize} is less than the {size} pixels that the model reads; write {size} or more"
            )
        if self.resize is not None and self.resize > _LARGEST:
            raise ConfigError(
                f"data.pixels.resize {self.resize} is more than {_LARGEST}, and each image would be as large"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformsConfig:
    """What training images and their labels go through beside `augment`; nothing unless asked for, and evaluation never."""

    crop: Annotated[
        Literal["torchvision", "inception"], Affects("batches", test="train/data/test_crops.py")
    ] = "torchvision"
    """How images larger than the model's are cropped at random: torchvision's way, or TensorFlow's as big_vision has it."""
    jitter: Annotated[
        float | None, Affects("batches", test="train/data/sources/test_folders.py")
    ] = None
    """In place of a crop: the image as evaluation has it, turned by up to 20 degrees, scaled and stretched by up to a fifth and moved by
    up to an eighth, each times this number; a random crop unless given."""
    mirror: Annotated[bool, Affects("batches", test="train/data/sources/test_folders.py")] = True
    """Mirror images half of the time; a mirrored digit or letter is no digit or letter."""
    randaug_layers: Annotated[int | None, Affects("batches", 1)] = None
    """RandAugment (Cubuk et al. 2020): operations that every image goes through, each drawn from 16; none unless given."""
    randaug_magnitude: Annotated[
        float, Affects("batches", 5.0, given={"data.transforms.randaug_layers": 2})
    ] = 10.0
    """RandAugment: how strong each operation is, from 0 to 10."""
    mixup: Annotated[float, Affects("batches", 0.2)] = 0.0
    """alpha of Beta(alpha, alpha), a batch's share of each image beside the one before it (Zhang et al. 2018); 0 mixes none."""
    cutmix: Annotated[float, Affects("batches", 1.0)] = 0.0
    """alpha of the same share as the area of a box of another image (Yun et al. 2019); with mixup, a batch has one of the two."""
    mix_group: Annotated[
        int | None, Affects("batches", 4, given={"data.transforms.mixup": 0.2})
    ] = None
    """Images of a batch that are mixed with one another, so many in a row, as big_vision mixes those of a device; all unless given."""
    label_smoothing: Annotated[float, Affects("batches", 0.1)] = 0.0
    """Share of each label that all classes have alike (Szegedy et al. 2016)."""
    repeats: Annotated[int, Affects("batches", 2)] = 1
    """Times that a batch shows each of its images, every time transformed anew (Hoffer et al. 2020)."""

    def __post_init__(self) -> None:
        at_least("data.transforms.", self, 1, "randaug_layers", "repeats")
        at_least("data.transforms.", self, 0, "randaug_magnitude", "mixup", "cutmix")
        at_least("data.transforms.", self, 2, "mix_group")
        if self.mix_group is not None and not (self.mixup or self.cutmix):
            raise ConfigError(
                "data.transforms.mix_group is of images that are mixed; add --data.transforms.mixup 0.2, or leave it out"
            )
        if self.jitter is not None and not 0 < self.jitter <= _MOST_JITTER:
            raise ConfigError(
                f"data.transforms.jitter is {self.jitter}; write a number above 0, up to {_MOST_JITTER}, or none to crop at random"
            )
        if self.jitter is not None and self.crop != "torchvision":
            raise ConfigError(
                f"data.transforms.jitter is in place of a crop, and data.transforms.crop is {self.crop}; leave one of them out"
            )
        if self.randaug_magnitude > 10:
            raise ConfigError(
                f"data.transforms.randaug_magnitude is {self.randaug_magnitude}; write a number from 0 to 10"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"data.transforms.label_smoothing is {self.label_smoothing}; write a share in [0, 1)"
            )

    @property
    def soft(self) -> bool:
        """Whether a label is a distribution over classes."""
        return bool(self.mixup or self.cutmix or self.label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Bounds on what a file may unpack to, so that a small file of strangers cannot fill the memory or the disk.

    They change nothing of data that keep them.
    """

    record_mib: Annotated[int, Affects("guards", test="train/data/records/test_limits.py")] = 24
    """MiB that a line of JSON or a value of Parquet may have when it is unpacked."""
    ratio: Annotated[int, Affects("guards", test="train/data/records/test_limits.py")] = 200
    """Times its size on disk that a file may unpack to, in every stretch of 64 MiB of what it holds."""
    megapixels: Annotated[int, Affects("guards", test="train/data/records/test_limits.py")] = 128
    """Millions of pixels of an image."""

    def __post_init__(self) -> None:
        at_least("data.limits.", self, 1, "record_mib", "ratio", "megapixels")


DEFAULT_LIMITS = LimitsConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where batches come from. Batch k is a function of (seed, k, batch_size) alone."""

    name: Annotated[str, Listed("data", "python_corpus")]
    """python_corpus, digits, shapes (endless), text:PATH (a file or folder), records:PATH (JSON lines, Parquet or token ids),
    chat:PATH (JSON lines or Parquet with messages), hf:NAME[:SUBSET] (a data set of the Hugging Face hub, or a folder of one),
    images:PATH (a folder per class), idx:PATH (a folder of IDX files), fashion (Debian's Fashion-MNIST), cifar5m, mix (of data.mix),
    or any TFDS name."""
    mix: Annotated[
        tuple[str, ...],
        conf.arg(metavar="NAME=SOURCE:WEIGHT ..."),
        Listed("data", test="train/data/text/test_mixture.py"),
    ] = ()
    """Several texts by name, each any text that data.name takes, in shares of their weights: code=text:src:0.3 prose=records:books:0.7."""
    evaluate: Annotated[
        tuple[str, ...],
        conf.arg(metavar="NAME=SOURCE ..."),
        Listed("course", test="train/run/evaluation/test_evaluation_sets.py"),
    ] = ()
    """Further sets to evaluate on, by name, each any source that data.name takes: code=text:src prose=records:books."""
    batch_size: Annotated[int, Listed("data", 4)]
    """Sequences or images per optimizer step, over all devices."""
    seed: Annotated[int | None, Affects("data", 5)] = None
    """Seeds data order and augmentation; the run's seed unless given, which then seeds the initialization alone."""
    eval_batch_size: Annotated[int | None, Listed("batches", 8)] = None
    """batch_size unless given."""
    eval_examples: Annotated[int | None, Listed("batches", 20)] = None
    """Use the first so many evaluation examples; all unless given."""
    data_dir: Annotated[
        str | None, Affects("batches", test="train/data/sources/test_published.py")
    ] = None
    """Where prepared datasets lie; the user cache folder unless given."""
    tokenizer: Annotated[str, Listed("data", "bpe:300", given={"model.vocab_size": 300})] = "bytes"
    """bytes, bpe:SIZE (trained on the training text, a mixture's by weight), the path of a tokenizer.json, or ids:SIZE of ids
    made elsewhere."""
    separator: Annotated[str | None, Listed("data", test="train/data/sources/test_records.py")] = (
        None
    )
    """The token that ends every document, such as `<|endoftext|>`; found in the tokenizer by its usual names unless given."""
    special_tokens: Annotated[
        Literal["parse", "text"], Affects("batches", test="train/data/text/test_special_tokens.py")
    ] = "parse"
    """Whether special tokens such as `<|endoftext|>` that are quoted in a text are tokens, as if written on purpose, or plain text."""
    field: Annotated[str, Listed("data", test="train/data/sources/test_records.py")] = "text"
    """Of records: the field or column that has the text; of a chat `messages` unless given."""
    stream: Annotated[bool, Affects("batches", test="train/data/streams/test_streams.py")] = False
    """text:PATH and records:PATH: train on what is tokenized while the rest of it is; hf:NAME always does."""
    chat_template: Annotated[
        str | None, Listed("batches", test="train/data/chats/test_chats.py")
    ] = None
    """Conversations only: a template of jinja2 that makes text of messages; the one beside the tokenizer unless given."""
    loss_on: Annotated[
        Literal["answers", "all"], Affects("batches", test="train/data/chats/test_chats.py")
    ] = "answers"
    """Conversations only: whether what assistants say is trained on, or every token."""
    document_mask: Annotated[bool, Listed("batches", True)] = False
    """Documents of one window do not see one another, and the first token of each is no target; the separator ends its own."""
    reset_positions: Annotated[
        bool, Affects("batches", True, given={"data.document_mask": True})
    ] = False
    """Learned positions begin at 0 in every document of a window."""
    augment: Annotated[bool, Listed("batches", False)] = True
    """Light augmentation of training images."""
    transforms: TransformsConfig = TransformsConfig()
    on_broken: Annotated[
        Literal["stop", "skip"], Affects("data", test="train/data/sources/test_folders.py")
    ] = "stop"
    """Whether a broken image, text, record or file ends the run before it starts, or is left out and counted. For images:, text:,
    records:, chat: and hf:, and mixtures of them."""
    limits: LimitsConfig = DEFAULT_LIMITS
    pixels: PixelsConfig = PixelsConfig()
    train_percent: Annotated[
        int, Affects("batches", test="train/data/sources/test_published.py")
    ] = 100
    """Data sets of TFDS only: percent of the training split that is trained on, the first of it; the rest is left out."""
    split: Annotated[Literal["random", "writer"], Affects("data", "writer")] = "random"
    """digits only: a stratified random split, or test writers never seen in training."""
    noise: Annotated[
        Literal["infilling", "sentinels"] | None,
        Affects("batches", test="train/data/text/test_denoising.py"),
    ] = None
    """What text an encoder-decoder reads: BART's text infilling, of which it writes the whole text, or T5's sentinels, of which it
    writes what they stand for."""
    noise_rate: Annotated[
        float | None, Affects("batches", test="train/data/text/test_denoising.py")
    ] = None
    """Share of tokens that noise cuts; 0.3 (infilling) or 0.15 (sentinels) unless given."""
    noise_span: Annotated[
        float | None, Affects("batches", test="train/config/test_cli_errors.py")
    ] = None
    """Mean tokens of a span that noise cuts; 3 unless given."""

    def __post_init__(self) -> None:
        at_least("data.", self, 1, "batch_size", "eval_batch_size", "eval_examples", "noise_span")
        if self.noise_rate is not None and not 0 < self.noise_rate < 1:
            raise ConfigError(
                f"data.noise_rate is {self.noise_rate}; write a share of the tokens in (0, 1), such as 0.3"
            )
        if self.noise is None and (self.noise_rate or self.noise_span) is not None:
            raise ConfigError(
                "data.noise_rate and data.noise_span are of noise; add data.noise infilling or sentinels"
            )
        at_least("data.", self, 0, "seed")
        if self.reset_positions and not self.document_mask:
            raise ConfigError(
                "data.reset_positions is of documents that do not see one another; add --data.document-mask"
            )
        cropped = "pixels" in source(self.name).reads
        if self.transforms.jitter is not None and not cropped:
            raise ConfigError(
                f"data.transforms.jitter is of images that are scaled, and {self.name} has a way of its own; leave it out"
            )
        if not self.transforms.mirror and not cropped:
            raise ConfigError(
                f"data.transforms.mirror is of images that are scaled, and {self.name} has a way of its own; leave it out, "
                "or write --data.no-augment"
            )
        repeats = self.transforms.repeats
        if self.batch_size % repeats:
            near = nearest_divisor(self.batch_size, repeats)
            raise ConfigError(
                f"data.batch_size {self.batch_size} is not divisible by data.transforms.repeats {repeats}; write repeats {near}"
            )
        if (group := self.transforms.mix_group or self.batch_size) and self.batch_size % group:
            near = nearest_divisor(self.batch_size, group)
            raise ConfigError(
                f"data.batch_size {self.batch_size} is not divisible by data.transforms.mix_group {group}; write mix_group {near}"
            )
        if not 1 <= self.train_percent <= 100:
            raise ConfigError(
                f"data.train_percent is {self.train_percent}; write a whole number from 1 to 100"
            )
        if self.mix and self.name != "mix":
            raise ConfigError(
                f"data.mix names its texts, and data.name is {self.name}; leave that out, or write mix"
            )
        for name in ("name", "data_dir", "tokenizer", "chat_template"):
            check_place(f"data.{name}", getattr(self, name))
        for name, place in self.evaluation_sets.items():
            check_place(f"data.evaluate {name}", place)

    def more_of(self, inputs: ArraySpec) -> dict[str, ArraySpec]:
        """What an example holds beside the model's own: `segments`, the document of every token, and its `positions`."""
        flags = {"segments": self.document_mask, "positions": self.reset_positions}
        return {name: inputs for name, flag in flags.items() if flag}

    @property
    def evaluation_sets(self) -> dict[str, str]:
        """The sources of `evaluate` by name.

        Raises:
            ConfigError: a word of another form, a name twice, or a mixture, which has no text of its own.
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
        """What models of this data read, tokens or images; None where only the data set itself can tell."""
        return source(self.name).task
