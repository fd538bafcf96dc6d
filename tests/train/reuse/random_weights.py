"""Folders of models with random weights, as they are published and as `mupax import` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mupax.train.config.preset import PresetConfig
from mupax.train.reuse.huggingface.files import write_imported
from mupax.train.reuse.source import WeightsSource
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.config import to_huggingface
from mupax.zoo.huggingface.tensorfile import write_tensors

LLAMA = DecoderConfig(
    width=12,
    depth=2,
    num_heads=2,
    mlp_ratio=1.5,
    vocab_size=17,
    seq_len=7,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)


def random_params(
    model: Any, seed: int = 0, std: float = 1.0, drawn_as: Any = np.float32
) -> dict[str, np.ndarray]:
    """Return normal weights of every parameter, float32.

    Args:
        drawn_as: Type of the draws. Other types are other weights.
    """
    random = np.random.default_rng(seed)
    params = {}
    for name, leaf in definition(model).abstract.items():
        normals = random.standard_normal(leaf.shape, drawn_as)
        params[name] = (std * normals).astype(np.float32)
    return params


def source_of(model: Any, params: dict[str, np.ndarray], **fields: Any) -> WeightsSource:
    """Return weights without multipliers. Fields other than those of the model are empty."""
    scales = dict.fromkeys(params, np.ones(()))
    return WeightsSource(model, params, scales, {}, [])._replace(**fields)


def published(folder: Path, model: Any = LLAMA, seed: int = 0, **tokens: Any) -> Path:
    """Write a model as Hugging Face has it, with token ids in its config.json."""
    folder.mkdir(parents=True)
    tensors = weights.to_huggingface(model, random_params(model, seed))
    write_tensors(folder, tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_huggingface(model, **tokens)))
    return folder


def imported(folder: Path, model: Any, seed: int = 3, **options: Any) -> Path:
    """Write a model as `mupax import` does, under sp."""
    # With these weights the model of the tests of serving writes complete characters.
    source = source_of(model, random_params(model, seed, drawn_as=np.float64))
    write_imported(source, PresetConfig(name="sp"), folder, "a test", **options)
    return folder
