"""Rows and lines about speed, from steps whose times are known."""

from __future__ import annotations

import pytest

from mupax.train.run.report import metrics, progress
from mupax.train.run.report.progress import Timing, duration, quantity

pytestmark = pytest.mark.core


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def session(*, peak: float | None = None, memory: int | None = None) -> tuple[Timing, Clock]:
    clock = Clock()
    return Timing("tokens", 3e6, peak, 12.5, lambda: memory, clock), clock


def steps(timer: Timing, *seconds: float, units: int = 700, waited: float = 0.0) -> None:
    for each in seconds:
        timer.step(each, units, waited)


def test_the_first_step_of_a_session_counts_nowhere() -> None:
    timer, _ = session()
    assert timer.row() == {}
    steps(timer, 60.0)
    assert timer.row() == {}
    assert timer.facts() == {}
    steps(timer, 0.1, 0.1)
    assert timer.row()["perf_step_seconds_p99"] == 0.1
    assert timer.facts()["step"].startswith("100 ms median, p90 100 ms, p99 100 ms")


def test_a_row_covers_the_steps_since_the_last_one_and_the_end_all() -> None:
    timer, _ = session()
    steps(timer, 60.0, *[0.1] * 50, *[0.2] * 40, *[0.3] * 9, 7.0)
    row = timer.row()
    assert [row[f"perf_step_seconds_p{percent}"] for percent in (50, 90, 99)] == [0.1, 0.2, 0.3]
    seconds = 50 * 0.1 + 40 * 0.2 + 9 * 0.3 + 7
    assert row["perf_flops_per_second"] == pytest.approx(100 * 700 * 3e6 / seconds, rel=1e-4)
    steps(timer, 0.5)
    row = timer.row()
    assert [row[f"perf_step_seconds_p{percent}"] for percent in (50, 90, 99)] == [0.5] * 3
    assert row["perf_flops_per_second"] == pytest.approx(700 * 3e6 / 0.5)
    assert timer.facts()["step"].startswith("200 ms median, p90 300 ms, p99 500 ms")


def test_waiting_is_a_share_of_the_time() -> None:
    timer, _ = session()
    steps(timer, 60.0, waited=55.0)
    steps(timer, 0.1, 0.1, 0.1)
    steps(timer, 0.1, waited=0.08)
    assert timer.row()["perf_data_wait"] == pytest.approx(0.2)
    assert timer.facts()["step"].endswith("waiting for data 20.0 %")


def test_utilization_and_memory_only_where_they_are_known() -> None:
    timer, _ = session()
    steps(timer, 1.0, 0.1)
    row, facts = timer.row(), timer.facts()
    assert not {"perf_mfu", "perf_memory_peak_bytes"} & row.keys()
    assert facts["device"] == "21.0G FLOP/s"
    timer, _ = session(peak=4.2e10, memory=3 * 2**29)
    steps(timer, 1.0, 0.1)
    row, facts = timer.row(), timer.facts()
    assert row["perf_mfu"] == pytest.approx(0.5)
    assert row["perf_memory_peak_bytes"] == 3 * 2**29
    assert facts["device"] == "21.0G FLOP/s, MFU 50.0 %, at most 1.50 GiB in use"


def test_compiling_is_in_the_first_row_only_and_at_the_end() -> None:
    timer, _ = session()
    steps(timer, 1.0, 0.1)
    assert timer.row()["perf_compile_seconds"] == 12.5
    steps(timer, 0.1)
    assert "perf_compile_seconds" not in timer.row()
    assert timer.facts()["compile"] == "12.5 s"


def test_a_row_is_due_at_an_interval() -> None:
    timer, clock = session()
    assert not timer.due
    clock.now += progress.INTERVAL_S
    assert timer.due
    timer.row()
    assert not timer.due


def test_every_key_is_explained_where_the_file_is() -> None:
    timer, _ = session(peak=1e12, memory=1)
    steps(timer, 1.0, 0.1)
    explained = (metrics.__doc__ or "").replace(
        "_p50, _p90, _p99:", "_p50, perf_step_seconds_p90, perf_step_seconds_p99:"
    )
    assert [
        key for key in timer.row() if f"{key}:" not in explained and f"{key}," not in explained
    ] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (0.1234, "0.123"),
        (0.9996, "1.00"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (45_230.0, "45.2k"),
        (1.234e6, "1.23M"),
        (5.6e17, "560P"),
    ],
)
def test_quantity_has_three_digits(value: float, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3723, "1:02:03"),
        (2 * 86400 + 3 * 3600, "2d 03:00"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
