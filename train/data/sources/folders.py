"""Loader of a user's own images, a folder per class, read in place: data.name `images:PATH`.

Images are split into training and evaluation in one of two ways:

* PATH/CLASS/*.png are split by the hash of the path within PATH. Both sides get at least one image
  of each class.
* PATH/train/CLASS/... and PATH/val/CLASS/... are split as the folders say.
  `records/split_names.py` lists the words in names of such folders.

In this file, a part is a folder such as train that has folders of classes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageColor

from mupax.disk import is_remote, path_of
from mupax.terminal import counted
from mupax.train.config.data import DEFAULT_LIMITS, ImageSizes, LimitsConfig
from mupax.train.data import cache, crops, images
from mupax.train.data.interface import (
    DataError,
    ReadError,
    is_system_error,
    may_pass,
    unreadable,
)
from mupax.train.data.records import bounds, contents, corpus
from mupax.train.data.records.listing import files_below, is_hidden, summary
from mupax.train.data.records.split_names import by_name, split_of

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig
    from mupax.zoo.configs import ModelConfig

_NO_PICTURES = frozenset(
    {
        ".bufr",
        ".emf",
        ".eps",
        ".fit",
        ".fits",
        ".flc",
        ".fli",
        ".gbr",
        ".grib",
        ".h5",
        ".hdf",
        ".iim",
    }
    | {".mpeg", ".mpg", ".palm", ".pcd", ".pdf", ".ps", ".pxr", ".wmf"}
)
"""Suffixes that Pillow registers and that are not read: documents, films and containers."""
_MODES = {1: "L", 3: "RGB"}
_LISTED = 8
"""Number of names that a message lists."""
_SAMPLED = 512
"""Number of image headers that are read to infer the channels and the size of a folder's images."""
_SAMPLED_REMOTE = 32
"""Number of image headers that are read in a folder in a bucket, where reading is slow."""
_SCAN_SIDE = 64
"""Fewest pixels on a side to which a JPEG is decoded when all images are scanned for broken ones.

The complete file is unpacked, but few pixels are computed, which is quicker.
"""
_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}
"""Function that turns an array of pixels upright, by the orientation in the image's EXIF data."""
_PIXEL_WEIGHTS = {"AVIF": 3.0, "GIF": 2.0, "ICNS": 4.0, "JPEG2000": 4.0, "TIFF": 2.0, "WEBP": 3.0}
"""Memory for decoding a pixel, relative to PNG, by format."""
_PROGRESSIVE_WEIGHT = 1.25
"""Memory for decoding a pixel of a progressive JPEG, relative to PNG.

The coefficients of the complete image are held in memory.
"""
_MOST_BYTES_IN_MEMORY = 2**28
"""Largest size of all fitted images for which they are kept in memory after the first epoch."""
_LARGE_PIXELS = 2**24
"""Number of pixels above which only one image is open at a time, to save memory."""
_LARGE_IMAGES = threading.RLock()
_BAND_PIXELS = 2**22
"""Number of pixels of a band of rows. Large images are converted band by band, to save memory."""
_PIL_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
_Labelled = list[tuple[str, Path, int]]
"""Images as tuples of a path relative to the user's folder, a path, and a label from 0."""


@functools.cache
def suffixes() -> frozenset[str]:
    """Return the suffixes, in lower case, of the image files that the installed Pillow reads."""
    return frozenset(Image.registered_extensions()) - _NO_PICTURES


def is_image(name: str) -> bool:
    """Return whether a file of this name is read as an image."""
    return Path(name).suffix.lower() in suffixes()


def not_an_image(name: str) -> str:
    """Return the rest of a sentence that says why a file of this name is not read as an image."""
    return f"{Path(name).suffix or 'a file without ending'} is no kind of image that is read"


class Folder(NamedTuple):
    """Labelled images of a folder, split into training images and evaluation images.

    Attributes:
        train: Training images. For a folder that is only evaluated, the same list object as `eval`.
        eval: Evaluation images.
    """

    train: _Labelled
    eval: _Labelled
    classes: list[str]
    """Names of the classes, in the order of the labels. They are sorted, and in Unicode's NFC."""
    notes: list[str]
    """Lines for the user about the split and the files that are left out."""

    @property
    def digest(self) -> str:
        """Digest of the images' relative paths and sizes. Copies of a folder have the same digest.

        Contents are not read, which would take long. Sizes are read from disk at every access.
        """
        parts: list[str] = []
        for side, files in (("train", self.train), ("eval", self.eval)):
            for name, file, _ in files:
                parts.append(f"{side}/{name}:{contents.stamp(file)[0]}")
        return cache.digest(*parts)

    def labelled_as(self, classes: Sequence[str]) -> Folder:
        """Return a folder with the same images, whose labels are those of a model.

        Args:
            classes: Names of the model's classes by label. They must include all classes of the
                folder.
        """
        # File systems differ in how they compose accents: NFC makes equal names equal.
        label_of = {}
        for label, name in enumerate(classes):
            label_of[nfc(name)] = label
        labels = [label_of[name] for name in self.classes]

        def relabelled(files: _Labelled) -> _Labelled:
            return [(name, file, labels[label]) for name, file, label in files]

        train = relabelled(self.train)
        # A folder that is only evaluated has one list for both sides, which must stay one list.
        eval_ = train if self.eval is self.train else relabelled(self.eval)
        return self._replace(train=train, eval=eval_, classes=[*classes])


