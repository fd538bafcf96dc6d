"""Forecast on disk: written with date and digest before the run, read again after it."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from mupax import MupaxError, __version__, disk
from mupax.mappings import drop_keys
from mupax.terminal import counted
from mupax.train.config.record import command_of, from_json, to_json
from mupax.train.config.run import Config
from mupax.train.studies.forecast.fitted import ScalingLaw, parameters
from mupax.train.studies.forecast.points import METRICS
from mupax.train.studies.forecast.predict import Prediction
from mupax.train.studies.report import write_json

FORMAT = "forecast 1"
FORM = (
    "log loss = log(E + A N^-a + C D'^-b) + c (x - x*)^2, D' = D / (1 + B/B_crit), "
    "x* = x0 + p log2 N + q log2 D + r log2 B"
)
SOURCES = (
    "Hoffmann et al. 2022 (2203.15556), approach 3; McCandlish et al. 2018 (1812.06162); "
    "Bjorck et al. 2024 (2409.19913)"
)


class ForecastError(MupaxError):
    """Error for a file that is no forecast, or that was changed after it was written."""


def forecast(law: ScalingLaw, prediction: Prediction, request: str) -> dict[str, Any]:
    """Return a forecast of a run as plain values for JSON, dated now and with a digest of itself.

    Args:
        request: Words that asked for the forecast, such as "head_dim=128".
    """
    log2_lr = prediction.log2_lr
    points = law.points
    beyond = {}
    for name, ratio in prediction.size_ratios.items():
        beyond[name] = round(ratio, 4)
    content = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "what": request,
        "preset": points.label,
        "command": command_of(prediction.config),
        "metric": points.metric,
        "scale": prediction.scale,
        "beyond": beyond,
        "prediction": {
            "log2_lr": None if log2_lr is None else log2_lr.to_json(),
            "loss": prediction.loss.to_json(),
        },
        "warnings": list(prediction.warnings),
        "law": _law_json(law),
        "rows": {"folders": list(points.folders), "count": points.rows, "digest": points.digest},
        "config": to_json(prediction.config),
        "version": __version__,
    }
    return {**content, "digest": digest(content)}


def _law_json(law: ScalingLaw) -> dict[str, Any]:
    """Return a law as plain values for JSON: its form, sources, parameters and errors."""
    return {
        "form": FORM,
        "sources": SOURCES,
        "parameters": parameters(law),
        "left_out": list(law.notes),
        "misses_its_rows_by": round(law.misfit, 5),
        "seed": round(law.seed, 5),
        "an_octave_beyond_adds": {
            "loss": round(law.loss_growth.deviation, 5),
            "freedom": law.loss_growth.freedom,
        },
        "centre_log2": [round(float(value), 5) for value in law.rows.centre],
        "centre_loss": round(law.rows.centre_loss, 6),
        "centre_log2_lr": round(law.rows.centre_log2_lr, 5),
    }


def digest(content: dict[str, Any]) -> str:
    """Return the sha256 of a forecast's content, apart from its entry `digest`."""
    # Keys are sorted, so that a file whose keys moved has the same digest.
    plain = drop_keys(content, ("digest",))
    # By way of the text that is written, in which null stands for a number that is not finite.
    written = json.loads(disk.json_text(plain))
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Write a forecast as a JSON file into a folder and return its path.

    Nothing is overwritten: if the file name is taken, a number is added to it.

    Args:
        folder: Folder of the forecasts. It is made if missing.
        content: Forecast, from `forecast`.
    """
    name = f"{content['preset']} {content['what']}"
    # Only letters, digits, dashes and underscores are safe in every file system.
    plain = re.sub(r"[^\w-]", "-", name)
    path = folder / f"forecast-{plain}.json"
    number = 1
    # Nothing is overwritten, because the date of a forecast shows that it came before its run.
    while path.exists():
        number += 1
        path = folder / f"forecast-{plain}-{number}.json"
    return write_json(path, content)


def read(path: Path) -> dict[str, Any]:
    """Return the forecast in a file, which is a forecast or a plan that contains one.

    Raises:
        ForecastError: The file has no forecast, or one whose digest does not match its content.
        DiskError: The file cannot be read.
    """
    plan = disk.read_json(path)
    content = plan.get("forecast", plan)
    if content is None:
        # The first caution of a plan says why no loss is predicted.
        cautions = plan.get("cautions")
        why = f" ({cautions[0]})" if cautions else ""
        raise ForecastError(
            f"{path} is a plan without a forecast{why}; write a plan that predicts a loss, by "
            f"`mupax plan RECIPE --from STUDY --out PATH`"
        )
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ForecastError(
            f"{path} is no forecast; write what `mupax transfer --predict` or `plan --out` wrote"
        )
    if digest(content) != content.get("digest"):
        raise ForecastError(
            f"{path} is not as it was written: its digest is of other content; make a forecast anew"
        )
    return content


def config_of(content: dict[str, Any]) -> Config:
    """Return the config of the run that a forecast is for."""
    return from_json(content["config"])


def lines(content: dict[str, Any]) -> list[str]:
    """Return a forecast as lines of text: heading, best rate if it has one, loss and cautions."""
    loss = content["prediction"]["loss"]
    rate = content["prediction"]["log2_lr"]
    text = [
        f"forecast of {content['what']} under {content['preset']}, "
        f"from {counted(content['rows']['count'], 'row')}:"
    ]
    if rate:
        text.append(
            f"  best peak rate 2^{rate['value']:.2f} = {2.0 ** rate['value']:.3g}, "
            f"50 % in 2^{rate['low50']:.2f} to 2^{rate['high50']:.2f}, "
            f"90 % in 2^{rate['low90']:.2f} to 2^{rate['high90']:.2f}"
        )
    text.append(
        f"  loss {loss['value']:.4f}, 50 % in {loss['low50']:.4f} to {loss['high50']:.4f}, "
        f"90 % in {loss['low90']:.4f} to {loss['high90']:.4f} ({METRICS[content['metric']]})"
    )
    text += [f"  caution: {warning}" for warning in content["warnings"]]
    return text
