"""Broken files: each is read and can be exported, or is refused by this project's errors; nothing crashes,
hangs or fills the memory."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mupax.disk import JsonError
from mupax.memory import MemoryLimitError
from mupax.train.config.run import PresetConfig
from mupax.train.reuse import trained
from mupax.train.reuse.huggingface import files as pretrained_files
from mupax.train.reuse.source import WeightsError
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.config import to_huggingface
from mupax.zoo.huggingface.tensorfile import INDEX, SINGLE, TensorFileError, write_tensors
from scripts.campaigns.injection.broken import broken_bytes, broken_header, broken_json
from tests.fixtures.properties import PROPERTY

MODEL = DecoderConfig(
    width=4, depth=2, num_heads=2, mlp_ratio=1.5, vocab_size=7, seq_len=3, tied=True
)
REFUSED = (MemoryLimitError, JsonError, TensorFileError, WeightsError, ConfigError)
SECONDS = 0.5
"""Of processor time, for one file at most; a good one takes a hundredth."""


def model_files(folder: Path) -> None:
    draw = np.random.default_rng(0)
    params = {
        name: draw.standard_normal(leaf.shape, np.float32)
        for name, leaf in definition(MODEL).abstract.items()
    }
    write_tensors(folder, weights.to_huggingface(MODEL, params))
    (folder / "config.json").write_text(json.dumps(to_huggingface(MODEL)))


def in_parts(folder: Path) -> None:
    model_files(folder)
    tensors = [(name, np.array(value)) for name, value in tensors_of(folder)]
    (folder / SINGLE).unlink()
    write_tensors(folder, tensors, shard_bytes=500)


def tensors_of(folder: Path) -> list[tuple[str, np.ndarray]]:
    files = weights.Tensors(folder)
    return [(name, files.read(name)) for name in files.shapes]


def imported(folder: Path) -> None:
    (folder / "hf").mkdir()
    model_files(folder / "hf")
    source = trained.read(folder / "hf")
    for file in (folder / "hf").iterdir():
        file.unlink()
    (folder / "hf").rmdir()
    pretrained_files.write_imported(source, PresetConfig(name="mup"), folder, "hf")


CASES: dict[str, tuple[Callable[[Path], None], str, Callable[[bytes, random.Random], bytes]]] = {
    "bytes of the tensors": (model_files, SINGLE, broken_bytes),
    "header of the tensors": (model_files, SINGLE, broken_header),
    "bytes of config.json": (model_files, "config.json", broken_bytes),
    "values of config.json": (model_files, "config.json", broken_json),
    "bytes of the index": (in_parts, INDEX, broken_bytes),
    "values of the index": (in_parts, INDEX, broken_json),
    "values of model.json": (imported, "model.json", broken_json),
    "header of imported tensors": (imported, SINGLE, broken_header),
}


@pytest.mark.core
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_broken_files_are_read_or_refused(case: Any, tmp_path: Path) -> None:
    make, name, break_file = case
    make(tmp_path)
    content = (tmp_path / name).read_bytes()
    good = trained.read(tmp_path)
    shapes = {key: value.shape for key, value in good.params.items()}
    messages = []

    @PROPERTY
    @given(st.randoms(use_true_random=False))
    def is_read_or_refused(draw: random.Random) -> None:
        (tmp_path / name).write_bytes(break_file(content, draw))
        began = time.process_time()
        try:
            source = trained.read(tmp_path)
        except REFUSED as error:
            messages.append(str(error))
        else:
            if source.model == good.model:
                assert {key: value.shape for key, value in source.params.items()} == shapes
            try:
                pretrained_files.write_huggingface(source, tmp_path / "out", "float32")
            except REFUSED as error:  # a model that this layout cannot hold
                messages.append(str(error))
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert time.process_time() - began < SECONDS

    is_read_or_refused()
    assert max(map(len, messages)) < 700, "what a stranger wrote fills the message"
    assert len(messages) > 10, "the mutations break too little to test anything"
