"""`mupax convert`: a run that goes on in another form goes on as it would have, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mupax.__main__ import main

TINY = (
    "lm-tiny --data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 8 "
    "--model.num-kv-heads 2 --data.batch-size 8 --data.eval-batch-size 8 --data.eval-examples 8 "
    "--optimizer.warmup-steps 0 --optimizer.schedule constant --optimizer.clip-norm None --optimizer.eps 1e-3 "
    "--checkpoint.every-steps 4 --log.no-tensorboard --log.no-samples --preset.base lm-proxy"
)


def losses(folder: str) -> dict[int, float]:
    lines = (json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_a_run_goes_on_in_another_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "text.txt").write_text("something to read, again and again. " * 400)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    assert main(["train", *TINY.split(), "--workdir", "old", "--steps", "4"]) == 0
    assert main(["convert", "old", "--form", "mean-field", "--out", "new"]) == 0
    assert "mupax train --resume --workdir new" in capsys.readouterr().out
    before = (tmp_path / "old" / "config.json").read_text()
    # The wrong form is refused, the right one goes on.
    assert main(["train", *TINY.split(), "--workdir", "new", "--steps", "8", "--resume"]) == 2
    assert "preset.form mean-field, not None" in capsys.readouterr().err
    assert (
        main(
            [
                "train",
                *TINY.split(),
                "--workdir",
                "new",
                "--steps",
                "8",
                "--resume",
                "--preset.form",
                "mean-field",
            ]
        )
        == 0
    )
    assert "resuming lm-tiny at step 4 of 8" in capsys.readouterr().out
    assert (tmp_path / "old" / "config.json").read_text() == before
    assert main(["train", *TINY.split(), "--workdir", "old", "--steps", "8", "--resume"]) == 0
    straight, moved = losses("old"), losses("new")
    steps = [step for step in moved if step > 4]
    assert steps
    np.testing.assert_allclose([moved[s] for s in steps], [straight[s] for s in steps], rtol=1e-5)
    assert len({round(straight[step], 4) for step in steps}) > 1


@pytest.mark.core
def test_what_cannot_be_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    for words, text in (
        (["none", "--form", "plain", "--out", "x"], "none: no run and no weights there"),
        (
            ["full", "--form", "plain", "--out", "full"],
            "--out full is not an empty folder; give another one",
        ),
        (
            ["full", "--form", "mean", "--out", "x"],
            "--form needs one of 'mean-field', 'plain', 'readout-multiplier', 'table-9', not 'mean'",
        ),
        (["full", "--form", "plain"], "this needs --out WORKDIR"),
    ):
        assert main(["convert", *words]) == 2
        assert text in capsys.readouterr().err
