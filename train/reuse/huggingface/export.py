"""Export of a model as `transformers` reads it, with tokenizer, chat template and model card.

`mupax export` and `mupax push` write their folders here.
"""

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

_SHOWN = 6
"""Number of class names listed in a line."""


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
    plain: bool = False,
) -> tuple[WeightsSource, list[str]]:
    """Write a model in the format of `transformers`. Return its weights, and notes for the user.

    The files are config.json, safetensors, text files or the preprocessor, and the model card.

    Args:
        path: a run, one of its steps, or an imported folder.
        out: folder to write into, which exists and is empty.
        step: step of a workdir, by default the newest.
        tokenizer_file: tokenizer.json to add if the run's own file is lost.
        name: name of the model in its card.
        licence: identifier for the card (`licences.identifier`).
        separator: token of `tokenizer_file` that ends a text, by default found by its usual names.
        plain: True to write the parameters themselves if the run keeps a moving average. By default
            the average is written, which evaluations and `mupax generate` use.

    Raises:
        UsageError: a separator for a model that has one.
        MupaxError: nothing to export, `plain` for weights without a run, or a tokenizer without a
            token that ends a text.
    """
    model = trained.describe(path, step)
    part = model.written_part(plain)
    averaged = part == "ema"
    source = model.plain_weights(part)
    text = text_of(model, tokenizer_file, separator)
    # Where published weights and their tokenizer name different ids, those of the weights count.
    ids = {**token_ids(model, text), **model.text_ids}
    if separator is not None and text.encoder is not None:
        ids["eos_token_id"] = text.encoder.separator

    reads_bytes = text.name == "bytes"
    notes = [*files.write_huggingface(source, out, dtype, ids, reads_bytes=reads_bytes)]
    notes += write_text_files(model, text, out, ids)
    if averaged:
        notes.append(trained.AVERAGED)

    row = None
    if source.run:
        row = evidence.evaluation(model.workdir, source.preset["step"])
    has_tokenizer = (out / tokenizer_files.TOKENIZER).is_file()
    has_template = text.template is not None
    # The example code in the card must open only files that were written.
    content = files.card(
        source,
        name,
        licence,
        row,
        tokenizer=has_tokenizer,
        chats=has_template,
        averaged=averaged,
    )
    # Names of files may hold bytes that UTF-8 cannot encode.
    (out / files.FILE).write_text(content, encoding="utf-8", errors="backslashreplace")

    if licence is None:
        notes.append("the model card states no licence; --licence ID (apache-2.0, mit, ...) does")
    if source.images and isinstance(source.model, ImageModel):
        notes.append(images_line(source.images))
        difference = preprocessor.note(source.images.pixels, source.model)
        if difference:
            notes.append(difference)
    return source, notes


def write_text_files(
    model: TrainedModel, text: TextFiles, out: Path, ids: Mapping[str, int | list[int] | None]
) -> list[str]:
    """Write the files beside weights that define how text is encoded. Return notes for the user.

    For weights without a run, the small files in their folder are copied, the preprocessor of
    images included.

    Args:
        text: result of `text_of` for the model.
        out: folder to write into, which exists. A generation_config.json in it stays.
        ids: token ids by config.json's names, such as `eos_token_id`.

    Raises:
        DataError: a file beside the weights is a link out of their folder.
    """
    notes = []
    reads_text = model.model.task == "tokens"
    if model.run is None:
        copied = tokenizer_files.keep(model.workdir, out, tokenizer=text.file is None)
        if copied:
            notes.append(f"kept beside the weights: {', '.join(copied)}")
        is_copied = tokenizer_files.TOKENIZER in copied
        if reads_text and text.name is None and text.encoder is None and not is_copied:
            notes.append(
                "no tokenizer.json beside the weights: commands that read text need "
                "--data.tokenizer FILE"
            )
    if not reads_text:
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
            "tokens are bytes, ids 0 to 255, for which there is no tokenizer.json: "
            "ids = list(text.encode())"
        )
    elif text.name and text.file is None:
        notes.append(
            f"the tokenizer {text.name} was not found on this machine; give its file as "
            "--tokenizer FILE"
        )
    if text.caution:
        notes.append(text.caution)
    if text.lost_template:
        notes.append(text.lost_template)
    note_on_end = tokenizer_files.note_on_end(text)
    if note_on_end:
        notes.append(note_on_end)
    return notes


