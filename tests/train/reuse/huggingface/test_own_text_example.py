"""`examples/own_text.py`: text of one's own, a tokenizer, a sweep, the tuned preset, a larger run, and the same words in `transformers`."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path

import pytest

from mupax.presets.tuned import find

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} not installed; `make parity` does it"
    ),
]
EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "own_text.py"
QUIET = "--log.no-tensorboard --log.no-samples --log.no-progress"
TINY = "--model.depth 1 --data.batch-size 8 --data.eval-examples 16 --optimizer.warmup-steps 2 --steps 12"


def test_the_example_ends_with_text_of_the_larger_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    small = f"--how in-turn --model.width 16 {TINY}"
    large = f"--model.width 32 {TINY} {QUIET}"
    here, there = runpy.run_path(str(EXAMPLE))["main"](
        lr="2^-9:2^-1:5", small=small, large=large, texts=400
    )
    assert here.startswith(there)
    assert len(there) > len("Return the ")
    tuned = find.find("mup:own")
    run = json.loads(Path("runs/mine/config.json").read_text())
    assert run["config"]["optimizer"]["peak_lr"] == tuned.optimizer["peak_lr"] > 2**-7
    assert run["config"]["data"]["document_mask"] is True
    rows = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert (
        next(row["eval_loss"] for row in reversed(rows) if "eval_loss" in row) < 6.5
    )  # of 1,024 tokens, ln = 6.9
    printed = capsys.readouterr().out
    assert "$ mupax generate runs/mine" in printed
    assert "$ mupax serve runs/mine --port 0\nthe server answers '" in printed
