"""The record of what mupax does: which changes count, and that sections name what exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mupax.commands import table
from mupax.presets import PRESETS
from scripts.house import __main__ as house
from scripts.house import commands, inventory, tables
from scripts.house.compiled import without_metadata


def test_differences_name_what_was_removed_added_and_changed() -> None:
    before = {
        "losses": {"a": [1.0, 2.0]},
        "flags": {"eval": ["--step", "--json"]},
        "recipes": {"old": "1"},
    }
    current = {
        "losses": {"a": [1.0, 2.5]},
        "flags": {"eval": ["--json", "--samples"]},
        "recipes": {"new": "1"},
    }
    assert list(house.differences(before, before)) == []
    assert list(house.differences(before, current)) == [
        'recipes/old: removed, was "1"',
        'recipes/new: new, "1"',
        "flags/eval: removed --step",
        "flags/eval: new --samples",
        "losses/a: [1.0, 2.0] -> [1.0, 2.5]",
    ]


def test_an_order_and_a_last_digit_are_differences() -> None:
    assert list(house.differences({"a": ["x", "y"]}, {"a": ["y", "x"]})) == ["a: in another order"]
    assert list(house.differences({"a": 0.1}, {"a": 0.10000000000000002})) == [
        "a: 0.1 -> 0.10000000000000002"
    ]


def test_compare_exits_with_one_where_something_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"tables": {"mup": "1"}, "sizes": {"product": 3}}
    monkeypatch.setattr(house, "measured", values.__getitem__)
    assert house.main(["record", str(tmp_path), "--only", "tables", "sizes"]) == 0
    assert json.loads((tmp_path / "tables.json").read_text()) == {"mup": "1"}
    assert house.main(["compare", str(tmp_path), "--only", "tables", "sizes"]) == 0
    values["sizes"] = {"product": 4}
    capsys.readouterr()
    assert house.main(["compare", str(tmp_path), "--only", "tables", "sizes"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "tables: as recorded",
        "sizes: product: 3 -> 4",
        "sizes: 1 differences",
    ]
    assert (
        house.main(["compare", str(tmp_path), "--only", "losses"]) == 1
    )  # what was never recorded is no success
    assert "not recorded" in capsys.readouterr().out


def test_every_command_is_in_the_inventory() -> None:
    recorded = {" ".join(words[:count]) for words in commands.COMMANDS.values() for count in (1, 2)}
    for command in table.commands().values():
        assert command.name in recorded
        assert {f"{command.name} {row.name}" for row in command.subcommands} - recorded <= {
            "checkpoints list"
        }
    assert "--tokens" in inventory.flags(commands.COMMANDS["generate"])


def test_fields_and_exports_have_their_defaults_and_signatures() -> None:
    fields = dict(inventory.fields(inventory.Config))
    assert fields["checkpoint.keep"] == "<class 'int'> = 2"
    exports = inventory.exports()
    assert "fit" in exports["mupax.train"]
    assert exports["mupax.presets.Preset"]["logit_scale"].startswith("(self")


def test_a_digest_of_a_preset_changes_with_one_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "OPTIMIZERS", ("adam",))
    lines = list(tables.lines("mup", None, "vit"))
    monkeypatch.setitem(tables.CONSTANTS, "rates.query", 2.25)
    changed = [
        (line, expected)
        for line, expected in zip(lines, tables.lines("mup", None, "vit"), strict=True)
        if line != expected
    ]
    assert changed
    assert all("query" in line and "constants True" in line for line, _ in changed)
    assert "mup" in PRESETS


def test_metadata_is_left_out_of_hlo() -> None:
    text = (
        'HloModule m\n\nFileNames\n1 "a.py"\n\nENTRY main {\n'
        '  add = f32[2] add(x, y), metadata={op_name="jit(f)/add" source_file="a.py" source_line=3}\n}\n'
    )
    assert without_metadata(text) == "HloModule m\n\n\nENTRY main {\n  add = f32[2] add(x, y)\n}\n"
