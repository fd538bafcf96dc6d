"""What a model card can say for a run's weights: what an evaluation measured at their step, and the study behind a tuned preset."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupax import disk
from mupax.presets.roles import PresetError
from mupax.presets.tuned import find as tuned
from mupax.train.checkpoints import checkpointer
from mupax.train.checkpoints.workdir import CHECKPOINTS
from mupax.train.config.metrics import row_name, shown_everywhere
from mupax.train.config.run import Config
from mupax.train.config.tuned import applied, fitted

_ROWS = "metrics.jsonl"
_STARTS = ("warmup_fraction",)
"""Of a study's optimizer, what a run of another length rounds."""


def evaluation(workdir: Path, step: int) -> dict[str, Any]:
    """The row of the evaluation at a step of a run; empty where none is recorded, or cannot be read.

    Args:
        workdir: of the run.
        step: steps done.
    """
    try:
        lines = disk.read_bytes(workdir / _ROWS).split(b"\n")
    except (*disk.ABSENT, disk.DiskError):
        lines = []
    row = {}
    for line in lines:
        try:
            fields = json.loads(line) if b'"eval_loss"' in line else None
        except (ValueError, RecursionError):  # cut off by a kill, or no row of ours
            continue
        if isinstance(fields, dict) and fields.get("step") == step:
            row = fields  # the last: of a run that went back
    return row or checkpointer.read(workdir / CHECKPOINTS / str(step))


def measured(row: Mapping[str, Any], averaged: bool, kind: str) -> str:
    """A sentence about an evaluation.

    Args:
        row: from `evaluation`.
        averaged: whether the weights of the card are the run's moving average.
        kind: tokens or images.
    """
    loss = row.get("eval_loss")
    if "eval_loss" not in row:
        return "The run recorded no evaluation at this step."
    if loss is None or not math.isfinite(loss):
        return "The evaluation at this step was not finite."
    what = "a token" if kind == "tokens" else "an image"
    text = f"Evaluation loss {loss:.4f} nats {what}"
    for name, metric in shown_everywhere().items():
        value = row.get(row_name(name))
        if name == "loss" or value is None:
            continue
        text += f", {metric.label} {metric.text_with_unit(value)}"
        if metric.share and kind == "tokens":
            text += " of next tokens"
    caution = (
        ""
        if averaged or row.get("eval_weights") != "ema"
        else " Measured on the moving average of the weights, which these are not."
    )
    return f"{text}, on the run's own evaluation examples.{caution}"


def study(config: Config) -> tuned.Tuned | None:
    """The tuned preset whose base, constants and optimizer a run has, of those that are here; None where it has no such numbers.

    Args:
        config: of the run.
    """
    for use in tuned.files():
        if use.partition(":")[0] != config.preset.name:
            continue
        try:
            reference, _, preset = applied(config, ["--preset", use], str(config.steps))
        except PresetError:  # a file of the user's that is none
            continue
        if preset is None:
            continue
        reference = fitted(reference, preset)
        same = dataclasses.replace(
            reference.preset,
            joint=config.preset.joint,
            noise_scale=config.preset.noise_scale,
            zero_readout=config.preset.zero_readout,
        )
        numbers = (name for name in preset.optimizer if name not in _STARTS)
        if same == config.preset and all(
            getattr(reference.optimizer, name) == getattr(config.optimizer, name)
            for name in numbers
        ):
            return preset
    return None


def of_study(preset: tuned.Tuned, sizes: Mapping[str, int]) -> list[str]:
    """Lines about a tuned preset's study: what it found, on what, and how far from there a model is.

    Args:
        preset: the tuned preset.
        sizes: of the model, by axis.
    """
    if preset.is_published:
        return _of_publication(preset)
    of, optimum = preset.provenance, preset.provenance["log2_optimum"]
    kind, colon, path = of["data"].partition(":")
    data = f"{kind}:{path.rstrip('/').rpartition('/')[2]}" if colon else kind
    seeds = "one seed" if of["seeds"] == 1 else f"{of['seeds']} paired seeds"
    grown = [
        f"{g['axis']} {', '.join(map(str, g['sizes']))}: {tuned.verdict(g)}" for g in of["transfer"]
    ]
    far = ", ".join(
        f"{axis} {doublings:+.1f}" for axis, doublings in preset.distance(sizes).items()
    )
    return [
        f"- evidence: {preset.evidence}",
        f"- best rate at the base: 2^{optimum['value']:.2f} {tuned.bounds(optimum)}, from {seeds}",
        *[f"- grown in {line}" for line in grown or ["nothing: one size"]],
        f"- study: {of['recipe']} on {data}, {of['steps']:,} steps of {of['batch']}, {of['seen']:,} {of['unit']}s a run, {of['date']}",
        f"- this model: {f'{far} doublings beyond the sizes studied' if far else 'within the sizes studied'}",
    ]


def _of_publication(preset: tuned.Tuned) -> list[str]:
    """Return lines about a source whose numbers were published, and not measured here."""
    of = preset.provenance
    source = of["source"]
    models = ", ".join(table["model"] for table in of["tables"])
    return [
        f"- evidence: published by others as {source['name']}, and not measured here ({of['status']})",
        f"- source: {source['repository']} at {source['commit']}",
        f"- its models: {models}, on {of['data']}",
    ]
