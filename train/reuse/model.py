"""Use a trained model from Python: `load` opens a run or weights, which then write text or classify images."""

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
"""Images that are classified at once."""


class ClassProbability(NamedTuple):
    """One class that an image may be of."""

    name: str
    """Name of the class; its label in digits for a model without names."""
    label: int
    probability: float


class Prediction(NamedTuple):
    """Answer of a model to one image."""

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
    """Trained model on one device, opened by `load`. Weights are read when they are first needed.

    Attributes:
        config: Config of the run. For weights without a run, a config with their model and preset.
        step: Optimizer steps of the checkpoint; None for weights without a run.
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
        """Return the text that `mupax generate` adds to a prompt.

        An encoder-decoder returns what it makes of a prompt with `<mask>` (or `<0>`, `<1>`) in it.

        Args:
            prompt: Text to continue; "" begins a document.
            tokens: Tokens to add.
            temperature: 0 takes the likeliest token.
            top_k: Draw among so many of the likeliest tokens; all unless given.
            top_p: Draw among the likeliest tokens that have this probability together; all unless given.
            seed: Seed of the draws. The same seed gives the same text.

        Raises:
            WeightsError: The model reads images.
            DecodingError: A number is out of its range, or the tokenizer is another model's.
            DataError: The tokenizer is not there.
        """
        from mupax.train.data.text.detokenizer import Detokenizer
        from mupax.train.reuse.generate.sampling import DecodingError, Sampling
        from mupax.train.reuse.generate.writing import prompt_of

        self._opened.check_writes("generate")
        for name, value in {"tokens": tokens, "seed": seed}.items():
            if value < 0:
                raise DecodingError(f"{name} is {value}; write a whole number of at least 0")
        sampling = Sampling(temperature, top_k, top_p)
        if self._tokenizer is None:
            self._tokenizer = self._opened.tokenizer()
        if self.config.model.denoises:
            return self._rewrite(prompt, tokens, seed, sampling)
        prompt_ids = prompt_of(
            self._opened, self._tokenizer, prompt.encode("utf-8", "surrogateescape")
        )
        own = (
            None if sampling.top_k is not None else sampling
        )  # a generator for a top_k has its sampling already
        stream = self._text_generator(sampling).stream(prompt_ids, tokens, seed, sampling=own)
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

        Images of any size and mode are read as evaluation reads them.

        Args:
            images: Path of an image file, or paths of several.
            top: Classes to return for an image, the likeliest first; all unless given.

        Raises:
            WeightsError: The model reads text.
            DataError: A file is not there or cannot be read.
        """
        from mupax.train.data import DataError
        from mupax.train.reuse.predict.command import ranked

        if isinstance(images, str | os.PathLike):
            images = [images]
        paths = [path_of(os.fspath(image)) for image in images]
        for path in paths:
            if not path.is_file():
                raise DataError(f"there is no file {path}; write the path of an image")
        classifier = self._image_classifier()
        answers: list[Prediction] = []
        for path, probabilities, error in classifier.predictions(paths):
            if probabilities is None:
                raise DataError(error)
            best = ranked(probabilities, len(probabilities) if top is None else top)
            names = classifier.images.class_names
            classes = [
                ClassProbability(str(label) if names is None else names[label], label, probability)
                for label, probability in best
            ]
            answers.append(Prediction(path, tuple(classes)))
        return answers

    def _text_generator(self, sampling: Sampling) -> Generator:
        """Return the generator for a sampling. One compiled program serves every sampling without top_k."""
        from mupax.train.reuse import runs, source
        from mupax.train.reuse.generate.decode import Generator

        key = None if sampling.top_k is None else sampling
        if key not in self._generators:
            if self._program is None:
                self._program = runs.on_one_device(self.config)
                self._params = self._opened.params(self._program.abstract)
                # Weights alone are refused where they are read; a run may be looked at for its NaN.
                if wrong := source.not_finite(self._params):
                    terminal.note(
                        f"caution: {self._opened.path} has NaN or infinite values in {first_of([*wrong])}"
                    )
            inputs = self._program.step_inputs()
            self._generators[key] = Generator(self._program, self._params, inputs, sampling=key)
        return self._generators[key]

    def _rewrite(self, prompt: str, tokens: int, seed: int, sampling: Sampling) -> str:
        from mupax.train.reuse.generate import denoised

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
    """Open a trained model for use in Python.

    Args:
        run: Run that `fit` returned, its workdir, WORKDIR/checkpoints/STEP, a folder of weights (`mupax import`, or
            Hugging Face's own), or ORG/NAME of the Hugging Face hub.
        step: Step of a run's checkpoint, or "best"; the newest unless given.
        ema: Whether to read the moving average of the parameters; where the run keeps one, unless given.
        revision: Branch, tag or commit of a model of the hub; main unless given.
        tokenizer: "bytes" or the path of a tokenizer.json, for weights without one beside them. A run has its own.
        separator: Token that ends a document, for weights whose tokenizer has it under an unusual name.

    Raises:
        MupaxError: No run or weights are there, or not that step.
    """
    from mupax.train.reuse.huggingface import hub

    place = run if isinstance(run, str | os.PathLike) else run.workdir
    path = hub.local(path_of(place if isinstance(place, Path) else os.fspath(place)), revision)
    return Model(trained.open_model(path, step, ema, tokenizer=tokenizer, separator=separator))