def token_ids(model: TrainedModel, text: TextFiles) -> dict[str, int | None]:
    """Return the token ids that begin, end and pad a text, by their names in config.json.

    For an encoder-decoder the result also has the id that its decoder reads first. The result is
    empty if the tokenizer is lost.
    """
    encoder = text.encoder
    if encoder is None:
        return {}
    if not model.model.denoises:
        return tokenizer_files.decoder_ids(text)
    ids = special_ids(encoder, 0, model.model.sizes()["vocab"])
    # As in BART, the decoder of a model of text infilling starts with the end token. As in T5, that
    # of a model of sentinels starts with the padding token.
    is_infilled = model.run is not None and model.config.data.noise == "infilling"
    return {
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        "decoder_start_token_id": ids.eos if is_infilled else ids.pad,
    }


def present_ids(ids: Mapping[str, int | None]) -> dict[str, int | list[int]]:
    """Return the token ids without those that are `None`, which a tokenizer lacks."""
    return {name: number for name, number in ids.items() if number is not None}


def text_of(model: TrainedModel, file: Path | None, separator: str | None) -> TextFiles:
    """Return the tokenizer and the chat template of a model.

    The result has neither for a model of images. For weights without a run it has them only if
    `file` is given, because `write_text_files` copies the files beside weights. If such weights
    read bytes, it has the tokenizer of bytes.

    Args:
        model: result of `trained.describe`.
        file: tokenizer.json that the user gives, by default the model's own.
        separator: token of `file` that ends a text, by default found by its usual names.

    Raises:
        UsageError: a separator for a model that has one, or a tokenizer for a model of images or
            for a run that has another one.
        DataError: the file is no tokenizer, or has no token that ends a text.
    """
    if separator is not None and (file is None or model.run is not None):
        reason = "it is of --tokenizer FILE"
        if model.run is not None:
            reason = "a run has its own"
        raise command_line.UsageError(f"--separator {separator}: {reason}; leave it out")
    if model.model.task != "tokens":
        if file is not None:
            raise command_line.UsageError(
                f"--tokenizer {file} is for models of text, and {model.path} holds a "
                f"{model.model.family}; leave it out"
            )
        return TextFiles(None)
    if model.run is not None:
        return _text_of_run(model, file)
    if file is None:
        if model.config.data.tokenizer == "bytes":
            return TextFiles("bytes", encoder=Bytes())
        return TextFiles(None)

    end = model.text_ids.get("eos_token_id")
    if isinstance(end, list):
        end = end[0]
    if separator is None and end is not None and not model.model.denoises:
        separator = _token(file, end)
    return TextFiles(None, file, _opened(file, separator), templates.find(str(file)))


def _text_of_run(model: TrainedModel, replacement: Path | None) -> TextFiles:
    """Return a run's tokenizer, with the separator of its documents, and its chat template.

    Args:
        replacement: tokenizer.json to use if the run's own file is lost.

    Raises:
        UsageError: the run's tokenizer is not lost, and another one is given.
    """
    config = model.config
    facts = model.facts
    name = config.data.tokenizer
    own_file = model.tokenizer_file()
    caution = None
    if replacement is not None and not name.startswith("ids:"):
        caution = _check_replacement(model, replacement, own_file)
    data = own_files.settings(config.data, facts, model.assets)
    template, lost = _template_of_run(data, facts, own_file or replacement)

    encoder = None
    is_named = name == "bytes" or name.startswith("ids:")
    if is_named and named_tokenizers.bpe_size(name) is None:
        encoder = named_tokenizers.opened(name, config.data.separator)
    file = replacement or own_file
    if file is not None:
        separator = config.data.separator
        if isinstance(encoder, Ids):
            # A run on ids knows its separator as a number.
            separator = _token(file, encoder.separator)
        encoder = _opened(file, separator)
    is_chat = config.data.name.startswith("chat:")
    return TextFiles(name, file, encoder, template, is_chat, lost, caution)


