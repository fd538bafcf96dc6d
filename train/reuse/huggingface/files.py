"""Files of an export: weights, config.json or model.json, and the model card, README.md.

Weights are written in a preset's form with mupax's names, or as `transformers` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupax import __version__
from mupax.terminal import counted
from mupax.train.config.preset import PresetConfig, preset_for
from mupax.train.config.record import model_to_json
from mupax.train.core.factors import resolve
from mupax.train.reuse import plain
from mupax.train.reuse.huggingface import evidence, preprocessor
from mupax.train.reuse.image_input import printable
from mupax.train.reuse.source import CONFIG, FORMAT, MODEL, WeightsSource
from mupax.train.reuse.transplant import place
from mupax.zoo import families
from mupax.zoo.definition import definition
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.equivalent import equivalent
from mupax.zoo.huggingface.names import family_of
from mupax.zoo.huggingface.tensorfile import DType, write_tensors
from mupax.zoo.transformer import transformer

FILE = "README.md"
_TASKS = {
    "images": ("image-classification", "AutoModelForImageClassification"),
    "tokens": ("text-generation", "AutoModelForCausalLM"),
}
"""Pipeline tag of the hub and class of `transformers`, by task of the model."""
_SEQ2SEQ_TASK = ("text2text-generation", "AutoModelForSeq2SeqLM")
_LISTED = 200
"""Number of class names listed in a card."""
_NO_LICENCE = (
    "None is stated: whoever wrote this card gave none, and it grants no right to use these "
    "weights. What they were trained on, and what they were started from, may have terms of their "
    "own."
)


def card(
    source: WeightsSource,
    name: str,
    licence: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    *,
    tokenizer: bool = False,
    chats: bool = False,
    averaged: bool = False,
) -> str:
    """Return the model card, README.md, of an export.

    Only the last part of a path appears in a card, because paths are private to a machine.

    Args:
        licence: identifier from `licences.identifier`. `None` if the user gave none.
        evaluation: metrics of the run's evaluation at the exported step (`evidence.evaluation`).
        tokenizer: whether the export has a tokenizer.json, which the card's code then opens.
        chats: whether the tokenizer has a chat template.
        averaged: whether the weights are the moving average of the run.
    """
    from huggingface_hub import ModelCardData

    model = source.model
    sizes = model.sizes()
    task, loader = _SEQ2SEQ_TASK if model.denoises else _TASKS[model.task]
    header = ModelCardData(
        library_name="transformers", pipeline_tag=task, tags=["mupax"], license=licence
    )
    shape = (
        f"width {sizes['embed']}, depth {sizes['layers']}, {sizes['heads']} heads, "
        f"{model.input_text}"
    )
    paragraphs = [
        f"---\n{header}\n---",
        f"# {_inline(name)}",
        f"{model.family}, {shape}; {families.params(model):,} parameters.",
    ]
    if source.preset:
        paragraphs.append("## Parameterization")
        paragraphs.append(
            f"{source.preset['described']}. Its multipliers are folded into the weights; "
            "config.json has them under `mupax`."
        )
    paragraphs += _tuned(source)
    paragraphs += _training(source)
    paragraphs += _evaluation(source, evaluation or {}, averaged)
    paragraphs += _images(source)
    paragraphs += ["## Use", _use(source, loader, tokenizer, chats)]
    paragraphs.append("## Licence")
    paragraphs.append(f"`{licence}`, as whoever wrote this card says." if licence else _NO_LICENCE)
    paragraphs.append(f"Written by mupax {__version__}.")
    return "\n\n".join(paragraphs) + "\n"


def _training(source: WeightsSource) -> list[str]:
    """Return a model card's paragraphs on data, steps and optimizer. Empty without a run."""
    if source.run is None:
        return []
    # A path can contain a user's name, so only its last part is written.
    config, facts = source.run
    data, colon, path = config.data.name.partition(":")
    if colon:
        data = f"{data}:{_last(path)}"
    optimizer = config.scaled_optimizer
    step = source.preset.get("step", config.steps)
    rows = [
        f"- data: {_inline(data)}, digest {_inline(str(facts.get('digest')))}",
        f"- {step} of {counted(config.steps, 'step')} of "
        f"{counted(config.data.batch_size, 'example')}, "
        f"seed {config.seed}",
        f"- {optimizer.name}, peak rate {optimizer.peak_lr:g}, schedule {optimizer.schedule}, "
        f"weight decay {optimizer.weight_decay:g}",
    ]
    start = config.init.init_from
    if start:
        workdir = start.partition("/checkpoints/")[0]
        rows.append(f"- started from {_inline(_last(workdir))}")
    return ["## Training", "\n".join(rows)]


def _tuned(source: WeightsSource) -> list[str]:
    """Return the model card's paragraphs on the study that the run's tuned preset comes from.

    The list is empty for weights without a run, and for a run whose preset is not a tuned one.
    """
    if source.run is None:
        return []
    config, _ = source.run
    study = evidence.study(config)
    if study is None:
        return []
    origin = "measured by a study of small models"
    if study.is_published:
        origin = "as others have published them"
    text = f"The numbers of {_inline(study.use)} (`mupax presets tuned {study.use}`), {origin}:"
    lines = evidence.of_study(study, source.model.base_sizes())
    return ["## Tuned preset", text, "\n".join(lines)]


