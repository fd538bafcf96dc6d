"""What a sweep measured, a row per point, written as points finish: points.jsonl."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from mupax import disk
from mupax.errors import MupaxError
from mupax.train.config.data import PixelsConfig, TransformsConfig
from mupax.train.config.record import to_json
from mupax.train.config.run import CheckpointConfig, Config, DistributedConfig, LogConfig, MeshConfig, StopConfig
from mupax.zoo.experts.config import RoutingConfig
from mupax.zoo.lora.config import LoraConfig

FILE_NAME = "points.jsonl"
CURVE_POINTS = 200
LAST = 10
"""A point's loss is the mean over the last tenth of its steps."""


_NEWER = {
    "value_dim": None, "qk_norm_kind": "rmsnorm", "branch_activation": "none", "readout_bias": False, "qkv_bias": False,
    "rope_scaling": "none", "rope_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0,
    "rope_original_len": 8192, "window": None, "parallel": False, "rotary_fraction": 1.0, "registers": None,
    "layer_scale": None, "drop_path": 0.0, "sincos": False, "full_every": None, "window_theta": None,
    "post_norm": False, "attention_softcap": None, "logit_softcap": None,
    "experts": None, "active_experts": None, "expert_dim": None, "shared_experts": None, "routing": dataclasses.asdict(RoutingConfig()),
    "lora": json.loads(json.dumps(dataclasses.asdict(LoraConfig()))),
}  # fmt: skip
"""Fields of models that rows were named without, and what those models had."""
_NEWER_DATA = {
    "noise": None, "noise_rate": None, "noise_span": None, "separator": None, "field": "text", "on_broken": "stop",
    "pixels": PixelsConfig(), "mix": (), "document_mask": False, "reset_positions": False, "chat_template": None, "loss_on": "answers",
    "transforms": TransformsConfig(), "stream": False,
}  # fmt: skip
"""The same of data."""

_NUMBER, _NONE = (int, float), type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "key": (str,), "command": (str,), "loss": (*_NUMBER, _NONE), "eval_loss": (*_NUMBER, _NONE), "diverged_at": (int, _NONE),
    "curve": (list,), "steps": (int,), "seconds": _NUMBER, "how": (str,),
}  # fmt: skip


class RowsError(MupaxError):
    """A file of rows that is not as it was written. The text says what to do with it."""


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
        """The row as plain values; null stands for what is not finite."""
        loss, *curve = (value if math.isfinite(value) else None for value in (self.loss, *self.curve))
        return {**dataclasses.asdict(self), "loss": loss, "curve": curve}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """The inverse of `to_json`; raises ValueError where it is of nothing that this gives."""
        wrong = [name for name, kinds in _KINDS.items() if type(fields.get(name)) not in kinds]
        wrong += sorted(fields.keys() - _KINDS.keys())
        if wrong or any(type(value) not in (*_NUMBER, _NONE) for value in fields["curve"]):
            raise ValueError(f"{(wrong or ['curve'])[0]} is of another kind")
        loss, *curve = (math.inf if value is None else value for value in (fields["loss"], *fields["curve"]))
        return cls(**{**fields, "loss": loss, "curve": tuple(curve)})


def key_of(config: Config, data_digest: str) -> str:
    """Name of what a config trains: the same for configs that differ in where they run and what they report.

    Args:
        config: of the point.
        data_digest: of the data it sees.
    """
    bare = dataclasses.replace(
        without_reports(config.resolved()),
        mesh=MeshConfig(gradient_dtype=config.mesh.gradient_dtype),
        distributed=DistributedConfig(),
    )
    fields = to_json(bare)
    del fields["preset"]["noise_scale"]  # decides whether a run is refused, and changes none
    # As rows were named before there were such fields.
    if bare.preset.joint == "none":
        del fields["preset"]["joint"]
    for name, default in _NEWER_DATA.items():
        if getattr(bare.data, name) == default:
            del fields["data"][name]
    del fields["stop"], fields["resume_from"], fields["data"]["evaluate"]  # a point has none
    for name in ("keep_best", "best_metric"):
        del fields["checkpoint"][name]
    if bare.vmem_kib is None:
        del fields["vmem_kib"]
    for name in ("attention_block", "product_dtype"):
        if getattr(bare.model.compute, name) is None:
            del fields["model"]["compute"][name]
    del fields["mesh"]["experts"]  # where experts lie
    if bare.mesh.gradient_dtype is None:
        del fields["mesh"]["gradient_dtype"]
    for name, default in {"moment_dtype": None, "layer_decay": 1.0}.items():
        if getattr(bare.optimizer, name) == default:
            del fields["optimizer"][name]
    for name, default in _NEWER.items():
        if fields["model"].get(name, ...) == default:
            del fields["model"][name]
    return hashlib.sha256(json.dumps([fields, data_digest], sort_keys=True).encode()).hexdigest()[:16]


