"""The compiled estimates that the GPU benchmark prints beside what it measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.bench.pytorch import gpu_estimate, gpu_mfu

POINT = {
    "model": "gpt2",
    "batch_size": 32,
    "variant": {"remat": "dots"},
    "device": "NVIDIA H100 80GB HBM3",
    "step_s": 0.08,
    "peak_bytes": 10 * 2**30,
}


def test_estimates_stand_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def answer(words: list[str], timeout_s: float, variables: dict[str, str]) -> dict[str, Any]:
        commands.append(words[2:])
        return {"peak_bytes": 9 * 2**30, "least_step_s": 0.06}

    monkeypatch.setattr(gpu_mfu, "_output_of", answer)
    estimate = gpu_mfu.estimated(POINT, gpu_mfu.Options())
    words = ["scripts.bench.pytorch.gpu_estimate", "h100", "gpt2", "32", "--variant"]
    assert commands == [[*words, '{"remat": "dots"}']]
    text = gpu_mfu.comparison({"gpt2": POINT}, {"gpt2": estimate})
    assert text.splitlines()[1].split() == [
        *("gpt2,", "batch", "32", "9", "GiB", "10", "GiB", "0.90"),
        *("at", "least", "60.0", "80.0", "0.75"),
    ]


def test_a_device_that_is_not_known_has_no_estimate() -> None:
    point = POINT | {"device": "cpu"}
    estimate = gpu_mfu.estimated(point, gpu_mfu.Options())
    text = gpu_mfu.comparison({"gpt2": point}, {"gpt2": estimate})
    assert text.startswith("no estimate of gpt2: cpu is none of NVIDIA A100-SXM4-80GB, NVIDIA H100")


@pytest.mark.gpu
def test_a_small_point_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["h100", "vit-s16", "2", "--variant", '{"layers": "scan"}', "--tiny"]
    assert gpu_estimate.main(words) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["problems"] == []
    assert estimate["peak_bytes"] > 0
    assert estimate["least_step_s"] > 0
