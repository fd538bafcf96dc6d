"""Files of an export: weights in a preset's form with our names or as `transformers` reads them, and the model card, README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupax import __version__
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
_LISTED = 200
_NO_LICENCE = (
    "None is stated: whoever wrote this card gave none, and it grants no right to use these weights. What they were trained on, and what "
    "they were started from, may have terms of their own."
)


def card(
    source: WeightsSource,
    name: str,
    licence: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
    *,
    tokenizer: bool = False,
    chats: bool = False,
) -> str:
    """README.md of an export. Of paths only the last part is in it, for they are those of a machine.

    Args:
        source: what is exported.
        name: of the model.
        licence: from `licences.identifier`; None where none was given.
        evaluation: the row of a run's evaluation at the step that is exported (`evidence.evaluation`).
        tokenizer: whether a tokenizer.json is exported.
        chats: whether it has a chat template.
    """
    from huggingface_hub import ModelCardData

    model, sizes = source.model, source.model.sizes()
    task, loader = (
        ("text2text-generation", "AutoModelForSeq2SeqLM") if model.denoises else _TASKS[model.task]
    )
    header = ModelCardData(
        library_name="transformers", pipeline_tag=task, tags=["mupax"], license=licence
    )
    shape = f"width {sizes['embed']}, depth {sizes['layers']}, {sizes['heads']} heads, {model.input_text}"
    lines = [
        f"---\n{header}\n---",
        f"# {_inline(name)}",
        f"{model.family}, {shape}; {families.params(model):,} parameters.",
    ]
    if source.preset:
        lines += [
            "## Parameterization",
            f"{source.preset['described']}. Its multipliers are folded into the weights; config.json has them under `mupax`.",
        ]
    lines += [
        *_tuned(source),
        *_training(source),
        *_evaluation(source, evaluation or {}),
        *_images(source),
        "## Use",
        *_use(source, loader, tokenizer, chats),
        "## Licence",
        f"`{licence}`, as whoever wrote this card says." if licence else _NO_LICENCE,
        f"Written by mupax {__version__}.",
    ]
    return "\n\n".join(lines) + "\n"


def _training(source: WeightsSource) -> list[str]:
    if source.run is None:
        return []
    config, facts = source.run
    kind, colon, path = config.data.name.partition(":")
    data = f"{kind}:{_last(path)}" if colon else kind
    opt, start = config.scaled_optimizer, config.init.init_from
    rows = [
        f"- data: {_inline(data)}, digest {_inline(str(facts.get('digest')))}",
        f"- {source.preset.get('step', config.steps)} of {config.steps} steps of {config.data.batch_size} examples, seed {config.seed}",
        f"- {opt.name}, peak rate {opt.peak_lr:g}, schedule {opt.schedule}, weight decay {opt.weight_decay:g}",
        *(
            [f"- started from {_inline(_last(start.partition('/checkpoints/')[0]))}"]
            if start
            else []
        ),
    ]
    return ["## Training", "\n".join(rows)]


def _tuned(source: WeightsSource) -> list[str]:
    if source.run is None or (study := evidence.study(source.run[0])) is None:
        return []
    origin = (
        "as others have published them"
        if study.is_published
        else "measured by a study of small models"
    )
    text = f"The numbers of {_inline(study.use)} (`mupax presets tuned {study.use}`), {origin}:"
    return ["## Tuned preset", text, "\n".join(evidence.of_study(study, source.model.base_sizes()))]


def _evaluation(source: WeightsSource, row: Mapping[str, Any]) -> list[str]:
    if source.run is None:
        return []
    return ["## Evaluation", evidence.measured(row, averaged=False, kind=source.model.task)]


def _images(source: WeightsSource) -> list[str]:
    if source.images is None:
        return []
    names, pixels = source.images.class_names, source.images.pixels
    listed = [f"{label}. {_inline(name)}" for label, name in enumerate((names or ())[:_LISTED])]
    more = (
        [f"and {len(names) - _LISTED} more, in config.json"]
        if names and len(names) > _LISTED
        else []
    )
    read = f"Images: {pixels.fit}, {pixels.interpolation}, mean {pixels.mean}, deviation {pixels.std} (preprocessor_config.json)."
    return ["## Classes", "\n".join([*listed, *more]) or "They have no names.", read]


def _use(source: WeightsSource, loader: str, tokenizer: bool, chats: bool) -> list[str]:
    code = ["import transformers", ""]
    if source.images:
        code.append(
            'processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")'
        )
    if tokenizer:
        code.append("tokenizer = transformers.AutoTokenizer.from_pretrained(folder)")
    code.append(f"model = transformers.{loader}.from_pretrained(folder)")
    if tokenizer and chats:
        code += [
            "",
            'messages = [{"role": "user", "content": "Hello"}]',
            'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")',
        ]
    elif tokenizer:
        code += ["", 'inputs = tokenizer("A text", return_tensors="pt")']
    if tokenizer:
        code.append("print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))")
    return ["\n".join(["```python", *code, "```"])]


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _inline(text: str) -> str:
    """As code, so that no name is read as markup."""
    return f"`{printable(text).replace('`', chr(39))}`"


def write_imported(
    source: WeightsSource,
    fields: PresetConfig,
    out: Path,
    origin: str,
    *,
    reads_bytes: bool = False,
) -> dict[str, Any]:
    """Write weights in a preset's form: our names in safetensors, and `model.json`.

    Args:
        source: the weights.
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
    source: WeightsSource,
    out: Path,
    dtype: DType,
    tokens: Mapping[str, int | list[int] | None] | None = None,
    *,
    reads_bytes: bool = False,
) -> list[str]:
    """Write weights as `transformers` reads them: config.json and safetensors; of a model of images preprocessor_config.json.

    config.json has the names of classes, and a key `mupax` that says which preset the weights come from and what was folded into each.

    Args:
        source: the weights.
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
        out,
        weights.to_huggingface(model, {**source.params, **added}),
        dtype=dtype,
        metadata={"format": "pt"},
    )
    (out / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    if processor:
        (out / preprocessor.FILE).write_text(json.dumps(processor, indent=2) + "\n")
    return notes
