"""The page of tuned presets agrees with their files and names the untested ones."""

from __future__ import annotations

import re

import pytest

from mupax.__main__ import main
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


def test_every_published_preset_has_a_row_and_the_command_says_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = cards.page()
    for path in find.PUBLISHED.glob("*.json"):
        preset = find.load(path)
        study = preset.provenance
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{preset.use}` |")]
        assert f"{study['source']['repository']}/tree/{study['source']['commit']})" in row
        assert main(["presets", "tuned", preset.use]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        for words in (*study["source"]["files"], *study["unknown"], *study["differs"]):
            assert words in shown
    for left in published.LEFT_OUT:
        assert left.source in text
        assert left.reason
