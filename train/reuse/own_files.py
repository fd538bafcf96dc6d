"""Tokenizer and chat template of a run, from the files that the run keeps.

Commands that use a run read them here. The run's training data is not needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mupax.train.checkpoints.assets import Assets
from mupax.train.config.data import DataConfig


def settings(
    recorded: DataConfig,
    facts: Mapping[str, Any],
    assets: Assets | None,
    current: DataConfig | None = None,
) -> DataConfig:
    """Return data settings with the paths of the run's own tokenizer and chat template.

    A run of an older version has no files of its own. The tokenizer that was trained for its
    `bpe:SIZE` is then looked up in the cache. If the cache does not have it, the settings stay
    unchanged.

    Args:
        recorded: data settings as the run's config has them.
        facts: record of the run's data. `tokenizer` in it is a key made from the tokenizer's
            content.
        assets: files of the run. `None` for a run of an older version.
        current: settings to change, by default those of the run. Only fields that are equal to the
            run's change.

    Raises:
        AssetsError: an asset of the run is missing or damaged.
    """
    data = recorded if current is None else current
    if assets is not None:
        data = assets.in_place_of(recorded, data)
    key = facts.get("tokenizer")
    # The key belongs to the recorded tokenizer, and not to one that replaces it.
    if data.tokenizer != recorded.tokenizer or not isinstance(key, str):
        return data

    from mupax.train.data.text import named_tokenizers

    cached = named_tokenizers.cached(data.tokenizer, data.separator, key)
    if cached is None:
        return data
    return dataclasses.replace(data, tokenizer=str(cached))
