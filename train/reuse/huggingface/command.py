"""`mupax import PATH --out FOLDER` and `mupax export PATH --out FOLDER`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.disk import path_of
from mupax.train.config.preset import PresetFlags
from mupax.train.config.sections import Step
from mupax.train.data.chats import templates
from mupax.train.data.interface import DataError

if TYPE_CHECKING:
    from mupax.train.checkpoints.assets import Assets
    from mupax.train.config.data import DataConfig
    from mupax.train.config.run import Config
    from mupax.train.data.chats.templates import Template
    from mupax.train.data.text.tokenizer import Tokenizer
    from mupax.train.reuse.huggingface.tokenizer_files import TextFiles
    from mupax.train.reuse.image_input import ImageInput
    from mupax.train.reuse.source import WeightsSource
    from mupax.zoo.families import ModelConfig
    from mupax.zoo.huggingface.tensorfile import DType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import(PresetFlags):
    """Weights of Hugging Face (config.json and safetensors) in a preset's form, for `mupax train --init-from FOLDER`.

    The tokenizer, chat template, generation config and preprocessor beside the weights come with them.
    """

    path: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="PATH")]
    """Folder with config.json and safetensors, or its file, or ORG/NAME of the Hugging Face hub."""
    preset: Annotated[str, conf.arg(metavar="NAME")] = "sp"
    """A preset of `mupax presets`."""
    out: Annotated[command_line.Place, conf.arg(metavar="FOLDER")]
    """A new or empty folder."""
    revision: Annotated[str | None, conf.arg(metavar="BRANCH|TAG|COMMIT")] = None
    """Of ORG/NAME; the branch main unless given."""

    def run(self) -> int:
        """0 when written; raises what does not fit."""
        from mupax.train.checkpoints.making import finish, is_made, making
        from mupax.train.reuse import source as pretrained
        from mupax.train.reuse.huggingface import files as pretrained_files
        from mupax.train.reuse.huggingface import hub

        config = self.config(self.preset)
        command = command_line.words_of("mupax import", self)
        if is_made(self.out, command):
            return 0
        path = hub.local(self.path, self.revision)
        source = pretrained.read(path)
        text = text_of(source, path, None, None)
        if source.run is not None and text.encoder is not None and not source.model.denoises:
            source = source._replace(text_ids=_present_ids(_token_ids(source, text)))
        with making(self.out, command) as out:
            preset = pretrained_files.write_imported(
                source, config, out, str(self.path), reads_bytes=text.name == "bytes"
            )
            notes = _write_text_files(source, text, path, out, source.text_ids)
        _print_summary(source, preset)
        if source.images:
            terminal.say(_images_line(source.images))
        for note in notes:
            terminal.say(note)
        terminal.say(f"written to {self.out} under {preset['described']}")
        finish(self.out)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """A run, or imported weights, as `transformers` reads them: multipliers are folded into the weights."""

    path: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="PATH")]
    """Workdir, workdir/checkpoints/STEP, or an imported folder."""
    out: Annotated[command_line.Place, conf.arg(metavar="FOLDER")]
    """A new or empty folder."""
    step: Annotated[int | Literal["best"] | None, conf.arg(metavar="N|best")] = None
    """Which checkpoint of a workdir, or the best by its evaluations; the newest unless given."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the stored weights."""
    tokenizer: Annotated[command_line.Place | None, conf.arg(metavar="FILE")] = None
    """tokenizer.json to add where the run's is not here."""
    separator: Annotated[str | None, conf.arg(metavar="TOKEN")] = None
    """Of weights without a run: the token of --tokenizer that ends a text, where it has none of the usual names."""
    licence: Annotated[str | None, conf.arg(aliases=("--license",), metavar="ID")] = None
    """Of the weights, for the model card: apache-2.0, mit, cc-by-4.0, or another that Hugging Face knows, in any case."""

    def run(self) -> int:
        """0 when written; raises what does not fit."""
        from mupax.train.checkpoints.making import finish, is_made, making
        from mupax.train.reuse.huggingface import licences

        licence = self.licence and licences.identifier(self.licence)
        command = command_line.words_of("mupax export", self)
        if is_made(self.out, command):
            return 0
        with making(self.out, command) as out:
            source, notes = exported(
                self.path,
                out,
                self.step,
                self.dtype,
                self.tokenizer,
                name=self.out.name,
                licence=licence,
                separator=self.separator,
            )
        _print_summary(source, source.preset)
        for note in notes:
            terminal.say(note)
        terminal.say(
            f"written to {self.out}" + (f"; folded from {source.preset.get('described')}" if source.preset else "")
        )
        finish(self.out)
        return 0


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
    from mupax.train.reuse import source as pretrained
    from mupax.train.reuse.huggingface import evidence, preprocessor, tokenizer_files
    from mupax.train.reuse.huggingface import files as pretrained_files
    from mupax.zoo.families import ImageModel

    source = pretrained.read(path, step)
    notes: list[str] = []
    text = text_of(source, path, tokenizer_file, separator)
    ids = {**_token_ids(source, text), **source.text_ids}
    if separator is not None and text.encoder is not None:
        ids["eos_token_id"] = text.encoder.separator
    notes += pretrained_files.write_huggingface(source, out, dtype, ids, reads_bytes=text.name == "bytes")
    notes += _write_text_files(source, text, path, out, ids)
    row = evidence.evaluation(path, source.preset["step"]) if source.run else None
    has_tokenizer = (out / tokenizer_files.TOKENIZER).is_file()
    content = pretrained_files.card(
        source, name, licence, row, tokenizer=has_tokenizer, chats=text.template is not None
    )
    (out / pretrained_files.FILE).write_text(content, encoding="utf-8", errors="backslashreplace")
    if licence is None:
        notes.append("the model card states no licence; --licence ID (apache-2.0, mit, ...) does")
    if source.images and isinstance(source.model, ImageModel):
        note = preprocessor.note(source.images.pixels, source.model)
        notes += [_images_line(source.images), *([note] if note else [])]
    return source, notes


