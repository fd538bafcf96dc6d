"""`mupax plan --model NAME --tokens N` without a study: learning rate and batch by evidence.

There are three kinds of evidence, the best first: mupax's own measurement under a preset that
transfers the learning rate over sizes, a law fitted to published runs, and constants that others
published. Evidence applies to a model of the same type (images or dense language models) whose
sizes are within `FAR` doublings of the sizes that the evidence comes from.

A law is stored in a file, which has what a forecast needs but not the runs of the fit. The files
`laws/NAME.json` come with mupax. `python -m scripts.studies.published_runs law TABLE.csv` writes
them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mupax import disk, terminal
from mupax.presets.roles import Role
from mupax.presets.tuned import find
from mupax.presets.tuned.find import FAR, Tuned
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.studies import report
from mupax.train.studies.tables.forecast import Forecaster, Interval
from mupax.train.studies.tables.law import Fit, Form, Noise, Prior, Term
from mupax.train.studies.tables.table import RunTable, TableError
from mupax.zoo import families
from mupax.zoo.configs import CONFIGS, ConfigError
from mupax.zoo.families import ModelConfig

Kind = Literal["measured here", "published law", "published constants"]
"""Kinds of evidence on a learning rate, the best first."""
LAW_TOKENS = 2048
"""Tokens per sequence in the published runs that the law is fitted to."""
LAW_OPTIMIZER = "adamw"
"""Optimizer of these runs."""
TABLES = (Role.TOKEN_EMBEDDING, Role.POSITION, Role.READOUT)
"""Roles of parameters that the published law does not count in the size of a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Learning rate and batch that one source recommends for a run, and how far to trust it.

    Attributes:
        kind: Kind of the evidence.
        source: Name of the source as it is printed: a tuned preset or a paper.
        preset: Value for `--preset`.
        peak_lr: Peak learning rate.
        optimizer: Optimizer that the learning rate is for, a key of `OPTIMIZERS`.
        rate_interval: Interval (low, high) of the learning rate. `None` if unknown.
        level: Probability of the intervals in percent. Studies of mupax give 95, the published law
            90. `None` for published constants, which have no intervals.
        batch: Batch in examples of the model. `None` if unknown.
        batch_interval: Interval (low, high) of the batch. `None` if unknown.
        loss: Loss at the end, in nats per token of the source's data. `None` if unknown, or if the
            evidence does not apply.
        doublings: Distance of the run from what the source tried, in doublings of a size or of the
            run's length, whichever is farther.
        applies: True if the distance is at most `FAR` doublings.
        remark: Conditions and limits of the evidence, in words.
    """

    kind: Kind
    source: str
    preset: str
    peak_lr: float
    optimizer: str
    rate_interval: tuple[float, float] | None = None
    level: int | None = None
    batch: float | None = None
    batch_interval: tuple[float, float] | None = None
    loss: Interval | None = None
    doublings: float
    applies: bool
    remark: str


def body_parameters(model: ModelConfig) -> int:
    """Return a model's number of parameters without token and position embeddings and readout."""
    sizes = model.sizes()
    tables = 0
    for spec in model.parameters().values():
        if spec.role in TABLES and not spec.in_block:
            tables += math.prod(sizes[axis] for axis in spec.axes)
    return families.params(model) - tables


def candidates_for(model: ModelConfig, tokens: float) -> list[Evidence]:
    """Return the best evidence of each kind for a run, the best first.

    Evidence that does not apply comes last. The list has at most three entries, because there are
    three kinds. A kind without evidence for such a model is left out.

    Args:
        tokens: Number of tokens, or images, of the run.
    """
    options = [_measured(model, tokens), _law(model, tokens), _published(model)]
    present = [evidence for evidence in options if evidence is not None]
    # The order of kinds stays, because `sorted` is stable.
    return sorted(present, key=lambda evidence: not evidence.applies)


class _Candidate(NamedTuple):
    """Tuned preset with its sort key: the preset whose first four fields are smallest is the best.

    Attributes:
        is_far: True if `doublings` is more than `FAR`.
        is_unproven: True if the preset's learning rate is not known to transfer over sizes.
        doublings: Doublings between the run and the sizes of the preset's study, or by which the
            run is longer than the study's runs, whichever is more.
        use: Value for `--preset`. It is a part of the key, so that the order is unique.
        tuned: The preset.
    """

    is_far: bool
    is_unproven: bool
    doublings: float
    use: str
    tuned: Tuned


