"""What a sweep measured, a row per point, written as points finish: points.jsonl."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mupax.train.config.record import to_json
from mupax.train.config.run import CheckpointConfig, Config, DistributedConfig, LogConfig, MeshConfig

FILE_NAME = "points.jsonl"
CURVE_POINTS = 200
LAST = 10
"""A point's loss is the mean over the last tenth of its steps."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One finished point.

    Attributes:
        key: of its config (`key_of`).
        command: what trains it alone; "" where no recipe has its name.
        loss: mean training loss (nats per target) over the last tenth of the steps, inf where it diverged.
        eval_loss: loss on the evaluation examples after the last step; None where it was not asked for or diverged.
        diverged_at: first step whose loss or gradient was not finite, from 1; None where all were.
        curve: training loss, means over at most `CURVE_POINTS` equal parts of the run, inf from where it diverged.
        steps: optimizer steps.
        seconds: of its steps, those before an interruption left out; where several trained together its share.
        how: together with others in one program, or in turn.
    """

    key: str
    command: str
    loss: float
    eval_loss: float | None
    diverged_at: int | None
    curve: tuple[float, ...]
    steps: int
    seconds: float
    how: Literal["together", "in turn"]

    @property
    def diverged(self) -> bool:
        """Whether a loss or gradient was not finite."""
        return self.diverged_at is not None

    def to_json(self) -> dict[str, Any]:
        """Plain values; null stands for what is not finite."""
        loss, *curve = (value if math.isfinite(value) else None for value in (self.loss, *self.curve))
        return {**dataclasses.asdict(self), "loss": loss, "curve": curve}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """The inverse of `to_json`."""
        loss, *curve = (math.inf if value is None else value for value in (fields["loss"], *fields["curve"]))
        return cls(**{**fields, "loss": loss, "curve": tuple(curve)})


def key_of(config: Config, data_digest: str) -> str:
    """Name of what a config trains: the same for configs that differ in where they run and what they report.

    Args:
        config: of the point.
        data_digest: of the data it sees.
    """
    bare = dataclasses.replace(without_reports(config.resolved()), mesh=MeshConfig(), distributed=DistributedConfig())
    return hashlib.sha256(json.dumps([to_json(bare), data_digest], sort_keys=True).encode()).hexdigest()[:16]


def without_reports(config: Config) -> Config:
    """The config without where it is kept and what it reports."""
    return dataclasses.replace(config, workdir=None, resume=False, checkpoint=CheckpointConfig(), log=LogConfig())


def summarized(losses: np.ndarray) -> tuple[float, tuple[float, ...]]:
    """A point's loss and curve, from its losses float64 [steps], inf from where it diverged."""
    parts = [losses[-max(1, len(losses) // LAST) :], *np.array_split(losses, min(CURVE_POINTS, len(losses)))]
    loss, *curve = (float(f"{part.mean():.9g}") for part in parts)  # nine digits tell all float32 apart
    return loss, tuple(curve)


class Rows(dict[str, Row]):
    """A sweep's rows by key, and their file. A row is on disk when `add` returns; half a line, where a machine died, is left out.

    Args:
        folder: of the sweep, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        text = self.path.read_bytes() if self.path.exists() else b""
        complete = text[: text.rfind(b"\n") + 1]
        if len(complete) < len(text):
            os.truncate(self.path, len(complete))
        rows = (Row.from_json(json.loads(line)) for line in complete.decode().splitlines())
        super().__init__((row.key, row) for row in rows)

    def has(self, key: str, *, evaluated: bool) -> bool:
        """Whether a point is done, and evaluated where that is wanted and can be."""
        row = self.get(key)
        return row is not None and (row.diverged or row.eval_loss is not None or not evaluated)

    def add(self, row: Row) -> None:
        """Write a finished point."""
        with self.path.open("a") as file:
            file.write(json.dumps(row.to_json()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self[row.key] = row
