"""A forecast on disk: written before the run, with its date and digest, and read again when the run is done."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

from mupax import __version__, disk
from mupax.errors import MupaxError
from mupax.train.config.record import command_of, from_json, to_json
from mupax.train.config.run import Config
from mupax.train.studies.forecast.fitted import ScalingLaw, parameters
from mupax.train.studies.forecast.points import METRICS
from mupax.train.studies.forecast.predict import Prediction
from mupax.train.studies.report import write_json

FORMAT = "forecast 1"
FORM = "log loss = log(E + A N^-a + C D'^-b) + c (x - x*)^2, D' = D / (1 + B/B_crit), x* = x0 + p log2 N + q log2 D + r log2 B"
SOURCES = "Hoffmann et al. 2022 (2203.15556), approach 3; McCandlish et al. 2018 (1812.06162); Bjorck et al. 2024 (2409.19913)"


class ForecastError(MupaxError):
    """A file that is no forecast, or not as it was written. The text says which."""


def forecast(law: ScalingLaw, prediction: Prediction, what: str) -> dict[str, Any]:
    """A forecast as JSON has it, dated now.

    Args:
        law: that says it.
        prediction: what it says.
        what: was asked for, as it was written.
    """
    rate, points = prediction.log2_lr, law.points
    content = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "what": what,
        "preset": points.label,
        "command": command_of(prediction.config),
        "metric": points.metric,
        "scale": prediction.scale,
        "beyond": {name: round(ratio, 4) for name, ratio in prediction.beyond.items()},
        "prediction": {"log2_lr": rate and rate.to_json(), "loss": prediction.loss.to_json()},
        "warnings": list(prediction.warnings),
        "law": {
            "form": FORM,
            "sources": SOURCES,
            "parameters": parameters(law),
            "left_out": list(law.notes),
            "misses_its_rows_by": round(law.misfit, 5),
            "seed": round(law.seed, 5),
            "an_octave_beyond_adds": {"loss": round(law.beyond[0], 5), "freedom": law.beyond[1]},
            "centre_log2": [round(float(value), 5) for value in law.rows.centre],
            "centre_loss": round(law.rows.loss, 6),
            "centre_log2_lr": round(law.rows.middle, 5),
        },
        "rows": {"folders": list(points.folders), "count": points.rows, "digest": points.digest},
        "config": to_json(prediction.config),
        "version": __version__,
    }
    return {**content, "digest": digest(content)}


def digest(content: dict[str, Any]) -> str:
    """sha256 of everything in a forecast but its digest: the rows' digest, the law and what it says."""
    plain = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def write(folder: Path, content: dict[str, Any]) -> Path:
    """Write a forecast into a folder, and give its path; one that is there already stays, under its own number.

    Args:
        folder: made if missing.
        content: of `forecast`.
    """
    plain = "".join(
        letter if letter.isalnum() or letter in "-_" else "-"
        for letter in f"{content['preset']} {content['what']}"
    )
    number, path = 1, folder / f"forecast-{plain}.json"
    while path.exists():
        number += 1
        path = folder / f"forecast-{plain}-{number}.json"
    return write_json(path, content)


def read(path: Path) -> dict[str, Any]:
    """A forecast as it was written; of a plan, the forecast in it.

    Raises:
        ForecastError: it is none, or its content is not what its digest says.
        DiskError: the disk cannot read it.
    """
    content = disk.read_json(path)
    content = content.get("forecast", content)
    if content is None:
        raise ForecastError(
            f"{path} is a plan without a forecast; make it by `mupax plan RECIPE --from STUDY --out PATH`"
        )
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ForecastError(
            f"{path} is no forecast; write what `mupax transfer --predict` or `plan --out` wrote"
        )
    if digest(content) != content["digest"]:
        raise ForecastError(
            f"{path} is not as it was written: its digest is of other content; make a forecast anew"
        )
    return content


def config_of(content: dict[str, Any]) -> Config:
    """The run that is forecast."""
    return from_json(content["config"])


def lines(content: dict[str, Any]) -> list[str]:
    """A forecast in words."""
    loss, rate = content["prediction"]["loss"], content["prediction"]["log2_lr"]
    text = [
        f"forecast of {content['what']} under {content['preset']}, from {content['rows']['count']} rows:"
    ]
    if rate:
        text.append(
            f"  best peak rate 2^{rate['value']:.2f} = {2.0 ** rate['value']:.3g}, 50 % in 2^{rate['low50']:.2f} to "
            f"2^{rate['high50']:.2f}, 90 % in 2^{rate['low90']:.2f} to 2^{rate['high90']:.2f}"
        )
    text.append(
        f"  loss {loss['value']:.4f}, 50 % in {loss['low50']:.4f} to {loss['high50']:.4f}, 90 % in {loss['low90']:.4f} to "
        f"{loss['high90']:.4f} ({METRICS[content['metric']]})"
    )
    return [*text, *(f"  caution: {warning}" for warning in content["warnings"])]
