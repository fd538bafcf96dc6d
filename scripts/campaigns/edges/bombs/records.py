"""Samples of data files that decompress to much more: JSON lines, Parquet, NumPy and IDX."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.campaigns.edges.bombs.sample import (
    EITHER,
    LOADS,
    REFUSED,
    Sample,
    command,
    first_batches,
    loading,
    mupax,
)

MIB = 2**20
RATIO = "--data.limits.ratio"
_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")
_GOOD = b"".join(
    json.dumps({"text": f"{_WORDS[i % 10]} {i} {_WORDS[i % 7]}"}).encode() + b"\n"
    for i in range(300)
)
"""Three hundred ordinary records as JSON lines."""


def samples() -> Iterator[Sample]:
    """Yield every sample of records and arrays."""
    yield from _lines()
    yield from _plain_lines()
    yield from _parquet()
    yield from _hub()
    yield from _arrays()
    yield from _honest()


def _write(file: Path, blocks: Iterator[bytes]) -> None:
    """Write blocks into a file, compressed as its suffix says, one at a time."""
    match file.suffix:
        case ".gz":
            with gzip.open(file, "wb", 9) as stream:
                stream.writelines(blocks)
        case ".bz2":
            with bz2.open(file, "wb") as stream:
                stream.writelines(blocks)
        case ".xz":
            with lzma.open(file, "wb", preset=1) as stream:
                stream.writelines(blocks)
        case ".zst":
            # Python's own library has no zstd before 3.14.
            import pyarrow

            with pyarrow.CompressedOutputStream(str(file), "zstd") as stream:
                for block in blocks:
                    stream.write(block)
        case _:
            with file.open("wb") as stream:
                stream.writelines(blocks)


def _long_first() -> Iterator[bytes]:
    """Yield a line of 1.2 GB, then good lines."""
    yield b'{"text":"'
    # The list has one block many times, so that making the sample takes little memory.
    yield from [b"a" * MIB] * 1200
    yield b'"}\n' + _GOOD


def _long_later() -> Iterator[bytes]:
    """Yield good lines, a line of 1.2 GB, and good lines."""
    yield _GOOD + b'{"text":"'
    yield from [b"a" * MIB] * 1200
    yield b'"}\n' + _GOOD


def _long_without_end() -> Iterator[bytes]:
    """Yield good lines, then a line of 1.2 GB without an end."""
    yield _GOOD + b'{"text":"'
    yield from [b"a" * MIB] * 1200


def _many_lines() -> Iterator[bytes]:
    """Yield one line 36 million times."""
    block = b'{"text":"the same line again"}\n' * 30_000
    for _ in range(1200):
        yield block


def _many_empty_lines() -> Iterator[bytes]:
    """Yield good lines, then 1.2 GB of empty lines."""
    yield _GOOD
    for _ in range(1200):
        yield b"\n" * MIB


def _wide_list() -> Iterator[bytes]:
    """Yield good lines, then a line with a list of 7 million objects."""
    yield _GOOD + b'{"text":"ok","x":['
    for _ in range(7):
        yield b"{}," * MIB
    yield b"{}]}\n"


_STREAM = loading("hf:set")
_STREAMS: dict[str, tuple[Callable[[], Iterator[bytes]], str]] = {
    "a first line of 1.2 GB": (_long_first, "--data.limits"),
    "a later line of 1.2 GB": (_long_later, "--data.limits"),
    "a line of 1.2 GB that does not end": (_long_without_end, "--data.limits"),
    "1.1 GB of one line": (_many_lines, RATIO),
    "1.2 GB of empty lines": (_many_empty_lines, RATIO),
    "a list of 7 million objects": (_wide_list, ""),
}


def _lines() -> Iterator[Sample]:
    """Yield samples of compressed JSON lines."""
    for suffix in ("gz", "zst", "bz2", "xz"):
        for title, (blocks, flag) in _STREAMS.items():
            file = f"data.jsonl.{suffix}"
            make = partial(_make_file, file=file, blocks=blocks)
            read = command(f"data prepare records:{file}")
            codes = REFUSED if flag else LOADS
            yield Sample(f"{file}: {title}", f"JSON lines .{suffix}", make, read, codes, flag)
    # If the long line is the first one, nothing is left to read after it is left out.
    skipped = (
        ("gz", "a later line of 1.2 GB", "left out"),
        ("zst", "a first line of 1.2 GB", RATIO),
    )
    for suffix, title, says in skipped:
        file = f"data.jsonl.{suffix}"
        make = partial(_make_file, file=file, blocks=_STREAMS[title][0])
        read = command(f"data prepare records:{file} --on-broken skip")
        yield Sample(
            f"{file}: {title}, left out", f"JSON lines .{suffix}", make, read, EITHER, says
        )
    for suffix in ("gz", "zst", "bz2", "xz"):
        file = f"data.jsonl.{suffix}"
        make = partial(_make_file, file=file, blocks=_STREAMS["1.1 GB of one line"][0])
        read = partial(_chat, file=file)
        yield Sample(f"{file}: 1.1 GB of no conversation", "conversations", make, read, REFUSED)


def _make_file(folder: Path, file: str, blocks: Callable[[], Iterator[bytes]]) -> None:
    """Write a file from the blocks that `blocks` yields."""
    _write(folder / file, blocks())


def _chat(folder: Path, file: str) -> int:
    """Write a chat template, and make batches of the conversations in a file."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    (folder / "chat.jinja").write_text(template)
    return first_batches(folder, f"chat:{file}", chat_template="chat.jinja")