class Files:
    """Sequence of image files with labels. An image is decoded each time that it is indexed.

    Args:
        files: Tuples of a name, a path and a label.
        channels: 1 for grey, 3 for colour.
        background: Colour behind transparent pixels, as `data.pixels.background` names it.
        limits: Bounds on the number of pixels of an image.
    """

    def __init__(
        self,
        files: _Labelled,
        channels: int,
        background: str,
        limits: LimitsConfig = DEFAULT_LIMITS,
    ) -> None:
        self.files = files
        self._limits = limits
        self._channels = channels
        self._background = background

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.at_least(i, None)

    def at_least(self, i: int, side: int | None) -> tuple[np.ndarray, int]:
        """Return image i, uint8 [h, w, channels], perhaps scaled down, and its label.

        Args:
            i: Index of the image, from 0.
            side: Fewest pixels that both sides keep. None returns the full image.

        Raises:
            DataError: The image is damaged or too large.
        """
        _, path, label = self.files[i]
        pixels = decoded(path, self._channels, str(path), self._background, side, self._limits)
        return pixels, label


class KeptFiles:
    """Sequence of labelled images, fitted to the model's size. Each is decoded once and then kept.

    Pixels are kept in memory as uint8 [size, size, channels].

    Args:
        view: View that fits an image to the model's size and uses no random numbers.
        size: Pixels on a side of a fitted image.
        channels: Channels of the images of `files`.
    """

    def __init__(self, files: Files, view: images.View, size: int, channels: int) -> None:
        self._files = files
        self._view = view
        self._pixels = np.zeros((len(files), size, size, channels), np.uint8)
        self._is_decoded = np.zeros(len(files), bool)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        # Two threads may decode the same image. Both then write the same pixels.
        if not self._is_decoded[i]:
            image, _ = self._files[i]
            self._pixels[i] = self._view([image], np.zeros((1, images.NUMBERS)))[0]
            self._is_decoded[i] = True
        return self._pixels[i], self._files.files[i][2]


@contextlib.contextmanager
def _opened(file: Path | io.BytesIO, name: str, limits: LimitsConfig) -> Iterator[Image.Image]:
    """Context manager that opens an image, reads its header and holds the image open.

    Any error of PIL becomes a DataError with the image's name, also one that is raised in the
    `with` block. Of all threads, only one has a large image open at a time.

    Raises:
        DataError: The image is damaged, missing or may not be read, or has 32 bits per value.
        ReadError: The disk or the bucket does not answer.
        LimitError: The image has more pixels than the limits allow.
    """
    _prepare_pil(limits)
    with contextlib.ExitStack() as stack:
        try:
            # PIL cannot open a path in a bucket, so the content is read first.
            is_local = isinstance(file, (Path, io.BytesIO))
            content = file if is_local else io.BytesIO(file.read_bytes())
            image = stack.enter_context(Image.open(content))
            if image.mode in ("I", "F"):
                raise ValueError(
                    f"its values have 32 bits and no range (mode {image.mode}); "
                    "save it with 8 or 16 bits"
                )
            if _checked_pixels(image, name, limits) > _LARGE_PIXELS:
                stack.enter_context(_LARGE_IMAGES)
            yield image
        # A lack of memory is not the file's fault. The other two already say what is wrong.
        except (MemoryError, DataError, ReadError):
            raise
        except Image.DecompressionBombError as error:
            raise DataError(
                f"cannot read the image {name}: {error} "
                f"Scale it down, or write --data.limits.megapixels {_megapixels_of(error, name)}"
            ) from error
        # PIL's plugins raise whatever a damaged file leads them to, such as struct.error, KeyError
        # or EOFError.
        except Exception as error:
            # An image that the disk does not give now is not broken, and must not be left out.
            if is_system_error(error) and may_pass(error):
                message = f"cannot read the image {name}: {error.strerror}"
                raise ReadError(message) from error
            raise DataError(
                f"cannot read the image {name}: {error}. Remove or repair it"
            ) from error


def _megapixels_of(error: Image.DecompressionBombError, name: str) -> str:
    """Return the `data.limits.megapixels` that an image needs, rounded up, as text.

    Args:
        error: Error of PIL, which opens no image with more than twice as many pixels as its limit.
        name: Name of the image. Its ending tells the format, since PIL did not.
    """
    # The error has no attributes: "Image size (8100 pixels) exceeds limit of 6000 pixels".
    pixels = re.search(r"\d+", str(error))
    if pixels is None:
        return "N with a larger N"
    file_format = Image.registered_extensions().get(Path(name).suffix.lower(), "")
    return str(bounds.megapixels(int(pixels[0]), _PIXEL_WEIGHTS.get(file_format, 1.0)))


def _checked_pixels(image: Image.Image, name: str, limits: LimitsConfig) -> int:
    """Check the number of pixels of an opened image against the limits, and return it.

    Raises:
        LimitError: Decoding the image would take too much memory.
    """
    width, height = image.size
    weight = _PIXEL_WEIGHTS.get(image.format or "", 1.0)
    if image.format == "JPEG" and image.info.get("progressive"):
        weight = _PROGRESSIVE_WEIGHT
    if width * height * weight > limits.megapixels * 1e6:
        raise bounds.too_many_pixels(f"the image {name}", width, height, weight, limits)
    return width * height


