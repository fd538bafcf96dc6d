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
        self._parts.append(
            (np.asarray(self._logits_fn(batch))[real], np.asarray(batch["targets"])[real])
        )

    def scores(self, names: Sequence[str] | None) -> dict[str, Any]:
        """`scores` of all; classes without names are called by their numbers."""
        logits, targets = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
        return scores(logits, targets, names or [str(label) for label in range(logits.shape[1])])


def scores(logits: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """`top5_accuracy` (where there are more than five classes), `ece`, and `classes`: a row per class.

    The expected calibration error is the mean over examples of |accuracy - mean confidence| of the bin that they are in. Of
    a class, `recall` is the share of its examples that are called so and `precision` the share of what is called so that is;
    None where there are none. Of equal logits the first class counts as the largest, and NaN is larger than any number: so
    does accuracy. Where logits are not finite, `not_finite` is the number of such examples, and `ece` is that of the others.

    Args:
        logits: float32 [N, classes].
        targets: int [N].
        names: one per class.
    """
    logits = np.asarray(logits)
    guesses = logits.argmax(axis=1)
    result: dict[str, Any] = {}
    if logits.shape[1] > TOP:
        result["top5_accuracy"] = float(np.mean(_ranks(logits, targets) < TOP))
    finite = np.isfinite(logits).all(axis=1)
    if not finite.all():
        result["not_finite"] = int((~finite).sum())
    result["ece"] = _calibration_error(logits[finite], guesses[finite] == targets[finite])
    result["classes"] = _classes(guesses, targets, names)
    return result


def _ranks(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return how many classes come before each target, int [N], in the order that argmax goes by."""
    # argmax takes NaN for the largest number and the first of equal ones.
    ordered = np.where(np.isnan(logits), np.inf, logits)
    own = ordered[np.arange(len(targets)), targets][:, None]
    earlier = np.arange(logits.shape[1]) < targets[:, None]
    return ((ordered > own) | ((ordered == own) & earlier)).sum(axis=1)


def _calibration_error(logits: np.ndarray, hits: np.ndarray) -> float | None:
    """Return the expected calibration error, or `None` without examples.

    Args:
        logits: finite, float32 [N, classes].
        hits: whether the likeliest class is right, bool [N].
    """
    if not len(logits):
        return None
    confidence = softmax(logits).max(axis=1)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, confidence - hits, minlength=BINS)
    return float(np.abs(gaps).sum() / len(logits))


def _classes(
    guesses: np.ndarray, targets: np.ndarray, names: Sequence[str]
) -> list[dict[str, Any]]:
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


MOST = 20
"""Classes that are listed."""


def _with_examples(classes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in classes if row["examples"]]


def listed(classes: Sequence[dict[str, Any]], most: int = MOST) -> str:
    """Return how many of the classes `table` lists, and which.

    Args:
        classes: the rows of `scores`.
        most: how many are listed at most.
    """
    rows = _with_examples(classes)
    line = f"{min(len(rows), most)} of {len(classes)} classes are listed"
    if len(rows) > most:
        line += ", those of the least recall"
    if len(rows) < len(classes):
        line += f"; {len(classes) - len(rows)} have no images here"
    return line


def table(classes: Sequence[dict[str, Any]], most: int = MOST) -> list[Sequence[str]]:
    """The rows of `scores` to print, under a header; of many classes those of the least recall.

    Args:
        classes: the rows.
        most: how many are shown.
    """
    from mupax.train.reuse.image_input import printable

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    rows = _with_examples(classes)
    if len(rows) > most:
        rows = sorted(rows, key=lambda row: row["recall"])[:most]
    lines: list[Sequence[str]] = [("class", "taken for", "examples", "recall", "precision")]
    for row in rows:
        prediction = printable(row["taken_for"] or "")
        lines.append(
            (
                printable(row["class"]),
                prediction,
                f"{row['examples']:,}",
                share(row["recall"]),
                share(row["precision"]),
            )
        )
    return lines
