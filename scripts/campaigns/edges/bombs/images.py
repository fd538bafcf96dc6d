"""Samples of small image files that decode to huge images, and of one large honest photograph."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from scripts.campaigns.edges.bombs.sample import (
    EITHER,
    LOADS,
    REFUSED,
    Sample,
    first_batches,
    loading,
)

PIXELS = "--data.limits.megapixels"
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_READ = loading("images:images", images=True)
_READ_THE_OTHERS = loading("images:images", images=True, on_broken="skip")


def samples() -> Iterator[Sample]:
    """Yield every sample of an image."""
    files: dict[str, tuple[Callable[[], bytes], tuple[int, ...], str]] = {
        "png: 13,000 x 13,000, black and white": (partial(_png, 13_000, 13_000), REFUSED, PIXELS),
        "png: 60,000 x 60,000, black and white": (partial(_png, 60_000, 60_000), REFUSED, PIXELS),
        "png: 11,000 x 11,000, black and white": (partial(_png, 11_000, 11_000), LOADS, ""),
        "png: 9,000 x 9,000, palette": (partial(_drawn, "PNG", "P", 9000), LOADS, ""),
        "png: 11,000 x 11,000, colour": (partial(_drawn, "PNG", "RGB", 11_000), LOADS, ""),
        "png: 11,000 x 11,000, transparent": (partial(_drawn, "PNG", "RGBA", 11_000), LOADS, ""),
        "png: 11,000 x 11,000, 16 bits": (partial(_drawn, "PNG", "I;16", 11_000), LOADS, ""),
        "png: 100,000,000 x 1": (partial(_png, 100_000_000, 1), LOADS, ""),
        "png: 1 x 1,000,000": (partial(_png, 1, 1_000_000), LOADS, ""),
        "png: 2^31 x 2^31 in its header": (partial(_png_header, 2**31 - 1, 2**31 - 1), REFUSED, ""),
        "png: a text of 60 MB": (_png_text, REFUSED, ""),
        "png: a colour profile of 200 MB": (_png_profile, EITHER, ""),
        "jpeg: 11,000 x 11,000": (partial(_drawn, "JPEG", "RGB", 11_000), LOADS, ""),
        "jpeg: 11,000 x 11,000, turned": (
            partial(_drawn, "JPEG", "RGB", 11_000, turned=True),
            LOADS,
            "",
        ),
        "jpeg: 10,000 x 10,000, progressive": (
            partial(_drawn, "JPEG", "RGB", 10_000, progressive=True),
            LOADS,
            "",
        ),
        "jpeg: 10,000 x 10,000, CMYK": (partial(_drawn, "JPEG", "CMYK", 10_000), LOADS, ""),
        "jpeg: 14,000 x 14,000": (partial(_drawn, "JPEG", "L", 14_000), REFUSED, PIXELS),
        "jpeg: 65,500 x 65,500 in its header": (_jpeg_header, REFUSED, ""),
        "jpeg: 60 kB of EXIF": (_jpeg_exif, LOADS, ""),
        "gif: 65,535 x 65,535": (_gif_header, REFUSED, PIXELS),
        "gif: 8,000 x 7,900": (partial(_drawn, "GIF", "P", 7950), LOADS, ""),
        "gif: 5,000 frames": (_frames, LOADS, ""),
        "webp: 12,000 x 12,000": (partial(_drawn, "WEBP", "RGB", 12_000), REFUSED, PIXELS),
        "webp: 6,400 x 6,400": (partial(_drawn, "WEBP", "RGB", 6400), LOADS, ""),
        "webp: 6,400 x 6,400, transparent": (partial(_drawn, "WEBP", "RGBA", 6400), LOADS, ""),
        "tiff: 20,000 x 20,000": (partial(_drawn, "TIFF", "1", 20_000), REFUSED, PIXELS),
        "tiff: 7,900 x 7,900, one strip": (partial(_drawn, "TIFF", "RGB", 7900), LOADS, ""),
        "tiff: 7,900 x 7,900, 16 bits": (partial(_drawn, "TIFF", "I;16", 7900), LOADS, ""),
        "bmp: 100,000 x 100,000 in its header": (partial(_bmp_header, 100_000), REFUSED, ""),
        "bmp: 8,000 x 8,000, run lengths": (partial(_bmp_header, 8000), EITHER, ""),
        "jp2: 12,000 x 12,000": (partial(_drawn, "JPEG2000", "L", 12_000), REFUSED, PIXELS),
        "jp2: 5,500 x 5,500": (partial(_drawn, "JPEG2000", "RGB", 5500), LOADS, ""),
        "avif: 5,000 x 5,000": (partial(_drawn, "AVIF", "RGB", 5000), LOADS, ""),
        "ppm: 10^9 x 10^9 in its header": (
            lambda: b"P6 1000000000 1000000000 255\n" + bytes(1000),
            REFUSED,
            "",
        ),
        "tga: 65,535 x 65,535 in its header": (_tga_header, REFUSED, ""),
        "ico: 256 entries": (_icon, EITHER, ""),
        "pcx: 60,000 x 60,000 in its header": (_pcx_header, REFUSED, ""),
        "sgi: 65,535 x 65,535 in its header": (_sgi_header, REFUSED, ""),
    }
    for title, (content, codes, flag) in files.items():
        make = partial(_make, suffix=title.partition(":")[0], content=content)
        yield Sample(f"image {title}", "images", make, _READ, codes, flag)
    bomb = partial(_make, suffix="png", content=files["png: 13,000 x 13,000, black and white"][0])
    yield Sample(
        "image png: 13,000 x 13,000, left out",
        "images",
        bomb,
        _READ_THE_OTHERS,
        LOADS,
        "left out",
    )
    yield Sample("image png: 13,000 x 13,000, allowed", "images", bomb, _read_all, LOADS)
    four = partial(_make, suffix="png", content=files["png: 11,000 x 11,000, colour"][0], copies=4)
    yield Sample("image png: four of 11,000 x 11,000", "images", four, _READ, LOADS)
    yield Sample("image jpeg: a photograph of 100 megapixels", "honest", _photograph, _READ, LOADS)


def _make(folder: Path, suffix: str, content: Callable[[], bytes], copies: int = 1) -> None:
    """Write two classes of small images, and copies of the sample into the first class.

    Args:
        content: Returns the bytes of the sample.
    """
    _small_images(folder)
    data = content()
    for number in range(copies):
        (folder / "images" / "cat" / f"sample{number}.{suffix}").write_bytes(data)


def _small_images(folder: Path) -> None:
    """Write two classes with twelve images of 40 x 40 pixels each."""
    import numpy as np
    from PIL import Image

    for label in ("cat", "dog"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / label / f"{number}.png")


def _read_all(folder: Path) -> int:
    """Make batches of the images with a limit of 170 megapixels, and return the exit code."""
    from mupax.train.config.data import LimitsConfig

    return first_batches(folder, "images:images", images=True, limits=LimitsConfig(megapixels=170))


def _drawn(
    kind: str, mode: str, side: int, *, turned: bool = False, progressive: bool = False
) -> bytes:
    """Return a square image of one colour, as Pillow writes it.

    Args:
        kind: Format of the file, such as `PNG`.
        mode: Mode of the pixels, such as `RGB`.
        side: Width and height in pixels.
        turned: Add an EXIF tag that turns the image by a quarter.
        progressive: Write a progressive file. Only for `JPEG`.
    """
    from PIL import ExifTags, Image

    colour = (200, 30, 30, 128) if mode == "RGBA" else None
    image = Image.new(mode, (side, side), colour)  # pyright: ignore
    stream = io.BytesIO()
    options: dict[str, object] = {"progressive": True} if progressive else {}
    if turned:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        options["exif"] = exif
    if kind == "TIFF":
        # One strip has all rows, which are then decoded at once.
        options |= {"compression": "tiff_deflate", "strip_size": 2**31 - 1}
    if kind == "WEBP":
        # The fastest of the seven methods: how well the file is compressed does not matter.
        options["method"] = 0
    image.save(stream, kind, **options)
    return stream.getvalue()


def _chunk(kind: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG, with its length and checksum."""
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def _png(width: int, height: int) -> bytes:
    """Return a black PNG with one bit for each pixel."""
    packer = zlib.compressobj(9)
    # Each row begins with a byte for its filter.
    row = bytes((width + 7) // 8 + 1)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    return _PNG_SIGNATURE + chunks


def _png_header(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size that its 100 bytes of data do not have."""
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", bytes(100)) + _chunk(b"IEND", b"")
    return _PNG_SIGNATURE + chunks


def _png_text() -> bytes:
    """Return a small PNG with a compressed text of 60 MB."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("k", "x" * (60 << 20), zip=True)
    stream = io.BytesIO()
    Image.new("RGB", (40, 40)).save(stream, "PNG", pnginfo=info)
    return stream.getvalue()


def _png_profile() -> bytes:
    """Return a small PNG with a compressed colour profile of 200 MB."""
    image = _png(40, 40)
    profile = _chunk(b"iCCP", b"name\0\0" + zlib.compress(bytes(200 << 20), 9))
    # The first 33 bytes are the signature and the header.
    return image[:33] + profile + image[33:]


def _jpeg_header() -> bytes:
    """Return a JPEG of 64 x 64 pixels whose header claims 65,500 x 65,500."""
    image = bytearray(_drawn("JPEG", "RGB", 64))
    place = image.index(b"\xff\xc0")
    # Behind the marker come the length, the precision, and then height and width.
    image[place + 5 : place + 9] = struct.pack(">HH", 65_500, 65_500)
    return bytes(image)


def _jpeg_exif() -> bytes:
    """Return a JPEG with a description of 60 kB in its EXIF data."""
    from PIL import Image

    exif = Image.Exif()
    # Tag 270 is the description of the image.
    exif[270] = "x" * 60_000
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "JPEG", exif=exif)
    return stream.getvalue()


def _gif_header() -> bytes:
    """Return a GIF of 64 x 64 pixels whose header claims 65,535 x 65,535."""
    image = bytearray(_drawn("GIF", "P", 64))
    # Width and height follow the six bytes of the signature.
    image[6:10] = struct.pack("<HH", 65_535, 65_535)
    return bytes(image)


def _frames() -> bytes:
    """Return a GIF of 5,000 frames."""
    from PIL import Image

    frames = [Image.new("P", (64, 64), number % 256) for number in range(5000)]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    return stream.getvalue()


def _bmp_header(side: int) -> bytes:
    """Return a BMP in run lengths whose header claims a square of `side` pixels."""
    info = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 0, 0, 256, 0)
    palette = bytes(1024)
    header = b"BM" + struct.pack("<IHHI", 2000, 0, 0, 14 + len(info) + len(palette))
    return header + info + palette + b"\xff\x01" * 500 + b"\0\1"


