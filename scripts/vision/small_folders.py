"""Four small image folders from packages: emoji, icons, Fashion-MNIST and digits, each with several random splits.

    python -m scripts.vision.small_folders FOLDER [--splits 5] [--only emoji icons fashion digits]

Needs `apt-get download` and `dpkg-deb` (Debian or Ubuntu) for the first three, and fontTools for emoji. No image is
installed or committed. `FOLDER/NAME/images/CLASS/*.png` has all images, `FOLDER/NAME/SPLIT/{train,test}/CLASS` links to
them: a fifth of every class is the test part, drawn by the seed SPLIT. Of Fashion-MNIST the first 8,000 training images are
taken, so that it is a small folder too.
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
"""Share of every class that a split tests on."""
FEWEST = 30
"""Images of the smallest class of icons."""
FASHION = 8_000
"""Images of Fashion-MNIST that are taken."""
ICON_CONTEXTS = ("actions", "apps", "categories", "devices", "mimetypes", "places", "status")
"""Folders of an icon theme that are classes."""


class Picture(NamedTuple):
    """An image file to write."""

    class_name: str
    name: str
    """File name, without a suffix."""
    png: bytes


def unpack(package: str, folder: Path) -> Path:
    """Download a package of the distribution and return the folder that its files are unpacked to."""
    files = folder / package
    files.mkdir()
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(archive), str(files)], check=True)
    return files


def emoji(folder: Path) -> Iterator[Picture]:
    """Yield the bitmaps of Noto Color Emoji, whose class is the group of the emoji in Unicode's list.

    Emoji with a skin tone are left out: they are copies of the emoji without.
    """
    # matplotlib brings fontTools, which nothing else here needs.
    fonts = importlib.import_module("fontTools.ttLib")
    font_file = next(unpack("fonts-noto-color-emoji", folder).rglob("NotoColorEmoji.ttf"))
    list_file = next(unpack("unicode-data", folder).rglob("emoji-test.txt"))
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
        if (
            not semicolon
            or not status.strip().startswith("fully-qualified")
            or group == "Component"
        ):
            continue
        points = [int(code, 16) for code in codes.split()]
        if any(0x1F3FB <= point <= 0x1F3FF for point in points):
            continue
        glyphs = tuple(cmap.get(point, "") for point in points if point != 0xFE0F)
        glyph = glyphs[0] if len(glyphs) == 1 else ligatures.get(glyphs)
        if not glyph or glyph in shown or glyph not in bitmaps:
            continue
        shown.add(glyph)
        name = "-".join(f"{point:x}" for point in points)
        yield Picture(
            group.lower().replace(" & ", "_").replace(" ", "_"), name, bitmaps[glyph].imageData
        )


def _ligatures(font: object) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the glyphs of every ligature of a font, and the glyph that stands for them."""
    for lookup in font["GSUB"].table.LookupList.Lookup:  # pyright: ignore[reportIndexIssue]
        for table in lookup.SubTable:
            table = getattr(table, "ExtSubTable", table)
            for first, entries in getattr(table, "ligatures", {}).items():
                for entry in entries:
                    yield (first, *entry.Component), entry.LigGlyph


def icons(folder: Path) -> Iterator[Picture]:
    """Yield the icons of 48 pixels of KDE's theme Oxygen, whose class is the folder of the theme that has them.

    Links to another icon are left out, and so are icons whose bytes another icon has.
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
    pixels = _idx(next(root.rglob("train-images-idx3-ubyte.gz")), 16).reshape(-1, 28, 28)[:FASHION]
    labels = _idx(next(root.rglob("train-labels-idx1-ubyte.gz")), 8)[:FASHION]
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        yield Picture(str(label), f"{index:05}", _png(image))


def _idx(file: Path, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8, offset=header)


def digits(folder: Path) -> Iterator[Picture]:
    """Yield the 1,797 digits that come with scikit-learn, 8 pixels on a side."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    for index, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        yield Picture(str(label), f"{index:04}", _png((image * 255 / 16).round().astype(np.uint8)))


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


def write(name: str, folder: Path, splits: int) -> dict[str, int]:
    """Write a data set below a folder and return its number of images by class; what is there stays as it is."""
    images = folder / name / "images"
    complete = folder / name / "complete"
    if not complete.exists():
        with tempfile.TemporaryDirectory() as temporary:
            for picture in SETS[name](Path(temporary)):
                place = images / picture.class_name
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{picture.name}.png").write_bytes(picture.png)
        complete.touch()
    classes = {path.name: sorted(path.glob("*.png")) for path in sorted(images.iterdir())}
    classes = {class_name: files for class_name, files in classes.items() if len(files) >= FEWEST}
    for seed in range(splits):
        if not (folder / name / str(seed)).exists():
            _link(folder / name / str(seed), seed, classes)
    return {class_name: len(files) for class_name, files in classes.items()}


def _link(split: Path, seed: int, classes: Mapping[str, Sequence[Path]]) -> None:
    """Write one split as folders of links."""
    rng = np.random.default_rng(seed)
    for class_name, files in classes.items():
        tested = round(TEST_SHARE * len(files))
        for rank, index in enumerate(rng.permutation(len(files))):
            place = split / ("test" if rank < tested else "train") / class_name
            place.mkdir(parents=True, exist_ok=True)
            (place / files[index].name).hardlink_to(files[index])


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    folder: Positional[Path]
    splits: int = 5
    """Random splits of each."""
    only: tuple[str, ...] = tuple(SETS)
    """Data sets."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data sets that are not there yet, and print how many images each class has."""
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
