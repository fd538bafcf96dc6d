"""Class names and preprocessing in the files of `transformers`: id2label of config.json, and preprocessor_config.json, both ways.

Their processors scale the sides (`size` with height and width) or the shorter edge, cut the centre out, and normalize
each channel. So do the fits `squash` and `edge`, the default. The fit `centre`, which cuts first, is written as the edge that comes nearest.
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
_RESAMPLE: tuple[str, ...] = get_args(Interpolation)[:-1]  # area is none of PIL's
_CENTRE = 8 / 7
"""The shorter edge over the side of what the fit `centre` keeps of it."""
_BACKGROUND = "none"
"""The processors of `transformers` read the colours below transparent pixels."""
_FAR = 1e9
"""No mean, deviation or factor is beyond."""
_BY_EDGE = ("CLIP", "Bit")
"""Processors that read a bare number of `size` as the shorter edge; of the others it is both sides."""
_PROCESSORS = ("ViT", "DeiT", "Siglip", *_BY_EDGE)


def from_huggingface(
    config: Mapping[str, Any], processor: Mapping[str, Any] | None, model: ImageModel
) -> ImageInput:
    """Names and preprocessing of a published model.

    Args:
        config: its config.json.
        processor: its preprocessor_config.json; None where there is none: images are squashed then, and normalized by a half.
        model: that config.json describes.

    Raises:
        ConfigError: what no model here does with images; the text names the field.
    """
    if processor is None:
        how: Interpolation = "bilinear" if config.get("model_type") == "vit" else "bicubic"
        return ImageInput(
            _names(config, model),
            PixelsConfig(fit="squash", interpolation=how, background=_BACKGROUND),
        )
    try:
        pixels = _pixels(processor, model)
        pixels.check(model.image_size, model.channels)
    except ConfigError as error:
        raise ConfigError(
            f"{FILE}: {error}; remove the file to read the weights without it"
        ) from error
    return ImageInput(_names(config, model), pixels)


def _names(config: Mapping[str, Any], model: ImageModel) -> tuple[str, ...] | None:
    """Names of id2label, None where they are those of nobody."""
    labels = config.get("id2label")
    if not isinstance(labels, Mapping) or not labels:
        return None
    names = [labels.get(str(i)) for i in range(model.num_classes)]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"config.json: id2label does not name the classes 0 to {model.num_classes - 1}"
        )
    return None if names == [f"LABEL_{i}" for i in range(len(names))] else tuple(map(str, names))


def _pixels(read: Mapping[str, Any], model: ImageModel) -> PixelsConfig:
    for field in ("do_pad", "do_reduce_labels", "crop_pct", "do_flip_channel_order"):
        if read.get(field):
            raise ConfigError(f"{field} is {read[field]!r:.40}, which is not done here")
    kind = str(read.get("image_processor_type", read.get("feature_extractor_type", "ViT")))
    if not kind.startswith(_PROCESSORS):
        raise ConfigError(
            f"image_processor_type is {kind!r:.60}; only those of {', '.join(_PROCESSORS)} are read"
        )
    fit, resize, cut = "squash", _size(read.get("size", model.image_size), "size"), model.image_size
    if type(read.get("size")) is int and kind.startswith(_BY_EDGE):
        resize = {"shortest_edge": read["size"]}
    if read.get("do_center_crop"):
        cut = _size(read.get("crop_size", model.image_size), "crop_size")
    if isinstance(resize, dict):
        fit, resize = "edge", resize["shortest_edge"]
    if cut != model.image_size or (
        not read.get("do_center_crop") and (fit == "edge" or resize != model.image_size)
    ):
        raise ConfigError(
            f"images come out of another size than the {model.image_size} x {model.image_size} that config.json says"
        )
    if read.get("do_resize") is False:
        raise ConfigError("do_resize is false, and images of any size are to be read")
    resample = read.get(
        "resample", _RESAMPLE.index("bilinear" if kind.startswith("ViT") else "bicubic")
    )
    if type(resample) is not int or not 0 <= resample < len(_RESAMPLE):
        raise ConfigError(f"resample is {resample!r:.40}, no number of PIL's filters")
    factor = read.get("rescale_factor", 1 / 255) if read.get("do_rescale", True) else 1.0
    mean, std = (
        _channels(read.get(f"image_{name}", 0.5), f"image_{name}") for name in ("mean", "std")
    )
    if read.get("do_normalize") is False:
        mean, std = (0.0,), (1.0,)
    if type(factor) not in (int, float) or not 1 / _FAR < factor < _FAR:
        raise ConfigError(f"rescale_factor is {factor!r:.40}, not a number above 0")
    if (times := factor * 255) != 1:
        mean, std = tuple(x / times for x in mean), tuple(x / times for x in std)
    resize = None if resize == model.image_size and fit == "squash" else resize
    interpolation: Any = _RESAMPLE[resample]
    return PixelsConfig(
        fit=fit,  # pyright: ignore
        resize=resize,
        interpolation=interpolation,
        mean=mean,
        std=std,
        background=_BACKGROUND,
    )


def _size(value: Any, field: str) -> Any:
    """Pixels on a side, or a dictionary with the shortest edge."""
    whole = {"height", "width"}
    if isinstance(value, Mapping) and {k for k, v in value.items() if v is not None} == {
        "shortest_edge"
    }:
        if type(value["shortest_edge"]) is int:
            return {"shortest_edge": value["shortest_edge"]}
    elif isinstance(value, Mapping) and {k for k, v in value.items() if v is not None} == whole:
        value = value["height"] if value["height"] == value["width"] else value
    if type(value) is not int:
        raise ConfigError(
            f"{field} is {value!r:.60}, which is neither a square nor a shortest edge"
        )
    return value


def _channels(value: Any, field: str) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(x) in (int, float) and -_FAR < x < _FAR for x in values):
        raise ConfigError(f"{field} is {value!r:.60}, not numbers")
    return tuple(float(x) for x in values) if len(set(values)) > 1 else (float(values[0]),)


def labels(names: tuple[str, ...] | None) -> dict[str, Any]:
    """id2label and label2id of config.json; nothing where no class has a name.

    Raises:
        ConfigError: two classes of one name, of which label2id can hold one.
    """
    if names is None:
        return {}
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"two classes are called {twice!r}, and label2id of config.json has one number for a name"
        )
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {n: i for i, n in enumerate(names)},
    }


def to_huggingface(pixels: PixelsConfig, model: ImageModel, family: Family) -> dict[str, Any]:
    """preprocessor_config.json.

    Args:
        pixels: preprocessing.
        model: whose.
        family: what `transformers` calls its architecture.
    """
    size, square = model.image_size, {"height": model.image_size, "width": model.image_size}
    pixels = pixels.resolved(size)
    resize = pixels.resize or (round(size * _CENTRE) if pixels.fit == "centre" else size)
    kind, cut = "SiglipImageProcessor" if family == "siglip" else "ViTImageProcessor", {}
    if pixels.fit != "squash" or resize != size:
        kind, cut = "CLIPImageProcessor", {"do_center_crop": True, "crop_size": square}
    return {
        "image_processor_type": kind,
        "do_resize": True,
        "size": {"height": resize, "width": resize}
        if pixels.fit == "squash"
        else {"shortest_edge": resize},
        "resample": _RESAMPLE.index(
            "box" if pixels.interpolation == "area" else pixels.interpolation
        ),
        **cut,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(pixels.mean) * (model.channels if len(pixels.mean) == 1 else 1),
        "image_std": list(pixels.std) * (model.channels if len(pixels.std) == 1 else 1),
        "do_convert_rgb": model.channels == 3,
    }


def note(pixels: PixelsConfig, model: ImageModel) -> str | None:
    """What `transformers` does otherwise with an image; None where it does the same.

    Args:
        pixels: preprocessing.
        model: whose.
    """
    if pixels.interpolation == "area":
        return (
            f"{FILE} has PIL's box in place of area, which counts whole pixels alone: levels differ a little; "
            "--data.pixels.interpolation box trains with what is the same to the bit"
        )
    if pixels.fit != "centre":
        return None
    edge = round(model.image_size * _CENTRE)
    return (
        f"{FILE} scales the shorter edge to {edge} and cuts {model.image_size} out, where images here are cut first and scaled "
        "then: the top class of some images differs; --data.pixels.fit edge or squash trains with what is the same to the bit"
    )
