"""A config on disk: nested plain values that say which model family they are, and the config again; and its flags.

What is read may come from anyone: every value is checked to be of its field's type.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import shlex
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mupax import spellings
from mupax.config_fields import config_fields
from mupax.train.config.data import SIZES_OF_IMAGES, PixelsConfig, source
from mupax.train.config.preset import PresetConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.zoo.configs import CONFIGS, ConfigError, ModelConfig, family_class

T = TypeVar("T")

_FAR = 2**53
"""Numbers beyond are no size, step or rate, and JSON's readers do not agree on them."""


def to_json(config: Config) -> dict[str, Any]:
    """The config as JSON reads it: dictionaries, lists and plain values; the model also says its `family`."""
    return json.loads(json.dumps({**dataclasses.asdict(config), "model": model_to_json(config.model)}))


def model_to_json(model: ModelConfig) -> dict[str, Any]:
    """The model as nested dictionaries of plain values, with its `family`."""
    return {"family": model.family, **dataclasses.asdict(model)}


def model_from_json(fields: Mapping[str, Any]) -> ModelConfig:
    """The model that `model_to_json` wrote; raises as `from_json`."""
    fields = _object("model", fields)
    return _make(family_class(str(fields.pop("family", None))), "model.", fields)


def from_json(fields: Mapping[str, Any]) -> Config:
    """The config that `to_json` wrote. A field left out takes its default.

    Raises:
        ConfigError: a field that no config has, one without a default that is missing, a value of another type, or values
            that do not fit together.
    """
    fields = with_current_preset(with_current_pixels(_object("the config", fields)))
    return _make(Config, "", {**fields, "model": model_from_json(fields.get("model", {}))})


def run_config(run_record: Mapping[str, Any]) -> Config:
    """Return the config of a run, after importing the extensions that it uses.

    Args:
        run_record: content of its config.json, which may be a stranger's.

    Raises:
        PluginError: a module that is needed and that this account may not import (`mupax.train.config.plugins.restore`).
        ConfigError: as `from_json`.
    """
    if "plugins" in run_record:
        from mupax.train.config import plugins

        plugins.restore(run_record)
    return from_json(run_record["config"])


OLDER_PIXELS = PixelsConfig(fit="centre", background="none")
"""How images were read before `background` was a field: its absence from a record says so."""


def pixels_from_json(fields: Mapping[str, Any], image_size: int) -> PixelsConfig:
    """Return the `PixelsConfig` whose fields a record holds; raises as `from_json`.

    Args:
        fields: of the record, perhaps of an older version.
        image_size: of the model, in pixels.
    """
    fields = _object("data.pixels", fields)
    return _make(PixelsConfig, "data.pixels.", fields if "background" in fields else _older_pixels(fields, image_size))


def with_current_pixels(config: Mapping[str, Any], is_record: bool = True) -> dict[str, Any]:
    """Return a config as JSON whose `data.pixels` mean today what they meant when they were recorded.

    Args:
        config: as `to_json` gave it then.
        is_record: whether every field that an older version had is there; a file that a person wrote has only some.
    """
    data = config.get("data")
    model = config.get("model")
    if not isinstance(data, Mapping) or not isinstance(model, Mapping):
        return dict(config)
    pixels = data.get("pixels", {})
    older_fields = {field.name for field in dataclasses.fields(PixelsConfig)} - {"background"}
    if not isinstance(pixels, Mapping) or "background" in pixels:
        return dict(config)
    if not is_record and not older_fields <= pixels.keys():
        return dict(config)
    size = model.get("image_size")
    if "pixels" not in source(str(data.get("name"))).reads or not isinstance(size, int):
        return {**config, "data": {name: value for name, value in data.items() if name != "pixels"}}
    return {**config, "data": {**data, "pixels": _older_pixels(pixels, size)}}


def _older_pixels(fields: Mapping[str, Any], image_size: int) -> dict[str, Any]:
    """Return the fields of older pixels with what was not written out then."""
    older = {"fit": OLDER_PIXELS.fit, "background": OLDER_PIXELS.background, **fields}
    if older["fit"] == "edge" and older.get("resize") is None:
        older["resize"] = image_size
    return older


