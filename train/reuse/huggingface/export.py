"""An export: a model as `transformers` reads it, with the tokenizer, chat template and card that belong to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupax import command_line
from mupax.train.config.data import DataConfig
from mupax.train.config.sections import Step
from mupax.train.data.chats import templates
from mupax.train.data.chats.templates import Template
from mupax.train.data.interface import DataError
from mupax.train.data.text import named_tokenizers
from mupax.train.data.text.tokenizer import Bytes, Ids, Subwords, Tokenizer
from mupax.train.data.text.vocabulary import special_ids
from mupax.train.reuse import own_files, trained
from mupax.train.reuse.huggingface import evidence, files, preprocessor, tokenizer_files
from mupax.train.reuse.huggingface.tokenizer_files import TextFiles
from mupax.train.reuse.image_input import ImageInput
from mupax.train.reuse.source import WeightsSource
from mupax.train.reuse.trained import TrainedModel
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface.tensorfile import DType


def exported(
    path: Path,
    out: Path,
    step: Step | None,
    dtype: DType,
    tokenizer_file: Path | None,
    *,
    name: str,
    licence: str | None = None,
    separator: str | None = None,
) -> tuple[WeightsSource, list[str]]:
    """Write a model as `transformers` reads it, with its tokenizer and its card. Return what was read, and notes on it.

    Args:
        path: a run, one of its steps, or an imported folder.
        out: an empty folder.
        step: of a workdir; the newest unless given.
        dtype: of the stored weights.
        tokenizer_file: to add where the run's is not here.
        name: of the model, in its card.
        licence: an identifier of `licences`, for the card.
        separator: the token of `tokenizer_file` that ends a text; found by its usual names unless given.

    Raises:
        UsageError: a separator of what has one.
        MupaxError: nothing to export there, or a tokenizer without a token that ends a text.
    """
    model = trained.describe(path, step)
    source = model.plain_weights()
    notes: list[str] = []
    text = text_of(model, tokenizer_file, separator)
    ids = {**token_ids(model, text), **model.text_ids}
    if separator is not None and text.encoder is not None:
        ids["eos_token_id"] = text.encoder.separator
    notes += files.write_huggingface(source, out, dtype, ids, reads_bytes=text.name == "bytes")
    notes += write_text_files(model, text, out, ids)
    row = evidence.evaluation(model.workdir, source.preset["step"]) if source.run else None
    has_tokenizer = (out / tokenizer_files.TOKENIZER).is_file()
    content = files.card(
        source, name, licence, row, tokenizer=has_tokenizer, chats=text.template is not None
    )
    (out / files.FILE).write_text(content, encoding="utf-8", errors="backslashreplace")
    if licence is None:
        notes.append("the model card states no licence; --licence ID (apache-2.0, mit, ...) does")
    if source.images and isinstance(source.model, ImageModel):
        note = preprocessor.note(source.images.pixels, source.model)
        notes += [images_line(source.images), *([note] if note else [])]
    return source, notes


def write_text_files(
    model: TrainedModel, text: TextFiles, out: Path, ids: Mapping[str, int | list[int] | None]
) -> list[str]:
    """Write the files beside weights that say how text is read and written. Return notes for the user."""
    notes = []
    if model.run is None:
        copied = tokenizer_files.keep(model.workdir, out, tokenizer=text.file is None)
        notes += [f"kept beside the weights: {', '.join(copied)}"] if copied else []
        lacks_tokenizer = (
            text.name is None and text.encoder is None and tokenizer_files.TOKENIZER not in copied
        )
        if model.model.task == "tokens" and lacks_tokenizer:
            notes.append(
                "no tokenizer.json beside the weights: commands that read text need --data.tokenizer FILE"
            )
    if model.model.task != "tokens":
        return notes
    tokenizer_files.write_generation_config(out, ids)
    if text.file is not None and text.encoder is not None:
        decoder = not model.model.denoises
        context = model.model.sizes()["position" if decoder else "source"]
        notes += tokenizer_files.write_tokenizer(text, out, ids, context, decoder=decoder)
    elif text.template is not None:
        (out / templates.FILE).write_text(text.template.with_tokens({}), encoding="utf-8")
    if text.name == "bytes":
        notes.append(
            "tokens are bytes, ids 0 to 255, for which there is no tokenizer.json: ids = list(text.encode())"
        )
    elif text.name and text.file is None:
        notes.append(
            f"the tokenizer {text.name} was not found on this machine; give its file as --tokenizer FILE"
        )
    notes += [note for note in (text.lost_template, tokenizer_files.note_on_end(text)) if note]
    return notes


def token_ids(model: TrainedModel, text: TextFiles) -> dict[str, int | None]:
    """Return the ids that begin and end a text, and of an encoder-decoder also pad and start it, by config.json's names."""
    encoder = text.encoder
    if encoder is None:
        return {}
    if not model.model.denoises:
        return tokenizer_files.decoder_ids(text)
    ids = special_ids(encoder, 0, model.model.sizes()["vocab"])
    infilled = model.run is not None and model.config.data.noise == "infilling"
    start = ids.eos if infilled else ids.pad
    return {
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        "decoder_start_token_id": start,
    }


