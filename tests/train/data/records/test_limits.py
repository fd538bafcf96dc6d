"""Small files that unpack to much are refused with the flag that raises the limit, and large honest files load."""

from __future__ import annotations

import functools
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from mupax.__main__ import main
from mupax.train import data
from mupax.train.config.data import LimitsConfig
from mupax.train.data.records import bounds, tables
from mupax.train.data.records.broken import BrokenLog
from mupax.train.data.records.tables import Table
from mupax.train.data.sources import folders, idx
from mupax.train.data.streams import hub
from mupax.train.data.text.tokenizer import Subwords
from tests.train.data.sources.test_text import cache_folder

__all__ = ["cache_folder"]  # a fixture

MIB = 2**20
SMALL = LimitsConfig(record_mib=1, ratio=20, megapixels=1)
GOOD = b"".join(json.dumps({"text": f"number {i}"}).encode() + b"\n" for i in range(40))


def prepare(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["data", "prepare", *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.usefixtures("cache_folder")
def test_a_line_that_is_too_long_is_refused_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = b'{"text":"' + b"a" * (2 * MIB) + b'"}\n'
    (tmp_path / "t.jsonl.gz").write_bytes(
        gzip.compress(GOOD + long + GOOD.replace(b"number", b"other"))
    )
    name = f"records:{tmp_path / 't.jsonl.gz'}"
    code, text = prepare(capsys, name, "--limits.record-mib", "1")
    assert code == 2
    assert "--data.limits.record-mib" in text
    assert "line 41" in text
    code, text = prepare(capsys, name, "--limits.record-mib", "1", "--on-broken", "skip")
    assert code == 0
    assert "1 record" in text
    num_tokens = len(
        b"".join(
            json.loads(line)["text"].encode()
            for line in (GOOD + GOOD.replace(b"number", b"other")).splitlines()
        )
    )
    numbers = [
        int(word.replace(",", ""))
        for word in text.replace("prepared:", " ").split()
        if word.replace(",", "").isdigit()
    ]
    assert num_tokens + 80 in [
        numbers[-2] + numbers[-1]
    ]  # every other text with the end of its document
    assert prepare(capsys, name)[0] == 0  # the usual limit is above


@pytest.mark.usefixtures("cache_folder")
def test_a_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "WINDOW_BYTES", 3 * MIB // 2)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(GOOD) + gzip.compress(b"\n" * (4 * MIB)))
    words = [f"records:{tmp_path / 't.jsonl.gz'}", "--limits.ratio", "50"]
    code, text = prepare(capsys, *words)
    assert code == 2
    assert "--data.limits.ratio" in text
    code, text = prepare(capsys, *words, "--on-broken", "skip")  # what stands before is kept
    assert code == 0
    assert "1 file" in text


def table(path: Path, texts: Any, **options: Any) -> Path:
    parquet.write_table(pyarrow.table({"text": texts}), path, **options)
    return path


def test_a_text_that_a_table_repeats_a_hundred_thousand_times_is_refused(tmp_path: Path) -> None:
    indices = pyarrow.array(np.zeros(100_000, np.int32))
    texts = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 100_000]))
    file = table(tmp_path / "t.parquet", texts, compression="zstd")
    with pytest.raises(data.DataError, match=r"--data\.limits\.ratio"):
        Table(file, "text").parts()
    log = BrokenLog(skip=True)
    assert Table(file, "text", log).parts() == []
    assert log.count == 1
    with pytest.raises(data.DataError, match=r"--data\.limits\.ratio"):
        hub.opened(f"hf:{tmp_path}")


def test_a_page_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = table(
        tmp_path / "t.parquet", ["x" * (2 * MIB)], use_dictionary=False, compression="zstd"
    )
    monkeypatch.setattr(tables, "_LARGEST_PAGE", MIB)
    with pytest.raises(data.DataError, match=r"--data\.limits\.ratio"):
        Table(file, "text", BrokenLog(limits=SMALL)).parts()


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False}, {"row_group_size": 7}, {"data_page_version": "2.0"}]
)
def test_control_every_row_of_a_table_is_read_in_any_order(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    texts = [f"{i % 50} text " * (1 + i % 9) for i in range(300)]
    read = Table(table(tmp_path / "t.parquet", texts, **options), "text")
    parts = read.parts()
    assert [text for part in parts for text in read.read(part)] == [text.encode() for text in texts]
    assert read.read(parts[0])[0] == texts[0].encode()


def vocabulary(path: Path, library: Any, trainer: Any, **parts: Any) -> Path:
    for name, part in parts.items():
        setattr(library, name, part)
    library.train_from_iterator([TEXT[:8000]], trainer)
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(path))
    return path


def words(count: int) -> str:
    draw = np.random.default_rng(0)
    letters = np.array([*"abcdefghij éß\n."])
    return "".join(letters[draw.integers(0, len(letters), count)])


