"""`mupax train`: what each wrong word, flag and value is answered. Nothing is trained here."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from mupax import MupaxError
from mupax.__main__ import main
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES, lm_tiny
from mupax.train.config.record import command_of, to_json
from mupax.train.config.run import Config
from tests.fixtures.command_line import Capture, printed, refused, started

__all__ = ["started"]  # fixture

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lm-tyni", "did you mean lm-tiny?"),
        ("--steps 3", "the first word is a recipe"),
        ("zzz", "the recipes are lm-laptop, lm-tiny, vit-digits"),
    ],
)
def test_a_wrong_first_word(words: str, message: str, capsys: Capture) -> None:
    assert message in refused(capsys, "train", *words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--optimizer.peak-lrr 3",
            "no flag is named --optimizer.peak-lrr; did you mean --optimizer.peak-lr?",
        ),
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
            "--optimizer.schedule needs one of 'constant', 'cosine', 'linear', 'wsd', not 'sdg'; "
            "did you mean wsd?",
        ),
        ("--preset.form mean", "'mean-field', 'plain', 'readout-multiplier', 'table-9'"),
    ],
)
def test_a_wrong_flag(words: str, message: str, capsys: Capture) -> None:
    err = refused(capsys, "train", "lm-tiny", *words.split())
    assert message in err
    assert "mupax train lm-tiny --help" in err


@pytest.mark.parametrize(
    "words",
    [
        "train lm-tiny --preset.constants c_a=1 --preset.constants c_a=2",
        "train lm-tiny --preset.constants c_a=1 --preset.rates.readout 2 --preset.constants=c_a=2",
        "train lm-tiny --data.evaluate a=text:a --data.evaluate b=text:b",
        "presets limits depth-mup --constant alpha_l=1 --constant alpha_a=0.5",
    ],
)
def test_a_flag_of_several_values_is_written_once(words: str, capsys: Capture) -> None:
    """tyro would take the last use alone, and lose the values of the first without a word."""
    message = refused(capsys, *words.split())
    assert re.search(
        r"error: (--\S+) is written twice; write all of its values behind one \1", message
    )


@pytest.mark.parametrize(
    "words",
    [
        "presets limits mup --preset.embedding-width -0.5",
        "check lm-tiny --dry-run --preset.embedding-width=-0.5",
        "train lm-tiny --preset.embedding_width -0.5",
    ],
)
def test_a_constant_without_a_flag_is_told_how_to_be_written(words: str, capsys: Capture) -> None:
    message = refused(capsys, *words.split())
    assert "write --preset.constants embedding_width=-0.5" in message
    assert main(["presets", "limits", "mup", *message.split()[-2:]]) == 0


def test_control_values_behind_one_flag_and_a_repeated_flag_of_one_value(capsys: Capture) -> None:
    words = "lm-tiny --preset.constants alpha_a=0.5 c_a=2 --steps 3 --steps 5"
    config = printed(capsys, *words.split())
    assert config.preset.constants == ("alpha_a=0.5", "c_a=2")
    assert config.steps == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--optimizer.name shampoo",
            "no optimizer is named 'shampoo' (no source's table of its rates could be verified: 2512.05620",
        ),
        (
            "--optimizer.name sdg",
            "no optimizer is named 'sdg'; write adamw, adam, sgd, momentum, muon, lion",
        ),
        ("--steps 0", "steps is 0; write a number of at least 1"),
        ("--seed -1", "seed is -1"),
        ("--seed 4294967296", "seed is 4294967296; write a number below 2^32"),
        ("--data.seed 9007199254740992", "data.seed is 9007199254740992; write a number below"),
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
        (
            "--preset measured:none.json --preset.base None",
            "none.json: no table of measured scales",
        ),
        ("--preset ntk --preset.constants s=2", "ntk: s=2 is outside [0, 1]"),
        (
            "--preset ntk --preset.constants s=high",
            "ntk: s=high is not a finite number; write one, such as s=0",
        ),
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
        (
            "--optimizer.name momentum --optimizer.momentum 0",
            "is plain SGD; write optimizer.name sgd",
        ),
        (
            "--optimizer.name lion --optimizer.momentum 0.5",
            "--optimizer.momentum is not read by lion",
        ),
        (
            "--optimizer.name momentum --optimizer.eps 1e-6",
            "--optimizer.eps is not read by momentum",
        ),
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
        (
            "--optimizer.name adam --optimizer.weight-decay 0.1",
            "--optimizer.weight-decay is not read by adam",
        ),
        (
            "--optimizer.decay-steps 10",
            "is not read by schedule cosine; leave it out, or write --optimizer.schedule wsd",
        ),
        (
            "--data.name hf:owner/name --data.on-broken skip",
            "--data.on-broken is not read with the data hf:owner/name",
        ),
        ("--data.split writer", "--data.split is not read with the data python_corpus"),
        ("--data.no-augment", "--data.no-augment is not read with the data python_corpus"),
        *[
            (f"--data.name {name} --data.data-dir d", f"data {name}; leave it out, or set the env")
            for name in ("text:a.txt", "records:a.jsonl", "chat:a.jsonl", "hf:owner/name")
        ],
    ],
)
def test_values_that_do_not_fit(
    words: str, message: str, capsys: Capture, started: list[Config]
) -> None:
    assert message in refused(capsys, "train", "lm-tiny", *words.split())
    assert not started


def test_control_the_same_flags_pass_where_they_are_read(capsys: Capture) -> None:
    printed(capsys, "lm-tiny", "--optimizer.name", "sgd", "--optimizer.momentum", "0.8")
    printed(capsys, "lm-tiny", "--optimizer.name", "adam")
    printed(capsys, "lm-tiny", "--data.data-dir", "d")
    printed(capsys, "lm-tiny", "--data.name", "c4", "--data.data-dir", "d")
    printed(
        capsys,
        *["lm-tiny", "--data.mix", "a=text:a.txt", "b=python_corpus", "--data.data-dir", "d"],
    )
    printed(
        capsys,
        *["lm-tiny", "--data.name", "text:a", "--data.evaluate", "b=c4", "--data.data-dir", "d"],
    )
    printed(
        capsys,
        "lm-tiny",
        "--optimizer.name",
        "muon",
        "--optimizer.momentum",
        "0.95",
        "--optimizer.eps",
        "1e-6",
    )
    printed(capsys, "lm-tiny", "--optimizer.name", "lion", "--optimizer.b2", "0.99")
    printed(capsys, "vit-digits", "--data.split", "writer", "--data.no-augment")
    wsd = (
        "--steps 70 --optimizer.warmup-steps 11 --optimizer.schedule wsd --optimizer.decay-steps 59"
    )
    printed(capsys, "lm-tiny", *wsd.split())
    printed(
        capsys,
        "lm-tiny",
        "--model",
        "vit-tiny",
        "--data.name",
        "digits",
        "--preset.base",
        "vit-proxy",
    )


def test_messages_hold_on_a_terminal_with_colours(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["train", "lm-tiny", "--optimizer.schedule", "sdg"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert (
        "--optimizer.schedule needs one of 'constant', 'cosine', 'linear', 'wsd', not 'sdg'" in err
    )


def test_a_saved_run_may_name_a_folder_that_its_data_do_not_read(
    tmp_path: Path, capsys: Capture
) -> None:
    run = lm_tiny()
    data = dataclasses.replace(run.data, name="text:a.txt", data_dir="d")
    run = dataclasses.replace(run, data=data)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_json(run)))
    assert printed(capsys, str(file)).data.data_dir == "d"
    assert command_of(run) == "mupax train lm-tiny --data.name text:a.txt"


def test_noise_is_for_encoder_decoders_and_they_need_it() -> None:
    for words, text in (
        ("lm-tiny --data.noise infilling", "for an encoder-decoder, and the model is a decoder"),
        ("lm-tiny --data.noise-rate 0.2", "add --data.noise infilling (or sentinels)"),
        ("lm-tiny --model ed-tiny", "add --data.noise infilling or sentinels"),
        ("ed-tiny --data.noise-rate 1.5", "write a share of the tokens in"),
        ("ed-tiny --data.noise-span 0.5", "data.noise_span is 0.5"),
        ("ed-tiny --preset.base lm-proxy", "write one of ed-proxy, ed-tiny"),
    ):
        name, *argv = words.split()
        with pytest.raises(MupaxError, match=re.escape(text)):
            cli.parse(name, RECIPES[name], argv)
    assert (
        cli.parse("r2c2-c4", RECIPES["r2c2-c4"], ["--data.noise-span", "4"]).config.data.noise_span
        == 4
    )


def test_a_base_that_leaves_out_sizes_is_noted(capsys: Capture) -> None:
    # Without a note, attention's output has twice the learning rate that the base was meant to give.
    def note(base: str) -> str:
        assert main(["train", "lm-tiny", "--preset.base", base, "--print-config"]) == 0
        return capsys.readouterr().err

    left_out = "leaves out heads 4, kv_heads 4, mlp 320, layers 4"
    assert left_out in note("embed=64,head_dim=32")
    assert not note("lm-proxy")
    assert not note("lm-proxy,batch=4")
    assert not note("None")
    assert not note("embed=64,heads=2,kv_heads=2,head_dim=32,mlp=160,layers=2")


@pytest.mark.parametrize(
    "words",
    [
        "sweep lm-tiny --print-config",
        "sweep lm-tiny --restart 2",
        "tune lm-tiny --over lr --print-config",
        "transfer lm-tiny --grow heads=2,4 --print-config",
        "check lm-tiny --restart 2",
        "compile lm-tiny --topology v5e:2x2 --dry-run",
        "plan lm-tiny --print-config",
        "presets dynamics --model bordelon-vit --print-config",
    ],
)
def test_what_a_command_would_not_do_is_refused(words: str, capsys: Capture) -> None:
    # Ignored, `sweep --print-config` would train a whole grid.
    flag = next(word for word in reversed(words.split()) if word.startswith("--"))
    assert f"does not read {flag}; `mupax train` does" in refused(capsys, *words.split())
