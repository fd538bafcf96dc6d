"""`mupax presets dynamics` as a user types it: its numbers, files and messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mupax.__main__ import main

TINY = [
    "dynamics", "--images", "2", "--steps", "2", "--heads", "48", "--model.width", "6", "--model.num-heads", "3",
    "--model.depth", "1", "--model.patch-size", "16", "--optimizer.peak-lr", "0.5",
]  # fmt: skip


def test_the_limit_with_finite_models_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "x.json"), "--figure", str(tmp_path / "x.png")]
    assert main(["presets", *TINY, "--finite", "4", "--seeds", "3", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "48 heads (width 96) for infinitely many; 2 images, 2 steps; 24 directions" in lines[0]
    assert lines[2].split("  ")[0] == "step"
    table = [re.split(r"\s{2,}", line.strip()) for line in lines[3:]]
    assert [row[0] for row in table] == ["0", "1", "2"]
    # All networks of a centered model begin with equal probabilities, and a state equals itself.
    assert table[0][1:3] == ["2.3026 ± 0.0000"] * 2
    assert table[0][4] == "1.0000 ± 0.0000"
    assert all(0 < float(row[6].split()[0]) < float(row[5].split()[0]) for row in table)
    record = json.loads((tmp_path / "x.json").read_text())
    limit, net = record["limit"], record["finite"]["4"]
    assert np.shape(limit["losses"]) == (2, 3)
    assert np.shape(net["losses"]) == (3, 3)
    for course in (limit, net):
        assert np.array(course["losses"])[:, 0] == pytest.approx(np.log(10), abs=1e-5)
        assert np.array(course["losses"])[:, 2].max() < np.log(10)
        assert np.allclose(course["memory"], np.swapaxes(course["memory"], 1, 2))
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer.name", "adam"], "updates of low rank, those of SGD"),
        (
            ["--steps", "9"],
            "80 directions of every matrix, and of width 96 at most 24 are worth recording",
        ),
        (
            ["--model", "lm-tiny"],
            "is only known for a vit, and the model is a decoder; write --model",
        ),
        (["--model", "vit-tiny"], "model.norm_gain is True"),
        (["--draws", "1"], "--draws is 1; write a number of at least 2"),
        (["--finite", "0"], "--finite has 0; write numbers of heads of at least 1"),
        (["--seeds", "3"], "--seeds has no effect without --finite; add --finite H"),
        (["--json", "."], "cannot write --json .: it is a folder; write the path of"),
        (["--figure", "a.json"], "--figure a.json ends in .json, and no picture does; write .png"),
        (["--head", "9"], "no flag is named --head; did you mean --heads"),
    ],
)
def test_what_it_refuses(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["dynamics", *words] if words[0] == "--model" else [*TINY, *words]
    assert main(["presets", *typed]) == 2
    assert message in capsys.readouterr().err


def test_the_first_word_is_the_model_as_in_other_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["presets", "dynamics", "lm-tiny"]) == 2
    assert "is only known for a vit, and the model is a decoder" in capsys.readouterr().err
    # 22 vectors of 8192 floats for each of 1152 directions in each of 4 layers.
    for words, size in (([], "3.09 GiB"), (["--float64"], "6.19 GiB")):
        assert main(["presets", "dynamics", "bordelon-vit", "--dry-run", *words]) == 0
        out = capsys.readouterr().out
        assert out.startswith("bordelon-vit of N = 16, L = 4, 512 heads (width 8192)")
        assert f"1152 directions of every matrix, {size} of records" in out
    assert main(["presets", "dynamics", "bordelon-vt", "--dry-run"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_it_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--help"]) == 0
    assert "dynamics" in capsys.readouterr().out
