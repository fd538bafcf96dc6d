"""Write four small image folders from packages: emoji, icons, Fashion-MNIST and digits.

    python -m scripts.vision.small_folders FOLDER [--splits 5] [--only emoji icons fashion digits]

The first three need `apt-get download` and `dpkg-deb` (Debian or Ubuntu), and emoji need fontTools.
No image is installed or committed. `FOLDER/NAME/images/CLASS/*.png` has all images, and
`FOLDER/NAME/SPLIT/{train,test}/CLASS` links to them. A random fifth of every class, drawn with the
seed SPLIT, is the test part. Fashion-MNIST has its first 8,000 training images only, so that its
folder is small, too.
"""

from __future__ import annotations

import gzip
import importlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tyro.conf import Positional

from scripts import harness

TEST_SHARE = 0.2
"""Share of the images of every class in the test part of a split."""
FEWEST = 30
"""Least number of images of a class; smaller classes are left out."""
FASHION = 8_000
"""Number of images of Fashion-MNIST that are written."""
ICON_CONTEXTS = ("actions", "apps", "categories", "devices", "mimetypes", "places", "status")
"""Folders of the icon theme that become classes."""
SKIN_TONES = range(0x1F3FB, 0x1F3FF + 1)
"""Code points of skin tones."""
VARIATION_SELECTOR = 0xFE0F
"""Code point that asks for the coloured form of an emoji; fonts have no glyph for it."""


class Picture(NamedTuple):
    """Image file to write."""

    class_name: str
    name: str
    """File name without a suffix."""
    png: bytes
    """Content of the file."""


def unpack(package: str, folder: Path) -> Path:
    """Download a package of the distribution, unpack it below `folder`, and return its folder."""
    files = folder / package
    files.mkdir()
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(archive), str(files)], check=True)
    return files


def file_below(folder: Path, name: str) -> Path:
    """Return the first file of this name in the folder of an unpacked package.

    Raises:
        FileNotFoundError: The package has no such file, perhaps because its version is another.
    """
    file = next(folder.rglob(name), None)
    if file is None:
        raise FileNotFoundError(f"the package unpacked in {folder} has no file {name}")
    return file


def emoji(folder: Path) -> Iterator[Picture]:
    """Yield the bitmaps of Noto Color Emoji. Their classes are the groups of Unicode's list.

    Emoji with a skin tone are left out, because they are copies of the emoji without one.
    """
    # matplotlib brings fontTools, which nothing else here needs.
    fonts = importlib.import_module("fontTools.ttLib")
    font_file = file_below(unpack("fonts-noto-color-emoji", folder), "NotoColorEmoji.ttf")
    list_file = file_below(unpack("unicode-data", folder), "emoji-test.txt")
    font = fonts.TTFont(font_file)
    bitmaps = font["CBDT"].strikeData[0]
    cmap = font.getBestCmap() or {}
    ligatures = dict(_ligatures(font))
    group = ""
    shown: set[str] = set()
    for line in list_file.read_text().splitlines():
        if line.startswith("# group: "):
            group = line.removeprefix("# group: ")
        codes, semicolon, status = line.partition(";")
        # Lines with another status repeat an emoji without its variation selector.
        is_emoji = bool(semicolon) and status.strip().startswith("fully-qualified")
        # Components are parts of emoji, such as skin tones and hair.
        if not is_emoji or group == "Component":
            continue
        points = [int(code, 16) for code in codes.split()]
        if any(point in SKIN_TONES for point in points):
            continue
        glyphs = []
        for point in points:
            if point != VARIATION_SELECTOR:
                glyphs.append(cmap.get(point, ""))
        glyph = glyphs[0] if len(glyphs) == 1 else ligatures.get(tuple(glyphs))
        # Some emoji share a glyph, and a split must not test a picture that it trains on.
        if not glyph or glyph in shown or glyph not in bitmaps:
            continue
        shown.add(glyph)
        name = "-".join(f"{point:x}" for point in points)
        class_name = group.lower().replace(" & ", "_").replace(" ", "_")
        yield Picture(class_name, name, bitmaps[glyph].imageData)


