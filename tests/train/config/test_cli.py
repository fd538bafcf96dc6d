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
from tests.fixtures.command_line import started
from tests.fixtures.commands import command

__all__ = ["started"]  # fixture

pytestmark = pytest.mark.core


def out_of(*words: str) -> str:
    """Return what a command prints that ends well."""
    done = command(*words)
    assert done.code == 0, done.err
    return done.out


def shown(*words: str, recipe: str = "lm-tiny") -> Config:
    """Return the config that `--print-config` shows, without a word beside it."""
    done = command(f"train {recipe} --print-config", *words)
    assert done.code == 0, done.err
    assert not done.err
    return from_json(json.loads(done.out))


def refusal(*words: str) -> str:
    """Return the message for bad input."""
    done = command(*words)
    assert done.code == 2
    assert not done.out
    assert "Traceback" not in done.err
    assert 1 <= len(done.err.splitlines()) <= 10
    assert done.err.startswith("error: ")
    return done.err


def flags_of(recipe: str) -> list[command_line.FlagField]:
    return list(command_line.flag_fields(Command(config=RECIPES[recipe]())))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("compile lm-tiny", "this needs --topology CHIP:SHAPE"),
        ("compile", "this needs RECIPE|FILE and --topology CHIP:SHAPE"),
        ("sweep lm-tiny --seed-count 2", "did you mean --seed"),
        ("sweep lm-tiny --seeds 0", "--seeds is 0; write a number of at least 1"),
        (
            "sweep lm-tiny --how both",
            "--how needs one of 'auto', 'in-turn', 'together', not 'both'\n",
        ),
        (
            "export w --out e --step bset",
            "--step needs a whole number or best, not 'bset'; did you mean best?",
        ),
        ("train lm-tiny --resume --resume-from bset", "--resume-from needs a whole number or best"),
        ("sweep lm-tny", "no recipe is named 'lm-tny'; did you mean lm-tiny?"),
        ("checkpoints w --verfy", "no flag is named --verfy; did you mean --verify?"),
        ("generate w --prompt a --tokens many", "--tokens needs a whole number, not 'many'"),
        ("eval w --ema --no-ema", "--ema and --no-ema exclude each other"),
        ("check --presett mup", "did you mean --preset?"),
        ("grow w", "this needs --out WORKDIR"),
    ],
)
def test_commands_answer_as_recipes_do(words: str, text: str) -> None:
    assert text in refusal(words)


def test_a_word_left_out_has_its_default_beside_flags_of_a_run() -> None:
    out = out_of("check --grow heads --model.width 32 --seeds 2 --dry-run")
    first, second, *_ = out.splitlines()
    assert "width 32 to 256" in first
    assert second.startswith("width 32, 4 heads of 8")


# What a command line becomes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_alone_is_its_config(name: str, started: list[Config]) -> None:
    recipe = RECIPES[name]()
    assert recipe.recipe == name
    out_of("train", name)
    assert started == [recipe.resolved()]
    assert shown(recipe=name) == recipe.resolved()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_costs_and_what_to_expect(name: str) -> None:
    doc = inspect.getdoc(RECIPES[name]) or ""
    assert "Cost" in doc
    assert "xpect" in doc
    preset_of(RECIPES[name]())


def test_the_folder_of_compiled_programs_is_of_the_process_and_no_part_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUPAX_COMPILATION_CACHE", "before")  # what a test sets is taken back
    recipe = RECIPES["lm-tiny"]().resolved()
    assert shown() == recipe
    assert os.environ["MUPAX_COMPILATION_CACHE"] == "before"
    assert shown("--compilation-cache none") == recipe
    assert os.environ["MUPAX_COMPILATION_CACHE"] == "none"
    words = ["lm-tiny", "--compilation-cache", "folder"]
    # As of every command with a recipe's flags.
    sweep.points(*command_line.parse_known(sweep.Sweep, "", words))
    assert os.environ["MUPAX_COMPILATION_CACHE"] == "folder"
    remote = refusal("train lm-tiny --compilation-cache gs://bucket/a")
    assert "gs:// is no folder of this machine" in remote
    misspelt = refusal("train lm-tiny --compilation-cash none")
    assert "did you mean --compilation-cache?" in misspelt


