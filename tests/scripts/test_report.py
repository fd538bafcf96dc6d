"""The report's numbers are the records', and its template has none of its own."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from scripts.report import __main__ as command
from scripts.report import facts

MEASURED = re.compile(r"\d+\.\d+(?!\d|pt|em|fr|mm)|\b\d{3,}\b(?!%)")
"""A number that could be a result: a decimal that is no length, or one of three digits."""


def test_the_template_has_no_number_of_its_own() -> None:
    text = command.TEMPLATE.read_text()
    assert MEASURED.findall(text.replace("calc.round(100 * part", "")) == []
    assert MEASURED.findall("ends 0.013 nats above") == ["0.013"]
    assert MEASURED.findall("of 2013 slopes") == ["2013"]


def test_every_fact_of_the_template_is_there() -> None:
    content = json.loads(json.dumps(facts.gathered()))
    names = set(re.findall(r"facts\.(\w+(?:\.\w+)*)", command.TEMPLATE.read_text()))
    assert names
    for name in names:
        if name == "json":  # the file
            continue
        value = content
        for part in name.split("."):
            if part in ("map", "at", "pairs"):
                break
            value = value[part]


def test_facts_are_what_the_pages_say() -> None:
    pages = {name: (facts.DOCS / f"{name}.md").read_text() for name in ("reproduction", "checks")}
    figures = facts.figures()
    wrong = facts.wrong_rules()
    theory = facts.theory()
    reproduced = f"**{figures['reproduce']} of {figures['claims']} predictions reproduce**"
    assert reproduced in pages["reproduction"]
    assert f" of {figures['controls']} controls fail" in pages["reproduction"]
    assert f"Of {wrong['tried']} mutants {wrong['change']} change training" in pages["checks"]
    assert f"catches **{wrong['caught']}**" in pages["checks"]
    exponents = f"Of {theory['slopes']} measured exponents 0 contradict theory."
    assert f"{exponents} {theory['counts']['as predicted']} are healthy." in pages["checks"]


def test_a_missing_value_is_unknown_and_stops_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    untrained = {"came": 0, "inside90": 0.0, "median_error": None, "largest_error": None}
    frozen = {"observable": "change logits", "step": 1, "predicted": 0.0, "slope": None}
    study = {"preset": "mup", "grow": "depth", "verdict": "fail"}
    records = {
        "forecasts.json": {"summary": {"new": untrained}},
        "theory-and-measurement.json.gz": {
            "studies": [{**study, "observables": [{**frozen, "verdict": "frozen"}]}]
        },
    }
    monkeypatch.setattr(facts, "_record", records.__getitem__)
    assert facts.forecasts() == [["new", "0", "unknown", "unknown", "unknown"]]
    (group,) = facts.theory()["groups"]
    assert group["rows"] == [["mup", "", "", "", "+0.00 | unknown", "fail"]]
    sizes = [{"losses": [1.0], "reference_minus_this": [0.25]}]
    assert facts._arm({"label": "one seed", "sizes": sizes})[-1] == "+0.2500"


def test_it_is_set_where_typst_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "report.pdf"
    if importlib.util.find_spec("typst") is None:
        assert command.main(["--out", str(out)]) == 2
        assert "make report" in capsys.readouterr().err
        pytest.skip("typst is not installed (make report)")
    assert command.main(["--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"%PDF")
