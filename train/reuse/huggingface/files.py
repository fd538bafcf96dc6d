"""Weights as files: in a preset's form with our names, or as `transformers` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupax.train.config.preset import PresetConfig, preset_for
from mupax.train.config.record import model_to_json
from mupax.train.core.factors import resolve
from mupax.train.reuse import plain
from mupax.train.reuse.huggingface import preprocessor
from mupax.train.reuse.outline import CONFIG, FORMAT, MODEL
from mupax.train.reuse.source import Source, place
from mupax.zoo.definition import definition
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.equivalent import equivalent
from mupax.zoo.huggingface.names import family_of
from mupax.zoo.huggingface.tensorfile import DType, write_tensors
from mupax.zoo.transformer import transformer


def write_imported(
    source: Source, fields: PresetConfig, out: Path, origin: str, *, reads_bytes: bool = False
) -> dict[str, Any]:
    """Write weights in a preset's form: our names in safetensors, and `model.json`.

    Args:
        source: from `read`.
        fields: the preset.
        out: folder, made here.
        origin: where they came from, for the record.
        reads_bytes: whether the model's tokens are bytes, for which there is no tokenizer.json.

    Returns:
        What is recorded of the preset.

    Raises:
        WeightsError: the weights do not fit their own model.
        PresetError, AbsorbError: the preset cannot be used on this model.
    """
    preset, model = preset_for(fields, source.model), definition(source.model)
    factors = resolve(preset, model, preset.optimizers[0])
    params = place(source, model, factors)
    record = {
        "format": FORMAT,
        "model": model_to_json(source.model),
        "preset": plain.preset_record(fields, preset, model, factors),
        "from": origin,
        **(source.images.to_json() if source.images else {}),
        **({"text_ids": dict(source.text_ids)} if source.text_ids else {}),
        **({"tokenizer": "bytes"} if reads_bytes else {}),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out, sorted(params.items()), dtype=source.model.compute.param_dtype)
    (out / MODEL).write_text(json.dumps(record, indent=2) + "\n")
    return record["preset"]


def write_huggingface(
    source: Source,
    out: Path,
    dtype: DType,
    tokens: Mapping[str, int | list[int] | None] | None = None,
    *,
    reads_bytes: bool = False,
) -> list[str]:
    """Write weights as `transformers` reads them: config.json and safetensors; of a model of images preprocessor_config.json.

    config.json has the names of classes, and a key `mupax` that says which preset the weights come from and what was folded into each.

    Args:
        source: from `read`.
        out: folder, made here.
        dtype: type of the stored weights.
        tokens: ids by config.json's names of them, such as eos_token_id.
        reads_bytes: whether the model's tokens are bytes, for which there is no tokenizer.json.

    Returns:
        What was written otherwise than it is here, one sentence each.

    Raises:
        ConfigError: no family of theirs computes this model.
        TensorFileError: the type cannot hold the weights.
    """
    model, added, notes = equivalent(transformer(source.model, "export"))
    fields, processor = huggingface.to_huggingface(model, dtype=dtype, tokens=tokens), None
    if isinstance(model, ImageModel) and source.images:
        fields |= preprocessor.labels(source.images.class_names)
        processor = preprocessor.to_huggingface(source.images.pixels, model, family_of(model))
    if source.preset or reads_bytes:
        fields["mupax"] = {**source.preset, **({"tokenizer": "bytes"} if reads_bytes else {})}
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(
        out, weights.to_huggingface(model, {**source.params, **added}), dtype=dtype, metadata={"format": "pt"}
    )
    (out / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    if processor:
        (out / preprocessor.FILE).write_text(json.dumps(processor, indent=2) + "\n")
    return notes
