"""Record of a config: to JSON and back, to a command, and the extensions that it uses.

JSON may come from anyone, so every value is checked against the type of its field.

An extension is one line in a table of mupax (`OPTIMIZERS`, `PRESETS`, `SOURCES`, `FAMILIES`,
`CONFIGS`, `RECIPES`, `METRICS`). It is written by a module that is imported with `--plugin MODULE`
or by an entry point of the group `mupax.plugins`, or by the user's own script. A run records the
modules behind its optimizer, preset, data, model and metrics, and later commands import them again.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import shlex
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from mupax import MupaxError, terminal
from mupax.config_fields import config_fields, field_types
from mupax.mappings import drop_keys, module_of
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
from mupax.train.config.data import (
    SIZES_OF_IMAGES,
    SOURCES,
    PixelsConfig,
    source,
    source_key,
    unread_fields,
)
from mupax.train.config.metrics import METRICS, metric_name
from mupax.train.config.preset import PresetConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.zoo.configs import CONFIGS, FAMILIES, ConfigError, ModelConfig, family_class

GROUP = "mupax.plugins"
"""Group of entry points of installed packages that every command imports."""
_registered_by: dict[tuple[str, str], str] = {}
"""Module name of the plugin that added a line to a table, by (table, name), in this process."""

T = TypeVar("T")

_METRIC = "metric "
"""Beginning of a metric in the record of a module, `TABLE NAME`."""
_METRIC_FIELDS = {"checkpoint": "best_metric", "stop": "metric"}
"""Field that names a metric, by section of the config."""

_LARGEST_INTEGER = 2**53
"""Bound on integers in JSON. Larger ones are no size or step, and readers disagree on them."""


class Extension(NamedTuple):
    """Optimizer, preset, kind of data, model or metric that a plugin or a user's script adds.

    Attributes:
        table: Kind of the extension, such as "optimizer". It stands for a table such as
            `OPTIMIZERS`, to which the extension is added.
        name: Name of the extension, which is its key in the table.
    """

    table: str
    name: str
    module: str | None
    """Module whose import adds the extension. `None` if it was defined in this process alone, such
    as in a notebook."""

    def __str__(self) -> str:
        return f"{self.table} {self.name}"


def load(modules: Sequence[str]) -> None:
    """Import plugins by their names, after the plugins of installed packages.

    If a named plugin adds nothing to the tables of mupax, a caution is printed on standard error.

    Raises:
        PluginError: A plugin cannot be imported.
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
    """Return the plugin modules that installed packages declare as entry points of `GROUP`.

    They are looked up once per process.
    """
    return tuple(entry.module for entry in metadata.entry_points(group=GROUP))


def extensions(config: Config) -> list[Extension]:
    """Return the optimizer, preset, data and other parts of a config that mupax does not define.

    Every metric of this process counts as used. A model that a plugin has added under a name counts
    if it is the preset's base.
    """
    modules = _modules_of_lines(config)
    result: list[Extension] = []
    for (table, name), module_name in modules.items():
        module = importable_name(module_name)
        # A plugin may register a function of another package. Importing that package alone would
        # not register it, so the plugin's own name is recorded.
        plugin = _registered_by.get((table, name))
        if plugin is not None:
            result.append(Extension(table, name, plugin))
        elif module is None or module.partition(".")[0] != "mupax":
            result.append(Extension(table, name, module))

    # A base may be a named model of a plugin, even if the run's model is mupax's own.
    base = (config.preset.base or "").partition(",")[0]
    base_plugin = _registered_by.get(("named model", base))
    if base_plugin is not None:
        result.append(Extension("named model", base, base_plugin))
    return result


def _modules_of_lines(config: Config) -> dict[tuple[str, str], str]:
    """Return the name of the module that defines each part of a config, by (table, name).

    Parts are the optimizer, the preset, the data, the model family and all metrics.
    """
    modules: dict[tuple[str, str], str] = {}
    optimizer = config.optimizer.name
    modules["optimizer", optimizer] = module_of(OPTIMIZERS[optimizer].direction)
    preset = config.preset.name
    if preset in PRESETS:
        modules["preset", preset] = module_of(PRESETS[preset])
    for place in _sources(config):
        modules["data", source_key(place) or place] = module_of(source(place).loader)
    family = config.model.family
    modules["model", family] = module_of(FAMILIES.get(family, family))
    for name, metric in METRICS.items():  # every run measures every metric
        modules["metric", name] = metric.module
    return modules


