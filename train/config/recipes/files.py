"""A config from a file, where a recipe is asked for: what a run recorded of itself, or fields of a recipe, in JSON or YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mupax.buckets import path_of
from mupax.train.config import data_sizes
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json, model_to_json, to_json, with_current_pixels
from mupax.train.config.run import Config
from mupax.zoo import configs
from mupax.zoo.configs import ConfigError

_OF_ONE_RUN = ("workdir", "resume", "resume_change")
"""Fields that a run's record has and its repetition does not take."""

_POWER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def recipe(path: str) -> Callable[[], Config]:
    """What makes the config of a file, as a recipe does.

    The file holds fields as `--print-config` prints them, or a run's config.json, which has them under `config`; workdir and
    resume of that are left out. Fields that it leaves out are those of its `recipe`. `model` may be a name of `python -m zoo`.

    Args:
        path: of the file, on a disk or in a bucket.

    Raises:
        ConfigError: the file is not there or no such config; the text names the file.
    """
    fields = _read(path)
    fields = {name: value for name, value in fields.get("config", fields).items() if name not in _OF_ONE_RUN}

    def load() -> Config:
        try:
            return from_json(_over(_start(fields), with_current_pixels(fields, is_record=False)))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    load.__doc__ = f"The config of {path}."
    return load


def model_fields(path: str) -> frozenset[str]:
    """Return the fields of the model that a file sets, `data_sizes.NAMED` where it names a model; raises as `recipe`."""
    content = _read(path)
    model = content.get("config", content).get("model", {})
    if isinstance(model, str):
        return data_sizes.NAMED
    return frozenset({"family"} | model.keys()) if isinstance(model, dict) else frozenset({"family"})


def _read(path: str) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 3e-4 as the number that it is: YAML 1.1 wants a point in it."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _POWER, list("-+0123456789"))
    try:
        text = path_of(path).read_text()
        content = json.loads(text) if path.endswith(".json") else yaml.load(text, Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `--print-config > {path}` writes one") from None
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    inner = content.get("config", content) if isinstance(content, dict) else None
    if not isinstance(inner, dict) or not all(isinstance(name, str) for name in inner):
        raise ConfigError(f"{path} holds no named fields; write them as `--print-config` does")
    return content


def _start(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the recipe that the file names, with the model that it names; none where it names none."""
    name, model = fields.get("recipe"), fields.get("model")
    if name not in RECIPES:
        if name is not None and "data" not in fields:
            raise ConfigError(f"no recipe is named {name!r}; the recipes are {', '.join(RECIPES)}")
        if "data" not in fields or "model" not in fields:
            raise ConfigError(f"it names no recipe; write recipe: with one of {', '.join(RECIPES)}")
        return {}
    config = to_json(RECIPES[str(name)]())
    if isinstance(model, str):
        compute = config["model"]["compute"]
        return config | {"model": model_to_json(configs.get(model)) | {"compute": compute}}
    if isinstance(model, dict) and model.get("family", config["model"]["family"]) != config["model"]["family"]:
        del config["model"]
    return config


def _over(start: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a start with those of a file above them, group by group."""
    merged = dict(start)
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _over(merged[name], value)
        elif not (name == "model" and isinstance(value, str)):
            merged[name] = value
    return merged
