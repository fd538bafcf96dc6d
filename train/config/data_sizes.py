"""Sizes of a model of images that come from its data: classes, channels and image size.

A flag or a config file that sets a size takes precedence. A small folder of images also chooses the
recipe (`small_folders.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mupax import disk, terminal
from mupax.config_fields import names_with
from mupax.disk import path_of
from mupax.mappings import drop_keys
from mupax.terminal import counted
from mupax.train.config.data import SIZES_OF_IMAGES, ImageSizes, image_sizes, source, source_key
from mupax.train.config.run import Config
from mupax.zoo.configs import ConfigError
from mupax.zoo.families import ImageModel

NAMED = frozenset({"name"})
"""Set that replaces the names of a model's fields if a config file gives the model by its name."""
_MAX_SIDE = 224
"""Largest image size, in pixels on a side, that data can give a model. A flag may exceed it."""
_MAX_PATCHES = 16
"""Patches along a side, at most, if no flag sets their size. 16 make 256 patches, as in a ViT of
256 pixels and patches of 16."""
_RECORD = "config.json"
_OF_ONE_START = names_with(Config, "session") | {"distributed"}
"""Config fields that every start of a run sets anew, such as `workdir`, and no record sets."""


class _Flags(NamedTuple):
    """Flags of a command line that may set sizes."""

    names: frozenset[str]
    """Flags with hyphens and without values."""
    values: Mapping[str, str]
    """Last word that belongs to each flag."""

    def has(self, name: str) -> bool:
        return f"--{name.replace('_', '-')}" in self.names

    def value(self, name: str) -> str | None:
        return self.values.get(f"--{name.replace('_', '-')}")


def _flags(argv: Sequence[str]) -> _Flags:
    values: dict[str, str] = {}
    names: set[str] = set()
    for index, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        names.add(name)
        if equals:
            values[name] = value
        elif index + 1 < len(argv):
            # The value may be missing, and the word the next flag. Such a value is refused later.
            values[name] = argv[index + 1]
    return _Flags(frozenset(names), values)


def applied(config: Config, argv: Sequence[str], in_file: frozenset[str]) -> Config:
    """Return the config with its model's classes, channels and image size set from its data.

    Sizes that a flag or a config file sets stay. Changed sizes are printed on standard error. For a
    small folder of images the result may be the config of another recipe. With `--resume`, the run
    keeps the sizes that it recorded. If an older version of mupax recorded it, it also keeps that
    version's settings for making images square. A model that does not read images is unchanged.

    Args:
        config: Config of a recipe or file, before flags, with the model that `--model` names.
        argv: Words after the name of the recipe or file.
        in_file: Fields of the model that a config file sets. `NAMED` if the file gives the model by
            its name. Empty for a recipe.

    Raises:
        DataError: A folder images:PATH is there, but has no images by class or cannot be read.
    """
    flags = _flags(argv)
    if not isinstance(config.model, ImageModel):
        return config
    data_name = flags.value("data.name") or config.data.name
    may_choose = _may_choose_recipe(config, data_name, flags, in_file)
    # Before the data are read: a run that continues keeps its sizes, even if files were added.
    if flags.has("resume"):
        record = _recorded(config, flags)
        if record:
            return _as_recorded(config, record, data_name, may_choose)

    is_named = flags.has("model") or in_file == NAMED
    if not in_file and not is_named and not flags.has("data.name"):
        return config  # a recipe's model already has the sizes of its data
    free_fields = _free_fields(flags, in_file)
    # The patch size follows from the image size. If it alone is free, the data need not be read.
    if not {"num_classes", "channels", "image_size"} & {*free_fields}:
        return config

    data_dir = flags.value("data.data-dir") or config.data.data_dir
    data = dataclasses.replace(config.data, name=data_name, data_dir=data_dir)
    # The run itself refuses data of text, with a message that lists the models that can read them.
    if data.task not in (None, "images"):
        return config
    sizes = image_sizes(data)
    if sizes is None:
        return config
    if may_choose:
        chosen_config = _chosen(config, data_name, sizes, flags)
        if chosen_config is not None:
            return chosen_config
    model = _with_sizes(config.model, sizes, free_fields, flags, is_named)
    if model != config.model:
        terminal.note(_line(data_name, model))
    return dataclasses.replace(config, model=model)


