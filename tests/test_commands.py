"""The table of commands: help, examples and completion of rows, and old spellings."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mupax import terminal
from mupax.__main__ import main
from mupax.commands import completion, dispatch, table
from mupax.commands.table import Command
from mupax.presets.__main__ import main as presets_main
from mupax.train.__main__ import main as train_main
from mupax.train.data.__main__ import main as data_main
from mupax.zoo.__main__ import main as zoo_main
from scripts.pages import commands as page
from tests.fixtures.calls import calls_of_process
from tests.fixtures.command_line import HEAVY, Capture

pytestmark = pytest.mark.core

ROWS: dict[str, Command] = {}
"""Every row by the words that are typed for it."""
for _command in table.commands().values():
    ROWS[_command.name] = _command
    ROWS.update((f"{_command.name} {row.name}", row) for row in _command.subcommands)

WORKED = {
    "train check": table._check,
    "train sweep": table._sweep,
    "train tune": table._tune,
    "train transfer": table._transfer,
    "train plan": table._plan,
    "train plan score": table._plan_score,
    "train compile": table._compile,
    "train roles": table._models_roles,
    "train balance": table._presets_balance,
    "train checkpoints": table._checkpoints_list,
    "train grow": table._grow,
    "train eval": table._eval,
    "train finetune": table._finetune,
    "train predict": table._predict,
    "train noise": table._noise,
    "train generate": table._generate,
    "train serve": table._serve,
    "train push": table._push,
    "train convert": table._convert,
    "presets verify": table._verify,
    "zoo": table._models_list,
    "zoo list": table._models_list,
    "zoo describe": table._models_describe,
    "zoo import": table._import,
    "zoo export": table._export,
}
"""Commands of four doors, and what ran them."""
STILL_WORK = {
    "train lm-tiny": table._train,
    "train --resume": table._train,
    "presets": table._presets_list,
    "presets list": table._presets_list,
    "presets constants": table._presets_constants,
    "presets table": table._presets_table,
    "presets limits": table._presets_limits,
    "presets desiderata": table._presets_desiderata,
    "presets compare": table._presets_compare,
    "presets joint": table._presets_joint,
    "presets tuned": table._presets_tuned,
    "presets dynamics": table._presets_dynamics,
    "data prepare": table._data_prepare,
    "data show": table._data_show,
    "data tokenizer": table._data_tokenizer,
}
"""Commands whose spelling is the same."""
DOORS = {"train": train_main, "presets": presets_main, "zoo": zoo_main, "data": data_main}
"""First word to what `python -m` of its package runs."""


@pytest.mark.parametrize("typed", ROWS)
def test_every_command_has_help_with_an_example(typed: str, capsys: Capture) -> None:
    assert main([*typed.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert not err
    assert plain.startswith(f"usage: mupax {typed.split()[0]} ")
    assert plain.endswith(f"mupax {ROWS[typed].example}\n")


@pytest.mark.parametrize("typed", ROWS)
def test_the_example_of_a_command_parses(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    monkeypatch.chdir(tmp_path)
    Path("runs/lm-tiny").mkdir(parents=True)
    Path("my_images").mkdir()
    words = shlex.split(ROWS[typed].example)
    assert " ".join(words).startswith(typed)
    assert (
        main([*words, "--no-such-flag"]) == 2
    )  # parsing gets as far as the flag that is wrong, and nothing runs
    err = capsys.readouterr().err
    if typed == "finetune":  # the source says which other flags it has
        assert "no run and no weights" in err or "no images by class" in err
    else:
        assert re.search(r"(no flag is named|does not read) --no-such-flag", err)


def test_control_an_example_with_a_wrong_flag_does_not_parse(capsys: Capture) -> None:
    assert main(["sweep", "lm-tiny", "--seed-count", "2", "--no-such-flag"]) == 2
    assert "no flag is named --seed-count" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [typed for typed, row in ROWS.items() if row.takes_recipe])
def test_a_config_file_stands_in_a_recipes_place(typed: str, capsys: Capture) -> None:
    words = shlex.split(ROWS[typed].example.removeprefix(typed))
    flags = words if words[0].startswith("-") else words[1:]
    assert main([*typed.split(), *flags, "--config", "none.yaml"]) == 2
    assert "none.yaml: no such file" in capsys.readouterr().err


def test_the_table_of_a_config_file_is_that_of_its_model(tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", "lm-tiny", "--model.depth", "3", "--print-config"]) == 0
    file = tmp_path / "mine.json"
    file.write_text(capsys.readouterr().out)
    assert main(["presets", "table", "mup", "--config", str(file)]) == 0
    assert " 3x128x4x32 " in capsys.readouterr().out
    assert main(["models", "describe", "--config", str(file)]) == 0
    assert "layers 3" in capsys.readouterr().out
    assert main(["models", "describe", "lm-laptop"]) == 0  # a recipe that is no model
    assert "lm-laptop: decoder" in capsys.readouterr().out


# Dispatch


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Callable[[], object] | None, list[str]]]:
    """What dispatch would have run: the function and its words."""
    calls: list[tuple[Callable[[], object] | None, list[str]]] = []

    def record(command: Command, prog: str, words: list[str], modules: list[str]) -> int:
        calls.append((command.run, words))
        return 0

    monkeypatch.setattr(dispatch, "_run", record)
    return calls


@pytest.mark.parametrize(("typed", "function"), WORKED.items())
def test_an_old_spelling_runs_and_names_the_new_one(
    typed: str, function: Callable[[], object], ran: list[object], capsys: Capture
) -> None:
    words = typed.split()
    assert main([*words, "--flag", "value"]) == 0
    out, err = capsys.readouterr()
    assert not out
    old = terminal.old_spelling(words)
    assert old is not None
    assert err == f"note: `mupax {old}` is now `mupax {terminal.OLD_SPELLINGS[old]}`\n"
    door = DOORS[words[0]]
    assert door([*words[1:], "--flag", "value"]) == 0
    assert capsys.readouterr().err == err
    assert main([*terminal.current_words(words), "--flag", "value"]) == 0
    assert capsys.readouterr().err == ""  # control: the new spelling is quiet
    assert ran == [(function, ["--flag", "value"])] * 3


@pytest.mark.parametrize(("typed", "function"), STILL_WORK.items())
def test_a_spelling_that_stays_is_quiet(
    typed: str, function: Callable[[], object], ran: list[tuple[object, list[str]]], capsys: Capture
) -> None:
    words = typed.split()
    assert main(words) == 0
    assert DOORS[words[0]](words[1:]) == 0
    assert capsys.readouterr() == ("", "")
    assert [run for run, _ in ran] == [function, function]


def test_every_old_spelling_is_tried() -> None:
    assert terminal.OLD_SPELLINGS.keys() <= WORKED.keys()
    rows = {row.run for row in ROWS.values() if row.run is not None}
    assert {*WORKED.values(), *STILL_WORK.values()} <= rows


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("python -m train sweep lm-tiny", "mupax sweep lm-tiny"),
        ("python -m train lm-tiny --steps 2", "mupax train lm-tiny --steps 2"),
        ("python -m train roles-of-mine", "mupax train roles-of-mine"),
        ("see `mupax zoo`, and `mupax zoo import A`", "see `mupax models`, and `mupax import A`"),
        ("python -m mupax.train.data prepare x", "mupax data prepare x"),
        ("mupax sweep lm-tiny", "mupax sweep lm-tiny"),
    ],
)
def test_a_recorded_command_is_shown_as_it_is_typed_now(text: str, now: str) -> None:
    assert terminal.current_spelling(text) == now


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("swep lm-tiny", "did you mean sweep?"),
        ("presets tabel mup", "did you mean table?"),
        ("data prepar text:a", "did you mean prepare?"),
        ("checkpoints vrify run", "did you mean `mupax checkpoints verify`?"),
        ("plan scor plan.json run", "did you mean `mupax plan score`?"),
        ("prepare text:a", "write `mupax data prepare`"),
        ("lm-tiny", "write `mupax train lm-tiny`"),
        ("train lm-tyni", "did you mean lm-tiny?"),
        ("models gpt2", "write `mupax models describe gpt2`"),
        ("--completion tcsh", "the shells are bash, zsh, fish"),
    ],
)
def test_an_unknown_word_has_code_2_and_the_nearest_name(
    typed: str, hint: str, capsys: Capture
) -> None:
    assert main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    assert hint in err


# Overview, completion and the page


def test_the_overview_groups_all_commands_and_imports_nothing_heavy(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\w+):$", out, re.MULTILINE) == list(table.GROUPS)
    assert re.findall(r"^  (\w+) ", out, re.MULTILINE) == list(table.commands())
    count, modules = calls_of_process("from mupax.__main__ import main; main(['--help'])")
    assert not modules & {*HEAVY, "mupax.train", "mupax.zoo", "mupax.presets"}
    assert count < 200_000


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sw", ["sweep"]),
        ("presets ta", ["table"]),
        ("train vit-d", ["vit-digits"]),
        ("models roles vit-d", ["vit-digits"]),
        ("plan sc", ["score"]),
        ("eval sc", []),
    ],
)
def test_bash_completes_commands_and_recipes(typed: str, completed: list[str]) -> None:
    words = ["mupax", *typed.split()]
    call = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _mupax; echo ${{COMPREPLY[@]}}"
    program = f"{completion.script('bash')}\n{call}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed
    assert not done.stderr


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_shell_has_a_script_with_every_command(shell: str, capsys: Capture) -> None:
    assert main(["--completion", shell]) == 0
    out = capsys.readouterr().out
    assert set(re.findall(r"[\w-]+", out)) >= {*table.commands(), "describe", "lm-tiny"}


def test_the_page_of_commands_has_the_table() -> None:
    assert page.PAGE.read_text() == page.document(), (
        "python -m scripts.pages.commands writes it again"
    )