def test_flags_change_fields() -> None:
    config = shown(
        "--optimizer.peak-lr 3e-3 --steps 20 --seed=7 --workdir w --resume --mesh.data -1",
        "--data.batch-size 4 --checkpoint.every-steps 5 --log.no-tensorboard",
        "--model.compute.layers unrolled --log.eval-every-steps None",
    )
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


def test_underscores_and_equals_signs_work() -> None:
    assert shown("--optimizer.peak_lr=3e-3").optimizer.peak_lr == 3e-3


def test_a_text_may_begin_with_dashes() -> None:
    for separator in ("--location=eu", "--x", "-5", "---"):
        config = shown("--data.tokenizer bpe:300 --data.separator", separator, "--steps 7")
        assert (config.data.separator, config.steps) == (separator, 7)
    for text in ("--location=eu", "--tokens", "--help", "-h", "-", "--", "-5", "=", ""):
        assert command_line.parse(Generate, "", ["run", f"--prompt={text}"]).prompt == text
        if text not in ("--tokens", "--help", "-h"):
            parsed = command_line.parse(Generate, "", ["run", "--prompt", text, "--tokens", "5"])
            assert (parsed.prompt, parsed.tokens) == (text, 5)
    # Control: flags of the command are not taken for a text that was left out.
    assert "--prompt needs a value" in refusal("generate run --prompt --tokens 5")
    assert "--data.separator needs a value" in refusal("train lm-tiny --data.separator --steps 5")


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert shown("--steps 5 --steps 6").steps == 6


@pytest.mark.parametrize("flag", ["--preset sp", "--preset=sp", "--preset.name sp"])
def test_preset_is_an_alias(flag: str) -> None:
    assert shown(flag).preset.name == "sp"


def test_an_older_name_of_a_preset_is_read_and_not_written() -> None:
    assert shown("--preset standard").preset.name == "sp"
    written = to_json(RECIPES["lm-tiny"]())
    older = {**written, "preset": {**written["preset"], "name": "standard"}}
    assert from_json(older).preset.name == "sp"


def test_preset_constants() -> None:
    constants = "--preset.alpha-a 0.75 --preset.alpha-l 0.5 --preset.gamma0 0.2 --preset.beta0 3"
    preset = shown("--preset depth-mup", constants).preset
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


def test_constants_of_a_preset_are_read_by_their_names() -> None:
    config = shown("--preset completep --preset.constants eps-scope=everywhere alpha_l=0.75")
    assert config.preset.constants == ("eps-scope=everywhere", "alpha_l=0.75")
    assert preset_of(config).choices == {"eps_scope": "everywhere", "alpha_l": 0.75}


def test_a_named_base_gets_the_experts_of_the_model_in_its_own_size() -> None:
    """The proxy's width is half of the model's, so its experts are half as large."""
    experts = "--model.experts 4 --model.active-experts 2 --model.expert-dim 96"
    base = preset_of(shown("--preset.base lm-proxy", experts)).base
    assert base
    sizes = {axis: base[axis] for axis in ("embed", "experts", "active", "expert_dim")}
    assert sizes == {"embed": 64, "experts": 4, "active": 2, "expert_dim": 48}


def test_model_fields_are_checked_again() -> None:
    model = shown("--model.width 256 --model.num-heads 8").model
    assert isinstance(model, DecoderConfig)
    assert model.sizes()["head_dim"] == 32


def test_another_model_by_name() -> None:
    config = shown("--model gpt2-medium --model.depth 3", recipe="gpt2-c4")
    compute = RECIPES["gpt2-c4"]().model.compute
    expected = dataclasses.replace(configs.get("gpt2-medium"), depth=3, compute=compute)
    assert config.model == expected