def _prepare_pil(limits: LimitsConfig) -> None:
    """Let PIL open images as large as the limits allow, and silence its warnings, in this process.

    The warnings are about palettes, EXIF data and large images, and name no file. This file raises
    errors for what matters.
    """
    # No catch_warnings: it restores the filters of the process while other threads still decode.
    if _PIL_WARNINGS not in warnings.filters:
        warnings.filterwarnings("ignore", module=r"PIL\.")
    # PIL refuses more than 2 * MAX_IMAGE_PIXELS, by default 179 megapixels. A higher limit must
    # raise that bound, too.
    if limits.megapixels > DEFAULT_LIMITS.megapixels and Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, limits.megapixels * 10**6)


def decoded(
    file: Path | io.BytesIO,
    channels: int,
    name: str,
    background: str = "white",
    side: int | None = None,
    limits: LimitsConfig = DEFAULT_LIMITS,
) -> np.ndarray:
    """Return the pixels of an image file, upright, uint8 [h, w, channels].

    Args:
        file: Path of the file, or its content.
        channels: 1 for grey, 3 for colour.
        name: Name of the image in error messages.
        background: Colour behind transparent pixels. `none` ignores the transparency. The default
            is white.
        side: Fewest pixels that both sides keep. A JPEG may be decoded smaller by a factor of 2, 4
            or 8, which is faster. None keeps all pixels.
        limits: Bounds on the number of pixels.

    Raises:
        DataError: The image is damaged, too large, of a format that PIL does not read, or has 32
            bits per value, whose range is unknown.
    """
    with _opened(file, name, limits) as image:
        return _pixels(image, channels, background, side)


