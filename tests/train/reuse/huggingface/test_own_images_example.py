"""`examples/own_images.py`: images of one's own from fine-tuning to answers in `transformers`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.train.reuse.huggingface.parity_marks import needs_transformers

pytestmark = [pytest.mark.parity, needs_transformers]
EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "own_images.py"
SMALL = "--log.no-tensorboard --log.no-samples --log.no-progress --steps 150"


def test_the_example_ends_with_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    assert runpy.run_path(str(EXAMPLE))["main"](SMALL) < 1e-5
    out = capsys.readouterr().out
    called = next(line for line in out.splitlines() if "are called what their folder is" in line)
    assert int(called.split()[0]) > 0.6 * 200  # chance is a fifth
    assert "$ mupax finetune vit mine --from runs/source" in out
