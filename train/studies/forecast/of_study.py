"""Forecasts of `mupax transfer ... --predict`: larger runs, from a study that was just measured."""

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
from mupax.train.studies.forecast.fitted import NoLaw, ScalingLaw, fitted
from mupax.train.studies.forecast.points import Points, points_of
from mupax.train.studies.forecast.predict import predict
from mupax.train.studies.report import Report, Step
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer.study import Measured
from mupax.zoo.configs import ConfigError


def target(config: Config, request: str) -> Config:
    """Return the config of the run that a value of `--predict` names.

    Args:
        config: Run of the study at its smallest size.
        request: Name of a recipe, which gets the study's preset. Or sizes such as
            "depth=8,tokens=409600", to which the run of `config` is grown one after another.

    Raises:
        ConfigError: There is no such axis, or the size fits neither the run nor its joint rule.
        UsageError: There is no such recipe.
    """
    if "=" not in request:
        recipe = cli.recipe(request)()
        return dataclasses.replace(recipe.resolved(), preset=config.preset)
    run = config
    for part in request.split(","):
        axis, grown = sizes.parse(part, (*sizes.AXES, *RUN_AXES))
        run = sizes.grown_run(run, axis, grown[-1])
    if config.preset.joint != "none":
        # A joint rule scales the warm-up itself, so that of `grown_run` is undone.
        run = dataclasses.replace(run, optimizer=config.optimizer)
    # Read for its error alone: the joint rule may not be able to scale the size.
    _ = run.scaled_optimizer
    return run


def check(config: Config, requests: Sequence[str]) -> None:
    """Raise an error for a wrong `--predict` before anything is trained.

    Args:
        config: Run of the study at its smallest size.
        requests: Values of `--predict`.

    Raises:
        ConfigError: A request comes twice, or is refused by `target`.
        UsageError: There is no such recipe.
    """
    earlier = set()
    for request in requests:
        if request in earlier:
            raise ConfigError(f"--predict {request} comes twice; write each run once")
        earlier.add(request)
        target(config, request)


def points(measured: Sequence[Measured]) -> dict[str, Points]:
    """Return the rows of finished studies as `Points`, by label of the preset, to fit laws to.

    Studies of one preset along several axes are joined.
    """
    pairs_by_label: dict[str, list[tuple[Config, Row]]] = {}
    for result in measured:
        # Otherwise `study.config` would return the run that was trained, perhaps under another
        # preset of equal rules.
        study = dataclasses.replace(result.study, trained=())
        pairs = pairs_by_label.setdefault(result.study.label, [])
        for point, row in result.rows.items():
            pairs.append((study.config(point), row))
    return {label: points_of(label, pairs) for label, pairs in pairs_by_label.items()}


def write(folder: Path, by_preset: Mapping[str, Points], requests: Sequence[str]) -> bool:
    """Fit a law for each preset, and print and write a forecast for each request.

    If a forecast cannot be made, the reason is printed, and the others are still made.

    Args:
        folder: Folder that the forecasts are written to.
        by_preset: Rows by preset, from `points`.
        requests: Values of `--predict`.

    Returns:
        True if all forecasts could be made.
    """
    all_made = True
    for label, preset_points in by_preset.items():
        try:
            law = fitted(dataclasses.replace(preset_points, folders=(str(folder),)))
        except NoLaw as error:
            terminal.say(f"no forecast: {error}")
            all_made = False
            continue
        smallest = preset_points.settings[0].config
        for request in requests:
            try:
                _write_forecast(folder, law, target(smallest, request), request)
            except NoLaw as error:
                terminal.say(f"no forecast of {request} under {label}: {error}")
                all_made = False
    return all_made


def _write_forecast(folder: Path, law: ScalingLaw, config: Config, request: str) -> None:
    """Write the forecast of one run as a JSON file into a folder, and print it.

    Raises:
        NoLaw: The law says nothing of the run.
    """
    content = record.forecast(law, predict(law, config), request)
    path = record.write(folder, content)
    score = f"mupax plan score {shlex.quote(str(path))} WORKDIR"
    remark = f"written before the run in {path}; `{score}` holds it against what came"
    next_step = Step("Next: train it", content["command"])
    Report(record.lines(content), [next_step], remarks=[remark]).show()
