"""A config on disk: nested plain values that say which model family they are, and the config again."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from train.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from zoo.configs import ComputeConfig, ConfigError, DecoderConfig, ViTConfig

FAMILIES = {"vit": ViTConfig, "decoder": DecoderConfig}
OWNERS = {
    "data": DataConfig,
    "preset": PresetConfig,
    "optimizer": OptimizerConfig,
    "mesh": MeshConfig,
    "distributed": DistributedConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
}

T = TypeVar("T")


def to_json(config: Config) -> dict[str, Any]:
    """The config as nested dictionaries of plain values; the model also says its `family`."""
    fields = dataclasses.asdict(config)
    return {**fields, "model": {"family": config.model.family, **fields["model"]}}


def from_json(fields: Mapping[str, Any]) -> Config:
    """The config that `to_json` wrote. A field left out takes its default.

    Raises:
        ConfigError: a field that no config has, one without a default that is missing, or values that do not fit together.
    """
    fields = dict(fields)
    model = dict(fields.get("model", {}))
    family = model.pop("family", None)
    if family not in FAMILIES:
        raise ConfigError(f"model.family is {family!r}; write one of {', '.join(FAMILIES)}")
    model["compute"] = _made(ComputeConfig, "model.compute.", model.get("compute", {}))
    fields["model"] = _made(FAMILIES[family], "model.", model)
    for name, owner in OWNERS.items():
        if name in fields:
            fields[name] = _made(owner, f"{name}.", fields[name])
    return _made(Config, "", fields)


def _made(owner: type[T], prefix: str, fields: Mapping[str, Any]) -> T:
    known = [field.name for field in dataclasses.fields(owner)]  # pyright: ignore[reportArgumentType]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise ConfigError(f"no config has a field {prefix}{name}; did you mean {prefix}{near}?")
    try:
        return owner(**fields)
    except TypeError as error:
        raise ConfigError(f"{prefix or 'the config'}: {error}") from error
