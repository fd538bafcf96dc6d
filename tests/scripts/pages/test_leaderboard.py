"""The leaderboard agrees with the studies' records, and refuses bad names before training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts.pages import leaderboard, markdown
from scripts.studies import transfer


def test_the_section_is_made_of_the_records() -> None:
    page = leaderboard.PAGE.read_text()
    written = markdown.replaced(page, leaderboard.PART, leaderboard.section(leaderboard.rows()))
    assert page == written, "write it again: python -m scripts.pages.leaderboard"


def test_a_study_adds_its_rows_and_more_seeds_replace_fewer(tmp_path: Path) -> None:
    study = tmp_path / "a"
    shutil.copytree(
        leaderboard.FOLDERS[0] / "heads",
        study,
        ignore=shutil.ignore_patterns("points.jsonl", "*.png"),
    )
    rows = leaderboard.rows([tmp_path])
    assert {row.preset for row in rows} == {"mup", "mup-half", "sp"}
    assert rows[-1].preset == "sp"  # the dearest
    record = json.loads((study / "transfer.json").read_text())
    record["studies"] = [{**record["studies"][0], "seeds": 99}]
    second_folder = tmp_path / "b"
    second_folder.mkdir()
    (second_folder / "transfer.json").write_text(json.dumps(record))
    after = {row.preset: row for row in leaderboard.rows([tmp_path])}
    assert (after["mup"].seeds, after["mup"].study) == (99, f"{tmp_path.name}/b")
    assert after["sp"].study == f"{tmp_path.name}/a"


def test_a_study_that_ended_before_its_second_preset_is_judged_again(tmp_path: Path) -> None:
    study = leaderboard.FOLDERS[1] / "muon-wide-heads"
    recorded = json.loads((study / "transfer.json").read_text())
    assert "--compare" in recorded["command"]
    assert len(recorded["studies"]) == 1
    again = tmp_path / "again"
    shutil.copytree(study, again)
    transfer.judge_again(again)
    assert json.loads((again / "transfer.json").read_text()) == recorded


@pytest.mark.parametrize(
    ("name", "why"),
    [("My_Study", "small letters"), ("heads", "choose another name"), ("../x", "small letters")],
)
def test_a_name_that_cannot_be_is_refused(
    name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leaderboard.main([name, "lm-tiny", "--grow", "heads=2,4"]) == 2
    assert why in capsys.readouterr().err


def test_a_study_is_one_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = "mine lm-tiny --model lm-proxy --preset completep --control sp --grow depth=2,4,8,16 --steps 100 --dry-run"
    assert leaderboard.main(words.split()) == 0
    assert "completep" in capsys.readouterr().out
    assert not (leaderboard.FOLDERS[1] / "mine").exists()
