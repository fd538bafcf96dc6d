"""Extensions that a run uses: the modules behind its optimizer, preset, data, model and metrics, recorded and imported again.

An extension is one line in a table of mupax (`OPTIMIZERS`, `PRESETS`, `SOURCES`, `FAMILIES`, `CONFIGS`, `RECIPES`, `METRICS`), written by
a module that is imported with `--plugin MODULE` or by an entry point of the group `mupax.plugins`, or by the user's own script.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from mupax import terminal
from mupax.plugins import (
    FLAG,
    PluginError,
    digest,
    import_folder,
    import_plugin,
    importable_name,
    loaded_module,
    remember,
    split,
    trusted,
)
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import PRESETS
from mupax.train.config.data import SOURCES, source, source_key
from mupax.train.config.metrics import METRICS, metric_name
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.zoo.configs import CONFIGS, FAMILIES

GROUP = "mupax.plugins"
"""Entry points of installed packages that every command imports."""
_registered_by: dict[tuple[str, str], str] = {}
"""(table, name) to the plugin that wrote the line. Tables are of the process, and so is this."""


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
            terminal.note(f"caution: {FLAG} {name} adds no line to a table of mupax (docs/extend.md)")


@functools.cache
def _entry_points() -> tuple[str, ...]:
    """Return the modules that installed packages name; they are looked up once a process."""
    return tuple(entry.module for entry in metadata.entry_points(group=GROUP))


def without_plugins(argv: Sequence[str]) -> list[str]:
    """Import the plugins of a command line and return its other words."""
    modules, words = split(argv)
    load(modules)
    return words


def extensions(config: Config) -> list[Extension]:
    """Return the extensions that a config uses, each once."""
    names = {("optimizer", config.optimizer.name): OPTIMIZERS[config.optimizer.name].direction}
    preset = config.preset.name
    if preset in PRESETS:
        names["preset", preset] = getattr(PRESETS[preset], "__module__", "__main__")
    for place in _sources(config):
        names["data", source_key(place) or place] = source(place).loader
    family = config.model.family
    names["model", family] = FAMILIES.get(family, family)
    for name, metric in METRICS.items():  # every run measures every metric
        names["metric", name] = metric.module
    result = []
    for (table, name), place in names.items():
        module = importable_name(place.partition(":")[0])
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
                "move it into a module (docs/extend.md)"
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
        if missing and not _needed(missing, run_record) and name not in trusted(run_record.get("run")):
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
    places = [entry.direction for entry in OPTIMIZERS.values()]
    places += [entry.loader for entry in SOURCES.values()]
    places += FAMILIES.values()
    places += [metric.module for metric in METRICS.values()]
    from mupax.zoo.families import ModelConfig

    values = vars(loaded_module(module)).values()
    has_model = any(isinstance(value, type) and issubclass(value, ModelConfig) for value in values)
    return has_model or any(place.partition(":")[0] == module for place in places)


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