def _plain_lines() -> Iterator[Sample]:
    """Yield samples of JSON lines that are not compressed."""
    deep = b'{"text":"ok","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    digits = b'{"text":"ok","x":' + b"1" * 5_000_000 + b"}\n"
    contents = {
        "nested 200,000 deep": (deep + _GOOD, REFUSED),
        "a number of 5 million digits": (digits + _GOOD, REFUSED),
        "a key twice": (b'{"text":"a","text":"b"}\n' * 50 + _GOOD, LOADS),
        "NaN in another field": (b'{"text":"abc","x":NaN}\n' * 50 + _GOOD, LOADS),
        "3 million objects in a line": (
            b'{"text":"ok","x":[' + b"{}," * 3_000_000 + b"{}]}\n" + _GOOD,
            LOADS,
        ),
        "3 million empty strings in a line": (
            b'{"text":"ok","x":[' + b'"",' * 3_000_000 + b'""]}\n' + _GOOD,
            LOADS,
        ),
        "9 MB of keys": (
            b'{"text":"ok",' + b",".join(b'"%d":0' % i for i in range(800_000)) + b"}\n" + _GOOD,
            LOADS,
        ),
        "700,000 records of a letter": (b'{"text":"a"}\n' * 700_000, LOADS),
        # One emoji makes Python hold the text with four bytes for each letter.
        "9 MB of letters and one emoji": (
            b'{"text":"' + b"a" * 9_000_000 + "🙂".encode() + b'"}\n' + _GOOD,
            LOADS,
        ),
        "9 MB of escapes": (b'{"text":"' + b"\\u0410" * 1_500_000 + b'"}\n' + _GOOD, LOADS),
    }
    for title, (content, codes) in contents.items():
        make = partial(_make_bytes, file="data.jsonl", content=content)
        read = command("data prepare records:data.jsonl")
        yield Sample(f"data.jsonl: {title}", "JSON lines", make, read, codes)


def _make_bytes(folder: Path, file: str, content: bytes) -> None:
    """Write a file with this content."""
    (folder / file).write_bytes(content)


def _parquet() -> Iterator[Sample]:
    """Yield samples of Parquet."""
    tables: dict[str, tuple[Callable[[Path], object], tuple[int, ...], str]] = {
        "two million rows of a text of 1 MB": (_one_text, REFUSED, RATIO),
        "two million rows of a text of 20 MB": (
            partial(_one_text, size=20_000_000),
            REFUSED,
            RATIO,
        ),
        "a row of 1 GB": (partial(_one_row, size=1000), REFUSED, "--data.limits"),
        "a row of 100 MB": (partial(_one_row, size=100), REFUSED, "--data.limits"),
        "40 million empty rows": (partial(_empty_rows, value=""), REFUSED, RATIO),
        "40 million rows of null": (partial(_empty_rows, value=None), REFUSED, "null"),
        "texts that share a prefix of 1 MB": (_shared_prefix, REFUSED, RATIO),
        "a page that hides its size in the footer": (_hidden_size, REFUSED, ""),
        "20,000 row groups": (_many_groups, LOADS, ""),
        "20,000 columns": (_many_columns, REFUSED, "--data.field"),
        "its footer is cut off": (_cut_off, REFUSED, ""),
        "zeros in the middle": (_zeroed, REFUSED, ""),
        "a prompt repeated 2,000 times": (_repeated_prompts, LOADS, ""),
    }
    for title, (make, codes, flag) in tables.items():
        read = command("data prepare records:data.parquet")
        yield Sample(f"data.parquet: {title}", "Parquet", make, read, codes, flag)
    yield Sample(
        "chat.parquet: two million messages of 1 MB",
        "conversations",
        _one_message,
        partial(_chat, file="chat.parquet"),
        REFUSED,
        RATIO,
    )
    yield Sample(
        "data.parquet: two million rows of a text of 1 MB, left out",
        "Parquet",
        _one_text,
        command("data prepare records:data.parquet --on-broken skip"),
        REFUSED,
        "left out",
    )


def _one_text(folder: Path, size: int = 1_000_000) -> None:
    """Write two million rows that share one text of `size` letters."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    column = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(2_000_000, np.int32)), pa.array(["x" * size])
    )
    parquet.write_table(
        pa.table({"text": column}), folder / "data.parquet", use_dictionary=True, compression="zstd"
    )


def _one_message(folder: Path) -> None:
    """Write a million conversations whose messages share one text of 1 MB."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    count = 2_000_000
    content = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(count, np.int32)), pa.array(["x" * 1_000_000])
    )
    roles = np.tile(np.array([0, 1], np.int32), count // 2)
    role = pa.DictionaryArray.from_arrays(pa.array(roles), pa.array(["user", "assistant"]))
    message = pa.StructArray.from_arrays([role, content], ["role", "content"])
    messages = pa.ListArray.from_arrays(
        pa.array(np.arange(0, count + 1, 2, dtype=np.int32)), message
    )
    parquet.write_table(
        pa.table({"messages": messages}), folder / "chat.parquet", compression="zstd"
    )


def _one_row(folder: Path, size: int) -> None:
    """Write ten short rows and one of `size` MB."""
    import pyarrow as pa
    from pyarrow import parquet

    short_rows = [f"{word} {i}" for i, word in enumerate(_WORDS)]
    table = pa.table({"text": [*short_rows, "x" * (size * 1_000_000)]})
    parquet.write_table(table, folder / "data.parquet", use_dictionary=False, compression="zstd")


def _empty_rows(folder: Path, value: str | None) -> None:
    """Write 40 million rows of one value."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([("text", pa.string())])
    with parquet.ParquetWriter(folder / "data.parquet", schema, compression="zstd") as writer:
        table = pa.table({"text": pa.array([value] * 1_000_000, pa.string())})
        for _ in range(40):
            writer.write_table(table, row_group_size=1_000_000)


def _shared_prefix(folder: Path) -> None:
    """Write 300 texts of 1 MB that differ in their ends, four times, encoded by shared prefixes."""
    import pyarrow as pa
    from pyarrow import parquet

    texts = ["x" * 1_000_000 + str(i) for i in range(300)]
    schema = pa.schema([("text", pa.string())])
    # This encoding stores a prefix that texts share once.
    encoding = {"text": "DELTA_BYTE_ARRAY"}
    file = folder / "data.parquet"
    with parquet.ParquetWriter(
        file, schema, use_dictionary=False, column_encoding=encoding, compression="zstd"
    ) as writer:
        for _ in range(4):
            writer.write_table(pa.table({"text": texts}))


def _hidden_size(folder: Path) -> None:
    """Write a column of 600 MB, and make its size in the footer small."""
    from pyarrow import parquet

    file = folder / "data.parquet"
    _one_row(folder, 600)
    size = parquet.read_metadata(file).row_group(0).column(0).total_uncompressed_size
    content = file.read_bytes()
    written = _varint(size)
    # The footer is at the end of the file.
    start = content.rfind(written)
    # The replacement must have as many bytes: continuation bits pad the small number.
    small = _varint(100)
    padded = bytes([small[0] | 128, small[1] | 128] + [128] * (len(written) - 3) + [0])
    file.write_bytes(content[:start] + padded + content[start + len(written) :])


def _varint(number: int) -> bytes:
    """Return a positive number as Thrift's compact protocol writes it, with at least two bytes."""
    number *= 2
    digits = []
    while number >= 128:
        digits.append(number % 128 | 128)
        number //= 128
    if digits:
        return bytes([*digits, number])
    return bytes([number | 128, 0])


def _many_groups(folder: Path) -> None:
    """Write 20,000 row groups of one row."""
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"text": [f"{_WORDS[i % 10]} {i}" for i in range(20_000)]})
    parquet.write_table(table, folder / "data.parquet", row_group_size=1)


