"""Runs under published tuned presets: what they rest on, the source's rate, and the table beside the source's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.commands import command

pytestmark = pytest.mark.core


def test_a_run_says_what_it_rests_on_and_has_the_sources_rate() -> None:
    done = command("train lm-1b --preset mup:cerebras-gpt --print-config")
    assert done.code == 0
    config = json.loads(done.out)
    assert config["preset"]["name"] == "mup"
    assert config["optimizer"]["peak_lr"] == 6e-3
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
        assert words in done.err
    assert "stds.position" not in done.out
    muon = "train lm-1b --preset mup:cerebras-gpt --optimizer.name muon --print-config"
    assert command(muon).code == 2
    own = command("train lm-1b --preset mup:lm-short-v1 --optimizer.name adam --print-config")
    assert own.code == 0
    assert "rests on" not in own.err


def test_a_dry_run_shows_the_table_beside_the_sources(tmp_path: Path) -> None:
    """The model has the source's shape but few layers, which compile at once."""
    shape = "--model.width 768 --model.num-heads 12 --model.mlp-ratio 4 --model.depth 1"
    small = "--model.seq-len 8 --model.vocab-size 64 --data.batch-size 8"
    words = f"train lm-tiny --preset mup:cerebras-gpt {shape} {small} --dry-run"
    done = command(words, f"--workdir {tmp_path}")
    assert done.code == 0
    assert "Cerebras-GPT muP, 111M: 111m_mup.yaml" in done.out
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if line.strip()}
    query = "1 [1] 0.0462 [0.0462] 0.002 [0.002] 1e-08 [1e-08] 0.1 [0.1]"
    assert rows["block.query"][1:] == query.split()
    assert rows["block.mlp_out"][3:5] == ["0.0327", "[0.0103]"]  # by depth: 1 and 10
