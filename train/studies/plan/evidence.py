"""`mupax plan --model NAME --tokens N`: which learning rate and batch, from the best evidence that applies, without a study of one's own.

Best first: what was measured here under a preset that carries it over, a law of published runs, constants that others published.
Evidence applies to models of its kind whose sizes are within `FAR` doublings of those that it is from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mupax import terminal
from mupax.presets.roles import Role
from mupax.presets.tuned import find
from mupax.presets.tuned.find import FAR, Tuned
from mupax.train.config.recipes import RECIPES
from mupax.train.studies import report
from mupax.train.studies.tables import stored
from mupax.train.studies.tables.forecast import Interval
from mupax.zoo import families
from mupax.zoo.configs import CONFIGS, ConfigError
from mupax.zoo.families import ModelConfig

Kind = Literal["measured here", "published law", "published constants"]
LAW_TOKENS = 2048
"""Tokens of a sequence of the published grid."""
TABLES = (Role.TOKEN_EMBEDDING, Role.POSITION, Role.READOUT)
"""Roles that the grid's count of parameters leaves out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What something says of a model's settings.

    Attributes:
        kind: how it is known.
        source: whose, for a person.
        preset: what `--preset` takes.
        peak_lr: to train with.
        rate_interval: where it lies in nine of ten cases; None where nothing says.
        batch: in examples of the model; None where nothing says.
        batch_interval: as `rate_interval`.
        loss: at the end, in nats per token of the source's data; None where nothing says.
        doublings: of the size that is farthest from what was tried.
        applies: whether it does.
        remark: why, or what to know.
    """

    kind: Kind
    source: str
    preset: str
    peak_lr: float
    rate_interval: tuple[float, float] | None = None
    batch: float | None = None
    batch_interval: tuple[float, float] | None = None
    loss: Interval | None = None
    doublings: float
    applies: bool
    remark: str


def body_parameters(model: ModelConfig) -> int:
    """Return a model's parameters without embeddings and readout."""
    sizes = model.sizes()
    tables = sum(
        math.prod(sizes[axis] for axis in spec.axes)
        for spec in model.parameters().values()
        if spec.role in TABLES and not spec.in_block
    )
    return families.params(model) - tables


def candidates_for(model: ModelConfig, tokens: float) -> list[Evidence]:
    """Return the best evidence of each kind, those that apply first, best first.

    Args:
        model: to train.
        tokens: or images, that it will see.
    """
    options = [_measured(model, tokens), _law(model, tokens), _published(model)]
    present = [evidence for evidence in options if evidence is not None]
    return sorted(present, key=lambda evidence: not evidence.applies)


def _measured(model: ModelConfig, tokens: float) -> Evidence | None:
    """Return the tuned preset of this project whose sizes are nearest, if any is of the model's kind."""
    candidates: list[tuple[bool, bool, float, str, Tuned]] = []
    for path in find.files().values():
        tuned = find.load(path)
        if tuned.is_published or tuned.evidence == "drifts" or not _same_kind(tuned, model):
            continue
        larger = max(
            (abs(value) for value in tuned.distance(model.base_sizes()).values()), default=0.0
        )
        longer = max(0.0, math.log2(tokens / tuned.provenance["seen"]))
        doublings = max(larger, longer)
        candidates.append(
            (doublings > FAR, tuned.evidence != "transfers", doublings, tuned.use, tuned)
        )
    if not candidates:
        return None
    _, _, doublings, _, tuned = min(candidates, key=lambda candidate: candidate[:4])
    optimum = tuned.provenance["log2_optimum"]
    ends = (optimum["low"], optimum["high"])
    applies = doublings <= FAR
    remark = f"tuned on {tuned.provenance['data']}; {tuned.evidence}"
    if not applies:
        remark += f"; the run is {doublings:.0f} doublings beyond it, in size or length"
    return Evidence(
        kind="measured here",
        source=tuned.use,
        preset=tuned.use,
        peak_lr=tuned.optimizer["peak_lr"],
        rate_interval=None if None in ends else (2.0 ** ends[0], 2.0 ** ends[1]),
        batch=tuned.provenance["batch"],
        doublings=doublings,
        applies=applies,
        remark=remark,
    )


def _law(model: ModelConfig, tokens: float) -> Evidence | None:
    """Return what the law of published dense decoders says; None of another kind of model."""
    if not _is_dense_decoder(model):
        return None
    forecaster = stored.load()
    place = {"parameters": float(body_parameters(model)), "tokens": float(tokens)}
    best = forecaster.best(place)
    doublings = max(forecaster.distance(place).values())
    assert best.peak_lr is not None
    assert best.batch_sequences is not None
    share = LAW_TOKENS / model.units
    applies = doublings <= FAR
    remark = "standard parameterization; its data and vocabulary are not yours, so take the loss as an order of magnitude"
    if doublings > 0:
        remark += f"; {doublings:.1f} doublings beyond its runs"
    return Evidence(
        kind="published law",
        source=f"{forecaster.fit.table.rows:,} runs of Step Law (2503.04715)",
        preset="sp",
        peak_lr=best.peak_lr.value,
        rate_interval=(best.peak_lr.low, best.peak_lr.high),
        batch=best.batch_sequences.value * share,
        batch_interval=(best.batch_sequences.low * share, best.batch_sequences.high * share),
        loss=best.loss if applies else None,
        doublings=doublings,
        applies=applies,
        remark=remark,
    )


