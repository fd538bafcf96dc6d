"""The model card of an export, README.md: what the model is, how it was trained and does, what it reads, its classes and licence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mupax import __version__
from mupax.train.reuse.huggingface import evidence
from mupax.train.reuse.image_input import printable
from mupax.train.reuse.source import Source
from mupax.zoo import flops

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
    source: Source,
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
    model, sizes = source.model, source.model.sizes()
    task, loader = ("text2text-generation", "AutoModelForSeq2SeqLM") if model.denoises else _TASKS[model.task]
    head = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags: [mupax]"]
    head += [f"license: {licence}", "---"] if licence else ["---"]
    shape = f"width {sizes['embed']}, depth {sizes['layers']}, {sizes['heads']} heads, {model.input_text}"
    lines = [*head, f"# {_inline(name)}", f"{model.family}, {shape}; {flops.params(model):,} parameters."]
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
    ]
    return "\n\n".join(["\n".join(lines[: len(head)]), *lines[len(head) :], f"Written by mupax {__version__}."]) + "\n"


def _training(source: Source) -> list[str]:
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
        *([f"- started from {_inline(_last(start.partition('/checkpoints/')[0]))}"] if start else []),
    ]
    return ["## Training", "\n".join(rows)]


def _tuned(source: Source) -> list[str]:
    if source.run is None or (study := evidence.study(source.run[0])) is None:
        return []
    text = (
        f"The numbers of {_inline(study.use)} (`mupax presets tuned {study.use}`), measured by a study of small models:"
    )
    return ["## Tuned preset", text, "\n".join(evidence.of_study(study, source.model.base_sizes()))]


def _evaluation(source: Source, row: Mapping[str, Any]) -> list[str]:
    if source.run is None:
        return []
    return ["## Evaluation", evidence.measured(row, averaged=False, kind=source.model.task)]


def _images(source: Source) -> list[str]:
    if source.images is None:
        return []
    names, pixels = source.images.class_names, source.images.pixels
    listed = [f"{label}. {_inline(name)}" for label, name in enumerate((names or ())[:_LISTED])]
    more = [f"and {len(names) - _LISTED} more, in config.json"] if names and len(names) > _LISTED else []
    read = f"Images: {pixels.fit}, {pixels.interpolation}, mean {pixels.mean}, deviation {pixels.std} (preprocessor_config.json)."
    return ["## Classes", "\n".join([*listed, *more]) or "They have no names.", read]


def _use(source: Source, loader: str, tokenizer: bool, chats: bool) -> list[str]:
    code = ["import transformers", ""]
    if source.images:
        code.append('processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")')
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