def _many_columns(folder: Path) -> None:
    """Write one row of 20,000 columns."""
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(
        pa.table({f"column {i}": ["a"] for i in range(20_000)}), folder / "data.parquet"
    )


def _ordinary(folder: Path, rows: int = 5000, row_group_size: int = 1000) -> Path:
    """Write rows of ordinary texts, and return the path of the file."""
    import pyarrow as pa
    from pyarrow import parquet

    file = folder / "data.parquet"
    texts = []
    for row in range(rows):
        words = [_WORDS[(row * k) % 10] + str(row * k) for k in range(1, 30)]
        texts.append(" ".join(words))
    parquet.write_table(
        pa.table({"text": texts}), file, row_group_size=row_group_size, compression="zstd"
    )
    return file


def _cut_off(folder: Path) -> None:
    """Write an ordinary file without its last 20 bytes."""
    file = _ordinary(folder)
    file.write_bytes(file.read_bytes()[:-20])


def _zeroed(folder: Path) -> None:
    """Write an ordinary file with 2,000 zeros in its middle."""
    file = _ordinary(folder)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(2000)
    file.write_bytes(content)


def _repeated_prompts(folder: Path) -> None:
    """Write Parquet with 100 prompts, 2,000 times each: ordinary data that compresses very well."""
    import pyarrow as pa
    from pyarrow import parquet

    prompts = [f"{i} " + " ".join(_WORDS) * 2 for i in range(100)]
    parquet.write_table(
        pa.table({"text": prompts * 2000}), folder / "data.parquet", compression="zstd"
    )


