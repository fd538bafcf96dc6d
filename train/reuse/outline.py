"""What can be said of weights from elsewhere without reading them: the model, its preset, class names, preprocessing, the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mupax.disk import read_json
from mupax.errors import MupaxError
from mupax.train.checkpoints import assets, workdir
from mupax.train.checkpoints.assets import Assets
from mupax.train.checkpoints.checkpointer import BEST, named_step, step_of
from mupax.train.checkpoints.workdir import CHECKPOINTS, RECORD
from mupax.train.config.record import model_from_json, preset_from_json, run_config
from mupax.train.config.run import Config, PresetConfig
from mupax.train.config.sections import Step
from mupax.train.reuse import image_input
from mupax.train.reuse.huggingface import preprocessor, text_ids
from mupax.train.reuse.image_input import ImageInput
from mupax.zoo.configs import ModelConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface import config as huggingface

MODEL = "model.json"
"""Beside imported weights: the model, the preset whose form they are in, and what folds them."""

FORMAT = "mupax-weights-1"
CONFIG = "config.json"


class WeightsError(MupaxError):
    """Weights that are not there, or that do not fit. The text says which and what to write instead."""


class RunRecord(dict[str, Any]):
    """Parts of a run's config.json."""


def opened(path: Path, step: Step | None = None) -> tuple[Path, dict[str, Any], Step | None]:
    """The folder of weights, what its JSON says, and which step of a run is meant. Weights themselves are not read.

    Args:
        path, step: as `read` takes them.

    Raises:
        WeightsError, JsonError: nothing of this kind there, or a file that is not whole.
        HalfMadeError: the command that makes the folder has not finished it.
    """
    folder, named = named_step(path)
    step = step if named is None else named
    if named is None and not folder.is_dir():
        folder, named = named_step(path.parent)
        step = step if named is None else named
    if folder.name == CHECKPOINTS and (folder.parent / RECORD).is_file():
        folder = folder.parent
    workdir.check_complete(folder)
    imported = (folder / MODEL).is_file()
    if not imported and not (folder / CONFIG).is_file():
        raise WeightsError(
            f"{path}: no run and no weights there ({CONFIG} is missing); give a workdir, workdir/{CHECKPOINTS}/STEP, "
            "a folder of `mupax import`, or one of Hugging Face with config.json and safetensors"
            + ("" if path.exists() else "; `hf download ORG/NAME --local-dir FOLDER` brings one from the hub")
        )
    fields = read_json(folder / (MODEL if imported else CONFIG))
    run = not imported and "model_type" not in fields and "config" in fields
    return folder, RunRecord(fields) if run else fields, step


class ModelDescription(NamedTuple):
    """Description of weights that is known without reading them."""

    folder: Path
    model: ModelConfig
    preset: PresetConfig | None
    """The preset of the run, or of an imported folder; None for Hugging Face's."""
    images: ImageInput | None
    """Class names and preprocessing of a model of images."""
    run: tuple[Config, dict[str, Any]] | None
    """The run they come from, and what it recorded of its data."""
    assets: Assets | None = None
    """The run's own tokenizer, chat template and class names; None of weights alone and of runs of older versions."""
    tokenizer: str = "bytes"
    """data.tokenizer of weights without a run."""
    separator: str | None = None
    """data.separator of weights without a run: the token that ends a document, unless its usual names find it."""


def outline(path: Path) -> ModelDescription:
    """What a path says of its weights; raises as `read`."""
    folder, fields, step = opened(path)
    if isinstance(fields, RunRecord):
        config, facts = recorded_run(fields)
        if step == BEST:
            step = step_of(folder, step, config.checkpoint.best_metric)
        own = assets.find(folder, step)
        facts |= own.facts if own else {}
        images = images_of(facts, config.model, folder)
        return ModelDescription(folder, config.model, config.preset, images, (config, facts), own)
    if (folder / MODEL).is_file():
        model, preset = checked_model(folder, fields), fields.get("preset")
        preset_fields = preset.get("fields") if isinstance(preset, Mapping) else None
        images = images_of(fields, model, folder / MODEL)
        ids = fields.get("text_ids", {})
        text = _text_settings(folder, model, fields, ids if isinstance(ids, Mapping) else {})
        return ModelDescription(folder, model, preset_from_json(preset_fields or {}), images, None, **text)
    model = huggingface.from_huggingface(fields).model
    images, _ = published_images(folder, fields, model)
    text = _text_settings(folder, model, fields.get("mupax", {}), published_ids(folder, fields, model))
    return ModelDescription(folder, model, None, images, None, **text)


def _text_settings(folder: Path, model: ModelConfig, record: Any, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return data.tokenizer and data.separator of weights without a run, by their names in `ModelDescription`."""
    from mupax.train.reuse.huggingface import tokenizer_files

    file = folder / tokenizer_files.TOKENIZER
    if model.task != "tokens" or (reads_bytes(record) and not file.exists()):
        return {"tokenizer": "bytes"}
    separator = tokenizer_files.separator_beside(folder, ids) if model.generates else None
    return {"tokenizer": str(file), "separator": separator}


def reads_bytes(record: Any) -> bool:
    """Return whether the record beside weights says that their tokens are bytes.

    Args:
        record: model.json, or `mupax` of config.json.
    """
    return isinstance(record, Mapping) and record.get("tokenizer") == "bytes"


def checked_model(path: Path, record: Mapping[str, Any]) -> ModelConfig:
    """The model of an imported folder.

    Args:
        path: of it, for the error.
        record: its model.json.
    """
    if record.get("format") != FORMAT:
        raise WeightsError(f"{path}: {MODEL} has format {record.get('format')!r:.40}; this version reads {FORMAT}")
    return model_from_json(record.get("model", {}))


def images_of(record: Mapping[str, Any], model: ModelConfig, where: Path) -> ImageInput | None:
    """Class names and preprocessing that a record of a model of images holds; None for a model of text.

    Args:
        record: of a run's data, or of an imported folder.
        model: whose.
        where: what an error calls the record.
    """
    return image_input.recorded(record, model, str(where)) if isinstance(model, ImageModel) else None


def published_images(
    folder: Path, fields: Mapping[str, Any], model: ModelConfig
) -> tuple[ImageInput | None, list[str]]:
    """Class names and preprocessing beside Hugging Face's weights, and a note where its processor's defaults stand in.

    Args:
        folder: of the weights.
        fields: of config.json.
        model: that they describe.
    """
    if not isinstance(model, ImageModel):
        return None, []
    file = folder / preprocessor.FILE
    processor = read_json(file) if file.is_file() else None
    images = preprocessor.from_huggingface(fields, processor, model)
    how = f"squashed to the model's size, {images.pixels.interpolation}, mean and deviation a half"
    note = [] if processor else [f"no {preprocessor.FILE}: images are taken to be {how}"]
    return images, note


def published_ids(folder: Path, fields: Mapping[str, Any], model: ModelConfig) -> Mapping[str, int | list[int]]:
    """Return the tokens that start, end and pad the texts of Hugging Face's weights, by config.json's names.

    Args:
        folder: of the weights.
        fields: of config.json.
        model: that they describe; one of images has none.

    Raises:
        TextIdsError, JsonError: a field of an encoder-decoder that is no token, or a damaged file.
    """
    if model.denoises:
        return dict(text_ids.recorded(folder, fields))
    return text_ids.of_decoder(fields, model.sizes()["vocab"]) if model.task == "tokens" else {}


def recorded_run(recorded: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """A run's config, and what it recorded of its data."""
    facts = recorded.get("data")
    return run_config(recorded), facts if isinstance(facts, dict) else {}