def _tga_header() -> bytes:
    """Return a TGA in run lengths whose header claims 65,535 x 65,535 pixels."""
    header = struct.pack("<BBBHHBHHHHBB", 0, 0, 10, 0, 0, 0, 0, 0, 65_535, 65_535, 24, 0)
    return header + bytes(1000)


def _pcx_header() -> bytes:
    """Return a PCX whose header claims 60,000 x 60,000 pixels."""
    header = struct.pack("<BBBBHHHH", 10, 5, 1, 8, 0, 0, 59_999, 59_999)
    return header + bytes(52) + b"\0\1" + struct.pack("<H", 60_000) + bytes(2000)


def _sgi_header() -> bytes:
    """Return an SGI image in run lengths whose header claims 65,535 x 65,535 pixels."""
    return struct.pack(">HBBHHHH", 474, 1, 1, 3, 65_535, 65_535, 3) + bytes(2000)


def _icon() -> bytes:
    """Return an icon with 256 entries that all point at one image."""
    # All entries lead to the image behind the header and the entries.
    entry = struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 32, 10_000_000, 6 + 256 * 16)
    return struct.pack("<HHH", 0, 1, 256) + entry * 256 + _png(256, 256)


def _photograph(folder: Path) -> None:
    """Write small images, and a photograph of 12,000 x 8,400 pixels with much detail."""
    import numpy as np
    from PIL import Image

    _small_images(folder)
    grain = np.random.default_rng(0).integers(0, 255, (1050, 1500, 3), dtype=np.uint8)
    picture = Image.fromarray(grain).resize((12_000, 8400), Image.Resampling.BICUBIC)
    picture.save(folder / "images" / "cat" / "photograph.jpg", quality=90)
