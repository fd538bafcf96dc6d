"""What a law is fitted to: the rows of a folder, as settings (a model, a batch, tokens) with a curve of losses over rates each."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax import disk
from mupax.errors import MupaxError
from mupax.train.config import cli
from mupax.train.config.preset import rules_of, same_preset
from mupax.train.config.record import differences, to_json, words_of
from mupax.train.config.run import Config
from mupax.train.studies.sweep.grids import at_rate, without_flags
from mupax.train.studies.sweep.grids import point as grid_point
from mupax.train.studies.sweep.rows import FILE_NAME, Row, Rows, has_rows
from mupax.train.studies.transfer.fit import Curve
from mupax.zoo import families

METRICS = {
    "evaluation": "loss on the evaluation examples",
    "training": "mean training loss of the last tenth of steps",
}
SCALES = (
    "model.width", "model.depth", "model.encoder_depth", "model.num_heads", "model.head_dim", "model.num_kv_heads", "model.mlp_ratio",
    "steps", "seed",
    "data.batch_size", "data.eval_batch_size", "data.seed", "optimizer.peak_lr", "optimizer.warmup_steps", "optimizer.decay_steps",
)  # fmt: skip
"""Fields in which the runs of one law differ."""
ELSEWHERE = (
    "recipe", "workdir", "resume", "log.", "checkpoint.", "mesh.", "distributed.", "faults.", "model.compute.", "xla_flags", "vmem_kib",
    "accumulation_steps", "preset.noise_scale",
)  # fmt: skip
"""Fields that change nothing of what is learnt."""


class PointsError(MupaxError):
    """A folder without rows that a law could be fitted to. The text says what to write."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run at several rates, from several seeds.

    Attributes:
        config: of the run; its rate and seed are those of one of the rows.
        x: log2 of the peak rates [R], increasing.
        losses: [R, S], inf where a seed diverged, nan where it was not run.
        seconds: of training, of one row.
        seeds: of the losses' columns.
    """

    config: Config
    x: np.ndarray
    losses: np.ndarray
    seconds: float = 0.0
    seeds: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Trainable numbers of the model."""
        return families.params(self.config.model)

    @property
    def tokens(self) -> int:
        """Tokens, or images, that the run sees."""
        return self.config.steps * self.config.data.batch_size * self.config.model.units

    @property
    def scale(self) -> np.ndarray:
        """log2 of parameters, of tokens, and of the batch in examples [3]."""
        return np.log2([self.parameters, self.tokens, self.config.data.batch_size])

    @classmethod
    def bare(cls, config: Config) -> Setting:
        """A run of which nothing is measured."""
        return cls(config, np.zeros(0), np.zeros((0, 0)))

    @property
    def curve(self) -> Curve:
        """Losses over rates, as a transfer study has them."""
        seeds = (~np.isnan(self.losses)).all(axis=0)
        return Curve(self.x, self.losses, max(1, int(seeds.sum())))


@dataclasses.dataclass(frozen=True)
class Points:
    """The rows of one preset.

    Attributes:
        label: the preset, for a person.
        metric: of `METRICS`, what a loss is.
        settings: smallest first.
        digest: sha256 of every row's name and loss.
        rows: how many there are.
        folders: where they are from.
    """

    label: str
    metric: str
    settings: tuple[Setting, ...]
    digest: str
    rows: int
    folders: tuple[str, ...]


def load(folders: Sequence[Path]) -> list[Points]:
    """The rows of these folders by preset, in the order in which the first of each comes.

    Args:
        folders: of transfer studies or sweeps.

    Raises:
        PointsError: a folder has no rows, or none that a recipe's command trains.
        RowsError, DiskError: as `Rows`.
    """
    by_label: dict[str, list[tuple[Config, Row]]] = {}
    first_labels: dict[tuple[Any, ...], str] = {}
    labels: dict[str, str] = {}
    for folder in folders:
        if not has_rows(folder):
            raise PointsError(
                f"{folder} has no {FILE_NAME}; write the folder of `mupax transfer` or `sweep` (--out)"
            )
        rows = Rows(folder)
        of_folder = (
            _of_study(folder, rows)
            if (folder / "transfer.json").is_file()
            else _of_commands(folder, rows)
        )
        for label, config, row in of_folder:
            if (
                label not in labels
            ):  # a default that is written, as tuned presets do, changes the label and no rule
                labels[label] = first_labels.setdefault(rules_of(config), label)
            by_label.setdefault(labels[label], []).append((config, row))
    return [
        points_of(label, pairs, [str(folder) for folder in folders])
        for label, pairs in by_label.items()
    ]


