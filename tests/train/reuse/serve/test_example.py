"""The server that `examples/own_text.py` starts, asks and stops."""

from __future__ import annotations

import dataclasses
import os
import runpy
from pathlib import Path

import pytest

from tests.train.reuse.random_weights import imported
from tests.train.reuse.serve.serving import MODEL

ROOT = Path(__file__).resolve().parents[4]


def test_the_example_asks_a_server_and_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    served = runpy.run_path(str(ROOT / "examples" / "own_text.py"))["served"]
    imported(tmp_path / "run", dataclasses.replace(MODEL, vocab_size=257, seq_len=64))
    assert len(served(str(tmp_path / "run"), "--data.tokenizer", "bytes")) > 5
    with pytest.raises(SystemExit, match="none"):  # a server that does not start says why
        served(str(tmp_path / "none"))