def present_ids(ids: Mapping[str, int | None]) -> dict[str, int | list[int]]:
    """Return the ids without the tokens that a tokenizer lacks."""
    return {name: number for name, number in ids.items() if number is not None}


def text_of(model: TrainedModel, file: Path | None, separator: str | None) -> TextFiles:
    """Return the tokenizer and the chat template that belong to a model.

    Args:
        model: as `trained.describe` gives it.
        file: tokenizer.json that the user gives; the model's own is looked up unless given.
        separator: the token of `file` that ends a text; found by its usual names unless given.

    Raises:
        UsageError: a separator of what has one.
        DataError: the file is no tokenizer, or has no token that ends a text.
    """
    if separator is not None and (file is None or model.run is not None):
        why = "a run has its own" if model.run is not None else "it is of --tokenizer FILE"
        raise command_line.UsageError(f"--separator {separator}: {why}; leave it out")
    if model.model.task != "tokens":
        return TextFiles(None)
    if model.run is not None:
        return _text_of_run(model, file)
    if file is None and model.config.data.tokenizer == "bytes":
        return TextFiles("bytes", encoder=Bytes())
    if file is None:
        return TextFiles(None)
    end = model.text_ids.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    if separator is None and end is not None and not model.model.denoises:
        separator = _token(file, end)
    return TextFiles(None, file, _opened(file, separator), templates.find(str(file)))


def _text_of_run(model: TrainedModel, replacement: Path | None) -> TextFiles:
    """Return a run's tokenizer, with the separator that parted its documents, and its chat template."""
    config, facts = model.config, model.facts
    name = config.data.tokenizer
    file = model.tokenizer_file()
    data = own_files.settings(config.data, facts, model.assets)
    template, lost = _template_of_run(data, facts, file or replacement)
    encoder = None
    if named_tokenizers.bpe_size(config.data.tokenizer) is None and (
        name == "bytes" or config.data.tokenizer.startswith("ids:")
    ):
        encoder = named_tokenizers.opened(config.data.tokenizer, config.data.separator)
    file = replacement or file
    if file is not None:
        separator = (
            _token(file, encoder.separator) if isinstance(encoder, Ids) else config.data.separator
        )
        encoder = _opened(file, separator)
    return TextFiles(name, file, encoder, template, config.data.name.startswith("chat:"), lost)


def _template_of_run(
    data: DataConfig, facts: Mapping[str, Any], file: Path | None
) -> tuple[Template | None, str | None]:
    """Return the chat template of a run, or a note on what was lost of it."""
    tokenizer = str(file) if file is not None else data.tokenizer
    named = data.chat_template or "the chat template"
    try:
        template = templates.find(tokenizer, data.chat_template)
    except DataError as error:
        return None, f"the run's chat template is left out: {error}"
    digest = facts.get("chat_template")
    if digest is None:
        return template, None
    if template is None:
        return (
            None,
            f"the run's chat template is left out: {named} is not beside {tokenizer}; bring it back",
        )
    if hashlib.sha256(template.source.encode()).hexdigest() != digest:
        return (
            None,
            f"the run's chat template is left out: {template.name} has changed since; bring back what it was",
        )
    return template, None


def _opened(file: Path, separator: str | None) -> Tokenizer:
    """Return a tokenizer. An error names the flag of this command."""
    try:
        return Subwords(file, separator)
    except DataError as error:
        raise DataError(str(error).replace("--data.separator", "--separator")) from error


def _token(file: Path, number: int) -> str | None:
    """Return the token of an id in a tokenizer.json; None if there is none."""
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_buffer(file.read_bytes()).id_to_token(number)
    except (
        Exception
    ):  # the library raises bare Exception; whoever opens the file says what is wrong
        return None


def images_line(images: ImageInput) -> str:
    """Return what an export says of class names and preprocessing."""
    names, pixels = images.class_names, images.pixels
    count = 0 if names is None else len(names)
    listed = ", ".join(map(images.name, range(min(count, 6)))) + (
        f" and {count - 6} more" if count > 6 else ""
    )
    means, stds = (" ".join(f"{x:.4g}" for x in values) for values in (pixels.mean, pixels.std))
    scaled = f"{pixels.fit}, {pixels.interpolation}, mean {means}, std {stds}"
    return f"classes: {listed or 'without names'}; images: {scaled}"