def test_a_short_run_inside_its_warm_up_is_said(started: list[Config]) -> None:
    short = command("train lm-tiny --optimizer.warmup-steps 50 --steps 3")
    assert short.code == 0
    assert "all 3 steps are warm-up, which has 50" in short.err
    longer = command("train lm-tiny --optimizer.warmup-steps 50 --steps 100")
    assert longer.code == 0
    assert not longer.err
    assert [config.steps for config in started] == [3, 100]


# Help


def test_help_lists_recipes() -> None:
    out = out_of("train --help")
    for name, recipe in RECIPES.items():
        assert f"  {name} " in out
        assert (inspect.getdoc(recipe) or "").splitlines()[0] in out


def listed(recipe: str, words: str) -> set[str]:
    """Return the names, of those before aliases, of the flags that a help lists."""
    names = {field.names[0] for field in flags_of(recipe)}
    out = out_of("train", recipe, words)
    first_lines = re.findall(r"^[│ ] (--?[a-z].*)$", out, re.MULTILINE)
    found_flags: set[str] = set()
    for line in first_lines:
        found_flags.update(re.findall(r"--[\w.-]+", line))
    own_lines = [line for line in first_lines if not line.startswith("-h")]
    assert len(names & found_flags) == len(own_lines)
    return names & found_flags


@pytest.mark.parametrize(
    ("name", "columns"), [("lm-tiny", "80"), ("vit-s16-imagenet", "200"), ("ed-tiny", "120")]
)
def test_help_of_a_recipe_has_the_flags_in_use(
    name: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    flags = listed(name, "--help")
    assert {"--steps", "--optimizer.peak-lr", "--model.width", "--data.name", "--workdir"} <= flags
    assert flags == {field.names[0] for field in flags_of(name) if cli.is_listed(field)}
    assert 40 <= len(flags) <= 60
    assert os.environ["COLUMNS"] == columns


def test_help_of_a_section_has_all_of_its_flags_and_no_other() -> None:
    every_flag = {field.names[0] for field in flags_of("lm-tiny")}
    for section in ("run", "model", "faults"):
        expected = {flag for flag in every_flag if cli.section_of(flag) == section}
        assert listed("lm-tiny", f"--help {section}") == expected
        assert section != "model" or "--model.rotary-fraction" in expected
    assert "write all, or one of run, model" in refusal("train lm-tiny --help modell")


def test_help_joins_the_lines_of_a_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapped docstring has an indented second line, here one that begins with a digit."""
    monkeypatch.setenv("COLUMNS", "120")
    lines = [line.strip("│ ") for line in out_of("train lm-tiny --help model").splitlines()]
    (line,) = [line for line in lines if "which differs by" in line]
    assert line.startswith("gelu: the tanh approximation")
    assert "which differs by 1e-3." in line


def test_help_without_boxes_has_the_flags_in_use_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that has ASCII alone gets no boxes."""
    boxed = listed("lm-tiny", "--help")
    monkeypatch.setattr(command_line._HelpBuffer, "encoding", "ascii")
    assert listed("lm-tiny", "--help") == boxed


def test_a_flag_that_help_leaves_out_still_works(started: list[Config]) -> None:
    assert "--model.rotary-fraction" not in listed("lm-tiny", "--help")
    out_of("train lm-tiny --model.rotary-fraction 0.5 --faults.spike-deviations 9")
    (config,) = started
    assert isinstance(config.model, DecoderConfig)
    assert (config.model.rotary_fraction, config.faults.spike_deviations) == (0.5, 9)


@pytest.mark.parametrize("name", ["lm-tiny", "vit-digits"])
def test_help_all_of_a_recipe_has_every_flag(name: str) -> None:
    out = out_of("train", name, "--help all")
    for flag in command_line.flags(RECIPES[name]()):
        assert f"{flag} " in out or f"{flag}," in out
    assert "--recipe" not in out
    assert (inspect.getdoc(RECIPES[name]) or "").splitlines()[0] in out


@pytest.mark.parametrize("words", ["", "train"])
def test_no_words_at_all_list_commands_or_recipes(words: str) -> None:
    bare = command(words)
    assert bare.code == 0
    assert bare.out == out_of(words, "--help")
    assert not bare.err


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