def _pixels(image: Image.Image, channels: int, background: str, side: int | None) -> np.ndarray:
    """Decode an opened image, turned upright and laid over a background, uint8 [h, w, channels].

    Args:
        channels: 1 for grey, 3 for colour.
        background: Colour behind transparent pixels, or `none` to ignore the transparency.
        side: Fewest pixels that both sides keep, so that a JPEG may be decoded smaller. None keeps
            all pixels.
    """
    if side is not None:
        # Must come before `load`; afterwards `draft` does nothing.
        image.draft(None, (side, side))
    # Before the orientation is read, because PIL turns TIFF files itself when it loads them.
    image.load()
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        # Damaged EXIF data do not make the image itself unreadable.
        orientation = None

    has_background = background != "none" and image.has_transparency_data
    if has_background and image.mode in ("RGBA", "LA"):
        # An image whose pixels are all opaque stays as it is.
        has_background = image.getextrema()[-1] != (255, 255)

    width, height = image.size
    pixels = np.empty((height, width, channels), np.uint8)
    # In bands, so that a large image is never held in several modes at once.
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        band = image if rows >= height else image.crop((0, top, width, bottom))
        band = _eight_bits(band)
        if has_background:
            band = _on_background(band, background)
        converted = np.asarray(band.convert(_MODES[channels]))
        pixels[top:bottom] = converted.reshape(bottom - top, width, channels)

    # Not ImageOps.exif_transpose: it writes the EXIF data anew, and PIL cannot write all values
    # that cameras write.
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    # `turn` returns a strided view. A copy is contiguous and does not keep the original alive.
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert an image of 16 bits per value to 8 bits. Return any other image unchanged."""
    # `convert` would clip 16 bits at 255.
    if image.mode.startswith("I;16"):
        # 65535 // 257 = 255, so white stays white.
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    return image


def _on_background(image: Image.Image, background: str) -> Image.Image:
    """Lay an image with transparency over a colour, and return it in mode RGBA."""
    foreground = image.convert("RGBA")
    plain = Image.new("RGBA", foreground.size, ImageColor.getrgb(background))
    return Image.alpha_composite(plain, foreground)


def decoding_threads() -> int:
    """Return the number of threads that decode images: one per core, up to 16."""
    # Bounded, because each thread holds a batch in memory.
    return min(os.cpu_count() or 2, 16)


def own_images(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """Load a user's images as batches, cropped and scaled to the model's size.

    The first time, every image is decoded to find broken ones (`opened`). The arguments are those
    of `mupax.train.data.load`. `config.name` is images:PATH.

    Raises:
        DataError: There are no images by class, the model does not fit, or images are broken and
            `config.on_broken` is stop.
    """
    return opened(split(folder_of(config.name)), config, model, seed, note)


def folder_of(name: str) -> Path:
    """Return the path in a data.name images:PATH. Raise `DataError` if it is no folder."""
    path = path_of(name.removeprefix("images:"))
    if not path.is_dir():
        raise DataError(
            f"no folder {path}; write data.name as images:PATH, with a folder that has a folder "
            "per class"
        )
    return path


def opened(
    folder: Folder, config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """Return the images of a folder as batches, after a check of all images.

    The check decodes every image, to find those that cannot be read (broken images). It is done
    once, and its findings are cached on disk. With `config.on_broken` skip, broken images are left
    out.

    Args:
        folder: Result of `split`, `held_out` or `to_evaluate`.
        model: Model settings that the images must fit.
        seed: Seed of the order and of augmentation.
        note: Function that takes one line of text about work that takes long, and about the folder.

    Raises:
        DataError: The model has other classes or channels, or images are broken and
            `config.on_broken` is stop.
        ConfigError: `config.pixels` does not fit the size or the channels of the model's images.
    """
    classes = folder.classes
    vision = images.vision_model(config.name, model, classes)
    check_channels(config.name, vision.channels)
    pixels = config.pixels.resolved(vision.image_size)
    pixels.check(vision.image_size, vision.channels)
    for line in folder.notes:
        note(line)

    # A folder from `held_out` has the same list on both sides. It is scanned once.
    scanned_eval = [] if folder.train is folder.eval else folder.eval
    scan = _scanned(
        folder.train, scanned_eval, vision.channels, pixels.background, config.limits, note
    )
    if scan.broken:
        folder = _without_broken(folder, config, scan, note)
    for line in scan.cautions(vision.channels, pixels.background):
        note(line)

    # After broken images are left out, so that the digest is of what is trained on.
    facts: dict[str, str | int] = {"digest": folder.digest}
    if scan.broken:
        facts["broken_images"] = len(scan.broken)
    if scan.copies:
        facts["copied_images"] = scan.copies

    size = vision.image_size
    fitted = crops.fitted(pixels, size)
    views = crops.training(config, size), fitted
    train_files = Files(folder.train, vision.channels, pixels.background, config.limits)
    eval_files = Files(folder.eval, vision.channels, pixels.background, config.limits)
    jitter = config.transforms.jitter
    num_images = len(folder.train) + len(folder.eval)
    # Jitter works on fitted images, so these can be kept. Other views crop the original every time.
    fits_in_memory = num_images * size**2 * vision.channels <= _MOST_BYTES_IN_MEMORY
    if jitter is not None and fits_in_memory:
        train_files = KeptFiles(train_files, fitted, size, vision.channels)
        eval_files = KeptFiles(eval_files, fitted, size, vision.channels)
        views = crops.Jitter(jitter, config.transforms.mirror), images.as_is
    return images.ImageData(
        config,
        train_files,
        eval_files,
        views=views,
        seed=seed,
        threads=decoding_threads(),
        class_names=classes,
        pixels=pixels,
        facts=facts,
    )


def _without_broken(folder: Folder, config: DataConfig, scan: _Scan, note: cache.Note) -> Folder:
    """Return a folder without its broken images, and tell the user which are left out.

    Raises:
        DataError: `config.on_broken` is stop, a class has no training image left, or no evaluation
            image is left.
    """
    broken = scan.broken
    if config.on_broken == "stop":
        first = next(iter(broken.values()))
        raise DataError(
            f"{first} ({len(broken)} of {scan.count} are broken), or add --data.on-broken skip"
        )
    note(
        f"left out, as broken: {len(broken)} of "
        f"{counted(scan.count, 'image')}: {_listed(sorted(broken))}"
    )

    train = [item for item in folder.train if str(item[1]) not in broken]
    eval_ = [item for item in folder.eval if str(item[1]) not in broken]
    labels_before = {label for _, _, label in folder.train}
    empty = sorted(labels_before - {label for _, _, label in train})
    # A folder that is only evaluated, with one list for both sides, may lose a class.
    if empty and folder.train is not folder.eval:
        raise DataError(
            f"class {folder.classes[empty[0]]} in {config.name} has no whole image to train on; "
            "repair some of its images"
        )
    if not eval_:
        raise DataError(f"{config.name} has no whole image to evaluate on; repair some")
    return folder._replace(train=train, eval=eval_)


class _Scan(NamedTuple):
    """Findings of decoding every image of a folder once."""

    count: int
    """Number of decoded images."""
    evaluated: int
    """Number of decoded images on the evaluation side."""
    broken: dict[str, DataError]
    """Error of each image that cannot be decoded, by path."""
    colour: int
    """Number of images that may have colours, rather than only grey values."""
    hidden: int
    """Number of images whose picture is only in their transparency.

    Laid over the background, all their pixels have one colour, but the transparency varies.
    """
    copies: int
    """Number of evaluation images whose file is the same, byte for byte, as a training image's."""

    def cautions(self, channels: int, background: str) -> list[str]:
        """Return lines that warn the user of likely mistakes, such as colour images read as grey.

        Args:
            channels: Number of channels that the model reads.
            background: Colour behind transparent pixels, or `none`.
        """
        lines = []
        if channels == 1 and self.colour:
            lines.append(
                f"caution: {self.colour} of {self.count} images are in colour, and the model reads "
                "grey; --model.channels 3 reads colour"
            )
        if self.hidden:
            contrast = "white" if background in ("black", "none") else "black"
            over = "without their transparency" if background == "none" else f"over {background}"
            lines.append(
                f"caution: {self.hidden} of {self.count} images are of a single colour {over}: their "
                f"picture is in the transparency; --data.pixels.background {contrast} may show it"
            )
        if self.copies:
            lines.append(
                f"caution: {self.copies} of {self.evaluated} images to evaluate on are exact copies of "
                "images to train on, so that their scores say little"
            )
        return lines


