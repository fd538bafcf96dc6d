"""What a finished run leaves: a loss curve, a sample or a picture, and a summary beside reference models."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np

from mupax import terminal
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.step import StepInputs, logits_of
from mupax.train.data import Data
from mupax.train.run.report import metrics, report
from mupax.train.run.runtime import Runtime
from mupax.train.run.start import Session
from mupax.zoo.definition import Arrays

_PROMPT, _WORDS, _LONGEST = "def ", 3, 40
_SAMPLE_TOKENS = 400
_MASKS = {None: "", "infilling": "<mask>", "sentinels": "<0>"}
"""Word that stands for a gap in a prompt, by data.noise."""


def leave(session: Session, params: Arrays) -> None:
    """Write loss.png, sample.txt or predictions.png into the run's folder, and print the summary.

    Every process of the run calls this, since each holds a part of the parameters; one of them writes.

    Args:
        session: of the run that is done.
        params: the trained parameters.
    """
    program, data, inputs, rt = session.program, session.data, session.inputs, session.rt
    config, folder, leader, count = program.config, rt.files, rt.processes.leader, program.definition.count()
    form = f"relative to {config.preset.base}" if config.preset.base else "in absolute form"
    files = [folder / metrics.FILE_NAME]
    if config.log.samples and (config.model.generates or config.model.denoises):
        files.append(folder / "sample.txt")
        text = _sample(program, data, params, inputs)
        if leader:
            with _extra(rt, "sample.txt"):
                files[-1].write_text(text, encoding="utf-8")
                if config.log.tensorboard:
                    _show(rt, metrics.read(files[0])[-1]["step"], text)
            rt.console.rule("sample", style="dim")
            rt.console.print(text, markup=False, highlight=False, style="dim")
    elif config.log.samples and config.model.task == "images":
        from mupax.train.run.report import picture

        files.append(folder / "predictions.png")
        logits = jax.jit(partial(logits_of, program.definition), out_shardings=program.layout.replicated)
        shown = picture.guesses(data, lambda images: logits(params, inputs, images))
        if leader:
            with _extra(rt, "predictions.png"):
                picture.prediction_picture(**shown, class_names=data.class_names, out_png=files[-1])
    if not leader:
        return
    references, curve = data.references(), folder / "loss.png"
    title = f"{config.recipe}: {count:,} parameters, {program.preset.name}"
    sets = {name: one.bytes_per_token for name, one in session.sets.items()}
    with _extra(rt, "loss.png"):
        report.loss_plot(files[0], curve, references, title, bytes_per_token=data.bytes_per_token, sets=sets)
    facts = {"model": f"{count:,} parameters", "preset": f"{program.preset.label}, {form}"}
    facts |= {"stopped early": session.evaluations.stopped} if session.evaluations.stopped else {}
    with _extra(rt, "the summary"):
        report.summary(
            rt.console,
            files[0],
            name=config.recipe,
            seconds=time.monotonic() - session.began,
            facts={**facts, **session.speed},
            references=references,
            bytes_per_token=data.bytes_per_token,
            sets=sets,
            files=[rt.folder / file.relative_to(folder).as_posix() for file in (*files, curve, folder / "config.json")],
            then=_use(config, data, report.relative(rt.folder)),
        )


def _show(rt: Runtime, step: int, text: str) -> None:
    """The sample in TensorBoard, in a file of its own: that of the rows is closed."""
    from mupax.train.run.report.mirrors.tags import Media
    from mupax.train.run.report.mirrors.tensorboard import TensorBoard

    board = TensorBoard(rt.files / "tensorboard", None, "sample")
    fenced = "".join(f"    {line}\n" for line in text.splitlines())  # as code: no character of it is markup
    board.show(step, Media(texts={"sample": fenced}), time.time())
    board.close()


def _use(config: Config, data: Data, folder: str) -> str:
    """Return the command that has a run's model do what the model is for. It can be copied."""
    if folder.startswith("-"):  # it would be read as a flag
        folder = f"./{folder}"
    kind, _, place = config.data.name.partition(":")
    words = ["eval", folder]
    chats = kind == "chat" or config.data.chat_template is not None
    if chats and config.model.generates:
        words = ["generate", folder, "--chat"]
    elif config.model.generates:
        words = ["generate", folder, *_prompt_words(_prompt(config, data).strip())]
    elif config.model.denoises and config.data.name == "python_corpus":
        words = ["generate", folder, *_prompt_words(f"{_PROMPT}{_MASKS[config.data.noise]}(self):")]
    elif kind == "images":
        words = ["predict", folder, f"./{place}" if place.startswith("-") else place]
    return terminal.typed("mupax", *words)


def _prompt_words(text: str) -> list[str]:
    """Return the flag of a prompt. A text that looks like a flag is joined to it."""
    if text == "-":  # which reads standard input
        text = _PROMPT.strip()
    return [f"--prompt={text}"] if text.startswith("-") else ["--prompt", text]


def _prompt(config: Config, data: Data) -> str:
    """What a sample goes on with: of Python's sources a definition, of other text words of the first evaluation example."""
    if config.data.name == "python_corpus":
        return _PROMPT
    text = data.tokenizer.decode(data.eval_batch(0, slice(0, 1))["inputs"][0])
    words = text.split()[1:-1] or text.split()  # a window cuts its first and last
    whole = [word for word in words if word.isprintable() and "\ufffd" not in word]
    return " ".join(whole[:_WORDS])[:_LONGEST] or _PROMPT


@contextlib.contextmanager
def _extra(rt: Runtime, what: str) -> Iterator[None]:
    """Something without which the run is whole: where it fails, a line says so."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        rt.console.print(f"{what} is left out: {reason[:300]}", style="yellow", markup=False, highlight=False)


def _sample(program: Program, data: Data, params: Arrays, inputs: StepInputs) -> str:
    """A short prompt, continued; of an encoder-decoder texts with noise, and what it makes of them."""
    if program.config.model.denoises:
        from mupax.train.reuse.generate import denoised

        return denoised.examples_text(program, data, params, inputs)
    from mupax.train.reuse.generate.decode import Generator

    prompt = data.tokenizer.encode([_prompt(program.config, data).encode()])[0]
    new = Generator(program, params, inputs).complete(prompt, _SAMPLE_TOKENS, program.config.seed)[0]
    return data.tokenizer.decode(np.concatenate([prompt, new]))
