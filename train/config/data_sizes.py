"""Sizes of a model of images that come from its data: classes, channels and image size, as far as no flag or file sets them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mupax import disk, terminal
from mupax.config_fields import names_with
from mupax.disk import path_of
from mupax.train.config.data import SIZES_OF_IMAGES, ImageSizes, image_sizes, source, source_key
from mupax.train.config.run import Config
from mupax.zoo.configs import ConfigError
from mupax.zoo.families import ImageModel

NAMED = frozenset({"name"})
"""Stands for a model that a config file names."""
_LARGEST = 224
"""Pixels on a side of the largest model that photos ask for; a flag makes a larger one."""
_PATCHES = 16
"""Patches along a side, at most, where the size of a patch is free: 256 of them, as in a ViT of 256 pixels and patches of 16."""
_RECORD = "config.json"
_OF_ONE_START = names_with(Config, "session") | {"distributed"}
"""Fields of a recorded config that the start of a run sets anew."""


class _Flags(NamedTuple):
    """Sizes that a command line sets."""

    names: frozenset[str]
    """Flags, with hyphens and without values."""
    values: Mapping[str, str]
    """The word that belongs to a flag, the last of it."""

    def has(self, name: str) -> bool:
        return f"--{name.replace('_', '-')}" in self.names

    def value(self, name: str) -> str | None:
        return self.values.get(f"--{name.replace('_', '-')}")


def _flags(argv: Sequence[str]) -> _Flags:
    values: dict[str, str] = {}
    names: set[str] = set()
    for place, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        names.add(name)
        if equals:
            values[name] = value
        elif place + 1 < len(argv):
            values[name] = argv[place + 1]
    return _Flags(frozenset(names), values)


def applied(config: Config, argv: Sequence[str], in_file: frozenset[str]) -> Config:
    """Return the config with the sizes that its data ask of its model, where neither a flag nor a config file sets them.

    A run that goes on keeps the sizes that it recorded, and one of an older version how it made images square.

    Args:
        config: of a recipe or file, before flags, with the model that `--model` names.
        argv: the words after its name.
        in_file: fields of the model that a config file sets, or `NAMED`.

    Raises:
        DataError: data that are there and cannot be read.
    """
    flags = _flags(argv)
    if not isinstance(config.model, ImageModel):
        return config
    data_name = flags.value("data.name") or config.data.name
    may_choose = not in_file and source_key(data_name) == "images:PATH"
    if may_choose:
        from mupax.train.config import small_folders  # runs on other data do without it

        may_choose = (
            config.recipe in small_folders.RECIPES and small_folders.designs(flags.names) is None
        )
    if flags.has("resume") and (record := _recorded(config, flags)):
        return _as_recorded(config, record, data_name, may_choose)
    named = flags.has("model") or in_file == NAMED
    if not in_file and not named and not flags.has("data.name"):
        return config  # a recipe fits its own data
    free = [
        field
        for field in SIZES_OF_IMAGES
        if not flags.has(f"model.{field}") and field not in in_file
    ]
    if flags.has("init-from"):  # whose weights say how images are read
        free = [field for field in free if field == "num_classes"]
    if not {"num_classes", "channels", "image_size"} & {*free}:
        return config
    data = dataclasses.replace(
        config.data, name=data_name, data_dir=flags.value("data.data-dir") or config.data.data_dir
    )
    if data.task not in (None, "images"):
        return config
    sizes = image_sizes(data)
    if sizes is None:
        return config
    if may_choose and (chosen := _chosen(config, data_name, sizes, flags)) is not None:
        return chosen
    model = _with_sizes(config.model, sizes, free, flags, named)
    if model != config.model:
        terminal.note(_line(data_name, model))
    return dataclasses.replace(config, model=model)


def _with_sizes(
    model: ImageModel, sizes: ImageSizes, free: Sequence[str], flags: _Flags, named: bool
) -> ImageModel:
    """Return the model with the sizes of its data.

    Args:
        model: of the recipe.
        sizes: that the data ask for.
        free: fields that they may set.
        flags: of the command line; a patch size among them is kept to.
        named: whether the model was chosen by its name, which says how large the images are that it reads.
    """
    fields: dict[str, Any] = {}
    if "num_classes" in free:
        fields["num_classes"] = sizes.num_classes
    if "channels" in free and sizes.channels is not None:
        fields["channels"] = sizes.channels
    if "image_size" in free and sizes.side is not None and not (named and sizes.scaled):
        fields |= _square(model, sizes, "patch_size" in free, flags)
    return dataclasses.replace(model, **fields)


def _square(
    model: ImageModel, sizes: ImageSizes, patch_is_free: bool, flags: _Flags
) -> dict[str, int]:
    """Return image size and patch size for images of a side."""
    assert sizes.side is not None
    patch = model.patch_size
    typed = flags.value("model.patch-size")
    if typed is not None and typed.isdigit() and int(typed) > 0:
        patch = int(typed)
    if not sizes.scaled:
        if patch_is_free and (sizes.side % patch or sizes.side > _PATCHES * patch):
            divisors = [size for size in range(1, sizes.side + 1) if sizes.side % size == 0]
            patch = next(size for size in divisors if sizes.side <= _PATCHES * size)
        # A patch that does not divide it is refused as if both had been typed.
        return {"image_size": sizes.side, "patch_size": patch}
    side = max(patch, min(sizes.side, _LARGEST))
    if patch_is_free and side > _PATCHES * patch:
        least = math.ceil(side / _PATCHES)
        # One a little larger may divide the side, so that no pixels are lost.
        near = range(least, least + least // 2 + 1)
        patch = next((size for size in near if side % size == 0), least)
    return {"image_size": side - side % patch, "patch_size": patch}


def _chosen(config: Config, data_name: str, sizes: ImageSizes, flags: _Flags) -> Config | None:
    """Return the run of the recipe for a small folder, and print what was chosen; None for a folder that is not small.

    Sizes that flags set are the facts by which the rest is chosen. A value that is no size is refused by the flags' reader.
    """

    def typed(name: str, otherwise: int) -> int:
        word = flags.value(f"model.{name}") or ""
        return int(word) if word.isdigit() and int(word) > 0 else otherwise

    if sizes.train_images is None or sizes.channels is None or sizes.side is None:
        return None
    side = typed("image-size", sizes.side)
    from mupax.train.config import small_folders

    facts = small_folders.FolderFacts(
        sizes.train_images, sizes.num_classes, typed("channels", sizes.channels), side
    )
    recipe = small_folders.choose(facts)
    if recipe is None:
        return None
    patch_size = typed("patch-size", recipe.patch_size)
    image_size = side if flags.has("model.image-size") else max(patch_size, recipe.image_size)
    if not flags.has("model.image-size"):
        image_size -= image_size % patch_size
    elif not flags.has("model.patch-size") and image_size % patch_size:
        patch_size = next(size for size in (4, 2, 1) if image_size % size == 0)
    recipe = recipe._replace(image_size=image_size, patch_size=patch_size)
    if image_size % patch_size:  # both typed, and refused as such
        return None
    terminal.note(small_folders.line(facts, recipe))
    return small_folders.recipe_config(recipe, facts, config.recipe, data_name)


def _line(name: str, model: ImageModel) -> str:
    channels = {1: "1 channel (grey)", 3: "3 channels (colour)"}.get(
        model.channels, f"{model.channels} channels"
    )
    size = model.image_size
    patch = model.patch_size
    return (
        f"sizes from {name}: {model.num_classes} classes, {channels}, images of {size} x {size} pixels in patches of {patch} x "
        f"{patch}; --model.num-classes, --model.channels, --model.image-size and --model.patch-size set others"
    )


def _recorded(config: Config, flags: _Flags) -> dict[str, Any]:
    """Return the config that the run in the workdir recorded, as JSON; empty where there is none."""
    workdir = flags.value("workdir") or config.workdir or f"runs/{config.recipe}"
    try:
        recorded = disk.read_json(path_of(workdir) / _RECORD).get("config")
    except (disk.JsonError, OSError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _as_recorded(
    config: Config, recorded: Mapping[str, Any], data_name: str, was_chosen: bool
) -> Config:
    """Return the config with the sizes of a recorded run, and with its pixels where an older version recorded them.

    Args:
        recorded: config of the run, as JSON.
        was_chosen: whether the recipe may have been chosen for the folder; a run that was goes on as recorded.
    """
    from mupax.train.config.record import pixels_from_json

    before = recorded.get("model")
    if was_chosen and isinstance(before, Mapping) and before.get("stem") is not None:
        from mupax.train.config.record import from_json

        return from_json(
            {name: value for name, value in recorded.items() if name not in _OF_ONE_START}
        )
    if isinstance(before, Mapping):
        sizes = {
            field: before[field] for field in SIZES_OF_IMAGES if type(before.get(field)) is int
        }
        try:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))
        except ConfigError:  # another model, which the run itself will refuse
            return config
    data = recorded.get("data")
    pixels = data.get("pixels", {}) if isinstance(data, Mapping) else None
    if (
        isinstance(pixels, Mapping)
        and "background" not in pixels
        and "pixels" in source(data_name).reads
    ):
        assert isinstance(config.model, ImageModel)
        older = pixels_from_json(pixels, config.model.image_size)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, pixels=older))
    return config
