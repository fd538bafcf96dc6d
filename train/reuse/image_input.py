"""What a model of images must be told beside its weights: the names of its classes, and what becomes of an image that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mupax.train.config.data import PixelsConfig
from mupax.train.config.record import OLDER_PIXELS, pixels_from_json
from mupax.zoo.configs import ConfigError
from mupax.zoo.families import ImageModel

ONE_SIZE = PixelsConfig(fit="squash")
"""What becomes of an image for a model trained on images of one size, where its run recorded none."""
_SHOWN = 3
"""Names of classes in a line."""


class ImageInput(NamedTuple):
    """Names of classes and preprocessing, as they travel with weights."""

    class_names: tuple[str, ...] | None
    """One per class; None where nobody named them."""
    pixels: PixelsConfig

    def to_json(self) -> dict[str, Any]:
        """Both, as a run's record of its data has them."""
        names = {} if self.class_names is None else {"class_names": list(self.class_names)}
        return {**names, "pixels": dataclasses.asdict(self.pixels)}

    def difference(self, classes: Sequence[str]) -> str:
        """Why these are not the classes of the weights, for a line; empty where they are.

        Args:
            classes: their names, in their order.
        """
        names = self.class_names
        if names == tuple(classes):
            return ""
        if names is None:
            return "since nothing names the source's classes"
        if sorted(names) == sorted(classes):
            return "since the source has the same classes in another order"
        if sorted(map(str.casefold, names)) == sorted(map(str.casefold, classes)):
            ours, theirs = (
                [name for name in some if name not in other]
                for some, other in ((classes, names), (names, classes))
            )
            return f"since the source writes {_listed(theirs)} for {_listed(ours)}; folders of those names keep its readout"
        if strange := [name for name in classes if name not in names]:
            return f"since the source has no {_listed(strange)} among its {len(names)} classes ({_listed(names)})"
        return (
            f"since the source has {_listed([name for name in names if name not in classes])} too"
        )

    def name(self, label: int) -> str:
        """What a class is called, without characters that a terminal would obey; its number where it has no name."""
        return str(label) if self.class_names is None else printable(self.class_names[label])


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(printable, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def printable(name: str) -> str:
    """A name without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def recorded(fields: Mapping[str, Any], model: ImageModel, where: str) -> ImageInput:
    """What a run recorded of its data, or an imported folder of its source.

    Args:
        fields: of the record; runs of older versions recorded neither names nor pixels, but the data's name.
        model: that the weights are of.
        where: what an error calls the record.

    Raises:
        ConfigError: what it holds is not of this model.
    """
    names, pixels = fields.get("class_names"), fields.get("pixels")
    try:
        if pixels is not None:
            settings = pixels_from_json(pixels, model.image_size)
        else:
            settings = (
                OLDER_PIXELS
                if str(fields.get("name")).startswith(("images:", "imagenet"))
                else ONE_SIZE
            )
        settings.check(model.image_size, model.channels)
        return ImageInput(None if names is None else checked_names(names, model), settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def checked_names(names: Any, model: ImageModel) -> tuple[str, ...]:
    """The names, one per class of the model; raises ConfigError for anything else.

    Args:
        names: of any kind, as a file has them.
        model: whose classes they are to be.
    """
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"class_names is {names!r:.60}, not a list of names")
    if len(names) != model.num_classes:
        raise ConfigError(
            f"class_names has {len(names)} names, and the model has {model.num_classes} classes"
        )
    return tuple(names)