class _Look(NamedTuple):
    """Findings of decoding one image.

    Attributes:
        error: Error of a broken image. `None` if the image can be decoded.
        colour: True if the image may have colours, rather than only grey values.
        hidden: True if the picture is only in the transparency: laid over the background, all
            pixels have one colour, but the transparency varies.
    """

    error: DataError | None = None
    colour: bool = False
    hidden: bool = False


def _look(path: Path, channels: int, background: str, limits: LimitsConfig) -> _Look:
    """Decode one image at a small size, to find out whether it is broken and what its pixels show.

    Args:
        channels: Channels that the model reads, 1 for grey or 3 for colour.
        background: Colour behind transparent pixels, or `none`.
    """
    try:
        with _opened(path, str(path), limits) as image:
            colour = _has_colour(image)
            pixels = _pixels(image, channels, background, _SCAN_SIDE)
            hidden = False
            is_plain = (pixels.min(axis=(0, 1)) == pixels.max(axis=(0, 1))).all()
            if is_plain and image.has_transparency_data:
                hidden = _has_levels_of_transparency(image)
    except DataError as error:
        return _Look(error)
    return _Look(None, colour, hidden)


def _has_levels_of_transparency(image: Image.Image) -> bool:
    """Return whether some pixels of an image are more transparent than others."""
    width, height = image.size
    rows = max(1, _BAND_PIXELS // width)
    levels: set[Any] = set()
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(height, top + rows)))
        levels.update(band.convert("RGBA").getchannel("A").getextrema())
    return len(levels) > 1


def _has_colour(image: Image.Image) -> bool:
    """Return whether an image may have colours other than grey, by its header and its palette."""
    if image.mode in ("P", "PA"):
        colours = np.array(image.getpalette("RGB") or [], np.uint8).reshape(-1, 3)
        return bool((colours != colours[:, :1]).any())
    return image.mode not in ("1", "L", "LA", "La", "I", "F") and not image.mode.startswith("I;16")


def _scanned(
    train: _Labelled,
    eval_: _Labelled,
    channels: int,
    background: str,
    limits: LimitsConfig,
    note: cache.Note,
) -> _Scan:
    """Decode every image once, so that a broken file is named now and not in the middle of a run.

    The findings are cached on disk, under the paths and contents of the files. Images that were
    broken are decoded again in every run, because another version of PIL may read them.

    Args:
        eval_: Evaluation images. Empty if they are the same as the training images.
        channels: Channels that the model reads, 1 for grey or 3 for colour.
        background: Colour behind transparent pixels, or `none`.
    """
    files = [*train, *eval_]
    paths = [path for _, path, _ in files]
    sizes = [contents.stamp(path)[0] for path in paths]
    content = contents.digest(paths, note)
    digest = cache.digest(f"{len(train)}:{channels}:{background}:{limits.megapixels}", content)
    prefix = "broken:"

    def look_at(chosen_paths: list[Path]) -> dict[str, _Look]:
        def look(path: Path) -> _Look:
            return _look(path, channels, background, limits)

        with ThreadPool(decoding_threads()) as pool:
            results = pool.imap(look, chosen_paths, chunksize=64)
            results_by_path = {}
            for path, result in zip(chosen_paths, results, strict=True):
                results_by_path[str(path)] = result
            return results_by_path

    def compute() -> dict[str, float]:
        note(f"decoding {counted(len(files), 'image')}, to find broken ones")
        looks = look_at(paths)
        numbers = {
            "colour": float(sum(look.colour for look in looks.values())),
            "hidden": float(sum(look.hidden for look in looks.values())),
            "copies": float(_copies(train, eval_, sizes)),
        }
        for path, look in looks.items():
            if look.error:
                numbers[f"{prefix}{path}"] = 1.0
        return numbers

    numbers = cache.remembered(f"scanned-{digest}", compute)
    # Images that failed earlier are decoded again, because another version of PIL may read them.
    suspects = [path for path in paths if f"{prefix}{path}" in numbers]
    broken: dict[str, DataError] = {}
    if suspects:
        for path, look in look_at(suspects).items():
            if look.error:
                broken[path] = look.error
    return _Scan(
        count=len(files),
        evaluated=len(eval_),
        broken=broken,
        colour=int(numbers.get("colour", 0)),
        hidden=int(numbers.get("hidden", 0)),
        copies=int(numbers.get("copies", 0)),
    )


def _copies(train: _Labelled, eval_: _Labelled, sizes: Sequence[int]) -> int:
    """Return the number of evaluation images whose file equals a training image's, byte for byte.

    Args:
        sizes: Bytes of each training file, then of each evaluation file.
    """
    train_sizes = sizes[: len(train)]
    eval_sizes = sizes[len(train) :]
    # Only files with a size that occurs on both sides are read.
    shared_sizes = set(train_sizes) & set(eval_sizes)

    def digests(files: _Labelled, lengths: Sequence[int]) -> Iterator[bytes]:
        paths = []
        for (_, path, _), length in zip(files, lengths, strict=True):
            if length in shared_sizes:
                paths.append(path)
        with ThreadPool(decoding_threads()) as pool:
            yield from pool.imap(_content_digest, paths, chunksize=64)

    # An unreadable file has the empty digest, and would match every other unreadable file.
    train_digests = set(digests(train, train_sizes)) - {b""}
    return sum(digest in train_digests for digest in digests(eval_, eval_sizes))