def _measured(model: ModelConfig, tokens: float) -> Evidence | None:
    """Return the evidence of the best preset that mupax tuned itself, or `None` without one.

    Presets for another type of model, and presets whose learning rate was found to drift with size,
    are left out. A preset within `FAR` doublings of the run is better than one farther away. Among
    these, a preset whose learning rate is known to transfer is better, and then the nearest one.
    """
    candidates: list[_Candidate] = []
    for path in find.files().values():
        tuned = find.load(path)
        # A rate that drifts with size says nothing about other sizes.
        if tuned.is_published or tuned.evidence == "drifts" or not _same_kind(tuned, model):
            continue
        distances = tuned.distance(model.base_sizes()).values()
        larger = max((abs(distance) for distance in distances), default=0.0)
        # A shorter run counts as no distance; only extrapolation beyond the study does.
        longer = max(0.0, math.log2(tokens / tuned.provenance["seen"]))
        doublings = max(larger, longer)
        is_unproven = tuned.evidence != "transfers"
        candidates.append(_Candidate(doublings > FAR, is_unproven, doublings, tuned.use, tuned))
    if not candidates:
        return None
    # Tuned presets cannot be compared with each other, so the key leaves the preset out.
    best = min(candidates, key=lambda candidate: candidate[:4])
    tuned = best.tuned
    optimum = tuned.provenance["log2_optimum"]
    rate_interval = None
    if optimum["low"] is not None and optimum["high"] is not None:
        rate_interval = (2.0 ** optimum["low"], 2.0 ** optimum["high"])
    remark = f"tuned on {tuned.provenance['data']}; {tuned.evidence}"
    if best.is_far:
        remark += f"; the run is {best.doublings:.0f} doublings beyond it, in size or length"
    return Evidence(
        kind="measured here",
        source=tuned.use,
        preset=tuned.use,
        peak_lr=tuned.optimizer["peak_lr"],
        optimizer=tuned.optimizer["name"],
        rate_interval=rate_interval,
        level=95,
        batch=tuned.provenance["batch"],
        doublings=best.doublings,
        applies=not best.is_far,
        remark=remark,
    )


def _law(model: ModelConfig, tokens: float) -> Evidence | None:
    """Return the evidence of the law that is fitted to published runs of dense decoders.

    Return `None` if the model is no decoder-only language model without experts. The loss is left
    out if the run is more than `FAR` doublings beyond the published runs.
    """
    if not _is_dense_decoder(model):
        return None
    forecaster = load()
    place = {"parameters": float(body_parameters(model)), "tokens": float(tokens)}
    best = forecaster.best(place)
    doublings = max(forecaster.distance(place).values())
    assert best.peak_lr is not None
    assert best.batch_sequences is not None
    # The law counts sequences of `LAW_TOKENS` tokens, and the batch counts the model's examples.
    share = LAW_TOKENS / model.units
    applies = doublings <= FAR
    remark = (
        "standard parameterization; its data and vocabulary are not yours, "
        "so take the loss as an order of magnitude"
    )
    if doublings > 0:
        remark += f"; {doublings:.1f} doublings beyond its runs"
    return Evidence(
        kind="published law",
        source=f"{forecaster.fit.table.rows:,} runs of Step Law (2503.04715)",
        preset="sp",
        peak_lr=best.peak_lr.value,
        optimizer=LAW_OPTIMIZER,
        rate_interval=(best.peak_lr.low, best.peak_lr.high),
        level=90,
        batch=best.batch_sequences.value * share,
        batch_interval=(best.batch_sequences.low * share, best.batch_sequences.high * share),
        loss=best.loss if applies else None,
        doublings=doublings,
        applies=applies,
        remark=remark,
    )


