"""The server that `examples/own_text.py` starts, asks and stops."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import numpy as np
import pytest

from mupax.train.config.run import PresetConfig
from mupax.train.reuse.huggingface import files
from mupax.train.reuse.source import WeightsSource
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import definition

ROOT = Path(__file__).resolve().parents[4]


def test_the_example_asks_a_server_and_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    served = runpy.run_path(str(ROOT / "examples" / "own_text.py"))["served"]
    model = DecoderConfig(width=16, depth=1, num_heads=2, vocab_size=257, seq_len=64)
    random = np.random.default_rng(0)
    params = {
        name: random.normal(size=leaf.shape).astype(np.float32)
        for name, leaf in definition(model).abstract.items()
    }
    source = WeightsSource(model, params, dict.fromkeys(params, np.ones(())), {}, [])
    files.write_imported(source, PresetConfig(name="sp"), tmp_path / "run", "a test")
    assert len(served(str(tmp_path / "run"), "--data.tokenizer", "bytes")) > 5
    with pytest.raises(SystemExit, match="none"):  # a server that does not start says why
        served(str(tmp_path / "none"))