def _content_digest(path: Path) -> bytes:
    """Return a digest of a file's content, or empty bytes if the file may not be read.

    Raises:
        ReadError: The disk or the bucket does not answer.
    """
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError as error:
        if may_pass(error):
            raise ReadError(f"cannot read the image {path}: {error.strerror}") from error
        # The scan has already named the file as broken.
        return b""


def _listed(names: list[str]) -> str:
    """Return the first eight names and the number of the others, for a message."""
    listed = ", ".join(names[:_LISTED])
    if len(names) <= _LISTED:
        return listed
    return f"{listed} and {len(names) - _LISTED} more"


def check_channels(name: str, channels: int) -> None:
    """Raise an error if images cannot be decoded to this number of channels.

    Args:
        name: Name of the data for error messages.
        channels: Number of channels that the model reads.

    Raises:
        DataError: The number is neither 1 (grey) nor 3 (colour).
    """
    if channels not in _MODES:
        raise DataError(
            f"the model reads {channels} channels and {name} has pictures; write --model.channels 3, "
            "or 1 for grey"
        )


def nfc(name: str) -> str:
    """Return a name in Unicode's form NFC, so that names from all file systems can be compared.

    For example, macOS writes é as two characters.
    """
    return unicodedata.normalize("NFC", name)


class _Part(NamedTuple):
    """Images of a folder that has one folder per class, and the files that are left out of it."""

    classes: dict[str, _Labelled]
    """Images by name of the class. Labels are -1, because not all classes are known yet.

    A class may have no image.
    """
    skipped: dict[str, str]
    """Reason why a file or folder is left out, by its path relative to the user's folder."""

    @property
    def size(self) -> int:
        """Number of images."""
        return sum(len(files) for files in self.classes.values())


def _part(root: Path, path: Path) -> _Part:
    """Return the images of a folder that has one folder per class, and the files left out of it.

    Args:
        root: User's folder, to which the names of images are relative.
        path: Folder that has the folders of classes: `root`, or a folder in it such as train.

    Raises:
        DataError: A class folder cannot be read.
    """
    listing = files_below(path)
    prefix = "" if path == root else f"{nfc(path.relative_to(root).as_posix())}/"
    skipped = {}
    for name, reason in listing.skipped.items():
        skipped[prefix + name] = reason
    unread = {name for name in listing.skipped if "/" not in name}
    classes: dict[str, _Labelled] = {}
    for name in _folder_names(path):
        if name not in unread:
            classes.setdefault(nfc(name), [])
    for name, file in listing.files:
        if "/" not in name:
            skipped[prefix + name] = "lies beside the folders of classes"
        elif not is_image(name):
            skipped[prefix + name] = not_an_image(file.name)
        else:
            classes[nfc(name.partition("/")[0])].append((prefix + nfc(name), file, -1))
    for name, reason in listing.skipped.items():
        # Without this class the labels of later classes would shift, and no message would tell.
        if "/" not in name and reason.startswith("cannot be read"):
            raise DataError(
                f"{path / name} {reason}; make it readable or take it out of the folder"
            )
    sorted_classes = {}
    for name in sorted(classes):
        sorted_classes[name] = sorted(classes[name])
    return _Part(sorted_classes, skipped)


def _folder_names(path: Path) -> list[str]:
    """Return the sorted names of the visible folders in a folder.

    Links to the folder itself or to a folder that contains it are left out.

    Raises:
        DataError: The folder is missing or may not be read.
        ReadError: The disk does not answer.
    """
    try:
        names = []
        for sub in path.iterdir():
            if not is_hidden(sub.name) and sub.is_dir():
                names.append(sub.name)
    except OSError as error:
        raise unreadable(f"{path} cannot be read: {error.strerror}", error) from error
    # A link to a folder above would count as a class with all images. A bucket has no links.
    if not is_remote(path):
        real_path = path.resolve()
        outside = []
        for name in names:
            if not real_path.is_relative_to((path / name).resolve()):
                outside.append(name)
        names = outside
    return sorted(names)


def _parts(root: Path, names: Sequence[str]) -> _Part:
    """Return the images of several folders, each with one folder per class, joined by class.

    Args:
        root: User's folder, to which the names of images are relative.
        names: Names of the folders in `root`, such as train.
    """
    classes: dict[str, _Labelled] = {}
    skipped: dict[str, str] = {}
    for name in names:
        part = _part(root, root / name)
        skipped |= part.skipped
        for label, files in part.classes.items():
            classes[label] = sorted([*classes.get(label, []), *files])
    return _Part({name: classes[name] for name in sorted(classes)}, skipped)


