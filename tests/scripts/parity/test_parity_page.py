"""The table of parity has every layout that is read, within the bound. Needs no torch."""

from __future__ import annotations

import pytest

from mupax.zoo.huggingface import config as huggingface
from scripts.pages.markdown import parts
from scripts.parity import __main__ as parity
from scripts.parity import models

pytestmark = pytest.mark.core

BOUND = 1e-4
SAME = {"mt5": "t5"}
"""Layouts that are read as another one, tensor by tensor."""


def test_the_record_has_every_case_that_the_command_measures() -> None:
    measured = {(row.model, row.way, row.preset) for row in parity.recorded()}
    assert measured == set(parity.cases())
    assert {way for _, way, _ in parity.cases()} == {"in", "out"}


def test_the_page_has_the_table_of_the_record() -> None:
    page = parts(parity.DOCUMENT.read_text(), "parity")[1]
    assert page.strip() == parity.table(parity.recorded())


def test_every_layout_is_measured() -> None:
    measured = {huggingface.family_of(model) for model in models.MODELS.values()}
    assert {SAME.get(kind, kind) for kind in huggingface._READABLE} == measured


def test_every_difference_is_within_the_bound() -> None:
    assert [row for row in parity.recorded() if not row.difference < BOUND] == []
    assert len(parity.recorded()) > 200
