"""Every preset's table as committed text: `python -m scripts.goldens` writes it anew."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools

import pytest

from mupax.presets import PRESETS, Role
from mupax.presets.rule import axis
from scripts import goldens

pytestmark = pytest.mark.core


def test_every_table_is_the_committed_one():
    texts = dict(goldens.goldens())
    assert texts.keys() == {path.name for path in goldens.FOLDER.glob("*.txt")}
    for name, text in texts.items():
        before = (goldens.FOLDER / name).read_text().splitlines()
        after = text.splitlines()
        changed = "\n".join(
            difflib.unified_diff(before, after, "committed", "computed", lineterm="", n=0)
        )
        assert not changed, f"{name}; if this is meant, run `python -m scripts.goldens`\n{changed}"


def test_every_preset_family_and_exponent_pair_is_there():
    names = {path.name for path in goldens.FOLDER.glob("*.txt")}
    assert {f"{name}-{family}-adam.txt" for name in PRESETS for family in goldens.MODELS} <= names
    for family in goldens.MODELS:
        pairs = (goldens.FOLDER / f"pairs-depth-mup-{family}-sgd.txt").read_text()
        assert pairs.count("depth-mup alpha_a=") == 9
        for alpha_a, alpha_l in itertools.product(("0.5", "0.75", "1"), repeat=2):
            assert f"alpha_a={alpha_a} alpha_l={alpha_l}" in pairs
    for name in ("tied-adam.txt", "tied-encoder-decoder-adam.txt"):
        tied = (goldens.FOLDER / name).read_text()
        heads = [line for line in tied.splitlines() if line.endswith(("; adam", "untie it"))]
        assert [line.split()[0].rstrip(",:") for line in heads] == list(PRESETS)
        assert tied.count("a tied readout would need two rates") == 2


def test_the_tables_of_an_encoder_decoder_have_its_stacks_and_what_reads_the_memory():
    """Their numbers are those of `papers/test_stacks`."""
    table = (goldens.FOLDER / "depth-mup-encoder-decoder-adam.txt").read_text()
    for group in ("encoder.block.query", "block.cross.key", "encoder.block.relative_bias"):
        assert f"\n{group}: " in table
    for branch in ("encoder attention branch", "encoder mlp branch", "cross branch"):
        assert f"\n{branch}" in table


def test_control_a_changed_exponent_is_one_changed_line(monkeypatch: pytest.MonkeyPatch):
    make = PRESETS["mup"]

    @functools.wraps(make)
    def broken(**constants):
        preset = make(**constants)

        def rule(spec):
            row = preset.rule(spec)
            return row.times(adam=axis("embed") ** 0.25) if spec.role is Role.MLP_OUT else row

        return dataclasses.replace(preset, rule=rule)

    monkeypatch.setitem(PRESETS, "mup", broken)
    name = "mup-decoder-adam.txt"
    text = next(text for file, text in goldens.goldens() if file == name)
    committed = (goldens.FOLDER / name).read_text()
    differences = difflib.ndiff(committed.splitlines(), text.splitlines())
    changed = [line for line in differences if line[0] in "+-"]
    assert len(changed) == 2
    assert all("block.mlp_out:" in line for line in changed)
