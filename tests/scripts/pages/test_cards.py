"""The page of tuned presets says what the tuned presets' files say, and which are evidence of nothing beyond their size."""

from __future__ import annotations

import re

import pytest

from mupax.presets.tuned import find
from scripts.pages import cards, published


def test_the_page_is_made_of_the_files() -> None:
    assert cards.PAGE.read_text() == cards.page(), "write it again: python -m scripts.pages.cards"


def test_every_tuned_preset_has_a_row_with_its_verdict_and_rate() -> None:
    text = cards.page()
    for path in find.FOLDER.glob("*.json"):
        preset = find.load(path)
        row = rf"^\| `{re.escape(preset.use)}` \| ([^|]+) \| (\w+) ([\d.]+),"
        ((verdict, optimizer, rate),) = re.findall(row, text, re.MULTILINE)
        assert verdict == preset.evidence
        assert optimizer == preset.optimizer["name"]
        assert float(rate) == pytest.approx(preset.optimizer["peak_lr"], rel=1e-3)


def test_every_published_preset_has_a_card_with_its_commit_and_what_is_not_known() -> None:
    text = cards.page()
    for path in find.PUBLISHED.glob("*.json"):
        preset = find.load(path)
        (card,) = re.findall(
            rf"^### {re.escape(preset.use)}\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL
        )
        study = preset.provenance
        for words in (
            study["source"]["commit"][:12],
            *study["source"]["files"],
            *study["unknown"],
            *study["differs"],
        ):
            assert words in card
    for left in published.LEFT_OUT:
        assert left.source in text
        assert left.reason
