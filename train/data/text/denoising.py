"""Denoising as data: any source of text, with spans cut from its windows, for a model that reads one sequence and writes another.

The noise of training example i is a function of (seed, i), that of evaluation example i of i alone: whatever the batch size,
the processes or the step a run resumes from, and the same in every evaluation of every run.

Count models that a denoising model must beat:

* trigram and 4-gram: target tokens from those before them (`ngrams`), counted on the targets of one epoch.
* copy: where the targets so far go as the inputs do, they go on so. The guess is the token after the longest match of the
  last target tokens among the inputs, the first of several. With c tokens matching, the guess gets a(c) of the
  probability, which is how often it is right in training, and the 4-gram divides the rest.

Losses are in nats per target token that counts, special ones with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from mupax.train import data as sources
from mupax.train.config.data import source
from mupax.train.data import cache, interface
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError, Reference
from mupax.train.data.text import ngrams
from mupax.train.data.text.batches import TextWindows
from mupax.train.data.text.mixture import Mixture
from mupax.train.data.text.noise import NOISES, Noise
from mupax.train.data.text.vocabulary import Sentences, special_ids
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.families import ArraySpec, ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

_MOST_TARGETS = 1 << 22
_MOST_COPIED = 1 << 18
_LONGEST_MATCH = 16


def references(data: Data, vocab_size: int, special: Iterable[int]) -> list[Reference]:
    """Uniform, trigram, 4-gram and copying, on the evaluation examples in use; of no vocabulary above 65,536 tokens, and no stream.

    Args:
        data: whose training examples are counted (4 million targets; a quarter million where copying is tried).
        vocab_size: ids are in [0, vocab_size).
        special: ids that are never copied.
    """
    uniform = Reference("uniform", math.log(vocab_size), "nats/target")
    if vocab_size > 1 << 16 or data.train_size is None:
        return [uniform]
    key = cache.digest(
        *(str(fact) for fact in (data.facts["digest"], data.facts["noise"], data.eval_size))
    )
    losses = cache.remembered(
        f"denoising-{key}", lambda: _losses(data, vocab_size, np.array(sorted(special)))
    )
    return [uniform, *(Reference(name, loss, "nats/target") for name, loss in losses.items())]


def _losses(data: Data, vocab_size: int, special: np.ndarray) -> dict[str, float]:
    assert data.train_size is not None
    batches = -(-data.train_size // data.batch_size)
    train = _examples((data.train_batch(k) for k in range(batches)), _MOST_TARGETS)
    evaluated = -(-data.eval_size // data.eval_batch_size)
    test = _examples((data.eval_batch(j) for j in range(evaluated)), _MOST_COPIED)
    text = _counted(test)
    *_, trigram, fourgram = ngrams.nats_per_byte(
        _counted(train), text, np.arange(len(text)), 4, vocab_size
    )
    some = {
        name: array[: _MOST_COPIED // train["targets"].shape[1]] for name, array in train.items()
    }
    copy = copy_losses(some, test, fourgram, special)
    return {
        "trigram": float(trigram.mean()),
        "4-gram": float(fourgram.mean()),
        "copy": float(copy.mean()),
    }


def _examples(batches: Iterator[Batch], most_targets: int) -> Batch:
    """The examples of so many batches as have so many target positions, one below the other."""
    parts, targets = [], 0
    for batch in batches:
        if targets >= most_targets:
            break
        parts.append(batch)
        targets += batch["targets"].size
    return {name: np.concatenate([batch[name] for batch in parts]) for name in parts[0]}


def _counted(examples: Batch) -> np.ndarray:
    """The target tokens that count, one example after the other."""
    return examples["targets"][examples["weights"] > 0]


def copy_losses(
    train: Batch, test: Batch, otherwise: np.ndarray, special: np.ndarray
) -> np.ndarray:
    """-ln p of the test examples' targets that count, [P], where what can be copied is.

    Args:
        train: examples to learn from how far to trust a match.
        test: examples to predict.
        otherwise: -ln p of the same targets under the model that divides the rest, [P].
        special: ids that are never copied.
    """
    guess, matched = guesses(train, special)
    counts = train["weights"] > 0
    right = (guess == train["targets"])[counts]
    total = np.bincount(matched[counts], minlength=_LONGEST_MATCH + 1)
    trust = np.bincount(matched[counts], right, minlength=_LONGEST_MATCH + 1) / (
        total + 2
    )  # never certain
    guess, matched = guesses(test, special)
    counts = test["weights"] > 0
    share = np.where(matched > 0, trust[matched], 0)[counts]
    right = (guess == test["targets"])[counts]
    return -np.log(share * right + (1 - share) * np.exp(-otherwise))


def guesses(examples: Batch, special: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens to copy next, how many tokens before match there), both int [B, T]; 0 match where there is none to copy.

    Args:
        examples: `inputs`, `input_mask` and `decoder_inputs` of a batch.
        special: ids that are never copied.
    """
    inputs, history = examples["inputs"], examples["decoder_inputs"]
    plain = (examples["input_mask"] > 0) & ~np.isin(inputs, special)
    guess, matched = np.zeros(history.shape, inputs.dtype), np.zeros(history.shape, np.int64)
    run = np.zeros(inputs.shape, np.int16)
    for t in range(history.shape[1]):
        same = (
            inputs[:, :-1] == history[:, t, None]
        )  # run[:, j]: tokens before j that are the last ones of the history
        run[:, 1:] = np.where(same, np.minimum(run[:, :-1] + 1, _LONGEST_MATCH), 0)
        fits = np.where(plain, run, 0)
        best = fits.argmax(axis=1)[:, None]
        guess[:, t] = np.take_along_axis(inputs, best, axis=1)[:, 0]
        matched[:, t] = np.take_along_axis(fits, best, axis=1)[:, 0]
    return guess, matched


