"""Cards say what the tuned presets' files say, and which are evidence of nothing beyond their size."""

from __future__ import annotations

import re

from mupax import spellings
from mupax.presets.tuned import find
from scripts.pages import cards, published


def test_the_page_is_made_of_the_files() -> None:
    assert cards.PAGE.read_text() == cards.page(), "write it again: python -m scripts.pages.cards"


def test_every_tuned_preset_has_a_card_that_begins_with_its_evidence() -> None:
    text = cards.page()
    for path in find.FOLDER.glob("*.json"):
        preset = find.load(path)
        (verdict,) = re.findall(
            rf"^## {re.escape(preset.use)}\n\n\*\*([^*]+)\.\*\*", text, re.MULTILINE
        )
        assert verdict.lower() == preset.evidence
        assert spellings.current(preset.provenance["command"]) in text


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


def test_anchors_of_the_table_are_those_of_its_headings() -> None:
    text = cards.page()
    headings = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^## (.*)$", text, re.MULTILINE)
    }
    anchors = re.findall(r"\]\(#([^)]+)\)", text)
    assert set(anchors) == headings
