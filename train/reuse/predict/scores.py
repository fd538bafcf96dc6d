"""How good a classifier's probabilities are: top-k accuracy, calibration, and every class by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mupax.train.core.state import Batch
from mupax.train.reuse.predict.classifier import softmax

BINS = 15
"""Of confidence, of equal width, as Guo et al. (2017, arXiv 1706.04599) have them."""
TOP = 5


class Outcomes:
    """Logits and labels of an evaluation, batch by batch.

    Args:
        logits_fn: of a batch, [B, classes].
    """

    def __init__(self, logits_fn: Callable[[Batch], Any]) -> None:
        self._logits_fn = logits_fn
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, batch: Batch) -> None:
        """Take in a batch, without what fills it up."""
        real = np.asarray(batch["weights"]) > 0
        self._parts.append((np.asarray(self._logits_fn(batch))[real], np.asarray(batch["targets"])[real]))

    def scores(self, names: Sequence[str] | None) -> dict[str, Any]:
        """`scores` of all; classes without names are called by their numbers."""
        logits, targets = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
        return scores(logits, targets, names or [str(label) for label in range(logits.shape[1])])


def scores(logits: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """`top5_accuracy` (where there are more than five classes), `ece`, and `classes`: a row per class.

    The expected calibration error is the mean over examples of |accuracy - mean confidence| of the bin that they are in. Of
    a class, `recall` is the share of its examples that are called so and `precision` the share of what is called so that is;
    None where there are none.

    Args:
        logits: float32 [N, classes].
        targets: int [N].
        names: one per class.
    """
    probabilities = softmax(logits)
    guesses, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    hits = guesses == targets
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, confidence - hits, minlength=BINS)
    rank = (logits > logits[np.arange(len(targets)), targets][:, None]).sum(axis=1)
    top = {"top5_accuracy": float(np.mean(rank < TOP))} if logits.shape[1] > TOP else {}
    return {**top, "ece": float(np.abs(gaps).sum() / len(targets)), "classes": _classes(guesses, targets, names)}


def _classes(guesses: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for label, name in enumerate(names):
        there, called = targets == label, guesses == label
        hits, wrong = int((there & called).sum()), guesses[there & ~called]
        rows.append(
            {
                "class": name,
                "label": label,
                "examples": int(there.sum()),
                "recall": hits / int(there.sum()) if there.any() else None,
                "precision": hits / int(called.sum()) if called.any() else None,
                "taken_for": names[int(np.bincount(wrong).argmax())] if len(wrong) else None,
            }
        )
    return rows


def table(classes: Sequence[dict[str, Any]], most: int = 20) -> list[Sequence[str]]:
    """The rows of `scores` to print, under a header; of many classes those of the least recall.

    Args:
        classes: the rows.
        most: how many are shown.
    """
    from mupax.train.reuse.image_input import printable

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    rows = [row for row in classes if row["examples"]]
    if len(rows) > most:
        rows = sorted(rows, key=lambda row: row["recall"])[:most]
    lines: list[Sequence[str]] = [("class", "taken for", "examples", "recall", "precision")]
    for row in rows:
        prediction = printable(row["taken_for"] or "")
        lines.append(
            (printable(row["class"]), prediction, f"{row['examples']:,}", share(row["recall"]), share(row["precision"]))
        )
    return lines