class Denoising(Data):
    """Windows of text with noise. Of B examples, S encoder and T decoder positions a batch has so many arrays.

    * `inputs` int32 [B, S], and `input_mask` int32 [B, S], 1 where a token stands; of an example past the last one, which
      counts nothing, the first position, for attention wants something to see.
    * `decoder_inputs` int32 [B, T]: the targets shifted right, behind eos (infilling, as BART) or pad (sentinels, as T5).
    * `targets` int32 [B, T], and `weights` float32 [B, T], 1 at every target token: under infilling bos, the whole text and
      eos, under sentinels the sentinels, what they stand for and eos.

    Args:
        text: windows of `noise.lengths(inputs).tokens` tokens.
        noise: what to do with them.
        inputs: S.
        vocab_size: of the model; any unless given.
        seed: of the noise in training.

    Raises:
        DataError: the vocabulary has no room for the special ids.
    """

    kind = "tokens"

    def __init__(
        self,
        text: TextWindows | Mixture,
        noise: Noise,
        *,
        inputs: int,
        vocab_size: int | None = None,
        seed: int,
    ) -> None:
        self.noise, self.lengths, self.text = noise, noise.lengths(inputs), text
        self.ids = special_ids(text.tokenizer, noise.sentinels(self.lengths.tokens), vocab_size)
        self.vocab_size = 1 + max(text.tokenizer.vocab_size - 1, *self.ids[:4], *self.ids.sentinels)
        """Ids are in [0, vocab_size)."""
        super().__init__(
            text.config,
            facts={
                **text.facts,
                "digest": cache.digest(str(text.facts["digest"]), repr(noise), repr(self.ids)),
                "noise": {
                    "name": noise.name,
                    **dataclasses.asdict(noise),
                    **self.lengths._asdict(),
                },
            },
            train_size=text.train_size,
            eval_size=text.eval_size,
            tokenizer=text.tokenizer,
            bytes_per_token=None,
        )
        self._seed = seed
        self._sentences = Sentences(text.tokenizer, self.vocab_size)

    @property
    def example(self) -> dict[str, ArraySpec]:
        """The contract with a model: what its config declares as one example (`mupax.zoo.families.ModelConfig.example`)."""
        inputs, targets = ((length,) for length in self.lengths[1:])
        return {
            "inputs": ArraySpec(inputs, "int32"),
            "input_mask": ArraySpec(inputs, "int32"),
            "decoder_inputs": ArraySpec(targets, "int32"),
            "targets": ArraySpec(targets, "int32"),
            "weights": ArraySpec(targets, "float32"),
        }

    def preparing(self) -> AbstractContextManager[object]:
        return self.text.preparing()

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        indices = interface.batch_indices(k, self.batch_size, rows)
        return self._noised(self.text.train_batch(k, rows), indices, self._seed, interface.NOISE)

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = interface.batch_indices(j, self.eval_batch_size, rows)
        return self._noised(self.text.eval_batch(j, rows), indices, 0, interface.EVALUATION)

    def references(self) -> list[Reference]:

        return references(self, self.vocab_size, self.ids.names())

    def _noised(self, windows: Batch, indices: range, seed: int, purpose: int) -> Batch:
        tokens, counts = windows["inputs"], windows["weights"].sum(axis=1).astype(int)
        uniforms = np.empty((len(tokens), self.noise.draws, self.lengths.tokens))
        for row, index in zip(uniforms, indices, strict=True):
            interface.rng(seed, purpose, index).random(out=row)
        batch: Batch = {
            name: np.full(
                (len(tokens), *spec.shape), self.ids.pad if spec.dtype == "int32" else 0, spec.dtype
            )
            for name, spec in self.example.items()
        }
        batch["input_mask"][:] = np.arange(self.lengths.inputs) < 1
        start = self.ids.eos if self.noise.name == "infilling" else self.ids.pad
        batch["decoder_inputs"][:, 0] = start
        for count in np.unique(
            counts[counts > 0]
        ):  # all are whole windows but the evaluation text's last
            rows = np.flatnonzero(counts == count)
            text = tokens[rows, :count]
            noised = self.noise(
                text, self._sentences.starts(text), uniforms[rows, :, :count], self.ids
            )
            width, length = noised.inputs.shape[1], noised.targets.shape[1]
            batch["inputs"][rows, :width] = noised.inputs
            batch["input_mask"][rows] = np.arange(self.lengths.inputs) < noised.counts[:, None]
            batch["targets"][rows, :length] = noised.targets
            batch["decoder_inputs"][rows, 1:length] = noised.targets[:, :-1]
            batch["weights"][rows, :length] = 1.0
        return batch


