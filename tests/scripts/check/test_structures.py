"""The record of right presets on different structures."""

from __future__ import annotations

import pytest

from mupax.train.studies.check import check
from mupax.zoo.definition import definition
from scripts.check import structures
from scripts.check.wrong_tables import MODELS


@pytest.mark.parametrize("grow", structures.RIGHT)
def test_recorded_rows_accept_what_their_presets_accept(grow: str) -> None:
    grown = check.grow(MODELS["lm"], grow, structures.SIZES)
    ends = definition(grown[0]), definition(grown[-1])
    accepted = {}
    for name in structures.RIGHT[grow]:
        preset = structures.right(name, ends[0])
        accepted[name] = list(structures.accepted(preset, ends))
    rows = [row for row in structures.rows_of_file() if row["grow"] == grow]
    assert rows
    for row in rows:
        assert row["accept"] == accepted[row["preset"]], (row["model"], row["preset"])
