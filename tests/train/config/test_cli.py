"""`python -m train`: what its words and flags become, and what each wrong one is answered. Nothing is trained here."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import sys
import types

import pytest

from mupax import command_line
from mupax.errors import MupaxError
from mupax.presets import PRESETS
from mupax.train import run as train_run
from mupax.train.__main__ import COMMANDS, main
from mupax.train.config import cli
from mupax.train.config.preset import preset_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json, to_json
from mupax.train.config.run import Config
from mupax.train.studies.sweep import command as sweep
from mupax.zoo import configs
from mupax.zoo.configs import DecoderConfig

pytestmark = pytest.mark.core

HEAVY = ("jax", "flax", "optax", "orbax", "tensorflow_datasets", "grain", "numpy", "matplotlib")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configs of the runs that `main` starts; a run here ends at once, with code 0."""
    configs_run: list[Config] = []
    loop = types.SimpleNamespace(run=lambda config: configs_run.append(config) or 0)
    monkeypatch.setitem(sys.modules, "mupax.train.run.loop", loop)
    monkeypatch.setattr(train_run, "loop", loop, raising=False)
    return configs_run


def printed(capsys: Capture, *argv: str) -> Config:
    """The config that `--print-config` shows."""
    assert main([*argv, "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert not err
    return from_json(json.loads(out))


def refused(capsys: Capture, *argv: str) -> str:
    """The message for bad input."""
    assert main([*argv]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    assert 1 <= len(err.splitlines()) <= 10
    assert err.startswith("error: ")
    return err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("compile lm-tiny", "this needs --topology CHIP:AxB"),
        ("compile", "this needs RECIPE and --topology CHIP:AxB"),
        ("sweep lm-tiny --seed-count 2", "did you mean --seed"),
        ("sweep lm-tiny --seeds 0", "--seeds is 0; write a number of at least 1"),
        ("sweep lm-tiny --how both", "--how needs one of 'auto', 'in-turn', 'together', not 'both'"),
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
    assert capsys.readouterr().out.startswith("width 32, 4 heads of 8")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: Capture) -> None:
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m train {name} ")


# What a command line becomes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_alone_is_its_config(name: str, capsys: Capture, started: list[Config]) -> None:
    recipe = RECIPES[name]()
    assert recipe.recipe == name
    assert main([name]) == 0
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
    assert printed(capsys, "lm-tiny", "--compilation-cache", "none") == RECIPES["lm-tiny"]().resolved()
    assert os.environ["MUPAX_COMPILATION_CACHE"] == "none"
    words = ["lm-tiny", "--compilation-cache", "folder"]
    sweep.points(*command_line.parse_known(sweep.Sweep, "", words))  # as of every command with a recipe's flags
    assert os.environ["MUPAX_COMPILATION_CACHE"] == "folder"
    capsys.readouterr()
    assert "gs:// is no folder of this machine" in refused(capsys, "lm-tiny", "--compilation-cache", "gs://bucket/a")
    assert "did you mean --compilation-cache?" in refused(capsys, "lm-tiny", "--compilation-cash", "none")


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
        model=dataclasses.replace(base.model, compute=dataclasses.replace(base.model.compute, layers="unrolled")),
    )


def test_underscores_and_equals_signs_work(capsys: Capture) -> None:
    assert printed(capsys, "lm-tiny", "--optimizer.peak_lr=3e-3").optimizer.peak_lr == 3e-3


def test_the_last_of_a_repeated_flag_counts(capsys: Capture) -> None:
    assert printed(capsys, "lm-tiny", "--steps", "5", "--steps", "6").steps == 6


@pytest.mark.parametrize("flag", [["--preset", "sp"], ["--preset=sp"], ["--preset.name", "sp"]])
def test_preset_is_an_alias(flag: list[str], capsys: Capture) -> None:
    assert printed(capsys, "lm-tiny", *flag).preset.name == "sp"


def test_an_older_name_of_a_preset_is_read_and_not_written(capsys: Capture) -> None:
    assert printed(capsys, "lm-tiny", "--preset", "standard").preset.name == "sp"
    written = to_json(RECIPES["lm-tiny"]())
    assert from_json({**written, "preset": {**written["preset"], "name": "standard"}}).preset.name == "sp"


def test_preset_constants(capsys: Capture) -> None:
    constants = "--preset.alpha-a 0.75 --preset.alpha-l 0.5 --preset.gamma0 0.2 --preset.beta0 3"
    preset = printed(capsys, "lm-tiny", "--preset", "depth-mup", *constants.split()).preset
    assert (preset.alpha_a, preset.alpha_l, preset.gamma0, preset.beta0) == (0.75, 0.5, 0.2, 3.0)


def test_every_other_constant_of_a_preset_has_a_way(capsys: Capture) -> None:
    """By name, through config.json and back, to the preset."""
    for name, make in PRESETS.items():
        values = {
            constant: "table" if parameter.default is None else parameter.default
            for constant, parameter in inspect.signature(make).parameters.items()
        }
        words = tuple(f"{constant}={value}" for constant, value in values.items())
        own = ["--preset.constants", *words] if words else []
        config = printed(capsys, "lm-tiny", "--preset", name, "--preset.base", "None", *own)
        assert config.preset.constants == words
        assert preset_of(config).name == name
    config = printed(
        capsys, "lm-tiny", "--preset", "completep", "--preset.constants", "eps-scope=everywhere", "alpha_l=0.75"
    )
    assert preset_of(config).given == {"eps_scope": "everywhere", "alpha_l": 0.75}
    assert preset_of(from_json(json.loads(json.dumps(to_json(config))))).given == preset_of(config).given


def test_model_fields_are_checked_again(capsys: Capture) -> None:
    model = printed(capsys, "lm-tiny", "--model.width", "256", "--model.num-heads", "8").model
    assert isinstance(model, DecoderConfig)
    assert model.sizes()["head_dim"] == 32


def test_another_model_by_name(capsys: Capture) -> None:
    config = printed(capsys, "gpt2-c4", "--model", "gpt2-medium", "--model.depth", "3")
    recipe = RECIPES["gpt2-c4"]()
    assert config.model == dataclasses.replace(configs.get("gpt2-medium"), depth=3, compute=recipe.model.compute)


def test_a_short_run_inside_its_warm_up_is_said(capsys: Capture, started: list[Config]) -> None:
    warmup = ["--optimizer.warmup-steps", "50"]
    assert main(["lm-tiny", "--steps", "3", *warmup]) == 0
    assert "all 3 steps are warm-up, which has 50" in capsys.readouterr().err
    assert main(["lm-tiny", "--steps", "100", *warmup]) == 0
    assert not capsys.readouterr().err
    assert [config.steps for config in started] == [3, 100]


# Help


def test_help_lists_recipes(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        assert f"  {name} " in out
        assert (inspect.getdoc(recipe) or "").splitlines()[0] in out


@pytest.mark.parametrize("name", ["lm-tiny", "vit-digits"])
def test_help_of_a_recipe_has_every_flag(name: str, capsys: Capture) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert [
        flag for flag in command_line.flags(RECIPES[name]()) if f"{flag} " not in out and f"{flag}," not in out
    ] == []
    assert "--recipe" not in out
    assert (inspect.getdoc(RECIPES[name]) or "").splitlines()[0] in out


def test_no_words_at_all_list_recipes_and_commands(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr() == (overview, "")


# Bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lm-tyni", "did you mean lm-tiny?"),
        ("--steps 3", "the first word is a recipe"),
        ("zzz", "the recipes are lm-laptop, lm-tiny, vit-digits"),
    ],
)
def test_a_wrong_first_word(words: str, said: str, capsys: Capture) -> None:
    assert said in refused(capsys, *words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optimizer.peak-lrr 3", "no flag is named --optimizer.peak-lrr; did you mean --optimizer.peak-lr?"),
        ("--optimizer.peak_lrr=3", "did you mean --optimizer.peak-lr?"),
        ("--peak-lr 3", "did you mean --optimizer.peak-lr?"),
        ("--batch-size 3", "did you mean --data.batch-size"),
        ("--stesp 3", "did you mean --steps?"),
        ("--zzz", "none is like it"),
        ("--recipe vit-digits", "no flag is named --recipe"),
        ("--model.patch-size 3", "no flag is named --model.patch-size"),
        ("twelve", "nothing takes the word 'twelve'"),
        ("--resume yes", "nothing takes the word 'yes'"),
        ("--steps", "--steps needs a value after it"),
        ("--steps many", "--steps needs a whole number, not 'many'"),
        ("--steps 1.5", "--steps needs a whole number, not '1.5'"),
        ("--optimizer.peak-lr high", "--optimizer.peak-lr needs a number, not 'high'"),
        ("--optimizer.clip-norm off", "--optimizer.clip-norm needs a number or None, not 'off'"),
        (
            "--optimizer.schedule sdg",
            "--optimizer.schedule needs one of 'constant', 'cosine', 'linear', 'wsd', not 'sdg'",
        ),
        ("--preset.form mean", "'mean-field', 'plain', 'readout-multiplier', 'table-9'"),
    ],
)
def test_a_wrong_flag(words: str, said: str, capsys: Capture) -> None:
    err = refused(capsys, "lm-tiny", *words.split())
    assert said in err
    assert "python -m train lm-tiny --help" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--optimizer.name shampoo",
            "no optimizer is named 'shampoo' (no source's table of its rates could be verified: 2512.05620",
        ),
        ("--optimizer.name sdg", "no optimizer is named 'sdg'; write adamw, adam, sgd, momentum, muon, lion"),
        ("--steps 0", "steps is 0; write a number of at least 1"),
        ("--seed -1", "seed is -1"),
        ("--data.batch-size 16 --accumulation-steps 5", "write accumulation_steps 4"),
        ("--data.batch-size 0", "data.batch_size is 0"),
        ("--checkpoint.every-steps 0", "checkpoint.every_steps is 0"),
        ("--optimizer.peak-lr -1", "optimizer.peak_lr is -1.0"),
        ("--optimizer.peak-lr nan", "optimizer.peak_lr is nan"),
        ("--optimizer.b2 1", "optimizer.b2 is 1.0; write a number in [0, 1)"),
        ("--optimizer.clip-norm 0", "optimizer.clip_norm is 0.0"),
        (
            "--steps 70 --optimizer.warmup-steps 11 --optimizer.schedule wsd --optimizer.decay-steps 60",
            "write decay_steps 59 or fewer",
        ),
        ("--model.width 102 --model.num-heads 4", "write num_heads 3"),
        ("--model.num-kv-heads 0", "model.num_kv_heads is 0"),
        ("--model.num-heads 4 --model.num-kv-heads 3", "write num_kv_heads 2"),
        ("--model.mlp-ratio 0", "model.mlp_ratio is 0.0"),
        ("--model.head-dim 7", "write head_dim 8"),
        ("--model gpt3", "did you mean gpt2"),
        ("--model vit-s16", "the data python_corpus is tokens and the model, a vit, reads images"),
        ("--data.name digits", "the data digits is images and the model, a decoder, reads tokens"),
        ("--preset mop", "did you mean 'mup'?"),
        ("--preset mup:mine", "the preset mup has no tuned constants named 'mine'; write mup"),
        ("--preset.name=mup:mine", "no tuned constants named 'mine'"),
        ("--preset measured:none.json --preset.base None", "none.json: no table of measured scales"),
        ("--preset ntk --preset.constants s=2", "ntk: s=2 is outside [0, 1]"),
        ("--preset ntk --preset.constants s=high", "ntk: s=high is not a finite number; write one, such as s=0"),
        ("--preset ntk --preset.constants s", "the constant 's': write NAME=VALUE, such as s=0.5"),
        (
            "--preset mup --preset.constants s=1",
            "mup takes alpha_a, gamma0, beta0, c_a, decay_width, readout_width, readout_bias_width, embedding_width, key_start, mlp_out",
        ),
        (
            "--preset mup --preset.alpha-a 1 --preset.constants alpha-a=0.5",
            "the constant alpha_a is given twice, as 1.0 and 0.5",
        ),
        (
            "--preset completep --preset.constants eps_scope=all",
            "eps_scope=all is not a choice; write blocks, everywhere or completed",
        ),
        ("--optimizer.name momentum --optimizer.momentum 0", "is plain SGD; write optimizer.name sgd"),
        ("--optimizer.name lion --optimizer.momentum 0.5", "--optimizer.momentum is not read by lion"),
        ("--optimizer.name momentum --optimizer.eps 1e-6", "--optimizer.eps is not read by momentum"),
        ("--preset depth-mup --preset.alpha-l 0.3", "alpha_l=0.3"),
        ("--preset sp --preset.beta0 2", "beta0"),
        ("--preset.base vit-s16", "preset.base vit-s16 is a vit and the model a decoder"),
        ("--preset.base lm-tyni", "did you mean lm-tiny"),
        ("--optimizer.name sgd --optimizer.b1 0.8", "--optimizer.b1 is not read by sgd"),
        (
            "--optimizer.name sgd --optimizer.momentum 0 --optimizer.moment-dtype bfloat16",
            "--optimizer.moment-dtype is not read by sgd; leave it out, or write --optimizer.momentum 0.9",
        ),
        (
            "--optimizer.momentum 0.8",
            "--optimizer.momentum is not read by adamw; leave it out, or write --optimizer.name sgd",
        ),
        ("--optimizer.name adam --optimizer.weight-decay 0.1", "--optimizer.weight-decay is not read by adam"),
        (
            "--optimizer.decay-steps 10",
            "is not read by schedule cosine; leave it out, or write --optimizer.schedule wsd",
        ),
        ("--data.split writer", "--data.split is not read with the data python_corpus"),
        ("--data.no-augment", "--data.no-augment is not read with the data python_corpus"),
    ],
)
def test_values_that_do_not_fit(words: str, said: str, capsys: Capture, started: list[Config]) -> None:
    assert said in refused(capsys, "lm-tiny", *words.split())
    assert not started