def _may_choose_recipe(
    config: Config, data_name: str, flags: _Flags, in_file: frozenset[str]
) -> bool:
    """Return whether a recipe for a small folder may take the place of the user's recipe.

    Four conditions must hold: the data are a folder of images, the recipe is one of
    `small_folders.RECIPES`, no config file sets the model, and the user has written no flag such as
    `--model` or `--preset` (`small_folders.designs` finds them).

    Args:
        in_file: Fields of the model that a config file sets. Empty for a recipe.
    """
    if in_file or source_key(data_name) != "images:PATH":
        return False
    # Imported here, because runs on other data do not need it.
    from mupax.train.config import small_folders

    return config.recipe in small_folders.RECIPES and small_folders.designs(flags.names) is None


def _free_fields(flags: _Flags, in_file: frozenset[str]) -> list[str]:
    """Return the fields of `SIZES_OF_IMAGES` that neither a flag nor a config file sets.

    With `--init-from` only `num_classes` can be among them, because the other run's weights fix the
    other sizes.

    Args:
        in_file: Fields of the model that a config file sets. `NAMED` if the file gives the model by
            its name. Empty for a recipe.
    """
    fields = []
    for field in SIZES_OF_IMAGES:
        if not flags.has(f"model.{field}") and field not in in_file:
            fields.append(field)
    if flags.has("init-from"):
        # The other run's weights fix the channels and the sizes of image and patch. Only the
        # readout may change.
        fields = [field for field in fields if field == "num_classes"]
    return fields


def _with_sizes(
    model: ImageModel,
    sizes: ImageSizes,
    free_fields: Sequence[str],
    flags: _Flags,
    is_named: bool,
) -> ImageModel:
    """Return the model with the sizes that its data ask for.

    A model that was chosen by its name keeps its image size if the images can be scaled.

    Args:
        free_fields: Fields of the model that the data may set.
        flags: Flags of the command line. A patch size among them stays.
        is_named: True if the model was chosen by its name.
    """
    fields: dict[str, Any] = {}
    if "num_classes" in free_fields:
        fields["num_classes"] = sizes.num_classes
    if "channels" in free_fields and sizes.channels is not None:
        fields["channels"] = sizes.channels
    # A model's name stands for its image size, and images that are scaled can be brought to it.
    keeps_size = is_named and sizes.scaled
    if "image_size" in free_fields and sizes.side is not None and not keeps_size:
        fields |= _square(model, sizes, "patch_size" in free_fields, flags)
    return dataclasses.replace(model, **fields)