def _hub() -> Iterator[Sample]:
    """Yield samples of folders that `datasets` reads."""
    for suffix in ("gz", "zst", "xz"):
        make = partial(_make_in_folder, file=f"train.jsonl.{suffix}", blocks=_long_later)
        yield Sample(f"hf:FOLDER, .{suffix}: a line of 1.2 GB", "datasets", make, _STREAM, REFUSED)
        make = partial(_make_in_folder, file=f"train.jsonl.{suffix}", blocks=_long_first)
        yield Sample(
            f"hf:FOLDER, .{suffix}: a first line of 1.2 GB", "datasets", make, _STREAM, REFUSED
        )
    yield Sample(
        "hf:FOLDER: Parquet of one text", "datasets", _hub_parquet, _STREAM, REFUSED, RATIO
    )
    yield Sample("hf:FOLDER: ordinary Parquet", "datasets", _hub_ordinary, _STREAM, LOADS)


def _make_in_folder(folder: Path, file: str, blocks: Callable[[], Iterator[bytes]]) -> None:
    """Write a file into the subfolder `set` from the blocks that `blocks` yields."""
    (folder / "set").mkdir()
    _write(folder / "set" / file, blocks())


def _hub_parquet(folder: Path) -> None:
    """Write Parquet with two million equal rows into the subfolder `set`."""
    (folder / "set").mkdir()
    _one_text(folder / "set")


def _hub_ordinary(folder: Path) -> None:
    """Write Parquet with ordinary texts into the subfolder `set`."""
    (folder / "set").mkdir()
    _ordinary(folder / "set")