def _check_replacement(model: TrainedModel, file: Path, own_file: Path | None) -> str | None:
    """Return a caution if a tokenizer.json is not the one that made a run's tokens.

    The result is `None` for the right file, and for a run of an older version without a record.

    Args:
        own_file: the run's tokenizer.json, or `None` if the run reads bytes or the file is lost.

    Raises:
        UsageError: the run's tokenizer is known, and `file` is another one.
    """
    advice = "ids of one mean other text to the other; leave --tokenizer out"
    if model.config.data.tokenizer == "bytes":
        raise command_line.UsageError(
            f"--tokenizer {file}: the tokens of {model.path} are bytes; {advice}"
        )
    key = model.facts.get("tokenizer")
    if key is None:
        return None
    try:
        is_own = _opened(file, model.config.data.separator).key == key
    except DataError:
        # A file that lacks the run's separator is another tokenizer, too.
        if own_file is None:
            raise
        is_own = False
    if is_own:
        return None
    if own_file is not None:
        raise command_line.UsageError(
            f"--tokenizer {file} is another tokenizer than that of {model.path}; {advice}"
        )
    # The file may be the run's own in another spelling, so that it is not refused.
    return (
        f"caution: {file} is not, to the byte, the tokenizer that made the run's tokens ({key}); "
        "if it is another one, the exported model reads and writes other text"
    )


def _template_of_run(
    data: DataConfig, facts: Mapping[str, Any], file: Path | None
) -> tuple[Template | None, str | None]:
    """Return the chat template of a run, or `None`, and a note if the template is lost.

    A template that has changed since training counts as lost.

    Args:
        file: tokenizer.json beside which the template is searched, by default that of `data`.
    """
    tokenizer = str(file) if file is not None else data.tokenizer
    named = data.chat_template or "the chat template"
    try:
        template = templates.find(tokenizer, data.chat_template)
    except DataError as error:
        return None, f"the run's chat template is left out: {error}"

    # Training recorded a digest of the template. Another template would give other text.
    digest = facts.get("chat_template")
    if digest is None:
        return template, None
    if template is None:
        note = (
            f"the run's chat template is left out: {named} is not beside {tokenizer}; bring it back"
        )
        return None, note
    if hashlib.sha256(template.source.encode()).hexdigest() != digest:
        note = (
            f"the run's chat template is left out: {template.name} has changed since; bring back "
            "what it was"
        )
        return None, note
    return template, None


def _opened(file: Path, separator: str | None) -> Tokenizer:
    """Return the tokenizer of a file. The message of a DataError names the flag --separator."""
    try:
        return Subwords(file, separator)
    except DataError as error:
        raise DataError(str(error).replace("--data.separator", "--separator")) from error


def _token(file: Path, number: int) -> str | None:
    """Return the token of an id in a tokenizer.json.

    Return `None` if the tokenizer has no such id, or if the file is damaged.
    """
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_buffer(file.read_bytes()).id_to_token(number)
    except Exception:
        # The library raises bare Exception for a damaged file. `_opened` reports the damage.
        return None


def images_line(images: ImageInput) -> str:
    """Return a line on class names and preprocessing for the user."""
    pixels = images.pixels
    count = 0 if images.class_names is None else len(images.class_names)
    names = [images.name(label) for label in range(min(count, _SHOWN))]
    listed = ", ".join(names) or "without names"
    if count > _SHOWN:
        listed += f" and {count - _SHOWN} more"
    means = " ".join(f"{value:.4g}" for value in pixels.mean)
    stds = " ".join(f"{value:.4g}" for value in pixels.std)
    return (
        f"classes: {listed}; images: {pixels.fit}, {pixels.interpolation}, mean {means}, std {stds}"
    )