def test_control_the_same_flags_pass_where_they_are_read(capsys: Capture) -> None:
    printed(capsys, "lm-tiny", "--optimizer.name", "sgd", "--optimizer.momentum", "0.8")
    printed(capsys, "lm-tiny", "--optimizer.name", "adam")
    printed(capsys, "lm-tiny", "--optimizer.name", "muon", "--optimizer.momentum", "0.95", "--optimizer.eps", "1e-6")
    printed(capsys, "lm-tiny", "--optimizer.name", "lion", "--optimizer.b2", "0.99")
    printed(capsys, "vit-digits", "--data.split", "writer", "--data.no-augment")
    wsd = "--steps 70 --optimizer.warmup-steps 11 --optimizer.schedule wsd --optimizer.decay-steps 59"
    printed(capsys, "lm-tiny", *wsd.split())
    printed(capsys, "lm-tiny", "--model", "vit-tiny", "--data.name", "digits", "--preset.base", "vit-proxy")


def test_messages_hold_on_a_terminal_with_colours(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["lm-tiny", "--optimizer.schedule", "sdg"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "--optimizer.schedule needs one of 'constant', 'cosine', 'linear', 'wsd', not 'sdg'" in err


def test_noise_is_for_encoder_decoders_and_they_need_it() -> None:
    for words, text in (
        ("lm-tiny --data.noise infilling", "for an encoder-decoder, and the model is a decoder"),
        ("lm-tiny --data.noise-rate 0.2", "add data.noise infilling or sentinels"),
        ("lm-tiny --model ed-tiny", "add --data.noise infilling or sentinels"),
        ("ed-tiny --data.noise-rate 1.5", "write a share of the tokens in"),
        ("ed-tiny --data.noise-span 0.5", "data.noise_span is 0.5"),
        ("ed-tiny --preset.base lm-proxy", "write one of ed-proxy, ed-tiny"),
    ):
        name, *argv = words.split()
        with pytest.raises(MupaxError, match=re.escape(text)):
            cli.parse(name, RECIPES[name], argv)
    assert cli.parse("r2c2-c4", RECIPES["r2c2-c4"], ["--data.noise-span", "4"]).config.data.noise_span == 4
