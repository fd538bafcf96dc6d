"""The GPU benchmark without a GPU: its plan, its time limits, its peaks and tiny models."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from mupax import __main__ as mupax
from scripts.bench.pytorch import gpu_mfu, gpu_point
from scripts.bench.pytorch.gpu_mfu import BATCHES, SWEEP, Point, measure, plan
from scripts.bench.runs import sweep_cost
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture: runs beside the sweep share what is compiled


def test_the_best_point_of_both_sides_counts() -> None:
    points: list[dict[str, Any]] = [
        {"model": "gpt2", "side": "mupax", "batch_size": 1, "flops_per_s": 2.0},
        {"model": "gpt2", "side": "mupax", "batch_size": 2, "flops_per_s": 6.0},
        {"model": "gpt2", "side": "mupax", "batch_size": 4, "failed": "out of memory"},
        {"model": "gpt2", "side": "torch", "batch_size": 2, "flops_per_s": 4.0},
        {"model": "vit-s16", "side": "torch", "batch_size": 2, "failed": ""},
        {"model": SWEEP, "side": "mupax", "results": []},
    ]
    summary = gpu_mfu.summary(points, ["mupax lm-1b 4"])
    assert summary["best"]["gpt2"]["mupax"]["batch_size"] == 2
    assert summary["best"]["gpt2"]["ratio"] == 1.5
    assert list(summary["best"]) == ["gpt2"]
    assert summary["left_out"] == ["mupax lm-1b 4"]


def test_every_model_and_the_sweep_come_before_other_batches_and_variants() -> None:
    models = [*BATCHES, SWEEP]
    points = plan(models, ["mupax", "torch"], None, tiny=False)
    first = points[: 2 * len(BATCHES) + 1]
    assert [(point.model, point.side) for point in first[:-1]] == [
        (name, side) for name in BATCHES for side in ("mupax", "torch")
    ]
    assert first[-1] == Point(SWEEP)
    assert all(point.batch_size == BATCHES[point.model][0] for point in first[:-1])
    assert len(points) == 4 * sum(map(len, BATCHES.values())) + 1
    assert len({point.text for point in points}) == len(points)
    assert {point.batch_size for point in plan(["gpt2"], ["torch"], [3, 5], tiny=False)} == {3, 5}


def test_time_ends_the_run_and_says_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    limits = []

    def run(point: Point, timeout_s: float) -> dict[str, Any]:
        limits.append(timeout_s)
        clock[0] += min(timeout_s, 100.0)
        if point.batch_size >= 4:
            return {"failed": "out of memory"}
        rates = {"step_s": 0.1, "units_per_s": 5.0, "flops_per_s": 1.0, "mfu": None}
        return {**rates, "unit": "token", "device": "cpu"}

    points = [Point("gpt2", "torch", size) for size in (4, 8, 2, 1, 3)]
    rows, left_out = measure(points, run, 210.0, 120.0, lambda: clock[0])
    assert [row["batch_size"] for row in rows] == [4, 2]  # 8 is more than what did not run
    assert limits == [120.0, 110.0]  # the second has what is left, not all that a point may take
    assert left_out == [
        "torch gpt2 8 (a batch of 4 does not run)",
        "torch gpt2 1 (no time left)",
        "torch gpt2 3 (no time left)",
    ]
    assert "torch gpt2 4: does not run (out of memory)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "mfu"),
    [
        ("NVIDIA H100 80GB HBM3", 1 / 989.4),
        ("NVIDIA H100 PCIe", 1 / 756),
        ("NVIDIA H100 NVL", 1 / 835.5),
        ("cpu", None),
    ],
)
def test_a_card_has_the_peak_of_its_whole_name(
    device: str, mfu: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mupax.zoo import families

    monkeypatch.setattr(gpu_point, "jax_point", lambda config: lambda: None)
    monkeypatch.setattr(gpu_point, "timed", lambda step, repeats, steps: 2.0)
    monkeypatch.setattr(gpu_point, "device_of", lambda side: device)
    monkeypatch.setattr(families, "train_flops", lambda model: 2e12 / (3 * model.units))
    point = gpu_point.point("mupax", "vit-s16", 3, {}, steps=1, profile=None, tiny=True)
    assert point["flops_per_s"] == pytest.approx(1e12)
    assert point["mfu"] == (mfu and pytest.approx(mfu))


def test_a_point_that_does_not_run_says_its_last_line_and_the_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        Point, "command", lambda *_: [gpu_mfu.sys.executable, "-c", "raise MemoryError('8 GiB')"]
    )
    out = tmp_path / "gpu.json"
    assert gpu_mfu.main(["--models", "gpt2", "--sides", "torch", "--tiny", "--json", str(out)]) == 1
    assert "torch gpt2 2: does not run (MemoryError: 8 GiB)" in capsys.readouterr().out
    assert json.loads(out.read_text())["points"][0]["failed"] == "MemoryError: 8 GiB"


def test_a_point_that_takes_too_long_ends_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    monkeypatch.setattr(Point, "command", lambda *_: [gpu_mfu.sys.executable, "-c", code])
    began = gpu_mfu.time.monotonic()
    # Pipes of a child that lives on would be waited for.
    assert gpu_mfu.answer(Point("gpt2"), gpu_mfu.Options(), 1.0) == {"failed": "no answer in 1 s"}
    assert gpu_mfu.time.monotonic() - began < 30


@pytest.mark.parametrize("words", [["--steps", "0"], ["--minutes", "0"]])
def test_no_steps_and_no_minutes_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_mfu.main(words)
    assert "write at least 1 step, and more than no minutes" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_a_small_model_in_a_child_and_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep_cost._seconds(["--version"]) > 0  # the only child process of a sweep here
    child_answer = gpu_mfu.answer

    def seconds_here(words: list[str]) -> float:
        assert mupax.main([*words, "--log.no-tensorboard", "--log.no-samples"]) == 0
        return 0.5

    def answer(point: Point, args: gpu_mfu.Options, timeout_s: float) -> dict[str, Any]:
        if point.model != SWEEP:
            return child_answer(point, args, timeout_s)
        _, _, module, *words = point.command(args, tmp_path)
        assert importlib.import_module(module).main(words) == 0
        return json.loads((tmp_path / "sweep.json").read_text())

    monkeypatch.setattr(sweep_cost, "_seconds", seconds_here)
    monkeypatch.setattr(gpu_mfu, "answer", answer)
    words = ["--models", "vit-s16", SWEEP, "--sides", "mupax", "--tiny", "--steps", "2"]
    words += ["--profile", str(tmp_path / "traces"), "--timeout", "600", "--minutes", "20"]
    assert gpu_mfu.main(words) == 0
    shown = capsys.readouterr().out
    assert "times as fast as runs of their own by whole commands" in shown
    point = json.loads(shown.splitlines()[-1])["vit-s16"]["mupax"]
    assert point["units_per_s"] > 0
    assert point["mfu"] is None  # an unknown device has no peak
    assert list((tmp_path / "traces").rglob("*.xplane.pb"))
