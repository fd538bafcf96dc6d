"""Scores of a classifier's probabilities: top-5 accuracy, calibration, and a row per class.

`mupax eval` uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mupax.train.core.state import Batch
from mupax.train.reuse.predict.classifier import softmax

BINS = 15
"""Number of confidence bins of equal width, as in Guo et al. (2017, arXiv 1706.04599)."""
TOP = 5
"""The k of top-k accuracy."""


class Outcomes:
    """Logits and labels of an evaluation, collected batch by batch in host memory.

    Args:
        logits_fn: Function that returns the logits of a batch, [B, classes]. It is called once for
            each batch that is added.
    """

    def __init__(self, logits_fn: Callable[[Batch], Any]) -> None:
        self._logits_fn = logits_fn
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, batch: Batch) -> None:
        """Add the logits and labels of a batch, without the examples that pad it."""
        is_example = np.asarray(batch["weights"]) > 0
        logits = np.asarray(self._logits_fn(batch))[is_example]
        targets = np.asarray(batch["targets"])[is_example]
        self._parts.append((logits, targets))

    def scores(self, names: Sequence[str] | None) -> dict[str, Any]:
        """Return the result of the function `scores` for all examples added so far.

        At least one batch must have been added.

        Args:
            names: Class names. With `None`, classes are called by their labels.
        """
        logits = np.concatenate([logits for logits, _ in self._parts])
        targets = np.concatenate([targets for _, targets in self._parts])
        if not names:
            names = [str(label) for label in range(logits.shape[1])]
        return scores(logits, targets, names)


def scores(logits: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the scores of a classifier.

    Of equal logits the first class counts as the largest, and NaN is larger than any number. The
    accuracy of an evaluation has the same order.

    Args:
        logits: float32 [N, classes].
        targets: int [N].
        names: Class names, `[classes]`.

    Returns:
        A dict with these keys:
        * `top5_accuracy`, if there are more than five classes.
        * `not_finite`, the number of examples whose logits are not finite, unless it is 0.
        * `ece`, the expected calibration error of the examples with finite logits: the mean over
          examples of |accuracy - mean confidence| of their bin. `None` without such examples.
        * `classes`, a row per class. `recall` is the share of its examples that are predicted as
          this class, and `precision` the share of its predictions that are right. Both are `None`
          if there are no such examples. `taken_for` is the class it is most often mistaken for.
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
    """Return the number of classes that come before each target in argmax's order, int [N]."""
    # argmax takes NaN for the largest number and the first of equal ones.
    ordered = np.where(np.isnan(logits), np.inf, logits)
    target_logits = ordered[np.arange(len(targets)), targets][:, None]
    is_earlier = np.arange(logits.shape[1]) < targets[:, None]
    is_before = (ordered > target_logits) | ((ordered == target_logits) & is_earlier)
    return is_before.sum(axis=1)


def _calibration_error(logits: np.ndarray, hits: np.ndarray) -> float | None:
    """Return the expected calibration error, or `None` without examples.

    Args:
        logits: Finite logits, float32 [N, classes].
        hits: Whether the likeliest class is right, bool [N].
    """
    if not len(logits):
        return None
    confidence = softmax(logits).max(axis=1)
    # A confidence of exactly 1 belongs to the last bin.
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    # Sums per bin: |mean difference| times the bin's count is |sum of differences|.
    gaps = np.bincount(bins, confidence - hits, minlength=BINS)
    return float(np.abs(gaps).sum() / len(logits))


def _classes(
    guesses: np.ndarray, targets: np.ndarray, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the row of each class: name, label, number of examples, recall and precision.

    `taken_for` in a row is the class that its examples are most often mistaken for, or `None` if
    they never are.

    Args:
        guesses: Predicted labels, int [N].
        targets: Right labels, int [N].
    """
    rows: list[dict[str, Any]] = []
    for label, name in enumerate(names):
        is_target = targets == label
        is_guess = guesses == label
        num_targets = int(is_target.sum())
        num_guesses = int(is_guess.sum())
        num_hits = int((is_target & is_guess).sum())
        wrong_guesses = guesses[is_target & ~is_guess]
        taken_for = None
        if len(wrong_guesses):
            taken_for = names[int(np.bincount(wrong_guesses).argmax())]
        rows.append(
            {
                "class": name,
                "label": label,
                "examples": num_targets,
                "recall": num_hits / num_targets if num_targets else None,
                "precision": num_hits / num_guesses if num_guesses else None,
                "taken_for": taken_for,
            }
        )
    return rows


MOST = 20
"""Largest number of classes that `table` lists by default."""


def _with_examples(classes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in classes if row["examples"]]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def listed(classes: Sequence[dict[str, Any]], most: int = MOST) -> str:
    """Return a line for the user that says how many classes `table` lists, and which.

    `table` leaves out classes without examples. Of more than `most` classes it lists those of the
    least recall.

    Args:
        classes: The entry "classes" of `scores`, one row per class.
        most: Largest number of classes in the table.
    """
    rows = _with_examples(classes)
    line = f"{min(len(rows), most)} of {len(classes)} classes are listed"
    if len(rows) > most:
        line += ", those of the least recall"
    if len(rows) < len(classes):
        line += f"; {len(classes) - len(rows)} have no images here"
    return line


def table(classes: Sequence[dict[str, Any]], most: int = MOST) -> list[Sequence[str]]:
    """Return the cells of a table of classes with examples, after a header.

    Of more than `most` classes, those of the least recall are returned, the least first.

    Args:
        classes: Rows of `scores`, one per class, `[classes]`.
        most: Largest number of classes in the table, by default `MOST`.
    """
    from mupax.train.reuse.image_input import printable

    rows = _with_examples(classes)
    if len(rows) > most:
        rows = sorted(rows, key=lambda row: row["recall"])[:most]
    lines: list[Sequence[str]] = [("class", "taken for", "examples", "recall", "precision")]
    for row in rows:
        lines.append(
            (
                printable(row["class"]),
                printable(row["taken_for"] or ""),
                f"{row['examples']:,}",
                _percent(row["recall"]),
                _percent(row["precision"]),
            )
        )
    return lines
