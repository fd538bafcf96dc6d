"""The losses of a sweep's points: what a row says of them, and those of points in training, on disk."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import xxhash

from mupax import disk

CURVE_POINTS = 200
LAST = 10
"""A point's loss is the mean over the last tenth of its steps."""


def summarized(losses: np.ndarray) -> tuple[float, tuple[float, ...]]:
    """A point's loss and curve, from its losses float64 [steps], inf from where it diverged."""
    parts = [
        losses[-max(1, len(losses) // LAST) :],
        *np.array_split(losses, min(CURVE_POINTS, len(losses))),
    ]
    loss, *curve = (
        float(f"{part.mean():.9g}") for part in parts
    )  # nine digits tell all float32 apart
    return loss, tuple(curve)


def save_losses(folder: Path, losses: np.ndarray) -> str:
    """Write the losses of points in training, and give the digest that belongs in their checkpoint.

    Args:
        folder: of the points, made if missing.
        losses: float64 [steps, count], nan from where a point diverged.
    """
    content = io.BytesIO()
    np.save(content, losses)
    folder.mkdir(parents=True, exist_ok=True)
    disk.write_whole(folder / f"losses-{len(losses)}.npy", content.getvalue())
    return xxhash.xxh3_128_hexdigest(content.getvalue())


def saved_losses(folder: Path, steps: int, count: int, digest: str | None) -> np.ndarray | None:
    """What `save_losses` wrote after so many steps; None where it is lost or damaged.

    Args:
        folder: of the points.
        steps: they had done.
        count: of the points.
        digest: in their checkpoint; older versions wrote none, and losses.json.
    """
    try:
        if digest is not None:
            content = disk.read_bytes(folder / f"losses-{steps}.npy")
            return (
                np.load(io.BytesIO(content))
                if xxhash.xxh3_128_hexdigest(content) == digest
                else None
            )
        older = np.array(json.loads(disk.read_bytes(folder / "losses.json")), np.float64)[:steps]
        return older if older.shape == (steps, count) else None
    except (*disk.ABSENT, ValueError, TypeError, RecursionError):
        return None
