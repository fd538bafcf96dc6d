"""The frame of the figures: verdicts, records that are measured once, and the page."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from scripts.figures import __main__ as command
from scripts.figures import page, result
from scripts.figures.initialization import fig_linear, linear_net
from scripts.figures.result import Row

DOCS = Path(__file__).resolve().parents[3] / "docs" / "evidence"
RECORDS = sorted((DOCS / "figures").glob("fig*.json"))


def row(measured: float, low: float, high: float, **fields: object) -> Row:
    return Row(
        what="",
        measured=measured,
        low=low,
        high=high,
        **{"predicted": -1.0, "tolerance": 0.1, **fields},
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("result_row", "verdict"),
    [
        (row(-1.02, -1.06, -0.98), "reproduces"),
        (row(-1.02, -1.2, -0.84), "reproduces, with an interval that reaches out of the band"),
        (row(-1.02, -1.3, -0.74), "undecided: the interval is twice as wide as the band"),
        (row(-0.85, -1.0, -0.7), "undecided: outside the band, the interval meets it"),
        (row(-0.7, -0.8, -0.6), "does not reproduce"),
        (row(-0.7, -0.8, -0.6, control=True), "control: fails as it must"),
        (row(-1.0, -1.1, -0.9, control=True), "control: does not fail, so the check shows nothing"),
        (row(-1.0, -1.1, -0.9, predicted=None), "measured, nothing predicted"),
        (row(float("nan"), 0.0, 0.0), "not measured"),
    ],
)
def test_verdicts(result_row: Row, verdict: str):
    assert result_row.verdict == verdict


@pytest.mark.core
def test_a_power_law_is_found_and_a_wrong_exponent_is_not():
    sizes = [4, 8, 16, 32]
    rng = np.random.default_rng(0)
    values = 3.0 * np.array(sizes)[:, None] ** -0.5 * np.exp(0.02 * rng.standard_normal((4, 6)))
    right = result.exponent("", sizes, values, predicted=-0.5)
    assert right.verdict == "reproduces"
    assert right.low < right.measured < right.high
    assert result.exponent("", sizes, values, predicted=-1.0).verdict == "does not reproduce"
    with pytest.raises(ValueError, match="1 seed has no interval"):
        result.slope(sizes, values[:, :1])


@pytest.mark.core
def test_the_jackknife_of_a_mean_is_its_interval():
    values = np.random.default_rng(0).standard_normal(9)
    interval = result.jackknife(lambda subset: float(values[subset].mean()), 9)
    np.testing.assert_allclose(interval, result.mean(values), rtol=1e-12)


def test_a_figure_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """A tiny version of a real one: record, picture and page; then drawn from the record alone."""
    calls = []

    def measure(settings: result.Settings, work: Path) -> result.Data:
        calls.append(work)
        return fig_linear.measure(settings, work)

    small = {"depth": [3, 5], "width": 500, "rate": 0.1, "seeds": 3}
    tiny = dataclasses.replace(fig_linear.FIGURE, small=small, measure=measure)
    monkeypatch.setattr(page, "load", lambda name: tiny)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "docs" / "evidence" / "figures"
    path = out / "fig_linear.json"
    arguments = ["fig_linear", "--out", str(out)]
    assert command.main([*arguments, "--render"]) == 0
    assert "nothing measured" in capsys.readouterr().out
    for _ in range(2):
        assert command.main(arguments) == 0
    assert len(calls) == 1
    assert command.main([*arguments, "--again"]) == 0
    assert len(calls) == 2
    shown = capsys.readouterr().out
    record = result.load(path)
    assert [record_row["predicted"] for record_row in record["rows"]] == [1.14, 1.55] * 2
    assert [record_row["control"] for record_row in record["rows"]] == [False, False, True, True]
    assert all(record_row["what"] in shown for record_row in record["rows"])
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "figures/fig_linear.png" in (out.parent / "reproduction.md").read_text()
    # Runs that are used again take no time, so the seconds of the first measurement stay.
    tiny = dataclasses.replace(tiny, keeps_runs=True)
    result.save(path, {**record, "seconds": 1000})
    assert command.main([*arguments, "--again"]) == 0
    assert result.load(path)["seconds"] == 1000
    calls.pop()
    tiny = dataclasses.replace(tiny, small={**small, "seeds": 4})
    assert command.main(arguments) == 0
    assert len(calls) == 3, "other settings are another measurement"


def test_every_figure_says_whether_it_keeps_runs():
    for name in page.names():
        figure = page.load(name)
        ignores_its_folder = "del work\n" in inspect.getsource(figure.measure)
        assert figure.keeps_runs != ignores_its_folder, name


@pytest.mark.core
def test_a_wrong_name_is_answered(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        command.main(["fig3cc"])
    assert "no figure is named 'fig3cc'; did you mean fig3c?" in capsys.readouterr().err


@pytest.mark.core
def test_the_page_is_made_from_the_records():
    assert RECORDS
    assert (DOCS / "reproduction.md").read_text() == page.text(DOCS / "figures")


@pytest.mark.core
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_rows_follow_from_the_numbers(path: Path):
    record = json.loads(path.read_text())
    figure = page.load(path.stem.removesuffix("-full"))
    settings = figure.full if path.stem.endswith("-full") else figure.small
    assert result.same_settings(record, settings), "measure again: python -m scripts.figures NAME"
    again = result.record(figure, record["settings"], record["data"])
    assert len(again["rows"]) == len(record["rows"])
    for result_row, stored in zip(again["rows"], record["rows"], strict=True):
        for name, value in stored.items():
            # Sums differ in their last digits between builds of numpy.
            if isinstance(value, float):
                value = pytest.approx(value, rel=1e-4, abs=1e-6)
            assert result_row[name] == value
    assert path.with_suffix(".png").exists()
    assert path.stat().st_size < 1_000_000


def test_the_linear_net_without_matrices_is_the_one_with_them():
    """Means over nets of a small width, far from the limit; the control has no response terms."""
    depth = 8
    width = 64
    rate = 0.1

    def means(make, count: int, **fields: bool) -> np.ndarray:
        rngs = np.random.default_rng(1).spawn(count)
        return np.array([make(depth, width, rate, rng, **fields) for rng in rngs])

    dense = means(linear_net.one_step_dense, 400)
    free = means(linear_net.one_step, 4000)
    error = np.sqrt(dense.var(axis=0) / 400 + free.var(axis=0) / 4000)
    assert (abs(dense.mean(axis=0) - free.mean(axis=0)) < 4 * error).all()
    control = means(linear_net.one_step, 400, response=False).mean(axis=0)
    assert dense.mean(axis=0)[-1] - control[-1] > 8 * error[-1]


def test_a_damaged_run_of_a_figure_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "runs" / "figures" / "fig_effective_vision" / "points.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("{}\n")
    with pytest.raises(SystemExit) as ended:
        command.main(["fig_effective_vision", "--out", str(tmp_path / "figures")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {rows} line 1 is not as it was written")
