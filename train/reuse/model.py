"""Trained models in Python: `load` opens a run or weights to write text or classify images.

`mupax.load` and `mupax.Model` of the public interface are defined here.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mupax import terminal
from mupax.disk import path_of
from mupax.train.checkpoints.folder import first_of
from mupax.train.config.run import Config
from mupax.train.config.sections import Step
from mupax.train.reuse import trained

if TYPE_CHECKING:
    from mupax.train.core.program import Program
    from mupax.train.reuse.generate.decode import Generator
    from mupax.train.reuse.generate.sampling import Sampling
    from mupax.train.reuse.predict.classifier import Classifier

_BATCH = 32
"""Number of images classified at once."""


class ClassProbability(NamedTuple):
    """Class of an image with its probability."""

    name: str
    """Name of the class, or its label in digits for a model without names."""
    label: int
    probability: float


class Prediction(NamedTuple):
    """Classes of one image, predicted by a model."""

    image: Path
    classes: tuple[ClassProbability, ...]
    """Classes in falling order of probability."""


class HasWorkdir(Protocol):
    """A run, such as `mupax.train.fit` returns."""

    @property
    def workdir(self) -> Path:
        """Folder of the run."""
        ...


class Model:
    """Trained model on one device, opened by `load`. Weights are loaded at the first use.

    Attributes:
        config: Config of the run. For weights without a run, a config with their model and preset.
        step: Number of optimizer steps of the checkpoint. `None` for weights without a run.
    """

    def __init__(self, opened: trained.TrainedModel) -> None:
        self.config: Config = opened.config
        self.step: int | None = opened.step
        self._opened = opened
        self._tokenizer: Any = None
        self._program: Program | None = None
        self._params: Any = None
        self._generators: dict[Sampling | None, Generator] = {}
        self._classifier: Classifier | None = None

    def __repr__(self) -> str:
        return f"<{self.config.model.family} of {self._opened.described}>"

    def generate(
        self,
        prompt: str,
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """Return the text that `mupax generate` adds to a prompt, without the prompt.

        A decoder always adds `tokens` tokens, also beyond the end of a document. An encoder-decoder
        returns its answer to a prompt with `<mask>` (or `<0>`, `<1>`) in it. A run trained on span
        corruption returns the complete prompt with its holes (`<0>`, `<1>`) filled in.

        Args:
            prompt: Text to continue; "" begins a document.
            tokens: Number of tokens to add, at least 0. For an encoder-decoder the largest number
                of tokens to write, at least 1.
            temperature: Sampling temperature; 0 takes the likeliest token.
            top_k: Number of likeliest tokens to draw from, by default all.
            top_p: Total probability of the likeliest tokens to draw from, by default 1.
            seed: Seed of the draws, at least 0. The same seed gives the same text.

        Raises:
            WeightsError: The model reads images.
            DecodingError: A number is out of range, the tokenizer is another model's, the logits
                are not finite, or the prompt is too long for an encoder-decoder.
            DataError: The tokenizer is missing.
        """
        from mupax.train.data.text.detokenizer import Detokenizer
        from mupax.train.reuse.generate.sampling import DecodingError, Sampling
        from mupax.train.reuse.generate.writing import prompt_of

        self._opened.check_writes()
        for name, value in {"tokens": tokens, "seed": seed}.items():
            if value < 0:
                raise DecodingError(f"{name} is {value}; write a whole number of at least 0")
        sampling = Sampling(temperature, top_k, top_p)
        if self._tokenizer is None:
            self._tokenizer = self._opened.tokenizer()
        if self.config.model.denoises:
            return self._rewrite(prompt, tokens, seed, sampling)

        prompt_bytes = prompt.encode("utf-8", "surrogateescape")
        prompt_ids = prompt_of(self._opened, self._tokenizer, prompt_bytes)
        # A generator for a top_k was made with its sampling, so `stream` must not get one.
        stream_sampling = None if sampling.top_k is not None else sampling
        generator = self._text_generator(sampling)
        stream = generator.stream(prompt_ids, tokens, seed, sampling=stream_sampling)
        decoder = Detokenizer(self._tokenizer, prompt_ids.tolist())
        pieces = [decoder.add(part[0].tolist()) for part in stream]
        return "".join([*pieces, decoder.finish()])

    def predict(
        self,
        images: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        top: int | None = None,
    ) -> list[Prediction]:
        """Return the classes of image files with probabilities, as `mupax predict` prints them.

        Images of any size and mode are preprocessed as in evaluation. If one image has no answer,
        the call raises an error and returns nothing.

        Args:
            images: Path of an image file, or several paths.
            top: Number of classes to return for an image, the likeliest first, by default all.

        Raises:
            WeightsError: The model reads text.
            DataError: A file is missing or cannot be read, or the logits are not finite.
        """
        from mupax.train.data import DataError
        from mupax.train.reuse.predict.command import ranked

        # A string is an iterable, too: its characters would be taken for paths.
        if isinstance(images, str | os.PathLike):
            images = [images]
        paths = [path_of(os.fspath(image)) for image in images]
        for path in paths:
            if not path.is_file():
                raise DataError(f"there is no file {path}; write the path of an image")

        classifier = self._image_classifier()
        names = classifier.images.class_names
        answers: list[Prediction] = []
        for path, probabilities, error in classifier.predictions(paths):
            if probabilities is None:
                raise DataError(error)
            count = len(probabilities) if top is None else top
            classes = []
            for label, probability in ranked(probabilities, count):
                name = str(label) if names is None else names[label]
                classes.append(ClassProbability(name, label, probability))
            answers.append(Prediction(path, tuple(classes)))
        return answers

    def _text_generator(self, sampling: Sampling) -> Generator:
        """Return the generator for a sampling, made at its first use and then kept.

        All samplings without `top_k` share one generator. The first call loads the weights, and
        prints a note if any are NaN or infinite.
        """
        from mupax.train.reuse import runs, source
        from mupax.train.reuse.generate.decode import Generator

        # A program is compiled for one top_k. Without top_k, other settings are inputs.
        key = None if sampling.top_k is None else sampling
        if key not in self._generators:
            if self._program is None:
                self._program = runs.on_one_device(self.config)
                self._params = self._opened.params(self._program.abstract)
                # `params` refuses weights without a run that have NaN. A run that has diverged is
                # opened, and only a caution is printed.
                wrong = source.not_finite(self._params)
                if wrong:
                    terminal.note(
                        f"caution: {self._opened.path} has NaN or infinite values in "
                        f"{first_of([*wrong])}"
                    )
            inputs = self._program.step_inputs()
            self._generators[key] = Generator(self._program, self._params, inputs, sampling=key)
        return self._generators[key]

    def _rewrite(self, prompt: str, tokens: int, seed: int, sampling: Sampling) -> str:
        from mupax.train.reuse.generate import denoised

        # `denoised.texts` takes parsed flags of `mupax generate`, and reads these five of them.
        request = types.SimpleNamespace(prompt=prompt, tokens=tokens, seed=seed, samples=1, beams=1)
        return denoised.texts(request, self._opened, self._tokenizer, sampling)[0]

    def _image_classifier(self) -> Classifier:
        if self._classifier is None:
            from mupax.train.reuse.predict.classifier import classifier

            self._classifier = classifier(self._opened, _BATCH)
        return self._classifier


def load(
    run: str | os.PathLike[str] | HasWorkdir,
    *,
    step: Step | None = None,
    ema: bool | None = None,
    revision: str | None = None,
    tokenizer: str | None = None,
    separator: str | None = None,
) -> Model:
    """Open a trained model for use in Python. Its weights are loaded at the first use.

    A model of the Hugging Face hub is downloaded first.

    Args:
        run: Run that `fit` returned, its workdir, WORKDIR/checkpoints/STEP, a folder of weights
            (`mupax import`, or Hugging Face's own), or ORG/NAME of the Hugging Face hub.
        step: Step of a run's checkpoint, or "best"; by default the newest.
        ema: Whether to load the moving average of the parameters, by default if the run keeps one.
        revision: Branch, tag or commit of a model of the hub; by default main.
        tokenizer: "bytes" or the path of a tokenizer.json, for weights without one beside them. A
            run has its own.
        separator: Token that ends a document, for weights whose tokenizer has an unusual one.

    Raises:
        MupaxError: No run or weights at the path, no such step, a `step` or `ema` for weights, a
            `tokenizer` or `separator` for a run, or a `revision` for a path of this machine.
    """
    from mupax.train.reuse.huggingface import hub

    location = run if isinstance(run, str | os.PathLike) else run.workdir
    # Only a string can hold an address of a bucket or `~`. A Path is taken as it is.
    if not isinstance(location, Path):
        location = os.fspath(location)
    path = hub.local(path_of(location), revision)
    return Model(trained.open_model(path, step, ema, tokenizer=tokenizer, separator=separator))
