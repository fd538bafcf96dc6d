"""A config on disk: nested plain values that say which model family they are, and the config again; and its flags.

What is read may come from anyone: every value is checked to be of its field's type.

Extensions that a run uses are recorded and imported again: the modules behind its optimizer, preset, data, model and metrics.

An extension is one line in a table of mupax (`OPTIMIZERS`, `PRESETS`, `SOURCES`, `FAMILIES`, `CONFIGS`, `RECIPES`, `METRICS`), written by
a module that is imported with `--plugin MODULE` or by an entry point of the group `mupax.plugins`, or by the user's own script.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import shlex
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from mupax import spellings, terminal
from mupax.config_fields import config_fields
from mupax.plugins import (
    FLAG,
    PluginError,
    digest,
    import_folder,
    import_plugin,
    importable_name,
    loaded_module,
    remember,
    trusted,
)
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import PRESETS
from mupax.table import module_of
from mupax.train.config.data import SIZES_OF_IMAGES, SOURCES, PixelsConfig, source, source_key
from mupax.train.config.metrics import METRICS, metric_name
from mupax.train.config.preset import PresetConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.zoo.configs import CONFIGS, FAMILIES, ConfigError, ModelConfig, family_class

GROUP = "mupax.plugins"
"""Entry points of installed packages that every command imports."""
_registered_by: dict[tuple[str, str], str] = {}
"""(table, name) to the plugin that wrote the line. Tables are of the process, and so is this."""

T = TypeVar("T")

_FAR = 2**53
"""Numbers beyond are no size, step or rate, and JSON's readers do not agree on them."""


class Extension(NamedTuple):
    """A line of a table that is not mupax's own."""

    table: str
    name: str
    module: str | None
    """What to import to have the line; `None` where only this process has it, such as a notebook."""

    def __str__(self) -> str:
        return f"{self.table} {self.name}"


def load(modules: Sequence[str]) -> None:
    """Import plugins by their names, and those of installed packages.

    Raises:
        PluginError: one cannot be imported.
    """
    for name in _entry_points():
        _import(name)
    for name in modules:
        if not _import(name) and not _provides(name):
            terminal.note(
                f"caution: {FLAG} {name} adds no line to a table of mupax (docs/howto/extend.md)"
            )


@functools.cache
def _entry_points() -> tuple[str, ...]:
    """Return the modules that installed packages name; they are looked up once a process."""
    return tuple(entry.module for entry in metadata.entry_points(group=GROUP))


def extensions(config: Config) -> list[Extension]:
    """Return the extensions that a config uses, each once."""
    names = {
        ("optimizer", config.optimizer.name): module_of(OPTIMIZERS[config.optimizer.name].direction)
    }
    preset = config.preset.name
    if preset in PRESETS:
        names["preset", preset] = module_of(PRESETS[preset])
    for place in _sources(config):
        names["data", source_key(place) or place] = module_of(source(place).loader)
    family = config.model.family
    names["model", family] = module_of(FAMILIES.get(family, family))
    for name, metric in METRICS.items():  # every run measures every metric
        names["metric", name] = metric.module
    result = []
    for (table, name), place in names.items():
        module = importable_name(place)
        plugin = _registered_by.get((table, name))
        if plugin is not None:
            result.append(Extension(table, name, plugin))
        elif module is None or module.partition(".")[0] != "mupax":
            result.append(Extension(table, name, module))
    base = (config.preset.base or "").partition(",")[0]
    if ("named model", base) in _registered_by:
        result.append(Extension("named model", base, _registered_by["named model", base]))
    return result


def record(config: Config) -> dict[str, dict[str, Any]]:
    """Return what a run records of its extensions: module to its file, a digest of its source and what it provides."""
    content: dict[str, dict[str, Any]] = {}
    for extension in extensions(config):
        if extension.module is None:
            terminal.note(
                f"caution: the {extension} is defined in this session alone, so no other command can read the run; "
                "move it into a module (docs/howto/extend.md)"
            )
            continue
        entry = content.setdefault(extension.module, {"file": None, "digest": None, "provides": []})
        entry["provides"].append(str(extension))
        module = loaded_module(extension.module)
        if module is not None:
            entry["file"] = getattr(module, "__file__", None)
            entry["digest"] = digest(module)
    return content