def _write_text_files(
    source: WeightsSource, text: TextFiles, path: Path, out: Path, ids: Mapping[str, int | list[int] | None]
) -> list[str]:
    """Write the files beside weights that say how text is read and written. Return notes for the user."""
    from mupax.train.reuse.huggingface import tokenizer_files
    from mupax.train.reuse.outline import opened

    notes = []
    if source.run is None:
        copied = tokenizer_files.keep(opened(path)[0], out, tokenizer=text.file is None)
        notes += [f"kept beside the weights: {', '.join(copied)}"] if copied else []
        lacks_tokenizer = text.name is None and text.encoder is None and tokenizer_files.TOKENIZER not in copied
        if source.model.task == "tokens" and lacks_tokenizer:
            notes.append("no tokenizer.json beside the weights: commands that read text need --data.tokenizer FILE")
    if source.model.task != "tokens":
        return notes
    tokenizer_files.write_generation_config(out, ids)
    if text.file is not None and text.encoder is not None:
        context = source.model.sizes()["source" if source.model.denoises else "position"]
        decoder = not source.model.denoises
        notes += tokenizer_files.write_tokenizer(text, out, ids, context, decoder=decoder)
    elif text.template is not None:
        (out / templates.FILE).write_text(text.template.with_tokens({}), encoding="utf-8")
    if text.name == "bytes":
        notes.append("tokens are bytes, ids 0 to 255, for which there is no tokenizer.json: ids = list(text.encode())")
    elif text.name and text.file is None:
        notes.append(f"the tokenizer {text.name} was not found on this machine; give its file as --tokenizer FILE")
    notes += [note for note in (text.lost_template, tokenizer_files.note_on_end(text)) if note]
    return notes


def _token_ids(source: WeightsSource, text: TextFiles) -> dict[str, int | None]:
    """Return the ids that begin and end a text, and of an encoder-decoder also pad and start it, by config.json's names."""
    from mupax.train.reuse.huggingface import tokenizer_files

    encoder = text.encoder
    if encoder is None:
        return {}
    if not source.model.denoises:
        return tokenizer_files.decoder_ids(text)
    from mupax.train.data.text.vocabulary import special_ids

    ids = special_ids(encoder, 0, source.model.sizes()["vocab"])
    infilled = source.run is not None and source.run[0].data.noise == "infilling"
    start = ids.eos if infilled else ids.pad
    return {"bos_token_id": ids.bos, "eos_token_id": ids.eos, "pad_token_id": ids.pad, "decoder_start_token_id": start}


def _present_ids(ids: Mapping[str, int | None]) -> dict[str, int | list[int]]:
    return {name: number for name, number in ids.items() if number is not None}


def text_of(source: WeightsSource, path: Path, file: Path | None, separator: str | None) -> TextFiles:
    """Return the tokenizer and the chat template that belong to a model.

    Args:
        source: the model.
        path: where it lies.
        file: tokenizer.json that the user gives; the model's own is looked up unless given.
        separator: the token of `file` that ends a text; found by its usual names unless given.

    Raises:
        UsageError: a separator of what has one.
        DataError: the file is no tokenizer, or has no token that ends a text.
    """
    from mupax.train.data.text import tokenizer
    from mupax.train.reuse.huggingface.tokenizer_files import TextFiles
    from mupax.train.reuse.outline import outline

    if separator is not None and (file is None or source.run is not None):
        why = "a run has its own" if source.run is not None else "it is of --tokenizer FILE"
        raise command_line.UsageError(f"--separator {separator}: {why}; leave it out")
    if source.model.task != "tokens":
        return TextFiles(None)
    if source.run is not None:
        return _text_of_run(source, file)
    if file is None and outline(path).tokenizer == "bytes":
        return TextFiles("bytes", encoder=tokenizer.Bytes())
    if file is None:
        return TextFiles(None)
    end = source.text_ids.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    if separator is None and end is not None and not source.model.denoises:
        separator = _token(file, end)
    return TextFiles(None, file, _opened(file, separator), templates.find(str(file)))


