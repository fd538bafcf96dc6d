"""`mupax train`: what its words and flags become, and its help. Nothing is trained here."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex

import pytest

from mupax import command_line
from mupax.__main__ import main
from mupax.presets import PRESETS
from mupax.train.config import cli
from mupax.train.config.cli import Command
from mupax.train.config.preset import preset_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json, to_json
from mupax.train.config.run import Config
from mupax.train.reuse.generate.command import Generate
from mupax.train.studies.sweep import command as sweep
from mupax.zoo import configs
from mupax.zoo.configs import DecoderConfig
from tests.fixtures.command_line import Capture, printed, refused, started

__all__ = ["started"]  # fixture

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("compile lm-tiny", "this needs --topology CHIP:AxB"),
        ("compile", "this needs RECIPE|FILE and --topology CHIP:AxB"),
        ("sweep lm-tiny --seed-count 2", "did you mean --seed"),
        ("sweep lm-tiny --seeds 0", "--seeds is 0; write a number of at least 1"),
        (
            "sweep lm-tiny --how both",
            "--how needs one of 'auto', 'in-turn', 'together', not 'both'",
        ),
        ("sweep lm-tny", "no recipe is named 'lm-tny'; did you mean lm-tiny?"),
        ("checkpoints w --verfy", "no flag is named --verfy; did you mean --verify?"),
        ("generate w --prompt a --tokens many", "--tokens needs a whole number, not 'many'"),
        ("eval w --ema --no-ema", "--ema and --no-ema exclude each other"),
        ("check --presett mup", "did you mean --preset?"),
        ("grow w", "this needs --out WORKDIR"),
    ],
)
def test_commands_answer_as_recipes_do(words: str, text: str, capsys: Capture) -> None:
    assert text in refused(capsys, *words.split())


def test_a_word_left_out_has_its_default_beside_flags_of_a_run(capsys: Capture) -> None:
    words = "check --grow heads --model.width 32 --seeds 2 --dry-run"
    assert main(words.split()) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "width 32 to 256" in first
    assert second.startswith("width 32, 4 heads of 8")


# What a command line becomes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_alone_is_its_config(name: str, capsys: Capture, started: list[Config]) -> None:
    recipe = RECIPES[name]()
    assert recipe.recipe == name
    assert main(["train", name]) == 0
    assert started == [recipe.resolved()]
    assert printed(capsys, name) == recipe.resolved()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_costs_and_what_to_expect(name: str) -> None:
    doc = inspect.getdoc(RECIPES[name]) or ""
    assert "Cost" in doc
    assert "xpect" in doc
    preset_of(RECIPES[name]())


def test_the_folder_of_compiled_programs_is_of_the_process_and_no_part_of_a_run(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUPAX_COMPILATION_CACHE", "before")  # what a test sets is taken back
    assert printed(capsys, "lm-tiny") == RECIPES["lm-tiny"]().resolved()
    assert os.environ["MUPAX_COMPILATION_CACHE"] == "before"
    assert (
        printed(capsys, "lm-tiny", "--compilation-cache", "none") == RECIPES["lm-tiny"]().resolved()
    )
    assert os.environ["MUPAX_COMPILATION_CACHE"] == "none"
    words = ["lm-tiny", "--compilation-cache", "folder"]
    sweep.points(
        *command_line.parse_known(sweep.Sweep, "", words)
    )  # as of every command with a recipe's flags
    assert os.environ["MUPAX_COMPILATION_CACHE"] == "folder"
    capsys.readouterr()
    assert "gs:// is no folder of this machine" in refused(
        capsys, "train", "lm-tiny", "--compilation-cache", "gs://bucket/a"
    )
    assert "did you mean --compilation-cache?" in refused(
        capsys, "train", "lm-tiny", "--compilation-cash", "none"
    )


def test_flags_change_fields(capsys: Capture) -> None:
    argv = "--optimizer.peak-lr 3e-3 --steps 20 --seed=7 --workdir w --resume --mesh.data -1 --data.batch-size 4"
    more = "--checkpoint.every-steps 5 --log.no-tensorboard --model.compute.layers unrolled --log.eval-every-steps None"
    config = printed(capsys, "lm-tiny", *argv.split(), *more.split())
    base = RECIPES["lm-tiny"]()
    assert config == dataclasses.replace(
        base,
        optimizer=dataclasses.replace(base.optimizer, peak_lr=3e-3),
        steps=20,
        seed=7,
        workdir="w",
        resume=True,
        data=dataclasses.replace(base.data, batch_size=4),
        checkpoint=dataclasses.replace(base.checkpoint, every_steps=5),
        log=dataclasses.replace(base.log, tensorboard=False, eval_every_steps=None),
        model=dataclasses.replace(
            base.model, compute=dataclasses.replace(base.model.compute, layers="unrolled")
        ),
    )


def test_underscores_and_equals_signs_work(capsys: Capture) -> None:
    assert printed(capsys, "lm-tiny", "--optimizer.peak_lr=3e-3").optimizer.peak_lr == 3e-3


def test_a_text_may_begin_with_dashes(capsys: Capture) -> None:
    separator = ["--data.tokenizer", "bpe:300", "--data.separator"]
    for words in (["--location=eu"], ["--x"], ["-5"], ["---"]):
        config = printed(capsys, "lm-tiny", *separator, *words, "--steps", "7")
        assert (config.data.separator, config.steps) == (words[0], 7)
    for text in ("--location=eu", "--tokens", "--help", "-h", "-", "--", "-5", "=", ""):
        assert command_line.parse(Generate, "", ["run", f"--prompt={text}"]).prompt == text
        if text not in ("--tokens", "--help", "-h"):
            parsed = command_line.parse(Generate, "", ["run", "--prompt", text, "--tokens", "5"])
            assert (parsed.prompt, parsed.tokens) == (text, 5)
    # Control: flags of the command are not taken for a text that was left out.
    assert "--prompt needs a value" in refused(
        capsys, "generate", "run", "--prompt", "--tokens", "5"
    )
    assert "--data.separator needs a value" in refused(
        capsys, "train", "lm-tiny", "--data.separator", "--steps", "5"
    )


def test_the_last_of_a_repeated_flag_counts(capsys: Capture) -> None:
    assert printed(capsys, "lm-tiny", "--steps", "5", "--steps", "6").steps == 6


@pytest.mark.parametrize("flag", [["--preset", "sp"], ["--preset=sp"], ["--preset.name", "sp"]])
def test_preset_is_an_alias(flag: list[str], capsys: Capture) -> None:
    assert printed(capsys, "lm-tiny", *flag).preset.name == "sp"


def test_an_older_name_of_a_preset_is_read_and_not_written(capsys: Capture) -> None:
    assert printed(capsys, "lm-tiny", "--preset", "standard").preset.name == "sp"
    written = to_json(RECIPES["lm-tiny"]())
    assert (
        from_json({**written, "preset": {**written["preset"], "name": "standard"}}).preset.name
        == "sp"
    )


def test_preset_constants(capsys: Capture) -> None:
    constants = "--preset.alpha-a 0.75 --preset.alpha-l 0.5 --preset.gamma0 0.2 --preset.beta0 3"
    preset = printed(capsys, "lm-tiny", "--preset", "depth-mup", *constants.split()).preset
    assert (preset.alpha_a, preset.alpha_l, preset.gamma0, preset.beta0) == (0.75, 0.5, 0.2, 3.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_other_constant_of_a_preset_has_a_way(name: str) -> None:
    """By name, through config.json and back, to the preset."""
    parameters = inspect.signature(PRESETS[name]).parameters
    words: list[str] = []
    for constant, parameter in parameters.items():
        default = "table" if parameter.default is None else parameter.default
        words.append(f"{constant}={default}")
    recipe = RECIPES["lm-tiny"]()
    preset = dataclasses.replace(recipe.preset, name=name, base=None, constants=tuple(words))
    config = dataclasses.replace(recipe, preset=preset)
    assert preset_of(config).name == name
    again = from_json(json.loads(json.dumps(to_json(config))))
    assert again == config
    assert preset_of(again).choices == preset_of(config).choices


def test_constants_of_a_preset_are_read_by_their_names(capsys: Capture) -> None:
    constants = ["--preset.constants", "eps-scope=everywhere", "alpha_l=0.75"]
    config = printed(capsys, "lm-tiny", "--preset", "completep", *constants)
    assert list(config.preset.constants) == constants[1:]
    assert preset_of(config).choices == {"eps_scope": "everywhere", "alpha_l": 0.75}


def test_model_fields_are_checked_again(capsys: Capture) -> None:
    model = printed(capsys, "lm-tiny", "--model.width", "256", "--model.num-heads", "8").model
    assert isinstance(model, DecoderConfig)
    assert model.sizes()["head_dim"] == 32


def test_another_model_by_name(capsys: Capture) -> None:
    config = printed(capsys, "gpt2-c4", "--model", "gpt2-medium", "--model.depth", "3")
    recipe = RECIPES["gpt2-c4"]()
    assert config.model == dataclasses.replace(
        configs.get("gpt2-medium"), depth=3, compute=recipe.model.compute
    )


def test_a_short_run_inside_its_warm_up_is_said(capsys: Capture, started: list[Config]) -> None:
    warmup = ["--optimizer.warmup-steps", "50"]
    assert main(["train", "lm-tiny", "--steps", "3", *warmup]) == 0
    assert "all 3 steps are warm-up, which has 50" in capsys.readouterr().err
    assert main(["train", "lm-tiny", "--steps", "100", *warmup]) == 0
    assert not capsys.readouterr().err
    assert [config.steps for config in started] == [3, 100]


# Help


def test_help_lists_recipes(capsys: Capture) -> None:
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        assert f"  {name} " in out
        assert (inspect.getdoc(recipe) or "").splitlines()[0] in out


def listed(capsys: Capture, *words: str) -> set[str]:
    """Return the names, of those before aliases, of the flags that a help lists."""
    assert main(["train", *words]) == 0
    names = {
        field.names[0] for field in command_line.flag_fields(Command(config=RECIPES[words[0]]()))
    }
    first_lines = re.findall(r"^[│ ] (--?[a-z].*)$", capsys.readouterr().out, re.MULTILINE)
    found_flags = {flag for line in first_lines for flag in re.findall(r"--[\w.-]+", line)}
    assert len(names & found_flags) == len(
        [line for line in first_lines if not line.startswith("-h")]
    )
    return names & found_flags


@pytest.mark.parametrize(
    ("name", "columns"), [("lm-tiny", "80"), ("vit-s16-imagenet", "200"), ("ed-tiny", "120")]
)
def test_help_of_a_recipe_has_the_flags_in_use(
    name: str, columns: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    flags = listed(capsys, name, "--help")
    assert {"--steps", "--optimizer.peak-lr", "--model.width", "--data.name", "--workdir"} <= flags
    fields = command_line.flag_fields(Command(config=RECIPES[name]()))
    assert flags == {field.names[0] for field in fields if cli.is_listed(field)}
    assert 40 <= len(flags) <= 60
    assert os.environ["COLUMNS"] == columns


def test_help_of_a_section_has_all_of_its_flags_and_no_other(capsys: Capture) -> None:
    every_flag = {
        field.names[0] for field in command_line.flag_fields(Command(config=RECIPES["lm-tiny"]()))
    }
    sections = ("run", "model", "faults")
    by_section = {section: listed(capsys, "lm-tiny", "--help", section) for section in sections}
    assert "--model.rotary-fraction" in by_section["model"]
    assert by_section == {
        section: {flag for flag in every_flag if cli.section_of(flag) == section}
        for section in sections
    }
    assert "write all, or one of run, model" in refused(
        capsys, "train", "lm-tiny", "--help", "modell"
    )


def test_help_joins_the_lines_of_a_docstring(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapped docstring has an indented second line, here one that begins with a digit."""
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "lm-tiny", "--help", "model"]) == 0
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    (line,) = [line for line in lines if "which differs by" in line]
    assert line.startswith("gelu: the tanh approximation")
    assert "which differs by 1e-3." in line