def record(config: Config) -> dict[str, dict[str, Any]]:
    """Return the modules behind the extensions of a config, as a run records them.

    An extension that only this session defines is left out, with a caution on standard error.

    Returns:
        Name of each module to its `file`, a `digest` of its source and the lines that it
        `provides`.
    """
    content: dict[str, dict[str, Any]] = {}
    for extension in extensions(config):
        if extension.module is None:
            terminal.note(
                f"caution: the {extension} is defined in this session alone, so no other command "
                "can read the run; move it into a module (docs/howto/extend.md)"
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
    """Write into the user's folder that this account trained a run with these modules.

    Later commands on this account may then import them. Modules without a file are left out. If
    none has a file, nothing is written.

    Args:
        run: Name of the run, which `restore` looks up.
        modules: Modules as `record` returns them.
    """
    folders: dict[str, str] = {}
    for name in modules:
        module = loaded_module(name)
        folder = import_folder(module) if module is not None else None
        if folder is not None:
            folders[name] = folder
    if folders:
        remember(run, folders)


def restore(run_record: Mapping[str, Any], *, needs_metrics: bool = True) -> set[str]:
    """Import the modules that a run's record names, and warn if they have changed.

    Nothing in the record is trusted. A module is imported only if the user named it in this
    command, or trained this run on this account. A metric by which the run neither ranks
    checkpoints nor stops is not needed: if its module may not be imported, a caution is printed.

    Args:
        run_record: Content of config.json, perhaps of a stranger.
        needs_metrics: False for a command that does not train the run further. No metric is needed
            then: a caution is also printed if the module of one is gone.

    Returns:
        Names of the metrics that this process lacks, because their modules were not imported.

    Raises:
        PluginError: A module that is needed may not be imported, or is gone.
    """
    absent: set[str] = set()
    modules = run_record.get("plugins")
    if not isinstance(modules, Mapping):
        return absent
    for name, entry in modules.items():
        if not isinstance(name, str) or not isinstance(entry, Mapping):
            continue
        provides = [str(item) for item in entry.get("provides", [])]
        missing = [item for item in provides if not _is_known(item)]
        # A module is not imported if this process already has every line that it provides.
        if missing:
            missing_text = ", ".join(missing)
            metrics = [item.removeprefix(_METRIC) for item in missing if item.startswith(_METRIC)]
            only_metrics = len(metrics) == len(missing)
            folder = trusted(run_record.get("run")).get(name)
            if folder is None:
                ranking = _ranking_metrics(run_record) if needs_metrics else []
                if not only_metrics or set(metrics).intersection(ranking):
                    raise PluginError(
                        f"the run needs {missing_text} of the module {name!r:.80}; "
                        f"add {FLAG} {name:.80} if you trust it, in its folder or with that on "
                        "PYTHONPATH"
                    )
                _caution(
                    f"{missing_text} of the module {name!r:.80} is not measured; "
                    f"add {FLAG} {name:.80} if you trust it"
                )
                absent.update(metrics)
                continue
            try:
                _import(name, folder)
            except MupaxError as error:
                if needs_metrics or not only_metrics:
                    raise
                _caution(f"{missing_text} is not measured: {error}")
                absent.update(metrics)
                continue
        module = loaded_module(name)
        if module is not None and entry.get("digest") not in (None, digest(module)):
            _caution(
                f"{name} has changed since the run recorded it: "
                f"its {', '.join(provides)} may differ"
            )
    return absent


@functools.cache
def _caution(text: str) -> None:
    """Print a caution once per process, because a command may read a run's record several times."""
    terminal.note(f"caution: {text}")


def _ranking_metrics(run_record: Mapping[str, Any]) -> list[str]:
    """Return the metrics by which a recorded run ranks its checkpoints and stops.

    The record may be of another version, so nothing in it is taken for granted.
    """
    config = run_record.get("config")
    names: list[str] = []
    for section, field in _METRIC_FIELDS.items():
        values = config.get(section) if isinstance(config, Mapping) else None
        row_name = values.get(field) if isinstance(values, Mapping) else None
        if isinstance(row_name, str):
            names.append(metric_name(row_name))
    return names


def _import(name: str, folder: str | None = None) -> bool:
    """Import a plugin, and return whether it added lines to the tables.

    The plugin's name is stored in `_registered_by` for each line that it added.

    Args:
        folder: Folder that has the module. `None` searches `sys.path` and then the working folder.
    """
    # A module does not list the lines that it registers, so the tables before and after are
    # compared.
    earlier_lines = _lines()
    import_plugin(name, folder)
    added = _lines() - earlier_lines
    _registered_by.update(dict.fromkeys(added, name))
    return bool(added)


def _provides(module: str) -> bool:
    """Return whether a module has extended mupax.

    A module has if it added a line to a table, defines the function or class of a line, or has a
    model family (a subclass of `ModelConfig`) in it.
    """
    if module in _registered_by.values():
        return True
    entries: list[object] = [row.direction for row in OPTIMIZERS.values()]
    entries += [row.loader for row in SOURCES.values()]
    entries += FAMILIES.values()
    modules = {module_of(entry) for entry in entries}
    modules |= {metric.module for metric in METRICS.values()}
    if module in modules:
        return True

    # A family without a line in `FAMILIES` is named MODULE:CLASS.
    from mupax.zoo.families import ModelConfig

    values = vars(loaded_module(module)).values()
    return any(isinstance(value, type) and issubclass(value, ModelConfig) for value in values)


def _lines() -> set[tuple[str, str]]:
    """Return (table, name) of everything that can be chosen by name, such as ("optimizer", "sgd").

    Extensions that are already imported are among them.
    """
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
    """Return whether this process already has an extension, written as `TABLE NAME`."""
    table, _, name = item.rpartition(" ")
    # MODULE:CLASS has no line in a table, so only its module is checked.
    if table == "model" and ":" in name:
        return loaded_module(name.partition(":")[0]) is not None
    return (table, name) in _lines()


def _sources(config: Config) -> list[str]:
    """Return every source of data that a config reads, written as for `data.name`.

    They are `data.name` itself, the sources of the further evaluation sets, and those of a mixture.
    """
    places = [config.data.name, *config.data.evaluation_sets.values()]
    for word in config.data.mix:
        # The text is SOURCE:WEIGHT. Without a colon `rpartition` returns all of it as the last
        # part.
        place, _, last_part = word.partition("=")[2].rpartition(":")
        places.append(place or last_part)
    return places


def to_json(config: Config) -> dict[str, Any]:
    """Return a config as JSON reads it: dictionaries, lists and plain values.

    The model also has its `family`.
    """
    fields = {**dataclasses.asdict(config), "model": model_to_json(config.model)}
    # The way through JSON text turns tuples into lists, as they are read from a file.
    return json.loads(json.dumps(fields))


def model_to_json(model: ModelConfig) -> dict[str, Any]:
    """Return a model as nested dictionaries of plain values, with its `family`."""
    return {"family": model.family, **dataclasses.asdict(model)}


def model_from_json(fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model that `model_to_json` wrote.

    Raises:
        ConfigError: The fields make no model (`from_json`).
    """
    fields = _object("model", fields)
    return _make(family_class(str(fields.pop("family", None))), "model.", fields)


def from_json(fields: Mapping[str, Any]) -> Config:
    """Return the config that `to_json` wrote. A field that is left out takes its default.

    Settings of images and tuned presets that an older version recorded are converted first.

    Raises:
        ConfigError: A field that no config has, a missing field without a default, a value of
            another type, or values that do not fit together.
    """
    fields = with_current_preset(with_current_pixels(_object("the config", fields)))
    model = model_from_json(fields.get("model", {}))
    return _make(Config, "", {**fields, "model": model})


def run_config(run_record: Mapping[str, Any], *, needs_metrics: bool = True) -> Config:
    """Return the config of a run, after its extensions are imported.

    Args:
        run_record: Content of the run's config.json, perhaps of a stranger.
        needs_metrics: False for a command that does not train the run further. If the module of a
            metric is gone, the returned config then neither ranks checkpoints nor stops by it.

    Raises:
        PluginError: A module that is needed may not be imported on this account (`restore`).
        ConfigError: There is no `config`, or its fields make no config (`from_json`).
    """
    absent: set[str] = set()
    if "plugins" in run_record:
        absent = restore(run_record, needs_metrics=needs_metrics)
    fields = dict(_object("the config", run_record.get("config")))
    for section, field in _METRIC_FIELDS.items():
        values = fields.get(section)
        if not isinstance(values, Mapping) or metric_name(str(values.get(field))) not in absent:
            continue
        # A number of best checkpoints or evaluations means nothing without its metric.
        removed = (field, "keep_best", "patience", "min_delta")
        fields[section] = {name: value for name, value in values.items() if name not in removed}
    return from_json(fields)


OLDER_PIXELS = PixelsConfig(fit="centre", background="none")
"""Settings by which images were read before `background` was a field. A record without the field
means them."""


def pixels_from_json(fields: Mapping[str, Any], image_size: int) -> PixelsConfig:
    """Return the `PixelsConfig` whose fields a record holds.

    A record without `background` is of an older version, whose defaults it gets.

    Args:
        fields: Fields of the record, perhaps of an older version.
        image_size: Pixels on a side of the images that the model reads.

    Raises:
        ConfigError: The fields make no `PixelsConfig` (`from_json`).
    """
    fields = _object("data.pixels", fields)
    if "background" not in fields:
        fields = _older_pixels(fields, image_size)
    return _make(PixelsConfig, "data.pixels.", fields)


def with_current_pixels(config: Mapping[str, Any], is_record: bool = True) -> dict[str, Any]:
    """Return a config in which `data.pixels` of an older version has today's fields.

    Older pixels have no `background`. They get the defaults of that version, or are dropped if the
    data do not read them. A config with today's pixels, or without data or model, is returned
    unchanged, as a copy. So is a file that a person wrote without all of the older fields.

    Args:
        config: Config as `to_json` gave it when it was recorded.
        is_record: False for a file that a person wrote, which may have only some of the fields.
    """
    data = config.get("data")
    model = config.get("model")
    if not isinstance(data, Mapping) or not isinstance(model, Mapping):
        return dict(config)
    pixels = data.get("pixels", {})
    if not isinstance(pixels, Mapping) or "background" in pixels:
        return dict(config)
    older_fields = {field.name for field in dataclasses.fields(PixelsConfig)} - {"background"}
    # Fields that a person left out have today's defaults, not those of the older version.
    if not is_record and not older_fields <= pixels.keys():
        return dict(config)

    size = model.get("image_size")
    reads_pixels = "pixels" in source(str(data.get("name"))).reads
    if not reads_pixels or not isinstance(size, int):
        other_fields = drop_keys(data, ("pixels",))
        return {**config, "data": other_fields}
    return {**config, "data": {**data, "pixels": _older_pixels(pixels, size)}}


def _older_pixels(fields: Mapping[str, Any], image_size: int) -> dict[str, Any]:
    """Return the fields of an older `data.pixels` with that version's defaults written out.

    The defaults are those of `fit` and `background` in `OLDER_PIXELS` and, if the fit is `edge` and
    no `resize` is set, the image size as `resize`.
    """
    older = {"fit": OLDER_PIXELS.fit, "background": OLDER_PIXELS.background, **fields}
    # The older default was the image size. Today's is 8/7 of it.
    if older["fit"] == "edge" and older.get("resize") is None:
        older["resize"] = image_size
    return older


def with_current_preset(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which a tuned preset that mupax no longer has is replaced by its values.

    Any other config is returned unchanged, as a copy (`tuned.without_moved`).

    Args:
        config: Config as `to_json` gave it when it was recorded.
    """
    preset = config.get("preset")
    if not isinstance(preset, Mapping) or ":" not in str(preset.get("name")):
        return dict(config)
    from mupax.train.config import tuned

    return {**config, "preset": tuned.without_moved(preset)}


def preset_from_json(fields: Mapping[str, Any]) -> PresetConfig:
    """Return the `PresetConfig` whose fields a record holds.

    Raises:
        ConfigError: The fields make no `PresetConfig` (`from_json`).
    """
    return _make(PresetConfig, "preset.", _object("preset", fields))


def completed(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `current`, with the values of `recorded` where that has the field.

    Fields that only `recorded` has are left out. Pixels and presets that an older version recorded
    are converted first.

    Args:
        recorded: Config as `to_json` gave it when it was recorded.
        current: Config of this version, as `to_json` gives it.
    """
    return _filled(with_current_preset(with_current_pixels(recorded)), current)


def _filled(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in current.items():
        recorded_value = recorded.get(name, value)
        # Section by section, because a version may have added a field to any of them.
        if isinstance(value, dict) and isinstance(recorded_value, dict):
            fields[name] = _filled(recorded_value, value)
        else:
            fields[name] = recorded_value
    return fields


def differences(
    first: dict[str, Any], second: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and both values of every field in which two configs differ.

    A field that one of them lacks counts as `None` there.

    Args:
        first: Config as `to_json` gives it, or a part of one.
        second: Config to compare with, in the same form.
        prefix: Text before every name, with a dot at its end.
    """
    for name in sorted({*first, *second}):
        first_value = first.get(name)
        second_value = second.get(name)
        if isinstance(first_value, dict) and isinstance(second_value, dict):
            yield from differences(first_value, second_value, f"{prefix}{name}.")
        elif first_value != second_value:
            yield f"{prefix}{name}", first_value, second_value


def text_of(value: Any) -> str:
    """Return a value as text, the items of a list joined by spaces. An empty list is `nothing`."""
    if isinstance(value, list):
        return " ".join(map(str, value)) or "nothing"
    return str(value)


def _make(owner: type[T], prefix: str, fields: Mapping[str, Any]) -> T:
    """Return a dataclass with these fields, and nested ones in turn, after checking each type.

    Args:
        prefix: Text before a field's name in messages, such as "data.".

    Raises:
        ConfigError: A field is unknown or missing, or a value has another type.
    """
    fields_of_owner = dataclasses.fields(owner)  # pyright: ignore[reportArgumentType]
    names = [field.name for field in fields_of_owner]
    values = _object(prefix.rstrip(".") or "the config", fields)
    hints = field_types(owner)
    for name, value in values.items():
        if name not in names:
            # With a cutoff of 0 even the worst match counts, so the list is not empty.
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
            raise ConfigError(f"no config has a field {prefix}{name}; did you mean {prefix}{near}?")
        if dataclasses.is_dataclass(hints[name]) and not isinstance(value, hints[name]):
            values[name] = _make(hints[name], f"{prefix}{name}.", value)
        elif not _fits(value, hints[name]):
            type_name = _type_name(hints[name])
            # Cut to 60 characters, because an untrusted record may hold a text of any length.
            hint = ""
            if isinstance(value, str):
                hint = terminal.nearest(value[:60], _choices(hints[name]))
            raise ConfigError(f"{prefix}{name} is {value!r:.60}; it must be {type_name}{hint}")
        elif isinstance(value, list):
            # JSON has no tuples, and a frozen config must be hashable.
            values[name] = tuple(value)
    try:
        return owner(**values)
    except TypeError as error:
        raise ConfigError(f"{prefix or 'the config'}: {error}") from error


def _object(name: str, fields: Any) -> dict[str, Any]:
    """Return a copy of `fields`. Raise ConfigError if it is no mapping of named fields."""
    if not isinstance(fields, Mapping) or not all(isinstance(key, str) for key in fields):
        raise ConfigError(f"{name} is {fields!r:.60}, not an object with named fields")
    return dict(fields)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value that JSON may hold is of an annotated type.

    An integer is also a float. Integers from 2^53 on, NaN and infinity fit no type, and a bool is
    no number.
    """
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(
            _fits(item, get_args(hint)[0]) for item in value
        )
    # `type`, not `isinstance`, which would accept True as an int.
    if hint is float:
        # Some writers of JSON, such as JavaScript's, write the float 1.0 as 1.
        return _is_integer(value) or (type(value) is float and math.isfinite(value))
    if hint is int:
        return _is_integer(value)
    return isinstance(value, hint)


def _is_integer(value: Any) -> bool:
    """Return whether a value is an integer that every reader of JSON reads alike."""
    return type(value) is int and -_LARGEST_INTEGER < value < _LARGEST_INTEGER


def _type_name(hint: Any) -> str:
    """Return the values that an annotation allows, as words for a message."""
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type_name, get_args(hint)))
    if origin is tuple:
        return f"a list of {_type_name(get_args(hint)[0])}"
    return "None" if hint is type(None) else hint.__name__


def _choices(hint: Any) -> list[str]:
    """Return the words that an annotation allows, none if it is no choice of words."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    choices = []
    for part in get_args(hint):
        choices += _choices(part)
    return choices


def command_of(config: Config) -> str:
    """Return the command that trains a config, quoted for a shell.

    Fields that belong to one start of a run, such as `workdir`, `resume` and `init_from`, are left
    out. Returns "" if no flags make this config (`words` returns `None`), for example if no recipe
    has the config's name.
    """
    flags = words(config)
    if flags is None:
        return ""
    return " ".join(["mupax train", config.recipe, *flags])


def words_of(command: str) -> list[str]:
    """Return the words after `mupax` of a recorded command, as this version spells them.

    Returns an empty list for another program's command.
    """
    program, *recorded = shlex.split(command) or [""]
    # Early versions were started as `python -m train`.
    if program == "python" and recorded[:2] == ["-m", "train"]:
        recorded = recorded[1:]
    elif program != "mupax":
        return []
    return terminal.current_words(recorded)


def words(config: Config) -> list[str] | None:
    """Return the flags that turn the recipe's config into this one, quoted for a shell.

    They include `--model NAME` for a model of the zoo and `--plugin` for extensions. Fields that
    belong to one start of a run, such as `workdir`, `resume` and `init_from`, are left out.

    Returns `None` if no recipe has the config's name, a value has no flag, or the model is of
    another family than the recipe's and not in the zoo.
    """
    # The recipe may be of a plugin or notebook that this process does not have.
    if config.recipe not in RECIPES:
        return None
    recipe = RECIPES[config.recipe]()
    # For a model of the zoo, `--model NAME` replaces a dozen flags.
    flags, base = _model_flags(config, recipe)
    # Flags change fields of a model, and cannot make another family of it.
    if base.model.family != config.model.family:
        return None

    changed: dict[str, Any] = {}
    # `resolved` writes defaults out in both configs, so they do not count as differences.
    for name, _, value in differences(to_json(base.resolved()), to_json(config.resolved())):
        changed[name] = value
    if config.model.task == "images" and config.data.name != recipe.data.name:
        # Write these sizes even if they equal the recipe's. Without the flags, the command would
        # take the sizes from the data.
        changed |= {f"model.{name}": getattr(config.model, name) for name in SIZES_OF_IMAGES}

    not_of_the_run = _fields_of_one_start(config)
    unread = unread_fields([config.data.name, *config.data.evaluation_sets.values()])
    for name, value in changed.items():
        section, _, field = name.partition(".")
        # The command line refuses a flag that the data do not read.
        is_unread = section == "data" and field.partition(".")[0] in unread
        if name in not_of_the_run or is_unread:
            continue
        # Flags have hyphens where fields have underscores.
        owner, dot, field = name.replace("_", "-").rpartition(".")
        # tyro turns a Boolean off by --section.no-field.
        negation = "no-" if value is False else ""
        flags.append(f"--{owner}{dot}{negation}{field}")
        if isinstance(value, list):
            # A flag without values empties the recipe's list.
            flags += [shlex.quote(str(item)) for item in value]
        elif not isinstance(value, bool):
            flags.append(shlex.quote(str(value)))
    return [*flags, *_plugin_flags(config)]


def _model_flags(config: Config, recipe: Config) -> tuple[list[str], Config]:
    """Return the flags that name a config's model, and the recipe's config with them applied.

    The flags are `--model NAME` and, if the data differ from the recipe's, `--data.name`. Without
    flags the recipe's config is returned unchanged. There are no flags for the recipe's own model,
    and for a model that equals none in the zoo apart from its settings of the computation.
    """
    # Dtype and other settings of the computation have flags of their own.
    model = dataclasses.replace(config.model, compute=recipe.model.compute)
    names = []
    for name, candidate in CONFIGS.items():
        if dataclasses.replace(candidate, compute=recipe.model.compute) == model:
            names.append(name)
    if not names or model == recipe.model:
        return [], recipe

    flags = ["--model", names[0]]
    data = dataclasses.replace(recipe.data, name=config.data.name)
    if data != recipe.data:
        flags += ["--data.name", shlex.quote(config.data.name)]
    return flags, dataclasses.replace(recipe, model=model, data=data)


def _fields_of_one_start(config: Config) -> set[str]:
    """Return the dotted paths of config fields that belong to one start of a run.

    They say in which folder, from which checkpoint and in which processes the run starts. Examples
    are `workdir`, `resume`, `init.init_from` and `distributed.coordinator`.
    """
    paths = set()
    for field in config_fields(config):
        affects = field.affects
        if affects is not None and affects.effect in ("origin", "session", "processes"):
            paths.add(field.path)
    return paths


def _plugin_flags(config: Config) -> list[str]:
    """Return `--plugin MODULE` for every module behind an extension of a config, sorted."""
    modules = set()
    for extension in extensions(config):
        if extension.module:
            modules.add(extension.module)
    flags: list[str] = []
    # A set has no order of its own, and a command should not change from start to start.
    for module in sorted(modules):
        flags += [FLAG, module]
    return flags
