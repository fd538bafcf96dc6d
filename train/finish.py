"""What a finished run leaves: a loss curve, a sample or a picture, and a summary beside reference models."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from train import generate, metrics, report
from train.data import Data
from train.program import Program
from train.step import Run, logits_of
from zoo.configs import DecoderConfig
from zoo.definition import Arrays

_PROMPT = "def "
_SAMPLE_TOKENS = 400
_PICTURE_IMAGES = 512


def leave(
    program: Program, data: Data, params: Arrays, numbers: Run, folder: Path, console: Console, seconds: float
) -> None:
    """Write loss.png, sample.txt or predictions.png into the run's folder, and print the summary."""
    config = program.config
    relative = f"relative to {config.preset.base}" if config.preset.base else "in absolute form"
    preset = f"{program.preset.label}, {relative}"
    logits = jax.jit(
        lambda params, numbers, inputs: logits_of(program.definition, params, numbers, inputs),
        out_shardings=program.layout.whole,
    )
    files = [folder / metrics.FILE_NAME]
    if config.log.samples and isinstance(config.model, DecoderConfig):
        files.append(
            _sample(
                data, config.model.seq_len, lambda window: logits(params, numbers, window), folder, console, config.seed
            )
        )
    elif config.log.samples:
        files.append(_picture(data, lambda images: logits(params, numbers, images), folder))
    references = data.references()
    title = f"{config.recipe}: {program.definition.count():,} parameters, {program.preset.name}"
    curve = folder / "loss.png"
    report.loss_plot(files[0], curve, references, title, bytes_per_token=data.bytes_per_token)
    report.summary(
        console,
        files[0],
        name=config.recipe,
        preset=preset,
        parameters=program.definition.count(),
        seconds=seconds,
        references=references,
        bytes_per_token=data.bytes_per_token,
        files=[*files, curve, folder / "config.json"],
    )


def _sample(data: Data, seq_len: int, logits_fn, folder: Path, console: Console, seed: int) -> Path:
    """Continue a short prompt and show the text."""
    ids = generate.sample(logits_fn, data.encode(_PROMPT), _SAMPLE_TOKENS, seq_len=seq_len, seed=seed)
    text = data.decode(ids)
    out = folder / "sample.txt"
    out.write_text(text, encoding="utf-8")
    console.rule("sample", style="dim")
    console.print(text, markup=False, highlight=False, style="dim")
    return out


def _picture(data: Data, logits_fn, folder: Path) -> Path:
    """Test images with what the model takes them for."""
    batches = data.eval_batches()
    shown: dict[str, list[np.ndarray]] = {"inputs": [], "targets": [], "guess": []}
    count = 0
    for batch in batches:
        real = batch["weights"] > 0
        guess = np.asarray(logits_fn(batch["inputs"])).argmax(axis=-1)
        for name, array in (("inputs", batch["inputs"]), ("targets", batch["targets"]), ("guess", guess)):
            shown[name].append(array[real])
        count += int(real.sum())
        if count >= _PICTURE_IMAGES:
            break
    out = folder / "predictions.png"
    columns = {name: np.concatenate(parts) for name, parts in shown.items()}
    report.prediction_picture(columns["inputs"], columns["targets"], columns["guess"], data.class_names, out)
    return out
