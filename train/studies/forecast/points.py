"""Rows that a law is fitted to: settings (model, batch and tokens), each with losses over rates."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupax import MupaxError, disk
from mupax.train.config import cli
from mupax.train.config.preset import rules_of, same_preset
from mupax.train.config.record import differences, from_json, text_of, to_json, words_of
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
"""Kinds of losses, with a description for reports."""
SCALES = (
    "model.width",
    "model.depth",
    "model.encoder_depth",
    "model.num_heads",
    "model.head_dim",
    "model.num_kv_heads",
    "model.mlp_ratio",
    "steps",
    "seed",
    "data.batch_size",
    "data.eval_batch_size",
    "data.seed",
    "optimizer.peak_lr",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
)
"""Fields in which the runs of one law may differ."""
ELSEWHERE = (
    "recipe",
    "workdir",
    "resume",
    "log.",
    "checkpoint.",
    "mesh.",
    "distributed.",
    "faults.",
    "model.compute.",
    "xla_flags",
    "vmem_kib",
    "accumulation_steps",
    "preset.noise_scale",
)
"""Beginnings of the names of config fields that do not change what a run learns."""
_AS_IT_WAS = (
    "write the config file of the command as it was, or remove transfer.json, and the rows are "
    "read as those of a sweep"
)
"""What to do about a study whose command means other runs than when it was trained."""
PRESET = "preset."
"""Beginning of the names of the preset's config fields."""


class PointsError(MupaxError):
    """Error for a folder without rows for a law. The text says what to write instead."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Losses of one run (model, batch and tokens) at several learning rates, from several seeds.

    Attributes:
        config: The run. Its rate and seed are those of one of the rows.
        x: log2 of the peak learning rates [R], increasing.
        losses: Losses [R, S] by rate and seed, inf where a seed diverged, NaN where it was not run.
        seconds: Median training time over the setting's rates and seeds, in seconds.
        seeds: Seeds of the columns of `losses`.
    """

    config: Config
    x: np.ndarray
    losses: np.ndarray
    seconds: float = 0.0
    seeds: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return families.params(self.config.model)

    @property
    def tokens(self) -> int:
        """Number of tokens, or images, of the run."""
        return self.config.steps * self.config.data.batch_size * self.config.model.units

    @property
    def scale(self) -> np.ndarray:
        """log2 of parameters, of tokens, and of the batch in examples, [3]."""
        return np.log2([self.parameters, self.tokens, self.config.data.batch_size])

    @classmethod
    def bare(cls, config: Config) -> Setting:
        """Return a setting without losses, for a run that is still to be trained."""
        return cls(config, np.zeros(0), np.zeros((0, 0)))

    @property
    def curve(self) -> Curve:
        """Losses over learning rates as a `Curve`, which finds the best rate.

        The seeds that were run at every rate decide which rate is best.
        """
        # The third argument of `Curve` counts the first seeds, those that every rate has.
        is_run = ~np.isnan(self.losses)
        first = max(1, int(is_run.all(axis=0).sum()))
        # Without a seed at every rate, rates that lack the first one have no mean to compare.
        compared = is_run[:, :first].all(axis=1)
        return Curve(self.x[compared], self.losses[compared], first)


@dataclasses.dataclass(frozen=True)
class Points:
    """Rows (results of finished runs) of one preset, to which a law is fitted.

    Attributes:
        label: Name of the preset with its constants.
        metric: Kind of the losses, a key of `METRICS`.
        settings: Settings, the smallest first.
        digest: sha256 of every row's key and loss.
        rows: Number of rows.
        folders: Folders of the rows.
    """

    label: str
    metric: str
    settings: tuple[Setting, ...]
    digest: str
    rows: int
    folders: tuple[str, ...]


class _LabelledRow(NamedTuple):
    """Row of a folder with its run and the label of its preset."""

    label: str
    config: Config
    row: Row


