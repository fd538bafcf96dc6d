"""What a finished run leaves: a loss curve, a sample or a picture, and a summary beside reference models."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from mupax.train.core.program import Program
from mupax.train.core.step import StepInputs, logits_of
from mupax.train.data import Data
from mupax.train.run.report import metrics, report
from mupax.train.run.session import Session
from mupax.zoo.definition import Arrays
from mupax.zoo.transformer import TransformerConfig, transformer

_PROMPT = "def "
_SAMPLE_TOKENS = 400
_PICTURE_IMAGES = 512


def leave(session: Session, params: Arrays) -> None:
    """Write loss.png, sample.txt or predictions.png into the run's folder, and print the summary.

    Every process of the run calls this, since each holds a part of the parameters; one of them writes.

    Args:
        session: of the run that is done.
        params: the trained parameters.
    """
    program, data, numbers, rt = session.program, session.data, session.inputs, session.rt
    folder, console, leader = rt.folder, rt.console, rt.leader
    config = program.config
    relative = f"relative to {config.preset.base}" if config.preset.base else "in absolute form"
    preset = f"{program.preset.label}, {relative}"
    files = [folder / metrics.FILE_NAME]
    if config.log.samples and config.model.generates:
        files.append(folder / "sample.txt")
        text = _sample(program, transformer(config.model, "writing a sample"), data, params, numbers)
        if leader:
            _show(text, files[-1], console)
    elif config.log.samples and config.model.task == "images":
        files.append(folder / "predictions.png")
        logits = jax.jit(
            lambda params, numbers, inputs: logits_of(program.definition, params, numbers, inputs),
            out_shardings=program.layout.replicated,
        )
        seen = _guessed(data, lambda images: logits(params, numbers, images))
        if leader:
            report.prediction_picture(seen["inputs"], seen["targets"], seen["guess"], data.class_names, files[-1])
    if not leader:
        return
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
        seconds=time.monotonic() - session.began,
        references=references,
        bytes_per_token=data.bytes_per_token,
        facts=session.speed,
        files=[*files, curve, folder / "config.json"],
    )


def _sample(program: Program, model: TransformerConfig, data: Data, params: Arrays, numbers: StepInputs) -> str:
    """A short prompt, continued."""
    from mupax.train.reuse.generate.decode import Generator

    generator = Generator(program.definition, model, params, numbers, layout=program.layout)
    prompt = data.encode(_PROMPT)
    new = generator.complete(prompt, _SAMPLE_TOKENS, program.config.seed)[0]
    return data.decode(np.concatenate([prompt, new]))


def _show(text: str, out: Path, console: Console) -> None:
    out.write_text(text, encoding="utf-8")
    console.rule("sample", style="dim")
    console.print(text, markup=False, highlight=False, style="dim")


def _guessed(data: Data, logits_fn) -> dict[str, np.ndarray]:
    """Test images, their classes and what the model takes them for."""
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
    return {name: np.concatenate(parts) for name, parts in shown.items()}