def _ligatures(font: object) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the glyphs of every ligature of a font, with the glyph that stands for them.

    Args:
        font: `TTFont` of fontTools.
    """
    for lookup in font["GSUB"].table.LookupList.Lookup:  # pyright: ignore[reportIndexIssue]
        for table in lookup.SubTable:
            # Large tables are behind an extension table.
            table = getattr(table, "ExtSubTable", table)
            for first, entries in getattr(table, "ligatures", {}).items():
                for entry in entries:
                    yield (first, *entry.Component), entry.LigGlyph


def icons(folder: Path) -> Iterator[Picture]:
    """Yield the icons of 48 pixels of KDE's theme Oxygen. Their classes are the theme's folders.

    Links to other icons and icons with the same bytes as another icon are left out.
    """
    root = unpack("oxygen-icon-theme", folder)
    written: set[bytes] = set()
    for context in ICON_CONTEXTS:
        (place,) = root.rglob(f"48x48/{context}")
        for file in sorted(place.glob("*.png")):
            content = file.read_bytes()
            if file.is_symlink() or content in written:
                continue
            written.add(content)
            yield Picture(context, file.stem, content)


def fashion(folder: Path) -> Iterator[Picture]:
    """Yield the first training images of Fashion-MNIST, 28 pixels on a side."""
    root = unpack("dataset-fashion-mnist", folder)
    pixels = _idx(file_below(root, "train-images-idx3-ubyte.gz"), 16).reshape(-1, 28, 28)[:FASHION]
    labels = _idx(file_below(root, "train-labels-idx1-ubyte.gz"), 8)[:FASHION]
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        yield Picture(str(label), f"{index:05}", _png(image))


def _idx(file: Path, header: int) -> np.ndarray:
    """Return the bytes of a compressed IDX file without its header.

    Args:
        header: Number of bytes of the header.
    """
    return np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8, offset=header)


def digits(folder: Path) -> Iterator[Picture]:
    """Yield the 1,797 digits that come with scikit-learn, 8 pixels on a side."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    for index, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        # Pixels are from 0 to 16.
        pixels = (image * 255 / 16).round().astype(np.uint8)
        yield Picture(str(label), f"{index:04}", _png(pixels))


def _png(pixels: np.ndarray) -> bytes:
    """Return a grey image as a PNG file."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


SETS: dict[str, Callable[[Path], Iterator[Picture]]] = {
    "emoji": emoji,
    "icons": icons,
    "fashion": fashion,
    "digits": digits,
}
"""Name of a data set to the function that yields its images, given a folder for downloads."""


def write(name: str, folder: Path, splits: int) -> dict[str, int]:
    """Write a data set below `folder` and return its number of images by class.

    Images and splits that are already there stay as they are.
    """
    images = folder / name / "images"
    complete = folder / name / "complete"
    if not complete.exists():
        with tempfile.TemporaryDirectory() as temporary:
            for picture in SETS[name](Path(temporary)):
                place = images / picture.class_name
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{picture.name}.png").write_bytes(picture.png)
        # Without this mark, the images of an interrupted command are written again.
        complete.touch()
    classes = {}
    for path in sorted(images.iterdir()):
        files = sorted(path.glob("*.png"))
        if len(files) >= FEWEST:
            classes[path.name] = files
    for seed in range(splits):
        if not (folder / name / str(seed)).exists():
            _link(folder / name / str(seed), seed, classes)
    return {class_name: len(files) for class_name, files in classes.items()}


def _link(split: Path, seed: int, classes: Mapping[str, Sequence[Path]]) -> None:
    """Write one split as folders of links.

    Args:
        classes: Name of a class to its images.
    """
    rng = np.random.default_rng(seed)
    for class_name, files in classes.items():
        num_test = round(TEST_SHARE * len(files))
        for rank, index in enumerate(rng.permutation(len(files))):
            part = "test" if rank < num_test else "train"
            place = split / part / class_name
            place.mkdir(parents=True, exist_ok=True)
            (place / files[index].name).hardlink_to(files[index])


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    folder: Positional[Path]
    """Folder to write to."""
    splits: int = 5
    """Number of random splits of every data set."""
    only: tuple[str, ...] = tuple(SETS)
    """Data sets to write; all by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return 0: write missing data sets, and print the size of each class."""
    args = harness.parse(Options, argv)
    harness.check_names(args.only, SETS)
    for name in args.only:
        counts = write(name, args.folder, args.splits)
        total = sum(counts.values())
        listed = ", ".join(f"{class_name} {count}" for class_name, count in counts.items())
        print(f"{name}: {total:,} images in {len(counts)} classes: {listed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