def split(path: Path) -> Folder:
    """Return the images of a user's folder, split into training and evaluation.

    If the names of all top-level folders have words such as train and val, these folders are the
    split. If there are only folders for training, the hash of each path splits their images.
    Otherwise the top-level folders are classes, and the hash splits the images.

    Raises:
        DataError: The folder has no images by class, or names have different words for the same
            part of the split, such as val and dev.
    """
    names = _folder_names(path)
    if not names:
        raise DataError(
            f"{path} has no folders in it; images:PATH takes a folder that has a folder of images "
            "per class"
        )
    if all(split_of(name) for name in names):
        return _split_by_names(path, names)

    words = [name for name in names if split_of(name)]
    ordinary = [name for name in names if not split_of(name)]
    purposes = {split_of(name) for name in words}
    notes = []
    if "train" in purposes and len(purposes) > 1:
        notes.append(
            f"caution: {', '.join(words)} are classes here and no parts, since {_listed(ordinary)} is "
            "no name of a part; take it out of the folder if they are parts"
        )
    return _split_by_hash(path, _part(path, path), notes)


def _split_by_names(path: Path, names: list[str]) -> Folder:
    """Return the images of a folder whose top-level folders all have names such as train and val.

    Top-level folders without folders of classes are not used. If there is no folder to evaluate on,
    the training images are split by hash.

    Raises:
        DataError: There is nothing to train on, a class has no training image, an evaluation class
            is no training class, there is no evaluation image, or names have different words for
            the same part of the split.
    """
    # The test images of a competition often have no folders of classes.
    labelled = [name for name in names if _folder_names(path / name)]
    unlabelled = [name for name in names if name not in labelled]
    notes = []
    for name in unlabelled:
        notes.append(f"{path / name} is not used: it has no folders of classes")
    training = [name for name in labelled if split_of(name) == "train"]
    if not training:
        raise DataError(
            f"{path} has the folders {', '.join(names)}, which are names of parts, and no folder of "
            "classes to train on; put folders of classes into train/, or give the classes other names"
        )
    parts = by_name(labelled, str(path))
    if parts is None:
        return _split_by_hash(path, _parts(path, training), notes)

    train = _parts(path, parts.train)
    eval_ = _parts(path, parts.evaluation)
    eval_folders = ", ".join(str(path / name) for name in parts.evaluation)
    _check_filled(train, path / parts.train[0])
    unknown = sorted(eval_.classes.keys() - train.classes.keys())
    if unknown:
        train_folders = ", ".join(str(path / name) for name in parts.train)
        raise DataError(
            f"{eval_folders} has class folders that {train_folders} has not: {', '.join(unknown[:5])}"
        )
    if not eval_.size:
        raise DataError(
            f"{eval_folders} has no image to evaluate on; put images into its folders of classes, or "
            "remove it"
        )
    classes = [*train.classes]
    notes = [f"{path}: {parts.describe()}", *notes, *summary(train.skipped | eval_.skipped)]
    return Folder(_numbered(train, classes), _numbered(eval_, classes), classes, notes)


def _split_by_hash(path: Path, part: _Part, notes: list[str]) -> Folder:
    """Split the images of each class by the hash of their paths into training and evaluation.

    About 8 % are for evaluation, and at least one image of each class is on either side.

    Args:
        path: Folder that has the folders of classes, for messages.
        notes: Lines for the user that come before those about files left out.

    Raises:
        DataError: A class has fewer than two images, or there is only one class.
    """
    _check_filled(part, path)
    train: _Labelled = []
    eval_: _Labelled = []
    for label, (name, files) in enumerate(part.classes.items()):
        if len(files) < 2:
            raise DataError(
                f"class folder {path / name} has one image; give it at least two, to train and to "
                "test"
            )
        labelled = [(item, file, label) for item, file, _ in files]
        ranked = sorted(labelled, key=lambda item: corpus.rank(item[0]))
        # `corpus.side` is "eval" below a bound of the rank, so the first images are for evaluation.
        # Each side gets at least one image of each class.
        count = sum(corpus.side(item) == "eval" for item, _, _ in ranked)
        count = min(max(count, 1), len(ranked) - 1)
        eval_ += ranked[:count]
        train += ranked[count:]
    classes = [*part.classes]
    if len(classes) == 1:
        raise DataError(
            f"{path} has one class folder, {classes[0]}, and nothing to tell it from; put the other "
            "classes beside it"
        )
    return Folder(sorted(train), sorted(eval_), classes, [*notes, *summary(part.skipped)])


def held_out(path: Path, classes: Sequence[str] | None) -> Folder:
    """Return the images of a folder to evaluate a model on that was not trained on the folder.

    If the names of all top-level folders have words such as train and test, and are not classes of
    the model, these are the images of the test folders. Without test folders they are those of the
    validation folders, and without these those of the training folders. Otherwise they are all
    images of the folder. `train` and `eval` of the result are the same list. Classes without images
    are left out.

    Args:
        classes: Names of the model's classes. None if they have no names.

    Raises:
        DataError: The folder has no images by class.
    """
    names = _folder_names(path)
    model_classes = set(map(nfc, classes or ()))
    are_classes = model_classes.issuperset(map(nfc, names))
    if names and all(split_of(name) for name in names) and not are_classes:
        labelled = [name for name in names if _folder_names(path / name)]
        # `by_name` raises an error if two parts have the same purpose.
        by_name(labelled, str(path))
        chosen: list[str] = []
        for purpose in ("test", "validation", "train"):
            chosen = chosen or [name for name in labelled if split_of(name) == purpose]
        part = _parts(path, chosen)
        place = ", ".join(str(path / name) for name in chosen)
        unused = [name for name in names if name not in chosen]
        if unused:
            place += f"; {', '.join(unused)} is not used"
    else:
        part = _part(path, path)
        place = str(path)
    if not part.size:
        raise DataError(f"{path} has no folder of images per class; give a folder that has one")
    filled = _Part({name: files for name, files in part.classes.items() if files}, part.skipped)
    files = _numbered(filled, [*filled.classes])
    evaluated = counted(len(files), "image", ",")
    notes = [f"evaluating on all {evaluated} of {place}", *summary(part.skipped)]
    # The same list on both sides marks a folder that is only evaluated.
    return Folder(files, files, [*filled.classes], notes)


