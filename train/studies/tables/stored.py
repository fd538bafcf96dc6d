"""Laws as files: what a forecast needs of one, without the runs that it was fitted to.

`laws/NAME.json` come with mupax; `python -m scripts.studies.published_runs law TABLE.csv` writes them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from mupax import disk
from mupax.train.studies.tables.forecast import Forecaster
from mupax.train.studies.tables.law import Fit, Form, Noise, Prior, Term
from mupax.train.studies.tables.table import RunTable

FORMAT = "law of runs 1"
FOLDER = Path(__file__).parent / "laws"
DENSE = FOLDER / "published-dense.json"
"""Dense decoders under standard parameterization, from 1,073 published runs."""


def to_json(forecaster: Forecaster) -> dict[str, Any]:
    """Return a law as JSON has it: terms, numbers, what is open of them, noise, and the ends of every axis."""
    fit = forecaster.fit
    form = fit.form
    return {
        "format": FORMAT,
        "source": fit.table.source,
        "sha256": fit.table.digest,
        "rows": fit.table.rows,
        "axes": list(form.axes),
        "centre": form.centre.tolist(),
        "loss": form.loss,
        "terms": [
            {
                "name": term.name,
                "share": [term.share.mean, term.share.deviation],
                "exponents": {
                    axis: [prior.mean, prior.deviation] for axis, prior in term.exponents.items()
                },
            }
            for term in form.terms
        ],
        "numbers": fit.numbers.tolist(),
        "covariance": fit.covariance.tolist(),
        "noise": dataclasses.asdict(fit.noise),
        "ends": {
            axis: [float(fit.table.values[axis].min()), float(fit.table.values[axis].max())]
            for axis in form.axes
        },
        "beyond": {axis: list(pair) for axis, pair in forecaster.beyond.items()},
    }


def load(path: Path = DENSE) -> Forecaster:
    """Return the forecasts of a law that was written by `to_json`.

    Raises:
        DiskError, JsonError: there is no such file, or it is none.
    """
    content = disk.read_json(path)
    terms = tuple(
        Term(
            term["name"],
            Prior(*term["share"]),
            {axis: Prior(*prior) for axis, prior in term["exponents"].items()},
        )
        for term in content["terms"]
    )
    form = Form(terms, tuple(content["axes"]), np.array(content["centre"]), content["loss"])
    ends = RunTable(
        source=content["source"],
        digest=content["sha256"],
        values={axis: np.array(pair) for axis, pair in content["ends"].items()},
        log_loss=np.log([content["loss"]] * 2),
        seeds=np.ones(2, int),
        seed_deviation=None,
        decay=None,
        rows=content["rows"],
        notes=(),
    )
    fit = Fit(
        table=ends,
        form=form,
        numbers=np.array(content["numbers"]),
        covariance=np.array(content["covariance"]),
        noise=Noise(**content["noise"]),
        effects=np.zeros(0),
        effect_variances=np.zeros(0),
        setting=np.zeros(2, int),
    )
    return Forecaster(
        fit, {axis: (pair[0], int(pair[1])) for axis, pair in content["beyond"].items()}
    )