def _arrays() -> Iterator[Sample]:
    """Yield samples of NumPy and IDX files."""
    read_ids = command("data prepare records:ids.npy --tokenizer ids:300")
    for title, make in {
        "objects, which are pickled": _npy_objects,
        "a header of 4 GB": partial(_npy_header, header=b"x" * 100, length=2**32 - 1),
        "a header nested 4,000 deep": partial(_npy_header, header=b"(" * 4000 + b")" * 4000),
        "a shape of 10^18": partial(_npy_header, header=_npy_fields("<u2", (10**18,))),
        "a type of 1 GB": partial(_npy_header, header=_npy_fields("|V1000000000", (1,))),
    }.items():
        yield Sample(f"ids.npy: {title}", "NumPy", make, read_ids, REFUSED)
    read_parts = command("data prepare cifar5m --data-dir .")
    for title, make in {
        "10^11 images": partial(_npz, shape=(10**11, 32, 32, 3)),
        "an array of other things": partial(_npz, shape=(10**11,)),
        "5 GB of zeros": _npz_zeros,
        "objects, which are pickled": _npz_objects,
    }.items():
        yield Sample(f"part0.npz: {title}", "NumPy", make, read_parts, REFUSED)
    for title, sizes in {
        "a million images that are not there": (1_000_000, 28, 28),
        "10^9 images of a pixel": (1_000_000_000, 1, 1),
        "an image of 10^9 pixels": (1, 31623, 31623),
    }.items():
        make = partial(_idx, sizes=sizes)
        yield Sample(f"IDX .gz: {title}", "IDX", make, _read_idx, REFUSED)
    yield Sample(
        "IDX: 9 million images of a pixel",
        "IDX",
        partial(_idx, sizes=(9_000_000, 1, 1), plain=True),
        _read_pixel,
        LOADS,
    )


