"""Runs that name a tuned preset which no longer comes with mupax: old ones go on, new ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mupax.__main__ import main
from mupax.presets.tuned import find
from mupax.train.config import cli, tuned
from mupax.train.config.record import from_json, to_json
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # fixture

EVIDENCE = Path(__file__).parents[4] / "docs" / "evidence" / "tuned"
USE = "mup:vit-endless-v1"
SMALL = "--model.width 32 --model.depth 1 --model.num-heads 2 --data.batch-size 8 --data.eval-examples 8"
RUN = f"vit-digits {SMALL} --steps 4 --optimizer.warmup-steps 1 --log.no-samples --log.no-tensorboard".split()


def train(*words: str) -> int:
    return main(["train", *RUN, *words])


def record_of(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())["config"]


def last_loss(folder: str) -> float:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [row["eval_loss"] for row in map(json.loads, lines) if "eval_loss" in row][-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps that the preset's name began, and a copy that ended after two."""
    folder = tmp_path_factory.mktemp("moved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # The name is found as it was when the file came with mupax.
        find.OWN_FOLDER.mkdir()
        shutil.copy(EVIDENCE / f"{USE.replace(':', '.')}.json", find.OWN_FOLDER)
        assert train("--preset", USE, "--checkpoint.every-steps", "2", "--workdir", "complete") == 0
        shutil.rmtree(find.OWN_FOLDER)
    shutil.copytree(folder / "complete", folder / "halfway")
    shutil.rmtree(folder / "halfway" / "checkpoints" / "4")
    return folder


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run that goes on from step 2, in the folder where commands are typed."""
    monkeypatch.chdir(folder)
    shutil.copytree("halfway", "run")
    yield Path("run")
    shutil.rmtree(folder / "run")


def test_its_own_command_goes_on_with_the_numbers_of_its_record(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train("--preset", USE, "--checkpoint.every-steps", "2", "--workdir", "run", "--resume") == 0
    )
    assert "resuming vit-digits at step 2 of 4" in capsys.readouterr().out
    assert last_loss("run") == last_loss("complete")
    assert record_of("run")["preset"] == record_of("complete")["preset"]


@pytest.mark.core
@pytest.mark.parametrize("flags", [["--preset", USE], ["--preset.name", USE], [f"--preset={USE}"]])
def test_the_flag_is_found_and_left_out_however_it_is_written(flags: list[str]) -> None:
    words = ["--steps", "4", *flags, "--seed", "1"]
    assert tuned.named_moved(words) == USE
    assert tuned.without_preset(words) == ["--steps", "4", "--seed", "1"]
    assert (
        tuned.named_moved(["--steps", "4", "--preset", "mup:lm-short-v1", "--workdir", USE]) is None
    )


def test_a_record_that_has_the_name_itself_goes_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config file that names one leaves the name in the record, and the preset's numbers in none."""
    content = json.loads((run / "config.json").read_text())
    preset = content["config"]["preset"]
    content["config"]["preset"] = {
        **preset,
        "name": USE,
        "base": None,
        "alpha_a": None,
        "constants": [],
    }
    (run / "config.json").write_text(json.dumps(content))
    assert main(["train", "--workdir", "run", "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "resuming vit-digits at step 2 of 4" in shown
    assert "changed since" not in shown
    assert last_loss("run") == last_loss("complete")


@pytest.mark.core
@pytest.mark.parametrize("use", find.MOVED)
def test_the_numbers_of_a_record_are_those_of_the_file(use: str) -> None:
    preset, _, name = use.partition(":")
    path = EVIDENCE / f"{preset}.{name}.json"
    words = [
        "vit-digits",
        "--preset",
        f"{preset}:{path}",
        "--optimizer.name",
        find.load(path).optimizer["name"],
    ]
    fields = printed(words)
    named = {
        **fields["preset"],
        "name": use,
        "base": None,
        "alpha_a": None,
        "alpha_l": None,
        "constants": [],
    }
    assert from_json({**fields, "preset": named}).preset == from_json(fields).preset
    # What the record says beside the name holds.
    own = {**named, "base": "embed=8", "alpha_a": 0.5}
    assert from_json({**fields, "preset": own}).preset.base == "embed=8"
    assert from_json({**fields, "preset": own}).preset.alpha_a == 0.5


def printed(words: list[str]) -> dict[str, Any]:
    """Return the config that a command line prints."""
    return to_json(cli.parse(words[0], cli.recipe(words[0]), words[1:]).config)


@pytest.mark.core
@pytest.mark.parametrize("words", [(), ("--resume",), ("--workdir", "new", "--resume")])
def test_a_new_run_is_refused_with_the_place_of_the_data(
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--preset", USE, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"docs/evidence/tuned/{USE.replace(':', '.')}.json" in lines[0]
    assert not Path("new").exists()


@pytest.mark.core
def test_a_config_file_that_names_it_is_refused_and_the_file_brings_it_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(f'recipe: vit-digits\npreset: {{name: "{USE}"}}\n')
    assert main(["train", "run.yaml", "--print-config"]) == 2
    assert "docs/evidence/" in capsys.readouterr().err
    find.OWN_FOLDER.mkdir()
    shutil.copy(EVIDENCE / f"{USE.replace(':', '.')}.json", find.OWN_FOLDER)
    assert main(["train", "run.yaml", "--print-config"]) == 0
