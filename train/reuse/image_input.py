"""Class names and preprocessing that an image model needs beside its weights.

Runs record both; imports, exports, predictions and fine-tuning read them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mupax.train.config.data import PixelsConfig
from mupax.train.config.record import OLDER_PIXELS, pixels_from_json
from mupax.zoo.configs import ConfigError
from mupax.zoo.families import ImageModel

ONE_SIZE = PixelsConfig(fit="squash")
"""Preprocessing of a model trained on images of one size, if its run recorded none."""
_SHOWN = 3
"""Number of class names listed in a message."""


class ImageInput(NamedTuple):
    """Class names and preprocessing that are stored together with an image model's weights."""

    class_names: tuple[str, ...] | None
    """One name per class. `None` if the classes have no names."""
    pixels: PixelsConfig

    def to_json(self) -> dict[str, Any]:
        """Return the fields `class_names`, if the classes have names, and `pixels` as JSON."""
        fields: dict[str, Any] = {}
        if self.class_names is not None:
            fields["class_names"] = list(self.class_names)
        fields["pixels"] = dataclasses.asdict(self.pixels)
        return fields

    def difference(self, classes: Sequence[str]) -> str:
        """Return a clause that says how other classes differ from these, or "" if they are equal.

        The clause begins with "since", and explains to a user why the readout is new. Classes in
        another order, or with another case of their letters, differ.

        Args:
            classes: names of the other classes in the order of their labels.
        """
        names = self.class_names
        if names == tuple(classes):
            return ""
        if names is None:
            return "since nothing names the source's classes"
        # Columns of the readout belong to labels, so another order needs a new readout.
        if sorted(names) == sorted(classes):
            return "since the source has the same classes in another order"

        added = [name for name in classes if name not in names]
        removed = [name for name in names if name not in classes]
        if sorted(map(str.casefold, names)) == sorted(map(str.casefold, classes)):
            return (
                f"since the source writes {_listed(removed)} for {_listed(added)}; "
                "folders of those names keep its readout"
            )
        if added:
            return (
                f"since the source has no {_listed(added)} among its {len(names)} classes "
                f"({_listed(names)})"
            )
        return f"since the source has {_listed(removed)} too"

    def name(self, label: int) -> str:
        """Return the printable name of a class, or its label in digits if it has no name."""
        if self.class_names is None:
            return str(label)
        return printable(self.class_names[label])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(printable, names[:_SHOWN]))
    if len(names) <= _SHOWN:
        return shown
    return f"{shown} and {len(names) - _SHOWN} more"


def printable(name: str) -> str:
    """Return a name with every unprintable character, such as a control code, as U+FFFD."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def recorded(fields: Mapping[str, Any], model: ImageModel, record_name: str) -> ImageInput:
    """Return the class names and preprocessing in the record of a run or an imported folder.

    A record without names gives `class_names` None. For a record without preprocessing (older
    versions), images are cropped to the centre if `name` in the record begins with "images:" or
    "imagenet", and squashed to the model's size otherwise.

    Args:
        fields: record, of which `class_names`, `pixels` and `name` are read. Each may be absent.
        model: config of the model that the record belongs to.
        record_name: name of the record in error messages.

    Raises:
        ConfigError: the record does not fit the model.
    """
    names = fields.get("class_names")
    # Records of older versions have neither class names nor preprocessing.
    pixels = fields.get("pixels")
    try:
        if pixels is not None:
            settings = pixels_from_json(pixels, model.image_size)
        # Images of these data sets have any size, and older versions cropped them to the centre.
        elif str(fields.get("name")).startswith(("images:", "imagenet")):
            settings = OLDER_PIXELS
        else:
            settings = ONE_SIZE
        settings.check(model.image_size, model.channels)
        class_names = None if names is None else checked_names(names, model)
    except ConfigError as error:
        raise ConfigError(f"{record_name}: {error}") from error
    return ImageInput(class_names, settings)


def checked_names(names: Any, model: ImageModel) -> tuple[str, ...]:
    """Return class names read from a file as a tuple with one name per class of a model.

    Args:
        names: value of `class_names` in a file, of any JSON type.

    Raises:
        ConfigError: the value is not a list of names, or has not one name per class.
    """
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"class_names is {names!r:.60}, not a list of names")
    # Labels are positions in this list, so a missing name would shift all others.
    if len(names) != model.num_classes:
        raise ConfigError(
            f"class_names has {len(names)} names, and the model has {model.num_classes} classes"
        )
    return tuple(names)
