"""`mupax presets`: what it prints, its JSON, its messages for wrong input and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mupax import presets
from tests.fixtures.commands import command, output

pytestmark = pytest.mark.core

TABLE = "table depth-mup --model vit-tiny --base vit-proxy"


def rows(words: str) -> dict[str, dict[str, Any]]:
    table = json.loads(output(f"presets {words} --json"))
    columns = "name role group shape multiplier init_std lr eps weight_decay"
    assert all(" ".join(row) == columns for row in table)
    return {row["name"]: row for row in table}


def test_the_list_has_a_line_for_every_preset():
    lines = output("presets").splitlines()
    assert [line.split()[0] for line in lines] == list(presets.PRESETS)
    assert all(20 < len(line) <= 144 for line in lines)
    assert output("presets list").splitlines() == lines


def test_json_rows_are_factors_relative_to_the_base():
    table = rows(TABLE)
    query = table["block.attention.query"]
    assert (query["role"], query["shape"]) == ("query", [4, 64, 4, 16])
    # vit-proxy to vit-tiny: width, heads and depth doubled; alpha_l = 1/2.
    assert (query["lr"], query["init_std"]) == pytest.approx((2**-1.5, 2**-0.5))
    assert table["readout"]["multiplier"] == 0.5
    assert table["norm.gain"]["weight_decay"] == 0
    sgd = rows(f"{TABLE} --optimizer sgd")
    assert (sgd["patch"]["lr"], sgd["readout"]["lr"], sgd["patch"]["eps"]) == (2, 2, 1)


def test_options_reach_the_preset():
    lr = rows(TABLE)["block.mlp.up"]["lr"]
    for flags, name, column, value in (
        ("--preset.alpha-l 1", "block.mlp.up", "lr", lr * 2**0.5),
        ("--alpha-l 1", "block.mlp.up", "lr", lr * 2**0.5),
        ("--preset.gamma0 0.5", "readout", "multiplier", 1),
        ("--form plain", "readout", "multiplier", 1),
        ("--decay independent", "block.mlp.up", "weight_decay", 1),
        ("--absolute", "block.mlp.up", "init_std", 0.125),
    ):
        assert rows(f"{TABLE} {flags}")[name][column] == pytest.approx(value), flags
    assert rows("table mup --model vit-tiny")["readout"]["multiplier"] == 1 / 64
    at_base = rows("table depth-mup --model vit-tiny --base vit-tiny")
    assert {row["lr"] for row in at_base.values()} == {1}
    tied = rows("table mup --model gpt2 --base gpt2-medium")["tied_readout"]
    assert tied["role"] == "readout"


def test_text_has_the_forward_scales_and_the_rules():
    assert "attention logits x 0.25, every residual branch x 0.7071" in output("presets", TABLE)
    assert "D^-1 L^-0.5" in output(f"presets {TABLE} --rules")
    uneven = output("presets table mup --model lm-tiny --base gpt2")
    assert "caution: mlp/embed is 0.625 times the base's" in uneven


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("table muup --model vit-tiny", "no preset is named 'muup'; did you mean 'mup'?"),
        ("table mup --model vit-tini", "no model is named 'vit-tini'; did you mean vit-tiny"),
        ("table mup --model vit-tiny --base vit", "no model is named 'vit'"),
        ("table depth-mup --model vit-tiny --preset.alpha-l 0.3", "alpha_l=0.3 is outside [0.5, 1]"),
        ("table sp --model vit-tiny --alpha-a 1", "sp takes embedding_width, not alpha_a"),
        ("table mup --model vit-tiny --optimizer adagrad", "mup has no rule for the optimizer 'adagrad'"),
        ("table mup --model gpt2 --form plain", "a tied readout has no plain form"),
        (f"{TABLE} --noise-scale -3", "--noise-scale is -3.0; write a number of examples above 0"),
        (f"{TABLE} --batch 8:64", "--batch has no effect without --joint; add --joint NAME, or leave --batch out"),
        (f"{TABLE} --b1 0.8", "--b1 has no effect without --joint"),
        (f"{TABLE} --joint sde --batch 8:64 --b1 2", "--b1 is 2.0; write a number"),
        (f"{TABLE} --joint sde --noise-scale 9", "--noise-scale has no effect at the base's batch; add --batch FROM:TO"),
        (f"{TABLE} --rules --absolute", "--absolute has no effect with --rules"),
        (f"{TABLE} --rules --decay independent", "--decay has no effect with --rules"),
        ("joint --b2 nan --batch 8:64", "--b2 is nan; write a number in [0, 1)"),
        ("joint --b2 0.9", "--b2 has no effect if batch and tokens are the base's"),
        ("joint --b2 0.9 --tokens 1:8 --json", "--b2 has no effect with --json"),
        ("compare mup --markdown --json", "--markdown has no effect with --json"),
        ("table mup", "this needs --model MODEL|RECIPE|FILE"),
        ("tabel", "no command is named 'tabel'; did you mean table?"),
        ("limits muup", "did you mean 'mup'?"),
        ("limits ntk --optimizer muon", "ntk has no rule for the optimizer 'muon' (the paper has SGD and AdamW)"),
        ("limits completep --constant eps_scope=all", "write blocks, everywhere or completed"),
        ("limits ntk --constant s", "the constant 's': write NAME=VALUE, such as s=0.5"),
        ("compare mup sq", "no preset is named 'sq'"),
        ("compare", "compare needs presets, such as compare mup sp"),
    ],
)  # fmt: skip
def test_wrong_input_exits_2_with_one_message(words: str, message: str):
    done = command("presets", words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 10
    assert not done.out


@pytest.mark.parametrize(
    "words",
    [
        "table mup --model lm-tiny --joint sde --batch 8:64 --b1 0.8 --noise-scale 9 --absolute",
        "table mup --model lm-tiny --rules --joint sde --tokens 1:8 --decay independent --b2 0.9",
        "joint --batch 8:64 --b1 0.8",
    ],
)
def test_control_flags_that_have_an_effect_are_taken(words: str):
    assert output("presets", words)


def test_a_real_process():
    done = subprocess.run(
        [sys.executable, "-m", "presets", "table", "nope", "--model", "x"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_limits_prints_exponents_and_verdicts():
    assert re.search(
        r"attention logits +heads collapse N\^-0.5  stable", output("presets limits mup")
    )
    limits = json.loads(output("presets limits depth-mup --preset.alpha-l 1 --json"))
    assert limits["residual stream"]["depth"] == {"exponent": 0.0, "verdict": "stable"}
    assert "lazy N^-0.25" in output("presets limits ntk --constant s=0.5 --optimizer sgd")


def test_compare_tells_a_tuned_preset_from_its_preset():
    names = ["mup:lm-heads-v1", "mup"]
    rows = json.loads(output("presets compare mup:lm-heads-v1 mup mup --json"))
    assert list(rows[0]) == ["growing", "observable", *names]
    rows = json.loads(output("presets compare mup:lm-heads-v1 mup --summary --json"))
    assert [row["preset"] for row in rows] == names


def test_compare_puts_presets_side_by_side():
    header = output("presets compare mup mup-half depth-mup").splitlines()[0]
    assert header.split() == ["growing", "observable", "mup", "mup-half", "depth-mup"]
    lines = output("presets compare mup mup-half --markdown").splitlines()
    assert lines[:2] == ["| growing | observable | mup | mup-half |", "|---|---|---|---|"]
    assert "| head_dim | attention logits | heads collapse N^-0.5 | stable |" in lines
    assert json.loads(output("presets compare mup sp --json"))[0]["growing"] == "head_dim"


def test_branches_are_told_by_stack():
    """T5 base has twice the blocks of T5 small in both stacks; three branches of a decoder's block have one factor."""
    table = "table depth-mup --model flan-t5-base --preset.alpha-l 1.0 --base"
    sizes = "layers=6,encoder_layers=3,embed=512,heads=8,kv_heads=8,head_dim=64,mlp=2048"
    for base, factor in (("t5-small", "0.5"), (sizes, "0.25")):
        assert (
            f"of the encoder every residual branch x {factor}; of the decoder every residual branch x 0.5"
            in " ".join(output(f"presets {table} {base}").split())
        )


def test_the_table_of_the_document_is_the_printed_one():
    text = (Path(__file__).resolve().parents[2] / "docs" / "concepts" / "presets.md").read_text()
    words = re.search(r"`(?:mupax )?presets (compare .* --summary --markdown)`", text)
    assert words is not None
    assert output("presets", words[1]) in text
