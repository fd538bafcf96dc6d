"""Printed checks: numbers fit into 80 columns, with intervals and bands where there is room."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from mupax.train.studies.check import report
from mupax.train.studies.check.judge import Finding
from mupax.train.studies.check.theory import Expected

FINDINGS = [
    Finding("movement/block.norm_gain/attention_norm", 1, 0.01, -0.02, 0.03, (1.0, 1.0), Expected(0.0, 0.08, 0.08)),
    Finding("update query", 10, -0.12, -0.14, -0.10, (1.0, 0.9), Expected(0.0, 0.23, 0.12)),
    Finding("update attention", 3, 1.24, 1.22, 1.27, (1.0, 9.0), Expected(1.5, 1.55, 0.12, "explodes", ("query", "attention out"))),
]  # fmt: skip


def printed(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.show(console, FINDINGS, "lm-proxy under mup, growing width")
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.core
def test_no_number_is_cut_off_at_80_columns() -> None:
    text = printed(80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for finding in FINDINGS:
        (line,) = [
            line for line in text.splitlines() if line.strip().startswith(finding.observable)
        ]
        assert f"{finding.slope:+.2f}" in line
        assert f"{finding.expected.slope:+.2f}" in line
        assert finding.verdict in line


@pytest.mark.core
def test_intervals_and_bands_are_there_where_they_fit() -> None:
    text = printed(160)
    for finding in FINDINGS:
        assert f"[{finding.low:+.2f}, {finding.high:+.2f}]" in text
        assert f"(-{finding.expected.below:.2f} +{finding.expected.above:.2f})" in text
    assert report.PASSING not in text
    assert " ".join(printed(80).split()).count(report.PASSING) == 1


def test_the_panels_have_a_verdict_and_what_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    report.panels(
        tmp_path / "check.png", FINDINGS, [1.0, 2.0], "width / smallest", "lm-proxy under mup"
    )
    (figure,) = drawn
    titles = {panel.get_title() for panel in figure.axes if panel.get_title()}
    assert titles == {
        "movement, block.norm_gain,\nattention_norm\n✓ +0.01 [-0.02, +0.03]\npasses from -0.08 to +0.08",
        "update query\n✓ -0.12 [-0.14, -0.10]\npasses from -0.23 to +0.12",
        "update attention\n✗ +1.24 [+1.22, +1.27]\nexplodes at step 3\npasses from -0.05 to +1.62",
    }
    assert figure.get_suptitle().strip() == "lm-proxy under mup: fails"
    assert report.PASSING in figure.get_supxlabel()
    assert all(
        report._BAND in {patch.get_label() for patch in panel.collections}
        for panel in figure.axes
        if panel.get_title()
    )


def test_the_picture_has_a_row_of_every_observable_and_failures_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    report.figure(tmp_path / "check.png", FINDINGS, "width", "lm-proxy under mup")
    (figure,) = drawn
    (panel,) = figure.axes
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert labels == ["update attention", "update query", "block.norm_gain, attention_norm"]
    colours = [label.get_color() for label in panel.get_yticklabels()]
    assert colours == [report._WRONG, "black", "black"]
    assert "fails: 1 of 3 observables" in [text.get_text() for text in figure.texts]
    assert "+1.24 explodes" in [text.get_text() for text in panel.texts]


@pytest.mark.core
def test_python_is_told_what_failed_of_which_parameter() -> None:
    off = dataclasses.replace(FINDINGS[0], base=0.62)
    with pytest.raises(
        report.CheckFailure, match=r"movement of block\.norm_gain, attention_norm after 1 step"
    ) as failure:
        report.require([off, FINDINGS[1]])
    assert "0.62 times at the smallest size" in str(failure.value)
    assert "update query" not in str(failure.value)
    report.require(FINDINGS[:2])
    assert report.text(FINDINGS[:2]) == "passes: all 2 observables within theory"


@pytest.mark.core
def test_a_verdict_names_growth_and_start_if_both_are_wrong() -> None:
    start = dataclasses.replace(FINDINGS[0], base=0.62)
    assert start.verdict == "contradicts theory (0.62 times at the smallest size)"
    off_twice = dataclasses.replace(start, slope=0.5, low=0.4, high=0.6)
    assert off_twice.verdict == (
        "contradicts theory (in its growth, and 0.62 times at the smallest size)"
    )


@pytest.mark.core
def test_the_conclusion_comes_before_the_table() -> None:
    console = Console(file=io.StringIO(), width=160)
    report.show(
        console, FINDINGS[:2], "a title", subject="mup follows its table", following=["next: mupax"]
    )
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[:2] == [
        "passes: mup follows its table: all 2 observables within theory",
        "next: mupax",
    ]
    assert "a title" in lines[3]
