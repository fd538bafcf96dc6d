"""The tokenizer and the chat template of a run, found where the run keeps them, without its training data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mupax.train.checkpoints.assets import Assets
from mupax.train.config.data import DataConfig


def settings(
    recorded: DataConfig,
    facts: Mapping[str, Any],
    own: Assets | None,
    current: DataConfig | None = None,
) -> DataConfig:
    """Return settings of data whose tokenizer and chat template are the run's own files.

    A run of an older version has no files of its own: the tokenizer that `bpe:SIZE` once made is looked for in the cache.
    Where it is not there either, the settings stay as they are.

    Args:
        recorded: settings of the run.
        facts: what the run recorded about its data; `tokenizer` names the content of its tokenizer.
        own: the run's assets, if it has any.
        current: settings to change; those of the run unless given. What they have otherwise than the run stays.

    Raises:
        AssetsError: a file of the run's own is missing or damaged.
    """
    data = recorded if current is None else current
    if own is not None:
        data = own.in_place_of(recorded, data)
    key = facts.get("tokenizer")
    if data.tokenizer != recorded.tokenizer or not isinstance(key, str):
        return data
    from mupax.train.data.text import named_tokenizers

    cached = named_tokenizers.cached(data.tokenizer, data.separator, key)
    return data if cached is None else dataclasses.replace(data, tokenizer=str(cached))
