"""`mupax check MODEL --desiderata`: which dimensions can be scaled, measured beside theory (`presets desiderata`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mupax import terminal
from mupax.presets import Preset
from mupax.presets.analysis import desiderata as theory
from mupax.presets.analysis.desiderata import Cell
from mupax.train.config.preset import preset_for
from mupax.train.config.run import Config
from mupax.train.studies.desiderata.series import OF_TOKENS, Series, base, batch, grown
from mupax.zoo.definition import definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.transformer import transformer

BAND = 0.15
"""Theory and measurement agree where no exponent of a cell is farther apart."""

Row = dict[str, dict[str, tuple[Cell, Cell]]]
"""Dimension to desideratum to theory and measurement."""


def compared(
    preset: Preset, dimension: str, slopes: Mapping[str, Mapping[str, float]], *, encoder: bool = False
) -> dict[str, tuple[Cell, Cell]]:
    """By desideratum theory and the same exponents as measured.

    Args:
        preset: that was measured.
        dimension: that grew.
        slopes: of `Series.slopes`.
        encoder: of an encoder-decoder.
    """
    expected = theory.desiderata(preset, dimension, encoder=encoder)
    # The largest of many measured exponents is one that noise has lifted: what theory has at the top is their measure.
    top = [slopes["parts"][name] for name, x in expected["balance"].exponents.items() if not x]
    most = sum(top) / max(len(top), 1)
    measured = {
        "signal": slopes["signal"],
        "speed": slopes["speed"],
        "balance": {name: x - most for name, x in slopes["parts"].items()},
        "loss decay": slopes["parts"],
    }
    return {
        column: (
            cell,
            theory.cell({name: measured[column][name] for name in cell.exponents}, BAND) if cell.exponents else cell,
        )
        for column, cell in expected.items()
    }


def apart(expected: Cell, measured: Cell) -> dict[str, float]:
    """Names whose exponents are farther apart than `BAND`, and by how much they are measured to be larger.

    Args:
        expected: by theory.
        measured: the same exponents.
    """
    gaps = {name: measured.exponents[name] - x for name, x in expected.exponents.items()}
    return {name: by for name, by in gaps.items() if abs(by) > BAND}


def measured(
    model: ModelConfig,
    presets: Sequence[Callable[[Mapping[str, int]], Preset]],
    *,
    count: int,
    seeds: int,
    dimensions: Collection[str] | None = None,
) -> list[Row]:
    """Some dimensions of some presets, each dimension's models compiled once.

    Args:
        model: whose structure.
        presets: base to preset, of each.
        count: sizes of a dimension, each twice the one before.
        seeds: initializations of each size.
        dimensions: which; all that the model has unless given.
    """
    rows: list[Row] = [{} for _ in presets]
    for dimension in dimensions or theory.growths(encoder=model.denoises):
        if dimension == "positions" and model.task != "tokens":
            continue
        models = grown(model, dimension, count)
        batches = [batch(one, dimension) for one in models]
        series = Series([definition(one) for one in models], batches, seeds, masked=dimension not in OF_TOKENS)
        for row, make in zip(rows, presets, strict=True):
            preset = make(base(models[0], dimension))
            row[dimension] = compared(preset, dimension, series.slopes(preset), encoder=model.denoises)
    return rows


def table(row: Row) -> list[list[str]]:
    """Every dimension, theory | measurement in every cell, and what is farther apart than `BAND`.

    Args:
        row: of one preset.
    """
    lines = [["dimension", "scales", *theory.COLUMNS, "apart"]]
    for dimension, cells in row.items():
        far = [(name, by) for pair in cells.values() for name, by in apart(*pair).items()]
        can = all(expected.holds for expected, _ in cells.values())
        lines.append([
            dimension,
            "can" if can else "cannot",
            *(cell_text(*cells[column]) for column in theory.COLUMNS),
            ", ".join(f"{name} {by:+.2f}" for name, by in far) or "-",
        ])  # fmt: skip
    return lines


def cell_text(expected: Cell, measurement: Cell) -> str:
    """Theory and measurement in one cell: `yes | -0.03`, `no: q, k -0.5 | -0.51`.

    Args:
        expected: by theory.
        measurement: the same exponents, measured.
    """
    if expected.exponent is None:
        return expected.why
    if expected.holds:
        return f"yes | {max(measurement.exponents.values(), key=abs):+.2f}"
    mean = sum(measurement.exponents[name] for name in expected.of) / len(expected.of)
    return f"no: {expected.names} {expected.exponent:+.3g} | {mean:+.2f}"


def main(config: Config, *, count: int, seeds: int, path: str | None, dry_run: bool = False) -> int:
    """`mupax check MODEL --desiderata`: 0 where theory and measurement agree on every cell.

    Args:
        config: has the model and the preset.
        count: sizes of a dimension.
        seeds: of a size.
        path: of a JSON file to write.
        dry_run: print what theory says, and measure nothing.

    Raises:
        ConfigError: no transformer, or one with other mappings.
    """

    def preset(base: Mapping[str, int]) -> Preset:
        absolute = preset_for(dataclasses.replace(config.preset, base=None), model)
        return absolute if absolute.baseless else dataclasses.replace(absolute, base=dict(base))

    model = transformer(config.model, "cutting blocks into mappings")
    plain = {"parallel": False, "window": None, "post_norm": False, "attention_softcap": None, "logit_softcap": None}
    for field in dataclasses.fields(model):
        if field.name in plain and (value := getattr(model, field.name)) != plain[field.name]:
            raise ConfigError(
                f"model.{field.name} is {value}, and the mappings that a block is cut into are those of one without; write "
                f"{field.name} {plain[field.name]}"
            )
    if dry_run:
        print(terminal.table(theory.rows(preset({}), encoder=model.denoises)))
        return 0
    (row,) = measured(model, [preset], count=count, seeds=seeds)
    terminal.say(f"{config.recipe} under {preset({}).label}: exponent of each dimension, theory | measured")
    print(terminal.table(table(row)))
    if path:
        Path(path).write_text(json.dumps(to_json(row), indent=2) + "\n")
    return 1 if any(apart(*pair) for cells in row.values() for pair in cells.values()) else 0


def to_json(row: Row) -> dict[str, Any]:
    """All exponents, by dimension, desideratum and name as [theory, measured]."""
    return {
        dimension: {
            column: {name: [x, round(measurement.exponents[name], 4)] for name, x in expected.exponents.items()}
            for column, (expected, measurement) in cells.items()
        }
        for dimension, cells in row.items()
    }
