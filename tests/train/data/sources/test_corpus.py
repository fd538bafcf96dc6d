"""The corpus that comes with every Python: its library, without tests and packages."""

from __future__ import annotations

import collections
import hashlib
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.train import data
from mupax.train.data.records import corpus
from tests.train.data.loading import load, token_ids
from tests.train.data.writing import write_files

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def python_corpus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPAX_DATA", str(tmp_path_factory.mktemp("corpus")))
        return load("python_corpus")


def test_corpus_leaves_other_files_out(tmp_path: Path) -> None:
    read = ("a.py", "pkg/b.py", "z.py")
    left_out = (
        "test/c.py",
        "pkg/tests/d.py",
        "site-packages/e.py",
        "dist-packages/e.py",
        "pkg/idle_test/e.py",
        "config-3.11-x/f.py",
        "_sysconfigdata_x.py",
        "g.txt",
    )
    write_files(tmp_path, dict.fromkeys(read + left_out, "x"))
    assert [name for name, _ in corpus.python_files(tmp_path)] == [*read]


def test_a_python_without_sources_is_reported(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="no sources of the Python standard library"):
        corpus.python_files(tmp_path)


def test_split_is_by_path_alone() -> None:
    sides = {name: corpus.side(name) for name, _ in corpus.python_files()}
    for name, side in sides.items():
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        assert (side == "eval") == (number < 0.08 * 2**64)
    assert 0.04 < [*sides.values()].count("eval") / len(sides) < 0.13
    # One file is a sixteenth of the corpus and unlike the rest; evaluation would be on that file.
    assert sides["pydoc_data/topics.py"] == "train"


def test_corpus_facts(python_corpus: Any) -> None:
    facts = python_corpus.facts
    assert facts["python"] == platform.python_version()
    sizes = [path.stat().st_size for _, path in corpus.python_files()]
    assert facts["files"] == len(sizes)
    # Each document has an end.
    assert facts["train_bytes"] + facts["eval_bytes"] == sum(sizes) + len(sizes)
    assert 0.04 < facts["eval_bytes"] / sum(sizes) < 0.13
    assert len(str(facts["digest"])) == 16


def test_corpus_tokens_are_the_files(python_corpus: Any) -> None:
    """Every file stands whole on its side, and nothing else does."""
    files = {"train": collections.Counter(), "eval": collections.Counter()}
    for name, path in corpus.python_files():
        files[corpus.side(name)][path.read_bytes()] += 1
    for ids, expected in zip(token_ids(python_corpus), files.values(), strict=True):
        documents = bytes(np.asarray(ids, np.uint8)).split(b"\0")
        assert documents.pop() == b""
        assert collections.Counter(documents) == expected
