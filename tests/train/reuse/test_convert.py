"""`mupax convert`: a run goes on in another form as it would have without the conversion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.train.reuse.commands import refuse, rows_with, succeed

__all__ = ["one_device", "shared_programs"]  # fixtures

TRAIN = (
    "train lm-tiny --data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 "
    "--model.seq-len 8 --model.num-kv-heads 2 --data.batch-size 8 --data.eval-batch-size 8 "
    "--data.eval-examples 8 --optimizer.warmup-steps 0 --optimizer.schedule constant "
    "--optimizer.clip-norm None --optimizer.eps 1e-3 --checkpoint.every-steps 4 "
    "--log.no-tensorboard --log.no-samples --preset.base lm-proxy --workdir"
)


def losses(workdir: str) -> dict[int, float]:
    """Return the losses of the steps after the conversion."""
    return {row["step"]: row["loss"] for row in rows_with("loss", workdir) if row["step"] > 4}


@pytest.mark.slow
def test_a_run_goes_on_in_another_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    Path("text.txt").write_text("something to read, again and again. " * 400)
    succeed(TRAIN, "old --steps 4")
    out = succeed("convert old --form mean-field --out new").out
    assert "mupax train --resume --workdir new" in out
    before = Path("old", "config.json").read_text()
    # The wrong form is refused, the right one goes on.
    resume = f"{TRAIN} new --steps 8 --resume"
    assert "preset.form mean-field, not None" in refuse(resume)
    out = succeed(resume, "--preset.form mean-field").out
    assert "resuming lm-tiny at step 4 of 8" in out
    assert Path("old", "config.json").read_text() == before
    succeed(TRAIN, "old --steps 8 --resume")
    straight = losses("old")
    moved = losses("new")
    assert moved
    expected = [straight[step] for step in moved]
    np.testing.assert_allclose(list(moved.values()), expected, rtol=1e-5)
    assert len({round(loss, 4) for loss in expected}) > 1


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none --form plain --out x", "none: no run and no weights there"),
        (
            "full --form plain --out full",
            "--out full is not an empty folder; give another one",
        ),
        (
            "full --form mean --out x",
            "--form needs one of 'mean-field', 'plain', 'readout-multiplier', 'table-9', "
            "not 'mean'",
        ),
        ("full --form plain", "this needs --out WORKDIR"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full", "config.json").write_text("{}")
    assert message in refuse("convert", words)