def _published(model: ModelConfig) -> Evidence | None:
    """Return the evidence of constants that others published, for the model nearest in size.

    Such constants are kept as tuned presets. Return `None` if no such preset is for models of the
    same type (see `_same_kind`).
    """
    best: tuple[float, Tuned] | None = None
    for path in find.files().values():
        tuned = find.load(path)
        if not tuned.is_published or not _same_kind(tuned, model):
            continue
        # A tied readout has no plain form, so that a run would be refused.
        if tuned.form == "plain" and model.tied_readout:
            continue
        distance = min(_distance(sizes, model.base_sizes()) for sizes in tuned.provenance["sizes"])
        if best is None or distance < best[0]:
            best = (distance, tuned)
    if best is None:
        return None
    doublings, tuned = best
    study = tuned.provenance
    remark = f"{study['status']} in the source, on {study['data']}; no interval is known"
    return Evidence(
        kind="published constants",
        source=f"{tuned.use}, {study['source']['name']}",
        preset=tuned.use,
        peak_lr=tuned.optimizer["peak_lr"],
        optimizer=tuned.optimizer["name"],
        # A batch of 0 stands for a source that names none.
        batch=study["batch"] or None,
        doublings=doublings,
        applies=doublings <= FAR,
        remark=remark,
    )


def _distance(sizes: Mapping[str, int], model: Mapping[str, int]) -> float:
    """Return the doublings between two models in width or in depth, whichever is larger.

    An axis that one of the models lacks is left out. At least one axis must be in both.

    Args:
        sizes: Sizes of one model by axis; "embed" is its width and "layers" its depth.
        model: Sizes of the other model by axis.
    """
    doublings = []
    for axis in ("embed", "layers"):
        if axis in sizes and axis in model:
            doublings.append(abs(math.log2(model[axis] / sizes[axis])))
    return max(doublings)


def _same_kind(tuned: Tuned, model: ModelConfig) -> bool:
    """Return True if a tuned preset was tuned for the same type of model.

    There are two types: models of images, and decoder-only language models without experts. Any
    other model has no tuned preset.
    """
    if tuned.provenance["unit"] != model.unit:
        return False
    return model.unit == "image" or _is_dense_decoder(model)


def _is_dense_decoder(model: ModelConfig) -> bool:
    """Return True if a model is a decoder-only language model without experts."""
    parameters: Mapping[str, Any] = model.parameters()
    roles = {spec.role for spec in parameters.values()}
    return (
        model.unit == "token"
        and model.generates
        and not model.denoises
        and Role.EXPERT_IN not in roles
    )


def plan(name: str, tokens: float, path: Path | None) -> int:
    """Print the learning rate and batch by the best evidence, a train command and all evidence.

    Args:
        name: Key of `CONFIGS`.
        tokens: Number of tokens, or images, of the run.
        path: JSON file to write the plan to. `None` writes none.

    Returns:
        0, the exit code.

    Raises:
        ConfigError: No evidence applies to a model of this type and size.
    """
    model = CONFIGS[name]
    candidates = candidates_for(model, tokens)
    if not candidates or not candidates[0].applies:
        nearest = ""
        if candidates:
            nearest = f"; the nearest is {candidates[0].source} ({candidates[0].remark})"
        raise ConfigError(
            f"nothing is known of the learning rate of a model such as {name}{nearest}; "
            "measure small ones (`mupax transfer`), and write the study's folder behind --from"
        )

    best = candidates[0]
    command = command_for(name, model, tokens, best)
    unit = f"{model.unit}s"
    interval = "no interval is known"
    if best.rate_interval is not None:
        interval = f"{best.level} %: {_range(best.rate_interval, '{:.3g}')}"
    batch = "" if best.batch is None else f" and a batch of {best.batch:.0f}"
    answer = (
        f"model {name}, {tokens:.4g} {unit}: a peak rate of {best.peak_lr:.3g} ({interval}) for "
        f"{best.optimizer}{batch} under {best.preset}, by {best.kind}: {best.source}"
    )
    if name in RECIPES:
        answer += f"; `mupax plan {name}` plans the recipe {name} with settings of its own"
    remarks = [
        "where one kind of evidence contradicts another, "
        "sweep a few rates between them on a smaller model (`mupax sweep`)"
    ]
    if path is not None:
        content = {
            "format": "evidence plan 1",
            "model": name,
            unit: tokens,
            "command": command,
            "evidence": [dataclasses.asdict(evidence) for evidence in candidates],
        }
        report.write_json(path, content)
        remarks.append(f"plan in {path}")
    table = report.Section(terminal.filled(rows(candidates)))
    report.Report([answer], [report.Step("Next: train it", command)], [table], remarks).show()
    return 0


