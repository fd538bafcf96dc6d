"""Measure how far finite sizes stray from theory on right rules.

    python -m scripts.check.allowances [--optimizers adam sgd] [--studies head_dim ...] [--tied]
        [--start]

Writes train/studies/check/allowances.json: per study, optimizer and observable, the farthest slope
below and above theory. Trained are presets whose exponents are proved (mup, mup-half, depth-mup at
both ends of alpha), in every way to grow.

* The models are the smallest decoder and the smallest ViT.
* A tied decoder has only the entries in which it strays farther.
* Encoder-decoders have studies of their own, because their blocks have three branches.
* Training without a depth rule has no limit in depth: a study of its own, on mup.

Run this again only when an observable, a size or a theory changes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mupax import presets
from mupax.command_line import Switch
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check, theory
from mupax.zoo import configs
from mupax.zoo.definition import definition
from scripts import harness

_DEPTH = [("depth-mup", {"alpha_l": 0.5}), ("depth-mup", {"alpha_l": 1.0})]
PROVED = {
    "head_dim": [("mup", {}), ("mup-half", {})],
    "heads": [("mup", {}), ("mup-half", {})],
    "width": [("mup", {}), ("mup-half", {})],
    "depth": _DEPTH,
    f"depth{theory.NO_LIMIT}": [("mup", {})],
    f"depth{theory.ENCODED}": _DEPTH,
    f"depth{theory.ENCODED}{theory.NO_LIMIT}": [("mup", {})],
    "encoder_depth": _DEPTH,
    f"encoder_depth{theory.NO_LIMIT}": [("mup", {})],
}
"""Presets that each study trains, with their constants.

The first word of a study is the size that grows.
"""


def models(study: str) -> list[configs.ModelConfig]:
    """Return the untied models that a study trains."""
    if study.startswith("encoder_depth") or theory.ENCODED in study:
        return [replace(configs.get("ed-proxy"), tied=False)]  # pyright: ignore[reportCallIssue]
    return [configs.get("lm-proxy"), configs.get("vit-proxy")]


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    optimizers: tuple[str, ...] = ("adam", "sgd")
    """Optimizers to train with."""
    studies: tuple[str, ...] = tuple(PROVED)
    """Studies to run."""
    tied: Switch = False
    """Only train the tied models; keep the record's entries of untied ones."""
    start: Switch = False
    """Only measure untied models before the first step."""


def main() -> None:
    """Measure the chosen studies and write the record after each."""
    args = harness.parse(Options)
    harness.check_names(args.studies, list(PROVED))
    path = theory.ALLOWANCES
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"allowances": {}}
    for optimizer in args.optimizers:
        for study in args.studies:
            if args.start:
                _measure_start(record, study, optimizer)
            else:
                if not args.tied:
                    _measure_untied(record, study, optimizer)
                _measure_tied(record, study, optimizer)
                record["command"] = "python -m scripts.check.allowances"
                record["versions"] = harness.versions()
            # A stopped command keeps the studies that it has measured.
            path.write_text(_compact(record) + "\n")


def _measure_start(record: dict[str, Any], study: str, optimizer: str) -> None:
    """Measure how far slopes stray from theory before the first step, and update the record."""
    allowed: dict[str, list[float]] = {}
    for model in models(study):
        _widen(model, study, optimizer, allowed, steps=0)
    before = record["allowances"][f"{optimizer} {study}"]
    record["allowances"][f"{optimizer} {study}"] = dict(sorted({**before, **allowed}.items()))


def _measure_untied(record: dict[str, Any], study: str, optimizer: str) -> None:
    """Measure how far slopes of untied models stray from theory, and update the record."""
    allowed: dict[str, list[float]] = {}
    for model in models(study):
        _widen(model, study, optimizer, allowed)
    record["allowances"][f"{optimizer} {study}"] = dict(sorted(allowed.items()))


def _measure_tied(record: dict[str, Any], study: str, optimizer: str) -> None:
    """Record how far slopes of tied models stray from theory, where farther than untied ones."""
    untied = record["allowances"][f"{optimizer} {study}"]
    # `_widen` changes bands in place, and the untied ones must stay.
    allowed = {name: list(band) for name, band in untied.items()}
    for model in models(study):
        if model.task == "tokens":
            tied = replace(model, tied=True)  # pyright: ignore[reportCallIssue]
            _widen(tied, study, optimizer, allowed)
    wider = {}
    for name, band in sorted(allowed.items()):
        if band != untied.get(name, [0.0, 0.0]):
            wider[name] = band
    record["allowances"][f"{optimizer} {study}{theory.TIED}"] = wider


def _compact(record: dict[str, Any]) -> str:
    """Return JSON with a line per observable, so that a changed allowance is a one-line diff."""
    return re.sub(r"\[\s+([-\d.]+),\s+([-\d.]+)\s+\]", r"[\1, \2]", json.dumps(record, indent=1))


class SeriesInputs(NamedTuple):
    """Four growing models with their common base and batch."""

    series: check.Series
    base: dict[str, int]
    batch: dict[str, np.ndarray]


# All presets of a study share one series, whose programs are compiled once.
@cache
def _series(
    model: configs.ModelConfig, axis: str, optimizer: str, steps: int = theory.STEPS[-1]
) -> SeriesInputs:
    """Return four sizes of a model, the sizes of the smallest as base, and a batch for all."""
    grown = check.grow(model, axis, 4)
    config = OptimizerConfig(
        # With an eps far below every gradient, only the rule decides the slopes.
        name=optimizer,
        peak_lr=OPTIMIZERS[optimizer].check_lr,
        schedule="constant",
        eps=1e-12,
    )
    definitions = [definition(model) for model in grown]
    return SeriesInputs(
        check.Series(definitions, config, steps), grown[0].base_sizes(), check.batch(grown[0])
    )


def _widen(
    model: configs.ModelConfig,
    study: str,
    optimizer: str,
    allowed: dict[str, list[float]],
    steps: int = theory.STEPS[-1],
) -> None:
    """Train one model in one study, and widen `allowed` where a slope lies farther from theory.

    Args:
        allowed: Largest distance of the mean slope below and above theory, by observable and step.
            It is changed in place.
    """
    series, base, batch = _series(model, study.split()[0], optimizer, steps)
    first = series.definitions[0]
    last = series.definitions[-1]
    for name, constants in PROVED[study]:
        preset = presets.get(name, base=base, **constants)  # pyright: ignore[reportArgumentType]
        # Strict, because margins and allowances are what is measured here.
        expected = theory.of(preset, first, last, optimizer, strict=True)
        measured = series.measure(preset, batch, peak_lr=check.peak_lr(optimizer, expected))
        for finding in check.judge(measured, [1, 2, 4, 8], expected):
            above = finding.slope - finding.expected.slope
            key = theory.allowance(finding.observable, finding.step)
            band = allowed.setdefault(key, [0.0, 0.0])
            band[0] = max(band[0], round(-above - finding.expected.below, 2))
            band[1] = max(band[1], round(above - finding.expected.above, 2))
        print(optimizer, study, type(model).__name__, name, constants, flush=True)


if __name__ == "__main__":
    main()