def to_evaluate(name: str, run: Mapping[str, Any]) -> Folder:
    """Return the images of a folder to evaluate a trained model on.

    If the model was trained on this folder or on a copy of it, these are the evaluation images that
    the run held out from training. Otherwise the result is that of `held_out`.

    Args:
        name: Value of data.name, images:PATH, with the folder to evaluate on.
        run: Facts that the run recorded of its data, of which `name`, `class_names` and `digest`
            are used. Empty for weights without a run.

    Raises:
        DataError: The folder has no images by class.
    """
    path = folder_of(name)
    trained_on = str(run.get("name", ""))
    if not trained_on.startswith("images:"):
        return held_out(path, run.get("class_names"))

    trained_path = path_of(trained_on.removeprefix("images:"))
    is_own = name == trained_on
    if not is_own and not is_remote(path) and trained_path.exists():
        is_own = path.resolve() == trained_path.resolve()
    try:
        folder = split(path)
    except DataError:
        if is_own:
            raise
        # A folder that cannot be split, such as one with a single class, can still be evaluated on.
        return held_out(path, run.get("class_names"))
    # A copy of the run's folder has its digest.
    if not is_own and folder.digest != run.get("digest"):
        return held_out(path, run.get("class_names"))
    total = len(folder.train) + len(folder.eval)
    line = f"evaluating on the {len(folder.eval):,} held-out images of {path}, which has {total:,}"
    return folder._replace(notes=[line, *folder.notes])


def without_images(folder: Folder, classes: Sequence[str]) -> list[str]:
    """Return a line for the user that names the classes without an image in a folder.

    Returns:
        List with the line, or an empty list if all classes have images.
    """
    folder_classes = set(folder.classes)
    missing = [name for name in classes if nfc(name) not in folder_classes]
    return [f"there are no images of {_listed(missing)}"] if missing else []


def _numbered(part: _Part, classes: Sequence[str]) -> _Labelled:
    """Return all images of a part, sorted by name, with their labels set.

    Args:
        classes: Names of all classes, in the order of their labels.
    """
    labels = {name: label for label, name in enumerate(classes)}
    numbered: _Labelled = []
    for name, files in part.classes.items():
        numbered += [(item, file, labels[name]) for item, file, _ in files]
    return sorted(numbered)


def _check_filled(part: _Part, path: Path) -> None:
    """Raise `DataError` if a class has no image.

    Args:
        path: Folder of the classes, for the message.
    """
    for name, files in part.classes.items():
        if not files:
            raise DataError(
                f"class folder {path / name} has no image; put images there or remove it"
            )


def sizes(config: DataConfig) -> ImageSizes | None:
    """Return the number of classes, the channels and the image size that a folder of images needs.

    They are the defaults of a model for this data. Channels and size (the median shorter side) come
    from the headers of a sample of the files. If no header can be read, there are 3 channels and
    `side` is None. The result is None if there is no such folder.

    Args:
        config: Data settings. `config.name` is images:PATH.

    Raises:
        DataError: The folder has no images by class.
    """
    path = path_of(config.name.removeprefix("images:"))
    if not path.is_dir():
        return None
    folder = split(path)
    files = [file for _, file, _ in sorted([*folder.train, *folder.eval])]
    most = _SAMPLED_REMOTE if is_remote(path) else _SAMPLED
    indices = np.linspace(0, len(files) - 1, min(most, len(files))).round().astype(int)
    with ThreadPool(decoding_threads()) as pool:
        sampled = pool.map(lambda index: _header(files[index], config.limits), indices)
    headers = [header for header in sampled if header is not None]
    if not headers:
        # All sampled images are broken. The run raises an error when it loads the data.
        return ImageSizes(len(folder.classes), 3, None, train_images=len(folder.train))
    has_colour = any(header.colour for header in headers)
    channels = 3 if has_colour else 1
    shorter_sides = sorted(header.shorter for header in headers)
    median_side = shorter_sides[len(shorter_sides) // 2]
    return ImageSizes(len(folder.classes), channels, median_side, train_images=len(folder.train))


class _Header(NamedTuple):
    """Size and colours of an image file, from its header."""

    shorter: int
    """Pixels on the shorter side."""
    colour: bool
    """True if the image may have colours."""


def _header(path: Path, limits: LimitsConfig) -> _Header | None:
    """Return the size and colours of an image file from its header, or None if it is broken."""
    try:
        with _opened(path, str(path), limits) as image:
            return _Header(min(image.size), _has_colour(image))
    except DataError:
        return None