def _square(
    model: ImageModel, sizes: ImageSizes, patch_is_free: bool, flags: _Flags
) -> dict[str, int]:
    """Return `image_size` and `patch_size` of the model for square images of `sizes.side` pixels.

    Images that are not scaled keep their side. Others are scaled to at most `_MAX_SIDE` pixels and
    to a multiple of the patch. A free patch size is changed if it does not divide the side of
    images that are not scaled, or makes more than `_MAX_PATCHES` patches along a side.

    Args:
        sizes: Sizes of the data. Its `side` must not be `None`.
        patch_is_free: True if the data may change the patch size.
    """
    assert sizes.side is not None
    patch = _size_flag(flags, "patch-size", model.patch_size)
    if not sizes.scaled:
        if patch_is_free and (sizes.side % patch or sizes.side > _MAX_PATCHES * patch):
            divisors = [size for size in range(1, sizes.side + 1) if sizes.side % size == 0]
            # `next` always finds a divisor, because the side itself is one.
            patch = next(size for size in divisors if sizes.side <= _MAX_PATCHES * size)
        # A patch size from a flag may not divide the side. The model's config then refuses the two
        # sizes.
        return {"image_size": sizes.side, "patch_size": patch}

    # At least one patch, for images that are smaller than a patch of the model.
    side = max(patch, min(sizes.side, _MAX_SIDE))
    if patch_is_free and side > _MAX_PATCHES * patch:
        smallest = math.ceil(side / _MAX_PATCHES)
        # A patch that is a little larger may divide the side, so that no pixels are lost.
        candidates = range(smallest, smallest + smallest // 2 + 1)
        patch = next((size for size in candidates if side % size == 0), smallest)
    # Images are scaled to this side in any case, so a rounded side cuts no pixels off.
    return {"image_size": side - side % patch, "patch_size": patch}


def _size_flag(flags: _Flags, name: str, default: int) -> int:
    """Return the value of `--model.NAME`, or `default` if it is missing or no size.

    A value that is no size is refused when the flags are read.
    """
    number = _number(flags, f"model.{name}")
    return default if number is None else number


def _number(flags: _Flags, name: str) -> int | None:
    """Return the value of `--NAME`, or `None` if it is missing or no positive whole number."""
    # Python reads 1_000 as 1000, and so do the flags.
    digits = (flags.value(name) or "").replace("_", "")
    if digits.isdigit() and int(digits) > 0:
        return int(digits)
    return None


def _chosen(config: Config, data_name: str, sizes: ImageSizes, flags: _Flags) -> Config | None:
    """Return the config that mupax chooses for a small folder of images, and print the choice.

    Returns `None` for a folder that is not small or whose sizes are unknown, and if flags set a
    patch size that does not divide the image size. Sizes that flags set take precedence.
    """
    if sizes.train_images is None or sizes.channels is None or sizes.side is None:
        return None
    from mupax.train.config import small_folders

    side = _size_flag(flags, "image-size", sizes.side)
    facts = small_folders.FolderFacts(
        images=sizes.train_images,
        classes=sizes.num_classes,
        channels=_size_flag(flags, "channels", sizes.channels),
        side=side,
    )
    steps = _number(flags, "steps")
    batch_size = _number(flags, "data.batch-size") or small_folders.BATCH_SIZE
    recipe = small_folders.choose(facts, steps, batch_size)
    if recipe is None:
        return None

    patch_size = _size_flag(flags, "patch-size", recipe.patch_size)
    if not flags.has("model.image-size"):
        image_size = max(patch_size, recipe.image_size)
        image_size -= image_size % patch_size
    else:
        image_size = side
        if not flags.has("model.patch-size") and image_size % patch_size:
            # The last candidate, 1, divides every size, so `next` always finds one.
            patch_size = next(size for size in (4, 2, 1) if image_size % size == 0)
    if image_size % patch_size:
        return None  # both sizes are flags, and the model's config refuses them
    recipe = recipe._replace(image_size=image_size, patch_size=patch_size)
    terminal.note(small_folders.line(facts, recipe))
    return small_folders.recipe_config(recipe, facts, config.recipe, data_name)


def _line(data_name: str, model: ImageModel) -> str:
    """Return a line with the model's classes, channels, image size and patch size."""
    colours = {1: "1 channel (grey)", 3: "3 channels (colour)"}
    channels = colours.get(model.channels, f"{model.channels} channels")
    size = model.image_size
    patch = model.patch_size
    return (
        f"sizes from {data_name}: {counted(model.num_classes, 'class')}, {channels}, "
        f"images of {size} x {size} pixels in patches of {patch} x {patch}; "
        "--model.num-classes, --model.channels, --model.image-size and --model.patch-size "
        "set others"
    )


def _recorded(config: Config, flags: _Flags) -> dict[str, Any]:
    """Return the config that the run in the workdir recorded, as JSON.

    The result is {} if there is no record or it cannot be read.
    """
    # The same default as in `Config.resolved`, which runs only after the sizes are known.
    workdir = flags.value("workdir") or config.workdir or f"runs/{config.recipe}"
    try:
        recorded = disk.read_json(path_of(workdir) / _RECORD).get("config")
    except (disk.JsonError, OSError):
        return {}
    if not isinstance(recorded, dict):
        return {}
    return recorded


def _as_recorded(
    config: Config, recorded: Mapping[str, Any], data_name: str, was_chosen: bool
) -> Config:
    """Return the config of a run that resumes, with the model sizes that the run recorded.

    If an older version of mupax recorded the run, `data.pixels` is taken from the record, too. If
    mupax chose the run's recipe for a small folder of images, the recorded config is returned in
    place of `config`.

    Args:
        recorded: Config of the run, as `to_json` gave it.
        was_chosen: True if the run's recipe may have been chosen for a small folder. The recipe
            was chosen if the recorded model also has a stem of convolutions.
    """
    # Imported late, because most starts continue no run.
    from mupax.train.config.record import from_json, pixels_from_json

    model = recorded.get("model")
    # These models have no convolutional stem of their own. The recipe for small folders gives one.
    if was_chosen and isinstance(model, Mapping) and model.get("stem") is not None:
        fields = drop_keys(recorded, _OF_ONE_START)
        return from_json(fields)
    if isinstance(model, Mapping):
        sizes = {}
        for field in SIZES_OF_IMAGES:
            # The record may come from an untrusted source. `isinstance` would accept True as an
            # int.
            if type(model.get(field)) is int:
                sizes[field] = model[field]
        try:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))
        except ConfigError:  # the record is of another model, which the resume refuses
            return config

    data = recorded.get("data")
    if not isinstance(data, Mapping):
        return config
    pixels = data.get("pixels", {})
    # A record without a background is of an older version.
    is_older = isinstance(pixels, Mapping) and "background" not in pixels
    if is_older and "pixels" in source(data_name).reads:
        assert isinstance(config.model, ImageModel)
        older_pixels = pixels_from_json(pixels, config.model.image_size)
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, pixels=older_pixels)
        )
    return config