def _evaluation(source: WeightsSource, row: Mapping[str, Any], averaged: bool) -> list[str]:
    """Return a model card's paragraphs on the run's evaluation. Empty without a run."""
    if source.run is None:
        return []
    return ["## Evaluation", evidence.measured(row, averaged=averaged, task=source.model.task)]


def _images(source: WeightsSource) -> list[str]:
    """Return a model card's paragraphs on class names and preprocessing. Empty for text models."""
    if source.images is None:
        return []
    names = source.images.class_names or ()
    lines = [f"{label}. {_inline(name)}" for label, name in enumerate(names[:_LISTED])]
    if len(names) > _LISTED:
        lines.append(f"and {len(names) - _LISTED} more, in config.json")
    pixels = source.images.pixels
    preprocessing = (
        f"Images: {pixels.fit}, {pixels.interpolation}, mean {pixels.mean}, "
        f"deviation {pixels.std} (preprocessor_config.json)."
    )
    return ["## Classes", "\n".join(lines) or "They have no names.", preprocessing]


def _use(source: WeightsSource, loader: str, tokenizer: bool, chats: bool) -> str:
    """Return a code block that opens the export by `loader`, a class of `transformers`."""
    code = ["import transformers", ""]
    if source.images:
        code.append(
            'processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")'
        )
    if tokenizer:
        code.append("tokenizer = transformers.AutoTokenizer.from_pretrained(folder)")
    code.append(f"model = transformers.{loader}.from_pretrained(folder)")
    if tokenizer:
        code.append("")
        if chats:
            code.append('messages = [{"role": "user", "content": "Hello"}]')
            code.append(
                "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
                'return_dict=True, return_tensors="pt")'
            )
        else:
            code.append('inputs = tokenizer("A text", return_tensors="pt")')
        code.append("print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))")
    return "\n".join(["```python", *code, "```"])


def _last(path: str) -> str:
    """Return the last part of a path."""
    return path.rstrip("/").rpartition("/")[2]


def _inline(text: str) -> str:
    """Return text as Markdown code, with backquotes replaced, so that no name is read as markup."""
    return f"`{printable(text).replace('`', chr(39))}`"


def write_imported(
    source: WeightsSource,
    fields: PresetConfig,
    out: Path,
    origin: str,
    *,
    reads_bytes: bool = False,
) -> dict[str, Any]:
    """Write weights in a preset's form: safetensors with mupax's names, and `model.json`.

    Args:
        out: folder to write into, made if it is missing. It must hold no weights yet.
        origin: origin of the weights for the record.
        reads_bytes: whether the model's tokens are bytes, which need no tokenizer.json.

    Returns:
        Record of the preset (`plain.preset_record`).

    Raises:
        WeightsError: the weights do not fit their own model.
        PresetError, AbsorbError: the preset cannot be used on this model.
    """
    preset = preset_for(fields, source.model)
    model = definition(source.model)
    factors = resolve(preset, model, preset.optimizers[0])
    params = place(source, model, factors)

    record = {
        "format": FORMAT,
        "model": model_to_json(source.model),
        "preset": plain.preset_record(fields, preset, model, factors),
        "from": origin,
    }
    if source.images:
        record |= source.images.to_json()
    if source.text_ids:
        record["text_ids"] = dict(source.text_ids)
    if reads_bytes:
        record["tokenizer"] = "bytes"

    out.mkdir(parents=True, exist_ok=True)
    # Sorted, so that equal weights give equal files.
    write_tensors(out, sorted(params.items()), dtype=source.model.compute.param_dtype)
    (out / MODEL).write_text(json.dumps(record, indent=2) + "\n")
    return record["preset"]


def write_huggingface(
    source: WeightsSource,
    out: Path,
    dtype: DType,
    tokens: Mapping[str, int | list[int] | None] | None = None,
    *,
    reads_bytes: bool = False,
) -> list[str]:
    """Write weights as `transformers` reads them: config.json, safetensors, and a preprocessor.

    config.json has the class names, and a key `mupax` with the preset of the weights and the factor
    that was absorbed into each weight. Only an image model has a preprocessor_config.json.

    Args:
        out: folder to write into, made if it is missing. It must hold no weights yet.
        tokens: token ids by config.json's names, such as eos_token_id.
        reads_bytes: whether the model's tokens are bytes, which need no tokenizer.json.

    Returns:
        Sentences on parts of the model that are written in another form.

    Raises:
        ConfigError: no architecture of `transformers` computes this model.
        TensorFileError: the dtype cannot hold the weights.
    """
    model, added, notes = equivalent(transformer(source.model, "export"))
    fields = huggingface.to_huggingface(model, dtype=dtype, tokens=tokens)
    processor = None
    if isinstance(model, ImageModel) and source.images:
        fields |= preprocessor.labels(source.images.class_names)
        processor = preprocessor.to_huggingface(source.images.pixels, model, family_of(model))
    if source.preset or reads_bytes:
        record = dict(source.preset)
        if reads_bytes:
            record["tokenizer"] = "bytes"
        fields["mupax"] = record

    out.mkdir(parents=True, exist_ok=True)
    tensors = weights.to_huggingface(model, {**source.params, **added})
    # `transformers` reads this entry before the tensors, and refuses values that it does not know.
    write_tensors(out, tensors, dtype=dtype, metadata={"format": "pt"})
    (out / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    if processor:
        (out / preprocessor.FILE).write_text(json.dumps(processor, indent=2) + "\n")
    return notes
