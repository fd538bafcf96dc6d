"""A config from a file: what a run was repeats it, and what is wrong in one is said with its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import to_json
from mupax.zoo import configs
from tests.fixtures.commands import Done, command

pytestmark = pytest.mark.core

FLAGS = "--steps 7 --model.width 64 --optimizer.peak-lr 3e-4 --preset.constants gamma0=0.5 --workdir runs/x"

DEEP = "[" * 3000 + "]" * 3000
"""A value that is nested deeper than Python's functions go."""


def parsed(path: Path | str, *words: str) -> dict[str, object]:
    return to_json(cli.parse(str(path), cli.recipe(str(path)), words).config)


def refused(*words: str) -> Done:
    done = command(*words)
    assert done.code == 2, done.out
    return done


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a config file, mine.yaml, in the working folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.yaml"


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_what_print_config_prints_is_the_run_again(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.{ending}"
    first = command(f"train vit-digits {FLAGS} --print-config")
    assert first.code == 0
    path.write_text(first.out)  # JSON is YAML
    config = to_json(cli.parse("vit-digits", RECIPES["vit-digits"], FLAGS.split()).config)
    for flag in (f"--config {path}", f"--config={path}"):
        again = command(f"train {flag} --steps 9 --print-config")
        assert again.code == 0
        assert json.loads(again.out) == {**config, "steps": 9, "workdir": "runs/vit-digits"}


def test_a_record_of_a_run_has_it_under_config(tmp_path: Path) -> None:
    config = to_json(cli.parse("lm-tiny", RECIPES["lm-tiny"], ["--steps", "5", "--resume"]).config)
    record = {"run": "1f", "config": config, "versions": {}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert parsed(tmp_path / "config.json") == {**config, "resume": False}


def test_fields_that_a_file_leaves_out_are_its_recipes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text("recipe: lm-tiny\nsteps: 12\noptimizer:\n  peak_lr: 3e-4\nmodel:\n  depth: 3\n")
    flags = ["--steps", "12", "--optimizer.peak-lr", "3e-4", "--model.depth", "3"]
    assert parsed(path) == to_json(cli.parse("lm-tiny", RECIPES["lm-tiny"], flags).config)
    path.write_text("recipe: gpt2-c4\nmodel: gpt2-medium\n")
    assert parsed(path)["model"] == parsed("gpt2-c4", "--model", "gpt2-medium")["model"]
    assert parsed(path)["model"]["width"] == configs.get("gpt2-medium").width  # pyright: ignore


def test_a_file_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does not write out the ~ of `--config=~/mine.yaml`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("recipe: lm-tiny\nsteps: 12\n")
    assert parsed("~/mine.yaml")["steps"] == 12


DRY = {
    "sweep": "--lr 2^-8:2^-6:3 --dry-run",
    "tune": "--over lr --dry-run",
    "transfer": "--grow width=32,64 --dry-run",
    "check": "--grow width --sizes 2 --dry-run",
    "plan": "",
    "models roles": "",
    "presets balance": "--out b.json",
}
"""Commands that take a recipe, with flags of their own."""


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("sweep", "{} {}"),
        ("sweep", "{1} --config={0}"),
        ("check", "{} {}"),
        *((name, "--config {} {}") for name in ("sweep", "tune", "transfer", "check", "plan")),
    ],
)
def test_a_file_stands_in_a_recipes_place_in_every_command(
    name: str, written: str, mine: Path
) -> None:
    mine.write_text("recipe: lm-tiny\nsteps: 12\nmodel: {width: 32, depth: 1}\n")
    done = command(name, written.format("mine.yaml", DRY[name]))
    assert done.code == 0
    assert "12 steps" in done.out or name == "check"


def test_a_file_stands_in_a_recipes_place_where_one_model_is_read(mine: Path) -> None:
    mine.write_text("recipe: lm-tiny\nmodel: {depth: 1}\n")
    assert command("models roles --config mine.yaml").code == 0
    balance = refused("presets balance mine.yaml --out no-such-folder/b.json")
    assert "no-such-folder" in balance.err  # the file was read
    assert "v0" in refused("compile --config mine.yaml --topology v0:2x2").err


@pytest.mark.parametrize("name", DRY)
def test_a_wrong_file_is_named_by_every_command(name: str, mine: Path) -> None:
    mine.write_text("recipe: lm-tiny\nmodel: {widht: 32}\n")
    err = refused(name, "--config mine.yaml", DRY[name]).err
    for words in ("mine.yaml", "model.widht", "model.width"):
        assert words in err
    assert "none.yaml" in refused(name, "none.yaml", DRY[name]).err
    err = refused(name, "lm-tiny --config mine.yaml", DRY[name]).err
    assert "lm-tiny" in err
    assert "mine.yaml" in err


def test_a_sweep_leaves_out_what_a_file_has_for_a_run_by_itself(mine: Path) -> None:
    sets = "data: {evaluate: {other: python_corpus}}"
    stop = "stop: {patience: 2}\nlog: {eval_every_steps: 4}"
    mine.write_text(f"recipe: lm-tiny\nsteps: 12\n{sets}\n{stop}\n")
    done = command("sweep mine.yaml --dry-run")
    assert done.code == 0
    for words in ("mine.yaml", "data.evaluate", "stop.patience"):
        assert words in done.err
    # The control: written as a flag it is refused.
    flag = "--data.evaluate x=python_corpus"
    assert "data.evaluate" in refused("sweep mine.yaml --dry-run", flag).err