def remember_run(run: str, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Remember on this account that it trained a run with these modules, so that later commands may import them.

    Args:
        run: the name of the run.
        modules: as `record` returns them.
    """
    folders: dict[str, str] = {}
    for name in modules:
        module = loaded_module(name)
        folder = import_folder(module) if module is not None else None
        if folder is not None:
            folders[name] = folder
    if folders:
        remember(run, folders)


def restore(run_record: Mapping[str, Any]) -> None:
    """Import the modules that a run's record names, if this account may, and warn where they changed.

    Args:
        run_record: content of config.json. Nothing in it is trusted: a module is imported only if the user named it in this
            command, or trained this run on this account.

    Raises:
        PluginError: a module that is needed may not be imported, or is gone.
    """
    modules = run_record.get("plugins")
    if not isinstance(modules, Mapping):
        return
    for name, entry in modules.items():
        if not isinstance(name, str) or not isinstance(entry, Mapping):
            continue
        provides = [str(item) for item in entry.get("provides", [])]
        missing = [item for item in provides if not _is_known(item)]
        if (
            missing
            and not _needed(missing, run_record)
            and name not in trusted(run_record.get("run"))
        ):
            terminal.note(
                f"caution: {', '.join(missing)} of the module {name!r:.80} is not measured; add {FLAG} {name:.80} if you trust it"
            )
            continue
        if missing:
            folder = trusted(run_record.get("run")).get(name)
            if folder is None:
                raise PluginError(
                    f"the run needs {', '.join(missing)} of the module {name!r:.80}; "
                    f"add {FLAG} {name:.80} if you trust it, in its folder or with that on PYTHONPATH"
                )
            _import(name, folder)
        module = loaded_module(name)
        if module is not None and entry.get("digest") not in (None, digest(module)):
            terminal.note(
                f"caution: {name} has changed since the run recorded it: its {', '.join(provides)} may differ"
            )


def _needed(items: Sequence[str], run_record: Mapping[str, Any]) -> bool:
    """Return whether a run cannot be opened without some extensions, each written as `TABLE NAME`.

    A metric is needed only where the best checkpoint or early stopping goes by it.
    """
    for item in items:
        table, _, name = item.rpartition(" ")
        if table != "metric" or name in _ranking_metrics(run_record):
            return True
    return False


def _ranking_metrics(run_record: Mapping[str, Any]) -> list[str]:
    """Return the metrics that a recorded run ranks its checkpoints and stops by. The record may be of another version."""
    config = run_record.get("config")
    names: list[str] = []
    for section, field in (("checkpoint", "best_metric"), ("stop", "metric")):
        values = config.get(section) if isinstance(config, Mapping) else None
        row_name = values.get(field) if isinstance(values, Mapping) else None
        if isinstance(row_name, str):
            names.append(metric_name(row_name))
    return names


def _import(name: str, folder: str | None = None) -> bool:
    """Import a plugin, remember which lines it added to the tables, and return whether there are any."""
    before = _lines()
    import_plugin(name, folder)
    added = _lines() - before
    _registered_by.update(dict.fromkeys(added, name))
    return bool(added)


def _provides(module: str) -> bool:
    """Return whether lines of the tables are known to come from a module, or a model family lies in it."""
    if module in _registered_by.values():
        return True
    entries: list[object] = [row.direction for row in OPTIMIZERS.values()]
    entries += [row.loader for row in SOURCES.values()]
    entries += FAMILIES.values()
    modules = {*map(module_of, entries), *(metric.module for metric in METRICS.values())}
    from mupax.zoo.families import ModelConfig

    values = vars(loaded_module(module)).values()
    has_model = any(isinstance(value, type) and issubclass(value, ModelConfig) for value in values)
    return has_model or module in modules


def _lines() -> set[tuple[str, str]]:
    """Return (table, name) of every line of the tables."""
    tables: dict[str, Mapping[str, Any]] = {
        "optimizer": OPTIMIZERS,
        "preset": PRESETS,
        "data": SOURCES,
        "model": FAMILIES,
        "named model": CONFIGS,
        "recipe": RECIPES,
        "metric": METRICS,
    }
    lines: set[tuple[str, str]] = set()
    for table, names in tables.items():
        lines.update((table, name) for name in names)
    return lines


def _is_known(item: str) -> bool:
    """Return whether this process has an extension, written as `TABLE NAME`."""
    table, _, name = item.rpartition(" ")
    if table == "model" and ":" in name:
        return loaded_module(name.partition(":")[0]) is not None
    return (table, name) in _lines()


def _sources(config: Config) -> list[str]:
    """Return every place that a config reads data from, as data.name has them."""
    places = [config.data.name, *config.data.evaluation_sets.values()]
    for word in config.data.mix:
        place, _, weight = word.partition("=")[2].rpartition(":")
        places.append(place if place else weight)
    return places


def to_json(config: Config) -> dict[str, Any]:
    """The config as JSON reads it: dictionaries, lists and plain values; the model also says its `family`."""
    return json.loads(
        json.dumps({**dataclasses.asdict(config), "model": model_to_json(config.model)})
    )


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
        PluginError: a module that is needed and that this account may not import (`restore`).
        ConfigError: as `from_json`.
    """
    if "plugins" in run_record:
        restore(run_record)
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
    return _make(
        PixelsConfig,
        "data.pixels.",
        fields if "background" in fields else _older_pixels(fields, image_size),
    )


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


def differences(
    first: dict[str, Any], second: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
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


@functools.cache
def _type_hints(owner: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, whose texts Python would compile anew for every config."""
    return get_type_hints(owner)


def _make(owner: type[T], prefix: str, fields: Mapping[str, Any]) -> T:
    names = [field.name for field in dataclasses.fields(owner)]  # pyright: ignore[reportArgumentType]
    values = _object(prefix.rstrip(".") or "the config", fields)
    hints = _type_hints(owner)
    for name, value in values.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
            raise ConfigError(f"no config has a field {prefix}{name}; did you mean {prefix}{near}?")
        if dataclasses.is_dataclass(hints[name]) and not isinstance(value, hints[name]):
            values[name] = _make(hints[name], f"{prefix}{name}.", value)
        elif not _fits(value, hints[name]):
            raise ConfigError(
                f"{prefix}{name} is {value!r:.60}; it must be {_type_name(hints[name])}"
            )
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
        return isinstance(value, list | tuple) and all(
            _fits(item, get_args(hint)[0]) for item in value
        )
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
    named = [
        name
        for name, model in CONFIGS.items()
        if dataclasses.replace(model, compute=base.model.compute) == bare
    ]
    if named and bare != base.model:
        flags += ["--model", named[0]]
        data = dataclasses.replace(base.data, name=config.data.name)
        base = dataclasses.replace(base, model=bare, data=data)
        flags += (
            ["--data.name", shlex.quote(config.data.name)]
            if data != RECIPES[config.recipe]().data
            else []
        )
    if base.model.family != config.model.family:
        return None
    changed = {
        name: value
        for name, _, value in differences(to_json(base.resolved()), to_json(config.resolved()))
    }
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
            flags += [
                shlex.quote(str(word)) for word in (value if isinstance(value, list) else [value])
            ]
    return [*flags, *_plugin_flags(config)]


def _plugin_flags(config: Config) -> list[str]:
    """Return the flags that import the extensions of a config."""
    modules = sorted({extension.module for extension in extensions(config) if extension.module})
    return [word for module in modules for word in (FLAG, module)]
