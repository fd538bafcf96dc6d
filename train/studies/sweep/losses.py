"""Losses of a sweep's points: their summary in a row, and the file of a point in training.

`work.py` collects them. Its checkpoints hold the state, and this file holds the losses so far.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import xxhash

from mupax import disk

CURVE_POINTS = 200
"""Largest number of values of the training curve that a finished point keeps in its row."""
LAST = 10
"""A point's loss is the mean over the last 1 / `LAST` of its steps."""


def summarized(losses: np.ndarray) -> tuple[float, tuple[float, ...]]:
    """Return a point's loss and its curve, from the losses of all steps.

    The loss is the mean over the last tenth of the steps. The curve has means over at most
    `CURVE_POINTS` equal parts of the run.

    Args:
        losses: float64 [steps], inf from the step at which the point diverged.
    """
    last_losses = losses[-max(1, len(losses) // LAST) :]
    # `array_split` allows parts of unequal length, for runs whose steps 200 does not divide.
    parts = np.array_split(losses, min(CURVE_POINTS, len(losses)))
    return _rounded_mean(last_losses), tuple(_rounded_mean(part) for part in parts)


def _rounded_mean(losses: np.ndarray) -> float:
    """Return the mean to nine significant digits, which tell all float32 values apart."""
    return float(f"{losses.mean():.9g}")


def save_losses(folder: Path, losses: np.ndarray) -> str:
    """Write the losses of points in training to a file, and return the digest of its content.

    The file is losses-STEPS.npy. The digest is stored in the points' checkpoint.

    Args:
        folder: Folder of the points in training; created if it is missing.
        losses: float64 [steps, points], nan from the step at which a point diverged.
    """
    file = io.BytesIO()
    np.save(file, losses)
    content = file.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    # A file per step: the checkpoint before this one still names the digest of its own losses.
    disk.write_whole(folder / f"losses-{len(losses)}.npy", content)
    return xxhash.xxh3_128_hexdigest(content)


def saved_losses(folder: Path, steps: int, count: int, digest: str | None) -> np.ndarray | None:
    """Read the losses that `save_losses` wrote. Return `None` if they are lost or damaged.

    The losses are float64 [steps, points].

    Args:
        folder: Folder of the points in training, which has the file losses-STEPS.npy.
        steps: Number of steps that the points have done.
        count: Number of points. Only checked in files of older versions.
        digest: Digest in the points' checkpoint. Older versions wrote none, and their losses are in
            losses.json.
    """
    try:
        if digest is not None:
            content = disk.read_bytes(folder / f"losses-{steps}.npy")
            if xxhash.xxh3_128_hexdigest(content) != digest:
                return None
            # Loaded from the bytes that were verified, because the file may change in between.
            return np.load(io.BytesIO(content))

        content = disk.read_bytes(folder / "losses.json")
        losses = np.array(json.loads(content), np.float64)[:steps]
    except (*disk.ABSENT, ValueError, TypeError, RecursionError):
        return None
    return losses if losses.shape == (steps, count) else None
