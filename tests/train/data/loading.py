"""Small models, and data sets loaded for them as a run loads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mupax.train import data
from mupax.train.config.run import DataConfig
from mupax.train.data.interface import Batch
from mupax.train.data.streams.batches import Stream
from mupax.zoo import configs
from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig

LM_TINY = configs.get("lm-tiny")
assert isinstance(LM_TINY, DecoderConfig)
TEXT_MODEL = dataclasses.replace(LM_TINY, seq_len=7)
IMAGE_MODEL = ViTConfig(
    width=6, depth=1, num_heads=1, image_size=12, patch_size=4, channels=3, num_classes=3
)


def load_with_notes(
    name: str, model: ModelConfig = TEXT_MODEL, *, seed: int = 0, batch_size: int = 8, **fields: Any
) -> tuple[Any, list[str]]:
    """Load a data set with these fields of its config. Return it and its notes.

    Args:
        fields: Fields of the config. `vocab_size` and `seq_len` are those of the model.
    """
    notes: list[str] = []
    sizes = {name: fields.pop(name) for name in ("vocab_size", "seq_len") if name in fields}
    model = dataclasses.replace(model, **sizes)
    config = DataConfig(name=name, batch_size=batch_size, **fields)
    return data.load(config, model, seed=seed, note=notes.append), notes


def load(name: str, *args: Any, **fields: Any) -> Any:
    """Load a data set as `load_with_notes` does, without its notes."""
    return load_with_notes(name, *args, **fields)[0]


def assert_refused(message: str, name: str, *args: Any, **fields: Any) -> None:
    """Assert that a data set is refused with a message that the pattern matches."""
    with pytest.raises(data.DataError, match=message):
        load(name, *args, **fields)


def token_ids(source: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return all training and evaluation ids of a text. A stream is tokenized to its end."""
    if isinstance(source, Stream):
        train = np.concatenate(stream_shards(source))
    else:
        train = np.asarray(source._train)
    return train, np.asarray(source._eval)


def stream_shards(stream: Stream) -> list[np.ndarray]:
    """Tokenize each shard of a stream to its end. Return the ids of each."""
    for shard in stream._lanes:
        shard.until(1 << 40, print)
    return [shard.read(0, shard.tokens) for shard in stream._lanes]


def documents(ids: np.ndarray) -> list[str]:
    """Split ids that are bytes into documents."""
    return bytes(ids.astype(np.uint8)).decode().split("\0")[:-1]


def assert_batches_equal(actual: Batch, expected: Batch) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return a batch of the rows of all batches."""
    names = batches[0].keys()
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}
