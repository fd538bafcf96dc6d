"""`mupax import PATH --out FOLDER` and `mupax export PATH --out FOLDER`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.train.config.preset import PresetFlags

if TYPE_CHECKING:
    from mupax.train.reuse.source import WeightsSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import(PresetFlags):
    """Weights of Hugging Face (config.json and safetensors) in a preset's form, for `mupax train --init-from FOLDER`.

    The tokenizer, chat template, generation config and preprocessor beside the weights come with
    them. Of a run of mupax the moving average is read if the run keeps one, as in evaluations.
    """

    path: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="PATH")]
    """Folder with config.json and safetensors, or its file, or ORG/NAME of the Hugging Face hub; or
    a run."""
    preset: Annotated[str, conf.arg(metavar="NAME")] = "sp"
    """A preset of `mupax presets`."""
    out: Annotated[command_line.Place, conf.arg(metavar="FOLDER")]
    """A new or empty folder."""
    revision: Annotated[str | None, conf.arg(metavar="BRANCH|TAG|COMMIT")] = None
    """Revision of ORG/NAME; the branch main by default."""
    no_ema: Switch = False
    """Read the parameters themselves, not the moving average, if the run at PATH keeps one."""

    def run(self) -> int:
        """Write the imported weights and text files to `out`. Return the exit code, 0.

        A summary is printed. Nothing is done if this command already made the folder and was
        killed only afterwards.

        Raises:
            MupaxError: no weights at the path, or a preset that does not fit them.
        """
        from mupax.train.checkpoints.making import finish, is_made, making
        from mupax.train.reuse import trained
        from mupax.train.reuse.huggingface import export, files, hub

        config = self.config(self.preset)
        command = command_line.words_of("mupax import", self)
        if is_made(self.out, command):
            return 0

        model = trained.describe(hub.local(self.path, self.revision))
        part = model.written_part(self.no_ema)
        averaged = part == "ema"
        source = model.plain_weights(part)
        text = export.text_of(model, None, None)
        if model.run is not None and text.encoder is not None and not model.model.denoises:
            # A run records no token ids. They follow from its tokenizer and chat template.
            ids = export.present_ids(export.token_ids(model, text))
            source = source._replace(text_ids=ids)
        reads_bytes = text.name == "bytes"
        with making(self.out, command) as out:
            preset = files.write_imported(
                source, config, out, str(self.path), reads_bytes=reads_bytes
            )
            notes = export.write_text_files(model, text, out, source.text_ids)
        if averaged:
            notes.append(trained.AVERAGED)

        _print_summary(source, preset)
        if source.images:
            terminal.say(export.images_line(source.images))
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
    """Step of a workdir's checkpoint, or the best by its evaluations; the newest by default."""
    no_ema: Switch = False
    """Write the parameters themselves, not the moving average, if the run keeps one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the stored weights."""
    tokenizer: Annotated[command_line.Place | None, conf.arg(metavar="FILE")] = None
    """tokenizer.json to add if the run's own is not on this machine."""
    separator: Annotated[str | None, conf.arg(metavar="TOKEN")] = None
    """Token of --tokenizer that ends a text, for weights without a run, if it has none of the usual
    names."""
    licence: Annotated[str | None, conf.arg(aliases=("--license",), metavar="ID")] = None
    """Licence of the weights, for the model card: apache-2.0, mit, cc-by-4.0, or another that
    Hugging Face knows, in upper or lower case."""

    def run(self) -> int:
        """Write the exported model to `out`. Return the exit code, 0.

        A summary is printed. Nothing is done if this command already made the folder and was
        killed only afterwards.

        Raises:
            MupaxError: no model at the path, or one that `transformers` cannot read.
        """
        from mupax.train.checkpoints.making import finish, is_made, making
        from mupax.train.reuse.huggingface import export, licences

        licence = licences.identifier(self.licence) if self.licence else self.licence
        command = command_line.words_of("mupax export", self)
        if is_made(self.out, command):
            return 0

        with making(self.out, command) as out:
            source, notes = export.exported(
                self.path,
                out,
                self.step,
                self.dtype,
                self.tokenizer,
                name=self.out.name,
                licence=licence,
                separator=self.separator,
                plain=self.no_ema,
            )
        _print_summary(source, source.preset)
        for note in notes:
            terminal.say(note)
        origin = f"; folded from {source.preset.get('described')}" if source.preset else ""
        terminal.say(f"written to {self.out}{origin}")
        finish(self.out)
        return 0


def _print_summary(source: WeightsSource, preset: dict[str, Any]) -> None:
    """Print the sizes of a model and the notes of reading it.

    If multipliers of skip connections were folded into the weights, also print what is not exact
    about that: by how much the norms' eps counts more.

    Args:
        source: Model and weights, as they were read.
        preset: Record of the preset of the written weights (`mupax import`) or of the read ones
            (`mupax export`).
    """
    from mupax.terminal import si

    model = source.model
    sizes = model.sizes()
    count = si(sum(value.size for value in source.params.values()))
    terminal.say(
        f"{model.family}: width {sizes['embed']}, depth {sizes['layers']}, {sizes['heads']} heads, "
        f"{model.input_text}; {count} parameters"
    )
    for note in source.notes:
        terminal.say(note)
    eps_times = preset.get("norm_eps_times")
    if eps_times:
        terminal.say(
            "skips are folded into the branches: exact but for the norms' eps, which counts up to "
            f"{eps_times:.3g} times"
        )