def with_current_preset(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as JSON whose preset is one that comes with mupax today, with the numbers that it had."""
    preset = config.get("preset")
    if not isinstance(preset, Mapping) or ":" not in str(preset.get("name")):
        return dict(config)
    from mupax.train.config import tuned

    return {**config, "preset": tuned.without_moved(preset)}


def preset_from_json(fields: Mapping[str, Any]) -> PresetConfig:
    """The `PresetConfig` whose fields a record holds; raises as `from_json`."""
    return _make(PresetConfig, "preset.", _object("preset", fields))


def completed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `now` with the values of `before`, where it has them: another version may have recorded others.

    Args:
        before: a recorded config, as `to_json` gave it then.
        now: a config of this version, as `to_json` gives it.
    """
    return _filled(with_current_preset(with_current_pixels(before)), now)


def _filled(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _filled(before[name], value)
        if isinstance(value, dict) and isinstance(before.get(name), dict)
        else before.get(name, value)
        for name, value in now.items()
    }


def differences(first: dict[str, Any], second: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of every field in which two configs differ.

    Args:
        first: a config as `to_json` gives it, or a part of one.
        second: the same of the other; a field that one of them lacks is None there.
        prefix: of the names, with a dot at its end.
    """
    for name in sorted({*first, *second}):
        a, b = first.get(name), second.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{prefix}{name}.")
        elif a != b:
            yield f"{prefix}{name}", a, b


def text_of(value: Any) -> str:
    """A field's value as it is written on a command line; of an empty list `nothing`."""
    return " ".join(map(str, value)) or "nothing" if isinstance(value, list) else str(value)


def _make(owner: type[T], prefix: str, fields: Mapping[str, Any]) -> T:
    names = [field.name for field in dataclasses.fields(owner)]  # pyright: ignore[reportArgumentType]
    values, hints = _object(prefix.rstrip(".") or "the config", fields), get_type_hints(owner)
    for name, value in values.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
            raise ConfigError(f"no config has a field {prefix}{name}; did you mean {prefix}{near}?")
        if dataclasses.is_dataclass(hints[name]) and not isinstance(value, hints[name]):
            values[name] = _make(hints[name], f"{prefix}{name}.", value)
        elif not _fits(value, hints[name]):
            raise ConfigError(f"{prefix}{name} is {value!r:.60}; it must be {_type_name(hints[name])}")
        elif isinstance(value, list):
            values[name] = tuple(value)
    try:
        return owner(**values)
    except TypeError as error:
        raise ConfigError(f"{prefix or 'the config'}: {error}") from error


def _object(what: str, fields: Any) -> dict[str, Any]:
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
        raise ConfigError(f"{what} is {fields!r:.60}, not an object with named fields")
    return dict(fields)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value, as JSON has it, is of an annotated type."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return type(value) in (int, float) and -_FAR < value < _FAR
    if hint is int:
        return type(value) is int and -_FAR < value < _FAR
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    return str(hint) if get_origin(hint) else hint.__name__


def command_of(config: Config) -> str:
    """Return the command that trains a config, quoted for a shell; "" where no recipe has its name, or no flag for a value."""
    flags = words(config)
    return "" if flags is None else " ".join(["mupax train", config.recipe, *flags])


def words_of(command: str) -> list[str]:
    """Return the words after `mupax` of a recorded command, which an earlier version may have spelled otherwise."""
    program, *recorded = shlex.split(command) or [""]
    if program == "python" and recorded[:2] == ["-m", "train"]:
        recorded = recorded[1:]
    elif program != "mupax":
        return []
    return spellings.current_words(recorded)


def words(config: Config) -> list[str] | None:
    """Flags that differ from the recipe's config; None where there is no such recipe, or no flag for a value."""
    if config.recipe not in RECIPES:
        return None
    base = RECIPES[config.recipe]()
    flags: list[str] = []
    bare = dataclasses.replace(config.model, compute=base.model.compute)
    named = [name for name, model in CONFIGS.items() if dataclasses.replace(model, compute=base.model.compute) == bare]
    if named and bare != base.model:
        flags += ["--model", named[0]]
        data = dataclasses.replace(base.data, name=config.data.name)
        base = dataclasses.replace(base, model=bare, data=data)
        flags += ["--data.name", shlex.quote(config.data.name)] if data != RECIPES[config.recipe]().data else []
    if base.model.family != config.model.family:
        return None
    changed = {name: value for name, _, value in differences(to_json(base.resolved()), to_json(config.resolved()))}
    if config.model.task == "images" and config.data.name != RECIPES[config.recipe]().data.name:
        # Written out even where they are the recipe's: a command without them takes them from the data.
        changed |= {f"model.{name}": getattr(config.model, name) for name in SIZES_OF_IMAGES}
    started = {
        field.path
        for field in config_fields(config)
        if field.affects is not None and field.affects.effect in ("origin", "session", "processes")
    }
    for name, value in changed.items():
        owner, dot, field = name.replace("_", "-").rpartition(".")
        if name in started:
            continue
        if value == []:
            return None
        flags.append(f"--{owner}{dot}{'no-' if value is False else ''}{field}")
        if not isinstance(value, bool):
            flags += [shlex.quote(str(word)) for word in (value if isinstance(value, list) else [value])]
    return [*flags, *_plugin_flags(config)]


def _plugin_flags(config: Config) -> list[str]:
    """Return the flags that import the extensions of a config."""
    from mupax.train.config import plugins

    modules = sorted({extension.module for extension in plugins.extensions(config) if extension.module})
    return [word for module in modules for word in (plugins.FLAG, module)]