def _published(model: ModelConfig) -> Evidence | None:
    """Return the published constants whose model is nearest, if any is of the model's kind."""
    best: tuple[float, Tuned] | None = None
    for path in find.files().values():
        tuned = find.load(path)
        if not tuned.is_published or not _same_kind(tuned, model):
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
        batch=study["batch"] or None,
        doublings=doublings,
        applies=doublings <= FAR,
        remark=remark,
    )


def _distance(sizes: Mapping[str, int], model: Mapping[str, int]) -> float:
    """Return the doublings between two models on the axis where they are farthest apart, of width and depth."""
    return max(
        abs(math.log2(model[axis] / sizes[axis]))
        for axis in ("embed", "layers")
        if axis in sizes and axis in model
    )


def _same_kind(tuned: Tuned, model: ModelConfig) -> bool:
    """Return whether a tuned preset is for models such as this one: of images, or decoders of text without experts."""
    if tuned.provenance["unit"] != model.unit:
        return False
    return model.unit == "image" or _is_dense_decoder(model)


def _is_dense_decoder(model: ModelConfig) -> bool:
    """Return whether a model is a decoder of tokens without an encoder or experts."""
    parameters: Mapping[str, Any] = model.parameters()
    roles = {spec.role for spec in parameters.values()}
    return (
        model.unit == "token"
        and model.generates
        and not model.denoises
        and Role.EXPERT_IN not in roles
    )


def plan(name: str, tokens: float, out: Path | None) -> int:
    """Print which settings the best evidence gives a model, and what else is known: 0.

    Args:
        name: of `CONFIGS`.
        tokens: or images, to see.
        out: file for the same as JSON.

    Raises:
        ConfigError: nothing is known of models of its kind and size.
    """
    model = CONFIGS[name]
    every = candidates_for(model, tokens)
    if not every or not every[0].applies:
        nearest = f"; the nearest is {every[0].source} ({every[0].remark})" if every else ""
        raise ConfigError(
            f"nothing is known of the learning rate of a model such as {name}{nearest}; tune a small one (`mupax tune`), or write the "
            "study to plan from behind --from"
        )
    best = every[0]
    command = command_for(name, model, tokens, best)
    unit = f"{model.unit}s"
    batch = "" if best.batch is None else f" and a batch of {best.batch:.0f}"
    ends = (
        "no interval is known"
        if best.rate_interval is None
        else f"90 %: {_range(best.rate_interval, '{:.3g}')}"
    )
    rate = f"a peak rate of {best.peak_lr:.3g} ({ends})"
    answer = f"{name}, {tokens:.4g} {unit}: {rate}{batch} under {best.preset}, by {best.kind}: {best.source}"
    remarks = [
        "where one kind of evidence contradicts another, sweep a few rates between them on a smaller model (`mupax sweep`)"
    ]
    if out is not None:
        content = {
            "format": "evidence plan 1",
            "model": name,
            unit: tokens,
            "command": command,
            "evidence": [dataclasses.asdict(evidence) for evidence in every],
        }
        report.write_json(out, content)
        remarks.append(f"plan in {out}")
    table = report.Section(terminal.filled(rows(every)))
    report.Report([answer], [report.Step("Next: train it", command)], [table], remarks).show()
    return 0


def command_for(name: str, model: ModelConfig, tokens: float, evidence: Evidence) -> str:
    """Return the command that trains a model with what evidence says, by the recipe whose model is nearest."""
    configs = {recipe: make() for recipe, make in RECIPES.items()}
    alike = [
        recipe
        for recipe, config in configs.items()
        if type(config.model) is type(model)
        and _is_dense_decoder(config.model) == _is_dense_decoder(model)
    ]
    recipe = min(
        alike,
        key=lambda other: abs(
            math.log(families.params(configs[other].model) / families.params(model))
        ),
    )
    words = ["mupax train", recipe, f"--model {name}", f"--preset {evidence.preset}"]
    if ":" not in evidence.preset:
        words.append(f"--optimizer.peak-lr {evidence.peak_lr:.3g}")
    batch = configs[recipe].data.batch_size
    if evidence.batch is not None:
        batch = max(1, round(evidence.batch))
        words.append(f"--data.batch-size {batch}")
    words.append(f"--steps {max(1, round(tokens / (batch * model.units)))}")
    return " ".join(words)


def rows(every: list[Evidence]) -> list[tuple[str, ...]]:
    """Return a table of evidence, names first."""
    table = [("evidence", "rate", "90 %", "batch", "loss", "")]
    for evidence in every:
        interval = (
            "not known"
            if evidence.rate_interval is None
            else _range(evidence.rate_interval, "{:.2g}")
        )
        batch = "" if evidence.batch is None else f"{evidence.batch:.0f}"
        if evidence.batch_interval is not None:
            batch += f" ({_range(evidence.batch_interval, '{:.0f}')})"
        loss = ""
        if evidence.loss is not None:
            loss = (
                f"{evidence.loss.value:.2f} ({evidence.loss.low:.2f} to {evidence.loss.high:.2f})"
            )
        label = f"{evidence.kind}: {evidence.source}"
        remark = evidence.remark if evidence.applies else f"does not apply: {evidence.remark}"
        table.append((label, f"{evidence.peak_lr:.3g}", interval, batch, loss, remark))
    return table


def _range(ends: tuple[float, float], shown: str) -> str:
    """Return the ends of an interval for a person."""
    return f"{shown.format(ends[0])} to {shown.format(ends[1])}"