def _npy_objects(folder: Path) -> None:
    """Write token ids as an array of objects, which is pickled."""
    import numpy as np

    # Reading a pickle runs code that is in it.
    np.save(folder / "ids.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _npy_fields(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return the text in the header of a NumPy file.

    Args:
        kind: Type of the array, such as `<u2`.
    """
    return repr({"descr": kind, "fortran_order": False, "shape": shape}).encode()


def _npy_header(folder: Path, header: bytes, length: int | None = None) -> None:
    """Write token ids with this header and 1,000 bytes of data.

    Args:
        length: Length that the file claims for the header. Default: the true one.
    """
    # In version 2 of the format the length has four bytes.
    size = struct.pack("<I", len(header) if length is None else length)
    (folder / "ids.npy").write_bytes(b"\x93NUMPY\x02\x00" + size + header + bytes(1000))


def _npz(folder: Path, shape: tuple[int, ...]) -> None:
    """Write parts of CIFAR-5m whose images claim a shape but have 10 bytes."""
    import zipfile

    header = _npy_fields("|u1", shape)
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(10)
    _write_parts(folder, lambda archive: archive.writestr("X.npy", array), zipfile)


def _npz_zeros(folder: Path) -> None:
    """Write parts of CIFAR-5m with 5 GB of zeros each."""
    import zipfile

    def write(archive: Any) -> None:
        header = _npy_fields("|u1", (1_600_000, 32, 32, 3))
        # `zipfile` does not know beforehand that more than 4 GB will come.
        with archive.open("X.npy", "w", force_zip64=True) as file:
            file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
            for _ in range(1_600_000 * 3072 // (64 * MIB)):
                file.write(bytes(64 * MIB))

    _write_parts(folder, write, zipfile)


def _npz_objects(folder: Path) -> None:
    """Write parts of CIFAR-5m whose images are objects, which are pickled."""
    import numpy as np

    for number in range(6):
        np.savez(folder / f"part{number}.npz", X=np.array([{"a": 1}], dtype=object), Y=np.arange(1))


def _write_parts(folder: Path, write: Callable[[Any], object], zipfile: Any) -> None:
    """Write six equal parts of CIFAR-5m with ten labels.

    Args:
        write: Writes the images into an open archive.
        zipfile: Module `zipfile`.
    """
    import io
    import shutil

    import numpy as np

    labels = io.BytesIO()
    np.save(labels, np.zeros(10, np.int64))
    with zipfile.ZipFile(folder / "part0.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        write(archive)
        archive.writestr("Y.npy", labels.getvalue())
    for number in range(1, 6):
        shutil.copy(folder / "part0.npz", folder / f"part{number}.npz")


def _idx(folder: Path, sizes: tuple[int, int, int], *, plain: bool = False) -> None:
    """Write training and test images in IDX.

    Args:
        sizes: Number, height and width of the images in the header.
        plain: Write complete files without compression. Otherwise files of 10^9 pixels or more get
            up to 1.2 GB of zeros, and smaller ones get none.
    """
    total = sizes[0] * sizes[1] * sizes[2]
    labels = b"\0\0\x08\x01" + struct.pack(">I", sizes[0])
    # The magic number of IDX: unsigned bytes on three axes.
    content = b"\0\0\x08\x03" + struct.pack(">III", *sizes)
    for name in ("train", "t10k"):
        if plain:
            (folder / f"{name}-images-idx3-ubyte").write_bytes(content + bytes(total))
            (folder / f"{name}-labels-idx1-ubyte").write_bytes(
                labels + bytes([0, 1] * (sizes[0] // 2))
            )
            continue
        with gzip.open(folder / f"{name}-images-idx3-ubyte.gz", "wb", 1) as file:
            file.write(content)
            if total >= 10**9:
                for _ in range(min(total // (4 * MIB), 300)):
                    file.write(bytes(4 * MIB))
        with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz", "wb", 1) as file:
            file.write(labels + bytes([0, 1]))


def _read_idx(folder: Path) -> int:
    """Make batches of the images as 28 x 28 pixels."""
    model = {"channels": 1, "image_size": 28, "patch_size": 7}
    return first_batches(folder, f"idx:{folder}", images=True, model=model)


def _read_pixel(folder: Path) -> int:
    """Make batches of the images as one pixel."""
    model = {"channels": 1, "image_size": 1, "patch_size": 1}
    return first_batches(folder, f"idx:{folder}", images=True, model=model)


def _honest() -> Iterator[Sample]:
    """Yield large files that must load."""
    for suffix in ("gz", "zst", "bz2", "xz"):
        file = f"data.jsonl.{suffix}"
        make = partial(_make_file, file=file, blocks=_thirty_to_one)
        yield Sample(
            f"{file}: 100 MB that compress 30:1",
            "honest",
            make,
            command(f"data prepare records:{file}"),
            LOADS,
        )
    for vocabulary in ("bytes", "subwords"):
        read = partial(_book, vocabulary=vocabulary)
        yield Sample(
            f"data.jsonl: two books of 9 MB, {vocabulary}", "honest", _make_books, read, LOADS
        )
    read = command("data prepare records:data.parquet")
    large = partial(_ordinary, rows=200_000, row_group_size=5000)
    yield Sample("data.parquet: 40 row groups", "honest", large, read, LOADS)


def _thirty_to_one() -> Iterator[bytes]:
    """Yield 40,000 records that compress thirty to one."""
    import random

    choose = random.Random(0)
    for _ in range(200):
        line = " ".join(choose.choices(_WORDS, k=400))
        yield b"".join(json.dumps({"text": f"{i} {line}"}).encode() + b"\n" for i in range(200))


def _make_books(folder: Path) -> None:
    """Write one book of 9 MB and thirty short records of random words."""
    import random

    choose = random.Random(0)
    words = []
    for _ in range(5000):
        length = choose.randint(2, 9)
        words.append("".join(choose.choices("abcdefghijklmnopqrstuvwxyz", k=length)))
    with (folder / "data.jsonl").open("w") as file:
        file.write(json.dumps({"text": " ".join(choose.choices(words, k=1_400_000))}) + "\n")
        for _ in range(30):
            file.write(json.dumps({"text": " ".join(choose.choices(words, k=100))}) + "\n")


def _book(folder: Path, vocabulary: str) -> int:
    """Prepare the records of `_make_books`, and return the exit code.

    Args:
        vocabulary: `bytes` or `subwords`.
    """
    name = "bytes"
    if vocabulary == "subwords":
        from scripts.campaigns.edges.bombs.tokenizers import small_tokenizer

        (folder / "tokenizer.json").write_text(json.dumps(small_tokenizer()))
        name = "tokenizer.json"
    return mupax(folder, "data", "prepare", "records:data.jsonl", "--tokenizer", name)
