"""Recipes from files: a config in JSON or YAML, or the record of a run, in a recipe's place."""

from __future__ import annotations

import difflib
import json
import operator
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mupax.config_fields import names_with
from mupax.disk import DEEPEST, nested_deeper, path_of
from mupax.mappings import drop_keys
from mupax.train.config import data_sizes
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json, model_to_json, to_json, with_current_pixels
from mupax.train.config.run import Config
from mupax.zoo import configs
from mupax.zoo.configs import ConfigError

_OF_ONE_RUN = names_with(Config, "session")
"""Config fields about one start of a run, such as `workdir`, that a recorded config never sets."""

# YAML 1.1 reads a number such as 3e-4, which has no point, as a text.
_POWER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def recipe(path: str) -> Callable[[], Config]:
    """Read a config file, and return the function that makes its config, as a recipe does.

    The file holds fields as `--print-config` prints them, or is a run's config.json, which has them
    under `config`. The plugins of such a record are imported (`record.restore`), and its workdir
    and resume are left out. Fields that the file leaves out are those of its `recipe`. `model` may
    be a name of `mupax models`. `data.mix` and `data.evaluate` may be lists of the words that their
    flags take, or maps from names to sources.

    Args:
        path: Path of the file, on a disk or in a bucket.

    Raises:
        ConfigError: The file does not exist or, when the function is called, holds no such config.
            The text names the file.
        PluginError: A plugin of a run's record may not be imported, or is gone.
    """
    content = _read(path)
    is_record = "config" in content
    if "plugins" in content:  # the record of a run with extensions
        from mupax.train.config import record

        record.restore(content)
    fields = {}
    for name, value in content.get("config", content).items():
        if name not in _OF_ONE_RUN:
            fields[name] = value

    def load() -> Config:
        try:
            current = with_current_pixels(_with_named_sources(fields), is_record=False)
            if not is_record:
                # A plain config file starts a new run. A record repeats an earlier run, so it may
                # name a tuned preset that mupax no longer has.
                _refuse_moved_preset(current.get("preset"))
            return from_json(_over(_start(fields), current))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    load.__doc__ = f"The config of {path}."
    return load


def _refuse_moved_preset(preset: Any) -> None:
    """Raise PresetError if `preset` names a tuned preset that mupax no longer has."""
    name = preset.get("name") if isinstance(preset, Mapping) else None
    if isinstance(name, str) and ":" in name:
        from mupax.presets.tuned import find

        if name in find.MOVED:
            find.find(name)


def of_one_record(fields: Mapping[str, Any], path: str) -> Callable[[], Config]:
    """Return the function that makes the config with which a recorded run continues.

    Fields about one start of a run, such as `workdir` and `resume`, and the section `distributed`
    get their defaults. The returned function raises `ConfigError` if the fields make no config.

    Args:
        fields: `config` of the record.
        path: Path of the record, for messages only.
    """
    left_out = (*_OF_ONE_RUN, "distributed")
    remaining = drop_keys(fields, left_out)

    def load() -> Config:
        try:
            return from_json(remaining)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    load.__doc__ = f"Go on with the run of {path}."
    return load


def model_fields(path: str) -> frozenset[str]:
    """Return the fields of the model that a file sets. A file that names a model has `NAMED`.

    The field `family` is always among them, except for a named model.

    Raises:
        ConfigError: The file does not exist or holds no named fields.
    """
    content = _read(path)
    model = content.get("config", content).get("model", {})
    if isinstance(model, str):
        return data_sizes.NAMED
    if isinstance(model, dict):
        # With `family` the set is never empty: an empty one would stand for a recipe.
        return frozenset({"family"} | model.keys())
    return frozenset({"family"})