TEXT = words(30_000) + "ab" * 2000 + "🙂" * 500
KINDS: dict[str, Callable[[Path], Path]] = {
    "byte-level": lambda path: vocabulary(
        path,
        Tokenizer(models.BPE()),
        trainers.BpeTrainer(
            vocab_size=300,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),  # pyright: ignore
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "whole text": lambda path: vocabulary(
        path,
        Tokenizer(models.BPE(unk_token="<unk>")),
        trainers.BpeTrainer(
            vocab_size=300, show_progress=False, special_tokens=["<unk>"], max_token_length=8
        ),  # pyright: ignore
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "Unigram": lambda path: vocabulary(
        path,
        Tokenizer(models.Unigram()),
        trainers.UnigramTrainer(
            vocab_size=300, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>"
        ),  # pyright: ignore
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_control_a_long_text_has_the_tokens_that_it_has_as_a_whole(
    tmp_path: Path, kind: str
) -> None:
    path = KINDS[kind](tmp_path / "tokenizer.json")
    whole = Tokenizer.from_file(str(path)).encode(TEXT, add_special_tokens=False)
    tokenizer = Subwords(path)
    tokenizer._batch_bytes = 12_000
    ids, other = tokenizer.encode([TEXT.encode(), b"a b"])
    assert ids.tolist() == whole.ids
    assert len(other)
    ((ids, places),) = tokenizer.spans([TEXT])
    assert ids.tolist() == whole.ids
    assert places.tolist() == [[*place] for place in whole.offsets]


def described(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A tokenizer.json of letters, changed."""
    library = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    library.add_special_tokens(["<|endoftext|>"])
    fields = json.loads(library.to_str())
    change(fields)
    path.write_text(json.dumps(fields))
    return path


BAD_TOKENIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "pieces": lambda fields: fields.update(
        model={
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[f"{i}" * 3000, -1.0] for i in range(100, 300)],
        }
    ),
    "id": lambda fields: fields["model"]["vocab"].update(c=4_000_000_000),
    "normalizer": lambda fields: fields.update(
        normalizer={"type": "Prepend", "prepend": "a" * 10_000}
    ),
    "decoder": lambda fields: fields.update(
        decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}
    ),
    "end_of_word_suffix": lambda fields: fields["model"].update(end_of_word_suffix="a" * 1000),
    "special token": lambda fields: fields["added_tokens"][0].update(content="a" * 1000),
}


@pytest.mark.parametrize("part", BAD_TOKENIZERS)
def test_a_tokenizer_that_would_fill_the_memory_is_refused_by_its_part(
    tmp_path: Path, part: str
) -> None:
    Subwords(described(tmp_path / "good.json", lambda fields: None))
    with pytest.raises(data.DataError, match=part):
        Subwords(described(tmp_path / "bad.json", BAD_TOKENIZERS[part]), "a")


def png(image: Image.Image, **options: Any) -> io.BytesIO:
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out


def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path) -> None:
    file = png(Image.new("1", (1100, 1000)))
    with pytest.raises(data.DataError, match=r"--data\.limits\.megapixels 2"):
        folders.decoded(file, 3, "a.png", limits=SMALL)
    assert folders.decoded(file, 3, "a.png", limits=LimitsConfig(megapixels=2)).shape == (
        1000,
        1100,
        3,
    )


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "I;16", "1", "CMYK"])
def test_control_a_large_image_is_read_in_bands_as_it_is_at_once(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    draw = np.random.default_rng(0)
    if mode == "I;16":
        image = Image.fromarray(draw.integers(0, 2**16, (37, 21), dtype=np.uint16))
    else:
        image = Image.fromarray(draw.integers(0, 255, (37, 21, 4), dtype=np.uint8), "RGBA").convert(
            mode
        )
    exif = Image.Exif()
    exif[274] = 6
    out = io.BytesIO()
    image.save(
        out, "TIFF" if mode == "CMYK" else "PNG", **({} if mode == "CMYK" else {"exif": exif})
    )
    decode = functools.partial(folders.decoded, out, 3, "a.png", "black")
    at_once = decode()
    monkeypatch.setattr(folders, "_BAND_PIXELS", 21 * 5)
    assert (decode() == at_once).all()
    assert at_once.shape == ((37, 21, 3) if mode == "CMYK" else (21, 37, 3))


def test_an_array_of_images_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in (2**20, 28, 28))
    (tmp_path / "images.gz").write_bytes(gzip.compress(header) + gzip.compress(bytes(MIB)) * 10)
    with pytest.raises(data.DataError, match=r"--data\.limits\.ratio"):
        idx.array(tmp_path / "images")


def test_a_header_of_numpy_is_read_within_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for header in (
        b"(" * 3000 + b")" * 3000,
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    ):
        content = b"\x93NUMPY\x02\0" + len(header).to_bytes(4, "little") + header + bytes(16)
        (tmp_path / "t.npy").write_bytes(content)
        code, text = prepare(capsys, f"records:{tmp_path / 't.npy'}", "--tokenizer", "ids:300")
        assert code == 2
        assert "t.npy" in text
