"""A user's own images, a folder per class, read in place: data.name `images:PATH`.

Either PATH/CLASS/*.png, split by the hash of the path within PATH as text is (at least one of each class on each side),
or PATH/train/CLASS/… and PATH/val/CLASS/…, split as given; `records/split_names.py` lists the names of splits.
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
from mupax.train.config.data import DEFAULT_LIMITS, ImageSizes, LimitsConfig
from mupax.train.data import cache, crops, images
from mupax.train.data.interface import DataError
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
"""Suffixes that Pillow registers for documents, films and containers, some of which it only writes."""
_MODES = {1: "L", 3: "RGB"}
_LISTED = 8
_SAMPLED = 512
"""Headers that are read to infer the channels and the size of a folder's images; the first of a bucket are fewer."""
_SAMPLED_REMOTE = 32
_SCAN_SIDE = 64
"""Pixels on a side that the scan draws a JPEG at: all of the file is unpacked, and few pixels are computed."""
_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}
"""What makes the pixels of an image upright, by the orientation in its EXIF data."""
_PIXEL_WEIGHTS = {"AVIF": 3.0, "GIF": 2.0, "ICNS": 4.0, "JPEG2000": 4.0, "TIFF": 2.0, "WEBP": 3.0}
"""Times as much memory as PNG that decoding a pixel takes."""
_PROGRESSIVE_WEIGHT = 1.25
"""A progressive JPEG has the coefficients of all its pixels in memory."""
_MOST_BYTES_IN_MEMORY = 2**28
"""Fitted images of a folder that are kept in memory, at most, so that epochs decode none again."""
_LARGE_PIXELS = 2**24
_LARGE_IMAGES = threading.RLock()
_BAND_PIXELS = 2**22
_PIL_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
_Labelled = list[tuple[str, Path, int]]


@functools.cache
def suffixes() -> frozenset[str]:
    """Endings, in lower case, of the image files that this Pillow reads."""
    return frozenset(Image.registered_extensions()) - _NO_PICTURES


def is_image(name: str) -> bool:
    """Return whether a file of this name is read as an image."""
    return Path(name).suffix.lower() in suffixes()


def not_an_image(name: str) -> str:
    """Return why a file of this name is not read as an image."""
    return f"{Path(name).suffix or 'a file without ending'} is no kind of image that is read"


class Folder(NamedTuple):
    """The images of a folder by class: what is trained on and what evaluates."""

    train: _Labelled
    eval: _Labelled
    classes: list[str]
    """Names in NFC, sorted; a label is a place among them."""
    notes: list[str]
    """Lines for the user: how the folder is split, and what is left out of it."""

    @property
    def digest(self) -> str:
        """A name of the data, made of the files' names and sizes: copies have the same, and large folders are quick."""
        sides = (("train", self.train), ("eval", self.eval))
        named = [(f"{side}/{name}", file) for side, files in sides for name, file, _ in files]
        return cache.digest(*(f"{name}:{file.stat().st_size}" for name, file in named))

    def labelled_as(self, classes: Sequence[str]) -> Folder:
        """Return the same images with labels that count among other classes.

        Args:
            classes: of a model, in its order; every class of the folder is one of them.
        """
        places = {nfc(name): label for label, name in enumerate(classes)}
        labels = [places[name] for name in self.classes]

        def moved(files: _Labelled) -> _Labelled:
            return [(name, file, labels[label]) for name, file, label in files]

        train = moved(self.train)
        eval_ = train if self.eval is self.train else moved(self.eval)
        return self._replace(train=train, eval=eval_, classes=[*classes])


