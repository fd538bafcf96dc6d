"""What a denoising model must beat: count models of the targets, and copying from the visible tokens.

* trigram and 4-gram: target tokens from those before them (`ngrams`), counted on the targets of one epoch.
* copy: where the targets so far go as the inputs do, they go on so. The guess is the token after the longest match of the
  last target tokens among the inputs, the first of several. With c tokens matching, the guess gets a(c) of the
  probability, which is how often it is right in training, and the 4-gram divides the rest.

Losses are in nats per target token that counts, special ones with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from mupax.train.data import cache
from mupax.train.data.interface import Batch, Data, Reference
from mupax.train.data.text import ngrams

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
    key = cache.digest(*(str(fact) for fact in (data.facts["digest"], data.facts["noise"], data.eval_size)))
    losses = cache.remembered(f"denoising-{key}", lambda: _losses(data, vocab_size, np.array(sorted(special))))
    return [uniform, *(Reference(name, loss, "nats/target") for name, loss in losses.items())]


def _losses(data: Data, vocab_size: int, special: np.ndarray) -> dict[str, float]:
    assert data.train_size is not None
    batches = -(-data.train_size // data.batch_size)
    train = _examples((data.train_batch(k) for k in range(batches)), _MOST_TARGETS)
    evaluated = -(-data.eval_size // data.eval_batch_size)
    test = _examples((data.eval_batch(j) for j in range(evaluated)), _MOST_COPIED)
    text = _counted(test)
    *_, trigram, fourgram = ngrams.nats_per_byte(_counted(train), text, np.arange(len(text)), 4, vocab_size)
    some = {name: array[: _MOST_COPIED // train["targets"].shape[1]] for name, array in train.items()}
    copy = copy_losses(some, test, fourgram, special)
    return {"trigram": float(trigram.mean()), "4-gram": float(fourgram.mean()), "copy": float(copy.mean())}


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


def copy_losses(train: Batch, test: Batch, otherwise: np.ndarray, special: np.ndarray) -> np.ndarray:
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
    trust = np.bincount(matched[counts], right, minlength=_LONGEST_MATCH + 1) / (total + 2)  # never certain
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
        same = inputs[:, :-1] == history[:, t, None]  # run[:, j]: tokens before j that are the last ones of the history
        run[:, 1:] = np.where(same, np.minimum(run[:, :-1] + 1, _LONGEST_MATCH), 0)
        fits = np.where(plain, run, 0)
        best = fits.argmax(axis=1)[:, None]
        guess[:, t] = np.take_along_axis(inputs, best, axis=1)[:, 0]
        matched[:, t] = np.take_along_axis(fits, best, axis=1)[:, 0]
    return guess, matched
