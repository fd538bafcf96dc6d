"""Small files that unpack to much are refused with the flag that raises the limit."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from mupax.train.config.data import LimitsConfig
from mupax.train.data import DataError
from mupax.train.data.records import bounds, tables
from mupax.train.data.records.broken import BrokenLog
from mupax.train.data.records.tables import Table
from mupax.train.data.sources import folders, idx
from mupax.train.data.streams import hub
from mupax.train.data.text.tokenizer import Subwords
from tests.fixtures.commands import output_line, refusal
from tests.train.data.writing import json_lines, write

pytestmark = pytest.mark.usefixtures("work_folder")

MIB = 2**20
SMALL = LimitsConfig(record_mib=1, ratio=20, megapixels=1)
TEXTS = [f"{word} {i}" for word in ("number", "other") for i in range(40)]
GOOD = json_lines({"text": text} for text in TEXTS)
RATIO = r"--data\.limits\.ratio"


def test_a_line_that_is_too_long_is_refused_or_left_out() -> None:
    long = json_lines([{"text": "a" * (2 * MIB)}])
    lines = GOOD.splitlines(keepends=True)
    write("t.jsonl.gz", gzip.compress(b"".join([*lines[:40], long, *lines[40:]])))
    words = "data prepare records:t.jsonl.gz --limits.record-mib 1"
    message = refusal(words)
    assert " --limits.record-mib" in message
    assert "line 41" in message
    text = output_line(words, "--on-broken skip")
    assert "1 record" in text
    # Every other text, with the end of its document.
    counts = re.search(r"([\d,]+) training and ([\d,]+) evaluation", text)
    assert counts
    train, evaluation = (int(count.replace(",", "")) for count in counts.groups())
    assert train + evaluation == sum(len(text) + 1 for text in TEXTS)
    output_line("data prepare records:t.jsonl.gz")  # the usual limit is above


def test_a_file_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "WINDOW_BYTES", 3 * MIB // 2)
    write("t.jsonl.gz", gzip.compress(GOOD) + gzip.compress(b"\n" * (4 * MIB)))
    words = "data prepare records:t.jsonl.gz --limits.ratio 50"
    assert " --limits.ratio" in refusal(words)
    assert "1 file" in output_line(words, "--on-broken skip")  # what stands before is kept


def write_table(texts: Any, **options: Any) -> Path:
    parquet.write_table(pyarrow.table({"text": texts}), "t.parquet", **options)
    return Path("t.parquet")


def test_a_text_that_a_table_repeats_a_hundred_thousand_times_is_refused() -> None:
    indices = pyarrow.array(np.zeros(100_000, np.int32))
    texts = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 100_000]))
    file = write_table(texts, compression="zstd")
    with pytest.raises(DataError, match=RATIO):
        Table(file, "text").parts()
    log = BrokenLog(skip=True)
    assert Table(file, "text", log).parts() == []
    assert log.count == 1
    with pytest.raises(DataError, match=RATIO):
        hub.opened("hf:./")


def test_a_page_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write_table(["x" * (2 * MIB)], use_dictionary=False, compression="zstd")
    monkeypatch.setattr(tables, "_LARGEST_PAGE", MIB)
    with pytest.raises(DataError, match=RATIO):
        Table(file, "text", BrokenLog(limits=SMALL)).parts()


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False}, {"row_group_size": 7}, {"data_page_version": "2.0"}]
)
def test_control_every_row_of_a_table_is_read_in_any_order(options: dict[str, Any]) -> None:
    texts = [f"{i % 50} text " * (1 + i % 9) for i in range(300)]
    table = Table(write_table(texts, **options), "text")
    parts = table.parts()
    read = [text.decode() for part in parts for text in table.read(part)]
    assert read == texts
    assert table.read(parts[0])[0].decode() == texts[0]


# Tokenizers

LETTERS = np.array([*"abcdefghij éß\n."])
DRAWN = "".join(np.random.default_rng(0).choice(LETTERS, 30_000))
TEXT = DRAWN + "ab" * 2000 + "🙂" * 500


def byte_level() -> tuple[Tokenizer, Any]:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return library, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)


def merges_of_the_text() -> tuple[Tokenizer, Any]:
    """Return a tokenizer that does not cut a text into words."""
    library = Tokenizer(models.BPE(unk_token="<unk>"))
    prepend = normalizers.Prepend("▁")
    library.normalizer = normalizers.Sequence([prepend, normalizers.Replace(" ", "▁")])
    special = ["<unk>"]
    return library, trainers.BpeTrainer(vocab_size=300, special_tokens=special, max_token_length=8)


def unigram() -> tuple[Tokenizer, Any]:
    library = Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>"]
    return library, trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>"
    )


@pytest.mark.parametrize("kind", [byte_level, merges_of_the_text, unigram])
def test_control_a_long_text_has_the_tokens_that_it_has_at_once(
    kind: Callable[[], tuple[Tokenizer, Any]],
) -> None:
    library, trainer = kind()
    library.train_from_iterator([TEXT[:8000]], trainer)
    library.add_special_tokens(["<|endoftext|>"])
    library.save("tokenizer.json")
    at_once = library.encode(TEXT, add_special_tokens=False)
    tokenizer = Subwords(Path("tokenizer.json"))
    tokenizer._batch_bytes = 12_000
    ids, other = tokenizer.encode([TEXT.encode(), b"a b"])
    assert ids.tolist() == at_once.ids
    assert len(other)
    ((ids, places),) = tokenizer.spans([TEXT])
    assert ids.tolist() == at_once.ids
    assert places.tolist() == [[*place] for place in at_once.offsets]


def change_part(fields: dict[str, Any], part: str) -> None:
    """Make a part of a tokenizer.json too large."""
    long = "a" * 10_000
    if part == "pieces":
        vocab = [[f"{i}" * 3000, -1.0] for i in range(100, 300)]
        fields["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
    elif part == "id":
        fields["model"]["vocab"]["c"] = 4_000_000_000
    elif part == "normalizer":
        fields["normalizer"] = {"type": "Prepend", "prepend": long}
    elif part == "decoder":
        fields["decoder"] = {"type": "Replace", "pattern": {"String": "a"}, "content": long}
    elif part == "end_of_word_suffix":
        fields["model"]["end_of_word_suffix"] = long[:1000]
    else:
        fields["added_tokens"][0]["content"] = long[:1000]


@pytest.mark.parametrize(
    "part", ["pieces", "id", "normalizer", "decoder", "end_of_word_suffix", "special token"]
)
def test_a_tokenizer_that_would_fill_the_memory_is_refused_by_its_part(part: str) -> None:
    library = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    library.add_special_tokens(["<|endoftext|>"])
    library.save("good.json")
    Subwords(Path("good.json"))
    fields = json.loads(library.to_str())
    change_part(fields, part)
    write("bad.json", json.dumps(fields))
    with pytest.raises(DataError, match=part):
        Subwords(Path("bad.json"), "a")


# Images and arrays


def test_an_image_of_too_many_pixels_is_refused() -> None:
    file = io.BytesIO()
    Image.new("1", (1100, 1000)).save(file, "PNG")
    with pytest.raises(DataError, match=r"--data\.limits\.megapixels 2"):
        folders.decoded(file, 3, "a.png", limits=SMALL)
    pixels = folders.decoded(file, 3, "a.png", limits=LimitsConfig(megapixels=2))
    assert pixels.shape == (1000, 1100, 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "I;16", "1", "CMYK"])
def test_control_a_large_image_is_read_in_bands_as_it_is_at_once(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    draw = np.random.default_rng(0)
    if mode == "I;16":
        image = Image.fromarray(draw.integers(0, 2**16, (37, 21), dtype=np.uint16))
    else:
        image = Image.fromarray(draw.integers(0, 255, (37, 21, 4), dtype=np.uint8)).convert(mode)
    file = io.BytesIO()
    if mode == "CMYK":
        image.save(file, "TIFF")
        shape = (37, 21, 3)
    else:
        exif = Image.Exif()
        exif[274] = 6
        image.save(file, "PNG", exif=exif)
        shape = (21, 37, 3)
    at_once = folders.decoded(file, 3, "a.png", "black")
    monkeypatch.setattr(folders, "_BAND_PIXELS", 21 * 5)
    assert (folders.decoded(file, 3, "a.png", "black") == at_once).all()
    assert at_once.shape == shape


def test_an_array_of_images_that_unpacks_to_too_much_is_refused() -> None:
    header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in (2**20, 28, 28))
    write("images.gz", gzip.compress(header) + gzip.compress(bytes(MIB)) * 10)
    with pytest.raises(DataError, match=RATIO):
        idx.array(Path("images"))


@pytest.mark.parametrize(
    "header",
    [
        b"(" * 3000 + b")" * 3000,
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    ],
)
def test_a_header_of_numpy_is_read_within_bounds(header: bytes) -> None:
    size = len(header).to_bytes(4, "little")
    write("t.npy", b"\x93NUMPY\x02\0" + size + header + bytes(16))
    assert "t.npy" in refusal("data prepare records:t.npy --tokenizer ids:300")
