"""`mupax verify`: exit codes, what it asks for, what it refuses, and how it looks at 80 columns."""

from __future__ import annotations

from typing import Any

import pytest

from mupax import presets, terminal
from tests.fixtures.commands import command
from tests.presets.verify.dumps import Contents, changed, decoder, dump, shown, verified

pytestmark = pytest.mark.core

MUP = presets.get("mup")
SMALL, MIDDLE, LARGE = (dump(MUP, decoder(16 * k, heads=4 * k), decoder(16)) for k in (1, 2, 4))


def but(contents: Contents, *names: str, **values: Any) -> Contents:
    """Return a dump with other values of some parameters."""
    return changed(contents, lambda n, e: values if n in names else None)


def without(contents: Contents, *names: str) -> Contents:
    return {name: entry for name, entry in contents.items() if name not in names}


def with_model(contents: Contents, **values: Any) -> Contents:
    return {**contents, "model": {**contents["model"], **values}}


def mlp(width: int, **names: str) -> Contents:
    """An MLP as PyTorch names it, under muP.

    Args:
        names: Roles of further matrices.
    """
    times = width / 8
    lr = 1e-3
    contents = {
        "0.weight": {"shape": [width, 5], "std": 0.4, "lr": lr},
        "0.bias": {"shape": [width], "std": 0.0, "lr": lr},
        "2.weight": {"shape": [2 * width, width], "std": width**-0.5, "lr": lr / times},
        "4.weight": {"shape": [3, 2 * width], "std": 0.2, "lr": lr, "multiplier": 1 / times},
    }
    for name, role in names.items():
        shape = [width, 3]
        contents[name] = {"shape": shape, "std": 0.2 / times, "lr": lr / times, "role": role}
    return contents


def test_names_that_say_nothing_are_judged_by_which_dimension_grows():
    judged = verified(mlp(8), mlp(32), flags="--strict")
    assert (judged.code, judged.findings) == (0, [])
    judged = verified(mlp(8), but(mlp(32), "2.weight", lr=1e-3))
    assert (judged.code, judged.findings[0]["names"]) == (1, ["2.weight"])


def test_a_matrix_of_unknown_name_and_layout_is_asked_for():
    files = [mlp(w, what="") for w in (8, 32)]
    done = shown(*files)
    assert done.code == 2
    assert (
        "nothing says what what is; write --role 'what=ROLE', where a role is one of token_embedding, "
        in done.err
    )
    assert len(done.err.splitlines()) == 1
    assert shown(*files, flags="--role what=readout").code == 0
    # A table of three tokens, and no readout.
    assert shown(*files, flags="--role wha?=token_embedding").code == 2
    done = shown(*files, flags="--role w=readout")
    assert done.code == 2
    assert "--role 'w' fits no parameter; they are named like 0.weight" in done.err
    assert verified(mlp(8, what="readout"), mlp(32, what="readout")).code == 0


def test_the_size_of_a_head_is_asked_for():
    def flat(contents: Contents) -> Contents:
        width = contents["norm.gain"]["shape"][0]
        square = changed(
            contents, lambda n, e: {"shape": [2, width, width]} if len(e["shape"]) == 4 else None
        )
        square["model"] = without(square["model"], "head_dim")
        biases = ("block.attention.query_bias", "block.attention.value_bias")
        return but(square, *biases, shape=[2, width])

    files = flat(SMALL), flat(LARGE)
    done = shown(*files)
    assert done.code == 2
    assert "write --head-dim 64 (or 32,64: one a file)" in done.err
    assert shown(*files, flags="--head-dim 4").code == 0
    # Then logits should have fallen as 1/d.
    assert shown(*files, flags="--head-dim 4,16").code == 1
    assert shown(*files, flags="--head-dim 4,8,16").code == 2


def test_three_sizes_have_to_be_of_one_law():
    assert verified(SMALL, MIDDLE, LARGE).code == 0
    doubled = changed(LARGE, lambda n, e: {"lr": e["lr"] * 2} if n == "block.mlp.up" else None)
    biggest = dump(MUP, decoder(16 * 16, heads=64), decoder(16))
    judged = verified(SMALL, doubled, biggest)
    (finding,) = judged.findings
    assert (judged.code, finding["names"]) == (1, ["block.mlp.up"])
    assert "at width 64 it is" in finding["sentence"]


def test_a_start_at_zero_at_one_size_alone_is_wrong():
    zero = [but(x, "readout", std=0) for x in (SMALL, LARGE)]
    assert verified(*zero).code == 0
    judged = verified(SMALL, zero[1])
    assert judged.code == 1
    sentence = judged.findings[0]["sentence"]
    assert "readout: the initial size is 0 at one size and not at another" in sentence