def _read(path: str) -> dict[str, Any]:
    """Return the content of a JSON (`.json`) or YAML (any other) file, which has named fields.

    Raises:
        ConfigError: The file does not exist, cannot be read or holds something else.
    """
    import yaml

    # A subclass, because a resolver added to SafeLoader would act on all YAML read in this process.
    class Loader(yaml.SafeLoader):
        """Reader of YAML that takes 3e-4 as a number, and refuses a key that is written twice."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            # A merge key (<<) may give a key that the mapping itself has, too.
            keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            _refuse_twice(keys)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _POWER, list("-+0123456789"))
    try:
        # "-sig" drops the byte order mark with which some Windows editors begin a file.
        text = path_of(path).read_bytes().decode("utf-8-sig")
        # JSON allows tabs between tokens. PyYAML refuses them.
        if path.lower().endswith(".json"):
            content = json.loads(text, object_pairs_hook=_fields)
        else:
            content = yaml.load(text, Loader)
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: nested too deep") from None
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; `--print-config > {shlex.quote(path)}` writes one"
        ) from None
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    # Newer versions of Python decode JSON that is nested deeper than Python functions can recurse.
    if nested_deeper(content, DEEPEST):
        raise ConfigError(f"{path} cannot be read: nested too deep")
    fields = content.get("config", content) if isinstance(content, dict) else None
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ConfigError(f"{path} holds no named fields; write them as `--print-config` does")
    return content


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object. A field that is written twice raises `ValueError`."""
    _refuse_twice([name for name, _ in pairs])
    return dict(pairs)


def _refuse_twice(names: Sequence[Any]) -> None:
    """Raise `ValueError` if a name is written twice: one of its values would be lost."""
    counts = Counter(str(name) for name in names)
    name, count = max(counts.items(), key=operator.itemgetter(1), default=("", 0))
    if count > 1:
        raise ValueError(f"{name} is written {count} times; leave one")


