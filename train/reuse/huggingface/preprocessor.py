"""Class names and preprocessing in `transformers` files: config.json and preprocessor_config.json.

Processors of `transformers` scale both sides (`size` with height and width) or the shorter edge,
crop the centre, and normalize each channel. So do mupax's fits `squash` and `edge`, the default.
The fit `centre`, which crops first, is written as the nearest edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from mupax.train.config.data import Interpolation, PixelsConfig
from mupax.train.reuse.image_input import ImageInput
from mupax.zoo.configs import ConfigError
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface.architectures import Family

FILE = "preprocessor_config.json"
# The last one, area, is not a filter of PIL.
_RESAMPLE: tuple[str, ...] = get_args(Interpolation)[:-1]
"""Names of interpolations. The index of each is its number in PIL, the field `resample`."""
_CENTRE = 8 / 7
"""Ratio of an image's shorter edge to the side of the square that the fit `centre` crops."""
_BACKGROUND = "none"
"""Background of transparent pixels: processors of `transformers` read the colours below them."""
_FAR = 1e9
"""Bound on the size of means, deviations and rescale factors in a file."""
_BY_EDGE = ("CLIP", "Bit")
"""Processors that read a bare number of `size` as the shorter edge, and not as both sides."""
_PROCESSORS = ("ViT", "DeiT", "Siglip", *_BY_EDGE)
"""Beginnings of the processors' names that mupax reads."""


def from_huggingface(
    config: Mapping[str, Any], processor: Mapping[str, Any] | None, model: ImageModel
) -> ImageInput:
    """Return class names and preprocessing of a published model.

    Args:
        config: content of config.json, which has the class names.
        processor: content of preprocessor_config.json. `None` if the file is missing: images are
            then squashed, and normalized by mean and deviation 0.5.

    Raises:
        ConfigError: mupax does not read images this way. The message names the field.
    """
    if processor is None:
        # These are the defaults of the processors of `transformers`.
        interpolation: Interpolation = "bicubic"
        if config.get("model_type") == "vit":
            interpolation = "bilinear"
        pixels = PixelsConfig(fit="squash", interpolation=interpolation, background=_BACKGROUND)
        return ImageInput(_names(config, model), pixels)
    try:
        pixels = _pixels(processor, model)
        pixels.check(model.image_size, model.channels)
    except ConfigError as error:
        raise ConfigError(
            f"{FILE}: {error}; remove the file to read the weights without it"
        ) from error
    return ImageInput(_names(config, model), pixels)


def _names(config: Mapping[str, Any], model: ImageModel) -> tuple[str, ...] | None:
    """Return the class names of id2label, or `None` if it is missing or has default names.

    Raises:
        ConfigError: a class of the model has no name in id2label.
    """
    labels = config.get("id2label")
    if not isinstance(labels, Mapping) or not labels:
        return None
    names = [labels.get(str(label)) for label in range(model.num_classes)]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"config.json: id2label does not name the classes 0 to {model.num_classes - 1}"
        )
    # `transformers` writes these names for a model without names.
    default_names = [f"LABEL_{label}" for label in range(len(names))]
    return None if names == default_names else tuple(map(str, names))