def _text_of_run(source: WeightsSource, replacement: Path | None) -> TextFiles:
    """Return a run's tokenizer, with the separator that parted its documents, and its chat template."""
    from mupax.train.data.text import named_tokenizers
    from mupax.train.data.text.tokenizer import Ids
    from mupax.train.reuse import own_files
    from mupax.train.reuse.huggingface.tokenizer_files import TextFiles

    assert source.run is not None
    config, facts = source.run
    name, file = tokenizer_of(source.model, source.run, source.assets)
    data = own_files.settings(config.data, facts, source.assets)
    template, lost = _template_of_run(data, facts, file or replacement)
    encoder = None
    if named_tokenizers.bpe_size(config.data.tokenizer) is None and (
        name == "bytes" or config.data.tokenizer.startswith("ids:")
    ):
        encoder = named_tokenizers.opened(config.data.tokenizer, config.data.separator)
    file = replacement or file
    if file is not None:
        separator = _token(file, encoder.separator) if isinstance(encoder, Ids) else config.data.separator
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
        return None, f"the run's chat template is left out: {named} is not beside {tokenizer}; bring it back"
    if hashlib.sha256(template.source.encode()).hexdigest() != digest:
        return None, f"the run's chat template is left out: {template.name} has changed since; bring back what it was"
    return template, None


def _opened(file: Path, separator: str | None) -> Tokenizer:
    """Return a tokenizer. An error names the flag of this command."""
    from mupax.train.data.text.tokenizer import Subwords

    try:
        return Subwords(file, separator)
    except DataError as error:
        raise DataError(str(error).replace("--data.separator", "--separator")) from error


def _token(file: Path, number: int) -> str | None:
    """Return the token of an id in a tokenizer.json; None if there is none."""
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_buffer(file.read_bytes()).id_to_token(number)
    except Exception:  # the library raises bare Exception; whoever opens the file says what is wrong
        return None


def tokenizer_of(
    model: ModelConfig, run: tuple[Config, dict[str, Any]] | None, own: Assets | None
) -> tuple[str | None, Path | None]:
    """Return what a run calls its tokenizer, and the tokenizer.json that made the run's tokens, or None where it is lost.

    Args:
        model: the run's model.
        run: its config, and what it recorded of its data; None for weights without a run.
        own: the run's assets, where the file lies; a run of an older version has none, and the cache is searched.

    Raises:
        AssetsError: the file among the assets is missing or damaged.
    """
    from mupax.train.data.text import tokenizer
    from mupax.train.reuse import own_files

    if run is None or model.task != "tokens":
        return None, None
    config, facts = run
    name = config.data.tokenizer
    if name == "bytes":
        return name, None
    file = path_of(own_files.settings(config.data, facts, own).tokenizer)
    is_here = file.is_file() and tokenizer.Subwords(file, config.data.separator).key == facts.get("tokenizer")
    return name, file if is_here else None


def _images_line(images: ImageInput) -> str:
    names, pixels = images.class_names, images.pixels
    count = 0 if names is None else len(names)
    listed = ", ".join(map(images.name, range(min(count, 6)))) + (f" and {count - 6} more" if count > 6 else "")
    means, stds = (" ".join(f"{x:.4g}" for x in values) for values in (pixels.mean, pixels.std))
    scaled = f"{pixels.fit}, {pixels.interpolation}, mean {means}, std {stds}"
    return f"classes: {listed or 'without names'}; images: {scaled}"


def _print_summary(source: WeightsSource, preset: dict[str, Any]) -> None:
    from mupax.terminal import si

    model, sizes = source.model, source.model.sizes()
    count = si(sum(value.size for value in source.params.values()))
    terminal.say(
        f"{model.family}: width {sizes['embed']}, depth {sizes['layers']}, {sizes['heads']} heads, {model.input_text}; {count} parameters"
    )
    for note in source.notes:
        terminal.say(note)
    if times := preset.get("norm_eps_times"):
        terminal.say(
            f"skips are folded into the branches: exact but for the norms' eps, which counts up to {times:.3g} times"
        )
