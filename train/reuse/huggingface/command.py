"""`python -m zoo import PATH --out FOLDER` and `python -m zoo export PATH --out FOLDER`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.paths import delivered, path_of
from mupax.train.config.preset import PresetFlags
from mupax.train.config.sections import Step

if TYPE_CHECKING:
    from mupax.train.checkpoints.assets import Assets
    from mupax.train.config.run import Config
    from mupax.train.data.text.tokenizer import Tokenizer
    from mupax.train.reuse.image_input import ImageInput
    from mupax.train.reuse.source import Source
    from mupax.zoo.families import ModelConfig
    from mupax.zoo.huggingface.tensorfile import DType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import(PresetFlags):
    """Weights of Hugging Face (config.json and safetensors) in a preset's form, for `python -m train --init-from FOLDER`."""

    path: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="PATH")]
    """Folder with config.json and safetensors, or its file."""
    preset: Annotated[str, conf.arg(metavar="NAME")] = "sp"
    """A preset of `python -m presets`."""
    out: Annotated[command_line.Place, conf.arg(metavar="FOLDER")]
    """A new or empty folder."""

    def run(self) -> int:
        """0 when written; raises what does not fit."""
        from mupax.train.reuse import source as pretrained
        from mupax.train.reuse.huggingface import files as pretrained_files

        config = self.config(self.preset)
        pretrained_files.check_free(self.out)
        source = pretrained.read(self.path)
        with delivered(self.out) as out:
            preset = pretrained_files.write_imported(source, config, out, str(self.path))
        _print_summary(source, preset)
        if source.images:
            terminal.say(_images_line(source.images))
        terminal.say(f"written to {self.out} under {preset['described']}")
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
    licence: Annotated[str | None, conf.arg(aliases=("--license",), metavar="ID")] = None
    """Of the weights, for the model card: apache-2.0, mit, cc-by-4.0, or another that Hugging Face knows, in any case."""

    def run(self) -> int:
        """0 when written; raises what does not fit."""
        from mupax.train.reuse.huggingface import files as pretrained_files
        from mupax.train.reuse.huggingface import licences

        licence = self.licence and licences.identifier(self.licence)
        pretrained_files.check_free(self.out)
        with delivered(self.out) as out:
            source, notes = exported(
                self.path, out, self.step, self.dtype, self.tokenizer, name=self.out.name, licence=licence
            )
        _print_summary(source, source.preset)
        for note in notes:
            terminal.say(note)
        terminal.say(
            f"written to {self.out}" + (f"; folded from {source.preset.get('described')}" if source.preset else "")
        )
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
) -> tuple[Source, list[str]]:
    """Write a model as `transformers` reads it, with its tokenizer and its card; gives what was read, and what to know of it.

    Args:
        path: a run, one of its steps, or an imported folder.
        out: an empty folder.
        step: of a workdir; the newest unless given.
        dtype: of the stored weights.
        tokenizer_file: to add where the run's is not here.
        name: of the model, in its card.
        licence: the same, an identifier of `licences`.
    """
    from mupax.train.data.text import tokenizer
    from mupax.train.reuse import source as pretrained
    from mupax.train.reuse.huggingface import card, evidence, preprocessor
    from mupax.train.reuse.huggingface import files as pretrained_files
    from mupax.zoo.families import ImageModel

    source, notes = pretrained.read(path, step), []
    called, file = (None, tokenizer_file) if tokenizer_file else tokenizer_of(source.model, source.run, source.assets)
    encoder = tokenizer.Subwords(file) if file else tokenizer.Bytes() if called == "bytes" else None
    tokens = {**(_token_ids(source, encoder) if encoder else {}), **source.text_ids}
    notes += pretrained_files.write_huggingface(source, out, dtype, tokens)
    if file is not None and encoder is not None:
        pretrained_files.copy_tokenizer(file, encoder.separator, out)
    row = evidence.evaluation(path, source.preset["step"]) if source.run else None
    (out / card.FILE).write_text(card.card(source, name, licence, row), encoding="utf-8")
    if licence is None:
        notes.append("the model card states no licence; --licence ID (apache-2.0, mit, ...) does")
    if source.images and isinstance(source.model, ImageModel):
        note = preprocessor.note(source.images.pixels, source.model)
        notes += [_images_line(source.images), *([note] if note else [])]
    if called == "bytes":
        notes.append("tokens are bytes, ids 0 to 255, for which there is no tokenizer.json: ids = list(text.encode())")
    elif called and file is None:
        notes.append(f"the tokenizer {called} was not found on this machine; give its file as --tokenizer FILE")
    return source, notes


def _token_ids(source: Source, encoder: Tokenizer) -> dict[str, int | None]:
    """What ends a text, and of an encoder-decoder what pads, begins and starts it, by the names of config.json."""
    if not source.model.denoises:
        return {"bos_token_id": encoder.separator, "eos_token_id": encoder.separator}
    from mupax.train.data.text.vocabulary import special_ids

    ids = special_ids(encoder, 0, source.model.sizes()["vocab"])
    infilled = source.run is not None and source.run[0].data.noise == "infilling"
    start = ids.eos if infilled else ids.pad
    return {"bos_token_id": ids.bos, "eos_token_id": ids.eos, "pad_token_id": ids.pad, "decoder_start_token_id": start}


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


def _print_summary(source: Source, preset: dict[str, Any]) -> None:
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