def load(
    config: DataConfig, model: ModelConfig, *, seed: int, note: cache.Note = print
) -> Denoising:
    """The text and noise that a config names, for an encoder-decoder.

    Args:
        config: its `noise` is given.
        model: whose inputs, targets and vocabulary the batches must fit.
        seed: of order and noise.
        note: told, in a line, what takes time.

    Raises:
        DataError: as `denoising`, or targets are longer or shorter than the model's.
    """
    noise, sizes = noise_of(config), model.sizes()
    target_len, there = noise.lengths(sizes["source"]).targets, sizes["position"]
    if target_len != there:
        raise DataError(
            f"{config.noise} of {sizes['source']} inputs makes targets of {target_len} tokens, and the model's are {there}; "
            f"write --model.target-len {target_len}"
        )
    plain = dataclasses.replace(config, noise=None, noise_rate=None, noise_span=None)
    return denoising(
        plain, noise, inputs=sizes["source"], vocab_size=sizes["vocab"], seed=seed, note=note
    )


def noise_of(config: DataConfig) -> Noise:
    """The noise that a config names; raises DataError for numbers that it cannot have."""
    assert config.noise is not None
    fields = {"rate": config.noise_rate, "mean_span": config.noise_span}
    return NOISES[config.noise](
        **{name: value for name, value in fields.items() if value is not None}
    )


def denoising(
    config: DataConfig,
    noise: Noise,
    *,
    inputs: int,
    vocab_size: int | None = None,
    seed: int,
    note: cache.Note = print,
) -> Denoising:
    """A source of text that a config names, prepared if it is not, as batches with noise.

    Args:
        config: which text, in what batches.
        noise: what to do with it.
        inputs: encoder positions, S; windows of text are as long as fit.
        vocab_size: of the model; any unless given.
        seed: of order and noise.
        note: told, in a line, what takes time.

    Raises:
        DataError: as `mupax.train.data.load`, or the data are images, or the vocabulary has no room for special ids.
    """
    if source(config.name).task == "images":
        raise DataError(
            f"data {config.name!r} is images, and noise is put on text; write python_corpus or text:PATH"
        )
    tokens = noise.lengths(inputs).tokens
    windows = DecoderConfig(
        width=1, depth=1, num_heads=1, seq_len=tokens, vocab_size=vocab_size or 2**31
    )
    text = sources.load(config, windows, seed=seed, note=note)
    if not isinstance(text, TextWindows | Mixture) or (
        isinstance(text, Mixture) and text.has_conversations
    ):
        raise DataError(
            f"data {config.name!r} is conversations, and noise is put on text; leave data.noise out"
        )
    return Denoising(text, noise, inputs=inputs, vocab_size=vocab_size, seed=seed)
