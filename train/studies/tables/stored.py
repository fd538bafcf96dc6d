"""Laws as files, which have what a forecast needs but not the runs of the fit.

`laws/NAME.json` come with mupax. `python -m scripts.studies.published_runs law TABLE.csv` writes
them, and `mupax plan` reads them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from mupax import disk
from mupax.train.studies.tables.forecast import Forecaster
from mupax.train.studies.tables.law import Fit, Form, Noise, Prior, Term
from mupax.train.studies.tables.table import RunTable, TableError

FORMAT = "law of runs 1"
FOLDER = Path(__file__).parent / "laws"
DENSE = FOLDER / "published-dense.json"
"""File of the law of dense decoders under standard parameterization, from 1,073 published runs."""


def to_json(forecaster: Forecaster) -> dict[str, Any]:
    """Return a law as plain values for JSON, from which `load` makes a forecaster again.

    The content has the terms, the fitted numbers with their covariance, the noise, the smallest and
    largest value of every axis, the deviation per octave beyond them (`Forecaster.beyond`), and the
    name and sha256 of the table. The runs and their effects are left out.
    """
    fit = forecaster.fit
    form = fit.form
    ends = {}
    for axis in form.axes:
        values = fit.table.values[axis]
        ends[axis] = [float(values.min()), float(values.max())]
    beyond = {}
    for axis, pair in forecaster.beyond.items():
        beyond[axis] = list(pair)
    return {
        "format": FORMAT,
        "source": fit.table.source,
        "sha256": fit.table.digest,
        "rows": fit.table.rows,
        "axes": list(form.axes),
        "centre": form.centre.tolist(),
        "loss": form.loss,
        "terms": [_term_json(term) for term in form.terms],
        "numbers": fit.numbers.tolist(),
        "covariance": fit.covariance.tolist(),
        "noise": dataclasses.asdict(fit.noise),
        "ends": ends,
        "beyond": beyond,
    }


def _term_json(term: Term) -> dict[str, Any]:
    """Return a term as plain values for JSON, each prior as a list of mean and deviation."""
    exponents = {}
    for axis, prior in term.exponents.items():
        exponents[axis] = [prior.mean, prior.deviation]
    return {
        "name": term.name,
        "share": [term.share.mean, term.share.deviation],
        "exponents": exponents,
    }


def load(path: Path = DENSE) -> Forecaster:
    """Read a law that `to_json` wrote, and return a forecaster of it.

    The runs of the fit are not in the file. The forecaster's table has only the two ends of each
    axis.

    Args:
        path: File of the law; the law of published dense decoders by default.

    Raises:
        DiskError, JsonError: The file does not exist, or is no JSON.
        TableError: The file is of another kind or version, or an entry of a law is missing.
    """
    content = disk.read_json(path)
    advice = "write it by `python -m scripts.studies.published_runs law TABLE.csv`"
    if content.get("format") != FORMAT:
        shown_format = disk.shown(content.get("format"))
        raise TableError(
            f'{path} is no law: its "format" is {shown_format}, not {FORMAT!r}; {advice}'
        )
    try:
        return _forecaster(content)
    except KeyError as error:
        raise TableError(f"{path} is no whole law: it has no {error}; {advice}") from error


def _forecaster(content: dict[str, Any]) -> Forecaster:
    """Return the forecaster of a law that `to_json` wrote.

    Raises:
        KeyError: An entry of a law is missing.
    """
    terms = tuple(_term(fields) for fields in content["terms"])
    form = Form(terms, tuple(content["axes"]), np.array(content["centre"]), content["loss"])
    # A table of two runs stands for all: a forecast only asks for the ends of each axis.
    end_values = {}
    for axis, pair in content["ends"].items():
        end_values[axis] = np.array(pair)
    ends = RunTable(
        source=content["source"],
        digest=content["sha256"],
        values=end_values,
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
        # Effects belong to settings of the table, and a forecast is of a new setting.
        effects=np.zeros(0),
        effect_variances=np.zeros(0),
        setting=np.zeros(2, int),
    )
    # `int`, because another program may have written the degrees of freedom as 3.0.
    beyond = {}
    for axis, pair in content["beyond"].items():
        beyond[axis] = (pair[0], int(pair[1]))
    return Forecaster(fit, beyond)


def _term(fields: dict[str, Any]) -> Term:
    """Return the term with the fields that `_term_json` wrote."""
    exponents = {}
    for axis, prior in fields["exponents"].items():
        exponents[axis] = Prior(*prior)
    return Term(fields["name"], Prior(*fields["share"]), exponents)
