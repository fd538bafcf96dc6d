"""`mupax transfer ... --predict WHAT`: forecasts of larger runs, from a study that has just been measured."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mupax import terminal
from mupax.presets.roles import RUN_AXES
from mupax.train.config import cli, sizes
from mupax.train.config.run import Config
from mupax.train.studies.forecast import record
from mupax.train.studies.forecast.fitted import NoLaw, fitted
from mupax.train.studies.forecast.points import Points, points_of
from mupax.train.studies.forecast.predict import predict
from mupax.train.studies.report import Report, Step
from mupax.train.studies.transfer.study import Measured
from mupax.zoo.configs import ConfigError


def target(config: Config, what: str) -> Config:
    """The run that a `--predict` names.

    Args:
        config: of a study, at its smallest size.
        what: AXIS=N with commas between, or a recipe, which then has the study's preset.

    Raises:
        ConfigError, UsageError: no such axis, size or recipe.
    """
    if "=" not in what:
        return dataclasses.replace(cli.recipe(what)().resolved(), preset=config.preset)
    run = config
    for part in what.split(","):
        axis, (*_, size) = sizes.parse(part, (*sizes.AXES, *RUN_AXES))
        run = sizes.grown_run(run, axis, size)
    if config.preset.joint != "none":  # which scales warm-up itself
        run = dataclasses.replace(run, optimizer=config.optimizer)
    _ = run.scaled_optimizer  # refused here, if at all
    return run


def check(config: Config, predict: Sequence[str]) -> None:
    """Refuses what `target` would, before anything is trained.

    Args:
        config: of the study.
        predict: what is to be forecast.

    Raises:
        ConfigError: as `target`, or something comes twice.
    """
    if len(set(predict)) < len(predict):
        raise ConfigError(f"--predict {predict[0]} comes twice; write each run once")
    for what in predict:
        target(config, what)


def points(measured: Sequence[Measured]) -> dict[str, Points]:
    """The studies' rows by preset, those of several axes together."""
    labels = dict.fromkeys(one.study.label for one in measured)
    pairs = {
        label: [
            (dataclasses.replace(one.study, trained=()).config(point), row)
            for one in measured
            if one.study.label == label
            for point, row in one.rows.items()
        ]
        for label in labels
    }
    return {label: points_of(label, each) for label, each in pairs.items()}


def write(folder: Path, by_preset: Mapping[str, Points], predict_: Sequence[str]) -> bool:
    """Print and write every forecast, and give whether there is one of each.

    Args:
        folder: where they go.
        by_preset: rows by preset.
        predict_: what is forecast.
    """
    every = True
    for label, of_label in by_preset.items():
        try:
            law = fitted(dataclasses.replace(of_label, folders=(str(folder),)))
        except NoLaw as error:
            terminal.say(f"no forecast: {error}")
            every = False
            continue
        for what in predict_:
            try:
                content = record.forecast(
                    law, predict(law, target(of_label.settings[0].config, what)), what
                )
            except NoLaw as error:
                terminal.say(f"no forecast of {what} under {label}: {error}")
                every = False
                continue
            path = record.write(folder, content)
            score = f"mupax plan score {shlex.quote(str(path))} WORKDIR"
            remark = f"written before the run in {path}; `{score}` holds it against what came"
            Report(
                record.lines(content),
                [Step("Next: train it", content["command"])],
                remarks=[remark],
            ).show()
    return every