class Files:
    """Image files with labels, decoded when they are asked for.

    Args:
        files: (name, path, label) each.
        channels: 1 for grey, 3 for colour.
        background: behind transparent pixels, as `data.pixels.background` names it.
        limits: bounds on an image.
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
        """Return an image, perhaps scaled down, and its label.

        Args:
            i: number of the image.
            side: pixels that both sides keep at least; all that there are unless given.
        """
        _, path, label = self.files[i]
        return decoded(path, self._channels, str(path), self._background, side, self._limits), label


class KeptFiles:
    """Image files with labels, as evaluation fits them, each decoded once and then kept in memory.

    Args:
        files: image files of any size.
        view: fits an image; draws no numbers.
        size: pixels on a side of a fitted image.
    """

    def __init__(self, files: Files, view: images.View, size: int, channels: int) -> None:
        self._files = files
        self._view = view
        self._pixels = np.zeros((len(files), size, size, channels), np.uint8)
        self._is_there = np.zeros(len(files), bool)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if not self._is_there[i]:  # two threads may decode the same image, to the same pixels
            image, _ = self._files[i]
            self._pixels[i] = self._view([image], np.zeros((1, images.NUMBERS)))[0]
            self._is_there[i] = True
        return self._pixels[i], self._files.files[i][2]


@contextlib.contextmanager
def _opened(file: Path | io.BytesIO, name: str, limits: LimitsConfig) -> Iterator[Image.Image]:
    """Open an image and read its header. Whatever PIL raises on it, also in the block, becomes a DataError with its name.

    Only one large image is open at a time, however many threads decode.
    """
    _prepare_pil(limits)
    with contextlib.ExitStack() as stack:
        try:
            content = (
                file if isinstance(file, (Path, io.BytesIO)) else io.BytesIO(file.read_bytes())
            )
            image = stack.enter_context(Image.open(content))
            if image.mode in ("I", "F"):
                raise ValueError(
                    f"its values have 32 bits and no range (mode {image.mode}); save it with 8 or 16 bits"
                )
            if _checked_pixels(image, name, limits) > _LARGE_PIXELS:
                stack.enter_context(_LARGE_IMAGES)
            yield image
        except (MemoryError, DataError):
            raise
        except Image.DecompressionBombError as error:
            raise DataError(
                f"cannot read the image {name}: {error}. Scale it down, or write --data.limits.megapixels 1000"
            ) from error
        # PIL's plugins raise whatever a damaged file leads them to, such as struct.error, KeyError or EOFError.
        except Exception as error:
            raise DataError(
                f"cannot read the image {name}: {error}. Remove or repair it"
            ) from error


def _checked_pixels(image: Image.Image, name: str, limits: LimitsConfig) -> int:
    """Return the pixels of an opened image; raises LimitError where decoding them would take too much memory."""
    width, height = image.size
    weight = _PIXEL_WEIGHTS.get(image.format or "", 1.0)
    if image.format == "JPEG" and image.info.get("progressive"):
        weight = _PROGRESSIVE_WEIGHT
    if width * height * weight > limits.megapixels * 1e6:
        raise bounds.too_many_pixels(f"the image {name}", width, height, weight, limits)
    return width * height


def _prepare_pil(limits: LimitsConfig) -> None:
    """Let PIL open images as large as the limits say, and ignore its warnings of palettes, EXIF data and large images.

    The warnings name no file, and what matters of them is an error here.
    """
    # No catch_warnings: it changes the process's filters and puts them back, and threads decode side by side.
    if _PIL_WARNINGS not in warnings.filters:
        warnings.filterwarnings("ignore", module=r"PIL\.")
    # PIL has a bound of its own, somewhat above the usual limit: who raises the limit means both.
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
        file: the file or its content.
        channels: 1 for grey, 3 for colour.
        name: what an error calls it.
        background: a colour behind transparent pixels; none leaves out the transparency alone.
        side: a JPEG may be drawn smaller, by a factor of 2, 4 or 8, if both sides keep as many pixels; that is quicker. All
            pixels unless given.
        limits: bounds on its pixels.

    Raises:
        DataError: it is damaged, too large, of values without a range or no image that PIL knows.
    """
    with _opened(file, name, limits) as image:
        return _pixels(image, channels, background, side)


