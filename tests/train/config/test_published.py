"""Runs under published tuned presets: what they rest on, the source's rate, and the table beside the source's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mupax.__main__ import main

pytestmark = pytest.mark.core


def test_a_run_says_what_it_rests_on_and_has_the_sources_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "lm-1b", "--preset", "mup:cerebras-gpt", "--print-config"]) == 0
    out, err = capsys.readouterr()
    config = json.loads(out)
    assert (config["preset"]["name"], config["optimizer"]["peak_lr"]) == ("mup", 6e-3)
    assert "embed=256" in config["preset"]["base"]
    for words in (
        "mup:cerebras-gpt",
        "not measured here",
        "verified",
        "github.com/Cerebras/modelzoo",
        "The Pile",
        "Not known",
        "stds.position=0.08",
    ):
        assert words in err
    assert "stds.position" not in out
    assert (
        main(
            [
                "train",
                "lm-1b",
                "--preset",
                "mup:cerebras-gpt",
                "--optimizer.name",
                "muon",
                "--print-config",
            ]
        )
        == 2
    )
    assert (
        main(
            [
                "train",
                "lm-1b",
                "--preset",
                "mup:lm-short-v1",
                "--optimizer.name",
                "adam",
                "--print-config",
            ]
        )
        == 0
    )
    assert "rests on" not in capsys.readouterr().err


def test_a_dry_run_shows_the_table_beside_the_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model of the source's shape but few layers, which is compiled at once."""
    shape = "--model.width 768 --model.num-heads 12 --model.depth 1 --model.seq-len 8 --model.vocab-size 64 --model.mlp-ratio 4"
    words = f"train lm-tiny --preset mup:cerebras-gpt {shape} --data.batch-size 8 --dry-run --workdir {tmp_path}"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "Cerebras-GPT muP, 111M: 111m_mup.yaml" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("block.query ")]
    assert row[1:] == [
        "1",
        "[1]",
        "0.0462",
        "[0.0462]",
        "0.002",
        "[0.002]",
        "1e-08",
        "[1e-08]",
        "0.1",
        "[0.1]",
    ]
    (row,) = [line.split() for line in text.splitlines() if line.startswith("block.mlp_out ")]
    assert row[3:5] == ["0.0327", "[0.0103]"]  # by depth: 1 and 10