def _pixels(fields: Mapping[str, Any], model: ImageModel) -> PixelsConfig:
    """Return the preprocessing in a preprocessor_config.json.

    Raises:
        ConfigError: mupax does not read images this way. The message names the field.
    """
    for field in ("do_pad", "do_reduce_labels", "crop_pct", "do_flip_channel_order"):
        if fields.get(field):
            raise ConfigError(f"{field} is {fields[field]!r:.40}, which is not done here")
    processor = str(fields.get("image_processor_type", fields.get("feature_extractor_type", "ViT")))
    if not processor.startswith(_PROCESSORS):
        raise ConfigError(
            f"image_processor_type is {processor!r:.60}; only those of {', '.join(_PROCESSORS)} "
            "are read"
        )
    fit, resize = _fit_and_resize(fields, processor, model)
    if fields.get("do_resize") is False:
        raise ConfigError("do_resize is false, and images of any size are to be read")

    # The defaults of the processors' classes, which files may leave out.
    default_filter = "bilinear" if processor.startswith("ViT") else "bicubic"
    resample = fields.get("resample", _RESAMPLE.index(default_filter))
    # bool is a subclass of int and no filter.
    if type(resample) is not int or not 0 <= resample < len(_RESAMPLE):
        raise ConfigError(f"resample is {resample!r:.40}, no number of PIL's filters")
    interpolation: Any = _RESAMPLE[resample]

    mean, std = _normalization(fields)
    return PixelsConfig(
        fit=fit,  # pyright: ignore
        resize=resize,
        interpolation=interpolation,
        mean=mean,
        std=std,
        background=_BACKGROUND,
    )


def _fit_and_resize(
    fields: Mapping[str, Any], processor: str, model: ImageModel
) -> tuple[str, int | None]:
    """Return `fit` and `resize` of a `PixelsConfig`, from the fields of a preprocessor_config.json.

    `fit` is "squash" or "edge". `resize` is the size in pixels to which images are scaled before
    the crop, or `None` if they are squashed to the model's size.

    Args:
        processor: Class name of the processor, which says what a bare number of `size` means.

    Raises:
        ConfigError: Images come out of another size than the model's, or a size is neither a
            square nor a shortest edge.
    """
    image_size = model.image_size
    fit = "squash"
    resize = _size(fields.get("size", image_size), "size")
    if type(fields.get("size")) is int and processor.startswith(_BY_EDGE):
        resize = {"shortest_edge": fields["size"]}
    crop = image_size
    if fields.get("do_center_crop"):
        crop = _size(fields.get("crop_size", image_size), "crop_size")
    if isinstance(resize, dict):
        fit = "edge"
        resize = resize["shortest_edge"]

    # Without a crop only the fit `squash` to the model's size gives images of that size.
    is_uncropped = not fields.get("do_center_crop")
    needs_crop = fit == "edge" or resize != image_size
    if crop != image_size or (is_uncropped and needs_crop):
        raise ConfigError(
            f"images come out of another size than the {image_size} x {image_size} that "
            "config.json says"
        )
    if resize == image_size and fit == "squash":
        return fit, None
    return fit, resize


