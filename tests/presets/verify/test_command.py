"""`mupax verify`: exit codes, what it asks for, what it refuses, and how it looks at 80 columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mupax import presets, terminal
from mupax.__main__ import main
from tests.presets.verify.dumps import Contents, changed, decoder, dump, verified

pytestmark = pytest.mark.core

MUP = presets.get("mup")
SMALL, MIDDLE, LARGE = (dump(MUP, decoder(16 * k, heads=4 * k), decoder(16)) for k in (1, 2, 4))


def write(folder: Path, *files: Contents) -> list[str]:
    paths = [folder / f"{i}.json" for i in range(len(files))]
    for path, contents in zip(paths, files, strict=True):
        path.write_text(json.dumps(contents))
    return [str(path) for path in paths]


def without_layers(contents: Contents) -> Contents:
    return {
        **contents,
        "model": {key: value for key, value in contents["model"].items() if key != "layers"},
    }


def mlp(width: int, lr: float = 1e-3, **names: str) -> Contents:
    """An MLP as PyTorch names it, under muP."""
    times = width / 8
    std = {"std": width**-0.5}
    return {
        "0.weight": {"shape": [width, 5], "std": 0.4, "lr": lr},
        "0.bias": {"shape": [width], "std": 0.0, "lr": lr},
        "2.weight": {"shape": [2 * width, width], **std, "lr": lr / times},
        "4.weight": {"shape": [3, 2 * width], "std": 0.2, "lr": lr, "multiplier": 1 / times},
        **{
            name: {"shape": [width, 3], "std": 0.2 / times, "lr": lr / times, "role": role}
            for name, role in names.items()
        },
    }


def test_names_that_say_nothing_are_judged_by_which_dimension_grows(tmp_path: Path):
    code, report = verified(tmp_path, mlp(8), mlp(32), flags=("--strict",))
    assert (code, report["lines"][0]["findings"]) == (0, [])
    code, report = verified(
        tmp_path, mlp(8), changed(mlp(32), lambda n, e: {"lr": 1e-3} if n == "2.weight" else None)
    )
    assert (code, report["lines"][0]["findings"][0]["names"]) == (1, ["2.weight"])


def test_a_matrix_of_unknown_name_and_layout_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [
        {**mlp(w), "what": {"shape": [w, 3], "std": 0.2 * 8 / w, "lr": 1e-3 * 8 / w}}
        for w in (8, 32)
    ]
    paths = write(tmp_path, *files)
    assert main(["verify", *paths]) == 2
    error = capsys.readouterr().err
    assert (
        "nothing says what what is; write --role 'what=ROLE', where a role is one of token_embedding, "
        in error
    )
    assert len(error.splitlines()) == 1
    assert main(["verify", *paths, "--role", "what=readout"]) == 0
    assert (
        main(["verify", *paths, "--role", "wha?=token_embedding"]) == 2
    )  # a table of three tokens, and no readout
    assert main(["verify", *paths, "--role", "w=readout"]) == 2
    assert "--role 'w' fits no parameter; they are named like 0.weight" in capsys.readouterr().err
    assert verified(tmp_path, mlp(8, what="readout"), mlp(32, what="readout"))[0] == 0


def test_the_size_of_a_head_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def flat(contents: Contents) -> Contents:
        width = contents["norm.gain"]["shape"][0]
        square = changed(
            contents, lambda n, e: {"shape": [2, width, width]} if len(e["shape"]) == 4 else None
        )
        return {**square, "model": {k: v for k, v in contents["model"].items() if k != "head_dim"}}

    small, large = (flat(x) for x in (SMALL, LARGE))
    for contents in (small, large):
        for name in ("query", "value"):
            contents[f"block.attention.{name}_bias"]["shape"] = [
                2,
                contents["norm.gain"]["shape"][0],
            ]
    paths = write(tmp_path, small, large)
    assert main(["verify", *paths]) == 2
    assert "write --head-dim 64 (or 32,64: one a file)" in capsys.readouterr().err
    assert main(["verify", *paths, "--head-dim", "4"]) == 0
    assert (
        main(["verify", *paths, "--head-dim", "4,16"]) == 1
    )  # then logits should have fallen as 1/d
    assert main(["verify", *paths, "--head-dim", "4,8,16"]) == 2


def test_three_sizes_have_to_be_of_one_law(tmp_path: Path):
    assert verified(tmp_path, SMALL, MIDDLE, LARGE)[0] == 0
    doubled = changed(LARGE, lambda n, e: {"lr": e["lr"] * 2} if n == "block.mlp.up" else None)
    biggest = dump(MUP, decoder(16 * 16, heads=64), decoder(16))
    code, report = verified(tmp_path, SMALL, doubled, biggest)
    (finding,) = report["lines"][0]["findings"]
    assert code == 1
    assert finding["names"] == ["block.mlp.up"]
    assert "at width 64 it is" in finding["sentence"]


def test_a_start_at_zero_at_one_size_alone_is_wrong(tmp_path: Path):
    zero = [changed(x, lambda n, e: {"std": 0} if n == "readout" else None) for x in (SMALL, LARGE)]
    assert verified(tmp_path, *zero)[0] == 0
    code, report = verified(tmp_path, SMALL, zero[1])
    assert code == 1
    assert (
        "readout: the initial size is 0 at one size and not at another"
        in report["lines"][0]["findings"][0]["sentence"]
    )


def test_what_is_left_out_is_not_judged_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def bare(contents: Contents) -> Contents:
        entries = {
            n: {"shape": e["shape"], "std": e["std"], "multiplier": e["multiplier"]}
            for n, e in contents.items()
            if n != "model"
        }
        return {**entries, "model": {"head_dim": 4, "layers": 2}}

    assert main(["verify", *write(tmp_path, bare(SMALL), bare(LARGE))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "the files do not say, and it is not judged: lr (learning rate), attention (what q.k is multiplied by)"
        in shown
    )


def class_token_alone(width: int) -> Contents:
    """Return a dump that has a readout's multiplier, but no table: only PyTorch's class token."""
    return {
        "blocks.0.mlp.fc1.weight": {"shape": [4 * width, width], "lr": 1 / width, "role": "mlp_in"},
        "blocks.0.mlp.fc2.weight": {
            "shape": [width, 4 * width],
            "lr": 1 / width,
            "role": "mlp_out",
        },
        "cls_token": {"shape": [1, 1, width], "lr": 0.1},
        "model": {"optimizer": "adamw", "readout": 1.0, "head_dim": 4, "layers": 1},
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([SMALL], "is one model, and growth shows between two; give a second file"),
        ([SMALL, SMALL], "have the same sizes"),
        (
            [SMALL, {n: e for n, e in LARGE.items() if n != "norm.gain"}],
            "have different parameters, such as norm.gain",
        ),
        (
            [SMALL, changed(LARGE, lambda n, e: {"lr": 0})],
            "every learning rate is 0; dump the model after the first steps",
        ),
        (
            [
                {n: e for n, e in x.items() if n not in ("readout", "readout_bias")}
                for x in (SMALL, LARGE)
            ],
            "has no readout",
        ),
        (
            [class_token_alone(w) for w in (8, 32)],
            '"readout" says that the embedding\'s table is the readout, and no parameter is such',
        ),
        (
            [{**SMALL, "model": {**SMALL["model"], "readout": 1}}, LARGE],
            "write it into every file, or into none",
        ),
        (
            [{**SMALL, "model": {**SMALL["model"], "optimizer": "sgd"}}, LARGE],
            "the files have different optimizers",
        ),
        (
            [SMALL, {**LARGE, "block.mlp.up": {"shape": [2, 3, 7]}}],
            "which is not the width 64 by the MLP's; say what it is with --role",
        ),
        (
            [{**x, "norm.gain": {**x["norm.gain"], "role": "gian"}} for x in (SMALL, LARGE)],
            "has the role 'gian'; roles are",
        ),
        (
            [
                dump(MUP, decoder(32, heads=8), decoder(16)),
                dump(MUP, decoder(16, depth=8), decoder(16)),
            ],
            "dump one size that grows at a time",
        ),
    ],
)
def test_what_cannot_be_judged_is_one_message(
    files: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["verify", *write(tmp_path, *files)]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "verify needs files, such as verify small.json large.json"),
        (["--constant", "alpha_l=1"], "--constant is a preset's; write --preset too"),
        (["--preset", "muup"], "did you mean 'mup'?"),
        (["--optimizer", "soap"], "no optimizer is named 'soap'"),
        (["--preset", "u-mup", "--optimizer", "sgd"], "u-mup has no rule for the optimizer 'sgd'"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    paths = write(tmp_path, SMALL, LARGE) if words else []
    assert main(["verify", *paths, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_preset_that_is_meant_takes_constants(tmp_path: Path):
    faded = [changed(x, lambda n, e: {"wd": 0.1} if e["wd"] else None) for x in (SMALL, LARGE)]
    assert verified(tmp_path, *faded, flags=("--strict",))[0] == 1
    meant = ("--preset", "mup", "--constant", "decay_width=-1", "--strict")
    code, report = verified(tmp_path, *faded, flags=meant)
    assert {name for f in report["lines"][0]["findings"] for name in f["names"]} == set()
    assert code == 0


def test_it_reads_well_at_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(terminal, "columns", lambda *_: 80)
    wrong = changed(LARGE, lambda n, e: {"lr": 1e-3} if n.startswith("block.mlp") else None)
    assert main(["verify", *write(tmp_path, SMALL, wrong), "--table"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(
        "WRONG: 1 wrong, 0 to know of as width grows x4, held against mup: the learning"
    )
    steps = [
        i
        for i, line in enumerate(lines)
        if line.startswith("Next: write lr 0.00025 at width 64, not 0.001")
    ]
    assert steps
    assert steps[0] <= 3
    assert "embed x4, heads x4, mlp x4, adamw, 20 parameters; held against mup" in lines
    (start,) = (i for i, line in enumerate(lines) if line.startswith("WRONG   "))
    assert lines[start].startswith(
        "WRONG   block.mlp.up, block.mlp.down (matrices of blocks): the learning"
    )
    assert lines[start + 1].startswith("        ")
    rows = [
        i for i, line in enumerate(lines) if line.startswith("block.mlp.up") and "0 not -1" in line
    ]
    assert rows
    assert rows[0] > start
