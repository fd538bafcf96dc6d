"""`examples/own_text.py`: text of one's own from a tokenizer to words in `transformers`."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from mupax.presets.tuned import find
from tests.train.reuse.commands import read_json, rows_with
from tests.train.reuse.huggingface.parity_marks import needs_transformers

pytestmark = [pytest.mark.parity, needs_transformers]
EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "own_text.py"
QUIET = "--log.no-tensorboard --log.no-samples --log.no-progress"
TINY = (
    "--model.depth 1 --data.batch-size 8 --data.eval-examples 16 --optimizer.warmup-steps 2 "
    "--steps 12"
)


def test_the_example_ends_with_text_of_the_larger_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    small = f"--how in-turn --model.width 16 {TINY}"
    large = f"--model.width 32 {TINY} {QUIET}"
    text, their_text = runpy.run_path(str(EXAMPLE))["main"](
        lr="2^-9:2^-1:5", small=small, large=large, texts=400
    )
    assert text.startswith(their_text)
    assert len(their_text) > len("Return the ")
    tuned = find.find("mup:own")
    config = read_json("runs/mine/config.json")["config"]
    assert config["optimizer"]["peak_lr"] == tuned.optimizer["peak_lr"] > 2**-7
    assert config["data"]["document_mask"] is True
    # ln 1024 is 6.9, the loss of equal chances.
    assert rows_with("eval_loss", "runs/mine")[-1]["eval_loss"] < 6.5
    printed = capsys.readouterr().out
    assert "$ mupax generate runs/mine" in printed
    assert "$ mupax serve runs/mine --port 0\nthe server answers '" in printed
