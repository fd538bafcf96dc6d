"""Runs that name a tuned preset which no longer comes with mupax: old ones go on, new ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mupax.presets.tuned import find
from mupax.train.config import cli, tuned
from mupax.train.config.record import from_json, to_json
from tests.fixtures.commands import Done, command, refusal, succeeded
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import record_of

__all__ = ["one_device", "shared_programs"]  # fixtures

EVIDENCE = Path(__file__).parents[4] / "docs" / "evidence" / "tuned"
USE = "mup:vit-endless-v1"
FILE = EVIDENCE / f"{USE.replace(':', '.')}.json"
RUN = (
    "train vit-digits --model.width 32 --model.depth 1 --model.num-heads 2 --data.batch-size 8 --data.eval-examples 8 "
    "--steps 4 --optimizer.warmup-steps 1 --log.no-samples --log.no-tensorboard"
)
SAVED = f"{RUN} --preset {USE} --checkpoint.every-steps 2"


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
        shutil.copy(FILE, find.OWN_FOLDER)
        succeeded(SAVED, "--workdir complete")
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


def check_resumed(done: Done) -> None:
    """Check that the run went on from step 2 and ended as the one that was not interrupted."""
    assert done.code == 0
    assert "resuming vit-digits at step 2 of 4" in done.out
    assert last_loss("run") == last_loss("complete")


def test_its_own_command_goes_on_with_the_numbers_of_its_record(run: Path) -> None:
    check_resumed(command(SAVED, "--workdir run --resume"))
    assert record_of("run")["config"]["preset"] == record_of("complete")["config"]["preset"]


@pytest.mark.core
@pytest.mark.parametrize("flags", [["--preset", USE], ["--preset.name", USE], [f"--preset={USE}"]])
def test_the_flag_is_found_and_left_out_however_it_is_written(flags: list[str]) -> None:
    words = ["--steps", "4", *flags, "--seed", "1"]
    assert tuned.named_moved(words) == USE
    assert tuned.without_preset(words) == ["--steps", "4", "--seed", "1"]
    other_words = ["--steps", "4", "--preset", "mup:lm-short-v1", "--workdir", USE]
    assert tuned.named_moved(other_words) is None


def test_a_record_that_has_the_name_itself_goes_on(run: Path) -> None:
    """A config file that names one leaves the name in the record, and the preset's numbers in none."""
    content = record_of(run)
    named = {"name": USE, "base": None, "alpha_a": None, "constants": []}
    content["config"]["preset"] |= named
    (run / "config.json").write_text(json.dumps(content))
    done = command("train --workdir run --resume")
    check_resumed(done)
    assert "changed since" not in done.out


@pytest.mark.core
@pytest.mark.parametrize("use", find.MOVED)
def test_the_numbers_of_a_record_are_those_of_the_file(use: str) -> None:
    preset, _, name = use.partition(":")
    path = EVIDENCE / f"{preset}.{name}.json"
    optimizer = find.load(path).optimizer["name"]
    words = ["--preset", f"{preset}:{path}", "--optimizer.name", optimizer]
    fields = to_json(cli.parse("vit-digits", cli.recipe("vit-digits"), words).config)
    unset = {"base": None, "alpha_a": None, "alpha_l": None, "constants": []}
    named = {**fields["preset"], "name": use, **unset}
    assert from_json({**fields, "preset": named}).preset == from_json(fields).preset
    # What the record says beside the name holds.
    own = from_json({**fields, "preset": {**named, "base": "embed=8", "alpha_a": 0.5}}).preset
    assert (own.base, own.alpha_a) == ("embed=8", 0.5)


@pytest.mark.core
@pytest.mark.parametrize("words", ["", "--resume", "--workdir new --resume"])
def test_a_new_run_is_refused_with_the_place_of_the_data(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(RUN, f"--preset {USE}", words)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert f"docs/evidence/tuned/{FILE.name}" in line
    assert not Path("new").exists()


@pytest.mark.core
def test_a_config_file_that_names_it_is_refused_and_the_file_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(f'recipe: vit-digits\npreset: {{name: "{USE}"}}\n')
    assert "docs/evidence/" in refusal("train run.yaml --print-config")
    find.OWN_FOLDER.mkdir()
    shutil.copy(FILE, find.OWN_FOLDER)
    succeeded("train run.yaml --print-config")