def without_reports(config: Config) -> Config:
    """The config without where it is kept and what it reports."""
    bare = dataclasses.replace(config, workdir=None, resume=False, resume_from=None, stop=StopConfig())
    return dataclasses.replace(
        bare, checkpoint=CheckpointConfig(), log=LogConfig(), data=dataclasses.replace(config.data, evaluate=())
    )


def summarized(losses: np.ndarray) -> tuple[float, tuple[float, ...]]:
    """A point's loss and curve, from its losses float64 [steps], inf from where it diverged."""
    parts = [losses[-max(1, len(losses) // LAST) :], *np.array_split(losses, min(CURVE_POINTS, len(losses)))]
    loss, *curve = (float(f"{part.mean():.9g}") for part in parts)  # nine digits tell all float32 apart
    return loss, tuple(curve)


class Rows(dict[str, Row]):
    """A sweep's rows by key, and their file. A row is on disk when `add` returns; half a line, where a machine died, is left out.

    Every line has a digest of its row; those of older versions have none.

    Args:
        folder: of the sweep, which exists.
        note: told of rows without a digest.

    Raises:
        RowsError: a line is not as it was written.
        DiskError: the disk cannot read the file.
    """

    def __init__(self, folder: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self.path = folder / FILE_NAME
        text = disk.read_bytes(self.path) if disk.status(self.path) else b""
        *complete, rest = text.split(b"\n")
        if rest:
            os.truncate(self.path, len(text) - len(rest))
        super().__init__()
        older = 0
        for number, line in enumerate(complete, start=1):
            try:
                fields = disk.json_object(line, "the line")
                digest = fields.pop("digest", None)
                if digest not in (None, _digest(fields)):
                    raise ValueError("the line does not have the digest it names")
                row = Row.from_json(fields)
            except ValueError as error:
                raise RowsError(
                    f"{self.path} line {number} is not as it was written ({error}); remove the line, and its point is trained "
                    "again"
                ) from error
            older += digest is None
            self[row.key] = row
        if older:
            note(
                f"{older} rows of {self.path.name} were written without a digest by an older version: taken as they are"
            )

    def has(self, key: str, *, evaluated: bool) -> bool:
        """Whether a point is done, and evaluated where that is wanted and can be.

        Args:
            key: of the point (`key_of`).
            evaluated: whether it wants an evaluation loss; a point that diverged can have none.
        """
        row = self.get(key)
        return row is not None and (row.diverged or row.eval_loss is not None or not evaluated)

    def add(self, row: Row) -> None:
        """Write a finished point."""
        fields = row.to_json()
        line = json.dumps({**fields, "digest": _digest(json.loads(json.dumps(fields)))}) + "\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                end = os.fstat(file.fileno()).st_size
                try:
                    if file.write(line.encode()) < len(line):
                        raise OSError(errno.EIO, "only a part of a line was written")
                    os.fsync(file.fileno())
                except OSError:  # half a row would spoil the file
                    with contextlib.suppress(OSError):
                        os.ftruncate(file.fileno(), end)
                    raise
        except OSError as error:
            raise disk.DiskError(
                f"could not write {self.path}: {error.strerror}; the rows in it are whole, and the same command goes on"
            ) from error
        self[row.key] = row


def _digest(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())


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
            return np.load(io.BytesIO(content)) if xxhash.xxh3_128_hexdigest(content) == digest else None
        older = np.array(json.loads(disk.read_bytes(folder / "losses.json")), np.float64)[:steps]
        return older if older.shape == (steps, count) else None
    except (*disk.ABSENT, ValueError, TypeError, RecursionError):
        return None
