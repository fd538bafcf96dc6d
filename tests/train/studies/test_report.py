"""The report that studies share: its order, its width, and a page that needs nothing else."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from mupax import terminal
from mupax.train.studies.report import Report, Section, Step, finite, write_json

pytestmark = pytest.mark.core
REPORT = Report(
    answers=["Keep the learning rate: " + "it costs little at every size that was measured, " * 3],
    steps=[
        Step("Next: train the largest size", "mupax train lm-tiny " + "--model.width 4096 " * 6),
        Step("Next: look"),
    ],
    sections=[
        Section(
            [
                ["size", "best rate", "note"],
                ["64", "2^-7", "a note that is longer than what is left of a line " * 2],
            ],
            title="mup, growing <heads>",
            lines=[
                "ended because the verdict is decided, after many minutes of training on this machine"
            ],
            left=("note",),
            verdict="transfers",
        )
    ],
    remarks=["caution: a & b"],
)


def test_the_answer_stands_first_and_lines_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "columns", lambda stream=None: 80)
    REPORT.show()
    out = capsys.readouterr().out
    parts = [
        "Keep the learning rate",
        "Next: train the largest size:",
        "mup, growing <heads>",
        "2^-7",
        "ended",
        "caution",
    ]
    assert [out.index(part) for part in parts] == sorted(out.index(part) for part in parts)
    assert max(map(len, out.splitlines())) <= 80
    # A step without a command has no colon that leads nowhere.
    assert "Next: look\n" in out


def test_the_page_has_the_same_and_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    REPORT.write_page(page, "A title", "mupax transfer ...", {"steps": 7}.items())
    text = page.read_text()
    assert "mup, growing &lt;heads&gt;" in text
    assert 'class="transfers"' in text
    assert "caution: a &amp; b" in text
    assert (
        text.index("Keep the learning rate")
        < text.index("<table")
        < text.index("mupax transfer ...")
    )
    assert re.findall(r"(?:src|href)=", text) == []


def test_json_is_written_into_a_new_folder_without_numbers_that_are_not_finite(
    tmp_path: Path,
) -> None:
    path = write_json(
        tmp_path / "new" / "a.json",
        {"a": finite(math.inf), "b": finite(1 / 3, 2), "c": finite(1 / 3), "d": [math.nan]},
    )
    numbers = '"b": 0.33,\n "c": 0.3333333333333333,'
    assert path.read_text() == f'{{\n "a": null,\n {numbers}\n "d": [\n  null\n ]\n}}\n'
