"""The table of parity has every layout that is read, both ways, and every difference in it is within the bound. Needs no torch."""

from __future__ import annotations

import re

import pytest

from mupax.zoo.huggingface import config as huggingface
from scripts.pages.markdown import parts
from scripts.parity import __main__ as parity
from scripts.parity import models

pytestmark = pytest.mark.core

ROW = re.compile(
    r"^\| ([^|]+) \| ([^|]+) \| (\d\.\de[-+]\d\d) \| (\d\.\de[-+]\d\d) \|", re.MULTILINE
)
BOUND = 1e-4
SAME = {"mt5": "t5"}
"""Layouts that are read as another one, tensor by tensor."""


def rows() -> list[tuple[str, str, float, float]]:
    page = parts(parity.DOCUMENT.read_text(), "parity")[1]
    return [
        (model, preset, float(into), float(out)) for model, preset, into, out in ROW.findall(page)
    ]


def test_the_page_has_every_case_that_the_command_measures() -> None:
    assert {(model, preset) for model, preset, *_ in rows()} == {
        (model, preset) for model, _, preset in parity.cases()
    }
    assert {way for _, way, _ in parity.cases()} == {"in", "out"}


def test_every_layout_is_measured() -> None:
    measured = {huggingface.family_of(model) for model in models.MODELS.values()}
    assert {SAME.get(kind, kind) for kind in huggingface._READ} == measured


def test_every_difference_is_within_the_bound() -> None:
    assert [row for row in rows() if not max(row[2:]) < BOUND] == []
    assert len(rows()) > 100