def _pixels(image: Image.Image, channels: int, background: str, side: int | None) -> np.ndarray:
    """Return the pixels of an opened image, as `decoded` does."""
    if side is not None:
        image.draft(None, (side, side))
    image.load()  # before EXIF data are asked for: PIL turns TIFF files itself as it loads them
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # EXIF data that cannot be read say nothing of the image
        orientation = None
    has_background = background != "none" and image.has_transparency_data
    if has_background and image.mode in ("RGBA", "LA"):
        has_background = image.getextrema()[-1] != (255, 255)  # opaque pixels stay as they are
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
        pixels[top:bottom] = np.asarray(band.convert(_MODES[channels])).reshape(
            bottom - top, width, channels
        )
    # Not ImageOps.exif_transpose: it writes the EXIF data anew and fails on values that cameras write and PIL cannot.
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits a value."""
    if image.mode.startswith("I;16"):  # convert would clip at 255
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    return image


def _on_background(image: Image.Image, background: str) -> Image.Image:
    """Return an image with transparency over a colour."""
    picture = image.convert("RGBA")
    return Image.alpha_composite(
        Image.new("RGBA", picture.size, ImageColor.getrgb(background)), picture
    )


def decoding_threads() -> int:
    """Threads that decode images: the cores, up to 16 (each holds a batch)."""
    return min(os.cpu_count() or 2, 16)


def own_images(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """A user's images as batches, cropped and scaled to the model's size.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is images:PATH.
    """
    return opened(split(folder_of(config.name)), config, model, seed, note)


def folder_of(name: str) -> Path:
    """Return the folder that a data.name images:PATH means; raises DataError where there is none."""
    path = path_of(name.removeprefix("images:"))
    if not path.is_dir():
        raise DataError(
            f"no folder {path}; write data.name as images:PATH, with a folder that has a folder per class"
        )
    return path


def opened(
    folder: Folder, config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> images.ImageData:
    """Return the images of a folder as batches, after every image was decoded once.

    Args:
        folder: of `split` or `held_out`.
        config, model, seed, note: as `mupax.train.data.load` takes them.

    Raises:
        DataError: classes or channels that the model has not, or broken images, unless `config.on_broken` is skip.
    """
    train, eval_, classes, lines = folder
    vision = images.vision_model(config.name, model, classes)
    check_channels(config.name, vision.channels)
    pixels = config.pixels.resolved(vision.image_size)
    pixels.check(vision.image_size, vision.channels)
    for line in lines:
        note(line)
    # An evaluation alone has the same files on both sides.
    scan = _scanned(
        train,
        [] if train is eval_ else eval_,
        vision.channels,
        pixels.background,
        config.limits,
        note,
    )
    if broken := scan.broken:
        if config.on_broken == "stop":
            first = next(iter(broken.values()))
            raise DataError(
                f"{first} ({len(broken)} of {scan.count} are broken), or add --data.on-broken skip"
            )
        note(
            f"left out, as broken: {len(broken)} of {scan.count} images: {_listed(sorted(broken))}"
        )
        before = {label for _, _, label in train}
        evaluates_only = train is eval_
        train = [item for item in train if str(item[1]) not in broken]
        eval_ = [item for item in eval_ if str(item[1]) not in broken]
        empty = sorted(before - {label for _, _, label in train})
        if empty and not evaluates_only:
            raise DataError(
                f"class {classes[empty[0]]} in {config.name} has no whole image to train on; repair some of its images"
            )
        if not eval_:
            raise DataError(f"{config.name} has no whole image to evaluate on; repair some")
    for line in scan.cautions(vision.channels, pixels.background):
        note(line)
    facts: dict[str, str | int] = {"digest": folder._replace(train=train, eval=eval_).digest}
    if broken:
        facts["broken_images"] = len(broken)
    if scan.copies:
        facts["copied_images"] = scan.copies
    size = vision.image_size
    fitted = crops.fitted(pixels, size)
    views = crops.training(config, size), fitted
    train_files = Files(train, vision.channels, pixels.background, config.limits)
    eval_files = Files(eval_, vision.channels, pixels.background, config.limits)
    jitter = config.transforms.jitter
    if (
        jitter is not None
        and (len(train) + len(eval_)) * size**2 * vision.channels <= _MOST_BYTES_IN_MEMORY
    ):
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


class _Scan(NamedTuple):
    """Findings of decoding every image of a folder once."""

    count: int
    """Images that were decoded."""
    evaluated: int
    """Images of them on the side that evaluates."""
    broken: dict[str, DataError]
    """By path, why an image cannot be decoded."""
    colour: int
    """Images in colour."""
    hidden: int
    """Images of one colour over the background, though their transparency is of several values."""
    copies: int
    """Images that evaluate and whose bytes are those of an image that trains."""

    def cautions(self, channels: int, background: str) -> list[str]:
        """Return lines on what is likely not meant.

        Args:
            channels: that the model reads.
            background: behind transparent pixels.
        """
        lines = []
        if channels == 1 and self.colour:
            lines.append(
                f"caution: {self.colour} of {self.count} images are in colour, and the model reads grey; "
                "--model.channels 3 reads colour"
            )
        if self.hidden:
            other = "white" if background in ("black", "none") else "black"
            over = "without their transparency" if background == "none" else f"over {background}"
            lines.append(
                f"caution: {self.hidden} of {self.count} images are of a single colour {over}: their picture is in the "
                f"transparency; --data.pixels.background {other} may show it"
            )
        if self.copies:
            lines.append(
                f"caution: {self.copies} of {self.evaluated} images to evaluate on are exact copies of images to train on, "
                "so that their scores say little"
            )
        return lines


class _Look(NamedTuple):
    """Findings of decoding one image."""

    error: DataError | None = None
    colour: bool = False
    hidden: bool = False


def _look(path: Path, channels: int, background: str, limits: LimitsConfig) -> _Look:
    """Decode an image as training does."""
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
    """Return whether an image with transparency has pixels of more than one level of it."""
    width, height = image.size
    rows = max(1, _BAND_PIXELS // width)
    levels: set[Any] = set()
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(height, top + rows)))
        levels.update(band.convert("RGBA").getchannel("A").getextrema())
    return len(levels) > 1


def _has_colour(image: Image.Image) -> bool:
    """Return whether an image may hold more than greys, by its header and its palette."""
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
    """Decode every image once: a file to refuse is better named now than in mid-run.

    What was whole stays known by its name and content. What was broken is looked at again, for it may be repaired.
    """
    files = [*train, *eval_]
    stats = [path.stat() for _, path, _ in files]
    content = contents.digest([path for _, path, _ in files], note)
    digest = cache.digest(f"{len(train)}:{channels}:{background}:{limits.megapixels}", content)
    prefix = "broken:"

    def looks(paths: list[Path]) -> dict[str, _Look]:
        def look(path: Path) -> _Look:
            return _look(path, channels, background, limits)

        with ThreadPool(decoding_threads()) as pool:
            results = pool.imap(look, paths, chunksize=64)
            return {str(path): result for path, result in zip(paths, results, strict=True)}

    def numbers() -> dict[str, float]:
        note(f"decoding {len(files)} images, to find broken ones")
        all_looks = looks([path for _, path, _ in files])
        sizes = [stat.st_size for stat in stats]
        return {
            "colour": float(sum(look.colour for look in all_looks.values())),
            "hidden": float(sum(look.hidden for look in all_looks.values())),
            "copies": float(_copies(train, eval_, sizes)),
            **{f"{prefix}{path}": 1.0 for path, look in all_looks.items() if look.error},
        }

    scanned = cache.remembered(f"scanned-{digest}", numbers)
    suspects = [path for _, path, _ in files if f"{prefix}{path}" in scanned]
    broken = (
        {path: look.error for path, look in looks(suspects).items() if look.error}
        if suspects
        else {}
    )
    counts = {name: int(scanned.get(name, 0)) for name in ("colour", "hidden", "copies")}
    return _Scan(len(files), len(eval_), broken, **counts)


def _copies(train: _Labelled, eval_: _Labelled, sizes: Sequence[int]) -> int:
    """Return how many evaluation images have the bytes of a training image. Only files of one size are read.

    Args:
        sizes: in bytes, of the training images and then of the others.
    """
    train_sizes = sizes[: len(train)]
    eval_sizes = sizes[len(train) :]
    shared_sizes = set(train_sizes) & set(eval_sizes)

    def contents(files: _Labelled, lengths: Sequence[int]) -> Iterator[bytes]:
        paths = [
            path
            for (_, path, _), length in zip(files, lengths, strict=True)
            if length in shared_sizes
        ]
        with ThreadPool(decoding_threads()) as pool:
            yield from pool.imap(_content_digest, paths, chunksize=64)

    trained = set(contents(train, train_sizes)) - {b""}
    return sum(content in trained for content in contents(eval_, eval_sizes))


def _content_digest(path: Path) -> bytes:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
    except OSError:  # the scan has named it
        return b""


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def check_channels(name: str, channels: int) -> None:
    """Refuse a number of channels that no decoded image has.

    Args:
        name: what an error calls the data.
        channels: that the model reads.

    Raises:
        DataError: neither 1 (grey) nor 3 (colour).
    """
    if channels not in _MODES:
        raise DataError(
            f"the model reads {channels} channels and {name} has pictures; write --model.channels 3, or 1 for grey"
        )


def nfc(name: str) -> str:
    """Return a name as one sequence of characters: macOS writes é as two, and others as one."""
    return unicodedata.normalize("NFC", name)


class _Part(NamedTuple):
    """One folder of class folders."""

    classes: dict[str, _Labelled]
    """Files by class, whose labels are not known yet (-1); a class folder without images has none."""
    skipped: dict[str, str]

    @property
    def size(self) -> int:
        return sum(len(files) for files in self.classes.values())


def _part(root: Path, path: Path) -> _Part:
    """Return the images of the class folders in `path`.

    Args:
        root: folder that names of images begin in.
        path: the root, or a part of it.
    """
    listing = files_below(path)
    prefix = "" if path == root else f"{nfc(path.relative_to(root).as_posix())}/"
    skipped = {prefix + name: reason for name, reason in listing.skipped.items()}
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
        # Without it another class would take its label, and no line would stand out.
        if "/" not in name and reason.startswith("cannot be read"):
            raise DataError(
                f"{path / name} {reason}; make it readable or take it out of the folder"
            )
    return _Part({name: sorted(classes[name]) for name in sorted(classes)}, skipped)


def _folder_names(path: Path) -> list[str]:
    """Return the names of the visible folders in a folder, without links to a folder that holds it."""
    try:
        names = [sub.name for sub in path.iterdir() if not is_hidden(sub.name) and sub.is_dir()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not is_remote(path):
        here = path.resolve()
        names = [name for name in names if not here.is_relative_to((path / name).resolve())]
    return sorted(names)


def _parts(root: Path, names: Sequence[str]) -> _Part:
    """Return the images of several folders of class folders as one part."""
    classes: dict[str, _Labelled] = {}
    skipped: dict[str, str] = {}
    for name in names:
        part = _part(root, root / name)
        skipped |= part.skipped
        for label, files in part.classes.items():
            classes[label] = sorted([*classes.get(label, []), *files])
    return _Part({name: classes[name] for name in sorted(classes)}, skipped)


def split(path: Path) -> Folder:
    """Return the images of a folder, split as its top-level folders are named, else by the hash of each path.

    Raises:
        DataError: the folder has no images by class, or two parts for one purpose.
    """
    names = _folder_names(path)
    if not names:
        raise DataError(
            f"{path} has no folders in it; images:PATH takes a folder that has a folder of images per class"
        )
    if not all(split_of(name) for name in names):
        words = [name for name in names if split_of(name)]
        ordinary = [name for name in names if not split_of(name)]
        purposes = {split_of(name) for name in words}
        notes = []
        if "train" in purposes and len(purposes) > 1:
            notes.append(
                f"caution: {', '.join(words)} are classes here and no parts, since {_listed(ordinary)} is no name of a part; "
                "take it out of the folder if they are parts"
            )
        return _split_by_hash(path, _part(path, path), notes)
    # Test images as competitions give them out have no classes.
    labelled = [name for name in names if _folder_names(path / name)]
    notes = [
        f"{path / name} is not used: it has no folders of classes"
        for name in names
        if name not in labelled
    ]
    training = [name for name in labelled if split_of(name) == "train"]
    if not training:
        raise DataError(
            f"{path} has the folders {', '.join(names)}, which are names of parts, and no folder of classes to train on; "
            "put folders of classes into train/, or give the classes other names"
        )
    parts = by_name(labelled, str(path))
    if parts is None:
        return _split_by_hash(path, _parts(path, training), notes)
    train = _parts(path, parts.train)
    eval_ = _parts(path, parts.evaluation)
    where = ", ".join(str(path / name) for name in parts.evaluation)
    _check_filled(train, path / parts.train[0])
    if unknown := sorted(eval_.classes.keys() - train.classes.keys()):
        there = ", ".join(str(path / name) for name in parts.train)
        raise DataError(f"{where} has class folders that {there} has not: {', '.join(unknown[:5])}")
    if not eval_.size:
        raise DataError(
            f"{where} has no image to evaluate on; put images into its folders of classes, or remove it"
        )
    classes = [*train.classes]
    notes = [f"{path}: {parts.describe()}", *notes, *summary(train.skipped | eval_.skipped)]
    return Folder(_numbered(train, classes), _numbered(eval_, classes), classes, notes)


def _split_by_hash(path: Path, part: _Part, notes: list[str]) -> Folder:
    """Return the images of one part, some of each class held out by the hash of their paths."""
    _check_filled(part, path)
    train: _Labelled = []
    eval_: _Labelled = []
    for label, (name, files) in enumerate(part.classes.items()):
        if len(files) < 2:
            raise DataError(
                f"class folder {path / name} has one image; give it at least two, to train and to test"
            )
        ranked = sorted(
            ((item, file, label) for item, file, _ in files), key=lambda item: corpus.rank(item[0])
        )
        # Ranks below the share are the hash split; one of each class at least on either side.
        count = sum(corpus.side(item) == "eval" for item, _, _ in ranked)
        count = min(max(count, 1), len(ranked) - 1)
        eval_ += ranked[:count]
        train += ranked[count:]
    classes = [*part.classes]
    if len(classes) == 1:
        raise DataError(
            f"{path} has one class folder, {classes[0]}, and nothing to tell it from; put the other classes beside it"
        )
    return Folder(sorted(train), sorted(eval_), classes, [*notes, *summary(part.skipped)])


def held_out(path: Path, classes: Sequence[str] | None) -> Folder:
    """Return the images of a folder that no run was trained on, to evaluate on: all, or its test or validation part.

    Args:
        path: an existing folder.
        classes: of the model, where they have names.

    Raises:
        DataError: the folder has no images by class.
    """
    names = _folder_names(path)
    model_classes = set(map(nfc, classes or ()))
    parts = (
        bool(names)
        and all(split_of(name) for name in names)
        and not model_classes.issuperset(map(nfc, names))
    )
    if not parts:
        part = _part(path, path)
        where = f"all {{count}} images of {path}"
    else:
        labelled = [name for name in names if _folder_names(path / name)]
        by_name(labelled, str(path))  # refuses two parts for one purpose
        chosen: list[str] = []
        for purpose in ("test", "validation", "train"):
            chosen = chosen or [name for name in labelled if split_of(name) == purpose]
        part = _parts(path, chosen)
        unused = [name for name in names if name not in chosen]
        where = f"all {{count}} images of {', '.join(str(path / name) for name in chosen)}"
        if unused:
            where += f"; {', '.join(unused)} is not used"
    if not part.size:
        raise DataError(f"{path} has no folder of images per class; give a folder that has one")
    filled = _Part({name: files for name, files in part.classes.items() if files}, part.skipped)
    files = _numbered(filled, [*filled.classes])
    notes = [f"evaluating on {where.format(count=f'{len(files):,}')}", *summary(part.skipped)]
    return Folder(files, files, [*filled.classes], notes)


def to_evaluate(name: str, run: Mapping[str, Any]) -> Folder:
    """Return the images that a model is evaluated on: the held-out ones of the folder that it was trained on, or all of another.

    Args:
        name: images:PATH.
        run: facts that the run recorded of its data; none for weights without a run.

    Raises:
        DataError: the folder has no images by class.
    """
    path = folder_of(name)
    trained_on = str(run.get("name", ""))
    if not trained_on.startswith("images:"):
        return held_out(path, run.get("class_names"))
    before = path_of(trained_on.removeprefix("images:"))
    own = name == trained_on or (
        not is_remote(path) and before.exists() and path.resolve() == before.resolve()
    )
    try:
        folder = split(path)
    except DataError:
        if own:
            raise
        return held_out(
            path, run.get("class_names")
        )  # one class, or one image of a class, can be evaluated on
    if not own and folder.digest != run.get("digest"):  # a copy of the run's folder has its digest
        return held_out(path, run.get("class_names"))
    total = len(folder.train) + len(folder.eval)
    line = f"evaluating on the {len(folder.eval):,} held-out images of {path}, which has {total:,}"
    return folder._replace(notes=[line, *folder.notes])


def without_images(folder: Folder, classes: Sequence[str]) -> list[str]:
    """Return a line that names classes of a model that a folder has no images of, if there are any."""
    there = set(folder.classes)
    missing = [name for name in classes if nfc(name) not in there]
    return [f"there are no images of {_listed(missing)}"] if missing else []


def _numbered(part: _Part, classes: Sequence[str]) -> _Labelled:
    """Return the images of a part, sorted by name, with their places among the classes as labels."""
    labels = {name: label for label, name in enumerate(classes)}
    return sorted(
        (item, file, labels[name])
        for name, files in part.classes.items()
        for item, file, _ in files
    )


def _check_filled(part: _Part, path: Path) -> None:
    for name, files in part.classes.items():
        if not files:
            raise DataError(
                f"class folder {path / name} has no image; put images there or remove it"
            )


def sizes(config: DataConfig) -> ImageSizes | None:
    """Return the sizes of a model for a folder of images, by its classes and by headers of a sample of its files.

    Args:
        config: whose name is images:PATH; a folder that is not there has no sizes.
    """
    path = path_of(config.name.removeprefix("images:"))
    if not path.is_dir():
        return None
    folder = split(path)
    files = [file for _, file, _ in sorted([*folder.train, *folder.eval])]
    most = _SAMPLED_REMOTE if is_remote(path) else _SAMPLED
    places = np.linspace(0, len(files) - 1, min(most, len(files))).round().astype(int)
    with ThreadPool(decoding_threads()) as pool:
        sampled = pool.map(lambda place: _header(files[place], config.limits), places)
    headers = [header for header in sampled if header is not None]
    if not headers:  # all broken, which the run says
        return ImageSizes(len(folder.classes), 3, None, train_images=len(folder.train))
    colour = any(header.colour for header in headers)
    shorter = sorted(header.shorter for header in headers)
    channels = 3 if colour else 1
    side = shorter[len(shorter) // 2]
    return ImageSizes(len(folder.classes), channels, side, train_images=len(folder.train))


class _Header(NamedTuple):
    """Size and colours of an image file, from its header."""

    shorter: int
    """Pixels on the shorter side."""
    colour: bool


def _header(path: Path, limits: LimitsConfig) -> _Header | None:
    try:
        with _opened(path, str(path), limits) as image:
            return _Header(min(image.size), _has_colour(image))
    except DataError:
        return None
