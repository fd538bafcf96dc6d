"""A disk that does not answer ends a run so that it can be restarted, and no file is left out."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train.data import DataError, ReadError
from tests.fixtures.commands import command, refusal
from tests.train.data.loading import IMAGE_MODEL, TEXT_MODEL, load, load_with_notes
from tests.train.data.writing import write, write_pictures, write_texts

pytestmark = pytest.mark.usefixtures("work_folder")

Break = Callable[[str, int], None]


class FailingFile(io.FileIO):
    """File that opens, and of which nothing can be read, as on a disk with bad sectors."""

    code = errno.EIO

    def readinto(self, buffer: Any) -> int:
        raise OSError(self.code, os.strerror(self.code), self.name)

    def readall(self) -> bytes:
        raise OSError(self.code, os.strerror(self.code), self.name)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Function after which a file, named by the end of its path, fails with an error number."""
    failing: dict[str, int] = {}
    real_open = builtins.open

    def opened(file: Any, *args: Any, **options: Any) -> Any:
        for end, code in failing.items():
            if str(file).endswith(end):
                if code == errno.EACCES:
                    raise PermissionError(code, os.strerror(code), str(file))
                failed = FailingFile(file)
                failed.code = code
                return io.BufferedReader(failed)
        return real_open(file, *args, **options)

    # `Path.open` takes the function of `io`.
    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(io, "open", opened)
    return failing.__setitem__


def write_data() -> None:
    """Write a data set of every kind, each with a file that has `odd` in its name."""
    for name in ("a", "b", "c", "odd"):
        texts = [f"{name} number {i}\n" for i in range(40)]
        write(f"texts/{name}.txt", "".join(texts))
        for suffix in ("jsonl", "jsonl.gz", "parquet"):
            write_texts(f"{suffix}/{name}.{suffix}", texts)
    write_pictures("pictures", 5)
    Path("pictures/red/0.png").rename("pictures/red/odd.png")
    header = bytes([0, 0, 8, 3]) + np.array([4, 2, 2], ">i4").tobytes()
    write("idx/train-images-idx3-ubyte", header + bytes(16))


TEXTS = [
    ("text:texts", "odd.txt"),
    ("records:jsonl", "odd.jsonl"),
    ("records:jsonl.gz", "odd.jsonl.gz"),
    ("records:parquet", "odd.parquet"),
]
IMAGES = [("images:pictures", "odd.png"), ("idx:idx", "train-images-idx3-ubyte")]


@pytest.mark.parametrize("on_broken", ["stop", "skip"])
@pytest.mark.parametrize(("name", "file"), [*TEXTS, *IMAGES])
def test_a_disk_that_does_not_answer_is_no_fault_of_the_data(
    name: str, file: str, on_broken: str, breaks: Break
) -> None:
    write_data()
    model = IMAGE_MODEL if name.startswith(("images", "idx")) else TEXT_MODEL
    for code in (errno.EIO, errno.ESTALE):
        breaks(file, code)
        with pytest.raises(ReadError, match=rf"{file}.*{os.strerror(code)}"):
            load(name, model, on_broken=on_broken)


@pytest.mark.parametrize(("name", "file"), TEXTS)
def test_control_a_file_that_may_not_be_read_is_left_out(
    name: str, file: str, breaks: Break
) -> None:
    write_data()
    breaks(file, errno.EACCES)
    _, notes = load_with_notes(name, on_broken="skip")
    assert [note for note in notes if file in note]


def test_control_an_image_that_may_not_be_read_is_for_a_person(breaks: Break) -> None:
    write_data()
    breaks("odd.png", errno.EACCES)
    with pytest.raises(DataError, match=r"odd\.png: Permission denied"):
        load("images:pictures", IMAGE_MODEL)


def test_a_folder_that_the_disk_does_not_list_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_data()
    write("texts/more/d.txt", "d\n" * 40)
    code = errno.EIO
    real_scandir = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("more"):
            raise OSError(code, os.strerror(code), str(path))
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ReadError, match=r"texts/more cannot be read: Input/output error"):
        load("text:texts")
    code = errno.EACCES
    _, notes = load_with_notes("text:texts")
    assert [note for note in notes if "more" in note and "Permission denied" in note], "the control"


def test_a_run_ends_so_that_a_supervisor_starts_it_again(breaks: Break) -> None:
    write_data()
    words = (
        "train lm-tiny --steps 2 --data.name records:jsonl --data.batch-size 8 --workdir run "
        "--log.no-tensorboard"
    )
    breaks("odd.jsonl", errno.EIO)
    failed = command(words)
    assert failed.code == 1
    assert "cannot read jsonl/odd.jsonl: Input/output error" in failed.message
    for name in ("a", "b", "c", "odd"):
        breaks(f"{name}.jsonl", errno.EACCES)
    assert "Permission denied" in refusal(words), "the control: a person must act"
