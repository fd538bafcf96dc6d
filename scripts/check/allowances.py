"""Measure how far finite sizes stray from theory on rules known to be right, and write train/studies/check/allowances.json.

    python -m scripts.check.allowances [--optimizers adam sgd] [--studies head_dim heads width depth ...] [--tied] [--start]

Takes the family of presets whose exponents are proved (mup, mup-half, depth-mup at both ends), every way to grow and both
optimizers on the smallest decoder, tied and not, and ViT, and keeps per observable the farthest slope below and above theory; of the
tied decoder what goes farther than the others. Blocks of three branches have their own: the smallest encoder-decoder, tied and not,
both stacks growing; and the encoder's alone.
Without a depth rule training has no limit in depth, and finite sizes stray farther: that is a study of its own, on mup.
Run it again only when an observable, a size or a theory changes; the result is data with the command that made it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

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
"""Study to the rules it trains; its first word is the size that grows."""


def models(study: str) -> list[configs.ModelConfig]:
    """Whose slopes a study takes, untied."""
    if study.startswith("encoder_depth") or theory.ENCODED in study:
        return [replace(configs.get("ed-proxy"), tied=False)]  # pyright: ignore[reportCallIssue]
    return [configs.get("lm-proxy"), configs.get("vit-proxy")]


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    optimizers: tuple[str, ...] = ("adam", "sgd")
    studies: tuple[str, ...] = tuple(PROVED)
    tied: Switch = False
    """Tied models alone, beside what the file holds."""
    start: Switch = False
    """Measure what is read before the first step alone, in untied models."""


def main() -> None:
    """Measure for the named optimizers and studies (all unless given) and write the file."""
    args = harness.parse(Options)
    harness.check_names(args.studies, list(PROVED))
    path = theory.ALLOWANCES
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"allowances": {}}
    for optimizer in args.optimizers:
        for study in args.studies:
            allowed: dict[str, list[float]] = {}
            if args.start:
                for model in models(study):
                    _stray(model, study, optimizer, allowed, steps=0)
                before = record["allowances"][f"{optimizer} {study}"]
                record["allowances"][f"{optimizer} {study}"] = dict(
                    sorted({**before, **allowed}.items())
                )
                path.write_text(_compact(record) + "\n")
                continue
            if not args.tied:
                for model in models(study):
                    _stray(model, study, optimizer, allowed)
                record["allowances"][f"{optimizer} {study}"] = dict(sorted(allowed.items()))
            untied = record["allowances"][f"{optimizer} {study}"]
            allowed = {name: list(band) for name, band in untied.items()}
            for model in models(study):
                if model.task == "tokens":
                    tied = replace(model, tied=True)  # pyright: ignore[reportCallIssue]
                    _stray(tied, study, optimizer, allowed)
            farther = {
                name: band
                for name, band in sorted(allowed.items())
                if band != untied.get(name, [0.0, 0.0])
            }
            record["allowances"][f"{optimizer} {study}{theory.TIED}"] = farther
            record["command"] = "python -m scripts.check.allowances"
            record["versions"] = harness.versions()
            path.write_text(_compact(record) + "\n")


def _compact(record: dict[str, Any]) -> str:
    """JSON with a line per observable, so that a changed allowance is a one-line diff."""
    return re.sub(r"\[\s+([-\d.]+),\s+([-\d.]+)\s+\]", r"[\1, \2]", json.dumps(record, indent=1))


@cache
def _series(
    model: configs.ModelConfig, axis: str, optimizer: str, steps: int = theory.STEPS[-1]
) -> tuple[check.Series, dict[str, int], dict[str, np.ndarray]]:
    """Four sizes, the base that is the smallest, and the batch that all take."""
    grown = check.grow(model, axis, 4)
    config = OptimizerConfig(
        name=optimizer, peak_lr=OPTIMIZERS[optimizer].check_lr, schedule="constant", eps=1e-12
    )
    return (
        check.Series([definition(one) for one in grown], config, steps),
        grown[0].base_sizes(),
        check.batch(grown[0]),
    )


def _stray(
    model: configs.ModelConfig,
    study: str,
    optimizer: str,
    allowed: dict[str, list[float]],
    steps: int = theory.STEPS[-1],
) -> None:
    """Widen `allowed` by one study: per observable and step, how far below and above theory the mean slope lies."""
    series, base, batch = _series(model, study.split()[0], optimizer, steps)
    first, last = series.definitions[0], series.definitions[-1]
    for name, constants in PROVED[study]:
        preset = presets.get(name, base=base, **constants)  # pyright: ignore[reportArgumentType]
        measured = series.measure(preset, batch)
        expected = theory.of(preset, first, last, optimizer, strict=True)
        for finding in check.judge(measured, [1, 2, 4, 8], expected):
            above = finding.slope - finding.expected.slope
            band = allowed.setdefault(
                theory.allowance(finding.observable, finding.step), [0.0, 0.0]
            )
            band[0] = max(band[0], round(-above - finding.expected.below, 2))
            band[1] = max(band[1], round(above - finding.expected.above, 2))
        print(optimizer, study, type(model).__name__, name, constants, flush=True)


if __name__ == "__main__":
    main()
