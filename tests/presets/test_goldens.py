"""Every preset's table as committed text. A changed exponent is a changed line: `python -m scripts.goldens` writes it anew."""

from __future__ import annotations

import dataclasses
import difflib
import functools

import pytest

from mupax.presets import PRESETS, Role
from mupax.presets.power import axis
from scripts import goldens

pytestmark = pytest.mark.core


def test_every_table_is_the_committed_one():
    made = dict(goldens.goldens())
    assert made.keys() == {path.name for path in goldens.FOLDER.glob("*.txt")}
    for name, text in made.items():
        before, after = (goldens.FOLDER / name).read_text().splitlines(), text.splitlines()
        changed = "\n".join(difflib.unified_diff(before, after, "committed", "computed", lineterm="", n=0))
        assert not changed, f"{name}; if this is meant, run `python -m scripts.goldens`\n{changed}"


def test_every_preset_family_and_exponent_pair_is_there():
    names = {path.name for path in goldens.FOLDER.glob("*.txt")}
    assert {f"{name}-{family}-adam.txt" for name in PRESETS for family in ("vit", "decoder")} <= names
    pairs = (goldens.FOLDER / "pairs-depth-mup-decoder-sgd.txt").read_text()
    assert pairs.count("depth-mup alpha_a=") == 9
    assert all(f"alpha_a={a} alpha_l={b}" in pairs for a in ("0.5", "0.75", "1") for b in ("0.5", "0.75", "1"))
    tied = (goldens.FOLDER / "tied-adam.txt").read_text()
    assert [
        line.split()[0].rstrip(",:") for line in tied.splitlines() if line.endswith(("; adam", "untie it"))
    ] == list(PRESETS)
    assert tied.count("a tied readout would need two rates") == 2


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
    made = dict(goldens.goldens())["mup-decoder-adam.txt"]
    committed = (goldens.FOLDER / "mup-decoder-adam.txt").read_text()
    changed = [line for line in difflib.ndiff(committed.splitlines(), made.splitlines()) if line[0] in "+-"]
    assert len(changed) == 2
    assert all("block.mlp_out:" in line for line in changed)
