"""A model of text opened for writing: a run's step or weights alone, its tokenizer, and prompts in its tokens."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mupax import command_line
from mupax.train import data as data_sources
from mupax.train.checkpoints.saved_run import LoadedRun
from mupax.train.config.sections import Step
from mupax.train.data import DataError
from mupax.train.data.chats import templates
from mupax.train.data.chats.templates import Template
from mupax.train.data.text import named_tokenizers
from mupax.train.reuse import pretrained
from mupax.train.reuse.generate.sampling import DecodingError
from mupax.train.reuse.pretrained import LoadedWeights


def find(
    path: Path, step: Step | None, average: bool | None, *, writes: bool = False, **text_fields: str | None
) -> LoadedRun | LoadedWeights:
    """The model, as `pretrained.find` gives it.

    Args:
        path, step, average: as `pretrained.find` takes them.
        writes: as `pretrained.find` takes it.
        **text_fields: data.tokenizer and data.separator of weights alone; None where they are not said.

    Raises:
        UsageError: the tokenizer of a run is said anew.
        MupaxError: as `pretrained.find`.
    """
    run = pretrained.find(path, step, average, writes=writes)
    named = {name: value for name, value in text_fields.items() if value is not None}
    if not named:
        return run
    if run.step is not None:
        raise command_line.UsageError(
            f"--data.{next(iter(named))} is for weights alone, and the run in {path} has its own; leave it out"
        )
    if "tokenizer" in named:  # the separator beside the weights is a token of their own tokenizer
        named = {"separator": None, **named}
    data = dataclasses.replace(run.config.data, **named)
    return run._replace(config=dataclasses.replace(run.config, data=data))


def tokenizer_of(run: LoadedRun | LoadedWeights) -> Any:
    """Return the model's tokenizer: the file of a run's own, or the one beside weights.

    The run's data is opened only for a run of an older version, whose tokenizer is not in the cache either.

    Raises:
        DataError: the tokenizer is not here, or is another.
    """
    config, name = run.config, run.config.data.tokenizer
    tokenizer: Any = named_tokenizers.opened(name, config.data.separator)
    if tokenizer is None:
        note = functools.partial(print, file=sys.stderr)
        tokenizer = data_sources.load(config.data, config.model, seed=config.data_seed, note=note).tokenizer
    key = run.facts.get("tokenizer")
    if key not in (None, tokenizer.key):
        raise DataError(
            f"the run's tokens are those of {key}, and data.tokenizer {name} is {tokenizer.key} here; "
            f"put the run's tokenizer.json into {run.workdir}/assets"
        )
    return tokenizer


def template_of(run: LoadedRun | LoadedWeights, file: str | None = None) -> Template | None:
    """Return the chat template of a model, or None if it has none.

    Args:
        run: the model.
        file: template in place of the model's own.

    Raises:
        DataError: the file is not there, is damaged, or holds no template.
    """
    data = run.config.data
    return templates.find(data.tokenizer, file or data.chat_template, dated=True)


def prompt_of(run: LoadedRun | LoadedWeights, tokenizer: Any, text: bytes) -> np.ndarray:
    """A text to continue in the model's tokens, int32 [P], P >= 1: an empty one begins a document.

    Args:
        run: the model.
        tokenizer: its own.
        text: in UTF-8.

    Raises:
        DecodingError: a token that the model does not know.
        DataError: the text cannot be encoded.
    """
    prompt = tokenizer.encode([text])[0]
    if run.step is None:  # as their own library has it
        prompt = np.concatenate([tokenizer.start, prompt])
    check_known(prompt, run)
    return prompt if prompt.size else np.array([tokenizer.separator], np.int32)


def check_known(prompt: np.ndarray, run: LoadedRun | LoadedWeights) -> None:
    """Raises DecodingError where a prompt has tokens that the model does not know.

    Args:
        prompt: integers [P].
        run: the model.
    """
    vocab = run.config.model.sizes()["vocab"]
    if (prompt >= vocab).any():
        raise DecodingError(
            f"the prompt has the token {prompt.max()}, and the model knows those below {vocab}; "
            "the tokenizer is another model's"
        )