def load(folders: Sequence[Path]) -> list[Points]:
    """Return the rows of all folders, an entry per preset in the order of the presets' first rows.

    Presets with equal rules are joined under the first of their labels.

    Args:
        folders: Folders of `mupax transfer` or `mupax sweep`.

    Raises:
        PointsError: A folder has no rows, or none that the command of a recipe trains.
        RowsError: The rows of a folder are damaged.
        DiskError: A file cannot be read.
    """
    pairs_by_label: dict[str, list[tuple[Config, Row]]] = {}
    label_of_rules: dict[tuple[Any, ...], str] = {}
    merged_labels: dict[str, str] = {}
    for folder in folders:
        if not has_rows(folder):
            raise PointsError(
                f"{folder} has no {FILE_NAME}; "
                f"write the folder of `mupax transfer` or `sweep` (--out)"
            )
        rows = Rows(folder)
        is_study = (folder / "transfer.json").is_file()
        labelled = _study_rows(folder, rows) if is_study else _sweep_rows(folder, rows)
        for label, config, row in labelled:
            # Tuned presets write out defaults, which changes the label and no rule. Presets of
            # equal rules go under the first of their labels.
            if label not in merged_labels:
                merged_labels[label] = label_of_rules.setdefault(rules_of(config), label)
            pairs_by_label.setdefault(merged_labels[label], []).append((config, row))
    names = [str(folder) for folder in folders]
    points = []
    for label, pairs in pairs_by_label.items():
        points.append(points_of(label, pairs, names))
    return points


def points_of(
    label: str, pairs: Sequence[tuple[Config, Row]], folders: Sequence[str] = ()
) -> Points:
    """Return the rows of one preset grouped into settings: runs that differ in rate and seed alone.

    The losses are evaluation losses if every row that did not diverge has one, otherwise training
    losses.

    Args:
        label: Name of the preset with its constants.
        pairs: Run and row of every point. A row that comes twice counts once.
        folders: Folders of the rows, none by default.
    """
    # A row may serve several axes of a study, or be in two folders.
    pairs = list({row.key: (config, row) for config, row in pairs}.values())
    # One metric for all rows, because training and evaluation losses are not comparable.
    evaluated = all(row.diverged or row.eval_loss is not None for _, row in pairs)
    pairs_by_setting: dict[str, list[tuple[Config, Row]]] = {}
    for config, row in pairs:
        pairs_by_setting.setdefault(_without_rate(config), []).append((config, row))
    settings = []
    for setting in pairs_by_setting.values():
        settings.append(_setting(setting, evaluated))
    settings.sort(key=lambda setting: tuple(setting.scale))

    named_losses = []
    for _, row in pairs:
        named_losses.append([row.key, repr(_loss(row, evaluated))])
    # Sorted, so that the digest does not depend on the order of the rows.
    named_losses.sort()
    return Points(
        label=label,
        metric="evaluation" if evaluated else "training",
        settings=tuple(settings),
        digest=hashlib.sha256(json.dumps(named_losses).encode()).hexdigest(),
        rows=len(pairs),
        folders=tuple(folders),
    )


def field_differences(config: Config, setting: Config) -> list[tuple[str, Any, Any]]:
    """Return the fields in which two runs differ in more than their scale.

    Fields of `SCALES` and `ELSEWHERE` do not count. If both presets have equal rules and one base,
    the fields of the preset do not count either, except its form.

    Returns:
        (name, value of `config`, value of `setting`) of each field.
    """
    fields = []
    for field in differences(_recorded(config), _recorded(setting)):
        name = field[0]
        if name not in SCALES and not name.startswith(ELSEWHERE):
            fields.append(field)
    has_other_preset = any(name.startswith(PRESET) for name, _, _ in fields)
    if not has_other_preset or not same_preset(config, setting):
        return fields
    chosen = []
    for field in fields:
        if field[0] == "preset.form" or not field[0].startswith(PRESET):
            chosen.append(field)
    return chosen


def _recorded(config: Config) -> dict[str, Any]:
    """Return a run's config as JSON, with defaults that follow from other fields filled in."""
    return to_json(config.resolved())


def _without_rate(config: Config) -> str:
    """Return a run's config without learning rate and seed as JSON text.

    All rows of a setting have equal texts.
    """
    fields = _recorded(config)
    del fields["seed"]
    del fields["optimizer"]["peak_lr"]
    return json.dumps(fields, sort_keys=True)


def _loss(row: Row, evaluated: bool) -> float:
    """Return the loss of a row, inf if the row diverged or has no loss of this kind.

    Args:
        evaluated: True for the evaluation loss, False for the training loss.
    """
    value = row.eval_loss if evaluated else row.loss
    return math.inf if value is None or row.diverged else value


def _setting(pairs: Sequence[tuple[Config, Row]], evaluated: bool) -> Setting:
    """Return the setting of rows that differ in learning rate and seed alone."""
    rates = sorted({config.optimizer.peak_lr for config, _ in pairs})
    seeds = sorted({config.seed for config, _ in pairs})
    losses = np.full((len(rates), len(seeds)), np.nan)
    for config, row in pairs:
        rate_index = rates.index(config.optimizer.peak_lr)
        losses[rate_index, seeds.index(config.seed)] = _loss(row, evaluated)
    # Seeds that were run at every rate come first, as `Curve` expects.
    order = np.argsort(np.isnan(losses).sum(axis=0), kind="stable")
    return Setting(
        config=pairs[0][0],
        x=np.log2(rates),
        losses=losses[:, order],
        seconds=float(np.median([row.seconds for _, row in pairs])),
        seeds=tuple(seeds[index] for index in order),
    )


