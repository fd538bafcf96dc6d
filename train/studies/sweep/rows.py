"""What a sweep found, a row per point, kept in a file as points finish: points.jsonl."""

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

How = Literal["together", "in turn"]


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
    how: How

    @property
    def diverged(self) -> bool:
        """Whether training stopped being numbers."""
        return self.diverged_at is not None

    def to_json(self) -> dict[str, Any]:
        """Plain values; null stands for what is not finite."""
        fields = dataclasses.asdict(self)
        fields["loss"] = _plain(self.loss)
        fields["curve"] = [_plain(value) for value in self.curve]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """What `to_json` gave."""
        loss, curve = fields["loss"], fields["curve"]
        values = {"loss": _number(loss), "curve": tuple(map(_number, curve))}
        return cls(**{**fields, **values})


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def key_of(config: Config, data_digest: str) -> str:
    """Name of what a config trains: the same for configs that differ in where they run and what they report.

    Args:
        config: of the point.
        data_digest: of the data it sees.
    """
    bare = dataclasses.replace(
        config.resolved(),
        workdir=None,
        resume=False,
        mesh=MeshConfig(),
        distributed=DistributedConfig(),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
    )
    text = json.dumps([to_json(bare), data_digest], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def summarized(losses: np.ndarray) -> tuple[float, tuple[float, ...]]:
    """A point's loss and curve, from its losses float [steps]."""
    losses = np.asarray(losses, np.float64)
    last = losses[-max(1, len(losses) // LAST) :]
    parts = np.array_split(losses, min(CURVE_POINTS, len(losses)))
    loss = _mean(last) if np.isfinite(losses).all() else math.inf
    return loss, tuple(_mean(part) if np.isfinite(part).all() else math.inf for part in parts)


def _mean(losses: np.ndarray) -> float:
    return float(f"{losses.mean():.9g}")  # nine digits tell all float32 apart


class Rows:
    """The file of a sweep's rows. A row is on disk when `add` returns; half a line, where a machine died, is left out.

    Args:
        folder: of the sweep, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._rows: dict[str, Row] = {}
        if self.path.exists():
            text = self.path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            if len(whole) < len(text):
                with self.path.open("r+b") as file:
                    file.truncate(len(whole))
            rows = [Row.from_json(json.loads(line)) for line in whole.decode().splitlines()]
            self._rows = {row.key: row for row in rows}

    def has(self, key: str, *, evaluated: bool) -> bool:
        """Whether a point is done, and evaluated where that is wanted and can be."""
        row = self._rows.get(key)
        return row is not None and (row.diverged or row.eval_loss is not None or not evaluated)

    def __getitem__(self, key: str) -> Row:
        return self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        """Keep a finished point."""
        with self.path.open("a") as file:
            file.write(json.dumps(row.to_json()) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows[row.key] = row
