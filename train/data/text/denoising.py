"""Denoising data for encoder-decoders: windows of any text with corrupted spans.

Shapes: B examples, S encoder positions, T decoder positions, N tokens per window, P targets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from mupax.mappings import drop_none
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
"""Number of training target positions from which the n-gram models are counted, about."""
_MOST_COPIED = 1 << 18
"""Number of target positions, about, that fit the copy model and that evaluate all models."""
_LONGEST_MATCH = 16
"""Number of matching tokens from which on a longer match is not trusted more."""


def references(data: Data, vocab_size: int, special: Iterable[int]) -> list[Reference]:
    """Return the losses of simple models that a denoising model should beat, in nats per target.

    Losses are means over targets of evaluation examples. Special tokens are targets, too.

    * uniform: every token is equally likely.
    * trigram and 4-gram: n-gram models (`ngrams`) that predict each target from the targets before
      it. They are counted on the targets of one epoch.
    * copy: the model looks for the longest piece of the inputs that equals the last targets, and
      guesses the token after it. Of several pieces it takes the first. A guess after c equal tokens
      gets the probability a(c), the share of such guesses that are right in training. The 4-gram
      model divides the rest of the probability.

    Only the uniform model is returned for a stream and for a vocabulary above 65,536 tokens. The
    losses are cached on disk.

    Args:
        data: Data to measure. About 4 million target positions of training are counted, a quarter
            million of these for copying, and as many of the evaluation are predicted.
        vocab_size: Number of ids, which are in [0, vocab_size).
        special: Ids that are never copied, such as the ids of sentinels.
    """
    uniform = Reference("uniform", math.log(vocab_size), "nats/target")
    if vocab_size > 1 << 16 or data.train_size is None:
        return [uniform]

    facts = (data.facts["digest"], data.facts["noise"], data.eval_size)
    key = cache.digest(*(str(fact) for fact in facts))
    special_array = np.array(sorted(special))
    losses = cache.remembered(f"denoising-{key}", lambda: _losses(data, vocab_size, special_array))
    return [uniform, *(Reference(name, loss, "nats/target") for name, loss in losses.items())]


def _losses(data: Data, vocab_size: int, special: np.ndarray) -> dict[str, float]:
    """Return the mean loss of the trigram, 4-gram and copy models, in nats per target.

    The models are counted on training batches, and evaluated on evaluation batches, both up to a
    number of targets (`references`).

    Args:
        data: Data with a known size of an epoch, so no stream.
        vocab_size: Number of ids, which are in [0, vocab_size).
        special: Ids that are never copied, such as the ids of sentinels.
    """
    assert data.train_size is not None
    num_train = -(-data.train_size // data.batch_size)
    num_eval = -(-data.eval_size // data.eval_batch_size)
    train = _examples((data.train_batch(k) for k in range(num_train)), _MOST_TARGETS)
    test = _examples((data.eval_batch(j) for j in range(num_eval)), _MOST_COPIED)

    targets = _counted_targets(test)
    positions = np.arange(len(targets))
    *_, trigram, fourgram = ngrams.nats_per_byte(
        _counted_targets(train), targets, positions, 4, vocab_size
    )
    num_copied = _MOST_COPIED // train["targets"].shape[1]
    first_examples = {}
    for name, array in train.items():
        first_examples[name] = array[:num_copied]
    copy = copy_losses(first_examples, test, fourgram, special)
    return {
        "trigram": float(trigram.mean()),
        "4-gram": float(fourgram.mean()),
        "copy": float(copy.mean()),
    }


def _examples(batches: Iterator[Batch], most_targets: int) -> Batch:
    """Return the first batches, concatenated, until they have `most_targets` target positions.

    All batches are returned if they have fewer. Positions of padding count, too.
    """
    parts = []
    num_targets = 0
    for batch in batches:
        if num_targets >= most_targets:
            break
        parts.append(batch)
        num_targets += batch["targets"].size
    joined = {}
    for name in parts[0]:
        joined[name] = np.concatenate([batch[name] for batch in parts])
    return joined


def _counted_targets(examples: Batch) -> np.ndarray:
    """Return the targets with a weight above 0, one example after the other, [P]."""
    return examples["targets"][examples["weights"] > 0]


def copy_losses(
    train: Batch, test: Batch, otherwise: np.ndarray, special: np.ndarray
) -> np.ndarray:
    """Return -ln p of each target of `test` with a weight above 0 under the copy model, [P].

    The copy model is described in `references`.

    Args:
        train: Training examples, from which the share of right guesses is measured for each length
            of the match.
        test: Examples whose targets are predicted by the copy model.
        otherwise: -ln p of the same targets under the model that has the rest of the probability,
            [P].
        special: Ids that are never copied, such as the ids of sentinels.
    """
    guess, match_lengths = guesses(train, special)
    counts = train["weights"] > 0
    lengths = match_lengths[counts]
    right = (guess == train["targets"])[counts]
    num_guesses = np.bincount(lengths, minlength=_LONGEST_MATCH + 1)
    num_right = np.bincount(lengths, right, minlength=_LONGEST_MATCH + 1)
    # The 2 keeps the trust below 1. At a trust of 1, a wrong guess would have an infinite loss.
    trust = num_right / (num_guesses + 2)

    guess, match_lengths = guesses(test, special)
    counts = test["weights"] > 0
    share = np.where(match_lengths > 0, trust[match_lengths], 0)[counts]
    right = (guess == test["targets"])[counts]
    return -np.log(share * right + (1 - share) * np.exp(-otherwise))


def guesses(examples: Batch, special: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the guesses of the copy model (`references`) for every target position.

    Args:
        examples: Batch with `inputs`, `input_mask` and `decoder_inputs`.
        special: Ids that are never copied, such as the ids of sentinels.

    Returns:
        Id that is guessed, and number of tokens before it in the inputs that equal the last decoder
        inputs, int [B, T] each. The number is at most `_LONGEST_MATCH`. 0 means that there is no
        guess.
    """
    inputs = examples["inputs"]
    history = examples["decoder_inputs"]
    is_plain = (examples["input_mask"] > 0) & ~np.isin(inputs, special)
    guess = np.zeros(history.shape, inputs.dtype)
    match_lengths = np.zeros(history.shape, np.int64)
    # run[:, j] is the number of tokens just before input j that equal the last tokens of the
    # history.
    run = np.zeros(inputs.shape, np.int16)
    for t in range(history.shape[1]):
        is_equal = inputs[:, :-1] == history[:, t, None]
        run[:, 1:] = np.where(is_equal, np.minimum(run[:, :-1] + 1, _LONGEST_MATCH), 0)
        plain_run = np.where(is_plain, run, 0)
        best = plain_run.argmax(axis=1)[:, None]
        guess[:, t] = np.take_along_axis(inputs, best, axis=1)[:, 0]
        match_lengths[:, t] = np.take_along_axis(plain_run, best, axis=1)[:, 0]
    return guess, match_lengths