def command_for(name: str, model: ModelConfig, tokens: float, evidence: Evidence) -> str:
    """Return a `mupax train` command for a model, with preset, learning rate and batch by evidence.

    Its recipe is the one for the same type of model with the nearest number of parameters. A tuned
    preset sets the learning rate itself, so that the command has no `--optimizer.peak-lr` then.

    Args:
        name: Key of `CONFIGS` of the model.
        tokens: Number of tokens, or images, of the run.
        evidence: Evidence for preset, learning rate and batch. If it has no batch, the recipe's
            batch is used.
    """
    recipes: dict[str, Config] = {}
    for recipe, make in RECIPES.items():
        config = make()
        same_type = type(config.model) is type(model)
        if same_type and _is_dense_decoder(config.model) == _is_dense_decoder(model):
            recipes[recipe] = config
    parameters = families.params(model)

    def distance(recipe: str) -> float:
        # Logs, because twice and half the size are equally far.
        return abs(math.log(families.params(recipes[recipe].model) / parameters))

    nearest = min(recipes, key=distance)
    words = ["mupax train", nearest, f"--model {name}", f"--preset {evidence.preset}"]
    if ":" not in evidence.preset:
        # A tuned preset (PRESET:NAME) has its own rate.
        words.append(f"--optimizer.peak-lr {evidence.peak_lr:.3g}")
    batch = recipes[nearest].data.batch_size
    if evidence.batch is not None:
        batch = max(1, round(evidence.batch))
        words.append(f"--data.batch-size {batch}")
    words.append(f"--steps {max(1, round(tokens / (batch * model.units)))}")
    return " ".join(words)


def rows(candidates: list[Evidence]) -> list[tuple[str, ...]]:
    """Return a table as text: a row of headings, then a row for each piece of evidence."""
    # Narrow terminals repeat the first column, so the long names of sources are in the second.
    table = [("evidence", "source", "optimizer", "rate", "interval", "batch", "loss", "")]
    for evidence in candidates:
        interval = "not known"
        if evidence.rate_interval is not None:
            interval = f"{_range(evidence.rate_interval, '{:.2g}')} ({evidence.level} %)"
        batch = "" if evidence.batch is None else f"{evidence.batch:.0f}"
        if evidence.batch_interval is not None:
            batch += f" ({_range(evidence.batch_interval, '{:.0f}')})"
        loss = ""
        if evidence.loss is not None:
            ends = _range((evidence.loss.low, evidence.loss.high), "{:.2f}")
            loss = f"{evidence.loss.value:.2f} ({ends})"
        remark = evidence.remark if evidence.applies else f"does not apply: {evidence.remark}"
        rate = f"{evidence.peak_lr:.3g}"
        source = (evidence.kind, evidence.source, evidence.optimizer)
        table.append((*source, rate, interval, batch, loss, remark))
    return table


def _range(ends: tuple[float, float], template: str) -> str:
    """Return the ends of an interval as text, "LOW to HIGH".

    Args:
        template: Format of a number, such as "{:.3g}".
    """
    return f"{template.format(ends[0])} to {template.format(ends[1])}"


FORMAT = "law of runs 1"
FOLDER = Path(__file__).parent / "laws"
DENSE = FOLDER / "published-dense.json"
"""File of the law of dense decoders under standard parameterization, from 1,073 published runs."""


def to_json(forecaster: Forecaster) -> dict[str, Any]:
    """Return a fitted law as plain values for JSON, from which `load` makes a forecaster again.

    The content has the terms, the fitted numbers with their covariance, the noise, the smallest and
    largest value of every axis, the error per octave beyond these (`Forecaster.beyond`), and the
    name and sha256 of the table. The runs and the effects of their settings are left out.
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

    The file does not have the runs of the fit. The table of the forecaster's law has only the
    smallest and largest value of each axis.

    Args:
        path: File of the law; the law of published dense decoders by default.

    Raises:
        DiskError, JsonError: The file does not exist, or is no JSON.
        TableError: The file is no law or one of another version, or an entry is missing.
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
        raise TableError(f"{path} is an incomplete law: it has no {error}; {advice}") from error


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