MIX = [
    "mix: [code=text:src:0.3, prose=records:books:0.7]",
    "mix: {code: text:src:0.3, prose: records:books:0.7}",
    "mix: {code: {source: text:src, weight: 0.3}, prose: {source: records:books, weight: 0.7}}",
    "mix: [{code: text:src:0.3}, {name: prose, source: records:books, weight: 0.7}]",
    "name: mix\n  mix: [code=text:src:0.3, prose=records:books:0.7]",
]


@pytest.mark.parametrize("mix", MIX)
def test_a_file_has_a_mixture_as_a_list_or_a_map(mix: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"recipe: lm-tiny\ndata:\n  {mix}\n  evaluate: {{code: text:src}}\n")
    flags = "--data.mix code=text:src:0.3 prose=records:books:0.7 --data.evaluate code=text:src"
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], flags.split()).config
    assert parsed(path) == to_json(config)


def test_flags_stand_above_the_mixture_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"recipe: lm-tiny\ndata:\n  {MIX[0]}\n")
    mix = ["a=text:a:1", "b=text:b:1"]
    assert parsed(path, "--data.mix", *mix)["data"]["mix"] == mix  # pyright: ignore
    data = parsed(path, "--data.name", "text:other")["data"]
    assert (data["name"], data["mix"]) == ("text:other", [])  # pyright: ignore


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ("mix: {code: {source: text:src}}", "data.mix code"),
        ("mix: {code: {source: text:src, wieght: 1}}", "weight"),
        ("mix: {code: 0.3}", "data.mix code"),
        ("mix: [[text:src, 0.3]]", "data.mix"),
        ("mix: 3", "data.mix"),
        ("mix: {my code: text:src:1}", "data.mix my code"),
        ("mix: code=text:src:0.3 prose=records:books:0.7", "data.mix"),
        ("mix: {code: text:src}", "data.mix"),
        ("mix: {code: {source: text:src, weight: much}}", "data.mix code"),
        ("evaluate: {code: 3}", "data.evaluate code"),
        ("evaluate: {code: {source: text:src, weight: 1}}", "data.evaluate code"),
        ("name: text:src\n  mix: {code: text:src:1}", "data.mix"),
    ],
)
def test_a_wrong_mixture_names_the_file_and_the_key(data: str, key: str, mine: Path) -> None:
    mine.write_text(f"recipe: lm-tiny\ndata:\n  {data}\n")
    done = refused(f"train --config {mine} --print-config")
    assert str(mine) in done.err
    assert key in done.err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", None, "a.yaml: no such file; `--print-config > "),
        (
            "a.yaml",
            "recipe: lm-tiny\nstep: 12\n",
            "a.yaml: no config has a field step; did you mean steps?",
        ),
        (
            "a.yaml",
            "recipe: lm-tiny\noptimizer: {peak_lr: fast}\n",
            "a.yaml: optimizer.peak_lr is 'fast'; it must be float",
        ),
        ("a.yaml", "recipe: lm-tyni\n", "a.yaml: no recipe is named 'lm-tyni'; the recipes are "),
        ("a.yaml", "steps: [1\n", "a.yaml cannot be read: while parsing a flow sequence"),
        ("a.json", "{", "a.json cannot be read: Expecting property name"),
        ("a.yaml", f"steps: {DEEP}\n", "a.yaml cannot be read: nested too deep"),
        ("a.json", f'{{"steps": {DEEP}}}', "a.json cannot be read: nested too deep"),
        ("a.json", "[1]", "a.json holds no named fields; write them as `--print-config` does"),
        ("a.yaml", "recipe: lm-tiny\nsteps: 0\n", "a.yaml: steps is 0"),
        (
            "a.yaml",
            "recipe: lm-tiny\nsteps: 5\nseed: 1\nsteps: 7\n",
            "a.yaml cannot be read: steps is written 2 times; leave one",
        ),
        (
            "a.json",
            '{"recipe": "lm-tiny", "data": {"name": "a", "name": "b"}}',
            "a.json cannot be read: name is written 2 times; leave one",
        ),
        ("a.txt", "steps: 1\n", "a.txt: write a file that ends in .json, .yaml, .yml"),
    ],
)
def test_a_wrong_file_is_one_message_with_its_name(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    done = refused(f"train --config {tmp_path / name} --dry-run")
    assert message in done.err
    assert len(done.err.splitlines()) <= 2


def test_a_missing_path_is_said() -> None:
    message = "--config PATH: write a file that ends in .json, .yaml, .yml"
    assert message in refused("train --config").err


def test_a_runs_folder_is_told_its_config(tmp_path: Path) -> None:
    config = tmp_path / "my run" / "config.json"
    config.parent.mkdir()
    content = json.dumps({"recipe": "lm-tiny", "data": {"mix": None}})
    # A byte order mark is no part of it.
    config.write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert command(f"sweep '{config}' --dry-run").code == 0
    for words in (f"train --config '{config.parent}'", f"sweep '{config.parent}'"):
        assert f"--config '{config}'" in refused(words, "--dry-run").err