class Denoising(Data):
    """Windows of text with corrupted spans.

    The noise of training example i is a function of (seed, i), and the noise of evaluation example
    i is a function of i alone. So neither the batch size nor the number of processes nor the step
    from which a run resumes changes the noise.

    Arrays of a batch:

    * `inputs`, int32 [B, S]: corrupted text, padded.
    * `input_mask`, int32 [B, S]: 1 at every token of the inputs. Examples past the last one have a
      1 at the first position only.
    * `decoder_inputs`, int32 [B, T]: the targets shifted right, after eos (infilling, as in BART)
      or pad (sentinels, as in T5).
    * `targets`, int32 [B, T]: for infilling bos, the complete text and eos; for sentinels each
      sentinel with the tokens that it replaces, and eos.
    * `weights`, float32 [B, T]: 1 at every target token.

    Args:
        text: Windows of `noise.lengths(inputs).tokens` tokens.
        inputs: Number of encoder positions, `S`.
        vocab_size: Vocabulary size of the model. Default: as many ids as are needed.

    Attributes:
        lengths: Tokens of a window (N), encoder positions (S) and decoder positions (T).
        ids: Special ids that the batches contain in addition to the tokens of the text.

    Raises:
        DataError: The vocabulary has no room for the special ids.
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
        self.noise = noise
        self.lengths = noise.lengths(inputs)
        self.text = text
        num_sentinels = noise.sentinels(self.lengths.tokens)
        self.ids = special_ids(text.tokenizer, num_sentinels, vocab_size)
        last_id = max(text.tokenizer.vocab_size - 1, *self.ids[:4], *self.ids.sentinels)
        self.vocab_size = 1 + last_id
        """Ids are in [0, vocab_size)."""

        digest = cache.digest(str(text.facts["digest"]), repr(noise), repr(self.ids))
        noise_facts = {
            "name": noise.name,
            **dataclasses.asdict(noise),
            **self.lengths._asdict(),
        }
        super().__init__(
            text.config,
            facts={**text.facts, "digest": digest, "noise": noise_facts},
            train_size=text.train_size,
            eval_size=text.eval_size,
            tokenizer=text.tokenizer,
            # A target is a sentinel or a copied token, so bits per byte of text mean nothing here.
            bytes_per_token=None,
        )
        self._seed = seed
        self._sentences = Sentences(text.tokenizer, self.vocab_size)

    @property
    def example(self) -> dict[str, ArraySpec]:
        """Shapes and dtypes of one example, without the batch axis, as in `ModelConfig.example`."""
        inputs = (self.lengths.inputs,)
        targets = (self.lengths.targets,)
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
        # Seed 0: evaluation examples must not depend on the run's seed.
        return self._noised(self.text.eval_batch(j, rows), indices, 0, interface.EVALUATION)

    def references(self) -> list[Reference]:
        return references(self, self.vocab_size, self.ids.names())

    def _noised(self, windows: Batch, indices: range, seed: int, purpose: int) -> Batch:
        """Return the batch of some windows after corruption.

        Args:
            windows: Batch of the text, with `inputs` [B, N] and `weights` [B, N].
            indices: Number of each example, [B].
            seed: Seed of the random numbers of an example, with purpose and index.
            purpose: Random stream, such as `interface.NOISE`.
        """
        tokens = windows["inputs"]
        counts = windows["weights"].sum(axis=1).astype(int)
        uniforms = np.empty((len(tokens), self.noise.draws, self.lengths.tokens))
        for row, index in zip(uniforms, indices, strict=True):
            # One generator per example, so that its noise depends neither on the batch size nor on
            # the process.
            interface.rng(seed, purpose, index).random(out=row)

        batch = self._padding(len(tokens))
        # All windows are complete, except the last one of the evaluation text. So there are few
        # groups.
        for count in np.unique(counts[counts > 0]):
            rows = np.flatnonzero(counts == count)
            text = tokens[rows, :count]
            starts = self._sentences.starts(text)
            corrupted = self.noise(text, starts, uniforms[rows, :, :count], self.ids)
            num_inputs = corrupted.inputs.shape[1]
            num_targets = corrupted.targets.shape[1]
            input_mask = np.arange(self.lengths.inputs) < corrupted.counts[:, None]

            batch["inputs"][rows, :num_inputs] = corrupted.inputs
            batch["input_mask"][rows] = input_mask
            batch["targets"][rows, :num_targets] = corrupted.targets
            batch["decoder_inputs"][rows, 1:num_targets] = corrupted.targets[:, :-1]
            batch["weights"][rows, :num_targets] = 1.0
        return batch

    def _padding(self, num_rows: int) -> Batch:
        """Return a batch of rows without text, which `_noised` then fills.

        Ids are pad and weights 0. Only the first position of `input_mask` is 1. The first decoder
        input is eos for infilling and pad for sentinels.
        """
        batch: Batch = {}
        for name, spec in self.example.items():
            fill = self.ids.pad if spec.dtype == "int32" else 0
            batch[name] = np.full((num_rows, *spec.shape), fill, spec.dtype)
        # Attention needs at least one position that it may see.
        batch["input_mask"][:] = np.arange(self.lengths.inputs) < 1
        # BART starts its decoder with eos, T5 with pad, and published weights expect their own.
        start = self.ids.eos if self.noise.name == "infilling" else self.ids.pad
        batch["decoder_inputs"][:, 0] = start
        return batch


def load(
    config: DataConfig, model: ModelConfig, *, seed: int, note: cache.Note = print
) -> Denoising:
    """Load the text that a configuration names with span corruption, for an encoder-decoder.

    Args:
        config: Configuration whose `noise` is not `None`.
        model: Model whose inputs, targets and vocabulary the batches must fit.
        seed: Seed of the order and of the noise.
        note: Function that prints a line for the user before work that takes long.

    Raises:
        DataError: `denoising` fails, or the corruption makes targets of another length than the
            model's.
    """
    noise = noise_of(config)
    sizes = model.sizes()
    target_len = noise.lengths(sizes["source"]).targets
    model_len = sizes["position"]
    if target_len != model_len:
        raise DataError(
            f"{config.noise} of {sizes['source']} inputs makes targets of {target_len} tokens, "
            f"and the model's are {model_len}; write --model.target-len {target_len}"
        )
    # Without its fields of noise, the configuration loads as plain windows of text.
    plain = dataclasses.replace(config, noise=None, noise_rate=None, noise_span=None)
    return denoising(
        plain, noise, inputs=sizes["source"], vocab_size=sizes["vocab"], seed=seed, note=note
    )


def noise_of(config: DataConfig) -> Noise:
    """Return the kind of span corruption that a configuration names, with rate and mean span.

    Args:
        config: Configuration whose `noise` is not `None`. The rate is `noise_rate`, and the mean
            span is `noise_span`. `None` is the default of the kind.

    Raises:
        DataError: The rate or the mean span is out of range.
    """
    assert config.noise is not None
    fields = {"rate": config.noise_rate, "mean_span": config.noise_span}
    # A field that is `None` has the default of the noise.
    chosen = drop_none(fields)
    return NOISES[config.noise](**chosen)


def denoising(
    config: DataConfig,
    noise: Noise,
    *,
    inputs: int,
    vocab_size: int | None = None,
    seed: int,
    note: cache.Note = print,
) -> Denoising:
    """Load the text that a configuration names, and corrupt spans of its windows.

    The text is prepared first if it is not in the cache.

    Args:
        config: Configuration with the text and the batch sizes.
        noise: Kind of span corruption, `Infilling` or `Sentinels`.
        inputs: S, number of encoder positions. Windows are as long as S allows.
        vocab_size: Vocabulary size of the model. Default: as many ids as are needed.
        seed: Seed of the order and of the noise.
        note: Function that prints a line for the user before work that takes long.

    Raises:
        DataError: `mupax.train.data.load` fails, the data are images or conversations, or the
            vocabulary has no room for the special ids.
    """
    if source(config.name).task == "images":
        raise DataError(
            f"data {config.name!r} is images, and noise is put on text; "
            "write python_corpus or text:PATH"
        )
    tokens = noise.lengths(inputs).tokens
    # Only window length and vocabulary of this model are used.
    windows = DecoderConfig(
        width=1, depth=1, num_heads=1, seq_len=tokens, vocab_size=vocab_size or 2**31
    )
    text = sources.load(config, windows, seed=seed, note=note)
    is_mixed_chat = isinstance(text, Mixture) and text.has_conversations
    if is_mixed_chat or not isinstance(text, TextWindows | Mixture):
        raise DataError(
            f"data {config.name!r} is conversations, and noise is put on text; leave data.noise out"
        )
    return Denoising(text, noise, inputs=inputs, vocab_size=vocab_size, seed=seed)