def points_of(
    label: str, pairs: Sequence[tuple[Config, Row]], folders: Sequence[str] = ()
) -> Points:
    """Rows of one preset as settings.

    Args:
        label: the preset.
        pairs: the config of each row, and the row.
        folders: where they are from.
    """
    pairs = list({row.key: (config, row) for config, row in pairs}.values())
    evaluated = all(row.diverged or row.eval_loss is not None for _, row in pairs)
    settings: dict[str, list[tuple[Config, Row]]] = {}
    for config, row in pairs:
        settings.setdefault(_without_rate(config), []).append((config, row))
    every = sorted(
        (_setting(each, evaluated) for each in settings.values()), key=lambda s: tuple(s.scale)
    )
    named = sorted([row.key, repr(_loss(row, evaluated))] for _, row in pairs)
    digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()
    metric = "evaluation" if evaluated else "training"
    return Points(label, metric, tuple(every), digest, len(pairs), tuple(folders))


def field_differences(config: Config, setting: Config) -> list[tuple[str, Any, Any]]:
    """Fields in which two runs differ that are neither of `SCALES` nor of `ELSEWHERE`, with both values.

    Args:
        config: of a run to forecast.
        setting: of a run that was measured.
    """
    fields = differences(_recorded(config), _recorded(setting))
    fields = [
        field for field in fields if field[0] not in SCALES and not field[0].startswith(ELSEWHERE)
    ]
    if any(name.startswith("preset.") for name, *_ in fields) and same_preset(config, setting):
        return [
            field
            for field in fields
            if field[0] == "preset.form" or not field[0].startswith("preset.")
        ]
    return fields


def _recorded(config: Config) -> dict[str, Any]:
    return to_json(config.resolved())


def _without_rate(config: Config) -> str:
    fields = _recorded(config)
    del fields["seed"], fields["optimizer"]["peak_lr"]
    return json.dumps(fields, sort_keys=True)


def _loss(row: Row, evaluated: bool) -> float:
    value = row.eval_loss if evaluated else row.loss
    return math.inf if value is None or row.diverged else value


def _setting(pairs: Sequence[tuple[Config, Row]], evaluated: bool) -> Setting:
    rates = sorted({config.optimizer.peak_lr for config, _ in pairs})
    seeds = sorted({config.seed for config, _ in pairs})
    losses = np.full((len(rates), len(seeds)), np.nan)
    for config, row in pairs:
        losses[rates.index(config.optimizer.peak_lr), seeds.index(config.seed)] = _loss(
            row, evaluated
        )
    full = np.argsort(np.isnan(losses).sum(axis=0), kind="stable")  # seeds at every rate first
    seconds = float(np.median([row.seconds for _, row in pairs]))
    return Setting(
        pairs[0][0], np.log2(rates), losses[:, full], seconds, tuple(seeds[at] for at in full)
    )


def _of_study(folder: Path, rows: Mapping[str, Row]) -> Iterable[tuple[str, Config, Row]]:
    """Rows of a transfer study, each under every preset that it serves."""
    from mupax.train.studies.transfer.planned import replanned

    record = disk.read_json(folder / "transfer.json")
    configs = {(study.label, study.axis): study for study in replanned(record["command"])}
    for study in record["studies"]:
        planned = configs[study["preset"], study["axis"]]
        for size, config in zip(study["sizes"], planned.configs, strict=True):
            for point in size["points"]:
                if point["key"] in rows:
                    run = dataclasses.replace(
                        at_rate(config, 2.0 ** point["log2_lr"]), seed=point["seed"]
                    )
                    yield study["preset"], run, rows[point["key"]]


def _of_commands(folder: Path, rows: Mapping[str, Row]) -> Iterable[tuple[str, Config, Row]]:
    """Rows of a sweep, by the commands that train them alone."""
    from mupax.train.studies.transfer.planned import label_of

    parsed: dict[str, Config] = {}
    for row in rows.values():
        command, *recorded = words_of(row.command) or [""]
        if command != "train":
            continue
        # Rate and seed are what differs between most rows, and a command is dear to parse.
        words, numbers = without_flags(recorded, ("--optimizer.peak-lr", "--seed"))
        if (text := shlex.join(words)) not in parsed:
            parsed[text] = cli.parse(words[0], cli.recipe(words[0]), words[1:]).config
        config = parsed[text]
        rate = float(numbers.get("--optimizer.peak-lr", config.optimizer.peak_lr))
        run = grid_point(config, rate, int(numbers.get("--seed", config.seed)))
        yield label_of(run.preset), run, row
    if rows and not parsed:
        raise PointsError(
            f"{folder}: its rows have no commands, as of a recipe that is not in the table; add it there"
        )