def _study_rows(folder: Path, rows: Mapping[str, Row]) -> Iterator[_LabelledRow]:
    """Yield the rows of the transfer study in a folder, with the run that each was trained as.

    A row that several presets or axes share is yielded once for each. Points without a row are
    skipped.

    Raises:
        PointsError: transfer.json is not of a transfer study, or its command now plans another.
    """
    from mupax.train.studies.transfer.planned import replanned

    path = folder / "transfer.json"
    record = disk.read_json(path)
    if not {"command", "studies"} <= record.keys():
        raise PointsError(
            f"{path} is of no transfer study: it has no command or no studies; write the command "
            "of the study again, or remove the file, and the rows are read as those of a sweep"
        )
    if not record["studies"]:
        raise PointsError(
            f"the study of {folder} is not finished, so its best rates are not known; go on with "
            f"`{record['command']}`"
        )
    studies = {}
    for study in replanned(record["command"]):
        studies[(study.label, study.axis)] = study
    _check_trained(path, record, next(iter(studies.values())).configs[0])
    for study in record["studies"]:
        name = f"{study['preset']} in {study['axis']}"
        planned = studies.get((study["preset"], study["axis"]))
        # A config file that the command names may have changed since.
        if planned is None or list(planned.sizes) != [size["size"] for size in study["sizes"]]:
            raise PointsError(
                f"{path} has the study {name}, which its command no longer plans; {_AS_IT_WAS}"
            )
        for size, config in zip(study["sizes"], planned.configs, strict=True):
            for point in size["points"]:
                if point["key"] not in rows:
                    continue
                run = at_rate(config, 2.0 ** point["log2_lr"])
                run = dataclasses.replace(run, seed=point["seed"])
                yield _LabelledRow(study["preset"], run, rows[point["key"]])


def _check_trained(path: Path, record: Mapping[str, Any], planned: Config) -> None:
    """Raise PointsError if the first run of a study is not the one that was trained.

    Its rows would be read as those of other runs.

    Args:
        path: transfer.json of the study, for the message.
        record: Content of the file. An old one may lack the config of the run.
        planned: First run that the study's command plans now.
    """
    from mupax.train.studies.sweep.sweep import key_of

    if "config" not in record:
        return
    trained = from_json(record["config"])
    # Equal keys mean that fields such as a workdir do not count, nor those newer than the study.
    if key_of(trained, "") == key_of(planned, ""):
        return
    changes = []
    for name, old, new in differences(_recorded(trained), _recorded(planned)):
        if not name.startswith(ELSEWHERE):
            changes.append(f"{name} {text_of(old)}, now {text_of(new)}")
    if changes:
        raise PointsError(
            f"the study of {path} was trained with {'; '.join(changes[:3])}: "
            f"its command no longer plans the runs of its rows; {_AS_IT_WAS}"
        )


def _sweep_rows(folder: Path, rows: Mapping[str, Row]) -> Iterator[_LabelledRow]:
    """Yield the rows of a sweep, each with the run of its recorded `mupax train` command.

    Rows without such a command are skipped.

    Raises:
        PointsError: The folder has rows, but none has such a command.
    """
    from mupax.train.studies.transfer.planned import label_of

    parsed: dict[str, Config] = {}
    for row in rows.values():
        # A row has no command if no recipe has the name of its run.
        command, *recorded = words_of(row.command) or [""]
        if command != "train":
            continue
        # Most rows differ in rate and seed alone, and a command is slow to parse.
        words, values = without_flags(recorded, ("--optimizer.peak-lr", "--seed"))
        text = shlex.join(words)
        if text not in parsed:
            parsed[text] = cli.parse(words[0], cli.recipe(words[0]), words[1:]).config
        config = parsed[text]
        rate = float(values.get("--optimizer.peak-lr", config.optimizer.peak_lr))
        run = grid_point(config, rate, int(values.get("--seed", config.seed)))
        yield _LabelledRow(label_of(run.preset), run, row)
    if rows and not parsed:
        raise PointsError(
            f"{folder}: no row of {FILE_NAME} has the `mupax train` command of its run, as if "
            f"the sweep's recipe is not in RECIPES; add it there (by --plugin), and sweep "
            f"again with another --out"
        )