def test_what_is_left_out_is_not_judged_and_said():
    def bare(contents: Contents) -> Contents:
        parameters = without(contents, "model").items()
        entries = {name: without(entry, "lr", "wd", "eps") for name, entry in parameters}
        return {**entries, "model": {"head_dim": 4, "layers": 2}}

    done = shown(bare(SMALL), bare(LARGE))
    assert done.code == 0
    assert (
        "the files do not say, and it is not judged: lr (learning rate), attention (what q.k is multiplied by)"
        in done.text
    )


def class_token_alone(width: int) -> Contents:
    """Return a dump that has a readout's multiplier, but no table: only PyTorch's class token."""
    up, down = [4 * width, width], [width, 4 * width]
    return {
        "blocks.0.mlp.fc1.weight": {"shape": up, "lr": 1 / width, "role": "mlp_in"},
        "blocks.0.mlp.fc2.weight": {"shape": down, "lr": 1 / width, "role": "mlp_out"},
        "cls_token": {"shape": [1, 1, width], "lr": 0.1},
        "model": {"optimizer": "adamw", "readout": 1.0, "head_dim": 4, "layers": 1},
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([SMALL], "is one model, and growth shows between two; give a second file"),
        ([SMALL, SMALL], "have the same sizes"),
        ([SMALL, without(LARGE, "norm.gain")], "have different parameters, such as norm.gain"),
        (
            [SMALL, changed(LARGE, lambda n, e: {"lr": 0})],
            "every learning rate is 0; dump the model after the first steps",
        ),
        ([without(x, "readout", "readout_bias") for x in (SMALL, LARGE)], "has no readout"),
        (
            [class_token_alone(w) for w in (8, 32)],
            '"readout" says that the embedding\'s table is the readout, and no parameter is such',
        ),
        ([with_model(SMALL, readout=1), LARGE], "write it into every file, or into none"),
        ([with_model(SMALL, optimizer="sgd"), LARGE], "the files have different optimizers"),
        (
            [SMALL, {**LARGE, "block.mlp.up": {"shape": [2, 3, 7]}}],
            "which is not the width 64 by the MLP's; say what it is with --role",
        ),
        (
            [but(x, "norm.gain", role="gian") for x in (SMALL, LARGE)],
            "has the role 'gian'; roles are",
        ),
        (
            [but(x, "norm.gain", role=["norm_gain"]) for x in (SMALL, LARGE)],
            "norm.gain has the role ['norm_gain']; write a text, such as 'query'",
        ),
        (
            [with_model(x, optimizer=["adamw"]) for x in (SMALL, LARGE)],
            "the optimizer is ['adamw']; write one of adamw, adam",
        ),
        (
            [dump(MUP, model, decoder(16)) for model in (decoder(32, heads=8), decoder(16, depth=8))],
            "dump one size that grows at a time",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_one_message(files: list[Contents], message: str):
    done = shown(*files)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not done.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--constant alpha_l=1", "--constant is a preset's; write --preset too"),
        ("--preset muup", "did you mean 'mup'?"),
        ("--optimizer soap", "no optimizer is named 'soap'"),
        ("--json --table", "--table has no effect with --json; leave --json out"),
        ("--preset u-mup --optimizer sgd", "u-mup has no rule for the optimizer 'sgd'"),
    ],
)
def test_wrong_words_are_refused(flags: str, message: str):
    done = shown(SMALL, LARGE, flags=flags)
    assert done.code == 2
    assert message in done.err


def test_it_needs_files():
    done = command("verify")
    assert done.code == 2
    assert "verify needs files, such as verify small.json large.json" in done.err


def test_a_preset_that_is_meant_takes_constants():
    faded = [changed(x, lambda n, e: {"wd": 0.1} if e["wd"] else None) for x in (SMALL, LARGE)]
    assert verified(*faded, flags="--strict").code == 1
    judged = verified(*faded, flags="--preset mup --constant decay_width=-1 --strict")
    assert (judged.code, judged.findings) == (0, [])


def test_it_reads_well_at_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "columns", lambda *_: 80)
    done = shown(SMALL, but(LARGE, "block.mlp.up", "block.mlp.down", lr=1e-3), flags="--table")
    assert done.code == 1
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(
        "WRONG: 1 wrong, 0 to know of as width grows x4, held against mup: the learning"
    )
    remedy = "Next: write lr 0.00025 at width 64, not 0.001"
    assert any(line.startswith(remedy) for line in lines[:4])
    assert "embed x4, heads x4, mlp x4, adamw, 20 parameters; held against mup" in lines
    (start,) = (i for i, line in enumerate(lines) if line.startswith("WRONG   "))
    assert lines[start].startswith(
        "WRONG   block.mlp.up, block.mlp.down (matrices of blocks): the learning"
    )
    assert lines[start + 1].startswith("        ")
    (row,) = (
        i for i, line in enumerate(lines) if line.startswith("block.mlp.up") and "0 not -1" in line
    )
    assert row > start