def _normalization(fields: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the channels, for pixels from 0 to 1.

    If `do_normalize` is false, they are 0 and 1. Both are then divided by 255 times the rescale
    factor (1 without `do_rescale`), because mupax always multiplies pixel levels by 1/255.

    Args:
        fields: content of a `preprocessor_config.json`.

    Raises:
        ConfigError: a value is not a number, or out of range.
    """
    factor = 1.0
    if fields.get("do_rescale", True):
        factor = fields.get("rescale_factor", 1 / 255)
    mean = _channels(fields.get("image_mean", 0.5), "image_mean")
    std = _channels(fields.get("image_std", 0.5), "image_std")
    # Mean 0 and deviation 1 leave rescaled images as they are.
    if fields.get("do_normalize") is False:
        mean = (0.0,)
        std = (1.0,)
    if type(factor) not in (int, float) or not 1 / _FAR < factor < _FAR:
        raise ConfigError(f"rescale_factor is {factor!r:.40}, not a number above 0")
    # The processor multiplies levels from 0 to 255 by the factor, mupax by 1 / 255.
    times = factor * 255
    if times != 1:
        mean = tuple(x / times for x in mean)
        std = tuple(x / times for x in std)
    return mean, std


def _size(value: Any, field: str) -> Any:
    """Return a size as the side of a square in pixels, or as `{"shortest_edge": pixels}`.

    Args:
        value: value of the field, of any JSON type.

    Raises:
        ConfigError: the value is neither.
    """
    if isinstance(value, Mapping):
        present = {name for name, size in value.items() if size is not None}
        if present == {"shortest_edge"} and type(value["shortest_edge"]) is int:
            return {"shortest_edge": value["shortest_edge"]}
        if present == {"height", "width"} and value["height"] == value["width"]:
            value = value["height"]
    if type(value) is not int:
        raise ConfigError(
            f"{field} is {value!r:.60}, which is neither a square nor a shortest edge"
        )
    return value


def _channels(value: Any, field: str) -> tuple[float, ...]:
    """Return one number per channel, or a single number if all channels have the same.

    Args:
        value: Value of the field, of any JSON type: a number or a list of numbers.
        field: Name of the field, for the message.

    Raises:
        ConfigError: The value is anything else, or a number is too large.
    """
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(x) in (int, float) and -_FAR < x < _FAR for x in values):
        raise ConfigError(f"{field} is {value!r:.60}, not numbers")
    if len(set(values)) == 1:
        return (float(values[0]),)
    return tuple(float(x) for x in values)


def labels(names: tuple[str, ...] | None) -> dict[str, Any]:
    """Return id2label and label2id of config.json, or an empty dictionary without names.

    Raises:
        ConfigError: two classes have the same name, and label2id can hold only one.
    """
    if names is None:
        return {}
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"two classes are called {twice!r}, and label2id of config.json has one number for a "
            "name"
        )
    return {
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
    }


def to_huggingface(pixels: PixelsConfig, model: ImageModel, family: Family) -> dict[str, Any]:
    """Return the content of preprocessor_config.json.

    The fit `centre` and the interpolation `area` become the nearest that `transformers` has (`note`
    describes the difference).

    Args:
        family: architecture of the model in `transformers`.
    """
    image_size = model.image_size
    pixels = pixels.resolved(image_size)
    resize = pixels.resize
    if not resize:
        resize = round(image_size * _CENTRE) if pixels.fit == "centre" else image_size

    processor = "SiglipImageProcessor" if family == "siglip" else "ViTImageProcessor"
    crop = {}
    if pixels.fit != "squash" or resize != image_size:
        # Processors of ViT and SigLIP cannot crop.
        processor = "CLIPImageProcessor"
        crop["do_center_crop"] = True
        crop["crop_size"] = {"height": image_size, "width": image_size}
    size = {"shortest_edge": resize}
    if pixels.fit == "squash":
        size = {"height": resize, "width": resize}
    # PIL has no area filter. Its box filter gives almost the same pixels (see `note`).
    interpolation = "box" if pixels.interpolation == "area" else pixels.interpolation
    return {
        "image_processor_type": processor,
        "do_resize": True,
        "size": size,
        "resample": _RESAMPLE.index(interpolation),
        **crop,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _per_channel(pixels.mean, model),
        "image_std": _per_channel(pixels.std, model),
        "do_convert_rgb": model.channels == 3,
    }


def _per_channel(values: tuple[float, ...], model: ImageModel) -> list[float]:
    """Return one value per channel. A single value is repeated."""
    if len(values) == 1:
        return list(values) * model.channels
    return list(values)


def note(pixels: PixelsConfig, model: ImageModel) -> str | None:
    """Return a note on how `transformers` reads an image differently, or `None` if it does not."""
    if pixels.interpolation == "area":
        return (
            f"{FILE} has PIL's box in place of area, which counts whole pixels alone: levels "
            "differ a little; --data.pixels.interpolation box trains with what is the same to the "
            "bit"
        )
    if pixels.fit != "centre":
        return None
    edge = round(model.image_size * _CENTRE)
    return (
        f"{FILE} scales the shorter edge to {edge} and cuts {model.image_size} out, where images "
        "here are cut first and scaled then: the top class of some images differs; "
        "--data.pixels.fit edge or squash trains with what is the same to the bit"
    )
