"""Denoising as data: any source of text, with spans cut from its windows, for a model that reads one sequence and writes another.

The noise of training example i is a function of (seed, i), that of evaluation example i of i alone: whatever the batch size,
the processes or the step a run resumes from, and the same in every evaluation of every run.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from mupax.train import data as sources
from mupax.train.config.data import source
from mupax.train.data import cache, order
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError, Reference
from mupax.train.data.text.batches import TextWindows
from mupax.train.data.text.mixture import Mixture
from mupax.train.data.text.noise import NOISES, Noise
from mupax.train.data.text.vocabulary import Sentences, special_ids
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.families import ArraySpec, ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig


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
        self, text: TextWindows | Mixture, noise: Noise, *, inputs: int, vocab_size: int | None = None, seed: int
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
                "noise": {"name": noise.name, **dataclasses.asdict(noise), **self.lengths._asdict()},
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
        indices = order.batch_indices(k, self.batch_size, rows)
        return self._noised(self.text.train_batch(k, rows), indices, self._seed, order.NOISE)

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = order.batch_indices(j, self.eval_batch_size, rows)
        return self._noised(self.text.eval_batch(j, rows), indices, 0, order.EVALUATION)

    def references(self) -> list[Reference]:
        from mupax.train.data.text import baselines

        return baselines.references(self, self.vocab_size, self.ids.names())

    def _noised(self, windows: Batch, indices: range, seed: int, purpose: int) -> Batch:
        tokens, counts = windows["inputs"], windows["weights"].sum(axis=1).astype(int)
        uniforms = np.empty((len(tokens), self.noise.draws, self.lengths.tokens))
        for row, index in zip(uniforms, indices, strict=True):
            order.rng(seed, purpose, index).random(out=row)
        batch: Batch = {
            name: np.full((len(tokens), *spec.shape), self.ids.pad if spec.dtype == "int32" else 0, spec.dtype)
            for name, spec in self.example.items()
        }
        batch["input_mask"][:] = np.arange(self.lengths.inputs) < 1
        start = self.ids.eos if self.noise.name == "infilling" else self.ids.pad
        batch["decoder_inputs"][:, 0] = start
        for count in np.unique(counts[counts > 0]):  # all are whole windows but the evaluation text's last
            rows = np.flatnonzero(counts == count)
            text = tokens[rows, :count]
            noised = self.noise(text, self._sentences.starts(text), uniforms[rows, :, :count], self.ids)
            width, length = noised.inputs.shape[1], noised.targets.shape[1]
            batch["inputs"][rows, :width] = noised.inputs
            batch["input_mask"][rows] = np.arange(self.lengths.inputs) < noised.counts[:, None]
            batch["targets"][rows, :length] = noised.targets
            batch["decoder_inputs"][rows, 1:length] = noised.targets[:, :-1]
            batch["weights"][rows, :length] = 1.0
        return batch


def load(config: DataConfig, model: ModelConfig, *, seed: int, note: cache.Note = print) -> Denoising:
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
    return denoising(plain, noise, inputs=sizes["source"], vocab_size=sizes["vocab"], seed=seed, note=note)


def noise_of(config: DataConfig) -> Noise:
    """The noise that a config names; raises DataError for numbers that it cannot have."""
    assert config.noise is not None
    fields = {"rate": config.noise_rate, "mean_span": config.noise_span}
    return NOISES[config.noise](**{name: value for name, value in fields.items() if value is not None})


def denoising(
    config: DataConfig, noise: Noise, *, inputs: int, vocab_size: int | None = None, seed: int, note: cache.Note = print
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
        raise DataError(f"data {config.name!r} is images, and noise is put on text; write python_corpus or text:PATH")
    tokens = noise.lengths(inputs).tokens
    windows = DecoderConfig(width=1, depth=1, num_heads=1, seq_len=tokens, vocab_size=vocab_size or 2**31)
    text = sources.load(config, windows, seed=seed, note=note)
    if not isinstance(text, TextWindows | Mixture) or (isinstance(text, Mixture) and text.has_conversations):
        raise DataError(f"data {config.name!r} is conversations, and noise is put on text; leave data.noise out")
    return Denoising(text, noise, inputs=inputs, vocab_size=vocab_size, seed=seed)