def _start(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields that a config file starts from, before its own fields are applied.

    They are the fields of the recipe that the file names. If the file gives a model by name, they
    have this model. If the file has fields of a model of another family, they have no model. The
    result is {} for a file that has data and a model itself and names no recipe or an unknown one.

    Raises:
        ConfigError: The file names an unknown recipe and has no data. Or it names no recipe, and
            data or model are missing.
    """
    name = fields.get("recipe")
    model = fields.get("model")
    if name not in RECIPES:
        # A complete record of another version or plugin may name a recipe that is not here.
        if name is not None and "data" not in fields:
            raise ConfigError(f"no recipe is named {name!r}; the recipes are {', '.join(RECIPES)}")
        if "data" not in fields or "model" not in fields:
            raise ConfigError(f"it names no recipe; write recipe: with one of {', '.join(RECIPES)}")
        return {}

    config = to_json(RECIPES[str(name)]())
    recipe_model = config["model"]
    if isinstance(model, str):
        # Keep the recipe's dtype and kernels: they set how a model is computed, not which model it
        # is.
        compute = recipe_model["compute"]
        return config | {"model": model_to_json(configs.get(model)) | {"compute": compute}}
    if (
        isinstance(model, dict)
        and model.get("family", recipe_model["family"]) != (recipe_model["family"])
    ):
        # Fields of the recipe's model mean nothing to a model of another family.
        del config["model"]
    return config


def _with_named_sources(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with data.mix and data.evaluate as the words that their flags take.

    A file with a mixture and no `data.name` gets the name `mix`.

    Raises:
        ConfigError: An entry is of another form. The text names the key.
    """
    data = fields.get("data")
    if not isinstance(data, dict):
        return dict(fields)
    data = dict(data)
    for key in ("mix", "evaluate"):
        # YAML reads a key without a value as null, which stands for the default.
        if data.get(key, ()) is None:
            del data[key]
    if "mix" in data:
        entries = _entries("data.mix", data["mix"])
        data["mix"] = [_mix_word(name, entry) for name, entry in entries]
        if data["mix"]:
            data.setdefault("name", "mix")
    if "evaluate" in data:
        entries = _entries("data.evaluate", data["evaluate"])
        data["evaluate"] = [_evaluate_word(name, entry) for name, entry in entries]
    return {**fields, "data": data}


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, entry) of every source that `data.mix` or `data.evaluate` of a config file has.

    The file may have a map from names to entries, or a list. An item of the list is a text
    NAME=ENTRY, a map from names to entries, or one map with the key `name`, whose other keys are
    the entry.

    Args:
        key: Field for the message, such as "data.mix".
        value: Value of the field in the file.

    Raises:
        ConfigError: The value, or an entry of the list, is of another form.
    """
    if isinstance(value, dict):
        yield from value.items()
        return
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"{key} is {value!r:.60}; "
            "write a list of NAME=SOURCE words, or a map from names to sources"
        )
    for item in value:
        if isinstance(item, str):
            name, _, entry = item.partition("=")
            yield name, entry
        elif isinstance(item, dict) and "name" in item:
            # A copy, because the function of a recipe may be called more than once.
            content = dict(item)
            yield content.pop("name"), content
        elif isinstance(item, dict):
            yield from item.items()
        else:
            raise ConfigError(
                f"{key} has the entry {item!r:.60}; write NAME=SOURCE, or a map with one name"
            )


def _mix_word(name: Any, entry: Any) -> str:
    """Return NAME=SOURCE:WEIGHT for a text of a mixture.

    Args:
        entry: `SOURCE:WEIGHT`, or a map of source and weight.

    Raises:
        ConfigError: The name has another character than letters, digits, _, - and ., or the entry
            has another form.
    """
    key = f"data.mix {name}"
    if not re.fullmatch(r"[\w.-]+", str(name)):
        raise ConfigError(
            f"{key}: a name has letters, digits, _, - and . alone; name the text otherwise"
        )
    if isinstance(entry, dict):
        _check_names(key, entry, ("source", "weight"))
        weight = entry.get("weight")
        if type(weight) not in (int, float):
            raise ConfigError(
                f"{key}.weight is {weight!r:.60}; write a number above 0, such as 0.3"
            )
        entry = f"{_source(f'{key}.source', entry.get('source'))}:{weight!r}"
    # From the right, because a source such as text:FOLDER has a colon, too.
    source, _, weight_text = _source(key, entry).rpartition(":")
    try:
        float(weight_text)
    except ValueError:
        source = ""
    if not source:
        raise ConfigError(
            f"{key} is {entry!r:.60}, without a weight; write SOURCE:WEIGHT, such as {entry}:0.3"
        )
    return f"{name}={entry}"


def _evaluate_word(name: Any, entry: Any) -> str:
    """Return NAME=SOURCE for an evaluation set.

    Args:
        entry: A source as `data.name` has it, or a map with the key source.

    Raises:
        ConfigError: The entry has another form.
    """
    key = f"data.evaluate {name}"
    if isinstance(entry, dict):
        _check_names(key, entry, ("source",))
        key = f"{key}.source"
        entry = entry.get("source")
    return f"{name}={_source(key, entry)}"


def _source(key: str, value: Any) -> str:
    """Return `value` if it is a text that is not empty. Raise ConfigError for any other value.

    Args:
        key: Field for the message, such as "data.mix".
        value: Source of data from a config file.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{key} is {value!r:.60}; write a source that --data.name takes, such as text:FOLDER"
        )
    return value


def _check_names(key: str, entry: Mapping[Any, Any], names: tuple[str, ...]) -> None:
    """Raise ConfigError if a map has a key that is not among `names`."""
    for name in entry:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0)[0]
            raise ConfigError(f"{key} has no field {name}; did you mean {near}?")


def _over(start: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `start` overwritten by those of a file, nested group by group.

    A model that the file gives by its name is left out, because `start` already has its fields.
    """
    merged = dict(start)
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _over(merged[name], value)
        # `start` already holds the fields of the model that the file names.
        elif not (name == "model" and isinstance(value, str)):
            merged[name] = value
    return merged