def test_help_without_boxes_has_the_flags_in_use_too(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the terminal has ASCII alone."""
    boxed = listed(capsys, "lm-tiny", "--help")
    monkeypatch.setattr(command_line._HelpBuffer, "encoding", "ascii")
    assert listed(capsys, "lm-tiny", "--help") == boxed


def test_a_flag_that_help_leaves_out_still_works(capsys: Capture, started: list[Config]) -> None:
    assert "--model.rotary-fraction" not in listed(capsys, "lm-tiny", "--help")
    assert (
        main(
            ["train", "lm-tiny", "--model.rotary-fraction", "0.5", "--faults.spike-deviations", "9"]
        )
        == 0
    )
    (config,) = started
    assert isinstance(config.model, DecoderConfig)
    assert (config.model.rotary_fraction, config.faults.spike_deviations) == (0.5, 9)


@pytest.mark.parametrize("name", ["lm-tiny", "vit-digits"])
def test_help_all_of_a_recipe_has_every_flag(name: str, capsys: Capture) -> None:
    assert main(["train", name, "--help", "all"]) == 0
    out = capsys.readouterr().out
    assert [
        flag
        for flag in command_line.flags(RECIPES[name]())
        if f"{flag} " not in out and f"{flag}," not in out
    ] == []
    assert "--recipe" not in out
    assert (inspect.getdoc(RECIPES[name]) or "").splitlines()[0] in out


@pytest.mark.parametrize("words", [[], ["train"]])
def test_no_words_at_all_list_commands_or_recipes(words: list[str], capsys: Capture) -> None:
    assert main([*words, "--help"]) == 0
    overview = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr() == (overview, "")


PLAIN_WORDS = (
    "--steps 7 --optimizer.peak-lr 2e-3 --optimizer.b1=0.5 --data.name text:here --mesh.data -1 --model.compute.layers scan "
    "--optimizer.clip-norm None --model.window 5 --optimizer.schedule constant --model.bias --model.no-norm-gain --preset sp "
    "--freeze token_embedding norm_gain --dry-run --log.no-samples"
)


def test_plain_words_are_read_as_tyro_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without it: it builds a parser of all flags, which takes most of the time that a command line takes."""
    start = Command(config=RECIPES["lm-tiny"]())
    words = PLAIN_WORDS.split()
    with monkeypatch.context() as patch:
        patch.delattr(command_line.tyro, "cli")
        plain, rest = command_line.parse_known(Command, "x", words, start)
    assert not rest
    assert plain != start
    monkeypatch.setattr(command_line, "_read_plain_words", lambda command, argv: None)
    assert command_line.parse_known(Command, "x", words, start) == (plain, [])


@pytest.mark.parametrize(
    "words",
    ["--steps 1.5", "--steps", "--steps 1 --steps 2", "--stepz 1", "lm-tiny", "--help", "--data.name -x", "--data.augment=1",
     "--model.activation tanh", "--resume-from best", "--data.tokenizer None", "--model.width 3", "--freeze", "--freeze ''"],
)  # fmt: skip
def test_control_tyro_reads_all_other_words(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cli_of_tyro(*arguments: object, **options: object) -> None:
        raise RecursionError

    monkeypatch.setattr(command_line.tyro, "cli", cli_of_tyro)
    with pytest.raises(RecursionError):
        command_line.parse_known(
            Command, "x", shlex.split(words), Command(config=RECIPES["lm-tiny"]())
        )
