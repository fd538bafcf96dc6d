"""Evidence for a model card: evaluation results of a run, and the study behind a tuned preset."""

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
_ROUNDED = ("warmup_fraction",)
"""Optimizer fields that a run of another length than the study rounds, so they may differ a bit."""


def evaluation(workdir: Path, step: int) -> dict[str, Any]:
    """Return the metrics of a run's evaluation at a step, empty if none can be read.

    They are read from metrics.jsonl, or from the checkpoint of that step if they are not there. The
    keys are those of metrics.jsonl, such as `eval_loss`.

    Args:
        step: number of optimizer steps done, as in the name of the checkpoint.

    Raises:
        DiskError: the checkpoint cannot be read.
    """
    try:
        lines = disk.read_bytes(workdir / _ROWS).split(b"\n")
    except (*disk.ABSENT, disk.DiskError):
        lines = []
    row = {}
    for line in lines:
        # Most lines are about training steps, and parsing all of a long run takes time.
        if b'"eval_loss"' not in line:
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            # A kill can cut a line off.
            continue
        if isinstance(fields, dict) and fields.get("step") == step:
            # A run that was rolled back repeats steps. Its last row counts.
            row = fields
    return row or checkpointer.read(workdir / CHECKPOINTS / str(step))


def measured(row: Mapping[str, Any], averaged: bool, task: str) -> str:
    """Return the sentence of a model card on the run's evaluation: its loss and other metrics.

    It says so if there is no evaluation, if the loss was not finite, or if the moving average of
    the weights was evaluated and the card is for the weights themselves.

    Args:
        row: Result of `evaluation`, which may be empty.
        averaged: Whether the card is for the moving average of the weights.
        task: "tokens" or "images".
    """
    loss = row.get("eval_loss")
    if "eval_loss" not in row:
        return "The run recorded no evaluation at this step."
    if loss is None or not math.isfinite(loss):
        return "The evaluation at this step was not finite."

    example = "a token" if task == "tokens" else "an image"
    text = f"Evaluation loss {loss:.4f} nats {example}"
    for name, metric in shown_everywhere().items():
        value = row.get(row_name(name))
        if name == "loss" or value is None:
            continue
        text += f", {metric.label} {metric.text_with_unit(value)}"
        if metric.share and task == "tokens":
            text += " of next tokens"
    text += ", on the run's own evaluation examples."
    if row.get("eval_weights") == "ema" and not averaged:
        text += " Measured on the moving average of the weights, which these are not."
    return text


def study(config: Config) -> tuned.Tuned | None:
    """Return the tuned preset whose base, constants and optimizer a run has, or `None`.

    The model card of the run then cites the study behind this preset. Of the optimizer, only the
    fields that the study tuned are compared, without `warmup_fraction`. `joint`, `noise_scale` and
    `zero_readout` of the preset are not compared.
    """
    for use in tuned.files():
        if use.partition(":")[0] != config.preset.name:
            continue
        try:
            reference, _, preset = applied(config, ["--preset", use], str(config.steps))
        except PresetError:
            # A file that a user has put among the tuned presets may be invalid.
            continue
        if preset is None:
            continue

        reference = fitted(reference, preset)
        # These settings depend on the run's batch and readout, not on the study.
        expected = dataclasses.replace(
            reference.preset,
            joint=config.preset.joint,
            noise_scale=config.preset.noise_scale,
            zero_readout=config.preset.zero_readout,
        )
        if expected == config.preset and _has_optimizer(config, reference, preset):
            return preset
    return None


def _has_optimizer(config: Config, reference: Config, preset: tuned.Tuned) -> bool:
    """Return whether a config has the reference's values of the optimizer fields a study tuned.

    `warmup_fraction` is not compared, because a run of another length rounds it.
    """
    for name in preset.optimizer:
        if name in _ROUNDED:
            continue
        if getattr(reference.optimizer, name) != getattr(config.optimizer, name):
            return False
    return True


def of_study(preset: tuned.Tuned, sizes: Mapping[str, int]) -> list[str]:
    """Return lines of a model card on the study that found a tuned preset: its result and data.

    The last line says by how many doublings each size of the card's model is beyond the sizes
    studied. A preset that was published by others has lines on its source instead.

    Args:
        sizes: sizes of the card's model by logical axis.
    """
    if preset.is_published:
        return _of_publication(preset)
    provenance = preset.provenance
    optimum = provenance["log2_optimum"]
    data_kind, colon, path = provenance["data"].partition(":")
    data = data_kind
    if colon:
        # A card names only the last part of a path, because paths differ between machines.
        data = f"{data_kind}:{path.rstrip('/').rpartition('/')[2]}"
    num_seeds = provenance["seeds"]
    seeds = "one seed" if num_seeds == 1 else f"{num_seeds} paired seeds"

    lines = [
        f"- evidence: {preset.evidence}",
        f"- best rate at the base: 2^{optimum['value']:.2f} {tuned.bounds(optimum)}, from {seeds}",
    ]
    for growth in provenance["transfer"]:
        sizes_text = ", ".join(map(str, growth["sizes"]))
        lines.append(f"- grown in {growth['axis']} {sizes_text}: {tuned.verdict(growth)}")
    if not provenance["transfer"]:
        lines.append("- grown in nothing: one size")
    lines.append(
        f"- study: {provenance['recipe']} on {data}, {provenance['steps']:,} steps of "
        f"{provenance['batch']}, {provenance['seen']:,} {provenance['unit']}s a run, "
        f"{provenance['date']}"
    )

    distances = preset.distance(sizes)
    if distances:
        far = ", ".join(f"{axis} {doublings:+.1f}" for axis, doublings in distances.items())
        lines.append(f"- this model: {far} doublings beyond the sizes studied")
    else:
        lines.append("- this model: within the sizes studied")
    return lines


def _of_publication(preset: tuned.Tuned) -> list[str]:
    """Return lines of a model card on a tuned preset that was published by others, not measured."""
    provenance = preset.provenance
    source = provenance["source"]
    models = ", ".join(table["model"] for table in provenance["tables"])
    return [
        f"- evidence: published by others as {source['name']}, and not measured here "
        f"({provenance['status']})",
        f"- source: {source['repository']} at {source['commit']}",
        f"- its models: {models}, on {provenance['data']}",
    ]
