"""`mupax presets`: what it prints, its JSON, its messages for wrong input and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mupax import presets
from mupax.__main__ import main

pytestmark = pytest.mark.core

TABLE = ["table", "depth-mup", "--model", "vit-tiny", "--base", "vit-proxy"]


def test_the_list_has_a_line_for_every_preset(capsys: pytest.CaptureFixture[str]):
    for argv in ([], ["list"]):
        assert main(["presets", *argv]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == list(presets.PRESETS)
        assert all(20 < len(line) <= 144 for line in lines)


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict]:
    assert main(["presets", *argv, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    columns = [
        "name",
        "role",
        "group",
        "shape",
        "multiplier",
        "init_std",
        "lr",
        "eps",
        "weight_decay",
    ]
    assert all(list(row) == columns for row in table)
    return {row["name"]: row for row in table}


def test_json_rows_are_factors_relative_to_the_base(capsys: pytest.CaptureFixture[str]):
    table = rows(capsys, *TABLE)
    query = table["block.attention.query"]
    assert (query["role"], query["shape"]) == ("query", [4, 64, 4, 16])
    # vit-proxy to vit-tiny: width, heads and depth doubled; alpha_l = 1/2.
    assert (query["lr"], query["init_std"]) == pytest.approx((2**-1.5, 2**-0.5))
    assert table["readout"]["multiplier"] == 0.5
    assert table["norm.gain"]["weight_decay"] == 0
    sgd = rows(capsys, *TABLE, "--optimizer", "sgd")
    assert (sgd["patch"]["lr"], sgd["readout"]["lr"], sgd["patch"]["eps"]) == (2, 2, 1)


def test_options_reach_the_preset(capsys: pytest.CaptureFixture[str]):
    base = rows(capsys, *TABLE)["block.mlp.up"]["lr"]
    for flag in ("--preset.alpha-l", "--alpha-l"):
        assert rows(capsys, *TABLE, flag, "1")["block.mlp.up"]["lr"] == pytest.approx(base * 2**0.5)
    assert rows(capsys, *TABLE, "--preset.gamma0", "0.5")["readout"]["multiplier"] == 1.0
    assert rows(capsys, *TABLE, "--form", "plain")["readout"]["multiplier"] == 1.0
    assert rows(capsys, *TABLE, "--decay", "independent")["block.mlp.up"]["weight_decay"] == 1
    assert rows(capsys, *TABLE, "--absolute")["block.mlp.up"]["init_std"] == pytest.approx(0.125)
    absolute = rows(capsys, "table", "mup", "--model", "vit-tiny")
    assert absolute["readout"]["multiplier"] == 1 / 64
    assert all(row["lr"] == 1 for row in rows(capsys, *TABLE[:4], "--base", "vit-tiny").values())
    assert (
        rows(capsys, "table", "mup", "--model", "gpt2", "--base", "gpt2-medium")["tied_readout"][
            "role"
        ]
        == "readout"
    )


def test_text_has_the_forward_scales_and_the_rules(capsys: pytest.CaptureFixture[str]):
    assert main(["presets", *TABLE]) == 0
    out = capsys.readouterr().out
    assert "attention logits x 0.25, every residual branch x 0.7071" in out
    assert main(["presets", *TABLE, "--rules"]) == 0
    assert "D^-1 L^-0.5" in capsys.readouterr().out
    assert main(["presets", "table", "mup", "--model", "lm-tiny", "--base", "gpt2"]) == 0
    assert "caution: mlp/embed is 0.625 times the base's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["table", "muup", "--model", "vit-tiny"],
            "no preset is named 'muup'; did you mean 'mup'?",
        ),
        (
            ["table", "mup", "--model", "vit-tini"],
            "no model is named 'vit-tini'; did you mean vit-tiny",
        ),
        (["table", "mup", "--model", "vit-tiny", "--base", "vit"], "no model is named 'vit'"),
        (
            ["table", "depth-mup", "--model", "vit-tiny", "--preset.alpha-l", "0.3"],
            "alpha_l=0.3 is outside [0.5, 1]",
        ),
        (
            ["table", "sp", "--model", "vit-tiny", "--alpha-a", "1"],
            "sp takes embedding_width, not alpha_a",
        ),
        (
            ["table", "mup", "--model", "vit-tiny", "--optimizer", "adagrad"],
            "mup has no rule for the optimizer 'adagrad'",
        ),
        (
            ["table", "mup", "--model", "gpt2", "--form", "plain"],
            "a tied readout has no plain form",
        ),
        (
            [*TABLE, "--noise-scale", "-3"],
            "--noise-scale is -3.0; write a number of examples above 0",
        ),
        (
            [*TABLE, "--batch", "8:64"],
            "--batch has no effect without --joint; add --joint NAME, or leave --batch out",
        ),
        ([*TABLE, "--b1", "0.8"], "--b1 has no effect without --joint"),
        ([*TABLE, "--joint", "sde", "--batch", "8:64", "--b1", "2"], "--b1 is 2.0; write a number"),
        (
            [*TABLE, "--joint", "sde", "--noise-scale", "9"],
            "--noise-scale has no effect at the base's batch; add --batch FROM:TO",
        ),
        ([*TABLE, "--rules", "--absolute"], "--absolute has no effect with --rules"),
        ([*TABLE, "--rules", "--decay", "independent"], "--decay has no effect with --rules"),
        (["joint", "--b2", "nan", "--batch", "8:64"], "--b2 is nan; write a number in [0, 1)"),
        (["joint", "--b2", "0.9"], "--b2 has no effect if batch and tokens are the base's"),
        (["joint", "--b2", "0.9", "--tokens", "1:8", "--json"], "--b2 has no effect with --json"),
        (["compare", "mup", "--markdown", "--json"], "--markdown has no effect with --json"),
        (["table", "mup"], "this needs --model MODEL|RECIPE|FILE"),
        (["tabel"], "no command is named 'tabel'; did you mean table?"),
    ],
)
def test_wrong_input_exits_2_with_one_message(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["presets", *argv]) == 2
    output = capsys.readouterr()
    assert text in output.err
    assert "Traceback" not in output.err
    assert len(output.err.splitlines()) <= 10
    assert not output.out


@pytest.mark.parametrize(
    "words",
    [
        "table mup --model lm-tiny --joint sde --batch 8:64 --b1 0.8 --noise-scale 9 --absolute",
        "table mup --model lm-tiny --rules --joint sde --tokens 1:8 --decay independent --b2 0.9",
        "joint --batch 8:64 --b1 0.8",
    ],
)
def test_control_flags_that_have_an_effect_are_taken(
    words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["presets", *words.split()]) == 0
    assert capsys.readouterr().out


def test_a_real_process():
    done = subprocess.run(
        [sys.executable, "-m", "presets", "table", "nope", "--model", "x"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_limits_prints_exponents_and_verdicts(capsys: pytest.CaptureFixture[str]):
    assert main(["presets", "limits", "mup"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"attention logits +heads collapse N\^-0.5  stable", out)
    assert main(["presets", "limits", "depth-mup", "--preset.alpha-l", "1", "--json"]) == 0
    limits = json.loads(capsys.readouterr().out)
    assert limits["residual stream"]["depth"] == {"exponent": 0.0, "verdict": "stable"}
    assert main(["presets", "limits", "ntk", "--constant", "s=0.5", "--optimizer", "sgd"]) == 0
    assert "lazy N^-0.25" in capsys.readouterr().out


def test_compare_tells_a_tuned_preset_from_its_preset(capsys: pytest.CaptureFixture[str]):
    assert main(["presets", "compare", "mup:lm-heads-v1", "mup", "mup", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(rows[0]) == ["growing", "observable", "mup:lm-heads-v1", "mup"]
    assert main(["presets", "compare", "mup:lm-heads-v1", "mup", "--summary", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["preset"] for row in rows] == ["mup:lm-heads-v1", "mup"]


def test_compare_puts_presets_side_by_side(capsys: pytest.CaptureFixture[str]):
    assert main(["presets", "compare", "mup", "mup-half", "depth-mup"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == [
        "growing",
        "observable",
        "mup",
        "mup-half",
        "depth-mup",
    ]
    assert main(["presets", "compare", "mup", "mup-half", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| growing | observable | mup | mup-half |", "|---|---|---|---|"]
    assert "| head_dim | attention logits | heads collapse N^-0.5 | stable |" in lines
    assert main(["presets", "compare", "mup", "sp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["growing"] == "head_dim"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["limits", "muup"], "did you mean 'mup'?"),
        (
            ["limits", "ntk", "--optimizer", "muon"],
            "ntk has no rule for the optimizer 'muon' (the paper has SGD and AdamW)",
        ),
        (
            ["limits", "completep", "--constant", "eps_scope=all"],
            "write blocks, everywhere or completed",
        ),
        (["limits", "ntk", "--constant", "s"], "the constant 's': write NAME=VALUE, such as s=0.5"),
        (["compare", "mup", "sq"], "no preset is named 'sq'"),
        (["compare"], "compare needs presets, such as compare mup sp"),
    ],
)
def test_wrong_words_of_limits_and_compare(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["presets", *argv]) == 2
    assert text in capsys.readouterr().err


def test_branches_are_told_by_stack(capsys: pytest.CaptureFixture[str]):
    """T5 base has twice the blocks of T5 small in both stacks; three branches of a decoder's block have one factor."""
    words = [
        "table",
        "depth-mup",
        "--model",
        "flan-t5-base",
        "--base",
        "t5-small",
        "--preset.alpha-l",
        "1.0",
    ]
    assert main(["presets", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "of the encoder every residual branch x 0.5; of the decoder every residual branch x 0.5"
        in shown
    )
    base = "layers=6,encoder_layers=3,embed=512,heads=8,kv_heads=8,head_dim=64,mlp=2048"
    assert main(["presets", *words[:5], base, *words[6:]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "of the encoder every residual branch x 0.25; of the decoder every residual branch x 0.5"
        in shown
    )


def test_the_table_of_the_document_is_the_printed_one(capsys: pytest.CaptureFixture[str]):
    text = (Path(__file__).resolve().parents[2] / "docs" / "concepts" / "presets.md").read_text()
    argv = re.search(r"`(?:mupax )?presets (compare .* --summary --markdown)`", text)
    assert argv is not None
    assert main(["presets", *argv[1].split()]) == 0
    assert capsys.readouterr().out in text
